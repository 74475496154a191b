"""Asks a root that may not answer, such as the bucket behind a local disk.

    ask     in a thread of its own, and wait until nothing was heard of the root for `away_s`
    away    from then on: the call goes on in the background, and later calls fail at once
    back    when that call has an answer, or a later call that also runs in the background

A root that refuses at once is not away: each call gets its error, and costs nothing.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar, final

from jaxckpt._core.threads import daemons
from jaxckpt.errors import StoreError, is_io_failure
from jaxckpt.storage._limit import within

T = TypeVar("T")

AWAY_S: Final = 10.0
_LAST_S: Final = 1.0  # how long the end waits for a root that is away


def twice(do: Callable[[], T]) -> T:
    """Calls a function, and once more if a read fails: a file system may err for a moment."""
    try:
        return do()
    except Exception as error:
        if not is_io_failure(error):
            raise
        return do()


@final
class Reach:
    """The way to a root, and whether it answers. Any thread may ask."""

    def __init__(
        self, where: str, heard_s: Callable[[], float] = lambda: 0.0, *, away_s: float = AWAY_S
    ) -> None:
        """Asks nothing yet.

        Args:
            heard_s: Returns when the root last answered any call, by `time.monotonic`.
        """
        self.where, self.away_s = where, away_s
        self.away = ""  # why the root counts as away, or ""
        self._heard_s = heard_s
        self._lock = threading.Lock()  # guards `away` and the two below
        self._late: Future[Any] | None = None  # the call in the background
        self._calls: set[Future[Any]] = set()  # under way

    def ask(self, do: Callable[[], T]) -> T:
        """Returns the answer of a call.

        Raises:
            StoreError: the root is away.
            Any error of the call.
        """
        with self._lock:
            self._look_at_late(do)
            if self.away:
                raise self._error()
            call = self._start(do)
        if not self._is_answered(call):
            with self._lock:
                self._late = call
                self.away = (
                    f"{self.where} has not answered for {self.away_s:g} s; it is asked again in "
                    "the background"
                )
                raise self._error()
        try:
            return call.result()
        finally:
            del call  # refers to the error, whose traceback refers to this frame

    def _look_at_late(self, do: Callable[[], Any]) -> None:
        """Finds out whether the root is back; if nothing is asked, asks in the background."""
        if not self.away or (self._late is not None and not self._late.done()):
            return
        if self._late is not None and self._late.exception() is None:
            self.away = ""
        else:
            self._late = self._start(do)

    def _error(self) -> StoreError:
        return StoreError(self.away, code=errno.ETIMEDOUT)

    def _start(self, do: Callable[[], T]) -> Future[T]:
        call = daemons("jaxckpt-ask").submit(do)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    def _is_answered(self, call: Future[Any]) -> bool:
        started_s = time.monotonic()
        return within(lambda: self.away_s, call, lambda: max(started_s, self._heard_s()))

    def answered(self) -> None:
        """Notes that the root has answered somebody else."""
        with self._lock:
            self.away, self._late = "", None

    def leave(self, do: Callable[[], object]) -> None:
        """Does something last, and waits for it and all calls as long as the root answers."""
        with self._lock:
            call = self._start(do)
        if not self.away:
            self._is_answered(call)
        wait([*self._calls], _LAST_S)
