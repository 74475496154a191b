"""Simulates the processes of a job as threads of one process, to test their communication.

The rounds of a real job (`jaxckpt.multihost.Distributed`) run over a service that is a dict.
The devices are divided evenly: process 1 of 2 drives the second half.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar, final

from jaxckpt.multihost import Device, Distributed, Json, playing

_T = TypeVar("_T")


class ProcessKilled(BaseException):
    """Ends a simulated process. Not an Exception: error handlers do not run after a kill."""


@final
class MemoryService:
    """The key-value service of simulated processes. Tests may inspect `entries`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards entries
        self.entries: dict[str, bytes] = {}

    def put(self, key: str, value: bytes, *, timeout_s: float) -> bool:
        del timeout_s
        with self._changed:
            if key in self.entries:
                return False
            self.entries[key] = value
            self._changed.notify_all()
            return True

    def wait(self, key: str, *, timeout_s: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self.entries, timeout_s)
            return self.entries.get(key)

    def under(self, directory: str, *, timeout_s: float) -> dict[str, bytes]:
        del timeout_s
        with self._changed:
            found = self.entries.items()
            return {key: value for key, value in found if key.startswith(f"{directory}/")}

    def delete(self, directory: str, *, timeout_s: float) -> None:
        with self._changed:
            for key in self.under(directory, timeout_s=timeout_s):
                del self.entries[key]


@final
@dataclass(frozen=True, repr=False)
class SimulatedProcesses(Distributed):
    """`Processes` of one thread of `simulate`; threads that it starts may use it too.

    Attributes:
        service: The service shared by all simulated processes.
    """

    service: MemoryService
    # After how many rounds it dies, if ever; the same list with any limit.
    _left: list[int | None] = field(default_factory=lambda: [None], compare=False)

    def process_of(self, device: Device) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the process that drives `device`: devices in order, in `count` equal parts."""
        import jax

        devices = jax.devices()
        return devices.index(device) * self.count // len(devices)

    def barrier(self, name: str, *, timeout_s: float) -> None:
        """Waits until every process arrives."""
        self.within(timeout_s).gather(name, None)

    def gather(
        self, name: str, value: Json, judge: Callable[[list[Any]], Json] = list, *, where: str = ""
    ) -> Any:  # JSON
        self._arrive()
        return super().gather(name, value, judge, where=where)

    def agree(self, name: str, value: Json) -> Json:
        self._arrive()
        return super().agree(name, value)

    def die(self) -> NoReturn:
        """Kills this process; it takes part in no further round."""
        with self._lock:
            self._left[0] = 0
        raise ProcessKilled(f"process {self.index}")

    def _arrive(self) -> None:
        with self._lock:
            if self._left[0] == 0:
                raise ProcessKilled(f"process {self.index}")
            if self._left[0] is not None:
                self._left[0] -= 1


def simulate(
    count: int,
    fn: Callable[[SimulatedProcesses], _T],
    *,
    timeout_s: float = 30.0,
    kill: Mapping[int, int] | None = None,
    warn_after_s: float = 60.0,
) -> list[_T | None]:
    """Runs `fn` as `count` processes at once, each a thread with its own `SimulatedProcesses`.

    In these threads, all of jaxckpt acts as that process.

    Args:
        timeout_s: For the whole run. A thread still running then is left behind, as a daemon.
        kill: Maps a process to the number of rounds (barrier, gather, agree) after which it dies.
            With 0, `fn` ends at its first round. The other processes notice by their time limits.
        warn_after_s: After how long a process that waits for others logs who is missing.

    Returns:
        The result of each process, by index; None for a killed process.

    Raises:
        Exception: the first error in time, with a note for each of the others.
        TimeoutError: some threads did not end. The message has their stacks.

    Example:
        >>> simulate(3, lambda processes: processes.within(30).gather("who", processes.index))
        [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    """
    service = MemoryService()
    results: list[_T | None] = [None] * count
    errors: list[tuple[int, BaseException]] = []

    def run(processes: SimulatedProcesses) -> None:
        try:
            with playing(processes):
                results[processes.index] = fn(processes)
        except ProcessKilled:
            pass
        except BaseException as error:  # the top of a thread
            errors.append((processes.index, error))

    threads = []
    for index in range(count):
        left = [(kill or {}).get(index)]
        processes = SimulatedProcesses(index, count, service, warn_after_s=warn_after_s, _left=left)
        name = f"jaxckpt-process-{index}"
        threads.append(threading.Thread(target=run, args=(processes,), name=name, daemon=True))
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    _raise_first(errors, [thread for thread in threads if thread.is_alive()], timeout_s)
    return results


def _raise_first(
    errors: Sequence[tuple[int, BaseException]],
    hanging: Sequence[threading.Thread],
    timeout_s: float,
) -> None:
    stacks = [_stack(thread) for thread in hanging]
    if errors:
        (index, first), *others = errors
        first.add_note(f"raised by simulated process {index}")
        for other, error in others:
            first.add_note(f"process {other} raised {type(error).__name__}: {error}")
        for stack in stacks:
            first.add_note(stack)
        raise first
    if stacks:
        raise TimeoutError(
            f"{len(stacks)} simulated processes did not end in {timeout_s:g} s\n"
            + "\n".join(stacks)
        )


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    where = "".join(traceback.format_stack(frame)) if frame else ""
    return f"{thread.name} is still running:\n{where}"
