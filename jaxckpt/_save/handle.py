"""One save from the host's memory to the commit: what the processes do, and where they meet.

    begin       process 0 makes the directory and reports its name, unless that was agreed before
    write       every process writes its share of each item
    `written`   they meet: each reports what it wrote, or what went wrong
    commit      process 0 merges, describes, publishes
    `committed` process 0 reports how that went

All processes return, or all raise: a process with an error of its own raises that one. The saves of
a process to one path commit in the order in which their handles were made. Needs no jax, so that
whoever looks at a run can ask whether it is being saved to.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

from jaxckpt._disk import transaction as _transaction
from jaxckpt._disk.transaction import Transaction
from jaxckpt._progress.meter import Meter
from jaxckpt.errors import CheckpointTimeout, SaveFailed
from jaxckpt.format import names, step
from jaxckpt.format.step import StepMetadata
from jaxckpt.multihost import Json, Processes, disagreement, leading, meet
from jaxckpt.multihost._collective import Lead
from jaxckpt.storage import Storage
from jaxckpt.types import Timing

if TYPE_CHECKING:  # which needs jax
    from jaxckpt._save.snapshot import Item

_logger = logging.getLogger("jaxckpt")

DEFAULT_TIMEOUT_S: Final = 1200.0
_HINT: Final = "All processes must save one tree, of the same global arrays, to one path."
_SKIPS: Final = "skips"  # a process that could have saved, were it not for another save


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """A save, once the caller's values are no longer looked at: what, where and how.

    Attributes:
        items: Emptied when the save has ended, so that a handle that is kept holds no values.
        name: Where the processes meet; used once.
        meter: Measures the save since the caller's call.
        is_step: Whether it is a step of a run, which Orbax's managers lay out a little otherwise.
        token: Of the attempt, if the processes have agreed on it; else process 0 makes one.
        fence: Raises if this job may no longer write here; called just before the commit.
        note: Reported to the other processes; that of process 0 becomes `SaveHandle.note`.
        problem: Why this process does not save; all that it does is to report that.
        skips: Whether it could have saved: another save is what went wrong.
    """

    storage: Storage
    path: str
    items: list[Item]
    processes: Processes
    name: str
    meter: Meter
    custom_metadata: Mapping[str, Any] = field(default_factory=dict)
    overwrite: bool = False
    is_step: bool = False
    token: str | None = None
    fence: Callable[[], None] | None = None
    note: Json = None
    problem: Exception | None = None
    skips: bool = False
    timeout_s: float = DEFAULT_TIMEOUT_S
    started_ns: int = field(default_factory=time.time_ns)

    @property
    def agreed_token(self) -> str | None:
        """The token of the directory in which all may write before process 0 has begun."""
        # Without a rename they all write into the final place: process 0 must look there first.
        return self.token if self.storage.atomic_rename else None


# The latest save of each path and process, until it has ended. Simulated processes share this
# module, and wait for each other anyway.
_latest: dict[tuple[str, int], threading.Event] = {}
_latest_lock = threading.Lock()  # guards _latest


def is_under_way(path: str) -> bool:
    """Returns whether this process is saving to a path, or about to."""
    with _latest_lock:
        return any(path == saved for saved, _ in _latest)


@final
class SaveHandle:
    """A save under way. `result` waits for it and raises what went wrong.

    Attributes:
        path: Where the checkpoint will be.
        timing: How long it took, by phase, once it is committed.
    """

    # For the manager:
    #   step, size_bytes  which step it saves, and how much memory that takes
    #   refused           whether this process only reports that it does not save
    #   skipped           whether it failed only because another process skips it
    #   note              that of process 0, once all have met

    def __init__(self, request: SaveRequest) -> None:
        self.path = request.path
        self.timing: Timing | None = None
        self.step = request.meter.step
        self.size_bytes = sum(item.size_bytes for item in request.items)
        self.refused = request.problem is not None
        self.skipped = False
        self.note: Any = None  # JSON
        self._request = request
        self._meter = request.meter
        self._meter.total_bytes = self.size_bytes
        self._problem = request.problem
        self._transaction: Transaction | None = None  # in process 0
        self._error: BaseException | None = None
        self._delivered = False
        self._ended = threading.Event()
        self._process = os.getpid()
        self._key = request.path, request.processes.index
        self._left = threading.Event()
        with _latest_lock:
            self._before = _latest.get(self._key)
            _latest[self._key] = self._left

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._ended.is_set()

    def result(self, timeout_s: float | None = None) -> None:
        """Waits until the checkpoint is committed and durable.

        Raises:
            CheckpointTimeout: it is still under way after `timeout_s` seconds; it goes on.
            Whatever `save` raises, at every call.
        """
        where = ""
        if os.getpid() != self._process:
            # The thread that saves is not in a forked child, and will never end there.
            where, timeout_s = " in the process that this was forked from", 0.0
        if not self._ended.wait(timeout_s):
            raise CheckpointTimeout(
                f"{self.path}: the save is still under way{where} after {timeout_s:g} s; it goes on"
            )
        if self._error is not None:
            self._delivered = True
            raise self._error
        self.raise_callback_error()

    def raise_callback_error(self) -> None:
        """Raises the error of `on_progress`, if it raised one."""
        if self._meter.error is not None:
            raise self._meter.error

    def take_error(self) -> BaseException | None:
        """Returns what went wrong, unless that was raised or returned before."""
        if self._delivered:
            return None
        self._delivered = True
        return self._error

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "failed" if self._error else "committed"
        return f"<SaveHandle {self.path}: {state}>"

    # --- the save ------------------------------------------------------------------------------

    def attempt(self, *, logs: bool = False) -> bool:
        """Runs the save, in the thread that it was given; returns whether it was committed."""
        try:
            self.run()
        except BaseException as error:  # stored, and raised by `result`
            self._error = error
            if logs:
                _logger.exception("the save of %s failed", self.path)
        self._ended.set()
        return self._error is None

    def run(self) -> None:
        """Writes and commits; all processes return, or all raise."""
        request = self._request
        with self._in_turn():
            with self._beginning() as led:
                if request.processes.index == 0:
                    if request.problem is not None:
                        raise request.problem
                    self._transaction = _transaction.begin(
                        request.storage,
                        request.path,
                        overwrite=request.overwrite,
                        token=request.agreed_token,
                        fence=request.fence,
                    )
                    led.value = self._transaction.work
            self._write(led.value)
            written = self._meet()
            with self._meter.phase("commit"), _leading(request, "committed"), _explaining(request):
                if self._transaction is not None:
                    digests = _describe(request, led.value, written)
                    phases = self._meter.timing().phases
                    self._transaction.commit(digests, lineage={}, phases=phases)

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Waits for earlier saves to the path; ends this one, and removes its files if it fails."""
        request = self._request
        try:
            if self._before is not None and not self._before.wait(DEFAULT_TIMEOUT_S):
                _transaction.warn(self.path, "an earlier save to it has not ended; going on")
            self._meter.waited()
            yield
        except BaseException as error:
            if self._transaction is not None:
                self._transaction.abort()
            elif request.processes.index == 0 and request.agreed_token is not None:
                # The others may have begun to write where process 0 could not.
                _transaction.discard_work(request.storage, self.path, request.agreed_token)
            _transaction.raise_save_error(self.path, error)
        else:
            self.timing = self._meter.timing()
            if request.processes.index == 0:
                _logger.info("%s", self.timing)
        finally:
            request.items.clear()
            self._problem = None  # so that an error that it raised is let go of with the call
            self._left.set()
            with _latest_lock:
                if _latest.get(self._key) is self._left:
                    del _latest[self._key]
            self._meter.end()  # last: it waits for the callback, and may be interrupted

    @contextlib.contextmanager
    def _beginning(self) -> Iterator[Lead]:
        """Reports where to write; all raise if process 0 cannot begin and they wait for it."""
        request = self._request
        if request.agreed_token is None:
            with _leading(request, "begin") as led:
                yield led
            return
        try:
            yield Lead(_transaction.work_of(request.storage, self.path, request.agreed_token))
        except Exception as error:  # reported at `written`, then raised
            self._problem = error

    def _write(self, work: str) -> None:
        """Writes this process's share."""
        request = self._request
        if self._problem is None:
            folders = [item.folder(work, request.processes) for item in request.items]
            self._meter.measure = partial(_written_bytes, request.storage, folders)
            try:
                with self._meter.phase("write"), _explaining(request):
                    for item in request.items:
                        item.write(request.storage, work, request.processes)
            except Exception as error:  # reported at `written`, then raised
                self._problem = error

    def _meet(self) -> list[Any]:
        """Waits until all have written; returns what each reports of its items."""
        request = self._request
        report = {
            "seconds": self._meter.phases.get("write", 0.0),
            "path": self.path,
            "items": {item.name: item.said() for item in request.items},
            "note": request.note,
        }
        name, mark = f"{request.name}/written", _SKIPS if request.skips else ""
        self._meter.missing = partial(request.processes.missing, name)
        with self._meter.phase("meet"):
            met = meet(
                request.processes,
                name,
                report,
                self._problem,
                timeout_s=request.timeout_s,
                mark=mark,
            )
        self._meter.note_slowest([one["seconds"] for one in met.values])
        self.note = met.values[0]["note"]
        self.skipped = bool(met.marks) and set(met.marks.values()) == {_SKIPS}
        met.check(self._problem, f"{self.path} was not saved", _HINT)
        if failures := _differences(request.items, met.values):
            raise disagreement(f"{self.path} was not saved", failures, _HINT)
        return [one["items"] for one in met.values]


def _leading(request: SaveRequest, what: str) -> AbstractContextManager[Lead]:
    return leading(
        request.processes,
        f"{request.name}/{what}",
        place=f"{request.path} was not saved",
        timeout_s=request.timeout_s,
    )


@contextlib.contextmanager
def _explaining(request: SaveRequest) -> Iterator[None]:
    """Raises the fence's error instead: files may be gone because another job took over."""
    try:
        yield
    except Exception as error:
        if request.fence is not None and request.processes.index == 0:
            with contextlib.suppress(OSError):  # no better explanation
                try:
                    request.fence()
                except SaveFailed as fenced:
                    raise fenced from error
        raise


def _written_bytes(storage: Storage, folders: list[str]) -> int:
    return sum(_transaction.bytes_below(storage, folder) for folder in folders)


def _differences(items: list[Item], reports: list[Any]) -> dict[int, str]:
    """Returns why the processes do not save one checkpoint, by process."""
    kinds = [[(name, said["item"]) for name, said in one["items"].items()] for one in reports]
    failures = {}
    for i, one in enumerate(reports):
        if one["path"] != reports[0]["path"]:
            failures[i] = f"saves to another path than process 0: {one['path']}"
        elif kinds[i] != kinds[0]:
            failures[i] = f"saves other items than process 0: {', '.join(one['items'])}"
    for item in items if not failures else ():
        for i, why in item.disagreement([one["items"][item.name] for one in reports]).items():
            failures.setdefault(i, why if len(items) == 1 else f"{item.name} {why}")
    return failures


def _describe(request: SaveRequest, work: str, written: list[Any]) -> dict[str, str]:
    """Completes the items and writes the metadata files; returns the digests of small files."""
    files, found = {}, {}
    for item in request.items:
        reports = [one[item.name] for one in written]
        added, there = item.finish(request.storage, work, request.processes, reports)
        if request.is_step:
            marker = f"Checkpoint commit was successful to {request.path}".encode()
            added = {**added, names.COMMIT_MARKER: marker}
        files |= {f"{item.name}/{name}": data for name, data in added.items()}
        found |= {f"{item.name}/{name}": data for name, data in there.items()}
    files[names.CHECKPOINT_METADATA] = step.encode(
        StepMetadata(
            handlers={item.name: item.handler for item in request.items},
            init_ns=request.started_ns,
            commit_ns=time.time_ns(),
            custom_metadata=request.custom_metadata,
        )
    )
    if not request.is_step:
        files[names.ORBAX_MARKER] = b""
    for path, data in files.items():
        request.storage.write(f"{work}/{path}", data)
    return {path: step.digest(data) for path, data in (files | found).items()}
