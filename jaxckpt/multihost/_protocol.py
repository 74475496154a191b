"""The seam to the other processes of a job."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

Json: TypeAlias = "Mapping[str, Json] | Sequence[Json] | str | int | float | bool | None"


class Device(Protocol):
    """What is needed of a `jax.Device`, a name that type checkers cannot resolve."""

    @property
    def process_index(self) -> int: ...


class Processes(Protocol):
    """The processes of one job, seen from one of them.

    `barrier`, `gather` and `agree` are rounds: every process of the job makes the same call with
    the same `name`, from any thread. A name stands for one meeting, so put the step and the attempt
    in it; used again, it means the next meeting of that name. Nothing here touches a device.

    What comes back has been through JSON on every process, the sender too: tuples are lists, the
    keys of a dict are strings.

    Every round ends within about `timeout_s`, or raises:
        CheckpointTimeout: not all arrived. `.missing` says who, alike on every process; one that
            arrives later raises it too. Where process 0 is missing, it alone may be named.
        ProcessesDisagree: the coordination service, which is in process 0, is lost.
    """

    @property
    def index(self) -> int:
        """This process, as in `jax.process_index()`."""
        ...

    @property
    def count(self) -> int:
        """How many there are, as in `jax.process_count()`."""
        ...

    def process_of(self, device: Device) -> int:
        """Says which process drives `device`."""
        ...

    def barrier(self, name: str, *, timeout_s: float) -> None:
        """Waits until every process is here."""
        ...

    def gather(self, name: str, value: Json, *, timeout_s: float) -> list[Json]:
        """Returns every process's value, by index, to every process."""
        ...

    def agree(self, name: str, value: Json, *, timeout_s: float) -> Json:
        """Returns the value of process 0, which waits for nobody, to every process."""
        ...

    def missing(self, name: str) -> list[int]:
        """Who has not come to the gather of this name in which another thread of ours waits."""
        ...


def encode(value: Json) -> bytes:
    """As one line of ASCII; `inf` and `nan` are allowed."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def decode(data: bytes) -> Json:
    """Undoes `encode`."""
    return json.loads(data)
