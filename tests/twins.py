"""Paths whose storage tells a test about each call before it is made."""

from __future__ import annotations

from jaxckpt.storage import Hold, LocalStorage, PathIn, locate
from jaxckpt.storage._memory import MemoryStorage
from jaxckpt.testing import WatchedStorage


def watched(path, before):
    """Returns the path in a storage that calls `before(verb, path)`; see `WatchedStorage`."""
    storage, where = locate(path)
    return PathIn(WatchedStorage(storage, before), where)


def denied(path, folder, *verbs):
    """Returns the path where a folder lacks permission for some verbs, which root would have."""

    def before(verb, at):
        if verb in verbs and f"{at}/".startswith(f"{folder}/"):
            raise PermissionError(13, "Permission denied", at)

    return watched(path, before)


class ReadNotes(LocalStorage):
    """A disk that notes what is read into memory: the path, and from where to where."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[str, int, int]] = []

    def read_into(self, path, offset, buffers):
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        self.taken.append((path, offset, offset + size))
        super().read_into(path, offset, buffers)


class LosingStorage(MemoryStorage):
    """A memory in which the lock of a file is lost when it is asked for the n-th time, once.

    Args:
        file: How the path of the file ends.
    """

    def __init__(self, file: str, n: int) -> None:
        super().__init__()
        self.file, self.left = file, n

    def hold(self, path, data=None, *, new=False):
        hold = super().hold(path, data, new=new)
        is_other = hold is None or not path.endswith(self.file)
        return hold if is_other else _LosingHold(self, hold)


class _LosingHold(Hold):
    def __init__(self, storage: LosingStorage, hold: Hold) -> None:
        self._storage, self.release = storage, hold.release

    def goes_on(self) -> bool:
        self._storage.left -= 1
        return self._storage.left != 0
