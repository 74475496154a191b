"""Reads the values of saved leaves as a stream on the host, and sums over them. Needs no jax.

Arrays are read in boxes of bounded size, and processed in blocks that fit into a cache, as float64,
complex128 or their own integer dtype.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np

from jaxckpt._core.box import Box, cut, whole, widened
from jaxckpt._disk.chunks import LeafRead, Values, layout_of
from jaxckpt._disk.native import Item
from jaxckpt._disk.reader import CHUNKS_AT_ONCE, read_stream
from jaxckpt.format.arrays import AS_BYTES_DTYPES, MAX_UNIT_BYTES, dtype_of
from jaxckpt.format.tree import Leaf
from jaxckpt.types import LeafStatistics

BUDGET_BYTES: Final = 256 << 20
_BLOCK_SIZE: Final = 1 << 16  # elements
_TINIEST: Final = 5e-324
_LARGEST: Final = float(np.finfo(np.float64).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The array of a leaf, or the bytes of its text."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # of the leaf; for a PRNG key, of its data
    unit_shape: tuple[int, ...]  # the smallest box that can be read
    inline: Values | None = None  # the values, if the metadata has them


def data_of(leaf: Leaf) -> Data | None:
    """Returns the array of a leaf; None for an empty container and a leaf without a value."""
    if leaf.has_array:
        stored = leaf.array
        is_other = leaf.kind != "key" and leaf.dtype in AS_BYTES_DTYPES
        dtype = dtype_of(leaf.dtype if is_other else stored.dtype)
        return Data(shape=stored.shape, dtype=dtype, unit_shape=stored.unit_shape)
    value = leaf.value
    if value is None:
        return None
    if isinstance(value, (str, bytes)):  # an integer of many digits is a str too
        inline = np.frombuffer(value.encode() if isinstance(value, str) else value, np.uint8)
    else:
        inline = np.asarray(value)
    return Data(shape=inline.shape, dtype=inline.dtype, unit_shape=inline.shape, inline=inline)


def is_text(leaf: Leaf) -> bool:
    """Returns whether a leaf has characters or bytes, not numbers."""
    return leaf.kind in ("str", "bytes") or isinstance(leaf.value, (str, bytes))


def boxes_of(arrays: Sequence[Data], *, budget_bytes: int) -> Iterator[Box]:
    """Cuts arrays of one shape into boxes to read together, each element once.

    A box consists of whole units of every array unless it becomes too large; then of whole units of
    one array, and some units of the others are read more than once.
    """
    shape = arrays[0].shape
    itemsize = max(data.dtype.itemsize for data in arrays)
    most_bytes = min(MAX_UNIT_BYTES, budget_bytes // 4)
    units = [
        tuple(max(1, min(u, n)) for u, n in zip(d.unit_shape, shape, strict=True)) for d in arrays
    ]
    tile_shape = tuple(math.lcm(*sides) for sides in zip(*units, strict=True))
    if math.prod(tile_shape) * itemsize > most_bytes:
        tile_shape = max(units, key=math.prod)
    size = math.prod(tile_shape)
    count = size // min(map(math.prod, units))
    most = min(most_bytes // (size * itemsize), CHUNKS_AT_ONCE // count)
    return cut(whole(shape), widened(tile_shape, shape, most))


def read_values(
    item: Item, parts: Iterable[tuple[Leaf, Data, Box]], *, budget_bytes: int
) -> Generator[tuple[Leaf, Values], None, None]:
    """Yields the values of parts of leaves, in order."""

    def reads() -> Iterator[tuple[tuple[Leaf, Data], LeafRead | Values]]:
        for leaf, data, box in parts:
            if data.inline is not None:
                yield (leaf, data), data.inline[box.slices]
            else:
                dtype = dtype_of(leaf.array.dtype)
                yield (leaf, data), LeafRead(leaf, layout_of(leaf.array, (box,), dtype))

    with closing(read_stream(item, reads(), budget_bytes=budget_bytes)) as stream:
        for (leaf, data), values in stream:
            yield leaf, values.view(data.dtype)
            del values  # so that its memory is free before the next part is read


def blocks(*arrays: Values) -> Iterator[tuple[Values, ...]]:
    """Yields one-dimensional blocks of arrays of one shape, the same part of each."""
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, _BLOCK_SIZE):
        yield tuple(array[start : start + _BLOCK_SIZE] for array in flat)


def as_numbers(values: Values) -> Values:
    """Returns the same values in a dtype that numpy can calculate with.

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
    with np.errstate(invalid="ignore"):  # for signalling NaNs
        return values.astype(np.complex128 if kind == "c" else np.float64)


def finite(values: Values) -> Values:
    """Returns the finite values as float64; the magnitudes of complex numbers.

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
        with np.errstate(over="ignore"):  # if both parts are near the largest float64
            return np.minimum(np.abs(values), _LARGEST)
    return values


@final
class Moments:
    """Accumulates mean, spread and norm of numbers that come in blocks.

    Blocks are merged by the method of Chan, Golub and LeVeque. The sums are kept in units of a
    power of two near the largest number, so that squares neither overflow nor underflow.
    """

    def __init__(self) -> None:
        self.count = 0
        self._unit, self._mean, self._spread, self._squares = _TINIEST, 0.0, 0.0, 0.0

    def add(self, values: Values) -> None:
        """Adds float64[n], all finite."""
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
        return self._mean * self._unit if self.count else None

    @property
    def std(self) -> float | None:
        """Returns the population standard deviation; None without any numbers."""
        return math.sqrt(self._spread / self.count) * self._unit if self.count else None

    @property
    def norm(self) -> float:
        """Returns the square root of the sum of squares."""
        return math.sqrt(self._squares) * self._unit


# --- statistics ------------------------------------------------------------------------------


def statistics(
    item: Item, leaves: Sequence[Leaf], *, budget_bytes: int = BUDGET_BYTES
) -> dict[str, LeafStatistics]:
    """Describes the numeric leaves, by path.

    Args:
        budget_bytes: Memory to use; a larger chunk is read alone.
    """
    wanted = {
        leaf.text: (leaf, data)
        for leaf in leaves
        if not is_text(leaf) and (data := data_of(leaf)) is not None
    }
    tallies = {path: _Tally() for path in wanted}

    def parts() -> Iterator[tuple[Leaf, Data, Box]]:
        for leaf, data in wanted.values():
            for box in boxes_of([data], budget_bytes=budget_bytes):
                yield leaf, data, box

    with closing(read_values(item, parts(), budget_bytes=budget_bytes)) as stream:
        for leaf, values in stream:
            for (block,) in blocks(values):
                tallies[leaf.text].add(as_numbers(block))
    return {path: tally.result(path) for path, tally in tallies.items()}


@final
class _Tally:
    """Accumulates the statistics of one leaf."""

    def __init__(self) -> None:
        self.size = self.nan = self.inf = self.zeros = 0
        self.min: Any = None  # int or float
        self.max: Any = None
        self.moments = Moments()

    def add(self, values: Values) -> None:
        """Adds a block of the values that `as_numbers` returns."""
        numbers = finite(values)
        self.size += values.size
        self.zeros += values.size - int(np.count_nonzero(values))
        if numbers.size < values.size:
            nan = int(np.count_nonzero(np.isnan(values)))
            self.nan += nan
            self.inf += values.size - numbers.size - nan
        if numbers.size:
            exact = values if values.dtype.kind in "iu" else numbers
            low, high = exact.min().item(), exact.max().item()
            self.min = low if self.min is None else min(self.min, low)
            self.max = high if self.max is None else max(self.max, high)
            self.moments.add(numbers)

    def result(self, path: str) -> LeafStatistics:
        return LeafStatistics(
            path=path,
            size=self.size,
            min=self.min,
            max=self.max,
            mean=self.moments.mean,
            std=self.moments.std,
            norm=self.moments.norm,
            nan=self.nan,
            inf=self.inf,
            zeros=self.zeros,
        )
