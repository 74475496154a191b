"""Profiles saves and restores: samples every millisecond which jaxckpt function a thread is in.

A profiler that counts calls makes small functions look slow, and cannot observe two threads.
Sampling can: each sample is charged to the innermost jaxckpt function on the stack of the measured
thread, including the time that it waits for or spends in other code (jax, TensorStore, the system).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import jax

import jaxckpt
from benchmarks.report import Section, seconds
from benchmarks.workloads import WORKLOADS, abstract, build, make_mesh
from jaxckpt._save.job import SaveJob
from jaxckpt._save.save import prepare

_EVERY_S: Final = 0.001
_SHOWN: Final = 5
_PACKAGE: Final = str(Path(jaxckpt.__file__).parent)


def profile(scales: dict[str, float], *, root: Path, repeats: int) -> Section:
    """Returns the functions that take the largest share of saving and restoring each workload."""
    rows = [["", "time", "where it goes"]]
    samples = {}
    for name in WORKLOADS:
        tree = build(name, scale=scales[name], mesh=make_mesh(4, 2))
        like = abstract(tree, make_mesh(4, 2))
        found: dict[str, Counter[str]] = {}
        spent: dict[str, float] = {}

        def sampled(part: str, do: Callable[[], Any]) -> Any:
            result, counts, took = _sampled(do)
            found[part] = found.get(part, Counter()) + counts  # noqa: B023
            spent[part] = spent.get(part, 0.0) + took  # noqa: B023
            return result

        for i in range(repeats + 1):
            with tempfile.TemporaryDirectory(dir=root, prefix="bench-") as folder:
                path = f"{folder}/x"
                request = sampled(
                    "blocking",
                    lambda: prepare(path, tree, False, None, copy=True),  # noqa: B023
                )
                sampled("in the background", SaveJob(request).run)
                restored = sampled(
                    "restore",
                    lambda: jax.block_until_ready(jaxckpt.restore(path, like)),  # noqa: B023
                )
                del restored, request
                shutil.rmtree(path)
            if not i:  # the first round plans and warms up
                found.clear()
                spent.clear()
        for part, counts in found.items():
            total = sum(counts.values()) or 1
            shares = [f"{what} {n / total:.0%}" for what, n in counts.most_common(_SHOWN)]
            label = f"{name}: {part}" if part == "restore" else f"{name}: save, {part}"
            rows.append([label, seconds(spent[part] / repeats), ", ".join(shares)])
            samples[label] = dict(counts)
    note = "Sampled every millisecond; each function includes its calls outside of jaxckpt."
    return Section(title="Where the time goes", rows=rows, note=note, samples=samples)


def _sampled(do: Callable[[], Any]) -> tuple[Any, Counter[str], float]:
    counts: Counter[str] = Counter()
    stop, thread = threading.Event(), threading.get_ident()

    def sample() -> None:
        while not stop.wait(_EVERY_S):
            counts[_place(sys._current_frames().get(thread))] += 1

    sampler = threading.Thread(target=sample, name="benchmarks-sampler")
    sampler.start()
    start = time.perf_counter()
    try:
        result = do()
    finally:
        took = time.perf_counter() - start
        stop.set()
        sampler.join()
    return result, counts, took


def _place(frame: FrameType | None) -> str:
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            module = file[len(_PACKAGE) + 1 :].removesuffix(".py").replace("/", ".")
            return f"`{module}.{frame.f_code.co_qualname.replace('.<locals>', '')}`"
        frame = frame.f_back
    return "elsewhere"
