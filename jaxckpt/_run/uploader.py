"""Brings the steps that a run saved locally to its directory, in one background thread.

    wait      for a local commit of a step that is due there; the newest step goes first
    upload    its finished files, and commit them, see `upload`
    delete    steps that the policy of the directory does not keep
    again     after an error that may pass, until `timeout_s` after the local commit

Training never waits for it: the queue is bounded, and what no longer fits is dropped and reported.

Where each host has a disk of its own, each process sends its part by itself. Process 0 chooses the
step, by beginning it in the directory, where the others look for it. There it also waits for their
parts. After each local commit it tells them which steps are not uploaded yet.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from jaxckpt._disk.commit import commit_of
from jaxckpt._disk.find import find
from jaxckpt._disk.pace import GaveWay, Pace
from jaxckpt._disk.transaction import has_begun
from jaxckpt._run.copies import over_bound
from jaxckpt._run.index import newest_saved
from jaxckpt._run.root import Root
from jaxckpt._run.shares import refuse
from jaxckpt._run.upload import upload, upload_token
from jaxckpt._save import worker
from jaxckpt._save.worker import Failure, hear
from jaxckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    CheckpointTimeout,
    CorruptCheckpoint,
    SaveFailed,
)
from jaxckpt.format.run import StepNames
from jaxckpt.multihost import Processes, lead

_logger = logging.getLogger("jaxckpt")

_MOST_WAITING: Final = 2  # besides the upload under way
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_FIRST_LOOK_S: Final = 0.05  # between looks for a step that process 0 has begun
_LONGEST_LOOK_S: Final = 2.0


@dataclass(slots=True, eq=False)
class Upload:
    """One step on its way to the directory of the run."""

    step: int
    path: str  # there
    is_ours: bool = True  # whether this job saved it, and wants to know of errors
    since_s: float = field(default_factory=time.monotonic)  # when it was committed locally
    token: str = ""  # of the attempts, once read; the record may be lost later
    parts: dict[int, bytes] = field(default_factory=dict)  # of the other processes
    caller: threading.Thread = field(default_factory=threading.current_thread)
    error: BaseException | None = None
    failure: Failure | None = None  # the same, unless it is only reported
    ended: threading.Event = field(default_factory=threading.Event)


@final
class Uploader:
    """The steps on their way from one root to another. Process 0 decides which, and commits."""

    def __init__(
        self,
        roots: Sequence[Root],  # where its steps are, and where they go
        processes: Processes,
        *,
        max_bytes_per_s: float | None,
        timeout_s: float,
    ) -> None:
        self.source, self.target = source, target = roots
        self.processes = processes
        # Those that have parts of a step, of which process 0 decides when they are sent.
        self._senders: Processes = source.group.leaders
        self.leads = processes.index == 0
        self._taken: set[int] = set()  # steps whose upload has begun here
        self._pace = Pace(max_bytes_per_s)
        shares = target.index.storage.server_copies or target.keep.keeps_two
        self._trusted: dict[str, int] | None = {} if shares else None
        self.timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # guards all below
        self._waiting: list[Upload] = []
        self._current: Upload | None = None
        self._failures: list[Failure] = []
        self._given_up: list[int] = []  # steps whose upload ended with an error
        self._pause_s = 0.0
        self._is_stopped = False
        self._urgent: int | None = None  # the step for which others give way
        self._bytes_per_s: float | None = None  # of the last upload
        self.newest: int | None = (
            None  # that this process sent; once process 0 has, it is committed
        )
        self.newest_direct: int | None = None  # that it saves or has saved in the directory itself

    # --- in the threads of the caller and of the saves -------------------------------------------

    def expect(self, step: int, *, is_ours: bool = True) -> Upload:
        """Returns the upload of a step that is being saved locally."""
        index = self.target.index
        # Listing the root would wait for the store.
        path = f"{index.root}/{(index.naming or StepNames()).of(step)}"
        return Upload(step, path, is_ours=is_ours)

    def hurry(self, step: int) -> None:
        """Lets an older upload give way to a step, as soon as that is committed locally."""
        self._urgent = step

    def put(self, one: Upload) -> None:
        """Adds a step that is committed locally."""
        one.since_s = time.monotonic()
        with self._changed:
            self._waiting.append(one)
            self._drop_oldest()
            if one.step == self._urgent:
                self._pace.ends.set()
        self._begin()

    def attempts(self) -> list[tuple[int, str]]:
        """Returns the steps that are not uploaded yet, each with its token; "" if unknown."""
        found = sorted(self.under_way(), key=lambda one: one.step)
        self._read_tokens(found)
        return [(one.step, one.token) for one in found]

    def _read_tokens(self, some: Iterable[Upload]) -> None:
        for one in some:
            with contextlib.suppress(CheckpointError, OSError):  # reported when it is sent
                self._token_of(one)

    def follow(self, attempts: Iterable[tuple[int, str]]) -> None:
        """Lets a process other than 0 send its parts of these steps, once they have begun.

        Process 0 tells the tokens: a process that has lost its part refuses it by them.
        """
        if self._senders.index == 0:
            return
        steps = dict(attempts)
        with self._changed:
            self._taken.intersection_update(steps)
            left = {one.step: one for one in self._waiting}
            new = [step for step in steps if step not in self._taken]
            self._waiting = [left.get(step) or self.expect(step, is_ours=False) for step in new]
            for one in self._waiting:
                one.token = one.token or steps[one.step]
            waiting = [*self._waiting]
        self._read_tokens(waiting)
        self._begin()

    def _begin(self) -> None:
        """Begins to work, unless that is under way or not needed."""
        with self._changed:
            self._changed.notify_all()
            starts = self._thread is None and bool(self._waiting)
            if starts:
                self._thread = threading.Thread()  # no other caller starts one
        if starts:
            worker.start(self, self._work, f"jaxckpt-upload {self.target.index.root}")

    def note_committed(self, one: Upload) -> None:
        """Records a step that was saved in the directory itself."""
        with self._changed:
            self.newest = max(one.step, -1 if self.newest is None else self.newest)
            self._end(one, None)

    def resume(self, step: int) -> None:
        """Adds a local step that an earlier job did not upload; called in every process."""
        if self.leads:
            self.put(self.expect(step, is_ours=False))
        self._taken.discard(step)
        self.follow([(step, ""), *self.attempts()])

    def _drop_oldest(self, most: int = _MOST_WAITING) -> None:
        bound = most if self.leads else len(self._waiting)  # process 0 decides
        gone = over_bound([one.step for one in self._waiting], most=bound)
        for one in [one for one in self._waiting if one.step in gone]:
            self._waiting.remove(one)
            why = f"{one.path} was not uploaded: newer steps wait for a slow store"
            self.source.index.report(f"{why}. Step {one.step} stays local while it is kept there")
            self._end(one, SaveFailed(why))

    # --- in any thread ---------------------------------------------------------------------------

    def give_way(self) -> None:
        """Drops the waiting uploads, so that the local root may delete their steps."""
        with self._changed:
            self._drop_oldest(most=0)

    def steps(self) -> list[int]:
        """Returns the steps that are not uploaded yet, the newest last."""
        return sorted(one.step for one in self.under_way())

    def under_way(self) -> Sequence[Upload]:
        """Returns the uploads that are waiting or under way."""
        with self._changed:
            return [*self._waiting, *([self._current] if self._current is not None else [])]

    def take_errors(self, waited_for: Sequence[Upload] = ()) -> list[BaseException]:
        """Returns the errors that this thread has not raised, as `Saver.take_errors` does."""
        with self._changed:
            late = [one.failure for one in waited_for if one.failure is not None]
            return hear(self._failures, late)

    def wait_for(self, one: Upload, timeout_s: float | None = None) -> None:
        """Waits until a step is committed in the directory, alike in all processes.

        Raises:
            CheckpointTimeout: it is not, after `timeout_s`; the upload continues.
            Any error of the upload.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s

        def wait() -> None:
            if not one.ended.wait(limit_s):
                raise CheckpointTimeout(
                    f"{one.path}: the upload continues and has not ended after {limit_s:g} s"
                )
            if one.error is not None:
                if one.failure is not None:
                    one.failure.hear()
                raise one.error

        name = f"upload {one.path}"
        lead(self.processes, name, wait, where=one.path, timeout_s=limit_s + self.timeout_s)

    def seconds_for(self, size_bytes: int) -> float | None:
        """Returns how long an upload takes at the last upload's speed; None before the first."""
        return None if self._bytes_per_s is None else size_bytes / self._bytes_per_s

    def finish(self, timeout_s: float | None = None) -> None:
        """Waits until everything is uploaded or given up.

        Raises:
            CheckpointTimeout: some steps are not, after `timeout_s`.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        if self._is_stopped:
            limit_s = 0.0
        with self._changed:
            self._changed.wait_for(lambda: not self.under_way(), limit_s)
            if not self.under_way():
                return
        raise CheckpointTimeout(self._left(self.steps(), f" after {limit_s:g} s"))

    def _left(self, steps: Sequence[int], when: str = "") -> str:
        """Returns which steps are not uploaded, and what to do about it."""
        source, target = self.source.index.root, self.target.index.root
        hosts = "on each host, this last: " if self._senders.count > 1 else ""
        later = f"To upload them later: {hosts}jaxckpt upload {source} {target}"
        return f"{target}: steps {steps} are not uploaded{when}; they are in {source}. {later}"

    def is_own_thread(self) -> bool:
        """Returns whether the uploading thread calls."""
        return threading.current_thread() is self._thread

    def refuse_own_thread(self) -> None:
        """Raises RuntimeError in the uploading thread, which would wait for itself."""
        if self.is_own_thread():
            raise RuntimeError(f"{self.target.index.root}: an upload cannot wait for itself")

    def stop(self) -> None:
        """Waits until everything is uploaded, for the last time."""

        def finish() -> None:
            self.finish()
            if left := [n for n in self._given_up if self.newest is None or n > self.newest]:
                self.source.index.report(self._left(left))

        where, limit_s = self.target.index.root, self.timeout_s + _LONGEST_PAUSE_S
        try:  # the others send their parts while they wait
            lead(self._senders, f"uploads {where}/end", finish, where=where, timeout_s=limit_s)
        finally:
            with self._changed:
                self._is_stopped = True
                self._changed.notify_all()
        if not self._failures:
            worker.forget(self)

    # --- in the thread ---------------------------------------------------------------------------

    def _work(self) -> None:
        self._thread = threading.current_thread()
        while (one := self._next()) is not None:
            try:
                self._send(one)
            except BaseException as error:
                self._again_or_end(one, error)
            else:
                self._pause_s = 0.0
                self.target.reach.answered()
                self.note_committed(one)

    def _next(self) -> Upload | None:
        """Waits out the pause after an error; returns the newest step that may be sent."""
        until_s, look_s = time.monotonic() + self._pause_s, _FIRST_LOOK_S
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped, max(0.0, until_s - time.monotonic()))
        while True:
            waiting = sorted(self._waiting, key=lambda one: -one.step)
            ready = next((x for x in waiting if self.leads or self._has_begun(x)), None)
            with self._changed:
                if not self._waiting or self._is_stopped:
                    self._thread = None
                    return None
                if ready in self._waiting:
                    self._current = ready
                    self._waiting.remove(ready)
                    self._taken.add(ready.step)
                    self._pace.ends.clear()
                    return ready
                self._changed.wait(look_s)
            look_s = min(2 * look_s, _LONGEST_LOOK_S)

    def _has_begun(self, one: Upload) -> bool:
        """Returns whether process 0 has begun to upload a step."""
        with contextlib.suppress(CheckpointError, OSError):
            return has_begun(self.target.index.storage, *self._attempt_of(one))
        return False

    def _attempt_of(self, one: Upload) -> tuple[str, str]:
        """Returns the path and the token of the attempt to upload a step."""
        return self.target.index.path(one.step), self._token_of(one)

    def _token_of(self, one: Upload) -> str:
        source = self.source.index
        one.token = one.token or upload_token(find(source.storage, source.path(one.step)))
        return one.token

    def _send(self, one: Upload) -> None:
        source, target, step = self.source, self.target, one.step
        if self.leads:
            self._open_target(step)
        start_s = time.monotonic()
        with source.leases.protect(step):
            done = upload(
                source.index,
                target.index,
                step,
                fence=self._fence(one),
                pace=self._pace,
                trusted=self._trusted,
                parts=one.parts,
                wait_s=self.timeout_s,
            )
            info = source.index.info(step)
        if done.lacks:
            text = f"{done.path}: the parts of processes {done.lacks} have not come"
            raise CheckpointTimeout(text, missing=done.lacks)
        seconds = time.monotonic() - start_s
        if done.sent_bytes:
            self._bytes_per_s = done.sent_bytes / max(seconds, 1e-9)
        if self.leads:
            sent = f"sent {done.sent_bytes} bytes in {seconds:.2f} s, found {done.found_bytes}"
            _logger.info("uploaded %s: %s", done.path, sent)
            target.committed(info, stay=self.steps)

    def _open_target(self, step: int) -> None:
        """Opens a directory that could not be reached before, unless the run went on without us."""
        source, target = self.source.index, self.target
        if target.owner.token:
            return
        newest = newest_saved(target.index)
        if newest is not None and not newest.led_to(source.saved(step)):
            raise SaveFailed(
                f"{target.index.root}: step {newest.step} there was saved by another job, while "
                "this one could not reach the directory. Nothing was uploaded. Stop this job; its "
                f"steps are in {source.root}."
            )
        target.opening.open_late(self.timeout_s)

    def _fence(self, one: Upload) -> Callable[[], None]:
        def check() -> None:
            # An older step may follow a newer step of ours, but not a newer step of another job.
            ours = (self.newest, self.newest_direct)
            is_newest = all(step is None or one.step > step for step in ours)
            self.target.owner.fence(one.step if is_newest else None)

        return check

    def _again_or_end(self, one: Upload, error: BaseException) -> None:
        waited_s = time.monotonic() - one.since_s
        gave_way = isinstance(error, GaveWay)
        if not (gave_way or _may_pass(error)) or waited_s > self.timeout_s:
            self._end(one, error)
            return
        self.source.index.warn(f"{one.path} is not uploaded yet, and tried again: {error}")
        with self._changed:
            self._pause_s = (
                0.0 if gave_way else min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
            )
            self._current = None
            self._taken.discard(one.step)
            self._waiting.append(one)
            self._drop_oldest()
            self._changed.notify_all()

    def _end(self, one: Upload, error: BaseException | None) -> None:
        # If a store failed, the next job tries again: it must not find the part refused.
        if not self.leads and isinstance(error, Exception) and not _may_pass(error):
            self._refuse(one, error)
        with self._changed:
            is_current = one is self._current
            one.error = error
            was_deleted = isinstance(error, CheckpointNotFound)
            left = ""
            if error is not None and is_current and _may_pass(error):
                left = self._left([one.step])
                error.add_note(left)
                self._given_up.append(one.step)
            if error is not None and (was_deleted or not one.is_ours):
                self.source.index.report(f"{one.path} was not uploaded: {error}. {left}".rstrip())
            elif error is not None and is_current:
                one.failure = Failure(error, one.caller)
                self._failures.append(one.failure)
            if is_current:
                self._current = None
            one.ended.set()
            self._changed.notify_all()

    def _refuse(self, one: Upload, error: Exception) -> None:
        """Lets process 0 know that the part of this process will not come."""
        storage = self.target.index.storage
        with contextlib.suppress(CheckpointError, OSError):
            path, token = self._attempt_of(one)
            refuse(storage, commit_of(storage, path).work(token), self.processes.index, error)


def _may_pass(error: BaseException) -> bool:
    """Returns whether a later try may succeed: a storage failed, and nothing refused the step."""
    cause = error.__cause__ if isinstance(error, SaveFailed) and error.__cause__ else error
    is_about_the_step = isinstance(cause, CorruptCheckpoint | FileNotFoundError | FileExistsError)
    return isinstance(cause, OSError) and not is_about_the_step
