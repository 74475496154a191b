"""The file with the checksums of all chunks detects an intact chunk in the wrong place."""

from __future__ import annotations

import itertools
import shutil

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxckpt
from jaxckpt._disk.checksums import decode, starts_of, units_in
from jaxckpt.format import names
from jaxckpt.format.arrays import chunk_key
from jaxckpt.format.tree import StoredArray, grid_of
from jaxckpt.storage import kvstore, locate
from jaxckpt.storage._arrays import Keys
from jaxckpt.storage._values import find_values
from tests.inspect.test_verify import without_chunk_sums


@st.composite
def arrays(draw):
    """Arrays in chunks, in some of which are inner chunks."""
    rank = draw(st.integers(0, 3))
    inner = draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank))
    counts = draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank))
    chunks = draw(st.lists(st.integers(0, 3), min_size=rank, max_size=rank))
    chunk = tuple(i * n for i, n in zip(inner, counts, strict=True))
    shape = tuple(c * n for c, n in zip(chunk, chunks, strict=True))
    has_inner = draw(st.booleans()) and rank > 0
    return StoredArray(
        shape=shape,
        dtype="float32",
        chunk_shape=chunk,
        inner_shape=tuple(inner) if has_inner else None,
    )


@given(st.lists(arrays(), max_size=4))
def test_each_unit_has_one_number(stored):
    """The chunks of all arrays, each asked for its units, number them without gap or overlap."""
    *starts, count = starts_of(stored)

    found = [
        start + unit
        for start, one in zip(starts, stored, strict=True)
        for index in itertools.product(
            *(range(n // c) for n, c in zip(one.shape, one.chunk_shape, strict=True))
        )
        for unit in units_in(one, index)
    ]

    assert sorted(found) == list(range(count))


def test_units_are_in_c_order_of_the_array():
    """As the shape of the table of a leaf."""
    stored = StoredArray(shape=(4, 4), dtype="int8", chunk_shape=(2, 4), inner_shape=(1, 2))

    assert grid_of(stored.shape, stored.unit_shape) == (4, 2)
    assert units_in(stored, (1, 0)) == [4, 5, 6, 7]


def test_a_table_of_another_size_is_refused():
    """It would shift what every leaf is compared with."""
    with pytest.raises(jaxckpt.CorruptCheckpoint, match="has 5 bytes, expected 0"):
        decode([], b"12345", file="x")


# --- chunks that are whole, in the wrong place -------------------------------------------------


def tree(seed):
    """Arrays of every way of storing: in a node, as values, by TensorStore, with inner chunks."""
    rng = np.random.default_rng(seed)
    return {
        "in_a_node": rng.standard_normal(8, np.float32),
        "value": rng.standard_normal(5_000, np.float32),
        "large": rng.standard_normal(100_000, np.float32),
        "inner": rng.integers(0, 255, (40 << 20,), np.uint8),
        "packed": rng.integers(-7, 7, 5_000).astype(ml_dtypes.int4),
    }


@pytest.fixture(scope="module", params=[None, "zstd"])
def saved(request, tmp_path_factory):
    """Two saves of the same tree with other values, and many more leaves beside them."""
    root = tmp_path_factory.mktemp("sums")
    more = {f"more{i}": np.zeros(2, np.float32) for i in range(200)}
    for seed in (1, 2):
        jaxckpt.save(root / str(seed), {**tree(seed), **more}, compression=request.param)
    return root


@pytest.fixture
def swapped(saved, tmp_path):
    """A save whose database is that of the other, as if files had been copied over each other."""
    path = shutil.copytree(saved / "1", tmp_path / "a")
    for file in (names.OCDBT_MANIFEST, names.OCDBT_DATA):
        place = path / "state" / file
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        other = saved / "2" / "state" / file
        shutil.copytree(other, place) if other.is_dir() else shutil.copy(other, place)
    return path


WAYS = {
    "open": lambda path, leaf: jaxckpt.open(path)[leaf].restore(),
    "only": lambda path, leaf: jaxckpt.restore(path, only=leaf, as_numpy=True),
    "among many": lambda path, leaf: jaxckpt.restore(path, only=[leaf, "more*"], as_numpy=True),
}


@pytest.mark.parametrize("leaf", tree(1))
@pytest.mark.parametrize("way", WAYS)
def test_a_chunk_of_another_save_is_found(swapped, leaf, way):
    """Whether chunks are read by us (of many leaves) or by TensorStore (of few among many)."""
    with pytest.raises(jaxckpt.CorruptCheckpoint) as caught:
        WAYS[way](swapped, leaf)

    assert "is not the one that was written" in str(caught.value)
    assert caught.value.file.startswith(str(swapped))


def test_what_is_the_same_is_no_problem(swapped):
    """The leaves that are alike in both saves restore."""
    got = jaxckpt.restore(swapped, only="more*", as_numpy=True)

    assert len(got) == 200


def test_verify_names_each_leaf(swapped):
    """All leaves with wrong values are named, and no others."""
    report = jaxckpt.verify(swapped)

    assert {problem.leaf for problem in report.problems if problem.leaf} == set(tree(1))


def test_without_the_table_it_would_pass(swapped):
    """A control: the chunks' own checksums do not show it."""
    without_chunk_sums(swapped)

    got = jaxckpt.restore(swapped, as_numpy=True)

    assert all(np.array_equal(got[name], leaf) for name, leaf in tree(2).items())


def test_a_damaged_table_is_named(saved, tmp_path):
    """It has a digest like every small file."""
    path = shutil.copytree(saved / "1", tmp_path / "a")
    file = path / "state" / names.CHUNK_SUMS
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)

    with pytest.raises(jaxckpt.CorruptCheckpoint, match=names.CHUNK_SUMS):
        jaxckpt.restore(path, as_numpy=True)
    assert not jaxckpt.verify(path).ok


def test_the_table_says_what_the_chunks_end_with(saved):
    """For a leaf with one chunk in a data file, it is the last four bytes."""
    storage, where = locate(saved / "1" / "state")
    found = find_values(storage, where)
    extent = found["value/" + chunk_key((0,))]
    end = (saved / "1" / "state" / extent.file).read_bytes()[: extent.offset + extent.size][-4:]

    assert end in (saved / "1" / "state" / names.CHUNK_SUMS).read_bytes()


def test_an_array_that_says_other_chunks_is_refused(tmp_path):
    """TensorStore uses the metadata in the database, which could describe chunks of any size."""
    jaxckpt.save(tmp_path / "a", {"w": np.arange(1000.0)})
    _, where = locate(tmp_path / "a" / "state")
    keys = Keys({"driver": "ocdbt", "base": kvstore(where)})
    data = keys.read("w/zarr.json").replace(b'"chunk_shape":[1000]', b'"chunk_shape":[2000]')
    assert b"2000" in data
    keys.write("w/zarr.json", data)

    with pytest.raises(jaxckpt.CorruptCheckpoint, match=r"array metadata has .*\(2000,\)"):
        jaxckpt.restore(tmp_path / "a", as_numpy=True)
    ours = shutil.ignore_patterns(names.OCDBT_MANIFEST, names.OCDBT_DATA)
    path = shutil.copytree(tmp_path / "a", tmp_path / "b", ignore=ours)
    base = kvstore(f"{path}/state")
    foreign = Keys({"driver": "ocdbt", "base": base, "value_data_prefix": "values/"})
    for key in ("w/zarr.json", "w/c/0"):
        foreign.write(key, keys.read(key))
    assert find_values(*locate(path / "state")) is None  # only TensorStore does
    with pytest.raises(jaxckpt.CorruptCheckpoint, match="chunks of shape"):
        jaxckpt.restore(path, as_numpy=True)
