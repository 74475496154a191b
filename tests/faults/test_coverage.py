"""Jobs of several hosts whose disks help one another: each chunk is read where it lies."""

from __future__ import annotations

import errno
import os
import shutil
from typing import Any

import pytest

import jaxckpt
from jaxckpt._run.coverage import _first
from jaxckpt._run.heal import heal
from jaxckpt._run.index import StepIndex
from jaxckpt.format import names
from jaxckpt.storage import LocalStorage
from jaxckpt.storage._values import find_values, read_place
from tests.faults import coverage_children as children
from tests.faults.jobs import started

FOUR = [0, 1, 2, 3]
MARKER, RECORD = [names.COMMIT_MARKER], [names.RECORD]
STEPS = 3  # the directory has the second one


def run(zygote, *args, count=4, devices=2, limit_s=120, **options):
    """Runs a job; returns what each process says."""
    function = options.pop("function", children.train)
    job = {"args": args, "count": count, "devices": devices, "limit_s": limit_s, **options}
    with started(zygote, function, **job) as running:
        ends = running.wait()
    assert all(end.result is not None for end in ends), ends
    return [end.result for end in ends]


def wipe(root, *hosts):
    for host in hosts:
        shutil.rmtree(root / f"host{host}")


CASES = {
    # what: hosts wiped, hosts of the next job, whether each has a position, and where it starts
    "a new disk": ([1], FOUR, False, 3),
    "a new disk, and with it the only copy of a position": ([1], FOUR, True, 2),
    "two new disks, of other halves": ([1, 2], FOUR, False, 3),
    "two new disks, of one half": ([0, 2], FOUR, False, 2),
    "other process ids": ([], [2, 0, 3, 1], True, 3),
    "other process ids and a new disk": ([3], [1, 0, 3, 2], False, 3),
    "two hosts fewer": ([], [2, 3], False, 3),
    "two hosts fewer, which had a half": ([], [1, 3], False, 2),
    "two hosts more": ([], [0, 1, 2, 3, 4, 5], False, 3),
}


@pytest.mark.parametrize("what", CASES)
def test_a_step_restores_if_every_chunk_is_on_some_disk(trial, zygote, ram_path, what):
    """Otherwise the newest step of the directory does, and all say which step is of no use."""
    wiped, hosts, data, wanted = CASES[what]
    run(zygote, ram_path, FOUR, STEPS, 2, data)
    wipe(ram_path, *wiped)
    with trial("55", what):
        said = run(zygote, ram_path, hosts, 1, 2, data, count=len(hosts))
        assert [one["start"] for one in said] == [wanted] * len(hosts)
        problems = set()  # beside what process 0 says of an upload
        for one in said:
            assert one["read"] == 0 or wanted == 2
            (problem,) = [text for text in one["problems"] if text.startswith(f"step {STEPS} ")]
            assert ("cannot be used" in problem) == (wanted == 2)
            problems.add(problem)
        assert len(problems) == 1
        assert not [*ram_path.glob("host*/local/share_0/*tmp*")]
        again = run(zygote, ram_path, hosts, 0, 2, data, count=len(hosts))
        assert [one["start"] for one in again] == [wanted + 1] * len(hosts)


@pytest.mark.parametrize(
    ("restored", "deleted", "left"),
    [
        ([4], [], [1, 2, 3, 4]),
        ([2], [], [1, 2, 3, 4]),
        ([], [], [1, 2, 3, 4]),
        ([3], [4], [1, 2, 3]),
    ],
    ids=["newest", "earlier", "nothing", "after a deletion"],
)
@pytest.mark.parametrize("hosts", [[0, 1], [0, 2], [0, 1, 2]], ids=str)
def test_a_job_on_other_hosts_goes_on_whatever_it_restores(
    zygote, ram_path, hosts, restored, deleted, left
):
    """Not only after `restore_or`: no disk has all parts, but all together have each step whole."""
    go_on = {"function": children.go_on}
    run(zygote, ram_path, [0, 1], [], [], [1, 2, 3, 4], 2, count=2, **go_on)

    said = run(zygote, ram_path, hosts, restored, deleted, [5], 2, count=len(hosts), **go_on)

    assert [everywhere for _, everywhere in said] == [[*left, 5]] * len(hosts)
    assert said[0][0] == [*left, 5]


@pytest.mark.parametrize(
    ("saved", "wanted", "back"),
    [
        ({"4": 14, "5": 15}, (5, 15), (5, 15)),
        ({"4": 14}, (4, 14), (4, 14)),
        ({"6": 16}, (6, 16), (6, 16)),
        ({}, (3, 3), (5, 5)),
    ],
    ids=["these numbers", "an earlier number", "a later number", "nothing"],
)
def test_a_job_without_a_host_goes_on_from_an_earlier_step(zygote, ram_path, saved, wanted, back):
    """The host has chunks of steps 4 and 5 that nobody else has, and then its disk comes back.

    They stay while the run saves nothing, and then they hide no later save.
    """
    options = {"function": children.go_back}
    run(zygote, ram_path, [0, 1, 2], None, {n: n for n in range(1, 6)}, count=3, **options)

    said = run(zygote, ram_path, [0, 1], 3, saved, count=2, **options)

    assert [one[:3] for one in said] == [[3, *wanted]] * 2
    lacking = "lack chunks of these steps, which are left behind once the run goes on: 5, 4"
    assert all(any(lacking in text for text in one[3]) for one in said)
    for hosts in ([1, 0], [0, 1, 2]):
        latest, step, like = (wanted[0], *wanted) if len(hosts) == 2 else (back[0], *back)
        again = run(zygote, ram_path, hosts, None, {}, count=len(hosts), **options)
        assert [one[:3] for one in again] == [[latest, step, like]] * len(hosts)
    kept = {1, 2, 3, *(map(int, saved) if saved else [4, 5])}
    share = ram_path / "host0/local/share_0"
    assert {int(path.name) for path in share.glob("[0-9]")} == kept


@pytest.mark.parametrize("restored", [20, None])
def test_parts_that_nobody_can_restore_take_no_place_of_new_steps(zygote, ram_path, restored):
    """A disk was replaced, and only two steps stay on each; both parts had higher numbers."""
    options = {"count": 2, "function": children.go_back}
    run(zygote, ram_path, [0, 1], None, {n: n for n in (10, 20, 25, 30)}, 1, 20, 3, **options)

    said = run(
        zygote, ram_path, [0, 2], restored, {n: n for n in (21, 22, 23)}, 1, 20, 2, **options
    )

    assert [one[:3] for one in said] == [[20, 23, 23]] * 2
    for host in (0, 2):
        share = ram_path / f"host{host}/local/share_0"
        assert {path.name for path in share.glob("[0-9]*")} == {"22", "23"}


def test_a_run_of_which_no_step_can_be_restored_is_not_new(zygote, ram_path):
    """A disk may come back, so a job that restores nothing saves nothing in their place."""
    options = {"count": 2, "function": children.go_back}
    run(zygote, ram_path, [0, 1], None, {n: n for n in (1, 2, 3)}, 1, 9, **options)
    saved = {1: "there already", 4: 4}

    said = run(zygote, ram_path, [0, 2], None, saved, 1, 9, **options)

    assert [one[1:3] for one in said] == [[4, 4]] * 2
    share = ram_path / "host0/local/share_0"
    assert {path.name for path in share.glob("[0-9]")} == {"1", "2", "3", "4"}


@pytest.mark.parametrize("hosts", [[0, 2], [0]], ids=["a new disk", "one process"])
@pytest.mark.parametrize("steps", [(30,), (10, 20, 30)], ids=len)
def test_a_job_that_restores_nothing_saves_over_no_part(zygote, ram_path, hosts, steps):
    """Even if the only step is one of a first save: the disk that is away may have its part."""
    options = {"function": children.go_back}
    run(zygote, ram_path, [0, 1], None, {n: n for n in steps}, 1, 100, count=2, **options)
    saved = {25: "older than step 30", 30: "already", 40: 140}

    run(zygote, ram_path, hosts, None, saved, 1, 100, count=len(hosts), **options)

    local = ram_path / "host0/local"
    there = [*local.glob("[0-9]*"), *local.glob("share_0/[0-9]*")]
    assert {int(path.name) for path in there} == {*steps, 40}


AGAIN = [["save", 3, "there already"], ["save", 4, "there already"]]


@pytest.mark.parametrize("hosts", [[0, 2], [2, 1]], ids=["process 1", "process 0"])
@pytest.mark.parametrize(
    "calls",
    [
        [["restore_or", 4, 4], ["restore", 2, 2], *AGAIN],
        [["save", 5, 5], ["save", 6, 6], ["delete", 6, 6], ["delete", 5, 5], *AGAIN],
    ],
    ids=["went back", "deleted its own"],
)
def test_going_back_saves_over_no_step_of_another_disk(zygote, ram_path, hosts, calls):
    """The disk of a process was replaced, whichever."""
    options = {"count": 2, "function": children.call}
    first = [["save", n, n] for n in range(1, 5)]
    run(zygote, ram_path, [0, 1], first, 2, 9, **options)

    said = run(zygote, ram_path, hosts, calls, 2, 9, **options)

    assert [one[:3] for one in said] == [[4, 4, 4]] * 2


def test_one_process_that_goes_back_saves_over_no_step_of_two(zygote, ram_path):
    """It restored the newest from their parts."""
    options = {"function": children.call}
    first = [["save", n, n] for n in (10, 20, 30)]
    run(zygote, ram_path, [0, 1], first, 2, 100, count=2, **options)
    calls = [["restore_or", 30, 30], ["restore", 20, 20], ["save", 25, "older than step 30"]]

    said = run(zygote, ram_path, [0], [*calls, ["save", 30, "already"]], 2, 100, count=1, **options)

    assert said[0][:3] == [30, 30, 30]


@pytest.mark.parametrize("slow", [0, 1])
def test_a_restore_beside_a_save_leaves_no_step_behind(zygote, ram_path, slow):
    """The thread of one process has not recorded the step; for the first one of a run it waits."""
    job = {"count": 2, "function": children.restore_beside}
    assert run(zygote, ram_path, [0, 1], 1, slow, **job) == [3, 3]
    assert run(zygote, ram_path, [0, 1], 1, slow, **job) == [6, 6]


@pytest.mark.parametrize(("least", "restored"), [(30, 20), (20, 10)])
def test_restore_or_goes_on_before_steps_that_others_deleted(zygote, ram_path, least, restored):
    """This job has saved them itself."""
    said = run(zygote, ram_path, [0, 1], 1, least, restored, count=2, function=children.lose)

    left = [step for step in (10, 20) if step < least]
    assert said == [[*left, restored + 5, restored + 15]] * 2


@pytest.mark.parametrize("restored", [30, None])
def test_a_new_disk_has_the_history_of_the_run(zygote, ram_path, restored):
    """Its later steps count as later than the directory's, though it lacks those before."""
    options = {"count": 2, "function": children.go_back}
    steps = {n: n for n in (10, 20, 30, 35)}
    run(zygote, ram_path, [0, 1], None, steps, 2, 20, **options)
    run(zygote, ram_path, [0, 2], restored, {41: 41, 50: 50}, 2, 20, **options)

    said = run(zygote, ram_path, [3, 2], None, {}, 2, 20, **options)

    assert [one[:3] for one in said] == [[50, 50, 50]] * 2
    assert not any("earlier life" in text for one in said for text in one[3])


def test_a_step_that_all_disks_have_together_is_not_saved_anew(zygote, ram_path):
    """A disk was replaced. No earlier step is saved either, as in a run of one directory."""
    options = {"count": 2, "function": children.go_back}
    run(zygote, ram_path, [0, 1], None, {n: n for n in (2, 4, 8)}, 2, 9, **options)
    refused = {8: "there already", 4: "there already", 6: "older than step 8, the newest of"}

    said = run(zygote, ram_path, [0, 2], 2, {**refused, 10: 10}, 2, 9, **options)

    assert [one[:3] for one in said] == [[8, 10, 10]] * 2
    assert any("has step 8 from before step 2 was restored" in text for text in said[0][3])
    said = run(zygote, ram_path, [0, 1], None, {}, 2, 9, **options)
    assert [one[:3] for one in said] == [[10, 10, 10]] * 2


@pytest.mark.parametrize("restored", [30, 20, None])
def test_one_process_after_several_leaves_no_step_behind(zygote, ram_path, restored):
    """The steps are in the shares of their processes, on its disk."""
    options = {"function": children.go_back}
    run(zygote, ram_path, [0, 1], None, {n: n for n in (10, 20, 30)}, 2, 50, count=2, **options)

    said = run(zygote, ram_path, [0], restored, {40: 40}, 2, 50, count=1, **options)
    said += run(zygote, ram_path, [0, 1], None, {45: 45}, 2, 50, count=2, **options)

    assert [one[:3] for one in said] == [[30, 40, 40], *[[40, 45, 45]] * 2]
    for host in (0, 1):
        share = ram_path / f"host{host}/local/share_0"
        assert {path.name for path in share.glob("[0-9]*")} == {"10", "20", "30", "45"}


@pytest.mark.parametrize("apart", [1, 10])
def test_a_step_deleted_by_hand_does_not_come_back(zygote, ram_path, apart):
    """More processes have saved it; half its parts are in shares that no process has now."""
    go_on, steps = {"function": children.go_on}, [n * apart for n in range(1, 6)]
    run(zygote, ram_path, [0, 0, 1, 1], [], [], steps, 2, count=4, **go_on)
    new = [2 * apart + 1, 2 * apart + 2]

    run(zygote, ram_path, [0, 1], steps[1:2], steps[:1:-1], new, 2, count=2, **go_on)

    said = run(zygote, ram_path, [0, 1], new[1:], [], [], 2, count=2, **go_on)
    assert [everywhere for _, everywhere in said] == [[*steps[:2], *new]] * 2


@pytest.mark.parametrize(
    ("verb", "part", "code"),
    [
        ("read", f"{STEPS}/state/_sharding", errno.EIO),
        ("read_into", f"{STEPS}/state/", errno.EIO),
        ("make_dir", f"/{STEPS}.orbax-checkpoint-tmp", errno.ENOSPC),
    ],
)
def test_a_disk_that_fails_hides_no_step(zygote, ram_path, verb, part, code):
    """Else the job would go on from an older step, and save over the newest one."""
    two = {"count": 2, "function": children.resume}
    run(zygote, ram_path, [0, 1], STEPS, 1, False, count=2)

    for said in run(zygote, ram_path, [1, 0], 1, 0, verb, part, code, **two):
        assert os.strerror(code) in said
        assert "host0" in said
    assert run(zygote, ram_path, [1, 0], 1, 0, verb, part, code, 1, **two) == [STEPS, STEPS]


@pytest.mark.parametrize(
    ("steps", "replicas", "times", "wanted"),
    [(3, 1, 1, 3), (3, 2, 99, 3), (2, 1, 99, 2), (3, 1, 99, None)],
    ids=["once", "others have it", "the directory has it", "nobody else has it"],
)
def test_a_failed_read_of_a_step_that_all_disks_have_ends_no_restore(
    zygote, ram_path, steps, replicas, times, wanted
):
    """It is read again, then from elsewhere. No older step is restored."""
    run(zygote, ram_path, [0, 1], steps, replicas, False, count=2)
    fault = (1, "read_into", f"share_0/{steps}/state/", errno.EIO, times)

    said = run(zygote, ram_path, [0, 1], replicas, *fault, count=2, function=children.resume)

    if wanted:
        assert said == [wanted, wanted]
    else:
        assert all(os.strerror(errno.EIO) in one for one in said)


@pytest.mark.parametrize("steps", [STEPS, STEPS - 1], ids=["local", "uploaded"])
def test_a_disk_that_fails_makes_no_older_step_the_latest(zygote, ram_path, steps):
    """All processes raise, as in a restore, unless the directory has the step."""
    run(zygote, ram_path, [0, 1], steps, 1, False, count=2)
    fault = ("entries", f"share_0/{steps}", errno.EIO, 999)

    for said in run(zygote, ram_path, [1, 0], 0, 0, *fault, count=2, function=children.resume):
        assert said == 2 if steps < STEPS else os.strerror(errno.EIO) in said


@pytest.mark.parametrize("was_opened", [False, True])
def test_a_host_that_is_away_does_not_make_the_run_look_new(zygote, ram_path, was_opened):
    """Nothing is uploaded yet. The ledger may lack the step, and the job is started again.

    The spare host may have opened the run before, in a job that saved nothing.
    """
    two = {"count": 2, "function": children.resume}
    if was_opened:
        run(zygote, ram_path, [0, 2], 0, 1, False, count=2)
    run(zygote, ram_path, [0, 1], 1, 1, False, count=2)

    for said in run(zygote, ram_path, [0, 2], 1, **two):
        assert said.startswith("CheckpointNotFound")
        assert "process 1 on" in said
        assert "lacks its part" in said
    (ram_path / "run" / names.LEDGER).unlink()
    assert all("lacks" in str(said) for said in run(zygote, ram_path, [0, 2], 1, **two))
    assert run(zygote, ram_path, [0, 1], 1, **two) == [1, 1]


def test_a_first_save_that_one_host_did_not_commit_is_nothing(zygote, ram_path):
    """Each host still has the disk on which it began to save, and one lacks its part."""
    run(zygote, ram_path, [0, 1], 1, 1, False, count=2)
    shutil.rmtree(ram_path / "host1/local/share_0/1")

    assert run(zygote, ram_path, [0, 1], 1, count=2, function=children.resume) == [0, 0]


@pytest.mark.parametrize("lost", [MARKER, RECORD, MARKER + RECORD], ids=" ".join)
def test_a_first_step_that_lost_its_marker_was_committed(zygote, ram_path, lost):
    """The run does not begin anew."""
    run(zygote, ram_path, [0, 1], 1, 1, False, count=2)
    for name in lost:
        (ram_path / "host1/local/share_0/1" / name).unlink()

    said = run(zygote, ram_path, [0, 1], 1, count=2, function=children.resume)
    assert all(one.startswith("CheckpointNotFound") for one in said)


def test_after_two_first_saves_that_were_interrupted_the_run_begins_anew(zygote, ram_path):
    """The second ended before it replaced the part that one host has of the first."""
    shares = [ram_path / f"host{host}/local/share_0/1" for host in (0, 1)]
    run(zygote, ram_path, [0, 1], 1, 1, False, count=2)
    shutil.rmtree(shares[1])
    shutil.copytree(shares[0], ram_path / "part")
    said = run(zygote, ram_path, [0, 1], 1, 1, False, count=2)
    assert [one["start"] for one in said] == [0, 0]
    for share in shares:
        shutil.rmtree(share)
    shutil.move(ram_path / "part", shares[0])

    assert run(zygote, ram_path, [0, 1], 1, count=2, function=children.resume) == [0, 0]


@pytest.mark.parametrize("steps", [[1], [1, 1], [1, 2]], ids=str)
def test_a_run_begins_anew_if_no_save_of_its_first_job_was_committed(zygote, ram_path, steps):
    """One disk failed each time; the other has a part of each step."""
    two = {"count": 2, "function": children.fail}
    assert run(zygote, ram_path, [0, 1], steps, 1, **two) == [steps, steps]
    calls = [["restore_or", 0, 0], ["save", 1, 1], ["save", 2, 2]]

    said = run(zygote, ram_path, [0, 1], calls, count=2, function=children.call)

    assert [one[1:3] for one in said] == [[2, 2]] * 2


def test_a_run_whose_committed_step_is_gone_does_not_begin_anew(zygote, ram_path):
    """The save after it failed on one disk; the step itself was deleted by hand."""
    said = run(zygote, ram_path, [0, 1], [1, 2], 1, 2, count=2, function=children.fail)
    assert said == [[2], [2]]
    for host in (0, 1):
        shutil.rmtree(ram_path / f"host{host}/local/share_0/1")

    said = run(zygote, ram_path, [0, 1], 1, count=2, function=children.resume)

    assert all(one.startswith("CheckpointNotFound") for one in said)


@pytest.mark.parametrize("replicas", [2, 1], ids=["whole", "part"])
def test_a_new_disk_of_process_0_deletes_no_best_step_on_another(zygote, ram_path, replicas):
    """It stays as long as the policy keeps it. A part that cannot become whole goes."""
    two = {"count": 2, "function": children.keep_best}
    run(zygote, ram_path, [0, 1], [5, 1, 7, 8], replicas, **two)
    wipe(ram_path, 0)

    here, there = run(zygote, ram_path, [0, 1], [9, 9], replicas, **two)

    if replicas == 2:
        assert here == [[[5], [6]], 2]
        assert there == [[[2, 5], [2, 6]], 2]
        _, there = run(zygote, ram_path, [0, 1], [0.5, 9], replicas, **two)
        assert there == [[[7], [7, 8]], 7]
    else:
        assert here == there == [[[4], [5]], 3]  # which the directory has


def test_a_step_that_process_0_loses_stays_on_another_disk(zygote, ram_path):
    """Such as a copy that was damaged and set aside in the middle of a job."""
    two = {"count": 2, "function": children.keep_best}

    here, there = run(zygote, ram_path, [0, 1], [5, 1, 7, 8, 9], 2, -1, 0, **two)

    assert here == [[[1], [2], [2, 3], [3, 4], [3, 5]], 2]
    assert there == [[[1], [2], [2, 3], [2, 3, 4], [2, 3, 5]], 2]


@pytest.mark.parametrize("faulty", [0, 1])
def test_a_disk_that_cannot_be_listed_then_deletes_no_best_step_either(zygote, ram_path, faulty):
    """Which steps process 0 lacks is learned after the next save."""
    two = {"count": 2, "function": children.keep_best}
    run(zygote, ram_path, [0, 1], [5, 1, 7, 8], 2, **two)
    wipe(ram_path, 0)

    here, there = run(zygote, ram_path, [0, 1], [9, 9], 2, faulty, **two)

    assert here[1] == there[1] == 2
    assert there[0][-1] == [2, 6]


@pytest.mark.parametrize("times", [1, 99])
def test_the_only_disk_with_steps_makes_no_older_step_the_latest(zygote, ram_path, times):
    """It is listed again, and then an error: the directory has an older step."""
    run(zygote, ram_path, [0, 1], STEPS, 2, False, count=2)
    wipe(ram_path, 0)
    fault = (1, "entries", "share_0", errno.EIO, times)

    for said in run(zygote, ram_path, [0, 1], 0, *fault, count=2, function=children.resume):
        assert said == STEPS if times == 1 else os.strerror(errno.EIO) in said


def test_what_another_number_of_processes_saved_later_counts(zygote, ram_path):
    """The newest step of the run has a lower number than the steps that it left in the shares."""
    run(zygote, ram_path, [0, 1], 5, 1, False, count=2)
    shutil.rmtree(ram_path / "run/4")  # as if it had not been uploaded
    (said,) = run(zygote, ram_path, [0], 1, 1, False, count=1)
    assert said["start"] == 2

    for hosts in ([0, 1], [0, 2, 1]):
        some = run(zygote, ram_path, hosts, 0, 1, False, count=len(hosts))
        assert [one["start"] for one in some] == [3] * len(hosts)
    (said,) = run(zygote, ram_path, [0], 0, 1, False, count=1)
    (problem,) = [text for text in said["problems"] if "share_0: steps [4, 5] are of an e" in text]
    assert "To keep one: cp -r " in problem  # a part of a step cannot be forked


def test_a_step_that_a_share_shows_as_left_is_neither_restored_nor_uploaded(zygote, ram_path):
    """The run went on without it on other hosts, and its newest step needs their disks."""
    run(zygote, ram_path, [0], 3, 1, False, count=1)
    run(zygote, ram_path, [1, 2], 1, 1, False, count=2)
    said = run(zygote, ram_path, [0, 1, 2], 1, 1, False, count=3)
    assert [one["start"] for one in said] == [3] * 3
    shutil.rmtree(ram_path / "run/4")  # as if it had not been uploaded

    (said,) = run(zygote, ram_path, [0], 0, 1, False, count=1)

    assert said["start"] == 2
    assert "steps [3] are of an earlier life" in said["problems"][0]
    assert not (ram_path / "run/3").exists()
    said = run(zygote, ram_path, [0, 1, 2], 0, 1, False, count=3)
    assert [one["start"] for one in said] == [4] * 3


def test_it_takes_little_memory(zygote, ram_path):
    """The chunks come in several rounds if the budget is small."""
    run(zygote, ram_path, FOUR, STEPS, 2, False)
    wipe(ram_path, 2, 3)

    said = run(zygote, ram_path, [3, 2, 1, 0], 0, 2, False, 1 << 16)

    assert [one["start"] for one in said] == [3] * 4


@pytest.mark.parametrize("part", range(4))
def test_a_flipped_bit_is_never_loaded(trial, zygote, ram_path, part):
    """One disk is new and another has a bad bit; the third makes up for both."""
    where = {"function": children.read_flipped, "count": 3}
    results = run(zygote, ram_path, [0, 1, 2], [25 * part, 25], 3, **where)
    for seed, said in enumerate(zip(*results, strict=True)):
        with trial("55", f"flipped {part}/{seed}"):
            assert said == (3, 3, 3)


def test_a_damaged_record_ends_no_other_process(zygote, ram_path):
    """Another disk is new, so the processes ask each other what is on their disks."""
    run(zygote, ram_path, [0, 1, 2], STEPS, 3, False, count=3)
    wipe(ram_path, 0)
    [record] = ram_path.glob(f"host1/local/share_0/{STEPS}/{names.RECORD}")
    data = bytearray(record.read_bytes())
    data[10] ^= 4
    record.write_bytes(data)

    said = run(zygote, ram_path, [0, 1, 2], 0, 3, False, count=3)

    assert [one["start"] for one in said] == [STEPS] * 3


def first(*given):
    """Given for each process: the save on its disk, and all that it sees with the run's starts."""
    found: Any = _first(
        [
            [host, own, [[save, [STEPS, starts, ""]] for save, starts in seen.items()], [], ""]
            for host, (own, seen) in zip("abc", given, strict=False)
        ]
    )
    return found[:4]


def test_disks_with_different_saves_of_a_step_are_not_put_together():
    """One may have been unreadable for a moment when the steps were listed."""
    both: Any = first(("one", {"one": []}), (None, {}), ("two", {"two": []}))
    one: Any = first((None, {}), ("two", {"two": []}))
    peer: Any = first((None, {"one": []}), ("two", {"two": [], "one": []}))

    assert "different saves" in both[2]
    assert one == [1, "process 0 on a lacks its part", None, "two"]
    assert peer == one


def test_the_save_of_a_step_from_which_the_run_did_not_go_on_does_not_count():
    """If the later of two is known: each start has the one before in its record."""
    before, since, other = [["x", None]], [["x", None], ["y", 1]], [["x", None], ["z", 1]]
    old, new, third = {"old": before}, {"new": since}, {"third": other}

    assert first(("old", old), ("new", new)) == [1, "process 0 on a lacks its part", None, "new"]
    assert first(("old", old | new), (None, {}))[2:] == [None, "new"]
    for given in (("new", new), ("third", third)), (("third", third), ("new", new)):
        assert "different saves" in first(*given)[2]


def test_of_two_branches_with_a_step_the_one_saved_last_counts():
    """Neither has the start of the other, so that only the clock tells."""
    old, new = ([str(n), [STEPS, [["x", None], [str(n), 1]], "", n]] for n in (1, 2))

    for saves in ([old, new], [new, old]):
        found: Any = _first([["host", one[0], [one], [], ""] for one in saves])
        assert found[3] == new[0]


def flip(item, place):
    """Flips a bit of a value."""
    with open(f"{item}/{place.file}", "r+b") as file:
        file.seek(place.offset + 8)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def test_mending_a_share_takes_no_bad_chunk_from_the_directory(zygote, ram_path):
    """Each copy has the good bytes of the chunk that is bad in the other."""
    run(zygote, ram_path, [0, 1], 2, 2, False, count=2, devices=4)
    storage, roots = LocalStorage(), (ram_path / "host1/local/share_0", ram_path / "run")
    items = [f"{root}/2/state" for root in roots]
    here, there = (dict[str, Any](find_values(storage, item) or {}) for item in items)
    held = [key for key, place in here.items() if names.OCDBT_HELD in str(place)]
    assert len(held) == 2
    good = read_place(storage, items[0], here[held[1]])
    flip(items[0], here[held[0]])
    flip(items[1], there[held[1]])

    share, directory = (StepIndex(storage, str(root)) for root in roots)
    assert heal(share, directory, 2)

    assert read_place(storage, items[0], here[held[1]]) == good
    assert jaxckpt.verify(roots[0] / "2").ok
