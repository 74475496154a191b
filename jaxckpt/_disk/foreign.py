"""Reads items of other writers: every release of Orbax, Flax, bare zarr arrays, random keys.

If `_METADATA` does not describe the arrays, their own metadata does. Before Orbax 0.5.16 a msgpack
file has the tree, or its small values; still older items have only the names of their arrays.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from jaxckpt._disk.found import Found, array_names, key_folder, zarr_version
from jaxckpt._disk.native import (
    Item,
    check_data_files,
    make_item,
    missing_database,
    reader_of,
    special_file,
    with_texts,
)
from jaxckpt.errors import CheckpointNotFound, CorruptCheckpoint
from jaxckpt.format import arrays, jsontext, msgpack, names, step, tree
from jaxckpt.format.sharding import SavedSharding
from jaxckpt.format.tree import Leaf, Tree, bad_leaf
from jaxckpt.storage import corrupt

_MAX_BYTES: Final = 64 << 30
_KEY: Final = "threefry2x32"
# Writers of these files write `_METADATA` too, or a msgpack file (Orbax 0.4.0 to 0.4.2).
_SINCE_TREE_METADATA: Final = frozenset(
    {names.OCDBT_MANIFEST, names.SHARDING, names.STRINGS, names.ARRAY_METADATAS}
)


# --- items -----------------------------------------------------------------------------------


def read_tree(found: Found, name: str, saved: Tree) -> Item:
    """Completes a tree that `_METADATA` describes only in part."""
    path = found.items[name]
    check_data_files(found, path)
    database = names.OCDBT_MANIFEST in found.entries(path)
    saved = with_texts(found, path, _with_values(found, path, saved))
    if saved.uses_ocdbt and not database and any(leaf.has_array for leaf in saved.leaves):
        raise missing_database(path)
    database = database and saved.uses_ocdbt is not False
    item = _complete(make_item(found, name, saved, database=database, ours=False))
    return _bare(item) if found.metadata.is_by("ArrayCheckpointHandler", name) else item


def read_item(found: Found, name: str) -> Item:
    """Reads an item without `_METADATA`."""
    path = found.items[name]
    if (folder := key_folder(found.contents(path))) is not None:
        return _read_random_key(found, name, folder)
    item = _read_nameless(found, name)
    return _bare(item) if _looks_bare(item) else item


def read_flax(found: Found, name: str) -> Item:
    """Reads a file of `flax.training.checkpoints`; arrays of multi-host jobs lie beside it."""
    file = found.items[name]
    if names.flax_step(posixpath.basename(file)) is None:  # else it is damaged, whatever it holds
        _check_head(found, file)
    raw = msgpack.decode(found.storage.read(file, max_bytes=_MAX_BYTES), file=file)
    saved = Tree(
        leaves=tuple(_leaves_of(raw, (), ())), zarr_version=2, uses_ocdbt=False, fill_missing=True
    )
    folder, arrays_of = posixpath.split(f"{file}_gda")
    for leaf in saved.leaves[:1]:
        _refuse_link(leaf, found, folder, arrays_of)
    beside = replace(found, items={name: f"{file}_gda"})
    return _complete(make_item(beside, name, saved, database=False, ours=False))


def _check_head(found: Found, file: str) -> None:
    head = np.zeros(min(8, found.storage.size(file)), np.uint8)
    found.storage.read_into(file, 0, [head])
    if not msgpack.is_like_tree(head.tobytes()):
        raise CheckpointNotFound(f"{file} is no checkpoint, safetensors file or Flax msgpack file")


def _read_nameless(found: Found, name: str) -> Item:
    path = found.items[name]
    check_data_files(found, path)
    database = names.OCDBT_MANIFEST in found.entries(path)
    saved = _find_tree(found, path, database)
    item = make_item(found, name, saved, database=database, ours=False)
    return _complete(replace(item, tree=_with_kinds(saved, item.read_shardings())))


def _read_random_key(found: Found, name: str, folder: str) -> Item:
    """Reads an item of JaxRandomKeySave or NumpyRandomKeySave."""
    path = found.items[name]
    data = f"{path}/{folder}"
    if found.contents(path).get(folder) != "dir":
        raise corrupt(data, "is not a directory")
    inner = replace(found, items={name: data})
    inner.refuse_holes(data)
    if names.TREE_METADATA in found.contents(data):
        file = f"{data}/{names.TREE_METADATA}"
        saved = tree.decode(found.read(data, names.TREE_METADATA), file=file)
        item = read_tree(inner, name, saved)
    else:
        item = _read_nameless(inner, name)
    file = f"{path}/{names.key_facts(folder)}"
    is_typed = step.decode_key_facts(found.read(*posixpath.split(file)), file=file)
    return _jax_key(item, is_typed) if folder == names.JAX_KEY_ITEM else _numpy_key(item, is_typed)


def _jax_key(item: Item, is_typed: bool) -> Item:
    item = _bare(item)
    leaf = item.tree.leaves[0]
    # The implementation is not recorded. In jax only the default one has two words.
    if is_typed and leaf.stored is not None and leaf.shape[-1:] == (2,):
        leaf = leaf._replace(kind="key", dtype=f"key<{_KEY}>", key_impl=_KEY, shape=leaf.shape[:-1])
    return replace(item, tree=replace(item.tree, leaves=(leaf,)))


def _numpy_key(item: Item, is_tuple: bool) -> Item:
    if not is_tuple:
        return item
    children = tuple(leaf.path[0] for leaf in item.tree.leaves)
    root = tree.Node(type="tuple", names=children, children=(None,) * len(children))
    return replace(item, tree=replace(item.tree, root=root, typed=True))


def _looks_bare(item: Item) -> bool:
    """Returns whether ArraySave wrote an item; an early one left no sign but a name."""
    if item.found.metadata.is_by("ArrayCheckpointHandler", item.name):
        return True
    if len(item.tree.leaves) != 1 or item.database:
        return False
    leaf = item.tree.leaves[0]
    name = names.ARRAY_ITEM_LEAF if leaf.value is None else names.ARRAY_ITEM_VALUE
    return leaf.path == (name,)


def _bare(item: Item) -> Item:
    """Returns the item as a tree that is one leaf."""
    if len(item.tree.leaves) != 1:
        raise corrupt(item.path, "should be one array")
    leaf = item.tree.leaves[0]
    bare = leaf._replace(path=(), key_types=(), alias=leaf.name)
    return replace(item, tree=replace(item.tree, leaves=(bare,), root=None, typed=True))


def _with_kinds(saved: Tree, shardings: Mapping[str, SavedSharding]) -> Tree:
    """Marks arrays with a recorded sharding as jax arrays, for a tree without kinds."""
    leaves = tuple(
        leaf._replace(kind="array") if leaf.has_array and leaf.name in shardings else leaf
        for leaf in saved.leaves
    )
    return replace(saved, leaves=leaves)


# --- the arrays' own metadata ----------------------------------------------------------------


def _complete(item: Item) -> Item:
    """Completes each leaf from its array's own metadata and `array_metadatas`."""
    found, path, saved = item.found, item.path, item.tree
    described = names.TREE_METADATA in found.entries(path)
    impls = _read_key_impls(found, path)
    wanted = [leaf for leaf in saved.leaves if leaf.has_array]
    key = arrays.metadata_key(saved.zarr_version)
    # The oldest checkpoints have texts in the leaves' directories, beside a database too.
    for leaf in wanted if not (item.database and described) else ():
        _refuse_escape(leaf, found, path)
    keys = [leaf.prefix + key for leaf in wanted]
    stored = _read_keys(found, path, keys, item.database) if keys else []
    metadata = {leaf.name: data for leaf, data in zip(wanted, stored, strict=True)}
    texts: dict[str, str] = {}
    if not described and None in stored:
        texts = _very_old_strings(found, path, [leaf.name for leaf in wanted])
    leaves = [
        leaf
        if not leaf.has_array
        else leaf._replace(kind="str", value=texts[leaf.name])
        if metadata[leaf.name] is None and leaf.name in texts
        else _complete_leaf(leaf, metadata[leaf.name], impls.get(leaf.name), item, key)
        for leaf in saved.leaves
    ]
    return replace(item, tree=replace(saved, leaves=tuple(leaves)))


def _read_keys(
    found: Found, path: str, keys: Sequence[str], database: bool
) -> Sequence[bytes | None]:
    from jaxckpt.storage._arrays import data_errors

    with data_errors(path):
        reader = reader_of(found, path, database=database)
        return reader.values([(key, None) for key in keys])


def _complete_leaf(leaf: Leaf, data: bytes | None, impl: str | None, item: Item, key: str) -> Leaf:
    file = f"{item.path}/{leaf.prefix}{key}"
    if data is None:
        raise bad_leaf(leaf, file, "the tree lists it, but its array is missing")
    try:
        data = item.found.read(*posixpath.split(file), data)
        stored = arrays.decode_metadata(data, item.tree.zarr_version, leaf=leaf.text, file=file)
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"leaf {leaf.text}: {error}", leaf=leaf.text, file=file) from error
    arrays.check_foreign(stored, leaf=leaf.text, file=file)
    kind, shape = leaf.kind, stored.shape
    if impl is not None and kind == "array" and shape:
        return leaf._replace(
            kind="key", dtype=f"key<{impl}>", shape=shape[:-1], key_impl=impl, stored=stored
        )
    if recorded := item.tree.kinds.get(leaf.name):
        kind = recorded
    elif kind == "generic":
        # Orbax restores every scalar as a Python number.
        kind = _python_kind(np.dtype(arrays.dtype_of(stored.dtype)))
    leaf = leaf._replace(kind=kind, dtype=stored.dtype, shape=shape, stored=stored)
    if recorded and (problem := arrays.leaf_problem(leaf, stored)):
        raise bad_leaf(leaf, f"{item.path}/{names.TREE_METADATA}", problem)
    return leaf


def _python_kind(dtype: np.dtype[Any]) -> tree.LeafKind:
    kinds: dict[str, tree.LeafKind] = {"b": "bool", "i": "int", "u": "int", "c": "complex"}
    return kinds.get(dtype.kind, "float")


def _refuse_escape(leaf: Leaf, found: Found, path: str) -> None:
    """Refuses a leaf whose files lie elsewhere or are links; TensorStore follows links."""
    parts = leaf.name.removesuffix("/").split("/")
    if ".." in parts or leaf.name.startswith("/") or "\0" in leaf.name:
        raise bad_leaf(leaf, path, "its name points outside the checkpoint")
    folder = path
    for part in parts if leaf.name else ():
        _refuse_link(leaf, found, folder, part)
        folder = f"{folder}/{part}"
        if part not in found.entries(folder.rpartition("/")[0]):
            return
    below = [folder]
    while below:
        folder = below.pop()
        for name, entry in found.entries(folder).items():
            _refuse_link(leaf, found, folder, name)
            if entry.kind == "dir":
                below.append(f"{folder}/{name}")


def _refuse_link(leaf: Leaf, found: Found, folder: str, name: str) -> None:
    entry = found.entries(folder).get(name)
    if entry is not None and entry.kind == "other":
        raise special_file(f"{folder}/{name}", leaf.text)


def _read_key_impls(found: Found, path: str) -> dict[str, str]:
    impls: dict[str, str] = {}
    folder = f"{path}/{names.ARRAY_METADATAS}"
    is_there = found.contents(path).get(names.ARRAY_METADATAS) == "dir"
    for name in found.contents(folder) if is_there else ():
        if name.startswith("process_"):
            impls |= step.decode_key_impls(found.read(folder, name), file=f"{folder}/{name}")
    return impls


# --- trees in msgpack, or known only by the names of their arrays ----------------------------


def _msgpack_tree(found: Found, path: str) -> Any:  # any tree
    file = f"{path}/{names.LEGACY_TREE}"
    entry = found.entries(path).get(names.LEGACY_TREE)
    if entry is None or entry.kind != "file":
        return None
    return msgpack.decode(found.storage.read(file, max_bytes=_MAX_BYTES), file=file)


def _with_values(found: Found, path: str, saved: Tree) -> Tree:
    """Puts the values of the msgpack file into their leaves, and the names of their arrays.

    JAX of that time gave leaves of a defaultdict each other's names, also in `_METADATA`.
    """
    raw = _msgpack_tree(found, path)
    told = {} if raw is None else {leaf.path: leaf for leaf in _leaves_of(raw, (), ())}
    named = {leaf.name: leaf for leaf in saved.leaves}
    leaves = []
    for leaf in saved.leaves:
        here = told.get(leaf.path, leaf)
        if here.has_array and here.name != leaf.name:
            its = named.get(here.name, leaf)
            leaf = its._replace(path=leaf.path, key_types=leaf.key_types, alias=here.name)
        elif leaf.has_array and not here.has_array:
            leaf = here
        elif here.value is not None and leaf.kind != "empty":
            leaf = _with_value(leaf, here.value)
        if leaf.kind == "absent":
            raise bad_leaf(leaf, f"{path}/{names.LEGACY_TREE}", "its value should be here")
        leaves.append(leaf)
    return replace(saved, leaves=tuple(leaves))


def _leaves_of(node: Any, path: tuple[str, ...], kinds: tuple[int, ...]) -> list[Leaf]:
    """Returns the leaves of a msgpack tree; small values are in their leaves, others are arrays."""
    if isinstance(node, (Mapping, list)) and node:
        is_dict = isinstance(node, Mapping)
        kind = tree.NAMED if is_dict else tree.SEQUENCE
        return [
            leaf
            for key, child in (node.items() if is_dict else enumerate(node))
            for leaf in _leaves_of(child, (*path, str(key)), (*kinds, kind))
        ]
    leaf = Leaf(path=path, key_types=kinds, kind="empty", dtype="None")
    if node is None or isinstance(node, (Mapping, list)):
        word = "None" if node is None else "Dict" if isinstance(node, Mapping) else "List"
        return [leaf._replace(dtype=word)]
    if isinstance(node, msgpack.Placeholder):
        alias = None if node.name == leaf.name else node.name
        return [leaf._replace(kind="numpy", dtype="", alias=alias)]
    return [_with_value(leaf._replace(kind="absent", dtype=""), node)]


def _with_value(leaf: Leaf, value: Any) -> Leaf:  # a leaf of a msgpack tree
    if isinstance(value, (str, bytes)):
        return leaf._replace(kind="str" if isinstance(value, str) else "bytes", value=value)
    array = np.asarray(value)
    kind = leaf.kind
    if kind in ("absent", "generic"):
        # The kind that Orbax recorded, else the kind of the msgpack value.
        kind = tree.kind_of(leaf.dtype) if leaf.dtype else "numpy"
        if kind == "generic" or not isinstance(value, (np.ndarray, np.generic)):
            kind = _python_kind(array.dtype)
    return leaf._replace(kind=kind, dtype=array.dtype.name, shape=array.shape, value=array)


def _find_tree(found: Found, path: str, database: bool) -> Tree:
    """Returns the tree of an item without `_METADATA`, from its msgpack file or else its arrays."""
    raw = _msgpack_tree(found, path)
    if raw is not None:
        leaves = _leaves_of(raw, (), ())
    else:
        named = _array_names(found, path, database)
        leaves = [
            Leaf(path=parts, key_types=(tree.NAMED,) * len(parts), kind="numpy")
            for parts in (tuple(name.split(".")) for name in named)
        ]
        # An item with these files once had `_METADATA` too; without it, part of the tree is lost.
        has_newer = not _SINCE_TREE_METADATA.isdisjoint(found.entries(path))
        if has_newer and named != [names.ARRAY_ITEM_LEAF]:
            leaves = []
    if not leaves:
        what = "is missing, and no other file describes the tree"
        raise corrupt(f"{path}/{names.TREE_METADATA}", what)
    probe = next((leaf for leaf in leaves if leaf.has_array), None)
    version = 2 if probe is None else _zarr_version(found, path, probe, database)
    return Tree(leaves=tuple(leaves), zarr_version=version, uses_ocdbt=database, fill_missing=True)


def _array_names(found: Found, path: str, database: bool) -> list[str]:
    if not database:
        return array_names(found, path)
    from jaxckpt.storage._arrays import data_errors

    with data_errors(path):
        keys = reader_of(found, path, database=True).keys()
    ends = (f"/{names.ZARR2}", f"/{names.ZARR3}")
    return [key.rpartition("/")[0] for key in keys if key.endswith(ends)]


def _zarr_version(found: Found, path: str, leaf: Leaf, database: bool) -> int:
    if not database:
        return zarr_version(found, f"{path}/{leaf.name}") or 2
    return 2 if _read_keys(found, path, [leaf.prefix + names.ZARR3], database) == [None] else 3


def _very_old_strings(found: Found, path: str, leaf_names: Sequence[str]) -> dict[str, str]:
    """Returns the texts of Orbax 0.3 to 0.4.2, which keeps all of them in one file.

    It is in the directory of one leaf (0.3), or beside it.
    """
    inside = [f"{path}/{name}" for name in leaf_names]
    texts: dict[str, str] = {}
    for folder in dict.fromkeys((path, *inside, *map(posixpath.dirname, inside))):
        entry = found.entries(folder).get(names.STRINGS)
        if entry is not None and entry.kind == "file":
            file = f"{folder}/{names.STRINGS}"
            data = found.storage.read(file, max_bytes=jsontext.MAX_BYTES)
            strings = step.decode_strings(data, file=file)
            texts |= {
                name: text
                for name in leaf_names
                if isinstance(text := jsontext.find(strings, name), str)
            }
    return texts
