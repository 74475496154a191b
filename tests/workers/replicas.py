"""Saves arrays replicated over the processes, of which one has another bit."""

from __future__ import annotations

import numpy as np

from jaxckpt import CheckpointManager, SavePolicy


def save_bad(me, root, bad, axes):
    """Saves a good step and one in which the process `bad` has flipped a bit on one device.

    Returns:
        What the manager says, the step restored afterwards and the bad device's id.
    """
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = np.array(jax.devices()).reshape(2, -1)
    sharding = NamedSharding(Mesh(devices, ("x", "y")), PartitionSpec(*axes))
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    victim = jax.local_devices()[-1]

    def put(flips):
        shards = []
        for device, index in sharding.addressable_devices_indices_map(values.shape).items():
            data = values[index].copy()
            if flips and me.index == bad and device == victim:
                data.view(np.uint8)[0, 0] ^= 1
            shards.append(jax.device_put(data, device))
        return jax.make_array_from_single_device_arrays(values.shape, sharding, shards)

    with CheckpointManager(root, save=SavePolicy(check_replicas=1)) as manager:
        manager.save(1, {"a": put(False), "b": put(False)})
        manager.save(2, {"a": put(False), "b": put(True)})
        manager.wait_until_finished()
        problems = list(manager.problems)
    with CheckpointManager(root, mode="r") as manager:
        manager.restore()
        return {"problems": problems, "restored": manager.restored_step, "device": victim.id}
