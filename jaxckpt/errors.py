"""The errors of jaxckpt. Each is also the built-in error that a caller would expect to catch.

A class exists here only if a caller would handle it differently from the others. Wrong arguments
(an unknown option, a negative count) raise plain `TypeError` and `ValueError`.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# Codes for a path that is missing or of the wrong type. Every other code concerns the storage or
# the process: an I/O error, no permission, too many open files.
_OF_WHAT_IS_STORED: Final = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG}
)


def is_io_failure(error: BaseException) -> bool:
    """Returns whether a read failed for a reason that does not concern the stored data.

    Such an error reaches the user unchanged, as an OSError; it is never treated as corruption.
    """
    number = error.errno if isinstance(error, OSError) else None
    return number is not None and number not in _OF_WHAT_IS_STORED


def is_full(error: BaseException) -> bool:
    """Returns whether a write failed because the disk or a quota is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def os_code_in(text: str) -> int | None:
    """Returns the error number that TensorStore's text of an error ends with."""
    found = re.search(r"os_error_code='(\d+)'", text)
    return int(found[1]) if found else None


def printable(text: str) -> str:
    """Returns text without characters that a terminal obeys; a checkpoint's names may have any.

    Example:
        >>> printable("a\\x1b[2Jé")
        'a\\\\x1b[2Jé'
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class CheckpointError(Exception):
    """The base of every error about a checkpoint, as opposed to an argument."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """No committed checkpoint exists at the given path."""


class StepExists(CheckpointError, FileExistsError):
    """The path already exists, and replacing it was not requested."""


class UnsupportedLeaf(CheckpointError, ValueError):
    """A checkpoint cannot hold a leaf or its name. Raised before anything is written."""


class UnsupportedFormat(CheckpointError, ValueError):
    """The checkpoint has a format or a version that this release does not read or write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A leaf that differs between the wanted and the saved tree; `None` if a side lacks it."""

    leaf: str
    wanted: str | None
    saved: str | None

    def __str__(self) -> str:
        name = printable(self.leaf) or "(the tree itself)"
        return f"{name}   wanted {self.wanted or 'nothing'}   saved {self.saved or 'nothing'}"


class TreeMismatch(CheckpointError, ValueError):
    """The requested tree does not fit the saved tree.

    Attributes:
        differences: Every leaf that differs, not only the first.
    """

    def __init__(self, message: str, differences: Sequence[Difference] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


class CorruptCheckpoint(CheckpointError, OSError):
    """Stored bytes are missing, damaged or invalid.

    Attributes:
        leaf: Path of the leaf with bad data, or None.
        file: The bad file, or None.
    """

    def __init__(self, message: str, *, leaf: str | None = None, file: str | None = None) -> None:
        super().__init__(message)
        self.leaf = leaf
        self.file = file


@contextlib.contextmanager
def needing(package: str, what: str) -> Iterator[None]:
    """Names the package to install if an import in the block finds it missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        text = f"{what} needs the package {package}: pip install {package}"
        raise ModuleNotFoundError(text, name=error.name) from None


def damaged(file: str, what: str, *, leaf: str | None = None) -> CorruptCheckpoint:
    """Returns the error for a bad file."""
    return CorruptCheckpoint(f"{file}: {what}", leaf=leaf, file=file)


# In a git checkout without its LFS files, a short text stands in place of each large file.
_LFS_POINTER: Final = b"version https://git-lfs."
MAX_LFS_BYTES: Final = 1024


def lfs_problem(data: bytes) -> str | None:
    """Returns what is wrong with a file that begins so, if it is a pointer of Git LFS.

    The length of a safetensors header is enough of it.
    """
    if len(data) < 8 or data[: len(_LFS_POINTER)] != _LFS_POINTER[: len(data)]:
        return None
    return "is a Git LFS pointer, and not the file itself: run `git lfs pull` in its repository"


class StoreError(CheckpointError, OSError):
    """An object store refused a request, or it or a file system did not answer in time.

    The message explains what to do. In a save, it is the cause of the `SaveFailed`.

    Attributes:
        client_error: The error of the store's client, or None. No traceback shows it: the message
            has its text, and the rest is a dump of the client's internals.
    """

    def __init__(
        self, message: str, *, code: int = errno.EIO, client_error: Exception | None = None
    ) -> None:
        super().__init__(message)
        self.errno = code
        self.client_error = client_error


class SaveFailed(CheckpointError, RuntimeError):
    """The save failed. If there is a checkpoint at the path, it is complete.

    The cause is chained.
    """


class ProcessesDisagree(CheckpointError, RuntimeError):
    """The processes of a job did not all do the same, or some of them failed.

    Attributes:
        failures: The error message of each failed process, by process index.
    """

    def __init__(self, message: str, failures: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})


class CheckpointTimeout(CheckpointError, TimeoutError):
    """A wait timed out.

    Attributes:
        missing: Indices of the processes that did not arrive.
    """

    def __init__(self, message: str, *, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
