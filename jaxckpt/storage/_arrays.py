"""The only module that imports tensorstore: one context, keys and arrays in a store.

TensorStore is slow to import. Interactive commands (`ls`, `du`) never reach this module, and
`jaxckpt.storage` imports it only for memory stores and arrays.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import tensorstore as ts

from jaxckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    StoreError,
    is_io_failure,
    os_code_in,
)
from jaxckpt.format import ocdbt
from jaxckpt.format.names import OCDBT_MANIFEST
from jaxckpt.storage._local import usable_cores
from jaxckpt.storage._settings import limit_s

# TensorStore has no deadline for a request to a store unless libcurl is told of one, before the
# first request: a connection that moves no byte for this long is given up, and tried again.
_STALL_S: Final = 60
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", str(_STALL_S))
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
_RETRIES: Final = {"max_retries": 7, "initial_delay": "100ms", "max_delay": "5s"}

_context: ts.Context | None = None
_context_lock = threading.Lock()  # guards _context

# Each reader caches the nodes of its OCDBT tree; a longer-lived cache could hold nodes of a tree
# that was replaced since. Chunks are read once and not cached.
_NODES: Final = "cache_pool#ocdbt"
_NODE_CACHE_BYTES: Final = 64 << 20

# TensorStore's generation of a missing key, which makes a conditional write create-if-absent.
# Reading a missing key returns the same bytes, but costs a round trip.
_MISSING_GENERATION = b"\x02"


def context() -> ts.Context:
    """Returns the one TensorStore context of this process.

    It is shared because a context per save leaks its cache, OCDBT copies between two stores only
    within one context, and stores of the `memory` driver live inside it. It caches nothing: a
    checkpoint is read once.
    """
    global _context
    with _context_lock:
        if _context is None:
            _context = ts.Context(
                {
                    "cache_pool": {"total_bytes_limit": 0},
                    "file_io_concurrency": {"limit": 32},
                    "data_copy_concurrency": {"limit": usable_cores()},
                    "s3_request_retries": _RETRIES,
                    "gcs_request_retries": _RETRIES,
                }
            )
        return _context


# TensorStore writes 32 files at a time, each of up to `DATA_FILE_BYTES`: a slow file system may
# complete none of them for a while.
_QUIET: Final = 4
_SOON_S: Final = 1.0


def _wait(pending: Any, place: str | ts.TensorStore) -> Any:
    """Returns a result of TensorStore; StoreError if it completes no request to any store for long.

    Args:
        place: Of the data, for the error; or the array.
    """
    before, patience_s = None, _SOON_S
    while True:
        with contextlib.suppress(TimeoutError):
            return pending.result(timeout=patience_s)
        if pending.done():  # in time, with an error of this class
            return pending.result()
        now = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/")
        if now == before:
            text = place if isinstance(place, str) else place.spec().to_json()["kvstore"]
            raise StoreError(
                f"{text}: nothing was read or written for {patience_s:g} s on "
                f"{os.uname().nodename}: the store or file system does not answer. Repair it and "
                "try again.",
                code=errno.ETIMEDOUT,
            )
        before, patience_s = now, _QUIET * limit_s()


class _Waited(NamedTuple):
    """A result of TensorStore that is waited for with a limit."""

    pending: Any
    place: str | ts.TensorStore

    def result(self) -> Any:
        return _wait(self.pending, self.place)


class Keys:
    """Byte strings by name, in any key-value store that TensorStore can open.

    Each call waits for its result. A key is a `str`, stored as UTF-8.

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
        self._place = str(spec.get("path", ""))

    def read(self, key: str) -> bytes | None:
        """Returns the value, or None if the key does not exist."""
        got = self._store.read(key).result()
        return got.value if got.state == "value" else None

    def write(self, key: str, data: bytes) -> None:
        _wait(self._store.write(key, data), self._place)

    def create(self, key: str, data: bytes) -> bool:
        """Creates a value unless the key exists; returns whether it did.

        On a remote store, False can also mean that the write was applied but the response lost. If
        that matters, make `data` unique and read it back.
        """
        stamp = self._store.write(key, data, if_equal=_MISSING_GENERATION).result()
        return stamp.generation != b""

    def list(self, prefix: str = "") -> list[str]:
        """Returns every key that starts with `prefix`, in full and sorted."""
        return sorted(key.decode() for key in self._store.list(_range(prefix)).result())

    def delete(self, prefix: str) -> None:
        """Deletes every key that starts with `prefix`, including `prefix` itself."""
        self._store.delete_range(_range(prefix)).result()

    def delete_key(self, key: str) -> None:
        """Deletes this key only, if it exists."""
        self._store.write(key, None).result()


def _range(prefix: str) -> ts.KvStore.KeyRange:
    start = prefix.encode()
    # The first string after all strings that start with `prefix`. UTF-8 has no byte 0xff to carry.
    stop = start[:-1] + bytes([start[-1] + 1]) if start else b""
    return ts.KvStore.KeyRange(start, stop)


# --- arrays ----------------------------------------------------------------------------------


class Pending(Protocol):
    """An operation running in TensorStore's threads."""

    def result(self) -> Any:
        """Waits for the result; raises ValueError or OSError if the operation failed."""
        ...


class Database:
    """An OCDBT database that is being written: data in a directory, the manifest in memory.

    TensorStore gives each data file a new, random name. The manifest is the one file that it would
    change, so its owner stores it, as it stores other files: once, and when all else is there.

    Args:
        spec: The kvstore spec of the directory.
        upload: If given, stores what was written there, since the directory is in memory.
    """

    def __init__(
        self, spec: Mapping[str, Any], *, upload: Callable[[], None] | None = None
    ) -> None:
        self.base = spec
        self.upload = upload
        self._manifest = {"driver": "memory", "path": f"manifest-{uuid.uuid4().hex}/"}
        self.spec = {**_database(spec), "manifest": self._manifest}

    def take_manifest(self) -> bytes:
        """Returns the file of the manifest and forgets it; empty if nothing was written."""
        keys = Keys(self._manifest)
        data = keys.read(OCDBT_MANIFEST)
        keys.delete_key(OCDBT_MANIFEST)
        return data or b""


def encode_array(metadata: Mapping[str, Any], key: str, values: np.ndarray[Any, Any]) -> bytes:
    """Returns the bytes that TensorStore stores for an array of one chunk.

    Args:
        metadata: Of zarr v3.
        key: Of the chunk.
    """
    kvstore = {"driver": "memory", "path": f"encoded-{uuid.uuid4().hex}/"}
    spec = {
        "driver": "zarr3",
        "kvstore": kvstore,
        "metadata": dict(metadata),
        "store_data_equal_to_fill_value": True,
        "recheck_cached_metadata": False,
        "recheck_cached_data": False,
    }
    keys = Keys(kvstore)
    try:
        array = ts.open(spec, context=context(), open=True, assume_metadata=True).result()
        array.write(values, can_reference_source_data_indefinitely=True).result()
        return keys.read(key) or b""
    finally:
        keys.delete("")


def _database(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "driver": "ocdbt",
        "base": dict(spec),
        "config": {
            "max_inline_value_bytes": ocdbt.MAX_INLINE_BYTES,
            "max_decoded_node_bytes": ocdbt.MAX_NODE_BYTES,
            "manifest_kind": "single",
        },
        "assume_config": True,
        "target_data_file_size": ocdbt.DATA_FILE_BYTES,
    }


def merge_databases(parent: Database, children: Sequence[str]) -> bytes:
    """Merges the OCDBT databases of several processes into one, in one atomic transaction.

    Values stay in place; the parent refers to them.

    Args:
        children: Their directories, in that of the parent.

    Returns:
        The parent's manifest, still to be stored.
    """
    transaction = ts.Transaction(atomic=True)
    store = ts.KvStore.open(parent.spec, context=context()).result()
    target = store.with_transaction(transaction)
    copies = []
    for child in children:
        spec = {**parent.base, "path": f"{parent.base['path']}{child}/"}
        source = ts.KvStore.open(_database(spec), context=context()).result()
        copies.append(source.experimental_copy_range_to(target))
    for copy in copies:
        _wait(copy, str(parent.base["path"]))
    _wait(transaction.commit_async(), str(parent.base["path"]))
    if parent.upload:
        parent.upload()
    return parent.take_manifest()


class Reader:
    """Reads arrays and values of one item: in an OCDBT database, or as plain files.

    Args:
        spec: The kvstore spec of the item's directory.
        database: Whether the directory contains an OCDBT database.
    """

    def __init__(self, spec: Mapping[str, Any], *, database: bool) -> None:
        # The configuration comes from the manifest: Orbax's has changed over time.
        nodes = {"driver": "ocdbt", "base": dict(spec), "cache_pool": _NODES}
        self._spec = nodes if database else dict(spec)
        self._base = "" if database else self._spec.get("path", "")
        limit = {"total_bytes_limit": _NODE_CACHE_BYTES}
        self._context = ts.Context({_NODES: limit} if database else {}, context())
        self._place = str(spec["path"])
        self._store = _wait(ts.KvStore.open(self._spec, context=self._context), self._place)

    def values(self, wanted: Sequence[tuple[str, slice | None]]) -> list[bytes | None]:
        """Returns values by key, or parts of their bytes; None for a key that does not exist."""
        reads = [self._store.read(key, byte_range=part) for key, part in wanted]
        found = [_wait(read, self._place) for read in reads]
        return [one.value if one.state == "value" else None for one in found]

    def keys(self) -> list[str]:
        return sorted(key.decode() for key in _wait(self._store.list(), self._place))

    def open(
        self,
        prefix: str,
        zarr_version: int,
        *,
        fill_missing: bool,
        touches: Callable[[tuple[int, ...]], bool] | None = None,  # for `StagedReader`
    ) -> Pending:
        """Starts to open an array; the result is for `read_into`."""
        array = ts.open(
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
        return _Waited(array, self._place)


class Extent(NamedTuple):
    """The place of a database value: a file relative to the database, offset and size in bytes."""

    file: str
    offset: int
    size: int


# TensorStore's text form of a reference: kind, directory of the database that wrote it, file,
# offset, size. The pattern admits only our directory names and TensorStore's file names.
_REFERENCE: Final = re.compile(
    r"(value|btreenode):((?:ocdbt\.process_(?:\d{1,9}(?:\.[0-9a-f]{16})?|held)/)?)"
    r":(d/n?[0-9a-f]{32}):(\d{1,18}):(\d{1,18})"
)


Fetch = Callable[[Sequence[Extent]], list[bytes]]  # reads parts of a database's files


def extents(
    spec: Mapping[str, Any],
    *,
    max_keys: int,
    manifest: bytes | None = None,
    fetch: Fetch | None = None,
) -> dict[str, Extent | bytes] | None:
    """Returns the place of each value of an OCDBT database by key, or a small value itself.

    Args:
        max_keys: The limit on keys.
        manifest: The file of the manifest, if it was read before.
        fetch: Reads the nodes; if None, TensorStore does.

    Returns:
        None if there are more keys, or if only TensorStore can find the values.

    Raises:
        ValueError, OSError: the tree is damaged.
    """
    dump = _Dump(spec, manifest, fetch)
    described = dump.manifest()
    if not described.get("versions"):
        return None
    version = described["versions"][-1]
    root = version["root"]
    if root["statistics"]["num_keys"] > max_keys or root["location"] is None:
        return None
    found: dict[str, Extent | bytes] = {}
    nodes: list[tuple[str, bytes, int]] = [(root["location"], b"", version["root_height"])]
    entries = 0
    while nodes:
        if any(_REFERENCE.fullmatch(location) is None for location, _, _ in nodes):
            return None
        if fetch is not None:
            dump.prepare(fetch, [location for location, _, _ in nodes])
        location, prefix, height = nodes.pop()
        try:
            node = dump.node(location)
        except ValueError as error:  # does not name the file
            raise ValueError(f"{spec['path']}{_place(location).file}: {error}") from error
        entries += len(node["entries"])
        if node["height"] != height or entries > 2 * max_keys:
            raise ValueError(f"{location} is not a node of this tree")
        for entry in node["entries"]:
            if height:
                below = prefix + entry["subtree_common_prefix"]
                nodes.append((entry["location"], below, height - 1))
                continue
            key = (prefix + entry["key"]).decode()
            if (data := entry.get("inline_value")) is not None:
                found[key] = data
                continue
            if _REFERENCE.fullmatch(entry["indirect_value"]) is None:
                return None
            found[key] = _place(entry["indirect_value"])
    return found


class _Dump:
    """Decodes the manifest and the nodes of a database, which may have been read before."""

    def __init__(
        self, spec: Mapping[str, Any], manifest: bytes | None, fetch: Fetch | None
    ) -> None:
        self._spec, self._manifest, self._fetch = spec, manifest, fetch
        self._nodes: dict[str, bytes] = {}

    def manifest(self) -> Any:
        if self._manifest is None:
            return _dump(self._spec)
        return _dump_bytes(OCDBT_MANIFEST, self._manifest)

    def prepare(self, fetch: Fetch, locations: Sequence[str]) -> None:
        """Reads nodes, all at once."""
        if new := [n for n in locations if n not in self._nodes]:
            found = fetch([_place(location) for location in new])
            self._nodes.update(zip(new, found, strict=True))

    def node(self, location: str) -> Any:
        if self._fetch is None:
            return _dump(self._spec, location)
        kind, folder, file, _, _ = _groups(location)
        data = self._nodes.pop(location)
        return _dump_bytes(folder + file, data, f"{kind}:{folder}:{file}:0:{len(data)}")


def _groups(location: str) -> tuple[str, str, str, str, str]:
    reference = _REFERENCE.fullmatch(location)
    assert reference is not None  # the caller has checked it
    kind, folder, file, offset, size = reference.groups()
    return kind, folder, file, offset, size


def _place(location: str) -> Extent:
    _, folder, file, offset, size = _groups(location)
    return Extent(folder + file, int(offset), int(size))


def _dump(spec: Mapping[str, Any], *location: str) -> Any:
    base = ts.KvStore.open(dict(spec), context=context()).result()
    return _wait(ts.ocdbt.dump(base, *location, context=context()), str(spec["path"]))


def _dump_bytes(name: str, data: bytes, *location: str) -> Any:
    spec = {"driver": "memory", "path": f"nodes-{uuid.uuid4().hex}/"}
    keys = Keys(spec)
    keys.write(name, data)
    try:
        return _dump(spec, *location)
    finally:
        keys.delete("")


def shape_of(array: ts.TensorStore) -> tuple[int, ...]:
    return tuple(array.shape)


def chunk_shape_of(array: ts.TensorStore) -> tuple[int, ...]:
    """Returns the shape of the smallest part of an opened array that can be read on its own."""
    return tuple(n or 0 for n in array.chunk_layout.read_chunk.shape or ())


def read_into(
    array: ts.TensorStore, wheres: Sequence[tuple[slice, ...]], outs: Sequence[np.ndarray[Any, Any]]
) -> list[Pending]:
    """Starts to read parts of an array, each into an array of its shape and dtype.

    Uses one batch: a chunk that several parts need is read, checked and decoded once.
    """
    with ts.Batch() as batch:
        return [
            _Waited(ts.array(out, context=context()).write(array[where], batch=batch), array)
            for where, out in zip(wheres, outs, strict=True)
        ]


class data_errors:  # lower case, as in `with data_errors(path, leaf):`
    """Turns TensorStore's errors about stored data into errors that name file and leaf."""

    def __init__(self, path: str, leaf: str | None) -> None:
        self._path, self._leaf = path, leaf

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (ValueError, OSError)) and not isinstance(error, CheckpointError):
            raise data_error(error, self._path, self._leaf) from error


# How TensorStore's text begins if a store refused or did not answer; not if the data is bad.
_STORE_FAILURE: Final = re.compile(
    "(UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|CANCELLED|PERMISSION_DENIED"
    "|UNAUTHENTICATED|INTERNAL|UNKNOWN):"
)


def data_error(error: Exception, path: str, leaf: str | None) -> OSError:
    """Returns TensorStore's error about stored data as an error that names file and leaf.

    That is `CorruptCheckpoint`, unless it is an I/O failure (see `is_io_failure`).
    """
    file = _file_in(str(error), path)
    where = f"leaf {leaf}: " if leaf else ""
    told: OSError = CorruptCheckpoint(
        f"{file}: {where}stored data cannot be read: {error}", leaf=leaf, file=file
    )
    if _STORE_FAILURE.match(str(error)):
        told = StoreError(f"{file}: {where}cannot be read: {error}")
    if code := os_code_in(str(error)):
        failure = OSError(code, f"{where}cannot be read: {os.strerror(code)}", file)
        told = failure if is_io_failure(failure) else told
    told.__cause__ = error
    return told


def _file_in(message: str, path: str) -> str:
    """Returns the file of the checkpoint at `path` that a message names, or `path`."""
    found = re.search(re.escape(path) + r"[^\s\"':,\]]*", message)
    return found[0].rstrip("/") if found else path
