"""Counts what the processes of real jobs tell each other: `python -m benchmarks.meetings 2 4 8 16`.

Each process has one CPU device and `jax.distributed`, all on this machine. They save and restore a
sharded array with a manager, a few times. A row has the rounds of one save and of one restore, the
bytes that process 0 and the busiest other process send and are sent, and the seconds that a save
took. On few cores these are the seconds of many processes that share them, not those of a job.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.processes import _reserved_port as reserved_port

_STEPS: Final = 5
_TIMEOUT_S: Final = 300.0


def main() -> None:
    """Prints a table by number of processes; or, with `--worker`, is one of them."""
    if sys.argv[1] == "--worker":
        index, count, port = map(int, sys.argv[2:5])
        return work(index, count, port, Path(sys.argv[5]))
    head = ["processes", "rounds of a save", "of a restore", "bytes of process 0", "of another"]
    print("| " + " | ".join([*head, "seconds of a save"]) + " |")
    print("| ---: " * 6 + "|")
    for count in map(int, sys.argv[1:]):
        first, *others = measure(count)
        other = max(others, key=lambda one: one["bytes"])
        cells = [count, first["save rounds"], first["restore rounds"], first["bytes"]]
        print(f"| {' | '.join(map(str, cells))} | {other['bytes']} | {first['seconds']:.2f} |")
    return None


def measure(count: int) -> list[dict[str, float]]:
    """Returns what each process of a job counted."""
    with tempfile.TemporaryDirectory() as name, reserved_port() as port:
        env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        command = [sys.executable, "-m", "benchmarks.meetings", "--worker"]
        jobs = [
            subprocess.Popen([*command, str(i), str(count), str(port), name], env=env)
            for i in range(count)
        ]
        try:
            for job in jobs:
                if job.wait(_TIMEOUT_S):
                    raise RuntimeError(f"a process of {count} ended with {job.returncode}")
        finally:
            for job in jobs:
                job.kill()
        return [json.loads(Path(name, f"{i}.json").read_text()) for i in range(count)]


def work(index: int, count: int, port: int, folder: Path) -> None:
    """Saves and restores as one process, and writes what its rounds took."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxckpt
    from jaxckpt.multihost import current, playing

    jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    tree = {"w": jax.device_put(np.ones((count, 4096), np.float32), NamedSharding(mesh, P("x")))}
    processes: Any = current()
    service: Any = _Counted(processes.service)
    rounds = replace(processes, service=service)
    facts: dict[str, float] = {}
    with playing(rounds), jaxckpt.CheckpointManager(folder / "run") as manager:
        manager.save(0, tree)
        manager.wait_until_finished()
        for what, act in {
            "save": lambda step: manager.save(step, tree),
            "restore": lambda step: manager.restore(tree, step=step),
        }.items():
            before, start, service.bytes = sum(rounds._uses.values()), time.perf_counter(), 0
            for step in range(1, 1 + _STEPS):
                act(step)
                manager.wait_until_finished()
            facts[f"{what} rounds"] = (sum(rounds._uses.values()) - before) // _STEPS
            facts.setdefault("seconds", (time.perf_counter() - start) / _STEPS)
            facts.setdefault("bytes", service.bytes // _STEPS)
    (folder / f"{index}.json").write_text(json.dumps(facts))


class _Counted:
    """Counts the bytes of values that a process sends and is sent."""

    def __init__(self, service: Any) -> None:
        self._service, self.bytes = service, 0

    def __getattr__(self, verb: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            found = getattr(self._service, verb)(*args, **options)
            values = found.values() if isinstance(found, dict) else [found]
            self.bytes += sum(len(data) for data in (*args, *values) if isinstance(data, bytes))
            return found

        return call


if __name__ == "__main__":
    main()
