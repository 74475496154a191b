"""Reads everything about one tree but its array data: leaves, kinds, shapes, chunks, shardings.

Of what jaxckpt wrote, `_METADATA` says all of it, and all of it is checked against the record and
the files before anything is allocated. Of what Orbax and Flax wrote, the arrays' own metadata say
the rest.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final

import numpy as np

from jaxckpt._disk import foreign as _legacy
from jaxckpt._disk.checksums import ChunkSums
from jaxckpt._disk.find import Checkpoint, key_folder, read_part, refuse_holes
from jaxckpt.errors import CorruptCheckpoint
from jaxckpt.format import arrays, jsontext, names, sharding, step, tree
from jaxckpt.format.sharding import SavedSharding
from jaxckpt.format.tree import Leaf, Path, Tree
from jaxckpt.storage import Storage

_KEY: Final = "threefry2x32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One pytree, its metadata read.

    Attributes:
        checkpoint: That it belongs to.
        name, path: Of the item.
        tree: Every leaf with its shape, dtype and chunks.
        read_shardings: Reads the shardings, once: who says where all arrays go needs none.
        read_sums: Reads the checksums of all chunks, once; None where they were not recorded.
        database: Whether its arrays are in an OCDBT database; else in plain files.
        ours: Whether chunks have the bytes that `format.arrays` writes.
    """

    checkpoint: Checkpoint
    name: str
    path: str
    tree: Tree
    read_shardings: Callable[[], Mapping[str, SavedSharding]]
    read_sums: Callable[[], ChunkSums | None]
    database: bool
    ours: bool

    @property
    def shardings(self) -> Mapping[str, SavedSharding]:
        """By leaf name, where recorded."""
        return self.read_shardings()


def read_item(checkpoint: Checkpoint, name: str) -> Item:
    """Reads everything about a tree but its array data.

    Raises:
        CorruptCheckpoint: a metadata file is missing or damaged; it is named.
        UnsupportedFormat: something newer wrote it.
    """
    storage, path = checkpoint.storage, checkpoint.items[name]
    if storage.kind(path) == "file":
        return _read_flax(checkpoint, name, path)
    folder = key_folder(storage.names(path))
    if folder is not None:
        return _read_random_key(checkpoint, name, folder)
    item = _read_tree_item(checkpoint, name, path)
    is_array = step.is_array_handler(checkpoint.step.handlers.get(name, ""))
    return _bare(item) if is_array or _looks_bare(item) else item


def _read_tree_item(checkpoint: Checkpoint, name: str, path: str) -> Item:
    inside = set(checkpoint.storage.names(path))
    refuse_holes(checkpoint.storage, checkpoint.record, checkpoint.path, path, inside)
    data_bytes = _refuse_links(checkpoint.storage, path, inside)
    database = names.OCDBT_MANIFEST in inside
    read_shardings = cache(partial(_read_shardings, checkpoint, path, inside))
    if names.TREE_METADATA in inside:
        saved, ours = _read_tree(checkpoint, path, inside, data_bytes)
        if saved.uses_ocdbt and not database and any(leaf.has_array for leaf in saved.leaves):
            file = f"{path}/{names.OCDBT_MANIFEST}"
            raise CorruptCheckpoint(f"{file} is missing, and with it every array", file=file)
        database = database and saved.uses_ocdbt is not False
    else:
        saved, ours = _legacy.read_tree(checkpoint.storage, path, inside, database), False
        saved = _with_kinds(saved, read_shardings())
    item = Item(
        checkpoint=checkpoint,
        name=name,
        path=path,
        tree=saved,
        read_shardings=read_shardings,
        read_sums=cache(partial(_read_sums, checkpoint, path, saved)),
        database=database,
        ours=ours,
    )
    return item if ours else _complete(item, inside)


def _read_sums(checkpoint: Checkpoint, path: str, saved: Tree) -> ChunkSums | None:
    file = f"{path}/{names.CHUNK_SUMS}"
    recorded = checkpoint.record.files if checkpoint.record is not None else {}
    if posixpath.relpath(file, checkpoint.path) not in recorded:
        return None
    return ChunkSums(saved.leaves, read_part(checkpoint, path, names.CHUNK_SUMS), file=file)


def _read_random_key(checkpoint: Checkpoint, name: str, folder: str) -> Item:
    """An item of JaxRandomKeySave or NumpyRandomKeySave: the data, and a file that says of what."""
    path = checkpoint.items[name]
    if checkpoint.storage.kind(data := f"{path}/{folder}") != "dir":
        raise CorruptCheckpoint(f"{data} is not a directory", file=data)
    item = _read_tree_item(checkpoint, name, data)
    file = names.key_facts(folder)
    said = step.decode_key_facts(read_part(checkpoint, path, file), file=f"{path}/{file}")
    if folder == names.JAX_KEY_ITEM:
        item = _bare(item)
        leaf = item.tree.leaves[0]
        # The implementation is not recorded. Of those that jax has, only the default has two words.
        if said and leaf.stored is not None and leaf.shape[-1:] == (2,):
            leaf = replace(
                leaf, kind="key", dtype=f"key<{_KEY}>", key_impl=_KEY, shape=leaf.shape[:-1]
            )
        return replace(item, tree=replace(item.tree, leaves=(leaf,)))
    if not said:
        return item
    children = tuple(leaf.path[0] for leaf in item.tree.leaves)
    root = tree.Node(type="tuple", names=children, children=(None,) * len(children))
    return replace(item, tree=replace(item.tree, root=root, typed=True))


def _looks_bare(item: Item) -> bool:
    """Whether it is what ArraySave wrote before there were files that say so."""
    inside = item.checkpoint.storage.names(item.path)
    if names.TREE_METADATA in inside or len(item.tree.leaves) != 1:
        return False
    leaf = item.tree.leaves[0]
    name = names.ARRAY_ITEM_LEAF if leaf.value is None else names.ARRAY_ITEM_VALUE
    return leaf.path == (name,) and not item.database


def _bare(item: Item) -> Item:
    """The item as a tree that is one leaf."""
    if len(item.tree.leaves) != 1:
        raise CorruptCheckpoint(f"{item.path} should be one array", file=item.path)
    leaf = item.tree.leaves[0]
    bare = replace(leaf, path=(), key_types=(), alias=leaf.name)
    return replace(item, tree=replace(item.tree, leaves=(bare,), root=None, typed=True))


def _with_kinds(saved: Tree, shardings: Mapping[str, SavedSharding]) -> Tree:
    """Arrays of a tree that does not say what they are: jax's, if a sharding is recorded."""
    leaves = tuple(
        replace(leaf, kind="array") if leaf.has_array and leaf.name in shardings else leaf
        for leaf in saved.leaves
    )
    return replace(saved, leaves=leaves)


def subtree(item: Item, path: Path) -> Item:
    """The part of a tree below `path`, as an item of its own; a leaf is a tree of one.

    Raises:
        KeyError: nothing is there.
    """
    depth = len(path)
    leaves = tuple(
        replace(leaf, path=leaf.path[depth:], key_types=leaf.key_types[depth:], alias=leaf.name)
        for leaf in item.tree.leaves
        if leaf.path[:depth] == path
    )
    if not leaves:
        raise KeyError(f"{item.path} has nothing at {tree.path_text(path)!r}")
    root = item.tree.root
    for name in path:
        root = None if root is None else dict(zip(root.names, root.children, strict=True)).get(name)
    return replace(item, tree=replace(item.tree, leaves=leaves, root=root))


def _refuse_links(storage: Storage, path: str, inside: set[str]) -> int:
    """Data files are opened by TensorStore, which follows links; there must be none.

    Returns:
        How many bytes the files have in all.
    """
    total = 0
    folders = [""] + [
        n for n in inside if n == names.OCDBT_DATA or n.startswith(names.OCDBT_PROCESS)
    ]
    folders += [f"{n}/{names.OCDBT_DATA}" for n in inside if n.startswith(names.OCDBT_PROCESS)]
    for folder in folders:
        base = posixpath.join(path, folder).rstrip("/")
        if storage.kind(base) not in ("dir", None):
            raise CorruptCheckpoint(f"{base} is not a directory", file=base)
        for name in storage.names(base) if storage.kind(base) == "dir" else ():
            kind = storage.kind(f"{base}/{name}")
            if kind == "file":
                total += storage.size(f"{base}/{name}")
            elif kind != "dir":
                raise CorruptCheckpoint(
                    f"{base}/{name} is a link or a special file; a checkpoint has none",
                    file=f"{base}/{name}",
                )
    return total


def _read_tree(
    checkpoint: Checkpoint, path: str, inside: set[str], data_bytes: int
) -> tuple[Tree, bool]:
    file = f"{path}/{names.TREE_METADATA}"
    saved = tree.decode(read_part(checkpoint, path, names.TREE_METADATA), file=file)
    strings: Mapping[str, Any] = {}
    strings_file = f"{path}/{names.STRINGS}"
    if names.STRINGS in inside:
        strings = step.decode_strings(read_part(checkpoint, path, names.STRINGS), file=strings_file)
    values = _legacy.values(checkpoint.storage, path, inside)
    leaves = []
    for leaf in saved.leaves:
        value = values.get(leaf.path)
        if value is not None and leaf.kind != "empty":
            leaves.append(_legacy.with_value(leaf, value))
        elif leaf.kind == "absent":
            raise CorruptCheckpoint(
                f"{path}: the value of leaf {leaf.text} should be in {names.LEGACY_TREE}",
                leaf=leaf.text,
                file=f"{path}/{names.LEGACY_TREE}",
            )
        elif (
            leaf.kind in ("str", "int")
            and leaf.stored is None
            and (saved.typed or leaf.kind == "str")
        ):
            text = step.find_string(strings, leaf.name, file=strings_file)
            leaves.append(replace(leaf, value=text))
        else:
            leaves.append(leaf)
    ours = saved.typed and all(leaf.stored is not None for leaf in leaves if leaf.has_array)
    if ours:
        _check_ours(saved, leaves, max(data_bytes, _recorded(checkpoint, path, data_bytes)), file)
    if ours and checkpoint.record is None and checkpoint.path != path:
        record_file = f"{checkpoint.path}/{names.RECORD}"
        raise CorruptCheckpoint(f"{record_file} is missing", file=record_file)
    return replace(saved, leaves=tuple(leaves)), ours


def _recorded(checkpoint: Checkpoint, path: str, data_bytes: int) -> int:
    """How many bytes there were, so that a lost file is told by the leaves that were in it.

    No more than a host can spare: a record that lies must not have memory allocated, either.
    """
    files = checkpoint.record.files if checkpoint.record is not None else {}
    prefix = posixpath.relpath(path, checkpoint.path) + "/"
    recorded = sum(facts.size for name, facts in files.items() if name.startswith(prefix))
    return min(recorded, 16 * data_bytes + (1 << 30))


def _check_ours(saved: Tree, leaves: Sequence[Leaf], data_bytes: int, file: str) -> None:
    on_disk = [(leaf, leaf.stored) for leaf in leaves if leaf.stored is not None]
    for leaf, stored in on_disk:
        arrays.check_leaf(leaf, stored, file=file)
    arrays.check_total(on_disk, data_bytes=data_bytes, file=file)
    if on_disk and not (saved.uses_ocdbt and saved.zarr_version == 3 and not saved.fill_missing):
        raise CorruptCheckpoint(f"{file}: jaxckpt writes no arrays of this kind", file=file)


def _read_shardings(
    checkpoint: Checkpoint, path: str, inside: set[str]
) -> dict[str, SavedSharding]:
    if names.SHARDING not in inside:
        return {}
    file = f"{path}/{names.SHARDING}"
    return sharding.decode(read_part(checkpoint, path, names.SHARDING), file=file)


def _complete(item: Item, inside: set[str]) -> Item:
    """Adds to each leaf what only the arrays' own metadata, and `array_metadatas`, say."""
    from jaxckpt.storage._arrays import Reader, data_errors, value_of

    storage, path, saved = item.checkpoint.storage, item.path, item.tree
    impls = _read_key_impls(storage, path, inside)
    wanted = [leaf for leaf in saved.leaves if leaf.has_array]
    found: dict[str, bytes | None] = {}
    key = arrays.metadata_key(saved.zarr_version)
    if wanted:
        # The oldest checkpoints have texts in the leaves' directories, beside a database too.
        if not item.database or names.TREE_METADATA not in inside:
            for leaf in wanted:
                _refuse_escape(leaf, storage, path)
        with data_errors(path, None):
            reader = Reader(storage.kvstore(path), database=item.database)
            reads = {leaf.name: reader.get(leaf.prefix + key) for leaf in wanted}
            found = {name: value_of(read.result()) for name, read in reads.items()}
    texts: dict[str, str] = {}
    if names.TREE_METADATA not in inside and None in found.values():
        texts = _legacy.very_old_strings(storage, path, [leaf.name for leaf in wanted])
    leaves = [
        replace(leaf, kind="str", value=texts[leaf.name])
        if leaf.has_array and found[leaf.name] is None and leaf.name in texts
        else _complete_leaf(leaf, found[leaf.name], impls.get(leaf.name), item, key)
        if leaf.has_array
        else leaf
        for leaf in saved.leaves
    ]
    return replace(item, tree=replace(saved, leaves=tuple(leaves)))


def _complete_leaf(leaf: Leaf, data: bytes | None, impl: str | None, item: Item, key: str) -> Leaf:
    file = f"{item.path}/{leaf.prefix}{key}"
    if data is None:
        raise CorruptCheckpoint(
            f"{file}: leaf {leaf.text} is listed in the tree, but its array is missing",
            leaf=leaf.text,
            file=file,
        )
    try:
        stored = arrays.decode_metadata(data, item.tree.zarr_version, leaf=leaf.text, file=file)
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"leaf {leaf.text}: {error}", leaf=leaf.text, file=file) from error
    arrays.check_foreign(stored, leaf=leaf.text, file=file)
    kind, shape = leaf.kind, stored.shape
    if impl is not None and kind == "array" and shape:
        return replace(
            leaf, kind="key", dtype=f"key<{impl}>", shape=shape[:-1], key_impl=impl, stored=stored
        )
    if kind == "generic":
        # Orbax gives scalars back as Python's, whatever they were.
        number = np.dtype(arrays.dtype_of(stored.dtype)).kind
        kind = {"b": "bool", "i": "int", "u": "int", "c": "complex"}.get(number, "float")
    return replace(leaf, kind=kind, dtype=stored.dtype, shape=shape, stored=stored)


def _refuse_escape(leaf: Leaf, storage: Storage, path: str) -> None:
    """Plain files lie at the leaf's name; it must not lead elsewhere."""
    parts = leaf.name.split("/")
    if ".." in parts or leaf.name.startswith("/") or "\0" in leaf.name:
        raise CorruptCheckpoint(
            f"{path}: leaf {leaf.text} points outside the checkpoint", leaf=leaf.text, file=path
        )
    # Its directories, and all in the last: TensorStore follows links, and waits for a FIFO.
    places = [path, *(f"{path}/{'/'.join(parts[: i + 1])}" for i in range(len(parts)) if leaf.name)]
    below = places[-1:]
    while below:
        folder = below.pop()
        inside = storage.names(folder) if storage.kind(folder) == "dir" else []
        children = [(f"{folder}/{name}", storage.kind(f"{folder}/{name}")) for name in inside]
        below += [child for child, kind in children if kind == "dir"]
        places += [child for child, kind in children if kind == "other"]
    for place in places:
        if storage.kind(place) == "other":
            raise CorruptCheckpoint(
                f"{place} is a link or a special file; a checkpoint has none",
                leaf=leaf.text,
                file=place,
            )


def _read_key_impls(storage: Storage, path: str, inside: set[str]) -> dict[str, str]:
    impls: dict[str, str] = {}
    folder = f"{path}/{names.ARRAY_METADATAS}"
    if names.ARRAY_METADATAS in inside and storage.kind(folder) == "dir":
        for name in storage.names(folder):
            if name.startswith("process_"):
                data = storage.read(f"{folder}/{name}", max_bytes=jsontext.MAX_BYTES)
                impls |= step.decode_key_impls(data, file=f"{folder}/{name}")
    return impls


def _read_flax(checkpoint: Checkpoint, name: str, path: str) -> Item:
    """A file of `flax.training.checkpoints`; its multi-host arrays lie in a directory beside it."""
    data = checkpoint.storage.read(path, max_bytes=_legacy.MAX_BYTES)
    leaves = _legacy.leaves(data, file=path)
    item = Item(
        checkpoint=checkpoint,
        name=name,
        path=f"{path}_gda",
        tree=Tree(leaves=tuple(leaves), zarr_version=2, uses_ocdbt=False, fill_missing=True),
        read_shardings=dict,
        read_sums=lambda: None,
        database=False,
        ours=False,
    )
    return _complete(item, set())
