"""Writes a tree that comes as a stream into a new checkpoint: in one database, or in plain files.

In a database (OCDBT) it has the very bytes that `save` writes, checksums and all. In plain files
each array is a directory that any reader of zarr v3 opens, and the record has the digest of every
file. The tree comes in parts and goes in batches, so that the memory this takes depends on neither.
A transaction of the database holds all that is put into it: each batch is one of its own, and the
last of them is not what makes the checkpoint. That is the commit, as with `save`: until then its
name is temporary.
"""

from __future__ import annotations

import logging
import math
import posixpath
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Final, Protocol

import numpy as np

from jaxckpt._convert.source import Leaves, Part, Values, read_with_parts
from jaxckpt._core import box as _box
from jaxckpt._core.box import Box
from jaxckpt._core.plan import SavePlan, Write
from jaxckpt._core.text import counted
from jaxckpt._disk import transaction as _transaction
from jaxckpt._disk.checksums import starts_of
from jaxckpt._disk.found import key_folder
from jaxckpt._disk.writer import is_direct, metadata_files, plan_writes, write_arrays
from jaxckpt.errors import UnsupportedLeaf
from jaxckpt.format import arrays, names, step, tree
from jaxckpt.format.step import StepMetadata
from jaxckpt.format.tree import Leaf, StoredArray, Tree
from jaxckpt.storage import Storage

_logger = logging.getLogger("jaxckpt")

# A chunk is made in memory; one that is larger becomes several.
_MOST_CHUNK_BYTES: Final = 128 << 20
_BATCH_BYTES: Final = 64 << 20
# A data file is read as a whole for its digest, here and by `verify`.
_MOST_FILE_BYTES: Final = 256 << 20
_BATCH_CHUNKS: Final = 1 << 12
# Pieces that are smaller than this are worse than a chunk that is not cut.
_LEAST_INNER_BYTES: Final = 1 << 20
_MOST_CHUNKS: Final = 1 << 18


def write_checkpoint(
    storage: Storage, path: str, source: Leaves, *, overwrite: bool, ocdbt: bool = True
) -> None:
    """Makes a committed checkpoint of one item of what comes from `source`.

    Args:
        ocdbt: Whether its arrays are in one database; if not, in plain files.

    Raises:
        UnsupportedLeaf: leaves that plain files cannot hold; nothing was written.
        StepExists: something is at `path`.
        SaveFailed: the checkpoint was not committed; the cause is chained.
        CorruptCheckpoint: the source is damaged; nothing was made.
    """
    start, started_ns = time.monotonic(), time.time_ns()
    if names.is_reserved(posixpath.basename(path)):
        raise ValueError(f"{path}: names like this are those of checkpoints in the making")
    goal = _goal(source.tree, ocdbt=ocdbt)
    if not ocdbt:
        _check_plain(goal.leaves, path)
    transaction = None
    try:
        transaction = _transaction.begin(storage, path, overwrite=overwrite)
        item = f"{transaction.work}/{names.STATE_ITEM}"
        storage.make_dir(item)
        writer: _Writer = (_Database if ocdbt else _PlainFiles)(storage, item, goal)
        total_bytes = _copy(source, goal, writer)
        source.check()
        files = {
            f"{names.STATE_ITEM}/{name}": data
            for name, data in (_tree_files(goal, source, ocdbt=ocdbt) | writer.files()).items()
        }
        digests = _write_files(storage, transaction.work, files, source, started_ns)
        if not ocdbt:
            digests |= _digests(storage, transaction.work)
        transaction.commit(digests, lineage=source.lineage)
    except BaseException as error:
        if transaction is not None:
            transaction.abort()
        _transaction.raise_save_error(path, error)
    seconds = time.monotonic() - start
    _logger.info("copied %s to %s: %d bytes, %.2f s", source.place, path, total_bytes, seconds)


# --- how each array will lie -----------------------------------------------------------------


def _goal(copied: Tree, *, ocdbt: bool) -> Tree:
    """The tree with its arrays as they will lie."""
    leaves = tuple(
        replace(leaf, stored=chunked(leaf.array, inner=ocdbt)) if leaf.has_array else leaf
        for leaf in copied.leaves
    )
    for leaf in leaves:
        if leaf.has_array:
            tree.check_grid(leaf.array, where=leaf.text, file="the copy")
            arrays.check_leaf(leaf, leaf.array, file="the copy")
    has_arrays = any(leaf.has_array for leaf in leaves)
    return replace(copied, leaves=leaves, uses_ocdbt=ocdbt and has_arrays)


def chunked(stored: StoredArray, *, inner: bool) -> StoredArray:
    """How an array will lie: in the chunks that it has, unless they are very large or very many.

    Example:
        >>> array = StoredArray(shape=(1 << 20, 64), dtype="float32", chunk_shape=(1 << 19, 64))
        >>> chunked(array, inner=True).inner_shape
        (131072, 64)
    """
    itemsize = arrays.dtype_of(stored.dtype).itemsize
    chunk_shape = clipped(stored.chunk_shape, stored.shape)
    unit_shape = clipped(stored.unit_shape, stored.shape)
    count = math.prod(-(-n // c) for n, c in zip(stored.shape, chunk_shape, strict=True))
    if count > _MOST_CHUNKS:
        chunk_shape = widened(unit_shape, stored.shape, itemsize, arrays.MAX_UNIT_BYTES)
    elif math.prod(chunk_shape) * itemsize > _MOST_CHUNK_BYTES:
        chunk_shape = _smaller(stored.shape, chunk_shape, unit_shape, itemsize)
    inner_shape = arrays.inner_shape(chunk_shape, itemsize) if inner else None
    whole_chunks = all(n % c == 0 for n, c in zip(stored.shape, chunk_shape, strict=True))
    if inner_shape is not None and (
        not whole_chunks or math.prod(inner_shape) * itemsize < _LEAST_INNER_BYTES
    ):
        inner_shape = None
    return StoredArray(
        shape=stored.shape, dtype=stored.dtype, chunk_shape=chunk_shape, inner_shape=inner_shape
    )


def clipped(tile_shape: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The tile without what sticks out of an array of one tile; no dimension is 0."""
    return tuple(max(1, min(t, n)) for t, n in zip(tile_shape, shape, strict=True))


def _smaller(
    shape: tuple[int, ...], chunk_shape: tuple[int, ...], unit_shape: tuple[int, ...], itemsize: int
) -> tuple[int, ...]:
    """Chunks that fit in memory, none of which needs parts of two units."""
    if math.prod(unit_shape) * itemsize <= _MOST_CHUNK_BYTES:
        # Units may be tiny, and to find one takes a look at all of them.
        return widened(unit_shape, chunk_shape, itemsize, arrays.MAX_UNIT_BYTES)
    piece = run_shape(unit_shape, itemsize)
    is_one = unit_shape == shape
    return piece if is_one or not any(map(int.__mod__, unit_shape, piece)) else chunk_shape


def run_shape(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Pieces of an array of about `MAX_UNIT_BYTES` that are each one run of its memory.

    Equal ones, if a divisor is near.

    Example:
        >>> run_shape((3, 10_000_000), 4), run_shape((3, 10_000_019), 4)
        ((1, 5000000), (1, 8388608))
    """
    if 0 in shape:
        return tuple(n or 1 for n in shape)
    rest = math.prod(shape) * itemsize
    for axis, dim in enumerate(shape):
        rest //= dim
        room = arrays.MAX_UNIT_BYTES // rest
        if not room:
            continue
        parts = -(-dim // room)
        even = next((p for p in range(parts, min(4 * parts, dim) + 1) if dim % p == 0), None)
        rows = dim // even if even else room
        return (*(1 for _ in shape[:axis]), rows, *shape[axis + 1 :])
    return tuple(shape)


def widened(
    tile_shape: Sequence[int], shape: Sequence[int], itemsize: int, most_bytes: int
) -> tuple[int, ...]:
    """The tile, repeated along the last dimensions first, up to a size."""
    wide = list(tile_shape)
    for axis in reversed(range(len(wide))):
        room = most_bytes // (math.prod(wide) * itemsize)
        count = max(1, min(room, -(-shape[axis] // wide[axis])))
        wide[axis] *= count
        if wide[axis] < shape[axis]:
            break
    return tuple(wide)


def parts_of(leaf: int, shape: tuple[int, ...], tile_shape: Sequence[int]) -> Iterator[Part]:
    """An array in parts, in order."""
    everything = _box.whole(shape)
    for _, tile in _box.tile(everything, tile_shape):
        if (box := tile.intersect(everything)) is not None:
            yield Part(leaf=leaf, box=box)


def _check_plain(leaves: Sequence[Leaf], path: str) -> None:
    """Refuses leaves that would come back as other numbers, be other files, or lie elsewhere."""
    bad = [
        f"  {leaf.text}: {problem}"
        for leaf in leaves
        if leaf.has_array and (problem := _plain_problem(leaf)) is not None
    ]
    if bad:
        raise UnsupportedLeaf(
            f"{path}: {counted(len(bad), 'leaf')} cannot be plain files, and nothing was written:\n"
            + "\n".join(bad[:50])
            + "\nLeave them out (skip), rename the keys, or cast floating-point ones (dtype)."
        )


def _plain_problem(leaf: Leaf) -> str | None:
    if leaf.kind != "key" and leaf.dtype in arrays.AS_BYTES_DTYPES:
        return f"has dtype {leaf.dtype}, which zarr lacks"
    is_plain = "/" not in leaf.name and leaf.name not in ("", ".", "..")
    if leaf.path and not (is_plain and not _means_more(leaf.name)):
        return f"needs a directory called {leaf.name!r}"
    return None


def _means_more(name: str) -> bool:
    """Whether an item with an entry of this name would be read as another one."""
    return names.is_part_of_tree(name) or key_folder([name]) is not None


# --- values ----------------------------------------------------------------------------------


class _Writer(Protocol):
    """Takes chunks in the order of the leaves."""

    def put(self, array: int, box: Box, values: Values) -> None:
        """Writes a chunk of an array, sooner or later. The values must not change."""
        ...

    def flush(self) -> None:
        """Writes what is still to be written."""
        ...

    def files(self) -> dict[str, bytes]:
        """The metadata files, by name in the item, that tell about the chunks; some are there."""
        ...


def _copy(source: Leaves, goal: Tree, writer: _Writer) -> int:
    """Reads each stored byte once, and writes it; returns how many there were."""
    with_array = [i for i, leaf in enumerate(goal.leaves) if leaf.has_array]
    numbers = {leaf: number for number, leaf in enumerate(with_array)}

    def parts() -> Iterator[Part]:
        for i in with_array:
            had, stored = source.tree.leaves[i].array, goal.leaves[i].array
            # Whichever is larger is a multiple of the other.
            unit_shape = clipped(had.unit_shape, had.shape)
            yield from parts_of(i, stored.shape, tuple(map(max, unit_shape, stored.chunk_shape)))

    total = 0
    with closing(read_with_parts(source, parts)) as read:
        for part, values in read:
            chunk_shape = goal.leaves[part.leaf].array.chunk_shape
            for _, chunk in _box.tile(part.box, chunk_shape):
                if (box := chunk.intersect(part.box)) is not None:
                    writer.put(numbers[part.leaf], box, values[box.within(part.box)])
            total += values.nbytes
            del values  # so that it is free before the next one comes
    writer.flush()
    return total


class _Batch:
    """Chunks to be written together."""

    def __init__(self) -> None:
        self.chunks: list[tuple[int, Box, Values]] = []
        self._bytes = 0

    def add(self, array: int, box: Box, values: Values) -> bool:
        """Returns whether it is enough."""
        self.chunks.append((array, box, values))
        self._bytes += values.nbytes
        return self._bytes >= _BATCH_BYTES or len(self.chunks) >= _BATCH_CHUNKS

    def take(self) -> list[tuple[int, Box, Values]]:
        chunks, self.chunks, self._bytes = self.chunks, [], 0
        return chunks


class _Database:
    """Writes what `save` writes."""

    def __init__(self, storage: Storage, item: str, goal: Tree) -> None:
        leaves = [leaf for leaf in goal.leaves if leaf.has_array]
        self._storage, self._item = storage, item
        self._prefixes = [leaf.prefix for leaf in leaves]
        self._stored = [leaf.array for leaf in leaves]
        *self._starts, count = starts_of(self._stored)
        self._sums = np.zeros(count, np.uint32)
        self._known = np.zeros(count, bool)
        self._batch = _Batch()
        self._write(0, len(leaves), (), describe=True)

    def put(self, array: int, box: Box, values: Values) -> None:
        if self._batch.add(array, box, values):
            self.flush()

    def flush(self) -> None:
        chunks = self._batch.take()
        if chunks:
            numbers = [array for array, _, _ in chunks]
            self._write(min(numbers), max(numbers) + 1, chunks, describe=False)

    def _write(
        self, first: int, last: int, chunks: Sequence[tuple[int, Box, Values]], *, describe: bool
    ) -> None:
        """Writes chunks of the arrays from `first` to before `last`, and notes their checksums."""
        stored = tuple(self._stored[first:last])
        plan = SavePlan(
            stored=stored,
            writes=tuple(Write(array=i - first, box=box, shard=box) for i, box, _ in chunks),
            total_bytes=0,
        )
        places = {(i - first, box): n for n, (i, box, _) in enumerate(chunks)}
        requests = plan_writes(self._prefixes[first:last], plan, places)
        snapshot = [_padded(values, self._stored[i]) for i, _, values in chunks]
        sums = write_arrays(self._storage, self._item, requests, snapshot, describe=describe)
        if sums:
            units = np.array(requests.units) + self._starts[first]
            self._sums[units], self._known[units] = sums, True

    def files(self) -> dict[str, bytes]:
        if not self._stored:
            return {}
        assert self._known.all()  # each chunk was put
        manifest = f"{self._item}/{names.OCDBT_MANIFEST}"
        return {
            names.CHUNK_SUMS: self._sums.astype("<u4").tobytes(),
            names.OCDBT_MANIFEST: self._storage.read(manifest, max_bytes=1 << 30),
        }


def _padded(values: Values, stored: StoredArray) -> Values:
    """A chunk at the edge is stored whole; TensorStore sees to that where it writes."""
    if values.shape == stored.chunk_shape or not is_direct(stored):
        return values
    chunk = np.zeros(stored.chunk_shape, values.dtype)
    chunk[tuple(slice(n) for n in values.shape)] = values
    return chunk


class _PlainFiles:
    """Writes each array into a directory of its own, all of it by TensorStore."""

    def __init__(self, storage: Storage, item: str, goal: Tree) -> None:
        from jaxckpt.storage._arrays import Writer

        self._writer = Writer(storage.kvstore(item), database=False)
        self._arrays = [
            (leaf.prefix, arrays.zarr3_metadata(leaf.array))
            for leaf in goal.leaves
            if leaf.has_array
        ]
        self._batch = _Batch()
        for prefix, metadata in self._arrays:
            self._writer.create_array(prefix, metadata)

    def put(self, array: int, box: Box, values: Values) -> None:
        if self._batch.add(array, box, values):
            self.flush()

    def flush(self) -> None:
        opened: dict[int, Any] = {}
        for array, box, values in self._batch.take():
            if array not in opened:
                opened[array] = self._writer.array(*self._arrays[array])
            self._writer.write(opened[array], box.slices, values)
        self._writer.commit()

    def files(self) -> dict[str, bytes]:
        return {}


# --- metadata --------------------------------------------------------------------------------


def _tree_files(goal: Tree, source: Leaves, *, ocdbt: bool) -> dict[str, bytes]:
    """The metadata files of the tree, by name in the item."""
    files = metadata_files(goal, source.shardings)
    if not ocdbt:
        described = replace(goal, leaves=tuple(map(_as_orbax_has_it, goal.leaves)))
        files[names.TREE_METADATA] = tree.encode(described)
    return files


def _as_orbax_has_it(leaf: Leaf) -> Leaf:
    """A leaf without what we say of its array, which the array's own metadata say then."""
    if not leaf.has_array:
        return leaf
    kind = tree.kind_of(tree.orbax_value_type(leaf))
    return replace(leaf, kind=kind, dtype=leaf.array.dtype, stored=None)


def _digests(storage: Storage, work: str) -> dict[str, str]:
    """Of all files: what is in them has no checksums."""
    return {
        name: step.digest(storage.read(f"{work}/{name}", max_bytes=entry.size))
        for name, entry in _transaction.files_below(storage, work).items()
        if entry.size <= _MOST_FILE_BYTES
    }


def _write_files(
    storage: Storage, work: str, files: dict[str, bytes], source: Leaves, started_ns: int
) -> dict[str, str]:
    """Writes the metadata files; returns their digests."""
    files[names.CHECKPOINT_METADATA] = step.encode(
        StepMetadata(
            handlers={names.STATE_ITEM: step.PYTREE_HANDLER},
            init_ns=started_ns,
            commit_ns=time.time_ns(),
            custom_metadata=source.custom_metadata,
        )
    )
    files[names.ORBAX_MARKER] = b""
    for name, data in files.items():
        if posixpath.basename(name) != names.OCDBT_MANIFEST:
            storage.make_dir(posixpath.dirname(f"{work}/{name}"))
            storage.write(f"{work}/{name}", data)
    return {name: step.digest(data) for name, data in files.items()}
