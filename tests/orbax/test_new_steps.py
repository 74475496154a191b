"""Programs wait for the steps of another job, as with Orbax."""

from __future__ import annotations

import orbax.checkpoint as theirs
import pytest

import jaxckpt.orbax as ocp
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
