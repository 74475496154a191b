"""Computes how much of a run's time has trained, and what would raise that. Pure.

    goodput = training time kept / wall time

kept     of each start, the steps up to the step from which training later went on, or the newest
         step saved, times the mean seconds of a step of that start
wall     from each start to the next; if the start ended on purpose, only to its end
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from jaxckpt._core.text import counted
from jaxckpt._run.ledger import ENOUGH, failures, learned_mtbf_s
from jaxckpt._run.schedule import Costs, SavePolicy
from jaxckpt.format.ledger import CLOSED, NOT_CLOSED, WENT_BACK, Start

LOST: Final = "killed or lost"
_RUNNING: Final = "running or killed"
_ON_PURPOSE: Final = (CLOSED, NOT_CLOSED, WENT_BACK)
_NOTABLE: Final = 0.001  # a gain in goodput


def duration(seconds: float) -> str:
    """Formats a duration in the unit that suits it.

    Example:
        >>> duration(0.25), duration(90), duration(90_000)
        ('0.25 s', '1.5 min', '25 h')
    """
    for unit, length_s in (("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.3g} {unit}"
    return f"{seconds:.3g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Sums up the time of one start, as far as the ledger shows. Times are in seconds."""

    start: Start
    end: str  # why it ended
    wall_s: float
    kept_s: float  # training that was not repeated
    lost: int  # steps trained again, or not saved when the run ended; at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Sums up the time of a run, as far as its ledger shows. Times are in seconds."""

    parts: Sequence[Part]  # in order
    wall_s: float
    kept_s: float
    blocked_s: float  # in which saves blocked training
    restore_s: float
    steps_lost: int
    failures: int
    mtbf_s: float  # of the job: measured from three failures on
    ends: Mapping[str, int]  # how many starts ended for each cause
    goodput: float | None  # from 0 to 1; None while no training is known
    costs: Costs  # of one save and of one restore, on average
    interval_s: float | None  # training between two saves, on average


def account(starts: Sequence[Start]) -> Account:
    """Adds up the lines of a ledger."""
    parts = _parts(starts)
    wall_s, kept_s = sum(part.wall_s for part in parts), sum(part.kept_s for part in parts)
    blocked_s, restore_s = sum(s.blocked_s for s in starts), sum(s.restore_s for s in starts)
    saves, restores = sum(s.saves for s in starts), sum(s.restore_s > 0 for s in starts)
    trained_s = sum(start.trained_s for start in starts)
    costs = Costs(
        blocked_s=blocked_s / saves if saves else None,
        save_s=sum(s.saving_s for s in starts) / saves if saves else None,
        restore_s=restore_s / restores if restores else None,
    )
    return Account(
        parts=parts,
        wall_s=wall_s,
        kept_s=kept_s,
        blocked_s=blocked_s,
        restore_s=restore_s,
        steps_lost=sum(part.lost for part in parts),
        failures=len(failures(starts)),
        mtbf_s=learned_mtbf_s(starts),
        ends=Counter(part.end for part in parts),
        goodput=kept_s / wall_s if trained_s and wall_s else None,
        costs=costs,
        interval_s=trained_s / saves if saves and trained_s else None,
    )


def _parts(starts: Sequence[Start]) -> list[Part]:
    steps = sum(map(_measured, starts))
    usual_s = sum(start.trained_s for start in starts) / steps if steps else 0.0
    followed = zip(starts, [*starts, None][1:], _kept(starts), strict=True)
    return [_part(start, after, upto, usual_s) for start, after, upto in followed]


def _part(start: Start, after: Start | None, upto: int, usual_s: float) -> Part:
    """Returns the account of one start.

    Args:
        after: The next start, if there is one.
        upto: The step up to which its steps are kept.
        usual_s: The seconds of a step, if this start has not measured them.
    """
    base, reached = _base(start), start.reached or 0
    kept = 0 if base is None else max(0, upto - base)
    lost = 0 if base is None else max(0, reached - max(upto, base))
    until_s = start.seen_s if after is None or start.end in _ON_PURPOSE else after.opened_s
    wall_s = max(0.0, until_s - start.opened_s)
    step_s = start.trained_s / n if (n := _measured(start)) else usual_s
    end = start.end or (_RUNNING if after is None else LOST)
    return Part(start=start, end=end, wall_s=wall_s, kept_s=min(wall_s, kept * step_s), lost=lost)


def _measured(start: Start) -> int:
    """Returns the number of steps whose time is known."""
    return max(0, (start.reached or 0) - (start.first or 0))


def _base(start: Start) -> int | None:
    """Returns the step that a start went on from; None if it has not trained."""
    return start.first if start.began is None or start.first is None else start.began


def _kept(starts: Sequence[Start]) -> list[int]:
    """Returns the step up to which the steps of each start are kept, whatever came later."""
    kept: list[int] = []
    last: int | None = None  # the lowest step that a later start went on from
    for start in reversed(starts):
        base = _base(start)
        kept.append(last if last is not None else start.saved or base or 0)
        if base is not None:
            last = min(base, kept[-1])
    return kept[::-1]


# --- what would raise it -------------------------------------------------------------------------


def expected(costs: Costs, mtbf_s: float, interval_s: float) -> float:
    """Returns the goodput to be expected of saves at an interval, from 0 to 1.

    Between two failures there is the MTBF and one restart. A failure loses half an interval on
    average, and the time that a save takes to be committed:

        (MTBF - (interval + blocked) / 2 - committed) / (MTBF + restart)
            * interval / (interval + blocked)
    """
    blocked_s = costs.blocked_s or 0.0
    lost_s = (interval_s + blocked_s) / 2 + (costs.save_s or 0.0)
    kept = max(0.0, mtbf_s - lost_s) / (mtbf_s + (costs.restore_s or 0.0))
    return kept * interval_s / (interval_s + blocked_s) if interval_s else 0.0


def best_interval_s(costs: Costs, mtbf_s: float) -> float:
    """Returns the interval of `SavePolicy.auto`."""
    return costs.interval_s(SavePolicy(job_mtbf_s=mtbf_s))


def described(found: Account) -> list[str]:
    """Describes an account in two sentences or three, the last of what would raise the goodput."""
    if found.goodput is None:
        return []
    ends = ", ".join(f"{count} {end}" for end, count in found.ends.items())
    lost = f", at least {counted(found.steps_lost, 'step')} lost" if found.steps_lost else ""
    took = f"saves blocked {duration(found.blocked_s)}, restores took {duration(found.restore_s)}"
    return [
        f"goodput {found.goodput:.1%} of {duration(found.wall_s)}: "
        f"{counted(len(found.parts), 'start')} ({ends}){lost}; {took}",
        *_advice(found),
    ]


def _advice(found: Account) -> list[str]:
    """Describes what would raise the goodput, by arithmetic from what was measured."""
    if not found.interval_s or not found.costs.blocked_s:
        return []
    known = "" if found.failures >= ENOUGH else ", assumed until three failures"
    mtbf = f"with an MTBF of {duration(found.mtbf_s)}{known}"
    best_s = best_interval_s(found.costs, found.mtbf_s)
    goodput_at = partial(expected, found.costs, found.mtbf_s)
    best = goodput_at(best_s)
    gain = best - goodput_at(found.interval_s)
    texts = [f"the interval between saves, {duration(found.interval_s)}, is near the best, {mtbf}"]
    if gain >= _NOTABLE:
        texts = [
            f"a save every {duration(best_s)} instead of {duration(found.interval_s)} would add "
            f"about {gain:.1%}, {mtbf}: SavePolicy.auto()"
        ]
    near = Costs(blocked_s=found.costs.blocked_s)  # no tier is faster
    gain = expected(near, found.mtbf_s, best_interval_s(near, found.mtbf_s)) - best
    if gain > _NOTABLE:
        texts.append(
            f"a local tier would add up to {gain:.1%}: a save takes "
            f"{duration(found.costs.save_s or 0.0)}, a restore "
            f"{duration(found.costs.restore_s or 0.0)}: LocalTier"
        )
    return texts
