"""Keeps the copies that this process makes of its part of one step; see `coverage`.

disks      the step on its own disk, also in the roots of other processes there
entries    chunks and small files: on these disks, or copied from elsewhere, always checked
copies     in a temporary directory beside the share: links to its files, and files with what came

The shares stay as they are. The directory goes after the restore; if the process dies, the next job
removes it.
"""

from __future__ import annotations

import posixpath
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Final, final

import numpy as np

from jaxckpt._core.spread import grouped
from jaxckpt._disk.attempt import Work
from jaxckpt._disk.data_files import DataFiles
from jaxckpt._disk.find import find
from jaxckpt._disk.found import Found, Wanted, check_sizes
from jaxckpt._disk.places import Table, unite
from jaxckpt._disk.transaction import Transaction, begin
from jaxckpt._run.disks import Disk, Entry, Outline, decode_outline, read_entry
from jaxckpt._run.index import StepIndex
from jaxckpt.errors import CheckpointError, is_io_failure
from jaxckpt.format import names
from jaxckpt.format.ocdbt import Place
from jaxckpt.storage import together

FAILURES: Final = (CheckpointError, OSError, ValueError)


@final
@dataclass(slots=True, kw_only=True)
class Scratch:
    """One step on the disks that this process sees, and copies of it."""

    share: StepIndex  # the steps on this process's disk
    here: Sequence[StepIndex]  # other roots on that disk
    step: int
    part: tuple[int, int]  # this process, and their number
    save: str = ""  # that the step is of
    has_own: bool = False  # whether this process's disk has the step
    is_damaged: bool = False  # whether this disk may have bad chunks or files
    disks: list[Disk] = field(default_factory=list)  # its own, other shares there, copies
    index: StepIndex = field(init=False)  # where this process reads the step
    come: dict[Wanted, Entry] = field(default_factory=dict)  # checked, from elsewhere
    failed: Exception | None = None  # the first I/O error here: this disk may have what is missing
    outline: Outline = field(init=False)
    _name: str = field(init=False)  # of the step
    _folder: str = field(init=False)  # with the copies
    _numbers: Iterator[int] = field(default_factory=count)
    _attempts: list[Transaction] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._name = posixpath.basename(self.share.path(self.step))
        name = names.temporary(self._name, secrets.token_hex(8))
        self._folder = f"{self.share.root}/{name}"

    def close(self) -> None:
        for attempt in self._attempts:
            attempt.hold.release()
        try:
            self.share.storage.delete(self._folder)
        except OSError as error:
            self.share.warn(f"{self._folder} cannot be removed now: {error}")

    def note(self, _: object, error: Exception) -> None:
        """Remembers an I/O error; other errors only show what this disk lacks."""
        if is_io_failure(error):
            self.failed = self.failed or error

    def look(self) -> None:
        """Opens the step on this disk, and in other roots here, unless it is missing or damaged."""
        self.disks = self.open([self.share])
        self.has_own = bool(self.disks)
        try:
            # What has its name was committed once, also if it lacks the marker.
            self.is_damaged = not self.has_own and self.step in self.share.listing().steps
            for disk in self.disks:
                check_sizes(disk.found)
        except FAILURES as error:
            self.note(self.share, error)
            self.is_damaged = True
        self.disks += self.open(self.here)

    def open(
        self,
        roots: Iterable[StepIndex],
        failed: Callable[[StepIndex, Exception], object] | None = None,
    ) -> list[Disk]:
        """Returns the step in the roots that have it whole enough to read, and of this life."""
        failed = failed or self.note
        disks = []
        for index in [one for one in roots if self.step not in one.astray]:
            try:
                disks.append(Disk(find(index.storage, index.path(self.step))))
            except FAILURES as error:
                failed(index, error)
        return disks

    def make_first(self, outline: bytes) -> None:
        """Makes the copy without any chunk."""
        self.outline = decode_outline(outline, f"{self.share.path(self.step)}/{names.RECORD}")
        self.commit(self.begin(), {})

    def entries(self, wanted: AbstractSet[Wanted], budget_bytes: int) -> dict[Wanted, Entry]:
        """Returns those of some chunks and files that are here."""
        found = {one: self.come[one] for one in wanted & self.come.keys()}
        for disk in self.disks:
            try:
                found |= disk.entries(wanted - found.keys(), budget_bytes, self.note)
            except FAILURES as error:  # other disks may have them
                self.note(disk, error)
        return found

    def fetch(
        self, index: StepIndex, wanted: AbstractSet[Wanted], budget_bytes: int
    ) -> dict[Wanted, Entry]:
        """Copies chunks from another root to this disk; returns those that are good."""
        step = Disk(find(index.storage, index.path(self.step)))
        there = step.entries(wanted, 0) if step.found.origin == self.save else {}
        attempt, came = self.begin(), dict[Wanted, Entry]()
        sizes = [sum(entry.sizes) for entry in there.values()]
        for group in grouped([*there.items()], sizes, budget_bytes // 8):
            data = together(
                index.storage, [partial(read_entry, index.storage, entry) for _, entry in group]
            )
            some = [(one, entry.sizes[0], x) for (one, entry), x in zip(group, data, strict=True)]
            came |= self.keep(attempt, some)
        self.commit(attempt, came)
        copied = Disk(find(attempt.storage, attempt.path))
        good = copied.entries(came.keys(), budget_bytes, self.note)
        for _, key in came.keys() - good.keys():
            self.share.report(f"{index.path(self.step)} is damaged: chunk {key!r}")
        self.come |= good
        return good

    def keep(
        self, attempt: Transaction, given: Sequence[tuple[Wanted, int, Any]]
    ) -> dict[Wanted, Entry]:
        """Writes values into files of a new copy.

        Args:
            given: For each, the bytes of the value, and the data as `Disk.read` returns it.
        """
        came: dict[Wanted, Entry] = {}
        files: dict[str, DataFiles] = {}
        for (item, key), size, data in given:
            value = bytes(data[:size])
            units, found = np.frombuffer(data[size:], "<u4").reshape(2, -1).tolist()
            came[item, key] = Entry(f"{attempt.path}/{item or ''}".rstrip("/"), value, units, found)
            if item is not None:
                folder = Work(attempt.work, "").folder(item)
                files[item] = files.get(item) or DataFiles(attempt.storage, folder)
                files[item].put(key, value)
        for item, some in files.items():
            for key, place in some.write(is_whole=False).places.items():
                came[item, key] = came[item, key]._replace(place=place)
        return came

    def begin(self) -> Transaction:
        path = f"{self._folder}/{next(self._numbers)}/{self._name}"
        attempt = begin(self.share.storage, path, overwrite=False)
        self._attempts.append(attempt)
        return attempt

    def commit(self, attempt: Transaction, entries: Mapping[Wanted, Entry]) -> None:
        """Makes a copy of the step with some chunks, and lets this process read it."""
        storage, record, files = attempt.storage, self.outline.record, {**self.outline.files}
        work = Work(attempt.work, "")
        for item, described in self.outline.tables.items():
            mine = {key: entry for (one, key), entry in entries.items() if one == item}
            folder = work.folder(item)
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
            united, _ = unite(storage, folder, [table], self.outline.sums[item], work)
            files |= {posixpath.join(item, file): data for file, data in united.items()}
        for (item, file), entry in entries.items():
            if item is None:
                assert isinstance(entry.place, bytes)
                files[file] = entry.place
        for folder in {posixpath.dirname(file) for file in files}:
            storage.make_dir(work.folder(folder))
        found = Found(storage=storage, path=self.share.path(self.step), record=record)
        attempt.commit(files, found.uploaded(record, self.part), known={})
        root = posixpath.dirname(attempt.path)
        self.index = StepIndex(storage, root, naming=self.share.naming, quiet=True)
