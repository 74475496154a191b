"""Mends a damaged copy of a step from a good copy in another root.

    compare    each file with the same file of the good copy, which is checked meanwhile
    replace    those that differ, each at once
    verify     the mended copy

A crash in the middle leaves each file either damaged or good. The record lists the files of the
step. If it is lost or damaged itself, it is taken from the good copy first, if both are of
one save. Steps whose unchanged arrays share a bad file get a link to the mended one.

The share of a process has other files than the step in the directory, but the same chunks. So the
bad chunks of a file are copied from there one by one, and the share is verified by its record.
In the other direction, each process replaces the files that it has sent; a file that unites the
parts of all is in no share.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from jaxckpt._disk.attempt import Check
from jaxckpt._disk.commit import commit_of
from jaxckpt._disk.contents import Contents
from jaxckpt._disk.find import find
from jaxckpt._disk.found import Found, Wanted, file_problem, record_at
from jaxckpt._disk.reader import keys_here
from jaxckpt._inspect.verify import verify_in
from jaxckpt._run.disks import Disk, read_entry
from jaxckpt._run.index import StepIndex
from jaxckpt._run.shares import part_of
from jaxckpt._run.upload import contents_of, mend_others, same_bytes, upload_token
from jaxckpt.errors import CheckpointError, CorruptCheckpoint, SaveFailed, is_io_failure
from jaxckpt.format import jsontext, names
from jaxckpt.format.ocdbt import Place
from jaxckpt.format.step import MAX_RECORD_BYTES, decode, encode_record
from jaxckpt.storage import Storage
from jaxckpt.storage._large import pieces

_BUDGET_BYTES: Final = 256 << 20


def heal(bad: StepIndex, good: StepIndex, step: int, check: Check = int) -> list[str]:
    """Mends the copy of a step in `bad`; returns the files replaced, by path in the step.

    Args:
        check: Raises if another job may have saved the step anew; called before each change.

    Raises:
        CheckpointError: it cannot be mended; files that were not replaced are unchanged.
        OSError: a storage failed.
    """
    theirs, path = find(good.storage, good.check_step(step)), bad.path(step)
    if bad.has(step, names.RECORD) and not bad.is_committed(step):  # it lost its commit marker
        return _complete(bad, theirs, step, check)
    ours = _find(bad.storage, path)
    is_alike = ours.origin == theirs.origin if ours else _is_alike(bad.storage, path, theirs)
    if theirs.record is None or not is_alike or (ours is None and theirs.part):
        raise _different(path, theirs)
    if ours is not None:
        return _mend(bad, ours, theirs, step, check)
    check()
    record = replace(theirs.record, name=posixpath.basename(path))
    bad.storage.write(f"{path}/{names.RECORD}", encode_record(record))
    if bad.missing_file(step) is not None:  # the commit marker
        return [names.RECORD, *_complete(bad, theirs, step, check)]
    return [names.RECORD, *_mend(bad, find(bad.storage, path), theirs, step, check)]


def replace_part(bad: StepIndex, share: StepIndex, step: int) -> list[str]:
    """Replaces the bad files of a step that came from the share of a process; returns them."""
    ours, theirs = find(bad.storage, bad.path(step)), find(share.storage, share.check_step(step))
    if ours.origin != theirs.origin:
        raise _different(ours.path, theirs)
    replaced, problem = _replace_bad(bad, ours, theirs, step, int)
    if problem is not None:
        raise problem
    return replaced


def _complete(bad: StepIndex, theirs: Found, step: int, check: Check) -> list[str]:
    """Mends a copy that lost its commit marker: the marker comes last, when all files are good."""
    path, marker = bad.path(step), names.COMMIT_MARKER
    ours, known = _by_record(bad.storage, path), theirs.recorded(theirs.path)
    if ours.origin != theirs.origin or not ours.recorded(path).items() <= known.items():
        raise _different(path, theirs)
    replaced, problem = _replace_bad(bad, ours, theirs, step, check)
    if problem is not None:
        raise problem
    data = theirs.storage.read(f"{theirs.path}/{marker}", max_bytes=MAX_RECORD_BYTES)
    check()
    bad.storage.write(f"{path}/{marker}", data)
    bad.forget(step)
    return [*replaced, marker, *_mend(bad, find(bad.storage, path), theirs, step, check)]


def _mend(bad: StepIndex, ours: Found, theirs: Found, step: int, check: Check) -> list[str]:
    """Replaces bad files until the copy is whole; returns them."""
    replaced, problem = _replace_bad(bad, ours, theirs, step, check)
    while not (report := verify_in(ours.storage, ours.path)).ok:
        named = {posixpath.relpath(p.file, ours.path) for p in report.problems if p.file}
        mine = ours.recorded(ours.path).keys() - {*replaced}
        files = sorted(filter(names.is_data_file, named & mine))
        if problem is not None or not files or report.problems[0].unreadable:
            left = report.problems[0].message
            text = f"{ours.path} cannot be mended from {theirs.path}: {left}"
            raise problem or SaveFailed(text)
        for name in files:
            check()
            if _put_chunks(find(ours.storage, ours.path), theirs, name):
                _mend_others(bad, step, name)
        replaced += files
        bad.forget(step)
    return replaced


def _replace_bad(
    bad: StepIndex, ours: Found, theirs: Found, step: int, check: Check
) -> tuple[list[str], SaveFailed | None]:
    """Replaces the bad files that are the same in both copies.

    Returns:
        The files, and the error if the other copy has one that is as bad.
    """
    sent = part_of(theirs, commit_of(ours.storage, ours.path).work(upload_token(theirs)))
    recorded, known = ours.recorded(ours.path), theirs.recorded(theirs.path)
    alike = {name: name for name, facts in known.items() if facts.sha256}  # also in shares
    files, replaced, problem = {**alike, **sent.files}, [], None
    try:
        source = contents_of(theirs)
    except CorruptCheckpoint as error:  # its other small files may be good
        source, files, problem = Contents(theirs, {}, False), alike, _damaged_too(theirs, error)
    for name, file in files.items():
        facts = known[file]
        read = partial(source.pieces, file, facts.size)
        if recorded.get(name) != facts or file_problem(theirs, file, facts):
            continue
        if not file_problem(ours, name, facts) and _has_bytes(ours, name, facts.size, read()):
            continue
        check()
        try:
            _replace(ours, name, read())
        except CorruptCheckpoint as error:
            problem = problem or _damaged_too(theirs, error)
            continue
        replaced.append(name)
        bad.forget(step)
        if names.is_data_file(name):
            _mend_others(bad, step, name)
    return replaced, problem


def _find(storage: Storage, path: str) -> Found | None:
    """Finds the damaged copy; None if its record is lost or damaged."""
    try:
        return find(storage, path)
    except CorruptCheckpoint as error:
        return None if error.file == f"{path}/{names.RECORD}" else _by_record(storage, path)


def _by_record(storage: Storage, path: str) -> Found:
    """Returns the damaged copy as its record has it; reads nothing else."""
    return Found(storage=storage, path=path, record=record_at(storage, path))


def _is_alike(storage: Storage, path: str, theirs: Found) -> bool:
    """Returns whether a copy without a record is of the same save, by when that began."""
    file = f"{path}/{names.CHECKPOINT_METADATA}"
    try:
        about = decode(storage.read(file, max_bytes=jsontext.MAX_BYTES), file=file)
    except (CorruptCheckpoint, FileNotFoundError):
        return False
    return about.init_ns is not None and about.init_ns == theirs.metadata.init_ns


def _mend_others(run: StepIndex, number: int, name: str) -> None:
    """Puts a mended file of values into the other steps that have a bad file of its name."""
    if not run.storage.server_copies:  # in a store, each step has files of its own
        others = [f"{run.path(step)}/{name}" for step in run.listing().steps if step != number]
        mend_others(run, f"{run.path(number)}/{name}", name, others)


def _different(path: str, theirs: Found) -> SaveFailed:
    return SaveFailed(f"{path} and {theirs.path} are different steps; nothing was changed")


def _damaged_too(theirs: Found, error: CorruptCheckpoint) -> SaveFailed:
    return SaveFailed(f"{theirs.path} is damaged too, so this is not taken from it: {error}")


def _has_bytes(ours: Found, name: str, size: int, wanted: Iterator[bytes]) -> bool:
    """Returns whether a file of a step begins with the bytes of another file."""
    try:
        return same_bytes(pieces(ours.storage, f"{ours.path}/{name}", size), wanted)
    except (CheckpointError, OSError, EOFError) as error:
        if is_io_failure(error):
            raise
        return False


def _replace(ours: Found, name: str, data: Iterator[bytes]) -> None:
    path = f"{ours.path}/{name}"
    kind = ours.storage.kind(path)
    if kind not in (None, "file"):
        raise SaveFailed(f"{path} is not a file ({kind}), and is not replaced")
    ours.storage.make_dir(posixpath.dirname(path))
    ours.storage.write(path, data)


def _put_chunks(ours: Found, theirs: Found, name: str) -> bool:
    """Writes a data file again, its bad chunks as the other copy has them.

    Returns:
        Whether the file was there; if not, what only other steps have in it is lost.
    """
    size, path = ours.recorded(ours.path)[name].size, f"{ours.path}/{name}"
    data: Any = np.zeros(size, np.uint8)
    if is_there := ours.storage.kind(path) == "file" and ours.storage.size(path) == size:
        ours.storage.read_into(path, 0, [data])
    item = next(one for one, at in ours.items.items() if path.startswith(f"{at}/"))
    inside, disks = posixpath.relpath(path, ours.items[item]), (Disk(ours), Disk(theirs))
    places: dict[Wanted, Place] = {
        (item, key): place
        for key, place in keys_here(disks[0].items[item]).items()
        if isinstance(place, Place) and place.file == inside
    }
    good, source = (disk.entries(places.keys(), _BUDGET_BYTES) for disk in disks)
    for one in places.keys() - (good.keys() if is_there else ()):
        entry, (_, start, size) = source.get(one), places[one]
        if entry is None or entry.sizes[0] != size:
            text = f'{theirs.path} lacks the chunk "{one[1]}" of {path}, which is damaged'
            raise SaveFailed(f"{text}. Heal it from the other shares too, if there are any.")
        data[start : start + size] = np.frombuffer(
            read_entry(theirs.storage, entry), np.uint8, size
        )
    ours.storage.make_dir(posixpath.dirname(path))
    ours.storage.write(path, data.tobytes())
    return is_there
