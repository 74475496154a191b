"""Plans which process writes which chunk, and which chunks each shard reads.

Every process computes the plan of a save from the same shapes and shardings. So the processes agree
without communication, and tests can plan for any number of processes.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from jaxckpt._core import box as _box
from jaxckpt._core.box import Box
from jaxckpt.format.arrays import MAX_UNIT_BYTES, inner_shape
from jaxckpt.format.tree import StoredArray

if TYPE_CHECKING:
    import jax

# Smaller slices cost more in requests than they gain in balance.
MIN_SLICE_BYTES: Final = 1 << 20
# A large chunk is one request, and S3 takes no more than 5 GB in one.
MAX_CHUNK_BYTES: Final = 4 << 30
MAX_KEPT_CHUNKS: Final = 64


@dataclass(frozen=True, slots=True)
class Group:
    """The processes that hold a shard, ascending. The hash is cached: there may be thousands."""

    processes: tuple[int, ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.processes))

    def __hash__(self) -> int:
        return self._hash


class Grid:
    """The holders of each shard, for all arrays cut into the same number of shards.

    Queries for one process cost time in proportion to that process's shards, not the job's.

    Args:
        holders: By the shard's index in the grid of shards.
    """

    def __init__(self, holders: Mapping[tuple[int, ...], Group]) -> None:
        mine: dict[int, list[tuple[tuple[int, ...], Group]]] = {}
        for index, group in sorted(holders.items(), key=lambda item: item[0]):
            for process in group.processes:
                mine.setdefault(process, []).append((index, group))
        self._mine = mine
        counts = {len(group.processes) for group in holders.values()}
        self.copies: Final = counts.pop() if len(counts) == 1 else None  # None if they differ
        self.only: Final = next(iter(mine)) if len(mine) == 1 else None  # the only process

    def of(self, process: int) -> Sequence[tuple[tuple[int, ...], Group]]:
        return self._mine.get(process, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The shards of one array, which all have `shard_shape`, and their holders."""

    shard_shape: tuple[int, ...]
    grid: Grid

    def box(self, index: tuple[int, ...]) -> Box:
        start = tuple(map(operator.mul, index, self.shard_shape))
        return Box(start, tuple(map(operator.add, start, self.shard_shape)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArraySpec:
    """The facts about one array that a plan depends on. Arrays that share one are planned once."""

    shape: tuple[int, ...]  # global
    dtype: str  # as stored, TensorStore's name
    itemsize: int  # bytes per element
    placement: Placement | None  # None for a value on the host, which process 0 writes


class Write(NamedTuple):  # there may be a million, and dataclasses take three times as long
    """One chunk for this process to write."""

    array: int  # index of the array in the plan
    box: Box  # the chunk, in the global array
    shard: Box  # the shard that contains it, in the global array


Chunks = Sequence[tuple[Box, Box]]  # of an array; each with the shard that contains it


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """The storage layout of a tree, and the chunks that this process writes."""

    stored: tuple[StoredArray, ...]  # one for each array
    # By index of the array, in their order. Thousands of arrays may share the same chunks.
    shares: tuple[tuple[int, Chunks], ...]  # this process's chunks
    total_bytes: int  # of these chunks, uncompressed
    # The other chunks of the shards that this process holds, if they were asked for.
    held_shares: tuple[tuple[int, Chunks], ...] = ()
    held_bytes: int = 0

    @property
    def writes(self) -> list[Write]:
        """Returns this process's chunks, in the order of the arrays."""
        return [Write(i, box, shard) for i, chunks in self.shares for box, shard in chunks]

    @property
    def held(self) -> SavePlan:
        """Returns a plan to write the held chunks."""
        return replace(self, shares=self.held_shares, total_bytes=self.held_bytes)


def partitions(sharding: jax.sharding.NamedSharding) -> Any:  # a tuple, or like one
    """Returns the axes that cut each dimension; `reduced` ones keep a spec from being iterated."""
    return getattr(sharding.spec, "partitions", sharding.spec)


@lru_cache(maxsize=1 << 14)
def placement_of(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], process_of: Callable[[Any], int]
) -> Placement:
    """Returns the shards of an array of `shape` under `sharding`, and their holders."""
    from jax.sharding import NamedSharding

    shard_shape = sharding.shard_shape(shape)
    # On a mesh the holders depend only on the number of shards per dimension, so the devices (maybe
    # thousands) are queried once for all shapes.
    counts = tuple(n // part if part else 0 for n, part in zip(shape, shard_shape, strict=True))
    alike = counts if isinstance(sharding, NamedSharding) and 0 not in counts else shape
    return Placement(shard_shape=shard_shape, grid=_grid_of(sharding, alike, process_of))


@lru_cache(maxsize=1 << 12)
def _grid_of(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], process_of: Callable[[Any], int]
) -> Grid:
    shard_shape = sharding.shard_shape(shape)
    holders: dict[tuple[int, ...], set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        start = _box.from_index(index, shape).start
        at = tuple(a // max(1, part) for a, part in zip(start, shard_shape, strict=True))
        holders.setdefault(at, set()).add(process_of(device))
    return Grid({at: Group(tuple(sorted(held))) for at, held in holders.items()})


def plan_save(arrays: Sequence[ArraySpec], *, process: int, holds: bool = False) -> SavePlan:
    """Decides how each array is chunked and which chunks this process writes.

    Every element belongs to exactly one chunk, and every chunk to exactly one process. A chunk is
    a device shard, or an equal part of one that is larger than `MAX_CHUNK_BYTES`, if its sides have
    suitable divisors. If R processes replicate the shards of an array, each writes 1/R of every
    shard, provided that a dimension divides by R and the slice has at least `MIN_SLICE_BYTES`;
    otherwise each whole shard goes to the holder with the fewest bytes so far.

    Args:
        arrays: In tree order, the same on every process.
        process: Index of the caller.
        holds: Whether to list the other chunks of its shards too.

    Example:
        >>> placement = Placement(shard_shape=(2,), grid=Grid({(0,): Group((0,))}))
        >>> spec = ArraySpec(shape=(2,), dtype="int8", itemsize=1, placement=placement)
        >>> plan_save([spec], process=0).writes[0].box
        Box(start=(0,), stop=(2,))
    """
    stored, shares, held, total, held_bytes = [], [], [], 0, 0
    loads = _Loads()
    alike: dict[ArraySpec, tuple[StoredArray, list[_Share]]] = {}
    for i, array in enumerate(arrays):
        if array not in alike:
            alike[array] = _laid_out(array, process, holds=holds)
        layout, of_array = alike[array]
        stored.append(layout)
        for group, size_bytes, chunks in of_array:
            if loads.take(group, size_bytes) == process:
                shares.append((i, chunks))
                total += size_bytes
            elif holds:
                held.append((i, chunks))
                held_bytes += size_bytes
    return SavePlan(
        stored=tuple(stored),
        shares=tuple(shares),
        total_bytes=total,
        held_shares=tuple(held),
        held_bytes=held_bytes,
    )


# Chunks of an array that the same of these processes writes, and their size in bytes.
_Share = tuple[Group, int, Chunks]


def _laid_out(array: ArraySpec, process: int, *, holds: bool) -> tuple[StoredArray, list[_Share]]:
    """Returns the layout of an array, and the chunks that this process may write, or holds."""
    everything = _box.whole(array.shape)
    chunk_shape, shards = array.shape, [(Group((0,)), everything, everything)]
    if array.placement is not None:
        chunk_shape, shards = _device_chunks(array, array.placement, process)
    smaller = inner_shape(chunk_shape, array.itemsize, MAX_CHUNK_BYTES)
    # zarr forbids chunks of size zero; no chunks are stored for an empty array.
    chunk_shape = tuple(max(1, n) for n in smaller or chunk_shape)
    is_empty = 0 in array.shape
    stored = StoredArray(
        shape=array.shape,
        dtype=array.dtype,
        chunk_shape=chunk_shape,
        inner_shape=None if is_empty else inner_shape(chunk_shape, array.itemsize),
    )
    mine = [one for one in shards if not is_empty and (holds or process in one[0].processes)]
    shares: dict[Any, _Share] = {}  # chunks with a single possible writer are one share
    for at, (group, box, shard) in enumerate(mine):
        parts = _box.cut(box, smaller) if smaller else (box,)
        key = at if len(group.processes) > 1 else group
        _, size_bytes, chunks = shares.get(key, (group, 0, ()))
        size_bytes += box.size * array.itemsize
        shares[key] = group, size_bytes, [*chunks, *((part, shard) for part in parts)]
    return stored, [*shares.values()]


class _Loads:
    """Picks the process with the fewest bytes, for each group that shares shards."""

    def __init__(self) -> None:
        self._heaps: dict[Group, list[tuple[int, int]]] = {}

    def take(self, group: Group, size: int) -> int:
        if len(group.processes) == 1:
            return group.processes[0]
        heap = self._heaps.get(group)
        if heap is None:
            heap = self._heaps[group] = [(0, process) for process in group.processes]
        load, process = heap[0]
        heapq.heapreplace(heap, (load + size, process))
        return process


def _device_chunks(
    array: ArraySpec, placement: Placement, process: int
) -> tuple[tuple[int, ...], list[tuple[Group, Box, Box]]]:
    """Returns the shape of a chunk; and of each chunk the possible writers, the box and shard."""
    shard_shape = placement.shard_shape
    axis, parts = _slicing(placement, math.prod(shard_shape) * array.itemsize)
    mine = [(group, placement.box(index)) for index, group in placement.grid.of(process)]
    if parts == 1:
        return shard_shape, [(group, box, box) for group, box in mine]
    chunk_shape = (*shard_shape[:axis], shard_shape[axis] // parts, *shard_shape[axis + 1 :])
    return chunk_shape, [
        (Group((writer,)), part, box)
        for group, box in mine
        for writer, part in zip(group.processes, _box.cut(box, chunk_shape), strict=True)
    ]


def _slicing(placement: Placement, shard_bytes: int) -> tuple[int, int]:
    """Returns the axis to cut and the number of slices; one slice if cutting does not help."""
    parts = placement.grid.copies or 1
    if parts == 1 or shard_bytes // parts < MIN_SLICE_BYTES:
        return 0, 1
    axes = [axis for axis, size in enumerate(placement.shard_shape) if size % parts == 0]
    return (axes[0], parts) if axes else (0, 1)


# --- reading ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRead:
    """One stored chunk to read whole, and the destinations of its values."""

    index: tuple[int, ...]  # in the grid of chunks
    # For each target: its index, the place of the values in the target, and in the chunk.
    parts: tuple[tuple[int, tuple[Any, ...], tuple[Any, ...]], ...]
    count: int  # elements of the chunk
    is_whole: bool  # whether one target takes all of the chunk


def count_chunks(chunk_shape: Sequence[int], targets: Sequence[Box]) -> int:
    """Returns the number of chunks each target touches, summed over the targets.

    Example:
        >>> count_chunks((4,), [Box((2,), (6,)), Box((0,), (1,))])
        3
    """
    total = 0
    for target in targets:
        count = 1
        for a, b, n in zip(target.start, target.stop, chunk_shape, strict=True):
            count *= -(-b // n) - a // n
        total += count
    return total


def plan_chunks(chunk_shape: tuple[int, ...], targets: tuple[Box, ...]) -> tuple[ChunkRead, ...]:
    """Covers `targets` with whole chunks, each chunk once.

    Example:
        >>> [read.index for read in plan_chunks((4,), (Box((2,), (6,)),))]
        [(0,), (1,)]
    """
    # Thousands of small arrays share a plan, so it is cached. A large array's plan is used once.
    few = count_chunks(chunk_shape, targets) <= MAX_KEPT_CHUNKS
    return (_plan_few if few else _plan_chunks)(chunk_shape, targets)


def _plan_chunks(chunk_shape: tuple[int, ...], targets: tuple[Box, ...]) -> tuple[ChunkRead, ...]:
    parts: dict[tuple[int, ...], list[tuple[int, tuple[Any, ...], tuple[Any, ...]]]] = {}
    whole: set[tuple[int, ...]] = set()
    for i, target in enumerate(targets):
        for index, chunk in _box.tile(target, chunk_shape):
            part = chunk.intersect(target)
            if part is not None:
                parts.setdefault(index, []).append((i, part.within(target), part.within(chunk)))
                if part == chunk:
                    whole.add(index)
    count = math.prod(chunk_shape)
    return tuple(
        ChunkRead(
            index=index,
            parts=tuple(where),
            count=count,
            is_whole=len(where) == 1 and index in whole,
        )
        for index, where in parts.items()
    )


_plan_few: Final = lru_cache(maxsize=1 << 10)(_plan_chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One region of a stored array to read once, and the destinations of its values."""

    box: Box  # in the global array
    parts: tuple[tuple[int, Box], ...]  # index of a target, and its part of `box`


def plan_reads(stored: StoredArray, itemsize: int, targets: Sequence[Box]) -> list[Read]:
    """Covers `targets`, which do not overlap, with reads of about `MAX_UNIT_BYTES` at most.

    No two reads touch the same stored unit (chunk or inner chunk), so one read may have to be split
    among several targets.

    Example:
        >>> stored = StoredArray(shape=(4,), dtype="int8", chunk_shape=(4,))
        >>> plan_reads(stored, 1, [Box((0,), (2,)), Box((2,), (4,))])[0].box
        Box(start=(0,), stop=(4,))
    """
    if not targets:
        return []
    unit = stored.unit_shape
    sides = [max(target.shape[axis] for target in targets) for axis in range(len(unit))]
    shape = _box.widened(unit, sides, MAX_UNIT_BYTES // (math.prod(unit) * itemsize))
    tiles: dict[tuple[int, ...], list[tuple[int, Box]]] = {}
    for i, target in enumerate(targets):
        for index, tile in _box.tile(target, shape):
            if (part := tile.intersect(target)) is not None:
                tiles.setdefault(index, []).append((i, part))
    return [
        Read(box=_box.hull([part for _, part in parts]), parts=tuple(parts))
        for parts in tiles.values()
    ]
