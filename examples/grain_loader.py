"""Grain: the position of a data iterator is saved with the step, and no example is seen twice.

python examples/grain_loader.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np

import jaxckpt


def batches() -> grain.DatasetIterator:
    """Returns an endless iterator over shuffled batches of points on a line."""
    points = np.linspace(0, 1, 1000, dtype=np.float32)
    data = grain.MapDataset.source(points).seed(0).shuffle().repeat().batch(32)
    return iter(data.to_iter_dataset())


@jax.jit
def init() -> dict[str, jax.Array]:
    """Starts with a line through the origin with slope 0."""
    return {"slope": jnp.zeros(()), "offset": jnp.zeros(())}


@jax.jit
def train_step(
    params: dict[str, jax.Array], x: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Makes one step of gradient descent towards y = 3x - 1."""

    def loss_of(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((params["slope"] * x + params["offset"] - (3 * x - 1)) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def train(
    run: str | Path, steps: int = 40
) -> Iterator[tuple[int, dict[str, jax.Array], jax.Array, np.ndarray]]:
    """Trains to the given step from the newest step of the run; yields what each step makes."""
    data = batches()
    save, keep = jaxckpt.SavePolicy(every_steps=10), jaxckpt.KeepPolicy(last=2)
    with jaxckpt.CheckpointManager(run, save=save, keep=keep) as manager:
        params, start = manager.restore_or(init, items={"data": data})  # restores `data` in place
        for step in range(start + 1, steps + 1):
            batch = next(data)
            params, loss = train_step(params, batch)
            manager.save(step, params, items={"data": data}, metrics={"loss": loss})
            yield step, params, loss, batch
        print(f"{Path(run).name}: steps {start + 1} to {steps}, loss {loss:.6f}")


def main() -> None:
    """Trains in one go and in two parts, and compares the results."""
    with tempfile.TemporaryDirectory() as folder:
        *_, (_, whole, *_) = train(Path(folder, "whole"))
        *_, _ = train(Path(folder, "parts"), 20)
        *_, (_, parts, *_) = train(Path(folder, "parts"))
    assert jax.tree.all(jax.tree.map(np.array_equal, whole, parts))
    print("the same bits")


if __name__ == "__main__":
    main()
