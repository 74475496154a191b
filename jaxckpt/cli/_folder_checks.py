"""The checks of a local path, mounted file systems included."""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Final, final

from jaxckpt.cli._checks import (
    LARGE_BYTES,
    SMALL,
    Check,
    Failed,
    Finding,
    Samples,
    check_same,
    latency,
)
from jaxckpt.storage._local import temporary_sibling
from jaxckpt.storage._mounts import mounts
from jaxckpt.storage._protocol import Storage

_ADVICE: Final[Mapping[int | None, str]] = {
    errno.EACCES: "let this user write there, or use another directory: `ls -ld` shows who may",
    errno.EPERM: "let this user write there, or use another directory: `ls -ld` shows who may",
    errno.EROFS: "the file system is mounted read-only: mount it for writing",
    errno.ENOSPC: "the file system is full: make room",
    errno.EDQUOT: "the quota of this user is used up: make room",
}


@final
class FolderLocation:
    """A local directory, or where it would be made; see `Location`.

    Raises:
        NotADirectoryError: the path is a file, or below one.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        while not os.path.isdir(path):
            if os.path.lexists(path):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            path = os.path.dirname(path)
        self._path = path
        self._storage = storage
        self._samples = Samples(storage, temporary_sibling(f"{path}/any"))

    @property
    def checks(self) -> Sequence[Check]:
        """Returns the checks, in order."""
        written, samples = ("write",), self._samples
        return [
            Check("file system", self._file_system),
            Check("free space", self._free_space),
            Check("write", self._write),
            Check("fsync", self._fsync, written),
            Check("create again", self._create_again, written),
            Check("exchange", self._exchange, written),
            Check("locks", self._locks, written),
            Check("hard links", self._hard_links, written),
            Check("write 64 MiB", samples.write_large, ("free space", "write")),
            Check("read 64 MiB", self._read_large, ("write 64 MiB",)),
            Check("small read", self._small_read, written),
            Check("clock", self._clock, written),
            Check("delete", self.clean, written),
        ]

    def advice(self, check: str, error: Exception) -> str:
        """Returns what to do about an error."""
        code = error.errno if isinstance(error, OSError) else None
        return _ADVICE.get(code, f"use a file system that can do this ({check})")

    def clean(self) -> None:
        """Deletes all that the checks wrote."""
        self._storage.delete(self._samples.folder)

    def _file_system(self) -> Finding:
        mount = mounts().get(os.stat(self._path).st_dev)
        if mount is None:
            return Finding(text="unknown")
        text = f"{mount.kind} on {mount.point}"
        if not mount.is_bucket:
            return Finding(text=text)
        return Finding(
            state="failed",
            text=text,
            advice="a bucket is mounted here: a rename may take several steps, and locks may not "
            "reach other machines. Pass the URL of the bucket to jaxckpt instead: gs://... or "
            "s3://...",
        )

    def _free_space(self) -> Finding:
        free = shutil.disk_usage(self._path).free
        if free < 2 * LARGE_BYTES:
            advice = "make room: a save needs room for one checkpoint beside those that are kept"
            return Finding(state="failed", value=free, unit="B", advice=advice)
        return Finding(value=free, unit="B")

    def _write(self) -> None:
        self._storage.make_dir(self._samples.folder)
        self._samples.write("a", b"a")
        self._samples.write("b", b"b")
        check_same(self._samples.read("a"), b"a")

    def _fsync(self) -> Finding:
        path = self._samples.path("synced")
        self._storage.write(path, SMALL)
        with open(path, "ab", buffering=0) as file:

            def sync() -> None:
                file.write(SMALL)
                self._storage.sync(path)

            return latency(sync, "each save waits for several; use a faster disk")

    def _create_again(self) -> None:
        if self._storage.create(self._samples.path("a"), b"other"):
            raise Failed("a file that existed was created", "do not let two jobs write here")

    def _exchange(self) -> None:
        if not self._storage.exchange(self._samples.path("a"), self._samples.path("b")):
            raise Failed(
                "two names cannot be exchanged",
                "a checkpoint is replaced in three renames instead of one, and after a crash "
                "between them the next save puts it right",
                state="missing",
            )
        check_same(self._samples.read("a"), b"b")

    def _locks(self) -> None:
        try:
            first = self._storage.hold(self._samples.path("lock"))
        except io.UnsupportedOperation as error:
            raise Failed(
                str(error),
                "whether a job is alive cannot be seen: let one job write a run, and pass --no-job "
                "to commands",
                state="missing",
            ) from error
        second = self._storage.hold(self._samples.path("lock"))
        for hold in (first, second):
            if hold is not None:
                hold.release()
        if first is None or second is not None:
            raise Failed("a lock does not exclude others", "let one job write a run at a time")

    def _hard_links(self) -> None:
        if not self._storage.link(self._samples.path("a"), self._samples.path("linked")):
            raise Failed("no hard links", "`fork` copies all bytes", state="missing")

    def _read_large(self) -> Finding:
        with open(self._samples.path("large"), "rb") as file:
            if hasattr(os, "posix_fadvise"):  # so that the bytes come not from the cache
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return self._samples.read_large()

    def _small_read(self) -> Finding:
        advice = "each restore waits for several; use a faster one"
        return latency(lambda: self._samples.read("a"), advice)

    def _clock(self) -> Finding:
        return self._samples.clock("a", lambda path: os.stat(path).st_mtime)
