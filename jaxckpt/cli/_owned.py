"""The right to change a run from outside of a job, granted only while no job has the run."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

from jaxckpt._run.deletion import Deletion
from jaxckpt._run.index import StepIndex
from jaxckpt._run.leases import Leases
from jaxckpt._run.owner import Ownership
from jaxckpt.errors import SaveFailed
from jaxckpt.format import names
from jaxckpt.storage import Storage


def run_at(storage: Storage, root: str) -> Deletion:
    """Returns a run as a command sees it; problems are recorded, and not logged."""
    index = StepIndex(storage, root, quiet=True)
    return Deletion(index, Leases(index))


@contextlib.contextmanager
def owned(storage: Storage, root: str, *, no_job: bool = False) -> Iterator[Deletion]:
    """Owns a run for a moment, like a job that opens it when no other lives.

    What an interrupted save or deletion left there is cleared up, as by each job that opens it.

    Args:
        storage, root: The place of a root that is there; see `existing_root`.
        no_job: Whether the user says that no job writes the run, where the file system has no
            locks to show it.

    Raises:
        SaveFailed: a job that lives has the run, or that cannot be known; nothing was changed.
    """
    if not no_job:
        _check_locks(storage, root)
    run = run_at(storage, root)
    owner = Ownership(run.index, run.leases)
    owner.open()
    try:
        if not owner.token:
            raise SaveFailed(
                f"{root} belongs to a job that lives: {owner.who()}. Nothing was changed. Stop "
                "that job first, or have it do this: CheckpointManager has delete, scrub and "
                "KeepPolicy."
            )
        owner.fence()
        yield run
    finally:
        owner.close()


def _check_locks(storage: Storage, root: str) -> None:
    try:
        hold = storage.hold(f"{root}/{names.LOCK}")
    except io.UnsupportedOperation as error:
        raise SaveFailed(
            f"{root}: this file system has no locks, so it cannot be known whether a job writes "
            "the run. Nothing was changed. If none does, say --no-job."
        ) from error
    if hold is not None:
        hold.release()
