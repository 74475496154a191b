"""Measures a save or a restore while it runs, and reports to callbacks; see `jaxckpt.types`."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

from jaxckpt.errors import CheckpointError
from jaxckpt.types import PHASES, OnProgress, Operation, Progress, Timing

_TICK_S: Final = 0.25  # between calls of a display
_PATIENCE_S: Final = 5.0  # for a callback that does not return; its thread is then abandoned


@final
class Meter:
    """Measures one save or restore."""

    def __init__(self, kind: Operation, path: str, *, step: int | None = None) -> None:
        self.phases: defaultdict[str, float] = defaultdict(float)  # seconds
        self.total_bytes = 0  # to be written or read by this process
        self.done_bytes = 0
        self.missing: Callable[[], Sequence[int]] | None = None  # processes not in "meet" yet
        self.slowest: int | None = None  # see `Timing`
        self.step = step
        self.error: BaseException | None = None  # of the callback, which is then not called again
        self._kind: Operation = kind
        self._path = path
        self._start_s = self._last_s = time.monotonic()
        self.current = self._within = ""  # phase, or the previous phase if none is under way
        self._on_progress: OnProgress | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()  # guards `done_bytes`
        self._thread: threading.Thread | None = None

    def watch(self, on_progress: OnProgress | None) -> None:
        """Calls `on_progress` a few times a second, in its own thread, until `end`."""
        self._on_progress = on_progress
        if on_progress is not None:
            self._thread = threading.Thread(
                target=self._report_on, name="jaxckpt-progress", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is ending, and starts no more threads
                self._thread = None

    def end(self) -> None:
        """Calls `on_progress` for the last time."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ended.set()
            thread.join(_PATIENCE_S)
            if not thread.is_alive():
                self._report(ended=True)

    def _report_on(self) -> None:
        while not self._ended.wait(_TICK_S):
            self._report(ended=False)

    def _report(self, *, ended: bool) -> None:
        if self.error is None and self._on_progress is not None:
            try:
                self._on_progress(self.progress(ended=ended))
            except BaseException as error:  # even `sys.exit`; raised after the work
                error.add_note(f"raised by on_progress; the {self._kind} went on without it")
                self.error = error

    def raise_error(self) -> None:
        """Raises the error of `on_progress`, if it raised one."""
        if self.error is not None:
            raise self.error

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside to a phase, not to one around it; the profiler of JAX shows both."""
        around, self._within = self._within, name
        self.current, before_s = name, time.monotonic()
        jax: Any = sys.modules.get("jax")  # a process that has not imported it lacks its profiler
        shown = jax.profiler.TraceAnnotation if jax else contextlib.nullcontext
        try:
            with shown(f"jaxckpt {self._kind} {name}"):
                yield
        finally:
            self._last_s = time.monotonic()
            self.phases[name] += self._last_s - before_s
            self.phases[around] -= self._last_s - before_s
            self._within = around
            self.current = around or ("wait" if name == "snapshot" else name)

    def waited(self) -> None:
        """Adds the time since the last phase to "wait"."""
        now_s = time.monotonic()
        self.phases["wait"] += now_s - self._last_s
        self._last_s = now_s

    def landed(self, size_bytes: int) -> None:
        """Counts bytes that were written or read, in any thread."""
        with self._lock:
            self.done_bytes += size_bytes

    def timing(self) -> Timing:
        return Timing(
            kind=self._kind,
            path=self._path,
            step=self.step,
            total_bytes=self.total_bytes,
            seconds=time.monotonic() - self._start_s,
            phases={name: self.phases[name] for name in PHASES if name in self.phases},
            slowest=self.slowest,
        )

    def waiting_for(self) -> tuple[int, ...]:
        """Returns the processes that have not come to the meeting of all, if there is one."""
        found: Sequence[int] = ()
        if self.missing is not None and self.current == "meet":
            with contextlib.suppress(CheckpointError):  # the meeting itself raises it
                found = self.missing()
        return tuple(found) if self.current == "meet" else ()  # it may have ended meanwhile

    def progress(self, *, ended: bool = False) -> Progress:
        phase, done_bytes = self.current, self.done_bytes
        if self._kind == "save" and phase in ("meet", "commit"):
            done_bytes = self.total_bytes
        waiting_for = () if ended else self.waiting_for()
        return Progress(
            kind=self._kind,
            path=self._path,
            phase=phase,
            done_bytes=min(done_bytes, self.total_bytes),
            total_bytes=self.total_bytes,
            seconds=time.monotonic() - self._start_s,
            waiting_for=waiting_for,
            ended=ended,
        )


def display(on_progress: OnProgress | None, process: int) -> OnProgress | None:
    """Returns the caller's function, or a bar if somebody would see it."""
    if on_progress is not None or process != 0:
        return on_progress
    if not sys.stderr.isatty() and "IPython" not in sys.modules:
        return None
    from jaxckpt._progress.bar import Bar, is_seen

    return Bar() if is_seen() else None
