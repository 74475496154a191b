"""Reads the trees that jaxckpt wrote, which `_METADATA` describes completely."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final

from jaxckpt._core.text import nearest
from jaxckpt._disk import checksums
from jaxckpt._disk.checksums import Sums
from jaxckpt._disk.found import Found
from jaxckpt.errors import CorruptCheckpoint, damaged
from jaxckpt.format import arrays, names, sharding, step, tree
from jaxckpt.format.safetensors import Tensor
from jaxckpt.format.sharding import SavedSharding
from jaxckpt.format.tree import Leaf, Path, Tree, bad_leaf
from jaxckpt.storage import corrupt

_MOST_NAMES: Final = 20  # in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One pytree, its metadata read."""

    found: Found  # the checkpoint that it belongs to
    name: str
    path: str
    tree: Tree  # every leaf with its shape, dtype and chunks
    read_shardings: Callable[[], Mapping[str, SavedSharding]]  # by leaf name; reads once
    read_sums: Callable[[], Mapping[str, Sums] | None]  # by prefix, if recorded; reads once
    database: bool  # its arrays are in an OCDBT database, not in plain files
    ours: bool  # chunks have the bytes that `format.arrays` writes
    tensors: Mapping[str, tuple[str, Tensor]] | None = None  # of safetensors files, with the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecoded:
    """A tree whose metadata was read, and compared with the record, but not decoded."""

    found: Found
    name: str
    data: bytes

    @property
    def file(self) -> str:
        return f"{self.found.items[self.name]}/{names.TREE_METADATA}"

    def leaf(self, path: Path) -> Item | None:
        """Returns one leaf as an item; None if it takes all leaves to find it."""
        alone = tree.decode_leaf(self.data, path, file=self.file)
        return None if alone is None else read_tree(self.found, self.name, *alone)


def read_tree(found: Found, name: str, saved: Tree, before: int | None = None) -> Item:
    """Completes a tree that jaxckpt wrote, and checks it before memory is allocated for it.

    Args:
        before: If it is one leaf of a tree, the number of chunks of the leaves before it.
    """
    path = found.items[name]
    if found.record is None and found.path != path:
        raise corrupt(f"{found.path}/{names.RECORD}", "is missing")
    data_bytes = check_data_files(found, path)
    database = names.OCDBT_MANIFEST in found.entries(path)
    saved = with_texts(found, path, saved)
    _check_arrays(found, path, saved, data_bytes, database)
    return make_item(found, name, saved, database=database, ours=True, before=before)


def make_item(
    found: Found, name: str, saved: Tree, *, database: bool, ours: bool, before: int | None = None
) -> Item:
    """Makes an item whose shardings and checksums are read on first use."""
    path = found.items[name]
    return Item(
        found=found,
        name=name,
        path=path,
        tree=saved,
        read_shardings=cache(partial(_read_shardings, found, path, saved, before)),
        read_sums=cache(partial(_read_sums, found, path, saved, before)),
        database=database,
        ours=ours,
    )


def with_texts(found: Found, path: str, saved: Tree) -> Tree:
    """Puts the texts of `_strings.json` into their leaves."""
    file, strings = f"{path}/{names.STRINGS}", {}
    if names.STRINGS in found.entries(path):
        strings = step.decode_strings(found.read(path, names.STRINGS), file=file)
    kinds = ("str", "int") if saved.typed else ("str",)
    leaves = tuple(
        leaf._replace(value=step.find_string(strings, leaf.name, file=file))
        if leaf.kind in kinds and leaf.stored is None and leaf.value is None
        else leaf
        for leaf in saved.leaves
    )
    return replace(saved, leaves=leaves)


def reader_of(found: Found, path: str, *, database: bool) -> Any:  # of storage._arrays
    """Opens an item with TensorStore, which goes wherever a database refers to."""
    from jaxckpt.storage._staged import open_reader

    if database:
        check_data_files(found, path, deep=True)
    return open_reader(found.storage, path, database=database)


def check_data_files(found: Found, path: str, *, deep: bool = False) -> int:
    """Returns the total size of an item's files; refuses links, which TensorStore would follow.

    Args:
        deep: Whether to look into directories too in which there should be no data.
    """
    total, folders = 0, [path]
    while folders:
        folder = folders.pop()
        for name, (kind, size) in found.entries(folder).items():
            if kind == "other":
                raise special_file(f"{folder}/{name}")
            total += size
            is_data = name == names.OCDBT_DATA or name.startswith(names.OCDBT_PROCESS)
            if is_data and kind != "dir":
                raise corrupt(f"{folder}/{name}", "is not a directory")
            if is_data or (deep and kind == "dir"):
                folders.append(f"{folder}/{name}")
    return total


def special_file(file: str, leaf: str | None = None) -> CorruptCheckpoint:
    return corrupt(file, "is a link or a special file; a checkpoint contains none", leaf)


def missing_database(path: str) -> CorruptCheckpoint:
    return corrupt(f"{path}/{names.OCDBT_MANIFEST}", "is missing, and with it every array")


def _check_arrays(found: Found, path: str, saved: Tree, data_bytes: int, database: bool) -> None:
    file = f"{path}/{names.TREE_METADATA}"
    on_disk = [(leaf, leaf.stored or leaf.array) for leaf in saved.leaves if leaf.has_array]
    # Leaves that `_METADATA` describes alike share one object: each description is checked once.
    for leaf, stored in {id(stored): (leaf, stored) for leaf, stored in on_disk}.values():
        if problem := arrays.leaf_problem(leaf, stored):
            raise bad_leaf(leaf, file, problem)
    # Recorded sizes count too: a lost file is reported with the leaves in it, which come later. But
    # a false record must not cause allocations, so they count only up to a limit.
    recorded = sum(facts.size for facts in found.recorded(path).values())
    most_bytes = max(data_bytes, min(recorded, 16 * data_bytes + (1 << 30)))
    if found.part is None:  # else it has some of the chunks; see `reader.check_here`
        arrays.check_total(on_disk, data_bytes=most_bytes, file=file)
    if on_disk and not (saved.uses_ocdbt and saved.zarr_version == 3 and not saved.fill_missing):
        raise damaged(file, "jaxckpt does not write arrays of this kind")
    if on_disk and not database:
        raise missing_database(path)


def _read_shardings(
    found: Found, path: str, saved: Tree, before: int | None
) -> dict[str, SavedSharding]:
    if names.SHARDING not in found.entries(path):
        return {}
    file, plain = f"{path}/{names.SHARDING}", [leaf.name for leaf in saved.leaves]
    only = None if before is None else plain[0]
    return sharding.decode(found.read(path, names.SHARDING), file=file, only=only, plain=plain)


def _read_sums(found: Found, path: str, saved: Tree, before: int | None) -> dict[str, Sums] | None:
    if names.CHUNK_SUMS not in found.recorded(path):
        return None
    data = found.read(path, names.CHUNK_SUMS)
    file = f"{path}/{names.CHUNK_SUMS}"
    return checksums.decode(saved.leaves, data, file=file, before=before)


def subtree(item: Item, path: Path) -> Item:
    """Returns the part of a tree below `path` as an item; KeyError if nothing is there."""
    depth = len(path)
    leaves: tuple[Leaf, ...] = tuple(
        leaf._replace(path=leaf.path[depth:], key_types=leaf.key_types[depth:], alias=leaf.name)
        for leaf in item.tree.leaves
        if leaf.path[:depth] == path
    )
    if not leaves:
        known = {tree.path_text(x.path[:n]) for x in item.tree.leaves for n in range(1, 1 + depth)}
        hint = nearest(tree.path_text(path), sorted(known)[:_MOST_NAMES])
        raise KeyError(f"{item.path} has nothing at {tree.path_text(path)!r}. {hint}")
    root = item.tree.root
    for name in path:
        root = None if root is None else dict(zip(root.names, root.children, strict=True)).get(name)
    return replace(item, tree=replace(item.tree, leaves=leaves, root=root))
