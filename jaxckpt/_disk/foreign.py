"""Trees of which `_METADATA` says nothing, or not all: Orbax before 0.5.16, and Flax's own files.

Such a tree, or the values in it that are small, is a msgpack file; still older ones have nothing
but the names of their arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from jaxckpt._disk.find import is_plain_array
from jaxckpt.errors import CorruptCheckpoint
from jaxckpt.format import jsontext, msgpack, names, step, tree
from jaxckpt.format.tree import Leaf, Tree
from jaxckpt.storage import Storage

MAX_BYTES: Final = 64 << 30
# Whoever writes one of these writes `_METADATA` too.
_SINCE_TREE_METADATA: Final = frozenset(
    {names.OCDBT_MANIFEST, names.SHARDING, names.STRINGS, names.ARRAY_METADATAS}
)


def _tree(storage: Storage, path: str, inside: set[str]) -> Any:  # any tree
    file = f"{path}/{names.LEGACY_TREE}"
    if names.LEGACY_TREE not in inside or storage.kind(file) != "file":
        return None
    return msgpack.decode(storage.read(file, max_bytes=MAX_BYTES), file=file)


def leaves(data: bytes, *, file: str) -> list[Leaf]:
    """The leaves of a msgpack file; a small value is in its leaf, a large one in an array."""
    return _leaves_of(msgpack.decode(data, file=file), (), ())


def values(storage: Storage, path: str, inside: set[str]) -> dict[tuple[str, ...], Any]:
    """The values that lie in the msgpack file itself, by path."""
    leaves = _leaves_of(_tree(storage, path, inside), (), ())
    return {leaf.path: leaf.value for leaf in leaves if leaf.value is not None}


def _leaves_of(node: Any, path: tuple[str, ...], kinds: tuple[int, ...]) -> list[Leaf]:
    if isinstance(node, Mapping) and node:
        return [
            leaf
            for key, child in node.items()
            for leaf in _leaves_of(child, (*path, str(key)), (*kinds, tree.NAMED))
        ]
    if isinstance(node, list) and node:
        return [
            leaf
            for i, child in enumerate(node)
            for leaf in _leaves_of(child, (*path, str(i)), (*kinds, tree.SEQUENCE))
        ]
    leaf = Leaf(path=path, key_types=kinds, kind="empty", dtype="None")
    if node is None or isinstance(node, (Mapping, list)):
        word = "None" if node is None else "Dict" if isinstance(node, Mapping) else "List"
        return [replace(leaf, dtype=word)]
    if isinstance(node, msgpack.Placeholder):
        alias = None if node.name == leaf.name else node.name
        return [replace(leaf, kind="numpy", dtype="", alias=alias)]
    if isinstance(node, msgpack.FlaxArrayPlaceholder):
        return [replace(leaf, kind="numpy", dtype="", alias=node.path)]
    return [with_value(replace(leaf, kind="absent", dtype=""), node)]


def with_value(leaf: Leaf, value: Any) -> Leaf:  # a leaf of a msgpack tree
    """A leaf whose value the metadata holds."""
    if isinstance(value, (str, bytes)):
        return replace(leaf, kind="str" if isinstance(value, str) else "bytes", value=value)
    array = np.asarray(value)
    kind = leaf.kind
    if kind in ("absent", "generic"):
        # What Orbax called it if it said so, else what msgpack made of it.
        kind = tree.kind_of(leaf.dtype) if leaf.dtype else "numpy"
        if kind == "generic" or not isinstance(value, (np.ndarray, np.generic)):
            number = array.dtype.kind
            kind = {"b": "bool", "i": "int", "u": "int", "c": "complex"}.get(number, "float")
    return replace(leaf, kind=kind, dtype=array.dtype.name, shape=array.shape, value=array)


def read_tree(storage: Storage, path: str, inside: set[str], database: bool) -> Tree:
    """An item without `_METADATA`: the msgpack file says the tree, else the names of the arrays."""
    raw = _tree(storage, path, inside)
    if raw is not None:
        leaves = _leaves_of(raw, (), ())
    else:
        found = _array_names(storage, path, inside, database)
        leaves = [
            Leaf(path=parts, key_types=(tree.NAMED,) * len(parts), kind="numpy")
            for parts in (tuple(name.split(".")) for name in found)
        ]
        # What has these files once had the other too, and without it part of the tree is unknown.
        if not _SINCE_TREE_METADATA.isdisjoint(inside) and found != [names.ARRAY_ITEM_LEAF]:
            leaves = []
    if not leaves:
        file = f"{path}/{names.TREE_METADATA}"
        raise CorruptCheckpoint(
            f"{file} is missing, and nothing else says what the tree was", file=file
        )
    probe = next((leaf for leaf in leaves if leaf.has_array), None)
    version = 2 if probe is None else _zarr_version(storage, path, probe, database)
    return Tree(leaves=tuple(leaves), zarr_version=version, uses_ocdbt=database, fill_missing=True)


def _array_names(storage: Storage, path: str, inside: set[str], database: bool) -> list[str]:
    if not database:
        return sorted(name for name in inside if is_plain_array(storage, f"{path}/{name}"))
    from jaxckpt.storage._arrays import Reader, data_errors

    with data_errors(path, None):
        keys = Reader(storage.kvstore(path), database=True).keys()
    ends = (f"/{names.ZARR2}", f"/{names.ZARR3}")
    return [key.rpartition("/")[0] for key in keys if key.endswith(ends)]


def _zarr_version(storage: Storage, path: str, leaf: Leaf, database: bool) -> int:
    if not database:
        return 3 if storage.kind(f"{path}/{leaf.name}/{names.ZARR3}") == "file" else 2
    from jaxckpt.storage._arrays import Reader, data_errors, value_of

    with data_errors(path, None):
        read = Reader(storage.kvstore(path), database=True).get(f"{leaf.prefix}{names.ZARR3}")
        return 2 if value_of(read.result()) is None else 3


def very_old_strings(storage: Storage, path: str, leaf_names: Sequence[str]) -> dict[str, str]:
    """The texts of Orbax 0.3: all in one file, which lies in the directory of one of the leaves."""
    texts: dict[str, str] = {}
    for name in leaf_names:
        file = f"{path}/{name}/{names.STRINGS}"
        if storage.kind(file) == "file":
            data = storage.read(file, max_bytes=jsontext.MAX_BYTES)
            found = step.decode_strings(data, file=file)
            texts |= {k: step.find_string(found, k, file=file) for k in leaf_names if k in found}
    return texts
