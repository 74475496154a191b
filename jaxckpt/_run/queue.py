"""The saves of a run under way: one after the other, in one thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from jaxckpt._save.job import SaveJob
from jaxckpt._save.save import SaveHandle
from jaxckpt.errors import CheckpointTimeout


@dataclass(slots=True, kw_only=True, eq=False)
class Pending:
    """A save that was handed to the thread.

    Attributes:
        metrics: Those of the step, once the job has read them.
        size_bytes: What it holds in memory.
        started_s: When it was called for, by the monotonic clock.
        committed: Whether it is.
        ended: Whether it has, and what comes after it too.
    """

    step: int
    job: SaveJob
    handle: SaveHandle
    metrics: dict[str, Any] = field(default_factory=dict)
    size_bytes: int = 0
    started_s: float = 0.0
    committed: bool = False
    ended: bool = False

    @property
    def refused(self) -> bool:
        """Whether this process only tells the others that it does not save."""
        return self.job.problem is not None


@final
class SaveQueue:
    """Does saves in the order in which they come, and keeps their errors until someone asks."""

    def __init__(self, root: str, after: Callable[[Pending], None]) -> None:
        """Makes a queue.

        Args:
            root: Of the run, for messages.
            after: Is called in the thread after each save that was committed.
        """
        self._root = root
        self._after = after
        self._queue: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # guards the two below, and `ended`
        self._under_way: list[Pending] = []
        self._errors: list[SaveHandle | BaseException] = []

    def put(self, pending: Pending) -> None:
        """Hands a save to the thread."""
        with self._changed:
            self._under_way.append(pending)
        self._queue.put(pending)
        if self._thread is None:
            # A daemon: a manager that nobody closed must not keep the interpreter alive.
            self._thread = threading.Thread(
                target=self._work, name=f"jaxckpt-manager {self._root}", daemon=True
            )
            self._thread.start()

    def under_way(self) -> list[Pending]:
        """The saves that have not ended."""
        with self._changed:
            return list(self._under_way)

    def take_errors(self) -> list[BaseException]:
        """What went wrong and nobody was told of yet."""
        with self._changed:
            errors, self._errors = self._errors, []
        found = [e.take_error() if isinstance(e, SaveHandle) else e for e in errors]
        return [error for error in found if error is not None]

    def is_own_thread(self) -> bool:
        """Whether the thread that saves asks, as what `after` calls does."""
        return threading.current_thread() is self._thread

    def refuse_own_thread(self) -> None:
        """Raises RuntimeError in the thread that saves, which would wait for itself."""
        if self.is_own_thread():
            raise RuntimeError(
                f"{self._root}: on_commit cannot wait for saves, since they wait for it; do this "
                "in the thread that calls `save`"
            )

    def wait(self, pending: Sequence[Pending], timeout_s: float) -> None:
        """Waits until these have ended; CheckpointTimeout if they do not."""
        if pending:
            self.refuse_own_thread()
        with self._changed:
            if not self._changed.wait_for(lambda: all(p.ended for p in pending), timeout_s):
                steps = [one.step for one in pending if not one.ended]
                raise CheckpointTimeout(
                    f"{self._root}: the saves of steps {steps} are still under way after "
                    f"{timeout_s:g} s; they go on"
                )

    def wait_for_room(self, size_bytes: int, budget_bytes: int, timeout_s: float) -> None:
        """Waits until so many bytes fit into the budget beside what is held; alone all fit."""

        def has_room() -> bool:
            held = sum(pending.size_bytes for pending in self._under_way)
            return held == 0 or held + size_bytes <= budget_bytes

        with self._changed:
            if not has_room():
                self.refuse_own_thread()
            if not self._changed.wait_for(has_room, timeout_s):
                steps = [pending.step for pending in self._under_way]
                raise CheckpointTimeout(
                    f"{self._root}: the saves of steps {steps} are still under way after "
                    f"{timeout_s:g} s, and their values leave no room in {budget_bytes=}"
                )

    def stop(self, timeout_s: float) -> None:
        """Waits until all have ended, and ends the thread."""
        pending = self.under_way()
        self._queue.put(None)
        self.wait(pending, timeout_s)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while (pending := self._queue.get()) is not None:
            try:
                self._do(pending)
            except BaseException as error:  # the top of a thread; stored, and raised by a call
                with self._changed:
                    self._errors.append(error)
            with self._changed:
                self._under_way.remove(pending)
                pending.ended = True
                self._changed.notify_all()

    def _do(self, pending: Pending) -> None:
        if pending.handle.run() is None:
            pending.committed = True
            self._after(pending)
        elif not (pending.refused or pending.job.skipped):
            with self._changed:
                self._errors.append(pending.handle)
