"""Finds and removes what earlier jobs left: unfinished saves and deletions, and small files."""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import final

from jaxckpt._disk.commit import commit_of
from jaxckpt._run.index import StepIndex
from jaxckpt._run.leases import Leases
from jaxckpt._run.listing import Listing
from jaxckpt._save.job import is_under_way
from jaxckpt.format import names
from jaxckpt.format.run import Doomed, StepNames
from jaxckpt.storage import is_temporary_file


@final
class Leftovers:
    """The leftovers that a new owner has found, until they are removed."""

    def __init__(self, leases: Leases) -> None:
        self.spared = -1  # the step whose unfinished upload is kept for resuming
        self.spared_work: list[str] = []  # directories of such uploads
        # Files of saves newer than the newest step, and of deletions, by step: all unfinished.
        self.files: dict[str, list[str]] = {}  # empty where steps appear by a rename
        self.half: list[str] = []  # the steps in `files` that were being deleted
        self._leases = leases
        self._index = leases.index

    def find(self, listing: Listing, doomed: Doomed) -> list[str]:
        """Finds what is left; returns the entries of the root among it, for `sweep`."""
        root = self._index.root
        deleting = [name for name in doomed.steps if name in listing.directories()]
        begun = self._begun(listing, deleting)  # looked for only where it is needed
        found = commit_of(self._index.storage, root).left_below(begun)
        self.half = [name for name in deleting if name in found]
        self.files = {
            name: files
            for name, files in found.items()
            if name in deleting or self._was_saving(f"{root}/{name}", files)
        }
        return [entry for entry in listing.entries if self._is_left(entry)]

    def sweep(self, entries: Iterable[str]) -> None:
        """Finishes or removes what is left in the root."""
        if self.half:  # so that the next owner knows, if this job dies in between
            self._leases.doom(self.half)
        for entry in entries:
            self._sweep(entry)

    def remove(self) -> bool:
        """Removes the files left in steps, once their leases are over; returns whether it did."""
        before = len(self.files)
        self.files = {n: files for n, files in self.files.items() if not self._is_done(n, files)}
        if self.half and self.files.keys().isdisjoint(self.half):
            self.half = []
            self._index.storage.delete(f"{self._index.root}/{names.DOOMED}")
        return len(self.files) < before

    def _is_left(self, entry: str) -> bool:
        """Returns whether a killed job left an entry, or a lease expired, as far as names show."""
        if names.replaced(entry) is not None or names.ours_temporary(entry) is not None:
            return True
        if is_temporary_file(entry):  # a reader writes its lease again
            return True
        if entry == names.DOOMED:
            return not self.half
        return names.is_lease(entry) and self._leases.read(entry) is None

    def _sweep(self, entry: str) -> None:
        index, path = self._index, f"{self._index.root}/{entry}"
        try:
            if (name := names.replaced(entry)) is not None:
                commit_of(index.storage, f"{index.root}/{name}").recover()
            elif (name := names.ours_temporary(entry)) is None:
                index.storage.delete(path)
            elif is_under_way(f"{index.root}/{name}"):
                return
            elif self._is_spared(name):
                self.spared_work.append(entry)
            else:
                if not names.is_deleting(entry):
                    index.warn(f"removing {path}, left by an interrupted save")
                commit_of(index.storage, path).remove_work()
        except OSError as error:
            index.report(f"{path} is left over and cannot be removed: {error}")

    def _begun(self, listing: Listing, deleting: Sequence[str]) -> Iterator[str]:
        for name in dict.fromkeys([*self._index.unfinished(listing), *deleting]):
            is_spared = name not in deleting and self._is_spared(name)
            if not (is_spared or is_under_way(f"{self._index.root}/{name}")):
                yield name

    def _is_spared(self, name: str) -> bool:
        return (self._index.naming or StepNames()).step(name) == self.spared

    def _was_saving(self, path: str, files: list[str]) -> bool:
        """Returns whether a save left these files.

        A record without a writer may also be of a copy that somebody is making.
        """
        if not files:  # the save was trying out the store
            with contextlib.suppress(FileNotFoundError):  # it has just ended
                return any(map(is_temporary_file, self._index.storage.entries(path)))
            return False
        return names.WRITER in files or names.RECORD not in files

    def _is_done(self, name: str, files: list[str]) -> bool:
        # Or this job is saving that step.
        return is_under_way(f"{self._index.root}/{name}") or _is_removed(self._index, name, files)


def _is_removed(index: StepIndex, name: str, files: Sequence[str]) -> bool:
    """Removes the remains of a step, unless its writer lives; returns whether they are gone."""
    path = f"{index.root}/{name}"
    try:
        return commit_of(index.storage, path).remove_left(files)
    except OSError as error:
        index.report(f"{path} is left over and cannot be removed: {error}")
        return False


def remove_remains(index: StepIndex, steps: Iterable[str]) -> list[str]:
    """Removes remains of steps on a storage without renames; returns the steps that stay."""
    begun = [*steps]
    try:
        found = commit_of(index.storage, index.root).left_below(begun)
    except OSError as error:
        index.report(f"what is left of steps {begun} cannot be removed: {error}")
        return begun
    return [n for n, files in found.items() if files and not _is_removed(index, n, files)]


def unfinished(leases: Leases, among: Collection[int]) -> dict[int, list[str]]:
    """Returns the files that crashes left in steps of a storage without renames, by step.

    A save under way looks the same.
    """
    index, listing = leases.index, leases.index.listing()
    numbers = {name: n for name, n in listing.directories().items() if n in among}
    begun = (name for name, number in numbers.items() if index.state(listing, number) is None)
    found = commit_of(index.storage, index.root).left_below(begun)
    doomed = {*leases.doomed().steps} if found else set[str]()
    # The writer's file outlives a commit: a record without it means that the marker was lost.
    return {
        numbers[name]: files
        for name, files in found.items()
        if files and (name in doomed or names.RECORD not in files or names.WRITER in files)
    }


def remove_unfinished(
    leases: Leases, numbers: Sequence[int], check: Callable[[], object]
) -> list[int]:
    """Removes the remains of crashes in these steps; returns steps without a live writer.

    Args:
        check: Raises if another job owns the run.
    """
    index, found = leases.index, unfinished(leases, numbers)
    check()
    paths = {number: posixpath.basename(index.path(number)) for number in numbers}
    return [n for n in numbers if n not in found or _is_removed(index, paths[n], found[n])]
