"""Reads a step of a run, and falls back to the one before if it turns out to be damaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np

from jaxckpt import _discovery, _items, _restore
from jaxckpt._item import read_item
from jaxckpt._job import text_of
from jaxckpt._run import Run
from jaxckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptCheckpoint,
    ProcessesDisagree,
)
from jaxckpt.multihost import Processes

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """How to look for a step that can be read.

    Attributes:
        name: Where the processes meet.
        fallback: Whether to go on to the next step after one that is damaged.
        writes: Whether damaged steps are set aside.
    """

    run: Run
    processes: Processes
    name: str
    timeout_s: float
    fallback: bool
    writes: bool

    def first_whole(self, steps: Sequence[int], read: Callable[[int], T]) -> tuple[int, T]:
        """Reads the first step that is whole; every process reads the same one.

        Raises:
            CorruptCheckpoint, CheckpointNotFound: none is, or the first is not and that is all
                there may be.
            ProcessesDisagree: another process failed.
        """
        damaged: list[str] = []
        for step in steps:
            outcome, result, error = self._try(step, read)
            if outcome is not None:
                outcome, result, error = self._try(step, read)  # to set aside, seen twice
            if outcome is None:
                return step, result  # pyright: ignore[reportReturnType]  # no error, so a T
            if not self.fallback:
                raise error or _other_failed(self.run.path(step), outcome)
            damaged.append(f"step {step}: {outcome}")
            self._skip(step, error, outcome)
        raise CheckpointNotFound(
            f"{self.run.root} has no step that can be restored. Of {len(steps)}:\n  "
            + "\n  ".join(damaged[:10])
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
            result = read(step)
        except Exception as caught:  # told to the others, then judged
            error = caught
        damaged = isinstance(error, CorruptCheckpoint | CheckpointNotFound)
        said = {"problem": text_of(error), "damaged": damaged}
        all_said: list[Any] = self.processes.gather(
            f"{self.name}/restored", said, timeout_s=self.timeout_s
        )
        problems = {i: one["problem"] for i, one in enumerate(all_said) if one["problem"]}
        if not problems:
            return None, result, None
        if any(one["damaged"] for one in all_said):
            first = next(one["problem"] for one in all_said if one["damaged"])
            return first, None, error if damaged else None
        if error is not None and not isinstance(error, ProcessesDisagree):
            raise error
        raise ProcessesDisagree(
            f"step {step} of {self.run.root} was not restored:\n"
            + "\n".join(f"  process {i}: {text}" for i, text in problems.items()),
            problems,
        )

    def _skip(self, step: int, error: Exception | None, outcome: str) -> None:
        if self.writes and self.processes.index == 0 and isinstance(error, CorruptCheckpoint):
            self.run.set_aside(step, outcome)
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


def read_everything(run: Run, step: int) -> dict[str, Any]:
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
        return _restore.restore_from(load, run.storage, path, [None])

    return {
        name: read(partial(item, name)) for name in read(lambda: [*run.check_whole(step).items])
    }


def shapes_of(init: Callable[[], Any]) -> Any:  # any pytree
    """What `init` returns, with shapes in place of arrays, without computing any.

    Values that are no arrays (Python numbers, str) are as they are. Where `init` is jitted with
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
    return isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
