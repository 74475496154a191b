"""What a save holds of the caller's values, and what becomes of each on disk.

A checkpoint is made of items. Each is one of two things here: a tree, whose arrays go into a
database, or a few small files. Either has been brought to the host when it is made: from then on
the caller may donate, delete or change what it was made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from jaxckpt._plan import ArraySpec, SavePlan, placement_of, plan_save
from jaxckpt._transfer import HostSnapshot, stage
from jaxckpt._tree import Flat, flatten
from jaxckpt._writer import database_of, merge, write_arrays
from jaxckpt.errors import SaveFailed, UnsupportedLeaf
from jaxckpt.format import arrays, jsontext, names, sharding, step, tree
from jaxckpt.format.sharding import SavedSharding
from jaxckpt.format.tree import Leaf, Tree
from jaxckpt.multihost import Json, Processes
from jaxckpt.storage import Storage


@dataclass(slots=True, kw_only=True)
class FileItem:
    """An item of a few small files.

    Attributes:
        mine: What every process writes for itself, by file name.
        shared: Makes what process 0 writes, by file name. Runs in the background.
    """

    name: str
    mine: Mapping[str, bytes] = field(default_factory=dict)
    shared: Callable[[], Mapping[str, bytes]] = dict
    handler: str = step.JSON_HANDLER

    @property
    def size_bytes(self) -> int:
        """What it holds in memory, about."""
        return sum(map(len, self.mine.values()))

    def write(self, storage: Storage, work: str, processes: Processes) -> None:
        """Writes this process's files below the directory of the checkpoint."""
        del processes
        if self.mine:
            storage.make_dir(f"{work}/{self.name}")
        for file, data in self.mine.items():
            storage.write(f"{work}/{self.name}/{file}", data)

    def said(self) -> Json:
        """What the processes compare."""
        return {"item": "files"}

    def disagreement(self, said: Sequence[Any]) -> dict[int, str]:
        """Why the processes' files do not belong together, by process."""
        return {}

    def finish(
        self, storage: Storage, work: str, processes: Processes, said: Sequence[Any]
    ) -> dict[str, bytes]:
        """Process 0, when all have written: the files to add, by name in the item."""
        del said, processes
        storage.make_dir(f"{work}/{self.name}")
        return dict(self.shared())

    def read_back(self, storage: Storage, work: str, processes: Processes) -> dict[str, bytes]:
        """Process 0: small files that others wrote, whose digests belong in the record."""
        if not self.mine:
            return {}
        files = [names.process_file(i, processes.count) for i in range(processes.count)]
        return {
            file: storage.read(f"{work}/{self.name}/{file}", max_bytes=jsontext.MAX_BYTES)
            for file in files
        }


@dataclass(slots=True, kw_only=True)
class TreeItem:
    """A pytree, of whose arrays this process writes its share.

    Attributes:
        flat: The tree, without its values.
        snapshot: The values; None once they are written.
    """

    name: str
    flat: Flat
    shardings: Mapping[str, SavedSharding]
    plan: SavePlan
    snapshot: HostSnapshot | None
    handler: str = step.PYTREE_HANDLER

    @property
    def size_bytes(self) -> int:
        """What it holds in memory, about."""
        return self.plan.total_bytes

    def write(self, storage: Storage, work: str, processes: Processes) -> None:
        """Writes this process's share, and lets go of it."""
        assert self.snapshot is not None  # a save is run once
        database = database_of(f"{work}/{self.name}", processes.index, processes.count)
        snapshot, self.snapshot = self.snapshot, None
        write_arrays(
            storage,
            database,
            [leaf.prefix for leaf in _array_leaves(self.flat)],
            self.plan,
            snapshot,
            describe=processes.index == 0,
        )
        if processes.index != 0 and storage.kind(database) == "dir":
            storage.sync(database)

    def said(self) -> Json:
        """What the processes compare."""
        return {"item": "tree", "tree": self._fingerprint(), "bytes": self.plan.total_bytes}

    def _fingerprint(self) -> str:
        """The same on all processes whose trees differ at most in values."""
        leaves = [(leaf.path, leaf.kind, leaf.shape) for leaf in self.flat.leaves]
        stored = [(array.shape, array.dtype, array.chunk_shape) for array in self.plan.stored]
        specs = [(name, saved.axis_sizes, saved.spec) for name, saved in self.shardings.items()]
        return step.digest(repr((leaves, stored, specs)).encode())

    def disagreement(self, said: Sequence[Any]) -> dict[int, str]:
        """Why the processes' trees are not one, by process."""
        failures = {
            i: "has another tree, other shapes or other shardings than process 0"
            for i, one in enumerate(said)
            if one["tree"] != said[0]["tree"]
        }
        # The processes agree on the shards, but maybe not on who has which.
        wanted = sum(
            math.prod(stored.shape) * arrays.dtype_of(stored.dtype).itemsize
            for stored in self.plan.stored
        )
        written = sum(one["bytes"] for one in said)
        if not failures and written != wanted:
            failures[0] = f"all processes together wrote {written} bytes of {wanted}"
        return failures

    def finish(
        self, storage: Storage, work: str, processes: Processes, said: Sequence[Any]
    ) -> dict[str, bytes]:
        """Process 0, when all have written: merges the databases; returns the metadata files."""
        item = f"{work}/{self.name}"
        storage.make_dir(item)
        if processes.count > 1 and self.plan.stored:
            merge(storage, item, [i for i, one in enumerate(said) if one["bytes"] or i == 0])
        files = self._metadata_files()
        if any("/" in name for name in files):
            storage.make_dir(f"{item}/{names.ARRAY_METADATAS}")
        if self.plan.stored:
            manifest = f"{item}/{names.OCDBT_MANIFEST}"
            if storage.kind(manifest) != "file":
                raise SaveFailed(f"{manifest} is missing: the arrays went somewhere else")
        return files

    def read_back(self, storage: Storage, work: str, processes: Processes) -> dict[str, bytes]:
        """Process 0: small files that others wrote, whose digests belong in the record."""
        del processes
        if not self.plan.stored:
            return {}
        file = f"{work}/{self.name}/{names.OCDBT_MANIFEST}"
        return {names.OCDBT_MANIFEST: storage.read(file, max_bytes=jsontext.MAX_BYTES)}

    def _metadata_files(self) -> dict[str, bytes]:
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


Item = TreeItem | FileItem


def take_tree(name: str, value: object, processes: Processes, *, copy: bool) -> TreeItem:
    """Takes a tree apart and brings this process's share of it to the host.

    Args:
        copy: Whether numpy arrays may change before they are written.

    Raises:
        UnsupportedLeaf: leaves cannot be stored; all are named.
    """
    flat = flatten(value)
    _check_strings(flat)
    values = [v for v in flat.values if v is not None]
    specs = [_spec(v, processes) for v in values]
    _check_process_0_sees(_array_leaves(flat), specs)
    plan = plan_save(specs, process=processes.index)
    return TreeItem(
        name=name,
        flat=replace(flat, values=()),
        shardings=_shardings(flat),
        plan=plan,
        snapshot=stage(values, plan, copy=copy),
    )


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
    if processes.count == 1 or not value.is_fully_addressable:
        return False
    # Simulated processes can address every device of this one; real ones only their own.
    devices = value.sharding.device_set
    return len(devices) == 1 or {processes.process_of(d) for d in devices} == {processes.index}


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


def _check_strings(flat: Flat) -> None:
    texts = {leaf.name: leaf.value for leaf in flat.leaves if leaf.value is not None}
    try:
        step.encode_strings(texts)
    except ValueError as error:
        raise UnsupportedLeaf(f"two str leaves cannot both be stored: {error}") from error
