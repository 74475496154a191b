"""Training loops to resume: a right one, and one for each mistake."""

from __future__ import annotations

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt import CheckpointManager
from tests.workers.saves import mesh_of

SHAPE = (32, 256)
_seen = {"sum": 0.0}  # what a module has added up


class Data:
    """Batches by their number."""

    def __init__(self):
        self.next = 0

    def __next__(self):
        self.next += 1
        return np.random.default_rng(self.next).standard_normal(SHAPE, np.float32)

    def get_state(self):
        return {"next": self.next}

    def set_state(self, state):
        self.next = state["next"]


def make_state():
    return {
        "params": {"w": jnp.ones(SHAPE)},
        "opt": {"count": 0, "mean": jnp.zeros(SHAPE)},
        "key": jax.random.key(0),
        "added": 0.0,
    }


@jax.jit
def update(state, batch, rate):
    """One step with momentum and dropout."""
    key, now = jax.random.split(state["key"])
    batch = batch * jax.random.bernoulli(now, 0.9, batch.shape)

    def loss_of(w):
        return jnp.mean(jnp.log1p(jnp.mean((w - batch) ** 2, axis=1)))

    loss, gradient = jax.value_and_grad(loss_of)(state["params"]["w"])
    count = state["opt"]["count"] + 1
    mean = 0.9 * state["opt"]["mean"] + gradient
    w = state["params"]["w"] - rate * mean / (1 - 0.9**count)
    return {"params": {"w": w}, "opt": {"count": count, "mean": mean}, "key": key}, loss


def loop(run, *, fault="", start=True, batch=True, steps=12, prefix=None):
    """Trains; `start` and `batch` decide how much it yields."""
    data, added, resumed = Data(), 0.0, None
    saves_key = fault != "key"

    def init():
        return {k: v for k, v in make_state().items() if saves_key or k != "key"}

    with CheckpointManager(run, step_prefix=prefix) as manager:
        items = {} if fault == "data" else {"data": data}
        state, step = manager.restore_or(init, items=items)
        resumed = step > 0
        state = make_state() | state
        if fault == "opt" and resumed:
            state["opt"] = make_state()["opt"]
        if fault == "order":
            spec = P() if resumed else P(None, "x")
            state["params"]["w"] = jax.device_put(
                state["params"]["w"], NamedSharding(mesh_of(x=8), spec)
            )
        if fault == "forgets":
            step, state = 0, make_state()
            resumed = False
        if start:
            yield step, state, None
        while step < steps:
            step += 1
            now = next(data)
            rate = 0.1
            if fault == "order":  # each device adds up what it has, and then they add that up
                w = np.asarray(state["params"]["w"])
                rate *= float(sum(part.sum() for part in np.split(w, 1 if resumed else 8, axis=1)))
                rate /= w.size
            if fault == "host":
                rate /= 1 + added
            if fault == "module":
                rate /= 1 + _seen["sum"]
            if fault == "numpy":
                now = now + np.float32(np.random.random())
            if fault == "clock":
                rate *= 1 + int.from_bytes(os.urandom(4)) / 2**26
            before = state["added"]
            state, loss = update({k: state[k] for k in ("params", "opt", "key")}, now, rate)
            added, _seen["sum"] = added + float(loss), _seen["sum"] + float(loss)
            state["added"] = before + float(loss)
            if not (fault == "forgets" and manager.latest_step()):
                saved = {k: v for k, v in state.items() if saves_key or k != "key"}
                manager.save(step, saved, items=items)
            yield (step, state, loss, *([now] if batch and fault != "numpy" else []))


module = functools.partial(loop, fault="module")  # as `loops:module`
