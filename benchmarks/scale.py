"""Measures the costs that grow with the job: plan, metadata and merge of thousands of processes.

This needs no thousands of machines: a plan is a pure function, and one process does the merge. Both
run here as they would in a large job, over real shardings with one virtual device for each process.
Times are those of one process with empty caches.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from jaxckpt.multihost import Distributed, first_of, meet, slowest_of

LEAVES: Final = 10_000
COUNTS: Final = (8, 64, 512, 4096)
MERGED: Final = (8, 64, 512)
MEETING: Final = (8, 64, 512, 4096, 24_576)
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
    from jaxckpt._disk.attempt import Work
    from jaxckpt._disk.places import Table, decode_table, encode_table, unite
    from jaxckpt.format import names
    from jaxckpt.format.ocdbt import Place
    from jaxckpt.storage import LocalStorage

    samples = {}
    for count in counts:
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
            unite(LocalStorage(), folder, decoded, count * keys, Work(folder, ""))
            seconds = time.perf_counter() - start
        samples[count] = {
            "merge": seconds,
            "each key": seconds / (count * keys),
            "bytes": sum(map(len, tables)) / (count * keys),
        }
    return samples


def measure_meetings(counts: Sequence[int]) -> dict[int, dict[str, float]]:
    """Returns what a meeting after writing costs over JAX's coordination service.

    Process 0 is real, and so is the service. The others are threads that put their reports and get
    the outcome, each for many processes. All reports are there when process 0 begins, as after
    equally long writes; its seconds do not include those of the others.
    """
    return {count: _meeting(count) for count in counts}


def _meeting(count: int) -> dict[str, float]:
    service, key = _CountedService(_coordination_service()), "jaxckpt/gather/a/1"
    report = {"seconds": 1.25, "path": "/runs/a/1", "parts": ["state"]}
    report["items"] = {"state": {"item": "tree", "tree": "0" * 64, "bytes": 1 << 30}}
    value = json.dumps({"problem": None, "mark": "", "value": report}).encode()

    def put(index: int) -> None:
        service.put(f"{key}/from/{index}", b"[]\n" + value, timeout_s=60)

    def get(_: int) -> None:
        assert service.wait(f"{key}/outcome", timeout_s=60)

    with ThreadPoolExecutor(16) as pool:
        start = time.perf_counter()
        list(pool.map(put, range(1, count)))
        rounds = Distributed(index=0, count=count, service=service)
        began = time.perf_counter()
        meet(rounds.within(60), "a", report, None, _judged)
        own = time.perf_counter() - began
        list(pool.map(get, range(1, count)))
        whole = time.perf_counter() - start
    return {"whole": whole, "process 0": own, "bytes": service.bytes}


def _judged(reports: list[Any]) -> dict[str, Any]:
    """Judges as a save does."""
    others = [i for i, one in enumerate(reports) if one["path"] != reports[0]["path"]]
    return {**first_of(dict.fromkeys(others, "another path")), "slowest": slowest_of(reports)}


class _CountedService:
    """Counts the bytes of values that pass a service, there and back."""

    def __init__(self, service: Any) -> None:
        self._service, self.bytes = service, 0

    def put(self, key: str, value: bytes, *, timeout_s: float) -> bool:
        self.bytes += len(value)
        return self._service.put(key, value, timeout_s=timeout_s)

    def wait(self, key: str, *, timeout_s: float) -> bytes | None:
        found = self._service.wait(key, timeout_s=timeout_s)
        self.bytes += len(found or b"")
        return found

    def under(self, directory: str, *, timeout_s: float) -> dict[str, bytes]:
        found = self._service.under(directory, timeout_s=timeout_s)
        self.bytes += sum(map(len, found.values()))
        return found

    def delete(self, directory: str, *, timeout_s: float) -> None:
        self._service.delete(directory, timeout_s=timeout_s)


def _coordination_service() -> Any:
    """Starts a service of JAX for a job of one process, and connects to it."""
    from jaxckpt.multihost._service import _Service

    _jax = import_module("jax._src.lib")._jax
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    service = _jax.get_distributed_runtime_service(address, 1)
    client = _jax.get_distributed_runtime_client(address, 0)
    client.connect()
    _running.append((service, client))
    return _Service(client)


_running: list[Any] = []  # services end with the program


def _plan(count: int, leaves: int) -> dict[str, float]:
    """Measures the busiest processes: the middle one for the plan, the first for the metadata."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from jaxckpt._core.plan import ArraySpec, placement_of, plan_save
    from jaxckpt._disk.writer import metadata_files
    from jaxckpt._save.tree_plan import saved_sharding
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
    tree = Tree(
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
    )
    placed = zip(names, arrays, strict=True)
    saved = {name: saved_sharding(shardings[spec]) for name, (spec, _) in placed}
    size = sum(map(len, metadata_files(tree, saved).values()))
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
