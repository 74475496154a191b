"""Every damaged byte is found: `verify` names it, and `restore` never returns wrong values."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._disk import chunks as _chunks
from jaxckpt._disk import reader as _reader
from jaxckpt._inspect import verify as _verify
from jaxckpt.errors import CheckpointError, CheckpointNotFound, CorruptCheckpoint
from jaxckpt.format import names
from jaxckpt.format.step import decode_record, encode_record
from jaxckpt.storage import _arrays
from tests.strategies import same
from tests.twins import watched


def sample_tree():
    """Arrays of every layout: in a node, one value, an array of one chunk, and of inner chunks."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    rng = np.random.default_rng(0)
    return {
        "tiny": np.float32(1.5),
        "small": rng.normal(size=(64, 8)).astype(np.float32),
        "value": rng.normal(size=(40_000,)).astype(np.float32),
        "array": rng.normal(size=(300_000,)).astype(np.float32),
        "packed": jnp.arange(4000).astype(jnp.int4),
        "sharded": jax.device_put(
            rng.normal(size=(64, 4096)).astype(np.float32), NamedSharding(mesh, P("x", "y"))
        ),
        "nested": {"key": jax.random.key(5), "text": "t", "none": None},
    }


@pytest.fixture(scope="module")
def tree():
    return sample_tree()


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tree):
    """A checkpoint of `tree`; not to be changed."""
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    jaxckpt.save(path, tree, custom_metadata={"a": 1})
    return path


@pytest.fixture
def damaged(saved, tmp_path):
    """A copy of it, to be changed."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


def files_of(path):
    return sorted(p for p in path.rglob("*") if p.is_file())


@pytest.mark.parametrize(
    "file", ["state/_METADATA", "state/manifest.ocdbt", names.RECORD, names.CHECKPOINT_METADATA]
)
def test_of_a_run_it_reads_the_newest_step_damaged_or_not(tmp_path, file):
    """An earlier one does not stand in for it, as in a restore; a save under way is passed over."""
    root = tmp_path / "run"
    with jaxckpt.CheckpointManager(root) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": np.full(9, step)})
    (root / "3" / names.COMMIT_MARKER).unlink()
    good = jaxckpt.verify(root)
    data = bytearray((root / "2" / file).read_bytes())
    data[len(data) // 2] ^= 4
    (root / "2" / file).write_bytes(data)

    report = jaxckpt.verify(root)

    assert (good.path, good.ok) == (str(root / "2"), True)
    assert (report.path, report.damaged) == (str(root / "2"), True)


def data_files(path):
    return sorted((path / "state" / names.OCDBT_DATA).iterdir())


def flip(file, offset, mask=0x10):
    with file.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ mask]))


def outcome(path):
    try:
        return jaxckpt.restore(path)
    except CheckpointError as error:
        return error


def test_a_good_checkpoint_is_good(saved, tree):
    """No problems, nothing unchecked, everything counted."""
    report = jaxckpt.verify(saved)

    assert report.ok
    assert report.problems == report.unchecked == ()
    assert report.leaves == 9
    assert report.files == len(files_of(saved)) - 2  # the record and the marker
    assert report.size_bytes >= sum(
        x.nbytes for x in jax.tree.leaves(tree) if hasattr(x, "nbytes") and x.dtype == np.float32
    )
    assert ": good. Read " in str(report) == repr(report)
    assert same(jaxckpt.restore(saved), tree)


def test_a_file_that_is_missing_is_one_problem(tmp_path):
    """Though the record and the item both lack it."""
    jaxckpt.save(tmp_path / "a", {"w": 1.0})
    (tmp_path / "a" / "state" / "_METADATA").unlink()

    (problem,) = jaxckpt.verify(tmp_path / "a").problems

    assert problem.file == str(tmp_path / "a" / "state" / "_METADATA")
    assert problem.message.startswith(f"{problem.file} is missing")


@pytest.mark.parametrize(
    "name",
    [
        names.CHECKPOINT_METADATA,
        names.RECORD,
        f"state/{names.TREE_METADATA}",
        f"state/{names.SHARDING}",
        f"state/{names.STRINGS}",
        f"state/{names.OCDBT_MANIFEST}",
        f"state/{names.ARRAY_METADATAS}/process_0",
    ],
)
def test_a_flip_in_any_metadata_file_is_found(saved, tmp_path, name):
    """`verify` names the file; `restore` refuses it, unless the record repeats the file."""
    size = (saved / name).stat().st_size
    for i, offset in enumerate([0, size // 3, size // 2, size - 2]):
        path = Path(shutil.copytree(saved, tmp_path / f"{i}"))
        flip(path / name, offset)

        report = jaxckpt.verify(path)
        got = outcome(path)

        assert not report.ok
        assert any(p.file == str(path / name) for p in report.problems), report
        # The last file is Orbax's; we have its facts in _METADATA.
        if name != names.CHECKPOINT_METADATA and not name.endswith("process_0"):
            assert isinstance(got, CorruptCheckpoint)
            assert Path(name).name in str(got)


def test_flips_anywhere_are_found(saved, tmp_path, tree):
    """Of 100 flips over all files, `verify` misses none, and none changes a restored value."""
    rng = random.Random(0)
    files = [f.relative_to(saved) for f in files_of(saved) if f.stat().st_size]
    weights = [1 + (saved / f).stat().st_size // 4096 for f in files]
    path = Path(shutil.copytree(saved, tmp_path / "x"))
    for file in [*files, *rng.choices(files, weights, k=100 - len(files))]:
        offset, mask = rng.randrange((saved / file).stat().st_size), 1 << rng.randrange(8)
        flip(path / file, offset, mask)

        report = jaxckpt.verify(path)
        got = outcome(path)

        where = f"{file} at {offset} ^ {mask}"
        harmless = file.name == names.COMMIT_MARKER or (
            file.name == names.RECORD and offset == (saved / file).stat().st_size - 1
        )
        assert harmless or not report.ok, where
        assert isinstance(got, CorruptCheckpoint) or same(got, tree), where
        if file.parent.name == names.OCDBT_DATA:
            assert any(p.file and p.file.endswith(file.name) for p in report.problems), (
                where,
                report,
            )
            assert isinstance(got, CorruptCheckpoint), where
        flip(path / file, offset, mask)
    assert jaxckpt.verify(path).ok


@pytest.mark.slow
def test_every_byte_of_a_small_checkpoint_is_guarded(tmp_path):
    """A flip of any one byte, in turn, is found."""
    path = tmp_path / "x"
    tree = {"a": np.arange(500), "b": {"c": np.float32(1), "d": "text"}, "e": jax.random.key(0)}
    jaxckpt.save(path, tree)
    for file in files_of(path):
        if file.name == names.COMMIT_MARKER:
            continue
        for offset in range(file.stat().st_size - (file.name == names.RECORD)):
            flip(file, offset)

            assert not jaxckpt.verify(path).ok, (file.name, offset)
            got = outcome(path)
            assert isinstance(got, CorruptCheckpoint) or same(got, tree), (file.name, offset)

            flip(file, offset)


def test_the_leaf_and_the_file_are_named(saved, damaged):
    """A flip inside the values of one leaf: its name, its data file, and the other leaves read."""
    needle = np.asarray(sample_tree()["value"]).tobytes()[1000:1100]
    file = next(f for f in data_files(damaged) if needle in f.read_bytes())
    flip(file, file.read_bytes().index(needle))

    report = jaxckpt.verify(damaged)
    with pytest.raises(CorruptCheckpoint) as caught:
        jaxckpt.restore(damaged)

    assert [p.leaf for p in report.problems] == ["value"]
    assert report.problems[0].file == str(file)
    assert caught.value.leaf == "value"
    assert caught.value.file == str(file)
    assert "value" in str(caught.value)
    assert str(file) in str(caught.value)
    assert same(jaxckpt.restore(damaged, skip="value")["small"], sample_tree()["small"])


def test_damage_of_an_index_is_told_as_damage(tmp_path):
    """Not as a failed read; the path is in the message once."""
    jaxckpt.save(tmp_path / "a", {"w": np.ones(9, np.float32)})
    file = min(data_files(tmp_path / "a"), key=lambda file: file.stat().st_size)
    flip(file, 100)

    (problem,) = jaxckpt.verify(tmp_path / "a").problems

    assert problem.message.startswith(f"{file}: is damaged: the index node at byte 0: checksum")
    assert problem.message.count(str(file)) == 1


def test_every_bad_leaf_is_named_not_only_the_first(saved, damaged):
    """Damage to several leaves, of several layouts, is all reported in one go."""
    tree = sample_tree()
    bad = {"array", "value", "sharded"}
    for leaf in bad:
        part = np.asarray(
            tree[leaf].addressable_shards[3].data if leaf == "sharded" else tree[leaf]
        )
        needle = part.tobytes()[2000:2100]
        file = next(f for f in data_files(damaged) if needle in f.read_bytes())
        flip(file, file.read_bytes().index(needle))

    report = jaxckpt.verify(damaged)

    assert {p.leaf for p in report.problems} == bad


@pytest.mark.parametrize("how", ["truncated", "emptied", "missing", "longer", "swapped"])
def test_a_data_file_of_the_wrong_size_is_named(saved, damaged, how):
    """`verify` names the file, `restore` gives no values for what was in it."""
    jaxckpt.save(damaged.parent / "other", {"x": np.ones(10_000)})
    file = max(data_files(damaged), key=lambda f: f.stat().st_size)
    match how:
        case "truncated":
            os.truncate(file, file.stat().st_size - 100)
        case "emptied":
            os.truncate(file, 0)
        case "missing":
            file.unlink()
        case "longer":
            file.write_bytes(file.read_bytes() + b"x")
        case "swapped":
            shutil.copy(
                max(data_files(damaged.parent / "other"), key=lambda f: f.stat().st_size), file
            )

    report = jaxckpt.verify(damaged)
    got = outcome(damaged)

    assert not report.ok
    assert str(file) in [p.file for p in report.problems]
    assert isinstance(got, CorruptCheckpoint) or how == "longer"
    if isinstance(got, CorruptCheckpoint):
        assert got.file == str(file)


def test_a_file_too_many_is_mentioned(damaged):
    """An unlisted file does no harm, and is reported."""
    (damaged / "state" / "stray").write_text("x")

    report = jaxckpt.verify(damaged)

    assert report.ok
    assert any("stray" in what for what in report.unchecked)


def test_two_checkpoints_mixed_are_found(saved, damaged, tree):
    """Metadata of one save beside the data of another."""
    other = damaged.parent / "other"
    jaxckpt.save(other, jax.tree.map(lambda x: x, tree))
    for name in (f"state/{names.OCDBT_MANIFEST}", f"state/{names.TREE_METADATA}"):
        shutil.copy(other / name, damaged / name)

    assert not jaxckpt.verify(damaged).ok
    assert isinstance(outcome(damaged), CorruptCheckpoint)


def test_metadata_that_contradicts_the_arrays_is_found(saved, damaged):
    """The tree says another dtype than the array, in a file whose digest fits."""
    from tests.test_bad_input import rewrite_record

    file = damaged / "state" / names.TREE_METADATA
    file.write_text(file.read_text().replace('"float32"', '"int32"', 1))
    rewrite_record(damaged)

    assert not jaxckpt.verify(damaged).ok


def test_verify_of_a_run_and_of_an_item(saved, tmp_path):
    """A run's root is its newest good step, an item the part of its checkpoint."""
    shutil.copytree(saved, tmp_path / "5")

    assert jaxckpt.verify(tmp_path).path == str(tmp_path / "5")
    assert jaxckpt.verify(tmp_path / "5" / "state").ok
    with pytest.raises(CheckpointNotFound):
        jaxckpt.verify(tmp_path / "6")


@pytest.mark.parametrize("name", ["state", "state/d", "state/array_metadatas", "metrics/metrics"])
def test_a_link_inside_is_found_and_not_followed(tmp_path, name):
    """Not even if what it leads to is what was written."""
    with jaxckpt.CheckpointManager(tmp_path / "run") as manager:
        tree = {"a": np.arange(9), "key": jax.random.key(0)}
        manager.save(1, tree, items={"other": {"b": 1}}, metrics={"loss": 1.0})
    place = tmp_path / "run" / "1" / name
    shutil.move(place, tmp_path / "outside")
    place.symlink_to(tmp_path / "outside")

    report = jaxckpt.verify(tmp_path / "run" / "1")

    assert not report.ok
    assert any(problem.file.startswith(f"{place}") for problem in report.problems)
    with pytest.raises(CorruptCheckpoint, match=f"{place}"):
        jaxckpt.restore(tmp_path / "run" / "1", item=name.partition("/")[0])


def test_a_root_is_its_newest_step_whose_files_have_their_sizes(tmp_path, caplog):
    """As for a manager, a truncated step is skipped and reported once."""
    for number in (1, 2):
        jaxckpt.save(tmp_path / "run" / str(number), {"n": number, "w": np.arange(1000)})
    [data] = (tmp_path / "run" / "2" / "state" / "d").iterdir()
    os.truncate(data, data.stat().st_size - 5)

    assert jaxckpt.restore(tmp_path / "run")["n"] == 1
    assert jaxckpt.open(tmp_path / "run").path == str(tmp_path / "run" / "1")
    assert f"{data} has " in caplog.text
    with pytest.raises(CorruptCheckpoint):
        jaxckpt.restore(tmp_path / "run" / "2")


def test_an_error_lets_go_of_what_was_read(damaged):
    """A job that looks again and again at a bad checkpoint takes no more memory each time."""
    flip(damaged / "state" / "_METADATA", 5)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with contextlib.suppress(CorruptCheckpoint):
                jaxckpt.open(damaged)
        errors = [one for one in gc.get_objects() if issubclass(type(one), CorruptCheckpoint)]
        left = [one for one in errors if str(damaged) in str(one)]  # others are of other tests
    finally:
        gc.enable()

    assert left == []


def test_an_array_of_others_with_many_chunks_is_read_in_turns(tmp_path, limits):
    """All of it, and what is bad is named once."""
    # So that small arrays go in turns: at the real limits it takes 4,096 chunks for each turn.
    limits(_verify, CHUNKS_AT_ONCE=4)
    limits(_reader, _READS_AT_ONCE=3)
    for name in ("a", "b"):
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{tmp_path}/c/{name}/"},
            "metadata": {"shape": [50, 2], "chunks": [3, 1], "dtype": "<f4"},
        }
        ts.open(spec, create=True).result()[...] = np.ones((50, 2), np.float32)

    good = jaxckpt.verify(tmp_path / "c")
    for chunk in ("0.0", "7.1", "16.1"):
        (tmp_path / "c" / "a" / chunk).write_bytes(b"short")
    bad = jaxckpt.verify(tmp_path / "c")

    assert (good.ok, good.leaves, good.size_bytes) == (True, 2, 800)
    assert [problem.leaf for problem in bad.problems] == ["a"]


def test_a_tree_without_arrays_needs_its_record_too(tmp_path):
    """Only the record has the digests of its texts."""
    jaxckpt.save(tmp_path / "a", {"text": "t"})
    (tmp_path / "a" / names.RECORD).unlink()
    (tmp_path / "a" / names.WRITER).unlink(missing_ok=True)

    assert isinstance(outcome(tmp_path / "a"), CorruptCheckpoint)
    assert not jaxckpt.verify(tmp_path / "a").ok


# --- replaced or deleted while it is read ------------------------------------------------------


def without_chunk_sums(path):
    """Makes a checkpoint like those of an earlier jaxckpt, which has no checksums of its chunks."""
    sums = path / "state" / names.CHUNK_SUMS
    record = decode_record((path / names.RECORD).read_bytes(), file="")
    files = {f: facts for f, facts in record.files.items() if f != f"state/{names.CHUNK_SUMS}"}
    sums.unlink()
    (path / names.RECORD).write_bytes(encode_record(dataclasses.replace(record, files=files)))


def test_a_checkpoint_without_chunk_sums_is_read_as_of_one_save(tmp_path):
    """Only the record shows that the arrays are of another save than the texts."""

    def tree_of(n):
        return {"w": np.full(300_000, n, np.float32), "text": f"text {n}"}

    def save(n, **options):
        jaxckpt.save(tmp_path / "a", tree_of(n), **options)
        without_chunk_sums(tmp_path / "a")

    replaced = []

    def replace_once(verb, path):
        if verb == "read_into" and not replaced:
            replaced.append(path)
            save(2, overwrite=True)

    save(1)

    assert same(jaxckpt.restore(watched(tmp_path / "a", replace_once)), tree_of(2))
    assert replaced


def test_a_foreign_checkpoint_deleted_while_it_is_read_has_no_values(tmp_path, monkeypatch):
    """Its missing chunks would count as zeros."""
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{tmp_path}/a/w/"},
        "metadata": {"shape": [9], "chunks": [9], "dtype": "<f4", "fill_value": 0},
    }
    ts.open(spec, create=True).result().write(np.ones(9, np.float32)).result()
    assert same(jaxckpt.restore(tmp_path / "a", as_numpy=True), {"w": np.ones(9, np.float32)})
    read_into = _arrays.read_into

    def read_late(*args):
        shutil.rmtree(tmp_path / "a")
        return read_into(*args)

    monkeypatch.setattr(_arrays, "read_into", read_late)
    with pytest.raises(CheckpointNotFound):
        jaxckpt.restore(tmp_path / "a")


def test_a_place_that_is_empty_for_a_moment_is_looked_at_again(saved):
    """While a checkpoint is replaced there may be nothing under either of its names."""
    misses = [1, 2]

    def miss(verb, path):
        if verb == "entries" and misses:
            misses.pop()
            raise FileNotFoundError(path)

    assert jaxckpt.verify(watched(saved, miss)).ok
    assert not misses


def test_too_little_memory_is_not_damage(saved, monkeypatch):
    """`verify` does not report it as a problem of the checkpoint."""

    def no_memory(*_):  # a real limit would end the whole process
        raise MemoryError("no memory")

    monkeypatch.setattr(_chunks, "make_memory", no_memory)

    with pytest.raises(MemoryError):
        jaxckpt.verify(saved)


def test_what_was_opened_says_that_it_is_gone(tmp_path):
    """In a debugger, a log or a notebook, an error would hide what was looked for."""
    jaxckpt.save(tmp_path / "a", {"w": jnp.ones(3)})
    ckpt = jaxckpt.open(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")

    assert repr(ckpt).startswith(f"{tmp_path / 'a'} was replaced, changed or deleted")
    assert ckpt._repr_html_() is None
