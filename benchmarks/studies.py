"""Further studies: the second save, memory, interference, checksums, references, imports and more.

Each study prepares its data, measures in rounds, and returns a `Section`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from benchmarks.footprint import measure_footprints
from benchmarks.peers import Peer
from benchmarks.report import Section, amount, seconds
from benchmarks.timing import paired, peak_rss, rss, trim
from benchmarks.workloads import WORKLOADS, abstract, build, make_mesh, total_bytes
from jaxckpt._core import plan as _plan
from jaxckpt._disk import chunks as _chunks
from jaxckpt._disk import data_files as _data_files
from jaxckpt._disk import writer as _writer
from jaxckpt._save import tree_plan as _tree_plan
from jaxckpt.format import arrays
from jaxckpt.multihost import current

_WIDTH: Final = 512  # width of the matrices in the training step
_SAVES: Final = 100


def second_save(scales: dict[str, float], *, repeats: int) -> Section:
    """Compares the planning time of the first and the second save of the same tree."""
    rows = [["planning and metadata", "first save", "second save", "ratio"]]
    samples = {}
    for name in WORKLOADS:
        tree = build(name, scale=scales[name], mesh=make_mesh(4, 2))
        first, second = [], []
        for _ in range(repeats + 1):
            _forget_plans()
            first.append(_time_planning(tree))
            second.append(_time_planning(jax.tree.map(lambda x: x, tree)))
        ratio, least, most = paired(second[1:], first[1:])
        samples[name] = {"first": first[1:], "second": second[1:]}
        middle = [seconds(statistics.median(values[1:])) for values in (first, second)]
        rows.append([name, *middle, f"{ratio:.1f}x ({least:.1f}-{most:.1f})"])
    note = "All work of a save except moving values; the caches are emptied before the first."
    return Section(title="A second save of the same tree", rows=rows, note=note, samples=samples)


def growth(counts: Sequence[int], *, root: Path, repeats: int) -> Section:
    """Measures what a leaf costs each verb, in trees of ever more leaves of 1 KB."""
    rows = [["CPU time for a leaf", *(f"{count:,} leaves" for count in counts)]]
    samples: dict[str, dict[int, list[float]]] = {}
    for count in counts:
        tree = {
            f"layer_{n}": {f"w{i}": np.full(256, i, np.float32) for i in range(100)}
            for n in range(-(-count // 100))
        }
        for _ in range(repeats + 1):
            with tempfile.TemporaryDirectory(dir=root, prefix="bench-") as folder:
                for verb, took_s in _time_verbs(tree, folder).items():
                    of_verb = samples.setdefault(verb, {}).setdefault(count, [])
                    of_verb.append(took_s / count)
    for verb, by in samples.items():
        medians = (statistics.median(values[1:]) for values in by.values())
        rows.append([verb, *(f"{1e6 * median:.1f} us" for median in medians)])
    note = "Processor time of all threads. The first save plans; `open` decodes no leaves."
    return Section(title="Trees of many leaves", rows=rows, note=note, samples=samples)


def _time_verbs(tree: Any, folder: str) -> dict[str, float]:
    verbs: dict[str, Callable[[], object]] = {
        "first save": lambda: jaxckpt.save(f"{folder}/1", tree),
        "second save": lambda: jaxckpt.save(f"{folder}/2", tree),
        "restore(like)": lambda: jaxckpt.restore(f"{folder}/1", tree),
        "verify": lambda: jaxckpt.verify(f"{folder}/1"),
        "open": lambda: jaxckpt.open(f"{folder}/1"),
        "open, all leaves": lambda: jaxckpt.open(f"{folder}/1").leaves,
    }
    _forget_plans()
    took = {}
    for verb, call in verbs.items():
        start_s = time.process_time()
        call()
        took[verb] = time.process_time() - start_s
    return took


def _time_planning(tree: Any) -> float:
    start = time.perf_counter()
    plan, _ = _tree_plan.plan_tree(tree, current())
    _ = plan.writes, plan.files, plan.fingerprint
    return time.perf_counter() - start


def _forget_plans() -> None:
    _tree_plan._cache = ()
    for cached in (
        _plan.placement_of,
        _plan._grid_of,
        _tree_plan.saved_sharding,
        arrays.encode_zarr3,
        arrays.zarr3_metadata,
    ):
        cached.cache_clear()


def memory(scale: float, peers: Sequence[str], *, root: Path, saves: int = _SAVES) -> Section:
    """Measures the peaks of each peer, of one array above the budget, and of repeated saves."""
    budget = max(1, round(128 * scale)) << 20
    rows_of = 8 * max(1, round(32768 * scale))
    rows = [["host memory", "above the arrays"]]
    samples: dict[str, Any] = {}
    footprints = measure_footprints(peers, workload="gpt2", scale=scale, root=root)
    for peer, found in footprints.items():
        what = f"of gpt2, {amount(found['state'])}"
        rows += [[f"{peer}: {part} {what}", amount(found[part])] for part in ("save", "restore")]
    samples["gpt2"] = footprints
    for devices in (1, 8):
        sharding = NamedSharding(make_mesh(devices, 1), P("x"))
        array = jax.device_put(np.ones((rows_of, 1024), np.float32), sharding)
        like = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        with tempfile.TemporaryDirectory(dir=root, prefix="bench-") as folder:
            with peak_rss() as saving:
                jaxckpt.save(f"{folder}/x", array)
            size = array.nbytes
            del array
            with peak_rss() as restoring:
                restored = jaxckpt.restore(f"{folder}/x", like, budget_bytes=budget)
            del restored
        where = f"{amount(size)} on {devices} device{'s' if devices > 1 else ''}"
        over = restoring[0] - size
        samples[where] = [saving[0], over]
        rows.append([f"save of {where}", amount(saving[0])])
        rows.append([f"restore of {where}, budget {amount(budget)}", amount(over)])
    tree = build("gpt2", scale=0.1 * scale, mesh=make_mesh(4, 2))
    after = []
    with tempfile.TemporaryDirectory(dir=root, prefix="bench-") as folder:
        for i in range(saves):
            jaxckpt.save_async(f"{folder}/{i}", tree).result()
            shutil.rmtree(f"{folder}/{i}")
            after.append(float(rss()))
    halfway = after[len(after) // 2]
    samples["after each save"] = after
    what = f"{saves} saves of {amount(total_bytes(tree))}"
    rows.append([f"{what}: growth over the second half", amount(after[-1] - halfway)])
    note = (
        "Peaks above the state, and for a restore also above the restored arrays. Each peer runs "
        "in a separate process."
    )
    return Section(title="Memory", rows=rows, note=note, samples=samples)


def interference(scale: float, peers: Sequence[Peer], *, root: Path, repeats: int) -> Section:
    """Measures how much a save slows down jitted steps that run at the same time."""
    mesh = make_mesh(4, 2)
    tree = build("large", scale=scale, mesh=mesh)
    sharding = NamedSharding(mesh, P("x", "y"))
    weights = jax.device_put(np.full((_WIDTH, _WIDTH), 1e-3, np.float32), sharding)

    @jax.jit
    def step(w: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 2, lambda _, x: x @ w * 1e-3 + w, w)

    def run() -> float:
        start = time.perf_counter()
        step(weights).block_until_ready()
        return time.perf_counter() - start

    for _ in range(20):
        run()
    lost: dict[str, list[float]] = {peer.name: [] for peer in peers}
    slower: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for i in range(repeats + 1):
        for peer in peers if i % 2 == 0 else peers[::-1]:
            with tempfile.TemporaryDirectory(dir=root, prefix="bench-") as folder:
                alone = statistics.median(run() for _ in range(40))
                beside = _steps_beside(run, peer.save(Path(folder, "x"), tree))
            if i:
                lost[peer.name].append(max(1e-6, sum(t - alone for t in beside)))
                slower[peer.name].append(statistics.mean(beside) / alone)
    mine, *others = lost
    rows = [["", mine, *others]]
    cells = [seconds(statistics.median(lost[mine]))]
    for other in others:
        ratio, least, most = paired(lost[mine], lost[other])
        took = seconds(statistics.median(lost[other]))
        cells.append(f"{took} ({ratio:.2f}x, {least:.2f}-{most:.2f})")
    rows.append(["training time that a save costs", *cells])
    means = [f"{statistics.median(slower[name]):.2f}x" for name in (mine, *others)]
    rows.append(["duration of a step during the save", *means])
    note = (
        "Steps of a few milliseconds keep all cores busy from the return of `save_async` to the "
        "commit. The rows show how much longer they took than as many steps without a save, in "
        "total and for each step."
    )
    samples = {"lost": lost, "slower": slower}
    return Section(title="Interference with training", rows=rows, note=note, samples=samples)


def _steps_beside(run: Callable[[], float], wait: Callable[[], object]) -> list[float]:
    ended = threading.Event()

    def watch() -> None:
        try:
            wait()
        finally:
            ended.set()

    thread = threading.Thread(target=watch, name="benchmarks-wait")
    thread.start()
    beside = [run()]
    while not ended.is_set():
        beside.append(run())
    thread.join()
    return beside


def integrity(scales: dict[str, float], *, root: Path, repeats: int) -> Section:
    """Compares saves and restores with and without checksums of the data."""
    rows = [["", "with", "without", "checksums cost"]]
    samples = {}
    for name in WORKLOADS:
        tree = build(name, scale=scales[name], mesh=make_mesh(4, 2))
        like = abstract(tree, make_mesh(4, 2))
        times: dict[str, dict[bool, list[float]]] = {
            figure: {True: [], False: []} for figure in ("save", "restore")
        }
        for i in range(repeats + 1):
            for checks in (True, False) if i % 2 else (False, True):
                saved, restored = _save_and_restore(tree, like, root, checks=checks)
                if i:
                    times["save"][checks].append(saved)
                    times["restore"][checks].append(restored)
        for figure, by in times.items():
            ratio, least, most = paired(by[False], by[True])
            cost = f"{ratio - 1:+.0%} ({least - 1:+.0%} to {most - 1:+.0%})"
            middle = [seconds(statistics.median(by[checks])) for checks in (True, False)]
            rows.append([f"{name}: {figure}", *middle, cost])
            samples[f"{name}: {figure}"] = {"with": by[True], "without": by[False]}
    return Section(title="Checksums", rows=rows, samples=samples)


def _save_and_restore(tree: Any, like: Any, root: Path, *, checks: bool) -> tuple[float, float]:
    with tempfile.TemporaryDirectory(dir=root, prefix="bench-") as folder:
        with contextlib.nullcontext() if checks else _unchecked():
            _forget_plans()
            _tree_plan.plan_tree(tree, current())
            trim()
            start = time.perf_counter()
            jaxckpt.save(f"{folder}/x", tree)
            saved = time.perf_counter()
            restored = jax.block_until_ready(jaxckpt.restore(f"{folder}/x", like))
            end = time.perf_counter()
        del restored
    return saved - start, end - saved


def verified(scales: dict[str, float], *, root: Path, repeats: int) -> Section:
    """Compares managers that read each step back with managers that do not."""
    rows = [["a step, until all work is done", "verified", "not", "reading back costs"]]
    samples = {}
    for name in WORKLOADS:
        tree = build(name, scale=scales[name], mesh=make_mesh(4, 2))
        times: dict[bool, list[float]] = {True: [], False: []}
        for i in range(repeats + 1):
            for reads in (True, False) if i % 2 else (False, True):
                times[reads].append(_manage_a_step(tree, root, verified=reads))
        ratio, least, most = paired(times[False][1:], times[True][1:])
        middle = [seconds(statistics.median(times[reads][1:])) for reads in (True, False)]
        rows.append([name, *middle, f"{ratio - 1:+.0%} ({least - 1:+.0%} to {most - 1:+.0%})"])
        samples[name] = {"verified": times[True][1:], "not": times[False][1:]}
    return Section(title="KeepPolicy(verified=True)", rows=rows, samples=samples)


def _manage_a_step(tree: Any, root: Path, *, verified: bool) -> float:
    keep = jaxckpt.KeepPolicy(last=1, verified=verified)
    with (
        tempfile.TemporaryDirectory(dir=root, prefix="bench-") as folder,
        jaxckpt.CheckpointManager(folder, keep=keep) as manager,
    ):
        trim()
        start = time.perf_counter()
        manager.save(1, tree)
        manager.wait_until_finished()
        return time.perf_counter() - start


# The first two are whole, and the files of both are read back. Then they are after each ninth step
# that refers to them: twice in so many further steps.
_FIRST: Final = 4
_STEPS: Final = _FIRST + 18


def incremental(scale: float, *, root: Path, repeats: int) -> Section:
    """Compares managers whose steps refer to what has not changed with managers that write all.

    A step's time is that until its commit. Its processor time includes that of reading files back
    and of deleting an older step, both in the background.
    """
    rows = [["a step", "incremental", "whole", "time", "processor time", "bytes written"]]
    rows[0].append("of the changed ones")
    samples = {}
    for name, change in _CHANGES.items():
        times: dict[bool, list[float]] = {True: [], False: []}
        worked: dict[bool, list[float]] = {True: [], False: []}
        state, written = _frozen_and_trained(scale), 0.0
        for i in range(repeats + 1):
            for refers in (True, False) if i % 2 else (False, True):
                spent, work, some = _train(state, change, root, incremental=refers)
                times[refers].append(spent)
                worked[refers].append(work)
                written = some if refers else written
        ratios = [paired(one[False][1:], one[True][1:]) for one in (times, worked)]
        middle = [seconds(statistics.median(times[refers][1:])) for refers in (True, False)]
        everything = sum(x.nbytes for x in jax.tree.leaves(state))
        changed = everything if change is _all else state["trained"].nbytes
        rows.append(
            [
                name,
                *middle,
                *(f"{ratio:.2f}x ({least:.2f} to {most:.2f})" for ratio, least, most in ratios),
                f"{written / everything:.3f} of all",
                f"{written / changed:.3f}x",
            ]
        )
        samples[name] = {"incremental": times[True][1:], "whole": times[False][1:]}
    return Section(title="Steps that refer to earlier ones", rows=rows, samples=samples)


def _frozen_and_trained(scale: float) -> dict[str, jax.Array]:
    """99 % are frozen."""
    rows = max(8, round(scale * 1024))
    frozen = {f"w{i:02}": jnp.full((rows, 2048), i, jnp.float32) for i in range(96)}
    return {**frozen, "trained": jnp.zeros((rows, 2048), jnp.float32)}


def _trained(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {**state, "trained": state["trained"] + 1}


def _copied(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return _trained({name: jnp.array(x, copy=True) for name, x in state.items()})


def _all(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: x + 1 for name, x in state.items()}


_CHANGES: Final = {
    "1 % changes, the same arrays": _trained,
    "1 % changes, equal arrays": _copied,
    "everything changes": _all,
}


def _train(
    state: dict[str, jax.Array], change: Any, root: Path, *, incremental: bool
) -> tuple[float, float, float]:
    """Returns the mean time and processor time of a step, and the median bytes that it wrote."""
    how = "auto" if incremental else False
    spent, worked, written = [], [], []
    with (
        tempfile.TemporaryDirectory(dir=root, prefix="bench-") as folder,
        jaxckpt.CheckpointManager(
            folder, incremental=how, keep=jaxckpt.KeepPolicy(last=2)
        ) as manager,
    ):
        known: set[int] = set()  # files of earlier steps; on tmpfs no number is used again
        for step in range(_STEPS):
            state = jax.block_until_ready(change(state))
            start, work = time.perf_counter(), time.process_time()
            handle = manager.save(step, state)
            assert handle is not None
            handle.result()
            spent.append(time.perf_counter() - start)
            manager.wait_until_finished()
            worked.append(time.process_time() - work)
            files = [file.stat() for file in Path(folder, str(step)).rglob("*") if file.is_file()]
            written.append(sum(one.st_size for one in files if one.st_ino not in known))
            known |= {one.st_ino for one in files}
    means = statistics.mean(spent[_FIRST:]), statistics.mean(worked[_FIRST:])
    return *means, statistics.median(written)


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
    """Makes saves write chunks without their CRC-32C, and restores read them."""
    patches: list[tuple[Any, str, Any]] = [
        (_writer, "encode_chunk", np.ndarray.tobytes),
        (_data_files, "CRC_BYTES", 0),
        (_data_files, "checksum", lambda data, before=0: 0),
        (_chunks, "CRC_BYTES", 0),
        (_chunks, "adjacent", partial(_chunks.adjacent, after=0)),
        (_chunks.Chunks, "_take", _take_without),
        (_chunks.Chunks, "_read_run", _read_run_without),
    ]
    kept = [getattr(module, name) for module, name, _ in patches]
    try:
        for module, name, value in patches:
            setattr(module, name, value)
        _forget_plans()
        yield
    finally:
        for (module, name, _), value in zip(patches, kept, strict=True):
            setattr(module, name, value)
        _forget_plans()


def _read_run_without(chunks: Any, jobs: Any, file: str, memory: np.ndarray[Any, Any]) -> None:
    outs = [
        np.empty(size, np.uint8) if at < 0 else memory[at : at + size]
        for at, size in jobs[:, [_chunks._AT, _chunks._SIZE]].tolist()
    ]
    chunks._storage.read_into(file, int(jobs[0, _chunks._OFFSET]), outs)
    chunks._take(jobs, outs, b"", file, memory)


def _take_without(chunks: Any, jobs: Any, data: Any, _: Any, file: str, memory: Any) -> None:
    for job, values in zip(jobs.tolist(), data, strict=True):
        if job[_chunks._AT] < 0:
            chunks._divide(job, values, memory)


_COMPRESSIONS: Final = (None, "zstd", "zstd:6")


def compression(scale: float, *, root: Path, repeats: int) -> Section:
    """Compares size and times of saves with and without compression, for several kinds of data."""
    count = max(1, round(scale * 64)) << 20
    rows = [[f"{amount(4 * count)} of", "", "on disk", "save", "restore"]]
    samples: dict[str, Any] = {}
    for kind, array in _kinds(count).items():
        found: dict[str, dict[str, list[float]]] = {}
        for i in range(repeats + 1):
            for how in _COMPRESSIONS[:: 1 if i % 2 else -1]:
                by_figure = found.setdefault(how or "none", {})
                for figure, value in _time_compressed(array, root, how).items():
                    by_figure.setdefault(figure, []).extend([value] if i else [])
        for how in _COMPRESSIONS:
            by_figure = found[how or "none"]
            stored, *times = (statistics.median(values) for values in by_figure.values())
            times = map(seconds, times)
            rows.append([kind, how or "none", f"{stored / array.nbytes:.0%}", *times])
        samples[kind] = found
    return Section(title="Compression", rows=rows, samples=samples)


def _kinds(count: int) -> dict[str, np.ndarray[Any, Any]]:
    """Returns `count` values of each kind, as many bytes of each."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(count, np.float32) * np.float32(0.02)
    rounded = weights.astype(jax.numpy.bfloat16)
    return {
        "float32 weights": weights,
        "float32 weights that were bfloat16": rounded.astype(np.float32),
        "float32 second moments": np.square(weights * np.float32(1e-2)),
        "bfloat16 weights": np.tile(rounded, 2),
        "int8 quantised weights": (np.tile(weights, 4) * 1600).astype(np.int8),
        "zeros": np.zeros(count, np.float32),
    }


def _time_compressed(array: np.ndarray[Any, Any], root: Path, how: str | None) -> dict[str, float]:
    tree = {str(i): part for i, part in enumerate(np.split(array, 16))}
    with tempfile.TemporaryDirectory(dir=root, prefix="bench-") as folder:
        trim()
        start = time.perf_counter()
        jaxckpt.save(f"{folder}/x", tree, compression=how)
        saved = time.perf_counter()
        jaxckpt.restore(f"{folder}/x", as_numpy=True)
        end = time.perf_counter()
        stored = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return {"bytes": stored, "save": saved - start, "restore": end - saved}


def imports(*, repeats: int) -> Section:
    """Measures the cost of imports on top of jax, in new interpreters."""
    statements = {
        "import jaxckpt": "import jaxckpt",
        "everything that a manager, a save and a restore need": (
            "import jaxckpt; jaxckpt.CheckpointManager, jaxckpt.save, jaxckpt.restore\n"
            "import jaxckpt.storage._arrays"
        ),
        "import orbax.checkpoint": "import orbax.checkpoint",
    }
    taken: dict[str, list[float]] = {name: [] for name in statements}
    for i in range(repeats + 1):
        for name, statement in statements.items():
            took = _time_import(statement)
            if i:
                taken[name].append(took)
    rows = [["on top of `import jax, numpy`", "median", "least to greatest"]]
    for name, values in taken.items():
        spread = f"{seconds(min(values))} to {seconds(max(values))}"
        rows.append([name, seconds(statistics.median(values)), spread])
    return Section(title="Imports", rows=rows, samples=taken)


def _time_import(statement: str) -> float:
    code = (
        "import time, warnings; warnings.simplefilter('ignore')\n"
        "import jax, jax.numpy, numpy\n"
        f"start = time.perf_counter()\n{statement}\nprint(time.perf_counter() - start)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        # The first round leaves bytecode, as a package that is installed has it.
        env=os.environ
        | {"PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": ""},
    )
    return float(done.stdout.split()[-1])
