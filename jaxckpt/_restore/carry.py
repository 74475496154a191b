"""Carries values from the process that reads them to the processes that want them, by XLA.

Spread    a large leaf, of which each process reads an equal part, moved by all-to-alls and
          all-gathers. Or, if its replicas outnumber its units, some replicas read whole units, and
          XLA adds them up
Pack      leaves that cannot be spread, in whole units: XLA adds up what the processes have read,
          with zeros for what they have not, so that each gets all of it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxckpt._core.box import Box
from jaxckpt._core.plan import partitions
from jaxckpt._core.spread import (
    Axes,
    Division,
    Hosts,
    Move,
    Piece,
    allot,
    grouped,
    hosts_of,
    moves,
    shares,
    spread,
)
from jaxckpt._core.transfer import boxes_here, empty, in_layout, placed_alike, to_device
from jaxckpt._disk.native import Item
from jaxckpt._restore.placement import How, LeafPlan, key_data_sharding
from jaxckpt.format.arrays import MAX_UNIT_BYTES, bytes_of, dtype_of
from jaxckpt.format.tree import ARRAY_KINDS, Leaf
from jaxckpt.multihost import Processes

Values = np.ndarray[Any, Any]
Convert = Callable[[LeafPlan, Sequence[Values]], object]

# A collective operation takes as long for fewer bytes, so smaller leaves share one.
_LEAST_SPREAD_BYTES: Final = 1 << 20
# Reading a leaf so many times is as good as once.
_AS_GOOD: Final = 1.05
# On CPUs, XLA writes past the end of gathered arrays of two bits; NCCL has no types of four.
_ODD: Final = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spread:
    """One large leaf, of which each process reads a part."""

    plans: tuple[LeafPlan]  # of the wanted array
    parts: Sequence[LeafPlan]  # of what this process reads
    given: NamedSharding | None  # of the parts; None if this process has no part in it
    via: NamedSharding  # the wanted one, on the mesh of the parts
    size_bytes: int  # of the whole leaf
    held_bytes: int  # by a process
    direct_bytes: float  # read by the job if each process reads its shards
    bits: np.dtype[Any] | None  # as which it moves
    # If it is added up: the replicas, along a first dimension, and where the parts are.
    copies: int = 1
    boxes: Sequence[Box] = ()

    def program(self) -> Any:  # jax's, compiled; None if this process has no part in it
        (plan,) = self.plans
        if self.given is None:
            return None
        how = plan.saved.shape, _dtype(plan), self.bits, self.copies
        return _resharding(self.given, self.via, plan.how.sharding, *how)

    def ready(self, values: Sequence[Any]) -> Any:
        if self.copies == 1 or self.given is None:
            (parts,) = values
            return parts
        shape, bits = (self.copies, *self.plans[0].saved.shape), np.dtype(self.bits)
        shards = []
        for shard in boxes_here(self.given, shape):
            flat = empty(shard.size * bits.itemsize)
            flat.fill(0)
            shards.append(flat.view(bits).reshape(shard.shape))
            for box, value in zip(self.boxes, values, strict=True):
                if (both := box.intersect(shard)) is not None:
                    shards[-1][both.within(shard)] = value[both.within(box)[1:]]
        return to_device(shards, placed_alike(self.given, shape, bits))

    def move(self, parts: Any) -> Any:
        if (program := self.program()) is None:
            return parts
        array = program(parts)
        parts.delete()  # as soon as the collective operations have read it
        return array

    def take(self, array: Any, convert: Convert) -> list[Any]:
        (plan,) = self.plans
        is_there = self.given is None or plan.how.layout is None
        return [array if is_there else in_layout(array, plan.how.layout)]

    def moved_bytes(self) -> int:
        """Returns the bytes that this process gets from others."""
        (plan,) = self.plans
        read = [box for part in self.parts for box in part.how.boxes]
        there = [box.intersect(one) for box in plan.how.boxes for one in read]
        count = sum(box.size for box in plan.how.boxes) - sum(box.size for box in there if box)
        return count * self.size_bytes // math.prod(plan.saved.shape)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pack:
    """Leaves of which each process reads some whole units, for all."""

    plans: Sequence[LeafPlan]  # of the wanted values
    direct_bytes: float
    pieces: Sequence[Piece]
    mesh: Mesh  # of one device of each process
    index: int  # of this process in it

    @property
    def parts(self) -> list[LeafPlan]:
        return [
            self.plans[piece.array]._replace(how=How(None, "numpy", None, boxes=(piece.box,)))
            for piece in self._mine()
        ]

    @property
    def size_bytes(self) -> int:
        return self.pieces[-1].stop

    held_bytes = size_bytes  # by a process

    def program(self) -> Any:  # jax's, compiled
        return _adding(self.mesh, words_for(self.size_bytes))

    def ready(self, values: Sequence[Any]) -> Any:
        """Returns the operand of the collective operation, which allocates no more of its own."""
        flat = empty(words_for(self.size_bytes) * 4)
        flat.fill(0)
        for piece, value in zip(self._mine(), values, strict=True):
            flat[piece.start : piece.stop] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return _rows(self.mesh, self.index, flat)

    def move(self, rows: Any) -> Any:
        """Begins the collective operation; every process must call it."""
        return self.program()(rows)

    def take(self, added: Any, convert: Convert) -> list[Any]:
        """Returns the wanted values; raises if one of them does not fit here."""
        data = np.asarray(added.addressable_data(0)).view(np.uint8)
        pieces: list[list[Piece]] = [[] for _ in self.plans]
        for piece in self.pieces:
            pieces[piece.array].append(piece)
        pairs = zip(self.plans, pieces, strict=True)
        return [convert(plan, _merged(plan, some, data)) for plan, some in pairs]

    def moved_bytes(self) -> int:
        return self.size_bytes - sum(piece.stop - piece.start for piece in self._mine())

    def _mine(self) -> Iterator[Piece]:
        return (piece for piece in self.pieces if piece.process == self.index)


def _merged(plan: LeafPlan, pieces: Sequence[Piece], data: Values) -> list[Values]:
    """Returns the parts of a leaf that this process wants, in memory of their own."""
    dtype, wanted = dtype_of(plan.saved.array.dtype), []
    for box in plan.stored_boxes():
        wanted.append(empty(box.size * dtype.itemsize).view(dtype).reshape(box.shape))
        for piece in pieces:
            if (both := box.intersect(piece.box)) is not None:
                part = data[piece.start : piece.stop].view(dtype).reshape(piece.box.shape)
                wanted[-1][both.within(box)] = part[both.within(piece.box)]
    return wanted


def words_for(size_bytes: int) -> int:
    """Returns the room for some bytes in words of 32 bits, of few sizes, for few compilations."""
    step = 1 << max(8, size_bytes.bit_length() - 4)
    return -(-size_bytes // step) * step // 4


def adding(mesh: Mesh, index: int, mine: Values) -> Callable[[], Values]:
    """Prepares to add up bytes, of which one process has each, others a zero; all call the result.

    Args:
        mesh: Of one device of each process.
        index: Of this process in it.
        mine: `uint8[n]`, where n is 4 * `words_for` of something.
    """
    program, rows = _adding(mesh, len(mine) // 4), _rows(mesh, index, mine)
    return lambda: np.asarray(program(rows).addressable_data(0)).view(np.uint8)


def _rows(mesh: Mesh, index: int, mine: Values) -> Any:
    """Returns the bytes of all processes, a row each."""
    rows = mine.view(np.uint32).reshape(1, -1)
    given, words = NamedSharding(mesh, PartitionSpec("process")), rows.shape[1]
    return to_device([rows], placed_alike(given, (mesh.size, words), rows.dtype))


def carriers_of(
    item: Item,
    plans: Sequence[LeafPlan],
    processes: Processes,
    most_bytes: int,
    boxes_of: Callable[..., tuple[Box, ...]] = boxes_here,
    devices: Sequence[Any] = (),
) -> list[Spread | Pack]:
    """Returns what carries the leaves that a job would read more than once, alike in all processes.

    Args:
        most_bytes: For one pack, unless it has a single leaf.
        boxes_of: Returns the distinct shards of this process, given a sharding and a shape.
        devices: Of the job; if empty, all that jax has.
    """
    carriers: list[Spread | Pack] = []
    packed: list[tuple[LeafPlan, float]] = []
    for plan in plans:
        if not plan.saved.has_array or 0 in plan.saved.array.shape:
            continue
        size, unit = size_of(plan.saved), unit_of(item, plan.saved)
        way = _way_of(plan, unit, processes)
        if way is None or way.found.direct <= _AS_GOOD:
            continue
        is_good = way.found.once <= _AS_GOOD or way.adds(plan)
        is_small = size <= _LEAST_SPREAD_BYTES or not is_good
        may_pack = size <= max(MAX_UNIT_BYTES, 2 * most_bytes)  # every process gets all of it
        if (is_small and may_pack) or not _can_spread(plan):
            packed += [(plan, way.found.direct * size)] * may_pack
        elif is_good or way.found.once < way.found.direct:
            how = {"number": len(carriers), "count": processes.count}
            carriers.append(_spread(plan, way, unit, boxes_of, **how))
    if packed and (mesh := one_each(processes, devices or jax.devices())):
        sizes = [size_of(plan.saved) for plan, _ in packed]
        for i, some in enumerate(grouped(packed, sizes, most_bytes)):
            plans, direct = zip(*some, strict=True)
            arrays = [(plan.saved.array, unit_of(item, plan.saved)) for plan in plans]
            kinds = [(one.shape, unit, dtype_of(one.dtype).itemsize) for one, unit in arrays]
            pieces = allot(kinds, processes.count, first=i)
            one: dict[str, Any] = {"mesh": mesh, "index": processes.index}
            carriers.append(Pack(plans=plans, pieces=pieces, direct_bytes=sum(direct), **one))
    return carriers


def one_each(processes: Processes, devices: Sequence[Any]) -> Mesh | None:
    """Returns a mesh of one device of each process, or None if a process lacks one."""
    first: dict[int, Any] = {}
    for device in devices:
        first.setdefault(processes.process_of(device), device)
    if len(first) < processes.count:
        return None
    return Mesh(np.asarray([first[i] for i in range(processes.count)]), ("process",))


def unit_of(item: Item, saved: Leaf) -> tuple[int, ...]:
    """Returns the shape of the smallest part of a leaf that is read on its own."""
    stored = saved.array
    return (1,) * len(stored.shape) if item.tensors is not None else stored.unit_shape


def size_of(saved: Leaf) -> int:
    """Returns the bytes of a leaf as it is stored, uncompressed."""
    return bytes_of(saved.array.shape, saved.array.dtype)


class _Way(NamedTuple):
    """Counts how often an array is read, and has its spread and its wanted sharding on one mesh."""

    found: Division
    given: Any = None  # NamedSharding
    via: Any = None
    rows: Any = None  # of an array with a row for each replica
    copies: int = 1  # replicas

    def adds(self, plan: LeafPlan) -> bool:
        """Returns whether replicas that read whole units are added up, as no way spreads these."""
        needed, once = self.found.needed, self.found.once
        return self.copies > 1 and needed <= _AS_GOOD < once and _bits(plan) is not None


def _way_of(plan: LeafPlan, unit: tuple[int, ...], processes: Processes) -> _Way | None:
    """Returns None if it is not known how often a leaf is read."""
    wanted = plan.how.sharding
    if wanted is None:  # a host array, or on the default device
        return _Way(Division(processes.count, math.inf))
    if plan.how.kind == "key":
        rank = len(plan.saved.shape if plan.how.wanted is None else plan.how.wanted.shape)
        wanted = key_data_sharding(wanted, rank)
    if plan.how.resized or not isinstance(wanted, NamedSharding):
        return None
    return _way(wanted, plan.saved.array.shape, unit, processes.process_of)


@lru_cache(maxsize=1 << 12)
def _way(
    target: NamedSharding, shape: tuple[int, ...], unit: tuple[int, ...], process_of: Any
) -> _Way | None:
    hosts, mesh = _hosts(target.mesh, process_of)
    is_reduced = getattr(target.spec, "reduced", None)
    if hosts is None or is_reduced or PartitionSpec.UNCONSTRAINED in partitions(target):
        return None
    names = _axes_of(target, len(shape))
    wanted = tuple(tuple(cut for one in some for cut in hosts.axes[str(one)]) for some in names)
    unused = tuple(name for name in hosts.names if not any(name in some for some in wanted))
    found = spread(hosts, wanted, shape, unit)
    specs = found.axes, wanted, (unused, *wanted)
    given, via, rows = (NamedSharding(mesh, PartitionSpec(*one)) for one in specs)
    return _Way(found, given, via, rows, hosts.parts(unused))


def _axes_of(sharding: NamedSharding, rank: int) -> Axes:
    spec = (*partitions(sharding), *(None,) * (rank - len(sharding.spec)))
    return tuple(a if isinstance(a, tuple) else () if a is None else (a,) for a in spec)


@lru_cache(maxsize=1 << 6)
def _hosts(mesh: Any, process_of: Callable[[Any], int]) -> tuple[Hosts | None, Any]:
    """Returns the hosts of a mesh and the mesh as they cut it, if they have equally many devices.

    A host is numbered by its place among those that have a part of the mesh.
    """
    processes = np.vectorize(process_of, otypes=[np.int64])(mesh.devices)
    _, ranks, shares = np.unique(processes, return_inverse=True, return_counts=True)
    if len({*shares.tolist()}) > 1:
        return None, mesh
    hosts = hosts_of(tuple(map(str, mesh.axis_names)), ranks.reshape(processes.shape))
    return hosts, Mesh(mesh.devices.reshape(hosts.processes.shape), hosts.names)


def _can_spread(plan: LeafPlan) -> bool:
    saved, target, dtype = plan.saved, plan.how.sharding, _dtype(plan)
    if plan.how.kind != "array" or target is None or saved.kind not in ARRAY_KINDS:
        return False
    default = jax.local_devices()[0].default_memory().kind
    return dtype.name not in _ODD and target.memory_kind in (None, default)


def _spread(
    plan: LeafPlan,
    way: _Way,
    unit: tuple[int, ...],
    boxes_of: Callable[..., tuple[Box, ...]],
    *,
    number: int,
    count: int,
) -> Spread:
    """Returns what carries the leaf of a number, in a job of so many processes."""
    shape, size, bits, adds = plan.saved.shape, size_of(plan.saved), _bits(plan), way.adds(plan)
    given, copies, boxes = (way.rows, way.copies, []) if adds else (way.given, 1, [])
    if not plan.how.boxes:  # the others carry it among themselves
        parts, given = [plan], None
    elif adds:
        shards = boxes_of(given, (copies, *shape))
        boxes = [box for one in shards for box in shares(one, unit, copies, number=number)]
        how = plan.how._replace(kind="numpy", sharding=None, layout=None, bits=bits)
        inner = [Box(box.start[1:], box.stop[1:]) for box in boxes]
        parts = [plan._replace(how=how._replace(boxes=(box,))) for box in inner]
    else:
        own = boxes_of(given, shape)
        how = plan.how._replace(sharding=given, layout=None, bits=bits, boxes=own)
        parts = [plan._replace(how=how)]
    moved: dict[str, Any] = {"bits": bits, "copies": copies, "boxes": boxes, "size_bytes": size}
    moved |= {"held_bytes": size * copies // count, "direct_bytes": way.found.direct * size}
    return Spread(plans=(plan,), parts=parts, given=given, via=way.via, **moved)


def _bits(plan: LeafPlan) -> np.dtype[Any] | None:
    """Returns the integers as which a leaf moves, if some have the size of its values.

    XLA may compute with floats, which changes NaNs.
    """
    dtype = _dtype(plan)
    is_float = jax.numpy.issubdtype(dtype, np.floating) and jax.numpy.finfo(dtype).bits >= 8
    return np.dtype(f"uint{8 * dtype.itemsize}") if is_float or dtype.kind in "iu" else None


def _dtype(plan: LeafPlan) -> np.dtype[Any]:
    return plan.how.dtype or dtype_of(plan.saved.array.dtype)


# --- programs --------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 12)
def _resharding(
    given: NamedSharding,
    via: Any,  # NamedSharding
    target: NamedSharding,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    bits: np.dtype[Any] | None,
    copies: int,
) -> Any:
    rows = () if copies == 1 else (copies,)
    axes = _axes_of(given, len(rows) + len(shape))
    steps = moves(axes[len(rows) :], _axes_of(via, len(shape)))

    # Written out: of a resharding, XLA may gather all, and ends the program over some meshes.
    def move(part: Any) -> Any:
        part = jax.lax.psum(part.sum(0, dtype=bits), axes[0]) if rows else part
        for step in steps:
            part = _moved(part, step, via.mesh)
        return part if bits is None else jax.lax.bitcast_convert_type(part, dtype)

    parts = jax.ShapeDtypeStruct((*rows, *shape), bits or dtype, sharding=given)
    with jax.set_mesh(via.mesh):  # the caller's may have explicit axes, which must fit
        specs = {"in_specs": given.spec, "out_specs": via.spec}
        program = jax.shard_map(move, mesh=via.mesh, **specs, check_vma=False)
        return jax.jit(program, out_shardings=target).lower(parts).compile()


def _moved(part: Any, step: Move, mesh: Mesh) -> Any:
    names, source, to = step
    if to is None:
        assert source is not None
        return jax.lax.all_gather(part, names, axis=source, tiled=True)
    if source is not None:
        return jax.lax.all_to_all(part, names, to, source, tiled=True)
    size = part.shape[to] // math.prod(mesh.shape[name] for name in names)
    return jax.lax.dynamic_slice_in_dim(part, jax.lax.axis_index(names) * size, size, to)


@lru_cache(maxsize=1 << 6)
def _adding(mesh: Mesh, words: int) -> Any:
    add = partial(jax.numpy.sum, axis=0, dtype=np.uint32)
    given, target = (NamedSharding(mesh, PartitionSpec(*axis)) for axis in (("process",), ()))
    rows = jax.ShapeDtypeStruct((mesh.size, words), np.uint32, sharding=given)
    with jax.set_mesh(mesh):  # as above
        return jax.jit(add, out_shardings=target).lower(rows).compile()
