"""A limit to the rate at which a process writes, which leaves some of the network to training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxckpt.errors import SaveFailed


class GaveWay(SaveFailed):
    """The upload of a step ended early, since another step's upload is more urgent."""


@dataclass(slots=True)
class Pace:
    """Limits the bytes that are written in a second; may be shared by threads."""

    max_bytes_per_s: float | None = None
    gives_way: bool = False  # then nothing more may be sent
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _due_s: float = 0.0  # when the next piece may be sent

    def wait(self, size: int) -> None:
        """Waits until a piece may be sent; raises `GaveWay` if none may any more."""
        start_s = time.monotonic()
        with self._changed:
            if (rate := self.max_bytes_per_s) is not None:
                start_s = max(self._due_s, start_s)
                self._due_s = start_s + size / rate
        self.rest(start_s - time.monotonic(), lambda: self.max_bytes_per_s is None)

    def rest(self, seconds: float, is_over: Callable[[], bool] = bool) -> None:
        """Waits, at most until something is over; raises `GaveWay` if nothing more may be sent."""
        with self._changed:
            self._changed.wait_for(lambda: self.gives_way or is_over(), seconds)
        if self.gives_way:
            raise GaveWay("the upload gives way to that of a newer step; it goes on later")

    def lift(self) -> None:
        """Lets every piece be sent at once from now on, also those that wait."""
        with self._changed:
            self.max_bytes_per_s = None
            self._changed.notify_all()

    def give_way(self) -> None:
        """Lets no piece be sent until `gives_way` is reset, also of those that wait."""
        with self._changed:
            self.gives_way = True
            self._changed.notify_all()
