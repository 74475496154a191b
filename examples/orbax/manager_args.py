"""A manager and `args`: one state, saved every other step, the newest three kept.

python examples/orbax/manager_args.py
"""

from __future__ import annotations

from pathlib import Path

import jax
import model

import jaxckpt.orbax as ocp

OPTIONS = ocp.CheckpointManagerOptions(save_interval_steps=2, max_to_keep=3)


def train(root: Path, steps: int) -> model.State:
    """Trains to the given step, starting from the newest step of the run."""
    state = model.init()
    with ocp.CheckpointManager(root, options=OPTIONS) as manager:
        start = manager.latest_step() or 0
        if start:
            target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            state = manager.restore(start, args=ocp.args.StandardRestore(target))
        for step in range(start + 1, steps + 1):
            state, loss = model.train_step(state)
            manager.save(step, args=ocp.args.StandardSave(state), metrics={"loss": float(loss)})
        manager.wait_until_finished()
    return state


if __name__ == "__main__":
    model.try_out(train)
