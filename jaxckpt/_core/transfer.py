"""Device to host and back. The only module that touches device buffers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxckpt._core import box as _box
from jaxckpt._core.box import Box
from jaxckpt._core.plan import SavePlan
from jaxckpt.format.arrays import dtype_of

if TYPE_CHECKING:  # imported where it is used: who reads to the host alone needs none
    import jax

# XLA's CPU client uses a host buffer in place if it is aligned like this, and copies it if not.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One shard that this process writes, or writes a part of.

    Attributes:
        array: Index of the array in the plan.
        shard: In the global array.
        position: Among the array's addressable shards; None for a value of the host.
        is_host_memory: Whether the shard is memory of the host already: there is nothing to copy.
        dtype: As stored.
    """

    array: int
    shard: Box
    position: int | None
    is_host_memory: bool
    dtype: np.dtype[Any]


def sources_of(
    values: Sequence[jax.Array | np.ndarray[Any, Any]], plan: SavePlan
) -> tuple[Source, ...]:
    """The distinct shards of a plan's writes; the same for all arrays that are sharded alike."""
    import jax

    alike: dict[tuple[Any, tuple[int, ...]], tuple[dict[Box, int], bool]] = {}
    sources = []
    for i, shard in dict.fromkeys((write.array, write.shard) for write in plan.writes):
        value, position, is_host_memory = values[i], None, True
        if isinstance(value, jax.Array):
            key = (value.sharding, value.shape)
            positions, is_host_memory = alike.get(key) or alike.setdefault(key, _positions(value))
            position = positions[shard]
        source = Source(
            array=i,
            shard=shard,
            position=position,
            is_host_memory=is_host_memory,
            dtype=dtype_of(plan.stored[i].dtype),
        )
        sources.append(source)
    return tuple(sources)


def stage(
    values: Sequence[jax.Array | np.ndarray[Any, Any]], sources: Sequence[Source], *, copy: bool
) -> list[np.ndarray[Any, Any]]:
    """Brings to the host what this process writes: an array for each source.

    Waits until the arrays are computed. When it returns, jax arrays may be donated or deleted: on
    CPU the snapshot refers to their buffers, which jax then leaves alone; from other devices the
    values are copied.

    Args:
        copy: Whether numpy arrays may change before the snapshot is written.
    """
    shards: list[Any] = [
        values[source.array]
        if source.position is None
        else values[source.array].addressable_data(source.position)  # pyright: ignore
        for source in sources
    ]
    # All copies are under way before the first is waited for.
    for source, shard in zip(sources, shards, strict=True):
        if not source.is_host_memory:
            shard.copy_to_host_async()
    snapshot = []
    for source, shard in zip(sources, shards, strict=True):
        host = np.array(shard) if copy and source.position is None else np.asarray(shard)
        snapshot.append(host if host.dtype == source.dtype else _as_stored(host, source.dtype))
    return snapshot


def _positions(value: jax.Array) -> tuple[dict[Box, int], bool]:
    """Where each distinct shard is in `addressable_shards`, and whether it is host memory."""
    shards = value.addressable_shards
    positions = {_box.from_index(shard.index, value.shape): i for i, shard in enumerate(shards)}
    return positions, all(shard.device.platform == "cpu" for shard in shards)


def _as_stored(host: np.ndarray[Any, Any], stored: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The values in the dtype and byte order that is stored; dtypes zarr lacks go as bytes."""
    if not host.dtype.isnative:
        return host.astype(stored)
    return np.ascontiguousarray(host).view(stored).reshape(host.shape)


def empty(shapes: Sequence[Sequence[int]], dtype: np.dtype[Any]) -> list[np.ndarray[Any, Any]]:
    """Uninitialised host memory that jax can use in place, for the shards of one array."""
    if len(shapes) == 1:  # most small arrays
        size = math.prod(shapes[0]) * dtype.itemsize
        raw = np.empty(size + _ALIGNMENT, np.uint8)
        start = -raw.__array_interface__["data"][0] % _ALIGNMENT
        return [raw[start : start + size].view(dtype).reshape(shapes[0])]
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    room = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    raw = np.empty(sum(room) + _ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % _ALIGNMENT
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

    Inside `placing`.
    """
    import jax

    if not buffers:  # all of it is on devices of other processes
        return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    return jax.make_array_from_callback(
        shape, sharding, lambda index: buffers[_box.from_index(index or (), shape)], dtype
    )


def to_default_device(values: np.ndarray[Any, Any]) -> jax.Array:
    """Makes an uncommitted jax.Array. Inside `placing`."""
    import jax

    return jax.device_put(values)


@contextlib.contextmanager
def placing() -> Iterator[None]:
    """While arrays go to devices: entering it takes as long as to place a small one.

    A 64-bit array stays one even where `jax_enable_x64` is off: values are never rounded.
    """
    import jax

    with jax.enable_x64(True), jax.transfer_guard("allow"):
        yield
