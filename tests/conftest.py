"""Fixtures for all tests: eight CPU devices, meshes over them, and jobs of real processes."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import tempfile
import threading
from pathlib import Path

# JAX reads these when it is imported and when it makes its first device: before any test.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import hypothesis
import pytest

from tests import multiprocess
from tests.faults.scorecard import (  # noqa: F401  # hooks and a fixture
    pytest_addoption,
    pytest_pyfunc_call,
    pytest_sessionfinish,
    trial,
)
from tests.golden.fixture import golden, golden_folder  # noqa: F401  # fixtures

# A law is about values: a busy machine takes longer than the 200 ms that an example has by default.
hypothesis.settings.register_profile(
    "laws", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("laws")


def pytest_collection_modifyitems(items):
    """Puts the tests with several processes first, so that one of pytest's workers gets them all.

    `--dist worksteal` gives each worker a contiguous part; half a module in each would start the
    jobs of its fixtures twice.
    """
    items.sort(key=lambda item: item.get_closest_marker("multihost") is None)


def pytest_collection_finish():
    """Lets the collector skip what is imported by now: looking through it took 7 % of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def handlers_stay():
    """Gives signals the handlers back that they had: a manager that a test left open keeps its own.

    Such a manager hears the signals of later tests, and its second one ends the process.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    if threading.current_thread() is threading.main_thread():
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture
def ram_path(tmp_path):
    """Like `tmp_path`, in memory where that can be: for what syncs a thousand times."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="jaxckpt-") as path:
        yield Path(path)


@pytest.fixture
def limits(monkeypatch):
    """Sets limits that a test reaches only with gigabytes, minutes or thousands of files.

    `limits(module, MAX_BYTES=10)`; the module, or its name.
    """

    def limits(module, **values):
        module = importlib.import_module(module) if isinstance(module, str) else module
        for name, value in values.items():
            assert isinstance(getattr(module, name), int | float)
            monkeypatch.setattr(module, name, value)

    return limits


@pytest.fixture
def free_space(monkeypatch):
    """Decides how many bytes the disk of a path has left.

    `free_space(lambda path: 0 if is_full else 1 << 40)`; what really is left, if it returns None.
    """

    def free_space(free_bytes):
        usage = shutil.disk_usage

        def disk_usage(path):
            found = free_bytes(path)
            return usage(path) if found is None else usage("/")._replace(free=found)

        monkeypatch.setattr(shutil, "disk_usage", disk_usage)

    return free_space


@pytest.fixture
def accelerators(monkeypatch):
    """A twin of accelerators: arrays on CPU devices do not count as on the host.

    They are copied to real pinned memory. No reduction of fingerprints is compiled yet.
    """
    from jaxckpt._core import fingerprint, transfer
    from jaxckpt._save import tree_plan

    monkeypatch.setattr(transfer, "on_host", lambda shards: False)

    def forget():
        tree_plan._cache = ()  # plans of arrays that were on the host, or were not
        fingerprint._programs.clear()
        fingerprint._wanted.clear()

    forget()
    yield
    forget()


@pytest.fixture
def staged(monkeypatch):
    """Counts the bytes that each save copies to the host; the copies are made all the same."""
    from jaxckpt._core import transfer
    from jaxckpt._save import snapshot

    found = []

    def stage(values, sources, *, copy):
        found.append(sum(one.shard.size * one.stored.itemsize for one in sources))
        return transfer.stage(values, sources, copy=copy)

    monkeypatch.setattr(snapshot, "stage", stage)
    return found


@pytest.fixture
def make_mesh():
    """Makes a mesh over the first devices: `make_mesh(x=2, y=4)`."""
    import jax
    import numpy as np

    def make(**axes):
        shape = tuple(axes.values())
        devices = np.array(jax.devices()[: np.prod(shape, dtype=int)]).reshape(shape)
        return jax.sharding.Mesh(devices, tuple(axes))

    return make


@pytest.fixture
def mesh(make_mesh):
    """All eight devices: x=4, y=2."""
    return make_mesh(x=4, y=2)


@pytest.fixture(scope="session")
def run_processes():
    """Runs a worker function in real processes to its end; see `tests/multiprocess.py`."""
    return multiprocess.run_processes


@pytest.fixture
def start_processes():
    """Starts a worker function in real processes and returns the `Job`, ended after the test."""
    jobs = []

    def start(worker, **options):
        jobs.append(multiprocess.Job(worker, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()
