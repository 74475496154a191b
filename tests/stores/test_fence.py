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
from tests.faults.conftest import zygote  # noqa: F401  # a fixture
from tests.faults.jobs import started
from tests.stores import children
from tests.stores.children import is_state, state
from tests.stores.killing import wait_for
from tests.stores.proxy import Hold
from tests.stores.test_leftovers import files_of, steps_with_files
from tests.waiting import wait_until

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


@contextlib.contextmanager
def standing_still(zygote, pid, until):  # noqa: F811
    """Stops a process whose request is held, and lets both go on to the end; what it says then."""
    said = []
    os.kill(pid, signal.SIGSTOP)
    try:
        yield said
    finally:
        os.kill(pid, signal.SIGCONT)
        until.set()
        said += zygote.answers()[0]
