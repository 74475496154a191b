"""Trees as dicts from paths to leaves, and trees that can be serialized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxckpt.orbax._trees import by_name, is_empty, map_named, nested, plain


def to_flat_dict(
    tree: Any,
    sep: str | None = None,
    keep_empty_nodes: bool = False,
    is_leaf: Callable[[Any], bool] | None = None,
) -> dict[Any, Any]:
    """Returns the leaves by tuples of text, or by text joined with a separator."""
    flat = by_name(tree, is_leaf or (is_empty if keep_empty_nodes else None))
    return flat if sep is None else {sep.join(names): leaf for names, leaf in flat.items()}


def from_flat_dict(
    flat_dict: Mapping[Any, Any], target: Any = None, sep: str | None = None, **_: Any
) -> Any:
    """Returns a tree with these leaves, in the shape of the target or else of nested dicts."""
    leaves = {tuple(k.split(sep)) if sep else tuple(k): leaf for k, leaf in flat_dict.items()}
    return nested(leaves) if target is None else map_named(lambda names, _: leaves[names], target)


def serialize_tree(tree: Any, keep_empty_nodes: bool = False) -> Any:
    """Returns a tree of dicts and lists, which Orbax also restores without a target."""
    if not keep_empty_nodes and not jax.tree.leaves(tree):
        raise ValueError("Unable to reconstruct a tree without leaves.")
    found = plain(tree, keep_empty=keep_empty_nodes)
    return found if keep_empty_nodes else _without_empty(found)


def _without_empty(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_without_empty(below) for below in tree if jax.tree.leaves(below)]
    if not isinstance(tree, dict):
        return tree
    return {name: _without_empty(below) for name, below in tree.items() if jax.tree.leaves(below)}


def deserialize_tree(serialized: Any, target: Any, keep_empty_nodes: bool = False) -> Any:
    """Returns the leaves of a serialized tree in the shape of the target."""
    leaves = to_flat_dict(serialized, keep_empty_nodes=keep_empty_nodes)
    is_leaf = is_empty if keep_empty_nodes else None
    return map_named(lambda names, _: leaves[names], target, is_leaf)


def to_shape_dtype_struct(x: Any, dtype: Any = None, scalar_dtype: Any = None) -> Any:
    """Returns a description of an array; other leaves as they are."""
    if hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, np.generic):
        sharding: Any = getattr(x, "sharding", None)
        if hasattr(sharding, "to_jax_sharding"):  # from metadata
            sharding = sharding.to_jax_sharding()
        return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=sharding)
    return scalar_dtype(x) if scalar_dtype and isinstance(x, (int, float, np.number)) else x
