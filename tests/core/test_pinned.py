"""Copies to pinned host memory: hidden behind the compute, within a budget, never of later values.

CPU devices have pinned host memory too, and arrays are really copied there. Here they count as
accelerators: what a save took must be what the arrays had when it was called, though they are
donated or deleted in the next line.
"""

import gc
import logging
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._core import pinned, transfer
from jaxckpt._restore import restore
from jaxckpt._save import snapshot, tree_plan

DTYPES = ["bool", "int4", "uint8", "float8_e4m3fn", "bfloat16", "float32", "complex64"]


pytestmark = pytest.mark.usefixtures("accelerators")


@pytest.fixture
def gate(monkeypatch):
    """Holds back all that waits for copies, until it is set."""
    opened = threading.Event()

    def arrived(taken, sources):
        assert opened.wait(60)
        return transfer.arrived(taken, sources)

    monkeypatch.setattr(snapshot, "arrived", arrived)
    yield opened
    opened.set()


@partial(jax.jit, donate_argnums=0)
def train(state):
    return jax.tree.map(lambda x: x + jnp.asarray(1, x.dtype), state)


def test_each_save_has_the_values_of_its_call(tmp_path):
    """A hundred saves of a manager, each followed by a step that donates what was saved."""
    state = {"w": jnp.zeros((256, 64)), "b": jnp.zeros(3, jnp.int32)}
    with jaxckpt.CheckpointManager(tmp_path / "run") as manager:
        for step in range(100):
            manager.save(step, state)
            before, state = state, train(state)
            assert before["w"].is_deleted()

    for step in range(100):
        got = jaxckpt.restore(tmp_path / "run" / str(step), as_numpy=True)
        assert (got["w"] == step).all()
        assert (got["b"] == step).all()


def test_a_donated_buffer_is_not_read(mesh):
    """A thousand times: taken, donated and overwritten, and only then waited for."""
    value = jax.device_put(jnp.zeros((64, 64)), NamedSharding(mesh, P("x")))
    plan, _ = tree_plan.plan_tree({"w": value}, jaxckpt.multihost.current())
    for n in range(1000):
        taken = transfer.stage([value], plan.sources, copy=True)
        assert all(one.sharding.memory_kind == "pinned_host" for one in taken)
        value = train(value)
        assert all((one == n).all() for one in transfer.arrived(taken, plan.sources))


def test_the_call_waits_for_no_copy(tmp_path, gate):
    state = {"w": jnp.arange(1000.0)}
    handle = jaxckpt.save_async(tmp_path / "a", state)  # would not return
    state["w"].delete()
    assert not handle.done()
    gate.set()
    handle.result()

    assert (jaxckpt.restore(tmp_path / "a", as_numpy=True)["w"] == np.arange(1000.0)).all()
    assert "copy" in handle.timing.phases


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_all_dtypes_arrive(tmp_path, dtype):
    state = {
        "some": jnp.ones((3, 5), dtype),
        "one": jnp.ones((), dtype),
        "none": jnp.ones((0, 4), dtype),
        "key": jax.random.key(7),
    }
    wanted = jax.tree.map(np.asarray, {k: v for k, v in state.items() if k != "key"})
    key = np.asarray(jax.random.key_data(state["key"]))
    handle = jaxckpt.save_async(tmp_path / "a", state)
    del state
    handle.result()

    got = jaxckpt.restore(tmp_path / "a")
    assert (np.asarray(jax.random.key_data(got.pop("key"))) == key).all()
    for name, value in wanted.items():
        assert np.asarray(got[name]).dtype == value.dtype
        assert (np.asarray(got[name]) == value).all()


def test_a_cast_is_checked_before_the_call_returns(tmp_path):
    with pytest.raises(jaxckpt.UnsupportedLeaf, match="leaf w cannot be saved as float16"):
        jaxckpt.save_async(tmp_path / "a", {"w": jnp.full(3, 1e30)}, dtype="float16")
    assert not (tmp_path / "a").exists()


# --- the budget ----------------------------------------------------------------------------------


@pytest.fixture
def budget(monkeypatch):
    """Sets the budget, beside what earlier tests have taken from it and not given back."""
    gc.collect()
    pinned.send([])  # counts what was given back

    def budget(size):
        pool = (size + pinned._taken_bytes) * 4 / 2**30
        monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", f"{pool}")

    return budget


def test_what_does_not_fit_is_waited_for(tmp_path, budget):
    budget(5000)
    arrays = [jnp.full(1000, n, jnp.float32) for n in range(3)]
    assert [one is not None for one in pinned.send(arrays)] == [True, False, False]

    handle = jaxckpt.save_async(tmp_path / "a", dict(enumerate(arrays)))
    handle.result()
    got = jaxckpt.restore(tmp_path / "a", as_numpy=True)
    assert [one[0] for one in got.values()] == [0, 1, 2]


def test_memory_is_given_back_when_a_save_has_ended(tmp_path, budget, gate):
    budget(10_000)
    state = {"w": jnp.zeros(1000), "b": jnp.zeros(1000)}
    first = jaxckpt.save_async(tmp_path / "a", state)
    assert pinned.send([jnp.zeros(1000)]) == [None]
    gate.set()
    first.result()
    assert pinned.send([jnp.zeros(1000)]) != [None]


def test_a_full_pool_is_no_error(tmp_path, monkeypatch, caplog, budget):
    """And what was not sent does not count."""
    budget(10_000)

    def full(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of host memory")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "jaxckpt"):
        patched.setattr(jax, "device_put", full)
        jaxckpt.save(tmp_path / "a", {"w": jnp.arange(2000.0)})
    assert "so this save waits for its copies: RESOURCE_EXHAUSTED" in caplog.text
    assert jaxckpt.restore(tmp_path / "a", as_numpy=True)["w"][-1] == 1999
    assert pinned.send([jnp.zeros(2000)]) != [None]


def test_the_budget_is_a_quarter_of_the_pool(monkeypatch):
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "0.5")
    assert pinned.budget_bytes() == 1 << 27
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "all of it")
    assert 1 << 27 < pinned.budget_bytes() <= 16 << 30


def test_arrays_in_host_memory_already_are_not_sent():
    """A copy to where it is would be the same buffer, which its owner may donate."""
    where = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    assert pinned.send([jax.device_put(jnp.zeros(3), where), None]) == [None, None]


# --- failures ------------------------------------------------------------------------------------


def test_a_failed_copy_fails_that_save(tmp_path, monkeypatch):
    with jaxckpt.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"w": jnp.ones(3)}).result()
        with monkeypatch.context() as patched:

            def lost(*_):
                raise RuntimeError("INTERNAL: the device is gone")

            patched.setattr(snapshot, "arrived", lost)
            handle = manager.save(2, {"w": jnp.ones(3)})
            with pytest.raises(jaxckpt.SaveFailed, match="the device is gone"):
                handle.result()
        manager.save(3, {"w": jnp.ones(3)})
    assert jaxckpt.CheckpointManager(tmp_path / "run", mode="r").all_steps() == [1, 3]


# --- restores ------------------------------------------------------------------------------------


@jax.jit
def slowly(value):
    """Returns it after a computation that takes a while, which nobody waits for."""
    busy = jax.lax.fori_loop(0, 20, lambda _, m: m @ m / 300, jnp.ones((300, 300)))
    return value + jnp.asarray(0 * busy[0, 0], value.dtype)


@pytest.fixture
def away(monkeypatch):
    """Lets restores count devices as such with memory of their own."""
    for module in (transfer, restore):
        monkeypatch.setattr(module, "is_away", lambda _: True)


@pytest.mark.parametrize("platform", [None, "cpu", "gpu"])
def test_the_default_device_is_that_of_its_block(platform):
    """Not that of the first platform; nothing is placed there, so that it need not exist."""
    with jax.default_device(platform):
        assert transfer.is_away(restore._default_device()) == (platform == "gpu")
        with jax.default_device(jax.devices()[0]):
            assert not transfer.is_away(restore._default_device())


@pytest.mark.usefixtures("away")
@pytest.mark.parametrize("spec", [P(), P("x")])
def test_copies_to_devices_take_half_of_the_budget(tmp_path, monkeypatch, make_mesh, spec):
    """The leaves after them are read in the meantime."""
    sharding = NamedSharding(make_mesh(x=2), spec)
    leaf = np.arange(1 << 16, dtype=np.float32)
    state = {f"w{n:02}": jax.device_put(leaf + n, sharding) for n in range(20)}
    jaxckpt.save(tmp_path / "a", state)
    of_one = leaf.nbytes * (3 if spec == P() else 2)  # what was read, and a copy for each device
    placed, under_way, to_device = [], [], transfer.to_device

    def to_slow_device(*args):
        under_way.append(sum(of_one for value in placed if not value.is_ready()))
        placed.append(slowly(to_device(*args)))
        return placed[-1]

    monkeypatch.setattr(restore, "to_device", to_slow_device)
    got = jaxckpt.restore(tmp_path / "a", state, budget_bytes=8 * of_one)

    assert of_one <= max(under_way) <= 4 * of_one
    assert all(value.is_ready() for value in placed)
    for n in range(20):
        assert np.array_equal(got[f"w{n:02}"], leaf + n)


@pytest.mark.usefixtures("away")
def test_a_failed_copy_to_a_device_fails_the_restore(tmp_path, monkeypatch):
    def lost(values):
        value = jax.device_put(values)
        value.delete()
        return value

    jaxckpt.save(tmp_path / "a", {"w": jnp.ones(3)})
    monkeypatch.setattr(restore, "to_default_device", lost)
    with pytest.raises(RuntimeError, match="deleted"):
        jaxckpt.restore(tmp_path / "a")
