"""The processes of a job by where they write: all in one directory, or each in its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, final

from jaxckpt.multihost._collective import Lead, leading, meet
from jaxckpt.multihost._protocol import Json, Processes
from jaxckpt.multihost._single import Single

Judge = Callable[[list[Any]], Json]


@final
@dataclass(frozen=True, slots=True)
class Group:
    """The processes that write to one directory together, among the groups of their job.

    All processes of a job are one group in a directory that they share. On the disks of their
    hosts, each process is a group of its own. The first process of a group leads it: it does what
    is done once in a directory.
    """

    mates: Processes  # of this group
    leaders: Processes  # the groups of the job, each by the process that leads it

    @classmethod
    def together(cls, processes: Processes) -> Group:
        """Returns the only group of a job."""
        return cls(processes, Single())

    @classmethod
    def apart(cls, processes: Processes) -> Group:
        """Returns the group of this process, where each process has its own directory."""
        return cls(Single(), processes)

    @property
    def job(self) -> Processes:
        """Returns all processes of the job."""
        return self.mates if self.part is None else self.leaders

    @property
    def leads(self) -> bool:
        """Returns whether this process acts for its group."""
        return self.mates.index == 0

    @property
    def follows(self) -> bool:
        """Returns whether this process leads another group than that of process 0."""
        return self.leaders.index > 0

    @property
    def part(self) -> tuple[int, int] | None:
        """Returns which part of a step is here, and of how many; None for the whole."""
        return (self.leaders.index, self.leaders.count) if self.leaders.count > 1 else None

    def common(self, path: str) -> str:
        """Returns a path, or where it differs between processes, a text that all have alike."""
        return path if self.part is None else f"the disks of {self.leaders.count} processes"

    def leading(
        self, name: str, judge: Judge | None = None, *, where: str, timeout_s: float
    ) -> AbstractContextManager[Lead]:
        """Lets leaders act inside the `with`; then all processes of the job return, or all raise.

        Args:
            judge: Makes one value for the job from those of the leaders. If None, a process has
                the value of its own leader.
            name, where: As in the function `leading`.
        """
        act = _one_leads if self.part is None else _each_leads
        return act(self, name, judge, where, timeout_s)


@contextlib.contextmanager
def _one_leads(
    group: Group, name: str, judge: Judge | None, where: str, timeout_s: float
) -> Iterator[Lead]:
    with leading(group.mates, name, where=where, timeout_s=timeout_s) as led:
        yield led
    led.value = led.value if judge is None else judge([led.value])


@contextlib.contextmanager
def _each_leads(
    group: Group, name: str, judge: Judge | None, where: str, timeout_s: float
) -> Iterator[Lead]:
    led, problem, limits = Lead(), None, {"timeout_s": timeout_s, "where": where}
    try:
        yield led
    except Exception as error:  # reported to the others, then raised
        problem = error
    value = None if judge is None else led.value
    met = meet(group.leaders, name, value, problem, judge or len, **limits)
    met.check(problem, where)
    led.value = led.value if judge is None else met.verdict
