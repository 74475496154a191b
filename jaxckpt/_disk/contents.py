"""Checks the files of a checkpoint while they are copied, so that each is read once.

    small files    by their digests in the record
    data files     by the checksums of chunks and nodes, in the order in which they lie in a file

Where the chunks lie is read before, from the nodes. A chunk is compared with its checksum in
`_jaxckpt.sums` too: that shows whether it was written in this place.
"""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import numpy as np

from jaxckpt._disk.checksums import Sums, units_by_key
from jaxckpt._disk.found import Found, check_sizes
from jaxckpt._disk.item import open_tree
from jaxckpt._disk.places import inner_places
from jaxckpt.errors import CorruptCheckpoint, damaged
from jaxckpt.format import names
from jaxckpt.format.arrays import CRC_BYTES, checksum, index_bytes
from jaxckpt.format.ocdbt import Place
from jaxckpt.format.tree import StoredArray
from jaxckpt.storage._large import pieces
from jaxckpt.storage._values import find_values

_NO_SUMS: Final[Sums] = np.empty(0, "<u4")


class _Span(NamedTuple):
    """A part of a file that ends with the checksum of the rest of it."""

    start: int
    stop: int
    wanted: int | None  # the checksum that it was written with, if recorded
    key: str  # of the chunk; "" for a node


@final
@dataclass(frozen=True, slots=True)
class Contents:
    """The files of a checkpoint, with the checksums of all that is in them."""

    found: Found
    spans: Mapping[str, Sequence[_Span]]  # by file in the checkpoint, in order
    is_known: bool  # whether it is known where all values lie

    @classmethod
    def of(cls, found: Found) -> Contents:
        """Finds the checksums of all files. Reads the nodes of each database, but no arrays.

        Raises:
            CorruptCheckpoint: a file is missing or has another size, or a node is damaged.
        """
        for item in found.removed:
            raise CorruptCheckpoint(found.was_removed(item), file=f"{found.path}/{item}")
        check_sizes(found)
        spans: dict[str, list[_Span]] = {}
        is_known = True
        for name, path in found.items.items():
            if names.OCDBT_MANIFEST in found.recorded(path):
                found.read(path, names.OCDBT_MANIFEST)  # by its digest
                is_known &= _add_database(found, name, spans)
        return cls(found, {file: sorted(some) for file, some in spans.items()}, is_known)

    def pieces(self, name: str, size: int) -> Iterator[bytes]:
        """Yields a file in pieces, each of which is checked as far as it goes.

        Raises:
            CorruptCheckpoint: the bytes are not those that were written. The last piece is then
                not yielded, so no whole copy of the file comes to be.
        """
        file, record = f"{self.found.path}/{name}", self.found.record
        facts = None if record is None else record.files.get(name)
        some = pieces(self.found.storage, file, size)
        if facts is not None and facts.sha256 is not None:
            return _with_digest(file, some, facts.sha256)
        return _with_checksums(file, some, self.spans.get(name, ()))


def _add_database(found: Found, item: str, spans: dict[str, list[_Span]]) -> bool:
    """Adds the spans of an item's database; returns False if only TensorStore can find them."""
    leaves = open_tree(found, item).tree.leaves
    path, nodes = found.items[item], list[Place]()
    try:
        places = find_values(found.storage, path, nodes=nodes)
    except ValueError as error:
        raise damaged(path, str(error)) from error
    if places is None:
        return False

    def add(place: Place, wanted: int | None = None, key: str = "") -> None:
        file, start, size = posixpath.join(item, place.file), place.offset, place.size
        spans.setdefault(file, []).append(_Span(start, start + size, wanted, key))

    for node in nodes:
        add(node)
    sums = _NO_SUMS
    if names.CHUNK_SUMS in found.recorded(path):
        sums = np.frombuffer(found.read(path, names.CHUNK_SUMS), "<u4")
    for key, array, units in units_by_key(leaves, places):
        place = places[key]
        wanted = sums[units].tolist() if sums.size else [None] * len(units)
        if isinstance(place, bytes):
            body, stored = place[:-CRC_BYTES], int.from_bytes(place[-CRC_BYTES:], "little")
            _compare(path, checksum(body), stored, wanted[0], key)
        elif array.inner_shape is None:
            add(place, wanted[0], key)
        else:
            for inner, crc in zip(_inner(found, path, array, place), wanted, strict=False):
                add(inner, crc, key)
            size = index_bytes(array)
            add(place._replace(offset=place.offset + place.size - size, size=size), key=key)
    return True


def _inner(found: Found, path: str, array: StoredArray, place: Place) -> list[Place]:
    try:
        return inner_places(found.storage, path, array, place)
    except (ValueError, EOFError) as error:
        raise damaged(f"{path}/{place.file}", str(error)) from error


def _compare(file: str, found: int, stored: int, wanted: int | None, key: str) -> None:
    what = f'chunk "{key}"' if key else "a node of its database"
    if found != stored:
        raise damaged(file, f"checksum mismatch in {what}: {stored:#010x} and {found:#010x}")
    if wanted not in (None, found):
        raise damaged(file, f"{what} is not the one that was written there")


def _with_digest(file: str, some: Iterable[bytes], wanted: str) -> Iterator[bytes]:
    digest, last = hashlib.sha256(), b""
    for piece in some:
        if last:
            yield last
        digest.update(piece)
        last = piece
    if digest.hexdigest() != wanted:
        raise damaged(file, "its SHA-256 differs")
    yield last


def _with_checksums(file: str, some: Iterable[bytes], spans: Iterable[_Span]) -> Iterator[bytes]:
    at, crc, tail = 0, 0, b""
    left = iter(spans)
    span = next(left, None)
    for piece in some:
        data, end = memoryview(piece), at + len(piece)
        while span is not None and span.start < end:
            body = span.stop - CRC_BYTES
            if (first := max(at, span.start)) < body:
                crc = checksum(data[first - at : min(body, end) - at], crc)
            if end > body:
                tail += data[max(first, body) - at : min(span.stop, end) - at]
            if span.stop > end:
                break
            _compare(file, crc, int.from_bytes(tail, "little"), span.wanted, span.key)
            span, crc, tail = next(left, None), 0, b""
        at = end
        yield piece
    if span is not None:
        raise damaged(file, f"it has {at} bytes, and its chunks need {span.stop}")
