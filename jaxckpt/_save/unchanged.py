"""Finds what did not change since the step before, which a step then refers to.

The files of values are never changed, so a step may have hard links to those of an earlier one, or
copies that a store makes, and its database has the places in them: the step is complete by itself,
whatever is deleted. It pays for whole leaves (frozen weights, a reference model). What did not
change is

    the same `jax.Array` as in the step before, which is immutable: nothing is computed;
    a shard with the same fingerprint: on an accelerator it is taken before anything is copied to
    the host, in host memory while the save is written.

A shard that changed is asked again only after the next step that is written as a whole, which one
in `_WHOLE_EVERY` is: so states that change everywhere pay little, and damage to a file is not
carried on for ever.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax

from jaxckpt._core import fingerprint
from jaxckpt._disk.data_files import COPIED_BYTES, Written
from jaxckpt._disk.writer import NOTHING_KEPT, Kept
from jaxckpt._save.tree_plan import Array, TreePlan
from jaxckpt.errors import CheckpointError
from jaxckpt.format.ocdbt import Place
from jaxckpt.storage import Storage

_WHOLE_EVERY: Final = 20
# A file of which less is still in use is not linked: the rest would stay on the disk for nothing.
_LEAST_USED: Final = 0.5
# Each fingerprint on a device is a computation to start, which costs more than to write a few KB.
_MOST_ON_DEVICES: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Describes what this process wrote of a tree in the latest committed step."""

    tree: TreePlan
    folder: str  # of its database
    written: Written
    arrays: Sequence[weakref.ref[jax.Array] | None]
    prints: Sequence[bytes | None]  # of the source shards; None if not to be asked
    same: Sequence[bool]  # whether the source shards had not changed
    later: Collection[int]  # source shards whose fingerprints can be taken from now on
    age: int  # steps since all was written

    def is_there(self, storage: Storage) -> bool:
        """Returns whether all its files are, with their sizes; in a store, copying them tells."""
        if storage.scheme != "file":
            return True
        try:
            sizes = self.written.sizes.items()
            return all(storage.size(f"{self.folder}/{file}") == size for file, size in sizes)
        except (OSError, CheckpointError):
            return False


@dataclass(slots=True, kw_only=True)
class Changes:
    """Holds the changes since the step before, as far as a save knows them."""

    tree: TreePlan
    base: Base | None
    is_whole: bool  # whether all is to be written
    copies: bool  # whether files are copied by a store, instead of linked
    arrays: Sequence[weakref.ref[jax.Array] | None]
    same: list[bool]  # by source
    sent: dict[int, Any]  # fingerprints on their way from devices, by source, to compare with later
    later: Collection[int]  # source shards whose fingerprints cannot be taken yet
    linked: set[int] = field(default_factory=set)  # unchanged sources, in files worth linking
    left: set[int] = field(default_factory=set)  # those of them whose values are not needed
    prints: list[bytes | None] = field(default_factory=list)

    def kept(self, snapshot: Sequence[Any]) -> Kept:
        """Compares what is in host memory; returns what need not be written."""
        base, sources = self.base, self.tree.sources
        known = [None] * len(sources) if base is None else base.prints
        found = dict(zip(self.sent, fingerprint.arrived([*self.sent.values()]), strict=True))
        if self.is_whole:
            for i, source in enumerate(sources):
                is_host = source.is_host_memory
                self.prints.append(fingerprint.of_host(snapshot[i]) if is_host else found.get(i))
        if base is None:
            return NOTHING_KEPT
        if self.is_whole:
            return Kept((), _true(base.same), base.written, base.folder)
        more = False
        for i, source in enumerate(sources):
            one = known[i]
            if source.is_host_memory and not self.same[i] and one is not None:
                self.same[i] = fingerprint.is_of(one, snapshot[i])
                more = more or self.same[i]
        pairs = zip(known, self.same, strict=True)
        self.prints = [one if same else found.get(i) for i, (one, same) in enumerate(pairs)]
        if not any(self.same):
            return NOTHING_KEPT
        if more:  # what was worth it before still is
            self.linked = _worth_linking(base, self.same, copies=self.copies)
        apart = _true(self.same) - self.linked
        return Kept(self.linked, apart, base.written, base.folder)

    def base_of_next(self, folder: str, written: Written) -> Base | None:
        """Returns the base of the next save, once this one is committed."""
        if not written.sizes:  # this process had nothing to write
            return None
        was_same = self.base.same if self.base is not None else self.same
        return Base(
            tree=self.tree,
            folder=folder,
            written=written,
            arrays=self.arrays,
            prints=self.prints,
            same=was_same if self.is_whole else self.same,
            later=self.later,
            age=0 if self.is_whole or self.base is None else self.base.age + 1,
        )


def changes_since(
    base: Base | None, tree: TreePlan, values: Sequence[Array], storage: Storage
) -> Changes:
    """Finds what costs nothing to find, and compares what is on accelerators, waiting for it.

    Args:
        base: Of the latest committed step, if there is one to refer to.
        values: Of the arrays.
    """
    if base is not None and base.tree is not tree:
        base = None
    known = [False] * len(values)
    if base is not None:
        pairs = zip(base.arrays, values, strict=True)
        known = [ref is not None and ref() is value for ref, value in pairs]
    is_whole = base is None or base.age + 1 >= _WHOLE_EVERY
    if base is not None and (any(known) or any(base.prints)):
        is_whole = is_whole or not base.is_there(storage)
    away = [i for i, source in enumerate(tree.sources) if not source.is_host_memory]
    waiting: Sequence[int] = ()  # for a program, but not changed either
    if base is None or is_whole:
        same = [False] * len(tree.sources)
        compared = []
        taken = sorted(away, key=lambda i: _size(tree, i), reverse=True)[:_MOST_ON_DEVICES]
    else:
        same = [known[source.array] for source in tree.sources]
        compared = [i for i in away if not same[i] and base.prints[i] is not None]
        taken = [i for i in base.later if not same[i]]
        waiting = [i for i in base.later if same[i]]
    asked = [*compared, *taken]
    places: Any = [(values[tree.sources[i].array], tree.sources[i].position) for i in asked]
    shards = [value.addressable_data(position) for value, position in places]
    sent = dict(zip(asked, fingerprint.send(shards), strict=True))
    changes = Changes(
        tree=tree,
        base=base,
        is_whole=is_whole,
        copies=storage.scheme != "file",
        arrays=[weakref.ref(v) if isinstance(v, jax.Array) else None for v in values],
        same=same,
        sent={i: sent[i] for i in taken},
        later=[*waiting, *(i for i in taken if sent[i] is fingerprint.LATER)],
    )
    if base is not None and not is_whole:
        for i, one in zip(compared, fingerprint.arrived([sent[i] for i in compared]), strict=True):
            same[i] = one is not None and one == base.prints[i]
        if any(same):
            held = {chunk.source for chunk in tree.held.chunks}  # written on this disk all the same
            changes.linked = _worth_linking(base, same, copies=changes.copies)
            changes.left = changes.linked - held
    return changes


def _worth_linking(base: Base, same: Sequence[bool], *, copies: bool) -> set[int]:
    """Returns the unchanged sources in files that are used enough to be linked."""
    places, sizes = base.written.places, base.written.sizes
    chunks = [(places[chunk.key], chunk.source) for chunk in base.tree.writes.chunks]
    in_files = [(place, source) for place, source in chunks if isinstance(place, Place)]
    found = _true(same)
    while True:
        used: Counter[str] = Counter()
        for place, source in in_files:
            used[place.file] += place.size if source in found else 0
        idle = {
            file
            for file, size in used.items()
            if size < _LEAST_USED * sizes[file] or (copies and sizes[file] not in COPIED_BYTES)
        }
        bad = {source for place, source in in_files if place.file in idle} & found
        if not bad:
            return found
        found -= bad


def _true(those: Sequence[bool]) -> set[int]:
    return {i for i, one in enumerate(those) if one}


def _size(tree: TreePlan, source: int) -> int:
    one = tree.sources[source]
    return math.prod(one.shard.shape) * one.stored.itemsize
