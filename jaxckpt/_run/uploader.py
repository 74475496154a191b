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

import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, final

from jaxckpt._disk.pace import GaveWay
from jaxckpt._run.copies import over_bound
from jaxckpt._run.sender import Sender, Upload, may_pass
from jaxckpt._save import worker
from jaxckpt._save.worker import Failure, hear
from jaxckpt.errors import CheckpointNotFound, CheckpointTimeout, SaveFailed
from jaxckpt.format.run import StepNames
from jaxckpt.multihost import Processes, lead

_MOST_WAITING: Final = 2  # besides the upload under way
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_FIRST_LOOK_S: Final = 0.05  # between looks for a step that process 0 has begun
_LONGEST_LOOK_S: Final = 2.0


@final
class Uploader:
    """The steps on their way from one root to another. Process 0 decides which, and commits."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.timeout_s = sender.timeout_s
        self._processes, self._leads = sender.processes, sender.processes.index == 0
        # Those that have parts of a step, of which process 0 decides when they are sent.
        self._senders: Processes = sender.source.group.leaders
        self._taken = set[tuple[int, str]]()  # steps, with tokens, whose upload has begun here
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()  # guards all below
        self._changed = threading.Condition(self._lock)
        self._waiting: list[Upload] = []
        self._current: Upload | None = None
        self._failures: list[Failure] = []
        self._given_up: list[int] = []  # steps whose upload ended with an error
        self._pause_s = 0.0
        self._is_stopped = False
        self._urgent: int | None = None  # the step for which others give way
        self._report, self._root = sender.source.index.report, sender.target.index.root

    # --- in the threads of the caller and of the saves -------------------------------------------

    def expect(self, step: int, *, is_ours: bool = True) -> Upload:
        """Returns the upload of a step that is being saved locally."""
        index = self.sender.target.index
        # Listing the root would wait for the store.
        path = f"{index.root}/{(index.naming or StepNames()).of(step)}"
        return Upload(step, path, is_ours=is_ours)

    def hurry(self, step: int) -> None:
        """Lets an older upload give way to a step, as soon as that is committed locally."""
        self._urgent = step

    def put(self, one: Upload) -> None:
        """Adds a step that is committed locally."""
        one.since_s = time.monotonic()
        with self._lock:
            self._waiting.append(one)
            self._drop_oldest()
            if one.step == self._urgent:
                self.sender.pace.ends.set()
        self._begin()

    def attempts(self) -> list[tuple[int, str]]:
        """Returns the steps that are not uploaded yet, each with its token; "" if unknown."""
        found = sorted(self.under_way(), key=lambda one: one.step)
        return [(one.step, self.sender.token_of(one)) for one in found]

    def follow(self, attempts: Iterable[tuple[int, str]]) -> None:
        """Lets a process other than 0 send its parts of these steps, once they have begun.

        Process 0 tells the tokens: a process that has lost its part refuses it by them.
        """
        if self._senders.index == 0:
            return
        steps = dict(attempts)
        with self._lock:
            self._taken.intersection_update(steps.items())
            left = {one.step: one for one in self._waiting}
            new = [step for step, token in steps.items() if (step, token) not in self._taken]
            self._waiting = [left.get(step) or self.expect(step, is_ours=False) for step in new]
            for one in self._waiting:
                one.token = one.token or steps[one.step]
            waiting = [*self._waiting]
        for one in waiting:
            self.sender.token_of(one)
        self._begin()

    def _begin(self) -> None:
        """Begins to work, unless that is under way or not needed."""
        with self._lock:
            self._changed.notify_all()
            starts = self._thread is None and bool(self._waiting)
            if starts:
                self._thread = threading.Thread()  # no other caller starts one
        if starts:
            worker.start(self, self._work, f"jaxckpt-upload {self._root}")

    def note_committed(self, one: Upload) -> None:
        """Records a step that was saved in the directory itself."""
        with self._lock:
            newest = self.sender.newest
            self.sender.newest = one.step if newest is None else max(one.step, newest)
            self._end(one, None)

    def resume(self, step: int) -> None:
        """Adds a local step that an earlier job did not upload; called in every process."""
        if self._leads:
            self.put(self.expect(step, is_ours=False))
        with self._lock:
            self._taken = {one for one in self._taken if one[0] != step}
        self.follow([(step, ""), *self.attempts()])

    def _drop_oldest(self, most: int = _MOST_WAITING) -> None:
        bound = most if self._leads else len(self._waiting)  # process 0 decides
        gone = over_bound([one.step for one in self._waiting], most=bound)
        for one in [one for one in self._waiting if one.step in gone]:
            self._waiting.remove(one)
            why = f"{one.path} was not uploaded: newer steps wait for a slow store"
            self._report(f"{why}. Step {one.step} stays local while it is kept there")
            self._end(one, SaveFailed(why))

    # --- in any thread ---------------------------------------------------------------------------

    def give_way(self) -> None:
        """Drops the waiting uploads, so that the local root may delete their steps."""
        with self._lock:
            self._drop_oldest(most=0)

    def steps(self) -> list[int]:
        """Returns the steps that are not uploaded yet, the newest last."""
        return sorted(one.step for one in self.under_way())

    def under_way(self) -> Sequence[Upload]:
        """Returns the uploads that are waiting or under way."""
        with self._lock:
            return [*self._waiting, *([self._current] if self._current is not None else [])]

    def take_errors(self, waited_for: Sequence[Upload] = ()) -> list[BaseException]:
        """Returns the errors that this thread has not raised, as `Saver.take_errors` does."""
        with self._lock:
            late = [one.failure for one in waited_for if one.failure is not None]
            return hear(self._failures, late)

    def wait_for(self, one: Upload, timeout_s: float | None = None) -> None:
        """Waits until a step is committed in the directory, alike in all processes.

        Raises:
            CheckpointTimeout: it is not, after `timeout_s`; the upload continues.
            Any error of the upload.
        """
        self.refuse_own_thread()
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        name, end_s = f"upload {one.path}", limit_s + self.timeout_s
        lead(self._processes, name, partial(one.wait, limit_s), where=one.path, timeout_s=end_s)

    def finish(self, timeout_s: float | None = None) -> None:
        """Waits until everything is uploaded or given up.

        Raises:
            CheckpointTimeout: some steps are not, after `timeout_s`.
            RuntimeError: a function that the uploading thread calls waits for it.
        """
        self.refuse_own_thread()
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        if self._is_stopped:
            limit_s = 0.0
        with self._lock:
            if self._changed.wait_for(lambda: not self.under_way(), limit_s):
                return
        raise CheckpointTimeout(self._left(self.steps(), f" after {limit_s:g} s"))

    def _left(self, steps: Sequence[int], when: str = "") -> str:
        """Returns which steps are not uploaded, and what to do about it."""
        source, target = self.sender.source.index.root, self._root
        hosts = "on each host, this last: " if self._senders.count > 1 else ""
        later = f"To upload them later: {hosts}jaxckpt upload {source} {target}"
        return f"{target}: steps {steps} are not uploaded{when}; they are in {source}. {later}"

    def is_own_thread(self) -> bool:
        """Returns whether the uploading thread calls."""
        return threading.current_thread() is self._thread

    def refuse_own_thread(self) -> None:
        """Raises RuntimeError in the uploading thread, which would wait for itself."""
        if self.is_own_thread():
            raise RuntimeError(f"{self._root}: an upload cannot wait for itself")

    def stop(self) -> None:
        """Waits until everything is uploaded, for the last time."""

        def finish() -> None:
            self.finish()
            newest = self.sender.newest
            if left := [n for n in self._given_up if newest is None or n > newest]:
                self._report(self._left(left))

        where, limit_s = self._root, self.timeout_s + _LONGEST_PAUSE_S
        try:  # the others send their parts while they wait
            lead(self._senders, f"uploads {where}/end", finish, where=where, timeout_s=limit_s)
        finally:
            with self._lock:
                self._is_stopped = True
                self._changed.notify_all()
        if not self._failures:
            worker.forget(self)

    # --- in the thread ---------------------------------------------------------------------------

    def _work(self) -> None:
        self._thread = threading.current_thread()
        while (one := self._next()) is not None:
            try:
                self.sender.send(one, self.steps)
            except BaseException as error:
                self._again_or_end(one, error)
            else:
                self._pause_s = 0.0
                self.sender.target.reach.answered()
                self.note_committed(one)

    def _next(self) -> Upload | None:
        """Waits out the pause after an error; returns the newest step that may be sent."""
        until_s, look_s = time.monotonic() + self._pause_s, _FIRST_LOOK_S
        with self._lock:
            self._changed.wait_for(lambda: self._is_stopped, max(0.0, until_s - time.monotonic()))
        while True:
            waiting = sorted(self._waiting, key=lambda one: -one.step)
            ready = next((x for x in waiting if self._leads or self.sender.has_begun(x)), None)
            with self._lock:
                if not self._waiting or self._is_stopped:
                    self._thread = None
                    return None
                if ready in self._waiting:
                    self._current = ready
                    self._waiting.remove(ready)
                    self._taken.add((ready.step, ready.token))
                    self.sender.pace.ends.clear()
                    return ready
                self._changed.wait(look_s)
            look_s = min(2 * look_s, _LONGEST_LOOK_S)

    def _again_or_end(self, one: Upload, error: BaseException) -> None:
        waited_s = time.monotonic() - one.since_s
        gave_way = isinstance(error, GaveWay)
        if not (gave_way or may_pass(error)) or waited_s > self.timeout_s:
            self._end(one, error)
            return
        self.sender.source.index.warn(f"{one.path} is not uploaded yet, and tried again: {error}")
        with self._lock:
            longer_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
            self._pause_s = 0.0 if gave_way else longer_s
            self._current = None
            self._taken.discard((one.step, one.token))
            self._waiting.append(one)
            self._drop_oldest()
            self._changed.notify_all()

    def _end(self, one: Upload, error: BaseException | None) -> None:
        # If a store failed, the next job tries again: it must not find the part refused.
        if not self._leads and isinstance(error, Exception) and not may_pass(error):
            self.sender.refuse(one, error)
        with self._lock:
            is_current = one is self._current
            one.error = error
            was_deleted = isinstance(error, CheckpointNotFound)
            left = ""
            if error is not None and is_current and may_pass(error):
                left = self._left([one.step])
                error.add_note(left)
                self._given_up.append(one.step)
            if error is not None and (was_deleted or not one.is_ours):
                self._report(f"{one.path} was not uploaded: {error}. {left}".rstrip())
            elif error is not None and is_current:
                one.failure = Failure(error, one.caller)
                self._failures.append(one.failure)
            if is_current:
                self._current = None
            one.ended.set()
            self._changed.notify_all()
