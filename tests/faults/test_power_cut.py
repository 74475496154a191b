"""Real file systems lose power in the middle of a run: no acknowledged step is lost.

The file system is in an image. ext4 and XFS are cut with the ioctl of xfstests that stops all
writes at once and flushes no log. btrfs has no such ioctl, so its image is copied while mounted.
The test always mounts a copy afterwards, since another mount namespace may hold the first mount.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import struct
import subprocess
import time
from pathlib import Path

import pytest

from tests.faults import power_children as children
from tests.waiting import stop_process

pytestmark = pytest.mark.faults_root

_GOING_DOWN = 0x8004587D  # _IOR('X', 125, __u32), of XFS and ext4
_NO_LOG_FLUSH = 2
# Size of an image, how it is made, and how a copy of it is mounted beside the first.
SYSTEMS = {
    "ext4": (96 << 20, ["mkfs.ext4", "-q", "-F"], "loop"),
    "xfs": (320 << 20, ["mkfs.xfs", "-q", "-f"], "loop,nouuid"),
    "btrfs": (160 << 20, ["mkfs.btrfs", "-q", "-f"], "loop"),
}


class Disk:
    """An image with a mounted file system, whose power may be cut."""

    def __init__(self, directory, system):
        self._size, self._make, self._options = SYSTEMS[system]
        self._system = system
        self._image = Path(directory, "image")
        self.mount = Path(directory, "mount")
        self.mount.mkdir()
        with self._image.open("wb") as file:
            file.truncate(self._size)
        run(*self._make, self._image)
        run("mount", "-t", system, "-o", "loop", self._image, self.mount)

    def cut(self, zygote, child):
        """Cuts the power under a child, and gives it back; returns what the child said."""
        copy = self._image.with_name("copy")
        if self._system == "btrfs":
            stop_process(child)
            run("cp", "--sparse=always", self._image, copy)
        else:
            going_down(self.mount)
        with contextlib.suppress(ProcessLookupError):  # the errors of the cut may have ended it
            os.kill(child, signal.SIGKILL)
        said = []
        while "status" not in (word := zygote.answer()):
            said.append(word)
        if self._system != "btrfs":
            run("cp", "--sparse=always", self._image, copy)
        run("umount", self.mount)
        run("mount", "-t", self._system, "-o", self._options, copy, self.mount)
        return said

    def close(self):
        subprocess.run(["umount", "-l", self.mount], check=False, capture_output=True)


def run(*words):
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"


def going_down(mount):
    fd = os.open(mount, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _GOING_DOWN, struct.pack("I", _NO_LOG_FLUSH))
    finally:
        os.close(fd)


@pytest.fixture
def make_disk(ram_path):
    """Makes disks of a file system; skips the test where there cannot be any."""
    with contextlib.ExitStack() as stack:

        def make(system):
            if shutil.which(SYSTEMS[system][1][0]) is None:
                pytest.skip(f"{SYSTEMS[system][1][0]} is not installed")
            directory = ram_path / os.urandom(4).hex()
            directory.mkdir()
            try:
                disk = Disk(directory, system)
            except AssertionError as error:
                pytest.skip(f"no {system} in a loop device here: {error}")
            stack.callback(disk.close)
            return disk

        yield make


def cut_at_random(zygote, disk, dice, **options):
    """Lets a run save, cuts the power, and returns what was acknowledged and what is found."""
    root = disk.mount / "run"
    root.mkdir()
    run("sync", "-f", disk.mount)
    child = zygote.start(children.save_for_ever, root, **options)
    for _ in range(3):
        acked = zygote.answer()["acked"]
    time.sleep(dice.uniform(0, 1.5))  # not a wait for anything: the moment is what varies
    words = disk.cut(zygote, child)
    acked = max([acked, *(word["acked"] for word in words)])
    return acked, zygote.run(children.check_run, root)


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(("system", "cuts"), [("ext4", 6), ("xfs", 6), ("btrfs", 3)])
def test_a_power_cut_loses_no_acknowledged_step(trial, zygote, make_disk, system, cuts, part):
    """The newest one restores bit for bit, all that are listed do, and the next save works."""
    dice = random.Random(f"{system} {part}")
    for number in range(cuts):
        disk = make_disk(system)
        with trial("8", f"{system}, cut {part}/{number}"):
            acked, found = cut_at_random(zygote, disk, dice)
            assert found is not None
            assert found["newest"] in (acked, acked + 1)
            assert found["newest"] == found["steps"][-1]
            assert found["left"] == []
        disk.close()


@pytest.mark.parametrize("system", ["ext4", "xfs"])
def test_a_power_cut_takes_what_was_not_synced(zygote, make_disk, system):
    """A control: the same run without any fsync loses acknowledged steps."""
    dice, kept = random.Random(0), 0
    for _ in range(3):
        disk = make_disk(system)
        with contextlib.suppress(AssertionError):  # of the child: a step that is listed is damaged
            acked, found = cut_at_random(zygote, disk, dice, durable=False)
            kept += found["newest"] in (acked, acked + 1)
        disk.close()

    assert kept == 0
