"""Waits for facts of other processes, stores and threads that can be asked but not waited on."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_POLL_S = 0.002


def waited_until(is_so, *, limit_s):
    """Asks until the answer is true; returns whether it was within `limit_s`."""
    end_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > end_s:
            return False
        time.sleep(_POLL_S)
    return True


def wait_until(is_so, *, limit_s=60.0):
    """Asks until the answer is true; fails after `limit_s`."""
    assert waited_until(is_so, limit_s=limit_s), f"not within {limit_s} s"


def stop_process(pid):
    """Sends SIGSTOP, and returns when all threads stand still: until then, some of them go on."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _stands_still(pid))


def _stands_still(pid):
    """Returns whether all threads of a process are stopped, or have ended."""
    states = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            states.add(stat.read_text().rpartition(")")[2].split()[0])
    return states <= {*"TtZX"}
