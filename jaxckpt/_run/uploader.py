"""Brings the steps that a run saved locally to its directory, in one background thread.

    wait      for a local commit of a step that is due there; the newest step goes first
    upload    its finished files, and commit them, see `upload`
    delete    steps that the policy of the directory does not keep
    again     after an error that may pass, until `timeout_s` after the local commit

Training never waits for it: the queue is bounded, and what no longer fits is dropped and reported.

Where each host has a disk of its own, each process sends its part by itself. Process 0 chooses the
step, by beginning it in the directory, where the others look for it. There it also waits for their
parts. After each local commit it tells them which steps are not uploaded yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, final

from jaxckpt._disk.pace import GaveWay
from jaxckpt._run.copies import over_bound
from jaxckpt._run.sender import Sender, Upload, may_pass
from jaxckpt._save.worker import AGAIN, Failure, Worker
from jaxckpt.errors import CheckpointNotFound, CheckpointTimeout, SaveFailed, is_full
from jaxckpt.multihost import Processes, lead, meeting

MEET_S: Final = 5.0  # for a meeting before a wait that is shorter
_MOST_WAITING: Final = 2  # besides the upload under way
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_FIRST_LOOK_S: Final = 0.05  # between looks for a step that process 0 has begun
_LONGEST_LOOK_S: Final = 2.0


@final
class Uploader:
    """The steps on their way from one root to another. Process 0 decides which, and commits."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self._processes, self._leads = sender.processes, sender.processes.index == 0
        # Those that have parts of a step, of which process 0 decides when they are sent.
        self._senders: Processes = sender.source.group.leaders
        self._taken = set[tuple[int, str]]()  # steps, with tokens, whose upload has begun here
        self._given_up: list[int] = []  # steps whose upload ended with an error
        self._pause_s = 0.0
        self._is_full = False  # whether the last upload found no room
        self._sent_s = 0.0  # when the last step that was sent began to wait
        # The step to which an older upload gives way as soon as this step is committed locally.
        self.urgent: int | None = None
        self._report, self._root = sender.source.index.report, sender.target.index.root
        self.worker = Worker[Upload](
            name=f"jaxckpt-upload {self._root}",
            where=self._root,
            timeout_s=self._processes.timeout_s,
            idle=lambda: sender.begun and sender.clear(self.attempts, self._sent_s),
            hurry=self._hurry,
            pick=self._pick,
            stopping=self._stop,
            late=lambda when: sender.left(self.steps(), when),
            refusal="an upload cannot wait for itself",
        )

    # --- in the threads of the caller and of the saves -------------------------------------------

    def put(self, one: Upload) -> None:
        """Adds a step that is committed locally."""
        one.since_s = time.monotonic()
        self.worker.put(one, partial(self._send, one))
        self.drop_oldest()
        if one.step == self.urgent and one is not self.worker.current:
            self.sender.pace.give_way()

    def attempts(self, only: Upload | None = None) -> list[tuple[int, str]]:
        """Returns the steps that are not uploaded yet, each with its token; "" if unknown."""
        found = sorted([only] if only else self.worker.under_way(), key=lambda one: one.step)
        return [(one.step, self.sender.token_of(one)) for one in found]

    def follow(self, attempts: Iterable[tuple[int, str]], urgent: int | None = None) -> None:
        """Lets a process other than 0 send its parts of these steps, once they have begun.

        Process 0 tells the tokens: a process that has lost its part refuses it by them.
        """
        if self._senders.index == 0:
            return
        steps, self.urgent = dict(attempts), self.urgent if urgent is None else urgent
        with self.worker.lock:
            if (current := self.worker.current) is not None:
                self._taken.add((current.step, current.token))
                if self.urgent in steps and self.urgent != current.step:
                    self.sender.pace.give_way()
            left = {one.step: one for one in self.worker.under_way() if one is not current}
            self._taken.difference_update((step, one.token) for step, one in left.items())
            self._taken.intersection_update(steps.items())
            new = [step for step, token in steps.items() if (step, token) not in self._taken]
            for step in left.keys() - new:
                self.worker.remove(left[step])
            waiting = [left.get(step) or self.sender.expect(step, is_ours=False) for step in new]
            for one in waiting:
                one.token = one.token or steps[one.step]
                self.worker.put(one, partial(self._send, one))
        for one in waiting:
            self.sender.token_of(one)

    def note_committed(self, one: Upload) -> None:
        """Records a step that was saved in the directory itself."""
        with self.worker.lock:
            self.sender.newest = max(one.step, self.sender.newest)
            one.has_ended = True
            self.worker.changed.notify_all()

    def resume(self, step: int) -> None:
        """Adds a local step that an earlier job did not upload; called in every process."""
        if self._leads:
            self.put(self.sender.expect(step, is_ours=False))
        with self.worker.lock:
            self._taken = {one for one in self._taken if one[0] != step}
        self.follow([(step, ""), *self.attempts()])

    # --- in any thread ---------------------------------------------------------------------------

    def drop_oldest(self, most: int = _MOST_WAITING) -> None:
        """Drops waiting uploads; if all, the local root may delete their steps."""
        if not self._leads:  # process 0 decides
            return
        with self.worker.lock:
            current = self.worker.current
            waiting = [one for one in self.worker.under_way() if one is not current]
            gone = over_bound([one.step for one in waiting], most=most)
            for one in [one for one in waiting if one.step in gone]:
                why = f"{one.path} was not uploaded: newer steps wait for a slow store"
                self._report(f"{why}. Step {one.step} stays local while it is kept there")
                one.error, one.has_ended = SaveFailed(why), True
                self.worker.remove(one)

    def steps(self) -> list[int]:
        """Returns the steps that are not uploaded yet, the newest last."""
        return sorted(one.step for one in self.worker.under_way())

    def wait_for(
        self, step: int, one: Upload | None, saved: Callable[[], None], timeout_s: float | None
    ) -> None:
        """Waits until a step is committed locally, then in the directory, alike in all processes.

        Raises:
            ValueError: it is not uploaded.
            CheckpointTimeout: it is not, after `timeout_s`; the upload continues.
            Any error of the upload.
        """
        if one is None:
            saved()
            why = f"the policy `save` does not name it for {self._root}"
            raise ValueError(f"step {step} stays in {self.sender.source.index.root}: {why}")
        self.worker.refuse_own_thread()
        limit_s = self._processes.timeout_s if timeout_s is None else timeout_s

        def wait() -> None:
            with self.worker.lock:
                is_over = self.worker.changed.wait_for(
                    lambda: one.has_ended and one is not self.worker.current, limit_s
                )
            if not is_over:
                text = f"{one.path}: the upload continues and has not ended after {limit_s:g} s"
                text += f"; it waits for processes {one.waits_for}" * bool(one.waits_for)
                raise CheckpointTimeout(text, missing=one.waits_for)
            if one.failure is not None:
                one.failure.hear()
            if one.error is not None:
                raise one.error

        name, job = f"upload {one.path}", self.sender.source.group.job
        local_s = job.timeout_s if timeout_s is None else timeout_s
        # Otherwise a process whose local save is late would leave the others, and be a call behind.
        with meeting(job.within(local_s + MEET_S), f"{name} saved", where=one.path):
            saved()
        processes = self._processes.within(limit_s + self._processes.timeout_s)
        lead(processes, name, wait, where=one.path)

    def _stop(self, finish: Callable[[], None]) -> None:
        """Waits in process 0 until everything is uploaded; others send their parts meanwhile."""

        def wait() -> None:
            finish()
            if left := [n for n in self._given_up if n > self.sender.newest]:
                self._report(self.sender.left(left))

        senders = self._senders.within(self._processes.timeout_s + _LONGEST_PAUSE_S)
        lead(senders, f"uploads {self._root}/end", wait, where=self._root)

    def _hurry(self) -> None:
        """Lifts the limit of the rate and ends the pause after an error."""
        self.sender.pace.lift()
        with self.worker.lock:
            self._pause_s = 0.0
            self.worker.changed.notify_all()

    # --- in the thread ---------------------------------------------------------------------------

    def _pick(self) -> Upload | None:
        """Waits out the pause after an error; returns the newest step that may be sent."""
        worker, look_s = self.worker, _FIRST_LOOK_S
        self.drop_oldest(_MOST_WAITING + 1)  # including the upload to pick
        with worker.lock:
            worker.changed.wait_for(lambda: worker.is_stopped or not self._pause_s, self._pause_s)
        while not worker.is_stopped:
            self.sender.pace.gives_way = False  # before the look that shows what is urgent
            waiting = sorted(worker.under_way(), key=lambda one: -one.step)
            if not waiting:
                return None
            for one in waiting:
                if self._leads or self.sender.has_begun(one):
                    return one
                if one.step == self.urgent:  # process 0 is about to begin it
                    break
            with worker.lock:
                worker.changed.wait(look_s)
            look_s = min(2 * look_s, _LONGEST_LOOK_S)
        return None

    def _send(self, one: Upload) -> object:
        """Sends a step, or returns `AGAIN` after an error that may pass."""
        with self.worker.lock:
            self._taken.add((one.step, one.token))
        try:
            if self.sender.begun:  # if there was no room, this takes that of the others
                is_alone = self._is_full and self._senders.count == 1
                self.sender.clear(partial(self.attempts, one if is_alone else None), self._sent_s)
            self.sender.send(one, self.steps)
        except BaseException as error:
            return self._again_or_end(one, error)
        self._pause_s, self._is_full, self._sent_s = 0.0, False, one.since_s
        self.sender.target.reach.answered()
        return self.note_committed(one)

    def _again_or_end(self, one: Upload, error: BaseException) -> object:
        waited_s, cause = time.monotonic() - one.since_s, error.__cause__ or error
        self._is_full = is_full(cause)
        if isinstance(error, Exception):  # else this thread may be able to read nothing
            self.sender.note_begun(one)
        gave_way = isinstance(error, GaveWay)
        if not (gave_way or may_pass(error)) or waited_s > self._processes.timeout_s:
            return self._end(one, error)
        self.sender.source.index.warn(f"{one.path} is not uploaded yet, and tried again: {error}")
        longer_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
        self._pause_s = 0.0 if gave_way else longer_s
        return AGAIN

    def _end(self, one: Upload, error: BaseException) -> None:
        # If a store failed, the next job tries again: it must not find the part refused.
        if not self._leads and isinstance(error, Exception) and not may_pass(error):
            self.sender.refuse(one, error)
        if left := self.sender.left([one.step]) if may_pass(error) else "":
            error.add_note(left)
            self._given_up.append(one.step)
        one.error, one.has_ended = error, True
        if isinstance(error, CheckpointNotFound) or not one.is_ours:
            self._report(f"{one.path} was not uploaded: {error}. {left}".rstrip())
        else:
            one.failure = Failure(error, one.caller)
