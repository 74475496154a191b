"""Our Google Cloud Storage keeps the rules of the real one, in both of its protocols."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from urllib.parse import quote, urlsplit

import pytest

from tests.stores.gcs_server import TOKEN, Bucket, GcsServer

NAMES = ["a", "a/b", "a/b/c", "a/é", "a0", "b/1", "b/2/3", "b/2/4", "b/3", "c"]


@pytest.fixture
def server():
    with GcsServer() as started:
        started.make_bucket("tests")
        yield started


@pytest.fixture
def ask(server):
    """Sends a request, and returns the status, the headers and the body of the answer."""
    with closing(http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=10)) as connection:

        def send(method, path, body=None, **headers):
            fields = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, {"Authorization": f"Bearer {TOKEN}", **fields})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()

        yield send


# Listings


@pytest.mark.parametrize("limit", [1, 2, 3, 1000])
@pytest.mark.parametrize("delimiter", ["", "/"])
@pytest.mark.parametrize("prefix", ["", "a", "a/", "b/", "b/2", "x"])
def test_pages_are_one_listing(prefix, delimiter, limit):
    """Any size of the pages gives each object once, and each folder once."""
    bucket = Bucket("tests")
    for name in NAMES:
        bucket.put(name, b"")

    objects, prefixes, page = [], [], ""
    while True:
        found = bucket.list(prefix=prefix, delimiter=delimiter, page=page, limit=limit)
        assert len(found.objects) + len(found.prefixes) <= limit
        objects += [entry.name for entry in found.objects]
        prefixes += found.prefixes
        page = found.next_page
        if not page:
            break

    rest = {name: name[len(prefix) :] for name in NAMES if name.startswith(prefix)}
    folded = {name for name, tail in rest.items() if delimiter and delimiter in tail}
    assert objects == sorted(rest.keys() - folded)
    assert prefixes == sorted({prefix + rest[name].split("/")[0] + "/" for name in folded})


def test_bounds_of_a_listing():
    """The start is included, the end is not, and `start_after` is not either."""
    bucket = Bucket("tests")
    for name in NAMES:
        bucket.put(name, b"")

    def names(**options):
        return [entry.name for entry in bucket.list(**options).objects]

    assert names(start="a0", end="b/2/4") == ["a0", "b/1", "b/2/3"]
    assert names(start_after="b/2/4") == ["b/3", "c"]


# Objects


def test_both_protocols_name_the_same_generation(ask):
    """And every write makes a greater one, also of the same bytes."""
    found = []
    for _ in range(2):
        _, headers, _ = ask("PUT", "/tests/a%2Fb", b"1")
        status, _, body = ask("GET", "/storage/v1/b/tests/o/a%2Fb")
        assert status == 200
        assert json.loads(body)["generation"] == headers["x-goog-generation"]
        found.append(int(headers["x-goog-generation"]))

    assert found[0] < found[1]


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("PUT", "/tests/a", {"x_goog_if_generation_match": "0"}),
        ("PUT", "/tests/a", {"x_goog_if_generation_match": "1"}),
        ("DELETE", "/tests/a", {"x_goog_if_generation_match": "1"}),
        ("GET", "/tests/a", {"If_Match": '"other"'}),
        ("POST", "/upload/storage/v1/b/tests/o?uploadType=media&name=a&ifGenerationMatch=0", {}),
        ("DELETE", "/storage/v1/b/tests/o/a?ifGenerationMatch=1", {}),
        ("GET", "/storage/v1/b/tests/o/a?alt=media&ifGenerationMatch=1", {}),
        ("POST", "/storage/v1/b/tests/o/b/rewriteTo/b/tests/o/a?ifGenerationMatch=0", {}),
    ],
)
def test_conditions_that_do_not_hold(ask, method, path, headers):
    """Are answered with 412, and nothing changes."""
    ask("PUT", "/tests/b", b"2")
    ask("PUT", "/tests/a", b"1")

    assert ask(method, path, b"", **headers)[0] == 412
    assert ask("GET", "/tests/a")[2] == b"1"


@pytest.mark.parametrize(
    ("asked", "status", "data"),
    [
        ("bytes=2-4", 206, b"234"),
        ("bytes=7-", 206, b"789"),
        ("bytes=-2", 206, b"89"),
        ("bytes=8-100", 206, b"89"),
        ("bytes=10-", 416, None),
    ],
)
@pytest.mark.parametrize("path", ["/tests/a", "/storage/v1/b/tests/o/a?alt=media"])
def test_ranges(ask, path, asked, status, data):
    """In both protocols, as bytes, from the end, and cut off at the end."""
    ask("PUT", "/tests/a", b"0123456789")

    found, headers, body = ask("GET", path, Range=asked)
    assert found == status
    if data is not None:
        assert body == data
        assert headers["Content-Range"].endswith("/10")


def test_names_are_bytes_to_the_server(ask):
    """Escaped slashes, spaces and letters name one object in both protocols."""
    name = "a/b c+é%2F"
    ask("POST", f"/upload/storage/v1/b/tests/o?uploadType=media&name={quote(name, safe='')}", b"1")

    assert ask("GET", f"/tests/{quote(name)}")[2] == b"1"
    assert ask("GET", f"/tests/{quote(name, safe='')}")[2] == b"1"
    assert ask("GET", f"/storage/v1/b/tests/o/{quote(name, safe='')}?alt=media")[2] == b"1"


@pytest.mark.parametrize("newline", ["\r\n", "\n"])
def test_metadata_with_the_data(ask, newline):
    """A multipart upload names its object in its first part; the data is not changed."""
    data = "line--x\r\n\r"
    parts = [("application/json", '{"name": "a"}'), ("text/plain", data)]
    lines = [line for kind, text in parts for line in ("--x", f"Content-Type: {kind}", "", text)]
    body = newline.join([*lines, "--x--", ""]).encode()
    path = "/upload/storage/v1/b/tests/o?uploadType=multipart"

    assert ask("POST", path, body, Content_Type='multipart/related; boundary="x"')[0] == 200
    assert ask("GET", "/tests/a")[2] == data.encode()


def test_resumable_uploads(server, ask):
    """The object appears with the last piece; until then the answer says how far it is."""
    path = "/upload/storage/v1/b/tests/o?uploadType=resumable"
    _, headers, _ = ask("POST", f"{path}&name=a%20b&ifGenerationMatch=0", b"")
    place = headers["Location"].removeprefix(server.url)

    status, headers, _ = ask("PUT", place, b"123", Content_Range="bytes 0-2/*")
    assert (status, headers["Range"]) == (308, "bytes=0-2")
    assert ask("GET", "/tests/a%20b")[0] == 404
    assert ask("PUT", place, b"", Content_Range="bytes */*")[0] == 308
    assert ask("PUT", place, b"45", Content_Range="bytes 3-4/5")[0] == 200
    assert ask("GET", "/tests/a%20b")[2] == b"12345"
    assert server.bucket("tests").uploads() == []


def test_uploads_in_parts(server, ask):
    """The object appears with the last request; an upload that is aborted leaves nothing."""
    bucket = server.bucket("tests")
    _, _, body = ask("POST", "/tests/a?uploads")
    upload = body.decode().partition("<UploadId>")[2].partition("</UploadId>")[0]
    _, headers, _ = ask("PUT", f"/tests/a?partNumber=1&uploadId={upload}", b"1")
    assert ask("GET", "/tests/a")[0] == 404

    part = f"<Part><PartNumber>1</PartNumber><ETag>{headers['ETag']}</ETag></Part>"
    wrong = f"<C>{part.replace(headers['ETag'][1:5], '0000')}</C>".encode()
    assert ask("POST", f"/tests/a?uploadId={upload}", wrong)[0] == 400
    assert ask("POST", f"/tests/a?uploadId={upload}", f"<C>{part}</C>".encode())[0] == 200
    assert ask("GET", "/tests/a")[2] == b"1"

    ask("POST", "/tests/b?uploads")
    (left,) = bucket.uploads()
    assert ask("DELETE", f"/tests/b?uploadId={left}")[0] == 204
    assert bucket.uploads() == []


def test_buckets(ask):
    """One that is missing is 404; one that is made twice is a conflict."""
    assert ask("GET", "/storage/v1/b/tests")[0] == 200
    assert ask("GET", "/storage/v1/b/missing")[0] == 404
    assert ask("GET", "/missing/a")[0] == 404
    assert ask("POST", "/storage/v1/b", b'{"name": "tests"}')[0] == 409
