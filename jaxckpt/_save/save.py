"""`save` and `save_async`: write a tree as one checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import os
import posixpath
import threading
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from jaxckpt._core.cast import floating
from jaxckpt._core.check import check_new_checkpoint, check_type, explained, zstd_level
from jaxckpt._core.log import logger
from jaxckpt._disk import transaction as _transaction
from jaxckpt._disk.attempt import raise_save_error
from jaxckpt._disk.transaction import Overwrite
from jaxckpt._progress.meter import Meter, display
from jaxckpt._save.handle import SaveHandle
from jaxckpt._save.job import SaveJob, SaveRequest, meeting_of
from jaxckpt._save.snapshot import Items, take_tree
from jaxckpt._save.worker import Worker
from jaxckpt.format import jsontext, names
from jaxckpt.multihost import Group, Json, Processes, current, lead, meet
from jaxckpt.storage import Storage, listing, locate
from jaxckpt.types import OnProgress

# Numbers the saves, so that processes meet under unique names; all save in the same order.
_attempts: WeakKeyDictionary[Processes, itertools.count[int]] = WeakKeyDictionary()
_attempts_lock = threading.Lock()  # guards _attempts


@explained("save")
def save(
    path: str | os.PathLike[str],
    tree: object,
    *,
    item: str | None = names.STATE_ITEM,
    overwrite: Overwrite = False,
    dtype: Any = None,  # whatever numpy takes for a dtype
    compression: str | None = None,
    custom_metadata: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """Saves a tree as one checkpoint and returns when it is committed and durable.

    All processes of a job must call it, with the same tree structure.

    Args:
        path: Directory of the checkpoint. Missing parents are created.
        tree: Any pytree of jax and numpy arrays, PRNG keys, Python scalars, str, bytes and None.
            Process 0 writes host arrays.
        item: Name of the directory of the tree in the checkpoint; restoring finds any. If None, the
            tree is in `path` itself, as Orbax's `StandardCheckpointer` saves it.
        overwrite: Whether to replace a checkpoint or an empty directory at `path`. The old or the
            new one can be restored at any instant. Up to 100 files of 16 MB in all that other
            programs put into the checkpoint move along; with more, or with directories of theirs,
            the save raises. Other directories are never replaced. In an object store nothing can
            be replaced in one step: there `True` raises, and `"delete_first"` deletes the old
            checkpoint before the new one is written, so that a crash may leave neither.
        dtype: Saves all floating-point arrays in this dtype, also when they are restored. Values
            are rounded, and a finite value that would become infinite is an error.
        compression: "zstd" compresses arrays losslessly, for storage that is slow or paid by the
            byte; "zstd:3" sets the level, from 1 (the default) to 22. It takes processor time.
            Arrays in chunks of at most 256 KiB stay uncompressed; if None, all do.
        custom_metadata: JSON to store with the checkpoint.
        on_progress: Called with a `Progress` a few times a second, in its own thread. Its errors
            are raised after the commit. If None, a terminal or notebook shows a bar if tqdm is
            installed; pass `lambda _: None` for no bar.

    Raises:
        UnsupportedLeaf: leaves cannot be stored; the message names them. Nothing was written.
        StepExists: `path` exists.
        SaveFailed: the checkpoint was not committed; the cause is chained.
        ProcessesDisagree: another process failed or has a different tree.
        CheckpointTimeout: a process did not arrive.

    Example:
        >>> import tempfile, numpy as np, jaxckpt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jaxckpt.save(f"{folder}/a", {"w": np.arange(3)})
        ...     jaxckpt.restore(f"{folder}/a")
        {'w': array([0, 1, 2])}
    """
    options = (overwrite, custom_metadata, item, dtype, compression, on_progress)
    request = prepare(path, tree, *options, copy=False)
    SaveJob(request).run()
    request.meter.raise_error()


@explained("save_async")
def save_async(
    path: str | os.PathLike[str],
    tree: object,
    *,
    item: str | None = names.STATE_ITEM,
    overwrite: Overwrite = False,
    dtype: Any = None,  # whatever numpy takes for a dtype
    compression: str | None = None,
    custom_metadata: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> SaveHandle:
    """Starts saving a tree and returns when the tree may be donated, deleted or changed.

    Takes the arguments of `save`. Errors of arguments and of the tree, such as UnsupportedLeaf, are
    raised here, as by `save`; the handle raises later errors. The interpreter exits only after the
    save has ended.
    """
    options = (overwrite, custom_metadata, item, dtype, compression, on_progress)
    return start(prepare(path, tree, *options, copy=True))


def start(request: SaveRequest) -> SaveHandle:
    """Runs a save in a new thread."""
    name, where = f"jaxckpt-save {request.path}", request.path
    worker = Worker[SaveHandle](name=name, where=where, timeout_s=None)
    handle = SaveHandle(SaveJob(request), worker)
    handle.on_end(_log_failure)
    handle.begin(handle.attempt)
    return handle


def _log_failure(handle: SaveHandle) -> None:
    if handle.error is not None:  # nobody may ask the handle
        logger.error("the save of %s failed", handle.path, exc_info=handle.error)


def prepare(
    path: str | os.PathLike[str],
    value: object,
    overwrite: Overwrite,
    custom_metadata: Mapping[str, Any] | None,
    item: str | None = names.STATE_ITEM,
    dtype: Any = None,  # whatever numpy takes for a dtype
    compression: str | None = None,
    on_progress: OnProgress | None = None,
    *,
    copy: bool,
) -> SaveRequest:
    """Copies this process's share of the caller's tree to the host."""
    processes = current()
    with _attempts_lock:
        attempt = next(_attempts.setdefault(processes, itertools.count()))
    name, meter = f"save/{attempt}", None
    try:
        check_type("save", "path", path, str | os.PathLike, "a str or Path, as in save(path, tree)")
        storage, where = locate(path)
        check_new_checkpoint(where, overwrite)
        if item not in (names.STATE_ITEM, None):
            names.check_item(item)
        metadata = check_metadata(custom_metadata)
        zstd = None if compression is None else zstd_level("save", compression)
        if processes.count == 1 and copy:  # otherwise checked when the save begins
            _check_target(storage, where, overwrite)
        meter = Meter("save", where)
        meter.watch(display(on_progress, processes.index))
        with meter.phase("snapshot"):
            dtype_name = None if dtype is None else floating(dtype)
            options = {"copy": copy, "dtype": dtype_name, "zstd": zstd}
            one = {item or "": lambda name, all_: take_tree(name, value, all_, **options)}
            taken = (value if isinstance(value, Items) else Items(one)).taken(processes)
    except BaseException as error:
        if meter is not None:
            meter.end()
        if isinstance(error, Exception):
            _take_part(processes, name, error)
        raise
    return SaveRequest(
        storage=storage,
        path=where,
        items=taken,
        item=item or "",
        group=Group.together(processes),
        name=name,
        meter=meter,
        custom_metadata=metadata,
        overwrite=overwrite,
    )


def _check_target(storage: Storage, path: str, overwrite: Overwrite) -> None:
    try:
        around = listing(storage, posixpath.dirname(path))
        _transaction.check_target(storage, path, around, overwrite=overwrite)
    except OSError as error:  # also if the directory cannot be listed
        raise_save_error(path, error)


def check_metadata(
    metadata: Mapping[str, Any] | None, name: str = "custom_metadata"
) -> dict[str, Any]:
    """Returns custom metadata after a round trip through JSON."""
    if metadata is None:
        return {}
    try:
        # Inside another dict, as it is stored: the levels of both count.
        found = jsontext.loads(text := jsontext.dumps({name: {**metadata}}), file=name)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a dict of JSON values: {error}") from error
    if jsontext.dumps(found) != text:
        raise TypeError(f"{name} has keys that are the same in JSON, such as 1 and '1'")
    return found[name]


def _take_part(processes: Processes, name: str, error: Exception) -> None:
    """Reports the error in the rounds of a failed save, so that other processes do not wait."""

    def fail() -> Json:
        raise error

    report = {"seconds": 0.0}
    with contextlib.suppress(Exception):  # raise this process's own error instead
        lead(processes, f"{name}/begin", fail, where="")
        meet(processes, meeting_of(name), report, error)
