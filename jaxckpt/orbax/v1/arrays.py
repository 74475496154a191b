"""Abstract arrays: a shape, a dtype and maybe a sharding."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import numpy as np

from jaxckpt.orbax._trees import sharding_of

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


def to_shape_dtype_struct(
    arr: Any, dtype: Any = None, scalar_dtype: Any = None, *, support_format: bool = False
) -> Any:
    """Returns the shape, dtype and sharding of an array; a number itself, maybe converted."""
    if isinstance(arr, (int, float, np.number)):
        return arr if scalar_dtype is None else scalar_dtype(arr)
    if isinstance(arr, jax.Array) and jax.numpy.issubdtype(arr.dtype, jax.dtypes.prng_key):
        arr = jax.random.key_data(arr)
    shape = getattr(arr, "shape", None) or getattr(arr, "global_shape", ())
    sharding = getattr(arr, "format", None) if support_format else sharding_of(arr)
    return jax.ShapeDtypeStruct(shape, dtype or arr.dtype, sharding=sharding)
