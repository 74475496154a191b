"""Reads a tree to copy as a stream: first its leaves, then their values in parts of bounded size.

`Leaves` separates sources from targets: both are checkpoints of any kind or safetensors files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from jaxckpt._core.box import Box
from jaxckpt._core.cast import cast, is_floating
from jaxckpt._core.plain import root_of
from jaxckpt._core.select import Globs, check_globs, selector
from jaxckpt._core.text import counted
from jaxckpt._disk.chunks import LeafRead, Values, layout_of
from jaxckpt._disk.find import at_rest
from jaxckpt._disk.found import Found, check_current
from jaxckpt._disk.item import open_tree
from jaxckpt._disk.native import Item
from jaxckpt._disk.reader import read_stream
from jaxckpt.errors import CheckpointNotFound, CorruptCheckpoint, UnsupportedLeaf
from jaxckpt.format.arrays import AS_BYTES_DTYPES, PYTHON_DTYPES, STORABLE_DTYPES, dtype_of
from jaxckpt.format.sharding import SavedSharding
from jaxckpt.format.tree import (
    ARRAY_KINDS,
    NAMED,
    SEQUENCE,
    Leaf,
    Node,
    Path,
    StoredArray,
    Tree,
    name_problems,
    path_text,
)
from jaxckpt.storage import locate

T = TypeVar("T")
_BUDGET_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A part of the array of one leaf."""

    leaf: int  # its index in the tree
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """A tree to copy."""

    where: str  # the source, for messages
    tree: Tree  # of the copy; `stored` of a leaf is the best layout and the dtype for reading it
    read: Callable[[Iterable[Tile]], Generator[tuple[Tile, Values], None, None]]  # in order
    check: Callable[[], None]  # raises if the source was replaced in the meantime
    lineage: Mapping[str, Any]
    differences: tuple[str, ...] = ()  # between replicas, found when it was saved
    shardings: Mapping[str, SavedSharding] = field(default_factory=dict)  # by name; all or none
    custom_metadata: Mapping[str, Any] = field(default_factory=dict)


def of_checkpoint(
    src: str | os.PathLike[str],
    *,
    item: str | None = None,
    only: Globs = None,
    skip: Globs = None,
    dtype: str | None,
    by: str,
    bad: Mapping[str, CorruptCheckpoint] | None = None,
) -> Leaves:
    """Opens the tree of a checkpoint, or a part of it, for copying; of a run, the newest good step.

    Args:
        dtype: The new dtype of all floating-point arrays.
        by: The operation, for the lineage.
        bad: Errors of checkpoints, by path, whose values turned out to be damaged.

    Raises:
        CheckpointNotFound: `src` lacks a committed checkpoint.
        CorruptCheckpoint: its metadata is damaged.
        UnsupportedLeaf: a leaf cannot be copied.
    """
    storage, where = locate(src)
    opened = partial(_opened, item=item, bad=bad or {})
    saved, recorded = at_rest(storage, where, opened, fallback=True)
    found = saved.found
    check_globs(only, skip, [leaf.path for leaf in saved.tree.leaves], where=found.path)
    selected = selector(only, skip)
    chosen = [leaf for leaf in saved.tree.leaves if selected(leaf.path)]
    if not chosen:
        raise ValueError(f"only {only!r} and skip {skip!r} leave no leaf of {found.path}")
    check_leaves(chosen, [], saved.path)  # first: they may be nested too deeply to recurse
    root = _pruned(root_of(saved.tree), (), {leaf.path for leaf in chosen})[1]
    sources = _in_order(chosen, root, saved.path)
    inline = {i: inline for i, leaf in enumerate(sources) if (inline := _inline(leaf)) is not None}
    tree = Tree(
        leaves=tuple(_copied(leaf, inline.get(i), dtype) for i, leaf in enumerate(sources)),
        root=root,
        typed=True,
        custom_metadata=saved.tree.custom_metadata,
    )
    check_leaves(tree.leaves, _problems(tree.leaves), saved.path)
    said = saved.tree.custom_metadata if saved.tensors else found.metadata.custom_metadata
    return Leaves(
        where=saved.path,
        tree=tree,
        shardings=_shardings(recorded, sources, tree.leaves),
        read=partial(_read, saved, sources, tree.leaves, inline),
        check=partial(check_current, saved.found),
        custom_metadata=said or {},
        differences=found.differences,
        lineage={
            "by": by,
            "path": found.path,
            "token": found.record.token if found.record is not None else None,
        },
    )


def copy_by(
    src: str | os.PathLike[str], write: Callable[[Leaves], T], *, again: int = 19, **how: Any
) -> T:
    """Returns what `write` makes of the leaves that `of_checkpoint` opens.

    Begins anew if the checkpoint is deleted or replaced in the meantime, as by the job of a run,
    and with an earlier step of the run if its values are damaged.
    """
    leaves = of_checkpoint(src, **how)  # which begins anew by itself
    try:
        return write(leaves)
    except CorruptCheckpoint as error:
        how["bad"] = {**(how.get("bad") or {}), leaves.lineage["path"]: error.with_traceback(None)}
    except CheckpointNotFound:
        if not again:
            raise
        again -= 1
    return copy_by(src, write, again=again, **how)


def check_leaves(leaves: Sequence[Leaf], problems: Sequence[str], where: str) -> None:
    """Raises UnsupportedLeaf with all problems, including problems of the leaves' names."""
    paths = [leaf.path for leaf in leaves]
    found = [*problems, *name_problems(paths), *_nesting_problems(paths)]
    if found:
        raise UnsupportedLeaf(
            f"{where}: {counted(len(found), 'leaf')} cannot be copied, and nothing was written:\n"
            + "\n".join(found[:50])
            + "\nLeave them out (skip)."
        )


def _nesting_problems(paths: Sequence[Path]) -> list[str]:
    known = {*paths}
    return [
        f"  {path_text(path)} and {path_text(path[:depth])} cannot both be leaves of a tree"
        for path in paths
        for depth in range(1, len(path))
        if path[:depth] in known
    ]


def _problems(leaves: Sequence[Leaf]) -> list[str]:
    known = STORABLE_DTYPES | AS_BYTES_DTYPES
    return [
        f"  {leaf.text}: {'is `...`, which has no value' if not leaf.has_array else leaf.dtype}"
        for leaf in leaves
        if leaf.kind == "ellipsis" or (leaf.has_array and leaf.array.dtype not in known)
    ]


# --- containers ------------------------------------------------------------------------------


def _pruned(node: Node | None, path: Path, chosen: set[Path]) -> tuple[bool, Node | None]:
    """Returns whether any leaf below is chosen, and the containers of the chosen leaves.

    A list, tuple or class that lacks a child becomes a dict, as in `restore`.
    """
    if node is None:
        return path in chosen, None
    keys = node.keys if node.keys is not None else (None,) * len(node.names)
    selected = []
    for name, key, child in zip(node.names, keys, node.children, strict=True):
        is_there, part = _pruned(child, (*path, name), chosen)
        selected += [(name, key, part)] if is_there else []
    if len(selected) == len(node.names):
        return bool(selected), replace(node, children=tuple(child for _, _, child in selected))
    is_dict = node.type in ("dict", "odict")
    part = Node(
        type=node.type if is_dict else "dict",
        names=tuple(name for name, _, _ in selected),
        keys=None if node.keys is None else tuple(key for _, key, _ in selected),
        children=tuple(child for _, _, child in selected),
    )
    return bool(selected), part


def _in_order(leaves: Sequence[Leaf], root: Node | None, where: str) -> list[Leaf]:
    """Returns the leaves in the order of their containers, with the containers' key types."""
    by_path = {leaf.path: leaf for leaf in leaves}
    found = [
        leaf._replace(
            key_types=tuple(new or old for new, old in zip(types, leaf.key_types, strict=True))
        )
        for path, types in _walk(root, (), ())
        if (leaf := by_path.get(path)) is not None
    ]
    if len(found) != len(leaves):
        raise CorruptCheckpoint(f"{where}: its containers lack some of its leaves", file=where)
    return found


# 0 keeps the type of the leaf.
_KEY_TYPES: Final = {"list": SEQUENCE, "tuple": SEQUENCE, "dict": NAMED, "odict": NAMED, "class": 0}


def _walk(
    node: Node | None, path: Path, types: tuple[int, ...]
) -> Iterator[tuple[Path, tuple[int, ...]]]:
    if node is None:
        yield path, types
        return
    for name, child in zip(node.names, node.children, strict=True):
        yield from _walk(child, (*path, name), (*types, _KEY_TYPES[node.type]))


def _opened(
    found: Found, item: str | None, bad: Mapping[str, CorruptCheckpoint]
) -> tuple[Item, Mapping[str, SavedSharding]]:
    if found.path in bad:
        raise bad[found.path]
    saved = open_tree(found, item)
    return saved, saved.read_shardings()


def _shardings(
    recorded: Mapping[str, SavedSharding], sources: Sequence[Leaf], copies: Sequence[Leaf]
) -> dict[str, SavedSharding]:
    """Returns all shardings, or none if one is unknown: Orbax fails on a file that lacks one."""
    both = zip(sources, copies, strict=True)
    found = {new.name: recorded.get(old.name) for old, new in both if new.kind in ("array", "key")}
    known = {name: sharding for name, sharding in found.items() if sharding is not None}
    if len(known) < len(found):
        return {}
    # The name of CPU devices until jax 0.5; every Orbax knows it, only new releases know `cpu:0`.
    return {
        name: replace(sharding, device=sharding.device.replace("cpu:", "TFRT_CPU_"))
        for name, sharding in known.items()
    }


# --- values ----------------------------------------------------------------------------------


def _inline(leaf: Leaf) -> Values | None:
    """Returns the value of a leaf that is in the metadata here, but an array in the copy."""
    value = leaf.value
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("="), copy=False)
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8)
    # Orbax finds texts by a JSON pointer, in which a bare `~` is special.
    if isinstance(value, str) and leaf.kind == "str" and any("~" in name for name in leaf.path):
        return np.frombuffer(value.encode(), np.uint8)
    return None


def _copied(leaf: Leaf, inline: Values | None, dtype: str | None) -> Leaf:
    """Returns the leaf of the copy; see `Leaves.tree`."""
    leaf = leaf._replace(alias=None)
    if inline is not None:
        chunk_shape = tuple(max(1, n) for n in inline.shape)
        stored = StoredArray(shape=inline.shape, dtype=inline.dtype.name, chunk_shape=chunk_shape)
        leaf = leaf._replace(value=None, stored=stored)
        if leaf.kind in ("str", "bytes"):
            leaf = leaf._replace(dtype="uint8", shape=())
    return _with_dtype(leaf, dtype)


def _with_dtype(leaf: Leaf, dtype: str | None) -> Leaf:
    """Returns the leaf, with another dtype if it is a floating-point array."""
    if not leaf.has_array:
        return leaf
    name = leaf.dtype
    if leaf.kind in ARRAY_KINDS and dtype is not None and is_floating(name):
        name = dtype
    elif name not in (known := PYTHON_DTYPES.get(leaf.kind, (name,))):  # of another writer
        name = known[0]
    if name == leaf.dtype and name not in AS_BYTES_DTYPES:
        return leaf
    as_stored = "uint8" if name in AS_BYTES_DTYPES else name
    return leaf._replace(dtype=name, stored=leaf.array._replace(dtype=as_stored))


def _read(
    saved: Item,
    sources: Sequence[Leaf],
    copies: Sequence[Leaf],
    inline: Mapping[int, Values],
    parts: Iterable[Tile],
) -> Generator[tuple[Tile, Values], None, None]:

    def request(part: Tile) -> tuple[Tile, LeafRead | Values]:
        if part.leaf in inline:
            return part, inline[part.leaf][part.box.slices]
        source = sources[part.leaf]
        dtype = _read_dtype(source, copies[part.leaf])
        return part, LeafRead(source, layout_of(source.array, (part.box,), dtype))

    try:
        with closing(read_stream(saved, map(request, parts), budget_bytes=_BUDGET_BYTES)) as stream:
            for part, values in stream:
                source, copied = sources[part.leaf], copies[part.leaf]
                yield part, _copied_values(values, source, copied, saved.path)
                del values  # so that its memory is free before the next part is read
    except (CorruptCheckpoint, FileNotFoundError):
        check_current(saved.found)  # it may have been replaced, which is not damage
        raise


def _read_dtype(source: Leaf, wanted: Leaf) -> np.dtype[Any]:
    """Returns the dtype to read; the reader cannot cast data stored as bytes of another dtype."""
    as_bytes = {source.dtype, wanted.dtype} & AS_BYTES_DTYPES
    return dtype_of(source.array.dtype if as_bytes else wanted.array.dtype)


def _copied_values(values: Values, source: Leaf, wanted: Leaf, where: str) -> Values:
    """Returns values in the stored dtype; as bytes if zarr lacks their dtype."""
    if source.dtype in AS_BYTES_DTYPES and source.kind != "key":
        values = values.view(dtype_of(source.dtype))
    stored = dtype_of(wanted.array.dtype)
    if wanted.kind != "key" and wanted.dtype in AS_BYTES_DTYPES:
        return cast(values, dtype_of(wanted.dtype), leaf=wanted.text, where=where).view(stored)
    return cast(values, stored, leaf=wanted.text, where=where)
