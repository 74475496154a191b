"""When a save is acknowledged, no byte and no name of it waits in a cache to be written."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.faults.zygote import Zygote

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="the shim is compiled with gcc"),
]


class Disk:
    """What a power cut could take, after the changes of a log: a model of strict POSIX.

    A sync of a file covers its bytes, not its name; a sync of a directory covers the names in it,
    not what they name.
    """

    def __init__(self):
        self.files = set()  # with bytes that were not synced
        self.names = set()  # made, moved or removed, not synced

    def play(self, log):
        for line in log.read_text().splitlines():
            what, path, other = line.split("\t")
            getattr(self, f"_{what}")(*([path, other] if other else [path]))
        return self

    def _new(self, path):
        self.names.add(path)

    def _write(self, path):
        self.files.add(path)

    def _sync(self, path):
        self.files.discard(path)
        self.names = {name for name in self.names if os.path.dirname(name) != path}

    def _gone(self, path):
        self.files.discard(path)
        self.names = {name for name in self.names if os.path.dirname(name) != path} | {path}

    def _link(self, path, other):
        self.names.add(other)
        if path in self.files:
            self.files.add(other)

    def _move(self, path, other):
        self._gone(other)
        self._rename(lambda name: moved(name, path, other))
        self.names |= {path, other}

    def _swap(self, path, other):
        self._rename(lambda name: moved(name, path, other) or moved(name, other, path))
        self.names |= {path, other}

    def _rename(self, new_name):
        self.files = {new_name(name) or name for name in self.files}
        self.names = {new_name(name) or name for name in self.names}


def moved(name, old, new):
    """What `name` is called when `old` is called `new`; None if that does not change it."""
    if name == old or name.startswith(old + "/"):
        return new + name[len(old) :]
    return None


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    with Zygote(tmp_path_factory.mktemp("zygote")) as started:
        yield started


def test_a_save_is_durable_when_it_returns(zygote, tmp_path):
    """Bytes, files and directories, the missing parents too."""
    log = tmp_path / "log"
    zygote.run("save_below", tmp_path / "top", "run/part/a", log)

    disk = Disk().play(log)

    assert f"new\t{tmp_path}/top/run/part\t" in log.read_text()
    assert (disk.files, disk.names) == (set(), set())


def test_a_replacement_is_durable_when_it_returns(zygote, tmp_path):
    """The exchange of the names, and that the old one is gone."""
    log, path = tmp_path / "log", tmp_path / "top" / "a"
    path.parent.mkdir()
    zygote.run("save", path, 1, False, 0, None)
    zygote.run("save", path, 2, True, 0, log)

    disk = Disk().play(log)

    assert "swap\t" in log.read_text()
    assert (disk.files, disk.names) == (set(), set())


def test_the_lint_sees_what_is_not_synced(zygote, tmp_path):
    """A control: without syncs of directories the names are not durable, and it says so."""
    log, path = tmp_path / "log", tmp_path / "top" / "a"
    path.parent.mkdir()
    zygote.run("save_unsynced", path, log)

    disk = Disk().play(log)

    assert {str(path), f"{path}/commit_success.txt", f"{path}/state"} <= disk.names


def test_the_lint_sees_bytes_that_are_not_synced(zygote, tmp_path):
    """A control: a file written plainly is bytes and a name at risk, and an fsync helps one."""
    log, root = tmp_path / "log", tmp_path / "top"
    root.mkdir()
    zygote.run("write_plainly", root, log)

    disk = Disk().play(log)

    assert disk.files == {f"{root}/moved"}
    assert disk.names == {f"{root}/{name}" for name in ("plain", "moved", "synced")}


@pytest.mark.multihost
def test_a_save_of_two_processes_is_durable_when_it_returns(run_processes, zygote, tmp_path):
    """Each process syncs its own share before it says that it has written it."""
    (tmp_path / "top").mkdir()
    run_processes(
        "saves:save_logged",
        count=2,
        devices_per_process=2,
        args=[tmp_path / "top" / "new" / "a", tmp_path],
        env={"LD_PRELOAD": str(zygote.shim)},
    )

    for name in ("0.log", "1.log"):
        disk = Disk().play(tmp_path / name)
        assert (disk.files, disk.names) == (set(), set())
    assert "ocdbt.process_1/d/" in (tmp_path / "1.log").read_text()
