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
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import jaxckpt
from jaxckpt.errors import StepExists, UnsupportedFormat
from jaxckpt.storage import _storage_on, locate
from tests.storage_contract import StorageContract
from tests.stores.servers import ACCESS_KEY, SECRET_KEY

_numbers = itertools.count()
_START_TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def mount(moto_server, tmp_path_factory):
    """The directory of a mounted bucket."""
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
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not os.path.ismount(folder):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.skip("s3fs cannot mount here")
            time.sleep(0.05)
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)
        process.terminate()
        process.wait()
        _storage_on.cache_clear()  # the next mount may have the same number


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


@pytest.mark.slow
def test_a_writer_killed_between_files_leaves_no_step(root):
    """Only whole steps are listed, and the next job needs no help.

    A control: some are killed before a commit, and some after.
    """
    seen = set()
    for after in (5, 10, 18, 23):
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
