"""Copies between devices and the host. The only module that touches device buffers."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxckpt._core import box as _box
from jaxckpt._core import pinned
from jaxckpt._core.box import Box
from jaxckpt._core.cast import cast
from jaxckpt._core.plan import Chunks, SavePlan
from jaxckpt.format.arrays import dtype_of

if TYPE_CHECKING:  # imported where it is used: reading to the host works without jax
    import jax

# XLA's CPU client uses an aligned host buffer in place and copies any other.
_ALIGNMENT = 64
_HUGE_BYTES = 2 << 20
_LARGE_BYTES = 6 * _HUGE_BYTES  # two huge pages more are at most a third of it


class Shard(NamedTuple):
    """One shard of which this process writes all or a part."""

    array: int  # index of the array in the plan
    shard: Box  # in the global array
    position: int | None  # among the array's addressable shards; None for a value on the host
    is_host_memory: bool  # whether the shard is in host memory already and needs no copy
    dtype: np.dtype[Any]  # of the saved leaf
    stored: np.dtype[Any]  # of the zarr array


def sources_of(
    values: Sequence[jax.Array | np.ndarray[Any, Any]],
    dtypes: Sequence[np.dtype[Any]],
    plan: SavePlan,
    shares: Sequence[tuple[int, Chunks]],
) -> tuple[Shard, ...]:
    """Returns the distinct shards with some chunks, for arrays that are saved as `dtypes`.

    Args:
        shares: The chunks, by index of the array in the plan.
    """
    alike: dict[int, list[tuple[Any, ...]]] = {}  # arrays with one `ArraySpec` share the chunks
    sources = []
    for i, chunks in shares:
        if id(chunks) not in alike:
            stored = dtype_of(plan.stored[i].dtype)
            alike[id(chunks)] = _sources(values[i], chunks, dtypes[i], stored)
        sources += [Shard(i, *facts) for facts in alike[id(chunks)]]
    if plan.held_shares:
        sources = {(one.array, one.shard): one for one in sources}.values()
    return tuple(sources)


def _sources(value: Any, chunks: Chunks, *dtypes: np.dtype[Any]) -> list[tuple[Any, ...]]:
    """Returns the fields after the first of the shards with these chunks of an array."""
    import jax

    shards = dict.fromkeys(shard for _, shard in chunks)
    if not isinstance(value, jax.Array):
        return [(shard, None, True, *dtypes) for shard in shards]
    here = value.addressable_shards
    positions = {_box.from_index(one.index, value.shape): i for i, one in enumerate(here)}
    # An array of this process alone is one chunk, whose shards are put together on the host.
    return [
        (shard, positions.get(shard), shard not in positions or on_host(here), *dtypes)
        for shard in shards
    ]


def stage(
    values: Sequence[jax.Array | np.ndarray[Any, Any]], sources: Sequence[Shard], *, copy: bool
) -> list[Any]:
    """Takes the shards that this process writes: one value per source, for `arrived`.

    After the return, jax arrays may be donated or deleted. Accelerators copy to pinned host memory
    in the order in which work is enqueued, so before any computation that overwrites an array. The
    call does not wait for these copies, nor for the arrays to be computed. It waits for arrays
    that do not fit into the budget of pinned memory or are cast. On CPU the snapshot refers to the
    buffers of arrays, which jax then leaves alone.

    Args:
        copy: Whether numpy arrays may change before the snapshot is written.

    Raises:
        TreeMismatch: a value does not fit the dtype to save it as; names the array's index.
    """
    import jax

    shards: list[Any] = [
        values[source.array]
        if source.position is None
        else values[source.array].addressable_data(source.position)  # pyright: ignore
        for source in sources
    ]
    away = [
        None if source.is_host_memory or shard.dtype.name != source.dtype.name else shard
        for source, shard in zip(sources, shards, strict=True)
    ]
    snapshot: list[Any] = pinned.send(away) if any(one is not None for one in away) else away
    # Start all other copies before waiting for the first.
    for source, shard, sent in zip(sources, shards, snapshot, strict=True):
        if sent is None and not source.is_host_memory:
            shard.copy_to_host_async()
    with jax.transfer_guard_device_to_host("allow"):
        for i, (source, shard) in enumerate(zip(sources, shards, strict=True)):
            if snapshot[i] is None:
                host = np.array(shard) if copy and source.position is None else np.asarray(shard)
                snapshot[i] = host if host.dtype == source.stored else _as_stored(host, source)
    return snapshot


def arrived(snapshot: Sequence[Any], sources: Sequence[Shard]) -> list[Any]:
    """Waits until all that `stage` took is on the host, and returns it; raises if a copy failed."""
    import jax

    found = []
    with jax.transfer_guard_device_to_host("allow"):
        for source, value in zip(sources, snapshot, strict=True):
            if value is None:  # was not to be copied
                found.append(value)
                continue
            host = np.asarray(value)
            found.append(host if host.dtype == source.stored else _as_stored(host, source))
    return found


def detached(value: Any) -> Any:
    """Copies a replicated array, which may then be changed or donated; waits for no computation."""
    import jax

    if not isinstance(value, jax.Array):
        return np.array(value) if hasattr(value, "__array__") else value
    if not (shards := value.addressable_shards):
        return value
    return jax.device_put(shards[0].data, may_alias=False)


def on_host(shards: Sequence[jax.Shard]) -> bool:
    """Returns whether shards are in host memory already."""
    return all(shard.device.platform == "cpu" for shard in shards)


def _as_stored(host: np.ndarray[Any, Any], source: Shard) -> np.ndarray[Any, Any]:
    """Converts to the saved dtype, in native byte order; dtypes that zarr lacks become bytes."""
    if host.dtype.name == source.dtype.name:
        host = host.astype(source.dtype, copy=False)
    else:
        host = cast(host, source.dtype, leaf=str(source.array), where="the tree")
    return np.ascontiguousarray(host).view(source.stored).reshape(host.shape)


def in_place(size: int) -> int:
    """Returns the bytes that a buffer takes in memory, such that jax can use the next in place."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def empty(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns uninitialised host memory that jax can use in place; if large, in huge pages.

    A huge page takes one page fault instead of 512. numpy asks for them from 4 MiB on, and the
    kernel gives them where 2 MiB begin and end in the memory.
    """
    step = _HUGE_BYTES if size >= _LARGE_BYTES else _ALIGNMENT
    raw = np.empty(-(-size // step) * step + step, np.uint8)
    start = -raw.__array_interface__["data"][0] % step
    return raw[start : start + size]


@lru_cache(maxsize=1 << 14)
def boxes_here(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """Returns the distinct shards on this process's devices."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    return tuple(dict.fromkeys(_box.from_index(index or (), shape) for index in indices))


def to_device(buffers: Sequence[np.ndarray[Any, Any]], alike: PlacedAlike) -> jax.Array:
    """Makes a jax.Array of the shards in `boxes_here`, inside `placing`.

    The buffers must not change afterwards.
    """
    if alike.aval is not None and buffers[0].dtype == alike.dtype:  # as all of them
        return alike.put(alike.aval, alike.sharding, alike.pick(buffers), alike.devices)
    import jax

    sharding, shape, dtype = alike.sharding, alike.shape, alike.dtype
    if not buffers:  # all shards are on devices of other processes
        return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    parts = dict(zip(boxes_here(sharding, shape), buffers, strict=True))
    value = jax.make_array_from_callback(
        shape, sharding, lambda index: parts[_box.from_index(index or (), shape)], dtype
    )
    alike.aval = None if alike.put is None else value.aval
    return value


@dataclass(slots=True)
class PlacedAlike:
    """The facts that arrays of one sharding, shape and dtype share."""

    sharding: jax.sharding.Sharding
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pick: Callable[[Sequence[Any]], Any]  # returns the shard of each device
    devices: list[Any]
    put: Any  # the call of jaxlib in which jax's own functions end; None if it lacks that
    aval: Any = None  # once there is one


@lru_cache(maxsize=1 << 12)
def placed_alike(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> PlacedAlike:
    from jaxlib import xla_client

    indices, here = sharding.addressable_devices_indices_map(shape), boxes_here(sharding, shape)
    order = [here.index(_box.from_index(index or (), shape)) for index in indices.values()]
    pick = itemgetter(*order) if len(order) > 1 else tuple
    put = getattr(xla_client, "batched_device_put", None)
    return PlacedAlike(sharding, shape, dtype, pick, [*indices], put)


def in_layout(value: jax.Array, layout: Any) -> jax.Array:
    """Puts an array into a layout; each process its own shards, so that none waits for another."""
    import jax
    from jax.experimental.layout import Format

    def put(shard: Any) -> jax.Array:  # a jax.Array
        there = shard.format.layout
        is_tiled_so = layout.tiling is None or there.tiling == layout.tiling
        is_so = there.major_to_minor == layout.major_to_minor and is_tiled_so
        return shard if is_so else jax.device_put(shard, Format(layout, shard.sharding))

    shards = [put(shard.data) for shard in value.addressable_shards]
    return jax.make_array_from_single_device_arrays(
        value.shape, value.sharding, shards, dtype=value.dtype
    )


def to_default_device(values: np.ndarray[Any, Any]) -> jax.Array:
    """Makes an uncommitted jax.Array, inside `placing`."""
    import jax

    return jax.device_put(values)


class Arriving:
    """Copies to accelerators that nobody waits for yet, of a bounded size.

    On a GPU, XLA's own threads copy a host buffer to pinned memory of its size, and that to the
    device; both are held until it has arrived (`BufferFromHostBuffer` in XLA's
    pjrt_stream_executor_client.cc). So the next leaves are read in the meantime.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._under_way: deque[tuple[jax.Array, int]] = deque()
        self._taken_bytes = 0

    def add(self, value: Any) -> None:
        """Takes a value that was placed, and waits for older values if it does not fit yet."""
        from jax import Array

        if isinstance(value, Array) and is_away(value.sharding):
            copied = sum(shard.data.nbytes for shard in value.addressable_shards)
            size_bytes = copied + min(copied, value.nbytes)  # XLA's copies, and the distinct shards
            self._under_way.append((value, size_bytes))
            self._taken_bytes += size_bytes
            while self._taken_bytes > self._most_bytes:
                self._wait()

    def finish(self) -> None:
        """Waits for all; a failed copy raises."""
        while self._under_way:
            self._wait()

    def _wait(self) -> None:
        value, size_bytes = self._under_way.popleft()
        if not value.is_deleted():  # as one that has moved on
            value.block_until_ready()
        self._taken_bytes -= size_bytes


@lru_cache(maxsize=1 << 12)
def is_away(where: Any) -> bool:  # a sharding, a device or the name of a platform
    """Returns whether the devices have memory of their own."""
    devices = getattr(where, "addressable_devices", [where])
    return any(getattr(device, "platform", device) != "cpu" for device in devices)


@contextlib.contextmanager
def placing() -> Iterator[None]:
    """Wraps transfers to devices; entering it costs as much as placing a small array."""
    import jax

    # Keeps 64-bit arrays even if `jax_enable_x64` is off: values are never rounded.
    with jax.enable_x64(True), jax.transfer_guard("allow"):
        yield
