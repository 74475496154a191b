"""A bucket that s3fs mounts as a directory is a store, although its paths are local."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import jaxckpt
from jaxckpt._disk.data_files import DataFiles
from jaxckpt.errors import SaveFailed, StepExists, StoreError, UnsupportedFormat
from jaxckpt.storage import _settings, _storage_on, locate
from tests.storage_contract import StorageContract
from tests.stores.servers import ACCESS_KEY, SECRET_KEY
from tests.waiting import stop_process, wait_until, waited_until

_numbers = itertools.count()
_START_TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def mounted(moto_server, tmp_path_factory):
    """The directory of a mounted bucket, and the process that answers for it."""
    if shutil.which("s3fs") is None or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs s3fs, and /dev/fuse to mount it")
    folder = tmp_path_factory.mktemp("mount")
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{ACCESS_KEY}:{SECRET_KEY}\n")
    keys.chmod(0o600)
    options = f"passwd_file={keys},url={moto_server.url},endpoint=us-east-1,use_path_request_style"
    bucket = moto_server.with_new_bucket().bucket
    process = subprocess.Popen(["s3fs", bucket, str(folder), "-f", "-o", options])
    try:

        def is_there_or_ended():
            return os.path.ismount(folder) or process.poll() is not None

        waited_until(is_there_or_ended, limit_s=_START_TIMEOUT_S)
        if not os.path.ismount(folder):
            pytest.skip("s3fs cannot mount here")
        yield folder, process
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)
        process.terminate()
        process.wait()
        _storage_on.cache_clear()  # the next mount may have the same number


@pytest.fixture(scope="module")
def mount(mounted):
    return mounted[0]


@pytest.fixture
def stop(mounted, monkeypatch):
    """A function that makes the file system hang until the end of the test, with a short limit."""
    process = mounted[1]

    def stop():
        monkeypatch.setitem(_settings._given, "file://", jaxckpt.StoreSettings(timeout_s=0.5))
        stop_process(process.pid)

    yield stop
    process.send_signal(signal.SIGCONT)
    _wait_for_calls(mounted[0])


def _wait_for_calls(mount):
    """Waits until the calls that were left behind have returned."""
    limited: Any = locate(mount)[0]
    wait_until(lambda: not limited._hanging)


@pytest.fixture
def root(mount):
    path = mount / f"runs {next(_numbers)}"
    path.mkdir()
    return path


def tree(step):
    return {"large": np.full(1 << 17, step, np.float32), "small": np.arange(5), "step": step}


def is_tree(found, step):
    wanted = tree(step)
    return found.keys() == wanted.keys() and all(
        np.asarray(found[name]).tobytes() == np.asarray(wanted[name]).tobytes() for name in wanted
    )


class TestS3fs(StorageContract):
    @pytest.fixture
    def storage(self, root):
        return locate(root)[0]

    @pytest.fixture
    def root(self, mount):
        path = mount / f"contract {next(_numbers)}"
        path.mkdir()
        return str(path)

    def test_a_reader_sees_whole_files(self, storage, root):
        """Under s3fs the name of a file may be gone for a moment while the file is replaced."""
        storage.write(f"{root}/f", b"a" * 10_000)
        seen = []

        with ThreadPoolExecutor(1) as pool:
            written = [
                pool.submit(storage.write, f"{root}/f", one * 10_000) for one in (b"b", b"c")
            ]
            while not written[-1].done():
                with contextlib.suppress(FileNotFoundError):
                    seen.append(storage.read(f"{root}/f", max_bytes=1 << 20))

        assert all(one.result() is None for one in written)
        assert all(len(data) == 10_000 and len(set(data)) == 1 for data in seen)
        assert storage.read(f"{root}/f", max_bytes=1 << 20) == b"c" * 10_000


def test_a_checkpoint_is_saved_once(root, caplog):
    """It is restored and verified, and not replaced; that it is in a bucket is told once."""
    caplog.set_level(logging.INFO, "jaxckpt")
    _storage_on.cache_clear()

    jaxckpt.save(root / "a", tree(1))

    assert is_tree(jaxckpt.restore(root / "a"), 1)
    assert jaxckpt.verify(root / "a").ok
    told = [record.getMessage() for record in caplog.records if "mounted" in record.getMessage()]
    assert len(told) == 1
    assert "(fuse.s3fs)" in told[0]
    with pytest.raises(StepExists, match="delete it first"):
        jaxckpt.save(root / "a", tree(2))
    with pytest.raises(UnsupportedFormat, match="overwrit"):
        jaxckpt.save(root / "a", tree(2), overwrite=True)
    assert is_tree(jaxckpt.restore(root / "a"), 1)
    assert not [name for name in os.listdir(root) if name != "a"]


def test_a_run_keeps_its_last_steps(root):
    """Deleted steps leave nothing, and the next job goes on."""
    for steps in ((1, 2, 3), (4, 5)):
        with jaxckpt.CheckpointManager(root, keep=jaxckpt.KeepPolicy(last=2)) as manager:
            assert steps[0] == 1 or is_tree(manager.restore(), 3)
            for step in steps:
                manager.save(step, tree(step))
        assert not manager.problems

    assert {name for name in os.listdir(root) if name.isdecimal()} == {"4", "5"}
    with jaxckpt.CheckpointManager(root, mode="r") as manager:
        assert manager.all_steps() == [4, 5]
        assert is_tree(manager.restore(), 5)


CALLS = {
    "save": lambda root: jaxckpt.save(root / "b", tree(2)),
    "save_async": lambda root: jaxckpt.save_async(root / "b", tree(2)).result(),
    "restore": lambda root: jaxckpt.restore(root / "a"),
    "open": lambda root: jaxckpt.open(root / "a"),
    "manager": lambda root: jaxckpt.CheckpointManager(root / "run").close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_mount_that_hangs_raises(root, mounted, stop, monkeypatch, call):
    """The error names what waits for what; the next call works when the mount answers again."""
    jaxckpt.save(root / "a", tree(1))
    stop()

    with pytest.raises(StoreError, match=r"has not returned for .* does not answer"):
        CALLS[call](root)

    mounted[1].send_signal(signal.SIGCONT)
    monkeypatch.delitem(_settings._given, "file://")
    _wait_for_calls(root)
    jaxckpt.save(root / "c", tree(3))
    assert is_tree(jaxckpt.restore(root / "a"), 1)


def test_a_manager_reports_a_mount_that_hangs(root, stop):
    """At the next call; when the mount answers again, the steps are those that were committed."""
    with jaxckpt.CheckpointManager(root) as manager:
        manager.save(1, tree(1))
        manager.wait_until_finished()
        stop()
        manager.save(2, tree(2))
        with pytest.raises(SaveFailed, match=r"StoreError: .*does not answer"):
            manager.wait_until_finished()


def test_a_mount_that_hangs_while_arrays_are_written_raises(root, stop, monkeypatch):
    """The threads that write them stay behind then.

    It hangs once the directory is made, a moment that only `DataFiles` knows.
    """
    real = DataFiles._counted

    def counted(self, file):
        stop()
        return real(self, file)

    monkeypatch.setattr(DataFiles, "_counted", counted)

    with pytest.raises(SaveFailed, match=r"StoreError: .*/d/\w+: write has not returned"):
        jaxckpt.save(root / "a", tree(1))


def test_a_program_ends_although_its_mount_hangs(root, stop):
    """With the error, and without waiting for the threads that were left behind."""
    jaxckpt.save(root / "a", tree(1))
    program = (
        "import jaxckpt\n"
        "jaxckpt.use_store('file://', jaxckpt.StoreSettings(timeout_s=0.5))\n"
        "input()\n"
        f"jaxckpt.restore({str(root / 'a')!r})\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    stop()

    _, said = child.communicate("\n", timeout=60)

    assert "jaxckpt.errors.StoreError" in said
    assert child.returncode == 1


@pytest.mark.slow
def test_a_writer_killed_between_files_leaves_no_step(root):
    """Only whole steps are listed, and the next job needs no help.

    A control: some are killed before a commit, and some after.
    """
    seen = set()
    for after in (5, 10, 18, 27):
        run = root / str(after)
        child = subprocess.run(
            [sys.executable, "-m", "tests.stores.test_mounts", str(run), str(after)], check=False
        )
        assert child.returncode == -signal.SIGKILL

        with jaxckpt.CheckpointManager(run) as manager:
            steps = manager.all_steps()
            assert steps in ([], [1], [1, 2])
            assert all(is_tree(manager.restore(step=step), step) for step in steps)
            for step in range(len(steps) + 1, 4):
                manager.save(step, tree(step))
        assert is_tree(jaxckpt.restore(run), 3)
        seen.add(len(steps))

    assert seen == {0, 1, 2}


def _save_and_die(run, after):
    """Saves two steps, and is killed before the change of that number."""
    from jaxckpt.testing import _storage

    changes = itertools.count()

    def before(self, verb, path, data=b""):
        if verb in _storage.MUTATING_VERBS and next(changes) == after:
            os.kill(os.getpid(), signal.SIGKILL)

    relay = type("Relay", (_storage._Relay,), {"_before": before})
    with contextlib.closing(jaxckpt.CheckpointManager(run)) as manager:
        manager._index.storage = relay(manager._index.storage)
        for step in (1, 2):
            manager.save(step, tree(step))


if __name__ == "__main__":
    _save_and_die(sys.argv[1], int(sys.argv[2]))
