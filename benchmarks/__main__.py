"""Runs benchmarks and prints Markdown tables; with --out, writes them and all samples to files."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

# JAX reads these when it is imported, so they must be set before any import of JAX.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )

import jax

from benchmarks import processes, sampling, scale, studies, worker
from benchmarks.peers import PEERS, Peer
from benchmarks.report import Section, amount, comparison, markdown, plot, plot_scale, seconds
from benchmarks.timing import FIGURES, measure
from benchmarks.workloads import WORKLOADS, build, make_mesh, total_bytes

_QUICK: Final = {"large": 0.1, "gpt2": 0.05, "small": 0.03}
_PEERS: Final = ["jaxckpt", "v1", "v0", "roofline"]  # torch would have to be installed
_SIZES: Final = (2, 4)  # numbers of processes


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    # They warn at each call, about their own deprecations and about running in one process.
    for name in ("orbax", "torch"):
        warnings.filterwarnings("ignore", module=name)
    facts = _facts(args)
    texts = [_heading(facts)]
    print(texts[0], flush=True)
    peers = [PEERS[name]() for name in args.peers]
    found: dict[str, Section] = {}
    for name in args.studies:
        for section in STUDIES[name](name, args, peers):
            found[section.key or name] = section
            texts.append(markdown(section))
            print(f"\n{texts[-1]}", flush=True)
        if args.out is not None:  # now, so that a run that is stopped keeps its results so far
            _keep(args.out, args.name, texts, facts, found)
    for peer in peers:
        peer.close()
    return 0


def _keep(
    folder: Path, name: str, texts: Sequence[str], facts: Any, found: dict[str, Section]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text("\n\n".join(texts) + "\n")
    document = {"facts": facts, "studies": {key: s.samples for key, s in found.items()}}
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    workloads = {key: section for key, section in found.items() if key in WORKLOADS}
    if workloads and len(next(iter(workloads.values())).rows[0]) > 2:
        plot(workloads, folder / f"{name}.svg")
    if "scale" in found and "merge" in found:
        plot_scale(found["scale"].samples, found["merge"].samples, folder / f"{name}-scale.svg")


# --- the studies -----------------------------------------------------------------------------


def _workload(name: str, args: argparse.Namespace, peers: Sequence[Peer]) -> Iterator[Section]:
    tree = build(name, scale=args.scales[name], mesh=make_mesh(4, 2))
    title = f"{name}: {amount(total_bytes(tree))} in {len(jax.tree.leaves(tree)):,} leaves"
    samples = measure(tree, peers, root=args.dir, repeats=args.repeats)
    yield comparison(title, FIGURES, samples)


def _profile(name: str, args: argparse.Namespace, peers: Sequence[Peer]) -> Iterator[Section]:
    del name, peers
    yield sampling.profile(args.scales, root=args.dir, repeats=args.repeats)


def _second(name: str, args: argparse.Namespace, peers: Sequence[Peer]) -> Iterator[Section]:
    del name, peers
    yield studies.second_save(args.scales, repeats=args.repeats)


def _growth(name: str, args: argparse.Namespace, peers: Sequence[Peer]) -> Iterator[Section]:
    del name, peers
    counts = [max(100, round(count * args.scales["small"])) for count in (1000, 10_000, 100_000)]
    yield studies.growth(counts, root=args.dir, repeats=args.repeats)


def _memory(name: str, args: argparse.Namespace, peers: Sequence[Peer]) -> Iterator[Section]:
    del name, peers
    yield studies.memory(
        args.scales["large"], args.peers, root=args.dir, saves=20 if args.quick else 100
    )


def _interference(name: str, args: argparse.Namespace, peers: Sequence[Peer]) -> Iterator[Section]:
    del name
    beside = [peer for peer in peers if peer.is_async]
    yield studies.interference(args.scales["large"], beside, root=args.dir, repeats=args.repeats)


def _integrity(name: str, args: argparse.Namespace, peers: Sequence[Peer]) -> Iterator[Section]:
    del name, peers
    yield studies.integrity(args.scales, root=args.dir, repeats=args.repeats)


def _incremental(name: str, args: argparse.Namespace, peers: Sequence[Peer]) -> Iterator[Section]:
    del name, peers
    yield studies.incremental(args.scales["large"], root=args.dir, repeats=args.repeats)


def _verified(name: str, args: argparse.Namespace, peers: Sequence[Peer]) -> Iterator[Section]:
    del name, peers
    yield studies.verified(args.scales, root=args.dir, repeats=args.repeats)


def _compression(name: str, args: argparse.Namespace, peers: Sequence[Peer]) -> Iterator[Section]:
    del name, peers
    yield studies.compression(args.scales["large"], root=args.dir, repeats=args.repeats)


def _imports(name: str, args: argparse.Namespace, peers: Sequence[Peer]) -> Iterator[Section]:
    del name, peers
    yield studies.imports(repeats=args.repeats)


def _processes(name: str, args: argparse.Namespace, peers: Sequence[Peer]) -> Iterator[Section]:
    del peers
    joint = [peer for peer in args.peers if peer in processes.JOINT_PEERS]
    by_count = processes.measure_processes(
        _SIZES,
        workload="large",
        scale=args.scales["large"],
        peers=joint,
        root=args.dir,
        repeats=args.repeats,
    )
    rows: list[Sequence[str]] = []
    for count, samples in by_count.items():
        section = comparison("", worker.FIGURES, samples)
        rows = rows or [section.rows[0]]
        rows += [[f"{count} processes: {row[0]}", *row[1:]] for row in section.rows[1:]]
    yield Section(
        title="large, in jobs of several processes",
        rows=rows,
        note="Eight devices in total, on the cores of one machine; the slowest process counts.",
        samples=by_count,
    )


def _scale(name: str, args: argparse.Namespace, peers: Sequence[Peer]) -> Iterator[Section]:
    del name, peers
    counts = scale.COUNTS[:2] if args.quick else scale.COUNTS
    leaves = scale.LEAVES // 10 if args.quick else scale.LEAVES
    plans = scale.measure_plans(counts, leaves=leaves)
    rows = [["processes", "plan of one process", "its chunks", "metadata", "their size"]]
    for count, found in plans.items():
        chunks, size = f"{found['chunks']:,.0f}", amount(found["metadata bytes"])
        times = seconds(found["plan"]), chunks, seconds(found["metadata"]), size
        rows.append([f"{count:,}", *times])
    yield Section(title=f"A job of many processes: {leaves:,} leaves", rows=rows, samples=plans)
    merged = scale.MERGED[:2] if args.quick else scale.MERGED
    merges = scale.measure_merges(merged, keys=scale.KEYS, root=args.dir)
    rows = [["databases merged", "time", "for each key"]]
    for count, found in merges.items():
        each = f"{found['each key'] * 1e6:.2f} us"
        rows.append([f"{count:,} of {scale.KEYS} keys", seconds(found["merge"]), each])
    yield Section(title="The merge by process 0", rows=rows, samples=merges, key="merge")
    meetings = scale.measure_meetings(counts if args.quick else scale.MEETING)
    rows = [["processes that meet", "process 0", "for each process", "bytes", "for each process"]]
    for count, found in meetings.items():
        each = f"{found['process 0'] / count * 1e6:.1f} us", f"{found['bytes'] / count:.0f} B"
        own, moved = seconds(found["process 0"]), amount(found["bytes"])
        rows.append([f"{count:,}", own, each[0], moved, each[1]])
    yield Section(title="A meeting", rows=rows, samples=meetings, key="meetings")


STUDIES: Final[
    dict[str, Callable[[str, argparse.Namespace, Sequence[Peer]], Iterator[Section]]]
] = {
    **dict.fromkeys(WORKLOADS, _workload),
    "profile": _profile,
    "second": _second,
    "growth": _growth,
    "memory": _memory,
    "interference": _interference,
    "integrity": _integrity,
    "verified": _verified,
    "incremental": _incremental,
    "compression": _compression,
    "imports": _imports,
    "processes": _processes,
    "scale": _scale,
}


# --- the command -----------------------------------------------------------------------------


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "studies", nargs="*", metavar="STUDY", help=f"any of {', '.join(STUDIES)}; by default all"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, about a minute")
    parser.add_argument("--scale", type=float, help="fraction of the full sizes instead")
    parser.add_argument("--peers", type=_names(PEERS), default=_PEERS)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where to save")
    parser.add_argument("--repeats", type=int, help="counted rounds: 5, with --quick 2")
    parser.add_argument("--out", type=Path, help="write tables, samples and a plot to this folder")
    parser.add_argument("--name", default="latest", help="name of the files in OUT")
    args = parser.parse_args(argv)
    args.studies = args.studies or list(STUDIES)
    if unknown := set(args.studies) - set(STUDIES):
        parser.error(f"unknown study {', '.join(unknown)}; choose from {', '.join(STUDIES)}")
    if args.peers[0] != "jaxckpt":
        parser.error("--peers must start with jaxckpt, which the others are compared with")
    args.repeats = args.repeats or (2 if args.quick else 5)
    args.scales = {name: args.scale or (_QUICK[name] if args.quick else 1.0) for name in WORKLOADS}
    args.dir.mkdir(parents=True, exist_ok=True)
    return args


def _names(known: Any) -> Any:  # a `type` for argparse
    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen) - set(known):
            message = f"unknown peer {', '.join(unknown)}; choose from {', '.join(known)}"
            raise argparse.ArgumentTypeError(message)
        return chosen

    return names


def _facts(args: argparse.Namespace) -> dict[str, Any]:
    """Returns everything that the figures depend on, without naming the machine."""
    packages = ["jax", "jaxlib", "numpy", "tensorstore", "orbax-checkpoint"]
    packages += ["torch"] if "torch" in args.peers else []
    return {
        "command": f"python -m benchmarks {' '.join(_command(args))}".strip(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "load": os.getloadavg()[0],
        "platform": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "filesystem": _filesystem(args.dir.resolve()),
        "repeats": args.repeats,
        "devices": f"{len(jax.devices())} {jax.devices()[0].platform}",
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def _command(args: argparse.Namespace) -> Iterator[str]:
    if args.studies != list(STUDIES):
        yield from args.studies
    if args.quick:
        yield "--quick"
    if args.scale:
        yield f"--scale {args.scale:g}"
    if args.peers != _PEERS:
        yield f"--peers {','.join(args.peers)}"
    if args.repeats != (2 if args.quick else 5):
        yield f"--repeats {args.repeats}"
    yield "--dir DIR"


def _filesystem(path: Path) -> str:
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    inside = [(len(at), kind) for at, kind in mounts if path.is_relative_to(at)]
    return max(inside)[1] if inside else "unknown"


def _heading(facts: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return (
        f"`{facts['command']}` on {facts['filesystem']}: {facts['cores']} cores, "
        f"{facts['devices']} devices, {facts['platform']}; {versions}. Load at the start: "
        f"{facts['load']:.1f}. Medians of {facts['repeats']}. In brackets: the multiple of "
        "jaxckpt's figure, as the ratio of the medians, and the range of the ratios within a round."
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes temporary directories
    sys.exit(main())
