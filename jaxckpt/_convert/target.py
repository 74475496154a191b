"""Writes a tree that comes as a stream into a new checkpoint, in the layout that is asked for.

That of `save` (zarr v3 in a database) has the very bytes that `save` writes, checksums and all; the
others are what older releases of Orbax read: of those the record has the digest of every file. The
tree comes in parts and goes in batches, so that the memory this takes depends on neither. A
transaction of the database holds all that is put into it: each batch is one of its own, and the
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
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np

from jaxckpt._convert.source import Leaves, Part, Values, read_with_parts
from jaxckpt._core import box as _box
from jaxckpt._core.box import Box
from jaxckpt._core.plan import SavePlan, Write
from jaxckpt._disk import transaction as _transaction
from jaxckpt._disk.checksums import starts_of
from jaxckpt._disk.find import key_folder
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLayout:
    """How the arrays of an item lie on disk.

    Attributes:
        zarr: Version of the format, 2 or 3.
        ocdbt: Whether they are in a database; else in plain files.
    """

    zarr: int
    ocdbt: bool

    @property
    def is_ours(self) -> bool:
        return self.zarr == 3 and self.ocdbt


def write_checkpoint(
    storage: Storage, path: str, source: Leaves, layout: DiskLayout, *, overwrite: bool
) -> None:
    """Makes a committed checkpoint of one item of what comes from `source`.

    Raises:
        UnsupportedLeaf: leaves that the layout cannot hold; nothing was written.
        StepExists: something is at `path`.
        SaveFailed: the checkpoint was not committed; the cause is chained.
        CorruptCheckpoint: the source is damaged; nothing was made.
    """
    start, started_ns = time.monotonic(), time.time_ns()
    if names.is_reserved(posixpath.basename(path)):
        raise ValueError(f"{path}: names like this are those of checkpoints in the making")
    goal = _goal(source.tree, layout)
    if not layout.is_ours:
        _check_dtypes(goal.leaves, path)
    if not layout.ocdbt:
        _check_plain_names(goal.leaves, path)
    transaction = None
    try:
        transaction = _transaction.begin(storage, path, overwrite=overwrite)
        item = f"{transaction.work}/{names.STATE_ITEM}"
        storage.make_dir(item)
        writer: _Writer = (_Ours if layout.is_ours else _Others)(storage, item, goal, layout)
        total_bytes = _copy(source, goal, writer)
        source.check()
        files = {
            f"{names.STATE_ITEM}/{name}": data
            for name, data in (_tree_files(goal, source, layout) | writer.files()).items()
        }
        digests = _write_files(storage, transaction.work, files, source, started_ns)
        if not layout.is_ours:
            digests |= _digests(storage, transaction.work)
        transaction.commit(digests, lineage=source.lineage)
    except BaseException as error:
        if transaction is not None:
            transaction.abort()
        _transaction.raise_save_error(path, error)
    seconds = time.monotonic() - start
    _logger.info("copied %s to %s: %d bytes, %.2f s", source.place, path, total_bytes, seconds)


# --- how each array will lie -----------------------------------------------------------------


def _goal(copied: Tree, layout: DiskLayout) -> Tree:
    """The tree with its arrays as they will lie."""
    leaves = tuple(
        replace(leaf, stored=chunked(leaf.array, inner=layout.is_ours)) if leaf.has_array else leaf
        for leaf in copied.leaves
    )
    for leaf in leaves:
        if leaf.has_array:
            tree.check_grid(leaf.array, where=leaf.text, file="the copy")
            arrays.check_leaf(leaf, leaf.array, file="the copy")
    has_arrays = any(leaf.has_array for leaf in leaves)
    return replace(
        copied, leaves=leaves, zarr_version=layout.zarr, uses_ocdbt=layout.ocdbt and has_arrays
    )


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


def _check_dtypes(leaves: Sequence[Leaf], path: str) -> None:
    """Refuses leaves whose values would come back as other numbers."""
    bad = [
        f"  {leaf.text}: has dtype {leaf.dtype}"
        for leaf in leaves
        if leaf.kind != "key" and leaf.dtype in arrays.AS_BYTES_DTYPES
    ]
    if bad:
        raise UnsupportedLeaf(
            f"{path}: {len(bad)} leaves have dtypes that only zarr=3, ocdbt=True can say, and "
            "nothing was written:\n" + "\n".join(bad[:50]) + "\nLeave them out with skip=[...], or "
            "cast those of floating point with dtype=..."
        )


def _check_plain_names(leaves: Sequence[Leaf], path: str) -> None:
    """Refuses leaves whose directories would be other files, or somewhere else."""
    bad = [
        f"  {leaf.text}: a directory called {leaf.name!r}"
        for leaf in leaves
        if leaf.has_array
        and leaf.path
        and ("/" in leaf.name or leaf.name in ("", ".", "..") or _means_more(leaf.name))
    ]
    if bad:
        raise UnsupportedLeaf(
            f"{path}: {len(bad)} leaves cannot be plain files, and nothing was written:\n"
            + "\n".join(bad[:50])
            + "\nRename the keys, leave them out with skip=[...], or use ocdbt=True."
        )


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


class _Ours:
    """Writes what `save` writes."""

    def __init__(self, storage: Storage, item: str, goal: Tree, layout: DiskLayout) -> None:
        del layout
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
        return {
            names.CHUNK_SUMS: self._sums.astype("<u4").tobytes(),
            names.OCDBT_MANIFEST: _manifest(self._storage, self._item),
        }


def _padded(values: Values, stored: StoredArray) -> Values:
    """A chunk at the edge is stored whole; TensorStore sees to that where it writes."""
    if values.shape == stored.chunk_shape or not is_direct(stored):
        return values
    chunk = np.zeros(stored.chunk_shape, values.dtype)
    chunk[tuple(slice(n) for n in values.shape)] = values
    return chunk


class _Others:
    """Writes the layouts of older releases of Orbax, all of it by TensorStore."""

    def __init__(self, storage: Storage, item: str, goal: Tree, layout: DiskLayout) -> None:
        self._storage, self._item, self._layout = storage, item, layout
        described = arrays.zarr3_metadata if layout.zarr == 3 else arrays.zarr2_metadata
        self._arrays = [
            (leaf.prefix, described(leaf.array)) for leaf in goal.leaves if leaf.has_array
        ]
        self._batch = _Batch()
        if self._arrays:
            writer = self._writer()
            for prefix, metadata in self._arrays:
                writer.create_array(prefix, metadata)
            writer.commit()

    def _writer(self) -> Any:  # a `Writer` of storage._arrays
        from jaxckpt.storage._arrays import Writer

        spec = self._storage.kvstore(self._item)
        return Writer(spec, database=self._layout.ocdbt, zarr_version=self._layout.zarr)

    def put(self, array: int, box: Box, values: Values) -> None:
        if self._batch.add(array, box, values):
            self.flush()

    def flush(self) -> None:
        chunks = self._batch.take()
        if not chunks:
            return
        writer = self._writer()
        opened: dict[int, Any] = {}
        try:
            for array, box, values in chunks:
                if array not in opened:
                    opened[array] = writer.array(*self._arrays[array])
                writer.write(opened[array], box.slices, values)
            writer.commit()
        except BaseException:
            writer.abort()
            raise

    def files(self) -> dict[str, bytes]:
        if not (self._arrays and self._layout.ocdbt):
            return {}
        return {names.OCDBT_MANIFEST: _manifest(self._storage, self._item)}


def _manifest(storage: Storage, item: str) -> bytes:
    return storage.read(f"{item}/{names.OCDBT_MANIFEST}", max_bytes=1 << 30)


# --- metadata --------------------------------------------------------------------------------


def _tree_files(goal: Tree, source: Leaves, layout: DiskLayout) -> dict[str, bytes]:
    """The metadata files of the tree, by name in the item."""
    files = metadata_files(goal, source.shardings)
    if not layout.is_ours:
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
