"""When a save is acknowledged, none of its data or names is still only in a cache."""

from __future__ import annotations

import pytest

from tests.faults import children
from tests.faults.disk import Disk


def test_a_save_is_durable_when_it_returns(zygote, tmp_path, trial):
    """Bytes, files and directories, the missing parents too."""
    log, top = tmp_path / "log", tmp_path / "top"
    disk = Disk(top)
    zygote.run(children.save_below, top, "run/part/a", log)

    disk.play(log)

    assert f"new\t{top}/run/part\t" in log.read_text()
    with trial("6", "a save below directories that are not there"):
        assert disk.unsynced() == (set(), set())


def test_a_replacement_is_durable_when_it_returns(zygote, tmp_path, trial):
    """The exchange of the names, and that the old one is gone."""
    log, path = tmp_path / "log", tmp_path / "top" / "a"
    path.parent.mkdir()
    zygote.run(children.save, path, 1, False)
    disk = Disk(path.parent)
    zygote.run(children.save, path, 2, True, log=log)

    disk.play(log)

    assert "swap\t" in log.read_text()
    with trial("6", "a replacement"):
        assert disk.unsynced() == (set(), set())


def test_the_lint_sees_what_is_not_synced(zygote, tmp_path):
    """A control: without syncs of directories the names are not durable, and it says so."""
    log, path = tmp_path / "log", tmp_path / "top" / "a"
    path.parent.mkdir()
    disk = Disk(path.parent)
    zygote.run(children.save_unsynced, path, log)

    _, names = disk.play(log).unsynced()

    assert {str(path), f"{path}/commit_success.txt", f"{path}/state"} <= names


def test_the_lint_sees_bytes_that_are_not_synced(zygote, tmp_path):
    """A control: a file written plainly is bytes and a name at risk, and an fsync helps one."""
    log, root = tmp_path / "log", tmp_path / "top"
    root.mkdir()
    disk = Disk(root)
    zygote.run(children.write_plainly, root, log)

    files, names = disk.play(log).unsynced()

    assert files == {f"{root}/moved"}
    assert names == {f"{root}/{name}" for name in ("moved", "synced")}


@pytest.mark.multihost
def test_a_save_of_two_processes_is_durable_when_it_returns(run_processes, zygote, tmp_path, trial):
    """Each process syncs its own share before it says that it has written it."""
    (tmp_path / "top").mkdir()
    run_processes(
        "saves:save_logged",
        count=2,
        devices_per_process=2,
        args=[tmp_path / "top" / "new" / "a", tmp_path],
        fresh=True,
        env={"LD_PRELOAD": str(zygote.shim)},
    )

    for name in ("0.log", "1.log"):
        disk = Disk(tmp_path / "before", shared=True)
        disk.root = str(tmp_path / "top")
        with trial("6", f"a save of two processes, {name}"):
            assert disk.play(tmp_path / name).unsynced() == (set(), set())
    assert "state/d/" in (tmp_path / "1.log").read_text()
