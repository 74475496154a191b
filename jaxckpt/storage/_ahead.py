"""Reads a checkpoint in an object store in few round trips: its listing, then its metadata.

A view holds the store's contents at the time it was made. It asks the store for all else.
"""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, final

from jaxckpt.errors import CorruptCheckpoint
from jaxckpt.format import names
from jaxckpt.storage._local import files_in, listing
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
_MOST_NODE_BYTES: Final = 1 << 20  # of a file that may have more than nodes
_TRIES: Final = 3  # to read a file that a store lists, and then reports missing


def together(storage: Storage, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Returns the results of calls that use a storage, which must not call `together`."""
    return _at_once(calls) if storage.parallel_writes else [call() for call in calls]


def _at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Makes calls at the same time; raises the first error when all have ended."""
    from jaxckpt.storage._requests import all_of, outer_callers

    return all_of(outer_callers(), calls)


def ahead(storage: Storage, path: str) -> Storage:
    """Returns a view of a checkpoint in a store, with its metadata; or else the storage."""
    if not storage.parallel_writes or (isinstance(storage, Ahead) and storage.has(path)):
        return storage
    found = storage.files(path, in_one=True)
    if names.CHECKPOINT_METADATA not in found:
        return storage
    return _view(storage, path, found, _first(found))


def listed(
    storage: Storage, root: str, first: Collection[str] = (), *, in_one: bool = False
) -> Storage | None:
    """Returns a view of all checkpoints of a run, or None if there is nothing.

    On a file system, it lists directories when they are asked for.

    Args:
        first: The names of small files to read, wherever they are. In a step with a record, only
            the record, which repeats the others.
        in_one: Whether to return None, too, if a store does not list the run in one request.
    """
    if isinstance(storage, Ahead) and storage.has(root):
        return storage
    if storage.atomic_rename:
        return Ahead(storage, root, None, {})
    found = storage.files(root, in_one=in_one)
    recorded = {name.removesuffix(names.RECORD) for name in found if name.endswith(names.RECORD)}
    wanted = [
        name
        for name in found
        if posixpath.basename(name) in first
        and (name.endswith(names.RECORD) or f"{name.partition('/')[0]}/" not in recorded)
    ]
    return _view(storage, root, found, wanted) if found else None


def _view(storage: Storage, root: str, found: Mapping[str, Entry], first: Sequence[str]) -> Storage:
    """Returns a view in which some small files have been read."""
    wanted = [f"{root}/{name}" for name in first if found[name].size <= _MOST_BYTES]
    data = together(storage, [partial(_read, storage, file) for file in wanted])
    return Ahead(storage, root, found, dict(zip(wanted, data, strict=True)))


def _first(found: Mapping[str, Entry]) -> list[str]:
    """Returns the small files that every restore needs."""
    common = [name for name in found if f"/{names.OCDBT_PROCESS}" not in f"/{name}"]
    first = [name for name in common if posixpath.basename(name) in _FIRST]
    if names.RECORD in found:  # which repeats it, unless an earlier release wrote it
        first.remove(names.CHECKPOINT_METADATA)
    # The smallest file of a database has its nodes, which would take one more round trip.
    data = sorted(filter(names.is_data_file, common), key=lambda name: -found[name].size)
    smallest = {posixpath.dirname(name): name for name in data}.values()
    return first + [name for name in smallest if found[name].size <= _MOST_NODE_BYTES]


def _read(storage: Storage, file: str) -> bytes | None:
    try:
        return storage.read(file, max_bytes=_MOST_BYTES)
    except (FileNotFoundError, CorruptCheckpoint):  # replaced since it was listed
        return None


def contradiction(file: str, what: str = "is listed, but said to be missing") -> OSError:
    """Returns the error if a store lists a file and answers that it is missing, or the reverse."""
    advice = "try again, and see whether a proxy or cache is wrong"
    return OSError(errno.EIO, f"{what}: {advice}", file)


def check_listed(storage: Storage, file: str) -> None:
    """Raises OSError if a store has a file that its listing lacks: it only looks missing."""
    (folder, name), storage = posixpath.split(file), now(storage)
    lags = not storage.atomic_rename and name not in (listing(storage, folder) or {})
    if lags and storage.kind(file) == "file":
        raise contradiction(file, "is there, but not listed")


def now(storage: Storage) -> Storage:
    """Returns the storage behind a view, which reads the present contents."""
    return storage.inner if isinstance(storage, Ahead) else storage


@final
class Ahead:
    """The view of `ahead` and `listed`: a `Storage`."""

    def __init__(
        self,
        inner: Storage,
        root: str,
        files: Mapping[str, Entry] | None,  # if None, each directory is listed once
        data: Mapping[str, bytes | None],
    ) -> None:
        self.inner = inner
        self.data = data
        self.scheme, self.atomic_rename = inner.scheme, inner.atomic_rename
        self.hard_links, self.server_copies = inner.hard_links, inner.server_copies
        self.parallel_writes, self.reads_at_once = inner.parallel_writes, inner.reads_at_once
        # The store itself does all else.
        self.size = inner.size
        self.write, self.create, self.hold = inner.write, inner.create, inner.hold
        self.make_dir, self.sync = inner.make_dir, inner.sync
        self.rename, self.exchange = inner.rename, inner.exchange
        self.link, self.link_all = inner.link, inner.link_all
        self.delete, self.delete_files = inner.delete, inner.delete_files
        self.delete_empty = inner.delete_empty
        self._root = root
        self._is_all = files is not None
        self._folders: dict[str, dict[str, Entry]] = {root: {}} if files is not None else {}
        for name, entry in (files or {}).items():
            self._put(f"{root}/{name}", entry)

    def _put(self, path: str, entry: Entry) -> None:
        folder, name = posixpath.split(path)
        if folder not in self._folders:
            self._folders[folder] = {}
            self._put(folder, Entry("dir", 0))
        self._folders[folder][name] = entry

    def read(self, path: str, *, max_bytes: int) -> bytes:
        data = self.data.get(path)
        if data is not None and len(data) <= max_bytes:
            return data
        folder, name = posixpath.split(path)
        is_there = self._is_all and name in self._folders.get(folder, ())
        for _ in range(_TRIES):
            try:
                return self.inner.read(path, max_bytes=max_bytes)
            except FileNotFoundError:
                if not is_there or name not in (listing(self.inner, folder) or {}):
                    raise
        raise contradiction(path)

    def read_into(self, path: str, offset: int, buffers: Sequence[Any]) -> None:
        data = memoryview(self.data.get(path) or b"")[offset:]
        if len(data) < sum(map(len, buffers)):
            self.inner.read_into(path, offset, buffers)
            return
        for buffer in buffers:
            buffer[:], data = data[: len(buffer)], data[len(buffer) :]

    def kind(self, path: str) -> EntryKind | None:
        if path in self._folders:
            return "dir"
        if not (self._is_all and path.startswith(f"{self._root}/")):
            return self.inner.kind(path)
        folder, name = posixpath.split(path)
        entry = self._folders.get(folder, {}).get(name)
        return None if entry is None else entry.kind

    def entries(self, path: str) -> dict[str, Entry]:
        if path in self._folders:
            return dict(sorted(self._folders[path].items()))
        if self._is_all and path.startswith(f"{self._root}/"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        found = self.inner.entries(path)
        if not self._is_all:
            self._folders[path] = found
        return found

    def files(self, path: str, *, in_one: bool = False) -> dict[str, Entry]:
        if self._is_all and self.has(path):
            return files_in(lambda folder: self._folders.get(folder, {}), path)
        return self.inner.files(path, in_one=in_one)

    def has(self, path: str) -> bool:
        """Returns whether a checkpoint is in this view."""
        return f"{path}/".startswith(f"{self._root}/")
