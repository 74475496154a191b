"""Copies the steps of a run to another place, such as a bucket, and goes on where it was cut off.

The copy of a step is a save there like any other (see `_disk.transaction`), but for its token,
which is made of the token of the step: the next upload of the step takes the work of a dead one
over. A file that is there already is compared byte for byte, and sent again if it differs.
"""

from __future__ import annotations

import hashlib
import posixpath
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from jaxckpt._disk import transaction as _transaction
from jaxckpt._disk.find import find
from jaxckpt._disk.found import Found
from jaxckpt._disk.transaction import Transaction
from jaxckpt._inspect.verify import verify_in
from jaxckpt._run.index import StepIndex, run_metadata, write_run_metadata
from jaxckpt.errors import CorruptCheckpoint, StepExists, UnsupportedFormat
from jaxckpt.format import names
from jaxckpt.format.step import Record
from jaxckpt.storage import Storage

_PIECE_BYTES: Final = 8 << 20
# The copy has its own.
_NOT_COPIED: Final = frozenset({names.RECORD, names.COMMIT_MARKER, names.WRITER, names.PINNED})


class Uploaded(NamedTuple):
    """What an upload of one step did."""

    step: int
    path: str
    sent_bytes: int
    found_bytes: int  # of files that were there already


def missing_steps(source: StepIndex, target: StepIndex) -> list[int]:
    """Returns the complete steps of a run that another place lacks, the newest first."""
    there = {*target.steps()}
    return [step for step in source.newest_first() if step not in there and source.is_whole(step)]


def upload(
    source: StepIndex, target: StepIndex, step: int, *, max_bytes_per_s: float | None = None
) -> Uploaded:
    """Copies a step that jaxckpt wrote, and checks it before.

    Raises:
        CheckpointNotFound: no such step.
        CorruptCheckpoint: the step is damaged; nothing was sent.
        UnsupportedFormat: another program wrote the step.
        StepExists: the target has another step of this number.
        SaveFailed: another process uploads the step, or took over.
    """
    found = find(source.storage, source.check_step(step))
    record = _checked(found)
    path = f"{target.root}/{posixpath.basename(found.path)}"
    if step in target.steps():
        return _already_there(found, record, target, step)
    token = hashlib.sha256(f"upload {record.token}".encode()).hexdigest()[:16]
    work = _transaction.take_over(target.storage, path, token)
    work = work or _transaction.begin(target.storage, path, overwrite=False, token=token)
    sending = _Sending(found, work, max_bytes_per_s)
    try:
        sending.send_all(record)
        digests = {n: f.sha256 for n, f in record.files.items() if f.sha256 is not None}
        lineage = {"by": "upload", "path": found.path, "token": record.token}
        work.commit({}, digests=digests, lineage=lineage, item=record.item)
    except BaseException as error:
        work.release()  # what was sent stays for the next upload
        _transaction.raise_save_error(path, error)
    _copy_run_metadata(source, target)
    return Uploaded(step, path, sending.sent_bytes, sending.found_bytes)


def _checked(found: Found) -> Record:
    if found.record is None:
        raise UnsupportedFormat(
            f"{found.path} was not written by jaxckpt. Copy it with `jaxckpt convert`."
        )
    report = verify_in(found.storage, found.path)
    if report.problems:
        problem = report.problems[0]
        raise CorruptCheckpoint(f"{problem.file}: {problem.message}", file=problem.file)
    return found.record


def _already_there(found: Found, record: Record, target: StepIndex, step: int) -> Uploaded:
    there = find(target.storage, target.check_step(step))
    if there.record is None or there.record.lineage.get("token") != record.token:
        raise StepExists(f"{there.path} exists, and is no copy of {found.path}. Nothing was sent.")
    return Uploaded(step, there.path, 0, sum(facts.size for facts in record.files.values()))


def _copy_run_metadata(source: StepIndex, target: StepIndex) -> None:
    if (metadata := run_metadata(source)) and not run_metadata(target):
        write_run_metadata(target, metadata)


@dataclass(slots=True)
class _Sending:
    found: Found
    work: Transaction
    max_bytes_per_s: float | None
    sent_bytes: int = 0
    found_bytes: int = 0
    _start_s: float = field(default_factory=time.monotonic)

    def send_all(self, record: Record) -> None:
        there = self.work.storage.files(self.work.work)
        wanted = record.files.keys() - _NOT_COPIED
        stray = there.keys() - wanted - {names.WRITER}  # of an upload that died in its commit
        self.work.storage.delete_files([f"{self.work.work}/{name}" for name in stray])
        for name in sorted(wanted):
            size = record.files[name].size
            if name in there and there[name].size == size and self._is_same(name, size):
                self.found_bytes += size
                continue
            self._send(name, size, replace=name in there)
            self.sent_bytes += size

    def _is_same(self, name: str, size: int) -> bool:
        ours = self._pieces(self.found.storage, self.found.path, name, size)
        theirs = self._pieces(self.work.storage, self.work.work, name, size)
        return all(a == b for a, b in zip(ours, theirs, strict=True))

    def _send(self, name: str, size: int, *, replace: bool) -> None:
        storage, path = self.work.storage, f"{self.work.work}/{name}"
        storage.make_dir(posixpath.dirname(path))
        if storage.atomic_rename or names.is_data_file(name):  # nobody else writes this name
            storage.write_parts(path, partial(self._paced, name, size))
            return
        if replace:
            storage.delete_files([path])
        storage.add({path: b"".join(self._paced(name, size))})

    def _paced(self, name: str, size: int) -> Iterator[bytes]:
        sent = self.sent_bytes
        for piece in self._pieces(self.found.storage, self.found.path, name, size):
            if self.max_bytes_per_s is not None:
                due_s = self._start_s + sent / self.max_bytes_per_s
                time.sleep(max(0.0, due_s - time.monotonic()))
            yield piece
            sent += len(piece)

    @staticmethod
    def _pieces(storage: Storage, folder: str, name: str, size: int) -> Iterator[bytes]:
        for start in range(0, size, _PIECE_BYTES):
            piece: Any = np.empty(min(_PIECE_BYTES, size - start), np.uint8)
            storage.read_into(f"{folder}/{name}", start, [piece])
            yield piece.tobytes()
