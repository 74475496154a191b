"""What can go wrong, as types. Each is also the built-in that a caller would expect to catch.

A class exists here only if a caller would handle it differently from the others. Wrong arguments
(an unknown option, a negative count) are plain `TypeError` and `ValueError`.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# What a path answers that is not there, or is not what it should be. Every other code is about the
# storage or the process: an I/O error, no permission, too many open files.
_OF_WHAT_IS_STORED: Final = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG}
)


def is_io_failure(error: BaseException) -> bool:
    """Whether something could not be read just now, which says nothing of what is stored there.

    Such an error reaches the user as it is, an OSError: nothing is taken for damaged because of it.
    """
    number = error.errno if isinstance(error, OSError) else None
    return number is not None and number not in _OF_WHAT_IS_STORED


class CheckpointError(Exception):
    """The base of every error that is about a checkpoint rather than about an argument."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint where one was asked for."""


class StepExists(CheckpointError, FileExistsError):
    """Something is already there, and replacing it was not asked for."""


class UnsupportedLeaf(CheckpointError, ValueError):
    """A leaf, or a name, that a checkpoint cannot hold. Raised before anything is written."""


class UnsupportedFormat(CheckpointError, ValueError):
    """A checkpoint of a kind, or a version, that this release does not read or write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One leaf in which the wanted and the saved tree differ; `None` where a side has no leaf."""

    leaf: str
    wanted: str | None
    saved: str | None

    def __str__(self) -> str:
        name = self.leaf or "(the tree itself)"
        return f"{name}   wanted {self.wanted or 'nothing'}   saved {self.saved or 'nothing'}"


class TreeMismatch(CheckpointError, ValueError):
    """The tree that was asked for does not fit the one that was saved.

    Attributes:
        differences: Every leaf that differs, not only the first.
    """

    def __init__(self, message: str, differences: Sequence[Difference] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


class CorruptCheckpoint(CheckpointError, OSError):
    """Stored bytes are missing, damaged, or do not say what a checkpoint says.

    Attributes:
        leaf: Path of the leaf whose data is bad, or None.
        file: The file that is bad, or None.
    """

    def __init__(self, message: str, *, leaf: str | None = None, file: str | None = None) -> None:
        super().__init__(message)
        self.leaf = leaf
        self.file = file


class SaveFailed(CheckpointError, RuntimeError):
    """A save failed; what is there is whole, as a rule what was there before. Has the cause."""


class ProcessesDisagree(CheckpointError, RuntimeError):
    """The processes of a job did not do the same thing, or some of them failed.

    Attributes:
        failures: What each process that failed said, by process index.
    """

    def __init__(self, message: str, failures: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})


class CheckpointTimeout(CheckpointError, TimeoutError):
    """A wait ran out of time.

    Attributes:
        missing: Indices of the processes that did not arrive.
    """

    def __init__(self, message: str, *, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
