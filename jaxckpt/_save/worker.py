"""Threads that save or upload in the background, and what becomes of their saves at each end.

    normal    the thread of a worker ends after the last save, once `idle` has returned; the next
              save starts another thread
    error     it ends no other save; each thread that asks raises it once, see `Failure`
    exit      the program waits for its saves, within the limit of each worker, and does what
              follows the last save of a worker that was not stopped, before functions of
              `atexit` such as JAX's; reports on stderr which failed or did not end; and, if no
              thread has heard of that, leaves with status 1 right after those functions, as a
              thread that returns to an interpreter being finalized can abort the process
    fork      the child lacks the threads and waits for no save of its parent

Saving threads are daemons because the interpreter waits for other threads without a limit.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar, final

from jaxckpt.errors import CheckpointTimeout
from jaxckpt.multihost import raise_first, text_of


@final
class Failure:
    """An error that each thread raises once, until the thread that began the work has raised it.

    Otherwise an evaluation in another thread could raise it first, and the training would go on.
    """

    def __init__(self, error: BaseException, caller: threading.Thread) -> None:
        self.error = error
        self._caller = caller  # began the work
        self.heard: set[threading.Thread] = set()  # that have raised it

    @property
    def is_over(self) -> bool:
        """Returns whether the thread that began the work has raised it."""
        return self._caller in self.heard

    def hear(self) -> list[BaseException]:
        """Returns the error for this thread to raise, or nothing if it has done so."""
        thread = threading.current_thread()
        if thread in self.heard:
            return []
        self.heard.add(thread)
        return [self.error]


class Saving(Protocol):
    """A save, or an upload, under way or waiting for an earlier one."""

    path: str
    caller: threading.Thread
    failure: Failure | None  # set when it has failed

    @property
    def step(self) -> int | None: ...
    @property
    def waits_for(self) -> Sequence[int]: ...  # processes


S = TypeVar("S", bound=Saving)
AGAIN: Final = object()  # returned by a function that saves, to be called again


@final
@dataclass(kw_only=True, eq=False)
class Worker(Generic[S]):
    """Saves in the background, in the order in which saves were put, or that `pick` gives them."""

    name: str  # of its threads
    where: str  # where it saves, for messages
    timeout_s: float | None  # limit of each wait; if None, a wait lasts as long as the saves
    idle: Callable[[], object] = lambda: None  # called in the thread when no save is left
    hurry: Callable[[], object] = lambda: None  # called when nothing trains beside the saves
    last: Callable[[], object] = lambda: None  # called when it is stopped, after the saves
    # Waits in the thread for the save that is next; None if it is stopped before.
    pick: Callable[[], S | None] | None = None
    # Calls a function that waits for the saves, when it is stopped.
    stopping: Callable[[Callable[[], None]], object] = lambda finish: finish()
    late: Callable[[str], str] | None = None  # names the waiting saves, given a time
    refusal: str = (  # in its own thread
        "functions such as on_commit cannot wait for saves, which wait for them; wait in the "
        "thread that calls `save`"
    )
    # Guards all below. Entered by itself: interrupted, `Condition.__enter__` would leave it taken.
    lock: threading.RLock = field(default_factory=threading.RLock)
    changed: threading.Condition = field(init=False)
    current: S | None = None  # that the thread has taken
    is_stopped: bool = False
    _saves: dict[S, Callable[[], object]] = field(default_factory=dict)  # that have not ended
    _failures: list[Failure] = field(default_factory=list)
    _idling: int = 0  # threads that call `idle`, or are about to
    _thread: threading.Thread | None = None  # the latest that saved
    _is_taken: bool = False  # whether a thread takes saves; there is at most one

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)
        _workers.add(self)

    def put(self, handle: S, do: Callable[[], object]) -> None:
        """Adds a save, or none if interrupted. If `do` raises, that is the failure of the save."""
        try:
            with self.lock:
                self._saves[handle] = do
                self.changed.notify_all()
            self._begin()
        except BaseException:
            with self.lock:
                if self.current is not handle:
                    self._saves.pop(handle, None)
            self._begin()  # for another thread, which relied on it
            raise

    def _begin(self) -> None:
        if self._saves and not self._is_taken:
            start(self, self._work, self.name)

    def remove(self, handle: S) -> None:
        """Removes a save that has not begun."""
        with self.lock:
            self._saves.pop(handle, None)
            self.changed.notify_all()

    def under_way(self) -> list[S]:
        """Returns the saves that have not ended, including the work after their commits."""
        with self.lock:
            return [*self._saves]

    def take_errors(self, waited_for: Sequence[S] = ()) -> list[BaseException]:
        """Returns the errors that this thread has not raised; none in a worker's.

        Args:
            waited_for: Saves that this thread has waited for; their failures count even if over.
        """
        late = [handle.failure for handle in waited_for if handle.failure is not None]
        with self.lock:
            if not (self._failures or late) or self.is_own_thread():
                return []
            wanted = [*(one for one in self._failures if not one.is_over), *late]
            errors = [error for one in wanted for error in one.hear()]
            self._failures = [one for one in self._failures if not one.is_over]
            return errors

    def is_own_thread(self) -> bool:
        """Returns whether the saving thread calls, such as from `on_commit`."""
        return threading.current_thread() is self._thread

    def refuse_own_thread(self) -> None:
        """Raises RuntimeError in the saving thread, which would wait for itself."""
        if self.is_own_thread():
            raise RuntimeError(f"{self.where}: {self.refusal}")

    def wait(self, handles: Sequence[S], timeout_s: float | None = None, why: str = "") -> None:
        """Waits until these saves have ended, including the work after their commits.

        Raises:
            CheckpointTimeout: they have not, after `timeout_s`; names the processes that are late.
            RuntimeError: the saving thread would wait for itself.
        """

        def over() -> bool:
            return self._saves.keys().isdisjoint(handles)

        limit_s, started_s = self.timeout_s if timeout_s is None else timeout_s, time.monotonic()
        with self.lock:
            if over():
                return
            self.refuse_own_thread()
            if self.changed.wait_for(over, limit_s):
                return
            raise_first([*self.take_errors(), self._too_late(time.monotonic() - started_s, why)])

    def _too_late(self, waited_s: float, why: str) -> CheckpointTimeout:
        left = [*self._saves]
        missing = sorted({process for one in left for process in one.waits_for})
        who = f", and wait for processes {missing}" if missing else ""
        if self.late is not None:
            text = self.late(f" after {waited_s:.1f} s{who}")
            return CheckpointTimeout(text, missing=missing)
        return CheckpointTimeout(
            f"{self.where}: after {waited_s:.3g} s, the saves of steps "
            f"{[one.step for one in left]} are still under way{why}{who}; they continue. If they "
            "are only slow, raise timeout_s.",
            missing=missing,
        )

    def finish(self) -> None:
        """Waits until all saves have ended, which need no longer spare the network."""
        self.hurry()
        self.wait(self.under_way(), 0.0 if self.is_stopped else None)

    def settle(self, timeout_s: float | None = None) -> None:
        """Waits until `idle` has returned, or the limit is over."""
        if not self.is_own_thread():
            limit_s = self.timeout_s if timeout_s is None else timeout_s
            with self.lock:
                self.changed.wait_for(lambda: not self._idling, limit_s)

    def stop(self) -> None:
        """Waits until all saves have ended, for the last time."""
        try:
            self.stopping(self.finish)
        finally:
            self.last()
            self.settle()  # so that nothing is open any more
            with self.lock:
                self.is_stopped = True  # the end of the program does not wait again
                self.changed.notify_all()
        if not self._failures:
            _known.discard(self)

    def _work(self) -> None:
        caller = threading.current_thread()
        with self.lock:
            if self._is_taken:  # this thread was for a withdrawn save
                return
            self._is_taken, self._thread = True, caller
        handle = self._next()
        while handle is not None:
            caller, again = handle.caller, False
            try:
                again = self._saves[handle]() is AGAIN
            except BaseException as error:  # the next call raises it
                handle.failure = Failure(error, handle.caller)
            handle = self._next(None if again else handle)
        failures = list[Failure]()
        try:
            self.idle()
        except BaseException as error:
            failures.append(Failure(error, caller))
        with self.lock:
            self._failures += failures
            self._idling -= 1
            if self.is_own_thread():
                self._thread = None  # at the end of the program, a caller goes on
            if not (self._saves or self._failures):
                _known.discard(self)
            self.changed.notify_all()

    def _next(self, ended: S | None = None) -> S | None:
        """Removes a save that has ended; returns the next."""
        handle, is_over = None, False
        while True:
            with self.lock:
                self.current = None
                if ended is not None:
                    self._failures += [ended.failure] if ended.failure is not None else []
                    del self._saves[ended]
                self.changed.notify_all()
                handle = handle or (None if self.pick else next(iter(self._saves), None))
                if handle in self._saves or is_over or not self._saves:
                    self.current = handle = handle if handle in self._saves else None
                    self._is_taken = handle is not None
                    self._idling += handle is None
                    return handle
            handle, ended = self.pick and self.pick(), None
            is_over = handle is None and self.is_stopped


# --- the end of the program ------------------------------------------------------------------


_workers: weakref.WeakSet[Worker[Any]] = weakref.WeakSet()
_known: set[Worker[Any]] = set()  # at whose saves the end of the program looks
_is_ending = False
os.register_at_fork(after_in_child=_known.clear)  # a forked child lacks the threads
os.register_at_fork(after_in_child=_workers.clear)


def start(saves: Worker[Any], work: Callable[[], None], name: str) -> None:
    """Runs `work` in a new thread, which saves; the program will wait for it."""
    _known.add(saves)
    # Other threads can save after the main thread has ended. The interpreter waits for theirs.
    thread = threading.Thread(target=work, name=name, daemon=not _is_ending)
    try:
        thread.start()
    except RuntimeError:  # in a function of `atexit`, for example
        work()


def is_ending() -> bool:
    """Returns whether the program is ending."""
    return _is_ending


def _end() -> None:
    global _is_ending
    _is_ending = True
    late: list[Worker[Any]] = []
    for _ in range(2):  # the end of a save may be the beginning of an upload, which comes after
        order = sorted(_known, key=lambda one: one.pick is not None)
        late += [one for one in order if one not in late and not _has_ended(one)]
    for worker in [*_workers]:
        if not (worker.is_stopped or worker._saves):
            with contextlib.suppress(Exception):  # nobody is left to hear of it
                worker.last()
    if late:
        atexit.register(_leave)


def _has_ended(saves: Worker[Any]) -> bool:
    """Waits for saves, within their limit; returns whether all have ended well, or it was heard."""
    errors = list[BaseException]()
    if paths := _paths(saves):
        _say(f"the program ends after these saves: {paths}")
        try:
            saves.finish()
        except BaseException as error:  # including KeyboardInterrupt
            errors.append(error)
    is_heard = not errors and all(one.heard for one in saves._failures)
    for error in [*errors, *saves.take_errors()]:
        _report(error)
    if paths := _paths(saves):
        _say(f"the program ends without these saves, with status 1: {paths}")
    return is_heard and not paths


def _leave() -> None:
    """Ends the process with status 1 after all other functions of `atexit`."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)


def _paths(saves: Worker[Any]) -> str:
    return ", ".join(handle.path for handle in saves.under_way())


def _report(error: BaseException) -> None:
    for text in (text_of(error), *getattr(error, "__notes__", ())):
        _say(text)


def _say(text: str | None) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        print(f"jaxckpt: {text}", file=sys.stderr, flush=True)


try:
    # `atexit` is too late: its functions cannot start threads, which processes need to meet, and
    # child processes of `multiprocessing` do not call them.
    threading._register_atexit(_end)  # pyright: ignore[reportAttributeAccessIssue]  # not public
except RuntimeError:  # the main thread has ended
    _is_ending = True
