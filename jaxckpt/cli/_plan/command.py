"""`plan`: bytes, seconds and goodput on a cluster that is not there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from jaxckpt._core.text import counted, size_text
from jaxckpt.cli import _options, _output
from jaxckpt.cli._output import Cell

if TYPE_CHECKING:
    from jaxckpt.cli._plan.forecast import Forecast

_FACTORY: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_MOST_NAMED: Final = 3  # leaves in a note
_RATES: Final = {
    "store": "The store, for all hosts together.",
    "host": "One host to or from the store; what max_write_bytes_per_s leaves of it.",
    "link": "One host from other hosts.",
    "disk": "The local disk of one host.",
    "copy": "The devices of one host to its memory.",
}


class _Axes(click.ParamType):
    """The axes of a mesh, as `dp=16,tp=4`."""

    name = "axes"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Mapping[str, int]:
        pairs = [re.fullmatch(r"\s*(\w+)=(\d+)\s*", one) for one in str(value).split(",")]
        found = {pair[1]: int(pair[2]) for pair in pairs if pair}
        if len(found) < len(pairs) or 0 in found.values():
            self.fail(f"must be axes and sizes, such as dp=16,tp=4, got {value!r}.", param, ctx)
        return found


def _rates(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, what in reversed(_RATES.items()):
        text = f"{what} Bytes in a second, such as 10GB."
        command = click.option(f"--{name}-rate", name, type=_options.RATE, help=text)(command)
    return command


@click.command(cls=_options.OnSteps)
@click.argument("target", type=_options.PATH, metavar="PATH|MODULE:FACTORY")
@click.option("--hosts", type=click.IntRange(1), required=True, help="Each runs one process.")
@click.option("--devices-per-host", type=click.IntRange(1), required=True, metavar="N")
@click.option("--mesh", type=_Axes(), required=True, help="Over all devices, such as dp=16,tp=4.")
@_rates
@click.option("--mtbf", type=_options.AGE, help="Mean time between failures of one host: 50000h.")
@_options.as_json
def plan(
    target: str,
    hosts: int,
    devices_per_host: int,
    mesh: Mapping[str, int],
    mtbf: float | None,
    as_json: bool,
    **rates: float | None,
) -> None:
    """Show what saves and restores take on a planned cluster.

    PATH is a checkpoint, whose shapes and specs count. MODULE:FACTORY is a function, found from the
    current directory and called, that returns a tree of jax.ShapeDtypeStructs with shardings, or
    such a tree and a tree of PartitionSpecs. Bytes and requests are those of a real job. Seconds
    are arithmetic from the rates given; without a rate, they are left out.
    """
    from jaxckpt.cli._plan.cluster import cluster_of
    from jaxckpt.cli._plan.forecast import Rates, forecast
    from jaxckpt.cli._plan.loads import loads_of
    from jaxckpt.cli._plan.tree import planned, tree_at, tree_from

    is_factory = _FACTORY.fullmatch(target) and not os.path.exists(target)
    cluster = cluster_of(hosts, devices_per_host, mesh)
    tree = planned(*(tree_from if is_factory else tree_at)(target), cluster)
    found = forecast(target, tree, cluster, loads_of(tree, cluster), Rates(**rates, mtbf_s=mtbf))
    if as_json:
        _output.print_json(found)
        return
    print_forecast(found)


def print_forecast(found: Forecast) -> None:
    """Prints a forecast for people."""
    mesh = ", ".join(f"{name}={size}" for name, size in found.mesh.items())
    _output.echo(
        f"{found.name}: {counted(found.leaves, 'leaf')}, {size_text(found.state_bytes)}, on "
        f"{counted(found.hosts, 'host')} of {counted(found.devices_per_host, 'device')}, "
        f"mesh {mesh}; {size_text(found.device_bytes)} on each device"
    )
    _output.echo("")
    head = ["", "all hosts", "requests", "busiest host", "requests", "seconds"]
    rows: list[list[Cell]] = []
    for one in found.transfers:
        loads = [(size_text(x.bytes), f"{x.requests:,}") for x in (one.all_hosts, one.busiest)]
        rows.append([one.name, *loads[0], *loads[1], _seconds(one.seconds)])
    _output.print_table(head, rows, right=head[1:])
    _output.echo("")
    head = ["saves to", "blocked s", "committed s", "durable s", "restart s"]
    head += ["best interval s", "goodput", "host memory", "local disk"]
    rows = []
    for one in found.outlooks:
        times = [one.blocked_s, one.committed_s, one.durable_s, one.restart_s, one.interval_s]
        goodput = "-" if one.goodput is None else f"{one.goodput:.2%}"
        sizes = [size_text(one.host_memory_bytes), size_text(one.local_disk_bytes)]
        rows.append([one.name, *map(_seconds, times), goodput, *sizes])
    _output.print_table(head, rows, right=head[1:])
    _output.echo("")
    if found.moved_bytes:
        _output.echo(f"read once: up to {size_text(found.moved_bytes)} come from other hosts")
    budget = size_text(found.restore_memory_bytes)
    _output.echo(f"a restore takes up to {budget} of host memory beside its arrays")
    if found.job_mtbf_s is not None:
        _output.echo(f"mean time between failures of the job: {found.job_mtbf_s / 3600:.1f} h")
    if found.replicated:
        named = ", ".join(found.replicated[:_MOST_NAMED])
        more = ", ..." if len(found.replicated) > _MOST_NAMED else ""
        _output.echo(
            f"{counted(len(found.replicated), 'leaf')} replicated along axes of their specs that "
            f"the mesh lacks, or that do not divide them: {named}{more}"
        )
    _output.echo("Seconds are arithmetic from the rates given, not measurements.")


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"
