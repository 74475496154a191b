"""Nests the leaves of a checkpoint by their names, and shows the nesting as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from jaxckpt.format.tree import parse_path
from jaxckpt.types import LeafInfo


@dataclass(slots=True, eq=False)
class Branch:
    """The leaves and further branches below one name."""

    children: dict[str, Branch | LeafInfo] = field(default_factory=dict)  # in tree order
    leaf_count: int = 0  # at any depth
    size_bytes: int = 0  # of all leaves, at any depth


def nested(leaves: Iterable[LeafInfo]) -> Branch:
    top = Branch()
    for leaf in leaves:
        *parents, last = parse_path(leaf.path) or ("(the tree itself)",)
        node = _count(top, leaf)
        for name in parents:
            below = node.children.setdefault(name, Branch())
            if not isinstance(below, Branch):  # a leaf with children: no format has any
                break
            node = _count(below, leaf)
        else:
            node.children[last] = leaf
    return top


def _count(node: Branch, leaf: LeafInfo) -> Branch:
    node.leaf_count += 1
    node.size_bytes += leaf.size_bytes
    return node


def lines(
    top: Branch, *, depth: int | None = None, indent: str = ""
) -> Iterator[tuple[str, LeafInfo | Branch, bool]]:
    """Yields each name with its tree lines, its node, and whether it is folded (at `depth`)."""
    for i, (name, node) in enumerate(top.children.items()):
        is_last = i == len(top.children) - 1
        is_folded = depth == 1 and isinstance(node, Branch)
        yield f"{indent}{'└─ ' if is_last else '├─ '}{name}", node, is_folded
        if isinstance(node, Branch) and not is_folded:
            below = indent + ("   " if is_last else "│  ")
            yield from lines(node, depth=depth and depth - 1, indent=below)
