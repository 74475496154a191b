"""Trees as the options of the active context store, load and describe them."""

from __future__ import annotations

import os
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np
from jax import tree_util

from jaxckpt import open as open_checkpoint
from jaxckpt.orbax import _trees
from jaxckpt.orbax.metadata import ShardingMetadata, map_leaves

ACTIVE: Final[ContextVar[Any]] = ContextVar("context", default=None)
# Leaves of a target that mean the same to jaxckpt.
_ARRAYS: Final = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_KNOWN: Final = (*_ARRAYS, bool, int, float, str, bytes, type(_trees.PLACEHOLDER))


def cast(tree: Any) -> Any:
    """Returns a tree in the dtypes of the context's storage options."""
    if (context := ACTIVE.get()) is None:
        return tree
    saving = context.array.saving
    scoped, dtype = saving.scoped_storage_options_creator, saving.storage_options.dtype
    if scoped is None and dtype is None:
        return tree

    def changed(keys: Any, leaf: Any) -> Any:
        own = scoped(keys, leaf) if scoped is not None else None
        wanted = dtype if own is None or own.dtype is None else own.dtype
        return _trees.cast(leaf, wanted)

    return tree_util.tree_map_with_path(changed, tree)


def load_tree(path: str | os.PathLike[str], target: Any = None) -> Any:
    """Loads the tree in a directory."""
    context, found = ACTIVE.get(), open_checkpoint(path)
    if target is None:
        limit = context and context.memory.read_concurrent_bytes
        return _trees.untyped(found.restore(**({} if limit is None else {"budget_bytes": limit})))
    like = target
    if not all(isinstance(leaf, _KNOWN) for leaf in jax.tree.leaves(target)):
        saved = _trees.by_name(found.abstract())
        like = _trees.map_named(lambda names, leaf: _wanted(leaf, saved.get(names)), target)
    return _trees.restore_like(
        found,
        like,
        resize=context is not None and context.array.loading.enable_padding_and_truncation,
        partial=context is not None and context.pytree.loading.partial_load,
    )


def _wanted(leaf: Any, saved: Any) -> Any:
    """Returns the target of jaxckpt for one of Orbax: a type, an abstract array or a value."""
    if isinstance(leaf, _KNOWN):
        return leaf
    kind = leaf if isinstance(leaf, type) else type(leaf)
    if issubclass(kind, (bool, int, float, str, bytes, np.generic)):
        return kind()
    shape, dtype = (None if leaf is kind else getattr(leaf, n, None) for n in ("shape", "dtype"))
    shape = np.shape(saved) if shape is None else shape
    dtype = getattr(saved, "dtype", None) if dtype is None else dtype
    if hasattr(kind, "sharding"):
        sharding = None if leaf is kind else _trees.sharding_of(leaf)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return np.broadcast_to(np.zeros((), dtype), shape)


@dataclass
class ArrayMetadata:
    """A jax array."""

    shape: tuple[int, ...] | None
    dtype: Any
    sharding_metadata: ShardingMetadata | None
    storage_metadata: Any  # the shape of its chunks

    @property
    def sharding(self) -> jax.sharding.Sharding | None:
        """Returns the saved sharding, on the devices of this job."""
        return self.sharding_metadata and self.sharding_metadata.to_jax_sharding()


@dataclass
class NumpyMetadata:
    """A numpy array."""

    shape: tuple[int, ...] | None
    dtype: Any
    storage_metadata: Any  # the shape of its chunks


def tree_metadata(path: str | os.PathLike[str]) -> Any:
    """Describes the leaves of a tree, in its shape as Orbax returns it."""
    return map_leaves(open_checkpoint(path), _described)


def _described(_: Any, leaf: Any, sharding: ShardingMetadata | None, storage: Any) -> Any:
    if isinstance(leaf, (str, bytes)):
        return "string"
    if isinstance(leaf, (bool, int, float, np.generic)):
        return np.asarray(leaf).item()
    if isinstance(leaf, np.ndarray):
        return NumpyMetadata(leaf.shape, leaf.dtype, storage)
    return ArrayMetadata(tuple(leaf.shape), leaf.dtype, sharding, storage)
