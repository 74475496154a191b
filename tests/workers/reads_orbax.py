"""Restores the golden samples and checkpoints from the tests on other numbers of devices."""

from __future__ import annotations

import warnings
from pathlib import Path

import jax
import numpy as np

import jaxckpt
from tests.golden import compare
from tests.golden.fixture import load_sample


def restore_samples(me, roots):
    """Returns the problems of each sample, by its name."""
    warnings.simplefilter("error")
    wrong = {}
    for root in map(Path, roots):
        sample = load_sample(root)
        tree = jaxckpt.restore(sample.path, item=sample.about.get("item"))
        found = compare.problems(sample, _whole(tree))
        if found:
            wrong[sample.name] = found
    return wrong


def _whole(tree):
    """Arrays that lie in several processes, gathered; the others as they are."""
    from jax.experimental import multihost_utils

    def gather(leaf):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            return leaf
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = multihost_utils.process_allgather(jax.random.key_data(leaf), tiled=True)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return jax.device_put(
            np.asarray(multihost_utils.process_allgather(leaf, tiled=True)), jax.local_devices()[0]
        )

    return jax.tree.map(gather, tree)


def _tree():
    mesh = jax.make_mesh((2, 4), ("x", "y"))

    def put(value, *spec):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return {
        "both": put(np.arange(64, dtype=np.float32).reshape(8, 8), "x", "y"),
        "one": put(np.arange(4096, dtype=np.int32).reshape(8, 512), None, "y"),
        "all": put(np.arange(1 << 19, dtype=np.float32)),
        "host": np.arange(5.0),
        "step": 7,
        "name": "two",
    }


def _wrong(got):
    """Returns the leaves whose values here, or whose sharding, differ from `_tree`."""
    want = _tree()
    wrong = [name for name in want if name not in got]
    for name in set(want) - set(wrong):
        a, b = got[name], want[name]
        if isinstance(b, jax.Array):
            same = a.sharding == b.sharding and all(
                np.array_equal(x.data, y.data)
                for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True)
            )
        else:
            same = type(a) is type(b) and np.array_equal(a, b)
        wrong += [] if same else [name]
    return wrong


def ours_to_orbax(me, root, compression):
    """Saves with jaxckpt, restores with Orbax and jaxckpt; returns what is wrong."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint import v1

    jaxckpt.save(f"{root}/3", _tree(), compression=compression)
    with ocp.CheckpointManager(root) as manager:
        managed = manager.restore(3)["state"]
    return [
        _wrong(got)
        for got in (
            ocp.PyTreeCheckpointer().restore(f"{root}/3/state"),
            managed,
            v1.load(f"{root}/3"),
            jaxckpt.restore(f"{root}/3"),
        )
    ]


def orbax_to_ours(me, root):
    """Saves with Orbax, restores with jaxckpt; returns what is wrong."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint import v1

    ocp.PyTreeCheckpointer().save(f"{root}/old", _tree())
    v1.save(f"{root}/new", _tree())
    return [_wrong(jaxckpt.restore(f"{root}/{name}")) for name in ("old", "new")]
