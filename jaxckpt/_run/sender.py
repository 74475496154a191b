"""Sends one step of a run, or the part of it on this disk, to the directory behind its local disk.

The steps of a process go one after another; `uploader` decides which is next.
"""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import final

from jaxckpt._core.log import logger
from jaxckpt._core.text import command
from jaxckpt._disk.commit import commit_of
from jaxckpt._disk.find import find
from jaxckpt._disk.pace import Pace
from jaxckpt._disk.transaction import Transaction, has_begun, take_over
from jaxckpt._run.copies import Saved
from jaxckpt._run.identity import newest_saved, saved_at
from jaxckpt._run.root import Root, Stay
from jaxckpt._run.shares import refuse
from jaxckpt._run.upload import upload, upload_token
from jaxckpt._save.worker import Failure
from jaxckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    CheckpointTimeout,
    CorruptCheckpoint,
    SaveFailed,
    StoreError,
)
from jaxckpt.format.run import StepNames
from jaxckpt.multihost import Processes


@dataclass(slots=True, eq=False)
class Upload:
    """One step on its way to the directory of the run."""

    step: int
    path: str  # there
    is_ours: bool = True  # whether this job saved it, and wants to know of errors
    since_s: float = field(default_factory=time.monotonic)  # when it was committed locally
    token: str = ""  # of the attempts, as last read; the record may be lost later
    parts: dict[int, bytes] = field(default_factory=dict)  # of the other processes
    caller: threading.Thread = field(default_factory=threading.current_thread)
    error: BaseException | None = None
    failure: Failure | None = None  # the same, unless it is only reported
    waits_for: list[int] = field(default_factory=list)  # processes whose parts have not come
    has_ended: bool = False


@final
class Sender:
    """Sends steps from one root to another. Process 0 begins them there, and commits."""

    def __init__(
        self,
        roots: Sequence[Root],  # where the steps are, and where they go
        processes: Processes,  # their limit is the limit of an upload, too
        pace: Pace,
    ) -> None:
        self.source, self.target = roots
        self.processes = processes
        self.pace = pace
        shares = self.target.index.storage.server_copies or self.target.keep.keeps_two
        self._trusted: dict[str, int] | None = {} if shares else None
        self._bytes_per_s: float | None = None  # of the last upload that shows it
        # Attempts that failed where steps appear by a rename, with when they were found unwanted.
        self.begun: dict[tuple[int, str], float] = {}
        # The newest step that this process sent; once process 0 has, it is committed.
        self.newest = -1
        self.newest_direct = -1  # that it saves or has saved in the directory itself

    def expect(self, step: int, *, is_ours: bool = True) -> Upload:
        """Returns the upload of a step that is being saved locally."""
        index = self.target.index
        # Listing the root would wait for the store.
        path = f"{index.root}/{(index.naming or StepNames()).of(step)}"
        return Upload(step, path, is_ours=is_ours)

    def left(self, steps: Sequence[int], when: str = "") -> str:
        """Returns which steps are not uploaded, and what to do about it."""
        source, target = self.source.index.root, self.target.index.root
        hosts = "on each host, this last: " if self.source.group.leaders.count > 1 else ""
        later = f"To upload them later: {hosts}{command('upload', source, target)}"
        return f"{target}: steps {steps} are not uploaded{when}; they are in {source}. {later}"

    def seconds_for(self, size_bytes: int) -> float | None:
        """Returns how long an upload takes at the last upload's speed; None if that is unknown."""
        return None if self._bytes_per_s is None else size_bytes / self._bytes_per_s

    def go_back(self, newest: int) -> None:
        """Forgets the steps after `newest`, which are gone; an older upload may still follow it."""
        both = self.newest, self.newest_direct
        self.newest, self.newest_direct = (n if n <= newest else -1 for n in both)

    def has_begun(self, one: Upload) -> bool:
        """Returns whether process 0 has begun to upload a step of which this process has a part."""
        with suppress(CheckpointError, OSError):
            token, target = self.token_of(one), self.target.index
            begun = token and has_begun(target.storage, target.path(one.step), token)
            return bool(begun) and self._has_its_part(one)
        return False

    def _has_its_part(self, one: Upload) -> bool:
        """Returns whether this process may send what its disk has, which others may have saved."""
        if (mine := self.source.group.part) is None:
            return True
        part, source = mine, self.source.index
        self.token_of(one)
        with suppress(CheckpointError):  # raised when it is sent
            part = find(source.storage, source.path(one.step)).part or mine
        # Process 0 commits, and nobody else: one process has the right to write to the directory.
        return part[1] == mine[1] and (part[0] == 0) == (mine[0] == 0)

    def token_of(self, one: Upload) -> str:
        """Returns the token of the attempts to upload a step as it is now; "" if it is unknown."""
        source, token = self.source.index, one.token
        with suppress(CheckpointError, OSError):  # reported when it is sent
            token = upload_token(find(source.storage, source.path(one.step)))
        if token != one.token:  # it may have been saved again
            one.parts.clear()
        one.token = token
        return token

    def send(self, one: Upload, stay: Stay) -> None:
        """Uploads a step; process 0 then deletes what its directory does not keep.

        A step of an earlier job pushes none out before the next upload: this job may delete it.
        """
        source, step = self.source.index, one.step
        self.target.index.sent.add(step)
        if self.processes.index == 0:
            if not self._has_its_part(one):
                raise SaveFailed(
                    f"{source.path(step)} was saved by other processes than those of this job. To "
                    "upload it, on each host, last where process 0 was then: jaxckpt upload "
                    f"{source.root} {self.target.index.root} --step {step}"
                )
            self.open_target(lambda: saved_at(source, step), waits=not one.is_ours)
            if not one.is_ours:
                self.target.tidy(stay)
        start_s = time.monotonic()
        with self.source.leases.protect(step, owner=self.source.owner.token):
            done = upload(
                source,
                self.target.index,
                step,
                fence=lambda: self._fence(one),
                pace=self.pace,
                trusted=self._trusted,
                parts=one.parts,
                lacks=one.waits_for,
                wait_s=self.processes.timeout_s,
            )
            info = source.info(step)
        if done.lacks:
            text = f"{done.path}: the parts of processes {done.lacks} have not come"
            raise CheckpointTimeout(text, missing=done.lacks)
        seconds = time.monotonic() - start_s
        # Else the time went to what was found there, or to the limit, which a preemption lifts.
        if done.sent_bytes > done.found_bytes and self.pace.max_bytes_per_s is None:
            self._bytes_per_s = done.sent_bytes / max(seconds, 1e-9)
        if self.processes.index == 0:
            sent = f"sent {done.sent_bytes} bytes in {seconds:.2f} s, found {done.found_bytes}"
            logger.info("uploaded %s: %s", done.path, sent)
            if step in source.unknown:  # a policy must not take it for a step without metrics
                info = self.target.index.info(step)
            there = self.target.index.own_steps if not one.is_ours else tuple
            self.target.committed(info, stay=lambda: {*stay(), *there()})

    def note_begun(self, one: Upload) -> None:
        """Remembers an attempt that failed, for `clear`; in a store, `Root.tidy` clears up."""
        if self.processes.index == 0 and self.target.index.storage.atomic_rename:
            self.begun[one.step, self.token_of(one)] = math.inf

    def clear(self, wanted: Callable[[], Sequence[tuple[int, str]]], sent_s: float) -> None:
        """Removes what was sent in failed attempts that are not tried again.

        Args:
            wanted: Returns the attempts that wait or are under way.
            sent_s: When the last step that all processes have sent began to wait: they send
                nothing any more that was not wanted then.
        """
        index, may_send = self.target.index, self.source.group.leaders.count > 1
        for one in self.begun.keys() - wanted():
            with suppress(KeyError, CheckpointError, OSError), ExitStack() as again:
                left_s = min(self.begun.pop(one), time.monotonic())  # else another thread has it
                again.callback(self.begun.__setitem__, one, left_s)  # at the next upload
                if not may_send or left_s < sent_s:
                    self.target.owner.check()
                    args = index.storage, index.path(one[0]), one[1]
                    (take_over(*args) or Transaction(*args, False)).abort()
                    again.pop_all()

    def refuse(self, one: Upload, error: Exception) -> None:
        """Lets process 0 know that the part of this process will not come."""
        storage, token = self.target.index.storage, self.token_of(one)
        with suppress(CheckpointError, OSError):
            if token:
                work = commit_of(storage, self.target.index.path(one.step)).work(token)
                refuse(storage, work, self.processes.index, error)

    def open_target(self, step: Callable[[], Saved], *, waits: bool = False) -> None:
        """Opens a directory that could not be reached before, unless the run went on without us.

        Args:
            step: Returns the step to commit there.
            waits: Whether another job saved the step, which then waits until no other job runs.
        """
        source, target, owner = self.source.index, self.target, self.target.owner
        if owner.token and owner.is_known and not waits:
            return
        newest = newest_saved(target.index)
        # An older step may also follow a newer step of this job, to which it led.
        is_ours = newest is not None and newest.step in (self.newest, self.newest_direct)
        leads = newest is None or newest.led_to(one := step()) or (is_ours and one.led_to(newest))
        if newest is not None and not leads:
            raise SaveFailed(
                f"{target.index.root}: step {newest.step} there was saved by another job, while "
                "this one could not reach the directory. Nothing was written there. Stop this job; "
                f"its steps are in {source.root}."
            )
        target.opening.open_late(self.processes.timeout_s)
        if waits and not owner.token:
            busy = f"{target.index.root} belongs to a running job: {owner.who()}"
            raise StoreError(busy, code=errno.EBUSY)
        owner.is_known = True

    def _fence(self, one: Upload) -> None:
        # An older step may follow a newer step of ours, but not a newer step of another job.
        is_newest = one.is_ours and one.step > max(self.newest, self.newest_direct)
        self.target.owner.fence(one.step if is_newest else None)


def may_pass(error: BaseException) -> bool:
    """Returns whether a later try may succeed: a storage failed, and nothing refused the step."""
    cause = error.__cause__ if isinstance(error, SaveFailed) and error.__cause__ else error
    # Another file may be missing because the file system of the directory is not mounted now.
    is_about_the_step = isinstance(cause, CorruptCheckpoint | CheckpointNotFound | FileExistsError)
    return isinstance(cause, OSError) and not is_about_the_step
