"""Writes one process's share of a tree's arrays into its database."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from jaxckpt._plan import SavePlan
from jaxckpt._transfer import HostSnapshot
from jaxckpt.errors import SaveFailed
from jaxckpt.format import jsontext, names
from jaxckpt.format.arrays import (
    PLAIN_DTYPES,
    chunk_key,
    dtype_of,
    encode_chunk,
    metadata_key,
    zarr3_metadata,
)
from jaxckpt.format.tree import StoredArray
from jaxckpt.storage import Storage

# To open an array costs TensorStore more than to write a small chunk, whose bytes are easily made
# without it. A larger one is better left to it: it neither copies it more than once nor holds the
# interpreter's lock.
_MAX_DIRECT_BYTES: Final = 256 << 10


@lru_cache(maxsize=1 << 12)
def is_direct(stored: StoredArray) -> bool:
    """Whether the chunks of an array are written, and read, as values of the database."""
    if stored.inner_shape is not None or stored.dtype not in PLAIN_DTYPES:
        return False
    return math.prod(stored.chunk_shape) * dtype_of(stored.dtype).itemsize <= _MAX_DIRECT_BYTES


@lru_cache(maxsize=1 << 12)
def _encode(stored: StoredArray) -> bytes:
    return jsontext.dumps(zarr3_metadata(stored))


def write_arrays(
    storage: Storage,
    database: str,
    prefixes: Sequence[str],
    plan: SavePlan,
    snapshot: HostSnapshot,
    *,
    describe: bool,
) -> None:
    """Writes this process's chunks, in one atomic transaction; on disk when it returns.

    Args:
        database: Directory of the database; made if there is anything to write.
        prefixes: Of each array's keys.
        describe: Whether to write the arrays' metadata too; one process does.
    """
    from jaxckpt.storage._arrays import Writer

    if not plan.writes and not (describe and plan.stored):
        return
    storage.make_dir(database)
    writer = Writer(storage.kvstore(database))
    try:
        arrays = {}
        for i, (prefix, stored) in enumerate(zip(prefixes, plan.stored, strict=True)):
            if is_direct(stored):
                if describe:
                    writer.put(prefix + metadata_key(3), _encode(stored))
            elif describe:
                arrays[i] = writer.create_array(prefix, zarr3_metadata(stored))
        for write in plan.writes:
            stored, prefix = plan.stored[write.array], prefixes[write.array]
            values = snapshot.take(write.array, write.shard, write.box)
            if is_direct(stored):
                index = [a // n for a, n in zip(write.box.start, stored.chunk_shape, strict=True)]
                writer.put(prefix + chunk_key(index), encode_chunk(values))
                continue
            if write.array not in arrays:
                arrays[write.array] = writer.array(prefix, zarr3_metadata(stored))
            writer.write(arrays[write.array], write.box.slices, values)
        writer.commit()
    except BaseException:
        writer.abort()
        raise


def database_of(item_path: str, process: int, count: int) -> str:
    """Where a process writes: its own database, or the only one."""
    return item_path if count == 1 else f"{item_path}/{names.process_database(process)}"


def merge(storage: Storage, item_path: str, writers: Sequence[int]) -> None:
    """Makes one database of those that `writers` wrote; values stay where they are.

    Raises:
        SaveFailed: one of them is not there.
    """
    from jaxckpt.storage._arrays import merge_databases

    databases = [f"{item_path}/{names.process_database(process)}" for process in writers]
    unseen = [
        process
        for process, database in zip(writers, databases, strict=True)
        if storage.kind(f"{database}/{names.OCDBT_MANIFEST}") is None
    ]
    if unseen:
        raise SaveFailed(
            f"{item_path}: process 0 does not see what processes {unseen} wrote. The path must be "
            "on a file system that all hosts share."
        )
    merge_databases(storage.kvstore(item_path), [storage.kvstore(path) for path in databases])
