"""Measures a save or a restore while it runs, and reports to whoever watches; see `types`."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

from jaxckpt.errors import CheckpointError
from jaxckpt.types import PHASES, Kind, OnProgress, Progress, Timing

# How often a display is called.
_TICK_S: Final = 0.25
# For a callback that does not return; then its thread stays behind.
_PATIENCE_S: Final = 5.0


@final
class Meter:
    """Measures one save or restore.

    Attributes:
        phases: Seconds by phase, so far.
        total_bytes: To be written or read here.
        done_bytes: Of those; or `measure` returns them, if it is set.
        measure: Returns how many bytes are done, where nobody counts each.
        missing: Returns the processes that have not come, in the phase "meet".
        slowest: See `Timing`.
        error: Raised by the callback. It is not called again, and does not disturb the work.
    """

    def __init__(self, kind: Kind, path: str, *, step: int | None = None) -> None:
        self.phases: dict[str, float] = {}
        self.total_bytes = 0
        self.done_bytes = 0
        self.measure: Callable[[], int] | None = None
        self.missing: Callable[[], Sequence[int]] | None = None
        self.slowest: int | None = None
        self.step = step
        self.error: BaseException | None = None
        self._kind: Kind = kind
        self._path = path
        self._start_s = self._last_s = time.monotonic()
        self._phase = ""
        self._on_progress: OnProgress | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, on_progress: OnProgress | None) -> None:
        """Calls `on_progress` a few times a second, in a thread of its own, until `end`."""
        self._on_progress = on_progress
        if on_progress is not None:
            self._thread = threading.Thread(
                target=self._report_on, name="jaxckpt-progress", daemon=True
            )
            self._thread.start()

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
            except BaseException as error:  # also `sys.exit`; raised when the work is done
                self.error = error

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside as a phase, which the profiler of JAX shows too."""
        self._phase = name
        before_s = time.monotonic()
        # A process that has not imported jax does not profile it.
        jax: Any = sys.modules.get("jax")
        shown = jax.profiler.TraceAnnotation if jax else contextlib.nullcontext
        try:
            with shown(f"jaxckpt {self._kind} {name}"):
                yield
        finally:
            self._last_s = time.monotonic()
            self.add(name, self._last_s - before_s)
            if name == "snapshot":
                self._phase = "wait"

    def waited(self) -> None:
        """Counts the time since the last phase as one of waiting."""
        now_s = time.monotonic()
        self.add("wait", now_s - self._last_s)
        self._last_s = now_s

    def add(self, phase: str, seconds: float) -> None:
        """Adds to a phase."""
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds

    def note_slowest(self, seconds: Sequence[float]) -> None:
        """Records the process that took longest."""
        if len(seconds) > 1:
            self.slowest = max(range(len(seconds)), key=seconds.__getitem__)

    def landed(self, size_bytes: int) -> None:
        """Counts bytes that are done."""
        self.done_bytes += size_bytes

    def timing(self) -> Timing:
        """Returns the time that it took until now."""
        return Timing(
            kind=self._kind,
            path=self._path,
            step=self.step,
            total_bytes=self.total_bytes,
            seconds=time.monotonic() - self._start_s,
            phases={name: self.phases[name] for name in PHASES if name in self.phases},
            slowest=self.slowest,
        )

    def progress(self, *, ended: bool = False) -> Progress:
        """Returns how far it is now."""
        phase, done_bytes, waiting_for = self._phase, self.done_bytes, ()
        if self.measure is not None and phase == "write":
            # Files are renamed while they are looked at.
            done_bytes = self.done_bytes = max(self.done_bytes, self.measure())
        elif self._kind == "save" and phase in ("meet", "commit"):
            done_bytes = self.total_bytes
        if self.missing is not None and phase == "meet" and not ended:
            with contextlib.suppress(CheckpointError):  # the wait for them raises it
                waiting_for = tuple(self.missing())
        if phase != self._phase:  # the answer came too late
            waiting_for = ()
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
    """Returns what is to be called: the caller's function, or a bar where someone sees it."""
    if on_progress is not None or process != 0:
        return on_progress
    if not sys.stderr.isatty() and "IPython" not in sys.modules:
        return None
    from jaxckpt._progress.bar import Bar, is_seen

    return Bar() if is_seen() else None
