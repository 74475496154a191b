"""Calls to file systems that may hang: made in another thread, and waited for with a limit.

Nothing can interrupt a call that a network file system does not answer. So its caller gets an error
and the thread stays behind. As long as it does, other calls to that file system fail at once:
each would wait as long, and leave a thread.
"""

from __future__ import annotations

import contextlib
import errno
import operator
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, Final, final

from jaxckpt.errors import StoreError
from jaxckpt.storage._mounts import Mount, mounts
from jaxckpt.storage._protocol import Hold, Storage
from jaxckpt.storage._settings import limit_s

_LOCKING: Final = ("claim", "hold")


@final
@dataclass(slots=True, eq=False)
class Call:
    """A call under way in another thread."""

    what: str
    path: str  # where it is; a long call moves on, and its limit then starts again
    do: Callable[[], Any]
    since_s: float = field(default_factory=time.monotonic)
    done: Future[Any] = field(default_factory=Future)

    def move(self, path: str) -> None:
        """Notes that the call has come to a path."""
        self.path, self.since_s = path, time.monotonic()

    def result(self, mount: Mount | None = None) -> Any:
        """Makes the call and returns its result; raises StoreError if it hangs."""
        _start(self)
        try:
            while not self.done.done():
                left_s = self.since_s + limit_s() - time.monotonic()
                if left_s <= 0:
                    raise self.error(mount)
                with contextlib.suppress(TimeoutError):
                    self.done.exception(left_s)
            return self.done.result()
        finally:
            del self  # refers to the error, whose traceback refers to this frame

    def error(self, mount: Mount | None = None) -> StoreError:
        """Returns the error of this call, or of a call that is not made because this call hangs."""
        where = f"the {mount.kind} file system at {mount.point}" if mount else "its file system"
        return StoreError(
            f"{self.path}: {self.what} has not returned for {time.monotonic() - self.since_s:.0f} "
            f"s on {os.uname().nodename}: {where} does not answer. Nothing can interrupt the call, "
            "so its thread stays behind. Repair the server or the mount and try again, or raise "
            "the limit with use_store('file://', StoreSettings(timeout_s=...)).",
            code=errno.ETIMEDOUT,
        )


@final
class LimitedStorage:
    """A `Storage` of local files that may hang: its calls raise StoreError then."""

    def __init__(self, inner: Storage, mount: Mount) -> None:
        self._inner, self._mount = inner, mount
        self._hanging: set[Call] = set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return partial(self._limited, name, found) if callable(found) else found

    def together(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        return self._inner.together(calls)

    def ahead(self, path: str, *, reads: bool = True) -> LimitedStorage:
        return self

    def _limited(self, verb: str, do: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if hanging := next(iter(list(self._hanging)), None):
            raise hanging.error(self._mount)
        path = args[0] if isinstance(args[0], str) else next(iter(args[0]), "")
        call = Call(verb, path, partial(do, *args, **options))
        try:
            value = call.result(self._mount)
        except StoreError:
            self._hanging.add(call)
            call.done.add_done_callback(partial(self._over, call))
            raise
        finally:
            del call  # as in `Call.result`
        return _LimitedHold(value, self._hanging) if verb in _LOCKING and value else value

    def _over(self, call: Call, done: Future[Any]) -> None:
        """Lets other calls through, and releases a lock that nobody waits for any more."""
        self._hanging.discard(call)
        if call.what in _LOCKING and not done.exception() and done.result():
            done.result().release()


@final
@dataclass(frozen=True, slots=True)
class _LimitedHold:
    inner: Hold
    hanging: set[Call]  # of the file system

    def release(self) -> None:
        """Releases the lock, or leaves that to another thread if the file system hangs."""
        call = Call("release", "", self.inner.release)
        with contextlib.suppress(StoreError):
            _start(call) if self.hanging else call.result()


@cache
def ask() -> Callable[..., Any]:
    """Returns a function `call(do, path)`, with a time limit if a file system here may hang."""
    return _ask if any(one.may_hang for one in mounts().values()) else operator.call


def _ask(do: Callable[..., Any], path: str) -> Any:
    return Call(do.__name__, path, partial(do, path)).result()


# --- threads ---------------------------------------------------------------------------------

here = threading.local()  # `call`: the call that this thread makes
_idle: list[SimpleQueue[Call]] = []  # of threads that wait for a call
os.register_at_fork(after_in_child=_idle.clear)  # a forked child lacks the threads


def _start(call: Call) -> None:
    try:
        queue = _idle.pop()
    except IndexError:
        queue = SimpleQueue()
        # A daemon, so that the program can end while it hangs.
        thread = threading.Thread(target=_serve, args=(queue,), name="jaxckpt-files", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, and starts no more threads
            _make(call)
            return
    queue.put(call)


def _serve(queue: SimpleQueue[Call]) -> None:
    while True:
        call = here.call = queue.get()
        _make(call)
        call = here.call = None
        _idle.append(queue)


def _make(call: Call) -> None:
    try:
        call.done.set_result(call.do())
    except BaseException as error:  # raised where the result is awaited
        call.done.set_exception(error)
