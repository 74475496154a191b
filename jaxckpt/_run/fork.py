"""`fork`: starts a run from a step of another run."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence

from jaxckpt._core.check import as_new_step, explained
from jaxckpt._disk import transaction as _transaction
from jaxckpt._disk.attempt import raise_save_error
from jaxckpt._disk.find import find, steps_to_try, warn_skipped
from jaxckpt._disk.found import Found, check_current, is_current
from jaxckpt._disk.item import lost_trees, open_item
from jaxckpt._disk.native import Item, special_file
from jaxckpt._disk.regions import refuse_swapped
from jaxckpt._run.identity import ensure_id
from jaxckpt._run.index import StepIndex
from jaxckpt.errors import CheckpointNotFound, CorruptCheckpoint, StepExists, UnsupportedFormat
from jaxckpt.format import names, run
from jaxckpt.format.step import Life, Record, digest
from jaxckpt.storage import Storage, corrupt, files_in, locate, store_of


@explained("fork")
def fork(
    src: str | os.PathLike[str], dst: str | os.PathLike[str], *, step: int | None = None
) -> str:
    """Starts a run whose first step is a step of another run.

    The files are hard links, or copies on another file system, so either run may delete its step.
    The new run has an id of its own, so it takes no steps of the other from a local disk.
    `jaxckpt.open(path).lineage` records the origin. Only one process of a job should call this.

    Args:
        src: A step written by jaxckpt or Orbax, or a run's root for its newest good step, or a
            newer one if a job deletes it meanwhile.
        dst: The root of the new run, without steps; created if missing.
        step: The number of the first step. If None, the number of `src`.

    Returns:
        The directory of the new step.

    Raises:
        StepExists: the new run has steps.
        CheckpointNotFound: no committed checkpoint at `src`.
        CorruptCheckpoint: the checkpoint is damaged, as far as all but its arrays show; the new run
            has no step.

    Example:
        >>> import os, tempfile, jaxckpt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with jaxckpt.CheckpointManager(f"{folder}/base") as manager:
        ...         _ = manager.save(7, {"w": 1.5})
        ...     path = jaxckpt.fork(f"{folder}/base/7", f"{folder}/tuned")
        ...     os.path.relpath(path, folder), jaxckpt.restore(path)
        ('tuned/7', {'w': 1.5})
    """
    storage, where = locate(src)
    _, root = locate(dst)
    if store_of(root) != store_of(where):
        raise ValueError(f"{dst} must be in the same storage as {src}: fork links files")
    if steps := StepIndex(storage, root).steps():
        raise StepExists(f"{root} already has steps: {steps[-8:]}. Fork into a new run.")
    return _fork_newest(storage, where, root, step)


def _fork_newest(
    storage: Storage, where: str, root: str, step: int | None, *, again: int = 19
) -> str:
    """Forks the newest good step of a run, or the step itself; begins anew if it goes meanwhile."""
    problems, steps = list[CorruptCheckpoint](), steps_to_try(storage, where)
    for source in steps or [where]:
        try:
            found = _find(storage, source)
            path = _fork(storage, found, root, f"{root}/{_name_of(found, step)}")
        except CorruptCheckpoint as error:
            problems.append(error)
        except CheckpointNotFound:
            if not (steps and again):
                raise
            return _fork_newest(storage, where, root, step, again=again - 1)
        else:
            if problems:
                warn_skipped(where, [*map(str, problems)], found.path)
            return path
    raise problems[0]


def _find(storage: Storage, source: str) -> Found:
    try:
        return find(storage, source)
    except CheckpointNotFound:
        raise
    except FileNotFoundError as error:
        raise deleted(source, error) from error


def _fork(storage: Storage, found: Found, root: str, path: str) -> str:
    if found.record is None:  # a record would change what it is
        for name in lost_trees(found):
            what = f"is missing, but {names.CHECKPOINT_METADATA} lists it"
            raise corrupt(f"{found.path}/{name}", what)
        is_tree = "" in found.items and not found.is_file
        if is_tree and names.TREE_METADATA not in found.contents(found.path):
            what = f"is a tree without {names.TREE_METADATA}, as old releases of Orbax wrote it"
            raise UnsupportedFormat(f"{found.path} {what}: convert it, and fork the copy")
    transaction = _transaction.begin(storage, path, overwrite=False)
    try:
        files = _link(storage, found, transaction.work)
        _check_whole(storage, found, transaction.work, files)
        index = StepIndex(storage, root, quiet=True)
        life = Life(run=ensure_id(index, index.entries()))
        record = found.record
        item, token = (names.STATE_ITEM, None) if record is None else (record.item, record.token)
        lineage = {"by": "fork", "path": found.path, "token": token}
        about = Record(lineage=lineage, item=item, life=life, differences=found.differences)
        known = {name: f for name, f in found.recorded(found.path).items() if name in files}
        transaction.commit({}, about, known=known)
    except BaseException as error:
        transaction.abort(error)
        if isinstance(error, FileNotFoundError | CorruptCheckpoint) and not is_current(found):
            raise deleted(found.path, error) from error
        raise_save_error(path, error)
    return path


def deleted(path: str, error: BaseException) -> CheckpointNotFound:
    """Returns the error if a checkpoint goes while it is copied."""
    return CheckpointNotFound(f"{path} was replaced or deleted meanwhile: {error}")


def _name_of(found: Found, step: int | None) -> str:
    name = posixpath.basename(found.path)
    if step is not None:
        return run.StepNames().of(as_new_step("fork", step))
    if not run.is_like_step(name):
        raise ValueError(f"{found.path} is not named like a step; pass a number: fork(..., step=0)")
    return name


def _link(storage: Storage, found: Found, work: str) -> list[str]:
    if storage.kind(found.path) != "dir":
        raise CheckpointNotFound(f"{found.path} is a single file; restore it and save it again")
    files = [name for name in files_in(storage.entries, found.path) if name not in names.OF_COPY]
    for name in files:
        storage.make_dir(posixpath.dirname(f"{work}/{name}"))
        if storage.kind(f"{found.path}/{name}") == "other":
            raise special_file(f"{found.path}/{name}")
        storage.link(f"{found.path}/{name}", f"{work}/{name}")
    return files


def _check_whole(storage: Storage, found: Found, work: str, files: Sequence[str]) -> None:
    """Compares the linked files with the record, if any."""
    recorded = found.record.files if found.record is not None else {}
    for name, facts in recorded.items():
        if name in names.OF_COPY:
            continue
        file, linked = f"{found.path}/{name}", f"{work}/{name}"
        if name not in files or storage.size(linked) != facts.size:
            raise corrupt(file, "is missing or has the wrong size")
        if facts.sha256 and digest(storage.read(linked, max_bytes=facts.size)) != facts.sha256:
            raise corrupt(file, "is damaged: its SHA-256 differs")
    for name in found.items if recorded else ():
        item = open_item(found, name)
        if isinstance(item, Item):
            refuse_swapped(item)
    check_current(found)
