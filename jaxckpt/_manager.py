"""`CheckpointManager`: the checkpoints of a run, from the training loop's side.

caller    decide, by rules that every process applies alike        _schedule
caller    bring the values to the host                             _snapshot
          ------- save returns; training goes on -------
thread    write, meet, commit                                      _job
thread    delete what the policy does not keep                     _retention, _run
"""

from __future__ import annotations

import hashlib
import logging
import operator
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any, ClassVar, Final, Literal, Self, final

from jaxckpt import _discovery, _items, _resume, inspection
from jaxckpt._job import SaveJob, take_part, text_of
from jaxckpt._preemption import Preemption
from jaxckpt._retention import KeepPolicy, StepInfo
from jaxckpt._run import Run
from jaxckpt._save import SaveHandle, check_metadata
from jaxckpt._schedule import Costs, Decision, SavePolicy, Schedule, check_count, check_seconds
from jaxckpt._snapshot import Item, take_tree
from jaxckpt.errors import (
    CheckpointNotFound,
    CheckpointTimeout,
    ProcessesDisagree,
    StepExists,
)
from jaxckpt.format import names
from jaxckpt.format.run import StepNames
from jaxckpt.multihost import current
from jaxckpt.storage import locate

_logger = logging.getLogger("jaxckpt")

_POLL_S: Final = 0.5
_PREEMPTION: Final = "preemption"


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A save that was handed to the thread, or a refusal to take part in one."""

    step: int
    handle: SaveHandle | None
    job: SaveJob | None
    metrics: dict[str, Any] = field(default_factory=dict)
    size_bytes: int = 0
    started_s: float = 0.0
    refuse: Callable[[], None] | None = None
    ended: bool = False


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
        self._name = f"manager {root}"
        self._schedule = Schedule(policy=save, processes=self._processes.count)
        self._costs = Costs()
        self._started_s = time.monotonic()
        self._decision: Decision | None = None
        self._saves = 0
        self._floor: int | None = None  # the newest step, committed or being saved
        self._saved_for_preemption = False
        self._closed = False
        self._changed = threading.Condition()  # guards the two below
        self._under_way: list[_Pending] = []
        self._undelivered: list[SaveHandle] = []
        self._latest: _Pending | None = None
        self._agreed: Costs | None = None
        self._explained = False
        self._queue: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._close_earlier()
        self._session = self._open_run()
        self._preemption = Preemption(self._processes, listens=mode == "w" and save.on_preemption)

    def _close_earlier(self) -> None:
        """In one process a run has one writing manager; the one before ends when its saves do."""
        key = (self._run.storage.scheme, self.directory, self._processes.index)
        if self.mode == "r":
            return
        with CheckpointManager._open_lock:
            earlier = CheckpointManager._open.get(key)
            CheckpointManager._open[key] = self
        if earlier is not None:
            earlier._shut(self.timeout_s)

    def _open_run(self) -> str:
        """Process 0 opens the run for writing; returns what the names of attempts are made of."""
        if self.mode == "r":
            return ""
        problem, said = None, {}
        if self._processes.index == 0:
            try:
                self._run.open_for_writing()
                self._run.note_strays()
                said = {"session": secrets.token_hex(8), "newest": self._run.newest()}
            except Exception as error:  # told to all processes, then raised
                problem = error
        told: Any = self._processes.agree(
            f"{self._name}/open", {**said, "problem": text_of(problem)}, timeout_s=self.timeout_s
        )
        if problem is not None:
            raise problem
        if told["problem"] is not None:
            raise ProcessesDisagree(
                f"{self.directory} cannot be opened: process 0 failed: {told['problem']}",
                {0: told["problem"]},
            )
        self._floor = told["newest"]
        return told["session"]

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
        return self._decision

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
        errors = self._take_undelivered()
        if not decision.save:
            _raise_first(errors)
            return None
        name = f"manager {self._session}/{self._saves}"
        token = hashlib.sha256(name.encode()).hexdigest()[:16]
        self._saves += 1
        found: dict[str, Any] = {}
        try:
            # Another process may not know of these yet: it must not wait for this one.
            _raise_first(errors)
            self._check_step(step)
            metadata = check_metadata(custom_metadata)
            held = self._take(state, items, metrics, step, found)
        except Exception as error:
            self._refuse(name, step, error, skipped=bool(errors))
            raise
        self._note_pace(step, entered_s)
        job = SaveJob(
            storage=self._run.storage,
            path=self._run.path(step),
            items=held,
            processes=self._processes,
            name=name,
            custom_metadata=metadata,
            is_step=True,
            token=token,
            fence=self._run.fence,
            tell=asdict(self._costs),
            timeout_s=self.timeout_s,
        )
        self._floor = step
        self._saved_for_preemption |= decision.reason == _PREEMPTION
        handle = SaveHandle(job)
        self._latest = _Pending(
            step=step,
            handle=handle,
            job=job,
            metrics=found,
            size_bytes=job.size_bytes,
            started_s=entered_s,
        )
        self._enqueue(self._latest)
        return handle

    def _decide(self, step: int, *, force: bool = False) -> Decision:
        if step < 0:
            raise ValueError(f"a step is 0 or more, not {step}")
        last = self._schedule.last_step
        if self._preemption.reached(step) and not self._saved_for_preemption:
            decision = Decision(step=step, save=True, reason=_PREEMPTION)
        elif force:
            decision = Decision(step=step, save=True, reason="force")
        elif self._decision is not None and self._decision.step == step and last != step:
            decision = self._decision  # the clock may have gone on: what was said holds
        else:
            decision = self._schedule.decide(
                step,
                now_s=time.monotonic(),
                started_s=self._started_s,
                costs=self._costs,
                busy=bool(self._under_way),
            )
        self._decision = decision
        return decision

    def _check_step(self, step: int) -> None:
        if self._floor is None or step > self._floor:
            return
        path = self._run.path(step)
        if step == self._floor or step in self._run.numbers():
            raise StepExists(f"{path} is saved already, or being saved; it stays as it is")
        raise ValueError(
            f"step {step} comes after step {self._floor}, the newest of {self.directory}. To go on "
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
        self._wait_for_room()
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

    def _wait_for_room(self) -> None:
        """Waits until the values of earlier saves leave room for as many as the last one took."""
        expected = self._latest.size_bytes if self._latest is not None else 0

        def has_room() -> bool:
            held = sum(pending.size_bytes for pending in self._under_way)
            return held == 0 or held + expected <= self.budget_bytes

        with self._changed:
            if not self._changed.wait_for(has_room, self.timeout_s):
                steps = [pending.step for pending in self._under_way]
                raise CheckpointTimeout(
                    f"{self.directory}: the saves of steps {steps} are still under way after "
                    f"{self.timeout_s:g} s, and their values leave no room in budget_bytes="
                    f"{self.budget_bytes}"
                )

    def _note_pace(self, step: int, entered_s: float) -> None:
        """Measures how long steps and saves take, and moves the schedule on."""
        now_s, last = time.monotonic(), self._schedule
        step_s = None
        if last.last_step is not None and last.last_s is not None and step > last.last_step:
            step_s = (now_s - last.last_s) / (step - last.last_step)
        self._costs = replace(self._costs, step_s=step_s, blocked_s=now_s - entered_s)
        by_clock = last.policy.is_by_clock
        if by_clock and self._processes.count > 1 and self._latest is not None:
            # Every process must add up the same numbers: those of the save before, wherever that is
            # still under way here and has ended there.
            if self._latest.handle is not None:
                self._wait_for([self._latest], self.timeout_s)
            told = self._latest.job.told if self._latest.job is not None else None
            if told is not None:
                self._agreed = Costs(**told)
        self._schedule = last.saved(step, now_s=now_s, agreed=self._agreed)
        costs = self._agreed if self._processes.count > 1 else self._costs
        if last.policy.job_mtbf_s is not None and costs is not None and costs.save_s is not None:
            self._explain(last.policy, costs)

    def _explain(self, policy: SavePolicy, costs: Costs) -> None:
        if not self._explained and self._processes.index == 0 and policy.job_mtbf_s is not None:
            _logger.info(
                "saving every %.0f s: sqrt(2 * cost * (MTBF + restart)) with a cost of %.3f s, an "
                "MTBF of the job of %.1f h and a restart of %.1f s; a save takes %.1f s",
                costs.interval_s(policy),
                costs.blocked_s or 0.0,
                policy.job_mtbf_s / 3600,
                costs.restore_s or 0.0,
                costs.save_s or 0.0,
            )
            self._explained = True

    # --- in the background -----------------------------------------------------------------------

    def _refuse(self, name: str, step: int, error: Exception, *, skipped: bool) -> None:
        """Tells the other processes, in its turn, that this one does not save a step."""
        if self._processes.count == 1:
            return
        begins = not self._run.storage.atomic_rename

        def refuse() -> None:
            take_part(self._processes, name, error, begins=begins, skipped=skipped)

        self._enqueue(_Pending(step=step, handle=None, job=None, refuse=refuse))

    def _enqueue(self, pending: _Pending) -> None:
        with self._changed:
            self._under_way.append(pending)
        self._queue.put(pending)
        if self._thread is None:
            # A daemon: a manager that nobody closed must not keep the interpreter alive.
            self._thread = threading.Thread(
                target=self._work, name=f"jaxckpt-manager {self.directory}", daemon=True
            )
            self._thread.start()

    def _work(self) -> None:
        while (pending := self._queue.get()) is not None:
            try:
                self._do(pending)
            except Exception:  # the top of a thread; each save keeps its own error
                _logger.exception("%s: after the save of step %d", self.directory, pending.step)
            with self._changed:
                self._under_way.remove(pending)
                pending.ended = True
                self._changed.notify_all()

    def _do(self, pending: _Pending) -> None:
        if pending.refuse is not None:
            pending.refuse()
        if pending.handle is None or pending.job is None:
            return
        failed = pending.handle.run()
        if failed is not None:
            if not pending.job.skipped:
                with self._changed:
                    self._undelivered.append(pending.handle)
            return
        self._costs = replace(self._costs, save_s=time.monotonic() - pending.started_s)
        info = StepInfo(step=pending.step, saved_s=time.time(), metrics=pending.metrics)
        self._run.remember(info)
        if self._processes.index == 0:
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

    def _wait_for(self, pending: list[_Pending], timeout_s: float) -> None:
        def ended() -> bool:
            return all(one.ended for one in pending)

        with self._changed:
            if not self._changed.wait_for(ended, timeout_s):
                steps = [one.step for one in pending if not one.ended]
                raise CheckpointTimeout(
                    f"{self.directory}: the saves of steps {steps} are still under way after "
                    f"{timeout_s:g} s; they go on"
                )

    def _take_undelivered(self) -> list[BaseException]:
        with self._changed:
            handles, self._undelivered = self._undelivered, []
        return [error for handle in handles if (error := handle.take_error()) is not None]

    def _begin_call(self) -> None:
        if self._closed:
            raise ValueError(f"the manager of {self.directory} is closed")
        _raise_first(self._take_undelivered())

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
        with self._changed:
            pending = list(self._under_way)
        self._wait_for(pending, self.timeout_s if timeout_s is None else timeout_s)
        _raise_first(self._take_undelivered())

    def close(self) -> None:
        """Waits for the saves under way, and lets go of the run.

        Raises:
            Whatever a save failed with that nobody was told of.
        """
        if not self._closed:
            self._shut(self.timeout_s)
            _raise_first(self._take_undelivered())

    def _shut(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            with self._changed:
                pending = list(self._under_way)
            self._queue.put(None)
            self._wait_for(pending, timeout_s)
            if self._thread is not None:
                self._thread.join(timeout_s)
        finally:
            self._preemption.close()
            self._run.close()
            key = (self._run.storage.scheme, self.directory, self._processes.index)
            with CheckpointManager._open_lock:
                if CheckpointManager._open.get(key) is self:
                    del CheckpointManager._open[key]

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
        target = [like]
        del like  # so that its arrays are free once the caller has let go of them
        steps = self._candidates(step)
        if not steps:
            raise CheckpointNotFound(f"{self.directory} has no committed step to restore")
        fallback = fallback and not isinstance(step, int)
        return self._restore(steps, target, items, fallback, options)

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
        steps = self._candidates("latest")
        if not steps:
            return init(), 0
        state = self._restore(steps, [_resume.shapes_of(init)], items, fallback, options)
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
        steps = self._candidates(step)
        if not steps:
            raise CheckpointNotFound(f"{self.directory} has no committed step to restore")

        def read(number: int) -> dict[str, Any]:
            return _resume.read_everything(self._run, number)

        attempts = self._attempts(fallback and not isinstance(step, int))
        number, found = attempts.first_whole(steps, self._with_lease(read))
        self.restored_step = number
        return found

    def _candidates(self, step: int | Literal["latest", "best"]) -> list[int]:
        """The steps to try, in order; the same in every process."""
        problem, steps = None, []
        if self._processes.index == 0:
            try:
                steps = self._ordered(step)
            except Exception as error:  # told to all processes, then raised
                problem = error
        told: Any = self._processes.agree(
            f"{self._name}/steps",
            {"steps": steps, "problem": text_of(problem)},
            timeout_s=self.timeout_s,
        )
        if problem is not None:
            raise problem
        if told["problem"] is not None:
            raise ProcessesDisagree(
                f"{self.directory}: process 0 failed: {told['problem']}", {0: told["problem"]}
            )
        return told["steps"]

    def _ordered(self, step: int | Literal["latest", "best"]) -> list[int]:
        if step == "latest":
            return self._run.steps()[::-1]
        if step == "best":
            return [info.step for info in self._ranked()]
        number = _as_int(step)
        self._run.check_step(number)
        return [number]

    def _attempts(self, fallback: bool) -> _resume.Attempts:
        return _resume.Attempts(
            run=self._run,
            processes=self._processes,
            name=self._name,
            timeout_s=self.timeout_s,
            fallback=fallback,
            writes=self.mode == "w",
        )

    def _restore(
        self,
        steps: list[int],
        target: list[Any],  # of one pytree
        items: Mapping[str, object] | None,
        fallback: bool,
        options: Mapping[str, Any],
    ) -> Any:  # any pytree
        objects = dict(items or {})
        for name, value in objects.items():
            if not _items.is_stateful(value):
                raise TypeError(
                    f"item {name!r} is restored in place, and {type(value).__name__} has neither "
                    "set_state nor load_state_dict. restore_items() returns what was saved."
                )
        start_s = time.monotonic()

        def read(number: int) -> tuple[Any, dict[str, Any]]:
            return _resume.read_step(
                self._run, number, target[0], objects, self._processes, options
            )

        number, (state, states) = self._attempts(fallback).first_whole(
            steps, self._with_lease(read)
        )
        for name, found in states.items():
            _items.set_state(objects[name], found)
        self.restored_step = number
        self._costs = replace(self._costs, restore_s=time.monotonic() - start_s)
        if fallback and self.mode == "w" and number != steps[0]:
            # What was set aside is no longer in the way.
            self._floor = max(n for n in (number, *self._numbers_together()) if n is not None)
        return state

    def _numbers_together(self) -> list[int]:
        newest: Any = self._processes.agree(
            f"{self._name}/newest", self._run.newest(), timeout_s=self.timeout_s
        )
        return [] if newest is None else [newest]

    def _with_lease(self, read: Callable[[int], Any]) -> Callable[[int], Any]:
        """In a reader, holds a step while it is read."""

        def held(number: int) -> Any:
            with self._run.leased(number):
                return read(number)

        return held if self.mode == "r" else read

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
        return next((info.step for info in self._ranked() if self._run.is_whole(info.step)), None)

    def _ranked(self) -> list[StepInfo]:
        if self.keep.metric is None:
            raise ValueError("no step is the best: KeepPolicy has no metric to rank by")
        return self.keep.ranked(map(self._run.info, self._run.steps()))

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
        self._alone(lambda: self._run.pin(step))

    def unpin(self, step: int) -> None:
        """Leaves a step to the policy again."""
        self._begin_call()
        self._check_writes()
        self._alone(lambda: self._run.unpin(step))

    def delete(self, step: int) -> None:
        """Deletes a step now. One that is pinned, or that a reader holds, is refused.

        Raises:
            ValueError: it is pinned, or being read.
        """
        self._begin_call()
        self._check_writes()
        self.wait_until_finished()

        def delete() -> None:
            path = self._run.check_step(step)
            if self._run.is_pinned(step):
                raise ValueError(f"{path} is pinned; unpin it first")
            self._run.fence()
            if step not in self._run.delete([step], asked_for=True):
                raise ValueError(f"{path} was not deleted: {self._run.why_not(step)}")

        self._alone(delete)
        newest = self._numbers_together()
        self._floor = newest[0] if newest else None

    def _alone(self, do: Callable[[], None]) -> None:
        """Has process 0 do something; all raise what it raises."""
        problem = None
        if self._processes.index == 0:
            try:
                do()
            except Exception as error:  # told to all processes, then raised
                problem = error
        told: Any = self._processes.agree(
            f"{self._name}/alone", text_of(problem), timeout_s=self.timeout_s
        )
        if problem is not None:
            raise problem
        if told is not None:
            raise ProcessesDisagree(f"{self.directory}: process 0 failed: {told}", {0: told})

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
        waiting = threading.Event()  # never set: a wait that signals interrupt
        last = after
        deadline_s = time.monotonic() + timeout_s
        while True:
            steps = self._run.steps()
            new = steps[-1:] if last is None else [n for n in steps if n > last]
            for step in new:
                last = step
                with self._run.leased(step) as there:
                    if there:
                        yield step
                        deadline_s = time.monotonic() + timeout_s
            left_s = deadline_s - time.monotonic()
            if not new and left_s <= 0:
                return
            if not new:
                waiting.wait(min(_POLL_S, left_s))

    def __repr__(self) -> str:
        return f"<CheckpointManager {self.directory!r}, mode {self.mode!r}>"


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
