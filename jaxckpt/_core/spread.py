"""Plans how a job reads every stored value once, whatever shards its processes want; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

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


class Spread(NamedTuple):
    """How often a job reads an array if each process reads its shards, or a part of its own."""

    direct: float
    once: float
    axes: Axes  # of the parts


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
    return float(counts.sum()) / math.prod(-(-n // u) for n, u in zip(shape, unit, strict=True))


def spread(hosts: Hosts, wanted: Axes, shape: Sequence[int], unit: Sequence[int]) -> Spread | None:
    """Divides an array among all devices such that the job reads as little as possible.

    Tries the wanted sharding with the unused axes of the mesh on one dimension, then all axes on
    one dimension, as for a change of axis, then dimensions divided as they are stored. Returns None
    if no way divides it.

    Example:
        >>> hosts = hosts_of(("dp", "tp"), np.arange(6).reshape(3, 2))
        >>> spread(hosts, ((), hosts.axes["tp"]), (60, 60), (20, 30))
        Spread(direct=3.0, once=1.0, axes=(('dp.0',), ('tp.0',)))
    """
    found: tuple[float, Axes] | None = None
    grid = [-(-n // u) for n, u in zip(shape, unit, strict=True)]
    for axes in _ways(hosts, wanted, grid):
        if any(n % hosts.parts(names) for n, names in zip(shape, axes, strict=True)):
            continue
        times = times_read(hosts, axes, shape, unit)
        if found is None or times < found[0]:
            found = times, axes
        if times <= 1:
            break
    return found and Spread(times_read(hosts, wanted, shape, unit), *found)


def _ways(hosts: Hosts, wanted: Axes, grid: Sequence[int]) -> Iterator[Axes]:
    """Yields ways to divide an array by all axes, given how many units it has along each side."""
    used = tuple(chain.from_iterable(wanted))
    unused = tuple(name for name in hosts.names if name not in used)
    for dim in range(len(grid)):
        yield (*wanted[:dim], wanted[dim] + unused, *wanted[dim + 1 :])
    for dim in range(len(grid)):
        yield tuple(used + unused if i == dim else () for i in range(len(grid)))
    if grid:
        yield _as_stored(hosts, used + unused, grid)


def _as_stored(hosts: Hosts, names: Sequence[str], grid: Sequence[int]) -> Axes:
    """Divides the dimensions as the stored units do; the last one takes the axes that are left."""
    left, axes = list(names), []
    for dim, count in enumerate(grid):
        taken: list[str] = []
        for name in tuple(left):
            if count % hosts.parts([*taken, name]) == 0 or dim == len(grid) - 1:
                taken.append(name)
                left.remove(name)
        axes.append(tuple(taken))
    return tuple(axes)
