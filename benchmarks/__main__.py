"""The command: measures, prints a Markdown table, and keeps it with every sample on request."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import sys
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

# JAX reads these when it is imported, so they come before all that imports it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )

import jax

from benchmarks.peers import PEERS
from benchmarks.timing import BYTES, FIGURES, Samples, measure, paired
from benchmarks.workloads import WORKLOADS, build, make_mesh, total_bytes

_QUICK: Final = {"large": 0.1, "gpt2": 0.05, "small": 0.03}


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    # Orbax warns about its own deprecations at each call.
    warnings.filterwarnings("ignore", module="orbax")
    peers = [PEERS[name]() for name in args.peers]
    facts = _facts(args)
    results, tables = {}, [_heading(facts)]
    print(tables[0], flush=True)
    for name in args.workloads:
        scale = args.scale or (_QUICK[name] if args.quick else 1.0)
        tree = build(name, scale=scale, mesh=make_mesh(4, 2))
        title = f"{name}: {_amount(total_bytes(tree))} in {len(jax.tree.leaves(tree)):,} leaves"
        samples = measure(tree, peers, root=args.dir, repeats=args.repeats)
        results[name] = {"title": title, "scale": scale, "samples": samples}
        tables.append(_table(title, samples))
        print(f"\n{tables[-1]}", flush=True)
        del tree
        if args.out is not None:  # now, so that a long run that is stopped has told something
            _keep(args.out / "results", args.name, tables, {"facts": facts, "workloads": results})
    for peer in peers:
        peer.close()
    return 0


def _keep(folder: Path, name: str, tables: Sequence[str], document: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text("\n\n".join(tables) + "\n")
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, about a minute")
    parser.add_argument("--scale", type=float, help="share of the full sizes, in place of --quick")
    parser.add_argument("--workloads", type=_names(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--peers", type=_names(PEERS), default=list(PEERS))
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where to save")
    parser.add_argument("--repeats", type=int, help="rounds that count: 5, with --quick 2")
    parser.add_argument("--out", type=Path, help="keep the table and all samples in OUT/results")
    parser.add_argument("--name", default="latest", help="of the files in OUT/results")
    args = parser.parse_args(argv)
    args.repeats = args.repeats or (2 if args.quick else 5)
    if args.peers[0] != "jaxckpt":
        parser.error("--peers starts with jaxckpt, which the others are compared with")
    return args


def _names(known: Any) -> Any:  # what argparse takes for a type
    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: none of {', '.join(known)}")
        return chosen

    return names


def _facts(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on; nothing that names a machine."""
    packages = ("jax", "jaxlib", "numpy", "tensorstore", "orbax-checkpoint")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "load": os.getloadavg()[0],
        "platform": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "filesystem": _filesystem(args.dir.resolve()),
        "repeats": args.repeats,
        "devices": f"{len(jax.devices())} {jax.devices()[0].platform}",
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


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
        f"{facts['cores']} cores, {facts['devices']} devices, {facts['filesystem']}, "
        f"{facts['platform']}; {versions}. Load at the start: {facts['load']:.1f}. "
        f"Medians of {facts['repeats']}. In brackets how many times jaxckpt's figure, as the ratio "
        "of the medians, and from the least to the greatest ratio within a round."
    )


def _table(title: str, samples: Samples) -> str:
    mine, *others = next(iter(samples.values()))
    lines = [
        f"### {title}",
        "",
        "| | " + " | ".join([mine, *others]) + " |",
        "|---|" + "---|" * (1 + len(others)),
    ]
    for figure in FIGURES:
        by_peer = samples[figure]
        cells = [_value(figure, by_peer[mine])]
        for other in others:
            if not by_peer[other]:
                cells.append("")
                continue
            ratio, least, most = paired(by_peer[mine], by_peer[other])
            cells.append(f"{_value(figure, by_peer[other])} ({ratio:.2f}x, {least:.2f}-{most:.2f})")
        lines.append(f"| {figure} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _value(figure: str, values: Sequence[float]) -> str:
    middle = statistics.median(values)
    if figure in BYTES:
        return _amount(middle)
    return f"{middle:.2f} s" if middle >= 1 else f"{middle * 1e3:.1f} ms"


def _amount(size: float) -> str:
    return f"{size / 1e6:,.0f} MB" if size >= 1e7 else f"{size / 1e6:.2f} MB"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that directories are removed
    sys.exit(main())
