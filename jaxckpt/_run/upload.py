"""Copies the steps of a run to another place, such as a bucket, and goes on where it was cut off.

The copy of a step is a save there like any other (see `_disk.transaction`), but for its token,
which is made of the token of the step. So the next upload of the step takes a dead upload over. A
file already in the target is compared byte for byte, and sent again if it differs.

A file of values that an earlier step there has too is linked, or copied by the store, by the rules
of `_save.unchanged`. On a file system, neighbouring steps share no file. A file is compared with
the file to send before its first reference and each tenth. If it differs, the file is sent, and
replaced in the older steps that have it.
"""

from __future__ import annotations

import hashlib
import posixpath
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

from jaxckpt._disk import transaction as _transaction
from jaxckpt._disk.commit import commit_of
from jaxckpt._disk.data_files import COPIED_BYTES
from jaxckpt._disk.find import find
from jaxckpt._disk.found import Found
from jaxckpt._disk.read_back import MOST_BYTES, TRUSTED, put_instead
from jaxckpt._inspect.verify import verify_in
from jaxckpt._run.index import StepIndex, newest_saved, run_metadata, write_run_metadata
from jaxckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    SaveFailed,
    StepExists,
    UnsupportedFormat,
)
from jaxckpt.format import names
from jaxckpt.format.step import Record
from jaxckpt.storage import Entry, Storage, drop_cached, together
from jaxckpt.storage._large import pieces

# The copy has its own.
_NOT_COPIED: Final = frozenset({names.RECORD, names.COMMIT_MARKER, names.WRITER, names.PINNED})


class Uploaded(NamedTuple):
    """Reports the upload of one step."""

    step: int
    path: str
    sent_bytes: int
    found_bytes: int  # of files already in the target, or in the step before


def missing_steps(source: StepIndex, target: StepIndex) -> list[int]:
    """Returns the complete steps of a run that another place lacks, the newest first.

    Leaves out steps of an earlier life, since the run went on without them.
    """
    besides = {*target.steps(), *source.earlier_lives(newest_saved(target))}
    steps = (step for step in source.newest_first() if step not in besides)
    return [step for step in steps if source.is_whole(step)]


def upload(
    source: StepIndex,
    target: StepIndex,
    step: int,
    *,
    fence: Callable[[], None] | None = None,
    pace: Pace | None = None,
    trusted: dict[str, int] | None = None,
) -> Uploaded:
    """Copies a step that jaxckpt wrote, and checks it before.

    Args:
        fence: Raises if this process may not commit in the target.
        trusted: How many steps may refer to each file there before it is read again, kept between
            uploads. If None, all is sent.

    Raises:
        CheckpointNotFound: no such step.
        CorruptCheckpoint: the step is damaged; nothing was sent.
        UnsupportedFormat: another program wrote the step.
        StepExists: the target has another step of this number.
        SaveFailed: another process uploads the step, or took over.
    """
    source.check_there(step)
    found = find(source.storage, source.path(step))
    record = checked(found)
    if found.is_share:
        raise UnsupportedFormat(str(found.not_here("the others' parts")))
    path = target.path(step)
    if target.is_committed(step):
        return already_there(found, record, target, step)
    token = upload_token(found)
    before, beside = ([], []) if trusted is None else _earlier(target, step)
    work = _transaction.begin(
        target.storage, path, overwrite=False, token=token, fence=fence, resumes=True
    )
    sending = Sending(
        source=found.storage,
        source_folder=found.path,
        target=work.storage,
        folder=work.work,
        pace=pace or Pace(),
        before=before,
        beside=beside,
        trusted={} if trusted is None else trusted,
    )
    try:
        sizes = {name: record.files[name].size for name in record.files.keys() - _NOT_COPIED}
        sending.send_all(sizes, first=record.item)  # the time may not suffice for all
        known = {name: record.files[name] for name in sizes}
        lineage = lineage_of(found)
        work.commit({}, known=known, lineage=lineage, item=record.item, life=record.life)
    except BaseException as error:
        work.release()  # the sent files stay for the next upload
        _transaction.raise_save_error(path, error)
    sending.trusted.update({f"{path}/{name}": left for name, left in sending.linked.items()})
    _mend(target, path, sending.bad)
    copy_run_metadata(source, target)
    return Uploaded(step, path, sending.sent_bytes, sending.found_bytes)


def _earlier(target: StepIndex, step: int) -> tuple[list[str], list[str]]:
    """Returns the steps whose files a new step may share, newest first; and steps it must not."""
    if target.storage.server_copies:  # each step has its own objects
        committed = (n for n in reversed(target.listing().steps) if target.is_committed(n))
        return [target.path(n) for n in islice(committed, 2)], []
    steps = target.steps()
    below, above = [n for n in steps if n < step], [n for n in steps if n > step]
    if len(below) > 1:
        return [target.path(below[-2])], [target.path(n) for n in above[:1]]
    return [target.path(n) for n in above[1:2] if not below], []


def _mend(target: StepIndex, path: str, bad: Mapping[str, str]) -> None:
    """Replaces files that were found damaged in older steps, now that they are sent again."""
    storage = target.storage
    for name, folder in bad.items():
        target.report(f"{folder}/{name} is damaged, so it was sent again with {path}")
        for other in [other for other in map(target.path, target.steps()) if other != path]:
            try:
                size = storage.size(f"{path}/{name}")
                is_there = storage.kind(f"{other}/{name}") == "file"
                both = storage, f"{path}/{name}", storage, f"{other}/{name}"
                if is_there and not same_bytes(*both, size):
                    put_instead(storage, f"{path}/{name}", f"{other}/{name}")
                    target.report(f"{other}/{name} is mended")
            except (CheckpointError, OSError, EOFError) as error:
                target.report(f"{other}/{name} cannot be mended: {error}")


def checked(found: Found) -> Record:
    """Returns the record of a step that was read back without damage."""
    if found.record is None:
        raise UnsupportedFormat(
            f"{found.path} was not written by jaxckpt. Copy it with `jaxckpt convert`."
        )
    report = verify_in(found.storage, found.path)
    if report.problems:
        problem = report.problems[0]
        raise CorruptCheckpoint(f"{problem.file}: {problem.message}", file=problem.file)
    return found.record


def upload_token(found: Found) -> str:
    """Returns the token of all attempts to upload a step."""
    return hashlib.sha256(f"upload {found.origin}".encode()).hexdigest()[:16]


def lineage_of(found: Found) -> dict[str, str | None]:
    """Returns the source of a copy, for its record."""
    return {"by": "upload", "path": found.path, "token": found.origin}


def already_there(found: Found, record: Record, target: StepIndex, step: int) -> Uploaded:
    """Returns the copy in the target; StepExists if that is another step."""
    there = find(target.storage, target.check_step(step))
    if there.origin != found.origin:
        raise StepExists(f"{there.path} exists, and is no copy of {found.path}. Nothing was sent.")
    return Uploaded(step, there.path, 0, sum(facts.size for facts in record.files.values()))


def copy_run_metadata(source: StepIndex, target: StepIndex) -> None:
    """Copies the metadata of a run, unless the target has some."""
    if (metadata := run_metadata(source)) and not run_metadata(target):
        write_run_metadata(target, metadata)


class GaveWay(SaveFailed):
    """The upload of a step ended early, since another step's upload is more urgent."""


@dataclass(slots=True)
class Pace:
    """Limits the bytes that are sent in a second; may be shared by threads."""

    max_bytes_per_s: float | None = None
    ends: threading.Event = field(default_factory=threading.Event)  # whether to send no more
    _due_s: float = 0.0  # when the next piece may be sent
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self, size: int) -> None:
        """Waits until a piece may be sent; raises `GaveWay` if none may any more."""
        start_s = time.monotonic()
        if self.max_bytes_per_s is not None:
            with self._lock:
                start_s = max(self._due_s, start_s)
                self._due_s = start_s + size / self.max_bytes_per_s
        if self.ends.wait(max(0.0, start_s - time.monotonic())):
            raise GaveWay("the upload gives way to that of a newer step; it goes on later")


@dataclass(slots=True)
class Sending:
    """Copies files from one directory to another, but not files already in the target."""

    source: Storage
    source_folder: str
    target: Storage
    folder: str
    pace: Pace
    before: Sequence[str] = ()  # steps in the target that may have files of the same names
    beside: Sequence[str] = ()  # steps that must not share them
    trusted: dict[str, int] = field(default_factory=dict)  # as in `upload`
    linked: dict[str, int] = field(default_factory=dict)  # how many further steps may refer to it
    bad: dict[str, str] = field(default_factory=dict)  # files that differ, and in which step
    sources: Mapping[str, str] = field(default_factory=dict)  # other names in the source
    is_alone: bool = True  # whether nobody else sends to the directory
    _shared: dict[str, str] = field(default_factory=dict)  # files to link, and of which step
    _unread: set[str] = field(default_factory=set)  # linked without reading: there are too many
    sent_bytes: int = 0
    found_bytes: int = 0

    def send_all(self, sizes: Mapping[str, int], *, first: str = "") -> None:
        """Sends the files that are not there yet, several at once.

        Args:
            first: The item to begin with.
        """
        there = self.target.files(self.folder)
        self._find_shared(sizes)
        if self.is_alone:
            stray = there.keys() - sizes - {names.WRITER}  # of an upload that died in its commit
            self.target.delete_files([f"{self.folder}/{name}" for name in stray])
        sends = [
            partial(self._send_if_missing, name, sizes[name], there.get(name))
            for name in sorted(sizes, key=lambda name: (not name.startswith(f"{first}/"), name))
        ]
        for sent, size in together(self.target, sends):
            self.sent_bytes += size if sent else 0
            self.found_bytes += 0 if sent else size

    def _find_shared(self, sizes: Mapping[str, int]) -> None:
        """Finds the files of values that earlier steps have too; no other file has their names."""
        beside = {name for step in self.beside for name in self.target.files(step)}
        is_store, left = self.target.server_copies, MOST_BYTES
        for step in self.before:
            for name, entry in self.target.files(step).items():
                size = sizes.get(name, -1)
                is_worth_it = not is_store or size in COPIED_BYTES
                if entry == Entry("file", size) and names.is_data_file(name) and is_worth_it:
                    self._shared.setdefault(name, step)
        for name in beside:
            self._shared.pop(name, None)
        for name in self._shared if is_store else ():
            left -= 0 if self._left(name) else sizes[name]
            if left < 0:  # its bytes cost money: this is read another time
                self._unread.add(name)

    def _left(self, name: str) -> int:
        """Returns how many steps may refer to a shared file without reading it."""
        new = TRUSTED if self.target.server_copies else 0
        return self.trusted.get(f"{self._shared[name]}/{name}", new)

    def _send_if_missing(self, name: str, size: int, there: Entry | None) -> tuple[bool, int]:
        if there is not None and there.size == size and self._is_same(name, size):
            return False, size
        if there is None and name in self._shared and self._is_linked(name, size):
            return False, size
        self._send(name, size, replace=there is not None)
        return True, size

    def _is_linked(self, name: str, size: int) -> bool:
        """Links a file of an earlier step, which is read back before if that is due."""
        storage, path, step = self.target, f"{self.folder}/{name}", self._shared[name]
        try:
            left = self._left(name) or (1 if name in self._unread else 0)
            if not left:
                left = TRUSTED
                drop_cached(storage, f"{step}/{name}")
                if not same_bytes(storage, f"{step}/{name}", *self._source_of(name), size):
                    self.bad[name] = step
                    return False
            storage.make_dir(posixpath.dirname(path))
            storage.link(f"{step}/{name}", path)  # durable with the commit
        except (OSError, EOFError):  # then it is sent
            return False
        self.trusted.pop(f"{step}/{name}", None)
        self.linked[name] = left - 1
        return True

    def _source_of(self, name: str) -> tuple[Storage, str]:
        return self.source, f"{self.source_folder}/{self.sources.get(name, name)}"

    def _is_same(self, name: str, size: int) -> bool:
        return same_bytes(self.target, f"{self.folder}/{name}", *self._source_of(name), size)

    def _send(self, name: str, size: int, *, replace: bool) -> None:
        storage, path = self.target, f"{self.folder}/{name}"
        storage.make_dir(posixpath.dirname(path))
        if names.is_data_file(name):  # nobody else writes this name
            storage.write(path, self._paced(name, size))
            return
        if replace:
            storage.delete_files([path])
        commit_of(storage, self.folder).add(path, self._paced(name, size))

    def _paced(self, name: str, size: int) -> Iterator[bytes]:
        for piece in pieces(*self._source_of(name), size):
            self.pace.wait(len(piece))
            yield piece


def same_bytes(a: Storage, path_a: str, b: Storage, path_b: str, size: int) -> bool:
    """Returns whether two files of this size have the same bytes."""
    both = zip(pieces(a, path_a, size), pieces(b, path_b, size), strict=True)
    return all(x == y for x, y in both)
