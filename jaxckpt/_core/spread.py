"""Plans how a job reads every stored value once, whatever shards its processes want; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from jaxckpt._core.box import Box, cut, whole
from jaxckpt.format.tree import grid_of

T = TypeVar("T")

_ALIGNMENT: Final = 64  # bytes
# Multiples of it modulo 1 are far apart, however many there are: the golden ratio.
_FAR_APART: Final = 0.618034

# The axes that split each dimension of an array, the slowest first.
Axes = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Hosts:
    """The process of each device of a mesh, whose axes are cut into axes of prime sizes.

    So one axis can split two dimensions. Every process has equally many of the devices.
    """

    axes: dict[str, tuple[str, ...]]  # the names of the cut axes, by the name of the whole axis
    processes: np.ndarray[Any, Any]  # in the shape of the cut mesh
    _along: dict[tuple[str, ...], np.ndarray[Any, Any]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(chain.from_iterable(self.axes.values()))

    def parts(self, names: Sequence[str]) -> int:
        """Returns the number of parts into which some cut axes divide a dimension."""
        sizes = dict(zip(self.names, self.processes.shape, strict=True))
        return math.prod(sizes[name] for name in names)

    def along(self, names: tuple[str, ...]) -> np.ndarray[Any, Any]:
        """Returns the parts of a dimension by their devices, ascending: `int[process, device]`."""
        if names not in self._along:
            at = dict(zip(self.names, np.indices(self.processes.shape, sparse=True), strict=True))
            index: Any = np.zeros(self.processes.shape, np.int64)
            for name in names:
                index = index * at[name].size + at[name]
            order = np.argsort(self.processes, axis=None, kind="stable")
            count = int(self.processes.max()) + 1
            self._along[names] = np.sort(index.ravel()[order].reshape(count, -1), axis=1)
        return self._along[names]


def hosts_of(names: Sequence[str], processes: np.ndarray[Any, Any]) -> Hosts:
    """Returns the hosts of a mesh, given the process of each device in its shape."""
    axes, shape = {}, []
    for name, size in zip(names, processes.shape, strict=True):
        primes = []
        while size > 1:
            primes.append(next(n for n in range(2, size + 1) if size % n == 0))
            size //= primes[-1]
        axes[name] = tuple(f"{name}.{i}" for i in range(len(primes)))
        shape += primes
    return Hosts(axes, processes.reshape(shape))


class Division(NamedTuple):
    """Counts how often a job reads an array, as shards or as parts of its processes."""

    direct: float
    once: float  # infinite if no way divides the array
    axes: Axes = ()  # of the parts
    needed: float = math.inf  # if each distinct shard is read by one process


def times_read(hosts: Hosts, axes: Axes, shape: Sequence[int], unit: Sequence[int]) -> float:
    """Returns how many times a job reads an array, if each process reads its shards.

    A stored unit is read as a whole, and once in each process that needs any of it. The shards of a
    process form a block, as on the usual meshes; if they do not, this is more than it reads.

    Example:
        >>> hosts = hosts_of(("x",), np.arange(4))
        >>> times_read(hosts, ((), ()), (8, 8), (2, 8))  # replicated
        4.0
        >>> times_read(hosts, ((), hosts.axes["x"]), (8, 8), (2, 8))  # from rows to columns
        4.0
    """
    counts: Any = np.ones(int(hosts.processes.max()) + 1)
    for names, size, side in zip(axes, shape, unit, strict=True):
        at, part = hosts.along(names), size // hosts.parts(names)
        first, last = at * part // side, -(-(at + 1) * part // side)
        first[:, 1:] = np.maximum(first[:, 1:], last[:, :-1])  # a unit that two devices need
        counts *= (last - first).clip(0).sum(axis=1)
    return float(counts.sum()) / math.prod(grid_of(shape, unit))


def spread(hosts: Hosts, wanted: Axes, shape: Sequence[int], unit: Sequence[int]) -> Division:
    """Divides an array among all devices such that the job reads as little as possible.

    Tries the wanted sharding with the unused axes of the mesh on one dimension, then all axes on
    one dimension, as for a change of axis, then dimensions divided as they are stored.

    Example:
        >>> hosts = hosts_of(("dp", "tp"), np.arange(6).reshape(3, 2))
        >>> spread(hosts, ((), hosts.axes["tp"]), (60, 60), (20, 30))
        Division(direct=3.0, once=1.0, axes=(('dp.0',), ('tp.0',)), needed=1.0)
    """
    found: tuple[float, Axes] = math.inf, ()
    grid = grid_of(shape, unit)
    for axes in _ways(hosts, wanted, grid):
        if any(n % hosts.parts(names) for n, names in zip(shape, axes, strict=True)):
            continue
        found = min(found, (times_read(hosts, axes, shape, unit), axes), key=itemgetter(0))
        if found[0] <= 1:
            break
    used = set(chain.from_iterable(wanted))
    sides = [
        n if name in used else 1 for name, n in zip(hosts.names, hosts.processes.shape, strict=True)
    ]
    distinct = Hosts(hosts.axes, np.arange(math.prod(sides)).reshape(sides))
    needed = times_read(distinct, wanted, shape, unit)
    return Division(times_read(hosts, wanted, shape, unit), *found, needed)


def _ways(hosts: Hosts, wanted: Axes, grid: Sequence[int]) -> Iterator[Axes]:
    """Yields ways to divide an array by all axes, given how many units it has along each side."""
    used = tuple(chain.from_iterable(wanted))
    unused = tuple(name for name in hosts.names if name not in used)
    for dim in range(len(grid)):
        yield (*wanted[:dim], wanted[dim] + unused, *wanted[dim + 1 :])
    for dim, stays in enumerate(wanted):  # what goes elsewhere comes last; see `moves`
        every = stays + unused + tuple(name for name in used if name not in stays)
        yield tuple(every if i == dim else () for i in range(len(grid)))
    if grid:
        yield _as_stored(hosts, used + unused, grid)


def _as_stored(hosts: Hosts, names: Sequence[str], grid: Sequence[int]) -> Axes:
    """Divides the dimensions as the stored units do; the last takes the remaining axes."""
    left, axes = list(names), []
    for dim, count in enumerate(grid):
        taken: list[str] = []
        for name in tuple(left):
            if count % hosts.parts([*taken, name]) == 0 or dim == len(grid) - 1:
                taken.append(name)
                left.remove(name)
        axes.append(tuple(taken))
    return tuple(axes)


class Move(NamedTuple):
    """Cut axes that divide another dimension afterwards. `None` stands for no dimension."""

    names: tuple[str, ...]
    source: int | None
    target: int | None


def moves(given: Axes, wanted: Axes) -> list[Move]:
    """Returns how to get from one sharding to another, by collective operations that keep order.

    An axis leaves a dimension only as its fastest, and comes to one as its fastest: that is an
    all-to-all, or an all-gather if it then divides none. What comes from no dimension is a slice,
    where no order of all-to-alls does: that takes more memory.

    Example:
        >>> moves((("a", "c", "b"), ()), (("a",), ("b",)))
        [Move(names=('b',), source=0, target=1), Move(names=('c',), source=0, target=None)]
    """
    now, home = [*given], {name: dim for dim, names in enumerate(wanted) for name in names}
    found: list[Move] = []
    while stuck := [dim for dim, names in enumerate(now) if names != wanted[dim][: len(names)]]:
        move = next(
            (one for dim in stuck for one in _leaving(now, wanted, home, dim)),
            Move(now[stuck[0]][-1:], stuck[0], None),
        )
        for dim in stuck:
            if dim == move.source:
                now[dim] = now[dim][: -len(move.names)]
        if move.target is not None:
            now[move.target] += move.names
        found.append(move)
    rest = [names[len(there) :] for there, names in zip(now, wanted, strict=True)]
    return [*found, *(Move(names, None, dim) for dim, names in enumerate(rest) if names)]


def _leaving(
    now: Sequence[tuple[str, ...]], wanted: Axes, home: Mapping[str, int], dim: int
) -> Iterator[Move]:
    """Yields how the fastest axes of a dimension may leave it for good."""
    for first in range(len(now[dim])):
        names = now[dim][first:]
        targets = {home.get(name) for name in names}
        if targets == {None}:
            yield Move(names, dim, None)
        elif len(targets) == 1 and dim not in targets:
            (target,) = targets
            assert target is not None
            after = now[target] + names
            if after == wanted[target][: len(after)]:
                yield Move(names, dim, target)


def shares(shard: Box, unit: Sequence[int], copies: int, *, number: int = 0) -> list[Box]:
    """Returns the parts of a shard that one of its replicas reads, in whole units.

    Args:
        shard: Has the number of the replica in front, as the results have.
        copies: How many replicas there are; successive ones may be devices of one process.
        number: Of the array, so that other replicas read another one.

    Example:
        >>> shares(Box((1, 0, 4), (2, 6, 8)), (2, 4), 2)
        [Box(start=(1, 2, 4), stop=(2, 4, 8))]
    """
    box = Box(shard.start[1:], shard.stop[1:])
    parts = [*cut(box, _stripe(box.shape, unit, box.size // copies))]
    first, step = int(number * _FAR_APART * copies), max(1, copies // len(parts))
    row, after = shard.start[0], shard.stop[0]
    mine = [part for i, part in enumerate(parts) if (first + i * step) % copies == row]
    return [Box((row, *part.start), (after, *part.stop)) for part in mine]


# --- many small arrays -----------------------------------------------------------------------


class Piece(NamedTuple):
    """A part of an array that a single process reads for all."""

    array: int  # index
    box: Box
    process: int
    start: int  # of its bytes among those of all pieces
    stop: int


def allot(
    arrays: Sequence[tuple[Sequence[int], Sequence[int], int]], count: int, *, first: int = 0
) -> list[Piece]:
    """Divides arrays among processes, in whole units and about evenly.

    Args:
        arrays: Shape, shape of a unit, and bytes of an element; none is empty.
        count: How many processes there are.
        first: The process that begins.

    Example:
        >>> pieces = allot([((4,), (4,), 4), ((8,), (2,), 4)], 2)
        >>> [(piece.array, piece.box.shape, piece.process) for piece in pieces]
        [(0, (4,), 0), (1, (2,), 0), (1, (2,), 1), (1, (2,), 1), (1, (2,), 1)]
    """
    total = sum(math.prod(shape) * itemsize for shape, _, itemsize in arrays)
    pieces, done, start = [], 0, 0
    for i, (shape, unit, itemsize) in enumerate(arrays):
        for box in cut(whole(shape), _stripe(shape, unit, total // (4 * count * itemsize))):
            size = box.size * itemsize
            process = (first + done * count // total) % count
            pieces.append(Piece(i, box, process, start, start + size))
            done += size
            start += -(-size // _ALIGNMENT) * _ALIGNMENT
    return pieces


def _stripe(shape: Sequence[int], unit: Sequence[int], most: int) -> Sequence[int]:
    """Cuts an array along the dimension of most units, into stripes of about so many elements."""
    if math.prod(shape) <= most or not shape:
        return shape
    grid = grid_of(shape, unit)
    dim = grid.index(max(grid))
    each = math.prod(shape) * unit[dim] // shape[dim]  # elements of a row of units
    return (*shape[:dim], unit[dim] * max(1, most // max(1, each)), *shape[dim + 1 :])


def grouped(
    items: Sequence[T], sizes: Sequence[int], most: int, first: int = 0
) -> Iterator[list[T]]:
    """Yields items in order, in groups of about so much, or of a single one.

    Args:
        first: If given, the first group is about as large, and the next ones at most double.

    Example:
        >>> [*grouped("abcd", [2, 1, 5, 1], 3)]
        [['a'], ['b'], ['c'], ['d']]
        >>> [len(group) for group in grouped(range(64), [1] * 64, 32, 4)]
        [3, 4, 8, 16, 32, 1]
    """

    def number(pair: tuple[int, T]) -> tuple[int, int]:
        return pair[0] // max(1, most), first and (pair[0] // first).bit_length()

    for _, group in groupby(zip(accumulate(sizes), items, strict=True), number):
        yield [item for _, item in group]
