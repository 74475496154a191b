"""Waits that a signal may interrupt."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from jaxckpt._core.threads import Latch


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
