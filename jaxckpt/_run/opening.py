"""Decides which manager of this process may write to a run: the one that opened it last."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Final, final

from jaxckpt._disk.by_marker import remove_writer
from jaxckpt._run.deletion import Deletion, check_folder
from jaxckpt._run.facts import write_run_metadata
from jaxckpt._run.index import StepIndex
from jaxckpt._run.owner import Ownership
from jaxckpt._run.reach import Reach
from jaxckpt._save.worker import Worker
from jaxckpt.errors import CorruptCheckpoint, SaveFailed, is_full
from jaxckpt.format import names
from jaxckpt.format.run import StepNames
from jaxckpt.multihost import Group

FORKED: Final = (
    "this process was forked from the one that saves. Save and wait there, or start this one with "
    "'spawn'"
)


@final
class Opening:
    """One opening of a run by a manager; the next one for writing in this process ends it."""

    def __init__(self, owner: Ownership, deletion: Deletion, group: Group) -> None:
        self.ended = ""  # why, once it has
        self._saves: Worker[Any] | None = None  # None until the run is open
        self._is_over = False  # once nothing is waited for any more
        self._owner = owner
        self._deletion = deletion
        self._index = deletion.index
        self._group = group
        self._key = self._index.root, group.mates.index
        self._ending = threading.RLock()  # held while it ends; a signal handler may end it too
        self._reach: Reach | None = None  # of a root that the job can do without
        self._beginning = threading.Lock()  # held while a thread opens the run

    def open(
        self,
        metadata: Mapping[str, Any] | None,
        *,
        saves: Worker[Any] | None,
        run: str | None = None,
        spared: int = -1,
        reach: Reach | None = None,
    ) -> Any:  # JSON
        """Opens the run for writing in the leader; returns its newest step to the group.

        First ends this process's earlier opening for writing, after its saves.

        Args:
            saves: What writes there, which the end of the opening waits for and stops.
            reach: Given if the job can do without the root. If it cannot be used, the result has
                the reason as "away"; the first upload that gets through opens the run.
        """
        self._reach, self._take = reach, partial(self._owner.open, run, spared)
        with _open_lock:
            earlier, _open[self._key] = _open.get(self._key), self
        if earlier is not None:
            try:
                earlier.end("another manager of this process has opened the run. Use that one")
            except BaseException as error:
                if isinstance(error, Exception | KeyboardInterrupt | SystemExit):
                    raise  # else its storage only simulates a process, which is dead
        index, group, where = self._index, self._group, self._group.common(self._index.root)
        try:
            with group.leading(f"manager {where}/open", where=where) as led:
                if group.leads:
                    begin = self._begin if reach is None else partial(self._begin_or_go_on, reach)
                    led.value = {"session": secrets.token_hex(8), **begin(metadata)}
        except BaseException:
            self.fail()
            raise
        opened, self._saves = led.value, saves
        index.has_lock |= opened.get("has_lock", False)
        if opened["naming"] is not None:
            index.naming = StepNames(**opened["naming"])
        return opened

    def fail(self) -> None:
        """Releases a run that cannot be used, so that the next manager need not wait."""
        self.ended, self._is_over = "it could not open the run", True
        self._owner.lock.release()

    def _begin_or_go_on(self, reach: Reach, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
        try:
            return reach.ask(partial(self._begin, metadata))
        except CorruptCheckpoint:
            raise
        except OSError as error:
            if not reach.away:  # else the call goes on in the background
                self._owner.lock.release()
            self._owner.doubt()
            away = {"away": str(error), "silent": bool(reach.away)}
            return {"newest": -1, "naming": None, **away}

    def _begin(self, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
        index = self._index
        with self._beginning:
            listing = self._take()
        if self._is_over:  # by another manager, or while the root did not answer
            self._owner.lock.release()
            raise SaveFailed(f"{index.root}: {self.ended}")
        index.note_strays(
            listing, besides=[self._deletion.move_to, *self._owner.leftovers.spared_work]
        )
        try:
            if (folder := self._deletion.folder) is not None:
                check_folder(index, folder)
            if metadata:
                write_run_metadata(index, metadata)
        except OSError as error:
            if not is_full(error):
                raise
            # Steps can be restored and deleted there.
            index.report(f"{index.root} is opened, though the disk is full: {error}")
        if (newest := index.newest(listing)) is not None:
            _finish_commit(index, newest)
        return {
            "newest": -1 if newest is None else newest,
            "naming": index.naming and asdict(index.naming),
            "owned": not self._owner.is_guest,
            "has_lock": index.has_lock,
            "run": self._owner.run,
        }

    def open_late(self, timeout_s: float) -> None:
        """Opens a run that was away when the job began, unless that was done meanwhile."""
        if not self._beginning.acquire(timeout=timeout_s):
            raise TimeoutError(f"{self._index.root} has not answered for {timeout_s:g} s")
        try:
            if not self._owner.token and not self._is_over:
                self._take()
            if self._is_over:  # while the root did not answer
                self._owner.lock.release()
                raise SaveFailed(f"{self._index.root}: {self.ended}")
        finally:
            self._beginning.release()

    def end(self, why: str) -> None:
        """Waits for the saves under way and releases the run, unless that was done before."""
        if not self._ending.acquire(blocking=False):
            if self._saves is not None and self._saves.is_own_thread():
                return  # the thread that ends it waits for us
            self._ending.acquire()
        try:
            if self.ended:
                return
            if self._saves is not None:
                self._saves.refuse_own_thread()
            self.ended = why
            try:
                if self._saves is not None:
                    self._saves.stop()
            finally:
                self._is_over = True  # the uploads that it waited for may have opened the root
                if self._reach is None:
                    self._owner.lock.release()
                else:
                    self._reach.leave(self._owner.lock.release)
                with _open_lock:
                    if _open.get(self._key) is self:
                        del _open[self._key]
        finally:
            self._ending.release()


def _finish_commit(index: StepIndex, step: int) -> None:
    """Removes the writer's file from the newest step, if this job owns the run."""
    if not (index.owned and index.has(step, names.WRITER)):
        return
    try:
        remove_writer(index.storage, index.path(step))
    except OSError as error:
        index.report(f"{index.path(step)}/{names.WRITER} cannot be removed: {error}")


_open: dict[tuple[str, int], Opening] = {}  # managers open for writing
_open_lock = threading.Lock()  # guards _open


def _end_in_child() -> None:
    # A forked child lacks the saving threads, and the run stays the parent's.
    for opening in _open.values():
        opening.ended, opening._is_over = FORKED, True
    _open.clear()


os.register_at_fork(after_in_child=_end_in_child)
