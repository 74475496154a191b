"""A run's root shared with others: strays, a second writer, a zombie, and clocks that jump."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import stat
import time
from pathlib import Path

import pytest

import jaxckpt
from jaxckpt.format import names
from jaxckpt.format import step as step_format
from tests.faults import writers_children as children
from tests.faults.zygote import Zygote
from tests.waiting import wait_until

# --- strays ------------------------------------------------------------------------------------


def full_dir(path):
    path.mkdir()
    (path / "notes.txt").write_text("text")


def a_file(path):
    path.write_text("text")


def link_to(target):
    return lambda path: path.symlink_to(target)


def a_socket(path):
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket may have 107 bytes
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as made:
        made.bind(path.name)
    os.chdir(here)


def run_inside(path):
    shutil.copytree(path.parent / "1", path / "1")


def empty_attempt_of_orbax(path):
    (path / "state").mkdir(parents=True)
    (path / names.CHECKPOINT_METADATA).write_text("{}")


def step_without_marker(path):
    shutil.copytree(path.parent / "1", path)
    (path / names.COMMIT_MARKER).unlink()


def step_without_record(path):
    shutil.copytree(path.parent / "1", path)
    (path / names.RECORD).unlink()
    (path / names.COMMIT_MARKER).unlink()
    (path / names.CHECKPOINT_METADATA).unlink()
    shutil.rmtree(path / names.STATE_ITEM)


# What is there, and whether it has the name of a step.
STRAYS = {
    "empty directory": ("99", Path.mkdir),
    "empty directory of the highest number": ("9" * 18, Path.mkdir),
    "directory of a number that is none": ("9" * 23, Path.mkdir),
    "directory of a date": ("20240131", full_dir),
    "file": ("7", a_file),
    "FIFO": ("9", os.mkfifo),
    "socket": ("6", a_socket),
    "dangling link": ("8", link_to("nowhere")),
    "link to a step": ("97", link_to("1")),
    "link to the root": ("96", link_to(".")),
    "link to another place": ("95", link_to("/usr")),
    "link to itself": ("94", link_to("94")),
    "named link": ("latest", link_to("1")),
    "other directory": ("tensorboard", full_dir),
    "other file": ("README.md", a_file),
    "hidden file": (".9.swp", a_file),
    "hidden directory": (".snapshot", full_dir),
    "deleted but open, on NFS": (".nfs00000000000a", a_file),
    "of the file system": ("lost+found", Path.mkdir),
    "other form of a step": ("0003", full_dir),
    "with a prefix": ("step_4", full_dir),
    "fraction": ("1.5", full_dir),
    "power": ("1e3", full_dir),
    "underscored": ("1_000", full_dir),
    "negative": ("-3", full_dir),
    "signed": ("+3", full_dir),
    "blank": (" 3", full_dir),
    "line": ("3\n", full_dir),
    "other digits": ("٣", Path.mkdir),
    "no text": (os.fsdecode(b"\xff\xfe"), a_file),
    "the longest name": ("7" * 255, Path.mkdir),
    "Orbax's attempt": ("5.orbax-checkpoint-tmp", empty_attempt_of_orbax),
    "an older Orbax's attempt": ("5.orbax-checkpoint-tmp-1234567", empty_attempt_of_orbax),
    "a deletion of Orbax": ("5.orbax-checkpoint-tmp-deleting-x", empty_attempt_of_orbax),
    "a run": ("93", run_inside),
    "step without anything": ("91", step_without_record),
    "item": ("state", full_dir),
    "database": ("manifest.ocdbt", a_file),
    "a backup": ("1.bak", lambda path: shutil.copytree(path.parent / "1", path)),
    "set aside": ("1.jaxckpt-bad-00000000", full_dir),
}


def listing(path):
    """Everything below a path: what each is, and its bytes."""
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        return os.readlink(path)
    if stat.S_ISDIR(mode):
        return {entry: listing(path / entry) for entry in os.listdir(path)}
    return path.read_bytes() if stat.S_ISREG(mode) else stat.S_IFMT(mode)


def trial_of_stray(root, name, make, *, meanwhile):
    """Saves, lists, keeps and restores with one stray; it may come while the run is open."""
    keep = jaxckpt.KeepPolicy(last=2)
    stray, value = root / name, {"n": 1}
    with jaxckpt.CheckpointManager(root) as manager:
        manager.save(1, value)
    if not meanwhile:
        make(stray)
        before = listing(stray)
    with jaxckpt.CheckpointManager(root, keep=keep) as manager:
        if meanwhile:
            make(stray)
            before = listing(stray)
        assert (manager.all_steps(), manager.latest_step()) == ([1], 1)
        for step in (2, 3):
            manager.save(step, {"n": step}).result()
        manager.wait_until_finished()
        assert (manager.all_steps(), manager.latest_step()) == ([2, 3], 3)
        assert manager.restore() == {"n": 3}
    assert jaxckpt.restore(root) == {"n": 3}
    with jaxckpt.CheckpointManager(root, keep=keep) as manager:
        manager.save(4, {"n": 4})
        manager.wait_until_finished()
        assert manager.all_steps() == [3, 4]
        assert [problem for problem in manager.problems if name in problem]
    assert listing(stray) == before


@pytest.mark.parametrize("meanwhile", [False, True], ids=["before", "meanwhile"])
def test_a_stray_entry_stops_nothing(trial, ram_path, meanwhile):
    """Steps are saved, listed, kept and restored beside it; it is reported, and stays as it is."""
    for number, (what, (name, make)) in enumerate(STRAYS.items()):
        root = ram_path / str(number)
        with trial("17", f"{what}, {'meanwhile' if meanwhile else 'before'}"):
            trial_of_stray(root, name, make, meanwhile=meanwhile)


def test_all_strays_at_once_stop_nothing(trial, ram_path):
    """All are reported, and stay as they are."""

    def make_all(path):
        for name, make in STRAYS.values():
            make(path.parent / name)
        path.mkdir()

    with trial("17", "all at once"):
        trial_of_stray(ram_path / "run", "all", make_all, meanwhile=False)
        assert {name for name, _ in STRAYS.values()} <= set(os.listdir(ram_path / "run"))


# An empty directory is replaced: `test_an_empty_directory_is_no_step`.
AT_THE_NEXT = {
    "foreign directory": full_dir,
    "file": a_file,
    "FIFO": os.mkfifo,
    "dangling link": link_to("nowhere"),
    "link to a step": link_to("1"),
    "a run": run_inside,
    "link to another place": link_to("/usr"),
    "link to the root": link_to("."),
    "socket": a_socket,
}


@pytest.mark.parametrize("meanwhile", [False, True], ids=["before", "meanwhile"])
def test_a_stray_that_has_the_name_of_the_next_step(trial, ram_path, meanwhile):
    """That step raises `StepExists` once; the next step is saved, and the stray stays."""
    for number, (what, make) in enumerate(AT_THE_NEXT.items()):
        root = ram_path / str(number)
        with trial("17", f"{what} at the next step, {'meanwhile' if meanwhile else 'before'}"):
            with jaxckpt.CheckpointManager(root) as manager:
                manager.save(1, {"n": 1})
            if not meanwhile:
                make(root / "2")
            with jaxckpt.CheckpointManager(root) as manager:
                if meanwhile:
                    make(root / "2")
                before = listing(root / "2")
                with pytest.raises(jaxckpt.StepExists, match=f"{root}/2"):
                    manager.save(2, {"n": 2}).result()
                manager.save(3, {"n": 3}).result()
                assert manager.all_steps() == [1, 3]
                assert manager.restore() == {"n": 3}
            assert listing(root / "2") == before


def test_a_step_without_its_marker_is_set_aside(trial, ram_path):
    """jaxckpt wrote it, and it is not whole: a restore moves it away with all that it has."""
    with jaxckpt.CheckpointManager(ram_path) as manager:
        manager.save(1, {"n": 1})
    shutil.copytree(ram_path / "1", ram_path / "9")
    (ram_path / "9" / names.COMMIT_MARKER).unlink()
    before = listing(ram_path / "9")

    with (
        trial("17", "a step without its marker"),
        jaxckpt.CheckpointManager(ram_path, keep=jaxckpt.KeepPolicy(last=2)) as manager,
    ):
        for step in (2, 3):
            manager.save(step, {"n": step}).result()
        manager.wait_until_finished()
        assert (manager.all_steps(), manager.restore()) == ([2, 3], {"n": 3})
        (aside,) = [name for name in os.listdir(ram_path) if names.is_set_aside(name)]
        assert listing(ram_path / aside) == before
        assert [problem for problem in manager.problems if aside in problem]


def test_what_a_dead_job_was_writing_is_removed(trial, ram_path):
    """It is not a stray: its name says whose it was, and the lock shows that the job is dead."""
    with jaxckpt.CheckpointManager(ram_path) as manager:
        manager.save(1, {"n": 1})
    left = [ram_path / names.temporary("2", "0" * 16), ram_path / names.deleting("0", "1" * 16)]
    for path in left:
        shutil.copytree(ram_path / "1", path)
        (path / names.WRITER).write_text("0" * 16)
    (ram_path / names.lease("of nobody")).write_text("no lease")

    with trial("17", "what a dead job was writing"):
        with jaxckpt.CheckpointManager(ram_path) as manager:
            manager.save(2, {"n": 2})
        assert sorted(os.listdir(ram_path)) == [
            "1",
            "2",
            names.LEDGER,
            names.LOCK,
            names.OWNER,
            names.RUN,
        ]


def test_a_copy_of_a_step_under_another_number_is_a_step(trial, ram_path):
    """A manual copy is intended: it is the newest step, holds the copy, and is reported."""
    with jaxckpt.CheckpointManager(ram_path) as manager:
        manager.save(1, {"n": 1})
    shutil.copytree(ram_path / "1", ram_path / "9")

    with (
        trial("17", "a copy of a step"),
        jaxckpt.CheckpointManager(ram_path, keep=jaxckpt.KeepPolicy(last=2)) as manager,
    ):
        assert (manager.all_steps(), manager.restore()) == ([1, 9], {"n": 1})
        assert [problem for problem in manager.problems if f"{ram_path}/9" in problem]
        with pytest.raises(ValueError, match="older than step 9"):
            manager.save(2, {"n": 2})
        manager.save(10, {"n": 10})
        manager.wait_until_finished()
        assert manager.all_steps() == [9, 10]


# --- two writers -------------------------------------------------------------------------------

STEPS = 8


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A second zygote, whose children run beside those of the first."""
    with Zygote(tmp_path_factory.mktemp("second")) as started:
        yield started


@pytest.mark.parametrize("part", range(4))
def test_two_jobs_write_one_run(trial, zygote, other, ram_path, part):
    """Each step is saved completely by one job; the other job gets a typed error.

    The first job opens the run earlier, by a varying delay. Half of the jobs open it again after an
    error, like a restarted job, so the jobs take the run from each other in turns.
    """
    dice = random.Random(part)
    for number in range(6):
        root = ram_path / str(number)
        root.mkdir()
        starts = 100 if number % 2 else 1
        for index, writer in enumerate((zygote, other)):
            writer.start(children.write_steps, root, index + 1, STEPS, starts=starts)
            time.sleep(dice.uniform(0, 0.05))  # not a wait for anything: the moment varies
        said = {index + 1: how_each_went(writer) for index, writer in enumerate((zygote, other))}
        found = zygote.run(children.check_writers, root)
        for step in range(1, STEPS + 1):
            with trial("18", f"two jobs, round {part}/{number}, step {step}"):
                errors = {writer: words[step]["error"] for writer, words in said.items()}
                winners = [writer for writer, error in errors.items() if error is None]
                assert len(winners) == 1
                assert found["writers"][str(step)] == winners[0]
                (error,) = [error for error in errors.values() if error is not None]
                assert "CheckpointError" in error
        assert found["newest"] == STEPS
        assert found["left"] == []


def how_each_went(zygote):
    """Returns the reports of a child for each step."""
    said, status = zygote.answers()
    assert status == 0
    return {word["step"]: word for word in said if "step" in word}


def test_two_jobs_that_keep_two_steps(trial, zygote, other, ram_path):
    """The policy of one job never deletes the newest step that the other has acknowledged."""
    dice = random.Random(9)
    for number in range(4):
        root = ram_path / str(number)
        root.mkdir()
        for index, writer in enumerate((zygote, other)):
            writer.start(children.write_steps, root, index + 1, STEPS, last=2, starts=100)
            time.sleep(dice.uniform(0, 0.05))  # not a wait for anything: the moment varies
        said = [how_each_went(writer) for writer in (zygote, other)]
        with trial("18", f"two jobs that keep two steps, round {number}"):
            saved = [step for words in said for step in words if words[step]["error"] is None]
            assert len(saved) == len(set(saved))
            found = zygote.run(children.check_writers, root)
            assert found["newest"] == max(saved) == STEPS
            assert found["left"] == []


# --- a zombie ----------------------------------------------------------------------------------


def test_a_job_that_slept_through_another(trial, zygote, other, ram_path):
    """It stops at each verb of its save of step 2; another job saves 2 to 4; then it continues.

    The other job's acknowledged steps stay; the zombie's own step is there only if it came before.
    """
    slept = set()
    for at in range(1, 200):
        root = ram_path / str(at)
        root.mkdir()
        zygote.run(children.write_steps, root, 1, 1)
        pid = zygote.start(children.write_and_sleep, root, 1, [2, 3, 4], at)
        word = zygote.answer()
        if "step" in word and word["step"] == 2:  # it saved step 2 with fewer verbs
            zygote.answers()
            break
        slept.add(word["sleeps"])
        wait_until_stopped(pid)
        other.start(children.write_steps, root, 2, 4)
        theirs = how_each_went(other)
        os.kill(pid, signal.SIGCONT)
        ours = how_each_went(zygote)
        with trial("18", f"a zombie that slept before {word['sleeps']}, verb {at}"):
            for step in (2, 3, 4):
                errors = {1: ours[step]["error"], 2: theirs[step]["error"]}
                winners = [writer for writer, error in errors.items() if error is None]
                assert len(winners) == 1
                assert all("CheckpointError" in e for e in errors.values() if e is not None)
                if step > 2:
                    assert winners == [2]
                errors[step] = winners[0]
            found = other.run(children.check_writers, root)
            assert {int(step) for step in found["writers"]} == {1, 2, 3, 4}
            assert [found["writers"][str(step)] for step in (3, 4)] == [2, 2]
            assert found["left"] == []
        shutil.rmtree(root)

    assert at > 15
    assert {"write", "sync", "rename", "create"} <= slept


def test_a_zombie_without_a_fence_saves_what_another_has_saved(zygote, other, ram_path):
    """A control: without the check of the owner, both jobs acknowledge step 2."""
    pid = zygote.start(write_unfenced, ram_path, 1, 1)
    assert "sleeps" in zygote.answer()
    wait_until_stopped(pid)
    other.start(write_unfenced, ram_path, 2, 0)
    theirs = how_each_went(other)
    os.kill(pid, signal.SIGCONT)
    ours = how_each_went(zygote)

    assert theirs[2]["error"] is ours[2]["error"] is None


def write_unfenced(root, writer, at):
    from jaxckpt._disk import transaction as _transaction
    from jaxckpt._run.owner import Ownership

    Ownership.fence = lambda self, step: None
    # Nor does it mind that the step is there.
    begin = _transaction.begin
    _transaction.begin = lambda *args, **options: begin(*args, **{**options, "overwrite": True})
    children.write_and_sleep(root, writer, [2], at)


def wait_until_stopped(pid):
    """Until a process that has stopped itself is stopped."""
    stat = Path(f"/proc/{pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")


# --- clocks ------------------------------------------------------------------------------------

DAYS = {
    "back by 400 days": [0, 0.1, -400, -399.9, -399.8, -399.7],
    "on by 400 days": [0, 0.1, 400, 400.1, 400.2, 400.3],
    "back and forth": [0, 400, -400, 400, -400, 0],
    "stands still": [0, 0, 0, 0, 0, 0],
    "backwards": [0, -1, -2, -3, -4, -5],
    "1970": [0, -20_000, 0, -20_500, 1, 2],
    "2200": [0, 65_000, 0, 65_000, 0, 65_000],
}


@pytest.mark.parametrize("days", DAYS)
def test_steps_are_in_their_order_whatever_the_clock_says(trial, zygote, ram_path, days):
    """The newest step has the highest number, and a policy by steps keeps it."""
    with trial("30", f"{days}, all kept"):
        found = zygote.run(children.save_with_clock, ram_path / "all", DAYS[days], {})
        assert found["stays"] == [list(range(1, step + 1)) for step in range(1, 7)]
        assert (found["newest"], found["latest"], found["problems"]) == (6, 6, [])
    with trial("30", f"{days}, two kept"):
        found = zygote.run(children.save_with_clock, ram_path / "two", DAYS[days], {"last": 2})
        assert found["stays"] == [[1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6]]
        assert (found["newest"], found["latest"], found["problems"]) == (6, 6, [])


@pytest.mark.parametrize("days", DAYS)
def test_a_policy_by_the_clock_keeps_the_newest(trial, zygote, ram_path, days):
    """Whatever happens to the other steps: the newest number stays, and nothing fails."""
    rules = [{"every_seconds": 3600.0}, {"newer_than_s": 3600.0}, {"last": 1, "every_seconds": 1.0}]
    for number, keep in enumerate(rules):
        with trial("30", f"{days}, {keep}"):
            found = zygote.run(children.save_with_clock, ram_path / str(number), DAYS[days], keep)
            assert [steps[-1] for steps in found["stays"]] == [1, 2, 3, 4, 5, 6]
            assert (found["newest"], found["latest"], found["problems"]) == (6, 6, [])


def test_a_policy_by_the_clock_saves_on_though_the_clock_goes_back(trial, zygote, ram_path):
    """It measures with a clock that cannot be set."""
    save = {"every_seconds": 1e-6}
    with trial("30", "SavePolicy(every_seconds), back by 400 days"):
        days = [0, -400, -400, 400, 0, 0]
        found = zygote.run(children.save_with_clock, ram_path, days, {}, save)
        assert found["stays"][-1] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("ahead", "behind"), [(0, 0), (400, 0), (0, -400), (0, 400), (-400, 0)])
def test_a_reader_whose_clock_is_wrong(trial, zygote, ram_path, ahead, behind):
    """It reads what it holds, or hears that it is gone; when it lets go the step is deleted."""
    with trial("30", f"a reader {ahead} days from now, its writer {behind}"):
        found = zygote.run(children.read_with_clock, ram_path, ahead, behind)
        assert found["held"] == [1]
        # A lease that expired long ago holds nothing, nor one that expires much too late. That the
        # writer's clock was set meanwhile changes nothing: another of its clocks cannot be set.
        is_held = ahead == 0
        assert found["steps"] == ([1, 2] if is_held else [2])
        assert found["read"] == (1 if is_held else "not found")
        assert found["after"] == [3]


def test_the_control_of_clocks_sees_an_order_by_time(zygote, ram_path):
    """A control: were the newest that which was saved last by the clock, it would be another."""
    days = DAYS["back by 400 days"]
    zygote.run(children.save_with_clock, ram_path, days, {})

    files = {step: ram_path / str(step) / names.CHECKPOINT_METADATA for step in range(1, 7)}
    times = {
        step: step_format.decode(file.read_bytes(), file=str(file)).commit_ns
        for step, file in files.items()
    }

    assert max(times, key=times.get) == 2
