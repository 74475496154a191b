"""Commits and removes checkpoints by a marker that is written last; see `commit`."""

from __future__ import annotations

import contextlib
import errno
import io
import posixpath
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, Final, Self, final

from jaxckpt._core.text import command
from jaxckpt._disk.attempt import UNLOCKED, Attempts, Check, Fence, Files, Work, read_small, warn
from jaxckpt.errors import SaveFailed, StoreError
from jaxckpt.format import names
from jaxckpt.storage import Entry, Hold, Storage, is_temporary_file, listing, together

# Files that are in every directory of ours, from the first moment to the last. By them the next
# writer recognizes the remains of a deletion, which deletes them last, in this order.
_OURS = (names.RECORD, names.WRITER)
_COMMITTED = "committed"  # in the file of a writer, while that is removed
_TAKEN: Final = "taken by "  # begins that file while another finishes or removes what is there
_DECIDES_S: Final = 10.0  # the longest wait for that decision
_FIRST_PAUSE_S: Final = 0.02


class SharedDirectory(Attempts):
    """The directory that all attempts share, and what is left there of those interrupted."""

    __slots__ = ()

    @contextlib.contextmanager
    def _taken(self, *, by_force: bool) -> Iterator[Self | None]:
        """Takes the file by which the writers of a shared directory exclude each other.

        Args:
            by_force: Takes it from a live writer too, which can then no longer commit.

        Yields:
            This with the lock; None if it was not taken.
        """
        storage, writer = self.storage, f"{self.path}/{names.WRITER}"
        mine = f"{_TAKEN}{secrets.token_hex(8)}".encode()  # which its writer finds
        hold, is_ours = None, by_force
        try:
            hold = storage.hold(writer, mine, new=True) or storage.hold(writer, mine)
            if hold is None and by_force:
                storage.write(writer, mine)
                hold = storage.hold(writer, mine)
        except io.UnsupportedOperation:  # left alone, it would block this name for ever
            storage.write(writer, mine)
            is_ours = True
        try:
            yield replace(self, hold=hold or UNLOCKED) if is_ours or hold is not None else None
        finally:
            if hold is not None:
                hold.release()

    def _is_marked(self) -> bool:
        return self.storage.kind(f"{self.path}/{names.COMMIT_MARKER}") is not None

    def _left(self) -> list[str] | None:
        files = self.storage.files(self.path)
        # Before process 0 begins, others may have written; and a writer that dies while it tries
        # out the store leaves no more than a temporary file, which is not in `files`.
        # A record alone: its writer stood still until the next one had removed the rest. With other
        # files, but no writer, somebody is making a copy, or the marker was lost.
        is_alone = {*files} == {names.RECORD}
        is_ours = names.WRITER in files or is_alone or all(map(names.is_of_attempt, files))
        is_left = names.COMMIT_MARKER not in files and is_ours
        return [*files] if is_left or _is_lone(files) else None

    def left_below(self, steps: Iterable[str]) -> dict[str, list[str]]:
        """Returns the files of interrupted saves and deletions in directories here, by name.

        Leaves out a directory with other files, such as a committed checkpoint.
        """
        both = ((name, replace(self, path=f"{self.path}/{name}")._left()) for name in steps)
        return {name: files for name, files in both if files is not None}

    def remove_left(self, files: Sequence[str]) -> bool:
        """Removes files found by `left_below`; returns False if their writer may be alive."""
        with self._taken(by_force=False) as mine, contextlib.suppress(SaveFailed):
            if mine is not None:
                mine._finish(files)
                return True
        return False  # another writer has it, or has it now

    def _finish(self, files: Sequence[str]) -> None:
        """Removes the writer's file from what was committed since it was listed, or all of it."""
        if self._is_marked() and not _is_lone(self.storage.files(self.path)):
            self._delete([names.WRITER])
            return
        if files:
            warn(self.path, self._REMAINS)
        self._delete_left(files)

    def _delete_left(self, files: Sequence[str], *, late: bool = False) -> None:
        """Deletes remains that were listed before they were known to be nobody's.

        What another writer has written since stays, unless it has the name of one of them.

        Raises:
            SaveFailed: another writer may be saving there, since this process stood still.
        """
        self._delete([file for file in files if file not in _OURS])
        self._delete([names.RECORD] if names.RECORD in files else [])
        left = listing(self.storage, self.path) or {}
        self._delete([*filter(is_temporary_file, left)] + ([] if late else [names.WRITER]))
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


@final
class MarkerCommit(SharedDirectory):
    """The commit and the removal by a marker; the docstrings here are for `RenameCommit` too."""

    __slots__ = ()
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
                warn(self.path, self._LEFT_ALONE)
            else:
                mine._finish([file for file in files if token is None or token not in file])

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
            self._check_ours(self.path, token)
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
            self._mark(self.path, f" by {token}")
            try:
                self._check_ours(self.path, token)
            except SaveFailed:  # another writer has taken over, and may delete our files
                if not self._is_finished(token):
                    raise
        except StoreError as error:
            if error.errno == errno.EACCES:  # it was refused
                raise
            parent, name = posixpath.split(self.path)
            raise SaveFailed(
                f"{self.path} may be committed: the store did not answer whether its "
                f"{names.COMMIT_MARKER} was written: {error}. If `{command('ls', parent)}` shows "
                f"{name} once the store answers, the checkpoint is complete."
            ) from error

    def _is_finished(self, token: str) -> bool:
        """Returns whether the next writer found an attempt committed; takes it back if not.

        The next writer then removed no more than the writer's file, which goes last elsewhere.
        While the next writer holds the directory, it decides; this writer waits for the result.
        """
        files = (names.COMMIT_MARKER, names.WRITER, names.RECORD)
        end_s, pause_s = time.monotonic() + _DECIDES_S, _FIRST_PAUSE_S
        while True:
            texts = [read_small(self.storage, f"{self.path}/{file}") or "" for file in files]
            marker, owner, record = texts
            if marker and token not in marker:  # another attempt's by now
                return False
            is_whole = marker and token in record
            if is_whole and owner in ("", _COMMITTED):
                return True
            if not (is_whole and owner.startswith(_TAKEN)) or time.monotonic() > end_s:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)
        self.storage.delete_files([f"{self.path}/{names.COMMIT_MARKER}"])
        return False

    def abort(self, token: str, *, published: bool, late: bool = False) -> None:
        """Removes the files of an attempt, begun or not, unless its marker may still arrive.

        Args:
            late: Whether other files may. The writer's file stays, by which the next writer knows
                whose they are.
        """
        if published:
            return
        files = [*self.storage.files(self.path)]  # before the look whose they are
        is_ours = read_small(self.storage, f"{self.path}/{names.WRITER}") == token
        marker = read_small(self.storage, f"{self.path}/{names.COMMIT_MARKER}")
        with contextlib.suppress(SaveFailed):  # another writer has the directory now
            if is_ours and marker is None:
                self._delete_left(files, late=late)
                return
            if token not in (marker or ""):  # else it is committed
                self._delete([file for file in files if token in file])
            self._delete([names.WRITER] if is_ours else [])

    def remove_own(self, token: str, *, published: bool) -> None:
        """Removes without the lock what has the name of an attempt that ended without a commit."""
        own = [file for file in self.storage.files(self.path) if token in file]
        marker = read_small(self.storage, f"{self.path}/{names.COMMIT_MARKER}")
        if not published and token not in (marker or ""):
            self.storage.delete_files([f"{self.path}/{file}" for file in own])

    def abort_again(self, token: str, *, published: bool) -> None:
        """Removes, under a new lock, the files of an attempt that ended without a commit.

        What has the name of another attempt stays.

        Raises:
            SaveFailed: the lock of the attempt, or of another writer, is still held.
        """
        files = self.storage.files(self.path)  # before the look whose they are
        if published or read_small(self.storage, f"{self.path}/{names.WRITER}") != token:
            self.remove_own(token, published=published)
        elif not self.remove_left([f for f in files if token in f or not names.is_of_attempt(f)]):
            raise SaveFailed(f"{self.path}: {self._LEFT_ALONE}")

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
                replace(self, hold=hold or UNLOCKED)._remove_files(files)
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

        def copy_all() -> list[str]:
            files = self.storage.files(self.path)
            together(self.storage, [partial(copy, file) for file in files])
            if self.storage.files(aside) != files:  # the store may say that it made a copy
                raise FileNotFoundError(errno.ENOENT, "the copy is not whole", aside)
            return [*files]

        with doomed:
            try:
                copied = copy_all()
            except BaseException:
                with contextlib.suppress(OSError):
                    self.storage.delete(aside)
                raise
            try:
                self.remove(copied, check=check)
            except SaveFailed:
                if self._is_marked():  # else the copy is all that is left
                    self.storage.delete(aside)
                raise


def _is_lone(files: Iterable[str]) -> bool:
    """Returns whether a directory has a marker only: of a deleted step, if a store acts late."""
    return {*files} - {names.WRITER} == {names.COMMIT_MARKER}


@final
class Claim:
    """Claims a checkpoint in a store before it is certain that it is removed.

    It creates the file of `MarkerCommit._taken` while others look at the checkpoint, and deletes it
    in one request with what is deleted last.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self.hold: Hold | None = None
        self._is_left = False  # whether the caller no longer needs it
        self._storage, self._path, self._file = storage, path, f"{path}/{names.WRITER}"

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_left = True
        with contextlib.suppress(OSError):
            if self.hold is not None:
                self.end()
        if self.hold is not None:  # else it would be renewed as long as this process lives
            self.hold.release()

    def is_of(self, path: str) -> bool:
        """Returns whether it has claimed the checkpoint at a path."""
        return self.hold is not None and path == self._path

    def take(self) -> None:
        """Creates the file unless another writer has it."""
        if self._storage.parallel_writes:
            mine = secrets.token_hex(8).encode()
            self.hold = self._storage.hold(self._file, mine, new=True)
            if self._is_left:  # by an interrupt, while this thread waited for the store
                self.__exit__()

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
        mine = [self._file] if self.hold is not None and self.hold.goes_on() else []
        self.hold = None
        if mine and self._storage.scheme == "gs":  # which takes a request for each, in any order
            self._storage.delete_files([mine.pop()])
        self._storage.delete_files([*mine, *files])


def remove_writer(storage: Storage, path: str) -> None:
    """Removes the writer's file from a committed checkpoint, where a crash left it."""
    file = f"{path}/{names.WRITER}"
    # A writer that lives looks for it once more, and removes it itself. One that stood still until
    # now must find this word: it would take back a commit that others have seen.
    with contextlib.suppress(io.UnsupportedOperation):
        if (hold := storage.hold(file, _COMMITTED.encode())) is not None:
            try:
                storage.delete_files([file])
            finally:
                hold.release()
