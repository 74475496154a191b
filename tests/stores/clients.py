"""The two clients of object stores, with the same verbs: what tests compare the stores by."""

from __future__ import annotations

from typing import Any

import obstore
import tensorstore as ts
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import AzureStore, GCSStore, S3Store

from tests.stores.servers import ACCOUNT, REGION, Server

_STORES = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
_RETRIES = {"max_retries": 4, "initial_delay": "50ms", "max_delay": "1s"}


class Obstore:
    """obstore, configured by the environment."""

    def __init__(self, server: Server, **options: object) -> None:
        if server.scheme == "az":  # without it, printing the store panics
            options["account_name"] = ACCOUNT
        self.store: Any = _STORES[server.scheme](server.bucket, **options)

    def put(self, name: str, data: bytes) -> object:
        """Returns what `swap` takes."""
        return _token(obstore.put(self.store, name, data))

    def create(self, name: str, data: bytes) -> bool:
        try:
            obstore.put(self.store, name, data, mode="create")
        except AlreadyExistsError:
            return False
        return True

    def swap(self, name: str, data: bytes, token: Any) -> bool:
        try:
            obstore.put(self.store, name, data, mode=token)
        except PreconditionError:
            return False
        return True

    def get(self, name: str) -> bytes:
        return bytes(obstore.get(self.store, name).bytes())

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        return bytes(obstore.get_range(self.store, name, start=start, end=stop))

    def names(self) -> list[str]:
        return sorted(self.sizes())

    def sizes(self) -> dict[str, int]:
        return {entry["path"]: entry["size"] for page in obstore.list(self.store) for entry in page}


def _token(result: Any) -> dict[str, str]:
    """Drops the keys without a value, which obstore gives but does not take."""
    return {key: value for key, value in result.items() if value is not None}


class TensorStore:
    """TensorStore's key-value stores, which read the environment too."""

    def __init__(self, server: Server) -> None:
        self.spec = spec(server)
        self.store = ts.KvStore.open(self.spec, context=context()).result()
        self._missing = self.store.read("no such name").result().stamp.generation

    def put(self, name: str, data: bytes) -> object:
        """Returns what `swap` takes."""
        return self.store.write(name, data).result().generation

    def create(self, name: str, data: bytes) -> bool:
        return self.swap(name, data, self._missing)

    def swap(self, name: str, data: bytes, token: Any) -> bool:
        return self.store.write(name, data, if_equal=token).result().generation != b""

    def get(self, name: str) -> bytes:
        return self.store.read(name).result().value

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        return self.store.read(name, byte_range=slice(start, stop)).result().value

    def names(self) -> list[str]:
        return sorted(key.decode() for key in self.store.list().result())


def spec(server: Server, path: str = "") -> dict[str, object]:
    """Returns TensorStore's specification of a place in the server's bucket."""
    place = {"bucket": server.bucket, "path": path}
    if server.scheme == "gs":
        return {"driver": "gcs", **place}
    return {
        "driver": "s3",
        **place,
        "endpoint": server.url,
        "aws_region": REGION,
        "use_conditional_write": True,
    }


def context() -> ts.Context:
    """Returns TensorStore's context, which asks nobody else for credentials and soon gives up."""
    return ts.Context(
        {
            "aws_credentials": {"type": "environment"},
            "s3_request_retries": _RETRIES,
            "gcs_request_retries": _RETRIES,
        }
    )
