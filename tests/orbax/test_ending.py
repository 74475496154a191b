"""A run that the drop-in wrote has steps in its root and nothing else, once it is closed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import jaxckpt
import jaxckpt.orbax as ocp
import jaxckpt.orbax.v1 as ocp1
from jaxckpt._run.index import StepIndex
from jaxckpt._run.leases import Leases
from jaxckpt._run.owner import Ownership
from jaxckpt.storage import locate

PROGRAM = """
import sys
import jaxckpt.orbax as ocp, jaxckpt.orbax.v1 as v1
manager = ocp.CheckpointManager(sys.argv[1] + "/a")
checkpointer = v1.training.Checkpointer(sys.argv[1] + "/b")
for step in (1, 2):
    assert manager.save(step, args=ocp.args.StandardSave({"n": step}))
    assert checkpointer.save(step, {"n": step})
"""


def test_a_closed_run_has_steps_only(tmp_path):
    """Twice, so that a run without the files of its last writer is opened again."""
    for step in (1, 2):
        with ocp.CheckpointManager(tmp_path / "a") as manager:
            manager.save(step, args=ocp.args.StandardSave({"n": step}))
            assert "_jaxckpt.lock" in os.listdir(tmp_path / "a")
        with ocp1.training.Checkpointer(tmp_path / "b") as checkpointer:
            checkpointer.save(step, {"n": step})

        for run in ("a", "b"):
            assert sorted(os.listdir(tmp_path / run)) == [str(n) for n in range(1, step + 1)]


def test_a_program_that_does_not_close_its_managers_leaves_steps_only(tmp_path):
    """All of its saves are committed before."""
    subprocess.run([sys.executable, "-c", PROGRAM, tmp_path], check=True, timeout=120)

    for run in ("a", "b"):
        assert sorted(os.listdir(tmp_path / run)) == ["1", "2"]
        assert jaxckpt.verify(tmp_path / run).ok


def test_the_files_of_a_job_that_has_taken_the_run_over_stay(tmp_path):
    """The job that a manager knew of has ended; another trains on."""
    late = ocp.CheckpointManager(tmp_path)
    late.save(1, args=ocp.args.StandardSave({"n": 1}))
    late.wait_until_finished()
    index = StepIndex(*locate(tmp_path))
    other = Ownership(Leases(index))
    other.take_over(index.owner())

    late.close()

    assert other.owns()
    assert "_jaxckpt.run" in os.listdir(tmp_path)


def test_a_run_whose_last_save_failed_has_steps_only(tmp_path):
    manager = ocp.CheckpointManager(tmp_path)
    manager.save(1, args=ocp.args.StandardSave({"n": 1}))
    manager.wait_until_finished()
    (tmp_path / "2").touch()  # where the step would go
    manager.save(2, args=ocp.args.StandardSave({"n": 2}))

    with pytest.raises(Exception, match="2"):
        manager.close()

    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_the_files_of_another_manager_stay(tmp_path):
    """One that has taken the run over."""
    first = ocp.CheckpointManager(tmp_path)
    first.save(1, args=ocp.args.StandardSave({"n": 1}))
    with jaxckpt.CheckpointManager(tmp_path) as second:
        first.close()
        second.save(2, {"n": 2})
        second.wait_until_finished()

        assert {"_jaxckpt.lock", "_jaxckpt.owner"} < {*os.listdir(tmp_path)}


TOLD = """
import os, signal, sys, threading
import jaxckpt.orbax as ocp

told = threading.Event()  # until then the save is under way
class Handler(ocp.AsyncCheckpointHandler):
    async def async_save(self, directory, args):
        (directory / "x").write_text("x")
        class Future:
            def result(self, timeout=None):
                told.wait()
        return [Future()]
    def save(self, directory, args):
        pass
    def restore(self, directory, args):
        return (directory / "x").read_text()
@ocp.args.register_with_handler(Handler, for_save=True)
class Save(ocp.args.CheckpointArgs):
    pass
with ocp.CheckpointManager(sys.argv[1] + "-closed") as closed:
    closed.save(1, args=ocp.args.StandardSave({"n": 1}))
idle = ocp.CheckpointManager(sys.argv[1] + "-idle")  # hears the signal after the other one
idle.save(1, args=ocp.args.StandardSave({"n": 1}))
idle.wait_until_finished()
manager = ocp.CheckpointManager(sys.argv[1])
when = sys.argv[2]
manager.save(1, args=ocp.args.Composite(a=Save()))
if when == "asked":
    manager.reached_preemption(1)
if when == "idle":
    told.set()
    manager.wait_until_finished()
os.kill(os.getpid(), signal.SIGTERM)
told.set()
if when == "saving":
    threading.Event().wait(60)
print(manager.reached_preemption(2))
"""


@pytest.mark.parametrize(("when", "code"), [("idle", -15), ("saving", -15), ("asked", 0)])
def test_a_signal_ends_a_program_that_does_not_ask(tmp_path, when, code):
    """As with Orbax, but after the save under way; one that asks ends by itself."""
    command = [sys.executable, "-c", TOLD, tmp_path / "run", when]
    ended = subprocess.run(command, timeout=120, check=False, capture_output=True, text=True)

    assert (ended.returncode, ended.stdout) == (code, "True\n" if when == "asked" else "")
    assert ocp.CheckpointManager(tmp_path / "run").all_steps() == [1]
