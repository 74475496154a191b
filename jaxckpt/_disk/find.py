"""Finds the checkpoint that a path means.

The contents of the path decide how it is read:

    a checkpoint      `_CHECKPOINT_METADATA`, our record, or directories that are items
    an item           `_METADATA`, or a legacy `checkpoint` file, or nothing but zarr arrays
    a run's root      directories (or Flax files) whose names end in a step number
    a Flax file       `checkpoint_<step>`, msgpack
    anything else     an error that lists what was found

Each directory is listed once and each small file read once. The search starts again only if
something does not fit (see `found`) because the checkpoint was replaced in the meantime.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from jaxckpt._core.log import logger
from jaxckpt._disk.found import (
    Entries,
    Found,
    array_names,
    check_sizes,
    find_items,
    is_current,
    is_item,
    is_sealed,
    json_name,
    lacks_marker,
    record_at,
)
from jaxckpt.errors import CheckpointError, CheckpointNotFound, CorruptCheckpoint, is_io_failure
from jaxckpt.format import jsontext, names, safetensors, step
from jaxckpt.format.run import is_like_step, number_of
from jaxckpt.format.step import StepMetadata
from jaxckpt.storage import EntryKind, Storage, ahead, beside, corrupt, listing, now, real, together

T = TypeVar("T")

# How often a read of a checkpoint that keeps being replaced starts again.
_TRIES: Final = 20
# How often a run is listed; a writer may delete a listed step, having committed newer steps.
LISTINGS: Final = 3
_CHECKPOINT_MARKS: Final = {
    names.CHECKPOINT_METADATA,
    names.RECORD,
    names.ORBAX_MARKER,
    names.WRITER,
    names.DELETION_RECORD,
}


def at_rest(
    storage: Storage, path: str, read: Callable[[Found], T], *, fallback: bool = False
) -> T:
    """Finds a checkpoint and reads it; starts again if it was replaced in the meantime.

    Args:
        fallback: Whether to read an earlier step if `path` is a run and its newest step is damaged.
    """
    seen: object = None
    for _ in range(_TRIES):
        found, problem = None, None
        try:
            found = find(ahead(storage, path), path)
            result = read(found)
            if is_sealed(found) or is_current(found):
                return result
            del result
            continue
        except (CheckpointError, FileNotFoundError) as error:
            if is_io_failure(error):  # an object store did not answer; asking again takes as long
                raise
            problem = error
        before, seen = seen, _generation(storage, path)
        try:
            if is_current(found) if found is not None else seen == before:
                if fallback and found is not None and isinstance(problem, CorruptCheckpoint):
                    return _read_earlier(storage, real(storage, path), found, read, problem)
                raise _about(problem, path)
        finally:
            # Otherwise the error and this frame form a cycle that keeps what was read in memory.
            del problem, found
    raise CheckpointNotFound(
        f"{path} was replaced {_TRIES} times while it was being read. Try again when no job is "
        "replacing it."
    )


def _read_earlier(
    storage: Storage, root: str, newest: Found, read: Callable[[Found], T], error: CorruptCheckpoint
) -> T:
    """Reads the newest step of a run that is not damaged; raises `error` if there is none."""
    problems = []
    # The newest again: it is damaged only if that is seen twice.
    for path in _steps_from(storage, root, newest):
        try:
            result = read_step(storage, path, read)
        except (CorruptCheckpoint, CheckpointNotFound) as problem:
            problems.append(f"{posixpath.basename(path)}: {problem}")
            continue
        warn_skipped(root, problems, posixpath.basename(path))
        return result
    try:
        raise error
    finally:
        del error  # its traceback refers to this frame


def steps_to_try(storage: Storage, path: str) -> list[str]:
    """Returns the paths of a run's steps, newest first; empty if `path` is not a run."""
    try:
        return _steps_from(storage, real(storage, path), find(storage, path))
    except (CheckpointError, FileNotFoundError) as error:
        if is_io_failure(error):
            raise
        return []


def _steps_from(storage: Storage, root: str, newest: Found) -> list[str]:
    """Returns the paths of a run's steps from the newest good one down, then those marked."""
    parent, name = posixpath.split(newest.path)
    steps = _steps(listing(storage, root) or {}) if parent == root else []
    if name not in steps:
        return []
    paths = [f"{root}/{step}" for step in steps]
    marks = together(storage, [partial(_has_mark, storage, path) for path in paths])
    marked = [path for path, mark in zip(paths, marks, strict=True) if mark]
    return [path for path in paths[steps.index(name) :] if path not in marked] + marked


def _has_mark(storage: Storage, path: str) -> bool:
    """Returns whether a step is marked, as far as its record can be read."""
    try:
        return bool(read_found(storage, path, storage.entries(path)).differences)
    except (CheckpointError, OSError) as error:
        if is_io_failure(error):
            raise
        return False


def newest_committed(storage: Storage, path: str, *, again: int = LISTINGS - 1) -> str:
    """Returns the path of a run's newest committed step, damaged or not; `path` if it has none."""
    root, passed = real(storage, path), list[str]()
    entries: Entries = {}
    with contextlib.suppress(OSError):  # reading it raises
        entries = listing(storage, root) or {}
    is_run = names.TREE_METADATA not in entries and _CHECKPOINT_MARKS.isdisjoint(entries)
    for name in _steps(entries) if is_run else ():
        if _may_be_committed(storage, f"{root}/{name}"):
            warn_skipped(root, passed, name)
            return f"{root}/{name}"
        if again and is_deleted(storage, f"{root}/{name}"):
            return newest_committed(now(storage), path, again=again - 1)
        passed.append(f"{name} is not a committed step")
    return path


def _may_be_committed(storage: Storage, path: str) -> bool:
    marker = f"{path}/{names.COMMIT_MARKER}"
    try:
        return looks_committed(storage, path) or storage.kind(marker) == "file"
    except OSError as error:  # a file, or unreadable: reading it says so
        return not isinstance(error, FileNotFoundError)


def step_path(storage: Storage, root: str, number: int) -> str:
    """Returns the path of a step of a run; a plain one if the run does not have it."""
    steps = filter(is_like_step, _steps(listing(storage, root) or {}))  # Flax has 1e5, too
    return f"{root}/{next((name for name in steps if number_of(name) == number), number)}"


def read_step(storage: Storage, path: str, read: Callable[[Found], T]) -> T:
    """Reads a step of a run; CheckpointNotFound if the path is itself a run, not a step."""

    def read_itself(found: Found) -> T:
        if posixpath.dirname(found.path) != posixpath.dirname(path):
            raise CheckpointNotFound(f"{found.path} is not a step of {posixpath.dirname(path)}")
        return read(found)

    return at_rest(storage, path, read_itself)


def _about(problem: CheckpointError | FileNotFoundError, path: str) -> Exception:
    if isinstance(problem, CheckpointError):
        return problem
    gone = CheckpointNotFound(f"{path} was deleted while it was being read: {problem}")
    gone.__cause__ = problem
    return gone


def _generation(storage: Storage, path: str) -> tuple[str | None, ...]:
    """Returns a value that changes if a checkpoint at, around or newest in `path` is replaced."""
    path = real(storage, path)
    inside = listing(storage, path) or {}  # in one look: it may be deleted at any time
    replacement = beside(path, names.replacement(posixpath.basename(path)))
    paths = [path, posixpath.dirname(path), replacement]
    if names.RECORD not in inside:
        paths += [f"{path}/{name}" for name in _steps(inside)[:1]]
    return (*paths, *(_record_digest(storage, one) for one in paths))


def _record_digest(storage: Storage, path: str) -> str | None:
    try:
        return step.digest(storage.read(f"{path}/{names.RECORD}", max_bytes=step.MAX_RECORD_BYTES))
    except (OSError, ValueError) as error:
        if is_io_failure(error):
            raise
        return None


def find(storage: Storage, path: str) -> Found:
    """Finds the checkpoint that a path means; for a run's root, its newest good step.

    Raises:
        CheckpointNotFound: there is none, or it is not committed.
        CorruptCheckpoint: its own metadata files are damaged.
    """
    linked, path = path, real(storage, path)
    if (entries := listing(storage, path)) is None:
        return _find_file(storage, path, linked)
    if names.TREE_METADATA in entries or _CHECKPOINT_MARKS.isdisjoint(entries):
        return _find_around(storage, path, entries)
    return read_found(storage, path, entries)


def _find_file(storage: Storage, path: str, linked: str) -> Found:
    """Finds a checkpoint that is no directory; or that was about to replace one, which is gone."""
    if (kind := storage.kind(path)) == "file":
        # The name of the target of a link may not show the format.
        path = linked if linked.endswith(safetensors.SUFFIXES) else path
        return Found(storage=storage, path=path, items={"": path}, is_file=True)
    replacement = beside(path, names.replacement(posixpath.basename(path)))
    if listing(storage, replacement) is not None:
        return find(storage, replacement)
    if kind is None:
        raise CheckpointNotFound(f"{path}: no such file or directory. {neighbours(storage, path)}")
    raise CheckpointNotFound(f"{path} is neither a directory nor a regular file")


def read_found(storage: Storage, path: str, entries: Entries) -> Found:
    """Reads the small files at the top of a checkpoint's directory; raises as `find` does."""
    found = read_facts(storage, path, entries)
    handled = {n: f"{path}/{n}" for n in found.metadata.handlers if n in entries}
    items = _items(found, entries) or handled  # which only a program's own handlers read
    if not items:
        shown = ", ".join(sorted(entries))
        raise corrupt(path, f"is a checkpoint without items; it contains {shown}")
    items.pop(found.deleting or "/", None)
    return replace(found, items=items)


def read_facts(storage: Storage, path: str, entries: Entries) -> Found:
    """Does the same, but looks for no items."""
    found = Found(storage=storage, path=path, listings={path: entries})
    is_ours = names.WRITER in entries or names.RECORD in entries
    marker = entries.get(names.COMMIT_MARKER)
    if is_ours and (marker is None or marker.kind != "file"):
        raise _no_marker(path)
    if not is_ours and names.CHECKPOINT_METADATA in entries and lacks_marker(path, entries):
        raise _no_marker(path, f" If it is a complete copy, add an empty {names.COMMIT_MARKER}.")
    if names.RECORD in entries:
        found = replace(found, record=record_at(storage, path))
    elif is_ours or lost_record(found):
        raise corrupt(
            f"{path}/{names.RECORD}",
            "is missing: the list of the checkpoint's files. Mend it from another copy with "
            "`jaxckpt heal`, or restore an older checkpoint.",
        )
    name = posixpath.basename(path)
    if (found.record is None or found.record.name != name) and names.is_temporary(name):
        raise _uncommitted(storage, path)
    found.refuse_holes(path)
    metadata, deleting = StepMetadata(), None
    if names.CHECKPOINT_METADATA in entries:
        data = found.read(path, names.CHECKPOINT_METADATA)
        metadata = step.decode(data, file=f"{path}/{names.CHECKPOINT_METADATA}")
    if names.DELETION_RECORD in entries:
        file = f"{path}/{names.DELETION_RECORD}"
        deleting = step.decode_deletion(storage.read(file, max_bytes=jsontext.MAX_BYTES), file=file)
    return replace(found, metadata=metadata, deleting=deleting)


def _no_marker(path: str, advice: str = "") -> CheckpointNotFound:
    return CheckpointNotFound(
        f"{path} is not committed: no regular file {names.COMMIT_MARKER}. A save is in "
        f"progress or died, or the checkpoint is being deleted.{advice}"
    )


def is_deleted(storage: Storage, path: str) -> bool:
    """Returns whether a directory is gone, or its deletion has begun: the marker goes first."""
    if storage.atomic_rename:
        return storage.kind(path) is None
    entries = listing(storage, path)
    return entries is None or (names.RECORD in entries and names.COMMIT_MARKER not in entries)


def lost_record(found: Found) -> bool:
    """Returns whether a checkpoint lacks its record, but another file shows that jaxckpt wrote it.

    Returns False for a lone item, which was copied without a record, and for a run.
    """
    entries = found.entries(found.path)
    if names.RECORD in entries or (_CHECKPOINT_MARKS.isdisjoint(entries) and _steps(entries)):
        return False
    if names.CHUNK_SUMS in entries:
        return names.CHECKPOINT_METADATA in entries
    items = (f"{found.path}/{name}" for name, entry in entries.items() if entry.kind == "dir")
    return any(names.CHUNK_SUMS in found.entries(item) for item in items)


def _items(found: Found, entries: Entries) -> dict[str, str]:
    if names.TREE_METADATA in entries:
        return {"": found.path}
    recorded = found.contents(found.path) if found.record is not None else {}
    removed = found.removed
    dirs = {n: f"{found.path}/{n}" for n, k in recorded.items() if k == "dir" and n not in removed}
    # Directories that only a program's own handler reads count if there is nothing else.
    files = found.recorded(found.path)
    trees = {name for name in dirs if f"{name}/{names.TREE_METADATA}" in files}
    items = {n: path for n, path in dirs.items() if n in trees or is_item(found, path)} or dirs
    others = {n: entry for n, entry in entries.items() if entry.kind == "dir" and n not in recorded}
    items |= find_items(found, found.path, others) if others else {}
    # A tree that has lost its `_METADATA` is the only item; reading it names the file.
    return items or ({"": found.path} if is_item(found, found.path) else {})


def _uncommitted(storage: Storage, path: str) -> CheckpointNotFound:
    return CheckpointNotFound(
        f"{path} was never committed: its save is in progress or died. {neighbours(storage, path)}"
    )


# --- items, runs and old checkpoints ---------------------------------------------------------


def _find_around(storage: Storage, path: str, entries: Entries) -> Found:
    if names.is_temporary(posixpath.basename(path)):
        raise _uncommitted(storage, path)
    if (around := _checkpoint_around(storage, path)) is not None:
        return around
    if not _CHECKPOINT_MARKS.isdisjoint(entries):
        return read_found(storage, path, entries)
    found = Found(storage=storage, path=path, listings={path: entries})
    legacy = entries.get(names.LEGACY_TREE)
    if names.TREE_METADATA in entries or (legacy is not None and legacy.kind == "file"):
        return replace(found, items={"": path})
    if _steps(entries):
        return _newest_good(storage, path, entries)
    items = find_items(found, path, entries)
    if any(json_name(found, item) is None for item in items.values()):
        return replace(found, items=items)
    if is_item(found, path) or array_names(found, path):
        return replace(found, items={"": path})
    raise CheckpointNotFound(f"{path} {_what_it_is(path, entries)} {neighbours(storage, path)}")


def _what_it_is(path: str, entries: Entries) -> str:
    """Describes a directory that is no checkpoint."""
    if not entries.keys().isdisjoint((names.RUN, names.OWNER)):
        return "is a run without a committed step yet."
    shown = ", ".join(sorted(entries)[:8]) + (", ..." if len(entries) > 8 else "")
    text = f"is not a checkpoint, an item of one or a run; it contains {shown or 'nothing'}."
    weights = sorted(filter(lambda name: name.endswith(safetensors.SUFFIXES), entries), key=len)
    return f"{text} Its weights are in {path}/{weights[-1]}." if weights else text


def _checkpoint_around(storage: Storage, path: str) -> Found | None:
    """Returns the checkpoint of which a directory is an item, with only this item."""
    parent, name = posixpath.split(path)
    if names.is_temporary(posixpath.basename(parent)):
        raise CheckpointNotFound(
            f"{path} is in a checkpoint that was never committed: its save is in progress or died"
        )
    entries = listing(storage, parent) or {}
    if not any(entry.kind == "file" and n in _CHECKPOINT_MARKS for n, entry in entries.items()):
        return None
    try:
        around = read_found(storage, parent, entries)
    except CorruptCheckpoint as error:
        if error.file == f"{parent}/{names.RECORD}" or names.RECORD in entries:
            raise
        # Orbax does not make these files durable; the item itself may well be complete.
        return None
    if name == around.deleting:
        raise around.being_deleted()
    return replace(around, items={name: path}) if name in around.items else None


def looks_committed(storage: Storage, path: str) -> bool:
    """Returns whether a directory named like a step is a committed checkpoint, by its listing."""
    entries = storage.entries(path)
    if names.RECORD in entries or names.WRITER in entries:
        marker = entries.get(names.COMMIT_MARKER)
        return names.RECORD in entries and marker is not None and marker.kind == "file"
    found = Found(storage=storage, path=path, listings={path: entries})
    is_empty = entries.keys() == {names.COMMIT_MARKER}  # a store may act late on its request
    if is_empty or lacks_marker(path, entries) or lost_record(found):
        return False
    if any(entries[name].kind != "dir" for name in _STEP_MARKS & entries.keys()):
        return True
    # A run inside the run is not a step: deleting a step must not delete many checkpoints.
    return not _steps(entries) and _has_items(found)


def _has_items(found: Found) -> bool:
    """Returns whether a directory has a tree as an item, and no whole checkpoint in it."""
    items = find_items(found, found.path, found.entries(found.path)).values()
    is_one = all(_CHECKPOINT_MARKS.isdisjoint(found.entries(item)) for item in items)
    return is_one and any(json_name(found, item) is None for item in items)


# Orbax committed a directory that is named like a step and has one of these.
_STEP_MARKS: Final = frozenset(
    {names.CHECKPOINT_METADATA, names.COMMIT_MARKER, names.TREE_METADATA, names.LEGACY_TREE}
)


def _steps(entries: Entries, kinds: Container[EntryKind] = ("dir",)) -> list[str]:
    """Returns the names that look like steps of a run, newest first."""
    found = []
    for name, entry in entries.items():
        if entry.kind in kinds and is_like_step(name) and not names.is_part_of_tree(name):
            found.append((float(number_of(name)), name))
        elif entry.kind == "file" and (flax := names.flax_step(name)) is not None:
            found.append((flax, name))
    return [name for _, name in sorted(found, reverse=True)]


def _newest_good(
    storage: Storage, path: str, entries: Entries, *, again: int = LISTINGS - 1
) -> Found:
    problems: list[str] = []
    marked: tuple[Found, list[str]] | None = None
    steps = _steps(entries, ("dir", "other"))
    for name in steps:
        if entries[name].kind == "other":
            problems.append(f"{name} is a link. Restore it by its own path, or move it here")
            continue
        try:
            found = find(ahead(storage, f"{path}/{name}"), f"{path}/{name}")
            if posixpath.dirname(found.path) != path:
                problems.append(f"{name} is a run, not a step")
                continue
            check_sizes(found)
        except CheckpointError as error:
            if is_io_failure(error):  # nothing is known of this step, so no earlier one is newest
                raise
            if again and is_deleted(storage, f"{path}/{name}"):  # a newer step may have come
                now_ = listing(now(storage), path) or {}
                return _newest_good(now(storage), path, now_, again=again - 1)
            problems.append(f"{name}: {error}")
            continue
        if found.differences:
            marked = marked or (found, [*problems])
            problems.append(f"{name}: {marked_as(found)}")
            continue
        warn_skipped(path, problems, name)
        return found
    if marked is not None:
        found, problems = marked
        warn_skipped(path, problems, posixpath.basename(found.path))
        return found
    raise CheckpointNotFound(
        f"{path}: none of its {len(steps)} steps can be read:\n  " + "\n  ".join(problems[:10])
    )


def marked_as(found: Found) -> str:
    """Describes a step that was saved although replicas differed."""
    return f"{found.path} is marked: replicas differed at its save: {'; '.join(found.differences)}"


def warn_skipped(root: str, problems: Sequence[str], good: str) -> None:
    for problem in problems:
        logger.warning("%s: took %s. Skipped: %s", root, good, problem)


def neighbours(storage: Storage, path: str) -> str:
    """Describes the neighbours of a path that was not found."""
    parent = posixpath.dirname(path)
    if storage.kind(parent) != "dir":
        return f"{parent} is not a directory."
    if names.RECORD in (entries := storage.entries(parent)):
        return f"{parent} is itself a checkpoint."
    near = [n for n in entries if not (names.is_temporary(n) or n.startswith("_jaxckpt."))]
    shown = ", ".join(near[:8]) + (", ..." if len(near) > 8 else "")
    return f"{parent} contains {shown or 'nothing'}."
