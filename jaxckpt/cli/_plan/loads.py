"""The bytes and requests of each host: the planner and the writer of a real save, without values.

The writer writes to a storage that only counts, and its values are zeros that take no memory. A
restore reads the places that the writer returned, planned as a restore plans them.

Counted are the values: data files written, and ranges of them read. Arrays of at most 4 kB lie in
the metadata, which process 0 writes and every process reads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from jaxckpt._core.box import whole
from jaxckpt._core.plan import SavePlan, plan_save
from jaxckpt._disk.chunks import LeafRead, adjacent, layout_of, units_read
from jaxckpt._disk.data_files import DataFiles
from jaxckpt._disk.places import Table
from jaxckpt._disk.reader import BATCH_BYTES, grouped_reads
from jaxckpt._disk.writer import plan_writes, write_arrays
from jaxckpt._restore.carry import carriers_of
from jaxckpt._restore.match import RestoreRequest
from jaxckpt._restore.placement import How, LeafPlan
from jaxckpt.cli._plan.cluster import Cluster, Host
from jaxckpt.cli._plan.tree import PlannedLeaf, PlannedTree
from jaxckpt.format import names
from jaxckpt.format.arrays import CRC_BYTES, dtype_of, index_bytes
from jaxckpt.format.ocdbt import Place

BUDGET_BYTES: Final = RestoreRequest().budget_bytes
_DATABASE: Any = SimpleNamespace(tensors=None)  # stands for the item that carriers read from


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Values that a host writes or reads."""

    bytes: int = 0
    requests: int = 0  # files written, or ranges read

    def __add__(self, other: Load) -> Load:
        return Load(bytes=self.bytes + other.bytes, requests=self.requests + other.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoads:
    """Counts what one host writes and reads, in each way to save and to restore."""

    save: Load  # its share, to the store
    save_disk: Load  # all that it holds, to a disk of its own
    restore: Load  # the chunks that its devices need, from the store
    restore_once: Load  # its part, from the store
    moved_bytes: int  # that it then gets from other hosts
    restore_disk: Load  # the chunks that its devices need, from its own disk
    values_bytes: int  # of its share: the host memory of a save to the store
    held_bytes: int  # of all that it holds: the host memory of a save to a disk
    device_bytes: int  # on each device


def loads_of(tree: PlannedTree, cluster: Cluster) -> list[HostLoads]:
    """Returns what each host of a cluster writes and reads."""
    specs = [one.spec for one in tree.leaves]
    plans = [plan_save(specs, process=i, holds=True) for i in range(cluster.hosts)]
    mine = [_written(tree, plan, i) for i, plan in enumerate(plans)]
    held = [_written(tree, p.held, i, held=True) for i, p in enumerate(plans)]
    places = {key: place for written in mine for key, place in written.places.items()}
    device_bytes = sum(
        math.prod(spec.placement.shard_shape) * spec.itemsize
        for spec in specs
        if spec.placement is not None
    )
    found = []
    for i, (plan, own, others) in enumerate(zip(plans, mine, held, strict=True)):
        host = Host(i, cluster.hosts)
        direct = [_leaf_plan(one, host) for one in tree.leaves]
        carriers: list[Any] = []
        if cluster.hosts > 1:
            how: dict[str, Any] = {"boxes_of": host.boxes_of, "devices": cluster.devices}
            processes: Any = host
            carriers = carriers_of(_DATABASE, direct, processes, BUDGET_BYTES // 8, **how)
        carried = {plan.path for one in carriers for plan in one.plans}
        parts = [part for one in carriers for part in one.parts]
        once = [*parts, *(plan for plan in direct if plan.path not in carried)]
        found.append(
            HostLoads(
                save=_load_of(own),
                save_disk=_load_of(own) + _load_of(others),
                restore=_read(direct, places),
                restore_once=_read(once, places),
                moved_bytes=sum(one.moved_bytes() for one in carriers),
                restore_disk=_read(direct, {**own.places, **others.places}),
                values_bytes=plan.total_bytes,
                held_bytes=plan.total_bytes + plan.held_bytes,
                device_bytes=device_bytes,
            )
        )
    return found


# --- saves -----------------------------------------------------------------------------------


class _Counting:
    """A storage that keeps nothing, and asks for no values."""

    parallel_writes = False

    def make_dir(self, path: str) -> None:
        del path

    def write(self, path: str, data: bytes | Iterable[bytes]) -> None:
        del path, data


def _written(tree: PlannedTree, plan: SavePlan, process: int, *, held: bool = False) -> Table:
    """Returns what a process writes of a plan: files with their sizes, and places."""
    shards = {(write.array, write.shard): 0 for write in plan.writes}
    sources = {shard: i for i, shard in enumerate(shards)}
    zeros = [
        np.broadcast_to(np.zeros((), dtype_of(plan.stored[array].dtype)), shard.shape)
        for array, shard in sources
    ]
    prefixes = [one.leaf.prefix for one in tree.leaves]
    numbers = (f"{process}.{int(held)}.{n}" for n in itertools.count())
    storage: Any = _Counting()
    return write_arrays(
        DataFiles(storage, "", name=lambda: names.data_file_of(next(numbers), "")),
        plan_writes(prefixes, plan, sources),
        zeros,
        describe=(process == 0) != held,  # on its own disk, each process has the metadata too
        is_whole=False,
    )


def _load_of(written: Table) -> Load:
    return Load(bytes=sum(written.sizes.values()), requests=len(written.sizes))


# --- restores --------------------------------------------------------------------------------


def _leaf_plan(one: PlannedLeaf, host: Host) -> LeafPlan:
    leaf, shape = one.leaf, one.leaf.array.shape
    boxes = (whole(shape),) if one.sharding is None else host.boxes_of(one.sharding, shape)
    dtype = None if leaf.kind == "key" else dtype_of(leaf.dtype or leaf.array.dtype)
    return LeafPlan(leaf.path, leaf, How(None, leaf.kind, dtype, one.sharding, boxes))


def _read(plans: Sequence[LeafPlan], places: Mapping[str, bytes | Place]) -> Load:
    """Returns the ranges that a process reads for some leaves, as `_disk.chunks` reads them."""
    reads = [
        LeafRead(x.saved, layout_of(x.saved.array, x.how.boxes, dtype_of(x.saved.array.dtype)))
        for x in plans
    ]
    total, requests = 0, 0
    for group in grouped_reads(reads, BATCH_BYTES, may_group=True):
        ranges: dict[str, list[tuple[int, int]]] = {}  # by file: offset, and size of a chunk
        for read in group:
            indices = set[str]()  # the chunks whose index is read
            layout, stored = read.layout, read.leaf.array
            for part in units_read(layout, stored) if layout.parts is None else layout.parts:
                key = read.leaf.prefix + part.suffix
                place = places[key]
                if isinstance(place, bytes):
                    continue
                offset = place.offset
                if part.inner is not None:
                    indices.add(key)
                    offset += part.inner * (part.size + CRC_BYTES)
                ranges.setdefault(place.file, []).append((offset, part.size))
            if indices:
                requests += len(indices)
                total += len(indices) * index_bytes(stored)
        for some in map(np.array, ranges.values()):
            requests += sum(1 for _ in adjacent(*some.T))
            total += int((some[:, 1] + CRC_BYTES).sum())
    return Load(bytes=total, requests=requests)
