"""Restores a step of a run, or an earlier one if the step is damaged."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from jaxckpt._disk.find import LISTINGS, marked_as
from jaxckpt._disk.found import Found
from jaxckpt._run.candidates import Candidates
from jaxckpt._run.copies import Copy, Saved
from jaxckpt._run.coverage import Coverage
from jaxckpt._run.index import StepIndex
from jaxckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    CheckpointTimeout,
    CorruptCheckpoint,
    ProcessesDisagree,
    is_io_failure,
)
from jaxckpt.format import names
from jaxckpt.multihost import lead, meet
from jaxckpt.storage import check_listed

T = TypeVar("T")
Check = Callable[[Found | None], None]


class _Marked(CorruptCheckpoint):
    """Replicas differed when the step was saved; it is restored only if no other step can be."""


class NeverWhole(CheckpointNotFound):
    """All steps are parts on local disks, as of a first save that was interrupted."""


# The errors that mean a damaged step, by their mark in a report.
_DAMAGE: Final = {"marked": _Marked, "corrupt": CorruptCheckpoint, "absent": CheckpointNotFound}
_BAD: Final = ("marked", "corrupt")  # damage and not a lack
_FAILED: Final = "failed"  # the mark of an I/O error of the disk of one host


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(Candidates):
    """Restores steps of a run, the same steps in every process."""

    budget_bytes: int  # host memory for what comes from other disks
    writes: bool  # if True, sets damaged steps aside; if False, leases steps while reading
    on_damage: Callable[[], None]  # called when a copy is found damaged

    def report_alike(self, text: str) -> None:
        """Reports a step in all processes, and logs it in one."""
        self.roots[0].index.report(text, logs=self.processes.index == 0)

    def first_whole(
        self,
        wanted: Any,
        reading: Callable[[StepIndex, int, Check], T],
        *,
        fallback: bool,
        copies: Sequence[Copy] | None = None,
        again: int = LISTINGS - 1,
        avoids_marked: bool = True,
    ) -> tuple[int, int, T]:
        """Reads the first complete copy of a step, the same in every process.

        A damaged copy is mended from the good one of the same step, or else set aside.

        Args:
            wanted: "latest", "best" or a number, which never falls back.
            reading: Reads a step, given a function that raises if it is gone.
            fallback: Whether to try the next step if all copies of one are damaged.
            again: How often to list the copies anew if one was deleted meanwhile: a newer or better
                step may have come.
            avoids_marked: Whether to prefer steps that are not marked, if there is a fallback.

        Returns:
            The step to try first, the one that was read, and its value.
        """
        copies = self.of(wanted) if copies is None else copies
        fallback = fallback and isinstance(wanted, str)
        anew = partial(self.first_whole, wanted, reading, fallback=fallback)
        if not copies:
            what = f"{self._name} {self.roots[-1].index.emptiness()}. Is it the right directory?"
            raise CheckpointNotFound(f"{what} A new run starts with restore_or(init).")
        damaged, failure = list[_Attempt](), None
        for copy in copies:
            if damaged and copy.step != damaged[-1].copy.step and (failure or not fallback):
                break
            try_ = self._try_united if copy.is_united else self._try
            read = partial(try_, copy, reading, avoids_marked=fallback and avoids_marked)
            attempt = read()
            if attempt.problem is not None and (attempt.failure or not copy.is_united):
                attempt = read()  # damaged only if seen twice
            if damaged and self._mends_with(attempt, damaged):
                attempt = read()
            if attempt.problem is None:
                # Only now: a run with only damaged steps must not come to look like a new one.
                for failed in damaged:
                    self._settle(failed, copy)
                return copies[0].step, copy.step, attempt.value
            if copy.is_united:  # and names what each disk lacks
                damaged = [one for one in damaged if one.mark in _BAD or one.copy.step != copy.step]
            damaged.append(attempt)
            failure = failure or attempt.failure
            self.on_damage()
            if again and not (attempt.mark in _BAD or failure):
                again -= 1
                if (now := self.of(wanted)) != copies:
                    return anew(copies=now, again=again)
        if failure is not None:
            raise failure
        if any(attempt.mark == "marked" for attempt in damaged):
            return anew(copies=copies, again=0, avoids_marked=False)
        if len(copies) == len(damaged) and all(attempt.is_first for attempt in damaged):
            raise NeverWhole(damaged[0].problem)
        if not fallback:
            raise damaged[0].error or self._other_failed(damaged[0].copy, str(damaged[0].problem))
        raise CheckpointNotFound(
            f"{self._name} has no step that can be restored. Tried {len(damaged)}:\n  "
            + "\n  ".join(f"step {one.copy.step}: {one.problem}" for one in damaged[:10])
            + "\nNothing was changed. To start over, use another directory or move the steps away."
        )

    def _mends_with(self, bad: _Attempt, damaged: Sequence[_Attempt]) -> bool:
        """Mends a step from another copy, which is damaged, too; the same in every process."""

        def is_bad(one: _Attempt) -> bool:  # a united copy is mended from the disks
            return one.mark == "corrupt" and not one.copy.is_united

        same = [one for one in damaged if one.copy.step == bad.copy.step]
        others = [self.roots[one.copy.root] for one in same if is_bad(one)]
        if not (self.writes and is_bad(bad) and others):
            return False
        mend = partial(self.roots[bad.copy.root].mend_with, bad.copy.step, others[0])
        return lead(self.processes, f"manager {self._name}/mended", mend, where=self._name)

    def _try(
        self,
        copy: Copy,
        reading: Callable[[StepIndex, int, Check], Any],
        *,
        avoids_marked: bool,
        index: StepIndex | None = None,
    ) -> _Attempt:
        """Reads a step in all processes, which agree on its damage; raises other errors.

        Args:
            index: Where to read it, if not where the copy is.
        """
        step, root = copy.step, self.roots[copy.root]
        index, value, error = index or root.index, None, None
        try:
            with nullcontext(True) if self.writes else root.leases.protect(step) as there:
                # Checked inside, where the processes report to each other: all enter, or none.
                check = partial(self._check, index, step, there, avoids_marked)
                try:
                    value = reading(index, step, check)
                except CorruptCheckpoint as damage:
                    check_listed(index.storage, damage.file or index.path(step))
                    raise
        except CheckpointTimeout:  # of a meeting: alike in all, which do not meet again
            raise
        except Exception as caught:  # reported to the others, then judged
            error = caught
        mark = next((m for m, kind in _DAMAGE.items() if isinstance(error, kind)), "")
        if error is not None and root.group.part is not None and is_io_failure(error):
            mark = _FAILED  # other disks, or the directory, may have the step
        name, where = f"manager {self._name}/restored", f"restoring {root.index.path(step)}"
        met = meet(self.processes, name, socket.gethostname(), error, mark=mark, where=where)
        what, failure = f"step {step} of {root.index.root} was not restored", None
        if not any(met.marks.values()):
            met.check(None if isinstance(error, ProcessesDisagree) else error, what)
        if _FAILED in met.marks.values():
            failure = met.error(error if mark == _FAILED else None, what)
        bad = ((i, met.problems[i]) for i, found in met.marks.items() if found)
        who, problem = next(bad, (0, None))
        if problem is not None and self.processes.count > 1:
            problem = f"process {who} on {met.values[who]}: {problem}"
        worst = next((m for m in _DAMAGE if m in met.marks.values()), "")
        if problem is not None and not mark:
            error = self._other_failed(copy, problem) if worst in _BAD else None
        return _Attempt(
            copy=copy,
            value=value,
            problem=problem,
            mark=worst,
            error=error,
            is_mine=bool(mark),
            failure=failure,
        )

    def _try_united(
        self, copy: Copy, reading: Callable[[StepIndex, int, Check], Any], *, avoids_marked: bool
    ) -> _Attempt:
        """Reads a step from the disks of all processes; mends what is damaged on this one."""
        local, directory, step = self.roots[0], self.roots[-1], copy.step
        disks = Coverage(local, directory, step, self.processes, self.budget_bytes)
        with closing(disks.scratch):
            problem, error = disks.introduce(), None
            read = partial(self._try, copy, reading, avoids_marked=avoids_marked)
            while problem is None:
                attempt = read(index=disks.scratch.index)
                if attempt.problem is None or attempt.mark == "marked" or attempt.failure:
                    break
                error = attempt.error if attempt.is_mine else None
                problem = disks.complete(error)
            else:
                return _Attempt(
                    copy=copy,
                    problem=problem,
                    error=CheckpointNotFound(problem),
                    is_mine=error is not None,
                    is_first=disks.is_first,
                    failure=disks.failure(problem),
                )
            if attempt.problem is None:
                self.report_alike(disks.said())
                if disks.scratch.is_damaged:
                    self.roots[0].mend(copy.step, disks.scratch.index)
            return attempt

    def _check(
        self,
        index: StepIndex,
        step: int,
        there: bool,
        avoids_marked: bool,
        found: Found | None = None,
    ) -> None:
        """Checks a step before it is found, or that it is not marked."""
        if found is not None and found.record is not None:
            self.roots[0].lives[step] = Saved.of(step, found.record.life)
        if found is None:
            index.check_there(step)
            if not there:
                raise CheckpointNotFound(f"{index.path(step)} is being deleted")
        elif found.differences and avoids_marked:
            raise _Marked(marked_as(found), file=f"{found.path}/{names.RECORD}")
        elif found.differences:
            index.report(f"step {step} is restored, though {marked_as(found)}")

    def _other_failed(self, copy: Copy, problem: str) -> CheckpointError:
        path = self.roots[copy.root].index.path(copy.step)
        text = f"{path}: another process found the step damaged: {problem}"
        return CorruptCheckpoint(text, file=path)

    def _settle(self, failed: _Attempt, good: Copy) -> None:
        """Mends a damaged copy or sets it aside, if this process may; else reports it."""
        error, step, root = failed.error, failed.copy.step, self.roots[failed.copy.root]
        # A leader settles the damage that a mate has found, too.
        leads = root.group.leads and (failed.is_mine or root.group.mates.count > 1)
        if failed.copy.is_united or (good.is_united and good.step == step):
            if good.step != step:  # else it is mended already, or other copies did
                self.report_alike(str(failed.problem))
            return
        if not (self.writes and leads and isinstance(error, CorruptCheckpoint)):
            root.index.report(f"step {step} cannot be restored and is skipped: {failed.problem}")
        elif good.step != step or not root.mend(step, self.roots[good.root].index):
            root.deletion.set_aside(step, str(failed.problem), file=error.file)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    copy: Copy
    value: Any = None  # read by this process
    problem: str | None  # the damage, worded alike in every process
    mark: str = ""  # see `_DAMAGE`, alike in every process
    error: Exception | None = None  # for this process to raise
    is_mine: bool = False  # whether this process found the damage
    is_first: bool = False  # whether it is of a first save that was never committed
    failure: Exception | None = None  # if a disk failed in any process: no older step is restored
