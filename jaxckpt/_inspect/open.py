"""Describes a checkpoint from its metadata alone. Needs no devices and no jax."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final, TypeVar, final

from jaxckpt._core import notebook
from jaxckpt._core.check import check_type, explained
from jaxckpt._core.log import logger
from jaxckpt._core.select import Globs, check_globs, selector
from jaxckpt._core.text import counted, size_text
from jaxckpt._disk.find import at_rest
from jaxckpt._disk.found import Found, JsonItem, check_current, while_current
from jaxckpt._disk.item import decode_item, read_item
from jaxckpt._disk.native import Item, Undecoded, subtree
from jaxckpt._inspect import tree_text
from jaxckpt.errors import CheckpointNotFound, CorruptCheckpoint, printable
from jaxckpt.format.arrays import bytes_of
from jaxckpt.format.sharding import SavedSharding
from jaxckpt.format.tree import Leaf, Path, parse_path, path_text
from jaxckpt.storage import locate
from jaxckpt.types import LeafInfo, LeafStatistics

_T = TypeVar("_T")

_MAX_LINES: Final = 200


@final
class Checkpoint:
    """One tree of a committed checkpoint, or a part of the tree; made by `jaxckpt.open`.

    `ckpt["params/layer_0"]` returns a part, `ckpt.restore()` reads it, `print(ckpt)` shows it. The
    leaves are decoded when they are first needed, and `ckpt["one/leaf"]` decodes only that leaf.

    Attributes:
        path: Directory of the checkpoint.
        item: Name of the item; "" for a checkpoint that is its own only item.
        items: Names of all items of the checkpoint.
        custom_metadata: The custom metadata passed to `save`.
        lineage: The source, if `fork`, `convert` or `import_safetensors` made the checkpoint.
    """

    def __init__(self, found: Found, opened: Item | JsonItem | Undecoded, below: Path = ()) -> None:
        self._item, self._below = opened, below
        self.path = found.path
        self.item = opened.name
        self.items = tuple(found.items)
        self.custom_metadata: Mapping[str, Any] = dict(found.metadata.custom_metadata or {})
        self.lineage: Mapping[str, Any] = dict(found.record.lineage if found.record else {})
        self._found = found

    @property
    def _opened(self) -> Item | JsonItem:
        if isinstance(self._item, Undecoded):
            self._item = self._current(partial(decode_item, self._item))
        return self._item

    @property
    def _tree(self) -> Item | None:
        return self._opened if isinstance(self._opened, Item) else None

    def _current(self, decode: Callable[[], _T]) -> _T:
        """Decodes metadata; CheckpointNotFound if the checkpoint was replaced meanwhile."""
        try:
            return decode()
        except (CorruptCheckpoint, FileNotFoundError):
            check_current(self._found)
            raise

    @cached_property
    def leaves(self) -> Mapping[str, LeafInfo]:
        """The leaves by path, in tree order; a path has `~1` for a `/` in a key, `~0` for a `~`."""
        if (tree := self._tree) is None:
            return {}
        shardings = self._current(partial(_shardings, tree))
        return {leaf.text: _info(leaf, shardings.get(leaf.name)) for leaf in tree.tree.leaves}

    @property
    def size_bytes(self) -> int:
        """Returns the bytes of all values, uncompressed."""
        return sum(leaf.size_bytes for leaf in self.leaves.values())

    def __getitem__(self, path: str | int | tuple[object, ...]) -> Checkpoint:
        """Returns the part below a path: `"params/layer_0"`, an index, or a tuple of keys.

        A name that contains a `/` may be written as it is shown, or escaped as in `leaves`.

        Raises:
            KeyError: the tree lacks the path.
        """
        check_type("open", "the path of a part", path, str | int | tuple, "text or a tuple of keys")
        path = (path,) if isinstance(path, int) else path
        names, tree = parse_path(path), None
        if isinstance(self._item, Undecoded):  # of a large tree, one leaf alone is found quickly
            tree = self._current(partial(self._item.leaf, names))
        if tree is None:
            if (tree := self._tree) is None:
                raise KeyError(f"item {self.item!r} of {self.path} is JSON, not a tree")
            names = _names(path, tree.tree.leaves)
        return Checkpoint(self._found, subtree(tree, names), (*self._below, *names))

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    def restore(self, like: Any = None, **options: Any) -> Any:  # any pytree
        """Restores this part; takes the options of `jaxckpt.restore`."""
        from jaxckpt._restore.restore import RestoreRequest, Source, restore_from

        source = Source(
            where=self.path, within=partial(while_current, self._found), open=lambda _: self._opened
        )
        target = [like]
        del like  # so that `restore_from` can drop the last reference to its arrays
        return restore_from(source, target, RestoreRequest(**options))

    def abstract(self) -> Any:  # any pytree
        """Returns this part with shapes and dtypes in place of values, for use as a `like`.

        The containers and their keys are those that `restore()` returns. A jax array or key is a
        `jax.ShapeDtypeStruct`, a numpy array one of zeros that takes no memory, and any other value
        is the zero of its type. A JSON item is returned itself.

        Example:
            >>> import tempfile, jax.numpy as jnp, jaxckpt
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     jaxckpt.save(f"{folder}/a", {"w": (jnp.ones(3), 7)})
            ...     jaxckpt.open(f"{folder}/a").abstract()
            {'w': (ShapeDtypeStruct(shape=(3,), dtype=float32), 0)}
        """
        from jaxckpt._core import pytree

        if isinstance(self._opened, JsonItem):
            return self._opened.value
        return pytree.abstract(self._opened.tree)

    _as_like = abstract  # for `restore`, which takes a checkpoint as a target

    def statistics(self, *, only: Globs = None, skip: Globs = None) -> Mapping[str, LeafStatistics]:
        """Reads this part, and describes the values of each numeric leaf.

        Args:
            only, skip: Globs over leaf paths; the name of a container includes its leaves.

        Returns:
            Statistics by path. Uses at most 256 MiB of memory, or one chunk if it is larger.

        Raises:
            CorruptCheckpoint: stored data is missing or damaged; the error names leaf and file.
            ValueError: `only` or `skip` matches no leaf.
        """
        if self._tree is None:
            return {}
        leaves = self._tree.tree.leaves
        check_globs(only, skip, [leaf.path for leaf in leaves], where=self.path)
        chosen = selector(only, skip)
        return self._statistics([leaf for leaf in leaves if chosen(leaf.path)])

    def _statistics(self, leaves: Sequence[Leaf]) -> Mapping[str, LeafStatistics]:
        tree = self._tree
        if tree is None or not leaves:
            return {}
        from jaxckpt._inspect.value_stream import statistics  # and with it TensorStore

        return while_current(self._found, lambda _: statistics(tree, leaves))

    def __repr__(self) -> str:
        try:
            lines = _lines(self)
        except CheckpointNotFound as error:  # a debugger or log may show it later
            lines = [str(error)]
        return "\n".join(map(printable, lines))

    def _repr_html_(self) -> str | None:
        with contextlib.suppress(CheckpointNotFound):  # the text says so
            return notebook.html("checkpoint", self)
        return None


@explained("open")
def open(path: str | os.PathLike[str], *, item: str | None = None) -> Checkpoint:
    """Opens a checkpoint: reads its metadata, but no array data.

    Args:
        path: A checkpoint, one of its items, a run's root (opens its newest good step), or a
            safetensors file or index.
        item: Name of the item, if the checkpoint has several trees.

    Raises:
        CheckpointNotFound: `path` lacks a committed checkpoint.
        CorruptCheckpoint: its metadata is damaged; the error names the file.

    Example:
        >>> import tempfile, numpy as np, jaxckpt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jaxckpt.save(f"{folder}/a", {"w": np.ones((2, 3), np.float32), "step": 7})
        ...     ckpt = jaxckpt.open(f"{folder}/a")
        ...     print(ckpt.leaves["w"], "|", ckpt["step"].restore())
        float32[2,3] | 7
    """
    storage, where = locate(path)

    def read(found: Found) -> Checkpoint:
        opened = Checkpoint(found, read_item(found, item))
        if found.record is None:  # only decoding shows damage
            _ = opened.leaves
        return opened

    return at_rest(storage, where, read, fallback=True)


def _names(path: str | tuple[object, ...], leaves: Sequence[Leaf]) -> Path:
    """Returns the names of a path, in which those with `/` may not be escaped."""
    names = parse_path(path)
    if not isinstance(path, str) or any(leaf.path[: len(names)] == names for leaf in leaves):
        return names
    starts = (leaf.path[:depth] for leaf in leaves for depth in range(1, len(leaf.path) + 1))
    return next((start for start in starts if "/".join(start) == path), names)


def _shardings(item: Item) -> Mapping[str, SavedSharding]:
    """Returns the recorded shardings; none if another program wrote them and they are damaged."""
    try:
        return item.read_shardings()
    except CorruptCheckpoint as error:
        if item.ours:
            raise
        logger.warning("shardings are not shown, and must be given to a restore: %s", error)
        return {}


def _info(leaf: Leaf, sharding: SavedSharding | None) -> LeafInfo:
    if sharding is not None:  # for a key, the record has one more dimension, of the key's data
        sharding = replace(sharding, spec=sharding.spec[: len(leaf.shape)])
    size = 0
    if leaf.stored is not None:
        size = bytes_of(leaf.stored.shape, leaf.stored.dtype)
    elif leaf.kind not in ("empty", "ellipsis"):
        size = getattr(leaf.value, "nbytes", None)
        size = len(leaf.value or "") if size is None else size
    return LeafInfo(
        path=leaf.text,
        kind=leaf.kind,
        dtype=leaf.dtype if leaf.kind != "key" else f"key<{leaf.key_impl}>",
        shape=leaf.shape,
        sharding=None if sharding is None else str(sharding),
        size_bytes=size,
        saved_sharding=sharding,
        compression="zstd" if leaf.stored is not None and leaf.stored.zstd else None,
        container=leaf.container.cls[1] if leaf.container and leaf.container.cls else None,
        chunk_shape=leaf.stored and leaf.stored.chunk_shape,
        inner_shape=leaf.stored and leaf.stored.inner_shape,
    )


def custom_of(ckpt: Checkpoint) -> Any:
    """Returns the metadata that is stored in a tree itself, for the drop-in."""
    return None if ckpt._tree is None else ckpt._tree.tree.custom_metadata


def stored_bytes(ckpt: Checkpoint) -> int | None:
    """Returns the bytes of an item's files if some arrays are compressed; None for a part."""
    tree = ckpt._tree
    if tree is None or ckpt._below or not any(x.compression for x in ckpt.leaves.values()):
        return None
    return sum(facts.size for facts in ckpt._found.recorded(tree.path).values())


# --- as text ---------------------------------------------------------------------------------


def _lines(ckpt: Checkpoint) -> list[str]:
    below = path_text(ckpt._below)
    writer = ckpt._found.record.writer if ckpt._found.record else "another program"
    head = (
        f"{ckpt.path}{f' item {ckpt.item!r}' if ckpt.item else ''}{f' at {below}' if below else ''}"
    )
    size = f"{counted(len(ckpt.leaves), 'leaf')}, {size_text(ckpt.size_bytes)}"
    if (stored := stored_bytes(ckpt)) is not None:
        size += f", {size_text(stored)} on disk"
    lines = [f"{head}: {size}, written by {writer}"]
    others = [name for name in ckpt.items if name != ckpt.item]
    if others:
        lines.append(f"other items: {', '.join(others)}")
    if ckpt._found.differences:
        lines.append(f"marked, since replicas differed: {'; '.join(ckpt._found.differences)}")
    if ckpt.custom_metadata:
        lines.append(f"custom metadata: {ckpt.custom_metadata}")
    if ckpt._tree is None:
        return [*lines, "(a JSON item)"]
    nodes = tree_text.lines(tree_text.nested(ckpt.leaves.values()))
    rows = [(name, str(node) if isinstance(node, LeafInfo) else "") for name, node, _ in nodes]
    width = min(60, max((len(left) for left, _ in rows), default=0))
    lines += [f"{left:<{width}}  {right}".rstrip() for left, right in rows[:_MAX_LINES]]
    if len(rows) > _MAX_LINES:
        lines.append(f"... and {len(rows) - _MAX_LINES} more; open a part: ckpt['path/of/it']")
    return lines
