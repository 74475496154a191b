"""Stores and restores the items of a step besides its state.

an object with a state   get_state/set_state or state_dict/load_state_dict: one file per process
a plain JSON value       one file
any other pytree         a tree, like the state
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jax.core import Tracer

from jaxckpt._core.check import calling, check_type
from jaxckpt._core.pytree import check_levels
from jaxckpt._core.transfer import detached
from jaxckpt._disk.found import Found
from jaxckpt._save.job import MOST_TOLD_BYTES
from jaxckpt._save.snapshot import FileItem, SaveItem, take_tree
from jaxckpt.errors import CorruptCheckpoint, TreeMismatch, UnsupportedLeaf
from jaxckpt.format import jsontext, names, typed_json
from jaxckpt.multihost import Processes
from jaxckpt.storage import corrupt


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
                f"restore_items(step=step, items={{{name!r}: like}}), which returns it."
            )


def set_state(name: str, value: object, state: Any) -> None:
    methods = _methods(value)
    assert methods is not None  # checked before anything was read
    with calling(f"item {name!r} when it was given its saved state"):
        methods[1](state)


def take_item(name: str, value: object, processes: Processes, **options: Any) -> SaveItem:
    """Copies an item to the host; the caller may change the value afterwards."""
    if is_stateful(value):
        return _take_state(name, value, processes)
    check_levels(value, f"item {name!r}")
    if typed_json.is_json(value):
        try:
            data = jsontext.dumps(value, allow_nan=True)
        except ValueError as error:
            raise UnsupportedLeaf(f"item {name!r} cannot be stored as JSON: {error}") from error
        text = data.decode()
        item = FileItem(name=name, told=lambda: text if len(data) <= MOST_TOLD_BYTES else None)
        item.common = lambda: {names.JSON_ITEM_FILE: str(item.heard or text).encode()}
        return item
    return take_tree(name, value, processes, copy=True, **options)


_NO_NUMBERS: Final = tuple("cmMOSU")  # kinds of dtypes


def take_metrics(metrics: Mapping[str, Any], found: Callable[[dict[str, Any]], None]) -> FileItem:
    """Returns the metrics as an item, which waits in the background for arrays being computed.

    Args:
        found: Called with the numbers in each process that writes them.
    """
    given = _mapped(_taken, "", metrics)
    item = FileItem(name=names.METRICS_ITEM)
    item.told = lambda: _mapped(lambda _, value: _number(value), "", given)

    def common() -> dict[str, bytes]:
        numbers: Any = item.told() if item.heard is None else item.heard
        found(numbers)
        return {names.METRICS_FILE: jsontext.dumps(numbers, allow_nan=True)}

    item.common = common
    return item


def _mapped(do: Callable[[str, Any], object], name: str, value: Any) -> Any:  # JSON, of metrics
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"names of metrics must be str, got {odd[0]!r}")
        return {key: _mapped(do, f"{name}/{key}" if name else key, v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(do, name, one) for one in value]
    return do(name, value)


def _taken(name: str, value: Any) -> object:
    if type(value) is str:
        value.encode()  # raises on an unpaired surrogate
    if isinstance(value, (bool, int, float, type(None))) or type(value) is str:
        return value
    if isinstance(value, Tracer):
        raise TypeError(f"metric {name!r} is traced; call save outside jit, grad and vmap")
    is_odd = getattr(getattr(value, "dtype", None), "kind", "") in _NO_NUMBERS
    if is_odd or math.prod(getattr(value, "shape", (2,))) != 1:
        raise TypeError(f"metric {name!r} must be one number, got {_short(value)}")
    if not getattr(value, "is_fully_replicated", True):
        raise ValueError(f"metric {name!r} is not replicated: average it first")
    return detached(value)


def _number(value: Any) -> object:  # a number of any library
    if isinstance(value, (str, type(None))) or type(value) in (bool, int, float):
        return value
    array = np.asarray(value).reshape(())
    # JSON has one kind of float; `item` of bfloat16 and similar dtypes returns no Python float.
    return array.item() if array.dtype.kind in "biu" else float(array)


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

    def common() -> dict[str, bytes]:
        # Orbax reads this file as JSON; Grain's handler for Orbax reads the files by process.
        state = jsontext.loads(data, file=file)
        said = {"form": form, "process_count": processes.count, "process_0": state}
        return {names.JSON_ITEM_FILE: jsontext.dumps(said, allow_nan=True)}

    return FileItem(name=name, mine={file: data}, common=common)


def _json_text(state: object) -> bytes | None:
    """Returns a state that already is JSON text, as in Grain's DataLoader; otherwise None."""
    if not isinstance(state, bytes):
        return None
    try:
        jsontext.loads(state, file="")  # as it will be read; the parser of JSON also takes UTF-16
    except CorruptCheckpoint:
        return None
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """The states of an object, one of each process that saved it. Each is read when asked for."""

    checkpoint: Found
    name: str
    path: str
    count: int  # of processes
    form: str

    def all(self, value: object = None) -> list[Any]:  # JSON, or bytes
        """Reads the states of all processes, as `set_state` takes them."""
        self._check_here(range(self.count))
        return [self._read(i, value) for i in range(self.count)]

    def of(self, value: Any, processes: Processes) -> Any:  # JSON, or bytes
        """Reads the state for this process's object, from all states if the count has changed.

        Raises:
            TreeMismatch: the states are of another number of processes, and cannot be divided anew.
        """
        if self.count == processes.count:
            self._check_here([processes.index])
            return self._read(processes.index, value)
        states = self.all(value)
        if callable(getattr(value, "merge_states", None)):
            what = f"merge_states or split_state of item {self.name!r}"
            with calling(f"{what}; states wanted: {processes.count}"):
                parts = value.split_state(value.merge_states(states), processes.count)
                return _divided(self.name, parts, processes.count)[processes.index]
        is_of_job = isinstance(first := states[0], dict) and _OF_JOB in first
        if is_of_job and typed_json.is_json(states) and all(s == first for s in states):
            return first
        raise TreeMismatch(
            f"item {self.name!r} of {self.path} has the states of {self.count} processes, but "
            f"there are {processes.count}, and jaxckpt cannot divide the data anew. Give "
            f"{type(value).__name__} the methods merge_states and split_state, or convert the "
            f"states in restore_items()[{self.name!r}] into {processes.count}."
        )

    def _check_here(self, processes: Iterable[int]) -> None:
        inside = self.checkpoint.contents(self.path)
        files = [names.process_file(i, self.count) for i in processes]
        if lacking := [f"{self.name}/{file}" for file in files if file not in inside]:
            raise self.checkpoint.not_here(lacking[0], [(None, file) for file in lacking])

    def _read(self, process: int, value: object) -> Any:  # JSON, or bytes
        file = names.process_file(process, self.count)
        data = self.checkpoint.read(self.path, file)
        if self.form == "text":
            return data
        state = jsontext.loads(data, file=f"{self.path}/{file}")
        if self.form == "json":
            return typed_json.decode(state, file=f"{self.path}/{file}")
        is_text = isinstance(state, dict) and _OF_LOADER in state
        if self.form == "grain" and (methods := _methods(value)) is not None:
            is_text = isinstance(methods[0](), bytes)
        return data if is_text else state


def _divided(name: str, parts: Any, count: int) -> list[Any]:  # JSON, or bytes
    """Returns the states that `split_state` has made; a dict is one state, and not divided."""
    who, wanted = f"item {name!r}", f"a list of {count}, one state per process"
    check_type(who, "the result of split_state", parts, list | tuple | Iterator, wanted)
    if len(states := [*parts]) != count:
        raise ValueError(f"{who}: the result of split_state must be {wanted}, got {len(states)}")
    return states


# This key distinguishes a state of Grain's DataLoader, which is bytes, from a dataset's state.
_OF_LOADER: Final = "last_seen_indices"
# A state with this key, as of Grain's ElasticIterator, is one position for the whole job.
_OF_JOB: Final = "global_next_index"


def read_states(checkpoint: Found, name: str) -> States | None:
    """Returns the states of an object, not read yet; None for another kind of item."""
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
    missing = any(names.process_file(i, count) not in inside for i in range(count))
    if len(counts) > 1 or (missing and checkpoint.part is None):
        raise corrupt(path, f"should contain {count} states, but has {sorted(inside)}")
    form = "grain"
    if names.JSON_ITEM_FILE in inside:
        file = f"{path}/{names.JSON_ITEM_FILE}"
        data = checkpoint.read(path, names.JSON_ITEM_FILE)
        said = jsontext.expect(jsontext.loads(data, file=file), dict, "the file", file=file)
        form = said.get("form", form)
    return States(checkpoint=checkpoint, name=name, path=path, count=count, form=form)


def state_for(found: Found, name: str, value: object, processes: Processes) -> Any:
    """Reads the state for this process's object.

    Raises:
        TreeMismatch: the item lacks states, or they do not fit this number of processes.
    """
    states = read_states(found, name)
    if states is None:
        raise TreeMismatch(
            f"item {name!r} of {found.path} is not the state of an object. Read it by "
            "restore_items()."
        )
    return states.of(value, processes)


def _short(value: object) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"an array of shape {tuple(shape)}"
