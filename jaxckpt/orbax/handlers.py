"""Handlers: how an item of each kind is stored and restored."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import jax
import numpy as np
from etils import epath

from jaxckpt.format import jsontext, names
from jaxckpt.orbax import _handling, _trees, args, metadata, options, transform_utils
from jaxckpt.orbax._handling import AsyncCheckpointHandler as AsyncCheckpointHandler
from jaxckpt.orbax._handling import CheckpointHandler as CheckpointHandler
from jaxckpt.orbax._handling import Future as Future
from jaxckpt.orbax._handling import Items, Ours, Stored, Taker, typestr

_handler_class = args.get_registered_handler_cls

# --- trees -----------------------------------------------------------------------------------


def _cast(tree: Any, save_args: Any) -> Any:
    dtypes = {n: a.dtype for n, a in _trees.by_name(save_args).items() if hasattr(a, "dtype")}
    if not any(dtypes.values()):
        return tree
    return _trees.map_named(lambda path, leaf: _trees.cast(leaf, dtypes.get(path)), tree)


class PyTreeCheckpointHandler(Ours):
    """Stores a tree; restores it with a type for each leaf."""

    _MODULE = "pytree_checkpoint_handler"

    def __init__(self, aggregate_filename: str | None = None, **tuning: Any) -> None:
        del aggregate_filename  # tuning, too
        options.check(**tuning)

    def _stored(self, given: Any) -> Items:
        if given.item is None or not (jax.tree.leaves(given.item) or given.item):
            raise ValueError("Found empty item.")
        tree, more = _cast(given.item, given.save_args), given.custom_metadata
        jsontext.dumps(more)  # raises TypeError for values that are not JSON
        return {"": Stored(tree=tree, custom_metadata=more, handler=self.typestr())}

    def _restored(self, path: str, given: Any) -> Any:
        if given.legacy_transform_fn is not None:
            raise NotImplementedError("legacy_transform_fn: use jaxckpt.restore(..., rename=...)")
        if given.transforms is not None:
            return transform_utils.restore_transformed(path, given)
        return _trees.restore_pytree(
            path, given.item, given.restore_args, partial=given.partial_restore
        )

    def metadata(self, directory: Any) -> metadata.TreeMetadata:
        """Describes the leaves of the tree."""
        return metadata.of_tree(directory)


class BasePyTreeCheckpointHandler(PyTreeCheckpointHandler):
    """The same handler."""

    _MODULE = "base_pytree_checkpoint_handler"


class StandardCheckpointHandler(PyTreeCheckpointHandler):
    """Stores a tree of arrays and numbers; restores it with the types of a target."""

    _MODULE = "standard_checkpoint_handler"

    def _stored(self, given: Any) -> Items:
        if given.item is None:
            raise ValueError("Must provide item to save.")
        if isinstance(given.item, (jax.Array, int, float, complex)):
            raise ValueError(
                "StandardCheckpointHandler / StandardSave does not support single arrays or "
                "scalars. Use ArrayCheckpointHandler / ArraySave"
            )

        def checked(key: _trees.Names, leaf: Any) -> Any:
            if not (isinstance(leaf, (int, float, complex)) or hasattr(leaf, "dtype")):
                raise ValueError(f"Unsupported type: {type(leaf)} for key: {key}.")
            return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf

        return super()._stored(replace(given, item=_trees.map_named(checked, given.item)))

    def _restored(self, path: str, given: Any) -> Any:
        if isinstance(given, args.PyTreeRestore):
            return super()._restored(path, given)
        if given.support_layout:
            raise NotImplementedError("support_layout: layouts are not restored")
        return _trees.restore_standard(path, given.item, strict=given.strict)


# --- single values ---------------------------------------------------------------------------


class ArrayCheckpointHandler(Ours):
    """Stores one array or number."""

    _MODULE = "array_checkpoint_handler"

    def __init__(self, checkpoint_name: str | None = None) -> None:
        self._name = checkpoint_name or names.ARRAY_ITEM_LEAF

    def _stored(self, given: Any) -> Items:
        if not isinstance(given.item, (int, float, np.generic, np.ndarray, jax.Array)):
            raise TypeError(f"Unsupported type: {type(given.item)}.")
        tree = _cast({self._name: given.item}, {self._name: given.save_args})
        return {"": Stored(tree=tree, handler=self.typestr())}

    def _restored(self, path: str, given: Any) -> Any:
        restore_args = given.restore_args and {self._name: given.restore_args}
        found = _trees.restore_pytree(path, None, restore_args)
        return found[self._name] if isinstance(found, dict) else found


class JsonCheckpointHandler(Ours):
    """Stores JSON."""

    _MODULE = "json_checkpoint_handler"

    def __init__(self, filename: str | None = None, **tuning: Any) -> None:
        options.check(**tuning)
        self._filename = filename or names.JSON_ITEM_FILE

    def _stored(self, given: Any) -> Items:
        text = json.dumps(given.item)
        return {"": Stored(files={self._filename: text.encode()}, handler=self.typestr())}

    def _restored(self, path: str, given: Any) -> Any:
        found, folder = _handling.recorded(path)
        name, is_metrics = self._filename, posixpath.basename(folder) == names.METRICS_ITEM
        if is_metrics and name not in found.contents(folder):
            name = names.METRICS_FILE  # as `metrics=` writes it
        return jsontext.loads(found.read(folder, name), file=f"{folder}/{name}")


class JaxRandomKeyCheckpointHandler(Ours):
    """Stores a key of JAX in one directory, and whether it is typed in another beside it."""

    _MODULE = "random_key_checkpoint_handler"
    _NAME = names.JAX_KEY_ITEM

    def __init__(self, key_name: str | None = None) -> None:
        self._name = key_name or self._NAME

    def _stored(self, given: Any) -> Items:
        data, kind = self._parts(given)
        facts = JsonCheckpointHandler()._stored(args.JsonSave(kind))[""]
        whole = Stored(files={}, handler=self.typestr())
        return {"": whole, self._name: data[""], f"{self._name}_metadata": facts}

    def _parts(self, given: Any) -> tuple[Items, dict[str, bool]]:
        if not isinstance(given.item, jax.Array):
            raise TypeError(f"Unsupported type: {type(given.item)}.")
        key, data = given.item, _trees.as_data(given.item)
        jax.random.wrap_key_data(data)  # raises TypeError where the restore would
        array = ArrayCheckpointHandler()._stored(args.ArraySave(data, given.save_args))
        return array, {"typed": data is not key}

    def _restored(self, path: str, given: Any) -> Any:
        data = ArrayCheckpointHandler()._restored(f"{path}/{self._name}", given)
        return jax.random.wrap_key_data(data) if self._kind(path)["typed"] else data

    def _kind(self, path: str) -> Any:
        return JsonCheckpointHandler().restore(f"{path}/{self._name}_metadata")


class NumpyRandomKeyCheckpointHandler(JaxRandomKeyCheckpointHandler):
    """Stores the state of a generator of numpy in the same way."""

    _NAME = names.NUMPY_KEY_ITEM

    def _parts(self, given: Any) -> tuple[Items, dict[str, bool]]:
        if not isinstance(given.item, (tuple, dict)):
            raise TypeError(f"Unsupported type: {type(given.item)}.")
        tree = PyTreeCheckpointHandler()._stored(args.PyTreeSave(given.item))
        return tree, {"legacy": isinstance(given.item, tuple)}

    def _restored(self, path: str, given: Any) -> Any:
        state = _trees.restore_pytree(f"{path}/{self._name}", None, None)
        return tuple(state) if self._kind(path)["legacy"] else state


# --- several items ---------------------------------------------------------------------------


class AlreadyExistsError(ValueError):
    """The registry has a handler for these args already."""


class NoEntryError(KeyError):
    """The registry lacks a handler for these args."""


class DefaultCheckpointHandlerRegistry:
    """Handlers by the name of an item, or None for any, and the class of args."""

    def __init__(self, other_registry: Any = None) -> None:
        self._entries: dict[tuple[str | None, type], Any] = {}
        others = other_registry.get_all_entries() if other_registry else {}
        for (item, cls), handler in others.items():
            self.add(item, cls, handler)

    def add(self, item: str | None, args: Any, handler: Any = None) -> None:
        """Adds a handler, or else an instance of the class registered for the args."""
        key = item, _class_of(args)
        if key in self._entries:
            raise AlreadyExistsError(
                f"Entry for item={item} and args_type={key[1]} already exists in the registry."
            )
        try:
            handler = _handler_class(args) if handler is None else handler
            self._entries[key] = as_ours(handler() if isinstance(handler, type) else handler)
        except (TypeError, ValueError) as error:
            raise ValueError(
                "Provided a `None` `CheckpointHandler`, and the registered one of "
                f"item={item} and args_type={key[1]} is missing or not default-constructible."
            ) from error

    def get(self, item: str | None, args: Any) -> Any:
        """Returns a handler; NoEntryError if there is none."""
        if not self.has(item, args):
            raise NoEntryError(f"No entry for item={item} and args_ty={args} in the registry.")
        return self._entries[item, _class_of(args)]

    def has(self, item: str | None, args: Any) -> bool:
        """Returns whether there is a handler."""
        return (item, _class_of(args)) in self._entries

    def get_all_entries(self) -> dict[tuple[str | None, type], Any]:
        """Returns all handlers."""
        return self._entries


CheckpointHandlerRegistry = DefaultCheckpointHandlerRegistry


def _class_of(given: Any) -> type:
    return args.class_as_ours(given if isinstance(given, type) else type(given))


class CompositeCheckpointHandler(Ours):
    """Stores items by name, each with a handler of its own."""

    _MODULE = "composite_checkpoint_handler"

    def __init__(
        self, *item_names: str, handler_registry: Any = None, **items_and_handlers: Any
    ) -> None:
        for name, value in (("item_names", item_names), ("items_and_handlers", items_and_handlers)):
            if handler_registry is not None and value:
                raise ValueError(f"`handler_registry` and `{name}` are mutually exclusive")
        entries = DefaultCheckpointHandlerRegistry(handler_registry).get_all_entries()
        self._entries: Mapping[tuple[str | None, type], Any] = entries
        self._named = {item: handler for (item, _), handler in entries.items() if item is not None}
        given = items_and_handlers.items()
        self._named |= {name: as_ours(one) for name, one in given if one is not None}
        self._declared = {*item_names, *items_and_handlers} or None

    def declare(self, name: str, handler: Any) -> None:
        """Adds an item with its handler."""
        self._named[name] = handler
        if self._declared is not None:
            self._declared.add(name)

    def handler_of(self, name: str, given: Any) -> Any:
        """Returns the handler of an item, and keeps it for later calls.

        Raises:
            ValueError: neither the item nor the args determine its handler, or they differ.
        """
        for key in ((name, type(given)), (None, type(given))):
            if key in self._entries:
                return self._entries[key]
        found = self._named.get(name)
        if found is None and given is None:
            raise ValueError(
                f"Provided `None` for `CheckpointArgs`, and the `CheckpointHandler` for item "
                f'"{name}" was not configured.'
            )
        is_known = found is not None or self._declared is None or name in self._declared
        if not is_known or not _takes(found, given):
            raise ValueError(
                f'Item "{name}" and args "{given}" does not match with any registered handler!'
            )
        if found is None:
            self._named[name] = found = as_ours(args.get_registered_handler_cls(given)())
        return found

    def _stored(self, given: Any) -> Items:
        items: dict[str, Taker] = {}
        for name, one in given.items():
            handler = self.handler_of(name, one)
            one = _handling.made_for(handler, "save", (None,), {}) if one is None else one
            below = _handling.store(handler, one)
            items |= {
                posixpath.join(name, part).rstrip("/"): value for part, value in below.items()
            }
        if not items:
            raise ValueError("Found no items to save.")
        return items

    def _restored(self, path: str, given: Any) -> Any:
        found, wanted, restored = metadata.found_at(path), dict(given or {}), {}
        there = metadata.items_of(found)
        if missing := [name for name in wanted if name not in there]:
            raise KeyError(
                f'Item "{missing[0]}" was not found in the checkpoint. Available items: {there}'
            )
        for name in sorted(wanted or there):
            one, saved_by = wanted.get(name), found.metadata.handlers.get(name)
            handler = self.handler_of(name, one) if wanted else self._default(name, saved_by)
            one = _handling.made_for(handler, "restore", (), {}) if one is None else one
            restored[name] = _handling.load(handler, posixpath.join(path, name), one)
        return args.Composite(**restored)

    def _default(self, name: str, saved_by: str | None) -> Any:
        """Returns the handler that restores an item without args."""
        if name in self._named:
            return self._named[name]
        if name in (self._declared or ()):
            raise ValueError(
                f'Item "{name}" had an undetermined `CheckpointHandler` when restoring; name one '
                "in item_handlers, or pass args."
            )
        for cls in args.registered_handlers():
            if typestr(cls) == saved_by:
                self._named[name] = cls()
                return self._named[name]
        raise ValueError(
            f'Item "{name}" was found in the checkpoint, but could not be restored. Please provide '
            "a `CheckpointHandlerRegistry`, or call `restore` with an appropriate `CheckpointArgs` "
            "subclass."
        )

    def metadata(self, directory: Any) -> Any:
        """Describes the items of a checkpoint."""
        found = metadata.found_at(directory)
        described = {name: self._describe(name, directory) for name in metadata.items_of(found)}
        return metadata.of_step(found, args.Composite(**described))

    def _describe(self, name: str, directory: Any) -> Any:
        handler = self._named.get(name)
        try:
            return handler and handler.metadata(epath.Path(directory) / name)
        except (FileNotFoundError, NotImplementedError):
            return None

    def close(self) -> None:
        """Closes the handlers of the items."""
        for handler in self._named.values():
            handler.close()


def _takes(handler: Any, given: Any) -> bool:
    """Returns whether a handler, or any if it is None, takes args."""
    if handler is None or given is None or not args.has_registered_args(handler):
        return True
    taken = [args.class_as_ours(cls) for cls in args.get_registered_args_cls(handler)]
    return type(given) in taken or isinstance(handler, args.get_registered_handler_cls(given))


_KINDS: Final = (
    (StandardCheckpointHandler, args.StandardSave, args.StandardRestore),
    (PyTreeCheckpointHandler, args.PyTreeSave, args.PyTreeRestore),
    (ArrayCheckpointHandler, args.ArraySave, args.ArrayRestore),
    (JsonCheckpointHandler, args.JsonSave, args.JsonRestore),
    (JaxRandomKeyCheckpointHandler, args.JaxRandomKeySave, args.JaxRandomKeyRestore),
    (NumpyRandomKeyCheckpointHandler, args.NumpyRandomKeySave, args.NumpyRandomKeyRestore),
    (CompositeCheckpointHandler, args.Composite, args.Composite),
)
for _handler, _save, _restore in _KINDS:
    args.register_with_handler(_handler, for_save=True)(_save)
    args.register_with_handler(_handler, for_restore=True)(_restore)
    # `handlers.StandardSaveArgs` is `args.StandardSave`.
    globals().update({f"{cls.__name__.removesuffix('Args')}Args": cls for cls in (_save, _restore)})

# --- Orbax's own -----------------------------------------------------------------------------

_CLASSES: Final = (BasePyTreeCheckpointHandler, *(kind for kind, *_ in _KINDS))
_OURS: Final = {cls.__name__: cls for cls in _CLASSES}
_NAMES: Final = ("filename", "checkpoint_name", "key_name")  # arguments of a handler's constructor


def as_ours(handler: Any) -> Any:
    """Converts a handler of Orbax itself to a handler of this module; returns others as they are.

    Also returns as it is a handler that has its own handlers of leaves: jaxckpt calls none of them.
    """
    cls = type(handler)
    ours = _OURS.get(cls.__name__)
    if ours is None or not cls.__module__.startswith("orbax.checkpoint."):
        return handler
    if ours is CompositeCheckpointHandler:
        entries, names = handler._handler_registry, handler._item_names_without_registered_handlers
        if names is None:
            return ours(handler_registry=entries)
        return ours(*names, **{name: one for (name, _), one in entries.get_all_entries().items()})
    if (types := _leaf_types(handler)) is not None and types is not _leaf_types(cls()):
        return handler
    return ours(
        **{name: vars(handler)[f"_{name}"] for name in _NAMES if f"_{name}" in vars(handler)}
    )


def _leaf_types(handler: Any) -> Any:
    return getattr(getattr(handler, "_impl", handler), "_type_handler_registry", None)
