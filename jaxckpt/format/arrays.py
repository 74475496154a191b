"""Zarr array metadata, and the bytes of one chunk.

We write zarr v3: little-endian bytes, row-major, uncompressed, each chunk followed by its CRC-32C
(the `crc32c` codec of the zarr v3 specification). A chunk larger than `MAX_UNIT_BYTES` is stored as
`sharding_indexed`: inner chunks, each with its own checksum, so that reads, checks and memory go in
pieces. We read what Orbax wrote: v2 and v3, whatever codecs TensorStore knows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import google_crc32c
import numpy as np

from jaxckpt.errors import CorruptCheckpoint
from jaxckpt.format import jsontext, names
from jaxckpt.format.jsontext import expect, expect_shape
from jaxckpt.format.tree import StoredArray, check_grid

MAX_UNIT_BYTES: Final = 32 << 20
_CRC_BYTES: Final = 4

# By TensorStore's names: what its zarr v3 driver stores, and what numpy holds in the same bytes.
PLAIN_DTYPES: Final = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 "
    "complex64 complex128 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e4m3b11fnuz "
    "float8_e5m2 float8_e5m2fnuz float8_e3m4 float8_e8m0fnu".split()
)
# Four and two bits in a byte each; how the spare bits are set is TensorStore's business.
PACKED_DTYPES: Final = frozenset("int4 int2 float4_e2m1fn".split())
STORABLE_DTYPES: Final = PLAIN_DTYPES | PACKED_DTYPES
# jax has these and zarr does not: stored as the uint8 they occupy.
AS_BYTES_DTYPES: Final = frozenset("uint4 uint2 float8_e4m3 float6_e2m3fn float6_e3m2fn".split())


def dtype_of(name: str) -> np.dtype[Any]:
    """The numpy dtype of one of the names above.

    Raises:
        ValueError: the name is none of them.
    """
    if name not in STORABLE_DTYPES | AS_BYTES_DTYPES:
        raise ValueError(f"{name!r} is no dtype that a checkpoint holds")
    if hasattr(np, name) and name != "bool":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(np.bool_) if name == "bool" else np.dtype(getattr(ml_dtypes, name))


def inner_shape(chunk_shape: Sequence[int], itemsize: int) -> tuple[int, ...] | None:
    """Splits a chunk into equal inner chunks of at most `MAX_UNIT_BYTES`, or None if it is small.

    Splits as few dimensions as it can, the first ones first, so that an inner chunk is one run of
    the chunk's memory.

    Example:
        >>> inner_shape((65536, 4096), 4)
        (2048, 4096)
    """
    shape = list(chunk_shape)
    if math.prod(shape) * itemsize <= MAX_UNIT_BYTES:
        return None
    while (size := math.prod(shape) * itemsize) > MAX_UNIT_BYTES:
        choices = []
        for axis, dim in enumerate(shape):
            parts = _smallest_divisor(dim, at_least=math.ceil(size / MAX_UNIT_BYTES))
            choices.append((size // parts, -axis, parts))
        # Pieces that are much too small cost more than a split of a later axis.
        good = [c for c in choices if MAX_UNIT_BYTES // 16 <= c[0] <= MAX_UNIT_BYTES]
        _, axis, parts = max(good, key=lambda c: c[1]) if good else _closest(choices)
        shape[-axis] //= parts
    return tuple(shape)


def _closest(choices: list[tuple[int, int, int]]) -> tuple[int, int, int]:
    fitting = [c for c in choices if c[0] <= MAX_UNIT_BYTES]
    return max(fitting) if fitting else min(choices)


def _smallest_divisor(n: int, *, at_least: int) -> int:
    """The smallest divisor of `n` that is `at_least` that large; `n` itself if none is."""
    best = n
    for small in range(1, math.isqrt(n) + 1):
        if n % small == 0:
            for divisor in (small, n // small):
                if at_least <= divisor < best:
                    best = divisor
    return best


def zarr3_metadata(stored: StoredArray) -> dict[str, Any]:
    """The `zarr.json` of an array that we write."""
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    codecs: list[Any] = [little, {"name": "crc32c"}]
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


def _zero(dtype: str) -> object:
    if dtype == "bool":
        return False
    if dtype.startswith("complex"):
        return [0.0, 0.0]
    return 0 if "int" in dtype else 0.0


def metadata_key(zarr_version: int) -> str:
    """The key, under an array's prefix, that holds its metadata."""
    return names.ZARR3 if zarr_version == 3 else names.ZARR2


def chunk_key(index: Sequence[int]) -> str:
    """The key of a chunk under an array's prefix, as we write it (zarr v3, default encoding)."""
    return "/".join(["c", *map(str, index)])


def decode_metadata(data: bytes, zarr_version: int, *, leaf: str, file: str) -> StoredArray:
    """Reads `zarr.json` or `.zarray`.

    Raises:
        CorruptCheckpoint: it does not describe an array that a leaf can be.
    """
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
        raise CorruptCheckpoint(
            f"{file}: {leaf}: no leaf has the dtype {dtype!r}", leaf=leaf, file=file
        )
    stored = StoredArray(
        shape=shape, dtype=dtype, chunk_shape=chunks, inner_shape=inner, has_fill=has_fill
    )
    check_grid(stored, where=leaf, file=file)
    return stored


def _inner_of(codecs: object, leaf: str, file: str) -> tuple[int, ...] | None:
    for codec in expect(codecs, list, f"{leaf}: codecs", file=file):
        if isinstance(codec, Mapping) and codec.get("name") == "sharding_indexed":
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


def encode_chunk(values: np.ndarray[Any, Any]) -> bytes:
    """A chunk as our `zarr3_metadata` describes it, for the dtypes of `PLAIN_DTYPES`."""
    data = values.tobytes()
    return data + google_crc32c.value(data).to_bytes(_CRC_BYTES, "little")


def decode_chunk(
    data: bytes, shape: Sequence[int], dtype: np.dtype[Any], *, leaf: str, file: str
) -> np.ndarray[Any, Any]:
    """The values of a chunk that `encode_chunk` wrote, as a read-only array.

    Raises:
        CorruptCheckpoint: wrong length, or the checksum differs.
    """
    wanted = math.prod(shape) * dtype.itemsize + _CRC_BYTES
    if len(data) != wanted:
        raise CorruptCheckpoint(
            f"{file}: leaf {leaf}: a chunk has {len(data)} bytes, wanted {wanted}",
            leaf=leaf,
            file=file,
        )
    body, stored = data[:-_CRC_BYTES], int.from_bytes(data[-_CRC_BYTES:], "little")
    if (found := google_crc32c.value(body)) != stored:
        raise CorruptCheckpoint(
            f"{file}: leaf {leaf}: checksum mismatch in a chunk: stored {stored:#010x}, "
            f"computed {found:#010x}. The file is damaged; restore an older checkpoint.",
            leaf=leaf,
            file=file,
        )
    return np.frombuffer(body, dtype).reshape(shape)
