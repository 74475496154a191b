"""A large local file: written in pieces, then named, all or nothing.

1. create it under a temporary name, write the pieces   a temporary file
2. `finish`: fsync it                                   a complete temporary file
3. `publish`: rename it, fsync the parent               the file
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Any, final

from jaxckpt.storage._local import _about, _publish, temporary_sibling


@final
class LargeFile:
    """A file being written. A killed process leaves one that `is_temporary_file` recognises.

    Args:
        path: The final path, in an existing directory.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._temporary = temporary_sibling(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with _about(path):
            self._fd: int | None = os.open(self._temporary, flags, 0o666)

    def write(self, offset: int, data: Any) -> None:  # whatever has the buffer protocol
        """Writes bytes at an offset."""
        assert self._fd is not None  # not after `finish`
        rest = memoryview(data)
        with _about(self._path):
            while rest:
                count = os.pwrite(self._fd, rest, offset)
                rest, offset = rest[count:], offset + count

    def finish(self) -> None:
        """Makes the bytes durable and closes the file."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with _about(self._path):
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    def publish(self, *, replace: bool) -> None:
        """Gives the file its name, durably; raises `FileExistsError` if the name is taken."""
        self.finish()
        with _about(self._path):
            if not _publish(self._temporary, self._path, replace=replace):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    def discard(self) -> None:
        """Removes an unpublished file. Never raises."""
        fd, self._fd = self._fd, None
        with contextlib.suppress(OSError):
            if fd is not None:
                os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)
