"""Lists the steps of a run and reads the facts about each, for managers and commands.

Every answer takes one listing of the root and the directories of as few steps as possible. Reads
only directories and small files, never arrays, and does not import jax.
"""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, TypeVar

from jaxckpt._core.threads import Pool
from jaxckpt._disk.commit import commit_of
from jaxckpt._disk.find import LISTINGS, is_deleted, looks_committed, read_facts, read_found
from jaxckpt._run.facts import check_found, is_ours, metrics_of, saved_s
from jaxckpt._run.listing import ListedRoot, Listing, not_here, shown
from jaxckpt._save.job import is_under_way
from jaxckpt.errors import CheckpointError, CheckpointNotFound, CorruptCheckpoint, is_io_failure
from jaxckpt.format import names, run
from jaxckpt.format.run import StepNames, guess_names
from jaxckpt.storage import Entry, Storage, corrupt, listed, together
from jaxckpt.storage import listing as entries_of
from jaxckpt.types import StepInfo

T = TypeVar("T")
U = TypeVar("U")
_AT_ONCE: Final = 192  # of 1,000 steps, so many are looked at together
_ON_DISK: Final = 32  # the same, on a slow file system
_SLOW_S: Final = 1e-3  # a call that takes longer waits for another machine
_LEAST_TIMED: Final = 32

State = Literal["committed", "torn", "unreadable"]


@dataclass(slots=True)
class StepIndex(ListedRoot):
    """The steps of a run, as this process knows them."""

    # Only the owner caches facts about steps, since nobody else can replace one meanwhile.
    owned: bool = False
    unknown: dict[int, Exception] = field(default_factory=dict)  # why facts could not be read
    astray: set[int] = field(default_factory=set)  # of an earlier life of the run; not listed
    sent: set[int] = field(default_factory=set)  # steps that this job uploads here, or has uploaded
    # The unfinished steps older than the newest step, when all were last listed.
    overtaken: Collection[int] = ()
    _committed: set[str] = field(default_factory=set)
    _is_known: bool = False  # whether these are all steps, as only the owner adds steps
    _saved: set[int] = field(default_factory=set)  # by this process
    _whole: set[str] = field(default_factory=set)
    _infos: dict[int, StepInfo] = field(default_factory=dict)

    # --- the steps of a run -----------------------------------------------------------------

    def listing(self, known: Mapping[str, Entry] | None = None) -> Listing:
        """Lists the root, which has to be here still, and finds its steps by their names.

        Args:
            known: An earlier listing. The newest step in it is listed at the same time.
        """
        self._views.clear()
        steps = sorted(filter(run.is_like_step, known or ()), key=run.number_of)
        self.is_large = self.is_large or len(steps) > _AT_ONCE
        looks = [partial(self.view, name) for name in steps[-1:] if self.is_large]
        entries, *_ = together(self.storage, [self.entries, *looks])
        self.is_large = self._all is None and bool(entries)
        naming = self.naming or self._guess(entries)
        steps = sorted((n, name) for name in entries if (n := naming.step(name)) is not None)
        self.has_lock |= names.LOCK in entries
        if self.has_lock and names.LOCK not in entries and not steps:  # as in a mount point
            raise not_here(self.root)
        there = {number: name for number, name in steps if number not in self.astray}
        return Listing(entries=entries, naming=naming, steps=there)

    def learn_naming(self, entries: Mapping[str, Entry]) -> None:
        """Guesses the naming of new steps from the committed steps, and keeps it.

        Raises:
            ValueError: there are steps of several naming schemes, and none has plain names.
        """
        if run.shows_several(entries):
            self._guess(entries, is_writer=True)

    def _guess(self, entries: Mapping[str, Entry], *, is_writer: bool = False) -> StepNames:
        """Guesses the naming of the steps, and keeps it if there are any.

        Args:
            is_writer: Whether a step will be saved there; then a doubt is an error.
        """

        def counts(name: str) -> bool:
            return self.state_of(name, entries[name]) in ("committed", "unreadable")

        directories = [name for name, entry in entries.items() if entry.kind == "dir"]
        guesses = guess_names(directories, counts, self._is_copy)
        if len(guesses) > 1:
            alike = shown([naming.of(7) for naming in guesses])
            # In plain names, a run without any would look new.
            guesses = [n for n in guesses if n == StepNames()] or guesses[:1]
            problem = (
                f"{self.root} has steps of several naming schemes; step 7 would be {alike}. Choose "
                "one with step_prefix and step_digits of CheckpointManager, or move the steps of "
                "the others elsewhere."
            )
            if is_writer and guesses != [StepNames()]:
                raise ValueError(problem)
            self.report(f"{problem} Until then, it is {guesses[0].of(7)}.")
        self.naming = guesses[0] if guesses else None
        return self.naming or StepNames()

    def _is_copy(self, name: str) -> bool:
        """Returns whether a step was saved under another name; then its name shows no scheme."""
        path, view = f"{self.root}/{name}", self.view(name)
        try:
            record = read_found(view, path, view.entries(path)).record
        except (CheckpointError, OSError) as error:
            if is_io_failure(error) and not isinstance(error, PermissionError):
                raise
            return False
        return record is not None and record.name not in ("", name)

    def listings(self) -> Iterator[Listing]:
        """Lists the root until the caller has found a step in it, and none that is gone."""
        for _ in range(LISTINGS):
            yield (listing := self.listing())
            if not listing.steps:
                return

    def state(self, listing: Listing, number: int) -> State | None:
        """Returns the state of a step, or None if it does not count as a step.

        A torn step was written by jaxckpt but lacks its commit marker or its record, such as an
        incomplete copy. Without atomic renames, a step without a marker may be a save under way; it
        does not count, and the next owner removes its files. An unreadable step may not be listed.
        """
        name = listing.steps.get(number)
        return None if name is None else self.state_of(name, listing.entries[name])

    def state_of(self, name: str, entry: Entry) -> State | None:
        if entry.kind != "dir":
            return None
        if name in self._committed:
            return "committed"
        path, view = f"{self.root}/{name}", self.view(name)
        try:
            if looks_committed(view, path):
                # Without renames it may be replaced in place, but only by the owner.
                if self.owned or commit_of(view, path).replaces:
                    self._committed.add(name)
                return "committed"
            # Without renames, what lacks its marker may be a save under way.
            has_name = view.atomic_rename or names.COMMIT_MARKER in view.entries(path)
            is_torn = has_name and is_ours(view, path)
        except FileNotFoundError:  # deleted just now
            return None
        except PermissionError:
            return "unreadable"
        return "torn" if is_torn else None

    def _check(self, listing: Listing, number: int) -> State | None:
        """Returns the state of a step, reporting a step that is not committed."""
        path, state = f"{self.root}/{listing.steps[number]}", self.state(listing, number)
        is_known = state == "committed" or number in self.sent or is_under_way(path)
        if state == "unreadable":
            self.report(f"{path} cannot be listed (Permission denied); it is left alone")
        elif not is_known:
            if is_deleted(self.storage, path):
                listing.gone.add(number)
                if self.storage.kind(path) is None:
                    return state
            self.report(f"{path} is not a committed step and is left alone")
        return state

    def _newest_first(self) -> Iterator[tuple[Listing, int, State]]:
        """Yields the steps with their states from the newest down, listing a directory for each.

        Begins again with a new listing if a step is gone: a newer step may have been committed.
        """
        for i, listing in enumerate(self.listings(), 1):
            found = False
            for number in reversed(listing.steps):
                if (state := self._check(listing, number)) is not None:
                    found = True
                    yield listing, number, state
                elif listing.gone and i < LISTINGS:
                    break
            else:
                if found:
                    return

    def newest_first(self) -> Iterator[int]:
        """Yields the committed steps from the newest down, listing one directory for each."""
        return (number for _, number, state in self._newest_first() if state == "committed")

    def steps(self) -> list[int]:
        """Returns the committed steps, in order."""
        found = list[int]()
        for listing in self.listings():
            newest_first = [*reversed(listing.steps)]
            unknown = {*listing.steps.values()} - self._committed
            if len(unknown) > _AT_ONCE and self.storage.parallel_writes and self._all is None:
                self._all = listed(self.storage, self.root)  # in few requests
            states = together(
                self.storage, [partial(self._check, listing, n) for n in newest_first]
            )
            both = sorted(zip(newest_first, states, strict=True))
            if found := [number for number, state in both if state == "committed"]:
                self.overtaken = [n for n, state in both if state is None and n < found[-1]]
                if not listing.gone:
                    break
        return found

    def own_steps(self) -> list[int]:
        """Returns the committed steps; in a store without a request, once the owner knows them."""
        if self.storage.atomic_rename or not self._is_known:
            steps = self.steps()
            self._is_known = self.owned
            return steps
        numbered = map((self.naming or StepNames()).step, [*self._committed])
        return sorted(n for n in numbered if n is not None and n not in self.astray)

    def are_there(self, entries: Collection[str]) -> bool:
        """Returns whether nobody else deleted a step; if so, the steps are listed again.

        A step counts as deleted without its marker, too, if the run was just listed whole.
        """
        gone = self._committed.difference(entries)
        if (view := self._all) is not None:
            there = self._committed - gone
            gone |= {name for name in there if not looks_committed(view, f"{self.root}/{name}")}
        self._committed -= gone
        self._is_known = self._is_known and not gone
        return not gone

    def unfinished(self, listing: Listing) -> list[str]:
        """Returns the directories of unfinished steps newer than the newest committed step.

        Lists each of them, and that step.
        """
        found = []
        for number, name in reversed(listing.steps.items()):
            state = self.state(listing, number)
            if state == "committed":
                break
            if state is None and listing.entries[name].kind == "dir":
                found.append(name)
        return found

    def newest(self, listing: Listing | None = None) -> int | None:
        """Returns the newest committed step, of `listing` if given."""
        if listing is None:
            return next(self.newest_first(), None)
        numbers = reversed(listing.steps)
        return next((n for n in numbers if self._check(listing, n) == "committed"), None)

    def to_restore(self) -> list[int]:
        """Returns the steps to try from the newest down, including torn and unreadable steps.

        Lists directories only down to the newest committed step.
        """
        torn = set[int]()
        for listing, number, state in self._newest_first():
            if state == "committed":
                return [n for n in reversed(listing.steps) if n <= number or n in torn]
            torn.add(number)
        return sorted(torn, reverse=True)

    def present(self) -> list[int]:
        """Returns the steps that are committed, torn or unreadable, in order."""
        return sorted({number for _, number, _ in self._newest_first()})

    # --- one step ------------------------------------------------------------------------------

    def path(self, number: int) -> str:
        """Returns the directory of a step, existing or not."""
        naming = self.naming or self.listing().naming
        return f"{self.root}/{naming.of(number)}"

    def is_committed(self, number: int) -> bool:
        """Returns whether a step is committed, without I/O if that is known."""
        if posixpath.basename(self.path(number)) in self._committed:
            return True
        return self.state(self.listing(), number) == "committed"

    def has(self, number: int, file: str) -> bool:
        """Returns whether a file is in a step, in a store by its latest listing."""
        path = self.path(number)
        return self.view(posixpath.basename(path)).kind(f"{path}/{file}") is not None

    def has_record(self, number: int) -> bool:
        """Returns whether jaxckpt saved a step, in a store by its latest listing."""
        return number in self._saved or self.has(number, names.RECORD)

    def check_step(self, number: int) -> str:
        """Returns the directory of a committed step.

        Raises:
            CheckpointNotFound: no such step; the message lists the newest steps, and what a
                directory of its name contains.
        """
        path = self.path(number)
        if self.state(self.listing(), number) != "committed":
            steps = self.steps()
            more = f"the newest of {len(steps)}: " if len(steps) > 8 else ""
            there = f"has {more}{', '.join(map(str, steps[-8:]))}" if steps else self.emptiness()
            inside = entries_of(self.storage, path)
            what = "" if inside is None else f" {path} is not one: it contains {shown([*inside])}."
            if names.WRITER in (inside or ()):
                what += " Unless a job saves or deletes it now, the next one or `gc` removes it."
            if (file := self.missing_file(number)) is not None:
                what = f" {path} is incomplete: {file} is missing."
            raise CheckpointNotFound(
                f"{self.root} has no committed step {number}.{what} It {there}."
            )
        return path

    def missing_file(self, number: int) -> str | None:
        """Returns the file that a torn step lacks, or None if the step is not torn."""
        if self.state(self.listing(), number) != "torn":
            return None
        path = self.path(number)
        has_record = self.storage.kind(f"{path}/{names.RECORD}") is not None
        return f"{path}/{names.COMMIT_MARKER if has_record else names.RECORD}"

    def check_there(self, number: int) -> None:
        """Checks that a step is committed, without I/O if that is known."""
        if posixpath.basename(self.path(number)) in self._committed:
            return
        if (file := self.missing_file(number)) is not None:
            raise corrupt(file, "is missing: the step is incomplete, such as a partial copy")
        self.check_step(number)

    def is_whole(self, number: int) -> bool | None:
        """Returns whether a step is complete, None if it is gone; reports a damaged step once."""
        name = posixpath.basename(self.path(number))
        if name in self._whole:
            return True
        path = f"{self.root}/{name}"
        try:
            view = self.view(name)
            check_found(self, number, read_found(view, path, view.entries(path)))
        except (CheckpointNotFound, FileNotFoundError):
            return None
        except CorruptCheckpoint as error:
            if is_deleted(self.storage, path):
                return None
            self.report(f"step {number} is damaged and is skipped: {error}")
            return False
        if self.owned:
            self._whole.add(name)
        return True

    def info(self, number: int) -> StepInfo:
        """Returns the facts that policies need, from memory or the small files of the step."""
        if number in self._infos:
            return self._infos[number]
        # A step without a recorded time counts as saved now.
        when_s, metrics, differences = time.time(), {}, ()
        self.unknown.pop(number, None)
        try:
            path = self.path(number)
            view = self.view(posixpath.basename(path))
            found = read_facts(view, path, view.entries(path))
            when_s, metrics = saved_s(found) or when_s, metrics_of(found)
            differences = found.differences
        except (CheckpointError, OSError) as error:
            self.unknown[number] = error
            if not is_io_failure(error) and is_deleted(self.storage, path := self.path(number)):
                self.unknown[number] = CheckpointNotFound(f"{path} was deleted meanwhile")
            else:
                self.report(f"the facts about step {number} cannot be read: {error}")
        info = StepInfo(step=number, saved_s=when_s, metrics=metrics, differences=differences)
        if self.owned and number not in self.unknown:
            self._infos[number] = info
        return info

    def read_info(self, number: int) -> StepInfo:
        """Returns the facts about a step; raises an error of reading it, unless it is damaged."""
        info, error = self.info(number), self.unknown.get(number)
        if error is not None and is_io_failure(error):
            raise error
        return info

    def infos(self, numbers: Sequence[int]) -> list[StepInfo]:
        if all(number in self._infos for number in numbers):
            return [self._infos[number] for number in numbers]
        return at_once(self.info, numbers, self.storage)

    def remember(self, info: StepInfo) -> None:
        """Records a step that this process has committed."""
        self._infos[info.step] = info
        self.unknown.pop(info.step, None)
        self._saved.add(info.step)
        self._committed.add(posixpath.basename(self.path(info.step)))

    def forget(self, number: int) -> None:
        """Drops the facts about a deleted step."""
        name = posixpath.basename(self.path(number))
        self._committed.discard(name)
        self._whole.discard(name)
        self._saved.discard(number)
        self._infos.pop(number, None)
        self.unknown.pop(number, None)

    def doubt(self, steps: Iterable[str]) -> None:
        """Drops the facts about steps that may be gone, by their directories."""
        for number in map((self.naming or StepNames()).step, steps):
            if number is not None:
                self.forget(number)
        self._is_known = False


def at_once(call: Callable[[T], U], values: Iterable[T], storage: Storage | None = None) -> list[U]:
    """Calls a function for several values at a time: that hides the latency of a store.

    Args:
        storage: Where it looks. As long as a file system answers at once, this thread makes the
            calls alone: many threads take three times as long, and some threads little longer.
    """
    values, found, began_s, most = [*values], list[U](), time.monotonic(), _AT_ONCE
    if storage is not None and not storage.parallel_writes:
        most = _ON_DISK
        for value in values:
            if time.monotonic() - began_s > _SLOW_S * max(len(found), _LEAST_TIMED):
                break
            found.append(call(value))
    with Pool(most, thread_name_prefix="jaxckpt-look") as pool:
        return [*found, *pool.map(call, values[len(found) :])]
