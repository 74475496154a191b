"""A job of several processes whose run is in an object store."""

from __future__ import annotations

import os

import numpy as np

import jaxckpt
from tests.workers.saves import mesh_of, put


def tree_of(step):
    mesh = mesh_of(x=4)
    return {
        "split": put(np.arange(1 << 18, dtype=np.float32).reshape(8, -1) + step, mesh, ("x",)),
        "whole": put(np.full(8, step, np.int32), mesh, ()),
        "text": f"step {step}",
    }


class Counter:
    """A data iterator of one process."""

    def __init__(self, value):
        self.value = value

    def get_state(self):
        return {"value": self.value}

    def set_state(self, state):
        self.value = state["value"]


def save_and_restore(me, url, env):
    """Saves three steps and keeps two; restores the newest, and says what it found."""
    os.environ.update(env)
    mine = Counter(100 + me.index)
    with jaxckpt.CheckpointManager(url, keep=jaxckpt.KeepPolicy(last=2)) as manager:
        for step in (1, 2, 3):
            manager.save(step, tree_of(step), items={"data": mine})
    mine.value = 0
    with jaxckpt.CheckpointManager(url, mode="r") as manager:
        found = manager.restore(tree_of(0), items={"data": mine})
        steps = manager.all_steps()
    wanted = tree_of(3)
    same = all(
        np.array_equal(a.data, b.data)
        for name in ("split", "whole")
        for a, b in zip(
            found[name].addressable_shards, wanted[name].addressable_shards, strict=True
        )
    )
    return {"steps": steps, "same": same, "text": found["text"], "data": mine.value}
