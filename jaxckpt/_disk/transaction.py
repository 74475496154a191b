"""Writes one checkpoint or none: begin, write, commit or abort.

On a file system, `T` being `<name>.orbax-checkpoint-tmp-jaxckpt-<token>` beside `<name>`, process 0
does this, and a crash after each line leaves:

     1. finish or remove what an earlier crash left     `<name>` as it was before
     2. make T; put `_jaxckpt.writing` in it, locked    T: every reader takes it for temporary
        -- all processes write into T, and fsync what they wrote; all have reported --
     3. write the metadata files into T                 the same
     4. write `_jaxckpt.json`: every file, its size     the same
     5. check that `_jaxckpt.writing` has our token     the same (another writer took T: give up)
     6. fsync every file and directory of T             the same
     7. write `commit_success.txt` into T               the same: its name is still temporary
     8. rename T to `<name>`, fsync the parent          the checkpoint, committed
     9. remove `_jaxckpt.writing`                       the same

To replace a checkpoint, small files that other programs put there are copied into T before step 4,
and step 8 exchanges the two names in one; T is then the old checkpoint, which is deleted. Where
the file system cannot exchange names:

    8a. rename T to `<name>.jaxckpt-committed`          the old one; recovery puts the new in place
    8b. rename `<name>` to a `...-deleting-...` name    the new one: readers look for it there
    8c. rename `<name>.jaxckpt-committed` to `<name>`   the new one

Without an atomic rename (object stores), T is `<name>` itself and step 7 is the commit: readers
ignore a directory without `commit_success.txt`. All attempts share it, so each file is created and
none replaced, and what a process writes before step 2 has the token in its path: a writer that
wakes up late cannot change a checkpoint that was committed since. After step 7 the writer looks
once more whether `_jaxckpt.writing` has its token. If not, the new holder of that file may be
deleting our files: the writer takes the commit back, unless the new holder has found it.

`commit` does lines 1 and 5 to 8, in two ways.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import posixpath
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeVar

from jaxckpt._core.text import size_text
from jaxckpt._disk.attempt import Fence, read_small, warn
from jaxckpt._disk.commit import Commit, commit_of
from jaxckpt._disk.found import lacks_marker, record_at
from jaxckpt._disk.removal import nested
from jaxckpt._version import __version__
from jaxckpt.errors import CheckpointError, SaveFailed, StepExists, UnsupportedFormat, is_io_failure
from jaxckpt.format import names, step
from jaxckpt.format.step import FileFacts, Record
from jaxckpt.storage import (
    Entry,
    Hold,
    Storage,
    is_temporary_file,
    listing,
    real,
    store_of,
    together,
)

# Limits for files of other programs that a checkpoint takes over from the checkpoint it replaces.
_MAX_TAKEN = 100
_MAX_TAKEN_BYTES = 16_000_000
# How often to begin again when another writer removes the work directory.
_TRIES = 10
# A directory with one of these is a checkpoint, or an item of one.
_MARKS = frozenset(
    {names.RECORD, names.CHECKPOINT_METADATA, names.ORBAX_MARKER, names.TREE_METADATA}
)
# Every checkpoint has one of these, if not from an early Orbax.
_ABOUT = (names.RECORD, names.CHECKPOINT_METADATA)
_outside: set[str] = set()  # directories that are in no checkpoint


T = TypeVar("T")
Overwrite = bool | Literal["delete_first"]


@dataclass(slots=True)
class Transaction:
    """A checkpoint that is being written. Only process 0 has one."""

    storage: Storage
    path: str
    token: str  # unique to this attempt
    overwrite: Overwrite
    hold: Hold = field(default_factory=Hold)
    fence: Fence = None  # raises if this writer may no longer commit
    publishing: bool = False
    committed: bool = False
    work: str = field(init=False)  # the directory until the commit

    def __post_init__(self) -> None:
        self.work = self.protocol.work(self.token).path

    @property
    def protocol(self) -> Commit:
        """Returns how it is committed, under the lock that it has by now."""
        return commit_of(self.storage, self.path, self.hold)

    def claim(self) -> None:
        """Writes our token into the work directory, and locks it.

        Raises:
            SaveFailed: another writer was faster, or has just taken this writer for dead.
        """
        writer = f"{self.work}/{names.WRITER}"
        if (hold := self.storage.hold(writer, self.token.encode(), new=True)) is None:
            raise SaveFailed(f"another writer owns {writer}. Let only one job save here.")
        self.hold = hold

    def commit(
        self, files: Mapping[str, bytes], about: Record, *, known: Mapping[str, FileFacts]
    ) -> None:
        """Makes the checkpoint durable and visible.

        Args:
            files: The metadata files, still to be written, by path inside the checkpoint.
            about: The record, but for its first four fields.
            known: Facts about files already written, by path inside the checkpoint; size at least.

        Raises:
            SaveFailed: another writer took over.
            StepExists: the path was created during the save.
        """
        facts, name = self._add(files, known), posixpath.basename(self.path)
        by = {"writer": f"jaxckpt {__version__}", "token": self.token, "name": name}
        record = step.encode_record(replace(about, files=facts, **by))
        if self.overwrite and self.protocol.replaces:
            self._take_along()
        check = partial(self.protocol.check, self.token, self.fence)
        add = partial(self.protocol.add, f"{self.work}/{names.RECORD}", record)
        together(self.storage, [add, check])
        for path, one in known.items():  # now that the next writer would recognize the remains
            if facts.get(path, one).size < one.size:
                raise unseen(self.path, path)
        self.publishing = True
        old = self.protocol.publish(self.token, overwrite=bool(self.overwrite))
        self.committed = True
        try:
            # Readers ignore both leftovers, and the next save removes them.
            if self.protocol.replaces or self.hold.goes_on():
                self.storage.delete_files([f"{self.path}/{names.WRITER}"])
            if old is not None:
                commit_of(self.storage, old).remove()
        except OSError as error:
            warn(self.path, f"saved, but the checkpoint it replaced is not deleted yet: {error}")
        self.hold.release()

    def _take_along(self) -> None:
        """Copies the small files that other programs put into the checkpoint to be replaced.

        Not part of the record: the next checkpoint here takes them along again.
        """
        around = listing(self.storage, posixpath.dirname(self.path))
        for name in check_target(self.storage, self.path, around, overwrite=True):
            data = self.storage.read(f"{self.path}/{name}", max_bytes=_MAX_TAKEN_BYTES)
            self.storage.write(f"{self.work}/{name}", data)

    def abort(self, error: BaseException | None = None) -> None:
        """Removes the files written, unless they are committed. Never raises an OSError.

        Args:
            error: Why. After an interrupt, requests of other threads may still write files; and
                a store may act late on those that it did not answer.
        """
        causes = (error, error.__cause__) if error is not None else ()  # as of a copy not made
        late = any(one and (not isinstance(one, Exception) or is_io_failure(one)) for one in causes)
        try:
            if not self.committed:
                self.protocol.abort(self.token, published=self.publishing, late=late)
        except OSError as failure:
            warn(self.work, f"cannot be removed: {failure}. The next save here tries again.")
            _left[self.path, self.token] = self
        self.hold.release()

    def _add(
        self, files: Mapping[str, bytes], known: Mapping[str, FileFacts]
    ) -> dict[str, FileFacts]:
        """Writes metadata files, and returns the facts about all files."""
        storage, work = self.storage, self.work
        adds = [partial(self.protocol.add, f"{work}/{f}", data) for f, data in files.items()]
        *_, there = together(storage, [*adds, partial(storage.files, work)])
        for path, entry in there.items():
            if entry.kind != "file":
                storage.size(f"{self.work}/{path}")  # raises an error that names it
        facts = {
            path: FileFacts(size=entry.size)
            for path, entry in there.items()
            # Another attempt, which goes on though it has lost the directory, may remove its files.
            if path in known or self.token in path or not names.is_of_attempt(path)
        }
        for path, one in known.items():
            size = facts[path].size if path in facts else 0
            size = self._size_of(path) if size < one.size else size
            facts[path] = FileFacts(size=size, sha256=one.sha256)
        # The listing may have been made before they were written.
        for path, data in files.items():
            facts[path] = FileFacts.of(path, data)
        return {path: facts[path] for path in sorted(facts.keys() - {names.WRITER, names.PINNED})}

    def _size_of(self, path: str) -> int:
        """Returns the size of a file that a listing, which may be old, does not show whole."""
        with contextlib.suppress(FileNotFoundError):
            return self.storage.size(f"{self.work}/{path}")
        return 0


_left: dict[tuple[str, str | None], Transaction] = {}  # whose files could not be removed


def _remove_left(path: str) -> None:
    """Removes what earlier attempts beside a new one could not remove."""
    parent = posixpath.dirname(path)
    for key, one in [*_left.items()]:
        if posixpath.dirname(one.path) != parent:
            continue
        protocol = commit_of(one.storage, one.path)
        # At the path of the new attempt, its other processes may have begun to write.
        remove = protocol.remove_own if one.path == path else protocol.abort_again
        with contextlib.suppress(OSError, CheckpointError):  # the next save here tries again
            remove(one.token, published=one.publishing)
            _left.pop(key, None)


def unseen(path: str, file: str) -> SaveFailed:
    """Returns the error if process 0 does not see a file that a process has written."""
    return SaveFailed(
        f"{path}: process 0 does not see {file}, which was written. The path must be on a file "
        "system that all hosts share, or in a store that has done what it said."
    )


def begin(
    storage: Storage,
    path: str,
    *,
    overwrite: Overwrite,
    token: str | None = None,
    fence: Fence = None,
    resumes: bool = False,
) -> Transaction:
    """Starts a checkpoint at `path`. Process 0 only.

    Args:
        token: Known to all processes, which may have begun to write. If None, a new one is made.
        fence: Raises if this writer may no longer commit anything here. If given, an empty
            directory at `path` is replaced.
        resumes: Whether to go on where a dead attempt with this token ended, if there is one.

    Raises:
        StepExists: `path` exists (with `overwrite`: and is not a checkpoint).
    """
    _left.pop((path, token), None)
    if resumes and token and (found := take_over(storage, path, token, fence)) is not None:
        return found
    parent = posixpath.dirname(path)
    if _left:
        _remove_left(path)
    protocol = commit_of(storage, path)
    around = protocol.recover(token=token, fence=fence)
    if fence is not None and around is not None:
        _remove_empty(storage, path, around)
    foreign = check_target(storage, path, around, overwrite=overwrite, in_run=fence is not None)
    if parent not in _outside:
        refuse_inside(storage, parent)
    if overwrite == "delete_first" and not protocol.replaces:
        _delete_first(protocol, foreign, fence)
    if around is None:
        storage.make_dir(parent)
    problem: FileNotFoundError | None = None
    for _ in range(_TRIES if token is None else 1):
        attempt = token or secrets.token_hex(8)
        transaction = Transaction(storage, path, attempt, overwrite, fence=fence)
        try:
            storage.make_dir(transaction.work)
            transaction.claim()
        except FileNotFoundError as error:
            # Another writer began here too, and removed the unclaimed directory as a dead writer's.
            problem = error
            if storage.kind(parent) != "dir":
                raise
        except BaseException as error:
            if token is None:
                transaction.abort(error)
            else:  # other processes write there: the caller removes it when they have stopped
                transaction.hold.release()
            raise
        else:
            return transaction
    raise SaveFailed(
        f"{path}: no directory can be made there ({problem}). Save elsewhere; or if other jobs "
        "save here, let only one of them."
    ) from problem


def take_over(storage: Storage, path: str, token: str, fence: Fence = None) -> Transaction | None:
    """Continues an attempt with this token whose process has died; None if there is none.

    Its files are still there, and may be incomplete.

    Raises:
        SaveFailed: its process lives.
    """
    transaction = Transaction(storage, path, token, False, fence=fence)
    work, writer = transaction.work, f"{transaction.work}/{names.WRITER}"
    committed = work == path and read_small(storage, f"{path}/{names.COMMIT_MARKER}") is not None
    if committed or read_small(storage, writer) != token:
        return None
    try:
        hold = storage.hold(writer, token.encode())
    except io.UnsupportedOperation:  # `begin` then raises an error that explains it
        return None
    if hold is None:
        busy = BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), writer)
        text = f"{path}: another process is writing the same copy, or died just now"
        raise SaveFailed(text) from busy  # a later try may succeed
    transaction.hold = hold
    return transaction


def has_begun(storage: Storage, path: str, token: str) -> bool:
    """Returns whether process 0 has begun the attempt with this token, and did not commit yet."""
    writer = f"{commit_of(storage, path).work(token).path}/{names.WRITER}"
    return read_small(storage, writer) == token


def _delete_first(protocol: Commit, foreign: list[str], fence: Fence) -> None:
    """Deletes the checkpoint that a store cannot replace."""
    if foreign:
        raise StepExists(
            f"{protocol.path} contains files of other programs ({', '.join(foreign[:8])}), and is "
            "not deleted. Move them away first."
        )
    if protocol.storage.kind(f"{protocol.path}/{names.COMMIT_MARKER}") is not None:
        if fence is not None:
            fence()
        warn(protocol.path, "deleting the checkpoint before the new one is written, as asked")
        protocol.remove(by_force=fence is not None)


def _remove_empty(storage: Storage, path: str, around: dict[str, Entry]) -> None:
    """Removes an empty directory at the place of a step, where it would end each save."""
    entry = around.get(posixpath.basename(path))
    if entry is not None and entry.kind == "dir" and storage.delete_empty(path):
        warn(path, "replaces an empty directory")
        del around[posixpath.basename(path)]


def refuse_inside(storage: Storage, folder: str, look: Callable[[], T] = lambda: None) -> T:
    """Raises StepExists if a directory is in a checkpoint, at any depth: it would go with it.

    Args:
        look: Called at the same time. Its result is returned.
    """
    above, parent = [], posixpath.dirname(real(storage, folder))
    while parent != posixpath.dirname(parent) and parent.startswith(store_of(folder)):
        above.append(parent)
        parent = posixpath.dirname(parent)
    pairs = [(parent, mark) for parent in above for mark in _ABOUT]
    asked = [partial(_is_there, storage, posixpath.join(*pair)) for pair in pairs]
    *found, looked = together(storage, [*asked, look])
    for (parent, _), is_there in zip(pairs, found, strict=True):
        if is_there:
            raise _lies_in(folder, parent)
    _outside.add(folder)
    return looked


def _is_there(storage: Storage, file: str) -> bool:
    with contextlib.suppress(OSError):  # access may be limited to what lies below
        storage.size(file)
        return True
    return False


def _lies_in(path: str, checkpoint: str) -> StepExists:
    return StepExists(
        f"{path} lies inside the checkpoint {checkpoint}, and would be deleted with it. Save "
        "elsewhere. A run or checkpoint that is inside already can be moved out."
    )


def check_target(
    storage: Storage,
    path: str,
    around: Mapping[str, Entry] | None,
    *,
    overwrite: Overwrite,
    in_run: bool = False,
) -> list[str]:
    """Returns the files of other programs at `path` that the checkpoint to put there must take on.

    Args:
        around: The listing of the parent.
        in_run: Whether a manager saves, which replaces nothing.

    Raises:
        StepExists: a checkpoint may not be put at `path`.
    """
    parent, _, name = path.rpartition("/")
    if path == store_of(path):
        raise StepExists(f"{path} is a whole bucket, and is not replaced: choose {path}/NAME, say.")
    if around is None:
        return []
    if not _MARKS.isdisjoint(around):
        raise _lies_in(path, parent)
    if name not in around:
        return []
    if name in commit_of(storage, parent).left_below([name]):
        return []
    if (kind := around[name].kind) != "dir":
        what = "file" if kind == "file" else "link or special file"
        raise StepExists(f"{path} is a {what}, and is not replaced. Choose another path.")
    inside = storage.entries(path)
    if overwrite and not inside:
        return []
    if _MARKS.isdisjoint(inside):
        found = ", ".join(sorted(inside)[:8]) or "nothing"
        what = f"a directory but not a checkpoint, and contains {found}"
        raise StepExists(f"{path} is {what}. It is not replaced: choose {path}/NAME, say.")
    if not overwrite:
        may_replace = commit_of(storage, path).replaces and not in_run
        instead = "set overwrite to replace it" if may_replace else "delete it first"
        half = lacks_marker(path, inside)
        what = f", not committed: it has no {names.COMMIT_MARKER}" if half else ""
        raise StepExists(f"{path} already exists{what}. Save elsewhere, or {instead}.")
    if overwrite != "delete_first" and not commit_of(storage, path).replaces:
        raise UnsupportedFormat(
            f"{path} cannot be replaced: overwriting needs a storage with an atomic rename. Save "
            'elsewhere; or pass overwrite="delete_first", with which a crash may leave neither.'
        )
    return _to_take_along(storage, path, {**storage.files(path), **inside})


def _to_take_along(storage: Storage, path: str, inside: Mapping[str, Entry]) -> list[str]:
    """Returns the files of other programs in a checkpoint to be replaced; StepExists if many."""
    if (other := nested(storage, path, inside)) is not None:
        raise StepExists(f"{path} contains {other}, and is not replaced. Move that away first.")
    foreign = {name: inside[name] for name in sorted(_foreign(storage, path, {*inside}))}
    total = sum(entry.size for entry in foreign.values())
    is_file = [entry.kind == "file" and "/" not in name for name, entry in foreign.items()]
    if not all(is_file) or len(foreign) > _MAX_TAKEN or total > _MAX_TAKEN_BYTES:
        listed = [f"{name} ({e.kind}, {size_text(e.size)})" for name, e in foreign.items()]
        raise StepExists(
            f"{path} contains more than the tree of a save, and is not replaced. Move these away "
            f"first: {', '.join(listed[:8])}{', ...' if len(listed) > 8 else ''}. Only up to "
            f"{_MAX_TAKEN} files of {size_text(_MAX_TAKEN_BYTES)} in all move along."
        )
    return [*foreign]


def _foreign(storage: Storage, path: str, inside: set[str]) -> set[str]:
    """Returns the files and folders in a checkpoint that are not of the single tree of a `save`."""
    top = {name for name in inside if "/" not in name}
    if names.RECORD in inside:
        recorded = {*record_at(storage, path).files}
        known = {*names.TOP_FILES, *(file.partition("/")[0] for file in recorded)}
        strange = {file for file in inside - top - recorded if file.partition("/")[0] in known}
    else:
        items = [
            name
            for name in top
            if storage.kind(f"{path}/{name}") == "dir" and not names.is_part_of_tree(name)
        ]
        known = {*names.TOP_FILES, *(items if len(items) == 1 else ())}
        known |= {name for name in top if names.is_part_of_tree(name)}
        strange = set[str]()
    return {name for name in top - known | strange if not is_temporary_file(name)}
