"""Orbax's v1: a checkpointer of a run with policies, and an export of the weights.

python examples/orbax/v1_checkpointer.py
"""

from __future__ import annotations

from pathlib import Path

import jax
import model

import jaxckpt.orbax.v1 as ocp

SAVES = ocp.training.save_decision_policies.FixedIntervalPolicy(2)
KEEPS = ocp.training.preservation_policies.LatestN(3)


def train(root: Path, steps: int) -> model.State:
    """Trains to the given step, starting from the newest step of the run."""
    state = model.init()
    with ocp.training.Checkpointer(
        root / "run", save_decision_policy=SAVES, preservation_policy=KEEPS
    ) as checkpointer:
        start = 0 if checkpointer.latest is None else checkpointer.latest.step
        if start:
            state = checkpointer.load(start, jax.eval_shape(model.init))
        for step in range(start + 1, steps + 1):
            state, _ = model.train_step(state)
            checkpointer.save_async(step, state)
    ocp.save(root / "weights", state["params"], overwrite=True)
    return state


if __name__ == "__main__":
    model.try_out(train)
