"""Proves that a training loop resumes exactly, or finds the first bit that differs.

    1. The loop runs without interruption, in a directory of its own.
    2. It runs in another directory until it is killed. Its steps must equal those of 1: otherwise
       the loop itself differs from run to run, and the resume is not to blame.
    3. It runs in that directory once more. Where it resumes, the comparison with 1 begins.

A loop given as text runs in new processes, and the kill is SIGKILL. They also forget what a module
held, such as a number added up there.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from jaxckpt._core.check import check_type
from jaxckpt._inspect.open import open as open_checkpoint
from jaxckpt.errors import CheckpointNotFound
from jaxckpt.format.run import number_of
from jaxckpt.testing._processes import ProcessKilled
from jaxckpt.testing._trace import ResumeDiffers, Row, Saved, Trace, compare, row_of

Loop = Callable[[str], Generator[tuple[Any, ...], None, None]]


def check_exact_resume(
    loop: Loop | str, directory: str | os.PathLike[str], *, steps: int = 20, kill_at: int = 7
) -> int:
    """Checks that a loop which is killed and resumed computes the bits of an uninterrupted one.

    The loop is a generator function of your own. It gets the directory of its run, and yields what
    it has after each step, in order, when it has called `save`: `(step, state, loss)`, or
    `(step, state, loss, batch)`, by which a wrong order of the data is told from other faults. If
    it first yields `(step, state, None)`, what it starts with, a leaf that is not restored is named
    before the first step hides it. It may go on forever; it is closed after `steps`.

    Args:
        loop: The function, to run in this process, where an exception ends it; or
            "module:function", to run in new processes with the environment and the import path of
            this process, where SIGKILL ends it.
        directory: An empty directory for the two runs, `whole` and `resumed`; or a missing one.
        steps: The number of the last step.
        kill_at: The loop is killed after this step, or as soon as it has committed one.

    Returns:
        The step that was resumed from. All later ones are equal: the state, loss and batch.

    Raises:
        ResumeDiffers: something differs; it names the first step and leaf, and the kind.
        ValueError: nothing can be shown: no step was committed, or the loop ended too early.

    Example:
        >>> import tempfile
        >>> import jaxckpt
        >>> def loop(run):
        ...     with jaxckpt.CheckpointManager(run) as manager:
        ...         state, step = manager.restore_or(lambda: {"w": 1.0})
        ...         while True:
        ...             step, state = step + 1, {"w": state["w"] * 1.1}
        ...             manager.save(step, state).result()
        ...             yield step, state, state["w"] ** 2
        >>> check_exact_resume(loop, tempfile.mkdtemp())
        7
    """
    root = Path(directory)
    if root.exists() and any(root.iterdir()):
        raise ValueError(f"{root} must be empty: a run in it would be resumed")
    if not 0 < kill_at < steps:
        raise ValueError(f"kill_at must be between 1 and {steps - 1}, got {kill_at}")
    root.mkdir(parents=True, exist_ok=True)
    run = _in_process(loop) if callable(loop) else _in_processes(loop, root)
    whole, broken = root / "whole", root / "resumed"
    wanted = Trace(run(whole, steps, None))
    killed = Trace(run(broken, steps, kill_at))
    saved = _newest(broken)
    if saved is None or killed.last >= steps:
        raise ValueError(
            f"{broken} had no committed step before step {steps}, so nothing was resumed. "
            "Save more often, or check more steps."
        )
    wanted.check_end(steps)
    compare(wanted, killed, None)
    resumed = Trace(run(broken, steps, None))
    resumed.check_end(steps)
    if resumed.start <= wanted.start:
        raise ResumeDiffers(
            f"{broken} had step {saved.step} when the loop was killed, but the loop then began "
            f"after step {resumed.start}. Let it begin with restore_or() of a manager in the "
            "directory that it gets.",
            step=resumed.start,
            leaf="",
            kind="not resumed",
        )
    _check_each_step_once(resumed, saved.step, steps)
    compare(wanted, resumed, saved)
    return resumed.start


def _check_each_step_once(resumed: Trace, after: int, last: int) -> None:
    """Raises unless a run has each step after the saved one, in order; others are not proved."""
    found = [row.step for row in resumed.rows if not row.is_start]
    for wanted, step in zip(range(after + 1, last + 1), found, strict=False):
        if step != wanted:
            raise ResumeDiffers(
                f"the loop resumed from step {after}, but yielded step {step} where step {wanted} "
                "was due. Let it go on after the step that it restored, and yield each step once.",
                step=wanted,
                leaf="",
                kind="not resumed",
            )


def _newest(run: Path) -> Saved | None:
    try:
        found = open_checkpoint(run)
    except CheckpointNotFound:
        return None
    return Saved(step=number_of(Path(found.path).name), leaves=frozenset(found.leaves))


# --- running the loop ------------------------------------------------------------------------


def _rows(running: Generator[tuple[Any, ...], None, None], steps: int) -> Iterator[Row]:
    check_type("check_exact_resume", "what the loop returns", running, Generator, "a generator")
    with contextlib.closing(running):
        for yielded in running:
            row = row_of(yielded)
            yield row
            if row.step >= steps:
                return


def _is_end(row: Row, run: Path, steps: int, kill_at: int | None) -> bool:
    """Returns whether the loop is to be killed now."""
    return kill_at is not None and kill_at <= row.step < steps and _newest(run) is not None


Run = Callable[[Path, int, "int | None"], Iterator[Row]]


def _in_process(loop: Loop) -> Run:
    generators = random.getstate(), np.random.get_state()

    def run(directory: Path, steps: int, kill_at: int | None) -> Iterator[Row]:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        running = loop(str(directory))
        for row in _rows(running, steps):
            yield row
            if _is_end(row, directory, steps, kill_at):
                with contextlib.suppress(ProcessKilled, StopIteration):
                    running.throw(ProcessKilled(f"after step {row.step}"))
                return

    return run


def _in_processes(loop: str, root: Path) -> Run:
    def run(directory: Path, steps: int, kill_at: int | None) -> Iterator[Row]:
        record = root / "rows.jsonl"
        main = f"import sys; from {__name__} import main; main(*sys.argv[1:])"
        command = [sys.executable, "-c", main, loop]
        paths = [path or os.getcwd() for path in sys.path]
        done = subprocess.run(
            [*command, str(directory), str(record), str(steps), str(kill_at or 0)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in (0, -signal.SIGKILL if kill_at else 0):
            raise ChildProcessError(
                f"{loop} ended with status {done.returncode}:\n"
                f"{(done.stdout + done.stderr)[-4000:]}"
            )
        for line in record.read_text("utf-8").splitlines():
            yield Row.from_json(json.loads(line))

    return run


def main(loop: str, directory: str, record: str, steps: str, kill_at: str) -> None:
    """Runs the loop in this process, and kills it."""
    module, _, name = loop.partition(":")
    running = getattr(importlib.import_module(module), name)(directory)
    with Path(record).open("w", encoding="utf-8") as file:
        for row in _rows(running, int(steps)):
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()
            if _is_end(row, Path(directory), int(steps), int(kill_at) or None):
                os.kill(os.getpid(), signal.SIGKILL)
