"""The end of a run that the drop-in writes: its root then shows steps and nothing else, as Orbax's.

Programs make numbers of all names there. While a run is open for writing, files in the root say
who writes it, and which run it is.
"""

from __future__ import annotations

import atexit
import contextlib
from typing import Final

from jaxckpt import CheckpointManager
from jaxckpt._run.index import StepIndex
from jaxckpt.format import names
from jaxckpt.multihost import current

_open: Final[dict[str, tuple[CheckpointManager, StepIndex]]] = {}  # by root


def note_run(writer: CheckpointManager, index: StepIndex) -> None:
    """Takes note of a manager that writes, in case that the program ends without closing it."""
    _open[index.root] = writer, index


def close_run(writer: CheckpointManager, index: StepIndex) -> None:
    """Closes a manager, and removes its files if no other one has the run."""
    is_last = not writer._opening.ended
    writer.close()
    if _open.get(index.root, (None,))[0] is writer:
        del _open[index.root]
    if is_last and current().index == 0:
        with contextlib.suppress(OSError):  # no locks there, or all of it was deleted
            _remove_files(index)


def _remove_files(index: StepIndex) -> None:
    lock = f"{index.root}/{names.LOCK}"
    if index.storage.kind(lock) is not None and (hold := index.storage.hold(lock)) is not None:
        # The records of the steps have the id of the run too.
        index.storage.delete_files([f"{index.root}/{n}" for n in (names.RUN, names.OWNER)] + [lock])
        hold.release()


@atexit.register
def _close_all() -> None:
    for writer, index in [*_open.values()]:
        with contextlib.suppress(Exception):  # told already: the saves have ended by now
            if current().count == 1:  # the others may be gone
                close_run(writer, index)
