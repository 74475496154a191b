"""The same small GCS over gRPC: what TensorStore's driver `gcs_grpc` speaks, without encryption.

    with serving(server) as target:  # a GcsServer, whose objects both protocols see
        use_store("gs://", StoreSettings(endpoint=server.url, grpc_endpoint=target))

The messages are those of google.storage.v2, as the package google-cloud-storage has them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from tests.stores.gcs_server import GcsServer, Object, Refused

_MOST_BYTES = 2 << 20  # of data in a message, as GCS sends it
_CODES = {404: grpc.StatusCode.NOT_FOUND, 412: grpc.StatusCode.FAILED_PRECONDITION}


@contextlib.contextmanager
def serving(
    server: GcsServer, *, writes_end: threading.Event | None = None
) -> Iterator[tuple[str, list[str]]]:
    """Serves a store over gRPC; yields the target, and the names of the methods that are called.

    Args:
        writes_end: If given, no write is answered, and none ends before it is set.
    """
    v2: Any = pytest.importorskip("google.cloud._storage_v2.types.storage")
    calls: list[str] = []
    methods = Methods(server, v2, calls, writes_end)
    # name, message that it takes, makes of the handler
    table = {
        "ReadObject": (v2.ReadObjectRequest, grpc.unary_stream_rpc_method_handler),
        "BidiWriteObject": (v2.BidiWriteObjectRequest, grpc.stream_stream_rpc_method_handler),
        "ListObjects": (v2.ListObjectsRequest, grpc.unary_unary_rpc_method_handler),
        "DeleteObject": (v2.DeleteObjectRequest, grpc.unary_unary_rpc_method_handler),
    }
    handlers = {
        name: make(
            getattr(methods, name),
            request_deserializer=message.deserialize,
            response_serializer=_serialized,
        )
        for name, (message, make) in table.items()
    }
    running = grpc.server(futures.ThreadPoolExecutor(16))
    handler = grpc.method_handlers_generic_handler("google.storage.v2.Storage", handlers)
    running.add_generic_rpc_handlers((handler,))
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    try:
        yield f"dns:///127.0.0.1:{port}", calls
    finally:
        running.stop(None).wait()


def _serialized(message: Any) -> bytes:
    return type(message).serialize(message) if message is not None else b""  # None: Empty


class Methods:
    """The methods of the service, by their names there."""

    def __init__(
        self, server: GcsServer, v2: Any, calls: list[str], writes_end: threading.Event | None
    ) -> None:
        self._server, self._v2, self._calls = server, v2, calls
        self._writes_end = writes_end

    def ReadObject(self, request: Any, context: Any) -> Iterator[Any]:
        self._calls.append("read")
        with _refusing(context):
            stored = self._server.bucket(_bucket(request.bucket)).get(request.object_)
        start = request.read_offset
        if start < 0:
            start += len(stored.data)
        if start > len(stored.data):
            context.abort(grpc.StatusCode.OUT_OF_RANGE, "beyond the end")
        stop = start + request.read_limit if request.read_limit else len(stored.data)
        data = stored.data[start:stop]
        for at in range(0, max(len(data), 1), _MOST_BYTES):
            part = {"content": data[at : at + _MOST_BYTES]}
            yield self._v2.ReadObjectResponse(
                checksummed_data=part,
                metadata=self._object(stored),
                content_range={
                    "start": start,
                    "end": start + len(data),
                    "complete_length": len(stored.data),
                },
            )

    def BidiWriteObject(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        self._calls.append("write")
        if self._writes_end is not None:
            self._writes_end.wait()
            return
        data, spec = bytearray(), None
        for request in requests:
            if "write_object_spec" in request:
                spec = request.write_object_spec
            data += request.checksummed_data.content
            if request.finish_write:
                break
            if request.flush or request.state_lookup:
                yield self._v2.BidiWriteObjectResponse(persisted_size=len(data))
        assert spec is not None
        generation = spec.if_generation_match if "if_generation_match" in spec else None
        with _refusing(context):
            made = self._server.bucket(_bucket(spec.resource.bucket)).put(
                spec.resource.name, bytes(data), None if generation is None else str(generation)
            )
        yield self._v2.BidiWriteObjectResponse(resource=self._object(made))

    def ListObjects(self, request: Any, context: Any) -> Any:
        self._calls.append("list")
        with _refusing(context):
            page = self._server.bucket(_bucket(request.parent)).list(
                prefix=request.prefix,
                start=request.lexicographic_start,
                end=request.lexicographic_end,
                page=request.page_token,
            )
        objects = [self._object(one) for one in page.objects]
        return self._v2.ListObjectsResponse(objects=objects, next_page_token=page.next_page)

    def DeleteObject(self, request: Any, context: Any) -> None:
        self._calls.append("delete")
        wanted = request.if_generation_match if "if_generation_match" in request else None
        with _refusing(context):
            self._server.bucket(_bucket(request.bucket)).delete(
                request.object_, None if wanted is None else str(wanted)
            )

    def _object(self, stored: Object) -> Any:
        return self._v2.Object(
            name=stored.name, size=len(stored.data), generation=stored.generation
        )


def _bucket(resource: str) -> str:
    return resource.rpartition("/")[2]  # projects/_/buckets/NAME


@contextlib.contextmanager
def _refusing(context: Any) -> Iterator[None]:
    try:
        yield
    except Refused as error:
        context.abort(_CODES.get(error.status, grpc.StatusCode.INTERNAL), str(error))
