"""Reads safetensors files: each tensor is one run of bytes, of which any part is read alone."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from typing import Any, Final

import numpy as np

from jaxckpt._core.box import Box, cut, widened
from jaxckpt._core.cast import cast
from jaxckpt._disk.chunks import Buffers, Failed, Landed, LeafRead, make_buffers
from jaxckpt._disk.found import Found
from jaxckpt._disk.native import Item
from jaxckpt.errors import CheckpointNotFound, CorruptCheckpoint, UnsupportedFormat
from jaxckpt.format import jsontext, safetensors
from jaxckpt.format.arrays import dtype_of
from jaxckpt.format.safetensors import Header, Tensor
from jaxckpt.format.tree import NAMED, Leaf, StoredArray, Tree
from jaxckpt.storage import Storage, real

# A part is read in pieces of at most this size, and never in shorter runs than this.
_PIECE_BYTES: Final = 8 << 20
_LEAST_RUN_BYTES: Final = 4096


def read_headers(storage: Storage, file: str) -> dict[str, Header]:
    """Returns the header of a safetensors file, or of each file in an index, by path.

    Raises:
        CheckpointNotFound: the file does not exist.
        CorruptCheckpoint: a file is malformed, or a link leads out of the directory of the index.
        UnsupportedFormat: the files lack tensors, or a tensor has a dtype that jax lacks.
    """
    place = _real(storage, file)
    if not file.endswith(safetensors.INDEX_SUFFIX):
        headers = {place: _read_header(storage, place)}
    else:
        data = storage.read(place, max_bytes=jsontext.MAX_BYTES)
        headers = _read_shards(storage, file, place, safetensors.decode_index(data, file=file))
    if not any(header.tensors for header in headers.values()):
        raise UnsupportedFormat(f"{file} contains no tensors")
    return headers


def _read_shards(
    storage: Storage, index: str, real_index: str, wanted: dict[str, set[str]]
) -> dict[str, Header]:
    folder, headers = posixpath.dirname(index), {}
    # In the cache of a model hub, the index and its files are links into one directory.
    allowed = (real(storage, folder), posixpath.dirname(real_index))
    for name, tensors in sorted(wanted.items()):
        shard = _real(storage, f"{folder}/{name}")
        if posixpath.dirname(shard) not in allowed:
            raise CorruptCheckpoint(
                f"{folder}/{name} is a link to {shard}, out of the directory of the index. Put the "
                "files beside the index.",
                file=f"{folder}/{name}",
            )
        headers[shard] = _read_header(storage, shard)
        if odd := tensors ^ {tensor.name for tensor in headers[shard].tensors}:
            raise CorruptCheckpoint(
                f"{index}: the index and {name} disagree on its tensors: {sorted(odd)[:8]}",
                file=shard,
            )
    return headers


def _real(storage: Storage, file: str) -> str:
    place = real(storage, file)
    if storage.kind(place) != "file":
        raise CheckpointNotFound(f"{file}: no such file")
    return place


def _read_header(storage: Storage, file: str) -> Header:
    size = storage.size(file)
    if size < safetensors.LENGTH_BYTES:
        raise CorruptCheckpoint(f"{file} is not a safetensors file: {size} bytes", file=file)
    length = np.empty(safetensors.LENGTH_BYTES, np.uint8)
    storage.read_into(file, 0, [length])
    text = np.empty(safetensors.header_bytes(length.tobytes(), size, file=file), np.uint8)
    storage.read_into(file, safetensors.LENGTH_BYTES, [text])
    return safetensors.decode_header(text.tobytes(), size, file=file)


def read_item(found: Found, name: str) -> Item:
    """Reads the headers of a file or of an index; dots in names make nested dicts."""
    headers = read_headers(found.storage, found.items[name])
    places = {t.name: (file, t) for file, header in headers.items() for t in header.tensors}
    leaves = tuple(_leaf(tensor) for _, tensor in places.values())
    said = {key: text for header in headers.values() for key, text in header.metadata.items()}
    return Item(
        found=found,
        name=name,
        path=found.items[name],
        tree=Tree(leaves=leaves, uses_ocdbt=False, custom_metadata=said),
        read_shardings=dict,
        read_sums=lambda: None,
        database=False,
        ours=False,
        tensors=places,
    )


def _leaf(tensor: Tensor) -> Leaf:
    path, shape, dtype = tuple(tensor.name.split(".")), tensor.shape, tensor.dtype
    stored = StoredArray(shape=shape, dtype=dtype, chunk_shape=tuple(max(1, n) for n in shape))
    kinds = (NAMED,) * len(path)
    return Leaf(path=path, key_types=kinds, kind="numpy", dtype=dtype, shape=shape, stored=stored)


class Tensors:
    """One tensor whose parts are read in pieces."""

    def __init__(self, item: Item, read: LeafRead, executor: Executor) -> None:
        assert item.tensors is not None
        self.reads = (read,)
        self._item, self._read, self._executor = item, read, executor
        self._file, self._tensor = item.tensors[read.leaf.name]
        self._buffers: list[np.ndarray[Any, Any]] = []
        self._under_way: list[Future[int]] = []

    def start(self) -> None:
        """Starts to fill the buffers; `finish` reports errors."""
        self._buffers = make_buffers(self._item, self._read)
        for box, out in zip(self._read.boxes, self._buffers, strict=True):
            for piece in self._pieces(box) if box.size else ():
                self._under_way.append(self._executor.submit(self._fill, piece, box, out))

    def finish(self, failed: Failed, landed: Landed) -> Iterator[Buffers]:
        """Waits for the reads, and yields the buffers of a good leaf."""
        try:
            for one in self._under_way:
                landed(one.result())
        except OSError as error:
            failed(self._read, error)
            return
        buffers, self._buffers = self._buffers, []
        yield dict(zip(self._read.boxes, buffers, strict=True))

    def drop(self) -> None:
        """Releases the buffers."""
        self._under_way.clear()
        self._buffers.clear()

    def _pieces(self, box: Box) -> Iterator[Box]:
        itemsize = dtype_of(self._tensor.dtype).itemsize
        if box.shape == self._tensor.shape and box.size * itemsize <= _PIECE_BYTES:
            return iter((box,))
        wide = _with_long_runs(box, self._tensor.shape, _LEAST_RUN_BYTES // itemsize)
        ones = (1,) * len(wide.start)
        return (
            cut(wide, widened(ones, wide.shape, _PIECE_BYTES // itemsize)) if box.size else iter(())
        )

    def _fill(self, piece: Box, box: Box, out: np.ndarray[Any, Any]) -> int:
        """Reads a piece and copies its part of `box`; returns the number of bytes copied."""
        dtype = dtype_of(self._tensor.dtype)
        is_direct = piece == box and out.dtype == dtype and out.flags.c_contiguous
        values = out if is_direct else np.empty(piece.shape, dtype)
        flat, at = values.reshape(-1).view(np.uint8), 0
        try:
            for offset, size in runs(piece, self._tensor.shape, values.itemsize):
                place = self._tensor.offset + offset
                self._item.found.storage.read_into(self._file, place, [flat[at : at + size]])
                at += size
        except EOFError as error:
            what = f"{self._file} was truncated: {error}"
            raise CorruptCheckpoint(what, leaf=self._read.leaf.text, file=self._file) from error
        if is_direct:
            return values.nbytes
        part = piece.intersect(box) or piece
        some = values[part.within(piece)]
        leaf, place = self._read.leaf.text, self._item.path
        out[part.within(box)] = cast(some, out.dtype, leaf=leaf, place=place)
        return some.size * out.itemsize


def _with_long_runs(box: Box, shape: tuple[int, ...], least: int) -> Box:
    """Widens a box from the last dimension on until its runs have `least` elements."""
    start, stop = list(box.start), list(box.stop)
    for axis in reversed(range(len(shape))):
        if math.prod(b - a for a, b in zip(start[axis:], stop[axis:], strict=True)) >= least:
            break
        start[axis], stop[axis] = 0, shape[axis]
    return Box(tuple(start), tuple(stop))


def runs(box: Box, shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int, int]]:
    """Yields offset and size in bytes of each run of a box in a row-major array, in order.

    Example:
        >>> list(runs(Box((1, 0), (3, 2)), (4, 3), 4)), list(runs(Box((1, 0), (3, 3)), (4, 3), 4))
        ([(12, 8), (24, 8)], [(12, 24)])
    """
    # The box has all of the dimensions after `axis`, and one run of dimension `axis`.
    axis = len(shape)
    while axis and box.shape[axis - 1] == shape[axis - 1]:
        axis -= 1
    axis = max(0, axis - 1)
    strides = [math.prod(shape[i + 1 :]) * itemsize for i in range(len(shape))]
    size = math.prod(box.shape[axis:]) * itemsize
    for index in np.ndindex(box.shape[:axis]):
        first = (*map(int.__add__, box.start, index), *box.start[axis:])
        yield sum(map(int.__mul__, first, strides)), size
