"""Counts the requests that a program makes in a row: those that wait for answers to others.

    proxy.rounds = Rounds()
    ...
    in_a_row = proxy.rounds.count

Requests wait until no other comes, and are then passed on together. That is one round, as if every
request took equally long. Meanwhile no thread of this process has anything to do, so a busy machine
makes no more rounds of the same requests.
"""

from __future__ import annotations

import threading
from pathlib import Path

from tests.stores.loopback import Request

_QUIET_S = 0.1  # after so long, and with nothing to do, no other request belongs to the round


class Rounds:
    """The rounds of requests that have passed so far."""

    def __init__(self) -> None:
        self.requests: list[list[Request]] = []  # by round
        self._waiting: list[Request] = []
        self._under_way = 0
        self._changed = threading.Condition()  # guards all of the above

    @property
    def count(self) -> int:
        with self._changed:
            return len(self.requests)

    def enter(self, request: Request) -> None:
        """Waits until the round of a request begins."""
        with self._changed:
            self._waiting.append(request)
            self._changed.notify_all()
            while request in self._waiting:
                if request is not self._waiting[0]:  # which begins the round
                    self._changed.wait()
                    continue
                seen = len(self._waiting)
                self._changed.wait_for(lambda n=seen: len(self._waiting) != n, _QUIET_S)
                if len(self._waiting) == seen and not self._under_way and not _has_work():
                    self._under_way = seen
                    self.requests.append(self._waiting)
                    self._waiting = []
                    self._changed.notify_all()

    def leave(self) -> None:
        """Records that a request has been answered."""
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()


def _has_work() -> bool:
    """Returns whether another thread of this process runs, or would if the machine were idle."""
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) == threading.get_native_id():
            continue
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        if state in "RD":
            return True
    return False
