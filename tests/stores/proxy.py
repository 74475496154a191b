"""A proxy in front of a store that makes the faults of a network, at exactly chosen requests.

    with Proxy(server.url) as proxy:
        proxy.add(Answer(503), method="PUT", path="/marker", times=1)
        proxy.add(Reset(applied=True), number=7)        # the eighth request
        proxy.add(Hang(), when=lambda request: request.received_bytes > 1000)
        ...
        assert [fault.done for fault in proxy.faults] == [1, 1, 0]
        assert proxy.requests.count(method="PUT") == 3

The first fault that fits a request, and is not used up, is made. The proxy sends heads on byte for
byte, so that signatures, which cover the header `Host`, stay valid: the client signs the address of
the proxy, and the servers check the signature against that header, not against their address.
"""

from __future__ import annotations

import contextlib
import http
import math
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BufferedIOBase
from urllib.parse import unquote, urlsplit

from tests.stores.loopback import LoopbackServer, Request
from tests.stores.rounds import Rounds

_PIECE_BYTES = 1 << 16
_LATEST_S = 60.0  # a server that is silent for so long is given up


# What can happen to a request


@dataclass(frozen=True, slots=True)
class Answer:
    """Answers with an error such as 403, 429 or 503; if `applied`, after the store did its work."""

    status: int
    applied: bool = False
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class Reset:
    """Resets the connection without an answer; if `applied`, after the store did its work."""

    applied: bool = False


@dataclass(frozen=True, slots=True)
class Truncate:
    """Ends the connection after so many bytes of the answer's body."""

    keep_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Slow:
    """Sends the answer's body at this speed."""

    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Delay:
    """Waits before the request is passed on."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Hang:
    """Never answers: a black hole. If `applied`, the store did its work."""

    applied: bool = False


@dataclass(frozen=True, slots=True)
class Hold:
    """Waits for an event before the request is passed on; if `applied`, before its answer is."""

    until: threading.Event
    applied: bool = False


Action = Answer | Reset | Truncate | Slow | Delay | Hang | Hold


@dataclass(slots=True, kw_only=True)
class Fault:
    """An action, and the requests that it happens to."""

    action: Action
    method: str
    path: str
    number: int | None
    when: Callable[[Request], bool]
    times: float
    done: int = field(default=0, init=False)

    def fits(self, request: Request) -> bool:
        return (
            self.done < self.times
            and self.method in ("", request.method)
            and self.path in unquote(request.path)
            and self.number in (None, request.number)
            and self.when(request)
        )


class Proxy(LoopbackServer):
    """Passes each request to the server at `target`, unless a fault says otherwise."""

    def __init__(self, target: str) -> None:
        super().__init__(_Connection)
        host, port = urlsplit(target).netloc.rsplit(":", 1)
        self.target = (host, int(port))
        self.delay_s = 0.0  # waited before each request is passed on
        # The speed of the line to the server, and of that from it, each of which all connections
        # share; None for no limit.
        self.bytes_per_s: float | None = None
        self.answers_bytes_per_s: float | None = None
        self._free_s = 0.0  # when the line is free again
        self.faults: list[Fault] = []
        self.rounds: Rounds | None = None  # in which requests are passed on
        self._lock = threading.Lock()  # guards faults and what they count

    def add(
        self,
        action: Action,
        *,
        method: str = "",
        path: str = "",
        number: int | None = None,
        when: Callable[[Request], bool] = lambda request: True,
        times: float = math.inf,
    ) -> Fault:
        """Makes a fault happen to every request that fits all of the conditions.

        Args:
            path: A part of the path with its query, both unescaped.
            number: The number of the request, from 0 since the proxy started or
                `requests.clear()`.
            when: Is asked when the request's body has been announced, but not yet read.
            times: For so many requests; the later ones pass.
        """
        fault = Fault(
            action=action, method=method, path=path, number=number, when=when, times=times
        )
        with self._lock:
            self.faults.append(fault)
        return fault

    def heal(self) -> None:
        """Removes all faults. Requests that hang go on to do so."""
        with self._lock:
            self.faults.clear()

    def wait_for_line(self, size: int, bytes_per_s: float | None) -> None:
        """Waits as long as a line of this speed takes for so many bytes."""
        if bytes_per_s is None:
            return
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + size / bytes_per_s
            until_s = self._free_s
        time.sleep(max(0.0, until_s - time.monotonic()))

    def take(self, request: Request) -> Action | None:
        """Finds what happens to a request, and counts it."""
        with self._lock:
            for fault in self.faults:
                if fault.fits(request):
                    fault.done += 1
                    return fault.action
        return None


# Messages


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The lines before the body of a request or an answer, untouched."""

    raw: bytes
    first: list[str]  # the words of the first line
    fields: dict[str, str]

    @classmethod
    def read(cls, stream: BufferedIOBase) -> _Head | None:
        """Returns None at the end of the connection."""
        lines = [stream.readline()]
        while lines[-1] not in (b"\r\n", b""):
            lines.append(stream.readline())
        if lines[-1] == b"":
            return None
        pairs = (line.decode("latin-1").partition(":") for line in lines[1:-1])
        return cls(
            raw=b"".join(lines),
            first=lines[0].decode("latin-1").split(),
            fields={name.lower(): value.strip() for name, _, value in pairs},
        )

    @property
    def length(self) -> int | None:
        """Returns the announced bytes of the body; None if the body ends by itself."""
        if "chunked" in self.fields.get("transfer-encoding", "").lower():
            return None
        return int(self.fields["content-length"]) if "content-length" in self.fields else None


def _pieces(head: _Head, stream: BufferedIOBase) -> Iterator[bytes]:
    """Yields a body piece by piece, with the lines between its chunks if it has chunks."""
    if head.length is not None:
        yield from _read(stream, head.length)
    elif "transfer-encoding" in head.fields:
        size = 1
        while size:
            line = stream.readline()
            size = int(line.split(b";")[0], 16)
            yield line
            yield from _read(stream, size + 2)


def _read(stream: BufferedIOBase, count: int) -> Iterator[bytes]:
    while count:
        piece = stream.read(min(count, _PIECE_BYTES))
        if not piece:
            raise ConnectionError("the connection ended within a body")
        count -= len(piece)
        yield piece


class _Connection(socketserver.StreamRequestHandler):
    """One connection of a client, and one to the server for each request.

    A server may end an idle connection just when the next request is sent, which a client of its
    own would try again.
    """

    disable_nagle_algorithm = True
    server: Proxy
    _upstream: socket.socket | None = None
    _answers: BufferedIOBase

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while self._handle_one():
                pass
        self._disconnect()

    def _handle_one(self) -> bool:
        """Returns whether the connection can take another request."""
        head = _Head.read(self.rfile)
        if head is None:
            return False
        # x-amz-, x-goog- and x-ms-copy-source
        is_copy = any(name.endswith("-copy-source") for name in head.fields)
        request = self.server.requests.add(*head.first[:2], is_copy=is_copy)
        request.received_bytes = head.length or 0
        if (rounds := self.server.rounds) is None:
            return self._serve(head, request)
        rounds.enter(request)
        try:
            return self._serve(head, request)
        finally:
            rounds.leave()

    def _serve(self, head: _Head, request: Request) -> bool:
        action = self.server.take(request)
        time.sleep(self.server.delay_s)
        if head.fields.get("expect", "").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        match action:
            case Answer(applied=applied) | Reset(applied=applied) | Hang(applied=applied):
                self._lose(head, applied=applied)
                return self._stop(request, action)
            case Delay(seconds=seconds):
                time.sleep(seconds)
            case Hold(until=until, applied=False):
                until.wait(_LATEST_S)
        return self._pass(head, request, action)

    def _lose(self, head: _Head, *, applied: bool) -> None:
        """Reads the request, sends it on if it is to be applied, and drops the server's answer."""
        dropped = self._ask(head)[1] if applied else _pieces(head, self.rfile)
        for _ in dropped:
            pass

    def _stop(self, request: Request, action: Answer | Reset | Hang) -> bool:
        match action:
            case Answer():
                self._answer(request, action)
                return True
            case Hang():
                self.rfile.read()  # until the client leaves or the proxy ends
            case Reset():
                reset(self.connection, self.rfile)
        return False

    def _answer(self, request: Request, action: Answer) -> None:
        phrase = http.HTTPStatus(action.status).phrase
        body = f"<Error><Code>Injected</Code><Message>{phrase}</Message></Error>".encode()
        lines = [
            f"HTTP/1.1 {action.status} {phrase}",
            "Content-Type: application/xml",
            f"Content-Length: {len(body)}",
        ]
        if action.retry_after_s is not None:
            lines.append(f"Retry-After: {action.retry_after_s}")
        request.status = action.status
        request.sent_bytes = 0 if request.method == "HEAD" else len(body)
        self.wfile.write("\r\n".join([*lines, "", ""]).encode() + body[: request.sent_bytes])

    def _pass(self, head: _Head, request: Request, action: Action | None) -> bool:
        answer, body = self._ask(head)
        if isinstance(action, Hold):
            action.until.wait(_LATEST_S)
        request.status = int(answer.first[1])
        self.wfile.write(answer.raw)
        started = time.monotonic()
        for piece in body:
            kept = piece
            if isinstance(action, Truncate):
                kept = piece[: action.keep_bytes - request.sent_bytes]
            request.sent_bytes += len(kept)
            if isinstance(action, Slow):
                due = started + request.sent_bytes / action.bytes_per_s
                time.sleep(max(0.0, due - time.monotonic()))
            self.server.wait_for_line(len(kept), self.server.answers_bytes_per_s)
            self.wfile.write(kept)
        is_cut = isinstance(action, Truncate)
        return not (is_cut or _closes(head) or _closes(answer) or not _has_length(answer))

    def _ask(self, head: _Head) -> tuple[_Head, Iterator[bytes]]:
        """Sends a request on. Returns the head and the body of the answer."""
        upstream = self._connect()
        upstream.sendall(head.raw)
        for piece in _pieces(head, self.rfile):
            self.server.wait_for_line(len(piece), self.server.bytes_per_s)
            upstream.sendall(piece)
        while True:
            answer = _Head.read(self._answers)
            if answer is None:
                raise ConnectionError("the server ended the connection")
            if not answer.first[1].startswith("1"):  # 100 Continue, which was sent before
                return answer, _body(answer, self._answers, head.first[0])

    def _connect(self) -> socket.socket:
        self._disconnect()
        self._upstream = socket.create_connection(self.server.target, timeout=_LATEST_S)
        self._upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._upstream.makefile("rb")
        return self._upstream

    def _disconnect(self) -> None:
        if self._upstream is not None:
            self._answers.close()
            self._upstream.close()
            self._upstream = None


def reset(connection: socket.socket, *files: BufferedIOBase) -> None:
    """Closes a connection so that the other side sees a reset, not an end."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    for file in files:  # they keep the socket open
        file.close()
    connection.close()


def _body(answer: _Head, stream: BufferedIOBase, method: str) -> Iterator[bytes]:
    """Yields the body of an answer; some have none, whatever their head announces."""
    if method == "HEAD" or answer.first[1] in ("204", "304"):
        return
    if _has_length(answer):
        yield from _pieces(answer, stream)
        return
    while piece := stream.read(_PIECE_BYTES):  # until the server closes the connection
        yield piece


def _has_length(answer: _Head) -> bool:
    """Returns whether the end of the answer can be seen on an open connection."""
    return answer.first[1] in ("204", "304") or not answer.fields.keys().isdisjoint(
        ("content-length", "transfer-encoding")
    )


def _closes(head: _Head) -> bool:
    return head.fields.get("connection", "").lower() == "close"
