"""As with Orbax, a save of the drop-in waits for the previous one and raises its error."""

from __future__ import annotations

import contextlib
import errno

import pytest

import jaxckpt
import jaxckpt.orbax as ocp
import jaxckpt.orbax.v1 as ocp1
from jaxckpt.storage import LocalStorage
from jaxckpt.testing import FailingStorage, simulate

FULL = OSError(errno.ENOSPC, "No space left on device")


class V0:
    def __init__(self, root):
        self.manager = ocp.CheckpointManager(root)

    def save(self, step, **options):
        return self.manager.save(step, args=ocp.args.StandardSave({"n": step}), **options)

    def wait(self):
        self.manager.wait_until_finished()

    def steps(self):
        return self.manager.all_steps(), self.manager.latest_step()

    def finish(self):
        self.manager.close()


class V1:
    def __init__(self, root):
        policy = ocp1.training.save_decision_policies.FixedIntervalPolicy(1)
        self.manager = ocp1.training.Checkpointer(root, save_decision_policy=policy)

    def save(self, step, **options):
        return self.manager.save_async(step, {"n": step}, **options) is not None

    def wait(self):
        self.manager.wait()

    def steps(self):
        latest = self.manager.latest
        return [one.step for one in self.manager.checkpoints], latest and latest.step

    def finish(self):
        self.manager.close()


@contextlib.contextmanager
def full_disk(run):
    """Has no room for the saves that are made inside, which have ended afterwards."""
    saver = run.manager._open()._saver
    saver._index.storage = FailingStorage(LocalStorage(), 0, FULL, once=False)
    yield
    saver.worker.finish()
    saver._index.storage = LocalStorage()


@pytest.mark.multihost
@pytest.mark.parametrize("options", [{}, {"force": True}], ids=["due", "force"])
@pytest.mark.parametrize("kind", [V0, V1])
def test_a_save_raises_the_error_of_the_previous_one(tmp_path, kind, options):
    """In every process, and is not made; the next one is."""

    def run(processes):
        run = kind(tmp_path)
        saver = run.manager._open()._saver
        if processes.index == 0:
            saver._index.storage = FailingStorage(LocalStorage(), 0, FULL, once=False)
        assert run.save(1, **options)
        saver.worker.finish()  # only to repair the disk
        saver._index.storage = LocalStorage()

        with pytest.raises((jaxckpt.SaveFailed, jaxckpt.ProcessesDisagree), match="No space left"):
            run.save(2, **options)
        saved = run.save(3, **options)
        run.finish()

        return saved, saver._index.steps()

    assert simulate(2, run) == [(True, [3])] * 2


@pytest.mark.parametrize("kind", [V0, V1])
def test_the_previous_step_is_committed_when_a_save_returns(tmp_path, kind):
    """It is there for any program, and each save is made after the one before."""
    run = kind(tmp_path)
    for step in range(1, 6):
        assert run.save(step)
        assert {*range(1, step)} <= {*run.manager._open()._index.steps()}
    run.finish()


HOW = {
    "wait": lambda run: run.wait(),
    "save": lambda run: run.save(3),
    "check": lambda run: run.manager.check_for_errors(),
}


@pytest.mark.parametrize(
    ("kind", "how"), [(V0, "wait"), (V0, "save"), (V0, "check"), (V1, "wait"), (V1, "save")]
)
def test_a_step_whose_save_failed_is_none(tmp_path, kind, how):
    """It is not listed once its error was raised, and may be saved again."""
    run = kind(tmp_path)
    assert run.save(1)
    run.wait()
    with full_disk(run):
        assert run.save(2)

    with pytest.raises(jaxckpt.SaveFailed, match="No space left"):
        HOW[how](run)
    assert run.steps() == ([1], 1)

    assert run.save(2)
    run.finish()
    assert run.steps() == ([1, 2], 2)
    assert jaxckpt.restore(tmp_path / "2") == {"n": 2}


def test_a_step_whose_save_failed_may_be_overwritten(tmp_path):
    """As a program does that tries again; there is nothing to replace."""
    run = V1(tmp_path)
    with full_disk(run), pytest.raises(jaxckpt.SaveFailed, match="No space left"):
        run.manager.save(1, {"n": 0})
    assert run.steps() == ([], None)

    assert run.manager.save(1, {"n": 1}, overwrite=True)

    run.finish()
    assert jaxckpt.restore(tmp_path / "1") == {"n": 1}


@pytest.mark.parametrize("how", ["wait", "save"])
@pytest.mark.parametrize("kind", [V0, V1])
def test_an_error_is_raised_after_another_manager_took_the_run_over(tmp_path, kind, how):
    """Once, in the manager whose save it was."""
    run, other = kind(tmp_path), kind(tmp_path)
    with full_disk(run):
        assert run.save(1)
    assert other.save(2)
    other.wait()

    with pytest.raises(jaxckpt.SaveFailed, match="No space left"):
        HOW[how](run)

    assert run.steps() == ([2], 2)
    assert run.save(3)
    run.finish()
    other.finish()
    assert jaxckpt.restore(tmp_path / "3") == {"n": 3}
