"""`save` and `save_async`: one tree becomes one committed checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import posixpath
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Final, final

import jax
import numpy as np

from jaxckpt import _transaction
from jaxckpt._plan import ArraySpec, SavePlan, placement_of, plan_save
from jaxckpt._transfer import HostSnapshot, stage
from jaxckpt._tree import Flat, flatten
from jaxckpt._writer import database_of, merge, write_arrays
from jaxckpt.errors import (
    CheckpointError,
    CheckpointTimeout,
    ProcessesDisagree,
    SaveFailed,
    StepExists,
    UnsupportedFormat,
    UnsupportedLeaf,
)
from jaxckpt.format import arrays, jsontext, names, sharding, step, tree
from jaxckpt.format.sharding import SavedSharding
from jaxckpt.format.step import StepMetadata
from jaxckpt.format.tree import Leaf, Tree
from jaxckpt.multihost import Processes, current
from jaxckpt.storage import Storage, locate

_logger = logging.getLogger("jaxckpt")

DEFAULT_TIMEOUT_S: Final = 1200.0
# Processes meet under a name that is used once; all make the same saves in the same order.
_attempts = itertools.count()


def save(
    path: str | os.PathLike[str],
    tree: object,
    *,
    overwrite: bool = False,
    custom_metadata: Mapping[str, Any] | None = None,
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
    job = _prepare(path, tree, overwrite, custom_metadata, copy=False)
    job.run()


def save_async(
    path: str | os.PathLike[str],
    tree: object,
    *,
    overwrite: bool = False,
    custom_metadata: Mapping[str, Any] | None = None,
) -> SaveHandle:
    """Starts to save a tree, and returns when the tree may be donated, deleted or changed.

    Arguments and errors are those of `save`; what goes wrong later is raised by the handle. The
    interpreter does not exit before the save has ended.
    """
    return SaveHandle(_prepare(path, tree, overwrite, custom_metadata, copy=True))


@final
class SaveHandle:
    """A save under way. `result` waits for it and raises what went wrong."""

    def __init__(self, job: SaveJob) -> None:
        self._job = job
        self._error: BaseException | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"jaxckpt-save {job.path}")
        self._thread.start()

    @property
    def path(self) -> str:
        """Where the checkpoint will be."""
        return self._job.path

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._ended

    def result(self, timeout_s: float | None = None) -> None:
        """Waits until the checkpoint is committed and durable.

        Raises:
            CheckpointTimeout: it is still under way after `timeout_s` seconds; it goes on.
            Whatever `save` raises, at every call.
        """
        self._thread.join(timeout_s)
        if not self._ended:
            # In a forked child the thread that saves is not there, and counts as ended.
            where = "" if self._thread.is_alive() else " in the process that this was forked from"
            raise CheckpointTimeout(
                f"{self.path}: the save is still under way{where} after {timeout_s} s; it goes on"
            )
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._job.run()
        except BaseException as error:  # stored, and raised by `result`
            self._error = error
            _logger.exception("the save of %s failed", self.path)
        self._ended = True

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "failed" if self._error else "committed"
        return f"<SaveHandle {self.path}: {state}>"


class Turn:
    """The place of a save among those of this process to one path: they commit in their order."""

    _lock = threading.Lock()  # guards _last
    _last: ClassVar[dict[str, Turn]] = {}

    def __init__(self, path: str) -> None:
        self._path = path
        self._ended = threading.Event()
        with Turn._lock:
            self._before = Turn._last.get(path)
            Turn._last[path] = self

    def __enter__(self) -> None:
        if self._before is not None:
            if not self._before._ended.wait(DEFAULT_TIMEOUT_S):
                _logger.warning("%s: an earlier save to it has not ended; going on", self._path)
            self._before = None

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with Turn._lock:
            if Turn._last.get(self._path) is self:
                del Turn._last[self._path]


@dataclass(slots=True)
class SaveJob:
    """Everything that a save needs once the caller's tree is no longer looked at."""

    storage: Storage
    path: str
    overwrite: bool
    custom_metadata: Mapping[str, Any]
    processes: Processes
    name: str
    flat: Flat
    shardings: Mapping[str, SavedSharding]
    plan: SavePlan
    snapshot: HostSnapshot | None
    started_ns: int
    turn: Turn
    timeout_s: float = DEFAULT_TIMEOUT_S

    def run(self) -> None:
        """Writes and commits; all processes return, or all raise."""
        with self.turn:
            self._run()

    def _run(self) -> None:
        start = time.monotonic()
        transaction, problem = None, None
        if self.processes.index == 0:
            try:
                transaction = _transaction.begin(self.storage, self.path, overwrite=self.overwrite)
            except Exception as error:  # told to all processes, then raised
                problem = error
        try:
            work = self._agree_on_work(transaction, problem)
            writers = self._write(work)
            self._commit(transaction, work, writers)
        except BaseException as error:
            if transaction is not None:
                transaction.abort()
            _transaction.raise_save_error(self.path, error)
        if self.processes.index == 0:
            _logger.info(
                "saved %s: %d bytes here, %.2f s",
                self.path,
                self.plan.total_bytes,
                time.monotonic() - start,
            )

    def _agree_on_work(
        self, transaction: _transaction.Transaction | None, problem: Exception | None
    ) -> str:
        """Returns where process 0 says to write; all raise if it could not begin."""
        said = {"work": transaction.work if transaction else "", "problem": _text(problem)}
        agreed: Any = self.processes.agree(f"{self.name}/begin", said, timeout_s=self.timeout_s)
        if problem is not None:
            raise problem
        if agreed["problem"] is not None:
            raise _failure_of_process_0(self.path, agreed["problem"])
        return agreed["work"]

    def _write(self, work: str) -> list[int]:
        """Writes this process's share; returns, when every process is done, who wrote anything."""
        problem, item = None, f"{work}/{names.STATE_ITEM}"
        try:
            prefixes = [leaf.prefix for leaf in _array_leaves(self.flat)]
            database = database_of(item, self.processes.index, self.processes.count)
            assert self.snapshot is not None  # run() is called once
            write_arrays(
                self.storage,
                database,
                prefixes,
                self.plan,
                self.snapshot,
                describe=self.processes.index == 0,
            )
            if self.processes.index != 0 and self.storage.kind(database) == "dir":
                self.storage.sync(database)
        except Exception as error:  # told to all processes, then raised
            problem = error
        self.snapshot = None
        said = {
            "problem": _text(problem),
            "path": self.path,
            "tree": self._fingerprint(),
            "bytes": self.plan.total_bytes,
        }
        gathered: list[Any] = self.processes.gather(
            f"{self.name}/written", said, timeout_s=self.timeout_s
        )
        if problem is not None:
            raise problem
        self._check_agreement(gathered)
        return [i for i, g in enumerate(gathered) if g["bytes"] or i == 0]

    def _check_agreement(self, gathered: list[Any]) -> None:
        failures: dict[int, str] = {}
        for i, said in enumerate(gathered):
            if said["problem"] is not None:
                failures[i] = said["problem"]
            elif said["path"] != gathered[0]["path"]:
                failures[i] = f"saves to another path than process 0: {said['path']}"
            elif said["tree"] != gathered[0]["tree"]:
                failures[i] = "has another tree, other shapes or other shardings than process 0"
        # The processes agree on the shards, but maybe not on who has which.
        wanted = sum(
            math.prod(stored.shape) * arrays.dtype_of(stored.dtype).itemsize
            for stored in self.plan.stored
        )
        written = sum(said.get("bytes", 0) for said in gathered)
        if not failures and written != wanted:
            failures[0] = f"all processes together wrote {written} bytes of {wanted}"
        if failures:
            raise ProcessesDisagree(
                f"{self.path} was not saved:\n"
                + "\n".join(f"  process {i}: {text}" for i, text in failures.items())
                + "\nAll processes must save one tree, of the same global arrays, to one path.",
                failures,
            )

    def _fingerprint(self) -> str:
        """The same on all processes whose trees differ at most in values."""
        leaves = [(leaf.path, leaf.kind, leaf.shape) for leaf in self.flat.leaves]
        stored = [(array.shape, array.dtype, array.chunk_shape) for array in self.plan.stored]
        specs = [(name, saved.axis_sizes, saved.spec) for name, saved in self.shardings.items()]
        return step.digest(repr((leaves, stored, specs)).encode())

    def _commit(
        self, transaction: _transaction.Transaction | None, work: str, writers: list[int]
    ) -> None:
        problem = None
        if transaction is not None:
            try:
                digests = self._finalize(work, writers)
                transaction.commit(digests, lineage={})
            except Exception as error:  # told to all processes, then raised
                problem = error
        agreed: Any = self.processes.agree(
            f"{self.name}/committed", _text(problem), timeout_s=self.timeout_s
        )
        if problem is not None:
            raise problem
        if agreed is not None:
            raise _failure_of_process_0(self.path, agreed)

    def _finalize(self, work: str, writers: list[int]) -> dict[str, str]:
        """Merges the databases and writes the metadata files; returns the digests of those."""
        item = f"{work}/{names.STATE_ITEM}"
        self.storage.make_dir(item)
        if self.processes.count > 1 and self.plan.stored:
            merge(self.storage, item, writers)
        files = {f"{names.STATE_ITEM}/{name}": data for name, data in self._item_files().items()}
        manifest = f"{names.STATE_ITEM}/{names.OCDBT_MANIFEST}"
        files[names.CHECKPOINT_METADATA] = step.encode(
            StepMetadata(
                handlers={names.STATE_ITEM: step.PYTREE_HANDLER},
                init_ns=self.started_ns,
                commit_ns=time.time_ns(),
                custom_metadata=self.custom_metadata,
            )
        )
        files[names.ORBAX_MARKER] = b""
        if f"{names.STATE_ITEM}/{names.SHARDING}" in files:
            self.storage.make_dir(f"{item}/{names.ARRAY_METADATAS}")
        for path, data in files.items():
            self.storage.write(f"{work}/{path}", data)
        digests = {path: step.digest(data) for path, data in files.items()}
        if self.plan.stored and self.storage.kind(f"{work}/{manifest}") != "file":
            raise SaveFailed(f"{work}/{manifest} is missing: the arrays went somewhere else")
        if self.plan.stored:
            data = self.storage.read(f"{work}/{manifest}", max_bytes=jsontext.MAX_BYTES)
            digests[manifest] = step.digest(data)
        return digests

    def _item_files(self) -> dict[str, bytes]:
        leaves = iter(self.plan.stored)
        complete = tuple(
            replace(leaf, stored=next(leaves)) if leaf.has_array else leaf
            for leaf in self.flat.leaves
        )
        has_arrays = any(leaf.has_array for leaf in complete)
        files = {
            names.TREE_METADATA: tree.encode(
                Tree(leaves=complete, root=self.flat.root, typed=True, uses_ocdbt=has_arrays)
            )
        }
        strings = {leaf.name: leaf.value for leaf in complete if leaf.value is not None}
        if strings:
            files[names.STRINGS] = step.encode_strings(strings)
        device = [leaf for leaf in complete if leaf.kind in ("array", "key")]
        if device:
            files[names.SHARDING] = sharding.encode(self.shardings)
            files[f"{names.ARRAY_METADATAS}/process_0"] = step.encode_array_metadatas(
                {
                    leaf.name: (leaf.stored.chunk_shape, leaf.key_impl)
                    for leaf in device
                    if leaf.stored is not None
                }
            )
        return files


def _prepare(
    path: str | os.PathLike[str],
    value: object,
    overwrite: bool,
    custom_metadata: Mapping[str, Any] | None,
    *,
    copy: bool,
) -> SaveJob:
    """Takes the caller's tree apart and brings this process's share of it to the host."""
    processes, name = current(), f"save/{next(_attempts)}"
    try:
        storage, where = locate(path)
        _check_name(where)
        metadata = _check_json(custom_metadata)
        if processes.count == 1:
            _check_target(storage, where, overwrite)
        flat = flatten(value)
        _check_strings(flat)
        values = [v for v in flat.values if v is not None]
        specs = [_spec(v, processes) for v in values]
        _check_process_0_sees(_array_leaves(flat), specs)
        plan = plan_save(specs, process=processes.index)
        snapshot = stage(values, plan, copy=copy)
    except Exception as error:
        _tell_others(processes, name, error)
        raise
    return SaveJob(
        storage=storage,
        path=where,
        overwrite=overwrite,
        custom_metadata=metadata,
        processes=processes,
        name=name,
        flat=replace(flat, values=()),
        shardings=_shardings(flat),
        plan=plan,
        snapshot=snapshot,
        started_ns=time.time_ns(),
        turn=Turn(where),
    )


def _check_target(storage: Storage, path: str, overwrite: bool) -> None:
    try:
        _transaction.check_target(storage, path, overwrite=overwrite)
    except OSError as error:  # also one of a place where nobody may even look
        _transaction.raise_save_error(path, error)


def _check_name(where: str) -> None:
    if names.is_reserved(posixpath.basename(where)):
        raise ValueError(f"{where}: names like this are those of checkpoints in the making")


def _tell_others(processes: Processes, name: str, error: Exception) -> None:
    """Takes part in the rounds of a save that this process cannot make, so that no other waits."""
    with contextlib.suppress(CheckpointError):  # this process's own error is the one to raise
        said = {"work": "", "problem": _text(error)}
        begun: Any = processes.agree(f"{name}/begin", said, timeout_s=DEFAULT_TIMEOUT_S)
        if begun["problem"] is None:
            said = {"problem": _text(error)}
            processes.gather(f"{name}/written", said, timeout_s=DEFAULT_TIMEOUT_S)


def _failure_of_process_0(path: str, told: str) -> CheckpointError:
    """What the others raise: the same where all would see the same on the disk."""
    kind, _, text = told.partition(": ")
    for same in (StepExists, UnsupportedFormat):
        if kind == same.__name__:
            return same(text)
    return ProcessesDisagree(f"{path} was not saved: process 0 failed: {told}", {0: told})


def _check_process_0_sees(leaves: Sequence[Leaf], specs: Sequence[ArraySpec]) -> None:
    """Refuses arrays that process k alone has: to k they look like values of its own host."""
    for leaf, spec in zip(leaves, specs, strict=True):
        holders = set() if spec.placement is None else set().union(*spec.placement.holders.values())
        if len(holders) == 1 and 0 not in holders:
            raise UnsupportedLeaf(
                f"leaf {leaf.text} is on devices of process {min(holders)} alone. Put it on a mesh "
                "with devices of two processes, or of process 0."
            )


def _array_leaves(flat: Flat) -> list[Leaf]:
    return [leaf for leaf in flat.leaves if leaf.has_array]


def _spec(value: jax.Array | np.ndarray[Any, Any], processes: Processes) -> ArraySpec:
    dtype = np.dtype(value.dtype)
    name = "uint8" if dtype.name in arrays.AS_BYTES_DTYPES else dtype.name
    placement = None
    if isinstance(value, jax.Array) and not _is_host_local(value, processes):
        placement = placement_of(value.sharding, value.shape, processes.process_of)
    return ArraySpec(shape=value.shape, dtype=name, itemsize=dtype.itemsize, placement=placement)


def _is_host_local(value: jax.Array, processes: Processes) -> bool:
    """Whether each process has a copy of its own: as with numpy, that of process 0 is written."""
    return processes.count > 1 and value.is_fully_addressable


def _shardings(flat: Flat) -> dict[str, SavedSharding]:
    return {
        leaf.name: _saved_sharding(value.sharding)
        for leaf, value in zip(flat.leaves, flat.values, strict=True)
        if leaf.kind in ("array", "key") and isinstance(value, jax.Array)
    }


@lru_cache(maxsize=1 << 12)
def _saved_sharding(sharding: jax.sharding.Sharding) -> SavedSharding:
    devices = sharding.device_set
    if isinstance(sharding, jax.sharding.NamedSharding) and not sharding.mesh.empty:
        mesh: Any = sharding.mesh
        return SavedSharding(
            axis_names=tuple(map(str, mesh.axis_names)),
            axis_sizes=tuple(mesh.devices.shape),
            axis_types=tuple(kind.name for kind in mesh.axis_types),
            spec=tuple(_axes(axes) for axes in sharding.spec),
            device_ids=tuple(device.id for device in mesh.devices.flat),
        )
    if len(devices) == 1:
        device = next(iter(devices))
        # What jax called CPU devices until 0.5; every Orbax knows it, only new ones know `cpu:0`.
        name = f"TFRT_CPU_{device.id}" if device.platform == "cpu" else str(device)
        return SavedSharding(device=name)
    # Orbax has no word for other shardings, and fails on a file that leaves an array out.
    ids = tuple(sorted(device.id for device in devices))
    return SavedSharding(axis_names=("devices",), axis_sizes=(len(ids),), device_ids=ids)


def _axes(axes: Any) -> str | tuple[str, ...] | None:  # an entry of a PartitionSpec
    if axes is None or axes is jax.sharding.PartitionSpec.UNCONSTRAINED:
        return None
    return tuple(map(str, axes)) if isinstance(axes, (tuple, list)) else str(axes)


def _check_json(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    if metadata is None:
        return {}
    try:
        checked = jsontext.loads(jsontext.dumps(dict(metadata)), file="custom_metadata")
    except (TypeError, ValueError) as error:
        raise TypeError(f"custom_metadata must be a dict that JSON can hold: {error}") from error
    return checked


def _check_strings(flat: Flat) -> None:
    texts = {leaf.name: leaf.value for leaf in flat.leaves if leaf.value is not None}
    try:
        step.encode_strings(texts)
    except ValueError as error:
        raise UnsupportedLeaf(f"two str leaves cannot both be stored: {error}") from error


def _text(error: BaseException | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"
