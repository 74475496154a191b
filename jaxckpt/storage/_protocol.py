"""What jaxckpt asks of a place that holds checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np

Kind = Literal["file", "dir", "other"]


class Entry(NamedTuple):
    """One name in a directory: its kind, and the bytes in it if it is a regular file, else 0."""

    kind: Kind
    size: int


class Hold(Protocol):
    """A lock that is held until `release`, or until the process that took it dies."""

    def release(self) -> None:
        """Lets others have the lock. Calling it again does nothing."""
        ...


class Storage(Protocol):
    """Files and directories in one place: a file system, or something made to look like one.

    A storage has no state. Every `path` is absolute and '/'-separated; `locate` makes one. Errors
    are `OSError`s that carry the path. *Durable* means that a power cut after the return changes
    nothing. Where directories exist only while something is in them (object stores), making one
    does nothing and an empty one is not there.
    """

    scheme: str  # "file", "memory"
    atomic_rename: bool  # False: a commit is a marker written last, not a rename

    def read(self, path: str, *, max_bytes: int) -> bytes:
        """Returns a whole file; `CorruptCheckpoint` if it is larger, or no regular file."""
        ...

    def read_into(
        self, path: str, offset: int, buffers: Sequence[np.ndarray[Any, np.dtype[np.uint8]]]
    ) -> None:
        """Fills buffers, one after the other, with the bytes of a file from `offset` on.

        Raises `EOFError` if the file ends before; `CorruptCheckpoint` if it is no regular file.
        """
        ...

    def write(self, path: str, data: bytes) -> None:
        """Creates or replaces a file, in one step and durably. The directory must be there."""
        ...

    def create(self, path: str, data: bytes) -> bool:
        """Like `write`, but does nothing and returns False if something is there."""
        ...

    def kind(self, path: str) -> Kind | None:
        """Says what is there, or None. A symbolic link is "other"."""
        ...

    def size(self, path: str) -> int:
        """Returns the bytes in a regular file; `CorruptCheckpoint` if it is no such file."""
        ...

    def names(self, path: str) -> list[str]:
        """Returns the sorted names in a directory, or in the one that a link at `path` means."""
        ...

    def entries(self, path: str) -> dict[str, Entry]:
        """Returns kind and size of everything in a directory, by name, in the order of `names`.

        Follows a link at `path`, like `names`; a link inside is "other". Leaves out a name that is
        deleted during the listing.
        """
        ...

    def make_dir(self, path: str) -> None:
        """Makes a directory and its missing parents durably; fine if it is there."""
        ...

    def make_new_dir(self, path: str) -> None:
        """Makes a directory in its parent durably; `FileExistsError` if something is there."""
        ...

    def sync(self, path: str) -> None:
        """Makes `path` and all files and directories under it durable. Follows no link."""
        ...

    def rename(self, src: str, dst: str) -> None:
        """Renames in one step and durably; `FileExistsError` if something is at `dst`."""
        ...

    def link(self, src: str, dst: str) -> bool:
        """Makes the file `src` appear at `dst` too; `FileExistsError` if something is there.

        Returns True where it is one file under two names, False where it had to be copied. Durable
        when the directory of `dst` is synced.
        """
        ...

    def exchange(self, a: str, b: str) -> bool:
        """Swaps two names in one step and durably; False, and no change, where that cannot be."""
        ...

    def delete(self, path: str) -> None:
        """Deletes what is there and all under it, durably; fine if nothing is. Follows no link."""
        ...

    def hold(self, path: str) -> Hold | None:
        """Locks a file, made if absent; None if another has the lock, in any process or this one.

        Raises `io.UnsupportedOperation` (an OSError) where files cannot be locked.
        """
        ...

    def kvstore(self, path: str) -> dict[str, Any]:
        """Returns the TensorStore kvstore spec of the directory `path`."""
        ...
