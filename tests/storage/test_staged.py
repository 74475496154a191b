"""Where TensorStore has no driver, its files pass through memory, and all works as elsewhere."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxckpt
from jaxckpt.errors import SaveFailed
from jaxckpt.format import arrays, ocdbt
from jaxckpt.format.ocdbt import Place
from jaxckpt.storage import _staged, locate
from jaxckpt.storage._arrays import Reader
from jaxckpt.testing import simulate
from tests.golden import compare
from tests.golden.fixture import golden_names
from tests.twins import watched

TREES = [name for name in golden_names() if "item-kinds" not in name]
RNG = np.random.default_rng(0)


@pytest.fixture
def root(request):
    """A store in memory that TensorStore cannot reach."""
    root = f"memory://{request.node.name}"
    yield root
    storage, path = locate(root)
    storage.delete(path)


def tree_of(mesh):
    split = NamedSharding(mesh, PartitionSpec("x", "y"))
    return {
        "w": jax.device_put(RNG.integers(0, 9, (512, 512), np.int32), split),
        "wide": RNG.integers(0, 9, (3, 500_000), np.int32),
        "small": np.arange(10.0),
        "nibbles": jnp.arange(-8, 8, dtype=jnp.int4),
        "scalar": np.float32(3),
        "step": 7,
        "name": "a text",
    }


def same(found, tree):
    return found.keys() == tree.keys() and all(np.array_equal(found[k], tree[k]) for k in tree)


def left_in_memory():
    gc.collect()
    return Reader({"driver": "memory", "path": "jaxckpt-"}, database=False).keys()


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_in_memory():
    """Looks once for all tests: collecting the garbage takes half a second."""
    yield
    assert left_in_memory() == []


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_checkpoint_is_saved_and_restored(root, mesh, make_mesh, limits, compression):
    """With inner chunks; nothing of it stays in memory."""
    limits(arrays, MAX_UNIT_BYTES=1 << 20)
    tree = tree_of(mesh)

    jaxckpt.save(f"{root}/a", tree, compression=compression)

    assert same(jaxckpt.restore(f"{root}/a"), tree)
    other = NamedSharding(make_mesh(x=2), PartitionSpec(None, "x"))
    like = {**tree, "w": jax.ShapeDtypeStruct((512, 512), np.int32, sharding=other)}
    assert same(jaxckpt.restore(f"{root}/a", like), tree)
    assert jaxckpt.verify(f"{root}/a").ok
    assert left_in_memory() == []


@pytest.mark.parametrize("ocdbt", [True, False])
def test_a_checkpoint_is_converted_both_ways(root, mesh, tmp_path, ocdbt):
    """Into a database, and into plain files of zarr."""
    tree = tree_of(mesh)
    jaxckpt.save(tmp_path / "a", tree)

    jaxckpt.convert(tmp_path / "a", f"{root}/b", ocdbt=ocdbt)
    jaxckpt.convert(f"{root}/b", tmp_path / "c")

    assert same(jaxckpt.restore(f"{root}/b"), tree)
    assert same(jaxckpt.restore(tmp_path / "c"), tree)
    assert left_in_memory() == []


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * bool(i % 5)) for i, name in enumerate(TREES)],
)
def test_a_checkpoint_of_orbax_is_restored(root, golden, name):
    """Of any release, after it was copied there."""
    sample = golden(name)
    storage, path = locate(root)
    for file in (file for file in sample.path.rglob("*") if file.is_file()):
        storage.write(f"{path}/{file.relative_to(sample.path)}", file.read_bytes())

    tree = jaxckpt.restore(root, item=sample.about.get("item"))

    assert compare.problems(sample, tree) == []
    assert jaxckpt.verify(root).ok


@pytest.mark.parametrize("ocdbt", [True, False])
def test_only_the_wanted_chunks_are_fetched(root, make_mesh, ocdbt):
    """They are in memory while the array is in use."""
    split = NamedSharding(make_mesh(x=4), PartitionSpec("x"))
    values = jax.device_put(RNG.integers(0, 9, (1024, 512), np.int32), split)
    jaxckpt.save(f"{root}/a", {"w": values})
    jaxckpt.convert(f"{root}/a", f"{root}/b", ocdbt=ocdbt)
    storage, path = locate(f"{root}/b/state")
    reader = _staged.open_reader(storage, path, database=ocdbt)

    opened = reader.open("w/", 3, fill_missing=False, touches=lambda index: index == (1, 0))
    array = opened()

    assert np.array_equal(array[256:512].read().result(), values[256:512])
    names = {key.partition("/")[2] for key in left_in_memory()}
    assert names == {"zarr.json", "c/1/0"}
    del opened
    assert left_in_memory() == []


def test_a_database_that_claims_a_huge_value_is_damaged(root):
    """Before memory is taken for it."""
    data, nodes = "d/" + "0" * 32, "d/" + "1" * 32
    huge = ocdbt.encode_database({"w/c/0": Place(data, 5, 1 << 60)}, nodes)
    storage, path = locate(f"{root}/a")
    for file, content in zip((nodes, "manifest.ocdbt", data), (*huge, b"1234567890"), strict=True):
        storage.write(f"{path}/{file}", content)
    reader = _staged.open_reader(storage, path, database=True)

    with pytest.raises(ValueError, match=f"must have {(1 << 60) + 5} bytes or more, got 10"):
        reader.values([("w/c/0", None)])


def test_several_processes_save_together(root, mesh):
    """Process 0 merges what the others wrote, by the nodes alone."""
    split = NamedSharding(mesh, PartitionSpec("x", "y"))
    tree = {
        f"leaf_{n}": jax.device_put(RNG.integers(0, 9, (n, n), np.int32), split) for n in (8, 512)
    }

    simulate(2, lambda _: jaxckpt.save(f"{root}/a", tree), timeout_s=60)

    assert same(jaxckpt.restore(f"{root}/a"), tree)
    assert jaxckpt.verify(f"{root}/a").ok
    assert left_in_memory() == []


def test_a_failed_upload_fails_the_save(root):
    """The checkpoint is not there, and no array is kept in memory."""

    def fail(verb, path):
        if verb == "write":
            raise OSError(5, "no answer")

    with pytest.raises(SaveFailed, match="no answer"):
        jaxckpt.save(watched(f"{root}/a", fail), {"w": np.zeros(5 << 20, np.float32)})

    with pytest.raises(FileNotFoundError):
        jaxckpt.restore(f"{root}/a")
    assert left_in_memory() == []
