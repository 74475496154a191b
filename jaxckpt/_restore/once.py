"""Reads each stored value once for a whole job, and lets XLA carry it to where it is wanted.

1. choose    for each leaf: directly, or once in a spread sharding        _core.spread
2. agree     all have the same plan and room for it                       round "restore plan"
3. read      a group of leaves: each process its part, checked as always  _disk.reader
4. meet      all have read their parts                                    round "restore group"
5. move      XLA's collective operations, in the same order everywhere

A process that fails before 5 reports it in the next round, so no process enters a collective
operation that another will never reach. If one fails at 3, every process reads directly what its
shards need: so an error, and what follows from it, are as without this module.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate, groupby, islice
from typing import Any, Final, final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxckpt._core.plan import count_chunks, plan_chunks
from jaxckpt._core.spread import Hosts, hosts_of, spread
from jaxckpt._core.text import counted, size_text
from jaxckpt._core.transfer import boxes_here, in_layout
from jaxckpt._disk.found import Found
from jaxckpt._disk.native import Item
from jaxckpt._progress.meter import Meter
from jaxckpt._restore.match import RestoreRequest
from jaxckpt._restore.placement import LeafPlan
from jaxckpt.format.arrays import dtype_of
from jaxckpt.format.tree import ARRAY_KINDS, Path, path_text
from jaxckpt.multihost import Json, Processes, meet
from jaxckpt.storage._limit import LimitedStorage
from jaxckpt.types import RestoreReport

_logger = logging.getLogger("jaxckpt")

# By default, smaller leaves are read directly, as a collective operation takes as long, and so are
# smaller trees: the first compilations and connections take a second or so.
_LEAST_BYTES: Final = 1 << 20
_LEAST_TREE_BYTES: Final = 1 << 26
# On CPUs, XLA writes past the end of gathered arrays of these.
_ODD: Final = ("int2", "uint2")


class _ReadDirectly(Exception):
    """Reading once failed in some process; raised in all of them."""


class _Stopped(Exception):
    """Another process failed before anything was read."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Move:
    """One leaf that is read once."""

    plan: LeafPlan  # of the wanted array
    part: LeafPlan  # of what this process reads
    program: Any  # jax's, compiled: from the parts to the wanted array
    size_bytes: int  # of the whole leaf

    def moved_bytes(self) -> int:
        """Returns the bytes that this process gets from others."""
        there = [box.intersect(part) for box in self.plan.boxes for part in self.part.boxes]
        count = sum(box.size for box in self.plan.boxes) - sum(box.size for box in there if box)
        return count * self.size_bytes // max(1, math.prod(self.plan.saved.shape))


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Together:
    """One attempt of all processes to read one checkpoint."""

    processes: Processes
    request: RestoreRequest
    meter: Meter
    place: str  # for messages
    read_bytes: int = 0  # by this process, uncompressed
    moved_bytes: int = 0  # to this process
    moves: Sequence[Move] = ()
    _has_met: bool = field(default=False, init=False)  # in the round of the plan

    def attempt(
        self, within: Callable[[Callable[[Found], Any]], Any], reading: Callable[..., Any]
    ) -> Any:
        """Reads once, or if that fails directly; returns None if another process has failed.

        Every process takes part in the round of the plan, whatever happens to it before. `within`
        may call its argument several times.
        """
        read = partial(reading, together=self)
        try:
            result = within(read)
            self.end(None)  # it may not be a tree
        except _Stopped:
            return None
        except _ReadDirectly as failure:
            _logger.warning("%s", failure)
        except Exception as error:
            self.end(error)
            raise
        else:
            return result
        return within(read)

    def end(self, problem: Exception | None) -> None:
        """Takes part in the round of the plan, if this process has not, since others wait in it."""
        if not self._has_met:
            self._meet("restore plan", None, problem)

    def values(
        self,
        item: Item,
        plans: Sequence[LeafPlan],
        read: Callable[..., Generator[tuple[Path, Any], None, None]],
    ) -> Iterator[tuple[Path, Any]]:
        """Yields all leaves, within the phase "read"; all are read directly if called again."""
        self.moves = () if self._has_met else self._agreed(item, plans)
        once = {move.plan.path for move in self.moves}
        parts = [move.part for move in self.moves]
        parts += [plan for plan in plans if plan.path not in once]
        self.read_bytes = sum(_read_bytes(item, part) for part in parts if part.saved.has_array)
        self.moved_bytes = sum(move.moved_bytes() for move in self.moves)
        budget_bytes = self.request.budget_bytes // (2 if self.moves else 1)  # or two groups
        return self._moved(read(parts, budget_bytes=budget_bytes))

    def _agreed(self, item: Item, plans: Sequence[LeafPlan]) -> Sequence[Move]:
        """Returns what is read once, if every process has this plan and room for it."""
        with _aside(self.meter, "move"):  # compiles
            moves = self._choose(item, plans)
            text = _described(item, moves, self.request) if moves and _fits(moves) else None
        with _aside(self.meter, "meet"):
            met = self._meet("restore plan", text, None)
        if met.failed:
            raise _Stopped
        return moves if met.verdict else ()

    def completed(self, report: RestoreReport, read_bytes: int, moved_bytes: int) -> RestoreReport:
        """Returns a report with what was read once, and the sums of all processes."""
        once = tuple(path_text(move.plan.path) for move in self.moves)
        return replace(report, read_once=once, job_bytes=read_bytes, moved_bytes=moved_bytes)

    def _moved(self, values: Generator[tuple[Path, Any], None, None]) -> Iterator[tuple[Path, Any]]:
        """Yields leaves as wanted, given the parts of those that are read once, and the others."""
        problem, moving = None, []
        try:
            for group in _groups(self.moves, self.request.budget_bytes // 4, self.processes.count):
                parts: list[Any] = []
                try:
                    if problem is None:
                        parts = [value for _, value in islice(values, len(group))]
                except Exception as error:  # reported to the other processes
                    problem = error
                with _aside(self.meter, "meet"):
                    met = self._meet("restore group", None, problem)
                if met.failed:
                    what = "could not read its part, so that every process reads all that it needs"
                    raise _ReadDirectly(f"{self.place}: a process {what}: {met.problems}")
                try:
                    with _aside(self.meter, "move"):
                        jax.block_until_ready(moving)  # so that two groups are in memory at most
                        moving = list(map(_moved, group, parts))
                except Exception as error:  # reported in the next round
                    problem = error
                if problem is None:
                    yield from zip((move.plan.path for move in group), moving, strict=True)
            if problem is not None:
                raise problem
            with _aside(self.meter, "move"):
                jax.block_until_ready(moving)
            yield from values
        finally:
            values.close()
            del problem  # its traceback refers to this frame

    def _choose(self, item: Item, plans: Sequence[LeafPlan]) -> list[Move]:
        asked, storage = self.request.read_once, item.found.storage
        # Local disks are as quick, and each process may see other files there.
        pays = storage.server_copies or isinstance(storage, LimitedStorage)
        stored = [plan.saved.array for plan in plans if plan.saved.has_array]
        total_bytes = sum(math.prod(one.shape) * dtype_of(one.dtype).itemsize for one in stored)
        pays = pays and total_bytes > _LEAST_TREE_BYTES
        if not asked or item.found.is_share or not (pays or asked is True):
            return []
        least_bytes = 0 if asked is True else _LEAST_BYTES
        moves = (_move_of(item, plan, self.processes, least_bytes) for plan in plans)
        return [move for move in moves if move is not None]

    def _meet(self, name: str, value: Json, problem: Exception | None) -> Any:  # a Meeting
        self._has_met = True
        how: Any = {"timeout_s": self.request.timeout_s, "place": self.place}
        return meet(self.processes, name, value, problem, _are_alike, **how)


@contextlib.contextmanager
def _aside(meter: Meter, name: str) -> Iterator[None]:
    """Adds the time inside to another phase than "read", which is under way."""
    start_s = time.monotonic()
    try:
        with meter.phase(name):
            yield
    finally:
        meter.phases["read"] -= time.monotonic() - start_s
        meter.current = "read"


def said(report: RestoreReport) -> str:
    """Returns the end of the line that is logged about a restore that read leaves once."""
    leaves = counted(len(report.read_once), "leaf")
    read, moved = size_text(report.job_bytes or 0), size_text(report.moved_bytes)
    return f"; read {leaves} once: {read} read by the job, {moved} moved"


def _are_alike(given: list[Any]) -> bool:
    return given[0] is not None and all(one == given[0] for one in given)


# --- one leaf --------------------------------------------------------------------------------


def _move_of(item: Item, plan: LeafPlan, processes: Processes, least_bytes: int) -> Move | None:
    """Returns how to read a leaf once; None if it cannot be, or if that reads no less."""
    saved, target = plan.saved, plan.sharding
    if plan.kind != "array" or plan.resized or not isinstance(target, NamedSharding):
        return None
    if saved.kind not in ARRAY_KINDS or not saved.has_array or saved.array.shape != saved.shape:
        return None
    dtype, here = plan.dtype or dtype_of(saved.array.dtype), target.mesh.local_devices
    size_bytes = math.prod(saved.shape) * dtype.itemsize
    if size_bytes <= least_bytes or dtype.name in _ODD or not here:
        return None
    if target.memory_kind not in (None, here[0].default_memory().kind):
        return None
    unit = (1,) * len(saved.shape) if item.tensors is not None else saved.array.unit_shape
    way = _way(target, saved.shape, dtype, unit, processes.process_of, processes.count)
    if way is None:
        return None
    given, bits, program = way
    boxes = boxes_here(given, saved.shape)
    part = plan._replace(sharding=given, layout=None, bits=bits, boxes=boxes)
    return Move(plan=plan, part=part, program=program, size_bytes=size_bytes)


@lru_cache(maxsize=1 << 12)
def _way(
    target: NamedSharding,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    unit: tuple[int, ...],
    process_of: Callable[[Any], int],
    count: int,
) -> tuple[NamedSharding, np.dtype[Any] | None, Any] | None:
    """Returns the spread sharding, the integers that a dtype moves as, and the compiled program."""
    hosts, mesh = _hosts(target.mesh, process_of, count)
    if hosts is None or 0 in shape:
        return None
    spec = (*target.spec, *(None,) * (len(shape) - len(target.spec)))
    names = [axes if isinstance(axes, tuple) else () if axes is None else (axes,) for axes in spec]
    axes = tuple(tuple(cut for one in some for cut in hosts.axes[str(one)]) for some in names)
    found = spread(hosts, axes, shape, unit)
    if found is None or found.once >= found.direct:
        return None
    given, wanted = (NamedSharding(mesh, PartitionSpec(*one)) for one in (found.axes, axes))
    is_float = jax.numpy.issubdtype(dtype, np.floating) and jax.numpy.finfo(dtype).bits >= 8
    bits = np.dtype(f"uint{8 * dtype.itemsize}") if is_float else None

    def move(parts: Any) -> Any:
        # As integers all the way: XLA may compute with floats, which changes NaNs.
        values = jax.lax.with_sharding_constraint(parts, wanted)
        return values if bits is None else jax.lax.bitcast_convert_type(values, dtype)

    parts = jax.ShapeDtypeStruct(shape, bits or dtype, sharding=given)
    return given, bits, jax.jit(move, out_shardings=target).lower(parts).compile()


@lru_cache(maxsize=1 << 6)
def _hosts(mesh: Any, process_of: Callable[[Any], int], count: int) -> tuple[Hosts | None, Any]:
    """Returns the hosts of a mesh and the mesh as they cut it, if each process has its share."""
    processes = np.vectorize(process_of, otypes=[np.int64])(mesh.devices)
    shares = np.bincount(processes.ravel(), minlength=count)
    if len({*shares.tolist()}) > 1:
        return None, mesh
    hosts = hosts_of(tuple(map(str, mesh.axis_names)), processes)
    return hosts, Mesh(mesh.devices.reshape(hosts.processes.shape), hosts.names)


def _moved(move: Move, parts: jax.Array) -> jax.Array:
    array = move.program(parts)
    parts.delete()  # as soon as the collective operations have read it
    return array if move.plan.layout is None else in_layout(array, move.plan.layout)


# --- all leaves ------------------------------------------------------------------------------


def _groups(moves: Sequence[Move], most_bytes: int, count: int) -> Iterator[list[Move]]:
    """Yields leaves of which each process reads about so many bytes, or a single one."""
    ends = accumulate(move.size_bytes // count for move in moves)
    pairs = zip(ends, moves, strict=True)
    for _, group in groupby(pairs, lambda pair: pair[0] // max(1, most_bytes)):
        yield [move for _, move in group]


def _fits(moves: Sequence[Move]) -> bool:
    """Returns whether the devices have room for the wanted arrays and the parts of all leaves."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    left = [one["bytes_limit"] - one["bytes_in_use"] for one in stats if "bytes_limit" in one]
    if not left:
        return True
    needs = [move.program.memory_analysis() for move in moves]
    arrays = sum(one.output_size_in_bytes + one.argument_size_in_bytes for one in needs)
    return arrays + max(one.temp_size_in_bytes for one in needs) <= min(left)


def _read_bytes(item: Item, plan: LeafPlan) -> int:
    """Returns the bytes of the stored units that a process reads for a leaf, uncompressed."""
    stored, boxes = plan.saved.array, plan.stored_boxes()
    unit = (1,) * len(stored.shape) if item.tensors is not None else stored.unit_shape
    count = len(plan_chunks(unit, boxes)) if item.ours else count_chunks(unit, boxes)
    return count * math.prod(unit) * dtype_of(stored.dtype).itemsize


def _described(item: Item, moves: Sequence[Move], request: RestoreRequest) -> str:
    """Returns a digest of everything that must be alike in all processes."""
    facts: list[object] = [item.found.origin, request.budget_bytes]
    for move in moves:
        plan, part = move.plan, move.part
        facts.append((plan.path, plan.saved.shape, str(plan.dtype), plan.sharding, part.sharding))
    meshes = dict.fromkeys(getattr(move.plan.sharding, "mesh", None) for move in moves)
    facts += [[d.id for d in mesh.devices.flat] for mesh in meshes if mesh is not None]
    return hashlib.sha256(repr(facts).encode()).hexdigest()
