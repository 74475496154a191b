"""Finds the checkpoint at a path and reads its metadata: small files only, no array data.

A path may mean five things, told apart by what lies there:

    a checkpoint      `_CHECKPOINT_METADATA`, our record, or directories that are items
    an item           `_METADATA`, or a legacy `checkpoint` file, or nothing but zarr arrays
    a run's root      directories (or Flax files) whose names end in a step number
    a Flax file       `checkpoint_<step>`, msgpack
    nothing of these  an error that says what was found
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from jaxckpt.errors import CheckpointError, CheckpointNotFound, CorruptCheckpoint, UnsupportedFormat
from jaxckpt.format import arrays, jsontext, msgpack, names, sharding, step, tree
from jaxckpt.format.sharding import SavedSharding
from jaxckpt.format.step import Record, StepMetadata
from jaxckpt.format.tree import Leaf, Path, StoredArray, Tree
from jaxckpt.storage import Storage

_logger = logging.getLogger("jaxckpt")

# Small files are read whole; the tree of a million leaves is the largest that can be honest.
MAX_METADATA_BYTES: Final = jsontext.MAX_BYTES
_MAX_LEGACY_BYTES: Final = 64 << 30
_STEP: Final = re.compile(r"(?:.*_)?(\d{1,18})$")
_KEY: Final = "threefry2x32"
_SINCE_TREE_METADATA: Final = frozenset(
    {names.OCDBT_MANIFEST, names.SHARDING, names.STRINGS, names.ARRAY_METADATAS}
)
_CHECKPOINT_MARKS: Final = frozenset(
    {
        names.CHECKPOINT_METADATA,
        names.RECORD,
        names.ORBAX_MARKER,
        names.WRITER,
        names.DELETION_RECORD,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One committed checkpoint, found but for its items unread.

    Attributes:
        storage, path: Where it is. A flat checkpoint is its own only item.
        items: Paths of the items by name; a flat one is called "".
        step: What `_CHECKPOINT_METADATA` says; empty if there is none.
        record: Our own record, or None for what another program wrote.
        deleting: The item that Orbax has begun to delete; it is none of `items`.
    """

    storage: Storage
    path: str
    items: Mapping[str, str]
    step: StepMetadata = field(default_factory=StepMetadata)
    record: Record | None = None
    deleting: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One pytree, its metadata read.

    Attributes:
        checkpoint: That it belongs to.
        name, path: Of the item.
        tree: Every leaf with its shape, dtype and chunks.
        shardings: By leaf name, where recorded.
        database: Whether its arrays are in an OCDBT database; else in plain files.
        ours: Whether chunks have the bytes that `format.arrays` writes.
    """

    checkpoint: Checkpoint
    name: str
    path: str
    tree: Tree
    shardings: Mapping[str, SavedSharding]
    database: bool
    ours: bool


# --- finding ---------------------------------------------------------------------------------


def find(storage: Storage, path: str) -> Checkpoint:
    """Finds the checkpoint that a path means; for a run's root, its newest good step.

    Raises:
        CheckpointNotFound: there is none, or it is not committed.
        CorruptCheckpoint: its own metadata files are damaged.
    """
    if storage.scheme == "file":
        # Users keep links to the newest step. Inside a checkpoint no link is followed.
        path = os.path.realpath(path)
    name = posixpath.basename(path)
    kind = storage.kind(path)
    if kind is None and storage.kind(other := _sibling(path, names.replacement(name))) == "dir":
        path, kind = other, "dir"
    if kind is None:
        raise CheckpointNotFound(f"{path}: there is nothing. {_neighbours(storage, path)}")
    if kind == "file":
        return _flax_file(storage, path)
    if kind != "dir":
        raise CheckpointNotFound(f"{path} is neither a directory nor a regular file")
    if names.is_temporary(name):
        raise CheckpointNotFound(
            f"{path} was never committed: a save of it is under way, or died. "
            f"{_neighbours(storage, path)}"
        )
    return _directory(storage, path)


def _directory(storage: Storage, path: str) -> Checkpoint:
    inside = storage.names(path)
    if names.TREE_METADATA in inside or not _is_checkpoint(inside):
        around = _item_of_checkpoint(storage, path)
        if around is not None:
            return around
    if _is_checkpoint(inside):
        return read_checkpoint(storage, path, inside)
    if names.TREE_METADATA in inside or storage.kind(f"{path}/{names.LEGACY_TREE}") == "file":
        return _flat(storage, path)
    steps = _steps(storage, path, inside)
    if steps:
        return _newest_good(storage, path, steps)
    items = _items(storage, path, inside)
    if any(json_file(storage, item) is None for item in items.values()):
        return Checkpoint(storage=storage, path=path, items=items)
    is_array = any(_is_plain_array(storage, f"{path}/{name}") for name in inside)
    if is_array or _is_item(storage, path):
        return _flat(storage, path)
    found = ", ".join(inside[:8]) + (", ..." if len(inside) > 8 else "")
    raise CheckpointNotFound(
        f"{path} is no checkpoint, no item of one and no run: it holds {found or 'nothing'}. "
        f"{_neighbours(storage, path)}"
    )


def _is_checkpoint(inside: Sequence[str]) -> bool:
    return not _CHECKPOINT_MARKS.isdisjoint(inside)


def read_checkpoint(storage: Storage, path: str, inside: Sequence[str] | None = None) -> Checkpoint:
    """Reads the top files of a checkpoint directory.

    Raises:
        CheckpointNotFound: it is not committed.
        CorruptCheckpoint: a file in it is damaged.
    """
    inside = storage.names(path) if inside is None else inside
    record = None
    if names.WRITER in inside or names.RECORD in inside:
        if names.COMMIT_MARKER not in inside:
            raise CheckpointNotFound(
                f"{path} is not committed: {names.COMMIT_MARKER} is missing. A save of it is under "
                "way, or died, or it is being deleted."
            )
        record_file = f"{path}/{names.RECORD}"
        if names.RECORD not in inside:
            raise CorruptCheckpoint(f"{record_file} is missing", file=record_file)
        data = storage.read(record_file, max_bytes=MAX_METADATA_BYTES)
        record = step.decode_record(data, file=record_file)
        _refuse_holes(record, path, path, inside)
    metadata = StepMetadata()
    if names.CHECKPOINT_METADATA in inside:
        file = f"{path}/{names.CHECKPOINT_METADATA}"
        data = _read_checked(storage, path, names.CHECKPOINT_METADATA, record)
        metadata = step.decode(data, file=file)
    deleting = None
    if names.DELETION_RECORD in inside:
        file = f"{path}/{names.DELETION_RECORD}"
        deleting = step.decode_deletion(storage.read(file, max_bytes=MAX_METADATA_BYTES), file=file)
    items = _items(storage, path, inside)
    if names.TREE_METADATA in inside:
        items = {"": path}
    if not items:
        raise CorruptCheckpoint(f"{path}: a checkpoint without items: it holds {inside}", file=path)
    return Checkpoint(
        storage=storage,
        path=path,
        items={name: where for name, where in items.items() if name != deleting},
        step=metadata,
        record=record,
        deleting=deleting,
    )


def _item_of_checkpoint(storage: Storage, path: str) -> Checkpoint | None:
    """The checkpoint that the directory is an item of, with that item alone; None if it is not."""
    parent, name = posixpath.split(path)
    if names.is_temporary(posixpath.basename(parent)):
        raise CheckpointNotFound(
            f"{path} is in a checkpoint that was never committed: its save is under way, or died"
        )
    if not any(storage.kind(f"{parent}/{mark}") == "file" for mark in _CHECKPOINT_MARKS):
        return None
    try:
        around = read_checkpoint(storage, parent)
    except CorruptCheckpoint:
        if storage.kind(f"{parent}/{names.RECORD}") is not None:
            raise
        # Orbax does not make these files durable; the item itself may well be whole.
        return None
    if name == around.deleting:
        raise _being_deleted(around)
    return replace(around, items={name: path}) if name in around.items else None


def _being_deleted(checkpoint: Checkpoint) -> CheckpointNotFound:
    return CheckpointNotFound(
        f"{checkpoint.path}: Orbax has begun to delete item {checkpoint.deleting!r}, and part of "
        f"it may be gone ({names.DELETION_RECORD} is there). It has "
        f"{', '.join(checkpoint.items) or 'no other item'}."
    )


def _flat(storage: Storage, path: str) -> Checkpoint:
    return Checkpoint(storage=storage, path=path, items={"": path})


def _flax_file(storage: Storage, path: str) -> Checkpoint:
    if path.endswith((".safetensors", ".npz", ".pt", ".pkl")):
        raise UnsupportedFormat(f"{path} is no checkpoint directory, and no Flax msgpack file")
    return Checkpoint(storage=storage, path=path, items={"": path})


def _items(storage: Storage, path: str, inside: Sequence[str]) -> dict[str, str]:
    return {
        name: f"{path}/{name}"
        for name in inside
        if not names.is_temporary(name)
        and storage.kind(f"{path}/{name}") == "dir"
        and _is_item(storage, f"{path}/{name}")
    }


def _is_item(storage: Storage, path: str) -> bool:
    inside = storage.names(path)
    marks = {names.TREE_METADATA, names.LEGACY_TREE, names.OCDBT_MANIFEST}
    is_tree = _key_folder(inside) is not None or not marks.isdisjoint(inside)
    return is_tree or _json_file_in(storage, path, inside) is not None


def _json_file_in(storage: Storage, path: str, inside: Collection[str]) -> str | None:
    # In a run's root there may be a directory of such a name.
    files = (f"{path}/{name}" for name in names.JSON_ITEM_FILES if name in inside)
    return next((file for file in files if storage.kind(file) == "file"), None)


def _key_folder(inside: Collection[str]) -> str | None:
    """The data of an item that is a random key, which Orbax keeps in a directory of its own."""
    return next((n for n in (names.JAX_KEY_ITEM, names.NUMPY_KEY_ITEM) if n in inside), None)


def _is_plain_array(storage: Storage, path: str) -> bool:
    return storage.kind(path) == "dir" and any(
        storage.kind(f"{path}/{key}") == "file" for key in (names.ZARR2, names.ZARR3)
    )


def _steps(storage: Storage, path: str, inside: Sequence[str]) -> list[str]:
    """What looks like a step of a run, newest first."""
    found = []
    for name in inside:
        kind = storage.kind(f"{path}/{name}")
        number = _STEP.fullmatch(name)
        if kind == "dir" and number and not names.is_temporary(name):
            found.append((float(number[1]), name))
        elif kind == "file" and (flax := names.flax_step(name)) is not None:
            found.append((flax, name))
    return [name for _, name in sorted(found, reverse=True)]


def _newest_good(storage: Storage, path: str, steps: Sequence[str]) -> Checkpoint:
    problems = []
    for name in steps:
        try:
            checkpoint = find(storage, f"{path}/{name}")
        except CheckpointError as error:
            problems.append(f"{name}: {error}")
            continue
        for problem in problems:
            _logger.warning("skipped a step of %s: %s", path, problem)
        return checkpoint
    raise CheckpointNotFound(
        f"{path}: none of its {len(steps)} steps can be read:\n  " + "\n  ".join(problems[:10])
    )


def _sibling(path: str, name: str) -> str:
    return posixpath.join(posixpath.dirname(path), name)


def _neighbours(storage: Storage, path: str) -> str:
    parent = posixpath.dirname(path)
    if storage.kind(parent) != "dir":
        return f"{parent} does not exist either."
    near = [name for name in storage.names(parent) if not names.is_temporary(name)]
    return f"{parent} holds: {', '.join(near[:8]) or 'nothing'}{', ...' if len(near) > 8 else ''}."


def choose_item(checkpoint: Checkpoint, item: str | None) -> str:
    """The name of the item to restore: the one asked for, the only tree, `state`, or `default`."""
    storage, items = checkpoint.storage, checkpoint.items
    if checkpoint.deleting is not None and (item == checkpoint.deleting or not items):
        raise _being_deleted(checkpoint)
    if item is not None:
        if item not in items:
            raise CheckpointNotFound(
                f"{checkpoint.path} has no item {item!r}; it has {', '.join(items)}"
            )
        return item
    trees = [
        name
        for name, path in items.items()
        if name != names.METRICS_ITEM and json_file(storage, path) is None
    ]
    if len(trees) > 1:
        trees = [name for name in trees if not _is_random_key(storage, items[name])]
    if len(items) == 1 or len(trees) == 1:
        return next(iter(trees or items))
    for name in (names.STATE_ITEM, names.DEFAULT_ITEM):
        if name in trees:
            return name
    raise CheckpointNotFound(
        f"{checkpoint.path} has several items, and none is called {names.STATE_ITEM!r}: "
        f"{', '.join(items)}. Say which: restore(path, item=...)."
    )


def _is_random_key(storage: Storage, path: str) -> bool:
    return storage.kind(path) == "dir" and _key_folder(storage.names(path)) is not None


def json_file(storage: Storage, path: str) -> str | None:
    """The file of a JSON item, None if the item is a tree."""
    if storage.kind(path) == "file":
        return None
    inside = storage.names(path)
    if names.TREE_METADATA in inside or names.LEGACY_TREE in inside or _key_folder(inside):
        return None
    return _json_file_in(storage, path, inside)


def read_json_item(checkpoint: Checkpoint, file: str) -> Any:  # JSON
    """The value of a JSON item."""
    relative = posixpath.relpath(file, checkpoint.path)
    data = _read_checked(checkpoint.storage, checkpoint.path, relative, checkpoint.record)
    return jsontext.loads(data, file=file)


# --- reading an item -------------------------------------------------------------------------


def read_item(checkpoint: Checkpoint, name: str) -> Item:
    """Reads everything about a tree but its array data.

    Raises:
        CorruptCheckpoint: a metadata file is missing or damaged; it is named.
        UnsupportedFormat: something newer wrote it.
    """
    storage, path = checkpoint.storage, checkpoint.items[name]
    if storage.kind(path) == "file":
        return _read_flax(checkpoint, name, path)
    folder = _key_folder(storage.names(path))
    if folder is not None:
        return _read_random_key(checkpoint, name, folder)
    item = _read_tree_item(checkpoint, name, path)
    is_array = step.is_array_handler(checkpoint.step.handlers.get(name, ""))
    return _bare(item) if is_array or _looks_bare(item) else item


def _refuse_holes(record: Record | None, base: str, path: str, inside: Collection[str]) -> None:
    """Refuses a directory that lacks an entry of our record: it may change what the others mean."""
    prefix = "" if path == base else posixpath.relpath(path, base) + "/"
    for file in record.files if record is not None else ():
        name = file.removeprefix(prefix).partition("/")[0]
        if file.startswith(prefix) and name not in inside:
            raise CorruptCheckpoint(
                f"{path}/{name} is missing. Restore an older checkpoint.", file=f"{path}/{name}"
            )


def _read_tree_item(checkpoint: Checkpoint, name: str, path: str) -> Item:
    inside = set(checkpoint.storage.names(path))
    _refuse_holes(checkpoint.record, checkpoint.path, path, inside)
    data_bytes = _refuse_links(checkpoint.storage, path, inside)
    database = names.OCDBT_MANIFEST in inside
    shardings = _read_shardings(checkpoint, path, inside)
    if names.TREE_METADATA in inside:
        saved, ours = _read_tree(checkpoint, path, inside, data_bytes)
        if saved.uses_ocdbt and not database and any(leaf.has_array for leaf in saved.leaves):
            file = f"{path}/{names.OCDBT_MANIFEST}"
            raise CorruptCheckpoint(f"{file} is missing, and with it every array", file=file)
        database = database and saved.uses_ocdbt is not False
    else:
        saved, ours = _read_legacy(checkpoint.storage, path, inside, database), False
        saved = _with_kinds(saved, shardings)
    item = Item(
        checkpoint=checkpoint,
        name=name,
        path=path,
        tree=saved,
        shardings=shardings,
        database=database,
        ours=ours,
    )
    return item if ours else _complete(item, inside)


def _read_random_key(checkpoint: Checkpoint, name: str, folder: str) -> Item:
    """An item of JaxRandomKeySave or NumpyRandomKeySave: the data, and a file that says of what."""
    path = checkpoint.items[name]
    item = _read_tree_item(checkpoint, name, f"{path}/{folder}")
    file = names.key_facts(folder)
    said = step.decode_key_facts(_read_part(checkpoint, path, file), file=f"{path}/{file}")
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


def _read_checked(storage: Storage, base: str, relative: str, record: Record | None) -> bytes:
    """Reads a small file of a checkpoint, and compares it with our record if there is one."""
    file = f"{base}/{relative}"
    try:
        data = storage.read(file, max_bytes=MAX_METADATA_BYTES)
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{file} is missing", file=file) from error
    facts = None if record is None else record.files.get(relative)
    if facts is not None and (facts.size != len(data) or facts.sha256 != step.digest(data)):
        raise CorruptCheckpoint(
            f"{file} is damaged: {len(data)} bytes that differ from the {facts.size} that were "
            "written. Restore an older checkpoint.",
            file=file,
        )
    return data


def _read_part(checkpoint: Checkpoint, path: str, name: str) -> bytes:
    relative = posixpath.relpath(f"{path}/{name}", checkpoint.path)
    return _read_checked(checkpoint.storage, checkpoint.path, relative, checkpoint.record)


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
    saved = tree.decode(_read_part(checkpoint, path, names.TREE_METADATA), file=file)
    strings: Mapping[str, Any] = {}
    strings_file = f"{path}/{names.STRINGS}"
    if names.STRINGS in inside:
        strings = step.decode_strings(
            _read_part(checkpoint, path, names.STRINGS), file=strings_file
        )
    values = _legacy_values(checkpoint.storage, path, inside)
    leaves = []
    for leaf in saved.leaves:
        value = values.get(leaf.path)
        if value is not None and leaf.kind != "empty":
            leaves.append(_with_value(leaf, value))
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
    return sharding.decode(_read_part(checkpoint, path, names.SHARDING), file=file)


def _complete(item: Item, inside: set[str]) -> Item:
    """Adds to each leaf what only the arrays' own metadata, and `array_metadatas`, say."""
    from jaxckpt.storage._arrays import Reader, value_of

    storage, path, saved = item.checkpoint.storage, item.path, item.tree
    impls = _read_key_impls(storage, path, inside)
    wanted = [leaf for leaf in saved.leaves if leaf.has_array]
    found: dict[str, bytes | None] = {}
    key = arrays.metadata_key(saved.zarr_version)
    if wanted:
        for leaf in wanted if not item.database else ():
            _refuse_escape(leaf, storage, path)
        with data_errors(path, None):
            reader = Reader(storage.kvstore(path), database=item.database)
            reads = {leaf.name: reader.get(array_prefix(leaf.name) + key) for leaf in wanted}
            found = {name: value_of(read.result()) for name, read in reads.items()}
    texts: dict[str, str] = {}
    if names.TREE_METADATA not in inside and None in found.values():
        texts = _very_old_strings(storage, path, [leaf.name for leaf in wanted])
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
    file = f"{item.path}/{array_prefix(leaf.name)}{key}"
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


def array_prefix(name: str) -> str:
    """The prefix of an array's keys; the array of a bare leaf has none."""
    return f"{name}/" if name else ""


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


def _very_old_strings(storage: Storage, path: str, leaf_names: Sequence[str]) -> dict[str, str]:
    """The texts of Orbax 0.3: all in one file, which lies in the directory of one of the leaves."""
    texts: dict[str, str] = {}
    for name in leaf_names:
        file = f"{path}/{name}/{names.STRINGS}"
        if storage.kind(file) == "file":
            data = storage.read(file, max_bytes=MAX_METADATA_BYTES)
            found = step.decode_strings(data, file=file)
            texts |= {k: step.find_string(found, k, file=file) for k in leaf_names if k in found}
    return texts


def _read_key_impls(storage: Storage, path: str, inside: set[str]) -> dict[str, str]:
    impls: dict[str, str] = {}
    folder = f"{path}/{names.ARRAY_METADATAS}"
    if names.ARRAY_METADATAS in inside and storage.kind(folder) == "dir":
        for name in storage.names(folder):
            if name.startswith("process_"):
                data = storage.read(f"{folder}/{name}", max_bytes=MAX_METADATA_BYTES)
                impls |= step.decode_key_impls(data, file=f"{folder}/{name}")
    return impls


# --- legacy ----------------------------------------------------------------------------------


def _legacy_tree(storage: Storage, path: str, inside: set[str]) -> Any:  # any tree
    file = f"{path}/{names.LEGACY_TREE}"
    if names.LEGACY_TREE not in inside or storage.kind(file) != "file":
        return None
    return msgpack.decode(storage.read(file, max_bytes=_MAX_LEGACY_BYTES), file=file)


def _legacy_values(storage: Storage, path: str, inside: set[str]) -> dict[tuple[str, ...], Any]:
    """The values that lie in the msgpack file itself, by path."""
    leaves = _legacy_leaves(_legacy_tree(storage, path, inside), (), ())
    return {leaf.path: leaf.value for leaf in leaves if leaf.value is not None}


def _legacy_leaves(node: Any, path: tuple[str, ...], kinds: tuple[int, ...]) -> list[Leaf]:
    if isinstance(node, Mapping) and node:
        return [
            leaf
            for key, child in node.items()
            for leaf in _legacy_leaves(child, (*path, str(key)), (*kinds, tree.NAMED))
        ]
    if isinstance(node, list) and node:
        return [
            leaf
            for i, child in enumerate(node)
            for leaf in _legacy_leaves(child, (*path, str(i)), (*kinds, tree.SEQUENCE))
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
    return [_with_value(replace(leaf, kind="absent", dtype=""), node)]


def _with_value(leaf: Leaf, value: Any) -> Leaf:  # a leaf of a msgpack tree
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


def _read_legacy(storage: Storage, path: str, inside: set[str], database: bool) -> Tree:
    """An item without `_METADATA`: the msgpack file says the tree, else the names of the arrays."""
    raw = _legacy_tree(storage, path, inside)
    if raw is not None:
        leaves = _legacy_leaves(raw, (), ())
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
    version = 2 if probe is None else _zarr_version(storage, path, probe.name, database)
    return Tree(leaves=tuple(leaves), zarr_version=version, uses_ocdbt=database, fill_missing=True)


def _array_names(storage: Storage, path: str, inside: set[str], database: bool) -> list[str]:
    if not database:
        return sorted(name for name in inside if _is_plain_array(storage, f"{path}/{name}"))
    from jaxckpt.storage._arrays import Reader

    with data_errors(path, None):
        keys = Reader(storage.kvstore(path), database=True).keys()
    ends = (f"/{names.ZARR2}", f"/{names.ZARR3}")
    return [key.rpartition("/")[0] for key in keys if key.endswith(ends)]


def _zarr_version(storage: Storage, path: str, name: str, database: bool) -> int:
    if not database:
        return 3 if storage.kind(f"{path}/{name}/{names.ZARR3}") == "file" else 2
    from jaxckpt.storage._arrays import Reader, value_of

    with data_errors(path, None):
        read = Reader(storage.kvstore(path), database=True).get(
            f"{array_prefix(name)}{names.ZARR3}"
        )
        return 2 if value_of(read.result()) is None else 3


def _read_flax(checkpoint: Checkpoint, name: str, path: str) -> Item:
    """A file of `flax.training.checkpoints`; its multi-host arrays lie in a directory beside it."""
    data = checkpoint.storage.read(path, max_bytes=_MAX_LEGACY_BYTES)
    leaves = _legacy_leaves(msgpack.decode(data, file=path), (), ())
    item = Item(
        checkpoint=checkpoint,
        name=name,
        path=f"{path}_gda",
        tree=Tree(leaves=tuple(leaves), zarr_version=2, uses_ocdbt=False, fill_missing=True),
        shardings={},
        database=False,
        ours=False,
    )
    return _complete(item, set())


class data_errors:  # reads as a verb: `with data_errors(path, leaf):`
    """Turns what TensorStore raises about stored data into `CorruptCheckpoint` with its place."""

    def __init__(self, path: str, leaf: str | None) -> None:
        self._path, self._leaf = path, leaf

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CheckpointError) or not isinstance(error, (ValueError, OSError)):
            return
        file = _file_in(str(error), self._path)
        where = f"leaf {self._leaf}: " if self._leaf else ""
        raise CorruptCheckpoint(
            f"{file}: {where}stored data cannot be read: {error}", leaf=self._leaf, file=file
        ) from error


def _file_in(message: str, path: str) -> str:
    """The file that a message names, if it is one of the checkpoint's."""
    found = re.search(re.escape(path) + r"[^\s\"':,\]]*", message)
    return found[0] if found else path


def stored_of(leaf: Leaf) -> StoredArray:
    """How a leaf with an array lies on disk."""
    if leaf.stored is None:
        raise CorruptCheckpoint(f"leaf {leaf.text} has no array", leaf=leaf.text)
    return leaf.stored
