"""Says what to save or restore, with which handler, and how to store or restore one leaf.

The objects of Orbax itself are understood by the names of their classes.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

import jax

from jaxckpt.orbax._records import record

C = TypeVar("C", bound=type)


class CheckpointArgs:
    """The base of all args; a program's own are dataclasses below it."""


_HANDLERS: Final[dict[str, dict[type, type]]] = {"save": {}, "restore": {}}  # by class of args


def register_with_handler(
    handler_cls: type, for_save: bool = False, for_restore: bool = False
) -> Callable[[C], C]:
    """Returns a decorator that ties a class of args to the handler that takes them."""
    if not (for_save or for_restore):
        raise ValueError("for_save and for_restore cannot both be False")

    def register(cls: C) -> C:
        if not is_args_class(cls):
            raise TypeError(f"{cls} must subclass CheckpointArgs")
        for verb, wanted in (("save", for_save), ("restore", for_restore)):
            if wanted:
                _HANDLERS[verb][cls] = handler_cls
        return cls

    return register


def is_args_class(cls: type) -> bool:
    """Returns whether a class is one of args, Orbax's own included."""
    return any(base.__name__ == CheckpointArgs.__name__ for base in cls.__mro__)


def is_args(value: object) -> bool:
    """Returns whether a value is args, Orbax's own included."""
    return is_args_class(type(value))


def registered_handlers() -> list[type]:
    """Returns the classes of handlers that have args."""
    return [*_HANDLERS["restore"].values()]


def get_registered_handler_cls(arg: Any) -> type:
    """Returns the class of handlers for args or their class."""
    cls = arg if inspect.isclass(arg) else type(arg)
    if not is_args_class(cls):
        raise TypeError(f"{cls} must subclass CheckpointArgs")
    found = _HANDLERS["save"].get(cls) or _HANDLERS["restore"].get(cls)
    if found is None:
        theirs = _theirs()
        if theirs is None or not issubclass(cls, theirs.CheckpointArgs):
            raise ValueError(f"no handler is registered for {cls}; see register_with_handler")
        return theirs.get_registered_handler_cls(cls)
    return found


def _theirs() -> Any:
    """Returns the module in which a library such as Grain registers its args, if it is imported."""
    return sys.modules.get("orbax.checkpoint.args")


def get_registered_args_cls(handler: Any) -> tuple[type, type]:
    """Returns the classes of args with which a handler saves and restores."""
    if (found := _args_of(handler)) is None:
        raise ValueError(
            f"no CheckpointArgs are registered for {handler}; see register_with_handler"
        )
    return found


def has_registered_args(handler: Any) -> bool:
    """Returns whether args are registered for a handler."""
    return _args_of(handler) is not None


def _args_of(handler: Any) -> tuple[type, type] | None:
    cls = handler if inspect.isclass(handler) else type(handler)
    save, restore = (
        next((args for args, theirs in _HANDLERS[verb].items() if theirs is cls), None)
        for verb in ("save", "restore")
    )
    if save is not None and restore is not None:
        return save, restore
    theirs = _theirs()
    if theirs is None or not theirs.has_registered_args(handler):
        return None
    return theirs.get_registered_args_cls(handler)


# --- the args of the built-in handlers -------------------------------------------------------


class _OfItem(CheckpointArgs):
    def __post_init__(self) -> None:
        if is_args(getattr(self, "item", None)):
            raise ValueError(f"`item` of {type(self).__name__} must not be args; pass `args=`")


StandardSave = record("StandardSaveArgs", "item save_args=None custom_metadata=None", _OfItem)
StandardRestore = record(
    "StandardRestoreArgs",
    "item=None strict=True support_layout=False",
    _OfItem,
    fallback_sharding=None,
)
PyTreeSave = record(
    "PyTreeSaveArgs",
    "item save_args=None ocdbt_target_data_file_size=None custom_metadata=None",
    _OfItem,
)
PyTreeRestore = record(
    "PyTreeRestoreArgs",
    "item=None restore_args=None transforms=None transforms_default_to_original=True "
    "legacy_transform_fn=None partial_restore=False",
    _OfItem,
)
JsonSave = record("JsonSaveArgs", "item", _OfItem)
JsonRestore = record("JsonRestoreArgs", "item=None", _OfItem)
ArraySave = record("ArraySaveArgs", "item save_args=None", _OfItem)
ArrayRestore = record("ArrayRestoreArgs", "item=None restore_args=None", _OfItem)
JaxRandomKeySave = record("JaxRandomKeySaveArgs", "item save_args=None", _OfItem)
JaxRandomKeyRestore = record("JaxRandomKeyRestoreArgs", "restore_args=None", _OfItem)
NumpyRandomKeySave = record("NumpyRandomKeySaveArgs", "item", _OfItem)
NumpyRandomKeyRestore = record("NumpyRandomKeyRestoreArgs", "", _OfItem)
ProtoSave = record("ProtoSaveArgs", "item", _OfItem)
ProtoRestore = record("ProtoRestoreArgs", "item", _OfItem)


class CompositeArgs(Mapping[str, Any], CheckpointArgs):
    """Items by name, also as attributes."""

    def __init__(self, **items: Any) -> None:
        if dunder := [name for name in items if name.startswith("__")]:
            raise ValueError(f'Composite keys cannot start with "__". Got: {dunder[0]}')
        self.__dict__["_items"] = items

    def __getitem__(self, key: str) -> Any:
        if key not in self._items:
            raise KeyError(f"Unknown key: {key}. Available keys: {self._items.keys()}")
        return self._items[key]

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__") or "_items" not in self.__dict__:
            raise AttributeError(key)
        return self[key]

    def __setattr__(self, key: str, value: Any) -> None:
        raise ValueError("Composite is immutable after initialization.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __and__(self, other: Mapping[str, Any]) -> CompositeArgs:
        return Composite(**{key: self[key] for key in self if key in other})

    def __or__(self, other: Mapping[str, Any]) -> CompositeArgs:
        return Composite(**{**self, **other})

    def __repr__(self) -> str:
        return f"Composite({self._items!r})"


Composite = CompositeArgs
_OURS: Final = {cls.__name__: cls for cls in (Composite, *_OfItem.__subclasses__())}


def class_as_ours(cls: type) -> type:
    """Returns a class of Orbax's own args as that of this module; others as they are."""
    return _OURS.get(cls.__name__, cls) if cls.__module__.startswith("orbax.checkpoint.") else cls


def as_ours(args: Any) -> Any:
    """Returns Orbax's own args as those of this module; others as they are."""
    ours = _OURS.get(type(args).__name__)
    if ours is Composite or isinstance(args, Composite):
        return Composite(**{name: as_ours(one) for name, one in args.items()})
    if ours is None or isinstance(args, ours):
        return args
    fields = {field.name for field in dataclasses.fields(ours)}  # pyright: ignore[reportArgumentType]  # all are
    return ours(**{name: value for name, value in vars(args).items() if name in fields})


# --- one leaf --------------------------------------------------------------------------------


# How to store a leaf. Only `dtype` has an effect: chunks are shards, or parts of them.
SaveArgs = record("SaveArgs", "aggregate=False dtype=None chunk_byte_size=None shard_axes=()")
RestoreArgs = record("RestoreArgs", "restore_type=None dtype=None")


class _Shapes:
    def __post_init__(self) -> None:
        shape, whole = vars(self).get("shape"), vars(self).get("global_shape")
        if None not in (shape, whole) and shape != whole:
            raise ValueError("If `shape` and `global_shape` are both provided, they must match.")
        vars(self).update(
            shape=whole if shape is None else shape, global_shape=whole if shape is None else shape
        )


ArrayRestoreArgs = record(
    "ArrayRestoreArgs",
    "mesh=None mesh_axes=None sharding=None global_shape=None shape=None strict=True",
    _Shapes,
    RestoreArgs,
    restore_type=jax.Array,
)
# The same: a process reads only what its own devices need.
SingleReplicaArrayRestoreArgs = record(
    "SingleReplicaArrayRestoreArgs",
    "primary_replica_id=0 replica_axis_index=0",
    ArrayRestoreArgs,
    single_replica_sharding=None,
)
