"""Orbax's policies, v0's and v1's, as those of jaxckpt.

A policy is known by the name of its class and its fields, so that the objects of Orbax itself are
understood too. A class of the program's own is asked with the arguments that Orbax passes.
"""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cache
from typing import Any, Final, Protocol

from jaxckpt._run.retention import KeepPolicy
from jaxckpt._run.schedule import SavePolicy
from jaxckpt.types import StepInfo

_logger = logging.getLogger("jaxckpt")

Steps = Callable[[], Sequence[StepInfo]]  # the steps of the run, the oldest first


@cache
def warn_once(text: str) -> None:
    """Logs a difference to Orbax the first time."""
    _logger.warning("%s", text)


# --- the classes -----------------------------------------------------------------------------


@dataclass
class CheckpointInfo:
    """A step, as policies see it."""

    step: int
    time: datetime.datetime
    metrics: Any = None


@dataclass(kw_only=True)
class DecisionContext:
    """What a save decision may depend on besides the steps."""

    is_saving_in_progress: bool
    reached_preemption: bool
    multiprocessing_options: Any = None


@dataclass(kw_only=True)
class PreservationContext:
    """What a preservation decision may depend on besides the steps: nothing."""


class SaveDecisionPolicy(Protocol):
    """Decides when to save; a program's own class defines `should_save`."""

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Returns whether a step is saved."""
        ...


@dataclass
class FixedIntervalPolicy(SaveDecisionPolicy):
    """Saves at multiples of a number."""

    interval: int

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Returns whether a step is saved."""
        return step.step % self.interval == 0


@dataclass
class SpecificStepsPolicy(SaveDecisionPolicy):
    """Saves at these steps."""

    steps: Container[int]

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Returns whether a step is saved."""
        return step.step in self.steps


@dataclass(kw_only=True)
class ContinuousCheckpointingPolicy(SaveDecisionPolicy):
    """Saves whenever the previous save has ended, and an interval has passed."""

    minimum_interval_secs: int | None = None

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Returns whether a step is saved."""
        if context.is_saving_in_progress or not previous_steps:
            return not context.is_saving_in_progress
        since = step.time - previous_steps[-1].time
        return since.total_seconds() >= (self.minimum_interval_secs or 0)


@dataclass
class PreemptionCheckpointingPolicy(SaveDecisionPolicy):
    """Saves when the job is about to be stopped."""

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Returns whether a step is saved."""
        return context.reached_preemption


@dataclass
class InitialSavePolicy(SaveDecisionPolicy):
    """Saves if the run has no step."""

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Returns whether a step is saved."""
        return not previous_steps


@dataclass
class AnySavePolicy(SaveDecisionPolicy):
    """Saves if any of these policies does."""

    policies: Sequence[Any]

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Returns whether a step is saved."""
        return any(p.should_save(step, previous_steps, context=context) for p in self.policies)


class PreservationPolicy(Protocol):
    """Decides which steps stay; a program's own class defines `should_preserve`."""

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Returns for each step whether it stays."""
        ...


class _Preserves(PreservationPolicy):
    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Returns for each step whether it stays; the newest always does."""
        steps = [
            StepInfo(step=c.step, saved_s=c.time.timestamp(), metrics=c.metrics or {})
            for c in checkpoints
        ]
        kept = keep_policy(self, lambda: steps).kept(steps, now_s=time.time())
        return [c.step in kept for c in checkpoints]


@dataclass
class PreserveAll(_Preserves):
    """Keeps every step."""


@dataclass
class LatestN(_Preserves):
    """Keeps this many of the newest steps, or all."""

    n: int | None = None


@dataclass
class EveryNSeconds(_Preserves):
    """Keeps steps that are this long apart."""

    interval_secs: int


@dataclass
class EveryNSteps(_Preserves):
    """Keeps multiples of a number; or, if not exact, steps that are this far apart."""

    interval_steps: int
    exact_interval: bool = True
    max_to_keep: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Returns for each step whether it stays."""
        kept: list[int] = []
        for step in (c.step for c in checkpoints):
            if self.exact_interval:
                is_due = step % self.interval_steps == 0
            else:
                is_due = not kept or step - kept[-1] >= self.interval_steps
            kept += [step] if is_due else []
        return _flags(checkpoints, kept, self.max_to_keep)


@dataclass
class EveryNStepsClosest(_Preserves):
    """Keeps the step that is closest to each multiple of a number, and the newest."""

    interval_steps: int
    max_to_keep: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Returns for each step whether it stays."""
        n, best = self.interval_steps, {}
        for step in (c.step for c in checkpoints):
            nearest = round(step / n)
            if nearest not in best or abs(step - nearest * n) <= abs(best[nearest] - nearest * n):
                best[nearest] = step
        kept = sorted({*best.values(), *(c.step for c in checkpoints[-1:])})
        return _flags(checkpoints, kept, self.max_to_keep)


def _flags(checkpoints: Sequence[Any], kept: Sequence[int], most: int | None) -> list[bool]:
    kept = kept if most is None else kept[max(0, len(kept) - most) :]
    return [c.step in kept for c in checkpoints]


@dataclass
class CustomSteps(_Preserves):
    """Keeps these steps."""

    steps: InitVar[Sequence[int]]
    _steps_set: set[int] = field(init=False)

    def __post_init__(self, steps: Sequence[int]) -> None:
        self._steps_set = set(steps)


@dataclass
class AnyPreservationPolicy(_Preserves):
    """Keeps what any of these policies keeps."""

    policies: Sequence[Any]


@dataclass(kw_only=True)
class BestN(_Preserves):
    """Keeps the steps with the best metric; with `reverse`, a small one is better."""

    get_metric_fn: Callable[[Any], float]
    reverse: bool = False
    n: int | None = None
    keep_checkpoints_without_metrics: bool = True


@dataclass
class LatestDuration(_Preserves):
    """Keeps steps that are newer than a duration."""

    duration: datetime.timedelta


# --- when to save ----------------------------------------------------------------------------

_When = Callable[[int], Any]


def _continuous(policy: Any) -> dict[str, Any]:
    seconds = policy.minimum_interval_secs
    return {"every_seconds": seconds, "first": True} if seconds else {"continuous": True}


_SAVE: Final[Mapping[str, Callable[[Any], dict[str, Any]]]] = {
    "FixedIntervalPolicy": lambda p: {"every_steps": p.interval} if p.interval else {},
    "SpecificStepsPolicy": lambda p: {"when": lambda step: step in p.steps},
    "ContinuousCheckpointingPolicy": _continuous,
    "PreemptionCheckpointingPolicy": lambda p: {"on_preemption": True},
    "InitialSavePolicy": lambda p: {"first": True},
}


def save_policy(policy: Any, steps: Steps, busy: Callable[[], bool] = lambda: False) -> SavePolicy:
    """Returns the policy of jaxckpt that saves when Orbax's does.

    Args:
        steps: Returns the steps of the run, for a policy of the program's own.
        busy: Returns whether a save is under way, for the same.
    """
    fields: dict[str, Any] = {"on_preemption": False}
    whens: list[_When] = []
    for one in _each(policy):
        rule = _SAVE.get(type(one).__name__, lambda p: {"when": _asks(p, steps, busy)})(one)
        for name, value in rule.items():
            if name == "when":
                whens.append(value)
            elif name in fields and name.startswith("every") and fields[name] != value:
                whens.append(SavePolicy(**{name: value}).matches)
            else:
                fields[name] = value
    # Without any rule jaxckpt saves at every call, and Orbax never.
    return SavePolicy(**fields, when=lambda step: any(when(step) for when in whens))


def _each(policy: Any) -> Iterable[Any]:
    if type(policy).__name__ not in ("AnySavePolicy", "AnyPreservationPolicy"):
        return [policy]
    return [one for below in policy.policies for one in _each(below)]


def _asks(policy: Any, steps: Steps, busy: Callable[[], bool]) -> _When:
    def ask(step: int) -> bool:
        context = DecisionContext(is_saving_in_progress=busy(), reached_preemption=False)
        now = CheckpointInfo(step, datetime.datetime.now(tz=datetime.UTC))
        return policy.should_save(now, previous_steps=infos(steps()), context=context)

    return ask


def infos(steps: Sequence[StepInfo]) -> list[CheckpointInfo]:
    """Returns steps as Orbax's policies see them."""
    return [CheckpointInfo(s.step, _time(s.saved_s), dict(s.metrics) or None) for s in steps]


def _time(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)


# --- what to keep ----------------------------------------------------------------------------


def _best(policy: Any) -> dict[str, Any]:
    if not policy.n:
        return _latest(policy)
    mode = "min" if policy.reverse else "max"
    rule = {"best": policy.n, "metric": policy.get_metric_fn, "mode": mode}
    if policy.keep_checkpoints_without_metrics:
        rule["when"] = lambda info: not info.metrics
    return rule


def _latest(policy: Any) -> dict[str, Any]:
    return {"all": True} if policy.n is None else {"last": max(policy.n, 1)}


def _every(policy: Any) -> dict[str, Any] | None:
    if policy.exact_interval and policy.max_to_keep is None:
        return {"every_steps": policy.interval_steps}
    return None


# The fields of KeepPolicy; "all" if every step stays, None if the policy itself has to be asked.
_KEEP: Final[Mapping[str, Callable[[Any], dict[str, Any] | None]]] = {
    "PreserveAll": lambda p: {"all": True},
    "LatestN": _latest,
    "EveryNSeconds": lambda p: (
        {"every_seconds": p.interval_secs} if p.interval_secs else {"all": 1}
    ),
    "EveryNSteps": _every,
    "CustomSteps": lambda p: {"when": lambda info: info.step in p._steps_set},
    "BestN": _best,
    "LatestDuration": lambda p: {"newer_than_s": p.duration.total_seconds()},
}


def keep_policy(policy: Any, steps: Steps, *, move_to: str | None = None) -> KeepPolicy:
    """Returns the policy of jaxckpt that keeps what Orbax's keeps, and the newest step.

    Args:
        steps: Returns the steps of the run, for a policy that looks at all of them at once.
        move_to: Where steps go instead of being deleted.
    """
    fields: dict[str, Any] = {}
    whens: list[Callable[[StepInfo], Any]] = []
    for one in _each(policy):
        rule = _KEEP.get(type(one).__name__, lambda p: None)(one)
        if rule is None:
            whens.append(_preserved(one, steps))
            continue
        if rule.pop("all", False):
            return KeepPolicy(move_to=move_to)
        if "best" in rule:
            warn_once(
                "jaxckpt keeps the newest step also if `best_fn` ranks it low; Orbax deletes it. "
                "See docs/orbax.md."
            )
        when = rule.pop("when", None)
        if rule.keys() & fields.keys():
            whens.append(_kept(KeepPolicy(**rule), steps))
        else:
            fields |= rule
        whens += [when] if when else []
    if whens:
        fields["when"] = lambda info: any(when(info) for when in whens)
    return KeepPolicy(**fields, move_to=move_to)


def _preserved(policy: Any, steps: Steps) -> Callable[[StepInfo], bool]:
    def stays(info: StepInfo) -> bool:
        known = sorted({s.step: s for s in (*steps(), info)}.values(), key=lambda s: s.step)
        flags = policy.should_preserve(infos(known), context=PreservationContext())
        return dict(zip((s.step for s in known), flags, strict=True))[info.step]

    return stays


def _kept(policy: KeepPolicy, steps: Steps) -> Callable[[StepInfo], bool]:
    return lambda info: info.step in policy.kept(steps(), now_s=time.time())
