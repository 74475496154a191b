"""`compression="zstd"` changes the bytes on disk, and nothing that a reader returns."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._core.text import size_text
from jaxckpt.errors import CorruptCheckpoint
from jaxckpt.format import arrays, names, tree
from jaxckpt.format.arrays import AS_BYTES_DTYPES, STORABLE_DTYPES, dtype_of
from jaxckpt.storage import _arrays, kvstore, locate
from jaxckpt.storage._values import find_values
from tests.commandline import cli, said_json
from tests.strategies import random_bits, same

UNIT_BYTES = 1 << 20
RNG = np.random.default_rng(0)
SMOOTH = np.cumsum(RNG.integers(-2, 3, 1 << 20), dtype=np.int32)  # compresses well
SQUARE = SMOOTH.reshape(1024, 1024).astype(np.float32)


def size_of(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def places_of(item):
    storage, where = locate(item)
    return find_values(storage, where)


def metadata_of(item, leaf):
    return json.loads(places_of(item)[f"{leaf}/zarr.json"])


@pytest.fixture
def inner_chunks(limits):
    """Chunks larger than 1 MiB have inner chunks."""
    limits(arrays, MAX_UNIT_BYTES=UNIT_BYTES)


@pytest.fixture
def saved(ram_path, mesh, inner_chunks):
    """A compressed tree with every layout; its path and values."""
    values = {
        "inner": SMOOTH,
        "plain": SMOOTH[:100_000],
        "sharded": jax.device_put(SQUARE, NamedSharding(mesh, P("x", "y"))),
        "small": SMOOTH[:1000],
        "zeros": np.zeros(1 << 20, np.float32),
        "text": "abc",
        "step": 7,
    }
    jaxckpt.save(ram_path / "a", values, compression="zstd")
    return ram_path / "a", values


def test_every_dtype_comes_back(ram_path):
    """Whatever its bits are, in chunks that are compressed and in those too small for it."""
    values = {
        f"{name}{n}": random_bits((n,), dtype_of(name), n)
        for name in STORABLE_DTYPES | AS_BYTES_DTYPES
        for n in (0, 10, 300_000)
    }

    jaxckpt.save(ram_path / "a", values, compression="zstd")

    assert same(jaxckpt.restore(ram_path / "a", as_numpy=True), values)
    assert jaxckpt.verify(ram_path / "a").ok
    leaves = jaxckpt.open(ram_path / "a").leaves
    assert all(leaves[f"{name}300000"].compression == "zstd" for name in STORABLE_DTYPES)
    assert leaves["float3210"].compression is None


def test_it_takes_less_room(saved, tmp_path):
    """And `open` and `show` name both sizes."""
    path, values = saved
    jaxckpt.save(tmp_path / "plain", values)

    assert size_of(path) < size_of(tmp_path / "plain") / 2
    on_disk = f", {size_text(size_of(path / 'state'))} on disk, "
    assert on_disk in str(jaxckpt.open(path))
    assert " on disk" not in str(jaxckpt.open(path)["inner"])
    assert " on disk" not in str(jaxckpt.open(tmp_path / "plain"))
    _, shown, _ = cli("show", path)
    assert on_disk in shown
    assert "int32[1048576] zstd" in shown
    _, found = said_json("show", path)
    said = {leaf["path"]: leaf["compression"] for leaf in found["leaves"]}
    assert (said["inner"], said["small"], said["text"]) == ("zstd", None, None)


def test_the_checksum_covers_the_compressed_bytes(saved):
    """`zarr.json` has the codecs in this order, and so does each inner chunk."""
    path, _ = saved
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    zstd = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
    ours = [little, zstd, {"name": "crc32c"}]

    assert metadata_of(path / "state", "plain")["codecs"] == ours
    assert metadata_of(path / "state", "small")["codecs"] == [ours[0], ours[2]]
    (sharding,) = metadata_of(path / "state", "inner")["codecs"]
    assert sharding["configuration"]["codecs"] == ours
    assert sharding["configuration"]["index_codecs"] == [ours[0], ours[2]]
    sums = (path / "state" / names.CHUNK_SUMS).read_bytes()
    for key in ("plain/c/0", "sharded/c/0/1"):
        place = places_of(path / "state")[key]
        data = (path / "state" / place.file).read_bytes()
        value = data[place.offset : place.offset + place.size]
        assert value[-4:] == arrays.checksum(value[:-4]).to_bytes(4, "little")
        assert value[-4:] in sums


def test_the_level_is_a_choice(ram_path):
    """It is recorded, and a higher one takes less room here."""
    sizes = []
    for level in (1, 12):
        path = ram_path / str(level)
        jaxckpt.save_async(path, {"w": SMOOTH}, compression=f"zstd:{level}").result()
        _, zstd, _ = metadata_of(path / "state", "w")["codecs"]
        assert zstd["configuration"]["level"] == level
        assert np.array_equal(jaxckpt.restore(path)["w"], SMOOTH)
        sizes.append(size_of(path))

    assert sizes[0] > 1.05 * sizes[1]


@pytest.mark.parametrize("wrong", ["gzip", "zstd:0", "zstd:23", "zstd:", "zstd:-1", 3, True, ""])
@pytest.mark.parametrize("call", ["save", "save_async", "CheckpointManager"])
def test_other_words_are_refused(tmp_path, call, wrong):
    """Before anything is written."""
    tree = () if call == "CheckpointManager" else ({},)

    with pytest.raises(ValueError, match=r"compression must be None, 'zstd' or 'zstd:<level>'"):
        getattr(jaxckpt, call)(tmp_path / "a", *tree, compression=wrong)

    assert not (tmp_path / "a").exists()


def test_without_it_the_files_are_as_before(tmp_path, mesh):
    """Of a tree that was compressed before, and of one that was not."""
    values = {"w": SMOOTH, "s": jax.device_put(SMOOTH, NamedSharding(mesh, P("x")))}
    jaxckpt.save(tmp_path / "a", values)
    jaxckpt.save(tmp_path / "z", values, compression="zstd")
    jaxckpt.save(tmp_path / "b", values)

    first, other, last = (tmp_path / name / "state" / names.TREE_METADATA for name in "azb")
    assert first.read_bytes() == last.read_bytes()
    assert b'"version":1,' in first.read_bytes()
    assert b"zstd" not in first.read_bytes()
    assert b'"version":2,' in other.read_bytes()
    assert tree.VERSION >= 2


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x"), P("y", "x")])
@pytest.mark.parametrize("budget_bytes", [1 << 20, 1 << 30])
def test_it_restores_onto_other_meshes(saved, make_mesh, spec, budget_bytes):
    """Also with a budget below a chunk, and with a cast."""
    path, values = saved
    sharding = NamedSharding(make_mesh(x=2, y=4), spec)
    like = {"sharded": jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=sharding)}

    got = jaxckpt.restore(path, like, only="sharded", budget_bytes=budget_bytes)
    wide = jaxckpt.restore(path, only="sharded", dtype="float64", as_numpy=True)

    assert np.array_equal(got["sharded"], values["sharded"])
    assert got["sharded"].sharding == sharding
    assert wide["sharded"].dtype == np.float64
    assert np.array_equal(wide["sharded"], values["sharded"])


LEAVES = {"plain": "plain/c/0", "inner": "inner/c/0", "sharded": "sharded/c/3/1"}


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("at", [0, 5000, -6, -2])
def test_a_flipped_byte_is_found(saved, leaf, at):
    """In the data, in a checksum or in the index; `restore` and `verify` name leaf and file."""
    path, values = saved
    place = places_of(path / "state")[LEAVES[leaf]]
    file = path / "state" / place.file
    data = bytearray(file.read_bytes())
    data[place.offset + at % place.size] ^= 0x10
    file.write_bytes(data)

    with pytest.raises(CorruptCheckpoint) as caught:
        jaxckpt.restore(path)
    report = jaxckpt.verify(path)

    assert (caught.value.leaf, caught.value.file) == (leaf, str(file))
    assert [(one.leaf, one.file) for one in report.problems] == [(leaf, str(file))]
    others = jaxckpt.restore(path, skip=leaf, as_numpy=True)
    assert {*others, leaf} == {*values}
    assert all(np.array_equal(others[name], values[name]) for name in others)


def test_other_verbs_take_it(saved, tmp_path):
    """`diff` compares values, not bytes; `convert` compresses only on request."""
    path, values = saved
    jaxckpt.save(tmp_path / "plain", values)
    jaxckpt.convert(path, tmp_path / "copy")
    code, _, _ = cli("convert", path, tmp_path / "again", "--compression", "zstd:2")

    assert jaxckpt.diff(path, tmp_path / "plain").equal
    assert jaxckpt.diff(tmp_path / "copy", path).equal
    assert jaxckpt.open(tmp_path / "copy").leaves["inner"].compression is None
    assert (code, jaxckpt.diff(tmp_path / "again", path).equal) == (0, True)
    assert jaxckpt.verify(tmp_path / "again").ok
    (sharding,) = metadata_of(tmp_path / "again" / "state", "inner")["codecs"]
    assert sharding["configuration"]["codecs"][1]["configuration"]["level"] == 2
    found = jaxckpt.open(path).statistics(only="inner")["inner"]
    assert (found.min, found.max) == (SMOOTH.min(), SMOOTH.max())


def test_a_run_compresses_every_step(ram_path):
    """Its items too; scrubbing and forking take the steps, and a config can ask for it."""
    state = {"w": SMOOTH}
    config = {"directory": ram_path / "run", "compression": "zstd:3"}
    with jaxckpt.CheckpointManager.from_config(config) as manager:
        for step in (1, 2):
            manager.save(step, state, items={"ema": {"w": SMOOTH}})
        manager.wait_until_finished()
        assert all(report.ok for report in manager.scrub().values())
    jaxckpt.fork(ram_path / "run", ram_path / "new", step=1)

    for path in (ram_path / "run" / "1", ram_path / "run" / "2", ram_path / "new" / "1"):
        for item in ("state", "ema"):
            assert jaxckpt.open(path, item=item).leaves["w"].compression == "zstd"
            assert np.array_equal(jaxckpt.restore(path, item=item)["w"], SMOOTH)
    levels = metadata_of(ram_path / "new" / "1" / "ema", "w")["codecs"]
    assert levels[1]["configuration"]["level"] == 3


def test_files_of_many_arrays(ram_path, limits):
    """Of chunks whose places are known only when they are compressed, in several files."""
    limits("jaxckpt.format.ocdbt", DATA_FILE_BYTES=10 << 20)
    tree = {str(i): np.roll(SMOOTH, i) for i in range(8)} | {"b": np.arange(9), "s": SQUARE}
    jaxckpt.save(ram_path / "a", tree, compression="zstd")
    jaxckpt.save(ram_path / "b", tree)

    assert len([*(ram_path / "a" / "state" / "d").iterdir()]) == 6  # two arrays each, and the rest
    assert same(jaxckpt.restore(ram_path / "a"), tree)
    assert jaxckpt.verify(ram_path / "a").ok
    assert jaxckpt.diff(ram_path / "a", ram_path / "b").equal


def test_zeros_take_almost_nothing(ram_path):
    """A checkpoint far smaller than its values is not taken for one that lost its data.

    Its chunks are so small that they lie in the nodes of the database, which are compressed again.
    """
    tree = {"w": np.zeros(40 << 20, np.float32)} | {str(i): np.zeros(4 << 20) for i in range(16)}
    jaxckpt.save(ram_path / "a", tree, compression="zstd")

    assert size_of(ram_path / "a") < 40_000
    assert not any(values.any() for values in jaxckpt.restore(ram_path / "a").values())


def test_a_store_of_objects_takes_it(mesh):
    """Where the checksums of other chunks are computed instead of read back."""
    values = {"w": jax.device_put(SMOOTH, NamedSharding(mesh, P("x"))), "n": SMOOTH}

    jaxckpt.save("memory://compression/a", values, compression="zstd")

    assert same(jaxckpt.restore("memory://compression/a"), values)
    assert jaxckpt.verify("memory://compression/a").ok


def test_plain_files_are_compressed_too(saved, tmp_path):
    """With the same codecs, for zarr-python and others; the record has their digests."""
    path, values = saved
    jaxckpt.convert(path, tmp_path / "plain", ocdbt=False)
    jaxckpt.convert(path, tmp_path / "zstd", ocdbt=False, compression="zstd")

    assert size_of(tmp_path / "zstd") < size_of(tmp_path / "plain") / 2
    assert jaxckpt.diff(tmp_path / "zstd", path).equal
    assert jaxckpt.verify(tmp_path / "zstd").ok
    zarr = pytest.importorskip("zarr")
    got = zarr.open_array(tmp_path / "zstd" / "state" / "sharded", mode="r")
    assert np.array_equal(got[...], values["sharded"])


# --- other readers ---------------------------------------------------------------------------


def test_zarr_python_reads_each_array(saved):
    """Given the values of the database as files, since it cannot open the database itself."""
    zarr = pytest.importorskip("zarr")
    path, values = saved
    out = path.parent / "files"
    _, where = locate(path / "state")
    database = _arrays.Reader(kvstore(where) or {}, database=True)
    keys = database.keys()
    for key, value in zip(keys, database.values([(key, None) for key in keys]), strict=True):
        (out / key).parent.mkdir(parents=True, exist_ok=True)
        (out / key).write_bytes(value or b"")

    for leaf in ("inner", "plain", "sharded", "small", "zeros"):
        got = zarr.open_array(out / leaf, mode="r")[...]
        assert np.array_equal(got, np.asarray(values[leaf]))
