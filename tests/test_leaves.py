"""Sets ceilings on the cost of a leaf, in calls of Python functions, page faults and bytes on disk.

None depends on how busy the machine is. Calls include those of jax and numpy.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxckpt
from jaxckpt._core.collector import paused
from jaxckpt.format.sharding import SavedSharding, encode

LEAVES = 4000


def calls_of(call: Callable[[], object]) -> int:
    """Counts the calls of Python functions, in all threads; the second time, with filled caches."""
    call()
    events: list[str] = []  # appending is safe in any thread
    threading.setprofile(lambda _, event, __: events.append(event))
    sys.setprofile(lambda _, event, __: events.append(event))
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return events.count("call")


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A tree of many small arrays, as long as a kilobyte, in layers."""
    path = tmp_path_factory.mktemp("many") / "a"
    tree = {
        f"layer_{n:02}": {f"w{i}": np.full(256, n * i, np.float32) for i in range(100)}
        for n in range(LEAVES // 100)
    }
    jaxckpt.save(path, tree)
    return path, tree


def test_one_leaf_costs_the_same_in_a_tree_of_any_size(many, tmp_path):
    """Neither the other leaves nor their places are decoded."""
    path, tree = many
    jaxckpt.save(tmp_path / "few", {"layer_07": {"w9": tree["layer_07"]["w9"], "b": 1}})

    def restore(path):
        return jaxckpt.open(path)["layer_07/w9"].restore()

    assert np.array_equal(restore(path), tree["layer_07"]["w9"])
    of_many, of_few = (calls_of(lambda at=at: restore(at)) for at in (path, tmp_path / "few"))
    assert of_many < of_few + 200 < 2000


@pytest.mark.parametrize(
    ("spec", "most"), [(PartitionSpec(), 43), (PartitionSpec("x", "y"), 51)], ids=["all", "shards"]
)
def test_a_restore_takes_few_calls_for_each_leaf(tmp_path, mesh, spec, most):
    """Of arrays that are alike, most facts are found once: on every device, or in eight shards."""
    split = NamedSharding(mesh, spec)
    tree = {
        f"layer_{n:02}": {f"w{i}": np.full((32, 64), n * i, np.float32) for i in range(50)}
        for n in range(20)
    }
    jaxckpt.save(tmp_path / "a", jax.device_put(tree, split))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split), tree)

    calls = calls_of(lambda: jaxckpt.restore(tmp_path / "a", like))
    as_saved = calls_of(lambda: jaxckpt.restore(tmp_path / "a"))

    # Before Python 3.12 a comprehension is a call too.
    most *= 1000
    assert max(calls, as_saved) < (most if sys.version_info >= (3, 12) else most + 10_000)


def test_the_first_save_takes_few_calls_of_its_caller_for_each_leaf(tmp_path):
    """It takes the values and checks the tree; leaves, writes and metadata are made meanwhile."""
    leaves = [jax.numpy.full(4, n) for n in range(1000)]
    tree = {
        f"layer_{n:02}": dict(zip("abcdefghij", leaves[n::100], strict=True)) for n in range(100)
    }
    jaxckpt.save_async(tmp_path / "warm", leaves[:9]).result()
    calls: list[str] = []

    sys.setprofile(lambda _, event, __: calls.append(event))
    try:
        handle = jaxckpt.save_async(tmp_path / "a", tree)
    finally:
        sys.setprofile(None)

    handle.result()
    # Before Python 3.12 a comprehension is a call too.
    assert calls.count("call") < (30 if sys.version_info >= (3, 12) else 32) * 1000


def test_the_collector_does_not_look_through_a_tree_that_grows(many):
    """It would once for some thousands of leaves, and find nothing."""
    path, _ = many
    opened, runs = jaxckpt.open(path), []

    def noted(phase, info):
        if phase == "start":
            runs.append(info["generation"])

    gc.collect()
    gc.callbacks.append(noted)
    try:
        opened._opened  # noqa: B018  # which decodes all leaves
    finally:
        gc.callbacks.remove(noted)

    assert len(runs) <= 1  # once it may run again
    assert gc.isenabled()


def test_the_collector_is_left_as_it_was():
    """Off if it was off; and still, until the last of two threads is done."""
    first, second = paused(), paused()
    gc.disable()
    try:
        with first:
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()

    first, outcome = paused(), []
    with first:
        thread = threading.Thread(target=lambda: outcome.append(second.__enter__()))
        thread.start()
        thread.join()
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def pauses_but_for(n):
    """Raises KeyboardInterrupt when the n-th call of C in `paused` returns, where Python does."""
    calls = [0]

    def look(frame, event, _):
        if event == "c_return" and frame.f_code.co_name == "paused":
            calls[0] += 1
            if calls[0] == n:
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        with paused():
            pass
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def test_an_interrupt_does_not_switch_the_collector_off():
    enabled = []
    while pauses_but_for(len(enabled) + 1):
        enabled.append(gc.isenabled())
        gc.enable()

    assert len(enabled) > 4
    assert all(enabled)


# --- bytes on disk ---------------------------------------------------------------------------


def test_a_leaf_takes_few_bytes_beside_its_values(many):
    """About 230 in the tree, which Orbax reads, and 350 in the database, most of them zarr's."""
    path, tree = many
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())

    beside = size - sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

    assert beside < 620 * LEAVES


def test_the_shardings_of_a_large_mesh_take_few_bytes():
    """Its 4,096 devices are listed once, not for each leaf."""
    on = {"axis_names": ("x", "y"), "axis_sizes": (64, 64), "device_ids": tuple(range(4096))}
    kinds = [SavedSharding(spec=spec, **on) for spec in ((), ("x",), ("y", "x"), (None, "y"))]

    data = encode({f"layer_{i}": kinds[i % 4] for i in range(10_000)})

    assert len(data) < 2_000_000


# --- memory ----------------------------------------------------------------------------------

MIDDLING = {f"w{i:02}": (512, 1280) for i in range(40)}  # of 2.5 MiB: numpy asks for no huge pages
MIB = 1 << 20
RESTORES = """
import resource, sys
import jax, numpy as np
import jaxckpt
from tests.test_leaves import MIDDLING
like = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in MIDDLING.items()}
jaxckpt.restore(sys.argv[2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
tree = jaxckpt.restore(sys.argv[1], like)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
assert all((np.asarray(tree[name]) == i).all() for i, name in enumerate(tree))
"""


@pytest.fixture(scope="module")
def middling(tmp_path_factory):
    """A tree of 100 MiB in arrays of 2.5 MiB."""
    path = tmp_path_factory.mktemp("middling") / "a"
    shapes = enumerate(MIDDLING.items())
    jaxckpt.save(path, {name: np.full(shape, i, np.float32) for i, (name, shape) in shapes})
    return path


@pytest.mark.skipif(
    "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(),
    reason="this kernel gives no huge pages",
)
def test_arrays_of_some_size_lie_in_huge_pages(middling, tmp_path):
    """The first restore of a process takes a fault for 2 MiB, not for 4 KiB, which are 25,600."""
    jaxckpt.save(tmp_path / "warm", {"a": np.zeros(3, np.float32)})
    command = [sys.executable, "-c", RESTORES, str(middling), str(tmp_path / "warm")]
    root = Path(__file__).parents[1]

    done = subprocess.run(command, cwd=root, capture_output=True, check=False, text=True)

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1000


@pytest.mark.parametrize("as_numpy", [True, False])
def test_one_array_that_is_kept_keeps_little_memory(middling, as_numpy):
    """The arrays that lie around it are freed once nothing else in its piece of memory is used."""
    tracemalloc.start()
    try:
        tree = jaxckpt.restore(middling, as_numpy=as_numpy)
        everything, _ = tracemalloc.get_traced_memory()
        kept = tree["w17"]
        del tree
        left, _ = tracemalloc.get_traced_memory()
        tracemalloc.clear_traces()
    finally:
        tracemalloc.stop()

    assert everything > 95 * MIB
    assert left < 20 * MIB
    assert (np.asarray(kept) == 17).all()
