"""Decides which job may write to a run, and which manager of a process.

A job that opens a run for writing writes its own token into `_jaxckpt.owner`, then removes every
unfinished save of earlier jobs. Before each commit a job reads the owner again. So a process of an
earlier job that wakes up finds its work gone or another token, and cannot commit; if it commits
first, the new job lists its step; `deletion` has the same for deletions. While the owner's lock
shows a running job, opening the run does not take it over, but the first save does, unless the
other job has saved steps that our job does not know. In one process, the manager opened last may
write.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Final, final

from jaxckpt._disk.commit import commit_of, remove_writer
from jaxckpt._disk.transaction import refuse_inside
from jaxckpt._run.deletion import Deletion, check_folder
from jaxckpt._run.identity import check_id
from jaxckpt._run.index import Listing, StepIndex, check_root, write_run_metadata
from jaxckpt._run.leases import Leases
from jaxckpt._run.ledger import Ledger
from jaxckpt._run.reach import Reach
from jaxckpt._save.job import is_under_way
from jaxckpt._save.worker import SaveQueue
from jaxckpt.errors import CorruptCheckpoint, SaveFailed, is_full
from jaxckpt.format import names, run
from jaxckpt.format.run import Doomed, Owner, StepNames
from jaxckpt.multihost import Group
from jaxckpt.storage import Entry, Hold, is_temporary_file, together

FORKED: Final = (
    "this process was forked from the one that saves. Save and wait there, or start this one with "
    "'spawn'"
)


def read_owner(index: StepIndex) -> Owner | None:
    """Reads which job may commit; None if the owner's file is missing or damaged."""
    file = f"{index.root}/{names.OWNER}"

    def read() -> Owner:
        return run.decode_owner(index.storage.read(file, max_bytes=run.MAX_BYTES), file=file)

    try:
        with contextlib.suppress(CorruptCheckpoint):  # it may be overwritten at this moment
            return read()
        return read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except CorruptCheckpoint as error:
        index.report(f"{error}; the file is treated as missing")
        return None


@final
class Ownership:
    """The right of this process to write to a run."""

    def __init__(
        self,
        index: StepIndex,
        leases: Leases,
        *,
        keep: Mapping[str, Any] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """Takes nothing yet.

        Args:
            keep: The fields of the policy, to show to people. If None, keeps the last owner's.
            ledger: Where the start of this job is recorded, if anywhere.
        """
        self.token = ""  # unique to this opening; "" until this process owns the run
        self.is_guest = False  # whether another job was running when we opened the run
        self.seen = -1  # the newest step that this job has found or restored
        self.run: str | None = None  # the id of the root, once it was checked
        self.spared_work: list[str] = []  # directories of unfinished uploads, kept for resuming
        self._spared: int | None = None  # the step of such uploads
        self._index = index
        self._leases = leases
        self._keep = keep
        self._ledger = ledger
        self._hold: Hold | None = None
        self._closed = False
        # Files that earlier jobs left in steps, by step. Empty where steps appear by a rename.
        self._left: dict[str, list[str]] = {}
        self._half: list[str] = []  # the steps in `_left` that were being deleted
        self._is_sure = True  # that no other job has saved since we took the run over

    def open(self, run: str | None = None, spared: int | None = None) -> Listing:
        """Makes the root, takes the run over unless its owner is running and lists the run.

        Args:
            run: The id that the root must have, "" for any. If None, it is not checked.
            spared: A step whose unfinished upload is kept for resuming.

        Raises:
            NotADirectoryError, ValueError, PermissionError, OSError: the root cannot hold a run.
            CorruptCheckpoint: the lock is not a file.
        """
        storage, root = self._index.storage, self._index.root
        self._closed, self.token, self._spared = False, "", spared
        try:
            entries = refuse_inside(storage, root, partial(check_root, storage, root))
            if entries is None:
                storage.make_dir(root)
            elif self._index.naming is None:
                self._index.learn_naming(entries)  # may raise, so before anything is written
            identify = partial(self._identify, entries, run)
            look = (
                partial(read_owner, self._index) if names.OWNER in (entries or ()) else lambda: None
            )
            *_, before = together(storage, [identify, self._lock, look])
            if self._hold is not None:
                return self.take_over(before, entries or {})
        except IsADirectoryError as error:
            raise IsADirectoryError(
                f"{error.filename} is a directory, but jaxckpt needs the name for a file; remove "
                "what is there."
            ) from error
        except PermissionError as error:
            raise PermissionError(
                f"{root} is not writable: {error}. To only read the run, open it with mode='r'."
            ) from error
        self._index.report(
            f"{root} is open for writing in a running job: {self.who()}. The first save of this "
            "job takes the run over, unless that job has saved more steps by then. To only read "
            "it, open it with mode='r'."
        )
        listing = self._index.listing()
        self.is_guest, self.seen = True, max(self.seen, self._newest(listing))
        return listing

    def _identify(self, entries: Mapping[str, Entry] | None, run: str | None) -> None:
        if run is not None:
            self.run = check_id(self._index, entries, run)

    def _lock(self) -> None:
        """Takes the lock, unless another job holds it."""
        try:
            self._hold = self._index.storage.hold(f"{self._index.root}/{names.LOCK}")
        except io.UnsupportedOperation:
            self._hold = _NoHold()

    def who(self) -> str:
        """Describes the job that owns the run."""
        owner = read_owner(self._index)
        if owner is None:
            return "unknown"
        return f"process {owner.pid} on {owner.host}, since {time.ctime(owner.opened_ns / 1e9)}"

    def take_over(self, before: Owner | None, known: Mapping[str, Entry] | None = None) -> Listing:
        """Makes this job the owner, cleans up after earlier jobs and lists the run.

        Args:
            before: The owner until now.
            known: An earlier listing of the root.
        """
        self.token = secrets.token_hex(8)
        read = [] if self._ledger is None else [partial(self._ledger.read, known)]
        try:
            together(self._index.storage, [partial(self._write, before), *read])
        except BaseException:
            self.token = ""
            raise
        self._index.owned, self.is_guest = True, False
        # List only now: until it lost the run, an earlier job could begin a save or a deletion.
        write = [] if self._ledger is None else [partial(self._ledger.begin, self.token, self.owns)]
        listing, *_ = together(self._index.storage, [partial(self._index.listing, known), *write])
        doomed = self._leases.doomed() if names.DOOMED in listing.entries else Doomed()
        self._left = self._find_left(listing, doomed)
        left = [entry for entry in listing.entries if self._is_left(entry)]
        if left or self._half:
            self.check()
            if before is not None and doomed.owner == before.token:
                self._finish(listing, doomed)
            if self._half:  # so that the next owner knows, if this job dies in between
                self._leases.doom(self._half)
            for entry in left:
                self._sweep(entry)
        if (self._left and self._remove_left()) or left:
            listing = self._index.listing()
        self._index.naming = listing.naming  # from now on only this job names steps
        return listing

    def finish_commit(self, step: int) -> None:
        """Removes the writer's file from the newest step, if this job owns the run."""
        index = self._index
        if not (index.owned and index.has(step, names.WRITER)):
            return
        try:
            remove_writer(index.storage, index.path(step))
        except OSError as error:
            index.report(f"{index.path(step)}/{names.WRITER} cannot be removed: {error}")

    def _finish(self, listing: Listing, doomed: Doomed) -> None:
        """Deletes the steps that the owner before was deleting: it may go on at any moment."""
        numbers = listing.directories()
        steps = [
            name
            for name in doomed.steps
            if name in numbers and self._index.state(listing, numbers[name]) == "committed"
        ]
        Deletion(self._index, self._leases, self, move_to=doomed.move_to).finish(steps)
        for name in steps:
            self._index.forget(numbers[name])

    def _write(self, before: Owner | None = None) -> None:
        owner = Owner(
            token=self.token,
            host=socket.gethostname(),
            pid=os.getpid(),
            opened_ns=time.time_ns(),
            keep=self._keep or (before.keep if before is not None else {}),
        )
        file, data = f"{self._index.root}/{names.OWNER}", run.encode_owner(owner)
        try:
            self._index.storage.write(file, data)
        except OSError as error:
            if not is_full(error):
                raise
            self._write_in_place(file, data, error)

    def _write_in_place(self, file: str, data: bytes, full: OSError) -> None:
        """Overwrites the owner's file, which takes no room, so that steps can be deleted.

        If the file is missing, it stays missing: no other job has taken the run.
        """
        storage = self._index.storage
        if storage.kind(file) is None:
            return
        with contextlib.suppress(io.UnsupportedOperation):
            hold = storage.hold(file, data.ljust(storage.size(file)))
            if hold is not None:
                hold.release()
                return
        raise full

    def check(self) -> Owner | None:
        """Returns the owner, this job, or None if the file is gone or damaged.

        Raises:
            SaveFailed: another job owns the run.
        """
        if not self.token:
            raise SaveFailed(f"{self._index.root} belongs to a running job: {self.who()}")
        owner = read_owner(self._index)
        if owner is None or owner.token == self.token:
            return owner
        when = time.ctime(owner.opened_ns / 1e9)
        raise SaveFailed(
            f"{self._index.root} was opened for writing by another job (process {owner.pid} on "
            f"{owner.host}) at {when}, so this job can no longer save there. Only one job "
            "may write to a run; to only read it, open it with mode='r'."
        )

    def owns(self) -> bool:
        """Returns whether the owner's file names this job."""
        owner = read_owner(self._index)
        return owner is not None and owner.token == self.token

    def join(self, step: int | None = None) -> None:
        """Takes the run over from a job that was running when our job opened the run.

        Args:
            step: The step to save, if any.

        Raises:
            SaveFailed: that job still runs, and has saved steps that our job does not know;
                nothing was changed.
        """
        if self._hold is None and not self._closed:
            self._lock()
        if self._hold is None:
            self._leave_alone_if_ahead(step)
        self.take_over(read_owner(self._index))

    def _leave_alone_if_ahead(self, step: int | None) -> None:
        listing = self._index.listing()
        newest = self._newest(listing)
        if newest <= self.seen and (step is None or self._index.state(listing, step) is None):
            return
        known = f"only up to step {self.seen}" if self.seen >= 0 else "without any step"
        raise SaveFailed(
            f"{self._index.root} is being written by another job ({self.who()}), which has saved "
            f"step {newest}; this job knows the run {known}. This job has saved nothing, and the "
            "other one continues. Stop one of the two jobs. A job that starts again resumes from "
            "the newest step."
        )

    def _newest(self, listing: Listing) -> int:
        """Returns the newest committed step, or -1; reports nothing, since a job may be saving."""
        steps = reversed(listing.steps)
        return next((n for n in steps if self._index.state(listing, n) == "committed"), -1)

    def fence(self, step: int | None = None) -> None:
        """Takes the run over if this job has not yet, and checks that it may commit.

        Args:
            step: The step to commit, if any.

        Raises:
            SaveFailed: another job has taken the run over or saved a later step.
        """
        if not self.token:
            self.join(step)
            self._is_sure = False
        if self.check() is None:  # nobody else has taken the run
            self._write()
            self._is_sure = False
        # The job that held the lock may have ended: show that this job is running.
        if self._hold is None and not self._closed:
            self._lock()
        if self._left:
            self._remove_left()
        # In a store each listing is a request, and the owner's file shows enough.
        if step is not None and (self._index.storage.atomic_rename or not self._is_sure):
            self._refuse_older(step)
            self._is_sure = True

    def _refuse_older(self, step: int) -> None:
        index, listing = self._index, self._index.listing()
        newest = index.newest(listing)
        if newest is None or newest <= step:
            return
        if index.state(listing, step) != "committed":  # in a store, its files may be there
            raise SaveFailed(
                f"{self._index.path(step)}: another job has saved step {newest} since this job "
                "opened the run. Only one job may write to a run; restore before continuing."
            )

    def _is_left(self, entry: str) -> bool:
        """Returns whether an earlier job left an entry, as far as its name shows."""
        is_step = names.replaced(entry) is not None or names.ours_temporary(entry) is not None
        return is_step or self._is_forgotten(entry)

    def _sweep(self, entry: str) -> None:
        """Finishes or removes work of an earlier job."""
        index, path = self._index, f"{self._index.root}/{entry}"
        try:
            if (name := names.replaced(entry)) is not None:
                commit_of(index.storage, f"{index.root}/{name}").recover()
            elif (name := names.ours_temporary(entry)) is None:
                index.storage.delete(path)
            elif is_under_way(f"{index.root}/{name}"):
                return
            elif self._is_spared(name):
                self.spared_work.append(entry)
            else:
                if not names.is_deleting(entry):
                    index.warn(f"removing {path}, left by an interrupted save")
                commit_of(index.storage, path).remove_work()
        except OSError as error:
            index.report(f"{path} is left over and cannot be removed: {error}")

    def _find_left(self, listing: Listing, doomed: Doomed) -> dict[str, list[str]]:
        """Finds unfinished saves newer than the newest step, and unfinished deletions."""
        root = self._index.root
        deleting = [name for name in doomed.steps if name in listing.directories()]
        begun = self._begun(listing, deleting)  # looked for only where it is needed
        found = commit_of(self._index.storage, root).left_below(begun)
        self._half = [name for name in deleting if name in found]
        return {
            name: files
            for name, files in found.items()
            if name in deleting or self._was_saving(f"{root}/{name}", files)
        }

    def _begun(self, listing: Listing, deleting: Sequence[str]) -> Iterator[str]:
        for name in dict.fromkeys([*self._index.unfinished(listing), *deleting]):
            is_spared = name not in deleting and self._is_spared(name)
            if not (is_spared or is_under_way(f"{self._index.root}/{name}")):
                yield name

    def _is_spared(self, name: str) -> bool:
        naming = self._index.naming or StepNames()
        return self._spared is not None and self._spared == naming.step(name)

    def _was_saving(self, path: str, files: list[str]) -> bool:
        """Returns whether a save left these files.

        A record without a writer may also be of a copy that somebody is making.
        """
        if not files:  # the save was trying out the store
            return any(map(is_temporary_file, self._index.storage.entries(path)))
        return names.WRITER in files or names.RECORD not in files

    def _remove_left(self) -> bool:
        """Removes remains of earlier jobs, once their leases are over; returns whether it did."""
        if self._hold is None or isinstance(self._hold, _NoHold):
            return False
        before = len(self._left)
        self._left = {n: files for n, files in self._left.items() if not self._is_done(n, files)}
        if self._half and self._left.keys().isdisjoint(self._half):
            self._half = []
            self._index.storage.delete(f"{self._index.root}/{names.DOOMED}")
        return len(self._left) < before

    def _is_done(self, name: str, files: list[str]) -> bool:
        path = f"{self._index.root}/{name}"
        if is_under_way(path):  # this job is saving that step
            return True
        try:
            return commit_of(self._index.storage, path).remove_left(files)
        except OSError as error:
            self._index.report(f"{path} is left over and cannot be removed: {error}")
            return False

    def _is_forgotten(self, entry: str) -> bool:
        """Returns whether a file is an expired lease or a remnant of a killed job."""
        if is_temporary_file(entry):  # a reader writes its lease again
            return True
        if entry == names.DOOMED:
            return not self._half
        return names.is_lease(entry) and self._leases.read(entry) is None

    def doubt(self) -> None:
        """Lets the next commit look for later steps: the run was not listed when the job began."""
        self._is_sure = False

    def close(self) -> None:
        """Releases the lock."""
        hold, self._hold, self._closed = self._hold, None, True
        if hold is not None:
            hold.release()


class _NoHold:
    """Stands in for the lock on storage without locks."""

    def release(self) -> None:
        """Does nothing."""


# --- in one process --------------------------------------------------------------------------


@final
class Opening:
    """One opening of a run by a manager; the next one for writing in this process ends it."""

    def __init__(self, owner: Ownership, deletion: Deletion, group: Group) -> None:
        self.ended = ""  # why, once it has
        self._saves: SaveQueue | None = None  # None until the run is open
        self._owner = owner
        self._deletion = deletion
        self._index = deletion.index
        self._group = group
        self._key = self._index.root, group.mates.index
        self._ending = threading.RLock()  # held while it ends; a signal handler may end it too
        self._reach: Reach | None = None  # of a root that the job can do without
        self._beginning = threading.Lock()  # held while a thread opens the run

    def open(
        self,
        metadata: Mapping[str, Any] | None,
        *,
        saves: SaveQueue | None,
        timeout_s: float,
        run: str | None = None,
        spared: int | None = None,
        reach: Reach | None = None,
    ) -> Any:  # JSON
        """Opens the run for writing in the leader; returns its newest step to the group.

        First ends this process's earlier opening for writing, after its saves.

        Args:
            saves: What writes there, which the end of the opening waits for and stops.
            run, spared: See `Ownership.open`.
            reach: Given if the job can do without the root. If it cannot be used, the result has
                the reason as "away"; the first upload that gets through opens the run.
        """
        self._reach, self._take = reach, partial(self._owner.open, run, spared)
        with _open_lock:
            earlier = _open.get(self._key)
            _open[self._key] = self
        if earlier is not None:
            try:
                earlier.end("another manager of this process has opened the run. Use that one")
            except BaseException as error:
                if isinstance(error, Exception | KeyboardInterrupt | SystemExit):
                    raise  # else its storage only simulates a process, which is dead
        index, root = self._index, self._index.root
        group, where = self._group, self._group.common(root)
        name = f"manager {where}/open"
        try:
            with group.leading(name, where=where, timeout_s=timeout_s) as led:
                if group.leads:
                    found = (
                        self._begin(metadata)
                        if reach is None
                        else self._begin_or_go_on(metadata, reach)
                    )
                    led.value = {"session": secrets.token_hex(8), **found}
        except BaseException:
            self.ended = "it could not open the run"  # the next manager does not wait for it
            self._owner.close()
            raise
        opened, self._saves = led.value, saves
        if opened["naming"] is not None:
            index.naming = StepNames(**opened["naming"])
        return opened

    def _begin_or_go_on(self, metadata: Mapping[str, Any] | None, reach: Reach) -> dict[str, Any]:
        try:
            return reach.ask(partial(self._begin, metadata))
        except CorruptCheckpoint:
            raise
        except OSError as error:
            self._owner.doubt()
            away = {"away": str(error), "silent": bool(reach.away)}
            return {"newest": None, "naming": None, **away}

    def _begin(self, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
        index = self._index
        with self._beginning:
            listing = self._take()
        if self.ended:  # while the root did not answer
            self._owner.close()
            return {}
        with _unless_full(index):
            if (folder := self._deletion.folder) is not None:
                check_folder(index, folder)
        index.note_strays(listing, besides=[self._deletion.move_to, *self._owner.spared_work])
        with _unless_full(index):
            if metadata:
                write_run_metadata(index, metadata)
        if (newest := index.newest(listing)) is not None:
            self._owner.finish_commit(newest)
        naming = None if index.naming is None else asdict(index.naming)
        return {
            "newest": newest,
            "naming": naming,
            "owned": not self._owner.is_guest,
            "run": self._owner.run,
        }

    def open_late(self, timeout_s: float) -> None:
        """Opens a run that was away when the job began, unless that was done meanwhile."""
        if not self._beginning.acquire(timeout=timeout_s):
            raise TimeoutError(f"{self._index.root} has not answered for {timeout_s:g} s")
        try:
            if not self._owner.token and not self.ended:
                self._take()
            if self.ended:  # while the root did not answer
                self._owner.close()
                raise SaveFailed(f"{self._index.root}: {self.ended}")
        finally:
            self._beginning.release()

    def end(self, why: str) -> None:
        """Waits for the saves under way and releases the run, unless that was done before."""
        if not self._ending.acquire(blocking=False):
            if self._saves is not None and self._saves.is_own_thread():
                return  # the thread that ends it waits for us
            self._ending.acquire()
        try:
            if self.ended:
                return
            if self._saves is not None:
                self._saves.refuse_own_thread()
            self.ended = why
            try:
                if self._saves is not None:
                    self._saves.stop()
            finally:
                if self._reach is None:
                    self._owner.close()
                else:
                    self._reach.leave(self._owner.close)
                with _open_lock:
                    if _open.get(self._key) is self:
                        del _open[self._key]
        finally:
            self._ending.release()


@contextlib.contextmanager
def _unless_full(index: StepIndex) -> Iterator[None]:
    """Reports a full disk: steps can be restored and deleted there."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        index.report(f"{index.root} is opened, though the disk is full: {error}")


_open: dict[tuple[str, int], Opening] = {}  # managers open for writing
_open_lock = threading.Lock()  # guards _open


def _end_in_child() -> None:
    # A forked child lacks the saving threads, and the run stays the parent's.
    for opening in _open.values():
        opening.ended = FORKED
    _open.clear()


os.register_at_fork(after_in_child=_end_in_child)
