"""Saves the steps of a run: what `save` does in the caller's thread, and after the commit."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, final

from jaxckpt._core import fingerprint
from jaxckpt._core.check import as_new_step, calling
from jaxckpt._disk.commit import commit_of
from jaxckpt._disk.pace import Pace
from jaxckpt._progress.meter import Meter, display
from jaxckpt._run.comparisons import Comparisons
from jaxckpt._run.due import DueSteps
from jaxckpt._run.incremental import Incremental
from jaxckpt._run.ledger import learned_mtbf_s
from jaxckpt._run.position import Position
from jaxckpt._run.preemption import Notice, Preemption, what_fits
from jaxckpt._run.root import Root, is_apart
from jaxckpt._run.roots import are_gone, learn_lone, look_at, open_roots
from jaxckpt._run.schedule import Costs, SavePolicy, Schedule
from jaxckpt._run.sender import Upload
from jaxckpt._run.taking import Given, Taking
from jaxckpt._run.tiers import Tiers
from jaxckpt._save.handle import SaveHandle
from jaxckpt._save.job import SaveJob, SaveRequest, meeting_of
from jaxckpt._save.save import check_metadata
from jaxckpt._save.snapshot import TreeItem
from jaxckpt._save.worker import Worker
from jaxckpt.errors import CheckpointError
from jaxckpt.format.ledger import PREEMPTED
from jaxckpt.multihost import Processes, leading, raise_first
from jaxckpt.types import Decision, OnProgress, StepInfo, Timing

_PREEMPTION: Final = "preemption"
_LAST_WORDS_S: Final = 5.0  # of a meeting whose time is up
_MAX_TIMINGS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Describes how a manager saves, whatever the step."""

    writes: bool  # whether there are saves at all
    policy: SavePolicy
    run_metadata: Mapping[str, Any] | None  # stored with a run that has none
    item: str  # of the state
    zstd: int | None  # the level at which each step is compressed
    incremental: bool  # whether steps refer to earlier steps
    budget_bytes: int
    on_progress: OnProgress | None
    on_commit: Callable[[Timing], None] | None
    notice: Notice | None


@final
class Saver:
    """Saves steps of a run one after the other in a background thread."""

    def __init__(
        self,
        roots: Sequence[Root],  # the nearest first
        processes: Processes,
        options: SaveOptions,
        tiers: Tiers | None,
    ) -> None:
        self.decision: Decision | None = None  # the latest
        self.timings: deque[Timing] = deque(maxlen=_MAX_TIMINGS)  # of saves and restores
        self._options, self._tiers, self._processes = options, tiers, processes
        self._roots, self._root = roots, roots[0]  # where steps are saved
        self._index, limit_s = self._root.index, processes.timeout_s
        self._closing = ExitStack()  # given back after the last save
        self.incremental = Incremental(self._root, wanted=options.incremental)
        self._pace = Pace(options.policy.max_write_bytes_per_s)  # of saves to the directory
        hurries = [self._pace.lift, *([tiers.uploader.worker.hurry] if tiers else [])]
        # A little longer than a meeting, whose error is the same in every process.
        self.worker = Worker[SaveHandle](
            name=f"jaxckpt-manager {self._index.root}",
            where=self._index.root,
            timeout_s=limit_s + min(_LAST_WORDS_S, limit_s / 4),
            idle=self._idle,
            hurry=lambda: [hurry() for hurry in hurries],
            last=self._closing.close,
        )
        self.ledger = roots[-1].ledger
        self._closing.callback(self._in_ledger, self.ledger.close)
        self._closing.callback(self.incremental.end)
        saves = [self.worker] if tiers is None else [self.worker, tiers.uploader.worker]
        about = options.run_metadata, tiers and tiers.settled
        opened = open_roots(roots, saves, *about) if options.writes else look_at(roots)
        if is_new := opened.newest < 0:
            self.ledger.note(began=0)
        self.session, policy, now_s = opened.session, options.policy, time.monotonic()
        schedule = Schedule(
            policy=policy, processes=processes.count, started_s=now_s, is_new=is_new
        )
        local = [replace(schedule, policy=tiers.save)] if tiers and tiers.save else []
        self.due = DueSteps([schedule, *local], processes, opened.session)
        self.position = Position(roots, processes, opened)
        self._left = opened.local_only  # the step to upload once the run is ours
        if opened.owned:
            self._upload_left()
        listens = options.writes and policy.on_preemption
        self.preemption = Preemption(processes, listens=listens, notice=options.notice)
        self._closing.callback(self.preemption.close)
        self._latest: SaveHandle | None = None
        self._for_preemption: SaveHandle | None = None
        self.comparisons = Comparisons(self._index, processes, policy, options.item)
        copying = options.item, options.zstd, self.incremental, self.comparisons
        self._taking = Taking(roots, processes, *copying)

    def _upload_left(self) -> None:
        if self._tiers is not None and self._left >= 0:
            self._tiers.uploader.resume(self._left)

    @property
    def ended(self) -> str:
        """Returns why the run is closed, or ""."""
        return self._root.opening.ended

    def close(self, why: str) -> list[BaseException]:
        """Ends the saves, then their uploads, and releases the run; returns their errors."""
        errors: list[BaseException] = []
        saves = self.worker.under_way()
        for root in self._roots:
            try:
                root.opening.end(why)
            except Exception as error:
                errors.append(error)
        if self._tiers is not None:
            errors += self._tiers.uploader.worker.take_errors()
        # Also after another manager has closed it.
        return [*errors, *self.take_errors(saves)]

    def fence(self) -> None:
        """Raises SaveFailed if another job has taken the run over; for saves beside the manager."""
        if self._processes.index == 0:
            self._root.owner.fence()

    def owns(self) -> bool:
        """Returns whether no other job has taken the run over since this one did."""
        return self._root.owner.owns()

    # --- which calls save ------------------------------------------------------------------------

    def decide(self, step: int, *, force: bool = False) -> Decision:
        """Returns whether a step is saved: for preemption, by force or by a rule."""
        return self._decide(step, force)[0]

    def _decide(self, step: int, force: bool) -> tuple[Decision, bool]:
        """Returns the decision, and whether the step goes to the directory."""
        self.ledger.saw(as_new_step("save", step))
        self.decision, _ = decided = self._decided(step, force)
        return decided

    def _decided(self, step: int, force: bool) -> tuple[Decision, bool]:
        def because(reason: str, *, save: bool = True) -> tuple[Decision, bool]:
            return Decision(step=step, save=save, reason=reason), True

        if not self._options.writes:
            return because("the manager was opened with mode='r'", save=False)
        if not force and (why := self.position.why_not(step, self._saving)):
            return because(why, save=False)
        if self.preemption.reached(step) and not self._is_saved_for_preemption():
            return because(_PREEMPTION)
        # Deleting old steps after a commit does not count.
        if force:
            return because("force")
        return self.due.decide(step, lambda: not all(one.done() for one in self.worker.under_way()))

    def _saving(self) -> list[int]:
        """Returns the steps under way."""
        return [one.step or 0 for one in self.worker.under_way() if one.job.request.problem is None]

    def _is_saved_for_preemption(self) -> bool:
        """Waits for the save for preemption; all processes retry a failed one."""
        if self._for_preemption is None:
            return False
        self.worker.wait([self._for_preemption])
        return self._for_preemption.timing is not None

    def go_on(self, step: int, first: int, *, is_newest: bool) -> None:
        """Continues from a restored step; see `Position.go_on`."""
        for root in self._roots:
            if not root.owner.is_guest or step in (root.known_steps() or ()):
                root.owner.seen = max(root.owner.seen, step)
        self.comparisons.ask()
        go_on = partial(self.position.go_on, step, first, self.wait, is_newest=is_newest)
        if self._options.writes and go_on():
            self._went_back()

    def wait(self) -> None:
        """Waits for the saves under way, except in their thread."""
        if (saves := self.worker.under_way()) and not self.worker.is_own_thread():
            self.worker.wait(saves)

    def wait_for_first(self) -> None:
        """Does the same while no step is committed here: other hosts may have the first already."""
        if self.position.base < 0:
            self.wait()

    def go_back(self) -> None:
        self.position.go_back()
        self._went_back()

    def begin_anew(self) -> None:
        self.wait()  # else their threads decide what this leaves
        self.position.begin_anew()
        self._went_back()

    def _went_back(self) -> None:
        self.incremental.clear()
        if self._tiers is not None:
            self._tiers.sender.go_back(self.position.floor)

    def restored(self, step: int, meter: Meter, start_s: float) -> None:
        """Records a restore of the state; later steps that are there stay, and are reported."""
        self.position.later = range(step + 1, max(self.position.floor, self.position.base) + 1)
        self.timings.append(meter.timing())
        restore_s = time.monotonic() - start_s
        self.due.record(restore_s=restore_s)
        self.ledger.restored(step, restore_s)

    # --- in the caller's thread ------------------------------------------------------------------

    def save(self, given: Given, *, force: bool) -> SaveHandle | None:
        entered_s, step = time.monotonic(), given.step
        decision, given.is_durable = self._decide(step, force)
        if decision.save and not self.position.is_owned:
            self.position.join(step)
            self._upload_left()
            decision, given.is_durable = self._decide(step, force)
        if not decision.save:
            raise_first(self.take_errors())
            return None
        known = self.position  # these numbers are alike in all processes
        if step <= max(known.agreed, known.found.restorable.step, known.last):
            self._look_again(step)
        if is_last := decision.reason == _PREEMPTION:
            self.ledger.note(end=PREEMPTED)
            self.worker.hurry()  # nothing trains beside this save, nor beside the previous save
        # Only now: asking for a step's path may list the root, and most calls save nothing.
        meter = Meter("save", self._index.path(step), step=step)
        errors = self._make_room(step)
        meter.waited()
        # By the step: a call that only some processes make must not shift the later ones.
        name = f"manager {self.session}/{step}"
        agreed = self._agree(name, step, errors) if self.due.is_by_clock else None
        meter.watch(display(self._options.on_progress, self._processes.index))
        try:
            problem = self._problem_of(partial(self._check_and_take, given, meter, errors))
            self.position.last = max(step, self.position.last)
            blocked_s = self.due.move_on(step, entered_s, agreed, is_durable=given.is_durable)
            self.ledger.add(blocked_s=blocked_s)
            handle = self._begin(given, name, meter, problem, skips=bool(errors))
        except BaseException:
            meter.end()
            raise
        if is_last:
            self._for_preemption = handle
            self._explain_what_fits(step, handle.job.size_bytes)
        if handle.job.request.problem is not None:
            raise handle.job.request.problem
        return handle

    def _look_again(self, step: int) -> None:
        """Goes back if others have deleted this step and all later ones, in every place."""
        if is_apart(self._root):
            self.wait()
            if are_gone(self._roots, step, self.position.base):
                self.go_back()

    def _begin(
        self, given: Given, name: str, meter: Meter, problem: Exception | None, *, skips: bool
    ) -> SaveHandle:
        """Lets the saving thread write what was taken, or report why that is not possible."""
        step, root, upload, durable = given.step, self._root, None, None
        if self._tiers is not None:
            root, upload = self._choose_root(self._tiers, given, name)
            if root is self._root:
                durable = partial(self._tiers.uploader.wait_for, step, upload)
        attempt = f"{name}/{self._processes.uses(meeting_of(name))}"
        token = hashlib.sha256(attempt.encode()).hexdigest()[:16]
        work = commit_of(root.index.storage, root.index.path(step)).work(token)
        if problem is None and not self.incremental.link(given.taken, root, work):
            taking = self._taking
            problem = self._problem_of(lambda: taking.take(given, meter, self.worker.under_way()))
        self.comparisons.count(given.replicas)
        request = self._request(given, root, name, token, meter, problem=problem, skips=skips)
        self._latest = handle = SaveHandle(SaveJob(request), self.worker, durable)
        trees = given.trees if self.incremental.storage else []
        follow = partial(self._follow, handle, root, upload, given.numbers)
        handle.begin(partial(self._finish_step, handle, root, trees, follow))
        return handle

    def _check_and_take(self, given: Given, meter: Meter, errors: list[BaseException]) -> None:
        # Raised in here because another process may not know of these errors and save.
        raise_first(errors)
        self.position.check(given.step, self._saving())
        self.position.later = range(0)  # then nothing later is left
        given.custom_metadata = check_metadata(given.custom_metadata)
        self._taking.take(given, meter, self.worker.under_way())

    def _request(
        self, given: Given, root: Root, name: str, token: str, meter: Meter, **options: Any
    ) -> SaveRequest:
        step, index = given.step, root.index
        known = step if root.counts(step, self.position.floor) else None
        is_paced = root is self._roots[-1] and self._pace.max_bytes_per_s is not None
        life, fence = self.position.life(token), partial(root.owner.fence, known)
        if self._tiers is not None and root is not self._root:
            fence = partial(self._tiers.fence, step, life)
        return SaveRequest(
            storage=index.storage,
            path=index.path(step),
            items=given.taken,
            item=self._options.item,
            group=root.group,
            name=name,
            meter=meter,
            custom_metadata=given.custom_metadata or {},
            is_step=True,
            token=token,
            fence=fence,
            pace=self._pace.wait if is_paced else int,
            overwrite=known is None or step in index.astray,  # of an earlier life
            life=life,
            replicas=given.replicas,
            **options,
        )

    def _problem_of(self, do: Callable[[], None]) -> Exception | None:
        """Returns the error of `do`, which the other processes hear before it is raised."""
        try:
            do()
        except Exception as error:
            if self._processes.count == 1:
                raise
            return error
        return None

    def _agree(self, name: str, step: int, errors: list[BaseException]) -> Costs:
        """Returns the costs that process 0 has measured; a wait for them raises all errors."""
        try:
            if self._latest is not None:
                self.worker.wait([self._latest])  # process 0 reports how long it took
            return self.due.agree(f"{name}/costs", step)
        except Exception as error:
            raise_first([*errors, error])
            raise

    def _choose_root(self, tiers: Tiers, given: Given, name: str) -> tuple[Root, Upload | None]:
        """Returns where to save a step, and its upload from there if it goes to the directory."""
        under_way = sum(handle.job.size_bytes for handle in self.worker.under_way())
        size_bytes = sum(item.size_bytes for item in given.taken) + under_way
        root = tiers.choose_root(size_bytes, name, self.position.floor)
        if root is not self._root:
            tiers.sender.newest_direct = given.step
        return root, tiers.sender.expect(given.step) if given.is_durable else None

    def _explain_what_fits(self, step: int, size_bytes: int) -> None:
        """Logs what fits into the time that is left; then an older upload gives way to this one."""
        left_s = self.preemption.left_s
        with suppress(CheckpointError):  # a host may have ended already
            brief, name = self._processes.within(_LAST_WORDS_S), f"manager {self.session}/left"
            left_s = brief.gather(name, left_s, lambda all_: min(filter(None, all_), default=None))
        if self._processes.index != 0:
            return
        save_s, tiers = self.due.schedules[0].costs.save_s, self._tiers
        upload_s = None if tiers is None else tiers.sender.seconds_for(size_bytes)
        text, fits = what_fits(left_s, save_s, upload_s, self._options.item if tiers else "")
        if fits and upload_s is not None and tiers is not None:
            tiers.uploader.urgent = step
        self._index.warn(f"saving step {step} for {text}")

    # --- waiting ---------------------------------------------------------------------------------

    def take_errors(self, waited_for: Sequence[SaveHandle] = ()) -> list[BaseException]:
        """Returns the errors of saves and uploads that this thread has not raised; see `Worker`."""
        errors = self.worker.take_errors(waited_for)
        # With several processes, only the next save reports process 0's errors to all.
        if self._tiers is not None and self._processes.count == 1:
            errors += self._tiers.uploader.worker.take_errors()
        return errors

    def _make_room(self, step: int) -> list[BaseException]:
        """Waits until another save may begin; returns the errors that have not been raised yet.

        At most one save is under way then: the new one waits for it. A job that is killed loses
        these two. Both fit into the budget, if the new one is as large as the latest. No earlier
        attempt to save the same step is under way: its meeting tells how many there were.
        """
        errors: list[BaseException] = []
        budget_bytes, handles = self._options.budget_bytes, self.worker.under_way()
        size = self._latest.job.size_bytes if self._latest is not None else 0
        try:
            why = f" and leave no room for a second one in budget_bytes={budget_bytes}"
            # The last of them is the latest.
            fits = 2 * size <= budget_bytes and all(one.step != step for one in handles)
            self.worker.wait(handles[:-1] if fits else handles, why=why)
        except Exception as error:  # raised once the other processes can hear of it
            errors.append(error)
        # With several processes, only the next save reports process 0's errors to all.
        uploads = [] if self._tiers is None else self._tiers.uploader.worker.take_errors()
        return [*errors, *self.take_errors(), *uploads]

    def wait_for_all(self, timeout_s: float | None = None) -> None:
        """Waits until all saves have ended and the files that the next may share are read back.

        Raises their errors in every thread that waits.
        """
        handles = self.worker.under_way()
        self.worker.wait(handles, timeout_s)
        self.worker.settle(timeout_s)
        raise_first(self.take_errors(handles))

    # --- in the thread ---------------------------------------------------------------------------

    def _idle(self) -> None:
        """Reads back what the next step may share, then brings the ledger up to date."""
        self.incremental.read_back()
        self._in_ledger(self.ledger.write)

    def _in_ledger(self, write: Callable[[], None]) -> None:
        """Writes the ledger, unless the directory behind a local tier does not answer."""
        if self._tiers is None:
            write()
        else:
            with suppress(OSError):
                self._roots[-1].reach.ask(write)
        self._roots[-1].deletion.failed |= self.ledger.failed

    def _finish_step(
        self, handle: SaveHandle, root: Root, trees: Sequence[TreeItem], follow: Callable[[], None]
    ) -> None:
        """Saves a step, and does what follows its commit; the next may share files of `trees`."""
        root.announce(handle.step or 0)
        if self.position.base < 0 and self._root.group.part is not None:
            self._root.owner.begin(handle.job.request.token or "")
        if not handle.attempt():
            self.incremental.fail(handle.error)
            return
        root.index.astray.discard(handle.step or 0)  # it has taken the place of such a step
        self.incremental.remember(trees, root, handle.path)
        follow()
        fingerprint.prepare()  # once the upload is under way

    def _follow(
        self, handle: SaveHandle, root: Root, upload: Upload | None, metrics: Mapping[str, Any]
    ) -> None:
        """Records a commit, deletes steps and calls `on_commit`."""
        request = handle.job.request
        timing, step, tiers = handle.timing, handle.step, self._tiers
        assert timing is not None  # it is committed
        assert step is not None
        self.timings.append(timing)
        self.position.committed(step)
        self.ledger.add(saves=1, saving_s=timing.seconds)
        self.ledger.note(saved=step)
        self.due.record(save_s=timing.seconds, mtbf_s=learned_mtbf_s(self.ledger.starts))
        if request.replicas is not None:
            self.comparisons.end(step, request.replicas)
        marked = () if request.replicas is None else request.replicas.marked
        info = StepInfo(step=step, saved_s=time.time(), metrics=dict(metrics), differences=marked)
        name = f"{request.name}/kept"
        life = request.life() if tiers is not None and root is tiers.local else None
        if life is not None and root.group.part is not None:
            learn_lone(root, name)
        with leading(self._processes, name, where=self._index.root) as led:
            if self._processes.index == 0:  # only it knows the metrics
                if tiers is not None and upload is not None:
                    tiers.follow(root, upload)
                is_good = root.committed(info, life, tiers.uploader.steps if tiers else tuple)
                led.value = [is_good, tiers and tiers.decided()]
        is_good, decided = led.value
        if not is_good:
            self.incremental.clear()
        if tiers is not None:
            tiers.follow_decided(decided)
        if life is not None and root.group.follows:
            root.follow(info, life, decided["stay"], is_good=is_good)
        if self._options.on_commit is not None:
            with calling(f"on_commit; step {step} is committed"):
                self._options.on_commit(timing)
        request.meter.raise_error()
