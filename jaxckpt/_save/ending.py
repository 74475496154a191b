"""Makes the end of a program wait for its saves in the background.

    wait      within the limit of each manager, before functions of `atexit` such as JAX's
    report    failed and unfinished saves, on stderr
    leave     if a save did not finish, at once after the functions of `atexit`: a thread that
              returns to an interpreter being finalized can abort the process

Saving threads are daemons because the interpreter waits for other threads without a limit.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxckpt.multihost import text_of


class Save(Protocol):
    """A save under way."""

    path: str


class Saves(Protocol):
    """Saves that share a thread."""

    def under_way(self) -> Sequence[Save]: ...

    def finish(self) -> None:
        """Waits until they have ended; may raise their errors, or CheckpointTimeout."""
        ...

    def take_errors(self) -> Sequence[BaseException]:
        """Returns the errors that were neither raised nor logged."""
        ...


_known: set[Saves] = set()
_is_ending = False
os.register_at_fork(after_in_child=_known.clear)  # a forked child lacks the threads


def start(saves: Saves, work: Callable[[], None], name: str) -> None:
    """Runs `work` in a new thread, which saves; the program will wait for it."""
    _known.add(saves)
    # Other threads can save after the main thread has ended. The interpreter waits for theirs.
    thread = threading.Thread(target=work, name=name, daemon=not _is_ending)
    try:
        thread.start()
    except RuntimeError:  # in a function of `atexit`, for example
        work()


def is_ending() -> bool:
    """Returns whether the program is ending."""
    return _is_ending


def forget(saves: Saves) -> None:
    """Lets the program end without looking at these saves again."""
    _known.discard(saves)


def _end() -> None:
    global _is_ending
    _is_ending = True
    late: list[Saves] = []
    for _ in range(2):  # the end of a save may be the beginning of an upload
        late += [one for one in list(_known) if one not in late and not _has_ended(one)]
    if late:
        atexit.register(_leave)


def _has_ended(saves: Saves) -> bool:
    """Waits for saves, within their limit; returns whether all have ended."""
    if paths := _paths(saves):
        _say(f"the program ends after these saves: {paths}")
        try:
            saves.finish()
        except BaseException as error:  # including KeyboardInterrupt
            _report(error)
    for error in saves.take_errors():
        _report(error)
    if paths := _paths(saves):
        _say(f"the program ends without these saves, with status 1: {paths}")
    return not paths


def _leave() -> None:
    """Ends the process with status 1 after all other functions of `atexit`."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)


def _paths(saves: Saves) -> str:
    return ", ".join(handle.path for handle in saves.under_way())


def _report(error: BaseException) -> None:
    for text in (text_of(error), *getattr(error, "__notes__", ())):
        _say(text)


def _say(text: str | None) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        print(f"jaxckpt: {text}", file=sys.stderr, flush=True)


try:
    # `atexit` is too late: its functions cannot start threads, which processes need to meet, and
    # child processes of `multiprocessing` do not call them.
    threading._register_atexit(_end)  # pyright: ignore[reportAttributeAccessIssue]  # not public
except RuntimeError:  # the main thread has ended
    _is_ending = True
