"""Threads for the calls of one save or restore."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Pool(ThreadPoolExecutor):
    """Works also while the interpreter ends and starts no more threads: in the calling thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:  # as in a function of `atexit`
            done: Future[Any] = Future()
            done.set_result(fn(*args, **kwargs))
            return done
