"""Detects that the job is about to be stopped, and agrees on its last step.

One process: SIGTERM and SIGUSR1 set a flag, then run the previous handler. If the default would
have ended the process, the second signal does.

Several processes: jax's preemption service catches SIGTERM in any of them and agrees on a step;
SIGUSR1 is forwarded to it as SIGTERM. Where the user has turned the service off, nothing is heard.

A termination notice, such as for a spot instance, is polled in a thread of each process, and then
acts like SIGTERM.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from jaxckpt._core.log import logger
from jaxckpt.multihost import Processes

_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)
_POLL_S: Final = 1.0
_MOST_NUMBER: Final = 1 << 30  # that jax is asked with at first; its numbers are C's int

Notice = Callable[[], float | None]


class Preemption:
    """Listens for signals until `close`, if made in the main thread."""

    def __init__(
        self, processes: Processes, *, listens: bool, notice: Notice | None = None
    ) -> None:
        self._count = processes.count
        if listens and self._count > 1 and not _has_service():
            text = "jax_enable_preemption_service is off, so no signal or notice leads to a save"
            logger.warning("%s: the processes could not agree on a step", text)
            listens = False
        self._listens = listens
        self._told = self._is_deaf = False
        self._asked: tuple[int, bool] | None = None
        self._from: int | None = None
        self._before: dict[int, Any] = {}
        self.ends: Callable[[], bool] = lambda: False  # whether the first signal acts as the second
        self._process = os.getpid()
        self._deadline_s: float | None = None  # when the job is stopped, according to a notice
        self._closed = threading.Event()
        # A single object, so that `close` can check whether it is still installed.
        self._handler: Callable[[int, FrameType | None], None] = self._handle
        if listens and threading.current_thread() is threading.main_thread():
            for number in _SIGNALS if self._count == 1 else (signal.SIGUSR1,):
                self._before[number] = signal.signal(number, self._handler)
        elif listens and self._count == 1:
            logger.warning("this manager hears no signal: it was not made in the main thread")
        if listens and notice is not None:
            poll = threading.Thread(target=self._poll, args=[notice], name="jaxckpt-notice")
            poll.daemon = True  # the end of the program does not wait for a notice
            poll.start()

    @property
    def left_s(self) -> float | None:
        """Returns the seconds until the job is stopped, according to a notice."""
        return None if self._deadline_s is None else self._deadline_s - time.monotonic()

    def _poll(self, notice: Notice) -> None:
        """Polls until a notice comes; reports the first failure of a call, and goes on polling."""
        failed = False
        while not self._closed.wait(_POLL_S):
            try:
                if (left_s := notice()) is None:
                    continue
                self._deadline_s = time.monotonic() + float(left_s)
            except Exception as error:
                if not failed:
                    logger.warning("the notice of the end of this host cannot be asked: %s", error)
                failed = True
                continue
            logger.warning("notice: this host ends in %.0f s; saving at the next call", left_s)
            if self._count > 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return

    def reached(self, step: int) -> bool:
        """Returns whether the job should end at this step, alike in every process.

        The first answer for a step is final.
        """
        if self._from is not None:
            return step >= self._from
        if not self._listens:
            return False
        self._warn_if_deaf()
        if self._asked is None or self._asked[0] != step:
            # Not the same flag: the first signal after a notice must not end the program.
            told = self._told or self._deadline_s is not None
            self._asked = step, told if self._count == 1 else _sync_point.reached(step)
        if self._asked[1]:
            self._from = step
        return self._asked[1]

    def _warn_if_deaf(self) -> None:
        """Reports once that another handler took the place of this one; in the main thread."""
        is_main = threading.current_thread() is threading.main_thread()
        for number in self._before if is_main and not self._is_deaf else ():
            owner = getattr(handler := signal.getsignal(number), "__self__", None)
            if handler is not self._handler and not isinstance(owner, Preemption):
                self._is_deaf = True
                what = f"another handler of {signal.Signals(number).name} was set after the manager"
                logger.warning("%s: unless it calls the earlier one, no step is saved then", what)

    def close(self) -> None:
        """Restores the previous handlers, unless they were replaced since."""
        self._listens = False
        self._closed.set()
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
        elif (again or self.ends()) and before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def what_fits(
    left_s: float | None, save_s: float | None, upload_s: float | None, item: str
) -> tuple[str, bool]:
    """Describes the time that is left beside what this run has measured, and whether that fits.

    Args:
        left_s: Until the host ends; None if that is unknown.
        save_s, upload_s: What each takes; None if it was not measured.
        item: The item that an upload begins with; "" if there are no uploads.
    """
    times = {"a save": save_s, "its upload": upload_s}
    known = {what: seconds for what, seconds in times.items() if seconds is not None}
    why = "a signal to stop" if left_s is None else f"the end of a host in {left_s:.0f} s"
    fits = left_s is not None and sum(known.values()) <= left_s
    said = "this fits" if fits else "this does not fit; it is tried"
    if left_s is None:
        said = "how much time is left is unknown"
    elif not fits and item:
        said = f"this does not fit; it is saved here, and the upload begins with {item}: what is "
        said += "not sent is only on the disks of hosts"
    texts = [f"{what} takes about {seconds:.1f} s" for what, seconds in known.items()]
    return f"{why}: {'; '.join([*texts, said]) if known else 'nothing is measured yet'}", fits


def _past_closed(handler: Any, number: int) -> Any:
    """Returns the handler below handlers that closed managers could not remove."""
    while isinstance(owner := getattr(handler, "__self__", None), Preemption):
        if owner._listens:
            return handler
        handler = owner._before[number]
    return handler


def _has_service() -> bool:
    """Returns whether jax agrees on a step at which all processes stop."""
    import jax

    return bool(getattr(jax.config, "jax_enable_preemption_service", True))


class _SyncPoint:
    """Asks jax's service where all processes stop, for all managers of a program.

    jax compares a number with one more than the highest that any process gave before the signal (0
    if none). So the numbers have no gaps, whatever the steps do. They are the steps where these
    have no gaps either, since a program may also ask jax with its step.
    """

    def __init__(self) -> None:
        self._step: int | None = None  # for which the service was asked last
        self._number = 0
        self._is_reached = False

    def reached(self, step: int) -> bool:
        if not self._is_reached and step != self._step:
            is_first = self._step is None and step <= _MOST_NUMBER
            self._number = step if is_first else self._number + 1
            # At first, also for a signal that came before, such as while the program compiled.
            numbers = [self._number] if self._step is not None else [1, self._number]
            self._step, self._is_reached = step, any(map(_reached, numbers))
        return self._is_reached


_sync_point: Final = _SyncPoint()


def _reached(number: int) -> bool:
    from jax.experimental import multihost_utils

    try:
        return multihost_utils.reached_preemption_sync_point(number)
    except RuntimeError:  # the service was turned off after the start
        return False
