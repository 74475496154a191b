"""Waits that a signal may interrupt."""

from __future__ import annotations

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxckpt._core.threads import Latch, Threads


def test_all_wait_until_a_latch_is_set():
    latch = Latch()
    assert not latch.wait(0.0)
    assert not latch.wait(0.01)
    with ThreadPoolExecutor(8) as pool:
        waits = [pool.submit(latch.wait, 60) for _ in range(8)]
        latch.set()
        assert all(wait.result(60) for wait in waits)
    latch.set()  # again does nothing
    assert latch.wait()
    assert latch.is_set


def test_a_wait_that_was_interrupted_with_the_lock_taken_holds_nobody_up():
    latch = Latch()
    latch.set()
    latch._unset.acquire()  # and no release: the interrupt came before that

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(latch.wait).result(60)


@pytest.mark.parametrize("event", ["call", "c_return"])
def test_an_interrupt_anywhere_in_a_call_leaves_threads_for_the_next(event):
    """Where signals are handled: as a function begins, and after one of C."""
    threads, number = Threads("test", most=2), 0

    def interrupt(_, what, __):
        nonlocal number
        number -= what == event
        if number < 0:
            raise KeyboardInterrupt

    for n in itertools.count():
        number = n
        sys.setprofile(interrupt)
        try:
            threads.submit(int)
        except KeyboardInterrupt:
            sys.setprofile(None)
        else:
            break
        assert threads.submit(lambda: 7).result(timeout=60) == 7
    sys.setprofile(None)
    assert n > 5
