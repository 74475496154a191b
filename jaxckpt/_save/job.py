"""One save from the host's memory to the commit: what the processes do, and where they meet.

    begin       process 0 makes the directory and tells its name   -- unless that was agreed before
    write       every process writes its share of each item
    `written`   they meet: each says what it wrote, or what went wrong
    commit      process 0 merges, describes, publishes
    `committed` process 0 tells the others how that went

All processes return, or all raise: with its own error who has one, else with that of the others.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

from jaxckpt._disk import transaction as _transaction
from jaxckpt._disk.transaction import Transaction
from jaxckpt._disk.writer import database_of
from jaxckpt._progress.meter import Meter, Watch
from jaxckpt._save.snapshot import Item
from jaxckpt._save.turn import DEFAULT_TIMEOUT_S, Turn
from jaxckpt.errors import SaveFailed
from jaxckpt.format import names, step
from jaxckpt.format.step import StepMetadata
from jaxckpt.multihost import Json, Processes, disagreement, lead, leading, meet
from jaxckpt.multihost._collective import Lead
from jaxckpt.storage import Storage

_logger = logging.getLogger("jaxckpt")

_HINT: Final = "All processes must save one tree, of the same global arrays, to one path."
_SKIPS: Final = "skips"  # a process that could have saved, were it not for another save


@dataclass(slots=True, kw_only=True)
class SaveJob:
    """Everything that a save needs once the caller's values are no longer looked at.

    Attributes:
        name: Where the processes meet; used once.
        is_step: Whether it is a step of a run, which Orbax's managers lay out a little otherwise.
        token: Of the attempt, if the processes have agreed on it; else process 0 makes one.
        fence: Raises if this job may no longer write here; called just before the commit.
        tell: For the other processes; `told` is what process 0 told, once all have met.
        problem: Why this process only tells the others that it does not save.
        skips: Whether it could have saved: another save is what went wrong.
        skipped: Whether the job failed only because another process skips it.
        watch: Measures it since the caller's call, and tells who watches.
    """

    storage: Storage
    path: str
    items: Sequence[Item]
    processes: Processes
    name: str
    watch: Watch
    custom_metadata: Mapping[str, Any] = field(default_factory=dict)
    lineage: Mapping[str, Any] = field(default_factory=dict)
    overwrite: bool = False
    is_step: bool = False
    token: str | None = None
    fence: Callable[[], None] | None = None
    tell: Json = None
    told: Any = None  # JSON
    problem: Exception | None = None
    skips: bool = False
    skipped: bool = False
    started_ns: int = field(default_factory=time.time_ns)
    timeout_s: float = DEFAULT_TIMEOUT_S
    turn: Turn = field(init=False)

    def __post_init__(self) -> None:
        self.turn = Turn(self.path, self.processes.index)

    @property
    def size_bytes(self) -> int:
        """What the values take in memory, about."""
        return sum(item.size_bytes for item in self.items)

    @property
    def meter(self) -> Meter:
        """How far it is, and how long it took."""
        return self.watch.meter

    def run(self) -> None:
        """Writes and commits; all processes return, or all raise."""
        self.meter.total_bytes = self.size_bytes
        try:
            with self.turn:
                self.meter.waited()
                self._run()
        finally:
            self.watch.end()

    def _run(self) -> None:
        transaction: Transaction | None = None
        problem = self.problem
        try:
            if self._agreed_token is not None:
                work = _transaction.work_of(self.storage, self.path, self._agreed_token)
                if self.processes.index == 0 and problem is None:
                    try:
                        transaction = self._begin()
                    except Exception as error:  # told to all processes, then raised
                        problem = error
            else:
                with self._leading("begin") as led:
                    if self.processes.index == 0:
                        transaction = self._begin()
                        led.value = transaction.work
                work = led.value
            said = self._write(work, problem)
            self._commit(transaction, work, said)
        except BaseException as error:
            if transaction is not None:
                transaction.abort()
            elif self.processes.index == 0 and self._agreed_token is not None:
                # The others may have begun to write where process 0 could not.
                _transaction.discard_work(self.storage, self.path, self._agreed_token)
            _transaction.raise_save_error(self.path, error)
        finally:
            self.items = ()  # so that a handle that is kept holds no values
        if self.processes.index == 0:
            _logger.info("%s", self.meter.timing())

    @property
    def _agreed_token(self) -> str | None:
        # Without a rename they all write into the final place: process 0 must look there first.
        return self.token if self.storage.atomic_rename else None

    def _leading(self, what: str) -> AbstractContextManager[Lead]:
        return leading(
            self.processes,
            f"{self.name}/{what}",
            place=f"{self.path} was not saved",
            timeout_s=self.timeout_s,
        )

    def _begin(self) -> Transaction:
        if self.problem is not None:
            raise self.problem
        return _transaction.begin(
            self.storage,
            self.path,
            overwrite=self.overwrite,
            token=self._agreed_token,
            fence=self.fence,
        )

    def _write(self, work: str, problem: Exception | None) -> list[Any]:
        """Writes this process's share; returns what every process said when it had done so."""
        if problem is None:
            self.meter.measure = lambda: self._written_bytes(work)
            try:
                with self.meter.phase("write"), self._explaining():
                    for item in self.items:
                        item.write(self.storage, work, self.processes)
            except Exception as error:  # told to all processes, then raised
                problem = error
        said = {
            "seconds": self.meter.phases.get("write", 0.0),
            "path": self.path,
            "items": {item.name: item.said() for item in self.items},
            "tell": self.tell,
        }
        self.meter.missing = lambda: self.processes.missing(f"{self.name}/written")
        with self.meter.phase("meet"):
            met = meet(
                self.processes,
                f"{self.name}/written",
                said,
                problem,
                timeout_s=self.timeout_s,
                mark=_SKIPS if self.skips else "",
            )
        self.meter.note_slowest([one["seconds"] for one in met.values])
        self.told = met.values[0]["tell"]
        self.skipped = bool(met.marks) and set(met.marks.values()) == {_SKIPS}
        met.check(problem, f"{self.path} was not saved", _HINT)
        self._check_agreement(met.values)
        return [one["items"] for one in met.values]

    def _written_bytes(self, work: str) -> int:
        """How much of this process's share is in files, for those who watch."""
        index, count = self.processes.index, self.processes.count
        folders = [database_of(f"{work}/{item.name}", index, count) for item in self.items]
        return sum(_transaction.bytes_below(self.storage, folder) for folder in folders)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Raises the fence's error instead: files may be gone because another job took over."""
        try:
            yield
        except Exception as error:
            if self.fence is not None and self.processes.index == 0:
                with contextlib.suppress(OSError):  # no better explanation
                    try:
                        self.fence()
                    except SaveFailed as fenced:
                        raise fenced from error
            raise

    def _check_agreement(self, said: list[Any]) -> None:
        failures: dict[int, str] = {}
        for i, one in enumerate(said):
            if one["path"] != said[0]["path"]:
                failures[i] = f"saves to another path than process 0: {one['path']}"
            elif _kinds(one) != _kinds(said[0]):
                failures[i] = f"saves other items than process 0: {', '.join(one['items'])}"
        for item in self.items if not failures else ():
            for i, why in item.disagreement([one["items"][item.name] for one in said]).items():
                failures.setdefault(i, why if len(self.items) == 1 else f"{item.name} {why}")
        if failures:
            raise disagreement(f"{self.path} was not saved", failures, _HINT)

    def _commit(self, transaction: Transaction | None, work: str, said: list[Any]) -> None:
        with self.meter.phase("commit"), self._leading("committed"):
            if transaction is not None:
                with self._explaining():
                    digests = self._finalize(work, said)
                    phases = self.meter.timing().phases
                    transaction.commit(digests, lineage=self.lineage, phases=phases)

    def _finalize(self, work: str, said: list[Any]) -> dict[str, str]:
        """Completes the items and writes the metadata files; returns the digests of those."""
        files, read_back = {}, {}
        for item in self.items:
            ours = [one[item.name] for one in said]
            made = item.finish(self.storage, work, self.processes, ours)
            if self.is_step:
                made[names.COMMIT_MARKER] = _marker_text(self.path)
            files |= {f"{item.name}/{name}": data for name, data in made.items()}
            found = item.read_back(self.storage, work, self.processes)
            read_back |= {f"{item.name}/{name}": data for name, data in found.items()}
        files[names.CHECKPOINT_METADATA] = step.encode(
            StepMetadata(
                handlers={item.name: item.handler for item in self.items},
                init_ns=self.started_ns,
                commit_ns=time.time_ns(),
                custom_metadata=self.custom_metadata,
            )
        )
        if not self.is_step:
            files[names.ORBAX_MARKER] = b""
        for path, data in files.items():
            self.storage.write(f"{work}/{path}", data)
        return {path: step.digest(data) for path, data in (files | read_back).items()}


def take_part(processes: Processes, name: str, error: Exception) -> None:
    """Takes part in the rounds of a save that this process cannot make, so that no other waits."""

    def fail() -> Json:
        raise error

    said = {"seconds": 0.0, "tell": None}
    with contextlib.suppress(Exception):  # this process's own error is the one to raise
        lead(processes, f"{name}/begin", fail, place="", timeout_s=DEFAULT_TIMEOUT_S)
        meet(processes, f"{name}/written", said, error, timeout_s=DEFAULT_TIMEOUT_S)


def _kinds(said: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, one["item"]) for name, one in said["items"].items()]


def _marker_text(path: str) -> bytes:
    return f"Checkpoint commit was successful to {path}".encode()
