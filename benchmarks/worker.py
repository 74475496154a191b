"""Runs in each process of a job: measures saves and restores in step with the other processes.

`benchmarks.processes` starts several of these at once. Each process

1. connects to the others and builds its share of the workload, over one mesh of all devices;
2. runs the rounds. Within a round every peer saves and then restores, and the order of the peers is
   reversed from round to round (A B B A). All processes meet before each part, and each of them
   measures from there until it has finished itself;
3. writes its seconds as JSON, by figure and peer, and exits.

The first round is a warm-up: it is not counted, and the shards of this process are compared
instead. The last lines that a process prints show the part that it entered, and why it failed. A
process exits when its standard input ends, since its parent is then gone.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import shutil
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import jax
import numpy as np

from benchmarks.peers import PEERS, Peer
from benchmarks.timing import BLOCKED, SAVE, trim
from benchmarks.workloads import DEVICES, TARGETS, abstract, build, make_mesh
from jaxckpt.multihost import current

# Only meshes of all devices: on smaller meshes some processes would have nothing to do.
RESTORES: Final = {name: (x, y) for name, (x, y) in TARGETS.items() if x * y == DEVICES}
FIGURES: Final = (SAVE, BLOCKED, *RESTORES)

# Longer than any part: the processes that have finished wait for the slowest one.
_MEET_TIMEOUT_S: Final = 600.0
_CONNECT_TIMEOUT_S: Final = 120
_SHUTDOWN_TIMEOUT_S: Final = 60


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    # Orbax warns about its own deprecations at each call.
    warnings.filterwarnings("ignore", module="orbax")
    faulthandler.enable()
    threading.Thread(target=_end_with_parent, name="benchmarks-parent", daemon=True).start()
    try:
        _connect(args)
        seconds = _measure(args)
    except BaseException:
        _fail()
    args.out.write_text(json.dumps(seconds))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker", description=__doc__)
    parser.add_argument("--index", type=int, required=True, help="index of this process")
    parser.add_argument("--count", type=int, required=True, help="number of processes")
    parser.add_argument("--port", type=int, required=True, help="port of process 0, on loopback")
    parser.add_argument("--workload", required=True)
    parser.add_argument("--scale", type=float, required=True)
    parser.add_argument("--peers", type=lambda text: text.split(","), required=True)
    parser.add_argument("--repeats", type=int, required=True, help="number of counted rounds")
    parser.add_argument("--folder", type=Path, required=True, help="where all processes save")
    parser.add_argument("--out", type=Path, required=True, help="JSON file, written at the end")
    return parser.parse_args(argv)


def _connect(args: argparse.Namespace) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{args.port}",
        num_processes=args.count,
        process_id=args.index,
        initialization_timeout=_CONNECT_TIMEOUT_S,
        shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT_S,
    )
    if jax.device_count() != DEVICES:
        raise RuntimeError(f"the job must have {DEVICES} devices, got {jax.device_count()}")


def _measure(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Measures this process's seconds of every counted round: figure -> peer -> round."""
    peers = [PEERS[name]() for name in args.peers]
    tree = build(args.workload, scale=args.scale, mesh=make_mesh(4, 2))
    samples = {figure: {peer.name: [] for peer in peers} for figure in FIGURES}
    for i in range(args.repeats + 1):
        ordered = peers if i % 2 == 0 else peers[::-1]
        figures = _round(tree, ordered, args.folder, number=i)
        for figure, by_peer in figures.items() if i else ():
            for name, value in by_peer.items():
                samples[figure][name].append(value)
    for peer in peers:
        peer.close()
    return samples


def _round(
    tree: Any, peers: Sequence[Peer], folder: Path, *, number: int
) -> dict[str, dict[str, float]]:
    got: dict[str, dict[str, float]] = {figure: {} for figure in FIGURES}
    paths = {peer.name: folder / f"{number}-{peer.name.replace(' ', '-')}" for peer in peers}
    for peer in peers:
        _meet(f"round {number}: {peer.name}, save")
        start = time.perf_counter()
        wait = peer.save(paths[peer.name], tree)
        got[BLOCKED][peer.name] = time.perf_counter() - start
        wait()
        got[SAVE][peer.name] = time.perf_counter() - start
    for figure, (x, y) in RESTORES.items():
        like = abstract(tree, make_mesh(x, y))
        for peer in peers:
            _meet(f"round {number}: {peer.name}, {figure}")
            start = time.perf_counter()
            restored = jax.block_until_ready(peer.restore(paths[peer.name], like))
            got[figure][peer.name] = time.perf_counter() - start
            if number == 0:
                check(peer, tree, restored, like)
            del restored
    _meet(f"round {number}: over")  # no process reads any more
    if current().index == 0:
        for path in paths.values():
            shutil.rmtree(path)
    return got


def _meet(part: str) -> None:
    """Waits for all processes, after collecting the garbage of the previous part."""
    gc.collect()
    trim()
    print(part, file=sys.stderr, flush=True)
    current().within(_MEET_TIMEOUT_S).gather(f"benchmarks/{part}", None)


def check(peer: Peer, tree: Any, restored: Any, like: Any) -> None:
    """Raises if a peer has restored wrong values: a fast but wrong peer does not count.

    All processes must call it, since values move between them: restored arrays are moved to the
    devices that they were saved from, and their shards are compared there.
    """
    if jax.tree.structure(restored) != jax.tree.structure(tree):
        raise AssertionError(f"{peer.name} restored another tree structure")
    leaves = (jax.tree.leaves(each) for each in (tree, restored, like))
    for saved, got, wanted in zip(*leaves, strict=True):
        if got.dtype != wanted.dtype or got.sharding != wanted.sharding:
            raise AssertionError(f"{peer.name} restored {got.dtype} on {got.sharding}")
        back = jax.device_put(got, saved.sharding)
        for ours, theirs in zip(saved.addressable_shards, back.addressable_shards, strict=True):
            if ours.index != theirs.index or not np.array_equal(ours.data, theirs.data):
                raise AssertionError(f"{peer.name} restored other values")


def _end_with_parent() -> NoReturn:
    # Not through `sys.stdin`, whose lock a daemon thread must not hold when the interpreter ends.
    os.read(0, 1)
    os._exit(1)


def _fail() -> NoReturn:
    """Exits at once: JAX's own shutdown would wait for processes that wait for this one."""
    traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
