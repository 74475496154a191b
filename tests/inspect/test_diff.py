"""`diff` finds every difference between two checkpoints, whatever their layouts on disk."""

from __future__ import annotations

import math
import re
import tempfile
import tracemalloc
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._disk.find import find
from jaxckpt._disk.item import open_tree
from jaxckpt._inspect.diff import compare_block, compare_items
from jaxckpt._inspect.value_stream import as_numbers
from jaxckpt.storage import locate
from tests.golden.fixture import Golden, golden_names
from tests.strategies import host_arrays, random_bits, trees

ocp = pytest.importorskip("orbax.checkpoint")


def save_two(path, a, b):
    jaxckpt.save(path / "a", a)
    jaxckpt.save(path / "b", b)
    return path / "a", path / "b"


def only_change(report):
    assert not report.only_a
    assert not report.only_b
    (changed,) = report.changed
    return changed


# --- laws ------------------------------------------------------------------------------------


@given(trees())
@settings(max_examples=30, deadline=None)
def test_a_checkpoint_equals_itself(tree):
    """This holds for any contents, including NaNs; every leaf is counted."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            jaxckpt.save(f"{folder}/a", tree)
        except jaxckpt.UnsupportedLeaf:
            return
        report = jaxckpt.diff(f"{folder}/a", f"{folder}/a")
        count = len(jaxckpt.open(f"{folder}/a"))

    assert report.equal, str(report)
    assert report.same == count


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_differences_are_those_of_the_whole_arrays(data):
    """For any two arrays of one dtype and shape, the result equals numpy's on whole arrays."""
    a = data.draw(host_arrays())
    b = random_bits(a.shape, a.dtype, data.draw(st.integers(0, 9)))
    b = np.where(np.random.default_rng(0).random(a.shape) < 0.5, a, b).astype(a.dtype)
    rtol = data.draw(st.sampled_from([0.0, 0.1]))
    with tempfile.TemporaryDirectory() as folder:
        jaxckpt.save(f"{folder}/a", a)
        jaxckpt.save(f"{folder}/b", b)
        report = jaxckpt.diff(f"{folder}/a", f"{folder}/b", rtol=rtol)

    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    x, y = (as_numbers(v.reshape(-1)).astype(wide) for v in (a, b))
    with np.errstate(all="ignore"):
        differ = np.count_nonzero(~np.isclose(x, y, rtol=rtol, atol=0, equal_nan=True))
        gaps = np.abs(x - y)
    if as_numbers(a.reshape(-1)[:0]).dtype.kind in "iu" and not rtol:
        differ = np.count_nonzero(a != b)  # float64 does not tell all integers apart
    assert report.equal == (not differ)
    if differ:
        changed = only_change(report)
        assert changed.differing == differ
        assert changed.nan_a == np.count_nonzero(np.isnan(x))
        assert changed.nan_b == np.count_nonzero(np.isnan(y))
        gaps = gaps[(x != y) & ~np.isnan(x) & ~np.isnan(y)]
        assert math.isclose(changed.max_abs, np.max(gaps, initial=0.0), rel_tol=1e-12)


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=8),
    st.lists(st.integers(-3, 3), min_size=8, max_size=8),
    st.booleans(),
)
def test_large_integers_are_compared_exactly(values, steps, is_unsigned):
    """Signed and unsigned 64-bit integers, near each other and far apart."""
    others = [min(max(v + s, -(2**63)), 2**63 - 1) for v, s in zip(values, steps, strict=False)]
    a, b = np.array(values), np.array(others)
    if is_unsigned:
        others = [abs(other) for other in others]
        b = np.array(others, np.uint64)

    found = compare_block(a, b, rtol=0, atol=0)

    gaps = [abs(v - o) for v, o in zip(values, others, strict=True)]
    assert found.differing == sum(gap > 0 for gap in gaps)
    assert math.isclose(found.max_abs, max(gaps), rel_tol=1e-15)


@given(
    st.lists(st.floats(), min_size=1, max_size=20),
    st.floats(0, 3),
    st.floats(0, 1e300),
    st.randoms(),
)
def test_tolerances_are_those_of_isclose(values, rtol, atol, random):
    """As `numpy.isclose` has them, with NaN equal to NaN."""
    a = np.array(values)
    b = np.array(random.sample(values, len(values)))

    found = compare_block(a, b, rtol=rtol, atol=atol)

    with np.errstate(all="ignore"):
        close = np.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    assert found.differing == np.count_nonzero(~close)


# --- what is told ----------------------------------------------------------------------------


def test_leaves_of_one_side_are_told(tmp_path):
    """By path, in order; what both have and is the same is counted."""
    a, b = save_two(tmp_path, {"w": 1, "x": {"y": 2, "z": {}}}, {"w": 1, "v": np.ones(2)})

    report = jaxckpt.diff(a, b)

    assert not report.equal
    assert (report.only_a, report.only_b) == (("x/y", "x/z"), ("v",))
    assert (report.changed, report.same) == ((), 1)


def test_the_numbers_of_a_difference(tmp_path):
    """Each one as documented."""
    nan, inf = np.nan, np.inf
    a, b = save_two(
        tmp_path,
        {"w": np.array([3.0, 4.0, nan, nan, inf, 0.0, 1.0])},
        {"w": np.array([3.0, 2.0, nan, 1.0, inf, 0.0, 0.0])},
    )

    changed = only_change(jaxckpt.diff(a, b))

    assert (changed.path, changed.a, changed.b) == ("w", "float64[7]", "float64[7]")
    assert (changed.size, changed.differing) == (7, 3)
    assert (changed.max_abs, changed.max_rel) == (2.0, inf)
    assert (changed.nan_a, changed.nan_b) == (2, 1)
    assert math.isclose(changed.norm_a, math.sqrt(9 + 16 + 1))
    assert math.isclose(changed.norm_b, math.sqrt(9 + 4 + 1))
    assert math.isclose(changed.norm_diff, math.sqrt(4 + 1))
    assert "w  float64[7]: 3 of 7 differ, at most by 2 (inf relative)" in str(changed)


def test_infinities_of_both_signs_differ(tmp_path):
    """By infinity; equal ones do not."""
    a, b = save_two(tmp_path, np.array([np.inf, -np.inf]), np.array([np.inf, np.inf]))

    changed = only_change(jaxckpt.diff(a, b))

    assert (changed.differing, changed.max_abs, changed.max_rel) == (1, np.inf, np.inf)


def test_other_dtypes_are_a_change_and_are_compared(tmp_path):
    """The values as float64; equal ones do not make the dtypes equal."""
    w = np.arange(8, dtype=np.float32)
    a, b = save_two(tmp_path, {"w": w, "n": w}, {"w": jnp.bfloat16(w), "n": w.astype(int) + 1})

    report = jaxckpt.diff(a, b)

    told = {leaf.path: leaf for leaf in report.changed}
    assert (told["w"].a, told["w"].b) == ("float32[8]", "bfloat16[8]")
    assert (told["w"].differing, told["w"].max_abs) == (0, 0.0)
    assert (told["n"].differing, told["n"].max_abs) == (8, 1.0)


def test_other_shapes_are_a_change_and_are_not_compared(tmp_path):
    """Nor are numbers and texts, texts of other lengths, or containers."""
    a, b = save_two(
        tmp_path,
        {"w": np.ones((2, 3)), "s": "adam", "t": "lion", "c": {}, "i": 3, "b": b"123"},
        {"w": np.ones((3, 2)), "s": "sgd", "t": 3, "c": [], "i": 10**30, "b": np.ones(3)},
    )

    report = jaxckpt.diff(a, b)

    told = {leaf.path: (leaf.a, leaf.b) for leaf in report.changed}
    assert told == {
        "w": ("float64[2,3]", "float64[3,2]"),
        "s": ("str 'adam'", "str 'sgd'"),
        "t": ("str 'lion'", "int64[]"),
        "c": ("{}", "[]"),
        "i": ("int64[]", f"int {10**30}"),
        "b": ("bytes", "float64[3]"),
    }
    assert all(leaf.differing is None for leaf in report.changed)


def test_values_of_the_metadata_are_compared(tmp_path):
    """Short and long texts, bytes, integers of any size, PRNG keys and Python numbers."""
    tree = {
        "s": "abc",
        "long": "x" * 100_000,
        "b": b"abc",
        "i": 10**30,
        "k": jax.random.key(0),
        "f": 1.0,
    }
    other = {
        "s": "abx",
        "long": "x" * 99_999 + "y",
        "b": b"abx",
        "i": 10**30 + 1,
        "k": jax.random.key(1),
        "f": 2.0,
    }
    a, b = save_two(tmp_path, tree, other)

    told = {leaf.path: leaf for leaf in jaxckpt.diff(a, b).changed}

    assert set(told) == set(tree)
    assert all(leaf.differing == 1 for leaf in told.values())
    assert told["s"].max_abs is None
    assert told["k"].a == told["k"].b == "key<threefry2x32>[]"
    assert told["f"].max_abs == 1.0


def test_keys_of_other_implementations_differ(tmp_path):
    """And a key from the array of its data."""
    data = np.array(jax.random.key_data(jax.random.key(5)))
    a, b = save_two(
        tmp_path,
        {"k": jax.random.key(5), "d": jax.random.key(5)},
        {"k": jax.random.key(5, impl="rbg"), "d": data},
    )

    told = {leaf.path: leaf for leaf in jaxckpt.diff(a, b).changed}

    assert set(told) == {"k", "d"}
    assert told["k"].differing is None
    assert told["d"].differing == 0


def test_a_tolerance_makes_near_values_the_same(tmp_path):
    """And a negative one is refused."""
    a, b = save_two(tmp_path, np.array([1.0, 2.0]), np.array([1.0, 2.001]))

    assert jaxckpt.diff(a, b, rtol=1e-3).equal
    assert jaxckpt.diff(a, b, atol=1e-2).equal
    assert only_change(jaxckpt.diff(a, b, rtol=1e-4)).differing == 1
    with pytest.raises(ValueError, match="0 or more"):
        jaxckpt.diff(a, b, atol=-1.0)


def test_parts_and_metadata_alone(tmp_path):
    """Globs say which leaves; without values nothing is read, and only what is said differs."""
    a, b = save_two(
        tmp_path,
        {"x": {"w": np.ones(2), "b": 1}, "y": 1},
        {"x": {"w": np.zeros(2), "b": 1}, "y": 2.0},
    )

    assert jaxckpt.diff(a, b, only="x", skip="*/w").same == 1
    assert [leaf.path for leaf in jaxckpt.diff(a, b, only="x").changed] == ["x/w"]
    report = jaxckpt.diff(a, b, values=False)
    assert [(leaf.path, leaf.differing) for leaf in report.changed] == [("y", None)]
    with pytest.raises(ValueError, match="matches no leaf"):
        jaxckpt.diff(a, b, only="z")


def test_what_is_no_tree_is_refused(tmp_path):
    """An item that is JSON, and a place without a checkpoint."""
    with jaxckpt.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"w": 1}, items={"data": {"position": 3}})

    with pytest.raises(ValueError, match="JSON"):
        jaxckpt.diff(tmp_path / "run", tmp_path / "run", item="data")
    with pytest.raises(jaxckpt.CheckpointNotFound):
        jaxckpt.diff(tmp_path / "run", tmp_path / "nothing")


# --- other layouts ---------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "y"), P("y", "x")])
def test_chunks_do_not_matter(ram_path, mesh, spec):
    """The result is the same for any sharding; a single differing value is found."""
    values = np.random.default_rng(0).normal(size=(1024, 1536)).astype(np.float32)
    other = values.copy()
    other[777, 888] += 0.5
    rows = jax.device_put(values, NamedSharding(mesh, P(("x", "y"))))
    others = [jax.device_put(v, NamedSharding(mesh, spec)) for v in (values, other)]
    jaxckpt.save(ram_path / "a", {"w": rows})
    jaxckpt.save(ram_path / "same", {"w": others[0]})
    jaxckpt.save(ram_path / "other", {"w": others[1]})

    assert jaxckpt.diff(ram_path / "a", ram_path / "same").equal
    changed = only_change(jaxckpt.diff(ram_path / "a", ram_path / "other"))
    assert changed.differing == 1
    assert math.isclose(changed.max_abs, 0.5, rel_tol=1e-6)


@pytest.mark.parametrize("use_zarr3", [False, True])
@pytest.mark.parametrize("use_ocdbt", [False, True])
def test_what_orbax_saved_is_compared_with_ours(tmp_path, use_zarr3, use_ocdbt):
    """In both of its formats, in a database or not."""
    tree = {
        "w": jnp.arange(12.0).reshape(3, 4),
        "h": jnp.ones(5, jnp.bfloat16),
        "n": np.arange(3),
        "s": "text",
        "i": 7,
        "none": None,
    }
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=use_zarr3, use_ocdbt=use_ocdbt)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "orbax", tree)
    jaxckpt.save(tmp_path / "same", tree)
    jaxckpt.save(tmp_path / "other", {**tree, "h": tree["h"].at[2].set(2)})

    report = jaxckpt.diff(tmp_path / "orbax", tmp_path / "same")
    assert report.equal, str(report)
    assert report.same == 6
    changed = only_change(jaxckpt.diff(tmp_path / "orbax", tmp_path / "other"))
    assert (changed.path, changed.differing, changed.max_abs) == ("h", 1, 1.0)


@pytest.mark.parametrize("name", [n for n in golden_names() if "item-kinds" not in n][::4])
def test_a_golden_sample_equals_its_copy(golden: Golden, name: str, tmp_path):
    """Values that the oldest releases wrote, against the same ones in our layout."""
    sample = golden(name)
    item = sample.about.get("item")
    opened = jaxckpt.open(sample.path, item=item)
    place = opened.path if item is None else f"{opened.path}/{item}"
    jaxckpt.save(tmp_path / "copy", jaxckpt.restore(place))

    assert jaxckpt.diff(place, place).equal
    copy = jaxckpt.diff(place, tmp_path / "copy")
    assert not copy.only_a
    assert not any(leaf.differing for leaf in copy.changed), str(copy)


# --- memory and damage -----------------------------------------------------------------------


def test_memory_is_bounded(ram_path, mesh):
    """Two arrays of many times the budget, in other chunks, take about the budget."""
    ones = np.ones((4096, 4096), np.float32)  # 64 MiB
    for name, spec in (("a", P(("x", "y"))), ("b", P(None, ("x", "y")))):
        jaxckpt.save(ram_path / name, {"w": jax.device_put(ones, NamedSharding(mesh, spec))})
    a, b = (open_tree(find(*locate(ram_path / name)), "state") for name in "ab")

    tracemalloc.start()
    report = compare_items(a, b, budget_bytes=16 << 20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert report.equal
    assert peak < 48 << 20


def test_damage_is_told(tmp_path):
    """A flipped byte is not a difference but an error that names the leaf."""
    w = np.arange(1 << 18, dtype=np.float32)
    a, b = save_two(tmp_path, {"w": w}, {"w": w})
    file = max((b / "state" / "d").iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

    with pytest.raises(jaxckpt.CorruptCheckpoint) as caught:
        jaxckpt.diff(a, b)
    assert caught.value.leaf == "w"
    assert str(b) in str(caught.value)


def test_a_report_is_a_table(tmp_path):
    """Also where nobody prints it; branches that are alike, or only in one, are one row each."""
    branch = {"w": np.ones(2), "b": {"x": 1}}
    a = {"same": branch, "gone": branch, "both": {"w": np.ones(3), "n": 1, "old": 1}, "a/b": 1}
    b = {"same": branch, "new": branch, "both": {"w": np.zeros(3), "n": 1.5, "add": 1}, "a/b": 1}

    report = jaxckpt.diff(*save_two(tmp_path, a, b))

    title, *rows = repr(report).splitlines()
    assert title.endswith("8 differ, 3 leaves the same")
    assert [re.split("  +", row.strip()) for row in rows] == [
        ["leaf", "type", "differ", "at most", "relative"],
        ["-", "both/old"],
        ["-", "gone/", "2 leaves"],
        ["+", "both/add"],
        ["+", "new/", "2 leaves"],
        ["!", "both/n", "int64[] -> float64[]", "1 of 1", "0.5", "0.333"],
        ["!", "both/w", "float64[3]", "3 of 3", "1", "inf"],
        ["=", "a~1b"],
        ["=", "same/", "2 leaves"],
    ]
    assert f"{report}" == repr(report)
    equal = jaxckpt.diff(tmp_path / "a", tmp_path / "a")
    assert repr(equal).endswith(": equal, 8 leaves the same")


def test_a_report_gives_a_terminal_no_commands(tmp_path):
    """Names with control characters are escaped, in one row each."""
    hostile = "a\x1b[2Jb\nc"

    report = jaxckpt.diff(*save_two(tmp_path, {hostile: 1, "x": 1}, {hostile: 2, "x": 1}))
    one_sided = jaxckpt.diff(*save_two(tmp_path / "2", {hostile: 1, "x": 1}, {"x": 1}))

    for text in (str(report), str(one_sided), str(report.changed[0])):
        assert r"a\x1b[2Jb\nc" in text
        assert "\x1b" not in text


def test_a_long_report_is_cut(tmp_path):
    """To some lines; the attributes have all."""
    a, b = save_two(tmp_path, {str(i): i for i in range(300)}, {"x": 1})

    report = jaxckpt.diff(a, b)

    assert len(report.only_a) == 300
    assert len(str(report).splitlines()) < 210
    assert "and 101 more" in str(report)
    assert "301 differ, 0 leaves the same" in str(report)


class Point(NamedTuple):
    x: int
    y: int


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 2), [1, 2]),
        ({0: 1}, {"0": 1}),
        ([1], {"0": 1}),
        (Point(1, 2), {"x": 1, "y": 2}),
        ({"w": np.array([complex(3, np.nan)])}, {"w": np.array([complex(np.nan, 3)])}),
    ],
)
def test_trees_of_other_types_differ(tmp_path, one, other):
    """Containers, keys, and the parts of complex numbers; but not in what was not recorded."""
    for name, tree in (("a", one), ("again", one), ("b", other)):
        jaxckpt.save(tmp_path / name, {"t": tree})

    changed = jaxckpt.diff(tmp_path / "a", tmp_path / "b").changed

    assert [leaf.path.split("/")[0] for leaf in changed] == ["t"]
    assert changed[0].a != changed[0].b or changed[0].differing == 1
    assert jaxckpt.diff(tmp_path / "a", tmp_path / "again").equal


def test_it_names_the_items_that_it_does_not_compare(tmp_path):
    """Checkpoints with other items are not equal, whatever the tree that was compared."""
    with jaxckpt.CheckpointManager(tmp_path) as manager:
        manager.save(
            1, {"w": 1}, items={"ema": {"w": np.ones(1)}, "data": {"at": 1}}, metrics={"loss": 1}
        )
        manager.save(2, {"w": 1}, items={"ema": {"w": np.zeros(1)}, "data": {"at": 2}})
        manager.save(3, {"w": 1}, items={"ema": {"w": np.ones(1)}})

    same = jaxckpt.diff(tmp_path / "1", tmp_path / "2")
    fewer = jaxckpt.diff(tmp_path / "1", tmp_path / "3")

    assert (same.equal, same.uncompared, same.unmatched) == (True, ("data", "ema"), ())
    assert str(same).endswith("equal, 1 leaf the same; not compared: item data, ema")
    assert (fewer.equal, fewer.uncompared, fewer.unmatched) == (False, ("ema",), ("data",))
    assert str(fewer).endswith(
        "1 differ, 1 leaf the same; not compared: item ema; in one only: item data"
    )
    assert jaxckpt.diff(tmp_path / "1", tmp_path / "3", item="ema").equal
