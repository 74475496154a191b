"""`Checkpoint.statistics` agrees with numpy on the whole array, but needs little memory."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._core.box import whole
from jaxckpt._disk.find import find
from jaxckpt._disk.item import open_tree
from jaxckpt._inspect.value_stream import Data, Moments, as_numbers, boxes_of, statistics
from jaxckpt.storage import locate
from tests.strategies import host_arrays, random_bits, shapes

ROOT = Path(__file__).parents[2]


def check(told, values):
    """Compares statistics with what numpy says of the whole array."""
    numbers = as_numbers(values.reshape(-1))
    good = numbers[np.isfinite(numbers)]
    sizes = np.abs(good) if good.dtype.kind == "c" else good
    assert told.size == values.size
    assert told.nan == np.count_nonzero(np.isnan(numbers))
    assert told.inf == np.count_nonzero(np.isinf(numbers))
    assert told.zeros == np.count_nonzero(numbers == 0)
    if not good.size:
        assert (told.min, told.max, told.mean, told.std, told.norm) == (None,) * 4 + (0.0,)
        return
    # Without a square that is too large, or that vanishes.
    top = float(np.abs(sizes.astype(np.float64)).max()) or 1.0
    scaled = sizes.astype(np.longdouble) / np.longdouble(top)
    assert (told.min, told.max) == (sizes.min().item(), sizes.max().item())
    assert math.isclose(told.mean / top, float(scaled.mean()), abs_tol=1e-12)
    assert math.isclose(told.std / top, float(scaled.std()), abs_tol=1e-7)
    norm = float(np.sqrt((scaled * scaled).sum()))
    assert math.isclose(told.norm / top, norm, rel_tol=1e-12) or told.norm == math.inf


@given(st.lists(host_arrays(), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_statistics_are_those_of_the_whole_array(arrays):
    """For every dtype and bit pattern, they equal numpy's on the whole array."""
    tree = {str(i): array for i, array in enumerate(arrays)}
    with tempfile.TemporaryDirectory() as folder:
        jaxckpt.save(f"{folder}/a", tree)
        told = jaxckpt.open(f"{folder}/a").statistics()

    assert list(told) == list(tree)
    for path, array in tree.items():
        check(told[path], array)


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=50),
    st.data(),
)
def test_moments_do_not_depend_on_the_blocks(values, data):
    """For any division into blocks, and for large and small squares."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    numbers = np.array(values)
    moments = Moments()

    for block in np.split(numbers, cuts):
        moments.add(block)

    top = float(np.abs(numbers).max()) or 1.0
    scaled = numbers.astype(np.longdouble) / np.longdouble(top)
    assert moments.count == len(values)
    assert math.isclose(moments.mean / top, float(scaled.mean()), abs_tol=1e-12)
    assert math.isclose(moments.std / top, float(scaled.std()), abs_tol=1e-7)


@given(st.data())
def test_boxes_cover_an_array_once(data):
    """For any two layouts; no box takes more than a unit, or a part of the budget."""
    shape = data.draw(shapes(max_side=9))
    units = [tuple(data.draw(st.integers(1, n + 1)) for n in shape) for _ in range(2)]
    budget = data.draw(st.sampled_from([64, 256, 1 << 20]))
    arrays = [Data(shape=shape, dtype=np.dtype(np.float32), unit_shape=unit) for unit in units]
    seen = np.zeros(shape, int)

    for box in boxes_of(arrays, budget_bytes=budget):
        seen[box.slices] += 1
        assert box.size * 4 <= max(budget // 4, *(math.prod(unit) * 4 for unit in units))

    assert (seen == 1).all()


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float8_e4m3fn", "int4", "uint4", "bool", "complex64"]
)
def test_jax_arrays_of_every_sort_are_described(tmp_path, dtype):
    """Also of dtypes that numpy does not calculate in."""
    values = random_bits((300,), np.dtype(getattr(ml_dtypes, dtype, dtype)), 0)
    jaxckpt.save(tmp_path / "a", {"w": jnp.asarray(values)})

    check(jaxckpt.open(tmp_path / "a").statistics()["w"], values)


def test_only_numbers_are_described(tmp_path):
    """Texts and empty containers are not; PRNG keys are by their data, Python numbers are."""
    key = jax.random.split(jax.random.key(3), 4)
    text = {"s": "text", "long": "long" * 50_000, "b": b"bytes", "none": None, "huge": 10**30}
    jaxckpt.save(tmp_path / "a", {**text, "empty": {}, "key": key, "i": -7, "f": 2.5})

    told = jaxckpt.open(tmp_path / "a").statistics()

    assert set(told) == {"key", "i", "f"}
    check(told["key"], np.asarray(jax.random.key_data(key)))
    assert (told["i"].min, told["f"].max) == (-7, 2.5)


def test_large_integers_are_exact(tmp_path):
    """Least and largest values that float64 does not hold."""
    values = np.array([2**64 - 1, 2**63 + 1], np.uint64)
    jaxckpt.save(tmp_path / "a", values)

    told = jaxckpt.open(tmp_path / "a").statistics()[""]

    assert (told.min, told.max) == (2**63 + 1, 2**64 - 1)


def test_a_part_is_described(tmp_path):
    """A part of the tree, or the leaves that match globs; a glob without a match is refused."""
    jaxckpt.save(tmp_path / "a", {"x": {"w": np.ones(3), "b": np.zeros(2)}, "y": np.ones(1)})
    ckpt = jaxckpt.open(tmp_path / "a")

    assert set(ckpt["x"].statistics()) == {"w", "b"}
    assert set(ckpt.statistics(only="x", skip="*/b")) == {"x/w"}
    with pytest.raises(ValueError, match=r"only 'z' matches no leaf"):
        ckpt.statistics(only="z")


def test_a_replaced_checkpoint_is_not_described(tmp_path):
    """The opened checkpoint no longer exists."""
    jaxckpt.save(tmp_path / "a", {"w": np.ones(3)})
    ckpt = jaxckpt.open(tmp_path / "a")
    jaxckpt.save(tmp_path / "a", {"w": np.zeros(3)}, overwrite=True)

    with pytest.raises(jaxckpt.CheckpointNotFound, match="replaced"):
        ckpt.statistics()


def test_damage_is_told(tmp_path):
    """A flipped byte is an error that names the leaf, not a statistic."""
    jaxckpt.save(tmp_path / "a", {"w": np.arange(1 << 18, dtype=np.float32)})
    file = max((tmp_path / "a" / "state" / "d").iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

    with pytest.raises(jaxckpt.CorruptCheckpoint) as caught:
        jaxckpt.open(tmp_path / "a").statistics()
    assert caught.value.leaf == "w"


def test_memory_is_bounded(ram_path, mesh):
    """An array of many times the budget takes no more than the budget and a chunk."""
    array = jax.device_put(
        np.ones((8, 2 << 20), np.float32), NamedSharding(mesh, P(("x", "y")))
    )  # 64 MiB, in chunks of 8
    jaxckpt.save(ram_path / "a", {"w": array})
    item = open_tree(find(*locate(ram_path / "a")), "state")

    tracemalloc.start()
    told = statistics(item, item.tree.leaves, budget_bytes=16 << 20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert told["w"].norm == math.sqrt(16 << 20)
    assert peak < 28 << 20


def test_a_large_tensor_is_read_in_parts(tmp_path):
    """A file of safetensors has no chunks; 256 MiB of zeros, which take no space."""
    header = {"w": {"dtype": "F32", "shape": [8, 8 << 20], "data_offsets": [0, 256 << 20]}}
    text = json.dumps(header).encode()
    file = tmp_path / "a.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + (256 << 20))
    item = open_tree(find(*locate(file)))

    tracemalloc.start()
    told = statistics(item, item.tree.leaves, budget_bytes=128 << 20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert told["w"].zeros == 64 << 20
    assert peak < 192 << 20


def test_it_needs_no_jax(tmp_path):
    """Neither statistics nor a diff imports it."""
    jaxckpt.save(tmp_path / "a", {"w": np.ones(3), "key": jax.random.key(0)})
    code = (
        "import sys, jaxckpt\n"
        f"assert jaxckpt.open({str(tmp_path / 'a')!r}).statistics()['w'].norm > 1\n"
        f"assert jaxckpt.diff({str(tmp_path / 'a')!r}, {str(tmp_path / 'a')!r}).equal\n"
        "assert 'jax' not in sys.modules\n"
    )

    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_whole_is_what_a_scalar_is(tmp_path):
    """A bare number is a tree of one leaf, and an empty array has no finite value."""
    jaxckpt.save(tmp_path / "a", np.float32(-2))
    jaxckpt.save(tmp_path / "b", {"w": np.zeros((0, 3))})

    (bare,) = jaxckpt.open(tmp_path / "a").statistics().values()
    (empty,) = jaxckpt.open(tmp_path / "b").statistics().values()

    assert (bare.size, bare.min, bare.std) == (whole(()).size, -2.0, 0.0)
    assert (empty.size, empty.min, empty.norm) == (0, None, 0.0)
