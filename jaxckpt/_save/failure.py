"""Errors of work in the background, which no thread hides from the thread that began the work."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import final


@final
class Failure:
    """An error that each thread raises once, until the thread that began the work has raised it.

    Otherwise an evaluation in another thread could raise it first, and the training would go on.
    """

    def __init__(self, error: BaseException, caller: threading.Thread) -> None:
        self.error = error
        self._caller = caller  # began the work
        self._heard: set[threading.Thread] = set()

    @property
    def is_over(self) -> bool:
        """Whether the thread that began the work has raised it."""
        return self._caller in self._heard

    def hear(self) -> list[BaseException]:
        """Returns the error for this thread to raise, or nothing if it has done so."""
        thread = threading.current_thread()
        if thread in self._heard:
            return []
        self._heard.add(thread)
        return [self.error]


def hear(failures: list[Failure], waited_for: Sequence[Failure]) -> list[BaseException]:
    """Returns the errors that this thread has not raised, and removes failures that are over.

    Args:
        waited_for: Failures of the work that this thread has waited for; they count even if over.
    """
    wanted = [*(one for one in failures if not one.is_over), *waited_for]
    errors = [error for one in wanted for error in one.hear()]
    failures[:] = [one for one in failures if not one.is_over]
    return errors
