"""Writes one process's share of a tree's arrays into its database."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import numpy as np

from jaxckpt._core.box import Box
from jaxckpt._core.plan import SavePlan
from jaxckpt._disk.checksums import starts_of, stored_sums, unit_sums, units_in
from jaxckpt._disk.data_files import Chunk, DataFiles, Written
from jaxckpt.errors import SaveFailed, UnsupportedLeaf
from jaxckpt.format import names, sharding, step, tree
from jaxckpt.format.arrays import (
    CRC_BYTES,
    chunk_key,
    dtype_of,
    encode_chunk,
    encode_zarr3,
    metadata_key,
    zarr3_metadata,
)
from jaxckpt.format.sharding import SavedSharding
from jaxckpt.format.tree import Leaf, StoredArray, Tree
from jaxckpt.storage import Storage, usable_cores

# The bytes of a chunk of at most this size are made at once; those of a larger one while it is
# written, and by TensorStore if other arrays of the tree need it: to open an array costs it more
# than to write a small chunk.
_MAX_DIRECT_BYTES: Final = 256 << 10
_UPLOADS: Final = 4  # of files at a time, each in a few parts of 8 MiB at a time
# A transaction keeps compressed chunks in memory until its commit; others stay where they are.
_MAX_COMPRESSED_BYTES: Final = 256 << 20


@lru_cache(maxsize=1 << 12)
def is_direct(stored: StoredArray) -> bool:
    """Returns whether the chunks of an array are written as values of the database."""
    if stored.inner_shape is not None:
        return False
    return math.prod(stored.chunk_shape) * dtype_of(stored.dtype).itemsize <= _MAX_DIRECT_BYTES


def compressed(stored: StoredArray, level: int | None) -> StoredArray:
    """Returns the layout of an array with compressed chunks, if they are large enough to pay."""
    return stored if level is None or is_direct(stored) else replace(stored, zstd=level)


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePlan:
    """The writes of one process to its database, without the values."""

    # Key and bytes of the metadata of each array with direct chunks.
    described: tuple[tuple[str, bytes], ...]
    # Prefix and layout of each other array, by its index in the plan.
    arrays: Mapping[int, tuple[str, StoredArray]]
    # Key, index of the source shard, and part of the shard (None for all), for each direct chunk.
    direct: tuple[tuple[str, int, tuple[Any, ...] | None], ...]
    # Array, place and index in it, source shard and part of it, for each other chunk.
    written: tuple[tuple[int, tuple[slice, ...], tuple[int, ...], int, tuple[Any, ...] | None], ...]
    # Numbers of the direct, then of the other chunks and inner chunks in the file of checksums.
    units: tuple[int, ...]
    unit_count: int  # chunks and inner chunks of the whole tree, of all processes

    def chunks(self) -> Iterator[tuple[str, int]]:
        """Yields the key and the source shard of each chunk."""
        for key, source, _ in self.direct:
            yield key, source
        for i, _, index, source, _ in self.written:
            yield self.arrays[i][0] + chunk_key(index), source


class Kept(NamedTuple):
    """Shards that the database of an earlier step has, so that they need not be written."""

    sources: Container[int] = ()
    apart: Container[int] = ()  # to be written all the same, for the next step, into other files
    written: Written = Written([])
    folder: str = ""  # of that database


NOTHING_KEPT: Final = Kept()


def plan_writes(
    prefixes: Sequence[str], plan: SavePlan, sources: Mapping[tuple[int, Box], int]
) -> WritePlan:
    """Works out the writes of this process to its database.

    Args:
        prefixes: The prefix of each array's keys.
        sources: The index of each shard in the snapshot, by array and box.
    """
    described, arrays, direct, written = [], {}, [], []
    direct_units, written_units = [], []
    starts = list(starts_of(plan.stored))
    for i, (prefix, stored) in enumerate(zip(prefixes, plan.stored, strict=True)):
        if is_direct(stored):
            described.append((prefix + metadata_key(3), encode_zarr3(stored)))
        else:
            arrays[i] = prefix, stored
    for write in plan.writes:
        source = sources[write.array, write.shard]
        part = None if write.box == write.shard else write.box.within(write.shard)
        stored, first = plan.stored[write.array], starts[write.array]
        index = tuple(a // n for a, n in zip(write.box.start, stored.chunk_shape, strict=True))
        units = (first + unit for unit in units_in(stored, index))
        if write.array in arrays:
            written.append((write.array, write.box.slices, index, source, part))
            written_units += units
        else:
            direct.append((prefixes[write.array] + chunk_key(index), source, part))
            direct_units += units
    return WritePlan(
        described=tuple(described),
        arrays=arrays,
        direct=tuple(direct),
        written=tuple(written),
        units=(*direct_units, *written_units),
        unit_count=starts[-1],
    )


def metadata_files(saved: Tree, shardings: Mapping[str, SavedSharding]) -> dict[str, bytes]:
    """Returns the metadata files of a tree, by name in its item."""
    files = {names.TREE_METADATA: tree.encode(saved)}
    if any(leaf.value is not None for leaf in saved.leaves):
        files[names.STRINGS] = texts_of(saved.leaves)
    if shardings:
        files[names.SHARDING] = sharding.encode(shardings)
    device = {
        leaf.name: (leaf.stored.chunk_shape, leaf.key_impl)
        for leaf in saved.leaves
        if leaf.kind in ("array", "key") and leaf.stored is not None
    }
    if device:
        files[f"{names.ARRAY_METADATAS}/process_0"] = step.encode_array_metadatas(device)
    return files


def texts_of(leaves: Sequence[Leaf]) -> bytes:
    """Returns the file of all text leaves; UnsupportedLeaf if two cannot both be stored."""
    texts = {leaf.name: leaf.value for leaf in leaves if leaf.value is not None}
    try:
        return step.encode_strings(texts)
    except ValueError as error:
        raise UnsupportedLeaf(f"two str leaves cannot both be stored: {error}") from error


def write_arrays(
    storage: Storage,
    folder: str,
    writes: WritePlan,
    snapshot: Sequence[Any],  # of numpy arrays
    *,
    describe: bool,
    database: Any = None,  # a `Database` of storage._arrays
    kept: Kept = NOTHING_KEPT,
) -> Written:
    """Writes this process's chunks; they are on disk when it returns.

    That takes one transaction, or several if many chunks are compressed. None of the chunks can be
    read before the manifest is stored.

    Args:
        folder: Directory of the database; made if there is anything to write.
        snapshot: The values of each shard.
        describe: Whether to write the arrays' metadata too; only one process does.
        database: The database if it is written by several calls; the manifest is then empty.
        kept: What is linked instead, in a directory of files.

    Returns:
        What was written, with the checksum of each of `writes.units`.
    """
    from jaxckpt.storage._arrays import Database, Writer

    has_metadata = describe and (writes.described or writes.arrays)
    if not (writes.direct or writes.written or has_metadata):
        return Written([])
    spec = storage.kvstore(folder)
    # Over gRPC, which users ask for, only TensorStore writes.
    by_grpc = spec is not None and spec["driver"] == "gcs_grpc"
    if database is None and not by_grpc and _is_plain(writes):
        return _write_files(storage, folder, writes, snapshot, describe=describe, kept=kept)
    storage.make_dir(folder)
    mine = database or (_in_memory(storage, folder) if spec is None else Database(spec))
    sums: list[int] = []
    batches = _batches(writes, snapshot) if writes.written else [[]]
    for n, batch in enumerate(batches):
        writer, opened = Writer(mine), {}
        try:
            if describe and n == 0:
                for key, data in writes.described:
                    writer.put(key, data)
                for i, (prefix, stored) in writes.arrays.items():
                    opened[i] = writer.create_array(prefix, zarr3_metadata(stored))
            for i, where, _, values in batch:
                if i not in opened:
                    prefix, stored = writes.arrays[i]
                    opened[i] = writer.array(prefix, zarr3_metadata(stored))
                writer.write(opened[i], where, values)
            for key, source, part in writes.direct if n == 0 else ():
                values = snapshot[source]
                data = encode_chunk(values if part is None else values[part])
                sums.append(int.from_bytes(data[-CRC_BYTES:], "little"))
                writer.put(key, data)
            writer.commit()
        except BaseException:
            writer.abort()
            raise
        if batch:
            sums += _sums_of(storage, mine, writes, batch)
        if mine.upload:
            mine.upload()
    return Written(sums, b"" if database else mine.take_manifest())


def _is_plain(writes: WritePlan) -> bool:
    """Returns whether all chunks have the bytes of their values."""
    arrays = [stored for _, stored in writes.arrays.values()]
    return all(one.zstd is None for one in arrays)


def _write_files(
    storage: Storage,
    folder: str,
    writes: WritePlan,
    snapshot: Sequence[Any],
    *,
    describe: bool,
    kept: Kept,
) -> Written:
    """Does what `write_arrays` does without TensorStore."""
    sums = [0] * len(writes.units)
    files = DataFiles(storage, folder, sums)
    for key, data in writes.described if describe else ():
        files.put(key, data)
    for prefix, stored in writes.arrays.values() if describe else ():
        files.put(prefix + metadata_key(3), encode_zarr3(stored))
    for n, (key, source, part) in enumerate(writes.direct):
        if source in kept.sources:
            sums[n] = kept.written.sums[n]
            files.keep(key, kept.written)
            continue
        values = snapshot[source]
        data = encode_chunk(values if part is None else values[part])
        sums[n] = int.from_bytes(data[-CRC_BYTES:], "little")
        files.put(key, data, apart=source in kept.apart)
    first = len(writes.direct)
    for i, _, index, source, part in writes.written:
        prefix, stored = writes.arrays[i]
        key, after = prefix + chunk_key(index), first + len(units_in(stored, index))
        if source in kept.sources:
            sums[first:after] = kept.written.sums[first:after]
            files.keep(key, kept.written)
        else:
            values = snapshot[source] if part is None else snapshot[source][part]
            files.put_chunk(Chunk(key, stored, values, first), apart=source in kept.apart)
        first = after
    # On a disk, the cores write; to a store, its client does, and the threads wait.
    threads = usable_cores() if storage.scheme == "file" else _UPLOADS
    return files.write(threads, links_from=kept.folder)


# Array, place and index in it, and values of a chunk.
_Chunk = tuple[int, tuple[slice, ...], tuple[int, ...], np.ndarray[Any, Any]]


def _batches(writes: WritePlan, snapshot: Sequence[np.ndarray[Any, Any]]) -> list[list[_Chunk]]:
    """Divides the chunks among transactions."""
    batches: list[list[_Chunk]] = [[]]
    compressed_bytes = 0
    for i, where, index, source, part in writes.written:
        values = snapshot[source] if part is None else snapshot[source][part]
        compressed_bytes += values.nbytes if writes.arrays[i][1].zstd else 0
        if compressed_bytes > _MAX_COMPRESSED_BYTES:
            batches.append([])
            compressed_bytes = values.nbytes
        batches[-1].append((i, where, index, values))
    return batches


def _sums_of(storage: Storage, database: Any, writes: WritePlan, batch: list[_Chunk]) -> list[int]:
    """Returns the checksums of chunks that are written."""
    from jaxckpt.storage._arrays import Reader

    # In a store, each is a request. But only stored chunks have the checksums of compressed bytes.
    if storage.atomic_rename or any(writes.arrays[i][1].zstd for i, *_ in batch):
        asked = [(*writes.arrays[i], index, None) for i, _, index, _ in batch]
        found = stored_sums(Reader(database.base, database=database), asked)
    else:
        found = [unit_sums(writes.arrays[i][1], values) for i, *_, values in batch]
    return [one for of_chunk in found for one in of_chunk]


def _in_memory(storage: Storage, folder: str) -> Any:
    from jaxckpt.storage._staged import Staging

    return Staging(storage, folder).new_database()


def merge(storage: Storage, item_path: str, databases: Sequence[str]) -> bytes:
    """Merges the databases of processes, without moving values; SaveFailed if one is missing.

    Returns:
        The manifest of the merged database, still to be stored.
    """
    from jaxckpt.storage._arrays import merge_databases
    from jaxckpt.storage._staged import Staging

    manifests = [f"{item_path}/{database}/{names.OCDBT_MANIFEST}" for database in databases]
    kinds = storage.together([partial(storage.kind, manifest) for manifest in manifests])
    unseen = [name for name, kind in zip(databases, kinds, strict=True) if kind is None]
    if unseen:
        raise SaveFailed(
            f"{item_path}: process 0 does not see {', '.join(unseen)}, which other processes have "
            "written. The path must be on a file system that all hosts share."
        )
    staging = Staging(storage, item_path)
    staging.fetch(databases)
    return merge_databases(staging.new_database(), databases)
