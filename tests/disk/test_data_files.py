"""The threads that write the files of values."""

import os
import sys
import threading

import numpy as np
import pytest

import jaxckpt
from jaxckpt._disk import data_files

# Elsewhere all threads of a process have the same niceness, and none is changed.
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="niceness of threads: only Linux")


@pytest.fixture
def niceness(monkeypatch):
    """Collects the niceness of the threads that write, beside this one's.

    They are gone when the save is over, so it is taken where they ask for the bytes to write.
    """
    found, bytes_of = set(), data_files.DataFiles._bytes_of
    main = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def watched(self, file):
        found.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) - main)
        return bytes_of(self, file)

    monkeypatch.setattr(data_files.DataFiles, "_bytes_of", watched)
    return found


def test_a_save_in_the_background_gives_way(tmp_path, niceness):
    with jaxckpt.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"w": np.ones(1 << 20)})
    assert niceness == {10}


def test_a_save_that_is_waited_for_does_not(tmp_path, niceness):
    jaxckpt.save(tmp_path / "a", {"w": np.ones(1 << 20)})
    assert niceness == {0}


def test_no_other_thread_does(tmp_path):
    """Threads that outlive the save, of TensorStore for one, keep the speed that they had."""
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    jaxckpt.save_async(tmp_path / "a", {"w": np.ones(1 << 20)}).result()
    jaxckpt.save_async(tmp_path / "b", {"w": np.ones(1 << 20)}, compression="zstd").result()

    threads = [int(name) for name in os.listdir("/proc/self/task")]
    assert {os.getpriority(os.PRIO_PROCESS, one) for one in threads} == {before}


def test_where_threads_may_not_be_slowed_down_they_are_not(tmp_path, monkeypatch):
    """Only a sandbox refuses that, so a function that does stands in for it."""

    def refused(_):
        raise PermissionError("by a sandbox")

    monkeypatch.setattr(os, "nice", refused)
    jaxckpt.save_async(tmp_path / "a", {"w": np.arange(9)}).result()
    assert np.array_equal(jaxckpt.restore(tmp_path / "a", as_numpy=True)["w"], np.arange(9))
