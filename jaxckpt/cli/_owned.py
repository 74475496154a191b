"""Takes ownership of a run for a command, which is only possible while no job owns it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

from jaxckpt._run.run import Run
from jaxckpt.errors import CheckpointNotFound, SaveFailed
from jaxckpt.format import names
from jaxckpt.storage import Storage, locate


def existing(root: str) -> tuple[Storage, str]:
    """Returns the storage and path of an existing run.

    Raises:
        CheckpointNotFound: no such directory.
        NotADirectoryError, ValueError: it is not a directory, or is itself a checkpoint.
    """
    storage, where = locate(root)
    run = Run(storage=storage, root=where)
    run.check_root()
    if storage.kind(where) is None:
        raise CheckpointNotFound(f"{where}: no such file or directory")
    if run.holds_checkpoint():
        raise ValueError(f"{where} is a checkpoint; pass the run that contains it")
    return storage, where


@contextlib.contextmanager
def owned(storage: Storage, where: str, *, no_job: bool = False) -> Iterator[Run]:
    """Owns a run, as a job does that opens it while no other job is running.

    Also cleans up after an interrupted save or deletion, as every job does that opens a run.

    Args:
        storage, where: An existing root; see `existing`.
        no_job: Asserts that no job writes the run, for file systems without locks.

    Raises:
        SaveFailed: a running job owns the run, or this is unknown; nothing was changed.
    """
    if not no_job:
        _check_locks(storage, where)
    run = Run(storage=storage, root=where, quiet=True)
    run.open_for_writing()
    try:
        if not run.token:
            raise SaveFailed(
                f"{where} is in use by a running job: {run.who()}. Nothing was changed. Stop the "
                "job first, or use its CheckpointManager (delete, scrub, KeepPolicy)."
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
            f"{where}: this file system does not support locks, so a job that writes the run "
            "cannot be detected. Nothing was changed. If there is none, pass --no-job."
        ) from error
    if hold is not None:
        hold.release()
