"""Reads the parts of stored arrays that the shards of this process need, within a budget.

`chunks` reads our own arrays, small adjacent leaves together. TensorStore (`regions`) reads
everything else, one leaf at a time: arrays of Orbax, dtypes of less than a byte, and a few leaves
of a checkpoint that has far more, since it finds them without a look at all others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Final, Protocol

import numpy as np

from jaxckpt._core.plan import count_chunks
from jaxckpt._disk.checksums import ChunkSums
from jaxckpt._disk.chunks import Failures, note_failure, plan_leaf, start_reads
from jaxckpt._disk.damage import bad_leaf, blame
from jaxckpt._disk.native import Item
from jaxckpt._disk.regions import (
    Buffers,
    Failed,
    Landed,
    LeafRead,
    Regions,
    make_buffers,
    nothing,
    open_reader,
)
from jaxckpt.errors import CheckpointError, CorruptCheckpoint
from jaxckpt.format.arrays import (
    MAX_UNIT_BYTES,
    PLAIN_DTYPES,
    decode_metadata,
    encode_zarr3,
    has_our_codecs,
    metadata_key,
)
from jaxckpt.format.tree import Leaf, StoredArray

# How many arrays to open ahead of the one being read.
_OPEN_AHEAD: Final = 64
# The share of the budget for one leaf's reads in flight, beside its buffers.
_WINDOW: Final = 0.25
# Small leaves are read together up to these limits.
_BATCH_BYTES: Final = 16 << 20
_BATCH_LEAVES: Final = 1024
# Listing the whole database pays if at least this share of its keys is wanted.
_WORTH_LOOKING: Final = 1 / 16
_MAX_THREADS: Final = 16


def read_leaves(
    item: Item,
    reads: Sequence[LeafRead],
    *,
    budget_bytes: int,
    failed: Failed | None = None,
    landed: Callable[[int], None] | None = None,
) -> Generator[Buffers, None, None]:
    """Yields the buffers of each leaf by box, in order.

    Leaves are read ahead while they fit into the budget: their buffers, and as much again, up to a
    share of the budget, for what TensorStore holds or what is cast or divided. A larger leaf is
    read alone, in pieces, and the budget is for the memory it takes beside its buffers. The first
    bad leaf raises when its turn comes.

    Args:
        failed: Called with a bad leaf and its error instead of raising; later leaves are read.
        landed: Called in the caller's thread with the number of bytes read since the last call.

    Raises:
        CorruptCheckpoint: stored data is missing or damaged; the error names leaf and file.
        OSError: the storage fails to read it.
    """
    if not reads:
        return
    from jaxckpt.storage._arrays import usable_cores

    failed, landed = failed or _raise, landed or nothing
    window_bytes = int(budget_bytes * _WINDOW)
    threads = max(1, min(_MAX_THREADS, 2 + usable_cores(), window_bytes // MAX_UNIT_BYTES))
    executor = ThreadPoolExecutor(threads, thread_name_prefix="jaxckpt-read")
    started: deque[tuple[int, _Batch]] = deque()
    in_flight = 0
    try:
        for batch in _batches(item, reads, executor, window_bytes):
            cost = sum(r.total_bytes + min(r.total_bytes, window_bytes) for r in batch.reads)
            while started and in_flight + cost > budget_bytes:
                yield from started[0][1].finish(failed, landed)
                in_flight -= started.popleft()[0]
            batch.start()
            started.append((cost, batch))
            in_flight += cost
            del batch
        while started:
            yield from started[0][1].finish(failed, landed)
            started.popleft()
    finally:
        executor.shutdown(cancel_futures=True)
        # An error's traceback refers to the frames it passed, and they refer to the buffers.
        for _, batch in started:
            batch.drop()


def _raise(_: LeafRead, error: Exception) -> None:
    raise error


class _Batch(Protocol):
    """Leaves that are read together."""

    @property
    def reads(self) -> Sequence[LeafRead]: ...

    def start(self) -> None:
        """Makes the buffers and starts to fill them; `finish` reports errors."""
        ...

    def finish(self, failed: Failed, landed: Landed) -> Iterator[Buffers]:
        """Waits for the reads, and yields the buffers of each good leaf."""
        ...

    def drop(self) -> None:
        """Releases the buffers."""
        ...


def _batches(
    item: Item, reads: Sequence[LeafRead], executor: Executor, window_bytes: int
) -> Iterator[_Batch]:
    """Chooses the reader of each leaf, and opens arrays a little ahead of their use."""
    try:
        extents, reader = _extents(item, reads), None
        sums = None if extents is None else item.read_sums()
        ahead: deque[_Batch] = deque()
        for group in _grouped(reads, min(_BATCH_BYTES, window_bytes), extents is not None):
            if extents is not None and group[0].leaf.array.dtype in PLAIN_DTYPES:
                ahead.append(_Chunks(item, group, extents, sums, executor))
            else:
                reader = reader or open_reader(item)
                ahead.append(Regions(item, group[0], reader, window_bytes))
            if len(ahead) > _OPEN_AHEAD:
                yield ahead.popleft()
        yield from ahead
    except (ValueError, OSError) as error:
        raise blame(item, None, error) from error


def _grouped(
    reads: Sequence[LeafRead], most_bytes: int, may_group: bool
) -> Iterator[list[LeafRead]]:
    group: list[LeafRead] = []
    size = 0
    for read in reads:
        alone = not may_group or read.leaf.array.dtype not in PLAIN_DTYPES
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
    """Returns where the values of the database lie; None if it is foreign or too large to list."""
    from jaxckpt.storage._arrays import extents

    if not (item.ours and item.database):
        return None
    ours = [read for read in reads if read.leaf.array.dtype in PLAIN_DTYPES]
    wanted = sum(1 + count_chunks(read.leaf.array.chunk_shape, read.boxes) for read in ours)
    if not wanted:
        return None
    spec = item.found.storage.kvstore(item.path)
    return extents(spec, max_keys=int(wanted / _WORTH_LOOKING))


class _Chunks:
    """Leaves that jaxckpt wrote."""

    def __init__(
        self,
        item: Item,
        reads: Sequence[LeafRead],
        extents: Mapping[str, Any],
        sums: ChunkSums | None,
        executor: Executor,
    ) -> None:
        self.reads = reads
        self._item, self._extents, self._sums, self._executor = item, extents, sums, executor
        self._buffers: deque[list[np.ndarray[Any, Any]]] = deque()
        self._failures: Failures = {}
        self._under_way: list[Future[None]] = []

    def start(self) -> None:
        storage, path = self._item.found.storage, self._item.path

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
                    sums=None if self._sums is None else self._sums.of(read.leaf),
                    path=path,
                )
            except (CheckpointError, OSError, MemoryError) as error:
                note_failure(self._failures, read.leaf, error)
            self._buffers.append(buffers)
        self._under_way = start_reads(storage, path, jobs, self._executor, self._failures)

    def _check_described(self, leaf: Leaf) -> None:
        """Compares the array's own metadata, which Orbax uses, with the tree."""
        key = leaf.prefix + metadata_key(3)
        data = self._extents.get(key)
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

    def finish(self, failed: Failed, landed: Landed) -> Iterator[Buffers]:
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
        self._buffers.clear()


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
