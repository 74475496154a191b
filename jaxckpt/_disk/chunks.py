"""Reads chunks that jaxckpt wrote from their place in a file directly into the final memory.

TensorStore reads every layout, but it reads a chunk into memory of its own, checks it while copying
it into more such memory, and copies it from there into ours; and fresh memory costs more than the
copying. We know the layout, so a chunk that is one piece of one buffer is read into it and checked
in place; any other goes through memory of its size, to be divided or cast.

The nodes of the OCDBT tree record where a chunk lies; `format.arrays` describes its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from jaxckpt._core.box import Box
from jaxckpt._core.cast import cast
from jaxckpt._core.plan import ChunkRead, plan_chunks
from jaxckpt._disk.checksums import Sums
from jaxckpt._disk.damage import bad_leaf
from jaxckpt.errors import CheckpointError, CorruptCheckpoint, TreeMismatch, is_io_failure
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
    """Where the bytes of a chunk begin; their checksum follows them."""

    file: str
    offset: int


@dataclass(slots=True)
class ChunkJob:
    """One chunk, or inner chunk, to read and check."""

    leaf: Leaf
    key: str  # in the database
    place: Place
    size: int  # bytes of its values
    out: Buffer | None  # the memory that it fills, as bytes; None if `plan` divides it
    plan: ChunkRead
    buffers: Sequence[Buffer]  # of its leaf
    wanted: int | None  # the checksum that it was written with, if recorded


# The first error of each leaf, by `id` of the leaf.
Failures = dict[int, Exception]


def note_failure(failures: Failures, leaf: Leaf, error: Exception) -> None:
    """Records the first error of a leaf; several threads read leaves."""
    if not isinstance(error, CheckpointError):  # which names the leaf itself
        error.add_note(f"while reading leaf {leaf.text}")
    failures.setdefault(id(leaf), error)


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
    """Yields the reads for one leaf. Chunks that lie in a node are put in their places at once.

    Args:
        boxes: The wanted parts of the array.
        buffers: One for each box.
        find: Returns the file, offset and size of the value of a key, or the value.
        read_index: Reads bytes of a file, by offset and size.
        sums: The checksums that the chunks were written with, if recorded.
        path: The item's path, for messages.

    Raises:
        CorruptCheckpoint: a chunk is missing, or its size or checksum is wrong.
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
            raise bad_leaf(leaf, path, f'chunk "{key}" is missing')
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
                raise bad_leaf(leaf, path, f'chunk "{key}" has no inner chunks')
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
        what = f'chunk "{job.key}" has {size} bytes, expected {job.size + CRC_BYTES}'
        raise bad_leaf(job.leaf, file, what)


def _take(job: ChunkJob, data: bytes, path: str) -> None:
    _check_size(job, len(data), path)
    values = np.frombuffer(data, np.uint8, job.size)
    wanted = int.from_bytes(data[job.size :], "little")
    if (found := checksum(values)) != wanted:
        raise _mismatch(job, path, wanted, found)
    if job.wanted not in (None, found):
        raise another_chunk(job.leaf, job.key, path)
    _divide(job, values, path)


def _inner_counts(stored: StoredArray) -> tuple[int, ...] | None:
    """Returns the number of inner chunks of a chunk along each dimension; None without them."""
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
    """Returns the offset and size of each inner chunk in its chunk, in order."""
    length = index_bytes(stored)
    try:
        # If the chunk is too small for its index, this reads what lies before it: not an index.
        start = max(0, offset + size - length)
        return decode_index(read_index(file, start, length), size - length)
    except (ValueError, EOFError) as error:
        raise bad_leaf(leaf, f"{path}/{file}", f'chunk "{key}": {error}') from error


def _whole_place(plan: ChunkRead, buffers: Sequence[Buffer], stored: StoredArray) -> Buffer | None:
    """Returns the memory that a chunk fills without division or cast, if there is any."""
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
    """Starts to read chunks; chunks adjacent in a file are read together."""
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
        if len(run) > 1:  # find the chunk that fails
            for job in run:
                _read_run(storage, path, [job], failures)
        elif isinstance(error, MemoryError) or is_io_failure(error):
            note_failure(failures, run[0].leaf, error)
        else:
            what = f'chunk "{run[0].key}" cannot be read: {error}'
            note_failure(failures, run[0].leaf, bad_leaf(run[0].leaf, f"{path}/{file}", what))
        return
    stored = crcs.view("<u4").ravel().tolist()
    for job, out, wanted in zip(run, outs, stored, strict=True):
        if (found := checksum(out)) != wanted:
            note_failure(failures, job.leaf, _mismatch(job, f"{path}/{file}", wanted, found))
        elif job.wanted not in (None, found):
            note_failure(failures, job.leaf, another_chunk(job.leaf, job.key, f"{path}/{file}"))
        elif job.out is None:
            try:
                _divide(job, out, path)
            except TreeMismatch as error:
                note_failure(failures, job.leaf, error)


def _divide(job: ChunkJob, data: Buffer, path: str) -> None:
    stored = job.leaf.array
    chunk = data.view(dtype_of(stored.dtype)).reshape(stored.unit_shape)
    for target, where, part in job.plan.parts:
        copy(job.buffers[target][where], chunk[part], leaf=job.leaf.text, place=path)


def copy(out: Buffer, values: Buffer, *, leaf: str, place: str) -> None:
    """Copies values of a leaf, casting if the dtypes differ."""
    is_same = out.dtype == values.dtype
    out[...] = values if is_same else cast(values, out.dtype, leaf=leaf, place=place)


def _mismatch(job: ChunkJob, file: str, stored: int, found: int) -> CorruptCheckpoint:
    return bad_leaf(
        job.leaf,
        file,
        f'is damaged: checksum mismatch in chunk "{job.key}": stored {stored:#010x}, computed '
        f"{found:#010x}. Restore an older checkpoint.",
    )


def another_chunk(leaf: Leaf, key: str, file: str) -> CorruptCheckpoint:
    """Returns the error for an undamaged chunk that belongs elsewhere."""
    what = f'chunk "{key}" is not the one that was written there. Restore an older checkpoint.'
    return bad_leaf(leaf, file, what)
