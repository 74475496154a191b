"""Trees as Orbax returns them, and the targets that make jaxckpt return them.

Without a target, Orbax returns lists for tuples, dicts for every other container, text for the keys
of dicts, None for an empty container of a class of its own, and Python's numbers for numpy's.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, Final

import jax
import numpy as np
from jax import tree_util
from jax.sharding import NamedSharding, Sharding

from jaxckpt import Checkpoint, TreeMismatch, restore
from jaxckpt import open as open_checkpoint
from jaxckpt.format.tree import parse_path, path_text

PLACEHOLDER: Final = ...  # in a target: a leaf that is not restored

_DIFFER: Final = "User-provided restore item and on-disk value differ"

_NUMBERS: Final = (bool, int, float)
_is_none: Final = partial(operator.is_, None)

Names = tuple[str, ...]  # the keys on the way to a leaf


def names_of(keys: tuple[Any, ...]) -> Names:
    """Returns a key path of JAX as text."""
    return tuple(map(_name_of, keys))


@lru_cache(1 << 16)
def _name_of(key: Any) -> str:
    return tree_util.keystr((key,), simple=True)


def by_name(tree: Any, is_leaf: Any = None) -> dict[Names, Any]:
    """Returns the leaves of a tree by their names."""
    return {names_of(k): leaf for k, leaf in tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)}


def map_named(change: Callable[[Names, Any], Any], tree: Any, is_leaf: Any = None) -> Any:
    """Returns a tree with each leaf changed by a function of its names and its value."""
    return tree_util.tree_map_with_path(
        lambda keys, leaf: change(names_of(keys), leaf), tree, is_leaf=is_leaf
    )


def is_empty(node: Any) -> bool:
    """Returns whether a node is a container, or None, with nothing in it."""
    return not tree_util.tree_leaves(node, is_leaf=lambda below: below is not node)


def plain(tree: Any, *, keep_empty: bool = False) -> Any:
    """Returns a tree in lists and dicts; with `keep_empty`, empty nodes of any class stay."""
    if type(tree) is dict and tree:  # the same as below, but quick
        return {str(key): plain(tree[key], keep_empty=keep_empty) for key in sorted(tree)}
    below, _ = tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    if not below:
        kept = keep_empty or tree is None or type(tree) in (dict, list, tuple)
        return tree if kept else {} if isinstance(tree, Mapping) else None
    if not below[0][0]:
        return tree
    children = {names_of(keys)[0]: plain(child, keep_empty=keep_empty) for keys, child in below}
    return list(children.values()) if type(tree) in (list, tuple) else children


def untyped(tree: Any) -> Any:
    """Returns a restored tree with the types that Orbax returns without a target.

    Example:
        >>> import optax
        >>> untyped([{0: (1, np.float32(2))}, optax.EmptyState(), ()])
        [{'0': [1, 2.0]}, None, ()]
    """
    return jax.tree.map(lambda x: x.item() if isinstance(x, np.generic) else x, plain(tree))


def abstract(found: Checkpoint) -> Any:
    """Returns a checkpoint's tree as Orbax describes it; numbers are numpy's, with their dtypes."""

    def typed(names: Names, leaf: Any) -> Any:
        saved = found.leaves.get(path_text(names)) if isinstance(leaf, _NUMBERS) else None
        return np.zeros((), saved.dtype)[()] if saved and saved.dtype else leaf

    return map_named(typed, plain(found.abstract()))


def nested(leaves: Mapping[Names, Any]) -> Any:
    """Returns dicts of dicts with these leaves; ValueError if one of several is the whole tree."""
    if () in leaves:
        (tree,) = leaves.values()
        return tree
    tree: dict[str, Any] = {}
    for names, leaf in leaves.items():
        node = tree
        for name in names[:-1]:
            node = node.setdefault(name, {})
        node[names[-1]] = leaf
    return tree


# --- targets ---------------------------------------------------------------------------------


def restore_standard(
    path: str | os.PathLike[str], target: Any = None, *, strict: bool = True
) -> Any:
    """Restores as Orbax's StandardRestore: the leaves of the target give the types.

    Args:
        target: Arrays, `jax.ShapeDtypeStruct`s, numbers; `PLACEHOLDER` for a leaf to leave out.
        strict: If False, jax arrays are cut off or padded to the shapes of the target.
    """
    if target is None:
        return untyped(restore(path))
    if not any(map(_is_free, jax.tree.leaves(target))):
        return restore_like(path, target, resize=not strict)
    found = open_checkpoint(path)
    saved = by_name(found.abstract())

    def wanted(names: Names, leaf: Any) -> Any:
        is_host = not isinstance(saved.get(names, leaf), jax.ShapeDtypeStruct)
        return _zeros(leaf.shape, leaf.dtype) if is_host and _is_free(leaf) else leaf

    return restore_like(found, map_named(wanted, target), resize=not strict)


def _canonical(leaf: Any) -> Any:
    """Returns the target with the dtype of jax arrays."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return leaf.update(dtype=jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True))


def _may_be_key_data(leaf: Any) -> bool:
    is_jax = isinstance(leaf, (jax.ShapeDtypeStruct, jax.Array))
    return is_jax and leaf.dtype == np.uint32 and leaf.ndim > 0


def _as_saved(leaf: Any, saved: Any) -> Any:
    """Returns a target of the saved shape for numpy, and of a PRNG key for the key's data."""
    if isinstance(leaf, np.ndarray):
        return _zeros(np.shape(data_of(saved)), leaf.dtype)
    if not _may_be_key_data(leaf) or data_of(saved) is saved:
        return leaf
    return saved.update(sharding=_cut(leaf.sharding, saved.ndim))


def data_of(saved: Any) -> Any:
    """Returns a leaf as Orbax describes it: a PRNG key as its data."""
    is_key = isinstance(saved, jax.ShapeDtypeStruct) and not isinstance(saved.dtype, np.dtype)
    return jax.eval_shape(jax.random.key_data, saved) if is_key else saved


def as_data(leaf: Any) -> Any:
    """Returns a leaf as Orbax stores it: a PRNG key as its data."""
    is_key = isinstance(leaf, jax.Array) and not isinstance(leaf.dtype, np.dtype)
    return jax.random.key_data(leaf) if is_key else leaf


def _is_free(leaf: Any) -> bool:
    """Returns whether a leaf of a target leaves open where it goes."""
    return isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None


def restore_pytree(
    path: str | os.PathLike[str],
    target: Any = None,
    restore_args: Any = None,
    *,
    partial: bool = False,
) -> Any:
    """Restores as Orbax's PyTreeRestore: the target gives the structure, the args the types.

    Args:
        restore_args: `RestoreArgs` of jaxckpt or Orbax in the tree of the target, or else in the
            saved tree. A leaf without them is restored as it was saved.
        partial: Whether saved leaves that are not in the target are left out, and leaves that were
            not saved keep the values in the target.
    """
    if target is None and restore_args is None:
        return untyped(restore(path))
    found = open_checkpoint(path)
    there = abstract(found)
    saved, args = by_name(there), by_name(restore_args)
    resize = any(getattr(arg, "strict", True) is False for arg in args.values())

    def wanted(names: Names, leaf: Any) -> Any:
        # A partial restore of Orbax takes only the structure of a target, and leaves out by args.
        if names not in saved or (leaf is PLACEHOLDER and not partial):
            return leaf
        arg, shape = args.get(names), np.shape(saved[names])
        leaf = wanted_leaf(saved[names], arg, leaf)
        is_strict = getattr(arg, "strict", False) and not isinstance(leaf, np.ndarray)
        if resize and is_strict and np.shape(leaf) != shape:
            raise ValueError(f"{_DIFFER}: the shape of {names}, whose args have strict=True")
        return leaf

    like = map_named(wanted, there if target is None else target)

    def rounded(names: Names, leaf: Any) -> Any:
        dtype = getattr(args.get(names), "dtype", None) if isinstance(leaf, _NUMBERS) else None
        return leaf if dtype is None else type(leaf)(cast(leaf, dtype))

    return map_named(rounded, restore_like(found, like, resize=resize, partial=partial))


def restore_like(
    source: str | os.PathLike[str] | Checkpoint,
    like: Any,
    *,
    resize: bool = False,
    partial: bool = False,
) -> Any:
    """Restores onto a target, without the leaves that are `PLACEHOLDER` or None there.

    As with Orbax, numbers may be cast to any dtype, also where some of the values change, and a
    numpy array has the saved shape, whatever the shape in the target, which only jax arrays are
    cut off or padded to. Without x64, jax arrays have 32 bits, and data of a PRNG key stands for
    the key.
    """
    like = jax.tree.map(_canonical, like)
    if any(isinstance(x, np.ndarray) or _may_be_key_data(x) for x in jax.tree.leaves(like)):
        source = source if isinstance(source, Checkpoint) else open_checkpoint(source)
        there = by_name(source.abstract())
        like = map_named(lambda n, leaf: _as_saved(leaf, there[n]) if n in there else leaf, like)
    try:
        return _restore_onto(source, like, resize, partial)
    except TreeMismatch as error:
        found = source if isinstance(source, Checkpoint) else open_checkpoint(source)
        saved = by_name(found.abstract(), is_leaf=is_empty)

        def fitted(names: Names, leaf: Any) -> Any:
            """Returns None for a node that is empty in the target or as saved, but not in both."""
            if names in saved and is_empty(leaf) != is_empty(saved[names]):
                return None
            return _with_dtype(leaf, saved.get(names))

        uncast = map_named(fitted, like, is_leaf=is_empty)
        before, after = (tree_util.tree_leaves(one, is_leaf=is_empty) for one in (like, uncast))
        if all(map(operator.is_, after, before)):
            raise TreeMismatch(f"{_DIFFER}: {error}", error.differences) from error
    restored = by_name(_restore_onto(found, uncast, resize, partial))

    def value(names: Names, leaf: Any) -> Any:
        if is_empty(leaf):
            return leaf
        return _cast_to(leaf, restored[names]) if names in restored else plain(saved[names])

    return map_named(value, like, is_leaf=is_empty)


def _with_dtype(leaf: Any, saved: Any) -> Any:
    """Returns a leaf of a target with the dtype that was saved, if both are numbers."""
    dtype, wanted = _dtype_of(saved), _dtype_of(leaf)
    if dtype is None or wanted is None or wanted == dtype:  # None is equal to float64
        return leaf
    if isinstance(saved, _NUMBERS):
        return leaf if np.shape(leaf) else saved  # of another shape: an error
    if isinstance(leaf, (np.ndarray, np.generic, *_NUMBERS)):
        return _zeros(np.shape(leaf), dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)


def _dtype_of(leaf: Any) -> np.dtype[Any] | None:
    dtype = np.asarray(leaf).dtype if isinstance(leaf, _NUMBERS) else getattr(leaf, "dtype", None)
    return dtype if isinstance(dtype, np.dtype) else None


def cast(leaf: Any, dtype: Any) -> Any:
    """Returns an array or number in a dtype, if any; other leaves, such as keys, as they are."""
    if dtype is None:
        return leaf
    if isinstance(leaf, _NUMBERS):
        return np.asarray(leaf).astype(dtype).item()
    return leaf if _dtype_of(leaf) is None else leaf.astype(dtype)


def _cast_to(wanted: Any, value: Any) -> Any:
    dtype = _dtype_of(wanted)
    if dtype is None or dtype == _dtype_of(value):
        return value
    if isinstance(wanted, (*_NUMBERS, np.generic)):
        return type(wanted)(value)
    value = (np.asarray(value) if isinstance(value, _NUMBERS) else value).astype(wanted.dtype)
    is_placed = getattr(wanted, "sharding", None) is not None
    return jax.device_put(value, wanted.sharding) if is_placed else value


def _restore_onto(
    source: str | os.PathLike[str] | Checkpoint, like: Any, resize: bool, partial: bool
) -> Any:
    if partial:
        source = source if isinstance(source, Checkpoint) else open_checkpoint(source)
        kept = _unsaved(like, by_name(source.abstract(), is_leaf=is_empty))
        like = map_named(lambda names, leaf: 0 if names in kept else leaf, like)
        restored = source.restore(like, resize=resize, extra="ignore", missing="keep")
        return map_named(lambda names, leaf: kept.get(names, leaf), restored)
    leaves = tree_util.tree_leaves_with_path(like, is_leaf=_is_none)
    holes = [names_of(keys) for keys, leaf in leaves if leaf is PLACEHOLDER]
    # By the names of a None: placeholders for all leaves that were saved there.
    below: dict[Names, Any] = {names_of(keys): {} for keys, leaf in leaves if leaf is None}
    if not (holes or below) and not isinstance(source, Checkpoint):
        return restore(source, like, resize=resize)
    found = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    if holes and (wrong := _above(by_name(found.abstract())).intersection(holes)):
        raise ValueError(f"{_DIFFER}: PLACEHOLDER stands for a leaf, not for all of {wrong}")
    for path in map(parse_path, found.leaves if below else ()):
        for i in range(len(path) + 1):
            below.get(path[:i], {})[path[i:]] = PLACEHOLDER
    full = map_named(lambda n, x: nested(below[n]) if below.get(n) else x, like, _is_none)
    restored = found.restore(full, resize=resize)
    return jax.tree.map(lambda x, y: None if x is None else y, like, restored, is_leaf=_is_none)


def _above(saved: Mapping[Names, Any]) -> set[Names]:
    """Returns the names of the containers of leaves."""
    return {names[:i] for names in saved for i in range(len(names))}


def _unsaved(like: Any, saved: Mapping[Names, Any]) -> dict[Names, Any]:
    """Returns the leaves of a target that were not saved, by name.

    Raises:
        TypeError: a leaf of the target was saved as a container, or lies below a saved leaf.
        ValueError: a leaf of the target is beyond the end of a saved sequence.
    """
    containers = _above(saved) | {()}
    unsaved: dict[Names, Any] = {}
    for keys, leaf in tree_util.tree_leaves_with_path(like):
        if (names := names_of(keys)) not in saved:
            depth = next((i for i in range(len(names) + 1) if names[:i] not in containers), 0)
            if depth == 0 or names[:depth] in saved:
                raise TypeError(f"{_DIFFER}: {'/'.join(names)} is in another structure there")
            if isinstance(keys[depth - 1], tree_util.SequenceKey):
                raise ValueError(f"{_DIFFER}: the sequence of {'/'.join(names)} is shorter there")
            unsaved[names] = leaf
    return unsaved


def wanted_leaf(saved: Any, args: Any, target: Any = None) -> Any:
    """Returns the target for a leaf, from what was saved and Orbax's `RestoreArgs`.

    Strict `ArrayRestoreArgs` without a shape or dtype take it from an array in the target.
    """
    kind, dtype = getattr(args, "restore_type", None), getattr(args, "dtype", None)
    if isinstance(kind, type) and issubclass(kind, (*_NUMBERS, str, bytes, np.generic, type(...))):
        return kind()
    if isinstance(saved, (str, bytes, type(None))):
        return saved
    shape, saved_dtype = np.shape(saved), getattr(saved, "dtype", None) or np.asarray(saved).dtype
    sharding = sharding_of(args)
    if kind is np.ndarray and (data := data_of(saved)) is not saved:
        return _zeros(data.shape, data.dtype)
    if not isinstance(saved_dtype, np.dtype):  # the dtype of keys
        return jax.ShapeDtypeStruct(shape, saved_dtype, sharding=_cut(sharding, len(shape)))
    sizes = [getattr(args, name, None) for name in ("global_shape", "shape")]
    if getattr(args, "strict", False) and getattr(target, "shape", ()) and _dtype_of(target):
        sizes, dtype = [*sizes, target.shape], dtype or target.dtype
    shape = next((tuple(size) for size in sizes if size is not None), shape)
    is_jax = sharding is not None or kind is jax.Array or isinstance(saved, jax.ShapeDtypeStruct)
    if is_jax and kind is not np.ndarray:
        dtype = jax.dtypes.canonicalize_dtype(dtype or saved_dtype)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    if kind is np.ndarray or isinstance(saved, np.ndarray):
        return _zeros(shape, dtype or saved_dtype)
    return np.zeros((), dtype or saved_dtype).item()


def sharding_of(args: Any) -> Any:
    """Returns the sharding that `ArrayRestoreArgs` ask for, or None."""
    sharding: Any = getattr(args, "sharding", None)
    if sharding is not None:  # from metadata, it is only a description
        return sharding if isinstance(sharding, Sharding) else sharding.to_jax_sharding()
    mesh, axes = getattr(args, "mesh", None), getattr(args, "mesh_axes", None)
    return None if mesh is None or axes is None else NamedSharding(mesh, axes)


def _cut(sharding: Any, rank: int) -> Any:
    """Returns a sharding of a key's data as one of the key, which lacks the last dimensions."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    axes = getattr(sharding.spec, "partitions", sharding.spec)  # without `reduced`
    return NamedSharding(sharding.mesh, type(sharding.spec)(*axes[:rank]))


def _zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Returns a numpy array as a target, which takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)
