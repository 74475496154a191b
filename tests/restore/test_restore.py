"""Any checkpoint restores onto any mesh as requested, reading only what is needed."""

from __future__ import annotations

import gc
import logging
import re
import shutil
import tempfile
import threading
import tracemalloc
import weakref
from collections import Counter
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import CorruptCheckpoint, TreeMismatch, UnsupportedFormat
from jaxckpt._core import transfer
from jaxckpt._disk import chunks as _chunks
from jaxckpt._disk import reader as _reader
from jaxckpt._disk.chunks import LeafRead, layout_of
from jaxckpt.format import names
from jaxckpt.format.arrays import MAX_UNIT_BYTES, dtype_of
from jaxckpt.format.ocdbt import Place
from jaxckpt.multihost import current
from jaxckpt.storage import LocalStorage, PathIn, _arrays
from jaxckpt.storage._values import find_values
from jaxckpt.testing import simulate
from tests import strategies
from tests.strategies import same
from tests.twins import ReadNotes, watched

LAWS = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
W = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
LARGE = np.arange(128 * 256, dtype=np.float32).reshape(128, -1)  # no chunk lies in a node
KEY = jax.random.key


def mesh_of(sizes):
    count = int(np.prod(list(sizes.values())))
    return Mesh(np.array(jax.devices()[:count]).reshape(tuple(sizes.values())), tuple(sizes))


def put(values, mesh, spec):
    return jax.device_put(values, NamedSharding(mesh, spec))


def abstract(values, mesh, spec, dtype=None):
    return jax.ShapeDtypeStruct(
        values.shape, dtype or values.dtype, sharding=NamedSharding(mesh, spec)
    )


# --- resharding ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_4x2(tmp_path_factory):
    """Leaves sharded in several ways over 4x2 devices: small ones, and one read in regions."""
    path = tmp_path_factory.mktemp("on_4x2") / "x"
    mesh = mesh_of({"data": 4, "model": 2})
    big = np.arange(8 * 2**16, dtype=np.float32).reshape(8, -1)
    tree = {
        "both": put(W, mesh, P("data", "model")),
        "one": put(W, mesh, P(None, "model")),
        "merged": put(W, mesh, P(("data", "model"))),
        "none": put(W, mesh, P()),
        "big": put(big, mesh, P("model", "data")),
        "keys": put(jax.random.split(KEY(0), 8), mesh, P("data")),
    }
    jaxckpt.save(path, tree)
    return path, jax.tree.map(
        lambda x: x if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x), tree
    )


MESHES = [
    {"data": 4, "model": 2},
    {"data": 2, "model": 4},
    {"data": 8},
    {"data": 8, "model": 1},
    {"a": 2, "b": 2, "c": 2},
    {"data": 2, "model": 2},
    {"x": 4, "y": 2},
    {"only": 1},
]


@pytest.mark.parametrize(
    "sizes", MESHES, ids=lambda sizes: ",".join(f"{k}={v}" for k, v in sizes.items())
)
def test_any_mesh_restores_equal(on_4x2, sizes):
    """4x2 to 2x4, 8, 8x1, 2x2x2, 2x2, renamed axes and one device, with `like` and with `mesh=`."""
    path, wanted = on_4x2
    mesh = mesh_of(sizes)
    first, last = P(next(iter(sizes))), P(None, list(sizes)[-1])
    for spec in (first, last, P(), P(tuple(sizes))):
        like = {
            name: abstract(value, mesh, spec if name != "keys" or len(spec) == 1 else P())
            for name, value in wanted.items()
        }

        got = jaxckpt.restore(path, like)

        for name, value in wanted.items():
            assert same(_host(got[name]), _host(value)), name
            assert got[name].sharding.is_equivalent_to(like[name].sharding, value.ndim)

    got = jaxckpt.restore(path, mesh=mesh)

    for name, value in wanted.items():
        assert same(_host(got[name]), _host(value)), name
        assert got[name].sharding.mesh == mesh


def _host(value):
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(value))
    return np.asarray(value)


def test_without_a_target_arrays_go_where_they_were(on_4x2):
    """The same mesh, axes and specs, on the same devices."""
    path, wanted = on_4x2

    got = jaxckpt.restore(path)

    assert got["both"].sharding.spec == P("data", "model")
    assert got["merged"].sharding.spec == P(("data", "model"))
    assert dict(got["big"].sharding.mesh.shape) == {"data": 4, "model": 2}
    assert same(np.asarray(got["big"]), wanted["big"])


def test_mesh_takes_the_saved_specs_by_name_and_renamed_by_position(on_4x2):
    """Axes that the mesh has go by name; on a mesh of as many others, by position."""
    path, _ = on_4x2

    by_name = jaxckpt.restore(path, mesh=mesh_of({"model": 4, "data": 2}))
    renamed = jaxckpt.restore(path, mesh=mesh_of({"x": 2, "y": 2}))

    assert by_name["both"].sharding.spec == P("data", "model")
    assert renamed["both"].sharding.spec == P("x", "y")
    assert renamed["merged"].sharding.spec == P(("x", "y"))


@settings(LAWS, max_examples=40)
@given(data=st.data())
def test_any_spec_to_any_spec(data):
    """Any mesh and PartitionSpec to any other, for any shape and a cast on the way."""
    shape = tuple(data.draw(st.lists(st.sampled_from([0, 1, 2, 4, 8, 12, 24]), max_size=3)))
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(np.float32)
    sizes = data.draw(strategies.mesh_shapes())
    source = put(values, mesh_of(sizes), data.draw(strategies.specs(sizes, shape)))
    sizes = data.draw(strategies.mesh_shapes())
    dtype = data.draw(st.sampled_from([np.float32, np.float64, np.complex64, jnp.bfloat16]))
    like = abstract(values, mesh_of(sizes), data.draw(strategies.specs(sizes, shape)), dtype)
    shm = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        jaxckpt.save(f"{folder}/x", {"w": source})

        got = jaxckpt.restore(f"{folder}/x", {"w": like})["w"]

    assert same(np.asarray(got), values.astype(dtype))
    assert got.sharding == like.sharding


# --- reading only what is needed -------------------------------------------------------------


def bytes_by_tensorstore():
    """How many bytes TensorStore has read of files, by its own count."""
    import tensorstore as ts

    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(metric["values"][0]["value"] for metric in metrics)


@pytest.fixture
def noted(tmp_path):
    """A checkpoint of chunks that lie in files, on a disk that notes what is read of them."""
    mesh = mesh_of({"data": 4, "model": 2})
    tree = {
        "before": put(LARGE, mesh, P()),
        "both": put(LARGE, mesh, P("data", "model")),
        "one": put(LARGE, mesh, P(None, "model")),
        "other": put(LARGE, mesh, P("data")),
    }
    jaxckpt.save(tmp_path / "x", tree)
    return PathIn(ReadNotes(), str(tmp_path / "x"))


def reads_of(noted):
    """Counts by key how often any part of a chunk was read."""
    seen = Counter()
    for key, place in find_values(LocalStorage(), f"{noted.path}/state").items():
        for path, start, stop in noted.storage.taken if isinstance(place, Place) else ():
            is_of_it = start < place.offset + place.size and place.offset < stop
            seen[key] += is_of_it and path == f"{noted.path}/state/{place.file}"
    return +seen


def test_each_distinct_chunk_is_read_once(noted, mesh):
    """Eight replicas on eight devices cost one read of each chunk."""
    before = bytes_by_tensorstore()

    jaxckpt.restore(noted, {"both": abstract(LARGE, mesh, P())}, only="both", extra="ignore")

    assert reads_of(noted) == {f"both/c/{i}/{j}": 1 for i in range(4) for j in range(2)}
    assert bytes_by_tensorstore() == before


@pytest.mark.parametrize("target", [{"a": 8}, {"a": 2, "b": 4}, {"a": 1}], ids=str)
@pytest.mark.parametrize("spec", [P(), P("a"), P(None, "a")], ids=str)
@pytest.mark.parametrize("casts", [False, True])
def test_every_byte_is_read_once(on_4x2, target, spec, casts):
    """This holds for an array with inner chunks, however chunks and shards overlap."""
    path, wanted = on_4x2
    size = wanted["big"].nbytes
    like = abstract(wanted["big"], mesh_of(target), spec, np.float64 if casts else None)
    disk, before = ReadNotes(), bytes_by_tensorstore()

    jaxckpt.restore(PathIn(disk, str(path)), {"big": like}, only="big", extra="ignore")

    read = bytes_by_tensorstore() - before + sum(stop - start for _, start, stop in disk.taken)
    assert size <= read < 1.1 * size + 200_000


def test_leaves_that_are_not_wanted_are_not_read(noted):
    """`only`, `skip`, `extra="ignore"` and a part of `open` read nothing else."""
    before = bytes_by_tensorstore()

    jaxckpt.restore(noted, only="one")
    jaxckpt.restore(noted, skip=["before", "both", "other"])
    jaxckpt.restore(noted, {"one": LARGE}, extra="ignore")
    jaxckpt.open(noted)["one"].restore()

    assert reads_of(noted) == {"one/c/0/0": 4, "one/c/0/1": 4}
    assert bytes_by_tensorstore() == before


def test_open_reads_no_array_data(noted):
    """Metadata alone."""
    before = bytes_by_tensorstore()

    str(jaxckpt.open(noted))

    assert not reads_of(noted)
    assert bytes_by_tensorstore() == before


@settings(LAWS, max_examples=40)
@given(data=st.data())
def test_no_chunk_is_read_twice_or_for_nothing(data):
    """Over random shardings: the regions that are read of an array never touch a chunk twice."""
    sizes = data.draw(strategies.mesh_shapes())
    target = data.draw(strategies.mesh_shapes())
    shape = (24, 8, 700)  # so that no chunk is so small that it lies in a node
    stored_spec = data.draw(strategies.specs(sizes, shape))
    like = abstract(np.zeros(shape), mesh_of(target), data.draw(strategies.specs(target, shape)))
    chunk = NamedSharding(mesh_of(sizes), stored_spec).shard_shape(shape)
    chunks = np.prod(np.array(shape) // chunk)
    seen = Counter()
    original = _chunks.adjacent

    def counted(offsets, sizes):  # all chunks lie in one file
        seen.update(offsets.tolist())
        return original(offsets, sizes)

    shm = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=shm) as folder, pytest.MonkeyPatch.context() as patch:
        jaxckpt.save(f"{folder}/x", put(np.zeros(shape), mesh_of(sizes), stored_spec))
        patch.setattr(_chunks, "adjacent", counted)
        jaxckpt.restore(f"{folder}/x", like)

    assert len(seen) == chunks
    assert set(seen.values()) == {1}


@pytest.mark.parametrize("casts", [False, True])
def test_memory_in_flight_is_bounded(tmp_path, casts):
    """With a budget for three leaves no more than three are under way at once."""
    from jaxckpt._disk.find import find
    from jaxckpt._disk.item import open_tree
    from jaxckpt.storage import locate

    tree = {f"{i:02}": np.full((512, 512), i, np.float32) for i in range(30)}
    jaxckpt.save(tmp_path / "x", tree)
    storage, path = locate(tmp_path / "x")
    item = open_tree(find(storage, path), "state")
    dtype = np.dtype(np.float16 if casts else np.float32)
    wanted = [
        LeafRead(leaf, layout_of(leaf.array, (jaxckpt._core.box.whole((512, 512)),), dtype))
        for leaf in item.tree.leaves
    ]
    leaf_bytes, done = 1 << 20, 0
    tracemalloc.start()

    for i, buffers in enumerate(_reader.read_leaves(item, wanted, budget_bytes=3 * leaf_bytes)):
        done += 1
        assert (buffers[0] == i).all()

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert done == 30
    # And the leaf before, which is still in use here; without reading ahead it would be 2.25.
    assert 2.5 <= peak / leaf_bytes <= 4.5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x")])
def test_an_array_larger_than_the_budget_is_read_in_pieces(tmp_path, dtype, spec):
    """Cast or not, resharded or not: beside its buffers it takes a part of the budget."""
    mesh = mesh_of({"x": 8})
    values = (np.arange(24 << 20, dtype=np.float32) % 999).reshape(16, -1)  # 8 chunks of 12 MiB
    jaxckpt.save(tmp_path / "x", put(values, mesh, P("x")))
    like = abstract(values, mesh, spec, dtype)
    tracemalloc.start()

    got = jaxckpt.restore(tmp_path / "x", like, budget_bytes=16 << 20)

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert same(np.asarray(got), values.astype(dtype))
    assert got.nbytes < peak < got.nbytes + (16 << 20) // 4 + MAX_UNIT_BYTES


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int16])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x")])
def test_tensorstore_is_asked_for_pieces(tmp_path, monkeypatch, dtype, spec):
    """Only TensorStore can read compressed arrays."""
    mesh = mesh_of({"x": 8})
    values = (np.arange(64 << 20) % 7).astype(jnp.int8).reshape(16, -1)
    jaxckpt.save(tmp_path / "x", put(values, mesh, P("x")), compression="zstd")
    under_way, peak = 0, 0
    read_into = _arrays.read_into

    def wait(pending, size):
        nonlocal under_way
        under_way -= size
        return pending()

    def counted(array, wheres, outs):
        nonlocal under_way, peak
        under_way += sum(out.nbytes for out in outs)
        peak = max(peak, under_way)
        pending = read_into(array, wheres, outs)
        return [partial(wait, p, out.nbytes) for p, out in zip(pending, outs, strict=True)]

    monkeypatch.setattr(_arrays, "read_into", counted)

    like = abstract(values, mesh, spec, dtype)
    got = jaxckpt.restore(tmp_path / "x", like, budget_bytes=16 << 20)

    assert same(np.asarray(got), values.astype(dtype))
    assert 0 < peak <= (16 << 20) // 4 + MAX_UNIT_BYTES


@pytest.mark.parametrize("keys", [1, 4])
def test_a_restore_of_sharded_keys_while_jax_traces_is_refused(tmp_path, mesh, keys):
    """As all others; a key of `like` may have another sharding than the data of it."""
    spec = P("x") if keys > 1 else P()
    key = jax.random.split(jax.random.key(0), keys)
    key = jax.device_put(key if keys > 1 else key[0], NamedSharding(mesh, spec))
    jaxckpt.save(tmp_path / "a", {"key": key})

    for like in (None, {"key": key}):
        with pytest.raises(TypeError, match="call restore outside jit"):
            jax.jit(lambda x, like=like: x + len(jaxckpt.restore(tmp_path / "a", like)))(1.0)


def test_a_restore_while_jax_traces_is_refused(tmp_path):
    """With what to do about it; host memory is no matter of a trace."""
    jaxckpt.save(tmp_path / "a", {"w": jnp.arange(3.0)})

    with pytest.raises(TypeError, match="call restore outside jit"):
        jax.jit(lambda x: x + jaxckpt.restore(tmp_path / "a")["w"])(1.0)
    with pytest.raises(TypeError, match="call restore outside jit"):
        jax.eval_shape(lambda: jaxckpt.restore(tmp_path / "a"))
    got = jax.jit(lambda x: x + jaxckpt.restore(tmp_path / "a", as_numpy=True)["w"])(1.0)
    assert got.tolist() == [1.0, 2.0, 3.0]


def test_a_target_does_not_keep_its_arrays_alive(tmp_path):
    """When the caller has let go of `like`, its arrays are gone before the first byte is read."""
    tree = {"a": jnp.arange(1000.0), "b": [jnp.ones((10, 10))]}
    jaxckpt.save(tmp_path / "x", tree)
    alive = [weakref.ref(leaf) for leaf in jax.tree.leaves(tree)]
    holder = [tree]
    del tree
    seen = []

    def look(verb, path):
        if names.is_data_file(path.removeprefix(f"{tmp_path}/x/")):
            gc.collect()
            seen.append([ref() is not None for ref in alive])

    jaxckpt.restore(watched(tmp_path / "x", look), holder.pop())

    assert seen
    assert seen == [[False, False]] * len(seen)


def test_a_part_does_not_keep_the_targets_arrays_alive(tmp_path):
    """The same for `open(path)[...].restore(like)`."""
    jaxckpt.save(tmp_path / "x", {"a": jnp.arange(1000.0)})
    holder = [jnp.arange(1000.0)]
    alive = weakref.ref(holder[0])
    seen = []

    def look(verb, path):
        if names.is_data_file(path.removeprefix(f"{tmp_path}/x/")):
            gc.collect()
            seen.append(alive() is not None)

    got = jaxckpt.open(watched(tmp_path / "x", look))["a"].restore(holder.pop())

    assert got.shape == (1000,)
    assert seen
    assert not any(seen)


# --- what is wanted --------------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path):
    """A checkpoint of a small tree."""
    jaxckpt.save(
        tmp_path / "x",
        {
            "params": {"w": np.arange(6, dtype=np.float32), "b": np.ones(2, np.float32)},
            "opt": [np.arange(3), (np.float64(2.5), None)],
            "lr": 0.1,
            "step": 7,
        },
    )
    return tmp_path / "x"


def test_like_says_the_dtype(plain, caplog):
    """A cast happens because the target asks for it, is reported, and counted in the log."""
    told = []
    like = {"w": np.zeros(6, np.float16), "b": np.zeros(2, np.float64)}
    options = {"rename": {"^params/": ""}, "extra": "ignore", "report": told.append}

    with caplog.at_level(logging.INFO, "jaxckpt"):
        got = jaxckpt.restore(plain, like, **options)

    assert got["w"].dtype == np.float16
    assert got["b"].dtype == np.float64
    assert dict(told[0].cast) == {"b": ("float32", "float64"), "w": ("float32", "float16")}
    (line,) = caplog.messages
    assert line.endswith("; cast 2 leaves, such as b from float32 to float64")


def test_dtype_is_for_all_float_arrays_and_nothing_else(plain):
    """ints, keys and Python floats keep theirs; the report says what was cast."""
    told = []

    got = jaxckpt.restore(plain, dtype="bfloat16", report=told.append)

    assert got["params"]["w"].dtype == jnp.bfloat16
    assert got["opt"][0].dtype == np.int64
    assert got["opt"][1][0].dtype == jnp.bfloat16
    assert got["lr"] == 0.1
    assert type(got["lr"]) is float
    assert set(told[0].cast) == {"params/w", "params/b", "opt/1/0"}


def test_a_python_target_takes_no_lossy_cast(plain):
    """A float is not accepted as an int, however round; an int becomes a float on request."""
    with pytest.raises(TreeMismatch):
        jaxckpt.restore(plain, {"lr": 1}, only="lr")
    assert same(jaxckpt.restore(plain, {"step": 1.0}, only="step"), {"step": 7.0})
    with pytest.raises(TreeMismatch):
        jaxckpt.restore(plain, {"step": True}, only="step")


def test_only_and_skip_without_a_target(plain):
    """Globs over paths; a container's name means all in it; holes turn containers into dicts."""
    everything = jaxckpt.restore(plain)

    assert same(jaxckpt.restore(plain, only="params"), {"params": everything["params"]})
    assert same(
        jaxckpt.restore(plain, only=["params/w", "lr"]),
        {"params": {"w": everything["params"]["w"]}, "lr": 0.1},
    )
    assert same(
        jaxckpt.restore(plain, only="*", skip="opt*"),
        {k: v for k, v in everything.items() if k != "opt"},
    )
    assert same(jaxckpt.restore(plain, only="opt/1"), {"opt": {"1": everything["opt"][1]}})
    assert same(jaxckpt.restore(plain, only="*/b", skip="params"), {})


@pytest.mark.parametrize("glob", ["a/b~", "a~1b~0", "a/b~/c", "a~1b~0/c", "a/*/c"])
def test_a_name_with_a_slash_may_be_written_as_it_is_shown(tmp_path, glob):
    """By the path that errors name, and by the names that the tree shows."""
    jaxckpt.save(tmp_path / "a", {"a/b~": {"c": 1}, "x": 2})

    assert jaxckpt.restore(tmp_path / "a", only=glob) == {"a/b~": {"c": 1}}
    assert jaxckpt.restore(tmp_path / "a", skip=glob) == {"x": 2}


def test_a_name_with_brackets_may_be_written_as_it_is_shown(tmp_path):
    """Of a leaf or a container; as a glob, it would select other names."""
    jaxckpt.save(tmp_path / "a", {"h[0]": {"w": 1}, "h0": 2})

    assert jaxckpt.restore(tmp_path / "a", only="h[0]") == {"h[0]": {"w": 1}, "h0": 2}
    assert jaxckpt.restore(tmp_path / "a", only="h[0]/w") == {"h[0]": {"w": 1}}


def test_an_empty_list_skips_nothing(plain):
    """A program may compute it; an empty `only` would restore nothing and is an error."""
    assert same(jaxckpt.restore(plain, skip=[]), jaxckpt.restore(plain))
    with pytest.raises(ValueError, match="matches no leaf"):
        jaxckpt.restore(plain, only=[])


def test_a_pattern_that_matches_nothing_is_an_error(plain):
    """A misspelt `only` must not give back the target as if it were restored."""
    with pytest.raises(ValueError, match=r"prams.*params/b"):
        jaxckpt.restore(plain, {"lr": 0.0}, only="prams/*", extra="ignore")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"only": ["params", "stepp"]}, "only 'stepp' matches no leaf. Did you mean 'step'?"),
        ({"skip": ("params", "prms/w", "a?")}, "skip 'prms/w', 'a?' match no leaf."),
        ({"rename": {"^params": "model", "^optt": "adam"}}, "rename '^optt' matches no leaf."),
        ({"rename": {"x": "", "^params": "model", "z": ""}}, "rename 'x', 'z' match no leaf."),
    ],
)
def test_one_of_several_patterns_that_matches_nothing_is_an_error(plain, options, said):
    """Else a typo beside a right pattern leaves a leaf as it is, and no one notices."""
    like = {"params": {"w": jnp.zeros(6)}, "step": 0}

    with pytest.raises(ValueError, match="no leaf") as caught:
        jaxckpt.restore(plain, like, extra="ignore", missing="keep", **options)

    assert said in str(caught.value)
    assert "opt/0" in str(caught.value)  # as it was saved


def test_a_pattern_that_an_earlier_one_shadows_is_no_error(plain):
    """The first expression that matches counts; a pattern matches a saved leaf or one of `like`."""
    rename = {"^params/": "model/", "^params/w$": "kernel"}
    assert set(jaxckpt.restore(plain, rename=rename)["model"]) == {"w", "b"}

    got = jaxckpt.restore(plain, {"lr": 0.0, "new": 3}, skip=["new", "step", "opt", "params"])

    assert got == {"lr": 0.1, "new": 3}


def test_only_and_skip_with_a_target(plain):
    """Leaves of `like` that are left out are returned unchanged, arrays and abstract ones alike."""
    like = {
        "params": {"w": np.zeros(6, np.float32), "b": jax.ShapeDtypeStruct((99,), np.int8)},
        "opt": "mine",
        "lr": 0.0,
        "step": 0,
    }

    got = jaxckpt.restore(plain, like, skip=["params/b", "opt"])

    assert got["params"]["b"] is like["params"]["b"]
    assert got["opt"] == "mine"
    assert got["step"] == 7
    got = jaxckpt.restore(plain, like, only="lr")
    assert got["lr"] == 0.1
    assert got["params"]["w"] is like["params"]["w"]


def test_an_ellipsis_asks_for_nothing(plain):
    """As in Orbax: a leaf `...` of the target is not read."""
    told = []

    got = jaxckpt.restore(
        plain,
        {
            "params": {"w": ..., "b": np.zeros(2, np.float32)},
            "opt": [..., (..., None)],
            "lr": ...,
            "step": 1,
        },
        report=told.append,
    )

    assert got["params"]["w"] is ...
    assert set(told[0].loaded) == {"params/b", "step"}


def test_missing_and_extra(plain):
    """Both are errors unless asked otherwise, and both are reported."""
    like = {"params": {"w": np.zeros(6, np.float32), "new": np.full(3, 5.0)}}
    with pytest.raises(TreeMismatch) as caught:
        jaxckpt.restore(plain, like)
    assert {d.leaf for d in caught.value.differences} == {
        "params/new",
        "params/b",
        "opt/0",
        "opt/1/0",
        "lr",
        "step",
    }
    told = []

    got = jaxckpt.restore(plain, like, missing="keep", extra="ignore", report=told.append)

    assert got["params"]["new"] is like["params"]["new"]
    assert np.array_equal(got["params"]["w"], np.arange(6))
    assert told[0].missing == ("params/new",)
    assert set(told[0].extra) == {"params/b", "opt/0", "opt/1/0", "lr", "step"}
    assert told[0].loaded == ("params/w",)


def test_a_rename_that_makes_no_tree_is_no_damage(tmp_path):
    """A manager falls back to no other step, and sets none aside."""
    with jaxckpt.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"w": 1})
        manager.save(2, {"w": 1, "s": 2}).result()
        with pytest.raises(ValueError, match="below other leaves: s"):
            manager.restore(rename={"^w$": "s/x"})
        assert manager.all_steps() == [1, 2]
        assert not manager.problems
    with pytest.raises(ValueError, match="below other leaves: s"):
        jaxckpt.restore(tmp_path / "run", rename={"^w$": "s/x"})


def test_rename(plain):
    """Saved paths by regular expression to wanted ones; the report says which."""
    told = []
    like = {"model": {"kernel": np.zeros(6, np.float32), "b": np.zeros(2, np.float32)}}

    got = jaxckpt.restore(
        plain,
        like,
        rename={"^params/w$": "model/kernel", "^params/": "model/"},
        extra="ignore",
        report=told.append,
    )

    assert np.array_equal(got["model"]["kernel"], np.arange(6))
    assert dict(told[0].renamed) == {"params/w": "model/kernel", "params/b": "model/b"}
    got = jaxckpt.restore(plain, rename={"^params/": "model/"}, only="model")
    assert set(got["model"]) == {"w", "b"}
    with pytest.raises(ValueError, match="several leaves"):
        jaxckpt.restore(plain, rename={"^params/.*": "same"})


def test_as_numpy(on_4x2):
    """Host arrays, whatever was saved or wanted; typed keys stay keys."""
    path, wanted = on_4x2

    for like in (None, wanted):
        got = jaxckpt.restore(path, like, as_numpy=True)

        for name, value in got.items():
            if name == "keys":
                assert jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
            else:
                assert type(value) is np.ndarray
                assert np.array_equal(value, wanted[name])
                assert value.flags.writeable


@pytest.mark.parametrize("how", ["one", "tree", "prefix", "function", "spec"])
def test_shardings(tmp_path, mesh, how):
    """For all leaves, by a tree, by a container, by a function, as specs of `mesh=`."""
    jaxckpt.save(
        tmp_path / "x", {"a": {"w": jnp.zeros((8, 4)), "v": np.zeros((8, 4))}, "b": jnp.zeros(8)}
    )
    wanted = NamedSharding(mesh, P("x"))
    calls = []

    def function(path, shape, dtype):
        calls.append((path, shape, np.dtype(dtype).name))
        return wanted

    options = {
        "one": {"shardings": wanted},
        "tree": {"shardings": {"a": {"w": wanted, "v": wanted}, "b": wanted}},
        "prefix": {"shardings": {"a": wanted, "b": wanted}},
        "function": {"shardings": function},
        "spec": {"shardings": {"a": P("x"), "b": P("x")}, "mesh": mesh},
    }[how]
    got = jaxckpt.restore(tmp_path / "x", **options)

    for leaf in jax.tree.leaves(got):
        assert leaf.sharding == wanted
    if how == "function":
        assert set(calls) == {
            ("a/w", (8, 4), "float32"),
            ("a/v", (8, 4), "float64"),
            ("b", (8,), "float32"),
        }


def test_a_like_of_live_arrays_gives_back_its_shardings(tmp_path, mesh):
    """Committed arrays keep their sharding; uncommitted ones stay free to move."""
    like = {"free": jnp.zeros(8), "on": put(np.zeros((8, 2), np.float32), mesh, P("x"))}
    jaxckpt.save(tmp_path / "x", {"free": jnp.arange(8.0), "on": jnp.ones((8, 2))})

    got = jaxckpt.restore(tmp_path / "x", like)

    assert got["on"].sharding == like["on"].sharding
    assert not got["free"].committed
    assert np.array_equal(got["free"], np.arange(8.0))


def test_a_bare_leaf_and_its_parts(tmp_path):
    """The tree may be one array, or one value; an item or a run's root mean the same."""
    jaxckpt.save(tmp_path / "7", np.arange(3))

    assert np.array_equal(jaxckpt.restore(tmp_path / "7"), np.arange(3))
    assert np.array_equal(jaxckpt.restore(tmp_path / "7" / "state"), np.arange(3))
    assert np.array_equal(jaxckpt.restore(tmp_path, np.zeros(3, int)), np.arange(3))
    assert np.array_equal(jaxckpt.restore(str(tmp_path / "7") + "/"), np.arange(3))


def test_restored_arrays_are_the_callers_own(tmp_path):
    """Donating or writing to what came back changes nothing else."""
    jaxckpt.save(tmp_path / "x", {"a": jnp.arange(8.0), "b": np.arange(4)})
    got = jaxckpt.restore(tmp_path / "x")
    jax.jit(lambda x: x + 1, donate_argnums=0)(got["a"])
    got["b"][:] = 9

    again = jaxckpt.restore(tmp_path / "x")

    assert np.array_equal(again["a"], np.arange(8.0))
    assert np.array_equal(again["b"], np.arange(4))


@pytest.mark.slow
def test_an_array_of_more_than_2_gib(tmp_path, mesh):
    """Sharded and on the host; offsets past 2^31."""
    values = np.arange((1 << 31) + 8, dtype=np.uint8)
    jaxckpt.save(tmp_path / "x", {"host": values})
    got = jaxckpt.restore(
        tmp_path / "x",
        jax.ShapeDtypeStruct(values.shape, np.uint8, sharding=NamedSharding(mesh, P("x"))),
        rename={"host": ""},
    )

    for shard in got.addressable_shards[::2]:
        assert np.array_equal(shard.data[-100:], values[shard.index][-100:])
    del got
    assert np.array_equal(jaxckpt.restore(tmp_path / "x")["host"], values)


def test_differences_come_in_the_order_of_the_target(tmp_path):
    """Missing leaves and leaves of another shape alike; leaves that are not wanted come last."""
    jaxckpt.save(tmp_path / "a", {"b": np.ones(2), "c": 1, "d": np.ones(2)})

    with pytest.raises(TreeMismatch) as caught:
        jaxckpt.restore(tmp_path / "a", {"a": 1, "b": np.ones(3), "bb": 1, "d": np.ones(3)})

    assert [difference.leaf for difference in caught.value.differences] == [
        "a",
        "b",
        "bb",
        "d",
        "c",
    ]


DENSE = {"dense": {"b": np.ones(4, np.float32), "w": np.ones((3, 4), np.float32)}, "n": 3}


@pytest.mark.parametrize(
    ("saved", "wanted", "hint"),
    [
        ("dense", "linear", r"rename={'\\bdense\\b': 'linear'} lets 4 leaves fit"),
        ("dense", "dense/inner", r"rename={'\\bdense/': 'dense/inner/'} lets 4 leaves fit"),
        ("a/dense", "dense", r"rename={'\\ba/': ''} lets 4 leaves fit"),
        ("x.y-1", r"\d", r"rename={'\\bx\\.y\\-1\\b': '\\\\d'} lets 4 leaves fit"),
    ],
)
def test_a_likely_rename_is_suggested(tmp_path, saved, wanted, hint):
    """One that lets leaves of the same shapes fit, wherever the name is; and it does."""

    def tree(name):
        part = DENSE["dense"]
        for key in reversed(name.split("/")):
            part = {key: part}
        return {"opt": {"mu": part}, "params": part, "step": 1}

    jaxckpt.save(tmp_path / "x", tree(saved))

    with pytest.raises(TreeMismatch) as caught:
        jaxckpt.restore(tmp_path / "x", tree(wanted))

    assert hint in str(caught.value)
    rename = eval(str(caught.value).partition("rename=")[2].partition(" lets")[0])
    assert same(jaxckpt.restore(tmp_path / "x", tree(wanted), rename=rename), tree(wanted))


def test_no_rename_is_suggested_where_none_helps(tmp_path):
    """Other shapes, other dtypes, and names that have nothing in common."""
    jaxckpt.save(tmp_path / "x", {"a": np.ones(3), "b": {"c": np.ones(4)}})
    for like in ({"d": {"e": np.ones(4)}}, {"z": {"c": np.ones(5)}}, {"a": np.ones(3)}):
        with pytest.raises(TreeMismatch) as caught:
            jaxckpt.restore(tmp_path / "x", like)
        assert "names changed" not in str(caught.value)


@pytest.mark.parametrize("options", [{}, {"only": "params"}, {"only": ["params/*"]}])
def test_a_target_that_is_a_part_is_recognised(tmp_path, options):
    """The error says how to restore the part, in columns."""
    jaxckpt.save(tmp_path / "x", {"params": DENSE, "opt": {"mu": DENSE}, "step": 1})

    with pytest.raises(TreeMismatch) as caught:
        jaxckpt.restore(tmp_path / "x", DENSE, **options)

    assert "jaxckpt.open(path)['params'].restore(like)" in str(caught.value)
    lines = [line for line in str(caught.value).splitlines() if "   wanted " in line]
    assert len({line.index("   saved ") for line in lines}) == 1
    assert same(jaxckpt.open(tmp_path / "x")["params"].restore(DENSE), DENSE)


def test_a_name_with_a_slash_is_taken_as_shown(tmp_path):
    """As the tree shows it, or escaped as in `leaves`; a path without such names goes first."""
    tree = {"a": {"b": 1}, "a/b": {"c~": 2}, "d": {"e/f": {"g": 3}}}
    jaxckpt.save(tmp_path / "x", tree)
    ckpt = jaxckpt.open(tmp_path / "x")

    assert (ckpt["a/b"].restore(), ckpt["a~1b"].restore()) == (1, {"c~": 2})
    assert ckpt["a/b/c~"].restore() == ckpt["a~1b/c~0"].restore() == 2
    assert ckpt["d/e/f/g"].restore() == ckpt["d"]["e/f"]["g"].restore() == 3
    with pytest.raises(KeyError):
        ckpt["d/e"]


# --- other sizes -----------------------------------------------------------------------------


def fitted(values, shape):
    """What `resize` promises, by numpy: cut off, and padded with zeros."""
    out = np.zeros(shape, values.dtype)
    common = tuple(slice(min(a, b)) for a, b in zip(values.shape, shape, strict=True))
    out[common] = values[common]
    return out


@pytest.mark.parametrize("budget_bytes", [1 << 30, 1 << 12])
@pytest.mark.parametrize("shape", [(8, 4), (12, 4), (4, 8), (16, 16), (24, 2), (0, 4), (40, 4)])
@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "y"), P("x", "y")], ids=str)
def test_an_array_of_another_size_is_cut_off_or_padded(tmp_path, mesh, shape, spec, budget_bytes):
    """Onto any sharding; some shards may have nothing but zeros, and others are not read."""
    values = np.arange(1, 33, dtype=np.float32).reshape(8, 4)
    saved = jax.device_put(values, NamedSharding(mesh, P("x", "y")))
    jaxckpt.save(tmp_path / "x", {"a": saved, "n": values, "k": 1})
    like = {
        "a": jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec)),
        "n": np.empty(shape, np.float32),
        "k": 0,
    }
    reports = []

    got = jaxckpt.restore(
        tmp_path / "x", like, resize=True, report=reports.append, budget_bytes=budget_bytes
    )

    assert np.array_equal(got["a"], fitted(values, shape).astype(jnp.bfloat16))
    assert (got["a"].sharding, got["a"].shape) == (like["a"].sharding, shape)
    assert np.array_equal(got["n"], fitted(values, shape))
    assert reports[0].resized == (() if shape == values.shape else ("a", "n"))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"missing": "keep"}, "missing='keep' has no effect without `like`: leave it out"),
        ({"extra": "ignore"}, "extra='ignore' has no effect without `like`"),
        ({"resize": True}, "resize=True has no effect without `like`"),
        (
            {"as_numpy": True, "mesh": Mesh(jax.devices()[:1], "x")},
            "mesh and shardings have no effect with as_numpy=True",
        ),
        ({"as_numpy": True, "shardings": P()}, "mesh and shardings have no effect with as_numpy"),
        ({"as_numpy": "yes"}, "as_numpy must be False or True, got 'yes'"),
        ({"resize": 2}, "resize must be False or True, got 2"),
        ({"budget_bytes": 0}, "budget_bytes must be positive and finite, got 0"),
        ({"budget_bytes": -1.5}, "budget_bytes must be positive and finite, got -1.5"),
    ],
)
def test_an_option_without_effect_is_refused(tmp_path, options, problem):
    """By a manager and by a part of an open checkpoint too."""
    with jaxckpt.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": np.ones(3)}).result()
        ways = [partial(jaxckpt.restore, tmp_path), jaxckpt.open(tmp_path).restore, manager.restore]
        for restore in ways:
            with pytest.raises(ValueError, match=re.escape(problem)):
                restore(**options)


@pytest.mark.parametrize(
    ("change", "ways"),
    [
        ({"w": np.ones(3)}, "skip=[...]."),
        ({"w": np.ones((2, 4), int)}, "skip=[...], dtype=... for a cast"),
        ({"n": np.ones(3)}, "skip=[...], None in the target where None was saved."),
        ({"w": None}, "skip=[...], extra='ignore' for leaves that are not wanted."),
    ],
)
def test_a_misfit_is_answered_with_what_helps(tmp_path, change, ways):
    """No `resize` that was passed, and no cast of None."""
    jaxckpt.save(tmp_path / "x", {"w": np.ones((2, 3)), "n": None})
    like = {"w": np.ones((2, 3)), "n": None} | change

    with pytest.raises(TreeMismatch, match=re.escape(f"restore around them: {ways}")):
        jaxckpt.restore(tmp_path / "x", like, resize=True)


def test_sizes_change_only_on_request(tmp_path):
    """And only those of arrays: not the number of dimensions, and no keys or scalars."""
    jaxckpt.save(tmp_path / "x", {"w": np.ones((2, 3)), "k": jax.random.split(jax.random.key(0))})
    like = {"w": np.ones((2, 4)), "k": jax.random.split(jax.random.key(0))}

    with pytest.raises(TreeMismatch, match="resize=True"):
        jaxckpt.restore(tmp_path / "x", like)
    for change in ({"w": np.ones(6)}, {"w": 1.0}, {"k": jax.random.key(0)}):
        with pytest.raises(TreeMismatch, match="1 leaf "):
            jaxckpt.restore(tmp_path / "x", like | change, resize=True)


def test_a_checkpoint_of_another_program_is_resized(tmp_path):
    """Also where its values are in the metadata."""
    (tmp_path / "checkpoint_1").write_bytes(serialization.to_bytes({"w": np.ones(3, np.float32)}))

    split = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), P("x"))

    got = jaxckpt.restore(
        tmp_path, {"w": jax.ShapeDtypeStruct((6,), np.float32, sharding=split)}, resize=True
    )

    assert np.array_equal(got["w"], [1, 1, 1, 0, 0, 0])


# --- the steps of a run ----------------------------------------------------------------------


@pytest.mark.parametrize("naming", [{}, {"step_prefix": "s", "step_digits": 5}])
def test_a_step_of_a_run_is_restored_by_its_number(tmp_path, naming):
    """However its directory is named."""
    with jaxckpt.CheckpointManager(tmp_path, **naming) as manager:
        for step in (7, 17, 70):
            manager.save(step, {"w": step})

    assert jaxckpt.restore(tmp_path, step=7) == {"w": 7}
    assert jaxckpt.restore(tmp_path, {"w": 0}, step=np.int64(17)) == {"w": 17}


# --- the newest good step of a run -----------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    """A run of three steps; each is large enough for a data file of its own."""
    for step in (1, 2, 3):
        jaxckpt.save(tmp_path / "run" / str(step), {"w": np.full(1 << 17, step, np.float64)})
    return tmp_path / "run"


def flip(step, folder="d"):
    """Changes one bit in the middle of the largest data file, or of the tree's metadata."""
    files = (step / "state" / folder).iterdir() if folder else [step / "state" / "_METADATA"]
    file = max(files, key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize("step", [None, 12])
def test_the_name_of_a_step_may_have_lines(tmp_path, step):
    """As a manager of an earlier release made it."""
    for number in (2, 12):
        jaxckpt.save(tmp_path / f"a\nb_{number}", {"n": number})

    assert jaxckpt.restore(tmp_path, step=step) == {"n": 12}


@pytest.mark.parametrize("folder", ["d", ""])
def test_a_damaged_newest_step_is_skipped(run, caplog, folder):
    """With a warning that names step and leaf or file; nothing in the run is changed."""
    flip(run / "3", folder)
    flip(run / "2", folder)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}

    got = jaxckpt.restore(run)

    assert got["w"][0] == 1
    assert [message.split(": ")[2] for message in caplog.messages] == ["3", "2"]
    assert all("damaged" in message for message in caplog.messages)
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    if not folder:
        assert jaxckpt.open(run).path == str(run / "1")


def test_a_damaged_step_that_was_asked_for_is_an_error(run, caplog):
    """So is a run whose steps are all damaged; a part of a step never becomes another step's."""
    flip(run / "3")
    for path in (run / "3", run / "3" / "state"):
        with pytest.raises(CorruptCheckpoint, match="leaf w"):
            jaxckpt.restore(path)
    flip(run / "2")
    flip(run / "1")
    with pytest.raises(CorruptCheckpoint, match="3/state"):
        jaxckpt.restore(run)
    assert not caplog.messages


def test_a_target_that_does_not_fit_is_no_reason_to_go_back(run):
    """Only damage is."""
    jaxckpt.save(run / "4", {"v": np.zeros(1)})

    with pytest.raises(TreeMismatch):
        jaxckpt.restore(run, {"w": np.zeros(1 << 17)})


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_without_the_item_is_no_reason_to_go_back(run, count):
    """The step before has it, which is older."""
    for step, item in ((4, "ema"), (5, "state")):
        jaxckpt.save(run / str(step), {"w": np.zeros(1)}, item=item)

    def restore(_):
        with pytest.raises(jaxckpt.CheckpointNotFound, match="ema"):
            jaxckpt.restore(run, item="ema")

    simulate(count, restore)


def test_the_other_items_of_a_step_restore_when_one_is_gone(tmp_path):
    """The missing item is named when it is wanted, and how to complete its removal."""
    with jaxckpt.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": np.arange(3)}, items={"extra": {"v": np.ones(2)}, "data": {"n": 1}})
    shutil.rmtree(tmp_path / "1" / "extra")

    assert same(jaxckpt.restore(tmp_path / "1"), {"w": np.arange(3)})
    assert jaxckpt.restore(tmp_path / "1", item="data") == {"n": 1}
    assert jaxckpt.restore(tmp_path / "1" / "data") == {"n": 1}
    for ask in ({"item": "extra"}, {"item": "extra", "as_numpy": True}):
        with pytest.raises(
            jaxckpt.CheckpointNotFound, match=r"1/extra is missing.*delete\(step, item="
        ):
            jaxckpt.restore(tmp_path / "1", **ask)
    assert not jaxckpt.verify(tmp_path / "1").ok


def test_an_empty_place_of_a_target_asks_for_nothing_with_extra(tmp_path):
    """None and optax.MaskedNode are as good as a leaf that is not in the target."""
    jaxckpt.save(tmp_path / "x", {"a": np.ones(2), "b": {"c": np.ones(1), "d": 3}, "e": 4})
    like = {"a": None, "b": {"c": optax.MaskedNode(), "d": 0}, "e": 0}
    told = []

    got = jaxckpt.restore(tmp_path / "x", like, extra="ignore", report=told.append)

    assert got == {"a": None, "b": {"c": optax.MaskedNode(), "d": 3}, "e": 4}
    assert told[0].extra == ("a", "b/c")
    with pytest.raises(TreeMismatch, match="a     wanted empty"):
        jaxckpt.restore(tmp_path / "x", like)


def test_a_layout_in_shardings_is_refused(plain):
    """It would be ignored; a target may have one."""
    where = Format(Layout((0,)), SingleDeviceSharding(jax.devices()[0]))

    with pytest.raises(TypeError, match="params/w"):
        jaxckpt.restore(plain, shardings={"params": {"w": where}})


@pytest.mark.parametrize("target", ["live", "abstract", "of a jitted function"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_the_layout_of_a_target_is_kept(tmp_path, mesh, is_sharded, target):
    """Of live arrays and of shapes; `dtype` and an array without one mean the default."""
    sharding = SingleDeviceSharding(jax.devices()[1])
    if is_sharded:
        sharding = NamedSharding(mesh, P("x", "y"))
    where = Format(Layout((1, 0)), sharding)
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    jaxckpt.save(tmp_path / "x", {"turned": values, "plain": values})
    init = jax.jit(
        lambda: {"turned": jnp.zeros((8, 8)), "plain": jnp.zeros((8, 8))},
        out_shardings={"turned": where, "plain": sharding},
    )
    like = jax.eval_shape(init) if target == "of a jitted function" else init()
    if target == "abstract":
        turned = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=where)
        like = {"turned": turned, "plain": jax.ShapeDtypeStruct((8, 8), np.float32)}

    got = jaxckpt.restore(tmp_path / "x", like)
    cast = jaxckpt.restore(tmp_path / "x", like, dtype=jnp.bfloat16)

    assert got["turned"].format.layout.major_to_minor == (1, 0)
    assert got["turned"].sharding == sharding
    assert {np.asarray(one).tobytes("C") for one in got.values()} == {values.tobytes()}
    for array in (got["plain"], *cast.values()):
        assert array.format.layout.major_to_minor == (0, 1)


def test_a_run_of_flax_does_not_start_over(tmp_path):
    """The error names the newest file and what to do with it; nothing is changed."""
    for step in (9, 10):
        (tmp_path / f"checkpoint_{step}").write_bytes(
            serialization.msgpack_serialize({"w": np.full(2, step)})
        )
    with jaxckpt.CheckpointManager(tmp_path) as manager:
        for call in (lambda: manager.restore_or(lambda: {"w": jnp.zeros(2)}), manager.restore):
            with pytest.raises(UnsupportedFormat, match=r"convert\('.*/checkpoint_10', 'NEW/10'\)"):
                call()
    jaxckpt.convert(tmp_path / "checkpoint_10", tmp_path / "new" / "10")
    with jaxckpt.CheckpointManager(tmp_path / "new") as manager:
        state, step = manager.restore_or(lambda: {"w": np.zeros(2, int)})
    assert step == 10
    assert state["w"].tolist() == [10, 10]


@pytest.mark.parametrize("options", [{"missing": "keep"}, {"only": "w"}, {"skip": "new"}])
def test_restore_or_takes_what_is_not_restored_from_init(tmp_path, options):
    """Its values, not their shapes."""
    with jaxckpt.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": jnp.ones(2)})
        manager.wait_until_finished()

        state, step = manager.restore_or(
            jax.jit(lambda: {"w": jnp.zeros(2), "new": jnp.full(3, 5.0)}), **options
        )

    assert step == 1
    assert state["w"].tolist() == [1, 1]
    assert state["new"].tolist() == [5, 5, 5]


@pytest.mark.multihost
def test_processes_that_find_different_steps_read_the_same(tmp_path, run):
    """One step was committed after process 0 had looked, and before process 1 did."""
    jaxckpt.save(tmp_path / "later", {"w": np.full(1 << 17, 4, np.float64)})
    looks, has_looked = [0, 0], threading.Event()

    def before(verb, path):
        me = current().index
        if verb == "entries" and path == str(run):
            looks[me] += 1
            if (me, looks[me]) == (1, 1):
                assert has_looked.wait(60)
                (tmp_path / "later").rename(run / "4")
        elif me == 0 and looks[0]:
            has_looked.set()

    assert simulate(2, lambda _: jaxckpt.restore(watched(run, before))["w"][0]) == [4, 4]
    assert looks[0] > 1


@pytest.mark.parametrize("spec", [("x", "y"), (), ("x",), (None, ("x", "y"))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "float64"])
def test_arrays_placed_alike_are_those_that_jax_places(mesh, spec, dtype):
    """The first of a sharding, shape and dtype goes through jax's own call, the others do not."""
    sharding, dtype = NamedSharding(mesh, P(*spec)), dtype_of(dtype)
    values = np.arange(8 * 16).reshape(8, 16).astype(dtype)
    boxes = transfer.boxes_here(sharding, values.shape)
    buffers = [np.ascontiguousarray(values[box.slices]) for box in boxes]

    with transfer.placing():
        first, second = (
            transfer.to_device(buffers, transfer.placed_alike(sharding, values.shape, dtype))
            for _ in range(2)
        )
        assert jnp.array_equal(first, second)

    assert np.array_equal(np.asarray(second), values)
    for fact in ("aval", "sharding", "committed", "weak_type", "dtype", "format"):
        assert getattr(first, fact) == getattr(second, fact), fact


@pytest.mark.parametrize("spec", [P(), P("x")], ids=str)
def test_a_restored_key_compiles_nothing_anew(tmp_path, mesh, spec):
    """A step is compiled once for a fresh state and the restored one, with `like` and without."""

    @jax.jit
    def step(keys):
        return jax.random.split(keys[0], 8)

    sharding = NamedSharding(mesh, spec)
    keys = jax.jit(lambda: jax.random.split(jax.random.key(0), 8), out_shardings=sharding)()
    jaxckpt.save(tmp_path / "a", keys)

    for state in (keys, jaxckpt.restore(tmp_path / "a", keys), jaxckpt.restore(tmp_path / "a")):
        step(state)

    assert step._cache_size() == 1
