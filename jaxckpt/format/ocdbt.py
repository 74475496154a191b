"""Encodes and decodes an OCDBT database: a B+tree from keys to the places of their values.

TensorStore's driver `ocdbt` defines the format and reads the result. Nodes that TensorStore
compressed are not decoded here. Numbers are varints (seven bits a byte, the lowest first) unless a
width is given; `[n]` is a list of n, field by field.

    file        magic uint32be, length uint64le, version 0, compression 0 (1: zstd), body,
                CRC-32C uint32le
    manifest    uuid, kind 0, inline limit, node limit, arity uint8, compression of the nodes that
                TensorStore would write (1: zstd, then its level int32le), files, versions
    versions    count, generation [n], height uint8 [n], place of the root [n], statistics [n],
                commit time in ns uint64le [n]; then the number of nodes of older versions: 0
    node        height uint8, files, keys, and in a leaf: size [n], kind uint8 [n] (0 inline,
                1 in a file), file [m], offset [m], inline bytes; above: place [n], statistics [n]
    keys        count, bytes shared with the key before [n - 1], further bytes [n], (above a leaf:
                bytes that all keys below share [n],) the further bytes of all
    files       as keys: count, shared [n - 1], further [n], of these bytes of the directory [n],
                the bytes; relative to the directory of the file with the node
    place       file [n], offset [n], size [n]
    statistics  keys [n], bytes of nodes [n], bytes of values in files [n], of all below
"""

from __future__ import annotations

import operator
import re
import struct
import time
import uuid
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from awscrt.checksums import crc32c

# Values up to this size are stored in the tree's nodes, under the node's checksum.
MAX_INLINE_BYTES: Final = 4096
# The cost of a look-up grows with the node's size, so nodes are smaller than Orbax's 100 MB.
MAX_NODE_BYTES: Final = 1_000_000
# The size of a file of values, unless a single value is larger: a few files can be written or sent
# at once, and TensorStore keeps so much of a transaction in memory.
DATA_FILE_BYTES: Final = 64 << 20
_NODE, _MANIFEST = b"\x0c\xdb\x20\xde", b"\x0c\xdb\x3a\x2a"
_HEAD: Final = struct.Struct("<4sQ2x")  # of a file that is not compressed
_ARITY_LOG2: Final = 4
# The compression of nodes that TensorStore would add. Each node records its own; ours are plain.
_ZSTD: Final = b"\x01" + struct.pack("<i", 0)
# Our names of directories, and TensorStore's of files. TensorStore reads databases with others.
_FILE: Final = re.compile(
    r"((?:ocdbt\.process_(?:\d{1,9}(?:\.[0-9a-f]{16})?|held)/)?)d/n?[0-9a-f]{32}"
)
_VARINT_BYTES: Final = 9  # 63 bits
_MOST: Final = 1 << 60  # of an offset, a size or a count
# The limit on the bytes of all keys of a node, as a multiple of its own, or in bytes if that is
# more: a key can repeat the key before it at the cost of a few bytes. TensorStore allows 8 MiB.
_MOST_SHARED: Final = 8
_SOME_SHARED: Final = 16 << 20

_Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Place(NamedTuple):
    """Names where a value lies: a file relative to the database, offset and size in bytes."""

    file: str
    offset: int
    size: int


class _Node(NamedTuple):
    """A node that is encoded."""

    first: bytes  # key
    offset: int  # behind the first node
    size: int
    keys: int  # in it and below
    tree_bytes: int  # of it and all below
    value_bytes: int  # in files


def encode_database(
    values: Mapping[str, bytes | Place], file: str, start: int = 0
) -> tuple[bytes, bytes]:
    """Returns all nodes, and the manifest.

    Args:
        values: By key. Bytes are stored in the nodes.
        file: Where the nodes will be, from the offset `start` on.
    """
    data = bytearray()
    nodes = list(_leaves(sorted((key.encode(), value) for key, value in values.items()), data))
    height = 0
    while len(nodes) > 1:
        height += 1
        nodes = list(_above(nodes, height, file, start, data))
    root = nodes[0]
    limits = b"\0" + _varints([MAX_INLINE_BYTES, MAX_NODE_BYTES]) + bytes([_ARITY_LOG2]) + _ZSTD
    places = _varints([0, start + root.offset, root.size])
    statistics = _varints([root.keys, root.tree_bytes, root.value_bytes])
    version = _varints([1, 1]) + bytes([height]) + places + statistics
    commit = struct.pack("<Q", time.time_ns())
    body = uuid.uuid4().bytes + limits + _files([file]) + version + commit + b"\0"
    return bytes(data), _framed(_MANIFEST, body)


def encode_leaves(values: Mapping[str, bytes | Place]) -> bytes:
    """Returns the leaves alone, one after the other, for `decode_leaves`."""
    data = bytearray()
    for _ in _leaves(sorted((key.encode(), value) for key, value in values.items()), data):
        pass
    return bytes(data)


def _leaves(entries: Sequence[tuple[bytes, bytes | Place]], data: bytearray) -> Iterator[_Node]:
    sizes = (len(key) + (len(v) if isinstance(v, bytes) else 0) + 16 for key, v in entries)
    for start, stop in _ranges(sizes):
        some = entries[start:stop]
        places = [value for _, value in some if isinstance(value, Place)]
        files = sorted({place.file for place in places})
        number = {name: n for n, name in enumerate(files)}
        shared, further = _shortened([key for key, _ in some])
        body = b"".join(
            [
                b"\0",
                _files(files),
                _varints([len(some), *shared, *map(len, further)]),
                *further,
                _varints(v.size if isinstance(v, Place) else len(v) for _, v in some),
                bytes(isinstance(value, Place) for _, value in some),
                _varints(number[place.file] for place in places),
                _varints(place.offset for place in places),
                *(value for _, value in some if isinstance(value, bytes)),
            ]
        )
        size = sum(place.size for place in places)
        yield _append(data, body, some[0][0], len(some), 0, size)


def _above(
    nodes: Sequence[_Node], height: int, file: str, first: int, data: bytearray
) -> Iterator[_Node]:
    for start, stop in _ranges(len(node.first) + 32 for node in nodes):
        some = nodes[start:stop]
        shared, further = _shortened([node.first for node in some])
        keys, tree_bytes, value_bytes = zip(*(node[3:] for node in some), strict=True)
        body = b"".join(
            [
                bytes([height]),
                _files([file]),
                _varints([len(some), *shared, *map(len, further), *([0] * len(some))]),
                *further,
                _varints([0] * len(some)),
                _varints(first + node.offset for node in some),
                _varints(node.size for node in some),
                _varints([*keys, *tree_bytes, *value_bytes]),
            ]
        )
        yield _append(data, body, some[0].first, sum(keys), sum(tree_bytes), sum(value_bytes))


def _append(
    data: bytearray, body: bytes, first: bytes, keys: int, below_bytes: int, value_bytes: int
) -> _Node:
    node, offset = _framed(_NODE, body), len(data)
    data += node
    return _Node(first, offset, len(node), keys, len(node) + below_bytes, value_bytes)


def _ranges(sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yields the ranges of entries that go into a node."""
    start, stop, total = 0, 0, 0
    for size in sizes:
        if stop > start + 1 and total + size > MAX_NODE_BYTES:
            yield start, stop
            start, total = stop, 0
        stop, total = stop + 1, total + size
    yield start, stop


def _framed(magic: bytes, body: bytes) -> bytes:
    data = _HEAD.pack(magic, _HEAD.size + len(body) + 4) + body
    return data + struct.pack("<I", crc32c(data))


def _files(names: Sequence[str]) -> bytes:
    shared, further = _shortened([name.encode() for name in names])
    folders = [len(folder_of(name)) for name in names]
    lengths = [len(names), *shared, *map(len, further), *folders]
    return b"".join([_varints(lengths), *further])


def _shortened(keys: Sequence[bytes]) -> tuple[list[int], list[bytes]]:
    """Returns how many bytes each key but the first shares with the key before, and the rests."""
    shared = [_common(a, b) for a, b in pairwise(keys)]
    return shared, [key[n:] for key, n in zip(keys, [0, *shared], strict=False)]


def _common(a: bytes, b: bytes) -> int:
    least, most = 0, min(len(a), len(b))
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if a[:middle] == b[:middle] else (least, middle - 1)
    return least


def _varints(numbers: Iterable[int]) -> bytes:
    values = np.array([*numbers], np.int64)
    groups = values[:, None] >> np.arange(0, max(1, int(values.max(initial=0)).bit_length()), 7)
    more = groups >= 0x80
    data = (groups & 0x7F | more << 7).astype(np.uint8)
    stored = np.concatenate([np.ones((len(values), 1), bool), more[:, :-1]], axis=1)
    return data[stored].tobytes()


# --- decoding --------------------------------------------------------------------------------


class Foreign(Exception):
    """Only TensorStore can decode the database, since ours have other forms."""


class Root(NamedTuple):
    """The newest version of a database."""

    place: Place  # of the root node
    height: int
    keys: int  # how many


class Node(NamedTuple):
    """A node that was decoded."""

    height: int
    keys: list[bytes]  # in full; above leaves, what all keys below each entry begin with
    # Of which each value is a part: the names of files, and what the node itself has of values.
    sources: Sequence[str | bytes]
    table: _Numbers  # the source of each value, its offset there and its size: `int64[key, 3]`

    @classmethod
    def of(cls, height: int, keys: list[bytes], values: Sequence[bytes | Place]) -> Node:
        rows = [(x, 0, len(x)) if isinstance(x, bytes) else x for x in values]
        table = [(i, start, size) for i, (_, start, size) in enumerate(rows)]
        numbers = np.array(table, np.int64).reshape(-1, 3)
        return cls(height, keys, [row[0] for row in rows], numbers)

    @property
    def values(self) -> list[bytes | Place]:
        """Returns the values or their places; above leaves, the places of nodes."""
        return [value_at(self.sources, row) for row in self.table.tolist()]


def value_at(sources: Sequence[str | bytes], row: Sequence[int]) -> bytes | Place:
    number, start, size = row
    source = sources[number]
    return source[start : start + size] if isinstance(source, bytes) else Place(source, start, size)


def is_compressed(data: bytes) -> bool:
    """Returns whether TensorStore has compressed a node or a manifest."""
    return data[_HEAD.size - 1 : _HEAD.size] == b"\1"


def folder_of(file: str) -> str:
    """Returns the directory, with its slash, of the database with a file of nodes or values."""
    return file[: file.rfind("d/")]


def place_of(folder: str, name: str, offset: int, size: int) -> Place:
    """Returns a place in a file of a database in `folder`; Foreign if we name no file so."""
    match = _FILE.fullmatch(folder + name)
    if match is None or match[1] != folder:
        raise Foreign(f"a reference to {folder}{name}")
    return Place(folder + name, offset, size)


def decode_manifest(data: bytes) -> Root:
    """Decodes the newest version of a database, unless it is compressed.

    Raises:
        ValueError: it is damaged.
        Foreign: it has other forms than ours.
    """
    fields = _Fields(data, _MANIFEST)
    fields.text(16)  # uuid
    if fields.numbers(1)[0]:
        raise Foreign("its versions are in several files")
    fields.numbers(2)  # limits
    if (compression := fields.text(2)[1]) > 1:
        raise Foreign("its nodes are neither plain nor compressed with zstd")
    fields.text(4 * compression)  # level
    files = fields.files("")
    count = int(fields.numbers(1)[0])
    if not count:
        raise Foreign("it has no version")
    fields.numbers(count)  # generations
    height = fields.text(count)[-1]
    root = value_at(files, fields.places(files, count)[-1].tolist())
    assert isinstance(root, Place)
    return Root(root, height, int(fields.numbers(count)[-1]))


def decode_leaves(data: bytes) -> dict[str, bytes | Place]:
    """Returns the values of `encode_leaves`, or their places; ValueError if they are damaged."""
    found: dict[str, bytes | Place] = {}
    while data:
        size = int.from_bytes(data[4:12], "little")
        node = decode_node(data[:size], "", b"")
        found.update(zip([key.decode() for key in node.keys], node.values, strict=True))
        data = data[size:]
    return found


def decode_node(
    data: bytes,
    folder: str,
    prefix: bytes,
    wanted: Sequence[bytes] | None = None,
    most: int = _MOST,
) -> Node:
    """Decodes a node, unless it is compressed.

    Args:
        folder: The directory of its database, with a slash; its references are relative to that.
        prefix: The beginning of all its keys, which the node above has.
        wanted: If not None, only the entries for these keys are returned: their values, or the
            nodes below that can have them.
        most: The number of entries that it can have.

    Raises:
        ValueError: it is damaged.
        Foreign: it refers to files that are not named as ours.
    """
    fields = _Fields(data, _NODE)
    height = fields.text(1)[0]
    files = fields.files(folder)
    texts, common = fields.strings(marked=height > 0, before=len(prefix), most=most)
    if not texts or any(map(operator.ge, texts, texts[1:])):
        raise ValueError("it has no keys, or not in order")
    count, rows = len(texts), range(len(texts))
    if wanted is not None:
        rest = {key[len(prefix) :] for key in wanted if key.startswith(prefix)}
        found = sorted({max(0, bisect_right(texts, key) - 1) for key in rest})
        rows = found if height else [row for row in found if texts[row] in rest]
    texts = [texts[row][: common[row]] if height else texts[row] for row in rows]
    keys = [prefix + text for text in texts] if prefix else texts
    table = fields.places(files, count) if height else fields.values(files, count)
    if height:
        fields.numbers(3 * count)  # statistics
    if fields.at < fields.end:
        raise ValueError("it is longer than its fields")
    return Node(height, keys, [*files, data], table[[*rows]])


class _Fields:
    """Reads one field after the other; raises ValueError where they end early or are too large."""

    def __init__(self, data: bytes, magic: bytes) -> None:
        if len(data) < _HEAD.size + 4 or data[: _HEAD.size] != _HEAD.pack(magic, len(data)):
            raise ValueError("its header is wrong")
        self.data, self.at, self.end = data, _HEAD.size, len(data) - 4
        self._bytes = np.frombuffer(data, np.uint8, self.end)
        stored = int.from_bytes(data[self.end :], "little")
        if (found := crc32c(self._bytes)) != stored:  # pyright: ignore[reportArgumentType]
            raise ValueError(f"checksum mismatch: stored {stored:#010x}, computed {found:#010x}")

    def text(self, size: int) -> bytes:
        start, self.at = self.at, self.at + size
        if self.at > self.end:
            raise ValueError("it ends early")
        return self.data[start : self.at]

    def numbers(self, count: int, most: int = _MOST) -> _Numbers:
        part = self._bytes[self.at : self.at + _VARINT_BYTES * count]
        ends = (part < 0x80).nonzero()[0][:count] + 1
        if len(ends) < count:
            raise ValueError("it ends early, or a number is too large")
        size = int(ends[-1]) if count else 0
        found = (part[:size] & 0x7F).astype(np.int64)
        if size > count:
            starts = np.concatenate([ends[:1] * 0, ends[:-1]])
            place = np.arange(size) - np.repeat(starts, ends - starts)
            if (place >= _VARINT_BYTES).any():
                raise ValueError("a number is too large")
            found = np.add.reduceat(found << 7 * place, starts)
        if (found > most).any():
            raise ValueError("a number is too large")
        self.at += size
        return found

    def strings(
        self, *, marked: bool, before: int = 0, most: int = _MOST
    ) -> tuple[list[bytes], list[int]]:
        """Returns texts that share their beginnings, and the number that each has if marked.

        Args:
            before: Bytes that will be put before each text.
            most: The number of texts that there can be.
        """
        size, count = self.end, int(self.numbers(1)[0])
        if count > most:
            raise ValueError(f"it has {count} entries, more than the tree has keys")
        shared = np.concatenate([[0][:count], self.numbers(max(0, count - 1), size)])
        further = self.numbers(count, size)
        marks = self.numbers(count) if marked else np.zeros(count, np.int64)
        lengths = shared + further
        if (shared[1:] > lengths[:-1]).any() or (marks > lengths).any():
            raise ValueError("a text shares more than there is")
        if (lengths + before).sum() > max(_SOME_SHARED, _MOST_SHARED * size):
            raise ValueError("its texts are too long")
        rests, ends, last = self.text(int(further.sum())), further.cumsum().tolist(), b""
        parts = zip(shared.tolist(), [0, *ends], ends, strict=False)
        texts = [last := last[:common] + rests[start:end] for common, start, end in parts]
        return texts, marks.tolist()

    def files(self, folder: str) -> list[str]:
        """Returns the names of files of a database in `folder`."""
        texts, sizes = self.strings(marked=True)
        both = [(x[:n].decode(), x[n:].decode()) for x, n in zip(texts, sizes, strict=True)]
        return [place_of(folder + start, end, 0, 0).file for start, end in both]

    def places(self, files: Sequence[str], count: int) -> _Numbers:
        numbers = self.numbers(count, len(files) - 1)
        return np.stack([numbers, self.numbers(count), self.numbers(count)], axis=1)

    def values(self, files: Sequence[str], count: int) -> _Numbers:
        """Returns the places of the values of a leaf; those in the node come after its files."""
        sizes = self.numbers(count)
        kinds = np.frombuffer(self.text(count), np.uint8)
        if kinds.max(initial=0) > 1:
            raise ValueError("a value is neither in it nor in a file")
        stored = kinds == 1
        if (sizes[~stored] > self.end).any():  # so that their sum does not overflow
            raise ValueError("a value is larger than the node")
        apart = int(stored.sum())
        numbers, starts = np.full((2, count), len(files))
        numbers[stored] = self.numbers(apart, len(files) - 1)
        starts[stored] = self.numbers(apart)
        ends = np.where(stored, 0, sizes).cumsum() + self.at
        starts = np.where(stored, starts, ends - sizes)
        if (at := int(ends.max(initial=self.at))) > self.end:
            raise ValueError("it ends early")
        self.at = at
        return np.stack([numbers, starts, sizes], axis=1)
