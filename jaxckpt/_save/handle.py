"""A save in the background, for those who wait for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import final

from jaxckpt._core.check import calling
from jaxckpt._core.threads import MOST_S, Latch
from jaxckpt._save.job import SaveJob
from jaxckpt._save.worker import Failure, Worker
from jaxckpt.errors import CheckpointTimeout
from jaxckpt.types import Timing


@final
class SaveHandle:
    """A save in the background. `result` waits for it and raises its error.

    Attributes:
        path: Directory of the checkpoint.
        timing: Seconds by phase, or None until the commit.
    """

    def __init__(
        self,
        job: SaveJob,
        worker: Worker[SaveHandle],
        wait_durable: Callable[[Callable[[], None], float | None], None] | None = None,
    ) -> None:
        """Returns a handle; the worker calls `attempt`.

        Args:
            wait_durable: Waits until the step is in the run's directory, if it is saved elsewhere
                first; given what waits for that.
        """
        self.path = job.request.path
        self.timing: Timing | None = None
        # The next five are for the manager.
        self.job = job
        self.step = job.request.meter.step
        self.caller = threading.current_thread()
        self.error: BaseException | None = None
        self.failure: Failure | None = None  # the same, or of later work
        self._worker, self._wait_durable = worker, wait_durable
        self._ended = Latch()
        self._on_end: list[Callable[[SaveHandle], object]] | None = []  # None once they are called
        self._on_end_lock = threading.Lock()  # guards `_on_end`
        self._process = os.getpid()

    def begin(self, do: Callable[[], object]) -> None:
        """Lets the worker call `do`, which calls `attempt`; an interrupt takes this back."""
        try:
            self.job.queue()
            self._worker.put(self, do)
        except BaseException:
            if self not in self._worker.under_way():
                self.job.leave()
                self.job.request.meter.end()
            raise

    def done(self) -> bool:
        """Returns whether the save has ended, by a commit or an error."""
        return self._ended.is_set

    def result(self, timeout_s: float | None = None) -> None:
        """Waits for the commit. With `local=` that is the local one; see `durable` for the upload.

        Raises:
            CheckpointTimeout: the save continues and has not ended after `timeout_s`; `missing` has
                the processes that it waits for.
            RuntimeError: called by a function that a save calls, such as `on_commit`.
            Any error of `save`, at every call.
        """
        if not self.done():
            self._worker.refuse_own_thread()
        where = ""
        if os.getpid() != self._process:
            # A forked child does not have the saving thread, so waiting there would never end.
            where, timeout_s = " in the parent process, before the fork", 0.0
        if not self._ended.wait(timeout_s):
            missing = () if where else self.waits_for
            who = f" and waits for processes {[*missing]}" if missing else ""
            raise CheckpointTimeout(
                f"{self.path}: the save continues{where}{who}, and has not ended after "
                f"{timeout_s:g} s",
                missing=missing,
            )
        if self.error is not None:
            if self.failure is not None:
                self.failure.hear()
            raise self.error
        self.job.request.meter.raise_error()

    def durable(self, timeout_s: float | None = None) -> None:
        """Waits until the checkpoint is committed in the directory of the run.

        Differs from `result` with `CheckpointManager(local=...)`, which saves a step locally and
        then uploads it. There, all processes must call it; `timeout_s` is for each of the two, and
        by default the limit of the upload is `LocalTier.durable_timeout_s`.

        Raises:
            ValueError: the step stays local, since the policy `save` does not name it.
            CheckpointTimeout: the save or the upload is still under way after `timeout_s`.
            SaveFailed: the upload was given up; the step is still there locally.
        """
        saved, timeout_s = partial(self.result, timeout_s), timeout_s and min(timeout_s, MOST_S)
        return saved() if self._wait_durable is None else self._wait_durable(saved, timeout_s)

    def on_end(self, callback: Callable[[SaveHandle], object]) -> None:
        """Calls a function with this handle when the save has ended, at once if it has.

        In the saving thread, before `result` returns there, which raises the errors of functions.
        The attribute `timing` is None if the save failed.
        """
        with self._on_end_lock:
            if self._on_end is not None:
                self._on_end.append(callback)
                return
        callback(self)

    def cancel(self) -> None:
        """Ends the save without a commit, unless it has been committed.

        Returns at once. `result` then raises the failure, which a manager does not raise again. All
        processes of a job must call it; a save that only some of them cancel fails in all.
        """
        self.job.is_cancelled = True

    def attempt(self) -> bool:
        """Runs the save, keeping its error for `result`; returns whether it was committed."""
        job = self.job
        try:
            self.timing = job.run()
        except BaseException as error:
            self.error = error
            if not (job.is_cancelled or job.skipped or job.request.problem is not None):
                self.failure = Failure(error, self.caller)
        with self._on_end_lock:
            callbacks, self._on_end = self._on_end, None
        for callback in callbacks or ():
            self._call_back(callback)
        self._ended.set()
        return self.timing is not None

    def _call_back(self, callback: Callable[[SaveHandle], object]) -> None:
        try:
            with calling(f"a function given to on_end, after the save of {self.path}"):
                callback(self)
        except BaseException as error:  # even `sys.exit`; `result` raises it
            self.error = self.error or error

    @property
    def waits_for(self) -> tuple[int, ...]:
        """Returns the processes that have not reported their work yet."""
        return self.job.request.meter.waiting_for()

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "failed" if self.error else "committed"
        return f"<SaveHandle {self.path}: {state}>"
