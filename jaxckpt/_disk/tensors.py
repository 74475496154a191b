"""Reads safetensors files: each tensor is one run of bytes, of which any part is read alone."""

from __future__ import annotations

import math
import posixpath
from collections import deque
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

import numpy as np

from jaxckpt._core.box import Box, cut, widened
from jaxckpt._core.cast import cast
from jaxckpt._core.threads import Pool
from jaxckpt._disk.chunks import Buffers, Failed, Landed, LeafRead, adjacent, make_memory
from jaxckpt._disk.found import Found
from jaxckpt._disk.native import Item
from jaxckpt.errors import CheckpointNotFound, CorruptCheckpoint, StoreError, UnsupportedFormat
from jaxckpt.format import jsontext, safetensors
from jaxckpt.format.arrays import MAX_UNIT_BYTES, dtype_of
from jaxckpt.format.safetensors import Header, Tensor
from jaxckpt.format.tree import NAMED, Leaf, Path, StoredArray, Tree, check_grid
from jaxckpt.storage import Storage, corrupt, real, stamp

# A part is read in pieces of at most this size, and never in shorter runs than this.
_PIECE_BYTES: Final = 8 << 20
_LEAST_RUN_BYTES: Final = 4096


def read_headers(found: Found, file: str) -> dict[str, Header]:
    """Returns the header of a safetensors file, or of each file in an index, by path.

    Notes in `found` which files they are, so that a replaced one is noticed.

    Raises:
        CheckpointNotFound: the file does not exist.
        CorruptCheckpoint: a file is malformed, or a link leads out of the directory of the index.
        UnsupportedFormat: the files lack tensors, or a tensor has a dtype that jax lacks.
    """
    storage, path = found.storage, _real(found, file)
    if not file.endswith(safetensors.INDEX_SUFFIX):
        headers = {path: _read_header(storage, path)}
    else:
        data = storage.read(path, max_bytes=jsontext.MAX_BYTES)
        headers = _read_shards(found, file, path, safetensors.decode_index(data, file=file))
    if not any(header.tensors for header in headers.values()):
        raise UnsupportedFormat(f"{file} contains no tensors")
    return headers


def _read_shards(
    found: Found, index: str, real_index: str, wanted: dict[str, set[str]]
) -> dict[str, Header]:
    storage, folder, headers = found.storage, posixpath.dirname(index), {}
    # In the cache of a model hub, the index and its files are links into one directory.
    allowed = (real(storage, folder), posixpath.dirname(real_index))
    for name, tensors in sorted(wanted.items()):
        shard = _real(found, f"{folder}/{name}")
        if posixpath.dirname(shard) not in allowed:
            what = f"is a link to {shard}, out of the directory of the index. Put the files beside"
            raise corrupt(f"{folder}/{name}", f"{what} the index.")
        headers[shard] = _read_header(storage, shard)
        if odd := tensors ^ {tensor.name for tensor in headers[shard].tensors}:
            raise CorruptCheckpoint(
                f"{index}: the index and {name} disagree on its tensors: {sorted(odd)[:8]}",
                file=shard,
            )
    return headers


def _real(found: Found, file: str) -> str:
    path = real(found.storage, file)
    if found.storage.kind(path) != "file":
        raise CheckpointNotFound(f"{file}: no such file")
    found.stamps.setdefault(path, stamp(found.storage, path))
    return path


def _read_header(storage: Storage, file: str) -> Header:
    size = storage.size(file)
    if size < safetensors.LENGTH_BYTES:
        raise corrupt(file, f"is not a safetensors file: {size} bytes")
    length = np.empty(safetensors.LENGTH_BYTES, np.uint8)
    storage.read_into(file, 0, [length])
    text = np.empty(safetensors.header_bytes(length.tobytes(), size, file=file), np.uint8)
    storage.read_into(file, safetensors.LENGTH_BYTES, [text])
    return safetensors.decode_header(text.tobytes(), size, file=file)


def read_item(found: Found, name: str) -> Item:
    """Reads the headers of a file or of an index; dots in names make nested dicts."""
    headers = read_headers(found, found.items[name])
    tensors = {t.name: (file, t) for file, header in headers.items() for t in header.tensors}
    leaves = tuple(_leaf(*placed, path_of(name, tensors)) for name, placed in tensors.items())
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
        tensors=tensors,
    )


def path_of(name: str, names: Container[str]) -> Path:
    """Splits a name at its dots, up to the name of another tensor: `w` and `w.scale` are leaves."""
    parts = name.split(".")
    ends = (n for n in range(1, len(parts)) if ".".join(parts[:n]) in names)
    last = next(ends, len(parts)) - 1
    return *parts[:last], ".".join(parts[last:])


def _leaf(file: str, tensor: Tensor, path: Path) -> Leaf:
    """Returns the leaf of a tensor, with chunks that bound the memory of reading it in parts."""
    shape, dtype = tensor.shape, tensor.dtype
    chunk_shape = run_shape(shape, dtype_of(dtype).itemsize)
    stored = StoredArray(shape=shape, dtype=dtype, chunk_shape=chunk_shape)
    check_grid(stored, where=tensor.name, file=file)
    kinds = (NAMED,) * len(path)
    return Leaf(path=path, key_types=kinds, kind="numpy", dtype=dtype, shape=shape, stored=stored)


def run_shape(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Returns the shape of pieces of about `MAX_UNIT_BYTES`; each piece is contiguous in memory.

    The pieces are equal if there is a divisor nearby.

    Example:
        >>> run_shape((3, 10_000_000), 4), run_shape((3, 10_000_019), 4)
        ((1, 5000000), (1, 8388608))
    """
    if 0 in shape:
        return tuple(n or 1 for n in shape)
    rest = math.prod(shape) * itemsize
    for axis, dim in enumerate(shape):
        rest //= dim
        room = MAX_UNIT_BYTES // rest
        if not room:
            continue
        parts = -(-dim // room)
        even = next((p for p in range(parts, min(4 * parts, dim) + 1) if dim % p == 0), None)
        rows = dim // even if even else room
        return (*(1 for _ in shape[:axis]), rows, *shape[axis + 1 :])
    return tuple(shape)


class _Piece(NamedTuple):
    """A part of a tensor to read, for one of the wanted boxes."""

    file: str
    offset: int  # of the tensor
    size: int  # bytes of `out`
    tensor: Tensor
    read: LeafRead
    box: Box  # what is read
    here: Box  # the part of it that is wanted
    out: np.ndarray[Any, Any]  # the memory of that part
    is_direct: bool  # whether the file has the bytes of `out`


class Tensors:
    """Tensors read together, in pieces, like `Chunks`; adjacent whole tensors are one piece."""

    def __init__(self, item: Item, reads: Sequence[LeafRead], pool: Pool) -> None:
        self.reads = reads
        self._item, self._pool = item, pool
        self._buffers: deque[Buffers] = deque()
        self._failures: dict[int, OSError] = {}  # the first of each leaf, by `id` of its read
        self._under_way: list[Future[int]] = []

    def start(self) -> None:
        assert self._item.tensors is not None
        apart, whole = [], dict[str, list[_Piece]]()  # whole tensors by file
        memory, at = make_memory(self._item, *self.reads), 0
        for read in self.reads:
            self._buffers += read.layout.buffers(memory, at)
            at += read.layout.room
            file, tensor = self._item.tensors[read.leaf.name]
            for box, out in zip(read.layout.boxes, self._buffers[-1], strict=True):
                is_same, head = out.dtype == dtype_of(tensor.dtype), (file, tensor.offset)
                for part in _pieces(tensor, box) if box.size else ():
                    to = out[(here := part.intersect(box) or part).within(box)]
                    is_direct = is_same and here == part and to.flags.c_contiguous
                    piece = _Piece(*head, to.nbytes, tensor, read, part, here, to, is_direct)
                    alone = part.shape != tensor.shape or not is_direct
                    (apart if alone else whole.setdefault(file, [])).append(piece)
        groups = [[piece] for piece in apart]
        for some in whole.values():
            columns = (np.array([x[i] for x in some]) for i in (1, 2))  # offset, size
            groups += [[some[i] for i in run] for run in adjacent(*columns, after=0)]
        self._under_way = [self._pool.submit(self._fill, group) for group in groups]

    def finish(self, failed: Failed, landed: Landed) -> Iterator[Buffers]:
        for one in self._under_way:
            landed(one.result())
        self._under_way.clear()
        for read in self.reads:
            buffers = self._buffers.popleft()
            if (error := self._failures.get(id(read))) is not None:
                failed(read, error)
            else:
                yield buffers

    def drop(self) -> None:
        self._under_way.clear()
        self._buffers.clear()

    def _fill(self, pieces: list[_Piece]) -> int:
        """Fills the memory of adjacent pieces; returns the number of bytes."""
        if len(pieces) > 1:
            flat = [piece.out.reshape(-1).view(np.uint8) for piece in pieces]
            try:
                self._item.found.storage.read_into(*pieces[0][:2], flat)
                return sum(map(len, flat))
            except StoreError as error:  # each alone would take as long to fail
                for piece in pieces:
                    self._failures.setdefault(id(piece.read), error)
                return 0
            except (EOFError, OSError):  # one by one shows which of them is bad
                pass
        size = 0
        for piece in pieces:
            try:
                size += self._fill_one(piece)
            except OSError as error:
                self._failures.setdefault(id(piece.read), error)
        return size

    def _fill_one(self, piece: _Piece) -> int:
        """Reads a piece and copies its part of the wanted box; returns the bytes copied."""
        file, _, _, tensor, read, box, here, out, is_direct = piece
        values = out if is_direct else np.empty(box.shape, dtype_of(tensor.dtype))
        flat, at = values.reshape(-1).view(np.uint8), 0
        try:
            for offset, size in runs(box, tensor.shape, values.itemsize):
                start = tensor.offset + offset
                self._item.found.storage.read_into(file, start, [flat[at : at + size]])
                at += size
        except EOFError as error:
            raise corrupt(file, f"was truncated: {error}", read.leaf.text) from error
        if not is_direct:
            some, leaf = values[here.within(box)], read.leaf.text
            out[...] = cast(some, out.dtype, leaf=leaf, where=self._item.path)
        return out.nbytes


def _pieces(tensor: Tensor, box: Box) -> Iterator[Box]:
    itemsize = dtype_of(tensor.dtype).itemsize
    if box.shape == tensor.shape and box.size * itemsize <= _PIECE_BYTES:
        return iter((box,))
    wide = _with_long_runs(box, tensor.shape, _LEAST_RUN_BYTES // itemsize)
    return cut(wide, widened((1,) * len(wide.start), wide.shape, _PIECE_BYTES // itemsize))


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
