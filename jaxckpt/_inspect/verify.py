"""`verify`: reads a whole checkpoint back and checks every checksum in it. Needs no devices."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import Final

from jaxckpt._core.box import cut, whole, widened
from jaxckpt._core.plan import plan_reads
from jaxckpt._disk import find as _discovery
from jaxckpt._disk.native import Item, read_item
from jaxckpt._disk.reader import CHUNKS_AT_ONCE, LeafRead, in_turns, read_leaves
from jaxckpt._disk.transaction import files_below
from jaxckpt.errors import CheckpointError, CheckpointNotFound, is_io_failure
from jaxckpt.format import jsontext, names, step
from jaxckpt.format.arrays import dtype_of
from jaxckpt.format.step import FileFacts
from jaxckpt.storage import Storage, locate
from jaxckpt.types import Problem, VerifyReport

_BUDGET_BYTES: Final = 256 << 20


def verify(path: str | os.PathLike[str]) -> VerifyReport:
    """Reads all of a checkpoint and compares it with its checksums.

    Args:
        path: A checkpoint, one of its items, or a run's root (then its newest good step).

    Returns:
        A report; damage is in `.problems`, not raised.

    Raises:
        CheckpointNotFound: there is no committed checkpoint at `path`.
        UnsupportedFormat: it was written by something newer.
    """
    return verify_in(*locate(path))


def verify_in(storage: Storage, where: str) -> VerifyReport:
    """`verify`, of a place in a storage."""
    return _discovery.consistently(storage, where, lambda: _verify(storage, where))


def _verify(storage: Storage, where: str) -> VerifyReport:
    problems: list[Problem] = []
    unchecked: list[str] = []
    try:
        checkpoint = _discovery.find(storage, where)
    except OSError as error:
        if isinstance(error, CheckpointNotFound):
            raise
        return _report(where, [_problem(error)], [], 0, 0, 0)
    files = _check_files(checkpoint, problems, unchecked)
    leaves = size = 0
    for name, item_path in checkpoint.items.items():
        try:
            file = _discovery.json_file(storage, item_path)
            if file is not None:
                _discovery.read_json_item(checkpoint, file)
                continue
            item = read_item(checkpoint, name)
        except CheckpointNotFound:
            raise
        except (CheckpointError, OSError) as error:
            problems.append(_problem(error))
            continue
        leaves += len(item.tree.leaves)
        read_bytes = _read_all(item, problems)
        size += read_bytes
        if not item.ours and read_bytes and not _has_digests(checkpoint, item_path):
            unchecked.append(f"{item.path}: its arrays carry no checksum that is known to be there")
    return _report(checkpoint.path, problems, unchecked, files, leaves, size)


def _check_files(
    checkpoint: _discovery.Checkpoint, problems: list[Problem], unchecked: list[str]
) -> int:
    """Compares every file with the record, and looks for files that it does not list."""
    storage, record = checkpoint.storage, checkpoint.record
    if record is None:
        unchecked.append(f"{checkpoint.path}: no {names.RECORD}: its metadata has no checksums")
        return 0
    folders: dict[str, str | None] = {}
    for path, facts in record.files.items():
        file = f"{checkpoint.path}/{path}"
        folder = posixpath.dirname(path)
        try:
            if folder not in folders:
                folders[folder] = _folder_problem(storage, checkpoint.path, folder)
            message = folders[folder] or _file_problem(storage, file, facts)
        except OSError as error:
            problems.append(_problem(error))
        else:
            if message is not None:
                problems.append(Problem(file=file, leaf=None, message=message))
    known = {*record.files, names.RECORD, names.COMMIT_MARKER, names.WRITER, names.PINNED}
    try:
        unchecked += [
            f"{checkpoint.path}/{path} is no part of the checkpoint"
            for path in files_below(storage, checkpoint.path)
            if path not in known
        ]
    except OSError as error:
        problems.append(_problem(error))
    return len(record.files)


def _has_digests(checkpoint: _discovery.Checkpoint, item_path: str) -> bool:
    """Whether the record has that of every file of an item, data files too."""
    prefix = posixpath.relpath(item_path, checkpoint.path) + "/"
    recorded = checkpoint.record.files if checkpoint.record is not None else {}
    files = [facts for name, facts in recorded.items() if name.startswith(prefix)]
    return bool(files) and all(facts.sha256 is not None for facts in files)


def _folder_problem(storage: Storage, base: str, folder: str) -> str | None:
    """What leads elsewhere on the way to a file, though what is there may be the same."""
    for parent in accumulate(folder.split("/"), "{}/{}".format):
        if parent and storage.kind(place := f"{base}/{parent}") != "dir":
            return f"{place} is not the directory that was written there"
    return None


def _file_problem(storage: Storage, file: str, facts: FileFacts) -> str | None:
    if storage.kind(file) != "file":
        return f"{file} is missing"
    if (size := storage.size(file)) != facts.size:
        return f"{file} has {size} bytes, {facts.size} were written"
    if facts.sha256 is not None:
        data = storage.read(file, max_bytes=jsontext.MAX_BYTES)
        if step.digest(data) != facts.sha256:
            return f"{file} is damaged: its SHA-256 differs"
    return None


def _read_all(item: Item, problems: list[Problem]) -> int:
    """Reads everything; after a bad leaf goes on with the next. Says how many bytes that were."""
    size = 0
    bad: set[str] = set()

    def failed(read: LeafRead, error: OSError) -> None:
        if read.leaf.text not in bad:  # of one that is read in pieces the first
            bad.add(read.leaf.text)
            problems.append(_problem(error))

    try:
        for some in in_turns(item, _reads(item, bad)):
            size += sum(read.total_bytes for read in some)
            for _ in read_leaves(item, some, budget_bytes=_BUDGET_BYTES, failed=failed):
                pass
    except OSError as error:  # nothing of this item can be read
        problems.append(_problem(error))
    return size


def _reads(item: Item, bad: Collection[str]) -> Iterator[LeafRead]:
    """Every stored byte once, in pieces of bounded size; no more of a leaf once it is bad."""
    for leaf in item.tree.leaves:
        if not leaf.has_array:
            continue
        stored = leaf.array
        dtype = dtype_of(stored.dtype)
        everything = whole(stored.shape)
        # A plan for so many chunks takes little memory.
        tile_shape = widened(stored.unit_shape, stored.shape, CHUNKS_AT_ONCE)
        for part in [everything] if item.ours else cut(everything, tile_shape):
            if not part.size or leaf.text in bad:
                break
            for piece in plan_reads(stored, dtype.itemsize, [part]):
                yield LeafRead(leaf=leaf, boxes=(piece.box,), dtype=dtype)


def _problem(error: CheckpointError | OSError) -> Problem:
    file = getattr(error, "file", None) or getattr(error, "filename", None)
    return Problem(
        file=file,
        leaf=getattr(error, "leaf", None),
        message=str(error),
        unreadable=is_io_failure(error),
    )


def _report(
    path: str,
    problems: Sequence[Problem],
    unchecked: Sequence[str],
    files: int,
    leaves: int,
    size: int,
) -> VerifyReport:
    return VerifyReport(
        path=path,
        problems=tuple(problems),
        unchecked=tuple(unchecked),
        files=files,
        leaves=leaves,
        size_bytes=size,
    )
