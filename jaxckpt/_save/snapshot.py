"""The caller's values on the host, and how to write them.

An item of a checkpoint is a tree, whose arrays go into a database, or a few small files. Once an
item is made, the caller may donate, delete or change the originals: their values are on the host,
or on the way there in an order that nothing can overtake.
"""

from __future__ import annotations

import posixpath
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any, Final, TypeVar

from jaxckpt._core.log import logger
from jaxckpt._core.transfer import arrived, stage
from jaxckpt._disk.attempt import Work
from jaxckpt._disk.checksums import starts_of
from jaxckpt._disk.data_files import DataFiles
from jaxckpt._disk.places import (
    Table,
    check_complete,
    decode_table,
    encode_table,
    last_files,
    unite,
)
from jaxckpt._disk.writer import NOTHING_REUSED, write_arrays
from jaxckpt._save.replicas import Replicas
from jaxckpt._save.tree_plan import TreePlan, plan_tree
from jaxckpt._save.unchanged import Base, Changes, changes_since
from jaxckpt.errors import TreeMismatch, UnsupportedLeaf
from jaxckpt.format import arrays, names, step
from jaxckpt.format.tree import path_text
from jaxckpt.multihost import Group, Json, Processes
from jaxckpt.storage import Storage

T = TypeVar("T")

_MOST_SUMS: Final = 64  # that a process sends for an item
_MOST_NAMED: Final = 8  # leaves
_ALIKE: Final = (
    "An array on devices of one process must be alike in all. Save what all have, such as the "
    "key before `fold_in`, or make one array of all: jax.make_array_from_process_local_data"
)


@dataclass(slots=True, kw_only=True)
class FileItem:
    """An item of a few small files, with the same methods as a `TreeItem`."""

    name: str
    mine: Mapping[str, bytes] = field(default_factory=dict)  # this process's files, by name
    # Makes the files that process 0 writes for all, by name. Runs in the background.
    common: Callable[[], Mapping[str, bytes]] = dict
    # What process 0 has counts for all, where each writes `common` on a disk of its own.
    told: Callable[[], Json] = lambda: None
    heard: Json = None
    handler: str = step.JSON_HANDLER
    kind: str = "files"  # "common" if only process 0 has to have it

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.mine.values()))

    def arrive(self) -> None:
        """Waits for nothing: files are on the host."""

    def write(self, storage: Storage, work: Work, group: Group) -> None:
        """Writes nothing yet, since process 0 tells what to write."""
        if group.part is not None and group.job.index == 0:
            self.heard = self.told()

    def part(self) -> bytes | None:
        """Returns this process's own file, which process 0 writes."""
        return next(iter(self.mine.values()), None)

    def said(self) -> Json:
        return {"item": self.kind, "told": self.heard}

    def hear(self, told: Json) -> None:
        """Takes what process 0 told."""
        self.heard = told

    def disagreement(self, said: Sequence[Any]) -> dict[int, str]:
        """Returns how processes differ, by process: files never do."""
        return {}

    def finish(
        self, storage: Storage, work: Work, processes: Processes, parts: Mapping[int, bytes]
    ) -> Finished:
        others = {names.process_file(i, processes.count): data for i, data in parts.items()}
        files = {**self.common(), **self.mine, **others}
        for folder in sorted({"", *map(posixpath.dirname, files)}):
            storage.make_dir(work.folder(posixpath.join(self.name, folder)))
        return files, {}


@dataclass(slots=True, kw_only=True)
class TreeItem:
    """A pytree of which this process writes its share."""

    name: str  # "" if it lies directly in the checkpoint's directory
    tree: TreePlan
    snapshot: Sequence[Any] | None  # the values that `stage` took of `tree.sources`, until written
    tables: Sequence[Table] = ()  # of the chunks written; in a share, then of the held chunks
    changes: Changes | None = None  # since the step before; None if it does not matter
    own: Sequence[Any] = ()  # the values that `stage` took of `tree.own`, until they are there
    sums: Sequence[int] = ()  # of these values, then
    handler: str = step.PYTREE_HANDLER

    @property
    def size_bytes(self) -> int:
        """Returns the approximate size of the values in memory."""
        return self.tree.plan.total_bytes + self.tree.plan.held_bytes

    def arrive(self) -> None:
        """Waits until the values are on the host; raises if a copy failed."""
        if self.snapshot is not None:
            self.snapshot = arrived(self.snapshot, self.tree.sources)
        if self.own:
            own, self.own = arrived(self.own, self.tree.own), ()
            self.sums = [zlib.crc32(b"".join(x.tobytes() for x in some)) for some in _shares(own)]

    def write(self, storage: Storage, work: Work, group: Group) -> None:
        """Writes this process's share and releases its memory."""
        assert self.snapshot is not None  # a save is run once
        folder, leads = work.folder(self.name), group.job.index == 0
        snapshot, self.snapshot = self.snapshot, None
        is_whole = group.job.count == 1
        mark, reused = "" if is_whole else work.mark, NOTHING_REUSED
        if self.changes is not None:
            reused = self.changes.reused(snapshot, storage, folder, mark)
        files = partial(DataFiles, storage, folder, landed=work.landed)
        write = partial(write_arrays, snapshot=snapshot, is_whole=is_whole)
        mine = files(name=partial(names.new_data_file, mark))
        self.tables = [write(mine, self.tree.writes, describe=leads, reused=reused)]
        if group.part is not None:  # also held chunks that others write to the directory
            others = files(name=names.new_held_file)
            self.tables += [write(others, self.tree.held, describe=not leads)]

    def part(self) -> bytes | None:
        """Returns the table of the chunks written, for process 0."""
        return encode_table(self.tables[0]) if self.tables and self.tables[0].places else None

    def said(self) -> Json:
        """Returns the facts that the processes compare."""
        size = self.tree.plan.total_bytes
        return {"item": "tree", "tree": self.tree.fingerprint, "bytes": size, "own": self.sums}

    def hear(self, _: Json) -> None:
        """Takes nothing: each process writes its own shards."""

    def disagreement(self, said: Sequence[Any]) -> dict[int, str]:
        """Returns how the trees differ from process 0's, by process."""
        why = "has another tree, other shapes, shardings or compression than process 0"
        failures = {i: why for i, one in enumerate(said) if one["tree"] != said[0]["tree"]}
        # The processes agree on the shards, but maybe not on their owners.
        wanted = sum(arrays.bytes_of(one.shape, one.dtype) for one in self.tree.plan.stored)
        written = sum(one["bytes"] for one in said)
        if not failures and written != wanted:
            failures[0] = f"all processes together wrote {written} bytes of {wanted}"
        return failures or (self._other_values(said) if self.tree.own else {})

    def _other_values(self, said: Sequence[Any]) -> dict[int, str]:
        """Returns which processes have other values than process 0 where only that one writes.

        For a value that is not on a device, which may be a time, this is only a warning.
        """
        failures, shares = {}, _shares(self.tree.own)
        for i, one in enumerate(said):
            both = zip(shares, one["own"], said[0]["own"], strict=True)
            other = [share for share, mine, first in both if mine != first]
            differ = [source.array for share in other for source in share]
            leaves = ", ".join(path_text(self.tree.array_paths[n]) for n in differ[:_MOST_NAMED])
            text = f"has other values of {leaves} than process 0, which writes its own for all"
            if any(self.tree.placed[n] is not None for n in differ):
                failures[i] = f"{text}. {_ALIKE}"
            elif differ:
                _warn_once(f"a process {text}")
        return failures

    def finish(
        self, storage: Storage, work: Work, processes: Processes, parts: Mapping[int, bytes]
    ) -> Finished:
        """Completes the database with the chunks of the other processes."""
        item, files, stored = work.folder(self.name), dict(self.tree.files), self.tree.plan.stored
        if any("/" in name for name in files):
            storage.make_dir(f"{item}/{names.ARRAY_METADATAS}")
        elif not stored:  # nobody wrote there
            storage.make_dir(item)
        if not stored:
            return files, {}
        tables = [*self.tables, *map(decode_table, parts.values())]
        *_, count = starts_of(stored)
        if processes.count == 1:
            last = last_files(tables, count, tables[0].manifest)
            return files | last, {f: step.FileFacts(size=n) for f, n in tables[0].sizes.items()}
        if len(self.tables) == 1:  # else other disks have the rest
            check_complete(item, tables, stored)
        united, facts = unite(storage, item, tables, count, work)
        return files | united, facts


@cache
def _warn_once(text: str) -> None:
    """Logs a warning, but not again at each save and for each process."""
    logger.warning("%s", text)


def _shares(values: Sequence[T]) -> list[Sequence[T]]:
    """Divides values into a few lists, of one value each unless there are more."""
    count = min(len(values), _MOST_SUMS)
    ends = [len(values) * i // count for i in range(count + 1)] if count else []
    return [values[start:end] for start, end in pairwise(ends)]


SaveItem = FileItem | TreeItem  # ready to be written
# The files to write, by name in the item; and facts about files already written.
Finished = tuple[dict[str, bytes], dict[str, step.FileFacts]]


@dataclass(frozen=True, slots=True)
class Items:
    """Named values in place of one tree, each with the function that copies it.

    For `jaxckpt.orbax`, where the items of a checkpoint have any names and kinds.
    """

    take: Mapping[str, Callable[[str, Processes], SaveItem]]

    def taken(self, processes: Processes) -> list[SaveItem]:
        return [take(name, processes) for name, take in self.take.items()]


def take_tree(
    name: str,
    value: object,
    processes: Processes,
    *,
    copy: bool,
    storage: Storage | None = None,
    base: Base | None = None,
    replicas: Replicas | None = None,
    **how: Any,
) -> TreeItem:
    """Copies this process's share of a tree to the host.

    Args:
        copy: Whether to copy numpy arrays, which the caller may change before they are written.
        storage: Where the next save may refer to this save; None if it shall not.
        base: The earlier step that this save may refer to there.
        replicas: Takes the fingerprints of all replicas, if they are to be compared.

    Raises:
        UnsupportedLeaf: leaves cannot be stored; the message names the item and all of them.
    """
    where = f"item {name!r}: " if name else ""
    try:
        tree, values = plan_tree(value, processes, **how)
    except UnsupportedLeaf as error:
        raise UnsupportedLeaf(f"{where}{error}") from error
    if replicas is not None:
        replicas.add(tree, values, name)
    changes = None if storage is None else changes_since(base, tree, values, storage)
    left = set[int]() if changes is None else changes.left
    try:
        sources = [source for i, source in enumerate(tree.sources) if i not in left]
        staged = iter(stage(values, sources, copy=copy))
        snapshot = [None if i in left else next(staged) for i in range(len(tree.sources))]
        own = stage(values, tree.own, copy=copy) if tree.own else ()
        return TreeItem(name=name, tree=tree, snapshot=snapshot, changes=changes, own=own)
    except TreeMismatch as error:
        one = error.differences[0]
        path = path_text(tree.array_paths[int(one.leaf)])
        raise UnsupportedLeaf(
            f"{where}leaf {path} cannot be saved as {one.wanted}: it is {one.saved}. Nothing was "
            "written. Choose a dtype that holds its values."
        ) from None
