"""Takes ownership of a run for a command, which is only possible while no job owns it."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Collection, Iterator
from typing import NoReturn

from jaxckpt._core.text import command
from jaxckpt._run.deletion import Deletion
from jaxckpt._run.index import StepIndex
from jaxckpt._run.leases import Leases
from jaxckpt._run.listing import STRAY, existing_root, shown
from jaxckpt._run.one_step import is_pinned
from jaxckpt._run.owner import Ownership, interrupted
from jaxckpt._run.retention import KeepPolicy
from jaxckpt.errors import CheckpointNotFound, SaveFailed
from jaxckpt.format import names
from jaxckpt.storage import Hold, Storage, now


def run_at(storage: Storage, root: str, *, keep: KeepPolicy | None = None) -> Deletion:
    """Returns a run as a command sees it; problems are recorded, and not logged."""
    leases = Leases(StepIndex(storage, root, quiet=True))
    return Deletion(leases, Ownership(leases), move_to=keep and keep.move_to)


def existing_run(root: str | os.PathLike[str]) -> tuple[Storage, str]:
    """Returns the storage and path of a root with steps, or with a file of a run that has none yet.

    Raises:
        CheckpointNotFound: no such directory, or it has nothing of a run.
        NotADirectoryError, ValueError: the path is not a directory, or it is a checkpoint.
    """
    storage, where = existing_root(root, looks=True)
    listing = StepIndex(storage, where, quiet=True).listing()
    strays = listing.strays()
    if not listing.flax_files() and all(strays.get(name) == STRAY for name in listing.entries):
        raise CheckpointNotFound(
            f"{where} is not a run: it has no steps. It contains {shown([*listing.entries])}"
        )
    return now(storage), where


def half_deleted(run: Deletion) -> list[int]:
    """Returns the steps that the next owner of the run deletes: a job died while it did."""
    doomed = run.leases.doomed()
    owner = run.index.owner() if doomed.steps else None
    if owner is None or doomed.owner != owner.token:
        return []
    steps = interrupted(run.index, run.index.listing(), doomed)
    return [step for step in steps if not is_pinned(run.index, step)]


@contextlib.contextmanager
def owned(
    storage: Storage,
    root: str,
    *,
    no_job: bool = False,
    keep: KeepPolicy | None = None,
    deletes: Collection[int] = (),
) -> Iterator[Deletion]:
    """Owns a run for a moment, like a job that opens it when no other lives.

    What an interrupted save or deletion left there is cleared up, as by each job that opens it.

    Args:
        deletes: The steps that the user agreed to delete.
        storage, root: The place of an existing root; see `existing_root`.
        no_job: Whether the user states that no job writes the run, where the file system lacks
            locks to show it.
        keep: The policy of the last writer, which may move steps instead of deleting them.

    Raises:
        SaveFailed: a running job owns the run, or this is unknown; or another step would go that
            a job was deleting when it died. Nothing was changed.
    """
    seen = run_at(storage, root, keep=keep)
    left = [step for step in half_deleted(seen) if step not in deletes]
    # A job that lives may be deleting. Object stores have locks: see what else the storage may be.
    if not no_job and (left or not storage.parallel_writes):
        _lock(storage, root).release()
    if left:
        steps = " ".join(map(str, left))
        raise SaveFailed(
            f"{root}: a job died while it deleted steps {steps}, and the next job that opens the "
            f"run for writing deletes the rest. Nothing was changed. To delete them now, run: "
            f"{command('rm', root, *left)}. To keep one, copy it: "
            + command("fork", f"{root}/{left[0]}", "RUN")
        )
    owner = Ownership(seen.leases)
    try:  # also of an opening that fails once it has the lock
        owner.open()
        if not owner.token:
            _refuse(seen.index)
        yield Deletion(seen.leases, owner, move_to=seen.move_to)
    finally:
        owner.lock.release()


@contextlib.contextmanager
def locked(storage: Storage, root: str, *, no_job: bool = False) -> Iterator[StepIndex]:
    """Keeps other jobs out of a run, and clears up nothing: an upload goes on with existing files.

    Raises:
        SaveFailed: a running job owns the run, or this is unknown; nothing was changed.
    """
    hold = None if no_job else _lock(storage, root)
    try:
        yield StepIndex(storage, root, quiet=True)
    finally:
        if hold is not None:
            hold.release()


def _lock(storage: Storage, root: str) -> Hold:
    try:
        return storage.hold(f"{root}/{names.LOCK}") or _refuse(StepIndex(storage, root, quiet=True))
    except io.UnsupportedOperation as error:
        raise SaveFailed(
            f"{root}: this file system does not support locks, so a job that writes the run "
            "cannot be detected. Nothing was changed. If there is none, pass --no-job."
        ) from error


def _refuse(index: StepIndex) -> NoReturn:
    raise SaveFailed(
        f"{index.root} is in use by a running job: {Ownership(Leases(index)).who()}. Nothing was "
        "changed. Stop the job first, or use its CheckpointManager (delete, scrub, KeepPolicy)."
    )
