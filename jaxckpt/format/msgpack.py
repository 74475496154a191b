"""Decodes the msgpack trees of Flax and of Orbax before 0.5.16 into plain Python and numpy.

Two kinds of file hold such a tree: Flax's `checkpoint_<step>`, which is the whole checkpoint, and
`checkpoint` in an old Orbax item, with small values in place and a `Placeholder` for each array
that is stored beside the file.

    array            ext 1    msgpack [shape, dtype name, C-order bytes]
    complex          ext 2    msgpack [real, imaginary]
    numpy scalar     ext 3    as ext 1, of shape ()
    tuple            ext 4    msgpack array; returned as a list, as Orbax restores tuples
    array > 1 GiB    map      {"__msgpack_chunked_array__": true, "shape": {"0": n}, "chunks": {…}}

The bytes are not trusted: `decode` returns a tree or raises, its memory use is bounded by their
length, and of the names in them only those of our dtypes are looked up in a module.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np

from jaxckpt.errors import CorruptCheckpoint, UnsupportedFormat, lfs_problem
from jaxckpt.format.arrays import dtype_of

_MAX_DEPTH: Final = 128
_MAX_RANK: Final = 64
# An extension holds a copy of its bytes while they are decoded, so each level costs the file again.
_MAX_TUPLES: Final = 16

_EXT_ARRAY: Final = 1
_EXT_COMPLEX: Final = 2
_EXT_SCALAR: Final = 3
_EXT_TUPLE: Final = 4

_CHUNKED: Final = "__msgpack_chunked_array__"
# A dict that is empty or whose first key is text or below 32, or an array.
_HEAD: Final = re.compile(
    rb"(?s)([\x81-\x8f]|\xde..|\xdf....)[\x00-\x1f\xa0-\xbf\xd9-\xdb]|\x80$|[\xc7-\xc9\xd4-\xd8]"
)
_REFUSALS: Final = ValueError, TypeError, OverflowError, RecursionError, MemoryError
_PLACEHOLDERS: Final = ("PLACEHOLDER://", "AGGREGATED://", "//GDAPlaceholder:")  # the last of Flax


@dataclass(frozen=True, slots=True)
class Placeholder:
    """Stands for a zarr array beside the msgpack file; of Flax, in `<checkpoint file>_gda/`."""

    name: str


Scalar: TypeAlias = bool | int | float | complex | str | bytes | None
Leaf: TypeAlias = Scalar | np.ndarray | np.generic | Placeholder
Tree: TypeAlias = dict[str | int, "Tree"] | list["Tree"] | Leaf


def decode(data: bytes, *, file: str | None = None) -> Tree:
    """Decodes one msgpack checkpoint file.

    Dict keys are strings, or ints if the writer used ints. Arrays are read-only and keep their
    dtype and shape; chunked arrays are joined.

    Raises:
        CorruptCheckpoint: the bytes are truncated, damaged, or not such a tree.
        UnsupportedFormat: the msgpack package is not installed.

    Example:
        >>> decode(b"\\x82\\xa4step\\x07\\xa1w\\xafPLACEHOLDER://w")
        {'step': 7, 'w': Placeholder(name='w')}
    """
    if problem := lfs_problem(data):
        raise CorruptCheckpoint(f"{file} {problem}", file=file)
    return _Decoder(file).tree(data)


def is_like_tree(head: bytes) -> bool:
    """Returns whether a file of Flax, or a pointer of Git LFS to one, may begin with 8 bytes."""
    return bool(_HEAD.match(head) or lfs_problem(head))


class _Decoder:
    """Holds the msgpack library and the file's name for errors, for one call of `decode`."""

    def __init__(self, file: str | None) -> None:
        self._file = file
        self._msgpack = _import_msgpack(file)

    def tree(self, data: bytes) -> Tree:
        return self._finish(self._unpack(data, depth=0), depth=0)

    def _corrupt(self, what: str) -> CorruptCheckpoint:
        file = self._file or "a msgpack checkpoint"
        return CorruptCheckpoint(
            f"{file} is damaged or not a checkpoint: {what.rstrip('.')}.\n"
            "Restore an earlier step, or another copy of this file.",
            file=self._file,
        )

    def _unpack(self, data: bytes, *, depth: int, raw: bool = False) -> Any:
        """Unpacks `data`: extension types are decoded, strings and dicts stay as stored.

        The library refuses containers that claim more elements than there are bytes or that are
        nested too deep for its stack. `depth` counts the extensions around these bytes.
        """
        if depth > _MAX_TUPLES:
            raise self._corrupt(f"tuples nested more than {_MAX_TUPLES} deep")
        try:
            return self._msgpack.unpackb(
                data,
                raw=raw,
                strict_map_key=False,
                object_pairs_hook=self._dict,
                ext_hook=lambda code, payload: self._extension(code, payload, depth + 1),
            )
        except (*_REFUSALS, self._msgpack.UnpackException) as error:
            raise self._corrupt(f"{type(error).__name__}: {error}") from error

    def _dict(self, pairs: Iterable[tuple[Any, Any]]) -> dict[str | int, Any]:
        found: dict[str | int, Any] = {}
        for key, value in pairs:  # an iterator from a msgpack without its C extension
            if type(key) not in (str, int):
                raise self._corrupt(f"a key must be a string, got {type(key).__name__}")
            if key in found:
                raise self._corrupt("a key occurs twice")
            found[key] = value
        return found

    def _extension(self, code: int, payload: bytes, depth: int) -> Any:
        if code == _EXT_ARRAY:
            return self._array(payload, depth)
        if code == _EXT_SCALAR:
            scalar = self._array(payload, depth)
            if scalar.ndim != 0:
                raise self._corrupt(f"a scalar has the shape {scalar.shape}")
            return scalar[()]
        if code == _EXT_COMPLEX:
            match self._unpack(payload, depth=depth):
                case [int() | float() as real, int() | float() as imaginary]:
                    return complex(real, imaginary)
            raise self._corrupt("a complex number is not a pair of numbers")
        if code == _EXT_TUPLE:
            elements = self._unpack(payload, depth=depth)
            if not isinstance(elements, list):
                raise self._corrupt("a tuple is not stored as a list")
            return elements
        raise self._corrupt(f"unknown extension type {code}")

    def _array(self, payload: bytes, depth: int) -> np.ndarray:
        match self._unpack(payload, depth=depth, raw=True):
            case [list() as shape, bytes() as name, bytes() as content]:
                pass
            case _:
                raise self._corrupt("an array must have a shape, a dtype and its bytes")
        try:
            dtype = dtype_of(name.decode())
        except (ValueError, AttributeError) as error:  # an older ml_dtypes lacks some
            raise self._corrupt(f"unknown dtype {name[:40]!r}") from error
        size = self._size(shape)
        if size * dtype.itemsize != len(content):
            raise self._corrupt(
                f"an array of {size} {dtype.name} needs {size * dtype.itemsize} bytes, "
                f"got {len(content)}"
            )
        return self._reshape(np.frombuffer(content, dtype), shape)

    def _size(self, shape: Sequence[Any]) -> int:
        """Returns the number of elements as a Python int, which cannot overflow."""
        if len(shape) > _MAX_RANK or not all(type(n) is int and n >= 0 for n in shape):
            raise self._corrupt(f"an array's shape must be a list of up to {_MAX_RANK} sizes")
        return prod(shape)

    def _reshape(self, flat: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        try:
            return flat.reshape(tuple(shape))
        except (ValueError, OverflowError) as error:  # too many dimensions, or (0, 2**70)
            raise self._corrupt(f"shape not supported by numpy: {error}") from error

    def _finish(self, node: Any, *, depth: int) -> Tree:
        """Decodes placeholders, joins chunked arrays, and checks depth and types."""
        if depth > _MAX_DEPTH:
            raise self._corrupt(f"nested more than {_MAX_DEPTH} deep")
        if isinstance(node, dict):
            if _CHUNKED in node:
                return self._join(node)
            return {key: self._finish(child, depth=depth + 1) for key, child in node.items()}
        if isinstance(node, list):
            return [self._finish(child, depth=depth + 1) for child in node]
        if isinstance(node, str):
            return self._string(node)
        if node is None or isinstance(
            node, bool | int | float | complex | bytes | np.ndarray | np.generic
        ):
            return node
        raise self._corrupt(f"unsupported type {type(node).__name__}")  # a msgpack timestamp

    def _string(self, text: str) -> str | Placeholder:
        for prefix in _PLACEHOLDERS:
            if text.startswith(prefix):
                name = text.removeprefix(prefix)  # used as a path
                if name.startswith("/") or ".." in name.split("/") or "\0" in name:
                    what = f"the array name {name[:80]!r} points outside the checkpoint"
                    raise self._corrupt(what)
                return Placeholder(name)
        return text

    def _join(self, node: Mapping[str | int, Any]) -> np.ndarray:
        shape = self._numbered(node.get("shape"))
        chunks = self._numbered(node.get("chunks"))
        if not chunks or not all(isinstance(c, np.ndarray) and c.ndim == 1 for c in chunks):
            raise self._corrupt("the chunks of an array must be one-dimensional arrays")
        if any(chunk.dtype != chunks[0].dtype for chunk in chunks):
            raise self._corrupt("the chunks of an array differ in dtype")
        size = self._size(shape)
        if size != sum(chunk.size for chunk in chunks):
            raise self._corrupt(f"the chunks of an array do not add up to its {size} elements")
        joined = np.concatenate(chunks)
        joined.flags.writeable = False
        return self._reshape(joined, shape)

    def _numbered(self, node: Any) -> list[Any]:
        """Returns the values of `{"0": a, "1": b}` in order: Flax writes tuples like that."""
        keys = [str(i) for i in range(len(node))] if isinstance(node, dict) else None
        if keys is None or set(keys) != set(node):
            raise self._corrupt('a chunked array lacks its numbered "shape" or "chunks"')
        return [node[key] for key in keys]


def _import_msgpack(file: str | None) -> Any:
    try:
        return importlib.import_module("msgpack")
    except ImportError as error:
        raise UnsupportedFormat(
            f"{file or 'this checkpoint'} is in the msgpack format of Flax and old Orbax.\n"
            "To read it, run: pip install msgpack"
        ) from error
