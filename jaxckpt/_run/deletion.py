"""Deletes steps of a run, and sets damaged steps aside.

To delete steps, a writer names them in `_jaxckpt.doomed`, looks for leases and pins, unpublishes
each step that is free and removes its files. A crash in the middle leaves complete steps, or a name
that no reader mistakes for a step and that the next deletion removes. With `move_to` it renames the
step instead, which a crash leaves either in the run or there.

A writer that has lost the run deletes nothing, however long it stood still before:

    writer    chooses the steps, names them in `doomed`, *then* reads the owner
    new owner writes its name, *then* reads `doomed`: deletes what it names, then lists the steps

So either the writer sees the new owner, or the new owner counts these steps as gone. The writer
reads the owner once more for each step: after the rename, which it undoes if it has lost the run
and the new owner has dealt with `doomed`; or, without renames, before the first file goes. In a
store, the first step is claimed in the same moment, unless another program wrote it, and released
when `doomed` is deleted. One danger remains, without renames: the old writer stands still with a
request of a deletion under way, while the new owner deletes that step and saves it again under the
same number.
"""

from __future__ import annotations

import contextlib
import errno
import io
import posixpath
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any, Final, Protocol, final

from jaxckpt._disk.attempt import Files
from jaxckpt._disk.by_marker import Claim
from jaxckpt._disk.by_rename import take_away
from jaxckpt._disk.commit import commit_of
from jaxckpt._disk.removal import nested
from jaxckpt._run.facts import is_ours
from jaxckpt._run.index import StepIndex
from jaxckpt._run.leases import Leases
from jaxckpt._run.leftovers import remove_remains
from jaxckpt.errors import SaveFailed, is_full
from jaxckpt.format import names, run
from jaxckpt.format.run import Doomed
from jaxckpt.storage import Storage, check_listed, is_temporary_file, together

_MOVE_TO: Final = "KeepPolicy.move_to"


class Owner(Protocol):
    """The right of this process to write to the run."""

    token: str
    is_guest: bool
    damaged: dict[int, tuple[str, str | None]]

    def check(self) -> object:
        """Raises SaveFailed if another job owns the run."""
        ...


@final
class Deletion:
    error: OSError | None = None  # why the last deletion failed

    def __init__(self, leases: Leases, owner: Owner, *, move_to: str | None = None) -> None:
        self.index = index = leases.index
        self.leases = leases
        self.owner = owner
        self.move_to = move_to  # where steps go instead of being deleted
        self.folder = move_to and posixpath.normpath(posixpath.join(index.root, move_to))
        self.failed = False  # whether something that failed may have left a file
        self.half: list[str] = []  # the steps whose failed deletion may have left files
        self._begun: list[str] = []  # the steps that are being deleted, or have been
        self.lock = threading.RLock()  # held while `doomed` names steps of this process

    def delete(self, numbers: Iterable[int], *, asked_for: bool = False) -> list[int]:
        """Deletes steps unless they are pinned or held by a reader; returns the deleted steps.

        Reports errors instead of raising them; the next call tries again.

        Args:
            asked_for: Whether the user named the steps, so that steps of other programs go too.
        """
        index, gone = self.index, []
        with self._reporting():
            wanted = {posixpath.basename(index.path(n)): n for n in numbers}
            if self.failed or self.half or index.storage.atomic_rename:
                self._finish_deletions()
            if asked_for:  # a look now spares a step of another program the claim
                kept = self.leases.leased(index.seen)
                wanted = {name: n for name, n in wanted.items() if name not in kept}
            if not wanted:
                return []
            looks = [partial(self._files, name) for name in wanted]
            first, is_file_system = next(iter(wanted)), index.storage.atomic_rename
            with Claim(index.storage, f"{index.root}/{first}") as claim:
                # Readers would take a step of another program for a damaged one of ours.
                may_claim = asked_for or is_file_system or index.has_record(wanted[first])
                take = claim.take if may_claim else int
                doomed = [*wanted, *self.half]
                others = looks if index.is_large else ()  # else the first list shows them
                entries, _, *found = self._doom(doomed, [index.entries, take, *others])
                found = found or [look() for look in looks]
                leased = self.leases.leased(entries)
                counted = is_file_system or asked_for or index.are_there(entries)
                if not counted:  # the policy counted on a step that is gone
                    leased = {*wanted}
                if any(map(names.is_lease, entries)):
                    self.owner.check()  # reading them took time
                    self.leases.remove_expired()
                for name, files in zip(wanted, found, strict=True):
                    if name not in leased and self._delete_step(name, files, claim, asked_for):
                        gone.append(wanted[name])
                    elif name in self.half:
                        index.forget(wanted[name])
                self.half = remove_remains(self.index, self.half)
                if is_file_system:  # else each look is a request
                    self.owner.check()
                if self.half:
                    self.leases.doom(self.half)
                claim.end(*([] if self.half else [self.leases.doomed_file]))
        for number in gone:
            index.forget(number)
        return gone

    def finish(self, steps: Iterable[str]) -> None:
        """Deletes the steps that the owner before was deleting, by directory name."""
        with self._reporting():
            leased = self.leases.leased(self.index.entries())
            for name in steps:
                if name not in leased:
                    self._delete_step(name)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        root = self.index.root
        with self.lock:
            self._begun.clear()
            self.error = None
            try:
                yield
            except SaveFailed as error:
                self.index.report(f"{root}: this job deletes no more steps: {error}")
            except BaseException as error:  # such as an interrupt
                self.failed = self.leases.unsettled = True
                self.index.doubt(self._begun)
                if not isinstance(error, OSError):
                    raise
                self.error = error
                self.index.report(f"{root}: old steps cannot be deleted: {error}")
                self._settle()

    def _doom(self, steps: list[str], looks: Iterable[Callable[[], Any]]) -> list[Any]:
        """Names the steps that go, unless another job owns the run; returns what is seen then."""
        storage, file = self.index.storage, self.leases.doomed_file
        owner, began_ns = self.owner.token, time.time_ns()
        doomed = Doomed(steps=steps, owner=owner, move_to=self.move_to, began_ns=began_ns)
        try:
            if not storage.create(file, run.encode(doomed)):
                self.owner.check()  # then the file is of an owner before, or of a failed deletion
                self.half = remove_remains(self.index, self.leases.doomed().steps)
                steps += self.half
                storage.write(file, run.encode(doomed))
        except OSError as error:
            if not is_full(error):
                raise
        try:
            return together(storage, [self.owner.check, *looks])[1:]
        except SaveFailed:
            if self.leases.doomed().owner == self.owner.token:
                storage.delete(file)
            raise

    def _settle(self) -> None:
        with contextlib.suppress(OSError):  # else it is settled before the next commit
            self.leases.settle(self.owner.token)

    def _check_renamed(self, name: str) -> None:
        """Raises SaveFailed if the new owner of the run may have listed a step just renamed."""
        try:
            self.owner.check()
        except SaveFailed:
            doomed = self.leases.doomed()
            if doomed.owner != self.owner.token or name not in doomed.steps:
                raise  # otherwise the new owner has not listed the steps yet

    def _finish_deletions(self) -> None:
        failed, self.failed, self.half = self.failed, False, []
        if failed:
            self._settle()
        entries = self.index.entries()
        for entry in entries:
            begun = names.is_deleting(entry) and names.ours_temporary(entry) is not None
            # A file that could not be written may have stayed behind.
            if begun or (failed and is_temporary_file(entry)):
                self._remove_leftover(f"{self.index.root}/{entry}")
        if names.DOOMED in entries:
            self.owner.check()
            self.half = remove_remains(self.index, self.leases.doomed().steps)
            self.leases.doom(self.half)

    def sweep(self, numbers: Iterable[int]) -> None:
        """Removes unfinished saves and uploads from a storage without renames, if they are dead."""
        index, steps = self.index, [posixpath.basename(self.index.path(n)) for n in numbers]
        with self._reporting():
            found = commit_of(index.storage, index.root).left_below(steps)
            # Others may also be of a copy that somebody is making.
            if left := [name for name, files in found.items() if names.WRITER in files]:
                self.owner.check()
                remove_remains(self.index, left)

    def _remove_leftover(self, path: str) -> None:
        """Deletes what an earlier deletion left; a failure must not stop all later deletions."""
        try:
            self.index.storage.delete(path)
        except OSError as error:
            self.failed = True
            self.index.report(f"{path} is left over and cannot be removed: {error}")

    def _files(self, name: str) -> Files:
        with contextlib.suppress(OSError):  # which is raised when the step is deleted
            return self.index.files(name)

    def _delete_step(
        self, name: str, inside: Files = None, claim: Claim | None = None, asked_for: bool = False
    ) -> bool:
        storage, path = self.index.storage, f"{self.index.root}/{name}"
        claim = claim if claim is not None and claim.is_of(path) else None
        try:
            inside = storage.files(path) if inside is None else inside
            if claim is not None:
                inside = [file for file in inside if file != names.WRITER]
            if not inside and (claim or storage.kind(path) is None):  # somebody deleted it
                return True
            if names.PINNED in inside:
                return False
            if (other := nested(storage, path, inside)) is not None:
                self.index.report(
                    f"{path} is not deleted: it contains {other}. Move that elsewhere."
                )
                return False
            if not asked_for and names.RECORD not in inside:
                self.index.report(f"{path} was not written by jaxckpt, so no policy deletes it")
                return False
            check, renamed = self.owner.check, partial(self._check_renamed, name)
            self._begun.append(name)
            if self.folder is None:
                place = commit_of(storage, path)
                place.remove(inside, check=check, renamed=renamed, claim=claim)
            else:
                check()
                storage.make_dir(self.folder)
                _move(storage, path, self.folder, renamed)
        except (OSError, SaveFailed) as error:
            if isinstance(error, SaveFailed):
                self.owner.check()  # else only the lock of the step was lost
            else:
                self.error = error
            self.half.append(name)
            is_gone = storage.kind(path) is None
            if not (is_gone and isinstance(error, FileNotFoundError)):  # else somebody deleted it
                again = "The next deletion tries again."
                self.index.report(f"{path} cannot be deleted: {error}. {again}")
            return is_gone
        return True

    def set_aside(self, number: int, why: str, *, file: str | None = None) -> None:
        """Takes a damaged step out of the run; only reports a step of another program.

        Nothing of it is lost: it gets another name, or where that is impossible is copied.

        Args:
            file: The damaged file. If it is jaxckpt's record, jaxckpt wrote the step.
        """
        index, path = self.index, self.index.path(number)
        if file != f"{path}/{names.RECORD}" and not is_ours(index.storage, path):
            index.report(f"step {number} is damaged and is skipped: {why}")
            return
        index.forget(number)
        aside = f"{index.root}/{names.set_aside(posixpath.basename(path), secrets.token_hex(4))}"
        try:
            check_listed(index.storage, file or path)
            self.owner.check()
            self.leases.check_unchanged(name := posixpath.basename(path))
            doomed = self._named_as_doomed(name)
            commit_of(index.storage, path).set_aside(aside, check=self.owner.check, doomed=doomed)
        except SaveFailed as error:
            if self.owner.is_guest:  # until this job saves
                self.owner.damaged[number] = why, file
            index.report(f"step {number} is damaged and is skipped: {why}. It stays there: {error}")
            return
        except OSError as error:
            index.report(f"step {number} is damaged and cannot be set aside ({error}): {why}")
            return
        index.report(f"step {number} is damaged and was set aside as {aside}: {why}")

    @contextlib.contextmanager
    def _named_as_doomed(self, name: str) -> Iterator[None]:
        """Shows the next owner that a step was being removed."""
        with self.lock:
            # Without an owner, since the next one must not delete a step whose copy is not whole.
            self.leases.doom([name])
            yield
            self.leases.doom([])


def _move(storage: Storage, path: str, folder: str, check: Callable[[], object]) -> None:
    """Renames a directory into `folder`; `-1`, `-2`, ... are added if the name is taken."""
    target = f"{folder}/{posixpath.basename(path)}"
    for n in count():
        with contextlib.suppress(FileExistsError):
            take_away(storage, path, f"{target}-{n}" if n else target, check=check)
            return


def check_folder(index: StepIndex, folder: str) -> None:
    """Makes the directory to which steps go, and moves an empty directory there.

    Raises:
        ValueError: no step can be renamed to there.
        OSError: the directory cannot be made or written.
    """
    storage, root = index.storage, index.root
    inside = posixpath.relpath(folder, root).split("/")[0]
    if inside != ".." and not run.is_free_in_root(inside):
        raise ValueError(f"{_MOVE_TO}: {folder} has the name of a step or file of {root}")
    name = names.deleting("move_to", secrets.token_hex(8))  # a crash leaves nothing but that
    storage.make_dir(probe := f"{root}/{name}")
    try:
        try:
            storage.rename(probe, f"{folder}/{name}")
        except FileNotFoundError:
            storage.make_dir(folder)
            storage.rename(probe, f"{folder}/{name}")
        probe = f"{folder}/{name}"
    except io.UnsupportedOperation as error:
        raise ValueError(f"{_MOVE_TO}: the storage of {root} cannot rename directories") from error
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise ValueError(
            f"{_MOVE_TO}: {folder} is on another file system than {root}, so no step can be "
            "renamed to there. Choose a directory on the same one."
        ) from error
    finally:
        storage.delete(probe)
