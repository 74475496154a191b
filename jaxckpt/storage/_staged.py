"""Lets TensorStore work where it has no driver: in its memory, with our own requests.

A storage without a driver has no `kvstore`. The files that TensorStore reads are then fetched into
memory first, and the nodes that it writes, to merge databases, are uploaded from there.
"""

from __future__ import annotations

import bisect
import re
import sys
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice, takewhile
from typing import Any, Final

import numpy as np

from jaxckpt.format.names import OCDBT_MANIFEST, ZARR2, ZARR3
from jaxckpt.storage._ahead import held
from jaxckpt.storage._arrays import Database, Extent, Keys, Pending, Reader, extents
from jaxckpt.storage._protocol import Storage

_MOST_NODE_BYTES: Final = 64 << 20
# A chunk's key below its array's, in zarr 2 and 3.
_CHUNK: Final = re.compile(r"(?:c[/.]?)?((?:\d+[/.])*\d+)?")

Touches = Callable[[tuple[int, ...]], bool]  # whether the chunk with an index is to be read


def _memory(owner: object) -> tuple[dict[str, Any], Keys]:
    """Returns a place in memory that lasts as long as its owner."""
    spec = {"driver": "memory", "path": f"staged-{uuid.uuid4().hex}/"}
    keys = Keys(spec)
    weakref.finalize(owner, keys.delete, "").atexit = False
    return spec, keys


# --- merging ---------------------------------------------------------------------------------


class Staging:
    """Lets TensorStore merge databases in a directory: there, or in memory until `upload`."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage, self._folder = storage, folder
        self._staged: Keys | None = None
        self._fetched: set[str] = set()
        spec = storage.kvstore(folder)
        if spec is None:
            spec, self._staged = _memory(self)
        self.spec = spec

    def new_database(self) -> Database:
        return Database(self.spec, upload=self.upload)

    def upload(self) -> None:
        """Stores the new files, which are then no longer in memory."""
        if self._staged is None:
            return
        for key in self._staged.list():
            if key not in self._fetched:
                self._storage.write(f"{self._folder}/{key}", self._staged.read(key) or b"")
                self._staged.delete_key(key)

    def fetch(self, databases: Sequence[str]) -> None:
        """Fetches the manifests and nodes of databases in the directory, to be merged."""
        if self._staged is not None:
            calls = [partial(self._fetch_one, self._staged, name) for name in databases]
            self._storage.together(calls)

    def _fetch_one(self, staged: Keys, database: str) -> None:
        manifest = self._fetch_file(staged, f"{database}/{OCDBT_MANIFEST}")
        nodes = partial(self._fetch_nodes, staged, database)
        spec = {"path": f"{self._folder}/{database}/"}
        extents(spec, max_keys=sys.maxsize, manifest=manifest, fetch=nodes)

    def _fetch_nodes(self, staged: Keys, database: str, places: Sequence[Extent]) -> list[bytes]:
        files = {file: self._fetch_file(staged, f"{database}/{file}") for file, _, _ in places}
        return [files[file][at : at + size] for file, at, size in places]

    def _fetch_file(self, staged: Keys, key: str) -> bytes:
        data = self._storage.read(f"{self._folder}/{key}", max_bytes=_MOST_NODE_BYTES)
        staged.write(key, data)
        self._fetched.add(key)
        return data


# --- reading ---------------------------------------------------------------------------------


def find_values(
    storage: Storage, path: str, *, max_keys: int = sys.maxsize
) -> dict[str, Extent | bytes] | None:
    """Returns the place of each value of a database, as `extents`, by our own requests."""
    file = f"{path}/{OCDBT_MANIFEST}"
    manifest = held(storage, file) or storage.read(file, max_bytes=_MOST_NODE_BYTES)
    nodes = partial(_read_nodes, storage, path)
    return extents({"path": f"{path}/"}, max_keys=max_keys, manifest=manifest, fetch=nodes)


def _read_nodes(storage: Storage, path: str, places: Sequence[Extent]) -> list[bytes]:
    for place in places:
        if place.size > _MOST_NODE_BYTES:
            raise ValueError(f"a node of {place.size} bytes is too large")
    return storage.together([partial(_read_part, storage, path, place) for place in places])


def _read_part(storage: Storage, path: str, place: Extent) -> bytes:
    data = np.empty(place.size, np.uint8)
    try:
        storage.read_into(f"{path}/{place.file}", place.offset, [data])
    except EOFError as error:
        raise ValueError(str(error)) from error
    return data.tobytes()


def open_reader(storage: Storage, path: str, *, database: bool) -> Reader | StagedReader:
    """Returns a reader of the arrays and values of an item.

    Args:
        database: Whether they are in an OCDBT database, or plain files.
    """
    spec = storage.kvstore(path)
    if spec is not None:
        return Reader(spec, database=database)
    return StagedReader(storage, path, database=database)


class StagedReader:
    """A `Reader` of a storage without a driver: an array's stored chunks are fetched to be read."""

    def __init__(self, storage: Storage, path: str, *, database: bool) -> None:
        self._storage, self._path = storage, path
        if database:
            places = find_values(storage, path)
            if places is None:
                raise ValueError("only TensorStore finds the values of this database")
        else:
            files = storage.files(path)
            places = {name: Extent(name, 0, entry.size) for name, entry in files.items()}
        self._places: Mapping[str, Extent | bytes] = places
        self._keys = sorted(places)

    def keys(self) -> list[str]:
        return self._keys

    def values(self, wanted: Sequence[tuple[str, slice | None]]) -> list[bytes | None]:
        return self._storage.together([partial(self._value, *one) for one in wanted])

    def _value(self, key: str, part: slice | None) -> bytes | None:
        place, part = self._places.get(key), part or slice(None)
        if not isinstance(place, Extent):
            return place and place[part]
        start, stop, _ = part.indices(place.size)
        place = Extent(place.file, place.offset + start, stop - start)
        end, file = place.offset + place.size, f"{self._path}/{place.file}"
        # Before as many bytes are allocated.
        if place.size > _MOST_NODE_BYTES and end > (there := self._storage.size(file)):
            raise ValueError(f"{file} must have {end} bytes or more, got {there}")
        return _read_part(self._storage, self._path, place)

    def fetch(self, keys: Sequence[str], prefix: str, staged: Keys) -> None:
        """Copies values into memory, under their keys without a prefix."""

        def copy(key: str) -> None:
            staged.write(key.removeprefix(prefix), self._value(key, None) or b"")

        self._storage.together([partial(copy, key) for key in keys])

    def open(
        self, prefix: str, zarr_version: int, *, fill_missing: bool, touches: Touches
    ) -> Pending:
        first = bisect.bisect_left(self._keys, prefix)
        keys = takewhile(lambda key: key.startswith(prefix), islice(self._keys, first, None))
        wanted = [key for key in keys if _is_wanted(key.removeprefix(prefix), touches)]
        return _Fetched(self, prefix, wanted, zarr_version, fill_missing)


def _is_wanted(name: str, touches: Touches) -> bool:
    if chunk := _CHUNK.fullmatch(name):
        return touches(tuple(map(int, re.findall(r"\d+", chunk[0]))))
    return name in (ZARR2, ZARR3)


class _Fetched:
    """An array that is fetched when its result is asked for, and in memory while this exists."""

    def __init__(
        self, reader: StagedReader, prefix: str, keys: Sequence[str], version: int, fill: bool
    ) -> None:
        self._reader, self._prefix, self._names = reader, prefix, keys
        self._version, self._fill = version, fill
        self._spec, self._staged = _memory(self)

    def result(self) -> Any:
        self._reader.fetch(self._names, self._prefix, self._staged)
        opened = Reader(self._spec, database=False)
        return opened.open("", self._version, fill_missing=self._fill).result()
