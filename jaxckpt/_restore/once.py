"""Reads each stored value once for a whole job, and lets XLA carry it to where it is wanted.

1. choose    for each leaf: directly, or once, and what carries it     carry
2. agree     all have the same plan                                    round "restore"
3. read      a group of leaves: each process its part, checked         _disk.reader
4. meet      all have read, compiled, and have room for the leaves     round "restore group"
5. carry     XLA's collective operations, in the same order everywhere
6. take      the values that each process wants

Where nothing is read once, 1 says so, and the round at the end is the only one. It has the name of
the round in 2, so that processes that disagree find out: who has a plan then reads directly.

A process that fails before 5 reports it in the next round, and one that fails at 6 has gone through
5 first, so no process enters a collective operation that another will never reach. Only if XLA
cannot begin one do the other processes wait, until JAX ends the job. If a process fails at 3, or
reading directly turns out to be quicker, every process reads directly what its shards still need:
so an error, and what follows from it, are as without this module.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from typing import Any, Final, final

import jax
from jax.sharding import Sharding

from jaxckpt._core.plan import count_chunks, plan_chunks
from jaxckpt._core.spread import grouped
from jaxckpt._core.text import counted, size_text
from jaxckpt._disk.native import Item
from jaxckpt._progress.meter import Meter
from jaxckpt._restore.carry import Convert, Pack, Spread, carriers_of, size_of, unit_of
from jaxckpt._restore.match import RestoreRequest
from jaxckpt._restore.placement import LeafPlan
from jaxckpt._restore.turn import take_if_free
from jaxckpt.format.arrays import bytes_of
from jaxckpt.format.tree import Path, path_text
from jaxckpt.multihost import Json, Meeting, Processes, first_of, meet, slowest_of
from jaxckpt.storage._limit import LimitedStorage
from jaxckpt.types import RestoreReport

_logger = logging.getLogger("jaxckpt")

# By default, smaller trees are read directly: compiling and connecting take a part of a second.
_LEAST_TREE_BYTES: Final = 1 << 26
# A round for each group; the next ones are read meanwhile. The first ones are small, so that little
# has been carried when it turns out how long that takes.
_GROUPS: Final = 8
_LEAST_GROUP_BYTES: Final = 8 << 20
# Carrying for a shorter time shows no rate, as connecting takes a part of it.
_SURE_S: Final = 1.0

Pairs = Generator[tuple[Path, Any], None, None]
Carrier = Spread | Pack


class Ended(Exception):
    """Another process failed before anything was read; has the meeting in which it was heard."""

    def __init__(self, met: Meeting) -> None:
        self.met = met


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Together:
    """One attempt of all processes to read one checkpoint."""

    processes: Processes
    request: RestoreRequest
    meter: Meter
    name: str  # of what is read, alike in all processes
    where: str  # for messages
    read_bytes: int = 0  # by this process, uncompressed
    moved_bytes: int = 0  # to this process
    once: tuple[str, ...] = ()  # the leaves that were read once
    shared: dict[str, str] = field(default_factory=dict)  # see `shared_arrays`
    _has_agreed: bool = field(default=False, init=False)

    def values(
        self,
        item: Item,
        plans: Sequence[LeafPlan],
        read: Callable[..., Pairs],
        convert: Callable[..., object],
    ) -> Iterator[tuple[Path, Any]]:
        """Yields all leaves, within the phase "read"; all are read directly if called again."""
        self.shared = shared_arrays(item.name, plans, self.processes)
        with ExitStack() as turn:
            carriers = [] if self._has_agreed else self._agreed(item, plans, turn)
            carried = {plan.path for one in carriers for plan in one.plans}
            others = [plan for plan in plans if plan.path not in carried]
            parts = [part for one in carriers for part in one.parts]
            budget_bytes = self.request.budget_bytes // (2 if carriers else 1)  # and a group
            done = set[Path]()
            with closing(read([*parts, *others], budget_bytes=budget_bytes)) as values:
                for one, found in self._carried(carriers, values, partial(convert, item.path)):
                    done |= {plan.path for plan in one.plans}
                    self.read_bytes += sum(_read_bytes(item, part) for part in one.parts)
                    self.moved_bytes += one.moved_bytes()
                    yield from zip((plan.path for plan in one.plans), found, strict=True)
                if done == carried:
                    yield from values
        self.once = tuple(path_text(plan.path) for plan in plans if plan.path in done)
        left = [plan for plan in plans if plan.path not in done]
        self.read_bytes += sum(_read_bytes(item, plan) for plan in left if plan.saved.has_array)
        if done != carried:
            yield from read(left, budget_bytes=self.request.budget_bytes)

    def end(self, facts: Json, problem: Exception | None, mark: str) -> Meeting:
        """Waits until all processes have read, or one has failed."""
        met = self._meet("restore", facts, problem, _judge, mark)
        while met.verdict is not None and "alike" in met.verdict:  # some have yet to read
            met = self._meet("restore", facts, problem, _judge, mark)
        return met

    def _agreed(self, item: Item, plans: Sequence[LeafPlan], turn: ExitStack) -> Sequence[Carrier]:
        """Returns the leaves to read once, if every process has this plan, and its turn."""
        if not self._may(item, plans):
            return []
        carriers = carriers_of(item, plans, self.processes, self.request.budget_bytes // 8)
        if not carriers:
            return []
        self._has_agreed = True
        has_turn = take_if_free(turn)
        plan = {"plan": self._described(item, carriers) if has_turn else None}
        with self.meter.phase("meet"):
            met = self._meet("restore", plan, None, _judge)
        if met.failed:
            raise Ended(met)
        return carriers if has_turn and met.verdict["alike"] else []

    def _may(self, item: Item, plans: Sequence[LeafPlan]) -> bool:
        asked, storage = self.request.read_once, item.found.storage
        if not asked or asked is True:
            return asked is True
        # Local disks are as quick, and each process may see other files there.
        if not (storage.server_copies or isinstance(storage, LimitedStorage)):
            return False
        return sum(size_of(x.saved) for x in plans if x.saved.has_array) > _LEAST_TREE_BYTES

    def _described(self, item: Item, carriers: Sequence[Carrier]) -> str:
        """Returns a digest of everything that must be alike in all processes."""
        facts: list[object] = [item.found.origin, item.found.part, item.found.stamps, self.shared]
        facts += [self.request.budget_bytes, self.request.read_once]
        return _digest(
            facts + [(type(x), y.path, y.saved.array) for x in carriers for y in x.plans]
        )

    def _carried(
        self, carriers: Sequence[Carrier], values: Pairs, convert: Convert
    ) -> Iterator[tuple[Carrier, Sequence[Any]]]:
        """Yields what carried leaves, with the leaves; stops before what is to be read directly."""
        pace, problem = _Pace(carriers, self.meter), None
        total_bytes = sum(one.size_bytes for one in carriers)

        def judge(given: list[Any]) -> bool:
            left = sum(one.size_bytes for one in pace.left)
            direct = sum(one.direct_bytes for one in pace.left)
            return self.request.read_once is True or goes_on(left, direct, total_bytes, given)

        for group in self._groups(carriers):
            parts: list[Any] = []
            try:
                if problem is None:
                    parts = [
                        one.ready([value for _, value in islice(values, len(one.parts))])
                        for one in group
                    ]
                    pace.has_read()
                    with self.meter.phase("move"):
                        jax.block_until_ready(parts)
                        _check_room(group)  # compiles
            except Exception as error:  # reported to the other processes
                problem = error
            with self.meter.phase("meet"):
                met = self._meet("restore group", pace.facts, problem, judge)
            if met.failed:
                what = "could not read its part, so that every process reads all that it needs"
                _logger.warning("%s: a process %s: %s", self.where, what, met.problems)
            if met.failed or not met.verdict:
                break
            try:
                start_s = time.monotonic()
                with self.meter.phase("move"):
                    carried = _carry(group, parts, convert)
                pace.has_carried(group, time.monotonic() - start_s)
            except Exception as error:  # reported in the next round, or read directly
                problem = error
                continue
            yield from zip(group, carried, strict=True)
        del problem  # its traceback refers to this frame

    def _groups(self, carriers: Sequence[Carrier]) -> Iterator[list[Carrier]]:
        sizes = [one.held_bytes for one in carriers]
        most_bytes = max(_LEAST_GROUP_BYTES, sum(sizes) // _GROUPS)
        most_bytes = min(self.request.budget_bytes // 4, most_bytes)
        return grouped(carriers, sizes, most_bytes, _LEAST_GROUP_BYTES)

    def _meet(
        self,
        name: str,
        value: Json,
        problem: Exception | None,
        judge: Callable[[list[Any]], Json],
        mark: str = "",
    ) -> Meeting:
        name, where = f"{name} {self.name}", self.where
        return meet(self.processes, name, value, problem, judge, mark=mark, where=where)


def _judge(given: list[Any]) -> Json:
    if any("plan" in one for one in given):
        return {"alike": all(one == given[0] for one in given)}
    others = [i for i, one in enumerate(given) if one["token"] != given[0]["token"]]
    replaced = "read a different checkpoint than process 0: it was replaced in the meantime"
    sums = {name: sum(one[name] for one in given) for name in ("read", "moved")}
    told = {**first_of(dict.fromkeys(others, replaced)), "unlike": first_of(_unlike(given))}
    return {**told, **sums, "slowest": slowest_of(given)}


# --- groups ----------------------------------------------------------------------------------


def _carry(group: Sequence[Carrier], parts: list[Any], convert: Convert) -> list[list[Any]]:
    """Carries a group; a value that does not fit here raises after the last operation."""
    carried, problem = [], None
    for one in group:
        moved = one.move(parts.pop(0))
        # On CPUs, XLA does not keep operations apart that run at the same time: they may hang.
        jax.block_until_ready(moved)
        try:
            carried.append(one.take(moved, convert))
        except Exception as error:
            problem = problem or error
        del moved  # before the next one comes
    jax.block_until_ready(carried)
    try:
        if problem is not None:
            raise problem
    finally:
        del problem  # its traceback refers to this frame
    return carried


def _check_room(group: Sequence[Carrier]) -> None:
    """Raises MemoryError unless the devices have room for what the group becomes, and on the way.

    The parts are there already.
    """
    needs = [program.memory_analysis() for one in group if (program := one.program()) is not None]
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    left = [one["bytes_limit"] - one["bytes_in_use"] for one in stats if "bytes_limit" in one]
    wanted = sum(one.output_size_in_bytes for one in needs)
    wanted += max((one.temp_size_in_bytes for one in needs), default=0)
    if wanted > min(left, default=wanted):
        raise MemoryError(f"a device has {min(left)} bytes left, and a group takes {wanted}")


class _Pace:
    """Measures reading and carrying, without compilations and the first connections."""

    def __init__(self, carriers: Sequence[Carrier], meter: Meter) -> None:
        self.left = carriers  # to be carried
        self._meter, self._start_s, self._count = meter, time.monotonic(), len(carriers)
        # Bytes and seconds: of the first group, of all that has been read, and of the groups that
        # have been carried since the first one.
        self.facts: dict[str, Any] = {"carried": [0, 0.0]}

    def has_read(self) -> None:
        self.facts["read"] = [self._meter.done_bytes, time.monotonic() - self._start_s]
        self.facts.setdefault("first", self.facts["read"])

    def has_carried(self, group: Sequence[Carrier], seconds: float) -> None:
        if len(self.left) < self._count:
            size_bytes, before_s = self.facts["carried"]
            size_bytes += sum(one.size_bytes for one in group)
            self.facts["carried"] = [size_bytes, before_s + seconds]
        self.left = self.left[len(group) :]


def goes_on(left_bytes: float, direct_bytes: float, total_bytes: float, given: list[Any]) -> bool:
    """Returns whether carrying the rest takes no longer than reading it directly.

    Args:
        left_bytes: To be carried by the job.
        direct_bytes: To be read by the job instead.
        total_bytes: Of all that is read once.
        given: The facts of all processes.
    """
    carried_s = max(one["carried"][1] for one in given)
    if carried_s < _SURE_S:
        return True
    # Reading waits while the memory is full, so that it may be quicker than the first group showed,
    # and than all has been.
    read, first = ([one[name] for one in given] for name in ("read", "first"))
    rate = max(sum(size for size, _ in some) / max(s for _, s in some) for some in (read, first))
    unread_bytes = max(0.0, total_bytes - sum(size for size, _ in read))
    carry_s = left_bytes / given[0]["carried"][0] * carried_s
    return unread_bytes / rate + carry_s <= direct_bytes / rate


# --- words -----------------------------------------------------------------------------------


def said(report: RestoreReport) -> str:
    """Returns the end of the line that is logged about a restore that read leaves once."""
    leaves = counted(len(report.read_once), "leaf")
    read, moved = size_text(report.job_bytes or 0), size_text(report.moved_bytes)
    return f"; read {leaves} once: {read} read by the job, {moved} moved"


def _read_bytes(item: Item, plan: LeafPlan) -> int:
    """Returns the bytes of the stored units that a process reads for a leaf, uncompressed."""
    stored, boxes, unit = plan.saved.array, plan.stored_boxes(), unit_of(item, plan.saved)
    count = len(plan_chunks(unit, boxes)) if item.ours else count_chunks(unit, boxes)
    return count * bytes_of(unit, stored.dtype)


def _digest(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


# --- arrays of several processes --------------------------------------------------------------


def shared_arrays(item: str, plans: Sequence[LeafPlan], processes: Processes) -> dict[str, str]:
    """Returns digests of the arrays on devices of several processes, by these; "" for all.

    They have to ask for them alike, or they would compute with wrong values.
    """
    arrays, ways = {"": list[Any]()}, dict[int, tuple[str, str]]()
    for plan in plans:
        if (way := ways.get(id(plan.how))) is None:  # few of many leaves
            way = ways[id(plan.how)] = _sharing(plan, processes)
        names = plan.path, item, plan.saved.path, plan.saved.alias
        arrays.setdefault(way[0], []).append((*names, way[1]))
    return {among: _digest(sorted(some)) for among, some in arrays.items() if among != "one"}


def _sharing(plan: LeafPlan, processes: Processes) -> tuple[str, str]:
    """Returns which processes have an array, and a digest of what it is and where."""
    how, made = plan.how, plan.how.wanted or plan.saved
    if how.sharding is None:
        return "one", ""
    among, parts = _parts_of(how.sharding, made.shape, processes.process_of)
    key = "one" if len(among) == 1 else "" if len(among) == processes.count else _digest(among)
    return key, _digest((how.kind, how.dtype, made.shape, made.key_impl, parts))


@lru_cache(maxsize=1 << 12)
def _parts_of(
    sharding: Sharding, shape: tuple[int, ...], process_of: Callable[[Any], int]
) -> tuple[list[int], str]:
    """Returns the processes that have devices of an array, and a digest of the parts on these."""
    parts = sharding.devices_indices_map(shape)
    by_id = [(device.id, index) for device, index in parts.items()]
    return sorted({process_of(device) for device in parts}), _digest(by_id)


def _unlike(given: list[Any]) -> dict[int, str]:
    """Returns the processes that ask for other arrays than the first that has them too."""
    first, unlike = dict[str, tuple[int, str]](), dict[int, str]()
    for i, one in enumerate(given):
        for among, arrays in one["shared"].items():
            j, wanted = first.setdefault(among, (i, arrays))
            if arrays != wanted:
                unlike[i] = f"asks for other arrays, shapes, dtypes or shardings than process {j}"
    return unlike
