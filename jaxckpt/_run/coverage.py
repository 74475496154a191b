"""Restores a local step from the disks of all hosts together, whoever wrote its chunks.

introduce    a process whose disk lacks the step gets what is alike in all shares: the small files
need         each process plans its restore, and finds the chunks that its own disk lacks
choose       each process reports which of them it has, checked; one of these sends each chunk
fetch        chunks that none has are copied from a peer, or else from the directory, each by one
             process, which then has them
carry        XLA adds up what the processes send, with zeros for the rest
read         from a copy beside the share that has what has come: `scratch`

The shares stay as they are. If a chunk is nowhere, nothing is sent.
"""

from __future__ import annotations

import base64
import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, final

import jax
import numpy as np

from jaxckpt._core.spread import grouped
from jaxckpt._core.text import counted, size_text
from jaxckpt._disk.found import NotHere, Wanted
from jaxckpt._disk.transaction import Transaction
from jaxckpt._restore.carry import adding, one_each, words_for
from jaxckpt._restore.turn import in_turn
from jaxckpt._run.copies import Saved, are_first, is_left, latest
from jaxckpt._run.disks import Disk, Entry, choose, read_entry, whole_of
from jaxckpt._run.identity import saved_at
from jaxckpt._run.index import StepIndex
from jaxckpt._run.root import Root, newest_life
from jaxckpt._run.scratch import FAILURES, Scratch
from jaxckpt.errors import CorruptCheckpoint
from jaxckpt.multihost import Json, Processes, meet, meeting

_MOST_TOLD: Final = 8  # processes in a message


@final
@dataclass(slots=True)
class Coverage:
    """One step on the disks of several hosts, while all processes read it; close `scratch`."""

    local: Root  # on this process's disk
    directory: Root
    step: int
    processes: Processes
    budget_bytes: int = 0
    sent: list[int] = field(default_factory=lambda: [0, 0])  # chunks and bytes, from all disks
    copied: list[int] = field(default_factory=lambda: [0, 0])  # from elsewhere, by all processes
    scratch: Scratch = field(init=False)
    _needs: set[Wanted] = field(default_factory=set)
    _lacks: set[Wanted] = field(default_factory=set)
    _asked: set[Wanted] = field(default_factory=set)  # elsewhere
    _who: str = ""  # the processes without the step
    is_first: bool = False  # whether it is of the first save of its run, and was never committed

    def __post_init__(self) -> None:
        part = self.processes.index, self.processes.count
        share, here = self.local.index, self.local.peers.here
        self.scratch = Scratch(share=share, here=here, step=self.step, part=part)

    def introduce(self) -> str | None:
        """Lets every process read the step as if its disk had none of the chunks.

        Returns:
            A problem, alike in all processes; None if they can.
        """
        mine, first = self.scratch, None
        mine.look()
        for disks in (mine.disks, None):
            if disks is None:  # no disk has it, so one process asks the peers
                roots = self.local.peers.having(self.step) if self.processes.index == 0 else ()
                disks = mine.open(roots, failed=self.local.peers.leave)
            saves = [[disk.found.origin, _life(self.step, disk)] for disk in disks]
            own = saves[0][0] if mine.has_own else None
            told: Any = [socket.gethostname(), own, saves, self._lives()]
            told += ["" if mine.is_damaged else self.local.owner.first]
            first, self._who, why, save, self.is_first = self._gather("disks", told, _first)
            if why is not None:
                return self._unusable(why)
            if first is not None:
                break
        if first is None or jax.process_count() != self.processes.count:
            return self._unusable("no disk has what is alike in all parts")
        mine.save = save
        outline = next((disk.outline for disk in disks if disk.found.origin == save), None)
        mine.disks = [disk for disk in mine.disks if disk.found.origin == save]
        if self._who:
            is_first = self.processes.index == first
            given = base64.b64encode(outline or b"").decode() if is_first else None
            sent = self._gather("outline", given, lambda all_: all_[first])
            outline = outline or base64.b64decode(sent)
        assert outline is not None
        return self._together("introduced", partial(mine.make_first, outline))

    def _lives(self) -> list[Saved]:
        """Returns how the run got to the newest steps, as far as is readable."""
        lives = []
        with contextlib.suppress(*FAILURES):  # of a damaged record nothing is known
            lives += [saved_at(self.local.index, n) for n in self.local.index.steps()[-1:]]
        if self.local.peers and self.processes.index == 0:  # their steps were not compared
            lives += newest_life(self.local, self.directory)
        return lives

    def complete(self, error: Exception | None) -> str | None:
        """Lets every process read what it lacked in its last try.

        Returns:
            A problem, alike in all processes; None if another try may succeed.
        """
        mine = self.scratch
        asks = {*error.wanted} - self._needs if isinstance(error, NotHere) else set()
        is_suspect = isinstance(error, CorruptCheckpoint) and not mine.is_damaged
        self._needs |= asks
        mine.is_damaged |= is_suspect
        while True:
            here = mine.entries(self._needs, self.budget_bytes if mine.is_damaged else 0)
            self._lacks = self._needs - here.keys()
            told: Any = [socket.gethostname(), sorted(self._lacks, key=str)]
            told += [bool(asks) or is_suspect, self.budget_bytes]
            keys, who, goes_on, self.budget_bytes = self._gather("lacks", told, _united)
            if not goes_on:
                return self._unusable(f"it cannot be read: {error}")
            union: list[Wanted] = [(item, key) for item, key in keys]
            have = mine.entries({*union}, self.budget_bytes)
            sizes = [list(have[one].sizes) if one in have else [0, 0] for one in union]
            chosen = self._gather("chunks", sizes, choose)
            missing = [one for one, (_, *size) in zip(union, chosen, strict=True) if not sum(size)]
            if not missing:
                with in_turn(self.processes, self._named("carry")):
                    return self._carry(union, chosen, have, here)
            if not self._fetch(missing):
                break
        self._who = self._who or who
        more = f", such as {missing[0][1]!r}," if len(missing) > 1 else f" {missing[0][1]!r}"
        are = "are" if len(missing) > 1 else "is"
        return self._unusable(f"{counted(len(missing), 'chunk')}{more} {are} on no disk")

    def failure(self, problem: str) -> Exception | None:
        """Returns an error in all if a disk that may have what is missing failed in one process."""
        own = self.scratch.failed  # raised if no other copy of the step is whole
        return meet(self.processes, self._named("failed"), None, own).error(own, problem)

    def said(self) -> str:
        """Returns what came from other disks."""
        peers = "at peers or " if self.local.peers.urls else ""
        elsewhere = f"{peers}in {self.directory.index.root}"
        told = [
            f"{counted(count, 'chunk')} of {size_text(size)} were {how}"
            for count, size, how in ((*self.sent, "sent"), (*self.copied, f"read {elsewhere}"))
            if count or how == "sent"
        ]
        lacked = f": {self._who}" if self._who else ""
        where = f"step {self.step} was restored from the disks of several hosts{lacked}"
        return f"{where}; {', '.join(told)}"

    def _unusable(self, why: str) -> str:
        who = f"{self._who}, and " if self._who else ""
        return f"step {self.step} on the local disks cannot be used: {who}{why}"

    # --- fetching --------------------------------------------------------------------------------

    def _fetch(self, missing: Sequence[Wanted]) -> bool:
        """Copies from elsewhere what no process has, each a part; returns whether any came."""
        mine = {*missing[self.processes.index :: self.processes.count]} - self._asked
        self._asked |= {*missing}
        got: dict[Wanted, Entry] = {}
        for index in self._elsewhere() if mine else ():
            if wanted := mine - got.keys():
                try:
                    got |= self.scratch.fetch(index, wanted, self.budget_bytes)
                except FAILURES as error:
                    root = self.local.index.root  # on this process's disk
                    if isinstance(error, OSError) and str(error.filename).startswith(root):
                        self.scratch.note(index, error)
                        break
                    self.local.peers.leave(index, error)
        told = [len(got), sum(entry.sizes[0] for entry in got.values())]
        came = self._gather("fetched", told, lambda given: [*map(sum, zip(*given, strict=True))])
        self.copied = [self.copied[0] + came[0], self.copied[1] + came[1]]
        return came[0] > 0

    def _elsewhere(self) -> Iterator[StepIndex]:
        """Yields the roots without a process that have the step: of peers, then the directory."""
        yield from self.local.peers.having(self.step)
        if self.step in (self.directory.known_steps() or ()):
            yield self.directory.index

    # --- carrying --------------------------------------------------------------------------------

    def _carry(
        self,
        union: Sequence[Wanted],
        chosen: Sequence[Sequence[int]],
        have: Mapping[Wanted, Entry],
        here: Mapping[Wanted, Entry],
    ) -> str | None:
        """Sends chunks, and makes the copy that has them."""
        attempt, problem, mesh = None, None, one_each(self.processes, jax.devices())
        try:
            attempt = self.scratch.begin()
            if mesh is None:  # alike in all
                raise ValueError("a process has no device")
        except FAILURES as error:
            problem = error
        totals = [size + tail for _, size, tail in chosen]
        for group in grouped(range(len(union)), totals, self.budget_bytes // 8):
            add, at = None, 0
            try:
                mine = np.zeros(words_for(sum(totals[i] for i in group)) * 4, np.uint8)
                for i in group if problem is None else ():
                    if chosen[i][0] == self.processes.index:
                        data = read_entry(self.local.index.storage, have[union[i]])
                        mine[at : at + totals[i]] = np.frombuffer(data, np.uint8)
                    at += totals[i]
                if mesh is not None:  # what may fail here comes before all go into the operation
                    add = adding(mesh, self.processes.index, mine)
            except Exception as error:  # reported to the others
                problem = error
            if told := self._meet("carry", problem):
                return told
            try:
                assert attempt is not None
                assert add is not None
                self._take(attempt, [(union[i], chosen[i]) for i in group], add())
            except Exception as error:  # reported in the next round
                problem = error
        if problem is not None or attempt is None:
            return self._meet("covered", problem)
        commit = partial(self.scratch.commit, attempt, {**here, **self.scratch.come})
        return self._together("covered", commit)

    def _take(
        self, attempt: Transaction, some: Sequence[tuple[Wanted, Sequence[int]]], data: Any
    ) -> None:
        """Keeps what this process lacks of the values that have come."""
        given, at = [], 0
        for one, (_, size, tail) in some:
            self.sent = [self.sent[0] + 1, self.sent[1] + size]
            if one in self._lacks:
                given.append((one, size, data[at : at + size + tail]))
            at += size + tail
        self.scratch.come |= self.scratch.keep(attempt, given)

    # --- meeting ---------------------------------------------------------------------------------

    def _gather(self, name: str, value: Json, judge: Callable[[list[Any]], Json]) -> Any:  # JSON
        return self.processes.gather(self._named(name), value, judge)

    def _named(self, name: str) -> str:
        return f"coverage {self.directory.index.root}/{self.step} {name}"

    def _meet(self, name: str, problem: Exception | None) -> str | None:
        """Returns what failed in any process, alike in all."""
        if problem is not None:
            self.scratch.note(self.local.index, problem)
        met = meet(self.processes, self._named(name), None, problem)
        told = "; ".join(f"process {i}: {text}" for i, text in met.problems.items())
        return self._unusable(told) if met.failed else None

    def _together(self, name: str, do: Callable[[], object]) -> str | None:
        problem = None
        try:
            do()
        except Exception as error:  # reported to the others
            problem = error
        return self._meet(name, problem)


def _life(step: int, disk: Disk) -> Saved:
    """Returns how the run got to the step on a disk."""
    record, saved_ns = disk.found.record, disk.found.metadata.commit_ns or 0
    return Saved.of(step, None if record is None else record.life, saved_ns)


def _first(given: list[Any]) -> Json:
    """Returns who has a step first, which processes lack it, why it is of no use, and its save.

    A save from which the run went on elsewhere does not count. The last value is whether the step
    can only be of a first save that was never committed.

    Args:
        given: The host of each process, the save that the step on its disk is of, if it has one,
            the saves in all places that it sees with how the run got there, how it got to the
            newest steps, and the first saves that wrote to its disk, as far as is known.
    """
    seen = {save: Saved.told(life) for _, _, some, *_ in given for save, life in some}
    lives = [life for *_, some, _ in given for life in some]
    newest = latest([*seen.values(), *map(Saved.told, lives)])
    left = {save for save, life in seen.items() if newest and is_left(life, newest)}
    # What other places have counts if no disk has the step.
    of = {own for _, own, *_ in given} - {None, *left} or {*seen} - {None, *left}
    save = of.pop() if len(of) == 1 else None
    saves = [[one for one, _ in some] for _, _, some, *_ in given]
    first = next((i for i, some in enumerate(saves) if save in some), None)
    lacking = {i: one[0] for i, one in enumerate(given) if save not in saves[i]}
    why = None
    if save is None and seen:
        why = "the disks have it from different saves"
        if left == {*seen}:
            why = "the run went on without it on another disk"
    is_first = bool(seen) and are_first(seen, [began for *_, began in given])
    return [first, _told(lacking, "its part"), why, save, is_first]


def _united(given: list[Any]) -> Json:
    """Returns what any process lacks, these processes, whether to try again, and the budget."""
    keys = {tuple(one) for _, lacks, *_ in given for one in lacks}
    who = {i: host for i, (host, lacks, *_) in enumerate(given) if lacks}
    goes_on, budget_bytes = any(new for *_, new, _ in given), min(budget for *_, budget in given)
    return [sorted(keys, key=str), _told(who, "chunks"), goes_on, budget_bytes]


def is_whole(
    roots: Sequence[Root], step: int, processes: Processes, *, states: bool = False
) -> bool | Exception:
    """Returns whether all disks together have every chunk, alike in all; reads no chunk.

    If a disk failed that may have what is missing, returns an error.

    Args:
        states: Whether they must have the states of all objects, too.
    """
    local, directory = roots
    one = Coverage(local, directory, step, processes)
    with contextlib.closing(one.scratch):
        problem = one.introduce()
        if problem is None and _has_all(one, states):
            return True
        return one.failure(problem or f"step {step} lacks chunks") or False


def _has_all(step: Coverage, states: bool) -> bool:
    mine, peers = step.scratch, step.local.peers
    disks = mine.disks
    if step.processes.index == 0:
        there = mine.open(peers.having(step.step), failed=peers.leave)
        disks = [*disks, *(disk for disk in there if disk.found.origin == mine.save)]
    name = step._named("units")
    with meeting(step.processes, name, whole_of, where=name) as led:
        led.value = [[step.step, mine.save, hex(disk.lacks(states=states))] for disk in disks]
    return bool(led.value)


def _told(hosts: Mapping[int, str], what: str) -> str:
    told = [f"process {i} on {host} lacks {what}" for i, host in hosts.items()]
    more = f"; {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
    return "; ".join(told[:_MOST_TOLD]) + more
