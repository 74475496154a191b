"""Reads files of values that steps share back from the disk, and mends damaged files.

One bad byte in such a file is damage to all steps that share it. It is found here while its values
are still known: the next step writes them again, and the older steps take them from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np

from jaxckpt._disk.places import Table, inner_places
from jaxckpt._disk.writer import ChunkWrite
from jaxckpt.format.arrays import CRC_BYTES, checksum
from jaxckpt.format.ocdbt import Place
from jaxckpt.storage import Storage, drop_cached
from jaxckpt.storage._large import pieces
from jaxckpt.storage._local import temporary_sibling

# How many steps may refer to a file before it is read again: each tenth reference is checked.
TRUSTED: Final = 9
# Most to read back from a store after a save: reading costs money, and stores check their bytes.
MOST_BYTES: Final = 256 << 20
_PIECE_BYTES: Final = 8 << 20


class StoppedReading(Exception):
    """The next save has begun."""


def damaged_chunks(
    storage: Storage,
    folder: str,
    file: str,
    written: Table,
    chunks: Sequence[ChunkWrite],
    goes_on: Callable[[], bool] = lambda: True,
) -> list[ChunkWrite]:
    """Returns the chunks of a file that are not as they were written, in their order in it.

    Raises:
        StoppedReading: `goes_on` returned False.
        OSError, CheckpointError: the file cannot be read.
    """
    path, size, places = f"{folder}/{file}", written.sizes[file], written.places
    buffer: Any = np.empty(min(size, _PIECE_BYTES), np.uint8)
    read = range(0)  # what is in the buffer
    drop_cached(storage, path)

    def crc_of(at: int, count: int) -> int:
        nonlocal read
        crc, stop = 0, at + count
        while at < stop:
            if at not in read:
                if not goes_on():
                    raise StoppedReading
                piece, read = range(at, min(at + buffer.size, size)), range(0)
                storage.read_into(path, at, [buffer[: len(piece)]])
                read = piece
            end = min(stop, read.stop)
            crc = checksum(buffer[at - read.start : end - read.start], crc)
            at = end
        return crc

    def is_good(chunk: ChunkWrite, place: Any) -> bool:
        units = [place]
        if chunk.stored.inner_shape is not None:
            units = inner_places(storage, folder, chunk.stored, place)
        return all(
            crc_of(at, count - CRC_BYTES) == crc
            and crc_of(at + count - CRC_BYTES, CRC_BYTES) == checksum(crc.to_bytes(4, "little"))
            for (_, at, count), crc in zip(units, written.sums[chunk.sums], strict=True)
        )

    bad = []
    for place, chunk in sorted(((places[c.key], c) for c in chunks), key=lambda one: one[0][1]):
        try:
            if is_good(chunk, place):
                continue
        except (ValueError, EOFError):  # a bad index, or the file is too short
            pass
        bad.append(chunk)
    return bad


def mend(
    storage: Storage,
    file: str,
    bad: Sequence[ChunkWrite],
    old: tuple[str, Table],
    new: tuple[str, Table],
) -> list[ChunkWrite]:
    """Writes a damaged file again, with its bad chunks as a newer step has them.

    Args:
        bad: In the order in which they lie in the file.
        old, new: The directories of the databases, and the chunks written there.

    Returns:
        The chunks that are still bad, since the newer step has other values.
    """
    (folder, was), (newer, now) = old, new
    path, at = f"{folder}/{file}", 0
    parts: list[tuple[str, int, int]] = []
    known = [chunk for chunk in bad if was.sums[chunk.sums] == now.sums[chunk.sums]]
    for chunk in known:
        there, here = was.places[chunk.key], now.places[chunk.key]
        assert isinstance(there, Place)  # these values are
        assert isinstance(here, Place)  # too large for a node
        parts += [(path, at, there.offset - at), (f"{newer}/{here.file}", here.offset, here.size)]
        at = there.offset + there.size
    if not known:
        return [*bad]
    parts.append((path, at, was.sizes[file] - at))
    storage.write(path, chain.from_iterable(_bytes(storage, *one) for one in parts))
    failed = damaged_chunks(storage, folder, file, was, known)
    return [chunk for chunk in bad if chunk not in known or chunk in failed]


def put_instead(storage: Storage, good: str, path: str) -> None:
    """Replaces a damaged file by a good one of its size, at once; by a link if possible."""
    if storage.hard_links:
        spare = temporary_sibling(path)
        try:
            if storage.link(good, spare) and storage.exchange(spare, path):
                return
        finally:
            storage.delete_files([spare])
    storage.write(path, _bytes(storage, good, 0, storage.size(good)))


def _bytes(storage: Storage, path: str, offset: int, size: int) -> Iterator[bytes]:
    """Yields a part of a file, and zeros for what lies beyond its end."""
    there = max(0, min(size, storage.size(path) - offset))
    yield from pieces(storage, path, there, offset)
    yield bytes(size - there)
