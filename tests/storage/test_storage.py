"""The storages keep their contract, and the local one its promises about crashes and links."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import uuid
from pathlib import Path, PurePosixPath

import numpy as np
import pytest

import jaxckpt
from jaxckpt.errors import CorruptCheckpoint, UnsupportedFormat
from jaxckpt.storage import (
    Entry,
    LocalStorage,
    MemoryStorage,
    PathIn,
    _mounts,
    is_temporary_file,
    kvstore,
    locate,
)
from jaxckpt.storage._limit import Call, LimitedStorage
from jaxckpt.storage._local import _give_new_name, temporary_sibling
from jaxckpt.storage._mounts import Mount, device_of, find_mounts
from jaxckpt.testing import (
    CrashingStorage,
    FailingStorage,
    SimulatedCrash,
    WatchedStorage,
)
from tests.storage_contract import StorageContract
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
LIMIT = 1 << 20


class TestLocalStorage(StorageContract):
    @pytest.fixture
    def storage(self):
        return LocalStorage()

    @pytest.fixture
    def root(self, tmp_path):
        return str(tmp_path)


class TestMountedBucket(StorageContract):
    """As on a mount without an atomic rename."""

    @pytest.fixture
    def storage(self):
        return LocalStorage(atomic_rename=False)

    @pytest.fixture
    def root(self, tmp_path):
        return str(tmp_path)


class TestLimitedStorage(StorageContract):
    """As on a file system that may hang."""

    @pytest.fixture
    def storage(self):
        return LimitedStorage(LocalStorage(), Mount("nfs4", "/mnt/nfs"))

    @pytest.fixture
    def root(self, tmp_path):
        return str(tmp_path)


class TestMemoryStorage(StorageContract):
    @pytest.fixture
    def storage(self):
        return MemoryStorage()

    @pytest.fixture
    def root(self):
        return f"memory://{uuid.uuid4()}/run"


class TestTwinsThatDoNothing(StorageContract):
    """The twins pass every call on, and change none of them."""

    @pytest.fixture
    def storage(self):
        crashing = CrashingStorage(LocalStorage())
        failing = FailingStorage(crashing, 10**9, OSError(errno.EIO, ""))
        return WatchedStorage(failing, lambda verb, path: None)

    @pytest.fixture
    def root(self, tmp_path):
        return str(tmp_path)


# locate


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("/a/b", "/a/b"),
        ("/a//b/./c/../d/", "/a/b/d"),
        ("//a/b", "/a/b"),
        ("/", "/"),
        ("/a b/é%20?#", "/a b/é%20?#"),
        ("file:///a/b", "/a/b"),
        ("FILE://localhost/a", "/a"),
        ("file:///a%20b/%C3%A9", "/a b/é"),
        ("~/runs", f"{Path.home()}/runs"),
        ("runs/x", f"{Path.cwd()}/runs/x"),
        ("step:12/x", f"{Path.cwd()}/step:12/x"),
        (Path("/a/b"), "/a/b"),
        (PurePosixPath("runs"), f"{Path.cwd()}/runs"),
    ],
)
def test_local_paths_become_absolute(given, wanted):
    """Plain paths, path objects and file URLs all give one absolute path."""
    storage, path = locate(given)

    assert isinstance(storage, LocalStorage)
    assert path == wanted


def test_epath_is_a_path():
    """An etils path is taken like any other."""
    epath = pytest.importorskip("etils.epath")

    assert locate(epath.Path("/a/b"))[1] == "/a/b"


def test_a_file_url_undoes_as_uri(tmp_path):
    """A URL made by pathlib is converted back to its path."""
    path = tmp_path / "a b%20?#é"

    assert locate(path.as_uri())[1] == str(path)


def test_links_stay_in_a_path(tmp_path):
    """A link in a path is kept, so that its owner can turn it to another place later."""
    (tmp_path / "link").symlink_to(tmp_path)

    assert locate(tmp_path / "link" / "run")[1] == f"{tmp_path}/link/run"


def test_memory_urls_have_a_storage_of_their_own():
    """The name after memory:// is the first part of the path."""
    storage, path = locate("memory://name/a/../b/")

    assert isinstance(storage, MemoryStorage)
    assert path == "memory://name/b"


@pytest.mark.parametrize(
    "given",
    ["https://x/y", "HDFS://x/y", "gs:/bucket/run", Path("s3://bucket/run")],
)
def test_a_url_without_a_storage_is_refused(given):
    """A URL is never taken for a local path, even one that pathlib broke."""
    with pytest.raises(UnsupportedFormat, match=r"(?i)as a str|no storage for"):
        locate(given)


@pytest.mark.parametrize(
    "given", ["gs://", "gs:///run", "s3://B_/x", "s3://bucket/a/../b", "gs://b"]
)
def test_a_url_names_a_bucket_and_what_is_in_it(given):
    """Neither the bucket nor a part of the path may be missing or go elsewhere."""
    with pytest.raises(ValueError, match="must"):
        locate(given)


@pytest.mark.parametrize("name", ["a\tb", "a\nb", "a\x7f", "a\ud800"])
def test_the_name_of_an_object_has_no_control_characters(name):
    """The error says which name, and what to do; it is the same for files below."""
    with pytest.raises(ValueError, match=r"run' must not.* control characters.*Choose another"):
        locate(f"s3://bucket/{name}/run")
    storage, path = locate("s3://bucket/run")
    with pytest.raises(ValueError, match=r"'s3://bucket/run/a.*must not.* control characters"):
        storage.read(f"{path}/{name}", max_bytes=1)
    with pytest.raises(ValueError, match=r"'s3://bucket/run/a.*must not.* control characters"):
        storage.create(f"{path}/{name}/f", b"1")


def test_the_path_in_a_bucket_is_its_url():
    """So that every error names it in full."""
    storage, path = locate("S3://bucket/runs/vit/")

    assert (storage.scheme, path) == ("s3", "s3://bucket/runs/vit")
    assert locate("s3://bucket/other")[0] is storage


@pytest.mark.parametrize(
    "given", ["", "a\0b", "file:///a%00b", "file://host/a", "file://a", "memory://", "memory:///"]
)
def test_paths_that_name_nothing_are_refused(given):
    """An empty path, a NUL byte and a URL without a name are wrong arguments."""
    with pytest.raises(ValueError, match=r"path|form"):
        locate(given)


def test_bytes_are_refused():
    """A path of bytes is a wrong type."""
    with pytest.raises(TypeError, match="must be a str"):
        locate(b"/a")  # pyright: ignore[reportArgumentType]


def test_a_local_path_imports_no_tensorstore():
    """The command line lists local runs without the time that importing TensorStore takes."""
    script = "import sys, jaxckpt.storage as s; s.locate('/a'); print(*sys.modules)"

    modules = run_python(script).stdout.split()

    assert "jaxckpt.storage" in modules
    assert not {"tensorstore", "numpy", "jax"} & set(modules)


# Mounted buckets


@pytest.mark.parametrize(
    ("what", "is_bucket"),
    [("fuse.s3fs s3fs rw", True), ("fuse bucket rw", True), ("fuse.sshfs host: rw", False)],
)
def test_a_mounted_bucket_is_a_store(tmp_path, mounted, caplog, what, is_bucket):
    """Also through links and for paths yet to be made; it is told once."""
    (tmp_path / "link").symlink_to(tmp_path)
    mounted(what)
    caplog.set_level("INFO", "jaxckpt")

    found = [locate(tmp_path / name)[0] for name in (".", "a/b/c", "link/new")]

    assert {one.atomic_rename for one in found} == {not is_bucket}
    assert len(caplog.records) == is_bucket
    assert not is_bucket or "/mnt/a b is a mounted bucket (fuse" in caplog.text


# Space, tab, newline and backslash are escaped in the table, but no others.
BREAKS = pytest.mark.parametrize("text", ["\r", "\x0c", "\x1c", "\x85", "\u2028"], ids=ascii)


@BREAKS
def test_any_character_may_be_in_a_mount_point(text):
    mount = find_mounts(f"36 20 0:9 / /mnt/a{text}b rw - fuse.s3fs s3fs rw\n")

    assert mount == {os.makedev(0, 9): Mount("fuse.s3fs", f"/mnt/a{text}b")}


@BREAKS
def test_any_character_may_be_in_the_table_of_mounts(tmp_path, mounted, text):
    mounted(f"fuse.s3fs a{text}b rw")

    assert not locate(tmp_path)[0].atomic_rename


@pytest.mark.parametrize("point", ["/mnt/bucket", "/mnt/bucket/runs"])
def test_a_bucket_whose_program_is_away_is_found(point):
    """As after a crash of s3fs: the table has the mount, though nothing below it answers."""

    def stat(path):
        if f"{path}/".startswith(f"{point}/"):
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), path)
        return os.stat("/")

    table = {7: Mount("fuse.s3fs", point)}

    assert device_of("/mnt/bucket/runs/1", stat, lambda: table) == 7
    assert device_of("/mnt/other", stat, lambda: table) == os.stat("/").st_dev


def test_without_a_table_of_mounts_nothing_is_a_bucket(tmp_path, mounted):
    """As on systems other than Linux."""
    mounted(None)

    assert _mounts.mounts() == {}
    assert isinstance(locate(tmp_path)[0], LocalStorage)


def test_a_process_without_descriptors_takes_no_bucket_for_a_disk():
    """It does not know what is mounted: a commit by a rename would not hold in a bucket."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            _mounts.mounts()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# What lies in the way


def test_a_directory_that_cannot_be_looked_at_is_not_called_a_file(tmp_path):
    """The error of the system is raised as it is."""
    (tmp_path / "a").symlink_to("a")

    with pytest.raises(OSError, match="symbolic links"):
        LocalStorage().make_dir(str(tmp_path / "a" / "b"))


@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "link", "dangling", "dir"])
def test_only_regular_files_are_read(tmp_path, monkeypatch, kind):
    """A FIFO, socket, device, link or directory is refused at once, and none is waited for."""
    path = str(tmp_path / "f")
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind("f")
        case "device":
            path = "/dev/zero"
        case "link":
            (tmp_path / "target").write_bytes(b"secret")
            os.symlink("target", path)
        case "dangling":
            os.symlink("nowhere", path)
        case "dir":
            os.mkdir(path)

    for ask in (
        lambda: LocalStorage().read(path, max_bytes=LIMIT),
        lambda: LocalStorage().size(path),
    ):
        with pytest.raises(CorruptCheckpoint, match="not a regular file") as caught:
            ask()
        assert caught.value.file == path
    assert LocalStorage().kind(path) == ("dir" if kind == "dir" else "other")


def test_entries_follow_no_link_inside(tmp_path):
    """Links and FIFOs are "other", of size 0; a link to the directory itself is followed."""
    folder = tmp_path / "disk"
    (folder / "dir").mkdir(parents=True)
    (folder / "file").write_bytes(b"12345")
    (folder / "to_file").symlink_to("file")
    (folder / "to_dir").symlink_to("dir")
    (folder / "dangling").symlink_to("nowhere")
    os.mkfifo(folder / "fifo")
    (tmp_path / "link").symlink_to("disk")

    found = LocalStorage().entries(f"{tmp_path}/link")

    others = dict.fromkeys(("dangling", "fifo", "to_dir", "to_file"), Entry("other", 0))
    assert found == {"dir": Entry("dir", 0), "file": Entry("file", 5), **others}
    assert list(found) == sorted(found)
    with pytest.raises(NotADirectoryError) as caught:
        LocalStorage().entries(f"{tmp_path}/link/file")
    assert caught.value.filename == f"{tmp_path}/link/file"


def test_entries_leave_out_what_is_deleted_meanwhile(tmp_path):
    """A file that goes between the listing and the look at it is not listed."""
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(b"1")

    class Deleting(Call):
        def move(self, path):  # is called between the two
            if path == str(tmp_path / "b"):
                os.unlink(path)

    listing = Deleting("entries", "", lambda: LocalStorage().entries(str(tmp_path))).result()

    assert list(listing) == ["a", "c"]
    assert not (tmp_path / "b").exists()


def test_a_file_that_tells_no_size_is_limited():
    """A file under /proc says it is empty; it is read, and no further than the limit."""
    whole = LocalStorage().read("/proc/self/limits", max_bytes=LIMIT)

    assert b"Max open files" in whole
    with pytest.raises(CorruptCheckpoint, match="at most 10 bytes"):
        LocalStorage().read("/proc/self/limits", max_bytes=10)


def test_a_path_that_is_no_utf_8_says_so():
    """TensorStore opens none, and would not say which."""
    with pytest.raises(UnsupportedFormat, match=r"run.*is not valid UTF-8.*rename it"):
        kvstore("/runs/" + os.fsdecode(b"run\xe9"))


def test_delete_follows_no_link(tmp_path):
    """Deleting a tree with links in it, or a link, leaves what they point to."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"1")
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "to_dir").symlink_to(outside)
    (tree / "to_file").symlink_to(outside / "precious")
    (tmp_path / "link").symlink_to(outside)
    os.mkfifo(tree / "fifo")

    LocalStorage().delete(str(tree))
    LocalStorage().delete(str(tmp_path / "link"))

    assert [path.name for path in tmp_path.rglob("*")] == ["outside", "precious"]


def test_sync_follows_no_link_and_opens_no_fifo(tmp_path):
    """A tree with a FIFO, a dangling link and a link to itself is synced without waiting."""
    (tmp_path / "f").write_bytes(b"1")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo")

    LocalStorage().sync(str(tmp_path))


def test_a_write_replaces_a_link_and_not_its_target(tmp_path):
    """A write, a create, a rename and a lock change nothing behind a link."""
    target = tmp_path / "target"
    target.write_bytes(b"old")
    for name in ("written", "created", "renamed", "held"):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "new").write_bytes(b"new")
    storage, root = LocalStorage(), str(tmp_path)

    storage.write(f"{root}/written", b"new")
    assert storage.create(f"{root}/created", b"new") is False
    with pytest.raises(FileExistsError):
        storage.rename(f"{root}/new", f"{root}/renamed")
    with pytest.raises(CorruptCheckpoint, match="held is not a regular file"):
        storage.hold(f"{root}/held")

    assert target.read_bytes() == b"old"
    assert storage.kind(f"{root}/written") == "file"


@pytest.mark.parametrize("verb", ["write", "create"])
def test_what_another_job_takes_for_a_leftover_is_written_again(tmp_path, verb):
    """Who opens a run removes temporary files, also that of a job that is opening it just now."""
    swept = threading.Event()

    def sweep():
        while not swept.is_set():
            for file in tmp_path.glob(".jaxckpt-tmp-*"):
                with contextlib.suppress(FileNotFoundError):
                    file.unlink()
                    swept.set()

    def is_swept():
        (tmp_path / "file").unlink(missing_ok=True)
        getattr(LocalStorage(), verb)(f"{tmp_path}/file", b"1" * 1_000_000)
        assert (tmp_path / "file").stat().st_size == 1_000_000
        return swept.is_set()

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        wait_until(is_swept)
    finally:
        swept.set()
        sweeper.join()


def test_a_linked_root_is_fine(tmp_path):
    """Parents that are links, and listing a link to a directory, work: users link their roots."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    storage, root = LocalStorage(), f"{tmp_path}/run"

    storage.make_dir(f"{root}/a/b")
    storage.make_dir(root)
    storage.write(f"{root}/a/f", b"1")
    storage.rename(f"{root}/a", f"{root}/z")
    storage.sync(f"{root}/z")

    assert [*storage.entries(root)] == ["z"]
    assert storage.kind(root) == "other"
    storage.delete(f"{root}/z")
    assert (tmp_path / "disk").is_dir()


def test_make_dir_needs_directories(tmp_path):
    """A file, or a dangling link, where a directory is wanted is an error that names it."""
    (tmp_path / "f").write_bytes(b"")
    (tmp_path / "dangling").symlink_to("nowhere")

    for name in ("f", "f/below", "dangling"):
        with pytest.raises(NotADirectoryError) as caught:
            LocalStorage().make_dir(f"{tmp_path}/{name}")
        assert caught.value.filename.startswith(f"{tmp_path}/{name.split('/')[0]}")


@pytest.mark.parametrize("verb", ["write", "create"])
def test_a_write_without_a_directory_names_the_file(tmp_path, verb):
    """The error of a write names the file that was asked for, not a temporary one."""
    with pytest.raises(FileNotFoundError) as caught:
        getattr(LocalStorage(), verb)(f"{tmp_path}/missing/f", b"1")

    assert caught.value.filename == f"{tmp_path}/missing/f"


def test_a_directory_is_not_overwritten_by_a_file(tmp_path):
    """Writing over a directory raises, keeps it, and leaves no temporary file."""
    (tmp_path / "d").mkdir()

    with pytest.raises(IsADirectoryError) as caught:
        LocalStorage().write(f"{tmp_path}/d", b"1")

    assert caught.value.filename == f"{tmp_path}/d"
    assert os.listdir(tmp_path) == ["d"]


def test_a_path_that_is_too_long_is_named(tmp_path):
    """A name over the limit of the file system raises and says which."""
    path = f"{tmp_path}/{'x' * 256}"

    with pytest.raises(OSError, match="x" * 256) as caught:
        LocalStorage().write(path, b"1")

    assert caught.value.errno == errno.ENAMETOOLONG
    assert os.listdir(tmp_path) == []


def test_a_deep_tree_is_deleted(tmp_path):
    """A tree deeper than the longest path that the kernel takes is deleted."""
    path = str(tmp_path)
    fd = os.open(path, os.O_RDONLY)
    for _ in range(40):
        os.mkdir("d" * 200, dir_fd=fd)
        child = os.open("d" * 200, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = child
    os.close(fd)

    LocalStorage().delete(f"{tmp_path}/{'d' * 200}")

    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_an_error(tmp_path):
    """Every change in a directory without write permission raises and names its path."""
    (tmp_path / "f").write_bytes(b"1")
    tmp_path.chmod(0o555)
    storage, path = LocalStorage(), f"{tmp_path}/new"

    try:
        for change in (storage.make_dir, storage.hold):
            with pytest.raises(PermissionError, match=path):
                change(path)
        for change in (storage.write, storage.create):
            with pytest.raises(PermissionError, match=path):
                change(path, b"1")
        with pytest.raises(PermissionError, match=f"{tmp_path}/f"):
            storage.delete(f"{tmp_path}/f")
    finally:
        tmp_path.chmod(0o755)


def test_names_with_nul_are_refused_by_rename(tmp_path):
    """A NUL byte does not cut a name short on its way to the kernel."""
    (tmp_path / "f").write_bytes(b"1")

    with pytest.raises(ValueError, match="null"):
        LocalStorage().rename(f"{tmp_path}/f", f"{tmp_path}/g\0h")

    assert os.listdir(tmp_path) == ["f"]


# Faults, made by the kernel


@pytest.mark.parametrize("verb", ["write", "create"])
def test_a_full_disk_leaves_nothing(tmp_path, verb):
    """A write that the kernel cuts short in its middle raises, and no part of it stays."""
    script = """
        import resource, signal, sys
        from jaxckpt.storage import LocalStorage
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try: getattr(LocalStorage(), sys.argv[1])(sys.argv[2], b"x" * 5000)
        except OSError as error: print(error.errno, error.filename)
    """

    result = run_python(script, verb, tmp_path / "f")

    assert result.stdout.split() == [str(errno.EFBIG), f"{tmp_path}/f"]
    assert os.listdir(tmp_path) == []


def test_exchange_leaves_no_moment_without(tmp_path):
    """While two directories are exchanged over and over, each name always has one of them."""
    storage = LocalStorage()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_bytes(name.encode())
    if not storage.exchange(f"{tmp_path}/a", f"{tmp_path}/b"):
        pytest.skip("this file system cannot exchange")
    done = threading.Event()
    seen: set[bytes] = set()
    problems: list[OSError] = []

    def watch() -> None:
        while not done.is_set():
            try:
                seen.add(storage.read(f"{tmp_path}/a/f", max_bytes=LIMIT))
            except OSError as error:
                problems.append(error)

    thread = threading.Thread(target=watch, name="watch")
    thread.start()
    for _ in range(200):
        storage.exchange(f"{tmp_path}/a", f"{tmp_path}/b")
    done.set()
    thread.join()

    assert not problems
    assert seen <= {b"a", b"b"}


def test_exchange_needs_both(tmp_path):
    """Exchanging with what is not there raises and names both."""
    (tmp_path / "a").mkdir()

    with pytest.raises(FileNotFoundError) as caught:
        LocalStorage().exchange(f"{tmp_path}/a", f"{tmp_path}/b")

    assert (caught.value.filename, caught.value.filename2) == (f"{tmp_path}/a", f"{tmp_path}/b")


# Locks and processes


def run_python(script, *args, check=True, under=()):
    """Runs a script in a new interpreter that finds the package; `under` is a command before it."""
    return subprocess.run(
        [*under, sys.executable, "-c", textwrap.dedent(script), *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=check,
        timeout=100,
    )


HOLD_AND_WAIT = """
import sys
from jaxckpt.storage import LocalStorage
hold = LocalStorage().hold(sys.argv[1])
print("none" if hold is None else "held", flush=True)
sys.stdin.read()
"""


@pytest.mark.multihost
def test_a_killed_process_loses_its_hold(tmp_path):
    """A lock is kept from other processes while its holder lives, and is free once it is killed."""
    path = f"{tmp_path}/lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_AND_WAIT, path],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert LocalStorage().hold(path) is None

        process.kill()
        process.wait()

    hold = LocalStorage().hold(path)
    assert hold is not None
    hold.release()


@pytest.mark.multihost
def test_a_forked_child_does_not_keep_a_hold(tmp_path):
    """A lock ends with the process that took it, though a forked worker lives on."""
    script = """
        import os, sys
        from jaxckpt.storage import LocalStorage
        hold = LocalStorage().hold(sys.argv[1])
        child = os.fork()
        if child == 0:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 1)
            os.dup2(null, 2)
            sys.stdin.read()
            os._exit(0)
        assert LocalStorage().hold(sys.argv[1]) is None
        print(child)
    """
    reader, writer = os.pipe()
    try:
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), f"{tmp_path}/lock"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=reader,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=100,
        )
        os.kill(int(result.stdout), 0)  # the child lives

        hold = LocalStorage().hold(f"{tmp_path}/lock")

        assert hold is not None
        hold.release()
    finally:
        os.close(reader)
        os.close(writer)


def test_a_deleted_lock_file_excludes_again(tmp_path):
    """Once a lock file is deleted, the next hold makes a new one that others respect."""
    path = f"{tmp_path}/lock"
    first = LocalStorage().hold(path)
    LocalStorage().delete(path)

    second = LocalStorage().hold(path)

    assert first is not None
    assert second is not None
    assert LocalStorage().hold(path) is None
    first.release()
    assert LocalStorage().hold(path) is None
    second.release()


def test_a_link_whose_answer_was_lost_counts(tmp_path):
    """Over NFS a link can succeed and yet return "exists"; the link count of the file shows it."""
    (tmp_path / "temporary").write_bytes(b"1")
    (tmp_path / "other").write_bytes(b"2")
    os.link(tmp_path / "temporary", tmp_path / "made")

    assert _give_new_name(f"{tmp_path}/other", f"{tmp_path}/made") is False
    assert _give_new_name(f"{tmp_path}/temporary", f"{tmp_path}/made") is True


# System calls, watched and made to fail by strace


def strace_works() -> bool:
    return bool(shutil.which("strace")) and (
        subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True).returncode == 0
    )


needs_strace = pytest.mark.skipif(not strace_works(), reason="strace is not there or may not trace")

_CALLS = (
    "openat,write,fsync,fdatasync,rename,renameat,renameat2,link,linkat,mkdir,rmdir,unlink,unlinkat"
)
_LINE = re.compile(r"^\d+\s+(\w+)\((.*)\)\s+= (\d+)")
_FD_PATH = re.compile(r"^\d+<(.*?)>")
_QUOTED = re.compile(r'"([^"]*)"')


def unsynced_after(trace: str, root: str) -> set[str]:
    """Returns what a power cut at the end of a trace could lose: files, and `directory/` for names.

    Fails at once if a file gets its name before its bytes are synced.
    """
    unsynced: set[str] = set()
    for line in trace.splitlines():
        if not (match := _LINE.match(line)) or root not in line:
            continue
        call, rest = match[1], match[2]
        fd = _FD_PATH.match(rest)
        paths = _QUOTED.findall(rest)
        if call == "openat" and "O_CREAT" in rest:
            # It does no harm if the name of a temporary file is lost, or comes back.
            if not is_temporary_file(os.path.basename(paths[0])):
                unsynced.add(os.path.dirname(paths[0]) + "/")
        elif call == "write" and fd:
            unsynced.add(fd[1])
        elif call in ("fsync", "fdatasync") and fd:
            unsynced -= {fd[1], fd[1] + "/"}
        elif call.startswith(("rename", "link")):
            assert paths[0] not in unsynced, f"named before it was synced: {line}"
            unsynced |= {os.path.dirname(path) + "/" for path in paths}
        elif call == "mkdir":
            unsynced |= {os.path.dirname(paths[0]) + "/"}
        elif call.startswith(("unlink", "rmdir")):
            where = fd[1] if fd else os.path.dirname(paths[0])
            path = os.path.join(where, paths[0])
            unsynced.discard(path)
            unsynced.discard(path + "/")
            if not is_temporary_file(os.path.basename(path)):
                unsynced.add(where + "/")
    # Names in a directory that is itself gone.
    return {path for path in unsynced if os.path.exists(path)}


VERBS = {
    "write": "s.write(r + '/f', b'x' * 5000)",
    "write over": "s.write(r + '/old/f', b'x' * 5000)",
    "create": "assert s.create(r + '/f', b'x')",
    "make_dir": "s.make_dir(r + '/a/b/c')",
    "rename": "s.rename(r + '/old', r + '/new')",
    "rename away": "s.rename(r + '/old/f', r + '/other/g')",
    "exchange": "assert s.exchange(r + '/old/f', r + '/other/f')",
    "delete": "s.delete(r + '/old')",
    "delete file": "s.delete(r + '/old/f')",
    "delete_empty": "s.make_dir(r + '/a'); assert s.delete_empty(r + '/a')",
    "sync": (
        "import os\n"
        "os.makedirs(r + '/x/y')\n"
        "for f in ['/x/f', '/x/y/g']:\n"
        "    with open(r + f, 'wb') as out: out.write(b'1')\n"
        "s.sync(r)"
    ),
}
PREPARE = (
    "from jaxckpt.storage import LocalStorage\nimport sys\ns, r = LocalStorage(), sys.argv[1]\n"
)


@pytest.fixture
def old_tree(tmp_path):
    """A directory with two directories and a file in each, apart from where traces go."""
    for name in ("old", "other"):
        (tmp_path / "root" / name).mkdir(parents=True)
        (tmp_path / "root" / name / "f").write_bytes(name.encode())
    return str(tmp_path / "root")


def run_traced(code, root, *options, check=True):
    trace = Path(root).parent / "trace"
    under = ["strace", "-f", "-y", "-s", "4096", "-o", str(trace), *options]
    result = run_python(PREPARE + code, root, check=check, under=under)
    return result, trace.read_text()


@needs_strace
@pytest.mark.parametrize("verb", VERBS)
def test_a_change_is_durable_on_return(old_tree, verb):
    """After a verb returns, each byte and each name it changed has been synced, in that order."""
    _, trace = run_traced(VERBS[verb], old_tree, "-e", f"trace={_CALLS}")

    assert old_tree in trace
    assert unsynced_after(trace, old_tree) == set()


@needs_strace
@pytest.mark.parametrize(
    ("code", "left"),
    [
        ("open(r + '/f', 'wb').write(b'1')", {"/f", "/"}),
        ("import os; os.mkdir(r + '/d')", {"/"}),
        ("import os; os.rename(r + '/old/f', r + '/other/g')", {"/old/", "/other/"}),
        ("import os; os.unlink(r + '/old/f')", {"/old/"}),
    ],
)
def test_the_check_of_durability_can_fail(old_tree, code, left):
    """Plain Python, which syncs nothing, is found by the check above."""
    _, trace = run_traced(code, old_tree, "-e", f"trace={_CALLS}")

    assert unsynced_after(trace, old_tree) == {old_tree + path for path in left}


@needs_strace
@pytest.mark.parametrize("verb", ["write", "write over", "create"])
@pytest.mark.parametrize("fault", ["fsync:error=EIO", "rename,renameat2:error=ENOSPC"])
def test_a_failed_write_leaves_what_was_there(old_tree, verb, fault):
    """When the sync of the file or its rename fails, the old one stays and nothing is added."""
    code = f"try:\n    {VERBS[verb]}\nexcept OSError as e: print(e.errno, e.filename)"

    result, _ = run_traced(code, old_tree, "-e", f"inject={fault}:when=1")

    code_got, filename = result.stdout.split()
    assert int(code_got) in (errno.EIO, errno.ENOSPC)
    assert filename == old_tree + ("/old/f" if verb == "write over" else "/f")
    assert sorted(os.listdir(old_tree)) == ["old", "other"]
    assert os.listdir(f"{old_tree}/old") == ["f"]
    assert Path(old_tree, "old", "f").read_bytes() == b"old"


WITHOUT = {
    "renameat2": "renameat2:error=EINVAL",
    "renameat2 in the kernel": "renameat2:error=ENOSYS",
    "renameat2 and link": "renameat2,link,linkat:error=EPERM",
}


@needs_strace
@pytest.mark.parametrize("missing", WITHOUT)
def test_file_systems_without_a_call_have_another_way(old_tree, missing):
    """Where renameat2, or links too, cannot be had, create and rename still replace nothing."""
    code = """
assert s.create(r + '/f', b'new') is True
assert s.create(r + '/f', b'other') is False
assert s.create(r + '/old', b'other') is False
from jaxckpt.storage._large import LargeFile
large = LargeFile(r + '/f', r + '/.jaxckpt-tmp-large')
try: large.publish(replace=False)
except FileExistsError as e: assert e.filename == r + '/f'
else: raise AssertionError
"""
    if "link" not in missing:
        code += """
assert s.exchange(r + '/old', r + '/other') is False
s.rename(r + '/old', r + '/new')
try: s.rename(r + '/new', r + '/other')
except FileExistsError as e: assert (e.filename, e.filename2) == (r + '/new', r + '/other')
else: raise AssertionError
"""
    options = ("-e", f"inject={WITHOUT[missing]}", "-e", f"trace={_CALLS}")

    _, trace = run_traced(code, old_tree, *options)

    assert Path(old_tree, "f").read_bytes() == b"new"
    wanted = ["f", "old", "other"] if "link" in missing else ["f", "new", "other"]
    assert sorted(os.listdir(old_tree)) == wanted
    assert unsynced_after(trace, old_tree) == set()


@needs_strace
def test_a_name_reserved_for_nothing_is_free_again(old_tree):
    """Without renameat2 and links, a name is reserved by an empty file, which goes if all fails."""
    code = "try: s.create(r + '/f', b'new')\nexcept OSError as e: print(e.errno)"
    faults = "inject=renameat2,link,linkat:error=EPERM", "inject=rename,renameat:error=EIO"

    result, _ = run_traced(code, old_tree, "-e", faults[0], "-e", faults[1])

    assert int(result.stdout) == errno.EIO
    assert sorted(os.listdir(old_tree)) == ["old", "other"]


@needs_strace
def test_a_directory_that_cannot_be_synced_is_tolerated(old_tree):
    """A file system that refuses to sync directories is used as it is; an I/O error raises."""
    code = """
s.make_dir(r + '/d')
"""
    run_traced(code, old_tree, "-e", "inject=fsync:error=EINVAL")
    shutil.rmtree(f"{old_tree}/d")
    result, _ = run_traced(code, old_tree, "-e", "inject=fsync:error=EIO", check=False)

    assert "OSError: [Errno 5]" in result.stderr
    assert f"{old_tree}/d" in result.stderr


@needs_strace
@pytest.mark.parametrize("error", ["ENOLCK", "EOPNOTSUPP", "ENOSYS"])
def test_a_file_system_without_locks_says_so(old_tree, error):
    """If nothing can be locked, a hold raises an error distinct from that of a taken lock."""
    code = """
import io
try: s.hold(r + '/lock')
except io.UnsupportedOperation as e: print(type(e).__name__, e.filename, e)
"""
    result, _ = run_traced(code, old_tree, "-e", f"inject=flock:error={error}")

    assert result.stdout.startswith(f"UnsupportedOperation {old_tree}/lock [Errno")
    assert "no file locks" in result.stdout


@needs_strace
def test_sync_leaves_alone_what_is_being_written(old_tree):
    """A sync opens no temporary file, which would be gone by then if its writer is quick."""
    temporary = temporary_sibling(f"{old_tree}/old/f")
    Path(temporary).write_bytes(b"1")

    _, trace = run_traced(VERBS["sync"], old_tree, "-e", "trace=openat")

    assert f"{old_tree}/old/f" in trace
    assert temporary not in trace


@needs_strace
@pytest.mark.multihost
def test_a_lock_on_a_file_just_deleted_is_not_a_hold(tmp_path):
    """If two processes open a lock file around its deletion, one gets the lock."""
    path = tmp_path / "lock"
    slow = ["strace", "-f", "-o", os.devnull, "-e", "inject=flock:delay_enter=500000:when=1"]
    with subprocess.Popen(
        [*slow, sys.executable, "-c", HOLD_AND_WAIT, str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        while not path.exists():  # once it does, the other waits before it locks
            assert process.poll() is None

        LocalStorage().delete(str(path))
        hold = LocalStorage().hold(str(path))

        assert process.communicate() == ("none\n", None)
        assert hold is not None
        hold.release()


# The twins


def write_some(storage, root):
    """Six changes, of four verbs."""
    storage.make_dir(f"{root}/a/b/c")
    storage.write(f"{root}/a/one", b"1" * 10)
    storage.create(f"{root}/a/two", b"2" * 10)
    storage.sync(f"{root}/a")
    storage.rename(f"{root}/a", f"{root}/z")
    storage.delete(f"{root}/z")


def test_a_crashing_storage_counts(tmp_path):
    """With no limit every verb acts, and `events` names each with its path."""
    storage = CrashingStorage(LocalStorage())

    write_some(storage, tmp_path)

    verbs = [event.split(" ")[0] for event in storage.events]
    assert verbs == ["make_dir", "write", "create", "sync", "rename", "delete"]
    assert storage.events[1] == f"write {tmp_path}/a/one"


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("after", range(6))
def test_a_crashing_storage_is_dead_after_so_many_changes(tmp_path, after, torn):
    """The crash comes before the change, stays, and frees the locks; half is done only if torn."""
    storage = CrashingStorage(LocalStorage(), after, torn=torn)
    hold = storage.hold(f"{tmp_path}.lock")
    assert hold is not None

    with pytest.raises(SimulatedCrash):
        write_some(storage, tmp_path)

    assert len(storage.events) == after + 1
    for call in (
        lambda: storage.kind("/"),
        lambda: storage.hold("/x"),
        lambda: storage.delete("/x"),
    ):
        with pytest.raises(SimulatedCrash):
            call()
    assert len(storage.events) == after + 1
    again = LocalStorage().hold(f"{tmp_path}.lock")
    assert again is not None
    again.release()
    found = sorted(
        "tmp" if is_temporary_file(path.name) else str(path.relative_to(tmp_path))
        for path in tmp_path.rglob("*")
    )
    made = ["a", "a/b", "a/b/c"]
    wanted = [
        ["a"] if torn else [],
        [*made, "tmp"] if torn else made,
        [*made, "a/one", "tmp"] if torn else [*made, "a/one"],
        [*made, "a/one", "a/two"],
        [*made, "a/one", "a/two"],
        ["z", "z/one", "z/two"] if torn else ["z", "z/b", "z/b/c", "z/one", "z/two"],
    ]
    assert found == wanted[after]


def test_a_torn_write_has_half_of_the_bytes(tmp_path):
    """A torn write leaves the first half, under a temporary name."""
    storage = CrashingStorage(LocalStorage(), 0, torn=True)

    with pytest.raises(SimulatedCrash):
        storage.write(f"{tmp_path}/f", b"12345678")

    (left,) = tmp_path.iterdir()
    assert is_temporary_file(left.name)
    assert left.read_bytes() == b"1234"


def test_a_torn_write_to_an_object_store_leaves_nothing():
    """An object is there whole or not at all."""
    root = f"/{uuid.uuid4()}"
    storage = CrashingStorage(MemoryStorage(), 0, torn=True)

    with pytest.raises(SimulatedCrash):
        storage.write(f"{root}/f", b"12345678")

    assert MemoryStorage().kind(root) is None


def test_a_failing_storage_fails_once(tmp_path):
    """One call raises, with its path and the class of its number; the next ones act."""
    storage = FailingStorage(LocalStorage(), 1, OSError(errno.EACCES, "no"), once=True)

    storage.write(f"{tmp_path}/a", b"1")
    storage.kind(f"{tmp_path}/a")
    with pytest.raises(PermissionError) as caught:
        storage.write(f"{tmp_path}/b", b"1")
    storage.write(f"{tmp_path}/c", b"1")

    assert caught.value.filename == f"{tmp_path}/b"
    assert storage.failed == 1
    assert [*LocalStorage().entries(str(tmp_path))] == ["a", "c"]


def test_a_failing_storage_fails_from_there_on(tmp_path):
    """Every later change raises; on a full disk a delete still works."""
    full = FailingStorage(LocalStorage(), 1, OSError(errno.ENOSPC, "full"), once=False)
    broken = FailingStorage(LocalStorage(), 0, OSError(errno.EIO, "bad"), once=False)

    full.write(f"{tmp_path}/a", b"1")
    for _ in range(2):
        with pytest.raises(OSError, match="full"):
            full.write(f"{tmp_path}/b", b"1")
    with pytest.raises(OSError, match="bad"):
        broken.delete(f"{tmp_path}/a")
    full.delete(f"{tmp_path}/a")

    assert os.listdir(tmp_path) == []


def test_a_failing_storage_fails_reads(tmp_path):
    """Reading verbs count and fail if asked to."""
    storage = FailingStorage(LocalStorage(), 1, OSError(errno.EIO, "bad"), reads=True)

    assert storage.kind(str(tmp_path)) == "dir"
    with pytest.raises(OSError, match="bad"):
        storage.entries(str(tmp_path))
    assert [*storage.entries(str(tmp_path))] == []


def test_a_watched_storage_reports_each_call_before_it_acts(tmp_path):
    """What the report raises is raised in place of the call."""
    seen = []

    def before(verb, path):
        seen.append((verb, os.path.exists(path)))
        if len(seen) == 3:
            raise OSError(errno.EIO, "bad")

    storage = WatchedStorage(LocalStorage(), before)

    storage.write(f"{tmp_path}/f", b"1234")
    assert storage.read(f"{tmp_path}/f", max_bytes=LIMIT) == b"1234"
    with pytest.raises(OSError, match="bad"):
        storage.delete(f"{tmp_path}/f")

    assert seen == [("write", False), ("read", True), ("delete", True)]
    assert os.path.exists(f"{tmp_path}/f")


def test_memory_has_no_rename_and_says_so():
    """An operation that object stores lack raises an OSError that names both paths."""
    with pytest.raises(io.UnsupportedOperation) as caught:
        MemoryStorage().rename("/a", "/b")

    assert (caught.value.filename, caught.value.filename2) == ("/a", "/b")


def test_a_path_in_a_storage_of_ones_own(tmp_path):
    """Each call takes one, and no file is reached around the storage."""
    seen = []
    at = PathIn(WatchedStorage(MemoryStorage(), lambda *call: seen.append(call)), "memory://own/a")

    jaxckpt.save(at, {"w": np.arange(9.0)})
    assert jaxckpt.verify(at).ok
    assert jaxckpt.open(at)["w"].restore().shape == (9,)
    assert np.array_equal(jaxckpt.restore(at)["w"], np.arange(9.0))
    run = PathIn(at.storage, "memory://own/run")
    with jaxckpt.CheckpointManager(run) as manager:
        manager.save(1, {"step": 1})
        manager.wait_until_finished()
        assert manager.restore() == {"step": 1}

    assert {"create", "write", "read", "entries"} <= {verb for verb, _ in seen}
    assert ("read", "memory://own/a/state/manifest.ocdbt") in seen
    assert jaxckpt.restore("memory://own/run") == {"step": 1}
    with pytest.raises(FileNotFoundError):
        jaxckpt.restore(tmp_path / "own")
