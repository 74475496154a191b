"""SIGKILL at random moments and before every file change leaves the old tree or the new one."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time

import pytest

from tests.faults import children
from tests.faults.zygote import Zygote

# A row, and what is done to the n-th of what: writes are torn, changes do not happen.
ENDINGS = [pytest.param("3", "kill", id="kill"), pytest.param("4", "tear", id="tear")]


@pytest.mark.parametrize(("row", "ending"), ENDINGS)
def test_a_kill_at_any_point_of_a_save_leaves_all_or_nothing(zygote, ram_path, trial, row, ending):
    """Every n-th change, or write, of the first save; the next save needs no help."""
    seen = []
    for n in itertools.count(1):
        folder = ram_path / str(n)
        (folder / "beside").mkdir(parents=True)
        done = zygote.run(children.save, folder / "a", 1, False, [ending, n])
        with trial(row, f"the first save, {ending} at {n}"):
            there = zygote.run(children.check, folder / "a", 2, ["beside"])["found"]
            assert there in ((None, 1) if done is None else (1,))
            seen.append(there)
        if done is not None:
            break

    assert done["events"] == n - 1
    assert seen == sorted(seen, key=lambda seed: seed is not None)
    assert set(seen) == {None, 1}
    assert n > {"kill": 30, "tear": 6}[ending]


@pytest.mark.parametrize(("row", "ending"), ENDINGS)
def test_a_kill_at_any_point_of_a_replacement_leaves_one_whole(
    zygote, ram_path, trial, row, ending
):
    """At every n-th change, also during the deletion of the old tree: the old or the new one."""
    seen, path = [], ram_path / "a"
    zygote.run(children.save, path, 1, False)
    for n in itertools.count(1):
        done = zygote.run(children.save, path, 2, True, [ending, n])
        with trial(row, f"a replacement, {ending} at {n}"):
            there = zygote.run(children.check, path, 1, [])["found"]
            assert there in ((1, 2) if done is None else (2,))
            seen.append(there)
        if done is not None:
            break

    assert seen == sorted(seen)
    assert set(seen) == {1, 2}
    assert n > {"kill": 50, "tear": 6}[ending]


@pytest.mark.parametrize("seed", range(8))
def test_kills_at_random_while_one_path_is_replaced(zygote, ram_path, trial, seed):
    """Each time the last acknowledged tree is there, or the one after it."""
    path, acked, dice = ram_path / "a", -1, random.Random(seed)
    for kill in range(25):
        said = killed_at_random(zygote, dice, children.overwrite_for_ever, path)
        with trial("2", f"kill {kill} of seed {seed}"):
            there = None if not said else -1 if said[0]["found"] is None else said[0]["found"]
            assert there is None or acked <= there <= acked + 1
            acked = max([acked, there or -1, *(word["saved"] for word in said[1:])])

    assert zygote.run(children.check, path, 0, [])["found"] in (acked, acked + 1)
    assert acked > 5


@pytest.mark.parametrize("seed", range(8))
def test_kills_at_random_while_a_run_trains(zygote, ram_path, trial, seed):
    """It resumes from the newest acknowledged step, or the next one, with the same values."""
    acked, dice, counts = 0, random.Random(10 + seed), set()
    for kill in range(25):
        said = killed_at_random(zygote, dice, children.keep_training, ram_path)
        with trial("1", f"kill {kill} of seed {seed}"):
            acked = check_training(said, acked)
        counts.add(len(said))

    assert acked > 5
    assert len(counts) > 3  # the moments differ


def test_the_check_of_a_run_sees_a_step_that_is_lost(zygote, ram_path):
    """A control: a run that says too early that a step is saved is caught in one of some kills."""
    dice = random.Random(5)

    def kill_often(acked):
        for _ in range(200):
            said = killed_at_random(zygote, dice, children.train_and_lie, ram_path)
            acked = check_training(said, acked)

    with pytest.raises(AssertionError, match="lost"):
        kill_often(0)


def check_training(said, acked):
    """Checks the reports of a run from start to end; returns the newest acknowledged step."""
    words = {key: value for word in said for key, value in word.items()}
    if "steps" in words:
        assert max(words["steps"], default=0) >= acked, f"{acked} is lost"
        assert len(words["steps"]) <= 4  # two, the next, and one that was to be deleted
    if "restored" in words:
        assert words["restored"] == max(words["steps"], default=0)
        assert not any("damaged" in problem for problem in words["problems"])
        acked = words["restored"]
    if "kept" in words:
        assert words["left"] == []
        assert words["kept"] == [acked, acked + 1][-min(2, acked + 1) :]
    return max([acked, *(word["saved"] for word in said if "saved" in word)])


def killed_at_random(zygote, dice, function, place):
    """Lets a child save until it is killed, maybe before it says anything; returns all it said."""
    child = zygote.start(function, place)
    said = [zygote.answer() for _ in range(dice.randrange(7))]
    time.sleep(dice.uniform(0, 0.03))  # not a wait for anything: the moment is what varies
    os.kill(child, signal.SIGKILL)
    rest, status = zygote.answers()
    assert status == -signal.SIGKILL
    return said + rest


def test_two_processes_save_one_path_at_once(zygote, tmp_path_factory, ram_path):
    """One wins whole; the other raises."""
    with Zygote(tmp_path_factory.mktemp("second")) as other:
        for n in range(5):
            path = ram_path / str(n) / "a"
            for writer in (zygote, other):
                writer.start(children.try_to_save, path, 1)
            outcomes = [writer.answers()[0][-1]["raised"] for writer in (zygote, other)]

            assert sorted(outcomes, key=str) in ([None, "SaveFailed"], [None, "StepExists"])
            assert zygote.run(children.check, path, 2, [])["found"] == 1
