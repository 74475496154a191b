"""The storages that hold checkpoints: one protocol and its implementations.

`locate` turns a path or URL into a storage and a path in it; all other modules take both.
TensorStore is imported only with `jaxckpt.storage._arrays`.

    _protocol     what a place for checkpoints can do, and a path in it
    _local        files, in the order write, fsync, rename, fsync
    _flock        locks of files
    _limit        calls to file systems that may hang
    _mounts       which file system a path is on
    _memory       a store that behaves like an object store
    _object       `az://`, `gs://` and `s3://`
    _requests     deadlines, tries and second requests
    _locks        locks in stores, which are leases
    _settings     how to reach a bucket, for both clients
    _credentials  where its credentials come from
    _ahead        a checkpoint read in few round trips
    _large        large files in pieces, and what killed exports left of them
    _values       where the values of a database lie
    _arrays       the only module that imports TensorStore
    _staged       what TensorStore reads through memory where it lacks a driver
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import shutil
from functools import cache, partial
from typing import Final
from urllib.parse import unquote

from jaxckpt._core.log import logger
from jaxckpt.errors import UnsupportedFormat
from jaxckpt.storage._ahead import ahead, check_listed, listed, now, together
from jaxckpt.storage._limit import LimitedStorage, ask
from jaxckpt.storage._local import LocalStorage, files_in, is_temporary_file, listing, usable_cores
from jaxckpt.storage._memory import MemoryStorage
from jaxckpt.storage._mounts import Mount, device_of, mounts
from jaxckpt.storage._protocol import Entry, EntryKind, Hold, PathIn, Storage, corrupt
from jaxckpt.storage._settings import SCHEMES, StoreSettings, kvstore, use_store

__all__ = [
    "Entry",
    "EntryKind",
    "Hold",
    "LocalStorage",
    "MemoryStorage",
    "PathIn",
    "Storage",
    "StoreSettings",
    "ahead",
    "beside",
    "check_listed",
    "corrupt",
    "drop_cached",
    "files_in",
    "free_bytes",
    "heard_s",
    "is_temporary_file",
    "kvstore",
    "listed",
    "listing",
    "locate",
    "now",
    "real",
    "stamp",
    "store_of",
    "together",
    "usable_cores",
    "use_store",
]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
# pathlib turns the URL "gs://bucket/run" into "gs:/bucket/run", a relative path.
# The names of buckets have a rule of their own.
_NOT_IN_PATHS = re.compile(r"[\0\\]|^(?!(az|gs|s3)://).*[\ud800-\udc7f\udd00-\udfff]", re.DOTALL)
_THESE = "a NUL byte or backslash, or half of a surrogate pair"
_BROKEN_URL = re.compile(r"(az|file|gcs|gs|hdfs|hf|https?|memory|s3):/")


# URLs that people try, and what to do instead.
_MEANT: Final = {
    "gcs": " Did you mean gs://?",
    "s3a": " Did you mean s3://?",
    "abfs": " Did you mean az://?",
    "hf": " Download it first, with huggingface_hub.snapshot_download.",
    "http": " Download it first.",
    "https": " Download it first.",
}


def locate(path: str | os.PathLike[str]) -> tuple[Storage, str]:
    """Returns the storage of a path or URL, and the absolute path in that storage.

    A leading `~` is the home directory, `..` is resolved by name, and links are not resolved.

    Args:
        path: A local path, `file:///...` with %-escapes, `az://container/...`, `gs://bucket/...`,
            `s3://bucket/...` or `memory://name/...`; or a `PathIn`, for a storage of your own.

    Raises:
        ValueError: the path is empty, has NUL, a backslash or lone surrogates, or lacks a name.
        UnsupportedFormat: jaxckpt does not support the URL's scheme.
        StoreError: the file system of the path does not answer.

    Example:
        >>> locate("/runs/./vit//b16/")[1], locate("memory://scratch/run/")[1]
        ('/runs/vit/b16', 'memory://scratch/run')
    """
    if isinstance(path, PathIn):
        return path.storage, path.path
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise TypeError(f"path must be a str or an os.PathLike of str, got {path!r:.80}")
    if not text or _NOT_IN_PATHS.search(text):
        raise ValueError(f"path must not be empty, or have {_THESE}, got {text!r}")
    if _BROKEN_URL.match(text) and not _URL.match(text):
        raise UnsupportedFormat(f"{text!r} is a URL that lost a '/'. Pass it as a str or an epath.")
    url = _URL.match(text)
    scheme = url[1].lower() if url else ""
    if scheme == "memory":
        return _memory_url(text)
    if scheme in SCHEMES:
        from jaxckpt.storage._object import object_storage

        return object_storage(scheme, text)
    if scheme not in ("", "file"):
        raise _no_storage(text, scheme)
    local = _file_url_path(text) if scheme else os.path.expanduser(text)
    absolute = "/" + os.path.abspath(local).lstrip("/")  # POSIX gives "//" a meaning of its own
    return _storage_on(mounts().get(device_of(absolute, partial(ask(), os.stat)))), absolute


def _no_storage(text: str, scheme: str) -> UnsupportedFormat:
    return UnsupportedFormat(
        f"{text!r}: jaxckpt has no storage for {scheme}://. It saves to local paths, az://, "
        f"gs://, s3:// and memory://.{_MEANT.get(scheme, '')}"
    )


# The number of a device identifies a path's file system, however many links led there. It is used
# again when its mount is gone.
@cache
def _storage_on(mount: Mount | None) -> Storage:
    """Returns the storage for the files of a mount, and logs the first time what it lacks."""
    if mount is None or not mount.may_hang:
        return LocalStorage()
    ask.cache_clear()  # it may have been mounted since
    if mount.is_bucket:
        logger.info(
            "%s is a mounted bucket (%s) without an atomic rename: a step is committed by the file "
            "that is written last, as in an object store",
            mount.point,
            mount.kind,
        )
    local = LocalStorage(atomic_rename=not mount.is_bucket)
    return LimitedStorage(local, mount)


def drop_cached(storage: Storage, path: str) -> None:
    """Lets the next read of a file come from its disk, where the system can drop cached pages.

    The caches of a file server or of the disk itself stay, as do pages not yet written.
    """
    if storage.scheme == "file" and hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            ask()(_drop_pages, path)


def _drop_pages(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def free_bytes(path: str) -> int | None:
    """Returns how much can still be written to a local directory; None if that is unknown."""
    try:
        return ask()(shutil.disk_usage, path).free
    except OSError:
        return None


def heard_s(storage: Storage) -> float:
    """Returns when a bucket last answered, by `time.monotonic`; 0.0 for places without requests."""
    requests = getattr(storage, "requests", None)
    return 0.0 if requests is None else requests.heard_s


def real(storage: Storage, path: str) -> str:
    """Follows a link to a checkpoint, such as the newest step; never for what is inside one."""
    return ask()(os.path.realpath, path) if storage.scheme == "file" else path


def stamp(storage: Storage, path: str) -> object:
    """Returns what differs once a file was replaced or written: on a disk; elsewhere its size."""
    if storage.scheme != "file":
        return storage.size(path)
    status = ask()(os.stat, path)  # not its inode, which changes in a mounted bucket
    return status.st_size, status.st_mtime_ns


def store_of(path: str) -> str:
    """Returns the bucket of a path; or "memory:", or "" for a local path."""
    found = re.match("(memory:)|[a-z0-9]+://[^/]+", path)
    return found[1] or found[0] if found else ""


def beside(path: str, name: str) -> str:
    """Returns the path of `name` in the directory of `path`."""
    return posixpath.join(posixpath.dirname(path), name)


def _file_url_path(text: str) -> str:
    host, slash, path = text.partition("://")[2].partition("/")
    if host not in ("", "localhost") or not slash:
        raise ValueError(f"{text!r} must have the form file:///absolute/path")
    path = unquote(path)
    if "\0" in path:
        raise ValueError(f"path must not contain a NUL byte, got {text!r}")
    return "/" + path


def _memory_url(text: str) -> tuple[Storage, str]:
    path = posixpath.normpath("/" + text.partition("://")[2].lstrip("/"))
    if path == "/":
        raise ValueError(f"{text!r} must have the form memory://name/...")
    return MemoryStorage(), f"memory:/{path}"
