"""Finds replicas that differ, within a process and between processes.

The replicas of a shard have equal bits, unless a device computes wrongly, or the program lets them
differ. A save writes one of them. Each process takes the fingerprint of every replica that it has,
and tells one digest for each set of processes that hold the same shards: it tells no more for more
leaves or processes. Only if digests differ, a few of these processes meet again with a digest of
each shard, to name the leaves.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np

from jaxckpt._core import fingerprint, transfer
from jaxckpt._core.box import from_index
from jaxckpt._core.plan import Group, placement_of
from jaxckpt._core.select import Globs, selector
from jaxckpt.format.tree import path_text
from jaxckpt.multihost import Json, Processes

if TYPE_CHECKING:  # which needs jax
    import jax

    from jaxckpt._save.tree_plan import TreePlan

_MOST_NAMED: Final = 8  # differences
# Of processes whose digests should be equal and are not, this many send a digest of each shard.
_MOST_ASKED: Final = 4


class _Shard(NamedTuple):
    """A shard that has several replicas, at least one of them here."""

    leaf: str
    holders: Group
    devices: tuple[int, ...]  # ids of the devices here


@final
class Replicas:
    """The replicas that a process has of the shards of one save, and their fingerprints."""

    def __init__(
        self,
        processes: Processes,
        skip: Globs = None,
        *,
        main: str = "",
        compares: bool = True,
        known: Callable[[], Sequence[str]] = tuple,
        marks: Callable[[], bool] = lambda: True,
    ) -> None:
        """Has no shards yet.

        Args:
            skip: Globs over the paths of leaves that may differ.
            main: The item that is not named along with its leaves.
            compares: Whether this process compares replicas at this save.
            known: Returns the differences found before, once the save before has ended. They hold
                until all processes compare again.
            marks: Returns whether differences mark the step, at the same time.
        """
        self.differences: Sequence[str] = ()  # alike in all processes, once they have met
        self.marked: Sequence[str] = ()  # those that mark the step
        self.compares = compares
        self.is_later = False  # whether some fingerprints can be taken only at the next save
        self._processes = processes
        self._skip, self._main = skip, main
        self._known, self._marks = known, marks
        self._problems: list[str] = []  # within this process
        # Each shard with its replicas: arrays on the host, or the fingerprints on their way.
        self._taken: list[tuple[_Shard, Any]] = []
        self._digests: dict[str, list[tuple[_Shard, str]]] = {}  # by the name that `said` gives

    def add(self, tree: TreePlan, values: Sequence[Any], item: str = "") -> None:
        """Begins to take the fingerprints of an item, whose values may change afterwards."""
        if not self.compares:
            return
        chosen = selector(None, self._skip)
        of_item = "" if item == self._main else f" of item {item}"
        alike: dict[Any, list[tuple[Group, list[int]]]] = {}
        for path, sharding, value in zip(tree.array_paths, tree.placed, values, strict=True):
            if sharding is None or not value.size:
                continue
            if (key := (sharding, value.shape)) not in alike:
                alike[key] = _replicas_here(value, self._processes)
            if alike[key] and chosen(path):
                # `addressable_data` has the first replica in place of each.
                shards = value.addressable_shards
                for holders, positions in alike[key]:
                    here = [shards[i] for i in positions]
                    self._taken.append(_take(f"{path_text(path)}{of_item}", holders, here))

    def compare(self) -> None:
        """Compares the replicas of this process, whose values are then released.

        With one process, sets the differences too.
        """
        taken = self.release()
        sent = [None if isinstance(one, list) else one for _, one in taken]
        self.is_later = any(one is fingerprint.LATER for one in sent)
        seen: Counter[Group] = Counter()  # shards; other groups have others between them
        lacking: defaultdict[Group, list[int]] = defaultdict(list)
        found: defaultdict[Group, list[tuple[_Shard, str]]] = defaultdict(list)
        for i, arrived in enumerate(fingerprint.arrived(sent)):
            shard, values = taken[i]
            seen[shard.holders] += 1
            if isinstance(values, list):
                prints = [fingerprint.of_host(one) for one in values]
            elif arrived is not None:
                size = len(arrived) // len(shard.devices)
                prints = [arrived[at : at + size] for at in range(0, len(arrived), size)]
            else:
                lacking[shard.holders].append(seen[shard.holders])
                continue
            most = Counter(prints).most_common(1)[0][0]
            self._problems += _differing(shard, prints, most)
            found[shard.holders].append((shard, hashlib.sha256(most).hexdigest()[:16]))
        self._digests = {
            _name(group, lacking[group]): digests
            for group, digests in found.items()
            if len(group.processes) > 1
        }
        if self._processes.count == 1:
            self._end(self._problems, is_final=self.compares)

    def release(self) -> list[tuple[_Shard, Any]]:
        """Returns what was taken, and drops it."""
        taken, self._taken = self._taken, []
        return taken

    def said(self) -> Json:
        """Returns what this process tells the others; None if it compares nothing."""
        if not self.compares:
            return None
        digests = {
            name: hashlib.sha256(repr([one for _, one in digests]).encode()).hexdigest()[:16]
            for name, digests in self._digests.items()
        }
        return {"problems": self._problems[:_MOST_NAMED], "digests": digests}

    def judge(self, told: Sequence[Any]) -> Json:
        """Returns the problems within processes, and which processes have to tell more."""
        numbered = [(i, one) for i, one in enumerate(told) if one is not None]
        problems = [f"process {i}: {text}" for i, one in numbered for text in one["problems"]]
        by_name: defaultdict[str, defaultdict[str, list[int]]]
        by_name = defaultdict(lambda: defaultdict(list))
        for i, one in numbered:
            for name, digest in one["digests"].items():
                by_name[name][digest].append(i)
        asked = {}
        for name, who in by_name.items():
            if len(who) > 1:
                most, *others = sorted(who.values(), key=len, reverse=True)
                asked[name] = [most[0], *chain.from_iterable(others)][:_MOST_ASKED]
        return {"problems": problems[:_MOST_NAMED], "asked": asked, "all": None not in told}

    def settle(self, judged: Any, name: str) -> None:  # judged: JSON
        """Sets the differences; the processes meet again if any have to tell more."""
        found, asked = judged["problems"], judged["asked"]
        if asked:
            mine = {
                one: [[shard.leaf, shard.devices, digest] for shard, digest in self._digests[one]]
                for one, who in asked.items()
                if self._processes.index in who
            }
            found += self._processes.gather(name, mine, _between)
        self._end(found, is_final=judged["all"])

    def _end(self, found: Sequence[str], *, is_final: bool) -> None:
        self.differences = [*found, *(() if is_final else self._known())][:_MOST_NAMED]
        self.marked = self.differences if self._marks() else ()


def _between(told: Sequence[Any]) -> list[str]:
    """Returns the differences between processes, from a digest of each of their shards."""
    problems: list[str] = []
    for name in dict.fromkeys(name for one in told for name in one):
        (first, mine), *others = [(i, one[name]) for i, one in enumerate(told) if name in one]
        for i, theirs in others:
            for (leaf, devices, digest), (_, their_devices, other) in zip(
                mine, theirs, strict=True
            ):
                if digest != other:
                    here, there = _devices(their_devices), _devices(devices)
                    problems.append(
                        f"leaf {leaf} has other bits on {here} of process {i} than on {there} of "
                        f"process {first}"
                    )
    return problems[:_MOST_NAMED]


def _replicas_here(value: Any, processes: Processes) -> list[tuple[Group, list[int]]]:
    """Returns the holders of each replicated shard here, and its places in `addressable_shards`."""
    placement = placement_of(value.sharding, value.shape, processes.process_of)
    groups = placement.grid.of(processes.index)
    found = {placement.box(at).start: (group, list[int]()) for at, group in groups}
    for i, shard in enumerate(value.addressable_shards):
        # Simulated processes can address all devices.
        if processes.process_of(shard.device) == processes.index:
            found[from_index(shard.index, value.shape).start][1].append(i)
    return [(group, here) for group, here in found.values() if len(group.processes) * len(here) > 1]


def _take(leaf: str, holders: Group, shards: Sequence[Any]) -> tuple[_Shard, Any]:
    """Takes the replicas in host memory, or begins to take their fingerprints."""
    data = [shard.data for shard in shards]
    devices = tuple(shard.device.id for shard in shards)
    taken = [*map(np.asarray, data)] if transfer.on_host(shards) else _sent(data)
    return _Shard(leaf, holders, devices), taken


def _sent(data: Sequence[jax.Array]) -> Any:
    """Sends for the fingerprints of equal shards, each on one device, by one computation on all."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = _mesh(tuple(one.device for one in data))
    kind = data[0].sharding.memory_kind
    sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
    all_of_them = jax.make_array_from_single_device_arrays(data[0].shape, sharding, [*data])
    return fingerprint.send([all_of_them])[0]


@lru_cache(maxsize=64)
def _mesh(devices: tuple[Any, ...]) -> jax.sharding.Mesh:
    from jax.sharding import Mesh

    return Mesh(np.array(devices), ("replica",))


def _name(group: Group, lacking: Sequence[int]) -> str:
    """Names the shards of a set of processes, but for those without a fingerprint."""
    text = f"{group.processes} {lacking}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _differing(shard: _Shard, prints: Sequence[bytes], most: bytes) -> list[str]:
    """Describes which devices of this process have other bits than most have."""
    same = [d for d, one in zip(shard.devices, prints, strict=True) if one == most]
    others = [d for d in shard.devices if d not in same]
    if not others:
        return []
    return [f"leaf {shard.leaf} has other bits on {_devices(others)} than on {_devices(same)}"]


def _devices(ids: Sequence[int]) -> str:
    return f"device{'s'[: len(ids) > 1]} {', '.join(map(str, ids))}"
