"""Compares the seconds of `jaxckpt plan` with measured ones: `python -m benchmarks.planned`.

Jobs of several processes save to a store and restore from it behind a line of `--line` MB/s, which
all of them share. A row has what the plan says of the same layout with `--store-rate`, and what was
measured: the seconds of the slowest process, without the start of the job. A line that is slow
beside the processors measures the plan; a fast one measures this machine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

from jaxckpt._core.text import size_text
from jaxckpt.cli._plan.cluster import cluster_of
from jaxckpt.cli._plan.forecast import Rates, forecast
from jaxckpt.cli._plan.loads import loads_of
from jaxckpt.cli._plan.tree import planned

_TIMEOUT_S: Final = 300.0
_WAYS: Final = {"save": "save", "restore": "restore", "restore_once": "restore, read once"}
_MEASURED: Final = [("dense", 4), ("replicated", 4), ("experts", 8)]  # tree and processes


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--line", type=float, default=4.0, help="MB/s each way, for all processes")
    args = parser.parse_args(argv)
    print("| tree, processes, mesh | | bytes of the plan | seconds of the plan | measured |")
    print("| --- | --- | ---: | ---: | ---: |")
    for cells in measure(args.line * 1e6):
        print("| " + " | ".join(cells) + " |", flush=True)


def measure(line: float) -> Iterator[list[str]]:
    """Yields a row for each layout and way.

    Args:
        line: Bytes in a second.
    """
    from tests.multiprocess import run_processes
    from tests.stores import servers
    from tests.stores.proxy import Proxy
    from tests.workers.planned import LAYOUTS

    with servers.gcs() as store, Proxy(store.url) as proxy:
        for kind, processes in _MEASURED:
            number, layout = next(
                (n, one) for n, one in enumerate(LAYOUTS) if one[:2] == (kind, processes)
            )
            _, _, devices, axes = layout
            server = store.with_new_bucket()
            env = dict(server.at(proxy.url).env)
            transfers = {one.name: one for one in _planned(layout, line).transfers}
            mesh = ", ".join(f"{name}={size}" for name, size in axes.items())
            for way, name in _WAYS.items():
                proxy.bytes_per_s = proxy.answers_bytes_per_s = line
                done = run_processes(
                    "planned:time_layout",
                    count=processes,
                    devices_per_process=devices,
                    args=[f"gs://{server.bucket}/a", number, way, env],
                    timeout_s=_TIMEOUT_S,
                )
                plan, seconds = transfers[name], max(one.result for one in done)
                cells = [f"{kind}, {processes}, {mesh}", name, size_text(plan.all_hosts.bytes)]
                yield [*cells, f"{plan.seconds or 0:.1f}", f"{seconds:.1f}"]


def _planned(layout: Any, line: float) -> Any:
    """Returns the forecast of a layout behind a line."""
    import jax

    from tests.workers.planned import HOST, TREES, dtype_of

    kind, processes, devices, axes = layout
    cluster = cluster_of(processes, devices, axes)
    tree, specs = dict(HOST), {}
    for name, (shape, dtype, spec) in TREES[kind].items():
        tree[name] = jax.ShapeDtypeStruct(shape, dtype_of(dtype))
        specs[(name,)] = spec
    placed = planned(tree, specs, cluster)
    rates = Rates(store=line, link=1e12)  # the processes are on one machine
    return forecast(kind, placed, cluster, loads_of(placed, cluster), rates)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
