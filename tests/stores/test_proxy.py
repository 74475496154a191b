"""The proxy passes requests on unchanged, and makes each fault at the requests chosen for it."""

from __future__ import annotations

import contextlib
import http.client
import socketserver
from urllib.parse import urlsplit

import pytest
from obstore.exceptions import GenericError

from tests.stores.clients import Obstore, TensorStore
from tests.stores.gcs_server import TOKEN
from tests.stores.loopback import LoopbackServer
from tests.stores.proxy import Answer, Delay, Hang, Proxy, Reset, Slow, Truncate

SHORT_S = 0.3
BODY = bytes(range(256)) * 1000


class Connection:
    """A connection of a plain client to the bucket of a store, through a proxy."""

    def __init__(self, server, proxy, timeout_s=10.0):
        self._http = http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=timeout_s)
        self._bucket = server.bucket

    def ask(self, method, name, body=None):
        """Returns the status and the body of the answer, and keeps the answer."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        self._http.request(method, f"/{self._bucket}/{name}", body=body, headers=headers)
        self.answer = self._http.getresponse()
        return self.answer.status, self.answer.read()

    def close(self):
        self._http.close()


@pytest.fixture
def gcs_proxy(gcs_server, proxied):
    """A proxy in front of the quick store, and a function that connects to it."""
    with contextlib.ExitStack() as stack:
        server, proxy = proxied(gcs_server)

        def connect(**options):
            connection = Connection(server, proxy, **options)
            return stack.enter_context(contextlib.closing(connection))

        yield proxy, connect


def test_requests_pass_on_one_connection_and_are_recorded(gcs_proxy):
    """In the order of arrival, with the bytes of both bodies."""
    proxy, connect = gcs_proxy
    connection = connect()

    assert connection.ask("PUT", "a/b%20c", BODY)[0] == 200
    assert connection.ask("HEAD", "a/b%20c") == (200, b"")
    assert connection.ask("GET", "a/b%20c") == (200, BODY)
    assert connection.ask("DELETE", "a/b%20c")[0] == 204
    assert connection.ask("GET", "a/b%20c")[0] == 404

    found = proxy.requests.all()
    assert [r.number for r in found] == [0, 1, 2, 3, 4]
    assert [r.status for r in found] == [200, 200, 200, 204, 404]
    assert [r.received_bytes for r in found] == [len(BODY), 0, 0, 0, 0]
    assert [r.sent_bytes for r in found][:4] == [0, 0, len(BODY), 0]
    assert all(r.path.endswith("/a/b%20c") for r in found)


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("status", [403, 429, 503])
def test_an_error_is_answered(gcs_proxy, status, applied):
    """With or without the store's work; the connection stays open."""
    proxy, connect = gcs_proxy
    proxy.add(Answer(status, applied=applied, retry_after_s=7), times=1)
    connection = connect()

    assert connection.ask("PUT", "a", b"1")[0] == status
    assert connection.answer.headers["Retry-After"] == "7"
    assert connection.ask("GET", "a")[0] == (200 if applied else 404)


@pytest.mark.parametrize("applied", [False, True])
def test_the_connection_is_reset(gcs_proxy, applied):
    """With or without the store's work."""
    proxy, connect = gcs_proxy
    proxy.add(Reset(applied=applied), times=1)

    with pytest.raises(ConnectionResetError):
        connect().ask("PUT", "a", b"1")

    assert proxy.requests.all()[0].status is None
    assert connect().ask("GET", "a")[0] == (200 if applied else 404)


@pytest.mark.parametrize("keep_bytes", [0, 1000, 100_000])
def test_a_body_is_truncated(gcs_proxy, keep_bytes):
    """The head announces the whole body; the connection ends after a part of it."""
    proxy, connect = gcs_proxy
    connection = connect()
    connection.ask("PUT", "a", BODY)
    proxy.add(Truncate(keep_bytes), times=1)

    with pytest.raises(http.client.IncompleteRead) as error:
        connection.ask("GET", "a")

    assert error.value.partial == BODY[:keep_bytes]
    assert connect().ask("GET", "a") == (200, BODY)


@pytest.mark.parametrize("action", [Delay(60.0), Slow(1000.0), Hang()])
def test_a_client_waits_in_vain(gcs_proxy, action):
    """A client with a deadline leaves; the next request passes."""
    proxy, connect = gcs_proxy
    connect().ask("PUT", "a", BODY)
    proxy.add(action, times=1)

    with pytest.raises(TimeoutError):
        connect(timeout_s=SHORT_S).ask("GET", "a")

    assert connect().ask("GET", "a") == (200, BODY)


def test_a_black_hole_may_have_done_the_work(gcs_proxy):
    """The client leaves without an answer, and its object is there."""
    proxy, connect = gcs_proxy
    proxy.add(Hang(applied=True), method="PUT")

    with pytest.raises(TimeoutError):
        connect(timeout_s=SHORT_S).ask("PUT", "a", b"1")

    assert connect().ask("GET", "a") == (200, b"1")


def test_every_request_can_be_delayed(gcs_proxy):
    """By `delay_s`, until it is set to 0."""
    proxy, connect = gcs_proxy
    proxy.delay_s = 60.0
    with pytest.raises(TimeoutError):
        connect(timeout_s=SHORT_S).ask("PUT", "a", b"1")

    proxy.delay_s = 0.0
    assert connect().ask("GET", "a")[0] == 404


def test_faults_choose_their_requests(gcs_proxy):
    """By method, path, number and predicate, so many times; the first that fits is made."""
    proxy, connect = gcs_proxy
    faults = [
        proxy.add(Answer(500), number=1),
        proxy.add(Answer(501), method="PUT", path="/a b", times=1),
        proxy.add(Answer(502), when=lambda request: request.received_bytes == 3),
    ]
    connection = connect()

    asked = [("PUT", "c"), ("PUT", "c"), ("PUT", "a%20b"), ("PUT", "a%20b"), ("GET", "a%20b")]
    statuses = [connection.ask(method, name, b"1")[0] for method, name in asked]
    assert statuses == [200, 500, 501, 200, 200]
    assert connection.ask("PUT", "c", b"123")[0] == 502
    assert [fault.done for fault in faults] == [1, 1, 1]

    proxy.heal()
    assert connection.ask("PUT", "c", b"123")[0] == 200


def test_a_server_may_close_an_idle_connection():
    """The client, whose own connection is open, notices nothing."""

    class OneAnswer(socketserver.StreamRequestHandler):
        def handle(self):
            while self.rfile.readline() != b"\r\n":
                pass
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    with LoopbackServer(OneAnswer) as server, Proxy(server.url) as proxy:
        connection = http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=10)
        with contextlib.closing(connection):
            for _ in range(3):
                connection.request("GET", "/")
                assert connection.getresponse().read() == b"ok"


# What the clients make of it


@pytest.mark.parametrize("kind", [Obstore, TensorStore])
@pytest.mark.parametrize("action", [Answer(503), Answer(429), Reset(), Truncate(1000)])
@pytest.mark.parametrize("name", ["seaweedfs_server", "gcs_server"])
def test_clients_read_again(request, proxied, name, action, kind):
    """Both clients read to the end after an answer that fails or breaks off."""
    server, proxy = proxied(request.getfixturevalue(name))
    client = kind(server)
    client.put("a", BODY)
    fault = proxy.add(action, method="GET", path="/a", times=1)

    assert client.get("a") == BODY
    assert fault.done == 1


@pytest.mark.parametrize("name", ["seaweedfs_server", "moto_server", "gcs_server"])
def test_obstore_may_lose_a_marker_that_is_its_own(request, proxied, name):
    """After a 503 it creates again and finds its own object; after a reset it gives up."""
    server, proxy = proxied(request.getfixturevalue(name))
    client = Obstore(server)
    proxy.add(Answer(503, applied=True), path="/a", times=1)
    proxy.add(Reset(applied=True), path="/b", times=1)

    assert not client.create("a", b"ours")
    with pytest.raises(GenericError):
        client.create("b", b"ours")

    assert client.get("a") == client.get("b") == b"ours"


@pytest.mark.parametrize("applied", [Answer(503, applied=True), Reset(applied=True)])
@pytest.mark.parametrize("name", ["seaweedfs_server", "moto_server", "gcs_server"])
def test_tensorstore_may_lose_a_marker_that_is_its_own(request, proxied, name, applied):
    """It creates again after either, and finds its own object."""
    server, proxy = proxied(request.getfixturevalue(name))
    client = TensorStore(server)
    fault = proxy.add(applied, when=lambda r: r.method in ("PUT", "POST"), path="marker", times=1)

    assert not client.create("marker", b"ours")
    assert fault.done == 1
    assert client.get("marker") == b"ours"
