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
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from jaxckpt._core.box import Box
from jaxckpt._core.cast import cast
from jaxckpt._core.plan import ChunkRead, plan_chunks
from jaxckpt._core.transfer import empty
from jaxckpt._disk.checksums import Sums, grid_of
from jaxckpt._disk.damage import blame
from jaxckpt._disk.native import Item
from jaxckpt.errors import CheckpointError, CorruptCheckpoint, TreeMismatch, is_io_failure
from jaxckpt.format.arrays import (
    CRC_BYTES,
    checksum,
    chunk_key,
    decode_index,
    decode_metadata,
    dtype_of,
    encode_zarr3,
    has_our_codecs,
    index_bytes,
)
from jaxckpt.format.names import ZARR3
from jaxckpt.format.tree import Leaf, StoredArray, bad_leaf

# One read takes adjacent chunks up to these limits: the second is a quarter of what `preadv` takes.
_RUN_BYTES: Final = 8 << 20
_RUN_CHUNKS: Final = 256

Values = np.ndarray[Any, Any]
Buffers = dict[Box, Values]
Failed = Callable[["LeafRead", Exception], None]  # raises the error of a bad leaf, or goes on
Landed = Callable[[int], None]  # takes a number of bytes read, in the caller's thread
Place = tuple[str, int, int]  # file, offset and size


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafRead:
    """One leaf to read."""

    leaf: Leaf
    boxes: tuple[Box, ...]  # the distinct parts wanted, in the global array
    dtype: np.dtype[Any]  # of the host buffers
    total_bytes: int = field(init=False)  # of the buffers
    is_plain: bool = field(init=False)  # whether our chunks have the bytes of its values

    def __post_init__(self) -> None:
        size = sum(box.size for box in self.boxes) * self.dtype.itemsize
        object.__setattr__(self, "total_bytes", size)
        stored = self.leaf.stored  # None for tensors of safetensors files
        is_plain = stored is not None and stored.zstd is None
        object.__setattr__(self, "is_plain", is_plain)


def make_buffers(item: Item, read: LeafRead) -> list[Values]:
    """Allocates memory for the wanted parts of a leaf."""
    try:
        return empty([box.shape for box in read.boxes], read.dtype)
    except MemoryError as error:
        raise MemoryError(
            f"leaf {read.leaf.text} of {item.path}: this host cannot allocate "
            f"{read.total_bytes} bytes. Restore it in shards, or skip this leaf."
        ) from error


class ChunkJob(NamedTuple):  # there may be a million, and dataclasses take three times as long
    """One chunk, or inner chunk, to read and check."""

    leaf: Leaf
    key: str  # in the database
    file: str  # where its bytes begin; their checksum follows them
    offset: int
    size: int  # bytes of its values
    out: Values | None  # the memory that it fills, as bytes; None if `plan` divides it
    plan: ChunkRead
    buffers: Sequence[Values]  # of its leaf
    wanted: int | None  # the checksum that it was written with, if recorded


class Chunks:
    """Leaves that jaxckpt wrote, read together.

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
        executor: Executor,
    ) -> None:
        self.reads = reads
        self._item, self._places, self._sums, self._executor = item, places, sums, executor
        self._storage = item.found.storage
        self._buffers: deque[list[Values]] = deque()
        self._failures: dict[int, Exception] = {}  # the first of each leaf, by `id` of the leaf
        self._under_way: list[Future[None]] = []

    def start(self) -> None:
        """Makes the buffers and starts to fill them; `finish` reports errors."""
        jobs = []
        for read in self.reads:
            buffers = []
            try:
                self._check_described(read.leaf)
                buffers = make_buffers(self._item, read)
                jobs += self._plan(read, buffers)
            except (CheckpointError, OSError, MemoryError) as error:
                self._note(read.leaf, error)
            self._buffers.append(buffers)
        self._under_way = [self._submit(run) for run in adjacent(jobs)]

    def finish(self, failed: Failed, landed: Landed) -> Iterator[Buffers]:
        """Waits for the reads, and yields the buffers of each good leaf."""
        size = sum(read.total_bytes for read in self.reads)
        for i, one in enumerate(self._under_way):
            one.result()
            part = size // (len(self._under_way) - i)  # an estimate: they differ little
            landed(part)
            size -= part
        self._under_way.clear()
        for read in self.reads:
            error = self._failures.get(id(read.leaf))
            if error is not None:
                failed(read, blame(self._item, read.leaf, error))
                self._buffers.popleft()
                continue
            yield dict(zip(read.boxes, self._buffers.popleft(), strict=True))

    def drop(self) -> None:
        """Releases the buffers."""
        self._buffers.clear()

    def _note(self, leaf: Leaf, error: Exception) -> None:
        """Records the first error of a leaf; several threads read leaves."""
        if not isinstance(error, CheckpointError):  # which names the leaf itself
            error.add_note(f"while reading leaf {leaf.text}")
        self._failures.setdefault(id(leaf), error)

    def _check_described(self, leaf: Leaf) -> None:
        """Compares the array's own metadata, which Orbax uses, with the tree."""
        key = leaf.prefix + ZARR3
        data = self._places.get(key)
        if data == encode_zarr3(leaf.array) or _describes(data, leaf.array):
            return
        file = f'{self._item.path}: "{key}"'
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

    def _plan(self, read: LeafRead, buffers: Sequence[Values]) -> Iterator[ChunkJob]:
        """Yields the reads for one leaf. Chunks that lie in a node are put in place at once.

        Raises:
            CorruptCheckpoint: a chunk is missing, or its size or checksum is wrong.
        """
        leaf, stored, path = read.leaf, read.leaf.array, self._item.path
        itemsize, prefix = dtype_of(stored.dtype).itemsize, leaf.prefix
        sums = None if self._sums is None else self._sums[prefix].reshape(grid_of(stored))
        counts = tuple(map(operator.floordiv, stored.chunk_shape, stored.unit_shape))
        inner: dict[str, list[Place]] = {}
        for plan in plan_chunks(stored.unit_shape, read.boxes):
            key = prefix + chunk_key(tuple(map(operator.floordiv, plan.index, counts)))
            place: Place | bytes | None = self._places.get(key)
            if place is None:
                raise bad_leaf(leaf, path, f'chunk "{key}" is missing')
            if stored.inner_shape is not None:
                if key not in inner:
                    inner[key] = self._inner_places(leaf, key, place)
                within = tuple(map(operator.mod, plan.index, counts))
                place = inner[key][int(np.ravel_multi_index(within, counts))]
            file, offset, size = ("", 0, len(place)) if isinstance(place, bytes) else place
            job = ChunkJob(
                leaf=leaf,
                key=key,
                file=file,
                offset=offset,
                size=plan.count * itemsize,
                out=_whole_place(plan, buffers, stored) if file else None,
                plan=plan,
                buffers=buffers,
                wanted=None if sums is None else int(sums[plan.index]),
            )
            if size != job.size + CRC_BYTES:
                what = f'chunk "{key}" has {size} bytes, expected {job.size + CRC_BYTES}'
                raise bad_leaf(leaf, f"{path}/{file}" if file else path, what)
            if isinstance(place, bytes):
                crc = int.from_bytes(place[job.size :], "little")
                self._take(job, np.frombuffer(place, np.uint8, job.size), crc, path)
            else:
                yield job

    def _inner_places(self, leaf: Leaf, key: str, place: Place | bytes) -> list[Place]:
        """Returns the place of each inner chunk of a chunk, in order."""
        if isinstance(place, bytes):  # an index would be far too large for a node
            raise bad_leaf(leaf, self._item.path, f'chunk "{key}" has no inner chunks')
        file, offset, size = place
        path, index = f"{self._item.path}/{file}", np.empty(index_bytes(leaf.array), np.uint8)
        try:
            # If the chunk is too small for its index, this reads what lies before it: not an index.
            self._storage.read_into(path, max(0, offset + size - index.size), [index])
            inner = decode_index(index, size - index.size)
        except (ValueError, EOFError) as error:
            raise bad_leaf(leaf, path, f'chunk "{key}": {error}') from error
        return [(file, offset + at, length) for at, length in inner]

    def _submit(self, run: list[ChunkJob]) -> Future[None]:
        try:
            return self._executor.submit(self._read_run, run)
        except RuntimeError:  # the interpreter is ending, and starts no more threads
            done: Future[None] = Future()
            done.set_result(self._read_run(run))
            return done

    def _read_run(self, run: list[ChunkJob]) -> None:
        leaf, file = run[0].leaf, f"{self._item.path}/{run[0].file}"
        crcs = np.empty((len(run), CRC_BYTES), np.uint8)
        try:
            outs = [np.empty(job.size, np.uint8) if job.out is None else job.out for job in run]
            both = [part for pair in zip(outs, crcs, strict=True) for part in pair]
            self._storage.read_into(file, run[0].offset, both)
        except (OSError, EOFError, MemoryError) as error:
            if len(run) > 1:  # find the chunk that fails
                for job in run:
                    self._read_run([job])
            elif isinstance(error, MemoryError) or is_io_failure(error):
                self._note(leaf, error)
            else:
                what = f'chunk "{run[0].key}" cannot be read: {error}'
                self._note(leaf, bad_leaf(leaf, file, what))
            return
        stored = crcs.view("<u4").ravel().tolist()
        for job, out, crc in zip(run, outs, stored, strict=True):
            self._take(job, out, crc, file)

    def _take(self, job: ChunkJob, data: Values, crc: int, file: str) -> None:
        """Checks the bytes of a chunk, and divides them unless they are in place."""
        leaf, stored = job.leaf, job.leaf.array
        if (found := checksum(data)) != crc:
            what = f'checksum mismatch in chunk "{job.key}": stored {crc:#010x}'
            what = f"is damaged: {what}, computed {found:#010x}. Restore an older checkpoint."
            self._note(leaf, bad_leaf(leaf, file, what))
        elif job.wanted not in (None, found):
            self._note(leaf, another_chunk(leaf, job.key, file))
        elif job.out is None:
            chunk = data.view(dtype_of(stored.dtype)).reshape(stored.unit_shape)
            try:
                for target, where, part in job.plan.parts:
                    out = job.buffers[target][where]
                    out[...] = cast(chunk[part], out.dtype, leaf=leaf.text, place=self._item.path)
            except TreeMismatch as error:
                self._note(leaf, error)


def _whole_place(plan: ChunkRead, buffers: Sequence[Values], stored: StoredArray) -> Values | None:
    """Returns the memory that a chunk fills without division or cast, if there is any."""
    if not plan.is_whole:
        return None
    [(target, where, _)] = plan.parts
    out = buffers[target][where]
    if out.dtype != dtype_of(stored.dtype) or not out.flags.c_contiguous:
        return None
    return out.reshape(-1).view(np.uint8)


def adjacent(jobs: Sequence[Any], *, after: int = CRC_BYTES) -> Iterator[list[Any]]:
    """Yields what is adjacent in a file, with `after` bytes behind each, to be read together."""
    run: list[Any] = []
    size, end = 0, ("", 0)
    for job in sorted(jobs, key=lambda job: (job.file, job.offset)):
        taken = job.size + after
        full = len(run) >= _RUN_CHUNKS or size + taken > _RUN_BYTES
        if run and (full or (job.file, job.offset) != end):
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


def nothing(_: Any) -> None:
    pass
