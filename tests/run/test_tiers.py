"""Runs with `local`: steps are saved on the host first, and uploaded in the background."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from itertools import count, pairwise

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxckpt
from jaxckpt import CheckpointManager, KeepPolicy, LocalTier, SavePolicy
from jaxckpt._core.threads import daemons
from jaxckpt._disk.find import find
from jaxckpt._run import one_step, preemption, uploader
from jaxckpt._run.copies import newest_first, over_bound
from jaxckpt._run.upload import upload_token
from jaxckpt.errors import (
    CheckpointNotFound,
    CheckpointTimeout,
    ProcessesDisagree,
    SaveFailed,
    StepExists,
)
from jaxckpt.format import names
from jaxckpt.format import step as step_format
from jaxckpt.storage import LocalStorage, MemoryStorage, PathIn, locate
from jaxckpt.testing import CrashingStorage, SimulatedCrash, WatchedStorage, simulate
from jaxckpt.testing._storage import _Relay
from tests.commandline import cli, said_json
from tests.twins import watched
from tests.waiting import wait_until

SIZE = 100_000  # values of a state, so that its chunk is a file of its own


def state(step):
    return {"w": jnp.full(SIZE, step, jnp.float32), "step": step}


@pytest.fixture(params=["dir", "memory"])
def directory(request, tmp_path):
    return str(tmp_path / "durable") if request.param == "dir" else f"memory://{tmp_path.name}/run"


@pytest.fixture
def local(tmp_path):
    return tmp_path / "local"


class Store(_Relay):
    """A place that can be slow, or away."""

    def __init__(self):
        super().__init__(LocalStorage())
        self.answers = threading.Event()
        self.answers.set()
        self.slow = "all"  # or the verb that waits for `answers`
        self.slow_at = ""  # where it waits, by a part of the path
        self.is_slow = threading.Event()  # once a verb has waited
        self.away: OSError | None = None
        self.only = ""  # what is away, by a part of the path
        self.asked = threading.Event()  # while it did not answer

    def _before(self, verb, path, data=b""):
        if threading.current_thread() is not threading.main_thread():
            self.asked.set()
        if self.slow in ("all", verb) and self.slow_at in path:
            if not self.answers.is_set():
                self.is_slow.set()
            self.answers.wait(60)
        if self.away is not None and self.only in path:
            raise OSError(self.away.errno, self.away.strerror, path)


@pytest.fixture
def store(tmp_path, monkeypatch, limits):
    """The storage behind the path of the run, which the tests hold up."""
    found = Store()
    real = locate

    def at(path):
        storage, root = real(path)
        return (found if root == str(tmp_path / "run") else storage), root

    monkeypatch.setattr("jaxckpt._run.root.locate", at)
    limits(uploader, _FIRST_PAUSE_S=0.01)
    yield found
    found.away = None
    found.answers.set()


def damage(step):
    """Flips a bit in the largest file of a step in a directory."""
    file = max(step.rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


# --- saving ----------------------------------------------------------------------------------


def test_a_step_is_committed_locally_then_uploaded(directory, local):
    with CheckpointManager(directory, local=local) as manager:
        handle = manager.save(1, state(1), items={"data": {"at": 7}}, metrics={"loss": 2.0})
        handle.result()
        assert jaxckpt.verify(local / "1").ok
        handle.durable()
        assert manager.tiers == {"local": [1], "durable": [1], "waiting": []}

    for place in (directory, local):
        with CheckpointManager(place, mode="r") as reader:
            assert reader.restore()["w"][5] == 1
            assert reader.restore_items()["data"] == {"at": 7}
            assert reader.metrics(1) == {"loss": 2.0}
    assert jaxckpt.verify(f"{directory}/1").ok


def test_a_question_about_another_step_takes_no_step_from_the_directory(directory, local):
    """It is asked while the state of an item is taken, as another thread may ask."""
    policies = {"save": SavePolicy(every_steps=10)}
    tier = LocalTier(local, save=SavePolicy(every_steps=1))
    with CheckpointManager(directory, local=tier, **policies) as manager:

        class Asking:
            def get_state(self):
                assert manager.should_save(11)
                return {"at": 10}

            def set_state(self, state): ...

        handle = manager.save(10, state(10), items={"data": Asking()})
        handle.durable()

        assert manager.tiers["durable"] == [10]


def test_each_place_has_its_own_policies(directory, local):
    """`save` names what is uploaded, `LocalTier.save` what is saved besides."""
    with CheckpointManager(
        directory,
        save=SavePolicy(every_steps=4),
        keep=KeepPolicy(last=2),
        local=LocalTier(local, save=SavePolicy(every_steps=3), keep=KeepPolicy(last=3)),
    ) as manager:
        handles = {step: manager.save(step, state(step)) for step in range(1, 13)}
        manager.wait_until_finished()

        assert manager.tiers == {"local": [8, 9, 12], "durable": [8, 12], "waiting": []}
        assert manager.all_steps() == [8, 9, 12]
        assert [step for step, handle in handles.items() if handle] == [3, 4, 6, 8, 9, 12]
        with pytest.raises(ValueError, match=r"step 9 stays in .*local"):
            handles[9].durable()
        assert not manager.should_save(13)
        assert manager.save(13, state(13), force=True) is not None
        manager.wait_until_finished()
        assert manager.tiers["durable"] == [12, 13]


@pytest.mark.parametrize("late", [0, 1])
def test_a_process_whose_local_save_is_late_leaves_no_wait_behind(tmp_path, late):
    """A wait without time fails in all processes, and the next one succeeds in all."""
    asked = threading.Event()

    def job(processes):
        local = LocalTier(tmp_path / f"local{processes.index}", durable_timeout_s=60.0)
        with CheckpointManager(tmp_path / "run", local=local, timeout_s=60.0) as manager:
            handle = manager.save(1, state(1))
            if processes.index == late:
                handle.on_end(lambda _: asked.wait(60))
            with pytest.raises((CheckpointTimeout, ProcessesDisagree)):
                handle.durable(0.0)
            processes.within(60).gather("asked", None, len)
            asked.set()
            handle.durable()
        return (tmp_path / "run" / "1" / names.COMMIT_MARKER).exists()

    assert simulate(2, job) == [True, True]


def test_a_wait_for_an_upload_names_the_processes_whose_parts_have_not_come(tmp_path):
    def job(processes):
        local = LocalTier(tmp_path / f"local{processes.index}", durable_timeout_s=60.0)
        with CheckpointManager(tmp_path / "run", local=local, timeout_s=60.0) as manager:
            sender, uploads = manager._tiers.sender, manager._tiers.uploader.worker
            sender.has_begun = lambda one: False  # so that process 1 sends nothing
            handle = manager.save(1, state(1))
            handle.result()
            if processes.index == 0:
                wait_until(lambda: [one.waits_for for one in uploads.under_way()] == [[1]])
            processes.within(60).gather("waits", None, len)
            with pytest.raises(
                (CheckpointTimeout, ProcessesDisagree), match=r"processes \[1\]"
            ) as one:
                handle.durable(0.0)
            assert processes.index == 1 or one.value.missing == (1,)
            del sender.has_begun
            handle.durable()

    simulate(2, job)


def test_a_wait_may_have_no_end(tmp_path, local, store):
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        store.answers.clear()
        handle = manager.save(1, state(1))
        assert store.asked.wait(60)
        threading.Timer(0.1, store.answers.set).start()
        handle.durable(math.inf)
        manager.wait_until_finished(math.inf)


def test_a_notice_of_one_host_is_counted_on_all(tmp_path, limits, caplog):
    """The first process logs what fits, and an older upload gives way: it knows the time left."""
    limits(preemption, _POLL_S=3600.0)

    def job(processes):
        local = LocalTier(tmp_path / f"local{processes.index}")
        with CheckpointManager(tmp_path / "run", local=local, timeout_s=60.0) as manager:
            manager.save(1, state(1)).durable()
            if processes.index == 1:
                manager._saver.preemption._deadline_s = time.monotonic() + 60.0
            manager._saver._explain_what_fits(2, 1000)
            return manager._tiers.uploader.urgent

    assert simulate(2, job) == [2, None]
    assert "saving step 2 for the end of a host in" in caplog.text
    assert "this fits" in caplog.text


def test_an_upload_that_gave_way_goes_on_beside_two_that_wait(tmp_path, local, store):
    """It is one of three for a moment, and the newest of them is about to be sent."""
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        store.answers.clear()
        handles = [manager.save(1, state(1))]
        handles[0].result()
        assert store.asked.wait(60)
        for step in (2, 3):
            handles.append(manager.save(step, state(step)))
            handles[-1].result()
        manager._tiers.sender.pace.give_way()
        store.answers.set()
        for handle in handles:
            handle.durable()

    assert sorted(path.name for path in (tmp_path / "run").glob("?")) == ["1", "2", "3"]


@pytest.mark.parametrize("below", ["", "/below"])
def test_a_file_is_no_local_directory(tmp_path, below):
    (tmp_path / "file").write_text("x")

    with pytest.raises(NotADirectoryError, match=f"{tmp_path}/file{below} .*cannot hold a run"):
        CheckpointManager(tmp_path / "run", local=f"{tmp_path}/file{below}")


@pytest.mark.parametrize("below", ["run", "run/local", ""])
def test_the_places_are_apart_also_by_links(tmp_path, below):
    (tmp_path / "shared" / "run").mkdir(parents=True)
    (tmp_path / "link").symlink_to("shared")

    for one, other in (("link", "shared"), ("shared", "link")):
        with pytest.raises(ValueError, match="must not contain each other"):
            CheckpointManager(tmp_path / one / "run", local=tmp_path / other / below)
    assert [*(tmp_path / "shared" / "run").iterdir()] == []


def test_without_local_there_is_one_place(tmp_path):
    with CheckpointManager(tmp_path / "run") as manager:
        handle = manager.save(1, state(1))
        handle.durable()
        assert manager.tiers == {"local": [], "durable": [1], "waiting": []}


def test_a_policy_by_the_clock_saves_when_it_is_due(tmp_path, local):
    """`every_seconds` of the directory counts from its own saves, not from the local ones."""
    save = SavePolicy(every_seconds=3600.0)
    tier = LocalTier(local, save=SavePolicy(every_steps=1))
    with CheckpointManager(tmp_path / "run", save=save, local=tier) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        manager._saver.due.schedules[0] = manager._saver.due.schedules[0].saved(0, now_s=-7200.0)
        manager.save(3, state(3))
        manager.save(4, state(4))
        manager.wait_until_finished()
        assert manager.tiers["durable"] == [3]


# --- the store is slow or away ---------------------------------------------------------------


def test_a_store_that_does_not_answer_stops_nothing(tmp_path, local, store):
    """Saves are committed locally; what the queue cannot hold is dropped and reported."""
    with CheckpointManager(
        tmp_path / "run", local=LocalTier(local, keep=KeepPolicy(last=1))
    ) as manager:
        store.answers.clear()
        handles = [manager.save(step, state(step)) for step in range(1, 8)]
        for handle in handles:
            handle.result(60)
        try:
            store.asked.wait(60)
            with pytest.raises(CheckpointTimeout, match="the upload continues"):
                handles[-1].durable(0.01)
            waiting = manager._tiers.uploader.steps()
            assert waiting[-2:] == [6, 7]
            there = {step.name for step in local.iterdir()}  # some of them being deleted
            assert {*map(str, waiting)} <= there
        finally:
            store.answers.set()
        handles[-1].durable()
        manager.wait_until_finished()
        manager.save(8, state(8)).durable()  # now what waited may go
        manager.wait_until_finished()  # the deletions too, beside which the upload may end
        tiers = manager.tiers
        dropped = [problem for problem in manager.problems if "was not uploaded" in problem]

    assert tiers["local"] == [8]
    assert tiers["durable"] == [*waiting, 8]
    assert len(dropped) == 7 - len(waiting)
    with pytest.raises(SaveFailed, match="newer steps wait"):
        handles[3].durable()


def test_an_upload_is_tried_again_until_the_store_is_back(tmp_path, local, store):
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        store.away = OSError(errno.EIO, "away")
        first = manager.save(1, state(1))
        first.result()
        store.asked.wait(60)
        manager.save(2, state(2)).result()
        assert manager.restore(step=2)["w"][0] == 2
        store.away = None
        first.durable()
        manager.wait_until_finished()
        assert manager.tiers["durable"] == [1, 2]


def test_closing_ends_the_pause_after_an_error(tmp_path, local, store, limits):
    """Which may be long, when the store has answered again for a while."""
    limits(uploader, _FIRST_PAUSE_S=3600.0, _LONGEST_PAUSE_S=3600.0)
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        store.away = OSError(errno.EIO, "away")
        manager.save(1, state(1)).result()
        wait_until(lambda: manager._tiers.uploader._pause_s > 0)
        store.away = None

    assert jaxckpt.restore(tmp_path / "run")["step"] == 1


def test_an_upload_is_given_up_after_its_time(tmp_path, local, store):
    """The error is raised once: by the handle, or else by the next call; the step stays local."""
    with CheckpointManager(
        tmp_path / "run", local=LocalTier(local, durable_timeout_s=0.05)
    ) as manager:
        store.away = OSError(errno.EACCES, "no permission")
        handle = manager.save(1, state(1))
        with pytest.raises(OSError, match="no permission") as caught:
            handle.durable(60)
        assert f"jaxckpt upload {local} {tmp_path / 'run'}" in caught.value.__notes__[0]
        manager.save(2, state(2)).result()
        uploads = manager._tiers.uploader  # which may get the step only after its commit
        wait_until(lambda: 2 in uploads._given_up and not uploads.steps(), limit_s=60)
        with pytest.raises(OSError, match="no permission"):
            manager.save(3, state(3))
        store.away = None
        manager.save(4, state(4)).durable(60)
        manager.wait_until_finished()
        assert manager.tiers == {"local": [2, 4], "durable": [4], "waiting": []}


def unfinished(run):
    """Returns the steps of which a run's directory has a part under a temporary name."""
    return {path.name.partition(".")[0] for path in run.glob("*.orbax-checkpoint-tmp-*")}


def test_an_upload_that_is_dropped_leaves_nothing(tmp_path, local, store):
    """Such parts of steps would fill the disk of the directory while the job runs."""
    run = tmp_path / "run"
    with CheckpointManager(run, local=local) as manager:
        store.away, store.only = OSError(errno.EIO, "away"), "commit_success.txt"
        for step in range(1, 5):
            manager.save(step, state(step)).result()
            wait_until(lambda step=step: str(step) in unfinished(run))
        store.away = None
        manager.wait_until_finished()
        manager._tiers.uploader.worker.settle()

        assert "step 1 was not uploaded: newer" in manager.problems[0].replace(f"{run}/", "step ")
        assert not unfinished(run)


def test_an_upload_that_is_given_up_leaves_nothing(tmp_path, local, store):
    run = tmp_path / "run"
    with CheckpointManager(run, local=LocalTier(local, durable_timeout_s=0.05)) as manager:
        store.away, store.only = OSError(errno.EIO, "away"), "commit_success.txt"
        with pytest.raises(SaveFailed, match="away"):
            manager.save(1, state(1)).durable(60)
        manager._tiers.uploader.worker.settle()

        assert not unfinished(run)


def test_a_step_is_uploaded_while_the_parts_of_another_are_removed(tmp_path, local, store):
    """By another thread, which has got as far as the file of the writer."""
    run, tier = tmp_path / "run", LocalTier(local, durable_timeout_s=0.05)
    with CheckpointManager(run, local=tier) as manager:
        store.away, store.only = OSError(errno.EIO, "away"), "commit_success.txt"
        store.slow, store.slow_at = "delete", "1.orbax-checkpoint-tmp-"
        store.answers.clear()
        with pytest.raises(SaveFailed, match="away"):
            manager.save(1, state(1)).durable(60)
        assert store.is_slow.wait(60)
        next(run.glob(f"1.*/{names.WRITER}")).unlink()
        store.away = None
        manager.save(2, state(2)).durable(5)
        store.answers.set()
        manager._tiers.uploader.worker.settle()

        assert not unfinished(run)


def test_a_full_directory_gets_rid_of_the_parts_of_older_steps(tmp_path, local, store):
    """The newest is tried again in the room of the others, which are sent after it."""
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        store.away, store.only = OSError(errno.ENOSPC, "no room"), "commit_success.txt"
        manager.save(1, state(1)).result()
        wait_until(lambda: unfinished(tmp_path / "run") == {"1"})
        manager.save(2, state(2)).result()
        wait_until(lambda: unfinished(tmp_path / "run") == {"2"})
        assert manager._tiers.uploader.steps() == [1, 2]
        store.away = None
        manager.wait_until_finished()

        assert (manager.tiers["durable"], manager.problems) == ([1, 2], [])


def test_what_hosts_sent_of_a_dropped_step_goes_after_a_later_step(tmp_path, store):
    """By then, none of them sends the dropped one any more."""
    run = tmp_path / "run"

    def job(processes):
        with CheckpointManager(run, local=tmp_path / f"{processes.index}") as manager:
            for step in range(1, 5):
                manager.save(step, state(step)).result()
                wait_until(lambda step=step: str(step) in unfinished(run))
            processes.within(60).gather("sent", None, len)
            before, store.away = unfinished(run), None
            for step in (5, 6):
                manager.save(step, state(step)).durable()
            manager.wait_until_finished()
            manager._tiers.uploader.worker.settle()
            processes.within(60).gather("settled", None, len)
            return before, unfinished(run)

    store.away, store.only = OSError(errno.EIO, "away"), "commit_success.txt"
    assert simulate(2, job, timeout_s=60) == [({"1", "2", "3", "4"}, set())] * 2


@pytest.mark.parametrize("by", ["this job", "the next job"])
def test_what_an_overtaken_upload_left_in_a_store_is_removed(tmp_path, local, limits, by):
    """Once a newer step is there; what is left of other writes, such as a copy, stays."""
    limits(uploader, _FIRST_PAUSE_S=0.01)
    storage, root = locate(f"memory://{tmp_path.name}/run")

    def before(verb, path):
        if verb == "create" and path == f"{root}/2/commit_success.txt":
            raise OSError(errno.EIO, "away", path)

    tier = LocalTier(local, durable_timeout_s=0.05)
    keep = {"keep": KeepPolicy(last=5)}
    directory = PathIn(WatchedStorage(storage, before), root)
    storage.write(f"{root}/1/_jaxckpt.json", b"{}")  # first, as gsutil copies a step
    with CheckpointManager(directory, local=tier, **(keep if by == "this job" else {})) as manager:
        with pytest.raises(SaveFailed):
            manager.save(2, state(2)).durable(60)
        assert "_jaxckpt.writing" in storage.files(f"{root}/2")
        manager.save(3, state(3)).durable(60)
        manager.wait_until_finished()
        assert bool(storage.files(f"{root}/2")) == (by == "the next job")
    with CheckpointManager(directory, local=local, **keep) as manager:
        manager.save(4, state(4)).durable(60)
        manager.wait_until_finished()

    assert {name.partition("/")[0] for name in storage.files(root) if name[0] in "1234"} == {*"134"}


def test_closing_names_what_is_not_uploaded(tmp_path, local, store):
    manager = CheckpointManager(tmp_path / "run", local=LocalTier(local, durable_timeout_s=0.2))
    store.answers.clear()
    manager.save(1, state(1))
    with pytest.raises(CheckpointTimeout, match=r"steps \[1\] are not uploaded.*jaxckpt upload"):
        manager.close()
    store.answers.set()
    assert cli("upload", local, tmp_path / "run")[0] in (0, 2)  # 2: the thread is still at it


def test_a_step_that_another_job_saved_is_not_overwritten(tmp_path, local):
    """A stale disk: the run went on elsewhere and has another step of this number."""
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        manager.save(1, state(1)).durable()
        with CheckpointManager(tmp_path / "other") as other:
            other.save(2, state(22))
        shutil.copytree(tmp_path / "other" / "2", tmp_path / "run" / "2")
        handle = manager.save(2, state(2))
        with pytest.raises(StepExists, match="no copy"):
            handle.durable()
    assert jaxckpt.restore(tmp_path / "run" / "2")["w"][0] == 22


def test_the_program_ends_after_its_uploads(tmp_path):
    """Without `close`."""
    code = """
import sys, jaxckpt
manager = jaxckpt.CheckpointManager(sys.argv[1] + "/run", local=sys.argv[1] + "/local")
manager.save(1, {"w": 1})
manager.save(2, {"w": 2})
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    assert (tmp_path / "run" / "2" / "commit_success.txt").exists()
    assert (tmp_path / "local" / "2" / "commit_success.txt").exists()


ENDS = """
import sys, threading, jaxckpt
from jaxckpt._run.sender import Sender
from jaxckpt._save import worker

class UploadsFirst(set):  # a set has any order
    def __iter__(self):
        return iter(sorted(super().__iter__(), key=lambda one: one.pick is None))

def on_commit(timing):
    while timing.step == 2 and not worker.is_ending():
        threading.Event().wait(0.01)
    if timing.step == 3:
        all_saved.set()

def send(sender, *args):
    assert all_saved.wait(60)
    return real(sender, *args)

all_saved, real, Sender.send = threading.Event(), Sender.send, send
worker._known = UploadsFirst(worker._known)
manager = jaxckpt.CheckpointManager(
    sys.argv[1] + "/run", local=sys.argv[1] + "/local", on_commit=on_commit
)
for step in (1, 2, 3):
    manager.save(step, {"w": step})
"""


def test_the_end_of_a_program_waits_for_uploads_that_begin_meanwhile(tmp_path):
    """Those of saves that commit while an earlier upload is waited for."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path)], capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "3" / "commit_success.txt").exists()


def test_what_a_dead_job_left_is_uploaded(tmp_path, local):
    """The newest local step, if the directory has no newer one."""
    with CheckpointManager(local) as before:
        for step in (1, 2, 3):
            before.save(step, state(step))
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        assert manager.all_steps() == [1, 2, 3]
        manager.wait_until_finished()
        assert manager.tiers["durable"] == [3]


def test_an_upload_goes_on_where_a_dead_job_ended(tmp_path, local):
    """What it had sent is there for the next job on the host, and is not sent again."""
    code = """
import os, sys, pathlib
import tests.run.test_tiers as here
from jaxckpt._run import upload

def send(self, name, size, *, replace):
    if name == "state/manifest.ocdbt":
        os._exit(0)
    real(self, name, size, replace=replace)

real, upload.Sending._send = upload.Sending._send, send
manager = here.CheckpointManager(f"{sys.argv[1]}/run", local=f"{sys.argv[1]}/local")
manager.save(1, here.state(1)).durable()
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    assert not (tmp_path / "run" / "1").exists()

    def files():
        found = (tmp_path / "run").rglob("d/*")
        return {(path.name, path.stat().st_ino, path.stat().st_mtime_ns) for path in found}

    sent = files()
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        manager.wait_until_finished()
        assert manager.tiers["durable"] == [1]
        assert manager.problems == []
    assert sent
    assert files() == sent


# --- restoring -------------------------------------------------------------------------------


def test_a_new_host_restores_what_is_durable(directory, local):
    with CheckpointManager(directory, local=local, save=SavePolicy(every_steps=2)) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
    shutil.rmtree(local)

    with CheckpointManager(directory, local=local) as manager:
        found, step = manager.restore_or(lambda: state(0))
        assert (found["w"][3], step) == (2, 2)
        manager.save(3, state(33)).durable()
        assert manager.tiers == {"local": [3], "durable": [2, 3], "waiting": []}


def test_the_same_host_restores_the_newest_local_step(directory, local):
    tier = LocalTier(local, save=SavePolicy(every_steps=1))
    with CheckpointManager(directory, local=tier, save=SavePolicy(every_steps=2)) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))

    with CheckpointManager(directory, local=tier, save=SavePolicy(every_steps=2)) as manager:
        assert manager.latest_step() == 3
        assert manager.restore_or(lambda: state(0))[1] == 3
        with pytest.raises(StepExists):
            manager.save(3, state(3), force=True)
        with pytest.raises(ValueError, match="older than step 3"):
            manager.save(1, state(1))


def test_an_incomplete_copy_is_not_the_latest_step(tmp_path, local):
    """Here its commit marker is missing, there a file."""
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step)).durable()
    for place, step in ((local, 3), (tmp_path / "run", 3)):
        (place / str(step) / "commit_success.txt").unlink()
    (local / "2" / "_CHECKPOINT_METADATA").unlink()

    with CheckpointManager(tmp_path / "run", local=local, mode="r") as reader:
        assert reader.latest_step() == 2
        assert reader.restore()["step"] == 2
        assert reader.restored_step == 2


def test_readers_see_both_places(directory, local):
    with CheckpointManager(directory, local=local, save=SavePolicy(every_steps=2)) as manager:
        manager.save(2, state(2))
        manager.save(3, state(3), force=True)
    shutil.rmtree(local / "2")

    with CheckpointManager(directory, local=local, mode="r") as reader:
        assert reader.tiers == {"local": [3], "durable": [2, 3], "waiting": []}
        assert reader.restore(step=2)["step"] == 2
        assert reader.metadata(2).path == f"{directory}/2"


@pytest.mark.parametrize("bad", ["local", "run"])
def test_a_damaged_copy_is_mended_from_the_other(tmp_path, local, bad):
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        manager.save(1, state(1)).durable()
    damage(tmp_path / bad / "1")

    with CheckpointManager(tmp_path / "run", local=local) as manager:
        if bad == "local":
            assert manager.restore()["w"][SIZE // 2] == 1
        else:
            assert [report.ok for report in manager.scrub().values()] == [True]
        assert any("is mended from" in problem for problem in manager.problems)
        assert manager.tiers == {"local": [1], "durable": [1], "waiting": []}
    assert jaxckpt.verify(tmp_path / bad / "1").ok


def test_a_missing_file_is_mended_too(tmp_path, local):
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        manager.save(1, state(1)).durable()
    shutil.rmtree(local / "1" / "state" / "d")
    (local / "1" / "state" / "_METADATA").unlink()

    with CheckpointManager(tmp_path / "run", local=local) as manager:
        assert manager.restore()["w"][0] == 1
    assert jaxckpt.verify(local / "1").ok


@pytest.mark.parametrize("by", ["restore", "scrub"])
@pytest.mark.parametrize("lost", [names.RECORD, "state/_METADATA"])
def test_copies_that_lack_different_files_mend_each_other(tmp_path, local, by, lost):
    """So no step is set aside of which each file is somewhere."""
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        for step in (1, 2):
            manager.save(step, state(step)).durable()
    (tmp_path / "run" / "2" / lost).unlink()
    (local / "2" / "state" / "_sharding").unlink()

    with CheckpointManager(tmp_path / "run", local=local) as manager:
        if by == "restore":
            assert manager.restore()["w"][0] == 2
        else:
            assert all(report.ok for report in manager.scrub().values())
        assert manager.tiers == {"local": [1, 2], "durable": [1, 2], "waiting": []}
    assert jaxckpt.verify(tmp_path / "run" / "2").ok
    assert jaxckpt.verify(local / "2").ok


def test_what_is_damaged_in_both_places_is_set_aside(tmp_path, local):
    """And the step before is restored; nothing is taken from a bad copy."""
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        for step in (1, 2):
            manager.save(step, state(step)).durable()
    damage(tmp_path / "run" / "2")
    damage(local / "2")

    with CheckpointManager(tmp_path / "run", local=local) as manager:
        assert manager.restore()["w"][0] == 1
        assert manager.restored_step == 1
        assert manager.tiers == {"local": [1], "durable": [1], "waiting": []}
        assert manager.save(2, state(2)) is not None


def test_another_step_of_the_same_number_mends_nothing(tmp_path, local):
    """Two jobs of one run have saved it, each in its own place."""
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        manager.save(0, state(0)).durable()
    for place, value in ((tmp_path / "run", 5), (local, 6)):
        with CheckpointManager(place) as manager:
            manager.save(1, state(value))
        for file in place.glob("1/_jaxckpt.json"):  # as an older release wrote it
            record = step_format.decode_record(file.read_bytes(), file=str(file))
            file.write_bytes(step_format.encode_record(dataclasses.replace(record, life=None)))
    damage(local / "1")

    with CheckpointManager(tmp_path / "run", local=local) as manager:
        assert manager.restore()["w"][0] == 5
        assert any("different steps" in problem for problem in manager.problems)
        assert manager.tiers["local"] == [0]


def test_a_run_goes_on_while_its_directory_is_away(tmp_path, local, store):
    """With the local steps, if there are any; else a run could begin anew by mistake."""
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        manager.save(1, state(1)).durable()
    store.away = OSError(errno.EIO, "away")
    with pytest.raises(OSError, match="away"):
        CheckpointManager(tmp_path / "run", local=tmp_path / "empty")

    with CheckpointManager(tmp_path / "run", local=local) as manager:
        assert manager.restore_or(lambda: state(0))[1] == 1
        handle = manager.save(2, state(2))
        handle.result()
        store.away = None
        handle.durable()
        assert manager.tiers["durable"] == [1, 2]
        assert any("cannot be reached" in problem for problem in manager.problems)


def test_a_start_does_not_wait_for_a_directory_that_does_not_answer(tmp_path, local, store, limits):
    """What is known comes at once; the first upload that gets through opens the run there."""
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        manager.save(1, state(1)).durable()
    limits("jaxckpt._run.root", AWAY_S=0.2)
    store.answers.clear()

    with CheckpointManager(tmp_path / "run", local=local) as manager:
        manager._directory.reach.away_s = 60.0  # from now on nothing waits for it
        assert manager.restore_or(lambda: state(0))[1] == 1
        assert manager.tiers == {"local": [1], "durable": None, "waiting": [1]}
        assert (manager.all_steps(), manager.latest_step()) == ([1], 1)
        handle = manager.save(2, state(2))
        handle.result(60)
        assert manager.save(2, state(2)) is None
        with pytest.raises(ValueError, match="older than step 2"):
            manager.save(0, state(0), force=True)
        assert not store.answers.is_set()
        assert any("newer ones" in problem for problem in manager.problems)
        store.answers.set()
        handle.durable(60)
        assert manager.tiers == {"local": [1, 2], "durable": [1, 2], "waiting": []}
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.problems == []


def test_a_reader_does_not_wait_for_a_directory_that_does_not_answer(
    tmp_path, local, store, limits
):
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        manager.save(1, state(1)).durable()
    limits("jaxckpt._run.root", AWAY_S=0.2)
    store.answers.clear()

    with CheckpointManager(tmp_path / "run", local=local, mode="r") as reader:
        assert reader.restore()["step"] == 1
        assert reader.tiers["durable"] is None


def test_a_job_without_local_steps_waits_for_its_directory(tmp_path, local, store, limits):
    """It would begin the run anew otherwise."""
    limits("jaxckpt._run.root", AWAY_S=0.0)
    store.answers.clear()
    threading.Timer(0.2, store.answers.set).start()
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        assert store.answers.is_set()
        manager._directory.reach.away_s = 60.0
        assert manager.all_steps() == []


def test_an_upload_shows_its_rate_if_most_of_the_step_was_sent_at_full_speed(tmp_path, local):
    """At a preemption the rate decides whether the last step fits into the time that is left."""
    frozen = jnp.arange(1 << 20)
    for policy, is_known in [
        (SavePolicy(), True),
        (SavePolicy(max_write_bytes_per_s=1e12), False),
    ]:
        root, disk = tmp_path / f"run {is_known}", local / f"{is_known}"
        with CheckpointManager(root, local=disk, save=policy) as manager:
            rates = []
            for step in range(1, 5):
                manager.save(step, {"frozen": frozen, "step": step})
                manager.wait_until_finished()
                rates.append(manager._tiers.sender.seconds_for(1))
        assert (rates[0] is not None) == is_known
        assert rates[2] == rates[3]  # by then only the step is sent


def test_a_pin_says_where_it_was_made_while_the_directory_is_away(tmp_path, local, store):
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        manager.save(1, state(1)).durable()
        store.away, store.only = OSError(errno.EIO, "away"), "pinned"
        with pytest.raises(OSError, match="away") as refused:
            manager.pin(1)
        assert (local / "1" / names.PINNED).exists()
        (note,) = refused.value.__notes__
        assert note == f"Done in {local}. Try again once {tmp_path}/run answers."
        store.away = None
        manager.pin(1)
        assert (tmp_path / "run" / "1" / names.PINNED).exists()


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOTDIR, errno.ENOSPC])
def test_a_directory_that_refuses_is_away_too(tmp_path, local, store, code):
    """No permission, a file in its place or a full disk: the run goes on with its local steps."""
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        manager.save(1, state(1)).durable()
    store.away = OSError(code, os.strerror(code))
    with pytest.raises(OSError, match=os.strerror(code)):
        CheckpointManager(tmp_path / "run", local=tmp_path / "empty")

    with CheckpointManager(tmp_path / "run", local=local) as manager:
        assert manager.restore()["step"] == 1
        handle = manager.save(2, state(2))
        handle.result(60)
        store.away = None
        handle.durable(60)
        assert manager.tiers["durable"] == [1, 2]


def test_an_upload_does_not_pass_newer_steps_of_another_job(tmp_path, local, store):
    """They were saved elsewhere, and could not be seen when this job began."""
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        manager.save(1, state(1)).durable()
    with CheckpointManager(tmp_path / "run") as other:
        other.save(10, state(10))
    store.away = OSError(errno.EIO, "away")
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        handle = manager.save(2, state(2))
        handle.result(60)
        store.away = None
        with pytest.raises(SaveFailed, match="step 10 there was saved by another job"):
            handle.durable(60)


@pytest.fixture
def of_another_job(tmp_path, local):
    """The directory of a run that has gone on elsewhere since this disk had its newest step."""
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        manager.save(1, state(1)).durable()
    with CheckpointManager(tmp_path / "run") as other:
        other.restore()
        for step in (5, 10):
            other.save(step, state(step))
    return tmp_path / "run"


def test_an_opening_that_gets_through_late_looks_where_the_run_is(
    of_another_job, local, store, limits
):
    limits("jaxckpt._run.root", AWAY_S=0.2)
    store.slow = "hold"
    store.answers.clear()
    last = KeepPolicy(last=1)
    with CheckpointManager(of_another_job, local=local, keep=last) as manager:
        manager._directory.reach.away_s = 60.0
        assert manager.restore_or(lambda: state(0))[1] == 1
        store.answers.set()
        wait_until(lambda: manager._directory.owner.token, limit_s=60)
        with pytest.raises(SaveFailed, match="step 10 there was saved by another job"):
            manager.save(12, state(12)).durable(60)
        assert manager.tiers["durable"] == [1, 5, 10]


@pytest.mark.parametrize("is_same_run", [True, False])
def test_a_full_disk_does_not_lead_into_a_run_that_has_gone_on(
    of_another_job, local, store, free_space, is_same_run
):
    """Nor into another run, which is at that path by now."""
    if not is_same_run:
        shutil.rmtree(of_another_job)
        with CheckpointManager(of_another_job) as other:
            other.save(10, state(10))
    store.away = OSError(errno.EIO, "away")
    manager = CheckpointManager(of_another_job, local=local, keep=KeepPolicy(last=1))
    manager.restore_or(lambda: state(0))
    free_space(lambda _: 0)
    store.away = None
    with pytest.raises(SaveFailed, match="step 10 there was saved by another job"):
        manager.save(12, state(12)).result(60)
    steps = manager.tiers["durable"]
    manager.close()

    assert steps == ([1, 5, 10] if is_same_run else [10])


def test_a_step_restored_from_a_directory_that_was_away_is_where_the_run_goes_on(
    of_another_job, local, store
):
    store.away = OSError(errno.EIO, "away")
    manager = CheckpointManager(of_another_job, local=local)
    store.away = None
    with manager:
        assert manager.restore_or(lambda: state(0))[1] == 10
        for step in (11, 12):
            manager.save(step, state(step)).durable(60)
    with CheckpointManager(of_another_job, local=local) as manager:
        assert manager.all_steps() == [1, 5, 10, 11, 12]
        assert manager.problems == []


def test_opening_uploads_nothing_into_a_run_that_another_job_writes(tmp_path, local):
    """What is only on this disk goes there once this job saves."""
    often, tier = SavePolicy(every_steps=2), LocalTier(local, save=SavePolicy(every_steps=1))
    run = tmp_path / "run"
    with CheckpointManager(run, save=often, local=tier) as manager:
        manager.save(2, state(2)).durable()
        manager.save(3, state(3)).result()
    lock = LocalStorage().hold(f"{run}/_jaxckpt.lock")
    owner = (run / "_jaxckpt.owner").read_bytes()

    with CheckpointManager(run, save=often, local=tier) as manager:
        assert manager.tiers == {"local": [2, 3], "durable": [2], "waiting": []}
        assert (run / "_jaxckpt.owner").read_bytes() == owner
    assert (run / "_jaxckpt.owner").read_bytes() == owner
    with CheckpointManager(run, save=often, local=tier) as manager:
        lock.release()
        manager.restore()
        manager.save(4, state(4)).durable(60)
        manager.wait_until_finished()
        assert manager.tiers["durable"] == [2, 3, 4]


def test_a_step_on_its_way_is_no_problem(tmp_path, local):
    """In a bucket, its name is there before it is committed."""
    goes_on, is_sent = threading.Event(), threading.Event()

    def before(verb, path):
        if path.endswith("1/_CHECKPOINT_METADATA") and verb == "create":
            is_sent.set()
            assert goes_on.wait(60)

    run = watched(f"memory://{tmp_path.name}/run", before)
    with CheckpointManager(run, local=local) as manager:
        saved = manager.save(1, state(1))
        saved.result()
        assert is_sent.wait(60)
        assert manager.all_steps() == [1]
        goes_on.set()
        saved.durable(60)
        assert manager.problems == []


def test_a_job_beside_another_one_changes_nothing_before_it_saves(tmp_path, local):
    """Its policy would delete steps of the other."""
    changes = []

    def before(verb, path):
        if verb in ("write", "create", "delete", "delete_files", "rename"):
            changes.append((verb, path))

    with CheckpointManager(tmp_path / "run", local=LocalTier(local, keep=KeepPolicy())) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
    lock = LocalStorage().hold(f"{local}/_jaxckpt.lock")
    tier = LocalTier(watched(local, before), keep=KeepPolicy(last=1))
    with CheckpointManager(tmp_path / "run", local=tier) as manager:
        changes.clear()  # it has looked for the id of the run
        manager.wait_until_finished()
    lock.release()
    assert changes == []


def test_a_step_of_this_disk_says_nothing_about_the_directory(tmp_path, local):
    """A job that runs has saved a step there that this one has never seen, though an older one."""
    often, tier = SavePolicy(every_steps=5), LocalTier(local, save=SavePolicy(every_steps=1))
    with CheckpointManager(tmp_path / "run", save=often, local=tier) as manager:
        for step in (5, 9):
            manager.save(step, state(step))
    lock = LocalStorage().hold(f"{tmp_path}/run/_jaxckpt.lock")
    with CheckpointManager(tmp_path / "run", save=often, local=tier) as manager:
        assert manager.restore_or(lambda: state(0))[1] == 9
        jaxckpt.save(tmp_path / "run" / "6", state(6))
        with pytest.raises(SaveFailed, match="has saved step 6"):
            manager.save(10, state(10))
    lock.release()


def test_a_step_set_aside_is_uploaded_again_beside_newer_ones(tmp_path, local):
    together = threading.Barrier(2)

    def job(processes):
        tier = LocalTier(local / str(processes.index), keep=KeepPolicy())
        with CheckpointManager(tmp_path / "run", local=tier) as manager:
            for step in (1, 2, 3):
                manager.save(step, state(step)).durable()
            together.wait(60)
            if processes.index == 0:
                damage(tmp_path / "run" / "2")
                (local / "0" / "share_0" / "2" / "commit_success.txt").touch()
            together.wait(60)
            manager.scrub()
            manager.wait_until_finished()
            assert manager.tiers["durable"] == [1, 2, 3]

    simulate(2, job, timeout_s=120)
    assert jaxckpt.verify(tmp_path / "run" / "2").ok


OTHER_JOB = """
import sys, jaxckpt
with jaxckpt.CheckpointManager(sys.argv[1]) as manager:
    manager.restore()
    print("open", flush=True)
    sys.stdin.read()
    manager.save(4, {"w": 4})
"""


def test_what_is_left_is_not_uploaded_into_a_run_that_went_another_way(tmp_path, local):
    """The other job went on from the step before, while this one was open beside it."""
    often, tier = SavePolicy(every_steps=2), LocalTier(local, save=SavePolicy(every_steps=1))
    with CheckpointManager(tmp_path / "run", save=often, local=tier) as manager:
        manager.save(2, state(2)).durable()
        manager.save(3, state(3))
    argv = [sys.executable, "-c", OTHER_JOB, tmp_path / "run"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline()
        with CheckpointManager(tmp_path / "run", save=often, local=tier) as manager:
            other.communicate(timeout=240)
            manager.save(6, state(6)).durable(60)
            manager.wait_until_finished()
            assert manager.tiers["durable"] == [2, 4, 6]
            assert any("step 4 there was saved by another job" in x for x in manager.problems)


def test_a_job_that_starts_again_within_a_lease_uploads_what_is_left(
    tmp_path, local, limits, caplog
):
    """The lease of the dead upload has to lapse before."""
    limits(uploader, _FIRST_PAUSE_S=0.01)
    run = f"memory://{tmp_path.name}/run"
    often, tier = SavePolicy(every_steps=2), LocalTier(local, save=SavePolicy(every_steps=1))
    with CheckpointManager(run, save=often, local=tier) as manager:
        manager.save(8, state(8)).durable()
        manager.save(9, state(9))
    token = upload_token(find(LocalStorage(), str(local / "9"))).encode()
    lease = MemoryStorage().hold(f"{run}/9/_jaxckpt.writing", token, new=True)

    with CheckpointManager(run, save=often, local=tier) as manager:
        wait_until(lambda: "tried again" in caplog.text, limit_s=60)
        lease.release()
        manager.wait_until_finished()
        assert manager.tiers["durable"] == [8, 9]


def test_a_step_unpinned_while_it_is_uploaded_is_unpinned_there(tmp_path, local):
    is_pinned, at_the_end, goes_on = (threading.Event() for _ in range(3))

    def before(verb, path):
        if names.is_ours_temporary(os.path.basename(os.path.dirname(path)), "1"):
            assert is_pinned.wait(60)
        if verb == "rename" and names.is_ours_temporary(os.path.basename(path), "1"):
            at_the_end.set()
            assert goes_on.wait(60)

    with CheckpointManager(watched(tmp_path / "run", before), local=local) as manager:
        saved = manager.save(1, state(1))
        saved.result()
        manager.pin(1)
        is_pinned.set()
        assert at_the_end.wait(60)
        manager.unpin(1)
        goes_on.set()
        saved.durable(60)
        assert not one_step.is_pinned(manager._directory.index, 1)


def test_a_directory_that_cannot_be_opened_leaves_the_local_place_free(tmp_path, local):
    def before(verb, path):
        if verb == "hold":
            raise OSError(errno.EIO, "away", path)

    with pytest.raises(OSError, match="away"):
        CheckpointManager(watched(tmp_path / "run", before), local=local)

    lock = LocalStorage().hold(f"{local}/_jaxckpt.lock")
    assert lock is not None
    lock.release()


def test_a_function_of_the_uploading_thread_cannot_wait_for_uploads(tmp_path, local):
    """Such as the one of a policy; a wait would end by its limit only."""
    handles, refused = [], []

    def when(info):
        for waits in [manager.wait_until_finished, *(one.durable for one in handles)]:
            try:
                waits()
            except RuntimeError as error:
                refused.append(str(error))
        return True

    keep = KeepPolicy(last=1, when=when)
    with CheckpointManager(tmp_path / "run", local=local, keep=keep) as manager:
        for step in (1, 2):
            handles.append(manager.save(step, state(step)))
            handles[-1].result()
            manager.wait_until_finished()
    assert len(refused) > 2
    assert all("an upload cannot wait for itself" in text for text in refused)


def test_closing_does_not_wait_for_a_lock_in_a_directory_that_does_not_answer(
    tmp_path, local, store, limits
):
    """The thread that asks for it gives it back if it still gets it."""
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        manager.save(1, state(1)).durable()
    limits("jaxckpt._run.root", AWAY_S=0.2)
    store.answers.clear()
    manager = CheckpointManager(tmp_path / "run", local=LocalTier(local, durable_timeout_s=0.1))
    told = []
    try:
        manager.close()
    except CheckpointTimeout as error:  # else the upload was given up before
        told.append(str(error))
    told += [one for one in manager.problems if "steps [1] are not uploaded" in one]
    assert f"jaxckpt upload {local} {tmp_path / 'run'}" in told[0]
    asking = daemons("jaxckpt-ask").under_way()
    assert len(asking) == 1
    store.answers.set()
    wait(asking, 60)
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        assert not any("running job" in problem for problem in manager.problems)


def test_steps_are_pinned_and_deleted_in_both_places(tmp_path, local):
    last = KeepPolicy(last=1)
    with CheckpointManager(
        tmp_path / "run", local=LocalTier(local, keep=last), keep=last
    ) as manager:
        manager.save(1, state(1)).durable()
        manager.pin(1)
        manager.save(2, state(2)).durable()
        manager.wait_until_finished()
        assert manager.tiers == {"local": [1, 2], "durable": [1, 2], "waiting": []}
        with pytest.raises(ValueError, match="pinned"):
            manager.delete(1)
        manager.unpin(1)
        manager.delete(1)
        assert manager.tiers == {"local": [2], "durable": [2], "waiting": []}


def test_a_deletion_by_hand_takes_no_earlier_step_along(tmp_path, local):
    """A job that saves nothing deletes nothing else, though its policy keeps fewer steps."""
    never = jaxckpt.SavePolicy(every_steps=100)
    for last in (9, 1):
        tier = LocalTier(local, save=jaxckpt.SavePolicy(), keep=KeepPolicy(last=last))
        with CheckpointManager(tmp_path / "run", local=tier, save=never) as manager:
            for step in (1, 2, 3) if last == 9 else ():
                manager.save(step, state(step)).result()
            if last == 1:
                manager.delete(3)
                assert manager.tiers["local"] == [1, 2]


@pytest.mark.parametrize("asks", [[27, 20], [20, 27]])
def test_a_step_pushes_no_other_out_whose_upload_its_deletion_waits_for(
    tmp_path, local, store, asks
):
    """Nor does one that another deletion waits for, until its number is counted."""
    last = KeepPolicy(last=2)
    with CheckpointManager(tmp_path / "run", local=local, keep=last) as manager:
        for step in (10, 20):
            manager.save(step, state(step)).durable()
        store.answers.clear()
        manager.save(27, state(27)).result()
        assert store.asked.wait(60)
        finish = manager.wait_until_finished
        manager.wait_until_finished = lambda: (store.answers.set(), finish())

        for step in asks:
            manager.delete(step)
        assert manager.all_steps() == [10]
        for step in (30, 40):
            manager.save(step, state(step)).durable()
        manager.wait_until_finished()
        assert manager.tiers["durable"] == [30, 40]


def test_the_upload_of_a_dead_job_holds_no_step(tmp_path, local, store):
    """Its lease has not expired, but the next job has taken the run over."""
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        store.answers.clear()
        manager.save(1, state(1)).result()
        leases = []
        wait_until(
            lambda: leases.extend(p for p in local.iterdir() if names.is_lease(p.name)) or leases
        )
        [lease] = leases
        left = lease.read_bytes()
        store.answers.set()
        manager.save(2, state(2))
        manager.wait_until_finished()
        lease.write_bytes(left)
        with pytest.raises(ValueError, match="a reader holds it"):
            manager.delete(1)

    with CheckpointManager(tmp_path / "run", local=local) as manager:
        assert not lease.exists()
        lease.write_bytes(left)  # as by an upload that goes on
        manager.delete(1)
        assert manager.tiers == {"local": [2], "durable": [2], "waiting": []}


def test_a_step_that_others_deleted_is_uploaded_when_it_is_saved_again(tmp_path, local):
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        for step in (8, 10):
            manager.save(step, {"n": step}).durable()
        for root in (tmp_path / "run", local):
            shutil.rmtree(root / "10")
        assert manager.restore_or(lambda: {"n": 0})[1] == 8
        manager.save(10, {"n": 1010}).durable()
        assert manager.problems == []
    assert jaxckpt.restore(tmp_path / "run" / "10") == {"n": 1010}


def test_a_step_that_is_deleted_while_it_is_saved_pushes_no_other_out(tmp_path):
    """Without a local tier, too."""
    may_commit = threading.Event()

    def before(verb, path):
        if verb == "rename" and "/3." in path:
            assert may_commit.wait(60)

    root = PathIn(WatchedStorage(LocalStorage(), before), f"{tmp_path}/run")
    with CheckpointManager(root, keep=KeepPolicy(last=2)) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
        finish = manager.wait_until_finished
        manager.wait_until_finished = lambda: (may_commit.set(), finish())

        manager.delete(3)

        assert manager.all_steps() == [1, 2]


def test_a_policy_that_waited_for_a_deletion_is_followed_after_it(tmp_path, local, store):
    with CheckpointManager(tmp_path / "run", local=local, keep=KeepPolicy(last=2)) as manager:
        for step in (10, 20):
            manager.save(step, state(step)).durable()
        store.answers.clear()
        for step in (30, 40):
            manager.save(step, state(step)).result()
        finish = manager.wait_until_finished
        manager.wait_until_finished = lambda: (store.answers.set(), finish())

        manager.delete(30)

        assert manager.tiers["durable"] == [20, 40]


def test_a_deletion_waits_for_the_part_of_each_process(tmp_path):
    """Process 0 has committed the upload while process 1 still has its lease on the local step."""
    waits, leases = threading.Event(), count(10, 10)

    def before(verb, path):
        if verb == "delete" and names.is_lease(os.path.basename(path)) and next(leases) == 20:
            waits.wait(5)  # only without the wait of the deletion does the time pass

    def job(processes):
        local = tmp_path / f"{processes.index}"
        local = watched(local, before) if processes.index else local
        with CheckpointManager(tmp_path / "run", local=local) as manager:
            for step in (10, 20):
                manager.save(step, state(step)).durable()
            uploads = manager._tiers.uploader.worker
            wait = uploads.wait
            if processes.index:
                uploads.wait = lambda *args: (waits.set(), wait(*args))
            manager.delete(20)
            return manager.all_steps()

    assert simulate(2, job, timeout_s=60) == [[10]] * 2


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_left_by_an_earlier_job_pushes_no_other_out_until_this_one_saves(tmp_path, count):
    """The job may be there to delete it. At most one step more than the policy keeps is there."""

    def job(processes, steps, then):
        at, last = tmp_path / f"{processes.index}", KeepPolicy(last=2)
        with CheckpointManager(tmp_path / "run", local=at, keep=last) as manager:
            manager.wait_until_finished()
            found = [manager.tiers["durable"]]
            for step in steps:
                if step < 0:
                    manager.delete(-step)
                else:
                    manager.save(step, state(step)).durable()
                manager.wait_until_finished()
                found.append(manager.tiers["durable"])
            if then is not None:
                stop_before_upload(manager, then)
            return found

    def run(steps, then=None):
        one, *others = simulate(count, lambda processes: job(processes, steps, then), timeout_s=60)
        assert all(other == one for other in others)
        return one

    run([10, 20], then=27)
    assert run([], then=33) == [[10, 20, 27]]
    assert run([-33, -27, 40, 50]) == [[20, 27, 33], [20, 27], [20], [20, 40], [40, 50]]


def test_a_step_pinned_before_its_upload_stays_in_both_places(tmp_path, local):
    last, goes_on = KeepPolicy(last=1), threading.Event()

    def before(verb, path):
        assert verb != "rename" or goes_on.wait(60)

    run = watched(tmp_path / "run", before)
    with CheckpointManager(run, local=LocalTier(local, keep=last), keep=last) as manager:
        manager.save(1, state(1)).result()
        manager.pin(1)
        goes_on.set()
        manager.save(2, state(2)).durable()
        manager.wait_until_finished()
        assert manager.tiers == {"local": [1, 2], "durable": [1, 2], "waiting": []}


def test_a_pin_comes_with_the_step_that_is_uploaded(tmp_path, local):
    """A crash between the two would lose it. The record does not list it: it may go again."""
    pinned, goes_on = [], threading.Event()

    def before(verb, path):
        if names.is_ours_temporary(os.path.basename(os.path.dirname(path)), "1"):
            assert goes_on.wait(60)
        if verb == "rename" and names.is_ours_temporary(os.path.basename(path), "1"):
            pinned.append(os.path.exists(f"{path}/_jaxckpt.pinned"))

    with CheckpointManager(watched(tmp_path / "run", before), local=local) as manager:
        saved = manager.save(1, state(1))
        saved.result()
        manager.pin(1)
        goes_on.set()
        saved.durable()
        assert pinned == [True]
        manager.unpin(1)
        assert jaxckpt.verify(tmp_path / "run" / "1").ok


def test_a_step_that_goes_in_one_place_is_pinned_in_the_other(tmp_path, local):
    def before(verb, path):
        if verb == "write" and path.endswith("1/_jaxckpt.pinned"):
            shutil.rmtree(local / "1")  # as `keep` does

    with CheckpointManager(tmp_path / "run", local=watched(local, before)) as manager:
        manager.save(1, state(1)).durable()
        manager.pin(1)

        assert (tmp_path / "run" / "1" / "_jaxckpt.pinned").exists()
        with pytest.raises(CheckpointNotFound, match="no committed step 2"):
            manager.pin(2)


def test_an_item_deleted_in_one_place_before_a_crash_is_deleted_in_the_other(tmp_path, local):
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        manager.save(1, state(1), items={"more": {"a": np.arange(3)}}).durable()
        one_step.delete_item(manager._tiers.local.deletion, 1, "more")
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        manager.delete(1, item="more")

        assert not (tmp_path / "run" / "1" / "more").exists()
        with pytest.raises(CheckpointNotFound, match="no item 'more'"):
            manager.delete(1, item="more")


def test_a_look_at_the_best_step_takes_no_newer_step_along(tmp_path, local):
    """If the best is damaged, the next best is restored. The run does not go on from there."""
    tier = LocalTier(local, save=SavePolicy(), keep=KeepPolicy(last=9))
    best = KeepPolicy(best=1, metric="loss")
    with CheckpointManager(
        tmp_path / "run", local=tier, keep=best, save=SavePolicy(every_steps=10)
    ) as manager:
        for step, loss in ((10, 0.5), (11, 0.1), (12, 0.2), (13, 0.3), (14, 0.4)):
            manager.save(step, state(step), metrics={"loss": loss}).result()
        manager.wait_until_finished()
        damage(local / "11")
        manager.restore(step="best")
        assert manager.restored_step == 12
        manager.save(15, state(15))
        manager.wait_until_finished()

        assert manager.tiers["local"] == [10, 12, 13, 14, 15]


def test_the_best_step_counts_wherever_it_is(tmp_path, local):
    best = KeepPolicy(best=1, metric="loss")
    tier = LocalTier(local, keep=KeepPolicy(last=1))
    with CheckpointManager(tmp_path / "run", local=tier, keep=best) as manager:
        for step, loss in ((1, 0.1), (2, 0.5), (3, 0.4)):
            manager.save(step, state(step), metrics={"loss": loss}).durable()
        manager.wait_until_finished()
        assert manager.tiers == {"local": [3], "durable": [1, 3], "waiting": []}
        assert manager.best_step() == 1
        assert manager.restore(step="best")["step"] == 1
        assert manager.metrics(1) == {"loss": 0.1}


@pytest.mark.parametrize("data", [None, b"{"], ids=["gone", "cut"])
def test_the_best_step_counts_if_its_local_metrics_are_damaged(tmp_path, local, data):
    """They are those of the uploaded copy, with which the local one is mended."""
    best, tier = KeepPolicy(metric="loss"), LocalTier(local, keep=KeepPolicy(last=9))
    with CheckpointManager(tmp_path / "run", local=tier, keep=best) as manager:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.7)):
            manager.save(step, state(step), metrics={"loss": loss}).durable()
    file = local / "2" / names.METRICS_ITEM / names.METRICS_FILE
    file.unlink()
    if data is not None:
        file.write_bytes(data)

    with CheckpointManager(tmp_path / "run", local=tier, keep=best) as manager:
        assert manager.best_step() == 2
        assert manager.restore(step="best")["step"] == 2
    assert jaxckpt.verify(local / "2").ok


def test_the_best_step_counts_if_a_later_job_uploads_it(tmp_path, local):
    best, every_other = KeepPolicy(best=1, metric="loss"), SavePolicy(every_steps=2)
    tier = LocalTier(local, save=SavePolicy())
    with CheckpointManager(tmp_path / "run", save=every_other, local=tier, keep=best) as manager:
        manager.save(2, state(2), metrics={"loss": 0.5}).durable()
        manager.save(3, state(3), metrics={"loss": 0.1})
    assert not (tmp_path / "run" / "3").exists()

    with CheckpointManager(tmp_path / "run", save=every_other, local=tier, keep=best) as manager:
        manager.wait_until_finished()
        assert (tmp_path / "run" / "3").exists()
        manager.save(4, state(4), metrics={"loss": 0.3}).durable()
        assert manager.tiers["durable"] == [3, 4]


def test_the_best_step_counts_if_its_local_copy_fails_after_the_upload(tmp_path, local):
    """The metrics are those of the uploaded step then."""

    def before(verb, path):
        if path == f"{local}/1" and (tmp_path / "run" / "1").exists():
            raise OSError(errno.EIO, "bad disk", path)

    with CheckpointManager(local) as manager:
        manager.save(1, state(1), metrics={"loss": 1.0})
    tier = LocalTier(watched(local, before), keep=KeepPolicy(last=1))
    keep = KeepPolicy(last=1, best=1, metric="loss")
    with CheckpointManager(tmp_path / "run", local=tier, keep=keep) as manager:
        manager.wait_until_finished()
        manager.save(2, state(2), metrics={"loss": 2.0}).durable()
        manager.wait_until_finished()
        assert any("the facts about step 1 cannot be read" in text for text in manager.problems)
        assert manager.tiers["durable"] == [1, 2]


def test_a_job_that_has_lost_the_run_mends_no_step_of_the_next(tmp_path, local):
    """It stands still while it mends; meanwhile the next job saves the step anew."""
    with CheckpointManager(tmp_path / "next") as manager:
        manager.save(1, state(2))
    seen = []

    def before(verb, path):
        if path.startswith(f"{local}/1/") and (local / "1" / "_jaxckpt.json").exists():
            if seen[-1:] == ["write"]:  # the first file has just been replaced
                os.rename(local / "1", local / "gone")
                shutil.copytree(tmp_path / "next", local, dirs_exist_ok=True)
            seen.append(verb)

    directory = watched(local, before)
    with CheckpointManager(tmp_path / "run", local=directory) as manager:
        manager.save(1, state(1)).durable()
        metadata = local / "1" / "state" / "_METADATA"
        metadata.write_bytes(metadata.read_bytes()[::-1])
        with contextlib.suppress(SaveFailed):
            manager.restore()
        assert any("opened for writing by another job" in text for text in manager.problems)
    assert (local / "gone").exists()
    assert jaxckpt.verify(local / "1").ok


def test_heal_mends_by_hand(tmp_path, local):
    """Every step that a verified copy can mend; the exit code says whether some are left."""
    with CheckpointManager(tmp_path / "run", local=LocalTier(local, keep=KeepPolicy())) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step)).durable()
    assert cli("heal", local, tmp_path / "run") == (0, f"{local}: no step is damaged\n", "")
    damage(local / "1")
    damage(local / "3")
    damage(tmp_path / "run" / "3")

    code, found = said_json("heal", local, tmp_path / "run")

    assert code == 1
    assert [*found["mended"]] == ["1"]
    assert "damaged too" in found["failed"]["3"]
    assert [jaxckpt.verify(local / str(n)).ok for n in (1, 2, 3)] == [True, True, False]
    with CheckpointManager(local):
        assert "in use" in cli("heal", local, tmp_path / "run")[2]


def test_ls_shows_where_each_step_is(tmp_path, local):
    every, tier = SavePolicy(every_steps=2), LocalTier(local, save=SavePolicy())
    with CheckpointManager(tmp_path / "run", save=every, local=tier) as manager:
        for step in range(1, 5):
            manager.save(step, state(step), metrics={"loss": 1.0})
            manager.wait_until_finished()
    (local / "4" / "state" / "_METADATA").unlink()

    found = said_json("ls", tmp_path / "run", "--local", local)[1]["steps"]
    assert {one["step"]: one["places"] for one in found} == {
        2: ["durable"],
        3: ["local"],
        4: ["durable"],
    }
    assert all(one["whole"] for one in found)
    code, text, _ = cli("ls", tmp_path / "run", "--local", local)
    assert code == 0
    assert "newest complete step: 4" in text
    assert all(word in text for word in ("local", "durable", "loss"))


def test_commands_know_both_places(tmp_path, local):
    """One option, as for `ls`; with several processes also their shares."""
    every, tier = SavePolicy(every_steps=2), LocalTier(local, save=SavePolicy())
    with CheckpointManager(tmp_path / "run", save=every, local=tier) as manager:
        for step in range(1, 4):
            manager.save(step, state(step), metrics={"loss": 1.0})
            manager.wait_until_finished()

    both = [tmp_path / "run", "--local", local]
    code, found = said_json("verify", *both)
    assert (code, found["ok"], [one["ok"] for one in found["local"]]) == (0, True, [True])
    assert found["local"][0]["path"].endswith("local/3")
    code, found = said_json("du", *both)
    assert [one["name"] for one in found["steps"]] == ["2"]
    assert [[one["name"] for one in place["steps"]] for place in found["local"]] == [["2", "3"]]
    assert "local" not in said_json("du", tmp_path / "run")[1]
    _, text, _ = cli("du", *both)
    assert f"{local}: " in text
    assert f"{tmp_path / 'run'}: " in text
    code, _, _ = cli("report", *both, "-o", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert code == 0
    assert "local steps" in page
    assert "durable steps" in page
    damage(local / "3")
    assert cli("verify", *both)[0] == 1

    shares = tmp_path / "shares"
    for name in ("share_0", "share_1"):
        (local.parent / "shares").mkdir(exist_ok=True)
        shutil.copytree(tmp_path / "run", shares / name)
    found = said_json("ls", tmp_path / "run", "--local", shares)[1]["steps"]
    assert [(one["step"], one["places"]) for one in found] == [(2, ["local", "durable"])]
    assert len(said_json("verify", tmp_path / "run", "--local", shares)[1]["local"]) == 2


# --- a full disk -----------------------------------------------------------------------------


def test_a_full_disk_makes_the_local_place_give_way(tmp_path, local, free_space):
    """First older steps go; then steps are saved in the directory itself, which is told once."""
    free = [1 << 40]
    free_space(lambda _: free[0])
    with CheckpointManager(
        tmp_path / "run", local=LocalTier(local, keep=KeepPolicy(last=3))
    ) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step)).durable()
        assert manager.tiers["local"] == [1, 2, 3]
        free[0] = 0
        for step in (4, 5):
            manager.save(step, state(step)).durable()
        manager.wait_until_finished()
        assert manager.tiers == {"local": [], "durable": [1, 2, 3, 4, 5], "waiting": []}
        told = [problem for problem in manager.problems if "the disk is full" in problem]
        assert len(told) == 1
        free[0] = 1 << 40
        manager.save(6, state(6)).durable()
        assert manager.tiers["local"] == [6]
        assert manager.restore()["step"] == 6


@pytest.mark.parametrize(
    ("gone", "ask"), [([30], "20"), ([30], "latest"), ([10, 20, 30], "latest")]
)
def test_a_full_disk_keeps_a_step_after_others_deleted_what_was_uploaded(
    tmp_path, local, free_space, gone, ask
):
    """The last upload went to the directory, but is no longer there."""
    free, run = [1 << 40], tmp_path / "run"
    free_space(lambda _: free[0])
    tier = LocalTier(local, save=SavePolicy(every_steps=1), keep=KeepPolicy(last=3))
    with CheckpointManager(run, save=SavePolicy(every_steps=10), local=tier) as manager:
        for step in (10, 20, 30):
            manager.save(step, state(step)).durable()
        for step in gone:
            shutil.rmtree(run / f"{step}")
            shutil.rmtree(local / f"{step}")
        if ask == "latest":
            _, start = manager.restore_or(lambda: state(0))
        else:
            manager.restore(step=(start := int(ask)))
        manager.save(start + 5, state(start + 5)).result()
        free[0] = 0

        manager.save(start + 6, state(start + 6))

        assert manager.tiers["local"] == [start + 5]


def test_after_going_back_a_full_disk_keeps_a_step_that_is_nowhere_else(
    tmp_path, local, store, free_space
):
    """An upload of a later step, which was deleted, does not make the newest step durable."""
    free = [1 << 40]
    free_space(lambda _: free[0])
    tier = LocalTier(local, keep=KeepPolicy(last=3))
    with CheckpointManager(tmp_path / "run", local=tier) as manager:
        for step in (1, 5):
            manager.save(step, state(step)).durable()
        manager.delete(5)
        store.answers.clear()
        for step in (2, 3):  # one upload is under way, and the other gives way
            manager.save(step, state(step)).result()
            assert store.asked.wait(60)
        free[0] = 0
        manager.save(4, state(4))
        is_there = (local / "3" / "commit_success.txt").exists()
        store.answers.set()
    assert is_there


def test_the_end_of_uploads_deletes_no_step_that_waits_for_its_own(tmp_path, local, store):
    """It was saved while another thread waited for the uploads before."""
    armed, listed, saved = threading.Event(), threading.Event(), threading.Event()

    def before(verb, path):
        if verb == "entries" and path == str(local) and armed.is_set():
            armed.clear()
            listed.set()
            assert saved.wait(60)

    tier = LocalTier(watched(local, before), keep=KeepPolicy(last=1))
    with CheckpointManager(tmp_path / "run", local=tier) as manager:
        manager.save(1, state(1)).durable()
        manager.wait_until_finished()

        def save_three():
            assert listed.wait(60)
            store.answers.clear()
            store.asked.clear()
            for step in (2, 3, 4):  # the upload under way has a lease on its step
                manager.save(step, state(step)).result()
                assert store.asked.wait(60)
            manager._saver.wait_for_all()
            saved.set()

        thread = threading.Thread(target=save_three)
        thread.start()
        armed.set()
        manager._tiers.finish(None)
        thread.join()
        is_there = (local / "3" / "commit_success.txt").exists()
        store.answers.set()
    assert is_there


# --- arguments -------------------------------------------------------------------------------


def test_what_cannot_be_a_local_place_is_refused(tmp_path):
    run = tmp_path / "run"
    for wrong in ("memory://name/local", run / "local", run, tmp_path):
        with pytest.raises(ValueError, match="local"):
            CheckpointManager(run, local=wrong)
    with pytest.raises(TypeError, match=r"local must be a path or a LocalTier, got \{\}"):
        CheckpointManager(run, local={})
    for field, wrong in (("save", 3), ("keep", None), ("durable_timeout_s", "10")):
        with pytest.raises(TypeError, match=f"LocalTier: {field} must be"):
            LocalTier(tmp_path / "local", **{field: wrong})
    with pytest.raises(ValueError, match="durable_timeout_s"):
        LocalTier(tmp_path / "local", durable_timeout_s=0)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("local_save", "Pass local=LocalTier(..., save=...)."),
        ("local_keep", "Pass local=LocalTier(..., keep=...)."),
        ("durable_timeout_s", "Pass local=LocalTier(durable_timeout_s=...)."),
        ("max_upload_bytes_per_s", "Pass save=SavePolicy(max_write_bytes_per_s=...)."),
    ],
)
def test_an_option_of_the_local_place_is_a_field_of_it(tmp_path, name, hint):
    """The manager, and a config of it, answer with where it belongs."""
    with pytest.raises(TypeError, match=re.escape(f"takes no argument {name!r}. {hint}")):
        CheckpointManager(tmp_path / "run", **{name: None})
    with pytest.raises(TypeError, match=re.escape(f"has no field {name!r}. {hint}")):
        CheckpointManager.from_config({"directory": tmp_path / "run", name: None})


def test_a_misspelt_field_of_the_local_place_is_an_error(tmp_path):
    for field in ("local_keep", "kep"):
        with pytest.raises(TypeError, match="Did you mean 'keep'"):
            LocalTier(tmp_path, **{field: KeepPolicy()})
    config = {"directory": tmp_path / "run", "local": {"directory": tmp_path, "kep": {}}}
    with pytest.raises(TypeError, match=r"LocalTier takes no argument 'kep'\. Did you mean 'keep'"):
        CheckpointManager.from_config(config)
    with pytest.raises(TypeError, match="directory must be a path"):
        CheckpointManager.from_config({"directory": tmp_path / "run", "local": {"save": {}}})


def test_a_config_may_have_a_local_place(tmp_path):
    config = {
        "directory": str(tmp_path / "run"),
        "local": {
            "directory": str(tmp_path / "local"),
            "save": {"every_steps": 1},
            "keep": {"last": 1},
            "durable_timeout_s": "15m",
        },
        "save": {"every_steps": 2, "max_write_bytes_per_s": "1GB"},
    }
    with CheckpointManager.from_config(config) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
            manager.wait_until_finished()
        assert manager.tiers == {"local": [3], "durable": [2], "waiting": []}


# --- crashes ---------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["local", "run"])
def test_after_a_crash_at_any_change_acknowledged_steps_restore(tmp_path, where):
    """The newest acknowledged local step on this host, the newest durable one anywhere."""
    crashes = 0
    for after in count():
        here = tmp_path / str(after)
        crashing = PathIn(CrashingStorage(LocalStorage(), after), str(here / where))
        told = {"local": 0, "run": 0}
        crashed = _save_until_it_crashes(here, told, **{where: crashing})
        crashes += crashed

        with CheckpointManager(here / "run", local=here / "local") as manager:
            _, step = manager.restore_or(lambda: {"step": 0})
            assert step >= told["local"]
        if told["run"]:
            with CheckpointManager(here / "run", mode="r") as reader:
                assert reader.restore()["step"] >= told["run"]
        shutil.rmtree(here)
        if not crashed:
            break
    assert crashes > 20


def _save_until_it_crashes(here, told, *, run=None, local=None):
    try:
        manager = CheckpointManager(
            run or here / "run",
            keep=KeepPolicy(last=1),
            local=LocalTier(local or here / "local", keep=KeepPolicy(last=1), durable_timeout_s=5),
        )
        for step in (1, 2, 3):
            handle = manager.save(step, {"step": step})
            handle.result(60)
            told["local"] = step
            handle.durable(60)
            told["run"] = step
        manager.close()
    except SimulatedCrash:
        return True
    return False


# --- what is decided -------------------------------------------------------------------------

steps = st.lists(st.integers(0, 20), unique=True)


@given(steps, steps)
def test_newer_comes_before_nearer(here, there):
    copies = newest_first({0: here, 1: there})
    assert sorted(c[:2] for c in copies) == sorted([(n, 0) for n in here] + [(n, 1) for n in there])
    assert [copy.step for copy in copies] == sorted([*here, *there], reverse=True)
    for a, b in pairwise(copies):
        assert a.step > b.step or a.root < b.root


@given(steps, st.integers(0, 5))
def test_the_newest_stay_in_the_queue(waiting, most):
    gone = over_bound(waiting, most=most)
    left = [*np.setdiff1d(waiting, gone)]
    assert len(left) == min(most, len(waiting))
    assert not gone or not left or max(gone) < min(left)


# --- several processes -----------------------------------------------------------------------


@pytest.mark.multihost
def test_processes_learn_that_the_directory_does_not_answer(
    run_processes, start_processes, tmp_path
):
    """Process 0 asks it; none waits for it again."""
    run_processes("tiers:train", count=2, args=[tmp_path, 5])
    job = start_processes("tiers:resume_away", count=2, args=[tmp_path])
    for process in (0, 1):
        job.wait_for(process, "saved")
    job.release("answers")
    done = [one.result for one in job.wait()]

    away = {"local": [4, 5], "durable": None}
    assert [one["step"] for one in done] == [5, 5]
    assert [one["steps"] for one in done] == [[4, 5], [4, 5]]
    assert [{**one["away"], **away} == one["away"] for one in done] == [True, True]
    assert (done[0]["asked"] > 0, done[1]["asked"]) == (True, 0)
    assert [one["tiers"]["durable"] for one in done] == [[2, 4, 5, 6]] * 2


@pytest.mark.multihost
def test_processes_share_a_local_directory(run_processes, tmp_path):
    """They agree on what is durable, on the newest step, and go on without the local disk."""
    first = run_processes("tiers:train", count=2, args=[tmp_path, 5])
    tiers = {"local": [4, 5], "durable": [2, 4], "waiting": []}
    assert [done.result for done in first] == [{"start": 0, "tiers": tiers}] * 2
    with CheckpointManager(tmp_path / "local") as manager:
        assert manager.problems == []

    damage(tmp_path / "local" / "5")
    again = [done.result for done in run_processes("tiers:resume", count=2, args=[tmp_path])]
    assert [one["step"] for one in again] == [4, 4]
    shutil.rmtree(tmp_path / "local")
    again = [done.result for done in run_processes("tiers:resume", count=4, args=[tmp_path])]
    assert [one["step"] for one in again] == [4] * 4
    damage(tmp_path / "run" / "4")
    again = [done.result for done in run_processes("tiers:train", count=2, args=[tmp_path, 1])]
    assert [one["start"] for one in again] == [2, 2]


# --- uploads that meet something else ------------------------------------------------------------

_AWAY = OSError(errno.EIO, "away")
_OFTEN = SavePolicy(every_steps=10)


def stop_before_upload(manager, step):
    """Saves a step as a job that dies before it is uploaded."""
    manager._tiers.uploader.put = lambda upload: None
    manager.save(step, state(step)).result()


@pytest.mark.parametrize("resumed", [True, False])
def test_what_comes_back_while_a_manager_closes_gets_the_steps(tmp_path, local, store, resumed):
    """Of this job, which never reached the directory; and of an earlier one, tried once more."""
    run = tmp_path / "run"
    with CheckpointManager(run, local=local) as manager:
        manager.save(10, state(10)).durable()
        if resumed:
            stop_before_upload(manager, 20)
    store.away, store.only = _AWAY, "/20" if resumed else ""
    manager = CheckpointManager(run, local=local)
    manager.restore_or(lambda: state(0))
    if not resumed:
        manager.save(20, state(20)).result()
    store.asked.clear()

    closing = threading.Thread(target=manager.close)
    closing.start()
    wait_until(lambda: manager._saver.ended and store.asked.is_set())
    store.away = None
    closing.join(60)

    with CheckpointManager(run, mode="r") as reader:
        assert reader.all_steps() == [10, 20]


def test_a_full_disk_keeps_a_step_that_commits_meanwhile(tmp_path, local, free_space):
    """Steps are deleted before a save while the one before may still be written."""
    may_commit, handles, listings = threading.Event(), [], count(1)

    def before(verb, path):
        if verb == "rename" and path.rpartition("/")[2].startswith("20."):
            may_commit.wait(60)
        is_listing = handles and (verb, path) == ("entries", str(local))
        # The steps there, and those that have to stay, are found by one listing each.
        if is_listing and threading.current_thread() is main and next(listings) == 2:
            may_commit.set()
            handles[0].result()

    main, tier = threading.main_thread(), LocalTier(watched(local, before), save=_OFTEN)
    with CheckpointManager(
        tmp_path / "run", save=SavePolicy(every_steps=100), local=tier
    ) as manager:
        manager.save(10, state(10)).result()
        manager.wait_until_finished()
        handle = manager.save(20, state(20))
        free_space(lambda _: 0)
        handles.append(handle)
        manager.save(30, state(30)).result()

        assert may_commit.is_set()
        assert jaxckpt.verify(local / "20").ok


def test_a_step_that_is_saved_again_is_uploaded_again(tmp_path):
    """A process that does not delete it in the directory may still remember the first one."""

    def job(processes):
        with CheckpointManager(tmp_path / "run", local=tmp_path / f"{processes.index}") as manager:
            for step in (10, 20):
                manager.save(step, state(step))
                manager.wait_until_finished()
            assert manager.all_steps() == [10, 20]
            manager.delete(20)
            manager.save(20, state(21))
            manager.wait_until_finished()
            return manager.tiers["durable"], manager.problems

    assert simulate(2, job, timeout_s=60) == [([10, 20], [])] * 2
    assert jaxckpt.restore(tmp_path / "run" / "20")["step"] == 21


def test_an_upload_that_is_overtaken_by_a_later_step_goes_on(tmp_path, local, store):
    """It is of an earlier job, and its first try failed."""
    run = tmp_path / "run"
    with CheckpointManager(run, local=local) as manager:
        manager.save(10, state(10)).durable()
        stop_before_upload(manager, 20)
    store.away, store.only = _AWAY, "/20"
    with CheckpointManager(run, local=local) as manager:
        assert manager.restore_or(lambda: state(0))[1] == 20
        manager.save(30, state(30)).durable()
        store.away = None
        manager.wait_until_finished()

        assert (manager.tiers["durable"], manager.problems) == ([10, 20, 30], [])


def test_an_older_upload_goes_on_after_a_restore_of_the_best(tmp_path, local, store):
    """The best is damaged and set aside; a later step is in the directory already."""
    run, keep = tmp_path / "run", KeepPolicy(best=1, metric="loss", last=5)
    tier = LocalTier(local, keep=KeepPolicy(last=5))
    with CheckpointManager(run, keep=keep, local=tier) as manager:
        for step in (10, 20):
            manager.save(step, state(step), metrics={"loss": step}).durable()
        store.away, store.only = _AWAY, "/30"
        handle = manager.save(30, state(30), metrics={"loss": 30})
        manager.save(40, state(40), metrics={"loss": 40}).durable()
        damage(run / "10")
        damage(local / "10")
        assert manager.restore(step="best")["step"] == 20
        store.away = None
        handle.durable()

        assert manager.tiers["durable"] == [20, 30, 40]
