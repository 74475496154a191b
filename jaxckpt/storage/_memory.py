"""Checkpoints in the memory of this process, in a store that behaves like an object store."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

from jaxckpt.storage._local import files_in, hold_new, listing
from jaxckpt.storage._protocol import Entry, EntryKind, Hold, WithoutDirectories, corrupt


@final
class MemoryStorage(WithoutDirectories):
    """Files by path, shared by all threads of this process.

    As in an object store, nothing can be renamed, and a directory exists only while it has entries.
    """

    scheme = "memory"
    parallel_writes = False
    reads_at_once = 4

    def read(self, path: str, *, max_bytes: int) -> bytes:
        data = self._value(path)
        if len(data) > max_bytes:
            raise corrupt(path, f"must have at most {max_bytes} bytes, got {len(data)}")
        return data

    def read_into(self, path: str, offset: int, buffers: Sequence[Any]) -> None:
        data = memoryview(self._value(path))[offset:]
        for buffer in buffers:
            view = memoryview(buffer)
            if len(data) < len(view):
                raise EOFError(f"{path}: the file ends {len(view) - len(data)} bytes early")
            view[:], data = data[: len(view)], data[len(view) :]

    def write(self, path: str, data: bytes | Iterable[bytes]) -> None:
        _files[path] = data if isinstance(data, bytes) else b"".join(data)

    def create(self, path: str, data: bytes) -> bool:
        with _lock:
            is_new = path not in _files
            if is_new:
                _files[path] = bytes(data)
        return is_new

    def kind(self, path: str) -> EntryKind | None:
        if path in _files:
            return "file"
        return "dir" if _under(path) else None

    def size(self, path: str) -> int:
        return len(self._value(path))

    def entries(self, path: str) -> dict[str, Entry]:
        prefix, found = _prefix(path), dict[str, Entry]()
        for file, data in _files.copy().items():
            name, slash, _ = file.removeprefix(prefix).partition("/")
            if file.startswith(prefix) and slash:
                found.setdefault(name, Entry("dir", 0))
            elif file.startswith(prefix):
                found[name] = Entry("file", len(data))
        if not found:
            raise _os_error(errno.ENOENT, path)
        return dict(sorted(found.items()))

    def files(self, path: str, *, in_one: bool = False) -> dict[str, Entry]:
        return files_in(lambda folder: listing(self, folder) or {}, path)

    def link(self, src: str, dst: str) -> bool:
        if not self.create(dst, self._value(src)):
            raise _os_error(errno.EEXIST, dst)
        return False

    def delete(self, path: str) -> None:
        self.delete_files([path, *_under(path)])

    def delete_files(self, paths: Sequence[str], *, check: Callable[[], object] = int) -> None:
        check()
        for path in paths:
            _files.pop(path, None)

    def hold(self, path: str, data: bytes | None = None, *, new: bool = False) -> Hold | None:
        if new:
            return hold_new(self, path, data or b"")
        self.create(path, b"")
        with _lock:
            if path in _held:
                return None
            _held.add(path)
        if data is not None:
            self.write(path, data)
        return _MemoryHold(path)

    def _value(self, path: str) -> bytes:
        data = _files.get(path)
        if data is None:
            raise _os_error(errno.ENOENT, path)
        return data


_files: dict[str, bytes] = {}  # by path
_held: set[str] = set()
_lock = threading.Lock()  # guards what two threads may create at once


@final
class _MemoryHold(Hold):
    def __init__(self, path: str) -> None:
        self._path: str | None = path

    def release(self) -> None:
        with _lock:
            if self._path is not None:
                _held.remove(self._path)
                self._path = None


def _under(path: str) -> list[str]:
    prefix = _prefix(path)
    return [file for file in list(_files) if file.startswith(prefix)]


def _prefix(path: str) -> str:
    return "memory://" if path.rstrip("/") == "memory:" else path.rstrip("/") + "/"


def _os_error(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)
