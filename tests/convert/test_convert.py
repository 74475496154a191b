"""`convert` copies a checkpoint of any kind into the requested layout."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from flax.training.train_state import TrainState
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1

import jaxckpt
from jaxckpt import (
    CheckpointManager,
    CheckpointNotFound,
    CorruptCheckpoint,
    KeepPolicy,
    SaveFailed,
    StepExists,
    UnsupportedFormat,
    UnsupportedLeaf,
)
from jaxckpt._convert.source import _in_order, of_checkpoint
from jaxckpt._convert.target import chunked, enlarged, run_shape, write_checkpoint
from jaxckpt._core.plain import plain_root
from jaxckpt.format import names, step
from jaxckpt.format.arrays import AS_BYTES_DTYPES, dtype_of
from jaxckpt.format.tree import NAMED, SEQUENCE, Leaf, StoredArray
from jaxckpt.storage import LocalStorage, PathIn
from jaxckpt.testing import CrashingStorage, SimulatedCrash, WatchedStorage
from tests.golden import compare
from tests.golden.fixture import Golden, golden_names
from tests.strategies import same, trees

# Orbax warns about each restore without a target.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")

ROOT = Path(__file__).parents[2]
# One of each kind of layout and of release; all of them are read in `test_reads_orbax`.
SAMPLES = [name for name in golden_names() if "item-kinds" not in name]
FEW = [
    name
    for name in SAMPLES
    if name.startswith(("orbax-0.1.6-", "orbax-0.5.15-", "orbax-0.12.8-"))
    and any(
        kind in name
        for kind in ("aggregate", "keys", "zarr3", "flax", "v1-save", "rich", "chunked")
    )
]


def sharded(values, mesh, spec):
    return jax.device_put(values, NamedSharding(mesh, spec))


@pytest.fixture
def tree(mesh):
    """A leaf of every kind, and containers of every type."""
    w = sharded(np.arange(64, dtype=np.float32).reshape(8, 8), mesh, P("x", "y"))
    return {
        "params": {"w": w, "half": jnp.ones((3, 5), jnp.bfloat16), "packed": jnp.ones(3, jnp.int4)},
        "opt": optax.adam(1e-3).init({"w": w}),
        "key": jax.random.key(3),
        "tuple": (np.arange(3), None, [], np.zeros((0, 3))),
        "numbers": [7, 2.5, True, 1 + 2j, 10**30, np.float32(3)],
        "text": {"plain": "a", "~": "b", "bytes": b"abc"},
    }


@pytest.fixture
def saved(tree, tmp_path):
    path = tmp_path / "saved"
    jaxckpt.save(path, tree, custom_metadata={"of": "run"})
    return path


def files_of(folder):
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


# --- what save would have written ----------------------------------------------------------------


def test_a_copy_is_what_save_would_have_written(saved, tree, tmp_path):
    """Types, shardings, chunks, checksums and custom metadata are equal to the source's."""
    jaxckpt.convert(saved, tmp_path / "copy")

    report = jaxckpt.verify(tmp_path / "copy")
    assert (report.ok, report.unchecked) == (True, ()), report
    assert same(jaxckpt.restore(tmp_path / "copy"), tree)
    ours, theirs = files_of(saved / "state"), files_of(tmp_path / "copy" / "state")
    metadata = {name for name in ours if not name.startswith(("d/", names.OCDBT_MANIFEST))}
    assert {name: theirs[name] for name in metadata} == {name: ours[name] for name in metadata}
    copy = jaxckpt.open(tmp_path / "copy")
    assert copy.custom_metadata == {"of": "run"}
    assert copy.leaves == jaxckpt.open(saved).leaves


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=trees())
def test_any_tree_survives_a_copy(tree):
    """Any tree that can be saved is unchanged in the copy, with every byte checked."""
    with tempfile.TemporaryDirectory() as folder:
        jaxckpt.save(f"{folder}/saved", tree)
        jaxckpt.convert(f"{folder}/saved", f"{folder}/copy")

        report = jaxckpt.verify(f"{folder}/copy")
        assert (report.ok, report.unchecked) == (True, ())
        assert same(jaxckpt.restore(f"{folder}/copy"), tree)


def test_orbax_reads_a_copy(saved, tree, tmp_path):
    """By both of its generations, onto the devices that the source was on."""
    jaxckpt.convert(saved, tmp_path / "copy", only="params")

    v0 = ocp.PyTreeCheckpointer().restore(tmp_path / "copy" / "state")
    new = v1.load(tmp_path / "copy")
    for got in (v0, new):
        assert np.array_equal(got["params"]["w"], tree["params"]["w"])
        assert got["params"]["w"].sharding.spec == P("x", "y")


def test_a_copy_knows_where_it_came_from(saved, tmp_path, caplog):
    """The copy records the path and the token of the attempt that wrote it; so does the log."""
    with caplog.at_level(logging.INFO, "jaxckpt"):
        jaxckpt.convert(saved, tmp_path / "copy")

    (line,) = caplog.messages
    assert line.startswith(f"copied {saved}/state to {tmp_path}/copy: ")

    token = json.loads((saved / names.RECORD).read_bytes().split(b"\n")[0])["token"]
    lineage = jaxckpt.open(tmp_path / "copy").lineage
    assert lineage == {"by": "convert", "path": str(saved), "token": token}


def test_large_arrays_go_in_several_transactions(ram_path, make_mesh):
    """Chunks of every size: with inner chunks, at an edge, and more than a transaction holds."""
    rng = np.random.default_rng(0)
    tree = {
        "inner": sharded(rng.random((1024, 18, 1024), np.float32), make_mesh(x=2), P("x")),
        "small": [rng.random(7) for _ in range(5000)],
        "last": rng.random((100, 1000)),
    }
    jaxckpt.save(ram_path / "saved", tree)

    jaxckpt.convert(ram_path / "saved", ram_path / "copy")

    report = jaxckpt.verify(ram_path / "copy")
    assert (report.ok, report.unchecked) == (True, ())
    assert same(jaxckpt.restore(ram_path / "copy"), tree)
    sums = names.CHUNK_SUMS
    assert (ram_path / "copy" / "state" / sums).read_bytes() == (
        ram_path / "saved" / "state" / sums
    ).read_bytes()


# --- from others ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEW)
def test_a_sample_of_orbax_becomes_ours(golden: Golden, tmp_path, name):
    """Its values, kinds and containers stay, and gain checksums."""
    sample = golden(name)

    jaxckpt.convert(sample.path, tmp_path / "copy", item=sample.about.get("item"))

    report = jaxckpt.verify(tmp_path / "copy")
    assert (report.ok, report.unchecked) == (True, ()), report
    assert compare.problems(sample, jaxckpt.restore(tmp_path / "copy")) == []


@pytest.mark.slow
@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("name", SAMPLES)
def test_every_sample_of_orbax_becomes_any_layout(golden: Golden, tmp_path, name, ocdbt):
    """76 samples of eight releases and of Flax, in a database and in plain files."""
    sample = golden(name)

    jaxckpt.convert(sample.path, tmp_path / "copy", item=sample.about.get("item"), ocdbt=ocdbt)

    assert jaxckpt.verify(tmp_path / "copy").ok
    assert compare.problems(sample, jaxckpt.restore(tmp_path / "copy")) == []


def test_what_orbax_split_oddly_stays_so_where_it_can(tmp_path):
    """Chunks that stick out at the edges, small and in the middle of the database."""
    values = {"odd": np.arange(30_000).reshape(150, 200), "flat": np.arange(10.0)}
    ocp.PyTreeCheckpointer().save(
        tmp_path / "orbax",
        values,
        save_args={key: ocp.SaveArgs(chunk_byte_size=7000) for key in values},
    )
    jaxckpt.convert(tmp_path / "orbax", tmp_path / "copy")

    report = jaxckpt.verify(tmp_path / "copy")
    assert (report.ok, report.unchecked) == (True, ())
    assert same(jaxckpt.restore(tmp_path / "copy"), values)


def test_scalars_of_orbax_become_what_they_restore_to(tmp_path):
    """A Python number is stored as one, whatever its width was."""
    tree = {"a": np.float32(1.5), "b": np.int8(3), "c": 2, "d": True}
    ocp.PyTreeCheckpointer().save(tmp_path / "orbax", tree)

    jaxckpt.convert(tmp_path / "orbax", tmp_path / "copy")

    got = jaxckpt.restore(tmp_path / "copy")
    assert got == {"a": 1.5, "b": 3, "c": 2, "d": True}
    assert [type(value) for value in got.values()] == [float, int, int, bool]


def test_a_flax_file_becomes_a_checkpoint(tmp_path):
    """With its small values, which no array holds there."""
    state = {"w": np.arange(6.0).reshape(2, 3), "b": np.ones(2, ml_dtypes.bfloat16), "n": 3}
    state["none"] = np.zeros((0, 4), np.float32)
    (tmp_path / "checkpoint_5").write_bytes(serialization.msgpack_serialize(state))

    jaxckpt.convert(tmp_path, tmp_path / "copy")

    assert jaxckpt.open(tmp_path).leaves["none"].size_bytes == 0
    assert jaxckpt.verify(tmp_path / "copy").ok
    assert same(jaxckpt.restore(tmp_path / "copy"), state)


def test_a_flax_file_with_dtypes_that_zarr_lacks_becomes_a_checkpoint(tmp_path):
    """They are stored as bytes, as by a save, and also another dtype can be made of them."""
    state = {name: np.ones(3, dtype_of(name)) for name in sorted(AS_BYTES_DTYPES)}
    (tmp_path / "checkpoint_5").write_bytes(serialization.msgpack_serialize(state))

    jaxckpt.convert(tmp_path, tmp_path / "copy")
    jaxckpt.convert(tmp_path, tmp_path / "cast", only="float8_e4m3", dtype="float32")

    assert same(jaxckpt.restore(tmp_path / "copy"), state)
    assert same(jaxckpt.restore(tmp_path / "cast"), {"float8_e4m3": np.ones(3, np.float32)})
    with pytest.raises(UnsupportedLeaf, match="uint4: has dtype uint4"):
        jaxckpt.convert(tmp_path, tmp_path / "plain", ocdbt=False)


# --- a part, and another dtype -------------------------------------------------------------------


def test_weights_alone_are_copied_in_another_dtype(tmp_path, mesh):
    """Floating-point arrays are cast and nothing else; what is split stays so."""
    w = sharded(np.arange(64, dtype=np.float32).reshape(8, 8), mesh, P("x", "y"))
    params = {"dense": {"kernel": w, "count": jnp.arange(3)}, "rate": 0.1}
    state = TrainState.create(apply_fn=len, params=params, tx=optax.adam(1e-3))
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(9, state, metrics={"loss": 0.5}, items={"config": {"lr": 0.1}})

    jaxckpt.convert(tmp_path / "run", tmp_path / "weights", only="params", dtype=jnp.bfloat16)

    got = jaxckpt.restore(tmp_path / "weights")
    kernel = got["params"]["dense"]["kernel"]
    assert list(got) == ["params"]
    assert (kernel.dtype, kernel.sharding.spec) == (jnp.bfloat16, P("x", "y"))
    assert np.array_equal(kernel, w.astype(jnp.bfloat16))
    assert np.array_equal(got["params"]["dense"]["count"], np.arange(3))
    assert got["params"]["rate"] == 0.1
    assert jaxckpt.open(tmp_path / "weights").items == ("state",)


@pytest.mark.parametrize(
    "options",
    [
        {"only": "params"},
        {"skip": "opt"},
        {"only": ["tuple/0", "numbers/*"]},
        {"only": "opt/0/mu"},
        {"skip": ["tuple/1", "numbers/0", "text/~0"]},
        {"only": ["numbers/0", "numbers/1"]},
    ],
)
def test_a_part_is_copied_as_restore_gives_it(saved, tmp_path, options):
    """Containers that lack a child become dicts in either."""
    jaxckpt.convert(saved, tmp_path / "copy", **options)

    assert jaxckpt.verify(tmp_path / "copy").ok
    assert same(jaxckpt.restore(tmp_path / "copy"), jaxckpt.restore(saved, **options))


@pytest.mark.parametrize("options", [{"only": "0"}, {"skip": ["0/*"]}, {"only": ["1", "0/0"]}])
def test_a_part_of_a_list_of_orbax_is_copied_as_restore_gives_it(tmp_path, options):
    """Only the key types distinguish lists from dicts."""
    ocp.PyTreeCheckpointer().save(tmp_path / "orbax", [[np.arange(2), 1], np.arange(3)])

    jaxckpt.convert(tmp_path / "orbax", tmp_path / "copy", **options)

    assert same(jaxckpt.restore(tmp_path / "copy"), jaxckpt.restore(tmp_path / "orbax", **options))


@pytest.mark.parametrize("name", ["float8_e4m3", "float8_e5m2", "float6_e2m3fn", "float64"])
def test_a_cast_is_that_of_numpy(tmp_path, name):
    """Also to and from dtypes that zarr lacks, which are stored as bytes."""
    values = np.linspace(-4, 4, 50, dtype=np.float32)
    jaxckpt.save(tmp_path / "saved", {"w": values})

    jaxckpt.convert(tmp_path / "saved", tmp_path / "there", dtype=name)
    jaxckpt.convert(tmp_path / "there", tmp_path / "back", dtype="float32")

    wanted = values.astype(dtype_of(name))
    assert same(jaxckpt.restore(tmp_path / "there"), {"w": wanted})
    assert same(jaxckpt.restore(tmp_path / "back"), {"w": wanted.astype(np.float32)})


# --- plain files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(AS_BYTES_DTYPES))
def test_dtypes_that_zarr_lacks_are_refused_for_plain_files(tmp_path, name):
    """They would come back as other numbers: the bytes that they are."""
    jaxckpt.save(tmp_path / "saved", {"good": np.ones(2), "bad": np.ones(2, dtype_of(name))})

    with pytest.raises(UnsupportedLeaf, match=f"bad: has dtype {name}") as caught:
        jaxckpt.convert(tmp_path / "saved", tmp_path / "plain", ocdbt=False)

    assert "good" not in str(caught.value)
    assert os.listdir(tmp_path) == ["saved"]


def test_plain_files_are_read_by_both(saved, tree, tmp_path):
    """jaxckpt restores the types that were saved, and `verify` checks every file."""
    plain = tmp_path / "plain"
    jaxckpt.convert(saved, plain, ocdbt=False)

    assert same(jaxckpt.restore(plain), jaxckpt.restore(saved))
    report = jaxckpt.verify(plain)
    assert (report.ok, report.unchecked) == (True, ()), report
    theirs = ocp.PyTreeCheckpointer().restore(plain / "state")
    assert np.array_equal(theirs["params"]["w"], tree["params"]["w"])
    assert theirs["text"]["plain"] == "a"
    assert {names.OCDBT_MANIFEST, names.OCDBT_DATA}.isdisjoint(os.listdir(plain / "state"))
    metadata = json.loads((plain / "state" / names.TREE_METADATA).read_bytes())
    assert (metadata["use_zarr3"], metadata["use_ocdbt"]) == (True, False)
    assert (plain / "state/params.w" / names.ZARR3).is_file()


@pytest.mark.parametrize("kind", ["bytes", "complex", "key", "list", 3])
def test_a_kind_that_does_not_fit_the_array_is_refused(tmp_path, kind):
    """The kinds of plain files are recorded beside the leaves, and are as untrusted as these."""
    jaxckpt.save(tmp_path / "saved", {"w": np.float32(1)})
    jaxckpt.convert(tmp_path / "saved", tmp_path / "plain", ocdbt=False)
    file = tmp_path / "plain" / "state" / names.TREE_METADATA
    metadata = json.loads(file.read_bytes())
    assert metadata["jaxckpt"]["kinds"] == {"w": "generic"}
    metadata["jaxckpt"]["kinds"]["w"] = kind
    shutil.copytree(file.parent, tmp_path / "item")
    (tmp_path / "item" / names.TREE_METADATA).write_text(json.dumps(metadata))

    with pytest.raises(CorruptCheckpoint, match=names.TREE_METADATA):
        jaxckpt.restore(tmp_path / "item")


@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize(
    "tree",
    [np.arange(6.0).reshape(2, 3), 7, None, "text", b"\0x", np.float32(2.5), np.array(1), 2j],
)
def test_a_tree_that_is_one_leaf_has_every_layout(tmp_path, tree, ocdbt):
    """Its array has no name, and may have no dimensions, or there is none."""
    jaxckpt.save(tmp_path / "saved", tree)
    jaxckpt.convert(tmp_path / "saved", tmp_path / "copy", ocdbt=ocdbt)

    assert same(jaxckpt.restore(tmp_path / "copy"), tree)
    assert jaxckpt.verify(tmp_path / "copy").ok


def test_plain_files_come_back(saved, tree, tmp_path):
    """Their copy is a database with checksums again."""
    jaxckpt.convert(saved, tmp_path / "plain", ocdbt=False, only=["params", "opt", "key"])
    jaxckpt.convert(tmp_path / "plain", tmp_path / "new")

    report = jaxckpt.verify(tmp_path / "new")
    assert (report.ok, report.unchecked) == (True, ())
    got = jaxckpt.restore(tmp_path / "new")
    assert same(got, {part: tree[part] for part in ("params", "opt", "key")})


@pytest.mark.parametrize("zarr3", [True, False])
@pytest.mark.parametrize("ocdbt", [True, False])
def test_each_layout_of_orbax_becomes_ours(tmp_path, mesh, zarr3, ocdbt):
    """zarr 2 and 3, in a database and in plain files: the copy has checksums."""
    tree = {"w": sharded(np.arange(64.0).reshape(8, 8), mesh, P("x", "y")), "n": [jnp.ones(3), 7]}
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=zarr3, use_ocdbt=ocdbt)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "orbax", tree)

    jaxckpt.convert(tmp_path / "orbax", tmp_path / "copy")

    report = jaxckpt.verify(tmp_path / "copy")
    assert (report.ok, report.unchecked) == (True, ())
    assert same(jaxckpt.restore(tmp_path / "copy"), tree)


@pytest.mark.parametrize("damage", ["gone", "shorter", "other"])
def test_damage_of_plain_files_is_found(tmp_path, damage):
    """By the record, which has the size and the digest of every file."""
    jaxckpt.save(tmp_path / "saved", {"w": np.arange(5000.0)})
    jaxckpt.convert(tmp_path / "saved", tmp_path / "old", ocdbt=False)
    files = [file for file in (tmp_path / "old" / "state" / "w").rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    data = largest.read_bytes()
    largest.unlink()
    if damage != "gone":
        largest.write_bytes(data[:-1] if damage == "shorter" else data[:-1] + bytes([data[-1] ^ 1]))

    report = jaxckpt.verify(tmp_path / "old")
    assert [problem for problem in report.problems if problem.file == str(largest)], report
    with pytest.raises(CorruptCheckpoint):
        jaxckpt.restore(tmp_path / "old")


@pytest.mark.parametrize(
    ("file", "written", "other"),
    [
        ("w/zarr.json", b'"shape":[96,4]', b'"shape":[16,4]'),
        ("array_metadatas/process_0", b'"random_key_impl"', b'"sandom_key_impl"'),
        ("array_metadatas/process_0", b"", None),
    ],
)
def test_damaged_metadata_of_plain_arrays_does_not_change_them(tmp_path, file, written, other):
    """What is read after a flipped bit would be another shape, or the data of a key."""
    jaxckpt.save(tmp_path / "saved", {"w": np.ones((96, 4)), "key": jax.random.key(7)})
    jaxckpt.convert(tmp_path / "saved", tmp_path / "plain", ocdbt=False)
    damaged = tmp_path / "plain" / "state" / file
    data = damaged.read_bytes()
    assert written in data
    damaged.unlink()
    if other is not None:
        damaged.write_bytes(data.replace(written, other))

    for like in (None, jaxckpt.restore(tmp_path / "saved")):
        with pytest.raises(CorruptCheckpoint) as caught:
            jaxckpt.restore(tmp_path / "plain", like)
        assert caught.value.file == str(damaged)
    with pytest.raises(CorruptCheckpoint):
        jaxckpt.convert(tmp_path / "plain", tmp_path / "copy")


def test_a_file_without_a_digest_is_not_called_checked(tmp_path):
    """Where one is too large to be read as a whole, say."""
    jaxckpt.save(tmp_path / "saved", {"w": np.arange(5.0)})
    jaxckpt.convert(tmp_path / "saved", tmp_path / "old", ocdbt=False)
    file = tmp_path / "old" / names.RECORD
    record = step.decode_record(file.read_bytes(), file="")
    facts = {name: replace(fact, sha256=None) for name, fact in record.files.items()}
    file.write_bytes(step.encode_record(replace(record, files=facts)))

    report = jaxckpt.verify(tmp_path / "old")
    assert report.ok
    assert any("no recorded checksums" in what for what in report.unchecked)


def test_names_that_are_no_directories_are_refused_for_plain_files(tmp_path):
    """The error names them, and nothing is written."""
    tree = {name: np.ones(2) for name in ("d", "a/b", "a\\b", "..", names.NUMPY_KEY_ITEM, "fine")}
    jaxckpt.save(tmp_path / "saved", tree)

    with pytest.raises(UnsupportedLeaf, match="5 leaves") as caught:
        jaxckpt.convert(tmp_path / "saved", tmp_path / "plain", ocdbt=False)
    assert "a~1b" in str(caught.value)
    assert os.listdir(tmp_path) == ["saved"]

    jaxckpt.convert(tmp_path / "saved", tmp_path / "plain", ocdbt=False, only="fine")
    assert same(jaxckpt.restore(tmp_path / "plain"), {"fine": np.ones(2)})


# --- what is refused -----------------------------------------------------------------------------


def test_a_copy_replaces_nothing_unasked(saved, tmp_path):
    """With overwrite=True it does, also its own source."""
    with pytest.raises(StepExists):
        jaxckpt.convert(saved, saved, only="params")
    jaxckpt.convert(saved, saved, only="params", overwrite=True)

    assert list(jaxckpt.restore(saved)) == ["params"]
    assert os.listdir(tmp_path) == ["saved"]


def test_a_damaged_source_makes_no_copy(saved, tmp_path):
    """The leaf is named, and nothing is left."""
    file = max((saved / "state" / "d").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    for i in range(0, len(data), 50):
        data[i] ^= 0xFF
    file.write_bytes(data)

    with pytest.raises(CorruptCheckpoint, match=str(saved)):
        jaxckpt.convert(saved, tmp_path / "copy")
    assert os.listdir(tmp_path) == ["saved"]


def test_wrong_arguments_are_told_before_anything_is_made(saved, tmp_path):
    """As the built-ins that they are."""
    for wrong, options in [
        ("not a floating-point dtype", {"dtype": "int32"}),
        ("not a floating-point dtype", {"dtype": "float7"}),
        ("matches no leaf", {"only": "missing"}),
        ("matches no leaf", {"skip": "missing"}),
        ("leave no leaf", {"only": "params", "skip": "params"}),
    ]:
        with pytest.raises(ValueError, match=wrong):
            jaxckpt.convert(saved, tmp_path / "copy", **options)
    with pytest.raises(CheckpointNotFound):
        jaxckpt.convert(tmp_path / "missing", tmp_path / "copy")
    with pytest.raises(ValueError, match="this name is reserved"):
        jaxckpt.convert(saved, tmp_path / "copy.orbax-checkpoint-tmp")
    with pytest.raises(TypeError, match="ocdbt must be True, False or None, got 'no'"):
        jaxckpt.convert(saved, tmp_path / "copy", ocdbt="no")
    assert os.listdir(tmp_path) == ["saved"]


@pytest.mark.parametrize("damaged", ["_METADATA", "d"])
@pytest.mark.parametrize("verb", ["convert", "export_safetensors"])
def test_the_step_before_a_damaged_one_is_copied(tmp_path, caplog, verb, damaged):
    """Of a run, as `restore` and `fork` do; the path of the step itself raises."""
    with CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": np.full(1000, step, np.float32)}, force=True)
    target = tmp_path / "run" / "3" / "state" / damaged
    if target.is_dir():
        target = max(target.iterdir(), key=lambda file: file.stat().st_size)
    data = target.read_bytes()
    target.write_bytes(bytes(byte ^ 0xFF for byte in data))
    copy = tmp_path / "copy.safetensors"

    with pytest.raises(CorruptCheckpoint, match=str(tmp_path / "run" / "3")):
        getattr(jaxckpt, verb)(tmp_path / "run" / "3", copy)
    getattr(jaxckpt, verb)(tmp_path / "run", copy)

    assert jaxckpt.restore(copy, as_numpy=True)["w"][0] == 2
    assert "took 2. Skipped: 3: " in caplog.text
    target.write_bytes(data)


@pytest.mark.parametrize("verb", ["convert", "import_safetensors"])
def test_a_pinned_step_is_not_replaced(tmp_path, verb):
    """Its pin was lost, and the next deletion took the copy."""
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"w": np.ones(2)}).result()
        manager.pin(1)
    jaxckpt.save(tmp_path / "other", {"w": np.zeros(2)})
    source = tmp_path / "other"
    if verb == "import_safetensors":
        source = jaxckpt.export_safetensors(source, tmp_path / "m.safetensors")

    with pytest.raises(ValueError, match="1 is pinned"):
        getattr(jaxckpt, verb)(source, tmp_path / "run" / "1", overwrite=True)

    assert jaxckpt.restore(tmp_path / "run" / "1")["w"][0] == 1
    assert (tmp_path / "run" / "1" / names.PINNED).exists()


@pytest.mark.parametrize("verb", ["convert", "export_safetensors", "import_safetensors"])
def test_a_text_is_no_consent_to_replace(tmp_path, verb):
    """As a config or argparse gives it: "False" is true for Python."""
    jaxckpt.save(tmp_path / "saved", {"w": np.ones(2)})
    model = jaxckpt.export_safetensors(tmp_path / "saved", tmp_path / "model.safetensors")
    there = model if verb == "export_safetensors" else tmp_path / "there"
    if there is not model:
        jaxckpt.save(there, {"w": 1})
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    source = model if verb == "import_safetensors" else tmp_path / "saved"

    with pytest.raises((TypeError, ValueError), match=r"overwrite must be .*got 'False'"):
        getattr(jaxckpt, verb)(source, there, overwrite="False")

    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_a_json_item_is_no_tree(tmp_path):
    """It is named."""
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"w": np.ones(2)}, items={"config": {"lr": 0.1}})

    with pytest.raises(UnsupportedFormat, match="config"):
        jaxckpt.convert(tmp_path / "run" / "1", tmp_path / "copy", item="config")


def test_a_tree_that_is_nested_too_deep_is_refused(tmp_path):
    """As it is by `save`."""
    tree = np.ones(2)
    for _ in range(120):
        tree = {"a": tree}
    ocp.PyTreeCheckpointer().save(tmp_path / "orbax", {"deep": tree, "fine": np.ones(2)})

    with pytest.raises(UnsupportedLeaf, match="nested deeper"):
        jaxckpt.convert(tmp_path / "orbax", tmp_path / "copy")
    jaxckpt.convert(tmp_path / "orbax", tmp_path / "copy", only="fine")

    assert same(jaxckpt.restore(tmp_path / "copy"), {"fine": np.ones(2)})


def test_a_placeholder_of_orbax_cannot_be_copied(tmp_path):
    """A placeholder has no value; without it the rest can be copied."""
    ocp.PyTreeCheckpointer().save(tmp_path / "orbax", {"w": np.ones(2), "gone": ...})

    with pytest.raises(UnsupportedLeaf, match="gone"):
        jaxckpt.convert(tmp_path / "orbax", tmp_path / "copy")
    jaxckpt.convert(tmp_path / "orbax", tmp_path / "copy", skip="gone")

    assert same(jaxckpt.restore(tmp_path / "copy"), {"w": np.ones(2)})


# --- crashes -------------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("torn", [False, True])
def test_a_crash_leaves_all_or_nothing(ram_path, ocdbt, torn):
    """After any number of steps: the next copy succeeds, and leaves nothing else behind."""
    jaxckpt.save(ram_path / "saved", {"w": np.arange(1000.0), "n": 1})
    target = ram_path / "to" / "copy"

    def copy(storage, *, overwrite=False):
        source = of_checkpoint(
            ram_path / "saved", item=None, only=None, skip=None, dtype=None, by="convert"
        )
        write_checkpoint(storage, str(target), source, ocdbt=ocdbt, overwrite=overwrite)

    after, crashed = 0, True
    while crashed:
        storage = CrashingStorage(LocalStorage(), after, torn=torn)
        try:
            copy(storage)
            crashed = False
        except SimulatedCrash:
            pass
        if target.exists():
            assert jaxckpt.verify(target).ok
        copy(LocalStorage(), overwrite=target.exists())
        assert os.listdir(target.parent) == ["copy"]
        assert jaxckpt.restore(target)["n"] == 1
        LocalStorage().delete(str(target))
        after += 1
    assert after >= 15


def test_a_source_that_is_replaced_meanwhile_makes_no_copy(tmp_path):
    """Rather than a copy of parts of both."""
    jaxckpt.save(tmp_path / "saved", {"w": np.ones(3)})
    source = of_checkpoint(
        tmp_path / "saved", item=None, only=None, skip=None, dtype=None, by="convert"
    )
    jaxckpt.save(tmp_path / "saved", {"w": np.zeros(3)}, overwrite=True)

    with pytest.raises((CheckpointNotFound, CorruptCheckpoint, SaveFailed)):
        write_checkpoint(LocalStorage(), str(tmp_path / "copy"), source, overwrite=False)
    assert os.listdir(tmp_path) == ["saved"]


@pytest.mark.parametrize("verb", [jaxckpt.convert, jaxckpt.export_safetensors])
def test_a_run_is_copied_though_its_job_deletes_the_step_just_opened(tmp_path, verb):
    """Before the shardings of that step are read: the newer step is copied."""
    run, saved = tmp_path / "run", []

    def before(verb, path):
        if verb == "read" and path.endswith("/_sharding") and not saved:
            saved.append(manager.save(2, {"w": np.full(3, 2.0), "n": jnp.ones(3)}).result())
            manager.wait_until_finished()

    with CheckpointManager(run, keep=KeepPolicy(last=1)) as manager:
        manager.save(1, {"w": np.full(3, 1.0), "n": jnp.ones(3)}).result()
        verb(
            PathIn(WatchedStorage(LocalStorage(), before), str(run)), tmp_path / "copy.safetensors"
        )

    assert saved
    assert jaxckpt.restore(tmp_path / "copy.safetensors")["w"][0] == 2


# --- memory, devices, jax ------------------------------------------------------------------------


def test_neither_jax_nor_much_memory_is_used(ram_path):
    """512 MiB in one array go through far less, in any direction."""
    command = [sys.executable, "-m", "tests.workers.stream_arrays", ram_path]

    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)

    told = json.loads(done.stdout)
    assert told["jax"] is False
    assert told["array_bytes"] == 512 << 20
    assert told["peak_bytes"] < 360 << 20
    assert told["good"]


# --- containers ----------------------------------------------------------------------------------


def leaf(path, *key_types):
    return Leaf(path=tuple(path), key_types=key_types or (NAMED,) * len(path), kind="numpy")


@pytest.mark.parametrize(
    ("leaves", "problem"),
    [
        ([leaf("a"), leaf("ab")], "lies below"),
        ([leaf("ab"), leaf("a")], "lies above"),
        ([leaf("a"), leaf("b", SEQUENCE)], "a list for one leaf"),
        ([leaf(""), leaf("a")], "lies above"),
    ],
)
def test_leaves_that_are_of_no_tree_are_refused(leaves, problem):
    """As they are by `restore`."""
    with pytest.raises(CorruptCheckpoint, match=problem):
        _in_order(leaves, plain_root({leaf.path: leaf.key_types for leaf in leaves}), "here")


# --- how arrays are cut --------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_chunks_of_a_copy_never_share_a_unit_of_the_source(data):
    """So that each stored byte is read once; and they are neither too large nor too many."""
    rank = data.draw(st.integers(0, 3))
    shape = tuple(data.draw(st.integers(0, 1 << 14)) for _ in range(rank))
    inner = tuple(data.draw(st.integers(1, 1 << 12)) for _ in range(rank))
    chunk = tuple(n * data.draw(st.integers(1, 8)) for n in inner)
    stored = StoredArray(
        shape=shape,
        dtype="float32",
        chunk_shape=chunk,
        inner_shape=data.draw(st.sampled_from([inner, None])),
    )

    made = chunked(stored, inner=True)

    for n, unit, new in zip(shape, stored.unit_shape, made.chunk_shape, strict=True):
        unit = max(1, min(unit, n))
        assert unit == n or n <= new or new % unit == 0 or unit % new == 0
    if made.inner_shape is not None:
        for n, new, part in zip(shape, made.chunk_shape, made.inner_shape, strict=True):
            assert n % new == 0
            assert new % part == 0


def test_a_source_that_was_replaced_is_not_called_damaged(tmp_path):
    """If the source is overwritten meanwhile, the copy fails and does not suggest an older step."""
    jaxckpt.save(tmp_path / "saved", {"w": np.ones(3)})
    only_metadata = {"item": None, "only": None, "skip": None, "dtype": None, "by": "convert"}
    source = of_checkpoint(tmp_path / "saved", **only_metadata)
    jaxckpt.save(tmp_path / "saved", {"w": np.zeros(3)}, overwrite=True)

    with pytest.raises(CheckpointNotFound, match="was replaced, changed or deleted"):
        write_checkpoint(LocalStorage(), str(tmp_path / "copy"), source, overwrite=False)

    assert os.listdir(tmp_path) == ["saved"]


def test_a_large_chunk_of_tiny_units_becomes_few():
    """To read one of them takes a look at all, so a chunk of the copy has as many as fit."""
    stored = StoredArray(
        shape=(12289, 12281), dtype="float32", chunk_shape=(12289, 12281), inner_shape=(12289, 1)
    )

    made = chunked(stored, inner=True)

    assert made.chunk_shape == (12289, (32 << 20) // (12289 * 4))


@given(
    shape=st.lists(st.integers(1, 1 << 20), min_size=1, max_size=3).map(tuple),
    itemsize=st.sampled_from([1, 2, 4, 8]),
)
def test_a_run_is_one_piece_of_memory(shape, itemsize):
    """All dimensions before the one that is cut are of size 1, all after it are whole."""
    piece = run_shape(shape, itemsize)

    cut = next((i for i, (n, p) in enumerate(zip(shape, piece, strict=True)) if p > 1), len(shape))
    assert piece[cut + 1 :] == shape[cut + 1 :]
    assert np.prod(piece, dtype=float) * itemsize <= 32 << 20


def test_a_tile_is_widened_from_the_last_dimension():
    """By whole tiles, and no other dimension before the last one is whole."""
    assert enlarged((1, 4), (100, 10), 1, 40) == (3, 12)
    assert enlarged((1, 4), (100, 10), 1, 5) == (1, 4)
    assert enlarged((), (), 4, 1) == ()
