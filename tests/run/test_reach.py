"""A place that does not answer is away after a while, and asked in the background until it does."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait
from itertools import count

import pytest

from jaxckpt._core.threads import daemons
from jaxckpt._run.reach import Reach
from jaxckpt.errors import StoreError

PATIENCE_S = 60.0


class Place:
    """A place whose calls do not return until `answers` is set."""

    def __init__(self):
        self.answers = threading.Event()
        self.ended = threading.Semaphore(0)  # released once for each call that has ended
        self.asked = 0

    def ask(self):
        self.asked += 1
        assert self.answers.wait(PATIENCE_S)
        return "answer"


@pytest.fixture
def place():
    found = Place()
    yield found
    found.answers.set()
    wait_for_all()


def under_way():
    return daemons("jaxckpt-ask").under_way()


def wait_for_all():
    """Waits until no call is under way in the background."""
    wait(under_way(), PATIENCE_S)


def test_an_answer_and_an_error_are_those_of_the_call():
    reach = Reach("here", away_s=PATIENCE_S)
    assert reach.ask(lambda: 7) == 7
    with pytest.raises(PermissionError, match="no"):
        reach.ask(lambda: (_ for _ in ()).throw(PermissionError("no")))
    assert not reach.away
    assert reach.ask(lambda: 8) == 8


def test_a_place_without_an_answer_is_asked_in_the_background(place):
    """The first call waits, later ones fail at once, and none makes a second thread."""
    reach = Reach("here", away_s=0.05)
    with pytest.raises(StoreError, match=r"here has not answered for 0.05 s"):
        reach.ask(place.ask)
    reach.away_s = PATIENCE_S  # a call that waits fails the test
    for _ in range(3):
        with pytest.raises(StoreError, match="background"):
            reach.ask(place.ask)
    assert (place.asked, len(under_way())) == (1, 1)
    place.answers.set()
    wait_for_all()
    assert reach.ask(place.ask) == "answer"
    assert not reach.away


def test_a_place_that_is_away_still_is_when_its_call_fails(place):
    """Later calls begin another one in the background, and need not wait for it."""
    reach = Reach("here", away_s=0.05)

    def fails():
        place.ask()
        raise OSError("reset")

    with pytest.raises(StoreError):
        reach.ask(fails)
    reach.away_s = PATIENCE_S
    place.answers.set()
    wait_for_all()
    with pytest.raises(StoreError, match="not answered"):
        reach.ask(place.ask)
    wait_for_all()
    assert reach.ask(place.ask) == "answer"


def test_what_another_thread_heard_counts(place):
    """A slow call is waited for while the place answers others."""
    heard = count()

    def heard_s():
        if next(heard) > 1:
            place.answers.set()
        return time.monotonic()

    assert Reach("here", heard_s, away_s=0.01).ask(place.ask) == "answer"


def test_an_upload_shows_that_the_place_is_back(place):
    reach = Reach("here", away_s=0.05)
    with pytest.raises(StoreError):
        reach.ask(place.ask)
    reach.away_s = PATIENCE_S
    reach.answered()
    assert reach.ask(lambda: 7) == 7


def test_leaving_waits_only_for_a_place_that_answers(place):
    """What is done last is begun in any case; threads that still ask do not hold the program."""
    reach, done = Reach("here", away_s=PATIENCE_S), threading.Event()
    reach.leave(done.set)
    assert done.is_set()
    reach.away_s = 0.05
    with pytest.raises(StoreError):
        reach.ask(place.ask)
    done.clear()
    reach.leave(done.set)
    assert done.wait(PATIENCE_S)
    threads = [one for one in threading.enumerate() if one.name == "jaxckpt-ask"]
    assert threads
    assert all(thread.daemon for thread in threads)
