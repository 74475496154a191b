"""`save` and `save_async`: one tree becomes one committed checkpoint."""

from __future__ import annotations

import itertools
import logging
import os
import posixpath
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any, final
from weakref import WeakKeyDictionary

from jaxckpt._disk import transaction as _transaction
from jaxckpt._progress.meter import Meter, Watch, display
from jaxckpt._save.job import SaveJob, take_part
from jaxckpt._save.snapshot import take_tree
from jaxckpt.errors import CheckpointTimeout
from jaxckpt.format import jsontext, names
from jaxckpt.multihost import Processes, current
from jaxckpt.storage import Storage, locate
from jaxckpt.types import OnProgress, Timing

_logger = logging.getLogger("jaxckpt")

# Processes meet under a name that is used once; all make the same saves in the same order.
_attempts: WeakKeyDictionary[Processes, itertools.count[int]] = WeakKeyDictionary()
_attempts_lock = threading.Lock()  # guards _attempts


def save(
    path: str | os.PathLike[str],
    tree: object,
    *,
    overwrite: bool = False,
    custom_metadata: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """Saves a tree as one checkpoint, and returns when it is committed and durable.

    In a job of several processes all of them call it, with the same tree structure.

    Args:
        path: Directory of the checkpoint. Missing parents are made.
        tree: Any pytree of jax and numpy arrays, PRNG keys, Python scalars, str, bytes and None.
            Arrays of the host are written by process 0.
        overwrite: Whether to replace a checkpoint that is there. At every instant the old one or
            the new one can be restored. Other directories are never replaced.
        custom_metadata: JSON to keep with the checkpoint.
        on_progress: Is called a few times a second with a `Progress`, in a thread of its own. What
            it raises is raised when the checkpoint is committed. None: a bar in a terminal or
            notebook, if tqdm is installed; `lambda _: None` for none.

    Raises:
        UnsupportedLeaf: leaves cannot be stored; they are named, and nothing was written.
        StepExists: something is at `path`.
        SaveFailed: the checkpoint was not committed; the cause is chained.
        ProcessesDisagree: another process failed, or has another tree.
        CheckpointTimeout: a process did not arrive.

    Example:
        >>> import tempfile, numpy as np, jaxckpt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jaxckpt.save(f"{folder}/a", {"w": np.arange(3)})
        ...     jaxckpt.restore(f"{folder}/a")
        {'w': array([0, 1, 2])}
    """
    job = prepare(path, tree, overwrite, custom_metadata, copy=False, on_progress=on_progress)
    job.run()
    if job.watch.error is not None:
        raise job.watch.error


def save_async(
    path: str | os.PathLike[str],
    tree: object,
    *,
    overwrite: bool = False,
    custom_metadata: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> SaveHandle:
    """Starts to save a tree, and returns when the tree may be donated, deleted or changed.

    Arguments and errors are those of `save`; what goes wrong later is raised by the handle. The
    interpreter does not exit before the save has ended.
    """
    job = prepare(path, tree, overwrite, custom_metadata, copy=True, on_progress=on_progress)
    return start(job)


@final
class SaveHandle:
    """A save under way. `result` waits for it and raises what went wrong."""

    def __init__(self, job: SaveJob) -> None:
        self._job = job
        self._error: BaseException | None = None
        self._timing: Timing | None = None
        self._ended = threading.Event()
        self._process = os.getpid()
        self._delivered = False

    @property
    def path(self) -> str:
        """Where the checkpoint will be."""
        return self._job.path

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._ended.is_set()

    @property
    def timing(self) -> Timing | None:
        """How long it took, by phase, once it is committed."""
        return self._timing

    def result(self, timeout_s: float | None = None) -> None:
        """Waits until the checkpoint is committed and durable.

        Raises:
            CheckpointTimeout: it is still under way after `timeout_s` seconds; it goes on.
            Whatever `save` raises, at every call.
        """
        where = ""
        if os.getpid() != self._process:
            # The thread that saves is not in a forked child, and will never end there.
            where, timeout_s = " in the process that this was forked from", 0.0
        if not self._ended.wait(timeout_s):
            raise CheckpointTimeout(
                f"{self.path}: the save is still under way{where} after {timeout_s:g} s; it goes on"
            )
        if self._error is not None:
            self._delivered = True
            raise self._error
        if self._job.watch.error is not None:
            raise self._job.watch.error

    def run(self, *, logs: bool = False) -> BaseException | None:
        """Does the save, in the thread that it was given; returns what went wrong."""
        try:
            self._job.run()
            self._timing = self._job.meter.timing()
        except BaseException as error:  # stored, and raised by `result`
            self._error = error
            if logs:
                _logger.exception("the save of %s failed", self.path)
        self._ended.set()
        return self._error

    def take_error(self) -> BaseException | None:
        """What went wrong, unless the handle or this has told it already."""
        if self._delivered:
            return None
        self._delivered = True
        return self._error

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "failed" if self._error else "committed"
        return f"<SaveHandle {self.path}: {state}>"


def start(job: SaveJob) -> SaveHandle:
    """Does a save in a thread of its own."""
    handle = SaveHandle(job)
    run = partial(handle.run, logs=True)  # the handle may never be asked
    threading.Thread(target=run, name=f"jaxckpt-save {job.path}").start()
    return handle


def _next_attempt(processes: Processes) -> int:
    with _attempts_lock:
        return next(_attempts.setdefault(processes, itertools.count()))


def prepare(
    path: str | os.PathLike[str],
    value: object,
    overwrite: bool,
    custom_metadata: Mapping[str, Any] | None,
    *,
    copy: bool,
    on_progress: OnProgress | None = None,
) -> SaveJob:
    """Takes the caller's tree apart and brings this process's share of it to the host."""
    processes = current()
    name = f"save/{_next_attempt(processes)}"
    try:
        storage, where = locate(path)
        _check_name(where)
        metadata = check_metadata(custom_metadata)
        if processes.count == 1 and copy:  # else it is checked soon enough when the save begins
            _check_target(storage, where, overwrite)
        watch = Watch(Meter("save", where), display(on_progress, processes.index))
        with watch.ended_by_error(), watch.meter.phase("snapshot"):
            item = take_tree(names.STATE_ITEM, value, processes, copy=copy)
    except Exception as error:
        take_part(processes, name, error)
        raise
    return SaveJob(
        storage=storage,
        path=where,
        items=(item,),
        processes=processes,
        name=name,
        watch=watch,
        custom_metadata=metadata,
        overwrite=overwrite,
    )


def _check_target(storage: Storage, path: str, overwrite: bool) -> None:
    try:
        around = _transaction.listing(storage, posixpath.dirname(path))
        _transaction.check_target(storage, path, around, overwrite=overwrite)
    except OSError as error:  # also one of a place where nobody may even look
        _transaction.raise_save_error(path, error)


def _check_name(where: str) -> None:
    if names.is_reserved(posixpath.basename(where)):
        raise ValueError(f"{where}: names like this are those of checkpoints in the making")


def check_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Custom metadata as JSON gives it back; TypeError if JSON cannot hold it."""
    if metadata is None:
        return {}
    try:
        checked = jsontext.loads(jsontext.dumps(dict(metadata)), file="custom_metadata")
    except (TypeError, ValueError) as error:
        raise TypeError(f"custom_metadata must be a dict that JSON can hold: {error}") from error
    return checked
