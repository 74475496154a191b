"""Writes chunks and their database ourselves, in one pass over the values.

TensorStore copies each chunk into memory of its own to add the checksum. Here a chunk goes from
where it is to the file, piece by piece, and its checksum is computed of pieces that are in the
processor's cache; TensorStore only compresses. Several files are written at the same time.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from jaxckpt._core.threads import Pool
from jaxckpt._disk.checksums import units_of
from jaxckpt._disk.places import Table
from jaxckpt.format import names, ocdbt
from jaxckpt.format.arrays import (
    CRC_BYTES,
    bytes_of,
    checksum,
    chunk_key,
    dtype_of,
    encode_index,
    index_bytes,
    zarr3_metadata,
)
from jaxckpt.format.ocdbt import MAX_INLINE_BYTES, Place, encode_database
from jaxckpt.format.tree import StoredArray
from jaxckpt.storage import Storage, usable_cores

# A store copies whole files by itself. A small one takes fewer requests if it is sent again, and S3
# copies no larger one (CopyObject).
COPIED_BYTES: Final = range(1 << 20, 5 * 10**9)
_PIECE_BYTES: Final = 1 << 20  # fits into the cache of a core
_SMALL_BYTES: Final = 64 << 10  # of a file to which the nodes are added
_FEW: Final = 64  # small chunks to write together
_MOST_THREADS: Final = 8
_MOST_COMPRESSING: Final = 16  # each takes a core, and twice a unit of memory
_UPLOADS: Final = 4  # of files at a time, each in a few parts of 8 MiB at a time
_NICENESS: Final = 10  # against 0, the weight of a thread is a tenth: setpriority(2)

Values = np.ndarray[Any, Any]


class Chunk(NamedTuple):
    """A chunk to write, and where its checksums go."""

    key: str
    stored: StoredArray
    values: Values
    first: int  # of its numbers in the list of checksums


@dataclass(slots=True)
class _DataFile:
    """A file of several values."""

    name: str
    parts: list[bytes | Chunk] = field(default_factory=list)
    size: int = 0
    # Whether it has compressed chunks, and no others. Its size, and where they lie, are known once
    # it is written.
    compressed: bool = False


class DataFiles:
    """The values of a database, or of the part of it that a process writes.

    Args:
        storage, folder: Where its directory is; made if there is anything to write.
        name: Makes the names of files.
        landed: Takes a number of bytes written, in any thread.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        name: Callable[[], str] = names.new_data_file,
        landed: Callable[[int], object] = int,
    ) -> None:
        self._storage, self._folder = storage, folder
        self._name, self._landed = name, landed
        self.sums: list[int] = []  # of the chunks; made long enough before chunks are added
        self._places: dict[str, bytes | Place] = {}
        self._files: list[_DataFile] = []  # not written yet
        self._open: dict[tuple[bool, bool], _DataFile] = {}  # to which values are added
        self._sizes: dict[str, int] = {}  # of written and linked files, by name

    def reuse(self, key: str, table: Table) -> None:
        """Adds a value of another database, whose file is linked here."""
        place = self._places[key] = table.places[key]
        if isinstance(place, Place):
            self._sizes[place.file] = table.sizes[place.file]

    def put(self, key: str, data: bytes, *, apart: bool = False) -> None:
        """Adds a value, like `put_chunk`."""
        if len(data) <= MAX_INLINE_BYTES:
            self._places[key] = data
        else:
            self._add(key, data, len(data), apart=apart, compressed=False)

    def put_chunk(self, chunk: Chunk, *, apart: bool = False) -> None:
        """Adds a chunk, whose values must not change until `flush` or `write` has returned.

        Args:
            apart: Whether it goes into a file of such chunks only.
        """
        stored = chunk.stored
        units = math.prod(stored.chunk_shape) // math.prod(stored.unit_shape)
        size = bytes_of(stored.chunk_shape, stored.dtype) + units * CRC_BYTES
        if stored.inner_shape is not None:
            size += index_bytes(stored)
        self._add(chunk.key, chunk, size, apart=apart, compressed=stored.zstd is not None)

    def _add(
        self, key: str, part: bytes | Chunk, size: int, *, apart: bool, compressed: bool
    ) -> None:
        file = self._open.get((apart, compressed))
        if file is None or file.size + size > ocdbt.DATA_FILE_BYTES:
            file = self._open[apart, compressed] = self._new_file(compressed=compressed)
        self._places[key] = Place(file.name, file.size, size)
        file.parts.append(part)
        file.size += size

    def _new_file(self, *, compressed: bool = False) -> _DataFile:
        self._files.append(_DataFile(self._name(), compressed=compressed))
        return self._files[-1]

    def flush(self) -> None:
        """Writes the values added so far; afterwards they may change."""
        files, self._files = self._files, []
        self._open.clear()
        self._write(files)

    def write(self, units: Sequence[int] = (), *, is_whole: bool = True) -> Table:
        """Writes everything durably, with the nodes of the database if that is whole."""
        if not is_whole:
            self.flush()
            return Table(self._places, units, self.sums, self._sizes)
        self._write([file for file in self._files if file.compressed])
        self._files = [file for file in self._files if not file.compressed]
        # Apart from the chunks: if their file is lost, the nodes still list the lost chunks.
        last = self._files[-1] if self._files else self._new_file()
        if last.size > min(_SMALL_BYTES, ocdbt.DATA_FILE_BYTES):
            last = self._new_file()
        nodes, manifest = encode_database(self._places, last.name, last.size)
        last.parts.append(nodes)
        last.size += len(nodes)
        self._write(self._files)
        return Table(self._places, units, self.sums, self._sizes, manifest)

    def _write(self, files: Sequence[_DataFile]) -> None:
        for folder in {posixpath.dirname(file.name) for file in files}:
            self._storage.make_dir(f"{self._folder}/{folder}")
        here = threading.current_thread()
        # On a disk, the cores write; to a store, its client does, and the threads wait.
        threads = _UPLOADS if self._storage.parallel_writes else usable_cores()
        most, compressed = _MOST_THREADS, any(file.compressed for file in files)
        if compressed:
            threads, most = usable_cores(), _MOST_COMPRESSING
        with Pool(
            max(1, min(threads, len(files), most)),
            thread_name_prefix="jaxckpt-write",
            # Unless we run in the main thread, that thread may be training now. But threads of
            # TensorStore that begin now, to compress, would be slow for ever.
            initializer=None if compressed or here is threading.main_thread() else give_way,
        ) as pool:
            write, folder = self._storage.write, self._folder
            under_way = [
                pool.submit(write, f"{folder}/{file.name}", self._counted(file)) for file in files
            ]
            try:
                for one in under_way:
                    one.result()
            finally:
                pool.shutdown(cancel_futures=True)
        self._sizes |= {file.name: file.size for file in files}

    def _counted(self, file: _DataFile) -> Iterator[Any]:
        for part in self._bytes_of(file):
            yield part
            self._landed(memoryview(part).nbytes)

    def _bytes_of(self, file: _DataFile) -> Iterator[Any]:
        if file.compressed:
            yield from self._compressed(file)
            return
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

    def _compressed(self, file: _DataFile) -> Iterator[bytes]:
        """Yields the bytes of compressed chunks, and records their places."""
        end = 0
        for chunk in file.parts:
            assert isinstance(chunk, Chunk)
            start = end
            for part in self._bytes_of_chunk(chunk):
                end += len(part)
                yield part
            self._places[chunk.key] = Place(file.name, start, end - start)
        file.size = end

    def _bytes_of_chunk(self, chunk: Chunk) -> Iterator[Any]:
        sizes = []
        for n, unit in enumerate(units_of(chunk.stored, chunk.values), chunk.first):
            if chunk.stored.zstd is not None:
                data = _encoded(chunk.stored, unit)
                self.sums[n] = int.from_bytes(data[-CRC_BYTES:], "little")
                sizes.append(len(data))
                yield data
                continue
            crc = 0
            for start in range(0, unit.size, _PIECE_BYTES):
                piece = unit[start : start + _PIECE_BYTES]
                yield piece
                crc = checksum(piece, crc)
            self.sums[n] = crc
            sizes.append(unit.size + CRC_BYTES)
            yield crc.to_bytes(CRC_BYTES, "little")
        if chunk.stored.inner_shape is not None:
            yield encode_index(sizes)


class PlainFiles(DataFiles):
    """The values of one directory, each in a file named after its key."""

    def put(self, key: str, data: bytes, *, apart: bool = False) -> None:
        self._add(key, data, len(data), apart=apart, compressed=False)

    def _add(
        self, key: str, part: bytes | Chunk, size: int, *, apart: bool, compressed: bool
    ) -> None:
        self._files.append(_DataFile(key, [part], size, compressed))


def _encoded(stored: StoredArray, unit: Values) -> bytes:
    """Returns the stored bytes of a unit of an array, from the bytes of its values."""
    from jaxckpt.storage._arrays import encode_array

    shape = stored.unit_shape
    alone = stored._replace(shape=shape, chunk_shape=shape, inner_shape=None)
    values = unit.view(dtype_of(stored.dtype)).reshape(shape)
    return encode_array(zarr3_metadata(alone), chunk_key((0,) * len(shape)), values)


def give_way() -> None:
    """Lowers the priority of the calling thread for as long as it lives."""
    if sys.platform == "linux":  # elsewhere, all threads of the process have the same niceness
        with contextlib.suppress(OSError):
            os.nice(_NICENESS)
