"""Reads the state or the items of a step, from each copy that a restore tries."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Final, TypeVar, final

import jax

from jaxckpt._core.check import check_names, meant
from jaxckpt._core.log import logger
from jaxckpt._disk.find import at_rest
from jaxckpt._disk.found import Found, while_current
from jaxckpt._disk.item import open_item, stand_in
from jaxckpt._progress.meter import Meter
from jaxckpt._restore.match import RestoreRequest
from jaxckpt._restore.restore import Source, restore_from
from jaxckpt._run import items as _items
from jaxckpt._run.facts import check_found
from jaxckpt._run.index import StepIndex
from jaxckpt.multihost import Processes

T = TypeVar("T")
Check = Callable[[Found | None], None]
_OPTIONS: Final = tuple(x.name for x in fields(RestoreRequest) if x.name != "unmatched")


def request_of(who: str, options: Mapping[str, Any], **defaults: Any) -> RestoreRequest:
    """Returns the request for a call with these options of `jaxckpt.restore`."""
    check_names(f"{who} takes no argument", options, _OPTIONS, _suggest_option)
    return RestoreRequest(**{**defaults, **options})


def _suggest_option(name: str, known: Sequence[str]) -> str:
    return meant("restore", name, [*known, "like", "items", "fallback"])


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
    start_s: float = field(default_factory=time.monotonic)
    meter: Meter = field(init=False)  # of the step read last
    _states: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _items.check_stateful(self.objects)

    def read(self, index: StepIndex, step: int, check: Check) -> Any:
        self.meter = Meter("restore", index.path(step), step=step)
        source = _source(index, self.run, step, check, self._open)
        return restore_from(source, [self.like], self.request, meter=self.meter)

    def _open(self, found: Found) -> Any:  # an Item
        for name, value in self.objects.items():
            self._states[name] = _items.state_for(found, name, value, self.processes)
        item = self.item if self.item in found.items else stand_in(found, self.item)
        return open_item(found, item)

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
        source = _source(index, self.run, step, check, lambda found: found)
        # Found once, so that all items come from one save.
        found: Found = restore_from(source, [None], self.request)
        within = partial(while_current, found)

        def read(name: str, like: Any) -> Any:
            opened = _source(index, self.run, step, check, partial(self._item, name, like))
            target = None if _items.is_stateful(like) else like
            return restore_from(replace(opened, within=within), [target], self.request)

        targets = dict.fromkeys(found.items) if self.targets is None else self.targets
        return {name: read(name, like) for name, like in targets.items()}

    def _item(self, name: str, target: Any, found: Found) -> Any:
        """Returns an `Item`, or the value of the item."""
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
        check_found(index, step, found)
        return open_(found)

    return Source(where=path, within=within, open=open_checked, name=f"{run}/{step}")


def shapes_of(init: Callable[[], Any]) -> Any:  # any pytree
    """Returns the result of `init` with shapes in place of jax arrays, computing none if possible.

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
    except Exception as error:  # as at the first start, it may ask for values
        logger.warning(
            "init was called for the shapes, as jax cannot trace it: %s", repr(error)[:200]
        )
        return init()
    if all(other is None for other in others):
        return jax.eval_shape(init)  # not `arrays_of`, which hides the shardings of a jitted `init`
    leaves = [next(shapes) if other is None else other for other in others]
    return jax.tree.unflatten(treedefs[0], leaves)


def _is_array(leaf: object) -> bool:
    # numpy arrays would come back as jax arrays, maybe with fewer bits.
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
