"""Decides what to read where the steps of a run are in two places, and what to upload. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Copy(NamedTuple):
    """A step in one of the places."""

    step: int
    root: int  # the index of the place; the nearest is 0
    # The processes whose disks lack it, where each has its own; they read it in the directory.
    lacking: tuple[int, ...] = ()

    def root_of(self, process: int) -> int:
        """Returns the index of the place where a process reads it."""
        return self.root + 1 if process in self.lacking else self.root


def newest_first(steps: Mapping[int, Collection[int]]) -> list[Copy]:
    """Returns all copies in the order in which to try them.

    A newer step comes before a nearer one: what is lost otherwise is training.

    Args:
        steps: The steps in each place.

    Example:
        >>> [copy[:2] for copy in newest_first({0: [10, 30], 1: [10, 20]})]
        [(30, 0), (20, 1), (10, 0), (10, 1)]
    """
    copies = [Copy(step, root) for root, there in steps.items() for step in there]
    return sorted(copies, key=lambda copy: (-copy.step, copy.root))


def over_disks(
    disks: Sequence[Mapping[int, str]], directory: Mapping[int, str | None]
) -> list[Copy]:
    """Returns the copies to try, in order, where each process has what it held on its own disk.

    A step is there only if the directory has it, or every process has its part of one save. Parts
    of the save that the directory has are read from the disks that have them.

    Args:
        disks: For each process, the token of the save that each step on its disk comes from.
        directory: The same for the steps in the directory; None if no step like it is on a disk.

    Example:
        >>> [copy[:3] for copy in over_disks([{10: "a", 20: "b"}, {20: "b", 30: "c"}], {10: "a"})]
        [(20, 0, ()), (10, 0, (1,)), (10, 1, ())]
    """
    copies = []
    for step in sorted({*directory}.union(*disks), reverse=True):
        found = [disk.get(step) for disk in disks]
        token = directory.get(step, found[0])
        lacking = tuple(i for i, one in enumerate(found) if one is None or one != token)
        if not lacking or (step in directory and len(lacking) < len(disks)):
            copies.append(Copy(step, 0, lacking))
        if step in directory:
            copies.append(Copy(step, 1))
    return copies


def over_bound(waiting: Sequence[int], *, most: int) -> list[int]:
    """Returns the steps that leave a queue of uploads so that `most` stay: the oldest.

    Example:
        >>> over_bound([30, 10, 20], most=2)
        [10]
    """
    return sorted(waiting)[: max(0, len(waiting) - most)]
