"""The manager behaves like a model in random histories of saves, crashes, damage and readers."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import uuid
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxckpt import (
    CheckpointManager,
    CheckpointNotFound,
    CorruptCheckpoint,
    KeepPolicy,
    SaveFailed,
    SavePolicy,
    StepExists,
)
from jaxckpt.format import names
from jaxckpt.storage import LocalStorage, is_temporary_file
from jaxckpt.testing import CrashingStorage, FailingStorage, SimulatedCrash
from jaxckpt.types import StepInfo

FULL = OSError(errno.ENOSPC, "No space left on device")
# The handlers of signals are those of the test run.
SAVE = SavePolicy(on_preemption=False)


@dataclass
class Saved:
    """The model's record of an existing step."""

    serial: int
    metrics: dict[str, float]
    pinned: bool = False
    damaged: bool = False
    perhaps: bool = False  # damaged: a byte that was changed may be one that nobody reads
    readers: list[object] = field(default_factory=list)


def tree(serial):
    """A different one for each save; an array of TensorStore's and values."""
    large = np.arange(300, dtype=np.float32) + serial
    return {"large": large, "small": np.int64(serial), "text": f"save {serial}"}


def serial_of(found):
    """Returns the number of the save that a tree is from; fails if a bit of it is wrong."""
    serial = int(found["small"])
    wanted = tree(serial)
    assert found.keys() == wanted.keys()
    assert np.array_equal(found["large"], wanted["large"])
    assert found["text"] == wanted["text"]
    return serial


keeps = st.builds(
    KeepPolicy,
    last=st.none() | st.integers(1, 3),
    every_steps=st.none() | st.integers(2, 5),
    best=st.none() | st.integers(1, 2),
    metric=st.just("loss"),
    mode=st.sampled_from(["min", "max"]),
    when=st.none() | st.just(lambda info: info.step % 3 == 0),
)
gaps = st.integers(1, 3)
losses = st.none() | st.sampled_from([0.0, 1.0, 2.0, float("nan"), float("inf")])
# Of those that change something, a save and the deletions after it have about twenty.
verbs = st.integers(0, 24) | st.integers(10, 24)
picks = st.integers(0, 9)


class Runs(RuleBasedStateMachine):
    """A run of one job after the other, a reader beside them, and a disk that fills and fails."""

    def __init__(self, folder):
        super().__init__()
        self.root = f"{folder}/{uuid.uuid4()}"
        self.steps: dict[int, Saved] = {}
        self.serial = 0
        self.floor = -1
        self.manager = self.reader = None

    @initialize(keep=keeps)
    def start(self, keep):
        self.open(keep)
        self.reader = CheckpointManager(self.root, mode="r")

    def teardown(self):
        for saved in self.steps.values():
            self.let_go(saved)
        for manager in (self.manager, self.reader):
            if manager is not None:
                manager.close()
        shutil.rmtree(self.root)

    # --- what is done again and again ------------------------------------------------------------

    def open(self, keep):
        self.keep = keep
        self.manager = CheckpointManager(self.root, save=SAVE, keep=keep)
        self.floor = max(self.steps, default=-1)

    def entries(self):
        return os.listdir(self.root)

    def use(self, storage):
        """Has the manager's next calls go through a storage that goes wrong."""
        self.manager._index.storage = storage

    def begin_save(self, gap, loss):
        """Starts a save; returns its handle and what the model will know of it."""
        step = self.floor + gap
        self.serial += 1
        self.floor = step
        metrics = {} if loss is None else {"loss": loss}
        handle = self.manager.save(
            step, tree(self.serial), metrics=metrics, custom_metadata={"serial": self.serial}
        )
        return step, handle, Saved(serial=self.serial, metrics=metrics)

    def retained(self):
        """The steps that stay after a save: by the policy, by a pin, or since somebody reads."""
        infos = [
            StepInfo(step=step, saved_s=0.0, metrics=saved.metrics, pinned=saved.pinned)
            for step, saved in self.steps.items()
        ]
        kept = set(self.keep.kept(infos, now_s=0.0))
        return kept | {step for step, saved in self.steps.items() if saved.readers}

    def forget(self, steps):
        for step in steps:
            self.let_go(self.steps.pop(step))

    def let_go(self, saved):
        while saved.readers:
            saved.readers.pop().close()

    def adopt_what_was_deleted(self):
        """After trouble a step that is to go may be there, or not; none else is gone."""
        there = set(self.reader.all_steps())
        assert self.retained() <= there <= set(self.steps)
        self.forget(set(self.steps) - there)

    def check_tidy(self):
        """Nothing is left of saves and deletions that did not end."""
        left = [entry for entry in self.entries() if names.is_temporary(entry)]
        assert left == []
        known = {*map(str, self.steps), names.RUN, names.OWNER, names.LOCK, names.LEDGER}
        for entry in set(self.entries()) - known:
            assert names.is_set_aside(entry) or names.is_lease(entry) or is_temporary_file(entry)

    def pick(self, number, *, of=None):
        steps = sorted(self.steps if of is None else of)
        return steps[-1 - number % len(steps)]

    # --- saving ----------------------------------------------------------------------------------

    @rule(gap=gaps, loss=losses)
    def save(self, gap, loss):
        step, handle, saved = self.begin_save(gap, loss)
        handle.result(60)
        self.manager.wait_until_finished()

        self.steps[step] = saved
        self.forget(set(self.steps) - self.retained())
        self.check_tidy()

    @rule(gap=gaps, loss=losses, more=st.lists(gaps, min_size=1, max_size=2))
    def save_several_at_once(self, gap, loss, more):
        for one in [gap, *more]:
            step, _, saved = self.begin_save(one, loss)
            self.steps[step] = saved
            # The policy was applied after each of them.
            self.forget(set(self.steps) - self.retained())
        self.manager.wait_until_finished()

    @rule(gap=gaps, loss=losses, at=verbs, once=st.booleans())
    def save_to_a_disk_that_is_full(self, gap, loss, at, once):
        self.use(FailingStorage(LocalStorage(), at, FULL, once=once))
        before = self.floor
        step, handle, saved = self.begin_save(gap, loss)
        try:
            handle.result(60)
        except SaveFailed:
            self.floor = before  # its number is free
        else:
            self.steps[step] = saved
        self.manager.wait_until_finished()
        self.use(LocalStorage())

        if step in self.steps:
            self.adopt_what_was_deleted()
        assert not [entry for entry in self.entries() if names.ours_temporary(entry) is not None]

    @precondition(lambda self: self.steps)
    @rule(number=picks)
    def save_a_step_that_is_there(self, number):
        step = self.pick(number)
        assert self.manager.save(step, tree(0)) is None
        with pytest.raises((StepExists, ValueError)):
            self.manager.save(step, tree(0), force=True)

    # --- crashing and starting again -------------------------------------------------------------

    @rule(keep=keeps)
    def start_again(self, keep):
        self.manager.close()
        self.open(keep)
        self.check_tidy()

    @rule(gap=gaps, loss=losses, after=verbs, torn=st.booleans(), keep=keeps)
    def crash_while_saving(self, gap, loss, after, torn, keep):
        self.use(CrashingStorage(LocalStorage(), after, torn=torn))
        step, handle, saved = self.begin_save(gap, loss)
        acknowledged = False
        with suppress(SimulatedCrash):
            handle.result(60)
            acknowledged = True
        with suppress(SimulatedCrash):  # what is dead does nothing on closing
            self.manager.close()

        there = self.reader.all_steps()
        if step in there:
            self.steps[step] = saved
        assert step in there or not acknowledged
        self.adopt_what_was_deleted()
        self.open_after_a_crash(keep)

    def open_after_a_crash(self, keep):
        """Opens the run, which may finish a deletion that the one before had announced."""
        stay = self.retained()
        self.open(keep)
        there = set(self.reader.all_steps())
        assert stay <= there
        self.forget(set(self.steps) - there)
        self.check_tidy()

    @rule(keep=keeps, after=st.integers(0, 6), torn=st.booleans())
    def crash_while_opening(self, keep, after, torn):
        self.manager.close()
        owner = self.manager._directory.owner
        self.manager._index.storage = CrashingStorage(LocalStorage(), after, torn=torn)
        with suppress(SimulatedCrash):
            owner.open()
        owner.lock.release()

        self.open_after_a_crash(keep)

    # --- restoring -------------------------------------------------------------------------------

    def check_restored(self, candidates, step):
        """Restores; the first of the candidates that is whole is what there is then."""
        found = None
        try:
            found = serial_of(self.manager.restore(step=step))
        except CheckpointNotFound:
            restored = None
        else:
            restored = self.manager.restored_step
        for candidate in candidates:
            saved = self.steps[candidate]
            if candidate == restored:
                assert not saved.damaged or saved.perhaps
                assert found == saved.serial
                if candidate != candidates[0]:
                    self.floor = max(self.steps)
                return
            assert saved.damaged
            if restored is not None:  # a run without a whole step stays as it is
                assert any(
                    f"step {candidate} is damaged and was set aside" in problem
                    for problem in self.manager.problems
                )
                self.forget([candidate])
        assert restored is None

    @rule()
    def restore_the_latest(self):
        self.check_restored(sorted(self.steps, reverse=True), "latest")

    @precondition(lambda self: self.steps)
    @rule()
    def restore_the_best(self):
        infos = [StepInfo(step=n, saved_s=0.0, metrics=s.metrics) for n, s in self.steps.items()]
        self.check_restored([info.step for info in self.keep.ranked(infos)], "best")

    @precondition(lambda self: self.steps)
    @rule(number=picks, reading=st.booleans())
    def restore_a_step(self, number, reading):
        step = self.pick(number)
        saved = self.steps[step]
        manager = self.reader if reading else self.manager
        try:
            found = manager.restore_items(step=step)
        except CorruptCheckpoint:
            assert saved.damaged
        else:
            assert serial_of(found["state"]) == saved.serial
            assert str(found.get("metrics")) == str(saved.metrics)
            assert manager.custom_metadata(step) == {"serial": saved.serial}
            assert not saved.damaged or saved.perhaps

    @rule(gap=gaps)
    def restore_a_step_that_is_not_there(self, gap):
        with pytest.raises(CheckpointNotFound):
            self.manager.restore(step=max(self.steps, default=0) + gap)

    # --- by hand ---------------------------------------------------------------------------------

    @precondition(lambda self: self.steps)
    @rule(number=picks, on=st.booleans())
    def pin(self, number, on):
        step = self.pick(number)
        (self.manager.pin if on else self.manager.unpin)(step)
        self.steps[step].pinned = on

    @precondition(lambda self: self.steps)
    @rule(number=picks)
    def delete(self, number):
        step = self.pick(number)
        if self.steps[step].pinned or self.steps[step].readers:
            with pytest.raises(ValueError, match=r"pinned|reader"):
                self.manager.delete(step)
            return
        self.manager.delete(step)
        self.forget([step])
        self.floor = max(self.steps, default=-1)
        self.check_tidy()

    @precondition(lambda self: self.steps)
    @rule(number=picks)
    def begin_to_read(self, number):
        """A reader comes to a step, and stays there."""
        step = self.pick(number)
        watching = self.reader.watch(timeout_s=0.0, after=step - 1)
        assert next(watching) == step
        self.steps[step].readers.append(watching)

    @precondition(lambda self: any(saved.readers for saved in self.steps.values()))
    @rule(number=picks)
    def end_reading(self, number):
        step = self.pick(number, of=[n for n, saved in self.steps.items() if saved.readers])
        saved = self.steps[step]
        if not saved.damaged:
            assert serial_of(self.reader.restore(step=step)) == saved.serial
        saved.readers.pop().close()

    @rule(after=st.none() | st.integers(-1, 9))
    def watch(self, after):
        """A reader that does not stay sees all that is new to it."""
        seen = list(self.reader.watch(timeout_s=0.0, after=after))

        newest = sorted(self.steps)[-1:]
        assert seen == (newest if after is None else sorted(n for n in self.steps if n > after))

    # --- damage ----------------------------------------------------------------------------------

    @precondition(lambda self: any(not saved.damaged for saved in self.steps.values()))
    @rule(
        number=picks, file=picks, how=st.sampled_from(["flip", "cut", "remove"]), at=st.floats(0, 1)
    )
    def damage(self, number, file, how, at):
        step = self.pick(number, of=[n for n, saved in self.steps.items() if not saved.damaged])
        path = self.file_of(step, file)
        with open(path, "rb") as opened:
            data = bytearray(opened.read())
        place = int(at * (len(data) - 1))
        data[place] ^= 1 << (number % 8)
        if how == "remove":
            os.unlink(path)
        else:
            with open(path, "wb") as opened:
                opened.write(data if how == "flip" else data[:place])

        self.steps[step].damaged = True
        self.steps[step].perhaps = how == "flip"

    def file_of(self, step, number):
        """A file of a step by which it is known to be damaged, and by nothing else."""
        # Without its record a step may be one of Orbax; with another one it is another's. Where a
        # step cannot say what policies ask, it stays: there is a test of that below.
        spared = {names.COMMIT_MARKER, names.WRITER, names.PINNED}
        spared |= {names.RECORD, names.CHECKPOINT_METADATA}
        found = []
        for folder, _, files in os.walk(f"{self.root}/{step}"):
            if os.path.basename(folder) != names.METRICS_ITEM:
                found += [f"{folder}/{file}" for file in files if file not in spared]
        found = sorted(file for file in found if os.path.getsize(file))
        return found[number % len(found)]

    # --- what always holds -----------------------------------------------------------------------

    @precondition(lambda self: self.manager is not None)
    @invariant()
    def the_steps_are_those_of_the_model(self):
        assert self.manager.all_steps() == self.reader.all_steps() == sorted(self.steps)

    @precondition(lambda self: self.manager is not None)
    @invariant()
    def the_newest_step_restores(self):
        whole = [step for step, saved in self.steps.items() if not saved.damaged]
        if whole:
            found = self.reader.restore(step=max(whole), as_numpy=True)
            assert serial_of(found) == self.steps[max(whole)].serial
            metrics = self.manager.metrics(max(whole))
            assert str(metrics) == str(self.steps[max(whole)].metrics)


# --- what histories like these came upon ------------------------------------------------------


def test_a_run_that_could_not_be_opened_opens_when_it_can_be(ram_path):
    """In the same process: the manager that failed is not in the way."""
    root = ram_path / "run"
    root.write_text("in the way")
    with pytest.raises(NotADirectoryError):
        CheckpointManager(root, save=SAVE)
    root.unlink()

    with CheckpointManager(root, save=SAVE) as manager:
        manager.save(1, tree(1)).result(60)

    assert manager._index.steps() == [1]


def test_a_reader_sees_the_metrics_of_a_step_that_was_saved_anew(ram_path):
    """Also if it looked at the one that had its number before."""
    with (
        CheckpointManager(ram_path, save=SAVE) as manager,
        CheckpointManager(ram_path, mode="r") as reader,
    ):
        manager.save(1, tree(1), metrics={"loss": 1.0}).result(60)
        assert reader.metrics(1) == {"loss": 1.0}
        manager.delete(1)
        manager.save(1, tree(2), metrics={"loss": 2.0}).result(60)

        assert reader.metrics(1) == {"loss": 2.0}


def test_a_step_that_cannot_say_what_it_is_worth_stays(ram_path):
    """It may be the best of all, and someone may mend it: a policy that ranks deletes it not."""
    keep = KeepPolicy(last=1, best=1, metric="loss")
    with CheckpointManager(ram_path, save=SAVE, keep=keep) as manager:
        manager.save(1, tree(1), metrics={"loss": 0.0})
    os.truncate(ram_path / "1" / names.CHECKPOINT_METADATA, 7)

    with CheckpointManager(ram_path, save=SAVE, keep=keep) as manager:
        for step in (2, 3, 4):
            manager.save(step, tree(step), metrics={"loss": 5.0 - step})
        manager.wait_until_finished()

        assert manager.all_steps() == [1, 4]
        assert any("the facts about step 1 cannot be read" in p for p in manager.problems)


def test_an_error_of_the_policy_is_told(ram_path):
    """An exception from `KeepPolicy.when` is raised by the next call or on closing; steps stay."""
    keep = KeepPolicy(last=1, when=lambda info: info.metrics["loss"] < 1)
    manager = CheckpointManager(ram_path, save=SAVE, keep=keep)
    manager.save(1, tree(1)).result(60)

    with pytest.raises(KeyError, match="loss"):
        manager.close()

    assert manager._index.steps() == [1]


def test_a_save_for_preemption_that_failed_is_tried_again(ram_path):
    """At the next step, while there is time."""
    policy = SavePolicy(every_steps=1000)
    with CheckpointManager(ram_path, save=policy) as manager:
        manager._index.storage = FailingStorage(LocalStorage(), 3, FULL)
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(SaveFailed):
            manager.save(1, tree(1)).result(60)

        handle = manager.save(2, tree(2))

        assert handle is not None
        handle.result(60)


def test_a_step_that_would_not_be_found_again_is_refused(ram_path):
    """A number of more digits than a step's name may have."""
    with (
        CheckpointManager(ram_path, save=SAVE) as manager,
        pytest.raises(ValueError, match="step must be between"),
    ):
        manager.save(10**18, tree(1))


def test_a_manager_does_what_the_model_does(ram_path):
    """No history of saves, crashes, damage, deletions and readers leads them apart."""
    run_state_machine_as_test(
        lambda: Runs(ram_path),
        settings=settings(
            max_examples=20,  # `make faults` tries 500
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
