"""Device to host and back. The only module that touches device buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from jaxckpt import _box
from jaxckpt._box import Box
from jaxckpt._plan import SavePlan
from jaxckpt.format.arrays import dtype_of

# XLA's CPU client uses a host buffer in place if it is aligned like this, and copies it if not.
_ALIGNMENT = 64


@dataclass(slots=True)
class HostSnapshot:
    """The values that this process writes, as they were when the save was called.

    Attributes:
        shards: By index of the array in the plan, and shard.
    """

    shards: dict[tuple[int, Box], np.ndarray[Any, Any]] = field(default_factory=dict)

    def take(self, array: int, shard: Box, box: Box) -> np.ndarray[Any, Any]:
        """The part `box` of a shard."""
        return self.shards[array, shard][box.within(shard)]


def stage(
    values: Sequence[jax.Array | np.ndarray[Any, Any]], plan: SavePlan, *, copy: bool
) -> HostSnapshot:
    """Brings to the host what this process writes.

    Waits until the arrays are computed. When it returns, jax arrays may be donated or deleted: on
    CPU the snapshot refers to their buffers, which jax then leaves alone; from other devices the
    values are copied.

    Args:
        copy: Whether numpy arrays may change before the snapshot is written.
    """
    needed = dict.fromkeys((write.array, write.shard) for write in plan.writes)
    positions: dict[tuple[Any, tuple[int, ...]], dict[Box, int]] = {}
    shards: dict[tuple[int, Box], jax.Array | None] = {}
    for i, box in needed:
        value = values[i]
        shards[i, box] = None
        if isinstance(value, jax.Array):
            key = (value.sharding, value.shape)
            here = positions.get(key) or positions.setdefault(key, _positions(value))
            shards[i, box] = value.addressable_shards[here[box]].data
    for shard in shards.values():
        if shard is not None:
            shard.copy_to_host_async()
    snapshot = HostSnapshot()
    for (i, box), shard in shards.items():
        if shard is not None:
            host = np.asarray(shard)
        else:
            host = np.array(values[i], copy=True) if copy else np.asarray(values[i])
        snapshot.shards[i, box] = _as_stored(host, plan.stored[i].dtype)
    return snapshot


def _positions(value: jax.Array) -> dict[Box, int]:
    """Where each distinct shard is in `addressable_shards`: alike for all arrays so sharded."""
    shards = value.addressable_shards
    return {_box.from_index(shard.index, value.shape): i for i, shard in enumerate(shards)}


def _as_stored(host: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """The values in the dtype and byte order that is stored; dtypes zarr lacks go as bytes."""
    stored = dtype_of(dtype)
    if host.dtype == stored:
        return host
    if not host.dtype.isnative:
        return host.astype(stored)
    return np.ascontiguousarray(host).view(stored).reshape(host.shape)


def empty(shapes: Sequence[Sequence[int]], dtype: np.dtype[Any]) -> list[np.ndarray[Any, Any]]:
    """Uninitialised host memory that jax can use in place, for the shards of one array."""
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    room = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    raw = np.empty(sum(room) + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    arrays = []
    for shape, size, taken in zip(shapes, sizes, room, strict=True):
        arrays.append(raw[start : start + size].view(dtype).reshape(shape))
        start += taken
    return arrays


@lru_cache(maxsize=1 << 14)
def boxes_here(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """The distinct shards that this process's devices hold."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    return tuple(dict.fromkeys(_box.from_index(index or (), shape) for index in indices))


def to_device(
    buffers: Mapping[Box, np.ndarray[Any, Any]],
    sharding: jax.sharding.Sharding,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
) -> jax.Array:
    """Makes a jax.Array of the shards that this process holds. The buffers must not change after.

    A 64-bit array stays one even where `jax_enable_x64` is off: values are never rounded.
    """
    with jax.enable_x64(True), jax.transfer_guard("allow"):
        if not buffers:  # all of it is on devices of other processes
            return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
        return jax.make_array_from_callback(
            shape, sharding, lambda index: buffers[_box.from_index(index or (), shape)], dtype
        )
