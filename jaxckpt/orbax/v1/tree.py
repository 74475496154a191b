"""Types of trees."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

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
