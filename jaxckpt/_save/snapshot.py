"""The caller's values on the host, and how to write them.

An item of a checkpoint is a tree, whose arrays go into a database, or a few small files. Once an
item is made, the caller may donate, delete or change the originals: their values are on the host,
or on the way there in an order that nothing can overtake.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

from jaxckpt._core.transfer import arrived, stage
from jaxckpt._disk.checksums import encode_share, merge_shares
from jaxckpt._disk.data_files import Written
from jaxckpt._disk.transaction import Work
from jaxckpt._disk.writer import NOTHING_KEPT, merge, write_arrays
from jaxckpt._save.tree_plan import TreePlan, plan_tree
from jaxckpt._save.unchanged import Base, Changes, changes_since
from jaxckpt.errors import SaveFailed, TreeMismatch, UnsupportedLeaf
from jaxckpt.format import arrays, jsontext, names, step
from jaxckpt.multihost import Json, Processes
from jaxckpt.storage import Storage

_MAX_SHARE_BYTES: Final = 1 << 30  # of the file that one process leaves for process 0


@dataclass(slots=True, kw_only=True)
class FileItem:
    """An item of a few small files."""

    name: str
    mine: Mapping[str, bytes] = field(default_factory=dict)  # this process's files, by name
    # Makes the files that process 0 writes for all, by name. Runs in the background.
    shared: Callable[[], Mapping[str, bytes]] = dict
    handler: str = step.JSON_HANDLER

    @property
    def size_bytes(self) -> int:
        """The approximate size of the values in memory."""
        return sum(map(len, self.mine.values()))

    def folder(self, work: Work, processes: Processes) -> str:
        """Returns the directory that this process writes."""
        return self._folder(work, processes.index)

    def _folder(self, work: Work, process: int) -> str:
        item = posixpath.join(work.path, self.name).rstrip("/")
        return f"{item}/{names.process_database(process, work.mark)}" if work.mark else item

    def arrive(self) -> None:
        """Waits for nothing: files are on the host."""

    def write(self, storage: Storage, work: Work, processes: Processes) -> None:
        """Writes this process's files below the directory of the checkpoint."""
        folder = self.folder(work, processes)
        if self.mine:
            storage.make_dir(folder)
        # In a shared directory only process 0 gives files their final names.
        if not (work.mark and processes.index == 0):
            storage.add({f"{folder}/{file}": data for file, data in self.mine.items()})

    def said(self) -> Json:
        """Returns the facts that the processes compare."""
        return {"item": "files"}

    def disagreement(self, said: Sequence[Any]) -> dict[int, str]:
        """Returns how processes differ, by process: files never do."""
        return {}

    def finish(
        self, storage: Storage, work: Work, processes: Processes, said: Sequence[Any]
    ) -> tuple[dict[str, bytes], dict[str, bytes]]:
        """Returns the files to add and those already written, by name in the item."""
        del said
        if not self.mine:
            files = dict(self.shared())
            for folder in sorted({"", *map(posixpath.dirname, files)}):
                storage.make_dir(posixpath.join(work.path, self.name, folder).rstrip("/"))
            return files, {}
        files = dict(self.mine) if work.mark else {}
        others = range(1 if work.mark else 0, processes.count)
        for i in [processes.index] if work.own else others:
            file = names.process_file(i, processes.count)
            place = f"{self._folder(work, i)}/{file}"
            files[file] = storage.read(place, max_bytes=jsontext.MAX_BYTES)
        return (dict(self.shared()) | files, {}) if work.mark else (dict(self.shared()), files)


@dataclass(slots=True, kw_only=True)
class TreeItem:
    """A pytree of which this process writes its share."""

    name: str  # "" if its directory is that of the checkpoint
    tree: TreePlan
    snapshot: Sequence[Any] | None  # what `stage` took of `tree.sources`, until written
    share: bytes = b""  # the checksums of process 0's chunks
    held: bytes = b""  # the checksums of the chunks that this process only holds
    manifest: bytes = b""  # of the database, if one process writes it
    changes: Changes | None = None  # since the step before; None if it does not matter
    written: Written | None = None  # until the next save knows of it
    within: str = ""  # where that is in the checkpoint, with a slash before it
    handler: str = step.PYTREE_HANDLER

    @property
    def size_bytes(self) -> int:
        """The approximate size of the values in memory."""
        return self.tree.plan.total_bytes + self.tree.plan.held_bytes

    @property
    def has_base(self) -> bool:
        """Returns whether it may refer to an earlier step."""
        return self.changes is not None and self.changes.base is not None

    def link(self, storage: Storage, work: Work, processes: Processes) -> None:
        """Links what is to be taken from an earlier step, before its values are let go."""
        if self.changes is not None:
            self.changes.link(storage, self.folder(work, processes))

    def folder(self, work: Work, processes: Processes) -> str:
        """Returns the directory of the database that this process writes."""
        item = self._item(work)
        if processes.count == 1:
            return item
        return f"{item}/{names.process_database(processes.index, work.mark)}"

    def _item(self, work: Work) -> str:
        return f"{work.path}/{self.name}" if self.name else work.path

    def arrive(self) -> None:
        """Waits until the values are on the host; raises if a copy failed."""
        if self.snapshot is not None:
            self.snapshot = arrived(self.snapshot, self.tree.sources)

    def write(self, storage: Storage, work: Work, processes: Processes) -> None:
        """Writes this process's share and releases its memory."""
        assert self.snapshot is not None  # a save is run once
        folder = self.folder(work, processes)
        snapshot, self.snapshot = self.snapshot, None
        writes, leads = self.tree.writes, processes.index == 0
        kept = NOTHING_KEPT
        if self.changes is not None:
            kept = self.changes.kept(snapshot, storage, folder)
        written = write_arrays(storage, folder, writes, snapshot, describe=leads, kept=kept)
        manifest, share = written.manifest, encode_share(writes.units, written.sums)
        if self.changes is not None:
            self.written = written
            self.within = folder.removeprefix(work.path)
        if leads:
            self.share = share
        if processes.count == 1:
            self.manifest = manifest
            return
        is_known = leads and not work.own  # to the process that merges the shares
        files = {names.OCDBT_MANIFEST: manifest, names.CHUNK_SUMS: b"" if is_known else share}
        storage.add({f"{folder}/{name}": data for name, data in files.items() if data})
        if not leads and manifest:
            storage.sync(folder)
        if work.own:
            self._write_held(storage, work, snapshot, describe=not leads)

    def _write_held(
        self,
        storage: Storage,
        work: Work,
        snapshot: Sequence[np.ndarray[Any, Any]],
        *,
        describe: bool,
    ) -> None:
        """Writes what another process writes too, beside this one's part for the directory."""
        folder, writes = f"{self._item(work)}/{names.OCDBT_HELD}", self.tree.held
        written = write_arrays(storage, folder, writes, snapshot, describe=describe)
        self.held = encode_share(writes.units, written.sums)
        if written.manifest:
            storage.add({f"{folder}/{names.OCDBT_MANIFEST}": written.manifest})

    def base(self, path: str) -> Base | None:
        """Returns what the next save may refer to, once this one is committed at a path."""
        if self.changes is None or self.written is None:
            return None
        return self.changes.base_of_next(path + self.within, self.written)

    def mended(self, storage: Storage, path: str) -> Iterator[str]:
        """Mends what was found damaged in earlier steps, once this one is committed at a path."""
        if self.changes is not None and self.written is not None:
            yield from self.changes.mended(storage, path + self.within, self.written)

    def said(self) -> Json:
        """Returns the facts that the processes compare."""
        return {"item": "tree", "tree": self.tree.fingerprint, "bytes": self.tree.plan.total_bytes}

    def disagreement(self, said: Sequence[Any]) -> dict[int, str]:
        """Returns how the trees differ from process 0's, by process."""
        failures = {
            i: "has another tree, other shapes, shardings or compression than process 0"
            for i, one in enumerate(said)
            if one["tree"] != said[0]["tree"]
        }
        # The processes agree on the shards, but maybe not on their owners.
        wanted = sum(
            math.prod(stored.shape) * arrays.dtype_of(stored.dtype).itemsize
            for stored in self.tree.plan.stored
        )
        written = sum(one["bytes"] for one in said)
        if not failures and written != wanted:
            failures[0] = f"all processes together wrote {written} bytes of {wanted}"
        return failures

    def finish(
        self, storage: Storage, work: Work, processes: Processes, said: Sequence[Any]
    ) -> tuple[dict[str, bytes], dict[str, bytes]]:
        """Merges the databases; returns small files to add and already written, by name."""
        item, files = self._item(work), dict(self.tree.files)
        if any("/" in name for name in files):
            storage.make_dir(f"{item}/{names.ARRAY_METADATAS}")
        elif not self.tree.plan.stored:  # nobody wrote there
            storage.make_dir(item)
        if not self.tree.plan.stored:
            return files, {}
        manifest, there = self.manifest, {}
        if processes.count > 1:
            databases = databases_of(work, said)
            if work.own:
                databases = self._own_databases(storage, work, processes)
            manifest = merge(storage, item, databases)
            there = read_back(storage, item, databases)
        shares = [data for name, data in there.items() if name.endswith(names.CHUNK_SUMS)]
        count = self.tree.writes.unit_count
        table = merge_shares([self.share, self.held, *shares], count, partial=work.own)
        if table is None:
            raise SaveFailed(f"{item}: no process wrote some of the {count} chunks")
        return {**files, names.CHUNK_SUMS: table, names.OCDBT_MANIFEST: manifest}, there

    def _own_databases(self, storage: Storage, work: Work, processes: Processes) -> list[str]:
        there = [names.process_database(processes.index), names.OCDBT_HELD]
        manifests = [f"{self._item(work)}/{name}/{names.OCDBT_MANIFEST}" for name in there]
        return [n for n, file in zip(there, manifests, strict=True) if storage.kind(file)]


def databases_of(work: Work, said: Sequence[Any]) -> list[str]:
    """Returns the databases that the processes wrote, from what they said."""
    writers = [i for i, one in enumerate(said) if one["bytes"] or i == 0]
    return [names.process_database(i, work.mark) for i in writers]


def read_back(storage: Storage, item: str, folders: Sequence[str]) -> dict[str, bytes]:
    """Reads the small files that the processes wrote, all at once; by name in the item."""
    small = (names.OCDBT_MANIFEST, names.CHUNK_SUMS)
    files = [f"{folder}/{name}" for folder in folders for name in small]
    reads = [partial(_read_if_there, storage, f"{item}/{file}") for file in files]
    found = zip(files, storage.together(reads), strict=True)
    return {file: data for file, data in found if data is not None}


def _read_if_there(storage: Storage, path: str) -> bytes | None:
    try:
        return storage.read(path, max_bytes=_MAX_SHARE_BYTES)
    except FileNotFoundError:
        return None


class SaveItem(Protocol):
    """An item of a checkpoint, ready to be written."""

    @property
    def name(self) -> str: ...
    @property
    def handler(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    def folder(self, work: Work, processes: Processes) -> str: ...
    def arrive(self) -> None: ...
    def write(self, storage: Storage, work: Work, processes: Processes) -> None: ...
    def said(self) -> Json: ...
    def disagreement(self, said: Sequence[Any]) -> dict[int, str]: ...
    def finish(
        self, storage: Storage, work: Work, processes: Processes, said: Sequence[Any]
    ) -> tuple[dict[str, bytes], dict[str, bytes]]: ...


@dataclass(frozen=True, slots=True)
class Items:
    """Named values in place of one tree, each with the function that copies it; the main one first.

    For `jaxckpt.orbax`, where the items of a checkpoint have any names and kinds.
    """

    take: Mapping[str, Callable[[str, Processes], SaveItem]]

    def taken(self, processes: Processes) -> list[SaveItem]:
        """Copies all of them to the host."""
        return [take(name, processes) for name, take in self.take.items()]


def take_tree(
    name: str,
    value: object,
    processes: Processes,
    *,
    copy: bool,
    dtype: str | None = None,
    zstd: int | None = None,
    holds: bool = False,
    storage: Storage | None = None,
    base: Base | None = None,
) -> TreeItem:
    """Copies this process's share of a tree to the host.

    Args:
        copy: Whether to copy numpy arrays, which the caller may change before they are written.
        dtype: If given, the dtype in which all floating-point arrays are saved.
        zstd: If given, the level at which chunks are compressed.
        holds: Whether to copy all shards that this process holds.
        storage: Where the next save may refer to this one; None if it shall not.
        base: What this save may refer to there.

    Raises:
        UnsupportedLeaf: leaves cannot be stored; the message names all of them.
    """
    tree, values = plan_tree(value, processes, dtype, zstd, holds=holds)
    changes = None if storage is None else changes_since(base, tree, values, storage)
    left = set[int]() if changes is None else changes.left
    try:
        sources = [source for i, source in enumerate(tree.sources) if i not in left]
        staged = iter(stage(values, sources, copy=copy))
        snapshot = [None if i in left else next(staged) for i in range(len(tree.sources))]
        return TreeItem(name=name, tree=tree, snapshot=snapshot, changes=changes)
    except TreeMismatch as error:
        one = error.differences[0]
        leaf = [leaf for leaf in tree.tree.leaves if leaf.has_array][int(one.leaf)]
        raise UnsupportedLeaf(
            f"leaf {leaf.text} cannot be saved as {one.wanted}: it is {one.saved}. Nothing was "
            "written. Choose a dtype that holds its values."
        ) from None
