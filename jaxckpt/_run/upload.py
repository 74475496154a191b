"""Copies the steps of a run to another root, such as a bucket, and goes on where it was cut off.

The copy of a step is a save there like any other (see `_disk.transaction`), but for its token,
which is made of the token of the step. So the next upload of the step takes a dead upload over. A
file already in the target is compared byte for byte, and sent again if it differs.

A step of several hosts is uploaded in parts, each by the process that has it on its disk; see
`shares`. The processes meet in the target: process 0 begins the copy, and commits it once the
tables of all parts are there.

A file of values that an earlier step there has too is linked, or copied by the store, by the rules
of `_save.unchanged`. On a file system, neighbouring steps share no file. A file is compared with
the file to send before its first reference and each tenth. If it differs, the file is sent, and
replaced in the older steps that have it.
"""

from __future__ import annotations

import contextlib
import hashlib
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple

from jaxckpt._disk import transaction as _transaction
from jaxckpt._disk.attempt import raise_save_error
from jaxckpt._disk.commit import commit_of
from jaxckpt._disk.contents import Contents
from jaxckpt._disk.data_files import COPIED_BYTES
from jaxckpt._disk.find import find
from jaxckpt._disk.found import Found, is_current
from jaxckpt._disk.pace import Pace
from jaxckpt._disk.read_back import MOST_BYTES, TRUSTED, put_instead
from jaxckpt._inspect.verify import verify_in
from jaxckpt._run.facts import run_metadata, write_run_metadata
from jaxckpt._run.fork import deleted
from jaxckpt._run.index import StepIndex
from jaxckpt._run.shares import part_of
from jaxckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    StepExists,
    UnsupportedFormat,
    is_io_failure,
)
from jaxckpt.format import names
from jaxckpt.format.step import Record
from jaxckpt.storage import Entry, Storage, drop_cached, files_in, together
from jaxckpt.storage._large import pieces


class Uploaded(NamedTuple):
    """Reports the upload of one step."""

    step: int
    path: str
    sent_bytes: int
    found_bytes: int  # of files already in the target, or in the step before
    process: int = 0  # whose part was sent
    lacks: Sequence[int] = ()  # the processes whose parts are missing, so that it is not committed


def upload(
    source: StepIndex,
    target: StepIndex,
    step: int,
    *,
    fence: Callable[[], None] | None = None,
    pace: Pace | None = None,
    trusted: dict[str, int] | None = None,
    parts: dict[int, bytes] | None = None,
    lacks: list[int] | None = None,
    wait_s: float = 0.0,
) -> Uploaded:
    """Copies a step that jaxckpt wrote, or the part of it on this disk, and checks every byte.

    Args:
        fence: Raises if this process may not commit in the target.
        trusted: How many steps may refer to each file there before it is read again, kept between
            uploads. If None, all is sent.
        parts: The tables of other processes read so far, kept between tries.
        lacks: Is set to the processes whose tables are waited for, or have not come.
        wait_s: How long process 0 waits for these tables.

    Raises:
        CheckpointNotFound: no such step, or it was deleted or replaced meanwhile.
        CorruptCheckpoint: the step is damaged; nothing was committed.
        UnsupportedFormat: another program wrote the step.
        StepExists: the target has another step of this number.
        SaveFailed: another process uploads the step, or took over.
        ProcessesDisagree: another process cannot upload its part.
    """
    source.check_there(step)
    found = find(source.storage, source.path(step))
    if (record := found.record) is None:
        raise UnsupportedFormat(
            f"{found.path} was not written by jaxckpt. Copy it with `jaxckpt convert`."
        )
    path = target.path(step)
    target.forget(step)  # another process of the job, or others, may have deleted it
    if target.is_committed(step):
        there = already_there(found, record, target, step)
        _follow_pin(found, target.storage, path, was_pinned=False)
        return there
    contents = contents_of(found)
    before, beside = ([], []) if trusted is None else _earlier(target, step)
    work = commit_of(target.storage, path).work(token := upload_token(found))
    part, attempt, was_pinned = part_of(found, work), None, False
    lacks = [] if lacks is None else lacks
    lacks.clear()
    if part.process == 0:
        attempt = _transaction.begin(
            target.storage, path, overwrite=False, token=token, fence=fence, resumes=True
        )
    sending = Sending(
        source=contents,
        target=target.storage,
        folder=work.path,
        pace=pace or Pace(),
        before=before,
        beside=beside,
        trusted={} if trusted is None else trusted,
        sources=part.files,
        check=int if attempt is None else partial(attempt.protocol.check, attempt.token, fence),
    )
    try:
        files, known = {}, part.facts()
        # First the main item: the time may not suffice for all.
        sending.send_all({name: facts.size for name, facts in known.items()}, first=record.item)
        for name, bad in sending.bad.items():  # before the commit moves the files
            if is_bad(target.storage, bad, name):  # else the new step has no use for what differs
                target.report(f"{bad} is damaged, so it was sent again")
            others = [bad, *(f"{target.path(n)}/{name}" for n in target.steps())]
            mend_others(target, f"{work.path}/{name}", name, others)
        if attempt is None:
            part.leave(target.storage)
        elif part.count > 1:
            parts = {} if parts is None else parts
            part.take(target.storage, parts, lacks, sending.pace.rest, wait_s)
            files, known = ({}, {}) if lacks else part.unite(target.storage, parts)
        if attempt is not None and not lacks:
            sending.clear(known)
            if was_pinned := _is_pinned(found):
                sending.check()
                target.storage.write(f"{work.path}/{names.PINNED}", b"")
            attempt.commit(files, found.uploaded(record), known=known)
        elif attempt is not None:
            attempt.hold.release()
    except BaseException as error:
        if _is_gone(found, error):
            if attempt is not None:
                attempt.abort(error)  # nothing would go on with what was sent
            raise deleted(found.path, error) from error
        if attempt is not None:
            attempt.hold.release()  # the sent files stay for the next upload
            if not is_io_failure(error):
                sending.withdraw()
        raise_save_error(path, error)
    if not lacks:
        linked = {f"{path}/{name}": left for name, left in sending.linked.items()}
        sending.trusted.update(linked)
    if attempt is not None and attempt.committed:
        _follow_pin(found, target.storage, path, was_pinned=was_pinned)
        with contextlib.suppress(CorruptCheckpoint):  # the next job that has metadata reports it
            if (metadata := run_metadata(source)) and not run_metadata(target):
                write_run_metadata(target, metadata)
    return Uploaded(step, path, sending.sent_bytes, sending.found_bytes, part.process, lacks)


def _is_gone(found: Found, error: BaseException) -> bool:
    """Returns whether an upload failed because the step was deleted or replaced."""
    with contextlib.suppress(OSError):  # then nothing is known
        return isinstance(error, FileNotFoundError | CorruptCheckpoint) and not is_current(found)
    return False


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


def mend_others(run: StepIndex, good: str, name: str, others: Iterable[str]) -> None:
    """Replaces the damaged files of a name in other steps by the good file."""
    storage, size = run.storage, run.storage.size(good)
    for other in dict.fromkeys(others):
        try:
            if storage.kind(other) != "file":
                continue
            both = pieces(storage, good, size), pieces(storage, other, size)
            is_same = storage.size(other) == size and same_bytes(*both)
            if not is_same and is_bad(storage, other, name):
                put_instead(storage, good, other)
                run.report(f"{other} is mended: it has what the mended file {good} has")
        except (CheckpointError, OSError, EOFError) as error:
            run.report(f"{other} cannot be mended: {error}")


def is_bad(storage: Storage, file: str, name: str) -> bool:
    """Returns whether a step is damaged in one of its files, of which it may use a part.

    Args:
        name: Of the file in the step, or of another one in the same folder.
    """
    step = file.rsplit("/", name.count("/") + 1)[0]
    return any(problem.file == file for problem in verify_in(storage, step).problems)


def contents_of(found: Found) -> Contents:
    """Returns the files of a step, to be checked while they are copied.

    Raises:
        CorruptCheckpoint: the step is damaged, as far as its sizes and small files show.
    """
    contents = Contents.of(found)
    report = None if contents.is_known else verify_in(found.storage, found.path)
    if report is not None and report.problems:
        problem = report.problems[0]
        raise CorruptCheckpoint(f"{problem.file}: {problem.message}", file=problem.file)
    return contents


def upload_token(found: Found) -> str:
    """Returns the token of all attempts to upload a step."""
    return hashlib.sha256(f"upload {found.origin}".encode()).hexdigest()[:16]


def already_there(found: Found, record: Record, target: StepIndex, step: int) -> Uploaded:
    """Returns the copy in the target; StepExists if that is another step."""
    there = find(target.storage, target.check_step(step))
    if there.origin != found.origin:
        raise StepExists(f"{there.path} exists, and is no copy of {found.path}. Nothing was sent.")
    return Uploaded(step, there.path, 0, sum(facts.size for facts in record.files.values()))


def _is_pinned(found: Found) -> bool:
    return found.storage.kind(f"{found.path}/{names.PINNED}") is not None


def _follow_pin(found: Found, storage: Storage, path: str, *, was_pinned: bool) -> None:
    """Pins or unpins the committed copy of a step as was done with the step meanwhile."""
    is_pinned, pin = _is_pinned(found), f"{path}/{names.PINNED}"
    if is_pinned and not was_pinned:
        storage.write(pin, b"")
        if storage.kind(f"{path}/{names.COMMIT_MARKER}") is None:  # it was deleted meanwhile
            storage.delete_files([pin])
    elif was_pinned and not is_pinned and found.storage.kind(found.path) is not None:
        storage.delete_files([pin])


@dataclass(slots=True)
class Sending:
    """Copies files from one directory to another, but not files already in the target."""

    source: Contents
    target: Storage
    folder: str
    pace: Pace
    before: Sequence[str] = ()  # steps in the target that may have files of the same names
    beside: Sequence[str] = ()  # steps that must not share them
    trusted: dict[str, int] = field(default_factory=dict)  # as in `upload`
    linked: dict[str, int] = field(default_factory=dict)  # how many further steps may refer to it
    bad: dict[str, str] = field(default_factory=dict)  # files that differ from older ones
    sources: Mapping[str, str] = field(default_factory=dict)  # other names in the source
    check: Callable[[], object] = int  # raises if another job has taken the run or the directory
    _made: set[str] = field(default_factory=set)  # files that were not there like this before
    _shared: dict[str, str] = field(default_factory=dict)  # files to link, and to which others
    _unread: set[str] = field(default_factory=set)  # linked without reading: there are too many
    _there: set[str] = field(default_factory=set)  # files that the target had before
    sent_bytes: int = 0
    found_bytes: int = 0

    def send_all(self, sizes: Mapping[str, int], *, first: str = "") -> None:
        """Sends the files that are not there yet, several at once.

        Args:
            first: The item to begin with.
        """
        there = self.target.files(self.folder)
        if self.before:
            self._find_shared(sizes)
        self._there = there.keys() - {names.WRITER}
        order = sorted(sizes, key=lambda name: (not name.startswith(f"{first}/"), name))
        values = [name for name in order if names.is_data_file(name)]
        others = [name for name in order if not names.is_data_file(name)]
        # The step of another job has others of the same names, so they come when none is there.
        for some, check in ((values, int), (others, self.check if others else int)):
            check()
            sends = [partial(self._send_if_missing, n, sizes[n], there.get(n)) for n in some]
            for sent, size in together(self.target, sends):
                self.sent_bytes += size if sent else 0
                self.found_bytes += 0 if sent else size

    def clear(self, keep: Iterable[str]) -> None:
        """Deletes files of an upload that died, but not those to keep."""
        storage = self.target
        if storage.atomic_rename:  # a store has no half-written files
            self._there |= files_in(storage.entries, self.folder, temporary=True).keys()
        if stray := sorted(self._there.difference(keep)):
            storage.delete_files([f"{self.folder}/{name}" for name in stray], check=self.check)

    def withdraw(self) -> None:
        """Deletes what was sent if the next job has removed the rest: nobody would know it."""
        with contextlib.suppress(OSError, CheckpointError):
            there = [f"{self.folder}/{name}" for name in (names.WRITER, names.COMMIT_MARKER)]
            if {None} == {*map(self.target.kind, there)}:
                commit_of(self.target, self.folder).remove_left(sorted({*self._made, names.PINNED}))

    def _find_shared(self, sizes: Mapping[str, int]) -> None:
        """Finds the files of values that earlier steps have too; no other file has their names."""
        ends = {names.end_of(name): name for name in sizes if names.is_data_file(name)}
        beside = {names.end_of(name) for step in self.beside for name in self.target.files(step)}
        is_store, left = self.target.server_copies, MOST_BYTES
        for step in self.before:
            for file, entry in self.target.files(step).items():
                name = ends.get(names.end_of(file), "") if names.end_of(file) not in beside else ""
                size = sizes.get(name, -1)
                if entry == Entry("file", size) and (not is_store or size in COPIED_BYTES):
                    self._shared.setdefault(name, f"{step}/{file}")
        for name in self._shared if is_store else ():
            left -= 0 if self._left(name) else sizes[name]
            if left < 0:  # its bytes cost money: this is read another time
                self._unread.add(name)

    def _left(self, name: str) -> int:
        """Returns how many steps may refer to a shared file without reading it."""
        new = TRUSTED if self.target.server_copies else 0
        return self.trusted.get(self._shared[name], new)

    def _send_if_missing(self, name: str, size: int, there: Entry | None) -> tuple[bool, int]:
        if there is not None and there.size == size:
            here = pieces(self.target, f"{self.folder}/{name}", size)
            if same_bytes(here, self._read(name, size)):
                return False, size
        self._made.add(name)
        if there is None and name in self._shared and self._is_linked(name, size):
            return False, size
        self._send(name, size, replace=there is not None)
        return True, size

    def _is_linked(self, name: str, size: int) -> bool:
        """Links a file of an earlier step, which is read back before if that is due."""
        storage, path, other = self.target, f"{self.folder}/{name}", self._shared[name]
        try:
            left = self._left(name) or (1 if name in self._unread else 0)
            if not left:
                left = TRUSTED
                drop_cached(storage, other)
                if not same_bytes(pieces(storage, other, size), self._read(name, size)):
                    self.bad[name] = other
                    return False
            storage.make_dir(posixpath.dirname(path))
            storage.link(other, path)  # durable with the commit
        except (OSError, EOFError):  # then it is sent
            return False
        self.trusted.pop(other, None)
        self.linked[name] = left - 1
        return True

    def _read(self, name: str, size: int) -> Iterator[bytes]:
        return self.source.pieces(self.sources.get(name, name), size)

    def _send(self, name: str, size: int, *, replace: bool) -> None:
        storage, path = self.target, f"{self.folder}/{name}"
        storage.make_dir(posixpath.dirname(path))
        if names.is_data_file(name):  # nobody else writes this name
            storage.write(path, self._paced(name, size))
            return
        if replace:
            storage.delete_files([path], check=self.check)
        commit_of(storage, self.folder).add(path, self._paced(name, size))

    def _paced(self, name: str, size: int) -> Iterator[bytes]:
        for piece in self._read(name, size):
            self.pace.wait(len(piece))
            yield piece


def same_bytes(some: Iterable[bytes], others: Iterable[bytes]) -> bool:
    """Returns whether two files, in equal pieces, have the same bytes."""
    return all(x == y for x, y in zip(some, others, strict=True))
