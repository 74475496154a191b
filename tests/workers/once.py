"""Jobs that read each stored value once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

import jaxckpt
from tests.workers.saves import mesh_of


def read_so_far():
    """The bytes that this process has read by system calls, as the kernel counts them."""
    return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])


def restore_each(me, path, wanted, options: dict[str, Any] | None = None):
    """Restores leaves, each alone; says what was read and moved, and whether the bits are right.

    Args:
        wanted: The axes of the mesh and the spec of each leaf, by name.
    """
    import jax

    host = jaxckpt.restore(path, as_numpy=True)
    found = {}
    for name, (axes, spec) in wanted.items():
        mesh, want = mesh_of(**axes), host[name]
        spec = [tuple(axis) if isinstance(axis, list) else axis for axis in spec]
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        like = {name: jax.ShapeDtypeStruct(want.shape, want.dtype, sharding=sharding)}
        reports, before = [], read_so_far()
        chosen: dict[str, Any] = options or {"read_once": True}
        got = jaxckpt.restore(path, like, only=[name], report=reports.append, **chosen)[name]
        read = read_so_far() - before
        found[name] = {
            "same": got.dtype == want.dtype
            and got.sharding == sharding
            and all(
                np.asarray(shard.data).tobytes() == want[shard.index].tobytes()
                for shard in got.addressable_shards
            ),
            "kernel": read,
            "once": list(reports[0].read_once),
            "job": reports[0].job_bytes,
            "moved": reports[0].moved_bytes,
            "size": want.nbytes,
        }
    return found
