"""The root of a run, listed: which entries are steps, and what the others are.

<root>/<step>                            a step: committed, torn or still being written
<root>/<step>.orbax-checkpoint-tmp-...   a step that is being written or deleted
<root>/<step>.jaxckpt-bad-...            a damaged step that was set aside
<root>/<KeepPolicy.move_to>              steps that were moved instead of deleted
<root>/_jaxckpt.run                      see `identity`
<root>/_jaxckpt.owner, .lock             see `owner`
<root>/_jaxckpt.ledger                   see `ledger`
<root>/_jaxckpt.doomed, .lease-...       see `leases` and `deletion`
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from jaxckpt._disk.find import neighbours
from jaxckpt.errors import CheckpointNotFound
from jaxckpt.format import names
from jaxckpt.format.run import StepNames
from jaxckpt.storage import Entry, Storage, is_temporary_file, listed, locate

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
        return "named like a step, but not a directory"
    return None


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
