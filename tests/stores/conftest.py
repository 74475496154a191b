"""Marks all tests here; runs each store once for all tests that ask for it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from jaxckpt.storage import _settings as settings_module
from tests.stores import servers
from tests.stores.children import reach
from tests.stores.proxy import Proxy

HERE = Path(__file__).parent
# TensorStore reads it before its first request.
_DEADLINE = {"TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "2"}
_CLOUDS = ("AWS_", "GOOGLE_", "AZURE_", "TENSORSTORE_")


def pytest_collection_modifyitems(items):
    """Marks each test here."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.stores)


@pytest.fixture(scope="session")
def seaweedfs_server():
    """A real S3 store; contended conditional writes take it a second or two."""
    with servers.seaweedfs() as server:
        yield server


@pytest.fixture(scope="session")
def moto_server():
    """A quick S3 store in memory."""
    with servers.moto() as server:
        yield server


@pytest.fixture(scope="session")
def rclone_server():
    """An S3 store without preconditions."""
    with servers.rclone() as server:
        yield server


@pytest.fixture(scope="session")
def gcs_server():
    """A quick GCS store in memory."""
    with servers.gcs() as server:
        yield server


@pytest.fixture(scope="session")
def azurite_server():
    """An Azure store, where Azurite is installed."""
    try:
        servers.find_program("azurite-blob")
    except FileNotFoundError as error:
        pytest.skip(f"{error}; npm install --global azurite")
    with servers.azurite() as server:
        yield server


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    """Settings are of the process: each test begins with those of the environment."""
    monkeypatch.setattr(settings_module, "_given", {})


@pytest.fixture
def use_store(monkeypatch):
    """Makes a new bucket and lets the clients of this process reach its store, and no other.

    `use_store(server)` returns the server with that bucket.
    """

    def use(server):
        server = server.with_new_bucket()
        _set_environment(monkeypatch, server)
        return server

    return use


@pytest.fixture
def proxied(monkeypatch):
    """Does the same through a new proxy: `server, proxy = proxied(server)`."""
    with contextlib.ExitStack() as stack:

        def use(server):
            server = server.with_new_bucket()
            proxy = stack.enter_context(Proxy(server.url))
            server = server.at(proxy.url)
            _set_environment(monkeypatch, server)
            return server, proxy

        yield use


@pytest.fixture(
    params=[
        pytest.param("moto_server", marks=pytest.mark.slow),
        "gcs_server",
        pytest.param("azurite_server", marks=pytest.mark.slow),
    ]
)
def place(request, proxied):
    """A URL in a new bucket behind a proxy: `url, server, proxy`."""
    server, proxy = proxied(request.getfixturevalue(request.param))
    url = f"{server.scheme}://{server.bucket}/runs"
    reach(url, server.env)
    yield url, server, proxy
    proxy.heal()


def _set_environment(monkeypatch, server):
    for name in [name for name in os.environ if name.startswith(_CLOUDS)]:
        monkeypatch.delenv(name)
    for name, value in {**server.env, **_DEADLINE}.items():
        monkeypatch.setenv(name, value)
