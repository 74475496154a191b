"""A worker saves in the background; its errors are raised where somebody asks."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field

import pytest

from jaxckpt._save.worker import Failure, Worker, start
from jaxckpt.errors import CheckpointTimeout


@dataclass(eq=False)
class Save:
    """What a worker knows of a save."""

    path: str = "/runs/a/1"
    step: int | None = 1
    caller: threading.Thread = field(default_factory=threading.current_thread)
    failure: Failure | None = None
    waits_for: tuple[int, ...] = ()


def worker(**options):
    return Worker[Save](name="a worker", where="/runs/a", **{"timeout_s": 60.0, **options})


def test_an_error_after_the_last_save_is_raised():
    """By the next call, once, like the error of a save."""
    saver, save = worker(idle=lambda: 1 / 0), Save()
    saver.put(save, lambda: None)
    saver.wait([save])
    saver.settle()

    [error] = saver.take_errors()
    assert isinstance(error, ZeroDivisionError)
    assert saver.take_errors() == []


def test_a_wait_names_the_processes_that_are_late():
    """And the saves that are under way; an error of an earlier save comes first."""
    goes_on, saver, late = threading.Event(), worker(), Save(step=2, waits_for=(3,))
    saver.put(late, lambda: goes_on.wait(60))

    with pytest.raises(CheckpointTimeout, match=r"steps \[2\] .* for processes \[3\]") as caught:
        saver.wait([late], 0.0)
    assert caught.value.missing == (3,)
    goes_on.set()
    saver.stop()


@pytest.fixture
def no_thread_starts():
    """No thread gets its stack, which would be larger than all memory that can be addressed."""
    before = threading.stack_size(1 << 50)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=int).start()
        yield
    finally:
        threading.stack_size(before)


@pytest.mark.usefixtures("no_thread_starts")
def test_a_caller_that_has_to_save_itself_raises_the_error():
    """As at the end of a program, where no thread starts any more."""
    saver, saved = worker(), []

    def save():
        saved.append(threading.current_thread())
        return 1 / 0

    saver.put(Save(), save)

    [error] = saver.take_errors()
    assert isinstance(error, ZeroDivisionError)
    assert saved == [threading.current_thread()]


def test_a_save_that_another_thread_puts_meanwhile_outlives_an_interrupt():
    """The interrupted call was to start the thread for both."""
    saver, first, second = worker(), Save(step=1), Save(step=2)
    ran = threading.Event()

    def interrupt(frame, event, _):
        if event == "call" and frame.f_code is start.__code__:
            sys.setprofile(None)
            other = threading.Thread(target=saver.put, args=(second, ran.set))
            other.start()
            other.join(60)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            saver.put(first, lambda: None)
    finally:
        sys.setprofile(None)

    assert ran.wait(60)
    saver.stop()
    assert saver.under_way() == []
