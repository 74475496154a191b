"""Reads the parts of stored arrays that the shards of this process need, within a budget.

What we wrote is read by `_chunks`, leaves that are small and next to each other at once. Anything
else is read by TensorStore, one leaf at a time: what Orbax wrote, dtypes of less than a byte, and a
few leaves of a checkpoint that has far more (to find them, it does not look at all others).
"""

from __future__ import annotations

import math
import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NoReturn, Protocol, TypeVar

import numpy as np

from jaxckpt._core.box import Box, whole
from jaxckpt._core.plan import count_chunks, plan_chunks, plan_reads
from jaxckpt._core.transfer import empty
from jaxckpt._disk.checksums import stored_sums, units_in
from jaxckpt._disk.chunks import Failures, another_chunk, copy, plan_leaf, start_reads
from jaxckpt._disk.native import Item
from jaxckpt.errors import CheckpointError, CorruptCheckpoint, is_io_failure
from jaxckpt.format.arrays import (
    MAX_UNIT_BYTES,
    PLAIN_DTYPES,
    chunk_key,
    decode_metadata,
    dtype_of,
    has_our_codecs,
    metadata_key,
)
from jaxckpt.format.tree import Leaf, StoredArray

_LARGE_CHUNK_BYTES: Final = 1 << 30
# How many arrays to open ahead of the one that is read.
_OPEN_AHEAD: Final = 64
# What may be under way of one leaf beside its buffers, as a part of the budget.
_WINDOW: Final = 0.25
# Small leaves are read together up to these limits.
_BATCH_BYTES: Final = 16 << 20
_BATCH_LEAVES: Final = 1024
# To look through the whole database pays if this part of its keys is wanted.
_WORTH_LOOKING: Final = 1 / 16
_MAX_THREADS: Final = 16
# For a better message so many are looked through.
_MOST_KEYS: Final = 1 << 20

# What others wrote has as many chunks as its metadata say, whether they are there or not.
CHUNKS_AT_ONCE: Final = 1 << 12
_READS_AT_ONCE: Final = 1 << 10

Values = np.ndarray[Any, Any]
Buffers = dict[Box, Values]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafRead:
    """One leaf to read.

    Attributes:
        boxes: The distinct parts wanted, in the global array.
        dtype: Wanted, of the host buffers.
    """

    leaf: Leaf
    boxes: tuple[Box, ...]
    dtype: np.dtype[Any]
    total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        size = sum(box.size for box in self.boxes) * self.dtype.itemsize
        object.__setattr__(self, "total_bytes", size)


def read_leaves(
    item: Item,
    reads: Sequence[LeafRead],
    *,
    budget_bytes: int,
    failed: Callable[[LeafRead, OSError], None] | None = None,
    landed: Callable[[int], None] | None = None,
) -> Generator[Buffers, None, None]:
    """Yields the buffers of each leaf by box, in order.

    Leaves are read ahead of the one that is yielded while what they take fits into the budget:
    their buffers, and as much again for what TensorStore holds or what has to be cast or divided,
    up to a part of the budget. One that is larger is read alone, in pieces: then the budget is for
    what it takes beside its buffers. The first bad leaf raises when its turn comes.

    Args:
        failed: Is told of a bad leaf instead; the next ones are read.
        landed: Is told, in the caller's thread, of every few bytes that have been read.

    Raises:
        CorruptCheckpoint: stored data is missing or damaged; the leaf and the file are named.
        OSError: it cannot be read now.
    """
    if not reads:
        return
    window_bytes = int(budget_bytes * _WINDOW)
    threads = max(1, min(_MAX_THREADS, 2 + _cores(), window_bytes // MAX_UNIT_BYTES))
    executor = ThreadPoolExecutor(threads, thread_name_prefix="jaxckpt-read")
    started: deque[tuple[int, _Batch]] = deque()
    in_flight = 0
    try:
        for batch in _batches(item, reads, executor, window_bytes):
            cost = sum(r.total_bytes + min(r.total_bytes, window_bytes) for r in batch.reads)
            while started and in_flight + cost > budget_bytes:
                yield from started[0][1].finish(failed, landed or _no)
                in_flight -= started.popleft()[0]
            batch.start()
            started.append((cost, batch))
            in_flight += cost
            del batch
        while started:
            yield from started[0][1].finish(failed, landed or _no)
            started.popleft()
    finally:
        executor.shutdown(cancel_futures=True)
        # An error refers to the calls that it went through, and they to what they hold.
        for _, batch in started:
            batch.drop()


def read_stream(
    item: Item, parts: Iterable[LeafRead | Values], *, budget_bytes: int
) -> Generator[Values, None, None]:
    """Yields the values of parts of leaves, in order.

    Args:
        parts: Each one box of a leaf, or the values, where the metadata hold them.

    Raises:
        As `read_leaves`.
    """
    for some in in_turns(item, parts):
        reads = [part for part in some if isinstance(part, LeafRead)]
        with closing(read_leaves(item, reads, budget_bytes=budget_bytes)) as buffers:
            for part in some:
                yield next(buffers)[part.boxes[0]] if isinstance(part, LeafRead) else part


def in_turns(item: Item, parts: Iterable[_T]) -> Iterator[list[_T]]:
    """Divides what is to be read of an item into lists to read at once.

    To look up where our chunks lie takes time, so ours are read all at once.
    """
    most = None if item.ours else _READS_AT_ONCE
    parts = iter(parts)
    while some := list(islice(parts, most)):
        yield some


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_Failed = Callable[[LeafRead, OSError], None] | None
_Landed = Callable[[int], None]


class _Batch(Protocol):
    """Leaves that are read together."""

    @property
    def reads(self) -> Sequence[LeafRead]: ...

    def start(self) -> None:
        """Makes the buffers and starts to fill them; what goes wrong is raised by `finish`."""
        ...

    def finish(self, failed: _Failed, landed: _Landed) -> Iterator[Buffers]:
        """Waits, and yields the buffers of each leaf."""
        ...

    def drop(self) -> None:
        """Lets go of the buffers."""
        ...


def _batches(
    item: Item, reads: Sequence[LeafRead], executor: Executor, window_bytes: int
) -> Iterator[_Batch]:
    """Finds out how to read, and opens arrays a little ahead of their use."""
    from jaxckpt.storage._arrays import Reader

    ahead: deque[_Batch] = deque()
    with _Blaming(item, None):
        extents = _extents(item, reads)
        reader = Reader(item.checkpoint.storage.kvstore(item.path), database=item.database)
    for group in _grouped(reads, min(_BATCH_BYTES, window_bytes), extents is not None):
        if extents is not None and _is_ours(group[0]):
            ahead.append(_Chunks(item, group, extents, executor))
        else:
            ahead.append(_Regions(item, group[0], reader, window_bytes))
        if len(ahead) > _OPEN_AHEAD:
            yield ahead.popleft()
    yield from ahead


def _is_ours(read: LeafRead) -> bool:
    return read.leaf.array.dtype in PLAIN_DTYPES


def _grouped(
    reads: Sequence[LeafRead], most_bytes: int, may_group: bool
) -> Iterator[list[LeafRead]]:
    group: list[LeafRead] = []
    size = 0
    for read in reads:
        alone = not may_group or not _is_ours(read)
        full = size + read.total_bytes > most_bytes or len(group) >= _BATCH_LEAVES
        if group and (alone or full):
            yield group
            group, size = [], 0
        if alone:
            yield [read]
            continue
        group.append(read)
        size += read.total_bytes
    if group:
        yield group


def _extents(item: Item, reads: Sequence[LeafRead]) -> Mapping[str, Any] | None:
    """Where the values of the database lie; None if it is not ours, or not worth looking."""
    from jaxckpt.storage._arrays import extents

    if not (item.ours and item.database):
        return None
    ours = [read for read in reads if _is_ours(read)]
    wanted = sum(1 + count_chunks(read.leaf.array.chunk_shape, read.boxes) for read in ours)
    if not wanted:
        return None
    storage = item.checkpoint.storage
    return extents(storage.kvstore(item.path), max_keys=int(wanted / _WORTH_LOOKING))


class _Chunks:
    """Leaves that jaxckpt wrote."""

    def __init__(
        self,
        item: Item,
        reads: Sequence[LeafRead],
        extents: Mapping[str, Any],
        executor: Executor,
    ) -> None:
        self.reads = reads
        self._item, self._extents, self._executor = item, extents, executor
        self._buffers: deque[list[np.ndarray[Any, Any]]] = deque()
        self._failures = Failures()
        self._under_way: list[Future[None]] = []
        self._described: dict[bytes, StoredArray] = {}  # most arrays are like others

    def start(self) -> None:
        storage, path = self._item.checkpoint.storage, self._item.path
        sums = self._item.read_sums()

        def read_index(file: str, offset: int, size: int) -> np.ndarray[Any, Any]:
            index = np.empty(size, np.uint8)
            storage.read_into(f"{path}/{file}", offset, [index])
            return index

        jobs = []
        for read in self.reads:
            buffers = []
            try:
                self._check_described(read.leaf)
                buffers = make_buffers(self._item, read)
                jobs += plan_leaf(
                    read.leaf,
                    read.boxes,
                    buffers,
                    self._extents.get,
                    read_index,
                    sums=None if sums is None else sums.of(read.leaf),
                    path=path,
                )
            except (CheckpointError, OSError, MemoryError) as error:
                self._failures.add(read.leaf, error)
            self._buffers.append(buffers)
        self._under_way = start_reads(storage, path, jobs, self._executor, self._failures)

    def _check_described(self, leaf: Leaf) -> None:
        """The tree says how an array lies, and so do its own metadata, which Orbax goes by."""
        key = leaf.prefix + metadata_key(3)
        data, file = self._extents.get(key), f'{self._item.path}: "{key}"'
        if not isinstance(data, bytes):
            what = f"{file}: leaf {leaf.text}: its array metadata is missing"
            raise CorruptCheckpoint(what, leaf=leaf.text, file=file)
        described = self._described.get(data)
        if described is None:
            try:
                described = decode_metadata(data, 3, leaf=leaf.text, file=file)
            except CorruptCheckpoint as error:
                what = f"leaf {leaf.text}: {error}"
                raise CorruptCheckpoint(what, leaf=leaf.text, file=file) from error
            if not has_our_codecs(data, file=file):
                what = f"{file}: leaf {leaf.text}: its codecs are none that jaxckpt writes"
                raise CorruptCheckpoint(what, leaf=leaf.text, file=file)
            self._described[data] = described
        if described != leaf.array:
            raise CorruptCheckpoint(
                f"{file}: leaf {leaf.text}: its array metadata say {described}, the tree says "
                f"{leaf.array}",
                leaf=leaf.text,
                file=file,
            )

    def finish(self, failed: _Failed, landed: _Landed) -> Iterator[Buffers]:
        size = sum(read.total_bytes for read in self.reads)
        for i, one in enumerate(self._under_way):
            one.result()
            part = size // (len(self._under_way) - i)  # about: they differ little
            landed(part)
            size -= part
        self._under_way.clear()
        for read in self.reads:
            try:
                with _Blaming(self._item, read.leaf):
                    self._failures.raise_of(read.leaf)
            except OSError as error:
                if failed is None:
                    raise
                failed(read, error)
                self._buffers.popleft()
                continue
            yield dict(zip(read.boxes, self._buffers.popleft(), strict=True))

    def drop(self) -> None:
        self._buffers.clear()


def make_buffers(item: Item, read: LeafRead) -> list[np.ndarray[Any, Any]]:
    """Memory for the parts of a leaf that are wanted."""
    try:
        return empty([box.shape for box in read.boxes], read.dtype)
    except MemoryError as error:
        raise MemoryError(
            f"leaf {read.leaf.text} of {item.path}: this host has no memory for "
            f"{read.total_bytes} bytes. Restore it in shards, or without that leaf."
        ) from error


# A read under way: how many bytes it needs beside the buffers, what to wait for, and what to do
# with the result of each.
_Task = tuple[int, Sequence[Any], Callable[[Any], None]]


class _Regions:
    """One leaf of any layout: regions of it, which TensorStore reads, decodes and checks."""

    def __init__(self, item: Item, read: LeafRead, reader: Any, window_bytes: int) -> None:
        self.reads = (read,)
        self._item, self._read = item, read
        self._stored = read.leaf.array
        self._dtype = dtype_of(self._stored.dtype)
        self._buffers: list[np.ndarray[Any, Any]] = []
        self._tasks: Iterator[_Task] = iter(())
        self._pending: deque[_Task] = deque()
        self._window_bytes = window_bytes
        self._under_way = 0  # bytes of what is pending
        self._failed: OSError | None = None
        fill = item.tree.fill_missing and self._stored.has_fill
        self._reader = reader
        self._array = reader.open(read.leaf.prefix, item.tree.zarr_version, fill_missing=fill)

    def start(self) -> None:
        try:
            with _Blaming(self._item, self._read.leaf):
                self._tasks = self._issue()
                self._fill_window()
        except OSError as error:
            self._failed = error

    def finish(self, failed: _Failed, landed: _Landed) -> Iterator[Buffers]:
        try:
            if self._failed is not None:
                raise self._failed
            with _Blaming(self._item, self._read.leaf):
                self._wait(landed)
        except OSError as error:
            if failed is None:
                raise
            failed(self._read, error)
            return
        buffers, self._buffers = self._buffers, []
        yield dict(zip(self._read.boxes, buffers, strict=True))

    def drop(self) -> None:
        self._pending.clear()
        self._buffers.clear()

    def _wait(self, landed: _Landed) -> None:
        while self._pending:
            size, pending, then = self._pending.popleft()
            for one in pending:
                then(one.result())
            self._under_way -= size
            landed(size * self._read.dtype.itemsize // self._dtype.itemsize)
            self._fill_window()

    def _fill_window(self) -> None:
        """Starts reads while they fit into the window; at least one is always under way."""
        while self._under_way < self._window_bytes or not self._pending:
            task = next(self._tasks, None)
            if task is None:
                return
            self._pending.append(task)
            self._under_way += task[0]

    def _issue(self) -> Iterator[_Task]:
        from jaxckpt.storage._arrays import chunk_shape_of, read_into, shape_of

        array = self._array.result()
        if shape_of(array) != self._stored.shape:
            raise ValueError(
                f"the array has shape {shape_of(array)}, the tree says {self._stored.shape}"
            )
        if self._item.ours and chunk_shape_of(array) != self._stored.unit_shape:
            raise ValueError(
                f"the array has chunks of shape {chunk_shape_of(array)}, the tree says "
                f"{self._stored.unit_shape}"
            )
        self._try_chunk()
        refuse_others(self._item, self._reader, self._read.leaf, self._read.boxes)
        self._buffers = make_buffers(self._item, self._read)
        boxes = [box for box in self._read.boxes if box.size]
        index = [i for i, box in enumerate(self._read.boxes) if box.size]
        casts = self._dtype != self._read.dtype
        if not casts and self._read.total_bytes <= self._window_bytes:
            outs = [self._buffers[i] for i in index]
            yield self._read.total_bytes, read_into(array, [box.slices for box in boxes], outs), _no
            return
        for region in plan_reads(self._stored, self._dtype.itemsize, boxes):
            parts = [(index[target], part) for target, part in region.parts]
            size = region.box.size * self._dtype.itemsize
            if not casts:
                wheres = [part.slices for _, part in parts]
                outs = [self._buffers[i][part.within(self._read.boxes[i])] for i, part in parts]
                yield size, read_into(array, wheres, outs), _no
                continue
            # Not with TensorStore's own cast: it differs from numpy's for some dtypes of 8 bits.
            temporary = np.empty(region.box.shape, self._dtype)
            pending = read_into(array, [region.box.slices], [temporary])
            yield size, pending, self._divider(temporary, region.box, parts)

    def _try_chunk(self) -> None:
        """TensorStore ends the process if it finds no memory for a chunk."""
        size = math.prod(self._stored.unit_shape) * self._dtype.itemsize
        if size > _LARGE_CHUNK_BYTES:
            try:
                np.empty(size, np.uint8)
            except MemoryError as error:
                raise MemoryError(
                    f"leaf {self._read.leaf.text} of {self._item.path}: this host has no memory "
                    f"for one of its chunks, of {size} bytes"
                ) from error

    def _divider(
        self, values: np.ndarray[Any, Any], box: Box, parts: Sequence[tuple[int, Box]]
    ) -> Callable[[Any], None]:
        def divide(_: Any) -> None:
            for target, part in parts:
                where = part.within(self._read.boxes[target])
                copy(self._buffers[target][where], values[part.within(box)])

        return divide


def refuse_others(item: Item, reader: Any, leaf: Leaf, boxes: tuple[Box, ...]) -> None:
    """Raises if a chunk is not the one that was written, by what it ends with; reads no values."""
    sums, stored = item.read_sums(), leaf.array
    if sums is None:
        return
    wanted = sums.of(leaf).ravel()
    chunks = {plan.index for plan in plan_chunks(stored.chunk_shape, boxes)}
    asked = [(leaf.prefix, stored, index) for index in sorted(chunks)]
    for (_, _, index), found in zip(asked, stored_sums(reader, asked), strict=True):
        if wanted[units_in(stored, index)].tolist() != found:
            raise another_chunk(leaf, leaf.prefix + chunk_key(index), item.path)


def refuse_swapped(item: Item) -> None:
    """Raises CorruptCheckpoint if any chunk of a tree is not the one that was written there."""
    from jaxckpt.storage._arrays import Reader

    with _Blaming(item, None):
        reader = Reader(item.checkpoint.storage.kvstore(item.path), database=item.database)
    for leaf in item.tree.leaves:
        if leaf.has_array:
            with _Blaming(item, leaf):
                refuse_others(item, reader, leaf, (whole(leaf.array.shape),))


def _no(_: Any) -> None:
    """Nothing is to be done: it was read into its place."""


class _Blaming:  # a context manager of few steps: every small leaf enters it twice
    """Names the leaf, and the file if one is missing or short, when stored data cannot be read."""

    def __init__(self, item: Item, leaf: Leaf | None) -> None:
        self._item, self._leaf = item, leaf

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (ValueError, OSError)):
            _blame(self._item, self._leaf, error)


def _blame(item: Item, leaf: Leaf | None, error: Exception) -> NoReturn:
    from jaxckpt.storage._arrays import data_error

    text = leaf.text if leaf else None
    if not isinstance(error, CheckpointError) and not is_io_failure(error):
        error = data_error(error, item.path, text)
    if not isinstance(error, CorruptCheckpoint):
        raise error
    known = error.file is not None and error.file.startswith(f"{item.path}/")  # pyright: ignore
    file, problem = bad_file(item) or (not known and _damaged_file(item, str(error))) or (None, "")
    if file is None:
        raise error
    where = f"leaf {text}: " if text else ""
    raise CorruptCheckpoint(
        f"{where}{file} {problem}. Restore an older checkpoint. ({error})", leaf=text, file=file
    ) from error


def bad_file(item: Item) -> tuple[str, str] | None:
    """The first file that our record lists and that is missing or has another size."""
    checkpoint = item.checkpoint
    for path, facts in checkpoint.record.files.items() if checkpoint.record else ():
        file = f"{checkpoint.path}/{path}"
        if checkpoint.storage.kind(file) is None:
            return file, "is missing"
        if (size := checkpoint.storage.size(file)) != facts.size:
            return file, f"has {size} bytes, {facts.size} were written"
    return None


def _damaged_file(item: Item, message: str) -> tuple[str, str] | None:
    """The data file that holds the chunk that a message of TensorStore names."""
    from jaxckpt.storage._arrays import Extent, extents

    key = re.search(r'"([^"]*(?:/c(?:/\d+)*|[/.\d]+))"', message)
    if key is None or not item.database:
        return None
    try:
        spec = item.checkpoint.storage.kvstore(item.path)
        found = (extents(spec, max_keys=_MOST_KEYS) or {}).get(key[1])
    except (ValueError, OSError):
        return None
    return (f"{item.path}/{found.file}", "is damaged") if isinstance(found, Extent) else None
