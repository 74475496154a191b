"""Checkpoints in the buckets of an object store: `az://`, `gs://` and `s3://bucket/...`.

A path here is the URL itself. Each object appears whole or not at all; a directory exists while an
object's name begins with it. Nothing can be renamed, so a commit is a marker created last.

A lock is a lease: attributes of the object mark it as held, and its holder writes it again
every quarter of `lease_s`. A writer that finds it unrenewed for `lease_s`, by the store's own
clock, takes it with a conditional write of other bytes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, final
from urllib.parse import unquote

import numpy as np

from jaxckpt.errors import CorruptCheckpoint, StoreError
from jaxckpt.storage._credentials import Login, source_of
from jaxckpt.storage._local import is_temporary_file
from jaxckpt.storage._locks import LeasedLock, Version, forget, steady_s
from jaxckpt.storage._protocol import Entry, EntryKind, WithoutDirectories, corrupt
from jaxckpt.storage._requests import (
    REQUESTS_AT_ONCE,
    Requests,
    all_of,
    callers,
    errors,
    is_beyond_the_end,
    is_condition,
    is_conflict,
)
from jaxckpt.storage._settings import (
    StoreSettings,
    check_bucket,
    check_peer,
    kvstore,
    open_store,
    settings_of,
)

# Larger reads are divided, so that the parts arrive together and none takes far longer than others.
_PART_BYTES: Final = 8 << 20
_PARTS_AT_ONCE: Final = 4  # of a file that is written in parts
_MOST_GRPC_BYTES: Final = 256 << 20  # of a file: TensorStore takes it whole
_PAGE: Final = 1000  # what stores list in one request
_LAST_NAME: Final = "\U0010ffff"
_HELD: Final = "jaxckptheld"  # the attribute of an object that is a held lock; Azure allows no "-"
_MAX_LOCK_BYTES: Final = 1 << 20
_NOT_IN_NAMES: Final = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
# A peer that is late by so much is left out, since there is another place to read from.
_PEER: Final = StoreSettings(timeout_s=60.0, stall_s=10.0, tries=1)
_COPY_LOOK_S: Final = 0.1  # between looks for a copy
_DELETED_AT_ONCE = {"az": 256, "s3": 1000}  # in one request of the client
_PROBES: Final = 3  # a writer that cleans up in the same place may delete one


@final
class ObjectStorage(WithoutDirectories):
    """One bucket; see `Storage`. `object_storage` makes one."""

    parallel_writes = True
    reads_at_once = REQUESTS_AT_ONCE

    def __init__(self, scheme: str, bucket: str, settings: StoreSettings) -> None:
        self.scheme = scheme
        self.root = f"{scheme}://{bucket}"
        self.settings = settings
        self.source = source_of(scheme, settings.credentials)
        self._bucket = bucket
        self._store = open_store(scheme, bucket, settings, self.source)
        self.requests = Requests(scheme, bucket, settings, self.source)
        # The store's time minus `steady_s()`, once it is known. This machine's time may
        # jump, and a live lock would seem old.
        self._clock: float | None = None
        self._clock_lock = threading.Lock()  # guards the probe

    # --- reading -----------------------------------------------------------------------------

    def read(self, path: str, *, max_bytes: int) -> bytes:
        return self._get(path, max_bytes)[1]

    def _get(
        self, path: str, max_bytes: int = _MAX_LOCK_BYTES, *, tries: int | None = None
    ) -> tuple[Any, bytes]:
        """Returns the store's description of an object, and its bytes."""

        def get() -> tuple[Any, bytes]:
            answer = obs().get(self._store, self._key(path))
            if (size := answer.meta["size"]) > max_bytes:
                raise corrupt(path, f"must have at most {max_bytes} bytes, got {size}")
            return answer, bytes(answer.bytes())

        return self.requests.read("read", path, get, tries=tries)

    def read_into(self, path: str, offset: int, buffers: Sequence[Any]) -> None:
        calls, start = [], offset
        for some in _parts(buffers):
            calls.append(partial(self._part_into, path, start, some))
            start += sum(map(len, some))
        all_of(callers(), calls)

    def _part_into(self, path: str, start: int, buffers: Sequence[Any]) -> None:
        """Copies a part into its place as soon as it has arrived, beside other parts."""
        data, at = np.frombuffer(self._range(path, start, sum(map(len, buffers))), np.uint8), 0
        for buffer in buffers:
            buffer[:] = data[at : at + len(buffer)]
            at += len(buffer)

    def _range(self, path: str, start: int, length: int) -> memoryview:
        def get() -> memoryview:
            key = self._key(path)
            try:
                return memoryview(obs().get_range(self._store, key, start=start, length=length))
            except FileNotFoundError:
                there = obs().list_with_delimiter(self._store, posixpath.dirname(key))["objects"]
                if not any(one["path"] == key for one in there):
                    raise
                raise errors().GenericError("404 Not Found of a listed object") from None

        try:
            data = self.requests.read("read", path, get, size=length)
        except StoreError as error:
            if not is_beyond_the_end(error):
                raise
            data = memoryview(b"")
        if len(data) != length:
            raise EOFError(
                f"{path}: the file ends at byte {start + len(data)}, expected {length} more bytes"
            )
        return data

    def kind(self, path: str) -> EntryKind | None:
        if path == self.root:  # no object
            return "dir"
        below = callers().submit(partial(self._page, path))
        try:
            self._head(path)
        except FileNotFoundError:
            return "dir" if any(one["path"] != self._key(path) for one in below.result()) else None
        return "file"

    def size(self, path: str) -> int:
        return self._head(path)["size"]

    def entries(self, path: str) -> dict[str, Entry]:
        key = self._key(path)
        answer = self.requests.read(
            "list", path, lambda: obs().list_with_delimiter(self._store, key or None)
        )
        found = {
            posixpath.basename(prefix): Entry("dir", 0) for prefix in answer["common_prefixes"]
        }
        for one in answer["objects"]:
            if one["path"] != key:  # a placeholder that some tools make for a directory
                found.setdefault(posixpath.basename(one["path"]), Entry("file", one["size"]))
        if not found and path != self.root:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return dict(sorted(found.items()))

    def files(self, path: str, *, in_one: bool = False) -> dict[str, Entry]:
        key = self._key(path)
        return {
            one["path"].removeprefix(f"{key}/"): Entry("file", one["size"])
            for one in sorted(self._below(path, in_one=in_one), key=lambda one: one["path"])
            if in_one or not is_temporary_file(posixpath.basename(one["path"]))
        }

    def _below(self, path: str, *, in_one: bool = False) -> list[Any]:
        found = self._page(path)
        if len(found) == _PAGE:
            found = [] if in_one else self._go_on(path, found)
        return [one for one in found if one["path"] != self._key(path)]

    def _page(self, path: str, after: str | None = None) -> list[Any]:
        return self.requests.read("list", path, lambda: [*next(self._pages(path, after), ())])

    def _pages(self, path: str, after: str | None = None) -> Iterator[Any]:
        below = obs().list(self._store, self._key(path) or None, offset=after, chunk_size=_PAGE)
        return iter(below)

    def _all_pages(self, path: str) -> list[Any]:
        return self.requests.read("list", path, lambda: [*chain(*self._pages(path))])

    def _go_on(self, path: str, page: list[Any]) -> list[Any]:
        """Returns the first page and what comes after it, several directories at a time."""
        keys = [one["path"] for one in page]
        # Azure lists from the beginning only, and directory buckets of S3 in no order.
        if self.scheme == "az" or keys != sorted(keys):
            return self._all_pages(path)
        names, last = list[str](), keys[-1]
        with contextlib.suppress(FileNotFoundError):  # all was deleted since the first page
            names = sorted(f"{self._key(path)}/{name}".lstrip("/") for name in self.entries(path))
        later = [name for name in names if name > last]
        seen = len(names) - len(later)  # as many in each request, if they are alike
        each = max(1, seen * 4 // 5, -(-len(later) // REQUESTS_AT_ONCE))
        starts = [last, *later[each::each]]
        ranges = zip(starts, [*starts[1:], _LAST_NAME], strict=True)
        parts = all_of(callers(), [partial(self._between, path, *both) for both in ranges])
        return [*page, *chain(*parts)]

    def _between(self, path: str, after: str, last: str) -> list[Any]:
        found = page = self._page(path, after)
        while len(page) == _PAGE and after < page[0]["path"] and page[-1]["path"] < last:
            found = found + (page := self._page(path, page[-1]["path"]))
        if found and found[0]["path"] <= after:  # this store also lists from the beginning only
            found = self._all_pages(path)
        return [one for one in found if after < one["path"] <= last]

    def _head(self, path: str) -> Any:
        return self.requests.read("look at", path, lambda: obs().head(self._store, self._key(path)))

    # --- writing -----------------------------------------------------------------------------

    def write(self, path: str, data: bytes | Iterable[bytes]) -> None:
        if isinstance(data, bytes):
            put_once = partial(self._put_once, path, data, "overwrite")
            self.requests.change("write", path, put_once)
            return
        by_grpc = self.settings.grpc_endpoint is not None
        some, first, size = iter(data), [], 0
        for part in some:
            first.append(part)
            size += len(part)
            if size > (_MOST_GRPC_BYTES if by_grpc else _PART_BYTES):
                break
        else:  # a small one needs one request instead of three
            (self._write_by_grpc if by_grpc else self.write)(path, b"".join(first))
            return
        # The client itself sends a part again; we could only begin anew.
        store = open_store(
            self.scheme, self._bucket, self.settings, self.source, tries=self.settings.tries
        )
        options = {"chunk_size": _PART_BYTES, "max_concurrency": _PARTS_AT_ONCE}

        def put() -> None:
            obs().put(store, self._key(path), chain(first, some), use_multipart=True, **options)

        self.requests.change("write", path, put, tries=1)

    def _write_by_grpc(self, path: str, data: bytes) -> None:
        from jaxckpt.storage._arrays import Keys

        folder, name = posixpath.split(path)
        Keys(kvstore(folder) or {}).write(name, data)

    def create(self, path: str, data: bytes) -> bool:
        self._probe(path)
        return self._create(path, data) is not None

    def _create(self, path: str, data: bytes, token: str | None = None) -> Version | None:
        """Creates an object; returns its version, or None if there was one.

        Args:
            token: Of the lock, if the object is a held one.
        """

        def put() -> Version | None:
            try:
                return self._put_once(path, data, "create", token)
            except Exception as error:
                if not is_condition(error):
                    raise
                # Ours after all, if the answer to an earlier try was lost, here or at a proxy.
                try:
                    return self._mine(path, data, token)
                except FileNotFoundError:
                    if not is_conflict(error):
                        return None
                raise  # the object does not exist, so try again

        try:
            return self.requests.change("create", path, put)
        except StoreError:
            with contextlib.suppress(OSError):
                if (mine := self._mine(path, data, token, tries=1)) is not None:
                    return mine
            raise

    def _mine(
        self, path: str, data: bytes, token: str | None, *, tries: int | None = None
    ) -> Version | None:
        """Returns the version of an object if this writer wrote it."""
        with contextlib.suppress(CorruptCheckpoint):  # it is too large
            answer, found = self._get(path, max(len(data), 1), tries=tries)
            if found == data and answer.attributes.get(_HELD) == token:
                return answer.meta
        return None

    def _put_once(self, path: str, data: bytes, mode: Any, token: str | None = None) -> Version:
        key, options = self._key(path), {"mode": mode, "use_multipart": False}
        attributes = {} if token is None else {_HELD: token}
        return obs().put(self._store, key, data, attributes=attributes, **options)

    def link(self, src: str, dst: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            self._head(dst)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), dst)
        self.requests.change(
            "copy", src, lambda: obs().copy(self._store, self._key(src), self._key(dst))
        )
        if self.scheme == "az":
            self._await_copy(src, dst)
        return False

    def _await_copy(self, src: str, dst: str) -> None:
        """Waits for a copy that Azure may only have begun; its size shows when it is whole."""
        size, end_s = self.size(src), time.monotonic() + self.settings.stall_s
        while time.monotonic() < end_s:
            with contextlib.suppress(FileNotFoundError):
                if self.size(dst) == size:
                    return
            time.sleep(_COPY_LOOK_S)
        raise OSError(errno.EIO, "the store accepted a copy, and did not make it", src, None, dst)

    def delete(self, path: str) -> None:
        below = [one["path"] for one in self._below(path)]
        # Objects that this process holds there are deleted too if a listing does not show them yet.
        held = [self._key(one) for one in forget(path)]
        self._delete(path, list(dict.fromkeys([*below, *held])) or [self._key(path)])

    def delete_files(self, paths: Sequence[str], *, check: Callable[[], object] = int) -> None:
        if paths:
            check()
            held = [*chain(*map(forget, paths))]  # from now on, such a lock looks lost
            self._delete(paths[0], [*map(self._key, paths)], int if held else check)

    def _delete(self, path: str, keys: Sequence[str], check: Callable[[], object] = int) -> None:
        def send(some: Sequence[str]) -> None:
            check()
            try:
                obs().delete(self._store, some)
            except FileNotFoundError as error:  # the others in the request are deleted
                with contextlib.suppress(FileNotFoundError):
                    if len(some) == 1 and obs().head(self._store, some[0]):
                        problem = "cannot delete: the store calls it missing, and shows it"
                        raise OSError(errno.EIO, problem, f"{self.root}/{some[0]}") from error

        def delete(some: Sequence[str]) -> None:
            self.requests.change("delete", path, partial(send, some))

        # Never twice because one is missing: another writer may have created it between the two.
        each = _DELETED_AT_ONCE.get(self.scheme, 1)
        all_of(callers(), [partial(delete, keys[n : n + each]) for n in range(0, len(keys), each)])

    # --- locks -------------------------------------------------------------------------------

    def hold(self, path: str, data: bytes | None = None, *, new: bool = False) -> LeasedLock | None:
        self._probe(path)
        token, asked_s = secrets.token_hex(8), steady_s()
        try:
            answer, found = (None, b"") if new else self._get(path)
        except FileNotFoundError:
            answer, found = None, b""
        if answer is None:
            data = token.encode() if data is None else data
            version = self._create(path, data, token)
        else:
            was_held = answer.attributes.get(_HELD)
            if was_held and not self._is_over(answer.meta):
                return None
            if data is None:
                # The former holder must find another version, which may be a hash of the bytes.
                data = token.encode() if was_held or not found else found
            version = self._replace(path, data, token, answer.meta)
        if version is None:
            return None
        write, lease_s = partial(self._replace, path, data, token), self.settings.lease_s
        return LeasedLock(path, lease_s, version, write, asked_s=asked_s).start()

    def _is_over(self, meta: Mapping[str, Any]) -> bool:
        assert self._clock is not None
        age_s = steady_s() + self._clock - meta["last_modified"].timestamp()
        return age_s > self.settings.lease_s

    def _replace(
        self,
        path: str,
        data: bytes,
        token: str,
        version: Version,
        *,
        held: bool = True,
        tries: int | None = None,
    ) -> Version | None:
        """Writes an object again if it still has a version; returns the new one, or None.

        Args:
            held: Whether the object is a held lock afterwards.
        """
        mode = {k: version[k] for k in ("e_tag", "version") if version.get(k)}

        def put() -> Version | None:
            try:
                return self._put_once(path, data, mode, token if held else None)
            except Exception as error:
                if not is_condition(error) and not isinstance(error, FileNotFoundError):
                    raise
                try:
                    # An earlier try, here or at an earlier renewal, may have acted.
                    mine = self._mine(path, data, token) if held else None
                    if mine is not None or not is_conflict(error):
                        return mine
                    found = self._head(path)
                except FileNotFoundError:
                    return None
                if {key: found.get(key) for key in mode} != mode:
                    return None
                raise

        return self.requests.change("lock", path, put, tries=tries)

    # --- what the store can do -----------------------------------------------------------------

    def _probe(self, path: str) -> None:
        """Tests, at the first write, whether conditional writes work, and reads the store's time.

        Raises:
            StoreError: they do not work, so that two writers could both commit a step.
        """
        with self._clock_lock:
            if self._clock is not None:
                return
            if self.settings.single_writer:
                self._clock = time.time() - steady_s()
                return
            problem, clock = "", 0.0
            for _ in range(_PROBES):
                file = f"{posixpath.dirname(path)}/.jaxckpt-tmp-{secrets.token_hex(8)}"
                try:
                    problem, clock = self._try_conditions(file)
                finally:
                    # If deleting fails, a temporary file of one byte stays.
                    with contextlib.suppress(OSError):
                        self._delete(file, [self._key(file)])
                if not problem:
                    break
            if problem:
                raise StoreError(
                    f"{self.root}: {problem}, so two jobs could both commit a step. Use a store "
                    "with conditional writes; or, if only one job writes here at a time, set "
                    "single_writer=True in StoreSettings or JAXCKPT_SINGLE_WRITER=1."
                )
            self._clock = clock

    def _try_conditions(self, file: str) -> tuple[str, float]:
        """Returns the problem, or "", and the store's time minus `steady_s()`."""

        def create_again() -> bool:
            try:
                return bool(self._put_once(file, b"2", "create"))
            except Exception as error:
                if not is_condition(error):
                    raise
                return False

        first = self._create(file, b"1")
        if first is None:
            return "an object with a new, random name was said to exist", 0.0
        if self.requests.change("create", file, create_again):
            return "it created an object that existed", 0.0
        if self._replace(file, b"3", "probe", first) is None:
            return "it refused to replace an object of the right version", 0.0
        now_s = steady_s()  # after the write, so that no live lease seems to be over
        try:
            clock = self._head(file)["last_modified"].timestamp() - now_s
        except FileNotFoundError:
            return "an object was gone as soon as it was replaced", 0.0
        if self._replace(file, b"4", "probe", first, held=False) is not None:
            return "it replaced an object that had changed", 0.0
        return "", clock

    def _key(self, path: str) -> str:
        if _NOT_IN_NAMES.search(path):
            raise ValueError(
                f"{path!r} must not have control characters or lone surrogates, which the names of "
                "objects cannot have. Choose another name."
            )
        return path.removeprefix(self.root).strip("/")


def obs() -> Any:
    """Returns obstore, which `open_store` has found."""
    import obstore

    return obstore


def _parts(buffers: Sequence[Any]) -> Iterator[list[Any]]:
    """Divides buffers, one after the other, into the parts of one request each."""
    part, room = list[Any](), _PART_BYTES
    for buffer in buffers:
        left = np.frombuffer(memoryview(buffer), np.uint8) if len(buffer) else buffer
        while len(left):
            part.append(left[:room])
            left, room = left[room:], room - len(part[-1])
            if not room:
                yield part
                part, room = [], _PART_BYTES
    if part:
        yield part


_storages: dict[tuple[str, str, StoreSettings, Login], ObjectStorage] = {}
_storages_lock = threading.Lock()  # guards _storages


def object_storage(scheme: str, text: str) -> tuple[ObjectStorage, str]:
    """Returns the storage of a URL, and its path in it: the URL without a slash at its end.

    Raises:
        ValueError: the URL lacks a valid bucket, or its path has empty, `.` or `..` parts or
            control characters.
        UnsupportedFormat: obstore is not installed.
    """
    bucket, _, name = text.partition("://")[2].partition("/")
    check_bucket(scheme, bucket, text)
    name = name.rstrip("/")
    if any(part in ("", ".", "..") for part in name.split("/")) and name:
        raise ValueError(f"{text!r} must not have empty, '.' or '..' parts in its path")
    settings = settings_of(scheme, bucket)
    place = scheme, bucket, settings
    key = *place, source_of(scheme, settings.credentials)
    with _storages_lock:
        storage = _storages[key] = _storages.get(key) or ObjectStorage(*place)
    path = f"{storage.root}/{name}".rstrip("/")
    storage._key(path)  # raises if no object can have the name
    return storage, path


def peer_storage(url: str) -> tuple[ObjectStorage, str]:
    """Returns the storage of a peer, which is only read, and the path of its URL."""
    scheme, _, rest = check_peer(url).partition("://")
    host, _, name = rest.partition("/")
    storage = ObjectStorage(scheme.lower(), host, _PEER)
    return storage, f"{storage.root}/{unquote(name)}".rstrip("/")
