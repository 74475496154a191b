"""Reads a step of a run, and falls back to the one before if it turns out to be damaged."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import jax

from jaxckpt._disk import find as _discovery
from jaxckpt._disk.native import read_item
from jaxckpt._progress.meter import Meter
from jaxckpt._progress.timing import Timing
from jaxckpt._restore import restore as _restore
from jaxckpt._run import items as _items
from jaxckpt._run.retention import KeepPolicy, StepInfo
from jaxckpt._run.run import Run
from jaxckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptCheckpoint,
    ProcessesDisagree,
)
from jaxckpt.multihost import Processes, lead, meet

T = TypeVar("T")

_POLL_S: Final = 0.5
# The error of a process that finds a step damaged, and the word for it in a report.
_DAMAGE: Final = {"corrupt": CorruptCheckpoint, "absent": CheckpointNotFound}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Finds and reads steps of a run, the same ones in every process.

    Attributes:
        keep: Says which steps are the best.
        writes: Whether damaged steps are set aside; else steps are held while they are read.
    """

    run: Run
    processes: Processes
    keep: KeepPolicy
    timeout_s: float
    writes: bool

    def candidates(self, step: Any) -> list[int]:
        """The steps to try for "latest", "best" or a number, in order."""
        name = f"manager {self.run.root}/steps"
        return lead(
            self.processes,
            name,
            lambda: self._ordered(step),
            place=self.run.root,
            timeout_s=self.timeout_s,
        )

    def _ordered(self, step: Any) -> list[int]:
        if step == "latest":
            return sorted({*self.run.steps(), *self.run.torn()}, reverse=True)
        if step == "best":
            return [info.step for info in self.ranked()]
        number = operator.index(step)
        self.run.check_step(number)
        return [number]

    def ranked(self) -> list[StepInfo]:
        """The steps by the metric of the policy, the best first."""
        if self.keep.metric is None:
            raise ValueError("no step is the best: KeepPolicy has no metric to rank by")
        return self.keep.ranked(map(self.run.info, self.run.steps()))

    def state(
        self,
        steps: Sequence[int],
        like: Any,  # any pytree
        objects: Mapping[str, object],
        options: Mapping[str, Any],
        *,
        fallback: bool,
        took: Callable[[Timing], None],
    ) -> tuple[int, Any]:
        """Restores the first whole step, and the objects in place; returns its number and state."""
        for name, value in objects.items():
            if not _items.is_stateful(value):
                raise TypeError(
                    f"item {name!r} is restored in place, and {type(value).__name__} has neither "
                    "set_state nor load_state_dict. restore_items() returns what was saved."
                )

        def read(step: int) -> tuple[Any, dict[str, Any], Timing]:
            meter = Meter("restore", self.run.path(step), step=step)
            state, states = read_step(
                self.run,
                step,
                like,
                objects,
                self.processes,
                {"timeout_s": self.timeout_s, "meter": meter, **options},
            )
            return state, states, meter.timing()

        step, (state, states, timing) = self.first_whole(steps, read, fallback=fallback)
        took(timing)
        for name, found in states.items():
            _items.set_state(objects[name], found)
        return step, state

    def items(self, steps: Sequence[int], *, fallback: bool) -> tuple[int, dict[str, Any]]:
        """Reads every item of the first whole step."""
        return self.first_whole(
            steps,
            lambda step: read_everything(self.run, step, timeout_s=self.timeout_s),
            fallback=fallback,
        )

    def first_whole(
        self, steps: Sequence[int], read: Callable[[int], T], *, fallback: bool
    ) -> tuple[int, T]:
        """Reads the first step that is whole; every process reads the same one.

        Raises:
            CorruptCheckpoint, CheckpointNotFound: none is, or the first is not and that is all
                there may be.
            ProcessesDisagree: another process failed.
        """
        damaged: list[tuple[int, Exception | None, str]] = []
        for step in steps:
            outcome, result, error = self._try(step, read)
            if outcome is not None:
                outcome, result, error = self._try(step, read)  # to set aside, seen twice
            if outcome is None:
                # Not before: a run without a whole step must not look like a new one.
                for bad, why, text in damaged:
                    self._skip(bad, why, text)
                return step, result  # pyright: ignore[reportReturnType]  # no error, so a T
            if not fallback:
                raise error or _other_failed(self.run.path(step), outcome)
            damaged.append((step, error, outcome))
        raise CheckpointNotFound(
            f"{self.run.root} has no step that can be restored. Of {len(steps)}:\n  "
            + "\n  ".join(f"step {step}: {text}" for step, _, text in damaged[:10])
            + "\nThey stay as they are. To start anew, use another directory or move them away."
        )

    def _try(
        self, step: int, read: Callable[[int], T]
    ) -> tuple[str | None, T | None, Exception | None]:
        """What is wrong with a step, in words that are the same in every process, or its value.

        Raises:
            Exception: what this or another process failed with, if it is not about the step.
        """
        result, error = None, None
        try:
            result = self._read(step, read)
        except Exception as caught:  # told to the others, then judged
            error = caught
        mark = next((m for m, kind in _DAMAGE.items() if isinstance(error, kind)), "")
        name = f"manager {self.run.root}/restored"
        met = meet(self.processes, name, None, error, timeout_s=self.timeout_s, mark=mark)
        if not met.problems:
            return None, result, None
        if any(met.marks.values()):
            first = next(met.problems[i] for i, mark in met.marks.items() if mark)
            if not mark and "corrupt" in met.marks.values():
                return first, None, _other_failed(self.run.path(step), first)
            return first, None, error if mark else None
        own = None if isinstance(error, ProcessesDisagree) else error
        met.check(own, f"step {step} of {self.run.root} was not restored")
        raise AssertionError  # `check` raises where there are problems

    def _read(self, step: int, read: Callable[[int], T]) -> T:
        if self.writes:
            return read(step)
        with self.run.leased(step):
            return read(step)

    def _skip(self, step: int, error: Exception | None, outcome: str) -> None:
        if self.writes and self.processes.index == 0 and isinstance(error, CorruptCheckpoint):
            self.run.set_aside(step, outcome, file=error.file)
        else:
            self.run.report(f"step {step} cannot be restored, and is skipped: {outcome}")


def _other_failed(path: str, outcome: str) -> CheckpointError:
    return CorruptCheckpoint(f"{path}: another process found it damaged: {outcome}", file=path)


def read_step(
    run: Run,
    step: int,
    like: Any,  # any pytree
    items: Mapping[str, object],
    processes: Processes,
    options: Mapping[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """The state of a step, and for each of `items` the state that its object is to go on from."""
    path = run.path(step)
    states: dict[str, Any] = {}

    def load() -> Any:  # an Item
        checkpoint = run.check_whole(step)
        _items.check_present(checkpoint, items)
        for name, value in items.items():
            found = _items.read_states(checkpoint, name)
            states[name] = _items.state_for(value, found, name=name, path=path, processes=processes)
        return read_item(checkpoint, _discovery.choose_item(checkpoint, None))

    target = [like]
    del like  # so that its arrays are free once the caller has let go of them
    return _restore.restore_from(load, run.storage, path, target, **options), states


def read_everything(run: Run, step: int, *, timeout_s: float) -> dict[str, Any]:
    """Every item of a step by name: trees, JSON, and lists of the states of data iterators."""
    path = run.path(step)

    def item(name: str) -> Any:  # an Item, or what it is already
        checkpoint = run.check_whole(step)
        states = _items.read_states(checkpoint, name)
        if states is not None:
            return states
        file = _discovery.json_file(run.storage, checkpoint.items[name])
        if file is not None:
            return _discovery.read_json_item(checkpoint, file)
        return read_item(checkpoint, name)

    def read(load: Callable[[], Any]) -> Any:
        return _restore.restore_from(load, run.storage, path, [None], timeout_s=timeout_s)

    return {
        name: read(partial(item, name)) for name in read(lambda: [*run.check_whole(step).items])
    }


def watch(run: Run, timeout_s: float, after: int | None) -> Iterator[int]:
    """New committed steps as they come; each is leased while the caller is at it."""
    waiting = threading.Event()  # never set: a wait that signals interrupt
    last = after
    deadline_s = time.monotonic() + timeout_s
    while True:
        steps = run.steps()
        new = steps[-1:] if last is None else [n for n in steps if n > last]
        for step in new:
            last = step
            with run.leased(step) as there:
                if there:
                    yield step
                    deadline_s = time.monotonic() + timeout_s
        left_s = deadline_s - time.monotonic()
        if not new and left_s <= 0:
            return
        if not new:
            waiting.wait(min(_POLL_S, left_s))


def shapes_of(init: Callable[[], Any]) -> Any:  # any pytree
    """What `init` returns, with shapes in place of arrays, without computing any.

    Other values (Python numbers, str, numpy arrays) are as they are. Where `init` is jitted with
    `out_shardings`, the shapes have those.
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
        return jax.eval_shape(init)  # itself, since a jitted one knows its shardings
    leaves = [next(shapes) if other is None else other for other in others]
    return jax.tree.unflatten(treedefs[0], leaves)


def _is_array(leaf: object) -> bool:
    # Not those of numpy: they would come back as arrays of jax, of fewer bits.
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
