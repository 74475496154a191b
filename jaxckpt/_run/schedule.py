"""Decides at which steps a run saves. Pure: clocks are arguments.

All processes must decide alike without communicating at steps that do not save. A rule that depends
on the step alone needs nothing else. For a rule by the clock:

- a single process reads its clock;
- several processes turn the time into a step number. At each save, process 0 reports how long
  steps and saves take, from which every process computes the step of the next save. Nothing is
  known at the first save, so process 0 reports once more at the call after it: a second save comes
  when it is due, and `FIRST_GUESS` steps after the first at the latest. A later gap is at most
  `FIRST_GUESS` times the longest before, since steps look short while jax only dispatches them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Final, Literal

from jaxckpt._core.check import (
    calling,
    check_count,
    check_flag,
    check_positive,
    check_type,
    explained,
)
from jaxckpt._core.select import Globs, check_kind
from jaxckpt.types import Decision

FIRST_GUESS: Final = 8
LEARNED: Final = "learned"
PRIOR_MTBF_S: Final = 24 * 3600.0  # of a job whose ledger does not show enough failures
_SAVE: Final = "SavePolicy"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePolicy:
    """Decides when `CheckpointManager.save` saves: if any rule matches, or always without rules.

    Attributes:
        every_steps: Saves at steps divisible by this number; 0 for never.
        every_seconds: Saves when this much time has passed since the previous save; 0 for never.
            Several processes agree on the step expected to reach it.
        at_steps: Saves at these steps.
        first: Saves at the first call, if the run lacks steps.
        on_preemption: Saves once when the job is about to be stopped. Does not count as a rule:
            without other fields, every call saves.
        continuous: Saves whenever the previous save has ended.
        when: A function of the step that must return the same in every process.
        job_mtbf_s: Mean time between failures of the whole job, or "learned". Saves at the interval
            that loses the least time, see `auto`.
        check_replicas: Checks that the replicas of each shard have the same bits, on all devices of
            all processes: at the first save, at the first after a restore, and once in this many
            saves; 0 for never. If they differ, a device computes wrongly, and the step is marked,
            see `docs/runs.md`. Not a rule either.
        may_differ: Globs over the paths of leaves whose replicas differ on purpose.
        max_write_bytes_per_s: Limits the rate at which each process writes to the run's directory,
            in saves and in uploads from a local tier, to leave training some of the network. Saves
            end without a limit at preemption and when the manager is closed. If None, no limit. Not
            a rule either.

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
    job_mtbf_s: float | Literal["learned"] | None = None
    check_replicas: int = 20
    may_differ: Globs = None
    max_write_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        check_count(_SAVE, least=0, every_steps=self.every_steps)
        check_positive(_SAVE, or_zero=True, every_seconds=self.every_seconds)
        mtbf_s = None if self.job_mtbf_s == LEARNED else self.job_mtbf_s
        check_positive(_SAVE, job_mtbf_s=mtbf_s, max_write_bytes_per_s=self.max_write_bytes_per_s)
        check_flag(
            _SAVE, first=self.first, on_preemption=self.on_preemption, continuous=self.continuous
        )
        check_type(_SAVE, "at_steps", self.at_steps, Iterable | None, "a list of steps")
        if self.at_steps is not None:
            steps = tuple(self.at_steps)
            if not all(isinstance(n, Integral) and type(n) is not bool and n >= 0 for n in steps):
                raise ValueError(f"{_SAVE}: at_steps must be ints of 0 or more, got {steps}")
            object.__setattr__(self, "at_steps", tuple(map(int, steps)))
        check_type(_SAVE, "when", self.when, Callable | None, "a function")
        check_count(_SAVE, least=0, check_replicas=self.check_replicas)
        check_kind(_SAVE, "may_differ", self.may_differ)

    @classmethod
    def auto(
        cls, *, mtbf_hours: float | None = None, processes: int | None = None, **rules: Any
    ) -> SavePolicy:
        """Returns a policy with the save interval that loses the least time to failures.

        The interval is sqrt(2 · cost · (MTBF + restart)), by Young (1974) and Daly (2006), but not
        shorter than a save. The run measures `cost`, the time for which a save blocks training,
        and `restart`, the time of a restore; MTBF is the job's. The log states the interval once.

        Args:
            mtbf_hours: Mean time between failures of one process (its host), in hours. If None, the
                job's is learned from the ledger of the run: 24 hours until that has three failures,
                then the time that the job ran divided by their number.
            processes: Number of processes, by default 1; only with `mtbf_hours`. The job fails with
                any of them: within a second with probability 1-(1-p)^processes, where p is the
                probability for one process.
            rules: Further fields of the policy.

        Example:
            >>> round(SavePolicy.auto(mtbf_hours=1_000, processes=500).job_mtbf_s / 60)
            120
        """
        if mtbf_hours is None and processes is not None:
            raise ValueError(f"{_SAVE}.auto: processes={processes} needs mtbf_hours=, that of one")
        if mtbf_hours is None:
            return cls(job_mtbf_s=LEARNED, **rules)
        return cls(
            job_mtbf_s=job_mtbf_s(mtbf_hours, 1 if processes is None else processes), **rules
        )

    @property
    def is_by_clock(self) -> bool:
        """Returns whether a rule depends on the clock."""
        return bool(self.continuous or self.every_seconds or self.job_mtbf_s)

    @property
    def has_rules(self) -> bool:
        """Returns whether there is any rule."""
        rules = (self.every_steps, self.every_seconds, self.at_steps, self.when)
        return self.is_by_clock or bool(self.first) or any(rule is not None for rule in rules)

    def matches(self, step: int) -> str | None:
        """Returns the rule that saves this step regardless of the time, or None."""
        if not self.has_rules:
            return "no rule, so every call"
        if self.every_steps and step % self.every_steps == 0:
            return f"every_steps={self.every_steps}"
        if self.at_steps is not None and step in self.at_steps:
            return "at_steps"
        if self.when is not None:
            with calling(f"SavePolicy.when at step {step}"):
                return "when" if self.when(step) else None
        return None


def job_mtbf_s(mtbf_hours: float, processes: int) -> float:
    """Returns the MTBF of a job, in seconds, from that of a process; see `SavePolicy.auto`."""
    for name, value, kind in (("mtbf_hours", mtbf_hours, float), ("processes", processes, int)):
        if isinstance(value, bool) or not isinstance(value, (kind, int)):
            raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0 < mtbf_hours < math.inf or processes < 1:
        raise ValueError("mtbf_hours must be positive and finite, and processes at least 1")
    each = min(1.0, 1 / (mtbf_hours * 3600))
    # 1-(1-p)^N, without losing a small p to rounding.
    job = -math.expm1(processes * math.log1p(-each)) if each < 1 else 1.0
    return 1 / job


SavePolicy.__init__ = explained("SavePolicy")(SavePolicy.__init__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Times that a process has measured; None until measured."""

    step_s: float | None = None  # mean training step between the last two saves
    blocked_s: float | None = None  # how long a save blocked the caller
    save_s: float | None = None  # from the call of a save to its commit
    restore_s: float | None = None
    mtbf_s: float | None = None  # of the job, as its ledger shows

    def mtbf_of(self, policy: SavePolicy) -> float | None:
        """Returns the MTBF by which a policy saves, if it saves by one."""
        if policy.job_mtbf_s == LEARNED:
            return self.mtbf_s or PRIOR_MTBF_S
        return policy.job_mtbf_s

    def interval_s(self, policy: SavePolicy) -> float:
        """Returns the interval between saves by the rules on the clock, or inf."""
        intervals = [math.inf]
        if policy.every_seconds:
            intervals.append(policy.every_seconds)
        if policy.continuous:
            intervals.append(self.save_s or 0.0)
        if (mtbf_s := self.mtbf_of(policy)) is not None:
            best = math.sqrt(2 * (self.blocked_s or 0.0) * (mtbf_s + (self.restore_s or 0.0)))
            intervals.append(max(best, self.save_s or 0.0))
        return min(intervals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The state of a run between saves. Times are by the monotonic clock of this process."""

    policy: SavePolicy
    processes: int = 1
    started_s: float = 0.0
    is_new: bool = True  # whether the run had no step when it was opened
    costs: Costs = field(default_factory=Costs)  # measured here
    agreed: Costs | None = None  # measured by process 0; equal in every process
    last_step: int | None = None  # of the latest save
    last_s: float | None = None  # when that was
    next_step: int | None = None  # by the clock, if several processes decide
    gap: int = 1  # the longest between two saves so far, in steps

    def decide(self, step: int, *, now_s: float, busy: bool) -> Decision:
        """Returns whether to save at this step, and why.

        Args:
            now_s: The time. Several processes ignore it.
            busy: Whether a save is under way. Several processes ignore it.
        """
        reason = self.policy.matches(step)
        if reason is None and self.policy.first and self.is_new and self.last_step is None:
            reason = "first"
        if reason is None and self.policy.is_by_clock:
            if self.processes > 1:
                return self._decide_together(step)
            return self._decide_alone(step, now_s, busy)
        why = reason or f"no rule matches: {self._rules()}"
        return Decision(step=step, save=reason is not None, reason=why)

    def _decide_alone(self, step: int, now_s: float, busy: bool) -> Decision:
        if self.policy.job_mtbf_s is not None and self.last_s is None:
            return Decision(step=step, save=True, reason="the first save measures its cost")
        if self.policy.continuous and not busy:
            return Decision(step=step, save=True, reason="continuous: the previous save has ended")
        since_s = now_s - (self.started_s if self.last_s is None else self.last_s)
        others = replace(self.policy, continuous=None)
        interval_s = self.costs.interval_s(others)
        if since_s >= interval_s:
            return Decision(step=step, save=True, reason=f"{since_s:.0f} s since the previous save")
        if self.policy.continuous:
            return Decision(step=step, save=False, reason="the previous save has not ended")
        left = f"{since_s:.0f} of {interval_s:.0f} s since the previous save"
        return Decision(step=step, save=False, reason=left)

    def _decide_together(self, step: int) -> Decision:
        if self.next_step is None:
            return Decision(step=step, save=True, reason="the first save starts the measurement")
        is_due = step >= self.next_step
        when = f"{'due from' if is_due else 'not due before'} step {self.next_step}"
        return Decision(step=step, save=is_due, reason=f"by the clock, {when}")

    def _rules(self) -> str:
        names = ("every_steps", "at_steps", "when", "first")
        rules = {name: getattr(self.policy, name) for name in names}
        return ", ".join(f"{name}={rule}" for name, rule in rules.items() if rule is not None)

    def costs_at(self, step: int, *, now_s: float) -> Costs:
        """Returns the costs measured here, with the mean time of the steps since the last save."""
        step_s = None
        if self.last_step is not None and self.last_s is not None and step > self.last_step:
            step_s = (now_s - self.last_s) / (step - self.last_step)
        return replace(self.costs, step_s=step_s)

    def saved(
        self, step: int, *, now_s: float, blocked_s: float = 0.0, agreed: Costs | None = None
    ) -> Schedule:
        """Returns the schedule after a save at `step` has started.

        Args:
            blocked_s: How long the save blocked the caller.
            agreed: The report of process 0 at this save. If None, the report known so far.
        """
        agreed = agreed or self.agreed
        gap = self.gap if self.last_step is None else max(self.gap, step - self.last_step)
        return replace(
            self,
            costs=replace(self.costs_at(step, now_s=now_s), blocked_s=blocked_s),
            agreed=agreed,
            last_step=step,
            last_s=now_s,
            next_step=None if self.processes == 1 else step + self._ahead(gap, agreed),
            gap=gap,
        )

    def needs_pace(self, step: int) -> bool:
        """Returns whether this is the first call after the first save of several processes."""
        is_first = self.agreed is not None and self.agreed.step_s is None
        is_after = self.last_step is not None and step > self.last_step
        return is_first and is_after and self.policy.is_by_clock

    def paced(self, agreed: Costs) -> Schedule:
        """Returns the schedule with the report of process 0 at that call."""
        if self.last_step is None or agreed.save_s is None:  # the first save has not ended
            return replace(self, agreed=agreed)
        return replace(
            self, agreed=agreed, next_step=self.last_step + self._ahead(self.gap, agreed)
        )

    def _ahead(self, gap: int, agreed: Costs | None) -> int:
        """Returns how many steps after a save the next one is due."""
        ahead = gap * FIRST_GUESS
        if agreed is None or not agreed.step_s:
            return ahead
        return max(1, math.floor(min(ahead, agreed.interval_s(self.policy) / agreed.step_s)))

    def explanation(self) -> str | None:
        """Describes the interval of `SavePolicy.auto`; None until it is measured."""
        costs = self.agreed if self.processes > 1 else self.costs
        if costs is None or costs.save_s is None or (mtbf_s := costs.mtbf_of(self.policy)) is None:
            return None
        return (
            f"saving every {costs.interval_s(self.policy):.0f} s: sqrt(2 * cost * (MTBF + restart))"
            f" with a cost of {costs.blocked_s or 0.0:.3f} s, a job MTBF of {mtbf_s / 3600:.1f} h "
            f"and a restart of {costs.restore_s or 0.0:.1f} s; a save takes {costs.save_s:.1f} s"
        )
