"""One bit flips in one of the replicas of a shard, before it is saved: it is found and named."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt._save.replicas import Replicas
from jaxckpt._save.tree_plan import plan_tree
from jaxckpt.multihost import Single
from tests.multiprocess import Job

DTYPES = ["bool", "int8", "uint16", "bfloat16", "float8_e4m3fn", "float32", "complex64", "int4"]
BITS = {"bool": 1, "int4": 4}  # of a byte in memory
SPECS = [P(), P("x"), P("y"), P(None, "x")]


def differences(values):
    found = Replicas(Single())
    found.add(*plan_tree(values, Single()))
    found.compare()
    return found.differences


def drawn(mesh, draw, *, flips):
    """A small tree of any dtypes and shardings; which leaf and device has another bit."""
    tree, bad = {}, (draw.randrange(4), draw.randrange(8))
    for i in range(4):
        sharding = NamedSharding(mesh, draw.choice(SPECS))
        values = np.array([draw.randrange(2) for _ in range(64)]).reshape(8, 8)
        value = jax.device_put(jnp.asarray(values, draw.choice(DTYPES)), sharding)
        shards = []
        for shard in value.addressable_shards:
            data = np.array(shard.data)
            if flips and bad == (i, shard.device.id):
                bits = BITS.get(data.dtype.name, 8)
                at = draw.randrange(data.nbytes)
                data.reshape(-1).view(np.uint8)[at] ^= 1 << draw.randrange(bits)
            shards.append(jax.device_put(data, shard.device))
        tree[f"w{i}"] = jax.make_array_from_single_device_arrays((8, 8), sharding, shards)
    return tree, bad


def test_a_flipped_bit_is_found_in_each_of_100_trees(trial, mesh):
    for seed in range(100):
        with trial("54", f"seed {seed}"):
            tree, (leaf, device) = drawn(mesh, random.Random(seed), flips=True)
            (text,) = differences(tree)
            assert text.startswith(f"leaf w{leaf} has other bits on device")
            assert str(device) in text.replace(",", "").split()


@pytest.mark.slow
def test_nothing_is_found_in_10_000_clean_trees(mesh):
    tree, _ = drawn(mesh, random.Random(0), flips=False)
    for seed in range(10_000):
        if seed % 100 == 0:
            tree, _ = drawn(mesh, random.Random(seed), flips=False)
        assert (
            differences(jax.tree.map(lambda x: x | 0 if x.dtype.kind in "biu" else x + 0, tree))
            == []
        )


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("axes", [[], [None, "y"]], ids=["replicated", "sharded"])
def test_it_is_found_over_real_processes(trial, ram_path, count, axes):
    """Replicated on all devices; or sharded over y, with the replicas on x."""
    bad = count - 1
    with trial("54", f"{count} processes, {axes}"):
        job = Job(
            "replicas:save_bad",
            count=count,
            devices_per_process=8 // count,
            args=[ram_path, bad, axes],
        )
        with job:
            said = [done.result for done in job.wait()]
        assert {one["restored"] for one in said} == {1}
        (text,) = said[0]["problems"]
        assert all(one["problems"] == [text] for one in said)
        assert "leaf b has other bits" in text
        assert "leaf a" not in text
        assert f"process {bad}" in text
        assert str(said[bad]["device"]) in text.replace(",", " ").split()
