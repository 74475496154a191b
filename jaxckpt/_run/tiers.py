"""Decides what to read where the steps of a run are in two places, and what to upload. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Copy(NamedTuple):
    """A step in one of the places."""

    step: int
    root: int  # the index of the place; the nearest is 0


def newest_first(steps: Mapping[int, Collection[int]]) -> list[Copy]:
    """Returns all copies in the order in which to try them.

    A newer step comes before a nearer one: what is lost otherwise is training.

    Args:
        steps: The steps in each place.

    Example:
        >>> newest_first({0: [10, 30], 1: [10, 20]})
        [Copy(step=30, root=0), Copy(step=20, root=1), Copy(step=10, root=0), Copy(step=10, root=1)]
    """
    copies = [Copy(step, root) for root, there in steps.items() for step in there]
    return sorted(copies, key=lambda copy: (-copy.step, copy.root))


def over_bound(waiting: Sequence[int], *, most: int) -> list[int]:
    """Returns the steps that leave a queue of uploads so that `most` stay: the oldest.

    Example:
        >>> over_bound([30, 10, 20], most=2)
        [10]
    """
    return sorted(waiting)[: max(0, len(waiting) - most)]
