"""Local checkpoints: every change durable, no link followed, no half-written file.

A change of a name is durable once its directory is synced, the bytes of a file once the file is. A
file is written in this order, and a crash after each line leaves:

1. write the bytes under a temporary name     a temporary file, maybe part of the bytes
2. fsync the file                             a complete temporary file
3. rename it to its name                      the old file or the new one, complete
4. fsync the directory                        the new file

A temporary file is removed on any error. Only a kill or a power cut leaves one; `is_temporary_file`
recognises its name.

In a mounted bucket a rename copies and deletes. There a new file has its own name at once, and only
the replacement of an old one is renamed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, final

from jaxckpt.storage import _flock
from jaxckpt.storage._flock import UNSUPPORTED
from jaxckpt.storage._limit import here
from jaxckpt.storage._protocol import Entry, EntryKind, Hold, Storage, corrupt

_TEMPORARY = ".jaxckpt-tmp-"
_MOST_BUFFERS = 1024  # per system call
_SYNCED_BYTES = 64 << 20  # sync after so many bytes, where a file system may hang
_HIDDEN = ".fuse_hidden"  # what libfuse renames a deleted file to until it is closed
_HIDDEN_TRIES, _HIDDEN_WAIT_S = 20, 0.05  # it hears of that after `close` has returned
_DIR, _OTHER = Entry("dir", 0), Entry("other", 0)
_LOCKS = " jaxckpt locks the file of this name; remove what is there."
_LINKS = " jaxckpt does not follow links in a checkpoint; `cp -rL` makes a copy without them."

_List = Callable[[str], Mapping[str, Entry]]  # returns the entries of a directory


def listing(storage: Storage, folder: str) -> dict[str, Entry] | None:
    """Returns the entries of a directory; None if it does not exist."""
    try:
        return storage.entries(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None


def files_in(entries: _List, root: str, *, temporary: bool = False) -> dict[str, Entry]:
    """Returns the files below `root` by sorted path, either all finished or all temporary ones."""
    found, folders = {}, [""]
    while folders:
        folder = folders.pop()
        for name, entry in entries(f"{root}/{folder}".rstrip("/")).items():
            path = f"{folder}/{name}".lstrip("/")
            if entry.kind == "dir":
                folders.append(path)
            elif is_temporary_file(name) == temporary:
                found[path] = entry
    return dict(sorted(found.items()))


def hold_new(storage: Storage, path: str, data: bytes) -> Hold | None:
    """Creates a file and locks it where the storage can; returns None if the path exists."""
    if not storage.create(path, data):
        return None
    try:
        return storage.hold(path)
    except io.UnsupportedOperation:
        return Hold()  # without locks, other writers leave everything temporary alone


def usable_cores() -> int:
    """Returns how many cores this process may use."""
    # sched_getaffinity respects taskset and cpusets, but exists on Linux only.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_temporary_file(name: str) -> bool:
    """Returns whether a file of this name is being written, or was left by a killed `write`."""
    return name.startswith(_TEMPORARY)


def temporary_sibling(path: str) -> str:
    """Returns an unused temporary path beside `path`."""
    # Does not contain the name of `path`, which may have the maximum length already.
    return os.path.join(os.path.dirname(path), _TEMPORARY + os.urandom(8).hex())


@final
class LocalStorage:
    """The local file system, mounted network file systems included; see `Storage`.

    Args:
        atomic_rename: False in a mounted bucket.
    """

    scheme = "file"
    server_copies = parallel_writes = False
    reads_at_once = 2 + usable_cores()

    def __init__(self, *, atomic_rename: bool = True) -> None:
        self.atomic_rename = self.hard_links = atomic_rename

    def read(self, path: str, *, max_bytes: int) -> bytes:
        with _about(path):
            _check_regular(os.lstat(path), path)
            # O_NONBLOCK and the second check, because the file may meanwhile have become a FIFO.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                status = os.fstat(fd)
                _check_regular(status, path)
                data = b"" if status.st_size > max_bytes else _read_upto(fd, max_bytes + 1)
            finally:
                os.close(fd)
        if (size := max(status.st_size, len(data))) > max_bytes:
            raise corrupt(path, f"must have at most {max_bytes} bytes, got {size}")
        return data

    def read_into(self, path: str, offset: int, buffers: Sequence[Any]) -> None:
        with _about(path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                _check_regular(os.fstat(fd), path)
                _fill(fd, offset, buffers)
            finally:
                os.close(fd)

    def write(self, path: str, data: bytes | Iterable[bytes]) -> None:
        with _about(path):
            parts = [data] if isinstance(data, bytes) else data
            _publish(_write_new(temporary_sibling(path), parts), path, parts, replace=True)

    def create(self, path: str, data: bytes) -> bool:
        with _about(path):
            if not self.atomic_rename:
                return _create_in_place(path, data)
            return _publish(_write_new(temporary_sibling(path), [data]), path, [data])

    def kind(self, path: str) -> EntryKind | None:
        with _about(path):
            try:
                mode = os.lstat(path).st_mode
            except (FileNotFoundError, NotADirectoryError):
                return None
        if stat.S_ISREG(mode):
            return "file"
        return "dir" if stat.S_ISDIR(mode) else "other"

    def size(self, path: str) -> int:
        with _about(path):
            status = os.lstat(path)
            _check_regular(status, path)
        return status.st_size

    def entries(self, path: str) -> dict[str, Entry]:
        found, call = {}, getattr(here, "call", None)
        with _about(path), os.scandir(path) as scan:
            for entry in scan:
                if entry.is_dir(follow_symlinks=False):
                    found[entry.name] = _DIR
                    continue
                if call is not None:
                    call.move(entry.path)
                with contextlib.suppress(FileNotFoundError):  # deleted during the scan
                    status = entry.stat(follow_symlinks=False)
                    is_file = stat.S_ISREG(status.st_mode)
                    found[entry.name] = Entry("file", status.st_size) if is_file else _OTHER
        return dict(sorted(found.items()))

    def files(self, path: str, *, in_one: bool = False) -> dict[str, Entry]:
        return files_in(lambda folder: listing(self, folder) or {}, path)

    def make_dir(self, path: str) -> None:
        with _about(path):
            missing = []
            while not _is_dir(path):
                missing.append(path)
                path = os.path.dirname(path)
            for directory in reversed(missing):
                try:  # if another process makes it meanwhile, it may not be durable yet
                    os.mkdir(directory)
                except FileExistsError as error:
                    if not _is_dir(directory):
                        code = errno.ENOTDIR
                        raise NotADirectoryError(code, os.strerror(code), directory) from error
                _sync_parents(directory)

    def sync(self, path: str) -> None:
        with _about(path):
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                _sync(path, os.O_NOFOLLOW | os.O_NONBLOCK)
                return
            with os.scandir(path) as scan:
                entries = list(scan)
            for entry in entries:
                # `write` syncs its temporary files itself, and they may vanish before we open them.
                ready = entry.is_file(follow_symlinks=False) and not is_temporary_file(entry.name)
                if ready or entry.is_dir(follow_symlinks=False):
                    self.sync(entry.path)
            _sync(path, os.O_DIRECTORY)

    def rename(self, src: str, dst: str) -> None:
        if not self.atomic_rename:
            raise io.UnsupportedOperation(
                errno.ENOTSUP, "a mounted bucket cannot rename", src, None, dst
            )
        with _about(src, dst):
            if not _renameat2(src, dst, _RENAME_NOREPLACE):
                # Not atomic, but the writers of one run never rename to the same name: `hold` and
                # the names of transactions prevent it.
                if os.path.lexists(dst):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
                os.rename(src, dst)
            _sync_parents(dst, src)

    def link(self, src: str, dst: str) -> bool:
        with _about(src, dst):
            _check_regular(os.lstat(src), src)
            try:
                os.link(src, dst, follow_symlinks=False)
            except OSError:  # if it is not about links, the copy raises it too
                with open(src, "rb") as source, open(dst, "xb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 20)
                return False
            return True

    def link_all(self, src: str, dst: str, sizes: Mapping[str, int]) -> None:
        made: list[str] = []
        try:
            for folder in {os.path.dirname(f"{dst}/{name}") for name in sizes}:
                with _about(folder):  # no sync: a caller may be waiting for this
                    os.makedirs(folder, exist_ok=True)
            for name, size in sizes.items():
                source, target = f"{src}/{name}", f"{dst}/{name}"
                with _about(source, target):
                    status = os.lstat(source)
                    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
                        raise FileNotFoundError(errno.ENOENT, f"no file of {size} bytes", source)
                    os.link(source, target, follow_symlinks=False)
                    made.append(target)
            made.clear()  # now they stay
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise io.UnsupportedOperation(error.errno, "no hard links", src) from error
            raise
        finally:
            for target in made:
                with contextlib.suppress(OSError):
                    os.unlink(target)

    def exchange(self, a: str, b: str) -> bool:
        with _about(a, b):
            done = self.atomic_rename and _renameat2(a, b, _RENAME_EXCHANGE)
            if done:
                _sync_parents(a, b)
        return done

    def delete(self, path: str) -> None:
        kind = self.kind(path)
        if kind is not None:
            with _about(path):
                if not self.atomic_rename:
                    _flock.release_below(path)
                _delete(path, path, is_dir=kind == "dir")
                _sync_parents(path)

    def delete_files(self, paths: Sequence[str], *, check: Callable[[], object] = int) -> None:
        check()
        for path in paths:
            self.delete(path)

    def delete_empty(self, path: str) -> bool:
        with _about(path):
            try:
                os.rmdir(path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    raise
                return error.errno == errno.ENOENT
            _sync_parents(path)
        return True

    def hold(self, path: str, data: bytes | None = None, *, new: bool = False) -> Hold | None:
        if new:
            return hold_new(self, path, data or b"")
        with _about(path):
            return _flock.lock(path, data, partial(_check_regular, hint=_LOCKS))


def _is_dir(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


# Files


def _write_new(path: str, parts: Iterable[bytes]) -> str:
    """Writes a durable file that must not exist yet; returns its path."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            unsynced_bytes = 0
            for part in parts:
                rest = memoryview(part)
                unsynced_bytes += len(rest)
                while rest:
                    rest = rest[os.write(fd, rest) :]
                if (call := getattr(here, "call", None)) is not None:
                    if unsynced_bytes > _SYNCED_BYTES:  # a long `fsync` would be taken for a hang
                        os.fsync(fd)
                        unsynced_bytes = 0
                    call.move(path)
            os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    return path


def _create_in_place(path: str, data: bytes) -> bool:
    # A crash in here leaves a part of the file. And two hosts may both succeed: the store lacks
    # exclusive creation, and the owner's file decides which job may write a run.
    try:
        _write_new(path, [data])
    except FileExistsError:
        return False
    _sync_parents(path)
    return True


def _publish(temporary: str, path: str, parts: Any = None, *, replace: bool = False) -> bool:
    """Gives a temporary file its name, durably; returns False if the name is taken."""
    try:
        if replace:
            os.rename(temporary, path)
        elif not _give_new_name(temporary, path):
            return False
    except FileNotFoundError:  # a new owner of the run took it for a leftover
        if not isinstance(parts, list) or os.path.lexists(temporary):
            raise
        return _publish(_write_new(temporary, parts), path, parts, replace=replace)
    finally:
        with contextlib.suppress(OSError):  # it remains after an error or a link
            os.unlink(temporary)
    _sync_parents(path)
    return True


def _give_new_name(temporary: str, path: str) -> bool:
    try:
        if _renameat2(temporary, path, _RENAME_NOREPLACE):
            return True
        os.link(temporary, path, follow_symlinks=False)
    except FileExistsError:
        # Over NFS the reply to a successful link can be lost, and the retry finds the file.
        return os.lstat(temporary).st_nlink == 2
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EMLINK, *UNSUPPORTED):
            raise
        return _replace_empty(temporary, path)
    return True


def _replace_empty(temporary: str, path: str) -> bool:
    # The last resort: a crash in here leaves an empty file.
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    except FileExistsError:
        return False
    try:
        os.rename(temporary, path)
    except BaseException:
        os.unlink(path)
        raise
    return True


def _read_upto(fd: int, count: int) -> bytes:
    # The reported size is a hint: the file may grow, and /proc reports 0.
    blocks = []
    want = min(os.fstat(fd).st_size + 1, count)
    while want and (block := os.read(fd, want)):
        blocks.append(block)
        count -= len(block)
        want = min(1 << 20, count)
    return b"".join(blocks)


def _fill(fd: int, offset: int, buffers: Sequence[Any]) -> None:
    for i in range(0, len(buffers), _MOST_BUFFERS):
        some = buffers[i : i + _MOST_BUFFERS]
        wanted = sum(map(len, some))
        while wanted:
            count = os.preadv(fd, some, offset)
            if not count:
                raise EOFError(f"the file ends at byte {offset}, expected {wanted} more bytes")
            wanted, offset = wanted - count, offset + count
            if wanted:  # a large read may be short
                some = _after(some, count)


def _after(buffers: Sequence[Any], count: int) -> list[Any]:
    """Returns the rest of the buffers after the first `count` bytes."""
    left = []
    for buffer in buffers:
        left.append(buffer[count:])
        count -= min(count, len(buffer))
    return left


def _check_regular(status: os.stat_result, path: str, hint: str = "") -> None:
    if stat.S_ISREG(status.st_mode):
        return
    hint = hint or (_LINKS if stat.S_ISLNK(status.st_mode) else "")
    raise corrupt(path, f"is not a regular file (mode {stat.filemode(status.st_mode)}).{hint}")


# Directories


def _delete(path: str, name: str, parent_fd: int | None = None, *, is_dir: bool) -> None:
    # By descriptor, so that a directory replaced by a link meanwhile is not followed. Another
    # process may be deleting too.
    with _about(path), contextlib.suppress(FileNotFoundError):
        if not is_dir:
            os.unlink(name, dir_fd=parent_fd)
            return
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=parent_fd)
        try:
            with os.scandir(fd) as scan:
                entries = list(scan)
            for entry in entries:
                below = entry.is_dir(follow_symlinks=False)
                _delete(os.path.join(path, entry.name), entry.name, fd, is_dir=below)
        finally:
            os.close(fd)
        _remove_dir(path, name, parent_fd)


def _remove_dir(path: str, name: str, parent_fd: int | None) -> None:
    for left in reversed(range(_HIDDEN_TRIES)):
        try:
            os.rmdir(name, dir_fd=parent_fd)
        except OSError as error:
            hidden = all(one.startswith(_HIDDEN) for one in os.listdir(path))
            if error.errno != errno.ENOTEMPTY or not left or not hidden:
                raise
            time.sleep(_HIDDEN_WAIT_S)
        else:
            return


def _sync_parents(*paths: str) -> None:
    for directory in dict.fromkeys(map(os.path.dirname, paths)):
        _sync(directory, os.O_DIRECTORY)


def _sync(path: str, flags: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(fd)
    except OSError as error:
        if flags != os.O_DIRECTORY or error.errno not in UNSUPPORTED:
            raise  # else a network file system that cannot sync a directory
    finally:
        os.close(fd)


# Atomic renames

_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_NO_LINKS = (errno.EPERM, errno.EACCES, errno.EXDEV, *UNSUPPORTED)
_LIBC_RENAMEAT2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def _renameat2(src: str, dst: str, flags: int) -> bool:
    """Renames; returns False without a change if libc, kernel or file system lack the call."""
    if _LIBC_RENAMEAT2 is None:
        return False
    at_fdcwd = -100
    src_bytes, dst_bytes = os.fsencode(src), os.fsencode(dst)
    if b"\0" in src_bytes + dst_bytes:
        raise ValueError("embedded null byte")  # C would cut the name there
    while _LIBC_RENAMEAT2(at_fdcwd, src_bytes, at_fdcwd, dst_bytes, flags):
        code = ctypes.get_errno()
        if code in UNSUPPORTED:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


@contextlib.contextmanager
def _about(path: str, other: str | None = None) -> Iterator[None]:
    """Adds the caller's path to an OSError that names no path, or a temporary file."""
    if (call := getattr(here, "call", None)) is not None:
        call.move(path)
    try:
        yield
    except OSError as error:
        name = error.filename
        # Not a descriptor, a name relative to one, or a temporary file.
        tells = isinstance(name, str) and os.path.isabs(name)
        if error.errno and not (tells and not os.path.basename(name).startswith(".jaxckpt-")):
            error.filename = path
            if other is not None:
                error.filename2 = other
        raise
