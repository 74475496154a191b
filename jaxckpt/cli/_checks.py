"""Tries out a place for checkpoints, one check after the other, and deletes what it wrote there."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol, final

import numpy as np

from jaxckpt.errors import CheckpointError
from jaxckpt.storage._protocol import Storage
from jaxckpt.storage._requests import said

State = Literal["ok", "slow", "missing", "failed", "skipped"]

SMALL: Final = bytes(range(256))
LARGE_BYTES: Final = 64 << 20  # as large as a data file of a checkpoint
_PIECE_BYTES: Final = 1 << 20
_SLOW_BYTES_PER_S: Final = 20e6
_SLOW_S: Final = 0.2
_MOST_SKEW_S: Final = 60.0
_UNFIT: Final = "do not keep checkpoints here: what is read is not what was written"
_TIMES: Final = 9  # an odd number, so that the median is one of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Reports the result of one check.

    Attributes:
        state: `"missing"` if a feature does not work and jaxckpt manages without, as `advice`
            explains; `"skipped"` if an earlier check failed that this check needs.
        value: A figure, in the unit.
        text: The finding, if it is not a figure.
        advice: What to do. Empty if nothing is wrong.
        error: The error, in the words of the place.
    """

    name: str = ""
    state: State = "ok"
    value: float | None = None
    unit: Literal["", "s", "B", "B/s"] = ""
    text: str = ""
    advice: str = ""
    error: str = ""


class Failed(Exception):
    """A check found that something does not work."""

    def __init__(self, what: str, advice: str, *, state: State = "failed") -> None:
        super().__init__(what)
        self.finding = Finding(state=state, advice=advice, error=what)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to try.

    Attributes:
        call: Raises a `Failed`, or the error of the place; None says that it works.
        needs: The names of checks that must not have failed.
    """

    name: str
    call: Callable[[], Finding | None]
    needs: Sequence[str] = ()


class Location(Protocol):
    """A place to try out."""

    @property
    def checks(self) -> Sequence[Check]:
        """Returns the checks, in order."""
        ...

    def advice(self, check: str, error: Exception) -> str:
        """Returns what to do about an error."""
        ...

    def clean(self) -> None:
        """Deletes all that the checks wrote."""
        ...


def try_out(location: Location) -> list[Finding]:
    """Makes all checks of a place. Nothing of them remains there, also after Ctrl-C."""
    stop = threading.Event()
    # Not in this thread: Ctrl-C must not leave a request under way that writes after `clean`.
    with ThreadPoolExecutor(1, thread_name_prefix="jaxckpt-doctor") as thread:
        try:
            return thread.submit(_run, location, stop).result()
        finally:
            stop.set()


def _run(location: Location, stop: threading.Event) -> list[Finding]:
    found: dict[str, Finding] = {}
    try:
        for check in location.checks:
            if not stop.is_set():
                found[check.name] = replace(_tried(location, check, found), name=check.name)
    finally:
        with contextlib.suppress(CheckpointError, OSError):  # "delete" has found it
            location.clean()
    return [*found.values()]


def _tried(location: Location, check: Check, found: Mapping[str, Finding]) -> Finding:
    for name in check.needs:
        if found[name].state in ("failed", "skipped"):
            return Finding(state="skipped", text=f"needs: {name}")
    try:
        return check.call() or Finding()
    except Failed as problem:
        return problem.finding
    except EOFError as error:
        return Failed(str(error), _UNFIT).finding
    except (CheckpointError, OSError, ValueError) as error:
        text = said(error)
        return Finding(state="failed", advice=location.advice(check.name, error), error=text)


# --- checks of any place -----------------------------------------------------------------------


@final
class Samples:
    """The files that the checks of any place write and read, in a folder of their own."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage, self.folder = storage, folder

    def path(self, name: str) -> str:
        """Returns the path of a file."""
        return f"{self.folder}/{name}"

    def write(self, name: str, data: bytes = SMALL) -> None:
        """Writes a small file."""
        self._storage.write(self.path(name), data)

    def read(self, name: str) -> bytes:
        """Reads a small file."""
        return self._storage.read(self.path(name), max_bytes=len(SMALL))

    def write_large(self) -> Finding:
        """Writes as a save does."""
        data = np.random.default_rng(0).bytes(LARGE_BYTES)
        pieces = [data[at : at + _PIECE_BYTES] for at in range(0, LARGE_BYTES, _PIECE_BYTES)]
        return _speed(lambda: self._storage.write(self.path("large"), pieces))

    def read_large(self) -> Finding:
        """Reads as a restore does.

        Raises:
            Failed: the bytes differ from the bytes that `write_large` wrote.
        """
        buffer = np.empty(LARGE_BYTES, np.uint8)
        found = _speed(lambda: self._storage.read_into(self.path("large"), 0, [buffer]))
        check_same(buffer.tobytes(), np.random.default_rng(0).bytes(LARGE_BYTES))
        return found

    def clock(self, name: str, written_s: Callable[[str], float]) -> Finding:
        """Writes a small file, and judges the time at which the place says it was written."""
        before_s = time.time()
        self.write(name)
        ours_s = (before_s + time.time()) / 2
        return clock(written_s(self.path(name)) - ours_s)


def _speed(call: Callable[[], None]) -> Finding:
    bytes_per_s = LARGE_BYTES / seconds(call)
    if bytes_per_s >= _SLOW_BYTES_PER_S:
        return Finding(value=bytes_per_s, unit="B/s")
    advice = "saves and restores take long; use a place nearer to these machines, or a faster one"
    return Finding(state="slow", value=bytes_per_s, unit="B/s", advice=advice)


def latency(call: Callable[[], object], advice: str) -> Finding:
    """Returns the median of the seconds that a call takes."""
    value = statistics.median(seconds(call) for _ in range(_TIMES))
    if value <= _SLOW_S:
        return Finding(value=value, unit="s")
    return Finding(state="slow", value=value, unit="s", advice=advice)


def clock(skew_s: float) -> Finding:
    """Judges the time of the place minus the time of this machine."""
    if abs(skew_s) <= _MOST_SKEW_S:
        return Finding(value=skew_s, unit="s")
    advice = (
        "set the clock of this machine or of the place: readers keep steps for a time that other "
        "machines compare with their clocks, and stores refuse signatures of another time"
    )
    return Finding(state="failed", value=skew_s, unit="s", advice=advice)


def check_same(found: bytes, wanted: bytes) -> None:
    """Raises a `Failed` if bytes were not read as they were written."""
    if found != wanted:
        raise Failed(f"read {len(found)} bytes, which are not the {len(wanted)} written", _UNFIT)


def seconds(call: Callable[[], object]) -> float:
    """Returns how long a call takes."""
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s
