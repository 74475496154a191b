"""When a run saves: the rules, and their answer for a step. Pure; clocks are arguments.

Every process decides for itself, and all must decide alike, without talking at steps that do not
save. So a rule is either a function of the step, or it goes by the clock, and then:

- one process alone looks at its clock;
- several turn the clock into a step number. In each save process 0 reports how long a step
  takes and what saves cost; every process adds that to the step of the next save. Until there
  is a measurement, the second save comes `FIRST_GUESS` steps after the first, and each gap is at
  most `FIRST_GUESS` times the gap before: steps look short while jax only dispatches them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from jaxckpt.types import Decision

FIRST_GUESS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePolicy:
    """When `CheckpointManager.save` saves. The rules add up; with none, it saves at every call.

    Attributes:
        every_steps: At steps divisible by it.
        every_seconds: When so much time has passed since the save before. Of several processes, at
            the step that is expected to be it.
        at_steps: At these.
        first: At the first call.
        on_preemption: Once, when the job is told that it will be stopped. Not a rule like the
            others: without any other, every call saves.
        continuous: Whenever the save before has ended.
        when: A function of the step. It must say the same in every process.
        job_mtbf_s: Mean time between failures of the whole job; the interval that loses the least
            time follows from that and from what saving costs. See `auto`.

    Example:
        >>> policy = SavePolicy(every_steps=100, at_steps=(1, 10))
        >>> [step for step in range(1, 250) if policy.matches(step)]
        [1, 10, 100, 200]
    """

    every_steps: int | None = None
    every_seconds: float | None = None
    at_steps: Sequence[int] | None = None
    first: bool | None = None
    on_preemption: bool = True
    continuous: bool | None = None
    when: Callable[[int], Any] | None = None
    job_mtbf_s: float | None = None

    def __post_init__(self) -> None:
        check_count(self, "every_steps")
        check_seconds(self, "every_seconds")
        check_seconds(self, "job_mtbf_s")
        for name in ("first", "on_preemption", "continuous"):
            check_flag(self, name)
        if self.at_steps is not None:
            if not isinstance(self.at_steps, Iterable):
                raise TypeError(f"SavePolicy.at_steps must be steps, not {self.at_steps!r}")
            steps = tuple(self.at_steps)
            if not all(type(step) is int and step >= 0 for step in steps):
                raise ValueError(f"SavePolicy.at_steps must be steps, not {steps}")
            object.__setattr__(self, "at_steps", steps)
        check_callable(self, "when")

    @classmethod
    def auto(cls, *, mtbf_hours: float, processes: int = 1, **rules: Any) -> SavePolicy:
        """Saves as often as loses the least time, given how often something fails.

        The interval between saves is sqrt(2 · cost · (MTBF + restart)), by Young (1974) and Daly
        (2006): `cost` is how long a save holds training up and `restart` how long a restore takes,
        both as measured in this run, and MTBF that of the job. It is never shorter than a save
        takes. One line of the log has the interval and the reason.

        Args:
            mtbf_hours: Mean time between failures of one process (its host), in hours.
            processes: How many there are. The job fails when one of them does: within a second
                with probability 1-(1-p)^processes, if p is that of one process.
            rules: Others to add.

        Example:
            >>> round(SavePolicy.auto(mtbf_hours=1_000, processes=500).job_mtbf_s / 60)
            120
        """
        for name, value, kind in (("mtbf_hours", mtbf_hours, float), ("processes", processes, int)):
            if isinstance(value, bool) or not isinstance(value, (kind, int)):
                raise TypeError(f"{name} must be a number, not {value!r}")
        if not 0 < mtbf_hours < math.inf or processes < 1:
            raise ValueError("mtbf_hours must be over 0, and processes 1 or more")
        each = min(1.0, 1 / (mtbf_hours * 3600))
        # 1-(1-p)^N, without losing a small p to rounding.
        job = -math.expm1(processes * math.log1p(-each)) if each < 1 else 1.0
        return cls(job_mtbf_s=1 / job, **rules)

    @property
    def is_by_clock(self) -> bool:
        """Whether a rule goes by the clock."""
        return bool(self.continuous) or (self.every_seconds or self.job_mtbf_s) is not None

    @property
    def has_rules(self) -> bool:
        """Whether there is any rule."""
        rules = (self.every_steps, self.at_steps, self.when)
        return self.is_by_clock or bool(self.first) or any(rule is not None for rule in rules)

    def matches(self, step: int) -> str | None:
        """The rule by which this step is saved whatever the time, or None."""
        if not self.has_rules:
            return "no rule, so every call"
        if self.every_steps is not None and step % self.every_steps == 0:
            return f"every_steps={self.every_steps}"
        if self.at_steps is not None and step in self.at_steps:
            return "at_steps"
        if self.when is not None and self.when(step):
            return "when"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a process has measured, in seconds; None if it has not yet.

    Attributes:
        step_s: One step of training, over the steps between the last two saves.
        blocked_s: How long a save held the caller up.
        save_s: A save from the call to the commit.
        restore_s: The restore that this run began with.
    """

    step_s: float | None = None
    blocked_s: float | None = None
    save_s: float | None = None
    restore_s: float | None = None

    def interval_s(self, policy: SavePolicy) -> float:
        """How far apart saves should be by the rules that go by the clock; inf if none does."""
        intervals = [math.inf]
        if policy.every_seconds is not None:
            intervals.append(policy.every_seconds)
        if policy.continuous:
            intervals.append(self.save_s or 0.0)
        if policy.job_mtbf_s is not None:
            best = math.sqrt(
                2 * (self.blocked_s or 0.0) * (policy.job_mtbf_s + (self.restore_s or 0.0))
            )
            intervals.append(max(best, self.save_s or 0.0))
        return min(intervals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Where a run is between its saves. `decide` asks it, `saved` moves it on.

    Attributes:
        processes: How many decide.
        started_s: When the run began, by the monotonic clock of this process.
        costs: As measured in this process.
        agreed: As process 0 measured them; reported in a save, the same one in every process.
        last_step, last_s: Of the latest save of this run, and when it was; None before the first.
        next_step: By the clock, where several processes decide.
        gap: The longest between two saves so far, in steps.
    """

    policy: SavePolicy
    processes: int = 1
    started_s: float = 0.0
    costs: Costs = field(default_factory=Costs)
    agreed: Costs | None = None
    last_step: int | None = None
    last_s: float | None = None
    next_step: int | None = None
    gap: int = field(default=1)

    @property
    def needs_agreement(self) -> bool:
        """Whether the next step by the clock follows from what process 0 measured."""
        return self.policy.is_by_clock and self.processes > 1

    def decide(self, step: int, *, now_s: float, busy: bool) -> Decision:
        """Returns whether to save at this step, and why.

        Args:
            now_s: The time by the clock of `started_s`. Looked at by a process that is alone.
            busy: Whether a save is under way. Looked at by a process that is alone.
        """
        reason = self.policy.matches(step)
        if reason is None and self.policy.first and self.last_step is None:
            reason = "first"
        if reason is None and self.policy.is_by_clock:
            if self.processes > 1:
                return self._decide_together(step)
            return self._decide_alone(step, now_s, busy)
        if reason is not None:
            return Decision(step=step, save=True, reason=reason)
        return Decision(step=step, save=False, reason=f"no rule of {self._rules()} names it")

    def _decide_alone(self, step: int, now_s: float, busy: bool) -> Decision:
        if self.policy.job_mtbf_s is not None and self.last_s is None:
            return Decision(step=step, save=True, reason="the first save measures what one costs")
        if self.policy.continuous and not busy:
            return Decision(step=step, save=True, reason="continuous: the save before has ended")
        since_s = now_s - (self.started_s if self.last_s is None else self.last_s)
        others = replace(self.policy, continuous=None)
        interval_s = self.costs.interval_s(others)
        if since_s >= interval_s:
            return Decision(step=step, save=True, reason=f"{since_s:.0f} s since the save before")
        if self.policy.continuous:
            return Decision(step=step, save=False, reason="the save before has not ended")
        left = f"{since_s:.0f} of {interval_s:.0f} s have passed since the save before"
        return Decision(step=step, save=False, reason=left)

    def _decide_together(self, step: int) -> Decision:
        if self.next_step is None:
            return Decision(
                step=step, save=True, reason="the first save measures the time of steps"
            )
        if step >= self.next_step:
            return Decision(
                step=step, save=True, reason=f"by the clock, from step {self.next_step}"
            )
        return Decision(
            step=step, save=False, reason=f"the next by the clock is step {self.next_step}"
        )

    def _rules(self) -> str:
        rules = {
            "every_steps": self.policy.every_steps,
            "at_steps": self.policy.at_steps,
            "when": self.policy.when,
            "first": self.policy.first,
        }
        return ", ".join(f"{name}={rule}" for name, rule in rules.items() if rule is not None)

    def saved(
        self, step: int, *, now_s: float, blocked_s: float = 0.0, agreed: Costs | None = None
    ) -> Schedule:
        """Returns the schedule after a save at `step` was handed on.

        Args:
            blocked_s: How long it held the caller up.
            agreed: What process 0 reported in an earlier save; if None, what it did before.
        """
        gap, step_s, agreed = self.gap, None, agreed or self.agreed
        if self.last_step is not None and self.last_s is not None:
            gap = max(self.gap, step - self.last_step)
            if step > self.last_step:
                step_s = (now_s - self.last_s) / (step - self.last_step)
        ahead = gap * FIRST_GUESS
        if agreed is not None and agreed.step_s:
            steps = agreed.interval_s(self.policy) / agreed.step_s
            ahead = max(1, math.floor(min(ahead, steps)))
        return replace(
            self,
            costs=replace(self.costs, step_s=step_s, blocked_s=blocked_s),
            agreed=agreed,
            last_step=step,
            last_s=now_s,
            next_step=step + ahead,
            gap=gap,
        )

    def explanation(self) -> str | None:
        """Returns by what interval `SavePolicy.auto` saves, and why, once that is measured."""
        mtbf_s, costs = self.policy.job_mtbf_s, self.agreed if self.processes > 1 else self.costs
        if mtbf_s is None or costs is None or costs.save_s is None:
            return None
        return (
            f"saving every {costs.interval_s(self.policy):.0f} s: sqrt(2 * cost * (MTBF + restart))"
            f" with a cost of {costs.blocked_s or 0.0:.3f} s, an MTBF of the job of "
            f"{mtbf_s / 3600:.1f} h and a restart of {costs.restore_s or 0.0:.1f} s; a save takes "
            f"{costs.save_s:.1f} s"
        )


# --- what the policies check of their fields ----------------------------------------------------


def check_count(policy: object, name: str) -> None:
    """Refuses a field that is neither None nor an int of 1 or more."""
    value = getattr(policy, name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{_name(policy, name)} must be an int, not {value!r}")
    if value < 1:
        raise ValueError(f"{_name(policy, name)} must be 1 or more, not {value}")


def check_seconds(policy: object, name: str) -> None:
    """Refuses a field that is neither None nor a positive number."""
    value = getattr(policy, name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{_name(policy, name)} must be a number, not {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"{_name(policy, name)} must be over 0, not {value}")


def check_flag(policy: object, name: str) -> None:
    """Refuses a field that is neither None nor a bool."""
    value = getattr(policy, name)
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{_name(policy, name)} must be True, False or None, not {value!r}")


def check_callable(policy: object, name: str) -> None:
    """Refuses a field that is neither None nor a function."""
    value = getattr(policy, name)
    if value is not None and not callable(value):
        raise TypeError(f"{_name(policy, name)} must be a function, not {value!r}")


def _name(policy: object, name: str) -> str:
    return f"{type(policy).__name__}.{name}"
