"""Reads one leaf of any layout, region by region, with TensorStore."""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from jaxckpt._core.box import Box, whole
from jaxckpt._core.cast import cast
from jaxckpt._core.plan import plan_chunks, plan_reads
from jaxckpt._disk.checksums import stored_sums
from jaxckpt._disk.chunks import Buffers, Failed, Landed, LeafRead, another_chunk, make_memory
from jaxckpt._disk.damage import blame
from jaxckpt._disk.native import Item, reader_of
from jaxckpt.format.arrays import chunk_key, dtype_of
from jaxckpt.format.tree import Leaf, grid_of

_LARGE_CHUNK_BYTES: Final = 1 << 30

# A read in flight: its bytes beside the buffers, and calls that wait for it and use it, in order.
_Task = tuple[int, Sequence[Callable[[], object]]]


class Regions:
    """One leaf whose regions are read within a window of memory; used like `Chunks`."""

    def __init__(self, item: Item, read: LeafRead, reader: Any, window_bytes: int) -> None:
        self.reads = (read,)
        self._item, self._read, self._layout = item, read, read.layout
        self._stored = read.leaf.array
        self._dtype = dtype_of(self._stored.dtype)
        self._buffers: Buffers = ()
        self._tasks: Iterator[_Task] = iter(())
        self._pending: deque[_Task] = deque()
        self._window_bytes = window_bytes
        self._under_way = 0  # bytes of `_pending`
        self._error: Exception | None = None
        fill = item.tree.fill_missing and self._stored.has_fill
        self._reader = reader
        self._array = reader.open(
            read.leaf.prefix,
            item.tree.zarr_version,
            fill_missing=fill,
            touches=partial(_touches, self._stored.chunk_shape, read.layout.boxes),
        )

    def start(self) -> None:
        try:
            self._tasks = self._issue()
            self._fill_window()
        except (ValueError, OSError) as error:
            self._error = error

    def finish(self, failed: Failed, landed: Landed) -> Iterator[Buffers]:
        try:
            if self._error is not None:
                raise self._error
            while self._pending:
                size, calls = self._pending.popleft()
                for call in calls:
                    call()
                self._under_way -= size
                landed(size * self._layout.dtype.itemsize // self._dtype.itemsize)
                self._fill_window()
        except (ValueError, OSError) as error:
            failed(self._read, blame(self._item, self._read.leaf, error))
            return
        buffers, self._buffers = self._buffers, ()
        yield buffers

    def drop(self) -> None:
        self._pending.clear()
        self._buffers = ()

    def _fill_window(self) -> None:
        """Starts reads while they fit into the window; at least one is always in flight."""
        while self._under_way < self._window_bytes or not self._pending:
            task = next(self._tasks, None)
            if task is None:
                return
            self._pending.append(task)
            self._under_way += task[0]

    def _issue(self) -> Iterator[_Task]:
        from jaxckpt.storage._arrays import chunk_shape_of, read_into, shape_of

        array = self._array()
        if shape_of(array) != self._stored.shape:
            raise ValueError(
                f"the array has shape {shape_of(array)}, the tree has {self._stored.shape}"
            )
        if self._item.ours and chunk_shape_of(array) != self._stored.unit_shape:
            raise ValueError(
                f"the array has chunks of shape {chunk_shape_of(array)}, the tree has "
                f"{self._stored.unit_shape}"
            )
        self._try_chunk()
        refuse_others(self._item, self._reader, self._read.leaf, self._layout.boxes)
        memory = make_memory(self._item, self._read)
        (self._buffers,) = self._layout.buffers(memory)
        boxes = [box for box in self._layout.boxes if box.size]
        index = [i for i, box in enumerate(self._layout.boxes) if box.size]
        casts = self._dtype != self._layout.dtype
        if not casts and self._layout.total_bytes <= self._window_bytes:
            outs = [self._buffers[i] for i in index]
            yield self._layout.total_bytes, read_into(array, [box.slices for box in boxes], outs)
            return
        for region in plan_reads(self._stored, self._dtype.itemsize, boxes):
            parts = [(index[target], part) for target, part in region.parts]
            size = region.box.size * self._dtype.itemsize
            if not casts:
                wheres = [part.slices for _, part in parts]
                outs = [self._buffers[i][part.within(self._layout.boxes[i])] for i, part in parts]
                yield size, read_into(array, wheres, outs)
                continue
            # TensorStore's own cast differs from numpy's for some 8-bit dtypes.
            temporary = np.empty(region.box.shape, self._dtype)
            pending = read_into(array, [region.box.slices], [temporary])
            yield size, [*pending, partial(self._divide, temporary, region.box, parts)]

    def _try_chunk(self) -> None:
        # TensorStore aborts the process if it cannot allocate a chunk.
        size = math.prod(self._stored.unit_shape) * self._dtype.itemsize
        if size > _LARGE_CHUNK_BYTES:
            try:
                np.empty(size, np.uint8)
            except MemoryError as error:
                raise MemoryError(
                    f"leaf {self._read.leaf.text} of {self._item.path}: this host cannot allocate "
                    f"one of its chunks, {size} bytes"
                ) from error

    def _divide(
        self, values: np.ndarray[Any, Any], box: Box, parts: Sequence[tuple[int, Box]]
    ) -> None:
        for target, part in parts:
            inside = part.within(self._layout.boxes[target])
            out, some = self._buffers[target][inside], values[part.within(box)]
            out[...] = cast(some, out.dtype, leaf=self._read.leaf.text, where=self._item.path)


def _touches(chunk_shape: Sequence[int], boxes: Sequence[Box], index: tuple[int, ...]) -> bool:
    if len(index) != len(chunk_shape):  # of no dimensions, in zarr 2
        return True
    start = tuple(map(operator.mul, index, chunk_shape))
    chunk = Box(start, tuple(map(operator.add, start, chunk_shape)))
    return any(chunk.intersect(box) for box in boxes)


def refuse_others(item: Item, reader: Any, leaf: Leaf, boxes: tuple[Box, ...]) -> None:
    """Raises if a chunk's stored checksum is not the recorded one; reads no values."""
    sums, stored = item.read_sums(), leaf.array
    if sums is None:
        return
    counts = tuple(map(operator.floordiv, stored.chunk_shape, stored.unit_shape))
    recorded = sums[leaf.prefix].reshape(grid_of(stored.shape, stored.unit_shape))
    units: dict[tuple[int, ...], dict[int, int]] = {}  # of each chunk: which, and its checksum
    for plan in plan_chunks(stored.unit_shape, boxes):
        index = tuple(map(operator.floordiv, plan.index, counts))
        within = int(np.ravel_multi_index(tuple(map(operator.mod, plan.index, counts)), counts))
        units.setdefault(index, {})[within] = int(recorded[plan.index])
    for (index, inner), found in zip(units.items(), stored_sums(reader, leaf, units), strict=True):
        if list(inner.values()) != found:
            raise another_chunk(leaf, leaf.prefix + chunk_key(index), item.path)


def refuse_swapped(item: Item) -> None:
    """Raises CorruptCheckpoint if any chunk of a tree differs from the chunk written there."""
    leaf = None
    try:
        reader = reader_of(item.found, item.path, database=item.database)
        for leaf in item.tree.leaves:
            if leaf.has_array:
                refuse_others(item, reader, leaf, (whole(leaf.array.shape),))
    except (ValueError, OSError) as error:
        raise blame(item, leaf, error) from error
