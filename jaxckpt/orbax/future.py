"""Futures, which the `async_save` of a program's own handlers returns."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from jaxckpt.orbax._handling import Future as Future
from jaxckpt.orbax._handling import run


class CommitFutureAwaitingContractedSignals(Future):
    """Stands for a coroutine, which runs when it is waited for."""

    def __init__(self, coro: Coroutine[Any, Any, Any], **signals: Any) -> None:
        del signals  # of Orbax's own commit
        self._coroutine: Coroutine[Any, Any, Any] | None = coro

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the end."""
        waiting, self._coroutine = self._coroutine, None
        return None if waiting is None else run(asyncio.wait_for(waiting, timeout))
