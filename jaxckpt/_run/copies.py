"""Decides which copy of a step to read if a run has two tiers, and what to upload. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from jaxckpt.format.step import CUT, Life, Starts

SHORT: Final = 12  # characters of the token of a save: its name as a start, and as a first save


class Copy(NamedTuple):
    """A step in one of the roots."""

    step: int
    root: int  # the index of the root; the nearest is 0
    is_united: bool = False  # whether the processes read it from all places together: `coverage`


def newest_first(steps: Mapping[int, Collection[int]]) -> list[Copy]:
    """Returns all copies in the order in which to try them.

    A newer step comes before a nearer step, since resuming from an older step loses training.

    Example:
        >>> [copy[:2] for copy in newest_first({0: [10, 30], 1: [10, 20]})]
        [(30, 0), (20, 1), (10, 0), (10, 1)]
    """
    copies = [Copy(step, root) for root, there in steps.items() for step in there]
    return sorted(copies, key=lambda copy: (-copy.step, copy.root))


# For each process, the token of the save that each step on its disk comes from; None if the step
# cannot be read now.
Disks = Sequence[Mapping[int, str | None]]


def over_disks(disks: Disks, directory: Mapping[int, str | None], others: Disks = ()) -> list[Copy]:
    """Returns the copies to try, in order, where each process has what it held on its own disk.

    A step is whole if every process has its part of one save, that of the directory if it has the
    step. Whatever of that save is on any disk, all places together may have it.

    Args:
        directory: The same as in `disks` for the steps in the directory; None if no step like it is
            on a disk.
        others: Like `disks`, for places without a process.

    Example:
        >>> over_disks([{10: "a"}, {10: "a", 20: "b"}], {20: "b"})[:2]
        [Copy(step=20, root=0, is_united=True), Copy(step=20, root=1, is_united=False)]
        >>> over_disks([{10: "a"}, {10: "a", 20: "b"}], {20: "b"})[2:]
        [Copy(step=10, root=0, is_united=False), Copy(step=10, root=0, is_united=True)]
    """
    copies = []
    for step in sorted({*directory}.union(*disks, *others), reverse=True):
        found = [disk.get(step) for disk in disks]
        saves = {disk[step] for disk in (*disks, *others) if step in disk}
        if None not in found and {*found} == {directory.get(step, found[0])}:
            copies.append(Copy(step, 0))
        if saves and directory.get(step) in {*saves, None}:
            copies.append(Copy(step, 0, is_united=True))
        if step in directory:
            copies.append(Copy(step, 1))
    return copies


class Saved(NamedTuple):
    """A step, and the starts of its run up to the start that saved it."""

    step: int
    starts: Starts = ()  # see `format.step.Life`; empty if an older release saved it
    run: str = ""  # its id, if known
    saved_ns: int = 0  # when, if known

    @classmethod
    def of(cls, step: int, life: Life | None, saved_ns: int = 0) -> Saved:
        return cls(step) if life is None else cls(step, life.starts, life.run, saved_ns)

    @classmethod
    def told(cls, value: Any) -> Saved:  # JSON
        step, starts, *more = value
        return cls(step, tuple(map(tuple, starts)), *more)

    @property
    def start(self) -> str | None:
        """Returns the start that saved it."""
        return self.starts[-1][0] if self.starts else None

    def led_to(self, later: Saved) -> bool:
        """Returns whether the run got to `later` by way of this step, as far as is recorded.

        It did if each start after the start that saved this step went on from this step or a newer
        step. For a step that an older release saved, nothing is recorded.

        Example:
            >>> first, second = (("a", None),), (("a", None), ("b", 5))
            >>> [Saved(n, first).led_to(Saved(7, second)) for n in (5, 6)]
            [True, False]
        """
        if not self.starts:
            return True
        names, is_cut = later._names(), CUT in later.starts
        after = names.index(self.start) + 1 if self.start in names else int(is_cut)
        return all(step is not None and self.step <= step for _, step in later.starts[after:])

    def is_newer(self, other: Saved) -> bool:
        """Returns whether the run was here after `other`; False if neither is known to be later."""
        if self.start == other.start or not self.starts or not other.starts:
            return self.step > other.step
        if other.start in self._names() or self.start in other._names():
            return other.start in self._names()
        # The start of the other may be one that is left out here.
        return CUT in self.starts and self.starts[0] == other.starts[0] and other.led_to(self)

    def _names(self) -> list[str]:
        return [start for start, _ in self.starts]


class Held(NamedTuple):
    """A step on one disk, as its process reports it."""

    step: int
    save: str | None = None  # the token of its save; None if it cannot be read now
    life: Saved = Saved(-1)
    metrics: Mapping[str, Any] | None = None  # None if they are unknown, or nobody ranks by them
    problem: str | None = None  # why it, or its metrics, cannot be read now
    part: Sequence[int] = (0, 1)  # whose shards it has, and the number of processes

    @classmethod
    def told(cls, value: Any) -> Held:  # JSON
        step, save, life, *more = value
        return cls(step, save, Saved.told(life), *more)


def are_all(parts: Iterable[Sequence[int]]) -> bool:
    """Returns whether the parts on some disks are those of all processes that saved a step."""
    found = sorted(map(tuple, parts))
    return {*found} == {(0, 1)} or found == [(i, len(found)) for i in range(len(found))]


# The steps in each of several places.
Told = Sequence[Sequence[Held]]


def saves_in(told: Told) -> Disks:
    """Returns the save of each step in each place."""
    return [{one.step: one.save for one in some} for some in told]


def went_on(disks: Told, others: Told, lives: Iterable[Saved] = ()) -> tuple[Told, Told]:
    """Returns the steps from which the run went on, as far as all these and `lives` show."""
    told = [one for some in (*disks, *others) for one in some if one.save]
    newest = latest([*(one.life for one in told), *lives])

    def those_of_run(some: Sequence[Held]) -> list[Held]:
        return [one for one in some if not (newest and is_left(one.life, newest))]

    return [*map(those_of_run, disks)], [*map(those_of_run, others)]


def are_first(saves: Iterable[str | None], began: Iterable[str]) -> bool:
    """Returns whether steps can only be of first saves of a run that were never committed.

    Args:
        saves: The save of each step.
        began: For each disk, the first saves that wrote to it; see `Ownership.begin`. One to which
            such a save wrote, and which lacks its part, did not commit it.
    """
    first = [one.split() for one in began]
    return all(all((save or "")[:SHORT] in some for some in first) for save in saves)


def of_one_save(disks: Sequence[Held], others: Sequence[Held], durable: str | None) -> list[Held]:
    """Returns what all know of the save of a step that a restore reads.

    It is that of the directory if known, else that of the processes' disks, else of other places.
    """
    saves = [{one.save for one in some} - {None} for some in (disks, others)]
    counts = {durable} if durable else saves[0] or saves[1]
    return [one for one in (*disks, *others) if one.save in {*counts, None}]


def is_left(life: Saved, newest: Saved) -> bool:
    """Returns whether the run went on without a step; of two saves of one step, it is the older."""
    is_alike = (newest.step, newest.saved_ns) == (life.step, life.saved_ns)
    return not life.led_to(newest) and (newest.is_newer(life) or not is_alike)


def astray(local: Iterable[Saved], durable: Saved | None) -> list[int]:
    """Returns the local steps from which the run did not go on: steps of an earlier life.

    Args:
        durable: The newest step of the directory, if that has one. It wins over a local step unless
            that has no lower number, as a restore tries 30 before 25, and their starts show that
            the local step is later.

    Example:
        >>> before, since = (("a", None),), (("a", None), ("b", 4))
        >>> astray([Saved(4, before), Saved(9, before)], Saved(6, since))
        [9]
        >>> astray([Saved(4, before), Saved(9, before)], Saved(6, before))
        []
    """
    steps = sorted(local, key=lambda one: one.step)
    newest = latest(steps, durable)
    return [one.step for one in steps if newest and not one.led_to(newest)]


def latest(steps: Iterable[Saved], durable: Saved | None = None) -> Saved | None:
    """Returns where the run was last, as far as is known; see `astray`.

    Among local steps whose starts do not show which is later, that is the one saved last.
    """
    steps = sorted(steps, key=lambda one: (-one.saved_ns, -one.step))
    newest = durable or (steps[0] if steps else None)
    for one in steps:
        is_tried_later = durable is not None and one.step < durable.step
        if newest is not None and one.is_newer(newest) and not is_tried_later:
            newest = one
    return newest


def over_bound(waiting: Sequence[int], *, most: int) -> list[int]:
    """Returns the steps that leave a queue of uploads so that `most` stay: the oldest.

    Example:
        >>> over_bound([30, 10, 20], most=2)
        [10]
    """
    return sorted(waiting)[: max(0, len(waiting) - most)]
