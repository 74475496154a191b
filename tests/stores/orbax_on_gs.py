"""Orbax in a process of its own: fsspec reads where the store is when it is imported.

    python -m tests.stores.orbax_on_gs write gs://bucket/dir
    python -m tests.stores.orbax_on_gs read gs://bucket/dir
    python -m tests.stores.orbax_on_gs time gs://bucket/dir

prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from time import perf_counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

# What `read` reads: directories, and the item that the tree is saved as.
ITEMS = {"whole": "state", "flat": None, "named": "default"}


def run_orbax(verb, root, server):
    """Lets Orbax read or write everything below a directory, and returns what it found."""
    env = {
        **os.environ,
        **server.env,
        "STORAGE_EMULATOR_HOST": server.url,
        "FSSPEC_GS_TOKEN": "anon",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # else it tries gRPC for a minute first
    }
    command = [sys.executable, "-W", "ignore", "-m", __name__, verb, root]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def state(step):
    """A state of training: a sharded array, what optax adds, and a number."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    values = np.random.default_rng(step).standard_normal((64, 32), np.float32)
    w = jax.device_put(values, NamedSharding(mesh, PartitionSpec("x", "y")))
    params = {"dense": {"kernel": w, "bias": jnp.full(7, step, jnp.bfloat16)}}
    return {"params": params, "opt": optax.adam(1e-3).init(params), "step": jnp.int32(step)}


def like():
    """What `state` returns, without values."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0)
    )


def is_state(found, step):
    """Whether a tree is a state, bit for bit, with its types and shardings."""
    wanted = state(step)
    if jax.tree.structure(found) != jax.tree.structure(wanted):
        return False
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return all(
        a.dtype == b.dtype and a.sharding == b.sharding and bits(a) == bits(b) for a, b in pairs
    )


def bits(leaf):
    return np.asarray(leaf).tobytes()


def write(root):
    """Saves with every checkpointer of Orbax, and two runs of three steps."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint import v1

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{root}/StandardCheckpointer", state(1))
    ocp.PyTreeCheckpointer().save(f"{root}/PyTreeCheckpointer", state(1))
    v1.save(f"{root}/v1", state(1))
    with ocp.CheckpointManager(f"{root}/run0") as manager:
        for step in (1, 2, 3):
            manager.save(step, args=ocp.args.StandardSave(state(step)))
    with v1.training.Checkpointer(f"{root}/run1") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step))


def read(root):
    """Reads what jaxckpt saved in each layout; of a run, the steps and the newest one."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint import v1

    target, args = like(), ocp.args.StandardRestore(like())
    restore_args = ocp.checkpoint_utils.construct_restore_args(target)
    found = {}
    for name, item in ITEMS.items():
        inside = f"{root}/{name}" if item is None else f"{root}/{name}/{item}"
        with ocp.StandardCheckpointer() as checkpointer:
            found[f"{name}, StandardCheckpointer"] = checkpointer.restore(inside, target)
        found[f"{name}, PyTreeCheckpointer"] = ocp.PyTreeCheckpointer().restore(
            inside, item=target, restore_args=restore_args
        )
        named = {"checkpointable_name": item} if item == "default" else {}
        found[f"{name}, v1"] = v1.load(f"{root}/{name}", target, **named)
        found[f"{name}, load_pytree"] = v1.load_pytree(f"{root}/{name}", target, **named)
    found = {name: is_state(tree, 1) for name, tree in found.items()}
    for run, one in {"run": ocp.args.Composite(state=args), "run default": args}.items():
        with ocp.CheckpointManager(f"{root}/{run}") as manager:
            tree = manager.restore(manager.latest_step(), args=one)
            tree = tree if run == "run default" else tree.state
            found[run] = is_state(tree, 2)
            found[f"{run}, steps"] = manager.all_steps()
            found[f"{run}, metrics"] = manager.metrics(2)
    with v1.training.Checkpointer(f"{root}/run") as checkpointer:
        found["run, v1, steps"] = [one.step for one in checkpointer.checkpoints]
        found["run, v1"] = is_state(checkpointer.load(2, target), 2)
    return found


def time(root, repeats=5):
    """Saves and restores a small step several times; returns the seconds of each call."""
    import orbax.checkpoint as ocp

    tree = {"w": np.arange(1 << 14, dtype=np.float32), "step": 3}
    found = {"save": [], "restore": [], "latest_step": []}

    def note(name, call):
        start_s = perf_counter()
        call()
        found[name].append(perf_counter() - start_s)

    with ocp.CheckpointManager(f"{root}/run") as manager:

        def save(step):
            manager.save(step, args=ocp.args.StandardSave(tree))
            manager.wait_until_finished()

        for step in range(repeats + 1):
            note("save", partial(save, step))
            args = ocp.args.StandardRestore(tree)
            note("restore", partial(manager.restore, step, args=args))
        for _ in range(repeats):  # read=True: as the others do, asks the store
            note("latest_step", partial(manager.all_steps, read=True))
    return {name: seconds[1:] for name, seconds in found.items()}


if __name__ == "__main__":
    print(json.dumps({"write": write, "read": read, "time": time}[sys.argv[1]](sys.argv[2])))
