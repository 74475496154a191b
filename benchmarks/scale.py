"""Measures the costs that grow with the job: plan, metadata and merge of thousands of processes.

This needs no thousands of machines: a plan is a pure function, and one process does the merge. Both
run here as they would in a large job, over real shardings with one virtual device for each process.
Times are those of one process with empty caches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

LEAVES: Final = 10_000
COUNTS: Final = (8, 64, 512, 4096)
MERGED: Final = (8, 64, 512)
# Keys of each process when tables are united.
KEYS: Final = 200
_BYTES: Final = 5_000  # of a value
_TIMEOUT_S: Final = 300.0


def measure_plans(counts: Sequence[int], *, leaves: int) -> dict[int, dict[str, float]]:
    """Returns seconds and bytes by number of processes, each from a separate interpreter.

    `plan` is the time that a process needs to plan its first save, and `metadata` the time that
    process 0 needs to make the metadata files.
    """
    samples = {}
    for count in counts:
        command = [sys.executable, "-m", "benchmarks.scale", str(count), str(leaves)]
        env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
        }
        done = subprocess.run(
            command, env=env, capture_output=True, timeout=_TIMEOUT_S, check=False, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        samples[count] = json.loads(done.stdout)
    return samples


def measure_merges(counts: Sequence[int], *, keys: int, root: Path) -> dict[int, dict[str, float]]:
    """Returns the seconds to unite the tables of all processes, in total and per key."""
    from jaxckpt._disk.places import Table, decode_table, encode_table, sums_of, unite
    from jaxckpt._disk.transaction import Work
    from jaxckpt.format import names
    from jaxckpt.format.ocdbt import Place
    from jaxckpt.format.tree import StoredArray
    from jaxckpt.storage import LocalStorage

    samples = {}
    for count in counts:
        one = StoredArray(shape=(count, _BYTES), dtype="int8", chunk_shape=(1, _BYTES))
        described = {f"leaf_{key:05d}/zarr.json": b"{}" for key in range(keys)}
        tables = []
        for i in range(count):  # each process writes one chunk of each array
            file = names.new_data_file()
            places = {f"leaf_{n:05d}/c/{i}/0": Place(file, n, _BYTES) for n in range(keys)}
            both = described | places if i == 0 else places
            units = [n * count + i for n in range(keys)]
            tables.append(encode_table(Table(both, units, units)))
        with tempfile.TemporaryDirectory(dir=root, prefix="bench-") as folder:
            start = time.perf_counter()
            decoded = [decode_table(table) for table in tables]
            sums_of(decoded, [one] * keys)
            unite(LocalStorage(), folder, decoded, [one] * keys, Work(folder, ""))
            seconds = time.perf_counter() - start
        samples[count] = {
            "merge": seconds,
            "each key": seconds / (count * keys),
            "bytes": sum(map(len, tables)) / (count * keys),
        }
    return samples


def _plan(count: int, leaves: int) -> dict[str, float]:
    """Measures the busiest processes: the middle one for the plan, the first for the metadata."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from jaxckpt._core.plan import ArraySpec, placement_of, plan_save
    from jaxckpt._save.tree_plan import TreePlan, saved_sharding
    from jaxckpt.format.tree import NAMED, Leaf, Node, Tree

    mesh = Mesh(np.array(jax.devices()).reshape(count // 8, 8), ("fsdp", "tensor"))
    # As in a transformer: matrices split along both axes or one, and replicated vectors.
    kinds: list[tuple[Any, tuple[int, ...]]] = [
        (P("fsdp", "tensor"), (8192, 1024)),
        (P("tensor", "fsdp"), (1024, 8192)),
        (P("fsdp"), (8192, 128)),
        (P(), (1024,)),
    ]
    shardings = {spec: NamedSharding(mesh, spec) for spec, _ in kinds}
    arrays = [kinds[i % len(kinds)] for i in range(leaves)]
    process = count // 2
    start = time.perf_counter()
    specs = [
        ArraySpec(
            shape=shape,
            dtype="float32",
            itemsize=4,
            placement=placement_of(shardings[spec], shape, _process_of),
        )
        for spec, shape in arrays
    ]
    plan = plan_save(specs, process=process)
    planned = time.perf_counter() - start
    names = [f"leaf_{i:05d}" for i in range(leaves)]
    start = time.perf_counter()
    planned_tree = TreePlan(
        tree=Tree(
            leaves=tuple(
                Leaf(
                    path=(name,),
                    key_types=(NAMED,),
                    kind="array",
                    dtype="float32",
                    shape=stored.shape,
                    stored=stored,
                )
                for name, stored in zip(names, plan.stored, strict=True)
            ),
            root=Node(type="dict", names=tuple(names), children=(None,) * leaves),
            typed=True,
            uses_ocdbt=True,
        ),
        shardings={
            name: saved_sharding(shardings[spec])
            for name, (spec, _) in zip(names, arrays, strict=True)
        },
        plan=plan,
        sources=(),
    )
    size = sum(map(len, planned_tree.files.values()))
    described = time.perf_counter() - start
    return {
        "plan": planned,
        "metadata": described,
        "metadata bytes": size,
        "chunks": len(plan.writes),
    }


def _process_of(device: Any) -> int:
    return device.id


if __name__ == "__main__":
    print(json.dumps(_plan(int(sys.argv[1]), int(sys.argv[2]))))
