"""Helpers that programs import from `orbax.checkpoint.utils`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxckpt.format import names
from jaxckpt.orbax.multihost import *  # noqa: F403  # every public name
from jaxckpt.orbax.step import *  # noqa: F403
from jaxckpt.orbax.step import all_temporary_paths as tmp_checkpoints  # noqa: F401
from jaxckpt.orbax.step import is_path_finalized as is_checkpoint_finalized  # noqa: F401
from jaxckpt.orbax.step import is_path_temporary as is_tmp_checkpoint  # noqa: F401
from jaxckpt.orbax.tree import *  # noqa: F403

TMP_DIR_SUFFIX = names.TEMPORARY


def is_scalar(x: Any) -> bool:
    """Returns whether it is a number of Python or numpy."""
    return isinstance(x, (int, float, np.number))


def record_saved_duration(checkpoint_start_time: float) -> None:
    """Does nothing: `jaxckpt.CheckpointManager.timings` has the durations of saves."""


def fully_replicated_host_local_array_to_global_array(arr: jax.Array) -> jax.Array:
    """Returns an array that each device holds whole, such as from `pmap`, as a global one."""
    shards = sorted(arr.addressable_shards, key=lambda shard: shard.device.id)
    data = [shard.data for shard in shards]
    if data[0].shape != arr.shape:  # a leading dimension for the devices
        data = [one[0] for one in data]
    mesh = Mesh(np.array(jax.devices()), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_single_device_arrays(data[0].shape, sharding, data)
