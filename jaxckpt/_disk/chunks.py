"""Reads chunks that jaxckpt wrote from their place in a file directly into the final memory.

TensorStore reads every layout, but it reads a chunk into memory of its own, checks it while copying
it into more such memory, and copies it from there into ours; and fresh memory costs more than the
copying. We know the layout, so a chunk that is one piece of one buffer is read into it and checked
in place; any other goes through memory of its size, to be divided or cast.

The nodes of the OCDBT tree record where a chunk lies; `format.arrays` describes its bytes.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
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
    CRC_WITH_ITSELF,
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

# One read takes adjacent chunks up to these limits: the second is a quarter of what `preadv` takes.
_RUN_BYTES: Final = 8 << 20
_RUN_CHUNKS: Final = 256
DECODED: Final = 2  # TensorStore holds the stored bytes too

Values = np.ndarray[Any, Any]
Buffers = dict[Box, Values]
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

    boxes: tuple[Box, ...]
    dtype: np.dtype[Any]
    places: tuple[tuple[Box, tuple[int, ...], int], ...]  # box, shape and start of each buffer
    room: int  # bytes of that memory
    metadata: bytes  # of the array, as we write it
    chunks: int  # that are read, with repetitions
    parts: tuple[Unit, ...] | None  # None if there are many, or if they are not stored so

    def buffer(self, memory: Values, at: int, i: int) -> Values:
        """Returns the buffer of a box, in memory where that of the leaf begins at `at`."""
        return np.ndarray(self.places[i][1], self.dtype, memory, at + self.places[i][2])

    def buffers(self, memory: Values, at: int = 0) -> Buffers:
        places, dtype = self.places, self.dtype
        return {box: np.ndarray(shape, dtype, memory, at + start) for box, shape, start in places}


@lru_cache(maxsize=1 << 12)  # thousands of leaves share a layout
def _layout(
    stored: StoredArray, boxes: tuple[Box, ...], dtype: np.dtype[Any]
) -> tuple[Layout, int, int]:
    """Returns a layout, the bytes of the buffers, and how many times they are read beside them."""
    sizes = [box.size * dtype.itemsize for box in boxes]
    *starts, room = accumulate((in_place(size) for size in sizes), initial=0)
    places = tuple((box, box.shape, start) for box, start in zip(boxes, starts, strict=True))
    chunks = count_chunks(stored.chunk_shape, boxes)
    layout = Layout(boxes, dtype, places, room, encode_zarr3(stored), chunks, parts=None)
    if stored.zstd is not None:
        return layout, sum(sizes), DECODED
    if count_chunks(stored.unit_shape, boxes) > MAX_KEPT_CHUNKS:
        return layout, sum(sizes), 1
    layout = replace(layout, parts=(parts := tuple(units_read(layout, stored))))
    return layout, sum(sizes), int(any(part.start is None for part in parts))


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
    return layout.places[target][2] + first * layout.dtype.itemsize if is_one_piece else None


@dataclass(slots=True, kw_only=True)
class LeafRead:
    """One leaf to read."""

    leaf: Leaf
    boxes: tuple[Box, ...]  # the distinct parts wanted, in the global array
    dtype: np.dtype[Any]  # of the host buffers
    layout: Layout = field(init=False)
    total_bytes: int = field(init=False)  # of the buffers
    beside: int = field(init=False)  # how often that is held beside them; `DECODED` if decoded

    def __post_init__(self) -> None:
        facts = _layout(self.leaf.array, self.boxes, self.dtype)
        self.layout, self.total_bytes, self.beside = facts


def make_memory(item: Item, *reads: LeafRead) -> Values:
    """Allocates the buffers of all wanted parts of some leaves, one after the other."""
    try:
        return empty(sum(read.layout.room for read in reads))
    except MemoryError as error:
        read = max(reads, key=lambda read: read.total_bytes)
        raise MemoryError(
            f"leaf {read.leaf.text} of {item.path}: this host cannot allocate "
            f"{read.total_bytes} bytes. Restore it in shards, or skip this leaf."
        ) from error


class ChunkJob(NamedTuple):  # there may be a million, and dataclasses take three times as long
    """One chunk, or inner chunk, to read and check."""

    read: LeafRead
    at: int  # where the memory of the leaf begins
    part: Unit
    file: str  # where its bytes begin; their checksum follows them
    offset: int
    wanted: int | None  # the checksum that it was written with, if recorded

    @property
    def size(self) -> int:
        return self.part.size

    @property
    def key(self) -> str:
        return self.read.leaf.prefix + self.part.suffix


class Chunks:
    """Leaves that jaxckpt wrote, read together into one piece of memory.

    Args:
        places: Where the value of each key of the database lies, or the value.
        sums: The checksums that the chunks were written with, if recorded.
    """

    def __init__(
        self,
        item: Item,
        reads: Sequence[LeafRead],
        places: Mapping[str, Place | bytes],
        sums: Mapping[str, Sums] | None,
        pool: Pool,
    ) -> None:
        self.reads = reads
        self._item, self._places, self._sums, self._pool = item, places, sums, pool
        self._storage = item.found.storage
        self._memory: Values | None = None
        self._buffers: deque[Buffers] = deque()
        self._failures: dict[int, Exception] = {}  # the first of each leaf, by `id` of the leaf
        self._under_way: list[Future[None]] = []

    def start(self) -> None:
        """Makes the buffers and starts to fill them; `finish` reports errors."""
        jobs, at = [], 0
        try:
            memory = self._memory = make_memory(self._item, *self.reads)
        except MemoryError as error:
            for read in self.reads:
                self._note(read.leaf, error)
            return
        for read in self.reads:
            try:
                jobs += self._plan(read, at, memory)
            except (CheckpointError, OSError) as error:
                self._note(read.leaf, error)
            at += read.layout.room
        self._under_way = [self._pool.submit(self._read_run, one, memory) for one in adjacent(jobs)]

    def finish(self, failed: Failed, landed: Landed) -> Iterator[Buffers]:
        """Waits for the reads, and yields the buffers of each good leaf."""
        size = sum(read.total_bytes for read in self.reads)
        for i, one in enumerate(self._under_way):
            one.result()
            part = size // (len(self._under_way) - i)  # an estimate: they differ little
            landed(part)
            size -= part
        self._under_way.clear()
        at = 0
        if (memory := self._memory) is not None:
            for read in self.reads:
                self._buffers.append(read.layout.buffers(memory, at))
                at += read.layout.room
        memory = self._memory = None  # it lives as long as one of the arrays in it
        for read in self.reads:
            if (error := self._failures.get(id(read.leaf))) is not None:
                failed(read, blame(self._item, read.leaf, error))
                if self._buffers:  # none if there was no memory
                    self._buffers.popleft()
                continue
            yield self._buffers.popleft()

    def drop(self) -> None:
        """Releases the buffers."""
        self._buffers.clear()
        self._memory = None

    def _note(self, leaf: Leaf, error: Exception) -> None:
        """Records the first error of a leaf; several threads read leaves."""
        if not isinstance(error, CheckpointError):  # which names the leaf itself
            error.add_note(f"while reading leaf {leaf.text}")
        self._failures.setdefault(id(leaf), error)

    def _check_described(self, leaf: Leaf, key: str) -> None:
        """Compares the array's own metadata, which Orbax uses, with the tree."""
        data, file = self._places.get(key), f'{self._item.path}: "{key}"'
        if _describes(data, leaf.array):
            return
        if not isinstance(data, bytes):
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

    def _plan(self, read: LeafRead, at: int, memory: Values) -> list[ChunkJob]:
        """Returns the reads for one leaf. Chunks that lie in a node are put in place at once.

        Raises:
            CorruptCheckpoint: a chunk is missing, or its size or checksum is wrong.
        """
        leaf, layout, path, places = read.leaf, read.layout, self._item.path, self._places
        prefix, stored, view, jobs = leaf.prefix, leaf.array, memoryview(memory), []
        if places.get(prefix + ZARR3) != layout.metadata:
            self._check_described(leaf, prefix + ZARR3)
        sums = None if self._sums is None else self._sums[prefix]
        inner: dict[str, list[Place]] = {}
        for part in units_read(layout, stored) if layout.parts is None else layout.parts:
            suffix, at_inner, unit, nbytes, start, _ = part
            key = prefix + suffix
            place: Place | bytes | None = places.get(key)
            if (
                isinstance(place, bytes)
                and start is not None
                and at_inner is None
                and len(place) == nbytes + CRC_BYTES
                and checksum(place) == CRC_WITH_ITSELF
                and (sums is None or int.from_bytes(place[nbytes:], "little") == sums[unit])
            ):  # at once, since there may be a million
                view[at + start : at + start + nbytes] = place[:nbytes]
                continue
            if place is None:
                raise bad_leaf(leaf, path, f'chunk "{key}" is missing')
            if at_inner is not None:
                if key not in inner:
                    inner[key] = self._inner_places(leaf, key, place)
                place = inner[key][at_inner]
            file, offset, size = ("", 0, len(place)) if isinstance(place, bytes) else place
            if size != nbytes + CRC_BYTES:
                what = f'chunk "{key}" has {size} bytes, expected {nbytes + CRC_BYTES}'
                raise bad_leaf(leaf, f"{path}/{file}" if file else path, what)
            wanted = None if sums is None else int(sums[unit])
            job = ChunkJob(read, at, part, file, offset, wanted)
            if isinstance(place, bytes):
                crc, data = place[nbytes:], np.frombuffer(place, np.uint8, nbytes)
                self._take(job, data, int.from_bytes(crc, "little"), path, memory)
            else:
                jobs.append(job)
        return jobs

    def _inner_places(self, leaf: Leaf, key: str, place: Place | bytes) -> list[Place]:
        """Returns the place of each inner chunk of a chunk, in order."""
        if isinstance(place, bytes):  # an index would be far too large for a node
            raise bad_leaf(leaf, self._item.path, f'chunk "{key}" has no inner chunks')
        try:
            return inner_places(self._storage, self._item.path, leaf.array, place)
        except (ValueError, EOFError) as error:
            path = f"{self._item.path}/{place.file}"
            raise bad_leaf(leaf, path, f'chunk "{key}": {error}') from error

    def _read_run(self, run: list[ChunkJob], memory: Values) -> None:
        leaf, file = run[0].read.leaf, f"{self._item.path}/{run[0].file}"
        crcs, outs, both = np.empty((len(run), CRC_BYTES), np.uint8), [], []
        try:
            for (_, at, part, _, _, _), crc in zip(run, crcs, strict=True):
                if part.start is None:
                    outs.append(np.empty(part.size, np.uint8))
                else:
                    outs.append(memory[at + part.start :][: part.size])
                both += outs[-1], crc
            self._storage.read_into(file, run[0].offset, both)
        except (OSError, EOFError, MemoryError) as error:
            if isinstance(error, StoreError):  # each chunk alone would take as long to fail
                for job in run:
                    self._note(job.read.leaf, error)
            elif len(run) > 1:  # find the chunk that fails
                for job in run:
                    self._read_run([job], memory)
            elif isinstance(error, MemoryError) or is_io_failure(error):
                self._note(leaf, error)
            else:
                what = f'chunk "{run[0].key}" cannot be read: {error}'
                self._note(leaf, bad_leaf(leaf, file, what))
            return
        stored = crcs.view("<u4").ravel().tolist()
        for job, out, crc in zip(run, outs, stored, strict=True):
            self._take(job, out, crc, file, memory)

    def _take(self, job: ChunkJob, data: Values, crc: int, file: str, memory: Values) -> None:
        """Checks the bytes of a chunk, and divides them unless they are in place."""
        leaf, part, layout = job.read.leaf, job.part, job.read.layout
        if (found := checksum(data)) != crc:
            what = f'checksum mismatch in chunk "{job.key}": stored {crc:#010x}'
            what = f"is damaged: {what}, computed {found:#010x}. Restore an older checkpoint."
            self._note(leaf, bad_leaf(leaf, file, what))
        elif job.wanted not in (None, found):
            self._note(leaf, another_chunk(leaf, job.key, file))
        elif part.start is None:
            stored = leaf.array
            chunk = data.view(dtype_of(stored.dtype)).reshape(stored.unit_shape)
            try:
                for target, where, some in part.plan.parts:
                    out = layout.buffer(memory, job.at, target)[where]
                    out[...] = cast(chunk[some], out.dtype, leaf=leaf.text, where=self._item.path)
            except TreeMismatch as error:
                self._note(leaf, error)


def adjacent(jobs: Sequence[Any], *, after: int = CRC_BYTES) -> Iterator[list[Any]]:
    """Yields what is adjacent in a file, with `after` bytes behind each, to be read together."""
    run: list[Any] = []
    size, end = 0, ("", 0)
    for job in sorted(jobs, key=operator.attrgetter("file", "offset")):
        taken, here = job.size + after, (job.file, job.offset)
        if run and (here != end or len(run) >= _RUN_CHUNKS or size + taken > _RUN_BYTES):
            yield run
            run, size = [], 0
        run.append(job)
        size, end = size + taken, (job.file, job.offset + taken)
    if run:
        yield run


def another_chunk(leaf: Leaf, key: str, file: str) -> CorruptCheckpoint:
    """Returns the error for an undamaged chunk that belongs elsewhere."""
    what = f'chunk "{key}" is not the one that was written there. Restore an older checkpoint.'
    return bad_leaf(leaf, file, what)


@lru_cache(maxsize=1 << 10)  # many arrays have the same metadata
def _describes(data: object, stored: StoredArray) -> bool:
    """Returns whether metadata that TensorStore wrote for us describes an array."""
    try:
        return (
            isinstance(data, bytes)
            and decode_metadata(data, 3, leaf="", file="") == stored
            and has_our_codecs(data, file="")
        )
    except CorruptCheckpoint:
        return False
