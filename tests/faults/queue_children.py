"""Jobs that are killed at the moment at which a save returns."""

from __future__ import annotations

import os
import signal

import numpy as np


def state(step):
    """Large enough that its save takes longer than the call."""
    return {"w": np.full(1_000_000, float(step)), "step": step}


def save_and_die(root, kind, last):
    """Saves steps as fast as it can, and is killed as soon as the save of the last one returns."""
    save = SAVES[kind](root)
    for step in range(1, last + 1):
        save(step, state(step))
    os.kill(os.getpid(), signal.SIGKILL)


def _native(root):
    import jaxckpt

    return jaxckpt.CheckpointManager(root).save


def _v0(root):
    from jaxckpt import orbax as ocp

    manager = ocp.CheckpointManager(root)
    return lambda step, tree: manager.save(step, args=ocp.args.StandardSave(tree))


def _v1(root):
    from jaxckpt.orbax.v1 import training

    every = training.save_decision_policies.FixedIntervalPolicy(1)
    return training.Checkpointer(root, save_decision_policy=every).save_async


SAVES = {"native": _native, "v0": _v0, "v1": _v1}


def committed(root):
    """Returns the steps that a new job finds, all of which have the right values."""
    import jaxckpt

    with jaxckpt.CheckpointManager(root) as manager:
        for step in manager.all_steps():
            [name] = [one for one in ("state", "default") if os.path.exists(f"{root}/{step}/{one}")]
            got = manager.restore_items(step=step)[name]
            assert np.array_equal(got["w"], state(step)["w"])
            assert got["step"] == step
        return manager.all_steps()


def tell_committed(root):
    from tests.faults.zygote import say

    say(steps=committed(root))
