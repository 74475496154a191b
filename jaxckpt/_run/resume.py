"""Restores a step of a run, or an earlier one if the step is damaged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar, final

import jax

from jaxckpt._core.check import as_step
from jaxckpt._core.text import nearest
from jaxckpt._disk.find import at_rest, open_item
from jaxckpt._disk.found import Found
from jaxckpt._progress.meter import Meter
from jaxckpt._restore.match import RestoreRequest
from jaxckpt._restore.restore import Source, restore_from
from jaxckpt._run import items as _items
from jaxckpt._run.deletion import Deletion
from jaxckpt._run.index import StepIndex
from jaxckpt._run.leases import Leases
from jaxckpt._run.retention import KeepPolicy
from jaxckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptCheckpoint,
    ProcessesDisagree,
    UnsupportedFormat,
)
from jaxckpt.multihost import Processes, leading, meet
from jaxckpt.types import StepInfo

T = TypeVar("T")
Check = Callable[[], None]

_POLL_S: Final = 0.5
_NAMED: Final = ("latest", "best")
# The errors that mean a damaged step, by their mark in a report.
_DAMAGE: Final = {"corrupt": CorruptCheckpoint, "absent": CheckpointNotFound}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Finds and restores steps of a run, the same ones in every process."""

    index: StepIndex
    leases: Leases
    deletion: Deletion
    processes: Processes
    keep: KeepPolicy  # ranks the steps
    timeout_s: float
    writes: bool  # if True, sets damaged steps aside; if False, leases steps while reading

    def candidates(self, step: Any) -> list[int]:
        """Returns the steps to try, in order, for "latest", "best" or a number."""
        root, step = self.index.root, _chosen(step)
        with leading(
            self.processes, f"manager {root}/steps", place=root, timeout_s=self.timeout_s
        ) as led:
            if self.processes.index != 0:
                pass  # process 0 lists the steps
            elif step == "latest":
                led.value = self.index.to_restore() or self._refuse_flax()
            elif step == "best":
                led.value = self._best_first()
            else:
                self.index.check_step(step)
                led.value = [step]
        return led.value

    def _refuse_flax(self) -> list[int]:
        """Returns no steps, unless the run has checkpoints of Flax, which would be left behind."""
        files = self.index.listing().flax_files()
        if not files:
            return []
        newest = f"{self.index.root}/{max(files, key=files.__getitem__)}"
        raise UnsupportedFormat(
            f"{self.index.root} has no steps, but {len(files)} checkpoints that Flax wrote, and a "
            "manager restores none. Convert the newest into a new run, "
            f"jaxckpt.convert({newest!r}, 'NEW/{max(files.values())}'), and open that; or restore "
            "it with jaxckpt.restore. To start over, use an empty directory."
        )

    def ranked(self) -> list[StepInfo]:
        """Returns the steps by the metric of the policy, the best first."""
        if self.keep.metric is None:
            raise ValueError("no metric ranks the steps: open the run with KeepPolicy(metric=...)")
        return self.keep.ranked(map(self.index.info, self.index.steps()))

    def _best_first(self) -> list[int]:
        if ranked := self.ranked():
            return [info.step for info in ranked]
        infos = map(self.index.info, self.index.steps())
        raise CheckpointNotFound(f"{self.index.root}: {self.keep.unranked(infos)}")

    def first_whole(
        self,
        steps: Sequence[int],
        reading: Callable[[int], Callable[[Check], T]],
        *,
        fallback: bool,
    ) -> tuple[int, T]:
        """Reads the first complete step, the same in every process.

        Args:
            reading: Returns the function that reads a step, given one that raises if it is gone.
            fallback: Whether to try the next step if one is damaged.

        Returns:
            The step and the value read.

        Raises:
            CorruptCheckpoint, CheckpointNotFound: no step is complete, or the first is not and
                there is no fallback.
            ProcessesDisagree: another process failed.
        """
        if not steps:
            raise CheckpointNotFound(
                f"{self.index.root} {self.index.emptiness()}, so there is none to restore. Is it "
                "the right directory? A new run starts with restore_or(init)."
            )
        damaged: list[_Attempt] = []
        for step in steps:
            attempt = self._try(step, reading(step))
            if attempt.problem is not None:
                attempt = self._try(step, reading(step))  # damaged only if seen twice
            if attempt.problem is None:
                # Only now: a run with only damaged steps must not come to look like a new one.
                for failed in damaged:
                    self._skip(failed)
                return step, attempt.value
            if not fallback:
                raise attempt.error or self._other_failed(step, attempt.problem)
            damaged.append(attempt)
        raise CheckpointNotFound(
            f"{self.index.root} has no step that can be restored. Tried {len(damaged)}:\n  "
            + "\n  ".join(f"step {failed.step}: {failed.problem}" for failed in damaged[:10])
            + "\nNothing was changed. To start over, use another directory or move the steps away."
        )

    def _try(self, step: int, read: Callable[[Check], Any]) -> _Attempt:
        """Reads a step in all processes, which agree on its damage; raises other errors."""
        value, error = None, None
        try:
            with nullcontext(True) if self.writes else self.leases.hold(step) as there:
                # Checked inside, where the processes report to each other: all enter, or none.
                value = read(partial(self._check, step, there))
        except Exception as caught:  # reported to the others, then judged
            error = caught
        mark = next((m for m, kind in _DAMAGE.items() if isinstance(error, kind)), "")
        name = f"manager {self.index.root}/restored"
        met = meet(self.processes, name, None, error, timeout_s=self.timeout_s, mark=mark)
        if met.problems and not any(met.marks.values()):
            own = None if isinstance(error, ProcessesDisagree) else error
            met.check(own, f"step {step} of {self.index.root} was not restored")
        problem = next((met.problems[i] for i, found in met.marks.items() if found), None)
        if problem is not None and not mark:
            error = self._other_failed(step, problem) if "corrupt" in met.marks.values() else None
        return _Attempt(step=step, value=value, problem=problem, error=error)

    def _check(self, step: int, there: bool) -> None:
        self.index.check_there(step)
        if not there:
            raise CheckpointNotFound(f"{self.index.path(step)} is being deleted")

    def _other_failed(self, step: int, problem: str) -> CheckpointError:
        path = self.index.path(step)
        text = f"{path}: another process found the step damaged: {problem}"
        return CorruptCheckpoint(text, file=path)

    def _skip(self, failed: _Attempt) -> None:
        error, step = failed.error, failed.step
        if self.writes and self.processes.index == 0 and isinstance(error, CorruptCheckpoint):
            self.deletion.set_aside(step, str(failed.problem), file=error.file)
        else:
            self.index.report(f"step {step} cannot be restored and is skipped: {failed.problem}")


def _chosen(step: Any) -> int | str:
    if not isinstance(step, str):
        return as_step("restore", step)
    if step not in _NAMED:
        wanted = f"a number, 'latest' or 'best', got {step!r}"
        raise ValueError(f"restore: step must be {wanted}. {nearest(step, _NAMED)}")
    return step


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    step: int
    value: Any  # read by this process
    problem: str | None  # the damage, worded alike in every process
    error: Exception | None  # for this process to raise


@final
class StateReading:
    """Reads the state of a step, and the states of objects to restore in place."""

    meter: Meter  # of the step read last

    def __init__(
        self,
        index: StepIndex,
        processes: Processes,
        item: str,
        like: Any,  # any pytree
        objects: Mapping[str, object],
        request: RestoreRequest,
    ) -> None:
        """Reads nothing yet.

        Args:
            item: The name of the state, if the step has it.
            objects: The objects to restore in place, by item.

        Raises:
            TypeError: an object has no method to set its state.
        """
        _items.check_stateful(objects)
        self._index = index
        self._processes = processes
        self._item = item
        self._like = like
        self._objects = objects
        self._request = request
        self._states: dict[str, Any] = {}

    def of(self, step: int) -> Callable[[Check], Any]:
        """Returns the function that reads the state of a step."""
        self.meter = Meter("restore", self._index.path(step), step=step)
        return partial(self._read, step)

    def _read(self, step: int, check: Check) -> Any:
        source = _source(self._index, step, check, partial(self._open, step))
        return restore_from(source, [self._like], self._request, meter=self.meter)

    def _open(self, step: int, found: Found) -> Any:  # an Item
        self._index.check_found(step, found)
        for name, value in self._objects.items():
            states = _items.read_states(found, name)
            self._states[name] = _items.state_for(
                value, states, name=name, path=found.path, processes=self._processes
            )
        return open_item(found, self._item if self._item in found.items else None)

    def set_objects(self) -> None:
        """Sets the states of the objects from the step read last."""
        for name, state in self._states.items():
            _items.set_state(name, self._objects[name], state)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemsReading:
    """Reads items of a step: trees, JSON, and the states of objects."""

    index: StepIndex
    processes: Processes
    targets: Mapping[str, Any] | None  # by item; if None, reads every item as it was saved
    request: RestoreRequest

    def of(self, step: int) -> Callable[[Check], dict[str, Any]]:
        """Returns the function that reads the items of a step."""
        return partial(self._read, step)

    def _read(self, step: int, check: Check) -> dict[str, Any]:
        def read(open_: Callable[..., Any], like: Any = None) -> Any:
            source = _source(self.index, step, check, partial(open_, step))
            return restore_from(source, [like], self.request)

        targets = self.targets
        if targets is None:
            targets = dict.fromkeys(read(lambda _, found: [*found.items]))
        return {
            name: read(partial(self._item, name, like), None if _items.is_stateful(like) else like)
            for name, like in targets.items()
        }

    def _item(self, name: str, target: Any, step: int, found: Found) -> Any:
        """Returns an `Item`, or the value of the item."""
        self.index.check_found(step, found)
        states = _items.read_states(found, name)
        if _items.is_stateful(target):
            return _items.state_for(
                target, states, name=name, path=found.path, processes=self.processes
            )
        return open_item(found, name) if states is None else list(map(_items.plain, states))

    def set_objects(self, values: dict[str, Any]) -> None:
        """Sets the states of the targets that are objects, which take the place of the states."""
        for name, target in (self.targets or {}).items():
            if _items.is_stateful(target):
                _items.set_state(name, target, values[name])
                values[name] = target


def _source(index: StepIndex, step: int, check: Check, open_: Callable[[Found], Any]) -> Source:
    path = index.path(step)

    def within(read: Callable[[Found], T]) -> T:
        check()
        return at_rest(index.storage, path, read)

    return Source(where=path, within=within, open=open_)


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
            with leases.hold(step) as there:
                if there:
                    yield step
                    deadline_s = time.monotonic() + timeout_s
        left_s = deadline_s - time.monotonic()
        if not new and left_s <= 0:
            return
        if not new:
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

    shapes = iter(jax.eval_shape(arrays_of))
    if all(other is None for other in others):
        return jax.eval_shape(init)  # not `arrays_of`, which hides the shardings of a jitted `init`
    leaves = [next(shapes) if other is None else other for other in others]
    return jax.tree.unflatten(treedefs[0], leaves)


def _is_array(leaf: object) -> bool:
    # numpy arrays would come back as jax arrays, maybe with fewer bits.
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
