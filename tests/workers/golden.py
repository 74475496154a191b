"""Writes the golden checkpoints of several processes, and restores those of several hosts."""

from __future__ import annotations

import socket

import jaxckpt
from jaxckpt import CheckpointManager, LocalTier, SavePolicy
from tests.golden.ours import sharded_tree


def together(me, path):
    """Saves one checkpoint."""
    jaxckpt.save(path, sharded_tree())


def apart(me, root, steps):
    """Saves every step on the disk of each host, and every second one in the directory too."""
    socket.gethostname = lambda: f"host{me.index}"  # the files of a run name it
    with open_run(me, root) as manager:
        for step in range(1, steps + 1):
            handle = manager.save(step, {**sharded_tree(), "step": step})
            handle.result()
            if step % 2 == 0:
                handle.durable()
        manager.wait_until_finished()


def resume_apart(me, root):
    """Restores the newest step, that of the disks."""
    with open_run(me, root) as manager:
        like = sharded_tree()
        state, step = manager.restore_or(lambda: like)
        assert all(state[name].sharding == like[name].sharding for name in ("both", "replicated"))
        whole = all(
            (mine.data == wanted.data).all()
            for name in ("both", "rows", "columns", "one axis", "replicated")
            for mine, wanted in zip(
                state[name].addressable_shards, like[name].addressable_shards, strict=True
            )
        )
        return {"step": step, "same": whole, "from": str(manager.timings[-1].path)}


def open_run(me, root):
    return CheckpointManager(
        f"{root}/run",
        save=SavePolicy(every_steps=2),
        local=LocalTier(
            f"{root}/host{me.index}/local", save=SavePolicy(every_steps=1), durable_timeout_s=10
        ),
        timeout_s=10,
    )
