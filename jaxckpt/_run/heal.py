"""Mends a damaged copy of a step from a good copy in another root.

    verify     the good copy, whole: nothing unchecked is trusted
    find       the files of the damaged copy that are missing or bad
    replace    each at once, by the same file of the good copy
    verify     the mended copy; further bad files, which others hid, are replaced too

A crash in the middle leaves each file either damaged or good. The record lists the files of the
step. If it is lost or damaged itself, it is taken from the good copy first, if both are of
one save. Steps whose unchanged arrays share a bad file get a link to the mended one.

The share of a process has other files than the step in the directory, but the same chunks. So the
chunks of a damaged file are copied from there one by one, and the share is verified by its record.
In the other direction, each process replaces the files that it has sent; a file that unites the
parts of all is in no share.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxckpt._disk.commit import commit_of
from jaxckpt._disk.find import find
from jaxckpt._disk.found import Found
from jaxckpt._inspect.verify import verify_in
from jaxckpt._run.index import StepIndex
from jaxckpt._run.shares import part_of
from jaxckpt._run.upload import same_bytes, upload_token
from jaxckpt.errors import CheckpointError, CorruptCheckpoint, SaveFailed, is_io_failure
from jaxckpt.format import jsontext, names
from jaxckpt.format.step import MAX_RECORD_BYTES, decode, decode_record, encode_record
from jaxckpt.storage import Storage
from jaxckpt.storage._large import pieces
from jaxckpt.storage._values import find_values
from jaxckpt.types import VerifyReport


def heal(bad: StepIndex, good: StepIndex, step: int) -> list[str]:
    """Mends the copy of a step in `bad`; returns the files replaced, by path in the step.

    Raises:
        CheckpointError: it cannot be mended; files that were not replaced are unchanged.
        OSError: a storage failed.
    """
    theirs, path = find(good.storage, good.check_step(step)), bad.path(step)
    if bad.missing_file(step) == f"{path}/{names.COMMIT_MARKER}":
        return _complete(bad, theirs, step)
    ours = _find(bad.storage, path)
    is_alike = (
        _is_alike(bad.storage, path, theirs) if ours is None else ours.origin == theirs.origin
    )
    if theirs.record is None or not is_alike or (theirs.is_share and ours is None):
        raise SaveFailed(f"{path} and {theirs.path} are different steps; nothing was changed")
    if theirs.is_share and ours is not None and not ours.is_share:
        return _mend_with_part(bad, ours, good, step)
    if ours is None or not ours.is_share:
        _check_good(verify_in(theirs.storage, theirs.path))
    if ours is None:
        record = replace(theirs.record, name=posixpath.basename(path))
        bad.storage.write(f"{path}/{names.RECORD}", encode_record(record))
        if bad.missing_file(step) is not None:  # the commit marker
            return [names.RECORD, *_complete(bad, theirs, step)]
        return [names.RECORD, *_mend(bad, find(bad.storage, path), theirs, step)]
    return _mend(bad, ours, theirs, step)


def _mend_with_part(bad: StepIndex, ours: Found, good: StepIndex, step: int) -> list[str]:
    replaced = replace_part(bad, good, step)
    if not (report := verify_in(ours.storage, ours.path)).ok:
        what = f"{good.path(step)} has {replaced or 'no files'} of it, which are good now"
        raise SaveFailed(f"{what}. Heal it from the other shares too: {report.problems[0].message}")
    return replaced


def replace_part(bad: StepIndex, share: StepIndex, step: int) -> list[str]:
    """Replaces the bad files of a step that came from the share of a process; returns them."""
    ours, theirs = find(bad.storage, bad.path(step)), find(share.storage, share.check_step(step))
    if ours.origin != theirs.origin:
        raise SaveFailed(f"{ours.path} and {theirs.path} are different steps")
    _check_good(verify_in(theirs.storage, theirs.path))
    sent = part_of(theirs, commit_of(ours.storage, ours.path).work(upload_token(theirs)))
    recorded, replaced = ours.recorded(ours.path), []
    for name, facts in sent.facts().items():
        file = f"{theirs.path}/{sent.files[name]}"
        if recorded.get(name) != facts or _has_bytes(ours, name, theirs.storage, file, facts.size):
            continue
        path = f"{ours.path}/{name}"
        ours.storage.make_dir(posixpath.dirname(path))
        ours.storage.write(path, pieces(theirs.storage, file, facts.size))
        replaced.append(name)
        if names.is_data_file(name):
            _link_to_others(bad, step, name)
    bad.forget(step)
    return replaced


def _complete(bad: StepIndex, theirs: Found, step: int) -> list[str]:
    """Mends a copy that lost its commit marker: the marker comes last, when all files are good."""
    path, marker = bad.path(step), names.COMMIT_MARKER
    file = f"{path}/{names.RECORD}"
    record = decode_record(bad.storage.read(file, max_bytes=MAX_RECORD_BYTES), file=file)
    ours = Found(storage=bad.storage, path=path, record=record)
    if theirs.record is None or ours.origin != theirs.origin or ours.is_share:
        raise SaveFailed(f"{path} and {theirs.path} are different steps; nothing was changed")
    _check_good(verify_in(theirs.storage, theirs.path))
    replaced = [name for name in sorted(record.files) if not _is_same(ours, theirs, name)]
    for name in replaced:
        _replace(ours, theirs, name)
    data = theirs.storage.read(f"{theirs.path}/{marker}", max_bytes=MAX_RECORD_BYTES)
    bad.storage.write(f"{path}/{marker}", data)
    bad.forget(step)
    return [*replaced, marker, *_mend(bad, find(bad.storage, path), theirs, step)]


def _mend(bad: StepIndex, ours: Found, theirs: Found, step: int) -> list[str]:
    """Replaces bad files until the copy is whole; returns them."""
    replaced: list[str] = []
    while not (report := verify_in(ours.storage, ours.path)).ok:
        bad_files = _bad_parts if ours.is_share else _bad_files
        files = bad_files(ours, theirs, report, besides=replaced)
        if not files:
            problem = report.problems[0].message
            raise SaveFailed(f"{ours.path} cannot be mended from {theirs.path}: {problem}")
        for name in files:
            if ours.is_share and names.is_data_file(name):
                _put_chunks(ours, theirs, name)
            else:
                _replace(ours, theirs, name)
        replaced += files
        bad.forget(step)
    for name in filter(names.is_data_file, replaced):
        _link_to_others(bad, step, name)
    return replaced


def _find(storage: Storage, path: str) -> Found | None:
    """Finds the damaged copy; None if its record is lost or damaged."""
    try:
        return find(storage, path)
    except CorruptCheckpoint as error:
        if error.file != f"{path}/{names.RECORD}":
            raise
        return None


def _is_alike(storage: Storage, path: str, theirs: Found) -> bool:
    """Returns whether a copy without a record is of the same save, by when that began."""
    file = f"{path}/{names.CHECKPOINT_METADATA}"
    try:
        about = decode(storage.read(file, max_bytes=jsontext.MAX_BYTES), file=file)
    except (CorruptCheckpoint, FileNotFoundError):
        return False
    return about.init_ns is not None and about.init_ns == theirs.metadata.init_ns


def _link_to_others(run: StepIndex, number: int, name: str) -> None:
    """Puts a mended file of values into the other steps that have a bad file of its name."""
    if run.storage.server_copies:  # in a store, each step has files of its own
        return
    storage, mended = run.storage, f"{run.path(number)}/{name}"
    size = storage.size(mended)
    for other in run.listing().steps:
        path = run.path(other)
        file = f"{path}/{name}"
        if other == number or storage.kind(file) != "file":
            continue
        if storage.size(file) != size or not same_bytes(storage, mended, storage, file, size):
            storage.delete_files([file])
            storage.link(mended, file)
            storage.sync(posixpath.dirname(file))
            run.forget(other)
            run.report(f"{file} was as damaged as {mended}, and is a link to the mended file now")


def _check_good(report: VerifyReport) -> None:
    if not report.ok:
        problem = report.problems[0].message
        raise SaveFailed(f"{report.path} is damaged too, so nothing is taken from it: {problem}")


def _bad_files(ours: Found, theirs: Found, report: VerifyReport, besides: list[str]) -> list[str]:
    removed = {f"{ours.path}/{item}" for item in ours.removed}
    for problem in report.problems:
        if problem.unreadable and problem.file not in removed:
            raise SaveFailed(f"{ours.path} cannot be read now: {problem.message}")
    recorded = ours.recorded(ours.path).keys() & theirs.recorded(theirs.path).keys()
    named = {posixpath.relpath(p.file, ours.path) for p in report.problems if p.file}
    named |= {name for name in recorded if name.partition("/")[0] in ours.removed}
    found = sorted((named & recorded) - {*besides})
    if found or besides:
        return found
    # The damage shows only where several files meet.
    return sorted(name for name in recorded if not _is_same(ours, theirs, name))


def _is_same(ours: Found, theirs: Found, name: str) -> bool:
    size = theirs.recorded(theirs.path)[name].size
    return _has_bytes(ours, name, theirs.storage, f"{theirs.path}/{name}", size)


def _has_bytes(ours: Found, name: str, storage: Storage, file: str, size: int) -> bool:
    """Returns whether a file of a step has the same bytes as another file."""
    try:
        return same_bytes(ours.storage, f"{ours.path}/{name}", storage, file, size)
    except (CheckpointError, OSError, EOFError) as error:
        if is_io_failure(error):
            raise
        return False


def _replace(ours: Found, theirs: Found, name: str) -> None:
    size = theirs.recorded(theirs.path)[name].size
    if ours.recorded(ours.path)[name].size != size:
        raise SaveFailed(f"{ours.path}/{name} had another size than {theirs.path}/{name}")
    path = f"{ours.path}/{name}"
    kind = ours.storage.kind(path)
    if kind not in (None, "file"):
        raise SaveFailed(f"{path} is a {kind}, and is not replaced")
    ours.storage.make_dir(posixpath.dirname(path))
    ours.storage.write(path, pieces(theirs.storage, f"{theirs.path}/{name}", size))


def _bad_parts(ours: Found, theirs: Found, report: VerifyReport, besides: list[str]) -> list[str]:
    """Returns the bad files of a share that can be made again."""
    named = {posixpath.relpath(p.file, ours.path) for p in report.problems if p.file}
    mine, good = ours.recorded(ours.path), theirs.recorded(theirs.path)
    return [
        name
        for name in sorted((named & mine.keys()) - {*besides})
        if names.is_data_file(name) or mine[name] == good.get(name)
    ]


def _put_chunks(ours: Found, theirs: Found, name: str) -> None:
    """Writes a data file again, its chunks as the other copy has them."""
    size, path = ours.recorded(ours.path)[name].size, f"{ours.path}/{name}"
    data: Any = np.zeros(size, np.uint8)
    if ours.storage.kind(path) == "file" and ours.storage.size(path) == size:
        ours.storage.read_into(path, 0, [data])
    item = next(one for one, at in ours.items.items() if path.startswith(f"{at}/"))
    here, there = _places(ours, item), _places(theirs, item)
    inside = posixpath.relpath(path, ours.items[item])
    for key, place in here.items():
        if isinstance(place, bytes) or place[0] != inside:
            continue
        source = there.get(key, b"")
        chunk: Any = data[place[1] : place[1] + place[2]]
        if isinstance(source, bytes) or source[2] != place[2]:
            raise SaveFailed(f'{theirs.path} has another chunk "{key}" than {ours.path}')
        theirs.storage.read_into(f"{theirs.items[item]}/{source[0]}", source[1], [chunk])
    ours.storage.make_dir(posixpath.dirname(path))
    ours.storage.write(path, data.tobytes())


def _places(found: Found, item: str) -> Mapping[str, Any]:
    """Returns where the values of an item's database lie, by key."""
    path = found.items[item]
    try:
        return find_values(found.storage, path) or {}
    except ValueError as error:
        raise SaveFailed(f"{path}: it is not known where its chunks lie: {error}") from error
