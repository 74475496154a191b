"""Restores with and without reading each value once: `python -m benchmarks.once`.

    python -m benchmarks.once                    a store behind a line of 20 MB/s, 8 processes
    python -m benchmarks.once --processes 2 4 8
    python -m benchmarks.once --line 0           no limit: the machine itself
    python -m benchmarks.once --disk             a local directory that all processes share

One process saves an array of `--megabytes`, in 8 parts; the processes of a job, each with one CPU
device, want it replicated, by columns, or on a mesh of dp x tp. A row has the bytes that the store
answered beside those of the array, and the seconds of the slowest process, compilation included.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

_DEVICES: Final = 8
_TIMEOUT_S: Final = 600.0


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[8])
    parser.add_argument("--megabytes", type=int, default=134)
    parser.add_argument("--line", type=float, default=20.0, help="MB/s from the store, for all")
    parser.add_argument("--disk", action="store_true", help="a local directory, not a store")
    args = parser.parse_args(argv)
    head = ["processes", "wanted", "direct: times read", "seconds"]
    print("| " + " | ".join([*head, "once: times read", "seconds", "times as fast"]) + " |")
    print("| ---: | --- |" + " ---: |" * 5)
    with tempfile.TemporaryDirectory() as folder:
        for cells in measure(args, folder):
            print("| " + " | ".join(cells) + " |", flush=True)


def measure(args: argparse.Namespace, folder: str) -> Iterator[list[str]]:
    """Yields a row for each number of processes and each way to shard."""
    from tests.multiprocess import run_processes
    from tests.stores import servers
    from tests.stores.proxy import Proxy

    with servers.gcs() as store, Proxy(store.url) as proxy:
        server = store.with_new_bucket().at(proxy.url)
        url = str(Path(folder, "a")) if args.disk else f"gs://{server.bucket}/a"
        env = dict(server.env)
        save = ["once:save_parts", url, args.megabytes, env]
        run_processes(save[0], count=1, devices_per_process=_DEVICES, args=save[1:])
        proxy.answers_bytes_per_s = args.line * 1e6 or None
        for count in args.processes:
            wanted: dict[str, Any] = {
                "replicated": ({"x": count}, []),
                "columns": ({"x": count}, [None, "x"]),
                "dp x tp": ({"dp": count // 2, "tp": 2}, [None, "tp"]),
            }
            for name, target in wanted.items():
                found = []
                for once in (False, True):
                    proxy.requests.clear()
                    done = run_processes(
                        "once:time_restore",
                        count=count,
                        devices_per_process=1,
                        args=[url, target, once, env],
                        timeout_s=_TIMEOUT_S,
                    )
                    # The kernel's count has the modules too that a restore imports.
                    read = sum(one.sent_bytes for one in proxy.requests.all())
                    read = done[0].result["job"] if args.disk else read
                    seconds = max(one.result["seconds"] for one in done)
                    found.append((read / done[0].result["size"], seconds))
                cells = [f"{times:.3f} | {seconds:.1f}" for times, seconds in found]
                yield [str(count), name, *cells, f"{found[0][1] / found[1][1]:.1f}"]


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
