"""Writes chunks and their database ourselves, in one pass over the values.

TensorStore copies each chunk into memory of its own to add the checksum. Here a chunk goes from
where it is to the file, piece by piece, and its checksum is computed of pieces that are in the
processor's cache. Several files are written at the same time.

On Linux the threads that write for a save in the background give way to all others: a training that
leaves no core idle goes on at nearly its speed, while the save takes longer.
"""

from __future__ import annotations

import contextlib
import math
import os
import posixpath
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from jaxckpt._disk.checksums import units_of
from jaxckpt.format import names, ocdbt
from jaxckpt.format.arrays import CRC_BYTES, checksum, dtype_of, encode_index
from jaxckpt.format.ocdbt import MAX_INLINE_BYTES, Place, encode_database
from jaxckpt.format.tree import StoredArray
from jaxckpt.storage import Storage

# A store copies whole files by itself. A small one takes fewer requests if it is sent again, and S3
# copies no larger one (CopyObject).
COPIED_BYTES: Final = range(1 << 20, 5 * 10**9)
_PIECE_BYTES: Final = 1 << 20  # fits into the cache of a core
_SMALL_BYTES: Final = 64 << 10  # of a file to which the nodes are added
_FEW: Final = 64  # small chunks to write together
_MOST_THREADS: Final = 8
_NICENESS: Final = 10  # against 0, the weight of a thread is a tenth: setpriority(2)

Values = np.ndarray[Any, Any]


class Written(NamedTuple):
    """A database that was written."""

    sums: list[int]  # the checksums of chunks
    manifest: bytes = b""  # still to be stored; empty if there was nothing to write
    # Each value or its place, and the size in bytes of each file, unless TensorStore wrote them.
    places: Mapping[str, bytes | Place] = {}
    sizes: Mapping[str, int] = {}
    copied: bool = False  # whether there are no hard links, so that files to keep were copied


class Chunk(NamedTuple):
    """A chunk to write, and where its checksums go."""

    key: str
    stored: StoredArray
    values: Values
    first: int  # of its numbers in the list of checksums


@dataclass(slots=True)
class _File:
    """A file of several values."""

    name: str
    parts: list[bytes | Chunk] = field(default_factory=list)
    size: int = 0


class DataFiles:
    """The values of one database.

    Args:
        storage, folder: Where its directory is.
        sums: Takes the checksums of chunks.
    """

    def __init__(self, storage: Storage, folder: str, sums: list[int]) -> None:
        self._storage, self._folder, self._sums = storage, folder, sums
        self._places: dict[str, bytes | Place] = {}
        self._files: list[_File] = []
        self._open: dict[bool, _File] = {}  # to which values are added
        self._linked: dict[str, int] = {}  # their sizes, by name

    def keep(self, key: str, written: Written) -> None:
        """Adds a value of another database, whose file is to be linked."""
        place = self._places[key] = written.places[key]
        if isinstance(place, Place):
            self._linked[place.file] = written.sizes[place.file]

    def put(self, key: str, data: bytes, *, apart: bool = False) -> None:
        """Adds a value, like `put_chunk`."""
        if len(data) <= MAX_INLINE_BYTES:
            self._places[key] = data
        else:
            self._add(key, data, len(data), apart=apart)

    def put_chunk(self, chunk: Chunk, *, apart: bool = False) -> None:
        """Adds a chunk, whose values must not change until `write` has returned.

        Args:
            apart: Whether it goes into a file of such chunks only.
        """
        sizes = _unit_sizes(chunk.stored)
        index = len(encode_index(sizes)) if chunk.stored.inner_shape is not None else 0
        self._add(chunk.key, chunk, sum(sizes) + index, apart=apart)

    def _add(self, key: str, part: bytes | Chunk, size: int, *, apart: bool) -> None:
        file = self._open.get(apart)
        if file is None or file.size + size > ocdbt.DATA_FILE_BYTES:
            file = self._open[apart] = self._new_file()
        self._places[key] = Place(file.name, file.size, size)
        file.parts.append(part)
        file.size += size

    def _new_file(self) -> _File:
        self._files.append(_File(f"{names.OCDBT_DATA}/{os.urandom(16).hex()}"))
        return self._files[-1]

    def write(self, threads: int, *, links_from: str = "") -> Written:
        """Writes all files durably.

        Args:
            links_from: The directory of the database that has the values to keep.
        """
        # Apart from the chunks, so that losing those does not lose what they were.
        last = self._files[-1] if self._files else self._new_file()
        if last.size > min(_SMALL_BYTES, ocdbt.DATA_FILE_BYTES):
            last = self._new_file()
        nodes, manifest = encode_database(self._places, last.name, last.size)
        last.parts.append(nodes)
        last.size += len(nodes)
        self._storage.make_dir(posixpath.join(self._folder, names.OCDBT_DATA))
        pairs = [(f"{links_from}/{file}", f"{self._folder}/{file}") for file in self._linked]
        links = [partial(self._storage.link, *pair) for pair in pairs]
        linked = self._storage.together(links) if links else []
        writes, here = [self._writing(file) for file in self._files], threading.current_thread()
        with ThreadPoolExecutor(
            max(1, min(threads, len(writes), _MOST_THREADS)),
            thread_name_prefix="jaxckpt-write",
            # The main thread may be training now, unless it is this one.
            initializer=None if here is threading.main_thread() else _give_way,
        ) as pool:
            under_way = [_submit(pool, write) for write in writes]
            try:
                for one in under_way:
                    one.result()
            finally:
                pool.shutdown(cancel_futures=True)
        sizes = {file.name: file.size for file in self._files} | self._linked
        # A store copies by itself.
        copied = self._storage.scheme == "file" and not all(linked)
        return Written(self._sums, manifest, self._places, sizes, copied=copied)

    def _writing(self, file: _File) -> Callable[[], None]:
        path = f"{self._folder}/{file.name}"
        return lambda: self._storage.write_parts(path, lambda: self._bytes_of(file))

    def _bytes_of(self, file: _File) -> Iterator[Any]:
        few: list[bytes] = []
        for part in file.parts:
            if isinstance(part, bytes):
                few.append(part)
            if few and (len(few) == _FEW or not isinstance(part, bytes)):
                yield b"".join(few)
                few.clear()
            if isinstance(part, Chunk):
                yield from self._bytes_of_chunk(part)
        yield b"".join(few)

    def _bytes_of_chunk(self, chunk: Chunk) -> Iterator[Any]:
        for n, unit in enumerate(units_of(chunk.stored, chunk.values)):
            crc = 0
            for start in range(0, unit.size, _PIECE_BYTES):
                piece = unit[start : start + _PIECE_BYTES]
                yield piece
                crc = checksum(piece, crc)
            self._sums[chunk.first + n] = crc
            yield crc.to_bytes(CRC_BYTES, "little")
        if chunk.stored.inner_shape is not None:
            yield encode_index(_unit_sizes(chunk.stored))


def _unit_sizes(stored: StoredArray) -> list[int]:
    """Returns the bytes of a chunk, or of each of its inner chunks, with their checksums."""
    unit = math.prod(stored.unit_shape)
    size = unit * dtype_of(stored.dtype).itemsize + CRC_BYTES
    return [size] * (math.prod(stored.chunk_shape) // unit)


def _give_way() -> None:
    if sys.platform == "linux":  # elsewhere, all threads of the process have the same niceness
        with contextlib.suppress(OSError):
            os.nice(_NICENESS)


def _submit(pool: ThreadPoolExecutor, write: Callable[[], None]) -> Future[None]:
    try:
        return pool.submit(write)
    except RuntimeError:  # the interpreter is ending, and starts no more threads
        done: Future[None] = Future()
        write()
        done.set_result(None)
        return done
