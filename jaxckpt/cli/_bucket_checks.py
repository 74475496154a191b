"""The checks of a bucket, with the permission to grant for each that is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Final, final

import numpy as np

from jaxckpt.cli._checks import SMALL, Check, Failed, Finding, Samples, check_same, latency
from jaxckpt.errors import StoreError
from jaxckpt.storage import kvstore
from jaxckpt.storage._local import temporary_sibling
from jaxckpt.storage._object import ObjectStorage, object_storage
from jaxckpt.storage._requests import Reason, reason_of

# A check, unlike a job, soon reports that something does not answer.
_TIMEOUT_S: Final = 60.0
_TRIES: Final = 3

_READ: Final = {"az": "read", "gs": "storage.objects.get", "s3": "s3:GetObject"}
_CREATE: Final = {"az": "write", "gs": "storage.objects.create", "s3": "s3:PutObject"}
_BOTH: Final = {scheme: f"{_READ[scheme]} and {_CREATE[scheme]}" for scheme in _READ}
_PERMISSIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "list": {
        "az": "list",
        "gs": "storage.objects.list",
        "s3": "s3:ListBucket (of the bucket itself)",
    },
    "create": _CREATE,
    "seen at once": _BOTH,
    # On Google Cloud Storage, to replace an object is to delete it.
    "compare-and-swap": {**_CREATE, "gs": "storage.objects.delete"},
    "read a range": _READ,
    "copy": _BOTH,
    "both clients": _BOTH,
    "write 64 MiB": {**_CREATE, "gs": "storage.multipartUploads.create"},
    "read 64 MiB": _READ,
    "small read": _READ,
    "clock": _READ,
    "delete": {"az": "delete", "gs": "storage.objects.delete", "s3": "s3:DeleteObject"},
}
_CONDITIONS: Final = (
    "two jobs could both commit a step. Use a store with conditional writes; or, if only one job "
    "writes here at a time, set single_writer=True in StoreSettings or JAXCKPT_SINGLE_WRITER=1"
)
_LAGS: Final = (
    "do not keep a run here: the next job may resume at an older step, and one that lost the run "
    "may not notice. Use a store that shows at once what was written"
)
_APART: Final = (
    "set the endpoint, region and credentials in StoreSettings, which both clients follow"
)
_NEARER: Final = "each save and restore waits for several requests; use a bucket nearer by"
_LISTS: Final = 3
_FILES: Final = ("marker", "data", "copy", "by TensorStore", "large")


@final
class BucketLocation:
    """A URL in a bucket; see `Location`.

    Raises:
        ValueError: as `locate`.
    """

    def __init__(self, scheme: str, url: str) -> None:
        storage, self._path = object_storage(scheme, url)
        soon = replace(
            storage.settings,
            timeout_s=min(_TIMEOUT_S, storage.settings.timeout_s),
            tries=min(_TRIES, storage.settings.tries),
        )
        self._storage = ObjectStorage(scheme, storage.root.partition("://")[2], soon)
        self._samples = Samples(self._storage, temporary_sibling(f"{self._path}/any"))
        self._marker, self._data = map(self._samples.path, _FILES[:2])
        self._refusal: StoreError | None = None
        self._has_begun = False

    @property
    def checks(self) -> Sequence[Check]:
        """Returns the checks, in order."""
        there, made = ("obstore", "answers", "credentials", "bucket"), ("create",)
        storage, samples, unless = self._storage, self._samples, self._raise_if

        def modified_s(path: str) -> float:
            return storage._head(path)["last_modified"].timestamp()

        return [
            Check("obstore", lambda: Finding(text=metadata.version("obstore"))),
            Check("answers", self._answers),
            Check(
                "credentials",
                lambda: unless("credentials", "package") or Finding(text=storage.source.name),
                there[:2],
            ),
            Check("bucket", lambda: unless("bucket") or Finding(text=storage.root), there[:3]),
            Check("list", lambda: unless("permission"), there),
            Check("create", self._create, there),
            Check("seen at once", self._seen_at_once, ("list", "create")),
            Check("create again", self._create_again, made),
            Check("compare-and-swap", self._swap, made),
            Check("read a range", self._read_range, made),
            Check("copy", self._make_copy, ("list", "create")),
            Check("both clients", self._both_clients, made),
            Check("write 64 MiB", samples.write_large, made),
            Check("read 64 MiB", samples.read_large, ("write 64 MiB",)),
            Check(
                "small read",
                lambda: latency(lambda: samples.read("data"), _NEARER),
                ("read a range",),
            ),
            Check("clock", lambda: samples.clock("data", modified_s), made),
            Check("delete", self._delete, made),
        ]

    def advice(self, check: str, error: Exception) -> str:
        """Returns what to do about an error: the permission to grant, or what to set."""
        reason = reason_of(error)
        if reason == "permission" and check in _PERMISSIONS:
            advice = f"grant {_PERMISSIONS[check][self._storage.scheme]} to these credentials"
        else:
            advice = self._storage.requests.advice(reason)
        return advice if check != "delete" else f"{advice}; delete {self._samples.folder}"

    def clean(self) -> None:
        """Deletes all that the checks wrote."""
        if self._has_begun:
            self._storage.delete_files([*map(self._samples.path, _FILES)])

    # --- is there anything to write to -----------------------------------------------------------

    def _answers(self) -> Finding:
        try:
            self._storage._page(self._path)
        except StoreError as error:
            self._refusal = error
        self._raise_if("silence", "unreachable", "load", "region", "addressing", "clock")
        return Finding(text=self._storage.requests.endpoint)

    def _raise_if(self, *reasons: Reason) -> None:
        """Raises the refusal of the first request if it has one of the reasons."""
        if self._refusal is not None and reason_of(self._refusal) in reasons:
            raise self._refusal

    # --- what jaxckpt does there -----------------------------------------------------------------

    def _create(self) -> None:
        self._has_begun = True
        if not self._storage._create(self._marker, b"1"):
            raise self._unconditional("an object with a new, random name was said to exist")

    def _seen_at_once(self) -> None:
        for size in range(1, _LISTS + 1):
            self._samples.write("data", SMALL[:size])
            found = self._storage.files(self._samples.folder).get("data")
            if found is None or found.size != size:
                raise Failed("a listing did not show an object that had just been written", _LAGS)
            read = b""
            with contextlib.suppress(FileNotFoundError):
                read = self._samples.read("data")
            if read != SMALL[:size]:
                raise Failed("a read did not find what had just been written", _LAGS)

    def _create_again(self) -> None:
        if self._storage._create(self._marker, b"2"):
            raise self._unconditional("it created an object that existed")

    def _swap(self) -> None:
        put = partial(self._storage._put_once, self._marker, b"3", "overwrite")
        version = self._storage.requests.change("write", self._marker, put)
        swap = partial(self._storage._replace, self._marker, version=version)
        if not swap(b"4", token="doctor"):
            raise self._unconditional("it refused to replace an object of the right version")
        if swap(b"5", token=""):
            raise self._unconditional("it replaced an object that had changed")

    def _unconditional(self, what: str) -> Failed:
        is_allowed = self._storage.settings.single_writer
        return Failed(what, _CONDITIONS, state="missing" if is_allowed else "failed")

    def _read_range(self) -> None:
        self._samples.write("data")
        buffer = np.empty(5, np.uint8)
        self._storage.read_into(self._data, 10, [buffer])
        check_same(buffer.tobytes(), SMALL[10:15])

    def _make_copy(self) -> None:
        self._samples.write("data")
        self._storage.link(self._data, self._samples.path("copy"))
        check_same(self._samples.read("copy"), SMALL)

    def _both_clients(self) -> Finding:
        from jaxckpt.storage._arrays import Keys

        if (spec := kvstore(self._samples.folder)) is None:
            why = "no driver for" if self._storage.scheme == "az" else "no credentials at"
            return Finding(text=f"obstore alone: TensorStore has {why} this store")
        keys = Keys(spec)
        self._samples.write("data")
        if keys.read("data") != SMALL:
            raise Failed("TensorStore does not see the object that obstore wrote", _APART)
        keys.write("by TensorStore", SMALL)
        try:
            check_same(self._samples.read("by TensorStore"), SMALL)
        except FileNotFoundError as error:
            what = "obstore does not see the object that TensorStore wrote"
            raise Failed(what, _APART) from error
        return Finding()

    def _delete(self) -> None:
        self.clean()
        if self._refusal is None and self._storage.files(self._samples.folder):
            raise Failed(
                "the store said that the objects are deleted, but lists them still",
                f"delete {self._samples.folder}; see whether the bucket holds or retains objects",
            )
