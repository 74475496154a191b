"""A manager with named items: the state beside its configuration as JSON, the best steps kept.

python examples/orbax/composite.py
"""

from __future__ import annotations

from pathlib import Path

import jax
import model

import jaxckpt.orbax as ocp

CONFIG = {"learning_rate": 1e-2, "layers": [16, 16]}
OPTIONS = ocp.CheckpointManagerOptions(
    best_fn=lambda metrics: metrics["loss"], best_mode="min", max_to_keep=2
)


def train(root: Path, steps: int) -> model.State:
    """Trains to the given step, starting from the newest step of the run."""
    state = model.init()
    with ocp.CheckpointManager(root, item_names=("state", "config"), options=OPTIONS) as manager:
        start = manager.latest_step() or 0
        if start:
            args = ocp.args.Composite(
                state=ocp.args.StandardRestore(jax.eval_shape(model.init)),
                config=ocp.args.JsonRestore(),
            )
            restored = manager.restore(start, args=args)
            assert restored.config == CONFIG
            state = restored["state"]
        for step in range(start + 1, steps + 1):
            state, loss = model.train_step(state)
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(state), config=ocp.args.JsonSave(CONFIG)
            )
            manager.save(step, args=args, metrics={"loss": float(loss)})
        manager.wait_until_finished()
    return state


if __name__ == "__main__":
    model.try_out(train)
