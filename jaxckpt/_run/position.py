"""Finds the newest steps of a run, which step may come next, and the life that led there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, final

from jaxckpt._run.copies import SHORT, Saved
from jaxckpt._run.identity import saved_at
from jaxckpt._run.root import Root, is_apart, is_in_any, newest_of
from jaxckpt._run.roots import NOTHING, Newest, Opened, newest_in, seems_whole
from jaxckpt.errors import CheckpointError, StepExists, is_io_failure
from jaxckpt.format.step import Life
from jaxckpt.multihost import Json, Processes, lead


@final
@dataclass
class Position:
    """The position of a run that this job continues; a step is -1 where there is none."""

    roots: Sequence[Root]  # the nearest first
    processes: Processes
    opened: Opened
    floor: int = field(init=False)  # the newest step known to be committed
    agreed: int = field(init=False)  # the newest good step when all last agreed
    last: int = -1  # the newest step that was to be saved since then
    is_owned: bool = field(init=False)  # whether no other job runs, or this job has taken over
    later: range = range(0)  # after the step restored, and not reported yet
    # The newest step from which the run goes on: no disk leaves it behind. It is newer than the
    # floor only if no process alone knows that it is whole: see `root.is_apart`.
    base: int = -1
    deleted: set[int] = field(default_factory=set)  # by hand
    found: Newest = NOTHING  # in all places together, when they were looked at last
    _of_other: int = -1  # the newest step of the job that was running
    # Reads how the run got here, for the records of steps; None until a step is saved.
    _life: Callable[[], Life] | None = None

    def __post_init__(self) -> None:
        self.floor = self.agreed = self.opened.newest
        self.is_owned = self.opened.owned
        self.come_from(self.floor, self.opened.found)

    def _lead(self, what: str, do: Callable[[], Json]) -> Any:  # JSON
        name, where = f"manager {self.opened.session}/{what}", self.roots[-1].index.root
        return lead(self.processes, name, do, where=where)

    def why_not(self, step: int, saving: Callable[[], list[int]]) -> str:
        """Returns why a step is not saved again, or "" if it is new."""

        def is_there() -> bool:
            return step in saving() or is_in_any(  # not from memory: it may have been deleted
                self.roots, lambda root: root.counts(step, self.floor) and root.has(step)
            )

        # Alike in all processes, whatever the saving threads have committed meanwhile.
        ahead = step <= self.found.restorable.step and step in self.found.shown
        if not ahead:
            if step > max(self.agreed, self.last):
                return ""
            if step < self._of_other:
                return f"the job before has saved step {self._of_other}"
        # On the disk of process 0, or else beside newer steps, on other disks.
        there = self._lead(f"there/{step}", is_there) or (ahead and seems_whole(self.roots, step))
        if not there:
            return ""
        self._report_kept(step)
        return f"step {step} is there already or being saved"

    def _report_kept(self, step: int) -> None:
        """Reports once for each restore that a step from before it stays."""
        if step not in self.later:
            return
        restored, index, self.later = self.later.start - 1, self.roots[-1].index, range(0)
        if self.processes.index == 0:
            index.report(
                f"{index.root} has step {step} from before step {restored} was restored. It stays, "
                "and the new state is not saved. Delete the later steps first (manager.delete), or "
                "start a new run from the older one (jaxckpt.fork)"
            )

    def join(self, step: int) -> None:
        """Takes the run over from the job that was running when our job opened it.

        If that job has ended meanwhile, its later steps stay, and this job saves steps after them.
        """

        def join() -> Json:
            for root in self.roots:
                if root.owner.is_guest and root.counts(step, self.floor):
                    root.owner.join(step)
            return newest_of(self.roots)

        newest = self._lead("join", join)
        self.is_owned = True
        if newest > self.floor:
            self.floor = self.agreed = self._of_other = newest
            self.base = max(newest, self.base)

    def check(self, step: int, saving: Sequence[int]) -> None:
        """Raises StepExists or ValueError unless a step is newer than all others."""
        floor = max(*saving, self.base, self.floor)
        if step > floor:
            return
        is_known = bool(saving) or is_apart(self.roots[0])  # or it may be on other disks
        if not is_known and not is_in_any(self.roots, lambda root: root.has(floor)):
            self.floor = self.base = floor = newest_of(self.roots)  # others have deleted it
            if step > floor:
                return
        index = self.roots[0].index
        if step == floor or is_in_any(self.roots, lambda root: step in root.index.listing().steps):
            what = f"{index.path(step)} already exists or is being saved"
            raise StepExists(f"{what}. Save a later step, or delete it first (manager.delete)")
        raise ValueError(
            f"step {step} is older than step {floor}, the newest of {index.root}. To continue from "
            "an earlier step, delete the later ones (manager.delete) or start a new run from it "
            "(jaxckpt.fork)."
        )

    def go_on(self, step: int, first: int, wait: Callable[[], object], *, is_newest: bool) -> bool:
        """Continues from a step that took the place of `first`; returns whether steps are gone."""
        # Without the floor and the base, which the threads of saves change until `wait` returns.
        least, most = max(self.agreed, self.found.restorable.step), max(self.agreed, self.last)
        if step == first and (not is_newest or least <= step <= most):
            if step > most:
                self.come_from(max(step, self.base), self.found)
            else:  # of this life, also where its thread has not recorded it yet
                self.base = max(step, self.base)
            return False
        wait()
        if is_newest:  # later steps may have been set aside, or the directory was away
            self.come_from(step)
        if is_newest and not is_apart(self.roots[0]):
            newest = self._lead("newest", partial(newest_of, self.roots))
            self._leave(max(step, newest), step)
        else:
            self.go_back()
        return True

    def go_back(self) -> None:
        """Continues, alike in all processes, from the newest step that is left."""
        newest = self._lead("newest", partial(newest_of, self.roots))
        found = newest_in(self.roots, self.floor, self.base, self.deleted)
        newest = max(newest, found.whole)
        self._leave(newest, newest, found)

    def begin_anew(self) -> None:
        """Continues from no step: none is there that was ever committed."""
        self._leave(-1, -1)

    def _leave(self, newest: int, good: int, found: Newest = NOTHING) -> None:
        """Records that later steps are gone; `good` is the newest that every process trusts."""
        if good != self.floor:
            self._life = None  # later steps do not come from the steps that are gone
        self.floor, self.agreed, self._of_other, self.last = newest, good, -1, -1
        lives = self.roots[0].lives  # the steps that are gone may be saved again
        self.roots[0].lives = {step: one for step, one in lives.items() if step == good}
        self.come_from(good, found)

    def committed(self, step: int) -> None:
        """Records a step that this job has saved."""
        self.floor = self.base = step
        self.deleted.discard(step)

    def come_from(self, step: int, found: Newest = NOTHING) -> None:
        """Lets later steps come from a step or a newer one that was found, or from none."""
        self.found, step = found, max(step, found.restorable.step)
        self.roots[0].lives[found.restorable.step] = found.restorable
        if step != self.base and is_apart(self.roots[0]):
            self._life = None
        self.base = step

    def life(self, token: str) -> Callable[[], Life]:
        """Returns a function that reads the life of the steps being saved, in their thread.

        All have the same life until the run goes back, named by the token of the first of them.
        """
        if self._life is None:
            self._life = cache(partial(self._begin, token[:SHORT], self.base))
        return self._life

    def _begin(self, start: str, step: int) -> Life:
        """Returns the life that goes on from a step, or anew."""
        saved = None if step < 0 else self.roots[0].lives.get(step) or self._saved(step)
        starts = saved.starts if saved is not None and saved.run == self.opened.run else ()
        return Life(run=self.opened.run, starts=starts).begun(start, None if step < 0 else step)

    def _saved(self, step: int) -> Saved | None:
        """Reads how the run got to a step, if that is recorded.

        Raises:
            OSError: it cannot be read now; without it, later steps would look like an earlier life.
        """
        problem = None
        for index in [root.index for root in self.roots if step not in root.index.astray]:
            try:
                if (saved := saved_at(index, step)).run == self.opened.run:
                    return saved
            except (CheckpointError, OSError) as error:
                problem = error if is_io_failure(error) else problem
        if problem is not None:
            raise problem
        return None
