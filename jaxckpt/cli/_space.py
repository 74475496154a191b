"""Computes the disk usage of a run or a checkpoint for `du`."""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from jaxckpt._disk.find import find
from jaxckpt._disk.found import Found
from jaxckpt._disk.item import open_item
from jaxckpt._inspect import open as inspection
from jaxckpt._run.index import at_once
from jaxckpt.cli._owned import existing_run
from jaxckpt.errors import CheckpointError, CheckpointNotFound, CorruptCheckpoint, is_io_failure
from jaxckpt.format.tree import parse_path
from jaxckpt.pages.overview import FIRST, overview, step_overview
from jaxckpt.storage import PathIn, Storage, listed, locate, now, real


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """A step, or a checkpoint."""

    name: str  # of its directory
    step: int | None  # its number; None for a checkpoint that is not a step
    size_bytes: int  # of its files; a file with several names counts once
    items: Mapping[str, int]  # files outside all items count as "(about it)"
    branches: Mapping[str, int]  # by item and top-level key ("state/params"), before compression


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Everything below a path. Shared files count once."""

    path: str
    size_bytes: int  # of all files; a file shared by several steps counts once
    shared_bytes: int  # in files with several names, here or elsewhere
    other_bytes: int  # the part outside all steps: steps set aside, saves in progress
    items: Mapping[str, int]
    branches: Mapping[str, int]
    steps: tuple[Usage, ...]  # in order


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file of a step, or of all that is below the top."""

    item: str
    inode: tuple[int | str, int]  # identifies the file
    size_bytes: int
    is_shared: bool


def space(path: str) -> Space:
    """Adds up the files below a run's root or a checkpoint.

    Raises:
        CheckpointNotFound: no such file or directory, or nothing of a run or checkpoint in it.
    """
    storage, where = locate(path)
    where = real(storage, where)
    if storage.parallel_writes:
        storage = listed(storage, where, FIRST) or storage
    try:
        steps = overview(PathIn(storage, where)).steps
    except (NotADirectoryError, ValueError):  # a Flax file, or a checkpoint
        steps, storage = (), now(storage)
    if steps:
        parts = at_once(
            lambda step: _part(storage, step.path, step.step, step.items), steps, storage
        )
        parts = [part for part in parts if part[2]]  # others were deleted meanwhile
    else:
        found = _found(storage, where)
        one = None if found is None else step_overview(PathIn(storage, found.path))
        number = None if one is None else one.step
        parts = [] if found is None else [_part(storage, found.path, number, found.items)]
    # The path of an item means its checkpoint, as everywhere.
    top = parts[0][1] if parts and not steps else where
    files = _files(storage, top)
    everything, of_steps = _once(files), [part for part, _, _ in parts]
    in_steps = _once(file for _, _, inside in parts for file in inside)
    return Space(
        path=top,
        size_bytes=sum(file.size_bytes for file in everything),
        shared_bytes=sum(file.size_bytes for file in everything if file.is_shared),
        other_bytes=sum(f.size_bytes for f in everything) - sum(f.size_bytes for f in in_steps),
        items=_by_item(in_steps),
        branches=dict(sum((Counter(part.branches) for part in of_steps), Counter())),
        steps=tuple(of_steps),
    )


def _found(storage: Storage, where: str) -> Found | None:
    """Returns a checkpoint; None for an incomplete step, and for a run without steps."""
    try:
        found = find(storage, where)
        if found.is_file:
            with contextlib.suppress(CorruptCheckpoint):  # which takes space too
                open_item(found, None)
    except CheckpointNotFound:
        if step_overview(path := PathIn(storage, where)) is None:
            existing_run(path)  # else an error describes the path
        return None
    return found


def _part(
    storage: Storage, path: str, step: int | None, items: Collection[str]
) -> tuple[Usage, str, list[_File]]:
    files = _once(_files(storage, path, items))
    part = Usage(
        name=posixpath.basename(path),
        step=step,
        size_bytes=sum(file.size_bytes for file in files),
        items=_by_item(files),
        branches=_branches(PathIn(storage, path), items),
    )
    return part, path, files


def _by_item(files: Iterable[_File]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for file in files:
        sizes[file.item] += file.size_bytes
    return dict(sorted(sizes.items()))


def _item_of(path: str, items: Collection[str]) -> str:
    """Returns the item of a file, by its path in a checkpoint with these items."""
    name, below, _ = path.partition("/")
    return "" if [*items] == [""] else name if below and name in items else "(about it)"


def _branches(path: PathIn, items: Collection[str]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for item in items:
        try:
            leaves = inspection.open(path, item=item).leaves
        except (CheckpointError, OSError) as error:
            if is_io_failure(error):
                raise
            continue  # a damaged step takes space too
        for text, leaf in leaves.items():
            top = parse_path(text)[:1]
            sizes["/".join(name for name in (item, *top) if name)] += leaf.size_bytes
    return {name: size for name, size in sizes.items() if size}


def _files(storage: Storage, top: str, items: Collection[str] = ()) -> list[_File]:
    if storage.scheme != "file":
        return [
            _File(
                item=_item_of(name, items),
                inode=(f"{top}/{name}", 0),
                size_bytes=entry.size,
                is_shared=False,
            )
            for name, entry in storage.files(top).items()
        ]
    folders = os.walk(top, onerror=_raise)
    paths = [os.path.join(folder, name) for folder, _, names in folders for name in names]
    found = []
    for path in paths or [top] * (not os.path.isdir(top)):
        with contextlib.suppress(FileNotFoundError):  # deleted just now
            name = os.path.basename(top) if path == top else os.path.relpath(path, top)
            found.append(_file(path, _item_of(name, items)))
    return found


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # deleted just now
        raise error


def _file(path: str, item: str) -> _File:
    status = os.lstat(path)
    return _File(
        item=item,
        inode=(status.st_dev, status.st_ino),
        size_bytes=status.st_size,
        is_shared=status.st_nlink > 1,
    )


def _once(files: Iterable[_File]) -> list[_File]:
    """Keeps each file under the first of its names."""
    return list({file.inode: file for file in reversed(list(files))}.values())[::-1]
