"""Measures saves and restores of arrays on an accelerator, beside Orbax and bare copies.

    python -m benchmarks.gpu                       4 GiB in 64 leaves, on the first accelerator
    python -m benchmarks.gpu --gib 0.02 --leaves 2000 --repeats 2

Needs the extra cuda12 and the group bench. In each round every peer does the same, in alternating
order; the first round is a warm-up, in which XLA allocates its pinned memory. All figures are
medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from benchmarks.peers import Jaxckpt, OrbaxV0, OrbaxV1, Peer
from benchmarks.report import Section, markdown, seconds

_WIDTH: Final = 4096  # of the matrices in a training step
_STEPS: Final = 20

Samples = dict[str, dict[str, list[float]]]  # seconds by figure and peer


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--leaves", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--width", type=int, default=_WIDTH)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where to save")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", module="orbax")
    device = jax.devices()[0]
    state = make_state(args.leaves, int(args.gib * 2**30) // args.leaves, device)
    size = sum(leaf.nbytes for leaf in state.values())
    found: Samples = defaultdict(lambda: defaultdict(list))
    peers: list[Peer] = [Jaxckpt(), OrbaxV1(), OrbaxV0()]
    training = Training(device, args.width)
    for n in range(args.repeats + 1):
        one: Samples = defaultdict(lambda: defaultdict(list))
        bare(state, device, one)
        for peer in peers if n % 2 else peers[::-1]:
            with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-") as folder:
                measure(peer, state, Path(folder), training, one)
        for figure, by_peer in one.items() if n else ():
            for name, values in by_peer.items():
                found[figure][name] += values
    for peer in peers:
        peer.close()
    title = f"{size / 1e9:.2f} GB in {args.leaves:,} leaves on {device.device_kind}"
    print(markdown(table(title, found, [peer.name for peer in peers], size)))


def make_state(count: int, leaf_bytes: int, device: Any) -> dict[str, jax.Array]:
    """Makes leaves of random bits, which no compression makes smaller."""
    with jax.default_device(device):
        keys = jax.random.split(jax.random.key(0), count)
        leaves = {f"w{n}": jax.random.bits(keys[n], (leaf_bytes // 4,)) for n in range(count)}
        return jax.block_until_ready(leaves)


class Training:
    """Steps that keep the device busy; they compute `state` anew from their own matrix."""

    def __init__(self, device: Any, width: int) -> None:
        self._w = jax.device_put(jnp.full((width, width), 1e-4, jnp.bfloat16), device)
        self._step = jax.jit(lambda w: jax.lax.fori_loop(0, 8, lambda _, x: x @ w * 1e-3 + w, w))
        self.run()

    def start(self) -> jax.Array:
        return self._step(self._w)

    def run(self) -> float:
        start = time.perf_counter()
        self.start().block_until_ready()
        return time.perf_counter() - start


def bare(state: dict[str, jax.Array], device: Any, found: Samples) -> None:
    """Measures copies of the same bytes, without a checkpoint."""
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
    figures: dict[str, Callable[[], object]] = {
        "copy to pinned memory": lambda: jax.block_until_ready(jax.device_put(state, pinned)),
        "device_get": lambda: jax.device_get({name: leaf + 0 for name, leaf in state.items()}),
    }
    for figure, call in figures.items():
        start = time.perf_counter()
        call()
        found[figure]["bare"].append(time.perf_counter() - start)
    host = {name: np.asarray(leaf) for name, leaf in state.items()}
    start = time.perf_counter()
    jax.block_until_ready(jax.device_put(host, device))
    found["device_put"]["bare"].append(time.perf_counter() - start)


def measure(
    peer: Peer, state: dict[str, jax.Array], folder: Path, training: Training, found: Samples
) -> None:
    """Measures one save by itself, one beside a training, and a restore."""
    like = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for name, leaf in state.items()
    }
    # New arrays each time: Orbax and jax keep a copy on the host of what was copied once.
    fresh = jax.block_until_ready({name: leaf + 0 for name, leaf in state.items()})
    start = time.perf_counter()
    wait = peer.save(folder / "a", fresh)
    blocked = time.perf_counter() - start
    wait()
    found["save, committed"][peer.name].append(time.perf_counter() - start)
    found["save blocks"][peer.name].append(blocked)

    fresh = jax.block_until_ready({name: leaf + 0 for name, leaf in state.items()})
    alone = statistics.median(training.run() for _ in range(_STEPS))
    under_way = [training.start() for _ in range(3)]
    start = time.perf_counter()
    wait = peer.save(folder / "b", fresh)
    found["save blocks, behind 3 steps under way"][peer.name].append(time.perf_counter() - start)
    beside = [training.run() for _ in range(_STEPS)]
    wait()
    del under_way
    found["a step while it saves, against one alone"][peer.name].append(
        statistics.median(beside) / alone
    )

    start = time.perf_counter()
    restored = jax.block_until_ready(peer.restore(folder / "b", like))
    found["restore"][peer.name].append(time.perf_counter() - start)
    for name, leaf in state.items():
        if not (restored[name] == leaf).all():
            raise AssertionError(f"{peer.name} restored other values")


def table(title: str, found: Samples, peers: Sequence[str], size: int) -> Section:
    """Returns the medians, with GB/s where all bytes move."""
    rows: list[list[str]] = [["", "bare", *peers]]
    for figure, by_peer in found.items():
        row = [figure]
        for name in ("bare", *peers):
            values = by_peer.get(name)
            if not values:
                row.append("")
                continue
            middle = statistics.median(values)
            if "against" in figure:
                row.append(f"{middle:.2f}x")
            elif "blocks" in figure:
                row.append(seconds(middle))
            else:
                row.append(f"{seconds(middle)}, {size / 1e9 / middle:.1f} GB/s")
        rows.append(row)
    return Section(title=title, rows=rows)


if __name__ == "__main__":
    main()
