"""`delete`: a checkpoint, or one item of it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from jaxckpt._disk.commit import commit_of
from jaxckpt._disk.found import Found
from jaxckpt._disk.removal import remove_item
from jaxckpt.multihost import current, lead
from jaxckpt.orbax.v1._context import get_context
from jaxckpt.orbax.v1._loading import PathLike, found_checkpoint, item_names
from jaxckpt.orbax.v1._saving import RESERVED, AsyncResponse, Done
from jaxckpt.orbax.v1.errors import DeletionRecoveryError
from jaxckpt.storage import locate


def delete(
    path: PathLike, *, checkpointable_name: str | None = None, missing_ok: bool = False
) -> bool:
    """Deletes a checkpoint, or one of its items, and returns whether it was there.

    Raises:
        FileNotFoundError: it was not there.
        ValueError: the item is the last, or the main item.
    """
    check_arguments(checkpointable_name, missing_ok)
    if get_context().deletion.gcs_deletion_options.todelete_full_path is not None:
        raise NotImplementedError("todelete_full_path: see jaxckpt.KeepPolicy(move_to=...)")
    storage, where = locate(path)

    def do() -> str:
        if storage.kind(where) is None:
            return f"Checkpoint does not exist: {path}"
        found = found_checkpoint(path)
        if checkpointable_name is not None:
            return _delete_item(path, found, checkpointable_name)
        commit_of(storage, where).remove()
        return ""

    # Process 0 also looks whether it is there: others may look when it is gone already.
    missing = lead(current(), f"orbax delete {where}", do, where=where)
    if missing and not missing_ok:
        raise FileNotFoundError(missing)
    return not missing


def _delete_item(path: PathLike, found: Found, name: str) -> str:
    """Deletes an item, and returns what is missing, or ""."""
    if found.deleting not in (None, name):
        raise DeletionRecoveryError(f"{path}: delete item {found.deleting!r} first, again")
    there = item_names(found)
    if name not in (*there, found.deleting):
        return f"Checkpointable {name!r} does not exist at {path}"
    if there == [name]:
        raise ValueError(f"{path}: {name!r} is the only item; delete the whole checkpoint instead")
    if found.record is None or found.record.item == name:
        why = "is the main one" if found.record else "was not saved by jaxckpt; delete it in Orbax"
        raise ValueError(f"item {name!r} of {path} {why}")
    remove_item(found.storage, found.path, found.record, name, check=int, held=nullcontext())
    return ""


def check_arguments(name: Any, missing_ok: Any) -> None:
    """Raises TypeError or ValueError for arguments that mean nothing."""
    if not isinstance(name, str | None) or not isinstance(missing_ok, bool):
        raise TypeError("checkpointable_name must be a str or None, and missing_ok a bool")
    if name is not None and (name in ("", ".", "..", *RESERVED) or {*name} & {*"/\\\0"}):
        raise ValueError(f"Invalid checkpointable name: {name!r}.")


def delete_async(
    path: PathLike, *, checkpointable_name: str | None = None, missing_ok: bool = False
) -> AsyncResponse:
    """Deletes at once, and returns a response that is done."""
    return Done(delete(path, checkpointable_name=checkpointable_name, missing_ok=missing_ok))
