"""LoRA: the base is restored and never saved again, and only the adapters are saved.

python examples/lora.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxckpt

OPTIMIZER = optax.adam(1e-2)
ADAPTERS = "*/lora_*"  # matches leaf paths
Params = dict[str, dict[str, jax.Array]]


def create(rank: int = 4) -> Params:
    """Makes two layers, each with a kernel and the two factors of an adapter."""
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        name: {
            "kernel": jax.random.normal(keys[i], (64, 64)) / 8,
            "lora_a": jax.random.normal(keys[i + 2], (64, rank)) / 8,
            "lora_b": jnp.zeros((rank, 64)),
        }
        for i, name in enumerate(("up", "down"))
    }


def part(params: Params, *, adapters: bool) -> Params:
    """Returns only the adapters, or everything but the adapters."""
    return {
        name: {leaf: x for leaf, x in layer.items() if leaf.startswith("lora_") == adapters}
        for name, layer in params.items()
    }


def apply(params: Params, x: jax.Array) -> jax.Array:
    for layer in params.values():
        x = jnp.tanh(x @ (layer["kernel"] + layer["lora_a"] @ layer["lora_b"]))
    return x


@jax.jit
def train_step(state: dict[str, Any], base: Params, step: int) -> tuple[dict[str, Any], jax.Array]:
    """Makes one step that changes only the adapters, towards reversing a vector."""
    x = jax.random.uniform(jax.random.fold_in(jax.random.key(1), step), (64, 64))

    def loss_of(adapters: Params) -> jax.Array:
        params = {name: base[name] | adapters[name] for name in base}
        return jnp.mean((apply(params, x) - x[:, ::-1]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["adapters"])
    updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"])
    return {
        "adapters": optax.apply_updates(state["adapters"], updates),
        "opt_state": opt_state,
    }, loss


def tune(base_path: Path, run: Path, steps: int) -> Params:
    """Tunes to the given step, starting from the newest step of the run."""
    base = jaxckpt.restore(base_path, part(jax.eval_shape(create), adapters=False))

    @jax.jit
    def init() -> dict[str, Any]:
        adapters = part(create(), adapters=True)
        return {"adapters": adapters, "opt_state": OPTIMIZER.init(adapters)}

    with jaxckpt.CheckpointManager(run, save=jaxckpt.SavePolicy(every_steps=10)) as manager:
        state, start = manager.restore_or(init)
        for step in range(start + 1, steps + 1):
            state, loss = train_step(state, base, step)
            manager.save(step, state, metrics={"loss": loss})
        print(f"{run.name}: steps {start + 1} to {steps}, loss {loss:.6f}")
    return {name: base[name] | state["adapters"][name] for name in base}


def main() -> None:
    """Tunes in one go and in two parts, combines base and adapters, and compares the results."""
    with tempfile.TemporaryDirectory() as folder:
        base, run = Path(folder, "base"), Path(folder, "parts")
        jaxckpt.save(base, part(create(), adapters=False))
        whole = tune(base, Path(folder, "whole"), 40)
        tune(base, run, 20)
        parts = tune(base, run, 40)
        assert jax.tree.all(jax.tree.map(np.array_equal, whole, parts))

        # To serve it: skipped leaves keep the target's values, and the adapters then fill them.
        empty = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), jax.eval_shape(create))
        params = jaxckpt.restore(base, empty, skip=ADAPTERS)
        tuned = jaxckpt.restore(run, {"adapters": params}, only=f"adapters/{ADAPTERS}")["adapters"]
        assert jax.tree.all(jax.tree.map(np.array_equal, whole, tuned))

        adapters = jaxckpt.open(run)["adapters"]
        print(f"a step has {adapters.size_bytes} bytes of adapters and nothing of the base:")
        print(adapters)


if __name__ == "__main__":
    main()
