"""The saving half of a manager: decisions, the background thread and the work after a commit."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any, Final, cast, final

from jaxckpt._core import fingerprint
from jaxckpt._core.check import calling
from jaxckpt._disk.data_files import give_way
from jaxckpt._disk.transaction import Work, work_for
from jaxckpt._progress.meter import Meter, display
from jaxckpt._run import items as _items
from jaxckpt._run.preemption import Notice, Preemption
from jaxckpt._run.root import Root, is_in_any, newest_of
from jaxckpt._run.schedule import Costs, SavePolicy, Schedule
from jaxckpt._run.tiers import Tiers
from jaxckpt._run.uploads import Upload
from jaxckpt._save import ending
from jaxckpt._save.failure import Failure, hear
from jaxckpt._save.handle import SaveHandle, SaveRequest
from jaxckpt._save.save import check_metadata
from jaxckpt._save.snapshot import Items, SaveItem, TreeItem, take_tree
from jaxckpt._save.unchanged import Base, LinkFailed
from jaxckpt.errors import CheckpointError, CheckpointTimeout, StepExists
from jaxckpt.format import names
from jaxckpt.format.run import MAX_STEP
from jaxckpt.format.step import Life
from jaxckpt.multihost import Json, Processes, lead, leading, raise_first
from jaxckpt.types import Decision, OnProgress, StepInfo, Timing

_logger = logging.getLogger("jaxckpt")

_PREEMPTION: Final = "preemption"
_LAST_WORDS_S: Final = 5.0  # of a meeting whose time is up


@final
class Saver:
    """Saves steps of a run one after the other in a background thread."""

    def __init__(
        self,
        root: Root,
        processes: Processes,
        policy: SavePolicy,
        *,
        tiers: Tiers | None,
        writes: bool,
        budget_bytes: int,
        timeout_s: float,
        on_progress: OnProgress | None,
        on_commit: Callable[[Timing], None] | None,
        timings: deque[Timing],
        notice: Notice | None,
        session: str,
        item: str,  # of the state
        zstd: int | None,  # the level at which each step is compressed
        incremental: bool,  # whether steps refer to earlier steps
        newest: int | None,  # on which all processes have agreed
        owned: bool,  # whether no other job was running; agreed on too
        run: str,  # its id
    ) -> None:
        self.decision: Decision | None = None  # the latest
        schedule = Schedule(
            policy=policy,
            processes=processes.count,
            started_s=time.monotonic(),
            is_new=newest is None,
        )
        # The schedule for the directory and, if there are tiers, the schedule for local steps.
        self._schedules = [schedule]
        if tiers is not None and tiers.save is not None:
            self._schedules.append(replace(schedule, policy=tiers.save))
        self.floor = newest  # the newest step known to be committed
        self.agreed = newest  # the newest good step when all processes last agreed
        self._is_owned = owned or not writes
        self._of_other = -1  # the newest step of the job that was running
        self._run = run
        # Reads how the run got here, for the records of steps; None until a step is saved.
        self._life: Callable[[], Life] | None = None
        self.session = session  # begins the names of attempts; equal in all processes
        self.preemption = Preemption(
            processes, listens=writes and policy.on_preemption, notice=notice
        )
        self._tiers = tiers
        self._roots = [root] if tiers is None else [tiers.local, root]
        self._root = self._roots[0]  # where steps are saved
        self._index = self._root.index
        self._processes = processes
        self._writes = writes
        self._item = item
        self._zstd = zstd
        is_store, storage = self._index.storage.scheme != "file", self._index.storage
        links = storage.atomic_rename and self._root.keep.keeps_two
        self._incremental = incremental and (is_store or links)
        self._budget_bytes = budget_bytes
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._on_commit = on_commit
        self._timings = timings
        self._by_rules: Decision | None = None
        self._is_durable = True  # whether the step of the decision goes to the directory
        self._due = True  # the same by the rules
        # Root and upload of each step being saved, and the function that reads its life.
        self._places: dict[int, tuple[Root, Upload | None, Callable[[], Life]]] = {}
        self._trees: dict[int, list[TreeItem]] = {}  # by step, until the commit
        # The latest steps, by item. The next step may refer to the first of them if there are
        # `_most_bases`: on a file system, the two newest steps share no file.
        self._bases: list[dict[str, Base]] = []
        self._most_bases = 1 if is_store else 2
        self._reading: object | None = None  # the current read-back for the next step; None ends it
        self._explained = False
        self._started = 0
        self._latest: SaveHandle | None = None
        self._for_preemption: SaveHandle | None = None
        self._lacked_metric = False  # whether a step did, which is reported once
        self._metrics: dict[int, dict[str, Any]] = {}  # by step, until the commit
        self._thread: threading.Thread | None = None  # the latest that saved
        self._changed = threading.Condition()  # guards `_schedules` and the three below
        self._under_way: list[SaveHandle] = []
        self._readers = 0  # threads that read, or are about to
        self._failures: list[Failure] = []
        self._is_stopped = False

    # --- which calls save ------------------------------------------------------------------------

    @property
    def schedule(self) -> Schedule:
        """When steps are saved in the directory."""
        return self._schedules[0]

    def decide(self, step: int, *, force: bool = False) -> Decision:
        """Returns whether a step is saved: for preemption, by force or by a rule."""
        if not 0 <= step <= MAX_STEP:
            raise ValueError(f"step must be between 0 and {MAX_STEP}, got {step}")
        last = self._schedules[-1].last_step
        latest = (self.agreed, last)  # later steps are new
        self._is_durable = True
        is_old = any(known is not None and step <= known for known in latest)
        if not self._writes:
            reason = "the manager was opened with mode='r'"
            self.decision = Decision(step=step, save=False, reason=reason)
        elif is_old and not force and (step < self._of_other or self._is_there(step)):
            reason = f"step {step} is there already or being saved"
            if step < self._of_other:
                reason = f"the job before has saved step {self._of_other}"
            self.decision = Decision(step=step, save=False, reason=reason)
        elif self.preemption.reached(step) and not self._is_saved_for_preemption():
            self.decision = Decision(step=step, save=True, reason=_PREEMPTION)
        elif force:
            self.decision = Decision(step=step, save=True, reason="force")
        else:
            known = self._by_rules
            # The answer holds until the step is saved, even as time passes.
            if known is None or known.step != step or last == step:
                self._by_rules, self._due = self._decide_by_rules(step)
            self.decision, self._is_durable = self._by_rules, self._due
        assert self.decision is not None
        return self.decision

    def _decide_by_rules(self, step: int) -> tuple[Decision, bool]:
        """Returns the decision, and whether the step goes to the directory."""
        for i, schedule in enumerate(self._schedules):
            if self._processes.count > 1 and schedule.needs_pace(step):
                agreed = self._costs(f"manager {self.session}/pace", step)
                with self._changed:
                    self._schedules[i] = self._schedules[i].paced(agreed)
        # Deleting old steps after a commit does not count.
        busy, now_s = not all(handle.done() for handle in self.under_way()), time.monotonic()
        found = [schedule.decide(step, now_s=now_s, busy=busy) for schedule in self._schedules]
        return next((one for one in found if one.save), found[0]), found[0].save

    def _is_there(self, step: int) -> bool:
        """Returns whether process 0 has this step or is saving it."""

        def is_there() -> bool:
            saving = [handle.step for handle in self.under_way() if not handle.refused]
            # Not from memory: another program may have deleted it.
            return step in saving or is_in_any(self._roots, lambda root: root.has(step))

        root = self._index.root
        name = f"manager {self.session}/there"
        return lead(self._processes, name, is_there, place=root, timeout_s=self._timeout_s)

    def _join(self, step: int) -> None:
        """Takes the run over from the job that was running when our job opened it.

        If that job has ended meanwhile, its later steps stay, and this job saves steps after them.
        """

        def join() -> Json:
            for root in self._roots:
                if root.owner.is_guest and not root.own:
                    root.owner.join(step)
            return newest_of(self._roots)

        root = self._index.root
        name = f"manager {self.session}/join"
        newest = lead(self._processes, name, join, place=root, timeout_s=self._timeout_s)
        self._is_owned = True
        if newest is not None and newest > (-1 if self.floor is None else self.floor):
            self.floor = self.agreed = self._of_other = newest

    def _is_saved_for_preemption(self) -> bool:
        """Waits for the save for preemption; all processes retry a failed one."""
        if self._for_preemption is None:
            return False
        self.wait([self._for_preemption])
        return self._for_preemption.timing is not None

    def record(self, **costs: float) -> None:
        """Records measured times, by fields of `Costs`."""
        with self._changed:
            self._schedules = [
                replace(schedule, costs=replace(schedule.costs, **costs))
                for schedule in self._schedules
            ]

    def went_back(self, newest: int | None, *, good: int | None) -> None:
        """Records that later steps are gone, and which is the newest that every process trusts."""
        if good != self.floor:
            self._life = None  # later steps do not come from the steps that are gone
        self.floor, self.agreed, self._of_other = newest, good, -1
        self.share_nothing()

    def share_nothing(self) -> None:
        """Lets the next step be whole, since the last step may be damaged."""
        self._bases = []

    # --- in the caller's thread ------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: object,
        items: Mapping[str, object],
        metrics: Mapping[str, Any] | None,
        *,
        dtype: str | None,
        force: bool,
        custom_metadata: Mapping[str, Any] | None,
    ) -> SaveHandle | None:
        entered_s = time.monotonic()
        decision = self.decide(step, force=force)
        if decision.save and not self._is_owned:
            self._join(step)
            decision = self.decide(step, force=force)
        if not decision.save:
            raise_first(self.take_errors())
            return None
        # Only now: asking for a step's path may list the root, and most calls save nothing.
        meter = Meter("save", self._index.path(step), step=step)
        errors = self._make_room()
        meter.waited()
        name = f"manager {self.session}/{self._started}"
        self._started += 1
        by_clock = any(schedule.policy.is_by_clock for schedule in self._schedules)
        is_agreed = self._processes.count > 1 and by_clock
        agreed = self._agree(name, step, errors) if is_agreed else None
        problem, held, metadata = None, [], {}
        meter.watch(display(self._on_progress, self._processes.index))
        try:
            # Raised in here because another process may not know of these errors and save.
            raise_first(errors)
            self._check_step(step)
            metadata = check_metadata(custom_metadata)
            held = self._take(state, items, metrics, step, meter, dtype)
        except BaseException as error:
            meter.end()
            if self._processes.count == 1 or not isinstance(error, Exception):
                raise
            problem = error  # reported to the others, then raised
        self._move_on(step, entered_s, agreed)
        root, upload = self._root, None
        if self._tiers is not None:
            under_way = sum(handle.size_bytes for handle in self.under_way())
            size = sum(item.size_bytes for item in held) + under_way
            root = self._tiers.place(size, name)
            if root is not self._root:
                self._tiers.uploads.newest_direct = step
            upload = self._tiers.uploads.expect(step) if self._is_durable else None
        self._places[step] = root, upload, self._lives()
        storage, path = root.index.storage, root.index.path(step)
        token = hashlib.sha256(name.encode()).hexdigest()[:16]
        work = work_for(storage, path, token)._replace(own=root.own)
        if problem is None and not self._link(held, root, work):
            held = self._take(state, items, metrics, step, meter, dtype)
        if self._incremental:
            self._trees[step] = [item for item in held if isinstance(item, TreeItem)]
        request = SaveRequest(
            storage=storage,
            path=path,
            items=held,
            processes=self._processes,
            name=name,
            meter=meter,
            custom_metadata=metadata,
            is_step=True,
            token=token,
            fence=partial(root.owner.fence, None if root.own else step),
            own=root.own,
            overwrite=root.own or step in root.index.astray,  # of an earlier life
            life=self._places[step][2],
            problem=problem,
            skips=bool(errors),
            timeout_s=self._timeout_s,
        )
        self._latest = handle = SaveHandle(request)
        if self._tiers is not None:
            handle.wait_durable = partial(self._tiers.wait_for, root, step, upload)
        self._put(handle)
        if decision.reason == _PREEMPTION:
            self._for_preemption = handle
            self._explain_what_fits(step, handle.size_bytes)
        if problem is not None:
            raise problem
        return handle

    def _lives(self) -> Callable[[], Life]:
        """Returns a function that reads the life of the steps being saved.

        All steps have the same life until the run goes back. The saving thread reads it once.
        """
        if self._life is None:
            start = hashlib.sha256(f"{self.session}/{self._started}".encode()).hexdigest()[:12]
            self._life = cache(partial(self._begin, start, self.agreed))
        return self._life

    def _begin(self, start: str, step: int | None) -> Life:
        """Returns the life that goes on from a step, or anew."""
        before = Life(run=self._run)
        for index in [root.index for root in self._roots if step not in (None, *root.index.astray)]:
            with suppress(CheckpointError, OSError):
                if (saved := index.saved(step or 0)).run == self._run:
                    before = Life(run=self._run, starts=saved.starts)
                    break
        return before.begun(start, step)

    def _link(self, held: Sequence[SaveItem], root: Root, work: Work) -> bool:
        """Links the files of unchanged shards while their values exist; returns whether it worked.

        If not, nothing is linked, and the next steps are whole.
        """
        based = [item for item in held if isinstance(item, TreeItem) and item.has_base]
        storage, is_linked = root.index.storage, root is self._root or not based
        try:
            for item in based if is_linked else ():
                item.link(storage, work)
        except (OSError, CheckpointError) as error:
            is_linked = False
            if isinstance(error, io.UnsupportedOperation):  # hard links are not supported
                self._incremental = False
            for item in based:
                with contextlib.suppress(OSError, CheckpointError):
                    item.unlink(storage, work)
        if not is_linked:
            self._bases = []
        return is_linked

    def _explain_what_fits(self, step: int, size_bytes: int) -> None:
        """Logs the time that is left after a notice, beside what this run has measured.

        If the upload of the step fits, an older upload under way gives way to it.
        """
        left_s = self.preemption.left_s
        if left_s is None or self._processes.index != 0:
            return
        times = {"a save": self.schedule.costs.save_s}
        if self._tiers is not None:
            times["its upload"] = self._tiers.uploads.seconds_for(size_bytes)
        known = {what: seconds for what, seconds in times.items() if seconds is not None}
        texts = [f"{what} takes about {seconds:.1f} s" for what, seconds in known.items()]
        fits = "this fits"
        if sum(known.values()) > left_s:
            fits = "this does not fit; it is tried"
            if self._tiers is not None:
                fits = (
                    f"this does not fit; it is saved here, and the upload begins with {self._item}"
                )
        elif known.get("its upload") is not None and self._tiers is not None:
            self._tiers.uploads.hurry(step)
        why = "; ".join([*texts, fits]) if known else "nothing is measured yet"
        _logger.warning("saving for the end of this host in %.0f s: %s", left_s, why)

    def _agree(self, name: str, step: int, errors: list[BaseException]) -> Costs:
        """Returns the costs that process 0 has measured, from which all compute the next step."""
        try:
            if self._latest is not None:
                self.wait([self._latest])  # process 0 reports how long it took
            return self._costs(f"{name}/costs", step)
        except Exception as error:
            raise_first([*errors, error])
            raise

    def _costs(self, name: str, step: int) -> Costs:
        mine = asdict(self._schedules[-1].costs_at(step, now_s=time.monotonic()))
        agreed = self._processes.agree(name, mine, timeout_s=self._timeout_s)
        return Costs(**cast("dict[str, Any]", agreed))

    def _move_on(self, step: int, entered_s: float, agreed: Costs | None) -> None:
        """Advances the schedule, alike in all processes."""
        now_s = time.monotonic()
        with self._changed:
            self._schedules = [
                schedule
                if i == 0 and not self._is_durable
                else schedule.saved(step, now_s=now_s, blocked_s=now_s - entered_s, agreed=agreed)
                for i, schedule in enumerate(self._schedules)
            ]
        if not self._explained and (text := self.schedule.explanation()) is not None:
            self._explained = True
            if self._processes.index == 0:
                _logger.info("%s", text)

    def _check_step(self, step: int) -> None:
        running = [handle.step or 0 for handle in self.under_way() if not handle.refused]
        floor = max([*running, -1 if self.floor is None else self.floor])
        if step > floor:
            return
        if not running and not self._root.own:  # another program may have deleted the newest steps
            self.floor = newest_of(self._roots)
            floor = -1 if self.floor is None else self.floor
            if step > floor:
                return
        if step == floor or is_in_any(self._roots, lambda root: step in root.index.listing().steps):
            path = self._index.path(step)
            raise StepExists(f"{path} already exists or is being saved; it was not changed")
        raise ValueError(
            f"step {step} is older than step {floor}, the newest of {self._index.root}. To "
            "continue from an earlier step, delete the later ones (manager.delete) or start a new "
            "run from it (jaxckpt.fork)."
        )

    def _take(
        self,
        state: object,
        items: Mapping[str, object],
        metrics: Mapping[str, Any] | None,
        step: int,
        meter: Meter,
        dtype: str | None,
    ) -> list[SaveItem]:
        """Copies everything to the host."""
        for name in items:
            names.check_item(name, self._item, names.STATE_ITEM, names.DEFAULT_ITEM)
        processes = self._processes
        with meter.phase("snapshot"):
            how: dict[str, Any] = {"zstd": self._zstd, "holds": self._root.own}
            if self._incremental:
                how["storage"] = self._index.storage
            bases = self._bases_now()
            held: list[SaveItem] = []
            if isinstance(state, Items):
                held += state.taken(processes)
            else:
                base, item = bases.get(self._item), self._item
                held.append(
                    take_tree(item, state, processes, copy=True, dtype=dtype, base=base, **how)
                )
            for name, value in items.items():
                base = bases.get(name)
                held.append(_items.take_item(name, value, processes, base=base, **how))
        for root in self._roots:
            if isinstance(root.keep.metric, str):  # a function needs numbers that may come later
                self._check_metric(step, metrics or {}, root.keep.metric)
        if metrics is not None:
            found = partial(self._metrics.__setitem__, step)
            held.append(_items.take_metrics(metrics, found))
        return held

    def _bases_now(self) -> Mapping[str, Base]:
        """Returns the base of each item for the next step, without files that are not read back."""
        with self._changed:
            self._reading = None
            # While a save is under way, the two newest steps are not known yet.
            is_known = not self._under_way and len(self._bases) == self._most_bases
            return self._bases[0] if is_known else {}

    def _check_metric(self, step: int, metrics: Mapping[str, Any], wanted: str) -> None:
        """Reports the first step that lacks the metric of the policy."""
        if wanted in metrics or self._lacked_metric:
            return
        self._lacked_metric = True
        self._index.report(
            f"step {step} lacks the metric {wanted!r} that KeepPolicy ranks by; it has "
            f"{', '.join(metrics) or 'none'}. While no step has it, `best` keeps all steps. Later "
            "steps that lack it are not reported."
        )

    # --- waiting ---------------------------------------------------------------------------------

    def under_way(self) -> list[SaveHandle]:
        """Returns the saves that have not ended, including the work after their commits."""
        with self._changed:
            return list(self._under_way)

    def take_errors(self, waited_for: Sequence[SaveHandle] = ()) -> list[BaseException]:
        """Returns the errors of saves and uploads that this thread has not raised; see `Failure`.

        Args:
            waited_for: Saves whose errors it raises even if the caller of `save` has done so.
        """
        errors: list[BaseException] = []
        late = [handle.failure for handle in waited_for if handle.failure is not None]
        with self._changed:
            # Not in `on_commit`, for example: the callers of the manager need the errors.
            if (self._failures or late) and not self.is_own_thread():
                errors += hear(self._failures, late)
        # With several processes, only the next save reports process 0's errors to all.
        if self._tiers is not None and self._processes.count == 1:
            errors += self._tiers.uploads.take_errors()
        return errors

    def is_own_thread(self) -> bool:
        """Returns whether the saving thread calls, such as from `on_commit`."""
        return threading.current_thread() is self._thread

    def refuse_own_thread(self) -> None:
        """Raises RuntimeError in the saving thread, which would wait for itself."""
        if self.is_own_thread():
            raise RuntimeError(
                f"{self._index.root}: on_commit cannot wait for saves, which wait for on_commit; "
                "wait in the thread that calls `save`"
            )

    def wait(self, handles: Sequence[SaveHandle], timeout_s: float | None = None) -> None:
        """Waits until these saves have ended, including the work after their commits.

        Args:
            timeout_s: If None, the manager's and a little more, so that the error of a meeting
                comes first, which is the same in every process.
        """
        self._wait_until(lambda: not any(one in self._under_way for one in handles), timeout_s)

    def _make_room(self) -> list[BaseException]:
        """Waits until another save may begin; returns the errors that have not been raised yet.

        At most one save is under way then: the new one waits for it. A job that is killed loses
        these two. Both fit into the budget, if the new one is as large as the latest.
        """
        size = self._latest.size_bytes if self._latest is not None else 0

        def has_room() -> bool:
            held = sum(handle.size_bytes for handle in self._under_way)
            return len(self._under_way) < (2 if held + size <= self._budget_bytes else 1)

        errors: list[BaseException] = []
        try:
            why = f" and leave no room for a second one in budget_bytes={self._budget_bytes}"
            self._wait_until(has_room, why=why)
        except Exception as error:  # raised once the other processes can hear of it
            errors.append(error)
        # With several processes, only the next save reports process 0's errors to all.
        uploads = [] if self._tiers is None else self._tiers.uploads.take_errors()
        return [*errors, *self.take_errors(), *uploads]

    def _wait_until(
        self, over: Callable[[], bool], timeout_s: float | None = None, why: str = ""
    ) -> None:
        with self._changed:
            if over():
                return
            self.refuse_own_thread()
            if timeout_s is None:
                timeout_s = self._timeout_s + min(_LAST_WORDS_S, self._timeout_s / 4)
            started_s = time.monotonic()
            if self._changed.wait_for(over, timeout_s):
                return
            waited_s = time.monotonic() - started_s
            raise_first([*self.take_errors(), self._too_late(waited_s, why)])

    def _too_late(self, waited_s: float, why: str) -> CheckpointTimeout:
        steps = [handle.step for handle in self._under_way]
        missing = self._under_way[0].waits_for
        who = f", the first waits for processes {list(missing)}" if missing else ""
        return CheckpointTimeout(
            f"{self._index.root}: after {waited_s:.3g} s, the saves of steps {steps} are still "
            f"under way{why}{who}; they continue. If they are only slow, raise timeout_s.",
            missing=missing,
        )

    def finish(self) -> None:
        """Waits until all saves have ended."""
        self.wait(self.under_way(), 0.0 if self._is_stopped else None)

    def wait_for_all(self, timeout_s: float | None = None) -> None:
        """Waits until all saves have ended and the files that the next may share are read back.

        Raises their errors in every thread that waits.
        """
        handles = self.under_way()
        self.wait(handles, timeout_s)
        self._wait_for_reading(timeout_s)
        raise_first(self.take_errors(handles))

    def _wait_for_reading(self, timeout_s: float | None) -> None:
        """Waits while files are read back; if it takes too long, the next step is whole."""
        if not self.is_own_thread():
            limit_s = self._timeout_s if timeout_s is None else timeout_s
            with self._changed:
                self._changed.wait_for(lambda: not self._readers, limit_s)

    def stop(self) -> None:
        """Waits until all saves have ended, for the last time."""
        self._incremental = False  # no later step will need files read back
        try:
            self.finish()
        finally:
            self._reading = None
            self._wait_for_reading(None)  # so that nothing is open any more
            self._is_stopped = True  # the end of the program does not wait again
            self.preemption.close()
        if not self._failures:
            ending.forget(self)

    # --- in the thread ---------------------------------------------------------------------------

    def _put(self, handle: SaveHandle) -> None:
        with self._changed:
            self._under_way.append(handle)
            starts = len(self._under_way) == 1
        if starts:
            ending.start(self, self._work, f"jaxckpt-manager {self._index.root}")

    def _work(self) -> None:
        """Runs the saves under way until there are none; then prepares the next save."""
        self._thread = threading.current_thread()
        handle: SaveHandle | None = self._under_way[0]
        reading = None
        while handle is not None:
            try:
                if handle.attempt():
                    self._remember(handle)
                    self._follow(handle)
                    fingerprint.prepare()  # once the upload is under way
            except BaseException as error:  # the next call raises it
                handle.failure = Failure(error, handle.caller)
            if handle.timing is None:
                self._forget(handle)
            with self._changed:
                if handle.failure is not None:
                    self._failures.append(handle.failure)
                self._under_way.remove(handle)
                handle = next(iter(self._under_way), None)
                if handle is None:
                    reading = self._reading = object()
                    self._readers += 1
                self._changed.notify_all()
        self._read_back(reading)

    def _read_back(self, reading: object) -> None:
        """Reads back from the disk the files that the next step may share, until it begins."""

        def goes_on() -> bool:
            return self._reading is reading and not ending.is_ending()

        bases = self._bases
        try:
            if len(bases) == self._most_bases and self._incremental and goes_on():
                give_way()
                for item, base in bases[0].items():
                    for text in base.read_back(bases[-1].get(item), self._index.storage, goes_on):
                        self._index.report(text)
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    def _remember(self, handle: SaveHandle) -> None:
        """Lets later steps refer to the committed step; mends damage found in earlier steps."""
        step = handle.step
        assert step is not None
        trees, (root, *_) = self._trees.pop(step, ()), self._places[step]
        root.index.astray.discard(step)  # it has taken the place of such a step
        if root is not self._root:  # which the next step will not be
            self._bases = []
            return
        bases = {}
        for item in trees:
            for text in item.mended(root.index.storage, handle.path):
                self._index.report(text)
            if (base := item.base(handle.path)) is not None:
                bases[item.name] = base
        self._bases = [*self._bases, bases][-self._most_bases :]

    def _forget(self, handle: SaveHandle) -> None:
        """Lets the next step be whole after a failed one."""
        self._trees.pop(handle.step or 0, ())
        if isinstance(handle.error, LinkFailed):
            self._incremental = False  # the store does not copy
        self._bases = []

    def _follow(self, handle: SaveHandle) -> None:
        """Records a commit, deletes steps and calls `on_commit`."""
        timing, step = handle.timing, handle.step
        assert timing is not None  # it is committed
        assert step is not None
        self._timings.append(timing)
        self.floor = step
        self.record(save_s=timing.seconds)
        place, timeout_s = self._index.root, self._timeout_s
        root, upload, life = self._places.pop(step)
        info = StepInfo(step=step, saved_s=time.time(), metrics=self._metrics.pop(step, {}))
        name = f"{handle.name}/kept"
        with leading(self._processes, name, place=place, timeout_s=timeout_s) as led:
            if self._processes.index == 0:  # only it knows the metrics
                if self._tiers is not None and upload is not None:
                    self._tiers.follow(root, upload, info)
                is_local = self._tiers is not None and root is self._tiers.local
                is_good = root.committed(info, life() if is_local else None)
                led.value = [is_good, self._tiers and self._tiers.decided()]
        is_good, decided = led.value
        if not is_good:
            self.share_nothing()
        if self._tiers is not None:
            self._tiers.follow_decided(decided, info if root is self._root else None)
        if self._on_commit is not None:
            with calling(f"on_commit; step {step} is committed"):
                self._on_commit(timing)
        handle.raise_callback_error()
