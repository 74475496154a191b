"""The scorecard counts the trials, and reports missing and failed ones."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults.scorecard import ROWS, Trials, table


def test_a_trial_that_fails_fails_the_test_and_not_the_next_trial():
    """All trials are counted, and the failed ones are named."""
    trials = Trials()
    for n in range(3):
        with trials("1", f"kill {n}"):
            assert n != 1, "a step was lost"

    assert trials.counts == {("1", "passed"): 2, ("1", "failed"): 1}
    with pytest.raises(AssertionError, match=r"1 of 3 trials failed\nrow 1, kill 1:(.|\n)*lost"):
        trials.check()


def test_what_is_no_failure_of_a_trial_ends_the_test():
    """An interrupt, and a row that does not exist."""
    trials = Trials()

    with pytest.raises(KeyboardInterrupt), trials("1", "x"):
        raise KeyboardInterrupt
    with pytest.raises(AssertionError, match="no such row"), trials("no such row", "x"):
        pass


def test_a_row_with_too_few_trials_or_a_failed_one_is_told():
    """So no row shrinks in silence."""
    counts = Counter({(name, "passed"): row.count for name, row in ROWS.items()})
    assert table(counts, target="faults")[1] == []

    counts["1", "passed"] -= 1
    counts["2", "failed"] += 1

    assert table(counts, target="faults")[1] == [
        f"row 1: {ROWS['1'].count - 1} trials, expected at least {ROWS['1'].count}",
        f"row 2: 1 of {ROWS['2'].count + 1} trials failed",
    ]


def test_each_target_has_its_rows():
    """A run without root does not report the rows that need root as missing."""
    _, missing = table(Counter(), target="faults-root")

    assert [line.split(":")[0] for line in missing] == [
        f"row {name}" for name, row in ROWS.items() if row.target == "faults-root"
    ]
