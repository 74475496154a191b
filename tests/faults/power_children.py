"""Runs on a file system that is about to lose power, and checks the run after it is back."""

from __future__ import annotations

import os

from tests.faults.zygote import say


def tree(step):
    """A megabyte, so that some of it would still wait in the caches."""
    import numpy as np

    rng = np.random.default_rng(step)
    return {
        "large": rng.standard_normal(250_000, np.float32),
        "small": rng.integers(0, 9, 99),
        "text": f"step {step}",
        "step": step,
    }


def check_tree(got, step):
    wanted = tree(step)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, str | int):
            assert got[name] == value
        else:
            assert got[name].tobytes() == value.tobytes()


def save_for_ever(root, durable=True):
    """Saves one step after the other and says each that is acknowledged, until it is killed.

    Args:
        durable: A control without it: nothing is synced.
    """
    import jaxckpt

    if not durable:
        sync_nothing()
    manager = jaxckpt.CheckpointManager(root, keep=jaxckpt.KeepPolicy(last=2))
    step = manager.latest_step() or 0
    while True:
        step += 1
        manager.save(step, tree(step)).result()
        say(acked=step)


def sync_nothing():
    """Removes every fsync from this process, both ours and TensorStore's."""
    import tensorstore as ts

    from jaxckpt.storage import _arrays

    os.fsync = lambda fd: None
    _arrays._context = ts.Context({"file_io_sync": False})


def check_run(root):
    """Says which steps are listed, each of which restores bit for bit; then saves, which works."""
    import jaxckpt
    from jaxckpt.format import names

    with jaxckpt.CheckpointManager(root, keep=jaxckpt.KeepPolicy(last=2)) as manager:
        steps = manager.all_steps()
        for step in steps:
            check_tree(jaxckpt.restore(f"{root}/{step}", as_numpy=True), step)
            assert jaxckpt.verify(f"{root}/{step}").ok
        newest = None
        if steps:
            check_tree(manager.restore(as_numpy=True), steps[-1])
            newest = manager.restored_step
        new = (newest or 0) + 1
        manager.save(new, tree(new)).result()
        manager.wait_until_finished()
        after = manager.all_steps()
        assert after[-1] == new
        check_tree(manager.restore(as_numpy=True), new)
    left = set(os.listdir(root)) - {
        *map(str, after),
        names.RUN,
        names.OWNER,
        names.LOCK,
        names.LEDGER,
    }
    left |= {step for step in map(str, after) if names.WRITER in os.listdir(f"{root}/{step}")}
    say(steps=steps, newest=newest, left=sorted(left))
