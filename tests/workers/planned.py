"""Jobs whose storages count what each process writes and reads, to compare with a plan."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import jaxckpt
from jaxckpt import LocalTier, SavePolicy
from jaxckpt.multihost import current
from jaxckpt.storage import LocalStorage, PathIn
from tests.workers.saves import mesh_of, put

# Shape, dtype and spec of each leaf, by kind of tree.
TREES: dict[str, dict[str, tuple[tuple[int, ...], str, list[Any]]]] = {
    "dense": {
        "embed": ((2048, 384), "float32", ["tp", "dp"]),
        "up": ((384, 1536), "bfloat16", ["dp", "tp"]),
        "down": ((1536, 384), "bfloat16", [["dp", "tp"]]),
        "norm": ((384,), "float32", []),
        "bias": ((4608,), "float32", ["tp"]),
        "wide": ((96, 3 << 13), "float32", [None, "dp"]),
    },
    "replicated": {
        "large": ((48, 1 << 16), "float32", []),
        "medium": ((48, 1 << 12), "float32", []),
        "odd": ((7, 1001), "float32", []),
        **{f"small/{i}": ((1024 + 8 * i,), "float32", []) for i in range(40)},
        "steps": ((), "int32", []),
    },
    "stacked": {
        "layers": ((12, 96, 768), "float32", [None, "dp", "tp"]),
        "more": ((12, 768, 96), "float32", ["tp", "dp"]),
        "empty": ((0, 96), "float32", []),
        "tiny": ((96,), "float32", ["dp"]),
        "bits": ((96, 192), "int4", ["dp"]),
    },
    "long": {  # chunks of more than 32 MiB, which have inner chunks
        "one": ((5, 3 << 20), "float32", []),
        "two": ((6, 3 << 20), "float32", [None, "dp"]),
        "mine": ((24, 3 << 18), "float32", ["tp"]),
    },
    "experts": {
        "gate": ((48, 4096), "float32", ["dp"]),
        "up": ((48, 64, 512), "bfloat16", ["dp", "tp"]),
        "shared": ((512, 768), "float32", ["tp"]),
        "scale": ((48,), "float32", ["dp"]),
        "count": ((48, 2), "uint8", [["tp", "dp"]]),
    },
}
HOST = {"rng": np.arange(3000, dtype=np.int64), "step": 7, "name": "a"}  # values on the host
# Tree, processes, devices of each, and the mesh.
LAYOUTS: list[tuple[str, int, int, dict[str, int]]] = [
    ("dense", 2, 2, {"dp": 4, "tp": 1}),
    ("dense", 2, 4, {"dp": 2, "tp": 4}),
    ("replicated", 2, 1, {"dp": 2, "tp": 1}),
    ("stacked", 2, 4, {"tp": 4, "dp": 2}),
    ("long", 2, 1, {"dp": 2, "tp": 1}),
    ("dense", 3, 2, {"dp": 3, "tp": 2}),
    ("replicated", 3, 1, {"dp": 1, "tp": 3}),
    ("long", 3, 1, {"dp": 3, "tp": 1}),
    ("dense", 4, 1, {"dp": 2, "tp": 2}),
    ("replicated", 4, 2, {"dp": 2, "tp": 4}),
    ("stacked", 4, 1, {"dp": 4, "tp": 1}),
    ("experts", 4, 2, {"dp": 4, "tp": 2}),
    ("experts", 4, 2, {"tp": 2, "dp": 4}),
    ("dense", 6, 1, {"dp": 3, "tp": 2}),
    ("replicated", 6, 1, {"dp": 6, "tp": 1}),
    ("dense", 8, 1, {"dp": 4, "tp": 2}),
    ("stacked", 8, 1, {"dp": 4, "tp": 2}),
    ("experts", 8, 1, {"dp": 4, "tp": 2}),
    ("dense", 16, 1, {"dp": 8, "tp": 2}),
    ("replicated", 16, 1, {"dp": 4, "tp": 4}),
]


def spec_of(axes):
    import jax

    entries = [tuple(axis) if isinstance(axis, list) else axis for axis in axes]
    return jax.sharding.PartitionSpec(*entries)


def dtype_of(name):
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


class Counted:
    """A local disk that counts the bytes that are written to and read from each file."""

    def __init__(self):
        self._inner = LocalStorage()
        self.written: dict[str, int] = {}
        self.ranges: list[tuple[str, int]] = []
        self._lock = threading.Lock()  # guards both

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def write(self, path, data):
        parts = [data] if isinstance(data, bytes) else data
        size = 0

        def counted():
            nonlocal size
            for part in parts:
                size += memoryview(part).nbytes
                yield part

        self._inner.write(path, counted())
        with self._lock:
            self.written[os.path.basename(path)] = size

    def read_into(self, path, offset, buffers):
        self._inner.read_into(path, offset, buffers)
        with self._lock:
            self.ranges.append((os.path.basename(path), sum(map(len, buffers))))


def count_layouts(me, root, numbers):
    """Saves and restores layouts; the bytes and requests of this process, by way."""
    return {str(n): _count(me, Path(root, str(n)), LAYOUTS[n]) for n in numbers}


def _trees(kind, count, devices, axes):
    """The tree of a layout, and the target to restore it."""
    import jax

    assert (jax.process_count(), len(jax.local_devices())) == (count, devices)
    mesh, tree = mesh_of(**axes), dict(HOST)
    for name, (shape, dtype, spec) in TREES[kind].items():
        value = np.resize(np.arange(7).astype(dtype_of(dtype)), shape)
        tree[name] = put(value, mesh, spec_of(spec))
    like = jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            if isinstance(x, jax.Array)
            else x
        ),
        tree,
    )
    return tree, like


def _count(me, root, layout):
    tree, like = _trees(*layout)
    found = {}
    store, path = Counted(), root / "a"
    jaxckpt.save(PathIn(store, str(path)), tree)
    values = _files_with_values(path)
    found["save"] = _sum(size for name, size in store.written.items() if name in values)
    for way, once in (("restore", False), ("restore_once", True)):
        store, reports = Counted(), []
        options: dict[str, Any] = {"read_once": once, "report": reports.append}
        jaxckpt.restore(PathIn(store, str(path)), like, **options)
        found[way] = _sum(size for name, size in store.ranges if name in values)
    found["moved"] = reports[0].moved_bytes  # of the job
    store, folder = Counted(), root / f"disk{me.index}"
    disk = LocalTier(PathIn(store, str(folder)), save=SavePolicy())
    options = {"save": SavePolicy(every_steps=100), "local": disk, "incremental": False}
    with jaxckpt.CheckpointManager(root / "run", **options) as manager:
        manager.save(1, tree)
        manager.wait_until_finished()
        (step,) = folder.glob("*/1")
        values = _files_with_values(step)
        found["save_disk"] = _sum(size for name, size in store.written.items() if name in values)
        store.ranges.clear()
        manager.restore(like)
        found["restore_disk"] = _sum(size for name, size in store.ranges if name in values)
    return found


def _sum(sizes):
    sizes = [*sizes]
    return [sum(sizes), len(sizes)]


def _files_with_values(folder):
    """The names of the data files of a checkpoint, without those that only have its nodes."""
    from jaxckpt.storage._values import find_values

    places = find_values(LocalStorage(), str(folder / "state"), max_keys=1 << 20)
    assert places is not None
    return {os.path.basename(one.file) for one in places.values() if not isinstance(one, bytes)}


def time_layout(me, url, number, way, env):
    """Saves or restores a layout; the seconds from the moment at which all began."""
    import jax

    os.environ.update(env)
    tree, like = _trees(*LAYOUTS[number])
    current().within(60).gather("begin", None)
    start_s = time.monotonic()
    if way == "save":
        jaxckpt.save(url, tree)
    else:
        got = jaxckpt.restore(url, like, read_once=way == "restore_once")
        jax.block_until_ready([leaf for leaf in jax.tree.leaves(got) if hasattr(leaf, "sharding")])
    return time.monotonic() - start_s
