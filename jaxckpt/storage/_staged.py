"""Lets TensorStore read where it lacks a driver: from its memory, filled by our own requests."""

from __future__ import annotations

import bisect
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice, takewhile
from typing import Any, Final

from jaxckpt.format.names import ZARR2, ZARR3
from jaxckpt.format.ocdbt import Place
from jaxckpt.storage._ahead import together
from jaxckpt.storage._arrays import Keys, Reader, in_memory
from jaxckpt.storage._protocol import Storage
from jaxckpt.storage._settings import kvstore
from jaxckpt.storage._values import find_values, read_place

_LARGE_BYTES: Final = 64 << 20  # before its file's size is looked up
# A chunk's key below its array's, in zarr 2 and 3.
_CHUNK: Final = re.compile(r"(?:c[/.]?)?((?:\d+[/.])*\d+)?")

Touches = Callable[[tuple[int, ...]], bool]  # whether the chunk with an index is to be read


def open_reader(storage: Storage, path: str, *, database: bool) -> Reader | StagedReader:
    """Returns a reader of the arrays and values of an item."""
    spec = kvstore(path)
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
            places = {name: Place(name, 0, entry.size) for name, entry in files.items()}
        self._places: Mapping[str, Place | bytes] = places
        self._keys = sorted(places)

    def keys(self) -> list[str]:
        return self._keys

    def values(self, wanted: Sequence[tuple[str, slice | None]]) -> list[bytes | None]:
        return together(self._storage, [partial(self._value, *one) for one in wanted])

    def _value(self, key: str, part: slice | None) -> bytes | None:
        place, part = self._places.get(key), part or slice(None)
        if not isinstance(place, Place):
            return place and place[part]
        start, stop, _ = part.indices(place.size)
        place = Place(place.file, place.offset + start, stop - start)
        end, file = place.offset + place.size, f"{self._path}/{place.file}"
        # Before as many bytes are allocated.
        if place.size > _LARGE_BYTES and end > (there := self._storage.size(file)):
            raise ValueError(f"{file} must have {end} bytes or more, got {there}")
        return read_place(self._storage, self._path, place)

    def _fetch(self, keys: Sequence[str], prefix: str, staged: Keys) -> None:
        """Copies values into memory, under their keys without a prefix."""

        def copy(key: str) -> None:
            staged.write(key.removeprefix(prefix), self._value(key, None) or b"")

        together(self._storage, [partial(copy, key) for key in keys])

    def open(
        self, prefix: str, zarr_version: int, *, fill_missing: bool, touches: Touches
    ) -> _Fetched:
        first = bisect.bisect_left(self._keys, prefix)
        keys = takewhile(lambda key: key.startswith(prefix), islice(self._keys, first, None))
        wanted = [key for key in keys if _is_wanted(key.removeprefix(prefix), touches)]
        return _Fetched(partial(self._fetch, wanted, prefix), zarr_version, fill_missing)


def _is_wanted(name: str, touches: Touches) -> bool:
    if chunk := _CHUNK.fullmatch(name):
        return touches(tuple(map(int, re.findall(r"\d+", chunk[0]))))
    return name in (ZARR2, ZARR3)


class _Fetched:
    """An array that is fetched when its result is asked for, and in memory while this exists."""

    def __init__(self, fetch: Callable[[Keys], None], zarr_version: int, fill: bool) -> None:
        self._fetch, self._version, self._fill = fetch, zarr_version, fill
        self._spec, self._staged = in_memory()
        weakref.finalize(self, self._staged.clear).atexit = False

    def __call__(self) -> Any:
        self._fetch(self._staged)
        opened = Reader(self._spec, database=False)
        return opened.open("", self._version, fill_missing=self._fill)()
