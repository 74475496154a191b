"""Several real processes save and restore together, and learn of each other's failures."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import CheckpointTimeout, ProcessesDisagree
from jaxckpt._save.snapshot import _warn_once
from jaxckpt.format import names
from jaxckpt.storage import LocalStorage, kvstore
from jaxckpt.storage._arrays import Reader
from jaxckpt.storage._values import find_values
from jaxckpt.testing import simulate
from tests.multiprocess import Job
from tests.waiting import wait_until
from tests.workers import saves as worker

pytestmark = pytest.mark.multihost


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The same tree, saved by 1, 2 and 4 processes; each job restored all three."""
    root = tmp_path_factory.mktemp("shared")
    paths = {count: str(root / f"by{count}") for count in (1, 2, 4)}
    worker.save_it(paths[1])
    planned = {}

    def job(count, others):
        args = [paths[count], [paths[other] for other in others]]
        devices = 8 // count
        return Job(
            "saves:share", count=count, devices_per_process=devices, args=args, fresh=count == 2
        )

    with job(2, [1, 4]) as two, job(4, [1, 2]) as four:
        for running, count in ((two, 2), (four, 4)):
            for index in range(count):
                running.wait_for(index, "saved")
        for running, count in ((two, 2), (four, 4)):
            running.release("restore")
            planned[count] = running.wait()[0].result
    return paths, planned


@pytest.mark.parametrize("count", [1, 2, 4])
def test_any_number_of_processes_restores_what_any_number_saved(shared, count):
    """1, 2 and 4 processes save; each restores all, on other meshes, onto other specs."""
    paths, _ = shared

    worker.restores(paths[count])
    got = jaxckpt.restore(paths[count], as_numpy=True)
    assert all(
        np.array_equal(got["arrays"][name], value) for name, (value, _) in worker.expected().items()
    )
    assert jaxckpt.verify(paths[count]).ok


def test_sixteen_devices_restore_what_eight_saved(shared, run_processes):
    """Having more devices than shards is fine."""
    paths, _ = shared

    run_processes(
        "saves:restore_sixteen", count=1, devices_per_process=16, args=[list(paths.values())]
    )


@pytest.mark.parametrize("count", [2, 4])
def test_replicas_share_the_writing(shared, count):
    """Each process writes as many bytes as the others, give or take a small leaf."""
    paths, planned = shared
    state = Path(paths[count], names.STATE_ITEM)
    written = sum(file.stat().st_size for file in (state / "d").iterdir())

    assert max(planned[count]) - min(planned[count]) < 64 << 10
    # Checksums and keys come on top, and process 0 has the metadata.
    assert sum(planned[count]) <= written < sum(planned[count]) + count * (128 << 10)


@pytest.mark.parametrize("count", [2, 4])
def test_each_chunk_has_one_writer(shared, count):
    """One database has all of them, in files of their writers, and nothing else is left."""
    paths, _ = shared
    state = Path(paths[count], names.STATE_ITEM)

    places = find_values(LocalStorage(), str(state))

    found = Reader(kvstore(str(state)), database=True).keys()
    assert found == sorted(places)
    large = {place.file for key, place in places.items() if key.startswith("arrays.large/c/")}
    assert len(large) == count  # cut into equal slices
    assert not [*state.glob("ocdbt.*"), *state.glob("_jaxckpt.part*")]


@pytest.fixture(scope="module")
def told(run_processes, tmp_path_factory):
    """Returns the errors of three processes in each case of `disagree`, and their directory."""
    root = tmp_path_factory.mktemp("told")
    done = run_processes(
        "saves:disagree", count=3, devices_per_process=2, args=[root], timeout_s=60
    )
    return root, [process.result for process in done]


@pytest.mark.parametrize(
    ("case", "at_1", "text"),
    [
        ("structure", "ProcessesDisagree", "another tree"),
        ("text leaf", "ProcessesDisagree", "another tree"),
        ("shape", "ProcessesDisagree", "other shapes"),
        ("compression", "ProcessesDisagree", "or compression than process 0"),
        ("path", "ProcessesDisagree", "different path"),
        ("leaf", "UnsupportedLeaf", "object"),
        ("argument", "UnsupportedFormat", "hdfs://"),
        ("full", "SaveFailed", "No space left"),
        ("no directory", "SaveFailed", "/dev/null"),
        ("async", "ProcessesDisagree", "another tree"),
    ],
)
def test_all_hear_what_process_1_did(told, case, at_1, text):
    """Nobody returns from a save that another could not make; the others name it."""
    _, results = told
    said = [result[case] for result in results]

    assert [word["type"] for word in said] == ["ProcessesDisagree", at_1, "ProcessesDisagree"]
    assert all(text in word["text"] for word in said)
    for word in said:
        if word["type"] == "ProcessesDisagree":
            assert list(word["failures"]) == ["1"]  # a number, but through JSON


def test_an_error_on_all_is_the_same_on_all(told):
    """No process hears of the others what it knows itself."""
    _, results = told

    assert [result["all leaves"]["type"] for result in results] == ["UnsupportedLeaf"] * 3


@pytest.mark.parametrize(
    ("case", "at_0", "text"),
    [
        ("begin", "SaveFailed", "No space left"),
        ("commit", "SaveFailed", "No space left"),
        ("not shared", "SaveFailed", "file system that all hosts share"),
    ],
)
def test_all_hear_what_failed_on_process_0(told, case, at_0, text):
    """Process 0 raises the error with its cause, the others say that it did."""
    _, results = told
    said = [result[case] for result in results]

    assert [word["type"] for word in said] == [at_0, "ProcessesDisagree", "ProcessesDisagree"]
    assert all(text in word["text"] for word in said)
    assert [list(word["failures"]) for word in said[1:]] == [["0"], ["0"]]


def test_what_is_at_the_path_is_the_same_error_on_all(told):
    """StepExists, though only process 0 looked."""
    _, results = told

    assert [result["exists"]["type"] for result in results] == ["StepExists"] * 3


@pytest.mark.parametrize("away", [False, True])
def test_an_array_on_the_devices_of_each_process_is_alike_in_all(tmp_path, request, away):
    """However it is sharded there: else one process would get the values of another, as of keys."""
    if away:
        request.getfixturevalue("accelerators")
    saves = jaxckpt.SavePolicy(check_replicas=1)

    def tree(processes, factor=1):
        mesh = Mesh(np.array(jax.devices()).reshape(2, 4)[processes.index], ("x",))
        value = np.arange(32.0).astype(np.float32) * factor
        return {
            name: jax.device_put(value, NamedSharding(mesh, spec))
            for name, spec in {"rows": P("x"), "whole": P()}.items()
        }

    def run(processes):
        with jaxckpt.CheckpointManager(tmp_path / "run", save=saves) as manager:
            for step in range(3):
                manager.save(step, tree(processes))
            return manager.problems

    def save_apart(processes):
        with pytest.raises(ProcessesDisagree, match="1: has other values of rows, whole"):
            jaxckpt.save(tmp_path / "apart", tree(processes, factor=processes.index))

    assert simulate(2, run) == [[], []]
    simulate(2, save_apart)

    assert not (tmp_path / "apart").exists()
    found = jaxckpt.restore(tmp_path / "run", as_numpy=True)
    assert all(np.array_equal(found[name], np.arange(32.0)) for name in ("rows", "whole"))


@pytest.mark.parametrize("value", [1, 1.5, np.arange(3)], ids=str)
def test_a_value_of_the_host_that_differs_is_told(tmp_path, caplog, value):
    """Process 0 writes its own; it may be a time, or what another process needs."""
    _warn_once.cache_clear()

    def save(processes):
        jaxckpt.save(tmp_path / "a", {"n": {"mine": value + processes.index, "same": value}})

    simulate(3, save)

    (told,) = caplog.messages  # once, however many processes and saves there are
    assert told.startswith("a process has other values of n/mine than process 0")
    assert np.array_equal(jaxckpt.restore(tmp_path / "a")["n"]["mine"], value)


def test_a_wait_for_a_save_names_the_process_that_is_missing(tmp_path):
    """Although the save goes on, and ends well once that process takes part."""

    def run(processes):
        if processes.index == 0:
            handle = jaxckpt.save_async(tmp_path / "a", {"n": 1})
            wait_until(lambda: handle.waits_for)
            with pytest.raises(CheckpointTimeout, match=r"waits for processes \[1\]") as caught:
                handle.result(timeout_s=0.0)
            assert caught.value.missing == (1,)
        processes.gather("test", None)
        if processes.index == 1:
            handle = jaxckpt.save_async(tmp_path / "a", {"n": 1})
        handle.result()

    simulate(2, run)


def test_an_array_that_process_0_cannot_see_is_refused(told):
    """It would look like a value of the host to its only process, and be written by none."""
    _, results = told
    kinds = [result["on one"]["type"] for result in results]

    assert kinds == ["UnsupportedLeaf", "ProcessesDisagree", "UnsupportedLeaf"] or kinds == [
        "UnsupportedLeaf",
        "UnsupportedLeaf",
        "ProcessesDisagree",
    ]


def test_an_array_of_process_0_alone_is_refused(told):
    """Process 0 takes it for its copy of a value that each process has."""
    _, results = told
    kinds = [result["on 0"]["type"] for result in results]

    assert kinds == ["ProcessesDisagree", "UnsupportedLeaf", "UnsupportedLeaf"]
    assert "only on devices of process 0" in results[0]["on 0"]["text"]


def test_keys_restore_whose_sharding_is_written_in_short(run_processes, tmp_path):
    """Such as `P()` for an array of them, which jax itself writes as `P(None)`."""
    done = run_processes("saves:restore_keys", count=2, args=[tmp_path / "a"])

    assert [one.result for one in done] == [True, True]


@pytest.mark.parametrize(("case", "kind"), [("restore", "TreeMismatch"), ("like", "TypeError")])
def test_all_hear_of_a_failed_restore(told, case, kind):
    """No process continues with a tree that another process could not restore."""
    _, results = told

    assert [result[case]["type"] for result in results] == [
        "ProcessesDisagree",
        kind,
        "ProcessesDisagree",
    ]


def test_all_restore_the_step_that_none_finds_damaged(run_processes, tmp_path, mesh):
    """Damage in the metadata, and in the part of one process; else all raise."""
    value = np.ones(worker.WIDE, np.float32)
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    for run, step in (("a", 1), ("a", 2), ("a", 3), ("b", 1)):
        array = jax.device_put(value * step, split)
        jaxckpt.save(tmp_path / run / str(step), {"w": array})
    for name in ("a/3/state/_METADATA", "b/1/state/_METADATA"):
        flip(tmp_path / name, 0.5)
    flip(max((tmp_path / "a/2/state/d").iterdir(), key=lambda file: file.stat().st_size), 0.9)

    paths = [str(tmp_path / name) for name in ("a", "b", "a/2")]
    done = run_processes("saves:restore_damaged", devices_per_process=2, args=[paths])

    (at_0, warned_0), (at_1, warned_1) = [process.result for process in done]
    assert at_0[paths[0]] == at_1[paths[0]] == 1
    assert len(warned_0) == len(warned_1) == 2
    assert "process 1: CorruptCheckpoint" in warned_0[1]
    assert "leaf w" in warned_1[1]
    kinds = {path: (at_0[path]["type"], at_1[path]["type"]) for path in (*paths[1:], "like")}
    assert kinds == {
        paths[1]: ("CorruptCheckpoint", "CorruptCheckpoint"),
        paths[2]: ("ProcessesDisagree", "CorruptCheckpoint"),
        "like": ("CorruptCheckpoint", "TypeError"),
    }


def flip(file, place):
    """Changes one bit at a place between 0 and 1."""
    data = bytearray(file.read_bytes())
    data[int(len(data) * place)] ^= 4
    file.write_bytes(data)


def test_failures_leave_nothing_behind(told):
    """After them all the same processes save and replace at the same path."""
    root, results = told

    assert [result["good"] for result in results] == [None] * 3
    assert [result["replaced"] for result in results] == [None] * 3
    assert os.listdir(root) == ["a"]
    assert np.array_equal(jaxckpt.restore(root / "a")["w"], np.arange(8) + 2)


def test_exit_completes_a_save_of_several_processes(run_processes, tmp_path):
    """Nobody calls result(); every interpreter waits for its share."""
    run_processes(
        "saves:leave_without_waiting",
        count=2,
        devices_per_process=2,
        args=[tmp_path / "a"],
        fresh=True,
    )

    assert np.array_equal(jaxckpt.restore(tmp_path / "a")["w"], np.arange(8) + 5)


@pytest.mark.faults
def test_who_is_lost_is_named_in_time_and_nothing_is_lost(start_processes, ram_path):
    """Kill one while it writes, miss it from the start, stop two more: the old tree stays."""
    path = ram_path / "a"
    jaxckpt.save(path, {"w": np.arange(8)})
    rounds = [("killed", 3), ("missed", None), ("stopped", 2), ("coordinator", 0)]
    job = start_processes(
        "saves:lose_them", count=4, devices_per_process=1, args=[path, rounds], timeout_s=100
    )

    job.release("killed go")
    job.wait_for(3, "killed")
    job.kill(3)
    wait_for_all(job, [0, 1, 2], "killed over")
    job.release("missed go")
    wait_for_all(job, [0, 1, 2], "missed over")
    check_untouched(path)
    job.release("stopped go")
    job.wait_for(2, "stopped")
    job.stop(2)
    wait_for_all(job, [0, 1], "stopped over")
    check_untouched(path)
    job.resume(2)
    job.release("stopped again")
    wait_for_all(job, [2], "stopped over")
    job.release("coordinator go")
    job.wait_for(0, "coordinator")
    job.stop(0)
    wait_for_all(job, [1, 2], "coordinator over")
    check_untouched(path)
    done = job.wait(check=False)

    for index in (1, 2):
        killed, missed, stopped, coordinator = done[index].result
        assert all(word["type"] == "CheckpointTimeout" for word in done[index].result)
        assert killed["named"] == missed["named"] == [3]
        assert stopped["named"] == [2, 3]
        assert 0 in coordinator["named"]
        assert all(word["s"] < 4 * worker.TIMEOUT_S for word in done[index].result)
    jaxckpt.save(path, {"w": np.arange(8) + 9}, overwrite=True)
    assert os.listdir(ram_path) == ["a"]


def wait_for_all(job, indices, point):
    for index in indices:
        job.wait_for(index, point)


def check_untouched(path):
    assert np.array_equal(jaxckpt.restore(path)["w"], np.arange(8))
    others = [entry for entry in os.listdir(path.parent) if entry != path.name]
    assert all(names.is_temporary(entry) for entry in others)


def test_the_death_of_the_coordinator_leaves_the_old_tree(start_processes, tmp_path):
    """JAX aborts the others then; the next job finds the old tree, and saves."""
    path = tmp_path / "a"
    jaxckpt.save(path, {"w": np.arange(8)})
    job = start_processes(
        "saves:lose_them", count=2, devices_per_process=2, args=[path, [("killed", 0)]]
    )

    job.release("killed go")
    job.wait_for(0, "killed")
    job.kill(0)
    job.wait(check=False)

    check_untouched(path)
    jaxckpt.save(path, {"w": np.arange(8) + 9}, overwrite=True)
    assert os.listdir(tmp_path) == ["a"]
