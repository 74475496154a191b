"""As with Orbax, a save of the drop-in waits for the previous one and raises its error."""

from __future__ import annotations

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

    def finish(self):
        self.manager.close()


class V1:
    def __init__(self, root):
        policy = ocp1.training.save_decision_policies.FixedIntervalPolicy(1)
        self.manager = ocp1.training.Checkpointer(root, save_decision_policy=policy)

    def save(self, step, **options):
        return self.manager.save_async(step, {"n": step}, **options) is not None

    def finish(self):
        self.manager.close()


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
