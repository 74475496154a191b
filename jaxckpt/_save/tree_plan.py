"""Plans how a tree is stored, and caches the plan by structure, shapes and shardings.

A training loop saves the same tree many times with different values. A `TreePlan` has everything
else (names, plan, metadata files). Recognising a tree takes a fraction of the time of planning it.
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
from jax.core import Tracer

from jaxckpt._core.cast import is_floating
from jaxckpt._core.plan import ArraySpec, SavePlan, placement_of, plan_save
from jaxckpt._core.pytree import Flat, check_levels, flatten, stored_value
from jaxckpt._core.transfer import Shard, sources_of
from jaxckpt._disk.writer import WritePlan, compressed, metadata_files, plan_writes, texts_of
from jaxckpt.errors import UnsupportedLeaf
from jaxckpt.format import arrays, step
from jaxckpt.format.arrays import dtype_of
from jaxckpt.format.sharding import SavedSharding
from jaxckpt.format.tree import ARRAY_KINDS, Leaf, Tree
from jaxckpt.multihost import Processes

Array = jax.Array | np.ndarray[Any, Any]

# A run has a state and perhaps a few items; two runs may share a process.
_MAX_CACHED: Final = 8


@dataclass(frozen=True, kw_only=True)
class TreePlan:
    """All facts about a tree that a save needs, except its values."""

    tree: Tree  # as in `_METADATA`
    shardings: Mapping[str, SavedSharding]  # by leaf name
    plan: SavePlan  # has the chunks that this process writes
    sources: tuple[Shard, ...]  # the shards with these chunks

    @cached_property
    def writes(self) -> WritePlan:
        """Returns the writes of this process to the database, without the values."""
        return self._writes_of(self.plan)

    @cached_property
    def held(self) -> WritePlan:
        """Returns the writes of the other chunks that this process holds, if the plan has them."""
        return self._writes_of(replace(self.plan, writes=self.plan.held))

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
        dtype: If given, the dtype in which all floating-point arrays are saved.
        zstd: If given, the level at which chunks are compressed.
        holds: As in `plan_save`.

    Raises:
        UnsupportedLeaf: leaves cannot be stored; the message names all of them.
    """
    check_levels(value, "the tree")
    form = _form_of(value, processes, dtype, zstd, holds=holds)
    if form is not None and (cached := _find(form)) is not None:
        if cached is not _cache[0]:
            _put_first(cached)
        return cached.planned, [stored_value(kind, form.leaves[i]) for i, kind in cached.wanted]
    flat = flatten(value)
    if dtype is not None:
        flat = replace(flat, leaves=tuple(_cast_leaf(leaf, dtype) for leaf in flat.leaves))
    values = [v for v in flat.values if v is not None]
    planned = _work_out(flat, values, processes, zstd, holds=holds)
    if form is not None:
        _put(form, planned)
    return planned, values


# --- recognising a tree ----------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Form:
    """Everything that a plan depends on. Equal forms have equal plans; values are not compared."""

    processes: Processes
    facts: list[Any]  # the type of each leaf, with its shape, dtype and sharding
    keys: list[Any]  # the path of each leaf, since static data may name keys and change in place
    text: str  # of the treedef, since treedefs with static data 1 and True are equal
    treedef: Any
    dtype: str | None  # as in `plan_tree`
    zstd: int | None
    holds: bool
    leaves: list[Any] = field(compare=False)  # without None and empty containers, like jax


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cached:
    """A cached plan and the form of its trees."""

    form: _Form
    planned: TreePlan
    wanted: tuple[tuple[int, str], ...]  # for each array, its index in `_Form.leaves` and its kind


_cache: tuple[_Cached, ...] = ()  # the latest first
_lock = threading.Lock()  # guards replacing _kept


def _find(form: _Form) -> _Cached | None:
    for cached in _cache:  # without the lock: the comparison may run the user's code
        with contextlib.suppress(Exception):  # static data that cannot be compared, such as arrays
            if cached.form == form:
                return cached
    return None


def _put(form: _Form, planned: TreePlan) -> None:
    with_values = [leaf for leaf in planned.tree.leaves if leaf.kind != "empty"]
    wanted = tuple((i, leaf.kind) for i, leaf in enumerate(with_values) if leaf.has_array)
    _put_first(_Cached(form=replace(form, leaves=[]), planned=planned, wanted=wanted))


def _put_first(cached: _Cached) -> None:
    global _cache
    with _lock:
        _cache = (cached, *(other for other in _cache if other is not cached))[:_MAX_CACHED]


def _form_of(
    value: object, processes: Processes, dtype: str | None, zstd: int | None, *, holds: bool
) -> _Form | None:
    """Returns None for a tree with leaves that only `flatten` can judge."""
    try:
        pairs, treedef = jax.tree_util.tree_flatten_with_path(value)
        leaves = [leaf for _, leaf in pairs]
        facts = [_facts(leaf) for leaf in leaves]
        if None in facts:
            return None
        return _Form(
            processes=processes,
            facts=facts,
            keys=[keys for keys, _ in pairs],
            text=str(treedef),
            treedef=treedef,
            dtype=dtype,
            zstd=zstd,
            holds=holds,
            leaves=leaves,
        )
    except Exception:  # `flatten` explains it, or there is nothing wrong but a `repr`
        return None


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
    if issubclass(cls, jax.Array) and not issubclass(cls, Tracer):
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
    texts_of(flat.leaves)  # at once, not in the background
    arrays_of = [leaf for leaf in flat.leaves if leaf.has_array]
    dtypes = [
        dtype_of(leaf.dtype) if leaf.kind in ARRAY_KINDS else np.dtype(value.dtype)
        for leaf, value in zip(arrays_of, values, strict=True)
    ]
    specs = [_spec(v, processes, dtype) for v, dtype in zip(values, dtypes, strict=True)]
    _check_process_0_sees(arrays_of, specs)
    plan = plan_save(specs, process=processes.index, holds=holds)
    plan = replace(plan, stored=tuple(compressed(array, zstd) for array in plan.stored))
    stored = iter(plan.stored)
    leaves = tuple(
        replace(leaf, stored=next(stored)) if leaf.has_array else leaf for leaf in flat.leaves
    )
    return TreePlan(
        tree=Tree(leaves=leaves, root=flat.root, typed=True, uses_ocdbt=bool(plan.stored)),
        shardings=_shardings(flat),
        plan=plan,
        sources=sources_of(values, dtypes, plan),
    )


def _check_process_0_sees(leaves: Sequence[Leaf], specs: Sequence[ArraySpec]) -> None:
    """Rejects arrays on a single process k > 0, which k would take for host values."""
    for leaf, spec in zip(leaves, specs, strict=True):
        if spec.placement is not None and spec.placement.grid.only:
            raise UnsupportedLeaf(
                f"leaf {leaf.text} is only on devices of process {spec.placement.grid.only}. Put "
                "it on a mesh with devices of process 0 or of several processes."
            )


def _cast_leaf(leaf: Leaf, dtype: str) -> Leaf:
    """Returns the leaf with another dtype if it is a floating-point array."""
    is_cast = leaf.kind in ARRAY_KINDS and is_floating(leaf.dtype)
    return replace(leaf, dtype=dtype) if is_cast else leaf


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


def _shardings(flat: Flat) -> dict[str, SavedSharding]:
    return {
        leaf.name: saved_sharding(value.sharding)
        for leaf, value in zip(flat.leaves, flat.values, strict=True)
        if leaf.kind in ("array", "key") and isinstance(value, jax.Array)
    }


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
            spec=tuple(_axes(axes) for axes in sharding.spec),
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
