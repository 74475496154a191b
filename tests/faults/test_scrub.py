"""`verify` finds every planted fault; `manager.scrub` sets damaged steps aside."""

from __future__ import annotations

import errno
import os
import shutil

import jax
import numpy as np
import pytest

import jaxckpt
from jaxckpt._run import scrub as _scrub
from jaxckpt._run.index import StepIndex
from jaxckpt._run.leases import Leases
from jaxckpt.format import names
from jaxckpt.storage import LocalStorage
from jaxckpt.testing import FailingStorage, simulate
from tests.faults.children import tree
from tests.twins import watched

STEP = 2


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A run of three steps with items and metrics; a second run of other values, and one of Orbax's
    kind beside it."""
    root = tmp_path_factory.mktemp("scrub")
    for name, seed in (("run", 0), ("other", 100)):
        with jaxckpt.CheckpointManager(root / name) as manager:
            for step in (1, 2, 3):
                items = {"config": {"a": [1, 2]}, "more": {"b": np.arange(5000.0)}}
                state = {**tree(seed + step), "sharded": sharded(seed + step)}
                manager.save(step, state, items=items, metrics={"loss": 1.0})
    return root


def sharded(seed):
    """An array of eight shards."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    values = np.random.default_rng(seed).standard_normal((8, 4000), np.float32)
    return jax.device_put(values, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))


@pytest.fixture
def run(pristine, ram_path):
    return shutil.copytree(pristine / "run", ram_path / "run")


def data_files(item):
    return sorted((item / "d").iterdir(), key=lambda file: (file.stat().st_size, file.name))


def flip(file, where):
    data = bytearray(file.read_bytes())
    data[int(where * (len(data) - 1))] ^= 4
    file.write_bytes(data)


def flips():
    for file in ("_METADATA", "_sharding", "array_metadatas/process_0", "manifest.ocdbt"):
        for where in (0.1, 0.5, 0.9):
            yield file, where


def swap(a, b):
    data = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(data)


def pad(file):
    with file.open("ab") as out:
        out.write(b"\0")


def link(file):
    file.rename(file.with_name("moved"))
    file.symlink_to(file.with_name("moved"))


FAULTS = {
    **{
        f"a bit of {file} at {where}": lambda step, other, file=file, where=where: flip(
            step / "state" / file, where
        )
        for file, where in flips()
        if not file.startswith("array_metadatas")
    },
    **{
        f"a bit of the largest data file at {where}": lambda step, other, where=where: flip(
            data_files(step / "state")[-1], where
        )
        for where in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    },
    "a bit of a JSON item": lambda step, other: flip(next((step / "config").iterdir()), 0.5),
    "a bit of the metrics": lambda step, other: flip(next((step / "metrics").iterdir()), 0.5),
    "a bit of the record": lambda step, other: flip(step / names.RECORD, 0.3),
    "a bit of the record's checksum": lambda step, other: flip(step / names.RECORD, 0.999),
    "a bit of another item": lambda step, other: flip(data_files(step / "more")[-1], 0.5),
    "a file cut short": lambda step, other: os.truncate(data_files(step / "state")[-1], 77),
    "a file with a byte more": lambda step, other: pad(data_files(step / "state")[-1]),
    "an empty file": lambda step, other: os.truncate(step / "state" / "_METADATA", 0),
    "no manifest": lambda step, other: (step / "state" / "manifest.ocdbt").unlink(),
    "no data": lambda step, other: shutil.rmtree(step / "state" / "d"),
    "no record": lambda step, other: (step / names.RECORD).unlink(),
    "no commit marker": lambda step, other: (step / names.COMMIT_MARKER).unlink(),
    "two files swapped": lambda step, other: swap(
        data_files(step / "state")[-1], data_files(step / "more")[-1]
    ),
    "the data of another run": lambda step, other: shutil.copy(
        data_files(other / "state")[-1], data_files(step / "state")[-1]
    ),
    "the database of another run": lambda step, other: [
        shutil.rmtree(step / "state"),
        shutil.copytree(other / "state", step / "state"),
    ],
    "a link in place of a file": lambda step, other: link(data_files(step / "state")[-1]),
    "a directory in place of a file": lambda step, other: [
        (step / "state" / "_METADATA").unlink(),
        (step / "state" / "_METADATA").mkdir(),
    ],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_set_aside(run, pristine, trial, fault):
    """By `verify`, if it is a step at all, and by `scrub`, which keeps its bytes."""
    FAULTS[fault](run / str(STEP), pristine / "other" / str(STEP))
    before = entries(run / str(STEP))

    with trial("34", f"verify: {fault}"):
        if fault == "no commit marker":
            with pytest.raises(jaxckpt.CheckpointNotFound):
                jaxckpt.verify(run / str(STEP))
        else:
            report = jaxckpt.verify(run / str(STEP))
            assert report.damaged
            assert all(str(run) in problem.message for problem in report.problems)
    with trial("34", f"scrub: {fault}"), jaxckpt.CheckpointManager(run) as manager:
        found = manager.scrub()

        assert sorted(n for n, report in found.items() if not report.ok) == [STEP]
        assert manager.all_steps() == [1, 3]
        aside = [name for name in os.listdir(run) if names.is_set_aside(name)]
        assert len(aside) == 1
        assert entries(run / aside[0]) == before
        assert any(f"step {STEP} is damaged" in problem for problem in manager.problems)
        assert np.array_equal(manager.restore()["large"], tree(3)["large"])
        manager.save(4, tree(4))
    assert jaxckpt.verify(run / "4").ok


def test_an_item_that_was_removed_is_found_and_the_step_stays(run, trial):
    """It is no damage: the other items can be restored."""
    shutil.rmtree(run / str(STEP) / "more")

    with trial("34", "verify: no item"):
        report = jaxckpt.verify(run / str(STEP))
        assert not report.ok
        assert not report.damaged
    with trial("34", "scrub: no item"), jaxckpt.CheckpointManager(run) as manager:
        found = manager.scrub()

        assert sorted(n for n, report in found.items() if not report.ok) == [STEP]
        assert manager.all_steps() == [1, 2, 3]
        assert any("delete(step, item='more')" in problem for problem in manager.problems)
        assert np.array_equal(manager.restore(step=STEP)["large"], tree(STEP)["large"])


def entries(folder):
    """All that is below a directory, but for what a manager's own reading may add."""

    def content(path):
        if path.is_symlink():
            return os.readlink(path)
        return path.read_bytes() if path.is_file() else None

    return {str(path.relative_to(folder)): content(path) for path in folder.rglob("*")}


def test_a_run_that_is_good_stays_as_it_is(run):
    """A control: nothing is found where nothing was planted, and nothing is written."""
    before = entries(run)

    with jaxckpt.CheckpointManager(run, mode="r") as manager:
        reports = manager.scrub()

    assert list(reports) == [1, 2, 3]
    assert all(report.ok and report.leaves for report in reports.values())
    assert entries(run) == before


def test_the_processes_share_the_steps_and_agree(run):
    """Each step is read by one process; all processes get all results."""
    flip(data_files(run / "2" / "state")[-1], 0.5)
    looked = []
    place = watched(run, lambda *call: looked.append(call))

    def scrub(me):
        with jaxckpt.CheckpointManager(place) as manager:
            reports = manager.scrub()
            return {n: report.ok for n, report in reports.items()}, manager.all_steps()

    told = simulate(2, scrub)

    assert told == [({1: True, 2: False, 3: True}, [1, 3])] * 2
    # A damaged step is read twice, and once more by who sets it aside.
    shardings = {f"{run}/{n}/state/{names.SHARDING}": n for n in (1, 2, 3)}
    assert sorted(shardings[at] for _, at in looked if at in shardings) == [1, 2, 2, 2, 2, 3]


def test_a_reader_reports_and_sets_nothing_aside(run):
    """Only who may write renames anything."""
    flip(data_files(run / "2" / "state")[-1], 0.5)

    with jaxckpt.CheckpointManager(run, mode="r") as manager:
        reports = manager.scrub()

    assert not reports[2].ok
    assert sorted(name for name in os.listdir(run) if name.isdigit()) == ["1", "2", "3"]


def test_a_run_without_a_whole_step_stays_as_it_is(run):
    """Else the next start would take it for a new one, and begin anew."""
    for step in (1, 2, 3):
        flip(data_files(run / str(step) / "state")[-1], 0.5)

    with jaxckpt.CheckpointManager(run) as manager:
        reports = manager.scrub()

        assert not any(report.ok for report in reports.values())
        assert manager.all_steps() == [1, 2, 3]


def test_a_step_of_another_program_is_reported_and_stays(run):
    """A damaged step that jaxckpt did not write is not renamed."""
    import orbax.checkpoint as ocp

    ocp.PyTreeCheckpointer().save(run / "4", {"state": np.arange(1000.0)})
    (run / "4" / "manifest.ocdbt").unlink()

    with jaxckpt.CheckpointManager(run) as manager:
        reports = manager.scrub()

        assert not reports[4].ok
        assert manager.all_steps() == [1, 2, 3, 4]
        assert any("step 4 is damaged and is skipped" in problem for problem in manager.problems)


def test_what_cannot_be_read_now_is_not_damaged(run):
    """An error of the disk at any one read: the step is reported at most, and stays."""
    outcomes = set()
    for n in range(10_000):
        failing = FailingStorage(LocalStorage(), n, OSError(errno.EIO, "bad"), reads=True)
        with jaxckpt.CheckpointManager(run) as manager:
            manager._index.storage = failing
            try:
                outcomes.add(all(report.ok for report in manager.scrub().values()))
            except OSError as error:
                outcomes.add(type(error))
            manager._index.storage = LocalStorage()
            assert manager.all_steps() == [1, 2, 3]
        if not failing.failed:
            break

    assert outcomes == {True, False, OSError}


def test_a_step_that_cannot_even_be_listed_is_one_report_of_many(run):
    """The other steps are verified all the same, and nothing is taken for damaged."""
    seen = Leases(StepIndex(LocalStorage(), str(run)))
    seen.index.path(2)  # the names of steps are known by now
    seen.index.storage = FailingStorage(
        LocalStorage(), 0, OSError(errno.EIO, "bad"), once=False, reads=True
    )

    report = _scrub.look(seen, 2)

    assert [problem.unreadable for problem in report.problems] == [True]
    assert not report.damaged
