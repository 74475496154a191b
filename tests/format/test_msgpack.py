"""The msgpack trees of Flax and of old Orbax, intact and malicious."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as stnp

from jaxckpt.errors import CorruptCheckpoint, UnsupportedFormat
from jaxckpt.format.msgpack import Placeholder, decode, is_like_tree
from tests.golden.fixture import Golden, golden_names

msgpack = pytest.importorskip("msgpack")

# fmt: off
NUMPY = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
    "float32", "float64", "complex64", "complex128",
]
ML = [
    "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn",
    "int4", "uint4", "int2", "uint2",
]
# fmt: on


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name) if name in ML else name)


def packed(value: object) -> bytes:
    return msgpack.packb(value, use_bin_type=True)


def ext(code: int, value: object) -> Any:
    return msgpack.ExtType(code, packed(value))


def array_ext(shape: object, name: object, content: object) -> Any:
    return ext(1, [shape, name, content])


def chunked(shape: object, chunks: object) -> dict[str, object]:
    return {"__msgpack_chunked_array__": True, "shape": shape, "chunks": chunks}


def ints(*values: int) -> Any:
    return array_ext([len(values)], "int32", np.array(values, "<i4").tobytes())


def same(a: Any, b: Any) -> bool:
    """Equal in structure, types, dtypes and bits; a tuple equals the list it comes back as."""
    if isinstance(b, dict):
        return isinstance(a, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in b)
    if isinstance(b, list | tuple):
        return isinstance(a, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(b, np.ndarray | np.generic):
        kind = np.ndarray if isinstance(b, np.ndarray) else np.generic
        return (
            isinstance(a, kind)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.tobytes() == b.tobytes()
        )
    if isinstance(b, float | complex):
        return type(a) is type(b) and repr(a) == repr(b)
    return type(a) is type(b) and a == b


arrays = st.sampled_from(NUMPY).flatmap(
    lambda name: stnp.arrays(name, stnp.array_shapes(min_dims=0, max_dims=4, min_side=0))
)
leaves = st.one_of(
    arrays,
    st.sampled_from(NUMPY).flatmap(lambda name: stnp.from_dtype(np.dtype(name))),
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.complex_numbers(),
    st.text().filter(lambda s: "://" not in s and not s.startswith("//")),
    st.binary(),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.text(), st.integers(-9, 9)), inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(deadline=None)  # the first example imports Flax
@given(tree=trees)
def test_reads_what_flax_writes(tree: Any) -> None:
    """Every tree that Flax can write comes back equal, bit for bit."""
    serialization = pytest.importorskip("flax.serialization")

    got = decode(serialization.msgpack_serialize(tree, in_place=True))

    assert same(got, tree)


def test_reads_a_train_state_of_flax() -> None:
    """A tree as a training loop has it, with JAX arrays, comes back as numpy."""
    serialization = pytest.importorskip("flax.serialization")
    jnp = pytest.importorskip("jax.numpy")
    tree = {
        "params": {"w": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)},
        "opt": {"0": {"count": np.int32(3)}, "1": None, "2": {}},
        "name": "run-a",
        "z": 1 + 2j,
    }

    data = serialization.msgpack_serialize(tree)
    got = decode(data)

    assert is_like_tree(data[:8])
    assert is_like_tree(packed({0: 1.0})[:8])
    assert same(got, {**tree, "params": {"w": np.asarray(tree["params"]["w"])}})


@pytest.mark.parametrize("name", NUMPY + ML)
def test_reads_every_dtype(name: str) -> None:
    """Each dtype that JAX has comes back as itself."""
    want = np.array([[0, 1], [1, 0]]).astype(dtype_of(name))

    got = decode(packed(array_ext([2, 2], name, want.tobytes())))

    assert same(got, want)


@settings(max_examples=30, deadline=None)
@given(
    flat=stnp.arrays("int16", st.integers(1, 24)),
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=24),
)
def test_joins_chunked_arrays(flat: np.ndarray, sizes: list[int]) -> None:
    """An array that Flax cut in pieces comes back whole, at any depth of the tree."""
    cuts = [i for i in np.cumsum(sizes).tolist() if i < len(flat)]
    chunks = {
        str(i): array_ext([len(piece)], "int16", piece.tobytes())
        for i, piece in enumerate(np.split(flat, cuts))
    }
    node = chunked({"0": 1, "1": len(flat)}, chunks)

    assert same(decode(packed(node)), flat[None])
    assert same(decode(packed({"a": [{"b": node}]})), {"a": [{"b": flat[None]}]})


def test_reads_the_chunks_of_flax(limits) -> None:
    """Flax's own cutting of big arrays is undone."""
    serialization = pytest.importorskip("flax.serialization")
    limits(serialization, MAX_CHUNK_SIZE=16)
    tree = {"w": np.arange(35, dtype=np.float32).reshape(5, 7), "small": np.arange(3)}
    data = serialization.msgpack_serialize(tree)

    assert b"__msgpack_chunked_array__" in data
    assert same(decode(data), tree)


def flat(node: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """The leaves by path; empty containers and None have none."""
    if isinstance(node, dict):
        below = node.items()
    elif isinstance(node, list):
        below = enumerate(node)
    else:
        return {} if node is None else {path: node}
    return {k: v for key, child in below for k, v in flat(child, (*path, str(key))).items()}


@pytest.mark.parametrize("name", golden_names("flax-legacy"))
def test_reads_the_files_of_flax(golden: Golden, name: str) -> None:
    """Files written by Flax releases since 0.6.4 are restored value for value."""
    sample = golden(name)

    got = flat(decode((sample.path / "checkpoint_12").read_bytes()))

    assert got.keys() == sample.expected.keys()
    assert all(same(got[path], leaf) for path, leaf in sample.expected.items())


WITH_MSGPACK = [
    name
    for name in golden_names()
    if tuple(map(int, name.split("-")[1].split("."))) < (0, 5, 16) and "flax-legacy" not in name
]


@pytest.mark.parametrize("name", WITH_MSGPACK)
def test_reads_the_trees_of_old_orbax(golden: Golden, name: str) -> None:
    """The msgpack file of an Orbax item has every leaf: a value, or a placeholder of its name."""
    sample = golden(name)
    files = [path for path in sample.path.rglob("checkpoint") if path.is_file()]

    assert files
    for file in files:
        got = flat(decode(file.read_bytes()))

        # Orbax 0.5 has placeholders for empty nodes too.
        assert got.keys() >= sample.expected.keys()
        for path, leaf in got.items():
            if isinstance(leaf, Placeholder):
                # JAX of that time gave leaves of a defaultdict each other's names.
                assert leaf.name == ".".join(path) or "defaultdict" in name
            else:
                assert same(np.asarray(leaf), np.asarray(sample.expected[path]))


def test_recognises_placeholders() -> None:
    """The strings that stand for arrays stored elsewhere become objects that say so."""
    tree = {
        "a": "PLACEHOLDER://params.w",
        "b": ["AGGREGATED://b.0"],
        "c": "//GDAPlaceholder:params/w",
        "bare": "PLACEHOLDER://",
        "text": "see PLACEHOLDER://",
    }

    assert decode(packed(tree)) == {
        "a": Placeholder("params.w"),
        "b": [Placeholder("b.0")],
        "c": Placeholder("params/w"),
        "bare": Placeholder(""),
        "text": "see PLACEHOLDER://",
    }


def test_tuples_become_lists() -> None:
    """Orbax restores a tuple as a list, so the tuple extension is one too."""
    inner = ext(4, [1, "PLACEHOLDER://x"])

    got = decode(msgpack.packb({"t": msgpack.ExtType(4, packed([inner, 2.0]))}))

    assert got == {"t": [[1, Placeholder("x")], 2.0]}


def test_int_keys_stay_ints() -> None:
    """Flax writes the int keys of a dict as ints."""
    assert decode(packed({0: "a", -3: "b", "0": "c"})) == {0: "a", -3: "b", "0": "c"}


deep_list: Any = None
deep_tuple: Any = None
for _ in range(200):
    deep_list = [deep_list]
for _ in range(40):
    deep_tuple = ext(4, [deep_tuple])

HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "reserved": b"\xc1",
    "extra": packed(1) + packed(2),
    "list too long": b"\xdd" + struct.pack(">I", 2**32 - 1),
    "map too long": b"\xdf" + struct.pack(">I", 2**32 - 1),
    "string too long": b"\xdb" + struct.pack(">I", 2**32 - 1) + b"x",
    "bytes too long": b"\xc6" + struct.pack(">I", 2**32 - 1) + b"x",
    "ext too long": b"\xc9" + struct.pack(">I", 2**32 - 1) + b"\x01x",
    "many long lists": (b"\xdd" + struct.pack(">I", 50_000)) * 900 + b"\xc0" * 60_000,
    "deep": packed(deep_list),
    "deeper": b"\x91" * 100_000 + b"\xc0",
    "deep tuples": packed(deep_tuple),
    "not utf-8": b"\xa2\xff\xfe",
    "timestamp": msgpack.packb(msgpack.Timestamp(1, 1)),
    "unknown ext": packed(msgpack.ExtType(5, b"")),
    "bytes key": packed({b"k": 1}),
    "bool key": packed({True: 1}),
    "float key": packed({1.5: 1}),
    "nil key": packed({None: 1}),
    "list key": b"\x81\x91\x01\x01",
    "map key": b"\x81\x80\x01",
    "array key": b"\x81" + packed(ints(1)) + b"\x01",
    "key twice": b"\x82\xa1k\x01\xa1k\x02",
    "too few bytes": packed(array_ext([4], "int32", b"\0" * 15)),
    "too many bytes": packed(array_ext([4], "int32", b"\0" * 17)),
    "huge shape": packed(array_ext([2**40, 2**40], "float32", b"\0" * 4)),
    "shape wraps to 0": packed(array_ext([2**32, 2**32], "float32", b"")),
    "shape wraps to 1": packed(array_ext([2**64 - 1, 2**64 - 1], "uint8", b"\0")),
    "empty but huge": packed(array_ext([0, 2**63], "uint8", b"")),
    "rank 65": packed(array_ext([1] * 65, "uint8", b"\0")),
    "rank 9000": packed(array_ext([2**63] * 9000, "uint8", b"\0")),
    "negative": packed(array_ext([-1], "uint8", b"\0")),
    "two negatives": packed(array_ext([-1, -1], "uint8", b"\0")),
    "float size": packed(array_ext([1.0], "uint8", b"\0")),
    "bool size": packed(array_ext([True], "uint8", b"\0")),
    "shape is int": packed(array_ext(1, "uint8", b"\0")),
    "object dtype": packed(array_ext([1], "object", b"\0" * 8)),
    "void dtype": packed(array_ext([1], "V8", b"\0" * 8)),
    "str dtype": packed(array_ext([1], "<U2", b"\0" * 8)),
    "struct dtype": packed(array_ext([1], "i4,i4", b"\0" * 8)),
    "an ml_dtypes function": packed(array_ext([1], "finfo", b"\0" * 8)),
    "dunder dtype": packed(array_ext([1], "__class__", b"\0" * 8)),
    "dtype is int": packed(array_ext([1], 4, b"\0" * 4)),
    "content is list": packed(array_ext([1], "uint8", [0])),
    "array of two": packed(ext(1, [[1], "uint8"])),
    "array is map": packed(ext(1, {"shape": [1]})),
    "array is empty": packed(msgpack.ExtType(1, b"")),
    "array with an array as shape": packed(array_ext(ints(1), "uint8", b"\0")),
    "scalar of rank 1": packed(ext(3, [[1], "uint8", b"\0"])),
    "complex of one": packed(ext(2, [1.0])),
    "complex of strings": packed(ext(2, ["1", "2"])),
    "complex is number": packed(ext(2, 1.0)),
    "tuple is map": packed(ext(4, {})),
    "tuple is cut": packed(msgpack.ExtType(4, b"\x92\x01")),
    "no chunks": packed(chunked({"0": 1}, {})),
    "chunks missing": packed({"__msgpack_chunked_array__": True}),
    "chunks have a gap": packed(chunked({"0": 2}, {"0": ints(1), "2": ints(1)})),
    "chunks in a list": packed(chunked({"0": 2}, [ints(1), ints(1)])),
    "chunks are numbers": packed(chunked({"0": 2}, {"0": 1, "1": 2})),
    "chunks of rank 2": packed(chunked({"0": 2}, {"0": array_ext([1, 2], "int32", b"\0" * 8)})),
    "chunks of two dtypes": packed(
        chunked({"0": 2}, {"0": ints(1), "1": array_ext([1], "uint32", b"\0" * 4)})
    ),
    "chunks too short": packed(chunked({"0": 3}, {"0": ints(1), "1": ints(2)})),
    "chunks of a huge shape": packed(chunked({"0": 2**62, "1": 2**62}, {"0": ints(1)})),
    "chunks of a negative shape": packed(chunked({"0": -1, "1": -2}, {"0": ints(1, 2)})),
    "placeholder leads out": packed("PLACEHOLDER://../../etc/passwd"),
    "placeholder is absolute": packed("AGGREGATED:///etc/passwd"),
    "placeholder with a NUL": packed("PLACEHOLDER://a\0b"),
    "flax placeholder leads out": packed("//GDAPlaceholder:a/../../b"),
}


@pytest.mark.parametrize("count", [0, 1, 15, 16, 70_000])
def test_a_dict_with_names_looks_like_a_tree(count: int) -> None:
    """However many it has: msgpack writes the number in one, three or five bytes."""
    assert is_like_tree(packed({f"{i}" * 40: i for i in range(count)})[:8])
    assert is_like_tree(packed(ints(1, 2))[:8])


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"hello",
        b"\x89PNG\r\n\x1a\n",
        b"\x89HDF\r\n\x1a\n",
        b"\x80\x04\x95",
        b"PK\x03\x04",
        b"\x1f\x8b",
    ],
)
def test_other_files_do_not_look_like_a_tree(head: bytes) -> None:
    """Nothing, text, PNG, HDF5, a pickle, zip (npz, torch) and gzip."""
    assert not is_like_tree(head)


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes_are_corrupt(data: bytes) -> None:
    """Bytes that lie about themselves raise `CorruptCheckpoint`, which names the file."""
    with pytest.raises(CorruptCheckpoint, match="run/checkpoint_7") as caught:
        decode(data, file="run/checkpoint_7")

    assert caught.value.file == "run/checkpoint_7"


def sound() -> bytes:
    """One file with everything in it."""
    return msgpack.packb(
        {
            "w": array_ext([2, 3], "bfloat16", b"\0\x3f" * 6),
            "c": ext(2, [1.0, -2.0]),
            "s": ext(3, [[], "float32", b"\0\0\x80?"]),
            "t": ext(4, [1, "AGGREGATED://t.1", [None, True]]),
            "n": chunked({"0": 2, "1": 2}, {"0": ints(1, 2, 3), "1": ints(4)}),
            "p": "PLACEHOLDER://params.w",
            "d": {0: {}, "x": []},
        }
    )


@pytest.mark.parametrize("stop", range(len(sound())))
def test_truncated_bytes_are_corrupt(stop: int) -> None:
    """A file cut short at any byte raises `CorruptCheckpoint`."""
    with pytest.raises(CorruptCheckpoint):
        decode(sound()[:stop])


def decodes_or_is_corrupt(data: bytes) -> None:
    with contextlib.suppress(CorruptCheckpoint):
        decode(data)


@settings(max_examples=500, deadline=None)
@given(data=st.binary(max_size=200))
@example(data=b"\xc7\x00\xff")
@example(data=b"\xd6\xff\x00\x00\x00\x01")
def test_random_bytes_decode_or_are_corrupt(data: bytes) -> None:
    """No bytes raise anything but `CorruptCheckpoint`."""
    decodes_or_is_corrupt(data)


@settings(max_examples=500, deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(sound()) - 1), st.integers(0, 255)), min_size=1, max_size=6
    )
)
def test_damaged_bytes_decode_or_are_corrupt(edits: list[tuple[int, int]]) -> None:
    """A sound file with bytes changed decodes, or raises `CorruptCheckpoint`."""
    data = bytearray(sound())
    for at, value in edits:
        data[at] = value

    decodes_or_is_corrupt(bytes(data))


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without msgpack the error says how to get it."""
    monkeypatch.setitem(sys.modules, "msgpack", None)

    with pytest.raises(UnsupportedFormat, match="pip install msgpack"):
        decode(packed({}))


def test_importing_the_decoder_does_not_import_msgpack() -> None:
    """The library is looked for only when there is something to decode."""
    source = Path(importlib.import_module("jaxckpt.format.msgpack").__file__ or "").read_text()

    assert "\nimport msgpack" not in source
    assert "\nfrom msgpack" not in source


def test_the_library_without_its_c_extension() -> None:
    """It refuses the same: there may be no wheel for a platform."""
    twice = bytes([0x82]) + 2 * (packed("a") + packed(1))
    program = f"""
from jaxckpt.errors import CorruptCheckpoint
from jaxckpt.format.msgpack import decode
assert decode({packed({"a": {"b": 1}})!r}) == {{"a": {{"b": 1}}}}
try:
    decode({twice!r})
except CorruptCheckpoint as error:
    print(error)
"""
    env = {**os.environ, "MSGPACK_PUREPYTHON": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "a key occurs twice" in done.stdout


def test_nan_and_infinity_survive() -> None:
    """Floats that are not numbers are values like any other."""
    got = decode(packed([math.inf, math.nan, ext(2, [math.nan, -math.inf])]))

    assert repr(got) == "[inf, nan, (nan-infj)]"
