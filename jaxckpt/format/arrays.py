"""Zarr array metadata, and the bytes of one chunk.

We write zarr v3: little-endian, row-major, uncompressed or with zstd, each chunk followed by the
CRC-32C of its stored bytes (the `crc32c` codec of the specification). A chunk larger than
`MAX_UNIT_BYTES` is stored as `sharding_indexed`, as inner chunks with a checksum each, so that
reading, checking and memory use are bounded. We read v2 and v3 written by Orbax, with any codec
that TensorStore knows.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, Final

import numpy as np
from awscrt.checksums import crc32c

from jaxckpt.errors import damaged
from jaxckpt.format import jsontext, names
from jaxckpt.format.jsontext import expect, expect_shape
from jaxckpt.format.tree import Leaf, StoredArray, bad_leaf, check_grid, grid_of

MAX_UNIT_BYTES: Final = 32 << 20
CRC_BYTES: Final = 4
MAX_ZSTD_LEVEL: Final = 22
# A chunk is a device shard or a slice of one, and no job has that many devices.
_MAX_CHUNKS: Final = 1 << 20
# A prime dimension can make inner chunks small, but not smaller than this on average.
_SMALLEST_INNER_BYTES: Final = 16 << 10
_MAX_INNER: Final = 1 << 10
# Small values may be stored in the nodes of the OCDBT tree, which are compressed. jaxckpt never
# stores a value of this size there; the limit leaves room for a later release.
_PACKABLE_BYTES: Final = 64 << 10
# For other writers. A chunk is one device's part of an array, or smaller.
_MAX_CHUNK_BYTES: Final = 256 << 30
_LARGE_BYTES: Final = 1 << 30
_MAX_PADDING: Final = 64
# Arrays with more than one chunk per device have chunks of at least this size.
_SMALL_BYTES: Final = 1 << 10
_MAX_FOREIGN_CHUNKS: Final = 10**8
# Zstd stores at most 128 KiB in 4 bytes.
_MAX_RATIO: Final = 1 << 15

# TensorStore's names of the dtypes that its zarr v3 driver knows, and stores in the same bytes as
# numpy: a value of four or two bits has a byte of its own.
STORABLE_DTYPES: Final = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 "
    "complex64 complex128 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e4m3b11fnuz "
    "float8_e5m2 float8_e5m2fnuz float8_e3m4 float8_e8m0fnu int4 int2 float4_e2m1fn".split()
)
_SCALAR_KINDS: Final = frozenset("generic int float complex bool".split())
# Known to jax but not to zarr: stored as the uint8 they occupy.
AS_BYTES_DTYPES: Final = frozenset("uint4 uint2 float8_e4m3 float6_e2m3fn float6_e3m2fn".split())


@cache
def dtype_of(name: str) -> np.dtype[Any]:
    """Returns the numpy dtype of a name listed above; any other name is a ValueError."""
    if name not in STORABLE_DTYPES | AS_BYTES_DTYPES:
        raise ValueError(f"dtype {name!r} cannot be stored in a checkpoint")
    if hasattr(np, name) and name != "bool":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(np.bool_) if name == "bool" else np.dtype(getattr(ml_dtypes, name))


def bytes_of(shape: Sequence[int], dtype: str) -> int:
    """Returns the size of so many values, uncompressed."""
    return math.prod(shape) * dtype_of(dtype).itemsize


def inner_shape(
    chunk_shape: Sequence[int], itemsize: int, most_bytes: int | None = None
) -> tuple[int, ...] | None:
    """Splits a chunk into equal inner chunks of at most `most_bytes`; by default `MAX_UNIT_BYTES`.

    Returns None if the chunk is small, or if its sides only have divisors that give tiny pieces.
    Splits as few dimensions as possible, from the first on, so that an inner chunk is contiguous
    in the chunk's memory.

    Example:
        >>> inner_shape((65536, 4096), 4)
        (2048, 4096)
    """
    shape = list(chunk_shape)
    most_bytes = MAX_UNIT_BYTES if most_bytes is None else most_bytes
    if math.prod(shape) * itemsize <= most_bytes:
        return None
    while (size := math.prod(shape) * itemsize) > most_bytes:
        choices = []
        for axis, dim in enumerate(shape):
            parts = _smallest_divisor(dim, at_least=math.ceil(size / most_bytes))
            choices.append((size // parts, -axis, parts))
        # Pieces that are far too small cost more than splitting a later axis.
        good = [c for c in choices if most_bytes // 16 <= c[0] <= most_bytes]
        fitting = [c for c in choices if c[0] <= most_bytes]
        best = max(good, key=lambda c: c[1]) if good else max(fitting, default=min(choices))
        _, axis, parts = best
        shape[-axis] //= parts
    return tuple(shape) if size >= _SMALLEST_INNER_BYTES else None


def _smallest_divisor(n: int, *, at_least: int) -> int:
    """Returns the smallest divisor of `n` that is at least `at_least`, or `n`."""
    best = n
    for small in range(1, math.isqrt(n) + 1):
        if n % small == 0:
            for divisor in (small, n // small):
                if at_least <= divisor < best:
                    best = divisor
    return best


@lru_cache(maxsize=1 << 12)
def zarr3_metadata(stored: StoredArray) -> dict[str, Any]:
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    codecs: list[Any] = [little, {"name": "crc32c"}]
    if stored.zstd is not None:
        level = {"level": stored.zstd, "checksum": False}
        codecs.insert(1, {"name": "zstd", "configuration": level})
    if stored.inner_shape is not None:
        codecs = [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": list(stored.inner_shape),
                    "codecs": codecs,
                    "index_codecs": [little, {"name": "crc32c"}],
                },
            }
        ]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(stored.shape),
        "data_type": stored.dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(stored.chunk_shape)},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": codecs,
        "fill_value": _zero(stored.dtype),
    }


@lru_cache(maxsize=1 << 12)
def encode_zarr3(stored: StoredArray) -> bytes:
    """Returns the bytes of that `zarr.json`."""
    return jsontext.dumps(zarr3_metadata(stored))


def _zero(dtype: str) -> object:
    if dtype == "bool":
        return False
    if dtype.startswith("complex"):
        return [0.0, 0.0]
    return 0 if "int" in dtype else 0.0


def metadata_key(zarr_version: int) -> str:
    """Returns the key of an array's metadata, relative to the array's prefix."""
    return names.ZARR3 if zarr_version == 3 else names.ZARR2


def chunk_key(index: Sequence[int]) -> str:
    """Returns the key of a chunk relative to the array's prefix (zarr v3, default encoding)."""
    return "/".join(["c", *map(str, index)])


def decode_metadata(data: bytes, zarr_version: int, *, leaf: str, file: str) -> StoredArray:
    """Decodes `zarr.json` or `.zarray`."""
    fields = expect(jsontext.loads(data, file=file), dict, f"{leaf}: array metadata", file=file)
    shape = expect_shape(fields.get("shape"), f"{leaf}: shape", file=file)
    inner, has_fill = None, True
    if zarr_version == 2:
        has_fill = fields.get("fill_value") is not None
        dtype = _zarr2_dtype(fields.get("dtype"), leaf, file)
        chunks = expect_shape(fields.get("chunks"), f"{leaf}: chunks", file=file)
    else:
        dtype = expect(fields.get("data_type"), str, f"{leaf}: data_type", file=file)
        grid = expect(fields.get("chunk_grid"), dict, f"{leaf}: chunk_grid", file=file)
        configuration = expect(grid.get("configuration"), dict, f"{leaf}: chunk_grid", file=file)
        chunks = expect_shape(configuration.get("chunk_shape"), f"{leaf}: chunks", file=file)
        inner = _inner_of(fields.get("codecs"), leaf, file)
    if dtype not in STORABLE_DTYPES:
        raise damaged(file, f"{leaf}: unsupported dtype {dtype!r}", leaf=leaf)
    stored = StoredArray(
        shape=shape, dtype=dtype, chunk_shape=chunks, inner_shape=inner, has_fill=has_fill
    )
    check_grid(stored, where=leaf, file=file)
    return stored


# The dtypes in which a save stores Python values; other writers may use smaller ones.
PYTHON_DTYPES: Final = {
    "int": ("int64", "uint64"),
    "float": ("float64",),
    "complex": ("complex128",),
    "bool": ("bool",),
}


def leaf_problem(leaf: Leaf, stored: StoredArray) -> str | None:
    """Returns why saves never combine the leaf's kind and dtype with its array; None if they do."""
    if stored.dtype not in STORABLE_DTYPES:
        return f"unsupported array dtype {stored.dtype!r}"
    is_as_bytes = leaf.dtype in AS_BYTES_DTYPES and stored.dtype == "uint8"
    if leaf.kind != "key" and leaf.dtype != stored.dtype and not is_as_bytes:
        return f"dtype {leaf.dtype!r} is never stored as {stored.dtype!r}"
    if leaf.dtype not in PYTHON_DTYPES.get(leaf.kind, (leaf.dtype,)):
        return f"a Python {leaf.kind} is never stored as {leaf.dtype}"
    rank = {"str": 1, "bytes": 1}.get(leaf.kind, 0 if leaf.kind in _SCALAR_KINDS else None)
    if rank is not None and len(stored.shape) != rank:
        return f"a {leaf.kind} is never stored in an array of shape {stored.shape}"
    if leaf.kind in ("str", "bytes") and stored.dtype != "uint8":
        return f"a {leaf.kind} is never stored as {stored.dtype}"
    depth = len(leaf.shape)
    if leaf.kind == "key" and (
        leaf.key_impl is None
        or leaf.shape != stored.shape[:depth]
        or len(stored.shape) == depth
        or not stored.dtype.startswith("uint")
    ):
        return (
            f"{stored.dtype}{list(stored.shape)} cannot be the data of PRNG keys of shape "
            f"{list(leaf.shape)}"
        )
    if any(c > max(1, n) for n, c in zip(stored.shape, stored.chunk_shape, strict=True)):
        return f"chunks of shape {stored.chunk_shape} are larger than the array {stored.shape}"
    if math.prod(grid_of(stored.shape, stored.chunk_shape)) > _MAX_CHUNKS:
        return f"the array has more than {_MAX_CHUNKS} chunks"
    if stored.inner_shape is not None:
        size = bytes_of(stored.shape, stored.dtype)
        most = _MAX_INNER + size // _SMALLEST_INNER_BYTES
        if math.prod(grid_of(stored.shape, stored.inner_shape)) > most:
            return f"inner chunks of shape {stored.inner_shape} are too small for {size} bytes"
    return None


def check_foreign(stored: StoredArray, *, leaf: str, file: str) -> None:
    """Raises CorruptCheckpoint for an array of another writer that would crash TensorStore.

    TensorStore allocates a whole chunk before it looks at the stored data, keeps an object for each
    chunk of a read, and ends the process when it runs out of memory.
    """
    itemsize = dtype_of(stored.dtype).itemsize
    size = math.prod(stored.shape) * itemsize
    chunk_bytes = math.prod(stored.unit_shape) * itemsize
    # The index of a chunk lists all its inner chunks.
    inside = math.prod(stored.chunk_shape) // math.prod(stored.unit_shape)
    count = max(inside, math.prod(grid_of(stored.shape, stored.unit_shape)))
    # A chunk may extend past the array, but known writers use the shape of a shard.
    most_bytes = max(_LARGE_BYTES, min(_MAX_CHUNK_BYTES, _MAX_PADDING * size))
    most_chunks = _MAX_CHUNKS + min(size // _SMALL_BYTES, _MAX_FOREIGN_CHUNKS)
    problem = None
    if chunk_bytes > most_bytes:
        problem = f"{chunk_bytes} bytes per chunk, the limit is {most_bytes}"
    elif count > most_chunks:
        problem = f"{count} chunks, the limit is {most_chunks}"
    if problem:
        array = f"{stored.dtype}{list(stored.shape)} in chunks of shape {stored.unit_shape}"
        raise damaged(file, f"leaf {leaf}: {array}: {problem}", leaf=leaf)


def check_total(leaves: Sequence[tuple[Leaf, StoredArray]], *, data_bytes: int, file: str) -> None:
    """Raises CorruptCheckpoint if the arrays are larger than the data files that should hold them.

    Without this check, a damaged tree makes a reader allocate memory before it notices that the
    data is missing. Only for checkpoints of jaxckpt, which compresses only on request, besides
    values small enough for the nodes of the database.
    """
    least_bytes = 0.0  # of the data files
    distinct = {id(stored): stored for _, stored in leaves}  # leaves often share one object
    each = {key: least_stored(one, math.prod(one.shape)) for key, one in distinct.items()}
    if sum(each[key] * n for key, n in Counter(id(x) for _, x in leaves).items()) <= data_bytes:
        return
    for leaf, stored in leaves:
        least_bytes += each[id(stored)]
        if least_bytes > data_bytes:
            size = bytes_of(stored.shape, stored.dtype)
            array = f"{stored.dtype}{list(stored.shape)} needs {size} bytes"
            raise bad_leaf(leaf, file, f"{array}, but all data files together have {data_bytes}")


def least_stored(stored: StoredArray, count: int) -> float:
    """Returns the least bytes of data files that a number of values of an array can take."""
    itemsize = dtype_of(stored.dtype).itemsize
    chunk_bytes = math.prod(stored.chunk_shape) * itemsize
    # Compressed chunks may be so small that they lie in nodes, which are compressed again.
    packs = 2 if stored.zstd else int(chunk_bytes <= _PACKABLE_BYTES)
    return count * itemsize / _MAX_RATIO**packs


def has_our_codecs(data: bytes, *, file: str) -> bool:
    """Returns whether valid array metadata names the codecs that we write."""
    codecs = jsontext.loads(data, file=file)["codecs"]
    if len(codecs) == 1 and _is_sharding(codecs[0]):
        inner = codecs[0]["configuration"]
        if inner.get("index_location", "end") != "end" or not _are_ours(inner.get("index_codecs")):
            return False
        codecs = inner.get("codecs")
    return _are_ours(codecs)


def _is_sharding(codec: Any) -> bool:  # JSON
    return isinstance(codec, dict) and codec.get("name") == "sharding_indexed"


def _are_ours(codecs: Any) -> bool:  # JSON
    match codecs:
        case [{"name": "bytes", **rest}, {"name": "crc32c"}]:
            configuration = rest.get("configuration") or {}
            endian = isinstance(configuration, dict) and configuration.get("endian")
            return endian in (None, "little")
    return False


def _inner_of(codecs: object, leaf: str, file: str) -> tuple[int, ...] | None:
    for codec in expect(codecs, list, f"{leaf}: codecs", file=file):
        if _is_sharding(codec):
            configuration = expect(codec.get("configuration"), dict, f"{leaf}: codecs", file=file)
            return expect_shape(configuration.get("chunk_shape"), f"{leaf}: codecs", file=file)
    return None


_NUMPY_CODE: Final = re.compile(r"[<>|=]([biufc])(\d{1,2})")


def _zarr2_dtype(value: object, leaf: str, file: str) -> str:
    text = expect(value, str, f"{leaf}: dtype", file=file)
    if _NUMPY_CODE.fullmatch(text):
        try:
            return np.dtype(text).name
        except TypeError:
            pass
    return text


# --- one small chunk as bytes ----------------------------------------------------------------


# The CRC-32C of bytes or a contiguous array; a second argument is the checksum of the data before.
# It lets other threads run meanwhile, which google-crc32c does not, and is twice as fast.
checksum: Final[Callable[..., int]] = crc32c


def encode_chunk(values: np.ndarray[Any, Any]) -> bytes:
    """Encodes an uncompressed chunk as `zarr3_metadata` describes it."""
    data = values.tobytes()
    return data + checksum(data).to_bytes(CRC_BYTES, "little")


# The index entry of an inner chunk that was not stored.
_NOT_STORED: Final = (1 << 64) - 1


def index_bytes(stored: StoredArray) -> int:
    """Returns the size of the index at the end of a chunk that has inner chunks."""
    return 16 * math.prod(stored.chunk_shape) // math.prod(stored.unit_shape) + CRC_BYTES


def encode_index(sizes: Sequence[int]) -> bytes:
    """Encodes the index of a chunk whose inner chunks, with checksums, follow one another."""
    starts = accumulate(sizes[:-1], initial=0)
    data = np.array([*zip(starts, sizes, strict=True)], "<u8").tobytes()
    return data + checksum(data).to_bytes(CRC_BYTES, "little")


def decode_index(data: np.ndarray[Any, Any], limit: int) -> list[tuple[int, int]]:
    """Returns offset and size of each inner chunk, in order (`sharding_indexed` of zarr v3).

    Args:
        data: uint8[index_bytes].
        limit: The offset before which all inner chunks must end.

    Raises:
        ValueError: the checksum differs, or an inner chunk is missing or out of bounds.
    """
    body, crc = data[:-CRC_BYTES], int.from_bytes(data[-CRC_BYTES:].tobytes(), "little")
    if (found := checksum(body)) != crc:
        raise ValueError(f"index checksum mismatch: stored {crc:#010x}, computed {found:#010x}")
    places = [(offset, size) for offset, size in body.view("<u8").reshape(-1, 2).tolist()]
    for offset, size in places:
        if offset == _NOT_STORED or offset + size > limit:
            raise ValueError(f"inner chunk at offset {offset}, {size} bytes, is out of bounds")
    return places
