"""Measures peers in jobs of several processes, as on several hosts, all on this machine.

A job consists of `count` processes that `jax.distributed` connects over loopback. Together they
have the eight CPU devices that one process has in `benchmarks.timing`, so they save and restore the
same bytes on the same mesh, each its share. They run `benchmarks.worker`: rounds in which every
peer does the same thing at nearly the same time, with a barrier of all processes before each part.
A sample is the wall time of the slowest process, because a job waits for that process.

The processes also share the cores: four processes on two cores show the cost of coordination, not
the speed of four hosts.

A job ends in one of three ways: every process has written its seconds; one failed, and the others,
which wait for it, are killed; or time ran out, and all are killed. No process outlives the call. If
this process is killed, each of them ends when the pipe on its standard input closes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.timing import Samples
from benchmarks.workloads import DEVICES, WORKLOADS

# A part of `benchmarks.peers.PEERS`. The roofline is left out: it is one file of one process.
JOINT_PEERS: Final = ("jaxckpt", "v1", "v0")

# Orbax takes over a minute for one round of the slowest workload.
_ROUND_TIMEOUT_S: Final = 600.0
# For importing, connecting and building, during which JAX compares the values of all processes.
_START_TIMEOUT_S: Final = 300.0
_TAIL_LINES: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The measurement of a job; see the arguments of `measure_processes`."""

    workload: str
    scale: float
    peers: Sequence[str]
    root: Path
    repeats: int

    @property
    def timeout_s(self) -> float:
        return _START_TIMEOUT_S + _ROUND_TIMEOUT_S * (self.repeats + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Running processes by index, and the folder of their `<index>.log` and `<index>.json`."""

    processes: Sequence[subprocess.Popen[bytes]]
    folder: Path


def measure_processes(
    counts: Sequence[int],
    *,
    workload: str,
    scale: float,
    peers: Sequence[str],
    root: Path,
    repeats: int,
) -> dict[int, Samples]:
    """Measures every figure of every peer in one job of each size, `repeats` + 1 times.

    Args:
        counts: Numbers of processes; each must divide the eight devices.
        workload: One of `WORKLOADS`, at `scale`.
        peers: Some of `JOINT_PEERS`.
        root: Where to save; left as it was.
        repeats: The number of counted rounds.

    Returns:
        By count: figure -> name of the peer -> seconds of the slowest process in each round.

    Raises:
        RuntimeError: a process failed; names it and its exit status.
        TimeoutError: some processes did not end in time; names them and their current part.
    """
    _check(counts, workload, peers)
    study = Study(workload=workload, scale=scale, peers=peers, root=root, repeats=repeats)
    results: dict[int, Samples] = {}
    for count in counts:
        with started(study, count=count) as job:
            results[count] = samples(job, timeout_s=study.timeout_s)
    return results


@contextlib.contextmanager
def started(study: Study, *, count: int) -> Iterator[Job]:
    """Starts a job; on exit, ends its processes, releases its port and removes its files."""
    with (
        tempfile.TemporaryDirectory(dir=study.root, prefix="bench-") as name,
        _reserved_port() as port,
        contextlib.ExitStack() as running,
    ):
        folder = Path(name).resolve()  # Orbax accepts only absolute paths
        options = _options(study, count=count, port=port, folder=folder)
        processes = []
        for index in range(count):
            with (folder / f"{index}.log").open("wb") as log:
                process = subprocess.Popen(
                    [*options, f"--index={index}", f"--out={folder / f'{index}.json'}"],
                    stdin=subprocess.PIPE,  # carries no data; it closes when this process ends
                    stdout=log,  # a file, since a full pipe would block the process
                    stderr=subprocess.STDOUT,
                    env=_environment(DEVICES // count),
                )
            running.enter_context(process)  # closes the pipe and waits on exit
            running.callback(process.kill)
            processes.append(process)
        yield Job(processes=processes, folder=folder)


def samples(job: Job, *, timeout_s: float) -> Samples:
    """Waits until all processes have ended, and returns the seconds of the slowest process."""
    _wait(job, timeout_s=timeout_s)
    each = [job.folder / f"{index}.json" for index in range(len(job.processes))]
    return slowest([json.loads(path.read_text()) for path in each])


def slowest(of_each: Sequence[Samples]) -> Samples:
    """Returns, for every sample, the maximum over the processes.

    Example:
        >>> slowest([{"save": {"jaxckpt": [1.0, 4.0]}}, {"save": {"jaxckpt": [2.0, 3.0]}}])
        {'save': {'jaxckpt': [2.0, 4.0]}}
    """

    def most(figure: str, peer: str) -> list[float]:
        rounds = zip(*(samples[figure][peer] for samples in of_each), strict=True)
        return [max(values) for values in rounds]

    return {
        figure: {peer: most(figure, peer) for peer in by_peer}
        for figure, by_peer in of_each[0].items()
    }


def _check(counts: Sequence[int], workload: str, peers: Sequence[str]) -> None:
    if wrong := [count for count in counts if count < 1 or DEVICES % count]:
        raise ValueError(f"{wrong} processes cannot share {DEVICES} devices evenly")
    if workload not in WORKLOADS:
        raise ValueError(f"unknown workload {workload!r}; choose from {', '.join(WORKLOADS)}")
    if wrong := [peer for peer in peers if peer not in JOINT_PEERS]:
        raise ValueError(f"unknown peers {wrong}; choose from {', '.join(JOINT_PEERS)}")


def _options(study: Study, *, count: int, port: int, folder: Path) -> list[str]:
    options = {
        "count": count,
        "port": port,
        "workload": study.workload,
        "scale": study.scale,
        "peers": ",".join(study.peers),
        "repeats": study.repeats,
        "folder": folder,
    }
    given = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "benchmarks.worker", *given]


def _environment(devices: int) -> Mapping[str, str]:
    # Without this, gRPC would send its loopback traffic to the proxy.
    env = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    flag = "--xla_force_host_platform_device_count"
    flags = [word for word in env.get("XLA_FLAGS", "").split() if not word.startswith(flag)]
    here = str(Path(__file__).resolve().parents[1])
    return {
        **env,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join([*flags, f"{flag}={devices}"]),
        "PYTHONPATH": os.pathsep.join(filter(None, [here, env.get("PYTHONPATH")])),
    }


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """Reserves a free loopback port, so that no other program gets it.

    gRPC binds with SO_REUSEPORT, so process 0 can bind it too. Since this socket never listens,
    every connection goes to process 0.
    """
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def _wait(job: Job, *, timeout_s: float) -> None:
    """Waits for all processes to succeed; if one fails, kills all of them at once and raises."""
    with concurrent.futures.ThreadPoolExecutor(
        len(job.processes), thread_name_prefix="benchmarks-wait"
    ) as pool:
        waits = [pool.submit(process.wait) for process in job.processes]
        try:
            with contextlib.suppress(TimeoutError):
                for wait in concurrent.futures.as_completed(waits, timeout=timeout_s):
                    if wait.result() != 0:
                        break
            statuses = [wait.result() if wait.done() else None for wait in waits]
        finally:
            for process in job.processes:  # otherwise the threads would not end
                process.kill()
    failed = [i for i, status in enumerate(statuses) if status]
    late = [i for i, status in enumerate(statuses) if status is None]
    if failed:
        raise RuntimeError("\n".join(_ending(job, index, statuses[index]) for index in failed))
    if late:
        endings = "\n".join(_ending(job, index, None) for index in late)
        raise TimeoutError(f"waited {timeout_s:g} s for {len(late)} processes\n{endings}")


def _ending(job: Job, index: int, status: int | None) -> str:
    log = (job.folder / f"{index}.log").read_text(encoding="utf-8", errors="replace")
    tail = "\n".join(f"    {line}" for line in log.splitlines()[-_TAIL_LINES:])
    how = "did not end" if status is None else f"ended with {status}"
    return f"process {index} of {len(job.processes)} {how}. Its last output:\n{tail}"
