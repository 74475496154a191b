"""Finds the newest steps of a run, which step may come next, and the life that led there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, final

from jaxckpt._run.copies import Saved
from jaxckpt._run.identity import saved_at
from jaxckpt._run.root import Root, is_in_any, newest_of
from jaxckpt._run.roots import Opened
from jaxckpt.errors import CheckpointError, StepExists, is_io_failure
from jaxckpt.format.step import Life
from jaxckpt.multihost import Json, Processes, lead


@final
@dataclass
class Position:
    """The position of a run that this job continues."""

    roots: Sequence[Root]  # the nearest first
    processes: Processes
    opened: Opened
    floor: int | None = field(init=False)  # the newest step known to be committed
    agreed: int | None = field(init=False)  # the newest good step when all last agreed
    is_owned: bool = field(init=False)  # whether no other job runs, or this job has taken over
    later: range = range(0)  # after the step restored, and not reported yet
    # The newest step that led here, where each process has its own root: no disk leaves it behind.
    base: int | None = field(init=False)
    _deleted: set[int] = field(default_factory=set)  # by hand
    _of_other: int = -1  # the newest step of the job that was running
    # Reads how the run got here, for the records of steps; None until a step is saved.
    _life: Callable[[], Life] | None = None

    def __post_init__(self) -> None:
        self.floor = self.agreed = self.opened.newest
        self.base = _newer(self.opened.newest, *range(self.opened.parts.stop)[-1:])
        self.is_owned = self.opened.owned

    def _lead(self, what: str, do: Callable[[], Json]) -> Any:  # JSON
        name, where = f"manager {self.opened.session}/{what}", self.roots[-1].index.root
        return lead(self.processes, name, do, where=where)

    def why_not(self, step: int, last: int | None, saving: Callable[[], list[int]]) -> str:
        """Returns why a step is not saved again, or "" if it is new; `last` was saved last."""
        if not any(known is not None and step <= known for known in (self.agreed, last)):
            return ""
        if step < self._of_other:
            return f"the job before has saved step {self._of_other}"

        def is_there() -> bool:
            return step in saving() or is_in_any(  # not from memory: it may have been deleted
                self.roots, lambda root: root.counts(step, self.floor) and root.has(step)
            )

        found = self._lead(f"there/{step}", is_there)
        if found and step in self.later:
            self._report_kept(step)
        return f"step {step} is there already or being saved" if found else ""

    def _report_kept(self, step: int) -> None:
        """Reports once for each restore that a step from before it stays."""
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
        if newest is not None and newest > (-1 if self.floor is None else self.floor):
            self.floor = self.agreed = self._of_other = newest
            self.base = _newer(newest, self.base)

    def check(self, step: int, saving: Sequence[int]) -> None:
        """Raises StepExists or ValueError unless a step is newer than all others."""
        floor = max([*saving, -1 if self.floor is None else self.floor])
        if step > floor:
            return
        if not saving and not is_in_any(self.roots, lambda root: root.has(floor)):
            # Others have deleted the newest.
            self.floor = newest_of(self.roots)
            floor = -1 if self.floor is None else self.floor
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

    def go_back(self, newest: int | None, good: int | None) -> None:
        """Records that later steps are gone, and which is the newest that every process trusts."""
        if good != self.floor:
            self._life = None  # later steps do not come from the steps that are gone
        self.floor, self.agreed, self._of_other = newest, good, -1
        lives = self.roots[0].lives  # the steps that are gone may be saved again
        kept = good, self.base
        self.roots[0].lives = {step: one for step, one in lives.items() if step in kept}

    def go_on_from(self, step: int | None, *, is_newest: bool = True) -> None:
        """Records the step that was restored, and whether as the newest one; None if none was."""
        self._come_from(step if is_newest else _newer(step, self.base))

    def _leave_parts(self, step: int) -> None:
        """Lets the run go on from the last step that is whole, if a new one replaces a later part.

        Disks that are not here have the rest of it. Until then, no such part is left behind.
        """
        known = max(self.opened.parts.start - 1, -1 if self.floor is None else self.floor)
        if 0 <= known < step <= (self.base or 0):
            self._come_from(known)
            self.roots[0].index.report(
                f"the disks of this job lack chunks of step {step} and later; the run goes on from "
                f"step {known} without these steps",
                logs=self.processes.index == 0,
            )

    def leave(self, step: int) -> None:
        """Records that a step was deleted by hand."""
        self._deleted.add(step)
        base = self.base
        while base is not None and base in self._deleted:
            base = base - 1 if base else None
        self._come_from(base)

    def committed(self, step: int) -> None:
        """Records a step that this job has saved."""
        self.floor = self.base = step
        self._deleted.discard(step)

    def _come_from(self, step: int | None) -> None:
        if step != self.base and self.roots[0].group.part is not None:
            self._life = None
        self.base = step

    def life(self, step: int, token: str) -> Callable[[], Life]:
        """Returns a function that reads the life of a step being saved.

        It stays the same until the run goes back. The saving thread reads it once.
        """
        if step in self.opened.parts:
            self._leave_parts(step)
        if self._life is None:
            start, local = token[:12], self.roots[0]
            base = self.agreed if local.group.part is None else self.base
            if base is None and local.group.part is not None:
                # Written before anything else of this save; parts of earlier ones may be there.
                local.owner.first = f"{local.owner.first} {start}".strip()
            self._life = cache(partial(self._begin, start, base))
        return self._life

    def _begin(self, start: str, step: int | None) -> Life:
        """Returns the life that goes on from a step, or anew."""
        saved = None if step is None else self.roots[0].lives.get(step) or self._saved(step)
        starts = saved.starts if saved is not None and saved.run == self.opened.run else ()
        return Life(run=self.opened.run, starts=starts).begun(start, step)

    def _saved(self, step: int) -> Saved | None:
        """Reads how the run got to a step, or else to the last one before it that is recorded.

        Raises:
            OSError: it cannot be read now; without it, later steps would look like an earlier life.
        """
        problem, before = None, list[Saved]()
        for index in [root.index for root in self.roots if step not in root.index.astray]:
            try:
                if (saved := saved_at(index, step)).run == self.opened.run:
                    return saved
                # It was deleted by hand, or only other disks have it.
                before += [saved_at(index, n) for n in [n for n in index.steps() if n < step][-1:]]
            except (CheckpointError, OSError) as error:
                problem = error if is_io_failure(error) else problem
        if problem is not None:
            raise problem
        ours = (one for one in before if one.run == self.opened.run)
        return max(ours, key=lambda one: one.step, default=None)


def _newer(*steps: int | None) -> int | None:
    return max((step for step in steps if step is not None), default=None)
