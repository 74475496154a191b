"""Writes one process's share of a tree's arrays into its database."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from jaxckpt._plan import SavePlan
from jaxckpt._transfer import HostSnapshot
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

# TensorStore spends 65-200 us to open an array, and a chunk's bytes are easily made without it. A
# larger chunk is better left to it: it neither copies it more than once nor holds the lock.
_MAX_DIRECT_BYTES: Final = 256 << 10


def is_direct(stored: StoredArray) -> bool:
    """Whether the chunks of an array are written, and read, as values of the database."""
    if stored.inner_shape is not None or stored.dtype not in PLAIN_DTYPES:
        return False
    return math.prod(stored.chunk_shape) * dtype_of(stored.dtype).itemsize <= _MAX_DIRECT_BYTES


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
            metadata = zarr3_metadata(stored)
            if is_direct(stored):
                if describe:
                    writer.put(prefix + metadata_key(3), jsontext.dumps(metadata))
            elif describe:
                arrays[i] = writer.create_array(prefix, metadata)
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


def merge(storage: Storage, item_path: str) -> None:
    """Makes one database of the processes' own; values stay where they are."""
    from jaxckpt.storage._arrays import merge_databases

    children = [
        storage.kvstore(f"{item_path}/{name}")
        for name in storage.names(item_path)
        if name.startswith(names.OCDBT_PROCESS)
    ]
    if children:
        merge_databases(storage.kvstore(item_path), children)
