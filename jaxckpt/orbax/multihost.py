"""Processes, as programs ask for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import multihost_utils

BarrierSyncFn = Callable[..., Any]


process_index, process_count = jax.process_index, jax.process_count
broadcast_one_to_all = multihost_utils.broadcast_one_to_all


def is_primary_host(primary_host: int | None) -> bool:
    """Returns whether this process is the primary one."""
    return primary_host is None or primary_host == jax.process_index()


def is_pathways_backend() -> bool:
    """Returns False: jaxckpt does not run on Pathways."""
    return False


def is_jax_distributed_client_initialized() -> bool:
    """Returns whether this process is one of a distributed job."""
    return jax.distributed.is_initialized()


def sync_global_processes(name: str, **_: Any) -> None:
    """Waits until every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
