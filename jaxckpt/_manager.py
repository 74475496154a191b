"""`CheckpointManager`: the checkpoints of a run, from the training loop's side.

caller    decide, by rules that every process applies alike        _schedule
caller    bring the values to the host                             _snapshot
          ------- save returns; training goes on -------
thread    write, meet, commit                                      _job
thread    delete what the policy does not keep                     _retention, _run
"""

from __future__ import annotations

import hashlib
import operator
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, ClassVar, Final, Literal, Self, final

from jaxckpt import _discovery, _items, _resume, inspection
from jaxckpt._job import SaveJob, text_of
from jaxckpt._pace import Pace
from jaxckpt._preemption import Preemption
from jaxckpt._queue import Pending, SaveQueue
from jaxckpt._resume import Resume
from jaxckpt._retention import KeepPolicy, StepInfo
from jaxckpt._run import Run
from jaxckpt._save import SaveHandle, check_metadata
from jaxckpt._schedule import Decision, SavePolicy, check_count, check_seconds
from jaxckpt._snapshot import Item, take_tree
from jaxckpt.errors import CheckpointNotFound, StepExists
from jaxckpt.format import names
from jaxckpt.format.run import MAX_STEP, StepNames
from jaxckpt.multihost import Json, current, lead
from jaxckpt.storage import locate

_PREEMPTION: Final = "preemption"


@final
class CheckpointManager:
    """The checkpoints of a training run: when to save, what to keep, where to go on.

    In a job of several processes all of them make the same calls in the same order. Every method
    first raises what went wrong in the background since the last one, once.

    Attributes:
        directory: The root of the run.
        restored_step: The step that was last restored, or None.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, jaxckpt
        >>> folder = tempfile.TemporaryDirectory()
        >>> init = jax.jit(lambda: {"w": jnp.zeros(3)})
        >>> with jaxckpt.CheckpointManager(
        ...     f"{folder.name}/run",
        ...     save=jaxckpt.SavePolicy(every_steps=2),
        ...     keep=jaxckpt.KeepPolicy(last=2),
        ... ) as manager:
        ...     state, start = manager.restore_or(init)
        ...     for step in range(start, 10):
        ...         state = jax.tree.map(lambda x: x + 1, state)
        ...         _ = manager.save(step + 1, state)
        >>> with jaxckpt.CheckpointManager(f"{folder.name}/run") as manager:
        ...     print(manager.all_steps(), manager.restore_or(init)[1])
        [8, 10] 10
        >>> folder.cleanup()
    """

    _open: ClassVar[dict[tuple[str, str, int], CheckpointManager]] = {}
    _open_lock = threading.Lock()  # guards _open

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save: SavePolicy = SavePolicy(),  # noqa: B008  # frozen
        keep: KeepPolicy = KeepPolicy(),  # noqa: B008
        mode: Literal["w", "r"] = "w",
        budget_bytes: int = 1 << 30,
        timeout_s: float = 1200.0,
        step_prefix: str | None = None,
        step_digits: int | None = None,
    ) -> None:
        """Opens a run; reads no checkpoint.

        Args:
            directory: The root; made if it is not there. What others keep in it is left alone.
            save: When `save` saves.
            keep: What stays after a save.
            mode: "w": to save, in one job at a time. A job that opens the run takes it over from
                one before that is dead; a job that lives loses it with the first save of this one.
                "r": to read, for any number of jobs; nothing is written but leases.
            budget_bytes: How much of the values of earlier saves may be in memory when the next
                begins. A save alone may take more.
            timeout_s: For every wait for another process, or for an earlier save.
            step_prefix, step_digits: The directory of a step is `[<prefix>_]<step>`, padded with
                zeros; None: as the steps that are there are called.

        Raises:
            NotADirectoryError, PermissionError: the root cannot be one.
        """
        if mode not in ("w", "r"):
            raise ValueError(f"mode must be 'w' or 'r', not {mode!r}")
        if not isinstance(save, SavePolicy) or not isinstance(keep, KeepPolicy):
            raise TypeError("save must be a SavePolicy and keep a KeepPolicy")
        self.budget_bytes, self.timeout_s = budget_bytes, timeout_s
        self.step_digits = step_digits
        check_count(self, "budget_bytes")
        check_count(self, "step_digits")
        check_seconds(self, "timeout_s")
        storage, root = locate(directory)
        naming = None
        if step_prefix is not None or step_digits is not None:
            naming = StepNames(prefix=step_prefix, digits=step_digits)
        self.directory, self.mode, self.keep = root, mode, keep
        self.restored_step: int | None = None
        self._processes = current()
        self._run = Run(storage=storage, root=root, naming=naming)
        self._pace = Pace(save, self._processes)
        self._saves = SaveQueue(root, self._after_save)
        self._resume = Resume(
            run=self._run,
            processes=self._processes,
            keep=keep,
            timeout_s=timeout_s,
            writes=mode == "w",
        )
        self._started = 0  # saves
        self._latest: Pending | None = None
        self._for_preemption: Pending | None = None
        self._floor: int | None = None  # the newest committed step that is known here
        self._closed = False
        self._session = ""  # what the names of attempts are made of
        if mode == "w":
            self._close_earlier()
            self._open_run()
        else:
            self._run.check_root()
        self._preemption = Preemption(self._processes, listens=mode == "w" and save.on_preemption)

    def _close_earlier(self) -> None:
        """In one process a run has one writing manager; the one before ends when its saves do."""
        with CheckpointManager._open_lock:
            earlier = CheckpointManager._open.get(self._key)
            CheckpointManager._open[self._key] = self
        if earlier is not None:
            earlier._shut(self.timeout_s)

    @property
    def _key(self) -> tuple[str, str, int]:
        return self._run.storage.scheme, self.directory, self._processes.index

    def _open_run(self) -> None:
        def open_run() -> Json:
            self._run.open_for_writing()
            self._run.note_strays()
            return {"session": secrets.token_hex(8), "newest": self._run.newest()}

        try:
            opened = self._lead("open", open_run)
        except BaseException:
            self._closed = True  # the next manager of this run has nothing to wait for
            self._run.close()
            raise
        self._session, self._floor = opened["session"], opened["newest"]

    def _lead(self, what: str, do: Callable[[], Json]) -> Any:  # JSON
        """Has process 0 do something; every process returns or raises."""
        return lead(
            self._processes,
            f"manager {self.directory}/{what}",
            do,
            place=self.directory,
            timeout_s=self.timeout_s,
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | Any, **overrides: Any) -> Self:
        """Opens a run as a dict or an `ml_collections.ConfigDict` says.

        Args:
            config: The arguments of `CheckpointManager` by name; `save` and `keep` are dicts of the
                fields of `SavePolicy` and `KeepPolicy`. `save` may have `auto`, a dict of the
                arguments of `SavePolicy.auto`.
            overrides: Arguments that go before those of `config`.

        Raises:
            TypeError: a name is none of theirs; the likely one is suggested.

        Example:
            >>> import jaxckpt
            >>> jaxckpt.CheckpointManager.from_config({"directory": "runs/a", "keep": {"lats": 3}})
            Traceback (most recent call last):
            TypeError: keep has no field 'lats'. Did you mean 'last'?
        """
        from jaxckpt._config import manager_arguments

        return cls(**manager_arguments(config, overrides))

    # --- saving ----------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether `save` would save at this step. Asking changes nothing."""
        self._begin_call()
        return self._decide(_as_int(step)).save

    @property
    def decision(self) -> Decision | None:
        """Whether the step last asked about was saved, and why or why not."""
        return self._pace.decision

    def save(
        self,
        step: int,
        state: object,
        *,
        items: Mapping[str, object] | None = None,
        metrics: Mapping[str, Any] | None = None,
        force: bool = False,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> SaveHandle | None:
        """Saves a step if it is due, in the background.

        When it returns, `state` and `items` may be donated, deleted or changed.

        Args:
            step: Higher than any that the run has.
            state: Any pytree; see `jaxckpt.save`.
            items: More to save, by name: pytrees, JSON, bytes, or objects with `get_state` and
                `set_state`, or `state_dict` and `load_state_dict`, such as data iterators. Of
                those each process stores its own; JSON is that of process 0.
            metrics: Numbers, also ones that a device still computes. One policy may rank by them.
            force: Saves whatever the policy says.
            custom_metadata: JSON to keep with the step.

        Returns:
            A handle, or None if the step is not due; `decision` says why.

        Raises:
            StepExists: the run has this step.
            ValueError: the run has later ones.
            UnsupportedLeaf: something cannot be stored; nothing was written.
            CheckpointTimeout: earlier saves take more than `timeout_s` to make room in memory.
        """
        entered_s = time.monotonic()
        self._check_writes()
        step = _as_int(step)
        decision = self._decide(step, force=force)
        errors = self._saves.take_errors()
        if not decision.save:
            _raise_first(errors)
            return None
        problem, held, metadata, found = None, [], {}, {}
        try:
            # Another process may not know of these yet, and saves: it must not wait for this one.
            _raise_first(errors)
            self._check_step(step)
            metadata = check_metadata(custom_metadata)
            held = self._take(state, items, metrics, step, found)
        except Exception as error:  # told to the others, then raised
            if self._processes.count == 1:
                raise
            problem = error
        pending = self._start(step, entered_s, held, metadata, found, problem, skips=bool(errors))
        if decision.reason == _PREEMPTION:
            self._for_preemption = pending
        if problem is not None:
            raise problem
        return pending.handle

    def _start(
        self,
        step: int,
        entered_s: float,
        held: list[Item],
        metadata: Mapping[str, Any],
        metrics: dict[str, Any],
        problem: Exception | None,
        *,
        skips: bool,
    ) -> Pending:
        """Hands a save to the thread; all processes keep the same account of it."""
        told = None
        if self._pace.needs_told and self._latest is not None:
            # All must add up the same numbers, so wait where that save is still under way.
            self._saves.wait([self._latest], self.timeout_s)
            told = self._latest.job.told
        tell = self._pace.saving(step, entered_s=entered_s, told=told)
        name = f"manager {self._session}/{self._started}"
        self._started += 1
        job = SaveJob(
            storage=self._run.storage,
            path=self._run.path(step),
            items=held,
            processes=self._processes,
            name=name,
            custom_metadata=metadata,
            is_step=True,
            token=hashlib.sha256(name.encode()).hexdigest()[:16],
            fence=self._run.fence,
            tell=tell,
            problem=problem,
            skips=skips,
            timeout_s=self.timeout_s,
        )
        self._latest = Pending(
            step=step,
            job=job,
            handle=SaveHandle(job),
            metrics=metrics,
            size_bytes=job.size_bytes,
            started_s=entered_s,
        )
        self._saves.put(self._latest)
        return self._latest

    def _decide(self, step: int, *, force: bool = False) -> Decision:
        if not 0 <= step <= MAX_STEP:
            raise ValueError(f"a step is from 0 to {MAX_STEP}, not {step}")
        if self._preemption.reached(step) and not self._is_saved_for_preemption():
            return self._pace.must(step, _PREEMPTION)
        if force:
            return self._pace.must(step, "force")
        return self._pace.decide(step, busy=bool(self._saves.under_way()))

    def _is_saved_for_preemption(self) -> bool:
        """Whether it is; one that failed is tried again, by all processes or by none."""
        pending = self._for_preemption
        if pending is None:
            return False
        self._saves.wait([pending], self.timeout_s)
        return pending.committed

    def _check_step(self, step: int) -> None:
        newest = [p.step for p in self._saves.under_way() if not p.refused]
        floor = max([*newest, -1 if self._floor is None else self._floor])
        if step > floor:
            return
        path = self._run.path(step)
        if step == floor or step in self._run.numbers():
            raise StepExists(f"{path} is saved already, or being saved; it stays as it is")
        raise ValueError(
            f"step {step} comes after step {floor}, the newest of {self.directory}. To go on "
            f"from an earlier step, delete the later ones (manager.delete) or start a new run from "
            "it (jaxckpt.fork)."
        )

    def _take(
        self,
        state: object,
        items: Mapping[str, object] | None,
        metrics: Mapping[str, Any] | None,
        step: int,
        found: dict[str, Any],
    ) -> list[Item]:
        """Brings everything to the host, when there is room for it."""
        items = dict(items or {})
        _items.check_names(items)
        expected = self._latest.size_bytes if self._latest is not None else 0
        self._saves.wait_for_room(expected, self.budget_bytes, self.timeout_s)
        processes = self._processes
        held: list[Item] = [take_tree(names.STATE_ITEM, state, processes, copy=True)]
        held += [_items.take_item(name, value, processes) for name, value in items.items()]
        if metrics is not None:
            wanted = self.keep.metric
            if wanted is not None and wanted not in metrics:
                self._run.report(
                    f"step {step} has no metric {wanted!r}, which KeepPolicy ranks by; it has "
                    f"{', '.join(metrics) or 'none'}"
                )
            held.append(_items.take_metrics(metrics, found.update))
        return held

    # --- in the background -----------------------------------------------------------------------

    def _after_save(self, pending: Pending) -> None:
        """Runs in the thread, after a commit."""
        self._floor = pending.step
        self._pace.saved(time.monotonic() - pending.started_s)
        if self._processes.index == 0:  # the others do not know the metrics that it wrote
            info = StepInfo(step=pending.step, saved_s=time.time(), metrics=pending.metrics)
            self._run.remember(info)
            self._delete_what_goes()

    def _delete_what_goes(self) -> None:
        if self.keep.has_rules:
            steps = self._run.steps()
            kept = self.keep.kept(map(self._info, steps), now_s=time.time())
            self._run.delete(step for step in steps if step not in kept)

    def _info(self, step: int) -> StepInfo:
        """What the policy looks at; of what is not in memory, only if it does look."""
        if self.keep.needs_facts:
            return self._run.info(step)
        return StepInfo(step=step, saved_s=0.0)

    def _begin_call(self) -> None:
        if self._closed:
            raise ValueError(f"the manager of {self.directory} is closed")
        _raise_first(self._saves.take_errors())

    def _check_writes(self) -> None:
        if self._closed:
            raise ValueError(f"the manager of {self.directory} is closed")
        if self.mode == "r":
            raise ValueError(f"the manager of {self.directory} was opened with mode='r'")

    def wait_until_finished(self, timeout_s: float | None = None) -> None:
        """Waits until every save has ended, and what the policy does not keep is deleted.

        Raises:
            CheckpointTimeout: they have not after `timeout_s`, or else the manager's.
            Whatever a save of them, or one before, failed with.
        """
        pending = self._saves.under_way()
        self._saves.wait(pending, self.timeout_s if timeout_s is None else timeout_s)
        _raise_first(self._saves.take_errors())

    def close(self) -> None:
        """Waits for the saves under way, and lets go of the run.

        Raises:
            Whatever a save failed with that nobody was told of.
        """
        if not self._closed:
            self._shut(self.timeout_s)
            _raise_first(self._saves.take_errors())

    def _shut(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._saves.stop(timeout_s)
        finally:
            self._preemption.close()
            self._run.close()
            with CheckpointManager._open_lock:
                if CheckpointManager._open.get(self._key) is self:
                    del CheckpointManager._open[self._key]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"and on closing {self.directory}: {text_of(failed)}")

    # --- resuming --------------------------------------------------------------------------------

    def restore(
        self,
        like: Any = None,  # any pytree
        *,
        step: int | Literal["latest", "best"] = "latest",
        items: Mapping[str, object] | None = None,
        fallback: bool = True,
        **options: Any,
    ) -> Any:  # any pytree
        """Restores the state of a step, and `items` in place.

        Args:
            like: What is wanted; see `jaxckpt.restore`.
            step: A number, "latest", or "best" by the metric of `keep`.
            items: Objects that take their state, as given to `save`. They are changed only when
                everything has been read.
            fallback: Whether to take the step before (or the next best) when one is damaged. That
                one is reported in `problems`, and, if jaxckpt wrote it and this manager may write,
                set aside. A step that was asked for by its number has no other.
            options: Further arguments of `jaxckpt.restore`: `mesh`, `shardings`, `dtype`, ...

        Raises:
            CheckpointNotFound: there is no such step, or none that is whole.
            CorruptCheckpoint: it is damaged, and there is no fallback.
            TreeMismatch: `like`, or an item, does not fit.
        """
        self._begin_call()
        steps = self._resume.candidates(step)
        return self._restore(steps, like, items, fallback and isinstance(step, str), options)

    def restore_or(
        self,
        init: Callable[[], Any],
        *,
        items: Mapping[str, object] | None = None,
        fallback: bool = True,
        **options: Any,
    ) -> tuple[Any, int]:
        """Restores the newest whole step, or starts with `init()` where there is none yet.

        Args:
            init: Makes the first state. Where there is a step, it is only traced for the shapes,
                and for the shardings if it is jitted with `out_shardings`.
            items, fallback, options: As in `restore`.

        Returns:
            The state and its step; 0 for one that `init` made.

        Raises:
            CheckpointNotFound: there are steps, but none that is whole.
        """
        self._begin_call()
        if not callable(init):
            raise TypeError(f"init must be a function that makes the first state, not {init!r}")
        steps = self._resume.candidates("latest")
        if not steps:
            return init(), 0
        state = self._restore(steps, _resume.shapes_of(init), items, fallback, options)
        assert self.restored_step is not None  # it was restored
        return state, self.restored_step

    def restore_items(
        self, step: int | Literal["latest", "best"] = "latest", *, fallback: bool = True
    ) -> dict[str, Any]:
        """Every item of a step by name, `state` and `metrics` among them.

        Trees and JSON are as they were saved; of an object with a state, such as a data iterator,
        there is a list: the states of all processes.
        """
        self._begin_call()
        steps = self._resume.candidates(step)
        _check_any(steps, self.directory)
        self.restored_step, found = self._resume.items(
            steps, fallback=fallback and isinstance(step, str)
        )
        return found

    def _restore(
        self,
        steps: list[int],
        like: Any,  # any pytree
        items: Mapping[str, object] | None,
        fallback: bool,
        options: Mapping[str, Any],
    ) -> Any:  # any pytree
        _check_any(steps, self.directory)
        start_s = time.monotonic()
        number, state = self._resume.state(
            steps, like, dict(items or {}), options, fallback=fallback
        )
        self.restored_step = number
        self._pace.restored(time.monotonic() - start_s)
        if self.mode == "w" and number != steps[0]:
            self._floor = self._lead("newest", self._run.newest)  # less what was set aside
        return state

    # --- what there is ---------------------------------------------------------------------------

    def all_steps(self) -> list[int]:
        """The committed steps, in order. Looks into the directory of each; reads no file."""
        self._begin_call()
        return self._run.steps()

    def latest_step(self) -> int | None:
        """The newest step that is whole as far as its metadata tell, or None."""
        self._begin_call()
        return next((n for n in reversed(self._run.steps()) if self._run.is_whole(n)), None)

    def best_step(self) -> int | None:
        """The step with the best `metric` of `keep`, or None if no step has it."""
        self._begin_call()
        return next(
            (info.step for info in self._resume.ranked() if self._run.is_whole(info.step)), None
        )

    def metrics(self, step: int) -> dict[str, Any]:
        """The metrics of a step; empty if it has none."""
        self._begin_call()
        self._run.check_step(step)
        return dict(self._run.info(step).metrics)

    def metadata(self, step: int) -> inspection.Checkpoint:
        """What a step holds: `jaxckpt.open` of it."""
        self._begin_call()
        return inspection.open(self._url(self._run.check_step(step)))

    def custom_metadata(self, step: int) -> dict[str, Any]:
        """What was given to `save` as such."""
        self._begin_call()
        found = _discovery.find(self._run.storage, self._run.check_step(step))
        return dict(found.step.custom_metadata or {})

    def _url(self, path: str) -> str:
        scheme = self._run.storage.scheme
        return path if scheme == "file" else f"{scheme}:/{path}"

    @property
    def problems(self) -> list[str]:
        """All that was skipped, left alone, set aside or could not be deleted, in words."""
        return list(self._run.problems)

    # --- keeping and deleting by hand ------------------------------------------------------------

    def pin(self, step: int) -> None:
        """Keeps a step, whatever the policy says, until it is unpinned."""
        self._begin_call()
        self._check_writes()
        self._lead("pin", lambda: self._run.pin(step))

    def unpin(self, step: int) -> None:
        """Leaves a step to the policy again."""
        self._begin_call()
        self._check_writes()
        self._lead("unpin", lambda: self._run.unpin(step))

    def delete(self, step: int) -> None:
        """Deletes a step now. One that is pinned, or that a reader holds, is refused.

        Raises:
            ValueError: it is pinned, or being read.
        """
        self._begin_call()
        self._check_writes()
        self.wait_until_finished()

        def delete() -> Json:
            path = self._run.check_step(step)
            if self._run.is_pinned(step):
                raise ValueError(f"{path} is pinned; unpin it first")
            self._run.fence()
            if step not in self._run.delete([step], asked_for=True):
                raise ValueError(f"{path} was not deleted: {self._run.why_not(step)}")
            return self._run.newest()

        self._floor = self._lead("delete", delete)

    # --- preemption and readers ------------------------------------------------------------------

    def reached_preemption(self, step: int) -> bool:
        """Whether the job is being stopped, and this step, or one before it, was to be the last.

        Ask after `save(step)`, which has saved it then; all processes get the same answer.
        """
        self._begin_call()
        return self._preemption.reached(step)

    def watch(self, timeout_s: float, *, after: int | None = None) -> Iterator[int]:
        """New committed steps as they come, in order: for an evaluator in another process.

        While the loop is at a step, that one is not deleted (for at most an hour). Steps that come
        and go in the meantime are left out.

        Args:
            timeout_s: Ends when no new step has come for so long.
            after: Begins after this step; None: with the newest that there is.

        Example:
            >>> import tempfile, jaxckpt
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     with jaxckpt.CheckpointManager(folder) as manager:
            ...         for step in (1, 2):
            ...             _ = manager.save(step, {"w": step})
            ...     with jaxckpt.CheckpointManager(folder, mode="r") as reader:
            ...         for step in reader.watch(timeout_s=0.1, after=0):
            ...             print(step, reader.restore(step=step))
            1 {'w': 1}
            2 {'w': 2}
        """
        self._begin_call()
        return self._run.watch(timeout_s, after)

    def __repr__(self) -> str:
        return f"<CheckpointManager {self.directory!r}, mode {self.mode!r}>"


def _check_any(steps: list[int], root: str) -> None:
    if not steps:
        raise CheckpointNotFound(f"{root} has no committed step to restore")


def _raise_first(errors: list[BaseException]) -> None:
    if errors:
        first, *others = errors
        for other in others:
            first.add_note(f"and then: {text_of(other)}")
        raise first


def _as_int(step: Any) -> int:
    """A step that may be an array of one."""
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"a step is an int, not {step!r}") from None
