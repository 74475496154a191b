"""A checkpoint that was found, and the trees that jaxckpt wrote, checked against the record.

The record has the size of every file and the digest of every small one, `_jaxckpt.sums` has the
checksum of every chunk, and the record has its digest. So all that is read of a checkpoint of ours
belongs to one save: where a file of another save came in between, a digest differs.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, TypeVar

from jaxckpt._disk.checksums import ChunkSums
from jaxckpt.errors import CheckpointNotFound, CorruptCheckpoint
from jaxckpt.format import arrays, jsontext, names, sharding, step, tree
from jaxckpt.format.sharding import SavedSharding
from jaxckpt.format.step import FileFacts, Record, StepMetadata
from jaxckpt.format.tree import Leaf, Path, Tree
from jaxckpt.storage import Entry, Kind, Storage

Entries = Mapping[str, Entry]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One committed checkpoint; its small files at the top have been read, its items have not.

    Attributes:
        storage, path: Where it is. A flat checkpoint is its own only item.
        items: Paths of the items by name; a flat one is called "".
        metadata: The contents of `_CHECKPOINT_METADATA`; empty if there is no such file.
        record: Our own record, or None for what another program wrote.
        deleting: The item that Orbax has begun to delete; `items` leaves it out.
        is_file: Whether it is a Flax file, not a directory.
        listings: Directories that were listed, by path; each is listed once.
    """

    storage: Storage
    path: str
    items: Mapping[str, str] = field(default_factory=dict)
    metadata: StepMetadata = field(default_factory=StepMetadata)
    record: Record | None = None
    deleting: str | None = None
    is_file: bool = False
    listings: dict[str, Entries] = field(default_factory=dict, compare=False, repr=False)

    def entries(self, folder: str) -> Entries:
        """Returns what is in a directory of the checkpoint; empty if there is no such directory."""
        if folder not in self.listings:
            try:
                self.listings[folder] = self.storage.entries(folder)
            except (FileNotFoundError, NotADirectoryError):
                self.listings[folder] = {}
        return self.listings[folder]

    def recorded(self, folder: str) -> dict[str, FileFacts]:
        """Returns the files of the record below a directory, by their paths in it."""
        files = self.record.files if self.record is not None else {}
        if folder == self.path:
            return dict(files)
        prefix = f"{posixpath.relpath(folder, self.path)}/"
        return {f.removeprefix(prefix): facts for f, facts in files.items() if f.startswith(prefix)}

    def contents(self, folder: str) -> dict[str, Kind]:
        """Returns what is, or should be, in a directory: by the record, else by its listing."""
        if recorded := self.recorded(folder):
            parts = [file.partition("/") for file in recorded]
            return {name: "dir" if below else "file" for name, below, _ in parts}
        return {name: entry.kind for name, entry in self.entries(folder).items()}

    def refuse_holes(self, folder: str) -> None:
        """Refuses a directory that lacks an entry of the record: that may change what others mean.

        Raises:
            CorruptCheckpoint: an entry is missing, or leads elsewhere.
        """
        there = self.entries(folder)
        for name, kind in self.contents(folder).items() if self.record is not None else ():
            place = f"{folder}/{name}"
            if name not in there:
                raise CorruptCheckpoint(
                    f"{place} is missing. Restore an older checkpoint.", file=place
                )
            # A link in place of an item would lead elsewhere.
            if there[name].kind != kind:
                what = "directory" if kind == "dir" else "regular file"
                raise CorruptCheckpoint(
                    f"{place} is not the {what} that was written there. A checkpoint has no links "
                    "inside; `cp -rL` makes a copy without them.",
                    file=place,
                )

    def read(self, folder: str, name: str) -> bytes:
        """Reads a small file, and compares it with the record if there is one.

        Raises:
            CorruptCheckpoint: it is missing, or differs from what was written.
        """
        file = f"{folder}/{name}"
        facts = None if self.record is None else self.record.files.get(self._relative(file))
        if facts is None:
            return self.storage.read(file, max_bytes=jsontext.MAX_BYTES)
        entry = self.entries(folder).get(name)
        if entry is None:
            raise CorruptCheckpoint(f"{file} is missing", file=file)
        data = b""
        if entry.size == facts.size:  # else it may be larger than the memory
            data = self.storage.read(file, max_bytes=min(facts.size, jsontext.MAX_BYTES))
        if len(data) != facts.size or facts.sha256 not in (None, step.digest(data)):
            raise CorruptCheckpoint(
                f"{file} is damaged: {entry.size} bytes that differ from the {facts.size} that "
                "were written. Restore an older checkpoint.",
                file=file,
            )
        return data

    def _relative(self, file: str) -> str:
        return posixpath.relpath(file, self.path)


def check_current(found: Found) -> None:
    """Raises CheckpointNotFound if another checkpoint is now where this one was found."""
    if not is_current(found):
        raise CheckpointNotFound(
            f"{found.path} was replaced or deleted since it was opened. Open it again."
        )


def is_current(found: Found) -> bool:
    """Returns whether the checkpoint is still there; of another program's only whether one is."""
    file = f"{found.path}/{names.RECORD}"
    try:
        digest = step.digest(found.storage.read(file, max_bytes=step.MAX_RECORD_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return found.record is None and found.storage.kind(found.path) is not None
    except CorruptCheckpoint:  # a link, say
        return found.record is None
    return found.record is not None and digest == found.record.digest


def while_current(found: Found, read: Callable[[Found], T]) -> T:
    """Reads a checkpoint that was found before.

    Raises:
        CheckpointNotFound: it was replaced or deleted in the meantime.
    """
    check_current(found)
    try:
        return read(found)
    except (CorruptCheckpoint, FileNotFoundError):
        check_current(found)
        raise


def check_sizes(found: Found) -> None:
    """Raises CorruptCheckpoint if a file of the record is missing, or has another size."""
    files = found.record.files if found.record is not None else {}
    for name, facts in files.items():
        if problem := file_problem(found, name, facts):
            file = f"{found.path}/{name}"
            raise CorruptCheckpoint(f"{file} {problem}", file=file)


def file_problem(found: Found, name: str, facts: FileFacts) -> str | None:
    """Returns what is wrong with a file of the record by the listing of its directory."""
    folder, _, base = f"{found.path}/{name}".rpartition("/")
    entry = found.entries(folder).get(base)
    if entry is None or entry.kind != "file":
        return "is missing"
    return None if entry.size == facts.size else f"has {entry.size} bytes of {facts.size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One pytree, its metadata read.

    Attributes:
        found: The checkpoint that it belongs to.
        name, path: Of the item.
        tree: Every leaf with its shape, dtype and chunks.
        read_shardings: Reads the shardings by leaf name, once; a caller with its own needs none.
        read_sums: Reads the checksums of all chunks, once; None where they were not recorded.
        database: Whether its arrays are in an OCDBT database; else in plain files.
        ours: Whether chunks have the bytes that `format.arrays` writes.
    """

    found: Found
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


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonItem:
    """An item that is one JSON value."""

    found: Found
    name: str
    value: Any


def is_native(found: Found, path: str, saved: Tree) -> bool:
    """Returns whether `_METADATA` alone describes the arrays, as we write it."""
    described = [leaf.stored is not None for leaf in saved.leaves if leaf.kind not in _VALUE_KINDS]
    recorded = found.record is not None or found.path == path
    return saved.typed and all(described) and (recorded or any(described))


_VALUE_KINDS = ("str", "int", "empty", "ellipsis")


def read_tree(found: Found, name: str, saved: Tree) -> Item:
    """Completes a tree that jaxckpt wrote; checks all of it before anything is allocated.

    Raises:
        CorruptCheckpoint: a file is missing or damaged; it is named.
    """
    path = found.items[name]
    found.refuse_holes(path)
    if found.record is None and found.path != path:
        file = f"{found.path}/{names.RECORD}"
        raise CorruptCheckpoint(f"{file} is missing", file=file)
    data_bytes = check_data_files(found, path)
    database = names.OCDBT_MANIFEST in found.entries(path)
    saved = with_texts(found, path, saved)
    _check_arrays(found, path, saved, data_bytes, database)
    return make_item(found, name, saved, database=database, ours=True)


def make_item(found: Found, name: str, saved: Tree, *, database: bool, ours: bool) -> Item:
    """Makes an item whose shardings and checksums are read when they are first asked for."""
    path = found.items[name]
    return Item(
        found=found,
        name=name,
        path=path,
        tree=saved,
        read_shardings=cache(partial(_read_shardings, found, path)),
        read_sums=cache(partial(_read_sums, found, path, saved)),
        database=database,
        ours=ours,
    )


def with_texts(found: Found, path: str, saved: Tree) -> Tree:
    """Puts the texts of `_strings.json` into their leaves."""
    if names.STRINGS not in found.entries(path):
        strings: Mapping[str, Any] = {}
    else:
        file = f"{path}/{names.STRINGS}"
        strings = step.decode_strings(found.read(path, names.STRINGS), file=file)
    kinds = ("str", "int") if saved.typed else ("str",)
    wanted = [
        leaf.kind in kinds and leaf.stored is None and leaf.value is None for leaf in saved.leaves
    ]
    if not any(wanted):
        return saved
    file = f"{path}/{names.STRINGS}"
    leaves = tuple(
        replace(leaf, value=step.find_string(strings, leaf.name, file=file)) if is_text else leaf
        for leaf, is_text in zip(saved.leaves, wanted, strict=True)
    )
    return replace(saved, leaves=leaves)


def check_data_files(found: Found, path: str) -> int:
    """Refuses links among the files of an item: TensorStore opens data files, and follows links.

    Returns:
        The bytes in all files of the item.

    Raises:
        CorruptCheckpoint: there is a link or a special file.
    """
    total, folders = 0, [path]
    while folders:
        folder = folders.pop()
        for name, (kind, size) in found.entries(folder).items():
            if kind == "other":
                raise CorruptCheckpoint(
                    f"{folder}/{name} is a link or a special file; a checkpoint has none",
                    file=f"{folder}/{name}",
                )
            total += size
            is_data = name == names.OCDBT_DATA or name.startswith(names.OCDBT_PROCESS)
            if is_data and kind != "dir":
                file = f"{folder}/{name}"
                raise CorruptCheckpoint(f"{file} is not a directory", file=file)
            if is_data:
                folders.append(f"{folder}/{name}")
    return total


def _check_arrays(found: Found, path: str, saved: Tree, data_bytes: int, database: bool) -> None:
    file = f"{path}/{names.TREE_METADATA}"
    on_disk = [(leaf, leaf.array) for leaf in saved.leaves if leaf.has_array]
    for leaf, stored in on_disk:
        arrays.check_leaf(leaf, stored, file=file)
    # A lost file is noticed by the leaves that were in it; a record that lies must not have memory
    # allocated, so the sizes count no more than a host can spare.
    recorded = sum(facts.size for facts in found.recorded(path).values())
    most_bytes = max(data_bytes, min(recorded, 16 * data_bytes + (1 << 30)))
    arrays.check_total(on_disk, data_bytes=most_bytes, file=file)
    if on_disk and not (saved.uses_ocdbt and saved.zarr_version == 3 and not saved.fill_missing):
        raise CorruptCheckpoint(f"{file}: jaxckpt writes no arrays of this kind", file=file)
    if on_disk and not database:
        manifest = f"{path}/{names.OCDBT_MANIFEST}"
        raise CorruptCheckpoint(f"{manifest} is missing, and with it every array", file=manifest)


def _read_shardings(found: Found, path: str) -> dict[str, SavedSharding]:
    if names.SHARDING not in found.entries(path):
        return {}
    data = found.read(path, names.SHARDING)
    return sharding.decode(data, file=f"{path}/{names.SHARDING}")


def _read_sums(found: Found, path: str, saved: Tree) -> ChunkSums | None:
    file = f"{path}/{names.CHUNK_SUMS}"
    if names.CHUNK_SUMS not in found.recorded(path):
        return None
    return ChunkSums(saved.leaves, found.read(path, names.CHUNK_SUMS), file=file)


def subtree(item: Item, path: Path) -> Item:
    """Returns the part of a tree below `path`, as an item of its own; a leaf is a tree of one.

    Raises:
        KeyError: nothing is there.
    """
    depth = len(path)
    leaves: tuple[Leaf, ...] = tuple(
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
