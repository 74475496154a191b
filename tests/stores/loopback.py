"""What the servers here have in common: a loopback port, a thread, and a record of requests."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self


@dataclass(slots=True, kw_only=True)
class Request:
    """A request, recorded as soon as its head has arrived."""

    number: int  # from 0, in the order of arrival
    method: str
    path: str  # with the query, exactly as it was sent
    received_bytes: int = 0  # of the body
    sent_bytes: int = 0  # of the answer's body
    is_copy: bool = False  # whether the store is to copy an object by itself
    status: int | None = None  # None until an answer is sent, and if there never is one


class Requests:
    """All requests that a server has seen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _all
        self._all: list[Request] = []

    def add(self, method: str, path: str, *, is_copy: bool = False) -> Request:
        with self._lock:
            number = len(self._all)
            self._all.append(Request(number=number, method=method, path=path, is_copy=is_copy))
            return self._all[-1]

    def all(self, *, method: str = "", path: str = "") -> list[Request]:
        """Returns those of this method whose path contains `path`; of any method if it is empty."""
        with self._lock:
            return [r for r in self._all if method in ("", r.method) and path in r.path]

    def count(self, *, method: str = "", path: str = "") -> int:
        return len(self.all(method=method, path=path))

    def clear(self) -> None:
        """Forgets all requests; the next one has the number 0."""
        with self._lock:
            self._all.clear()


class LoopbackServer(socketserver.ThreadingTCPServer):
    """A server in threads of this process. Leaving the context closes all its connections."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, handler: Callable[..., socketserver.BaseRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.requests = Requests()
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()  # guards _connections
        self._thread = threading.Thread(
            target=self.serve_forever, args=(0.02,), name=type(self).__name__, daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            cut(connection)

    def process_request(self, request, client_address) -> None:
        with self._lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request) -> None:
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request, client_address) -> None:
        """Stays silent about clients that leave early, which is what many tests are about."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def cut(connection: socket.socket) -> None:
    """Ends both directions at once, which wakes up the thread that reads from it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
