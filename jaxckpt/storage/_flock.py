"""Locks files of a file system. A lock lasts as long as the process, or until it is released."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import final

from jaxckpt.storage._protocol import Hold

# The errors of calls that a file system lacks.
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_TRIES = 1000

Check = Callable[[os.stat_result, str], None]  # raises if a file is not a regular one

_held: set[_LocalHold] = set()


@final
@dataclass(slots=True, eq=False)
class _LocalHold(Hold):
    fd: int | None
    path: str

    def release(self) -> None:
        fd, self.fd = self.fd, None
        if fd is not None:
            _held.discard(self)
            os.close(fd)


def release_below(path: str) -> None:
    """Releases what this process holds at `path` or below, because FUSE keeps an open file."""
    for hold in list(_held):
        if f"{hold.path}/".startswith(f"{path}/"):
            hold.release()


# A forked child (a data-loading worker) inherits the descriptors and their locks, which would then
# outlive the process that took them. So the child closes them; closing does not unlock.
os.register_at_fork(after_in_child=partial(release_below, ""))


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, *UNSUPPORTED):
            raise
        raise io.UnsupportedOperation(
            error.errno, f"this file system has no file locks ({error.strerror})"
        ) from error
    return True


def lock(path: str, data: bytes | None, check: Check) -> Hold | None:
    """Locks a file, which it makes if it is missing; see `Storage.hold`."""
    for _ in range(_TRIES):  # a lock on a file that its holder has deleted excludes nobody
        with contextlib.ExitStack() as stack:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            with contextlib.suppress(FileNotFoundError):
                check(os.lstat(path), path)  # opening a device can do things
            fd = os.open(path, flags, 0o666)
            stack.callback(os.close, fd)
            check(os.fstat(fd), path)
            if not _try_lock(fd):
                return None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.lstat(path)):
                    if data is not None:  # in place, since this inode is locked
                        os.pwrite(fd, data, 0)  # first: it may take no room on a full disk
                        os.ftruncate(fd, len(data))
                    stack.pop_all()
                    _held.add(hold := _LocalHold(fd, path))
                    return hold
    raise OSError(errno.EBUSY, f"its file was replaced {_TRIES} times while it was locked", path)
