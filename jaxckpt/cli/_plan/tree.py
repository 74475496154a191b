"""The leaves to plan for, as a save describes them.

They come from a checkpoint, or from a function of the user's. Values are zeros that take no memory,
so that the code that describes the leaves of a save describes these too.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np
from jax import tree_util
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxckpt._core.plan import ArraySpec, plan_save
from jaxckpt._core.pytree import flatten, is_empty, is_key_dtype, key_path
from jaxckpt._core.text import shown
from jaxckpt._restore.placement import ShardingChooser
from jaxckpt._save.tree_plan import stored_dtype
from jaxckpt.cli._plan.cluster import Cluster, placed
from jaxckpt.format.arrays import dtype_of
from jaxckpt.format.sharding import SavedSharding
from jaxckpt.format.tree import ARRAY_KINDS, Leaf, Path, parse_path

_HINT: Final = (
    "Return a tree of jax.ShapeDtypeStructs, whose shardings have the specs, or such a tree and a "
    "tree of PartitionSpecs."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLeaf:
    """An array of the tree, and where it lies on the cluster."""

    leaf: Leaf  # as stored by a save of the cluster
    spec: ArraySpec
    sharding: NamedSharding | None  # of the stored array; None for a value on the host


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTree:
    """The arrays of a tree on a cluster."""

    leaves: tuple[PlannedLeaf, ...]
    replicated: tuple[str, ...]  # leaves that are not split along some axis of their specs


Specs = Mapping[Path, Sequence[Any]]  # the entries of each leaf's PartitionSpec


def tree_at(path: str) -> tuple[object, Specs]:
    """Returns the tree of a checkpoint, without values, and the specs that it was saved with."""
    from jaxckpt._inspect.open import open as open_checkpoint

    ckpt = open_checkpoint(path)
    saved = {leaf.path: leaf.saved_sharding for leaf in ckpt.leaves.values()}
    return ckpt.abstract(), {parse_path(text): one.spec for text, one in saved.items() if one}


def tree_from(name: str) -> tuple[object, Specs]:
    """Calls `module:factory` and returns its tree and the specs of the leaves.

    Raises:
        ValueError: there is no such function, or it returns something else.
    """
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        made = _function(name)()
    finally:
        sys.path.remove(os.getcwd())
    tree, given = made, None
    if type(made) is tuple and len(made) == 2 and _are_specs(made[1]):
        tree, given = made
    return tree, _specs_of(tree, given, name)


def _function(name: str) -> Callable[[], Any]:
    module, _, factory = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), factory, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"{name}: there is no module {error.name} in {os.getcwd()}") from error
    if not callable(found):
        raise ValueError(f"{name}: the module {module} has no function {factory!r}")
    return found


def _are_specs(tree: object) -> bool:
    leaves = tree_util.tree_leaves(tree, is_leaf=_is_spec)
    return bool(leaves) and all(_is_spec(leaf) for leaf in leaves)


def _is_spec(node: object) -> bool:
    return node is None or isinstance(node, (PartitionSpec, Sharding))


def _specs_of(tree: object, given: object, name: str) -> Specs:
    chooser = ShardingChooser(mesh=None, shardings=given, saved=dict)
    choose, specs, paths = chooser.choose, {}, []
    for keys, value in tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)[0]:
        path = key_path(keys)
        paths.append(path)
        if not hasattr(value, "shape") and not is_empty(value) and not _is_scalar(value):
            raise ValueError(f"{name} returned a tree with {shown(value)}. {_HINT}")
        spec = choose and choose(path, getattr(value, "shape", ()), None)
        spec = getattr(value, "sharding", None) if spec is None else spec
        spec = getattr(spec, "spec", spec)
        if isinstance(spec, PartitionSpec):
            specs[path] = [*spec]
    chooser.check_names(paths)
    return specs


def _is_scalar(value: object) -> bool:
    return isinstance(value, (bool, int, float, complex, str, bytes))


def planned(tree: object, specs: Specs, cluster: Cluster) -> PlannedTree:
    """Places a tree on a cluster, and lays it out as a save does.

    An axis of a spec that the mesh lacks, or that does not divide its dimension, is left out.
    """
    flat = _flat(tree)
    saved = {leaf.name: _saved(specs[leaf.path], cluster) for leaf, _ in flat if leaf.path in specs}
    chooser = ShardingChooser(mesh=cluster.mesh, shardings=None, saved=lambda: saved)
    found: list[tuple[Leaf, ArraySpec, Any]] = []
    for leaf, value in flat:
        if value is None:
            continue
        sharding, placement = None, None
        if leaf.kind in ("array", "key"):
            sharding = chooser.sharding_of(leaf.path, leaf.name, leaf.shape, None, None)
            assert isinstance(sharding, NamedSharding)
            placement = placed(sharding, value.shape)
        dtype = dtype_of(leaf.dtype) if leaf.kind in ARRAY_KINDS else value.dtype
        name, itemsize = stored_dtype(dtype)
        spec = ArraySpec(shape=value.shape, dtype=name, itemsize=itemsize, placement=placement)
        found.append((leaf, spec, sharding))
    stored = plan_save([spec for _, spec, _ in found], process=0).stored
    leaves = tuple(
        PlannedLeaf(leaf=leaf._replace(stored=array), spec=spec, sharding=sharding)
        for (leaf, spec, sharding), array in zip(found, stored, strict=True)
    )
    return PlannedTree(leaves=leaves, replicated=tuple(chooser.replicated))


def _saved(spec: Sequence[Any], cluster: Cluster) -> SavedSharding:
    """Returns a spec as data, with axes that a mesh can match by name only."""
    entries = [None if axes is PartitionSpec.UNCONSTRAINED else axes for axes in spec]
    entries = [tuple(axes) if isinstance(axes, (list, tuple)) else axes for axes in entries]
    used = [name for axes in entries for name in (axes if isinstance(axes, tuple) else (axes,))]
    names = dict.fromkeys([*filter(None, used), *map(str, cluster.mesh.axis_names)])
    return SavedSharding(axis_names=tuple(names), spec=tuple(entries))


def _flat(tree: object) -> list[tuple[Leaf, Any]]:
    """Returns the leaves and arrays of a tree of `jax.ShapeDtypeStruct`s."""
    abstract: dict[int, Any] = {}

    def zeros(value: Any) -> object:
        if not isinstance(value, (jax.ShapeDtypeStruct, jax.Array)):
            return value
        data = value
        if is_key_dtype(value.dtype):
            data = jax.eval_shape(
                jax.random.key_data, jax.ShapeDtypeStruct(value.shape, value.dtype)
            )
        array = np.broadcast_to(np.zeros((), data.dtype), data.shape)
        abstract[id(array)] = value
        return array

    flat, values = flatten(tree_util.tree_map(zeros, tree, is_leaf=is_empty))
    leaves, arrays = [], iter(values)
    for leaf in flat.leaves():
        value = next(arrays) if leaf.has_array else None
        of = abstract.get(id(value))
        if of is not None and is_key_dtype(of.dtype):
            impl = str(of.dtype._impl.name)  # no public way from a dtype
            leaf = leaf._replace(kind="key", dtype=of.dtype.name, shape=of.shape, key_impl=impl)
        elif of is not None:
            leaf = leaf._replace(kind="array")
        leaves.append((leaf, value))
    return leaves
