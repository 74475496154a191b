"""The base of both ways to commit a checkpoint (see `commit`), and the error of a failed save."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, NoReturn

from jaxckpt._core.log import logger
from jaxckpt._core.text import size_text
from jaxckpt.errors import CheckpointError, SaveFailed, StoreError, is_full, os_code_in
from jaxckpt.format import names, step
from jaxckpt.storage import Hold, Storage, free_bytes

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
    logger.warning("%s: %s", path, text)


def raise_save_error(path: str, error: BaseException, *, size_bytes: int = 0) -> NoReturn:
    """Raises the error of a failed save: a storage's error inside SaveFailed, others as they are.

    Args:
        size_bytes: Size of the values that this process saves, for the error of a full disk.
    """
    of_storage = isinstance(error, StoreError) or not isinstance(error, CheckpointError)
    if not (of_storage and isinstance(error, Exception)):
        raise error
    cause, code = error, os_code_in(str(error))
    if code is not None and not isinstance(error, StoreError):
        cause = OSError(code, os.strerror(code), path)
        cause.__cause__ = error
    full = ""
    if is_full(cause):
        free = free_bytes(posixpath.dirname(path))
        what = f"This process saves {size_text(size_bytes)}; free" if size_bytes else "Free"
        full = (
            f" {what} now: "
            f"{'unknown' if free is None else size_text(free)}. Delete what is not needed, such as "
            "old steps, or save elsewhere."
        )
    # TensorStore's text names the file that it could not write.
    told = f"{cause}" if cause is error else f"{cause} ({error})"
    raise SaveFailed(
        f"{path}: the save failed: {type(cause).__name__}: {told}.{full} Any earlier "
        "checkpoint, and this one if it was committed, is complete and can be restored."
    ) from cause
