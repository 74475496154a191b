"""How much of a run's time has trained, from the lines of its ledger."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from jaxckpt._run.schedule import PRIOR_MTBF_S, Costs
from jaxckpt.format.ledger import CLOSED, FAILED, PREEMPTED, WENT_BACK, Start
from jaxckpt.pages.goodput import (
    Account,
    account,
    best_interval_s,
    described,
    expected,
    learned_mtbf_s,
)


def start(opened_s, seen_s, began, reached, saved, end="", **facts):
    """A start that took a second for each step, and saw all of them."""
    first = None if reached is None else began + 1
    trained_s = 0.0 if first is None else float(reached - first)
    facts = {"start": str(opened_s), "first": first, "trained_s": trained_s, **facts}
    return Start(
        opened_s=opened_s,
        seen_s=seen_s,
        began=began,
        reached=reached,
        saved=saved,
        end=end,
        **facts,
    )


def test_a_run_that_never_failed_keeps_what_it_saved():
    """The 10 s before its first step, and 5 s after its last save, are not training kept."""
    found = account([start(0, 115, 0, 105, 100, CLOSED)])

    assert (found.kept_s, found.wall_s, found.steps_lost, found.failures) == (100, 115, 5, 0)
    assert found.goodput == pytest.approx(100 / 115)


def test_a_killed_start_keeps_the_steps_up_to_the_one_restored():
    """Its wall time lasts until the next start, and nobody wrote when it died."""
    found = account([start(0, 90, 0, 90, 80), start(200, 300, 80, 180, 180, CLOSED)])

    assert [part.lost for part in found.parts] == [10, 0]
    assert [part.wall_s for part in found.parts] == [200, 100]
    assert found.kept_s == 80 + 100
    assert (found.failures, found.ends) == (1, {"killed or lost": 1, CLOSED: 1})


def test_a_pause_after_a_close_is_not_wall_time():
    found = account(
        [start(0, 100, 0, 100, 100, CLOSED), start(9_000, 9_100, 100, 200, 200, CLOSED)]
    )

    assert (found.wall_s, found.kept_s, found.goodput) == (200, 200, 1)


def test_steps_beyond_the_last_line_are_kept_if_they_were_restored():
    """A line may be two minutes older than the last save before a kill."""
    found = account([start(0, 50, 0, 50, 50), start(130, 150, 120, 140, 140, CLOSED)])

    assert [part.kept_s for part in found.parts] == [120, 20]
    assert found.steps_lost == 0


def test_a_start_that_goes_back_far_loses_the_steps_of_several_starts():
    found = account(
        [
            start(0, 100, 0, 100, 100, CLOSED),
            start(100, 200, 100, 200, 200, CLOSED),
            start(200, 300, 50, 150, 150, CLOSED),
        ]
    )

    assert [part.kept_s for part in found.parts] == [50, 0, 100]
    assert [part.lost for part in found.parts] == [50, 100, 0]


def test_a_start_that_trained_nothing_neither_keeps_nor_loses():
    """It looked at an older step, say, and was closed."""
    looked = start(150, 160, 20, None, None, CLOSED)
    found = account([start(0, 100, 0, 100, 100, CLOSED), looked])

    assert (found.kept_s, found.wall_s, found.steps_lost) == (100, 110, 0)


def test_nothing_is_said_of_a_run_without_training():
    for starts in ([], [Start(start="a", opened_s=5, seen_s=5)]):
        found = account(starts)

        assert found.goodput is None
        assert described(found) == []


def test_what_would_raise_goodput_is_said():
    """Saves 100 times as far apart as they should be, and commits that take ten minutes."""
    lines = [
        start(9_000 * n, 9_000 * n + 8_000, 4_000 * n, 4_000 * n + 8_000, 4_000 * (n + 1), **facts)
        for n, facts in enumerate([{"saves": 2, "blocked_s": 2.0, "saving_s": 1_200.0}] * 5)
    ]
    [said, interval, tier] = described(account(lines))

    assert said.startswith("goodput 45.5% of 12.2 h: 5 starts")
    assert "4 killed or lost, 1 running or killed" in said
    assert "a save every 10 min instead of 1.11 h would add about" in interval
    assert "with an MTBF of 2.78 h: SavePolicy.auto()" in interval
    assert "a local tier would add up to" in tier


def test_a_good_interval_is_said_to_be_good():
    facts = {"saves": 80, "blocked_s": 80.0, "saving_s": 80.0}
    lines = [
        start(8_100 * n, 8_100 * n + 8_000, 8_000 * n, 8_000 * (n + 1), 8_000 * (n + 1), **facts)
        for n in range(9)
    ]
    [_, interval] = described(account(lines))

    assert "is near the best" in interval


# --- the mean time between failures ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "counts"),
    [
        ("", True),
        (f"{FAILED}ValueError", True),
        (CLOSED, False),
        (PREEMPTED, False),
        (WENT_BACK, False),
    ],
)
def test_what_counts_as_a_failure(end, counts):
    lines = [start(n, n + 0.5, 0, 9, 9, end) for n in range(4)]

    assert learned_mtbf_s([*lines[:3], start(9, 10, 0, None, None, CLOSED)]) == (
        pytest.approx(2.5 / 3) if counts else PRIOR_MTBF_S
    )
    assert learned_mtbf_s([*lines[:2], start(9, 10, 0, 9, 9)]) == PRIOR_MTBF_S


def test_the_prior_holds_until_there_are_three_failures():
    """The third start that is followed by another, or by an end that is a failure."""
    lines = [start(n, n + 60, 0, 9, 9) for n in range(4)]

    assert [learned_mtbf_s(lines[:n]) for n in range(5)] == [*[PRIOR_MTBF_S] * 4, 80]


@pytest.mark.parametrize("mtbf_s", [600.0, 7_200.0, 50_000.0, 400_000.0])
def test_the_learned_interval_loses_little_more_than_the_best(mtbf_s):
    """Failures come at random: what 40 jobs lose after three failures, and after thirty."""
    dice = random.Random(int(mtbf_s))
    costs = Costs(blocked_s=0.5, save_s=1.0, restore_s=20.0)
    best = lost(costs, mtbf_s, best_interval_s(costs, mtbf_s))

    for failures, most in ((3, 1.3), (30, 1.01)):
        more = [learned(dice, mtbf_s, failures, costs) / best for _ in range(40)]

        assert sum(more) / len(more) < most


def lost(costs, mtbf_s, interval_s):
    return 1 - expected(dataclasses.replace(costs, restore_s=0.0), mtbf_s, interval_s)


def learned(dice, mtbf_s, failures, costs):
    """What a job loses, by the true MTBF, at the interval that it has learned."""
    lines, now_s = [], 0.0
    for _ in range(failures + 1):
        ran_s = dice.expovariate(1 / mtbf_s)
        lines.append(start(now_s, now_s + ran_s, 0, 9, 9))
        now_s += ran_s + 60
    return lost(costs, mtbf_s, best_interval_s(costs, learned_mtbf_s(lines)))


def test_an_account_of_any_lines_is_finite():
    """Whatever a damaged ledger has: clocks that go back, steps that do not fit."""
    dice = random.Random(1)
    steps = [None, 0, 1, 5, 10**18 - 1]
    for _ in range(300):
        lines = [
            Start(
                start=str(n),
                end=dice.choice(["", CLOSED, "?"]),
                opened_s=dice.choice([0.0, 1e11, 5.0]),
                seen_s=dice.choice([0.0, 1e11, 5.0]),
                trained_s=dice.choice([0.0, 1e11]),
                blocked_s=dice.choice([0.0, 1e11]),
                saves=dice.choice([0, 1, 10**18 - 1]),
                **{name: dice.choice(steps) for name in ("began", "first", "reached", "saved")},
            )
            for n in range(dice.randrange(6))
        ]
        found = account(lines)
        described(found)

        assert isinstance(found, Account)
        assert 0 <= found.kept_s <= found.wall_s
        assert math.isfinite(learned_mtbf_s(lines))
        assert learned_mtbf_s(lines) > 0
