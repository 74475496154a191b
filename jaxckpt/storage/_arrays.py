"""The only module that imports tensorstore: one context, keys and arrays in a store.

TensorStore is slow to import, so nothing that a person types on a command line (`ls`, `du`) gets
here, and `jaxckpt.storage` imports this module only for memory stores and for arrays.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import tensorstore as ts

from jaxckpt.errors import CheckpointError, CorruptCheckpoint, is_io_failure

_context: ts.Context | None = None
_context_lock = threading.Lock()  # guards _context

# Nodes of an OCDBT tree are kept while it is read, by its reader: kept any longer, they would stand
# for a tree that has since been replaced. Chunks, each read once, are not kept.
_NODES: Final = "cache_pool#ocdbt"
_NODE_CACHE_BYTES: Final = 64 << 20

# TensorStore's name for "no such key", which makes a conditional write create-if-absent. A read
# of a missing key answers the same bytes; asking each time would cost a round trip.
_MISSING_GENERATION = b"\x02"


def context() -> ts.Context:
    """Returns the one TensorStore context of this process.

    One, because a context per save leaks its cache, because OCDBT copies between two stores only
    within one, and because stores of the `memory` driver live inside it. It caches nothing: a
    checkpoint is read once.
    """
    global _context
    with _context_lock:
        if _context is None:
            _context = ts.Context(
                {
                    "cache_pool": {"total_bytes_limit": 0},
                    "file_io_concurrency": {"limit": 32},
                    "data_copy_concurrency": {"limit": _usable_cores()},
                }
            )
        return _context


def _usable_cores() -> int:
    # sched_getaffinity sees taskset and cpusets; Python has it on Linux only.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Keys:
    """Byte strings by name, in any key-value store that TensorStore can open.

    Each call waits for its own result. A key is a `str`; the store holds its UTF-8.

    Args:
        spec: A TensorStore kvstore spec, such as `storage.kvstore(path)`.

    Example:
        >>> keys = Keys({"driver": "memory", "path": "doctest-keys/"})
        >>> keys.create("a/b", b"1"), keys.create("a/b", b"2"), keys.read("a/b")
        (True, False, b'1')
        >>> keys.list("a/")
        ['a/b']
        >>> keys.delete("a/")
        >>> keys.list()
        []
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._store = ts.KvStore.open(dict(spec), context=context()).result()

    def read(self, key: str) -> bytes | None:
        """Returns the value, or None if there is no such key."""
        got = self._store.read(key).result()
        return got.value if got.state == "value" else None

    def write(self, key: str, data: bytes) -> None:
        """Stores the value, whatever was there."""
        self._store.write(key, data).result()

    def create(self, key: str, data: bytes) -> bool:
        """Stores the value if there is none, and returns whether it did.

        On a remote store, False can also mean that this very write was applied and its answer
        lost. Where that matters, put something unique into `data` and read it back.
        """
        stamp = self._store.write(key, data, if_equal=_MISSING_GENERATION).result()
        return stamp.generation != b""

    def list(self, prefix: str = "") -> list[str]:
        """Returns every key that starts with `prefix`, whole and sorted."""
        return sorted(key.decode() for key in self._store.list(_range(prefix)).result())

    def delete(self, prefix: str) -> None:
        """Deletes every key that starts with `prefix`; a whole key is a prefix of itself."""
        self._store.delete_range(_range(prefix)).result()

    def delete_key(self, key: str) -> None:
        """Deletes this key alone, if it is there."""
        self._store.write(key, None).result()


def _range(prefix: str) -> ts.KvStore.KeyRange:
    start = prefix.encode()
    # The first string after all those that start with `prefix`. UTF-8 has no byte 0xff to carry.
    stop = start[:-1] + bytes([start[-1] + 1]) if start else b""
    return ts.KvStore.KeyRange(start, stop)


# --- arrays ----------------------------------------------------------------------------------

# Values up to the first size live in the nodes of the OCDBT tree, under the node's own checksum. A
# look-up takes time in proportion to the entries of a node: hence smaller ones than Orbax's 100 MB.
_OCDBT_CONFIG: Final = {
    "max_inline_value_bytes": 4096,
    "max_decoded_node_bytes": 1_000_000,
    "manifest_kind": "single",
}
# A data file is flushed when it has this many bytes, which bounds the memory of a transaction.
_DATA_FILE_BYTES: Final = 64 << 20


class Pending(Protocol):
    """Something under way in TensorStore's threads."""

    def result(self) -> Any:
        """Waits, and raises what went wrong as ValueError or OSError."""
        ...


class Writer:
    """Arrays and single values for one item: as a rule one atomic transaction on its database.

    Nothing can be read until `commit`, and then everything. TensorStore refers to the arrays it is
    given until then; their owner must not change them.

    Args:
        spec: The kvstore spec of the database's directory.
        database: Whether it is an OCDBT database. If not, arrays are plain files, there at once.
    """

    def __init__(self, spec: Mapping[str, Any], *, database: bool = True) -> None:
        self._spec = _database(spec) if database else dict(spec)
        self._base = "" if database else self._spec.get("path", "")
        self._transaction = ts.Transaction(atomic=True) if database else None
        store = ts.KvStore.open(self._spec, context=context()).result()
        self._store = store.with_transaction(self._transaction) if database else store
        self._pending: list[Pending] = []

    def put(self, key: str, data: bytes) -> None:
        """Stores a value under a key."""
        self._store[key] = data

    def create_array(self, prefix: str, metadata: Mapping[str, Any]) -> ts.TensorStore:
        """Stores the metadata of an array, and returns it for `write`."""
        return _open_array(self._array(prefix, metadata), self._transaction, create=True)

    def array(self, prefix: str, metadata: Mapping[str, Any]) -> ts.TensorStore:
        """Returns an array whose metadata another writer stores."""
        return _open_array(
            self._array(prefix, metadata), self._transaction, open=True, assume_metadata=True
        )

    def _array(self, prefix: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
        kvstore = {**self._spec, "path": self._base + prefix}
        return {"driver": "zarr3", "kvstore": kvstore, "metadata": dict(metadata)}

    def write(self, array: ts.TensorStore, where: tuple[slice, ...], values: Any) -> None:
        """Stores values into part of an array."""
        self._pending.append(
            array[where].write(values, can_reference_source_data_indefinitely=True)
        )

    def commit(self) -> None:
        """Writes everything, and returns when it is on disk."""
        if self._transaction is not None:
            self._transaction.commit_sync()
        for pending in self._pending:
            pending.result()
        self._pending.clear()

    def abort(self) -> None:
        """Drops everything that is not there yet."""
        self._pending.clear()
        if self._transaction is not None:
            self._transaction.abort()


def _open_array(
    spec: Mapping[str, Any], transaction: ts.Transaction | None, **how: Any
) -> ts.TensorStore:
    return ts.open(
        {
            **spec,
            "store_data_equal_to_fill_value": True,
            "recheck_cached_metadata": False,
            "recheck_cached_data": False,
        },
        context=context(),
        transaction=transaction,
        **how,
    ).result()


def _database(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "driver": "ocdbt",
        "base": dict(spec),
        "config": _OCDBT_CONFIG,
        "assume_config": True,
        "target_data_file_size": _DATA_FILE_BYTES,
    }


def merge_databases(parent: Mapping[str, Any], children: Sequence[Mapping[str, Any]]) -> None:
    """Makes one OCDBT database of those that the processes wrote below its directory.

    Values stay where they are; the parent refers to them. One atomic transaction.
    """
    transaction = ts.Transaction(atomic=True)
    store = ts.KvStore.open(_database(parent), context=context()).result()
    target = store.with_transaction(transaction)
    copies = []
    for child in children:
        source = ts.KvStore.open(_database(child), context=context()).result()
        copies.append(source.experimental_copy_range_to(target))
    for copy in copies:
        copy.result()
    transaction.commit_sync()


class Reader:
    """The arrays and values of one item: in an OCDBT database, or as plain files.

    Args:
        spec: The kvstore spec of the item's directory.
        database: Whether there is an OCDBT database in it.
    """

    def __init__(self, spec: Mapping[str, Any], *, database: bool) -> None:
        # A reader takes the configuration from the manifest: Orbax's has changed over time.
        nodes = {"driver": "ocdbt", "base": dict(spec), "cache_pool": _NODES}
        self._spec = nodes if database else dict(spec)
        self._base = "" if database else self._spec.get("path", "")
        limit = {"total_bytes_limit": _NODE_CACHE_BYTES}
        self._context = ts.Context({_NODES: limit} if database else {}, context())
        self._store = ts.KvStore.open(self._spec, context=self._context).result()

    def get(self, key: str, part: slice | None = None) -> Pending:
        """Starts to read one value, or a part of its bytes; `value_of` takes it out."""
        return self._store.read(key, byte_range=part)

    def keys(self) -> list[str]:
        """Every key, sorted."""
        return sorted(key.decode() for key in self._store.list().result())

    def open(self, prefix: str, zarr_version: int, *, fill_missing: bool) -> Pending:
        """Starts to open an array; the result goes into `read_into`."""
        return ts.open(
            {
                "driver": "zarr3" if zarr_version == 3 else "zarr",
                "kvstore": {**self._spec, "path": self._base + prefix},
                "fill_missing_data_reads": fill_missing,
                "recheck_cached_metadata": False,
                "recheck_cached_data": False,
            },
            context=self._context,
            open=True,
            read=True,
        )


class Extent(NamedTuple):
    """Where a value of a database lies.

    Attributes:
        file: Relative to the directory of the database.
        offset, size: In bytes.
    """

    file: str
    offset: int
    size: int


# As TensorStore prints a reference: kind, directory of the database that wrote it, file, offset,
# size. We name directories of processes and TensorStore names files, so that no other is followed.
_REFERENCE: Final = re.compile(
    r"(value|btreenode):((?:ocdbt\.process_\d{1,9}/)?):(d/[0-9a-f]{32}):(\d{1,18}):(\d{1,18})"
)


def extents(spec: Mapping[str, Any], *, max_keys: int) -> dict[str, Extent | bytes] | None:
    """Where each value of an OCDBT database lies; a small one lies in a node and is here already.

    Args:
        max_keys: More than these are not looked through.

    Returns:
        By key; None if there are too many, or if only TensorStore can find them.

    Raises:
        ValueError, OSError: the tree is damaged.
    """
    base = ts.KvStore.open(dict(spec), context=context()).result()
    manifest: Any = ts.ocdbt.dump(base, context=context()).result()
    if not manifest.get("versions"):
        return None
    version = manifest["versions"][-1]
    root = version["root"]
    if root["statistics"]["num_keys"] > max_keys or root["location"] is None:
        return None
    found: dict[str, Extent | bytes] = {}
    nodes: list[tuple[str, bytes, int]] = [(root["location"], b"", version["root_height"])]
    entries = 0
    while nodes:
        location, prefix, height = nodes.pop()
        if _REFERENCE.fullmatch(location) is None:
            return None
        node: Any = ts.ocdbt.dump(base, location, context=context()).result()
        entries += len(node["entries"])
        if node["height"] != height or entries > 2 * max_keys:
            raise ValueError(f"{location} is no node of this tree")
        for entry in node["entries"]:
            if height:
                below = prefix + entry["subtree_common_prefix"]
                nodes.append((entry["location"], below, height - 1))
                continue
            key = (prefix + entry["key"]).decode()
            if (data := entry.get("inline_value")) is not None:
                found[key] = data
                continue
            reference = _REFERENCE.fullmatch(entry["indirect_value"])
            if reference is None:
                return None
            _, folder, file, offset, size = reference.groups()
            found[key] = Extent(folder + file, int(offset), int(size))
    return found


def value_of(read: Any) -> bytes | None:
    """What `Reader.get` found, or None if there is no such key."""
    return read.value if read.state == "value" else None


def shape_of(array: ts.TensorStore) -> tuple[int, ...]:
    """The shape of an opened array."""
    return tuple(array.shape)


def chunk_shape_of(array: ts.TensorStore) -> tuple[int, ...]:
    """The smallest part of an opened array that is read on its own."""
    return tuple(n or 0 for n in array.chunk_layout.read_chunk.shape or ())


def read_into(
    array: ts.TensorStore,
    wheres: Sequence[tuple[slice, ...]],
    outs: Sequence[np.ndarray[Any, Any]],
) -> list[Pending]:
    """Starts to read parts of an array, each into an array of its shape and dtype.

    One batch: a chunk that several parts need is read, checked and decoded once.
    """
    with ts.Batch() as batch:
        return [
            ts.array(out, context=context()).write(array[where], batch=batch)
            for where, out in zip(wheres, outs, strict=True)
        ]


class data_errors:  # reads as a verb: `with data_errors(path, leaf):`
    """Turns what TensorStore raises about stored data into an error with its place."""

    def __init__(self, path: str, leaf: str | None) -> None:
        self._path, self._leaf = path, leaf

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (ValueError, OSError)) and not isinstance(error, CheckpointError):
            raise data_error(error, self._path, self._leaf) from error


def data_error(error: Exception, path: str, leaf: str | None) -> OSError:
    """What TensorStore raised about stored data, with its place.

    Returns:
        `CorruptCheckpoint`, unless it is an I/O failure (see `is_io_failure`).
    """
    file = _file_in(str(error), path)
    where = f"leaf {leaf}: " if leaf else ""
    told: OSError = CorruptCheckpoint(
        f"{file}: {where}stored data cannot be read: {error}", leaf=leaf, file=file
    )
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        failure = OSError(int(code[1]), f"{where}cannot be read: {os.strerror(int(code[1]))}", file)
        told = failure if is_io_failure(failure) else told
    told.__cause__ = error
    return told


def _file_in(message: str, path: str) -> str:
    """The file that a message names, if it is one of the checkpoint's."""
    found = re.search(re.escape(path) + r"[^\s\"':,\]]*", message)
    return found[0] if found else path
