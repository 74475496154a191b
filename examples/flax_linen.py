"""Flax linen and optax: a `TrainState` stopped half-way resumes with the same bits.

python examples/flax_linen.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import jaxckpt


class Mlp(nn.Module):
    """One hidden layer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(1)(nn.tanh(nn.Dense(32)(x)))


MODEL, OPTIMIZER = Mlp(), optax.adamw(1e-2)


@jax.jit
def init() -> TrainState:
    """Makes the first state; if there is a checkpoint, it is only traced for the shapes."""
    params = MODEL.init(jax.random.key(0), jnp.zeros((1, 1)))["params"]
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=OPTIMIZER)


@jax.jit
def train_step(state: TrainState) -> tuple[TrainState, jax.Array]:
    """Makes one step towards a sine; the data depend only on `state.step`, which is saved too."""
    x = jax.random.uniform(jax.random.fold_in(jax.random.key(1), state.step), (64, 1), maxval=3)

    def loss_of(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((state.apply_fn({"params": params}, x) - jnp.sin(x)) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


def train(run: str | Path, steps: int = 40) -> Iterator[tuple[int, TrainState, jax.Array]]:
    """Trains to the given step from the newest step of the run; yields what each step makes."""
    save, keep = jaxckpt.SavePolicy(every_steps=10), jaxckpt.KeepPolicy(last=2)
    with jaxckpt.CheckpointManager(run, save=save, keep=keep) as manager:
        state, start = manager.restore_or(init)
        for step in range(start + 1, steps + 1):
            state, loss = train_step(state)
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
