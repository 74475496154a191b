"""Decides which steps are due by the rules of a run, alike in all processes.

Rules by the clock depend on measured times, which differ: all processes use those of process 0.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast, final

from jaxckpt._core.log import logger
from jaxckpt._run.schedule import Costs, Schedule
from jaxckpt.errors import ProcessesDisagree
from jaxckpt.multihost import Processes
from jaxckpt.types import Decision


@final
@dataclass
class DueSteps:
    """When steps are due in the directory and, if there are tiers, on the local disk."""

    schedules: list[Schedule]  # of the directory, then of the local disk
    processes: Processes
    session: str  # begins the names of rounds
    _lock: threading.Lock = field(default_factory=threading.Lock)  # guards `schedules`
    _known: tuple[Decision, bool] | None = None
    _explained: bool = False

    @property
    def last_step(self) -> int:
        """Returns the step for which `move_on` was called last, or -1."""
        last = self.schedules[-1].last_step
        return -1 if last is None else last

    def decide(self, step: int, is_busy: Callable[[], bool]) -> tuple[Decision, bool]:
        """Returns the decision, and whether the step goes to the directory.

        The answer holds until the step is saved, even as time passes, or until `forget`.
        """
        known = self._known
        if known is None or known[0].step != step or self.last_step == step:
            for i, schedule in enumerate(self.schedules):
                if self.processes.count > 1 and schedule.needs_pace(step):
                    agreed = self.agree(f"manager {self.session}/pace", step)
                    with self._lock:
                        self.schedules[i] = self.schedules[i].paced(agreed)
            busy, now_s = is_busy(), time.monotonic()
            found = [one.decide(step, now_s=now_s, busy=busy) for one in self.schedules]
            first = next((one for one in found if one.save), found[0])
            known = self._known = first, found[0].save
        return known

    def forget(self) -> None:
        """Has the rules asked again about a step; by all processes."""
        self._known = None

    def record(self, **costs: float) -> None:
        """Records measured times, by fields of `Costs`."""
        with self._lock:
            self.schedules = [replace(s, costs=replace(s.costs, **costs)) for s in self.schedules]

    @property
    def is_by_clock(self) -> bool:
        """Returns whether the processes have to agree on the measured times before a save."""
        return self.processes.count > 1 and any(s.policy.is_by_clock for s in self.schedules)

    def agree(self, name: str, step: int) -> Costs:
        """Returns the costs that process 0 has measured, from which all compute the next step."""
        mine = asdict(self.schedules[-1].costs_at(step, now_s=time.monotonic()))
        agreed = cast("dict[str, Any]", self.processes.agree(name, {**mine, "step": step}))
        if (theirs := agreed.pop("step")) != step:
            raise ProcessesDisagree(
                f"process 0 asks whether to save step {theirs}, this process asks about {step}. "
                "Every process calls should_save and save, for the same steps.",
                {0: f"step {theirs}"},
            )
        return Costs(**agreed)

    def move_on(
        self, step: int, entered_s: float, agreed: Costs | None, *, is_durable: bool
    ) -> float:
        """Goes on after a step, alike in all processes; `save` was called at `entered_s`.

        Returns:
            How long the save blocked the caller.
        """
        blocked_s = (now_s := time.monotonic()) - entered_s
        with self._lock:
            self.schedules = [
                one.saved(step, now_s=now_s, blocked_s=blocked_s, agreed=agreed)
                if i or is_durable
                else one
                for i, one in enumerate(self.schedules)
            ]
        if not self._explained and (text := self.schedules[0].explanation()) is not None:
            self._explained = True
            if self.processes.index == 0:
                logger.info("%s", text)
        return blocked_s
