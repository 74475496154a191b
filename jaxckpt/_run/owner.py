"""Who may write to a run.

A job that opens a run for writing writes a token of its own into `_jaxckpt.owner`, and then renames
away everything that others were writing there. Before each commit a job reads the owner again. So a
process of an earlier job that was taken for dead and wakes up finds its work gone, or the token of
another, and cannot commit; if it commits first, the new job lists its step. While the lock of the
owner shows that the owner lives, a job that merely opens the run does not take it over: its first
save does.
"""

from __future__ import annotations

import io
import os
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any, final

from jaxckpt._disk import transaction as _transaction
from jaxckpt._run.index import Listing, StepIndex, check_root
from jaxckpt._run.leases import Leases
from jaxckpt._save.handle import is_under_way
from jaxckpt.errors import CorruptCheckpoint, SaveFailed
from jaxckpt.format import names, run
from jaxckpt.format.run import Owner
from jaxckpt.storage import Hold, is_temporary_file


def read_owner(index: StepIndex) -> Owner | None:
    """Reads which job may commit; None if there was none yet, or the file is damaged."""
    file = f"{index.root}/{names.OWNER}"
    try:
        return run.decode_owner(index.storage.read(file, max_bytes=run.MAX_BYTES), file=file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except CorruptCheckpoint as error:
        index.report(f"{error}; it is written anew")
        return None


@final
class Ownership:
    """The right of this process to write to a run.

    Attributes:
        token: Unique to this opening; "" until this process owns the run.
    """

    def __init__(
        self, index: StepIndex, leases: Leases, *, keep: Mapping[str, Any] | None = None
    ) -> None:
        """Takes nothing yet.

        Args:
            keep: The fields of the policy, for people to see. If None, the last owner's are kept.
        """
        self.token = ""
        self._index = index
        self._leases = leases
        self._keep = keep
        self._hold: Hold | None = None
        self._closed = False

    def open(self) -> Listing:
        """Makes the root, and takes the run over unless its owner lives; returns what is there.

        Raises:
            NotADirectoryError, ValueError, PermissionError, OSError: the root cannot hold a run.
        """
        storage, root = self._index.storage, self._index.root
        try:
            if not check_root(storage, root):
                storage.make_dir(root)
            self._hold = self._lock()
            if self._hold is not None:
                return self.take_over()
        except FileExistsError as error:
            raise NotADirectoryError(f"{root} lies below a file: {error}") from error
        except PermissionError as error:
            raise PermissionError(
                f"{root} cannot be written: {error}. To read only, open it with mode='r'."
            ) from error
        self._index.report(
            f"{root} is open for writing in a job that lives: {self.who()}. The first save of "
            "this one takes it over. To read only, open it with mode='r'."
        )
        return self._index.listing()

    def _lock(self) -> Hold | None:
        try:
            return self._index.storage.hold(f"{self._index.root}/{names.LOCK}")
        except io.UnsupportedOperation:
            return _NoHold()

    def who(self) -> str:
        """Describes the job that owns the run."""
        owner = read_owner(self._index)
        return "unknown" if owner is None else f"process {owner.pid} on {owner.host}"

    def take_over(self) -> Listing:
        """Makes this the job that may commit here, and clears up after the ones before.

        Returns:
            What is there afterwards.
        """
        self.token = secrets.token_hex(8)
        try:
            self._write()
        except BaseException:
            self.token = ""
            raise
        self._index.owned = True
        # Not before: an earlier job may have begun a save since.
        listing = self._index.listing()
        if self._sweep(listing):
            listing = self._index.listing()
        self._index.naming = listing.naming  # from now on nobody else names a step
        return listing

    def _write(self) -> None:
        before = read_owner(self._index) if self._keep is None else None
        owner = Owner(
            token=self.token,
            host=socket.gethostname(),
            pid=os.getpid(),
            opened_ns=time.time_ns(),
            keep=self._keep or (before.keep if before is not None else {}),
        )
        self._index.storage.write(f"{self._index.root}/{names.OWNER}", run.encode_owner(owner))

    def fence(self, step: int | None = None) -> None:
        """Takes the run over if this job has not yet done so, and checks that it may commit.

        Args:
            step: The step to commit, if there is one.

        Raises:
            SaveFailed: another job has taken the run over since, or has saved a later step.
        """
        if not self.token:
            self.take_over()
        owner = read_owner(self._index)
        if owner is None:  # somebody deleted or damaged it: nobody else has taken the run
            self._write()
        elif owner.token != self.token:
            when = time.ctime(owner.opened_ns / 1e9)
            raise SaveFailed(
                f"{self._index.root} was opened for writing by another job (process {owner.pid} on "
                f"{owner.host}) at {when}, and this one may no longer save there. Let one job "
                "write a run; to read it, open it with mode='r'."
            )
        # The job that had the lock may have ended: show that this one lives.
        if self._hold is None and not self._closed:
            self._hold = self._lock()
        if step is not None:
            self._refuse_older(step)

    def _refuse_older(self, step: int) -> None:
        listing = self._index.listing()
        newest = self._index.newest(listing)
        if newest is not None and newest > step and step not in listing.steps:
            raise SaveFailed(
                f"{self._index.path(step)}: another job has saved step {newest} since this one "
                "opened the run. Let one job write a run, and restore before going on."
            )

    def _sweep(self, listing: Listing) -> bool:
        """Finishes or removes what earlier jobs of jaxckpt were doing; returns whether it did."""
        swept = False
        for entry in listing.entries:
            path = f"{self._index.root}/{entry}"
            try:
                swept |= self._sweep_entry(entry, path)
            except OSError as error:
                self._index.report(f"{path} is left over, and cannot be removed: {error}")
        return swept

    def _sweep_entry(self, entry: str, path: str) -> bool:
        index = self._index
        if (name := names.replaced(entry)) is not None:
            _transaction.recover(index.storage, f"{index.root}/{name}")
        elif (name := names.ours_temporary(entry)) is not None:
            if is_under_way(f"{index.root}/{name}"):
                return False
            if not names.is_deleting(entry):
                index.warn(f"removing {path}, left by a save that did not end")
            _transaction.remove_work(index.storage, path)
        elif entry == names.DOOMED or self._is_forgotten(entry):
            index.storage.delete(path)
        else:
            return False
        return True

    def _is_forgotten(self, entry: str) -> bool:
        """Returns whether a file is a lease that has expired, or was left by a kill."""
        if is_temporary_file(entry):  # a reader that lives will write its lease again
            return True
        return names.is_lease(entry) and self._leases.read(entry) is None

    def close(self) -> None:
        """Lets go of the lock."""
        if self._hold is not None:
            self._hold.release()
            self._hold = None
        self._closed = True


class _NoHold:
    """The lock of a storage that has none."""

    def release(self) -> None:
        """Does nothing."""
