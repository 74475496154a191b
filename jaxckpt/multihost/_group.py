"""The processes of a job by where they write: all in one directory, or each in its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

from jaxckpt.multihost._collective import Lead, leading, meeting
from jaxckpt.multihost._protocol import Json, Processes, Single

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

    @contextlib.contextmanager
    def leading(self, name: str, judge: Judge | None = None, *, where: str) -> Iterator[Lead]:
        """Lets leaders act inside the `with`; then all processes of the job return, or all raise.

        Args:
            judge: Makes one value for the job from those of the leaders. If None, a process has
                the value of its own leader.
        """
        if self.part is not None:
            with meeting(self.leaders, name, judge, where=where) as led:
                yield led
            return
        with leading(self.mates, name, where=where) as led:
            yield led
        led.value = led.value if judge is None else judge([led.value])
