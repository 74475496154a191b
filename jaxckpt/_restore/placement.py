"""Plans the value of each leaf, and chooses its sharding on the available devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from jaxckpt._core.box import Box, whole
from jaxckpt._core.check import calling
from jaxckpt._core.plan import partitions
from jaxckpt._core.pytree import check_levels, key_path
from jaxckpt._core.select import some_paths
from jaxckpt._core.text import counted
from jaxckpt._core.transfer import boxes_here
from jaxckpt._restore.match import LeafMatch, RestoreRequest, Wanted, describe
from jaxckpt._restore.mismatch import table
from jaxckpt.errors import Difference, TreeMismatch
from jaxckpt.format.arrays import dtype_of
from jaxckpt.format.sharding import SavedSharding
from jaxckpt.format.tree import ARRAY_KINDS, Leaf, LeafKind, Path, path_text

# --- the plan of each leaf -------------------------------------------------------------------


class How(NamedTuple):
    """The value to make of a leaf; the leaves that are saved and wanted alike share it."""

    wanted: Wanted | None  # None if it is restored as it was saved
    kind: LeafKind  # of the returned value
    dtype: np.dtype[Any] | None  # of the returned array
    sharding: Sharding | None = None  # of a jax array; None for the default device, uncommitted
    boxes: tuple[Box, ...] = ()  # the parts of the stored array that this process needs
    layout: Any = None  # jax's, of the returned array; None for the default
    bits: np.dtype[Any] | None = None  # to place the values as, in place of `dtype`
    resized: bool = False  # whether `boxes` are parts of an array of the wanted shape instead


class LeafPlan(NamedTuple):
    """One leaf: the source of its values, and the value to make of them."""

    path: Path  # in the returned tree
    saved: Leaf
    how: How

    def stored_boxes(self) -> tuple[Box, ...]:
        """Returns the parts of the stored array to read."""
        if not self.how.resized:
            return self.how.boxes
        stored = whole(self.saved.shape)
        return tuple(dict.fromkeys(filter(None, map(stored.intersect, self.how.boxes))))


def plan_leaves(
    leaves: Sequence[LeafMatch], chooser: ShardingChooser, request: RestoreRequest, *, where: str
) -> list[LeafPlan]:
    """Plans every leaf before anything is read; TreeMismatch lists all that do not fit."""
    if request.shardings is not None:
        chooser.check_names([leaf.path for leaf in leaves])
    plans, differences = [], []
    known: dict[object, How] = {}  # large trees have thousands of leaves that are alike
    for leaf in leaves:
        if (how := known.get(key := leaf.alike)) is None:
            how = known.get(key := chooser.alike(leaf))
        if how is None:
            how = _plan_leaf(leaf, chooser, request)
            if isinstance(how, Difference):
                differences.append(how)
                continue
            if key is not None and not chooser.replicated:  # they are counted
                known[key] = how
        plans.append(LeafPlan(leaf.path, leaf.saved, how))
    if differences:
        do = "does" if len(differences) == 1 else "do"
        raise TreeMismatch(
            f"{counted(len(differences), 'leaf')} of {where} {do} not fit the sharding:\n"
            + "\n".join(table(differences))
            + "\nUse shardings whose mesh axes divide the shapes.",
            differences,
        )
    return plans


def _plan_leaf(
    leaf: LeafMatch, chooser: ShardingChooser, request: RestoreRequest
) -> How | Difference:
    saved, wanted = leaf.saved, leaf.wanted
    kind: LeafKind = saved.kind if wanted is None else wanted.kind
    if kind == "numpy" and wanted is None:
        chosen = chooser.choose and chooser.choose(leaf.path, saved.shape, dtype_of(saved.dtype))
        kind = "numpy" if chosen is None else "array"
    if kind == "array" and request.as_numpy:
        kind = "numpy"
    shape = saved.shape
    if saved.kind == "key" and kind in ("array", "numpy"):
        shape = saved.array.shape
    elif saved.kind != "key" and kind == "key" and wanted is not None:
        shape = wanted.shape
    data_shape = saved.shape if saved.stored is None else saved.stored.shape
    out = _out_dtype(saved, wanted, request.dtype if kind in ARRAY_KINDS else None)
    how = How(wanted, kind, out)
    if wanted is not None and {saved.kind, wanted.kind} <= ARRAY_KINDS and wanted.shape != shape:
        shape = data_shape = wanted.shape
        how = how._replace(resized=True)
    if kind not in ("array", "key"):
        has_none = saved.stored is None and not how.resized
        return how if has_none else how._replace(boxes=(whole(data_shape),))
    sharding = None
    if not request.as_numpy:
        sharding = chooser.sharding_of(leaf.path, saved.name, shape, out, wanted)
    if sharding is None:
        return how._replace(boxes=(whole(data_shape),))
    try:
        sharding.shard_shape(shape)
        of_data = sharding if kind == "array" else key_data_sharding(sharding, len(shape))
        how = how._replace(sharding=sharding, boxes=boxes_here(of_data, data_shape))
    except (ValueError, IndexError, NotImplementedError):
        found = describe(saved.kind, saved.dtype, shape, saved.key_impl)
        why = _why_not(sharding, shape)
        return Difference(leaf=path_text(leaf.path), wanted=why, saved=found)
    layout = None if wanted is None or (kind, out) != ("array", wanted.dtype) else wanted.layout
    if wanted is not None and layout is not None and layout.tiling:
        layout = layout if sharding is wanted.sharding else None  # its tiles are of those devices
    return how._replace(layout=layout)


def _why_not(sharding: Sharding, shape: tuple[int, ...]) -> str:
    """Describes a sharding that does not fit a shape, and why."""
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    spec, sizes = sharding.spec, sharding.mesh.shape
    if len(spec) > len(shape):
        return f"{spec}, which is for {len(spec)} dimensions or more"
    if getattr(spec, "unreduced", None):
        return f"{spec}, whose shards are yet to be added up"
    for i, axes in enumerate(partitions(sharding)):
        names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
        parts = math.prod(sizes[name] for name in names)
        if shape[i] % parts:
            return f"{spec}, which cuts dimension {i} into {parts} equal parts"
    return str(sharding)


def _out_dtype(saved: Leaf, wanted: Wanted | None, dtype: Any) -> np.dtype[Any] | None:
    is_wide_int = saved.kind == "int" and isinstance(saved.value, str)
    if saved.kind in ("str", "bytes", "empty", "ellipsis", "key") or is_wide_int:
        return None
    if wanted is not None and wanted.kind == "key":
        return None
    out = dtype_of(saved.dtype) if wanted is None or wanted.dtype is None else wanted.dtype
    if wanted is not None and wanted.kind in ("float", "complex") and out.kind in "biu":
        return np.dtype(wanted.kind)
    if dtype is not None and jax.numpy.issubdtype(out, np.floating):
        return np.dtype(dtype)
    return out


def key_data_sharding(sharding: Sharding, rank: int) -> Sharding:
    """Returns the sharding of a key array's data, whose additional dimension is never split."""
    if isinstance(sharding, NamedSharding):
        axes = [*partitions(sharding)[:rank]]
        while axes and axes[-1] is None:  # jax shows them, but its data lacks them
            axes.pop()
        spec = PartitionSpec(*axes, None)  # as jax has it: else jit compiles anew
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    devices: set[Any] = sharding.device_set
    if len(devices) == 1:
        return sharding
    by_id = sorted(devices, key=lambda device: device.id)
    return NamedSharding(Mesh(np.asarray(by_id), ("devices",)), PartitionSpec())


# --- shardings -------------------------------------------------------------------------------


class ShardingChooser:
    """Chooses a sharding for each leaf, or None for the default device, uncommitted.

    In order of precedence, the choice comes from `shardings`, `mesh`, the target, the checkpoint.

    Args:
        mesh: Takes the saved PartitionSpecs. Axes are matched by name; the remaining axes by
            position, if it has as many axes as the saved mesh.
        shardings: A sharding or PartitionSpec (of `mesh`) for all leaves, a tree of shardings (the
            one of a container applies to its leaves), or `fn(path, shape, dtype)`.
        saved: Returns the recorded shardings by leaf name; called only if needed.

    Attributes:
        choose: Returns the caller's choice for a leaf in `shardings`, or None; None without them.
        replicated: Paths of arrays that were saved in shards and are not split along some axis now.
    """

    def __init__(
        self, *, mesh: Mesh | None, shardings: Any, saved: Callable[[], Mapping[str, SavedSharding]]
    ) -> None:
        self._mesh = mesh
        self._saved = saved
        self._mesh_like = cache(_mesh_here)  # there may be thousands of devices
        self._named, self.choose = ((), None) if shardings is None else _chooser(shardings)
        self.replicated: dict[str, None] = {}

    def alike(self, leaf: LeafMatch) -> object:
        """Returns what all leaves share that get one sharding; None if it depends on the path."""
        wanted = leaf.wanted
        if self.choose is not None:
            return None
        if wanted is not None and self._mesh is None:
            is_abstract = isinstance(getattr(wanted.sharding, "mesh", None), AbstractMesh)
            if wanted.uncommitted or (wanted.sharding is not None and not is_abstract):
                return leaf.alike
        is_placed = (leaf.saved if wanted is None else wanted).kind in ("array", "key")
        return leaf.alike, is_placed and id(self._saved().get(leaf.saved.name))

    def check_names(self, paths: Sequence[Path]) -> None:
        """Raises ValueError if the tree of shardings names leaves that do not exist."""
        known = {path[:depth] for path in paths for depth in range(len(path) + 1)}
        unknown = [path_text(path) for path in self._named if path not in known]
        if unknown:
            there = some_paths(paths, "the tree")
            raise ValueError(f"shardings: nothing is named {', '.join(unknown)}; {there}")

    def sharding_of(
        self, path: Path, name: str, shape: tuple[int, ...], dtype: Any, wanted: Wanted | None
    ) -> Sharding | None:
        """Returns the sharding of the leaf at `path`, named `name` in the checkpoint."""
        chosen = self.choose and self.choose(path, shape, dtype)
        if chosen is not None:
            return self._asked(chosen, name, path)
        if self._mesh is not None:
            return self._on_mesh(self._mesh, self._saved().get(name), shape, path)
        if wanted is not None and (wanted.sharding is not None or wanted.uncommitted):
            return self._concrete(wanted.sharding, name, path)
        saved = self._saved().get(name)
        if saved is None:
            return None
        if saved.is_single_device:
            return _own_device(saved)
        mesh = self._mesh_like(saved)
        return None if mesh is None else self._on_mesh(mesh, saved, shape, path)

    def _asked(self, chosen: Any, name: str, path: Path) -> Sharding | None:
        if isinstance(chosen, PartitionSpec) and self._mesh is not None:
            with calling(f"the PartitionSpec of leaf {path_text(path)} in `shardings`"):
                return NamedSharding(self._mesh, chosen)
        if not isinstance(chosen, Sharding):
            kinds = "a sharding, or a PartitionSpec and mesh="
            raise TypeError(f"shardings: leaf {path_text(path)} needs {kinds}, got {chosen!r}")
        return self._concrete(chosen, name, path)

    def _concrete(self, sharding: Sharding | None, name: str, path: Path) -> Sharding | None:
        """Returns a sharding on devices in place of the abstract sharding of `jax.eval_shape`."""
        if not (isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)):
            return sharding
        abstract = sharding.mesh
        if abstract.empty:
            return None
        candidates = [self._mesh, jax.sharding.get_mesh()]
        saved = self._saved().get(name)
        if saved is not None and not saved.is_single_device:
            candidates.append(self._mesh_like(saved))
        for mesh in candidates:
            if mesh is not None and not mesh.empty and dict(mesh.shape) == dict(abstract.shape):
                return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
        raise TypeError(
            f"like: leaf {path_text(path)} has a sharding on the abstract mesh {abstract}, and "
            "neither jax.set_mesh nor the checkpoint has a mesh with these axes. Pass mesh=."
        )

    def _on_mesh(
        self, mesh: Mesh, saved: SavedSharding | None, shape: tuple[int, ...], path: Path
    ) -> Sharding:
        if saved is None or saved.is_single_device:
            return NamedSharding(mesh, PartitionSpec())
        renamed = _rename_axes(saved, mesh)
        spec = []
        for axes, size in zip(saved.spec[: len(shape)], shape, strict=False):
            names = (axes,) if isinstance(axes, str) else axes or ()
            here = [renamed[a] for a in names if a in renamed]
            parts = math.prod(mesh.shape[a] for a in here)
            if len(here) < len(names) or size % parts:
                self.replicated[path_text(path)] = None
            spec.append(tuple(here) if here and size % parts == 0 else None)
        return NamedSharding(mesh, PartitionSpec(*[s[0] if s and len(s) == 1 else s for s in spec]))


def _chooser(shardings: Any) -> tuple[Sequence[Path], Callable[[Path, tuple[int, ...], Any], Any]]:
    """Returns the paths that `shardings` name, and a function that chooses for one leaf."""
    if callable(shardings) and not isinstance(shardings, (Sharding, PartitionSpec, Mesh)):

        def asked(path: Path, shape: tuple[int, ...], dtype: object) -> Any:
            with calling(f"the function `shardings` for leaf {path_text(path)}"):
                return shardings(path_text(path), shape, dtype)

        return (), asked
    check_levels(shardings, "shardings")
    pairs, _ = jax.tree_util.tree_flatten_with_path(
        shardings, is_leaf=lambda x: x is None or isinstance(x, (Sharding, PartitionSpec))
    )
    by_path = {key_path(keys): value for keys, value in pairs}

    def nearest(path: Path, shape: tuple[int, ...], dtype: object) -> Any:
        for depth in range(len(path), -1, -1):
            if path[:depth] in by_path:
                return by_path[path[:depth]]
        return None

    return tuple(by_path), nearest


def _own_device(saved: SavedSharding) -> Sharding | None:
    """Returns the single device that an array was on, unless it is jax's default device."""
    devices = jax.local_devices()
    device = {str(d): d for d in devices}.get(saved.device, devices[0])
    if device == devices[0] or jax.process_count() > 1:
        return None
    return SingleDeviceSharding(device)


def _rename_axes(saved: SavedSharding, mesh: Mesh) -> dict[str, str]:
    here = list(map(str, mesh.axis_names))
    renamed = {name: name for name in saved.axis_names if name in here}
    if len(here) == len(saved.axis_names):
        lost = [name for name in saved.axis_names if name not in renamed]
        renamed |= dict(zip(lost, [name for name in here if name not in renamed], strict=True))
    return renamed


def _mesh_here(saved: SavedSharding) -> Mesh | None:
    """Returns the saved mesh on the available devices, with smaller axes if these are fewer.

    In a job of several processes the mesh covers all devices, so that each process has its share.
    """
    devices = jax.devices()
    sizes, count = saved.axis_sizes, math.prod(saved.axis_sizes)
    by_id = {device.id: device for device in devices}
    if len(saved.device_ids) == count and all(i in by_id for i in saved.device_ids):
        chosen = [by_id[i] for i in saved.device_ids]
    else:
        chosen = devices[:count]
    if count > len(devices) or (jax.process_count() > 1 and count != len(devices)):
        fitted = _fit(sizes, len(devices))
        if fitted is None:
            return None
        sizes, chosen = fitted, devices
    types = tuple(AxisType.__members__.get(kind, AxisType.Auto) for kind in saved.axis_types)
    shaped = np.asarray(chosen).reshape(sizes)
    return Mesh(shaped, saved.axis_names, axis_types=types if len(types) == len(sizes) else None)


def _fit(sizes: tuple[int, ...], count: int) -> tuple[int, ...] | None:
    """Changes the first possible axis such that the mesh has `count` devices."""
    for axis in range(len(sizes)):
        others = math.prod(sizes) // max(1, sizes[axis])
        if others and count % others == 0:
            return (*sizes[:axis], count // others, *sizes[axis + 1 :])
    # No single axis fits: keep the largest parts of the last axes that divide the count.
    fitted = []
    for size in reversed(sizes):
        part = math.gcd(size, count)
        fitted.insert(0, part)
        count //= part
    return None if not fitted else (fitted[0] * count, *fitted[1:])
