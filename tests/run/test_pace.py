"""A limit to the rate at which a run writes leaves the network to training."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from jaxckpt import CheckpointManager, LocalTier, SavePolicy
from jaxckpt._disk.pace import GaveWay, Pace
from jaxckpt._run import preemption
from tests.waiting import wait_until

RATE = 1000.0
STATE = {"w": np.zeros(1 << 20, np.float32)}
SECONDS = STATE["w"].nbytes / RATE  # more than an hour


class Waits(threading.Condition):
    """A condition that notes for how long it is waited for, and does not wait."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def wait_for(self, predicate, timeout=None):
        self.seconds.append(timeout)
        return predicate()


def watched(pace):
    pace._changed = Waits()
    return pace


def pace_of(manager):
    return watched(manager._saver._pace)


def test_a_save_to_the_directory_keeps_to_the_rate(tmp_path):
    """Each piece waits until the pieces before it would have been sent."""
    with CheckpointManager(tmp_path, save=SavePolicy(max_write_bytes_per_s=RATE)) as manager:
        pace, start_s = pace_of(manager), time.monotonic()
        manager.save(1, STATE).result()

        assert pace._due_s >= start_s + SECONDS
        assert max(pace._changed.seconds) > SECONDS / 2


def test_a_save_for_preemption_takes_all_of_the_network(tmp_path, limits):
    """Nothing trains beside it."""
    limits(preemption, _POLL_S=0.01)
    policy = SavePolicy(every_steps=100, max_write_bytes_per_s=RATE)
    with CheckpointManager(tmp_path, save=policy, notice=lambda: 60.0) as manager:
        pace = pace_of(manager)
        wait_until(lambda: manager._saver.preemption.left_s is not None)
        manager.save(1, STATE).result()

        assert manager.decision.reason == "preemption"
        assert max(pace._changed.seconds, default=0.0) <= 0.0


def slow_manager(directory, **options):
    """Its saves take more than an hour each, unless the limit is lifted."""
    policy = SavePolicy(every_steps=1, max_write_bytes_per_s=RATE)
    return CheckpointManager(directory, save=policy, timeout_s=30.0, **options)


def begin_save(manager, step):
    handle = manager.save(step, STATE)
    wait_until(lambda: manager._saver._pace._due_s > 0)  # its first piece waits
    return handle


def test_the_save_before_the_last_is_not_limited_any_more(tmp_path, limits):
    """The last save waits for it, and the host may end before the rate lets it through."""
    limits(preemption, _POLL_S=0.01)
    noticed = threading.Event()
    with slow_manager(tmp_path, notice=lambda: 60.0 if noticed.is_set() else None) as manager:
        earlier = begin_save(manager, 1)
        noticed.set()
        wait_until(lambda: manager._saver.preemption.left_s is not None)
        last = manager.save(2, STATE)
        earlier.result(30.0)
        last.result(30.0)

        assert manager.decision.reason == "preemption"
        assert manager.all_steps() == [1, 2]


def test_closing_waits_for_no_limit(tmp_path):
    """The program ends, so there is no training to leave the network to."""
    with slow_manager(tmp_path) as manager:
        handle = begin_save(manager, 1)

    assert handle.timing is not None


def test_a_save_to_a_local_disk_is_not_limited_but_its_upload_is(tmp_path):
    """They have one limit: that of the manager's policy."""
    policy = SavePolicy(every_steps=100, max_write_bytes_per_s=RATE)
    local = LocalTier(tmp_path / "local", save=SavePolicy())
    with CheckpointManager(tmp_path / "run", save=policy, local=local) as manager:
        pace = pace_of(manager)
        manager.save(1, STATE).result()

        assert pace._changed.seconds == []
        assert manager._tiers.sender.pace.max_bytes_per_s == RATE


def test_closing_lifts_the_limit_of_an_upload_too(tmp_path):
    policy = SavePolicy(max_write_bytes_per_s=RATE)
    local = LocalTier(tmp_path / "local", durable_timeout_s=60.0)
    with CheckpointManager(tmp_path / "run", save=policy, local=local) as manager:
        pace = manager._tiers.sender.pace
        handle = manager.save(1, STATE)
        wait_until(lambda: pace._due_s > 0)  # its first piece waits

    handle.durable()
    assert (tmp_path / "run" / "1" / "commit_success.txt").exists()


def test_an_upload_that_gives_way_sends_nothing_more():
    """Also a piece that waits, with a limit or without."""
    for rate in (RATE, None):
        pace = Pace(rate)
        pace.wait(1)
        pace.give_way()
        with pytest.raises(GaveWay):
            pace.wait(1)
        pace.gives_way = False
        pace.rest(0.0)


def test_without_a_limit_nothing_waits():
    """As by default."""
    pace = watched(Pace())
    for _ in range(3):
        pace.wait(1 << 30)

    assert max(pace._changed.seconds) <= 0.0


def test_a_limit_is_positive():
    """Without one, leave it out."""
    with pytest.raises(ValueError, match="max_write_bytes_per_s"):
        SavePolicy(max_write_bytes_per_s=0)
