"""`CheckpointManager`: when it saves, which steps it keeps, and where a run resumes.

Most tests run twice: as the only process, and as each of four simulated ones (`as_processes`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for_threads
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import (
    CheckpointManager,
    CheckpointNotFound,
    CheckpointTimeout,
    CorruptCheckpoint,
    KeepPolicy,
    LocalTier,
    ProcessesDisagree,
    SaveFailed,
    SavePolicy,
    StepExists,
    TreeMismatch,
    UnsupportedFormat,
    UnsupportedLeaf,
    convert,
    restore,
    save,
)
from jaxckpt._run.index import StepIndex
from jaxckpt._run.leases import Leases
from jaxckpt._run.owner import Ownership
from jaxckpt._run.preemption import Preemption
from jaxckpt.format import names
from jaxckpt.format.step import FileFacts, decode_record, digest, encode_record
from jaxckpt.multihost import Single, current, playing
from jaxckpt.pages.overview import overview
from jaxckpt.storage import LocalStorage, PathIn
from jaxckpt.testing import FailingStorage, WatchedStorage, simulate
from tests.strategies import same
from tests.test_bad_input import rewrite_record
from tests.twins import denied, watched
from tests.waiting import wait_until

FULL = OSError(errno.ENOSPC, "No space left on device")
READ_ONLY = OSError(errno.EROFS, "Read-only file system")
FAILURES = (SaveFailed, ProcessesDisagree)  # of the process that failed, and of the others


def as_processes(test):
    """Runs a test as the only process, and again as each of four; `processes` is then its own."""

    @functools.wraps(test)
    def run(*, processes, **fixtures):
        if processes == 1:
            test(processes=Single(), **fixtures)
        else:
            simulate(processes, lambda mine: test(processes=mine, **fixtures), timeout_s=30)

    counts = [1, pytest.param(4, marks=pytest.mark.multihost)]
    return pytest.mark.parametrize("processes", counts)(run)


def meet(processes):
    processes.within(20).gather("test", None)


def in_first(processes, do):
    """Process 0 does something; the others wait for it."""
    meet(processes)
    result = do() if processes.index == 0 else None
    meet(processes)
    return result


def settle(manager, processes):
    """Waits until no process saves or deletes any more."""
    manager.wait_until_finished()
    meet(processes)


def ownership(storage, root):
    """Returns the ownership that another job has of a run."""
    index = StepIndex(storage, str(root))
    return Ownership(Leases(index))


def end_saves(manager):
    """Waits until the saves under way have ended, and asks for no error of theirs."""
    manager._saver.worker.wait(manager._saver.worker.under_way(), 60)


@pytest.fixture
def state(mesh):
    """Makes the state of a step: sharded and replicated arrays, a key, numpy, an int and a str."""

    def put(value, *spec):
        return jax.device_put(value, NamedSharding(mesh, P(*spec)))

    def make(step):
        return {
            "w": put(np.full((64, 32), step, np.float32), "x", "y"),
            "b": put(np.arange(6, dtype=np.int32) + step),
            "rng": jax.random.key(step),
            "host": np.full(3, step),
            "step": step,
            "name": "run",
        }

    return make


class Counter:
    """An iterator with `get_state` and `set_state`."""

    def __init__(self, at=0):
        self.at = at

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


class Torch:
    """An object with `state_dict` and `load_state_dict`, of values that JSON does not have."""

    def __init__(self, **values):
        self.values = values

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values = state


class Gate:
    """A storage in which one verb waits until the gate is open."""

    def __init__(self, verb, inner=None):
        self._inner, self.verb = inner or LocalStorage(), verb
        self.open = threading.Event()

    def __getattr__(self, name):
        found = getattr(self._inner, name)
        if name != self.verb:
            return found

        def wait(*arguments):
            assert self.open.wait(60)
            return found(*arguments)

        return wait


def listing(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def temporaries(root):
    return [path.name for path in root.iterdir() if names.is_temporary(path.name)]


# --- saving ------------------------------------------------------------------------------------


@as_processes
def test_a_saved_state_restores(tmp_path, state, processes):
    """Values, types and shardings are equal to the saved ones."""
    with CheckpointManager(tmp_path / "run") as manager:
        saved = state(3)
        handle = manager.save(3, saved)
        handle.result()

        got = manager.restore()

        assert handle.done()
        assert handle.path == str(tmp_path / "run" / "3")
        assert same(got, saved)
        assert got["w"].sharding == saved["w"].sharding
        assert manager.restored_step == 3
        assert manager.all_steps() == [3]
        assert manager.problems == []


@as_processes
def test_what_happens_after_the_call_is_not_saved(tmp_path, state, processes):
    """A state may be donated, and an array of the host or an item changed, at once."""
    donate = jax.jit(lambda x: x * -1 - 7, donate_argnums=0)
    with CheckpointManager(tmp_path) as manager:
        for step in range(1, 11):
            saved, data, vocab = state(step), Counter(step), {"a": [step]}
            manager.save(step, saved, items={"data": data, "vocab": vocab})
            saved["w"], saved["b"] = donate(saved["w"]), donate(saved["b"])
            saved["host"][:] = -1
            data.at = -1
            vocab["a"].append(-1)
        manager.wait_until_finished()

        for step in range(1, 11):
            data = Counter()
            assert same(manager.restore(step=step, items={"data": data}), state(step))
            assert data.at == step
            assert manager.restore_items(step=step)["vocab"] == {"a": [step]}


@as_processes
def test_a_step_that_is_not_due_is_none(tmp_path, state, processes):
    """`save` returns None, and `decision` says why; `force` saves anyway."""
    with CheckpointManager(tmp_path, save=SavePolicy(every_steps=2)) as manager:
        assert not manager.should_save(1)
        assert manager.save(1, state(1)) is None
        refused = manager.decision
        assert manager.save(2, state(2)) is not None
        due = manager.decision
        assert manager.save(3, state(3), force=True) is not None
        forced = manager.decision
        manager.wait_until_finished()

        assert (refused.step, refused.save) == (1, False)
        assert "every_steps=2" in refused.reason
        assert (due.step, due.save, due.reason) == (2, True, "every_steps=2")
        assert (forced.step, forced.save, forced.reason) == (3, True, "force")
        assert manager.all_steps() == [2, 3]


@pytest.mark.multihost
def test_how_often_processes_meet(tmp_path, state):
    """For a save, when it is written, committed and old steps are gone; not for others."""

    def meetings(processes):
        def so_far():
            return sum(processes._uses.values())

        with CheckpointManager(tmp_path, save=SavePolicy(every_steps=2)) as manager:
            start = so_far()
            manager.save(1, state(1))
            after_skipping = so_far()
            manager.save(2, state(2))
            manager.wait_until_finished()
            return after_skipping - start, so_far() - after_skipping

    assert simulate(4, meetings) == [(0, 3)] * 4


@as_processes
def test_a_wait_ends_when_old_steps_are_gone(tmp_path, processes):
    """In every process, though only process 0 deletes."""
    goes_on = threading.Event()
    keep = KeepPolicy(last=1, when=lambda info: info.step == 2 and not goes_on.wait(60))
    with CheckpointManager(tmp_path, keep=keep) as manager:
        manager.save(1, {"n": 1})
        manager.save(2, {"n": 2}).result(60)
        threading.Timer(0.2, goes_on.set).start()
        manager.wait_until_finished()

        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["2"]


def test_a_failure_is_raised_in_every_thread_that_waits(tmp_path):
    """Not only in the first to wake up; later calls do not raise it again."""
    gate = Gate("make_dir", FailingStorage(LocalStorage(), 0, FULL, once=False))
    with CheckpointManager(tmp_path) as manager, ThreadPoolExecutor(6) as pool:
        manager._index.storage = gate
        manager.save(1, {"n": 1})
        waits = [pool.submit(manager.wait_until_finished) for _ in range(6)]
        waiters = manager._saver.worker.changed._waiters  # only this shows that a thread waits
        wait_until(lambda: len(waiters) >= 6)
        gate.open.set()

        for wait in waits:
            with pytest.raises(SaveFailed, match="No space left"):
                wait.result(60)
        with pytest.raises(SaveFailed, match="No space left"):
            manager.wait_until_finished()
        manager.wait_until_finished()


def by_handle(manager, handle):
    handle.result()


def by_wait(manager, handle):
    manager.wait_until_finished()


def by_listing(manager, handle):
    manager.all_steps()


@pytest.mark.parametrize("fails", ["the save", "on_commit", "the upload"])
@pytest.mark.parametrize("first", [by_handle, by_wait, by_listing])
def test_a_failure_that_another_thread_raised_stops_the_one_that_saves(tmp_path, first, fails):
    """Whatever call was first: each thread raises it once, until the one that saved has."""

    def raised(call):
        with contextlib.suppress(OSError, SaveFailed, ZeroDivisionError):
            call(manager, handle)
            return False
        return True

    short = LocalTier(tmp_path / "local", durable_timeout_s=1e-9)
    local = short if fails == "the upload" else None
    more = {"on_commit": lambda timing: 1 / 0} if fails == "on_commit" else {}
    manager = CheckpointManager(tmp_path / "run", local=local, **more)
    if fails != "on_commit":
        storage = FailingStorage(LocalStorage(), 0, FULL, once=False)
        manager._index.storage = manager._directory.index.storage = storage
    handle = manager.save(1, {"n": 1})
    end_saves(manager)
    if manager._tiers:
        worker = manager._tiers.uploader.worker
        worker.wait(worker.under_way(), 60)

    with ThreadPoolExecutor(1) as a, ThreadPoolExecutor(1) as b:
        by_others = [a.submit(raised, call).result(60) for call in (first, by_listing, by_wait)]
        by_others += [b.submit(raised, by_listing).result(60)]
        by_main = [raised(by_wait), raised(by_wait)]
        by_others += [b.submit(raised, by_wait).result(60)]
        with ThreadPoolExecutor(1) as c:
            by_others += [c.submit(raised, by_wait).result(60)]

    is_told = first is not by_handle or fails == "the save"
    assert by_others == [is_told, not is_told, False, True, False, False]
    assert by_main == [True, False]
    manager.close()


def test_a_directory_whose_name_is_not_utf_8_has_checkpoints(tmp_path):
    """Markers and records name it."""
    folder = tmp_path / os.fsdecode(b"M\xfcller")
    tree = {"w": np.arange(3)}

    with CheckpointManager(folder / "run") as manager:
        manager.save(1, tree).result()
        assert same(manager.restore(), tree)
    with CheckpointManager(tmp_path / "run", local=folder / "local") as manager:
        manager.save(1, tree).durable()
    save(folder / os.fsdecode(b"\xfe"), tree)
    convert(folder / os.fsdecode(b"\xfe"), tmp_path / "copy")

    assert same(restore(tmp_path / "copy"), tree)


@pytest.mark.parametrize("timeout_s", [1e10, sys.maxsize])
def test_a_limit_may_be_longer_than_the_system_takes(tmp_path, timeout_s):
    """The wait for a save would raise, and the program would end without it."""
    waits = threading.Event()
    with CheckpointManager(
        tmp_path, timeout_s=timeout_s, on_commit=lambda _: waits.wait(60)
    ) as manager:
        manager.save(1, {"w": np.zeros(3)})
        threading.Timer(0.1, waits.set).start()
        manager.wait_until_finished()


@pytest.mark.multihost
@pytest.mark.parametrize("timeout_s", [None, 0.3], ids=["the manager's", "a short one"])
def test_a_wait_names_the_process_that_is_missing(tmp_path, timeout_s):
    """A process that does not save keeps the others waiting; their wait says which."""

    def run(processes):
        with CheckpointManager(tmp_path, timeout_s=1.0) as manager:
            meet(processes)
            if processes.index == 1:
                return
            manager.save(1, {"n": 1})
            with pytest.raises(CheckpointTimeout) as caught:
                manager.wait_until_finished(timeout_s)
            assert caught.value.missing == (1,)
            with contextlib.suppress(CheckpointTimeout):  # of the save, if only the wait has ended
                manager.close()

    simulate(3, run)


@pytest.mark.multihost
def test_a_save_in_process_0_only_is_explained(tmp_path, caplog):
    """A warning names the step, the run and who is missing; the error, what was forgotten."""

    def run(processes):
        manager = CheckpointManager(tmp_path, timeout_s=1.0)
        if processes.index == 0:
            manager.save(7, {"n": 7})
            with pytest.raises(CheckpointTimeout, match="did not make this call: every process"):
                manager.close()
        manager.close()

    simulate(3, run, warn_after_s=0.1)

    warnings = [record.getMessage() for record in caplog.records]  # on a busy machine also others
    wanted = f"saving {tmp_path}/7: process 0 of 3 has waited 0.1 s for 2 processes: 1, 2, which"
    assert any(warning.startswith(wanted) for warning in warnings)


@pytest.mark.multihost
def test_a_save_that_one_process_leaves_out_fails_alone(tmp_path):
    """A later step is good at once, and the same step once all know how often it was tried."""
    tokens = set()

    def run(processes):
        errors = []

        def save(step, value):
            handle = manager.save(step, {"n": value})
            tokens.add(handle.job.request.token)
            try:
                handle.result()
            except (CheckpointTimeout, ProcessesDisagree) as error:
                errors.append(str(error))

        with CheckpointManager(tmp_path, timeout_s=2.0) as manager:
            save(1, 1)
            if processes.index != 1:
                save(2, 2)
            meet(processes)
            save(3, 3)
            if processes.index != 1:
                save(4, 4)
            meet(processes)
            save(4, 5)
            save(4, 6)
            assert manager.all_steps() == [1, 3, 4]
            assert manager.restore() == {"n": 6}
            return errors

    first, second, third = simulate(3, run)

    assert first[2:] == second == third[2:]
    assert len(second) == 1
    assert all("missing process 1" in error for error in (*first[:2], *third[:2]))
    assert "process 1: made another number of attempts to save this step" in second[0]
    assert len(tokens) == 6  # of steps 1, 2, 3, and of three attempts for 4


class Recording(threading.Condition):
    """Records the limits of its waits."""

    def __init__(self, lock):
        super().__init__(lock)
        self.limits = []

    def wait_for(self, predicate, timeout=None):
        self.limits.append(timeout)
        return super().wait_for(predicate, timeout)


@pytest.mark.multihost
def test_a_wait_for_a_save_ends_after_its_limit_once(tmp_path):
    """Although the save waits for another process by then."""

    def run(processes):
        with CheckpointManager(tmp_path, timeout_s=1.0) as manager:
            meet(processes)
            if processes.index == 1:
                return
            worker = manager._saver.worker
            worker.changed = changed = Recording(worker.lock)
            manager.save(1, {"n": 1})
            manager._saver.worker.timeout_s = 0.2  # of this wait, not of the save
            with pytest.raises(CheckpointTimeout):
                manager.wait_until_finished()
            assert sum(changed.limits) <= 0.25
            with contextlib.suppress(CheckpointTimeout):  # of the save, if only the wait has ended
                manager.close()

    simulate(2, run)


@pytest.mark.multihost
@pytest.mark.parametrize("verb", ["restore", "restore_items"])
def test_a_restore_in_one_process_ends_after_its_limit_once(tmp_path, verb):
    """Processes whose meeting timed out do not meet again to say so."""

    def run(processes):
        with CheckpointManager(tmp_path, timeout_s=1.0) as manager:
            manager.save(1, {"n": 1}).result()
            meet(processes)
            if processes.index == 0:
                before = {*processes._uses}
                with pytest.raises(CheckpointTimeout, match="did not make this call") as caught:
                    getattr(manager, verb)()
                assert caught.value.missing == (1,)
                new = {*processes._uses} - before
                assert len([key for key in new if "/gather/" in key]) == 1
            meet(processes)

    simulate(2, run)


@pytest.mark.multihost
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"directory": "elsewhere"}, r"directory='.*/elsewhere', process 0 has directory='.*/run'"),
        ({"save": SavePolicy(at_steps=[2])}, r"save.at_steps=\[2\], process 0 has .*=None"),
        ({"save": SavePolicy(when=bool)}, r"save.when=True, process 0 has save.when=None"),
        ({"keep": KeepPolicy(last=2)}, r"keep.last=2, process 0 has keep.last=None"),
        ({"step_digits": 8}, r"step_digits=8, process 0 has step_digits=None"),
    ],
)
def test_processes_that_open_differently_raise_the_same_error(tmp_path, arguments, text):
    """At once, and before the run is opened; equal managers open afterwards."""

    def run(processes):
        mine = {"directory": "run"} | (arguments if processes.index == 2 else {})
        mine["directory"] = tmp_path / mine["directory"]
        with pytest.raises(ProcessesDisagree, match=f"process 2: {text}") as caught:
            CheckpointManager(**mine, timeout_s=20)
        assert [*caught.value.failures] == [2]
        meet(processes)
        assert os.listdir(tmp_path) == []
        meet(processes)
        with CheckpointManager(tmp_path / "run", timeout_s=20) as manager:
            assert manager.all_steps() == []
        return str(caught.value)

    first, *others = simulate(3, run)
    assert others == [first, first]


@pytest.mark.multihost
def test_processes_that_ask_for_different_steps_are_told(tmp_path):
    """Each would get the step of process 0, or be told that its own is deleted."""

    def run(processes):
        mine, errors = 1 + processes.index, (ProcessesDisagree, ValueError)
        with CheckpointManager(tmp_path, timeout_s=20) as manager:
            for step in (1, 2, 3):
                manager.save(step, {"n": step}).result()
            with pytest.raises(errors[processes.index], match="for step 2, process 0 for step 1"):
                manager.restore(step=mine)
            told = pytest.raises(ValueError, match="delete of step 2, but of step 1 in process 0")
            with told if mine == 2 else contextlib.nullcontext():
                manager.delete(mine)
            assert manager.restore(step=3) == {"n": 3}
            assert manager.all_steps() == [2, 3]

    simulate(2, run)


@pytest.mark.multihost
def test_a_wait_raises_the_error_that_is_there_already(tmp_path):
    """A later save that hangs does not hide why an earlier one failed."""

    def run(processes):
        with CheckpointManager(tmp_path, timeout_s=1.0) as manager:
            if processes.index == 1:
                meet(processes)
                manager.save(1, {"another": 1})
                manager._saver.worker.wait(manager._saver.worker.under_way())
                manager._saver.take_errors()
                return
            first = manager.save(1, {"n": 1})
            second = manager.save(2, {"n": 2})
            meet(processes)
            manager._saver.worker.wait([first])
            with pytest.raises(ProcessesDisagree, match="process 1"):
                manager.wait_until_finished(timeout_s=0.01)
            with pytest.raises(CheckpointTimeout) as caught:
                second.result()
            assert caught.value.missing == (1,)

    simulate(2, run)


@pytest.mark.parametrize("verb", ["make_dir", "sync", "rename"])
def test_a_step_is_listed_once_it_is_committed(tmp_path, verb):
    """Until then no manager, and no reader, knows of it."""
    with CheckpointManager(tmp_path) as manager, CheckpointManager(tmp_path, mode="r") as reader:
        manager._index.storage = gate = Gate(verb)
        handle = manager.save(1, {"n": 1})

        before = manager.all_steps(), manager.latest_step(), reader.all_steps(), handle.done()
        gate.open.set()
        handle.result()

        assert before == ([], None, [], False)
        assert (manager.all_steps(), manager.latest_step(), reader.all_steps()) == ([1], 1, [1])


def test_a_save_does_not_wait_for_the_one_before(tmp_path):
    """If the values of both fit into the budget; but it does wait for the one before that."""
    with CheckpointManager(tmp_path, timeout_s=0.1) as manager:
        manager._index.storage = gate = Gate("sync")

        handles = [manager.save(step, {"w": np.full(1000, step)}) for step in (1, 2)]
        with pytest.raises(CheckpointTimeout, match=r"steps \[1, 2\].*no room"):
            manager.save(3, {"w": np.full(1000, 3)})
        under_way = [handle.done() for handle in handles]
        gate.open.set()
        manager.wait_until_finished(60)

        assert under_way == [False] * 2
        assert manager.all_steps() == [1, 2]
        assert manager.restore()["w"].tolist() == [2] * 1000


@as_processes
def test_a_save_raises_the_error_of_the_save_it_waited_for(tmp_path, processes):
    """In every process, and saves nothing; a later save works."""
    gate = Gate("make_dir", FailingStorage(LocalStorage(), 0, FULL, once=False))
    with CheckpointManager(tmp_path) as manager:
        if processes.index == 0:
            manager._index.storage = gate
        manager.save(1, {"n": 1})
        handle = manager.save(2, {"n": 2})
        meet(processes)
        gate.open.set()

        with pytest.raises(FAILURES, match="No space left"):
            manager.save(3, {"n": 3})
        end_saves(manager)
        manager._index.storage = LocalStorage()
        with pytest.raises(FAILURES, match="No space left"):
            handle.result()
        with contextlib.suppress(*FAILURES):  # of step 2, if step 3 did not wait for it
            manager.wait_until_finished()
        manager.save(4, {"n": 4}).result()

        assert manager.all_steps() == [4]


def test_a_save_waits_for_room_in_the_budget(tmp_path):
    """For at most `timeout_s`; a save alone may take more than the budget."""
    with CheckpointManager(tmp_path, budget_bytes=10_000, timeout_s=0.1) as manager:
        manager._index.storage = gate = Gate("sync")
        handle = manager.save(1, {"w": np.ones(1000)})

        with pytest.raises(CheckpointTimeout, match=r"steps \[1\].*budget_bytes=10000"):
            manager.save(2, {"w": np.ones(1000)})
        gate.open.set()
        handle.result()
        manager.save(3, {"w": np.ones(2000)}).result()

        assert manager.all_steps() == [1, 3]


def test_a_wait_may_end_before_the_saves(tmp_path):
    """`wait_until_finished` names the saves in progress, and they continue."""
    with CheckpointManager(tmp_path) as manager:
        manager._index.storage = gate = Gate("sync")
        handle = manager.save(1, {"n": 1})

        with pytest.raises(CheckpointTimeout, match=r"steps \[1\].*continue"):
            manager.wait_until_finished(timeout_s=0.01)
        gate.open.set()
        handle.result()

        assert manager.all_steps() == [1]


@as_processes
def test_a_step_may_be_any_integer(tmp_path, processes):
    """Integers of numpy and jax are accepted too, when saving and when restoring."""
    with CheckpointManager(tmp_path) as manager:
        for step in (np.int64(0), jnp.int32(7), jnp.array(8)):
            manager.save(step, {"n": int(step)})
        manager.wait_until_finished()

        assert manager.all_steps() == [0, 7, 8]
        assert manager.restore(step=np.int32(7)) == {"n": 7}
        assert manager.restore(step=jnp.array(0)) == {"n": 0}
        for wrong in ("3", 1.5, None):
            with pytest.raises(TypeError, match="step must be an int"):
                manager.save(wrong, {})
        with pytest.raises(ValueError, match="between 0 and"):
            manager.save(-1, {})


# --- errors of saves ---------------------------------------------------------------------------

NEXT_CALLS = {
    "save": lambda manager: manager.save(9, {"n": 9}),
    "a save that is not due": lambda manager: manager.save(8, {"n": 8}),
    "should_save": lambda manager: manager.should_save(9),
    "wait_until_finished": lambda manager: manager.wait_until_finished(),
    "all_steps": lambda manager: manager.all_steps(),
    "latest_step": lambda manager: manager.latest_step(),
    "metrics": lambda manager: manager.metrics(3),
    "restore": lambda manager: manager.restore(),
    "restore_or": lambda manager: manager.restore_or(dict),
    "reached_preemption": lambda manager: manager.reached_preemption(3),
    "pin": lambda manager: manager.pin(3),
    "delete": lambda manager: manager.delete(3),
    "close": lambda manager: manager.close(),
}


@pytest.mark.parametrize("call", NEXT_CALLS)
@as_processes
def test_a_failure_is_raised_by_the_next_call_once(tmp_path, call, processes):
    """Any failure is raised once in every process; the handle always raises it."""
    manager = CheckpointManager(tmp_path, save=SavePolicy(every_steps=3))
    if processes.index == 0:
        manager._index.storage = FailingStorage(LocalStorage(), 0, FULL, once=False)
    handle = manager.save(3, {"n": 3})
    end_saves(manager)
    manager._index.storage = LocalStorage()

    with pytest.raises(FAILURES, match="No space left"):
        NEXT_CALLS[call](manager)

    with pytest.raises(FAILURES, match="No space left"):
        handle.result()
    if call != "close":
        assert manager.all_steps() == []
        manager.save(12, {"n": 12}).result()
        assert manager.all_steps() == [12]
    manager.close()


@as_processes
def test_a_failure_that_its_handle_told_is_not_told_again(tmp_path, processes):
    """Only the handle raises it again."""
    with CheckpointManager(tmp_path) as manager:
        if processes.index == 0:
            manager._index.storage = FailingStorage(LocalStorage(), 0, FULL, once=False)
        handle = manager.save(1, {"n": 1})

        for _ in range(2):
            with pytest.raises(FAILURES, match="No space left"):
                handle.result()
        end_saves(manager)

        assert manager.all_steps() == []


@as_processes
def test_leaving_the_block_raises_a_failure(tmp_path, processes):
    """The error of a `with` block itself goes before, with a note of the other."""

    def fail(error=None):
        with CheckpointManager(tmp_path) as manager:
            if processes.index == 0:
                manager._index.storage = FailingStorage(LocalStorage(), 0, FULL, once=False)
            manager.save(1, {"n": 1})
            if error is not None:
                raise error

    with pytest.raises(FAILURES, match="No space left"):
        fail()
    with pytest.raises(KeyError, match="mine") as caught:
        fail(KeyError("mine"))

    assert "No space left" in caught.value.__notes__[0]


@as_processes
def test_several_failures_are_raised_together(tmp_path, processes):
    """The first, with a note for each of the others."""
    full = FailingStorage(LocalStorage(), 0, FULL, once=False)
    gate = Gate("make_dir", full if processes.index == 0 else None)
    with CheckpointManager(tmp_path) as manager:
        manager._index.storage = gate
        manager.save(1, {"n": 1})
        manager.save(2, {"n": 2})
        meet(processes)  # before the first fails in any of them
        gate.open.set()
        end_saves(manager)

        with pytest.raises(FAILURES, match=r"/1\b.*No space left") as caught:
            manager.wait_until_finished()

        assert len(caught.value.__notes__) == 1
        assert "No space left" in caught.value.__notes__[0]


@as_processes
def test_a_save_that_is_cancelled_is_not_committed(tmp_path, processes):
    """Nothing is left of it, only its handle raises, and the step can be saved again."""
    gate = Gate("make_dir")
    with CheckpointManager(tmp_path) as manager:
        manager._index.storage = gate
        handle = manager.save(1, {"n": 1})
        handle.cancel()
        gate.open.set()
        with pytest.raises(FAILURES, match="cancelled"):
            handle.result()
        settle(manager, processes)
        assert (manager.all_steps(), temporaries(tmp_path)) == ([], [])
        meet(processes)  # before any of them saves

        again = manager.save(1, {"n": 11})
        again.result()
        again.cancel()  # too late
        again.result()
        assert manager.restore() == {"n": 11}


@as_processes
def test_a_disk_that_was_full_has_room_again(tmp_path, state, processes):
    """Earlier steps stay, nothing is left of the attempts, and the next save simply works."""
    with CheckpointManager(tmp_path, keep=KeepPolicy(last=2)) as manager:
        manager.save(1, state(1)).result()
        for step in (2, 3):
            if processes.index == 0:
                manager._index.storage = FailingStorage(LocalStorage(), step, FULL, once=False)
            with pytest.raises(FAILURES):
                manager.save(step, state(step)).result()
            manager._index.storage = LocalStorage()
            settle(manager, processes)
            assert manager.all_steps() == [1]
            assert temporaries(tmp_path) == []
            meet(processes)

        manager.save(4, state(4)).result()

        assert manager.all_steps() == [1, 4]
        assert same(manager.restore(), state(4))


@as_processes
def test_a_step_that_failed_may_be_saved_again(tmp_path, processes):
    """The failed step does not exist, so saving it or an earlier one is not a step back."""
    with CheckpointManager(tmp_path) as manager:
        if processes.index == 0:
            manager._index.storage = FailingStorage(LocalStorage(), 0, FULL, once=False)
        with pytest.raises(FAILURES):
            manager.save(5, {"n": 5}).result()
        manager._index.storage = LocalStorage()

        manager.save(5, {"n": 5}).result()

        assert manager.all_steps() == [5]


BIG = {"w": np.array([1e6])}  # no float16 holds it
NO_NUMBERS = [
    np.str_("low"),
    np.array("abc"),
    np.array([b"x"]),
    np.array([1j]),
    jnp.complex64(1),
    np.datetime64("2020"),
    np.array(None),
]


@as_processes
def test_what_cannot_be_stored_is_refused_at_once(tmp_path, processes):
    """The call raises and names the item, nothing is written, and the next save works."""
    with CheckpointManager(tmp_path) as manager:
        before = in_first(processes, lambda: listing(tmp_path))
        refused = [
            (UnsupportedLeaf, "^item 'state': .*\n  x: .*object", {"state": {"x": object()}}),
            (UnsupportedLeaf, "^item 'b': .*\n  x: .*object", {"items": {"b": {"x": object()}}}),
            (UnsupportedLeaf, "set", {"items": {"data": Torch(values={1, 2})}}),
            (TypeError, "custom_metadata", {"custom_metadata": {"x": object()}}),
            (TypeError, "one number", {"metrics": {"loss": np.ones(2)}}),
            (TypeError, "one number", {"metrics": {"loss": object()}}),
            (TypeError, "'a/b' must be one number", {"metrics": {"a": {"b": [1, object()]}}}),
            (TypeError, "must be str", {"metrics": {1: 2.0}}),
            *((TypeError, "one number", {"metrics": {"loss": odd}}) for odd in NO_NUMBERS),
            (UnicodeEncodeError, "surrogate", {"metrics": {"loss": "\ud800"}}),
            (ValueError, "'int8' is not a floating-point dtype", {"dtype": np.int8}),
        ]
        if processes.count == 1:  # else process 0 casts it alone
            big = {"dtype": "float16", "state": BIG}
            refused.append((UnsupportedLeaf, "^item 'state': leaf w ", big))
        taken = ("state", "metrics", "default", "", ".a", "a/b", "_METADATA", names.RECORD)
        taken += (names.DELETION_RECORD, "é" * 128, "\ud800")
        refused += [(ValueError, "item", {"items": {name: 1}}) for name in taken]
        for error, text, arguments in refused:
            with pytest.raises(error, match=text):
                manager.save(1, arguments.pop("state", {"n": 1}), **arguments)
        end_saves(manager)
        after = in_first(processes, lambda: listing(tmp_path))

        manager.save(1, {"n": 1}).result()

        assert before == after
        assert manager.restore() == {"n": 1}


@pytest.mark.multihost
def test_one_process_that_cannot_save_is_named(tmp_path):
    """Nobody commits, and each of the others says which one it was and why."""

    def save(processes):
        with CheckpointManager(tmp_path) as manager:
            bad = processes.index == 2
            try:
                manager.save(1, {"n": object() if bad else 1}).result()
            except (UnsupportedLeaf, ProcessesDisagree) as error:
                told = type(error), getattr(error, "failures", {})
            meet(processes)
            manager.save(2, {"n": 2}).result()
            return *told, manager.all_steps()

    told = simulate(4, save)

    assert [kind for kind, _, _ in told] == [
        UnsupportedLeaf if i == 2 else ProcessesDisagree for i in range(4)
    ]
    assert all(list(failures) == [2] for kind, failures, _ in told if kind is ProcessesDisagree)
    assert all(steps == [2] for _, _, steps in told)


@as_processes
def test_a_step_that_exists_stays_as_it_is(tmp_path, state, processes):
    """It is not due, in this run and in the next; with `force` it is `StepExists`."""
    for _ in range(2):
        with CheckpointManager(tmp_path) as manager:
            if not manager.all_steps():
                manager.save(1, state(1)).result()

            assert manager.save(1, state(7)) is None
            assert "step 1 is there already" in manager.decision.reason
            assert not manager.should_save(1)
            with pytest.raises(StepExists, match="already exists"):
                manager.save(1, state(7), force=True)

            assert same(manager.restore(), state(1))
            meet(processes)


@as_processes
def test_a_step_after_the_one_restored_by_hand_stays_with_a_warning(tmp_path, state, processes):
    """Once for each restore; none for a step saved since, nor for the newest."""
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
        manager.wait_until_finished()
        manager.restore()
        assert [manager.save(step, state(7)) for step in (2, 3)] == [None, None]
        assert not manager.problems

        manager.restore(step=1)
        assert [manager.save(step, state(7)) for step in (2, 3)] == [None, None]
        told = [*manager.problems]
        manager.save(4, state(4)).result()
        assert manager.save(4, state(4)) is None

        assert manager.problems == told
        assert len(told) == (processes.index == 0)
        assert all("has step 2 from before step 1 was restored" in text for text in told)
        assert all("manager.delete" in text and "jaxckpt.fork" in text for text in told)
        assert same(manager.restore(step=2), state(2))

        settle(manager, processes)
        for step in (3, 4):
            manager.delete(step)
        manager.save(3, state(8)).result()  # its own, not one from before
        assert manager.save(3, state(8)) is None
        assert manager.problems == told


@as_processes
def test_a_restart_may_save_the_step_that_it_restored(tmp_path, state, processes):
    """As a loop does that saves before it trains; the saves after it go on."""
    for saved in ([0, 1], [2, 3], [4]):
        with CheckpointManager(tmp_path) as manager:
            _, start = manager.restore_or(lambda: state(0))
            for step in range(start, saved[-1] + 1):
                manager.save(step, state(step))
            settle(manager, processes)
            assert manager.all_steps() == [*range(saved[-1] + 1)]
            meet(processes)


@as_processes
def test_a_step_that_is_being_saved_is_not_due(tmp_path, state, processes):
    """Saving it twice in a row saves it once."""
    with CheckpointManager(tmp_path) as manager:
        handles = [manager.save(1, state(1)) for _ in range(3)]
        assert handles[1:] == [None, None]
        settle(manager, processes)
        assert manager.all_steps() == [1]


@as_processes
def test_the_first_step_of_a_run_is_saved_once(tmp_path, processes):
    """The first of a new run; not again after a restart."""
    policy = SavePolicy(first=True, every_steps=10)
    for step, saved in ((3, []), (4, [4]), (5, [4]), (10, [4, 10])):
        with CheckpointManager(tmp_path, save=policy) as manager:
            if saved:  # a job that ends before its first save leaves a new run
                manager.save(step, {"n": step})
            settle(manager, processes)
            assert manager.all_steps() == saved


def test_a_save_is_due_as_soon_as_the_one_before_is_committed(tmp_path):
    """By `continuous`, while old steps are deleted or `on_commit` runs."""
    ends = threading.Event()
    with CheckpointManager(
        tmp_path, save=SavePolicy(continuous=True), on_commit=lambda _: ends.wait(60)
    ) as manager:
        manager.save(1, {"n": 1}).result()
        second = manager.save(2, {"n": 2})
        ends.set()

    assert second is not None


@pytest.mark.multihost
def test_processes_with_long_steps_do_not_wait_eight_of_them(tmp_path):
    """They measure the step after the first save, before they decide about it."""

    def run(processes):
        with CheckpointManager(tmp_path, save=SavePolicy(every_seconds=0.05)) as manager:
            for step in (1, 2):
                manager.save(step, {"n": step})
                manager.wait_until_finished()
                time.sleep(0.1)  # the step itself, twice as long as the interval
            return manager.all_steps()

    assert simulate(3, run) == [[1, 2]] * 3


@as_processes
def test_an_empty_directory_is_no_step(tmp_path, processes):
    """A save takes its place; else the job would end there at each restart."""
    with CheckpointManager(tmp_path) as manager:
        for step in (5, 6):
            in_first(processes, (tmp_path / str(step)).mkdir)
            manager.save(step, {"n": step}).result()

        assert manager.all_steps() == [5, 6]
        assert manager.restore(step=5) == {"n": 5}
        assert temporaries(tmp_path) == []


@as_processes
def test_a_step_that_another_program_deleted_is_saved_again(tmp_path, processes):
    """And an earlier one, if all later ones are gone."""
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"n": step})
        settle(manager, processes)
        in_first(processes, lambda: shutil.rmtree(tmp_path / "3"))
        manager.save(3, {"n": 33})
        settle(manager, processes)
        assert manager.restore() == {"n": 33}

        in_first(processes, lambda: [shutil.rmtree(tmp_path / name) for name in ("2", "3")])
        manager.save(2, {"n": 22})
        settle(manager, processes)
        assert manager.restore() == {"n": 22}
        assert manager.all_steps() == [1, 2]
        assert manager.save(1, {"n": 1}) is None


@as_processes
def test_steps_do_not_go_backwards(tmp_path, processes):
    """An earlier step is refused; the error says what to do."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, {"n": 5})
        with pytest.raises(ValueError, match=r"step 3 is older than step 5.*manager\.delete"):
            manager.save(3, {"n": 3})
        manager.wait_until_finished()

        assert manager.all_steps() == [5]


@pytest.mark.parametrize(
    "inside", [("notes.txt",), (names.CHECKPOINT_METADATA,)], ids=["notes", "foreign"]
)
@as_processes
def test_a_directory_of_somebody_else_is_not_replaced(tmp_path, inside, processes):
    """A save that would go there is `StepExists` with what was found; it stays as it is."""

    def make():
        (tmp_path / "5").mkdir()
        for name in inside:
            (tmp_path / "5" / name).write_text("{}")

    with CheckpointManager(tmp_path) as manager:
        in_first(processes, make)

        with pytest.raises(StepExists, match=r"notes\.txt|already"):
            manager.save(5, {"n": 5}).result()
        manager.save(6, {"n": 6})
        settle(manager, processes)

        assert sorted(os.listdir(tmp_path / "5")) == sorted(inside)
        assert manager.restore() == {"n": 6}
        assert temporaries(tmp_path) == []


# --- the root ----------------------------------------------------------------------------------


@as_processes
def test_a_root_that_is_a_file_is_refused(tmp_path, processes):
    """By every process, and the file stays."""
    in_first(processes, lambda: (tmp_path / "run").write_text("text"))

    with pytest.raises((NotADirectoryError, ProcessesDisagree), match="run is a file"):
        CheckpointManager(tmp_path / "run")
    with pytest.raises((OSError, ProcessesDisagree), match="run"):
        CheckpointManager(tmp_path / "run" / "below")

    assert (tmp_path / "run").read_text() == "text"


@as_processes
def test_a_root_that_is_a_checkpoint_is_refused(tmp_path, processes):
    """The error says where the run is."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"n": 1})

    with pytest.raises((ValueError, ProcessesDisagree), match=f"{tmp_path}\\?"):
        CheckpointManager(tmp_path / "1")


@pytest.mark.parametrize("error", [READ_ONLY, PermissionError(errno.EACCES, "Permission denied")])
def test_a_root_that_cannot_be_written(tmp_path, error):
    """Opening it for writing fails, and says how to read it."""
    storage = FailingStorage(LocalStorage(), 0, error, once=False)

    with pytest.raises(OSError, match=error.strerror) as caught:
        ownership(storage, tmp_path / "run").open()

    assert not (tmp_path / "run").exists()
    if isinstance(error, PermissionError):
        assert "mode='r'" in str(caught.value)


def test_opening_reads_no_file_of_a_step(tmp_path):
    """This holds for opening and listing 20 steps with metrics and a policy that ranks by them."""
    keep = KeepPolicy(best=3, last=20, metric="loss")
    with CheckpointManager(tmp_path, keep=keep) as manager:
        for step in range(20):
            manager.save(step, {"n": step}, metrics={"loss": step})
    seen = []

    run = watched(tmp_path, lambda verb, path: seen.append((verb, path)))
    with CheckpointManager(run, keep=keep) as manager:
        steps = manager.all_steps()

    assert steps == [*range(20)]
    read = {os.path.dirname(path) for verb, path in seen if verb in ("read", "read_into")}
    assert read == {str(tmp_path)}


def test_opening_lists_the_root_and_no_step(tmp_path):
    """Beyond the newest: a root of many steps opens as fast as one of few."""
    with CheckpointManager(tmp_path) as manager:
        for step in range(20):
            manager.save(step, {"n": step})
    seen = []

    CheckpointManager(watched(tmp_path, lambda *call: seen.append(call))).close()

    looked_at = {path for verb, path in seen if verb == "entries"}
    assert {str(tmp_path)} <= looked_at <= {str(tmp_path), str(tmp_path / "19")}


@as_processes
def test_another_manager_of_the_same_process_takes_over(tmp_path, processes):
    """The first ends when its saves do, and says that it is closed, and why."""
    first = CheckpointManager(tmp_path)
    handle = first.save(1, {"n": 1})

    with CheckpointManager(tmp_path) as second:
        assert handle.done()
        with pytest.raises(ValueError, match="closed: another manager of this process"):
            first.save(2, {"n": 2})
        second.save(2, {"n": 2}).result()
        assert second.all_steps() == [1, 2]
    first.close()


def test_a_manager_that_is_closed_does_nothing_more(tmp_path):
    """Closing again is fine."""
    manager = CheckpointManager(tmp_path)
    manager.close()
    manager.close()

    for call in (manager.all_steps, manager.restore, lambda: manager.save(1, {})):
        with pytest.raises(ValueError, match="closed"):
            call()
    with (
        pytest.raises(ValueError, match=r"closed: close\(\) was called.*Open another one"),
        manager,
    ):
        pass


def test_every_thread_that_closes_waits_for_the_end(tmp_path):
    """Except the one that saves, for which they wait; closing in a signal handler is fine too."""
    entered, go_on, closed_in = threading.Event(), threading.Event(), []

    def on_commit(_):
        entered.set()
        assert go_on.wait(30)
        manager.close()
        closed_in.append("on_commit")

    manager = CheckpointManager(tmp_path, on_commit=on_commit)
    manager.save(1, {"n": 1})
    with ThreadPoolExecutor(2) as pool:
        assert entered.wait(30)
        first = pool.submit(manager.close)
        wait_until(lambda: manager._saver.ended)
        second = pool.submit(lambda: (manager.close(), closed_in.append("second")))
        assert not wait_for_threads([second], timeout=0.2).done
        go_on.set()
        first.result(30)
        second.result(30)

    assert closed_in == ["on_commit", "second"]
    with CheckpointManager(tmp_path) as manager:
        signal.signal(signal.SIGALRM, lambda *_: manager.close())
        stop = manager._saver.worker.stop
        manager._saver.worker.stop = lambda: (signal.raise_signal(signal.SIGALRM), stop())
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


@as_processes
def test_a_job_that_lost_the_run_cannot_commit(tmp_path, processes):
    """Its save fails and names the job that opened the run since; nothing of it stays."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"n": 1}).result()
        owner = {"token": "0123456789abcdef", "host": "other-host", "pid": 4711, "opened_ns": 1}
        in_first(processes, lambda: (tmp_path / names.OWNER).write_text(json.dumps(owner)))

        with pytest.raises(FAILURES, match="process 4711 on other-host"):
            manager.save(2, {"n": 2}).result()
        settle(manager, processes)

        assert manager.all_steps() == [1]
        assert temporaries(tmp_path) == []


def test_the_first_save_of_a_new_job_takes_the_run(tmp_path):
    """Merely opening a run takes nothing from a running job; saving there does."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"n": 1}).result()
        other = ownership(LocalStorage(), tmp_path)
        other.open()
        manager.wait_until_finished()
        other.fence()

        with pytest.raises(SaveFailed, match=f"process {os.getpid()}"):
            manager.save(2, {"n": 2}).result()

        assert "open for writing in a running job" in other._index.problems[0]
        assert manager.all_steps() == [1]
        other.lock.release()


class Running:
    """Another job that is running, and saves a step when asked to."""

    def __init__(self, folder):
        self.folder = folder
        self.owner = ownership(LocalStorage(), folder)
        self.owner.open()

    def save(self, step):
        self.owner.fence()
        shutil.copytree(self.folder / "1", self.folder / str(step))


@as_processes
def test_a_job_started_twice_leaves_the_first_one_alone(tmp_path, processes):
    """Once that has saved a step, the second one saves nothing; its error names the first."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"n": 1})
    other = in_first(processes, lambda: Running(tmp_path))
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore_or(lambda: {"n": 0})[1] == 1
        in_first(processes, lambda: other.save(10))
        settle(manager, processes)

        for step in (10, 11, 10):
            with pytest.raises(FAILURES, match=rf"process {os.getpid()} on .*, since .*step 10"):
                manager.save(step, {"n": step}).result()
        in_first(processes, lambda: other.save(20))

        assert manager.all_steps() == [1, 10, 20]
        assert manager.restore_or(lambda: {"n": 0})[1] == 20
        manager.save(30, {"n": 30}).result()  # it knows what the other has saved
        settle(manager, processes)
        if other is not None:
            with pytest.raises(SaveFailed, match="opened for writing by another job"):
                other.owner.fence()
            other.owner.lock.release()


@as_processes
def test_a_job_that_was_running_has_ended_before_the_first_save(tmp_path, processes):
    """Its later steps stay, and the new job saves the first step after them."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"n": 1})
    other = in_first(processes, lambda: Running(tmp_path))
    with CheckpointManager(tmp_path) as manager:
        in_first(processes, lambda: (other.save(10), other.save(20), other.owner.lock.release()))
        settle(manager, processes)

        assert [manager.save(step, {"n": step}) for step in (10, 15, 20)] == [None] * 3
        assert manager.decision.reason == "step 20 is there already or being saved"
        settle(manager, processes)
        manager.save(25, {"n": 25}).result()

        assert manager.all_steps() == [1, 10, 20, 25]


def test_a_new_job_takes_over_what_a_dead_one_left(tmp_path):
    """Its half-written step goes, its committed ones stay."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"n": 1})
    left = tmp_path / names.temporary("2", "0123456789abcdef")
    left.mkdir()
    (left / names.WRITER).write_text("0123456789abcdef")
    (left / "state").mkdir()

    with CheckpointManager(tmp_path) as manager:
        assert temporaries(tmp_path) == []
        manager.save(2, {"n": 2}).result()
        assert manager.all_steps() == [1, 2]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        (names.LOCK, os.mkdir),
        (names.LOCK, os.mkfifo),
        (names.OWNER, os.mkdir),
        (names.RUN, os.mkdir),
    ],
)
def test_what_is_in_the_way_of_a_file_of_the_run_is_named(tmp_path, name, make):
    """At once, and with what to do."""
    make(tmp_path / name)

    with pytest.raises((CorruptCheckpoint, OSError), match=f"{name} .* remove what is there"):
        CheckpointManager(tmp_path)
    (tmp_path / name).rmdir() if make is os.mkdir else (tmp_path / name).unlink()
    with CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == []


def ends(folder, code, *args):
    """Runs a program that has `manager`, which it does not close; its status and its stderr."""
    prelude = """
import atexit, os, sys, threading, numpy as np, jaxckpt
from jaxckpt.storage import LocalStorage
folder, *args = sys.argv[1:]
"""
    done = subprocess.run(
        [sys.executable, "-c", prelude + code, folder, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("elements", "ending", "status"),
    [
        (2_000_000, "", 0),
        (2_000_000, "1/0", 1),
        pytest.param(10_000, "", 0, marks=pytest.mark.slow),
        pytest.param(2_000_000, "sys.exit(3)", 3, marks=pytest.mark.slow),
    ],
)
def test_the_end_of_a_program_waits_for_its_saves(tmp_path, elements, ending, status):
    """Also if it does not close the manager; its status stays, and one line says why it waits."""
    code = """
manager = jaxckpt.CheckpointManager(folder)
for step in range(3):
    manager.save(step, {"w": np.full(int(args[0]), step)})
exec(args[1])
"""
    returned, said = ends(tmp_path, code, elements, ending)

    assert returned == status
    assert said.count("jaxckpt:") <= 1  # none if they had ended
    with CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [0, 1, 2]
        assert np.array_equal(manager.restore()["w"], np.full(elements, 2))


HANGING = """
manager = jaxckpt.CheckpointManager(folder, timeout_s=float(args[0]))
manager.save(1, {"w": 1}).result()
opened = threading.Event()
class Hangs(LocalStorage):
    def make_dir(self, path):
        opened.wait()
        super().make_dir(path)
manager._index.storage = Hangs()
manager.save(2, {"w": 2})
manager.save(3, {"w": 3})
"""


@pytest.mark.parametrize("ending", ["", "try: manager.close()\nexcept OSError: pass"])
def test_the_end_of_a_program_does_not_wait_for_ever(tmp_path, ending):
    """It names the steps that it could not save; the rest of the program ends as it would."""
    code = HANGING + "atexit.register(print, 'the last words', file=sys.stderr)\n" + ending

    returned, said = ends(tmp_path, code, 0.1)

    assert returned == 1
    lost = said.split("without these saves")[1]
    assert f"{tmp_path}/2, {tmp_path}/3" in lost
    assert "the last words" in lost
    with CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [1]


def test_a_save_cut_off_in_tensorstore_aborts_nothing(tmp_path):
    """The step is whole or absent."""
    code = """
manager = jaxckpt.CheckpointManager(folder, timeout_s=0.02)
manager.save(1, {"w": np.zeros(2_000_000)})
"""
    returned, said = ends(tmp_path, code)

    assert returned == ("without these saves" in said)
    with CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() in ([], [1])


def test_a_forked_child_does_not_wait_for_the_saves_of_its_parent(tmp_path):
    """It has no thread that could end them."""
    code = (
        HANGING
        + """
import multiprocessing
child = multiprocessing.get_context("fork").Process(target=sys.exit, args=[3])
child.start()
child.join()
opened.set()
sys.exit(child.exitcode)
"""
    )
    returned, said = ends(tmp_path, code, 20)

    assert (returned, said.count("jaxckpt: ")) == (3, 1), said  # the parent waits for its own
    with CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [1, 2, 3]


def test_a_forked_child_leaves_the_manager_at_once(tmp_path):
    """The saves are the parent's: the child's `close` ends, all else refuses, nothing changes."""
    code = (
        HANGING
        + """
import signal
with manager:
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        refused = 0
        for call, *args in (
            (manager.wait_until_finished,),
            (manager.save, 9, {"w": 9}),
            (manager.pin, 1),
        ):
            try:
                call(*args)
            except ValueError as error:
                refused += "forked" in str(error)
    else:
        opened.set()
if child == 0:
    os._exit(refused)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    returned, said = ends(tmp_path, code, 20)

    assert returned == 3, said
    with CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [1, 2, 3]


def test_the_end_of_a_program_reports_failed_saves(tmp_path):
    """Nobody calls the manager again, which would raise the error."""
    code = """
manager = jaxckpt.CheckpointManager(folder)
class Full(LocalStorage):
    def make_dir(self, path):
        raise OSError(28, "No space left on device")
manager._index.storage = Full()
manager.save(7, {"w": 1})
"""
    returned, said = ends(tmp_path, code)

    assert returned == 1
    assert "SaveFailed" in said
    assert f"{tmp_path}/7" in said


def test_saves_are_kept_after_the_main_thread_has_ended(tmp_path):
    """A thread that trains, and a function of `atexit`, save as before."""
    code = """
manager = jaxckpt.CheckpointManager(folder)
manager.save(1, {"w": 1})
def train():
    threading.main_thread().join()
    manager.wait_until_finished()
    manager.save(2, {"w": 2})
threading.Thread(target=train).start()
@atexit.register
def last():
    manager.save(3, {"w": np.zeros(1_000_000)})
    manager.close()
"""
    returned, said = ends(tmp_path, code)

    assert returned == 0, said
    with CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [1, 2, 3]


@pytest.mark.parametrize(
    "late",
    [
        "atexit.register(save)",
        "threading.Thread(target=lambda: (threading.main_thread().join(), save())).start()",
    ],
    ids=["atexit", "a thread"],
)
def test_the_first_save_may_come_after_the_main_thread_has_ended(tmp_path, late):
    """Though most of jaxckpt is loaded only then."""
    code = """
import atexit, sys, threading, jaxckpt
def save():
    jaxckpt.save(sys.argv[1], {"w": 1})
"""
    command = [sys.executable, "-c", code + late, tmp_path / "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert (run.returncode, run.stderr) == (0, "")
    assert CheckpointManager(tmp_path).restore() == {"w": 1}


# --- names of steps ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("naming", "name"),
    [
        ({}, "12"),
        ({"step_prefix": "ckpt"}, "ckpt_12"),
        ({"step_digits": 6}, "000012"),
        ({"step_prefix": "a_b", "step_digits": 6}, "a_b_000012"),
        ({"step_prefix": "", "step_digits": 2}, "_12"),
        ({"step_prefix": "é" * 90}, "é" * 90 + "_12"),
    ],
)
@as_processes
def test_steps_are_called_as_asked_for(tmp_path, naming, name, processes):
    """The next manager detects the names and continues with them."""
    with CheckpointManager(tmp_path, **naming) as manager:
        manager.save(12, {"n": 12}).result()
        assert (tmp_path / name).is_dir()

    with CheckpointManager(tmp_path) as manager:
        manager.save(34, {"n": 34}).result()
        assert manager.all_steps() == [12, 34]
        assert (tmp_path / name.replace("12", "34")).is_dir()
        assert manager.restore(step=12) == {"n": 12}
        meet(processes)
    with CheckpointManager(tmp_path, **naming) as manager:
        assert manager.all_steps() == [12, 34]


def test_steps_with_other_names_are_others(tmp_path):
    """A manager with a given name format ignores steps with other names."""
    with CheckpointManager(tmp_path, step_prefix="a") as manager:
        manager.save(1, {"n": 1})

    with CheckpointManager(tmp_path, step_prefix="b") as manager:
        assert manager.all_steps() == []
        manager.save(2, {"n": 2}).result()
        assert manager.all_steps() == [2]
        assert any("a_1" in problem for problem in manager.problems)


# --- resuming ----------------------------------------------------------------------------------


@as_processes
def test_which_step_is_restored(tmp_path, state, processes):
    """The latest, the best, or the one that was asked for; `restored_step` says which."""
    keep = KeepPolicy(metric="acc", mode="max")
    with CheckpointManager(tmp_path, keep=keep) as manager:
        for step, acc in ((1, 0.1), (2, 0.9), (3, 0.5)):
            manager.save(step, state(step), metrics={"acc": acc})
        manager.wait_until_finished()

        got = {}
        for wanted in ("latest", "best", 1):
            got[wanted] = manager.restore(step=wanted)["step"], manager.restored_step

        assert got == {"latest": (3, 3), "best": (2, 2), 1: (1, 1)}
        assert (manager.latest_step(), manager.best_step()) == (3, 2)


@as_processes
def test_a_step_that_is_not_there(tmp_path, processes):
    """The error lists the existing steps; without any metric there is no best step."""
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(CheckpointNotFound, match="no committed step"):
            manager.restore()
        manager.save(1, {"n": 1})
        manager.save(2, {"n": 2})
        manager.wait_until_finished()

        for call in (manager.metrics, manager.metadata, manager.custom_metadata):
            with pytest.raises(CheckpointNotFound, match=r"no committed step 7.*1, 2"):
                call(7)
        for restore in (manager.restore, manager.restore_items):
            with pytest.raises(
                (CheckpointNotFound, ProcessesDisagree), match=r"no committed step 7.*1, 2"
            ):
                restore(step=7)
        with pytest.raises((ValueError, ProcessesDisagree), match="no metric"):
            manager.restore(step="best")
        with pytest.raises(ValueError, match="no metric"):
            manager.best_step()
        assert manager.restored_step is None


@as_processes
def test_restoring_into_what_is_wanted(tmp_path, state, mesh, make_mesh, processes):
    """`like`, `mesh` and the other options work as in `jaxckpt.restore`."""
    other = NamedSharding(make_mesh(z=8), P(None, "z"))
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1)).result()
        like = {**state(0), "w": jax.ShapeDtypeStruct((64, 32), jnp.bfloat16, sharding=other)}

        got = manager.restore(like)
        part = manager.restore(only=["host"])

        assert got["w"].sharding == other
        assert got["w"].dtype == jnp.bfloat16
        assert same({**got, "w": 0}, {**state(1), "w": 0})
        assert part["host"].tolist() == [1, 1, 1]
        with pytest.raises(TreeMismatch):
            manager.restore({"nothing": jnp.ones(3)})


@as_processes
def test_restore_or_starts_or_goes_on(tmp_path, state, processes):
    """`init` makes the first state; afterwards it is traced, and computes nothing."""
    traced = []

    def init():
        w = jnp.zeros((64, 32))
        traced.append(isinstance(w, jax.core.Tracer))
        return {"w": w, "rng": jax.random.key(0)}

    with CheckpointManager(tmp_path) as manager:
        first, start = manager.restore_or(init)
        nothing = manager.restored_step
        manager.save(4, {"w": first["w"] + 1, "rng": jax.random.key(5)}).result()
        computed, traced[:] = traced[:], []

        got, step = manager.restore_or(init)

        assert (start, nothing, computed) == (0, None, [False])
        assert (step, manager.restored_step) == (4, 4)
        assert traced
        assert all(traced)
        assert same(got, {"w": jnp.ones((64, 32)), "rng": jax.random.key(5)})
        with pytest.raises(TypeError, match="init must be a function"):
            manager.restore_or(first)


@pytest.mark.parametrize("options", [{"step_digits": 8}, {"step_prefix": "ckpt"}])
def test_a_run_does_not_begin_anew_beside_steps_of_other_names(tmp_path, options):
    """They are not this run's by their names, and would be left behind without a word."""
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(90, {"w": 1.0}).result()
    with (
        CheckpointManager(tmp_path / "run", **options) as manager,
        pytest.raises(jaxckpt.UnsupportedFormat, match=r"named like \w*7, but 90 is one"),
    ):
        manager.restore_or(lambda: {"w": 0.0})

    with CheckpointManager(tmp_path / "run", step_digits=2) as manager:
        assert manager.restore_or(lambda: {"w": 0.0}) == ({"w": 1.0}, 90)
    with CheckpointManager(tmp_path / "new", **options) as manager:
        assert manager.restore_or(lambda: {"w": 0.0}) == ({"w": 0.0}, 0)


@pytest.mark.parametrize("way", ["value", "numpy", "wait", "restore"])
def test_an_init_that_cannot_be_traced_is_called(tmp_path, caplog, way):
    """It runs at the first start, so it runs at a restart: the values are those of the step."""
    jaxckpt.save(tmp_path / "base", {"w": jnp.ones(3)})

    def init():
        w = jnp.ones(3)
        return {
            "value": lambda: {"w": w * float(w[0])},
            "numpy": lambda: {"w": jnp.asarray(np.asarray(w))},
            "wait": lambda: {"w": w.block_until_ready()},
            "restore": lambda: jaxckpt.restore(tmp_path / "base", {"w": w}),
        }[way]()

    with CheckpointManager(tmp_path / "run") as manager:
        state, _ = manager.restore_or(init)
        manager.save(1, {"w": state["w"] * 2}).result()
        assert "init was called" not in caplog.text
        state, step = manager.restore_or(init)

    assert (step, state["w"].tolist()) == (1, [2.0] * 3)
    assert "init was called for the shapes, as jax cannot trace it" in caplog.text


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"rename": {"(": "x"}}, ValueError, "rename maps regular expressions"),
        ({"rename": {"w": r"\2"}}, ValueError, "cannot be used"),
        ({"items": 3}, TypeError, "items must be a dict"),
        ({"items": {"data": object()}}, TypeError, "'data' cannot be restored in place"),
        ({"only": "zz"}, ValueError, "only 'zz' matches no leaf"),
        ({"only": ["zz", "y"]}, ValueError, "only 'zz', 'y' match no leaf"),
        ({"shardings": 3}, TypeError, "shardings: leaf key needs a sharding"),
        ({"shardings": {"v": None}}, ValueError, "nothing is named v"),
        ({"shardings": {"w": P("x")}}, TypeError, "a PartitionSpec and mesh="),
    ],
)
def test_restore_or_checks_its_arguments_at_the_first_start_too(tmp_path, options, kind, said):
    """Not only at the restart after a preemption, when no one is there."""

    def init():
        return {"w": jnp.ones(4), "n": 0, "key": jax.random.key(0), "none": None}

    with CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(kind, match=re.escape(said)):
            manager.restore_or(init, **options)
        manager.save(1, init()).result()
        with pytest.raises(kind, match=re.escape(said)):
            manager.restore_or(init, **options)


def test_restore_or_takes_right_arguments_at_the_first_start(tmp_path, mesh):
    """A `rename` is for steps with older names; the state of `init` has the new ones."""
    state = {"w": jnp.ones((8, 4)), "n": 0, "key": jax.random.key(0), "none": None}
    options = {"rename": {"^v$": "w"}, "skip": "n", "mesh": mesh}
    options["shardings"] = {"w": P("x"), "key": P()}
    with CheckpointManager(tmp_path / "run") as manager:
        got, step = manager.restore_or(lambda: state, **options, items={"data": Counter()})

    assert step == 0
    assert same(got, state)


@pytest.mark.parametrize("older", [{"w": 5, "opt": 5, "aux": 5}, None])
@pytest.mark.parametrize(
    "options",
    [{"skip": ["aux", "opt"]}, {"skip": "aux"}, {"only": ["w", "aux"], "extra": "ignore"}],
)
def test_a_loop_with_globs_for_older_steps_goes_on_from_its_own(tmp_path, options, older):
    """Its own steps, and the first state of an empty run, lack what the globs are for."""
    starts = []
    if older is not None:
        with CheckpointManager(tmp_path) as manager:
            manager.save(1, older).result()

    for _ in range(2):
        with CheckpointManager(tmp_path) as manager:
            state, step = manager.restore_or(lambda: {"w": 0, "opt": 0}, **options)
            manager.save(step + 1, state).result()
        starts.append((step, state["w"]))

    assert starts == ([(0, 0), (1, 0)] if older is None else [(1, 5), (2, 5)])
    assert any("'aux' matches no leaf" in text for text in manager.problems)


def test_a_loop_with_rename_goes_on_from_its_own_steps(tmp_path):
    """The first start finds the older names, the next ones those of its own steps."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"v": 1}).result()
    for step in (1, 2):
        with CheckpointManager(tmp_path) as manager:
            got = manager.restore_or(lambda: {"w": 0}, rename={"^v$": "w"})
            manager.save(step + 1, {"w": step + 1}).result()

        assert got == ({"w": step}, step)
    lacking = {"w": 0, "x": 0}
    with CheckpointManager(tmp_path) as manager, pytest.raises(ValueError, match="no leaf"):
        manager.restore(lacking, rename={"^v$": "x"})


@pytest.mark.parametrize(
    ("older", "rename", "options"),
    [
        ({"enc": 5, "dec": 5}, {"^enc$": "n/enc", "^(n/)?dec$": "n/dec"}, {}),
        ({"enc": 5, "dec": 5}, {"^": "n/"}, {}),
        ({"enc": 5, "dec": 5}, {"^": "n/"}, {"skip": "ema"}),
        ({"m": {"enc": 5, "dec": 5}}, {"^m/": "n/"}, {"skip": "ema"}),
        ({"m": {"enc": 5, "dec": 5}}, {"^m/": "n/"}, {"missing": "keep"}),
        ({"m": {"enc": 5, "dec": 5}, "x": 1}, {"^m/": "n/", "^x": "y"}, {"extra": "ignore"}),
    ],
)
def test_a_loop_with_rename_goes_on_whatever_its_expressions_match(
    tmp_path, older, rename, options
):
    """Some match the new names too, or `like` has leaves that are not saved."""
    new = {"n": {"enc": 5, "dec": 5}}
    ema = {"ema": 0} if {*options} & {"skip", "missing"} else {}
    first, starts = jax.tree.map(lambda _: 0, new | ema), []
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, older).result()

    for _ in range(2):
        with CheckpointManager(tmp_path) as manager:
            state, step = manager.restore_or(lambda: first, rename=rename, **options)
            manager.save(step + 1, {"n": state["n"]}).result()
        starts.append((state, step))

    assert starts == [(new | ema, 1), (new | ema, 2)]


@pytest.mark.parametrize(
    ("older", "rename", "first"),
    [
        ({"head": 5}, {"^head": "old_head"}, {"head": 0, "old_head": 0}),
        ({"b0": 5, "b1": 6}, {"b1": "b2", "b0": "b1"}, {"b0": 0, "b1": 0, "b2": 0}),
    ],
    ids=["a new leaf of the old name", "a layer in front"],
)
def test_a_loop_that_moves_a_leaf_and_makes_one_in_its_place_goes_on(
    tmp_path, older, rename, first
):
    """Its own steps have both, which the expressions would give the same name."""
    moved, got = dict(zip([*first][-len(older) :], older.values(), strict=True)), []
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, older).result()

    for _ in range(3):
        with CheckpointManager(tmp_path) as manager:
            state, step = manager.restore_or(lambda: first, rename=rename, missing="keep")
            manager.save(step + 1, state).result()
        got.append(state)

    assert got == [first | moved] * 3


@pytest.mark.parametrize(
    "rename",
    [{"^a$": "b", "^b$": "a"}, {"^a$": "b", "^b$": "c", "^c$": "a"}],
    ids=["two", "three"],
)
def test_a_loop_refuses_a_rename_in_a_circle(tmp_path, rename):
    """Its own steps have the same names, so each start would swap them once more."""
    first = dict.fromkeys("abcxy", 0)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": 1, "b": 2, "c": 3, "v": 4, "x": 5}).result()
    moved = {"^x$": "y", "^v$": "x"}  # goes one way
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(ValueError, match=r"swaps a -> b, b -> .*, and would swap them back"):
            manager.restore_or(lambda: first, rename=rename | moved)

        state = manager.restore(first, rename=rename | moved)  # as the error says
        manager.save(2, state).result()
        wanted = {rename.get(f"^{old}$", old): n for n, old in enumerate("abc", 1)}
        assert state == wanted | {"x": 4, "y": 5}
        assert manager.restore_or(lambda: first, rename=moved) == (state, 2)
        assert manager.restore_or(lambda: first) == (state, 2)


@pytest.mark.parametrize("prefix", ["a\nb", "x" * 200])
def test_a_run_with_a_prefix_that_is_refused_now_goes_on_without_the_argument(tmp_path, prefix):
    """An older release has made it. The error says how."""
    for step in (1, 2):
        save(tmp_path / f"{prefix}_{step}", {"w": step})
    with pytest.raises(ValueError, match="goes on with it if step_prefix and step_digits are left"):
        CheckpointManager(tmp_path, step_prefix=prefix)

    with CheckpointManager(tmp_path) as manager:
        assert manager.restore_or(lambda: {"w": 0}) == ({"w": 2}, 2)
        manager.save(3, {"w": 3})
    assert sorted(path.name for path in tmp_path.glob("*_[0-9]")) == [
        f"{prefix}_{step}" for step in (1, 2, 3)
    ]


@pytest.mark.parametrize("rename", [{"^mm/": "n/"}, {"^m/": "nn/"}])
def test_a_misspelt_rename_of_a_loop_is_an_error(tmp_path, rename):
    """Also if leaves of the target may lack, and further ones in the step are ignored."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"m": {"w": 5}}).result()
        with pytest.raises(ValueError, match=r"no leaf|does not fit"):
            manager.restore_or(lambda: {"n": {"w": 0}}, rename=rename, missing="keep")


@as_processes
@pytest.mark.parametrize("only", [None, "*w"])
def test_restore_or_casts_the_first_state_as_it_does_a_saved_one(tmp_path, mesh, processes, only):
    """Else a run trains in float32, and in bfloat16 from the first preemption on."""
    sharding = NamedSharding(mesh, P("x", "y"))

    def init():
        w = jax.device_put(jnp.full((8, 8), 0.3), sharding)
        numbers = {"n": 3, "lr": 0.1, "ids": jnp.arange(2), "np": np.full(3, 0.7)}
        others = {"key": jax.random.key(0), "name": "run", "none": None, "one": np.float32(0.7)}
        return {"w": w, "nested": [{"w": jnp.float32(0.3)}], **numbers, **others}

    with CheckpointManager(tmp_path) as manager:
        first, start = manager.restore_or(init, dtype=jnp.bfloat16, only=only)
        manager.save(1, init()).result()
        again, step = manager.restore_or(init, dtype=jnp.bfloat16, only=only)

    assert (start, step) == (0, 1)
    assert same(first, again)
    assert first["w"].dtype == jnp.bfloat16
    assert first["np"].dtype == (np.float64 if only else jnp.bfloat16)
    assert first["w"].sharding == sharding


@as_processes
def test_restore_or_keeps_the_shardings_of_init(tmp_path, mesh, processes):
    """The shardings of its `out_shardings` win over the saved ones, which apply if it has none."""
    saved = NamedSharding(mesh, P("y"))
    wanted = NamedSharding(mesh, P("x", "y"))
    init = jax.jit(lambda: {"w": jnp.zeros((8, 8))}, out_shardings={"w": wanted})
    with CheckpointManager(tmp_path) as manager:
        manager.save(3, {"w": jax.device_put(jnp.ones((8, 8)), saved)}).result()

        got, _ = manager.restore_or(init)
        as_saved, _ = manager.restore_or(lambda: {"w": jnp.zeros((8, 8))})

        assert got["w"].sharding == wanted
        assert as_saved["w"].sharding == saved
        assert np.array_equal(got["w"], np.ones((8, 8)))


@as_processes
def test_restore_or_keeps_the_types_of_python(tmp_path, processes):
    """Python's int, float, bool, str and None, and numpy's scalars, keep their types and bits."""
    saved = {"n": 3, "lr": 0.5, "on": True, "name": "run", "none": None, "np": np.full(2, 1 << 40)}
    zero = {"n": 0, "lr": 0.0, "on": False, "name": "", "none": None, "np": np.zeros(2, np.int64)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {**saved, "w": jnp.ones(2)}).result()

        got, _ = manager.restore_or(lambda: {**zero, "w": jnp.zeros(2)})

        assert same(got, {**saved, "w": jnp.ones(2)})


@as_processes
def test_a_whole_run_goes_on_where_it_stopped(tmp_path, state, processes):
    """Stopped after any step, the loop of the design does each step once more or not at all."""
    keep = KeepPolicy(last=2)
    seen = []
    for _ in range(4):
        data = Counter()
        with CheckpointManager(tmp_path, save=SavePolicy(every_steps=2), keep=keep) as manager:
            now, start = manager.restore_or(lambda: state(0), items={"data": data})
            assert now["step"] == data.at == start
            for step in range(start, start + 3):
                data.at += 1
                seen.append(step)
                manager.save(step + 1, state(step + 1), items={"data": data})
            settle(manager, processes)

    assert seen == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8]


# --- items, metrics, metadata ------------------------------------------------------------------

ITEMS = {
    "json": {"a": [1, 2.5, None, True, "ä"], "b": {}},
    "number": 7,
    "text": "text",
    "nan": [math.inf, 1.5],
    "bytes": b"\x00\xff",
    "tuple": (1, ("a", [2])),
    "ints": {0: "zero", 10: np.arange(3)},
    "arrays": {"w": np.arange(6.0).reshape(2, 3)},
    "none": None,
    "empty": {},
}


@as_processes
def test_items_come_back_as_they_were(tmp_path, mesh, processes):
    """JSON, bytes and trees of any keys, beside the state."""
    items = ITEMS | {"ema": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("x", "y")))}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"n": 1}, items=items, metrics={"loss": 0.5}).result()

        got = manager.restore_items()

        assert manager.restored_step == 1
        assert got.pop("state") == {"n": 1}
        assert got.pop("metrics") == {"loss": 0.5}
        assert {name for name in items if not same(got[name], items[name])} == set()
        assert set(got) == set(items)
        assert manager.restore() == {"n": 1}


@as_processes
def test_a_dtype_is_for_the_state_alone(tmp_path, state, processes):
    """Its floating-point arrays are cast; keys, ints and every item stay as they are."""
    items = {"ema": jnp.full(3, 1 / 3)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1), items=items, dtype=jnp.bfloat16)
        manager.save(2, state(2), items=items).result()

        assert same(manager.restore(step=1), state(1) | {"w": state(1)["w"].astype(jnp.bfloat16)})
        assert same(manager.restore_items(step=1, items={"ema": None}), items)
        assert same(manager.restore(step=2), state(2))


@as_processes
def test_items_are_restored_onto_targets(tmp_path, mesh, processes):
    """Only those named: onto a tree, in place, or as saved; with the step before if one is bad."""
    array = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("x")))
    items = {"ema": {"w": (array,)}, "config": {"lr": 0.1}, "other": b"x"}
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            settled = manager.save(step, {"n": step}, items=items | {"data": Counter(step)})
            settled.result()
        meet(processes)
        in_first(processes, lambda: (tmp_path / "2" / "ema" / "_METADATA").write_bytes(b"{"))
        split = NamedSharding(mesh, P("y"))
        like = {"w": (jax.ShapeDtypeStruct((8,), jnp.bfloat16, sharding=split),)}
        data = Counter(99)
        targets = {"ema": like, "config": None, "data": data, "state": {"n": 0}}

        got = manager.restore_items(items=targets)

        assert manager.restored_step == 1
        assert list(got) == list(targets)
        assert same(got["ema"], {"w": (jax.device_put(array.astype(jnp.bfloat16), split),)})
        assert (got["config"], got["state"], got["data"], data.at) == (
            {"lr": 0.1},
            {"n": 1},
            data,
            1,
        )
        with pytest.raises(TreeMismatch, match="float32"):
            manager.restore_items(
                step=1, items={"data": data, "ema": {"w": (np.zeros(7, np.float32),)}}
            )
        with pytest.raises(TreeMismatch, match="no item 'typo'"):
            manager.restore_items(step=1, items={"typo": None})
        with pytest.raises(TypeError, match=r"restore_items\(step=step, items=\{'ema': like\}\)"):
            manager.restore(items={"ema": like})


def test_restoring_items_takes_no_longer_for_each_item_the_more_there_are(tmp_path):
    calls = []
    storage = WatchedStorage(LocalStorage(), lambda *call: calls.append(call))
    with CheckpointManager(PathIn(storage, str(tmp_path))) as manager:
        for step, count in (1, 10), (2, 20), (3, 40):
            items = {f"item{i}": {"a": np.arange(i + 1)} for i in range(count)}
            manager.save(step, {"n": step}, items=items).result()
        counts = []
        for step in manager.all_steps():
            calls.clear()
            manager.restore_items(step=step)
            counts.append(len(calls))

    assert counts[1] - counts[0] <= 10 * 9
    assert counts[2] - counts[1] <= 20 * 9


def test_items_come_from_one_save(tmp_path):
    """Also if the step is replaced by another one of its number between two of them."""
    runs = {name: tmp_path / name for name in ("run", "other")}
    for at, root in enumerate(runs.values()):
        with CheckpointManager(root) as manager:
            manager.save(1, {"n": at}, items={name: {"at": np.array(at)} for name in "ab"})
    replacements = [runs["other"] / "1"]

    def replace(verb, path):
        if verb.startswith("read") and path.endswith("1/b/_METADATA") and replacements:
            (runs["run"] / "1").rename(tmp_path / "old")
            replacements.pop().rename(runs["run"] / "1")

    storage = WatchedStorage(LocalStorage(), replace)
    with CheckpointManager(PathIn(storage, str(runs["run"]))) as manager:
        got = manager.restore_items(step=1)

    assert not replacements
    assert same(got, {"a": {"at": np.array(1)}, "b": {"at": np.array(1)}, "state": {"n": 1}})


@as_processes
def test_objects_go_on_from_their_own_states(tmp_path, processes):
    """Each process's object gets what that process saved."""
    mine = processes.index
    values = {"t": (1, 2), "i": {3: 4}, "a": np.arange(3, dtype=np.int8), "b": b"x", "n": 1 << 70}
    with CheckpointManager(tmp_path) as manager:
        saved = {"data": Counter(mine), "torch": Torch(**values, mine=mine)}
        manager.save(1, {"n": 1}, items=saved).result()
        data, torch = Counter(99), Torch()

        manager.restore(items={"data": data, "torch": torch})

        assert data.at == mine
        assert same(torch.values, {**values, "mine": mine})
        assert manager.restore_items()["data"] == [{"at": i} for i in range(processes.count)]


class Raw(Torch):
    """An object whose state is bytes."""

    def state_dict(self):
        return self.values["state"]

    def load_state_dict(self, state):
        self.values = {"state": state}


@pytest.mark.parametrize(
    "state",
    [
        struct.pack("<I", 48),
        "5".encode("utf-16-be"),
        b'\xef\xbb\xbf{"at": 5}',
        b'"\\ud800"',
        b"[" * 300 + b"]" * 300,
    ],
    ids=["a number", "UTF-16", "a BOM", "half a pair", "deep lists"],
)
def test_a_state_that_looks_like_json_comes_back(tmp_path, state):
    """Python's parser takes all of these bytes for JSON."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"n": 1}, items={"data": Raw(state=state)}).result()
        data = Raw()

        manager.restore(items={"data": data})

    assert data.values == {"state": state}
    assert manager.problems == []


def test_a_state_of_json_text_is_stored_as_it_is(tmp_path):
    """As one of Grain, which Orbax reads too."""
    state = b'{ "last_seen_indices": {"0": 5} }'
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"n": 1}, items={"data": Raw(state=state)}).result()
        data = Raw()

        manager.restore(items={"data": data})

    assert data.values == {"state": state}
    assert (tmp_path / "1" / "data" / names.process_file(0, 1)).read_bytes() == state


def test_a_state_that_an_earlier_release_took_for_json_comes_back(tmp_path):
    """It stored such bytes as they are."""
    state = struct.pack("<I", 48)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"n": 1}, items={"data": Raw(state=b"48")})
    (tmp_path / "1" / "data" / names.process_file(0, 1)).write_bytes(state)
    rewrite_record(tmp_path / "1")
    data = Raw()

    with CheckpointManager(tmp_path, mode="r") as manager:
        manager.restore(items={"data": data})

    assert data.values == {"state": state}


def test_a_state_may_have_keys_and_values_of_numpy(tmp_path):
    state = {np.int64(3): np.float32(1), "a": np.float64(2)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"n": 1}, items={"data": Torch(state=state)})
        manager.wait_until_finished()
        data = Torch()

        manager.restore(items={"data": data})

    assert same(data.values, {"state": state})


def test_an_item_may_have_a_long_name(tmp_path):
    """Up to what a file system takes."""
    name = "é" * 100
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"n": 1}, items={name: np.arange(3)}).result()

        assert manager.restore_items()[name].tolist() == [0, 1, 2]


@pytest.mark.multihost
@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4), (4, 2)])
def test_states_of_another_number_of_processes_are_refused(tmp_path, before, after):
    """The error says how many there were, and where to get them; the object stays as it is."""

    def save(processes):
        with CheckpointManager(tmp_path) as manager:
            manager.save(1, {"n": 1}, items={"data": Counter(processes.index)})

    def restore(processes):
        data = Counter(99)
        with CheckpointManager(tmp_path) as manager:
            with pytest.raises(TreeMismatch, match=f"{before} processes.*there are {after}") as no:
                manager.restore(items={"data": data})
            return data.at, "restore_items" in str(no.value), manager.restore_items()["data"]

    simulate(before, save)
    got = simulate(after, restore)

    assert got == [(99, True, [{"at": i} for i in range(before)])] * after


@as_processes
def test_items_stay_as_they_are_when_the_restore_fails(tmp_path, processes):
    """Whatever fails, no object's state is set."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(
            1, {"w": np.ones(3)}, items={"a": Counter(1), "b": Counter(2), "c": 3}
        ).result()
        a, b = Counter(98), Counter(99)

        with pytest.raises(TreeMismatch):
            manager.restore({"w": np.ones(4)}, items={"a": a, "b": b})
        with pytest.raises(TreeMismatch, match="restore_items"):
            manager.restore(items={"a": a, "c": b})
        with pytest.raises(TreeMismatch, match="no item 'missing'"):
            manager.restore(items={"a": a, "missing": b}, fallback=False)
        with pytest.raises(TypeError, match="neither set_state nor load_state_dict"):
            manager.restore(items={"a": a, "c": 3})

        assert (a.at, b.at) == (98, 99)
        assert manager.all_steps() == [1]


@as_processes
def test_metrics_of_any_kind_of_number(tmp_path, processes):
    """Numbers of jax and numpy too, even if a device is still computing them."""
    given = {
        "float": 0.5,
        "int": 3,
        "bool": True,
        "none": None,
        "text": "t",
        "np": np.float32(0.25),
        "np0": np.array(7),
        "jax": jax.jit(lambda x: x * 2)(jnp.float32(1.5)),
        "bf16": jnp.bfloat16(2.5),
        "int4": np.array(3, jnp.int4),
        "np bool": np.bool_(True),
        "one": jnp.ones((1,)),
        "inf": math.inf,
        "nested": {"eval": [0.5, np.float32(0.25)], "by task": {"a": jnp.float32(2)}, "none": {}},
    }
    want = {
        **{name: given[name] for name in ("float", "int", "bool", "none", "text", "inf")},
        "np": 0.25,
        "np0": 7,
        "jax": 3.0,
        "bf16": 2.5,
        "int4": 3,
        "np bool": True,
        "one": 1.0,
        "nested": {"eval": [0.5, 0.25], "by task": {"a": 2.0}, "none": {}},
    }
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"n": 1}, metrics=given)
        manager.save(2, {"n": 2}).result()
        here = manager.metrics(1), manager.metrics(2)
    with CheckpointManager(tmp_path) as manager:
        later = manager.metrics(1), manager.metrics(2)

    assert here == later == (want, {})


@as_processes
@pytest.mark.parametrize("leads", [True, False])
def test_the_metrics_of_process_0_count(tmp_path, processes, leads):
    """Whether the others pass some, or only the others do."""
    keep = KeepPolicy(last=1, best=1, metric="loss")
    with CheckpointManager(tmp_path, keep=keep) as manager:
        for step, loss in {1: 0.5, 2: 0.1, 3: 0.7}.items():
            metrics = {"loss": loss} if leads == (processes.index == 0) else None
            manager.save(step, {"n": step}, metrics=metrics)
        manager.wait_until_finished()

        assert manager.all_steps() == ([2, 3] if leads else [1, 2, 3])
        assert manager.metrics(2) == ({"loss": 0.1} if leads else {})
        assert len(manager.problems) == (not leads and processes.index == 0)
    assert (tmp_path / "2" / "metrics").exists() == leads


@as_processes
def test_metrics_that_rank_nothing(tmp_path, processes):
    """NaN, text and a metric that is not there are never the best; of equals the newer is."""
    losses = {1: 0.3, 2: float("nan"), 3: None, 4: 0.3, 5: "low", 6: jnp.nan, 7: 0.4}
    with CheckpointManager(tmp_path, keep=KeepPolicy(metric="loss")) as manager:
        for step, loss in losses.items():
            manager.save(step, {"n": step}, metrics={} if loss is None else {"loss": loss})
        manager.wait_until_finished()

        assert manager.best_step() == 4
        assert manager.restore(step="best") == {"n": 4}
        assert math.isnan(manager.metrics(2)["loss"])
        assert manager.metrics(3) == {}
        assert [
            p for p in manager.problems if "has no number for the metric 'loss'" in p
        ] == manager.problems
        assert len(manager.problems) == 1
        assert "step 3" in manager.problems[0]


@as_processes
def test_no_step_is_the_best_without_the_metric(tmp_path, processes):
    """Then there is nothing to restore, and the error lists the metrics there are."""
    with CheckpointManager(tmp_path, keep=KeepPolicy(metric="lss")) as manager:
        manager.save(1, {"n": 1}, metrics={"loss": 1, "acc": 2}).result()

        assert manager.best_step() is None
        with pytest.raises(
            (CheckpointNotFound, ProcessesDisagree), match=r"no step has a number 'lss'.*acc, loss"
        ):
            manager.restore(step="best")


@as_processes
def test_a_function_of_the_metrics_ranks(tmp_path, processes):
    """A step that lacks what the function reads is not ranked."""
    keep = KeepPolicy(last=1, best=1, metric=lambda metrics: metrics["hits"] / metrics["all"])
    hits = {1: 3, 2: 1, 3: None, 4: 2}
    with CheckpointManager(tmp_path, keep=keep) as manager:
        for step, n in hits.items():
            metrics = {"all": 4} if n is None else {"all": 4, "hits": jnp.int32(n)}
            manager.save(step, {"n": step}, metrics=metrics)
        settle(manager, processes)

        assert manager.all_steps() == [2, 4]
        assert manager.best_step() == 2


@pytest.mark.parametrize(
    "kind",
    [np.float32, jnp.float32, ml_dtypes.bfloat16, np.int64, lambda loss: loss > 0.2],
    ids=["numpy", "jax", "bfloat16", "int", "bool"],
)
def test_a_function_may_return_any_kind_of_number(tmp_path, kind):
    """All steps but the best and the newest are deleted."""
    keep = KeepPolicy(best=1, metric=lambda metrics: kind(metrics["loss"]))
    with CheckpointManager(tmp_path, keep=keep) as manager:
        for step, loss in {1: 0.125, 2: 7.0, 3: 5.0, 4: 6.0}.items():
            manager.save(step, {"n": step}, metrics={"loss": loss})
        manager.wait_until_finished()

        assert manager.all_steps() == [1, 4]
        assert manager.best_step() == 1


@as_processes
def test_no_step_goes_while_none_has_the_metric(tmp_path, processes, caplog):
    """A misspelt metric is reported once, not for each step; the first that has it ends this."""
    with CheckpointManager(tmp_path, keep=KeepPolicy(best=1, last=2, metric="lss")) as manager:
        for step in range(1, 6):
            manager.save(step, {"n": step}, metrics={"loss": step})
        settle(manager, processes)

        assert manager.all_steps() == [1, 2, 3, 4, 5]
        [problem] = manager.problems
        assert problem.startswith(
            "step 1 has no number for the metric 'lss' that KeepPolicy ranks by; it has loss"
        )
        meet(processes)
        manager.save(6, {"n": 6}, metrics={"lss": 1})
        settle(manager, processes)
        assert manager.all_steps() == [5, 6]


@as_processes
def test_metadata_of_a_step(tmp_path, state, processes):
    """The contents and the metadata of a step, without reading its arrays."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(
            1, state(1), items={"vocab": ["a"], "data": Counter()}, custom_metadata={"lr": [0.1]}
        )
        manager.save(2, {"n": 2}).result()

        held = manager.metadata(1)

        assert sorted(held.items) == ["data", "state", "vocab"]
        assert held.leaves["w"].shape == (64, 32)
        assert held.custom_metadata == {"lr": [0.1]}
        assert manager.custom_metadata(1) == {"lr": [0.1]}
        assert manager.custom_metadata(2) == {}
        assert "w" in str(held)


# --- what stays --------------------------------------------------------------------------------

# Step n has loss |n - 4|.
POLICIES = {
    "none": (KeepPolicy(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
    "last 1": (KeepPolicy(last=1), [10]),
    "last 3": (KeepPolicy(last=3), [8, 9, 10]),
    "last 100": (KeepPolicy(last=100), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
    "every 4": (KeepPolicy(every_steps=4), [4, 8, 10]),
    "last and every": (KeepPolicy(last=2, every_steps=3), [3, 6, 9, 10]),
    "best": (KeepPolicy(best=1, metric="loss"), [4, 10]),
    "best 3": (KeepPolicy(best=3, metric="loss"), [3, 4, 5, 10]),
    "highest": (KeepPolicy(best=1, metric="loss", mode="max"), [10]),
    "three rules": (KeepPolicy(best=1, last=2, every_steps=7, metric="loss"), [4, 7, 9, 10]),
    "no such metric": (KeepPolicy(best=1, metric="nothing"), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
    "when": (KeepPolicy(when=lambda info: info.metrics["loss"] == 2), [2, 6, 10]),
    "new": (KeepPolicy(newer_than_s=3600), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
    "by time": (KeepPolicy(every_seconds=3600), [1, 10]),
}


@pytest.mark.parametrize("policy", POLICIES)
@as_processes
def test_exactly_what_the_policy_keeps_stays(tmp_path, policy, processes):
    """Whether all was saved by one manager, or half of it by an earlier one."""
    keep, stays = POLICIES[policy]
    for root, stop in ((tmp_path / "a", 11), (tmp_path / "b", 6)):
        for start in sorted({1, stop % 11 or 1}):
            with CheckpointManager(root, keep=keep) as manager:
                for step in range(start, 11 if start == stop else stop):
                    manager.save(step, {"n": step}, metrics={"loss": abs(step - 4)})
                settle(manager, processes)

    for root in (tmp_path / "a", tmp_path / "b"):
        with CheckpointManager(root, mode="r") as reader:
            assert reader.all_steps() == stays
            assert temporaries(root) == []


@as_processes
def test_the_newest_step_stays_though_it_is_worse(tmp_path, processes):
    """After each save, and when the next one comes it goes."""
    with CheckpointManager(tmp_path, keep=KeepPolicy(best=1, metric="loss")) as manager:
        for step in range(1, 6):
            manager.save(step, {"n": step}, metrics={"loss": step})
            settle(manager, processes)
            assert manager.all_steps() == sorted({1, step})
            meet(processes)


def set_saved(step, seconds):
    """Makes a step say that it was saved at some time."""
    file = step / names.CHECKPOINT_METADATA
    told = json.loads(file.read_text())
    told["commit_timestamp_nsecs"] = int(seconds * 1e9)
    file.write_text(json.dumps(told))
    record = step / names.RECORD
    known = decode_record(record.read_bytes(), file=str(record))
    facts = FileFacts(size=file.stat().st_size, sha256=digest(file.read_bytes()))
    files = {**known.files, names.CHECKPOINT_METADATA: facts}
    record.write_bytes(encode_record(replace(known, files=files)))


def test_a_clock_that_jumps_deletes_nothing_too_soon(tmp_path):
    """Steps saved after a jump are kept, whichever way the clock jumped."""
    with CheckpointManager(tmp_path) as manager:
        for step in range(1, 8):
            manager.save(step, {"n": step})
    # An hour apart, but for 2 and 6, which are close to the one before; before 4 it goes back a
    # year, before 7 it goes far ahead.
    start, year = 1.7e9, 3.2e7
    times = [0, 60, 3600, -year, 3600 - year, 3660 - year, 1e9]
    for step, seconds in enumerate(times, start=1):
        set_saved(tmp_path / str(step), start + seconds)

    with CheckpointManager(tmp_path, keep=KeepPolicy(every_seconds=3600)) as manager:
        manager.save(8, {"n": 8})
        manager.wait_until_finished()

        assert manager.all_steps() == [1, 3, 4, 5, 7, 8]
        assert manager.latest_step() == 8


def test_a_step_that_another_program_deleted_cannot_be_deleted(tmp_path):
    """Though the manager has seen it."""
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"w": np.arange(3)}).result()
        shutil.rmtree(tmp_path / "1")
        with pytest.raises(CheckpointNotFound, match="no committed step 1"):
            manager.delete(1)


@pytest.mark.parametrize(("verb", "name"), [("create", names.DOOMED), ("rename", "1")])
def test_a_failure_of_the_disk_is_no_refusal_to_delete_a_step(tmp_path, verb, name):
    """The error is that of the disk, and the next try deletes the step."""
    broken = []

    def before(called, path):
        if broken and (called, path) == (verb, f"{tmp_path}/{name}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    with CheckpointManager(watched(tmp_path, before)) as manager:
        for step in (1, 2):
            manager.save(step, {"w": step}).result()
        broken.append(True)
        with pytest.raises(OSError, match="Input/output error") as caught:
            manager.delete(1)
        assert not isinstance(caught.value, ValueError)
        assert caught.value.errno == errno.EIO
        broken.clear()

        manager.delete(1)
        assert manager.all_steps() == [2]


@as_processes
def test_a_pinned_step_stays(tmp_path, processes):
    """It stays whatever the policy says, also in the next run, until it is unpinned."""
    for start in (1, 4):
        with CheckpointManager(tmp_path, keep=KeepPolicy(last=1)) as manager:
            for step in range(start, start + 3):
                manager.save(step, {"n": step})
                manager.wait_until_finished()
                if step == 1:
                    manager.pin(1)
            settle(manager, processes)
            assert manager.all_steps() == [1, start + 2]
            with pytest.raises((ValueError, ProcessesDisagree), match="pinned"):
                manager.delete(1)
            meet(processes)
    with CheckpointManager(tmp_path, keep=KeepPolicy(last=1)) as manager:
        manager.unpin(1)
        manager.save(7, {"n": 7})
        settle(manager, processes)

        assert manager.all_steps() == [7]
        with pytest.raises((CheckpointNotFound, ProcessesDisagree), match="no committed step 1"):
            manager.pin(1)


@as_processes
def test_deleting_by_hand(tmp_path, processes):
    """A step is deleted immediately; if the newest go, the run continues before them."""
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"n": step})
        manager.delete(3)
        manager.delete(1)

        assert manager.all_steps() == [2]
        assert temporaries(tmp_path) == []
        with pytest.raises((CheckpointNotFound, ProcessesDisagree), match="no committed step 3"):
            manager.delete(3)
        meet(processes)
        manager.save(3, {"n": 33}).result()
        assert manager.restore() == {"n": 33}


@as_processes
def test_steps_are_moved_instead_of_deleted(tmp_path, processes):
    """They restore by their path and do not count, also if the run has no other steps left."""
    keep = KeepPolicy(last=1, move_to="deleted")
    for start in (1, 3):
        with CheckpointManager(tmp_path, keep=keep) as manager:
            for step in (start, start + 1):
                manager.save(step, {"n": step})
            settle(manager, processes)
            assert (manager.all_steps(), manager.problems) == ([start + 1], [])
            assert restore(tmp_path) == {"n": start + 1}
            meet(processes)
    with CheckpointManager(tmp_path, keep=keep) as manager:
        manager.delete(4)

        assert manager.restore_or(lambda: {"n": 0}) == ({"n": 0}, 0)
        assert [restore(tmp_path / "deleted" / str(n)) for n in (1, 4)] == [{"n": 1}, {"n": 4}]
        with pytest.raises(CheckpointNotFound):
            restore(tmp_path)
        assert overview(tmp_path).strays == ()
        assert [step.step for step in overview(tmp_path / "deleted").steps] == [1, 2, 3, 4]
        meet(processes)


def test_a_run_is_not_opened_if_its_steps_cannot_be_moved(tmp_path):
    """Nothing is written but the owner, and the run opens with another directory."""
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"n": 1})
    (tmp_path / "file").touch()

    with pytest.raises(NotADirectoryError, match=r"/file"):
        CheckpointManager(tmp_path / "run", keep=KeepPolicy(move_to=f"{tmp_path}/file"))
    with pytest.raises(ValueError, match="cannot rename directories"):
        CheckpointManager("memory://moves/run", keep=KeepPolicy(move_to="deleted"))

    with CheckpointManager(tmp_path / "run", keep=KeepPolicy(move_to=f"{tmp_path}/bin")) as manager:
        manager.delete(1)
    assert restore(tmp_path / "bin" / "1") == {"n": 1}


def test_a_step_without_permission_stops_only_its_own_restore(tmp_path):
    """It is reported, neither counted nor deleted, and no other is restored in its place."""
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"n": step})
    run = denied(tmp_path, tmp_path / "3", "entries", "read")

    with CheckpointManager(run, keep=KeepPolicy(last=1)) as manager:
        assert (manager.all_steps(), manager.latest_step()) == ([1, 2], 2)
        assert manager.problems == [
            f"{tmp_path}/3 cannot be listed (Permission denied); it is left alone"
        ]
        assert [step for step, report in manager.scrub().items() if not report.ok] == [3]
        for restore_it in (manager.restore, lambda: manager.restore_or(dict)):
            with pytest.raises(PermissionError, match="/3'"):
                restore_it()
        with pytest.raises(PermissionError, match="/3'"):
            manager.delete(3)
        assert manager.restore(step=2) == {"n": 2}
        with pytest.raises(SaveFailed, match="Permission denied"):
            manager.save(3, {"n": 33}).result()
        manager.save(4, {"n": 4})
        manager.wait_until_finished()
        assert manager.all_steps() == [4]

    [listed] = [step for step in overview(run).steps if step.problem is not None]
    assert (listed.step, listed.unreadable) == (3, True)
    assert {"commit_success.txt", "state"} <= {*os.listdir(tmp_path / "3")}


def test_what_could_not_be_deleted_is_deleted_later(tmp_path):
    """A failure to delete is reported, fails no save, and is made up for by the next one."""
    with CheckpointManager(tmp_path, keep=KeepPolicy(last=1)) as manager:
        manager.save(1, {"n": 1}).result()
        end_saves(manager)

        class Stuck(Gate):
            def rename(self, src, dst):
                if names.is_deleting(os.path.basename(dst)):
                    raise OSError(errno.EBUSY, "Device or resource busy", src)
                return self._inner.rename(src, dst)

        manager._index.storage = Stuck("")
        manager.save(2, {"n": 2})
        manager.wait_until_finished()
        kept, problems = manager.all_steps(), manager.problems
        manager._index.storage = LocalStorage()
        manager.save(3, {"n": 3})
        manager.wait_until_finished()

        assert kept == [1, 2]
        assert any("busy" in problem for problem in problems)
        assert manager.all_steps() == [3]


@as_processes
def test_older_steps_go_only_while_one_that_was_read_back_stays(tmp_path, processes):
    """With `verified`; a damaged step is reported, and others stay in its place."""

    class Rotten(LocalStorage):
        def rename(self, src, dst):
            super().rename(src, dst)
            if os.path.basename(dst) in ("2", "3"):
                flip(Path(dst))

    def save(manager, step):
        manager.save(step, {"w": np.arange(1000) + step})
        settle(manager, processes)
        return manager.all_steps()

    with CheckpointManager(tmp_path, keep=KeepPolicy(last=1, verified=True)) as manager:
        manager._index.storage = Rotten()
        assert save(manager, 1) == [1]
        assert save(manager, 2) == [1, 2]
        assert save(manager, 3) == [1, 2, 3]
        problems = in_first(processes, lambda: manager.problems)
        assert save(manager, 4) == [4]
    with CheckpointManager(tmp_path, keep=KeepPolicy(last=1, verified=True)) as manager:
        assert manager.all_steps() == [4]
        assert save(manager, 5) == [5]

    if processes.index == 0:
        assert len(problems) == 2
        assert problems[0].startswith("step 2 was saved but cannot be read back: ")


def test_each_step_is_read_back_once(tmp_path):
    """Its data is read after its own commit only, and not at all without `verified`."""
    reads = []

    class Counting(LocalStorage):
        def read_into(self, path, offset, buffers):
            if sum(buffer.size for buffer in buffers) >= 8000:  # not the nodes of the database
                reads.append(path)
            super().read_into(path, offset, buffers)

    for verified, wanted in ((True, ["1", "2", "3"]), (False, [])):
        root = tmp_path / str(verified)
        keep = KeepPolicy(last=3, verified=verified)
        with CheckpointManager(root, keep=keep, incremental=False) as manager:
            manager._index.storage = Counting()
            for step in (1, 2, 3):
                manager.save(step, {"w": np.arange(1000)})
        assert [Path(path).relative_to(root).parts[0] for path in reads] == wanted
        reads.clear()


def test_a_deletion_that_a_crash_stopped_is_finished(tmp_path):
    """The next start removes what was unpublished, and no reader lists it."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"n": 1})
        manager.save(2, {"n": 2})
    (tmp_path / "1").rename(tmp_path / names.deleting("1", "0123456789abcdef"))

    with CheckpointManager(tmp_path, mode="r") as reader:
        assert reader.all_steps() == [2]
        assert temporaries(tmp_path)
    with CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [2]
        assert temporaries(tmp_path) == []


# --- damage and strays -------------------------------------------------------------------------


def largest_data_file(step):
    """Of those that hold the values, which are small; not the nodes of the processes' databases."""
    return max((step / "state").glob("d/*"), key=lambda file: file.stat().st_size)


def flip(step):
    file = largest_data_file(step)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


def truncate(step):
    file = largest_data_file(step)
    file.write_bytes(file.read_bytes()[:-1])


DAMAGES = {
    "empty record": lambda step: (step / names.RECORD).write_bytes(b""),
    "no data file": lambda step: largest_data_file(step).unlink(),
    "no tree": lambda step: (step / "state" / names.TREE_METADATA).unlink(),
    "no state": lambda step: shutil.rmtree(step / "state"),
    "bad tree": lambda step: (step / "state" / names.TREE_METADATA).write_text("{"),
    "bad metadata": lambda step: (step / names.CHECKPOINT_METADATA).write_text("[]"),
    "bad item": lambda step: next((step / "data").glob("process_*")).write_text('{"at":7}'),
    "flipped byte": flip,
    "truncated": truncate,
}


def test_an_object_that_raises_leaves_the_manager_at_the_restored_step(tmp_path, state):
    """The damaged step is set aside before the object is asked, so its number is free."""

    class Odd(Counter):
        def set_state(self, state):
            raise ZeroDivisionError

    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state(step), items={"data": Counter(step)})
    DAMAGES[next(iter(DAMAGES))](tmp_path / "2")

    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(ZeroDivisionError):
            manager.restore(items={"data": Odd()})
        manager.save(2, state(22)).result()
        assert same(manager.restore(), state(22))


def test_steps_that_are_links_are_not_passed_over(tmp_path, state, caplog):
    """A run goes on from none of them, and does not begin anew; a reader says which it skips."""
    with CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    for step in (2, 1):
        (tmp_path / "run" / f"{step}").rename(tmp_path / f"moved-{step}")
        (tmp_path / "run" / f"{step}").symlink_to(tmp_path / f"moved-{step}")
        if step == 2:
            assert same(restore(tmp_path / "run"), state(1))
            assert "took 1. Skipped: 2 is a link. Restore it by its own path" in caplog.text
            assert same(restore(tmp_path / "run" / "2"), state(2))

    with (
        CheckpointManager(tmp_path / "run") as manager,
        pytest.raises(UnsupportedFormat, match=r"has no steps, but . is a link.*Move"),
    ):
        manager.restore_or(lambda: state(0))


@pytest.mark.parametrize("damage", DAMAGES)
@as_processes
def test_a_damaged_step_is_set_aside(tmp_path, state, damage, processes):
    """It is reported, no run takes it for a step any more, and the one before is restored."""
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state(step), items={"data": Counter(step)})
    in_first(processes, lambda: DAMAGES[damage](tmp_path / "2"))
    data = Counter()

    with CheckpointManager(tmp_path) as manager:
        got, step = manager.restore_or(lambda: state(0), items={"data": data})
        meet(processes)
        problems = [problem for problem in manager.problems if "2" in problem]
        manager.save(2, state(22)).result()

        assert step == manager.restored_step == data.at == 1
        assert same(got, state(1))
        assert problems
        assert manager.all_steps() == [1, 2]
        assert same(manager.restore(), state(22))
        assert [n for n in os.listdir(tmp_path) if names.is_set_aside(n) and n.startswith("2.")]
    with CheckpointManager(tmp_path) as manager:
        if processes.index == 0:
            assert any("set aside earlier" in problem for problem in manager.problems)


class BadSector(Gate):
    """A storage that returns wrong bytes for one file."""

    def __init__(self, file):
        super().__init__("")
        self.file = str(file)

    def read(self, path, *, max_bytes):
        data = self._inner.read(path, max_bytes=max_bytes)
        return data[::-1] if path == self.file else data


@pytest.mark.multihost
@pytest.mark.parametrize("index", range(4))
def test_a_step_that_one_process_finds_damaged_is_set_aside(tmp_path, state, index):
    """All processes fall back to the previous step, and the number is free again."""

    def resume(processes):
        with CheckpointManager(tmp_path) as manager:
            for step in (1, 2):
                manager.save(step, state(step)).result()
            if processes.index == index:
                manager._index.storage = BadSector(tmp_path / "2" / "state" / names.TREE_METADATA)

            got, step = manager.restore_or(lambda: state(0))
            manager.save(2, state(22)).result()

            return step, same(got, state(1)), manager.all_steps()

    assert simulate(4, resume) == [(1, True, [1, 2])] * 4
    assert [name for name in os.listdir(tmp_path) if names.is_set_aside(name)]


@pytest.mark.parametrize("missing", [names.COMMIT_MARKER, names.RECORD])
@as_processes
def test_a_step_that_lacks_a_file_of_ours_is_set_aside(tmp_path, state, missing, processes):
    """Without its marker or its record it is damaged, and its number free."""
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    in_first(processes, lambda: (tmp_path / "2" / missing).unlink())

    with CheckpointManager(tmp_path) as manager:
        got, step = manager.restore_or(lambda: state(0))
        meet(processes)
        problems = [problem for problem in manager.problems if "2" in problem]
        manager.save(2, state(22)).result()
        manager.save(3, state(3)).result()

        assert step == 1
        assert same(got, state(1))
        assert problems or processes.index > 0
        assert same(manager.restore(step=2), state(22))
        assert same(manager.restore(), state(3))


@pytest.mark.parametrize("damage", ["flipped byte", "no data file", "bad tree"])
@as_processes
def test_a_damaged_step_without_a_fallback(tmp_path, state, damage, processes):
    """Asked for by its number, or with `fallback=False`, it is an error and stays in place."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2)).result()
        in_first(processes, lambda: DAMAGES[damage](tmp_path / "2"))
        data = Counter(99)

        for options in ({"fallback": False}, {"step": 2}, {"step": np.int64(2)}):
            with pytest.raises(CorruptCheckpoint):
                manager.restore(**options)
            with pytest.raises(CorruptCheckpoint):
                manager.restore_items(**options)
        with pytest.raises(CorruptCheckpoint):
            manager.restore_or(lambda: state(0), fallback=False)

        assert manager.all_steps() == [1, 2]
        assert data.at == 99


@as_processes
def test_the_next_best_step_is_restored(tmp_path, state, processes):
    """When the best is damaged; and the newest is then still in the way of earlier steps."""
    with CheckpointManager(tmp_path, keep=KeepPolicy(metric="loss")) as manager:
        for step, loss in ((1, 0.2), (2, 0.1), (3, 0.3)):
            manager.save(step, state(step), metrics={"loss": loss})
        manager.wait_until_finished()
        in_first(processes, lambda: flip(tmp_path / "2"))

        got = manager.restore(step="best")
        meet(processes)

        assert same(got, state(1))
        assert manager.all_steps() == [1, 3]
        with pytest.raises((StepExists, ValueError)):
            manager.save(2, state(2))
        end_saves(manager)


@as_processes
def test_no_step_is_whole(tmp_path, state, processes):
    """The error lists the problem of each step; a run never starts anew by itself."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2)).result()
    in_first(processes, lambda: (flip(tmp_path / "1"), truncate(tmp_path / "2")))

    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(CheckpointNotFound, match=r"(?s)step 2: .*step 1: "),
    ):
        manager.restore_or(lambda: state(0))


def test_a_reader_skips_a_damaged_step(tmp_path, state):
    """It reports it, and changes nothing."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2))
    truncate(tmp_path / "2")
    before = listing(tmp_path)

    with CheckpointManager(tmp_path, mode="r") as reader:
        assert reader.all_steps() == [1, 2]
        assert reader.latest_step() == 1
        assert same(reader.restore(), state(1))
        assert any("step 2" in problem for problem in reader.problems)
    assert listing(tmp_path) == before


def make_link(target):
    return lambda path: path.symlink_to(target)


def make_fifo(path):
    os.mkfifo(path)


def make_file(path):
    path.write_text("text")


def make_full_dir(path):
    path.mkdir()
    (path / "notes.txt").write_text("text")


def make_orbax_attempt(path):
    (path / "state").mkdir(parents=True)
    (path / names.CHECKPOINT_METADATA).write_text("{}")


STRAYS = {
    "empty directory": ("99", Path.mkdir),
    "directory of files": ("98", make_full_dir),
    "file": ("7", make_file),
    "fifo": ("9", make_fifo),
    "dangling link": ("8", make_link("nowhere")),
    "link to a step": ("97", make_link("1")),
    "link to its root": ("96", make_link(".")),
    "named link": ("newest", make_link("1")),
    "other directory": ("notes", make_full_dir),
    "other file": ("README.md", make_file),
    "other form of a step": ("0003", make_full_dir),
    "with a prefix": ("step_4", make_full_dir),
    "many digits": ("1" * 40, Path.mkdir),
    "other digits": ("٣", Path.mkdir),
    "negative": ("-3", Path.mkdir),
    "Orbax's attempt": ("5.orbax-checkpoint-tmp", make_orbax_attempt),
    "an older Orbax's attempt": ("5.orbax-checkpoint-tmp-1234567", make_orbax_attempt),
    "an editor's": (".9.swp", make_file),
    "no unicode": (os.fsdecode(b"\xff\xfe"), make_file),
}


@pytest.mark.parametrize("stray", STRAYS)
@as_processes
def test_strays_block_nothing(tmp_path, stray, processes):
    """They are reported and left unchanged; saving, listing, keeping and restoring continue."""
    name, make = STRAYS[stray]
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"n": 1})
    in_first(processes, lambda: make(tmp_path / name))

    with CheckpointManager(tmp_path, keep=KeepPolicy(last=2)) as manager:
        first = manager.all_steps(), manager.restore(), manager.latest_step()
        for step in (2, 3):
            manager.save(step, {"n": step}).result()
        settle(manager, processes)

        assert first == ([1], {"n": 1}, 1)
        assert manager.all_steps() == [2, 3]
        assert manager.restore() == {"n": 3}
        assert os.path.lexists(tmp_path / name)
        if processes.index == 0:
            assert [problem for problem in manager.problems if name in problem]


@as_processes
def test_what_belongs_to_a_run_is_no_stray(tmp_path, processes):
    """A run of ours has nothing to report, nor has what Orbax keeps beside its steps."""
    in_first(processes, lambda: (tmp_path / names.ROOT_METADATA).mkdir())
    for start in (1, 3):
        with CheckpointManager(tmp_path, keep=KeepPolicy(last=2)) as manager:
            manager.save(start, {"n": start})
            manager.save(start + 1, {"n": start})
            settle(manager, processes)
            assert manager.problems == []


@pytest.mark.parametrize("data", [b"", b"[1, 2]", b'{"custom_metadata": 3}'])
@pytest.mark.parametrize("where", ["run", "disk"])
def test_damaged_metadata_of_a_run_stops_no_job(tmp_path, where, data):
    """It is told and stays; once it is removed, the next job writes its own."""

    def train(steps):
        local, given = tmp_path / "disk", {"data": "c4"}
        with CheckpointManager(tmp_path / "run", local=local, run_metadata=given) as manager:
            state, start = manager.restore_or(lambda: {"n": 0})
            for step in steps:
                manager.save(step, {"n": step}).durable()
            return start, state, [text for text in manager.problems if f"{file}" in text]

    file = tmp_path / where / names.ROOT_METADATA / names.ROOT_METADATA_FILE
    train([1, 2])
    before = file.read_bytes()
    file.write_bytes(data)

    start, state, [problem] = train([3])
    assert (start, state) == (2, {"n": 2})
    assert "remove the file to have it written again" in problem
    assert file.read_bytes() == data
    file.unlink()
    assert train([4]) == (3, {"n": 3}, [])
    assert file.read_bytes() == before


def test_problems_are_told_once_each(tmp_path, caplog):
    """As a WARNING, and in `problems`, however often they are met."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"n": 1})
        manager.save(2, {"n": 2})
    (tmp_path / "99").mkdir()
    caplog.clear()

    with CheckpointManager(tmp_path) as manager:
        for _ in range(3):
            manager.all_steps()
            manager.latest_step()
            manager.restore()

        warned = [r.message for r in caplog.records if r.levelname == "WARNING"]
        assert len(warned) == 1
        assert manager.problems == warned


# --- readers -----------------------------------------------------------------------------------


def test_a_reader_writes_nothing(tmp_path, state):
    """On a file system that takes no writes it lists, restores and watches."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1), metrics={"loss": 1.0}, items={"vocab": ["a"]})
    before = listing(tmp_path)

    with CheckpointManager(tmp_path, mode="r", keep=KeepPolicy(metric="loss")) as reader:
        reader._index.storage = FailingStorage(LocalStorage(), 0, READ_ONLY, once=False)
        assert same(reader.restore(), state(1))
        assert reader.restore_items()["vocab"] == ["a"]
        assert [*reader.watch(timeout_s=0.01)] == [1]
        assert (reader.best_step(), reader.metrics(1)) == (1, {"loss": 1.0})
        assert reader.problems == []

    assert listing(tmp_path) == before


def test_a_reader_does_not_save(tmp_path):
    """Nor delete, nor pin; and a run that is not there yet has no steps, and is not made."""
    with CheckpointManager(tmp_path / "run", mode="r") as reader:
        assert (reader.should_save(1), reader.save(1, {})) == (False, None)
        assert "mode='r'" in reader.decision.reason
        for call in (
            lambda: reader.save(1, {}, force=True),
            lambda: reader.delete(1),
            lambda: reader.pin(1),
            lambda: reader.unpin(1),
        ):
            with pytest.raises(ValueError, match="mode='r'"):
                call()

        assert reader.all_steps() == []
        assert reader.latest_step() is None
        assert reader.restore_or(lambda: "new") == ("new", 0)
        assert [*reader.watch(timeout_s=0.01)] == []
    assert not (tmp_path / "run").exists()


def test_a_reader_sees_what_comes(tmp_path):
    """Steps in their order, each once, as they are committed; then an end."""
    with CheckpointManager(tmp_path) as manager, CheckpointManager(tmp_path, mode="r") as reader:
        manager.save(1, {"n": 1})
        manager.save(2, {"n": 2}).result()
        seen = []
        for step in reader.watch(timeout_s=0.05):
            seen.append((step, reader.restore(step=step)))
            for following in {2: [3], 3: [4, 5, 6]}.get(step, []):
                manager.save(following, {"n": following}).result()

        assert seen == [(n, {"n": n}) for n in (2, 3, 4, 5, 6)]
        assert [*reader.watch(timeout_s=0.01, after=0)] == [1, 2, 3, 4, 5, 6]
        assert [*reader.watch(timeout_s=0.01, after=4)] == [5, 6]
        assert [*reader.watch(timeout_s=0.01, after=6)] == []


@pytest.mark.multihost
def test_the_processes_of_a_reader_see_the_same_steps(tmp_path):
    """Process 0 looks for all: the others may come when there are newer steps."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"n": 1})

    def run(processes):
        with CheckpointManager(tmp_path, mode="r", timeout_s=20) as reader:
            if processes.index == 1:
                wait_until(lambda: any(map(names.is_lease, os.listdir(tmp_path))))
                with playing(Single()), CheckpointManager(tmp_path) as manager:
                    manager.save(2, {"n": 2})
            return [(n, reader.restore(step=n)) for n in reader.watch(timeout_s=0.05)]

    assert simulate(2, run) == [[(1, {"n": 1}), (2, {"n": 2})]] * 2


def test_processes_that_watch_from_other_steps_get_no_answer(tmp_path):
    """Else one of them gets the steps that the other has asked for."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"n": 1})

    def run(processes):
        with (
            CheckpointManager(tmp_path, mode="r", timeout_s=1) as reader,
            pytest.raises(CheckpointTimeout, match=f"missing process {1 - processes.index}"),
        ):
            [*reader.watch(timeout_s=0.05, after=[None, 1][processes.index])]

    simulate(2, run)


def test_what_a_reader_is_at_is_not_deleted(tmp_path):
    """It stays until the reader's loop continues; then the next save deletes it."""
    with (
        CheckpointManager(tmp_path, keep=KeepPolicy(last=1)) as manager,
        CheckpointManager(tmp_path, mode="r") as reader,
    ):
        manager.save(1, {"n": 1}).result()
        watched = reader.watch(timeout_s=0.05)
        at = next(watched)
        manager.save(2, {"n": 2}).result()
        manager.save(3, {"n": 3})
        manager.wait_until_finished()
        held = manager.all_steps(), reader.restore(step=at)
        with pytest.raises(ValueError, match="a reader holds it"):
            manager.delete(1)
        following = next(watched)
        manager.save(4, {"n": 4})
        manager.wait_until_finished()
        let_go = manager.all_steps()
        watched.close()
        manager.save(5, {"n": 5})
        manager.wait_until_finished()

        assert (at, held) == (1, ([1, 3], {"n": 1}))
        assert (following, let_go) == (3, [3, 4])
        assert manager.all_steps() == [5]
        assert not [name for name in os.listdir(tmp_path) if names.is_lease(name)]


@pytest.mark.parametrize("call", ["restore", "restore_items", "restore_or"])
def test_a_step_that_is_deleted_once_it_was_found(tmp_path, call):
    """The newest one is that which was saved meanwhile; any other is an error with the steps."""
    due = []

    def save_another(verb, path):
        """Between the look for a step and the lease of it."""
        if due and verb == "write" and names.is_lease(os.path.basename(path)):
            due.pop()
            writer.save(writer.latest_step() + 1, {"w": np.arange(4)}).result()
            writer.wait_until_finished()

    with (
        CheckpointManager(tmp_path, keep=KeepPolicy(last=1)) as writer,
        CheckpointManager(watched(tmp_path, save_another), mode="r") as reader,
    ):
        writer.save(1, {"w": np.arange(3)}).result()
        if call != "restore_or":
            due.append(2)
            with pytest.raises(CheckpointNotFound, match="2"):
                getattr(reader, call)(step=1)
        due.append(3)
        assert getattr(reader, call)(*[lambda: {"w": np.arange(4)}] * (call == "restore_or"))
        assert reader.restored_step == writer.latest_step() == (2 if call == "restore_or" else 3)
        assert not due


def test_a_lease_that_has_expired_holds_nothing(tmp_path):
    """Nor do invalid ones; the next start drops them, or the next deletion."""
    with CheckpointManager(tmp_path, keep=KeepPolicy(last=1)) as manager:
        manager.save(1, {"n": 1}).result()
        (tmp_path / names.lease("a")).write_text(json.dumps({"step": "1", "expires_ns": 1}))
        (tmp_path / names.lease("b")).write_text("nonsense")
        manager.save(2, {"n": 2})
        manager.wait_until_finished()

        assert manager.all_steps() == [2]
    with CheckpointManager(tmp_path):
        assert not [name for name in os.listdir(tmp_path) if names.is_lease(name)]


# --- preemption --------------------------------------------------------------------------------


def test_a_handler_that_came_later_is_told(tmp_path, caplog):
    """It may not call the manager's; once."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with CheckpointManager(tmp_path) as manager, CheckpointManager(tmp_path / "b"):
            manager.save(1, {"n": 1})
            assert not caplog.messages
            signal.signal(signal.SIGTERM, lambda number, frame: None)
            manager.save(2, {"n": 2})
            manager.save(3, {"n": 3})
    finally:
        signal.signal(signal.SIGTERM, before)

    (text,) = caplog.messages
    assert text.startswith("another handler of SIGTERM was set after the manager")


def test_a_manager_of_another_thread_hears_no_signal(tmp_path, caplog):
    """Python gives them to the main thread only; a reader needs none."""
    with ThreadPoolExecutor() as threads:
        for mode in ("w", "r"):
            threads.submit(CheckpointManager, tmp_path, mode=mode).result().close()

    (text,) = caplog.messages
    assert text == "this manager hears no signal: it was not made in the main thread"


def test_processes_that_cannot_agree_are_not_stopped(caplog):
    """Where jax's service is off, a notice or signal would end them before they save."""
    before = signal.getsignal(signal.SIGUSR1)
    jax.config.update("jax_enable_preemption_service", False)
    try:
        listener = Preemption(SimpleNamespace(count=2), listens=True, notice=lambda: 60.0)
    finally:
        jax.config.update("jax_enable_preemption_service", True)

    assert signal.getsignal(signal.SIGUSR1) is before
    assert not listener.reached(1)
    assert "jaxckpt-notice" not in [thread.name for thread in threading.enumerate()]
    assert "jax_enable_preemption_service is off" in caplog.text


@contextlib.contextmanager
def handler(number, what):
    before = signal.signal(number, what)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_manager_closed_in_another_thread_does_not_end_the_job(tmp_path, state, number):
    """It cannot remove its handler there; the next manager still saves before the end."""
    before = signal.getsignal(number)
    closed = CheckpointManager(tmp_path / "a")
    closer = threading.Thread(target=closed.close)
    closer.start()
    closer.join()
    try:
        with CheckpointManager(tmp_path / "b", save=SavePolicy(every_steps=100)) as manager:
            os.kill(os.getpid(), number)
            handle = manager.save(7, state(7))
            assert handle is not None
            assert manager.decision.reason == "preemption"
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_step_of_a_signal_is_saved_once(tmp_path, number, caplog):
    """Whatever the policy says; `reached_preemption` is then true, and handlers are chained.

    The log has what was decided, and how long that takes as far as the run has measured it.
    """
    heard = []
    with (
        caplog.at_level("WARNING", "jaxckpt"),
        handler(number, lambda *_: heard.append("before")),
        CheckpointManager(tmp_path, save=SavePolicy(every_steps=100)) as manager,
    ):
        before = manager.save(1, {"n": 1}), manager.reached_preemption(1)
        os.kill(os.getpid(), number)
        handle = manager.save(2, {"n": 2})
        why = manager.decision.reason
        reached = manager.reached_preemption(2)
        os.kill(os.getpid(), number)
        after = manager.save(3, {"n": 3}), manager.reached_preemption(3)
        manager.wait_until_finished()

        assert before == (None, False)
        assert handle is not None
        assert (why, reached) == ("preemption", True)
        assert after == (None, True)
        assert manager.all_steps() == [2]
        assert heard == ["before", "before"]
    [said] = [one.getMessage() for one in caplog.records]
    measured = r"nothing is measured yet|a save takes about .* s; how much time is left is unknown"
    assert re.fullmatch(f"saving step 2 for a signal to stop: ({measured})", said)


def test_a_signal_may_be_left_alone(tmp_path):
    """With `on_preemption=False`, and in a reader, handlers stay as they are."""
    mine = lambda *_: None  # noqa: E731
    with handler(signal.SIGTERM, mine):
        with CheckpointManager(tmp_path, save=SavePolicy(every_steps=9, on_preemption=False)) as m:
            assert signal.getsignal(signal.SIGTERM) is mine
            os.kill(os.getpid(), signal.SIGTERM)
            assert m.save(1, {"n": 1}) is None
            assert not m.reached_preemption(1)
        with CheckpointManager(tmp_path, mode="r"):
            assert signal.getsignal(signal.SIGTERM) is mine
        with CheckpointManager(tmp_path):
            assert signal.getsignal(signal.SIGTERM) is not mine
        assert signal.getsignal(signal.SIGTERM) is mine


def test_handlers_that_came_later_stay(tmp_path):
    """Closing a manager does not take away what others put over its handler."""
    later = lambda *_: None  # noqa: E731
    with handler(signal.SIGTERM, signal.SIG_IGN):
        with CheckpointManager(tmp_path):
            signal.signal(signal.SIGTERM, later)
        assert signal.getsignal(signal.SIGTERM) is later


@pytest.mark.parametrize("signals", [1, 2])
def test_a_second_signal_ends_the_process(tmp_path, signals):
    """As the first would have without a manager; one alone lets it end by itself."""
    code = f"""
import os, signal, jaxckpt
with jaxckpt.CheckpointManager({str(tmp_path)!r}) as manager:
    for _ in range({signals}):
        os.kill(os.getpid(), signal.SIGTERM)
    manager.save(1, {{"n": 1}})
    print(manager.reached_preemption(1))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == (0 if signals == 1 else -signal.SIGTERM)
    assert done.stdout == ("True\n" if signals == 1 else "")
    with CheckpointManager(tmp_path, mode="r") as reader:
        assert reader.all_steps() == ([1] if signals == 1 else [])


# --- what an attack found ------------------------------------------------------------------------


def test_a_step_that_cannot_be_read_now_is_kept(tmp_path):
    """It may be the best: only what is known not to be is deleted."""
    keep = KeepPolicy(best=1, last=1, metric="loss")
    with CheckpointManager(tmp_path, keep=keep) as manager:
        for step, loss in enumerate([0.1, 0.5, 0.5], start=1):
            manager.save(step, {"n": step}, metrics={"loss": loss})
    file = tmp_path / "1" / "metrics" / "metrics"
    file.write_bytes(bytes(1 + len(file.read_bytes())))

    with CheckpointManager(tmp_path, keep=keep) as manager:
        manager.save(4, {"n": 4}, metrics={"loss": 0.5})
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 4]
        assert any("step 1" in problem for problem in manager.problems)


def test_a_forked_child_can_be_terminated(tmp_path):
    """A worker that loads data has nothing to save, and does what the signal did before."""
    code = """
import os, signal, sys, jaxckpt
with jaxckpt.CheckpointManager(sys.argv[1]):
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os.write(tell, b"1")  # CPython forgets a signal that comes while it forks
        while True:  # `pause` could begin just after the signal
            pass
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM, status
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_error_outlives_the_manager_that_came_after(tmp_path):
    """Closing the earlier one raises it, though the later one has closed that already."""
    manager = CheckpointManager(tmp_path)
    manager._index.storage = FailingStorage(LocalStorage(), 0, FULL, once=False)
    manager.save(1, {"n": 1})
    with CheckpointManager(tmp_path) as later:
        with pytest.raises(SaveFailed, match="No space left"):
            manager.close()
        manager.close()
        assert later.all_steps() == []


@as_processes
def test_a_step_that_was_saved_anew_has_its_new_metrics(tmp_path, processes):
    """In every process, and in a reader."""
    keep = KeepPolicy(best=9, metric="loss")
    with (
        CheckpointManager(tmp_path, keep=keep) as manager,
        CheckpointManager(tmp_path, mode="r", keep=keep) as reader,
    ):
        manager.save(1, {"n": 1}, metrics={"loss": 0.5})
        manager.save(2, {"n": 2}, metrics={"loss": 0.1})
        settle(manager, processes)
        assert (manager.best_step(), reader.best_step()) == (2, 2)
        meet(processes)
        manager.delete(2)
        manager.save(2, {"n": 2}, metrics={"loss": 9.0})
        settle(manager, processes)
        assert (manager.best_step(), reader.best_step()) == (1, 1)
        assert manager.metrics(2) == {"loss": 9.0}


@pytest.mark.parametrize("spec", [None, P()])
def test_a_metric_may_be_donated(tmp_path, mesh, spec):
    """Such as a running loss, or a leaf of the state; each step has the value of its call."""
    update = jax.jit(lambda loss: loss + 1, donate_argnums=0)
    loss = jnp.float32(0)
    if spec is not None:
        loss = jax.device_put(loss, NamedSharding(mesh, spec))
    with CheckpointManager(tmp_path) as manager:
        for step in range(20):
            manager.save(step, {"loss": loss}, metrics={"loss": loss})
            loss = update(loss)
        manager.wait_until_finished()

        assert [manager.metrics(step)["loss"] for step in range(20)] == list(range(20))


class Tensor:
    """A number of another library, which changes in place."""

    shape = ()

    def __init__(self, value):
        self.value = value

    def __array__(self, dtype=None, copy=None):
        return np.array(self.value)

    def __setitem__(self, where, value):
        self.value = value


@pytest.mark.parametrize("kind", [np.array, Tensor])
def test_a_metric_that_is_changed_later_is_that_of_the_call(tmp_path, kind):
    """Of numpy, or of another library."""
    loss = kind(1.0)
    gate = Gate("make_dir")
    with CheckpointManager(tmp_path) as manager:
        manager._index.storage = gate
        manager.save(1, {"n": 1}, metrics={"loss": loss})
        loss[...] = -1.0
        gate.open.set()
        manager.wait_until_finished()
        assert jaxckpt_metrics(tmp_path) == {"loss": 1.0}


def jaxckpt_metrics(root):
    with CheckpointManager(root, mode="r") as reader:
        return reader.metrics(1)


def test_a_forced_save_that_failed_does_not_make_the_step_due(tmp_path):
    """The rules decide about the step as before."""
    with CheckpointManager(tmp_path, save=SavePolicy(every_steps=10)) as manager:
        assert not manager.should_save(3)
        with pytest.raises(UnsupportedLeaf):
            manager.save(3, {"x": object()}, force=True)
        assert not manager.should_save(3)


@pytest.mark.parametrize("name", ["budget_bytes", "timeout_s"])
def test_there_is_no_wait_without_an_end(tmp_path, name):
    """A timeout of None is refused."""
    with pytest.raises(TypeError, match=f"{name} must be"):
        CheckpointManager(tmp_path, **{name: None})


def test_a_step_under_another_number_is_told_of(tmp_path):
    """Its values belong to the original step, and whoever moved it may not know this."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(3, {"w": np.arange(3.0)})
    shutil.copytree(tmp_path / "3", tmp_path / "5")

    with CheckpointManager(tmp_path) as manager:
        assert manager.restore()["w"].tolist() == [0, 1, 2]
        assert manager.restored_step == 5
        [told] = [problem for problem in manager.problems if "was saved as 3" in problem]
        assert f"{tmp_path}/5" in told


def test_a_step_from_before_another_job_went_on_is_refused(tmp_path):
    """Its number is free, since that job has deleted its own; it would come after later ones."""
    first = CheckpointManager(tmp_path)
    other = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, jaxckpt\n"
            "keep = jaxckpt.KeepPolicy(last=2)\n"
            "with jaxckpt.CheckpointManager(sys.argv[1], keep=keep) as manager:\n"
            "    for step in (1, 2, 3):\n"
            "        manager.save(step, {'w': step})\n",
            str(tmp_path),
        ],
        check=True,
        capture_output=True,
    )
    assert other.returncode == 0

    with pytest.raises(SaveFailed):  # the run is the other's
        first.save(1, {"w": 0}).result(60)
    with contextlib.suppress(SaveFailed):
        first.close()
    late = CheckpointManager(tmp_path)
    position = late._saver.position
    position.floor = position.base = -1  # as if it had been opened before
    with pytest.raises(SaveFailed, match="another job has saved step 3"):
        late.save(1, {"w": 0}).result(60)
    with contextlib.suppress(SaveFailed):
        late.close()
    assert sorted(name for name in os.listdir(tmp_path) if name.isdecimal()) == ["2", "3"]


def test_a_step_that_is_not_due_does_not_look_at_the_disk(tmp_path):
    """Also before the first step of a run, when it is not known how steps are called."""
    with CheckpointManager(tmp_path / "run", save=SavePolicy(every_steps=100)) as manager:
        watched = FailingStorage(LocalStorage(), 0, OSError(5, "bad"), once=False, reads=True)
        storage, manager._index.storage = manager._index.storage, watched
        for step in range(1, 100):
            assert manager.save(step, {"w": 1.0}) is None
        manager._index.storage = storage

    assert watched.events == []


@pytest.mark.multihost
@pytest.mark.parametrize("call", ["restore", "restore_items"])
def test_processes_that_see_a_deletion_at_different_times_do_not_wait(tmp_path, call):
    """A reader whose lease comes too late falls back, and takes the others with it."""
    late = []

    class Late(LocalStorage):
        def kind(self, path):
            is_gone = current().index == 1 and path == f"{tmp_path}/run/2"
            late.extend([path] * is_gone)
            return None if is_gone else super().kind(path)

    with CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, {"n": np.full(3, step)})

    def read(_):
        place = PathIn(Late(), str(tmp_path / "run"))
        with CheckpointManager(place, mode="r", timeout_s=5) as manager:
            getattr(manager, call)()
            return manager.restored_step

    assert simulate(2, read) == [1, 1]
    assert late
