"""Half-open boxes of array indices: shards, chunks and their intersections."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple


class Box(NamedTuple):  # which many dicts have as a key: a dataclass takes long to hash
    """The indices `start <= i < stop` of an array, one pair per dimension.

    Example:
        >>> Box((0, 2), (4, 6)).intersect(Box((2, 0), (8, 3)))
        Box(start=(2, 2), stop=(4, 3))
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(operator.sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """Returns the number of elements; 1 for a 0-d box."""
        return math.prod(map(operator.sub, self.stop, self.start))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Returns the indices in both boxes, or None if they share none."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def within(self, outer: Box) -> tuple[Any, ...]:
        """Returns this box as an index into `outer` that gives a view, even of a 0-d array."""
        inside = (
            slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, outer.start, strict=True)
        )
        return (*inside, ...)


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def from_index(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Returns the box of a tuple of slices like `jax.Shard.index`."""
    return Box(
        tuple([s.start or 0 for s in index]),
        tuple([n if s.stop is None else s.stop for s, n in zip(index, shape, strict=True)]),
    )


def tile(box: Box, tile_shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Box]]:
    """Yields the tiles of a regular grid that touch `box`: grid index and uncut tile."""
    ranges = [
        range(a // t, -(-b // t)) for a, b, t in zip(box.start, box.stop, tile_shape, strict=True)
    ]
    for index in product(*ranges):
        start = tuple(i * t for i, t in zip(index, tile_shape, strict=True))
        yield index, Box(start, tuple(s + t for s, t in zip(start, tile_shape, strict=True)))


def cut(box: Box, tile_shape: Sequence[int]) -> Iterator[Box]:
    """Yields the parts into which a regular grid cuts `box`, in order.

    Example:
        >>> [part.shape for part in cut(whole((5, 2)), (2, 2))]
        [(2, 2), (2, 2), (1, 2)]
    """
    for _, uncut in tile(box, tile_shape):
        if (part := uncut.intersect(box)) is not None:
            yield part


def widened(tile_shape: Sequence[int], shape: Sequence[int], most: int) -> tuple[int, ...]:
    """Repeats a tile along the last dimensions first, at most `most` times, to cover the array.

    Example:
        >>> widened((1, 4), (100, 10), 10), widened((1, 4), (100, 10), 0)
        ((3, 12), (1, 4))
    """
    wide = list(tile_shape)
    for axis in reversed(range(len(wide))):
        count = max(1, min(most, -(-shape[axis] // wide[axis])))
        wide[axis] *= count
        most //= count
    return tuple(wide)


def hull(boxes: Sequence[Box]) -> Box:
    """Returns the smallest box that contains all of `boxes` (at least one)."""
    return Box(
        tuple(map(min, zip(*(b.start for b in boxes), strict=True))) if boxes[0].start else (),
        tuple(map(max, zip(*(b.stop for b in boxes), strict=True))) if boxes[0].stop else (),
    )
