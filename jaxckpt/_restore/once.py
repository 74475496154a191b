"""Reads each stored value once for a whole job, and lets XLA carry it to where it is wanted.

1. choose    for each leaf: directly, or once in a spread sharding        _core.spread
2. agree     all have the same plan and room for it                       round "restore plan"
3. read      a group of leaves: each process its part, checked as always  _disk.reader
4. meet      all have read their parts                                    round "restore group"
5. move      XLA's collective operations, in the same order everywhere

A process that fails before 5 reports it in the next round, so no process enters a collective
operation that another will never reach. If any fails at 3 or 5, every process reads directly what
its shards need: then the same error, and what follows from it, is as without this module.
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
from itertools import islice
from typing import Any, Final, TypeVar, final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxckpt._core.plan import count_chunks, plan_chunks
from jaxckpt._core.spread import Axes, Hosts, Spread, hosts_of, spread
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

# Smaller leaves are read directly: a collective operation takes about as long as reading them.
_LEAST_BYTES: Final = 1 << 20
_PLAN, _GROUP = "restore plan", "restore group"

T = TypeVar("T")


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
    read_bytes: int = 0  # by this process, of stored values, as stored units
    moved_bytes: int = 0  # to this process
    moves: Sequence[Move] = ()
    _has_met: bool = field(default=False, init=False)  # in the round of the plan

    def attempt(
        self, within: Callable[[Callable[[Found], T]], T], reading: Callable[..., T]
    ) -> T | None:
        """Reads once, or if that fails directly; returns None if another process has failed.

        Every process takes part in the round of the plan, whatever happens to it before.

        Args:
            within: Finds the checkpoint; may call its argument several times.
            reading: Reads what was found, given `together`.
        """
        read = partial(reading, together=self)
        try:
            result = within(read)
            if not self._has_met:
                self._agree(None)
        except _Stopped:
            return None
        except _ReadDirectly as failure:
            _logger.warning("%s", failure)
            self.moves = ()
        except Exception as error:
            if not self._has_met:
                self._meet(_PLAN, None, error)
            raise
        else:
            return result
        return within(read)

    def values(
        self,
        item: Item,
        plans: Sequence[LeafPlan],
        read: Callable[..., Generator[tuple[Path, Any], None, None]],
    ) -> Iterator[tuple[Path, Any]]:
        """Yields all leaves, within the phase "read".

        Takes part in the round of the plan, but in the first attempt only: another one follows if
        the checkpoint was replaced in the meantime, or if reading once failed.

        Args:
            read: Reads leaves as planned, within `budget_bytes`.
        """
        is_first, self.moves = not self._has_met, ()
        if is_first:
            with _aside(self.meter, "move"):  # compiles
                moves = self._choose(item, plans)
                text = _described(item, moves, self.request) if moves and _fits(moves) else None
            with _aside(self.meter, "meet"):
                self.moves = moves if self._agree(text) else ()
        once = {id(move.plan) for move in self.moves}
        parts = [move.part for move in self.moves]
        parts += [plan for plan in plans if id(plan) not in once]
        self.read_bytes = sum(_read_bytes(item, part) for part in parts if part.saved.has_array)
        self.moved_bytes = sum(move.moved_bytes() for move in self.moves)
        # The rest of the budget is for two groups of parts.
        budget_bytes = self.request.budget_bytes // (2 if self.moves else 1)
        return self._moved(read(parts, budget_bytes=budget_bytes))

    def completed(self, report: RestoreReport, read_bytes: int, moved_bytes: int) -> RestoreReport:
        """Returns a report with what was read once, and the sums of all processes."""
        once = tuple(path_text(move.plan.path) for move in self.moves)
        return replace(report, read_once=once, job_bytes=read_bytes, moved_bytes=moved_bytes)

    def _moved(self, values: Generator[tuple[Path, Any], None, None]) -> Iterator[tuple[Path, Any]]:
        """Yields leaves as wanted, given the parts of those that are read once, and the others."""
        meter = self.meter
        problem, moving = None, []
        try:
            for group in _groups(self.moves, self.request.budget_bytes // 4):
                parts: list[Any] = []
                try:
                    if problem is None:
                        parts = [value for _, value in islice(values, len(group))]
                except Exception as error:  # reported to the other processes
                    problem = error
                with _aside(meter, "meet"):
                    self._have_read(problem)
                try:
                    with _aside(meter, "move"):
                        jax.block_until_ready(moving)  # so that two groups are in memory at most
                        moving = list(map(_moved, group, parts))
                except Exception as error:  # reported in the next round
                    problem = error
                if problem is None:
                    yield from zip((move.plan.path for move in group), moving, strict=True)
            if problem is not None:
                raise problem
            with _aside(meter, "move"):
                jax.block_until_ready(moving)
            yield from values
        finally:
            values.close()
            del problem  # its traceback refers to this frame

    def _choose(self, item: Item, plans: Sequence[LeafPlan]) -> list[Move]:
        asked, found = self.request.read_once, item.found
        storage: Any = found.storage  # each process may see other files under a local path
        is_shared = storage.scheme not in ("file", "memory") or isinstance(storage, LimitedStorage)
        if not asked or found.is_share or not (is_shared or asked is True):
            return []
        least_bytes = 0 if asked is True else _LEAST_BYTES
        moves = (_move_of(item, plan, self.processes, least_bytes) for plan in plans)
        return [move for move in moves if move is not None]

    def _agree(self, text: str | None) -> bool:
        """Returns whether every process has this plan and room for it."""
        met = self._meet(_PLAN, text, None)
        if met.failed:
            raise _Stopped
        return met.verdict

    def _have_read(self, problem: Exception | None) -> None:
        met = self._meet(_GROUP, None, problem)
        if met.failed:
            who, text = next(iter(met.problems.items()))
            count = counted(met.failed, "process")
            raise _ReadDirectly(
                f"{self.place}: reading each value once failed in {count}, so every process reads "
                f"what it needs. Process {who}: {text}"
            )

    def _meet(self, name: str, value: Json, problem: Exception | None) -> Any:  # a Meeting
        self._has_met = True
        timeout_s, place = self.request.timeout_s, self.place
        how: Any = {"timeout_s": timeout_s, "place": place}
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
    dtype = plan.dtype or dtype_of(saved.array.dtype)
    size_bytes = math.prod(saved.shape) * dtype.itemsize
    # XLA on CPUs writes past the end of gathered arrays of 2-bit integers.
    is_odd = jax.numpy.issubdtype(dtype, np.integer) and jax.numpy.iinfo(dtype).bits < 4
    if size_bytes <= least_bytes or is_odd or not _is_default(target):
        return None
    unit = (1,) * len(saved.shape) if item.tensors is not None else saved.array.unit_shape
    way = _way(target, saved.shape, unit, processes.process_of, processes.count)
    if way is None or way.once >= way.direct:
        return None
    bits, args = _bits(dtype), (target, way.axes, processes.process_of)
    part = plan._replace(
        sharding=_cut(*args), layout=None, bits=bits, boxes=boxes_here(_cut(*args), saved.shape)
    )
    program = _program(saved.shape, dtype, bits, *args)
    return Move(plan=plan, part=part, program=program, size_bytes=size_bytes)


def _moved(move: Move, parts: jax.Array) -> jax.Array:
    array = move.program(parts)
    parts.delete()  # as soon as the collective operations have read it
    return array if move.plan.layout is None else in_layout(array, move.plan.layout)


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Returns the integers that floats move as, since XLA may compute with these: NaNs change."""
    is_float = jax.numpy.issubdtype(dtype, np.floating)
    if not is_float or jax.numpy.finfo(dtype).bits != 8 * dtype.itemsize:
        return None
    return np.dtype(f"uint{8 * dtype.itemsize}")


def _is_default(target: NamedSharding) -> bool:
    """Returns whether a sharding is of the memory that programs use by default."""
    kind, devices = target.memory_kind, target.mesh.local_devices
    return kind is None or (bool(devices) and kind == devices[0].default_memory().kind)


@lru_cache(maxsize=1 << 14)
def _way(
    target: NamedSharding,
    shape: tuple[int, ...],
    unit: tuple[int, ...],
    process_of: Callable[[Any], int],
    count: int,
) -> Spread | None:
    hosts = _hosts(target.mesh, process_of)
    if hosts is None or 0 in shape or len(np.unique(hosts.processes)) != count:
        return None
    return spread(hosts, _axes(target, hosts, len(shape)), shape, unit)


@lru_cache(maxsize=1 << 6)
def _hosts(mesh: Mesh, process_of: Callable[[Any], int]) -> Hosts | None:
    processes = np.vectorize(process_of, otypes=[np.int64])(mesh.devices)
    _, counts = np.unique(processes, return_counts=True)
    return hosts_of(tuple(map(str, mesh.axis_names)), processes) if len({*counts}) == 1 else None


def _axes(sharding: NamedSharding, hosts: Hosts, rank: int) -> Axes:
    spec = (*sharding.spec, *(None,) * (rank - len(sharding.spec)))
    names = [axes if isinstance(axes, tuple) else () if axes is None else (axes,) for axes in spec]
    return tuple(tuple(cut for name in some for cut in hosts.axes[str(name)]) for some in names)


def _cut(target: NamedSharding, axes: Axes, process_of: Callable[[Any], int]) -> NamedSharding:
    """Returns the sharding of some cut axes on the devices of another sharding, in their order."""
    hosts = _hosts(target.mesh, process_of)
    assert hosts is not None
    assert isinstance(target.mesh, Mesh)
    mesh = Mesh(target.mesh.devices.reshape(hosts.processes.shape), hosts.names)
    return NamedSharding(mesh, PartitionSpec(*axes))


@lru_cache(maxsize=1 << 10)
def _program(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    bits: np.dtype[Any] | None,
    target: NamedSharding,
    axes: Axes,
    process_of: Callable[[Any], int],
) -> Any:  # jax's compiled program
    hosts = _hosts(target.mesh, process_of)
    assert hosts is not None
    wanted = _cut(target, _axes(target, hosts, len(shape)), process_of)

    def move(parts: Any) -> Any:
        # As integers all the way: only what has arrived becomes floats.
        values = jax.lax.with_sharding_constraint(parts, wanted)
        return values if bits is None else jax.lax.bitcast_convert_type(values, dtype)

    given = jax.ShapeDtypeStruct(shape, bits or dtype, sharding=_cut(target, axes, process_of))
    return jax.jit(move, out_shardings=target).lower(given).compile()


# --- all leaves ------------------------------------------------------------------------------


def _groups(moves: Sequence[Move], most_bytes: int) -> Iterator[list[Move]]:
    """Yields leaves of which each process reads at most so many bytes, and at least one leaf."""
    group: list[Move] = []
    size = 0
    for move in moves:
        # Alike in every process: the parts are of one size.
        here = sum(box.size for box in move.part.boxes) * move.size_bytes
        here //= math.prod(move.plan.saved.shape)
        if group and size + here > most_bytes:
            yield group
            group, size = [], 0
        group.append(move)
        size += here
    if group:
        yield group


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
    itemsize = dtype_of(stored.dtype).itemsize
    if item.tensors is not None:
        return sum(box.size for box in boxes) * itemsize
    unit = stored.unit_shape
    count = len(plan_chunks(unit, boxes)) if item.ours else count_chunks(unit, boxes)
    return count * math.prod(unit) * itemsize


def _described(item: Item, moves: Sequence[Move], request: RestoreRequest) -> str:
    """Returns a digest of everything that must be alike in all processes."""
    meshes: dict[Mesh, int] = {}
    facts: list[object] = [item.found.origin, request.budget_bytes]
    for move in moves:
        target, part = move.plan.sharding, move.part.sharding
        assert isinstance(target, NamedSharding)
        assert isinstance(target.mesh, Mesh)
        assert isinstance(part, NamedSharding)
        mesh = meshes.setdefault(target.mesh, len(meshes))
        what = (path_text(move.plan.path), move.plan.saved.shape, str(move.plan.dtype))
        facts.append((*what, mesh, str(target.spec), str(part.spec)))
    facts += [(m.axis_names, m.devices.shape, [d.id for d in m.devices.flat]) for m in meshes]
    return hashlib.sha256(repr(facts).encode()).hexdigest()
