"""Real signals stop trainings: `train_for_ever` of the zygote, and jobs of three processes."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal

import pytest

from tests.faults import children
from tests.faults import dead_children as job_children
from tests.faults.jobs import started

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
    """Returns the reports of a child until it ends, and its exit status."""
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
    assert there == {
        "steps": sorted({*there["steps"], stopped, *([7] if stopped <= 21 else [])}),
        "temporary": [],
    }
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


def told_at_random(zygote, root, dice, **options):
    """Sends a signal to a training run at a random moment; returns that moment."""
    child = zygote.start(children.train_for_ever, root, **options)
    for _ in range(1 + dice.randrange(dice.choice([20, 300]))):
        last = zygote.answer()
    os.kill(child, dice.choice(NUMBERS))
    return child, last.get("verb", "step")


@pytest.mark.parametrize("part", range(2))
def test_a_signal_at_any_moment_saves_the_step_and_ends_with_0(trial, zygote, ram_path, part):
    """During restoring, training, saving and deleting; each run resumes after the previous one."""
    dice, newest, moments = random.Random(part), 0, set()
    for number in range(15):
        with trial("22", f"a signal at random, {part}/{number}"):
            _, moment = told_at_random(zygote, ram_path, dice)
            said, status = read_to_end(zygote)
            moments.add(moment)
            there = zygote.run(children.check_run, ram_path)
            stopped = said[-1]["stopped"]
            assert status == 0
            assert there["temporary"] == []
            assert there["steps"][-1] == stopped > newest
            newest = stopped

    assert len(moments) > 3


@pytest.mark.parametrize("hears", [None, *NUMBERS])
def test_two_signals_at_any_moment_leave_whole_steps(trial, zygote, ram_path, hears):
    """The second ends the process, or comes too late; what was saved before stays the newest."""
    dice, newest = random.Random(hears), 0
    for number in range(10):
        with trial("22", f"two signals at random, handler of {hears}, {number}"):
            child, _ = told_at_random(zygote, ram_path, dice, hears=hears)
            for _ in range(dice.randrange(20)):
                if "status" in (last := zygote.answer()):
                    break
            else:
                last = None
                # It may end just now.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, dice.choice(NUMBERS))
            said, status = read_to_end(zygote) if last is None else ([], last["status"])
            assert -status in (0, *NUMBERS), said
            there = zygote.run(children.check_run, ram_path)
            assert (there["steps"] or [0])[-1] >= newest
            newest = (there["steps"] or [0])[-1]


# --- three processes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "handler"),
    [
        ([0], None),
        ([1], None),
        ([2, 1, 0], None),
        ([1, 1, 1], None),
        ([1], "before"),
        ([0], "before"),
        ([2, 2], "before"),
    ],
)
def test_three_processes_are_told(trial, zygote, ram_path, told, handler):
    """They agree on a step and all save it completely; then all end as if they had finished.

    This holds for any number of signals to any processes, even with another handler before.
    """
    for number in NUMBERS:
        root = ram_path / number.name
        root.mkdir()
        with (
            trial("22", f"{number.name} to {told} of three, handler {handler}"),
            started(zygote, job_children.train_until_told, args=[root, handler, 5000]) as job,
        ):
            for index in range(3):
                job.wait_for(index, "training")
            for index in told:
                job.signal(index, number)
            ends = job.wait()
            assert [end.status for end in ends] == [0, 0, 0], [end.out for end in ends]
            steps = {end.result["step"] for end in ends}
            assert len(steps) == 1
            (step,) = steps
            assert step < 5000
            new = zygote.run(job_children.go_on, root, step)
            assert (new["newest"], new["left"]) == (step, [])


def test_a_handler_that_came_after_keeps_the_signal_to_itself(trial, zygote, ram_path):
    """It replaces jax's handler: no process gets the signal; the newest step is complete."""
    with (
        trial("22", "SIGTERM to one of three, whose handler came after jax's"),
        started(zygote, job_children.train_until_told, args=[ram_path / "a", "after", 100]) as job,
    ):
        for index in range(3):
            job.wait_for(index, "training")
        job.signal(1, signal.SIGTERM)
        ends = job.wait()
        assert [end.status for end in ends] == [0, 0, 0], [end.out for end in ends]
        assert [end.result["step"] for end in ends] == [100] * 3
        assert [end.result["heard"] for end in ends] == [0, 1, 0]
        assert zygote.run(job_children.go_on, ram_path / "a", 95)["newest"] == 95


def test_a_step_that_was_not_saved_for_the_signal_is_missed(zygote, ram_path):
    """A control: a training whose policy does not listen ends by the signal, and saves nothing."""
    child = zygote.start(job_children.train_deaf, ram_path)
    read_to(zygote, "step", 10)
    os.kill(child, signal.SIGTERM)
    _, status = read_to_end(zygote)

    assert status == -signal.SIGTERM
    assert zygote.run(children.check_run, ram_path)["steps"][-1] % 7 == 0
