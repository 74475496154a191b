"""How readers keep a writer from deleting what they read: leases, small files in a run's root.

A writer first names the steps that it is going to delete in `doomed`, then looks for leases; a
reader first makes its lease, then looks into `doomed`. One of them sees the other: no step goes
while a reader that has its lease reads it.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, final

from jaxckpt.errors import CorruptCheckpoint
from jaxckpt.format import names, run
from jaxckpt.format.run import Lease
from jaxckpt.storage import Storage

# A reader that died keeps its step for so long.
LEASE_S: Final = 3600.0
_CLOCKS_DIFFER_S: Final = 86_400.0


@final
class Leases:
    """The leases in the root of a run, those of this process among them.

    Attributes:
        leaving: Steps that are being deleted, as this reader saw.
    """

    def __init__(self, storage: Storage, root: str, report: Callable[[str], None]) -> None:
        """Makes none.

        Args:
            report: Is told of files that are no leases.
        """
        self.leaving: set[str] = set()
        self._storage = storage
        self._root = root
        self._report = report
        self._held: list[str] = []  # steps, by leases of this reader

    def steps(self, entries: Iterable[str]) -> set[str]:
        """The steps that somebody holds, of the names in the root."""
        leases = [self.lease_of(name) for name in entries if names.is_lease(name)]
        return {lease.step for lease in leases if lease is not None}

    def lease_of(self, entry: str) -> Lease | None:
        """A lease that holds; None if it has expired, or is none."""
        file = f"{self._root}/{entry}"
        try:
            lease = run.decode_lease(self._storage.read(file, max_bytes=run.MAX_BYTES), file=file)
        except FileNotFoundError:
            return None
        except CorruptCheckpoint as error:
            self._report(f"{error}; it is no lease")
            return None
        # One that expires much later was made by a clock that was wrong.
        left_s = (lease.expires_ns - time.time_ns()) / 1e9
        return lease if 0 < left_s <= LEASE_S + _CLOCKS_DIFFER_S else None

    @contextlib.contextmanager
    def hold(self, step: str, is_committed: Callable[[str], bool]) -> Iterator[bool]:
        """Keeps a step from being deleted meanwhile; says whether it is still there.

        Where nothing can be written, readers have no lease: then a step may vanish.
        """
        file = f"{self._root}/{names.lease(secrets.token_hex(8))}"
        expires_ns = time.time_ns() + int(LEASE_S * 1e9)
        lease = run.encode_lease(Lease(step=step, expires_ns=expires_ns))
        written = any(self._has_written(file, lease) for _ in range(2))
        # A writer that names a step which this reader holds will find that out.
        there = is_committed(step) and (step in self._held or self.is_staying(step))
        if not there:
            self.leaving.add(step)
        if there and written:
            self._held.append(step)
        try:
            yield there
        finally:
            self.leaving.discard(step)
            if there and written:
                self._held.remove(step)
            if written:
                with contextlib.suppress(OSError):  # it expires
                    self._storage.delete(file)

    def _has_written(self, file: str, data: bytes) -> bool:
        try:
            self._storage.write(file, data)
        except OSError:
            return False
        return True

    def is_staying(self, step: str) -> bool:
        """Whether a step is there, and no writer is about to delete it."""
        file = f"{self._root}/{names.DOOMED}"
        try:
            data = self._storage.read(file, max_bytes=run.MAX_BYTES)
            doomed = run.decode_doomed(data, file=file)
        except (FileNotFoundError, CorruptCheckpoint):
            doomed = []
        return step not in doomed and self._storage.kind(f"{self._root}/{step}") == "dir"
