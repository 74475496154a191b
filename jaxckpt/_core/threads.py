"""Threads for the calls of one save or restore, and daemons for calls that may hang."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from queue import SimpleQueue
from typing import Any, Final, TypeVar, final

T = TypeVar("T")

MOST_S: Final = 1e9  # the system refuses a wait that is much longer


class Pool(ThreadPoolExecutor):
    """Works also while the interpreter ends and starts no more threads: in the calling thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:  # as in a function of `atexit`
            done: Future[Any] = Future()
            done.set_result(fn(*args, **kwargs))
            return done


@final
class Latch:
    """Waits until something has happened.

    If a signal interrupts `Event.wait`, it may leave the lock of the event taken, so that the next
    call hangs for ever.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._unset = threading.Lock()  # taken until then
        self._unset.acquire()

    def set(self) -> None:
        """Ends all waits."""
        if not self.is_set:
            self.is_set = True
            self._unset.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self.is_set and (left_s := end_s - time.monotonic()) > 0:
            # Not at once: another thread may have been interrupted after it took the lock.
            if self._unset.acquire(timeout=min(left_s, 1.0)):
                self._unset.release()
        return self.is_set


@final
class Threads:
    """Daemon threads that make calls, up to a number at once.

    An executor's threads would hold the end of the program until a call that hangs has returned.
    """

    def __init__(self, name: str, most: float) -> None:
        self._name, self._most = name, most
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        # A signal may leave the lock of a `Semaphore` taken, but never this lock.
        self._lock = threading.Lock()  # guards the three below
        self._started = self._idle = 0
        self._under_way: set[Future[Any]] = set()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        if sys.is_finalizing():  # no other thread runs any more
            _make(future, call)
            return future
        future.add_done_callback(self._forget)
        with self._lock:
            self._under_way.add(future)
            starts = not self._idle and self._started < self._most
            self._started += starts
            self._idle -= self._idle > 0
        if starts:
            try:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            except BaseException as error:
                with self._lock:
                    self._started -= 1
                if not isinstance(error, RuntimeError):  # a signal
                    raise
                _make(future, call)  # the interpreter is ending, or there can be no more threads
                return future
        self._calls.put((future, call))
        return future

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._under_way.discard(future)

    def _work(self) -> None:
        while True:
            future, call = self._calls.get()
            _make(future, call)
            del future, call  # refer to the result
            with self._lock:
                self._idle += 1

    def under_way(self) -> list[Future[Any]]:
        """Returns the calls that have not ended."""
        with self._lock:
            return list(self._under_way)


def _make(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # raised where the result is awaited
        future.set_exception(error)
    finally:
        del future  # refers to the error, whose traceback refers to this frame


@cache
def daemons(name: str, most: float = math.inf) -> Threads:
    """Returns the threads of a name, which every caller shares."""
    return Threads(name, most)


os.register_at_fork(after_in_child=daemons.cache_clear)  # a forked child lacks the threads
