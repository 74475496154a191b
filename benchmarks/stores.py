"""Measures checkpoints in object stores on this machine: requests, throughput, slow answers.

    python -m benchmarks.stores              needs the group test
    python -m benchmarks.stores --quick

Times are those of servers that share the machine's cores: only ratios within one run mean much.
"""

from __future__ import annotations

import argparse
import multiprocessing
import operator
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

import jaxckpt
from benchmarks.timing import peak_rss
from jaxckpt.storage import kvstore, locate
from jaxckpt.storage._requests import Requests
from tests.stores import servers
from tests.stores.orbax_on_gs import run_orbax
from tests.stores.proxy import Delay, Proxy

LATENCY_S: Final = 0.05
SLOW_S: Final = 5.0
SLOW_SHARE: Final = 0.01
_LEAF_BYTES: Final = 8 << 20
_TREE: Final = {f"leaf_{i}": np.arange(1 << 20, dtype=np.float32) + i for i in range(8)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the bytes and repeats")
    args = parser.parse_args(argv)
    part = 10 if args.quick else 1
    print("## Requests and seconds of a small step, each request 50 ms\n")
    for line in small_step(repeats=max(3, 10 // part)):
        print(line, flush=True)
    print("\n## 806 MB beside TensorStore alone, on SeaweedFS\n")
    for line in throughput(leaves=max(4, 96 // part), repeats=max(2, 5 // part)):
        print(line, flush=True)
    print("\n## Memory beside the 806 MB, on SeaweedFS\n")
    for line in memory(leaves=max(4, 96 // part)):
        print(line, flush=True)
    print("\n## Restores while 1 % of the answers take 5 s longer\n")
    for line in slow_answers(repeats=max(20, 200 // part)):
        print(line, flush=True)
    print("\n## What deadlines, tries and second requests cost a restore of 34 MB\n")
    for line in cost_of_care(repeats=max(10, 100 // part)):
        print(line, flush=True)


# --- a small step ------------------------------------------------------------------------------


def small_step(*, repeats: int) -> Iterator[str]:
    tree = {"w": np.arange(1 << 14, dtype=np.float32), "step": 3}
    with servers.gcs() as server:
        server = server.with_new_bucket()
        os.environ.update(server.env)
        running, url = server.running, f"gs://{server.bucket}"
        assert running is not None
        found: dict[str, list[tuple[float, int]]] = {}

        def note(name: str, call: Callable[[], object]) -> None:
            running.requests.clear()
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
            found.setdefault(name, []).append((seconds, len(running.requests.all())))

        with jaxckpt.CheckpointManager(f"{url}/run") as manager:
            manager.save(0, tree)
            manager.wait_until_finished()
            jaxckpt.restore(f"{url}/run/0", tree)
            running.delay_s = LATENCY_S
            for i in range(1, repeats + 1):
                note("save", lambda i=i: manager.save(i, tree).result())  # pyright: ignore
                manager.wait_until_finished()
                note("restore(path, like)", lambda i=i: jaxckpt.restore(f"{url}/run/{i}", tree))
                note("latest_step", manager.latest_step)
            orbax = run_orbax("time", f"{url}/orbax", server)
            running.delay_s = 0.0
    yield "| | requests | seconds (median) |"
    yield "| --- | --- | --- |"
    for name, samples in found.items():
        times, counts = zip(*samples, strict=True)
        yield f"| {name} | {max(counts)} | {statistics.median(times):.2f} |"
    for name, times in orbax.items():
        yield f"| Orbax {name} | | {statistics.median(times):.2f} |"


# --- throughput --------------------------------------------------------------------------------


def throughput(*, leaves: int, repeats: int) -> Iterator[str]:
    tree = _large(leaves)
    with servers.seaweedfs() as server:
        server = server.with_new_bucket()
        os.environ.update(server.env)
        url = f"s3://{server.bucket}"
        found: dict[str, list[float]] = {}
        for i in range(repeats):
            calls: dict[str, Callable[[], object]] = {
                "TensorStore writes": lambda i=i: _write_alone(f"{url}/ts{i}", tree),
                "save": lambda i=i: jaxckpt.save(f"{url}/ours{i}", tree),
                "TensorStore reads": lambda i=i: _read_alone(f"{url}/ts{i}", tree),
                "restore": lambda i=i: jaxckpt.restore(f"{url}/ours{i}", tree),
            }
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                found.setdefault(name, []).append(time.perf_counter() - start)
            for name in ("ts", "ours"):
                storage, path = locate(f"{url}/{name}{i}")
                storage.delete(path)
    yield "| | MB/s (median) | share of TensorStore alone, in pairs (median) |"
    yield "| --- | --- | --- |"
    size = leaves * _LEAF_BYTES / 1e6
    for alone, ours in (("TensorStore writes", "save"), ("TensorStore reads", "restore")):
        ratio = statistics.median(a / b for a, b in zip(found[alone], found[ours], strict=True))
        yield f"| {alone} | {size / statistics.median(found[alone]):.0f} | 1 |"
        yield f"| {ours} | {size / statistics.median(found[ours]):.0f} | {ratio:.2f} |"


def _large(leaves: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return {
        f"leaf_{i:03d}": rng.integers(0, 1 << 30, _LEAF_BYTES // 4, np.int32) for i in range(leaves)
    }


def _spec(url: str) -> dict[str, Any]:
    _, path = locate(url)
    return {
        "driver": "ocdbt",
        "base": kvstore(path),
        "config": {"max_inline_value_bytes": 4096},
        "target_data_file_size": 64 << 20,
    }


def _arrays(url: str, tree: dict[str, np.ndarray[Any, Any]], **how: Any) -> Iterator[Any]:
    import tensorstore as ts

    from jaxckpt.storage._arrays import context

    for name, values in tree.items():
        metadata = {
            "shape": values.shape,
            "data_type": "int32",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": values.shape}},
            "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
        }
        kvstore = {**_spec(url), "path": f"{name}/"}
        spec = {"driver": "zarr3", "kvstore": kvstore, "metadata": metadata}
        yield ts.open(spec, context=context(), **how)


def _write_alone(url: str, tree: dict[str, np.ndarray[Any, Any]]) -> None:
    import tensorstore as ts

    transaction = ts.Transaction(atomic=True)
    opened = [*_arrays(url, tree, create=True, transaction=transaction)]
    writes = [
        array.result().write(values, can_reference_source_data_indefinitely=True)
        for array, values in zip(opened, tree.values(), strict=True)
    ]
    transaction.commit_sync()
    for write in writes:
        write.result()


def _read_alone(url: str, tree: dict[str, np.ndarray[Any, Any]]) -> None:
    opened = [*_arrays(url, tree, open=True)]
    for read in [array.result().read() for array in opened]:
        read.result()


# --- memory ------------------------------------------------------------------------------------


def memory(*, leaves: int) -> Iterator[str]:
    yield "| | MB |"
    yield "| --- | --- |"
    with servers.seaweedfs() as server:
        server = server.with_new_bucket()
        os.environ.update(server.env)
        url = f"s3://{server.bucket}"
        for budget_bytes in (None, 1 << 30, 1 << 27):  # each in a new process
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                peak = pool.apply(_peak, (url, leaves, budget_bytes)) / 1e6
            name = f"restore, budget of {budget_bytes >> 20} MiB" if budget_bytes else "save"
            yield f"| {name} | {peak:.0f} |"


def _peak(url: str, leaves: int, budget_bytes: int | None) -> float:
    """Returns the most memory in bytes that a save took, or a restore besides its result."""
    if budget_bytes is None:
        tree = _large(leaves)
        jaxckpt.save(f"{url}/small", {"w": np.ones(3)})
        with peak_rss() as peak:
            jaxckpt.save(f"{url}/large", tree)
        return peak[0]
    jaxckpt.restore(f"{url}/small")
    with peak_rss() as peak:
        jaxckpt.restore(f"{url}/large", budget_bytes=budget_bytes)
    return peak[0] - leaves * _LEAF_BYTES


# --- slow answers ------------------------------------------------------------------------------


def slow_answers(*, repeats: int) -> Iterator[str]:
    chance = random.Random(0)
    with servers.gcs() as server, Proxy(server.url) as proxy:
        server = server.with_new_bucket().at(proxy.url)
        os.environ.update(server.env)
        url = f"gs://{server.bucket}/a"
        jaxckpt.save(url, _TREE)
        times: dict[str, list[float]] = {"undelayed": [], "delayed": []}
        for _ in range(20):
            jaxckpt.restore(url, _TREE)
        for _ in range(repeats):
            for name, samples in times.items():
                proxy.heal()
                if name == "delayed":
                    proxy.add(Delay(SLOW_S), when=lambda _: chance.random() < SLOW_SHARE)
                start = time.perf_counter()
                jaxckpt.restore(url, _TREE)
                samples.append(time.perf_counter() - start)
    yield "| | median s | p99 s |"
    yield "| --- | --- | --- |"
    for name, samples in times.items():
        samples.sort()
        p99 = samples[int(0.99 * (len(samples) - 1))]
        yield f"| {name} | {statistics.median(samples):.3f} | {p99:.3f} |"


# --- the cost of deadlines and second requests -------------------------------------------------


def cost_of_care(*, repeats: int) -> Iterator[str]:
    requests: Any = Requests
    careful, bare = (requests.read, requests.change), (_send, _send_change)
    yield "| each request | seconds (median) | without (median) | ratio in pairs (median) |"
    yield "| --- | --- | --- | --- |"
    with servers.gcs() as server:
        server = server.with_new_bucket()
        os.environ.update(server.env)
        running, url = server.running, f"gs://{server.bucket}/a"
        assert running is not None
        jaxckpt.save(url, _TREE)
        for _ in range(20):
            jaxckpt.restore(url, _TREE)
        for delay_s in (0.0, LATENCY_S):
            running.delay_s = delay_s
            times: dict[Any, list[float]] = {careful: [], bare: []}
            for i in range(repeats):
                for way in (careful, bare) if i % 2 else (bare, careful):
                    requests.read, requests.change = way
                    start = time.perf_counter()
                    jaxckpt.restore(url, _TREE)
                    times[way].append(time.perf_counter() - start)
            ratio = statistics.median(map(operator.truediv, times[careful], times[bare]))
            medians = " | ".join(f"{statistics.median(one):.3f}" for one in times.values())
            yield f"| {delay_s * 1000:.0f} ms more | {medians} | {ratio:.3f} |"
        running.delay_s = 0.0
        requests.read, requests.change = careful


def _send(_: Any, what: str, path: str, call: Callable[[], Any], **how: Any) -> Any:
    return call()


def _send_change(_: Any, what: str, path: str, call: Callable[[bool], Any], **how: Any) -> Any:
    return call(False)


if __name__ == "__main__":
    main()
