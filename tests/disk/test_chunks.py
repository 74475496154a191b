"""Reading our own chunks without TensorStore gives the same data as TensorStore."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxckpt
from jaxckpt._core import box as _box
from jaxckpt._disk import chunks as _chunks
from jaxckpt._disk import reader as _reader
from jaxckpt._disk.chunks import LeafRead, layout_of
from jaxckpt._disk.find import find
from jaxckpt._disk.item import open_tree
from jaxckpt.format import arrays, ocdbt
from jaxckpt.format.arrays import AS_BYTES_DTYPES, STORABLE_DTYPES, dtype_of
from jaxckpt.storage import PathIn, _arrays, locate
from jaxckpt.testing import simulate
from tests import strategies
from tests.strategies import jax_holds, random_bits, same, to_jax
from tests.twins import ReadNotes

LAWS = settings(
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
NUMBERS = itertools.count()  # of checkpoints: one in memory cannot be replaced
UNIT_BYTES = 16 << 10  # so that chunks of some size have inner chunks


def slowly(path, like=None, **options):
    """Restores with TensorStore alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_reader, "find_values", lambda *_, **__: None)
        return jaxckpt.restore(path, like, **options)


@pytest.fixture
def ways(monkeypatch):
    """Counts the leaves read by us and by TensorStore."""
    seen = Counter()

    def count(owner, name, way, of=lambda *_: 1):
        original = getattr(owner, name)

        def counted(*args, **options):
            seen[way] += of(*args)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    count(_chunks.Chunks, "_plan", "ours", lambda _, __, some, at: len(some))
    count(_arrays.Reader, "open", "theirs")
    return seen


def sharded(values, sizes, spec):
    count = int(np.prod(list(sizes.values())))
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(tuple(sizes.values())), tuple(sizes))
    return jax.device_put(values, NamedSharding(mesh, spec))


def item_at(path, storage=None):
    found, where = locate(path)
    return open_tree(find(storage or found, where), "state")


def reading(item, wanted=None, boxes=None, *, dtype="f4", budget_bytes=1 << 20, **options):
    leaves = {leaf.text: leaf for leaf in item.tree.leaves}
    reads = [
        LeafRead(
            leaf, layout_of(leaf.array, tuple(boxes or [_box.whole(leaf.shape)]), np.dtype(dtype))
        )
        for leaf in map(leaves.__getitem__, wanted or leaves)
    ]
    return _reader.read_leaves(item, reads, budget_bytes=budget_bytes, **options)


def values_of(*args, **options):
    """Returns the values from `read_leaves`; `restore` would also check files without leaves."""
    return [values for buffers in reading(*args, **options) for values in buffers]


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 2001)], ids=str)
def test_every_dtype(ram_path, ways, shape):
    """Every bit of every dtype, of the host and of jax: 0-d, empty, in a node and in a file."""
    dtypes = [dtype_of(name) for name in sorted(STORABLE_DTYPES | AS_BYTES_DTYPES)]
    host = {dtype.name: random_bits(shape, dtype, 0) for dtype in dtypes}
    tree = {"host": host, "jax": {n: to_jax(v) for n, v in host.items() if jax_holds(v.dtype)}}
    jaxckpt.save(ram_path / "x", tree)

    fast = jaxckpt.restore(ram_path / "x")
    taken = dict(ways)
    slow = slowly(ram_path / "x")

    assert same(fast, tree)
    assert same(slow, tree)
    assert set(taken) <= {"ours"}  # arrays without elements may lie in the tree
    assert taken["ours"] == ways["theirs"]


@settings(LAWS)
@given(data=st.data())
def test_any_sharding_any_limit_any_cast(ram_path, data):
    """Chunks, inner chunks and wanted parts of any shapes, read in runs and batches of any size."""
    draw = data.draw
    dtypes = st.sampled_from([np.float32, np.int32, jnp.bfloat16, jnp.float8_e5m2, np.float16])
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 8, 24, 160]), max_size=3)))
    sizes, target = draw(strategies.mesh_shapes()), draw(strategies.mesh_shapes())
    unit_bytes = draw(st.sampled_from([8 << 10, 50_000, 32 << 20]))
    tree, like = {}, {}
    for i in range(draw(st.integers(1, 3))):
        name = f"{i} {unit_bytes}"  # layouts are kept by name
        values = random_bits(shape, np.dtype(draw(dtypes)), i)
        tree[name] = sharded(values, sizes, draw(strategies.specs(sizes, shape)))
        wanted = sharded(values, target, draw(strategies.specs(target, shape)))
        dtype = draw(dtypes | st.just(wanted.dtype))
        like[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=wanted.sharding)
    path = f"{draw(st.sampled_from(['memory://chunks', ram_path]))}/{next(NUMBERS)}"
    budget = draw(st.sampled_from([1, 100_000, 1 << 30]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "MAX_UNIT_BYTES", unit_bytes)
        jaxckpt.save(path, tree)
        patch.setattr(_chunks, "_RUN_BYTES", draw(st.sampled_from([1, 20_000, 8 << 20])))
        patch.setattr(_chunks, "_RUN_CHUNKS", draw(st.sampled_from([1, 3, 256])))
        patch.setattr(_reader, "BATCH_BYTES", draw(st.sampled_from([1, 99_999, 16 << 20])))

        plain = jaxckpt.restore(path, as_numpy=True, budget_bytes=budget)
        try:
            fast = jaxckpt.restore(path, like, budget_bytes=budget)
        except jaxckpt.TreeMismatch:  # a cast would lose values
            with pytest.raises(jaxckpt.TreeMismatch):
                slowly(path, like, budget_bytes=budget)
            fast = None
        else:
            assert same(fast, slowly(path, like, budget_bytes=budget))

    assert same(plain, jax.tree.map(np.asarray, tree))
    assert fast is None or all(fast[name].sharding == like[name].sharding for name in like)


@settings(LAWS)
@given(tree=strategies.trees(), store=st.sampled_from(["disk", "memory"]))
def test_any_tree_in_any_store(ram_path, tree, store):
    """Names, containers and kinds of any sort, on disk and in memory."""
    path = f"{ram_path if store == 'disk' else 'memory://chunks'}/{next(NUMBERS)}"
    with contextlib.suppress(TypeError, ValueError):  # it is no tree to save
        jaxckpt.save(path, tree)

        fast, slow = jaxckpt.restore(path), slowly(path)

        assert same(fast, slow)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """2,000 leaves, tiny and small ones by turns, in a database of several levels of nodes."""
    path, dtype = tmp_path_factory.mktemp("deep") / "x", np.dtype("f4")
    tree = {f"{i:04}": random_bits((1100 if i % 2 else 9,), dtype, i) for i in range(2000)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ocdbt, "MAX_NODE_BYTES", 20_000)
        jaxckpt.save(path, tree)
    return path, tree


def test_a_tree_of_several_levels(deep, ways):
    """Thousands of leaves, hundreds in a run; none is read by TensorStore."""
    path, tree = deep

    got = jaxckpt.restore(path)

    assert same(got, tree)
    assert ways == {"ours": 2000}


def test_one_leaf_of_thousands_is_found_on_its_path(deep, ways, limits):
    """Few of the 30 nodes are read for it; if all are, the values are the same."""
    path, tree = deep
    disk = ReadNotes()

    few = jaxckpt.restore(PathIn(disk, str(path)), only="0777")
    on_its_path = len(disk.taken)
    limits(_reader, _WORTH_LOOKING=1e-6)
    all_of_them = jaxckpt.restore(PathIn(disk, str(path)), only="0777")

    assert ways == {"ours": 2}
    assert on_its_path == 3  # two nodes and the values
    assert len(disk.taken) - on_its_path > 30
    assert same(few, all_of_them)
    assert same(few, {"0777": tree["0777"]})


@pytest.mark.multihost
@pytest.mark.parametrize("count", [2, 4])
def test_databases_of_several_processes(ram_path, mesh, ways, limits, count):
    """One process can read files written by several, and several can each read parts."""
    limits(arrays, MAX_UNIT_BYTES=UNIT_BYTES)
    on_mesh, last = NamedSharding(mesh, PartitionSpec("x", "y")), f"20000 of {count}"
    values = {f"{n} of {count}": random_bits((8, n), np.dtype("f4"), n) for n in (2, 2000, 20_000)}
    tree = jax.tree.map(lambda x: jax.device_put(x, on_mesh), values)
    box = _box.Box((1, 3), (5, 9_999))

    simulate(count, lambda _: jaxckpt.save(ram_path / "x", tree))
    fast = jaxckpt.restore(ram_path / "x", like=tree)
    taken = dict(ways)
    parts = simulate(count, lambda _: values_of(item_at(ram_path / "x"), [last], [box]))

    assert taken == {"ours": 3}
    assert same(fast, tree)
    assert same(slowly(ram_path / "x", as_numpy=True), values)
    assert all(same(part, [values[last][box.slices]]) for part in parts)


def test_only_the_chunks_that_are_wanted(ram_path, ways, limits):
    """A part of the leaves, and of one leaf a part, are as TensorStore reads them."""
    limits(arrays, MAX_UNIT_BYTES=UNIT_BYTES)
    tree = {f"part {i}": np.random.default_rng(i).standard_normal((64, 300)) for i in range(3)}
    jaxckpt.save(ram_path / "x", tree)
    boxes = [_box.Box((3, 7), (3, 9)), _box.Box((5, 0), (41, 300)), _box.Box((60, 299), (64, 300))]

    parts = values_of(item_at(ram_path / "x"), ["part 2"], boxes, dtype="f2", budget_bytes=1)
    some = jaxckpt.restore(ram_path / "x", only="part 1")

    assert ways == {"ours": 2}
    assert same(some, {"part 1": tree["part 1"]})
    assert same(parts, [tree["part 2"][box.slices].astype("f2") for box in boxes])


@pytest.mark.parametrize("taken", [0, 1])
def test_an_abandoned_read_leaves_no_threads(deep, taken):
    """Closed before its end, or never begun; what was read by then is right."""
    path, tree = deep
    reads = reading(item_at(path))
    got = [next(reads)[0] for _ in range(taken)]

    reads.close()

    assert not [t for t in threading.enumerate() if t.name.startswith("jaxckpt-read")]
    assert same(got, [tree["0000"]] * taken)


def test_restores_at_the_same_time(deep):
    """Four threads that read the same checkpoint, each within a small budget, all get it."""
    path, tree = deep

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda n: jaxckpt.restore(path, budget_bytes=10**n), range(3, 9)))

    assert all(same(one, tree) for one in got)
