"""A training in one process, `train_for_ever` of the zygote, is told to stop by real signals."""

from __future__ import annotations

import os
import random
import shutil
import signal

import pytest

from tests.faults import children

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="the zygote's shim needs gcc"),
]

NUMBERS = [signal.SIGTERM, signal.SIGUSR1]


def read_to(zygote, key, value=None):
    """Reads what a child says until it says this; returns the value."""
    while True:
        answer = zygote.answer()
        assert "status" not in answer
        if key in answer and value in (None, answer[key]):
            return answer[key]


def read_to_end(zygote):
    """What a child says until it ends, and how it ended."""
    said = []
    while "status" not in (answer := zygote.answer()):
        said.append(answer)
    return said, answer["status"]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_saves_the_current_step_once_and_ends_the_loop(zygote, ram_path, number):
    """Though it is not due; the process ends as one that has finished."""
    child = zygote.start(children.train_for_ever, ram_path)
    read_to(zygote, "step", 10)
    os.kill(child, number)
    said, status = read_to_end(zygote)

    stopped = said[-1]["stopped"]
    assert status == 0
    assert [one for one in said if "saved_for_preemption" in one] == [
        {"saved_for_preemption": stopped}
    ]
    there = zygote.run(children.check_run, ram_path)
    assert there == {"steps": sorted({*there["steps"], 7, stopped}), "temporary": []}
    assert there["steps"][-1] == stopped


@pytest.mark.parametrize("number", NUMBERS)
def test_a_handler_of_before_is_called_and_comes_back(zygote, ram_path, number):
    """Once for each signal; when the manager is closed it is alone again."""
    child = zygote.start(children.train_for_ever, ram_path, hears=number)
    read_to(zygote, "step", 3)
    os.kill(child, number)
    said, status = read_to_end(zygote)

    assert status == 0
    assert [one for one in said if "handled" in one] == [{"handled": number}]
    assert said[-1]["handler_is_back"]
    assert zygote.run(children.check_run, ram_path)["steps"][-1] == said[-1]["stopped"]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_second_signal_ends_the_process(zygote, ram_path, number):
    """One that does not heed the first; the step that the first one saved is whole."""
    child = zygote.start(children.train_for_ever, ram_path, heeds=False)
    read_to(zygote, "step", 3)
    os.kill(child, number)
    step = read_to(zygote, "saved_for_preemption")
    read_to(zygote, "step", step + 7)
    os.kill(child, number)
    said, status = read_to_end(zygote)

    assert status == -number
    assert not any("stopped" in one for one in said)
    assert step in zygote.run(children.check_run, ram_path)["steps"]


@pytest.mark.parametrize("signals", [20, pytest.param(200, marks=pytest.mark.slow, id="many")])
def test_a_signal_at_any_moment_saves_the_step_and_ends_with_0(zygote, ram_path, signals):
    """While it restores, trains, saves, deletes; each run goes on from the one before."""
    dice, newest, moments = random.Random(3), 0, set()
    for _ in range(signals):
        child = zygote.start(children.train_for_ever, ram_path)
        for _ in range(1 + dice.randrange(dice.choice([20, 300]))):
            last = zygote.answer()
        os.kill(child, dice.choice(NUMBERS))
        said, status = read_to_end(zygote)

        moments.add(last.get("verb", "step"))
        there = zygote.run(children.check_run, ram_path)
        stopped = said[-1]["stopped"]
        assert status == 0
        assert there["temporary"] == []
        assert there["steps"][-1] == stopped > newest
        newest = stopped

    assert len(moments) > 3
