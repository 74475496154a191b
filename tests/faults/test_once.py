"""A job that reads each value once loses a process or finds a bad chunk: no hang, no wrong bit."""

from __future__ import annotations

import pytest

from tests.faults import once_children as children
from tests.faults.jobs import HANGS, started
from tests.faults.test_dead_process import ABORTED, side_by_side  # noqa: F401  # a fixture

TIMEOUT_S = 4.0


def is_ended_by_heartbeat(how, point):
    """Whether a process waits in a collective operation for one that is stopped or has failed.

    Where six devices add up, only the neighbors of a dead process hear of it.
    """
    return how == "stop" or point == children.ADDED


def lose(zygote, root, how, victim, point):
    """Kills or stops a process at a point; what became of the others, and of a new job."""
    root.mkdir()
    heartbeat_s = 5 if is_ended_by_heartbeat(how, point) else 100
    with started(
        zygote,
        children.lose_one,
        args=[root, point, victim, TIMEOUT_S],
        heartbeat_s=heartbeat_s,
        limit_s=60,
    ) as job:
        job.wait_for(victim, "paused")
        getattr(job, how)(victim)
        job.release("on")
        job.wait_for_others()
        others = [job.ended(index) for index in range(3) if index != victim]
        job.wait()
    return others, zygote.run(children.go_on, root)


@pytest.mark.parametrize(("how", "victim"), [("kill", 0), ("kill", 1), ("stop", 2)])
def test_a_process_is_lost_at_each_phase(trial, side_by_side, ram_path, how, victim):  # noqa: F811
    """The others hear in time who it was, or JAX ends them; the checkpoint is as it was."""
    cases = [(ram_path / str(i), how, victim, point) for i, point in enumerate(children.POINTS)]
    for case, future in side_by_side(lose, cases):
        with trial("53", f"{how} {victim} {case[-1]}"):
            others, new = future.result()
            for end in others:
                assert end.status != HANGS, end.out
                if end.result is None:
                    assert end.status == ABORTED, end.out
                    assert victim == 0 or is_ended_by_heartbeat(how, case[-1]), end.out
                    continue
                assert end.result["error"] in ("CheckpointTimeout", "ProcessesDisagree"), end.result
                assert victim in end.result["named"], end.result
            assert new == {"same": True}


def restored(zygote, *args):
    """What each member says that restores a checkpoint with a bad chunk."""
    with started(zygote, children.read_bad, args=args) as job:
        ends = job.wait()
    assert all(end.result is not None for end in ends), ends
    return [end.result for end in ends]


@pytest.mark.parametrize("by", ["manager", "path"])
def test_a_damaged_chunk_leads_to_the_step_before(trial, zygote, ram_path, by):
    """Whichever process finds it, and whatever has been moved already."""
    for leaf in (0, 2):
        with trial("53", f"damage in leaf {leaf}, restored by {by}"):
            for one in restored(zygote, ram_path / f"{leaf}", "damaged", leaf, by):
                assert (one["error"], one["step"]) == (None, 1), one
                assert one["once"] == [[*children.LEAVES]], one
                assert any("could not read its part" in text for text in one["warned"])


@pytest.mark.parametrize("how", ["at first", "always"])
def test_a_chunk_that_one_process_cannot_read(trial, zygote, ram_path, how):
    """All read the rest directly; if it still cannot be read, all raise, and no step is damaged."""
    for leaf in (0, 2):
        with trial("53", f"{how} an error after {leaf} reads"):
            results = restored(zygote, ram_path / f"{leaf}", how, leaf, "manager")
            errors = [one["error"] for one in results]
            if how == "at first":
                assert errors == [None] * 3, results
                assert [one["step"] for one in results] == [2] * 3
                before = [children.LEAVES[0]] if leaf else []  # what was carried stays
                assert [one["once"] for one in results] == [[before]] * 3
            else:
                assert errors == ["ProcessesDisagree", "OSError", "ProcessesDisagree"], results
