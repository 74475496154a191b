"""The table that a process leaves for process 0 is what comes to it, and together they are one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt._disk.attempt import Work
from jaxckpt._disk.places import Table, check_complete, decode_table, encode_table, unite
from jaxckpt.errors import SaveFailed
from jaxckpt.format import names
from jaxckpt.format.ocdbt import Place
from jaxckpt.format.tree import StoredArray
from jaxckpt.storage import LocalStorage, kvstore
from jaxckpt.storage._arrays import Reader
from jaxckpt.storage._values import find_values

FILES = [names.new_data_file(), names.new_data_file("0123456789abcdef"), names.new_held_file()]
numbers = st.integers(0, 2**32 - 1)
places = st.one_of(
    st.binary(max_size=20),
    st.builds(Place, st.sampled_from(FILES), st.integers(0, 1 << 50), numbers),
)
tables = st.builds(
    lambda places, both: Table(places, [unit for unit, _ in both], [n for _, n in both]),
    st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), places),
    st.lists(st.tuples(numbers, numbers)),
)


@given(tables)
def test_a_table_comes_as_it_was_left(table):
    assert decode_table(encode_table(table)) == table


@given(st.data())
def test_a_damaged_table_is_refused(data):
    """Each part of it has a checksum."""
    good = encode_table(Table({"a": b"1", "b": Place(FILES[0], 7, 9)}, [0, 1], [5, 6]))
    at, bit = data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(0, 7))
    bad = bytearray(good)
    bad[at] ^= 1 << bit

    for some in (bytes(bad), good[:at] if at else good[:-1]):
        with pytest.raises(ValueError):  # noqa: PT011 - each field has its own words
            decode_table(some)


ARRAYS = [
    StoredArray(shape=(4, 2), dtype="int8", chunk_shape=(2, 2)),
    StoredArray(shape=(), dtype="int8", chunk_shape=()),
    StoredArray(shape=(0, 3), dtype="int8", chunk_shape=(1, 3)),
]
DESCRIBED = {f"{name}/zarr.json": b"{}" for name in "abc"}


def tables_of_two(folder, mark=""):
    """Two processes write an array of two chunks, one after the other, and one writes a scalar."""
    found = []
    for i, units in enumerate(([0, 2], [1])):
        file = names.new_data_file(mark)
        (folder / "d").mkdir(exist_ok=True)
        (folder / file).write_bytes(bytes([i + 1]) * 8)
        values = {f"a/c/{i}/0": Place(file, i, 4)}
        if i == 0:
            values = DESCRIBED | values | {"b/c": b"\7"}
        found.append(Table(values, units, [10 + unit for unit in units]))
    return found


@pytest.mark.parametrize("mark", ["", "0123456789abcdef"])
def test_tables_are_united_into_one_database(tmp_path, mark):
    """TensorStore finds all values in it, and so do we."""
    two = tables_of_two(tmp_path, mark)
    work = Work(str(tmp_path), mark)

    files, facts = unite(LocalStorage(), str(tmp_path), two[::-1], 3, work)

    (tmp_path / names.OCDBT_MANIFEST).write_bytes(files[names.OCDBT_MANIFEST])
    both = two[0].places | two[1].places
    assert find_values(LocalStorage(), str(tmp_path)) == both
    reader = Reader(kvstore(str(tmp_path)), database=True)
    assert reader.keys() == sorted(both)
    wanted = [("a/c/0/0", None), ("a/c/1/0", None), ("b/c", None)]
    assert reader.values(wanted) == [b"\1" * 4, b"\2" * 4, b"\7"]
    assert np.frombuffer(files[names.CHUNK_SUMS], "<u4").tolist() == [10, 11, 12]
    places = [two[i].places[f"a/c/{i}/0"] for i in range(2)]
    assert {file: one.size for file, one in facts.items()} == {
        places[0].file: 4,
        places[1].file: 5,
    }
    assert all(map(names.is_of_attempt, facts)) == bool(mark)


def test_a_value_that_nobody_wrote_is_noticed(tmp_path):
    """Unless the checkpoint is what one process held."""
    one, _ = tables_of_two(tmp_path)
    work = Work(str(tmp_path), "")

    with pytest.raises(SaveFailed, match="no process wrote 1 of the 6 values"):
        check_complete(str(tmp_path), [one], ARRAYS)

    _, facts = unite(LocalStorage(), str(tmp_path), [one], 3, work)
    assert len(facts) == 1


def test_names_of_an_attempt_are_known():
    """Also those of releases that gave each process a directory; nothing else is taken for one."""
    token = "0123456789abcdef"
    ours = [names.part(3, token), names.new_data_file(token)]
    ours = [*ours, f"state/{ours[1]}", f"a/ocdbt.process_1.{token}/d/1"]
    others = [names.part(3), names.new_data_file(), "d/n1", "ocdbt.process_1/d/1"]
    others = [*others, f"state/{names.new_held_file()}", f"ocdbt.process_1.{token}"]

    assert [names.is_of_attempt(file) for file in ours] == [True] * 4
    assert [names.is_of_attempt(file) for file in others] == [False] * 6
    copy = names.data_file_of(f"x/{names.new_data_file()}", token)
    assert names.is_of_attempt(copy)
    assert token in copy
