"""Reading damaged chunks without TensorStore raises an error that names the leaf and the file."""

from __future__ import annotations

import errno
import json
import shutil

import numpy as np
import pytest

import jaxckpt
from jaxckpt._disk.data_files import DataFiles
from jaxckpt.errors import CorruptCheckpoint, StoreError
from jaxckpt.format import arrays, names, ocdbt
from jaxckpt.format.tree import StoredArray
from jaxckpt.storage import LocalStorage, locate
from jaxckpt.storage._values import find_values
from jaxckpt.testing import FailingStorage
from tests.disk.test_chunks import UNIT_BYTES, item_at, values_of
from tests.strategies import random_bits, same
from tests.test_bad_input import rewrite_record
from tests.twins import watched

VALUES = np.arange(3000, dtype=np.float32)
LEAVES = ("a", "inner", "plain", "z")


@pytest.fixture
def saved(ram_path, limits):
    """Four leaves, each in files of its own; where their values begin, by leaf."""
    limits(arrays, MAX_UNIT_BYTES=UNIT_BYTES)
    limits(ocdbt, DATA_FILE_BYTES=1 << 10)
    sizes = {"a": 2000, "inner": 3 * 4096, "plain": 4000, "z": 2000}
    tree = {name: random_bits((n,), np.dtype("f4"), ord(name[0])) for name, n in sizes.items()}
    jaxckpt.save(ram_path / "x", tree)
    storage, where = locate(ram_path / "x" / "state")
    found = find_values(storage, where)
    return ram_path / "x", tree, {name: found[f"{name}/c/0"] for name in LEAVES}


def change(path, extent, at, mask=0x40):
    """Flips a bit of a value, counted from its end if `at` is negative."""
    with (path / "state" / extent.file).open("r+b") as file:
        file.seek(extent.offset + at % extent.size)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ mask]))


def swap(path, extent, a, b):
    """Swaps the 16 bytes at two places of a value, counted from its end."""
    file = path / "state" / extent.file
    data, end = bytearray(file.read_bytes()), extent.offset + extent.size
    first, second = (slice(end + at, end + at + 16) for at in (a, b))
    data[first], data[second] = data[second], data[first]
    file.write_bytes(data)


@pytest.mark.parametrize("leaf", ["plain", "inner"])
@pytest.mark.parametrize("how", ["value", "checksum", "index", "cut", "missing"])
def test_damage_names_the_leaf_and_the_file(saved, leaf, how):
    """`restore` raises, but `verify` continues and reads the other leaves."""
    path, tree, places = saved
    file = path / "state" / places[leaf].file
    match how:
        case "value":
            change(path, places[leaf], 17)
        case "checksum":
            change(path, places[leaf], 4096 * 4 + 1 if leaf == "inner" else -2)
        case "index":  # two inner chunks change places in it
            swap(path, places[leaf], -4 - 3 * 16, -4 - 2 * 16)
        case "cut":
            file.write_bytes(file.read_bytes()[:5000])
        case "missing":
            file.unlink()

    with pytest.raises(CorruptCheckpoint) as caught:
        jaxckpt.restore(path)
    report = jaxckpt.verify(path)
    others = [name for name in LEAVES if name != leaf]
    read = values_of(item_at(path), others)

    assert (caught.value.leaf, caught.value.file) == (leaf, str(file))
    assert leaf in str(caught.value)
    assert {problem.leaf for problem in report.problems} - {None} == {leaf}
    assert {problem.file for problem in report.problems} == {str(file)}
    assert same(read, [tree[name] for name in others])


@pytest.mark.parametrize("damaged", ["node", "manifest"])
def test_a_damaged_list_of_the_chunks_is_named(tmp_path, damaged):
    """With its file, by everything that reads values."""
    for name in "ab":
        jaxckpt.save(tmp_path / name, {"w": VALUES, "n": 1})
    [data] = (tmp_path / "a/state/d").iterdir()  # ends with the node of the tree
    file = data if damaged == "node" else tmp_path / "a/state/manifest.ocdbt"
    file.write_bytes(file.read_bytes()[:-20] + bytes(20))

    for read in (
        lambda: jaxckpt.restore(tmp_path / "a", as_numpy=True),
        lambda: jaxckpt.open(tmp_path / "a").statistics(),
        lambda: jaxckpt.diff(tmp_path / "a", tmp_path / "b"),
        lambda: jaxckpt.convert(tmp_path / "a", tmp_path / "c"),
    ):
        with pytest.raises(CorruptCheckpoint, match=str(file)) as caught:
            read()
        assert caught.value.file == str(file)


def test_swapped_chunks_of_a_size_are_found(saved):
    """Each has the checksum that it carries; the file is not the one that was written."""
    path, _, places = saved
    a, z = (path / "state" / places[name].file for name in "az")
    values = a.read_bytes()
    a.write_bytes(z.read_bytes())
    z.write_bytes(values)

    with pytest.raises(CorruptCheckpoint) as caught:
        jaxckpt.restore(path)

    assert caught.value.file in (str(a), str(z))
    assert {p.file for p in jaxckpt.verify(path).problems} == {str(a), str(z)}


def test_bad_leaves_raise_in_order(saved):
    """The first one of the tree, whatever is read first; then the next."""
    path, _, places = saved
    for name in ("z", "plain", "inner"):
        change(path, places[name], 5)
    raised = []
    for wanted in (LEAVES, ("a", "plain", "z"), ("z", "inner")):
        with pytest.raises(CorruptCheckpoint) as caught:
            values_of(item_at(path), wanted)
        raised.append(caught.value.leaf)

    report = jaxckpt.verify(path)

    assert raised == ["inner", "plain", "z"]
    assert [problem.leaf for problem in report.problems][:3] == ["inner", "plain", "z"]


def test_a_disk_that_fails(saved):
    """EIO of any one read is itself, not damage; but each chunk of a run is tried again."""
    path, tree, _ = saved
    outcomes = []
    while not outcomes or outcomes[-1][1]:
        storage = FailingStorage(LocalStorage(), 10**9, OSError(errno.EIO, "bad"), reads=True)
        item = item_at(path, storage)
        storage._at = len(storage.events) + len(outcomes)
        try:
            outcome = values_of(item)
        except OSError as error:
            outcome = error
        outcomes.append((outcome, storage.failed))

    bad = [found for found, _ in outcomes if isinstance(found, OSError)]
    good = [found for found, _ in outcomes if isinstance(found, list)]
    noted = "".join(note for error in bad for note in getattr(error, "__notes__", []))
    assert all(f"while reading leaf {name}" in noted for name in LEAVES)
    assert any(isinstance(found, list) and failed for found, failed in outcomes)
    assert all(not isinstance(error, CorruptCheckpoint) for error in bad)
    assert all((error.errno, str(path) in error.filename) == (errno.EIO, True) for error in bad)
    assert all(same(found, list(tree.values())) for found in good)


def test_a_file_cut_short_costs_only_what_was_behind(ram_path, limits):
    """Leaves read in one batch are then read one by one: the leaves before the cut are good."""
    limits(ocdbt, DATA_FILE_BYTES=60_000)
    tree = {f"{i:02}": random_bits((2000,), np.dtype("f4"), i) for i in range(20)}
    jaxckpt.save(ram_path / "x", tree)
    storage, where = locate(ram_path / "x" / "state")
    found = find_values(storage, where)
    places = {name: found[f"{name}/c/0"] for name in tree}
    file = places["00"].file
    inside = sorted((p.offset, name) for name, p in places.items() if p.file == file)
    bad = {name for _, name in inside[3:]}
    path = ram_path / "x" / "state" / file
    path.write_bytes(path.read_bytes()[: inside[3][0] + 5000])

    report = jaxckpt.verify(ram_path / "x")
    good = values_of(item_at(ram_path / "x"), [name for name in tree if name not in bad])

    assert len(bad) > 2
    assert {problem.leaf for problem in report.problems} - {None} == bad
    assert {problem.file for problem in report.problems} == {str(path)}
    assert same(good, [values for name, values in tree.items() if name not in bad])


@pytest.fixture
def silent(ram_path, limits):
    """Leaves in several files, of which one is not answered: leaves, those in it, and a path.

    Then the calls that were made to read it.
    """
    limits(ocdbt, DATA_FILE_BYTES=60_000)
    tree = {f"{i:02}": random_bits((2000,), np.dtype("f4"), i) for i in range(20)}
    jaxckpt.save(ram_path / "x", tree)
    storage, where = locate(ram_path / "x" / "state")
    found = find_values(storage, where)
    file = found["00/c/0"].file
    bad = [name for name in tree if found[f"{name}/c/0"].file == file]
    calls = []

    def before(verb, path):
        if path.endswith(file) and verb == "read_into":
            calls.append(path)
            raise StoreError(f"{path}: the store did not answer")

    return tree, bad, watched(ram_path / "x", before), calls


def test_what_a_silent_store_has_is_asked_for_once(silent):
    """Each chunk alone would take as long to fail. All leaves of the run fail, and no other."""
    tree, bad, path, calls = silent
    failed = []

    good = values_of(
        item_at(path), failed=lambda read, error: failed.append((read.leaf.text, type(error)))
    )

    assert len(bad) > 2
    assert failed == [(name, StoreError) for name in bad]
    assert same(good, [values for name, values in tree.items() if name not in bad])
    assert len(calls) == 1


def test_verify_reports_all_that_a_silent_store_has(silent):
    _, bad, path, calls = silent

    report = jaxckpt.verify(path)

    assert len(report.problems) == len(bad)
    assert len(calls) == 1


def lying_tree(path, **said):
    """Makes the tree say something else of leaf `w`, and the record fit."""
    file = path / "state" / names.TREE_METADATA
    tree = json.loads(file.read_text())
    for entry in tree["tree_metadata"].values():
        if entry["key_metadata"][0]["key"] == "w":
            entry["value_metadata"]["jaxckpt"] |= said
    file.write_text(json.dumps(tree))
    rewrite_record(path)


def hand_made(path, metadata, chunk, **said):
    """A checkpoint of `w` whose database was written by someone else."""
    jaxckpt.save(path, {"w": VALUES})
    state = path / "state"
    shutil.rmtree(state / names.OCDBT_DATA)
    (state / names.OCDBT_MANIFEST).unlink()
    storage, where = locate(state)
    values = DataFiles(storage, where)
    for key, value in (("w/zarr.json", metadata), ("w/c/0", chunk)):
        if value is not None:
            values.put(key, value if isinstance(value, bytes) else json.dumps(value).encode())
    (state / names.OCDBT_MANIFEST).write_bytes(values.write().manifest)
    record = json.loads((path / names.RECORD).read_bytes().splitlines()[0])
    files = {k: v for k, v in record["files"].items() if (path / k).is_file()}
    files |= {str(f.relative_to(path)): {"bytes": 0} for f in (state / "d").iterdir()}
    rewrite_record(path, files=files)
    lying_tree(path, **said)


OURS = arrays.zarr3_metadata(StoredArray(shape=(3000,), dtype="float32", chunk_shape=(3000,)))
CHUNK = arrays.encode_chunk(VALUES)


@pytest.mark.parametrize(
    ("metadata", "chunk"),
    [
        (OURS, None),
        (None, CHUNK),
        (OURS, CHUNK[4:]),
        (OURS, CHUNK + b"\0\0\0\0"),
        (OURS, arrays.encode_chunk(VALUES[:9])),
        (OURS, b""),
        (OURS | {"data_type": "int32", "fill_value": 0}, CHUNK),
        (OURS | {"shape": [2999]}, CHUNK),
    ],
    ids=[
        "no chunk",
        "no metadata",
        "short",
        "long",
        "in a node",
        "empty",
        "dtype",
        "shape",
    ],
)
def test_a_database_that_does_not_fit_the_tree(tmp_path, metadata, chunk):
    """The checksums match, but the data does not fit the tree: the error names the leaf."""
    hand_made(tmp_path / "good", OURS, CHUNK)
    hand_made(tmp_path / "x", metadata, chunk)

    with pytest.raises(CorruptCheckpoint) as caught:
        jaxckpt.restore(tmp_path / "x")

    assert same(jaxckpt.restore(tmp_path / "good"), {"w": VALUES})
    assert caught.value.leaf == "w"
    assert str(tmp_path / "x" / "state") in caught.value.file
    assert [problem.leaf for problem in jaxckpt.verify(tmp_path / "x").problems] == ["w"]
