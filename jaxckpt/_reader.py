"""Reads the parts of stored arrays that the shards of this process need, within a budget."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import numpy as np

from jaxckpt._box import Box
from jaxckpt._item import Item
from jaxckpt._plan import ChunkRead, plan_chunks, plan_reads
from jaxckpt._transfer import empty
from jaxckpt._writer import is_direct
from jaxckpt.errors import CheckpointError, CorruptCheckpoint
from jaxckpt.format.arrays import chunk_key, decode_chunk, dtype_of
from jaxckpt.format.tree import Leaf

# How many arrays to open ahead of the one that is read.
_OPEN_AHEAD: Final = 64
# What may be under way of one leaf beside its buffers, as a part of the budget.
_WINDOW: Final = 0.25


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
    item: Item, reads: Sequence[LeafRead], *, budget_bytes: int
) -> Iterator[dict[Box, np.ndarray[Any, Any]]]:
    """Yields the buffers of each leaf by box, in order.

    Leaves are read ahead of the one that is yielded while what they take fits into the budget:
    their buffers, and as much again for what TensorStore holds or what has to be cast or divided,
    up to a part of the budget. One that is larger is read alone, in pieces: then the budget is for
    what it takes beside its buffers. The first bad leaf raises when its turn comes.

    Raises:
        CorruptCheckpoint: stored data is missing or damaged; the leaf and the file are named.
    """
    if not reads:
        return
    from jaxckpt.storage._arrays import Reader

    storage = item.checkpoint.storage
    with _Blaming(item, None):
        reader = Reader(storage.kvstore(item.path), database=item.database)
    window_bytes = int(budget_bytes * _WINDOW)
    started: deque[tuple[int, _LeafBuffers]] = deque()
    in_flight = 0
    for buffers in _opened(item, reader, reads, window_bytes):
        size = buffers.read.total_bytes
        cost = size + min(size, window_bytes)
        while started and in_flight + cost > budget_bytes:
            freed, first = started.popleft()
            yield first.finish()
            in_flight -= freed
        buffers.start()
        started.append((cost, buffers))
        in_flight += cost
    while started:  # and no reference stays to what was yielded
        yield started.popleft()[1].finish()


def _opened(
    item: Item, reader: Any, reads: Sequence[LeafRead], window_bytes: int
) -> Iterator[_LeafBuffers]:
    """Opens the arrays a little ahead of their use."""
    ahead: deque[_LeafBuffers] = deque()
    for read in reads:
        kind = _SmallChunks if item.ours and is_direct(read.leaf.array) else _Regions
        ahead.append(kind(item, reader, read, window_bytes))
        if len(ahead) > _OPEN_AHEAD:
            yield ahead.popleft()
    yield from ahead


# A read under way: how many bytes it needs beside the buffers, what to wait for, and what to do
# with the result of each.
_Task = tuple[int, Sequence[Any], Callable[[Any], None]]


class _LeafBuffers:
    """The buffers of one leaf, and the reads that fill them."""

    def __init__(self, item: Item, reader: Any, read: LeafRead, window_bytes: int) -> None:
        self._item, self._reader, self.read = item, reader, read
        self._stored = read.leaf.array
        self._dtype = dtype_of(self._stored.dtype)
        self._name = read.leaf.prefix
        self._buffers: list[np.ndarray[Any, Any]] = []
        self._tasks: Iterator[_Task] = iter(())
        self._pending: deque[_Task] = deque()
        self._window_bytes = window_bytes
        self._under_way = 0  # bytes of what is pending
        self._failed: CorruptCheckpoint | None = None

    def start(self) -> None:
        try:
            with _Blaming(self._item, self.read.leaf):
                self._tasks = self._issue()
                self._fill_window()
        except CorruptCheckpoint as error:  # raised by `finish`: leaves fail in their order
            self._failed = error

    def finish(self) -> dict[Box, np.ndarray[Any, Any]]:
        if self._failed is not None:
            raise self._failed
        with _Blaming(self._item, self.read.leaf):
            while self._pending:
                size, pending, then = self._pending.popleft()
                for one in pending:
                    then(one.result())
                self._under_way -= size
                self._fill_window()
        return dict(zip(self.read.boxes, self._buffers, strict=True))

    def _fill_window(self) -> None:
        """Starts reads while they fit into the window; at least one is always under way."""
        while self._under_way < self._window_bytes or not self._pending:
            task = next(self._tasks, None)
            if task is None:
                return
            self._pending.append(task)
            self._under_way += task[0]

    def _issue(self) -> Iterator[_Task]:
        """Makes the buffers and starts the reads, one for each task that is asked for."""
        raise NotImplementedError

    def _make_buffers(self) -> None:
        try:
            self._buffers = empty([box.shape for box in self.read.boxes], self.read.dtype)
        except MemoryError as error:
            raise MemoryError(
                f"leaf {self.read.leaf.text} of {self._item.path}: this host has no memory for "
                f"{self.read.total_bytes} bytes. Restore it in shards, or without that leaf."
            ) from error

    def _put(self, target: int, part: Box, values: np.ndarray[Any, Any]) -> None:
        where = part.within(self.read.boxes[target])
        _copy(self._buffers[target][where], values)


class _SmallChunks(_LeafBuffers):
    """Chunks that are values of the database: read whole, checked and divided here."""

    def _issue(self) -> Iterator[_Task]:
        self._make_buffers()
        size = math.prod(self._stored.chunk_shape) * self._dtype.itemsize
        for chunk in plan_chunks(self._stored.chunk_shape, self.read.boxes):
            key = self._name + chunk_key(chunk.index)
            yield size, (self._reader.get(key),), self._divider(key, chunk)

    def _divider(self, key: str, plan: ChunkRead) -> Callable[[Any], None]:
        from jaxckpt.storage._arrays import value_of

        def divide(read: Any) -> None:
            data = value_of(read)
            file = f'{self._item.path}: "{key}"'
            leaf = self.read.leaf
            if data is None:
                raise CorruptCheckpoint(
                    f"{file}: leaf {leaf.text}: a chunk is missing", leaf=leaf.text, file=file
                )
            chunk = decode_chunk(data, self._stored.chunk_shape, self._dtype, leaf=leaf, file=file)
            for target, where, part in plan.parts:
                _copy(self._buffers[target][where], chunk[part])

        return divide


class _Regions(_LeafBuffers):
    """Regions of any array, which TensorStore reads, decodes and checks."""

    def __init__(self, item: Item, reader: Any, read: LeafRead, window_bytes: int) -> None:
        super().__init__(item, reader, read, window_bytes)
        fill = item.tree.fill_missing and self._stored.has_fill
        self._array = reader.open(self._name, item.tree.zarr_version, fill_missing=fill)

    def _issue(self) -> Iterator[_Task]:
        from jaxckpt.storage._arrays import read_into, shape_of

        array = self._array.result()
        if shape_of(array) != self._stored.shape:
            raise ValueError(
                f"the array has shape {shape_of(array)}, the tree says {self._stored.shape}"
            )
        self._make_buffers()
        boxes = [box for box in self.read.boxes if box.size]
        index = [i for i, box in enumerate(self.read.boxes) if box.size]
        casts = self._dtype != self.read.dtype
        if not casts and self.read.total_bytes <= self._window_bytes:
            outs = [self._buffers[i] for i in index]
            yield self.read.total_bytes, read_into(array, [box.slices for box in boxes], outs), _no
            return
        for region in plan_reads(self._stored, self._dtype.itemsize, boxes):
            parts = [(index[target], part) for target, part in region.parts]
            size = region.box.size * self._dtype.itemsize
            if not casts:
                wheres = [part.slices for _, part in parts]
                outs = [self._buffers[i][part.within(self.read.boxes[i])] for i, part in parts]
                yield size, read_into(array, wheres, outs), _no
                continue
            # Not with TensorStore's own cast: it differs from numpy's for some dtypes of 8 bits.
            temporary = np.empty(region.box.shape, self._dtype)
            pending = read_into(array, [region.box.slices], [temporary])
            yield size, pending, self._divider(temporary, region.box, parts)

    def _divider(
        self, values: np.ndarray[Any, Any], box: Box, parts: Sequence[tuple[int, Box]]
    ) -> Callable[[Any], None]:
        def divide(_: Any) -> None:
            for target, part in parts:
                self._put(target, part, values[part.within(box)])

        return divide


def _no(_: Any) -> None:
    """Nothing is to be done: it was read into its place."""


def _copy(out: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
    """Copies, casting where the dtypes differ; overflow and NaN go as numpy has them go."""
    if out.dtype == values.dtype:
        out[...] = values
        return
    with np.errstate(all="ignore"):
        try:
            out[...] = values.astype(out.dtype)
        except TypeError:  # two ml_dtypes that know nothing of each other
            out[...] = values.astype(np.float32).astype(out.dtype)


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
    if not isinstance(error, CheckpointError):
        error = data_error(error, item.path, text)
    elif not isinstance(error, CorruptCheckpoint):
        raise error
    file, problem = bad_file(item) or _damaged_file(item, str(error)) or (None, None)
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
    """The data file that holds the chunk that a message of TensorStore or of ours names."""
    from jaxckpt.storage._arrays import file_of_value

    key = re.search(r'"([^"]*(?:/c(?:/\d+)*|[/.\d]+))"', message)
    if key is None or not item.database:
        return None
    try:
        file = file_of_value(item.checkpoint.storage.kvstore(item.path), key[1])
    except (ValueError, OSError, LookupError):
        return None
    return None if file is None else (f"{item.path}/{file}", "is damaged")
