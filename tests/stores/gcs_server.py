"""A small Google Cloud Storage in memory, with honest generations and preconditions.

It speaks the parts of two protocols that clients use:

- JSON (`/storage/v1/b/...`): TensorStore's driver `gcs`. Also the metadata of buckets and objects,
  multipart and resumable uploads, copies and rewrites, which fsspec's client asks for.
- XML (`/bucket/key`): obstore's `GCSStore`, with its multipart uploads and `list-type=2`.

As in the real one, a write, a delete and a listing each happen at one moment, every write gives a
new generation, and a precondition is checked at the moment of the write. The only access control
is that a token other than `TOKEN` is refused. There are no versions.

Example:
    with GcsServer() as server:
        server.make_bucket("tests")
        server.delay_s = 0.05                       # before each answer from now on
        ...
        assert server.requests.count(method="PUT") == 2
"""

from __future__ import annotations

import base64
import email.utils
import hashlib
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.message import Message
from http.server import BaseHTTPRequestHandler
from typing import Any, NoReturn
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from awscrt.checksums import crc32c

from tests.stores.loopback import LoopbackServer

TOKEN = "test-token"
MOST_KEYS = 1000  # in one page of a listing
LEAST_PART_BYTES = 5 << 20  # of an upload in parts; only the last part may be smaller

_generations = itertools.count(time.time_ns() // 1000)
_upload_ids = itertools.count(1)


class Refused(Exception):
    """An error to send. `reason` is the word that programs look at."""

    def __init__(self, status: int, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.status = status
        self.reason = reason


# The state


@dataclass(frozen=True, slots=True, kw_only=True)
class Object:
    """One version of an object."""

    name: str
    data: bytes
    generation: int
    updated: datetime
    md5: bytes
    custom: Mapping[str, str] = field(default_factory=dict)  # headers x-goog-meta-...

    @property
    def etag(self) -> str:
        return f'"{self.md5.hex()}"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A part of a listing; `next_page` is empty in the last one."""

    objects: list[Object]
    prefixes: list[str]
    next_page: str


class Bucket:
    """Objects by name. Each method is one atomic step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()  # guards _objects and uploads
        self._objects: dict[str, Object] = {}
        self._uploads: dict[str, dict[int, bytes]] = {}
        self._listed: dict[str, Object] | None = None  # what listings show, if they lag
        self._read: dict[str, Object] | None = None  # what reads find, if they lag
        self.begins_anew = False  # whether listings ignore `start_after`
        self.order: Callable[[str], Any] = str  # of listings: the key by which names are sorted
        self.goes_when_listed = False  # whether all is deleted after the first page of a listing

    def freeze(self, *, lists: bool = False, reads: bool = False) -> None:
        """Lets listings, or reads, show what there is now until `thaw`, as where they lag."""
        with self._lock:
            self._listed = dict(self._objects) if lists else None
            self._read = dict(self._objects) if reads else None

    def thaw(self) -> None:
        """Lets all show what there is at the time."""
        self.freeze()

    def get(self, name: str) -> Object:
        with self._lock:
            if self._read is None:
                return self._find(name)
            return self._find(name, self._read)

    def put(
        self,
        name: str,
        data: bytes,
        if_generation: str | None = None,
        custom: Mapping[str, str] | None = None,
    ) -> Object:
        with self._lock:
            self._check(name, if_generation)
            self._objects[name] = Object(
                name=name,
                data=data,
                generation=next(_generations),
                updated=datetime.now(UTC),
                md5=hashlib.md5(data, usedforsecurity=False).digest(),
                custom=custom or {},
            )
            return self._objects[name]

    def delete(self, name: str, if_generation: str | None = None) -> None:
        with self._lock:
            self._find(name)
            self._check(name, if_generation)
            del self._objects[name]

    def list(
        self,
        *,
        prefix: str = "",
        delimiter: str = "",
        start: str = "",
        end: str = "",
        start_after: str = "",
        page: str = "",
        limit: int = MOST_KEYS,
    ) -> Page:
        """Lists names in `[start, end)` in pages that hold `limit` objects and prefixes together.

        A page is named by the last object or prefix of the page before it.
        """
        with self._lock:
            objects = sorted((self._objects if self._listed is None else self._listed).items())
            if self.goes_when_listed:
                self._objects.clear()
        found: dict[str, Object | None] = {}
        start_after = "" if self.begins_anew else start_after
        wanted = list[tuple[str, str, Object]]()
        for name, entry in objects:
            if name.startswith(prefix) and start <= name > start_after and not name >= end > "":
                rest, cut_off, _ = name[len(prefix) :].partition(delimiter or "\0")
                wanted.append((prefix + rest + cut_off, cut_off, entry))
        for shown, cut_off, entry in sorted(wanted, key=lambda one: self.order(one[0])):
            if page and self.order(shown) <= self.order(page):
                continue
            if len(found) == limit and shown not in found:
                return self._page(found, next(reversed(found)))
            found[shown] = None if cut_off else entry
        return self._page(found, "")

    def start_upload(self) -> str:
        upload = f"upload-{next(_upload_ids)}"
        with self._lock:
            self._uploads[upload] = {}
        return upload

    def put_part(self, upload: str, number: int, data: bytes) -> str:
        """Keeps a part and returns its ETag."""
        with self._lock:
            self._parts(upload)[number] = data
        return _part_etag(data)

    def finish_upload(
        self, upload: str, name: str, parts: list[tuple[int, str]], if_generation: str | None
    ) -> Object:
        """Makes an object of the listed parts; the upload is gone afterwards."""
        with self._lock:
            stored = self._parts(upload)
            data = [stored.get(number, b"") for number, _ in parts]
        if [etag for _, etag in parts] != [_part_etag(part) for part in data]:
            raise Refused(400, "InvalidPart")
        if any(len(part) < LEAST_PART_BYTES for part in data[:-1]):
            raise Refused(400, "EntityTooSmall")
        made = self.put(name, b"".join(data), if_generation)
        self.abort_upload(upload)
        return made

    def uploaded(self, upload: str) -> bytes:
        """Returns all parts in the order of their numbers."""
        with self._lock:
            return b"".join(data for _, data in sorted(self._parts(upload).items()))

    def abort_upload(self, upload: str) -> None:
        with self._lock:
            self._uploads.pop(upload, None)

    def uploads(self) -> list[str]:
        """Returns the uploads that were neither finished nor aborted."""
        with self._lock:
            return list(self._uploads)

    def _page(self, found: Mapping[str, Object | None], next_page: str) -> Page:
        return Page(
            objects=[entry for entry in found.values() if entry],
            prefixes=[shown for shown, entry in found.items() if not entry],
            next_page=next_page,
        )

    def _find(self, name: str, objects: Mapping[str, Object] | None = None) -> Object:
        found = (self._objects if objects is None else objects).get(name)
        if found is None:
            raise Refused(404, "NoSuchKey", f"No such object: {self.name}/{name}")
        return found

    def _check(self, name: str, if_generation: str | None) -> None:
        """Compares a condition with the generation now; 0 stands for no object."""
        now = self._objects[name].generation if name in self._objects else 0
        if if_generation is not None and int(if_generation) != now:
            raise Refused(412, "conditionNotMet", f"The generation is {now}, not {if_generation}.")

    def _parts(self, upload: str) -> dict[int, bytes]:
        if upload not in self._uploads:
            raise Refused(404, "NoSuchUpload")
        return self._uploads[upload]


def _part_etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


# HTTP


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request, taken apart."""

    method: str
    path: str  # still escaped
    query: dict[str, str]
    headers: Message
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What to send."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class GcsServer(LoopbackServer):
    """Google Cloud Storage on a free port."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.delay_s = 0.0  # waited before each answer
        self._buckets: dict[str, Bucket] = {}

    def make_bucket(self, name: str) -> Bucket:
        if name in self._buckets:
            raise Refused(409, "conflict", f"The bucket {name} exists.")
        return self._buckets.setdefault(name, Bucket(name))

    def bucket(self, name: str) -> Bucket:
        if name not in self._buckets:
            raise Refused(404, "NoSuchBucket", f"No such bucket: {name}")
        return self._buckets[name]

    def answer(self, call: Call) -> Answer:
        match = _JSON_PATH.fullmatch(call.path)
        try:
            _check_token(call)
            return _answer_json(self, call, match) if match else _answer_xml(self, call)
        except Refused as error:
            return _json_error(error) if match else _xml_error(error)


def _check_token(call: Call) -> None:
    allowed = f"Bearer {TOKEN}"
    if call.headers.get("Authorization", allowed) != allowed:
        raise Refused(401, "authError", "Invalid credentials")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: GcsServer

    def handle_any(self) -> None:
        record = self.server.requests.add(self.command, self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        record.received_bytes = len(body)
        target = urlsplit(self.path)
        call = Call(
            method=self.command,
            path=target.path,
            query=dict(parse_qsl(target.query, keep_blank_values=True)),
            headers=self.headers,
            body=body,
        )
        time.sleep(self.server.delay_s)
        answer = self.server.answer(call)
        record.status = answer.status
        record.sent_bytes = 0 if self.command == "HEAD" else len(answer.body)
        self._send(answer)

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status not in (204, 304):
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

    def log_message(self, format: str, *args: object) -> None:
        pass


def _media(stored: Object, headers: Message) -> Answer:
    """Sends an object, or the range of it that was asked for."""
    sent = {
        "Content-Type": "application/octet-stream",
        "ETag": stored.etag,
        "Last-Modified": email.utils.format_datetime(stored.updated, usegmt=True),
        "Accept-Ranges": "bytes",
        "x-goog-generation": str(stored.generation),
        "x-goog-metageneration": "1",
        **stored.custom,
    }
    size = len(stored.data)
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("Range", ""))
    if not asked:
        return Answer(headers=sent, body=stored.data)
    first, last = asked.groups()
    start = int(first) if first else max(0, size - int(last))
    stop = min(size, int(last) + 1) if first and last else size
    if start >= stop:
        raise Refused(416, "InvalidRange", f"{asked[0]} of {size} bytes")
    sent["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return Answer(status=206, headers=sent, body=stored.data[start:stop])


# The JSON protocol

_CONTENT_RANGE = r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)"
_JSON_PATH = re.compile(
    r"(?:/(?P<way>upload|download))?/storage/v1/b"
    r"(?:/(?P<bucket>[^/]+)(?P<objects>/o(?:/(?P<name>[^/]+)"
    r"(?:/(?:rewriteTo|copyTo)/b/(?P<to_bucket>[^/]+)/o/(?P<to_name>[^/]+))?)?)?)?/?"
)


def _answer_json(server: GcsServer, call: Call, match: re.Match[str]) -> Answer:
    part = {key: unquote(value) for key, value in match.groupdict().items() if value}
    if "bucket" not in part:
        return _json(_bucket_metadata(server.make_bucket(json.loads(call.body)["name"])))
    bucket = server.bucket(part["bucket"])
    if "to_name" in part:
        return _json_copy(server, call, bucket, part)
    match call.method, "objects" in part, part.get("name"):
        case "GET", False, _:
            return _json(_bucket_metadata(bucket))
        case "GET", True, None:
            return _json_list(bucket, call)
        case "GET", True, str(name):
            return _json_get(bucket, name, call)
        case "POST" | "PUT", True, None:
            return _json_upload(bucket, call)
        case "DELETE", True, str(name):
            bucket.delete(name, call.query.get("ifGenerationMatch"))
            return Answer(status=204)
    raise Refused(501, "notImplemented", f"{call.method} {call.path}")


def _json_get(bucket: Bucket, name: str, call: Call) -> Answer:
    stored = bucket.get(name)
    now = str(stored.generation)
    if call.query.get("ifGenerationMatch", now) != now:
        raise Refused(412, "conditionNotMet", f"The generation is {now}.")
    if call.query.get("ifGenerationNotMatch") == now:
        return Answer(status=304, headers={"x-goog-generation": now})
    if call.query.get("alt") == "media":
        return _media(stored, call.headers)
    return _json(_metadata(bucket, stored))


def _json_upload(bucket: Bucket, call: Call) -> Answer:
    name, data = call.query.get("name", ""), call.body
    match call.query.get("uploadType"):
        case "media":
            pass
        case "multipart":
            resource, data = _two_parts(call)
            name = resource.get("name", name)
        case "resumable":
            return _json_resumable(bucket, call)
        case other:
            raise Refused(501, "notImplemented", f"uploadType={other}")
    stored = bucket.put(name, data, call.query.get("ifGenerationMatch"))
    return _json(_metadata(bucket, stored))


def _json_resumable(bucket: Bucket, call: Call) -> Answer:
    """Starts an upload, whose address names the object; then takes its pieces one by one."""
    upload = call.query.get("upload_id")
    if upload is None:
        name = call.query.get("name") or json.loads(call.body)["name"]
        query = urlencode({**call.query, "name": name, "upload_id": bucket.start_upload()})
        return Answer(headers={"Location": f"http://{call.headers['Host']}{call.path}?{query}"})
    first, total = re.fullmatch(_CONTENT_RANGE, call.headers["Content-Range"]).groups()
    if first:
        bucket.put_part(upload, int(first), call.body)
    data = bucket.uploaded(upload)
    if total != str(len(data)):
        headers = {"Range": f"bytes=0-{len(data) - 1}"} if data else {}
        return Answer(status=308, headers=headers)
    stored = bucket.put(call.query["name"], data, call.query.get("ifGenerationMatch"))
    bucket.abort_upload(upload)
    return _json(_metadata(bucket, stored))


def _two_parts(call: Call) -> tuple[dict[str, Any], bytes]:
    """Takes a multipart upload apart: its metadata and its data."""
    _, _, boundary = call.headers["Content-Type"].partition("boundary=")
    mark = b"--" + boundary.strip("\"'").encode()
    _, resource, rest = call.body.split(mark, 2)
    newline = b"\r\n" if resource.startswith(b"\r\n") else b"\n"  # fsspec's client sends the latter
    resource, data = (
        part.partition(2 * newline)[2].removesuffix(newline)
        for part in (resource, rest.rpartition(mark)[0])
    )
    return json.loads(resource), data


def _json_copy(server: GcsServer, call: Call, bucket: Bucket, part: Mapping[str, str]) -> Answer:
    source = bucket.get(part["name"])
    target = server.bucket(part["to_bucket"])
    made = target.put(part["to_name"], source.data, call.query.get("ifGenerationMatch"))
    resource = _metadata(target, made)
    if "/copyTo/" in call.path:
        return _json(resource)
    size = resource["size"]
    return _json(
        {
            "kind": "storage#rewriteResponse",
            "done": True,
            "objectSize": size,
            "totalBytesRewritten": size,
            "resource": resource,
        }
    )


def _json_list(bucket: Bucket, call: Call) -> Answer:
    page = bucket.list(
        prefix=call.query.get("prefix", ""),
        delimiter=call.query.get("delimiter", ""),
        start=call.query.get("startOffset", ""),
        end=call.query.get("endOffset", ""),
        page=call.query.get("pageToken", ""),
        limit=min(MOST_KEYS, int(call.query.get("maxResults", MOST_KEYS))),
    )
    answer: dict[str, object] = {
        "kind": "storage#objects",
        "items": [_metadata(bucket, entry) for entry in page.objects],
        "prefixes": page.prefixes,
    }
    if page.next_page:
        answer["nextPageToken"] = page.next_page
    return _json(answer)


def _bucket_metadata(bucket: Bucket) -> dict[str, str]:
    return {"kind": "storage#bucket", "id": bucket.name, "name": bucket.name, "location": "US"}


def _metadata(bucket: Bucket, stored: Object) -> dict[str, str]:
    time_ = stored.updated.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    crc = crc32c(stored.data).to_bytes(4, "big")
    return {
        "kind": "storage#object",
        "id": f"{bucket.name}/{stored.name}/{stored.generation}",
        "bucket": bucket.name,
        "name": stored.name,
        "generation": str(stored.generation),
        "metageneration": "1",
        "size": str(len(stored.data)),
        "contentType": "application/octet-stream",
        "storageClass": "STANDARD",
        "md5Hash": base64.b64encode(stored.md5).decode(),
        "crc32c": base64.b64encode(crc).decode(),
        "etag": base64.b64encode(str(stored.generation).encode()).decode(),
        "timeCreated": time_,
        "updated": time_,
    }


def _json(answer: Mapping[str, object], status: int = 200) -> Answer:
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    return Answer(status=status, headers=headers, body=json.dumps(answer).encode())


def _json_error(error: Refused) -> Answer:
    detail = {"domain": "global", "reason": error.reason, "message": str(error)}
    inner = {"code": error.status, "message": str(error), "errors": [detail]}
    return _json({"error": inner}, error.status)


# The XML protocol

_XML_REASONS = {"conditionNotMet": "PreconditionFailed", "authError": "InvalidSecurity"}
_IF_GENERATION = "x-goog-if-generation-match"


def _answer_xml(server: GcsServer, call: Call) -> Answer:
    bucket_name, _, name = (unquote(part) for part in call.path[1:].partition("/"))
    bucket = server.bucket(bucket_name)
    upload = call.query.get("uploadId")
    if not name:
        return _xml_list(bucket, call) if call.method == "GET" else _xml_unknown(call)
    if upload is not None or "uploads" in call.query:
        return _xml_upload(bucket, name, call, upload)
    condition = call.headers.get(_IF_GENERATION)
    match call.method:
        case "GET" | "HEAD":
            return _xml_get(bucket, name, call)
        case "PUT" if "x-goog-copy-source" in call.headers:
            source_bucket, _, source = call.headers["x-goog-copy-source"].lstrip("/").partition("/")
            data = server.bucket(unquote(source_bucket)).get(unquote(source)).data
            return _xml_copied(bucket.put(name, data, condition))
        case "PUT":
            return Answer(headers=_written(bucket.put(name, call.body, condition, _custom(call))))
        case "DELETE":
            bucket.delete(name, condition)
            return Answer(status=204)
    return _xml_unknown(call)


def _custom(call: Call) -> dict[str, str]:
    headers = {name.lower(): value for name, value in call.headers.items()}
    return {name: value for name, value in headers.items() if name.startswith("x-goog-meta-")}


def _xml_get(bucket: Bucket, name: str, call: Call) -> Answer:
    stored = bucket.get(name)
    now = str(stored.generation)
    if call.query.get("generation", now) != now:
        raise Refused(404, "NoSuchKey", f"The generation is {now}.")
    if call.headers.get(_IF_GENERATION, now) != now:
        raise Refused(412, "conditionNotMet", f"The generation is {now}.")
    if call.headers.get("If-Match", stored.etag) not in (stored.etag, "*"):
        raise Refused(412, "conditionNotMet", f"The ETag is {stored.etag}.")
    if call.headers.get("If-None-Match") in (stored.etag, "*"):
        return Answer(status=304, headers=_written(stored))
    return _media(stored, call.headers)


def _xml_list(bucket: Bucket, call: Call) -> Answer:
    page = bucket.list(
        prefix=call.query.get("prefix", ""),
        delimiter=call.query.get("delimiter", ""),
        start_after=call.query.get("start-after", ""),
        page=call.query.get("continuation-token", ""),
        limit=min(MOST_KEYS, int(call.query.get("max-keys", MOST_KEYS))),
    )
    contents = [
        f"<Contents><Key>{escape(entry.name)}</Key><Generation>{entry.generation}</Generation>"
        f"<LastModified>{entry.updated.isoformat().replace('+00:00', 'Z')}</LastModified>"
        f"<ETag>{escape(entry.etag)}</ETag><Size>{len(entry.data)}</Size></Contents>"
        for entry in page.objects
    ]
    prefixes = [
        f"<CommonPrefixes><Prefix>{escape(prefix)}</Prefix></CommonPrefixes>"
        for prefix in page.prefixes
    ]
    next_page = (
        f"<NextContinuationToken>{escape(page.next_page)}</NextContinuationToken>"
        if page.next_page
        else ""
    )
    truncated = f"<IsTruncated>{'true' if page.next_page else 'false'}</IsTruncated>"
    return _xml("ListBucketResult", truncated, next_page, *contents, *prefixes)


def _xml_upload(bucket: Bucket, name: str, call: Call, upload: str | None) -> Answer:
    match call.method, upload:
        case "POST", None:
            names = f"<Bucket>{escape(bucket.name)}</Bucket><Key>{escape(name)}</Key>"
            upload = f"<UploadId>{bucket.start_upload()}</UploadId>"
            return _xml("InitiateMultipartUploadResult", names, upload)
        case "PUT", str():
            number = int(call.query["partNumber"])
            return Answer(headers={"ETag": bucket.put_part(upload, number, call.body)})
        case "DELETE", str():
            bucket.abort_upload(upload)
            return Answer(status=204)
        case "POST", str():
            condition = call.headers.get(_IF_GENERATION)
            made = bucket.finish_upload(upload, name, _listed_parts(call.body), condition)
            etag = f"<ETag>{escape(made.etag)}</ETag>"
            answer = _xml("CompleteMultipartUploadResult", etag)
            return Answer(headers={**answer.headers, **_written(made)}, body=answer.body)
    return _xml_unknown(call)


def _listed_parts(body: bytes) -> list[tuple[int, str]]:
    parts = [
        {child.tag.rpartition("}")[2]: child.text or "" for child in part}
        for part in ElementTree.fromstring(body)
    ]
    return [(int(part["PartNumber"]), part["ETag"]) for part in parts]


def _xml_copied(made: Object) -> Answer:
    answer = _xml(
        "CopyObjectResult",
        f"<LastModified>{made.updated.isoformat().replace('+00:00', 'Z')}</LastModified>",
        f"<ETag>{escape(made.etag)}</ETag>",
    )
    return Answer(headers={**answer.headers, **_written(made)}, body=answer.body)


def _written(made: Object) -> dict[str, str]:
    return {"ETag": made.etag, "x-goog-generation": str(made.generation)}


def _xml(root: str, *inner: str, status: int = 200) -> Answer:
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{root}>{"".join(inner)}</{root}>'
    headers = {"Content-Type": "application/xml; charset=UTF-8"}
    return Answer(status=status, headers=headers, body=text.encode())


def _xml_error(error: Refused) -> Answer:
    code = _XML_REASONS.get(error.reason, error.reason)
    inner = f"<Code>{code}</Code><Message>{escape(str(error))}</Message>"
    return _xml("Error", inner, status=error.status)


def _xml_unknown(call: Call) -> NoReturn:
    raise Refused(501, "NotImplemented", f"{call.method} {call.path}")
