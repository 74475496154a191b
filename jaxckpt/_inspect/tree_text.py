"""The leaves of a checkpoint nested by their names, and the lines that show the nesting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from jaxckpt.format.tree import parse_path
from jaxckpt.types import LeafInfo


@dataclass(slots=True, eq=False)
class Branch:
    """The leaves and further branches below one name.

    Attributes:
        children: By name, in tree order.
        leaf_count, size_bytes: Of all leaves, at any depth.
    """

    children: dict[str, Branch | LeafInfo] = field(default_factory=dict)
    leaf_count: int = 0
    size_bytes: int = 0


def nested(leaves: Iterable[LeafInfo]) -> Branch:
    """Returns the branch of all leaves."""
    top = Branch()
    for leaf in leaves:
        *parents, last = parse_path(leaf.path) or ("(the tree itself)",)
        node = _count(top, leaf)
        for name in parents:
            below = node.children.setdefault(name, Branch())
            if not isinstance(below, Branch):  # a name below a leaf: no format has one
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
    """Yields each name behind the lines that lead to it, its node, and whether it is folded.

    Args:
        depth: Branches this deep are folded. If None, no branch is.
    """
    for i, (name, node) in enumerate(top.children.items()):
        is_last = i == len(top.children) - 1
        is_folded = depth == 1 and isinstance(node, Branch)
        yield f"{indent}{'└─ ' if is_last else '├─ '}{name}", node, is_folded
        if isinstance(node, Branch) and not is_folded:
            below = indent + ("   " if is_last else "│  ")
            yield from lines(node, depth=depth and depth - 1, indent=below)
