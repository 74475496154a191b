"""`load` and its relatives."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Final

import jax
from etils import epath
from jax import tree_util

from jaxckpt import Checkpoint, CheckpointNotFound, CorruptCheckpoint, UnsupportedFormat, restore
from jaxckpt import open as open_checkpoint
from jaxckpt._disk.found import Found
from jaxckpt.errors import TreeMismatch
from jaxckpt.format import names
from jaxckpt.orbax import _trees
from jaxckpt.orbax.metadata import found_at
from jaxckpt.orbax.tree import to_flat_dict
from jaxckpt.orbax.v1 import handlers
from jaxckpt.orbax.v1._context import get_context
from jaxckpt.orbax.v1._saving import (
    AUTO,
    RESERVED,
    STATE,
    AsyncResponse,
    Done,
    check_names,
    renamed,
)
from jaxckpt.orbax.v1._trees import load_tree
from jaxckpt.orbax.v1.errors import DeletionInProgressError, InvalidLayoutError
from jaxckpt.orbax.v1.options import CheckpointLayout
from jaxckpt.storage import locate, real

PLACEHOLDER: Final = _trees.PLACEHOLDER
PathLike = str | os.PathLike[str]


# --- which checkpoint, which item ---------------------------------------------------------------


def found_checkpoint(path: PathLike) -> Found:
    """Finds the checkpoint that is at a path; not one around it or below it.

    Raises:
        InvalidLayoutError: there is none.
    """
    unknown = f"Could not recognize the checkpoint at {path} as a valid Orbax checkpoint"
    try:
        found = found_at(path)
    except CheckpointNotFound as error:
        raise InvalidLayoutError(f"{unknown}: {error}") from error
    where = real(*locate(path))
    if found.path != where or found.is_file:
        raise InvalidLayoutError(f"{unknown}, but {found.path} is one. Load that instead.")
    there = found.contents(found.path)
    if names.ORBAX_MARKER in there and names.CHECKPOINT_METADATA not in there:
        raise InvalidLayoutError(f"{unknown}: it has no {names.CHECKPOINT_METADATA}")
    return found


def item_names(found: Found) -> list[str]:
    """Returns the names of the items, `state` first; none if the checkpoint is one tree.

    A program may have deleted the directory of an item.
    """
    there = {*found.items, *found.metadata.handlers} & {*found.entries(found.path)}
    saved = there - {*RESERVED, found.deleting}
    return sorted(saved, key=lambda name: (name != STATE, name))


def named_items(path: PathLike, found: Found, verb: str) -> list[str]:
    """Returns the names of the items; InvalidLayoutError if a file shows that it is one tree."""
    there = found.contents(found.path)
    if "" in found.items and {names.TREE_METADATA, names.CHECKPOINT_METADATA} & {*there}:
        raise InvalidLayoutError(f"{path} is one tree, with no named checkpointables. Use `{verb}`")
    return item_names(found)


def item_path(path: PathLike, found: Found, name: str | None) -> str:
    """Returns the path of a tree.

    Args:
        name: Its name; AUTO for `state` or the first; None if the checkpoint is one tree.
    """
    if name == "" or (name in RESERVED and name != AUTO):
        raise ValueError(f"{name!r} cannot be the name of a checkpointable")
    if name is not None and name == found.deleting:
        raise DeletionInProgressError(f"{path}: item {name!r} is being deleted")
    if (is_flat := "" in found.items) and name in (None, AUTO):
        return os.fspath(path)
    trees = [] if is_flat else [n for n in item_names(found) if is_tree(found, n)]
    if name == AUTO and trees:
        name = trees[0]
    if name not in trees:
        has = ", ".join(trees) or ("checkpointable_name=None" if is_flat else "none")
        raise _no_tree(path, f"{name!r}. Its trees: {has}")
    return os.path.join(path, name)


def _no_tree(path: PathLike, what: str) -> InvalidLayoutError:
    told = f"Failed to interpret path {path} as a checkpoint with an Orbax PyTree"
    return InvalidLayoutError(f"{told} {what}")


def is_tree(found: Found, name: str) -> bool:
    return names.TREE_METADATA in found.contents(f"{found.path}/{name}")


# --- loading ------------------------------------------------------------------------------------


def load(
    path: PathLike, abstract_state: Any = None, *, checkpointable_name: str | None = AUTO
) -> Any:
    """Loads a tree, with the types of a target, or else as Orbax returns it.

    Raises:
        InvalidLayoutError: the checkpoint or tree does not exist; it is a ValueError.
        ValueError: the target does not fit.
    """
    target = _standard(abstract_state)
    check_target(target)
    if has_tensors(path):
        return _load_tensors(path, target)
    found = found_checkpoint(path)
    folder = item_path(path, found, checkpointable_name)
    name = os.path.basename(folder)
    saved_by = found.metadata.handlers.get(name if folder != os.fspath(path) else "", "")
    if names.TREE_METADATA in found.contents(folder):
        registry = get_context().checkpointables.registry
        handlers.check_handler(registry, saved_by, target, name, STATE)
    with reading_tree(path, folder):
        return load_tree(folder, target)


def load_checkpointables(path: PathLike, abstract_checkpointables: Any = None) -> dict[str, Any]:
    """Loads items by name, onto targets if given; all of them if no target is given.

    Raises:
        InvalidLayoutError: the checkpoint does not exist; it is a ValueError.
        KeyError: the item does not exist.
    """
    targets = _standard(abstract_checkpointables)
    if targets is not None:
        check_names(targets, argument="abstract_checkpointables", may_be_empty=True)
    refuse_tensors(path, "load")
    found = found_checkpoint(path)
    there = named_items(path, found, "load")
    if found.deleting in (targets or ()):
        raise DeletionInProgressError(f"{path}: item {found.deleting!r} is being deleted")
    if missing := (targets or {}).keys() - {*there}:
        raise KeyError(
            f"Requested checkpointables: {sorted(missing)} for loading were not found in the "
            f"checkpoint {path}, which has {there}"
        )
    if "" in found.items and not targets:
        raise handlers.NoEntryError(
            f"Failed to load checkpointable: all of {path}, due to incompatible handler: the "
            "directory is one tree without metadata. Use `load`"
        )
    return {n: _load_item(path, found, n, t) for n, t in (targets or dict.fromkeys(there)).items()}


def _load_item(path: PathLike, found: Found, name: str, target: Any) -> Any:
    folder = os.path.join(path, name)
    saved_by = found.metadata.handlers.get(name, "")
    registry = get_context().checkpointables.registry
    handler = handlers.for_load(registry, target, name, saved_by)
    if handler is not None and not (is_tree(found, name) and target is None):
        return handlers.load_files(handler, folder, target)
    fallback = [STATE] if is_tree(found, name) else []
    handlers.check_handler(registry, saved_by, target, name, *fallback)
    if is_tree(found, name):
        try:
            return load_tree(folder, target)
        except TreeMismatch as error:
            raise handlers.MisfitError(f"{error}", error.differences) from error
    try:
        return restore(path, item=name)
    except (UnsupportedFormat, CheckpointNotFound, CorruptCheckpoint) as error:
        if isinstance(error, CorruptCheckpoint) and not _lacks_tree(error):
            raise
        if saved_by.endswith(handlers.StatefulCheckpointableHandler.__name__):
            raise ValueError(
                f"{folder}: pass the `StatefulCheckpointable` object to load"
            ) from error
        raise handlers.NoEntryError(
            f"Failed to load checkpointable: {name!r} due to incompatible handler: {saved_by!r} "
            f"saved {folder}; register it, or one for the name. {error}"
        ) from error


@contextlib.contextmanager
def reading_tree(path: PathLike, folder: str) -> Iterator[None]:
    """Raises InvalidLayoutError where a directory lacks a file that describes a tree."""
    try:
        yield
    except CorruptCheckpoint as error:
        if not _lacks_tree(error):
            raise
        raise _no_tree(path, f"in {folder}: {error}") from error


def _lacks_tree(error: CorruptCheckpoint) -> bool:
    """Returns whether an error is about the file that describes a tree, which is missing."""
    file = error.file or ""
    return file.endswith(f"/{names.TREE_METADATA}") and locate(file)[0].kind(file) is None


def check_target(target: Any) -> None:
    """Raises TypeError for leaves that do not describe the value to restore."""
    wrong = {type(leaf) for leaf in jax.tree.leaves(target) if not handlers.is_abstract(leaf)}
    if wrong:
        raise TypeError(f"Unsupported abstract leaf type for loading: {sorted(map(str, wrong))}")


def _standard(target: Any) -> Any:
    """Returns a target, or the target in metadata; on the program's mesh if it names no mesh."""
    if hasattr(target, "init_timestamp_nsecs"):  # CheckpointMetadata
        return target.metadata

    def on_mesh(leaf: Any) -> Any:
        sharding: Any = getattr(leaf, "sharding", None)
        if not isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
            return leaf
        here = jax.sharding.NamedSharding(jax.sharding.get_mesh(), sharding.spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)

    return tree_util.tree_map(on_mesh, target)


# --- safetensors --------------------------------------------------------------------------------


def tensors(path: PathLike) -> list[Checkpoint]:
    """Opens the safetensors files that a path means; InvalidLayoutError if there are none."""
    where, suffix = epath.Path(path), ".safetensors"
    files = [where] if where.name.endswith(suffix) else sorted(where.glob(f"*{suffix}"))
    if not files:
        raise InvalidLayoutError(f"{path} has no safetensors")
    return [open_checkpoint(file) for file in files]


def has_tensors(path: PathLike) -> bool:
    """Returns whether a path means safetensors, by the layout of the context."""
    layout = get_context().checkpoint_layout
    if layout is not CheckpointLayout.AUTO:
        return layout is CheckpointLayout.SAFETENSORS
    try:
        return not is_orbax_checkpoint(path) and bool(tensors(path))
    except InvalidLayoutError:
        return False


def refuse_tensors(path: PathLike, verb: str) -> None:
    """Raises NotImplementedError for safetensors, which are not items."""
    if has_tensors(path):
        raise NotImplementedError(f"{path}: safetensors are one dict, without items. Use `{verb}`")


def _load_tensors(path: PathLike, target: Any) -> dict[str, Any]:
    """Loads safetensors files as one dict by name."""
    if target is not None and not tree_util.all_leaves(list(target.values())):
        raise ValueError("The PyTree is not a flat dictionary.")
    found, numpy = {}, target is None
    for file in tensors(path):
        here = {".".join(names): names for names in _trees.by_name(file.abstract())}
        wanted = here.keys() if target is None else here.keys() & target.keys()
        like = None if target is None else _trees.nested({here[n]: target[n] for n in wanted})
        tree = file.restore(like, extra="error" if numpy else "ignore", as_numpy=numpy)
        found |= to_flat_dict(tree, ".")
    if missing := (target or {}).keys() - found.keys():
        raise KeyError(f"{path} has no tensors {sorted(missing)}")
    return found


def is_orbax_checkpoint(path: PathLike) -> bool:
    """Returns whether there is a checkpoint at a path."""
    try:
        found_checkpoint(path)
    except InvalidLayoutError:
        return False
    return True


def load_async(
    path: PathLike, abstract_state: Any = None, *, checkpointable_name: str | None = STATE
) -> AsyncResponse:
    """Loads safetensors, at once; as in Orbax, nothing else."""
    if get_context().checkpoint_layout is not CheckpointLayout.SAFETENSORS:
        raise NotImplementedError("load_async loads only safetensors; use load, or jaxckpt.restore")
    return Done(load(path, abstract_state, checkpointable_name=checkpointable_name))


def load_checkpointables_async(
    path: PathLike, abstract_checkpointables: Any = None
) -> AsyncResponse:
    """Is not there in Orbax either."""
    raise NotImplementedError("use load_checkpointables, or jaxckpt.restore(path, item=...)")


load_pytree, load_pytree_async = renamed(load), renamed(load_async)
