"""Runs in forked children on a full disk: one simulated by the shim, or a real one that they fill.

The run is in the directory `run` of the disk, and keeps two steps.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
from pathlib import Path

from tests.faults.children import tree
from tests.faults.error_children import (
    check_error,
    check_run,
    committed,
    open_run,
    save_next_step,
)
from tests.faults.zygote import arm, disarm, leave_room, say

BLOCK = 4096
LOTS = 1 << 40


class Disk:
    """A disk, and something else on it, which takes what room is not to be left.

    Attributes:
        real: Whether it is a file system of its own, which has a size.
    """

    def __init__(self, top, real):
        self.top, self.root, self.real = Path(top), Path(top, "run"), real

    def leave(self, size):
        """From now on there is room for so many bytes more than there are in the run."""
        if self.real:
            other = self.top / "other"
            other.unlink(missing_ok=True)
            with other.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, self._free() - size))
        else:
            arm(self.root)
            leave_room(size)

    def free(self):
        """The other thing is gone: there is room for all."""
        if self.real:
            (self.top / "other").unlink(missing_ok=True)
        else:
            disarm()

    def _free(self):
        status = os.statvfs(self.top)
        return status.f_bavail * status.f_frsize

    def used(self):
        """Returns the space that the run takes."""
        if not self.real:
            return sum(map(_blocks, self.root.rglob("*")))
        other = self.top / "other"
        status = os.statvfs(self.top)
        total = (status.f_blocks - status.f_bfree) * status.f_frsize
        return total - (other.stat().st_blocks * 512 if other.exists() else 0)


def _blocks(path):
    try:
        return BLOCK if path.is_dir() else -(-path.stat().st_size // BLOCK) * BLOCK
    except FileNotFoundError:  # renamed or deleted since the listing
        return 0


def start_run(top, real):
    """A run of two steps; says how much one takes."""
    disk = Disk(top, real)
    with open_run(disk.root) as manager:
        manager.save(1, tree(1)).result()
        manager.wait_until_finished()
        before = disk.used()
        manager.save(2, tree(2)).result()
        manager.wait_until_finished()
        say(size=disk.used() - before)


def fill_up(top, real, room):
    """Saves twice with too little room; then there is enough, and saving resumes.

    Reports the exceptions.
    """
    disk = Disk(top, real)
    with open_run(disk.root) as manager:
        disk.leave(room)
        raised = [try_to_save(disk, manager, 3) for _ in range(2)]
        disk.free()
        save_next_step(manager)
    check_run(disk.root)
    say(raised=raised)


def try_to_save(disk, manager, step):
    """Fails, says so, and takes no room; what is there stays. Returns what was raised."""
    steps, used = committed(disk.root), disk.used()
    raised = error_of(manager.save(step, tree(step)).result)
    manager.wait_until_finished()
    check_error(raised, disk.root)
    assert "No space left" in str(raised)
    assert committed(disk.root) == steps
    assert disk.used() <= used, "what failed takes room"
    return type(raised).__name__


def error_of(do):
    """Returns the exception that the call raises; it must raise."""
    try:
        do()
    except Exception as error:  # judged by the caller
        return error
    raise AssertionError("nothing was raised")


def save_in(top, real, room, saves):
    """Saves so often where there is never more room than this, beside the two that are kept."""
    disk = Disk(top, real)
    disk.leave(room)
    with open_run(disk.root) as manager:
        for _ in range(saves):
            save_next_step(manager)
    disk.free()
    say(steps=committed(disk.root))


def be_short_for_a_while(top, real, room, size):
    """Other files take the room for a while; then the room is back, and saving resumes.

    Args:
        size: Of a checkpoint.
    """
    disk = Disk(top, real)
    with open_run(disk.root) as manager:
        disk.leave(room)
        save_next_step(manager)
        for share in (0.0, 0.4, 0.9):
            disk.leave(int(share * size))
            try_to_save(disk, manager, max(committed(disk.root)) + 1)
        disk.leave(room)
        save_next_step(manager)
        save_next_step(manager)
    disk.free()
    say(steps=committed(disk.root))


def die_full(top, room, n):
    """The disk fills up, and the process dies after so many changes, or when that has failed."""
    root = Path(top, "run")
    manager = open_run(root)
    arm(root, ["kill", n])
    leave_room(room)
    step = max(manager.all_steps()) + 1
    with contextlib.suppress(Exception):
        manager.save(step, tree(step)).result()
    os.kill(os.getpid(), signal.SIGKILL)


def make_room(top, real, how):
    """Nothing fits on the disk, and steps are deleted; then saving works.

    The last job left a half save there, and the run has metadata.

    Args:
        how: "gc" or "rm", the commands; "delete", by a manager; "move", to a directory; "owner", as
            "delete" in a run without an owner's file.
    """
    import jaxckpt
    from jaxckpt.cli import main
    from jaxckpt.format import names

    disk = Disk(top, real)
    root, options = disk.root, {"run_metadata": {"a": 1}}
    half = root / names.temporary("3", "0123456789abcdef")
    half.mkdir()
    (half / names.WRITER).write_text("0123456789abcdef")
    if how == "owner":
        (root / names.OWNER).unlink()
    if how == "move":
        options["keep"] = jaxckpt.KeepPolicy(last=1, move_to="old")
    disk.leave(0)
    if how in ("gc", "rm"):
        command = {"gc": ["gc", root, "--last", "1"], "rm": ["rm", root, "1"]}[how]
        with contextlib.redirect_stdout(io.StringIO()):
            assert main([*map(str, command), "--yes"]) == 0
    else:
        with jaxckpt.CheckpointManager(root, **options) as manager:
            restored, step = manager.restore_or(lambda: tree(0))
            assert (step, restored["seed"]) == (2, 2)
            manager.delete(1)
            known = ("disk is full", names.LEDGER)
            assert [one for one in manager.problems if not any(k in one for k in known)] == []
    assert committed(root) == [2]
    assert not half.exists()
    disk.free()
    for name in ("metadata", "old"):
        shutil.rmtree(root / name, ignore_errors=True)
    check_run(root)
    say(done=True)


def keep_quiet(top, room):
    """A control: what fails is left over."""
    from jaxckpt._disk.by_rename import RenameCommit

    RenameCommit.abort = lambda *_, **__: None
    fill_up(top, False, room)


def room_is_what_it_says(top):
    """A control of the shim: so many bytes fit, no more, and what is deleted can be used again."""
    disk, said = Disk(top, False), []
    disk.root.mkdir()
    disk.leave(3 * BLOCK)

    def attempt(do):
        try:
            said.append(do())
        except OSError as error:
            said.append(error.strerror)

    attempt(lambda: Path(disk.root, "a").write_bytes(b"1" * 2 * BLOCK))
    attempt(lambda: os.write(os.open(disk.root / "b", os.O_WRONLY | os.O_CREAT), b"1" * 2 * BLOCK))
    attempt(lambda: Path(disk.root, "c").mkdir())
    attempt(lambda: Path(disk.root, "b").unlink())
    attempt(lambda: Path(disk.root, "c").mkdir())
    attempt(lambda: Path(disk.root, "d").write_bytes(b"1"))
    attempt(lambda: os.replace(disk.root / "d", disk.root / "a"))
    attempt(lambda: Path(disk.root, "e").write_bytes(b"1" * 2 * BLOCK))
    disarm()
    shutil.rmtree(disk.root)
    say(said=said)
