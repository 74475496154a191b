"""Leases on objects, by which writers exclude each other in a bucket; renewed in the background.

A lease ends unless its object is written again in time. One thread waits for what is due, and the
threads of the requests write: a store that does not answer delays no other store's leases.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

from jaxckpt.errors import StoreError
from jaxckpt.storage._protocol import Hold
from jaxckpt.storage._requests import keepers

Version = Mapping[str, Any]
# Seconds of a clock that nobody sets. Where possible, it also goes on while the machine sleeps.
steady_s = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@final
class LeasedLock(Hold):
    """A lease on an object, renewed until `release`.

    Args:
        path: Of the object.
        length_s: After how many seconds it ends, unless it is renewed.
        version: Of the object, as it was written last.
        asked_s: When that write began, by `steady_s`.
        write: Writes the object again if it still has a version, held or not, in at most `tries`
            requests. Returns the new version, or None if another holder has it.
    """

    def __init__(
        self,
        path: str,
        length_s: float,
        version: Version,
        write: Callable[..., Version | None],
        *,
        asked_s: float,
    ) -> None:
        self.path = path
        self.due_s = time.monotonic() + length_s / 4
        self._every_s = length_s / 4
        self._version: Version | None = version  # None once it is released or lost
        self._asked_s = asked_s
        self._write = write
        self._lock = threading.Lock()  # guards _version and _asked_s

    def start(self) -> LeasedLock:
        """Has the lease renewed from now on; returns it."""
        global _renewer
        with _lock:
            _leases.add(self)
            if _renewer is None or not _renewer.is_alive():
                _renewer = threading.Thread(target=_renew_all, name="jaxckpt-leases", daemon=True)
                _renewer.start()
            _changed.notify()
        return self

    def renew(self) -> bool:
        """Writes the object again, in one try; returns whether the lease goes on.

        Raises:
            StoreError: the store did not answer; the lease may go on.
        """
        with self._lock:
            if self._version is not None:
                asked_s = steady_s()
                self._version = self._write(self._version, held=True, tries=1)
                if self._version is None or "last_modified" not in self._version:
                    self._asked_s = asked_s  # else an earlier try wrote it, at an unknown time
            return self._version is not None

    def goes_on(self) -> bool:
        """Returns whether the lease goes on for a request's time; does `renew` if it may not."""
        with self._lock:
            left_s = self._asked_s + 4 * self._every_s - steady_s()
            if self._version is None or left_s > self._every_s:
                return self._version is not None
        return self.renew()

    def keep(self) -> None:
        """Renews the lease, and sets the time of the next renewal."""
        goes_on, pause_s = True, self._every_s
        try:
            goes_on = self.renew()
        except Exception:  # there is time for several tries
            pause_s /= 4
        with _lock:
            self.due_s = time.monotonic() + pause_s
            if not goes_on:
                _leases.discard(self)
            _changed.notify()

    def release(self) -> None:
        """Ends the lease, so that another holder need not wait."""
        if (version := self.drop()) is not None:
            with contextlib.suppress(StoreError):  # it ends by itself
                self._write(version, held=False)

    def drop(self) -> Version | None:
        """Ends the lease here only, as the object is being deleted; returns its last version."""
        with _lock:
            _leases.discard(self)
        with self._lock:
            version, self._version = self._version, None
        return version


_leases: set[LeasedLock] = set()  # leases that are renewed
_lock = threading.RLock()  # guards _leases, their `due_s`, and _renewer
_changed = threading.Condition(_lock)
_renewer: threading.Thread | None = None


def _renew_all() -> None:
    while True:
        with _lock:
            due_s = min((lease.due_s for lease in _leases), default=math.inf)
            if due_s > time.monotonic():
                # Infinite also if all are being renewed.
                _changed.wait(None if due_s == math.inf else due_s - time.monotonic())
                continue
            due = [lease for lease in _leases if lease.due_s <= time.monotonic()]
            for lease in due:
                lease.due_s = math.inf
        for lease in due:
            keepers().submit(lease.keep)


def forget(path: str) -> list[str]:
    """Ends the leases of this process on objects at or below a path, which are being deleted.

    Returns:
        Those objects.
    """
    with _lock:
        doomed = [lease for lease in _leases if f"{lease.path}/".startswith(f"{path}/")]
    for lease in doomed:
        lease.drop()
    return [lease.path for lease in doomed]


def _forget_all_in_child() -> None:
    global _renewer, _lock, _changed
    _leases.clear()  # the parent renews them
    _renewer, _lock = None, threading.RLock()
    _changed = threading.Condition(_lock)


os.register_at_fork(after_in_child=_forget_all_in_child)
