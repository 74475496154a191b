"""The interface to the other processes of a job, and a job with one process."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias, final

from jaxckpt._core.threads import MOST_S

Json: TypeAlias = "Mapping[str, Json] | Sequence[Json] | str | int | float | bool | None"

DEFAULT_TIMEOUT_S: Final = 1200.0
_uses: Final = itertools.count()


class Device(Protocol):
    """The part of `jax.Device` used here; type checkers cannot resolve that name."""

    @property
    def process_index(self) -> int: ...


class Processes(Protocol):
    """The processes of one job, seen from one of them.

    `gather` and `agree` are rounds: every process of the job makes the same call with the same
    `name`, from any thread. A name identifies one round, so put the step and the attempt in it;
    using it again starts the next round of that name. Nothing here touches a device.

    Values are passed through JSON on every process, the sender's too: tuples become lists, dict
    keys strings.

    Every round ends within about `timeout_s`, or raises:
        CheckpointTimeout: not all arrived. `.missing` lists them, the same on every process; a late
            process raises it too. If process 0 is missing, it may be the only one listed.
        ProcessesDisagree: the coordination service, which runs in process 0, is lost.
    """

    @property
    def index(self) -> int:
        """This process, as in `jax.process_index()`."""
        ...

    @property
    def count(self) -> int:
        """Returns the number of processes, as in `jax.process_count()`."""
        ...

    @property
    def timeout_s(self) -> float:
        """The limit of each round."""
        ...

    def within(self, timeout_s: float) -> Processes:
        """Returns the same processes with another limit of each round."""
        ...

    def process_of(self, device: Device) -> int:
        """Returns the process that drives `device`."""
        ...

    def gather(
        self, name: str, value: Json, judge: Callable[[list[Any]], Json] = list, *, where: str = ""
    ) -> Any:  # JSON
        """Returns to every process what process 0 makes of all values.

        If it takes long, a warning names the missing processes, and `where` or else `name`.

        Args:
            judge: Called in process 0 with every process's value, by index. It must not raise. What
                it returns goes to every process, so it should not grow with their number. By
                default it returns all values, which takes bytes by the square of the processes.
        """
        ...

    def agree(self, name: str, value: Json) -> Json:
        """Returns the value of process 0 to every process; process 0 does not wait."""
        ...

    def uses(self, name: str) -> int:
        """Returns how many gathers of this name began here: after one that all made, all agree.

        A single process does not need to agree, and gets another number at each call.
        """
        ...

    def missing(self, name: str) -> list[int]:
        """Returns the processes that have not reached the named gather yet.

        Another thread of this process must be waiting in that gather.
        """
        ...


def encode(value: Json) -> bytes:
    """Encodes as one line of ASCII; allows `inf` and `nan`."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def decode(data: bytes) -> Json:
    return json.loads(data)


@final
@dataclass(frozen=True)
class Single:
    """`Processes` of a job with one process: nothing waits, so nothing times out."""

    index: int = 0
    count: int = 1
    timeout_s: float = field(default=DEFAULT_TIMEOUT_S, compare=False)

    def within(self, timeout_s: float) -> Single:
        return Single(timeout_s=min(timeout_s, MOST_S))

    @staticmethod  # always the same function, for the caches of placements
    def process_of(device: Device) -> int:
        return 0

    def gather(
        self, name: str, value: Json, judge: Callable[[list[Any]], Json] = list, *, where: str = ""
    ) -> Any:  # JSON
        return decode(encode(judge([decode(encode(value))])))

    def agree(self, name: str, value: Json) -> Json:
        return decode(encode(value))

    def uses(self, name: str) -> int:
        return next(_uses)

    def missing(self, name: str) -> list[int]:
        return []
