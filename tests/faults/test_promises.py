"""Counts, for the scorecard, promises that other tests also cover: values, policies, exchange."""

from __future__ import annotations

import contextlib
import threading

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.stateful import run_state_machine_as_test
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from tests.golden import compare
from tests.interop.test_orbax_reads_ours import ENTRY_POINTS, assert_same
from tests.interop.test_reads_orbax import TREES
from tests.run.test_manager_model import Runs
from tests.twins import watched

ROUNDS = 50


# --- 27: values are those of the call ---------------------------------------------------------


def mutate(n, sharding):
    host = np.full(40_016, n, np.float32)
    host = host[-host.ctypes.data % 64 // 4 :]  # so aligned, jax can have the same memory
    yield {"leaf": host}
    host[:] = -1


def donate(n, sharding):
    device = jax.device_put(np.full((8, 5_000), n, np.float32), sharding)
    yield {"leaf": device}
    jax.jit(lambda x: x * -1 - 7, donate_argnums=0)(device).block_until_ready()


def delete(n, sharding):
    device = jax.device_put(np.full((8, 5_000), n, np.float32), sharding)
    yield {"leaf": device}
    device.delete()
    jnp.full((8, 5_000), -2, np.float32).block_until_ready()  # in the memory that is free now


@pytest.mark.parametrize("change", [mutate, donate, delete])
def test_what_happens_after_the_call_is_not_saved(ram_path, mesh, trial, change):
    """Fifty saves of a manager, none of which is waited for; and the like without one."""
    sharding = NamedSharding(mesh, P("x"))
    with jaxckpt.CheckpointManager(ram_path / "run") as manager:
        for n in range(ROUNDS):
            changes = change(n, sharding)
            manager.save(n, next(changes))
            with contextlib.suppress(StopIteration):
                next(changes)

    for n in range(ROUNDS):
        with trial("27", f"{change.__name__} after save {n}"):
            got = jaxckpt.restore(ram_path / "run" / str(n), as_numpy=True)["leaf"]
            assert (got == n).all()


def test_a_save_that_does_not_copy_is_noticed(ram_path):
    """A control: the same trial fails if a snapshot refers to the caller's numpy array.

    So it does if jax has that memory as its own, and says that it does not change.
    """
    changed = threading.Event()
    changes = mutate(1, None)
    tree = {"leaf": jax.dlpack.from_dlpack(next(changes)["leaf"], copy=False)}
    handle = jaxckpt.save_async(watched(ram_path / "a", lambda *_: changed.wait(60)), tree)
    with contextlib.suppress(StopIteration):
        next(changes)
    changed.set()
    handle.result()

    assert not (jaxckpt.restore(ram_path / "a", as_numpy=True)["leaf"] == 1).all()


# --- 28: what is kept -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_a_manager_does_what_the_model_does(ram_path, trial, seed):
    """Fifty random histories for each seed; see `tests/run/test_manager_model.py`."""
    histories = []

    class Counted(Runs):
        def teardown(self):
            super().teardown()
            histories.append(seed)

    machine = hypothesis.seed(seed)(lambda: Counted(ram_path))
    with trial("28", f"seed {seed}"):
        run_state_machine_as_test(
            machine,
            settings=hypothesis.settings(
                max_examples=50,
                stateful_step_count=25,
                deadline=None,
                database=None,
                suppress_health_check=list(hypothesis.HealthCheck),
            ),
        )

    for n in range(len(histories) - 1):
        with trial("28", f"history {n} of seed {seed}"):
            pass  # `run_state_machine_as_test` has raised if one was wrong


# --- 31: exchange with Orbax ------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_orbax_reads_ours(ram_path, mesh, trial, entry):
    """By each way in: a state of every kind of leaf, from a save and from a manager."""
    tree = {
        "w": jax.device_put(np.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("x", "y"))),
        "key": jax.random.key(3),
        "host": np.arange(5.0),
        "n": 7,
        "text": "ä",
        "list": [1, None, {}],
    }
    with jaxckpt.CheckpointManager(ram_path / "run") as manager:
        manager.save(3, tree)
    jaxckpt.save(ram_path / "one" / "3", tree)

    for place in ("run", "one"):
        with trial("31", f"Orbax's {entry} of our {place}"):
            assert_same(ENTRY_POINTS[entry](ram_path / place / "3"), tree)


@pytest.mark.parametrize("name", TREES)
def test_we_read_orbax(golden, trial, name):
    """Each sample of each release."""
    sample = golden(name)

    with trial("31", name):
        tree = jaxckpt.restore(sample.path, item=sample.about.get("item"))
        assert compare.problems(sample, tree) == []
