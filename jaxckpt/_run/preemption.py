"""Detects that the job is about to be stopped, and agrees on its last step.

One process: SIGTERM and SIGUSR1 set a flag, then run the previous handler. If the default would
have ended the process, the second signal does.

Several processes: jax's preemption service catches SIGTERM in any of them and agrees on a step;
SIGUSR1 is forwarded to it as SIGTERM.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from jaxckpt.multihost import Processes

_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """Listens for signals until `close`, if made in the main thread."""

    def __init__(self, processes: Processes, *, listens: bool) -> None:
        self._count = processes.count
        self._listens = listens
        self._told = False
        self._asked: tuple[int, bool] | None = None
        self._from: int | None = None
        self._before: dict[int, Any] = {}
        self._process = os.getpid()
        # A single object, so that `close` can check whether it is still installed.
        self._handler: Callable[[int, FrameType | None], None] = self._handle
        if listens and threading.current_thread() is threading.main_thread():
            for number in _SIGNALS if self._count == 1 else (signal.SIGUSR1,):
                self._before[number] = signal.signal(number, self._handler)

    def reached(self, step: int) -> bool:
        """Returns whether the job should end at this step, alike in every process.

        The first answer for a step is final.
        """
        if self._from is not None:
            return step >= self._from
        if not self._listens:
            return False
        if self._asked is None or self._asked[0] != step:
            self._asked = step, self._told if self._count == 1 else _reached_sync_point(step)
        if self._asked[1]:
            self._from = step
        return self._asked[1]

    def close(self) -> None:
        """Restores the previous handlers, unless they were replaced since."""
        self._listens = False
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) is self._handler:
                signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A forked child, such as a data loader, inherits the handler but has nothing to save.
        listens = self._listens and os.getpid() == self._process
        again, self._told = self._told or not listens, True
        before = _past_closed(self._before[number], number)
        if callable(before):
            before(number, frame)
        if self._count > 1 and listens:
            os.kill(os.getpid(), signal.SIGTERM)
        elif again and before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _past_closed(handler: Any, number: int) -> Any:
    """Returns the handler below those of managers that were closed but could not remove theirs."""
    while isinstance(owner := getattr(handler, "__self__", None), Preemption):
        if owner._listens:
            return handler
        handler = owner._before[number]
    return handler


def _reached_sync_point(step: int) -> bool:
    from jax.experimental import multihost_utils

    try:
        return multihost_utils.reached_preemption_sync_point(step)
    except RuntimeError:  # the user has turned the service off
        return False
