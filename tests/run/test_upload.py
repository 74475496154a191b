"""`jaxckpt upload`: steps are copied to another place, checked, and gone on with after a kill."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import uuid
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import jaxckpt
from jaxckpt._run import upload as uploading
from jaxckpt._run.index import StepIndex
from jaxckpt._run.leases import Leases
from jaxckpt._run.owner import Ownership
from jaxckpt.cli._between import missing_steps
from jaxckpt.cli._make import upload as upload_command
from jaxckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptCheckpoint,
    SaveFailed,
    StepExists,
    UnsupportedFormat,
)
from jaxckpt.format import names, ocdbt
from jaxckpt.storage import MemoryStorage, PathIn, _large, locate
from jaxckpt.testing import CrashingStorage, SimulatedCrash
from tests.commandline import cli, said_json
from tests.disk.test_transaction import Stalling
from tests.twins import watched
from tests.waiting import wait_until

SIZE = 1 << 20


@pytest.fixture
def source(tmp_path):
    """A run of three steps, each with a few MB in several files."""
    root = tmp_path / "local"
    with jaxckpt.CheckpointManager(root, run_metadata={"lr": 0.1}) as manager:
        for step in (1, 2, 3):
            state = {f"w{i}": np.full(SIZE, step + i, np.float32) for i in range(3)}
            manager.save(step, state, items={"data": {"at": step}}, metrics={"loss": 1.0})
    return root


@pytest.fixture(params=["dir", "memory"])
def target(request, tmp_path):
    if request.param == "dir":
        return str(tmp_path / "remote")
    return f"memory://{tmp_path.name}/remote"


def index_of(root):
    return StepIndex(*locate(root), quiet=True)


def bytes_at(root):
    """The bytes that were sent to a place."""
    storage, where = locate(root)
    files = storage.files(where) if storage.kind(where) else {}
    return sum(entry.size for name, entry in files.items() if not name.endswith(names.WRITER))


def test_a_run_is_copied_whole_and_once(source, target):
    """The copies restore and verify by themselves, and a second upload sends nothing."""
    _, done = said_json("upload", source, target)

    assert [one["step"] for one in done] == [3, 2, 1]
    assert all(one["sent_bytes"] > 3 * 4 * SIZE and not one["found_bytes"] for one in done)
    with jaxckpt.CheckpointManager(target, mode="r") as manager:
        assert manager.all_steps() == [1, 2, 3]
        assert np.array_equal(manager.restore()["w1"], np.full(SIZE, 4, np.float32))
        assert manager.restore_items(step=2)["data"] == {"at": 2}
        assert manager.metrics(1) == {"loss": 1.0}
        assert manager.run_metadata == {"lr": 0.1}
    for step in (1, 2, 3):
        assert jaxckpt.verify(f"{target}/{step}").ok
        assert jaxckpt.open(f"{target}/{step}").lineage["by"] == "upload"
    assert said_json("upload", source, target) == (0, [])
    assert "has every step" in cli("upload", source, target)[1]


@pytest.mark.parametrize("at", ["source", "target"])
def test_damaged_metadata_of_a_run_stops_no_upload(tmp_path, source, at):
    target = tmp_path / "remote"
    jaxckpt.CheckpointManager(target, run_metadata={"lr": 0.1}).close()
    (target / names.RUN).unlink()  # as in a run that is uploaded there later
    root = source if at == "source" else target
    (root / names.ROOT_METADATA / names.ROOT_METADATA_FILE).write_bytes(b"")

    code, done = said_json("upload", source, str(target))

    assert (code, [one["step"] for one in done]) == (0, [3, 2, 1])
    assert jaxckpt.verify(target / "3").ok


def test_an_upload_goes_on_where_it_was_cut_off(source, target):
    """What had arrived is compared and not sent again; a torn or changed file is."""

    def cut(verb, path):
        if verb in ("write", "create") and bytes_at(target) > 4 * SIZE:
            raise OSError("the line is cut")

    with pytest.raises(SaveFailed, match="the line is cut"):
        uploading.upload(index_of(source), index_of(watched(target, cut)), 3)
    assert index_of(target).steps() == []
    sent = bytes_at(target)

    done = uploading.upload(index_of(source), index_of(target), 3)

    assert done.found_bytes == sent > 4 * SIZE
    assert done.sent_bytes > 0
    assert jaxckpt.verify(f"{target}/3").ok


@pytest.mark.faults
def test_an_upload_that_stalls_at_any_call_harms_no_copy_that_another_job_made(source):
    """That job has taken over the run and the lease, and committed the copy."""
    for at in itertools.count():
        root = f"memory://{uuid.uuid4()}/remote"
        owner = ["first"]

        def fence(job, owner=owner):
            if owner != [job]:
                raise SaveFailed(f"the run is {owner[0]}'s")

        def send_second(root=root, owner=owner, fence=fence):
            owner[:] = ["second"]
            with contextlib.suppress(StepExists):
                index = index_of(root)
                uploading.upload(index_of(source), index, 1, fence=partial(fence, "second"))

        leave_all_but_the_marker(source, root)
        storage = Stalling(MemoryStorage(), at, send_second, lapses=True)
        with contextlib.suppress(CheckpointError):
            index = index_of(PathIn(storage, root))
            uploading.upload(index_of(source), index, 1, fence=partial(fence, "first"))

        assert jaxckpt.verify(f"{root}/1").ok, at
        if not storage.done:
            break
    assert at > 20


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A run of a small step on the disk of a job."""
    root = tmp_path_factory.mktemp("source") / "local"
    with jaxckpt.CheckpointManager(root) as manager:
        manager.save(1, {"w": np.full(1 << 15, 1.0)})
    return root


@pytest.mark.faults
@pytest.mark.parametrize(
    ("tries", "is_pinned", "next_job"),
    [
        (1, False, "saves the step"),
        (2, False, "deletes the step"),
        (1, True, "opens the run"),
        *(
            pytest.param(*some, marks=pytest.mark.slow)
            for some in [
                (1, False, "opens the run"),
                (1, False, "deletes the step"),
                (2, False, "saves the step"),
                (2, False, "opens the run"),
                (1, True, "saves the step"),
                (1, True, "deletes the step"),
            ]
        ),
    ],
)
def test_an_upload_that_stalls_at_any_call_harms_no_step_of_the_next_job(
    small, tries, is_pinned, next_job
):
    """Which has values of its own; and no step is blocked for ever."""
    pin = small / "1" / names.PINNED
    pin.touch() if is_pinned else pin.unlink(missing_ok=True)
    for at in itertools.count():
        root, ours = f"memory://{uuid.uuid4()}/remote", []

        def take_over(root=root, ours=ours):
            with jaxckpt.CheckpointManager(root) as manager:
                there = manager.all_steps()
                if next_job != "opens the run" and not there:
                    manager.save(1, {"w": np.full(1 << 15, 2.0)}).result()
                    ours.append(next_job == "saves the step")
                if next_job == "deletes the step":
                    manager.unpin(1)
                    manager.delete(1)

        if tries > 1:
            leave_all_but_the_marker(small, root)
        storage = Stalling(MemoryStorage(), -1, take_over, lapses=True)
        owner = Ownership(Leases(index := index_of(PathIn(storage, root))))
        owner.open(None, 1)
        storage._count, storage._at = itertools.count(), at
        with contextlib.suppress(CheckpointError):
            uploading.upload(index_of(small), index, 1, fence=lambda owner=owner: owner.fence(1))
        if not storage.done:
            break
        if ours == [True]:
            assert jaxckpt.verify(f"{root}/1").ok, at
            assert jaxckpt.restore(f"{root}/1")["w"][0] == 2.0
        with jaxckpt.CheckpointManager(root) as manager:
            if not manager.all_steps():
                manager.save(1, {"w": np.full(1 << 15, 3.0)}).result()
    assert at > 20


@pytest.mark.parametrize("place", ["dir", "memory"])
def test_the_command_stops_when_a_job_takes_the_run(source, tmp_path, place):
    """It has committed nothing that the job does not know."""
    target = tmp_path / "remote" if place == "dir" else f"memory://{tmp_path.name}/remote"
    begun = []

    def let_a_job_begin(verb, path):
        if verb in ("write", "create") and names.is_data_file(path[-34:]) and not begun:
            begun.append(path)
            with jaxckpt.CheckpointManager(target) as job:
                job.save(1, {"w": 5})

    options = {"steps": (), "max_rate": None, "no_job": False, "as_json": True}
    with pytest.raises(SaveFailed):  # the job has taken the run, or what was sent to a directory
        upload_command.callback(src=str(source), dst=watched(target, let_a_job_begin), **options)

    assert begun
    with jaxckpt.CheckpointManager(target) as manager:
        assert manager.all_steps() == [1]
        assert manager.restore() == {"w": 5}


def test_a_step_that_its_job_deletes_meanwhile_is_left_out(source, tmp_path, capsys):
    """It was not named; a named step that is not there is an error, and nothing is made for it."""
    target, other = tmp_path / "remote", tmp_path / "other"

    def delete(verb, path):
        if f"{target}/2" in path and (source / "2").exists():
            (source / "2").rename(tmp_path / "deleted")

    options = {"steps": (), "max_rate": None, "no_job": False, "as_json": True}
    code = upload_command.callback(src=str(source), dst=watched(target, delete), **options)
    missing = cli("upload", source, other, "--step", 1, "--step", 99)

    assert (code, index_of(target).steps()) == (0, [1, 3])
    assert "step 2 was deleted meanwhile" in capsys.readouterr().err
    assert (missing[0], "has no committed step 99" in missing[2]) == (2, True)
    assert not other.exists()


def deletes_and_saves(source, target, deleted):
    """Returns the target, and a job at the source that goes on as soon as a file of 3 is sent."""

    def go_on(verb, path):
        if verb in ("write", "create") and names.is_data_file(path[-34:]) and not deleted.exists():
            (source / "3").rename(deleted)
            with jaxckpt.CheckpointManager(source) as job:
                job.save(4, {"w": np.arange(9)})

    return watched(target, go_on)


def test_steps_that_come_while_a_step_is_sent_that_goes_are_uploaded(
    source, target, tmp_path, capsys
):
    """Only then has the target every step; nothing is left of what was sent of the other."""
    dst = deletes_and_saves(source, target, tmp_path / "deleted")
    options = {"steps": (), "max_rate": None, "no_job": False, "as_json": False}
    code = upload_command.callback(src=str(source), dst=dst, **options)

    said = capsys.readouterr()
    storage, where = locate(target)
    assert (code, index_of(target).steps()) == (0, [1, 2, 4])
    assert "step 3 was deleted meanwhile" in said.err
    assert "wrote" in said.out
    assert not [file for file in storage.files(where) if file.startswith("3")]


def test_a_job_that_deletes_a_step_at_each_look_is_not_followed_for_ever(source, target):
    """Each listing of the source shows another newest step, and the one before is gone."""
    newest = [3]

    def go_on(verb, path):
        if verb == "entries" and path == str(source) and (source / str(newest[0])).exists():
            (source / str(newest[0])).rename(source / str(newest[0] + 1))
            newest[0] += 1

    index = index_of(watched(source, go_on))

    whole, left = missing_steps(index, index_of(target))

    assert newest[0] < 60
    assert {1, 2} <= {*whole}
    assert left == []


def test_a_step_that_goes_while_it_is_sent_is_not_damaged(source, target, tmp_path):
    dst = deletes_and_saves(source, target, tmp_path / "deleted")

    with pytest.raises(CheckpointNotFound, match="deleted meanwhile"):
        uploading.upload(index_of(source), index_of(dst), 3)

    assert bytes_at(target) == 0


def test_the_policy_of_a_job_keeps_a_step_while_it_is_uploaded(source, target):
    """Its next save deletes it."""
    saved = []

    def save(verb, path):
        if verb in ("write", "create") and names.is_data_file(path[-34:]) and not saved:
            saved.append(job.save(4, {"w": 1}))
            job.wait_until_finished()

    with jaxckpt.CheckpointManager(source, keep=jaxckpt.KeepPolicy(last=1)) as job:
        options = {"steps": (), "max_rate": None, "no_job": False, "as_json": True}
        code = upload_command.callback(src=str(source), dst=watched(target, save), **options)

    assert (code, index_of(target).steps()) == (0, [3, 4])


def flip(step):
    """Flips a bit in the middle of the largest file of a step."""
    data = max(step.rglob("*"), key=lambda path: path.stat().st_size)
    flipped = bytearray(data.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    data.write_bytes(flipped)


@pytest.mark.parametrize("harm", ["marker", "record", "data", "bits", "link", "file"])
def test_a_step_that_cannot_be_uploaded_is_named(source, tmp_path, harm):
    """The others are uploaded, and the answer is not that all are there: someone may delete it."""
    step = source / "2"
    if harm in ("link", "file"):
        step.rename(tmp_path / "moved")
        step.symlink_to(tmp_path / "moved") if harm == "link" else step.touch()
    elif harm == "bits":
        flip(step)
    else:
        file = {"marker": names.COMMIT_MARKER, "record": names.RECORD}.get(harm)
        (step / file if file else max(step.rglob("d/*"))).unlink()

    for _ in range(2):
        code, out, err = cli("upload", source, tmp_path / "target")
        assert (code, "has every step" in out) == (1, False)
        assert "not uploaded, since they are damaged, unreadable or no directories: 2" in err
    assert index_of(tmp_path / "target").steps() == [1, 3]


def test_nothing_is_uploaded_into_a_checkpoint(source, tmp_path):
    """Nor is it written to."""
    jaxckpt.save(tmp_path / "saved", {"w": 1})
    before = sorted(tmp_path.rglob("*"))

    code, _, err = cli("upload", source, tmp_path / "saved" / "run")

    assert (code, "lies inside the checkpoint" in err) == (2, True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("into", ["saved", "other/1", "link", "memory:saved", "memory:other/1"])
def test_a_checkpoint_is_not_taken_for_the_root_of_a_run(source, tmp_path, into):
    """In a store, each later save at its path was refused, and a job kept the step for ever."""
    *in_memory, into = into.split(":")
    top = f"memory://{tmp_path.name}" if in_memory else str(tmp_path)
    jaxckpt.save(f"{top}/saved", {"w": 1})
    jaxckpt.save(f"{top}/other/1", {"w": 1})
    (tmp_path / "link").symlink_to(tmp_path / "saved")
    storage, _ = locate(top)
    before = sorted(storage.files(top))

    code, _, err = cli("upload", source, f"{top}/{into}")

    assert (code, "is a checkpoint, not a run" in err) == (2, True)
    assert sorted(storage.files(top)) == before


def leave_all_but_the_marker(source, root):
    """Leaves an upload whose job died just before its last file."""

    def die(verb, path):
        if path.endswith(f"1/{names.COMMIT_MARKER}") and verb == "create":
            raise SimulatedCrash

    with pytest.raises(SimulatedCrash):
        uploading.upload(index_of(source), index_of(watched(root, die)), 1)
    assert f"1/{names.RECORD}" in locate(root)[0].files(root)


def test_each_file_is_read_once(source, target):
    """Values are checked while they are sent, and not read before."""
    reads = Counter()

    def before(verb, path):
        if verb.startswith("read") and names.is_data_file(path):
            reads[path] += 1

    uploading.upload(index_of(watched(source, before)), index_of(target), 3)

    sizes = {path: Path(path).stat().st_size for path in reads}
    pieces = {path: -(-size // _large._PIECE_BYTES) for path, size in sizes.items()}
    assert {path: n for path, n in reads.items() if sizes[path] > SIZE} == {
        path: n for path, n in pieces.items() if sizes[path] > SIZE
    }
    assert max(sizes.values()) > 3 * 4 * SIZE


def test_the_state_goes_before_other_items(source, target):
    """So that a host that ends has sent the most valuable."""
    begun = []

    def before(verb, path):
        item = path.removeprefix(f"{locate(target)[1]}/").split("/")[1:-1]
        if verb in ("write", "create") and item:
            begun.append(item[0])

    uploading.upload(index_of(source), index_of(watched(target, before)), 3)

    first = [name == "state" for name in begun]
    assert first == sorted(first, reverse=True)
    assert {"state", "data", "metrics"} == {*begun}


def test_what_arrived_is_trusted_only_if_it_is_the_same(source, target):
    """A flipped byte in a file that was sent before the cut is found, and the file sent again."""

    def cut(verb, path):
        if path.endswith(f"/{names.RECORD}") and verb in ("write", "create"):
            raise OSError("the line is cut")

    with pytest.raises(SaveFailed, match="the line is cut"):
        uploading.upload(index_of(source), index_of(watched(target, cut)), 3)
    storage, root = locate(target)
    work = next(f"{root}/{name}" for name in storage.entries(root) if name.startswith("3"))
    data = next(name for name in storage.files(work) if names.is_data_file(name))
    flipped = bytearray(storage.read(f"{work}/{data}", max_bytes=1 << 30))
    flipped[len(flipped) // 2] ^= 1
    storage.write(f"{work}/{data}", bytes(flipped))

    done = uploading.upload(index_of(source), index_of(target), 3)

    assert done.sent_bytes == len(flipped)
    assert jaxckpt.verify(f"{target}/3").ok


def test_nothing_wrong_is_sent(source, target, tmp_path):
    """A damaged step, another program's, another step of that number, a run in use."""
    flip(source / "2")
    with pytest.raises(CorruptCheckpoint):
        uploading.upload(index_of(source), index_of(target), 2)
    (source / "1" / names.RECORD).unlink()
    with pytest.raises((UnsupportedFormat, CorruptCheckpoint)):
        uploading.upload(index_of(source), index_of(target), 1)
    with jaxckpt.CheckpointManager(target) as manager:
        manager.save(3, {"other": 1})
        manager.wait_until_finished()
        code, _, told = cli("upload", source, target, "--step", "3")
        assert (code, "in use" in told) == (2, True)
    with pytest.raises(StepExists, match="no copy"):
        uploading.upload(index_of(source), index_of(target), 3)
    assert index_of(target).steps() == [3]


def test_a_killed_upload_sends_the_rest(tmp_path, limits):
    """Killed at half of it, the next one sends at most 55 % again: files are sent whole."""
    limits(ocdbt, DATA_FILE_BYTES=4 * SIZE)  # else a test needs some GB
    root, target = tmp_path / "many", tmp_path / "remote"
    with jaxckpt.CheckpointManager(root) as manager:
        manager.save(1, {f"w{i}": np.full(SIZE, i, np.float32) for i in range(12)})
    total = sum(path.stat().st_size for path in (root / "1").rglob("*") if path.is_file())
    command = [sys.executable, "-m", "jaxckpt", "upload", root, target, "--max-rate", "12MB"]

    with subprocess.Popen([*map(str, command)]) as child:
        wait_until(lambda: child.poll() is not None or _bytes_in(target) >= total / 2)
        assert child.poll() is None
        child.kill()
    assert index_of(target).steps() == []
    [work] = target.glob("1.*")
    (work / "state" / ".jaxckpt-tmp-left").write_bytes(b"of a file being written")
    code, (done,) = said_json("upload", root, target)

    assert (code, done["sent_bytes"] <= 0.55 * total) == (0, True)
    assert not [*target.rglob(".jaxckpt-tmp-*")]
    assert jaxckpt.verify(target / "1").ok


def _bytes_in(root):
    found = [path for path in root.rglob("*") if path.parent.name == names.OCDBT_DATA]
    return sum(path.stat().st_size for path in found if not path.name.startswith("."))


@pytest.mark.faults
@pytest.mark.parametrize("torn", [False, True])
def test_after_a_crash_at_any_change_the_next_upload_ends_it(tmp_path, target, torn):
    """Until then the step is either not there, or there and whole."""
    with jaxckpt.CheckpointManager(tmp_path / "local") as manager:
        manager.save(1, {"w": np.arange(9.0)})
    storage, root = locate(target)
    crashes = 0

    for after in itertools.count():
        crashing = StepIndex(CrashingStorage(storage, after, torn=torn), f"{root}/{after}")
        there = StepIndex(storage, f"{root}/{after}")
        try:
            uploading.upload(index_of(tmp_path / "local"), crashing, 1)
        except SimulatedCrash:
            crashes += 1
        else:
            break
        assert there.steps() in ([], [1])
        if there.steps():
            assert jaxckpt.verify(f"{target}/{after}/1").ok
        uploading.upload(index_of(tmp_path / "local"), there, 1)
        assert there.steps() == [1]
        assert jaxckpt.verify(f"{target}/{after}/1").ok

    assert crashes > 10
