"""A limit to the rate at which a process writes, which leaves some of the network to training."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from jaxckpt.errors import SaveFailed


class GaveWay(SaveFailed):
    """The upload of a step ended early, since another step's upload is more urgent."""


@dataclass(slots=True)
class Pace:
    """Limits the bytes that are written in a second; may be shared by threads."""

    max_bytes_per_s: float | None = None
    ends: threading.Event = field(default_factory=threading.Event)  # whether to send no more
    _is_lifted: bool = False  # then `ends` only ends the waits
    _due_s: float = 0.0  # when the next piece may be sent
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self, size: int) -> None:
        """Waits until a piece may be sent; raises `GaveWay` if none may any more."""
        start_s = time.monotonic()
        if (rate := self.max_bytes_per_s) is not None:  # it may be lifted at any moment
            with self._lock:
                start_s = max(self._due_s, start_s)
                self._due_s = start_s + size / rate
        self.rest(start_s - time.monotonic())

    def rest(self, seconds: float) -> None:
        """Waits; raises `GaveWay` if nothing more may be sent."""
        if self.ends.wait(max(0.0, seconds)) and not self._is_lifted:
            raise GaveWay("the upload gives way to that of a newer step; it goes on later")

    def lift(self) -> None:
        """Lets every piece be sent at once from now on, also those that wait."""
        self.max_bytes_per_s, self._is_lifted = None, True
        self.ends.set()
