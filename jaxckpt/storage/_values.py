"""Finds the values of a database of chunks by its tree, with our own requests.

A tree is read level by level, in as many round trips as it has levels. TensorStore only decodes
nodes that it compressed: older releases let it merge the databases of several processes.

A damaged or malicious tree takes neither long nor much memory. Its nodes must not overlap, so that
none is read twice; it must have as many keys as its manifest states; and `format.ocdbt` limits the
size of a decoded node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, count, pairwise
from typing import Any, Final, NamedTuple, final

import numpy as np

from jaxckpt.format import ocdbt
from jaxckpt.format.names import OCDBT_MANIFEST
from jaxckpt.format.ocdbt import Foreign, Node, Place, Root, value_at
from jaxckpt.storage._ahead import together
from jaxckpt.storage._protocol import Storage

_MOST_NODE_BYTES: Final = 64 << 20  # of one, and of those in memory at a time


@final
class Places(Mapping[str, bytes | Place]):
    """Values or their places, by key, as a table: objects for a million would take seconds."""

    def __init__(self, leaves: Sequence[Node]) -> None:
        self._rows = dict(zip(chain.from_iterable(x.keys for x in leaves), count(), strict=False))
        self.sources: list[str | bytes] = []  # as of `Node`
        tables = []
        for node in leaves:
            tables.append(node.table + np.array([len(self.sources), 0, 0]))
            self.sources += node.sources
        self.sources.append(b"")  # of one more row, for keys that are not there
        self.table = np.concatenate([*tables, [[len(self.sources) - 1, 0, 0]]])

    def find(self, prefixes: Sequence[str], suffixes: Sequence[str]) -> np.ndarray[Any, Any]:
        """Returns the row of each key, `int64[prefix, suffix]`; -1 if it is not there."""
        get, ends = self._rows.get, [suffix.encode() for suffix in suffixes]
        rows = [get(start + end, -1) for start in map(str.encode, prefixes) for end in ends]
        return np.array(rows, np.int64).reshape(len(prefixes), -1)

    def at(self, rows: Any) -> Iterator[bytes | Place]:
        """Yields the values in some rows, or their places."""
        return (value_at(self.sources, row) for row in self.table[rows].tolist())

    def __getitem__(self, key: str) -> bytes | Place:
        return next(self.at([self._rows[key.encode(errors="surrogatepass")]]))

    def __iter__(self) -> Iterator[str]:
        return map(bytes.decode, self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class _Reference(NamedTuple):
    """A node that is still to be read."""

    place: Place
    prefix: bytes  # of all keys below
    height: int


def find_values(
    storage: Storage,
    path: str,
    *,
    max_keys: int | None = None,
    wanted: Iterable[str] | None = None,
    nodes: list[Place] | None = None,
) -> Places | None:
    """Returns the values of the database in a directory, or their places, by key.

    Args:
        max_keys: If there are more keys, only those that are wanted are found, on their paths
            through the tree.
        wanted: A few keys, whose values are then returned, perhaps with others.
        nodes: Receives where the nodes of the tree lie that were read.

    Returns:
        None if there are more keys than `max_keys` and `wanted` is None, or if only TensorStore can
        find the values.

    Raises:
        ValueError, OSError: the tree is damaged.
    """
    try:
        root = _read_root(storage, path)
        most, some_keys = root.keys, None
        if max_keys is not None and most > max_keys:
            if wanted is None:
                return None
            some_keys = sorted(key.encode() for key in wanted)
        leaves: list[Node] = []
        read: list[Place] = []
        level = [_Reference(root.place, b"", root.height)]
        while level:
            read = sorted([*read, *(node.place for node in level)])
            _check_apart(path, read)
            batches = _batches(path, level)
            level = [
                n for some in batches for n in _take(storage, path, some, leaves, most, some_keys)
            ]
    except Foreign:
        return None
    if nodes is not None:
        nodes += read
    found = Places(leaves)
    if some_keys is None and len(found) != most:
        raise ValueError(f"{path}/{OCDBT_MANIFEST}: {len(found)} keys were found, not {most}")
    return found


def read_place(storage: Storage, path: str, place: Place) -> bytes:
    """Returns the bytes at a place in a file of the database at a path."""
    data = np.empty(place.size, np.uint8)
    try:
        storage.read_into(f"{path}/{place.file}", place.offset, [data])
    except EOFError as error:
        raise ValueError(str(error)) from error
    return data.tobytes()


def _read_root(storage: Storage, path: str) -> Root:
    file = f"{path}/{OCDBT_MANIFEST}"
    data = storage.read(file, max_bytes=_MOST_NODE_BYTES)
    try:
        if ocdbt.is_compressed(data):
            from jaxckpt.storage._arrays import dump_manifest

            return dump_manifest(data)
        return ocdbt.decode_manifest(data)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _check_apart(path: str, read: Sequence[Place]) -> None:
    """Raises ValueError if sorted places of nodes overlap."""
    for before, after in pairwise(read):
        if before.file == after.file and before.offset + before.size > after.offset:
            raise ValueError(f"{path}/{before.file}: nodes of its tree overlap")


def _batches(path: str, level: Sequence[_Reference]) -> Iterator[list[_Reference]]:
    some: list[_Reference] = []
    total = 0
    for node in level:
        file, _, size = node.place
        if size > _MOST_NODE_BYTES:
            raise ValueError(f"{path}/{file}: a node of {size} bytes is too large")
        if total + size > _MOST_NODE_BYTES:
            yield some
            some, total = [], 0
        some.append(node)
        total += size
    yield some


def _take(
    storage: Storage,
    path: str,
    some: Sequence[_Reference],
    leaves: list[Node],
    most: int,
    wanted: Sequence[bytes] | None,
) -> Iterator[_Reference]:
    """Adds the nodes with values, up to `most` in all; yields references to the nodes below."""
    calls = [partial(read_place, storage, path, node.place) for node in some]
    for (place, prefix, height), data in zip(some, together(storage, calls), strict=True):
        where = f"{path}/{place.file}: the index node at byte {place.offset}"
        decode = partial(ocdbt.decode_node, wanted=wanted, most=most)
        if ocdbt.is_compressed(data):
            from jaxckpt.storage._arrays import dump_node as decode
        try:
            decoded = decode(data, ocdbt.folder_of(place.file), prefix)
            b"\n".join(() if height else decoded.keys).decode()  # raises if a key is no text
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        count = sum(len(node.keys) for node in leaves)
        if decoded.height != height or count + len(decoded.keys) > most:
            raise ValueError(f"{where} does not belong to this tree")
        if not height:
            leaves.append(decoded)
            continue
        both = zip(decoded.keys, decoded.values, strict=True)
        yield from (_Reference(at, key, height - 1) for key, at in both if isinstance(at, Place))
