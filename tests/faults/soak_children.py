"""Runs in forked children of the soak test: trains a little, or checks the run."""

from __future__ import annotations

import os
import signal

from tests.faults.children import found, tree
from tests.faults.zygote import arm, say

STEPS = 12


def train(root, fault):
    """Trains for some steps, or until a signal stops it; reports the saved steps and any error."""
    import jaxckpt

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one that comes once the manager is closed
    arm(root, fault)
    try:
        with jaxckpt.CheckpointManager(root, keep=jaxckpt.KeepPolicy(last=3)) as manager:
            state, start = manager.restore_or(lambda: tree(0))
            say(restored=start, seed=state["seed"])
            for step in range(start + 1, start + 1 + STEPS):
                manager.save(step, tree(step)).result()
                say(saved=step)
                if manager.reached_preemption(step):
                    break
    except (jaxckpt.CheckpointError, OSError) as error:
        say(raised=f"{type(error).__name__}: {error}")


def look(root):
    """Says which steps there are; each restores, or is damaged and says so."""
    import jaxckpt

    steps, damaged = [], []
    for step in sorted(int(name) for name in os.listdir(root) if name.isdecimal()):
        try:
            assert found(f"{root}/{step}") == step
            steps.append(step)
        except jaxckpt.CorruptCheckpoint:
            damaged.append(step)
    say(steps=steps, damaged=damaged)
