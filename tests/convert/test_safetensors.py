"""Safetensors files: export, import, and files that are not valid."""

from __future__ import annotations

import errno
import functools
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import (
    CheckpointError,
    CheckpointNotFound,
    CorruptCheckpoint,
    StepExists,
    TreeMismatch,
    UnsupportedFormat,
    UnsupportedLeaf,
)
from jaxckpt._convert.source import of_checkpoint
from jaxckpt._convert.target import write_checkpoint
from jaxckpt._core.box import Box
from jaxckpt._disk.chunks import LeafRead, layout_of
from jaxckpt._disk.reader import read_leaves
from jaxckpt._disk.tensors import path_of
from jaxckpt.errors import StoreError
from jaxckpt.format.arrays import dtype_of
from jaxckpt.format.safetensors import MAX_HEADER_BYTES, WORDS
from jaxckpt.storage import LocalStorage, MemoryStorage, PathIn, locate
from jaxckpt.storage._large import LargeFile, LargeFiles, UploadedFiles
from jaxckpt.testing import FailingStorage, WatchedStorage
from tests.strategies import random_bits, same
from tests.test_hops import hops_of
from tests.twins import ReadNotes, watched

ROOT = Path(__file__).parents[2]
# Those that the numpy loader of the reference implementation knows.
LOADABLE = [name for name in WORDS if not name.startswith("float8")]


def test_a_directory_is_never_replaced(tmp_path):
    """Not with `overwrite`, and not by several files either: what is in it stays."""
    jaxckpt.save(tmp_path / "saved", {"a": np.ones(2), "b": np.ones(2)})
    precious = tmp_path / "model.safetensors" / "precious"
    precious.parent.mkdir()
    precious.write_text("x")

    for most in (None, 16):
        with pytest.raises(StepExists, match="is a directory"):
            jaxckpt.export_safetensors(
                tmp_path / "saved",
                tmp_path / "model.safetensors",
                max_shard_bytes=most,
                overwrite=True,
            )

    assert precious.read_text() == "x"
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "saved"]


def write_file(path, header, data=b""):
    """A file with any header: a dict, or bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.fixture
def saved(tmp_path, mesh):
    """Weights of a model, split over devices."""
    w = np.arange(64, dtype=np.float32).reshape(8, 8)
    tree = {
        "params": {
            "dense": {"kernel": jax.device_put(w, NamedSharding(mesh, P("x", "y")))},
            "half": jnp.ones((3, 5), jnp.bfloat16),
            "empty": np.zeros((0, 4), np.int8),
        },
        "layers": [np.arange(3), np.arange(4.0)],
        "step": 7,
        "nothing": None,
    }
    jaxckpt.save(tmp_path / "saved", tree)
    return tmp_path / "saved"


EXPECTED = {
    "params.dense.kernel": np.arange(64, dtype=np.float32).reshape(8, 8),
    "params.half": np.ones((3, 5), ml_dtypes.bfloat16),
    "params.empty": np.zeros((0, 4), np.int8),
    "layers.0": np.arange(3),
    "layers.1": np.arange(4.0),
    "step": np.asarray(7),
}


# --- out -----------------------------------------------------------------------------------------


def test_the_reference_implementation_reads_an_export(saved, tmp_path):
    """Names, dtypes, shapes and values; leaves without values are left out."""
    file = jaxckpt.export_safetensors(saved, tmp_path / "out" / "model.safetensors")

    assert file == str(tmp_path / "out" / "model.safetensors")
    got = safetensors.numpy.load_file(file)
    assert got.keys() == EXPECTED.keys()
    assert all(same(values, EXPECTED[name]) for name, values in got.items())
    with safetensors.safe_open(file, framework="numpy") as opened:
        assert np.array_equal(
            opened.get_slice("params.dense.kernel")[2:4], EXPECTED["params.dense.kernel"][2:4]
        )
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]


@pytest.mark.parametrize("name", WORDS)
def test_every_dtype_goes_there_and_back(tmp_path, name):
    """Bit for bit; the reference implementation agrees where it has the dtype."""
    values = random_bits((5, 3), dtype_of(name), seed=0)
    jaxckpt.save(tmp_path / "a", {"w": values, "odd": np.ones(1, np.int8)})

    file = jaxckpt.export_safetensors(tmp_path / "a", tmp_path / "model.safetensors")
    jaxckpt.import_safetensors(file, tmp_path / "b")

    assert jaxckpt.restore(tmp_path / "b")["w"].tobytes() == values.tobytes()
    assert jaxckpt.restore(tmp_path / "b")["w"].dtype == values.dtype
    with safetensors.safe_open(file, framework="numpy") as opened:
        assert opened.get_slice("w").get_dtype() == WORDS[name]
        if name in LOADABLE:
            assert opened.get_tensor("w").tobytes() == values.tobytes()


TORCH = """
import json, sys
from safetensors.torch import load_file
tensors = load_file(sys.argv[1])
told = {name: [str(t.dtype), list(t.shape), t.double().sum().item()] for name, t in tensors.items()}
print(json.dumps(told))
"""


# Not in the group `test`: a gigabyte for one test; the reference implementation is in it.
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not here")
def test_torch_reads_an_export(saved, tmp_path):
    """With views of the mapped file, which must be aligned; in a process of its own."""
    file = jaxckpt.export_safetensors(saved, tmp_path / "model.safetensors")

    command = [sys.executable, "-c", TORCH, file]
    done = subprocess.run(command, check=True, capture_output=True, text=True)

    assert json.loads(done.stdout) == {
        name: [f"torch.{values.dtype}", list(values.shape), float(values.sum())]
        for name, values in EXPECTED.items()
    }


@pytest.mark.parametrize(
    "spec",
    [
        P("x", "y"),
        P(None, "x"),
        P(
            ("x", "y"),
        ),
        P(),
    ],
)
def test_however_an_array_is_split_its_bytes_are_in_order(tmp_path, mesh, spec):
    """For arrays of three dimensions, any of which may be split."""
    values = np.arange(16 * 16 * 6, dtype=np.int32).reshape(16, 16, 6)
    jaxckpt.save(tmp_path / "a", {"w": jax.device_put(values, NamedSharding(mesh, spec))})

    file = jaxckpt.export_safetensors(tmp_path / "a", tmp_path / "model.safetensors")

    assert np.array_equal(safetensors.numpy.load_file(file)["w"], values)


def test_a_part_is_exported_in_another_dtype(saved, tmp_path):
    """Only floating-point arrays are cast."""
    file = jaxckpt.export_safetensors(
        saved, tmp_path / "model.safetensors", only=["params", "layers"], dtype=np.float16
    )

    got = safetensors.numpy.load_file(file)
    assert {name: str(values.dtype) for name, values in got.items()} == {
        "params.dense.kernel": "float16",
        "params.half": "float16",
        "params.empty": "int8",
        "layers.0": "int64",
        "layers.1": "float16",
    }


def test_a_large_model_becomes_several_files_and_an_index(saved, tmp_path):
    """As Hugging Face has them: each tensor is in the file that the index says."""
    index = jaxckpt.export_safetensors(
        saved, tmp_path / "out" / "model.safetensors", max_shard_bytes=250
    )

    assert index == str(tmp_path / "out" / "model.safetensors.index.json")
    told = json.loads(Path(index).read_text())
    assert sorted(os.listdir(tmp_path / "out")) == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    assert told["metadata"]["total_size"] == sum(v.nbytes for v in EXPECTED.values())
    assert told["weight_map"].keys() == EXPECTED.keys()
    for name, file in told["weight_map"].items():
        with safetensors.safe_open(tmp_path / "out" / file, framework="numpy") as opened:
            assert same(opened.get_tensor(name), EXPECTED[name])


def test_leaves_without_a_dtype_of_safetensors_are_refused(tmp_path):
    """All are named, and nothing is written; without them the rest is exported."""
    bad = {
        "text": "a",
        "bytes": b"a",
        "key": jax.random.key(0),
        "complex": np.ones(2, np.complex64),
        "packed": jnp.ones(2, jnp.int4),
        "huge": 10**30,
        "__metadata__": np.ones(2),
    }
    jaxckpt.save(tmp_path / "saved", {**bad, "fine": np.ones(2)})

    with pytest.raises(UnsupportedLeaf) as caught:
        jaxckpt.export_safetensors(tmp_path / "saved", tmp_path / "out" / "model.safetensors")
    assert all(name in str(caught.value) for name in bad)
    assert os.listdir(tmp_path) == ["saved"]

    file = jaxckpt.export_safetensors(tmp_path / "saved", tmp_path / "a.safetensors", skip=[*bad])
    assert safetensors.numpy.load_file(file).keys() == {"fine"}


def test_names_that_collide_are_refused(tmp_path):
    """`save` refuses them already; a bare array has no name at all."""
    jaxckpt.save(tmp_path / "bare", np.ones(2))
    jaxckpt.save(tmp_path / "nothing", {"a": None})

    with pytest.raises(UnsupportedLeaf, match="cannot name a tensor"):
        jaxckpt.export_safetensors(tmp_path / "bare", tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedLeaf, match="nothing to export"):
        jaxckpt.export_safetensors(tmp_path / "nothing", tmp_path / "model.safetensors")
    assert sorted(os.listdir(tmp_path)) == ["bare", "nothing"]


def test_keys_with_dots_that_collide_are_refused(tmp_path):
    """Orbax writes them, and gives both the same values."""
    import orbax.checkpoint as ocp

    tree = {"a.b": np.ones(2), "a": {"b": np.ones(2)}, "c.d": np.zeros(2)}
    ocp.PyTreeCheckpointer().save(tmp_path / "orbax", tree)

    with pytest.raises(UnsupportedLeaf, match="a/b"):
        jaxckpt.export_safetensors(tmp_path / "orbax", tmp_path / "model.safetensors")
    file = jaxckpt.export_safetensors(
        tmp_path / "orbax", tmp_path / "model.safetensors", skip="a/b"
    )
    assert safetensors.numpy.load_file(file).keys() == {"a.b", "c.d"}


def test_an_export_replaces_nothing_unasked(saved, tmp_path):
    """Neither one file nor several; if asked, whatever was there of the model goes."""
    path = tmp_path / "out" / "model.safetensors"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model-of-mine.safetensors").write_text("stays")

    def files():
        return sorted(set(os.listdir(tmp_path / "out")) - {"model-of-mine.safetensors"})

    for first, second in [(None, 250), (250, None), (250, 100), (None, None)]:
        jaxckpt.export_safetensors(saved, path, max_shard_bytes=first, overwrite=True)
        before = files()
        with pytest.raises(StepExists, match="set overwrite to replace them"):
            jaxckpt.export_safetensors(saved, path, max_shard_bytes=second)
        assert files() == before
        top = jaxckpt.export_safetensors(saved, path, max_shard_bytes=second, overwrite=True)
        jaxckpt.import_safetensors(top, tmp_path / "back", overwrite=True)
        if second is None:
            assert files() == ["model.safetensors"]
        else:
            shards = json.loads(Path(top).read_text())["weight_map"].values()
            assert files() == sorted({*shards, "model.safetensors.index.json"})
    assert (tmp_path / "out" / "model-of-mine.safetensors").read_text() == "stays"


def test_the_old_files_stay_after_an_error(saved, tmp_path):
    """Of one file whose shards have names that are too long; of several, and none of the new."""
    one, folder = tmp_path / f"{'n' * 240}.safetensors", tmp_path / "out"
    jaxckpt.export_safetensors(saved, one)
    data = one.read_bytes()
    top = jaxckpt.export_safetensors(saved, folder / "model.safetensors", max_shard_bytes=250)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    with pytest.raises(OSError, match="too long"):
        jaxckpt.export_safetensors(saved, one, max_shard_bytes=250, overwrite=True)
    with LargeFiles(str(folder)) as files:
        for name in ("new", "another", "n" * 256):
            files.new(f"{folder}/{name}").write(0, b"new")
        with pytest.raises(OSError, match="too long"):
            files.publish([f"{folder}/{name}" for name in before])

    assert one.read_bytes() == data
    assert sorted(os.listdir(tmp_path)) == [one.name, "out", "saved"]
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert jax.tree.leaves(jaxckpt.restore(top))


def test_an_export_removes_no_file_of_another(saved, tmp_path):
    """That got the name first, and whose writer has said that it is whole."""
    with LargeFiles(str(tmp_path)) as files:
        for name in ("first", "second"):
            files.new(f"{tmp_path}/{name}").write(0, b"mine")
        (tmp_path / "first").write_bytes(b"theirs")
        with pytest.raises(FileExistsError):
            files.publish([])

    assert sorted(os.listdir(tmp_path)) == ["first", "saved"]
    assert (tmp_path / "first").read_bytes() == b"theirs"


@pytest.mark.parametrize("first", [None, 250])
@pytest.mark.parametrize("failing", [0, 1, 2, -1])
def test_an_error_in_a_bucket_leaves_the_old_model(saved, first, failing):
    """Whichever object cannot be written; the next export has names that are free."""
    folder = f"memory://failing-{uuid.uuid4().hex}"
    path = f"{folder}/model.safetensors"
    top = jaxckpt.export_safetensors(saved, path, max_shard_bytes=first)
    storage, root = locate(folder)
    before, wanted = [*storage.files(root)], jaxckpt.restore(top)

    full = OSError(errno.ENOSPC, "No space left on device")
    with UploadedFiles(FailingStorage(storage, failing % 4, full)) as files:
        for name in ("m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors", "m.json"):
            files.new(f"{root}/{name}").write(0, b"new")
        with pytest.raises(OSError, match="No space left"):
            files.publish([f"{root}/{name}" for name in before])
    left = {*storage.files(root)} - {*before}

    assert len(left) == (2 if failing == -1 else 0)
    assert same(jaxckpt.restore(top), wanted)
    again = jaxckpt.export_safetensors(saved, path, max_shard_bytes=250, overwrite=True)
    assert same(jaxckpt.restore(again), wanted)
    assert {*storage.files(root)}.isdisjoint(before) == (first is None)


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_exports_at_once_to_a_store_do_not_mix_their_shards(tmp_path, overwrite):
    """The other one ends when the first has looked at the names; its model stays."""
    for n in (1, 2, 3):
        jaxckpt.save(tmp_path / f"{n}", {f"w{i}": np.full(100, n, np.float32) for i in range(4)})
    path = f"memory://at-once-{tmp_path.name}/model.safetensors"
    options = {"max_shard_bytes": 400, "overwrite": overwrite}
    if overwrite:
        jaxckpt.export_safetensors(tmp_path / "3", path, max_shard_bytes=400)
    tops = []

    def other(verb, file):
        if verb in ("create", "write") and "-00001-of-" in file and not tops:
            tops.append(jaxckpt.export_safetensors(tmp_path / "1", path, **options))

    watched_path = PathIn(WatchedStorage(MemoryStorage(), other), path)
    with pytest.raises(StepExists, match=r"-00001-of-.* was created during the export"):
        jaxckpt.export_safetensors(tmp_path / "2", watched_path, **options)

    assert {float(w[0]) for w in jaxckpt.restore(tops[0], as_numpy=True).values()} == {1.0}


def test_an_export_into_a_checkpoint_is_refused(saved):
    """It would be deleted with that."""
    with pytest.raises(StepExists, match="lies inside the checkpoint"):
        jaxckpt.export_safetensors(saved, saved / "weights.safetensors")
    assert "weights.safetensors" not in os.listdir(saved)


def test_a_damaged_checkpoint_makes_no_file(saved, tmp_path):
    """Nor does it take away what was there."""
    jaxckpt.export_safetensors(saved, tmp_path / "out" / "model.safetensors")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    file = max((saved / "state" / "d").iterdir(), key=lambda path: path.stat().st_size)
    file.write_bytes(bytes(file.stat().st_size))

    with pytest.raises(CorruptCheckpoint):
        jaxckpt.export_safetensors(saved, tmp_path / "out" / "model.safetensors", overwrite=True)
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_wrong_arguments_of_an_export(saved, tmp_path):
    """They raise built-in exceptions before anything is written."""
    for options in ({"max_shard_bytes": 0}, {"dtype": "int8"}, {"only": "missing"}):
        with pytest.raises(ValueError, match=r"positive|floating|no leaf"):
            jaxckpt.export_safetensors(saved, tmp_path / "a.safetensors", **options)
    with pytest.raises(TypeError, match="max_shard_bytes must be a number, got '5GB'"):
        jaxckpt.export_safetensors(saved, tmp_path / "a.safetensors", max_shard_bytes="5GB")
    with pytest.raises(ValueError, match="must end"):
        jaxckpt.export_safetensors(saved, tmp_path / "a.bin")
    with pytest.raises(CheckpointNotFound):
        jaxckpt.export_safetensors(tmp_path / "missing", tmp_path / "a.safetensors")
    assert os.listdir(tmp_path) == ["saved"]


def test_a_store_takes_the_same_files(saved, tmp_path):
    """One file, or several with their index; what is there is replaced only on request."""
    root = f"memory://{uuid.uuid4()}"
    for options in ({}, {"max_shard_bytes": 64}):
        here = jaxckpt.export_safetensors(saved, tmp_path / "a.safetensors", **options)
        there = jaxckpt.export_safetensors(
            saved, f"{root}/a.safetensors", overwrite=True, **options
        )
        with pytest.raises(StepExists):
            jaxckpt.export_safetensors(saved, f"{root}/a.safetensors", **options)
        jaxckpt.import_safetensors(here, tmp_path / "imported")
        jaxckpt.import_safetensors(there, f"{root}/imported")

        assert os.path.basename(there) == os.path.basename(here)
        assert jaxckpt.diff(f"{root}/imported", tmp_path / "imported").equal
        for path in [*tmp_path.glob("a*.safetensors*"), tmp_path / "imported"]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        MemoryStorage().delete(f"{root}/imported")


# --- in ------------------------------------------------------------------------------------------


def test_a_file_of_the_reference_implementation_becomes_a_checkpoint(tmp_path):
    """Nested by the dots of its names, checked by `verify`, with its metadata."""
    file = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(EXPECTED, file, metadata={"format": "pt", "author": "me"})

    jaxckpt.import_safetensors(file, tmp_path / "ours")

    report = jaxckpt.verify(tmp_path / "ours")
    assert (report.ok, report.unchecked) == (True, ())
    got = jaxckpt.restore(tmp_path / "ours")
    assert same(got["params"]["dense"]["kernel"], EXPECTED["params.dense.kernel"])
    assert same(got["params"]["half"], EXPECTED["params.half"])
    assert same(got["params"]["empty"], EXPECTED["params.empty"])
    assert same(got["layers"], {"0": EXPECTED["layers.0"], "1": EXPECTED["layers.1"]})
    assert same(got["step"], EXPECTED["step"])
    ckpt = jaxckpt.open(tmp_path / "ours")
    assert ckpt.custom_metadata == {"format": "pt", "author": "me"}
    assert ckpt.lineage == {"by": "import", "path": str(file), "token": None}


@pytest.mark.parametrize("most_bytes", [None, 1, 200])
def test_what_is_exported_can_be_imported(saved, tmp_path, mesh, most_bytes):
    """From one file or several; on any devices, with a target."""
    top = jaxckpt.export_safetensors(
        saved, tmp_path / "model.safetensors", max_shard_bytes=most_bytes
    )
    jaxckpt.import_safetensors(top, tmp_path / "ours", dtype="float64")

    like = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(mesh, P("y")))
    got = jaxckpt.restore(
        tmp_path / "ours", {"params": {"dense": {"kernel": like}}}, extra="ignore"
    )
    kernel = got["params"]["dense"]["kernel"]
    assert kernel.sharding == like.sharding
    assert np.array_equal(kernel, EXPECTED["params.dense.kernel"])
    leaves = jaxckpt.open(tmp_path / "ours").leaves
    assert leaves["params/half"].dtype == "float64"
    assert leaves["params/empty"].dtype == "int8"
    assert set(leaves) == {name.replace(".", "/") for name in EXPECTED}


def test_large_tensors_are_read_in_pieces(ram_path):
    """Also where no divisor is near, and where a cast makes them larger."""
    rng = np.random.default_rng(0)
    tensors = {
        "prime": rng.random(17_000_023, np.float32).astype(np.float16),
        "rows": rng.random((4099, 4200), np.float32).astype(np.float16),
    }
    safetensors.numpy.save_file(tensors, ram_path / "model.safetensors")

    jaxckpt.import_safetensors(ram_path / "model.safetensors", ram_path / "ours", dtype="float64")

    report = jaxckpt.verify(ram_path / "ours")
    assert (report.ok, report.unchecked) == (True, ())
    got = jaxckpt.restore(ram_path / "ours")
    assert all(np.array_equal(got[name], values) for name, values in tensors.items())


# --- without an import ---------------------------------------------------------------------------


@pytest.fixture
def model(ram_path):
    """Returns tensors of every rank by nested names, and the paths of one file and of an index."""
    rng = np.random.default_rng(0)
    tree = {
        "layers": {
            "0": {
                "w": rng.standard_normal((64, 4096), np.float32),
                "thin": rng.standard_normal((300, 8), np.float32),
                "cube": rng.standard_normal((6, 4, 10), np.float32).astype(jnp.bfloat16),
            }
        },
        "large": rng.standard_normal((3000, 1000), np.float32),  # more than one piece
        "scalar": np.float32(3),
        "empty": np.zeros((0, 4), np.float32),
        "flags": np.array([True, False]),
    }
    jaxckpt.save(ram_path / "saved", tree)
    one = jaxckpt.export_safetensors(ram_path / "saved", ram_path / "model.safetensors")
    many = jaxckpt.export_safetensors(
        ram_path / "saved", ram_path / "many" / "model.safetensors", max_shard_bytes=1 << 20
    )
    return jax.tree.map(np.asarray, tree), one, many


@pytest.mark.parametrize(
    "specs", [P(), P("x"), P(None, "x"), P("x", "y"), P(None, ("x", "y"))], ids=str
)
def test_tensors_are_restored_onto_shardings(model, mesh, specs):
    """From one file and from several, whole and in parts that are not one run of the file."""
    tree, *files = model

    def like(value):
        spec = specs if value.ndim > 1 and value.size and value.shape[0] % 4 == 0 else P()
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)

    wanted = jax.tree.map(lambda v: jax.device_put(v, like(v).sharding), tree)
    for file in files:
        assert same(jaxckpt.restore(file), tree)
        assert same(jaxckpt.restore(file, jax.tree.map(like, tree)), wanted)


def test_tensors_are_cast_and_selected(model):
    """As with any checkpoint: dtype, only, a part of the tree; a misfit is an error."""
    tree, file, index = model

    got = jaxckpt.restore(index, dtype=jnp.bfloat16, only="layers")
    assert same(got, {"layers": jax.tree.map(lambda v: v.astype(jnp.bfloat16), tree["layers"])})
    assert same(jaxckpt.open(file)["layers/0/cube"].restore(), tree["layers"]["0"]["cube"])
    assert jaxckpt.verify(file).ok
    with pytest.raises(TreeMismatch, match="layers/0/w"):
        jaxckpt.restore(file, tree | {"layers": {"0": {"w": np.zeros(3)}}})


@pytest.mark.parametrize(
    ("leaf", "box", "least"),
    [
        ("layers/0/w", Box((0, 0), (1, 4096)), 1 << 14),
        ("layers/0/w", Box((3, 1024), (5, 2048)), 2 << 12),
        ("layers/0/thin", Box((8, 4), (200, 8)), 192 * 32),  # its rows are too short to read alone
        ("large", Box((1000, 500), (2000, 1000)), 1000 * 4000),
    ],
)
def test_only_the_wanted_part_of_a_tensor_is_read(model, leaf, box, least):
    """Or its rows, where reading each part of a row would take thousands of calls."""
    tree, file, _ = model
    disk = ReadNotes()
    item = jaxckpt.open(PathIn(disk, str(file)))[leaf]._opened
    disk.taken.clear()
    saved = item.tree.leaves[0]
    read = LeafRead(saved, layout_of(saved.array, (box,), np.dtype(np.float32)))

    (buffers,) = read_leaves(item, [read], budget_bytes=1 << 30)

    wanted = functools.reduce(dict.__getitem__, leaf.split("/"), tree)[box.slices]
    assert np.array_equal(buffers[0], wanted)
    sizes = [stop - start for _, start, stop in disk.taken]
    assert wanted.nbytes <= sum(sizes) <= max(least, wanted.nbytes + 2 * 4096)


def test_small_tensors_are_read_together(ram_path):
    """500 tensors of 2 kB take a few reads."""
    tensors = {f"{i:03}": np.full(512, i, np.float32) for i in range(500)}
    file = str(ram_path / "model.safetensors")
    safetensors.numpy.save_file(tensors, file)
    got = {}
    jaxckpt.restore(file)

    whole = hops_of(lambda: got.update(jaxckpt.restore(file)))

    assert all(np.array_equal(got[name], values) for name, values in tensors.items())
    assert whole.storage_calls <= 12


@pytest.fixture
def three(ram_path):
    """A file with three tensors of 2 kB, which are read together."""
    file = str(ram_path / "model.safetensors")
    safetensors.numpy.save_file({name: np.full(512, 1.0, np.float32) for name in "abc"}, file)
    return file


def reading(item, failed):
    reads = [
        LeafRead(leaf, layout_of(leaf.array, (Box((0,), (512,)),), np.dtype(np.float32)))
        for leaf in item.tree.leaves
    ]
    return read_leaves(
        item, reads, budget_bytes=1 << 30, failed=lambda read, _: failed.append(read.leaf.text)
    )


def test_of_tensors_read_together_the_error_names_those_that_are_bad(three):
    """A file that ends within the second of three: the first one is good."""
    item = jaxckpt.open(three)._opened
    os.truncate(three, os.path.getsize(three) - 3000)
    failed = []

    [good] = reading(item, failed)

    assert failed == ["b", "c"]
    assert [values.tolist() for values in good] == [[1.0] * 512]


def test_tensors_that_a_silent_store_has_are_asked_for_once(three):
    """Each alone would take as long to fail; none of them is returned."""
    failed, calls = [], []
    is_silent = threading.Event()

    def before(verb, path):
        if is_silent.is_set():
            calls.append(verb)
            raise StoreError(f"{path}: the store did not answer")

    item = jaxckpt.open(watched(three, before))._opened
    is_silent.set()

    assert [*reading(item, failed)] == []
    assert failed == ["a", "b", "c"]
    assert calls == ["read_into"]


def test_a_file_that_is_cut_is_not_restored(model):
    """Neither if that was after its header was read, nor if the header does not fit it."""
    _, file, _ = model
    ckpt = jaxckpt.open(file)
    os.truncate(file, os.path.getsize(file) - 1000)

    with pytest.raises(CheckpointNotFound, match="changed or deleted since it was opened"):
        ckpt.restore()
    with pytest.raises(CorruptCheckpoint):
        jaxckpt.restore(file)


@pytest.mark.parametrize("call", ["restore", "open", "import"])
def test_a_link_out_of_the_directory_is_not_followed(model, tmp_path, call):
    """An index from elsewhere must not make a file of this machine into weights."""
    *_, index = model
    index = Path(index)
    secret = (tmp_path / "secret.safetensors").absolute()
    shard = sorted(index.parent.glob("*.safetensors"))[0]
    shutil.move(shard, secret)
    shard.symlink_to(secret)
    calls = {
        "restore": jaxckpt.restore,
        "open": jaxckpt.open,
        "import": lambda path: jaxckpt.import_safetensors(path, tmp_path / "new"),
    }

    with pytest.raises(CorruptCheckpoint, match="out of the directory") as caught:
        calls[call](index)

    assert caught.value.file == str(shard)
    assert os.listdir(tmp_path) == ["secret.safetensors"]


def test_links_of_a_cache_are_followed(saved, tmp_path):
    """A model hub keeps files under other names, and links to them."""
    jaxckpt.export_safetensors(saved, tmp_path / "hub" / "model.safetensors", max_shard_bytes=250)
    (tmp_path / "snapshot").mkdir()
    for i, file in enumerate(sorted((tmp_path / "hub").iterdir())):
        file.rename(tmp_path / "hub" / f"blob-{i}")
        (tmp_path / "snapshot" / file.name).symlink_to(f"../hub/blob-{i}")

    index = tmp_path / "snapshot" / "model.safetensors.index.json"
    jaxckpt.import_safetensors(index, tmp_path / "ours")

    assert len(jaxckpt.open(tmp_path / "ours").leaves) == len(EXPECTED)
    assert same(jaxckpt.restore(index), jaxckpt.restore(tmp_path / "ours"))


def test_an_import_replaces_nothing_unasked(saved, tmp_path):
    """With overwrite=True it does."""
    file = jaxckpt.export_safetensors(saved, tmp_path / "model.safetensors", only="step")
    with pytest.raises(StepExists):
        jaxckpt.import_safetensors(file, saved)
    jaxckpt.import_safetensors(file, saved, overwrite=True)

    assert same(jaxckpt.restore(saved), {"step": np.asarray(7)})


# --- what is no such file ------------------------------------------------------------------------

DATA = bytes(range(16))
GOOD = {"a": entry(), "b": entry("U8", (4, 2), (8, 16))}

HEADERS = {
    "not JSON": b"{]" * 20,
    "a list": b"[1, 2]",
    "an entry is a number": {"a": 7},
    "no dtype": {"a": {"shape": [2], "data_offsets": [0, 8]}},
    "a negative size": {"a": entry(shape=(-2,)), "b": GOOD["b"]},
    "a size that is no int": {"a": entry(shape=(2.0,)), "b": GOOD["b"]},
    "a huge size": {"a": entry(shape=(1 << 61,)), "b": GOOD["b"]},
    "sizes that overflow": {"a": entry(shape=(1 << 40, 1 << 40)), "b": GOOD["b"]},
    "many dimensions": {"a": entry("U8", (1,) * 40, (0, 1)), "b": entry("U8", (15,), (1, 16))},
    "an absurd shape": {"a": entry("U8", (1 << 60, 0), (0, 0)), "b": entry("U8", (16,), (0, 16))},
    "offsets of one": {"a": entry(offsets=(0,)), "b": GOOD["b"]},
    "offsets that go back": {"a": entry(offsets=(8, 0)), "b": GOOD["b"]},
    "offsets of another size": {"a": entry(offsets=(0, 7)), "b": GOOD["b"]},
    "a tensor beyond the end": {"a": entry(), "b": entry("U8", (8,), (16, 24))},
    "a hole": {"a": entry("U8", (4,), (0, 4)), "b": GOOD["b"]},
    "an overlap": {"a": entry(), "b": entry("U8", (12,), (4, 16))},
    "the same bytes twice": {"a": entry(), "c": entry(), "b": GOOD["b"]},
    "data of nobody": {"a": entry()},
    "metadata that are no text": {**GOOD, "__metadata__": {"a": 1}},
    "metadata that are a list": {**GOOD, "__metadata__": ["a"]},
    "nested too deep": b'{"a":' * 5000 + b"1" + b"}" * 5000,
}  # fmt: skip


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_lies_is_refused(tmp_path, what):
    """The file is named, and nothing is made."""
    file = write_file(tmp_path / "bad.safetensors", HEADERS[what], DATA)

    with pytest.raises(CorruptCheckpoint):
        jaxckpt.import_safetensors(file, tmp_path / "ours")
    assert os.listdir(tmp_path) == ["bad.safetensors"]


@pytest.mark.parametrize("verb", [jaxckpt.open, jaxckpt.restore])
def test_an_empty_tensor_with_huge_sizes_is_named(tmp_path, verb):
    """No array has such a shape, though it would have no bytes."""
    header = {"w.a": entry(shape=(0, 2**61, 2**61), offsets=(0, 0))}
    file = write_file(tmp_path / "bad.safetensors", header)

    with pytest.raises(CorruptCheckpoint, match=r"w\.a") as caught:
        verb(file)

    assert (caught.value.leaf, caught.value.file) == ("w.a", str(file))
    assert not jaxckpt.verify(file).ok


def test_the_good_header_is_good(tmp_path):
    """It is what the bad ones above were made of."""
    file = write_file(tmp_path / "good.safetensors", GOOD, DATA)

    jaxckpt.import_safetensors(file, tmp_path / "ours")

    assert jaxckpt.restore(tmp_path / "ours")["b"].tobytes() == DATA[8:]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\0" * 8,
        (1).to_bytes(8, "little") + b"{",
        (100).to_bytes(8, "little") + b"{}",
        (1 << 62).to_bytes(8, "little") + b"{}",
        (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}",
    ],
)
def test_a_file_without_a_header_is_refused(tmp_path, data):
    """Before as much is allocated as it says."""
    (tmp_path / "bad.safetensors").write_bytes(data)

    with pytest.raises(CorruptCheckpoint, match="safetensors file"):
        jaxckpt.import_safetensors(tmp_path / "bad.safetensors", tmp_path / "ours")


def test_a_header_that_is_too_long_is_not_read(tmp_path):
    """Not even if the file is that large."""
    file = tmp_path / "bad.safetensors"
    file.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
    os.truncate(file, MAX_HEADER_BYTES + 100)

    with pytest.raises(CorruptCheckpoint, match="safetensors file"):
        jaxckpt.import_safetensors(file, tmp_path / "ours")


def test_a_cut_file_is_refused(saved, tmp_path):
    """At any byte."""
    file = Path(jaxckpt.export_safetensors(saved, tmp_path / "model.safetensors"))
    size = file.stat().st_size

    for length in [size - 1, size - 8, size // 2, 100, 8, 4]:
        os.truncate(file, length)
        with pytest.raises(CorruptCheckpoint):
            jaxckpt.import_safetensors(file, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(edits=[(0, 255)], cut=None)
@given(
    edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
    cut=st.none() | st.integers(0, 400),
)
def test_a_mutated_file_is_refused_or_is_another_good_one(tmp_path, edits, cut):
    """No other error, and what comes of it is what the reference implementation reads too."""
    whole = write_file(tmp_path / "mutated.safetensors", GOOD, DATA)
    data = bytearray(whole.read_bytes())[:cut]
    for at, byte in edits:
        if data:
            data[at % len(data)] = byte
    whole.write_bytes(data)

    try:
        jaxckpt.import_safetensors(whole, "memory://mutated/ours", overwrite=False)
    except CheckpointError:
        return
    got = jaxckpt.restore("memory://mutated/ours")
    MemoryStorage().delete("/mutated/ours")
    assert sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(got)) == len(DATA)
    try:
        theirs = safetensors.numpy.load(bytes(data))
    except (safetensors.SafetensorError, KeyError, UnicodeDecodeError):
        return
    for name, values in theirs.items():
        node = got
        for key in path_of(name, theirs):
            node = node[key]
        assert node.tobytes() == values.tobytes()


def test_a_tensor_may_have_the_name_of_a_module(tmp_path):
    """As the weights and scales of quantized models; no name changes on the way there and back."""
    names = ["net.w", "net.w.absmax", "net.w.map.code", "net.b.c", "net", "other.x"]
    tensors = {name: np.full(i + 1, i, np.float32) for i, name in enumerate(names)}
    first = {"net": tensors.pop("net")}
    file = tmp_path / "quantized.safetensors"
    safetensors.numpy.save_file(tensors, file)

    got = jaxckpt.restore(file)
    assert got["net"].keys() == {"w", "w.absmax", "w.map.code", "b"}
    assert same(got["net"]["b"]["c"], tensors["net.b.c"])
    assert same(
        jaxckpt.restore(file, only="net/w.absmax"), {"net": {"w.absmax": tensors["net.w.absmax"]}}
    )
    jaxckpt.import_safetensors(file, tmp_path / "ours")
    back = jaxckpt.export_safetensors(tmp_path / "ours", tmp_path / "back.safetensors")
    assert same(safetensors.numpy.load_file(back), tensors)

    safetensors.numpy.save_file(tensors | first, file)
    assert same(
        jaxckpt.restore(file),
        {"other": {"x": tensors["other.x"]}}
        | {name: value for name, value in (tensors | first).items() if name != "other.x"},
    )


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ([".".join("a" * 200)], "nested deeper"),
        (["a\0"], "NUL"),
    ],
)
def test_names_that_no_tree_has_are_refused(tmp_path, names, problem):
    """The error names them, and nothing is written."""
    header = {name: entry("U8", (1,), (i, i + 1)) for i, name in enumerate(names)}
    file = write_file(tmp_path / "bad.safetensors", header, bytes(len(names)))

    with pytest.raises(UnsupportedLeaf, match=problem):
        jaxckpt.import_safetensors(file, tmp_path / "ours")
    assert os.listdir(tmp_path) == ["bad.safetensors"]


def test_what_jax_has_no_word_for_is_refused(tmp_path):
    """An unknown dtype, and a file that holds nothing."""
    odd = write_file(tmp_path / "odd.safetensors", {"a": entry("F6_E9M9")}, DATA[:8])
    none = write_file(tmp_path / "none.safetensors", {"__metadata__": {"a": "b"}})

    with pytest.raises(UnsupportedFormat, match="F6_E9M9"):
        jaxckpt.import_safetensors(odd, tmp_path / "ours")
    with pytest.raises(UnsupportedFormat, match="no tensors"):
        jaxckpt.import_safetensors(none, tmp_path / "ours")
    with pytest.raises(ValueError, match="must end"):
        jaxckpt.import_safetensors(tmp_path / "a.bin", tmp_path / "ours")
    with pytest.raises(CheckpointNotFound):
        jaxckpt.import_safetensors(tmp_path / "missing.safetensors", tmp_path / "ours")


@pytest.mark.parametrize(
    "name",
    ["../b.safetensors", "/etc/b.safetensors", "x/b.safetensors", "b.b", "..", "\0.safetensors", 7],
)
def test_an_index_names_no_file_elsewhere(tmp_path, name):
    """It is refused before any file is opened."""
    (tmp_path / "in").mkdir()
    write_file(tmp_path / "b.safetensors", GOOD, DATA)
    index = tmp_path / "in" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name, "b": name}}))

    with pytest.raises(CorruptCheckpoint):
        jaxckpt.import_safetensors(index, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    "weight_map",
    [
        {"a": "b.safetensors"},
        {"a": "b.safetensors", "b": "b.safetensors", "c": "b.safetensors"},
        {"a": "b.safetensors", "b": "c.safetensors"},
        ["b.safetensors"],
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, weight_map):
    """With tensors too many, too few or elsewhere, or with a file that is not there."""
    write_file(tmp_path / "b.safetensors", GOOD, DATA)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))

    with pytest.raises((CorruptCheckpoint, CheckpointNotFound)):
        jaxckpt.import_safetensors(index, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("more", [-1, 1])
def test_a_file_that_changes_meanwhile_makes_no_checkpoint(tmp_path, more):
    """Whether it became shorter or longer since its header was read."""
    file = write_file(tmp_path / "in.safetensors", GOOD, DATA)
    source = of_checkpoint(file, dtype=None, by="import")
    os.truncate(file, file.stat().st_size + more)

    with pytest.raises(CheckpointNotFound, match=f"{file} was .*changed") as caught:
        write_checkpoint(LocalStorage(), str(tmp_path / "ours"), source, overwrite=False)
    assert os.listdir(tmp_path) == ["in.safetensors"]
    assert more > 0 or "was truncated" in str(caught.value.__context__)


@pytest.mark.parametrize("is_index", [False, True])
def test_two_models_are_not_mixed(saved, tmp_path, is_index):
    """A model that another of equal shapes replaces meanwhile is not imported; it restores anew."""
    files, most = tmp_path / "model.safetensors", 250 if is_index else None
    top = jaxckpt.export_safetensors(saved, files, max_shard_bytes=most)
    ckpt, source = jaxckpt.open(top), of_checkpoint(top, dtype=None, by="import")
    jaxckpt.export_safetensors(saved, files, max_shard_bytes=most, overwrite=True)

    with pytest.raises(CheckpointNotFound, match="was replaced"):
        write_checkpoint(LocalStorage(), str(tmp_path / "ours"), source, overwrite=False)
    with pytest.raises(CheckpointNotFound, match="was replaced"):
        ckpt.restore()
    assert not (tmp_path / "ours").exists()
    assert jax.tree.leaves(jaxckpt.restore(top))


# --- kills ---------------------------------------------------------------------------------------

KILLED = {
    "import": "import jaxckpt; jaxckpt.import_safetensors('in.safetensors', 'out')",
    "export": "import jaxckpt; jaxckpt.export_safetensors('ours', 'out.safetensors')",
    "shards": "import jaxckpt; "
    "jaxckpt.export_safetensors('ours', 'out.safetensors', max_shard_bytes=8 << 20)",
}


@pytest.mark.faults
@pytest.mark.parametrize("what", KILLED)
def test_a_kill_leaves_nothing_that_looks_good(ram_path, what):
    """In the middle of the data; and the next one succeeds."""
    size = 96 << 20
    header = {
        name: entry("U8", (3 << 20, 16), (i * size // 2, (i + 1) * size // 2))
        for i, name in enumerate("ab")
    }
    os.truncate(write_file(ram_path / "in.safetensors", header), 8 + len(json.dumps(header)) + size)
    if what != "import":
        jaxckpt.import_safetensors(ram_path / "in.safetensors", ram_path / "ours")
    before = set(os.listdir(ram_path))
    command = [sys.executable, "-c", KILLED[what]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    process = subprocess.Popen(command, cwd=ram_path, env=environment)
    deadline = time.monotonic() + 60
    while not set(os.listdir(ram_path)) - before and time.monotonic() < deadline:
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()

    left = set(os.listdir(ram_path)) - before
    assert left
    assert all(".jaxckpt-export-" in name or ".orbax-checkpoint-tmp" in name for name in left)
    with pytest.raises(CheckpointNotFound):
        jaxckpt.open(ram_path / "out")
    subprocess.run(command, cwd=ram_path, env=environment, check=True)
    if what == "import":
        assert jaxckpt.verify(ram_path / "out").ok
    else:
        top = "out.safetensors" + (".index.json" if what == "shards" else "")
        assert top in os.listdir(ram_path)
    assert not [name for name in os.listdir(ram_path) if name in left]


def test_an_export_removes_what_dead_ones_left(tmp_path, caplog):
    """Not the files of a live one, nor those of an owner unknown, nor other names."""
    jaxckpt.save(tmp_path / "ours", {"w": np.ones(3)})
    folder = tmp_path / "exports"
    folder.mkdir()
    dead, alone, foreign = (f".jaxckpt-export-{c * 16}" for c in "abc")
    others = (".jaxckpt-export-mine", ".jaxckpt-tmp-0123456789abcdef", f"{foreign}.txt")
    for name in (dead, f"{dead}-0", f"{dead}-11", f"{alone}-0", *others):
        (folder / name).write_bytes(b"data")
    os.mkfifo(folder / foreign)

    with LargeFiles(str(folder)) as live:
        live.new(f"{folder}/other").write(0, b"data")
        jaxckpt.export_safetensors(tmp_path / "ours", folder / "m.safetensors")
        lock = live._lock.rpartition("/")[2]
        kept = {lock, f"{lock}-0", foreign, *others, "m.safetensors"}
        assert set(os.listdir(folder)) == kept
        live.publish([])

    assert set(os.listdir(folder)) == kept - {lock, f"{lock}-0"} | {"other"}
    assert [f"{folder}/{name}*" in caplog.text for name in (dead, alone, foreign)] == [True] * 3


def test_without_locks_leftovers_stay(tmp_path, monkeypatch, caplog):
    """And are named; the files that the export made are gone all the same."""
    jaxckpt.save(tmp_path / "ours", {"w": np.ones(3)})
    folder = tmp_path / "exports"
    folder.mkdir()
    (folder / f".jaxckpt-export-{'a' * 16}-0").write_bytes(b"data")

    def flock(fd, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)  # as on NFS without a lock service
    jaxckpt.export_safetensors(tmp_path / "ours", folder / "m.safetensors")

    assert "m.safetensors" in os.listdir(folder)
    assert sum("a" * 16 in name for name in os.listdir(folder)) == len(os.listdir(folder)) - 1
    assert "may be in use, and stays" in caplog.text


def test_a_large_file_is_named_once(tmp_path):
    """Files created in the meantime stay; a file without a name disappears."""
    first, second, third = (LargeFile(str(tmp_path / "a"), f"{tmp_path}/{i}") for i in range(3))
    first.write(3, b"d")
    first.write(0, b"abc")
    first.publish(replace=False)
    with pytest.raises(FileExistsError, match="a"):
        second.publish(replace=False)
    second.discard()

    assert (tmp_path / "a").read_bytes() == b"abcd"
    assert sorted(os.listdir(tmp_path)) == ["2", "a"]
    third.publish(replace=True)
    third.discard()
    assert (tmp_path / "a").read_bytes() == b""
    assert os.listdir(tmp_path) == ["a"]
