"""A checkpointer without a manager: one directory, replaced by each save, read by step.

python examples/orbax/checkpointer.py
"""

from __future__ import annotations

from pathlib import Path

import jax
import model

import jaxckpt.orbax as ocp


def train(root: Path, steps: int) -> model.State:
    """Trains to the given step, starting from what was saved last."""
    checkpointer = ocp.PyTreeCheckpointer()
    state, path = model.init(), root / "latest"
    if path.exists():
        restore_args = ocp.checkpoint_utils.construct_restore_args(state)
        state = checkpointer.restore(path, item=state, restore_args=restore_args)
    while state["step"] < steps:
        state, _ = model.train_step(state)
        if state["step"] % 5 == 0:
            save_args = jax.tree.map(lambda _: ocp.SaveArgs(), state)
            checkpointer.save(path, state, save_args=save_args, force=True)
    return state


if __name__ == "__main__":
    model.try_out(train)
