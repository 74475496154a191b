"""Reads every step of a run back, and takes out of it what is damaged."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxckpt._inspect.verify import verify_in
from jaxckpt._run.run import Run
from jaxckpt.errors import CheckpointNotFound, is_io_failure
from jaxckpt.multihost import Processes, lead
from jaxckpt.types import Problem, VerifyReport


def scrub(
    run: Run, processes: Processes, *, writes: bool, timeout_s: float
) -> dict[int, VerifyReport]:
    """Verifies all steps, the processes side by side; each step is read by one of them.

    Args:
        writes: Whether damaged steps of ours are set aside; never all that there are: a run without
            a whole step must not look like a new one.
        timeout_s: For a process to verify one step.

    Returns:
        What was found of each step, the same in every process.
    """
    name = f"manager {run.root}/scrub"
    numbers: list[int] = lead(
        processes,
        name,
        lambda: sorted({*run.steps(), *run.torn()}),
        place=run.root,
        timeout_s=timeout_s,
    )
    reports: dict[int, VerifyReport] = {}
    for start in range(0, len(numbers), processes.count):
        together = numbers[start : start + processes.count]
        mine = together[processes.index : processes.index + 1]
        said: Any = [_encode(look(run, number)) for number in mine]
        told: list[Any] = processes.gather(f"{name} of {start}", said, timeout_s=timeout_s)
        for number, of_process in zip(together, told, strict=False):
            if of_process[0] is not None:
                reports[number] = _decode(of_process[0])
    if writes and any(report.ok for report in reports.values()):
        lead(
            processes,
            f"{name} done",
            lambda: set_aside(run, reports),
            place=run.root,
            timeout_s=timeout_s,
        )
    return reports


def look(run: Run, number: int) -> VerifyReport | None:
    """What is wrong with a step, seen twice; None if it was deleted in the meantime."""
    try:
        with run.leased(number):
            report = _verify(run, number)
            if report is not None and report.damaged:
                report = _verify(run, number)
    except OSError as error:  # not even its directory; the other steps are looked at all the same
        path, unreadable = run.path(number), is_io_failure(error)
        problem = Problem(file=path, leaf=None, message=str(error), unreadable=unreadable)
        report = _bad(path, problem)
    return report


def _verify(run: Run, number: int) -> VerifyReport | None:
    path = run.path(number)
    if (torn := run.torn_file(number)) is not None:
        missing = f"{torn} is missing: it is not whole"
        return _bad(path, Problem(file=torn, leaf=None, message=missing))
    try:
        return verify_in(run.storage, path)
    except CheckpointNotFound:
        return None


def _bad(path: str, problem: Problem) -> VerifyReport:
    return VerifyReport(
        path=path, problems=(problem,), unchecked=(), files=0, leaves=0, size_bytes=0
    )


def set_aside(run: Run, reports: dict[int, VerifyReport]) -> None:
    """Sets aside the steps that are damaged by their reports; of the others nothing changes."""
    for number, report in reports.items():
        bad = next((problem for problem in report.problems if not problem.unreadable), None)
        if bad is not None:
            run.set_aside(number, bad.message, file=bad.file)
        elif not report.ok:
            run.report(f"step {number} cannot be read: {report.problems[0].message}")


def _encode(report: VerifyReport | None) -> Any:  # JSON
    return None if report is None else dataclasses.asdict(report)


def _decode(said: Any) -> VerifyReport:  # JSON
    problems = tuple(Problem(**problem) for problem in said["problems"])
    return VerifyReport(**{**said, "problems": problems, "unchecked": tuple(said["unchecked"])})
