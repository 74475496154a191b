"""A manager in the older style: a checkpointer for each item, `items=` and `restore_kwargs=`.

python examples/orbax/manager_items.py
"""

from __future__ import annotations

from pathlib import Path

import model

import jaxckpt.orbax as ocp


def train(root: Path, steps: int) -> model.State:
    """Trains to the given step, starting from the newest step of the run."""
    state = model.init()
    checkpointers = {
        "params": ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()),
        "optimizer": ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()),
    }
    options = ocp.CheckpointManagerOptions(save_interval_steps=5, create=True)
    manager = ocp.CheckpointManager(root, checkpointers, options)
    start = manager.latest_step() or 0
    if start:
        kwargs = {
            name: {"restore_args": ocp.checkpoint_utils.construct_restore_args(item)}
            for name, item in items_of(state).items()
        }
        items = manager.restore(start, items=items_of(state), restore_kwargs=kwargs)
        state = {"params": items["params"], **items["optimizer"]}
    for step in range(start + 1, steps + 1):
        state, _ = model.train_step(state)
        manager.save(step, items_of(state))
    manager.wait_until_finished()
    manager.close()
    return state


def items_of(state: model.State) -> dict[str, model.State]:
    """Returns the weights and everything else."""
    return {"params": state["params"], "optimizer": {k: state[k] for k in ("opt_state", "step")}}


if __name__ == "__main__":
    model.try_out(train)
