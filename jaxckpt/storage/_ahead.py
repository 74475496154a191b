"""Reads a checkpoint in an object store in few round trips: its listing, then its metadata.

A view holds the store's contents at the time it was made. It asks the store for all else.
"""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final, cast, final

from jaxckpt.errors import CorruptCheckpoint
from jaxckpt.format import names
from jaxckpt.storage._protocol import Entry, EntryKind, Storage

# Read with the listing, since every restore needs them.
_FIRST: Final = frozenset(
    {
        names.RECORD,
        names.CHECKPOINT_METADATA,
        names.TREE_METADATA,
        names.OCDBT_MANIFEST,
        names.CHUNK_SUMS,
        names.STRINGS,
    }
)
_MOST_BYTES: Final = 16 << 20  # of one file


def read_ahead(
    storage: Storage, path: str, files: Callable[[], dict[str, Entry] | None], *, reads: bool
) -> Storage:
    """Returns a view of the checkpoint at `path`, or `storage` if there is none or it is large.

    Args:
        files: Returns all files below `path`, or None if there are very many.
        reads: Whether to read the metadata too.
    """
    found = files()
    if found is None or names.CHECKPOINT_METADATA not in found:
        return storage
    wanted = [
        f"{path}/{name}"
        for name, entry in found.items()
        if reads and _is_first(name) and entry.size <= _MOST_BYTES
    ]
    calls = [partial(_read, storage, file) for file in wanted]
    data = dict(zip(wanted, storage.together(calls), strict=True))
    return cast("Storage", Ahead(storage, path, found, data))


def listed(storage: Storage, root: str, first: Collection[str]) -> Storage:
    """Returns a view of all checkpoints of a run, or `storage` if that has directories to list.

    Args:
        first: The names of small files to read, wherever they are.
    """
    if storage.atomic_rename:
        return storage
    found = storage.files(root)
    wanted = [
        f"{root}/{name}"
        for name, entry in found.items()
        if posixpath.basename(name) in first and entry.size <= _MOST_BYTES
    ]
    calls = [partial(_read, storage, file) for file in wanted]
    data = dict(zip(wanted, storage.together(calls), strict=True))
    return cast("Storage", Ahead(storage, root, found, data))


def _is_first(name: str) -> bool:
    return posixpath.basename(name) in _FIRST and not any(
        part.startswith(names.OCDBT_PROCESS) for part in name.split("/")
    )


def _read(storage: Storage, file: str) -> bytes | None:
    try:
        return storage.read(file, max_bytes=_MOST_BYTES)
    except (FileNotFoundError, CorruptCheckpoint):  # replaced since it was listed
        return None


def now(storage: Storage) -> Storage:
    """Returns the storage behind a view, which reads the present contents."""
    return storage.inner if isinstance(storage, Ahead) else storage


@final
class Ahead:
    """The view of `read_ahead` and `listed`: a `Storage`."""

    def __init__(
        self,
        inner: Storage,
        root: str,
        files: Mapping[str, Entry],
        data: Mapping[str, bytes | None],
    ) -> None:
        self.inner = inner
        self.data = data
        self._root = root
        self._folders: dict[str, dict[str, Entry]] = {root: {}}
        for name, entry in files.items():
            self._put(f"{root}/{name}", entry)

    def _put(self, path: str, entry: Entry) -> None:
        folder, name = posixpath.split(path)
        if folder not in self._folders:
            self._folders[folder] = {}
            self._put(folder, Entry("dir", 0))
        self._folders[folder][name] = entry

    def read(self, path: str, *, max_bytes: int) -> bytes:
        data = self.data.get(path)
        if data is None or len(data) > max_bytes:
            return self.inner.read(path, max_bytes=max_bytes)
        return data

    def kind(self, path: str) -> EntryKind | None:
        if path in self._folders:
            return "dir"
        if not path.startswith(f"{self._root}/"):
            return self.inner.kind(path)
        folder, name = posixpath.split(path)
        entry = self._folders.get(folder, {}).get(name)
        return None if entry is None else entry.kind

    def entries(self, path: str) -> dict[str, Entry]:
        if path in self._folders:
            return dict(sorted(self._folders[path].items()))
        if path.startswith(f"{self._root}/"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self.inner.entries(path)

    def names(self, path: str) -> list[str]:
        return list(self.entries(path))

    def ahead(self, path: str, *, reads: bool = True) -> Storage:
        if path.startswith(f"{self._root}/"):
            return cast("Storage", self)
        return self.inner.ahead(path, reads=reads)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
