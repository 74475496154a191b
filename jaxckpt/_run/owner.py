"""Decides which job may write to a run.

A job that opens a run for writing writes its own token into `_jaxckpt.owner`, then removes every
unfinished save of earlier jobs. Before each commit a job reads the owner again. So a process of an
earlier job that wakes up finds its work gone or another token, and cannot commit; if it commits
first, the new job lists its step; `deletion` has the same for deletions. While the owner's lock
shows a running job, opening the run does not take it over, but the first save does, unless the
other job has saved steps that our job does not know.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import socket
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, final

from jaxckpt._disk.transaction import refuse_inside
from jaxckpt._run.copies import SHORT
from jaxckpt._run.deletion import Deletion
from jaxckpt._run.identity import check_id
from jaxckpt._run.index import StepIndex
from jaxckpt._run.leases import Leases
from jaxckpt._run.ledger import Ledger
from jaxckpt._run.leftovers import Leftovers
from jaxckpt._run.listing import Listing, check_root, not_here
from jaxckpt.errors import SaveFailed, is_full
from jaxckpt.format import names, run
from jaxckpt.format.run import Doomed, Owner
from jaxckpt.storage import Entry, Hold, Storage, together

_MOST_FIRST: Final = 10_000  # characters: the latest saves before which nothing was committed


def interrupted(index: StepIndex, listing: Listing, doomed: Doomed) -> list[int]:
    """Returns the steps that are whole although a job was deleting them when it died.

    A step saved since is none: a store may act late on the request that named it.
    """
    numbers = (n for name, n in listing.directories().items() if name in doomed.steps)
    whole = [n for n in numbers if index.state(listing, n) == "committed"]
    until_s = doomed.began_ns / 1e9
    return [n for n in whole if not until_s or index.info(n).saved_s <= until_s]


def _finish(leases: Leases, owner: Ownership, listing: Listing, doomed: Doomed) -> None:
    """Deletes the steps that the owner before was deleting: it may go on at any moment."""
    numbers = interrupted(leases.index, listing, doomed)
    steps = [listing.steps[number] for number in numbers]
    Deletion(leases, owner, move_to=doomed.move_to).finish(steps)
    for number in numbers:
        leases.index.forget(number)


@final
@dataclass
class RootLock:
    """The lock that shows that a job runs, which may write to a run."""

    index: StepIndex
    hold: Hold | None = None
    is_released: bool = False  # for good: it is not taken again

    def take(self) -> None:
        """Takes the lock unless another job holds it, or this one has released it."""
        if self.hold is None and not self.is_released:
            try:
                self.hold = self.index.storage.hold(f"{self.index.root}/{names.LOCK}")
            except io.UnsupportedOperation:
                self.hold = Hold()
            if self.is_released:  # an interrupt has released it meanwhile
                self.release()

    @property
    def excludes(self) -> bool:
        """Returns whether it is held, where there are locks."""
        return self.hold is not None and type(self.hold) is not Hold

    def release(self) -> None:
        """Releases the lock, if it is held."""
        hold, self.hold, self.is_released = self.hold, None, True
        if hold is not None:
            hold.release()


@final
class Ownership:
    """The right of this process to write to a run."""

    def __init__(
        self, leases: Leases, *, keep: Mapping[str, Any] | None = None, ledger: Ledger | None = None
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
        # Why a step is damaged, and which file, by step: what a guest could not set aside.
        self.damaged: dict[int, tuple[str, str | None]] = {}
        # Roots on this disk where a job with another number of processes saves.
        self.besides: Sequence[StepIndex] = ()
        self._index, self._leases = leases.index, leases
        self._keep, self._ledger = keep, ledger
        self.lock = RootLock(leases.index)
        self.leftovers = Leftovers(leases)  # of earlier jobs
        self.is_known = True  # whether the run was listed when the job began
        self.first = ""  # as in the owner's file
        self._is_sure = True  # that no other job has saved since we took the run over

    def open(self, run: str | None = None, spared: int = -1) -> Listing:
        """Makes the root, takes the run over unless its owner is running and lists the run.

        Args:
            run: The id that the root must have, "" for any. If None, it is not checked.
            spared: A step whose unfinished upload is kept for resuming.

        Raises:
            NotADirectoryError, ValueError, PermissionError, OSError: the root cannot hold a run.
            CorruptCheckpoint: the lock is not a file.
        """
        storage, root = self._index.storage, self._index.root
        self.lock.is_released, self.token, self.leftovers.spared = False, "", spared
        try:
            entries = refuse_inside(storage, root, partial(check_root, storage, root))
            if entries is None:
                storage.make_dir(root)
            elif self._index.naming is None:
                self._index.learn_naming(entries)  # may raise, so before anything is written
            look = self._index.owner if names.OWNER in (entries or ()) else lambda: None
            check = partial(check_id, self._index, entries, run or "")
            identify = check if run is not None else lambda: self.run
            self.run, _, before = together(storage, [identify, self.lock.take, look])
            if self.lock.hold is not None:
                return self.take_over(before, entries or {})
        except IsADirectoryError as error:
            raise IsADirectoryError(
                f"{error.filename} is a directory. jaxckpt needs a file: remove what is there."
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
        self.is_guest, self.seen = True, max(self.seen, _newest(self._index, listing))
        return listing

    def who(self) -> str:
        """Describes the job that owns the run."""
        owner = self._index.owner()
        if owner is None:
            return "unknown"
        return f"process {owner.pid} on {owner.host}, since {time.ctime(owner.opened_ns / 1e9)}"

    def take_over(self, before: Owner | None, known: Mapping[str, Entry] | None = None) -> Listing:
        """Makes this job the owner, cleans up after earlier jobs and lists the run."""
        self.token = secrets.token_hex(8)
        starts = [*(before.first.split() if before else ()), *self.first.split()]
        self.first = " ".join(dict.fromkeys(starts))
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
        left = self.leftovers.find(listing, doomed)
        if left or self.leftovers.half:
            self.check()
            if before is not None and doomed.owner == before.token:
                _finish(self._leases, self, listing, doomed)
            self.leftovers.sweep(left)
        if (self.lock.excludes and self.leftovers.files and self.leftovers.remove()) or left:
            listing = self._index.listing()
        self._index.naming = listing.naming  # from now on only this job names steps
        return listing

    def begin(self, token: str) -> None:
        """Names a save on the disk, before which nothing was committed, for the owner's file."""
        self.first = f"{self.first} {token[:SHORT]}".strip()[-_MOST_FIRST:]

    def _write(self, before: Owner | None = None) -> None:
        owner = Owner(
            token=self.token,
            host=socket.gethostname(),
            pid=os.getpid(),
            opened_ns=time.time_ns(),
            keep=self._keep or (before.keep if before is not None else {}),
            first=self.first,
        )
        file, data = f"{self._index.root}/{names.OWNER}", run.encode(owner)
        try:
            self._index.storage.write(file, data)
        except OSError as error:
            if not is_full(error):
                raise
            _write_in_place(self._index.storage, file, data, error)

    def check(self) -> Owner | None:
        """Returns the owner, this job, or None if the file is gone or damaged.

        Raises:
            SaveFailed: another job owns the run.
        """
        if not self.token:
            raise SaveFailed(f"{self._index.root} belongs to a running job: {self.who()}")
        owner = self._index.owner()
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
        owner = self._index.owner()
        return owner is not None and owner.token == self.token

    def join(self, step: int | None = None) -> None:
        """Takes the run over from a job that was running when our job opened the run.

        Raises:
            SaveFailed: that job still runs, and has saved steps that our job does not know;
                nothing was changed.
        """
        self._index.listing()  # raises if it is not here, before a lock is made
        self.lock.take()
        if self.lock.hold is None:
            self._leave_alone_if_ahead(step, self._still_damaged())
        self.take_over(self._index.owner())
        deletion = Deletion(self._leases, self)
        for number, (why, file) in self._still_damaged().items():
            deletion.set_aside(number, why, file=file)
        self.damaged.clear()

    def _still_damaged(self) -> dict[int, tuple[str, str | None]]:
        """Returns what the other job has neither mended nor saved anew meanwhile."""
        from jaxckpt._run.scrub import look  # slow to import, and seldom used

        looked = {number: look(self._leases, number) for number in self.damaged}
        return {n: self.damaged[n] for n, found in looked.items() if found and found.damaged}

    def _leave_alone_if_ahead(self, step: int | None, damaged: Container[int]) -> None:
        listing = self._index.listing()
        newest = _newest(self._index, listing)
        is_new = step is None or step in damaged or self._index.state(listing, step) is None
        if newest <= self.seen and is_new:
            return
        known = f"only up to step {self.seen}" if self.seen >= 0 else "without any step"
        raise SaveFailed(
            f"{self._index.root} is being written by another job ({self.who()}), which has saved "
            f"step {newest}; this job knows the run {known}. This job has saved nothing, and the "
            "other one continues. Stop one of the two jobs. A job that starts again resumes from "
            "the newest step."
        )

    def fence(self, step: int | None = None) -> None:
        """Takes the run over if this job has not yet, and checks that it may commit.

        Raises:
            SaveFailed: another job has taken the run over or saved a later step.
        """
        if not self.token:
            self.join(step)
            self._is_sure = False
        if (owner := self.check()) is None or owner.first != self.first:
            if owner is None:
                self._index.listing()  # raises if it is not here
            self._write(owner)
            self._is_sure = False
        if self._leases.unsettled:
            self._leases.settle(self.token)
        for index in self.besides:
            _end_job_in(index, self.token)
        self.besides = ()
        # The job that held the lock may have ended: show that this job is running.
        self.lock.take()
        if self.lock.excludes and self.leftovers.files:
            self.leftovers.remove()
        # In a store each listing is a request, and the owner's file shows enough.
        if step is not None and (self._index.storage.atomic_rename or not self._is_sure):
            self._refuse_older(step)
            self._is_sure = True

    def check_is_here(self) -> None:
        """Raises StoreError if the root was away when the job began, and still has no steps."""
        was_away = not (self.is_known or self.token)
        if was_away and not self._index.listing().steps:
            raise not_here(self._index.root, "here: it has no steps")

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

    def doubt(self) -> None:
        """Lets the next commit look for later steps: the run was not listed when the job began."""
        self.is_known = self._is_sure = False


def _newest(index: StepIndex, listing: Listing) -> int:
    """Returns the newest committed step, or -1; reports nothing, since a job may be saving."""
    steps = reversed(listing.steps)
    return next((n for n in steps if index.state(listing, n) == "committed"), -1)


def _end_job_in(index: StepIndex, token: str) -> None:
    """Writes a token where an earlier job has its own, if any, so that it saves no more."""
    if (before := index.owner()) is not None:
        now = {"token": token, "host": socket.gethostname(), "pid": os.getpid()}
        data = run.encode(replace(before, opened_ns=time.time_ns(), **now))
        index.storage.write(f"{index.root}/{names.OWNER}", data)


def _write_in_place(storage: Storage, file: str, data: bytes, full: OSError) -> None:
    """Overwrites the owner's file, which takes no room, so that steps can be deleted.

    If the file is missing, it stays missing: no other job has taken the run.
    """
    if storage.kind(file) is None:
        return
    with contextlib.suppress(io.UnsupportedOperation):
        hold = storage.hold(file, data.ljust(storage.size(file)))
        if hold is not None:
            hold.release()
            return
    raise full
