"""Types of trees, and merging them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxckpt.orbax._trees import by_name
from jaxckpt.orbax.v1.arrays import AbstractArray, AbstractShardedArray, Scalar

PyTree = Any
PyTreeKey = Any
PyTreeKeyPath = tuple[Any, ...]
JsonType = Any
Leaf = jax.Array | np.ndarray | Scalar | str
AbstractLeaf = AbstractArray | AbstractShardedArray | Scalar | str


class PyTreeOf:
    """A tree of leaves of one type, in annotations."""

    def __class_getitem__(cls, leaf: Any) -> Any:
        return PyTree


def merge(*trees: Any, overwrite: bool = False) -> Any:
    """Returns a tree with the leaves of all; sequences of one length are merged by position.

    Raises:
        ValueError: two trees have the same leaf, and `overwrite` is False.
    """
    merged = trees[0] if trees else {}
    for tree in trees[1:]:
        if not overwrite and (both := by_name(merged).keys() & by_name(tree).keys()):
            raise ValueError(f"Found common key paths when overwrite is False: {sorted(both)}")
        merged = _merged(merged, tree)
    return merged


def _merged(a: Any, b: Any) -> Any:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        both = a.keys() & b.keys()
        return {**a, **b, **{key: _merged(a[key], b[key]) for key in both}}
    if type(a) is type(b) and isinstance(a, (list, tuple)):
        if len(a) != len(b):
            raise ValueError(f"Sequence lengths do not match: {len(b)} and {len(a)}")
        items = [_merged(x, y) for x, y in zip(a, b, strict=True)]
        return type(a)(*items) if hasattr(a, "_fields") else type(a)(items)
    return b
