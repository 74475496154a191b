"""The model of these examples, and how a run is tried out. Neither knows checkpoints.

state = model.init()
state, loss = model.train_step(state)
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

State = dict[str, Any]
_OPTIMIZER = optax.adam(1e-2)


@jax.jit
def init() -> State:
    """Makes one layer and its optimizer."""
    params = {"w": jnp.ones((16, 16)), "b": jnp.zeros(16)}
    return {"params": params, "opt_state": _OPTIMIZER.init(params), "step": jnp.int32(0)}


@jax.jit
def train_step(state: State) -> tuple[State, jax.Array]:
    """Makes one step towards reversing a vector."""
    x = jax.random.uniform(jax.random.key(state["step"]), (64, 16))

    def loss_of(params: State) -> jax.Array:
        return jnp.mean((x @ params["w"] + params["b"] - x[:, ::-1]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = _OPTIMIZER.update(gradients, state["opt_state"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss


def try_out(train: Callable[[Path, int], State]) -> None:
    """Trains 20 steps at once, and 10 and 10; asserts that the states are equal to the bit."""
    with tempfile.TemporaryDirectory() as folder:
        whole = train(Path(folder, "whole"), 20)
        train(Path(folder, "parts"), 10)
        parts = train(Path(folder, "parts"), 20)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), whole, parts))
    print(f"step {parts['step']}: the run in two parts is equal to the one at once")
