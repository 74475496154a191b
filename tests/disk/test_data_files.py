"""The threads that write the files of values."""

import contextlib
import os
import sys
import threading

import numpy as np
import pytest

import jaxckpt
from jaxckpt.format import names
from tests.twins import watched
from tests.waiting import wait_until

# Elsewhere all threads of a process have the same niceness, and none is changed.
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="niceness of threads: only Linux")


@pytest.fixture
def niceness(tmp_path):
    """A path, and what is collected there: the niceness of writing threads, beside this one's."""
    found, main = set(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def before(verb, path):
        if verb == "write" and path.split("/")[-2] == names.OCDBT_DATA:
            found.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) - main)

    return watched(tmp_path / "a", before), found


def test_a_save_in_the_background_gives_way(niceness):
    path, found = niceness
    with jaxckpt.CheckpointManager(path) as manager:
        manager.save(1, {"w": np.ones(1 << 20)})
    assert found == {min(10, 19 - os.nice(0))}


def test_a_save_that_is_waited_for_does_not(niceness):
    path, found = niceness
    jaxckpt.save(path, {"w": np.ones(1 << 20)})
    assert found == {0}


def test_no_other_thread_does(tmp_path):
    """Threads that outlive the save, of TensorStore for one, keep the speed that they had."""
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    jaxckpt.save_async(tmp_path / "a", {"w": np.ones(1 << 20)}).result()
    jaxckpt.save_async(tmp_path / "b", {"w": np.ones(1 << 20)}, compression="zstd").result()

    def is_as_before():
        threads = [int(name) for name in os.listdir("/proc/self/task")]
        with contextlib.suppress(ProcessLookupError):  # one has just ended
            return {os.getpriority(os.PRIO_PROCESS, one) for one in threads} == {before}
        return False

    wait_until(is_as_before)  # a thread that was joined ends a moment later


def test_where_threads_may_not_be_slowed_down_they_are_not(tmp_path, monkeypatch):
    """Only a sandbox refuses that, so a function that does stands in for it."""

    def refused(_):
        raise PermissionError("by a sandbox")

    monkeypatch.setattr(os, "nice", refused)
    jaxckpt.save_async(tmp_path / "a", {"w": np.arange(9)}).result()
    assert np.array_equal(jaxckpt.restore(tmp_path / "a", as_numpy=True)["w"], np.arange(9))
