"""The root of a run, listed: which entries are steps, and what the others are.

<root>/<step>                            a step: committed, torn or still being written
<root>/<step>.orbax-checkpoint-tmp-...   a step that is being written or deleted
<root>/<step>.jaxckpt-bad-...            a damaged step that was set aside
<root>/<KeepPolicy.move_to>              steps that were moved instead of deleted
<root>/_jaxckpt....                      a file of `format.names`
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from jaxckpt._core.log import logger
from jaxckpt._disk.find import neighbours
from jaxckpt.errors import CheckpointNotFound, CorruptCheckpoint, StoreError
from jaxckpt.format import names, run
from jaxckpt.format.run import Owner, RootFile, StepNames
from jaxckpt.storage import Entry, Storage, is_temporary_file, listed, listing, locate

STRAY: Final = "not part of the run; left alone"
_RUN_IS: Final = "A run is the directory that contains the steps."
_ROOT_FILES: Final = frozenset(
    {names.RUN, names.OWNER, names.DOOMED, names.LOCK, names.ROOT_METADATA, names.DISK}
    | {names.LEDGER, names.STEPS}
)
_CHECKPOINT_FILES: Final = frozenset(
    {names.RECORD, names.CHECKPOINT_METADATA, names.TREE_METADATA, names.WRITER}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The root of a run at one time."""

    entries: Mapping[str, Entry]
    naming: StepNames
    steps: dict[int, str]  # names by number, in order, regardless of the contents
    gone: set[int] = field(default_factory=set)  # those found to have been deleted since

    def directories(self) -> dict[str, int]:
        """Returns the directories named like steps, with their numbers."""
        return {
            name: number for number, name in self.steps.items() if self.entries[name].kind == "dir"
        }

    def flax_files(self) -> dict[str, int]:
        """Returns the files named like checkpoints of Flax, with their step numbers."""
        numbered = {
            name: names.flax_step(name)
            for name, entry in self.entries.items()
            if entry.kind == "file"
        }
        return {name: int(n) for name, n in numbered.items() if n is not None and n.is_integer()}

    def strays(self, *, besides: Collection[str | None] = ()) -> dict[str, str]:
        """Returns a description of each entry that is neither a step nor a file of the run.

        Args:
            besides: Entries to leave out, such as the directory to which steps are moved.
        """
        described = {name: _describe(name, self) for name in self.entries if name not in besides}
        return {name: text for name, text in described.items() if text is not None}


def _describe(name: str, listing: Listing) -> str | None:
    if name in _ROOT_FILES or names.is_lease(name):
        return None
    if names.shares([name]) or names.is_guest(name):
        return None
    if names.is_set_aside(name):
        return "a damaged step that was set aside earlier"
    if names.is_deleting(name):
        return "being deleted, or left by an interrupted deletion"
    if names.is_temporary(name):
        return "a save of another writer, under way or interrupted"
    if (replaced := names.replaced(name)) is not None:
        return f"committed, and about to replace {replaced}"
    if is_temporary_file(name):
        return "a small file being written, or left by a writer that died"
    if listing.naming.step(name) is None:
        return STRAY
    if listing.entries[name].kind != "dir":
        return "named like a step, but not a directory; a link is not followed"
    return None


@dataclass(slots=True)
class ListedRoot:
    """The root of a run as this process has seen it, and the problems that it found there."""

    storage: Storage
    root: str
    naming: StepNames | None = None  # of the steps; if None, like those in the root
    quiet: bool = False  # records problems without logging them
    is_large: bool = False  # whether a store needs several requests to list it
    has_lock: bool = False  # once a process of the job has seen the lock, which stays
    problems: list[str] = field(default_factory=list)
    _views: dict[str, Storage] = field(default_factory=dict)
    _all: Storage | None = None  # a view of it, instead of views of steps
    _order: Iterator[int] = field(default_factory=count)  # in which views of it are asked for
    _latest: int = -1  # in this order, the view that there is

    def report(self, problem: str, *, logs: bool = True) -> None:
        """Records a problem the first time, and logs it then."""
        if problem not in self.problems:
            self.problems.append(problem)
            if logs:
                self.warn(problem)

    def warn(self, text: str) -> None:
        """Logs a warning; all warnings about a run come from here."""
        if not self.quiet:
            logger.warning("%s", text)

    def note_strays(self, listing: Listing, *, besides: Collection[str | None] = ()) -> None:
        """Records the entries of the root that do not belong to the run."""
        for name, text in listing.strays(besides=besides).items():
            self.report(f"{self.root}/{name}: {text}", logs=False)

    def entries(self) -> dict[str, Entry]:
        """Lists the root; empty if it does not exist. In a store, a small run is listed whole."""
        asked = next(self._order)
        view = None if self.is_large else whole(self.storage, self.root)
        if asked > self._latest:  # else another thread asked later, and has its answer
            self._all, self._latest = view, asked
        return listing(view or self.storage, self.root) or {}

    @property
    def seen(self) -> Collection[str]:
        """Returns the entries of the root when a small run in a store was last listed, or none."""
        view = self._all  # another thread may list the root again
        return () if view is None else view.entries(self.root)

    def view(self, name: str) -> Storage:
        """Returns a view of a step, which lists it once until the root is listed again."""
        found = self._all or self._views.get(name)
        if found is None:
            found = self._views[name] = whole(self.storage, f"{self.root}/{name}") or self.storage
        return found

    def files(self, name: str) -> Collection[str]:
        """Returns the files of a directory here, in a store by the latest list of a small run."""
        return (self._all or self.storage).files(f"{self.root}/{name}")

    def small(self, kind: type[RootFile], name: str) -> RootFile | None:
        """Reads a small file of the root; None if it is missing, or damaged, which is reported."""
        file = f"{self.root}/{name}"
        for is_last in (False, True):  # it may be overwritten at this moment
            try:
                data = self.storage.read(file, max_bytes=run.MAX_BYTES)
                return run.decode(kind, data, file=file)
            except (FileNotFoundError, NotADirectoryError):
                break
            except CorruptCheckpoint as error:
                if is_last:
                    self.report(f"{error}; the file is treated as missing")
        return None

    def owner(self) -> Owner | None:
        """Reads which job may commit; None if the owner's file is missing or damaged."""
        return self.small(Owner, names.OWNER)

    def emptiness(self) -> str:
        """Describes a root without steps, as the end of a sentence about it."""
        return "does not exist" if self.storage.kind(self.root) is None else "has no committed step"


def not_here(
    root: str, why: str = "the directory that this job opened: its steps and the lock are missing"
) -> StoreError:
    return StoreError(
        f"{root} is not {why}. Its file system may be unmounted, or the directory renamed or "
        "deleted. Bring it back, or start the job again"
    )


def check_root(storage: Storage, root: str) -> dict[str, Entry] | None:
    """Returns the entries of the root of a run; None if it does not exist.

    Raises:
        NotADirectoryError: the path is not a directory.
        ValueError: the directory is a checkpoint.
    """
    try:
        inside = storage.entries(root)
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        kind = storage.kind(root)
        what = f"is a {kind}, not a directory" if kind else f"lies below a file ({error})"
        raise NotADirectoryError(f"{root} {what} and cannot hold a run. {_RUN_IS}") from error
    if not _CHECKPOINT_FILES.isdisjoint(inside):
        parent, name = posixpath.split(root)
        hint = f" Did you mean {parent}?" if any(map(str.isdecimal, name)) else ""
        raise ValueError(f"{root} is a checkpoint, not a run. {_RUN_IS}{hint}")
    return inside


def existing_root(root: str | os.PathLike[str], *, looks: bool = False) -> tuple[Storage, str]:
    """Returns the storage and path of an existing root.

    Args:
        looks: Whether to return a view of the run instead if one request to a store lists it.

    Raises:
        CheckpointNotFound: no such directory.
        NotADirectoryError, ValueError: the path is not a directory, or it is a checkpoint.
    """
    storage, where = locate(root)
    storage = (looks and whole(storage, where)) or storage
    if check_root(storage, where) is None:
        near = neighbours(storage, where)
        raise CheckpointNotFound(f"{where}: no such file or directory. {near}")
    return storage, where


def whole(storage: Storage, path: str) -> Storage | None:
    """Returns a view of a run or a step in a store, if one request lists it."""
    return listed(storage, path, in_one=True) if storage.parallel_writes else None


def shown(found: Sequence[str]) -> str:
    """Returns the first few names as text."""
    return ", ".join(found[:8]) + (", ..." if len(found) > 8 else "") or "nothing"
