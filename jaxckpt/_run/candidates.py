"""Finds the copies of steps that a restore tries, in order: the newest first, or the best."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from jaxckpt._core.check import as_step
from jaxckpt._disk.find import LISTINGS
from jaxckpt._run.copies import Copy, Disks, newest_first, over_disks
from jaxckpt._run.coverage import Coverage, is_whole
from jaxckpt._run.index import StepIndex, at_once
from jaxckpt._run.retention import KeepPolicy
from jaxckpt._run.root import Root, judge_steps, reachable
from jaxckpt._run.shares import origin_in
from jaxckpt.errors import CheckpointNotFound, UnsupportedFormat, is_io_failure
from jaxckpt.multihost import Processes, lead, meeting
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
        if (chosen := _chosen(step)) == "best":
            return self._alike("steps", self._by_metric(needed=True))
        return self._alike("steps", partial(self._copies, chosen))

    def _alike(self, what: str, copies: Callable[[InOrder], Iterable[Copy]]) -> list[Copy]:
        """Returns in all processes what process 0 finds; `what` keeps two questions apart."""
        in_order: InOrder = newest_first
        if _is_apart(self.roots[0]):
            # What the disks have only process 0 needs to know; it may judge more than once.
            known: deque[Disks] = deque(maxlen=2)
            judge_steps(self.roots[0], lambda *x: known.extend(x), run=self._name)
            in_order = partial(_over_disks, self.roots[-1].index, known)
        name, list_ = f"manager {self._name}/{what}", lambda: [*copies(in_order)]
        found = lead(self.processes, name, list_, where=self._name, meets=True)
        return [Copy(*one) for one in found]

    def _copies(self, step: int | str, in_order: InOrder) -> list[Copy]:
        if step == "latest":
            found = self._found(StepIndex.to_restore, in_order)
            return found or _refuse_others(self.roots[-1].index)
        wanted = int(step)
        there = reachable(self.roots, lambda root: [wanted] if root.has(wanted) else [])
        copies = [copy for copy in in_order(there) if copy.step == wanted]
        if not copies:
            self.roots[-1].index.check_step(wanted)  # raises an error that lists the steps
        return copies

    def _found(self, steps: Callable[[StepIndex], list[int]], in_order: InOrder) -> list[Copy]:
        return in_order(reachable(self.roots, lambda root: steps(root.index)))

    def newest(self) -> int | None:
        """Returns the newest complete step."""
        if len(self.roots) == 1:  # lists no more directories than it has to
            index = self.roots[0].index
            return self._first_whole("latest", lambda _: (Copy(n, 0) for n in index.newest_first()))
        steps = StepIndex.steps if _is_apart(self.roots[0]) else StepIndex.to_restore
        return self._first_whole("latest", partial(self._found, steps))

    def best(self) -> int | None:
        """Returns the complete step that the policy ranks first; reports if it ranks none."""
        return self._first_whole("best", self._by_metric(needed=False))

    def listed(self) -> list[int]:
        """Returns the committed steps, in order."""
        find = partial(self._found, StepIndex.steps)
        copies = self._alike("all", find) if _is_apart(self.roots[0]) else find(newest_first)
        return sorted({copy.step for copy in copies})

    def _first_whole(self, what: str, copies: Callable[[InOrder], Iterable[Copy]]) -> int | None:
        """Returns the first complete step; lists them again if a job has deleted one meanwhile.

        If all disks together have none whole, returns the first: a restore reports what it lacks.
        """
        if _is_apart(self.roots[0]):
            return self._first_apart(self._alike(what, copies))
        for left in reversed(range(LISTINGS)):
            for copy in copies(newest_first):
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
            with closing((disks := self._coverage(copy.step)).scratch):
                return is_whole(disks)
        with root.group.leading(f"manager {run}/whole/{copy.step}", all, where=run) as led:
            if root.group.leads:
                led.value = root.index.is_whole(copy.step)
        return led.value

    def _with_infos(self) -> tuple[dict[int, list[int]], list[StepInfo]]:
        """Returns the steps in each root, and the facts by which they are ranked.

        Raises:
            OSError: a step cannot be read; it may be the best.
        """
        if self.keep.metric is None:
            raise ValueError("no metric ranks the steps: open the run with KeepPolicy(metric=...)")
        storage = self.roots[-1].index.storage
        found, infos = dict[int, list[int]](), list[StepInfo]()
        for _ in range(LISTINGS):  # a job may delete a step that was listed, such as the best
            found = reachable(self.roots, lambda root: root.index.steps())
            copies = reversed(newest_first(found))  # so that the nearest copy of a step counts
            nearest = {copy.step: self.roots[copy.root].index for copy in copies}
            infos = at_once(lambda n, of=nearest: of[n].read_info(n), nearest, storage)
            errors = [index.unknown.get(n) for n, index in nearest.items()]
            if not any(isinstance(error, CheckpointNotFound) for error in errors):
                break
        return found, infos

    def _by_metric(self, *, needed: bool) -> Callable[[InOrder], list[Copy]]:
        """Returns what lists the best steps first; if disks are apart, all processes call this."""
        others = _on_disks(self.roots[0], self._name) if _is_apart(self.roots[0]) else {}
        return partial(self._best_first, others, needed=needed)

    def _best_first(
        self, others: Mapping[int, Any], in_order: InOrder, *, needed: bool
    ) -> list[Copy]:
        found, nearest = self._with_infos()
        infos = [*nearest, *_elsewhere(others, nearest, self._name)]
        ranked, unranked = self.keep.ranked(infos), f"{self._name}: {self.keep.unranked(infos)}"
        if needed and not ranked:
            raise CheckpointNotFound(unranked)
        if not ranked and any(info.metrics for info in infos):
            self.roots[-1].index.report(unranked)
        copies = in_order(found)
        return [copy for info in ranked for copy in copies if copy.step == info.step]

    def _coverage(self, step: int, budget_bytes: int = 0) -> Coverage:
        return Coverage(
            local=self.roots[0],
            directory=self.roots[-1],
            step=step,
            processes=self.processes,
            budget_bytes=budget_bytes,
        )


def _over_disks(
    index: StepIndex, known: Iterable[Disks], found: Mapping[int, Collection[int]]
) -> list[Copy]:
    """Returns the copies of steps in the order to try, given what `judge_steps` showed.

    Args:
        index: The directory, which is the last root.
    """
    disks, others = known
    local = set().union(*disks, *others)
    there = found.get(1, ())
    durable = {n: origin_in(index, n) if n in local else None for n in there}
    return over_disks(disks, durable, others)


def _on_disks(local: Root, run: str) -> dict[int, Any]:
    """Returns to process 0 the metrics of the steps on the disks of all processes, and of peers.

    They are None if they cannot be read now.
    """
    told, processes = deque[list[Any]](maxlen=1), local.group.job  # it may judge more than once
    local.peers.forget()
    with meeting(processes, f"manager {run}/metrics", told.append, where=run) as met:
        peers = local.peers.there() if processes.index == 0 else []
        there = [local.index, *local.peers.here, *peers]
        met.value = [one for index in there for one in _metrics_in(index)]
    known = [one for given in told for some in given for one in some]
    return dict(sorted(known, key=lambda one: one[1] is not None))


def _metrics_in(index: StepIndex) -> list[Any]:
    with suppress(OSError):  # a restore reports a disk that cannot be read
        infos, unknown = index.infos(index.steps()), index.unknown
        bad = [n for n, error in unknown.items() if is_io_failure(error)]
        return [[one.step, None if one.step in bad else {**one.metrics}] for one in infos]
    return []


def _elsewhere(
    others: Mapping[int, Any], nearest: Sequence[StepInfo], run: str
) -> Iterator[StepInfo]:
    """Yields the metrics of the steps of other disks; OSError if some cannot be read."""
    for step in others.keys() - {info.step for info in nearest}:
        if others[step] is None:
            problem = f"step {step}, which may be the best, cannot be read on the disk of its host"
            raise OSError(errno.EIO, problem, run)
        yield StepInfo(step=step, saved_s=0.0, metrics=others[step])


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


def _is_apart(root: Root) -> bool:
    """Returns whether the disk of a process may lack steps that a restore finds."""
    return root.group.part is not None or bool(root.peers)


def _chosen(step: Any) -> int | str:
    if not isinstance(step, str):
        return as_step("restore", step)
    if step not in _NAMED:
        near = int(step[:18]) if step.isdecimal() else "best" if step[:1] == "b" else "latest"
        wanted = f"a number, 'latest' or 'best', got {step!r}. Did you mean {near!r}?"
        raise ValueError(f"restore: step must be {wanted}")
    return step
