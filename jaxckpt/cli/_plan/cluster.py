"""Hosts and devices that only have numbers.

jax makes meshes and shardings of any objects with the attributes of a device, and works out their
shards. So the planner of a real job plans for them, with one process for each host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxckpt._core.box import Box
from jaxckpt._core.plan import Placement, placement_of

_MOST_DEVICES: Final = 1 << 20  # each is an object, and jax looks at all


class _Client:
    """The client of devices, none of which belongs to this process."""

    def process_index(self) -> int:
        return -1


@dataclass(frozen=True, slots=True)
class Device:
    """A device that is not there, with the attributes that jax's meshes and shardings use."""

    id: int
    process_index: int
    client: Any = _Client()  # noqa: RUF009  # the same of all
    platform: str = "planned"
    device_kind: str = "planned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Hosts with equally many devices each, numbered host by host, and a mesh over all devices."""

    hosts: int
    mesh: Mesh

    @property
    def devices(self) -> Sequence[Any]:
        return list(self.mesh.devices.flat)

    @property
    def devices_per_host(self) -> int:
        return self.mesh.size // self.hosts


def cluster_of(hosts: int, devices_per_host: int, axes: Mapping[str, int]) -> Cluster:
    """Returns a cluster whose devices fill a mesh in order, the last axis fastest.

    Raises:
        ValueError: the mesh has another number of devices, or too many to plan for.
    """
    count, wanted = hosts * devices_per_host, math.prod(axes.values())
    if count != wanted:
        raise ValueError(
            f"the mesh has {wanted:,} devices, but {hosts:,} hosts of {devices_per_host:,} devices "
            f"have {count:,}. Change --mesh, --hosts or --devices-per-host."
        )
    if count > _MOST_DEVICES:
        raise ValueError(
            f"a plan is for at most {_MOST_DEVICES:,} devices, got {count:,}. Plan for fewer hosts."
        )
    devices: Any = [Device(i, i // devices_per_host) for i in range(count)]
    shaped = np.array(devices, dtype=object).reshape([*axes.values()])
    return Cluster(hosts=hosts, mesh=Mesh(shaped, tuple(axes)))


@dataclass(frozen=True, slots=True)
class Host:
    """One process of the job, with those members of `Processes` that plans use."""

    index: int
    count: int

    def process_of(self, device: Device) -> int:
        return device.process_index

    def boxes_of(self, sharding: NamedSharding, shape: tuple[int, ...]) -> tuple[Box, ...]:
        """Returns the distinct shards on the devices of this host."""
        placement = placed(sharding, shape)
        return tuple(placement.box(index) for index, _ in placement.grid.of(self.index))


def placed(sharding: NamedSharding, shape: tuple[int, ...]) -> Placement:
    """Returns the shards of an array on the hosts."""
    return placement_of(sharding, shape, attrgetter("process_index"))
