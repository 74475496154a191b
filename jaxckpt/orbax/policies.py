"""Converts Orbax's policies, v0's and v1's, to policies of jaxckpt.

A policy is known by the name of its class and its fields, so that the objects of Orbax itself are
understood too. A class of the program's own is asked with the arguments that Orbax passes.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Protocol

from jaxckpt import KeepPolicy, SavePolicy
from jaxckpt.types import StepInfo

_logger = logging.getLogger("jaxckpt")

Steps = Callable[[], Sequence[StepInfo]]  # the steps of the run, the oldest first


@cache
def warn_once(text: str) -> None:
    """Logs a difference to Orbax the first time."""
    _logger.warning("%s", text)


# --- the classes -----------------------------------------------------------------------------


@dataclass(unsafe_hash=True)
class CheckpointInfo:
    """A step, as policies see it; two infos are equal if step and time are equal.

    Attributes:
        step: Its number.
        time: When it was saved.
        metrics: Its numbers by name, or None.
    """

    step: int
    time: datetime.datetime
    metrics: Any = field(default=None, compare=False)


@dataclass
class MultiprocessingOptions:
    """Names who takes part in a save; only the defaults are supported.

    Attributes:
        primary_host: The process that leads.
        active_processes: The processes that take part; None for all.
        barrier_sync_key_prefix: No effect.
    """

    primary_host: int | None = 0
    active_processes: set[int] | None = None
    barrier_sync_key_prefix: str | None = None


@dataclass(kw_only=True)
class DecisionContext:
    """The facts that a policy for saving receives.

    Attributes:
        is_saving_in_progress: Whether a save is under way.
        reached_preemption: Whether the job is being stopped.
        multiprocessing_options: Who takes part.
    """

    is_saving_in_progress: bool = False
    reached_preemption: bool = False
    multiprocessing_options: MultiprocessingOptions = field(default_factory=MultiprocessingOptions)


@dataclass
class PreservationContext:
    """The facts that a policy for keeping receives: none."""


class SaveDecisionPolicy(Protocol):
    """Decides when to save; a program's own class defines `should_save`."""

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Returns whether a step is saved; the clock is asked only by a manager."""
        policy = save_policy(self, list, is_new=lambda: not previous_steps)
        is_last = policy.on_preemption and context.reached_preemption
        by_time = bool(policy.continuous) and not context.is_saving_in_progress
        return is_last or by_time or policy.matches(step.step) is not None


@dataclass
class FixedIntervalPolicy(SaveDecisionPolicy):
    """Saves multiples of `interval`."""

    interval: int


@dataclass
class SpecificStepsPolicy(SaveDecisionPolicy):
    """Saves the steps in `steps`."""

    steps: Container[int]


@dataclass
class ContinuousCheckpointingPolicy(SaveDecisionPolicy):
    """Saves whenever no save is under way, at most every `minimum_interval_secs`."""

    minimum_interval_secs: int | None = None


@dataclass
class PreemptionCheckpointingPolicy(SaveDecisionPolicy):
    """Saves when the job is being stopped."""


@dataclass
class InitialSavePolicy(SaveDecisionPolicy):
    """Saves if the run lacks steps."""


@dataclass
class AnySavePolicy(SaveDecisionPolicy):
    """Saves if one of `policies` does."""

    policies: Sequence[SaveDecisionPolicy]


class PreservationPolicy(Protocol):
    """Decides which steps stay; a program's own class defines `should_preserve`."""

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Returns for each step whether it stays; a manager keeps the newest, too."""
        del context
        steps = [
            StepInfo(step=c.step, saved_s=c.time.timestamp(), metrics=c.metrics or {})
            for c in checkpoints
        ]
        now_s = datetime.datetime.now(tz=datetime.UTC).timestamp()
        why = keep_policy(self, lambda: steps).why(steps, now_s=now_s)
        return [why.get(c.step, ("newest",)) != ("newest",) for c in checkpoints]


@dataclass
class PreserveAll(PreservationPolicy):
    """Keeps every step."""


@dataclass
class LatestN(PreservationPolicy):
    """Keeps the newest `n` steps; all if None."""

    n: int | None = None


@dataclass
class EveryNSeconds(PreservationPolicy):
    """Keeps steps that were saved at least `interval_secs` apart."""

    interval_secs: int


@dataclass
class LatestDuration(PreservationPolicy):
    """Keeps the steps that are not older than `duration`."""

    duration: datetime.timedelta


@dataclass
class AnyPreservationPolicy(PreservationPolicy):
    """Keeps the steps that any of `policies` keeps."""

    policies: Sequence[PreservationPolicy]


@dataclass
class CustomSteps(PreservationPolicy):
    """Keeps the steps in `steps`."""

    steps: Sequence[int]


@dataclass(kw_only=True)
class BestN(PreservationPolicy):
    """Keeps the best steps.

    Attributes:
        get_metric_fn: Returns the number to rank by from the metrics of a step.
        reverse: Whether lower is better.
        n: How many; all if None.
        keep_checkpoints_without_metrics: Whether to keep the steps without metrics, too.
    """

    get_metric_fn: Callable[[Any], float]
    reverse: bool = False
    n: int | None = None
    keep_checkpoints_without_metrics: bool = True


@dataclass
class EveryNSteps(PreservationPolicy):
    """Keeps steps at an interval.

    Attributes:
        interval_steps: The interval.
        exact_interval: Whether to keep multiples of it, not steps that are as far apart.
        max_to_keep: How many, the newest; all if None.
    """

    interval_steps: int
    exact_interval: bool = True
    max_to_keep: int | None = None


@dataclass
class EveryNStepsClosest(PreservationPolicy):
    """Keeps the step that is closest to each multiple of `interval_steps`.

    Attributes:
        interval_steps: The interval.
        max_to_keep: How many, the newest; all if None.
    """

    interval_steps: int
    max_to_keep: int | None = None


# --- when to save ----------------------------------------------------------------------------

_When = Callable[[int], Any]


_SAVE: Final[Mapping[str, Callable[[Any], dict[str, Any]]]] = {
    "FixedIntervalPolicy": lambda p: (  # 0 raises, as with Orbax; for jaxckpt it means never
        {"when": lambda step: step % 0} if p.interval == 0 else {"every_steps": p.interval or 0}
    ),
    "SpecificStepsPolicy": lambda p: {"when": lambda step: step in p.steps},
    "ContinuousCheckpointingPolicy": lambda p: (
        {"every_seconds": seconds, "first": True}
        if (seconds := p.minimum_interval_secs)
        else {"continuous": True}
    ),
    "PreemptionCheckpointingPolicy": lambda p: {"on_preemption": True},
    "InitialSavePolicy": lambda p: {"first": True},
}


def save_policy(
    policy: Any,
    steps: Steps,
    busy: Callable[[], bool] = lambda: False,
    is_new: Callable[[], bool] = lambda: True,
) -> SavePolicy:
    """Returns the policy of jaxckpt that saves when Orbax's does.

    Args:
        steps: Returns the steps of the run, for a policy of the program's own.
        busy: Returns whether a save is under way, for the same.
        is_new: Returns whether the run has no steps; may be true again, unlike with jaxckpt's own.
    """
    fields: dict[str, Any] = {"on_preemption": False}
    whens: list[_When] = []
    for one in _each(policy):
        rule = _SAVE.get(type(one).__name__, lambda p: {"when": _asks(p, steps, busy)})(one)
        for name, value in rule.items():
            if name == "first":
                whens.append(lambda _: is_new())
            elif name == "when":
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


def infos(steps: Sequence[StepInfo]) -> list[Any]:
    """Returns steps as Orbax's policies see them."""
    return [CheckpointInfo(s.step, _time(s.saved_s), dict(s.metrics) or None) for s in steps]


def _time(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)


# --- what to keep ----------------------------------------------------------------------------


def _best(policy: Any) -> dict[str, Any]:
    if not policy.n:
        return _latest(policy)
    mode = "min" if policy.reverse else "max"

    def rank(metrics: Mapping[str, Any]) -> Any:
        with contextlib.suppress(Exception):  # `check_ranks` raises it in the caller's thread
            return policy.get_metric_fn(metrics)

    def when(info: StepInfo) -> bool:
        if not info.metrics:
            return policy.keep_checkpoints_without_metrics
        return rank(info.metrics) is None  # then Orbax deletes no step

    return {"best": policy.n, "metric": rank, "mode": mode, "when": when}


def check_ranks(policy: Any, steps: Steps) -> None:
    """Raises the error of a `best_fn`, or of values without an order, once it has to rank steps."""
    for one in _each(policy):
        if type(one).__name__ == "BestN" and one.n and len(known := steps()) > one.n:
            values = sorted(one.get_metric_fn(info.metrics) for info in known if info.metrics)
            if not all(isinstance(x, (int, float)) or hasattr(x, "item") for x in values):
                warn_once("`best_fn` returns text or no number: jaxckpt ranks no step; all stay.")


def _latest(policy: Any) -> dict[str, Any]:
    if policy.n == 0:
        warn_once("A policy that keeps no step: jaxckpt keeps the newest. See docs/orbax.md.")
        return {"when": lambda info: False}
    return {"all": True} if policy.n is None else {"last": policy.n}


def _custom(policy: Any) -> Container[int]:
    return getattr(policy, "_steps_set", None) or policy.steps  # Orbax hides them


def _apart(policy: Any, steps: Sequence[int]) -> list[int]:
    """Returns the steps that `EveryNSteps` keeps: multiples, or else steps that are far apart."""
    n, kept = policy.interval_steps, list[int]()
    for step in steps:
        is_apart = not kept or step - kept[-1] >= n
        kept += [step] if (step % n == 0 if policy.exact_interval else is_apart) else []
    return kept


def _closest(policy: Any, steps: Sequence[int]) -> list[int]:
    """Returns the step that is closest to each multiple, and the newest."""
    n, best = policy.interval_steps, {}
    if n == 0:
        raise ValueError("interval_steps must not be 0")
    for step in steps:
        nearest = round(step / n)
        if nearest not in best or abs(step - nearest * n) <= abs(best[nearest] - nearest * n):
            best[nearest] = step
    return sorted({*best.values(), *steps[-1:]})


# The steps kept by policies that look at all of them at once.
_LISTED: Final = {"EveryNSteps": _apart, "EveryNStepsClosest": _closest}


# The fields of KeepPolicy; "all" if every step stays, None if the policy itself has to be asked.
_KEEP: Final[Mapping[str, Callable[[Any], dict[str, Any] | None]]] = {
    "PreserveAll": lambda p: {"all": True},
    "LatestN": _latest,
    "EveryNSeconds": lambda p: (
        {"every_seconds": p.interval_secs} if p.interval_secs else {"all": 1}
    ),
    "EveryNSteps": lambda p: (
        {"every_steps": p.interval_steps} if p.exact_interval and p.max_to_keep is None else None
    ),
    "CustomSteps": lambda p: {"when": lambda info: info.step in _custom(p)},
    "BestN": _best,
    "LatestDuration": lambda p: {"newer_than_s": p.duration.total_seconds()},
}


def keep_policy(policy: Any, steps: Steps, *, move_to: str | None = None) -> KeepPolicy:
    """Returns jaxckpt's policy that keeps the same steps as Orbax's policy, and the newest step.

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
        if listed := _LISTED.get(type(policy).__name__):
            kept = listed(policy, [s.step for s in known])
            return info.step in kept[max(0, len(kept) - (policy.max_to_keep or len(kept))) :]
        flags = policy.should_preserve(infos(known), context=PreservationContext())
        return dict(zip((s.step for s in known), flags, strict=True))[info.step]

    return stays


def _kept(policy: KeepPolicy, steps: Steps) -> Callable[[StepInfo], bool]:
    return lambda info: info.step in policy.kept(steps(), now_s=time.time())
