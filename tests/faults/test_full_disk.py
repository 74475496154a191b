"""A full disk: the error says so, nothing is lost, and saving resumes once there is room."""

from __future__ import annotations

import contextlib
import subprocess

import pytest

from jaxckpt.format import names
from tests.faults import full_children as children

LEVELS = 24
ROOMS = [1.2, 1.4, 1.9, 2.4]  # checkpoints, beside the two that are kept


@pytest.fixture
def tmpfs(tmp_path):
    """A small file system of its own."""
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def run(zygote, function, *args):
    """Runs a child; what it failed with is an AssertionError."""
    zygote.start(function, *args)
    return zygote.answers()[0]


def fill(zygote, place, real, trial, row):
    for level in range(LEVELS):
        with trial(row, f"level {level} of {LEVELS}"), a_run(zygote, place, real) as (top, size):
            room = int((level + 0.5) / LEVELS * 0.98 * size)
            [said] = run(zygote, children.fill_up, top, real, room)
            assert said["raised"] == ["SaveFailed", "SaveFailed"]


def come_and_go(zygote, place, real, trial, row):
    for room in ROOMS:
        with (
            trial(row, f"in the same process, room for {room} more"),
            a_run(zygote, place, real) as (top, size),
        ):
            run(zygote, children.be_short_for_a_while, top, real, int(room * size), size)
            [said] = run(zygote, children.save_in, top, real, int(room * size), 3)
            assert len(said["steps"]) == 2


@contextlib.contextmanager
def a_run(zygote, place, real):
    """Yields a directory with a run of two steps in it, and the size of one."""
    top = place / "disk"
    top.mkdir()
    [said] = run(zygote, children.start_run, top, real)
    try:
        yield top, said["size"]
    finally:
        subprocess.run(["rm", "-r", top], check=True)


def test_a_save_on_a_full_disk(zygote, ram_path, trial):
    """With any room: it raises, leaves nothing, and with enough room the next save works."""
    fill(zygote, ram_path, False, trial, "10")


@pytest.mark.faults_root
def test_a_save_on_a_full_tmpfs(zygote, tmpfs, trial):
    """The same on a file system of the kernel's."""
    fill(zygote, tmpfs, True, trial, "10r")


def test_a_disk_that_is_full_for_a_while(zygote, ram_path, trial):
    """Saves fail, then work again by themselves with little more room than one save needs."""
    come_and_go(zygote, ram_path, False, trial, "10")


@pytest.mark.faults_root
def test_a_tmpfs_that_is_full_for_a_while(zygote, tmpfs, trial):
    """The same on a file system of the kernel's; again after a restart."""
    come_and_go(zygote, tmpfs, True, trial, "10r")
    come_and_go(zygote, tmpfs, True, trial, "10r")


@pytest.mark.parametrize("room", ROOMS)
def test_a_process_that_dies_on_a_full_disk(zygote, ram_path, trial, room):
    """After any number of deaths: each start first removes the leftovers, and then has room."""
    with a_run(zygote, ram_path, False) as (top, size):
        for n in (9, 12, 15):
            assert run(zygote, children.die_full, top, int(0.9 * size), n) == []
        left = [entry for entry in (top / "run").iterdir() if names.is_temporary(entry.name)]
        assert len(left) == 1
        with trial("10", f"after three deaths, room for {room} more"):
            [said] = run(zygote, children.save_in, top, False, int(room * size), 3)
            assert len(said["steps"]) == 2


WAYS = ["gc", "rm", "delete", "move", "owner"]


def free(zygote, place, real, trial, row):
    for how in WAYS:
        with trial(row, f"{how} with no room at all"), a_run(zygote, place, real) as (top, _):
            assert run(zygote, children.make_room, top, real, how) == [{"done": True}]


def test_a_disk_without_any_room_can_be_cleared(zygote, ram_path, trial):
    """Commands and a manager delete steps there, and a job that starts again restores."""
    free(zygote, ram_path, False, trial, "44")


@pytest.mark.faults_root
def test_a_tmpfs_without_any_room_can_be_cleared(zygote, tmpfs, trial):
    """The same on a file system of the kernel's."""
    free(zygote, tmpfs, True, trial, "44r")


def test_the_room_of_the_shim_is_what_it_says(zygote, ram_path):
    """A control: three blocks, of which what is deleted or replaced can be used again."""
    [said] = run(zygote, children.room_is_what_it_says, ram_path)

    full, block = "No space left on device", children.BLOCK
    assert said["said"] == [2 * block, block, full, None, None, full, None, 2 * block]


def test_the_trials_see_what_a_failed_save_leaves(zygote, ram_path):
    """A control: a manager that does not clear up is caught."""
    with (
        a_run(zygote, ram_path, False) as (top, size),
        pytest.raises(AssertionError, match="takes room"),
    ):
        run(zygote, children.keep_quiet, top, size // 2)
