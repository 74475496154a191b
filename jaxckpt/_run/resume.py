"""Restores a step of a run, or an earlier one if the step is damaged."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar, final

import jax

from jaxckpt._core.check import as_step
from jaxckpt._core.text import nearest
from jaxckpt._disk.find import at_rest, marked_as
from jaxckpt._disk.found import Found
from jaxckpt._disk.item import open_item
from jaxckpt._progress.meter import Meter
from jaxckpt._restore.match import RestoreRequest
from jaxckpt._restore.restore import Source, restore_from
from jaxckpt._run import items as _items
from jaxckpt._run.copies import Copy, Disks, Saved, newest_first, over_disks
from jaxckpt._run.coverage import Coverage
from jaxckpt._run.facts import check_found
from jaxckpt._run.index import StepIndex, at_once
from jaxckpt._run.leases import Leases
from jaxckpt._run.retention import KeepPolicy
from jaxckpt._run.root import Root, judge_steps, reachable
from jaxckpt._run.shares import origin_in
from jaxckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    CheckpointTimeout,
    CorruptCheckpoint,
    ProcessesDisagree,
    UnsupportedFormat,
)
from jaxckpt.format import names
from jaxckpt.multihost import Processes, leading, meet
from jaxckpt.types import StepInfo

T = TypeVar("T")
Check = Callable[[Found | None], None]
# Puts the copies of steps in the order to try, given the steps in each root.
InOrder = Callable[[Mapping[int, Collection[int]]], list[Copy]]

_POLL_S: Final = 0.5


class _Marked(CorruptCheckpoint):
    """Replicas differed when the step was saved; it is restored only if no other step can be."""


class NeverWhole(CheckpointNotFound):
    """All steps are parts on local disks, as of a first save that was interrupted."""


_NAMED: Final = ("latest", "best")
# The errors that mean a damaged step, by their mark in a report.
_DAMAGE: Final = {"marked": _Marked, "corrupt": CorruptCheckpoint, "absent": CheckpointNotFound}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Finds and restores steps of a run, the same steps in every process."""

    roots: tuple[Root, ...]  # where its steps are, the nearest first
    processes: Processes
    keep: KeepPolicy  # ranks the steps
    timeout_s: float
    budget_bytes: int  # host memory for what comes from other disks
    writes: bool  # if True, sets damaged steps aside; if False, leases steps while reading
    on_damage: Callable[[], None]  # called when a copy is found damaged

    @property
    def _name(self) -> str:
        return self.roots[-1].index.root

    def candidates(self, step: Any) -> list[Copy]:
        """Returns the copies to try, in order, for "latest", "best" or a number."""
        step, nearest, in_order = _chosen(step), self.roots[0], newest_first
        name, limit_s = f"manager {self._name}/steps", self.timeout_s
        if nearest.group.part is not None or nearest.peers:
            known: list[Disks] = []  # only process 0 needs to know what the disks have
            judge_steps(nearest, lambda *x: known.extend(x), run=self._name, timeout_s=limit_s)
            in_order = partial(self._over_disks, known)
        with leading(self.processes, name, where=self._name, timeout_s=limit_s, meets=True) as led:
            if self.processes.index == 0:  # it lists the steps
                led.value = self._copies(step, in_order)
        return [Copy(*one) for one in led.value]

    def report_alike(self, text: str) -> None:
        """Reports a step in all processes, and logs it in one."""
        index = self.roots[0].index
        if self.processes.index == 0:
            index.report(text)
        elif text not in index.problems:
            index.problems.append(text)

    def _copies(self, step: int | str, in_order: InOrder) -> list[Copy]:
        if step == "latest":
            found = reachable(self.roots, lambda root: root.index.to_restore())
            return in_order(found) or self._refuse_flax()
        if step == "best":
            return self._best_first(in_order)
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

    def _refuse_flax(self) -> list[Copy]:
        """Returns no steps, unless the run has checkpoints of Flax, which would be left behind."""
        index = self.roots[-1].index
        files = index.listing().flax_files()
        if not files:
            return []
        newest = f"{index.root}/{max(files, key=files.__getitem__)}"
        raise UnsupportedFormat(
            f"{index.root} has no steps, but {len(files)} checkpoints that Flax wrote, and a "
            "manager restores none. Convert the newest into a new run, "
            f"jaxckpt.convert({newest!r}, 'NEW/{max(files.values())}'), and open that; or restore "
            "it with jaxckpt.restore. To start over, use an empty directory."
        )

    def listed(self) -> dict[int, list[int]]:
        """Returns the committed steps, in order, and which roots have each."""
        return _by_step(reachable(self.roots, lambda root: root.index.steps()))

    def ranked(self) -> list[StepInfo]:
        """Returns the steps by the metric of the policy, the best first; reports if none has it."""
        there = self.listed()
        ranked = self._ranked(there)
        infos = [] if ranked else self._infos(there)
        if any(info.metrics for info in infos):
            self.roots[-1].index.report(f"{self._name}: {self.keep.unranked(infos)}")
        return ranked

    def _ranked(self, there: Mapping[int, Sequence[int]]) -> list[StepInfo]:
        if self.keep.metric is None:
            raise ValueError("no metric ranks the steps: open the run with KeepPolicy(metric=...)")
        return self.keep.ranked(self._infos(there))

    def _infos(self, there: Mapping[int, Sequence[int]]) -> list[StepInfo]:
        """Returns the facts about each step, from the nearest root that has it.

        Raises:
            OSError: a step cannot be read; it may be the best.
        """
        storage = self.roots[-1].index.storage
        return at_once(lambda n: self.roots[there[n][0]].index.read_info(n), there, storage)

    def _best_first(self, in_order: InOrder) -> list[Copy]:
        found = reachable(self.roots, lambda root: root.index.steps())
        there, copies = _by_step(found), in_order(found)
        if ranked := self._ranked(there):
            return [copy for info in ranked for copy in copies if copy.step == info.step]
        raise CheckpointNotFound(f"{self._name}: {self.keep.unranked(self._infos(there))}")

    def first_whole(
        self,
        wanted: Any,
        reading: Callable[[StepIndex, int, Check], T],
        *,
        fallback: bool,
        copies: Sequence[Copy] | None = None,
        again: bool = True,
        avoids_marked: bool = True,
    ) -> tuple[int, int, T]:
        """Reads the first complete copy of a step, the same in every process.

        A damaged copy is mended from the good one of the same step, or else set aside.

        Args:
            wanted: "latest", "best" or a number, which never falls back.
            reading: Reads a step, given a function that raises if it is gone.
            fallback: Whether to try the next step if all copies of one are damaged.
            copies: The candidates, if they are known.
            again: Whether to list the copies once more if all were deleted meanwhile.
            avoids_marked: Whether to prefer steps that are not marked, if there is a fallback.

        Returns:
            The step to try first, or -1 if the run did not count on the one read; that; its value.

        Raises:
            CorruptCheckpoint, CheckpointNotFound: no step is complete, or the first is not and
                nothing else may be restored.
            ProcessesDisagree: another process failed.
        """
        copies = self.candidates(wanted) if copies is None else copies
        fallback = fallback and isinstance(wanted, str)
        if not copies:
            index = self.roots[-1].index
            raise CheckpointNotFound(
                f"{index.root} {index.emptiness()}, so there is none to restore. Is it "
                "the right directory? A new run starts with restore_or(init)."
            )
        damaged: list[_Attempt] = []
        for copy in copies:
            if damaged and not fallback and copy.step != copies[0].step:
                break
            try_ = self._try_united if copy.is_united else self._try
            read = partial(try_, copy, reading, avoids_marked=fallback and avoids_marked)
            attempt = read()
            if attempt.problem is not None and not copy.is_united:
                attempt = read()  # damaged only if seen twice
            if damaged and self._mends_with(attempt, damaged):
                attempt = read()
            if attempt.problem is None:
                # Only now: a run with only damaged steps must not come to look like a new one.
                for failed in damaged:
                    self._settle(failed, copy)
                return -1 if copy.is_united else copies[0].step, copy.step, attempt.value
            if copy.is_united:  # it says what each disk lacks, too
                damaged = [one for one in damaged if one.is_corrupt or one.copy.step != copy.step]
            damaged.append(attempt)
            self.on_damage()
        if any(attempt.is_marked for attempt in damaged):
            return self.first_whole(
                wanted, reading, fallback=fallback, copies=copies, again=False, avoids_marked=False
            )
        is_gone = not any(attempt.is_corrupt for attempt in damaged)
        if is_gone and again and (now := self.candidates(wanted)) != copies:
            found = self.first_whole(wanted, reading, fallback=fallback, copies=now, again=False)
            return copies[0].step, *found[1:]
        if all(copy.is_united for copy in copies):
            raise NeverWhole("; ".join(str(one.problem) for one in damaged[:10]))
        if not fallback:
            raise damaged[0].error or self._other_failed(damaged[0].copy, str(damaged[0].problem))
        raise CheckpointNotFound(
            f"{self._name} has no step that can be restored. Tried {len(damaged)}:\n  "
            + "\n  ".join(f"step {one.copy.step}: {one.problem}" for one in damaged[:10])
            + "\nNothing was changed. To start over, use another directory or move the steps away."
        )

    def _mends_with(self, bad: _Attempt, damaged: Sequence[_Attempt]) -> bool:
        """Mends a step from another copy, which is damaged, too; the same in every process."""

        def is_bad(one: _Attempt) -> bool:  # a united copy is mended from the disks
            return one.is_corrupt and not (one.is_marked or one.copy.is_united)

        same = [one for one in damaged if one.copy.step == bad.copy.step]
        others = [self.roots[one.copy.root] for one in same if is_bad(one)]
        if not (self.writes and is_bad(bad) and others):
            return False
        name, limit_s = f"manager {self._name}/mended", self.timeout_s
        with leading(self.processes, name, where=self._name, timeout_s=limit_s) as led:
            if self.processes.index == 0:
                led.value = self.roots[bad.copy.root].mend_with(bad.copy.step, others[0])
        return led.value

    def _try(
        self,
        copy: Copy,
        reading: Callable[[StepIndex, int, Check], Any],
        *,
        avoids_marked: bool,
        index: StepIndex | None = None,
    ) -> _Attempt:
        """Reads a step in all processes, which agree on its damage; raises other errors.

        Args:
            index: Where to read it, if not where the copy is.
        """
        step, root = copy.step, self.roots[copy.root]
        index, value, error = index or root.index, None, None
        try:
            with nullcontext(True) if self.writes else root.leases.protect(step) as there:
                # Checked inside, where the processes report to each other: all enter, or none.
                check = partial(self._check, index, step, there, avoids_marked)
                value = reading(index, step, check)
        except CheckpointTimeout:  # of a meeting: alike in all, which do not meet again
            raise
        except Exception as caught:  # reported to the others, then judged
            error = caught
        mark = next((m for m, kind in _DAMAGE.items() if isinstance(error, kind)), "")
        name = f"manager {self._name}/restored"
        where, timeout_s = f"restoring {root.index.path(step)}", self.timeout_s
        host = socket.gethostname()
        met = meet(self.processes, name, host, error, timeout_s=timeout_s, mark=mark, where=where)
        if met.problems and not any(met.marks.values()):
            own = None if isinstance(error, ProcessesDisagree) else error
            met.check(own, f"step {step} of {root.index.root} was not restored")
        who, problem = next(
            ((i, met.problems[i]) for i, found in met.marks.items() if found), (0, None)
        )
        if problem is not None and self.processes.count > 1:
            problem = f"process {who} on {met.values[who]}: {problem}"
        is_marked = "marked" in met.marks.values()
        is_corrupt = is_marked or "corrupt" in met.marks.values()
        if problem is not None and not mark:
            error = self._other_failed(copy, problem) if is_corrupt else None
        return _Attempt(
            copy=copy,
            value=value,
            problem=problem,
            is_corrupt=is_corrupt,
            is_marked=is_marked,
            error=error,
            is_mine=bool(mark),
        )

    def _try_united(
        self,
        copy: Copy,
        reading: Callable[[StepIndex, int, Check], Any],
        *,
        avoids_marked: bool,
    ) -> _Attempt:
        """Reads a step from the disks of all processes; mends what is damaged on this one."""
        with Coverage(
            share=self.roots[0].index,
            directory=self.roots[-1],
            peers=self.roots[0].peers,
            step=copy.step,
            processes=self.processes,
            budget_bytes=self.budget_bytes,
            timeout_s=self.timeout_s,
        ) as disks:
            problem, error = disks.introduce(), None
            while problem is None:
                attempt = self._try(
                    copy, reading, avoids_marked=avoids_marked, index=disks.scratch.index
                )
                if attempt.problem is None or attempt.is_marked:
                    break
                error = attempt.error if attempt.is_mine else None
                problem = disks.complete(error)
            else:
                lost, is_mine = CheckpointNotFound(problem), error is not None
                return _Attempt(copy=copy, problem=problem, error=lost, is_mine=is_mine)
            if attempt.problem is None:
                self.report_alike(disks.said())
                if disks.scratch.is_damaged:
                    self.roots[0].mend(copy.step, disks.scratch.index)
            return attempt

    def _check(
        self,
        index: StepIndex,
        step: int,
        there: bool,
        avoids_marked: bool,
        found: Found | None = None,
    ) -> None:
        """Checks a step before it is found, or that it is not marked."""
        if found is not None and found.record is not None:
            self.roots[0].lives[step] = Saved.of(step, found.record.life)
        if found is None:
            index.check_there(step)
            if not there:
                raise CheckpointNotFound(f"{index.path(step)} is being deleted")
        elif found.differences and avoids_marked:
            raise _Marked(marked_as(found), file=f"{found.path}/{names.RECORD}")
        elif found.differences:
            index.report(f"step {step} is restored, though {marked_as(found)}")

    def _other_failed(self, copy: Copy, problem: str) -> CheckpointError:
        path = self.roots[copy.root].index.path(copy.step)
        text = f"{path}: another process found the step damaged: {problem}"
        return CorruptCheckpoint(text, file=path)

    def _settle(self, failed: _Attempt, good: Copy) -> None:
        """Mends a damaged copy or sets it aside, if this process may; else reports it."""
        error, step, root = failed.error, failed.copy.step, self.roots[failed.copy.root]
        # A leader settles the damage that a mate has found, too.
        leads = root.group.leads and (failed.is_mine or root.group.mates.count > 1)
        if failed.copy.is_united or (good.is_united and good.step == step):
            if good.step != step:  # else it is mended already, or other copies did
                self.report_alike(str(failed.problem))
            return
        if not (self.writes and leads and isinstance(error, CorruptCheckpoint)):
            root.index.report(f"step {step} cannot be restored and is skipped: {failed.problem}")
        elif good.step != step or not root.mend(step, self.roots[good.root].index):
            root.deletion.set_aside(step, str(failed.problem), file=error.file)


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
        wanted = f"a number, 'latest' or 'best', got {step!r}"
        raise ValueError(f"restore: step must be {wanted}. {nearest(step, _NAMED)}")
    return step


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    copy: Copy
    value: Any = None  # read by this process
    problem: str | None  # the damage, worded alike in every process
    is_corrupt: bool = False  # whether it is damage and not a lack, alike in every process
    is_marked: bool = False  # whether it is only marked, alike in every process
    error: Exception | None = None  # for this process to raise
    is_mine: bool = False  # whether this process found the damage


@final
@dataclass(kw_only=True)
class StateReading:
    """Reads the state of a step, and the states of objects to restore in place."""

    processes: Processes
    run: str  # its root, for names
    item: str  # the name of the state, if the step has it
    like: Any  # any pytree
    objects: Mapping[str, object]  # to restore in place, by item
    request: RestoreRequest
    meter: Meter = field(init=False)  # of the step read last
    _states: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _items.check_stateful(self.objects)

    def read(self, index: StepIndex, step: int, check: Check) -> Any:
        """Reads the state of a step."""
        self.meter = Meter("restore", index.path(step), step=step)
        source = _source(index, self.run, step, check, partial(self._open, index, step))
        return restore_from(source, [self.like], self.request, meter=self.meter)

    def _open(self, index: StepIndex, step: int, found: Found) -> Any:  # an Item
        check_found(index, step, found)
        for name, value in self.objects.items():
            self._states[name] = _items.state_for(found, name, value, self.processes)
        return open_item(found, self.item if self.item in found.items else None)

    def set_objects(self, _: object) -> None:
        """Sets the states of the objects from the step read last."""
        for name, state in self._states.items():
            _items.set_state(name, self.objects[name], state)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemsReading:
    """Reads items of a step: trees, JSON, and the states of objects."""

    processes: Processes
    run: str  # its root, for names
    targets: Mapping[str, Any] | None  # by item; if None, reads every item as it was saved
    request: RestoreRequest

    def read(self, index: StepIndex, step: int, check: Check) -> dict[str, Any]:
        """Reads the items of a step."""

        def read(open_: Callable[..., Any], like: Any = None) -> Any:
            source = _source(index, self.run, step, check, open_)
            return restore_from(source, [like], self.request)

        targets = self.targets
        if targets is None:
            targets = dict.fromkeys(read(lambda found: [*found.items]))
        return {
            name: read(
                partial(self._item, partial(check_found, index, step), name, like),
                None if _items.is_stateful(like) else like,
            )
            for name, like in targets.items()
        }

    def _item(self, check: Callable[[Found], None], name: str, target: Any, found: Found) -> Any:
        """Returns an `Item`, or the value of the item."""
        check(found)
        if _items.is_stateful(target):
            return _items.state_for(found, name, target, self.processes)
        states = _items.read_states(found, name)
        return open_item(found, name) if states is None else states.all()

    def set_objects(self, values: dict[str, Any]) -> None:
        """Sets the states of the targets that are objects, which take the place of the states."""
        for name, target in (self.targets or {}).items():
            if _items.is_stateful(target):
                _items.set_state(name, target, values[name])
                values[name] = target


def _source(
    index: StepIndex, run: str, step: int, check: Check, open_: Callable[[Found], Any]
) -> Source:
    path = index.path(step)

    def within(read: Callable[[Found], T]) -> T:
        check(None)
        return at_rest(index.storage, path, read)

    def open_checked(found: Found) -> Any:
        check(found)
        return open_(found)

    return Source(where=path, within=within, open=open_checked, name=f"{run}/{step}")


def watch(index: StepIndex, leases: Leases, timeout_s: float, after: int | None) -> Iterator[int]:
    """Yields new steps as they are committed; each is leased while the caller uses it."""
    waiting = threading.Event()  # never set; signals can interrupt its wait
    last = after
    deadline_s = time.monotonic() + timeout_s
    while True:
        steps = index.steps()
        new = steps[-1:] if last is None else [n for n in steps if n > last]
        for step in new:
            last = step
            with leases.protect(step) as there:
                if there:
                    yield step
                    deadline_s = time.monotonic() + timeout_s
        if not new:
            if (left_s := deadline_s - time.monotonic()) <= 0:
                return
            waiting.wait(min(_POLL_S, left_s))


def shapes_of(init: Callable[[], Any]) -> Any:  # any pytree
    """Returns the result of `init` with shapes in place of jax arrays, computing none.

    If `init` is jitted with `out_shardings`, the shapes have these shardings.
    """
    others: list[object] = []
    treedefs: list[Any] = []

    def arrays_of() -> list[Any]:
        leaves, treedef = jax.tree.flatten(init())
        treedefs.append(treedef)
        others[:] = [None if _is_array(leaf) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if _is_array(leaf)]

    try:
        shapes = iter(jax.eval_shape(arrays_of))
    except jax.errors.ConcretizationTypeError as error:
        error.add_note("In a run with steps, restore_or only traces init; or call restore(like).")
        raise
    if all(other is None for other in others):
        return jax.eval_shape(init)  # not `arrays_of`, which hides the shardings of a jitted `init`
    leaves = [next(shapes) if other is None else other for other in others]
    return jax.tree.unflatten(treedefs[0], leaves)


def _is_array(leaf: object) -> bool:
    # numpy arrays would come back as jax arrays, maybe with fewer bits.
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
