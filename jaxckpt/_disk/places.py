"""The table of places: where the values lie that a process wrote into a database.

    each process    writes data files, and leaves a table
    process 0       unites the tables, and writes the nodes of the common database

A table records where each key's value lies, and the checksums of the chunks. It is sent in the
form of the leaves of a database, with the checksums as one more value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from jaxckpt._disk.attempt import Work
from jaxckpt.errors import SaveFailed
from jaxckpt.format import names
from jaxckpt.format.arrays import decode_index, index_bytes
from jaxckpt.format.ocdbt import Place, decode_leaves, encode_database, encode_leaves
from jaxckpt.format.step import FileFacts
from jaxckpt.format.tree import StoredArray, grid_of
from jaxckpt.storage import Storage

_SUMS: Final = ""  # never the key of a value
_NUMBER: Final = np.dtype("<u4")


class Table(NamedTuple):
    """The part of a database that a process wrote, or all of it."""

    places: Mapping[str, bytes | Place]  # each value or its place, by key
    units: Sequence[int] = ()  # the numbers of chunks and inner chunks; see `checksums`
    sums: Sequence[int] = ()  # their checksums
    # Known to the process that wrote them.
    sizes: Mapping[str, int] = {}  # of the files, in bytes
    manifest: bytes = b""  # of the whole database, still to be stored

    def files(self) -> list[str]:
        """Returns the files that have values."""
        return sorted({place.file for place in self.places.values() if isinstance(place, Place)})

    def renamed(self, to: Mapping[str, str]) -> Table:
        """Returns the table once its files have other names."""
        places = {
            key: place if isinstance(place, bytes) else place._replace(file=to[place.file])
            for key, place in self.places.items()
        }
        sizes = {to[file]: size for file, size in self.sizes.items()}
        return self._replace(places=places, sizes=sizes)


def inner_places(storage: Storage, folder: str, array: StoredArray, place: Place) -> list[Place]:
    """Returns where the inner chunks of a chunk lie; ValueError or EOFError if its index is bad."""
    index, (file, offset, size) = np.empty(index_bytes(array), np.uint8), place
    # If the chunk is too small for its index, this reads what lies before it: not an index.
    storage.read_into(f"{folder}/{file}", max(0, offset + size - index.size), [index])
    return [Place(file, offset + at, n) for at, n in decode_index(index, size - index.size)]


def encode_table(table: Table) -> bytes:
    sums = np.array([table.units, table.sums], _NUMBER).tobytes()
    return encode_leaves({_SUMS: sums, **table.places})


def decode_table(data: bytes) -> Table:
    """Decodes a table; ValueError if it is damaged."""
    places = decode_leaves(data)
    sums = places.pop(_SUMS, b"")
    if isinstance(sums, Place):
        raise ValueError("its checksums are elsewhere")
    units, found = np.frombuffer(sums, _NUMBER).reshape(2, -1).tolist()
    return Table(places, units, found)


def last_files(tables: Sequence[Table], count: int, manifest: bytes) -> dict[str, bytes]:
    """Returns the files that complete a database; see `unite`."""
    sums = np.zeros(count, _NUMBER)
    for table in tables:
        sums[np.array(table.units, np.int64)] = table.sums
    return {names.CHUNK_SUMS: sums.tobytes(), names.OCDBT_MANIFEST: manifest}


def unite(
    storage: Storage, item: str, tables: Sequence[Table], count: int, work: Work
) -> tuple[dict[str, bytes], dict[str, FileFacts]]:
    """Writes the nodes of the database of all tables; see `check_complete`.

    Args:
        item: Its directory.
        count: The number of chunks and inner chunks; one in no table has the checksum 0.

    Returns:
        The files still to be stored, and facts about each file that has values.
    """
    places = {key: place for table in tables for key, place in table.places.items()}
    sizes: dict[str, int] = {}
    for place in places.values():
        if isinstance(place, Place):
            file, offset, size = place
            sizes[file] = max(sizes.get(file, 0), offset + size)
    file = names.new_data_file(work.mark)
    nodes, manifest = encode_database(places, file)
    storage.make_dir(f"{item}/{names.OCDBT_DATA}")
    storage.write(f"{item}/{file}", nodes)
    facts = {file: FileFacts(size=size) for file, size in sizes.items()}  # at least
    return last_files(tables, count, manifest), facts


def check_complete(item: str, tables: Sequence[Table], stored: Sequence[StoredArray]) -> None:
    """Raises SaveFailed if a value is in no table."""
    found = len({key for table in tables for key in table.places})
    wanted = len(stored) + sum(math.prod(grid_of(one.shape, one.chunk_shape)) for one in stored)
    if found != wanted:
        raise SaveFailed(f"{item}: no process wrote {wanted - found} of the {wanted} values")
