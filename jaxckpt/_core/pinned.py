"""Copies from accelerators to pinned host memory, which nobody waits for.

A device does what it is given in order: a copy that is enqueued before the computation that donates
or overwrites an array has the values of before. XLA keeps pinned memory and uses it again, so only
the first save pays for its allocation.

XLA's own pool is limited (on GPUs to 64 GB, or to `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB`), and
training needs it too. So all copies together take a part of it, and of the memory of the host.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from jaxckpt._core.log import logger
from jaxckpt._core.text import size_text

if TYPE_CHECKING:
    import jax
    from jax.sharding import Sharding

_KIND: Final = "pinned_host"
_POOL_GB: Final = 64.0
_SHARE: Final = 0.25  # of the pool and of the host's memory

_taken_bytes = 0
_lock = threading.Lock()  # guards `_taken_bytes`
# Bytes to give back: the garbage collector may call while this thread holds the lock.
_returned: deque[int] = deque()


def send(shards: Sequence[jax.Array | None]) -> list[jax.Array | None]:
    """Enqueues copies of arrays, each on one device, to pinned host memory.

    Returns:
        For each array its copy, on the way; None where there was none, or no place for it.
    """
    import jax

    sent: list[jax.Array | None] = [None] * len(shards)
    mine = [i for i, shard in enumerate(shards) if shard is not None and _target(shard)]
    if not (mine := mine[: _take([shards[i].nbytes for i in mine])]):  # pyright: ignore
        return sent
    arrays: list[Any] = [shards[i] for i in mine]
    try:
        copies = jax.device_put(arrays, [_target(array) for array in arrays])
    except BaseException as error:
        _returned.append(sum(array.nbytes for array in arrays))
        if not isinstance(error, RuntimeError):  # a full pool raises a plain RuntimeError
            raise
        logger.warning(
            "%s of pinned host memory were not to be had, so this save waits for its copies: %s",
            size_text(sum(array.nbytes for array in arrays)),
            error,
        )
        return sent
    for i, copy in zip(mine, copies, strict=True):
        weakref.finalize(copy, _returned.append, copy.nbytes).atexit = False
        sent[i] = copy
    return sent


def budget_bytes() -> int:
    """Returns how much pinned memory all copies together may take."""
    pool = _POOL_GB
    with contextlib.suppress(KeyError, ValueError):
        pool = float(os.environ["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"])
    most = int(pool * 2**30)
    with contextlib.suppress(ValueError, OSError, AttributeError):
        most = min(most, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return int(most * _SHARE)


def _take(sizes: Sequence[int]) -> int:
    """Takes memory for as many of the copies, in order, as fit; returns how many."""
    global _taken_bytes
    with _lock:
        while _returned:
            _taken_bytes -= _returned.popleft()
        free = budget_bytes() - _taken_bytes
        for n, size in enumerate(sizes):
            if size > free:
                return n
            free -= size
            _taken_bytes += size
    return len(sizes)


def _target(shard: jax.Array) -> Sharding | None:
    [device] = shard.sharding.device_set
    default, pinned = _places_on(device)
    return pinned if shard.sharding.memory_kind == default else None


@lru_cache(maxsize=1 << 12)  # of a `jax.Device`, which type checkers cannot resolve
def _places_on(device: Any) -> tuple[str, Sharding | None]:
    import jax

    kinds, pinned = {memory.kind for memory in device.addressable_memories()}, None
    if _KIND in kinds:
        pinned = jax.sharding.SingleDeviceSharding(device, memory_kind=_KIND)
    return device.default_memory().kind, pinned
