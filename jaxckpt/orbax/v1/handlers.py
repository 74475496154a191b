"""Has Orbax's handlers, and the registry that chooses among them.

Trees and JSON are stored as jaxckpt stores them. A handler of the program's own, and an object
that saves itself, write files into a directory that is copied into the checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, final, runtime_checkable

import jax
import numpy as np
from etils import epath

from jaxckpt import TreeMismatch
from jaxckpt import save as save_checkpoint
from jaxckpt._save.snapshot import Items, SaveItem
from jaxckpt.format import jsontext, names, step
from jaxckpt.multihost import Processes
from jaxckpt.orbax._handling import FolderItem, Stored, Taker, check_files, run, typestr
from jaxckpt.orbax.handlers import AlreadyExistsError, NoEntryError
from jaxckpt.orbax.v1._trees import cast, load_tree, tree_metadata

Checkpointable = Any
AbstractCheckpointable = Any

_V: Final = TypeVar("_V")
_A: Final = TypeVar("_A")
_LEAVES: Final = (jax.Array, np.ndarray, np.generic, int, float, bool, str, bytes)
_LEAF_TYPES: Final = "jax.Array | numpy.ndarray | int | float | numpy.number | bytes | bool | str"


@runtime_checkable
class StatefulCheckpointable(Protocol):
    """An object that saves itself and loads in place; awaiting a call's result ends the work."""

    async def save(self, directory: Any) -> Awaitable[None]: ...

    async def load(self, directory: Any) -> Awaitable[None]: ...


class CheckpointableHandler(Protocol[_V, _A]):
    """Saves and loads objects of one type; a program's own class has these methods."""

    async def save(self, directory: Any, checkpointable: _V) -> Awaitable[None]: ...

    async def load(
        self, directory: Any, abstract_checkpointable: _A | None = None
    ) -> Awaitable[_V]: ...

    async def metadata(self, directory: Any) -> _A: ...

    def is_handleable(self, checkpointable: Any) -> bool: ...

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None: ...


class MisfitError(TreeMismatch, NoEntryError):
    """An item does not fit its target: for Orbax, a handler that cannot load it."""

    __str__ = Exception.__str__


class UnregisteredTypeError(ValueError):
    """A leaf is of a type that cannot be stored."""


# --- the kinds of jaxckpt ----------------------------------------------------------------------


def _unsupported(tree: Any) -> set[type]:
    leaves = (leaf for leaf in jax.tree.leaves(tree) if leaf is not ...)
    return {type(leaf) for leaf in leaves if not isinstance(leaf, _LEAVES)}


def check_tree(tree: Any) -> None:
    """Raises UnregisteredTypeError, a ValueError, for leaves that cannot be stored."""
    if wrong := _unsupported(tree):
        raise UnregisteredTypeError(
            f"Unsupported leaf type for saving: `{'`, `'.join(sorted(map(repr, wrong)))}`. "
            f"Supported leaf types are: {_LEAF_TYPES}. Convert them, or register a handler."
        )


def is_abstract(leaf: Any) -> bool:
    """Returns whether a leaf of a target describes the value to restore."""
    if isinstance(leaf, type):
        return issubclass(leaf, _LEAVES) or {"shape", "dtype"} <= {*dir(leaf)}
    is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return leaf is ... or is_array or isinstance(leaf, _LEAVES)


class _Builtin:
    """A handler that gives jaxckpt the values; another handler may save with it below itself."""

    take: Callable[[Any], Stored]  # returns what to store

    async def save(self, directory: Any, checkpointable: Any) -> Awaitable[None]:
        """Saves below the files of another handler."""
        folder = await directory.await_creation()
        stored = Items({"": self.take(checkpointable)})
        save_checkpoint(folder, stored, item=None, overwrite=True)
        return _done()

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        """Loads what `save` saved."""
        return _done(load_tree(directory, abstract_checkpointable))

    async def metadata(self, directory: Any) -> Any:
        """Describes what `save` saved."""
        return tree_metadata(directory)


async def _done(value: Any = None) -> Any:
    return value


@final
class PyTreeHandler(_Builtin):
    """Trees."""

    def is_handleable(self, checkpointable: Any) -> bool:
        """Returns whether all leaves can be stored."""
        return not _unsupported(checkpointable)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Returns whether all leaves describe the values to restore."""
        return all(map(is_abstract, jax.tree.leaves(abstract_checkpointable)))

    def take(self, value: Any) -> Stored:
        """Returns a tree to store."""
        check_tree(value)
        if not jax.tree.leaves(value) and not value:
            raise ValueError("Found empty item. There is nothing to save")
        return Stored(tree=cast(value), handler=step.PYTREE_HANDLER)


@final
class JsonHandler(_Builtin):
    """JSON."""

    def __init__(self, filename: str | None = None) -> None:
        self._file = filename or names.JSON_ITEM_FILES[-1]

    def is_handleable(self, checkpointable: Any) -> bool:
        """Returns whether it is JSON."""
        try:
            json.dumps(checkpointable)
        except (TypeError, ValueError, RecursionError):
            return False
        return True

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> None:
        """JSON needs no target."""

    def take(self, value: Any) -> Stored:
        """Returns a file to store."""
        files = {self._file: jsontext.dumps(value, allow_nan=True)}
        return Stored(files=files, handler=step.JSON_HANDLER)


# --- handlers of a program's own ----------------------------------------------------------------


@final
class StatefulCheckpointableHandler:
    """Objects that save themselves."""

    def is_handleable(self, checkpointable: Any) -> bool:
        """Returns whether it has `save` and `load`."""
        return isinstance(checkpointable, StatefulCheckpointable)

    is_abstract_handleable = is_handleable

    async def save(self, directory: Any, checkpointable: Any) -> Awaitable[None]:
        """Lets it save itself."""
        return await checkpointable.save(directory)

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        """Lets it load itself."""
        if abstract_checkpointable is None:
            raise ValueError(
                f"{directory}: pass the object to load, which implements `StatefulCheckpointable`"
            )
        return _loaded(await abstract_checkpointable.load(directory), abstract_checkpointable)

    async def metadata(self, directory: Any) -> None:
        """There is none."""


async def _loaded(rest: Awaitable[None], value: Any) -> Any:
    await rest
    return value


@dataclass(frozen=True, slots=True)
class _Directory:
    """Orbax's PathAwaitingCreation, for an existing directory."""

    path: epath.Path

    def __truediv__(self, other: str | os.PathLike[str]) -> _Directory:
        return _Directory(self.path / other)

    async def await_creation(self) -> epath.Path:
        self.path.mkdir(parents=True, exist_ok=True)
        return self.path


def take_files(handler: Any, value: Any) -> Taker:
    """Returns the function that runs a handler, and its rest in the background, for its files."""

    def take(name: str, processes: Processes) -> SaveItem:
        source = tempfile.TemporaryDirectory(prefix="jaxckpt-")
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)  # of no thread
        rest = run(handler.save(_Directory(epath.Path(source.name)), value), runner)

        def end() -> None:
            with runner:
                run(_loaded(rest, None), runner)

        return FolderItem(name=name, source=source, end=end, handler=typestr(type(handler)))

    return take


def load_files(handler: Any, folder: str, target: Any) -> Any:
    """Lets a handler load the files of an item."""
    check_files(folder)

    async def load() -> Any:
        return await (await handler.load(epath.Path(folder), target))

    return run(load())


# --- the registry -------------------------------------------------------------------------------


class CheckpointableHandlerRegistry:
    """Handlers in order; the last that fits is used, or the handler of the name."""

    def __init__(self, *, read_only: bool = False) -> None:
        self._entries: list[tuple[type, str | None]] = []
        self._typestrs: dict[type, Sequence[str]] = {}
        self._read_only = read_only

    def add(
        self,
        handler_type: type,
        *,
        checkpointable_name: str | None = None,
        secondary_typestrs: Sequence[str] | None = None,
    ) -> CheckpointableHandlerRegistry:
        """Adds a handler for all objects that it takes, or for checkpointables of one name."""
        if self._read_only:
            raise NotImplementedError("this registry is read-only; make one by local_registry()")
        if not isinstance(handler_type, type):
            raise ValueError(f"The `handler_type` must be a type, but got {handler_type}.")
        known = handler_type in (kind for kind, _ in self._entries)
        if self.has(checkpointable_name) if checkpointable_name else known:
            raise AlreadyExistsError(f"{checkpointable_name or handler_type} is registered already")
        self._entries.append((handler_type, checkpointable_name))
        if secondary_typestrs is not None:
            self._typestrs[handler_type] = secondary_typestrs
        return self

    def get(self, checkpointable_name: str) -> type:
        """Returns the handler for a name."""
        for kind, name in self._entries:
            if name == checkpointable_name:
                return kind
        raise NoEntryError(f"No entry for checkpointable_name={checkpointable_name}")

    def has(self, checkpointable_name: str) -> bool:
        """Returns whether there is a handler for a name."""
        return checkpointable_name in (name for _, name in self._entries)

    def get_all_entries(self) -> list[tuple[type, str | None]]:
        """Returns the handlers with their names, in order."""
        return self._entries

    def get_secondary_typestrs(self, handler_type: type) -> Sequence[str]:
        """Returns further names by which checkpoints know a handler."""
        return self._typestrs.get(handler_type, [])

    def __repr__(self) -> str:
        return f"CheckpointableHandlerRegistry({self._entries})"


_GLOBAL: Final = CheckpointableHandlerRegistry()
for _kind in (JsonHandler, StatefulCheckpointableHandler, PyTreeHandler):
    _GLOBAL.add(_kind)
_GLOBAL.add(PyTreeHandler, checkpointable_name=names.STATE_ITEM)


def global_registry() -> CheckpointableHandlerRegistry:
    """Returns the registry that holds where no context has another."""
    return _GLOBAL


def local_registry(
    other_registry: CheckpointableHandlerRegistry | None = None,
    *,
    include_global_registry: bool = True,
    read_only: bool = False,
) -> CheckpointableHandlerRegistry:
    """Returns a new registry with the entries of others."""
    registry = CheckpointableHandlerRegistry()
    for other in (_GLOBAL if include_global_registry else None, other_registry):
        for kind, name in other.get_all_entries() if other is not None else ():
            more = other.get_secondary_typestrs(kind) if other is not None else None
            registry.add(kind, checkpointable_name=name, secondary_typestrs=more)
    registry._read_only = read_only
    return registry


_Kind: Final = TypeVar("_Kind", bound=type)


def register_handler(
    cls: _Kind,
    *,
    checkpointable_name: str | None = None,
    secondary_typestrs: Sequence[str] | None = None,
) -> _Kind:
    """Adds a handler to the global registry; also a decorator."""
    more = secondary_typestrs
    _GLOBAL.add(cls, checkpointable_name=checkpointable_name, secondary_typestrs=more)
    return cls


def for_save(registry: CheckpointableHandlerRegistry, value: Any, name: str) -> Taker:
    """Returns the function that takes a value, by the handler that saves it."""
    if value is None:
        raise ValueError(f"checkpointable must not be None for saving: {name!r}")
    kinds = [kind for kind, named in registry.get_all_entries() if not named]
    fitting = [handler for kind in kinds if (handler := kind()).is_handleable(value)]
    is_stateful = isinstance(value, StatefulCheckpointable) and fitting
    if registry.has(name) and not is_stateful:
        handler = registry.get(name)()
    elif fitting:
        handler = fitting[-1]
    else:
        raise NoEntryError(
            f'Could not identify a valid handler for the checkpointable: "{name}", of type '
            f"{type(value).__name__}. Register one by register_handler, or in "
            "Context.checkpointables.registry."
        )
    return handler.take(value) if isinstance(handler, _Builtin) else take_files(handler, value)


def for_load(registry: CheckpointableHandlerRegistry, target: Any, name: str, saved_by: str) -> Any:
    """Returns the handler of the program that loads an item, or None for trees and JSON."""
    entries = registry.get_all_entries()
    own = [(kind, named) for kind, named in entries if not issubclass(kind, _Builtin)]
    by_name = [kind() for kind, named in own if named == name]
    by_type = [
        kind()
        for kind, _ in reversed(own)
        if saved_by in (typestr(kind), *registry.get_secondary_typestrs(kind))
    ]
    for handler in (*by_name, *by_type):
        if target is None or handler.is_abstract_handleable(target):
            return handler
    for kind, named in reversed(own) if target is not None else ():
        if named is None and (handler := kind()).is_abstract_handleable(target):
            return handler
    return by_name[0] if by_name else None


def check_handler(
    registry: CheckpointableHandlerRegistry, saved_by: str, target: Any, *known: str
) -> None:
    """Raises NoEntryError if a registry lacks a handler for an item under one of its names."""
    named = {named for _, named in registry.get_all_entries()}
    is_told = bool(saved_by) or target is not None
    if not ({*known} & named or (is_told and None in named)):
        raise NoEntryError(
            f"Failed to load checkpointable: {known[0]!r} due to incompatible handler: "
            f"{saved_by!r}. Could not resolve a handler for {known[0]!r} and no "
            f"{known[-1]!r} handler found in {registry}"
        )
