"""A job that stands still while another takes its run over deletes nothing when it wakes up."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.faults import coverage_children
from tests.faults import fence_children as children
from tests.faults.jobs import started
from tests.faults.zygote import Zygote
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A second zygote, whose children run beside those of the first."""
    with Zygote(tmp_path_factory.mktemp("second")) as started:
        yield started


def stands_still(pid):
    """Waits until a process has stopped itself; False if it has ended instead."""

    def state():
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return "gone"

    wait_until(lambda: state() in ("T", "Z", "gone"))
    return state() == "T"


def stop_points(zygote, original, keep, *, act="save", reads=False, every=1):
    """Yields the number of each event, or every n-th, and a run whose job stands still there."""
    for at in itertools.count(1, every):
        root = original.with_name(f"run{at}")
        shutil.copytree(original, root)
        pid = zygote.start(children.save_and_stand_still, root, keep, act=act, at=at, reads=reads)
        assert zygote.answer() == {"committed": True}
        if not stands_still(pid):
            zygote.answers()
            break
        yield at, root, pid
        shutil.rmtree(root)
    assert at > 8


CASES = [
    pytest.param("save", {"last": 2}, False, 1, id="policy"),
    pytest.param("save", {"last": 2}, True, 1, id="policy, reads", marks=pytest.mark.slow),
    pytest.param("save", {"last": 2, "move_to": "old"}, False, 3, id="move"),
    pytest.param("save", {"last": 2, "move_to": "old"}, True, 1, id="all", marks=pytest.mark.slow),
    pytest.param("delete", {}, False, 3, id="by hand"),
    pytest.param("delete", {}, True, 1, id="by hand, reads", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("act", "keep", "reads", "every"), CASES)
def test_a_job_that_stood_still_after_its_commit(
    zygote, other, ram_path, trial, act, keep, reads, every
):
    """No step goes that the new owner has listed or acknowledged; the old job can save no more."""
    original = ram_path / "original"
    zygote.run(children.start, original, 4)
    for at, root, pid in stop_points(zygote, original, keep, act=act, reads=reads, every=every):
        with trial("43", f"{act} with {keep}, stopped at event {at}"):
            theirs = other.run(children.take_over, root, {"last": 10}, 2)
            os.kill(pid, signal.SIGCONT)
            ours = zygote.answers()[0][-1]
            other.start(children.look, root)
            (found, _, after), _ = other.answers()
            assert set(theirs["steps"]) <= set(found["steps"])
            assert "SaveFailed" in ours["error"]
            assert "opened for writing by another job" in ours["error"]
            assert after["left"] == []


PLACES = [
    pytest.param(None, 0, 17, id="one directory"),
    pytest.param([0, 1], 0, 17, id="disks of hosts, process 0"),
    pytest.param([0, 1], 1, 17, id="disks of hosts, process 1"),
    pytest.param(None, 0, 3, id="one directory, more", marks=pytest.mark.slow),
    pytest.param([0, 1], 0, 3, id="disks, process 0, more", marks=pytest.mark.slow),
    pytest.param([0, 1], 1, 3, id="disks, process 1, more", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("hosts", "process", "every"), PLACES)
def test_a_job_of_two_processes_stood_still(zygote, other, ram_path, trial, hosts, process, every):
    """Nothing goes that the new job has, neither in the directory nor on the disk of a host."""
    for at in itertools.count(1, every):
        root = ram_path / str(at)
        with started(zygote, children.stand_still, count=2, args=[root, hosts, process, at]) as job:
            job.wait_for(process, "committed")
            wait_until(lambda job=job: is_stopped(job.pids[process]) or job.has_reached("over"))
            if job.has_reached("over"):
                break
            job.stop(1 - process)
            with trial("43", f"two processes, {process} stopped at event {at}"):
                with started(other, children.go_on, count=2, args=[root, hosts]) as again:
                    theirs = [one.result for one in again.wait()]
                job.resume(0)
                job.resume(1)
                ours = [one.result for one in job.wait()]
                assert "opened for writing by another job" in str(ours[0]["error"])
                assert all(one["error"] for one in ours)
                for i, one in enumerate(theirs):
                    assert set(one["tiers"]["durable"]) <= steps_in(root / "run")
                    share = root / f"host{i}" / "local" / "share_0"
                    assert set(one["tiers"]["local"]) <= steps_in(share)
                    assert one["start"] == 4
        shutil.rmtree(root)
    assert at > 8


@pytest.mark.parametrize(("before", "now"), [([0, 1], [0]), ([0], [0, 1])])
def test_a_job_with_another_number_of_processes_ends_the_one_before(
    zygote, other, ram_path, before, now
):
    """They save in different roots of the disk that both have."""
    args = [ram_path, before, 2]
    with started(zygote, coverage_children.stand_by, count=len(before), args=args) as job:
        for i in range(len(before)):
            job.wait_for(i, "saved")
        args = [ram_path, now, 1, 2, False]
        with started(other, coverage_children.train, count=len(now), args=args) as again:
            assert [one.result["start"] for one in again.wait()] == [1] * len(now)
        job.release("go")
        errors = [one.result for one in job.wait()]

    assert all("opened for writing by another job" in error for error in errors)


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def steps_in(folder):
    if not folder.exists():
        return set()
    return {int(one.name) for one in folder.iterdir() if one.name.isdecimal()}
