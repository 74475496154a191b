"""Plans how a tree is stored, and caches the plan by structure, shapes and shardings.

A training loop saves the same tree many times with different values. A `TreePlan` has everything
else (names, plan, metadata files). Recognising a tree takes a fraction of the time of planning it.
The caller of a save waits for the checks and for the shards to take, and for nothing else: leaves,
keys and files are made when they are first used, in the background.
The cache holds the last few plans with the trees' static data, like `jax.jit`, but no arrays.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import Any, Final, Literal

import jax
import numpy as np

from jaxckpt._core.box import whole
from jaxckpt._core.cast import is_floating
from jaxckpt._core.collector import paused
from jaxckpt._core.plan import ArraySpec, SavePlan, partitions, placement_of, plan_save
from jaxckpt._core.pytree import Flat, check_levels, flatten, is_device_array, stored_value
from jaxckpt._core.transfer import Shard, sources_of
from jaxckpt._disk.writer import WritePlan, compressed, encode_texts, metadata_files, plan_writes
from jaxckpt.errors import UnsupportedLeaf
from jaxckpt.format import arrays, step
from jaxckpt.format.arrays import dtype_of
from jaxckpt.format.sharding import SavedSharding
from jaxckpt.format.tree import ARRAY_KINDS, Path, Tree, path_text
from jaxckpt.multihost import Processes

Array = jax.Array | np.ndarray[Any, Any]

# A run has a state and perhaps a few items; two runs may share a process.
_MAX_CACHED: Final = 8
_MAX_COMPARED_BYTES: Final = 4096  # of an array that is not on the devices of several processes


@dataclass(frozen=True, kw_only=True)
class TreePlan:
    """All facts about a tree that a save needs, except its values; equal ones write alike."""

    flat: Flat
    placed: tuple[jax.sharding.Sharding | None, ...]  # of each array; None for a value on the host
    plan: SavePlan  # has the chunks that this process writes
    sources: tuple[Shard, ...]  # the shards with these chunks
    # The small arrays of which each process has its own copy, and process 0 writes its own.
    own: tuple[Shard, ...] = ()
    custom_metadata: Any = field(default=None, compare=False)  # JSON to store with the tree

    @property
    def array_paths(self) -> list[Path]:
        return [self.flat.paths[i] for i in self.flat.arrays]

    # What follows takes longer than all of the above, so it is made in the background.

    @cached_property
    def tree(self) -> Tree:
        """Returns the tree, as in `_METADATA`."""
        stored = self.plan.stored
        return Tree(
            leaves=self.flat.leaves(stored),
            root=self.flat.root,
            typed=True,
            uses_ocdbt=bool(stored),
            custom_metadata=self.custom_metadata,
        )

    @cached_property
    def shardings(self) -> Mapping[str, SavedSharding]:
        """Returns the shardings, by leaf name."""
        placed = zip(self.array_paths, self.placed, strict=True)
        return {".".join(path): saved_sharding(one) for path, one in placed if one is not None}

    @cached_property
    def writes(self) -> WritePlan:
        """Returns the writes of this process to the database, without the values."""
        return self._writes_of(self.plan)

    @cached_property
    def held(self) -> WritePlan:
        """Returns the writes of the other chunks that this process holds, if the plan has them."""
        return self._writes_of(self.plan.held)

    def _writes_of(self, plan: SavePlan) -> WritePlan:
        prefixes = [leaf.prefix for leaf in self.tree.leaves if leaf.has_array]
        places = {(source.array, source.shard): i for i, source in enumerate(self.sources)}
        return plan_writes(prefixes, plan, places)

    @cached_property
    def fingerprint(self) -> str:
        """Returns a digest that is equal in all processes if their trees differ only in values."""
        leaves = [(leaf.path, leaf.kind, leaf.shape) for leaf in self.tree.leaves]
        stored = [(one.shape, one.dtype, one.chunk_shape, one.zstd) for one in self.plan.stored]
        specs = [(name, saved.axis_sizes, saved.spec) for name, saved in self.shardings.items()]
        return step.digest(repr((leaves, stored, specs)).encode())

    @cached_property
    def files(self) -> Mapping[str, bytes]:
        """Returns the metadata files, by name in the item."""
        return metadata_files(self.tree, self.shardings)


def plan_tree(
    value: object,
    processes: Processes,
    dtype: str | None = None,
    zstd: int | None = None,
    *,
    holds: bool = False,
) -> tuple[TreePlan, Sequence[Array]]:
    """Returns the plan of a tree and the values of its arrays.

    Args:
        holds: Whether to plan for all shards that this process holds.
    """
    check_levels(value, "the tree")
    form, leaves = _form_of(value, processes, dtype, zstd, holds)
    if form is not None and (cached := _find(form, value)) is not None:
        if cached is not _cache[0]:
            _put_first(cached)
        return cached.planned, [stored_value(kind, leaves[i]) for i, kind in cached.wanted]
    with paused():
        flat, values = flatten(value)
        if dtype is not None:
            flat = replace(flat, facts=[_cast(facts, dtype) for facts in flat.facts])
        planned = _work_out(flat, values, processes, zstd, holds=holds)
    if form is not None:
        _put(form, planned)
    return planned, values


# --- recognising a tree ----------------------------------------------------------------------


# Everything that a plan depends on. Equal forms have equal plans; values are not compared.
_Form = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cached:
    """A cached plan and the form of its trees."""

    form: _Form
    keys: list[Any]  # jax's, of each leaf
    planned: TreePlan
    wanted: tuple[tuple[int, str], ...]  # for each array, its index in `_form_of` and its kind


_cache: tuple[_Cached, ...] = ()  # the latest first
_lock = threading.Lock()  # guards replacing _kept


def _find(form: _Form, value: object) -> _Cached | None:
    for cached in _cache:  # without the lock: the comparison may run the user's code
        with contextlib.suppress(Exception):  # static data that cannot be compared, such as arrays
            # Static data may name keys, and change in place.
            if cached.form == form:
                leaves, _ = jax.tree_util.tree_flatten_with_path(value)
                if cached.keys == [keys for keys, _ in leaves]:
                    return cached
    return None


def _put(form: _Form, planned: TreePlan) -> None:
    kinds, arrays = [facts["kind"] for facts in planned.flat.facts], {*planned.flat.arrays}
    full = [i for i, kind in enumerate(kinds) if kind != "empty"]
    wanted = tuple([(n, kinds[i]) for n, i in enumerate(full) if i in arrays])
    keys = [planned.flat.keys[i] for i in full]
    _put_first(_Cached(form=form, keys=keys, planned=planned, wanted=wanted))


def _put_first(cached: _Cached) -> None:
    global _cache
    with _lock:
        _cache = (cached, *(other for other in _cache if other is not cached))[:_MAX_CACHED]


def _form_of(value: object, *options: Any) -> tuple[_Form | None, list[Any]]:
    """Returns the form of a tree and its leaves, without None and empty containers, like jax.

    The form is None for a tree with leaves that only `flatten` can judge.
    """
    try:
        leaves, treedef = jax.tree_util.tree_flatten(value)
        facts = [_facts(leaf) for leaf in leaves]
        # Treedefs with 1 and True as static data are equal.
        form = (*options, facts, str(treedef), treedef)
    except Exception:  # `flatten` explains it, or there is nothing wrong but a `repr`
        return None, []
    return None if None in facts else form, leaves


def _facts(leaf: Any) -> object:
    """Returns the facts that a plan depends on, or None if only `flatten` can judge the leaf."""
    cls = type(leaf)
    sort = _sort_of(cls)
    if sort == "device":
        return None if leaf.is_deleted() else (cls, leaf.shape, leaf.dtype, leaf.sharding)
    if sort == "host":
        return cls, leaf.shape, leaf.dtype
    if sort == "number":
        # Another dtype from here on, and text from 64 bits on.
        return (cls, leaf) if cls is int and not -(1 << 63) <= leaf < 1 << 63 else cls
    if sort == "text":
        return cls, leaf
    return (cls, len(leaf)) if sort == "bytes" else None


@cache
def _sort_of(cls: type) -> Literal["device", "host", "number", "text", "bytes"] | None:
    if is_device_array(cls):
        return "device"
    if cls is np.ndarray or (issubclass(cls, np.generic) and not issubclass(cls, (str, bytes))):
        return "host"
    if cls in (bool, int, float, complex):
        return "number"
    return {str: "text", bytes: "bytes"}.get(cls)  # pyright: ignore[reportReturnType]


# --- working it out --------------------------------------------------------------------------


def _work_out(
    flat: Flat, values: Sequence[Array], processes: Processes, zstd: int | None, *, holds: bool
) -> TreePlan:
    # At once, not in the background.
    texts = zip(flat.paths, flat.facts, strict=True)
    encode_texts({".".join(path): facts["value"] for path, facts in texts if "value" in facts})
    dtypes = [
        dtype_of(facts["dtype"]) if facts["kind"] in ARRAY_KINDS else np.dtype(value.dtype)
        for facts, value in zip([flat.facts[i] for i in flat.arrays], values, strict=True)
    ]
    placed = [value.sharding if isinstance(value, jax.Array) else None for value in values]
    alike: dict[Any, ArraySpec] = {}  # thousands of leaves may be
    specs = []
    for i, value, dtype, sharding in zip(flat.arrays, values, dtypes, placed, strict=True):
        if (spec := alike.get(key := (value.shape, dtype, sharding))) is None:
            if getattr(cut := getattr(sharding, "spec", None), "unreduced", None):
                why = f"is yet to be added up, by {cut}. Reshard it first."
                raise UnsupportedLeaf(f"leaf {path_text(flat.paths[i])} {why}")
            spec = alike[key] = _spec(value, processes, dtype)
        specs.append(spec)
    plan = plan_save(specs, process=processes.index, holds=holds)
    if zstd is not None:
        plan = replace(plan, stored=tuple(compressed(array, zstd) for array in plan.stored))
    sources = sources_of(values, dtypes, plan, (*plan.shares, *plan.held_shares))
    own: tuple[Shard, ...] = ()
    if processes.count > 1:
        small = [
            (i, whole(value.shape))
            for i, (spec, value) in enumerate(zip(specs, values, strict=True))
            if spec.placement is None and value.nbytes <= _MAX_COMPARED_BYTES
        ]
        own = sources_of(values, dtypes, plan, [(i, [(box, box)]) for i, box in small])
    planned = TreePlan(flat=flat, placed=tuple(placed), plan=plan, sources=sources, own=own)
    mine = None, processes.index
    if any(_holder(spec) not in mine for spec in alike.values()):
        hidden = next(i for i, spec in enumerate(specs) if _holder(spec) not in mine)
        raise UnsupportedLeaf(
            f"leaf {path_text(planned.array_paths[hidden])} is only on devices of process "
            f"{_holder(specs[hidden])}, which takes it for a value of its own. Put it on a mesh "
            "with devices of several processes, or a copy on a device of each process."
        )
    return planned


def _holder(spec: ArraySpec) -> int | None:
    """Returns the only process that has a global array."""
    return None if spec.placement is None else spec.placement.grid.only


def _cast(facts: Mapping[str, Any], dtype: str) -> Mapping[str, Any]:
    """Returns the facts with another dtype if they are of a floating-point array."""
    is_cast = facts["kind"] in ARRAY_KINDS and is_floating(facts["dtype"])
    return {**facts, "dtype": dtype} if is_cast else facts


def _spec(value: Array, processes: Processes, dtype: np.dtype[Any]) -> ArraySpec:
    name, itemsize = stored_dtype(dtype)
    placement = None
    if isinstance(value, jax.Array) and not _is_host_local(value, processes):
        placement = placement_of(value.sharding, value.shape, processes.process_of)
    return ArraySpec(shape=value.shape, dtype=name, itemsize=itemsize, placement=placement)


@cache
def stored_dtype(dtype: Any) -> tuple[str, int]:  # numpy's and jax's dtypes share no type
    dtype = np.dtype(dtype)
    return "uint8" if dtype.name in arrays.AS_BYTES_DTYPES else dtype.name, dtype.itemsize


def _is_host_local(value: jax.Array, processes: Processes) -> bool:
    """Returns whether each process has its own copy; like numpy arrays, process 0 writes it."""
    if processes.count == 1 or not value.is_fully_addressable:
        return False
    # Simulated processes can address all devices of this process; real processes only their own.
    devices = value.sharding.device_set
    return len(devices) == 1 or {processes.process_of(d) for d in devices} == {processes.index}


@lru_cache(maxsize=1 << 12)
def saved_sharding(sharding: jax.sharding.Sharding) -> SavedSharding:
    """Returns a sharding as data."""
    devices = sharding.device_set
    if isinstance(sharding, jax.sharding.NamedSharding) and not sharding.mesh.empty:
        mesh: Any = sharding.mesh
        return SavedSharding(
            axis_names=tuple(map(str, mesh.axis_names)),
            axis_sizes=tuple(mesh.devices.shape),
            axis_types=tuple(kind.name for kind in mesh.axis_types),
            spec=tuple(_axes(axes) for axes in partitions(sharding)),
            device_ids=tuple(device.id for device in mesh.devices.flat),
        )
    if len(devices) == 1:
        device = next(iter(devices))
        # The name in jax until 0.5: every Orbax release knows it; only new releases know `cpu:0`.
        name = f"TFRT_CPU_{device.id}" if device.platform == "cpu" else str(device)
        return SavedSharding(device=name)
    # Orbax cannot express other shardings and fails on a file that omits an array.
    ids = tuple(sorted(device.id for device in devices))
    return SavedSharding(axis_names=("devices",), axis_sizes=(len(ids),), device_ids=ids)


def _axes(axes: Any) -> str | tuple[str, ...] | None:  # an entry of a PartitionSpec
    if axes is None or axes is jax.sharding.PartitionSpec.UNCONSTRAINED:
        return None
    return tuple(map(str, axes)) if isinstance(axes, (tuple, list)) else str(axes)
