"""A training loop whose options, including those of its checkpoints, are absl flags.

    python examples/flags.py --config=configs/train.py --config.checkpoint.directory=DIR \\
        --config.checkpoint.keep.last=2

Started again with more --config.steps, it resumes where it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from absl import app
from ml_collections import config_flags

import jaxckpt

CONFIG = config_flags.DEFINE_config_file("config", default="configs/train.py")


@jax.jit
def init() -> dict[str, jax.Array]:
    """Starts with a line through the origin with slope 0."""
    return {"slope": jnp.zeros(()), "offset": jnp.zeros(())}


@jax.jit
def train_step(
    params: dict[str, jax.Array], step: int, rate: float
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Makes one step of gradient descent towards y = 3x - 1."""
    x = jax.random.uniform(jax.random.fold_in(jax.random.key(0), step), (32,))

    def loss_of(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((params["slope"] * x + params["offset"] - (3 * x - 1)) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - rate * g, params, gradients), loss


def main(argv: Sequence[str]) -> None:
    """Trains as the flags say."""
    config = CONFIG.value
    with jaxckpt.CheckpointManager.from_config(config.checkpoint) as manager:
        params, start = manager.restore_or(init)
        print(f"from step {start}")
        for step in range(start + 1, config.steps + 1):
            params, loss = train_step(params, step, config.learning_rate)
            manager.save(step, params, metrics={"loss": loss})
        manager.wait_until_finished()
        print(f"kept steps {manager.all_steps()}")


if __name__ == "__main__":
    app.run(main)
