"""The saving half of a manager: which calls save, what they take, what happens after a commit."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, final

from jaxckpt._progress.meter import Meter, Watch, display
from jaxckpt._run import items as _items
from jaxckpt._run.deletion import Deletion
from jaxckpt._run.index import StepIndex
from jaxckpt._run.owner import Ownership
from jaxckpt._run.pace import Pace
from jaxckpt._run.preemption import Preemption
from jaxckpt._run.queue import Pending, SaveQueue
from jaxckpt._run.retention import KeepPolicy
from jaxckpt._run.schedule import SavePolicy
from jaxckpt._save.job import SaveJob
from jaxckpt._save.save import SaveHandle, check_metadata
from jaxckpt._save.snapshot import Item, take_tree
from jaxckpt.errors import StepExists
from jaxckpt.format import names
from jaxckpt.format.run import MAX_STEP
from jaxckpt.multihost import Processes, text_of
from jaxckpt.types import Decision, OnProgress, StepInfo, Timing

_PREEMPTION: Final = "preemption"


@final
class Saver:
    """Saves steps of a run, one after the other, in the background.

    Attributes:
        pace: When.
        queue: Those under way.
        floor: The newest committed step that is known here.
        session: What the names of attempts are made of; all processes have agreed on it.
    """

    def __init__(
        self,
        index: StepIndex,
        owner: Ownership,
        deletion: Deletion,
        processes: Processes,
        policy: SavePolicy,
        keep: KeepPolicy,
        *,
        listens: bool,
        budget_bytes: int,
        timeout_s: float,
        on_progress: OnProgress | None,
        on_commit: Callable[[Timing], None] | None,
        timings: deque[Timing],
    ) -> None:
        self.pace = Pace(policy, processes)
        self.queue = SaveQueue(index.root, self._after_save)
        self.floor: int | None = None
        self.session = ""
        self.preemption = Preemption(processes, listens=listens and policy.on_preemption)
        self._index = index
        self._owner = owner
        self._deletion = deletion
        self._processes = processes
        self._keep = keep
        self._budget_bytes = budget_bytes
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._on_commit = on_commit
        self._timings = timings
        self._started = 0
        self._latest: Pending | None = None
        self._for_preemption: Pending | None = None

    def save(
        self,
        step: int,
        state: object,
        items: Mapping[str, object],
        metrics: Mapping[str, Any] | None,
        *,
        force: bool,
        custom_metadata: Mapping[str, Any] | None,
    ) -> SaveHandle | None:
        """`CheckpointManager.save`."""
        entered_s = time.monotonic()
        decision = self.decide(step, force=force)
        errors = self.queue.take_errors()
        if not decision.save:
            raise_first(errors)
            return None
        problem, held, metadata, found = None, [], {}, {}
        # Not before: to ask where a step goes may list the root, and most calls save nothing.
        meter = Meter("save", self._index.path(step), step=step)
        watch = Watch(meter, display(self._on_progress, self._processes.index))
        try:
            with watch.ended_by_error():
                # Another process may not know of these yet, and saves: it must not wait for this.
                raise_first(errors)
                self._check_step(step)
                metadata = check_metadata(custom_metadata)
                held = self._take(state, items, metrics, step, found, meter)
        except Exception as error:  # told to the others, then raised
            if self._processes.count == 1:
                raise
            problem = error
        pending = self._start(
            step, entered_s, held, metadata, found, problem, watch, skips=bool(errors)
        )
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
        watch: Watch,
        *,
        skips: bool,
    ) -> Pending:
        """Hands a save to the thread; all processes keep the same account of it."""
        told = None
        if self.pace.needs_told and self._latest is not None:
            # All must add up the same numbers, so wait where that save is still under way.
            self.queue.wait([self._latest], self._timeout_s)
            told = self._latest.job.told
        tell = self.pace.saving(step, entered_s=entered_s, told=told)
        name = f"manager {self.session}/{self._started}"
        self._started += 1
        job = SaveJob(
            storage=self._index.storage,
            path=self._index.path(step),
            items=held,
            processes=self._processes,
            name=name,
            watch=watch,
            custom_metadata=metadata,
            is_step=True,
            token=hashlib.sha256(name.encode()).hexdigest()[:16],
            fence=partial(self._owner.fence, step),
            tell=tell,
            problem=problem,
            skips=skips,
            timeout_s=self._timeout_s,
        )
        self._latest = Pending(
            step=step,
            job=job,
            handle=SaveHandle(job),
            metrics=metrics,
            size_bytes=job.size_bytes,
            started_s=entered_s,
        )
        self.queue.put(self._latest)
        return self._latest

    def decide(self, step: int, *, force: bool = False) -> Decision:
        """Whether a step is saved: because the job ends, by force, or by a rule."""
        if not 0 <= step <= MAX_STEP:
            raise ValueError(f"a step is from 0 to {MAX_STEP}, not {step}")
        if self.preemption.reached(step) and not self._is_saved_for_preemption():
            return self.pace.must(step, _PREEMPTION)
        if force:
            return self.pace.must(step, "force")
        return self.pace.decide(step, busy=bool(self.queue.under_way()))

    def _is_saved_for_preemption(self) -> bool:
        """Whether it is; one that failed is tried again, by all processes or by none."""
        pending = self._for_preemption
        if pending is None:
            return False
        self.queue.wait([pending], self._timeout_s)
        return pending.committed

    def _check_step(self, step: int) -> None:
        newest = [p.step for p in self.queue.under_way() if not p.refused]
        floor = max([*newest, -1 if self.floor is None else self.floor])
        if step > floor:
            return
        path = self._index.path(step)
        if step == floor or step in self._index.listing().steps:
            raise StepExists(f"{path} is saved already, or being saved; it stays as it is")
        raise ValueError(
            f"step {step} comes after step {floor}, the newest of {self._index.root}. To go on "
            f"from an earlier step, delete the later ones (manager.delete) or start a new run from "
            "it (jaxckpt.fork)."
        )

    def _take(
        self,
        state: object,
        items: Mapping[str, object],
        metrics: Mapping[str, Any] | None,
        step: int,
        found: dict[str, Any],
        meter: Meter,
    ) -> list[Item]:
        """Brings everything to the host, when there is room for it."""
        _items.check_names(items)
        expected = self._latest.size_bytes if self._latest is not None else 0
        self.queue.wait_for_room(expected, self._budget_bytes, self._timeout_s)
        meter.waited()
        processes = self._processes
        with meter.phase("snapshot"):
            held: list[Item] = [take_tree(names.STATE_ITEM, state, processes, copy=True)]
            held += [_items.take_item(name, value, processes) for name, value in items.items()]
        if metrics is not None:
            wanted = self._keep.metric
            if wanted is not None and wanted not in metrics:
                self._index.report(
                    f"step {step} has no metric {wanted!r}, which KeepPolicy ranks by; it has "
                    f"{', '.join(metrics) or 'none'}"
                )
            held.append(_items.take_metrics(metrics, found.update))
        return held

    def _after_save(self, pending: Pending) -> None:
        """Runs in the thread, after a commit."""
        timing = pending.job.meter.timing()
        self._timings.append(timing)
        self.floor = pending.step
        self.pace.saved(time.monotonic() - pending.started_s)
        if self._processes.index == 0:  # the others do not know the metrics that it wrote
            info = StepInfo(step=pending.step, saved_s=time.time(), metrics=pending.metrics)
            self._index.remember(info)
            self._delete_what_goes()
        if self._on_commit is not None:
            self._on_commit(timing)
        if pending.job.watch.error is not None:
            raise pending.job.watch.error

    def _delete_what_goes(self) -> None:
        if self._keep.has_rules:
            steps = self._index.steps()
            kept = self._keep.kept(map(self._info, steps), now_s=time.time())
            # What cannot be read now may be the best of all.
            unknown = self._index.unknown if self._keep.needs_facts else set()
            self._deletion.delete(n for n in steps if n not in kept and n not in unknown)

    def _info(self, step: int) -> StepInfo:
        """What the policy looks at; of what is not in memory, only if it does look."""
        if self._keep.needs_facts:
            return self._index.info(step)
        return StepInfo(step=step, saved_s=0.0)


def raise_first(errors: list[BaseException]) -> None:
    """Raises the first of some errors, with a note of each of the others."""
    if errors:
        first, *others = errors
        for other in others:
            first.add_note(f"and then: {text_of(other)}")
        raise first
