"""Reads chunks that jaxckpt wrote from where they lie in a file into the memory where they stay.

TensorStore would do: it reads every layout. But it reads a chunk into memory of its own, checks it
while it copies it into more such memory, and copies it from there into ours; and fresh memory costs
more than the copying. We know the layout, so a chunk that is one piece of one buffer goes there at
once and is checked in place; another goes through memory of its size, to be divided or cast.

Where a chunk lies is told by the nodes of the OCDBT tree. What is in it is `format.arrays`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from jaxckpt._core.box import Box
from jaxckpt._core.plan import ChunkRead, plan_chunks
from jaxckpt._disk.checksums import Sums
from jaxckpt.errors import CheckpointError, CorruptCheckpoint, is_io_failure
from jaxckpt.format.arrays import (
    CRC_BYTES,
    checksum,
    chunk_key,
    decode_index,
    dtype_of,
    index_bytes,
)
from jaxckpt.format.tree import Leaf, StoredArray
from jaxckpt.storage import Storage

# One read takes adjacent chunks up to these limits: the second is a quarter of what `preadv` takes.
_RUN_BYTES: Final = 8 << 20
_RUN_CHUNKS: Final = 256

Buffer = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of a chunk begin that are followed by their checksum."""

    file: str
    offset: int


@dataclass(slots=True)
class ChunkJob:
    """One chunk, or inner chunk, to read and check.

    Attributes:
        leaf: It belongs to.
        key: In the database.
        place: Of its bytes.
        size: Of its values, in bytes.
        out: The memory that it fills, as bytes; None: it is divided by `plan`.
        plan: Which part of it goes where.
        buffers: Of its leaf.
        wanted: The checksum that it was written with, where that was recorded.
    """

    leaf: Leaf
    key: str
    place: Place
    size: int
    out: Buffer | None
    plan: ChunkRead
    buffers: Sequence[Buffer]
    wanted: int | None


class Failures:
    """What went wrong first with each leaf, by `id`; leaves are read by several threads."""

    def __init__(self) -> None:
        self._of: dict[int, Exception] = {}

    def add(self, leaf: Leaf, error: Exception) -> None:
        if not isinstance(error, CheckpointError):  # those name it themselves
            error.add_note(f"That was leaf {leaf.text}.")
        self._of.setdefault(id(leaf), error)

    def get(self, leaf: Leaf) -> Exception | None:
        return self._of.get(id(leaf))


def plan_leaf(
    leaf: Leaf,
    boxes: tuple[Box, ...],
    buffers: Sequence[Buffer],
    find: Callable[[str], tuple[str, int, int] | bytes | None],
    read_index: Callable[[str, int, int], Buffer],
    *,
    sums: Sums | None,
    path: str,
) -> Iterator[ChunkJob]:
    """What to read for one leaf. Chunks that are here already are put in their places.

    Args:
        boxes: The parts of the array that are wanted.
        buffers: One for each of them.
        find: The file, offset and size of the value of a key, or the value.
        read_index: Reads so many bytes of a file from an offset.
        sums: The checksums that the chunks were written with, if recorded.
        path: Of the item, for messages.

    Raises:
        CorruptCheckpoint: a chunk is missing, or has another size than it should have, or another
            checksum.
    """
    stored = leaf.array
    itemsize = dtype_of(stored.dtype).itemsize
    places: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    inner_counts = _inner_counts(stored)
    for plan in plan_chunks(stored.unit_shape, boxes):
        index = plan.index
        if inner_counts is not None:
            index = tuple(i // n for i, n in zip(index, inner_counts, strict=True))
        key = leaf.prefix + chunk_key(index)
        extent = find(key)
        if extent is None:
            raise _bad(leaf, f'{path}: "{key}"', "a chunk is missing")
        job = ChunkJob(
            leaf=leaf,
            key=key,
            place=Place("", 0),
            size=plan.count * itemsize,
            out=_whole_place(plan, buffers, stored),
            plan=plan,
            buffers=buffers,
            wanted=None if sums is None else int(sums[plan.index]),
        )
        if isinstance(extent, bytes):
            if inner_counts is not None:  # it would be far too large for a node
                raise _bad(leaf, path, f'chunk "{key}" has no inner chunks')
            _take(job, extent, path)
            continue
        file, offset, size = extent
        if inner_counts is not None:
            if index not in places:
                places[index] = _read_places(
                    leaf, stored, file, offset, size, read_index, path=path, key=key
                )
            within = tuple(i % n for i, n in zip(plan.index, inner_counts, strict=True))
            at, size = places[index][int(np.ravel_multi_index(within, inner_counts))]
            offset += at
        _check_size(job, size, f"{path}/{file}")
        job.place = Place(file, offset)
        yield job


def _check_size(job: ChunkJob, size: int, file: str) -> None:
    if size != job.size + CRC_BYTES:
        what = f'chunk "{job.key}" has {size} bytes, wanted {job.size + CRC_BYTES}'
        raise _bad(job.leaf, file, what)


def _take(job: ChunkJob, data: bytes, path: str) -> None:
    """Puts a chunk that lay in a node into its place."""
    _check_size(job, len(data), path)
    values = np.frombuffer(data, np.uint8, job.size)
    wanted = int.from_bytes(data[job.size :], "little")
    if (found := checksum(values)) != wanted:
        raise _mismatch(job, path, wanted, found)
    if job.wanted not in (None, found):
        raise _another(job, path)
    _divide(job, values)


def _inner_counts(stored: StoredArray) -> tuple[int, ...] | None:
    """How many inner chunks a chunk has along each dimension."""
    if stored.inner_shape is None:
        return None
    return tuple(n // i for n, i in zip(stored.chunk_shape, stored.inner_shape, strict=True))


def _read_places(
    leaf: Leaf,
    stored: StoredArray,
    file: str,
    offset: int,
    size: int,
    read_index: Callable[[str, int, int], Buffer],
    *,
    path: str,
    key: str,
) -> list[tuple[int, int]]:
    """Where the inner chunks are in their chunk, in order, and their sizes."""
    length = index_bytes(stored)
    try:
        # Of a chunk that is too small for its index: what lies before it, which is no index.
        start = max(0, offset + size - length)
        return decode_index(read_index(file, start, length), size - length)
    except (ValueError, EOFError) as error:
        raise _bad(leaf, f"{path}/{file}", f'chunk "{key}": {error}') from error


def _whole_place(plan: ChunkRead, buffers: Sequence[Buffer], stored: StoredArray) -> Buffer | None:
    """The memory that a chunk fills as it is, if there is such a place."""
    if not plan.is_whole:
        return None
    [(target, where, _)] = plan.parts
    out = buffers[target][where]
    if out.dtype != dtype_of(stored.dtype) or not out.flags.c_contiguous:
        return None
    return out.reshape(-1).view(np.uint8)


def start_reads(
    storage: Storage, path: str, jobs: Sequence[ChunkJob], executor: Executor, failures: Failures
) -> list[Future[None]]:
    """Starts to read chunks, those that are adjacent in a file at once."""
    in_order = sorted(jobs, key=lambda job: (job.place.file, job.place.offset))
    return [_submit(executor, storage, path, run, failures) for run in _runs(in_order)]


def _submit(
    executor: Executor, storage: Storage, path: str, run: list[ChunkJob], failures: Failures
) -> Future[None]:
    try:
        return executor.submit(_read_run, storage, path, run, failures)
    except RuntimeError:  # the interpreter is ending, and starts no more threads
        done: Future[None] = Future()
        done.set_result(_read_run(storage, path, run, failures))
        return done


def _runs(jobs: Sequence[ChunkJob]) -> Iterator[list[ChunkJob]]:
    run: list[ChunkJob] = []
    size, end = 0, Place("", 0)
    for job in jobs:
        taken = job.size + CRC_BYTES
        full = len(run) >= _RUN_CHUNKS or size + taken > _RUN_BYTES
        if run and (full or job.place != end):
            yield run
            run, size = [], 0
        run.append(job)
        size, end = size + taken, Place(job.place.file, job.place.offset + taken)
    if run:
        yield run


def _read_run(storage: Storage, path: str, run: list[ChunkJob], failures: Failures) -> None:
    file, offset = run[0].place.file, run[0].place.offset
    crcs = np.empty((len(run), CRC_BYTES), np.uint8)
    try:
        outs = [np.empty(job.size, np.uint8) if job.out is None else job.out for job in run]
        both = [part for pair in zip(outs, crcs, strict=True) for part in pair]
        storage.read_into(f"{path}/{file}", offset, both)
    except (OSError, EOFError, MemoryError) as error:
        if len(run) > 1:  # which of them is it?
            for job in run:
                _read_run(storage, path, [job], failures)
        elif isinstance(error, MemoryError) or is_io_failure(error):
            failures.add(run[0].leaf, error)
        else:
            what = f'chunk "{run[0].key}" cannot be read: {error}'
            failures.add(run[0].leaf, _bad(run[0].leaf, f"{path}/{file}", what))
        return
    stored = crcs.view("<u4").ravel().tolist()
    for job, out, wanted in zip(run, outs, stored, strict=True):
        if (found := checksum(out)) != wanted:
            failures.add(job.leaf, _mismatch(job, f"{path}/{file}", wanted, found))
        elif job.wanted not in (None, found):
            failures.add(job.leaf, _another(job, f"{path}/{file}"))
        elif job.out is None:
            _divide(job, out)


def _divide(job: ChunkJob, data: Buffer) -> None:
    stored = job.leaf.array
    chunk = data.view(dtype_of(stored.dtype)).reshape(stored.unit_shape)
    for target, where, part in job.plan.parts:
        copy(job.buffers[target][where], chunk[part])


def copy(out: Buffer, values: Buffer) -> None:
    """Copies, casting where the dtypes differ; overflow and NaN go as numpy has them go."""
    if out.dtype == values.dtype:
        out[...] = values
        return
    with np.errstate(all="ignore"):
        try:
            out[...] = values.astype(out.dtype)
        except TypeError:  # two ml_dtypes that know nothing of each other
            out[...] = values.astype(np.float32).astype(out.dtype)


def _mismatch(job: ChunkJob, file: str, stored: int, found: int) -> CorruptCheckpoint:
    return _bad(
        job.leaf,
        file,
        f'is damaged: checksum mismatch in chunk "{job.key}": stored {stored:#010x}, computed '
        f"{found:#010x}. Restore an older checkpoint.",
    )


def _another(job: ChunkJob, file: str) -> CorruptCheckpoint:
    return another_chunk(job.leaf, job.key, file)


def another_chunk(leaf: Leaf, key: str, file: str) -> CorruptCheckpoint:
    """What a chunk is that is whole and is not the one that was written."""
    what = f'chunk "{key}" is not the one that was written there. Restore an older checkpoint.'
    return _bad(leaf, file, what)


def _bad(leaf: Leaf, file: str, what: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"{file}: leaf {leaf.text}: {what}", leaf=leaf.text, file=file)
