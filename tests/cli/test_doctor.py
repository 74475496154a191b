"""`jaxckpt doctor` of a local path: what works there, and nothing remains."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxckpt.cli._checks import clock
from jaxckpt.cli._folder_checks import FolderLocation
from jaxckpt.storage import LocalStorage
from jaxckpt.storage._mounts import find_mounts, mounts
from tests.commandline import TIMEOUT_S, cli, said_json
from tests.waiting import wait_until

CHECKS = [
    *("file system", "free space", "write", "fsync", "create again", "exchange", "locks"),
    *("hard links", "write 64 MiB", "read 64 MiB", "small read", "clock", "delete"),
]
TABLE = """\
20 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
21 20 0:20 / /dev/shm rw shared:3 - tmpfs tmpfs rw
30 20 0:39 / /mnt/s3fs rw,nosuid - fuse.s3fs s3fs rw,user_id=0
31 20 0:40 / /mnt/a\\040b rw master:2 propagate_from:1 - fuse.gcsfuse bucket rw
32 20 0:41 / /mnt/mountpoint rw - fuse mountpoint-s3 rw
33 20 0:42 / /mnt/rclone ro shared:4 master:1 - fuse.rclone remote:path ro
34 20 0:43 / /mnt/juicefs rw - fuse.juicefs JuiceFS:name rw
35 20 0:44 / /mnt/sshfs rw - fuse.sshfs host:/s3fs rw
36 20 0:45 / /data rw - nfs4 server:/fuse.s3fs rw
37 36 0:46 / /data rw - xfs fuse rw
"""


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("folder", ["tmp_path", "ram_path"])
def test_a_local_path_passes(request, folder, is_there):
    """On a disk and in memory, also if the path is still to be made; nothing remains."""
    root = request.getfixturevalue(folder)
    (root / "notes").write_text("x")
    path = root if is_there else root / "runs" / "new"

    code, found = said_json("doctor", path)

    assert [check["name"] for check in found["checks"]] == CHECKS
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert {name: s for name, s in states.items() if s not in ("ok", "slow", "missing")} == {}
    assert (code, found["ok"], found["path"]) == (0, True, str(path))
    assert os.listdir(root) == ["notes"]


def test_a_place_that_cannot_be_written_to():
    """The checks that need a file are skipped."""
    code, found = said_json("doctor", "/proc/runs")

    states = {check["name"]: check["state"] for check in found["checks"]}
    assert (code, found["ok"]) == (1, False)
    assert states["write"] == "failed"
    assert {states[name] for name in ("fsync", "locks", "read 64 MiB", "delete")} == {"skipped"}


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.EACCES, "ls -ld"), (errno.EROFS, "read-only"), (errno.ENOSPC, "make room")],
)
def test_an_error_has_an_advice(tmp_path, code, words):
    """By its number."""
    assert words in FolderLocation(LocalStorage(), str(tmp_path)).advice(
        "write", OSError(code, "text")
    )


def test_ctrl_c_leaves_nothing(tmp_path):
    """What is being written is finished and deleted."""
    program = """if True:
        import os, signal, sys
        from jaxckpt.cli import main
        from jaxckpt.storage import LocalStorage
        from tests.waiting import wait_until
        # A shell starts what runs in its background with the signal ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        def link(*_):  # waits, so that the command has not ended before
            wait_until(lambda: os.path.exists(sys.argv[2]))
        LocalStorage.link = link
        sys.exit(main(["doctor", sys.argv[1]]))
    """
    (root := tmp_path / "root").mkdir()
    command = [sys.executable, "-c", program, str(root), str(tmp_path / "interrupted")]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], **pipes) as program:
        wait_until(lambda: os.listdir(root) or program.poll() is not None)
        program.send_signal(signal.SIGINT)
        (tmp_path / "interrupted").touch()
        _, err = program.communicate(timeout=TIMEOUT_S)

    assert (program.returncode, err) == (130, b"\nInterrupted.\n")
    assert os.listdir(root) == []


def test_a_file_is_wrong_usage(tmp_path):
    """Nothing is tried at a file, or below one."""
    (tmp_path / "file").write_text("x")

    for path in ("file", "file/run"):
        code, out, err = cli("doctor", tmp_path / path)
        assert (code, out) == (2, "")
        assert f"{tmp_path / 'file'}: Not a directory" in err


@pytest.mark.parametrize(
    ("minor", "point", "kind", "is_bucket"),
    [
        (20, "/dev/shm", "tmpfs", False),
        (39, "/mnt/s3fs", "fuse.s3fs", True),
        (40, "/mnt/a b", "fuse.gcsfuse", True),
        (41, "/mnt/mountpoint", "fuse", True),
        (42, "/mnt/rclone", "fuse.rclone", True),
        (43, "/mnt/juicefs", "fuse.juicefs", False),
        (44, "/mnt/sshfs", "fuse.sshfs", False),
        (45, "/data", "nfs4", False),
        (46, "/data", "xfs", False),
    ],
)
def test_a_bucket_that_is_mounted_is_recognized(minor, point, kind, is_bucket):
    """By its type, whatever it is called."""
    mount = find_mounts(TABLE)[os.makedev(0, minor)]

    assert mount == (kind, point)
    assert mount.is_bucket == is_bucket


def test_the_file_system_of_a_path_is_found():
    """In the table of this system, where there is one."""
    mount = mounts().get(os.stat("/dev/shm").st_dev)

    assert mount is not None
    assert Path(mount.point).is_dir()


def test_a_clock_that_differs_is_found():
    """By more than a minute, in either direction."""
    assert [clock(skew_s).state for skew_s in (-61, -1, 0, 59, 3600)] == [
        *("failed", "ok", "ok", "ok", "failed")
    ]
