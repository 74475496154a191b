"""`verify`: reads a whole checkpoint back and checks every checksum in it. Needs no devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from jaxckpt import _box, _discovery
from jaxckpt._item import Item, read_item
from jaxckpt._plan import plan_reads
from jaxckpt._reader import LeafRead, read_leaves
from jaxckpt._transaction import files_below
from jaxckpt.errors import CheckpointError, CheckpointNotFound, is_io_failure
from jaxckpt.format import jsontext, names, step
from jaxckpt.format.arrays import dtype_of
from jaxckpt.format.step import FileFacts
from jaxckpt.storage import Storage, locate

_BUDGET_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        file: It is about, if one.
        leaf: Whose data it is, if one's.
        message: What it is.
        unreadable: Whether the storage failed to read it, so that nothing is known of what it
            holds. Everything else is damage.
    """

    file: str | None
    leaf: str | None
    message: str
    unreadable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        path: Of the checkpoint.
        problems: Everything that is wrong.
        unchecked: What was read but carries no checksum to compare with, and files that nobody
            listed, each in words.
        files, leaves, size_bytes: How much was read: files compared with the record, leaves, and
            their values, uncompressed.
    """

    path: str
    problems: tuple[Problem, ...]
    unchecked: tuple[str, ...]
    files: int
    leaves: int
    size_bytes: int

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def damaged(self) -> bool:
        """Whether something was read that is not what was written, or is missing."""
        return any(not problem.unreadable for problem in self.problems)

    def __str__(self) -> str:
        state = "good" if self.ok else f"BAD, {len(self.problems)} problems"
        lines = [
            f"{self.path}: {state}. Checked {self.files} files and {self.leaves} leaves "
            f"({self.size_bytes} bytes)."
        ]
        lines += [f"  bad: {problem.message}" for problem in self.problems]
        lines += [f"  unchecked: {what}" for what in self.unchecked]
        return "\n".join(lines)


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
        reads = _reads(item)
        leaves += len(item.tree.leaves)
        size += sum(read.total_bytes for read in reads)
        problems += _read_all(item, reads)
        if not item.ours and reads:
            unchecked.append(f"{item.path}: its arrays carry no checksum that is known to be there")
    named = {problem.file for problem in problems}
    try:
        problems += [
            Problem(file=file, leaf=None, message=f"{file} is not the file that was written there")
            for file in _discovery.changed_files(checkpoint)
            if file not in named
        ]
    except OSError as error:
        problems.append(_problem(error))
    return _report(checkpoint.path, problems, unchecked, files, leaves, size)


def _check_files(
    checkpoint: _discovery.Checkpoint, problems: list[Problem], unchecked: list[str]
) -> int:
    """Compares every file with the record, and looks for files that it does not list."""
    storage, record = checkpoint.storage, checkpoint.record
    if record is None:
        unchecked.append(f"{checkpoint.path}: no {names.RECORD}: its metadata has no checksums")
        return 0
    for path, facts in record.files.items():
        file = f"{checkpoint.path}/{path}"
        try:
            message = _file_problem(storage, file, facts)
        except OSError as error:
            problems.append(_problem(error))
        else:
            if message is not None:
                problems.append(Problem(file=file, leaf=None, message=message))
    known = {*record.files, names.RECORD, names.COMMIT_MARKER, names.WRITER}
    try:
        unchecked += [
            f"{checkpoint.path}/{path} is no part of the checkpoint"
            for path in files_below(storage, checkpoint.path)
            if path not in known
        ]
    except OSError as error:
        problems.append(_problem(error))
    return len(record.files)


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


def _reads(item: Item) -> list[LeafRead]:
    """Every stored byte once, in pieces of bounded size."""
    reads = []
    for leaf in item.tree.leaves:
        if not leaf.has_array:
            continue
        stored = leaf.array
        dtype = dtype_of(stored.dtype)
        everything = _box.whole(stored.shape)
        pieces = plan_reads(stored, dtype.itemsize, [everything])
        reads += [LeafRead(leaf=leaf, boxes=(p.box,), dtype=dtype) for p in pieces if p.box.size]
    return reads


def _read_all(item: Item, reads: Sequence[LeafRead]) -> list[Problem]:
    """Reads everything; after a bad leaf goes on with the next."""
    problems: list[Problem] = []
    bad: set[str] = set()

    def failed(read: LeafRead, error: OSError) -> None:
        if read.leaf.text not in bad:  # of one that is read in pieces the first
            bad.add(read.leaf.text)
            problems.append(_problem(error))

    try:
        for _ in read_leaves(item, reads, budget_bytes=_BUDGET_BYTES, failed=failed):
            pass
    except OSError as error:  # nothing of this item can be read
        problems.append(_problem(error))
    return problems


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
