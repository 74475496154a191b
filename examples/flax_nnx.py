"""Flax nnx: modules, optimizer and dropout keys resume with the same bits, initialised once.

python examples/flax_nnx.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxckpt


class Mlp(nnx.Module):
    """One hidden layer, with dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(1, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(nnx.tanh(self.up(x))))


def create() -> tuple[Mlp, nnx.Optimizer]:
    """Makes all objects that have a state."""
    model = Mlp(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


@jax.jit
def init() -> nnx.State:
    """Makes the first state; if there is a checkpoint, it is only traced for the shapes."""
    return nnx.state(create())


@nnx.jit
def train_step(model: Mlp, optimizer: nnx.Optimizer, step: int) -> jax.Array:
    """Makes one training step towards a sine."""
    x = jax.random.uniform(jax.random.fold_in(jax.random.key(1), step), (64, 1), maxval=3)
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - jnp.sin(x)) ** 2))(
        model
    )
    optimizer.update(model, gradients)
    return loss


def train(run: str | Path, steps: int = 40) -> Iterator[tuple[int, nnx.State, jax.Array]]:
    """Trains to the given step from the newest step of the run; yields what each step makes."""
    graph = nnx.graphdef(nnx.eval_shape(create))  # only shapes, no arrays
    save, keep = jaxckpt.SavePolicy(every_steps=10), jaxckpt.KeepPolicy(last=2)
    with jaxckpt.CheckpointManager(run, save=save, keep=keep) as manager:
        state, start = manager.restore_or(init)
        model, optimizer = nnx.merge(graph, state)
        for step in range(start + 1, steps + 1):
            loss = train_step(model, optimizer, step)
            state = nnx.state((model, optimizer))
            manager.save(step, state, metrics={"loss": loss})
            yield step, state, loss
        print(f"{Path(run).name}: steps {start + 1} to {steps}, loss {loss:.6f}")


def main() -> None:
    """Trains in one go and in two parts, and compares the results."""
    with tempfile.TemporaryDirectory() as folder:
        *_, (_, whole, _) = train(Path(folder, "whole"))
        *_, _ = train(Path(folder, "parts"), 20)
        *_, (_, parts, _) = train(Path(folder, "parts"))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(np.all(a == b)), whole, parts))
    print("the same bits")


if __name__ == "__main__":
    main()
