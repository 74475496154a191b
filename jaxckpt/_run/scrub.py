"""Verifies a step of a run, and sets damaged steps aside."""

from __future__ import annotations

from jaxckpt._inspect.verify import verify_in
from jaxckpt._run.deletion import Deletion
from jaxckpt._run.index import StepIndex
from jaxckpt._run.leases import Leases
from jaxckpt.errors import CheckpointNotFound, is_io_failure
from jaxckpt.format import names
from jaxckpt.storage import listing
from jaxckpt.storage._ahead import contradiction
from jaxckpt.types import Problem, VerifyReport


def look(leases: Leases, number: int) -> VerifyReport | None:
    """Verifies a step, twice if it is damaged; None if it was deleted in the meantime."""
    try:
        with leases.protect(number):
            report = _verify(leases.index, number)
            if report is not None and report.damaged:
                report = _verify(leases.index, number)
    except OSError as error:  # even its directory is unreadable; verify the other steps
        path, unreadable = leases.index.path(number), is_io_failure(error)
        problem = Problem(file=path, message=str(error), unreadable=unreadable)
        report = VerifyReport(path=path, problems=(problem,))
    return report


def _verify(index: StepIndex, number: int) -> VerifyReport | None:
    path = index.path(number)
    if (file := index.missing_file(number)) is not None:
        message = f"{file} is missing: the step is incomplete"
        return VerifyReport(path=path, problems=(Problem(file=file, message=message),))
    try:
        return verify_in(index.storage, path)
    except CheckpointNotFound:
        if names.COMMIT_MARKER in (listing(index.storage, path) or {}):
            raise contradiction(f"{path}/{names.COMMIT_MARKER}") from None
        return None


def set_aside(deletion: Deletion, reports: dict[int, VerifyReport]) -> None:
    """Sets aside the steps that their reports call damaged."""
    for number, report in reports.items():
        bad = next((problem for problem in report.problems if not problem.unreadable), None)
        if bad is not None:
            deletion.set_aside(number, bad.message, file=bad.file)
        elif not report.ok:
            deletion.index.report(f"step {number} cannot be read: {report.problems[0].message}")
