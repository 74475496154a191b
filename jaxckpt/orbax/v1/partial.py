"""One checkpoint, saved in parts: each is a step of a run beside it until `finalize`.

save(path, {"params": ...}); save(path, {"opt_state": ...}); finalize(path)
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any, Final

from jaxckpt import CheckpointManager, restore
from jaxckpt import open as open_checkpoint
from jaxckpt._disk.removal import remove
from jaxckpt.multihost import current, lead
from jaxckpt.orbax import _trees
from jaxckpt.orbax.v1 import _saving
from jaxckpt.orbax.v1._saving import AsyncResponse, PathLike
from jaxckpt.orbax.v1.tree import merge
from jaxckpt.storage import locate

_SUFFIX: Final = ".partial_save"
_started: Final[Counter[str]] = Counter()  # parts of each path whose saves this process began
_names: Final[dict[str, set[_trees.Names]]] = {}  # of their leaves


class PartialSaveError(Exception):
    """A part does not go with the others."""


class PartialSaveReplacementError(PartialSaveError):
    """A leaf was saved in an earlier part."""


def _parts(path: PathLike) -> tuple[str, str]:
    """Returns the path of the checkpoint and of the run of its parts."""
    final = os.fspath(path).removesuffix(_SUFFIX)
    storage, where = locate(final)
    if storage.kind(where) is not None:
        raise FileExistsError(f"Finalized checkpoint already exists at {final}.")
    return final, final + _SUFFIX


def _steps(folder: str) -> list[int]:
    storage, where = locate(folder)

    def steps() -> list[int]:
        if storage.kind(where) is None:
            return []
        with CheckpointManager(folder, mode="r") as run:
            return run.all_steps()

    return lead(current(), f"parts {folder}", steps, place=folder, timeout_s=1200.0)


def save(path: PathLike, state: Any, *, custom_metadata: Any = None) -> None:
    """Saves a part of a checkpoint."""
    save_async(path, state, custom_metadata=custom_metadata).result()


def save_async(path: PathLike, state: Any, *, custom_metadata: Any = None) -> AsyncResponse:
    """Saves a part of a checkpoint in the background.

    Raises:
        FileExistsError: the checkpoint is final.
        PartialSaveReplacementError: this program saved a leaf of it before.
    """
    _, folder = _parts(path)
    known, new = _names.setdefault(folder, set()), {*_trees.by_name(state)}
    if both := _overlap(known, new) | _overlap(new, known):
        raise PartialSaveReplacementError(
            f"Partial saving currently does not support REPLACEMENT. {folder} has {sorted(both)} "
            "already, or what is below or above"
        )
    steps = _steps(folder)
    number = max(_started[folder], *(step + 1 for step in steps), 0)
    response = _saving.save_async(f"{folder}/{number}", state, custom_metadata=custom_metadata)
    _started[folder] = number + 1
    known |= new
    return response


def _overlap(above: set[_trees.Names], below: set[_trees.Names]) -> set[_trees.Names]:
    """Returns the leaves that are, or are below, one of the others."""
    return {leaf for leaf in below if any(leaf[: i + 1] in above for i in range(len(leaf)))}


def finalize(path: PathLike) -> None:
    """Makes one checkpoint of all parts, which are read and written once more.

    Raises:
        FileExistsError: the checkpoint is final.
        FileNotFoundError: there are no parts.
    """
    final, folder = _parts(path)
    parts = [f"{folder}/{step}" for step in _steps(folder)]
    if not parts:
        raise FileNotFoundError(f"Partial save path {folder} does not exist.")
    custom: dict[str, Any] = {}
    for part in parts:
        custom |= open_checkpoint(part).custom_metadata
    tree = merge(*map(restore, parts), overwrite=True)
    _saving.save(final, tree, custom_metadata=custom)
    storage, where = locate(folder)
    name, limit = f"parts {folder} go", {"place": folder, "timeout_s": 1200.0}
    lead(current(), name, lambda: remove(storage, where), **limit)
    _started.pop(folder, None)
    _names.pop(folder, None)
