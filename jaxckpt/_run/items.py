"""Stores and restores the items of a step besides its state.

an object with a state   get_state/set_state or state_dict/load_state_dict: one file per process
a plain JSON value       one file
any other pytree         a tree, like the state
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from jaxckpt._core.check import calling
from jaxckpt._core.pytree import check_levels
from jaxckpt._core.transfer import detached
from jaxckpt._disk.found import Found
from jaxckpt._save.snapshot import FileItem, SaveItem, take_tree
from jaxckpt.errors import CheckpointNotFound, CorruptCheckpoint, TreeMismatch, UnsupportedLeaf
from jaxckpt.format import jsontext, names, typed_json
from jaxckpt.multihost import Processes


def is_stateful(value: object) -> bool:
    """Returns whether an object has methods for its state, like a data iterator."""
    return _methods(value) is not None


def _methods(value: object) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    for get, set_ in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        getter, setter = getattr(value, get, None), getattr(value, set_, None)
        if callable(getter) and callable(setter) and not isinstance(value, type):
            return getter, setter
    return None


def check_stateful(objects: Mapping[str, object]) -> None:
    for name, value in objects.items():
        if not is_stateful(value):
            raise TypeError(
                f"item {name!r} cannot be restored in place: {type(value).__name__} has neither "
                "set_state nor load_state_dict. To restore it onto a target, call "
                f"restore_items(step, items={{{name!r}: like}}), which returns it."
            )


def set_state(name: str, value: object, state: Any) -> None:
    methods = _methods(value)
    assert methods is not None  # checked before anything was read
    with calling(f"item {name!r} when it was given its saved state"):
        methods[1](state)


def take_item(
    name: str,
    value: object,
    processes: Processes,
    **options: Any,
) -> SaveItem:
    """Copies an item to the host; the caller may change the value afterwards.

    Args:
        options: As in `take_tree`.
    """
    if is_stateful(value):
        return _take_state(name, value, processes)
    check_levels(value, f"item {name!r}")
    if typed_json.is_json(value):
        try:
            data = jsontext.dumps(value, allow_nan=True)
        except ValueError as error:
            raise UnsupportedLeaf(f"item {name!r} cannot be stored as JSON: {error}") from error
        return FileItem(name=name, common=lambda: {names.JSON_ITEM_FILE: data})
    return take_tree(name, value, processes, copy=True, **options)


def take_metrics(metrics: Mapping[str, Any], found: Callable[[dict[str, Any]], None]) -> FileItem:
    """Returns the metrics as an item, which waits in the background for arrays being computed.

    Args:
        found: Called with the numbers in the process that writes them.
    """
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"names of metrics must be str, got {name!r}")
        if not isinstance(value, (str, bool, int, float, type(None))) and (
            math.prod(getattr(value, "shape", (2,))) != 1
        ):
            raise TypeError(f"metric {name!r} must be one number, got {_short(value)}")
        if not getattr(value, "is_fully_replicated", True):
            raise ValueError(f"metric {name!r} is not replicated: average it first")
    given = {name: detached(value) for name, value in metrics.items()}

    def common() -> dict[str, bytes]:
        numbers = {name: _number(value) for name, value in given.items()}
        found(numbers)
        return {names.METRICS_FILE: jsontext.dumps(numbers, allow_nan=True)}

    return FileItem(name=names.METRICS_ITEM, common=common)


def _number(value: Any) -> object:  # a number of any library
    if isinstance(value, (str, type(None))) or type(value) in (bool, int, float):
        return value
    array = np.asarray(value)
    # JSON has one kind of float; `item` of bfloat16 and similar dtypes returns no Python float.
    kind = array.dtype.kind
    return array.reshape(()).item() if kind in "biu" else float(array.reshape(()))


def _take_state(name: str, value: object, processes: Processes) -> FileItem:
    methods = _methods(value)
    assert methods is not None
    with calling(f"the method for the state of item {name!r}; nothing was saved"):
        state = methods[0]()
    try:
        text = _json_text(state)
        form = "json" if text is None else "text"
        data = jsontext.dumps(typed_json.encode(state), allow_nan=True) if text is None else text
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedLeaf(
            f"the state of item {name!r} cannot be stored: {error}. It may contain numbers, text, "
            "bytes, numpy arrays, and lists, tuples and dicts of these."
        ) from error
    file = names.process_file(processes.index, processes.count)
    count = processes.count

    def common() -> dict[str, bytes]:
        # Orbax reads this file as JSON; Grain's handler for Orbax reads the files by process.
        said = {"form": form, "process_count": count, "process_0": json.loads(data)}
        return {names.JSON_ITEM_FILE: jsontext.dumps(said, allow_nan=True)}

    return FileItem(name=name, mine={file: data}, common=common)


def _json_text(state: object) -> bytes | None:
    """Returns a state that already is JSON text, as in Grain's DataLoader; otherwise None."""
    if not isinstance(state, bytes):
        return None
    try:
        json.loads(state)
    except ValueError:
        return None
    return state


def read_states(checkpoint: Found, name: str) -> list[Any] | None:
    """Returns the states of an object from all processes; None for another kind of item."""
    if name not in checkpoint.items:
        problem = f"{checkpoint.path} has no item {name!r}; it has {', '.join(checkpoint.items)}."
        if name in checkpoint.removed:
            problem = checkpoint.was_removed(name)
        raise TreeMismatch(f"{problem} Restore without the item, or choose another step.")
    path = checkpoint.items[name]
    inside = checkpoint.contents(path)
    counts = {count for file in inside if (count := names.process_count(file)) is not None}
    if not counts:
        return None
    count = max(counts)
    missing = [i for i in range(count) if names.process_file(i, count) not in inside]
    if len(counts) > 1 or not all(map(checkpoint.is_elsewhere, missing)):
        raise CorruptCheckpoint(
            f"{path} should contain {count} states, but has {sorted(inside)}", file=path
        )
    form = "grain"
    if names.JSON_ITEM_FILE in inside:
        file = f"{path}/{names.JSON_ITEM_FILE}"
        data = checkpoint.read(path, names.JSON_ITEM_FILE)
        said = jsontext.expect(jsontext.loads(data, file=file), dict, "the file", file=file)
        form = said.get("form", form)
    files = [names.process_file(i, count) for i in range(count)]
    return [
        _Elsewhere(checkpoint.not_here(f"{name}/{file}"))
        if i in missing
        else _read_state(checkpoint, path, file, form)
        for i, file in enumerate(files)
    ]


def _read_state(checkpoint: Found, path: str, name: str, form: str) -> Any:  # JSON
    data = checkpoint.read(path, name)
    value = jsontext.loads(data, file=f"{path}/{name}")
    if form == "json":
        return typed_json.decode(value, file=f"{path}/{name}")
    return data if form == "text" else _GrainState((data, value))


# This key distinguishes a state of Grain's DataLoader, which is bytes, from a dataset's state.
_OF_LOADER: Final = "last_seen_indices"


class _GrainState(tuple[bytes, Any]):
    """A state written by Grain's handler, as bytes and parsed; the object takes one of them."""

    __slots__ = ()


class _Elsewhere(NamedTuple):
    """Stands in for a state on the disk of another host."""

    error: CheckpointNotFound  # to raise when the state is read


def plain(state: Any) -> Any:  # JSON, or bytes
    """Returns a state as `set_state` takes it, without an object to ask."""
    if isinstance(state, _Elsewhere):
        raise state.error
    if not isinstance(state, _GrainState):
        return state
    data, value = state
    return data if isinstance(value, dict) and _OF_LOADER in value else value


def state_for(
    value: object, states: Sequence[Any] | None, *, name: str, path: str, processes: Processes
) -> Any:
    """Returns the state for this process's object.

    Raises:
        TreeMismatch: the item has no states, or of a different number of processes.
    """
    if states is None:
        raise TreeMismatch(
            f"item {name!r} of {path} is not the state of an object. Read it by restore_items()."
        )
    if len(states) != processes.count:
        raise TreeMismatch(
            f"item {name!r} of {path} has the states of {len(states)} processes, but there are "
            f"{processes.count}, and jaxckpt cannot divide the data anew. Convert the states in "
            f"restore_items()[{name!r}] into {processes.count}."
        )
    state = states[processes.index]
    if isinstance(state, _Elsewhere):
        raise state.error
    if isinstance(state, _GrainState):
        methods = _methods(value)
        assert methods is not None
        return state[0] if isinstance(methods[0](), bytes) else state[1]
    return state


def _short(value: object) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"an array of shape {tuple(shape)}"
