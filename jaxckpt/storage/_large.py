"""Large files: written in pieces, then named, all or nothing.

1. lock `.jaxckpt-export-<token>`                             a lock nobody holds
2. create `.jaxckpt-export-<token>-<n>`, write the pieces     the same, and temporary files
3. `finish`: fsync it                                         the same, one of them complete
4. `publish`: rename it, fsync the parent                     the file; the rest as before
5. remove the lock                                            the files

The next `LargeFiles` in the directory removes what a crash left: all whose lock nobody holds.

A store takes no pieces in any order: there the files are written to a temporary directory of this
machine, and uploaded by `publish`. An object appears when it is whole.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, Self, final

import numpy as np

from jaxckpt._core.log import logger
from jaxckpt.errors import CorruptCheckpoint
from jaxckpt.storage._local import LocalStorage, _about, _publish
from jaxckpt.storage._protocol import Hold, Storage

_PIECE_BYTES: Final = 8 << 20
_NAME: Final = re.compile(r"(\.jaxckpt-export-[0-9a-f]{16})(-\d+)?")


def large_files(storage: Storage, folder: str) -> LargeFiles | UploadedFiles:
    """Returns the files to be written to a directory, as a context manager."""
    return LargeFiles(folder) if storage.hard_links else UploadedFiles(storage)


@final
class UploadedFiles:
    """The files being written for a store; the end removes the copies here."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._folder = tempfile.TemporaryDirectory(prefix="jaxckpt-export-")
        self._files: dict[str, LargeFile] = {}

    def new(self, path: str) -> LargeFile:
        temporary = f"{self._folder.name}/{len(self._files)}"
        self._files[path] = LargeFile(temporary, temporary)  # errors name what is on this machine
        return self._files[path]

    def publish(self, old: Sequence[str]) -> None:
        """Uploads the files in place of old ones; see `LargeFiles.publish`."""
        sent = {*self._take_names(old)}
        try:
            for path, file in self._files.items():
                file.finish()
                size = os.path.getsize(file.temporary)
                sent.add(path)
                self._storage.write(path, pieces(LocalStorage(), file.temporary, size))
        except BaseException:
            if len(sent) < len(self._files):  # else the last one may have arrived all the same
                with contextlib.suppress(OSError):
                    self._storage.delete_files([*sent])
            raise
        _remove_old(self._storage, old, self._files)

    def _take_names(self, old: Sequence[str]) -> list[str]:
        """Returns the file that was made to keep other exports out, if there are several files."""
        first, *others = self._files
        taken = [p for p in self._files if p not in old and self._storage.kind(p) is not None]
        # If two exports write to a name at once, the first to make this file has all shards.
        if taken or (others and not self._storage.create(first, b"")):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), (*taken, first)[0])
        return [first] if others else []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.discard()
        self._folder.cleanup()


def pieces(storage: Storage, path: str, size: int, offset: int = 0) -> Iterator[bytes]:
    """Yields a part of a file, in pieces."""
    for start in range(offset, offset + size, _PIECE_BYTES):
        piece: Any = np.empty(min(_PIECE_BYTES, offset + size - start), np.uint8)
        storage.read_into(path, start, [piece])
        yield piece.tobytes()


@final
class LargeFiles:
    """The files being written to an existing directory; the end removes all unpublished files.

    If the file system lacks locks, leftovers of a crash stay, and a warning names them.
    """

    def __init__(self, folder: str) -> None:
        _remove_leftovers(folder)
        self._lock, self._hold = _take_lock(folder)
        self._files: list[LargeFile] = []

    def new(self, path: str) -> LargeFile:
        """Begins the file that will be at `path`, in this directory."""
        self._files.append(LargeFile(path, f"{self._lock}-{len(self._files)}"))
        return self._files[-1]

    def publish(self, old: Sequence[str]) -> None:
        """Gives the files their names, and removes the old files; the last may replace one of them.

        An error leaves the old files, and of the new files all or none.

        Raises:
            FileExistsError: a name is taken.
        """
        *others, last = self._files
        try:
            for file in others:
                file.publish(replace=False)
            last.publish(replace=last.path in old)
        except BaseException:
            if not last.is_published():
                for file in others:
                    file.withdraw()
            raise
        _remove_old(LocalStorage(), old, [file.path for file in self._files])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.discard()
        with contextlib.suppress(OSError):
            os.unlink(self._lock)
        if self._hold is not None:
            self._hold.release()


def _remove_old(storage: Storage, old: Sequence[str], new: Collection[str]) -> None:
    for path in (path for path in old if path not in new):
        try:
            storage.delete_files([path])
        except OSError as error:
            logger.warning("%s, of the model before, stays: %s", path, error)


def _take_lock(folder: str) -> tuple[str, Hold | None]:
    while True:
        path = f"{folder}/.jaxckpt-export-{os.urandom(8).hex()}"
        try:
            hold = LocalStorage().hold(path)
        except io.UnsupportedOperation:
            return path, None
        if hold is not None:  # else another export took our new lock for a leftover
            return path, hold


def _remove_leftovers(folder: str) -> None:
    matches = filter(None, map(_NAME.fullmatch, os.listdir(folder)))
    for lock, found in groupby(sorted(matches, key=itemgetter(0)), itemgetter(1)):
        try:
            _remove_leftover(folder, lock, [match[0] for match in found])
        except (OSError, CorruptCheckpoint) as error:
            logger.warning("%s/%s* may be in use, and stays: %s", folder, lock, error)


def _remove_leftover(folder: str, lock: str, names: list[str]) -> None:
    hold = LocalStorage().hold(f"{folder}/{lock}")
    if hold is not None:
        logger.warning("removing %s/%s*, left by an interrupted export", folder, lock)
        # The lock goes last, since it shows that the other files lack an owner.
        for name in sorted({*names, lock}, reverse=True):
            os.unlink(f"{folder}/{name}")
        hold.release()


@final
class LargeFile:
    """A file being written.

    Args:
        path: The final path, in an existing directory.
        temporary: An unused path beside it.
    """

    def __init__(self, path: str, temporary: str) -> None:
        self.path = path
        self.temporary = temporary
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with _about(path):
            self._fd: int | None = os.open(self.temporary, flags, 0o666)
            self._status = os.fstat(self._fd)

    def write(self, offset: int, data: Any) -> None:  # whatever has the buffer protocol
        assert self._fd is not None  # not after `finish`
        rest = memoryview(data)
        with _about(self.path):
            while rest:
                count = os.pwrite(self._fd, rest, offset)
                rest, offset = rest[count:], offset + count

    def finish(self) -> None:
        """Makes the bytes durable and closes the file."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with _about(self.path):
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    def publish(self, *, replace: bool) -> None:
        """Gives the file its name, durably; raises `FileExistsError` if the name is taken."""
        self.finish()
        with _about(self.path):
            if not _publish(self.temporary, self.path, replace=replace):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    def is_published(self) -> bool:
        """Returns whether the file has its name, also after an error of `publish`."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.lstat(self.path), self._status)
        return False

    def withdraw(self) -> None:
        """Removes the file if it has its name. Never raises."""
        with contextlib.suppress(OSError):
            if self.is_published():
                os.unlink(self.path)

    def discard(self) -> None:
        """Removes an unpublished file. Never raises."""
        fd, self._fd = self._fd, None
        with contextlib.suppress(OSError):
            if fd is not None:
                os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(self.temporary)
