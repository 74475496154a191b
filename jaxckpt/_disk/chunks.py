"""Reads chunks that jaxckpt wrote from their place in a file directly into the final memory.

TensorStore reads every layout, but it reads a chunk into memory of its own, checks it while copying
it into more such memory, and copies it from there into ours; and fresh memory costs more than the
copying. We know the layout, so a chunk that is one piece of one buffer is read into it and checked
in place; any other goes through memory of its size, to be divided or cast.

The nodes of the OCDBT tree record where a chunk lies; `format.arrays` describes its bytes.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, pairwise, repeat
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np

from jaxckpt._core.box import Box
from jaxckpt._core.cast import cast
from jaxckpt._core.plan import MAX_KEPT_CHUNKS, ChunkRead, count_chunks, plan_chunks
from jaxckpt._core.threads import Pool
from jaxckpt._core.transfer import empty, in_place
from jaxckpt._disk.checksums import Sums
from jaxckpt._disk.damage import blame
from jaxckpt._disk.native import Item
from jaxckpt._disk.places import inner_places
from jaxckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    StoreError,
    TreeMismatch,
    is_io_failure,
)
from jaxckpt.format.arrays import (
    CRC_BYTES,
    checksum,
    chunk_key,
    decode_metadata,
    dtype_of,
    encode_zarr3,
    has_our_codecs,
)
from jaxckpt.format.names import ZARR3
from jaxckpt.format.ocdbt import Place
from jaxckpt.format.tree import Leaf, StoredArray, bad_leaf, grid_of
from jaxckpt.storage._values import Places

# One read takes adjacent chunks up to these limits: the second is a quarter of what `preadv` takes.
_RUN_BYTES: Final = 8 << 20
_RUN_CHUNKS: Final = 256
DECODED: Final = 2  # TensorStore holds the stored bytes too

Values = np.ndarray[Any, Any]
Buffers = Sequence[Values]  # one for each box
Failed = Callable[["LeafRead", Exception], None]  # raises the error of a bad leaf, or goes on
Landed = Callable[[int], object]  # takes a number of bytes read, in the caller's thread


class Unit(NamedTuple):
    """One chunk, or inner chunk, of all leaves of a layout."""

    suffix: str  # of the key in the database of its chunk
    inner: int | None  # its number in that chunk
    unit: int  # its number in the leaf
    size: int  # bytes of its values
    start: int | None  # where they go in the memory of the leaf; None if `plan` divides them
    plan: ChunkRead


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The facts that leaves share which are stored alike and read alike."""

    boxes: tuple[Box, ...]  # the distinct parts wanted, in the global array
    dtype: np.dtype[Any]  # of the host buffers
    total_bytes: int  # of the buffers
    places: tuple[tuple[tuple[int, ...], int], ...]  # shape and start of each buffer
    room: int  # bytes of that memory
    metadata: bytes  # of the array, as we write it
    chunks: int  # that are read, with repetitions
    beside: int  # how often `total_bytes` is held beside the buffers; `DECODED` if decoded
    parts: tuple[Unit, ...] | None  # None if there are many, or if they are not stored so

    def buffer(self, memory: Values, first: int, i: int) -> Values:
        """Returns the buffer of a box, in memory where that of the leaf begins at `first`."""
        shape, start = self.places[i]
        return np.ndarray(shape, self.dtype, memory, first + start)

    def buffers(self, memory: Values, first: int = 0, count: int = 1) -> Iterator[Buffers]:
        """Yields the buffers of leaves, one behind the other, by way of an array of all."""
        columns: list[list[Values]] = []
        for i, (shape, start) in enumerate(self.places):
            steps = (self.room, *self.buffer(memory, first, i).strides)
            every = np.ndarray((count, *shape), self.dtype, memory, first + start, steps)
            columns.append([*every] if shape else [every[n, ...] for n in range(count)])
        return zip(*columns, strict=True) if columns else repeat((), count)


@lru_cache(maxsize=1 << 12)  # thousands of leaves share a layout
def layout_of(stored: StoredArray, boxes: tuple[Box, ...], dtype: np.dtype[Any]) -> Layout:
    """Returns how to read the parts in some boxes of arrays that are stored alike."""
    sizes = [box.size * dtype.itemsize for box in boxes]
    *starts, room = accumulate((in_place(size) for size in sizes), initial=0)
    chunks, metadata = count_chunks(stored.chunk_shape, boxes), encode_zarr3(stored)
    beside = 1 if stored.zstd is None else DECODED
    places = tuple((box.shape, start) for box, start in zip(boxes, starts, strict=True))
    layout = Layout(boxes, dtype, sum(sizes), places, room, metadata, chunks, beside, None)
    if beside == DECODED or count_chunks(stored.unit_shape, boxes) > MAX_KEPT_CHUNKS:
        return layout
    parts = tuple(units_read(layout, stored))
    return replace(layout, beside=int(any(part.start is None for part in parts)), parts=parts)


def units_read(layout: Layout, stored: StoredArray) -> Iterator[Unit]:
    counts = tuple(map(operator.floordiv, stored.chunk_shape, stored.unit_shape))
    grid = grid_of(stored.shape, stored.unit_shape)
    itemsize = dtype_of(stored.dtype).itemsize
    for plan in plan_chunks(stored.unit_shape, layout.boxes):
        inner = None
        if stored.inner_shape is not None:
            inner = int(np.ravel_multi_index(tuple(map(operator.mod, plan.index, counts)), counts))
        yield Unit(
            suffix=chunk_key(tuple(map(operator.floordiv, plan.index, counts))),
            inner=inner,
            unit=int(np.ravel_multi_index(plan.index, grid)) if grid else 0,
            size=plan.count * itemsize,
            start=_start(layout, plan) if layout.dtype == dtype_of(stored.dtype) else None,
            plan=plan,
        )


def _start(layout: Layout, plan: ChunkRead) -> int | None:
    """Returns where a chunk lies in the memory of a leaf, if it is one piece of one buffer."""
    if not plan.is_whole:
        return None
    [(target, where, _)] = plan.parts
    steps = [*accumulate(layout.boxes[target].shape[:0:-1], operator.mul, initial=1)][::-1]
    first = sum(side.start * step for side, step in zip(where[:-1], steps, strict=False))
    last = sum((side.stop - 1) * step for side, step in zip(where[:-1], steps, strict=False))
    is_one_piece = last - first + 1 == plan.count
    return layout.places[target][1] + first * layout.dtype.itemsize if is_one_piece else None


class LeafRead(NamedTuple):
    """One leaf to read."""

    leaf: Leaf
    layout: Layout


def layouts(reads: Sequence[LeafRead]) -> Mapping[Layout, int]:
    """Returns how many leaves have each layout."""
    return Counter(map(attrgetter("layout"), reads))


def total_bytes(reads: Sequence[LeafRead]) -> int:
    """Returns the bytes of all buffers."""
    return sum(layout.total_bytes * n for layout, n in layouts(reads).items())


def make_memory(item: Item, *reads: LeafRead) -> Values:
    """Allocates the buffers of all wanted parts of some leaves, one after the other."""
    try:
        return empty(sum(layout.room * n for layout, n in layouts(reads).items()))
    except MemoryError as error:
        read = max(reads, key=lambda read: read.layout.total_bytes)
        raise MemoryError(
            f"leaf {read.leaf.text} of {item.path}: this host cannot allocate "
            f"{read.layout.total_bytes} bytes. Restore it in shards, or skip this leaf."
        ) from error


# The columns of a table of chunks, or inner chunks, to read and check.
_READ, _PART, _SOURCE, _OFFSET, _SIZE, _AT, _SUM = range(7)


class Chunks:
    """Leaves that jaxckpt wrote, read together into one piece of memory.

    Args:
        places: Where the values of the database lie, or the values.
        sums: The checksums that the chunks were written with, if recorded.
    """

    def __init__(
        self,
        item: Item,
        reads: Sequence[LeafRead],
        places: Places,
        sums: Mapping[str, Sums] | None,
        pool: Pool,
    ) -> None:
        self.reads = reads
        self._item, self._places, self._sums, self._pool = item, places, sums, pool
        self._storage = item.found.storage
        self._buffers: dict[Layout, Iterator[Buffers]] = {}
        self._parts: dict[Layout, Sequence[Unit]] = {}
        self._described: set[tuple[object, StoredArray]] = set()  # metadata that fits, of others
        self._failures: dict[int, Exception] = {}  # the first of each leaf, by `id` of the leaf
        self._under_way: list[Future[None]] = []

    def start(self) -> None:
        """Makes the buffers and starts to fill them; `finish` reports errors."""
        try:
            memory = make_memory(self._item, *self.reads)
        except MemoryError as error:
            for read in self.reads:
                self._note(read.leaf, error)
            return
        alike: dict[Layout, list[int]] = {}
        for i, read in enumerate(self.reads):
            alike.setdefault(read.layout, []).append(i)
        tables, at = [], 0
        for layout, some in alike.items():
            tables.append(self._plan(layout, some, at))
            self._buffers[layout] = layout.buffers(memory, at, len(some))
            at += layout.room * len(some)
        jobs = np.concatenate(tables)
        for number in np.unique(jobs[:, _SOURCE]).tolist():
            some = jobs[jobs[:, _SOURCE] == number]
            if isinstance(source := self._places.sources[number], bytes):
                self._take_inline(some, source, memory)
                continue
            self._under_way += [
                self._pool.submit(self._read_run, some[run], f"{self._item.path}/{source}", memory)
                for run in adjacent(some[:, _OFFSET], some[:, _SIZE])
            ]

    def finish(self, failed: Failed, landed: Landed) -> Iterator[Buffers]:
        """Waits for the reads, and yields the buffers of each good leaf."""
        size = total_bytes(self.reads)
        for i, one in enumerate(self._under_way):
            one.result()
            part = size // (len(self._under_way) - i)  # an estimate: they differ little
            landed(part)
            size -= part
        self._under_way.clear()
        for read in self.reads:
            if (error := self._failures.get(id(read.leaf))) is not None:
                failed(read, blame(self._item, read.leaf, error))
                if self._buffers:  # none if there was no memory
                    next(self._buffers[read.layout])
                continue
            yield next(self._buffers[read.layout])
        self.drop()  # so that the memory lives as long as one of the arrays in it

    def drop(self) -> None:
        """Releases the buffers."""
        self._buffers.clear()
        self._parts.clear()

    def _note(self, leaf: Leaf, error: Exception) -> None:
        """Records the first error of a leaf; several threads read leaves."""
        if not isinstance(error, CheckpointError):  # which names the leaf itself
            error.add_note(f"while reading leaf {leaf.text}")
        self._failures.setdefault(id(leaf), error)

    def _check_described(self, leaf: Leaf, data: object) -> None:
        """Compares the array's own metadata, which Orbax uses, with the tree."""
        if (data, leaf.array) in self._described:
            return
        file = f'{self._item.path}: "{leaf.prefix}{ZARR3}"'
        if not isinstance(data, bytes) or not data:
            raise bad_leaf(leaf, file, "its array metadata is missing")
        try:
            described = decode_metadata(data, 3, leaf=leaf.text, file=file)
        except CorruptCheckpoint as error:
            problem = f"leaf {leaf.text}: {error}"
            raise CorruptCheckpoint(problem, leaf=leaf.text, file=file) from error
        if not has_our_codecs(data, file=file):
            raise bad_leaf(leaf, file, "jaxckpt does not write these codecs")
        if described != leaf.array:
            problem = f"its array metadata has {described}, the tree has {leaf.array}"
            raise bad_leaf(leaf, file, problem)
        self._described.add((data, leaf.array))

    def _plan(self, layout: Layout, some: Sequence[int], at: int) -> Values:
        """Returns the chunks of some good leaves that are alike; their memory begins at `at`."""
        leaves = [self.reads[i].leaf for i in some]
        parts = self._parts[layout] = layout.parts or (*units_read(layout, leaves[0].array),)
        prefixes = [leaf.prefix for leaf in leaves]
        rows = self._places.find(prefixes, [ZARR3, *(part.suffix for part in parts)])
        table = np.full((len(leaves), len(parts), 7), -1)
        found = self._places.table[rows[:, 1:]]
        begins = np.arange(len(leaves))[:, None] * layout.room + at
        inside = [-1 if part.start is None else part.start for part in parts]
        table[..., _READ], table[..., _PART] = np.array(some)[:, None], range(len(parts))
        table[..., _SOURCE], table[..., _OFFSET] = found[..., 0], found[..., 1]
        table[..., _SIZE] = [part.size for part in parts]
        table[..., _AT] = np.where(np.array(inside) < 0, -1 - begins, begins + inside)
        if self._sums is not None:
            sums = np.concatenate([self._sums[prefix] for prefix in prefixes])
            table[..., _SUM] = sums.reshape(len(leaves), -1)[:, [part.unit for part in parts]]
        is_odd = (found[..., 2] != table[..., _SIZE] + CRC_BYTES).any(axis=1)
        is_odd |= [data != layout.metadata for data in self._places.at(rows[:, 0])]
        is_odd |= leaves[0].array.inner_shape is not None
        is_good = np.ones(len(leaves), bool)
        for i in is_odd.nonzero()[0].tolist():
            try:
                self._look(leaves[i], parts, rows[i], table[i])
            except (CheckpointError, OSError) as error:
                self._note(leaves[i], error)
                is_good[i] = False
        return table[is_good].reshape(-1, table.shape[-1])

    def _look(self, leaf: Leaf, parts: Sequence[Unit], rows: Values, table: Values) -> None:
        """Finds the inner chunks of a leaf, if any; raises CorruptCheckpoint if it is bad."""
        inner: dict[str, list[Place]] = {}
        described, *places = self._places.at(rows)
        self._check_described(leaf, described)
        for i, (part, place) in enumerate(zip(parts, places, strict=True)):
            key, path = leaf.prefix + part.suffix, self._item.path
            if rows[i + 1] < 0:
                raise bad_leaf(leaf, path, f'chunk "{key}" is missing')
            if part.inner is not None:
                if key not in inner:
                    inner[key] = self._inner_places(leaf, key, place)
                place = inner[key][part.inner]
                table[i, _OFFSET] = place.offset
            file, size = ("", len(place)) if isinstance(place, bytes) else (place.file, place.size)
            if size != part.size + CRC_BYTES:
                what = f'chunk "{key}" has {size} bytes, expected {part.size + CRC_BYTES}'
                raise bad_leaf(leaf, f"{path}/{file}" if file else path, what)

    def _inner_places(self, leaf: Leaf, key: str, place: Place | bytes) -> list[Place]:
        """Returns the place of each inner chunk of a chunk, in order."""
        if isinstance(place, bytes):  # an index would be far too large for a node
            raise bad_leaf(leaf, self._item.path, f'chunk "{key}" has no inner chunks')
        try:
            return inner_places(self._storage, self._item.path, leaf.array, place)
        except (ValueError, EOFError) as error:
            path = f"{self._item.path}/{place.file}"
            raise bad_leaf(leaf, path, f'chunk "{key}": {error}') from error

    def _take_inline(self, jobs: Values, source: bytes, memory: Values) -> None:
        """Checks chunks that lie in a node, and puts them in their place."""
        begins, ends = jobs[:, _OFFSET].tolist(), (jobs[:, _OFFSET] + jobs[:, _SIZE]).tolist()
        data = [source[begin:end] for begin, end in zip(begins, ends, strict=True)]
        crcs = b"".join([source[end : end + CRC_BYTES] for end in ends])
        view = memoryview(memory)
        for at, values in zip(jobs[:, _AT].tolist(), data, strict=True):
            if at >= 0:
                view[at : at + len(values)] = values
        self._take(jobs, data, crcs, self._item.path, memory)

    def _read_run(self, jobs: Values, file: str, memory: Values) -> None:
        crcs = np.empty((len(jobs), CRC_BYTES), np.uint8)
        leaf = self.reads[jobs[0, _READ]].leaf
        try:
            data = [
                np.empty(size, np.uint8) if at < 0 else memory[at : at + size]
                for at, size in jobs[:, [_AT, _SIZE]].tolist()
            ]
            both = [*chain.from_iterable(zip(data, crcs, strict=True))]
            self._storage.read_into(file, int(jobs[0, _OFFSET]), both)
        except (OSError, EOFError, MemoryError) as error:
            if isinstance(error, StoreError):  # each chunk alone would take as long to fail
                for number in jobs[:, _READ].tolist():
                    self._note(self.reads[number].leaf, error)
            elif len(jobs) > 1:  # find the chunk that fails
                for i in range(len(jobs)):
                    self._read_run(jobs[i : i + 1], file, memory)
            elif isinstance(error, MemoryError) or is_io_failure(error):
                self._note(leaf, error)
            else:
                what = f'chunk "{self._key(jobs[0])}" cannot be read: {error}'
                self._note(leaf, bad_leaf(leaf, file, what))
            return
        self._take(jobs, data, crcs, file, memory)

    def _take(
        self, jobs: Values, data: Sequence[Any], crcs: Any, file: str, memory: Values
    ) -> None:
        """Checks the bytes of chunks, and divides those that are not in place."""
        stored, wanted = np.frombuffer(crcs, "<u4").tolist(), jobs[:, _SUM].tolist()
        for i, (values, crc, want) in enumerate(zip(data, stored, wanted, strict=True)):
            if (found := checksum(values)) == crc and want in (-1, found):
                continue
            leaf, key = self.reads[jobs[i, _READ]].leaf, self._key(jobs[i])
            error = another_chunk(leaf, key, file)
            if found != crc:
                what = f'checksum mismatch in chunk "{key}": stored {crc:#010x}'
                what = f"is damaged: {what}, computed {found:#010x}. Restore an older checkpoint."
                error = bad_leaf(leaf, file, what)
            self._note(leaf, error)
        for job, values in zip(jobs.tolist() if jobs[:, _AT].min() < 0 else (), data, strict=False):
            if job[_AT] < 0:
                self._divide(job, values, memory)

    def _divide(self, job: Sequence[int], data: Any, memory: Values) -> None:
        (leaf, layout), stored = self.reads[job[_READ]], self.reads[job[_READ]].leaf.array
        chunk = np.frombuffer(data, dtype_of(stored.dtype)).reshape(stored.unit_shape)
        try:
            for target, where, some in self._parts[layout][job[_PART]].plan.parts:
                out = layout.buffer(memory, -1 - job[_AT], target)[where]
                out[...] = cast(chunk[some], out.dtype, leaf=leaf.text, where=self._item.path)
        except TreeMismatch as error:
            self._note(leaf, error)

    def _key(self, job: Sequence[int]) -> str:
        leaf, layout = self.reads[job[_READ]]
        return leaf.prefix + self._parts[layout][job[_PART]].suffix


def adjacent(
    offsets: Values, sizes: Values, *, after: int = CRC_BYTES
) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    """Yields the indices of what is adjacent in a file, with `after` bytes behind each."""
    order = np.argsort(offsets, kind="stable")
    begins, ends = offsets[order], (offsets + sizes + after)[order]
    breaks = (begins[1:] != ends[:-1]).nonzero()[0] + 1
    for start, stop in pairwise([0, *breaks.tolist(), len(order)]):
        while start < stop:
            fits = int(np.searchsorted(ends[start:stop], begins[start] + _RUN_BYTES, "right"))
            end = start + max(1, min(fits, _RUN_CHUNKS))
            yield order[start:end]
            start = end


def another_chunk(leaf: Leaf, key: str, file: str) -> CorruptCheckpoint:
    """Returns the error for an undamaged chunk that belongs elsewhere."""
    what = f'chunk "{key}" is not the one that was written there. Restore an older checkpoint.'
    return bad_leaf(leaf, file, what)
