"""Brings the steps that a run saved locally to its directory, in one background thread.

    wait      for a local commit of a step that is due there; the newest step goes first
    upload    its finished files, and commit them, see `upload`
    delete    steps that the policy of the directory does not keep
    again     after an error that may pass, until `timeout_s` after the local commit

Training never waits for it: the queue is bounded, and what no longer fits is dropped and reported.

Where each host has a disk of its own, all processes send together. Process 0 chooses the step, and
announces it where they meet anyway: after a local commit, or when all wait for uploads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, final

from jaxckpt._disk.find import find
from jaxckpt._run.copies import over_bound
from jaxckpt._run.index import newest_saved
from jaxckpt._run.root import Root
from jaxckpt._run.shares import upload_request
from jaxckpt._run.upload import GaveWay, Pace, already_there, checked, copy_run_metadata, upload
from jaxckpt._save import worker
from jaxckpt._save.job import SaveJob
from jaxckpt._save.worker import Failure, hear
from jaxckpt.errors import CheckpointNotFound, CheckpointTimeout, CorruptCheckpoint, SaveFailed
from jaxckpt.format.run import StepNames
from jaxckpt.multihost import Json, Processes, lead
from jaxckpt.types import StepInfo

_logger = logging.getLogger("jaxckpt")

_MOST_WAITING: Final = 2  # besides the upload under way
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0


@dataclass(slots=True, eq=False)
class Upload:
    """One step on its way to the directory of the run."""

    step: int
    path: str  # there
    number: int = 0  # of this try, where all processes upload together
    is_ours: bool = True  # whether this job saved it, and wants to know of errors
    metrics: dict[str, object] = field(default_factory=dict)
    since_s: float = 0.0  # when it was committed locally
    caller: threading.Thread = field(default_factory=threading.current_thread)
    error: BaseException | None = None
    failure: Failure | None = None  # the same, unless it is only reported
    ended: threading.Event = field(default_factory=threading.Event)


@final
class Uploads:
    """The steps on their way from one root to another. Process 0 sends them, or decides when."""

    def __init__(
        self,
        source: Root,
        target: Root,
        processes: Processes,
        *,
        max_bytes_per_s: float | None,
        timeout_s: float,
    ) -> None:
        self._source, self._target, self._processes = source, target, processes
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
        self._next_s = 0.0  # when the next upload may begin, of all processes together
        self._is_stopped = False
        self._started = 0  # uploads of all processes together
        self._urgent: int | None = None  # the step for which others give way
        self._bytes_per_s: float | None = None  # of the last upload
        self.newest: int | None = None  # that this process has brought to the directory
        self.newest_direct: int | None = None  # that it saves or has saved in the directory itself
        source.needed = self.steps

    @property
    def leads(self) -> bool:
        """Whether this process decides what is uploaded."""
        return self._processes.index == 0

    # --- in the threads of the caller and of the saves -------------------------------------------

    def expect(self, step: int) -> Upload:
        """Returns the upload of a step that is being saved locally."""
        index = self._target.index
        # Listing the root would wait for the store.
        return Upload(step, f"{index.root}/{(index.naming or StepNames()).of(step)}")

    def hurry(self, step: int) -> None:
        """Lets an older upload give way to a step, as soon as that is committed locally.

        Not where all processes upload together: they would have to agree on it.
        """
        self._urgent = step

    def put(self, one: Upload) -> None:
        """Adds a step that is committed locally."""
        one.since_s = time.monotonic()
        with self._changed:
            self._waiting.append(one)
            self._drop_oldest()
            if one.step == self._urgent and not self._source.own:
                self._pace.ends.set()
            self._changed.notify_all()
            starts = self._thread is None and not self._source.own
            if starts:
                self._thread = threading.Thread()  # no other caller starts one
        if starts:
            worker.start(self, self._work, f"jaxckpt-upload {self._target.index.root}")

    def note_committed(self, one: Upload) -> None:
        """Records a step that was saved in the directory itself."""
        with self._changed:
            self.newest = max(one.step, -1 if self.newest is None else self.newest)
            self._end(one, None)

    def resume(self, step: int) -> None:
        """Adds a local step that an earlier job did not upload."""
        one = self.expect(step)
        one.is_ours = False
        self.put(one)

    def _drop_oldest(self, most: int = _MOST_WAITING) -> None:
        gone = over_bound([one.step for one in self._waiting], most=most)
        for one in [one for one in self._waiting if one.step in gone]:
            self._waiting.remove(one)
            why = f"{one.path} was not uploaded: newer steps wait for a slow store"
            self._source.index.report(f"{why}. Step {one.step} stays local while it is kept there")
            self._end(one, SaveFailed(why))

    # --- where all processes upload together -----------------------------------------------------

    def turn(self) -> dict[str, Json]:
        """Returns the waiting steps, and the step to upload now, if any; only in process 0."""
        with self._changed:
            chosen = None
            if self._waiting and self._current is None and time.monotonic() >= self._next_s:
                chosen = self._current = max(self._waiting, key=lambda one: one.step)
                self._waiting.remove(chosen)
                self._started += 1
                chosen.number = self._started
            return {
                "waiting": sorted(one.step for one in self._waiting),
                "next": None if chosen is None else [chosen.step, chosen.number],
            }

    def take_turn(self, told: Any) -> None:
        """Follows the decision of process 0; begins to upload in the background."""
        if not self.leads:
            with self._changed:
                self._waiting = [self.expect(step) for step in told["waiting"]]
                if told["next"] is not None:
                    step, number = told["next"]
                    self._current = replace(self.expect(step), number=number)
        if told["next"] is not None:
            work = partial(self._work_once, self._thread)
            worker.start(self, work, f"jaxckpt-upload {self._target.index.root}")

    def drive(self, over: Callable[[], bool], timeout_s: float) -> None:
        """Uploads in all processes until nothing waits, or it is `over` for process 0."""
        place, deadline_s = self._target.index.root, time.monotonic() + timeout_s

        def turn() -> Json:
            with self._changed:
                left_s = deadline_s - time.monotonic()
                self._changed.wait_for(lambda: self._current is None or over(), max(0.0, left_s))
                if over() or self._current is not None or not self._waiting:
                    return None
            pause_s = self._next_s - time.monotonic()
            time.sleep(max(0.0, min(pause_s, deadline_s - time.monotonic())))
            return None if time.monotonic() > deadline_s else self.turn()

        name, most_s = f"uploads {place}/turn", timeout_s + self.timeout_s
        while (
            told := lead(self._processes, name, turn, place=place, timeout_s=most_s)
        ) is not None:
            self.take_turn(told)
        if (thread := self._thread) is not None and not self.leads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _work_once(self, earlier: threading.Thread | None) -> None:
        one, self._thread = self._current, threading.current_thread()
        if earlier is not None:  # it has ended in process 0; the store may not answer here
            earlier.join()
        assert one is not None
        self._attempt(one)
        if self._thread is threading.current_thread():
            self._thread = None

    def _send_together(self, one: Upload) -> None:
        """Uploads the parts of all processes; either all return or all raise."""
        source, target, step = self._source, self._target, one.step
        name, place = f"upload {one.path}/{one.number}", one.path

        def is_there() -> bool:
            self._open_target(step)
            if not target.index.is_committed(step):
                return False
            found = find(source.index.storage, source.index.check_step(step))
            already_there(found, checked(found), target.index, step)
            return True

        if lead(self._processes, f"{name}/there", is_there, place=place, timeout_s=self.timeout_s):
            return
        with source.leases.hold(step):
            request = upload_request(
                source.index,
                target.index,
                step,
                self._processes,
                name=name,
                fence=self._fence(one),
                pace=self._pace,
                timeout_s=self.timeout_s,
            )
            job = SaveJob(request)
            timing = job.run()
        if self._processes.index == 0:
            copy_run_metadata(source.index, target.index)
            self._bytes_per_s = job.size_bytes / max(timing.seconds, 1e-9)
            target.committed(StepInfo(step=step, saved_s=time.time(), metrics=one.metrics))

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
            waiting = self._waiting if self.leads else []  # the others only mirror the queue
            return [*waiting, *([self._current] if self._current is not None else [])]

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
        if self._source.own:
            self.drive(one.ended.is_set, limit_s)
        lead(self._processes, name, wait, place=one.path, timeout_s=limit_s + self.timeout_s)

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
            # Only `drive` and commits begin uploads of all processes together.
            self._changed.wait_for(
                lambda: not (self._current or (self._waiting and not self._source.own)), limit_s
            )
            if not self.under_way():
                return
        raise CheckpointTimeout(self._left(self.steps(), f" after {limit_s:g} s"))

    def _left(self, steps: Sequence[int], when: str = "") -> str:
        """Returns which steps are not uploaded, and what to do about it."""
        source, target = self._source.index.root, self._target.index.root
        later = f"To upload them later: jaxckpt upload {source} {target}"
        if self._source.own:
            later = "The next job on the same hosts uploads the newest"
        return f"{target}: steps {steps} are not uploaded{when}; they are in {source}. {later}"

    def is_own_thread(self) -> bool:
        """Returns whether the uploading thread calls."""
        return threading.current_thread() is self._thread

    def refuse_own_thread(self) -> None:
        """Raises RuntimeError in the uploading thread, which would wait for itself."""
        if self.is_own_thread():
            raise RuntimeError(f"{self._target.index.root}: an upload cannot wait for itself")

    def stop(self) -> None:
        """Waits until everything is uploaded, for the last time."""
        try:
            if self._source.own:
                self.drive(lambda: False, self.timeout_s)
            if self.leads:
                self.finish()
                if left := [n for n in self._given_up if self.newest is None or n > self.newest]:
                    self._source.index.report(self._left(left))
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
            self._attempt(one)

    def _attempt(self, one: Upload) -> None:
        try:
            (self._send_together if self._source.own else self._send)(one)
        except BaseException as error:
            self._again_or_end(one, error)
        else:
            self._pause_s = self._next_s = 0.0
            self._target.reach.answered()
            self.note_committed(one)

    def _next(self) -> Upload | None:
        """Waits out the pause after an error; returns the newest step that waits."""
        until_s = time.monotonic() + self._pause_s
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped, max(0.0, until_s - time.monotonic()))
            if not self._waiting or self._is_stopped:
                self._thread = None
                return None
            self._current = max(self._waiting, key=lambda one: one.step)
            self._waiting.remove(self._current)
            self._pace.ends.clear()
            return self._current

    def _send(self, one: Upload) -> None:
        source, target, step = self._source, self._target, one.step
        self._open_target(step)
        start_s = time.monotonic()
        with source.leases.hold(step):
            fence = self._fence(one)
            done = upload(
                source.index,
                target.index,
                step,
                fence=fence,
                pace=self._pace,
                trusted=self._trusted,
            )
        seconds = time.monotonic() - start_s
        if done.sent_bytes:
            self._bytes_per_s = done.sent_bytes / max(seconds, 1e-9)
        sent = f"sent {done.sent_bytes} bytes in {seconds:.2f} s, found {done.found_bytes}"
        _logger.info("uploaded %s: %s", done.path, sent)
        target.committed(StepInfo(step=step, saved_s=time.time(), metrics=one.metrics))

    def _open_target(self, step: int) -> None:
        """Opens a directory that could not be reached before, unless the run went on without us."""
        source, target = self._source.index, self._target
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
            self._target.owner.fence(one.step if is_newest else None)

        return check

    def _again_or_end(self, one: Upload, error: BaseException) -> None:
        if not self.leads:  # process 0 decides
            with self._changed:
                self._current = None
            return
        waited_s = time.monotonic() - one.since_s
        gave_way = isinstance(error, GaveWay)
        if not (gave_way or _may_pass(error)) or waited_s > self.timeout_s:
            self._end(one, error)
            return
        self._source.index.warn(f"{one.path} is not uploaded yet, and tried again: {error}")
        with self._changed:
            self._pause_s = (
                0.0 if gave_way else min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
            )
            self._next_s = time.monotonic() + self._pause_s
            self._current = None
            self._waiting.append(one)
            self._drop_oldest()
            self._changed.notify_all()

    def _end(self, one: Upload, error: BaseException | None) -> None:
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
                self._source.index.report(f"{one.path} was not uploaded: {error}. {left}".rstrip())
            elif error is not None and is_current:
                one.failure = Failure(error, one.caller)
                self._failures.append(one.failure)
            if is_current:
                self._current = None
            one.ended.set()
            self._changed.notify_all()


def _may_pass(error: BaseException) -> bool:
    """Returns whether a later try may succeed: a storage failed, and nothing refused the step."""
    cause = error.__cause__ if isinstance(error, SaveFailed) and error.__cause__ else error
    is_about_the_step = isinstance(cause, CorruptCheckpoint | FileNotFoundError | FileExistsError)
    return isinstance(cause, OSError) and not is_about_the_step
