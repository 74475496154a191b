"""The protocol between jaxckpt and a storage for checkpoints."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from jaxckpt.errors import CorruptCheckpoint

if TYPE_CHECKING:
    import numpy as np

EntryKind = Literal["file", "dir", "other"]


class Entry(NamedTuple):
    """One name in a directory: its kind, and the bytes in it if it is a regular file, else 0."""

    kind: EntryKind
    size: int


def corrupt(file: str, what: str, leaf: str | None = None) -> CorruptCheckpoint:
    """Returns the error for a bad file, as a sentence about it."""
    return CorruptCheckpoint(f"{file} {what}", leaf=leaf, file=file)


class Hold:
    """A lock held until `release`, or until the process that took it dies.

    Of this class itself, it stands in for a lock on storage without locks.
    """

    __slots__ = ()

    def release(self) -> None:
        """Releases the lock. Calling it again does nothing."""

    def goes_on(self) -> bool:
        """Returns whether nobody else can have it; a lease ends if its process stands still."""
        return True


class Storage(Protocol):
    """Files and directories in one place: a file system, or something with the same interface.

    A storage is stateless. Every `path` is absolute and '/'-separated; `locate` makes one. Errors
    are `OSError`s with the path. *Durable* means that a power cut after the return changes nothing.
    Where directories exist only while they have entries (object stores), making one does nothing
    and an empty one does not exist.
    """

    scheme: str  # "az", "file", "gs", "memory", "s3"
    atomic_rename: bool
    hard_links: bool  # whether several names can be one file
    server_copies: bool  # whether it copies files without sending them
    parallel_writes: bool  # whether calls at the same time take less time, as requests do
    reads_at_once: int  # how many reads from it are worth making at the same time

    def read(self, path: str, *, max_bytes: int) -> bytes:
        """Returns a whole file; raises `CorruptCheckpoint` if larger or not a regular file."""
        ...

    def read_into(
        self, path: str, offset: int, buffers: Sequence[np.ndarray[Any, np.dtype[np.uint8]]]
    ) -> None:
        """Fills buffers, one after the other, with the bytes of a file from `offset` on.

        Raises `EOFError` if the file is too short, `CorruptCheckpoint` if it is not a regular file.
        """
        ...

    def write(self, path: str, data: bytes | Iterable[bytes]) -> None:
        """Creates or replaces a file, atomically and durably. The directory must exist.

        Args:
            data: The bytes, or parts of them that are made as they are written.
        """
        ...

    def create(self, path: str, data: bytes) -> bool:
        """Like `write`, but does nothing and returns False if the path exists."""
        ...

    def kind(self, path: str) -> EntryKind | None:
        """Returns the kind of entry at `path`, or None. A symbolic link is "other"."""
        ...

    def size(self, path: str) -> int:
        """Returns a regular file's size in bytes; raises `CorruptCheckpoint` for other entries."""
        ...

    def entries(self, path: str) -> dict[str, Entry]:
        """Returns kind and size of everything in a directory, by sorted name.

        Follows a link at `path`; a link inside is "other". Leaves out a name that is deleted during
        the listing.
        """
        ...

    def files(self, path: str, *, in_one: bool = False) -> dict[str, Entry]:
        """Returns all below a directory but directories and unfinished files, by path in it.

        Empty if the directory does not exist.

        Args:
            in_one: Whether a store returns nothing if it does not list all in one request, and
                unfinished files too if it does.
        """
        ...

    def make_dir(self, path: str) -> None:
        """Makes a directory and its missing parents durably, unless it exists."""
        ...

    def sync(self, path: str) -> None:
        """Makes `path` and everything under it durable. Does not follow links."""
        ...

    def rename(self, src: str, dst: str) -> None:
        """Renames atomically and durably; raises `FileExistsError` if `dst` exists."""
        ...

    def link(self, src: str, dst: str) -> bool:
        """Makes the file `src` appear at `dst` too; raises `FileExistsError` if `dst` exists.

        Returns True if both names are one file, False if it had to be copied. Durable once the
        directory of `dst` is synced.
        """
        ...

    def link_all(self, src: str, dst: str, sizes: Mapping[str, int]) -> None:
        """Links files of the directory `src`, by path in it, into the new directory `dst`.

        Either all or, after an error, none. Durable once `dst` and its parents are synced.

        Args:
            sizes: The size that each file must have.

        Raises:
            FileNotFoundError: a file is missing or has another size.
            io.UnsupportedOperation: hard links are not supported (an OSError).
        """
        ...

    def exchange(self, a: str, b: str) -> bool:
        """Swaps two names atomically and durably; returns False without a change if impossible."""
        ...

    def delete(self, path: str) -> None:
        """Deletes `path` and everything under it, durably, if it exists. Does not follow links."""
        ...

    def delete_files(self, paths: Sequence[str], *, check: Callable[[], object] = int) -> None:
        """Deletes files durably, those that exist.

        Args:
            check: Called before every request. Raises if the files may be another writer's by then.
        """
        ...

    def delete_empty(self, path: str) -> bool:
        """Deletes a directory durably if nothing is in it; returns whether it is gone."""
        ...

    def hold(self, path: str, data: bytes | None = None, *, new: bool = False) -> Hold | None:
        """Locks a file, creating it if missing; returns None if any process holds the lock.

        Args:
            data: What the file then contains. If None, a former holder may find other bytes.
            new: Whether to return None if the file exists. It is then created even if the storage
                cannot lock files.

        Raises:
            io.UnsupportedOperation: the storage cannot lock files (an OSError).
        """
        ...


class WithoutDirectories:
    """Answers the verbs of directories, names and links as an object store does."""

    atomic_rename = hard_links = False
    server_copies = True

    def make_dir(self, path: str) -> None:
        """Does nothing: a directory exists while a file is below it."""

    def delete_empty(self: Storage, path: str) -> bool:
        return self.kind(path) is None

    def sync(self, path: str) -> None:
        """Does nothing: a file is durable once it is written."""

    def rename(self, src: str, dst: str) -> None:
        raise io.UnsupportedOperation(errno.ENOTSUP, "this store cannot rename", src, None, dst)

    def link_all(self, src: str, dst: str, sizes: Mapping[str, int]) -> None:
        raise io.UnsupportedOperation(errno.ENOTSUP, "this store has no links", src, None, dst)

    def exchange(self, a: str, b: str) -> bool:
        return False


class PathIn(NamedTuple):
    """An absolute path in a storage of the caller's own; given in place of a path or URL."""

    storage: Storage
    path: str

    def __fspath__(self) -> str:
        return self.path
