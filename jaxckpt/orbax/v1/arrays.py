"""Abstract arrays: a shape, a dtype and maybe a sharding."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from jaxckpt.orbax.tree import to_shape_dtype_struct as to_shape_dtype_struct

Shape = tuple[int, ...]
DType = np.dtype
Scalar = int | float | np.number | bytes | bool
AbstractScalar = Scalar


class AbstractArray(Protocol):
    """Asks for a numpy array."""

    shape: Shape | None
    dtype: Any


class AbstractShardedArray(Protocol):
    """Asks for a `jax.Array`."""

    shape: Shape | None
    dtype: Any
    sharding: Any


ArrayLike = AbstractArray | AbstractShardedArray
