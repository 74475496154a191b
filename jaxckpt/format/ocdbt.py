"""Encodes an OCDBT database: a B+tree from keys to the places of their values.

The format is that of TensorStore's driver `ocdbt`, which reads the result. Numbers are varints
(seven bits a byte, the lowest first) unless a width is given; `[n]` is a list of n, field by field.

    file        magic uint32be, length uint64le, version 0, compression 0, body, CRC-32C uint32le
    manifest    uuid, kind 0, inline limit, node limit, arity uint8, compression of the nodes that
                TensorStore would write (1: zstd, then its level int32le), files, versions
    versions    count, generation [n], height uint8 [n], place of the root [n], statistics [n],
                commit time in ns uint64le [n]; then the number of nodes of older versions: 0
    node        height uint8, files, keys, and in a leaf: size [n], kind uint8 [n] (0 inline,
                1 in a file), file [m], offset [m], inline bytes; above: place [n], statistics [n]
    keys        count, bytes shared with the key before [n - 1], further bytes [n], (above a leaf:
                bytes that all keys below share [n],) the further bytes of all
    files       as keys: shared [n - 1], further [n], of these bytes of the directory [n], the bytes
    place       file [n], offset [n], size [n]
    statistics  keys [n], bytes of nodes [n], bytes of values in files [n], of all below
"""

from __future__ import annotations

import struct
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from awscrt.checksums import crc32c

# Values up to this size are stored in the tree's nodes, under the node's checksum.
MAX_INLINE_BYTES: Final = 4096
# The cost of a look-up grows with the node's size, so nodes are smaller than Orbax's 100 MB.
MAX_NODE_BYTES: Final = 1_000_000
# Of a file of values, unless a single one is larger: a few files can be written or sent at once,
# and TensorStore keeps so much of a transaction in memory.
DATA_FILE_BYTES: Final = 64 << 20
_NODE, _MANIFEST = 0x0CDB20DE, 0x0CDB3A2A
_ARITY_LOG2: Final = 4
# What TensorStore's databases have by default, with which ours are merged. It compresses its nodes;
# each node says so itself, and ours do not.
_ZSTD: Final = b"\x01" + struct.pack("<i", 0)


class Place(NamedTuple):
    """Where a value lies: a file relative to the database, offset and size in bytes."""

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


def _framed(magic: int, body: bytes) -> bytes:
    size = struct.calcsize(">IQ") + 2 + len(body) + 4
    data = struct.pack(">I", magic) + struct.pack("<Q", size) + b"\0\0" + body
    return data + struct.pack("<I", crc32c(data))


def _files(names: Sequence[str]) -> bytes:
    shared, further = _shortened([name.encode() for name in names])
    lengths = [len(names), *shared, *map(len, further), *([0] * len(names))]
    return b"".join([_varints(lengths), *further])


def _shortened(keys: Sequence[bytes]) -> tuple[list[int], list[bytes]]:
    """Returns how much of each key but the first is that of the one before, and the rest of all."""
    shared = [_common(a, b) for a, b in pairwise(keys)]
    return shared, [key[n:] for key, n in zip(keys, [0, *shared], strict=False)]


def _common(a: bytes, b: bytes) -> int:
    least, most = 0, min(len(a), len(b))
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if a[:middle] == b[:middle] else (least, middle - 1)
    return least


def _varints(numbers: Iterable[int]) -> bytes:
    data = bytearray()
    for number in numbers:
        while number >= 0x80:
            data.append(number & 0x7F | 0x80)
            number >>= 7
        data.append(number)
    return bytes(data)
