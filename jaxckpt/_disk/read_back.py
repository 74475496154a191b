"""Reads files of values that steps share back from the disk, and mends those that are damaged.

One bad byte in such a file is damage to all steps that share it. It is found here while its values
are still known: the next step writes them again, and the older steps take them from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np

from jaxckpt._disk.data_files import Written
from jaxckpt._disk.writer import ChunkWrite
from jaxckpt.format.arrays import CRC_BYTES, checksum, decode_index, index_bytes
from jaxckpt.format.ocdbt import Place
from jaxckpt.storage import Storage, drop_cached
from jaxckpt.storage._local import temporary_sibling

# How many steps may refer to a file before it is read again: each tenth reference is checked.
TRUSTED: Final = 9
# What is read back of a store after a save: its bytes cost money, and it checks them itself.
MOST_BYTES: Final = 256 << 20
_PIECE_BYTES: Final = 8 << 20

Goes = Callable[[], bool]  # whether to go on


def damaged_chunks(
    storage: Storage,
    folder: str,
    file: str,
    written: Written,
    chunks: Sequence[ChunkWrite],
    goes_on: Goes = lambda: True,
) -> list[ChunkWrite] | None:
    """Returns the chunks of a file that are not as they were written; None if it was stopped.

    Args:
        folder: The directory of the database.
        chunks: Those in the file.

    Raises:
        OSError, CheckpointError: the file cannot be read.
    """
    reading = _Reading(storage, f"{folder}/{file}", written.sizes[file], goes_on)
    drop_cached(storage, reading.path)
    bad = []
    places: Any = written.places
    for chunk in sorted(chunks, key=lambda chunk: places[chunk.key].offset):
        try:
            if not reading.has(chunk, places[chunk.key], written.sums[chunk.sums]):
                bad.append(chunk)
        except _Stopped:
            return None
    return bad


class _Stopped(Exception):
    """There is no time to read on."""


@dataclass(slots=True)
class _Reading:
    """A file that is read once, from front to back."""

    storage: Storage
    path: str
    size: int
    goes_on: Goes
    _buffer: Any = field(default_factory=lambda: np.empty(_PIECE_BYTES, np.uint8))
    _start: int = 0  # of what is in the buffer
    _stop: int = 0

    def has(self, chunk: ChunkWrite, place: Place, sums: Sequence[int]) -> bool:
        """Returns whether a chunk has these checksums, computed and stored."""
        try:
            units = [(0, place.size)]
            if chunk.stored.inner_shape is not None:
                index = np.empty(index_bytes(chunk.stored), np.uint8)
                end = place.size - index.size
                self.storage.read_into(self.path, place.offset + end, [index])
                units = decode_index(index, end)
            return all(
                self._crc(place.offset + at, size - CRC_BYTES) == crc
                and self._crc(place.offset + at + size - CRC_BYTES, CRC_BYTES) == _of_sum(crc)
                for (at, size), crc in zip(units, sums, strict=True)
            )
        except (ValueError, EOFError):  # a bad index, or the file is too short
            return False

    def _crc(self, start: int, size: int) -> int:
        crc, stop = 0, start + size
        while start < stop:
            if not self._start <= start < self._stop:
                self._load(start)
            end = min(stop, self._stop)
            crc = checksum(self._buffer[start - self._start : end - self._start], crc)
            start = end
        return crc

    def _load(self, start: int) -> None:
        if not self.goes_on():
            raise _Stopped
        self._stop = self._start = start
        size = min(_PIECE_BYTES, self.size - start)
        self.storage.read_into(self.path, start, [self._buffer[:size]])
        self._stop = start + size


def _of_sum(crc: int) -> int:
    return checksum(crc.to_bytes(CRC_BYTES, "little"))


def mend(
    storage: Storage,
    file: str,
    bad: Sequence[ChunkWrite],
    old: tuple[str, Written],
    new: tuple[str, Written],
) -> list[ChunkWrite]:
    """Writes a damaged file again, with its bad chunks as a newer step has them.

    Args:
        bad: In the order in which they lie in the file.
        old, new: The directories of the databases, and what was written there.

    Returns:
        The chunks that are still bad, since the newer step has other values.
    """
    (folder, was), (newer, now) = old, new
    path, at = f"{folder}/{file}", 0
    parts: list[tuple[str, int, int]] = []
    mended = []
    for chunk in bad:
        there, here = was.places[chunk.key], now.places[chunk.key]
        assert isinstance(there, Place)  # it is in the file
        is_same = was.sums[chunk.sums] == now.sums[chunk.sums]
        if is_same and isinstance(here, Place) and here.size == there.size:
            parts.append((path, at, there.offset - at))
            parts.append((f"{newer}/{here.file}", here.offset, here.size))
            at = there.offset + there.size
            mended.append(chunk)
    if not mended:
        return [*bad]
    parts.append((path, at, was.sizes[file] - at))
    storage.write_parts(path, lambda: chain.from_iterable(_bytes(storage, *one) for one in parts))
    failed = damaged_chunks(storage, folder, file, was, mended) or ()
    return [chunk for chunk in bad if chunk not in mended or chunk in failed]


def put_instead(storage: Storage, good: str, path: str) -> None:
    """Replaces a damaged file by a good one of its size, at once; by a link if possible."""
    if storage.atomic_rename:
        spare = temporary_sibling(path)
        try:
            if storage.link(good, spare) and storage.exchange(spare, path):
                return
        finally:
            storage.delete_files([spare])
    storage.write_parts(path, partial(_bytes, storage, good, 0, storage.size(good)))


def _bytes(storage: Storage, path: str, offset: int, size: int) -> Iterator[bytes]:
    """Yields a part of a file, and zeros for what lies beyond its end."""
    there = max(0, min(size, storage.size(path) - offset))
    for start in range(offset, offset + there, _PIECE_BYTES):
        piece: Any = np.empty(min(_PIECE_BYTES, offset + there - start), np.uint8)
        storage.read_into(path, start, [piece])
        yield piece.tobytes()
    yield bytes(size - there)
