"""SIGKILL at random moments and before every change of a file: the old tree or the new one."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time

import pytest

from tests.faults import children
from tests.faults.zygote import Zygote


def test_a_kill_before_any_change_of_a_save_leaves_all_or_nothing(zygote, ram_path):
    """Every n-th change of the first save; the next save needs no help."""
    seen = []
    for n in itertools.count(1):
        folder = ram_path / str(n)
        (folder / "beside").mkdir(parents=True)
        done = zygote.run(children.save, folder / "a", 1, False, ["kill", n])
        seen.append(zygote.run(children.check, folder / "a", 2, ["beside"])["found"])
        if done is not None:
            break

    assert n > 30
    assert done["events"] == n - 1
    assert seen == sorted(seen, key=lambda seed: seed is not None)
    assert set(seen) == {None, 1}


def test_a_kill_before_any_change_of_a_replacement_leaves_the_old_or_the_new(zygote, ram_path):
    """Every n-th change, those of the deletion of the old one too."""
    seen, path = [], ram_path / "a"
    zygote.run(children.save, path, 1, False)
    for n in itertools.count(1):
        done = zygote.run(children.save, path, 2, True, ["kill", n])
        seen.append(zygote.run(children.check, path, 1, [])["found"])
        if done is not None:
            break

    assert n > 50
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}


@pytest.mark.parametrize("kills", [15, pytest.param(200, marks=pytest.mark.slow, id="many")])
def test_kills_at_random_while_one_path_is_replaced(zygote, ram_path, kills):
    """Each time the last acknowledged tree is there, or the one after it."""
    path, acked, dice = ram_path / "a", -1, random.Random(1)
    for _ in range(kills):
        said = killed_at_random(zygote, dice, children.overwrite_for_ever, path)
        there = -1 if said[0]["found"] is None else said[0]["found"]
        assert acked <= there <= acked + 1
        acked = max([there, *(word["saved"] for word in said[1:])])

    assert zygote.run(children.check, path, 0, [])["found"] in (acked, acked + 1)
    assert acked > 0


@pytest.mark.parametrize("kills", [15, pytest.param(200, marks=pytest.mark.slow, id="many")])
def test_kills_at_random_while_checkpoints_are_added(zygote, ram_path, kills):
    """Each time all acknowledged ones are there, whole, and at most one more."""
    acked, most, dice, root = -1, -1, random.Random(2), ram_path / "first"
    root.mkdir()
    for kill in range(kills):
        said = killed_at_random(zygote, dice, children.add_for_ever, root)
        assert said[0]["steps"] == said[0]["found"] == list(range(len(said[0]["steps"])))
        there = len(said[0]["steps"]) - 1
        assert acked <= there <= acked + 1
        acked = max([there, *(word["saved"] for word in said[1:])])
        most = max(most, acked)
        if kill % 20 == 19:  # reading them all again takes longer each time
            acked, root = -1, ram_path / f"after-{kill}"
            root.mkdir()

    assert most > 0


def killed_at_random(zygote, dice, function, place):
    """Lets a child save until it is killed; returns all it said."""
    child = zygote.start(function, place)
    said = [zygote.answer() for _ in range(1 + dice.randrange(3))]
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
