"""Reads the parts of stored arrays that the shards of this process need, within a budget.

What we wrote is read by `chunks`, leaves that are small and next to each other at once. Anything
else is read by TensorStore (`regions`), one leaf at a time: what Orbax wrote, dtypes of less than a
byte, and a few leaves of a checkpoint that has far more (to find them, it does not look at all
others).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Final, Protocol

import numpy as np

from jaxckpt._core.plan import count_chunks
from jaxckpt._disk.chunks import Failures, plan_leaf, start_reads
from jaxckpt._disk.damage import blame
from jaxckpt._disk.native import Item
from jaxckpt._disk.regions import Buffers, Failed, Landed, LeafRead, Regions, make_buffers
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


def read_leaves(
    item: Item,
    reads: Sequence[LeafRead],
    *,
    budget_bytes: int,
    failed: Failed | None = None,
    landed: Callable[[int], None] | None = None,
) -> Generator[Buffers, None, None]:
    """Yields the buffers of each leaf by box, in order.

    Leaves are read ahead of the one that is yielded while what they take fits into the budget:
    their buffers, and as much again for what TensorStore holds or what has to be cast or divided,
    up to a part of the budget. One that is larger is read alone, in pieces: then the budget is for
    what it takes beside its buffers. The first bad leaf raises when its turn comes.

    Args:
        failed: Is called with a bad leaf and its error instead; the next ones are read.
        landed: Is called, in the caller's thread, with every few bytes that have been read.

    Raises:
        CorruptCheckpoint: stored data is missing or damaged; the leaf and the file are named.
        OSError: it cannot be read now.
    """
    if not reads:
        return
    from jaxckpt.storage._arrays import usable_cores

    failed, landed = failed or _raise, landed or _nothing
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
        # An error refers to the calls that it went through, and they to what they hold.
        for _, batch in started:
            batch.drop()


def _raise(_: LeafRead, error: Exception) -> None:
    raise error


def _nothing(_: int) -> None:
    pass


class _Batch(Protocol):
    """Leaves that are read together."""

    @property
    def reads(self) -> Sequence[LeafRead]: ...

    def start(self) -> None:
        """Makes the buffers and starts to fill them; `finish` reports what goes wrong."""
        ...

    def finish(self, failed: Failed, landed: Landed) -> Iterator[Buffers]:
        """Waits, and yields the buffers of each good leaf."""
        ...

    def drop(self) -> None:
        """Lets go of the buffers."""
        ...


def _batches(
    item: Item, reads: Sequence[LeafRead], executor: Executor, window_bytes: int
) -> Iterator[_Batch]:
    """Chooses the reader of each leaf, and opens arrays a little ahead of their use."""
    try:
        extents, reader = _extents(item, reads), None
        ahead: deque[_Batch] = deque()
        for group in _grouped(reads, min(_BATCH_BYTES, window_bytes), extents is not None):
            if extents is not None and group[0].leaf.array.dtype in PLAIN_DTYPES:
                ahead.append(_Chunks(item, group, extents, executor))
            else:
                reader = reader or _reader(item)
                ahead.append(Regions(item, group[0], reader, window_bytes))
            if len(ahead) > _OPEN_AHEAD:
                yield ahead.popleft()
        yield from ahead
    except (ValueError, OSError) as error:
        raise blame(item, None, error) from error


def _reader(item: Item) -> Any:  # a `Reader` of storage._arrays
    from jaxckpt.storage._arrays import Reader

    return Reader(item.found.storage.kvstore(item.path), database=item.database)


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
    """Finds where the values of the database lie; None if not ours, or not worth looking."""
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
        executor: Executor,
    ) -> None:
        self.reads = reads
        self._item, self._extents, self._executor = item, extents, executor
        self._buffers: deque[list[np.ndarray[Any, Any]]] = deque()
        self._failures = Failures()
        self._under_way: list[Future[None]] = []

    def start(self) -> None:
        storage, path = self._item.found.storage, self._item.path
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
        """Compares the array's own metadata, by which Orbax goes, with what the tree says."""
        key = leaf.prefix + metadata_key(3)
        data = self._extents.get(key)
        if data == encode_zarr3(leaf.array) or _describes(data, leaf.array):
            return
        file = f'{self._item.path}: "{key}"'
        what = f"{file}: leaf {leaf.text}"
        if not isinstance(data, bytes):
            problem = f"{what}: its array metadata is missing"
            raise CorruptCheckpoint(problem, leaf=leaf.text, file=file)
        try:
            described = decode_metadata(data, 3, leaf=leaf.text, file=file)
        except CorruptCheckpoint as error:
            problem = f"leaf {leaf.text}: {error}"
            raise CorruptCheckpoint(problem, leaf=leaf.text, file=file) from error
        if not has_our_codecs(data, file=file):
            problem = f"{what}: jaxckpt writes no such codecs"
            raise CorruptCheckpoint(problem, leaf=leaf.text, file=file)
        if described != leaf.array:
            problem = f"{what}: its array metadata say {described}, the tree says {leaf.array}"
            raise CorruptCheckpoint(problem, leaf=leaf.text, file=file)

    def finish(self, failed: Failed, landed: Landed) -> Iterator[Buffers]:
        size = sum(read.total_bytes for read in self.reads)
        for i, one in enumerate(self._under_way):
            one.result()
            part = size // (len(self._under_way) - i)  # about: they differ little
            landed(part)
            size -= part
        self._under_way.clear()
        for read in self.reads:
            error = self._failures.get(read.leaf)
            if error is not None:
                failed(read, blame(self._item, read.leaf, error))
                self._buffers.popleft()
                continue
            yield dict(zip(read.boxes, self._buffers.popleft(), strict=True))

    def drop(self) -> None:
        self._buffers.clear()


@lru_cache(maxsize=1 << 10)  # most arrays are like others
def _describes(data: object, stored: StoredArray) -> bool:
    """Returns whether metadata that TensorStore wrote for us describe an array."""
    try:
        return (
            isinstance(data, bytes)
            and decode_metadata(data, 3, leaf="", file="") == stored
            and has_our_codecs(data, file="")
        )
    except CorruptCheckpoint:
        return False
