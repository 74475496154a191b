"""Trees as dicts from paths to leaves, and trees that can be serialized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxckpt.orbax import _trees


def to_flat_dict(
    tree: Any,
    sep: str | None = None,
    keep_empty_nodes: bool = False,
    is_leaf: Callable[[Any], bool] | None = None,
) -> dict[Any, Any]:
    """Returns the leaves by tuples of text, or by text joined with a separator."""
    flat = _trees.by_name(tree, is_leaf or (_trees.is_empty if keep_empty_nodes else None))
    return flat if sep is None else {sep.join(names): leaf for names, leaf in flat.items()}


def from_flat_dict(
    flat_dict: Mapping[Any, Any], target: Any = None, sep: str | None = None, **_: Any
) -> Any:
    """Returns a tree with these leaves, in the shape of the target or else of nested dicts."""
    leaves = {tuple(k.split(sep)) if sep else tuple(k): leaf for k, leaf in flat_dict.items()}
    if target is None:
        return _trees.nested(leaves)
    return _trees.map_named(lambda names, _: leaves[names], target)


def serialize_tree(tree: Any, keep_empty_nodes: bool = False) -> Any:
    """Returns a tree of dicts and lists, which Orbax also restores without a target."""
    if not keep_empty_nodes and not jax.tree.leaves(tree):
        raise ValueError("Unable to reconstruct a tree without leaves.")
    found = _trees.plain(tree, keep_empty=keep_empty_nodes)
    return found if keep_empty_nodes else _without_empty(found)


def _without_empty(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_without_empty(below) for below in tree if jax.tree.leaves(below)]
    if not isinstance(tree, dict):
        return tree
    return {name: _without_empty(below) for name, below in tree.items() if jax.tree.leaves(below)}


def deserialize_tree(serialized: Any, target: Any, keep_empty_nodes: bool = False) -> Any:
    """Returns the leaves of a serialized tree in the shape of the target."""
    is_leaf = _trees.is_empty if keep_empty_nodes else None
    leaves = _trees.by_name(serialized, is_leaf)
    return _trees.map_named(lambda names, _: leaves[names], target, is_leaf)


def to_shape_dtype_struct(
    x: Any, dtype: Any = None, scalar_dtype: Any = None, support_format: bool = False
) -> Any:
    """Describes an array, and a key by its data; converts a number; other leaves as they are."""
    if isinstance(x, (int, float, np.number)):
        return x if scalar_dtype is None else scalar_dtype(x)
    if isinstance(x, np.generic) or not hasattr(x, "dtype"):
        return x
    x = _trees.as_data(x)
    shape = getattr(x, "shape", None) or getattr(x, "global_shape", ())
    sharding = getattr(x, "format", None) if support_format else _trees.sharding_of(x)
    return jax.ShapeDtypeStruct(shape, dtype or x.dtype, sharding=sharding)
