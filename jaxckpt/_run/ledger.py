"""Writes the ledger of a run: what became of each start of a job.

begin    as the job takes the run over: the lines of earlier starts, and a line of ours
write    after the first commit and after a save for preemption, else at most each two minutes,
         when no save is under way
close    when the manager is closed

Each replaces the file as a whole, so that a kill loses what our line has learned since, and no
other line. Only the owner of the run writes, having read the owner's file just before. A job that
lost the run in that moment can replace the file once more: the owner has all lines in memory, and
its next write restores them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, final

from jaxckpt._run.index import StepIndex
from jaxckpt._run.schedule import PRIOR_MTBF_S
from jaxckpt._save.worker import is_ending
from jaxckpt.errors import CheckpointError, CorruptCheckpoint, is_io_failure
from jaxckpt.format import names
from jaxckpt.format.ledger import (
    CLOSED,
    FAILED,
    MAX_BYTES,
    NOT_CLOSED,
    WENT_BACK,
    Start,
    decode_ledger,
    encode_ledger,
)

EVERY_S: Final = 120.0
ENOUGH: Final = 3  # failures, from which the mean time between them is used


def read_ledger(index: StepIndex) -> list[Start] | None:
    """Reads the starts of a run; reports a ledger that is too large, or cannot be read: None."""
    file = f"{index.root}/{names.LEDGER}"
    try:
        return decode_ledger(index.storage.read(file, max_bytes=MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, CorruptCheckpoint) as error:
        index.report(f"{file} is left out: {error}")
        return None if is_io_failure(error) else []


def failure(error: Exception) -> str:
    """Returns the end of a start that an error has ended."""
    return f"{FAILED}{type(error).__name__}"


@final
class Ledger:
    """The starts of a run, the last of which is this job. Any thread may add facts."""

    def __init__(self, index: StepIndex) -> None:
        self._index = index
        self._writing = threading.Lock()  # held by the thread that writes
        self._lock = threading.RLock()  # guards all below; a signal handler may save too
        self._before, self._is_unread = list[Start](), False  # because reading failed
        self._now = Start(opened_s=time.time())
        self._first_s = 0.0  # when the first step was seen, by the monotonic clock
        self._back: int | None = None  # the step restored after others were trained
        self._owns: Callable[[], bool] = lambda: False
        self._written_s = 0.0
        self._written: tuple[bool, str] | None = None  # what makes the file out of date at once
        self.failed = False  # whether a write did, which may have left a file

    @property
    def starts(self) -> list[Start]:
        """Returns all starts; the last is this job's."""
        with self._lock:
            return [*self._before, self._now]

    # --- facts -----------------------------------------------------------------------------------

    def saw(self, step: int) -> None:
        """Records a step for which a save was offered."""
        now_s = time.monotonic()
        with self._lock:
            reached = self._now.reached
            if self._back is not None and reached is not None and step <= reached:
                self._before.append(replace(self._now, end=WENT_BACK, seen_s=time.time()))
                began = Start(start=self._now.start, opened_s=time.time(), began=self._back)
                self._now, reached = began, None
            self._back = None
            if reached is None:
                self._first_s = now_s
                self._now = replace(self._now, first=step, reached=step)
            elif step > reached:
                trained_s = now_s - self._first_s - self._now.blocked_s
                self._now = replace(self._now, reached=step, trained_s=max(0.0, trained_s))

    def restored(self, step: int, seconds: float) -> None:
        """Records a restore. Training may go on from the step, or this was only a look at it."""
        with self._lock:
            if self._now.reached is None:
                self._now = replace(self._now, began=step)
            else:
                self._back = step
        self.add(restore_s=seconds)

    def add(self, **amounts: float) -> None:
        """Adds to seconds and counts, by fields of `Start`."""
        with self._lock:
            sums = {name: getattr(self._now, name) + more for name, more in amounts.items()}
            self._now = replace(self._now, **sums)

    def note(self, **facts: Any) -> None:
        """Replaces facts, by fields of `Start`."""
        with self._lock:
            self._now = replace(self._now, **facts)

    # --- the file --------------------------------------------------------------------------------

    def read(self, known: Mapping[str, object] | None) -> None:
        """Reads the lines of earlier starts; `known` are the entries of the root."""
        found = read_ledger(self._index) if known is None or names.LEDGER in known else []
        self._is_unread = found is None
        with self._lock:
            self._before = [one for one in found or () if one.start != self._now.start]

    def _read_again(self) -> bool:
        """Reads the earlier starts, which could not be read; returns whether it did."""
        with self._lock:
            ours = self._before
            self.read(None)
            self._before += ours
        return not self._is_unread

    def begin(self, start: str, owns: Callable[[], bool]) -> None:
        """Writes the line of this start; `owns` returns whether the job still owns the run."""
        self._owns = owns
        self.note(start=start)
        self._put()

    def write(self) -> None:
        """Writes what has become known if it is due, and if this job owns the run."""
        is_due = time.monotonic() - self._written_s >= EVERY_S
        if is_due or self._written != self._news():
            self._put(self._owns)

    def close(self) -> None:
        """Writes how this start ended: as noted, by a close, or by the end of the program."""
        end = self._now.end or CLOSED
        if not self._now.end and is_ending():
            error = getattr(sys, "last_value", None)  # what ended the program
            end = failure(error) if isinstance(error, Exception) else NOT_CLOSED
        self.note(end=end)
        self._put(self._owns)

    def _news(self) -> tuple[bool, str]:
        return self._now.saved is None, self._now.end

    def _put(self, owns: Callable[[], bool] = lambda: True) -> None:
        """Writes the file; the first failure is a warning, and the facts stay for the next time."""
        self.note(seen_s=time.time())
        self._written_s, self._written = time.monotonic(), self._news()
        try:
            with self._writing:
                if owns() and (not self._is_unread or self._read_again()):
                    data = encode_ledger(self.starts)
                    self._index.storage.write(f"{self._index.root}/{names.LEDGER}", data)
        except (OSError, CheckpointError) as error:
            if not self.failed:
                text = "cannot be written; saves go on, and it is tried again later"
                self._index.report(f"{self._index.root}/{names.LEDGER} {text}: {error}")
            self.failed = True


def learned_mtbf_s(starts: Sequence[Start]) -> float:
    """Returns the mean time between failures of the job, a fixed one until there were three.

    A failure is an end that nobody asked for, after a step was trained; a start that was preempted
    has none, if its last save was committed. The time is that in which starts were known to run.
    """
    count = len(failures(starts))
    ran_s = sum(max(0.0, start.seen_s - start.opened_s) for start in starts)
    return ran_s / count if count >= ENOUGH and ran_s else PRIOR_MTBF_S


def failures(starts: Sequence[Start]) -> list[Start]:
    """Returns the starts that failed; that of a start without an end is known from the next."""
    ended = [*starts[:-1], *(one for one in starts[-1:] if one.end)]
    return [s for s in ended if s.first is not None and (not s.end or s.end.startswith(FAILED))]
