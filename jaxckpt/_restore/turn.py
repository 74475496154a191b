"""Whose turn it is to carry values: XLA's operations of two threads would mix between processes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from jaxckpt.errors import CheckpointTimeout
from jaxckpt.multihost import Processes, leading

_turn = threading.Lock()  # held by the thread that carries


def take_if_free(turn: contextlib.ExitStack) -> bool:
    """Takes the turn of this process, until the stack is closed, unless another thread has it."""
    if is_free := _turn.acquire(blocking=False):
        turn.callback(_turn.release)
    return is_free


@contextlib.contextmanager
def in_turn(processes: Processes, name: str) -> Iterator[None]:
    """Waits for the turn of every process; process 0 decides which of its threads is next.

    Raises:
        CheckpointTimeout: another thread has it for longer than the limit of a round.
    """
    limit_s = processes.timeout_s
    with contextlib.ExitStack() as turn:

        def take() -> None:
            if not _turn.acquire(timeout=limit_s):
                raise CheckpointTimeout(f"{name}: another restore has taken over {limit_s:g} s")
            turn.callback(_turn.release)

        with leading(processes, f"{name}/turn", where=name):
            if processes.index == 0:
                take()
        if processes.index != 0:
            take()
        yield
