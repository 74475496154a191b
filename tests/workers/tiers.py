"""Trains in several processes with a local directory that all of them see."""

from __future__ import annotations

from jaxckpt import CheckpointManager, SavePolicy
from tests.workers.manages import check_state, make_init, state_at


def train(me, root, steps):
    """Saves every step locally, and every second one in the directory too."""
    with _open(root) as manager:
        _, start = manager.restore_or(make_init())
        for step in range(start + 1, start + steps + 1):
            handle = manager.save(step, state_at(step))
            if step % 2 == 0:
                handle.durable()
        manager.wait_until_finished()
        return {"start": start, "tiers": manager.tiers}


def resume(me, root):
    """Restores the newest step."""
    with _open(root) as manager:
        state, step = manager.restore_or(make_init())
        check_state(state, step)
        return {"step": step, "problems": manager.problems, "tiers": manager.tiers}


def _open(root):
    return CheckpointManager(
        f"{root}/run",
        save=SavePolicy(every_steps=2),
        local=f"{root}/local",
        local_save=SavePolicy(every_steps=1),
    )
