"""A run, as both managers of Orbax see it.

They decide as Orbax's do, and save through `jaxckpt.CheckpointManager`, which they open when they
first have to decide or to write, so that any number of them may read a run. While it is open for
writing, files in the root name its writer and its run. They go at the end, since
programs make numbers of all names there: the root then shows steps and nothing else, as Orbax's.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from etils import epath

from jaxckpt import CheckpointManager, KeepPolicy, SaveHandle
from jaxckpt._run.index import StepIndex
from jaxckpt._run.manager import saver_of
from jaxckpt._save.save import prepare, start
from jaxckpt._save.snapshot import Items
from jaxckpt.errors import CheckpointNotFound, UnsupportedFormat
from jaxckpt.format import names
from jaxckpt.format.run import StepNames
from jaxckpt.multihost import current, lead, raise_first
from jaxckpt.orbax import _handling, policies
from jaxckpt.orbax.checkpointers import Closing
from jaxckpt.orbax.options import AsyncOptions
from jaxckpt.orbax.step import index_of, names_of
from jaxckpt.storage import locate
from jaxckpt.types import StepInfo


class Steps:
    """The steps of a run, listed at the opening, and then counted, as by Orbax."""

    def __init__(self, index: StepIndex, numbers: list[int]) -> None:
        self._index = index
        self._facts: dict[int, StepInfo] = {}
        self.numbers = numbers
        self.saves: list[SaveHandle] = []

    @property
    def newest(self) -> int | None:
        return self.numbers[-1] if self.numbers else None

    def info(self, step: int) -> StepInfo:
        info = self._facts.get(step) or self._index.info(step)
        if step not in self._index.unknown:
            self._facts[step] = info
        return info

    def infos(self) -> list[StepInfo]:
        return [self.info(step) for step in self.numbers]

    def replace(self, numbers: list[int]) -> None:
        """Takes the steps that the directory has now; steps being saved stay."""
        self.saves = [handle for handle in self.saves if not handle.done()]
        saving = {handle.step for handle in self.saves if handle.step is not None}
        self.numbers = sorted({*numbers, *saving})
        self._facts = {step: self._facts[step] for step in saving if step in self._facts}

    def add(self, handle: SaveHandle, step: int, metrics: Any) -> None:
        """Counts a step as saved."""
        self.saves.append(handle)
        handle.on_end(signals.after)
        self.numbers = sorted({*self.numbers, step})
        numbers = {k: v.item() if hasattr(v, "item") else v for k, v in (metrics or {}).items()}
        self._facts[step] = StepInfo(step=step, saved_s=time.time(), metrics=numbers)

    def drop(self, keep: KeepPolicy) -> None:
        """Counts the steps that a new one pushes out as deleted."""
        if keep.has_rules:
            bare = [StepInfo(step=number, saved_s=0.0) for number in self.numbers]
            kept = keep.kept(self.infos() if keep.needs_facts else bare, now_s=time.time())
            self.numbers = [s for s in self.numbers if s in kept or self._is_foreign(s)]

    def _is_foreign(self, step: int) -> bool:
        """Returns whether another program wrote a step, which jaxckpt never deletes by itself."""
        path = f"{self._index.path(step)}/{names.RECORD}"
        saving = step in [handle.step for handle in self.saves]
        return not saving and self._index.storage.kind(path) is None


class Run(Closing):
    """A run, and the manager that saves to it once that is needed."""

    def __init__(self, directory: str | os.PathLike[str], options: Any, **given: Any) -> None:
        """Lists the steps; with `create`, all processes do it together.

        Args:
            options: See `CheckpointManagerOptions`.
            given: Further arguments of `jaxckpt.CheckpointManager`.
        """
        self._directory, self._options, self._given = epath.Path(directory), options, given
        background = options.async_options or AsyncOptions()
        self._called = called = background.post_finalization_callback
        given["on_commit"] = None if called is None else lambda _: called()
        given["timeout_s"] = background.timeout_secs
        # At least one digit: without names, jaxckpt would adopt the names that it finds.
        named = StepNames(prefix=options.step_prefix, digits=options.step_format_fixed_length or 1)
        self._names = names_of(options.step_name_format) or named
        move_to, self._when, self._keeps = options.todelete_subdir, options.saves(), options.keeps()
        self._keep = policies.keep_policy(self._keeps, self._judged, move_to=move_to)
        self._mode = options.file_options.path_permission_mode
        self._index = index_of(directory, self._names)
        self._steps = Steps(self._index, self._look(makes=options.create))
        if not self._steps.numbers and StepIndex(*locate(directory), quiet=True).steps():
            policies.warn_once(
                f"{directory} has steps of other names, which this manager leaves alone, like "
                "Orbax. To see them, pass step_prefix or step_format_fixed_length."
            )
        self._writer: CheckpointManager | None = None

    def _open(self) -> CheckpointManager:
        """Returns the manager that saves; a new one if another took over in this process."""
        writer = self._writer
        if writer is None or saver_of(writer).ended:
            self._raise_errors()
            steps = self._steps.infos, self.is_saving_in_progress, lambda: not self._steps.numbers
            self._writer = writer = CheckpointManager(
                self._index.root,
                save=policies.save_policy(self._when, *steps),
                keep=self._keep,
                **self._given,
                step_prefix=self._names.prefix,
                step_digits=self._names.digits,
            )
            _open[self._index.root] = writer, self._index, self._steps
            saver_of(writer).preemption.ends = signals.ends
        return writer

    @property
    def directory(self) -> epath.Path:  # of the class: programs mock it
        """Returns the root of the run."""
        return self._directory

    # --- the steps ---------------------------------------------------------------------------

    def _judged(self) -> list[StepInfo]:
        """Returns the steps for the saving thread, which may be at work before `Steps.add` is."""
        saves = [] if self._writer is None else saver_of(self._writer).worker.under_way()
        late = {one.step for one in saves if one.step is not None and one.timing is not None}
        return [self._steps.info(step) for step in sorted({*self._steps.numbers, *late})]

    def _look(self, *, makes: bool = False) -> list[int]:
        """Lists the steps: process 0 does it for all where Orbax's processes meet."""
        index, root = self._index, self._index.root

        def look() -> list[int]:
            if makes:
                _handling.make_dir(index.storage, root, self._mode)
            return _without_links(index)

        if not (makes or self._options.single_host_load_and_broadcast):
            return look()
        processes, name = current().within(self._given["timeout_s"]), f"CheckpointManager {root}"
        return lead(processes, name, look, where=root, meets=True)

    def reload(self) -> None:
        """Looks at the directory again."""
        self._steps.replace(self._look())

    def _is_due(self, step: int, *, force: bool = False) -> bool:
        """Returns whether a step is above the newest and due; each call asks the policy."""
        if self._steps.numbers and step <= self._steps.numbers[-1]:
            return False
        saver = saver_of(self._open())
        saver.due.forget()
        return saver.decide(step, force=force).save  # leaves errors to `save`

    def _save(self, step: int, items: Any, metrics: Any, **options: Any) -> SaveHandle | None:
        """Saves a step if it is due; raises the error of an earlier save, and forgets its step."""
        try:
            handle = self._open().save(step, items, metrics=metrics, **options)
        except BaseException:
            self._steps.replace(self._index.steps())
            raise
        if handle is not None:
            self._steps.add(handle, step, metrics)
            policies.check_ranks(self._keeps, self._steps.infos)  # after the step began, like Orbax
            self._steps.drop(self._keep)
        return handle

    def _delete(self, step: int, item: str | None = None) -> None:
        """Deletes a step, or an item of it; FileNotFoundError if it is not there."""
        if step not in self._steps.numbers:  # before a directory is made for a lock
            raise CheckpointNotFound(f"{self.directory} has no step {step}: {self._steps.numbers}")
        self._open().delete(step, item=item)
        self._steps.numbers = [s for s in self._steps.numbers if s != step or item is not None]

    # --- the saves ---------------------------------------------------------------------------

    def is_saving_in_progress(self) -> bool:
        """Returns whether a save is under way."""
        return not all(handle.done() for handle in self._steps.saves)

    def _finish(self) -> None:
        """Waits until all saves have ended and the steps not kept are deleted."""
        if self._writer is not None:
            with self._reloading():
                self._writer.wait_until_finished()

    @contextlib.contextmanager
    def _reloading(self) -> Iterator[None]:
        """Raises errors as Orbax does, and lists the directory again, without failed steps."""
        try:
            with _handling.as_raised():
                yield
        finally:
            self._steps.replace(self._index.steps())

    def _raise_errors(self) -> None:
        """Raises the errors of saves that have ended."""
        errors = [] if self._writer is None else saver_of(self._writer).take_errors()
        if errors:
            with self._reloading():
                raise_first(errors)

    def _wait_for(self, step: int) -> None:
        if any(handle.step == step and not handle.done() for handle in self._steps.saves):
            self._finish()

    def _close(self) -> None:
        """Waits for the saves under way, and gives the run back."""
        with self._reloading():
            if self._writer is not None:
                _close_run(self._writer, self._index)


def save_earlier(
    run: Run, step: int, items: Items, metrics: Any, metadata: Any, *, overwrite: bool = False
) -> SaveHandle:
    """Replaces a step at once, or adds one below the newest, which a manager does not."""
    run._finish()
    saver = saver_of(writer := run._open())
    if not saver.position.is_owned:
        saver.position.join(step)
    items = _handling.with_metrics(items, metrics)
    request = prepare(run._index.path(step), items, overwrite, metadata, copy=True)
    problem = None
    try:
        saver.fence()
        writer.close()  # it knows the step as it was
    except Exception as error:  # raised in every process
        problem = error
    handle = start(replace(request, fence=saver.fence, problem=problem))
    _handling.on_commit(handle, run._called)
    run._steps.add(handle, step, metrics)
    return handle


def _without_links(index: StepIndex) -> list[int]:
    """Lists the steps; refuses a newer link, without which a program would start anew."""
    steps = index.steps()
    if index.storage.scheme == "file":  # a bucket has none, and takes a request for a list
        listing, newest = index.listing(), max(steps, default=-1)
        named = [name for n, name in listing.steps.items() if n > newest]
        if links := [name for name in named if listing.entries[name].kind == "other"]:
            raise UnsupportedFormat(
                f"{index.root}/{links[-1]} is newer than all steps of the run, and a link, which a "
                "run does not follow. Move the step here, or restore the link by a Checkpointer."
            )
    return steps


_open: Final[dict[str, tuple[CheckpointManager, StepIndex, Steps]]] = {}  # by root


@dataclass
class _Signals:
    """Lets SIGTERM and SIGUSR1 end the process, as with Orbax, once no save is under way."""

    asked: bool = False  # by the program, which then ends by itself
    _told: bool = False

    def ends(self, last: SaveHandle | None = None) -> bool:
        """Returns whether a signal ends the process now: no save but the last is under way."""
        self._told = not self.asked
        saves = [one for *_, steps in [*_open.values()] for one in steps.saves]
        return self._told and all(one is last or one.done() for one in saves)

    def after(self, handle: SaveHandle) -> None:
        """Ends the process after the last save, if it was told to end."""
        if self._told and self.ends(handle):
            os.kill(os.getpid(), signal.SIGTERM)


signals: Final = _Signals()


def _close_run(writer: CheckpointManager, index: StepIndex) -> None:
    """Closes a manager, and removes its files if no other one has the run."""
    is_last = not saver_of(writer).ended
    try:
        writer.close()
    finally:
        if _open.get(index.root, (None,))[0] is writer:
            del _open[index.root]
        if is_last and current().index == 0:
            with contextlib.suppress(OSError):  # no locks there, or all of it was deleted
                _remove_files(index, saver_of(writer).owns)


def _remove_files(index: StepIndex, owns: Callable[[], bool]) -> None:
    lock = f"{index.root}/{names.LOCK}"
    if index.storage.kind(lock) is not None and (hold := index.storage.hold(lock)) is not None:
        try:
            if owns():  # no other job has taken the run meanwhile
                # The records of the steps have the id of the run too.
                files, index.has_lock = (names.RUN, names.OWNER, names.LEDGER), False
                index.storage.delete_files([f"{index.root}/{name}" for name in files] + [lock])
        finally:
            hold.release()


@atexit.register
def _close_all() -> None:
    for writer, index, _ in [*_open.values()]:
        saver = saver_of(writer)
        with contextlib.suppress(Exception):  # already reported
            # A save that still waits for processes that are gone would be waited for again.
            if not (saver.ended or saver.worker.under_way()):
                _close_run(writer, index)
