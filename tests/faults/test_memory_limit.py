"""A save or a restore needs less than 0.3 times the state as extra memory, so none is killed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from tests.faults import memory_children as children
from tests.waiting import wait_until

pytestmark = pytest.mark.faults_root


@pytest.fixture
def group():
    """A cgroup that counts memory; skips the test where there can be none."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    parent = v1 if (v1 / "memory.limit_in_bytes").exists() else v2
    path = parent / f"jaxckpt-{os.getpid()}-{os.urandom(3).hex()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroups here: {error}")
    if not any((path / name).exists() for name in ("memory.limit_in_bytes", "memory.max")):
        path.rmdir()
        pytest.skip("the cgroups here do not count memory")
    yield path

    def is_empty():
        with contextlib.suppress(OSError):
            path.rmdir()
        return not path.exists()

    wait_until(is_empty)  # the last process of it may still be leaving


@pytest.mark.parametrize(
    "what", ["save", "save_async", "manager", "restore", "like", "mesh", "verify"]
)
def test_it_takes_little_memory_beside_the_state(trial, zygote, group, tmp_path, what):
    """With room for 1.3 times the state it is not killed, and all values are right."""
    with trial("29", what):
        found = zygote.run(children.try_in, group, tmp_path, what)
        assert found is not None, "killed"
        assert found["done"] == what


def test_a_copy_of_the_state_is_killed(zygote, group, tmp_path):
    """A control: the limit is one."""
    assert zygote.run(children.try_in, group, tmp_path, "copy") is None
