"""Two ways to commit a checkpoint and to remove it: by a rename, and by a marker written last.

`transaction` has the lines of both, with what a crash after each of them leaves.

To delete, `RenameCommit` renames to `...-deleting-...`, then removes the files. A crash leaves a
name that no reader takes for a checkpoint, and the next writer finishes the job.

`MarkerCommit` removes `commit_success.txt` first, and last `_jaxckpt.writing`, by which the next
writer recognizes the remains. All writers share the directory. So a deletion first takes this file,
and then looks whether there is a commit; and a writer checks after its commit that the file is
still its own. Where locks are leases, whoever stood still for longer than its lease
asks for it again before it deletes the next files: they may be another writer's by then.

A `check` raises if another writer has taken over. It is called at the last moment: after a rename,
which is undone then, or before the first request that deletes something.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import posixpath
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple, final

from jaxckpt.errors import SaveFailed, StepExists, StoreError
from jaxckpt.format import names, step
from jaxckpt.storage import Entry, Hold, Storage, beside, is_temporary_file, listing, together

_logger = logging.getLogger("jaxckpt")

# Files that are in every directory of ours, from the first moment to the last. By them the next
# writer recognizes the remains of a deletion, which deletes them last, in this order.
_OURS = (names.RECORD, names.WRITER)
_WHOLE = (names.RECORD, names.COMMIT_MARKER)  # what a replacement has once it is complete
_LEFT_ALONE = "left alone: another writer is saving there"
_NO_LOCKS = (
    "left alone: this storage has no file locks, so its writer may be alive. Remove it if no job "
    "is saving there."
)
_UNLOCKED = Hold()
_COMMITTED = " has committed"  # after the token of a writer, while its file is removed
_REMAINS = "removing the remains of an interrupted save or deletion"
Check = Callable[[], object]  # see the module
Fence = Callable[[], None] | None  # raises if this writer may no longer write here
Files = Collection[str] | None


class Work(NamedTuple):
    """Names where an attempt writes a checkpoint."""

    path: str
    # The token of the attempt, if attempts share the directory: it is then in the name of whatever
    # a process writes before process 0 has begun. Otherwise "".
    mark: str
    landed: Callable[[int], object] = int  # takes a number of bytes written


@final
@dataclass(frozen=True, slots=True)
class RenameCommit:
    """The commit and the removal of the checkpoint at a path by renames; see `MarkerCommit`."""

    storage: Storage
    path: str
    hold: Hold = _UNLOCKED  # lasts as long as its process
    replaces: ClassVar = True  # a checkpoint by a new one

    def work(self, token: str) -> Work:
        return Work(beside(self.path, names.temporary(posixpath.basename(self.path), token)), "")

    def recover(self, *, token: str | None = None, fence: Fence = None) -> dict[str, Entry] | None:
        if fence is not None:
            fence()  # before anything is written, which may take long
        storage, (parent, name) = self.storage, posixpath.split(self.path)
        around = listing(storage, parent)
        if around is None or not any(names.may_be_left(entry, name) for entry in around):
            return around
        new = beside(self.path, replacement := names.replacement(name))
        if replacement in around and all(storage.kind(f"{new}/{f}") == "file" for f in _WHOLE):
            warn(self.path, "finishing an interrupted replacement")
            self._put_in_place(new)
            around = storage.entries(parent)
        spare = token and self.work(token).path
        for entry in around:
            if names.is_ours_temporary(entry, name) and f"{parent}/{entry}" != spare:
                leftover = RenameCommit(storage, f"{parent}/{entry}")
                leftover._remove_leftover() if fence is None else leftover.remove_work()
        return listing(storage, parent)

    def _remove_leftover(self) -> None:
        """Removes a temporary directory of ours unless its writer lives."""
        with contextlib.suppress(FileNotFoundError):  # its writer, or another, was quicker
            if not self._may_be_written():
                warn(self.path, _REMAINS)
                self.remove()

    def _may_be_written(self) -> bool:
        writer = f"{self.path}/{names.WRITER}"
        if self.storage.kind(writer) != "file":
            return False
        try:
            hold = self.storage.hold(writer)
        except io.UnsupportedOperation:
            warn(self.path, _NO_LOCKS)
            return True
        if hold is None:
            warn(self.path, _LEFT_ALONE)
            return True
        hold.release()
        return False

    def left_below(self, steps: Iterable[str]) -> dict[str, list[str]]:
        return {}  # they have other names

    def remove_left(self, files: Sequence[str]) -> bool:
        return True

    def add(self, file: str, data: bytes | Iterable[bytes]) -> None:
        self.storage.write(file, data)

    def check(self, token: str, fence: Fence) -> None:
        work = self.work(token).path
        _check_still_ours(self.storage, self.path, work, token)
        self.storage.sync(work)
        if fence is not None:
            fence()

    def publish(self, token: str, *, overwrite: bool) -> str | None:
        storage, work = self.storage, self.work(token).path
        _mark(storage, self.path, work)
        if not overwrite or storage.kind(self.path) is None:
            try:
                storage.rename(work, self.path)
            except FileExistsError as error:
                raise StepExists(
                    f"{self.path} was created during the save, and is not replaced"
                ) from error
            return None
        if storage.exchange(work, self.path):
            return work
        replacement = beside(self.path, names.replacement(posixpath.basename(self.path)))
        storage.rename(work, replacement)
        return self._put_in_place(replacement)

    def _put_in_place(self, replacement: str) -> str | None:
        """Does steps 8b and 8c; returns the new place of the checkpoint that was here, if any."""
        doomed = None
        if self.storage.kind(self.path) is not None:
            doomed = self._doomed()
            self.storage.rename(self.path, doomed)
        self.storage.rename(replacement, self.path)
        return doomed

    def abort(self, token: str, *, published: bool) -> None:
        # After an exchange that raised, `work` may be the previous checkpoint, which lacks an
        # owner. Before, a directory of this name without an owner is ours: claiming it failed.
        work, mine = self.work(token).path, (token, token if published else None)
        if read_small(self.storage, f"{work}/{names.WRITER}") in mine:
            self.storage.delete(work)

    def discard(self, token: str) -> None:
        with _warning(work := self.work(token).path):
            self.storage.delete(work)

    def remove(
        self,
        files: Files = None,
        *,
        by_force: bool = True,
        check: Check = int,
        renamed: Check = int,
        claim: Claim | None = None,
    ) -> None:
        check()
        # Rename even if another writer is about to delete it: that writer may undo its rename.
        doomed = self._doomed()
        take_away(self.storage, self.path, doomed, check=renamed)
        self.storage.delete(doomed)

    def _doomed(self) -> str:
        name = names.deleting(posixpath.basename(self.path), secrets.token_hex(8))
        return beside(self.path, name)

    def remove_work(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # the other writer was quicker
            self.remove()

    def set_aside(
        self, aside: str, *, check: Check, doomed: contextlib.AbstractContextManager[object]
    ) -> None:
        take_away(self.storage, self.path, aside, check=check)

    def is_unfinished(self) -> bool:
        return False


@final
@dataclass(frozen=True, slots=True)
class MarkerCommit:
    """The same by a marker; the docstrings here are for both."""

    storage: Storage
    path: str
    hold: Hold = _UNLOCKED  # by which other writers are kept out
    replaces: ClassVar = False

    def work(self, token: str) -> Work:
        """Returns where the attempt with a token writes."""
        return Work(self.path, token)

    def recover(self, *, token: str | None = None, fence: Fence = None) -> dict[str, Entry] | None:
        """Finishes or removes a save, a replacement or a deletion that a crash interrupted.

        Args:
            token: Of the attempt that begins, whose files are left alone.
            fence: If given, the work of live writers is removed too.

        Returns:
            The listing of the directory that the path is in; None if it does not exist.
        """
        name = posixpath.basename(self.path)
        around = self._around(fence)
        if around is None or not any(names.may_be_left(entry, name) for entry in around):
            return around
        files = self._left()
        if files is not None and not (token is not None and all(token in file for file in files)):
            self._clear(files, token, fence)
        return self._around(fence)

    def _around(self, fence: Fence) -> dict[str, Entry] | None:
        parent, name = posixpath.split(self.path)
        if fence is None or not self.storage.parallel_writes:
            return listing(self.storage, parent)
        # A run may have thousands of steps, and the rest of it does not matter here.
        return {} if listing(self.storage, self.path) is None else {name: Entry("dir", 0)}

    def _clear(self, files: Sequence[str], token: str | None, fence: Fence) -> None:
        if fence is not None:
            fence()
        with self._taken(by_force=fence is not None) as mine:
            if mine is None:
                warn(self.path, _LEFT_ALONE)
            elif self._is_marked():  # since it was listed
                mine._delete([names.WRITER])
            else:
                if files:
                    warn(self.path, _REMAINS)
                mine._delete_left([file for file in files if token is None or token not in file])

    @contextlib.contextmanager
    def _taken(self, *, by_force: bool) -> Iterator[MarkerCommit | None]:
        """Takes the file by which the writers of a shared directory exclude each other.

        Args:
            by_force: Takes it from a live writer too, which can then no longer commit.

        Yields:
            This with the lock; None if it was not taken.
        """
        storage, writer = self.storage, f"{self.path}/{names.WRITER}"
        mine = secrets.token_hex(8).encode()
        hold, is_ours = None, by_force
        try:
            hold = storage.hold(writer, mine, new=True) or storage.hold(writer, mine)
            if hold is None and by_force:
                storage.write(writer, b"taken by " + mine)  # which its writer finds
                hold = storage.hold(writer, mine)
        except io.UnsupportedOperation:  # left alone, it would block this name for ever
            storage.write(writer, mine)
            is_ours = True
        try:
            yield replace(self, hold=hold or _UNLOCKED) if is_ours or hold is not None else None
        finally:
            if hold is not None:
                hold.release()

    def _is_marked(self) -> bool:
        return self.storage.kind(f"{self.path}/{names.COMMIT_MARKER}") is not None

    def _left(self) -> list[str] | None:
        files = self.storage.files(self.path)
        # Before process 0 begins, others may have written; and a writer that dies while it tries
        # out the store leaves no more than a temporary file, which is not in `files`.
        is_ours = not files.keys().isdisjoint(_OURS) or all(map(names.is_of_attempt, files))
        return [*files] if names.COMMIT_MARKER not in files and is_ours else None

    def left_below(self, steps: Iterable[str]) -> dict[str, list[str]]:
        """Returns the files of interrupted saves and deletions in directories here, by name.

        Leaves out a directory with other files, such as a committed checkpoint.
        """
        both = ((name, MarkerCommit(self.storage, f"{self.path}/{name}")._left()) for name in steps)
        return {name: files for name, files in both if files is not None}

    def remove_left(self, files: Sequence[str]) -> bool:
        """Removes files found by `left_below`; returns False if their writer may be alive."""
        with self._taken(by_force=False) as mine:
            if mine is None:
                return False
            try:
                if self._is_marked():  # committed meanwhile
                    mine._delete([names.WRITER])
                else:
                    warn(self.path, _REMAINS)
                    mine._delete_left(files)
            except SaveFailed:  # another writer has it now
                return False
        return True

    def add(self, file: str, data: bytes | Iterable[bytes]) -> None:
        """Writes a file into a directory that only this writer fills.

        Raises:
            FileExistsError: another writer wrote it.
            SaveFailed: another writer has taken over.
        """
        self._refuse_lost()
        whole = data if isinstance(data, bytes) else b"".join(data)
        if not self.storage.create(file, whole):
            raise FileExistsError(errno.EEXIST, "another writer is saving here", file)

    def check(self, token: str, fence: Fence) -> None:
        """Checks that an attempt may commit, and makes its files durable."""
        if fence is None:  # else the fence shows it
            _check_still_ours(self.storage, self.path, self.path, token)
        self._refuse_lost()
        self.storage.sync(self.path)
        if fence is not None:
            fence()

    def publish(self, token: str, *, overwrite: bool) -> str | None:
        """Commits an attempt; returns the new path of a replaced checkpoint, if any.

        Raises:
            SaveFailed: another writer has taken over.
            StepExists: the path was created during the save.
        """
        self._refuse_lost()
        try:
            # The token shows whose it is if the answer to its creation is lost.
            _mark(self.storage, self.path, self.path, f" by {token}")
            try:
                _check_still_ours(self.storage, self.path, self.path, token)
            except SaveFailed:  # another writer has taken over, and may delete our files
                if not self._is_finished(token):
                    raise
        except StoreError as error:
            if error.errno == errno.EACCES:  # it was refused
                raise
            parent, name = posixpath.split(self.path)
            raise SaveFailed(
                f"{self.path} may be committed: the store did not answer whether its "
                f"{names.COMMIT_MARKER} was written: {error}. If `jaxckpt ls {parent}` shows "
                f"{name} once the store answers, the checkpoint is complete."
            ) from error

    def _is_finished(self, token: str) -> bool:
        """Returns whether the next writer found an attempt committed; takes it back if not.

        The next writer then removed no more than the writer's file, which goes last elsewhere.
        """
        files = (names.COMMIT_MARKER, names.WRITER, names.RECORD)
        marker, owner, record = (read_small(self.storage, f"{self.path}/{f}") or "" for f in files)
        if marker and token not in marker:  # another attempt's by now
            return False
        if marker and token in record and owner in ("", f"{token}{_COMMITTED}"):
            return True
        self.storage.delete_files([f"{self.path}/{names.COMMIT_MARKER}"])
        return False

    def abort(self, token: str, *, published: bool) -> None:
        """Removes the files of an attempt, whose `publish` may have raised."""
        files = [*self.storage.files(self.path)]  # before the look whose they are
        if read_small(self.storage, f"{self.path}/{names.WRITER}") != token:
            return
        marker = read_small(self.storage, f"{self.path}/{names.COMMIT_MARKER}")
        with contextlib.suppress(SaveFailed):  # another writer has the directory now
            if marker is None:
                self._delete_left(files)
                return
            if token not in marker:  # somebody committed before this writer claimed the directory
                self.discard(token)
            self._delete([names.WRITER])

    def discard(self, token: str) -> None:
        """Removes what other processes wrote for an attempt that did not begin. Never raises."""
        with _warning(self.path):
            self._delete([file for file in self.storage.files(self.path) if token in file])

    def remove(
        self,
        files: Files = None,
        *,
        by_force: bool = True,
        check: Check = int,
        renamed: Check = int,
        claim: Claim | None = None,
    ) -> None:
        """Deletes the checkpoint; after a crash in the middle no reader takes the rest for one.

        Args:
            files: The files of the checkpoint, if they are known.
            by_force: Whether to delete even if another writer holds the directory that all share.
            check: Called before anything is deleted.
            renamed: Called after a rename, which is undone if it raises.
            claim: Taken by the caller, together with a check. Its file stays.

        Raises:
            SaveFailed: another writer holds it.
        """
        if claim is not None:
            with claim.kept() as hold:
                replace(self, hold=hold or _UNLOCKED)._remove_files(files)
            return
        with contextlib.ExitStack() as stack:
            take = partial(stack.enter_context, self._taken(by_force=by_force))
            try:
                mine, _ = together(self.storage, [take, check])
            except BaseException:
                self._delete([names.WRITER] if by_force else [])
                raise
            if mine is None:
                raise SaveFailed(
                    f"{self.path}: another writer is saving or deleting there; not changed"
                )
            mine._remove_files(files)
            mine._delete([names.WRITER])
            if not self.storage.parallel_writes:  # a mounted bucket has directories
                self.storage.delete(self.path)

    def _remove_files(self, files: Files) -> None:
        self._delete([names.COMMIT_MARKER])
        found = self.storage.files(self.path) if files is None else files
        self._delete([f for f in found if f not in (names.COMMIT_MARKER, names.WRITER)])

    def remove_work(self) -> None:
        """Removes the temporary directory of another writer, who can then no longer commit."""
        self._delete_left([*self.storage.files(self.path)])

    def set_aside(
        self, aside: str, *, check: Check, doomed: contextlib.AbstractContextManager[object]
    ) -> None:
        """Gives the checkpoint a name under which nothing restores it; an error leaves it there.

        Args:
            doomed: Shows meanwhile that it is removed, unless a rename does that at once.
        """

        def copy(file: str) -> None:
            self.storage.make_dir(posixpath.dirname(f"{aside}/{file}"))
            self.storage.link(f"{self.path}/{file}", f"{aside}/{file}")

        with doomed:
            try:
                files = self.storage.files(self.path)
                together(self.storage, [partial(copy, file) for file in files])
            except BaseException:
                with contextlib.suppress(OSError):
                    self.storage.delete(aside)
                raise
            try:
                self.remove(check=check)
            except SaveFailed:  # nothing is removed
                self.storage.delete(aside)
                raise

    def is_unfinished(self) -> bool:
        """Returns whether a directory that is not committed may be a save under way."""
        return names.COMMIT_MARKER not in self.storage.entries(self.path)

    def _delete_left(self, files: Sequence[str]) -> None:
        """Deletes remains that were listed before they were known to be nobody's.

        What another writer has written since stays, unless it has the name of one of them.

        Raises:
            SaveFailed: another writer may be saving there since, for this one stood still.
        """
        self._delete([file for file in files if file not in _OURS])
        self._delete([names.RECORD] if names.RECORD in files else [])
        left = listing(self.storage, self.path) or {}
        self._delete([*filter(is_temporary_file, left), names.WRITER])
        if not self.storage.parallel_writes and not self.storage.files(self.path):
            self.storage.delete(self.path)  # a mounted bucket has directories

    def _delete(self, files: Sequence[str]) -> None:
        self.storage.delete_files([f"{self.path}/{f}" for f in files], check=self._refuse_lost)

    def _refuse_lost(self) -> None:
        """Raises SaveFailed if another writer may have taken the lock, and written files."""
        if not self.hold.goes_on():
            raise SaveFailed(
                f"{self.path}: this process did not renew its lock in time, and another writer "
                "took over. Verify what is there, and let only one job save here."
            )


Commit = RenameCommit | MarkerCommit


@final
class Claim:
    """Claims a checkpoint in a store before it is certain that it is removed.

    It creates the file of `MarkerCommit._taken` while others look at the checkpoint, and deletes it
    in one request with what is deleted last.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self.hold: Hold | None = None
        self._storage, self._path, self._file = storage, path, f"{path}/{names.WRITER}"

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        if self.hold is not None:
            with contextlib.suppress(OSError):
                self.end()

    def is_of(self, path: str) -> bool:
        """Returns whether it has claimed the checkpoint at a path."""
        return self.hold is not None and path == self._path

    def take(self) -> None:
        """Creates the file unless another writer has it."""
        if self._storage.parallel_writes:
            mine = secrets.token_hex(8).encode()
            self.hold = self._storage.hold(self._file, mine, new=True)

    @contextlib.contextmanager
    def kept(self) -> Iterator[Hold | None]:
        """Leaves the file there after an error: by it, the next writer recognizes the remains."""
        hold, self.hold = self.hold, None
        try:
            yield hold
        except BaseException:
            if hold is not None:
                hold.release()
            raise
        self.hold = hold

    def end(self, *files: str) -> None:
        """Deletes the file, and then others."""
        hold, self.hold = self.hold, None
        mine = [self._file] if hold is not None and hold.goes_on() else []
        if mine and self._storage.scheme == "gs":  # which takes a request for each, in any order
            self._storage.delete_files([mine.pop()])
        self._storage.delete_files([*mine, *files])


def commit_of(storage: Storage, path: str, hold: Hold = _UNLOCKED) -> Commit:
    """Returns how the checkpoint at a path is committed and removed; by its writer, with a lock."""
    return (RenameCommit if storage.atomic_rename else MarkerCommit)(storage, path, hold)


def _mark(storage: Storage, path: str, work: str, by: str = "") -> None:
    """Writes the file that readers look for in a checkpoint, which is then complete."""
    marker = f"{work}/{names.COMMIT_MARKER}"
    if not storage.create(marker, f"Checkpoint commit was successful to {path}{by}".encode()):
        raise SaveFailed(f"{marker} already exists: another writer committed {path}")


def _check_still_ours(storage: Storage, path: str, work: str, token: str) -> None:
    owner = read_small(storage, f"{work}/{names.WRITER}")
    if owner != token:
        raise SaveFailed(
            f"{path}: another writer took over during this save "
            f"({work}/{names.WRITER} {'is gone' if owner is None else 'is theirs'}). "
            "Let only one job save here."
        )


def read_small(storage: Storage, file: str) -> str | None:
    """Returns a small file; None if it, or its directory, is gone."""
    try:
        return storage.read(file, max_bytes=step.MAX_RECORD_BYTES).decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


def take_away(storage: Storage, path: str, to: str, *, check: Check) -> None:
    """Renames a checkpoint; gives it its name back if `check` raises then."""
    storage.rename(path, to)
    try:
        check()
    except BaseException:
        with contextlib.suppress(OSError):  # another writer removed it, or has saved there
            storage.rename(to, path)
        raise


def remove_writer(storage: Storage, path: str) -> None:
    """Removes the writer's file from a committed checkpoint, where a crash left it."""
    file = f"{path}/{names.WRITER}"
    # A writer that lives looks for it once more, and removes it itself. One that stood still until
    # now must find its token: it would take back a commit that others have seen.
    about = f"{read_small(storage, file)}{_COMMITTED}".encode()
    with contextlib.suppress(io.UnsupportedOperation):
        if (hold := storage.hold(file, about)) is not None:
            storage.delete_files([file])
            hold.release()


@contextlib.contextmanager
def _warning(work: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        warn(work, f"the remains of a failed save cannot be removed: {error}")


def warn(path: str, text: str) -> None:
    """Logs a warning about a save."""
    _logger.warning("%s: %s", path, text)
