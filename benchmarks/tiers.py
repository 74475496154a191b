"""Measures runs with a local disk in front of a bucket, beside local ones and direct ones.

    python -m benchmarks.tiers               needs the group test
    python -m benchmarks.tiers --quick
    python -m benchmarks.tiers --away-s 300  only training while the store is away for so long
    python -m benchmarks.tiers --hosts 2     only training of several hosts with disks of their own

The server shares the machine's cores, so only ratios within one run mean much.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

import jaxckpt
from tests import multiprocess
from tests.stores import servers
from tests.stores.proxy import Proxy, Reset

LINE_BYTES_PER_S: Final = 20_000_000
SAVE_EVERY: Final = 10
_LEAF_BYTES: Final = 8 << 20


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the bytes and repeats")
    parser.add_argument("--child", nargs=4, metavar=("KIND", "URL", "LOCAL", "LEAVES"))
    parser.add_argument("--hosts", type=int, metavar="COUNT")
    parser.add_argument("--away-s", type=float, metavar="SECONDS")
    args = parser.parse_args(argv)
    if args.child:
        kind, url, local, leaves = args.child
        print(json.dumps(train(kind, url, local, int(leaves))))
        return
    if args.away_s is not None:
        print(f"## Training with local saves while the store is away for {args.away_s:g} s\n")
        for line in away(args.away_s):
            print(line, flush=True)
        return
    part = 4 if args.quick else 1
    if args.hosts is not None:
        print(f"## Training of {args.hosts} processes, each with a disk of its own\n")
        for line in hosts(args.hosts, leaves=4, repeats=max(2, 6 // part)):
            print(line, flush=True)
        return
    print("## An upload beside the client alone, the same files, on SeaweedFS\n")
    for line in uploads(leaves=96 // part, repeats=max(2, 5 // part)):
        print(line, flush=True)
    print("\n## Training while a state is saved every 10 steps, seconds a step\n")
    for line in training(leaves=8, repeats=max(1, 4 // part)):
        print(line, flush=True)


# --- the upload ------------------------------------------------------------------------------


def uploads(*, leaves: int, repeats: int) -> Iterator[str]:
    """Yields a table of the throughput of uploads and of obstore alone, in pairs."""
    from jaxckpt._run.index import StepIndex
    from jaxckpt._run.upload import upload
    from jaxckpt.storage import locate

    found: dict[str, list[float]] = {"obstore alone": [], "upload": []}
    with tempfile.TemporaryDirectory(dir=_tmpfs()) as folder, servers.seaweedfs() as server:
        server = server.with_new_bucket()
        os.environ.update(server.env)
        with jaxckpt.CheckpointManager(folder) as manager:
            manager.save(1, _state(leaves, 0))
        source = StepIndex(*locate(folder))
        size = sum(file.stat().st_size for file in Path(folder, "1").rglob("*") if file.is_file())
        for i in range(repeats):
            start_s = time.perf_counter()
            _put_alone(Path(folder, "1"), f"s3://{server.bucket}", f"alone{i}")
            found["obstore alone"].append(time.perf_counter() - start_s)
            target = StepIndex(*locate(f"s3://{server.bucket}/ours{i}"))
            start_s = time.perf_counter()
            upload(source, target, 1)
            found["upload"].append(time.perf_counter() - start_s)
            for name in (f"alone{i}", f"ours{i}"):
                target.storage.delete(f"s3://{server.bucket}/{name}")
    yield "| | MB/s (median) | share of obstore alone, in pairs (median) |"
    yield "| --- | --- | --- |"
    for name, times in found.items():
        pairs = zip(found["obstore alone"], times, strict=True)
        share = statistics.median(a / b for a, b in pairs)
        yield f"| {name} | {size / 1e6 / statistics.median(times):.0f} | {share:.2f} |"


def _put_alone(step: Path, bucket: str, prefix: str) -> None:
    """Sends the files of a step as obstore does by default, several at once."""
    from concurrent.futures import ThreadPoolExecutor

    import obstore
    from obstore.store import from_url

    store = from_url(bucket)
    files = [file for file in step.rglob("*") if file.is_file()]
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(
            lambda file: obstore.put(store, f"{prefix}/{file.relative_to(step)}", file), files
        ):
            pass


# --- training ----------------------------------------------------------------------------------


def training(*, leaves: int, repeats: int) -> Iterator[str]:
    """Yields a table of the time of a step, for each way to save, over a line of 20 MB/s."""
    kinds = ("no saves", "local only", "local, then gs://", "directly to gs://", "Orbax to gs://")
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with _limited_store() as (env, bucket, _), tempfile.TemporaryDirectory(dir=_tmpfs()) as folder:
        for i in range(repeats):
            for n, kind in enumerate(kinds):
                place = f"gs://{bucket}/{i}-{n}", f"{folder}/{i}-{n}"
                command = [sys.executable, "-W", "ignore", "-m", "benchmarks.tiers", "--child"]
                done = subprocess.run(
                    [*command, kind, *place, str(leaves)],
                    env={**os.environ, **env},
                    stdout=subprocess.PIPE,
                    check=True,
                    text=True,
                )
                found[kind].append(json.loads(done.stdout.splitlines()[-1]))
    base = found["local only"]
    yield f"{leaves * _LEAF_BYTES / 1e6:.0f} MB a save, {LINE_BYTES_PER_S / 1e6:.0f} MB/s.\n"
    yield "| | s a step (median) | longest save call, s | whole loop, times local only |"
    yield "| --- | --- | --- | --- |"
    for kind, runs in found.items():
        ratio = statistics.median(
            a["loop_s"] / b["loop_s"] for a, b in zip(runs, base, strict=True)
        )
        step_s = statistics.median(run["step_s"] for run in runs)
        blocked_s = statistics.median(run["blocked_s"] for run in runs)
        yield f"| {kind} | {step_s:.3f} | {blocked_s:.3f} | {ratio:.2f} |"


def train(kind: str, url: str, local: str, leaves: int) -> dict[str, float]:
    """Trains for 60 steps and saves every tenth; returns the seconds of a step and of the loop."""
    import jax
    import jax.numpy as jnp

    state = _state(leaves, 1)
    work = jax.jit(lambda x: x @ x / 1000)
    x = jnp.ones((1000, 1000))
    jax.block_until_ready(work(x))
    steps, calls = [], [0.0]
    with contextlib.ExitStack() as stack:
        save = _saver(kind, url, local, leaves, stack)
        save(0, state)  # the first one makes connections and plans
        start_s = time.perf_counter()
        for step in range(1, 61):
            began_s = time.perf_counter()
            for _ in range(5):
                x = jax.block_until_ready(work(x))
            if step % SAVE_EVERY == 0:
                called_s = time.perf_counter()
                save(step, state)
                calls.append(time.perf_counter() - called_s)
            steps.append(time.perf_counter() - began_s)
        loop_s = time.perf_counter() - start_s
    return {"step_s": statistics.median(steps), "blocked_s": max(calls), "loop_s": loop_s}


def _saver(kind: str, url: str, local: str, leaves: int, stack: contextlib.ExitStack) -> Any:
    if kind == "no saves":
        return lambda step, state: None
    if kind == "Orbax to gs://":
        import orbax.checkpoint as ocp

        manager = stack.enter_context(ocp.CheckpointManager(url))
        return lambda step, state: manager.save(step, args=ocp.args.StandardSave(state))
    keep = jaxckpt.KeepPolicy(last=2)
    if kind == "local only":
        return stack.enter_context(jaxckpt.CheckpointManager(local, keep=keep)).save
    # As much memory for waiting saves as a large state leaves: one of them.
    options: dict[str, Any] = {"budget_bytes": leaves * _LEAF_BYTES}
    if kind == "local, then gs://":
        options = {"local": local}
    return stack.enter_context(jaxckpt.CheckpointManager(url, keep=keep, **options)).save


def hosts(count: int, *, leaves: int, repeats: int) -> Iterator[str]:
    """Yields a table of the training of several processes: local saves only, and with a bucket."""
    found: dict[str, list[dict[str, float]]] = {"local only": [], "local, then gs://": []}
    with _limited_store() as (env, bucket, _), tempfile.TemporaryDirectory(dir=_tmpfs()) as folder:
        for i in range(repeats + 1):
            for kind, runs in found.items() if i % 2 else reversed(found.items()):
                disks = [f"{folder}/{i}-host{n}" for n in range(count)]
                args: list[Any] = [f"{folder}/{i}", []]
                if kind != "local only":
                    args = [f"gs://{bucket}/{i}", disks]
                done = multiprocess.run_processes(
                    "tiers:time_training",
                    count=count,
                    devices_per_process=1,
                    args=[*args, 60, SAVE_EVERY, _LEAF_BYTES, leaves, env],
                    timeout_s=300,
                )
                if i:  # the first round is a warm-up
                    results = [dict(one.result) for one in done]
                    runs.append({key: max(one[key] for one in results) for key in results[0]})
    yield f"{leaves * _LEAF_BYTES / 1e6:.0f} MB of each process a save, 20 MB/s for all.\n"
    yield "| | longest save call, s | whole loop, times local only |"
    yield "| --- | --- | --- |"
    for kind, runs in found.items():
        pairs = zip(runs, found["local only"], strict=True)
        ratio = statistics.median(a["loop_s"] / b["loop_s"] for a, b in pairs)
        blocked_s = statistics.median(run["blocked_s"] for run in runs)
        yield f"| {kind} | {blocked_s:.3f} | {ratio:.2f} |"


def away(seconds: float) -> Iterator[str]:
    """Yields a table of the time of steps and saves while the store answers, then while not."""
    found: dict[str, dict[str, float]] = {}
    with (
        _limited_store() as (env, bucket, tell),
        tempfile.TemporaryDirectory(dir=_tmpfs()) as local,
    ):
        os.environ.update(env)
        keep = jaxckpt.KeepPolicy(last=2)
        with jaxckpt.CheckpointManager(f"gs://{bucket}/a", keep=keep, local=local) as manager:
            step = 1
            manager.save(step, _state(1, step))
            manager.wait_until_finished()
            for name, lasts_s in (("it answers", min(20.0, seconds)), ("it is away", seconds)):
                tell("go" if name == "it is away" else "answer")
                step, found[name] = _train_for(manager, step, lasts_s)
            tell("answer")
            start_s = time.perf_counter()
            while step not in (manager.tiers["durable"] or ()):
                time.sleep(0.05)
            caught_up_s = time.perf_counter() - start_s
    yield "| | s a step (median) | longest step, s | longest save call, s |"
    yield "| --- | --- | --- | --- |"
    for name, times in found.items():
        yield f"| {name} | " + " | ".join(f"{value:.3f}" for value in times.values()) + " |"
    yield f"\nThe newest step was durable {caught_up_s:.1f} s after the store was back."


def _train_for(
    manager: jaxckpt.CheckpointManager, step: int, seconds: float
) -> tuple[int, dict[str, float]]:
    import jax
    import jax.numpy as jnp

    state, work = _state(1, 1), jax.jit(lambda x: x @ x / 1000)
    x = jax.block_until_ready(work(jnp.ones((1000, 1000))))
    steps, calls, end_s = [], [], time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        step += 1
        began_s = time.perf_counter()
        for _ in range(5):
            x = jax.block_until_ready(work(x))
        called_s = time.perf_counter()
        if step % SAVE_EVERY == 0:
            manager.save(step, state)
            calls.append(time.perf_counter() - called_s)
        steps.append(time.perf_counter() - began_s)
    manager.save(step + 1, state)
    return step + 1, {
        "step_s": statistics.median(steps),
        "longest_s": max(steps),
        "blocked_s": max(calls),
    }


@contextlib.contextmanager
def _limited_store() -> Iterator[tuple[dict[str, str], str, Callable[[str], None]]]:
    """Runs a store behind a slow line, in a process of its own.

    Yields its variables, its bucket, and what tells it to "go" away or to "answer".
    """
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    child = spawn.Process(target=_serve, args=(theirs,))
    child.start()
    try:
        yield (*mine.recv(), mine.send)
    finally:
        mine.send("end")
        child.join()


def _serve(pipe: Any) -> None:
    with servers.gcs() as server, Proxy(server.url) as proxy:
        server = server.with_new_bucket().at(proxy.url)
        proxy.bytes_per_s = LINE_BYTES_PER_S
        orbax = {"STORAGE_EMULATOR_HOST": proxy.url, "FSSPEC_GS_TOKEN": "anon"}
        pipe.send(
            ({**server.env, **orbax, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}, server.bucket)
        )
        while (told := pipe.recv()) != "end":
            if told == "go":
                proxy.add(Reset())
            else:
                proxy.heal()


def _state(leaves: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {
        f"leaf_{i:03d}": rng.integers(0, 1 << 30, _LEAF_BYTES // 4, np.int32) for i in range(leaves)
    }


def _tmpfs() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


if __name__ == "__main__":
    main()
