"""Equinox and optax: the arrays of a model are saved, its functions stay in the program.

python examples/equinox_model.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxckpt

OPTIMIZER = optax.adamw(1e-2)


def create() -> eqx.nn.MLP:
    """Makes a network with one hidden layer; its activation is a leaf that is not an array."""
    return eqx.nn.MLP(1, 1, 32, 1, activation=jnp.tanh, key=jax.random.key(0))


@jax.jit
def init() -> dict[str, Any]:
    """Makes the first state; if there is a checkpoint, it is only traced for the shapes."""
    params = eqx.filter(create(), eqx.is_array)
    return {"params": params, "opt_state": OPTIMIZER.init(params)}


# The leaves that are not arrays: functions and sizes.
STATIC = eqx.partition(eqx.filter_eval_shape(create), lambda x: hasattr(x, "shape"))[1]


@jax.jit
def train_step(state: dict[str, Any], step: int) -> tuple[dict[str, Any], jax.Array]:
    """Makes one training step towards a sine."""
    x = jax.random.uniform(jax.random.fold_in(jax.random.key(1), step), (64, 1), maxval=3)

    def loss_of(params: eqx.nn.MLP) -> jax.Array:
        return jnp.mean((jax.vmap(eqx.combine(params, STATIC))(x) - jnp.sin(x)) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"], state["params"])
    return {"params": eqx.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def train(run: str | Path, steps: int = 40) -> Iterator[tuple[int, dict[str, Any], jax.Array]]:
    """Trains to the given step from the newest step of the run; yields what each step makes."""
    save, keep = jaxckpt.SavePolicy(every_steps=10), jaxckpt.KeepPolicy(last=2)
    with jaxckpt.CheckpointManager(run, save=save, keep=keep) as manager:
        state, start = manager.restore_or(init)
        for step in range(start + 1, steps + 1):
            state, loss = train_step(state, step)
            manager.save(step, state, metrics={"loss": loss})
            yield step, state, loss
        print(f"{Path(run).name}: steps {start + 1} to {steps}, loss {loss:.6f}")


def main() -> None:
    """Trains in one go and in two parts, and compares the results."""
    with tempfile.TemporaryDirectory() as folder:
        *_, (_, whole, _) = train(Path(folder, "whole"))
        *_, _ = train(Path(folder, "parts"), 20)
        *_, (_, parts, _) = train(Path(folder, "parts"))
    assert jax.tree.all(jax.tree.map(np.array_equal, whole, parts))
    print("the same bits")


if __name__ == "__main__":
    main()
