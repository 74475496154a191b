"""Decides which calls save: the rules of `_schedule`, with this run's clock and measurements."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, replace
from typing import Any, final

from jaxckpt._run.schedule import Costs, SavePolicy, Schedule
from jaxckpt.multihost import Processes
from jaxckpt.types import Decision

_logger = logging.getLogger("jaxckpt")


@final
class Pace:
    """When a run saves. Every process that makes the same calls gets the same answers.

    Attributes:
        decision: The latest.
    """

    def __init__(self, policy: SavePolicy, processes: Processes) -> None:
        self.decision: Decision | None = None
        self._said: Decision | None = None  # by the rules
        self._processes = processes
        self._schedule = Schedule(policy=policy, processes=processes.count)
        self._costs = Costs()
        self._agreed: Costs | None = None
        self._explained = False
        self._started_s = time.monotonic()

    @property
    def needs_told(self) -> bool:
        """Whether the next step by the clock follows from what process 0 told in a save."""
        return self._schedule.policy.is_by_clock and self._processes.count > 1

    def decide(self, step: int, *, busy: bool) -> Decision:
        """Whether a step is due. What was said of it before holds until it is saved."""
        said = self._said
        if said is not None and said.step == step and self._schedule.last_step != step:
            self.decision = said
            return said
        self.decision = self._said = self._schedule.decide(
            step,
            now_s=time.monotonic(),
            started_s=self._started_s,
            costs=self._costs,
            busy=busy,
        )
        return self.decision

    def must(self, step: int, reason: str) -> Decision:
        """That a step is saved whatever the rules say."""
        self.decision = Decision(step=step, save=True, reason=reason)
        return self.decision

    def saving(self, step: int, *, entered_s: float, told: Any) -> dict[str, Any]:
        """Moves on to the next save; returns what to tell the other processes.

        Args:
            entered_s: When the call began.
            told: What process 0 told in the save before, where `needs_told`.
        """
        now_s, last = time.monotonic(), self._schedule
        step_s = None
        if last.last_step is not None and last.last_s is not None and step > last.last_step:
            step_s = (now_s - last.last_s) / (step - last.last_step)
        self._costs = replace(self._costs, step_s=step_s, blocked_s=now_s - entered_s)
        if told is not None:
            self._agreed = Costs(**told)
        self._schedule = last.saved(step, now_s=now_s, agreed=self._agreed)
        self._explain(self._agreed if self._processes.count > 1 else self._costs)
        return asdict(self._costs)

    def saved(self, seconds: float) -> None:
        """Takes note of how long a save took, from the call to the commit."""
        self._costs = replace(self._costs, save_s=seconds)

    def restored(self, seconds: float) -> None:
        """Takes note of how long a restore took."""
        self._costs = replace(self._costs, restore_s=seconds)

    def _explain(self, costs: Costs | None) -> None:
        """Says once by what interval `SavePolicy.auto` saves, and why."""
        mtbf_s = self._schedule.policy.job_mtbf_s
        if mtbf_s is None or costs is None or costs.save_s is None:
            return
        if not self._explained and self._processes.index == 0:
            _logger.info(
                "saving every %.0f s: sqrt(2 * cost * (MTBF + restart)) with a cost of %.3f s, an "
                "MTBF of the job of %.1f h and a restart of %.1f s; a save takes %.1f s",
                costs.interval_s(self._schedule.policy),
                costs.blocked_s or 0.0,
                mtbf_s / 3600,
                costs.restore_s or 0.0,
                costs.save_s,
            )
        self._explained = True
