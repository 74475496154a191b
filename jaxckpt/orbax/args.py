"""Says what to save or restore, with which handler, and how to store or restore one leaf.

The objects of Orbax itself are understood by the names of their classes.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import jax

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
        item: Any = getattr(self, "item", None)
        if is_args(item):
            raise ValueError(f"`item` of {type(self).__name__} must not be args; pass `args=`")
        if type(item).__name__ in ("TreeMetadata", "_TreeMetadataImpl"):
            self.item = item.tree


@dataclass
class StandardSave(_OfItem):
    """Saves a tree of arrays and numbers.

    Attributes:
        item: The tree.
        save_args: A tree of `SaveArgs`.
        custom_metadata: JSON to store with the tree.
    """

    item: Any
    save_args: Any = None
    custom_metadata: Any = None


@dataclass
class StandardRestore(_OfItem):
    """Restores a tree.

    Attributes:
        item: A target, which gives the types; None for the saved types.
        strict: If False, jax arrays are cut off or padded to the shapes of the target.
        support_layout: Is refused.
        fallback_sharding: No effect.
    """

    item: Any = None
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: jax.sharding.Sharding | None = None


@dataclass
class PyTreeSave(_OfItem):
    """Saves a tree.

    Attributes:
        item: The tree.
        save_args: A tree of `SaveArgs`.
        ocdbt_target_data_file_size: No effect.
        custom_metadata: JSON to store with the tree.
    """

    item: Any
    save_args: Any = None
    ocdbt_target_data_file_size: int | None = None
    custom_metadata: Any = None


@dataclass
class PyTreeRestore(_OfItem):
    """Restores a tree.

    Attributes:
        item: A target, which gives the structure; None for the saved one.
        restore_args: A tree of `RestoreArgs`, which give the types.
        transforms: A tree of `Transform`s, which name the sources of the target's leaves.
        transforms_default_to_original: Whether leaves without a transform are taken as saved.
        legacy_transform_fn: Is refused.
        partial_restore: Whether saved leaves may be missing in the target; leaves that were not
            saved keep the values in the target.
    """

    item: Any = None
    restore_args: Any = None
    transforms: Any = None
    transforms_default_to_original: bool = True
    legacy_transform_fn: Callable[..., Any] | None = None
    partial_restore: bool = False


@dataclass
class JsonSave(_OfItem):
    """Saves `item` as JSON."""

    item: Any


@dataclass
class JsonRestore(_OfItem):
    """Restores JSON; `item` is ignored."""

    item: Any = None


@dataclass
class ArraySave(_OfItem):
    """Saves `item`, an array or a number, with `save_args`, which are `SaveArgs`."""

    item: Any
    save_args: SaveArgs | None = None


@dataclass
class ArrayRestore(_OfItem):
    """Restores an array with `restore_args`, which are `RestoreArgs`; `item` is ignored."""

    item: Any = None
    restore_args: RestoreArgs | None = None


@dataclass
class JaxRandomKeySave(_OfItem):
    """Saves `item`, a key of JAX, with `save_args`, which are `SaveArgs`."""

    item: Any
    save_args: SaveArgs | None = None


@dataclass
class JaxRandomKeyRestore(_OfItem):
    """Restores a key of JAX with `restore_args`, which are `RestoreArgs`."""

    restore_args: RestoreArgs | None = None


@dataclass
class NumpyRandomKeySave(_OfItem):
    """Saves `item`, what `numpy.random.get_state` returns."""

    item: Any


@dataclass
class NumpyRandomKeyRestore(CheckpointArgs):
    """Restores such a state, for `numpy.random.set_state`."""


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
_OURS: Final[dict[str, type]] = {f"{cls.__name__}Args": cls for cls in _OfItem.__subclasses__()}
_OURS[CompositeArgs.__name__] = CompositeArgs


def class_as_ours(cls: type) -> type:
    """Returns this module's class for a class of Orbax's own args; other classes as they are."""
    return _OURS.get(cls.__name__, cls) if cls.__module__.startswith("orbax.checkpoint.") else cls


def as_ours(args: Any) -> Any:
    """Converts Orbax's own args to args of this module; returns other objects as they are."""
    ours = _OURS.get(type(args).__name__)
    if ours is Composite or isinstance(args, Composite):
        return Composite(**{name: as_ours(one) for name, one in args.items()})
    if ours is None or isinstance(args, ours):
        return args
    fields = {field.name for field in dataclasses.fields(ours)}  # pyright: ignore[reportArgumentType]  # all are
    return ours(**{name: value for name, value in vars(args).items() if name in fields})


# --- one leaf --------------------------------------------------------------------------------


@dataclass
class SaveArgs:
    """Describes how to store a leaf.

    Attributes:
        aggregate: No effect.
        dtype: The dtype to store; None for the leaf's dtype.
        chunk_byte_size: No effect: chunks are shards, or parts of them.
        shard_axes: No effect.
    """

    aggregate: bool = False
    dtype: Any = None
    chunk_byte_size: int | None = None
    shard_axes: tuple[int, ...] = ()


@dataclass
class RestoreArgs:
    """Describes how to restore a leaf.

    Attributes:
        restore_type: Its type; None for the saved one.
        dtype: Its dtype; None for the saved one.
    """

    restore_type: Any = None
    dtype: Any = None


@dataclass
class ArrayRestoreArgs(RestoreArgs):
    """Describes how to restore an array.

    Attributes:
        restore_type: Its type.
        dtype: Its dtype; None for the saved one.
        mesh: The mesh of its sharding, with `mesh_axes`.
        mesh_axes: The spec of its sharding.
        sharding: Its sharding, or the metadata of one.
        global_shape: Its shape; None for the saved one.
        shape: The same.
        strict: If False, an array of jax is cut off or padded to its shape.
    """

    restore_type: Any = jax.Array
    mesh: jax.sharding.Mesh | None = None
    mesh_axes: jax.sharding.PartitionSpec | None = None
    sharding: Any = None
    global_shape: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        if None not in (self.shape, self.global_shape) and self.shape != self.global_shape:
            raise ValueError("If `shape` and `global_shape` are both provided, they must match.")
        self.shape = self.global_shape = self.global_shape if self.shape is None else self.shape


@dataclass
class SingleReplicaArrayRestoreArgs(ArrayRestoreArgs):
    """The same: a process reads only what its own devices need.

    Attributes:
        single_replica_sharding: No effect, like the next two.
        primary_replica_id: No effect.
        replica_axis_index: No effect.
    """

    single_replica_sharding: jax.sharding.Sharding | None = None
    primary_replica_id: int | None = 0
    replica_axis_index: int | None = 0
