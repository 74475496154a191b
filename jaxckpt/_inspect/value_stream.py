"""The values of saved leaves as a stream on the host, and sums over them. Needs no jax.

Arrays are read in boxes of bounded size, and worked on in blocks that a cache holds, as float64,
complex128 or the integers that they are.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, final

import numpy as np

from jaxckpt._core import box as _box
from jaxckpt._core.box import Box
from jaxckpt._disk.native import Item
from jaxckpt._disk.reader import read_leaves
from jaxckpt._disk.regions import LeafRead
from jaxckpt.format.arrays import AS_BYTES_DTYPES, MAX_UNIT_BYTES, dtype_of
from jaxckpt.format.tree import Leaf

BUDGET_BYTES: Final = 256 << 20
# What others wrote has as many chunks as its metadata say, whether they are there or not.
_READS_AT_ONCE: Final = 1 << 10
_CHUNKS_AT_ONCE: Final = 1 << 12
_BLOCK_SIZE: Final = 1 << 16  # elements
_TINIEST: Final = 5e-324
_LARGEST: Final = float(np.finfo(np.float64).max)

Values = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The array that a leaf is, or whose bytes it is.

    Attributes:
        dtype: Of the leaf; of a PRNG key that of its data.
        unit_shape: Reading a part of one takes as long as reading all of it.
        held: The values, where the metadata hold them.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    unit_shape: tuple[int, ...]
    held: Values | None = None


def data_of(leaf: Leaf) -> Data | None:
    """The array of a leaf; None of an empty container, and of what was never stored."""
    if leaf.has_array:
        stored = leaf.array
        is_other = leaf.kind != "key" and leaf.dtype in AS_BYTES_DTYPES
        dtype = dtype_of(leaf.dtype if is_other else stored.dtype)
        return Data(shape=stored.shape, dtype=dtype, unit_shape=stored.unit_shape)
    value = leaf.value
    if value is None:
        return None
    if isinstance(value, (str, bytes)):  # an integer of many digits is a str too
        held = np.frombuffer(value.encode() if isinstance(value, str) else value, np.uint8)
    else:
        held = np.asarray(value)
    return Data(shape=held.shape, dtype=held.dtype, unit_shape=held.shape, held=held)


def boxes_of(arrays: Sequence[Data], *, budget_bytes: int) -> Iterator[Box]:
    """Cuts arrays of one shape into boxes to read together, each element once.

    A box is made of whole units of each of the arrays if that does not make it large, else of those
    of one: some units of the others are then read more than once.
    """
    shape = arrays[0].shape
    itemsize = max(data.dtype.itemsize for data in arrays)
    most_bytes = min(MAX_UNIT_BYTES, budget_bytes // 4)
    units = [
        tuple(max(1, min(u, n)) for u, n in zip(d.unit_shape, shape, strict=True)) for d in arrays
    ]
    tile_shape = [math.lcm(*sides) for sides in zip(*units, strict=True)]
    if math.prod(tile_shape) * itemsize > most_bytes:
        tile_shape = list(max(units, key=math.prod))
    count = math.prod(tile_shape) // min(map(math.prod, units))
    for axis in reversed(range(len(shape))):
        room = min(most_bytes // (math.prod(tile_shape) * itemsize), _CHUNKS_AT_ONCE // count)
        more = max(1, min(room, -(-shape[axis] // tile_shape[axis])))
        tile_shape[axis] *= more
        count *= more
    everything = _box.whole(shape)
    for _, tile in _box.tile(everything, tile_shape):
        part = tile.intersect(everything)
        if part is not None:
            yield part


def read_values(
    item: Item, parts: Iterable[tuple[Leaf, Data, Box]], *, budget_bytes: int
) -> Generator[Values, None, None]:
    """Yields the values of parts of leaves, in order.

    Raises:
        CorruptCheckpoint: stored data is missing or damaged; the leaf and the file are named.
    """
    # To look up where our chunks lie takes time, so once for all; others we read in turns.
    most = None if item.ours else _READS_AT_ONCE
    parts = iter(parts)
    while some := list(islice(parts, most)):
        reads = [
            LeafRead(leaf=leaf, boxes=(box,), dtype=dtype_of(leaf.array.dtype))
            for leaf, data, box in some
            if data.held is None
        ]
        with closing(read_leaves(item, reads, budget_bytes=budget_bytes)) as buffers:
            for _, data, box in some:
                if data.held is None:
                    yield next(buffers)[box].view(data.dtype)
                else:
                    yield data.held[box.slices]


def blocks(*arrays: Values) -> Iterator[tuple[Values, ...]]:
    """Runs of equal parts of arrays of one shape, each in one dimension."""
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, _BLOCK_SIZE):
        yield tuple(array[start : start + _BLOCK_SIZE] for array in flat)


def as_numbers(values: Values) -> Values:
    """The values in a dtype that numpy calculates in, none of them changed.

    Example:
        >>> import ml_dtypes
        >>> as_numbers(np.array([1.5, -2], ml_dtypes.bfloat16))
        array([ 1.5, -2. ])
    """
    kind = values.dtype.kind
    if kind in "iu":
        return values
    if kind == "b":
        return values.view(np.uint8)
    if "int" in values.dtype.name:
        return values.astype(np.int8)
    with np.errstate(invalid="ignore"):  # of a NaN that signals
        return values.astype(np.complex128 if kind == "c" else np.float64)


def finite(values: Values) -> Values:
    """Those of `as_numbers` that are neither NaN nor infinite, as float64; magnitudes of complex.

    Example:
        >>> finite(np.array([3 + 4j, np.nan])), finite(np.array([1, 2], np.int8))
        (array([5.]), array([1., 2.]))
    """
    if values.dtype.kind in "iu":
        return values.astype(np.float64)
    is_finite = np.isfinite(values)
    if not is_finite.all():
        values = values[is_finite]
    if values.dtype.kind == "c":
        with np.errstate(over="ignore"):  # of two parts that are both about as large as can be
            return np.minimum(np.abs(values), _LARGEST)
    return values


@final
class Moments:
    """Mean, spread and norm of numbers that come in blocks, as if they came at once.

    Blocks are merged as Chan, Golub and LeVeque do it. All is kept in units of a power of two as
    large as the largest number, so that no square is too large or too small for a float64.
    """

    def __init__(self) -> None:
        self.count = 0
        self._unit, self._mean, self._spread, self._squares = _TINIEST, 0.0, 0.0, 0.0

    def add(self, values: Values) -> None:
        """Takes float64[n], all finite."""
        if not values.size:
            return
        largest = float(np.abs(values).max())
        unit = math.ldexp(1.0, math.frexp(largest)[1] - 1) if largest else _TINIEST
        scaled = values / unit
        mean = float(scaled.mean())
        away = scaled - mean
        self._merge(values.size, unit, mean, float(away @ away), float(scaled @ scaled))

    def _merge(self, count: int, unit: float, mean: float, spread: float, squares: float) -> None:
        top = max(self._unit, unit)
        mine, new = self._unit / top, unit / top
        total = self.count + count
        gap = mean * new - self._mean * mine
        self._mean = self._mean * mine + gap * (count / total)
        self._spread *= mine * mine
        self._spread += spread * new * new + gap * gap * (self.count / total) * count
        self._squares = self._squares * mine * mine + squares * new * new
        self._unit, self.count = top, total

    @property
    def mean(self) -> float | None:
        """None of no numbers at all."""
        return self._mean * self._unit if self.count else None

    @property
    def std(self) -> float | None:
        """Of all of them, not of a sample; None of no numbers at all."""
        return math.sqrt(self._spread / self.count) * self._unit if self.count else None

    @property
    def norm(self) -> float:
        """The root of the sum of the squares."""
        return math.sqrt(self._squares) * self._unit
