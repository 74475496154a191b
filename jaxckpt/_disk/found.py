"""Describes a checkpoint that was found: its listings, its record, and which entries are items.

The record has the size of every file and the digest of every small file, among them
`_jaxckpt.sums`, which has the checksum of every chunk. So everything read from one of our
checkpoints belongs to one save: a file of another save has another digest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

from jaxckpt.errors import MAX_LFS_BYTES, CheckpointNotFound, CorruptCheckpoint, lfs_problem
from jaxckpt.format import jsontext, names, step
from jaxckpt.format.step import FileFacts, Record, StepMetadata
from jaxckpt.storage import Entry, EntryKind, Storage, corrupt, listing, now, stamp, together

Entries = Mapping[str, Entry]
T = TypeVar("T")

_TREE_MARKS: Final = frozenset({names.TREE_METADATA, names.LEGACY_TREE, names.OCDBT_MANIFEST})


def lacks_marker(path: str, entries: Container[str]) -> bool:
    """Returns whether a directory of Orbax is a half step: on gs://, it too writes in place."""
    return path.startswith("gs://") and names.COMMIT_MARKER not in entries


# An item and a key of its database, or None and the path of a file.
Wanted = tuple[str | None, str]


class NotHere(CheckpointNotFound):
    """The share of a process lacks what another process has saved on its own disk."""

    def __init__(self, text: str, wanted: Sequence[Wanted]) -> None:
        super().__init__(text)
        self.wanted = wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One committed checkpoint; its small files at the top have been read, its items have not."""

    storage: Storage
    path: str
    items: Mapping[str, str] = field(default_factory=dict)  # paths by name; a flat tree is ""
    metadata: StepMetadata = field(default_factory=StepMetadata)  # empty if the file is missing
    record: Record | None = None  # None if another program wrote the checkpoint
    deleting: str | None = None  # the item whose deletion has begun; not in `items`
    is_file: bool = False  # a Flax file, not a directory
    listings: dict[str, Entries] = field(default_factory=dict, compare=False, repr=False)
    # Of files that no record describes, as they were when they were opened.
    stamps: dict[str, object] = field(default_factory=dict, compare=False, repr=False)

    @property
    def part(self) -> tuple[int, int] | None:
        """Returns whose shards it has and the number of processes; None if it has all shards."""
        return None if self.record is None else self.record.share

    @property
    def differences(self) -> tuple[str, ...]:
        """Returns the replicas that differed when the checkpoint was saved."""
        return () if self.record is None else self.record.differences

    @property
    def origin(self) -> str | None:
        """Returns the token of the save that it comes from; None if another program wrote it."""
        if self.record is None:
            return None
        lineage = self.record.lineage
        return str(lineage["token"] if lineage.get("by") == "upload" else self.record.token)

    def uploaded(self, record: Record, share: tuple[int, int] | None = None) -> Record:
        """Returns the record of an upload, or of a share of it."""
        lineage = {"by": "upload", "path": self.path, "token": self.origin}
        return replace(record, lineage=lineage, phases={}, share=share)

    @property
    def removed(self) -> list[str]:
        """The recorded items whose directories another program removed; never the main item."""
        if self.record is None or names.TREE_METADATA in (recorded := self.contents(self.path)):
            return []
        there = {*self.entries(self.path), self.record.item, self.deleting}
        return [n for n, kind in recorded.items() if kind == "dir" and n not in there]

    def was_removed(self, item: str) -> str:
        """Describes one of the removed items."""
        return (
            f"{self.path}/{item} is missing: another program removed this item. The others can be "
            f"restored. To complete the removal, call delete(step, item={item!r}) of the "
            f"CheckpointManager, or `jaxckpt rm --item {item}`."
        )

    def being_deleted(self) -> CheckpointNotFound:
        """Returns the error about an item whose deletion has begun."""
        return CheckpointNotFound(
            f"{self.path}: the deletion of item {self.deleting!r} has begun "
            f"({names.DELETION_RECORD} exists), so part of it may be gone. Other items: "
            f"{', '.join(self.items) or 'none'}."
        )

    def not_here(self, what: str, wanted: Sequence[Wanted]) -> NotHere:
        """Returns the error for a part that another process has saved on its own disk."""
        assert self.part is not None
        mine, count = self.part
        text = f"{self.path} has what process {mine} of {count} held, and lacks {what}. The whole"
        return NotHere(f"{text} step is in the directory of the run once it is uploaded.", wanted)

    def entries(self, folder: str) -> Entries:
        """Returns the entries of a directory, listed once; empty if the directory is missing.

        Follows no link inside the checkpoint.
        """
        if folder not in self.listings:
            parent, _, name = folder.rpartition("/")
            around = self.entries(parent) if folder.startswith(f"{self.path}/") else {}
            is_elsewhere = name in around and around[name].kind != "dir"
            self.listings[folder] = {} if is_elsewhere else listing(self.storage, folder) or {}
        return self.listings[folder]

    def recorded(self, folder: str) -> dict[str, FileFacts]:
        """Returns the recorded files below a directory, by their paths in it."""
        files = self.record.files if self.record is not None else {}
        if folder == self.path:
            return dict(files)
        prefix = f"{folder.removeprefix(f'{self.path}/')}/"
        return {f.removeprefix(prefix): facts for f, facts in files.items() if f.startswith(prefix)}

    def contents(self, folder: str) -> dict[str, EntryKind]:
        """Returns the kind of each entry of a directory, by the record or else by its listing."""
        if recorded := self.recorded(folder):
            parts = [file.partition("/") for file in recorded]
            return {name: "dir" if below else "file" for name, below, _ in parts}
        return {name: entry.kind for name, entry in self.entries(folder).items()}

    def refuse_holes(self, folder: str) -> None:
        """Raises CorruptCheckpoint if a recorded entry of a directory is missing or a link.

        A missing entry may change the meaning of others, but a missing item does not: opening that
        item raises the error.
        """
        there, wanted = self.entries(folder), self.contents(folder)
        has_items = folder == self.path and names.TREE_METADATA not in wanted
        for name, kind in wanted.items() if self.record is not None else ():
            path = f"{folder}/{name}"
            if name not in there:
                if has_items and kind == "dir":
                    continue
                raise corrupt(path, "is missing. Restore an older checkpoint.")
            # A link in place of an item would lead elsewhere.
            if there[name].kind != kind:
                what = "directory" if kind == "dir" else "regular file"
                raise corrupt(
                    path,
                    f"is not the {what} that was written there. A checkpoint contains no links; "
                    "`cp -rL` makes a copy without them.",
                )

    def read(self, folder: str, name: str, data: bytes | None = None) -> bytes:
        """Reads a small file, or takes its data; CorruptCheckpoint if gone or not as recorded."""
        file = f"{folder}/{name}"
        relative = file.removeprefix(f"{self.path}/")
        facts = None if self.record is None else self.record.files.get(relative)
        if facts is None:
            return self.storage.read(file, max_bytes=jsontext.MAX_BYTES) if data is None else data
        folder, _, name = file.rpartition("/")
        repeated = (facts.text or "").encode()
        if repeated and self.entries(folder).get(name) == ("file", len(repeated)):
            return repeated
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, CorruptCheckpoint):
            data = data or self.storage.read(file, max_bytes=min(facts.size, jsontext.MAX_BYTES))
        if data is None or facts.sha256 != step.digest(data):
            entry = self.entries(folder).get(name)
            if entry is None or (data is None and entry.size == facts.size):
                raise corrupt(file, "is missing")
            if data is not None and facts.sha256 is None and len(data) == facts.size:
                return data
            if problem := pointer_problem(self.storage, file):
                raise corrupt(file, problem)
            what = f"its {entry.size} bytes differ from the {facts.size} that were written"
            raise corrupt(file, f"is damaged: {what}. Restore an older checkpoint.")
        return data


def record_at(storage: Storage, path: str) -> Record:
    file = f"{path}/{names.RECORD}"
    return step.decode_record(storage.read(file, max_bytes=step.MAX_RECORD_BYTES), file=file)


def check_current(found: Found) -> None:
    """Raises CheckpointNotFound if the checkpoint was replaced or deleted."""
    if not is_current(found):
        raise CheckpointNotFound(
            f"{found.path} was replaced, changed or deleted since it was opened. Open it again."
        )


def is_current(found: Found) -> bool:
    """Returns whether the same checkpoint is still there, or any if another program wrote it."""
    file, storage = f"{found.path}/{names.RECORD}", now(found.storage)
    # In a bucket a deletion begins with the marker, and the record may go last.
    marker = f"{found.path}/{names.COMMIT_MARKER}"
    looks = [] if found.record is None or storage.atomic_rename else [partial(storage.size, marker)]
    if found.stamps and not _are_unchanged(storage, found.stamps):
        return False
    try:
        read = partial(storage.read, file, max_bytes=step.MAX_RECORD_BYTES)
        data, *_ = together(storage, [read, *looks])
    except (FileNotFoundError, NotADirectoryError):
        return found.record is None and storage.kind(found.path) is not None
    except CorruptCheckpoint:  # such as a link
        return found.record is None
    return found.record is not None and step.digest(data) == found.record.digest


def _are_unchanged(storage: Storage, stamps: Mapping[str, object]) -> bool:
    try:
        return [*stamps.values()] == together(storage, [partial(stamp, storage, x) for x in stamps])
    except (FileNotFoundError, NotADirectoryError):
        return False


def while_current(found: Found, read: Callable[[Found], T]) -> T:
    """Reads a checkpoint found earlier; CheckpointNotFound if it has changed since."""
    check_current(found)
    try:
        result = read(found)
    except (CorruptCheckpoint, FileNotFoundError):
        check_current(found)
        raise
    if not is_sealed(found):
        check_current(found)
    return result


def is_sealed(found: Found) -> bool:
    """Returns whether digests cover all data, so that no read can mix two checkpoints unnoticed.

    Foreign checkpoints and trees of an earlier jaxckpt lack checksums of their chunks.
    """
    return found.record is not None and all(
        names.CHUNK_SUMS in found.recorded(path) or json_name(found, path) is not None
        for path in found.items.values()
    )


def present_files(found: Found) -> dict[str, FileFacts]:
    """Returns the recorded files, except files of items that another program removed."""
    files, removed = found.recorded(found.path), set(found.removed)
    return {n: facts for n, facts in files.items() if n.partition("/")[0] not in removed}


def check_sizes(found: Found) -> None:
    """Raises CorruptCheckpoint if a recorded file is missing or has the wrong size.

    An item that another program removed as a whole does not count: the others can be restored.
    """
    for name, facts in present_files(found).items():
        if problem := file_problem(found, name, facts):
            raise corrupt(f"{found.path}/{name}", problem)


def file_problem(found: Found, name: str, facts: FileFacts) -> str | None:
    """Returns the problem that the listing shows with a recorded file, if any."""
    folder, _, base = f"{found.path}/{name}".rpartition("/")
    entry = found.entries(folder).get(base)
    if entry is None or entry.kind != "file":
        return "is missing"
    if entry.size == facts.size:
        return None
    pointer = pointer_problem(found.storage, f"{folder}/{base}")
    return pointer or f"has {entry.size} bytes, expected {facts.size}"


def pointer_problem(storage: Storage, file: str) -> str | None:
    """Returns the problem of a bad file if it is a pointer of Git LFS."""
    with contextlib.suppress(OSError):
        if storage.size(file) <= MAX_LFS_BYTES:
            return lfs_problem(storage.read(file, max_bytes=MAX_LFS_BYTES))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonItem:
    """An item that is one JSON value."""

    name: str
    value: Any


# --- which directories are items -------------------------------------------------------------


def find_items(found: Found, path: str, entries: Entries) -> dict[str, str]:
    """Returns the directories among `entries` that are items, by name."""
    return {
        name: f"{path}/{name}"
        for name, entry in sorted(entries.items())
        if entry.kind == "dir"
        and not names.is_temporary(name)
        and not name.startswith(names.OCDBT_PROCESS)  # a part of the tree in `path`
        and is_item(found, f"{path}/{name}")
    }


def is_item(found: Found, path: str) -> bool:
    """Returns whether a directory has the files of a tree or of a JSON item."""
    inside = found.contents(path)
    is_tree = key_folder(inside) is not None or not _TREE_MARKS.isdisjoint(inside)
    return is_tree or json_name(found, path) is not None


def find_trees(found: Found) -> list[str]:
    """Returns the items that are trees; random keys count only if they are the only trees."""
    trees = [
        name
        for name, path in found.items.items()
        if name != names.METRICS_ITEM and json_name(found, path) is None
    ]
    if len(trees) < 2:
        return trees
    return [name for name in trees if key_folder(found.contents(found.items[name])) is None]


def json_name(found: Found, path: str) -> str | None:
    """Returns the name of the file of a JSON item; None if the item is a tree."""
    inside = found.contents(path)
    is_tree = names.TREE_METADATA in inside or names.LEGACY_TREE in inside or key_folder(inside)
    return None if is_tree else _json_file(found, path, inside)


def _json_file(found: Found, path: str, inside: Mapping[str, EntryKind]) -> str | None:
    # Grain's own handler for Orbax writes nothing but a file for each process.
    files = [*names.JSON_ITEM_FILES, *(n for n in inside if names.process_count(n) is not None)]
    others = [name for name in inside if name not in names.TOP_FILES]
    item = path.removeprefix(found.path).strip("/")
    if len(others) == 1 and found.metadata.is_by("JsonCheckpointHandler", item):
        files += others  # whose name is an argument of that handler
    # A run's root may have a directory of such a name.
    return next((name for name in files if inside.get(name) == "file"), None)


def key_folder(inside: Container[str]) -> str | None:
    """Returns the directory in which Orbax keeps the data of a random key."""
    return next((n for n in (names.JAX_KEY_ITEM, names.NUMPY_KEY_ITEM) if n in inside), None)


def array_names(found: Found, path: str) -> list[str]:
    """Returns the directories that are zarr arrays in plain files."""
    return sorted(
        name
        for name, entry in found.entries(path).items()
        if entry.kind == "dir" and zarr_version(found, f"{path}/{name}") is not None
    )


def zarr_version(found: Found, path: str) -> int | None:
    inside = found.entries(path)
    for version, key in ((3, names.ZARR3), (2, names.ZARR2)):
        if key in inside and inside[key].kind == "file":
            return version
    return None
