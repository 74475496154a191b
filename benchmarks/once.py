"""Restores with and without reading each value once: `python -m benchmarks.once`.

    python -m benchmarks.once                    a store behind a line of 20 MB/s, 8 processes
    python -m benchmarks.once --processes 2 4 8
    python -m benchmarks.once --line 0 --pairs 5 no limit: the machine itself
    python -m benchmarks.once --leaves 64        as many arrays, of `--megabytes` together
    python -m benchmarks.once --disk             a local directory that all processes share
    python -m benchmarks.once --hosts 10         a line of 10 MB/s for each process
    python -m benchmarks.once --counts           bytes of many ways to shard, without times

One process saves arrays of `--megabytes`, each in 8 parts; the processes of a job, each with one
CPU device, want them replicated, by columns, or on a mesh of dp x tp. A row has the bytes that the
store answered beside those of the arrays, and the seconds of the slowest process, compilation
included: the medians of `--pairs`. "One reader" is a restore by process 0, and JAX's broadcast.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

_DEVICES: Final = 8
_TIMEOUT_S: Final = 600.0
# Saved on a mesh of 8 devices as `save_layouts` says, and wanted by so many processes.
_WAYS: Final = [
    *((f"replicated, {n}", "rows", n, {"x": n}, []) for n in (2, 4, 8, 16)),
    ("dp4 x tp2", "rows", 8, {"dp": 4, "tp": 2}, [None, "tp"]),
    ("dp2 x fsdp4", "rows", 8, {"dp": 2, "fsdp": 4}, ["fsdp"]),
    ("dp4 x fsdp4", "rows", 16, {"dp": 4, "fsdp": 4}, ["fsdp"]),
    ("rows to columns", "rows", 8, {"x": 8}, [None, "x"]),
    ("4-2-1 to 1-8-1", "grid", 8, {"x": 8}, [None, "x", None]),
    ("8 to 3 processes, rows", "rows", 3, {"x": 3}, ["x"]),
    ("8 to 6 processes, dp3 x tp2", "rows", 6, {"dp": 3, "tp": 2}, [None, "tp"]),
    ("one chunk, replicated", "chunk", 8, {"x": 8}, []),
    ("one chunk, rows", "chunk", 8, {"x": 8}, ["x"]),
    ("1,500 leaves of 8 KB, replicated", "small", 8, {"x": 8}, []),
    *((f"{name}, replicated", name, 4, {"x": 4}, []) for name in ("bfloat16", "int4", "float8")),
]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[8])
    parser.add_argument("--megabytes", type=int, default=134)
    parser.add_argument("--leaves", type=int, default=1)
    parser.add_argument("--line", type=float, default=20.0, help="MB/s from the store, for all")
    parser.add_argument("--hosts", type=float, default=0.0, help="MB/s for each process instead")
    parser.add_argument("--pairs", type=int, default=1, help="medians of so many")
    parser.add_argument(
        "--auto", action="store_true", help="the default in place of read_once=True"
    )
    parser.add_argument("--disk", action="store_true", help="a local directory, not a store")
    parser.add_argument("--counts", action="store_true", help="bytes only, of many ways to shard")
    args = parser.parse_args(argv)
    other = "one reader" if args.hosts else "direct"
    head = ["processes", "wanted", f"{other}: times read", "seconds"]
    head += ["once: times read", "seconds", "times as fast"]
    if args.counts:
        head = ["wanted", "direct: times read", "disk", "gs", "s3", "gs, with all metadata"]
    print("| " + " | ".join(head) + " |")
    print("|" + " --- |" * (1 if args.counts else 2) + " ---: |" * 5)
    with tempfile.TemporaryDirectory() as folder:
        for cells in (counts if args.counts else measure)(args, folder):
            print("| " + " | ".join(cells) + " |", flush=True)


def measure(args: argparse.Namespace, folder: str) -> Iterator[list[str]]:
    """Yields a row for each number of processes and each way to shard."""
    from tests.multiprocess import run_processes
    from tests.stores import servers
    from tests.stores.proxy import Proxy

    with servers.gcs() as store, contextlib.ExitStack() as stack:
        most = max(args.processes) if args.hosts else 1
        proxies = [stack.enter_context(Proxy(store.url)) for _ in range(most)]
        server = store.with_new_bucket()
        url = str(Path(folder, "a")) if args.disk else f"gs://{server.bucket}/a"
        envs = [dict(server.at(proxy.url).env) for proxy in proxies]
        save = [url, args.megabytes, envs[0], args.leaves]
        run_processes("once:save_parts", count=1, devices_per_process=_DEVICES, args=save)
        for proxy in proxies:
            proxy.answers_bytes_per_s = (args.hosts or args.line) * 1e6 or None

        def restore(count: int, target: Any, once: bool | str) -> tuple[float, float]:
            for proxy in proxies:
                proxy.requests.clear()
            done = run_processes(
                "once:time_restore",
                count=count,
                devices_per_process=1,
                args=[url, target, once, envs],
                timeout_s=_TIMEOUT_S,
            )
            # The kernel's count has the modules too that a restore imports.
            read = sum(one.sent_bytes for proxy in proxies for one in proxy.requests.all())
            read = done[0].result["job"] if args.disk else read
            return read / done[0].result["size"], max(one.result["seconds"] for one in done)

        for count in args.processes:
            wanted: dict[str, Any] = {
                "replicated": ({"x": count}, []),
                "columns": ({"x": count}, [None, "x"]),
                "dp x tp": ({"dp": count // 2, "tp": 2}, [None, "tp"]),
            }
            for name, target in [*wanted.items()][: 1 if args.hosts else None]:
                ways: list[Any] = [
                    "one reader" if args.hosts else False,
                    "auto" if args.auto else True,
                ]
                pairs = [[restore(count, target, way) for way in ways] for _ in range(args.pairs)]
                found = [
                    [statistics.median(one[way][cell] for one in pairs) for cell in (0, 1)]
                    for way in (0, 1)
                ]
                faster = statistics.median(direct[1] / once[1] for direct, once in pairs)
                cells = [f"{times:.3f} | {seconds:.1f}" for times, seconds in found]
                yield [str(count), name, *cells, f"{faster:.2f}"]


def counts(args: argparse.Namespace, folder: str) -> Iterator[list[str]]:
    """Yields a row for each way to shard: how many times the job reads what it wants."""
    from tests.multiprocess import run_processes
    from tests.stores import servers

    with servers.gcs() as gcs, servers.moto() as moto:
        stores = {f"gs://{gcs.bucket}": gcs, f"s3://{moto.bucket}": moto}
        roots = {folder: {}, **{root: dict(store.env) for root, store in stores.items()}}
        for root, env in roots.items():
            save = [root, env]
            run_processes("once:save_layouts", count=1, devices_per_process=_DEVICES, args=save)
        for name, leaf, count, axes, spec in _WAYS:
            found = {}
            for root, env in roots.items():
                for once in (False, True) if root == folder else (True,):
                    assert gcs.running is not None
                    gcs.running.requests.clear()
                    done = run_processes(
                        "once:count_restore",
                        count=count,
                        devices_per_process=1,
                        args=[f"{root}/{leaf}", (axes, spec), once, env],
                        timeout_s=_TIMEOUT_S,
                    )
                    found[root, once] = done[0].result["job"] / done[0].result["size"]
                    if root.startswith("gs"):
                        sent = sum(one.sent_bytes for one in gcs.running.requests.all())
                        found["sent"] = sent / done[0].result["size"]
            cells = [found[folder, False], *(found[root, True] for root in roots), found["sent"]]
            yield [name, *(f"{times:.3f}" for times in cells)]


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
