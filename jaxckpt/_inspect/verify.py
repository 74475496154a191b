"""Reads a whole checkpoint back, and checks every checksum in it. Needs no devices."""

from __future__ import annotations

import os
from collections.abc import Collection, Container, Iterator
from itertools import accumulate
from typing import Final

from jaxckpt._core.box import cut, tile, whole, widened
from jaxckpt._core.check import explained
from jaxckpt._core.plan import plan_reads
from jaxckpt._disk.chunks import LeafRead, layout_of, total_bytes
from jaxckpt._disk.find import at_rest, newest_committed
from jaxckpt._disk.found import Found, JsonItem, check_current, file_problem, is_item, present_files
from jaxckpt._disk.item import lost_trees, open_item
from jaxckpt._disk.native import Item
from jaxckpt._disk.reader import CHUNKS_AT_ONCE, in_turns, keys_here, read_leaves
from jaxckpt.errors import CheckpointError, CheckpointNotFound, is_io_failure
from jaxckpt.format import jsontext, names, step
from jaxckpt.format.arrays import chunk_key, dtype_of
from jaxckpt.format.step import FileFacts
from jaxckpt.storage import Storage, files_in, locate
from jaxckpt.storage._large import pieces
from jaxckpt.types import Problem, VerifyReport

_BUDGET_BYTES: Final = 256 << 20


@explained("verify")
def verify(path: str | os.PathLike[str]) -> VerifyReport:
    """Reads all of a checkpoint, and compares it with its checksums.

    Args:
        path: A checkpoint, one of its items, or a run's root (verifies its newest committed step;
            a damaged one does not give way to an earlier one).

    Returns:
        A report. Damage is listed in `.problems`, not raised.

    Raises:
        CheckpointNotFound: `path` lacks a committed checkpoint.
        UnsupportedFormat: a newer program wrote it.
    """
    storage, where = locate(path)
    newest = newest_committed(storage, where)
    while True:
        try:
            return verify_in(storage, newest)
        except CheckpointNotFound:
            before, newest = newest, newest_committed(storage, where)
            if newest == before:  # otherwise a job has deleted it and committed others
                raise


def verify_in(storage: Storage, where: str) -> VerifyReport:
    """Verifies a checkpoint in a storage."""
    try:
        return at_rest(storage, where, _verify)
    except CheckpointNotFound:
        raise
    except OSError as error:
        return VerifyReport(path=where, problems=(_problem(error),))


def _verify(found: Found) -> VerifyReport:
    problems: list[Problem] = []
    unchecked: list[str] = []
    files = _check_files(found, problems, unchecked)
    leaves = size = 0
    for name, path in found.items.items():
        was_tree = found.record and f"{name}/{names.TREE_METADATA}" in found.record.files
        if name and not was_tree and not is_item(found, path):
            if found.record is None:  # otherwise its files have been checked
                unchecked.append(f"{path}: only a program's own handler reads it")
            continue
        try:
            item = open_item(found, name)
        except CheckpointNotFound:
            raise
        except (CheckpointError, OSError) as error:
            problem = _problem(error)
            if problem.file is None or problem.file not in {known.file for known in problems}:
                problems.append(problem)
            continue
        if isinstance(item, JsonItem):
            continue
        if not item.ours:
            _check_shardings(item, problems)
        leaves += len(item.tree.leaves)
        size += (read_bytes := _read_all(item, problems))
        digests = [facts.sha256 for facts in found.recorded(path).values()]  # also of data files
        if not item.ours and read_bytes and (not digests or None in digests):
            unchecked.append(f"{item.path}: its arrays have no recorded checksums")
    if problems:
        check_current(found)  # a checkpoint that was replaced in the meantime looks damaged
    return VerifyReport(
        path=found.path,
        problems=tuple(problems),
        unchecked=tuple(unchecked),
        files=files,
        leaves=leaves,
        size_bytes=size,
    )


def _check_files(found: Found, problems: list[Problem], unchecked: list[str]) -> int:
    """Compares every file with the record, and looks for unrecorded files."""
    if found.record is None:
        unchecked.append(f"{found.path}: no {names.RECORD}: its metadata has no checksums")
        for file in [f"{found.path}/{name}" for name in lost_trees(found)]:
            message = f"{file} is missing, but {names.CHECKPOINT_METADATA} lists it"
            problems.append(Problem(file=file, message=message, unreadable=True))
        return 0
    for item in found.removed:
        file = f"{found.path}/{item}"
        problems.append(Problem(file=file, message=found.was_removed(item), unreadable=True))
    for name, facts in present_files(found).items():
        try:
            message = _file_problem(found, name, facts)
        except (OSError, EOFError) as error:
            problems.append(_problem(error))
        else:
            if message is not None:
                problems.append(Problem(file=f"{found.path}/{name}", message=message))
    known = {*found.record.files, *names.OF_COPY}
    try:
        unchecked += [
            f"{found.path}/{name} is not part of the checkpoint"
            for name in files_in(found.entries, found.path)
            if name not in known
        ]
    except OSError as error:
        problems.append(_problem(error))
    return len(found.record.files)


def _check_shardings(item: Item, problems: list[Problem]) -> None:
    try:
        item.read_shardings()
    except (CheckpointError, OSError) as error:
        problems.append(_problem(error))


def _file_problem(found: Found, name: str, facts: FileFacts) -> str | None:
    """Returns what is wrong with a file, or with a directory on the way to it, if anything."""
    file = f"{found.path}/{name}"
    # A link in place of a directory is bad, though it may lead to the same file.
    for folder in list(accumulate(name.split("/"), "{}/{}".format))[:-1]:
        parent, _, base = f"{found.path}/{folder}".rpartition("/")
        if getattr(found.entries(parent).get(base), "kind", "") != "dir":
            return f"{found.path}/{folder} is not the directory that was written there"
    if problem := file_problem(found, name, facts):
        return f"{file} {problem}"
    is_bad = facts.sha256 not in (None, facts.sha256 and _digest(found.storage, file, facts.size))
    return f"{file} is damaged: its SHA-256 differs" if is_bad else None


def _digest(storage: Storage, file: str, size: int) -> str:
    if size > jsontext.MAX_BYTES:
        return step.digest_of(pieces(storage, file, size))
    return step.digest(storage.read(file, max_bytes=jsontext.MAX_BYTES))


def _read_all(item: Item, problems: list[Problem]) -> int:
    """Reads every leaf, also after a bad one; returns the number of bytes read."""
    size = 0
    bad: set[str] = set()

    def failed(read: LeafRead, error: Exception) -> None:
        if not isinstance(error, OSError):  # such as a MemoryError, which is not damage
            raise error
        if read.leaf.text not in bad:  # one problem for a leaf that is read in pieces
            bad.add(read.leaf.text)
            problems.append(_problem(error))

    try:
        reads = _reads(item, bad)
        if item.found.part is not None:
            here = reads_here(item, keys_here(item))
            reads = (read for _, read in here if read.leaf.text not in bad)
        for some in in_turns(item, reads):
            size += total_bytes(some)
            for _ in read_leaves(item, some, budget_bytes=_BUDGET_BYTES, failed=failed):
                pass
    except OSError as error:  # nothing of this item can be read
        problems.append(_problem(error))
    return size


def _reads(item: Item, bad: Collection[str]) -> Iterator[LeafRead]:
    """Yields reads of every stored byte once, in pieces of bounded size, but not of bad leaves."""
    for leaf in item.tree.leaves:
        if not leaf.has_array:
            continue
        stored = leaf.array
        dtype = dtype_of(stored.dtype)
        everything = whole(stored.shape)
        # A plan for a limited number of chunks takes little memory.
        tile_shape = widened(stored.unit_shape, stored.shape, CHUNKS_AT_ONCE)
        for part in [everything] if item.ours else cut(everything, tile_shape):
            if not part.size or leaf.text in bad:
                break
            for piece in plan_reads(stored, dtype.itemsize, [part]):
                yield LeafRead(leaf, layout_of(stored, (piece.box,), dtype))


def reads_here(item: Item, keys: Container[str]) -> Iterator[tuple[str, LeafRead]]:
    """Yields the chunks of an item that have one of these keys, each with a read of it alone."""
    for leaf in [leaf for leaf in item.tree.leaves if leaf.has_array]:
        dtype = dtype_of(leaf.array.dtype)
        for index, box in tile(whole(leaf.array.shape), leaf.array.chunk_shape):
            if (key := leaf.prefix + chunk_key(index)) in keys:
                yield key, LeafRead(leaf, layout_of(leaf.array, (box,), dtype))


def _problem(error: Exception) -> Problem:
    file = getattr(error, "file", None) or getattr(error, "filename", None)
    return Problem(
        file=file,
        leaf=getattr(error, "leaf", None),
        message=str(error),
        unreadable=is_io_failure(error),
    )
