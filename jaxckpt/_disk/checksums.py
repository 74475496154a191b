"""Keeps the checksums of all chunks of an item in one file, whose digest is in the record.

A chunk ends with its own CRC-32C, so it passes wherever a chunk of its size is expected. The file
shows whether it was written in that place, and not elsewhere or by another process or save. It has
a little-endian uint32 for each chunk (or inner chunk): leaves in order, and each leaf in C order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, product
from typing import Any, Final

import numpy as np

from jaxckpt.format.arrays import CRC_BYTES, chunk_key, decode_index, index_bytes
from jaxckpt.format.tree import Leaf, StoredArray, grid_of
from jaxckpt.storage import corrupt

_SUM: Final = np.dtype("<u4")
_CHUNK_KEY: Final = re.compile(r"(.*?)c((?:/\d+)*)", re.DOTALL)  # see `chunk_key`
_ANYWHERE: Final = 1 << 62  # no limit on offsets: only TensorStore knows how large the chunk is

Sums = np.ndarray[Any, np.dtype[np.uint32]]


def starts_of(arrays: Iterable[StoredArray]) -> Iterator[int]:
    """Yields the index of each array's first checksum in the file; last, their total number."""
    arrays = list(arrays)
    distinct = {id(stored): stored for stored in arrays}  # alike arrays often share one
    count = {key: math.prod(grid_of(x.shape, x.unit_shape)) for key, x in distinct.items()}
    return accumulate(map(count.__getitem__, map(id, arrays)), initial=0)


def units_in(stored: StoredArray, index: Sequence[int]) -> list[int]:
    """Returns the numbers of a chunk's inner chunks in C order, or its own if it has none."""
    grid, units = grid_of(stored.shape, stored.unit_shape), [0]
    for n, at, chunk, unit in zip(grid, index, stored.chunk_shape, stored.unit_shape, strict=True):
        count = chunk // unit
        units = [outer * n + at * count + i for outer in units for i in range(count)]
    return units


def units_by_key(
    leaves: Iterable[Leaf], keys: Iterable[str]
) -> Iterator[tuple[str, StoredArray, list[int]]]:
    """Yields each key of a chunk, its array, and the numbers of the chunk and its inner chunks."""
    stored = {leaf.prefix: leaf.array for leaf in leaves if leaf.has_array}
    starts = dict(zip(stored, starts_of(stored.values()), strict=False))
    for match in filter(None, map(_CHUNK_KEY.fullmatch, keys)):
        prefix, index = match.groups()
        if prefix in stored:
            found = units_in(stored[prefix], [int(n) for n in index.split("/")[1:]])
            yield match[0], stored[prefix], [starts[prefix] + unit for unit in found]


# --- saving ----------------------------------------------------------------------------------


def units_of(
    stored: StoredArray, values: np.ndarray[Any, Any]
) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Yields the bytes of a chunk, or of each of its inner chunks, from its values."""
    starts = [
        range(0, chunk, unit)
        for chunk, unit in zip(stored.chunk_shape, stored.unit_shape, strict=True)
    ]
    for start in product(*starts):
        box = zip(start, stored.unit_shape, strict=True)
        part = values[tuple(slice(at, at + n) for at, n in box)]
        if part.shape != stored.unit_shape:  # at the edge, zarr pads with zeros
            whole = np.zeros(stored.unit_shape, values.dtype)
            whole[tuple(map(slice, part.shape))] = part
            part = whole
        yield np.ascontiguousarray(part).reshape(-1).view(np.uint8)


# --- reading ---------------------------------------------------------------------------------


def decode(
    leaves: Sequence[Leaf], data: bytes, *, file: str, before: int | None = None
) -> dict[str, Sums]:
    """Returns the checksums that each leaf's chunks were written with, by prefix, in C order.

    Args:
        before: How many checksums of other leaves precede. If None, these are all leaves.
    """
    stored = {leaf.prefix: leaf.array for leaf in leaves if leaf.has_array}
    starts, first = [*starts_of(stored.values())], CRC_BYTES * (before or 0)
    size = starts[-1] * CRC_BYTES
    if len(data) != size if before is None else len(data) < first + size:
        raise corrupt(file, f"has {len(data)} bytes, expected {first + size}")
    sums = np.frombuffer(data, _SUM, offset=first)
    return {prefix: sums[a:b] for prefix, (a, b) in zip(stored, pairwise(starts), strict=True)}


def stored_sums(
    reader: Any,  # a `Reader` of storage._arrays
    leaf: Leaf,
    chunks: Mapping[tuple[int, ...], Iterable[int]],
) -> list[list[int]]:
    """Reads the checksum stored at the end of each chunk, or of some of its inner chunks.

    Args:
        chunks: By the index of the chunk, which of its inner chunks in C order.

    Raises:
        ValueError, OSError: a chunk is missing or too short, or cannot be read.
    """
    stored = leaf.array
    size = CRC_BYTES if stored.inner_shape is None else index_bytes(stored)
    keys = [leaf.prefix + chunk_key(index) for index in chunks]
    tails = reader.values([(key, slice(-size, None)) for key in keys])
    found = []
    for key, inner, tail in zip(keys, chunks.values(), tails, strict=True):
        data = np.frombuffer(_sized(key, tail, size), np.uint8)
        if stored.inner_shape is None:
            found.append(data.view(_SUM).tolist())
            continue
        try:
            ends = [offset + n for offset, n in decode_index(data, _ANYWHERE)]
        except ValueError as error:
            raise ValueError(f'chunk "{key}": {error}') from error
        sums = reader.values([(key, slice(ends[i] - CRC_BYTES, ends[i])) for i in inner])
        found.append([int.from_bytes(_sized(key, one, CRC_BYTES), "little") for one in sums])
    return found


def _sized(key: str, data: bytes | None, size: int) -> bytes:
    if data is None or len(data) != size:
        raise ValueError(f'chunk "{key}" is missing or too short')
    return data
