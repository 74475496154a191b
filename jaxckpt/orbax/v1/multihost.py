"""Questions about the processes of a job, under Orbax's names."""

from typing import Any

from jaxckpt.orbax import multihost
from jaxckpt.orbax.multihost import is_pathways_backend as is_pathways_backend
from jaxckpt.orbax.multihost import is_primary_host as is_primary_host
from jaxckpt.orbax.multihost import process_count as process_count
from jaxckpt.orbax.multihost import process_index as process_index


async def sync_global_processes(name: str, **_: Any) -> None:
    """Waits until every process has called it with this name."""
    multihost.sync_global_processes(name)
