"""Jobs of several hosts with `local`: each has a disk of its own, with what it held."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import socket
import subprocess
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxckpt
from jaxckpt._core.plan import plan_save
from jaxckpt._disk.commit import commit_of
from jaxckpt._disk.find import find
from jaxckpt._run import one_step
from jaxckpt._run import upload as uploading
from jaxckpt._run.copies import over_disks
from jaxckpt._run.heal import heal
from jaxckpt._run.index import StepIndex
from jaxckpt._run.shares import refuse, share_on_disk
from jaxckpt.cli._make import upload
from jaxckpt.errors import (
    CheckpointNotFound,
    CheckpointTimeout,
    CorruptCheckpoint,
    ProcessesDisagree,
    SaveFailed,
    StoreError,
)
from jaxckpt.format import names
from jaxckpt.storage import LocalStorage, PathIn, kvstore, locate
from jaxckpt.storage._arrays import Keys
from jaxckpt.storage._limit import LimitedStorage
from jaxckpt.storage._mounts import Mount
from jaxckpt.testing import CrashingStorage, SimulatedCrash, WatchedStorage, simulate
from jaxckpt.testing._storage import _Relay
from tests.commandline import cli, said_json
from tests.core.test_plan import array_specs, held
from tests.run.test_identity import as_before
from tests.run.test_peers import NOWHERE
from tests.run.test_tiers import damage
from tests.static_server import served
from tests.twins import watched
from tests.waiting import wait_until

TWO = [0, 1]
GOLDEN = Path(__file__).parents[1] / "golden"
FILES = ("_jaxckpt.disk", "_jaxckpt.run")
LOCK = Path(names.LOCK)

pytestmark = pytest.mark.multihost


@pytest.fixture
def train(run_processes, tmp_path):
    """Trains in processes on hosts; returns what each says."""

    def run(steps, hosts=TWO, **options):
        count = len(hosts)
        args = [tmp_path, steps, hosts, *options.pop("args", [])]
        done = run_processes("tiers:train_apart", count=count, args=args, **options)
        return [one.result for one in done]

    return run


def places(said, tmp_path):
    """Where each process has read from: "run" or the name of a host."""
    return [one["places"][-1].removeprefix(f"{tmp_path}/").partition("/")[0] for one in said]


def test_each_host_keeps_what_it_held(train, tmp_path):
    """All steps are uploaded that `save` names, and are like those that were saved there."""
    said = train(5)

    for i, one in enumerate(said):
        assert one["problems"] == []
        assert one["tiers"] == {"local": [4, 5], "durable": [2, 4], "waiting": []}
        root = tmp_path / f"host{i}" / "local"
        assert {path.name for path in root.iterdir()} == {*FILES, "share_0"}
        assert jaxckpt.verify(root / "share_0" / "5").ok
    for step in ("2", "4"):
        assert jaxckpt.verify(tmp_path / "run" / step).ok
    with jaxckpt.CheckpointManager(tmp_path / "run", mode="r") as reader:
        assert [*reader.restore(as_numpy=True)["split"][:2]] == [4, 5]
        assert reader.restore_items()["data"] == [{"process": 0, "at": 4}, {"process": 1, "at": 4}]
        assert reader.metrics(4) == {"n": 4}


def test_a_run_does_not_begin_anew_beside_its_first_save(run_processes, tmp_path):
    """The step that one host has committed and the other is about to is waited for."""
    assert [one.result for one in run_processes("tiers:begin_apart", args=[tmp_path])] == [1, 1]


def test_the_same_hosts_restore_the_newest_step(train, tmp_path):
    train(5)

    said = train(0)

    assert [one["start"] for one in said] == [5, 5]
    assert places(said, tmp_path) == ["host0", "host1"]


def test_a_new_host_reads_the_newest_durable_step(train, tmp_path):
    """Only what it lacks; the newer steps of the other go when the run has a new one.

    All report which step is of no use, where and why, and what was read; one logs it.
    """
    train(5)
    shutil.rmtree(tmp_path / "host1")

    said = train(1)

    assert [one["start"] for one in said] == [4, 4]
    why = f"step 5 on the local disks cannot be used: process 1 on {socket.gethostname()} lacks"
    for one in said:
        restored, lost = sorted(one["problems"])
        assert lost.startswith(why)
        assert re.search(f"[1-9] chunks of .* were read in {tmp_path / 'run'}$", restored)
    assert places(said, tmp_path) == ["host0", "host1"]
    assert [one["start"] for one in train(0)] == [5, 5]


def test_bad_chunks_in_the_directory_are_not_loaded(train, tmp_path):
    """A new host lacks them, and no other place has them: an older step is restored."""
    train(5)
    shutil.rmtree(tmp_path / "host1")
    for file in data_files(tmp_path / "run" / "4"):
        data = np.fromfile(file, np.uint8)
        data[::10_000] ^= 1  # in each chunk
        data.tofile(file)

    said = train(0)

    assert [one["start"] for one in said] == [2, 2]
    problems = [problem for one in said for problem in one["problems"]]
    assert any("run/4 is damaged: chunk" in problem for problem in problems)
    assert jaxckpt.verify(tmp_path / "run" / "2").ok


@pytest.mark.parametrize("lost", TWO)
def test_a_new_disk_takes_no_steps_from_the_other(train, tmp_path, lost):
    """While the run saves nothing, no disk decides what stays on another."""
    train(5)
    shutil.rmtree(tmp_path / f"host{lost}")
    share = tmp_path / f"host{1 - lost}" / "local" / "share_0"
    before = sorted(path.relative_to(share) for path in share.rglob("*") if path.is_file())

    said = train(0)

    assert [one["start"] for one in said] == [4, 4]
    assert said[1 - lost]["tiers"]["local"] == [4, 5]
    assert {path.relative_to(share) for path in share.rglob("*")} >= {*before} - {LOCK}
    assert all(jaxckpt.verify(share / step).ok for step in "45")


def test_steps_of_an_earlier_life_go(train, tmp_path):
    """What one disk has alone is no step, and does not outlive what the run did instead."""
    train(5)
    shutil.rmtree(tmp_path / "host1")
    train(0)
    assert (tmp_path / "host0" / "local" / "share_0" / "5").exists()
    shutil.copytree(tmp_path / "host0", tmp_path / "before")

    said = train(2)

    assert [one["start"] for one in said] == [4, 4]
    assert [one["tiers"]["local"] for one in said] == [[5, 6], [5, 6]]
    shutil.rmtree(tmp_path / "host0")
    (tmp_path / "before").rename(tmp_path / "host0")  # with another step 5
    said = train(0)
    assert [one["start"] for one in said] == [6, 6]
    assert places(said, tmp_path) == ["host0", "host1"]


def test_processes_of_other_budgets_help_one_another(train, tmp_path):
    """What they send goes in the same groups."""
    train(5, args=[["whole", "count"], False])
    shutil.rmtree(tmp_path / "host1")

    said = train(0, args=[["whole", "count"], False, True, None, None, [1 << 30, 8]])

    assert [one["start"] for one in said] == [5, 5]
    assert all("chunks of" in one["problems"][-1] for one in said)


def test_a_host_that_comes_back_does_not_hide_a_newer_save_of_a_step(train, tmp_path):
    """The newest step restores as it would with a blank disk: the other host has all of it."""
    train(5, args=[["whole", "count"], False])
    train(1, hosts=[2, 3], args=[["whole", "count"], False])  # saves step 5 again

    said = train(0, hosts=[1, 2], args=[["whole", "count"], False])

    assert [one["start"] for one in said] == [5, 5]
    assert all("process 0" in one["problems"][-1] for one in said)


def test_a_run_on_the_disks_of_another_begins_anew(train, tmp_path):
    """Each has its own place on each disk; the steps of the other stay as they are."""
    first, second = [["split"], False, True, str(tmp_path / "A")], [["split"], False, True]
    train(3, args=first)

    said = train(2, args=second)

    assert [one["start"] for one in said] == [0, 0]
    assert all("steps of another run" in one["problems"][0] for one in said)
    assert [one["tiers"]["local"] for one in said] == [[1, 2]] * 2
    assert [one["start"] for one in train(1, args=first)] == [3, 3]
    assert [one["start"] for one in train(0, args=second)] == [2, 2]
    assert sorted(path.name for path in (tmp_path / "run").glob("[0-9]*")) == ["2"]


def test_disks_that_come_back_do_not_take_the_run_back(train, tmp_path):
    """Both have a whole step with a higher number, of a life that the run did not go on from."""
    train(7)
    shutil.rmtree(tmp_path / "run" / "6")  # as if it had not been uploaded
    assert [one["start"] for one in train(2, hosts=[2, 3])] == [4, 4]

    said = train(1)

    assert [one["start"] for one in said] == [6, 6]
    assert places(said, tmp_path) == ["run", "run"]
    assert all("steps [6, 7] are of an earlier life" in one["problems"][0] for one in said)
    assert [one["tiers"]["local"] for one in said] == [[7], [7]]
    assert [one["start"] for one in train(0)] == [7, 7]


@pytest.mark.parametrize("is_uploaded", [True, False])
def test_a_step_that_the_run_left_does_not_hide_a_later_save_of_it(train, tmp_path, is_uploaded):
    """The directory shows which of two saves of the newest step the run has left, or the clock."""
    few = [["whole", "count"], False]
    train(4, args=few)
    train(3, args=few)
    shutil.rmtree(tmp_path / "run" / "6")  # as if it had not been uploaded
    train(3, hosts=[2, 3], args=few)  # saves steps 5, 6 and 7 again
    if not is_uploaded:
        shutil.rmtree(tmp_path / "run" / "6")

    said = train(0, hosts=[0, 1, 2, 3], args=few)

    assert [one["start"] for one in said] == [7] * 4
    (found,) = {one["problems"][-1] for one in said}
    assert all((f"process {i} on" in found) == (i < 2) for i in range(4))  # lack their parts


def test_disks_of_an_older_release_go_on(train, tmp_path):
    train(5)
    as_before(tmp_path)

    said = train(1)

    assert [one["start"] for one in said] == [5, 5]
    assert places(said, tmp_path) == ["host0", "host1"]
    assert [one["problems"] for one in said] == [[], []]
    as_before(tmp_path)
    for step in (4, 5, 6):  # now nothing shows whose disks these are
        shutil.rmtree(tmp_path / "run" / str(step))
    said = train(0)
    assert [one["start"] for one in said] == [2, 2]
    for one, host in zip(said, ("host0", "host1"), strict=True):
        [command] = re.findall(
            "If they are of this run, stop the job and: (.*)", one["problems"][0]
        )
        subprocess.run(command, shell=True, check=True, cwd=tmp_path / host)
    assert [one["start"] for one in train(0)] == [6, 6]


ALL = ["split", "whole", "count"]


@pytest.mark.parametrize(
    ("part", "kinds"),
    [
        ("d", ["split"]),  # a chunk that no other disk has
        ("d", ALL),
        pytest.param("ocdbt.process_held", ALL, marks=pytest.mark.slow),
        # With the other files of the step goes the position that only this disk has.
        *(pytest.param(part, ALL, marks=pytest.mark.slow) for part in ("gone", "_METADATA")),
    ],
)
def test_a_damaged_share_is_mended(train, tmp_path, part, kinds):
    """All read the chunks where they are good, which then go to the disk that lacks them."""
    train(4, args=[kinds])
    share = tmp_path / "host1" / "local" / "share_0" / "4"
    if part == "gone":
        max((share / "state" / "d").iterdir(), key=size_of).unlink()
    elif part == "_METADATA":
        (share / "state" / part).write_bytes(b"{}")
    else:
        damage(share / "state" / part)
    assert not jaxckpt.verify(share).ok

    said = train(0, args=[kinds])

    assert [one["start"] for one in said] == [4, 4]
    assert places(said, tmp_path) == ["host0", "host1"]
    assert any("is mended from" in problem for problem in said[1]["problems"])
    assert not any("is mended from" in problem for problem in said[0]["problems"])
    assert jaxckpt.verify(share).ok
    assert places(train(0, args=[kinds]), tmp_path) == ["host0", "host1"]


def size_of(path):
    return path.stat().st_size


def test_a_damaged_share_that_only_one_disk_has_is_set_aside(train, tmp_path):
    """The step before is restored; the other host's part stays."""
    train(5, args=[["split"]])
    shares = [tmp_path / f"host{i}" / "local" / "share_0" for i in TWO]
    damage(shares[1] / "5" / "state" / "d")

    said = train(0, args=[["split"]])

    assert [one["start"] for one in said] == [4, 4]
    assert places(said, tmp_path) == ["host0", "host1"]
    assert any("5" in problem and "damaged" in problem for problem in said[1]["problems"])
    why = f"step 5 cannot be restored and is skipped: process 1 on {socket.gethostname()}: "
    assert any(problem.startswith(why) for problem in said[0]["problems"])
    assert not (shares[1] / "5").exists()
    assert [*shares[1].glob("5.jaxckpt-bad*")]
    assert jaxckpt.verify(shares[0] / "5").ok


def test_damage_in_the_directory_is_mended(train, run_processes, tmp_path):
    """Each process replaces the files that it has sent."""
    train(4)
    for file in data_files(tmp_path / "run" / "4"):
        data = np.fromfile(file, np.uint8)
        data[::10_000] ^= 1  # in each chunk
        data.tofile(file)

    said = [one.result for one in run_processes("tiers:scrub_apart", args=[tmp_path, TWO])]

    assert [one["ok"] for one in said] == [{"2": True, "3": True, "4": True}] * 2
    assert jaxckpt.verify(tmp_path / "run" / "4").ok
    assert not [*(tmp_path / "run").glob("4.jaxckpt-bad-*")]


def test_damage_that_others_can_mend_is_mended_if_process_0_lacks_the_step(
    train, run_processes, tmp_path
):
    """The bad files are those that process 1 has sent."""
    train(4)
    shares = [tmp_path / f"host{i}" / "local" / "share_0" / "4" for i in TWO]
    ends = {file.name[-16:] for file in (shares[1] / "state" / "d").iterdir()}
    bad = [file for file in data_files(tmp_path / "run" / "4") if file.name[-16:] in ends]
    assert bad
    for file in bad:
        flip(file)
    shutil.rmtree(shares[0])

    said = [one.result for one in run_processes("tiers:scrub_apart", args=[tmp_path, TWO])]

    assert [one["ok"]["4"] for one in said] == [True, True]
    assert jaxckpt.verify(tmp_path / "run" / "4").ok
    assert not [*(tmp_path / "run").glob("4.jaxckpt-bad-*")]


def test_damage_that_no_share_can_mend_is_replaced(train, run_processes, tmp_path):
    """What unites the parts is on no disk: the step is set aside, and uploaded again."""
    train(4)
    (tmp_path / "run" / "4" / "state" / names.OCDBT_MANIFEST).write_bytes(b"")

    said = [one.result for one in run_processes("tiers:scrub_apart", args=[tmp_path, TWO])]

    assert [one["ok"] for one in said] == [{"2": True, "3": True, "4": False}] * 2
    assert [one["durable"] for one in said] == [[2, 4], [2, 4]]
    assert jaxckpt.verify(tmp_path / "run" / "4").ok
    assert [*(tmp_path / "run").glob("4.jaxckpt-bad-*")]


def test_heal_mends_a_step_from_the_shares(run_processes, tmp_path):
    """One share after the other; also the step that shares the files, and in a store."""
    run_processes("tiers:train_unchanged", args=[tmp_path, TWO, 3])
    shares = [tmp_path / f"host{process}" / "local" / "share_0" for process in TWO]
    run, to = tmp_path / "run", StepIndex(*locate(f"memory://{tmp_path.name}/run"))
    for share in reversed(shares):
        uploading.upload(StepIndex(LocalStorage(), str(share)), to, 3)
    token = uploading.upload_token(find(LocalStorage(), str(shares[0] / "3")))
    for file in data_files(run / "3"):  # each chunk, as only bad ones are taken from a share
        file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
        there = f"{to.path(3)}/state/{names.data_file_of(file.name, token)}"
        to.storage.write(there, file.read_bytes())
    assert not jaxckpt.verify(to.path(3)).ok

    assert cli("heal", run, shares[0])[0] == 1
    assert cli("heal", run, shares[1])[0] == 0
    with pytest.raises(SaveFailed, match="Heal it from the other shares too"):
        heal(to, StepIndex(LocalStorage(), str(shares[0])), 3)
    heal(to, StepIndex(LocalStorage(), str(shares[1])), 3)

    assert all(jaxckpt.verify(path).ok for path in (run / "1", run / "3", to.path(3)))


def test_scrub_mends_a_share(train, run_processes, tmp_path):
    train(4)
    share = tmp_path / "host0" / "local" / "share_0" / "4"
    damage(share / "state" / "ocdbt.process_held")

    said = [one.result for one in run_processes("tiers:scrub_apart", args=[tmp_path, TWO])]

    assert [one["ok"] for one in said] == [{"2": True, "3": True, "4": True}] * 2
    assert jaxckpt.verify(share).ok


def test_other_process_ids_read_what_is_there(train, tmp_path):
    """What all hosts hold is on each disk; parts of others are read from their disks."""
    train(5, args=[["whole", "count"], False])
    said = train(0, hosts=[1, 0], args=[["whole", "count"], False])
    assert [one["start"] for one in said] == [5, 5]
    assert places(said, tmp_path) == ["host1", "host0"]

    train(1, args=[["whole", "count"], False])
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(tmp_path / "host0")
    shutil.rmtree(tmp_path / "host1")
    train(5)
    said = train(0, hosts=[1, 0])
    assert [one["start"] for one in said] == [5, 5]
    assert places(said, tmp_path) == ["host1", "host0"]


def test_another_number_of_processes_reads_all_disks(train, tmp_path):
    train(5, args=[["split"], False])

    said = train(0, hosts=[0, 1, 2], devices_per_process=2, args=[["split"], False])

    assert [one["start"] for one in said] == [5] * 3
    assert places(said, tmp_path) == ["host0", "host1", "host2"]


def test_processes_of_a_host_share_its_disk(train, tmp_path):
    """Each has a directory of its own there."""
    said = train(3, hosts=[0, 0, 1, 1], devices_per_process=2)

    assert [one["tiers"]["local"] for one in said] == [[2, 3]] * 4
    for host in (0, 1):
        found = {path.name for path in (tmp_path / f"host{host}" / "local").iterdir()}
        assert found == {*FILES, "share_0", "share_1"}
    assert [one["start"] for one in train(0, hosts=[0, 0, 1, 1], devices_per_process=2)] == [3] * 4


def test_what_a_dead_job_left_is_uploaded(train, tmp_path):
    """The newest step of all disks, after the next save."""
    train(3, args=[["split", "whole", "count"], True, False])
    shutil.rmtree(tmp_path / "run", ignore_errors=True)

    said = train(0)

    assert [one["start"] for one in said] == [3, 3]
    assert [one["tiers"]["durable"] for one in said] == [[3], [3]]
    assert jaxckpt.verify(tmp_path / "run" / "3").ok


@pytest.fixture
def shares(tmp_path):
    """The shares of two hosts with steps 2 and 3, as an older layout has them."""
    with tarfile.open(GOLDEN / "shares.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    for host in ("host0", "host1"):
        file = tmp_path / host / "local" / names.RUN
        about = json.loads(file.read_text())
        file.write_text(json.dumps({**about, "directory": str(tmp_path / "run")}))
    return [tmp_path / host / "local" / "share_0" for host in ("host0", "host1")]


def test_an_upload_waits_for_no_commit_and_no_call(shares, run_processes, tmp_path):
    """The newest step of an earlier job gets there by itself, also from an older layout."""
    first, _ = run_processes("tiers:wait_for_none", args=[tmp_path, TWO])

    assert first.result == [3]
    assert jaxckpt.verify(tmp_path / "run" / "3").ok


def test_shares_of_an_older_layout_are_restored(shares, train, tmp_path):
    said = train(0, args=[["small", "count"]])

    assert [one["start"] for one in said] == [3, 3]
    assert places(said, tmp_path) == ["host0", "host1"]


@pytest.mark.parametrize("process", TWO)
def test_an_upload_goes_on_where_a_dead_job_ended(start_processes, tmp_path, process):
    """What it has sent is not sent again."""
    job = start_processes("tiers:train_and_die_uploading", args=[tmp_path, TWO, process])
    wait_until(lambda: job.processes[process].poll() is not None, limit_s=120)
    job.kill(1 - process)
    assert job.reached(0, "saved 2")

    again = start_processes("tiers:train_and_count", args=[tmp_path, TWO]).wait()

    for one in again:
        assert one.result["start"] == 2
        assert one.result["tiers"]["durable"] == [2]
        assert one.result["problems"] == []
    [(sent, found)] = again[process].result["counted"]
    assert sent < 10_000
    assert found > 1_000_000
    assert jaxckpt.verify(tmp_path / "run" / "2").ok


def test_the_program_ends_after_its_upload(run_processes, tmp_path):
    run_processes("tiers:leave_open", args=[tmp_path, TWO], fresh=True, timeout_s=60)

    assert jaxckpt.verify(tmp_path / "run" / "2").ok


def test_steps_are_asked_for_in_all_places(run_processes, tmp_path):
    said = run_processes("tiers:ask", count=2, args=[tmp_path, TWO])

    for one in said:
        assert one.result["tiers"] == {"local": [2], "durable": [2], "waiting": []}
        assert one.result["scrubbed"] == {"2": True}


@pytest.mark.parametrize(
    ("kinds", "wiped", "hosts", "newest"),
    [
        (["split", "count"], 1, TWO, 4),
        (["whole", "count"], 1, TWO, 5),
        (["whole", "count"], 0, TWO, 5),
        (["whole", "count"], 1, [0], 5),
    ],
    ids=["part of 5 is gone", "one disk has all of 5", "the second", "and one process remains"],
)
def test_all_processes_know_the_same_newest_step(
    train, run_processes, tmp_path, kinds, wiped, hosts, newest
):
    """It is the newest that all disks and the directory together have, as for a restore."""
    train(5, args=[kinds, False])
    shutil.rmtree(tmp_path / f"host{wiped}")

    done = run_processes("tiers:choose", count=len(hosts), args=[tmp_path, hosts, kinds])

    for one in done:  # alike, and what a restore takes
        assert one.result == done[0].result
        assert (one.result["latest"], one.result["all"]) == (newest, [2, 4, 5])
        assert one.result["best"] == one.result["restored"] == newest


def test_a_share_is_no_checkpoint_for_others(train, tmp_path):
    """Errors say where the rest is; nothing is allocated for chunks that are too small."""
    train(3)
    share = tmp_path / "host1" / "local" / "share_0"

    with pytest.raises(CheckpointNotFound, match="has what process 1 of 2 held, and lacks"):
        jaxckpt.restore(share / "3", as_numpy=True)
    assert "float32[480000]" in str(jaxckpt.open(share / "3"))
    assert jaxckpt.restore(share / "3", only="count", as_numpy=True) == {"count": 3}
    keys = Keys({"driver": "ocdbt", "base": kvstore(str(share / "3" / "state"))})
    keys.write("count/c", b"")
    with pytest.raises(CorruptCheckpoint, match=r'count/c" has 0 bytes, expected .* or more'):
        jaxckpt.restore(share / "3", only="count", as_numpy=True)


# --- uploads by hand ---------------------------------------------------------------------------


@pytest.fixture(params=["dir", "memory"])
def target(request, tmp_path):
    if request.param == "dir":
        return str(tmp_path / "remote")
    return f"memory://{tmp_path.name}/remote"


def check_uploaded(target, step):
    """It has the values of all processes, and of process 0 what they do not hold together."""
    assert jaxckpt.verify(f"{target}/{step}").ok
    with jaxckpt.CheckpointManager(target, mode="r") as manager:
        state = manager.restore(step=step, as_numpy=True)
        assert [*state["small"]] == [n + step for n in range(64)]
        assert state["count"] == step
        states = [{"process": n, "at": step} for n in TWO]
        assert manager.restore_items(step=step)["data"] == states
        assert manager.metrics(step) == {"n": step}


def test_upload_brings_shares_together(shares, target):
    """In any order; only process 0 commits, and says which parts it lacks."""
    status, said, _ = cli("upload", shares[0], target, "--step", "2")
    assert (status, "upload the parts of processes 1" in said) == (1, True)
    assert not StepIndex(*locate(target)).steps()

    status, said, _ = cli("upload", shares[1], target)

    assert (status, said.count("wrote the part of process 1")) == (0, 2)
    assert not StepIndex(*locate(target)).steps()
    assert [one["lacks"] for one in said_json("upload", shares[0], target)[1]] == [[], []]
    check_uploaded(target, 2)
    check_uploaded(target, 3)
    storage, root = locate(target)
    assert not [file for file in storage.files(root) if "part" in file]
    assert "has every step" in cli("upload", shares[1], target)[1]


def test_a_part_is_sent_once_though_another_step_goes_meanwhile(shares, tmp_path, capsys):
    """Only process 0 commits the step, so that the directory still lacks it."""
    target = tmp_path / "remote"

    def delete(verb, path):
        if f"{target}/3" in path and (shares[1] / "2").exists():
            (shares[1] / "2").rename(tmp_path / "deleted")

    options = {"steps": (), "max_rate": None, "no_job": False, "as_json": False}
    assert not upload.callback(src=str(shares[1]), dst=watched(target, delete), **options)

    said = capsys.readouterr()
    assert said.out.count("wrote the part of process 1") == 1
    assert "step 2 was deleted meanwhile" in said.err


def test_after_a_crash_at_any_change_the_next_upload_of_shares_ends_it(shares, target):
    """Until then the step is either not there, or there and whole; of each process."""
    sources = [StepIndex(LocalStorage(), str(share), quiet=True) for share in shares]
    storage, root = locate(target)
    crashes = [0, 0]
    for victim in TWO:
        for after in count():
            there = StepIndex(storage, f"{root}/{victim}{after}", quiet=True)
            crashing = StepIndex(CrashingStorage(storage, after), there.root, quiet=True)
            try:
                for process in (1, 0):
                    to = crashing if process == victim else there
                    uploading.upload(sources[process], to, 3)
            except SimulatedCrash:
                crashes[victim] += 1
            if crashes[victim] == after:
                break
            if there.steps():
                check_uploaded(f"{target}/{victim}{after}", 3)
            for process in (1, 0):
                uploading.upload(sources[process], there, 3)
            check_uploaded(f"{target}/{victim}{after}", 3)
    assert crashes > [2, 10]


def test_host_arrays_may_differ_between_processes(tmp_path):
    """The directory has those of process 0, whatever the other processes held."""

    def run(processes):
        here = processes.index
        state = {"large": np.full(70_000, here), "small": np.int32(here)}
        with manager_of(tmp_path, here, LocalStorage()) as manager:
            manager.save(1, state)
            manager.wait_until_finished()

    simulate(2, run)

    assert jaxckpt.verify(tmp_path / "run" / "1").ok
    state = jaxckpt.restore(tmp_path / "run" / "1", as_numpy=True)
    assert (state["small"], state["large"].max()) == (0, 0)


def manager_of(
    root, process, storage, *, durable_timeout_s=10, timeout_s=10, every=1, ranks=None, **of_local
):
    """The manager of a simulated process with a disk of its own, all in one storage."""
    keep = ranks or jaxckpt.KeepPolicy()
    disk = PathIn(storage, str(root / f"host{process}"))
    local = jaxckpt.LocalTier(disk, durable_timeout_s=durable_timeout_s, **of_local)
    run, save = PathIn(storage, str(root / "run")), jaxckpt.SavePolicy(every_steps=every)
    return jaxckpt.CheckpointManager(run, local=local, timeout_s=timeout_s, save=save, keep=keep)


LOCAL = {"save": jaxckpt.SavePolicy(), "keep": jaxckpt.KeepPolicy(last=9)}


def test_after_a_call_of_one_process_alone_all_get_an_answer(tmp_path):
    """The call of the one fails, with the name of the other."""

    def run(processes):
        with manager_of(tmp_path, processes.index, LocalStorage(), **LOCAL) as manager:
            manager.save(1, {"a": 1}).result()
        with manager_of(tmp_path, processes.index, LocalStorage(), timeout_s=3) as manager:
            if processes.index == 1:
                with pytest.raises(jaxckpt.CheckpointTimeout, match="process 0"):
                    manager.latest_step()
            processes.within(30).gather("asked", None)
            return manager.latest_step()

    assert simulate(2, run) == [1, 1]


def test_two_threads_get_the_answers_to_their_own_questions(tmp_path):
    """Such as the saving thread, in `on_commit`; the processes come to them in any order."""
    ranks = jaxckpt.KeepPolicy(metric="loss")

    def run(processes):
        with (
            manager_of(tmp_path, processes.index, LocalStorage(), ranks=ranks, **LOCAL) as manager,
            ThreadPoolExecutor(2) as threads,
        ):
            for step, loss in enumerate((5, 1, 9)):
                manager.save(step, {"a": step}, metrics={"loss": loss}).result()
            asked = [manager.best_step, manager.all_steps][:: 1 - 2 * processes.index]
            said = []
            for ask in asked:
                said.append(threads.submit(ask))
                processes.within(30).gather("asks", None)
            return [one.result() for one in said][:: 1 - 2 * processes.index]

    assert simulate(2, run) == [[1, [0, 1, 2]]] * 2


def test_a_step_that_cannot_be_read_may_be_the_best(tmp_path):
    """It is on the disk of another host only. No process gets another step."""
    ranks, is_bad = jaxckpt.KeepPolicy(metric="loss"), []

    def before(verb, path):
        if is_bad and verb == "read" and path.endswith(f"host1/share_0/2/{names.RECORD}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    def opened(processes):
        storage, index = WatchedStorage(LocalStorage(), before), processes.index
        return manager_of(tmp_path, index, storage, every=10, ranks=ranks, **LOCAL)

    def save(processes):
        with opened(processes) as manager:
            for step, loss in ((1, 5), (2, 1)):
                manager.save(step, {"a": step}, metrics={"loss": loss}).result()

    def ask(processes):
        with opened(processes) as manager:
            processes.within(30).gather("opened", None)
            is_bad.append(True)
            with pytest.raises((OSError, ProcessesDisagree), match="which may be the best"):
                manager.best_step()

    simulate(2, save)
    shutil.rmtree(tmp_path / "host0")
    simulate(2, ask)


RANKS = jaxckpt.KeepPolicy(metric="loss")


def save_losses(tmp_path, hosts, losses, **options):
    """Saves steps with these losses in a job on some hosts."""

    def run(processes):
        host = hosts[processes.index]
        with manager_of(tmp_path, host, LocalStorage(), ranks=RANKS, **LOCAL, **options) as manager:
            for step, loss in losses.items():
                manager.save(step, {"a": step}, metrics={"loss": loss}).result()
            manager.wait_until_finished()

    simulate(len(hosts), run)


def failing_disk(part, bad, verb="entries"):
    """A storage that cannot read what has this in its path, while `bad` has something."""

    def before(said, path):
        if bad and said == verb and part in path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    return WatchedStorage(LocalStorage(), before)


@pytest.mark.parametrize("given", [None, {}, {"loss": 9.0}], ids=["None", "none", "others"])
def test_the_metrics_of_process_0_count_on_all_disks(tmp_path, given):
    """They rank the steps, whichever process has which disk later."""

    def run(processes, hosts, losses):
        best = jaxckpt.KeepPolicy(last=1, best=1, metric=lambda numbers: numbers["loss"])
        options = {"every": 100, "ranks": RANKS, **LOCAL, "keep": best}
        with manager_of(tmp_path, hosts[processes.index], LocalStorage(), **options) as manager:
            for step, loss in losses.items():
                metrics = given if processes.index else {"loss": jnp.float32(loss)}
                manager.save(step, {"a": step}, metrics=metrics).result()
            manager.wait_until_finished()
            return manager.best_step(), manager.all_steps(), manager.metrics(1)

    assert (
        simulate(2, partial(run, hosts=[0, 1], losses={1: 0.5, 2: 7, 3: 6}))
        == [(1, [1, 3], {"loss": 0.5})] * 2
    )
    assert (
        simulate(2, partial(run, hosts=[1, 0], losses={4: 8, 5: 7}))
        == [(1, [1, 5], {"loss": 0.5})] * 2
    )


@pytest.mark.parametrize(("size", "counts"), [(9, 0), (1 << 16, 1)], ids=["small", "large"])
def test_the_json_of_process_0_counts_on_all_disks(tmp_path, size, counts):
    """As long as it is small, since it goes through a meeting."""

    def run(processes):
        mine, options = {"of": processes.index, "text": "x" * size}, {"every": 100, **LOCAL}
        with manager_of(tmp_path, processes.index, LocalStorage(), **options) as manager:
            manager.save(1, {"a": 1}, items={"cfg": mine}, custom_metadata=mine).result()
            item = manager.restore_items(items={"cfg": None})["cfg"]
            return item["of"], manager.custom_metadata(1)["of"]

    assert simulate(2, run) == [(0, 0), (counts, counts)]


def test_only_process_0_asks_a_policy_which_steps_it_keeps(tmp_path):
    """Unless it lacks some: the metrics on the other disks may be those of an earlier release."""

    def run(processes):
        asked = set()
        keep = jaxckpt.KeepPolicy(last=1, when=lambda info: asked.add(info.step) or info.step == 2)
        options = {"every": 100, **LOCAL, "keep": keep}
        with manager_of(tmp_path, processes.index, LocalStorage(), **options) as manager:
            for step in range(1, 5):
                manager.save(step, {"a": step}).result()
            manager.wait_until_finished()
            return manager.tiers["local"], sorted(asked)

    assert simulate(2, run) == [([2, 4], [1, 2, 3, 4]), ([2, 4], [])]


@pytest.mark.parametrize(("new", "bad"), [(0, 2), (0, 1), (1, 0)])
def test_damaged_metrics_on_one_disk_hide_no_good_ones(tmp_path, new, bad):
    """Whichever process has which disk; a third disk is new."""
    save_losses(tmp_path, [0, 1, 2], {1: 5, 2: 1, 3: 7}, every=10)
    shutil.rmtree(tmp_path / f"host{new}")
    damaged = tmp_path / f"host{bad}" / "share_0" / "2" / names.METRICS_ITEM / names.METRICS_FILE
    damaged.write_bytes(b'{"loss')

    def ask(processes):
        disk = processes.index, LocalStorage()
        with manager_of(tmp_path, *disk, every=10, ranks=RANKS, **LOCAL) as manager:
            return manager.best_step()

    assert simulate(3, ask) == [2, 2, 2]


@pytest.mark.parametrize("part", ["share_0", "share_0/2"])
@pytest.mark.parametrize("host", TWO)
def test_a_disk_that_cannot_be_read_stops_nobody_whichever_process_has_it(tmp_path, host, part):
    """The directory has all steps."""
    save_losses(tmp_path, TWO, {1: 5, 2: 1, 3: 7})
    bad = []

    def ask(processes):
        disk = failing_disk(f"host{host}/{part}", bad)
        with manager_of(tmp_path, processes.index, disk, ranks=RANKS, **LOCAL) as manager:
            processes.within(30).gather("opened", None)
            bad.append(True)
            return manager.latest_step(), manager.best_step(), manager.all_steps()

    assert simulate(2, ask) == [(3, 2, [1, 2, 3])] * 2


def test_a_step_that_cannot_be_read_may_be_the_newest(tmp_path):
    """It is on the disk of another host only. No process gets an older step."""
    save_losses(tmp_path, TWO, {1: 5, 2: 1}, every=10)
    shutil.rmtree(tmp_path / "host0")
    bad = []

    def ask(processes):
        disk = failing_disk(f"host1/share_0/2/{names.RECORD}", bad, "read")
        with manager_of(tmp_path, processes.index, disk, every=10, **LOCAL) as manager:
            processes.within(30).gather("opened", None)
            bad.append(True)
            with pytest.raises((OSError, ProcessesDisagree), match=os.strerror(errno.EIO)):
                manager.latest_step()

    simulate(2, ask)


@pytest.mark.parametrize("ask", ["latest_step", "best_step", "restore"])
def test_a_disk_that_cannot_be_read_may_have_later_steps_than_an_old_one(tmp_path, ask):
    """The disk of the other host is one of before, which came back."""
    save_losses(tmp_path, TWO, {1: 5, 2: 1}, every=10)
    shutil.copytree(tmp_path / "host1", tmp_path / "old")
    save_losses(tmp_path, TWO, {3: 5, 4: 0.5}, every=10)
    shutil.rmtree(tmp_path / "host1")
    (tmp_path / "old").rename(tmp_path / "host1")
    bad = []

    def run(processes):
        disk = processes.index, failing_disk("host0/share_0", bad)
        with manager_of(tmp_path, *disk, every=10, ranks=RANKS, **LOCAL) as manager:
            processes.within(30).gather("opened", None)
            bad.append(True)
            with pytest.raises(OSError, match="no other has step 4, the newest"):
                getattr(manager, ask)()

    simulate(2, run)


def test_a_step_that_the_run_left_ranks_no_step_of_its_number(tmp_path):
    """A peer has it; the later save is on this disk, in the share of a process of another job."""
    save_losses(tmp_path, TWO, {1: 5, 2: 4, 3: 0.1, 5: 0.2}, every=2, peers=[NOWHERE])
    save_losses(tmp_path, [2, 3], {3: 9, 4: 3}, every=2, peers=[NOWHERE])

    with served(tmp_path / "host0") as url:
        options = {"every": 2, "ranks": RANKS, "peers": [url], **LOCAL}
        with manager_of(tmp_path, 2, LocalStorage(), **options) as manager:
            assert manager.best_step() == 4
            assert manager.all_steps() == [1, 2, 3, 4]


@pytest.mark.parametrize("other", [1, "latest"])
def test_processes_that_ask_for_different_steps_hear_of_it(tmp_path, other):
    """None of them waits for the other."""
    save_losses(tmp_path, TWO, {1: 5, 2: 1}, every=10)

    def ask(processes):
        disk = processes.index, LocalStorage()
        step = "best" if processes.index == 0 else other
        with (
            manager_of(tmp_path, *disk, every=10, ranks=RANKS, **LOCAL) as manager,
            pytest.raises((ProcessesDisagree, ValueError)[processes.index], match="step best"),
        ):
            manager.restore(step=step)

    simulate(2, ask)


@pytest.mark.parametrize("what", ["delete", "scrub"])
def test_what_one_step_lost_takes_no_other_local_step_along(tmp_path, what):
    """The run goes on from the newest step that all disks have, which the directory lacks.

    It was deleted by hand, or was damaged on the disk of one process, which alone knows of it.
    """

    def run(processes):
        disk = tmp_path / f"host{processes.index}" / "share_0"
        with manager_of(tmp_path, processes.index, LocalStorage(), every=10, **LOCAL) as manager:
            for step in (10, 11, 12, 13):
                manager.save(step, {"a": np.full(70_000, step)}).result()
            manager.wait_until_finished()
            if what == "delete":
                manager.delete(13)
            else:
                if processes.index == 1:
                    damage(disk / "12")
                processes.within(30).gather("damaged", None)
                manager.scrub()
            manager.save(14, {"a": np.full(70_000, 14)})
            manager.wait_until_finished()
            return manager.tiers["local"]

    found = simulate(2, run)

    assert [one[-1] for one in found] == [14, 14]
    assert [{10, 11} - {*one} for one in found] == [set(), set()]


@pytest.mark.parametrize("who", [[0], [0, 1]], ids=str)
def test_metadata_that_is_no_json_fails_one_save_in_all_processes(tmp_path, who):
    """The next one is saved: no process has left the meeting of the first."""

    def run(processes):
        with manager_of(tmp_path, processes.index, LocalStorage(), **LOCAL) as manager:
            bad = {"a": object()} if processes.index in who else {"a": 1}
            with pytest.raises((TypeError, ProcessesDisagree)):
                manager.save(1, {"a": 1}, custom_metadata=bad).result()
            manager.save(2, {"a": 2}, custom_metadata={"a": 1}).result()
            return manager.all_steps()

    assert simulate(2, run) == [[2]] * 2


@pytest.mark.parametrize("what", ["delete", "scrub"])
def test_what_is_saved_after_the_newest_step_is_gone_is_of_the_run(tmp_path, what):
    """No step has the number before it, and the directory has an earlier step.

    It was deleted by hand, or set aside on all disks.
    """

    def run(processes, goes=False, saved=()):
        disk = tmp_path / f"host{processes.index}" / "share_0"
        with manager_of(tmp_path, processes.index, LocalStorage(), every=20, **LOCAL) as manager:
            steps = manager.all_steps()
            if goes and what == "scrub":
                manager.wait_until_finished()  # it is uploaded
                for path in (disk, tmp_path / "run")[: 2 - processes.index]:
                    damage(path / "35")
                processes.within(30).gather("damaged", None)
                manager.scrub()
            elif goes:
                manager.delete(35)
            for step in saved:
                manager.save(step, {"a": np.full(70_000, step)}).result()
            manager.wait_until_finished()
            return steps, [text for text in manager.problems if "earlier life" in text]

    simulate(2, partial(run, saved=[10, 20, 35]))
    simulate(2, partial(run, goes=True, saved=[45]))

    assert simulate(2, run) == [([10, 20, 45], [])] * 2


@pytest.mark.parametrize("is_begun", [False, True])
def test_processes_in_another_order_do_not_take_a_step_for_uploaded(tmp_path, is_begun):
    """Process 0 lacks the part with which the upload begins, and no other may write there."""
    hosts, found = [0, 1], {}

    def run(processes):
        with manager_of(tmp_path, hosts[processes.index], LocalStorage()) as manager:
            if hosts == [0, 1]:
                manager.save(1, {"a": 1})
                manager.wait_until_finished()
                return []
            manager.wait_until_finished()
            found[processes.index] = [p for p in manager.problems if "not uploaded" in p]
            processes.within(30).gather("all have looked", None)
            manager.save(2, {"a": 2})
            manager.wait_until_finished()
            return manager.tiers["durable"]

    simulate(2, run)
    begun = commit_of(LocalStorage(), f"{tmp_path}/run/1").work(
        uploading.upload_token(find(LocalStorage(), f"{tmp_path}/host0/share_0/1"))
    )
    shutil.rmtree(tmp_path / "run" / "1")
    if is_begun:  # by a job that was killed
        Path(begun.path).mkdir()
        Path(begun.path, names.WRITER).write_text(begun.path[-16:])
    hosts.reverse()

    assert simulate(2, run) == [[2], [2]]
    [said] = found[0]
    assert "saved by other processes" in said
    assert "jaxckpt upload" in said


@pytest.mark.parametrize("item", ["more", None])
def test_all_hear_of_a_deletion_that_failed_on_one_disk(tmp_path, item):
    """A reader of that host holds the step. It is not taken for deleted, and goes the next time."""

    def run(processes):
        with manager_of(tmp_path, processes.index, LocalStorage(), timeout_s=60) as manager:
            manager.save(1, {"a": 1})
            manager.save(2, {"a": 1}, items={"more": {"a": 1}}).durable()
            lease = manager._tiers.local.leases.protect(2)
            with lease if processes.index else contextlib.nullcontext():
                with pytest.raises((ValueError, ProcessesDisagree), match="reader holds"):
                    manager.delete(2, item=item)
                processes.within(60).gather("tried", None)
            with contextlib.suppress(CheckpointNotFound):
                manager.delete(2, item=item)
            return manager.tiers["local"], sorted(manager.restore_items())

    assert simulate(2, run) == [([1, 2] if item else [1], ["state"])] * 2


@pytest.mark.parametrize("before", [[0], [2, 1], [0, 0, 1, 1]], ids=str)
def test_a_deletion_reaches_all_roots_on_all_disks(tmp_path, before):
    """Also those where another number of processes saved. Then none has the step that was there."""
    save_losses(tmp_path, before, {1: 5, 2: 1}, every=10)

    def run(processes):
        with manager_of(tmp_path, processes.index, LocalStorage(), **LOCAL) as manager:
            steps = manager.all_steps()
            manager.delete(2)
            with pytest.raises(CheckpointNotFound):
                manager.delete(2)
            return steps, manager.all_steps()

    assert simulate(2, run) == [([1, 2], [1])] * 2
    assert [*tmp_path.glob("host[01]/**/2")] == []


def test_a_pin_is_on_the_disk_of_each_host(tmp_path):
    """Also of a step that is on one of them only, and which process 0 does not have."""

    def run(processes):
        with manager_of(tmp_path, processes.index, LocalStorage(), timeout_s=60) as manager:
            for step in (1, 2):
                manager.save(step, {"a": 1}).durable()
            manager.wait_until_finished()
            local = manager._tiers.local
            if processes.index == 0:
                shutil.rmtree(local.index.path(2))
                shutil.rmtree(tmp_path / "run" / "2")
            processes.within(60).gather("it is gone", None)
            for root in manager._roots:
                root.index.forget(2)
            manager.pin(1)
            manager.pin(2)
            with pytest.raises(CheckpointNotFound):
                manager.pin(3)
            pinned = [n for n in (1, 2) if local.has(n) and one_step.is_pinned(local.index, n)]
            manager.unpin(1)
            return pinned, one_step.is_pinned(local.index, 1)

    assert simulate(2, run) == [([1], False), ([1, 2], False)]


def test_a_full_disk_keeps_a_step_until_all_parts_are_committed(tmp_path, free_space):
    """A process that has sent its part does not take the step for durable."""
    slow, full = Slow(names.RECORD, "/run/"), []
    free_space(lambda path: 0 if any(host in path for host in full) else None)

    def run(processes):
        with manager_of(tmp_path, processes.index, slow) as manager:
            manager.save(1, {"a": 1}).result()
            manager._saver.wait_for_all()
            if processes.index == 1:
                worker = manager._tiers.uploader.worker
                worker.wait(worker.under_way(), 30)
                full.append("host1")
            handle = manager.save(2, {"a": 2})
            found = [file.exists() for file in steps]
            processes.within(30).gather("all have looked", None)
            slow.goes_on.set()
            handle.result()
            return found

    steps = [tmp_path / "host1" / "share_0" / "1", tmp_path / "run" / "1"]
    assert simulate(2, run) == [[True, False]] * 2


def test_a_full_disk_keeps_the_newest_step_of_all_disks(tmp_path, free_space):
    """Not only a newer one that another process could not commit."""
    failing, full = Failing("nothing", "/host0/"), []
    free_space(lambda path: 0 if any(host in path for host in full) else None)

    def run(processes):
        with manager_of(tmp_path, processes.index, failing, every=10, **LOCAL) as manager:
            for step in (10, 11, 12):
                manager.save(step, {"a": step}).result()
            manager.wait_until_finished()
            processes.within(30).gather("saved", None)
            failing.of_path = (names.RECORD, "/host0/")
            with pytest.raises((SaveFailed, ProcessesDisagree)):
                manager.save(13, {"a": 13}).result()
            processes.within(30).gather("failed", None)
            failing.of_path = ("nothing", "/host0/")
            full.append("host1")
            processes.within(30).gather("full", None)
            handle = manager.save(14, {"a": 14})
            found = manager.tiers["local"]
            handle.result()
            return found

    assert simulate(2, run) == [[10, 11, 12], [12, 13]]


@pytest.mark.parametrize("at", [names.WRITER, names.RECORD])
def test_a_step_saved_again_before_its_upload_is_uploaded(tmp_path, at):
    """Each process sends its part of the new save, also one that has sent that of the old."""
    failing = Failing("nothing", "/run/")

    def run(processes):
        with manager_of(tmp_path, processes.index, failing, durable_timeout_s=20) as manager:
            manager.save(1, {"a": np.full(70_000, 1)})
            manager.wait_until_finished()
            processes.within(30).gather("saved", None)
            failing.of_path = (at, "/run/")
            manager.save(2, {"a": np.full(70_000, 2)})
            manager._saver.wait_for_all()
            wait_until(lambda: failing.failed)
            processes.within(30).gather("failed", None)
            if processes.index == 0:
                damage(tmp_path / "host0" / "share_0" / "2")
            processes.within(30).gather("damaged", None)
            manager.restore(as_numpy=True)
            assert manager.restored_step == 1
            manager.save(2, {"a": np.full(70_000, 3)})
            manager._saver.wait_for_all()
            processes.within(30).gather("saved again", None)
            failing.of_path = ("nothing", "/run/")
            manager.wait_until_finished()

    simulate(2, run)

    assert jaxckpt.restore(tmp_path / "run" / "2", as_numpy=True)["a"][0] == 3


class Slow(_Relay):
    """A place that waits with the first write of a file until `goes_on` is set."""

    def __init__(self, *of_path):
        super().__init__(LocalStorage())
        self.of_path, self.goes_on = of_path, threading.Event()

    def _before(self, verb, path, data=b""):
        if verb in ("write", "create") and all(part in path for part in self.of_path):
            self.goes_on.wait(30)


def test_a_process_that_lost_its_record_says_so(tmp_path):
    """Process 0 does not wait for its part until the time limit."""
    slow = Slow(names.WRITER, "/run/")

    def run(processes):
        with manager_of(tmp_path, processes.index, slow, durable_timeout_s=60) as manager:
            manager.save(1, {"a": 1})
            manager._saver.wait_for_all()
            if processes.index == 1:
                (tmp_path / "host1" / "share_0" / "1" / names.RECORD).unlink()
                slow.goes_on.set()
            with pytest.raises(ProcessesDisagree, match="process 1: CorruptCheckpoint") as caught:
                manager.wait_until_finished()
            return names.RECORD in str(caught.value)

    assert simulate(2, run) == [True, True]


def test_a_process_that_never_could_read_its_record_says_so(tmp_path):
    """It was damaged just after the commit, before the process heard of the upload."""
    slow = Slow(names.WRITER, "/run/")

    def run(processes):
        record = tmp_path / "host1" / "share_0" / "1" / names.RECORD

        def lose(_):
            record.unlink()
            slow.goes_on.set()

        with manager_of(tmp_path, processes.index, slow, durable_timeout_s=60) as manager:
            handle = manager.save(1, {"a": 1})
            if processes.index == 1:
                handle.on_end(lose)
            manager._saver.wait_for_all()
            with pytest.raises(ProcessesDisagree, match="process 1: CorruptCheckpoint") as caught:
                manager.wait_until_finished()
            return names.RECORD in str(caught.value)

    assert simulate(2, run) == [True, True]


def test_a_store_that_failed_in_one_process_ends_no_later_upload(tmp_path):
    """Process 0 gives up first, then the other; in the directory is nothing like a refusal."""
    failing = Failing("part_1", "/run/")
    failing.spared = "problem"  # a refusal

    def run(processes):
        limits = {"durable_timeout_s": 0.5 if processes.index else 0.1}
        manager = manager_of(tmp_path, processes.index, failing, **limits)
        manager.save(1, {"a": 1})
        manager._saver.wait_for_all()
        worker = manager._tiers.uploader.worker
        worker.wait(worker.under_way(), 30)
        with contextlib.suppress(CheckpointTimeout):  # in process 0
            manager.close()

    simulate(2, run)

    assert [*tmp_path.glob("run/1.*")]
    assert not [*tmp_path.glob("run/1.*/*part_1*")]


class Failing(Slow):
    """A place that is full when a file is written, unless that has some text."""

    spared = "never"
    failed = False

    def _before(self, verb, path, data=b""):
        is_file = verb in ("write", "create") and all(part in path for part in self.of_path)
        if is_file and self.spared.encode() not in data:
            self.failed = True
            raise OSError(errno.ENOSPC, "no room", path)


def test_a_restore_is_alike_in_all_processes_while_a_save_ends(tmp_path):
    """The saving thread of one has not recorded the commit yet."""

    def run(processes):
        with manager_of(tmp_path, processes.index, LocalStorage(), timeout_s=5) as manager:
            manager.save(1, {"a": 1}).result()
            manager.save(2, {"a": 2}).result()
            if processes.index == 1:
                position = manager._saver.position
                position.floor = position.base = 1
            return manager.restore({"a": 0}), manager.save(3, {"a": 3}).result()

    assert [one["a"] for one, _ in simulate(2, run)] == [2, 2]


def test_a_job_begins_anew_after_others_have_deleted_all_steps(tmp_path):
    """Its saves may have numbers below those that were there when it opened the run."""

    def run(processes):
        with manager_of(tmp_path, processes.index, LocalStorage()) as manager:
            for step in (10, 20):
                manager.save(step, {"a": step}).result()
            manager.wait_until_finished()
        with manager_of(tmp_path, processes.index, LocalStorage()) as manager:
            for path in (tmp_path / f"host{processes.index}/share_0", tmp_path / "run"):
                for step in path.glob("[0-9]*"):
                    shutil.rmtree(step, ignore_errors=True)
            processes.within(30).gather("deleted", None)
            assert manager.restore_or(lambda: {"a": 0}) == ({"a": 0}, 0)
            manager.save(15, {"a": 15}).result()
            return manager.all_steps()

    assert simulate(2, run) == [[15], [15]]


@pytest.mark.parametrize("force", [False, True], ids=["due", "forced"])
@pytest.mark.parametrize("left", ["", "run", "host1"])
def test_a_job_goes_back_by_number_after_others_have_deleted_later_steps(tmp_path, left, force):
    """If they are nowhere, their numbers are saved again; if one is in any place, none is."""

    def run(processes):
        with manager_of(tmp_path, processes.index, LocalStorage()) as manager:
            for step in (10, 20, 30):
                manager.save(step, {"a": step}).result()
            manager.wait_until_finished()
        with manager_of(tmp_path, processes.index, LocalStorage()) as manager:
            for place in {"run", "host0", "host1"} - {left}:
                for step in [*tmp_path.glob(f"{place}/[23]0"), *tmp_path.glob(f"{place}/*/[23]0")]:
                    shutil.rmtree(step, ignore_errors=True)
            processes.within(30).gather("deleted", None)
            assert manager.restore({"a": 0}, step=10) == {"a": 10}
            for step in (15, 20):
                try:
                    manager.save(step, {"a": step}, force=force).result()
                except ValueError as error:
                    return str(error)
            return manager.all_steps()

    for said in simulate(2, run):
        assert "older than step 30" in said if left else said == [10, 15, 20]


@contextlib.contextmanager
def disk_away(processes, disk):
    """While it lasts, the disk of the second of two processes is not mounted."""
    elsewhere = disk.with_name("elsewhere")

    def meet_and(do):
        processes.within(30).gather("before", None)
        if processes.index == 1:
            do()
        processes.within(30).gather("after", None)

    meet_and(lambda: (disk.rename(elsewhere), disk.mkdir()))
    yield
    meet_and(lambda: (shutil.rmtree(disk), elsewhere.rename(disk)))


def test_a_save_tried_again_while_a_disk_is_away_costs_no_local_step(tmp_path):
    """It was never there, so no other job has deleted it."""

    def run(processes):
        with manager_of(tmp_path, processes.index, LocalStorage(), every=10, **LOCAL) as manager:
            for step in (10, 11, 12):
                manager.save(step, {"a": step}).result()
            manager.wait_until_finished()
            with disk_away(processes, tmp_path / "host1"):
                for _ in TWO:
                    with pytest.raises((SaveFailed, ProcessesDisagree), match="may be unmounted"):
                        manager.save(13, {"a": 13}).result()
            manager.save(14, {"a": 14}).result()
            return manager.all_steps()

    assert simulate(2, run) == [[10, 11, 12, 14]] * 2


@pytest.mark.parametrize("ask", ["restore_or", "restore", "latest_step", "delete"])
def test_what_a_disk_that_is_away_has_is_not_taken_for_gone(tmp_path, ask):
    """No older step is restored, after which the newer ones would go once the disk is back."""
    arguments = {"restore_or": [lambda: {"a": 0}], "restore": [{"a": 0}], "delete": [11]}

    def run(processes):
        with manager_of(tmp_path, processes.index, LocalStorage(), every=10, **LOCAL) as manager:
            for step in (10, 11, 12):
                manager.save(step, {"a": step}).result()
            manager.wait_until_finished()
            with (
                disk_away(processes, tmp_path / "host1"),
                pytest.raises((StoreError, ProcessesDisagree), match="may be unmounted"),
            ):
                getattr(manager, ask)(*arguments.get(ask, []))
            manager.save(14, {"a": 14}).result()
            return manager.all_steps()

    assert simulate(2, run) == [[10, 11, 12, 14]] * 2


def test_a_step_that_one_process_could_not_commit_is_saved_again(tmp_path):
    """Though another process has committed its part."""
    failing = Failing(names.RECORD, "/host1/")

    def run(processes):
        with manager_of(tmp_path, processes.index, failing) as manager:
            with pytest.raises((SaveFailed, ProcessesDisagree)):
                manager.save(1, {"a": 1}).result()
            processes.within(10).gather("failed", None)
            failing.of_path = ["nowhere"]
            manager.save(1, {"a": 1}).result()
            return manager.save(1, {"a": 1})

    assert simulate(2, run) == [None, None]
    assert all(jaxckpt.verify(tmp_path / f"host{n}" / "share_0" / "1").ok for n in TWO)


def test_hosts_share_what_has_not_changed(run_processes, tmp_path):
    """In the directory as on their disks, with the last step but one; a store copies it."""
    done = run_processes("tiers:train_unchanged", args=[tmp_path, TWO, 4])

    assert [one.result for one in done] == [[], []]
    run, to = tmp_path / "run", StepIndex(*locate(f"memory://{tmp_path.name}/run"))
    assert [inodes(run / step) == inodes(run / "4") for step in "123"] == [False, True, False]
    assert inodes(run / "1") == inodes(run / "3")
    sent, trusted = [], [{}, {}]
    for step in (1, 2, 3, 4):
        for process in (1, 0):
            share = tmp_path / f"host{process}" / "local" / "share_0"
            source = StepIndex(LocalStorage(), str(share))
            one = uploading.upload(source, to, step, trusted=trusted[process])
            sent.append((one.sent_bytes > 1_000_000, one.found_bytes > 1_000_000))
    # Neighbours on a disk share no file, so the first two are sent.
    assert sent == [(True, False)] * 4 + [(False, True)] * 4
    assert all(jaxckpt.verify(to.path(step)).ok for step in (1, 2, 3, 4))
    assert all(jaxckpt.verify(run / str(step)).ok for step in (1, 2, 3, 4))


def data_files(step):
    """The data files of a step of both processes, without the file of its database's nodes."""
    found = sorted((step / "state" / "d").iterdir(), key=size_of)[1:]
    assert len(found) >= 2
    return found


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def inodes(step):
    return {path.stat().st_ino for path in data_files(step)}


def test_a_part_that_will_not_come_ends_the_upload(shares, target):
    """Process 0 does not wait for it, and names the process and its problem."""
    source, there = StepIndex(LocalStorage(), str(shares[0])), StepIndex(*locate(target))
    token = uploading.upload_token(find(LocalStorage(), str(shares[0] / "3")))
    work = commit_of(there.storage, there.path(3)).work(token)
    refuse(there.storage, work, 1, CorruptCheckpoint("its disk is bad"))

    with pytest.raises(ProcessesDisagree, match="process 1: CorruptCheckpoint: its disk is bad"):
        uploading.upload(source, there, 3, wait_s=60)

    assert there.steps() == []


# --- where each process saves ------------------------------------------------------------------


def place(tmp_path, hosts, machines, storage=None):
    """Where each process saves on the disk of its host, without the directory of the test."""
    storage = storage or LocalStorage()

    def find(processes):
        host, machine = hosts[processes.index], machines[processes.index]
        root = f"{tmp_path}/{host}"
        share = share_on_disk(storage, root, processes.within(30), machine=machine)
        return f"{host}/{share}".rstrip("/")

    return simulate(len(hosts), find)


def test_disks_of_one_image_are_told_apart(tmp_path):
    """They have the same file by which disks are told apart; the machines differ."""
    for host in ("a", "b"):
        (tmp_path / host).mkdir()
        (tmp_path / host / names.DISK).write_text("0" * 32)

    assert place(tmp_path, "ab", ["boot 1", "boot 2"]) == ["a/share_0", "b/share_1"]
    assert place(tmp_path, "aab", ["boot 1", "boot 1", "boot 2"]) == [
        *("a/share_0", "a/share_1", "b/share_2")
    ]


def test_processes_that_see_one_directory_save_there_together(tmp_path):
    """On one machine, or on several with a file system that has a server."""
    nfs = LimitedStorage(LocalStorage(), Mount("nfs4", "/mnt/nfs"))

    assert place(tmp_path, "aa", ["boot 1", "boot 1"]) == ["a", "a"]
    assert place(tmp_path, "aa", ["boot 1", "boot 2"], nfs) == ["a", "a"]
    assert place(tmp_path, "ab", ["boot 1", "boot 1"]) == ["a/share_0", "b/share_0"]


# --- what is decided -------------------------------------------------------------------------

disks = st.lists(
    st.dictionaries(st.integers(0, 6), st.sampled_from("ab"), max_size=4), min_size=1, max_size=4
)


@given(disks, st.dictionaries(st.integers(0, 6), st.sampled_from("ab")), disks)
def test_only_steps_that_may_be_whole_are_tried(disks, directory, others):
    """Of one save: that of every process, or of any place; and no such step is left out."""
    copies = over_disks(disks, directory, others)

    for copy in copies:
        saves = {disk.get(copy.step) for disk in disks}
        seen = (saves | {disk.get(copy.step) for disk in others}) - {None}
        if copy.root == 1:
            assert copy.step in directory
        elif copy.is_united:
            assert seen
            assert directory.get(copy.step) in {*seen, None}
        else:
            assert len(saves) == 1
            assert directory.get(copy.step) in {*saves, None}
    tried = {
        step
        for step in range(7)
        if step in directory or any(step in disk for disk in (*disks, *others))
    }
    assert {copy.step for copy in copies} == tried
    order = [(-copy.step, copy.root, copy.is_united) for copy in copies]
    assert order == sorted(order)


@given(array_specs())
def test_a_share_has_all_chunks_of_its_shards(case):
    """Each once: as the process's part, or beside it."""
    arrays, count = case
    for process in range(count):
        plan = plan_save(arrays, process=process, holds=True)
        assert plan.writes == plan_save(arrays, process=process).writes
        chunks = [(write.array, write.box) for write in (*plan.writes, *plan.held.writes)]
        assert len(chunks) == len({*chunks})
        for i, array in enumerate(arrays):
            sizes = [box.size for j, box in chunks if j == i]
            if array.placement is None:
                wanted = [box_size(array.shape)]
            else:
                wanted = [box.size for box in held(array.placement, process)]
            assert sum(sizes) == sum(wanted)


def box_size(shape):
    size = 1
    for n in shape:
        size *= n
    return size
