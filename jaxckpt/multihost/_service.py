"""JAX's coordination service, which every multi-process job has, as `KeyValues`.

The client is private to JAX and used only in this module: `_client` finds it, `_Service` wraps it.
Measured with jax 0.10.2 and 0.12: a blocking get always keeps its time limit; every other call
hangs while process 0, which hosts the service, hangs. Values of 200 MB pass. Signal handlers do not
run during a call.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextvars import ContextVar
from typing import Any, TypeVar, final

from jaxckpt._core.threads import daemons
from jaxckpt.errors import CheckpointTimeout, ProcessesDisagree
from jaxckpt.multihost._distributed import Distributed
from jaxckpt.multihost._protocol import Processes, Single

_T = TypeVar("_T")
# Waits are sliced so that Python's signal handlers (Ctrl-C, SIGTERM before preemption) can run.
_SLICE_S = 5.0
_SINGLE = Single()

_METHODS = (
    "key_value_set_bytes",
    "blocking_key_value_get_bytes",
    "key_value_dir_get_bytes",
    "key_value_delete",
)

_played: ContextVar[Processes | None] = ContextVar("jaxckpt_processes", default=None)
_lock = threading.Lock()  # guards _job
_job: tuple[object, Distributed] | None = None  # the client, and the rounds over it


def current() -> Processes:
    """Returns the processes of this JAX job, or those simulated in this thread by `playing`.

    Raises:
        RuntimeError: there are several processes, but `jax.distributed.initialize` was not called,
            or jaxckpt does not know the client of this JAX release.
    """
    import jax

    played = _played.get()
    if played is not None:
        return played
    if jax.process_count() == 1:
        return _SINGLE
    global _job  # one per job, because it counts all rounds of the process
    client = _client()
    with _lock:
        if _job is None or _job[0] is not client:
            service = _Service(client)
            index, count = jax.process_index(), jax.process_count()
            _job = client, Distributed(index=index, count=count, service=service)
        return _job[1]


@contextlib.contextmanager
def playing(processes: Processes) -> Iterator[None]:
    """Makes this thread act as one of several simulated processes, for tests."""
    token = _played.set(processes)
    try:
        yield
    finally:
        _played.reset(token)


def _client() -> Any:
    """Returns JAX's coordination client."""
    import jax

    try:
        from jax._src import distributed

        client = distributed.global_state.client
        if client is not None:
            for method in _METHODS:
                getattr(client, method)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"cannot find the coordination service of jax {jax.__version__}: {error}\n"
            "Use a release of jax that jaxckpt was tested with, or a newer jaxckpt."
        ) from error
    if client is None:
        raise RuntimeError(
            f"{jax.process_count()} processes, but no coordination service is running\n"
            "Call jax.distributed.initialize() before anything else that uses JAX."
        )
    return client


@final
class _Service:
    """`KeyValues` over JAX's client."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, key: str, value: bytes, *, timeout_s: float) -> bool:
        def call() -> bool:
            try:
                self._client.key_value_set_bytes(key, value)
            except RuntimeError as error:
                if _status(error) == "ALREADY_EXISTS":
                    return False
                raise
            return True

        return _bounded("key_value_set", key, call, timeout_s)

    def wait(self, key: str, *, timeout_s: float) -> bytes | None:
        deadline = time.monotonic() + timeout_s
        while True:
            remaining_s = deadline - time.monotonic()
            limit_ms = max(1, round(1000 * min(remaining_s, _SLICE_S)))
            try:
                return self._client.blocking_key_value_get_bytes(key, limit_ms)
            except RuntimeError as error:
                if _status(error) != "DEADLINE_EXCEEDED":
                    raise _failed("blocking_key_value_get", key, error) from error
            if remaining_s <= _SLICE_S:
                return None

    def under(self, directory: str, *, timeout_s: float) -> dict[str, bytes]:
        def call() -> dict[str, bytes]:
            return dict(self._client.key_value_dir_get_bytes(f"{directory}/"))

        return _bounded("key_value_dir_get", directory, call, timeout_s)

    def delete(self, directory: str, *, timeout_s: float) -> None:
        def call() -> None:
            self._client.key_value_delete(f"{directory}/")

        _bounded("key_value_delete", directory, call, timeout_s)


def _bounded(what: str, key: str, call: Callable[[], _T], timeout_s: float) -> _T:
    """Makes a call that has no time limit of its own, and waits for at most `timeout_s`.

    If the service never answers, a daemon thread remains; JAX then ends the process after its
    heartbeat timeout.
    """
    asked = daemons("jaxckpt-service").submit(call)
    done, _ = wait([asked], timeout_s)
    error = asked.exception() if done else None
    if done and error is None:
        return asked.result()
    if error is None or _status(error) == "DEADLINE_EXCEEDED":
        raise CheckpointTimeout(
            f"{what} {key}: the coordination service in process 0 did not answer within "
            f"{timeout_s:g} s\nProcess 0 or the network hangs: see its log.",
            missing=(0,),
        )
    raise _failed(what, key, error) from error


def _status(error: BaseException) -> str:
    """Returns the status code at the beginning of a client's error."""
    return str(error).partition(":")[0]


def _failed(what: str, key: str, error: BaseException) -> ProcessesDisagree:
    return ProcessesDisagree(
        f"{what} {key}: lost the coordination service in process 0: {error}\nSee the log of "
        "process 0, then restart the job: the newest committed step is untouched.",
        {0: str(error)},
    )
