"""One save from host memory to the commit, and where the processes meet.

    begin       process 0 makes the directory and reports its name, unless agreed before
    write       every process writes its share of each item, and leaves a part: a file for
                process 0 with the facts about it, such as where the values lie
    `written`   they meet: each reports its work or its error
    commit      process 0 reads the parts, writes the metadata and publishes
    `committed` process 0 reports the outcome

Either every process returns or every process raises; a process with an error of its own raises
this error. A process's saves to one path commit in the order in which they queued. This module does
without jax, so that inspecting a run does not import it.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, final

from jaxckpt._core.log import logger
from jaxckpt._core.threads import Latch
from jaxckpt._disk import transaction as _transaction
from jaxckpt._disk.attempt import Work, raise_save_error, warn
from jaxckpt._disk.commit import commit_of
from jaxckpt._disk.transaction import Overwrite, Transaction
from jaxckpt._progress.meter import Meter
from jaxckpt.errors import SaveFailed
from jaxckpt.format import jsontext, names, step
from jaxckpt.format.step import FileFacts, Life, Record, StepMetadata
from jaxckpt.multihost import Group, Json, Processes, first_of, meet, raise_if_any, slowest_of
from jaxckpt.multihost._collective import Lead
from jaxckpt.storage import Storage, together
from jaxckpt.types import Timing

if TYPE_CHECKING:  # which needs jax
    from jaxckpt._save.replicas import Replicas
    from jaxckpt._save.snapshot import SaveItem

_LONGEST_TURN_S: Final = 1200.0  # of an earlier save to the same path
_MAX_PART_BYTES: Final = 1 << 30
MOST_TOLD_BYTES: Final = 1 << 14  # of JSON that process 0 tells to processes with own disks
_HINT: Final = "All processes must save the same tree of global arrays to the same path."
_METRICS: Final = (names.METRICS_ITEM, "files")  # those of process 0 count, whoever has some
_SKIPS: Final = "skips"  # marks a process that skips this save because an earlier one failed


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """A save whose values are on the host."""

    storage: Storage
    path: str
    items: list[SaveItem]  # emptied after the save, so that a handle does not keep the values
    item: str = names.STATE_ITEM  # what the caller calls the main one; see `main_tree`
    group: Group  # of the processes that save to the path
    name: str  # where the processes meet; unique
    meter: Meter  # started when the caller called
    custom_metadata: Mapping[str, Any] = field(default_factory=dict)
    overwrite: Overwrite = False
    pace: Callable[[int], object] = int  # waits until so many bytes may be written
    life: Callable[[], Life | None] = lambda: None  # of the run; called once all have written
    replicas: Replicas | None = None  # whose differences mark a step of a run
    is_step: bool = False  # whether to lay it out like a step of an Orbax manager
    token: str | None = None  # of the attempt; if None, process 0 makes one
    fence: Callable[[], None] | None = None  # before the commit; raises if this job lost the run
    problem: Exception | None = None  # if set, this process reports it and does not save
    skips: bool = False  # whether `problem` is the error of an earlier save
    started_ns: int = field(default_factory=time.time_ns)

    @property
    def processes(self) -> Processes:
        return self.group.job


def meeting_of(name: str) -> str:
    """Returns the gather in which all report their work, once for each attempt."""
    return f"{name}/written"


# The saves of this process that have not ended, in order. Without a lock, which a signal could
# leave taken: no call on the list runs Python code.
_queue: list[SaveJob] = []
os.register_at_fork(after_in_child=_queue.clear)  # a forked child lacks the threads


def is_under_way(path: str) -> bool:
    """Returns whether this process is saving to a path or about to."""
    return any(path == job.request.path for job in [*_queue])


@final
class SaveJob:
    """One save, from its turn among the saves of this process to the commit."""

    def __init__(self, request: SaveRequest) -> None:
        self.request = request
        self.size_bytes = sum(item.size_bytes for item in request.items)  # on the host
        self.is_cancelled = False  # set in any thread
        self.skipped = False  # whether only skipping processes made it fail
        self._meter = request.meter
        self._meter.total_bytes = self.size_bytes
        self._problem = request.problem
        self._transaction: Transaction | None = None  # in process 0
        self._parts: list[str] = []  # the items of which this process left a part
        self._key = request.path, request.processes.index  # simulated processes share `_queue`
        self._thread: threading.Thread | None = None  # once it runs
        self._left = Latch()
        self._before: list[SaveJob] = []

    def queue(self) -> None:
        """Takes the turn among the saves to the path, unless it has one; `run` gives it back."""
        if self not in _queue:
            _queue.append(self)
            earlier = takewhile(lambda job: job is not self, [*_queue])
            self._before = [job for job in earlier if job._key == self._key]
            for job in self._before:
                # A signal ended its save before that could give the turn back.
                if job._thread is threading.current_thread():
                    job.leave()

    def leave(self) -> None:
        """Gives the turn back."""
        self._left.set()
        with contextlib.suppress(ValueError):
            _queue.remove(self)

    def run(self) -> Timing:
        """Writes and commits; either all processes return or all raise."""
        request = self.request
        with self._in_turn():
            with self._beginning() as led, _explaining(request):
                if request.group.leads:
                    if request.problem is not None:
                        raise request.problem
                    self._transaction = _transaction.begin(
                        request.storage,
                        request.path,
                        overwrite=request.overwrite,
                        token=request.token,
                        fence=request.fence,
                    )
                    led.value = self._work_of(self._transaction.token)
            work = Work(*led.value, landed=self._landed)
            self._write(work)
            with self._meter.phase("meet"):
                if self.is_cancelled and self._problem is None:
                    text = f"{request.path}: the save was cancelled before its commit"
                    self._problem = SaveFailed(text)
                if self._problem is not None and request.processes.count == 1:
                    raise self._problem
                written = self._meet() if request.processes.count > 1 else []
            committing = _leading(request, "committed")
            with self._meter.phase("commit"), committing, _explaining(request):
                if self._transaction is not None:
                    files, known = _describe(self.request, work, written)
                    parts = (file.partition("/") for file in files)
                    trees = [item for item, _, file in parts if file == names.TREE_METADATA]
                    about = Record(
                        phases=self._meter.timing().phases,
                        item=names.main_tree(trees, request.item),
                        share=request.group.part,
                        life=request.life(),
                        differences=tuple(request.replicas.marked if request.replicas else ()),
                    )
                    self._transaction.commit(files, about, known=known)
            timing = self._meter.timing()
            if request.processes.index == 0:
                logger.info("%s", timing)
            return timing

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Waits for earlier saves to the path; on failure, removes the files of this save."""
        request, self._thread = self.request, threading.current_thread()
        try:
            self.queue()
            if not all(earlier._left.wait(_LONGEST_TURN_S) for earlier in self._before):
                warn(request.path, "an earlier save here has not ended; starting anyway")
            self._meter.waited()
            yield
        except BaseException as error:
            if self._transaction is not None:
                self._transaction.abort(error)
            elif request.group.leads and request.token is not None:
                # Other processes may have written where process 0 could not.
                Transaction(request.storage, request.path, request.token, False).abort(error)
            raise_save_error(request.path, error, size_bytes=self.size_bytes)
        finally:
            self.leave()
            self._before.clear()
            request.items.clear()
            if request.replicas is not None:
                request.replicas.release()
            self._problem = None  # releases the error and its traceback
            self._meter.end()  # last: it waits for the callback, and may be interrupted

    @contextlib.contextmanager
    def _beginning(self) -> Iterator[Lead]:
        """Yields where to write, agreed on before or made by process 0."""
        request = self.request
        if request.token is None:
            with _leading(request, "begin") as led:
                yield led
            return
        try:
            yield Lead(self._work_of(request.token))
        except Exception as error:  # reported at `written`, then raised
            self._problem = error

    def _work_of(self, token: str) -> tuple[str, str]:
        """Returns path and mark of the `Work` of an attempt."""
        return commit_of(self.request.storage, self.request.path).work(token)[:2]

    def _write(self, work: Work) -> None:
        request = self.request
        if self._problem is None and not self.is_cancelled:
            try:
                with self._meter.phase("copy"):
                    for item in request.items:
                        item.arrive()
                    if request.replicas is not None:
                        request.replicas.compare()
                with self._meter.phase("write"), _explaining(request):
                    for item in request.items:
                        item.write(request.storage, work, request.group)
                        if not request.group.leads:
                            self._leave_part(item, work)
            except Exception as error:  # reported at `written`, then raised
                self._problem = error

    def _landed(self, size_bytes: int) -> None:
        self.request.pace(size_bytes)
        self._meter.landed(size_bytes)

    def _leave_part(self, item: SaveItem, work: Work) -> None:
        """Writes a file with the facts about this process's share, for process 0."""
        request, index = self.request, self.request.processes.index
        if (part := item.part()) is None:
            return
        folder = work.folder(item.name)
        request.storage.make_dir(folder)
        request.storage.write(f"{folder}/{names.part(index, work.mark)}", part)
        self._parts.append(item.name)

    def _meet(self) -> list[list[str]]:
        """Waits until all have written; process 0 learns for which items each left a part."""
        request = self.request
        report = {
            "seconds": self._meter.phases.get("write", 0.0),
            "path": request.group.common(request.path),
            "token": request.token,
            "items": {item.name: item.said() for item in request.items},
            "parts": self._parts,
            "replicas": request.replicas and request.replicas.said(),
            "metadata": _told_metadata(request),
        }
        written: list[Any] = []  # in process 0

        def judge(reports: list[Any]) -> Json:
            written[:] = [one["parts"] for one in reports]  # it may judge more than once
            differences = first_of(_differences(request.items, reports))
            replicas = request.replicas and request.replicas.judge([r["replicas"] for r in reports])
            told = {name: said.get("told") for name, said in reports[0]["items"].items()}
            verdict = {"slowest": slowest_of(reports), "replicas": replicas, "files": told}
            return {**differences, **verdict, "metadata": reports[0]["metadata"]}

        name, mark = meeting_of(request.name), _SKIPS if request.skips else ""
        self._meter.missing = partial(request.processes.missing, name)
        where = f"saving {request.path}"
        met = meet(request.processes, name, report, self._problem, judge, mark=mark, where=where)
        self.skipped = bool(met.marks) and set(met.marks.values()) == {_SKIPS}
        met.check(self._problem, f"{request.path} was not saved", _HINT)
        raise_if_any(met.verdict, f"{request.path} was not saved", _HINT)
        request.items[:] = [one for one in request.items if one.name in met.verdict["files"]]
        for item in request.items:
            item.hear(met.verdict["files"][item.name])
        if (told := met.verdict["metadata"]) is not None:
            self.request = replace(request, custom_metadata=told)
        self._meter.slowest = met.verdict["slowest"]
        if request.replicas is not None:
            request.replicas.settle(met.verdict["replicas"], f"{request.name}/replicas")
        return written


@contextlib.contextmanager
def _explaining(request: SaveRequest) -> Iterator[None]:
    """Prefers the fence's error: files may be missing because another job took the run over."""
    try:
        yield
    except Exception as error:
        if request.fence is not None and request.group.leads:
            with contextlib.suppress(OSError):  # no better explanation
                try:
                    request.fence()
                except SaveFailed as fenced:
                    raise fenced from error
        raise


def _leading(request: SaveRequest, what: str) -> AbstractContextManager[Lead]:
    name, where = f"{request.name}/{what}", f"{request.path} was not saved"
    return request.group.leading(name, where=where)


def _told_metadata(request: SaveRequest) -> Json:
    """Returns the metadata that counts on all disks, if this is process 0 and it is small."""
    if request.group.part is None or request.processes.index or request.problem is not None:
        return None
    told = dict(request.custom_metadata)
    return told if len(jsontext.dumps(told, allow_nan=True)) <= MOST_TOLD_BYTES else None


def _differences(items: list[SaveItem], reports: list[Any]) -> dict[int, str]:
    """Returns in which processes the save differs from process 0's, and how."""
    said = [[(name, one["item"]) for name, one in r["items"].items()] for r in reports]
    kinds = [[kind for kind in some if kind != _METRICS] for some in said]
    failures = {}
    for i, one in enumerate(reports):
        if one["path"] != reports[0]["path"]:
            failures[i] = f"saves to a different path than process 0: {one['path']}"
        elif one["token"] != reports[0]["token"]:
            failures[i] = "made another number of attempts to save this step than process 0"
        elif kinds[i] != [x for x in kinds[0] if x[1] != "common" or x in kinds[i]]:
            mine, first = (", ".join(dict(kinds[n])) or "item=None" for n in (i, 0))
            failures[i] = f"saves different items than process 0: {mine}, not {first}"
    for item in items if not failures else ():
        for i, why in item.disagreement([one["items"].get(item.name) for one in reports]).items():
            failures.setdefault(i, why if len(items) == 1 else f"{item.name} {why}")
    return failures


def _describe(
    request: SaveRequest, work: Work, written: list[list[str]]
) -> tuple[dict[str, bytes], dict[str, FileFacts]]:
    """Completes the items; returns the metadata files, and facts about others' files."""
    files, known = {}, {}
    for item in request.items:
        parts = _take_parts(request, work, item.name, written) if written else {}
        added, there = item.finish(request.storage, work, request.processes, parts)
        # Orbax looks for it in each item of a step, and of anything on gs://.
        if request.is_step or (item.name and work.mark):
            marker = f"Checkpoint commit was successful to {step.as_text(request.path)}".encode()
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
    if not request.is_step and request.item:
        files[names.ORBAX_MARKER] = b""
    return files, known


def _take_parts(
    request: SaveRequest, work: Work, name: str, written: list[list[str]]
) -> dict[int, bytes]:
    """Reads and removes the parts of an item that the other processes left for process 0."""
    storage, folder = request.storage, work.folder(name)
    writers = [i for i, parts in enumerate(written) if name in parts]
    if not writers:
        return {}
    files = {i: f"{folder}/{names.part(i, work.mark)}" for i in writers}
    try:
        reads = [partial(storage.read, file, max_bytes=_MAX_PART_BYTES) for file in files.values()]
        parts = dict(zip(files, together(storage, reads), strict=True))
    except FileNotFoundError as error:
        raise _transaction.unseen(request.path, str(error.filename)) from error
    storage.delete_files([*files.values()])
    return parts
