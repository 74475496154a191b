"""Writes one process's share of a tree's arrays."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from jaxckpt._core.box import Box
from jaxckpt._core.plan import SavePlan
from jaxckpt._disk.checksums import starts_of, units_in
from jaxckpt._disk.data_files import Chunk, DataFiles
from jaxckpt._disk.places import Table
from jaxckpt.errors import UnsupportedLeaf
from jaxckpt.format import names, sharding, step, tree
from jaxckpt.format.arrays import (
    CRC_BYTES,
    bytes_of,
    chunk_key,
    encode_chunk,
    encode_zarr3,
    metadata_key,
)
from jaxckpt.format.sharding import SavedSharding
from jaxckpt.format.tree import StoredArray, Tree

_MAX_DIRECT_BYTES: Final = 64 << 10
_MAX_PLAIN_BYTES: Final = 256 << 10  # compressed, a chunk of this size would gain little


def compressed(stored: StoredArray, level: int | None) -> StoredArray:
    """Returns the layout of an array with compressed chunks, if they are large enough to pay."""
    small = _is_small(stored, _MAX_PLAIN_BYTES)
    return stored if level is None or small else stored._replace(zstd=level)


def _is_small(stored: StoredArray, most_bytes: int) -> bool:
    is_one = stored.inner_shape is None
    return is_one and bytes_of(stored.chunk_shape, stored.dtype) <= most_bytes


class ChunkWrite(NamedTuple):
    """A chunk that a process writes: its key, and where its values are."""

    key: str
    stored: StoredArray
    is_direct: bool
    source: int  # the index of the shard in the snapshot
    part: tuple[Any, ...] | None  # of that shard; None for all
    sums: slice  # its checksums in the process's list of checksums


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePlan:
    """The writes of one process to a database, without the values."""

    # Key and bytes of the metadata of each array.
    described: tuple[tuple[str, bytes], ...]
    chunks: tuple[ChunkWrite, ...]  # direct chunks first
    units: tuple[int, ...]  # numbers of chunks and inner chunks in the file of checksums


class Reused(NamedTuple):
    """Shards that the step shares with files of an earlier step, so that they are not written."""

    sources: Container[int] = ()
    apart: Container[int] = ()  # written into other files anyway, for the next step
    table: Table = Table({})  # of the earlier step


NOTHING_REUSED: Final = Reused()


def plan_writes(
    prefixes: Sequence[str], plan: SavePlan, sources: Mapping[tuple[int, Box], int]
) -> WritePlan:
    """Works out the writes of this process to the database.

    Args:
        prefixes: The prefix of each array's keys.
        sources: The index of each shard in the snapshot, by array and box.
    """
    described = [
        (prefix + metadata_key(3), encode_zarr3(stored))
        for prefix, stored in zip(prefixes, plan.stored, strict=True)
    ]
    # The bytes of a small chunk are made at once, not while it is written: a copy takes less time.
    direct = [_is_small(stored, _MAX_DIRECT_BYTES) for stored in plan.stored]
    starts = list(starts_of(plan.stored))
    chunks: list[ChunkWrite] = []
    units: list[int] = []
    for write in sorted(plan.writes, key=lambda write: not direct[write.array]):
        i, stored = write.array, plan.stored[write.array]
        part = None if write.box == write.shard else write.box.within(write.shard)
        index = tuple(a // n for a, n in zip(write.box.start, stored.chunk_shape, strict=True))
        first = len(units)
        units += (starts[i] + unit for unit in units_in(stored, index))
        key, source = prefixes[i] + chunk_key(index), sources[i, write.shard]
        sums = slice(first, len(units))
        chunks.append(ChunkWrite(key, stored, direct[i], source, part, sums))
    return WritePlan(described=tuple(described), chunks=tuple(chunks), units=tuple(units))


def metadata_files(saved: Tree, shardings: Mapping[str, SavedSharding]) -> dict[str, bytes]:
    """Returns the metadata files of a tree, by name in its item."""
    files = {names.TREE_METADATA: tree.encode(saved)}
    texts = {leaf.name: leaf.value for leaf in saved.leaves if leaf.value is not None}
    if texts:
        files[names.STRINGS] = encode_texts(texts)
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


def encode_texts(texts: Mapping[str, str]) -> bytes:
    """Returns the file of text leaves, by name; UnsupportedLeaf if two cannot both be stored."""
    try:
        return step.encode_strings(texts)
    except ValueError as error:
        raise UnsupportedLeaf(f"two str leaves cannot both be stored: {error}") from error


def write_arrays(
    files: DataFiles,
    writes: WritePlan,
    snapshot: Sequence[Any],  # of numpy arrays
    *,
    describe: bool,
    reused: Reused = NOTHING_REUSED,
    is_whole: bool = True,
) -> Table:
    """Writes this process's chunks; they are on disk when it returns.

    None of them can be read before the manifest is stored.

    Args:
        describe: Whether to write the arrays' metadata too; only one process does.
        reused: The shards that are linked there instead, in a directory of files.
        is_whole: Whether no other process writes there, so that the nodes can be written too.

    Returns:
        The chunks written; with those that are reused, and their checksums.
    """
    described = writes.described if describe else ()
    if not (writes.chunks or described):
        return Table({})
    sums = files.sums
    sums += [0] * len(writes.units)
    for key, data in described:
        files.put(key, data)
    for key, stored, direct, source, part, at in writes.chunks:
        if source in reused.sources:
            sums[at] = reused.table.sums[at]
            files.reuse(key, reused.table)
            continue
        apart = source in reused.apart
        values = snapshot[source] if part is None else snapshot[source][part]
        if direct:
            data = encode_chunk(values)
            sums[at.start] = int.from_bytes(data[-CRC_BYTES:], "little")
            files.put(key, data, apart=apart)
        else:
            files.put_chunk(Chunk(key, stored, values, at.start), apart=apart)
    return files.write(writes.units, is_whole=is_whole)
