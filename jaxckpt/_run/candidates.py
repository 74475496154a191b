"""Finds the copies of steps that a restore tries, in order: the newest first, or the best."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from jaxckpt._core.check import as_step
from jaxckpt._disk.find import LISTINGS
from jaxckpt._run.copies import Copy, Disks, newest_first, over_disks
from jaxckpt._run.coverage import Coverage, is_whole
from jaxckpt._run.index import at_once
from jaxckpt._run.retention import KeepPolicy
from jaxckpt._run.root import Root, judge_steps, reachable
from jaxckpt._run.shares import origin_in
from jaxckpt.errors import CheckpointNotFound, UnsupportedFormat
from jaxckpt.multihost import Processes, leading
from jaxckpt.types import StepInfo

# Puts the copies of steps in the order to try, given the steps in each root.
InOrder = Callable[[Mapping[int, Collection[int]]], list[Copy]]

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
        return self._alike(partial(self._copies, _chosen(step)))

    def _alike(self, copies: Callable[[InOrder], list[Copy]]) -> list[Copy]:
        """Returns in every process the copies that process 0 finds."""
        in_order: InOrder = newest_first
        if _is_apart(self.roots[0]):
            known: list[Disks] = []  # only process 0 needs to know what the disks have
            judge_steps(self.roots[0], lambda *x: known.extend(x), run=self._name)
            in_order = partial(self._over_disks, known)
        name = f"manager {self._name}/steps"
        with leading(self.processes, name, where=self._name, meets=True) as led:
            if self.processes.index == 0:  # it lists the steps
                led.value = copies(in_order)
        return [Copy(*one) for one in led.value]

    def _copies(self, step: int | str, in_order: InOrder) -> list[Copy]:
        if step == "latest":
            found = reachable(self.roots, lambda root: root.index.to_restore())
            return in_order(found) or self._refuse_others()
        if step == "best":
            if found := self._best_first(in_order):
                return found
            unranked = self.keep.unranked(self._with_infos()[1])
            raise CheckpointNotFound(f"{self._name}: {unranked}")
        wanted = int(step)
        found = reachable(self.roots, lambda root: [wanted] if root.has(wanted) else [])
        copies = [copy for copy in in_order(found) if copy.step == wanted]
        if not copies:
            self.roots[-1].index.check_step(wanted)  # raises an error that lists the steps
        return copies

    def newest_first(self) -> list[Copy]:
        """Returns the copies of steps from the newest down; see `StepIndex.to_restore`."""
        return newest_first(reachable(self.roots, lambda root: root.index.to_restore()))

    def _over_disks(
        self, known: Sequence[Disks], found: Mapping[int, Collection[int]]
    ) -> list[Copy]:
        """Returns the copies of steps in the order to try, given what `judge_steps` showed."""
        disks, others = known
        index, local = self.roots[-1].index, set().union(*disks, *others)
        there = found.get(len(self.roots) - 1, ())
        durable = {n: origin_in(index, n) if n in local else None for n in there}
        return over_disks(disks, durable, others)

    def _refuse_others(self) -> list[Copy]:
        """Returns no steps, unless there are links or checkpoints of Flax, to be left behind."""
        index = self.roots[-1].index
        listing = index.listing()
        for name in listing.steps.values():
            if listing.entries[name].kind == "other":
                raise UnsupportedFormat(
                    f"{index.root} has no steps, but {name} is a link, which a run does not "
                    "follow. Move the checkpoint here, or restore the link with jaxckpt.restore. "
                    "To start over, use an empty directory."
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

    def _first_whole(
        self, listed: Callable[[], Iterable[tuple[int, Sequence[Root]]]]
    ) -> int | None:
        """Returns the first complete step; lists them again if a job has deleted one meanwhile."""
        for left in reversed(range(LISTINGS)):
            for step, roots in listed():
                if is_whole := _is_whole(step, roots):
                    return step
                if is_whole is None and left:
                    break
            else:
                break
        return None

    def newest(self) -> int | None:
        """Returns the newest complete step."""
        if _is_apart(self.roots[0]):
            return _first_there(self, self._alike(partial(_copies_in, self.roots)))
        if len(self.roots) == 1:
            index = self.roots[0].index
            return self._first_whole(lambda: ((n, self.roots) for n in index.newest_first()))
        copies = self.newest_first
        return self._first_whole(lambda: ((one.step, [self.roots[one.root]]) for one in copies()))

    def best(self) -> int | None:
        """Returns the complete step that the policy ranks first."""
        if _is_apart(self.roots[0]):
            return _first_there(self, self._alike(self._best_first))
        return self._first_whole(lambda: ((info.step, self.roots) for info in self.ranked()))

    def listed(self) -> list[int]:
        """Returns the committed steps, in order."""
        find = partial(_copies_in, self.roots)
        copies = self._alike(find) if _is_apart(self.roots[0]) else find(newest_first)
        return sorted({copy.step for copy in copies})

    def ranked(self) -> list[StepInfo]:
        """Returns the steps by the metric of the policy, the best first; reports if none has it."""
        _, infos = self._with_infos()
        ranked = self.keep.ranked(infos)
        if not ranked and any(info.metrics for info in infos):
            self.roots[-1].index.report(f"{self._name}: {self.keep.unranked(infos)}")
        return ranked

    def _with_infos(self) -> tuple[dict[int, list[int]], list[StepInfo]]:
        """Returns the steps in each root, and the facts by which they are ranked."""
        if self.keep.metric is None:
            raise ValueError("no metric ranks the steps: open the run with KeepPolicy(metric=...)")
        before, found, infos = None, dict[int, list[int]](), list[StepInfo]()
        for _ in range(LISTINGS):  # a job may delete a step that was listed, such as the best
            found = reachable(self.roots, lambda root: root.index.steps())
            infos = self._infos(there := _by_step(found))
            errors = [self.roots[there[n][0]].index.unknown.get(n) for n in there]
            is_gone = any(isinstance(error, CheckpointNotFound) for error in errors)
            if found == before or (self.keep.ranked(infos) and not is_gone):
                break
            before = found
        return found, infos

    def _infos(self, there: Mapping[int, Sequence[int]]) -> list[StepInfo]:
        """Returns the facts about each step, from the nearest root that has it.

        Raises:
            OSError: a step cannot be read; it may be the best.
        """
        storage = self.roots[-1].index.storage
        return at_once(lambda n: self.roots[there[n][0]].index.read_info(n), there, storage)

    def _best_first(self, in_order: InOrder) -> list[Copy]:
        found, infos = self._with_infos()
        copies, ranked = in_order(found), self.keep.ranked(infos)
        return [copy for info in ranked for copy in copies if copy.step == info.step]


def _copies_in(roots: Sequence[Root], in_order: InOrder) -> list[Copy]:
    return in_order(reachable(roots, lambda root: root.index.steps()))


def _is_apart(root: Root) -> bool:
    """Returns whether the disk of a process may lack steps that a restore finds."""
    return root.group.part is not None or bool(root.peers)


def _first_there(of: Candidates, copies: Sequence[Copy]) -> int | None:
    """Returns the first step that all processes together have; all of them call this.

    If they have none whole, returns the first: a restore reports what it lacks.
    """
    there = (copy.step for copy in copies if _is_there(of, copy))
    return next(there, copies[0].step if copies else None)


def _is_there(of: Candidates, copy: Copy) -> bool:
    root, run = of.roots[copy.root], of.roots[-1]
    if copy.is_united:
        about: Any = {"step": copy.step, "processes": of.processes, "budget_bytes": 0}
        with closing((disks := Coverage(local=root, directory=run, **about)).scratch):
            return is_whole(disks)
    name = f"manager {run.index.root}/whole"
    with root.group.leading(name, all, where=run.index.root) as led:
        if root.group.leads:
            led.value = root.index.is_whole(copy.step)
    return led.value


def _is_whole(step: int, roots: Sequence[Root]) -> bool | None:
    """Returns whether a step is complete in one of the roots; None if it is gone from all."""
    found = None
    for root in roots:
        if is_whole := root.index.is_whole(step):
            return True
        found = found if is_whole is None else False
    return found


def _by_step(found: Mapping[int, Collection[int]]) -> dict[int, list[int]]:
    """Returns the steps in order, and which roots have each, from the steps of each root."""
    there: dict[int, list[int]] = {}
    for copy in reversed(newest_first(found)):
        there.setdefault(copy.step, []).insert(0, copy.root)
    return there


def _chosen(step: Any) -> int | str:
    if not isinstance(step, str):
        return as_step("restore", step)
    if step not in _NAMED:
        near = int(step[:18]) if step.isdecimal() else "best" if step[:1] == "b" else "latest"
        wanted = f"a number, 'latest' or 'best', got {step!r}. Did you mean {near!r}?"
        raise ValueError(f"restore: step must be {wanted}")
    return step
