"""Finds the shards that did not change since an earlier step, to whose files a step then refers.

The files of values are never changed. So a step may have hard links to files of an earlier step, or
copies that a store makes, and its database has the places in them: the step is complete by itself,
whatever is deleted. It pays for whole leaves (frozen weights, a reference model). A shard counts
as unchanged if it is

    of the same `jax.Array` as in the earlier step, which is immutable: nothing is computed;
    of the same fingerprint: on an accelerator it is taken before anything is copied to the host,
    in host memory while the save is written.

A changed shard is compared again only at each tenth step, so states that change everywhere pay
little.

On a file system the earlier step is the last step but one: the two newest steps never share a file,
so damage to one leaves the other. A file is read back before a step refers to it for the first
time, and before each tenth reference (`read_back`, between two saves). Values whose file is
damaged, or not read yet, are written again. In a store, where each step has objects of its own, a
step refers to the newest step, and the first nine references are made unread.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import jax

from jaxckpt._core import fingerprint
from jaxckpt._disk.data_files import COPIED_BYTES
from jaxckpt._disk.places import Table
from jaxckpt._disk.read_back import (
    MOST_BYTES,
    TRUSTED,
    StoppedReading,
    damaged_chunks,
    mend,
    put_instead,
)
from jaxckpt._disk.writer import NOTHING_REUSED, ChunkWrite, Reused
from jaxckpt._save.tree_plan import Array, TreePlan
from jaxckpt.errors import CheckpointError, SaveFailed
from jaxckpt.format import names
from jaxckpt.format.ocdbt import Place
from jaxckpt.format.tree import path_text
from jaxckpt.storage import Storage, together

# Once in this many steps, shards that changed get fingerprints again.
_ASKED_EVERY: Final = 10
# A file of which less is still in use is not linked: the rest would stay on the disk for nothing.
_LEAST_USED: Final = 0.5
# Each fingerprint on a device is a computation to start, which costs more than to write a few KB.
_MOST_ON_DEVICES: Final = 1000


class LinkFailed(SaveFailed):
    """A store did not copy the files of the step before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Describes the shards of a tree that this process wrote in a committed step."""

    tree: TreePlan
    folders: tuple[str, ...]  # of its database, then of databases whose files it shares
    written: Table
    arrays: Sequence[weakref.ref[jax.Array] | None]
    prints: Sequence[bytes | None]  # fingerprints of the source shards; None if not compared
    later: Collection[int]  # source shards whose fingerprints can be taken from now on
    age: int  # steps since all shards were compared
    trusted: dict[str, int]  # by file: how many steps may refer to it before it is read back
    bad: dict[str, list[ChunkWrite]] = field(default_factory=dict)  # the damaged chunks, by file

    def read_back(
        self, newer: Base | None, storage: Storage, goes_on: Callable[[], bool]
    ) -> Iterator[str]:
        """Reads the files that the next step may refer to, if they are due; yields problems.

        Args:
            newer: The base of the newest step, which shows what has not changed for two steps.
        """
        if newer is None or newer.tree != self.tree:
            return
        refs = zip(self.arrays, newer.arrays, strict=True)
        alive = [a is not None and b is not None and a() is b() is not None for a, b in refs]
        prints = zip(self.prints, newer.prints, strict=True)
        same = [
            alive[source.array] or (one is not None and one == other)
            for source, (one, other) in zip(self.tree.sources, prints, strict=True)
        ]
        copies, left = storage.server_copies, MOST_BYTES
        worth = _worth_linking(self, same, copies=copies, unread=True)
        for file in [file for file in _files_of(self, worth) if not self.trusted[file]]:
            if copies:  # files not read now are read after a later step
                self.trusted[file], left = 1, left - self.written.sizes[file]
            if left >= 0 and goes_on():
                yield from self._read(file, storage, goes_on)

    def _read(self, file: str, storage: Storage, goes_on: Callable[[], bool]) -> Iterator[str]:
        folder, chunks = self.folders[0], _by_file(self)[file]
        shared = f"{folder}/{file}, which steps share,"
        try:
            bad = damaged_chunks(storage, folder, file, self.written, chunks, goes_on)
        except (StoppedReading, FileNotFoundError):  # somebody deleted the step
            return
        except (OSError, CheckpointError) as error:
            yield f"{shared} cannot be read back, so it is written again: {error}"
            return
        self.trusted[file] = 0 if bad else TRUSTED
        if bad:
            self.bad[file] = bad
            leaves = [*map(path_text, self.tree.array_paths)]
            which = dict.fromkeys(leaves[self.tree.sources[chunk.source].array] for chunk in bad)
            yield (
                f"{shared} is damaged in leaf {', '.join([*which][:8])}. The next step writes it "
                "again, and mends this one if the values are still the same."
            )


@dataclass(slots=True, kw_only=True)
class Changes:
    """Holds the changes since an earlier step, as far as a save knows them."""

    tree: TreePlan
    base: Base | None
    asks: bool  # whether all shards get fingerprints
    copies: bool  # whether files are copied by a store, instead of linked
    arrays: Sequence[weakref.ref[jax.Array] | None]
    same: list[bool]  # by source
    sent: dict[int, Any]  # fingerprints on their way from devices, by source, to compare with later
    later: Collection[int]  # source shards whose fingerprints cannot be taken yet
    linked: set[int] = field(default_factory=set)  # unchanged sources, in files worth linking
    left: set[int] = field(default_factory=set)  # linked sources whose values are not needed
    # Sizes of the linked or copied files, by name in the earlier step.
    files: dict[str, int] = field(default_factory=dict)
    mark: str = ""  # as in `names.part`: copies have it in their names
    prints: list[bytes | None] = field(default_factory=list)

    def link(self, storage: Storage, folder: str) -> None:
        """Links the files of unchanged shards into a new directory of a database.

        Afterwards the values are not needed, and the earlier step may be deleted.

        Raises:
            OSError, CheckpointError: the links cannot be made, and none is left.
        """
        if self.base is None or self.copies:
            return
        files = _files_of(self.base, self.linked)
        new = {file: self.base.written.sizes[file] for file in files if file not in self.files}
        if new:
            storage.link_all(self.base.folders[0], folder, new)
        self.files |= new

    def reused(self, snapshot: Sequence[Any], storage: Storage, folder: str, mark: str) -> Reused:
        """Compares shards in host memory; returns the shards that are linked and need no writing.

        Raises:
            SaveFailed: a linked file, or a file that a store should copy, is gone.
            LinkFailed: a store did not copy files.
        """
        base, sources, self.mark = self.base, self.tree.sources, mark
        known = [None] * len(sources) if base is None else base.prints
        found = dict(zip(self.sent, fingerprint.arrived([*self.sent.values()]), strict=True))
        more = False
        for i, source in enumerate(sources):
            one = known[i]
            if source.is_host_memory and not self.same[i]:
                self.same[i] = one is not None and fingerprint.is_of(one, snapshot[i])
                more = more or self.same[i]
                if self.asks and not self.same[i]:
                    found[i] = fingerprint.of_host(snapshot[i])
        pairs = zip(known, self.same, strict=True)
        self.prints = [one if same else found.get(i) for i, (one, same) in enumerate(pairs)]
        if base is None or not any(self.same):
            return NOTHING_REUSED
        before = self.linked
        if more:  # sources worth linking before still are
            self.linked = _worth_linking(base, self.same, copies=self.copies)
        if self.copies:
            self._copy(base, storage, folder)
        else:
            self._check_links(storage, folder)
            try:
                self.link(storage, folder)
            except (OSError, CheckpointError):  # the values are here
                self.linked = before
        to = {file: names.data_file_of(file, self.mark) for file in base.written.sizes}
        table = base.written.renamed(to) if self.mark else base.written  # copies have other names
        return Reused(self.linked, _true(self.same) - self.linked, table)

    def _check_links(self, storage: Storage, folder: str) -> None:
        """Raises SaveFailed if another process has cleared up the links, as the next job does."""
        for name, size in self.files.items():
            try:
                found = storage.size(f"{folder}/{name}")
            except (FileNotFoundError, CheckpointError):
                found = None
            if found != size:
                raise SaveFailed(
                    f"{folder}/{name}, which was linked there for this save, was changed or "
                    "deleted. Let only one job save here."
                )

    def _copy(self, base: Base, storage: Storage, folder: str) -> None:
        """Lets the store copy the files."""
        self.files = {file: base.written.sizes[file] for file in _files_of(base, self.linked)}
        where = base.folders[0]
        copied = [(f"{where}/{file}", names.data_file_of(file, self.mark)) for file in self.files]
        try:
            together(storage, [partial(storage.link, a, f"{folder}/{b}") for a, b in copied])
        except FileNotFoundError as error:
            raise SaveFailed(
                f"{where} was deleted while a step that shares its files was being saved "
                f"({error}). Save again: the next step is written as a whole."
            ) from error
        except OSError as error:
            raise LinkFailed(
                f"{folder}: the store did not copy files of {where}: {error}. Save again: from now "
                "on, all is sent."
            ) from error

    def mended(self, storage: Storage, folder: str, written: Table) -> Iterator[str]:
        """Mends the damage that was found, once this step is committed; yields reports."""
        if self.base is None:
            return
        first, *others = self.base.folders
        for file, bad in [*self.base.bad.items()]:  # a read-back that hung may still add one
            good, done = f"{first}/{file}", [first]
            try:
                left = mend(storage, file, bad, (first, self.base.written), (folder, written))
                if len(left) == len(bad):
                    continue
                for other in others:
                    if storage.kind(path := f"{other}/{file}") == "file":
                        put_instead(storage, good, path)
                        done.append(other)
            except (OSError, EOFError, CheckpointError) as error:
                yield f"{good} cannot be mended: {error}"
            else:
                but = ", but for values that have changed since" if left else ""
                yield f"{file} is mended in {', '.join(done)}{but}"

    def base_of_next(self, folder: str, written: Table) -> Base | None:
        """Returns the base of a later save, once this save is committed."""
        if not written.sizes:  # this process had nothing to write
            return None
        old = self.base
        trusted = dict.fromkeys(written.sizes, TRUSTED if self.copies else 0)
        if old is not None:
            trusted |= {
                names.data_file_of(file, self.mark): max(0, old.trusted[file] - 1)
                for file in self.files
            }
        return Base(
            tree=self.tree,
            folders=(folder, *(old.folders if old is not None else ())),
            written=written,
            arrays=self.arrays,
            prints=self.prints,
            later=self.later,
            age=0 if self.asks or old is None else old.age + 1,
            trusted=trusted,
        )


def changes_since(
    base: Base | None, tree: TreePlan, values: Sequence[Array], storage: Storage
) -> Changes:
    """Finds identical arrays, and compares shards on accelerators, waiting for the result."""
    if base is not None and base.tree != tree:
        base = None
    asks = base is None or base.age + 1 >= _ASKED_EVERY
    same = [False] * len(tree.sources)
    if base is not None:
        pairs = zip(base.arrays, values, strict=True)
        known = [ref is not None and ref() is value for ref, value in pairs]
        same = [known[source.array] for source in tree.sources]
    away = [i for i, source in enumerate(tree.sources) if not source.is_host_memory and not same[i]]
    compared = [i for i in away if base is not None and base.prints[i] is not None]
    later = () if base is None else base.later
    taken = [i for i in later if not same[i]]
    if asks:
        sizes = {i: tree.sources[i].shard.size * tree.sources[i].stored.itemsize for i in away}
        rest = sorted({*away} - {*compared}, key=sizes.__getitem__, reverse=True)
        taken = rest[:_MOST_ON_DEVICES]
    asked = [*compared, *taken]
    places: Any = [(values[tree.sources[i].array], tree.sources[i].position) for i in asked]
    shards = [value.addressable_data(position) for value, position in places]
    sent = dict(zip(asked, fingerprint.send(shards), strict=True))
    waiting = [i for i in later if same[i]]  # for a program, but not changed either
    changes = Changes(
        tree=tree,
        base=base,
        asks=asks,
        copies=storage.server_copies,
        arrays=[weakref.ref(v) if isinstance(v, jax.Array) else None for v in values],
        same=same,
        sent=sent if asks else {i: sent[i] for i in taken},
        later=[*waiting, *(i for i in taken if sent[i] is fingerprint.LATER)],
    )
    if base is not None:
        for i, one in zip(compared, fingerprint.arrived([sent[i] for i in compared]), strict=True):
            same[i] = one is not None and one == base.prints[i]
        if any(same):
            held = {chunk.source for chunk in tree.held.chunks}  # written on this disk all the same
            changes.linked = _worth_linking(base, same, copies=changes.copies)
            changes.left = changes.linked - held
    return changes


def _worth_linking(
    base: Base, same: Sequence[bool], *, copies: bool, unread: bool = False
) -> set[int]:
    """Returns the unchanged sources in files that are trusted and used enough to be linked.

    Args:
        unread: Whether the files may still have to be read back.
    """
    places: Any = base.written.places
    sizes, found = base.written.sizes, _true(same)
    files = _by_file(base).items()
    while True:
        idle = {
            chunk.source
            for file, chunks in files
            if sum(places[chunk.key].size for chunk in chunks if chunk.source in found)
            < _LEAST_USED * sizes[file]
            or (copies and sizes[file] not in COPIED_BYTES)
            or not (unread or base.trusted[file])
            for chunk in chunks
        }
        if not idle & found:
            return found
        found -= idle


def _by_file(base: Base) -> Mapping[str, list[ChunkWrite]]:
    """Returns the chunks in each file; small chunks are in none."""
    found: defaultdict[str, list[ChunkWrite]] = defaultdict(list)
    for chunk in base.tree.writes.chunks:
        if isinstance(place := base.written.places[chunk.key], Place):
            found[place.file].append(chunk)
    return found


def _files_of(base: Base, sources: Collection[int]) -> list[str]:
    """Returns the files that have values of these sources."""
    files = _by_file(base).items()
    return [file for file, chunks in files if any(chunk.source in sources for chunk in chunks)]


def _true(those: Sequence[bool]) -> set[int]:
    return {i for i, one in enumerate(those) if one}
