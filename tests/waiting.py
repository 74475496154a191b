"""Waits for facts of other processes, stores and threads that can be asked but not waited on."""

from __future__ import annotations

import time

_POLL_S = 0.002


def wait_until(is_so, *, limit_s=60.0):
    """Asks until the answer is true; fails after `limit_s`."""
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s, f"not within {limit_s} s"
        time.sleep(_POLL_S)
