"""The items of a step beside its state: what each value becomes on disk, and how it comes back.

an object with a state   get_state/set_state or state_dict/load_state_dict: one file per process
a plain JSON value       one file
any other pytree         a tree, like the state
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from jaxckpt._disk.found import Found
from jaxckpt._save.snapshot import FileItem, Item, take_tree
from jaxckpt.errors import CorruptCheckpoint, TreeMismatch, UnsupportedLeaf
from jaxckpt.format import jsontext, names, typed_json
from jaxckpt.multihost import Processes

_MAX_NAME: Final = 128


def is_stateful(value: object) -> bool:
    """Whether an object gives and takes its own state: a data iterator, mostly."""
    return _methods(value) is not None


def _methods(value: object) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    for get, set_ in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        getter, setter = getattr(value, get, None), getattr(value, set_, None)
        if callable(getter) and callable(setter) and not isinstance(value, type):
            return getter, setter
    return None


def check_stateful(objects: Mapping[str, object]) -> None:
    """Raises TypeError if an object cannot take a state."""
    for name, value in objects.items():
        if not is_stateful(value):
            raise TypeError(
                f"item {name!r} is restored in place, and {type(value).__name__} has neither "
                "set_state nor load_state_dict. restore_items() returns what was saved."
            )


def set_state(value: object, state: Any) -> None:
    """Hands an object the state that it is to go on from."""
    methods = _methods(value)
    assert methods is not None  # checked before anything was read
    methods[1](state)


def check_names(items: Mapping[str, object]) -> None:
    """Refuses names that an item cannot have."""
    for name in items:
        taken = (names.STATE_ITEM, names.METRICS_ITEM, names.DEFAULT_ITEM, *names.TOP_FILES)
        if not isinstance(name, str) or not name or len(name) > _MAX_NAME:
            raise ValueError(f"{name!r} is no name for an item")
        if name in taken or names.is_reserved(name) or names.is_part_of_tree(name):
            raise ValueError(f"an item cannot be called {name!r}: the name has a meaning already")
        if name.startswith(".") or any(mark in name for mark in "/\\\0"):
            raise ValueError(f"{name!r} is no name for an item: it is that of a directory")


def take_item(name: str, value: object, processes: Processes) -> Item:
    """What a save holds of an item; the caller may change the value afterwards."""
    if is_stateful(value):
        return _take_state(name, value, processes)
    if typed_json.is_json(value):
        try:
            data = jsontext.dumps(value, allow_nan=True)
        except ValueError as error:
            raise UnsupportedLeaf(f"item {name!r} is no JSON: {error}") from error
        return FileItem(name=name, shared=lambda: {names.JSON_ITEM_FILE: data})
    return take_tree(name, value, processes, copy=True)


def take_metrics(metrics: Mapping[str, Any], found: Callable[[dict[str, Any]], None]) -> FileItem:
    """The metrics of a step. Those that a device still computes are waited for in the background.

    Args:
        found: Is called with the numbers, once they are there, in the process that writes them.
    """
    # Those of numpy may be changed by the caller; those of jax cannot.
    held = {
        name: value.copy() if isinstance(value, np.ndarray) else value
        for name, value in metrics.items()
    }
    for name, value in held.items():
        if not isinstance(name, str):
            raise TypeError(f"metrics are named by str, not {name!r}")
        if not isinstance(value, (str, bool, int, float, type(None))) and (
            math.prod(getattr(value, "shape", (2,))) != 1
        ):
            raise TypeError(f"metric {name!r} must be one number, not {_short(value)}")
        if not getattr(value, "is_fully_replicated", True):
            raise ValueError(f"metric {name!r} is split over processes: average it first")

    def shared() -> dict[str, bytes]:
        numbers = {name: _number(value) for name, value in held.items()}
        found(numbers)
        return {names.METRICS_FILE: jsontext.dumps(numbers, allow_nan=True)}

    return FileItem(name=names.METRICS_ITEM, shared=shared)


def _number(value: Any) -> object:  # a number of any library
    if isinstance(value, (str, type(None))) or type(value) in (bool, int, float):
        return value
    array = np.asarray(value)
    # JSON has one kind of float; bfloat16 and its like have no `item` that Python knows.
    kind = array.dtype.kind
    return array.reshape(()).item() if kind in "biu" else float(array.reshape(()))


def _take_state(name: str, value: object, processes: Processes) -> FileItem:
    methods = _methods(value)
    assert methods is not None
    state = methods[0]()
    try:
        text = _json_text(state)
        form = "json" if text is None else "text"
        data = jsontext.dumps(typed_json.encode(state), allow_nan=True) if text is None else text
    except (TypeError, ValueError) as error:
        raise UnsupportedLeaf(
            f"the state of item {name!r} cannot be stored: {error}. It may hold numbers, text, "
            "bytes, numpy arrays, and lists, tuples and dicts of them."
        ) from error
    file = names.process_file(processes.index, processes.count)
    count = processes.count

    def shared() -> dict[str, bytes]:
        # Orbax reads this one as JSON; Grain's handler for Orbax reads the other kind.
        said = {"form": form, "process_count": count, "process_0": json.loads(data)}
        return {names.JSON_ITEM_FILE: jsontext.dumps(said, allow_nan=True)}

    return FileItem(name=name, mine={file: data}, shared=shared)


def _json_text(state: object) -> bytes | None:
    """The bytes of a state that is a JSON text already, as that of Grain's DataLoader is."""
    if not isinstance(state, bytes):
        return None
    try:
        json.loads(state)
    except ValueError:
        return None
    return state


def read_states(checkpoint: Found, name: str) -> list[Any] | None:
    """The states of an item in all processes that saved it; None if it is no such item."""
    if name not in checkpoint.items:
        raise TreeMismatch(
            f"{checkpoint.path} has no item {name!r}; it has {', '.join(checkpoint.items)}. "
            "Restore without it, or another step."
        )
    path = checkpoint.items[name]
    inside = checkpoint.contents(path)
    counts = {count for file in inside if (count := names.process_count(file)) is not None}
    if not counts:
        return None
    count = max(counts)
    missing = [i for i in range(count) if names.process_file(i, count) not in inside]
    if len(counts) > 1 or missing:
        raise CorruptCheckpoint(
            f"{path} should hold {count} states, it has {sorted(inside)}", file=path
        )
    form = "grain"
    if names.JSON_ITEM_FILE in inside:
        file = f"{path}/{names.JSON_ITEM_FILE}"
        data = checkpoint.read(path, names.JSON_ITEM_FILE)
        said = jsontext.expect(jsontext.loads(data, file=file), dict, "the file", file=file)
        form = said.get("form", form)
    return [_read_state(checkpoint, path, names.process_file(i, count), form) for i in range(count)]


def _read_state(checkpoint: Found, path: str, name: str, form: str) -> Any:  # JSON
    data = checkpoint.read(path, name)
    value = jsontext.loads(data, file=f"{path}/{name}")
    if form == "json":
        return typed_json.decode(value, file=f"{path}/{name}")
    return data if form == "text" else _GrainState((data, value))


class _GrainState(tuple[bytes, Any]):
    """A state that Grain's own handler wrote: the object that takes it knows which of the two."""

    __slots__ = ()


def state_for(
    value: object, states: Sequence[Any] | None, *, name: str, path: str, processes: Processes
) -> Any:
    """The state for this process's object.

    Raises:
        TreeMismatch: there is none, or another number of processes saved.
    """
    if states is None:
        raise TreeMismatch(
            f"item {name!r} of {path} is no state of an object. Read it with restore_items()."
        )
    if len(states) != processes.count:
        raise TreeMismatch(
            f"item {name!r} of {path} holds the states of {len(states)} processes, and there are "
            f"{processes.count}: which data each would go on with is not known. Take the states "
            f"from restore_items()[{name!r}], and make {processes.count} of them."
        )
    state = states[processes.index]
    if isinstance(state, _GrainState):
        methods = _methods(value)
        assert methods is not None
        return state[0] if isinstance(methods[0](), bytes) else state[1]
    return state


def _short(value: object) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"an array of shape {tuple(shape)}"
