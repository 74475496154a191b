"""Device to host and back. The only module that touches device buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxckpt import _box
from jaxckpt._box import Box
from jaxckpt._plan import SavePlan

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
    shards = {
        key: _shard_of(values[key[0]], key[1]) if isinstance(values[key[0]], jax.Array) else None
        for key in needed
    }
    for shard in shards.values():
        if shard is not None:
            shard.copy_to_host_async()
    snapshot = HostSnapshot()
    for (i, box), shard in shards.items():
        value = values[i]
        if shard is not None:
            host = np.asarray(shard)
        else:
            host = np.array(value, copy=True) if copy else np.asarray(value)
        snapshot.shards[i, box] = _as_stored(host, plan.stored[i].dtype)
    return snapshot


def _shard_of(value: Any, box: Box) -> jax.Array:  # jax.Array
    for shard in value.addressable_shards:
        if _box.from_index(shard.index, value.shape) == box:
            return shard.data
    raise AssertionError(f"no device of this process holds {box}")


def _as_stored(host: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """The values in the dtype and byte order that is stored; dtypes zarr lacks go as bytes."""
    if host.dtype.name != dtype:
        return np.ascontiguousarray(host).view(np.dtype(dtype)).reshape(host.shape)
    return host if host.dtype.isnative else host.astype(host.dtype.newbyteorder("="))


def empty(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Uninitialised host memory that jax can use in place."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def shards_here(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> dict[Box, list[Any]]:
    """The distinct shards that this process's devices hold, and which devices hold each."""
    devices: dict[Box, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        devices.setdefault(_box.from_index(index or (), shape), []).append(device)
    return devices


def to_device(
    buffers: Mapping[Box, np.ndarray[Any, Any]],
    sharding: jax.sharding.Sharding,
    shape: tuple[int, ...],
) -> jax.Array:
    """Makes a jax.Array of the shards that this process holds. The buffers must not change after.

    A 64-bit array stays one even where `jax_enable_x64` is off: values are never rounded.
    """
    dtype = next(iter(buffers.values())).dtype if buffers else None
    with jax.enable_x64(True):
        parts = [
            jax.device_put(buffers[box], _single(device, sharding))
            for box, devices in shards_here(sharding, shape).items()
            for device in devices
        ]
        return jax.make_array_from_single_device_arrays(shape, sharding, parts, dtype=dtype)


def _single(device: Any, sharding: jax.sharding.Sharding) -> Any:  # jax's union
    kind = sharding.memory_kind
    if kind is None or kind == device.default_memory().kind:
        return device
    return jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
