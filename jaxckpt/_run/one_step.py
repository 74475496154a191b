"""Does what is asked for one step by its number: pins it, or deletes one of its items.

The deletion of an item leaves the rest of its step as it is; see `_disk.removal`.
"""

from __future__ import annotations

import posixpath

from jaxckpt._disk.find import find
from jaxckpt._disk.found import Found
from jaxckpt._disk.item import choose_item, main_item
from jaxckpt._disk.removal import nested, remove_item
from jaxckpt._run.deletion import Deletion
from jaxckpt._run.index import StepIndex
from jaxckpt._run.leases import Leases
from jaxckpt.errors import CheckpointNotFound
from jaxckpt.format import names


def pin(leases: Leases, number: int) -> None:
    """Keeps a step regardless of the policy."""
    storage, path = leases.index.storage, leases.index.check_step(number)
    gone = CheckpointNotFound(f"{path} is being deleted and can no longer be pinned")
    added = [] if is_pinned(leases.index, number) else [f"{path}/{names.PINNED}"]
    try:
        for file in added:
            storage.write(file, b"")
    except FileNotFoundError as error:
        raise gone from error
    # A writer dooms a step before it looks for pins, so either it sees the pin or we see it.
    if not leases.is_staying(posixpath.basename(path)):
        storage.delete_files(added)  # nothing else may
        raise gone


def unpin(leases: Leases, number: int) -> None:
    leases.index.storage.delete(f"{leases.index.check_step(number)}/{names.PINNED}")


def is_pinned(index: StepIndex, number: int) -> bool:
    return index.has(number, names.PINNED)


def delete_item(run: Deletion, number: int, item: str) -> None:
    """Deletes one item of a step, or finishes its deletion.

    Raises:
        CheckpointNotFound, ValueError: the item cannot be deleted; nothing was changed.
        SaveFailed: another job owns the run; nothing is changed from then on.
    """
    with run.lock:  # the policy may be deleting the step
        found, check = check_item(run.leases, number, item), run.owner.check
        assert found.record is not None  # checked
        check()
        held = run.leases.protect(number, changes=True)
        remove_item(run.index.storage, found.path, found.record, item, check=check, held=held)
        run.index.forget(number)


def check_item(leases: Leases, number: int, item: str) -> Found:
    """Returns the step of an item that may be deleted.

    Raises:
        CheckpointNotFound: no such step or item.
        ValueError: the item is the main one, another program wrote the step, a reader holds
            it, or the deletion of another item has not ended.
    """
    index, path = leases.index, leases.index.check_step(number)
    found = find(index.storage, path)
    if item != found.deleting and item not in found.removed:
        choose_item(found, item)  # checks that it is there
    name, problem, files = posixpath.basename(path), None, index.storage.files(path)
    of_item = [file for file in files if file.startswith((f"{item}/", names.RECORD))]
    if found.record is None:
        problem = "another program wrote it. Delete the item there, or convert the step"
    elif main_item(found) == item:
        problem = "it is the main item. To delete the step, name no item"
    elif found.deleting not in (None, item):
        problem = f"the deletion of item {found.deleting!r} has not ended. Delete that again"
    elif other := nested(index.storage, path, of_item):
        problem = f"it contains {other}. Move that elsewhere"
    # If it has begun, readers do not see the item, and the lease may be of that deletion.
    elif not found.deleting and name in leases.leased(index.entries()):
        problem = "a reader holds the step. Try again later"
    if problem is not None:
        raise ValueError(f"item {item!r} of {path} was not deleted: {problem}.")
    return found


def why_not_deleted(leases: Leases, number: int) -> str:
    index, path = leases.index, leases.index.path(number)
    if posixpath.basename(path) in leases.leased(index.entries()):
        return "a reader holds it"
    if other := nested(index.storage, path, index.storage.files(path)):
        return f"it contains {other}. Move that elsewhere"
    return index.problems[-1] if index.problems else "unknown"
