"""Writes a stream of leaves as a new checkpoint, in one database or in plain files.

In a database (OCDBT) it has the same bytes that `save` writes, checksums included. In plain files,
each array is a directory that any reader of zarr v3 opens, and the record has the digest of every
file. The checkpoint has a temporary name until the commit, as with `save`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import posixpath
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Final

from jaxckpt._convert.source import Leaves, Tile, Values
from jaxckpt._core.box import Box, cut, whole, widened
from jaxckpt._core.check import check_new_checkpoint
from jaxckpt._core.text import command, counted
from jaxckpt._disk.attempt import raise_save_error
from jaxckpt._disk.checksums import starts_of, units_in
from jaxckpt._disk.data_files import Chunk, DataFiles, PlainFiles
from jaxckpt._disk.find import at_rest
from jaxckpt._disk.found import key_folder
from jaxckpt._disk.places import last_files
from jaxckpt._disk.tensors import run_shape
from jaxckpt._disk.transaction import Transaction, begin
from jaxckpt._disk.writer import compressed, metadata_files
from jaxckpt.errors import CheckpointError, StepExists, UnsupportedLeaf
from jaxckpt.format import arrays, names, step, tree
from jaxckpt.format.step import FileFacts, Record, StepMetadata
from jaxckpt.format.tree import Leaf, StoredArray, Tree, bad_leaf, grid_of
from jaxckpt.storage import Storage, real

_logger = logging.getLogger("jaxckpt")

# A chunk is made in memory; a larger one becomes several.
_MOST_CHUNK_BYTES: Final = 128 << 20
_BATCH_BYTES: Final = 64 << 20
# A data file is read into memory for its digest, here and by `verify`.
_MOST_FILE_BYTES: Final = 256 << 20
_BATCH_CHUNKS: Final = 1 << 12
# Inner chunks smaller than this are worse than none.
_LEAST_INNER_BYTES: Final = 1 << 20
_MOST_CHUNKS: Final = 1 << 18


def write_checkpoint(
    storage: Storage,
    path: str,
    source: Leaves,
    *,
    overwrite: bool,
    ocdbt: bool = True,
    zstd: int | None = None,
) -> None:
    """Makes a committed checkpoint with one item from `source`.

    Args:
        ocdbt: Whether its arrays are in one database, or in plain files.
        zstd: The level at which they are compressed, if they are.

    Raises:
        UnsupportedLeaf: plain files cannot store some leaves; nothing was written.
        StepExists: `path` exists, or has several items, most of which would be lost.
        ValueError: the name is reserved, or the step to replace is pinned.
        SaveFailed: the checkpoint was not committed; the cause is chained.
        CorruptCheckpoint: the source is damaged; nothing was written.
    """
    start, started_ns = time.monotonic(), time.time_ns()
    check_new_checkpoint(path, overwrite)
    goal = _goal(source.tree, ocdbt=ocdbt, zstd=zstd)
    if not ocdbt:
        _check_plain(goal.leaves, path)
    if overwrite:
        _check_replaced(storage, path)
    transaction = None
    try:
        transaction = begin(storage, path, overwrite=overwrite)
        item = f"{transaction.work}/{names.STATE_ITEM}"
        storage.make_dir(item)
        writer = _Writer(storage, item, goal)
        total_bytes = _copy(source, goal, writer)
        source.check()
        files = {
            f"{names.STATE_ITEM}/{name}": data
            for name, data in (_tree_files(goal, source, ocdbt=ocdbt) | writer.files()).items()
        }
        _add_metadata(transaction, files, source, started_ns)
        known = {} if ocdbt else _facts(storage, transaction.work)
        about = Record(lineage=source.lineage, differences=source.differences)
        transaction.commit(files, about, known=known)
    except BaseException as error:
        if transaction is not None:
            transaction.abort(error)
        raise_save_error(path, error)
    seconds = time.monotonic() - start
    _logger.info("copied %s to %s: %d bytes, %.2f s", source.where, path, total_bytes, seconds)


def _check_replaced(storage: Storage, path: str) -> None:
    """Refuses to replace a pinned step, or a checkpoint of several items by a copy of one tree."""
    if storage.kind(f"{path}/{names.PINNED}") is not None:
        raise ValueError(f"{path} is pinned. To unpin it, run: {command('unpin', path)}")
    items, where = (), real(storage, path)
    with contextlib.suppress(CheckpointError):  # else it is none, or damaged
        items = at_rest(storage, where, lambda found: found.items if found.path == where else ())
    if len(items) > 1:
        raise StepExists(
            f"{path} has several items ({', '.join(sorted(items))}), and a copy has only one tree. "
            f"Nothing was changed: write it to another path, or delete {path} first."
        )


# --- the layout of each array ----------------------------------------------------------------


def _goal(copied: Tree, *, ocdbt: bool, zstd: int | None) -> Tree:
    """Returns the tree with the layout of its arrays in the copy."""
    leaves = tuple(
        leaf._replace(stored=compressed(chunked(leaf.array, inner=ocdbt), zstd), doubled=False)
        if leaf.has_array
        else leaf
        for leaf in copied.leaves
    )
    for leaf in leaves:
        if leaf.has_array:
            tree.check_grid(leaf.array, where=leaf.text, file="the copy")
            if problem := arrays.leaf_problem(leaf, leaf.array):
                raise bad_leaf(leaf, "the copy", problem)
    has_arrays = any(leaf.has_array for leaf in leaves)
    return replace(copied, leaves=leaves, uses_ocdbt=ocdbt and has_arrays)


def chunked(stored: StoredArray, *, inner: bool) -> StoredArray:
    """Returns an array's layout: with its current chunks, unless they are very large or many.

    Example:
        >>> array = StoredArray(shape=(1 << 20, 64), dtype="float32", chunk_shape=(1 << 19, 64))
        >>> chunked(array, inner=True).inner_shape
        (131072, 64)
    """
    itemsize = arrays.dtype_of(stored.dtype).itemsize
    chunk_shape = clipped(stored.chunk_shape, stored.shape)
    unit_shape = clipped(stored.unit_shape, stored.shape)
    count = math.prod(grid_of(stored.shape, chunk_shape))
    if count > _MOST_CHUNKS:
        chunk_shape = enlarged(unit_shape, stored.shape, itemsize, arrays.MAX_UNIT_BYTES)
    elif math.prod(chunk_shape) * itemsize > _MOST_CHUNK_BYTES:
        chunk_shape = _smaller(stored.shape, chunk_shape, unit_shape, itemsize)
    splits = inner and 0 not in stored.shape
    inner_shape = arrays.inner_shape(chunk_shape, itemsize) if splits else None
    whole_chunks = all(n % c == 0 for n, c in zip(stored.shape, chunk_shape, strict=True))
    if inner_shape is not None and (
        not whole_chunks or math.prod(inner_shape) * itemsize < _LEAST_INNER_BYTES
    ):
        inner_shape = None
    return StoredArray(
        shape=stored.shape, dtype=stored.dtype, chunk_shape=chunk_shape, inner_shape=inner_shape
    )


def clipped(tile_shape: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the tile, no larger than the array; no dimension is 0."""
    return tuple(max(1, min(t, n)) for t, n in zip(tile_shape, shape, strict=True))


def _smaller(
    shape: tuple[int, ...], chunk_shape: tuple[int, ...], unit_shape: tuple[int, ...], itemsize: int
) -> tuple[int, ...]:
    """Returns the shape of chunks that fit in memory, and never need parts of two units."""
    if math.prod(unit_shape) * itemsize <= _MOST_CHUNK_BYTES:
        # Units may be tiny, and finding one takes a search of all of them.
        return enlarged(unit_shape, chunk_shape, itemsize, arrays.MAX_UNIT_BYTES)
    piece = run_shape(unit_shape, itemsize)
    is_one = unit_shape == shape
    return piece if is_one or not any(map(int.__mod__, unit_shape, piece)) else chunk_shape


def enlarged(
    tile_shape: Sequence[int], shape: Sequence[int], itemsize: int, most_bytes: int
) -> tuple[int, ...]:
    """Returns the tile, enlarged along the last dimensions first, up to a size."""
    return widened(tile_shape, shape, most_bytes // (math.prod(tile_shape) * itemsize))


def parts_of(leaf: int, shape: tuple[int, ...], tile_shape: Sequence[int]) -> Iterator[Tile]:
    return (Tile(leaf=leaf, box=box) for box in cut(whole(shape), tile_shape))


def _check_plain(leaves: Sequence[Leaf], path: str) -> None:
    """Raises UnsupportedLeaf for leaves that plain files would change or confuse."""
    problems = {leaf.text: _plain_problem(leaf) for leaf in leaves if leaf.has_array}
    bad = [f"  {text}: {problem}" for text, problem in problems.items() if problem is not None]
    if bad:
        raise UnsupportedLeaf(
            f"{path}: {counted(len(bad), 'leaf')} cannot be plain files, and nothing was written:\n"
            + "\n".join(bad[:50])
            + "\nLeave them out (skip), rename the keys, or cast floating-point leaves (dtype)."
        )


def _plain_problem(leaf: Leaf) -> str | None:
    if leaf.kind != "key" and leaf.dtype in arrays.AS_BYTES_DTYPES:
        return f"has dtype {leaf.dtype}, which zarr lacks"
    # TensorStore takes a backslash for a slash.
    is_plain = not {"/", "\\"} & {*leaf.name} and leaf.name not in ("", ".", "..")
    means_more = names.is_part_of_tree(leaf.name) or key_folder([leaf.name]) is not None
    if leaf.path and (means_more or not is_plain):
        return f"needs a directory named {leaf.name!r}"
    return None


# --- values ----------------------------------------------------------------------------------


def _copy(source: Leaves, goal: Tree, writer: _Writer) -> int:
    """Reads each stored byte once, and writes it; returns the number of bytes."""

    def parts() -> Iterator[Tile]:
        for i in writer.leaves:
            had, stored = source.tree.leaves[i].array, goal.leaves[i].array
            # The larger shape is a multiple of the smaller one.
            unit_shape = clipped(had.unit_shape, had.shape)
            yield from parts_of(i, stored.shape, tuple(map(max, unit_shape, stored.chunk_shape)))

    total = 0
    with closing(source.read(parts())) as read:
        for part, values in read:
            chunk_shape = goal.leaves[part.leaf].array.chunk_shape
            for box in cut(part.box, chunk_shape):
                writer.put(part.leaf, box, values[box.within(part.box)])
            total += values.nbytes
            del values  # so that their memory is free before the next part is read
    writer.flush()
    return total


class _Writer:
    """Writes chunks in the order of the leaves, in batches, into a database or plain files."""

    def __init__(self, storage: Storage, item: str, goal: Tree) -> None:
        self.leaves = {i: leaf for i, leaf in enumerate(goal.leaves) if leaf.has_array}
        *starts, self._count = starts_of(leaf.array for leaf in self.leaves.values())
        self._starts = dict(zip(self.leaves, starts, strict=True))
        self._units: list[int] = []  # of the checksums that `_files` has
        self._has_database = goal.uses_ocdbt
        self._files = (DataFiles if goal.uses_ocdbt else PlainFiles)(storage, item)
        self._bytes = self._chunks = 0  # of the batch
        for leaf in self.leaves.values():
            self._files.put(leaf.prefix + arrays.metadata_key(3), arrays.encode_zarr3(leaf.array))

    def put(self, number: int, box: Box, values: Values) -> None:
        """Writes a chunk of a leaf, now or later. The values must not change."""
        prefix, stored = self.leaves[number].prefix, self.leaves[number].array
        index = tuple(a // n for a, n in zip(box.start, stored.chunk_shape, strict=True))
        units = units_in(stored, index)
        chunk = Chunk(prefix + arrays.chunk_key(index), stored, values, len(self._files.sums))
        self._units += [self._starts[number] + unit for unit in units]
        self._files.sums += [0] * len(units)
        self._files.put_chunk(chunk)
        self._bytes += values.nbytes
        self._chunks += 1
        if self._bytes >= _BATCH_BYTES or self._chunks >= _BATCH_CHUNKS:
            self.flush()

    def flush(self) -> None:
        """Writes what was put so far."""
        self._files.flush()
        self._bytes = self._chunks = 0

    def files(self) -> dict[str, bytes]:
        """Returns the metadata files about the chunks, by name in the item; some exist already."""
        if not self._has_database:
            return {}
        assert len(self._units) == self._count  # each chunk was put
        table = self._files.write(self._units)
        return last_files([table], self._count, table.manifest)


# --- metadata --------------------------------------------------------------------------------


def _tree_files(goal: Tree, source: Leaves, *, ocdbt: bool) -> dict[str, bytes]:
    files = metadata_files(goal, source.shardings)
    if not ocdbt:
        leaves = tuple(map(_as_orbax_has_it, goal.leaves))
        described = replace(goal, leaves=leaves, kinds=tree.lost_kinds(goal.leaves))
        files[names.TREE_METADATA] = tree.encode(described)
    return files


def _as_orbax_has_it(leaf: Leaf) -> Leaf:
    """Returns a leaf without our description of its array; the array's own metadata has it."""
    if not leaf.has_array:
        return leaf
    kind = tree.kind_of(tree.orbax_value_type(leaf))
    return leaf._replace(kind=kind, dtype=leaf.array.dtype, stored=None)


def _facts(storage: Storage, work: str) -> dict[str, FileFacts]:
    """Returns the facts about all files with their digests, because plain arrays lack checksums."""
    sizes = {n: size for n, (_, size) in storage.files(work).items() if size <= _MOST_FILE_BYTES}
    digests = {n: step.digest(storage.read(f"{work}/{n}", max_bytes=sizes[n])) for n in sizes}
    return {n: FileFacts(size=sizes[n], sha256=digests[n]) for n in sizes}


def _add_metadata(
    transaction: Transaction, files: dict[str, bytes], source: Leaves, started_ns: int
) -> None:
    """Adds the metadata of the checkpoint, and makes the directories of all files."""
    files[names.CHECKPOINT_METADATA] = step.encode(
        StepMetadata(
            handlers={names.STATE_ITEM: step.PYTREE_HANDLER},
            init_ns=started_ns,
            commit_ns=time.time_ns(),
            custom_metadata=source.custom_metadata,
        )
    )
    files[names.ORBAX_MARKER] = b""
    if transaction.protocol.work(transaction.token).mark:  # as a save does
        files[f"{names.STATE_ITEM}/{names.COMMIT_MARKER}"] = b""
    for name in files:
        transaction.storage.make_dir(posixpath.dirname(f"{transaction.work}/{name}"))
