"""The device side on a real accelerator: `make gpu`. The logic is tested in `test_pinned.py`."""

import gc
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._core import fingerprint, pinned, transfer
from jaxckpt._save.tree_plan import plan_tree
from jaxckpt.multihost import current
from tests.core.test_pinned import DTYPES, train
from tests.waiting import waited_until

pytestmark = pytest.mark.gpu

BUDGET_BYTES = 64 << 20


@pytest.fixture(scope="module", autouse=True)
def device():
    """The first accelerator."""
    found = [device for device in jax.devices() if device.platform != "cpu"]
    assert found, "no accelerator is visible to jax; set JAX_PLATFORMS=cuda,cpu"
    return found[0]


@pytest.fixture(params=["one", "mesh"])
def sharding(request, device):
    """On one device, and on a mesh of all."""
    if request.param == "one":
        return SingleDeviceSharding(device)
    return NamedSharding(Mesh(np.array(jax.devices(device.platform)), "x"), P())


@pytest.mark.parametrize("dtype", [*DTYPES, "uint4", "float16", "float64"])
def test_values_of_all_dtypes_come_back(tmp_path, sharding, dtype):
    """With a key, a scalar and an empty array beside them; real Orbax reads the plain ones too."""
    with jax.enable_x64(True):
        values = jnp.arange(35).reshape(5, 7) % 5
        state = {"some": values.astype(dtype), "one": jnp.ones((), dtype), "none": jnp.ones(0)}
        state = jax.device_put({**state, "key": jax.random.key(3)}, sharding)
        wanted = jax.tree.map(bits, state)
        jaxckpt.save(tmp_path / "a", state)

        for like in (state, None):
            got = jaxckpt.restore(tmp_path / "a", like)
            assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, state)
            assert jax.tree.map(bits, got) == wanted
        assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(state))


def bits(array):
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


def test_orbax_reads_what_a_device_saved(tmp_path, sharding):
    ocp = pytest.importorskip("orbax.checkpoint")
    state = jax.device_put({"w": jnp.arange(1000.0), "b": jnp.ones(3, jnp.bfloat16)}, sharding)
    jaxckpt.save(tmp_path / "a", state)

    got = ocp.StandardCheckpointer().restore(tmp_path / "a" / "state", state)
    assert jax.tree.map(bits, got) == jax.tree.map(bits, state)


def test_a_donated_buffer_is_not_read(sharding):
    """Three thousand times: taken, donated and overwritten, and only then waited for."""
    value = jax.device_put(jnp.zeros((512, 512)), sharding)
    plan, _ = plan_tree({"w": value}, current())
    for n in range(3000):
        taken = transfer.stage([value], plan.sources, copy=True)
        assert all(one.sharding.memory_kind == "pinned_host" for one in taken)
        value = train(value)
        assert all((one == n).all() for one in transfer.arrived(taken, plan.sources))


def test_each_save_of_a_training_has_the_values_of_its_call(tmp_path, sharding):
    state = jax.device_put({"w": jnp.zeros((256, 4096)), "n": jnp.zeros((), jnp.int32)}, sharding)
    with jaxckpt.CheckpointManager(tmp_path / "run") as manager:
        for step in range(60):
            manager.save(step, state)
            for _ in range(3):
                state = train(state)
    for step in range(60):
        got = jaxckpt.restore(tmp_path / "run" / str(step), as_numpy=True)
        assert (got["w"] == 3 * step).all()
        assert got["n"] == 3 * step


def test_a_save_waits_for_no_computation(tmp_path, device):
    """It returns while the arrays are being computed."""

    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 400, lambda _, y: y @ x / jnp.abs(y).max(), x)

    x = jax.device_put(jnp.ones((4096, 4096)), device)
    slow(x).block_until_ready()  # compiled
    jaxckpt.save(tmp_path / "first", {"y": x})  # has allocated the pinned memory
    y = slow(x)
    handle = jaxckpt.save_async(tmp_path / "a", {"y": y})
    returned_early = not y.is_ready()
    handle.result()

    assert returned_early
    assert bits(jaxckpt.restore(tmp_path / "a")["y"]) == bits(y)


def test_what_has_not_changed_stays_on_the_device(tmp_path, device, staged):
    """Equal arrays too: the second step is the first that has fingerprints, the fourth asks it."""
    kept = jax.device_put(jnp.arange(1 << 22, dtype=jnp.float32), device)

    def is_compiled():
        return any(shape == kept.shape for shape, *_ in list(fingerprint._programs))

    with jaxckpt.CheckpointManager(tmp_path) as manager:
        for step in range(1, 6):
            state = {"kept": kept + 0, "w": jax.device_put(jnp.full(1000, step), device)}
            manager.save(step, state).result()
            manager.wait_until_finished()
            waited_until(is_compiled, limit_s=60)

    assert [found > kept.nbytes for found in staged] == [True, True, True, False, False]
    for step in range(1, 6):
        got = jaxckpt.restore(tmp_path / str(step), as_numpy=True)
        assert bits(got["kept"]) == bits(kept)
        assert (got["w"] == step).all()


def test_arrays_in_pinned_memory_are_saved_and_restored_there(tmp_path, device):
    where = SingleDeviceSharding(device, memory_kind="pinned_host")
    state = {"w": jax.device_put(jnp.arange(1000.0), where)}
    jaxckpt.save(tmp_path / "a", state)

    got = jaxckpt.restore(tmp_path / "a", state)
    assert got["w"].sharding.memory_kind == "pinned_host"
    assert bits(got["w"]) == bits(state["w"])


def test_pinned_memory_is_used_again(tmp_path, device, caplog):
    """Fifty saves that would not fit together, of which none finds the pool full."""
    state = {"w": jax.device_put(jnp.zeros((16 << 20,)), device)}
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        for n in range(50):
            jaxckpt.save(tmp_path / "a", state, overwrite=True)
            state = train(state)
            assert n < 49 or (jaxckpt.restore(tmp_path / "a", as_numpy=True)["w"] == n).all()
    assert "pinned" not in caplog.text
    gc.collect()
    assert pinned.send([jnp.zeros(3)]) != [None]
    assert pinned._taken_bytes <= state["w"].nbytes


def test_a_restore_needs_little_more_device_memory_than_the_state(tmp_path, device):
    """Into `like` with live arrays: those, the new ones, and the budget."""
    if (stats := device.memory_stats()) is None or "peak_bytes_in_use" not in stats:
        pytest.skip("this backend does not say how much memory is in use")
    state = {f"w{n}": jax.device_put(jnp.full((64, 1 << 20), n), device) for n in range(8)}
    size = sum(leaf.nbytes for leaf in state.values())
    jaxckpt.save(tmp_path / "a", state)
    # What was in use before and at the peak may hide a part of the new peak, but adds nothing.
    before = device.memory_stats()["bytes_in_use"]
    got = jaxckpt.restore(tmp_path / "a", state, budget_bytes=BUDGET_BYTES)
    jax.block_until_ready(got)

    peak = device.memory_stats()["peak_bytes_in_use"]
    assert peak <= max(stats["peak_bytes_in_use"], before + size + BUDGET_BYTES)
    assert (got["w7"] == 7).all()


def test_processes_read_each_value_once_over_nccl(run_processes, tmp_path):
    """Two processes of one GPU each: reshards, and adds up, without changing a bit.

    Where there is one GPU, they share it, and NCCL takes them for two hosts.
    """
    rows = NamedSharding(Mesh(np.array(jax.devices("cpu")[:2]), "x"), P("x"))
    bits = np.random.default_rng(0).integers(0, 256, (512, 4096), np.uint8)
    tree = {"rows": jax.device_put(bits.view(np.float32), rows), "small": bits[0].view(np.float16)}
    # The chunk of "whole" is read by one of two replicas, and added up.
    jaxckpt.save(tmp_path / "a", {**tree, "columns": tree["rows"], "whole": bits.view(np.float32)})
    wanted = {"rows": ({"x": 2}, []), "columns": ({"x": 2}, [None, "x"]), "whole": ({"x": 2}, [])}

    one_gpu = {"ONE_GPU": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}

    done = run_processes(
        "once:restore_each",
        devices_per_process=1,
        args=[tmp_path / "a", wanted],
        fresh=True,
        # This process has most of the memory.
        env={
            "JAX_PLATFORMS": "cuda",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            **(one_gpu if jax.local_device_count() < 2 else {}),
        },
    )

    for one in done:
        for name, found in one.result.items():
            assert found["same"], name
            assert (found["once"], found["job"]) == ([name], found["size"])
