"""Decides which steps of a run stay, and why. Pure."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from jaxckpt._core.check import (
    calling,
    check_count,
    check_flag,
    check_positive,
    check_type,
    explained,
)
from jaxckpt.format.run import is_free_in_root
from jaxckpt.types import StepInfo

_KEEP: Final = "KeepPolicy"
_FOLDER: Final = "a name for a directory beside the steps, such as 'deleted', or an absolute path"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepPolicy:
    """Decides which steps stay: the newest, and those kept by any rule. Without rules, all stay.

    If the newest is marked (see `SavePolicy.check_replicas`), so does the newest without a mark.

    Attributes:
        last: Keeps this many of the newest steps.
        every_steps: Keeps steps divisible by this number.
        every_seconds: From the oldest on, keeps each step saved this long after the last kept step.
        best: Keeps this many steps with the best `metric`; on a tie the newer step wins. Those
            without the metric, or with NaN, come last. While no step is ranked, all stay.
        metric: Name of a number in the metrics, or a function of the metrics that returns one; a
            step for which it raises `KeyError` is not ranked.
        mode: Whether a small ("min") or a large ("max") metric is better.
        newer_than_s: Keeps steps saved less than this many seconds ago.
        when: Keeps steps for which this function of the `StepInfo` is true.
        move_to: Where steps go instead of being deleted, in one rename: the name of a directory in
            the run's root, or an absolute path on the same file system.
        verified: Whether a manager reads each step back once after its commit, in the background of
            process 0, and deletes steps only while a newer step stays that it read without damage.

    Example:
        >>> policy = KeepPolicy(last=1, every_steps=100)
        >>> steps = [StepInfo(step=step, saved_s=0.0) for step in (50, 100, 150, 200, 250)]
        >>> sorted(policy.kept(steps, now_s=0.0))
        [100, 200, 250]
    """

    last: int | None = None
    every_steps: int | None = None
    every_seconds: float | None = None
    best: int | None = None
    metric: str | Callable[[Mapping[str, Any]], Any] | None = None
    mode: Literal["min", "max"] = "min"
    newer_than_s: float | None = None
    when: Callable[[StepInfo], Any] | None = None
    move_to: str | None = None
    verified: bool = False

    def __post_init__(self) -> None:
        check_count(_KEEP, last=self.last, every_steps=self.every_steps, best=self.best)
        check_positive(_KEEP, every_seconds=self.every_seconds, newer_than_s=self.newer_than_s)
        check_type(_KEEP, "when", self.when, Callable | None, "a function")
        check_flag(_KEEP, verified=self.verified)
        check_type(_KEEP, "move_to", self.move_to, str | None, _FOLDER)
        is_path = (to := self.move_to or "").startswith("/") and "\0" not in to
        if not (self.move_to is None or is_path or is_free_in_root(to)):
            raise ValueError(f"{_KEEP}: move_to must be {_FOLDER}, got {self.move_to!r}")
        metric = "a name in the metrics, or a function of them"
        check_type(_KEEP, "metric", self.metric, str | Callable | None, metric)
        if self.mode not in ("min", "max"):
            raise ValueError(f"{_KEEP}: mode must be 'min' or 'max', got {self.mode!r}")
        if self.best is not None and self.metric is None:
            raise ValueError(f"KeepPolicy(best={self.best}) needs metric=, the name to rank by")

    def fields(self) -> dict[str, Any]:
        """Returns the fields that are set, as JSON and so without functions."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("when", *(("best", "metric") if callable(self.metric) else ())):
            found.pop(name)
        return {name: x for name, x in found.items() if x is not None and x is not False}

    @property
    def has_rules(self) -> bool:
        """Returns whether there is any rule."""
        rules = (self.last, self.every_steps, self.every_seconds, self.best)
        return any(rule is not None for rule in (*rules, self.newer_than_s, self.when))

    @property
    def keeps_two(self) -> bool:
        """Returns whether the two newest steps always stay."""
        return not self.has_rules or (self.last or 0) >= 2

    @property
    def needs_facts(self) -> bool:
        """Returns whether a rule depends on more than the number of a step."""
        rules = (self.every_seconds, self.best, self.newer_than_s, self.when)
        return any(rule is not None for rule in rules)

    @property
    def metric_name(self) -> str | None:
        """Returns the name of the metric, or of the function that computes it."""
        return getattr(self.metric, "__name__", None) if callable(self.metric) else self.metric

    def kept(self, steps: Iterable[StepInfo], *, now_s: float) -> dict[int, str]:
        """Returns the steps that stay, each with its rules as one text."""
        return {step: ", ".join(why) for step, why in self.why(steps, now_s=now_s).items()}

    def why(self, steps: Iterable[StepInfo], *, now_s: float) -> dict[int, tuple[str, ...]]:
        """Returns the steps that stay, each with descriptions of the rules that keep it.

        Args:
            steps: All steps of the run, in any order.
            now_s: Wall clock, in seconds since 1970.

        Example:
            >>> policy = KeepPolicy(last=2, best=1, metric="loss")
            >>> losses = {10: 0.5, 20: 0.1, 30: 0.4, 40: 0.3}
            >>> policy.why(
            ...     [StepInfo(step=n, saved_s=0.0, metrics={"loss": x}) for n, x in losses.items()],
            ...     now_s=0.0,
            ... )
            {20: ('best 1 by loss',), 30: ('last 2',), 40: ('newest', 'last 2')}
        """
        infos = sorted(steps, key=lambda info: info.step)
        reasons: dict[int, tuple[str, ...]] = {}

        def keep(kept: Iterable[StepInfo], reason: str) -> None:
            for info in kept:
                reasons[info.step] = (*reasons.get(info.step, ()), reason)

        keep(infos[-1:], "newest")
        if any(info.differences for info in infos[-1:]):
            keep([info for info in infos if not info.differences][-1:], "newest without a mark")
        keep((info for info in infos if info.pinned), "pinned")
        if not self.has_rules:
            keep(infos, "no rule, so all")
        if self.last is not None:
            keep(infos[-self.last :], f"last {self.last}")
        if self.every_steps is not None:
            n = self.every_steps
            keep((info for info in infos if info.step % n == 0), f"every {n} steps")
        if self.every_seconds is not None:
            keep(_spaced(infos, self.every_seconds), f"every {self.every_seconds:g} s")
        if self.best is not None:
            ranked = self.ranked(infos)
            keep(ranked[: self.best], f"best {self.best} by {self.metric_name}")
            if not ranked:  # a misspelt metric must not delete the best step
                keep(infos, f"no step has the metric {self.metric_name}, so all")
            elif missing := max(0, self.best - len(ranked)):
                others = [i for i in infos if value_of(i.metrics, self.metric) is None]
                keep(others[-missing:], f"fewer than {self.best} have {self.metric_name}")
        if self.newer_than_s is not None:
            recent = (info for info in infos if info.saved_s >= now_s - self.newer_than_s)
            keep(recent, f"newer than {self.newer_than_s:g} s")
        if self.when is not None:
            with calling("KeepPolicy.when; no step was deleted"):
                keep((info for info in infos if self.when(info)), "when(...)")
        return dict(sorted(reasons.items()))

    def ranked(self, steps: Iterable[StepInfo]) -> list[StepInfo]:
        """Returns the steps that have the metric, the best first."""
        sign = 1 if self.mode == "min" else -1
        valued = [(x, i) for i in steps if (x := value_of(i.metrics, self.metric)) is not None]
        return [i for _, i in sorted(valued, key=lambda pair: (sign * pair[0], -pair[1].step))]

    def unranked(self, steps: Iterable[StepInfo]) -> str:
        """Describes steps that cannot be ranked: which metrics they have instead."""
        there = ", ".join(sorted({name for info in steps for name in info.metrics}))
        return (
            f"no step has a number {self.metric_name!r} in its metrics, which are {there or 'none'}"
        )


KeepPolicy.__init__ = explained("KeepPolicy")(KeepPolicy.__init__)


def value_of(
    metrics: Mapping[str, Any], metric: str | Callable[[Mapping[str, Any]], Any] | None
) -> float | None:
    """Returns the number to rank by, or None if it is missing or NaN."""
    value = None
    if callable(metric):
        with contextlib.suppress(KeyError), calling("KeepPolicy.metric"):
            value = metric(metrics)
            if isinstance(value, bool) or hasattr(value, "item"):  # of numpy or jax
                value = float(value)
    elif metric is not None:
        value = metrics.get(metric)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:  # NaN
        return None
    return value


def _spaced(infos: Sequence[StepInfo], seconds: float) -> list[StepInfo]:
    kept: list[StepInfo] = []
    for info in infos:
        # If the clock was set back, the distance of the steps is unknown: keep both.
        gap_s = info.saved_s - kept[-1].saved_s if kept else math.inf
        if gap_s >= seconds or gap_s < 0:
            kept.append(info)
    return kept
