"""Jobs that read each stored value once."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import jaxckpt
from jaxckpt.multihost import current
from tests.workers.saves import mesh_of, put


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


def restore_each_in_explicit_mesh(me, path, wanted):
    """`restore_each` in a program whose types have shardings."""
    import jax

    explicit = (jax.sharding.AxisType.Explicit,)
    with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("all",), axis_types=explicit)):
        return restore_each(me, path, wanted)


def tree_of_every_kind():
    """Leaves that no spread sharding divides, or not in whole chunks; "stage" is in rows."""
    import jax
    import ml_dtypes

    rng = np.random.default_rng(0)
    dtypes = [
        np.float32,
        ml_dtypes.bfloat16,
        ml_dtypes.int4,
        ml_dtypes.int2,
        ml_dtypes.float8_e4m3fn,
    ]
    small = {
        f"{i}": rng.integers(0, 2, (i % 7, 3) if i % 5 else ()).astype(dtypes[i % len(dtypes)])
        for i in range(200)
    }
    rows = put(rng.standard_normal((8, 1 << 15), np.float32), mesh_of(x=8), ("x",))
    return {
        "stage": [rows, rows + 1],
        "chunk": np.arange(1 << 19, dtype=np.float32).reshape(2, -1),
        "resized": np.arange(12, dtype=np.float32),
        "small": small,
        "host": {"array": rng.standard_normal((5, 7)), "scalar": np.int64(3)},
        "key": {"one": jax.random.key(7), "many": jax.random.split(jax.random.key(1), 8)},
        "bytes": b"abc",
    }


def restore_kinds(me, path, budget_bytes):
    """Restores that tree, half of it on some processes; what differs, and what was read."""
    import jax

    saved = jaxckpt.restore(path, as_numpy=True)
    mesh = mesh_of(x=4)
    halves = [mesh_of(jax.devices()[at : at + 2], y=2) for at in (0, 2)]

    def like(value, mesh=mesh, spec=()):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)

    wanted = {
        "stage": [like(*pair) for pair in zip(saved["stage"], halves, strict=True)],
        "chunk": like(saved["chunk"], spec=(None, "x")),
        "resized": like(np.zeros(16, np.float32), spec=("x",)),
        "small": jax.tree.map(like, saved["small"]),
        "host": saved["host"],
        "key": {"one": like(saved["key"]["one"]), "many": like(saved["key"]["many"], spec=("x",))},
        "bytes": b"",
    }
    reports = []
    options: dict[str, Any] = {"read_once": True, "budget_bytes": budget_bytes, "resize": True}
    got = jaxckpt.restore(path, wanted, report=reports.append, **options)
    saved["resized"] = np.pad(saved["resized"], (0, 4))
    differ = []
    for name, there in jax.tree_util.tree_leaves_with_path(saved):
        value = got
        for key in name:
            value = value[getattr(key, "key", getattr(key, "idx", None))]
        if hasattr(value, "dtype") and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            value, there = map(jax.random.key_data, (value, there))
        shards = value.addressable_shards if isinstance(value, jax.Array) else None
        if name[0].key == "stage":
            assert bool(shards) == (name[1].idx == me.index // 2)
        pairs = [(value, there)] if shards is None else [(s.data, there[s.index]) for s in shards]
        if not all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs):
            differ.append(jax.tree_util.keystr(name))
    sizes = {name: leaf.size_bytes for name, leaf in jaxckpt.open(path).leaves.items()}
    (report,) = reports
    direct = [name for name, size in sizes.items() if size and name not in report.read_once]
    return {"differ": differ, "direct": direct, "more": report.job_bytes - sum(sizes.values())}


def save_parts(me, url, megabytes, env, leaves=1):
    """Saves arrays in rows, one part of each for each device."""
    os.environ.update(env)
    value = np.arange(megabytes * 1_000_000 // leaves // 4096 // 64 * 64 * 1024, dtype=np.float32)
    array = put(value.reshape(-1, 1024), mesh_of(x=8), ("x",))
    jaxckpt.save(url, {f"w{i}": array + i for i in range(leaves)})


def restore_in_groups(me, path, names, shape):
    """Restores replicated leaves, each a group of its own.

    Returns:
        The bytes on the device of this process when the groups meet, and the most that a program
        takes beside its operands and results.
    """
    import jax

    everywhere = jax.sharding.NamedSharding(mesh_of(x=me.count), jax.sharding.PartitionSpec())
    like = {name: jax.ShapeDtypeStruct(shape, np.float32, sharding=everywhere) for name in names}
    processes, found = type(current()), []  # with any limit
    gather = processes.gather

    def gathering(self, name, *args, **kwargs):
        if name.startswith("restore group"):
            shards = [one.sharding.shard_shape(one.shape) for one in jax.live_arrays()]
            found.append(4 * sum(map(math.prod, shards)))  # the data of a shard is an array too
        return gather(self, name, *args, **kwargs)

    processes.gather = gathering
    before = {*map(id, jax.local_devices()[0].client.live_executables())}
    got = jaxckpt.restore(path, like, read_once=True, budget_bytes=1 << 20)
    after = jax.local_devices()[0].client.live_executables()
    assert all(one.is_fully_replicated for one in got.values())
    stats = [one.get_compiled_memory_stats() for one in after if id(one) not in before]
    return {"live": found, "temp": max(one.temp_size_in_bytes for one in stats)}


def restore_in_threads(me, paths, loops):
    """Restores checkpoints of one structure at once, each in a thread of its own.

    Returns:
        For each restore the name of its error, or whether it has the right values.
    """
    import jax

    everywhere = jax.sharding.NamedSharding(mesh_of(x=2 * me.count), jax.sharding.PartitionSpec())
    wanted = [jaxckpt.restore(path, as_numpy=True) for path in paths]

    def restore(i, once):
        like = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)
            for name, leaf in wanted[i].items()
        }
        found = []
        for _ in range(loops):
            try:
                got = jaxckpt.restore(paths[i], like, read_once=once)
            except Exception as error:
                found.append(repr(error))
            else:
                found.append(all(np.array_equal(got[name], x) for name, x in wanted[i].items()))
        return found

    with ThreadPoolExecutor(len(paths)) as threads:
        return {
            str(once): [*threads.map(restore, range(len(paths)), [once] * len(paths))]
            for once in (True, False)
        }


def save_run(me, url, megabytes, env):
    """Saves a step of a run, of one array in rows; returns the bytes of the array."""
    os.environ.update(env)
    value = np.arange(megabytes * 1_000_000 // 4096 // 64 * 64 * 1024, dtype=np.float32)
    with jaxckpt.CheckpointManager(url) as manager:
        manager.save(1, {"w": put(value.reshape(-1, 1024), mesh_of(x=8), ("x",))})
    return value.nbytes


def restore_by(me, url, way, folder, env):
    """Restores that array replicated, in one of the ways that programs restore a run."""
    import jax

    os.environ.update(env)
    everywhere = jax.sharding.NamedSharding(mesh_of(x=me.count), jax.sharding.PartitionSpec())
    (leaf,) = jaxckpt.open(f"{url}/1").leaves.values()
    like = {"w": jax.ShapeDtypeStruct(leaf.shape, np.float32, sharding=everywhere)}
    if way == "path":
        got = jaxckpt.restore(url, like)
    elif way == "drop-in":
        import jaxckpt.orbax as ocp

        with ocp.CheckpointManager(url) as manager:
            args = ocp.args.Composite(state=ocp.args.StandardRestore(like))
            got = manager.restore(1, args=args).state
    else:
        local = f"{folder}/host{me.index}"
        options: dict[str, Any] = {"local": local} if way == "local" else {"mode": "r"}
        with jaxckpt.CheckpointManager(url, **options) as manager:
            if way == "restore_or":
                zeros = jax.jit(
                    lambda: {"w": jax.numpy.zeros(leaf.shape)}, out_shardings=everywhere
                )
                got, _ = manager.restore_or(zeros)
            else:
                got = manager.restore(like)
    (shard,) = got["w"].addressable_shards
    wanted = np.arange(math.prod(leaf.shape), dtype=np.float32).reshape(leaf.shape)
    return np.array_equal(shard.data, wanted)


def save_layouts(me, root, env):
    """Saves checkpoints of one array each, as the mesh divides it, and one of small arrays."""
    import jax
    import ml_dtypes

    os.environ.update(env)
    rng = np.random.default_rng(0)
    value = rng.integers(0, 256, (3072, 4096), np.uint8)
    mesh = mesh_of(x=4, y=2)
    rows = (("x", "y"),)
    trees = {
        "rows": put(value.view(np.float32), mesh, rows),
        "grid": put(value.reshape(768, 64, 256), mesh, ("x", "y")),
        "chunk": value,
        "bfloat16": put(value.view(ml_dtypes.bfloat16), mesh, rows),
        "float8": put(value.view(ml_dtypes.float8_e4m3fn), mesh, rows),
        "int4": put((value % 16).astype(np.int8).astype(ml_dtypes.int4), mesh, rows),
        "small": [*map(jax.device_put, value.reshape(1536, -1).view(np.float32)[:1500])],
    }
    for name, tree in trees.items():
        jaxckpt.save(f"{root}/{name}", tree)


def count_restore(me, url, target, once, env):
    """Restores all arrays of a checkpoint in one sharding; what the job read, and their size."""
    import jax

    os.environ.update(env)
    axes, spec = target
    sharding = jax.sharding.NamedSharding(mesh_of(**axes), jax.sharding.PartitionSpec(*spec))
    reports: list[Any] = []
    options: dict[str, Any] = {"shardings": lambda *_: sharding, "read_once": once}
    leaves = jax.tree.leaves(jaxckpt.restore(url, report=reports.append, **options))
    assert all(leaf.sharding == sharding for leaf in leaves)
    return {"job": reports[0].job_bytes, "size": sum(leaf.nbytes for leaf in leaves)}


def time_restore(me, url, target, once, envs):
    """Restores arrays; how long it took from the moment at which all began, and what was read.

    Args:
        once: As `read_once`, or "one reader": process 0, which broadcasts it.
        envs: Of each process, or of all.
    """
    import jax
    from jax.experimental import multihost_utils

    os.environ.update(envs[me.index % len(envs)])
    axes, spec = target
    sharding = jax.sharding.NamedSharding(mesh_of(**axes), jax.sharding.PartitionSpec(*spec))
    leaves = jaxckpt.open(url).leaves
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    like = {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)
        for name, shape in shapes.items()
    }
    reports = []
    current().within(60).gather("begin", None)
    start_s = time.monotonic()
    if once == "one reader":
        tree = {name: np.empty(shape, np.float32) for name, shape in shapes.items()}
        if me.index == 0:
            tree = jaxckpt.restore(url, as_numpy=True)
        tree = multihost_utils.broadcast_one_to_all(tree)
        seconds = time.monotonic() - start_s
        size = sum(value.nbytes for value in tree.values())
        return {"seconds": seconds, "job": size, "size": size}
    got = jaxckpt.restore(url, like, read_once=once, report=reports.append)
    jax.block_until_ready(got)
    seconds = time.monotonic() - start_s
    for name, array in got.items():
        for shard in array.addressable_shards:
            first = np.asarray(shard.data)[:, 0].astype(np.int64)
            start = (shard.index[1].start or 0) + int(name[1:])
            assert np.array_equal(first, np.arange(len(first)) * 1024 + start)
    size = sum(array.nbytes for array in got.values())
    return {"seconds": seconds, "job": reports[0].job_bytes, "size": size}


def restore_at_rates(me, url, carry_s, env):
    """Restores replicated leaves of which each is a group, with other rates than those measured.

    Args:
        carry_s: Of each leaf; to read a leaf takes a second.

    Returns:
        Which leaves were read once, and how many the job read.
    """
    import jax

    os.environ.update(env)
    everywhere = jax.sharding.NamedSharding(mesh_of(x=me.count), jax.sharding.PartitionSpec())
    saved = jaxckpt.restore(url, as_numpy=True)
    size = saved["w0"].nbytes
    processes, reports, group = type(current()), [], 0  # with any limit
    gather = processes.gather

    def gathering(self, name, report, *args, **kwargs):
        nonlocal group
        if name.startswith("restore group"):
            group += 1
            carried = max(0, group - 2)  # after the first one
            read, part = [size * group // me.count, group], [size // me.count, 1.0]
            rates = {"first": part, "read": read, "carried": [size * carried, carry_s * carried]}
            report = {**report, "value": rates}
        return gather(self, name, report, *args, **kwargs)

    processes.gather = gathering
    like = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=everywhere)
        for name, value in saved.items()
    }
    got = jaxckpt.restore(url, like, report=reports.append)
    same = all(np.array_equal(got[name].addressable_data(0), saved[name]) for name in saved)
    (report,) = reports
    return {"same": same, "once": [*report.read_once], "read": report.job_bytes / size}


def restore_ways(me, path):
    """Restores in each way that does not read once, or not all; what was reported and logged."""
    import jax

    lines, found = [], {}
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("jaxckpt").addHandler(handler)
    logging.getLogger("jaxckpt").setLevel(logging.INFO)
    spread = jax.sharding.NamedSharding(mesh_of(x=4), jax.sharding.PartitionSpec())
    alone = jax.sharding.NamedSharding(
        mesh_of(jax.local_devices(), x=2), jax.sharding.PartitionSpec()
    )
    saved = jaxckpt.restore(path, as_numpy=True)
    like = {
        "rows": jax.ShapeDtypeStruct(saved["rows"].shape, np.float32, sharding=spread),
        "alone": jax.ShapeDtypeStruct(saved["alone"].shape, np.float32, sharding=alone),
        "key": jax.random.key(0),
        "host": np.zeros((), np.int64),
        "count": 0,
    }

    def restore(name, like=like, **options):
        reports = []
        try:
            got = jaxckpt.restore(path, like, report=reports.append, **options)
        except (jaxckpt.CheckpointError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
            return
        same = all(
            np.array_equal(np.asarray(shard.data), saved[leaf][shard.index])
            for leaf in ("rows", "alone")
            for shard in got[leaf].addressable_shards
        )
        assert same
        assert (got["host"], got["count"]) == (saved["host"], saved["count"])
        assert jax.random.key_data(got["key"]).tolist() == [0, 7]
        found[name] = list(reports[0].read_once)

    restore("asked", read_once=True)
    found["line"] = lines[-1]
    restore("auto")
    restore("refused", read_once=False)
    restore("one refuses", read_once=me.index != 0)
    restore("other budgets", read_once=True, budget_bytes=(1 + me.index) << 20)
    other = {**like, "rows": jax.ShapeDtypeStruct((1,), np.float32)} if me.index else like
    restore("one misfits", other, read_once=True)
    return found


def restore_misfit(me, path):
    """Restores packs into another dtype, which lacks a value of process 1; returns the error."""
    import jax

    sharding = jax.sharding.NamedSharding(mesh_of(x=3), jax.sharding.PartitionSpec("x"))
    like = {n: jax.ShapeDtypeStruct((6, 128), np.int32, sharding=sharding) for n in "abcd"}
    manager = jaxckpt.CheckpointManager(path, mode="r", timeout_s=20.0)
    try:
        manager.restore(like, read_once=True, budget_bytes=1 << 16)
    except jaxckpt.CheckpointError as error:
        return [type(error).__name__, str(error)]


def restore_unlike(me, root):
    """Restores what the last process wants otherwise; the errors, and the meetings of each case."""
    import jax

    last, processes, rounds = me.index == me.count - 1, type(current()), []
    gather, where = processes.gather, f"{root}/1"

    def gathering(self, name, *args, **kwargs):
        rounds.append(name)
        return gather(self, name, *args, **kwargs)

    processes.gather = gathering

    def like(spec=("x",), dtype=np.float32, names="ab", devices=None):
        devices = jax.devices() if devices is None else devices
        spec = jax.sharding.PartitionSpec(*spec)
        sharding = jax.sharding.NamedSharding(mesh_of(devices, x=len(devices)), spec)
        return {name: jax.ShapeDtypeStruct((12, 12), dtype, sharding=sharding) for name in names}

    def result_of(wanted, path=where, restore=jaxckpt.restore, **options):
        rounds.clear()
        options = {"extra": "ignore", **options}
        try:
            got = restore(path, wanted, **options)
        except jaxckpt.CheckpointError as error:
            return f"{type(error).__name__}: {error}", len(rounds)
        saved = jaxckpt.restore(path, as_numpy=True)
        shards = [(name, shard) for name in got for shard in got[name].addressable_shards]
        return all(np.array_equal(one.data, saved[n][one.index]) for n, one in shards), len(rounds)

    others = {
        "spec": like((None, "x")),
        "open spec": like(("x", None)),
        "dtype": like(dtype=np.float16),
        "order": like(devices=[*reversed(jax.devices())]),
        "fewer devices": like(devices=jax.devices()[2:]),
        "own devices": like(devices=jax.local_devices()),
        "fewer leaves": like(names="a"),
        "host": dict.fromkeys("ab", np.zeros((12, 12), np.float32)),
    }
    found = {name: result_of(other if last else like()) for name, other in others.items()}
    found["run"] = result_of(like((None, "x") if last else ("x",)), root)
    found["once"] = result_of(like((None, "x") if last else ("x",)), read_once=True)
    swap = {"rename": {"^a$": "b", "^b$": "a"}} if last else {}
    found["names"] = result_of(like(), **swap)
    part = jaxckpt.open(where)["ab"[last]]
    found["part"] = result_of(like()["a"], restore=lambda _, one, **options: part.restore(one))
    # Nobody shares these, or only the first two processes do.
    own = like(("x",)[last:], [np.float32, np.float64][last], "ba"[last], jax.local_devices())
    found["each its own"] = result_of(own)
    pair = like(devices=[one for one in jax.devices() if one.process_index < 2])
    found["a pair"] = result_of(like(devices=jax.local_devices(), names="b") if last else pair)
    found["pair in all"] = result_of(pair)
    half = like((None, "x"), devices=pair["a"].sharding.mesh.devices.flat)
    found["a pair apart"] = result_of(half if me.index == 1 else pair)
    found["all alike"] = result_of(like())
    return found
