"""`restore`: a saved tree, on the devices that are here, as the caller wants it."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxckpt._core import box as _box
from jaxckpt._core import pytree as _tree
from jaxckpt._core.box import Box
from jaxckpt._core.transfer import boxes_here, placing, to_default_device, to_device
from jaxckpt._disk import find as _discovery
from jaxckpt._disk.find import consistently
from jaxckpt._disk.native import Item, read_item
from jaxckpt._disk.reader import LeafRead, read_leaves
from jaxckpt._progress.meter import Meter, Watch, display
from jaxckpt._progress.timing import OnProgress
from jaxckpt._restore import match as _match
from jaxckpt._restore.match import Request, RestoreReport
from jaxckpt._restore.placement import Placer
from jaxckpt.errors import (
    CorruptCheckpoint,
    Difference,
    TreeMismatch,
    UnsupportedFormat,
)
from jaxckpt.format.arrays import dtype_of
from jaxckpt.format.tree import MAX_DIGITS, Kind, Leaf, Path, path_text
from jaxckpt.multihost import Processes, current, disagreement, meet
from jaxckpt.storage import Storage, locate

_logger = logging.getLogger("jaxckpt")

DEFAULT_BUDGET_BYTES: Final = 1 << 30
DEFAULT_TIMEOUT_S: Final = 1200.0
_ARRAY_KINDS: Final = ("array", "numpy", "generic")
_INTEGER: Final = re.compile(rf"-?[0-9]{{1,{MAX_DIGITS}}}")


def restore(
    path: str | os.PathLike[str],
    like: Any = None,  # any pytree
    *,
    item: str | None = None,
    mesh: Mesh | None = None,
    shardings: Any = None,  # a tree of shardings, or a function
    dtype: Any = None,  # whatever numpy takes for a dtype
    as_numpy: bool = False,
    only: str | Sequence[str] | None = None,
    skip: str | Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
    missing: Literal["error", "keep"] = "error",
    extra: Literal["error", "ignore"] = "error",
    report: Callable[[RestoreReport], None] | None = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    on_progress: OnProgress | None = None,
) -> Any:  # any pytree
    """Restores a tree from a checkpoint that jaxckpt, Orbax or Flax wrote.

    In a job of several processes all of them call it; with `as_numpy` any of them may.

    Args:
        path: A checkpoint, one of its items, or a run's root (then its newest good step).
        like: What is wanted: a tree of arrays, `jax.ShapeDtypeStruct`s or Python values, which give
            structure, dtype and sharding. None: the tree as it was saved.
        item: Which item, if the checkpoint has several trees.
        mesh: Puts the saved PartitionSpecs on this mesh.
        shardings: A sharding for each leaf: a tree of them (also one for a whole container), or
            `fn(path, shape, dtype)`. A PartitionSpec is one of `mesh`.
        dtype: For all floating-point arrays, in place of the saved or the wanted one.
        as_numpy: Host arrays in place of jax arrays. Typed PRNG keys stay keys.
        only, skip: Globs over leaf paths (`params/*`); a container's name means all in it. Leaves
            of `like` that are left out are returned as they are.
        rename: Regular expressions over saved paths, and what to put in place of the match.
        missing: What to do about leaves of `like` that were not saved: "keep" takes like's own.
        extra: What to do about saved leaves that are not in `like`.
        report: Is called with a `RestoreReport` before the restore returns.
        budget_bytes: Of host memory, beside the arrays that are returned. What one array takes of
            it is about a quarter, and never less than a chunk of 32 MiB.
        on_progress: Is called a few times a second with a `Progress`, in a thread of its own. What
            it raises is raised at the end. None: a bar in a terminal or notebook, if tqdm is
            installed; `lambda _: None` for none.

    Returns:
        The tree: with the types of `like`, or with those it was saved with where they can be
        rebuilt safely. Without a target arrays go where they were if those devices are here, else
        to a mesh of the same axes on the devices that are.

    Raises:
        CheckpointNotFound: there is no committed checkpoint at `path`.
        TreeMismatch: `like`, or a sharding, does not fit; every difference is listed.
        CorruptCheckpoint: stored data is missing or damaged; the leaf and the file are named.
        OSError: the storage fails to read it, which says nothing of what is stored.
        UnsupportedFormat: it was written by something newer.
    """
    storage, where = locate(path)

    def load() -> Any:  # an Item, or JSON
        checkpoint = _discovery.find(storage, where)
        name = _discovery.choose_item(checkpoint, item)
        file = _discovery.json_file(storage, checkpoint.items[name])
        if file is not None:
            return _discovery.read_json_item(checkpoint, file)
        return read_item(checkpoint, name)

    # In a list, so that this call refers to the arrays of `like` no longer than the one below.
    target = [like]
    del like
    return restore_from(
        load,
        storage,
        where,
        target,
        mesh=mesh,
        shardings=shardings,
        dtype=dtype,
        as_numpy=as_numpy,
        only=only,
        skip=skip,
        rename=rename,
        missing=missing,
        extra=extra,
        report=report,
        budget_bytes=budget_bytes,
        on_progress=on_progress,
    )


def restore_from(
    load: Callable[[], Any],
    storage: Storage,
    where: str,
    target: list[Any],  # of one pytree
    *,
    mesh: Mesh | None = None,
    shardings: Any = None,  # a tree of shardings, or a function
    dtype: Any = None,  # whatever numpy takes for a dtype
    as_numpy: bool = False,
    only: str | Sequence[str] | None = None,
    skip: str | Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
    missing: Literal["error", "keep"] = "error",
    extra: Literal["error", "ignore"] = "error",
    report: Callable[[RestoreReport], None] | None = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_progress: OnProgress | None = None,
    meter: Meter | None = None,
) -> Any:  # any pytree
    """`restore`, of the item that `load` finds; what else it finds is returned as it is.

    The processes tell each other how it went, within `timeout_s`. Takes `like` out of `target`:
    while data is read, no call refers to its arrays.
    """
    like = target.pop()
    _check_arguments(missing, extra)
    meter = meter or Meter("restore", where)
    keep_values = missing == "keep" or only is not None or skip is not None
    processes = current()
    wanted, treedef, watch = None, None, None
    problem, loaded, matched, values = None, None, None, {}

    def read() -> tuple[Any, _match.Match | None, dict[Path, object]]:
        with meter.phase("find"):
            loaded = load()
            if not isinstance(loaded, Item):
                return loaded, None, {}
            matched = _match.match(
                loaded.tree.leaves,
                wanted,
                place=loaded.checkpoint.path,
                only=only,
                skip=skip,
                rename=rename,
                missing=missing,
                extra=extra,
            )
            placer = Placer(mesh=mesh, shardings=shardings, saved=loaded.read_shardings)
            placer.check_names([request.path for request in matched.requests])
            jobs = _plan(matched.requests, loaded, placer, dtype=dtype, as_numpy=as_numpy)
            matched = replace(matched, report=replace(matched.report, cast=_casts(jobs)))
        with placing(), meter.phase("read"):
            values = {**matched.kept, **dict(_read(loaded, jobs, budget_bytes, meter))}
        placer.log_replicated(where)
        return loaded, matched, values

    try:
        if like is not None:
            wanted, treedef = _match.flatten_like(like, keep_values=keep_values)
        # From here on nothing refers to the arrays of `like`: the caller may have let go of them.
        del like
        watch = Watch(meter, display(on_progress, processes.index))
        try:
            loaded, matched, values = consistently(storage, where, read)
        finally:
            watch.end()
    except Exception as error:  # told to the other processes, then raised
        problem = error
    if processes.count > 1 and not as_numpy:
        with meter.phase("meet"):
            _share_failure(processes, where, problem, loaded, meter, timeout_s=timeout_s)
    try:
        if problem is not None:
            raise problem
    finally:
        del problem  # which would keep itself alive, and with it all that was read
    if not isinstance(loaded, Item) or matched is None:
        return loaded
    timing = meter.timing()
    if report is not None:
        report(replace(matched.report, timing=timing))
    _logger.info("%s", timing)
    if watch is not None and watch.error is not None:
        raise watch.error
    if treedef is not None and wanted is not None:
        return treedef.unflatten([values[want.path] for want in wanted])
    if matched.report.renamed:
        return _tree.rebuild_named(values)
    return _tree.rebuild(loaded.tree, values)


def _check_arguments(missing: str, extra: str) -> None:
    if missing not in ("error", "keep"):
        raise ValueError(f"missing must be 'error' or 'keep', not {missing!r}")
    if extra not in ("error", "ignore"):
        raise ValueError(f"extra must be 'error' or 'ignore', not {extra!r}")


def _share_failure(
    processes: Processes,
    where: str,
    problem: Exception | None,
    loaded: object,
    meter: Meter,
    *,
    timeout_s: float,
) -> None:
    """Lets no process go on into a collective operation that another will never reach."""
    record = loaded.checkpoint.record if isinstance(loaded, Item) else None
    token = None if record is None else record.token
    said = {"token": token, "seconds": meter.phases.get("read", 0.0)}
    met = meet(processes, "restore", said, problem, timeout_s=timeout_s)
    meter.note_slowest([one["seconds"] for one in met.values])
    place = f"{where} was not restored"
    if problem is None:
        met.check(None, place)
        replaced = "read another checkpoint than process 0: it was replaced in the meantime"
        others = [i for i, one in enumerate(met.values) if one["token"] != met.values[0]["token"]]
        if others:
            raise disagreement(place, dict.fromkeys(others, replaced))


# --- what to make of each leaf ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One leaf: where from, and what to make of it.

    Attributes:
        kind: What comes back.
        dtype: Of the array that comes back.
        sharding: Of a jax array; None: the default device, uncommitted.
        boxes: The parts of the stored array that this process needs.
    """

    request: Request
    kind: Kind
    dtype: np.dtype[Any] | None
    sharding: Sharding | None
    boxes: tuple[Box, ...]


def _plan(
    requests: Sequence[Request],
    item: Item,
    placer: Placer,
    *,
    dtype: Any,
    as_numpy: bool,
) -> list[_Job]:
    """Decides for every leaf before anything is read, so that all misfits are told at once."""
    jobs, differences = [], []
    for request in requests:
        try:
            jobs.append(_plan_leaf(request, placer, dtype=dtype, as_numpy=as_numpy))
        except _DoesNotFit as misfit:
            differences.append(misfit.difference)
    if differences:
        raise TreeMismatch(
            f"{len(differences)} leaves of {item.path} cannot be split as asked:\n"
            + "\n".join(f"  {difference}" for difference in differences[:200])
            + "\nGive them a sharding whose mesh axes divide their shape.",
            differences,
        )
    return jobs


class _DoesNotFit(Exception):
    def __init__(self, difference: Difference) -> None:
        self.difference = difference


def _plan_leaf(request: Request, placer: Placer, *, dtype: Any, as_numpy: bool) -> _Job:
    saved, wanted = request.saved, request.wanted
    kind: Kind = saved.kind if wanted is None else wanted.kind
    if kind == "numpy" and wanted is None and placer.is_asked(request.path, saved):
        kind = "array"
    if kind == "array" and as_numpy:
        kind = "numpy"
    shape = saved.shape
    if saved.kind == "key" and kind in ("array", "numpy"):
        shape = saved.array.shape
    elif saved.kind != "key" and kind == "key" and wanted is not None:
        shape = wanted.shape
    out = _out_dtype(saved, request, dtype if kind in _ARRAY_KINDS else None)
    if kind not in ("array", "key"):
        boxes = () if saved.stored is None else (_box.whole(saved.stored.shape),)
        return _Job(request=request, kind=kind, dtype=out, sharding=None, boxes=boxes)
    sharding = None
    if not as_numpy:
        sharding = placer.place(request.path, saved.name, shape, out, wanted)
    data_shape = saved.shape if saved.stored is None else saved.stored.shape
    boxes = (_box.whole(data_shape),)
    if sharding is not None:
        try:
            sharding.shard_shape(shape)
            data_sharding = (
                sharding if kind == "array" else _key_data_sharding(sharding, len(shape))
            )
            boxes = boxes_here(data_sharding, data_shape)
        except (ValueError, IndexError) as error:
            raise _DoesNotFit(
                Difference(
                    leaf=path_text(request.path),
                    wanted=str(sharding),
                    saved=_match.describe(saved.kind, saved.dtype, shape, saved.key_impl),
                )
            ) from error
    return _Job(request=request, kind=kind, dtype=out, sharding=sharding, boxes=boxes)


def _out_dtype(saved: Leaf, request: Request, dtype: Any) -> np.dtype[Any] | None:
    wanted = request.wanted
    if saved.kind in ("str", "bytes", "empty", "ellipsis", "key"):
        return None
    if saved.value is not None and saved.kind == "int" and isinstance(saved.value, str):
        return None
    if wanted is not None and wanted.kind == "key":
        return None
    out = dtype_of(saved.dtype) if wanted is None or wanted.dtype is None else wanted.dtype
    if dtype is not None and jax.numpy.issubdtype(out, np.floating):
        return np.dtype(dtype)
    return out


def _casts(jobs: Sequence[_Job]) -> dict[str, tuple[str, str]]:
    return {
        path_text(job.request.path): (job.request.saved.dtype, job.dtype.name)
        for job in jobs
        if job.dtype is not None and dtype_of(job.request.saved.dtype) != job.dtype
    }


def _key_data_sharding(sharding: Sharding, rank: int) -> Sharding:
    """The sharding of a key array's data, which has a further dimension that is never split."""
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(*sharding.spec[:rank])
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    if len(sharding.device_set) == 1:
        return sharding
    mesh = Mesh(np.asarray(_by_id(sharding)), ("devices",))
    return NamedSharding(mesh, PartitionSpec())


def _by_id(sharding: Sharding) -> list[Any]:
    devices: set[Any] = sharding.device_set
    return sorted(devices, key=lambda device: device.id)


def _read(
    item: Item, jobs: Sequence[_Job], budget_bytes: int, meter: Meter
) -> Iterator[tuple[tuple[str, ...], object]]:
    """Reads and converts, leaf by leaf."""
    on_disk = [job for job in jobs if job.request.saved.has_array]
    reads = [LeafRead(leaf=j.request.saved, boxes=j.boxes, dtype=_read_dtype(j)) for j in on_disk]
    meter.total_bytes = sum(read.total_bytes for read in reads)
    arrays = read_leaves(item, reads, budget_bytes=budget_bytes, landed=meter.landed)
    place_s = 0.0
    with closing(arrays) as buffers:
        for job in jobs:
            path = job.request.path
            parts = next(buffers) if job.request.saved.has_array else _inline(job)
            start_s = time.monotonic()
            value = _convert(job, parts)
            place_s += time.monotonic() - start_s
            yield path, value
    meter.add("place", place_s)
    meter.add("read", -place_s)  # which counts the whole of this


def _read_dtype(job: _Job) -> np.dtype[Any]:
    """What to read into: the dtype that comes back, unless the stored bytes mean another."""
    saved = job.request.saved
    stored = dtype_of(saved.array.dtype)
    if job.dtype is None or saved.dtype != saved.array.dtype:
        return stored
    return job.dtype


def _inline(job: _Job) -> dict[Box, np.ndarray[Any, Any]]:
    """The parts of a value that the metadata holds."""
    value = job.request.saved.value
    if not isinstance(value, np.ndarray):
        return {}
    boxes = job.boxes or (_box.whole(value.shape),)
    return {box: np.array(value[box.slices]) for box in boxes}


def _convert(job: _Job, parts: dict[Box, np.ndarray[Any, Any]]) -> object:
    """What the caller gets for one leaf."""
    saved, wanted = job.request.saved, job.request.wanted
    if saved.kind == "empty":
        return _tree.empty_value(saved)
    if saved.kind == "ellipsis":
        return ...
    if isinstance(saved.value, (str, bytes)):
        return _inline_value(saved)
    parts = {box: _as_wanted(job, values) for box, values in parts.items()}
    if job.kind == "key":
        impl = saved.key_impl if wanted is None or wanted.key_impl is None else wanted.key_impl
        return _wrap_key(job, parts, impl)
    if job.kind == "array":
        if job.sharding is None:
            return to_default_device(next(iter(parts.values())))
        shape = saved.shape if saved.kind != "key" else saved.array.shape
        dtype = job.dtype or dtype_of(saved.array.dtype)
        return to_device(parts, job.sharding, shape, dtype)
    values = next(iter(parts.values()))
    if job.kind == "numpy":
        return values
    if job.kind == "bytes":
        return values.tobytes()
    if job.kind == "str":
        return _decode_text(values.tobytes(), saved)
    if job.kind == "generic":
        return values[()]
    return {"int": int, "float": float, "complex": complex, "bool": bool}[job.kind](values.item())


def _as_wanted(job: _Job, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    saved = job.request.saved
    if saved.kind in ("str", "bytes", "key") or job.dtype is None:
        return values
    if saved.stored is not None and saved.dtype != saved.stored.dtype:
        values = values.view(dtype_of(saved.dtype))
    return values if values.dtype == job.dtype else values.astype(job.dtype)


def _inline_value(saved: Leaf) -> object:
    if saved.kind != "int":
        return saved.value
    if not _INTEGER.fullmatch(saved.value):
        raise CorruptCheckpoint(f"leaf {saved.text} should be an int, found text", leaf=saved.text)
    return int(saved.value)


def _decode_text(data: bytes, saved: Leaf) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CorruptCheckpoint(f"leaf {saved.text} is no UTF-8 text", leaf=saved.text) from error


def _wrap_key(job: _Job, parts: dict[Box, np.ndarray[Any, Any]], impl: str | None) -> jax.Array:
    saved = job.request.saved
    rank = len(saved.shape if saved.kind == "key" else job.request.wanted.shape)  # pyright: ignore[reportOptionalMemberAccess]
    data_shape = saved.shape if saved.stored is None else saved.stored.shape
    if job.sharding is None:
        data = to_default_device(next(iter(parts.values())))
    else:
        split = _key_data_sharding(job.sharding, rank)
        data = to_device(parts, split, data_shape, dtype_of(saved.array.dtype))
    try:
        key = jax.random.wrap_key_data(data, impl=impl)
    except (ValueError, TypeError) as error:
        raise UnsupportedFormat(
            f"leaf {saved.text}: this jax cannot make a PRNG key of implementation {impl!r}: "
            f"{error}. Restore it as uint32{list(data_shape)} with a `like`, or register it."
        ) from error
    if job.sharding is not None and key.sharding != job.sharding:
        return jax.device_put(key, job.sharding)
    return key
