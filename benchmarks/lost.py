"""Restores of hosts whose disks were lost, beside lost bytes / line: `python -m benchmarks.lost`.

Four hosts, each a network namespace (which needs root) with a line of `--line` MB/s for what it
sends, save a state of `--megabytes` that two hosts divide and two others have too (HSDP). Then
disks are lost. A row has the bytes L that some process lacks, the seconds of `restore_or` in the
slowest process beyond those of a restore without a loss, and L / line: the medians of `--times`.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

_HOSTS: Final = [0, 1, 2, 3]
_WAYS: Final = {
    # what: disks lost, hosts of the next job, hosts that are peers
    "no disk": ([], _HOSTS, []),
    "one disk": ([1], _HOSTS, []),
    "two disks, of other halves": ([1, 2], _HOSTS, []),
    "two hosts, of one half; one disk is a peer": ([], [1, 3], [0]),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--line", type=float, default=20.0, help="MB/s that each host sends")
    parser.add_argument("--times", type=int, default=3)
    args = parser.parse_args(argv)
    from tests.faults.zygote import Zygote

    print("| lost | L in MB | seconds | seconds more | L / line |")
    print("| --- | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, Zygote(Path(folder)) as zygote:
        without = 0.0
        for what, (lost, hosts, peers) in _WAYS.items():
            root = Path(folder) / "root"
            times = [
                _seconds(zygote, root, args.megabytes, args.line, lost, hosts, peers)
                for _ in range(args.times)
            ]
            seconds = statistics.median(times)
            without = without or seconds
            lacked = args.megabytes * len({host % 2 for host in lost} or peers) / 2
            more = f"{seconds - without:.1f} | {lacked / args.line:.1f}"
            print(f"| {what} | {lacked:g} | {seconds:.1f} | {more} |", flush=True)


def _seconds(
    zygote: Any,
    root: Path,
    megabytes: int,
    line: float,
    lost: Sequence[int],
    hosts: Sequence[int],
    peers: Sequence[int],
) -> float:
    """Returns how long the slowest process takes to restore, on disks that are made for it."""
    from benchmarks.lost import work  # not that of `__main__`, which no other process knows
    from tests.faults.jobs import started
    from tests.faults.test_network import Network

    shutil.rmtree(root, ignore_errors=True)
    with Network(len(_HOSTS)) as network, contextlib.ExitStack() as stack:
        network.limit(line)
        urls = [f"http://10.77.0.{10 + host}:8000" for host in peers]
        job: dict[str, Any] = {**network.options, "devices": 1, "limit_s": 300}
        args = [root, _HOSTS, megabytes, True, urls or ["http://10.77.0.10:8000"]]
        with started(zygote, work, args=args, **job) as running:
            ends = running.wait()
        assert [end.status for end in ends] == [0] * len(_HOSTS), ends
        for host in lost:
            shutil.rmtree(root / f"host{host}")
        for host in peers:
            stack.enter_context(network.serving(host, root / f"host{host}/local"))
        files = [job["namespaces"][host] for host in hosts]
        job |= {"namespaces": files, "address": f"10.77.0.{10 + hosts[0]}", "count": len(hosts)}
        with started(zygote, work, args=[root, hosts, megabytes, False, urls], **job) as running:
            ends = running.wait()
        assert [end.status for end in ends] == [0] * len(hosts), ends
        return max(end.result for end in ends)


def work(
    me: Any, root: str, hosts: Sequence[int], megabytes: int, saves: bool, peers: Sequence[str]
) -> float:
    """Saves a step on the disk of this host, or restores it; returns how long the restore took."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import jaxckpt

    mesh = jax.make_mesh((jax.device_count() // 2, 2), ("copy", "row"))
    sharding = NamedSharding(mesh, PartitionSpec("row"))

    def init() -> dict[str, jax.Array]:
        return {"w": jnp.arange(megabytes * 250_000, dtype=jnp.float32).reshape(8, -1)}

    local = jaxckpt.LocalTier(
        f"{root}/host{hosts[me.index]}/local",
        save=jaxckpt.SavePolicy(every_steps=1),
        peers=peers,
    )
    never = jaxckpt.SavePolicy(every_steps=0)
    with jaxckpt.CheckpointManager(f"{root}/run", save=never, local=local) as manager:
        start_s = time.monotonic()
        state, start = manager.restore_or(jax.jit(init, out_shardings={"w": sharding}))
        jax.block_until_ready(state)
        took_s = time.monotonic() - start_s
        assert start == (0 if saves else 1), start
        if saves:
            manager.save(1, state)
        manager.wait_until_finished()
    return took_s


if __name__ == "__main__":
    main()
