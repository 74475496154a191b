"""Guards in the reader of our chunks, each against a fault that it once had."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.extend.random import define_prng_impl, threefry_prng_impl

import jaxckpt
from jaxckpt._core.plan import _plan_few, plan_chunks
from jaxckpt.errors import CorruptCheckpoint, UnsupportedFormat
from jaxckpt.format import arrays, names
from jaxckpt.format.tree import StoredArray
from tests.disk.test_chunks_damage import VALUES, hand_made, lying_tree
from tests.twins import watched


@pytest.mark.parametrize("verb", [jaxckpt.restore, jaxckpt.verify])
def test_inner_chunks_without_number_take_no_memory(tmp_path, verb):
    """A tree that claims inner chunks of one element is refused before they are planned."""
    noise = np.random.default_rng(0).integers(0, 255, 1 << 16, np.uint8)
    jaxckpt.save(tmp_path / "x", {"w": np.zeros(1000, np.uint8), "z": noise})
    lying_tree(tmp_path / "x", shape=[1 << 16], chunk=[1 << 14], inner=[1])
    _plan_few.cache_clear()
    tracemalloc.start()

    with contextlib.suppress(CorruptCheckpoint):
        verb(tmp_path / "x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    _plan_few.cache_clear()

    assert peak < 8 << 20


@pytest.mark.parametrize("inner", [(6000,), (2000,)], ids=str)
def test_inner_chunks_that_do_not_divide_their_chunk_are_corrupt(tmp_path, inner):
    """Larger than it, or no divisor: CorruptCheckpoint, not ZeroDivisionError."""
    shape = (3000,)
    stored = StoredArray(shape=shape, dtype="float32", chunk_shape=shape, inner_shape=inner)
    chunk = arrays.encode_chunk(VALUES)
    hand_made(tmp_path / "x", arrays.zarr3_metadata(stored), chunk, inner=list(inner))

    with pytest.raises(CorruptCheckpoint):
        jaxckpt.restore(tmp_path / "x")
    assert not jaxckpt.verify(tmp_path / "x").ok


def test_another_codec_than_ours_is_not_read_as_ours(tmp_path):
    """Big-endian chunks, as the array's metadata say: their values, or an error; not others."""
    stored = StoredArray(shape=(3000,), dtype="float32", chunk_shape=(3000,))
    metadata = json.loads(json.dumps(arrays.zarr3_metadata(stored)).replace("little", "big"))
    hand_made(tmp_path / "x", metadata, arrays.encode_chunk(VALUES.byteswap()))

    try:
        got = jaxckpt.restore(tmp_path / "x")["w"]
    except CorruptCheckpoint:
        return

    assert np.array_equal(got, VALUES)


LEAVES = {f"{i:02}": np.full(100_000, i, np.float32) for i in range(50)}


@pytest.fixture
def damaged(tmp_path):
    """20 MB in 50 leaves, a bit of the first one flipped, and a key before them."""
    jaxckpt.save(tmp_path / "bad", {"a": {"key": jax.random.key(0)}, "b": LEAVES})
    file = max((tmp_path / "bad/state/d").iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    file.write_bytes(data)
    return tmp_path / "bad"


@pytest.fixture
def no_collection():
    """Only what nothing refers to is freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def test_a_failed_restore_keeps_no_buffers(damaged, no_collection):
    """Buffers read ahead are freed with the error, not by garbage collection (also slow path)."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]

    with pytest.raises(CorruptCheckpoint) as caught:
        jaxckpt.restore(damaged)
    del caught
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()

    assert kept < 4 << 20


def test_an_error_after_the_read_leaves_no_threads(tmp_path, no_collection):
    """A leaf that jax refuses (here a key's implementation) ends the reading of the others."""
    known = threefry_prng_impl
    parts = {name: getattr(known, name) for name in known._fields if name not in ("name", "tag")}
    unknown = define_prng_impl(**parts, name="of another program", tag="other")
    key = jax.random.key(0, impl=unknown)
    jaxckpt.save(tmp_path / "x", {"a": {"key": key}, "b": LEAVES})

    with pytest.raises(UnsupportedFormat, match="implementation 'other'") as caught:
        jaxckpt.restore(tmp_path / "x")

    assert not [t.name for t in threading.enumerate() if t.name.startswith("jaxckpt-read")]
    del caught  # which has been keeping what its traceback refers to


def test_no_plans_are_kept_without_bound(tmp_path):
    """Data that a restore caches for 30 leaves of 1,000 chunks is freed afterwards."""
    _plan_few.cache_clear()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]

    for n in range(1, 31):
        plan_chunks((1, n), (jaxckpt._core.box.whole((1000, n)),))
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    _plan_few.cache_clear()

    assert kept < 8 << 20


def test_verify_looks_through_the_database_a_few_times(tmp_path):
    """Not once for each bad leaf: of 5,000 in a lost file that takes minutes."""
    jaxckpt.save(tmp_path / "x", {f"{i:03}": np.full(2000, i) for i in range(60)})
    file = max((tmp_path / "x/state/d").iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    for i in range(60):
        data[i * 16_004] ^= 1
    file.write_bytes(data)
    read = []

    report = jaxckpt.verify(watched(tmp_path / "x", lambda *call: read.append(call)))

    assert len({p.leaf for p in report.problems} - {None}) == 60
    assert 0 < read.count(("read", f"{tmp_path}/x/state/{names.OCDBT_MANIFEST}")) < 10


def test_a_restore_works_while_the_interpreter_ends(tmp_path):
    """In an `atexit` function, as it did when TensorStore read everything."""
    jaxckpt.save(tmp_path / "x", {"w": VALUES})
    script = f"""
import atexit, jaxckpt
path = {str(tmp_path / "x")!r}
jaxckpt.restore(path)
atexit.register(lambda: print(jaxckpt.restore(path, as_numpy=True)["w"].sum()))
"""
    root = Path(__file__).parents[2]

    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(root)},
    )

    assert float(done.stdout or "nan") == VALUES.sum(), done.stderr


def test_array_metadata_that_are_no_json_name_the_leaf(tmp_path):
    """Else `verify` takes the whole item for unreadable, and says nothing of the other leaves."""
    stored = StoredArray(shape=(3000,), dtype="float32", chunk_shape=(3000,))
    hand_made(tmp_path / "good", arrays.zarr3_metadata(stored), arrays.encode_chunk(VALUES))
    hand_made(tmp_path / "x", b"{", arrays.encode_chunk(VALUES))

    with pytest.raises(CorruptCheckpoint) as caught:
        jaxckpt.restore(tmp_path / "x")

    assert jaxckpt.verify(tmp_path / "good").ok
    assert caught.value.leaf == "w"
