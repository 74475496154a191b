"""Programs wait for the steps of another job, as with Orbax."""

from __future__ import annotations

import time

import numpy as np
import orbax.checkpoint as theirs
import pytest

import jaxckpt.orbax as ocp
from jaxckpt import CheckpointTimeout, ProcessesDisagree
from jaxckpt.multihost import playing
from jaxckpt.testing import simulate

pytestmark = pytest.mark.filterwarnings("ignore")

LIBRARIES = pytest.mark.parametrize("library", [theirs, ocp], ids=["theirs", "ours"])


def save(path):
    ocp.PyTreeCheckpointer().save(path, {"n": 1})


@LIBRARIES
def test_an_iterator_asks_twice_whether_to_end(tmp_path, library):
    """First the wait asks, which has timed out; a no to the second question starts a new wait."""
    save(tmp_path / "2")
    answers = []

    def ends():
        answers.append(len(answers) != 1)
        if not answers[-1]:
            save(tmp_path / "5")
        return answers[-1]

    steps = library.checkpoint_utils.checkpoints_iterator(tmp_path, timeout=0, timeout_fn=ends)

    assert list(steps) == [2, 5]
    assert answers == [True, False, True, True]


@LIBRARIES
def test_steps_come_apart_after_a_long_wait_too(tmp_path, library):
    """`min_interval_secs` counts from one step to the next, not from the wait for the first."""
    for name in ("a", "b"):
        save(tmp_path / name)
    asked_s = []

    def ends():
        asked_s.append(time.monotonic())
        if asked_s[-1] > asked_s[0] + 0.3:
            (tmp_path / "a").rename(tmp_path / "1")
        return False

    options = {"min_interval_secs": 0.3, "seconds_to_sleep": 0.05}
    steps = library.checkpoint_utils.checkpoints_iterator(
        tmp_path, timeout=0, timeout_fn=ends, **options
    )

    assert next(steps) == 1
    (tmp_path / "b").rename(tmp_path / "2")
    assert next(steps) == 2
    assert time.monotonic() >= asked_s[-1] + 0.3  # the first step came later than the question


@LIBRARIES
def test_an_unknown_argument_raises(tmp_path, library):
    """Those of Orbax's snapshots are known."""
    utils = library.checkpoint_utils
    for name in ("4", "ckpt_0004"):
        save(tmp_path / name)

    with pytest.raises(TypeError, match="time_out"):
        next(utils.checkpoints_iterator(tmp_path, time_out=60))
    with pytest.raises(TypeError, match="time_out"):
        utils.wait_for_new_checkpoint(tmp_path, time_out=60).__enter__()

    named = {"step_prefix": "ckpt", "step_format_fixed_length": 4}
    snapshots = {"snapshot_dir": tmp_path / "s", "set_immutable": None}
    assert [*utils.checkpoints_iterator(tmp_path, timeout=0, **named, **snapshots)] == [4]


def test_process_0_asks_for_all_whether_an_iterator_ends(tmp_path):
    save(tmp_path / "2")
    asked = []

    def evaluate(processes):
        def ends():
            asked.append(processes.index)
            return len(asked) != 2

        options = {"timeout": 0, "timeout_fn": ends}
        return list(ocp.checkpoint_utils.checkpoints_iterator(tmp_path, **options))

    assert simulate(2, evaluate) == [[2], [2]]
    assert asked == [0] * 4


def waited(path, **options):
    with ocp.checkpoint_utils.wait_for_new_checkpoint(path, timeout=0, **options) as step:
        return step


@pytest.mark.parametrize("until_step", [None, 2])
@pytest.mark.parametrize("alone", [0, 1])
def test_a_wait_of_one_process_fails_alone(tmp_path, alone, until_step):
    """It names who is missing, and no later wait gets its answer."""
    save(tmp_path / "3")
    save(tmp_path / "later")

    def evaluate(processes):
        if processes.index == alone:
            limited = playing(processes.within(0.2))
            missing = pytest.raises(CheckpointTimeout, match=f"missing process {1 - alone}\n")
            with limited, missing:
                waited(tmp_path, until_step=until_step)
            (tmp_path / "later").rename(tmp_path / "5")
        processes.within(60).gather("saved", None)
        return [waited(tmp_path, until_step=2) for _ in range(2)]

    assert simulate(2, evaluate) == [[5, 5], [5, 5]]


def test_processes_that_wait_for_different_steps_get_none(tmp_path):
    save(tmp_path / "1")

    def evaluate(processes):
        with playing(processes.within(0.2)), pytest.raises(CheckpointTimeout, match="until_step="):
            waited(tmp_path, until_step=[None, 2][processes.index])

    simulate(2, evaluate)


def test_steps_may_be_numbers_of_numpy(tmp_path):
    """A program's own names of steps may give them."""

    class Named(ocp.path.step.NameFormat):
        def find_all(self, base_path):
            return [ocp.path.step.Metadata(np.int64(n), base_path) for n in (3, 1)]

    def evaluate(processes):
        return [waited(tmp_path, step_name_format=Named(), until_step=np.int64(2))]

    assert simulate(2, evaluate) == [[3], [3]]


def test_an_error_of_process_0_ends_the_wait_of_all(tmp_path):
    """The next wait finds all in step again."""
    save(tmp_path / "1")

    def evaluate(processes):
        kind, text = [(OSError, "gone"), (ProcessesDisagree, "process 0 failed: OSError: gone")][
            processes.index
        ]

        def fails():
            raise OSError("gone")

        with pytest.raises(kind, match=text):
            waited(tmp_path, until_step=2, timeout_fn=fails)
        return waited(tmp_path)

    assert simulate(2, evaluate) == [1, 1]
