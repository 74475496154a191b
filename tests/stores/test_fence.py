"""A job that stands still while another takes its run over deletes nothing in the bucket then."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from urllib.parse import unquote

import pytest

import jaxckpt
from jaxckpt.format import names
from jaxckpt.storage import locate
from tests.faults.conftest import zygote  # noqa: F401  # a fixture
from tests.faults.jobs import started
from tests.stores import children
from tests.stores.children import is_state, state
from tests.stores.killing import wait_for, wait_for_lease
from tests.stores.proxy import Hold
from tests.stores.test_leftovers import files_of, steps_with_files
from tests.waiting import stop_process, wait_until

CASES = [
    pytest.param(True, 3, id="some answers"),
    pytest.param(False, 1, id="requests", marks=pytest.mark.slow),
    pytest.param(True, 1, id="answers", marks=pytest.mark.slow),
]


def between(begin, end, number):
    """Returns whether a request is the n-th between those of two paths."""
    count, seen = itertools.count(1), []

    def is_it(request):
        path = unquote(request.path)
        marks = [mark for mark in (begin, end) if path.endswith(f"/{mark}")]
        seen.extend(marks)
        return not marks and seen == [begin] and next(count) == number

    return is_it


@pytest.mark.parametrize(("applied", "every"), CASES)
def test_a_job_that_stood_still_after_its_commit(place, zygote, trial, applied, every):  # noqa: F811
    """No step goes that the new owner has listed or acknowledged; the old job can save no more."""
    url, server, proxy = place
    for number in itertools.count(1, every):
        run, until = f"{url}/run{number}", threading.Event()
        hold = Hold(until, applied=applied)
        fault = proxy.add(hold, when=between("the-commit", "the-end", number), times=1)
        args = run, server.env, [1, 2, 3], {"last": 2}
        pid = zygote.start(children.retain_and_save, *args)
        wait_for(fault, pid)
        if not fault.done:
            zygote.answers()
            break
        with trial("45", f"stopped {'after' if applied else 'before'} request {number}"):
            with standing_still(zygote, pid, until) as said:
                manager = jaxckpt.CheckpointManager(run, keep=jaxckpt.KeepPolicy(last=10))
                for step in (5, 6):
                    manager.save(step, state(step)).result()
                steps = manager.all_steps()
            assert manager.all_steps() == steps
            assert all(is_state(manager.restore(step=step), step) for step in steps)
            manager.save(7, state(7)).result()
            manager.close()
            assert steps_with_files(run) == {*map(str, steps), "7"}
            assert not any(names.WRITER in file or names.DOOMED in file for file in files_of(run))
            assert said[0]["error"].startswith("SaveFailed")
            assert "opened for writing by another job" in said[0]["error"]
        proxy.heal()
    assert number > 10


def test_a_job_whose_step_another_job_has_saved_hears_of_that_job(place, zygote):  # noqa: F811
    """Not only that the step exists: it might be deleted for that."""
    url, server, _ = place
    with jaxckpt.CheckpointManager(url) as manager:
        manager.save(1, state(1)).result()
        zygote.start(children.save_steps, url, server.env, [2], 9)
        assert zygote.answers()[1] == 0
        with pytest.raises(jaxckpt.SaveFailed, match="opened for writing by another job"):
            manager.save(2, state(2)).result()


@pytest.mark.parametrize(
    "numbers", [range(3, 28, 12), pytest.param(range(1, 29, 2), marks=pytest.mark.slow)]
)
def test_a_job_of_two_processes_stood_still(place, zygote, trial, numbers):  # noqa: F811
    """As one process does, both stopped."""
    url, server, proxy = place
    for number in numbers:
        run, until = f"{url}/run{number}", threading.Event()
        when = between("the-commit", "the-end", number)
        fault = proxy.add(Hold(until, applied=True), when=when, times=1)
        args = [run, server.env, [1, 2, 3], {"last": 2}]
        with started(zygote, children.retain_together, count=2, args=args) as job:
            wait_until(lambda fault=fault, job=job: fault.done or job.has_returned(0))
            if not fault.done:  # it made fewer requests
                break
            with trial("45", f"two processes, stopped after request {number}"):
                job.stop(0)
                job.stop(1)
                with jaxckpt.CheckpointManager(run, keep=jaxckpt.KeepPolicy(last=10)) as manager:
                    for step in (5, 6):
                        manager.save(step, state(step)).result()
                    steps = manager.all_steps()
                    until.set()
                    job.resume(0)
                    job.resume(1)
                    said = [one.result for one in job.wait()]
                    assert manager.all_steps() == steps
                    assert all(is_state(manager.restore(step=step), step) for step in steps)
                assert all("opened for writing by another job" in one["error"] for one in said)
        until.set()
        proxy.heal()
    assert number > 10


# GCS gets a request for each object: those under way at the moment of the stop still act.
@pytest.mark.parametrize("place", ["moto_server"], indirect=True)
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_left", [False, True], ids=["a checkpoint", "remains"])
def test_a_writer_that_stood_still_spoils_no_later_save(place, zygote, trial, every, is_left):  # noqa: F811
    """It stood still for longer than its lease, while it deleted what was there before."""
    url, server, proxy = place
    for number in itertools.count(2, every):
        path, until = f"{url}/{is_left}{number}", threading.Event()
        jaxckpt.save(path, state(1))
        if is_left:  # as a save leaves it that was killed in its commit
            storage, where = locate(path)
            storage.delete_files([f"{where}/{names.COMMIT_MARKER}"])
            storage.write(f"{where}/{names.WRITER}", b"a dead writer")
        proxy.requests.clear()
        fault = proxy.add(Hold(until, applied=True), number=number)
        pid = zygote.start(children.try_to_replace, path, server.env, 2)
        wait_for(fault, pid)
        if not fault.done:
            zygote.answers()
            break
        with trial("45", f"stopped after request {number}, beside {is_left}"):
            stop_process(pid)
            until.set()  # it finds the answer when it goes on
            wait_for_lease(path)
            jaxckpt.save(path, state(3), overwrite="delete_first")
            os.kill(pid, signal.SIGCONT)
            said = zygote.answers()[0]
            assert jaxckpt.verify(path).ok
            found = jaxckpt.restore(path)
            assert is_state(found, 3) or (is_state(found, 2) and not said[-1]["error"])
        proxy.heal()
    assert number > 10


def test_a_commit_that_the_next_job_has_found_is_not_taken_back(place, zygote, trial):  # noqa: F811
    """Its writer stood still between the marker and the look whether the step is still its own."""
    url, server, proxy = place
    run, until = f"{url}/run", threading.Event()
    hold = Hold(until, applied=True)
    fault = proxy.add(hold, method="PUT", path="/2/commit_success.txt", times=1)
    pid = zygote.start(children.try_to_save_steps, run, server.env, [1, 2, 3])
    wait_for(fault, pid)
    with trial("45", "stopped after the marker"):
        stop_process(pid)
        until.set()
        wait_for_lease(f"{run}/2")
        with jaxckpt.CheckpointManager(run) as manager:
            assert manager.all_steps() == [1, 2]
            assert not any(names.WRITER in file for file in files_of(run))
            os.kill(pid, signal.SIGCONT)
            said = zygote.answers()[0]
            assert manager.all_steps() == [1, 2]
            assert is_state(manager.restore(), 2)
        assert said[-1]["saved"] == [1, 2]
        assert "opened for writing by another job" in said[-1]["error"]


@contextlib.contextmanager
def standing_still(zygote, pid, until):  # noqa: F811
    """Stops a process whose request is held, and lets both go on to the end; what it says then."""
    said = []
    stop_process(pid)
    try:
        yield said
    finally:
        os.kill(pid, signal.SIGCONT)
        until.set()
        said += zygote.answers()[0]
