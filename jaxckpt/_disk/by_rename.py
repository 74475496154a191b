"""Commits and removes checkpoints by renames; see `commit`."""

from __future__ import annotations

import contextlib
import io
import posixpath
import secrets
from collections.abc import Iterable, Sequence
from typing import ClassVar, final

from jaxckpt._disk.attempt import UNLOCKED, Attempts, Check, Fence, Work, read_small, warn
from jaxckpt.errors import StepExists
from jaxckpt.format import names
from jaxckpt.storage import Entry, Storage, beside, listing

_WHOLE = (names.RECORD, names.COMMIT_MARKER)  # what a replacement has once it is complete
_NO_LOCKS = (
    "left alone: this storage has no file locks, so its writer may be alive. Remove it if no job "
    "is saving there."
)


@final
class RenameCommit(Attempts):
    """The commit and the removal of the checkpoint at a path by renames; see `MarkerCommit`."""

    __slots__ = ()
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
        storage, writer, hold = self.storage, f"{self.path}/{names.WRITER}", UNLOCKED
        with contextlib.suppress(FileNotFoundError):  # its writer, or another, was quicker
            try:
                if storage.kind(writer) == "file" and (hold := storage.hold(writer)) is None:
                    warn(self.path, self._LEFT_ALONE)
                    return
            except io.UnsupportedOperation:
                warn(self.path, _NO_LOCKS)
                return
            hold.release()
            warn(self.path, self._REMAINS)
            self.remove()

    def left_below(self, steps: Iterable[str]) -> dict[str, list[str]]:
        return {}  # they have other names

    def remove_left(self, files: Sequence[str]) -> bool:
        return True

    def add(self, file: str, data: bytes | Iterable[bytes]) -> None:
        self.storage.write(file, data)

    def check(self, token: str, fence: Fence) -> None:
        work = self.work(token).path
        self._check_ours(work, token)
        self.storage.sync(work)
        if fence is not None:
            fence()

    def publish(self, token: str, *, overwrite: bool) -> str | None:
        storage, work = self.storage, self.work(token).path
        self._mark(work)
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
            doomed = _doomed(self.path)
            self.storage.rename(self.path, doomed)
        self.storage.rename(replacement, self.path)
        return doomed

    def abort(self, token: str, *, published: bool, late: bool = False) -> None:
        # After an exchange that raised, `work` may be the previous checkpoint, which lacks an
        # owner. Before, a directory of this name without an owner is ours: claiming it failed.
        work, mine = self.work(token).path, (token, token if published else None)
        if read_small(self.storage, f"{work}/{names.WRITER}") in mine:
            self.storage.delete(work)

    remove_own = abort_again = abort  # the directory is of one attempt, and the lock not asked for

    def remove(
        self, files: object = None, *, check: Check = int, renamed: Check = int, **_: object
    ) -> None:
        check()
        # Rename even if another writer is about to delete it: that writer may undo its rename.
        doomed = _doomed(self.path)
        take_away(self.storage, self.path, doomed, check=renamed)
        self.storage.delete(doomed)

    def remove_work(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # the other writer was quicker
            self.remove()

    def set_aside(
        self, aside: str, *, check: Check, doomed: contextlib.AbstractContextManager[object]
    ) -> None:
        take_away(self.storage, self.path, aside, check=check)


def _doomed(path: str) -> str:
    return beside(path, names.deleting(posixpath.basename(path), secrets.token_hex(8)))


def take_away(storage: Storage, path: str, to: str, *, check: Check) -> None:
    """Renames a checkpoint; gives it its name back if `check` raises then."""
    storage.rename(path, to)
    try:
        check()
    except BaseException:
        with contextlib.suppress(OSError):  # another writer removed it, or has saved there
            storage.rename(to, path)
        raise
