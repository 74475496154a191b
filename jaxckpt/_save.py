"""`save` and `save_async`: one tree becomes one committed checkpoint."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, final

import jax
import numpy as np

from jaxckpt import _transaction
from jaxckpt._plan import ArraySpec, SavePlan, placement_of, plan_save
from jaxckpt._transfer import HostSnapshot, stage
from jaxckpt._tree import Flat, flatten
from jaxckpt._writer import database_of, merge, write_arrays
from jaxckpt.errors import CheckpointTimeout, ProcessesDisagree, UnsupportedLeaf
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
        self._thread = threading.Thread(target=self._run, name=f"jaxckpt-save {job.path}")
        self._thread.start()

    @property
    def path(self) -> str:
        """Where the checkpoint will be."""
        return self._job.path

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return not self._thread.is_alive()

    def result(self, timeout_s: float | None = None) -> None:
        """Waits until the checkpoint is committed and durable.

        Raises:
            CheckpointTimeout: it is still under way after `timeout_s` seconds; it goes on.
            Whatever `save` raises, at every call.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise CheckpointTimeout(
                f"{self.path}: the save is still under way after {timeout_s} s; it goes on"
            )
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._job.run()
        except BaseException as error:  # stored, and raised by `result`
            self._error = error

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "failed" if self._error else "committed"
        return f"<SaveHandle {self.path}: {state}>"


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
    timeout_s: float = DEFAULT_TIMEOUT_S

    def run(self) -> None:
        """Writes and commits; all processes return, or all raise."""
        start = time.monotonic()
        transaction, work = self._begin()
        try:
            self._write(work)
            self._commit(transaction, work)
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

    def _begin(self) -> tuple[_transaction.Transaction | None, str]:
        transaction, problem, work = None, None, ""
        if self.processes.index == 0:
            try:
                transaction = _transaction.begin(self.storage, self.path, overwrite=self.overwrite)
                work = transaction.work
            except Exception as error:  # told to all processes, then raised
                problem = error
        said = {"work": work, "problem": _text(problem)}
        agreed: Any = self.processes.agree(f"{self.name}/begin", said, timeout_s=self.timeout_s)
        if problem is not None:
            _transaction.raise_save_error(self.path, problem)
        if agreed["problem"] is not None:
            raise ProcessesDisagree(
                f"{self.path} was not saved: process 0 failed: {agreed['problem']}",
                {0: agreed["problem"]},
            )
        return transaction, agreed["work"]

    def _write(self, work: str) -> None:
        """Writes this process's share; returns when every process has written its own."""
        problem, item = None, f"{work}/{names.STATE_ITEM}"
        try:
            prefixes = [leaf.name + "/" if leaf.name else "" for leaf in _array_leaves(self.flat)]
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
        said = {"problem": _text(problem), "tree": self._fingerprint()}
        gathered: list[Any] = self.processes.gather(
            f"{self.name}/written", said, timeout_s=self.timeout_s
        )
        if problem is not None:
            raise problem
        failures = {i: g["problem"] for i, g in enumerate(gathered) if g["problem"] is not None}
        failures |= {
            i: "has another tree, other shapes or other shardings than process 0"
            for i, g in enumerate(gathered)
            if i not in failures and g["tree"] != gathered[0]["tree"]
        }
        if failures:
            raise ProcessesDisagree(
                f"{self.path} was not saved:\n"
                + "\n".join(f"  process {i}: {text}" for i, text in failures.items()),
                failures,
            )

    def _fingerprint(self) -> str:
        facts = [
            (leaf.path, leaf.kind, leaf.shape, stored.shape, stored.dtype, stored.chunk_shape)
            for leaf, stored in zip(_array_leaves(self.flat), self.plan.stored, strict=True)
        ]
        return step.digest(repr(facts).encode())

    def _commit(self, transaction: _transaction.Transaction | None, work: str) -> None:
        problem = None
        if transaction is not None:
            try:
                digests = self._finalize(work)
                transaction.commit(digests, lineage={})
            except Exception as error:  # told to all processes, then raised
                problem = error
        agreed: Any = self.processes.agree(
            f"{self.name}/committed", _text(problem), timeout_s=self.timeout_s
        )
        if problem is not None:
            raise problem
        if agreed is not None:
            raise ProcessesDisagree(
                f"{self.path} was not saved: process 0 failed: {agreed}", {0: agreed}
            )

    def _finalize(self, work: str) -> dict[str, str]:
        """Merges the databases and writes the metadata files; returns the digests of those."""
        item = f"{work}/{names.STATE_ITEM}"
        self.storage.make_dir(item)
        if self.processes.count > 1:
            merge(self.storage, item)
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
        if self.storage.kind(f"{work}/{manifest}") == "file":
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
    storage, where = locate(path)
    metadata = _check_json(custom_metadata)
    processes = current()
    if processes.count == 1:
        _transaction.check_target(storage, where, overwrite=overwrite)
    flat = flatten(value)
    _check_strings(flat)
    values = [v for v in flat.values if v is not None]
    specs = [_spec(v, processes) for v in values]
    plan = plan_save(specs, process=processes.index)
    return SaveJob(
        storage=storage,
        path=where,
        overwrite=overwrite,
        custom_metadata=metadata,
        processes=processes,
        name=f"save/{next(_attempts)}",
        flat=replace(flat, values=()),
        shardings=_shardings(flat),
        plan=plan,
        snapshot=stage(values, plan, copy=copy),
        started_ns=time.time_ns(),
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
        leaf.name: _saved_sharding(value)
        for leaf, value in zip(flat.leaves, flat.values, strict=True)
        if leaf.kind in ("array", "key") and isinstance(value, jax.Array)
    }


def _saved_sharding(value: jax.Array) -> SavedSharding:
    devices = value.sharding.device_set
    if isinstance(value.sharding, jax.sharding.NamedSharding) and not value.sharding.mesh.empty:
        mesh: Any = value.sharding.mesh
        return SavedSharding(
            axis_names=tuple(map(str, mesh.axis_names)),
            axis_sizes=tuple(mesh.devices.shape),
            axis_types=tuple(kind.name for kind in mesh.axis_types),
            spec=tuple(_axes(axes) for axes in value.sharding.spec),
            device_ids=tuple(device.id for device in mesh.devices.flat),
        )
    if len(devices) == 1:
        return SavedSharding(device=str(next(iter(devices))))
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
