"""Restores a local step from the disks of all hosts together, whoever wrote its chunks.

introduce    a process whose disk lacks the step gets what is alike in all shares: the small files
need         each process plans its restore, and finds the chunks that its own disk lacks
choose       each process reports which of them it has, checked; one of these sends each chunk
fetch        chunks that none has are copied from a peer, or else from the directory, each by one
             process, which then has them
carry        XLA adds up what the processes send, with zeros for the rest
read         from a copy beside the share: links to its files, and files with what has come

The shares stay as they are. The copy is in a temporary directory, which goes after the restore; if
the process dies, the next job removes it. If a chunk is nowhere, nothing is sent.
"""

from __future__ import annotations

import base64
import contextlib
import posixpath
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, final

import jax
import numpy as np

from jaxckpt._core.spread import grouped
from jaxckpt._core.text import counted, size_text
from jaxckpt._disk.attempt import Work
from jaxckpt._disk.find import find
from jaxckpt._disk.found import Found, NotHere, Wanted, check_sizes
from jaxckpt._disk.places import Table, unite
from jaxckpt._disk.transaction import Transaction, begin
from jaxckpt._restore.carry import adding, one_each, words_for
from jaxckpt._restore.turn import in_turn
from jaxckpt._run.copies import Saved, latest
from jaxckpt._run.disks import Disk, Entry, Outline, choose, decode_outline, read_entry
from jaxckpt._run.identity import newest_saved, saved_at
from jaxckpt._run.index import StepIndex
from jaxckpt._run.peers import Peers
from jaxckpt._run.root import Root
from jaxckpt.errors import CheckpointError, CorruptCheckpoint
from jaxckpt.format import names
from jaxckpt.format.ocdbt import MAX_INLINE_BYTES, Place
from jaxckpt.multihost import Json, Processes, meet
from jaxckpt.storage import together

_FAILURES: Final = (CheckpointError, OSError, ValueError)
_MOST_TOLD: Final = 8  # processes in a message


@final
@dataclass(slots=True, kw_only=True)
class Coverage:
    """One step on the disks of several hosts, while all processes read it: a context manager."""

    share: StepIndex  # the steps on this process's disk
    directory: Root
    peers: Peers
    step: int
    processes: Processes
    budget_bytes: int
    timeout_s: float
    index: StepIndex = field(init=False)  # where this process reads the step
    come: list[int] = field(default_factory=lambda: [0, 0])  # chunks and bytes, from all disks
    copied: list[int] = field(default_factory=lambda: [0, 0])  # from elsewhere, by all processes
    _disks: list[Disk] = field(default_factory=list)  # its own, other shares there, copies
    _has_own: bool = False  # whether this process's disk has the step
    _save: str = ""  # that the step is of
    _outline: Outline = field(init=False)
    _scratch: str = field(init=False)
    _copies: int = 0
    is_damaged: bool = False  # whether this disk may have bad chunks or files
    _needs: set[Wanted] = field(default_factory=set)
    _lacks: set[Wanted] = field(default_factory=set)
    _came: dict[Wanted, Entry] = field(default_factory=dict)
    _fetched: dict[Wanted, Entry] = field(default_factory=dict)  # checked copies from elsewhere
    _asked: set[Wanted] = field(default_factory=set)  # elsewhere
    _attempts: list[Transaction] = field(default_factory=list)
    _who: str = ""  # the processes without the step

    def __enter__(self) -> Coverage:
        path = self.share.path(self.step)
        name = names.temporary(posixpath.basename(path), secrets.token_hex(8))
        self._scratch = f"{self.share.root}/{name}"
        return self

    def __exit__(self, *_: object) -> None:
        for attempt in self._attempts:
            attempt.release()
        try:
            self.share.storage.delete(self._scratch)
        except OSError as error:
            self.share.warn(f"{self._scratch} cannot be removed now: {error}")

    def introduce(self) -> str | None:
        """Lets every process read the step as if its disk had none of the chunks.

        Returns:
            A problem, alike in all processes; None if they can.
        """
        path, first = self.share.path(self.step), None
        self._look()
        for disks in (self._disks, None):
            if disks is None:  # no disk has it, so one process asks the peers
                roots = self.peers.having(self.step) if self.processes.index == 0 else ()
                disks = self._open(roots, failed=self.peers.leave)
            saves = [[disk.found.origin, self._life(disk)] for disk in disks]
            own = saves[0][0] if self._has_own else None
            mine: Any = [socket.gethostname(), own, saves, self._lives()]
            first, self._who, why, save = self._gather("disks", mine, _first)
            if why is not None:
                return self._unusable(why)
            if first is not None:
                break
        if first is None or jax.process_count() != self.processes.count:
            return self._unusable("no disk has what is alike in all parts")
        self._save = save
        outline = next((disk.outline for disk in disks if disk.found.origin == save), None)
        self._disks = [disk for disk in self._disks if disk.found.origin == save]
        if self._who:
            is_first = self.processes.index == first
            given = base64.b64encode(outline or b"").decode() if is_first else None
            sent = self._gather("outline", given, lambda all_: all_[first])
            outline = outline or base64.b64decode(sent)
        assert outline is not None
        return self._together("introduced", partial(self._make_first, outline, path))

    def _look(self) -> None:
        """Opens the step on this disk, unless it is missing or damaged, and in other roots here."""
        self._disks = self._open([self.share])
        self._has_own = bool(self._disks)
        try:
            self.is_damaged = not self._has_own and self.step in self.share.steps()
            for disk in self._disks:
                check_sizes(disk.found)
        except _FAILURES:
            self.is_damaged = True
        self._disks += self._open(self.peers.here)

    def _open(
        self,
        roots: Iterable[StepIndex],
        failed: Callable[[StepIndex, Exception], object] = lambda *_: None,
    ) -> list[Disk]:
        """Returns the step in those roots that have it whole enough to read."""
        disks = []
        for index in roots:
            try:
                disks.append(Disk(find(index.storage, index.path(self.step))))
            except _FAILURES as error:
                failed(index, error)
        return disks

    def _life(self, disk: Disk) -> Saved:
        """Returns how the run got to the step on a disk."""
        record = disk.found.record
        return Saved.of(self.step, None if record is None else record.life)

    def _lives(self) -> list[Saved]:
        """Returns how the run got to the newest steps, as far as is readable."""
        lives = []
        with contextlib.suppress(*_FAILURES):  # of a damaged record nothing is known
            lives += [saved_at(self.share, number) for number in self.share.steps()[-1:]]
        if self.peers and self.processes.index == 0:  # their steps were not compared with these
            with contextlib.suppress(*_FAILURES):
                newest = self.directory.reach.ask(partial(newest_saved, self.directory.index))
                lives += [newest] if newest is not None else []
        return lives

    def _make_first(self, outline: bytes, path: str) -> None:
        self._outline = decode_outline(outline, f"{path}/{names.RECORD}")
        self._commit(self._begin(), {})

    def complete(self, error: Exception | None) -> str | None:
        """Lets every process read what it lacked in its last try.

        Args:
            error: Why this process could not read the step, if so.

        Returns:
            A problem, alike in all processes; None if another try may succeed.
        """
        asks = {*error.wanted} - self._needs if isinstance(error, NotHere) else set()
        is_suspect = isinstance(error, CorruptCheckpoint) and not self.is_damaged
        self._needs |= asks
        self.is_damaged |= is_suspect
        while True:
            here = self._entries(self._needs, checks=self.is_damaged)
            self._lacks = self._needs - {*here, *self._came}
            told: Any = [socket.gethostname(), sorted(self._lacks, key=str)]
            told += [bool(asks) or is_suspect, self.budget_bytes]
            keys, who, goes_on, self.budget_bytes = self._gather("lacks", told, _united)
            if not goes_on:
                return self._unusable(f"it cannot be read: {error}")
            union: list[Wanted] = [(item, key) for item, key in keys]
            have = self._entries({*union}, checks=True)
            sizes = [list(have[one].sizes) if one in have else [0, 0] for one in union]
            chosen = self._gather("chunks", sizes, choose)
            missing = [one for one, (_, *size) in zip(union, chosen, strict=True) if not sum(size)]
            if not missing:
                with in_turn(self.processes, self._named("carry"), timeout_s=self.timeout_s):
                    return self._carry(union, chosen, have, here)
            if not self._fetch(missing):
                break
        self._who = self._who or who
        more = f", such as {missing[0][1]!r}," if len(missing) > 1 else f" {missing[0][1]!r}"
        are = "are" if len(missing) > 1 else "is"
        return self._unusable(f"{counted(len(missing), 'chunk')}{more} {are} on no disk")

    def said(self) -> str:
        """Returns what came from other disks."""
        elsewhere = f"{'at peers or ' if self.peers.urls else ''}in {self.directory.index.root}"
        told = [
            f"{counted(count, 'chunk')} of {size_text(size)} were {how}"
            for count, size, how in ((*self.come, "sent"), (*self.copied, f"read {elsewhere}"))
            if count or how == "sent"
        ]
        lacked = f": {self._who}" if self._who else ""
        where = f"step {self.step} was restored from the disks of several hosts{lacked}"
        return f"{where}; {', '.join(told)}"

    def _unusable(self, why: str) -> str:
        who = f"{self._who}, and " if self._who else ""
        return f"step {self.step} on the local disks cannot be used: {who}{why}"

    def _entries(self, wanted: AbstractSet[Wanted], *, checks: bool) -> dict[Wanted, Entry]:
        found = {one: self._fetched[one] for one in wanted & self._fetched.keys()}
        for disk in self._disks:
            with contextlib.suppress(*_FAILURES):  # other disks may have them
                budget = self.budget_bytes if checks else 0
                found |= disk.entries(wanted - found.keys(), budget)
        return found

    # --- fetching --------------------------------------------------------------------------------

    def _fetch(self, missing: Sequence[Wanted]) -> bool:
        """Copies from elsewhere what no process has, each a part; returns whether any came."""
        mine = {*missing[self.processes.index :: self.processes.count]} - self._asked
        self._asked |= {*missing}
        got: dict[Wanted, Entry] = {}
        for index in self._elsewhere() if mine else ():
            if wanted := mine - got.keys():
                try:
                    got |= self._copy(index, wanted)
                except _FAILURES as error:
                    self.peers.leave(index, error)
        self._fetched |= got
        told = [len(got), sum(entry.sizes[0] for entry in got.values())]
        came = self._gather("fetched", told, lambda given: [*map(sum, zip(*given, strict=True))])
        self.copied = [self.copied[0] + came[0], self.copied[1] + came[1]]
        return came[0] > 0

    def _elsewhere(self) -> Iterator[StepIndex]:
        """Yields the roots without a process that have the step: of peers, then the directory."""
        yield from self.peers.having(self.step)
        if self.step in (self.directory.known_steps() or ()):
            yield self.directory.index

    def _copy(self, index: StepIndex, wanted: AbstractSet[Wanted]) -> dict[Wanted, Entry]:
        """Copies chunks from another root to this disk; returns those that are good."""
        step = Disk(find(index.storage, index.path(self.step)))
        there = step.entries(wanted, 0) if step.found.origin == self._save else {}
        attempt, came = self._begin(), dict[Wanted, Entry]()
        sizes = [sum(entry.sizes) for entry in there.values()]
        for group in grouped([*there.items()], sizes, self.budget_bytes // 8):
            data = together(
                index.storage, [partial(read_entry, index.storage, entry) for _, entry in group]
            )
            some = [(one, entry.sizes[0], x) for (one, entry), x in zip(group, data, strict=True)]
            came |= self._keep(attempt, some)
        self._commit(attempt, came)
        copied = Disk(find(attempt.storage, attempt.path))
        good = copied.entries(came.keys(), self.budget_bytes)
        for _, key in came.keys() - good.keys():
            self.share.report(f"{index.path(self.step)} is damaged: chunk {key!r}")
        return good

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
            attempt = self._begin()
            if mesh is None:  # alike in all
                raise ValueError("a process has no device")
        except _FAILURES as error:
            problem = error
        totals = [size + tail for _, size, tail in chosen]
        for group in grouped(range(len(union)), totals, self.budget_bytes // 8):
            add, at = None, 0
            try:
                mine = np.zeros(words_for(sum(totals[i] for i in group)) * 4, np.uint8)
                for i in group if problem is None else ():
                    if chosen[i][0] == self.processes.index:
                        data = read_entry(self.share.storage, have[union[i]])
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

        def end() -> None:
            if problem is not None:
                raise problem
            assert attempt is not None
            self._commit(attempt, {**here, **self._came})

        return self._together("covered", end)

    def _take(
        self, attempt: Transaction, some: Sequence[tuple[Wanted, Sequence[int]]], data: Any
    ) -> None:
        """Keeps what this process lacks of the values that have come."""
        given, at = [], 0
        for one, (_, size, tail) in some:
            self.come = [self.come[0] + 1, self.come[1] + size]
            if one in self._lacks:
                given.append((one, size, data[at : at + size + tail]))
            at += size + tail
        self._came |= self._keep(attempt, given)

    def _keep(
        self, attempt: Transaction, given: Sequence[tuple[Wanted, int, Any]]
    ) -> dict[Wanted, Entry]:
        """Writes values into files of a new copy.

        Args:
            given: For each, the bytes of the value, and the data as `Disk.read` returns it.
        """
        came: dict[Wanted, Entry] = {}
        piles: dict[str, list[tuple[Wanted, bytes]]] = {}
        for one, size, data in given:
            value = bytes(data[:size])
            units, found = np.frombuffer(data[size:], "<u4").reshape(2, -1).tolist()
            item = one[0]
            folder = "" if item is None else posixpath.join(attempt.path, item).rstrip("/")
            came[one] = Entry(folder, value, units, found)
            if item is not None and size > MAX_INLINE_BYTES:
                piles.setdefault(item, []).append((one, value))
        for item, pile in piles.items():
            file, start = names.new_data_file(), 0
            folder = posixpath.join(attempt.work, item).rstrip("/")
            attempt.storage.make_dir(f"{folder}/{names.OCDBT_DATA}")
            attempt.storage.write(f"{folder}/{file}", [value for _, value in pile])
            for one, value in pile:
                came[one] = came[one]._replace(place=Place(file, start, len(value)))
                start += len(value)
        return came

    def _begin(self) -> Transaction:
        storage, name = self.share.storage, posixpath.basename(self.share.path(self.step))
        self._copies += 1
        attempt = begin(storage, f"{self._scratch}/{self._copies}/{name}", overwrite=False)
        self._attempts.append(attempt)
        return attempt

    def _commit(self, attempt: Transaction, entries: Mapping[Wanted, Entry]) -> None:
        """Makes a copy of the step with some chunks, and lets this process read it."""
        storage, record, files = attempt.storage, self._outline.record, {**self._outline.files}
        work = Work(attempt.work, "")
        for item, described in self._outline.tables.items():
            mine = {key: entry for (one, key), entry in entries.items() if one == item}
            folder = posixpath.join(work.path, item).rstrip("/")
            places = {**described.places, **{key: one.place for key, one in mine.items()}}
            units = [unit for one in mine.values() for unit in one.units]
            table = Table(places, units, [n for one in mine.values() for n in one.sums])
            for source, file in {
                (entry.folder, entry.place.file)
                for entry in mine.values()
                if isinstance(entry.place, Place)
            }:
                storage.make_dir(posixpath.dirname(f"{folder}/{file}"))
                if storage.kind(f"{folder}/{file}") is None:
                    storage.link(f"{source}/{file}", f"{folder}/{file}")
            united, _ = unite(storage, folder, [table], self._outline.sums[item], work)
            files |= {posixpath.join(item, file): data for file, data in united.items()}
        for (item, file), entry in entries.items():
            if item is None:
                assert isinstance(entry.place, bytes)
                files[file] = entry.place
        for folder in {posixpath.dirname(file) for file in files}:
            storage.make_dir(posixpath.join(work.path, folder).rstrip("/"))
        found = Found(storage=storage, path=self.share.path(self.step), record=record)
        share = self.processes.index, self.processes.count
        attempt.commit(files, found.uploaded(record, share), known={})
        root = posixpath.dirname(attempt.path)
        self.index = StepIndex(storage, root, naming=self.share.naming, quiet=True)

    # --- meeting ---------------------------------------------------------------------------------

    def _gather(self, name: str, value: Json, judge: Callable[[list[Any]], Json]) -> Any:  # JSON
        limit_s = self.timeout_s
        return self.processes.gather(self._named(name), value, judge, timeout_s=limit_s)

    def _named(self, name: str) -> str:
        return f"coverage {self.directory.index.root} {name}"

    def _meet(self, name: str, problem: Exception | None) -> str | None:
        """Returns what failed in any process, alike in all."""
        met = meet(self.processes, self._named(name), None, problem, timeout_s=self.timeout_s)
        told = "; ".join(f"process {i}: {text}" for i, text in met.problems.items())
        return self._unusable(told) if met.failed else None

    def _together(self, name: str, do: Callable[[], object]) -> str | None:
        problem = None
        try:
            do()
        except Exception as error:  # reported to the others
            problem = error
        return self._meet(name, problem)


def _first(given: list[Any]) -> Json:
    """Returns who has a step first, which processes lack it, why it is of no use, and its save.

    A save from which the run went on elsewhere does not count.

    Args:
        given: The host of each process, the save that the step on its disk is of, if it has one,
            the saves in all places that it sees with how the run got there, and how it got to the
            newest steps.
    """
    seen = {save: _saved(life) for _, _, some, _ in given for save, life in some}
    newest = latest([*seen.values(), *(_saved(life) for *_, lives in given for life in lives)])
    left = {save for save, life in seen.items() if newest and _is_left(life, newest)}
    # What other places have counts if no disk has the step.
    of = {own for _, own, *_ in given} - {None, *left} or {*seen} - {None, *left}
    save = of.pop() if len(of) == 1 else None
    saves = [[one for one, _ in some] for _, _, some, _ in given]
    first = next((i for i, some in enumerate(saves) if save in some), None)
    lacking = {i: one[0] for i, one in enumerate(given) if save not in saves[i]}
    why = None
    if save is None and seen:
        why = "the disks have it from different saves"
        if left == {*seen}:
            why = "the run went on without it on another disk"
    return [first, _told(lacking, "its part"), why, save]


def _saved(life: Any) -> Saved:  # from JSON
    step, starts, run = life
    return Saved(step, tuple(map(tuple, starts)), run)


def _is_left(life: Saved, newest: Saved) -> bool:
    """Returns whether the run went on without a step; of two saves of one step, it is the older."""
    return not life.led_to(newest) and (newest.step != life.step or newest.is_newer(life))


def _united(given: list[Any]) -> Json:
    """Returns what any process lacks, these processes, whether to try again, and the budget."""
    keys = {tuple(one) for _, lacks, *_ in given for one in lacks}
    who = {i: host for i, (host, lacks, *_) in enumerate(given) if lacks}
    goes_on, budget_bytes = any(new for *_, new, _ in given), min(budget for *_, budget in given)
    return [sorted(keys, key=str), _told(who, "chunks"), goes_on, budget_bytes]


def _told(hosts: Mapping[int, str], what: str) -> str:
    told = [f"process {i} on {host} lacks {what}" for i, host in hosts.items()]
    more = f"; {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
    return "; ".join(told[:_MOST_TOLD]) + more
