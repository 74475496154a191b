"""Jobs that save and restore together, disagree, fail, or lose a process."""

from __future__ import annotations

import functools
import os
import time
from dataclasses import replace

import numpy as np

import jaxckpt
from jaxckpt._core.plan import plan_save
from jaxckpt._core.pytree import flatten
from jaxckpt._save.job import SaveJob
from jaxckpt._save.save import prepare
from jaxckpt._save.tree_plan import _spec
from jaxckpt.errors import CheckpointError
from jaxckpt.multihost import Group, current
from jaxckpt.storage import LocalStorage
from jaxckpt.testing import FailingStorage

LARGE = (8, 1 << 18)  # float32: 8 MiB, 2 MiB for each of four processes
WIDE = 1 << 19  # float32, 512 KiB for each of four devices
TIMEOUT_S = 3.0  # for those who wait for the lost
SMALL = 60  # replicated leaves of 4 KiB and more


@functools.cache
def expected():
    """The values of `tree`, and the specs it is saved with, by leaf."""
    rng = np.random.default_rng(0)
    values = {
        "split": (rng.standard_normal((16, 8), np.float32), ("a", "b")),
        "partly": (rng.integers(0, 99, (8, 6), np.int32), ("a", None)),
        "both": (rng.standard_normal((24, 3), np.float32).astype("bfloat16"), (("a", "b"), None)),
        "large": (rng.standard_normal(LARGE, np.float32), ()),
        "wide": (rng.standard_normal((8, 1 << 18), np.float32), ("b",)),
        "empty": (np.zeros((0, 8), np.float32), (None, "b")),
        "scalar": (np.float32(2.5), ()),
    }
    for i in range(SMALL):
        values[f"small/{i}"] = (rng.standard_normal(1024 + 8 * i, np.float32), ())
    return values


def mesh_of(devices=None, **axes):
    import jax

    devices = jax.devices() if devices is None else devices
    shape = tuple(axes.values())
    return jax.sharding.Mesh(np.array(devices[: int(np.prod(shape))]).reshape(shape), tuple(axes))


def put(value, mesh, spec):
    """A global array, made alike on every process."""
    import jax

    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    return jax.make_array_from_callback(
        np.shape(value), sharding, lambda index: value[index], dtype=value.dtype
    )


def tree(mesh, index=0):
    """Returns a leaf of every kind; values of numpy and Python differ from process to process."""
    import jax

    arrays = {name: put(value, mesh, spec) for name, (value, spec) in expected().items()}
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    data = put(np.arange(16, dtype=np.uint32).reshape(8, 2), mesh, ("a",))
    return {
        "arrays": arrays,
        "keys": jax.jit(jax.random.wrap_key_data, out_shardings=split)(data),
        "key": jax.random.key(7),
        "local": jax.numpy.zeros(3, np.int32),
        "numpy": np.arange(5) + index,
        "text": f"process {index}",
        "int": 10 + index,
    }


def restore_keys(me, path):
    """Restores an array of keys whose sharding has a shorter PartitionSpec than its rank."""
    import jax

    alike = jax.sharding.NamedSharding(mesh_of(x=jax.device_count()), jax.sharding.PartitionSpec())
    make = jax.jit(lambda: jax.random.split(jax.random.key(0), 4), out_shardings=alike)
    jaxckpt.save(path, {"keys": (keys := make())})
    got = jaxckpt.restore(path, {"keys": jax.eval_shape(make)}, shardings=alike)["keys"]
    check_array(jax.random.key_data(got), np.asarray(jax.random.key_data(keys)))
    return got.sharding.is_equivalent_to(alike, 1)


def save_it(path):
    import jax

    if jax.process_count() == 1:
        mesh = mesh_of(a=4, b=2)
    else:  # the axis that replicates crosses the processes
        mesh = mesh_of(a=4, b=jax.device_count() // 4)
    jaxckpt.save(path, tree(mesh, jax.process_index()))


def check_array(got, value):
    for shard in got.addressable_shards:
        assert (
            np.asarray(shard.data).tobytes() == np.ascontiguousarray(value[shard.index]).tobytes()
        )


def check_tree(got):
    import jax

    for name, (value, _) in expected().items():
        assert got["arrays"][name].dtype == value.dtype
        assert got["arrays"][name].shape == value.shape
        check_array(got["arrays"][name], np.asarray(value))
    data = jax.random.key_data(got["keys"])
    check_array(data, np.arange(16, dtype=np.uint32).reshape(8, 2))
    check_array(jax.random.key_data(got["key"]), np.asarray(jax.random.key_data(jax.random.key(7))))
    check_array(got["local"], np.zeros(3, np.int32))
    assert np.array_equal(got["numpy"], np.arange(5))
    assert (got["text"], got["int"]) == ("process 0", 10)


def restores(path):
    """Restores in every way; raises if anything is not as it was saved."""
    import jax

    check_tree(jaxckpt.restore(path))
    n = jax.device_count()
    meshes = [{"a": n // 2, "b": 2}, {"a": 2, "b": n // 2}, {"b": n}, {"c": 2, "b": 2, "a": n // 4}]
    for axes in meshes:
        got = jaxckpt.restore(path, mesh=mesh_of(**axes))
        check_tree(got)
        assert got["arrays"]["large"].sharding.mesh.axis_names == tuple(axes)
    renamed = jaxckpt.restore(path, mesh=mesh_of(rows=n // 2, columns=2))
    check_tree(renamed)
    spec = jax.sharding.PartitionSpec("rows", "columns")
    assert renamed["arrays"]["split"].sharding.spec == spec
    # On some devices only, so that a process may have none of it.
    for axes in ({"a": 2, "b": 2}, {"a": 1, "b": 1}):
        check_tree(jaxckpt.restore(path, mesh=mesh_of(**axes)))
    only_last = mesh_of(jax.devices()[-1:], a=1, b=1)
    check_tree(jaxckpt.restore(path, mesh=only_last))
    check_other_specs(path)


def check_other_specs(path):
    """A `like` with other specs, some of which do not divide as the stored chunks do."""
    import jax

    n = jax.device_count()
    mesh = mesh_of(x=n // 2, y=2)
    specs = {"split": (None, "x"), "partly": (None, "y"), "large": ("y", "x"), "wide": (None, "x")}
    like = {}
    for name, (value, _) in expected().items():
        spec = jax.sharding.PartitionSpec(*specs.get(name, ()))
        sharding = jax.sharding.NamedSharding(mesh, spec)
        like[name] = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    got = jaxckpt.restore(path, {"arrays": like}, extra="ignore")
    for name, (value, _) in expected().items():
        assert got["arrays"][name].sharding == like[name].sharding
        check_array(got["arrays"][name], np.asarray(value))


def share(me, mine, others):
    """Saves, restores that, waits until all of `others` are there, and restores them."""
    save_it(mine)
    restores(mine)
    me.reach("saved")
    me.wait_for("restore")
    for other in others:
        restores(other)
    if me.index == 0:  # alone: the others do not take part, and nobody waits for them
        got = jaxckpt.restore(mine, as_numpy=True)
        assert np.array_equal(got["arrays"]["large"], expected()["large"][0])
    return planned_bytes()


def planned_bytes():
    """How many bytes the plan gives to each process."""
    import jax

    mesh = mesh_of(a=4, b=jax.device_count() // 4)
    _, values = flatten(tree(mesh))
    specs = [_spec(value, current(), np.dtype(value.dtype)) for value in values]
    return [plan_save(specs, process=i).total_bytes for i in range(jax.process_count())]


def restore_sixteen(me, paths):
    import jax

    assert jax.device_count() == 16
    for path in paths:
        restores(path)


# --- what goes wrong -------------------------------------------------------------------------


class Elsewhere:
    """A storage that writes data to another place, or does something before that."""

    def __init__(self, inner, before=lambda: None, there=lambda path: path):
        self._inner, self._before, self._there = inner, before, there

    def __getattr__(self, verb):
        return getattr(self._inner, verb)

    def write(self, path, data):
        self._before()
        self._inner.write(self._moved(path), data)

    def _moved(self, path):
        folder, _, name = path.rpartition("/")
        self._inner.make_dir(self._there(folder))
        return f"{self._there(folder)}/{name}"


def small_tree(seed):
    return {
        "w": put(np.arange(8, dtype=np.int32) + seed, mesh_of(x=4), ("x",)),
        "n": np.arange(3),
        "t": "t",
    }


def said(act):
    """Returns the type, the named process indices and the text of the error that `act` raised."""
    start = time.monotonic()
    try:
        act()
    except (CheckpointError, TypeError) as error:
        named = getattr(error, "failures", None) or getattr(error, "missing", ())
        return {
            "type": type(error).__name__,
            "named": sorted(named),
            "text": str(error),
            "failures": getattr(error, "failures", {}),
            "s": time.monotonic() - start,
        }
    return None


def save_with(path, value, *, storage=None, timeout_s=60.0, overwrite=False):
    request = prepare(path, value, overwrite, None, copy=False)
    storage = storage or request.storage
    group = Group.together(request.processes.within(timeout_s))
    SaveJob(replace(request, storage=storage, group=group)).run()


def disagree(me, root):
    """Process 1 does something else than the others, or a process fails. What do all say?"""
    odd = me.index == 1
    path = f"{root}/a"
    full = OSError(28, "No space left on device")

    def save(value=None, **kwargs):
        return said(lambda: save_with(path, small_tree(1) if value is None else value, **kwargs))

    results = {
        "structure": save({**small_tree(1), "extra": np.zeros(2)} if odd else None),
        "text leaf": save({"w": small_tree(1)["w"], "n": np.arange(3)} if odd else None),
        "shape": save({**small_tree(1), "n": np.arange(4)} if odd else None),
        "compression": said(
            lambda: jaxckpt.save(path, np.zeros(1 << 17), compression="zstd" if odd else None)
        ),
        "path": said(lambda: save_with(path + "1" * odd, small_tree(1))),
        "leaf": save({**small_tree(1), "n": object()} if odd else None),
        "all leaves": save({**small_tree(1), "n": object()}),
        "argument": said(lambda: save_with("hdfs://b/a" if odd else path, small_tree(1))),
        "on one": save(
            {"w": put(np.arange(2, dtype=np.int32), mesh_of(last_devices(), x=2), ("x",))}
        ),
        "on 0": save({"w": put(np.arange(2, dtype=np.int32), mesh_of(x=2), ("x",))}),
        "full": save(storage=FailingStorage(LocalStorage(), 0, full) if odd else None),
        "no directory": save(
            storage=Elsewhere(LocalStorage(), there=lambda path: "/dev/null/x") if odd else None
        ),
        "not shared": save(
            storage=Elsewhere(LocalStorage(), there=lambda path: f"{root}-2/x") if odd else None
        ),
    }
    for at, verb in enumerate(("begin", "commit")):
        storage = FailingStorage(LocalStorage(), (0, 9)[at], full) if me.index == 0 else None
        results[verb] = save(storage=storage)
    results["async"] = said(lambda: jaxckpt.save_async(path, values_for(odd)).result())
    results["good"] = save()
    results["exists"] = save()
    results["restore"] = said(
        lambda: jaxckpt.restore(path, {"w": np.zeros(3)} if odd else small_tree(0))
    )
    results["like"] = said(lambda: jaxckpt.restore(path, {"w": object()} if odd else small_tree(0)))
    handle = jaxckpt.save_async(path, small_tree(2), overwrite=True)
    results["replaced"] = said(handle.result)
    return results


def values_for(odd):
    return {**small_tree(1), "extra": np.zeros(2)} if odd else small_tree(1)


def last_devices():
    import jax

    return jax.devices()[-2:]


def leave_without_waiting(me, path):
    """The interpreter ends with the save under way."""
    jaxckpt.save_async(path, small_tree(5))


def lose_them(me, path, rounds):
    """In each round one process is lost while it writes; the others say what they heard."""
    results = []
    value = small_tree(2) | {"large": put(np.zeros(1 << 13), mesh_of(x=4), ("x",))}
    for name, loser in rounds:

        def pause(name=name):
            me.reach(name)
            me.wait_for(f"{name} again")

        me.wait_for(f"{name} go")
        storage = Elsewhere(LocalStorage(), before=pause) if me.index == loser else None
        results.append(
            said(
                lambda storage=storage: save_with(
                    path, value, storage=storage, timeout_s=TIMEOUT_S, overwrite=True
                )
            )
        )
        me.reach(f"{name} over")
    return results


def save_logged(me, path, logs):
    """Saves with the shim's log on, up to the moment of the acknowledgement."""
    from tests.faults.zygote import arm, disarm

    value = small_tree(1) | {"large": put(np.zeros(1 << 13), mesh_of(x=4), ("x",))}
    arm(os.path.dirname(os.path.dirname(path)), log=f"{logs}/{me.index}.log")
    save_with(path, value)
    disarm()


def restore_damaged(me, paths):
    """Restores each path; what does each process get, raise and log?"""
    import logging

    warned, results = [], {}
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("jaxckpt").addHandler(handler)

    def restore(path, like):
        got = jaxckpt.restore(path, like)["w"]
        results[path] = value = float(got.addressable_shards[-1].data[-1])
        check_array(got, np.full(WIDE, value, np.float32))

    like = {"w": put(np.zeros(WIDE, np.float32), mesh_of(x=4), ("x",))}
    for path in paths:
        error = said(lambda path=path: restore(path, like))
        results[path] = error or results[path]
    odd = {"w": object()} if me.index == 1 else like
    results["like"] = said(lambda: restore(paths[0], odd))
    return results, warned
