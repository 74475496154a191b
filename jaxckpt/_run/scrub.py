"""Verifies every step of a run and sets damaged steps aside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxckpt._inspect.verify import verify_in
from jaxckpt._run.deletion import Deletion
from jaxckpt._run.index import StepIndex
from jaxckpt._run.leases import Leases
from jaxckpt.errors import CheckpointNotFound, is_io_failure
from jaxckpt.multihost import Processes, lead
from jaxckpt.types import Problem, VerifyReport


def scrub(
    deletion: Deletion,
    processes: Processes,
    *,
    writes: bool,
    timeout_s: float,
    mend: Callable[[int], bool] = lambda step: False,
    mend_part: Callable[[int], object] = lambda step: None,
) -> dict[int, VerifyReport]:
    """Verifies all steps, divided among the processes; returns all reports to each process.

    Args:
        writes: Whether to set damaged steps aside. If all steps are damaged, all stay: a run with
            only damaged steps must not come to look like a new one.
        timeout_s: For a process to verify one step.
        mend: Mends a damaged step in process 0, and returns whether it did.
        mend_part: Mends before, in each process, what this process has of a damaged step.
    """
    index = deletion.index
    name = f"manager {index.root}/scrub"
    numbers: list[int] = lead(processes, name, index.present, where=index.root, timeout_s=timeout_s)
    reports: dict[int, VerifyReport] = {}
    for start in range(0, len(numbers), processes.count):
        together = numbers[start : start + processes.count]
        mine = together[processes.index : processes.index + 1]
        reports_here = [look(deletion.leases, number) for number in mine]
        looked: Any = [one and dataclasses.asdict(one) for one in reports_here]
        gathered: list[Any] = processes.gather(f"{name} of {start}", looked, timeout_s=timeout_s)
        for number, of_process in zip(together, gathered, strict=False):
            if of_process[0] is not None:
                reports[number] = _decode(of_process[0])
    if writes and not all(report.ok for report in reports.values()):
        for number, report in reports.items():
            if report.damaged:
                mend_part(number)
        processes.barrier(f"{name} mended", timeout_s=timeout_s)

        def settle() -> list[int]:
            damaged = [number for number, report in reports.items() if report.damaged]
            mended = [number for number in damaged if mend(number)]
            # Other processes may have mended some, and a file of a mended step may be in others.
            again = (n for n in damaged if n not in mended)
            mended += [n for n in again if (one := look(deletion.leases, n)) and one.ok]
            left = {n: report for n, report in reports.items() if n not in mended}
            if mended or any(report.ok for report in reports.values()):
                set_aside(deletion, left)
            return mended

        mended = lead(processes, f"{name} done", settle, where=index.root, timeout_s=timeout_s)
        for number in mended:
            reports[number] = replace(reports[number], problems=())
    return reports


def look(leases: Leases, number: int) -> VerifyReport | None:
    """Verifies a step, twice if it is damaged; None if it was deleted in the meantime."""
    try:
        with leases.protect(number):
            report = _verify(leases.index, number)
            if report is not None and report.damaged:
                report = _verify(leases.index, number)
    except OSError as error:  # even its directory is unreadable; verify the other steps
        path, unreadable = leases.index.path(number), is_io_failure(error)
        problem = Problem(file=path, leaf=None, message=str(error), unreadable=unreadable)
        report = _bad(path, problem)
    return report


def _verify(index: StepIndex, number: int) -> VerifyReport | None:
    path = index.path(number)
    if (file := index.missing_file(number)) is not None:
        message = f"{file} is missing: the step is incomplete"
        return _bad(path, Problem(file=file, leaf=None, message=message))
    try:
        return verify_in(index.storage, path)
    except CheckpointNotFound:
        return None


def _bad(path: str, problem: Problem) -> VerifyReport:
    return VerifyReport(
        path=path, problems=(problem,), unchecked=(), files=0, leaves=0, size_bytes=0
    )


def set_aside(deletion: Deletion, reports: dict[int, VerifyReport]) -> None:
    """Sets aside the steps that their reports call damaged."""
    for number, report in reports.items():
        bad = next((problem for problem in report.problems if not problem.unreadable), None)
        if bad is not None:
            deletion.set_aside(number, bad.message, file=bad.file)
        elif not report.ok:
            deletion.index.report(f"step {number} cannot be read: {report.problems[0].message}")


def _decode(encoded: Any) -> VerifyReport:  # JSON
    problems = tuple(Problem(**problem) for problem in encoded["problems"])
    unchecked = tuple(encoded["unchecked"])
    return VerifyReport(**{**encoded, "problems": problems, "unchecked": unchecked})
