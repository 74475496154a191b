"""Finds the checkpoint that a path means, and reads the small files at its top.

A path may mean five things, told apart by what lies there:

    a checkpoint      `_CHECKPOINT_METADATA`, our record, or directories that are items
    an item           `_METADATA`, or a legacy `checkpoint` file, or nothing but zarr arrays
    a run's root      directories (or Flax files) whose names end in a step number
    a Flax file       `checkpoint_<step>`, msgpack
    nothing of these  an error that says what was found
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar, cast

from jaxckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptCheckpoint,
    UnsupportedFormat,
    is_io_failure,
)
from jaxckpt.format import jsontext, names, step
from jaxckpt.format.step import Record, StepMetadata
from jaxckpt.storage import Storage

_logger = logging.getLogger("jaxckpt")

T = TypeVar("T")

# How often a reader starts again because a checkpoint was replaced under it.
_TRIES: Final = 20
_STEP: Final = re.compile(r"(?:.*_)?(\d{1,18})$")
_CHECKPOINT_MARKS: Final = frozenset(
    {
        names.CHECKPOINT_METADATA,
        names.RECORD,
        names.ORBAX_MARKER,
        names.WRITER,
        names.DELETION_RECORD,
    }
)

# A directory that is called like a step and has one of these is one that Orbax committed.
_STEP_MARKS: Final = (
    names.CHECKPOINT_METADATA,
    names.COMMIT_MARKER,
    names.TREE_METADATA,
    names.LEGACY_TREE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One committed checkpoint, found but for its items unread.

    Attributes:
        storage, path: Where it is. A flat checkpoint is its own only item.
        items: Paths of the items by name; a flat one is called "".
        step: What `_CHECKPOINT_METADATA` says; empty if there is none.
        record: Our own record, or None for what another program wrote.
        deleting: The item that Orbax has begun to delete; it is none of `items`.
    """

    storage: Storage
    path: str
    items: Mapping[str, str]
    step: StepMetadata = field(default_factory=StepMetadata)
    record: Record | None = None
    deleting: str | None = None


def consistently(storage: Storage, path: str, read: Callable[[], T]) -> T:
    """Reads a checkpoint as it was at one time: again, if it was replaced in the meantime.

    Raises:
        CheckpointNotFound: it was replaced each time, or is gone.
    """
    for _ in range(_TRIES):
        before = _generation(storage, path)
        try:
            result, problem = read(), None
        except (CheckpointError, FileNotFoundError) as error:
            result, problem = None, error
        if _generation(storage, path) != before:
            continue
        try:
            if isinstance(problem, CheckpointError):
                raise problem
            if problem is not None:
                gone = f"{path} went while it was being read: {problem}"
                raise CheckpointNotFound(gone) from problem
        finally:
            # Else the error and this call refer to each other, and what was read stays in memory.
            del problem
        return cast("T", result)
    raise CheckpointNotFound(
        f"{path} was replaced {_TRIES} times while it was being read. Read it when it is at rest."
    )


def _generation(storage: Storage, path: str) -> tuple[str | None, ...]:
    """Changes when a checkpoint of ours at `path`, or around it, or newest in it, is replaced."""
    if storage.scheme == "file":
        path = os.path.realpath(path)
    inside = storage.names(path) if storage.kind(path) == "dir" else []
    places = [
        path,
        posixpath.dirname(path),
        _sibling(path, names.replacement(posixpath.basename(path))),
    ]
    if names.RECORD not in inside:
        places += [f"{path}/{name}" for name in _steps(storage, path, inside)[:1]]
    return (*places, *(_record_digest(storage, place) for place in places))


def _record_digest(storage: Storage, path: str) -> str | None:
    try:
        return step.digest(storage.read(f"{path}/{names.RECORD}", max_bytes=step.MAX_RECORD_BYTES))
    except (OSError, ValueError) as error:
        if is_io_failure(error):
            raise
        return None


def check_current(checkpoint: Checkpoint) -> None:
    """Raises CheckpointNotFound if another checkpoint is now where this one was found."""
    record = checkpoint.record
    if record is not None and _record_digest(checkpoint.storage, checkpoint.path) != record.digest:
        raise CheckpointNotFound(
            f"{checkpoint.path} was replaced or deleted since it was opened. Open it again."
        )


def check_sizes(checkpoint: Checkpoint) -> None:
    """Raises CorruptCheckpoint if a file that we wrote is missing, or of another size."""
    files = checkpoint.record.files if checkpoint.record is not None else {}
    for name, facts in files.items():
        file = f"{checkpoint.path}/{name}"
        kind = checkpoint.storage.kind(file)
        size = checkpoint.storage.size(file) if kind == "file" else None
        if size != facts.size:
            found = f"has {size} bytes" if kind == "file" else "is missing"
            raise CorruptCheckpoint(f"{file} {found} of {facts.size}", file=file)


def find(storage: Storage, path: str) -> Checkpoint:
    """Finds the checkpoint that a path means; for a run's root, its newest good step.

    Raises:
        CheckpointNotFound: there is none, or it is not committed.
        CorruptCheckpoint: its own metadata files are damaged.
    """
    if storage.scheme == "file":
        # Users keep links to the newest step. Inside a checkpoint no link is followed.
        path = os.path.realpath(path)
    name = posixpath.basename(path)
    kind = storage.kind(path)
    if kind is None and storage.kind(other := _sibling(path, names.replacement(name))) == "dir":
        path, kind = other, "dir"
    if kind is None:
        raise CheckpointNotFound(f"{path}: there is nothing. {_neighbours(storage, path)}")
    if kind == "file":
        return _flax_file(storage, path)
    if kind != "dir":
        raise CheckpointNotFound(f"{path} is neither a directory nor a regular file")
    if names.is_temporary(name):
        raise CheckpointNotFound(
            f"{path} was never committed: a save of it is under way, or died. "
            f"{_neighbours(storage, path)}"
        )
    return _directory(storage, path)


def _directory(storage: Storage, path: str) -> Checkpoint:
    inside = storage.names(path)
    if names.TREE_METADATA in inside or not _is_checkpoint(inside):
        around = _item_of_checkpoint(storage, path)
        if around is not None:
            return around
    if _is_checkpoint(inside):
        return read_checkpoint(storage, path, inside)
    if names.TREE_METADATA in inside or storage.kind(f"{path}/{names.LEGACY_TREE}") == "file":
        return _flat(storage, path)
    steps = _steps(storage, path, inside)
    if steps:
        return _newest_good(storage, path, steps)
    items = _items(storage, path, inside)
    if any(json_file(storage, item) is None for item in items.values()):
        return Checkpoint(storage=storage, path=path, items=items)
    is_array = any(is_plain_array(storage, f"{path}/{name}") for name in inside)
    if is_array or _is_item(storage, path):
        return _flat(storage, path)
    found = ", ".join(inside[:8]) + (", ..." if len(inside) > 8 else "")
    raise CheckpointNotFound(
        f"{path} is no checkpoint, no item of one and no run: it holds {found or 'nothing'}. "
        f"{_neighbours(storage, path)}"
    )


def _is_checkpoint(inside: Sequence[str]) -> bool:
    return not _CHECKPOINT_MARKS.isdisjoint(inside)


def read_checkpoint(storage: Storage, path: str, inside: Sequence[str] | None = None) -> Checkpoint:
    """Reads the top files of a checkpoint directory.

    Raises:
        CheckpointNotFound: it is not committed.
        CorruptCheckpoint: a file in it is damaged.
    """
    inside = storage.names(path) if inside is None else inside
    record = None
    if names.WRITER in inside or names.RECORD in inside:
        if names.COMMIT_MARKER not in inside:
            raise CheckpointNotFound(
                f"{path} is not committed: {names.COMMIT_MARKER} is missing. A save of it is under "
                "way, or died, or it is being deleted."
            )
        record_file = f"{path}/{names.RECORD}"
        if names.RECORD not in inside:
            raise CorruptCheckpoint(f"{record_file} is missing", file=record_file)
        data = storage.read(record_file, max_bytes=step.MAX_RECORD_BYTES)
        record = step.decode_record(data, file=record_file)
        refuse_holes(storage, record, path, path, inside)
    metadata = StepMetadata()
    if names.CHECKPOINT_METADATA in inside:
        file = f"{path}/{names.CHECKPOINT_METADATA}"
        data = read_checked(storage, path, names.CHECKPOINT_METADATA, record)
        metadata = step.decode(data, file=file)
    deleting = None
    if names.DELETION_RECORD in inside:
        file = f"{path}/{names.DELETION_RECORD}"
        deleting = step.decode_deletion(storage.read(file, max_bytes=jsontext.MAX_BYTES), file=file)
    items = _items(storage, path, inside)
    if names.TREE_METADATA in inside:
        items = {"": path}
    if not items:
        raise CorruptCheckpoint(f"{path}: a checkpoint without items: it holds {inside}", file=path)
    return Checkpoint(
        storage=storage,
        path=path,
        items={name: where for name, where in items.items() if name != deleting},
        step=metadata,
        record=record,
        deleting=deleting,
    )


def _item_of_checkpoint(storage: Storage, path: str) -> Checkpoint | None:
    """The checkpoint that the directory is an item of, with that item alone; None if it is not."""
    parent, name = posixpath.split(path)
    if names.is_temporary(posixpath.basename(parent)):
        raise CheckpointNotFound(
            f"{path} is in a checkpoint that was never committed: its save is under way, or died"
        )
    if not any(storage.kind(f"{parent}/{mark}") == "file" for mark in _CHECKPOINT_MARKS):
        return None
    try:
        around = read_checkpoint(storage, parent)
    except CorruptCheckpoint:
        if storage.kind(f"{parent}/{names.RECORD}") is not None:
            raise
        # Orbax does not make these files durable; the item itself may well be whole.
        return None
    if name == around.deleting:
        raise _being_deleted(around)
    return replace(around, items={name: path}) if name in around.items else None


def _being_deleted(checkpoint: Checkpoint) -> CheckpointNotFound:
    return CheckpointNotFound(
        f"{checkpoint.path}: Orbax has begun to delete item {checkpoint.deleting!r}, and part of "
        f"it may be gone ({names.DELETION_RECORD} is there). It has "
        f"{', '.join(checkpoint.items) or 'no other item'}."
    )


def _flat(storage: Storage, path: str) -> Checkpoint:
    return Checkpoint(storage=storage, path=path, items={"": path})


def _flax_file(storage: Storage, path: str) -> Checkpoint:
    if path.endswith((".safetensors", ".npz", ".pt", ".pkl")):
        raise UnsupportedFormat(f"{path} is no checkpoint directory, and no Flax msgpack file")
    return Checkpoint(storage=storage, path=path, items={"": path})


def _items(storage: Storage, path: str, inside: Sequence[str]) -> dict[str, str]:
    return {
        name: f"{path}/{name}"
        for name in inside
        if not names.is_temporary(name)
        and storage.kind(f"{path}/{name}") == "dir"
        and _is_item(storage, f"{path}/{name}")
    }


def has_items(storage: Storage, path: str, inside: Sequence[str]) -> bool:
    """Whether a directory holds items, as a checkpoint does that says nothing of itself."""
    return bool(_items(storage, path, inside))


def looks_committed(storage: Storage, path: str) -> bool:
    """Whether a directory that is called like a step is a committed one, by its names alone."""
    inside = storage.names(path)
    if names.RECORD in inside or names.WRITER in inside:
        return names.RECORD in inside and names.COMMIT_MARKER in inside
    if not inside:
        return False
    return any(mark in inside for mark in _STEP_MARKS) or has_items(storage, path, inside)


def _is_item(storage: Storage, path: str) -> bool:
    inside = storage.names(path)
    marks = {names.TREE_METADATA, names.LEGACY_TREE, names.OCDBT_MANIFEST}
    is_tree = key_folder(inside) is not None or not marks.isdisjoint(inside)
    return is_tree or _json_file_in(storage, path, inside) is not None


def _steps(storage: Storage, path: str, inside: Sequence[str]) -> list[str]:
    """What looks like a step of a run, newest first."""
    found = []
    for name in inside:
        kind = storage.kind(f"{path}/{name}")
        number = _STEP.fullmatch(name)
        if kind == "dir" and number and not names.is_temporary(name):
            found.append((float(number[1]), name))
        elif kind == "file" and (flax := names.flax_step(name)) is not None:
            found.append((flax, name))
    return [name for _, name in sorted(found, reverse=True)]


def _newest_good(storage: Storage, path: str, steps: Sequence[str]) -> Checkpoint:
    problems = []
    for name in steps:
        try:
            checkpoint = find(storage, f"{path}/{name}")
        except CheckpointError as error:
            problems.append(f"{name}: {error}")
            continue
        if posixpath.dirname(checkpoint.path) != path:
            problems.append(f"{name}: it is a run of its own, not a step")
            continue
        try:
            check_sizes(checkpoint)
        except CorruptCheckpoint as error:
            problems.append(f"{name}: {error}")
            continue
        for problem in problems:
            _logger.warning("skipped a step of %s: %s", path, problem)
        return checkpoint
    raise CheckpointNotFound(
        f"{path}: none of its {len(steps)} steps can be read:\n  " + "\n  ".join(problems[:10])
    )


def _sibling(path: str, name: str) -> str:
    return posixpath.join(posixpath.dirname(path), name)


def _neighbours(storage: Storage, path: str) -> str:
    parent = posixpath.dirname(path)
    if storage.kind(parent) != "dir":
        return f"{parent} does not exist either."
    near = [name for name in storage.names(parent) if not names.is_temporary(name)]
    return f"{parent} holds: {', '.join(near[:8]) or 'nothing'}{', ...' if len(near) > 8 else ''}."


def choose_item(checkpoint: Checkpoint, item: str | None) -> str:
    """The name of the item to restore: the one asked for, the only tree, `state`, or `default`."""
    storage, items = checkpoint.storage, checkpoint.items
    if checkpoint.deleting is not None and (item == checkpoint.deleting or not items):
        raise _being_deleted(checkpoint)
    if item is not None:
        if item not in items:
            _refuse_lost(checkpoint, item)
            raise CheckpointNotFound(
                f"{checkpoint.path} has no item {item!r}; it has {', '.join(items)}"
            )
        return item
    trees = [
        name
        for name, path in items.items()
        if name != names.METRICS_ITEM and json_file(storage, path) is None
    ]
    if len(trees) > 1:
        trees = [name for name in trees if not _is_random_key(storage, items[name])]
    if len(items) == 1 or len(trees) == 1:
        return next(iter(trees or items))
    for name in (names.STATE_ITEM, names.DEFAULT_ITEM):
        if name in trees:
            return name
    raise CheckpointNotFound(
        f"{checkpoint.path} has several items, and none is called {names.STATE_ITEM!r}: "
        f"{', '.join(items)}. Say which: restore(path, item=...)."
    )


def _refuse_lost(checkpoint: Checkpoint, item: str) -> None:
    """Refuses an item of our record that is none any more, since a file of it is missing."""
    storage, path, record = checkpoint.storage, checkpoint.path, checkpoint.record
    if record is not None and any(file.startswith(f"{item}/") for file in record.files):
        place = f"{path}/{item}"
        refuse_holes(storage, record, path, place, storage.names(place))


def _is_random_key(storage: Storage, path: str) -> bool:
    return storage.kind(path) == "dir" and key_folder(storage.names(path)) is not None


def json_file(storage: Storage, path: str) -> str | None:
    """The file of a JSON item, None if the item is a tree."""
    if storage.kind(path) == "file":
        return None
    inside = storage.names(path)
    if names.TREE_METADATA in inside or names.LEGACY_TREE in inside or key_folder(inside):
        return None
    return _json_file_in(storage, path, inside)


def _json_file_in(storage: Storage, path: str, inside: Collection[str]) -> str | None:
    # In a run's root there may be a directory of such a name.
    files = [f"{path}/{name}" for name in names.JSON_ITEM_FILES if name in inside]
    # Grain's own handler for Orbax writes nothing but these.
    files += [f"{path}/{name}" for name in inside if names.process_count(name) is not None]
    return next((file for file in files if storage.kind(file) == "file"), None)


def read_json_item(checkpoint: Checkpoint, file: str) -> Any:  # JSON
    """The value of a JSON item."""
    relative = posixpath.relpath(file, checkpoint.path)
    data = read_checked(checkpoint.storage, checkpoint.path, relative, checkpoint.record)
    return jsontext.loads(data, file=file)


def key_folder(inside: Collection[str]) -> str | None:
    """The data of an item that is a random key, which Orbax keeps in a directory of its own."""
    return next((n for n in (names.JAX_KEY_ITEM, names.NUMPY_KEY_ITEM) if n in inside), None)


def is_plain_array(storage: Storage, path: str) -> bool:
    return storage.kind(path) == "dir" and any(
        storage.kind(f"{path}/{key}") == "file" for key in (names.ZARR2, names.ZARR3)
    )


def refuse_holes(
    storage: Storage, record: Record | None, base: str, path: str, inside: Collection[str]
) -> None:
    """Refuses a directory that lacks an entry of our record: it may change what the others mean."""
    prefix = "" if path == base else posixpath.relpath(path, base) + "/"
    wanted = {}
    for file in record.files if record is not None else ():
        if file.startswith(prefix):
            name, below, _ = file.removeprefix(prefix).partition("/")
            wanted[name] = "dir" if below else "file"
    for name, kind in wanted.items():
        place = f"{path}/{name}"
        if name not in inside:
            raise CorruptCheckpoint(f"{place} is missing. Restore an older checkpoint.", file=place)
        # What is no directory would be no item, and one that is a link would lead elsewhere.
        if storage.kind(place) != kind:
            what = "directory" if kind == "dir" else "regular file"
            raise CorruptCheckpoint(
                f"{place} is not the {what} that was written there. A checkpoint has no links "
                "inside; `cp -rL` makes a copy without them.",
                file=place,
            )


def read_checked(storage: Storage, base: str, relative: str, record: Record | None) -> bytes:
    """Reads a small file of a checkpoint, and compares it with our record if there is one."""
    file = f"{base}/{relative}"
    facts = None if record is None else record.files.get(relative)
    try:
        if facts is None:
            return storage.read(file, max_bytes=jsontext.MAX_BYTES)
        # Before it is read: what became larger may be larger than the memory.
        size, data = storage.size(file), b""
        if size == facts.size:
            data = storage.read(file, max_bytes=min(size, jsontext.MAX_BYTES))
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{file} is missing", file=file) from error
    if facts.size != size or facts.sha256 not in (None, step.digest(data)):
        raise CorruptCheckpoint(
            f"{file} is damaged: {size} bytes that differ from the {facts.size} that were "
            "written. Restore an older checkpoint.",
            file=file,
        )
    return data


def read_part(checkpoint: Checkpoint, path: str, name: str) -> bytes:
    relative = posixpath.relpath(f"{path}/{name}", checkpoint.path)
    return read_checked(checkpoint.storage, checkpoint.path, relative, checkpoint.record)
