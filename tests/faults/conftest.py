"""Marks all tests here; provides a shared zygote, and a loopback for tests that need root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.zygote import Zygote

HERE = Path(__file__).parent
collect_ignore = ["fuzz.py"]  # a script, of which few have what it imports


def pytest_collection_modifyitems(items):
    """Marks each test here, and leaves out what needs root where there is none."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        needs_root = item.get_closest_marker("faults_root") is not None
        if not needs_root:
            item.add_marker(pytest.mark.faults)
        elif os.geteuid():
            item.add_marker(pytest.mark.skip(reason="needs root"))


@pytest.fixture(scope="session")
def zygote(tmp_path_factory):
    """A process with everything imported; see `Zygote`."""
    with Zygote(tmp_path_factory.mktemp("zygote")) as started:
        yield started
