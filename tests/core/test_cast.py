"""A restore loses no value: a cast keeps the kind, and every number that the dtype must hold."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import TreeMismatch, UnsupportedLeaf
from jaxckpt._core.cast import cast
from jaxckpt.format.arrays import AS_BYTES_DTYPES, STORABLE_DTYPES, dtype_of
from tests.strategies import same

NUMBERS = "bool uint8 uint64 int8 int32 int64 bfloat16 float16 float32 float64 complex64".split()


# --- the kind --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ("float32", "int32"),
        ("bfloat16", "int4"),
        ("int32", "bool"),
        ("int32", "uint32"),
        ("int4", "uint4"),
        ("complex64", "float32"),
        ("float32", "object"),
        ("int32", "datetime64[s]"),
    ],
)
def test_another_kind_is_refused_before_anything_is_read(tmp_path, saved, wanted):
    """With the leaf, both dtypes and what to do, however round the values."""
    jaxckpt.save(tmp_path / "x", {"a": {"w": np.ones(2, dtype_of(saved))}})
    wanted = np.dtype(getattr(ml_dtypes, wanted, wanted))
    for file in (tmp_path / "x" / "state" / "d").iterdir():
        file.write_bytes(b"")

    with pytest.raises(TreeMismatch, match=r"dtype=\.\.\.") as caught:
        jaxckpt.restore(tmp_path / "x", {"a": {"w": np.empty(2, wanted)}})

    (difference,) = caught.value.differences
    assert str(difference) == f"a/w   wanted {wanted.name}[2]   saved {saved}[2]"


@pytest.mark.parametrize("saved", NUMBERS)
@pytest.mark.parametrize("wanted", NUMBERS)
def test_a_cast_to_the_same_or_a_later_kind_is_allowed(tmp_path, saved, wanted):
    """From bool to unsigned, signed, float and complex; small values fit everywhere."""
    values = np.array([0, 1, 1, 0], dtype_of(saved))
    jaxckpt.save(tmp_path / "x", values)
    kinds = ["bool", "uint", "int", "float", "complex"]
    first, last = (next(i for i, k in enumerate(kinds) if k in name) for name in (saved, wanted))
    like = np.empty(4, dtype_of(wanted))

    if first <= last:
        assert same(jaxckpt.restore(tmp_path / "x", like), values.astype(like.dtype))
    else:
        with pytest.raises(TreeMismatch):
            jaxckpt.restore(tmp_path / "x", like)


def test_dtype_asks_for_another_kind(tmp_path):
    """Fractions are cut off. Complex numbers never become real."""
    saved = {"f": np.array([1.75, -2.5]), "i": np.array([2, 0]), "c": np.ones(2, complex)}
    jaxckpt.save(tmp_path / "x", saved)
    for name, wanted in {"f": "int8", "i": "bool"}.items():
        like = {name: np.empty(2, wanted)}

        got = jaxckpt.restore(tmp_path / "x", like, dtype=wanted, only=name)

        assert same(got, {name: saved[name].astype(wanted)})
        with pytest.raises(TreeMismatch):
            jaxckpt.restore(tmp_path / "x", like, dtype="float16", only=name)
    assert same(jaxckpt.restore(tmp_path / "x", dtype="int8", only="f")["f"], np.int8([1, -2]))
    with pytest.raises(TreeMismatch):
        jaxckpt.restore(tmp_path / "x", {"c": np.empty(2)}, dtype="float64", only="c")


def test_a_python_int_becomes_any_integer_that_holds_it(tmp_path):
    """It has no dtype, so it may also become unsigned."""
    jaxckpt.save(tmp_path / "x", {"step": 7})

    assert jaxckpt.restore(tmp_path / "x", {"step": np.uint8(0)}) == {"step": np.uint8(7)}
    jaxckpt.save(tmp_path / "y", {"step": -7})
    with pytest.raises(TreeMismatch, match="-7"):
        jaxckpt.restore(tmp_path / "y", {"step": np.uint8(0)})


# --- the values ------------------------------------------------------------------------------

LOST = [
    ("int32", 300, "uint8", "dtype="),
    ("int32", -129, "int8", None),
    ("uint8", 200, "int8", None),
    ("uint64", 2**63, "int64", None),
    ("int64", 2**40 + 1, "int32", None),
    ("int64", 2**53 + 1, "float64", None),
    ("int64", 2**63 - 1, "float32", None),
    ("int64", -(2**63), "float16", None),
    ("int32", 2**24 + 1, "float32", None),
    ("uint8", 17, "float8_e5m2", None),
    ("int4", 5, "int2", None),
    ("uint4", 12, "int4", None),
    ("float64", 1e300, "float32", None),
    ("float32", -1e30, "float16", None),
    ("float32", 1e30, "float8_e4m3fn", None),
    ("float64", 1e300, "complex64", None),
    ("float32", np.nan, "int32", "dtype="),
    ("float32", np.inf, "int64", "dtype="),
    ("float64", 2.0**31, "int32", "dtype="),
]


@pytest.mark.parametrize(("saved", "value", "wanted", "ask"), LOST, ids=str)
def test_a_value_that_does_not_fit_is_refused(tmp_path, saved, value, wanted, ask):
    """The error names the checkpoint, the leaf, the value, their number and both dtypes."""
    values = np.zeros((6, 5), dtype_of(saved))
    values[1, 2] = values[4, 4] = value
    jaxckpt.save(tmp_path / "x", {"a": {"w": values}})
    like = {"a": {"w": np.empty((6, 5), dtype_of(wanted))}}

    with pytest.raises(TreeMismatch, match=rf"{tmp_path}/x/state: .*\n  a/w ") as caught:
        jaxckpt.restore(tmp_path / "x", like, dtype=wanted if ask else None)

    (difference,) = caught.value.differences
    assert difference.wanted == wanted
    assert difference.saved == f"{saved} with 2 values such as {values[1, 2]}"


KEPT = [
    ("int32", 255, "uint64", "dtype="),
    ("int64", -(2**31), "int32", None),
    ("uint32", 2**31, "int64", None),
    ("int64", 2**62, "float32", None),
    ("int64", -(2**63), "bfloat16", None),
    ("float32", np.nan, "float16", None),
    ("float64", -np.inf, "bfloat16", None),
    ("float32", 1 / 3, "bfloat16", None),
    ("float64", 1e-300, "float32", None),
    ("float64", -(2.0**63), "int64", "dtype="),
    ("float32", 1e30, "bool", "dtype="),
]


@pytest.mark.parametrize(("saved", "value", "wanted", "ask"), KEPT, ids=str)
def test_a_value_that_fits_is_cast_as_numpy_does(tmp_path, saved, value, wanted, ask):
    """Rounding a float is allowed, and so are infinities and NaN that were saved."""
    values = np.full(3, value, dtype_of(saved))
    jaxckpt.save(tmp_path / "x", values)

    got = jaxckpt.restore(
        tmp_path / "x", np.empty(3, dtype_of(wanted)), dtype=wanted if ask else None
    )

    assert same(got, values.astype(dtype_of(wanted)))


def test_dtype_loses_no_value_either(tmp_path):
    """Neither a restore nor a conversion makes a finite value infinite."""
    jaxckpt.save(tmp_path / "x", {"w": np.array([1.0, 1e300])})

    with pytest.raises(TreeMismatch, match=r"1e\+300"):
        jaxckpt.restore(tmp_path / "x", dtype="float32")
    with pytest.raises(TreeMismatch, match=r"1e\+300"):
        jaxckpt.convert(tmp_path / "x", tmp_path / "y", dtype="float32")
    with pytest.raises(TreeMismatch, match=r"1e\+300"):
        jaxckpt.export_safetensors(tmp_path / "x", tmp_path / "y.safetensors", dtype="float32")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("x64", [False, True])
def test_a_step_keeps_its_number_without_x64(tmp_path, x64):
    """A Python number becomes a jax array only if that can hold it."""
    jaxckpt.save(tmp_path / "x", {"step": 2**40 + 1, "scale": 1e300})
    with jax.enable_x64(x64):
        like = {"step": jnp.asarray(0), "scale": jnp.asarray(0.0)}
        if x64:
            assert same(
                jax.tree.map(np.asarray, jaxckpt.restore(tmp_path / "x", like)),
                {"step": np.asarray(2**40 + 1), "scale": np.asarray(1e300)},
            )
            return
        for name, text in {"step": "1099511627777", "scale": r"1e\+300"}.items():
            with pytest.raises(TreeMismatch, match=text):
                jaxckpt.restore(tmp_path / "x", like, only=name)


@pytest.mark.parametrize("number", [2**53 + 1, np.array(2**53 + 1)])
def test_an_int_becomes_a_python_float_only_if_it_is_one(tmp_path, number):
    """2**53 does, 2**53 + 1 does not."""
    jaxckpt.save(tmp_path / "x", {"fits": number - 1, "not": number})

    assert same(jaxckpt.restore(tmp_path / "x", {"fits": 0.0}, only="fits"), {"fits": 2.0**53})
    with pytest.raises(TreeMismatch, match="9007199254740993"):
        jaxckpt.restore(tmp_path / "x", {"not": 0.0}, only="not")


def test_each_shard_is_checked(tmp_path, mesh):
    """Whatever the chunks and shards are, and however the values are stored."""
    values = np.zeros((8, 4096), np.int32)
    values[5, 4000] = 300
    split = NamedSharding(mesh, P("y", "x"))
    tree = {"w": values}
    jaxckpt.save(tmp_path / "ours", {"w": jax.device_put(values, NamedSharding(mesh, P("x")))})
    jaxckpt.convert(tmp_path / "ours", tmp_path / "plain", ocdbt=False)
    ocp.PyTreeCheckpointer().save(tmp_path / "orbax", tree)
    (tmp_path / "checkpoint_1").write_bytes(serialization.msgpack_serialize(tree))

    for path in ("ours", "plain", "orbax", "checkpoint_1"):
        for dtype in (np.int8, np.float16):
            like = jax.ShapeDtypeStruct(values.shape, dtype, sharding=split)
            if dtype == np.int8:
                with pytest.raises(TreeMismatch, match="int32 with 1 values such as 300"):
                    jaxckpt.restore(tmp_path / path, {"w": like})
            else:
                got = jaxckpt.restore(tmp_path / path, {"w": like})["w"]
                assert same(np.asarray(got), values.astype(dtype))


def test_a_manager_does_not_fall_back_from_a_cast(tmp_path):
    """It is the target that does not fit, not the step that is damaged."""
    with jaxckpt.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"n": np.array([1])})
        manager.save(2, {"n": np.array([300])}, force=True)
        manager.wait_until_finished()

        with pytest.raises(TreeMismatch, match="300"):
            manager.restore({"n": np.zeros(1, np.int8)})
        assert manager.all_steps() == [1, 2]


@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    values=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    dtype=st.sampled_from("int8 uint8 int32 uint32 float16 bfloat16 float32 float64".split()),
)
def test_an_integer_is_cast_exactly_or_not_at_all(values, dtype):
    """As Python's own numbers compare."""
    array = np.array(values, np.int64)
    with np.errstate(all="ignore"):
        wanted = array.astype(dtype_of(dtype))
    numbers = [float(n) if "float" in dtype else int(n) for n in wanted]

    if numbers == values:
        assert same(cast(array, dtype_of(dtype), leaf="w", where=""), wanted)
    else:
        with pytest.raises(TreeMismatch):
            cast(array, dtype_of(dtype), leaf="w", where="")


# --- on save ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3", "float64"])
@pytest.mark.parametrize(
    "call", [jaxckpt.save, lambda *a, **k: jaxckpt.save_async(*a, **k).result()]
)
def test_a_save_stores_floats_in_another_dtype(tmp_path, mesh, call, dtype):
    """Arrays of all kinds and shardings, as `astype` rounds them; nothing else is changed."""
    floats = {
        "split": jax.device_put(np.linspace(-3, 3, 32), NamedSharding(mesh, P("x"))),
        "numpy": np.linspace(-3, 3, 5),
        "big-endian": np.linspace(-3, 3, 5, dtype=">f4"),
        "scalar": np.float32(1.2),
        "nan": np.array([np.nan, 0.0], np.float32),
    }
    others = {"int": np.arange(3), "complex": np.ones(2, np.complex64), "float": 1.2, "text": "t"}
    jaxckpt.save(tmp_path / "as-is", floats | others)

    call(tmp_path / "x", floats | others, dtype=dtype_of(dtype))

    got = jaxckpt.restore(tmp_path / "x")
    wanted = {name: np.asarray(value).astype(dtype_of(dtype)) for name, value in floats.items()}
    assert {name: np.asarray(got[name]).tobytes() for name in floats} == {
        name: value.tobytes() for name, value in wanted.items()
    }
    assert all(np.asarray(got[name]).dtype == dtype for name in floats)
    assert got["split"].sharding.spec == P("x")
    assert same({name: got[name] for name in others}, others)
    assert jaxckpt.verify(tmp_path / "x").ok
    assert jaxckpt.open(tmp_path / "as-is").leaves["split"].dtype == "float32"


def test_a_save_refuses_to_lose_a_value(tmp_path):
    """A finite value that would become infinite, and a dtype that is no float."""
    tree = {"a": np.ones(3), "b": {"w": jnp.array([1.0, 1e30, np.inf])}}

    with pytest.raises(UnsupportedLeaf, match=r"b/w cannot be saved as float16.* such as 1.0"):
        jaxckpt.save(tmp_path / "x", tree, dtype=np.float16)
    with pytest.raises(ValueError, match="'int8' is not a floating-point dtype"):
        jaxckpt.save(tmp_path / "x", tree, dtype=np.int8)

    assert not list(tmp_path.iterdir())


FLOATS = [name for name in sorted(STORABLE_DTYPES | AS_BYTES_DTYPES) if "float" in name]
SOME = [0.0, -0.0, 1, -1, 5.5, 7, 9, 16, 20, 100, 448, 1e3, 6e4, 1e5, -1e5, 1e38, -1e38, 1e-30]
SOME += [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("wanted", FLOATS)
@pytest.mark.parametrize("saved", [*FLOATS, "bool", "int4", "int8", "uint8", "int16"])
def test_every_float_holds_what_is_cast_to_it(saved, wanted):
    """Integers stay the same, finite values finite and within the range, and others not finite."""
    if "float" in saved:
        with np.errstate(all="ignore"):
            values = np.array(SOME).astype(dtype_of(saved))
    else:
        values = np.arange(-8, 8).astype(dtype_of(saved))
        if saved not in ("bool", "int4"):
            values = np.arange(-130, 300).astype(saved)
    most = float(ml_dtypes.finfo(dtype_of(wanted)).max)
    for value in values:
        try:
            out = cast(value.reshape(1), dtype_of(wanted), leaf="w", where="here")
        except TreeMismatch:
            continue
        before, after = float(value), float(out.astype(np.float64)[0])
        if "float" not in saved:
            assert before == after
        assert np.isfinite(before) == np.isfinite(after)
        assert not np.isfinite(before) or abs(before) <= 1.1 * most
        assert before == 0 or np.sign(before) == np.sign(after) or np.isnan(after) or after == 0


def test_an_infinite_part_hides_no_other():
    with pytest.raises(TreeMismatch):
        cast(np.array([complex(1e300, np.nan)]), np.dtype("complex64"), leaf="w", where="here")
