"""Hosts with disks of their own are killed; what all had acknowledged restores on the same ones."""

from __future__ import annotations

import shutil
from itertools import count

import pytest

from tests.faults.jobs import started
from tests.faults.test_network import HEARTBEAT_S, Network
from tests.faults.test_network import side_by_side as side_by_side
from tests.waiting import wait_until
from tests.workers import tiers

HOSTS = [0, 1]
STEPS = 4
# The changes are divided: a test has a limit of time, and every 30th one shows the most.
PARTS = [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 30, 6))]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("victim", HOSTS)
def test_a_kill_at_any_change_of_a_disk(start_processes, ram_path, trial, victim, part):
    """The same hosts go on at the newest step that was acknowledged, with all that they held."""
    for change in count(1 + part, 30):
        root = ram_path / str(change)
        job = start_processes("tiers:train_and_die", args=[root, STEPS, HOSTS, victim, change])
        wait_until(lambda job=job: job.processes[victim].poll() is not None, limit_s=120)
        survived = job.processes[victim].poll() == 0
        if not survived:
            job.kill(1 - victim)  # as a scheduler does
        with trial("41", f"process {victim} killed at change {change}"):
            saved = [n for n in range(1, STEPS + 1) if job.reached(1 - victim, f"saved {n}")]
            again = start_processes("tiers:train_apart", args=[root, 1, HOSTS]).wait()
            starts = {one.result["start"] for one in again}
            assert len(starts) == 1
            assert starts.pop() >= max(saved, default=0)
        job.close()
        shutil.rmtree(root)
        if survived:
            break
    assert change > 90


def lose_with_disk(zygote, root, victim, after):
    """Kills a host once all have saved a step, and wipes its disk; where the next job starts."""
    root.mkdir()
    durable = after // 2 * 2
    with (
        Network(2) as network,
        started(
            zygote,
            tiers.train_apart,
            args=[str(root), 9, HOSTS],
            heartbeat_s=HEARTBEAT_S,
            **network.options,
        ) as job,
    ):
        job.wait_for(1 - victim, f"saved {after + 1}")
        job.kill(victim)
        job.wait_for_others()
        job.wait()
    shutil.rmtree(root / f"host{victim}")
    with (
        Network(2) as network,
        started(
            zygote,
            tiers.train_apart,
            args=[str(root), 1, HOSTS],
            heartbeat_s=HEARTBEAT_S,
            **network.options,
        ) as job,
    ):
        job.wait_for_others()
        return durable, [one.result for one in job.wait()]


@pytest.mark.faults_root
def test_a_host_is_lost_with_its_disk(trial, side_by_side, ram_path):
    """The newest durable step restores, or a later one, if need be from the disk that is left."""
    cases = [(ram_path / f"{victim}-{n}", victim, n) for victim in HOSTS for n in (2, 3, 5)]
    for (_, victim, after), future in side_by_side(lose_with_disk, cases):
        with trial("42", f"host {victim} lost with its disk after step {after}"):
            durable, said = future.result()
            assert [one["start"] >= durable for one in said] == [True, True]
            assert said[0]["start"] == said[1]["start"]
            place = said[victim]["places"][0]
            assert place.startswith(f"{ram_path}/")
            assert "/run/" in place or "-tmp-" in place  # united from the disk of the other host
