"""The base of both ways to commit a checkpoint; see `commit`."""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

from jaxckpt.errors import SaveFailed
from jaxckpt.format import names, step
from jaxckpt.storage import Hold, Storage

_logger = logging.getLogger("jaxckpt")

UNLOCKED: Final = Hold()
Check = Callable[[], object]  # raises if another writer has taken over
Fence = Callable[[], None] | None  # raises if this writer may no longer write here
Files = Collection[str] | None


class Work(NamedTuple):
    """Names where an attempt writes a checkpoint."""

    path: str
    # The token of the attempt, if attempts share the directory: it is then in the name of whatever
    # a process writes before process 0 has begun. Otherwise "".
    mark: str
    landed: Callable[[int], object] = int  # takes a number of bytes written

    def folder(self, item: str) -> str:
        """Returns the directory of an item."""
        return posixpath.join(self.path, item).rstrip("/")


@dataclass(frozen=True, slots=True)
class Attempts:
    """The attempts to save a checkpoint at a path.

    Attributes:
        hold: The lock of the writer. On a file system it lasts as long as the process.
    """

    storage: Storage
    path: str
    hold: Hold = UNLOCKED
    _LEFT_ALONE: ClassVar = "left alone: another writer is saving there"
    _REMAINS: ClassVar = "removing the remains of an interrupted save or deletion"

    def _mark(self, work: str, by: str = "") -> None:
        """Writes the file that readers look for in a checkpoint, which is then complete."""
        marker, path = f"{work}/{names.COMMIT_MARKER}", self.path
        text = f"Checkpoint commit was successful to {path}{by}"
        if not self.storage.create(marker, step.as_text(text).encode()):
            raise SaveFailed(f"{marker} already exists: another writer committed {path}")

    def _check_ours(self, work: str, token: str) -> None:
        owner = read_small(self.storage, f"{work}/{names.WRITER}")
        if owner != token:
            raise SaveFailed(
                f"{self.path}: another writer took over during this save "
                f"({work}/{names.WRITER} {'is gone' if owner is None else 'is theirs'}). "
                "Let only one job save here."
            )


def read_small(storage: Storage, file: str) -> str | None:
    """Returns a small file; None if it, or its directory, is gone."""
    try:
        return storage.read(file, max_bytes=step.MAX_RECORD_BYTES).decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


def warn(path: str, text: str) -> None:
    """Logs a warning about a save."""
    _logger.warning("%s: %s", path, text)
