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
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ParamSpec, TypeVar, final

from jaxckpt._core.threads import daemons
from jaxckpt.errors import StoreError
from jaxckpt.storage._mounts import Mount, mounts
from jaxckpt.storage._protocol import Hold, Storage
from jaxckpt.storage._settings import limit_s

P = ParamSpec("P")
T = TypeVar("T")

here = threading.local()  # `call`: the call that this thread makes


def within(limit_s: Callable[[], float], call: Future[Any], heard_s: Callable[[], float]) -> bool:
    """Waits for a call; returns False once nothing has been heard of it for too long.

    Args:
        limit_s: Returns for how many seconds; it may change meanwhile.
        heard_s: Returns when something was heard last, by `time.monotonic`.
    """
    while not call.done():
        left_s = heard_s() + limit_s() - time.monotonic()
        if left_s <= 0:
            return False
        wait([call], left_s)
    return True


@final
@dataclass(slots=True, eq=False)
class Call:
    """A call under way in another thread."""

    what: str
    path: str  # where it is; a long call moves on, and its limit then starts again
    do: Callable[[], Any]
    since_s: float = field(default_factory=time.monotonic)
    done: Future[Any] = field(init=False)  # from `start` on

    def move(self, path: str) -> None:
        """Notes that the call has come to a path."""
        self.path, self.since_s = path, time.monotonic()

    def start(self) -> None:
        self.done = daemons("jaxckpt-files").submit(self._make)

    def _make(self) -> Any:
        here.call = self
        try:
            return self.do()
        finally:
            here.call = None
            del self  # as in `result`

    def result(self, mount: Mount | None = None) -> Any:
        """Makes the call and returns its result; raises StoreError if it hangs."""
        self.start()
        try:
            if not within(limit_s, self.done, partial(getattr, self, "since_s")):
                raise self.error(mount)
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
        self._hold, self._mount = inner.hold, mount
        self._hanging: set[Call] = set()
        self.scheme, self.atomic_rename = inner.scheme, inner.atomic_rename
        self.hard_links, self.server_copies = inner.hard_links, inner.server_copies
        self.parallel_writes, self.reads_at_once = inner.parallel_writes, inner.reads_at_once
        limited = self._limited
        self.read, self.read_into = limited(inner.read), limited(inner.read_into)
        self.write, self.create = limited(inner.write), limited(inner.create)
        self.kind, self.size = limited(inner.kind), limited(inner.size)
        self.entries, self.files = limited(inner.entries), limited(inner.files)
        self.make_dir, self.sync = limited(inner.make_dir), limited(inner.sync)
        self.rename, self.exchange = limited(inner.rename), limited(inner.exchange)
        self.link, self.link_all = limited(inner.link), limited(inner.link_all)
        self.delete, self.delete_files = limited(inner.delete), limited(inner.delete_files)
        self.delete_empty = limited(inner.delete_empty)

    def hold(self, path: str, data: bytes | None = None, *, new: bool = False) -> Hold | None:
        found = self._within(self._hold, path, data, new=new)
        return found and _LimitedHold(found, self._hanging)

    def _limited(self, do: Callable[P, T]) -> Callable[P, T]:
        return partial(self._within, do)

    def _within(self, do: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        if hanging := next(iter(list(self._hanging)), None):
            raise hanging.error(self._mount)
        first: Any = args[0]
        path = first if isinstance(first, str) else next(iter(first), "")
        call = Call(do.__name__, path, partial(do, *args, **options))
        try:
            value = call.result(self._mount)
        except BaseException as error:  # an interrupt too leaves the call under way
            if isinstance(error, StoreError):
                self._hanging.add(call)
            call.done.add_done_callback(partial(self._over, call))
            raise
        finally:
            del call  # as in `Call.result`
        return value

    def _over(self, call: Call, done: Future[Any]) -> None:
        """Lets other calls through, and releases a lock that nobody waits for any more."""
        self._hanging.discard(call)
        if call.what == "hold" and not done.exception() and done.result():
            done.result().release()


@final
@dataclass(frozen=True, slots=True)
class _LimitedHold(Hold):
    inner: Hold
    hanging: set[Call]  # of the file system

    def release(self) -> None:
        """Releases the lock, or leaves that to another thread if the file system hangs."""
        call = Call("release", "", self.inner.release)
        with contextlib.suppress(StoreError):
            call.start() if self.hanging else call.result()


@cache
def ask() -> Callable[..., Any]:
    """Returns a function `call(do, path)`, with a time limit if a file system here may hang."""
    return _ask if any(one.may_hang for one in mounts().values()) else operator.call


def _ask(do: Callable[..., Any], path: str) -> Any:
    return Call(do.__name__, path, partial(do, path)).result()
