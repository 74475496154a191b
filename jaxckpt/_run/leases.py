"""Leases: small files in a run's root that keep a writer from deleting steps being read.

A writer first names the steps to delete in `_jaxckpt.doomed`, then looks for leases; a reader first
writes its lease, then reads `_jaxckpt.doomed`. One of them sees the other, so no step is deleted
while a reader with a lease reads it. Who mends a step, or deletes an item of it, has a lease of
another name: until it ends, no step is saved anew under this number, where late writes would land.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, final

from jaxckpt._disk.find import looks_committed
from jaxckpt._run.index import StepIndex
from jaxckpt._save.job import is_under_way
from jaxckpt.errors import SaveFailed
from jaxckpt.format import names, run
from jaxckpt.format.run import Doomed, Lease
from jaxckpt.multihost import Processes, lead

LEASE_S: Final = 3600.0  # a dead reader's lease also lasts this long
CHANGE_S: Final = 300.0  # a lease to change a step, for which a job that starts again has to wait
_CLOCKS_DIFFER_S: Final = 86_400.0
_POLL_S: Final = 0.5
_STARTED_NS: Final = time.time_ns() - time.monotonic_ns()


@final
class Leases:
    """The leases in the root of a run."""

    def __init__(self, index: StepIndex) -> None:
        self.index = index
        self.doomed_file = f"{index.root}/{names.DOOMED}"
        self.unsettled = False  # whether `doomed` may name steps that this job saves again
        self._leased: list[str] = []  # steps leased by this reader
        self._expired: list[str] = []  # files that the last look at all leases found expired

    def leased(self, entries: Iterable[str]) -> set[str]:
        """Returns the steps under a lease of a reader, given the names in the root."""
        leases = {name: self.read(name) for name in entries if names.is_lease(name)}
        self._expired = [name for name, lease in leases.items() if lease is None]
        return {lease.step for lease in leases.values() if lease is not None}

    def remove_expired(self) -> None:
        """Removes the leases of dead readers, which else every deletion would read again."""
        with contextlib.suppress(OSError):
            self.index.storage.delete_files([f"{self.index.root}/{name}" for name in self._expired])

    def check_unchanged(self, step: str) -> None:
        """Raises SaveFailed if a step is being changed."""
        for entry in self.index.entries():
            lease = self.read(entry) if names.is_lease(entry, changes=True) else None
            if lease is not None and lease.step == step:
                raise SaveFailed(
                    "a command or job mends it, or deletes an item of it, as the file "
                    f"{self.index.root}/{entry} shows. If that was killed, the file no longer "
                    f"counts after {CHANGE_S:.0f} s; try again then"
                )

    def read(self, entry: str) -> Lease | None:
        """Reads a lease; None if it has expired or the file is not a lease."""
        lease = self.index.small(Lease, entry)
        owner = self.index.owner() if lease and lease.owner else None
        if lease is None or (owner and owner.token != lease.owner):
            return None
        # A lease that expires much later comes from a wrong clock. Ours may have jumped since then.
        steady_ns = _STARTED_NS + time.monotonic_ns()  # as if nobody had set the clock
        lefts_s = [(lease.expires_ns - now_ns) / 1e9 for now_ns in (time.time_ns(), steady_ns)]
        goes_on = any(0 < left_s <= LEASE_S + _CLOCKS_DIFFER_S for left_s in lefts_s)
        return lease if goes_on else None

    @contextlib.contextmanager
    def protect(self, number: int, *, changes: bool = False, owner: str = "") -> Iterator[bool]:
        """Protects a step from deletion; yields whether the step still exists.

        If the root is not writable, no lease is taken and the step may vanish.

        Args:
            changes: Whether the caller changes the step, which is then not set aside either.
            owner: The token of the job that ends the lease when it loses the run, if any.
        """
        step = posixpath.basename(self.index.path(number))
        file = f"{self.index.root}/{names.lease(secrets.token_hex(8), changes=changes)}"
        lease, ended = Lease(step=step, expires_ns=0, owner=owner), threading.Event()
        about = file, lease, CHANGE_S if changes else LEASE_S
        renewal = threading.Thread(target=self._renew, args=(ended, *about), daemon=True)
        files, written, there = [file], False, False
        # Called here, or at the end of a program that keeps this generator.
        end = weakref.finalize(ended, self._end, files, os.getpid(), renewal, ended.set)
        try:
            written = self._has_written(*about) or self._has_written(*about, needed=changes)
            files[:] = [file] if written else []
            if written:
                with contextlib.suppress(RuntimeError):  # a program that ends starts no threads
                    renewal.start()
            # A writer that dooms a step already leased by this reader will see the earlier lease.
            is_mine = step in self._leased
            there = self.index.is_committed(number) and (is_mine or self.is_staying(step))
            if there and written:
                self._leased.append(step)
            yield there
        finally:
            if there and written:
                self._leased.remove(step)
            end()

    def _end(
        self, files: list[str], pid: int, renewal: threading.Thread, stop: Callable[[], Any]
    ) -> None:
        try:
            stop()
            if renewal.is_alive() and renewal is not threading.current_thread():
                renewal.join()
        finally:
            stop()  # perhaps interrupted before
            with contextlib.suppress(OSError):  # the lease will expire, or it is the parent's
                self.index.storage.delete_files(files if os.getpid() == pid else [])

    def _renew(self, ended: threading.Event, file: str, lease: Lease, length_s: float) -> None:
        while not ended.wait(length_s / 4):
            self._has_written(file, lease, length_s)

    def _has_written(self, file: str, lease: Lease, length_s: float, needed: bool = False) -> bool:
        lease = replace(lease, expires_ns=time.time_ns() + int(length_s * 1e9))
        try:
            self.index.storage.write(file, run.encode(lease))
        except OSError:
            if needed:
                raise
            return False
        return True

    def is_staying(self, step: str) -> bool:
        """Returns whether a step exists and no writer is about to delete it."""
        path, storage = f"{self.index.root}/{step}", self.index.storage
        if step in self.doomed().steps:
            return False
        if storage.atomic_rename:
            return storage.kind(path) == "dir"
        with contextlib.suppress(FileNotFoundError):
            return looks_committed(storage, path)  # in a store, a pin alone makes a directory
        return False

    def doom(self, steps: Sequence[str]) -> None:
        """Records for the next owner the steps whose files may be left; if none, deletes it."""
        self.unsettled, is_gone = True, False
        if not steps:
            with contextlib.suppress(OSError):  # who may not delete leaves an empty list
                self.index.storage.delete_files([self.doomed_file])
                is_gone = True
        if not is_gone:
            self.index.storage.write(self.doomed_file, run.encode(Doomed(steps=list(steps))))
        self.unsettled = bool(steps)

    def settle(self, token: str) -> None:
        """Lets nobody finish a deletion of this job that failed: the steps may be saved again.

        In a store, the remains of steps stay named, until such a step is saved again.
        """
        doomed = self.doomed()
        if doomed.owner in (token, ""):
            paths = {name: f"{self.index.root}/{name}" for name in doomed.steps}
            self.doom([name for name, path in paths.items() if self._is_left(path)])
        else:
            self.unsettled = False

    def _is_left(self, path: str) -> bool:
        storage = self.index.storage
        is_seen = storage.atomic_rename or is_under_way(path)
        return not is_seen and storage.kind(f"{path}/{names.COMMIT_MARKER}") is None

    def doomed(self) -> Doomed:
        """Returns the steps that a writer deletes, or was deleting when it died."""
        return self.index.small(Doomed, names.DOOMED) or Doomed()


def watch(
    leases: Leases, processes: Processes, timeout_s: float, after: int | None
) -> Iterator[int]:
    """Yields the new steps that process 0 sees; each is leased while the caller uses it."""
    root, meets, step = leases.index.root, processes.within(processes.timeout_s + timeout_s), after
    with contextlib.closing(_watch(leases, timeout_s, after)) as steps:
        while True:
            look, name = partial(next, steps, None), f"watch {root} after {step}"
            step = lead(meets, name, look, where=root, meets=True)
            if step is None:
                return
            with leases.protect(step) if processes.index > 0 else contextlib.nullcontext():
                yield step


def _watch(leases: Leases, timeout_s: float, after: int | None) -> Generator[int]:
    """Yields new steps as they are committed; each is leased while the caller uses it."""
    waiting = threading.Event()  # never set; signals can interrupt its wait
    last = after
    deadline_s = time.monotonic() + timeout_s
    while True:
        steps = leases.index.steps()
        new = steps[-1:] if last is None else [n for n in steps if n > last]
        for step in new:
            last = step
            with leases.protect(step) as there:
                if there:
                    yield step
                    deadline_s = time.monotonic() + timeout_s
        if not new:
            if (left_s := deadline_s - time.monotonic()) <= 0:
                return
            waiting.wait(min(_POLL_S, left_s))
