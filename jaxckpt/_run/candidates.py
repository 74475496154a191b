"""Finds the copies of steps that a restore tries, in order: the newest first, or the best."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from jaxckpt._core.check import as_step
from jaxckpt._disk.find import LISTINGS
from jaxckpt._run.copies import (
    Copy,
    Told,
    are_all,
    newest_first,
    of_one_save,
    over_disks,
    saves_in,
    went_on,
)
from jaxckpt._run.coverage import is_whole
from jaxckpt._run.index import StepIndex, at_once
from jaxckpt._run.retention import KeepPolicy
from jaxckpt._run.root import Root, is_apart, judge_steps, newest_life, reachable
from jaxckpt._run.shares import origin_in, part_in
from jaxckpt.errors import CheckpointNotFound, CorruptCheckpoint, UnsupportedFormat, is_io_failure
from jaxckpt.format.run import is_like_step
from jaxckpt.multihost import Json, Processes, first_of, meeting, raise_if_any
from jaxckpt.types import StepInfo

_NAMED: Final = ("latest", "best")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Finds the copies of steps, the same in every process."""

    roots: tuple[Root, ...]  # where the steps are, the nearest first
    processes: Processes
    keep: KeepPolicy  # ranks the steps

    @property
    def _name(self) -> str:
        return self.roots[-1].index.root

    def of(self, step: Any) -> list[Copy]:
        """Returns the copies to try, in order, for "latest", "best" or a number."""
        chosen, best = _chosen(step), partial(self._best_first, needed=True)
        find = best if chosen == "best" else partial(self._copies, chosen)
        return self._alike("steps", find, chosen)

    def _alike(
        self, what: str, copies: Callable[[_Seen], Iterable[Copy]], asked: int | str = ""
    ) -> list[Copy]:
        """Returns in all processes what process 0 finds; `what` keeps two questions apart.

        Raises:
            ValueError, ProcessesDisagree: this or another process asked for another step.
        """
        told = deque[tuple[Told, Told]](maxlen=1)
        if is_apart(self.roots[0]):  # process 0 alone hears it, and may judge more than once
            judge_steps(self.roots, lambda *both: told.append(both))
        name = f"manager {self._name}/{what}"
        with meeting(self.processes, name, _of_process_0, where=self._name) as met:
            seen = [_Seen.told(self.roots, *both) for both in told] or [_Seen(self.roots)]
            met.value = [asked, [*copies(seen[0])] if self.processes.index == 0 else []]
        if asked != met.value["asked"]:
            both = f"this process asked for step {asked}, process 0 for step {met.value['asked']}"
            raise ValueError(f"{self._name}: {both}; all have to ask for the same")
        raise_if_any(met.value, f"{self._name}: all have to ask for the same step")
        return [Copy(*one) for one in met.value["copies"]]

    def _copies(self, step: int | str, seen: _Seen) -> list[Copy]:
        if step == "latest":
            found = seen.copies(lambda root: root.index.to_restore())
            return found or _refuse_others(self.roots[-1].index)
        wanted = int(step)
        there = seen.copies(lambda root: [wanted] if root.has(wanted) else [])
        copies = [copy for copy in there if copy.step == wanted]
        if not copies:
            self.roots[-1].index.check_step(wanted)  # raises an error that lists the steps
        return copies

    def newest(self) -> int | None:
        if len(self.roots) == 1:  # lists no more directories than it has to
            index = self.roots[0].index
            return self._first_whole("latest", lambda _: (Copy(n, 0) for n in index.newest_first()))
        steps = StepIndex.steps if is_apart(self.roots[0]) else StepIndex.to_restore
        return self._first_whole("latest", lambda seen: seen.copies(lambda one: steps(one.index)))

    def best(self) -> int | None:
        """Returns the complete step that the policy ranks first; reports if it ranks none."""
        return self._first_whole("best", partial(self._best_first, needed=False))

    def listed(self) -> list[int]:
        """Returns the committed steps, in order."""
        apart = is_apart(self.roots[0])
        copies = self._alike("all", _committed) if apart else _committed(_Seen(self.roots))
        return sorted({copy.step for copy in copies})

    def _first_whole(self, what: str, copies: Callable[[_Seen], Iterable[Copy]]) -> int | None:
        """Returns the first complete step; lists them again if a job has deleted one meanwhile.

        If all disks together have none whole, returns the first: a restore reports what it lacks.
        """
        if is_apart(self.roots[0]):
            return self._first_apart(self._alike(what, copies))
        for left in reversed(range(LISTINGS)):
            for copy in copies(_Seen(self.roots)):
                if is_whole := self.roots[copy.root].index.is_whole(copy.step):
                    return copy.step
                if is_whole is None and left:
                    break
            else:
                break
        return None

    def _first_apart(self, copies: Sequence[Copy]) -> int | None:
        for step, some in groupby(copies, key=itemgetter(0)):
            failure = None
            for copy in some:
                if (is_there := self._is_there(copy)) is True:
                    return step
                failure = failure or is_there
            if failure:  # the disk that failed may have it
                raise failure
        return copies[0].step if copies else None

    def _is_there(self, copy: Copy) -> bool | Exception:
        """Returns whether all processes together have a copy, or an error; all call this."""
        root, run = self.roots[copy.root], self._name
        if copy.is_united:
            return is_whole(self.roots, copy.step, self.processes)
        with root.group.leading(f"manager {run}/whole/{copy.step}", are_all, where=run) as led:
            if root.group.leads:
                led.value = part_in(root.index, copy.step)
        return led.value

    def _best_first(self, seen: _Seen, *, needed: bool) -> list[Copy]:
        """Returns the copies of the steps that have the metric, those of the best step first."""
        if self.keep.metric is None:
            raise ValueError("no metric ranks the steps: open the run with KeepPolicy(metric=...)")
        copies, infos = seen.with_infos()
        ranked, unranked = self.keep.ranked(infos), f"{self._name}: {self.keep.unranked(infos)}"
        if needed and not ranked:
            raise CheckpointNotFound(unranked)
        if not ranked and any(info.metrics for info in infos):
            self.roots[-1].index.report(unranked)
        return [copy for info in ranked for copy in copies if copy.step == info.step]


@dataclass(frozen=True, slots=True)
class _Seen:
    """Where process 0 sees the steps: in the roots, or on all disks and in the directory."""

    roots: Sequence[Root]
    disks: Told = ()  # of all processes
    others: Told = ()  # without a process
    is_told: bool = False  # whether these two count, and not what the nearest root has
    _durable: dict[int, str | None] = field(default_factory=dict)  # the saves in the directory

    @classmethod
    def told(cls, roots: Sequence[Root], disks: Told, others: Told) -> _Seen:
        """Returns what processes have reported, without the steps that the run has left."""
        lives = newest_life(*roots) if any(others) else []
        return cls(roots, *went_on(disks, others, lives), is_told=True)

    def copies(self, ask: Callable[[Root], Collection[int]]) -> list[Copy]:
        """Returns the copies of steps in the order to try; `ask` returns the steps of a root."""
        if not self.is_told:
            return newest_first(reachable(self.roots, ask))
        nearest, directory = self.roots
        local = {one.step for some in (*self.disks, *self.others) for one in some}
        found = reachable(self.roots, lambda one: [*local] if one is nearest else ask(one))
        durable = dict[int, str | None].fromkeys(found.get(1, ()))
        for step in local & durable.keys():
            with suppress(OSError):  # the disks may have it
                durable[step] = origin_in(directory.index, step)
        self._durable.update(durable)
        return over_disks(saves_in(self.disks), durable, saves_in(self.others))

    def with_infos(self) -> tuple[list[Copy], list[StepInfo]]:
        """Returns all copies, and the facts by which their steps are ranked.

        Raises:
            OSError: no copy of a step can be read; it may be the best.
        """
        copies, infos = list[Copy](), list[StepInfo | None]([None])
        for _ in range(LISTINGS):  # a job may delete a step that was listed, such as the best
            if None in infos:
                copies = _committed(self)
                same = [[*some] for _, some in groupby(copies, key=itemgetter(0))]
                infos = at_once(self._info, same, self.roots[-1].index.storage)
        return copies, [info for info in infos if info is not None]

    def _info(self, copies: Sequence[Copy]) -> StepInfo | None:
        """Returns the facts from the first copy of a step that has them; None if it is gone."""
        step, errors = copies[0].step, list[Exception]()
        for root in dict.fromkeys(copy.root for copy in copies):
            found = self._told(step) if self.is_told and root == 0 else self._read(root, step)
            if isinstance(found, StepInfo):
                return found
            errors.append(found)
        if failure := next(filter(is_io_failure, errors), None):
            raise failure
        is_gone = any(isinstance(error, CheckpointNotFound) for error in errors)
        return None if is_gone else StepInfo(step=step, saved_s=0.0)

    def _read(self, root: int, step: int) -> StepInfo | Exception:
        index = self.roots[root].index
        info = index.info(step)
        return index.unknown.get(step, info)

    def _told(self, step: int) -> StepInfo | Exception:
        here, there = (
            [one for some in told for one in some if one.step == step]
            for told in (self.disks, self.others)
        )
        found = of_one_save(here, there, self._durable.get(step))
        for one in found:
            if one.metrics is not None:
                return StepInfo(step=step, saved_s=0.0, metrics=one.metrics)
        if not any(one.problem for one in found):
            return CorruptCheckpoint(f"the metrics of step {step} are damaged on all disks")
        problem = f"step {step}, which may be the best, cannot be read on the disk of its host"
        return OSError(errno.EIO, problem, self.roots[0].index.root)


def _committed(seen: _Seen) -> list[Copy]:
    """Returns the copies of all committed steps in the order to try."""
    return seen.copies(lambda root: root.index.steps())


def _of_process_0(given: list[Any]) -> Json:
    """Returns the copies that process 0 has found, and who has asked for another step."""
    asked, copies = given[0]
    differ = [(i, other) for i, (other, _) in enumerate(given) if other != asked]
    told = {i: f"asked for step {other}, process 0 for step {asked}" for i, other in differ}
    return {"asked": asked, "copies": copies, **first_of(told)}


def _refuse_others(index: StepIndex) -> list[Copy]:
    """Returns no steps, unless there are links or checkpoints of Flax, to be left behind."""
    listing = index.listing()
    for name in listing.steps.values():
        if listing.entries[name].kind == "other":
            raise UnsupportedFormat(
                f"{index.root} has no steps, but {name} is a link, which a run does not "
                "follow. Move the checkpoint here, or restore the link with jaxckpt.restore. "
                "To start over, use an empty directory."
            )
    for name, entry in listing.entries.items():
        is_other = is_like_step(name) and listing.naming.step(name) is None
        if is_other and index.state_of(name, entry) == "committed":
            raise UnsupportedFormat(
                f"{index.root} has no steps named like {listing.naming.of(7)}, but {name} is one. "
                "Choose step_prefix and step_digits of CheckpointManager as for that, or leave "
                "them out. To start over, use an empty directory."
            )
    files = listing.flax_files()
    if not files:
        return []
    newest = f"{index.root}/{max(files, key=files.__getitem__)}"
    raise UnsupportedFormat(
        f"{index.root} has no steps, but {len(files)} checkpoints that Flax wrote, and a "
        "manager restores none. Convert the newest into a new run, "
        f"jaxckpt.convert({newest!r}, 'NEW/{max(files.values())}'), and open that; or restore "
        "it with jaxckpt.restore. To start over, use an empty directory."
    )


def _chosen(step: Any) -> int | str:
    if not isinstance(step, str):
        return as_step("restore", step)
    if step not in _NAMED:
        near = int(step[:18]) if step.isdecimal() else "best" if step[:1] == "b" else "latest"
        wanted = f"a number, 'latest' or 'best', got {step!r}. Did you mean {near!r}?"
        raise ValueError(f"restore: step must be {wanted}")
    return step
