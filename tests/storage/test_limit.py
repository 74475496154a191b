"""A file system that hangs raises in whoever waits for it, and is used again when it answers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import jaxckpt
from jaxckpt import storage
from jaxckpt.errors import SaveFailed, StoreError
from jaxckpt.storage import LocalStorage, _limit, _settings
from jaxckpt.storage._arrays import _wait
from jaxckpt.storage._limit import Call, LimitedStorage
from jaxckpt.storage._mounts import Mount
from jaxckpt.testing._storage import _Relay
from tests.waiting import wait_until

TREE = {"w": np.arange(1 << 16, dtype=np.float32), "step": 3}
NFS = Mount("nfs4", "/mnt/nfs")
PATIENCE_S = 60.0


class Hanging(_Relay):
    """A storage in which one verb does not return until `answer` is called."""

    def __init__(self, inner):
        super().__init__(inner)
        self.verb, self.seen = "", set()
        self._answers = threading.Event()

    def answer(self):
        self.verb = ""
        self._answers.set()

    def _before(self, verb, path, data=b""):
        self.seen.add(verb)
        if verb == self.verb:
            self._answers.wait(PATIENCE_S)


@pytest.fixture
def set_limit(monkeypatch):
    """Sets how long calls are waited for."""

    def set_limit(timeout_s):
        settings = jaxckpt.StoreSettings(timeout_s=timeout_s)
        monkeypatch.setitem(_settings._given, "file://", settings)

    return set_limit


@pytest.fixture
def mount(monkeypatch, set_limit):
    """Makes local paths a mount that hangs in a verb; it answers at the end of the test."""
    made = []

    def mount(verb=""):
        hanging = Hanging(LocalStorage())
        hanging.verb = verb
        limited = LimitedStorage(hanging, NFS)
        made.append((hanging, limited))
        set_limit(0.1 if verb else PATIENCE_S)
        monkeypatch.setattr(storage, "_storage_on", lambda device: limited)
        return hanging, limited

    yield mount
    for hanging, limited in made:
        hanging.answer()
        wait_until(lambda limited=limited: not limited._hanging)


def save_in_a_run(root):
    manager = jaxckpt.CheckpointManager(root / "run")
    try:
        manager.save(2, TREE)
        manager.wait_until_finished()
    finally:
        manager.close()


def restore_a_run(root):
    with jaxckpt.CheckpointManager(root / "run", mode="r") as manager:
        manager.restore()


CALLS = {
    "save": lambda root: jaxckpt.save(root / "b", TREE),
    "save_async": lambda root: jaxckpt.save_async(root / "b", TREE).result(),
    "replace": lambda root: jaxckpt.save(root / "a", TREE, overwrite=True),
    "manager.save": save_in_a_run,
    "manager.restore": restore_a_run,
    "restore": lambda root: jaxckpt.restore(root / "a"),
    "open": lambda root: jaxckpt.open(root / "a"),
    "convert": lambda root: jaxckpt.convert(root / "a", root / "c"),
    "diff": lambda root: jaxckpt.diff(root / "a", root / "run" / "1"),
}
# What is removed after a commit, or after a read, may stay until the next save.
MAY_HANG_UNSEEN = {"delete"}


@pytest.mark.faults
@pytest.mark.parametrize("name", CALLS)
def test_every_verb_that_hangs_raises(ram_path, mount, name):
    """In each call that uses it, and the error names the path and the file system."""
    watched, _ = mount()
    _prepare(ram_path / "all")
    watched.seen.clear()
    CALLS[name](ram_path / "all")
    verbs = watched.seen - MAY_HANG_UNSEEN
    if name == "replace":
        verbs -= {"rename"}  # of the old checkpoint, which is deleted later then

    for verb in sorted(verbs):
        root = ram_path / verb
        mount()
        _prepare(root)
        mount(verb)

        hangs = pytest.raises((StoreError, SaveFailed), match=r"on .*: the nfs4 .* does not answer")
        with hangs as caught:
            CALLS[name](root)
        assert StoreError in (type(caught.value), type(caught.value.__cause__))

    assert verbs


def _prepare(root):
    jaxckpt.save(root / "a", TREE)
    with jaxckpt.CheckpointManager(root / "run") as manager:
        manager.save(1, TREE)


def test_verify_reports_a_mount_that_hangs(tmp_path, mount):
    """As it reports other errors of reading."""
    jaxckpt.save(tmp_path / "a", TREE)
    mount("read_into")

    report = jaxckpt.verify(tmp_path / "a")

    assert not report.ok
    assert "does not answer" in report.problems[0].message


def test_a_mount_that_hangs_is_asked_again_when_it_answers(tmp_path, mount, set_limit):
    """Until then its calls fail at once, and leave no more threads."""
    hanging, limited = mount("entries")
    with pytest.raises(StoreError, match="entries has not returned"):
        limited.entries(str(tmp_path))
    threads = _count_threads()

    for _ in range(3):
        with pytest.raises(StoreError, match="entries has not returned"):
            limited.kind(str(tmp_path))
    assert "kind" not in hanging.seen
    assert _count_threads() == threads

    set_limit(PATIENCE_S)
    hanging.answer()
    wait_until(lambda: not limited._hanging)
    assert limited.kind(str(tmp_path)) == "dir"


def _count_threads():
    return sum(thread.name == "jaxckpt-files" for thread in threading.enumerate())


@pytest.mark.parametrize("new", [False, True])
def test_a_lock_that_is_taken_too_late_is_released(tmp_path, mount, new):
    """Nobody would ever release it."""
    path = str(tmp_path / "lock")
    hanging, limited = mount("hold")
    with pytest.raises(StoreError):
        limited.hold(path, b"x", new=new)

    hanging.answer()
    wait_until(lambda: not limited._hanging)

    held = LocalStorage().hold(path)
    assert held is not None
    held.release()


INTERRUPTED = """
import os, signal, sys, threading
from jaxckpt.storage import LocalStorage
from tests.storage.test_limit import NFS, Hanging, LimitedStorage
from tests.waiting import wait_until

hanging = Hanging(LocalStorage())
hanging.verb = "hold"

def interrupt():
    wait_until(lambda: "hold" in hanging.seen)
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
threading.Thread(target=interrupt).start()
try:
    LimitedStorage(hanging, NFS).hold(sys.argv[1], b"x")
except KeyboardInterrupt:
    hanging.answer()
wait_until(lambda: os.path.exists(sys.argv[1]) and open(sys.argv[1], "rb").read() == b"x")
wait_until(lambda: LocalStorage().hold(sys.argv[1]) is not None)
print("free")
"""


def test_a_lock_that_is_taken_after_an_interrupt_is_released(tmp_path):
    """The caller has gone, as by Ctrl-C."""
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "lock")]

    done = subprocess.run(
        command,
        check=False,
        timeout=PATIENCE_S,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )

    assert done.stdout == b"free\n"


def test_a_long_call_that_goes_on_is_not_given_up(set_limit):
    """Its limit is for each path that it comes to, not for all of them."""
    set_limit(1.0)

    def work():
        ends_s = time.monotonic() + 1.2  # longer than the limit in all

        def is_done():
            _limit.here.call.move("the next file")
            return time.monotonic() > ends_s

        wait_until(is_done)
        return "done"

    assert Call("sync", "folder", work).result() == "done"


@pytest.mark.parametrize("verb", ["sync", "delete", "entries", "files"])
def test_a_long_call_tells_where_it_is(tmp_path, verb):
    """Each verb that visits many files."""
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"x")
    seen = []

    class Spy(Call):
        def move(self, path):
            seen.append(path)
            super().move(path)

    Spy(verb, str(tmp_path), lambda: getattr(LocalStorage(), verb)(str(tmp_path))).result()

    assert {str(tmp_path / "a"), str(tmp_path / "b")} <= set(seen)


@pytest.mark.parametrize("may_hang", [True, False])
def test_a_long_file_is_made_durable_in_parts(tmp_path, monkeypatch, limits, may_hang):
    """Where a call has a limit; one long `fsync` at the end would be taken for a hang."""
    synced, fsync = [], os.fsync

    def counted(fd):
        synced.append(os.fstat(fd).st_size)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", counted)
    limits("jaxckpt.storage._local", _SYNCED_BYTES=2_000)
    local = LocalStorage()
    files = LimitedStorage(local, NFS) if may_hang else local
    files.write(f"{tmp_path}/f", iter([b"1" * 1000] * 7))

    parts = [3000, 6000] if may_hang else []
    assert [size for size in synced if size in (3000, 6000, 7000)] == [*parts, 7000]
    assert (tmp_path / "f").read_bytes() == b"1" * 7000


def test_an_error_of_the_call_is_raised_as_it_is(tmp_path):
    """Also one of the class that tells a timeout."""
    limited = LimitedStorage(LocalStorage(), NFS)

    def fail():
        raise TimeoutError("by the server")

    with pytest.raises(FileNotFoundError):
        limited.read(str(tmp_path / "missing"), max_bytes=1)
    with pytest.raises(TimeoutError, match="by the server"):
        Call("read", "f", fail).result()


FORKS = """
import os, sys
from jaxckpt.storage import LocalStorage
from jaxckpt.storage._limit import LimitedStorage
from jaxckpt.storage._mounts import Mount

limited = LimitedStorage(LocalStorage(), Mount("nfs4", "/mnt/nfs"))
assert limited.kind("/") == "dir"
child = os.fork()
if child == 0:
    os._exit(0 if limited.kind("/") == "dir" else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_makes_calls_too():
    """It lacks the threads of its parent."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS], check=False, timeout=PATIENCE_S
    )

    assert done.returncode == 0


# Which file systems


@pytest.mark.parametrize(
    ("kind", "may_hang"),
    [("nfs4", True), ("lustre", True), ("fuse.s3fs", True), ("fuse", True), ("ext4", False)],
)
def test_only_a_file_system_with_a_server_may_hang(tmp_path, mounted, kind, may_hang):
    """The others make their calls in the caller's thread."""
    mounted(f"{kind} x rw")

    found = storage.locate(tmp_path)[0]
    asks = _limit.ask() is _limit._ask

    assert isinstance(found, LimitedStorage if may_hang else LocalStorage)
    assert asks == may_hang


def test_a_number_of_a_device_that_is_used_again_is_of_another_file_system(tmp_path, mounted):
    """The kernel gives it to the next mount as soon as the first is gone."""
    mounted("tmpfs x rw")
    assert storage.locate(tmp_path)[0].atomic_rename
    table = tmp_path / "mountinfo"
    table.write_text(table.read_text().replace("tmpfs", "fuse.gcsfuse"))

    assert not storage.locate(tmp_path)[0].atomic_rename


def test_finding_the_file_system_has_a_limit(set_limit):
    """`stat` can hang as well."""
    set_limit(0.1)
    answers = threading.Event()

    def stat(path):
        answers.wait(PATIENCE_S)

    with pytest.raises(StoreError, match="/mnt/nfs/run: stat has not returned"):
        _limit._ask(stat, "/mnt/nfs/run")
    answers.set()


# TensorStore


class Unfinished:
    """A result of TensorStore that is never there; each wait for it does `work`."""

    def __init__(self, work=lambda: None):
        self._work, self._waits = work, 0

    def done(self):
        return False

    def result(self, timeout):
        self._waits += 1
        if self._waits == 5:
            return "done"
        self._work()
        raise TimeoutError


def test_tensorstore_has_a_limit_too(set_limit, tmp_path):
    """It is for the time in which no file at all is read or written."""
    set_limit(0.1)
    spec = {"driver": "file", "path": f"{tmp_path}/run"}
    keys = jaxckpt.storage._arrays.Keys({"driver": "file", "path": f"{tmp_path}/"})

    with pytest.raises(StoreError, match=r"/run: nothing was read or written for 0\.4 s"):
        _wait(Unfinished(), spec)
    assert _wait(Unfinished(lambda: keys.write("a", b"x")), spec) == "done"
