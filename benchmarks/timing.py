"""Measures peers side by side, in rounds, each from a new directory.

Within a round every peer does the same thing at nearly the same time, so that the ratio of two
figures of one round is meaningful even on a machine that others use. Rounds go through the peers
alternately forwards and backwards (A B B A). The first round is a warm-up: it is not counted, and
the restored values are compared instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from benchmarks.peers import Peer
from benchmarks.workloads import TARGETS, abstract, make_mesh, total_bytes

SAVE: Final = "save, committed"
BLOCKED: Final = "save_async blocks"
DISK: Final = "bytes on disk"
FIGURES: Final = (SAVE, BLOCKED, *TARGETS, DISK)
BYTES: Final = (DISK,)

# The results of one workload: figure -> peer -> seconds or bytes of each counted round.
Samples = Mapping[str, Mapping[str, Sequence[float]]]


def measure(tree: Any, peers: Sequence[Peer], *, root: Path, repeats: int) -> Samples:
    """Measures every figure of every peer, `repeats` + 1 times.

    Restores read the data that was just written, from the page cache.
    """
    samples = {figure: {peer.name: [] for peer in peers} for figure in FIGURES}
    for i in range(repeats + 1):
        ordered = peers if i % 2 == 0 else peers[::-1]
        with tempfile.TemporaryDirectory(dir=root, prefix="bench-") as folder:
            figures = _round(tree, ordered, Path(folder), check=i == 0)
        for figure, by_peer in figures.items() if i else ():
            for name, value in by_peer.items():
                samples[figure][name].append(value)
    return samples


def _round(
    tree: Any, peers: Sequence[Peer], folder: Path, *, check: bool
) -> dict[str, dict[str, float]]:
    got: dict[str, dict[str, float]] = {figure: {} for figure in FIGURES}
    likes = {figure: abstract(tree, make_mesh(*sizes)) for figure, sizes in TARGETS.items()}
    for peer in peers:
        path = folder / peer.name.replace(" ", "-")
        _settle()
        start = time.perf_counter()
        wait = peer.save(path, tree)
        blocked = time.perf_counter()
        wait()
        got[SAVE][peer.name] = time.perf_counter() - start
        if peer.is_async:
            got[BLOCKED][peer.name] = blocked - start
        got[DISK][peer.name] = _size(path)
        for figure, like in likes.items():
            if not peer.reshards and figure != next(iter(TARGETS)):
                continue
            _settle()
            start = time.perf_counter()
            restored = jax.block_until_ready(peer.restore(path, like))
            got[figure][peer.name] = time.perf_counter() - start
            if check:
                _check(peer, tree, restored)
            del restored
        shutil.rmtree(path)  # otherwise the checkpoints of all peers would have to fit into memory
    return got


def _check(peer: Peer, tree: Any, restored: Any) -> None:
    """Raises if a peer has restored wrong values: a fast but wrong peer does not count."""
    if isinstance(restored, np.ndarray):
        if restored.nbytes != total_bytes(tree):
            raise AssertionError(f"{peer.name} read {restored.nbytes} bytes")
        return
    if isinstance(restored, list):  # a peer without support for pytrees
        restored = jax.tree.unflatten(jax.tree.structure(tree), restored)
    if jax.tree.structure(restored) != jax.tree.structure(tree):
        raise AssertionError(f"{peer.name} restored another tree structure")
    for saved, back in zip(jax.tree.leaves(tree), jax.tree.leaves(restored), strict=True):
        if not np.array_equal(saved, back):
            raise AssertionError(f"{peer.name} restored other values")


@contextlib.contextmanager
def peak_rss() -> Iterator[list[float]]:
    """Samples how far the process's memory rises above its current size; 0 if unknown."""
    _settle()
    peak, stop, start = [0.0], threading.Event(), rss()

    def sample() -> None:
        while not stop.wait(0.005):
            peak[0] = max(peak[0], rss() - start)

    thread = threading.Thread(target=sample, name="benchmarks-rss")
    thread.start()
    try:
        yield peak
        peak[0] = max(peak[0], rss() - start)
    finally:
        stop.set()
        thread.join()


def _settle() -> None:
    """Collects garbage, so that one peer's garbage does not affect the next peer."""
    gc.collect()
    trim()


def rss() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 0


def trim() -> None:
    """Returns freed memory to the system, so that it does not hide the next peer's usage."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def paired(mine: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Returns how many times `mine` fits into `other`: ratio of medians, least and greatest pair.

    Example:
        >>> paired([1.0, 2.0, 1.0], [2.0, 2.0, 3.0])
        (2.0, 1.0, 3.0)
    """
    if min(mine, default=0) <= 0:
        return math.nan, math.nan, math.nan
    ratios = [b / a for a, b in zip(mine, other, strict=True)]
    return statistics.median(other) / statistics.median(mine), min(ratios), max(ratios)
