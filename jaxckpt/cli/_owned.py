"""The right to change a run from outside of a job, which is nobody's while a job has the run."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

from jaxckpt._run.run import Run
from jaxckpt.errors import CheckpointNotFound, SaveFailed
from jaxckpt.format import names
from jaxckpt.storage import Storage, locate


def existing(root: str) -> tuple[Storage, str]:
    """Where a root is.

    Raises:
        CheckpointNotFound: there is nothing.
        NotADirectoryError, ValueError: it is no directory, or a checkpoint itself.
    """
    storage, where = locate(root)
    run = Run(storage=storage, root=where)
    run.check_root()
    if storage.kind(where) is None:
        raise CheckpointNotFound(f"{where}: there is nothing.")
    if run.holds_checkpoint():
        raise ValueError(f"{where} is a checkpoint itself, not the run that it is a step of.")
    return storage, where


@contextlib.contextmanager
def owned(storage: Storage, where: str, *, no_job: bool = False) -> Iterator[Run]:
    """Owns a run as a job would that opens it when no other lives; for as short as can be.

    What an interrupted save or deletion left there is cleared up, as each job does that opens it.

    Args:
        storage, where: Of a root that is there; see `existing`.
        no_job: That no job writes the run, where the file system has no locks to tell by.

    Raises:
        SaveFailed: a job that lives has it, or that cannot be told; nothing was changed.
    """
    if not no_job:
        _check_locks(storage, where)
    run = Run(storage=storage, root=where, quiet=True)
    run.open_for_writing()
    try:
        if not run.token:
            raise SaveFailed(
                f"{where} belongs to a job that lives: {run.who()}. Nothing was changed. Stop that "
                "job first, or have it do this: CheckpointManager has delete, scrub and KeepPolicy."
            )
        run.fence()
        yield run
    finally:
        run.close()


def _check_locks(storage: Storage, where: str) -> None:
    try:
        hold = storage.hold(f"{where}/{names.LOCK}")
    except io.UnsupportedOperation as error:
        raise SaveFailed(
            f"{where}: this file system has no locks, so it cannot be told whether a job writes "
            "the run. Nothing was changed. If none does, say --no-job."
        ) from error
    if hold is not None:
        hold.release()
