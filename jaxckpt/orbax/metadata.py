"""Describes a checkpoint without reading its arrays."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax import tree_util
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxckpt import Checkpoint
from jaxckpt import open as open_checkpoint
from jaxckpt._disk.find import find
from jaxckpt._disk.found import Found
from jaxckpt._inspect.open import custom_of
from jaxckpt.format import jsontext, names
from jaxckpt.format.sharding import SavedSharding
from jaxckpt.format.tree import path_text
from jaxckpt.orbax import _handling, _trees
from jaxckpt.storage import locate


@dataclass
class StepMetadata:
    """The facts about a checkpoint.

    Attributes:
        item_handlers: The name of its handler, or the handler's name of each item.
        item_metadata: Describes its tree, or each item.
        metrics: Its numbers by name.
        performance_metrics: None.
        init_timestamp_nsecs: When the save began.
        commit_timestamp_nsecs: When it was committed.
        custom_metadata: What the program stored with it.
    """

    item_handlers: Any = None
    item_metadata: Any = None
    metrics: dict[str, Any] = field(default_factory=dict)
    performance_metrics: Any = None
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class RootMetadata:
    """The facts about a run.

    Attributes:
        internal_metadata: Nothing.
        custom_metadata: What the program stored with it.
    """

    internal_metadata: dict[str, Any] = field(default_factory=dict)
    custom_metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class Metadata:
    """A leaf: its `name`, and the `directory` of its tree; equal also where these differ."""

    name: str = field(compare=False)
    directory: Any = field(compare=False)


@dataclass
class StringMetadata(Metadata):
    """Text."""


@dataclass
class StorageMetadata:
    """Describes a stored array: `chunk_shape` is a unit of reads, `write_shape` of writes."""

    chunk_shape: tuple[int, ...]
    write_shape: tuple[int, ...] | None = None


@dataclass
class ArrayMetadata(Metadata):
    """An array: its `shape`, `sharding`, `dtype` and `storage`, as far as they are known."""

    shape: tuple[int, ...] = ()
    sharding: Any = None
    dtype: Any = None
    storage: StorageMetadata | None = None


@dataclass
class ScalarMetadata(ArrayMetadata):
    """A number of Python."""


@tree_util.register_pytree_with_keys_class
class TreeMetadata(Mapping[Any, Any]):
    """The metadata of a tree's leaves, in the shape of the tree; a pytree itself."""

    use_zarr3 = True

    def __init__(self, tree: Any, custom_metadata: Any = None) -> None:
        self.tree, self.custom_metadata = tree, custom_metadata

    def __getitem__(self, key: Any) -> Any:
        return self.tree[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def __repr__(self) -> str:
        return f"TreeMetadata(custom_metadata={self.custom_metadata}, tree={self.tree})"

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Returns the children of the tree with their keys."""
        top = self.tree
        below, tree = tree_util.tree_flatten_with_path(top, is_leaf=lambda node: node is not top)
        pairs = [(keys[0], child) for keys, child in below if keys]
        return (pairs or [(tree_util.GetAttrKey("tree"), top)]), (tree, self.custom_metadata)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> TreeMetadata:
        """Returns metadata of another tree of the same shape."""
        return cls(aux[0].unflatten(children), aux[1])


@dataclass(frozen=True)
class ShardingMetadata:
    """The sharding with which an array was saved.

    Its attributes: `partition_spec`, `axis_names` and `shape` of the mesh, or `device_str`.
    """

    saved: SavedSharding

    def __getattr__(self, name: str) -> Any:
        given = {"partition_spec": "spec", "shape": "axis_sizes", "device_str": "device"}
        value = getattr(vars(self).get("saved"), given.get(name, name))
        return {"shape": np.array, "axis_names": list}.get(name, lambda same: same)(value)

    def to_jax_sharding(self) -> Any:
        """Returns it on the devices of this job; the first, for a single one that is not here.

        Raises:
            ValueError: a device of a mesh does not exist here.
        """
        devices = {device.id: device for device in jax.devices()}
        if self.saved.is_single_device:
            named = {f"{device}": device for device in devices.values()}
            return SingleDeviceSharding(named.get(self.saved.device, jax.devices()[0]))
        ids = self.saved.device_ids or tuple(devices)
        if missing := [i for i in ids if i not in devices]:
            raise ValueError(f"devices {missing} do not exist here: {self.saved}")
        mesh = np.array([devices[i] for i in ids]).reshape(self.saved.axis_sizes)
        types = [AxisType.__members__.get(kind, AxisType.Auto) for kind in self.saved.axis_types]
        mesh = Mesh(mesh, self.saved.axis_names, axis_types=tuple(types) or None)
        return NamedSharding(mesh, PartitionSpec(*self.saved.spec))


def of_tree(directory: str | os.PathLike[str]) -> TreeMetadata:
    """Describes a tree; FileNotFoundError if there is none."""
    found = open_checkpoint(directory)

    def describe(path: _trees.Names, leaf: Any, sharding: Any, storage: Any) -> Any:
        where = ".".join(path), directory
        if isinstance(leaf, (str, bytes)):
            return StringMetadata(*where)
        if isinstance(leaf, (bool, int, float, np.generic)):
            return ScalarMetadata(*where, dtype=np.asarray(leaf).dtype)
        return ArrayMetadata(*where, tuple(leaf.shape), sharding, leaf.dtype, storage)

    return TreeMetadata(map_leaves(found, describe), custom_of(found))


def map_leaves(found: Checkpoint, describe: Callable[..., Any]) -> Any:
    """Describes each leaf by its names, its shape and dtype, its sharding and its storage."""

    def described(path: _trees.Names, leaf: Any) -> Any:
        data, sharding = _trees.data_of(leaf), None
        saved = found.leaves.get(path_text(path))
        if saved is None or saved.chunk_shape is None:
            return describe(path, data, None, None)
        if (given := saved.saved_sharding) is not None:
            # A key has fewer dimensions than its data, which is what is stored.
            more = () if data is leaf or given.is_single_device else [None] * data.ndim
            spec = (*given.spec, *more)[: data.ndim]
            sharding = ShardingMetadata(replace(given, spec=spec))
        written = None if saved.kind == "numpy" else saved.chunk_shape
        storage = StorageMetadata(saved.inner_shape or saved.chunk_shape, written)
        return describe(path, data, sharding, storage)

    return _trees.map_named(described, _trees.abstract(found))


def found_at(path: str | os.PathLike[str]) -> Found:
    """Finds a checkpoint; FileNotFoundError if there is none."""
    return find(*locate(path))


def items_of(found: Found) -> list[str]:
    """Returns the items of a checkpoint, including items of a program's own handlers."""
    entries = found.entries(found.path).items()
    folders = [name for name, entry in entries if entry.kind == "dir" and name != found.deleting]
    return [name for name in folders if not names.is_temporary(name)]


def of_step(found: Found, items: Any) -> Any:
    """Returns the metadata of a checkpoint."""
    handlers = found.metadata.handlers.get("") or dict(found.metadata.handlers)
    return StepMetadata(item_handlers=handlers, item_metadata=items, **facts_of(found))


def facts_of(found: Found) -> dict[str, Any]:
    """Returns the times and the custom metadata of a checkpoint, by Orbax's names."""
    saved = found.metadata
    times = {"init_timestamp_nsecs": saved.init_ns, "commit_timestamp_nsecs": saved.commit_ns}
    return {**times, "custom_metadata": dict(saved.custom_metadata or {})}


def get_step_metadata(path: str | os.PathLike[str]) -> Any:
    """Returns the contents of a checkpoint's metadata file; ValueError if the file is missing."""
    found, folder = _handling.recorded(os.fspath(path))
    try:
        data = found.read(folder, names.CHECKPOINT_METADATA)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"Step metadata not found at {path}: it is no checkpoint.") from error
    saved, fields = jsontext.loads(data, file=f"{path}"), vars(StepMetadata())
    return StepMetadata(**{k: v for k, v in saved.items() if k in fields})


value = tree = sys.modules[__name__]  # `metadata.value.ArrayMetadata`, `metadata.tree.TreeMetadata`
