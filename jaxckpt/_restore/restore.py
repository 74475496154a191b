"""Restores a saved tree, on the available devices, as the caller wants it.

resolve    find the checkpoint, open the item                     _disk.find
plan       match saved and wanted leaves, choose shardings        match, placement
read       read the parts of chunks that this process needs       _disk.reader
share      either all processes return, or all raise              multihost
build      make the tree                                          _core.pytree
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, Never, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from jaxckpt._core import pytree
from jaxckpt._core.box import Box, whole
from jaxckpt._core.cast import cast
from jaxckpt._core.check import as_step, calling, explain_names
from jaxckpt._core.collector import paused
from jaxckpt._core.text import counted
from jaxckpt._core.transfer import (
    Arriving,
    in_layout,
    is_away,
    placed_alike,
    placing,
    to_default_device,
    to_device,
)
from jaxckpt._disk.chunks import Buffers, Layout, LeafRead, layout_of, total_bytes
from jaxckpt._disk.find import at_rest, marked_as, read_step, step_path, steps_to_try, warn_skipped
from jaxckpt._disk.found import Found, JsonItem
from jaxckpt._disk.item import open_item
from jaxckpt._disk.native import Item
from jaxckpt._disk.reader import check_here, read_leaves
from jaxckpt._progress.meter import Meter, display
from jaxckpt._restore.match import RestoreRequest, Target, flatten_like, match
from jaxckpt._restore.once import Ended, Together, said
from jaxckpt._restore.placement import LeafPlan, ShardingChooser, key_data_sharding, plan_leaves
from jaxckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    CheckpointTimeout,
    CorruptCheckpoint,
    UnsupportedFormat,
)
from jaxckpt.format.arrays import dtype_of
from jaxckpt.format.tree import ARRAY_KINDS, MAX_DIGITS, Leaf, Path, path_text
from jaxckpt.multihost import Processes, current, lead, raise_if_any
from jaxckpt.storage import locate
from jaxckpt.types import OnProgress, RestoreReport

_logger = logging.getLogger("jaxckpt")

_INTEGER: Final = re.compile(rf"-?[0-9]{{1,{MAX_DIGITS}}}")

T = TypeVar("T")


def restore(
    path: str | os.PathLike[str],
    like: Any = None,  # any pytree
    *,
    step: int | None = None,
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
    resize: bool = False,
    report: Callable[[RestoreReport], None] | None = None,
    budget_bytes: int = 1 << 30,
    read_once: bool | Literal["auto"] = "auto",
    on_progress: OnProgress | None = None,
    **unknown: Never,  # a decorator would hold the arrays of `like`
) -> Any:  # any pytree
    """Restores a tree from a checkpoint that jaxckpt, Orbax or Flax wrote, or from safetensors.

    In a job of several processes, every process calls it alike; with `as_numpy`, any process may.

    Args:
        path: A checkpoint, one of its items, or a run's root (restores its newest good step). If
            that proves damaged, in any process, all processes restore the step before and log a
            warning. Or `*.safetensors`, or `*.safetensors.index.json` with its files beside it;
            dots in the names of tensors make nested dicts.
        like: The target, a tree of arrays, `jax.ShapeDtypeStruct`s or Python values that give
            structure, dtype, sharding and layout, or what `jaxckpt.open` returns, for the same tree
            as in that checkpoint. If None, the tree is restored as it was saved. A cast never turns
            float into int, int into bool or signed into unsigned, and may round floats; integers
            stay the same number, finite values finite. Leaves without a sharding get the saved one.
        step: The number of a step, if `path` is the root of a run: `restore("run", step=20)`.
        item: Name of the item, if the checkpoint has several trees.
        mesh: Puts the saved PartitionSpecs on this mesh.
        shardings: A sharding for each leaf, as a tree (an entry may cover a container) or as
            `fn(path, shape, dtype)`. A PartitionSpec refers to `mesh`.
        dtype: Replaces the saved or wanted dtype of all floating-point arrays. A leaf of `like`
            that has this dtype may be cast from any kind but complex, which cuts off fractions.
        as_numpy: Returns host arrays in place of jax arrays. Typed PRNG keys stay keys.
        only, skip: Globs over leaf paths (`params/*`); the name of a container includes its leaves.
            Each has to match. Leaves of `like` that are left out are returned as they are.
        rename: Maps regular expressions, each of which matches a saved path, to replacements.
        missing: Whether a leaf of `like` that was not saved is an error, or keeps its value.
        extra: Whether a saved leaf that is not in `like` is an error, or is ignored.
        resize: Whether to cut off arrays that are longer than in `like`, and to pad shorter arrays
            with zeros, at the end of each dimension, as for a vocabulary that grows.
        report: Called with a `RestoreReport` before the restore returns.
        budget_bytes: Host memory to use beside the returned arrays: about a quarter for one array,
            at least 32 MiB, and half for copies to accelerators, while the next arrays are read.
        read_once: Whether only one process reads a value that several need, and XLA carries it to
            the others, where possible. "auto": not from local disks, nor for small trees.
        on_progress: Called a few times a second with a `Progress`, in its own thread; its error is
            raised at the end. If None, tqdm, if installed, shows a bar; not so `lambda _: None`.

    Returns:
        The tree, with the types of `like`, or else with the saved types that can be rebuilt safely.
        Saved shardings use the saved devices, or else a mesh of the same axes on those there are.

    Raises:
        CheckpointNotFound: `path` lacks a committed checkpoint.
        TreeMismatch: `like` or a sharding does not fit; the error lists every difference. Or a
            value does not fit the wanted dtype; the error names leaf and value.
        CorruptCheckpoint: stored data is missing or damaged; the error names leaf and file.
        OSError: the storage fails to read it; this does not show damage.
        UnsupportedFormat: a newer program wrote it.
    """
    if unknown:
        explain_names("restore", unknown, restore)
    storage, where = locate(path)
    if step is not None:
        where = step_path(storage, where, as_step("restore", step))
    source = Source(
        where=where,
        within=partial(at_rest, storage, where, fallback=as_numpy or current().count == 1),
        open=partial(_open, item),
        steps=partial(steps_to_try, storage, where),
        step=partial(read_step, storage),
    )
    target = [like]  # so that `restore_from` can drop the last reference to the arrays of `like`
    del like
    return restore_from(
        source,
        target,
        RestoreRequest(
            mesh=mesh,
            shardings=shardings,
            dtype=dtype,
            as_numpy=as_numpy,
            only=only,
            skip=skip,
            rename=rename,
            missing=missing,
            extra=extra,
            resize=resize,
            report=report,
            budget_bytes=budget_bytes,
            read_once=read_once,
            on_progress=on_progress,
        ),
    )


def _open(item: str | None, found: Found) -> Item | JsonItem:
    if found.differences:
        _logger.warning("%s", marked_as(found))
    return open_item(found, item)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The source of a restore."""

    where: str  # the path, for messages
    within: Callable[[Callable[[Found], _Read]], _Read]  # finds a checkpoint and reads it
    open: Callable[[Found], Any]  # returns an item, or a value that is restored as it is
    # If several processes may fall back together: the paths of a run's steps, and what reads one.
    steps: Callable[[], list[str]] = list
    step: Callable[[str, Callable[[Found], _Read]], _Read] | None = None
    name: str = ""  # alike in all processes; by default the path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """The result of reading: a tree's values by path, or one value."""

    opened: Any
    values: Mapping[Path, object]
    report: RestoreReport | None


def restore_from(
    source: Source, target: list[Any], request: RestoreRequest, *, meter: Meter | None = None
) -> Any:  # any pytree
    """Restores from a source; either every process returns, or every process raises.

    Takes `like` out of `target`, so that nothing refers to its arrays while data is read.
    """
    like, processes = target.pop(), current()
    meter = meter or Meter("restore", source.where)
    wanted, treedef, problem = None, None, None
    try:
        if like is not None:
            wanted, treedef = flatten_like(like, keep_values=request.keeps_values)
    except Exception as error:  # reported to the other processes, then raised
        problem = error
    del like  # from here on nothing refers to its arrays, and the caller may free them
    meter.watch(display(request.on_progress, processes.index))
    try:
        reading = partial(_read, source, request, meter, wanted)
        if processes.count > 1 and not request.as_numpy:
            processes = processes.within(request.timeout_s)
            attempt = partial(_attempt, processes, source, reading, meter, request)
            read = _read_together(processes, source, attempt, problem)
        elif problem is not None:
            raise problem
        else:
            read = source.within(reading)
    finally:
        meter.end()
        del problem  # its traceback would keep it alive, with everything that was read
    if not isinstance(read.opened, Item) or read.report is None:
        return read.opened.value if isinstance(read.opened, JsonItem) else read.opened
    timing = meter.timing()
    if request.report is not None:
        with calling(f"the function `report`, after {source.where} was read"):
            request.report(replace(read.report, timing=timing))
    once = said(read.report) if read.report.read_once else ""
    _logger.info("%s%s%s", timing, once, _cast_text(read.report.cast) if read.report.cast else "")
    if meter.error is not None:
        raise meter.error
    if treedef is not None and wanted is not None:
        return treedef.unflatten(map(read.values.__getitem__, wanted.paths))
    return pytree.rebuild(None if read.report.renamed else read.opened.tree, read.values)


def as_restored(state: Any, request: RestoreRequest) -> Any:  # any pytree
    """Returns a first state, cast to `dtype`; raises what its restore would raise, once saved."""
    options = request.dtype, request.only, request.skip, request.shardings
    if all(one is None for one in options):
        return state
    request, where = replace(request, rename=None), "the result of init"  # with the new names
    wanted, treedef = flatten_like(state, keep_values=True)
    matched = match(pytree.flatten(state)[0].leaves(), wanted, request, where=where)
    chooser = ShardingChooser(mesh=request.mesh, shardings=request.shardings, saved=dict)
    values: dict[Path, Any] = dict(zip(wanted.paths, wanted.values, strict=True))
    for plan in plan_leaves(matched.leaves, chooser, request, where=where):
        if plan.how.kind in ARRAY_KINDS and plan.how.dtype != values[plan.path].dtype:
            values[plan.path] = values[plan.path].astype(plan.how.dtype)
    return treedef.unflatten(values.values())


def _read(
    source: Source,
    request: RestoreRequest,
    meter: Meter,
    wanted: Target | None,
    found: Found,
    together: Together | None = None,
) -> _Read:
    """Resolves, plans and reads; every mismatch is found before anything is read."""
    with paused(), meter.phase("find"):
        item = source.open(found)
        if not isinstance(item, Item):
            return _Read(opened=item, values={}, report=None)
        matched = match(item.tree.leaves, wanted, request, where=item.found.path)
        saved = dict if request.as_numpy else item.read_shardings
        chooser = ShardingChooser(mesh=request.mesh, shardings=request.shardings, saved=saved)
        plans = plan_leaves(matched.leaves, chooser, request, where=item.path)
    with placing(), meter.phase("read"):
        read = partial(_values, item, budget_bytes=request.budget_bytes, meter=meter)
        pairs = together.values(item, plans, read, _convert) if together else read(plans)
        values = {**matched.from_like, **dict(pairs)}
    if chooser.replicated:
        few, example = counted(len(chooser.replicated), "array"), next(iter(chooser.replicated))
        _logger.warning(
            "%s: %s cannot be split as when saved, and must be replicated along some axes of this "
            "mesh, for example %s",
            *(source.where, few, example),
        )
    for leaf in matched.leaves:
        if leaf.saved.container is not None and values[leaf.path] is None:
            _logger.warning(
                "%s: %s is None, because a %s cannot be restored from a checkpoint; pass `like`",
                *(source.where, path_text(leaf.path), ".".join(leaf.saved.container.cls or ())),
            )
    resized = tuple(path_text(plan.path) for plan in plans if plan.how.resized)
    report = replace(matched.report, cast=_casts(plans), resized=resized)
    return _Read(opened=item, values=values, report=report)


def _read_together(
    processes: Processes,
    source: Source,
    attempt: Callable[..., _Read | CheckpointError],
    problem: Exception | None,
) -> _Read:
    """Reads the same checkpoint in all processes; if it is a damaged step, the step before.

    Process 0 lists the steps. Damage that any process finds counts for all of them.
    """
    result = first = attempt(source.within, problem)
    if not isinstance(first, CheckpointError):
        return first
    name, problems, step = f"restore {source.where}/steps", [], source.step
    if step is not None:
        for path in lead(processes, name, source.steps, where=source.where):
            result = attempt(partial(step, path), None, (CorruptCheckpoint, CheckpointNotFound))
            if not isinstance(result, CheckpointError):
                warn_skipped(source.where, problems, posixpath.basename(path))
                return result
            problems.append(f"{posixpath.basename(path)}: {result}")
    try:
        raise first
    finally:
        del first, result, problem  # the traceback refers to this frame


def _attempt(
    processes: Processes,
    source: Source,
    reading: Callable[..., _Read],
    meter: Meter,
    request: RestoreRequest,
    within: Callable[[Callable[[Found], _Read]], _Read],
    problem: Exception | None,
    damage: type | tuple[type, ...] = CorruptCheckpoint,
) -> _Read | CheckpointError:
    """Reads in all processes; returns the error if only damage was in the way, else raises it.

    Keeps any process from entering a collective operation that another will never reach.
    """
    read, met, where = None, None, f"restoring {source.where}"
    name = source.name or source.where
    together = Together(processes=processes, request=request, meter=meter, name=name, where=where)
    try:
        if problem is None:
            read = within(partial(reading, together=together))
    except CheckpointTimeout:  # of a round: alike in all processes, which do not meet again
        raise
    except Ended as ended:
        met = ended.met
    except Exception as error:  # reported to the other processes, then raised
        problem = error
    mark = "damage" if isinstance(problem, damage) else ""
    item = None if read is None else read.opened
    found = item.found if isinstance(item, Item) else None
    token = found and (found.origin or found.path)  # other programs write no token
    facts = {"token": token, "seconds": meter.phases.get("read", 0.0)}
    facts |= {"read": together.read_bytes, "moved": together.moved_bytes}
    facts["shared"] = together.shared
    try:
        if met is None:
            with meter.phase("meet"):
                met = together.end(facts, problem, mark)
        try:
            where = f"{source.where} was not restored"
            met.check(problem, where)
            raise_if_any(met.verdict, where)
            meter.slowest = met.verdict["slowest"]
        except CheckpointError as error:
            if all(met.marks.values()):
                return error
            raise
        raise_if_any(met.verdict["unlike"], where)
        assert read is not None
        if read.report is not None:
            sums = {"job_bytes": met.verdict["read"], "moved_bytes": met.verdict["moved"]}
            report = replace(read.report, read_once=together.once, **sums)
            read = replace(read, report=report)
        return read
    finally:
        # The traceback of an error refers to this frame, and would keep what was read.
        del problem, read, item, found


# --- the value of each leaf ------------------------------------------------------------------


def _casts(plans: Sequence[LeafPlan]) -> dict[str, tuple[str, str]]:
    return {
        path_text(plan.path): (plan.saved.dtype, plan.how.dtype.name)
        for plan in plans
        if plan.how.dtype is not None and dtype_of(plan.saved.dtype) != plan.how.dtype
    }


def _cast_text(cast: Mapping[str, tuple[str, str]]) -> str:
    leaf, (saved, restored) = next(iter(cast.items()))
    return f"; cast {counted(len(cast), 'leaf')}, such as {leaf} from {saved} to {restored}"


def _values(
    item: Item, plans: Sequence[LeafPlan], *, budget_bytes: int, meter: Meter
) -> Generator[tuple[Path, object], None, None]:
    alike = {id(plan.how): plan for plan in plans}  # a plan for each `how`
    ways = {how: _way_of(item.path, plan) for how, plan in alike.items()}
    reads = [LeafRead(x.saved, way) for x in plans if (way := ways[id(x.how)][0]) is not None]
    if item.found.part is not None:
        check_here(item, reads)
    meter.total_bytes = total_bytes(reads)
    hows = [plan.how for plan in alike.values()]
    where = {how.sharding or _default_device() for how in hows if how.kind in ("array", "key")}
    if away := any(map(is_away, where)):
        budget_bytes //= 2  # the other half is for copies to devices
    arriving, place_s = Arriving(budget_bytes), 0.0
    arrays = read_leaves(item, reads, budget_bytes=budget_bytes, landed=meter.landed)
    with closing(arrays) as buffers:
        for plan in plans:
            layout, make = ways[id(plan.how)]
            parts = _inline(plan) if layout is None else next(buffers)
            start_s = time.monotonic()
            value = make(plan, parts)
            del parts  # a copy to a device keeps them for as long as it needs them
            if isinstance(value, Tracer):
                raise TypeError("jax traces the caller; call restore outside jit, grad and vmap")
            if away:
                arriving.add(value)
            place_s += time.monotonic() - start_s
            yield plan.path, value
            del value  # the traceback of an error refers to this frame
    start_s = time.monotonic()
    arriving.finish()
    place_s += time.monotonic() - start_s
    meter.phases["place"] += place_s
    meter.phases["read"] -= place_s  # the phase "read" includes all of this


def _default_device() -> Any:  # a device, or the name of its platform
    return jax.config.jax_default_device or jax.local_devices()[0]


def _way_of(where: str, plan: LeafPlan) -> tuple[Layout | None, Callable[[LeafPlan, Buffers], Any]]:
    """Returns how leaves that share the `how` of this one are read, and what makes their values."""
    how, saved, convert = plan.how, plan.saved, partial(_convert, where)
    if not saved.has_array:
        return None, convert
    # Into the final dtype, unless the leaf is stored as another.
    dtype = how.dtype if saved.dtype == saved.array.dtype else None
    layout = layout_of(saved.array, plan.stored_boxes(), dtype or dtype_of(saved.array.dtype))
    changes = dtype is None or how.resized or (how.layout, how.bits) != (None, None)
    if changes or how.sharding is None or not {how.kind, saved.kind} <= ARRAY_KINDS:
        return layout, convert
    alike = placed_alike(how.sharding, saved.shape, layout.dtype)
    return layout, lambda _, parts: to_device(parts, alike)  # as `convert` does, for all at once


def _inline(plan: LeafPlan) -> Buffers:
    """Returns the parts of a value that is in the metadata."""
    value = plan.saved.value
    if not isinstance(value, np.ndarray):
        return ()
    boxes = plan.stored_boxes() or (whole(value.shape),)
    return [np.array(value[box.slices]) for box in boxes]


def _convert(where: str, plan: LeafPlan, parts: Buffers) -> object:
    saved, wanted = plan.saved, plan.how.wanted
    if saved.kind in ("empty", "ellipsis"):
        return pytree.empty_value(saved)
    if isinstance(saved.value, (str, bytes)):
        return _inline_value(saved)
    parts = _as_wanted(plan, parts, where)
    if plan.how.resized:
        parts = [_resized(plan, box, parts) for box in plan.how.boxes]
    if plan.how.kind == "key":
        impl = saved.key_impl if wanted is None or wanted.key_impl is None else wanted.key_impl
        # jax frees keys late: a small one must not keep the memory of its neighbours until then.
        return _wrap_key(plan, [values.copy() for values in parts], impl)
    if plan.how.kind == "array":
        if plan.how.sharding is None:
            return to_default_device(parts[0])
        shape = saved.shape if saved.kind != "key" else saved.array.shape
        shape = wanted.shape if plan.how.resized and wanted is not None else shape
        dtype = plan.how.bits or plan.how.dtype or dtype_of(saved.array.dtype)
        array = to_device(parts, placed_alike(plan.how.sharding, shape, dtype))
        return array if plan.how.layout is None else in_layout(array, plan.how.layout)
    values, kind = parts[0], plan.how.kind
    if kind in ("numpy", "generic"):
        return values if kind == "numpy" else values[()]
    if kind in ("bytes", "str"):
        return values.tobytes() if kind == "bytes" else _decode_text(values.tobytes(), saved)
    return {"int": int, "float": float, "complex": complex, "bool": bool}[kind](values.item())


def _as_wanted(plan: LeafPlan, parts: Buffers, where: str) -> Buffers:
    saved, dtype = plan.saved, plan.how.dtype
    if saved.kind in ("str", "bytes", "key") or dtype is None:
        return parts
    if saved.stored is not None and saved.dtype != saved.stored.dtype:
        parts = [values.view(dtype_of(saved.dtype)) for values in parts]
    if any(values.dtype != dtype for values in parts):
        options = {"leaf": path_text(plan.path), "where": where}
        parts = [cast(values, dtype, **options) for values in parts]
    return parts if plan.how.bits is None else [values.view(plan.how.bits) for values in parts]


def _resized(plan: LeafPlan, box: Box, parts: Buffers) -> np.ndarray[Any, Any]:
    """Returns a part of an array of the wanted shape: what was saved there, and zeros."""
    values = np.zeros(box.shape, plan.how.dtype)
    if (part := box.intersect(whole(plan.saved.shape))) is not None:
        values[part.within(box)] = parts[plan.stored_boxes().index(part)]
    return values


def _inline_value(saved: Leaf) -> object:
    if saved.kind != "int":
        return saved.value
    if not _INTEGER.fullmatch(saved.value):
        raise CorruptCheckpoint(f"leaf {saved.text} must be an int, found text", leaf=saved.text)
    return int(saved.value)


def _decode_text(data: bytes, saved: Leaf) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CorruptCheckpoint(f"leaf {saved.text} is not UTF-8 text", leaf=saved.text) from error


def _wrap_key(plan: LeafPlan, parts: Buffers, impl: str | None) -> jax.Array:
    saved = plan.saved
    rank = len(saved.shape if saved.kind == "key" else plan.how.wanted.shape)  # pyright: ignore[reportOptionalMemberAccess]
    data_shape = saved.shape if saved.stored is None else saved.stored.shape
    if plan.how.sharding is None:
        data = to_default_device(parts[0])
    else:
        split = key_data_sharding(plan.how.sharding, rank)
        data = to_device(parts, placed_alike(split, data_shape, dtype_of(saved.array.dtype)))
    try:
        key = jax.random.wrap_key_data(data, impl=impl)
    except (ValueError, TypeError) as error:
        raise UnsupportedFormat(
            f"leaf {saved.text}: this jax cannot make a PRNG key of implementation {impl!r}: "
            f"{error}. Register it, or restore uint32{list(data_shape)} with a `like`."
        ) from error
    # jax writes out the PartitionSpec of a key, and `device_put` reaches no other process.
    sharding = plan.how.sharding
    if sharding is None or isinstance(key, Tracer):  # which is refused
        return key
    is_there = key.sharding.is_equivalent_to(sharding, rank)
    return key if is_there else jax.device_put(key, sharding)
