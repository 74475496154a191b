"""`metadata` and its relatives: the facts that need no reading of arrays."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from etils import epath

from jaxckpt._disk.found import Found
from jaxckpt._inspect.open import custom_of
from jaxckpt.orbax.metadata import facts_of, items_of
from jaxckpt.orbax.tree import to_flat_dict
from jaxckpt.orbax.v1 import handlers
from jaxckpt.orbax.v1._context import get_context
from jaxckpt.orbax.v1._loading import (
    PathLike,
    found_checkpoint,
    has_tensors,
    is_tree,
    item_path,
    named_items,
    reading_tree,
    refuse_tensors,
    tensors,
)
from jaxckpt.orbax.v1._saving import AUTO, RESERVED, renamed
from jaxckpt.orbax.v1._trees import tree_metadata
from jaxckpt.orbax.v1.arrays import to_shape_dtype_struct

PyTreeMetadata = Any
_T = TypeVar("_T")


@dataclass(kw_only=True)
class CheckpointMetadata(Generic[_T]):
    """The metadata of a checkpoint, or of one of its items."""

    path: epath.Path = field(kw_only=False)
    metadata: _T
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: Any = None

    @property
    def init_timestamp(self) -> datetime.datetime | None:
        """Returns when the save began."""
        return _time(self.init_timestamp_nsecs)

    @property
    def commit_timestamp(self) -> datetime.datetime | None:
        """Returns when it ended."""
        return _time(self.commit_timestamp_nsecs)


def _time(nsecs: int | None) -> datetime.datetime | None:
    return None if nsecs is None else datetime.datetime.fromtimestamp(nsecs / 1e9, tz=datetime.UTC)


def _of_checkpoint(path: PathLike, found: Found, metadata: Any) -> CheckpointMetadata[Any]:
    return CheckpointMetadata(epath.Path(path), metadata=metadata, **facts_of(found))


def metadata(path: PathLike, checkpointable_name: str | None = AUTO) -> CheckpointMetadata[Any]:
    """Returns the metadata of a tree.

    Raises:
        InvalidLayoutError: the checkpoint or tree does not exist; it is a ValueError.
    """
    if has_tensors(path):
        files = tensors(path)
        leaves = [to_flat_dict(file.abstract(), ".") for file in files]
        named = {n: to_shape_dtype_struct(x) for one in leaves for n, x in one.items()}
        custom = {key: text for file in files for key, text in custom_of(file).items()}
        changed = int(max(epath.Path(file.path).stat().mtime for file in files) * 1e9)
        more = {"commit_timestamp_nsecs": changed, "custom_metadata": custom}
        return CheckpointMetadata(epath.Path(path), metadata=named, **more)
    found = found_checkpoint(path)
    folder = item_path(path, found, checkpointable_name)
    with reading_tree(path, folder):
        return _of_checkpoint(path, found, tree_metadata(folder))


def checkpointables_metadata(path: PathLike) -> CheckpointMetadata[dict[str, Any]]:
    """Returns the metadata of all items; None for items that are not trees."""
    refuse_tensors(path, "metadata")
    found = found_checkpoint(path)
    there = dict.fromkeys([*named_items(path, found, "metadata"), *items_of(found)])
    items = {n: _of_item(path, found, n) for n in there if n not in RESERVED}
    return _of_checkpoint(path, found, items)


def _of_item(path: PathLike, found: Found, name: str) -> Any:
    folder, registry = os.path.join(path, name), get_context().checkpointables.registry
    if is_tree(found, name):
        return tree_metadata(folder)
    handler = handlers.for_load(registry, None, name, found.metadata.handlers.get(name, ""))
    return handler and handlers.run(handler.metadata(epath.Path(folder)))


pytree_metadata = renamed(metadata)
