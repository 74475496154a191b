"""One of three real processes is killed, stopped, or late: none hangs, and nothing is lost."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults import dead_children as children
from tests.faults.jobs import HANGS, started
from tests.faults.zygote import Zygote

# These mostly wait, so that many of them go at once.
AT_ONCE = 4
TIMEOUT_S = 5.0
ABORTED = -signal.SIGABRT


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory):
    """Calls a function with each of some arguments, a zygote before them; yields the futures."""
    zygotes = [Zygote(tmp_path_factory.mktemp("zygote")) for _ in range(AT_ONCE)]
    free = list(zygotes)

    def call(function, *args):
        zygote = free.pop()
        try:
            return function(zygote, *args)
        finally:
            free.append(zygote)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield lambda function, cases: [(case, pool.submit(call, function, *case)) for case in cases]
    for zygote in zygotes:
        zygote.__exit__()


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A second zygote."""
    with Zygote(tmp_path_factory.mktemp("second")) as started_too:
        yield started_too


def lose(zygote, root, how, victim, phase, timeout_s=TIMEOUT_S, heartbeat_s=100):
    """Kills or stops a process of three as a phase begins; what the others and a new job find."""
    root.mkdir()
    who = children.who_pauses(phase, victim)
    with started(
        zygote,
        children.lose_one,
        args=[root, phase, who, timeout_s],
        heartbeat_s=heartbeat_s,
        limit_s=6 * TIMEOUT_S + 10,
    ) as job:
        job.wait_for(who, "paused")
        getattr(job, how)(victim)
        job.release("on")
        job.wait_for_others()
        others = {index: job.ended(index) for index in range(3) if index != victim}
        acked = [step for step in (1, 2, 3) if job.has_reached(f"acked-{step}")]
        return {"others": others, "acked": acked[-1], "ended": job.wait()[victim]}


def check_new_job(zygote, root, found):
    """A job of one process restores the acknowledged step, and resumes without help."""
    new = zygote.run(children.go_on, root, found["acked"])
    assert new is not None
    assert new["newest"] in (found["acked"], found["acked"] + 1)
    assert new["newest"] in new["steps"]
    assert new["left"] == []


def check_others(found, victim, phase):
    """Each ended, or heard in time who was lost."""
    for end in found["others"].values():
        assert end.status != HANGS, end.out
        if end.result is None:  # JAX ends the others when process 0 is gone
            assert victim == 0, end.out
            assert end.status == ABORTED, end.out
            continue
        lost, then = end.result["lost"], end.result["then"]
        is_waited_for = phase in ("writing", "restoring") or (
            victim == 0 and phase in ("written", "renaming", "committed", "deleting")
        )
        word = lost if is_waited_for else then
        assert word["error"] in ("CheckpointTimeout", "ProcessesDisagree"), word
        assert victim in word["named"], word
        assert is_waited_for or lost["error"] is None, lost


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_process_is_lost_in_any_phase(trial, side_by_side, zygote, ram_path, how, victim):
    """The others hear who it was, or end; a new job restores what was acknowledged, and saves."""
    cases = [(ram_path / phase, how, victim, phase) for phase in children.PHASES]
    for case, future in side_by_side(lose, cases):
        with trial("19", f"{how} {victim} while {case[-1]}"):
            found = future.result()
            check_others(found, victim, case[-1])
            check_new_job(zygote, case[0], found)


def test_jax_ends_the_others_of_a_process_that_is_lost(trial, side_by_side, zygote, ram_path):
    """If the heartbeat is shorter than the manager's timeout: no step is torn, a job resumes."""
    cases = [
        (ram_path / f"{how}-{victim}-{phase}", how, victim, phase, 60.0, 3)
        for how in ("kill", "stop")
        for victim in (0, 2)
        for phase in ("writing", "renaming")
    ]
    for case, future in side_by_side(lose, cases):
        root, how, victim, phase, *_ = case
        with trial("19", f"{how} {victim} while {phase}, which jax notices"):
            found = future.result()
            assert {end.status for end in found["others"].values()} <= {ABORTED, 0}
            check_new_job(zygote, root, found)


def test_a_process_that_goes_on_after_the_others_have_gone(trial, zygote, other, ram_path):
    """It was stopped; a new job has saved meanwhile, and what it saved stays whole."""
    for victim in (0, 1):
        root = ram_path / str(victim)
        root.mkdir()
        with (
            trial("19", f"process {victim} goes on after the job has gone"),
            started(zygote, children.lose_one, args=[root, "writing", victim, 2.0]) as job,
        ):
            job.wait_for(victim, "paused")
            job.stop(victim)
            job.release("on")
            job.wait_for_others()
            assert other.run(children.go_on, root, 2)["newest"] == 2
            job.resume(victim)
            end = job.wait()[victim]
            assert end.status != HANGS, end.out
            new = other.run(children.go_on, root, 4)
            assert (new["steps"], new["left"]) == ([3, 4], [])


def test_a_step_that_is_torn_is_seen(zygote, ram_path):
    """A control: a new job does not resume silently if a file of a step is truncated."""
    with started(zygote, children.lose_one, args=[ram_path / "run", "none", 0, 20.0]) as job:
        job.release("on")
        assert [end.status for end in job.wait()] == [0, 0, 0]
    for file in (ram_path / "run" / "4").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-1])

    zygote.start(children.go_on, ram_path / "run", 4)
    with pytest.raises(AssertionError):
        zygote.answers()


# --- coordination ------------------------------------------------------------------------------

DEADLINE_S = 4.0


def be_late(zygote, root, late, where):
    root.mkdir()
    with started(zygote, children.come_late, args=[root, late, where, DEADLINE_S]) as job:
        for index in {0, 1, 2} - {late}:
            job.wait_for(index, "first")
        job.release("late")
        job.wait_for(late, "first")
        job.release("second")
        return job.wait()


def test_a_process_that_is_late(trial, side_by_side, ram_path):
    """Every process learns within the deadline which one is late; the name can then be used again.

    In an agreement only process 0 can be late, since it waits for no other process.
    """
    cases = [(ram_path / where, 2, where) for where in ("barrier", "gather", "save")]
    cases += [(ram_path / f"{where}-0", 0, where) for where in ("barrier", "agree", "open", "save")]
    for case, future in side_by_side(be_late, cases):
        _, late, where = case
        with trial("21", f"process {late} is late to {where}"):
            for end in future.result():
                assert end.status == 0, end.out
                assert end.result["first"]["error"] == "CheckpointTimeout"
                assert end.result["first"]["named"] == [late]
                assert end.result["first"]["s"] < 2 * DEADLINE_S
                assert end.result["second"]["error"] is None, end.result


def test_a_name_is_used_again(trial, zygote):
    """Each round of a name is one of its own."""
    with (
        trial("21", "a name used thirty times"),
        started(zygote, children.meet_often, args=[30]) as job,
    ):
        wanted = []
        for n in range(30):
            wanted += [[[n, index] for index in range(3)], [n, 0]]
        assert [end.result for end in job.wait()] == [wanted] * 3


def live(zygote, root, how, victim, recoverable, heartbeat_s):
    root.mkdir()
    with started(
        zygote,
        children.live_on,
        args=[root, victim, DEADLINE_S],
        recoverable=recoverable,
        heartbeat_s=heartbeat_s,
        limit_s=6 * DEADLINE_S + 10,
    ) as job:
        job.wait_for(victim, "paused")
        for index in range(3):
            job.wait_for(index, "acked-1")
        getattr(job, how)(victim)
        job.release("on")
        return job.wait()


def test_the_others_live_on(trial, side_by_side, zygote, ram_path):
    """In jax's recoverable mode and without it: each save is an error in time, or the job ends."""
    cases = [
        (ram_path / f"{how}-{victim}-{recoverable}", how, victim, recoverable, 10)
        for how in ("kill", "stop")
        for victim in (0, 2)
        for recoverable in (True, False)
    ]
    for case, future in side_by_side(live, cases):
        root, how, victim, recoverable, _ = case
        with trial("21", f"{how} {victim}, {'recoverable' if recoverable else 'default'} mode"):
            for index, end in enumerate(future.result()):
                if index == victim:
                    continue
                assert end.status != HANGS, end.out
                if end.result is None:
                    assert end.status == ABORTED, end.out
                    continue
                for word in end.result["words"]:
                    assert word["error"] in ("CheckpointTimeout", "ProcessesDisagree"), word
                    assert word["s"] < 2 * DEADLINE_S, word
            check_new_job(zygote, root, {"acked": 1})
