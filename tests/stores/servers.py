"""Starts object stores on loopback, and says how each client reaches them.

    with seaweedfs() as server:
        os.environ.update(server.env)  # the fixture `use_store` does this for a test
        server = server.with_new_bucket()

`Server.env` is everything that a client needs, together with what is said here:

obstore: `S3Store(bucket)`, `GCSStore(bucket)`, `AzureStore(bucket)` or `store.from_url` with no
further configuration. Plain HTTP has to be allowed, which `AWS_ALLOW_HTTP`, `GOOGLE_ALLOW_HTTP` and
`AZURE_ALLOW_HTTP` do; but `client_options` replaces all of these, and then has to have
`"allow_http": True`. For a conditional write obstore compares the version on GCS, which
listings lack, and the ETag on S3 and Azure.

TensorStore, `s3`: reads no endpoint from the environment, and asks a metadata address unless it is
told where the credentials are:
    {"driver": "s3", "bucket": bucket, "path": "a/", "endpoint": server.url,
     "aws_region": "us-east-1", "use_conditional_write": True}
    Context({"aws_credentials": {"type": "environment"}})
TensorStore, `gcs`: {"driver": "gcs", "bucket": bucket, "path": "a/"}. It reads the environment each
time that a store is opened. A bucket's name has at least 3 characters. There is no driver
for Azure.

Orbax, on `gs://`: needs the package gcsfs and, before fsspec is imported, three more variables:
STORAGE_EMULATOR_HOST=server.url, FSSPEC_GS_TOKEN=anon, GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT=false.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import http.client
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from tests.stores import gcs_server
from tests.stores.gcs_server import GcsServer
from tests.waiting import waited_until

ACCESS_KEY = "test-access-key"
SECRET_KEY = "test-secret-key"
REGION = "us-east-1"
# Azurite's built-in account, the same in every installation.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)

_START_TIMEOUT_S = 60.0
_GRPC = 10000  # by so much higher are the ports of SeaweedFS for gRPC
# Ends a server with the thread that started it, should the test run be killed.
_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
)
_buckets = itertools.count(1)


class ServerFailed(AssertionError):
    """A server ended or did not answer in time. The message has its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A store that runs. `bucket` is an empty one of it, at first."""

    scheme: str  # of the URLs of its objects: "s3", "gs" or "az"
    url: str
    bucket: str
    running: GcsServer | None = None  # if it runs in this process

    @property
    def env(self) -> dict[str, str]:
        """Returns the variables under which obstore and TensorStore reach it."""
        return {**_NO_CLOUD, **_ENVIRONMENTS[self.scheme](self.url)}

    def at(self, url: str) -> Self:
        """Returns the same store, reached at another URL, such as that of a proxy."""
        return replace(self, url=url)

    def with_new_bucket(self) -> Self:
        """Makes a bucket in the store and returns the store with it."""
        bucket = f"tests-{os.getpid()}-{next(_buckets)}"
        _MAKE_BUCKET[self.scheme](self.url, bucket)
        return replace(self, bucket=bucket)


# No client may look for credentials elsewhere, or send loopback traffic to a proxy.
_NO_CLOUD = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "NO_GCE_CHECK": "true",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}


def _s3_environment(url: str) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ENDPOINT_URL": url,
        "AWS_ALLOW_HTTP": "true",
    }


def _gcs_environment(url: str) -> dict[str, str]:
    return {
        "GOOGLE_BASE_URL": url,
        "GOOGLE_BEARER_TOKEN": gcs_server.TOKEN,
        "GOOGLE_ALLOW_HTTP": "true",
        "TENSORSTORE_GCS_HTTP_URL": url,
        "TENSORSTORE_GCS_HTTP_VERSION": "1",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": gcs_server.TOKEN,
    }


def _azure_environment(url: str) -> dict[str, str]:
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
        "AZURE_STORAGE_ENDPOINT": f"{url}/{ACCOUNT}",
        "AZURE_ALLOW_HTTP": "true",
    }


_ENVIRONMENTS = {"s3": _s3_environment, "gs": _gcs_environment, "az": _azure_environment}


# The servers


@contextlib.contextmanager
def seaweedfs() -> Iterator[Server]:
    """Runs SeaweedFS, a real store that checks signatures; it takes up to 0.8 GB of memory."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxckpt-seaweedfs-"))
        names = ("master", "volume", "filer", "s3", "admin")
        ports = dict(zip(names, _free_ports(len(names)), strict=True))
        stack.callback(_remove_sockets, ports.values())
        command = [
            *("mini", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *("-master.telemetry=false", "-webdav=false", "-admin.ui=false"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=1000"),
            *(f"-{name}.port={port}" for name, port in ports.items()),
        ]
        # By default each bucket takes seven volumes, and the tests make more buckets than that.
        env = {**_s3_environment(""), "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}
        program = running("weed", command, port=ports["s3"], env=env)
        yield _ready(Server(scheme="s3", url=stack.enter_context(program), bucket=""))


def _remove_sockets(ports: Iterable[int]) -> None:
    """Removes what SeaweedFS leaves in a directory that cannot be chosen."""
    for port in ports:
        for number in (port, port + _GRPC):
            for left in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                left.unlink()


@contextlib.contextmanager
def moto() -> Iterator[Server]:
    """Runs moto's server: S3 in memory, quick, and it accepts any signature."""
    (port,) = _free_ports(1)
    program = Path(__file__).with_name("moto_program.py")
    with running(sys.executable, [str(program), str(port)], port=port) as url:
        yield _ready(Server(scheme="s3", url=url, bucket=""))


@contextlib.contextmanager
def rclone() -> Iterator[Server]:
    """Runs `rclone serve s3` on a directory: a store that ignores preconditions."""
    with tempfile.TemporaryDirectory(prefix="jaxckpt-rclone-") as directory:
        (port,) = _free_ports(1)
        command = [
            *("serve", "s3", "--addr", f"127.0.0.1:{port}", "--config", os.devnull),
            *("--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", directory),
        ]
        with running("rclone", command, port=port) as url:
            yield _ready(Server(scheme="s3", url=url, bucket=""))


@contextlib.contextmanager
def gcs() -> Iterator[Server]:
    """Runs our Google Cloud Storage in this process; `running` records its requests."""
    with GcsServer() as running:
        yield _ready(Server(scheme="gs", url=running.url, bucket="", running=running))


@contextlib.contextmanager
def azurite() -> Iterator[Server]:
    """Runs Microsoft's emulator of Azure's blobs, in memory. It has to be installed.

    Raises:
        FileNotFoundError: `azurite-blob` is not in PATH; it is a package of npm.
    """
    (port,) = _free_ports(1)
    options = ["--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    command = ["--blobHost", "127.0.0.1", "--blobPort", str(port), *options]
    with running("azurite-blob", command, port=port) as url:
        yield _ready(Server(scheme="az", url=url, bucket=""))


def _ready(server: Server) -> Server:
    """Makes the first bucket, until the store does: it may listen before it works."""
    made = list[Server]()

    def is_made() -> bool:
        with contextlib.suppress(ServerFailed):
            made.append(server.with_new_bucket())
        return bool(made)

    waited_until(is_made, limit_s=_START_TIMEOUT_S)
    return made[0] if made else server.with_new_bucket()  # which says why not


# Processes


@contextlib.contextmanager
def running(
    program: str, arguments: Sequence[str], *, port: int, env: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Runs a program that serves HTTP at `port`, and yields its URL when it answers."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-Sc", _WITH_PARENT, find_program(program), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        try:
            if not _answers(process, port):
                log.seek(0)
                output = log.read().decode(errors="replace")
                raise ServerFailed(f"{program} does not answer at port {port}\n{output}")
            yield f"http://127.0.0.1:{port}"
        finally:
            _end(process)


def find_program(name: str) -> str:
    """Returns the path of a program, first of this Python's environment.

    Raises:
        FileNotFoundError: there is none.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    if found is None:
        raise FileNotFoundError(f"{name} is not in PATH")
    return found


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Waits until any answer to a request; False if the process ends or time is up."""

    def answers() -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            with contextlib.closing(connection):
                connection.request("GET", "/")
                connection.getresponse().read()
                return True
        return False

    waited_until(lambda: process.poll() is not None or answers(), limit_s=_START_TIMEOUT_S)
    return process.poll() is None and answers()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and all that it started: nothing that it stores is needed any more."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_ports(count: int) -> list[int]:
    """Returns ports that are free now, and free again where SeaweedFS then has gRPC."""
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            port = 10000 + secrets.randbelow(12000)  # below those that the kernel hands out
            with contextlib.suppress(OSError):
                for number in (port, port + _GRPC):
                    sock = stack.enter_context(socket.socket())
                    sock.bind(("127.0.0.1", number))
                ports.append(port)
        return ports


# Buckets


def send(url: str, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> None:
    """Sends one request.

    Raises:
        ServerFailed: the answer is an error.
    """
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, body=body, headers=dict(headers))
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    if answer.status >= 300:
        raise ServerFailed(f"{method} {url}{path}: {answer.status} {text}")


def _make_s3_bucket(url: str, bucket: str) -> None:
    """Signs the request as AWS's signature version 4 says."""
    netloc = urlsplit(url).netloc
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    payload = hashlib.sha256(b"").hexdigest()
    headers = {"host": netloc, "x-amz-content-sha256": payload, "x-amz-date": now}
    names = ";".join(headers)
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    request = f"PUT\n/{bucket}\n\n{lines}\n{names}\n{payload}"
    scope = [now[:8], REGION, "s3", "aws4_request"]
    digest = hashlib.sha256(request.encode()).hexdigest()
    key = b"AWS4" + SECRET_KEY.encode()
    for part in [*scope, f"AWS4-HMAC-SHA256\n{now}\n{'/'.join(scope)}\n{digest}"]:
        key = hmac.digest(key, part.encode(), "sha256")
    credential = "/".join([ACCESS_KEY, *scope])
    headers["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={names}, Signature={key.hex()}"
    )
    send(url, "PUT", f"/{bucket}", headers)


def _make_gcs_bucket(url: str, bucket: str) -> None:
    headers = {"Authorization": f"Bearer {gcs_server.TOKEN}"}
    send(url, "POST", "/storage/v1/b", headers, json.dumps({"name": bucket}).encode())


def _make_azure_container(url: str, bucket: str) -> None:
    """Signs the request as Azure's shared key says."""
    now = email.utils.formatdate(usegmt=True)
    headers = f"x-ms-date:{now}\nx-ms-version:2021-12-02"
    resource = f"/{ACCOUNT}/{ACCOUNT}/{bucket}\nrestype:container"
    text = "PUT" + "\n" * 12 + f"{headers}\n{resource}"
    signature = hmac.digest(base64.b64decode(ACCOUNT_KEY), text.encode(), "sha256")
    signed = {
        **dict(line.split(":", 1) for line in headers.splitlines()),
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}",
        "Content-Length": "0",
    }
    send(url, "PUT", f"/{ACCOUNT}/{bucket}?restype=container", signed)


_MAKE_BUCKET = {"s3": _make_s3_bucket, "gs": _make_gcs_bucket, "az": _make_azure_container}
