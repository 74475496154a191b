"""Where restored arrays go: which sharding each leaf gets on the devices that are here."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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

from jaxckpt._core.pytree import key_path
from jaxckpt._restore.match import Wanted
from jaxckpt.format.arrays import dtype_of
from jaxckpt.format.sharding import SavedSharding
from jaxckpt.format.tree import Leaf, Path, path_text

_logger = logging.getLogger("jaxckpt")


class Placer:
    """Chooses a sharding for each leaf. None means: uncommitted, on the default device.

    The first of these that says something wins: `shardings`, `mesh`, the target, the checkpoint.

    Args:
        mesh: The saved PartitionSpecs are put on it. Axes go by name; those that it lacks go by
            position if it has as many axes as the saved mesh.
        shardings: A sharding or PartitionSpec (of `mesh`) for all leaves, a tree of them (a
            container's applies to all in it), or `fn(path, shape, dtype)`.
        saved: Gives what is recorded, by leaf name; asked only if the rest does not say enough.
    """

    def __init__(
        self,
        *,
        mesh: Mesh | None,
        shardings: Any,
        saved: Callable[[], Mapping[str, SavedSharding]],
    ) -> None:
        self._mesh = mesh
        self._saved = saved
        self._meshes: dict[SavedSharding, Mesh | None] = {}
        self._named, self._chosen = _chooser(shardings)
        self._replicated: dict[str, None] = {}

    def place(
        self,
        path: Path,
        name: str,
        shape: tuple[int, ...],
        dtype: Any,
        wanted: Wanted | None,
    ) -> Sharding | None:
        """The sharding of the leaf at `path`, called `name` in the checkpoint."""
        chosen = self._chosen(path, shape, dtype)
        if isinstance(chosen, PartitionSpec):
            if self._mesh is None:
                raise TypeError(
                    f"shardings: {path_text(path)} gets a PartitionSpec, which needs mesh="
                )
            chosen = NamedSharding(self._mesh, chosen)
        if chosen is not None:
            if not isinstance(chosen, Sharding):
                raise TypeError(f"shardings: {path_text(path)} gets {chosen!r}, not a sharding")
            return self._concrete(chosen, name, path)
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

    def _concrete(self, sharding: Sharding | None, name: str, path: Path) -> Sharding | None:
        """A sharding on devices; `jax.eval_shape` gives ones that have only axes."""
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
            f"like: leaf {path_text(path)} has a sharding on the abstract mesh {abstract}, and no "
            "mesh of these axes is given, set (jax.set_mesh) or saved. Give mesh=."
        )

    def check_names(self, paths: Sequence[Path]) -> None:
        """Refuses a tree of shardings that names what is not there."""
        known = {path[:depth] for path in paths for depth in range(len(path) + 1)}
        unknown = [path_text(path) for path in self._named if path not in known]
        if unknown:
            raise ValueError(f"shardings: there is no leaf or container {', '.join(unknown)}")

    def is_asked(self, path: Path, saved: Leaf) -> bool:
        """Whether the caller's `shardings` say something about a leaf."""
        return self._chosen(path, saved.shape, dtype_of(saved.dtype)) is not None

    def log_replicated(self, place: str) -> None:
        """Says once which arrays are whole on every device although they were saved in shards."""
        if self._replicated:
            _logger.warning(
                "%s: %d arrays could not be split as they were saved, and are replicated along "
                "some axes on this mesh, %s among them",
                place,
                len(self._replicated),
                next(iter(self._replicated)),
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
                self._replicated[path_text(path)] = None
            spec.append(tuple(here) if here and size % parts == 0 else None)
        return NamedSharding(mesh, PartitionSpec(*[s[0] if s and len(s) == 1 else s for s in spec]))

    def _mesh_like(self, saved: SavedSharding) -> Mesh | None:
        key = SavedSharding(
            axis_names=saved.axis_names,
            axis_sizes=saved.axis_sizes,
            axis_types=saved.axis_types,
            device_ids=saved.device_ids,
        )
        if key not in self._meshes:
            self._meshes[key] = _mesh_here(key)
        return self._meshes[key]


def _chooser(shardings: Any) -> tuple[Sequence[Path], Callable[[Path, tuple[int, ...], Any], Any]]:
    """The paths that a tree of shardings names, and what `shardings` say of a leaf."""
    if shardings is None:
        return (), lambda path, shape, dtype: None
    if callable(shardings) and not isinstance(shardings, (Sharding, PartitionSpec)):
        return (), lambda path, shape, dtype: shardings(path_text(path), shape, dtype)
    pairs, _ = jax.tree_util.tree_flatten_with_path(
        shardings, is_leaf=lambda x: x is None or isinstance(x, (Sharding, PartitionSpec))
    )
    by_path = {key_path(keys): value for keys, value in pairs}

    def nearest(path: Path, shape: tuple[int, ...], dtype: object) -> Any:
        del shape, dtype
        for depth in range(len(path), -1, -1):
            if path[:depth] in by_path:
                return by_path[path[:depth]]
        return None

    return tuple(by_path), nearest


def _own_device(saved: SavedSharding) -> Sharding | None:
    """The device that an array had to itself, unless it is the one where arrays are made anyway."""
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
    """The saved mesh on the devices here; a smaller one of the same axes if there are too few.

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
    kinds = {kind.name: kind for kind in AxisType}
    types = tuple(kinds[kind] for kind in saved.axis_types if kind in kinds)
    shaped = np.asarray(chosen).reshape(sizes)
    return Mesh(shaped, saved.axis_names, axis_types=types if len(types) == len(sizes) else None)


def _fit(sizes: tuple[int, ...], count: int) -> tuple[int, ...] | None:
    """Changes one axis, the first that can, so that the mesh has `count` devices."""
    for axis in range(len(sizes)):
        others = math.prod(sizes) // max(1, sizes[axis])
        if others and count % others == 0:
            return (*sizes[:axis], count // others, *sizes[axis + 1 :])
    # No single axis can: keep as much of the last axes as divides.
    fitted = []
    for size in reversed(sizes):
        part = math.gcd(size, count)
        fitted.insert(0, part)
        count //= part
    return None if not fitted else (fitted[0] * count, *fitted[1:])
