"""One save from host memory to the commit, and where the processes meet.

    begin       process 0 makes the directory and reports its name, unless agreed before
    write       every process writes its share of each item, and leaves a part: a file for
                process 0 with the facts about it, such as where the values lie
    `written`   they meet: each reports its work or its error
    commit      process 0 reads the parts, writes the metadata and publishes
    `committed` process 0 reports the outcome

Either every process returns or every process raises; a process with an error of its own raises
this error. A process's saves to one path commit in the order of their handles. This module does
without jax, so that inspecting a run does not import it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

from jaxckpt._core.check import calling
from jaxckpt._disk import removal as _removal
from jaxckpt._disk import transaction as _transaction
from jaxckpt._disk.transaction import Overwrite, Transaction, Work
from jaxckpt._progress.meter import Meter
from jaxckpt._save.failure import Failure
from jaxckpt.errors import CheckpointTimeout, SaveFailed
from jaxckpt.format import names, step
from jaxckpt.format.step import FileFacts, Life, StepMetadata
from jaxckpt.multihost import (
    Json,
    Processes,
    first_of,
    leading,
    meet,
    raise_if_any,
    slowest_of,
)
from jaxckpt.multihost._collective import Lead
from jaxckpt.storage import Storage
from jaxckpt.types import Timing

if TYPE_CHECKING:  # which needs jax
    from jaxckpt._save.snapshot import SaveItem

_logger = logging.getLogger("jaxckpt")

DEFAULT_TIMEOUT_S: Final = 1200.0
_MAX_PART_BYTES: Final = 1 << 30
_HINT: Final = "All processes must save the same tree of global arrays to the same path."
_SKIPS: Final = "skips"  # marks a process that skips this save because an earlier one failed


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """A save whose values are on the host."""

    storage: Storage
    path: str
    # The main one first. Emptied after the save, so that a handle does not keep the values.
    items: list[SaveItem]
    processes: Processes
    name: str  # where the processes meet; unique
    meter: Meter  # started when the caller called
    custom_metadata: Mapping[str, Any] = field(default_factory=dict)
    overwrite: Overwrite = False
    own: bool = False  # whether each process saves what it holds on a disk of its own
    life: Callable[[], Life | None] = lambda: None  # of the run; called once all have written
    is_step: bool = False  # whether to lay it out like a step of an Orbax manager
    token: str | None = None  # of the attempt; if None, process 0 makes one
    fence: Callable[[], None] | None = None  # before the commit; raises if this job lost the run
    problem: Exception | None = None  # if set, this process reports it and does not save
    skips: bool = False  # whether `problem` is the error of an earlier save
    timeout_s: float = DEFAULT_TIMEOUT_S
    started_ns: int = field(default_factory=time.time_ns)


# The latest save of each path and process, until it has ended. The process is part of the key
# because simulated processes share this module.
_latest: dict[tuple[str, int], threading.Event] = {}
_latest_lock = threading.Lock()  # guards _latest
os.register_at_fork(after_in_child=_latest.clear)  # a forked child lacks the threads


def is_under_way(path: str) -> bool:
    """Returns whether this process is saving to a path or about to."""
    with _latest_lock:
        return any(path == saved for saved, _ in _latest)


@final
class SaveHandle:
    """A save in the background. `result` waits for it and raises its error.

    Attributes:
        path: Directory of the checkpoint.
        timing: Seconds by phase, or None until the commit.
    """

    def __init__(self, request: SaveRequest) -> None:
        self.path = request.path
        self.timing: Timing | None = None
        # The next nine are for the manager.
        self.name = request.name
        self.caller = threading.current_thread()
        self.error: BaseException | None = None
        self.failure: Failure | None = None  # for the manager: the same, or of later work
        self.step = request.meter.step
        self.size_bytes = sum(item.size_bytes for item in request.items)  # on the host
        self.refused = request.problem is not None
        self.skipped = False  # whether only skipping processes made it fail
        # Waits until the step is in the run's directory, if it is saved elsewhere first.
        self.wait_durable: Callable[[float | None], None] | None = None
        self._request = request
        self._token = request.token
        self._meter = request.meter
        self._meter.total_bytes = self.size_bytes
        self._problem = request.problem
        self._transaction: Transaction | None = None  # in process 0
        self._parts: list[str] = []  # the items of which this process left a part
        self._is_cancelled = False
        self._ended = threading.Event()
        self._on_end: list[Callable[[SaveHandle], object]] | None = []  # None once they are called
        self._on_end_lock = threading.Lock()  # guards `_on_end`
        self._process = os.getpid()
        self._key = request.path, request.processes.index
        self._left = threading.Event()
        with _latest_lock:
            self._before = _latest.get(self._key)
            _latest[self._key] = self._left

    def done(self) -> bool:
        """Returns whether the save has ended, by a commit or an error."""
        return self._ended.is_set()

    def result(self, timeout_s: float | None = None) -> None:
        """Waits until the checkpoint is committed and durable.

        Raises:
            CheckpointTimeout: the save is still under way after `timeout_s` and continues.
            Any error of `save`, at every call.
        """
        where = ""
        if os.getpid() != self._process:
            # A forked child does not have the saving thread, so waiting there would never end.
            where, timeout_s = " in the parent process, before the fork", 0.0
        if not self._ended.wait(timeout_s):
            raise CheckpointTimeout(
                f"{self.path}: the save continues{where} and has not ended after {timeout_s:g} s"
            )
        if self.error is not None:
            if self.failure is not None:
                self.failure.hear()
            raise self.error
        self.raise_callback_error()

    def durable(self, timeout_s: float | None = None) -> None:
        """Waits until the checkpoint is committed in the directory of the run.

        Differs from `result` with `CheckpointManager(local=...)`, which saves a step locally and
        then uploads it. There, all processes must call it; `timeout_s` is for each of the two, and
        by default the limit of the upload is the manager's `durable_timeout_s`.

        Raises:
            ValueError: the step stays local, since the policy `save` does not name it.
            CheckpointTimeout: the save or the upload is still under way after `timeout_s`.
            SaveFailed: the upload was given up; the step is still there locally.
        """
        self.result(timeout_s)
        if self.wait_durable is not None:
            self.wait_durable(timeout_s)

    def on_end(self, callback: Callable[[SaveHandle], object]) -> None:
        """Calls a function with this handle when the save has ended, at once if it has.

        In the saving thread, before `result` returns there, which raises the errors of functions.
        The attribute `timing` is None if the save failed.
        """
        with self._on_end_lock:
            if self._on_end is not None:
                self._on_end.append(callback)
                return
        callback(self)

    def cancel(self) -> None:
        """Ends the save without a commit, unless it has been committed.

        Returns at once. `result` then raises the failure, which a manager does not raise again. All
        processes of a job must call it; a save that only some of them cancel fails in all.
        """
        self._is_cancelled = True

    def raise_callback_error(self) -> None:
        """Raises the error of `on_progress`, if it raised one."""
        if self._meter.error is not None:
            raise self._meter.error

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The processes that have not reported their work yet."""
        return self._meter.waiting_for()

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "failed" if self.error else "committed"
        return f"<SaveHandle {self.path}: {state}>"

    # --- the save ------------------------------------------------------------------------------

    def attempt(self, *, logs: bool = False) -> bool:
        """Runs the save, keeping its error for `result`; returns whether it was committed."""
        try:
            self.run()
        except BaseException as error:
            self.error = error
            if not (self._is_cancelled or self.refused or self.skipped):
                self.failure = Failure(error, self.caller)
            if logs:
                _logger.exception("the save of %s failed", self.path)
        is_committed = self.error is None
        with self._on_end_lock:
            callbacks, self._on_end = self._on_end, None
        for callback in callbacks or ():
            self._call_back(callback)
        self._ended.set()
        return is_committed

    def _call_back(self, callback: Callable[[SaveHandle], object]) -> None:
        try:
            with calling(f"a function given to on_end, after the save of {self.path}"):
                callback(self)
        except Exception as error:
            self.error = self.error or error

    def run(self) -> None:
        """Writes and commits; either all processes return or all raise."""
        request = self._request
        with self._in_turn():
            with self._beginning() as led:
                if request.own or request.processes.index == 0:
                    if request.problem is not None:
                        raise request.problem
                    self._transaction = _transaction.begin(
                        request.storage,
                        request.path,
                        overwrite=request.overwrite,
                        token=self._token,
                        fence=request.fence,
                    )
                    led.value = self._place_of(self._transaction.token)
            work = Work(*led.value, own=request.own, landed=self._meter.landed)
            self._write(work)
            with self._meter.phase("meet"):
                written = self._meet()
            with self._meter.phase("commit"), _committing(request), _explaining(request):
                if self._transaction is not None:
                    files, known = _describe(request, work, written)
                    processes = request.processes
                    self._transaction.commit(
                        files,
                        known=known,
                        lineage={},
                        phases=self._meter.timing().phases,
                        item=request.items[0].name,
                        share=(processes.index, processes.count) if request.own else None,
                        life=request.life(),
                    )

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Waits for earlier saves to the path; on failure, removes the files of this save."""
        request = self._request
        try:
            if self._before is not None and not self._before.wait(DEFAULT_TIMEOUT_S):
                _removal.warn(self.path, "an earlier save here has not ended; starting anyway")
            self._meter.waited()
            yield
        except BaseException as error:
            leads = request.own or request.processes.index == 0
            if self._transaction is not None:
                self._transaction.abort()
            elif leads and self._token is not None:
                # Other processes may have written where process 0 could not.
                work = _transaction.work_for(request.storage, self.path, self._token)
                _removal.discard_work(request.storage, work.path, work.mark)
            _transaction.raise_save_error(self.path, error, size_bytes=self.size_bytes)
        else:
            self.timing = self._meter.timing()
            if request.processes.index == 0:
                _logger.info("%s", self.timing)
        finally:
            request.items.clear()
            self._problem = None  # releases the error and its traceback
            self._left.set()
            with _latest_lock:
                if _latest.get(self._key) is self._left:
                    del _latest[self._key]
            self._meter.end()  # last: it waits for the callback, and may be interrupted

    @contextlib.contextmanager
    def _beginning(self) -> Iterator[Lead]:
        """Yields where to write, agreed on before or made by process 0."""
        request = self._request
        if self._token is None:
            with _leading(request, "begin") as led:
                yield led
            return
        try:
            yield Lead(self._place_of(self._token))
        except Exception as error:  # reported at `written`, then raised
            self._problem = error

    def _place_of(self, token: str) -> tuple[str, str]:
        """Returns path and mark of the `Work` of an attempt."""
        return _transaction.work_for(self._request.storage, self.path, token)[:2]

    def _write(self, work: Work) -> None:
        request = self._request
        if self._problem is None and not self._is_cancelled:
            try:
                with self._meter.phase("copy"):
                    for item in request.items:
                        item.arrive()
                with self._meter.phase("write"), _explaining(request):
                    for item in request.items:
                        item.write(request.storage, work, request.processes)
                        self._leave_part(item, work)
            except Exception as error:  # reported at `written`, then raised
                self._problem = error

    def _leave_part(self, item: SaveItem, work: Work) -> None:
        """Writes a file with the facts about this process's share, for process 0."""
        request, index = self._request, self._request.processes.index
        if index == 0 or request.own or (part := item.part()) is None:
            return
        folder = posixpath.join(work.path, item.name).rstrip("/")
        request.storage.make_dir(folder)
        request.storage.write(f"{folder}/{names.part(index, work.mark)}", part)
        self._parts.append(item.name)

    def _meet(self) -> list[list[str]]:
        """Waits until all have written; process 0 learns for which items each left a part."""
        request = self._request
        if self._is_cancelled and self._problem is None:
            self._problem = SaveFailed(f"{self.path}: the save was cancelled before its commit")
        if request.processes.count == 1:
            if self._problem is not None:
                raise self._problem
            return []
        report = {
            "seconds": self._meter.phases.get("write", 0.0),
            "path": "" if request.own else self.path,
            "items": {item.name: item.said() for item in request.items},
            "parts": self._parts,
        }
        written: list[Any] = []  # in process 0

        def judge(reports: list[Any]) -> Json:
            written.extend(one["parts"] for one in reports)
            differences = _differences(request.items, reports)
            return {**first_of(differences), "slowest": slowest_of(reports)}

        name, mark = f"{request.name}/written", _SKIPS if request.skips else ""
        self._meter.missing = partial(request.processes.missing, name)
        met = meet(
            request.processes,
            name,
            report,
            self._problem,
            judge,
            timeout_s=request.timeout_s,
            mark=mark,
            place=f"saving {self.path}",
        )
        self.skipped = bool(met.marks) and set(met.marks.values()) == {_SKIPS}
        met.check(self._problem, f"{self.path} was not saved", _HINT)
        raise_if_any(met.verdict, f"{self.path} was not saved", _HINT)
        self._meter.slowest = met.verdict["slowest"]
        return [] if request.own else written


@contextlib.contextmanager
def _explaining(request: SaveRequest) -> Iterator[None]:
    """Prefers the fence's error: files may be missing because another job took the run over."""
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


@contextlib.contextmanager
def _committing(request: SaveRequest) -> Iterator[None]:
    """Process 0 commits, or with `own` each process its own share, and none is alone with it."""
    if not request.own:
        with _leading(request, "committed"):
            yield
        return
    problem = None
    try:
        yield
    except Exception as error:  # reported to the others, then raised
        problem = error
    name, place = f"{request.name}/committed", f"{request.path} was not saved"
    timeout_s, path = request.timeout_s, f"saving {request.path}"
    met = meet(request.processes, name, None, problem, timeout_s=timeout_s, place=path)
    met.check(problem, place)


def _leading(request: SaveRequest, what: str) -> AbstractContextManager[Lead]:
    return leading(
        request.processes,
        f"{request.name}/{what}",
        place=f"{request.path} was not saved",
        timeout_s=request.timeout_s,
    )


def _differences(items: list[SaveItem], reports: list[Any]) -> dict[int, str]:
    """Returns in which processes the save differs from process 0's, and how."""
    kinds = [[(name, said["item"]) for name, said in one["items"].items()] for one in reports]
    failures = {}
    for i, one in enumerate(reports):
        if one["path"] != reports[0]["path"]:
            failures[i] = f"saves to a different path than process 0: {one['path']}"
        elif kinds[i] != kinds[0]:
            different = ", ".join(one["items"]) or "item=None"
            failures[i] = f"saves different items than process 0: {different}"
    for item in items if not failures else ():
        for i, why in item.disagreement([one["items"][item.name] for one in reports]).items():
            failures.setdefault(i, why if len(items) == 1 else f"{item.name} {why}")
    return failures


def _describe(
    request: SaveRequest, work: Work, written: list[list[str]]
) -> tuple[dict[str, bytes], dict[str, FileFacts]]:
    """Completes the items; returns the metadata files, and facts about others' files."""
    files, known = {}, {}
    for item in request.items:
        parts = _take_parts(request, work, item.name, written)
        added, there = item.finish(request.storage, work, request.processes, parts)
        # Orbax looks for it in each item of a step, and of anything on gs://.
        if request.is_step or (item.name and not request.storage.atomic_rename):
            marker = f"Checkpoint commit was successful to {request.path}".encode()
            added = {**added, names.COMMIT_MARKER: marker}
        files |= {posixpath.join(item.name, name): data for name, data in added.items()}
        known |= {posixpath.join(item.name, name): facts for name, facts in there.items()}
    files[names.CHECKPOINT_METADATA] = step.encode(
        StepMetadata(
            handlers={x.name: x.handler for x in request.items if "/" not in x.name},
            init_ns=request.started_ns,
            commit_ns=time.time_ns(),
            custom_metadata=request.custom_metadata,
        )
    )
    if not request.is_step and request.items[0].name:
        files[names.ORBAX_MARKER] = b""
    return files, known


def _take_parts(
    request: SaveRequest, work: Work, name: str, written: list[list[str]]
) -> dict[int, bytes]:
    """Reads and removes the parts of an item that the other processes left for process 0."""
    storage, folder = request.storage, posixpath.join(work.path, name).rstrip("/")
    writers = [i for i, parts in enumerate(written) if name in parts]
    if not writers:
        return {}
    files = {i: f"{folder}/{names.part(i, work.mark)}" for i in writers}
    try:
        reads = [partial(storage.read, file, max_bytes=_MAX_PART_BYTES) for file in files.values()]
        parts = dict(zip(files, storage.together(reads), strict=True))
    except FileNotFoundError as error:
        raise _transaction.unseen(request.path, str(error.filename)) from error
    storage.delete_files([*files.values()])
    return parts
