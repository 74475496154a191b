"""Threads that save in the background, and what becomes of their saves at each end.

    normal    the thread of a worker ends after the last save, once `idle` has returned; the next
              save starts another thread
    error     it ends no other save; each thread that asks raises it once, see `Failure`
    exit      the program waits for its saves, within the limit of each worker, and does what
              follows the last save of a worker that was not stopped, before functions of
              `atexit` such as JAX's; reports on stderr which failed or did not end; and, if some
              did not, leaves at once after the functions of `atexit`, as a thread that returns to
              an interpreter being finalized can abort the process
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
from typing import Any, Generic, Protocol, TypeVar, final

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
        self._heard: set[threading.Thread] = set()

    @property
    def is_over(self) -> bool:
        """Returns whether the thread that began the work has raised it."""
        return self._caller in self._heard

    def hear(self) -> list[BaseException]:
        """Returns the error for this thread to raise, or nothing if it has done so."""
        thread = threading.current_thread()
        if thread in self._heard:
            return []
        self._heard.add(thread)
        return [self.error]


def hear(failures: list[Failure], waited_for: Sequence[Failure]) -> list[BaseException]:
    """Returns the errors that this thread has not raised, and removes failures that are over.

    Args:
        waited_for: Failures of the work that this thread has waited for; they count even if over.
    """
    wanted = [*(one for one in failures if not one.is_over), *waited_for]
    errors = [error for one in wanted for error in one.hear()]
    failures[:] = [one for one in failures if not one.is_over]
    return errors


class Saving(Protocol):
    """A save under way, or waiting for an earlier one."""

    path: str
    step: int | None
    caller: threading.Thread
    failure: Failure | None  # set when it has failed

    @property
    def waits_for(self) -> Sequence[int]: ...  # processes


S = TypeVar("S", bound=Saving)


@final
@dataclass(kw_only=True, eq=False)
class Worker(Generic[S]):
    """Saves in the background, in the order in which saves were put."""

    name: str  # of its threads
    where: str  # where it saves, for messages
    timeout_s: float | None  # limit of each wait; if None, a wait lasts as long as the saves
    idle: Callable[[], object] = lambda: None  # called in the thread when no save is left
    hurry: Callable[[], object] = lambda: None  # called when nothing trains beside the saves
    last: Callable[[], object] = lambda: None  # called when it is stopped, after the saves
    # Guards all below. Entered by itself: interrupted, `Condition.__enter__` would leave it taken.
    _lock: threading.RLock = field(default_factory=threading.RLock)
    changed: threading.Condition = field(init=False)
    _saves: dict[S, Callable[[], object]] = field(default_factory=dict)  # that have not ended
    _begun: S | None = None  # the latest that a thread has taken
    _failures: list[Failure] = field(default_factory=list)
    _idling: int = 0  # threads that call `idle`, or are about to
    _thread: threading.Thread | None = None  # the latest that saved
    _is_stopped: bool = False

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self._lock)
        _workers.add(self)

    def put(self, handle: S, do: Callable[[], object]) -> None:
        """Adds a save, or none if interrupted. If `do` raises, that is the failure of the save."""
        try:
            with self._lock:
                self._saves[handle] = do
                starts = len(self._saves) == 1
            if starts:
                start(self, self._work, self.name)
        except BaseException:
            with self._lock:
                if self._begun is not handle:
                    self._saves.pop(handle, None)
                waits = next(iter(self._saves), None)
            if waits not in (None, self._begun):  # of another thread, which relied on this one
                start(self, self._work, self.name)
            raise

    def under_way(self) -> list[S]:
        """Returns the saves that have not ended, including the work after their commits."""
        with self._lock:
            return [*self._saves]

    def take_errors(self, waited_for: Sequence[S] = ()) -> list[BaseException]:
        """Returns the errors that this thread has not raised, see `hear`; none in a worker's."""
        late = [handle.failure for handle in waited_for if handle.failure is not None]
        with self._lock:
            if not (self._failures or late) or self.is_own_thread():
                return []
            return hear(self._failures, late)

    def is_own_thread(self) -> bool:
        """Returns whether the saving thread calls, such as from `on_commit`."""
        return threading.current_thread() is self._thread

    def refuse_own_thread(self) -> None:
        """Raises RuntimeError in the saving thread, which would wait for itself."""
        if self.is_own_thread():
            raise RuntimeError(
                f"{self.where}: functions such as on_commit cannot wait for saves, which wait for "
                "them; wait in the thread that calls `save`"
            )

    def wait(self, handles: Sequence[S], timeout_s: float | None = None, why: str = "") -> None:
        """Waits until these saves have ended, including the work after their commits.

        Raises:
            CheckpointTimeout: they have not, after `timeout_s`; names the processes that are late.
            RuntimeError: the saving thread would wait for itself.
        """

        def over() -> bool:
            return self._saves.keys().isdisjoint(handles)

        limit_s, started_s = self.timeout_s if timeout_s is None else timeout_s, time.monotonic()
        with self._lock:
            if over():
                return
            self.refuse_own_thread()
            if self.changed.wait_for(over, limit_s):
                return
            raise_first([*self.take_errors(), self._too_late(time.monotonic() - started_s, why)])

    def _too_late(self, waited_s: float, why: str) -> CheckpointTimeout:
        left = [*self._saves]
        missing = left[0].waits_for
        who = f", the first waits for processes {[*missing]}" if missing else ""
        return CheckpointTimeout(
            f"{self.where}: after {waited_s:.3g} s, the saves of steps "
            f"{[one.step for one in left]} are still under way{why}{who}; they continue. If they "
            "are only slow, raise timeout_s.",
            missing=missing,
        )

    def finish(self) -> None:
        """Waits until all saves have ended, which need no longer spare the network."""
        self.hurry()
        self.wait(self.under_way(), 0.0 if self._is_stopped else None)

    def settle(self, timeout_s: float | None = None) -> None:
        """Waits until `idle` has returned, or the limit is over."""
        if not self.is_own_thread():
            limit_s = self.timeout_s if timeout_s is None else timeout_s
            with self._lock:
                self.changed.wait_for(lambda: not self._idling, limit_s)

    def stop(self) -> None:
        """Waits until all saves have ended, for the last time."""
        try:
            self.finish()
        finally:
            self.last()
            self.settle()  # so that nothing is open any more
            self._is_stopped = True  # the end of the program does not wait again
        if not self._failures:
            forget(self)

    def leave(self) -> None:
        """Does what follows the last save as the program ends, unless that was done."""
        if not (self._is_stopped or self._saves):
            with contextlib.suppress(Exception):  # nobody is left to hear of it
                self.last()

    def _work(self) -> None:
        self._thread = caller = threading.current_thread()
        handle = self._next()
        while handle is not None:
            caller = handle.caller
            try:
                self._saves[handle]()
            except BaseException as error:  # the next call raises it
                handle.failure = Failure(error, handle.caller)
            handle = self._next(handle)
        failures = list[Failure]()
        try:
            self.idle()
        except BaseException as error:
            failures.append(Failure(error, caller))
        with self._lock:
            self._failures += failures
            self._idling -= 1
            if self.is_own_thread():
                self._thread = None  # at the end of the program, a caller goes on
            if not (self._saves or self._failures):
                forget(self)
            self.changed.notify_all()

    def _next(self, ended: S | None = None) -> S | None:
        """Removes a save that has ended; returns the next."""
        with self._lock:
            if ended is not None:
                self._failures += [ended.failure] if ended.failure is not None else []
                del self._saves[ended]
            handle = next(iter(self._saves), None)
            if handle is self._begun:  # another thread has it; this one was for a withdrawn save
                handle = None
            self._begun = handle or self._begun
            self._idling += handle is None
            self.changed.notify_all()
            return handle


# --- the end of the program ------------------------------------------------------------------


class SaveQueue(Protocol):
    """Saves that share a thread."""

    def under_way(self) -> Sequence[Any]: ...  # with a `path`

    def finish(self) -> None:
        """Waits until they have ended; may raise their errors, or CheckpointTimeout."""
        ...

    def take_errors(self) -> Sequence[BaseException]:
        """Returns the errors that were neither raised nor logged."""
        ...

    def is_own_thread(self) -> bool: ...
    def refuse_own_thread(self) -> None: ...
    def stop(self) -> None: ...


_workers: weakref.WeakSet[Worker[Any]] = weakref.WeakSet()
_known: set[SaveQueue] = set()
_is_ending = False
os.register_at_fork(after_in_child=_known.clear)  # a forked child lacks the threads
os.register_at_fork(after_in_child=_workers.clear)


def start(saves: SaveQueue, work: Callable[[], None], name: str) -> None:
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


def forget(saves: SaveQueue) -> None:
    """Lets the program end without looking at these saves again."""
    _known.discard(saves)


def _end() -> None:
    global _is_ending
    _is_ending = True
    late: list[SaveQueue] = []
    for _ in range(2):  # the end of a save may be the beginning of an upload
        late += [one for one in list(_known) if one not in late and not _has_ended(one)]
    for worker in [*_workers]:
        worker.leave()
    if late:
        atexit.register(_leave)


def _has_ended(saves: SaveQueue) -> bool:
    """Waits for saves, within their limit; returns whether all have ended."""
    if paths := _paths(saves):
        _say(f"the program ends after these saves: {paths}")
        try:
            saves.finish()
        except BaseException as error:  # including KeyboardInterrupt
            _report(error)
    for error in saves.take_errors():
        _report(error)
    if paths := _paths(saves):
        _say(f"the program ends without these saves, with status 1: {paths}")
    return not paths


def _leave() -> None:
    """Ends the process with status 1 after all other functions of `atexit`."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)


def _paths(saves: SaveQueue) -> str:
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
