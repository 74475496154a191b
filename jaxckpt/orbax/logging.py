"""Loggers, which do nothing: `jaxckpt.CheckpointManager.timings` has the durations."""

from __future__ import annotations

from typing import Any


class StandardLogger:
    """Takes entries, and does nothing with them."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def log_entry(self, entry: Any) -> None:
        """Does nothing."""


AbstractLogger = CloudLogger = CompositeLogger = StandardLogger
