"""Computes what saves and restores take, from the loads of the hosts and from rates.

All hosts work at the same time, so a transfer takes as long as the busiest host at its own rate, or
as all of them at the rate of the store they share, whichever is longer. Latency, retries and the
metadata are not part of it.

The best interval between saves is that of `SavePolicy.auto`:

    sqrt(2 * blocked * (MTBF + restart)), but not shorter than a save

by J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974),
and J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS
22 (2006). Expected goodput is the part of the time that trains and is not repeated; `goodput` has
the formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from jaxckpt._run.config import LocalTier
from jaxckpt._run.schedule import Costs, job_mtbf_s
from jaxckpt.cli._plan.cluster import Cluster
from jaxckpt.cli._plan.loads import BUDGET_BYTES, HostLoads, Load
from jaxckpt.cli._plan.tree import PlannedTree
from jaxckpt.pages.goodput import best_interval_s, expected

# The steps that a local tier keeps, and the one that is being saved.
KEPT_STEPS: Final = (LocalTier("/").keep.last or 0) + 1
_PARTS: Final = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of the best interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes in a second, or None if not known."""

    store: float | None = None  # of the store, for all hosts together
    host: float | None = None  # between one host and the store
    link: float | None = None  # from other hosts to one host
    disk: float | None = None  # of the local disk of a host
    copy: float | None = None  # from the devices of a host to its memory
    mtbf_s: float | None = None  # mean time between failures of one host


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One way to save or to restore."""

    name: str
    all_hosts: Load
    busiest: Load  # the most bytes, and the most requests, of a host
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A run that saves to the store, or to local disks first."""

    name: str
    blocked_s: float | None  # in which a save copies values to the host
    committed_s: float | None  # from the call until a failure loses no step
    durable_s: float | None  # from the call until the step is in the store
    restart_s: float | None  # of a restore
    interval_s: float | None  # the best, between two saves
    goodput: float | None  # at that interval, from 0 to 1
    host_memory_bytes: int  # for a save, on the busiest host
    local_disk_bytes: int  # on the busiest host, for the steps that are kept and the next
    curve: Sequence[tuple[float, float]] = ()  # the goodput at intervals around the best


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Shows what saves and restores of one tree take on a cluster."""

    name: str  # of the checkpoint or the function
    hosts: int
    devices_per_host: int
    mesh: Mapping[str, int]
    leaves: int
    state_bytes: int
    device_bytes: int  # on each device, of the state
    restore_memory_bytes: int  # on a host, beside arrays in host memory
    moved_bytes: int  # to the busiest host, in a restore that reads once
    replicated: Sequence[str]  # leaves that are not split as their specs ask
    rates: Rates
    job_mtbf_s: float | None
    transfers: Sequence[Transfer]
    outlooks: Sequence[Outlook]
    each: Sequence[HostLoads] = field(repr=False)


def forecast(
    name: str, tree: PlannedTree, cluster: Cluster, each: Sequence[HostLoads], rates: Rates
) -> Forecast:
    """Returns what saves and restores take, given the loads of each host."""
    moved_bytes = max(one.moved_bytes for one in each)
    carried_s = _seconds([moved_bytes], rates.link) if moved_bytes else 0.0
    save = _transfer("save", [one.save for one in each], rates.host, rates.store)
    save_disk = _transfer("save to disks", [one.save_disk for one in each], rates.disk)
    direct = _transfer("restore", [one.restore for one in each], rates.host, rates.store)
    read = [one.restore_once for one in each]
    once = _transfer("restore, read once", read, rates.host, rates.store, after_s=carried_s)
    disk = _transfer("restore from disks", [one.restore_disk for one in each], rates.disk)
    mtbf_s = rates.mtbf_s and job_mtbf_s(rates.mtbf_s / 3600, cluster.hosts)
    values, held = max(x.values_bytes for x in each), max(x.held_bytes for x in each)
    restarts = [one.seconds for one in (direct, once) if one.seconds is not None]
    blocked_s, blocked_disk_s = (_seconds([size], rates.copy) for size in (values, held))
    committed_s = _sum(blocked_s, save.seconds)
    near_s = _sum(blocked_disk_s, save_disk.seconds)
    far = Costs(blocked_s=blocked_s, save_s=committed_s, restore_s=min(restarts, default=None))
    near = Costs(blocked_s=blocked_disk_s, save_s=near_s, restore_s=disk.seconds)
    durable_s, kept_bytes = _sum(near_s, save.seconds), KEPT_STEPS * save_disk.busiest.bytes
    outlooks = (
        _outlook("store", far, mtbf_s, committed_s, memory_bytes=values, disk_bytes=0),
        _outlook("local disks", near, mtbf_s, durable_s, memory_bytes=held, disk_bytes=kept_bytes),
    )
    return Forecast(
        name=name,
        hosts=cluster.hosts,
        devices_per_host=cluster.devices_per_host,
        mesh=dict(cluster.mesh.shape),
        leaves=len(tree.leaves),
        state_bytes=sum(one.values_bytes for one in each),
        device_bytes=each[0].device_bytes,
        restore_memory_bytes=BUDGET_BYTES,
        moved_bytes=moved_bytes,
        replicated=tree.replicated,
        rates=rates,
        job_mtbf_s=mtbf_s,
        transfers=(save, save_disk, direct, once, disk),
        outlooks=outlooks,
        each=each,
    )


def _transfer(
    name: str,
    loads: Sequence[Load],
    host_rate: float | None,
    store_rate: float | None = None,
    after_s: float | None = 0.0,
) -> Transfer:
    """Returns a transfer of all hosts.

    Args:
        after_s: What follows the transfer.
    """
    sizes = [load.bytes for load in loads]
    return Transfer(
        name=name,
        all_hosts=sum(loads, Load()),
        busiest=Load(bytes=max(sizes), requests=max(load.requests for load in loads)),
        seconds=_sum(_seconds(sizes, host_rate, store_rate), after_s),
    )


def _seconds(
    sizes: Sequence[int], host_rate: float | None, store_rate: float | None = None
) -> float | None:
    """Returns how long transfers take that begin together; None without a rate."""
    limits = [(max(sizes), host_rate), (sum(sizes), store_rate)]
    return max((size / rate for size, rate in limits if rate is not None), default=None)


def _sum(*seconds: float | None) -> float | None:
    """Returns a sum, or None if a part is not known."""
    known = [one for one in seconds if one is not None]
    return sum(known) if len(known) == len(seconds) else None


def _outlook(
    name: str,
    costs: Costs,
    mtbf_s: float | None,
    durable_s: float | None,
    *,
    memory_bytes: int,
    disk_bytes: int,
) -> Outlook:
    interval_s, goodput, curve = None, None, []
    if mtbf_s and None not in (costs.blocked_s, costs.save_s, costs.restore_s):
        interval_s = best_interval_s(costs, mtbf_s)
        goodput_at = partial(expected, costs, mtbf_s)
        goodput = goodput_at(interval_s)
        intervals = [interval_s * part for part in (*_PARTS, 1.0, *(1 / p for p in _PARTS[::-1]))]
        curve = [(seconds, goodput_at(seconds)) for seconds in intervals]
    return Outlook(
        name=name,
        blocked_s=costs.blocked_s,
        committed_s=costs.save_s,
        durable_s=durable_s,
        restart_s=costs.restore_s,
        interval_s=interval_s,
        goodput=goodput,
        host_memory_bytes=memory_bytes,
        local_disk_bytes=disk_bytes,
        curve=curve,
    )
