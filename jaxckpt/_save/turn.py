"""The order of the saves of this process to one path. Needs no jax: a run's root asks, too."""

from __future__ import annotations

import logging
import threading
from typing import ClassVar, Final

_logger = logging.getLogger("jaxckpt")

DEFAULT_TIMEOUT_S: Final = 1200.0


class Turn:
    """The place of a save among those of this process to one path: they commit in their order."""

    _lock = threading.Lock()  # guards _last
    _last: ClassVar[dict[tuple[str, int], Turn]] = {}

    def __init__(self, path: str, process: int) -> None:
        self._path = path
        self._key = path, process  # simulated processes are one, and wait for each other anyway
        self._ended = threading.Event()
        with Turn._lock:
            self._before = Turn._last.get(self._key)
            Turn._last[self._key] = self

    @staticmethod
    def is_under_way(path: str) -> bool:
        """Whether this process is saving to a path, or about to."""
        with Turn._lock:
            return any(path == saved for saved, _ in Turn._last)

    def __enter__(self) -> None:
        if self._before is not None:
            if not self._before._ended.wait(DEFAULT_TIMEOUT_S):
                _logger.warning("%s: an earlier save to it has not ended; going on", self._path)
            self._before = None

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with Turn._lock:
            if Turn._last.get(self._key) is self:
                del Turn._last[self._key]
