"""Paths whose storage tells a test about each call before it is made."""

from __future__ import annotations

from jaxckpt.storage import PathIn, locate
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
