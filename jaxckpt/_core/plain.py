"""The lists and dicts of a tree that was saved without its containers, by key types alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxckpt.errors import CorruptCheckpoint
from jaxckpt.format.tree import SEQUENCE, Node, Path, Tree, path_text


def root_of(tree: Tree) -> Node | None:
    """Returns the containers of a tree: as recorded, or else by the key types of its leaves."""
    return tree.root if tree.typed else plain_root({one.path: one.key_types for one in tree.leaves})


def plain_root(key_types: Mapping[Path, Sequence[int]]) -> Node | None:
    """Returns lists and dicts for leaves at paths, by the key types alone.

    Raises:
        CorruptCheckpoint: the paths do not make a tree.
    """
    kinds: dict[Path, int] = {}
    top: dict[str, Any] = {}
    for path, types in key_types.items():
        for depth, kind in enumerate(types):
            if kinds.setdefault(path[:depth], kind) != kind:
                raise _no_tree(path, path[:depth], "is a list for one leaf, a dict for others")
        node: Any = top
        for name in path[:-1]:
            node = node.setdefault(name, {})
            if node is None:
                raise _no_tree(path, path, "lies below another leaf")
        if node.setdefault(path[-1], None) is not None if path else len(key_types) > 1:
            raise _no_tree(path, path, "lies above another leaf")
    return None if () in key_types else _plain_node(top, (), kinds)


def _no_tree(leaf: Path, path: Path, what: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"{path_text(path)} {what}", leaf=path_text(leaf))


def _plain_node(children: Mapping[str, Any], path: Path, kinds: Mapping[Path, int]) -> Node:
    names = list(children)
    in_order = sorted(names, key=lambda name: (len(name), name))
    is_list = kinds.get(path) == SEQUENCE and are_indices(in_order)
    names = in_order if is_list else names
    return Node(
        type="list" if is_list else "dict",
        names=tuple(names),
        children=tuple(
            None if children[name] is None else _plain_node(children[name], (*path, name), kinds)
            for name in names
        ),
    )


def are_indices(names: Sequence[str]) -> bool:
    """Returns whether names number the elements of a list, in order."""
    return all(name == str(i) for i, name in enumerate(names))
