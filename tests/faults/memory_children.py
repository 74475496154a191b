"""Saves and restores in a cgroup with a memory limit of 1.3 times the state."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.faults.zygote import say

LEAVES = 8
SHAPE = (1024, 12_800)  # float32: 50 MiB
STATE_BYTES = LEAVES * 4 * SHAPE[0] * SHAPE[1]
ROOM = 1.3


def mesh_of(x, y):
    import jax

    return jax.sharding.Mesh(np.array(jax.devices()).reshape(x, y), ("x", "y"))


def make(mesh, shape=SHAPE, leaves=LEAVES):
    """A state on all devices, made there: the host has no copy."""
    import jax
    import jax.numpy as jnp

    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
    leaf = jax.jit(
        lambda n: jnp.arange(shape[1], dtype=np.float32) + n * jnp.arange(shape[0])[:, None] % 977,
        out_shardings=sharding,
    )
    return jax.block_until_ready({f"w{n}": leaf(np.float32(n)) for n in range(leaves)})


def check(state):
    """Compares each shard with what it was made of; a shard at a time."""
    assert len(state) == LEAVES
    for n in range(LEAVES):
        for shard in state[f"w{n}"].addressable_shards:
            rows, columns = (np.arange(SHAPE[at])[shard.index[at]] for at in (0, 1))
            rest = (np.float32(n) * rows.astype(np.float32))[:, None] % np.float32(977)
            assert np.array_equal(
                np.asarray(shard.data), columns.astype(np.float32)[None, :] + rest
            )


class Group:
    """The cgroup of a child."""

    def __init__(self, path):
        self._path = Path(path)
        self._is_v2 = (self._path / "memory.max").exists()

    def enter(self):
        (self._path / "cgroup.procs").write_text("0")

    def used(self):
        """Returns the memory that is not page cache, in bytes."""
        facts = dict(line.split() for line in self._read("memory.stat").splitlines())
        return int(facts["anon" if self._is_v2 else "rss"])

    def limit(self, size):
        for name in ("memory.swap.max", "memory.max") if self._is_v2 else (self._limit_name,):
            if (self._path / name).exists():
                (self._path / name).write_text("0" if "swap" in name else str(size))

    _limit_name = "memory.limit_in_bytes"

    def peak(self):
        return int(self._read("memory.peak" if self._is_v2 else "memory.max_usage_in_bytes"))

    def _read(self, name):
        return (self._path / name).read_text()


def try_in(group, path, what):
    """Runs one action under the limit; reports if it survives.

    what: "save", "save_async", "manager", "restore", "like", "mesh", "verify"; "copy" is a control.
    """
    import jax

    import jaxckpt

    group = Group(group)
    group.enter()
    mesh = mesh_of(4, 2)
    jaxckpt.save(f"{path}/warm", make(mesh, (8, 8)))  # the threads and pools that all of them take
    jaxckpt.restore(f"{path}/warm")
    base = group.used()
    state = make(mesh)
    assert group.used() - base >= STATE_BYTES
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    restores = what in ("restore", "like", "mesh", "verify")
    if restores:
        jaxckpt.save(f"{path}/a", state)
        state = None
    group.limit(int(base + ROOM * STATE_BYTES))
    if what == "save":
        jaxckpt.save(f"{path}/a", state)
    elif what == "save_async":
        jaxckpt.save_async(f"{path}/a", state).result()
    elif what == "manager":
        with jaxckpt.CheckpointManager(path, keep=jaxckpt.KeepPolicy(last=1)) as manager:
            for step in (1, 2):
                manager.save(step, state)
    elif what == "restore":
        state = jaxckpt.restore(f"{path}/a")
    elif what == "like":
        state = jaxckpt.restore(f"{path}/a", like)
    elif what == "mesh":
        state = jaxckpt.restore(f"{path}/a", mesh=mesh_of(2, 4))
    elif what == "verify":
        assert jaxckpt.verify(f"{path}/a").ok
        state = jaxckpt.restore(f"{path}/a")
    elif what == "copy":
        copy = jax.tree.map(np.array, state)
        say(copied=len(copy))
    check(state)
    say(done=what, peak=(group.peak() - base) / STATE_BYTES)
