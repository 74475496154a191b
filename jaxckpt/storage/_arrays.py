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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import tensorstore as ts

from jaxckpt.errors import CheckpointError, StoreError, damaged, is_io_failure, os_code_in
from jaxckpt.format.names import OCDBT_DATA, OCDBT_MANIFEST
from jaxckpt.format.ocdbt import Foreign, Node, Place, Root, place_of
from jaxckpt.storage._local import usable_cores
from jaxckpt.storage._settings import limit_s, settings_of

# TensorStore waits for a store without a deadline unless these variables set one for libcurl before
# the first request: a connection that moves no byte for this long is given up, and tried again.
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


def context() -> ts.Context:
    """Returns the common TensorStore context of this process.

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
_SCHEMES: Final = {"s3": "s3", "gcs": "gs", "gcs_grpc": "gs"}  # by driver


def _wait(pending: Any, spec: Mapping[str, Any] | ts.TensorStore) -> Any:
    """Returns a result of TensorStore; StoreError if it completes no request for long."""
    before, patience_s = None, _SOON_S
    while True:
        with contextlib.suppress(TimeoutError):
            return pending.result(timeout=patience_s)
        if pending.done():  # in time, with an error of this class
            return pending.result()
        base = spec.spec().to_json()["kvstore"] if isinstance(spec, ts.TensorStore) else spec
        while "base" in base:
            base = base["base"]
        now = _completed(base["driver"])
        if now == before:
            raise StoreError(
                f"{_url(base)}: nothing was read or written for {patience_s:g} s on "
                f"{os.uname().nodename}: the store or file system does not answer. Repair it and "
                "try again; if it is only slow, set a longer timeout_s with use_store.",
                code=errno.ETIMEDOUT,
            )
        before, patience_s = now, _patience_s(base)


def _completed(driver: str) -> list[Any]:
    """Returns counters of a driver, which change whenever it has completed a request."""
    found = ts.experimental_collect_matching_metrics(f"/tensorstore/kvstore/{driver}/")
    return [one for one in found if not one["name"].endswith("/retries")]


def _patience_s(base: Mapping[str, Any]) -> float:
    """Returns how long a store may complete no request, whatever tries are left."""
    scheme = _SCHEMES.get(base["driver"])
    return _QUIET * limit_s() if scheme is None else settings_of(scheme, base["bucket"]).timeout_s


def _url(base: Mapping[str, Any]) -> str:
    scheme = _SCHEMES.get(base["driver"])
    return base["path"] if scheme is None else f"{scheme}://{base['bucket']}/{base['path']}"


class Keys:
    """Byte strings by name, in any key-value store that TensorStore can open.

    Each call waits for its result. A key is a `str`, stored as UTF-8.

    Args:
        spec: A TensorStore kvstore spec, such as `kvstore(path)`.

    Example:
        >>> keys = Keys({"driver": "memory", "path": "doctest-keys/"})
        >>> keys.write("a/b", b"1")
        >>> keys.read("a/b")
        b'1'
        >>> keys.clear()
        >>> keys.read("a/b") is None
        True
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._store = ts.KvStore.open(dict(spec), context=context()).result()
        self._spec = spec

    def read(self, key: str) -> bytes | None:
        """Returns the value, or None if the key does not exist."""
        got = _wait(self._store.read(key), self._spec)
        return got.value if got.state == "value" else None

    def write(self, key: str, data: bytes) -> None:
        _wait(self._store.write(key, data), self._spec)

    def clear(self) -> None:
        self._store.delete_range(ts.KvStore.KeyRange()).result()


def in_memory() -> tuple[dict[str, Any], Keys]:
    """Returns the spec of a new place in memory, and its keys, to be cleared in the end."""
    spec = {"driver": "memory", "path": f"jaxckpt-{uuid.uuid4().hex}/"}
    return spec, Keys(spec)


# --- arrays ----------------------------------------------------------------------------------


def encode_array(metadata: Mapping[str, Any], key: str, values: np.ndarray[Any, Any]) -> bytes:
    """Returns the bytes that TensorStore stores for an array of one chunk."""
    kvstore, keys = in_memory()
    spec = {
        "driver": "zarr3",
        "kvstore": kvstore,
        "metadata": dict(metadata),
        "store_data_equal_to_fill_value": True,
        "recheck_cached_metadata": False,
        "recheck_cached_data": False,
    }
    try:
        array = ts.open(spec, context=context(), open=True, assume_metadata=True).result()
        array.write(values, can_reference_source_data_indefinitely=True).result()
        return keys.read(key) or b""
    finally:
        keys.clear()


class Reader:
    """Reads arrays and values of one item: in an OCDBT database, or as plain files."""

    def __init__(self, spec: Mapping[str, Any], *, database: bool) -> None:
        # The configuration comes from the manifest: Orbax's has changed over time.
        nodes = {"driver": "ocdbt", "base": dict(spec), "cache_pool": _NODES}
        self._spec = nodes if database else dict(spec)
        self._base = "" if database else self._spec.get("path", "")
        limit = {"total_bytes_limit": _NODE_CACHE_BYTES}
        self._context = ts.Context({_NODES: limit} if database else {}, context())
        self._store = _wait(ts.KvStore.open(self._spec, context=self._context), self._spec)

    def values(self, wanted: Sequence[tuple[str, slice | None]]) -> list[bytes | None]:
        """Returns values by key, or parts of their bytes; None for a key that does not exist."""
        reads = [self._store.read(key, byte_range=part) for key, part in wanted]
        found = [_wait(read, self._spec) for read in reads]
        return [one.value if one.state == "value" else None for one in found]

    def keys(self) -> list[str]:
        return sorted(key.decode() for key in _wait(self._store.list(), self._spec))

    def open(
        self,
        prefix: str,
        zarr_version: int,
        *,
        fill_missing: bool,
        touches: Callable[[tuple[int, ...]], bool] | None = None,  # for `StagedReader`
    ) -> Callable[[], Any]:
        """Starts to open an array; returns what waits for it, and returns it for `read_into`."""
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
        return partial(_wait, array, self._spec)


# --- compressed nodes of databases -----------------------------------------------------------


def dump_manifest(data: bytes) -> Root:
    """Decodes a manifest, like `ocdbt.decode_manifest`, that TensorStore compressed."""
    described = _dump(OCDBT_MANIFEST, data)
    if not described.get("versions"):
        raise Foreign("it has no version")
    version = described["versions"][-1]
    root = version["root"]
    place = _place(root["location"])
    return Root(place, version["root_height"], root["statistics"]["num_keys"])


def dump_node(data: bytes, folder: str, prefix: bytes) -> Node:
    """Decodes a node, like `ocdbt.decode_node`, that TensorStore compressed."""
    file = f"{OCDBT_DATA}/{'0' * 32}"
    node = _dump(folder + file, data, f"btreenode:{folder}:{file}:0:{len(data)}")
    height, entries = node["height"], node["entries"]
    if height:
        keys = [prefix + entry["subtree_common_prefix"] for entry in entries]
        return Node.of(height, keys, [_place(entry["location"]) for entry in entries])
    keys = [prefix + entry["key"] for entry in entries]
    inline = [entry.get("inline_value") for entry in entries]
    values = [
        _place(entry["indirect_value"]) if value is None else value
        for entry, value in zip(entries, inline, strict=True)
    ]
    entries.clear()  # TensorStore 0.1.86 never frees the values of a dict that it returns
    return Node.of(height, keys, values)


def _place(location: str | None) -> Place:
    """Returns the place that TensorStore's text means: kind, directory, file, offset, size."""
    parts = (location or "").split(":")
    if len(parts) != 5:
        raise Foreign(f"a reference to {location}")
    _, folder, file, offset, size = parts
    return place_of(folder, file, int(offset), int(size))


def _dump(name: str, data: bytes, *location: str) -> Any:
    spec, keys = in_memory()
    keys.write(name, data)
    try:
        base = ts.KvStore.open(spec, context=context()).result()
        return _wait(ts.ocdbt.dump(base, *location, context=context()), spec)
    finally:
        keys.clear()


def shape_of(array: ts.TensorStore) -> tuple[int, ...]:
    return tuple(array.shape)


def chunk_shape_of(array: ts.TensorStore) -> tuple[int, ...]:
    """Returns the shape of the smallest part of an opened array that can be read on its own."""
    return tuple(n or 0 for n in array.chunk_layout.read_chunk.shape or ())


def read_into(
    array: ts.TensorStore, wheres: Sequence[tuple[slice, ...]], outs: Sequence[np.ndarray[Any, Any]]
) -> list[Callable[[], Any]]:
    """Starts to read parts of an array, each into an array of its shape and dtype.

    Returns what waits for each; it raises ValueError or OSError if the read failed.
    Uses one batch: a chunk that several parts need is read, checked and decoded once.
    """
    with ts.Batch() as batch:
        return [
            partial(_wait, ts.array(out, context=context()).write(array[where], batch=batch), array)
            for where, out in zip(wheres, outs, strict=True)
        ]


@contextlib.contextmanager
def data_errors(path: str) -> Iterator[None]:
    """Turns TensorStore's errors about stored data into errors that name the file."""
    try:
        yield
    except (ValueError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise data_error(error, path, None) from error


# How TensorStore's text begins if a store refused or did not answer; not if the data is bad.
_STORE_FAILURE: Final = re.compile(
    "(UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|CANCELLED|PERMISSION_DENIED"
    "|UNAUTHENTICATED|INTERNAL|UNKNOWN):"
)


def data_error(error: Exception, path: str, leaf: str | None) -> OSError:
    """Returns TensorStore's error about stored data as an error that names file and leaf.

    That is `CorruptCheckpoint`, unless it is an I/O failure (see `is_io_failure`).
    """
    text, where = str(error), f"leaf {leaf}: " if leaf else ""
    named = re.search(re.escape(path) + r"[^\s\"':,\]]*", text)
    file = named[0].rstrip("/") if named else path
    what = f"{where}is damaged: {text.removeprefix(f'{file}: ')}"
    told: OSError = damaged(file, what, leaf=leaf)
    if _STORE_FAILURE.match(text):
        told = StoreError(f"{file}: {where}cannot be read: {error}")
    if code := os_code_in(text):
        failure = OSError(code, f"{where}cannot be read: {os.strerror(code)}", file)
        told = failure if is_io_failure(failure) else told
    told.__cause__ = error
    return told
