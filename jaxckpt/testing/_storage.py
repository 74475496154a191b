"""Storages that fail on purpose, wait, or report their calls.

Each wraps a storage and forwards every call. TensorStore's writes to a `kvstore` bypass them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar, final

from jaxckpt.storage import Entry, Hold, Storage
from jaxckpt.storage._local import files_in, hold_new, listing, temporary_sibling

P = ParamSpec("P")
T = TypeVar("T")

MUTATING_VERBS = frozenset(
    "write create make_dir sync link link_all rename exchange delete delete_files "
    "delete_empty".split()
)


class SimulatedCrash(BaseException):
    """The simulated process is dead. Not an Exception, so that no handler cleans up after it."""


class _Relay:
    # Lists the verbs once. A subclass defines in `_before` what happens before each.
    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.scheme = inner.scheme
        self.atomic_rename = inner.atomic_rename
        self.hard_links, self.server_copies = inner.hard_links, inner.server_copies
        self.parallel_writes = False  # so that the order is known
        self.reads_at_once = inner.reads_at_once
        told = self._told
        self.read, self.read_into = told("read", inner.read), told("read_into", inner.read_into)
        self.kind, self.size = told("kind", inner.kind), told("size", inner.size)
        self.entries, self.sync = told("entries", inner.entries), told("sync", inner.sync)
        self.make_dir, self.rename = told("make_dir", inner.make_dir), told("rename", inner.rename)
        self.link, self.link_all = told("link", inner.link, 1), told("link_all", inner.link_all, 1)
        self.exchange, self.delete = told("exchange", inner.exchange), told("delete", inner.delete)
        self.delete_empty = told("delete_empty", inner.delete_empty)

    def _before(self, verb: str, path: str, data: bytes = b"") -> None:
        raise NotImplementedError

    def _told(self, name: str, do: Callable[P, T], at: int = 0) -> Callable[P, T]:
        """Returns a verb that reports its path, the argument `at`, before it acts."""

        def verb(*args: P.args, **options: P.kwargs) -> T:
            path: Any = args[at]
            self._before(name, path)
            return do(*args, **options)

        verb.__name__ = name
        return verb

    def write(self, path: str, data: bytes | Iterable[bytes]) -> None:
        data = data if isinstance(data, bytes) else b"".join(data)
        self._before("write", path, data)
        self.inner.write(path, data)

    def create(self, path: str, data: bytes) -> bool:
        self._before("create", path, data)
        return self.inner.create(path, data)

    def files(self, path: str, *, in_one: bool = False) -> dict[str, Entry]:
        return files_in(lambda folder: listing(self, folder) or {}, path)

    def delete_files(self, paths: Sequence[str], *, check: Callable[[], object] = int) -> None:
        for path in paths:
            self._before("delete", path)
            self.inner.delete_files([path], check=check)

    def hold(self, path: str, data: bytes | None = None, *, new: bool = False) -> Hold | None:
        if new:
            return hold_new(self, path, data or b"")
        self._before("hold", path)
        return self.inner.hold(path, data)


@final
class CrashingStorage(_Relay):
    """A storage whose process dies after a number of changes.

    The first `after` mutating verbs act. The next one raises `SimulatedCrash`, and so does every
    later call, reads included. Locks taken here are then released, as after a real crash.

    Args:
        inner: The storage that is changed; a restarted process finds its contents.
        after: The number of mutating verbs that act. If None, all act and are counted.
        torn: Whether the crashing verb is half done: half of the bytes under a temporary name (in a
            mounted bucket, of a new file under its own), half of the missing parents, half of the
            files of a tree. Atomic verbs do nothing.

    Attributes:
        events: Each mutating verb with its path, ending with the verb that crashed.
    """

    def __init__(self, inner: Storage, after: int | None = None, *, torn: bool = False) -> None:
        super().__init__(inner)
        self.events: list[str] = []
        self._after = after
        self._torn = torn
        self._crashed = False
        self._holds: list[Hold] = []

    def hold(self, path: str, data: bytes | None = None, *, new: bool = False) -> Hold | None:
        taken = super().hold(path, data, new=new)
        if not new and taken is not None:
            self._holds.append(taken)
        return taken

    def _before(self, verb: str, path: str, data: bytes = b"") -> None:
        if self._crashed:
            raise SimulatedCrash(f"already dead, at {verb} {path}")
        if verb not in MUTATING_VERBS:
            return
        self.events.append(f"{verb} {path}")
        if self._after is None or len(self.events) <= self._after:
            return
        self._crashed = True
        if self._torn:
            _do_half(self.inner, verb, path, data)
        for hold in self._holds:
            hold.release()
        raise SimulatedCrash(f"after {self._after} changes, at {verb} {path}")


def _do_half(storage: Storage, verb: str, path: str, data: bytes) -> None:
    match verb:
        case "create" if storage.scheme == "file" and not storage.atomic_rename:
            storage.create(path, data[: len(data) // 2])
        case "write" | "create" if storage.scheme == "file":
            storage.write(temporary_sibling(path), data[: len(data) // 2])
        case "make_dir":
            missing = []
            while path != "/" and storage.kind(path) is None:
                missing.append(path)
                path = os.path.dirname(path)
            for directory in missing[::-1][: len(missing) // 2]:
                storage.make_dir(directory)
        case "delete":
            below = _all_below(storage, path)
            for victim in below[: len(below) // 2]:
                storage.delete(victim)


def _all_below(storage: Storage, path: str) -> list[str]:
    """Returns the paths that `delete` removes, entries before their directory."""
    if storage.kind(path) != "dir":
        return []
    below = []
    for name in storage.entries(path):
        child = f"{path}/{name}"
        below += [*_all_below(storage, child), child]
    return below


@final
class FailingStorage(_Relay):
    """A storage in which a call fails, or every call from a certain call on.

    Args:
        inner: The storage for the other calls.
        at: The index of the failing call, counting only mutating verbs from zero.
        error: The error to raise, with the path of the call. "No space" errors spare `delete`, as
            in reality.
        once: Whether only that call fails, or every counted call from it on.
        reads: Whether to count, and fail, reading verbs and `hold` too.

    Attributes:
        events: Each counted call and its path.
        failed: The number of calls that raised.
    """

    def __init__(
        self, inner: Storage, at: int, error: OSError, *, once: bool = True, reads: bool = False
    ) -> None:
        super().__init__(inner)
        self.events: list[str] = []
        self.failed = 0
        self._at = at
        self._error = error
        self._once = once
        self._reads = reads

    def _before(self, verb: str, path: str, data: bytes = b"") -> None:
        if not (self._reads or verb in MUTATING_VERBS):
            return
        index = len(self.events)
        self.events.append(f"{verb} {path}")
        if index < self._at or (self._once and index > self._at):
            return
        if verb == "delete" and self._error.errno in (errno.ENOSPC, errno.EDQUOT):
            return
        self.failed += 1
        # A new object, because each raise adds to its traceback; OSError picks the class.
        raise OSError(self._error.errno, self._error.strerror, path)


@final
class WatchedStorage(_Relay):
    """A storage that reports each call before it makes it.

    Args:
        inner: The storage that is called.
        before: Called with the verb and the path, in the thread of the call. It may wait, or change
            something at just this moment; what it raises is raised in place of the call.

    Example:
        >>> import jaxckpt
        >>> from jaxckpt.storage import MemoryStorage, PathIn
        >>> seen = []
        >>> storage = WatchedStorage(MemoryStorage(), lambda verb, path: seen.append(verb))
        >>> jaxckpt.save(PathIn(storage, "memory://watched/a"), {"step": 7})
        >>> seen[0], jaxckpt.restore("memory://watched/a")
        ('entries', {'step': 7})
    """

    def __init__(self, inner: Storage, before: Callable[[str, str], object]) -> None:
        super().__init__(inner)
        self._tell = before

    def _before(self, verb: str, path: str, data: bytes = b"") -> None:
        self._tell(verb, path)
