"""`verify`, `diff` and `scrub`: check checkpoints. Exit code 1 means damage or a difference."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from jaxckpt._core.text import command, counted, size_text
from jaxckpt.cli import _options, _output
from jaxckpt.cli._output import Cell, Parts, Styled

if TYPE_CHECKING:
    from jaxckpt._run.deletion import Deletion
    from jaxckpt.types import DiffReport, Problem, VerifyReport

_HASH: Final = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{24}\b")


@click.command(cls=_options.OnSteps)
@click.argument("path", type=_options.PATH)
@_options.local
@_options.as_json
def verify(path: str, local: str | None, as_json: bool) -> int:
    """Read all of a checkpoint and check it against its checksums.

    PATH is a checkpoint, an item of a checkpoint, or a run's root, which means its newest
    committed step, damaged or not. `scrub --dry-run` checks all steps.
    """
    from jaxckpt._inspect.verify import verify as verify_checkpoint
    from jaxckpt.pages.overview import local_roots

    found, *others = [verify_checkpoint(one) for one in (path, *local_roots(local, path))]
    if as_json:
        here = {} if local is None else {"local": [_facts(one) for one in others]}
        _output.print_json(_facts(found) | here)
    for one in () if as_json else (found, *others):
        _print_report(one)
    return _code(found, *others)


def _print_report(found: VerifyReport) -> None:
    _output.echo(
        f"{found.path}: ",
        Styled("good", "green") if found.ok else Styled(_bad(found), "red"),
        f". Read {counted(found.files, 'file')} and {counted(found.leaves, 'leaf')}, "
        f"{size_text(found.size_bytes)}.",
    )
    files: dict[str | None, list[Problem]] = {}
    for problem in found.problems:
        files.setdefault(problem.file, []).append(problem)
    for file, problems in files.items():
        told = problems if file is None else problems[:1]
        for problem in told:
            what = "unreadable" if problem.unreadable else "bad"
            _output.echo(f"  {what}: {problem.message}")
        leaves = [problem.leaf for problem in problems[len(told) :] if problem.leaf]
        if leaves:
            also = "and " if told[0].leaf else ""
            _output.echo(f"    of {also}{counted(len(leaves), 'leaf')}: {', '.join(leaves)}")
    for what in found.unchecked:
        _output.echo(f"  unchecked: {what}")


def _bad(report: VerifyReport) -> str:
    return "BAD" if report.damaged else "UNREADABLE"


def _facts(report: VerifyReport) -> dict[str, object]:
    names = ("path", "ok", "damaged", "problems", "unchecked", "files", "leaves", "size_bytes")
    return {name: getattr(report, name) for name in names}


def _code(*reports: VerifyReport) -> int:
    """Returns 1 for damage, 2 if something could not be read, else 0."""
    if any(report.damaged for report in reports):
        return 1
    return 0 if all(report.ok for report in reports) else 2


@click.command(cls=_options.OnSteps, pair=True)
@click.argument("a", type=_options.PATH)
@click.argument("b", type=_options.PATH)
@_options.item
@_options.only
@_options.skip
@click.option("--no-values", is_flag=True, help="Compare structure, shapes and dtypes only.")
@click.option("--rtol", type=float, default=0.0, help="Relative tolerance (default 0).")
@click.option("--atol", type=float, default=0.0, help="Absolute tolerance (default 0).")
@_options.as_json
def diff(a: str, b: str, no_values: bool, as_json: bool, **how: Any) -> int:
    """Compare two checkpoints: structure, shapes, dtypes, values. Exits with 1 if they differ."""
    from jaxckpt._inspect.diff import diff as compare

    found = compare(a, b, values=not no_values, **how)  # the arguments have the options' names
    if as_json:
        _output.print_json(_differences(found))
    elif found.equal or not sys.stdout.isatty():
        _output.echo(str(found))
    else:
        _print_differences(found)
    return 0 if found.equal else 1


def _print_differences(found: DiffReport) -> None:
    """Prints differences as their text does, but fits them to a terminal."""
    from jaxckpt.types import DIFF_HEAD, MAX_LINES

    head, rows = ["", *DIFF_HEAD], [*found._rows()]  # private, but of this package
    for name in DIFF_HEAD:
        if not any(row[head.index(name)] for row in rows):
            head, rows = _output.without(head, rows, name)
    _output.echo(str(found).partition("\n")[0])
    _output.print_table(head, rows[:MAX_LINES], right=head[3:], spare=("relative", "type", "NaN"))
    if len(rows) > MAX_LINES:
        _output.echo(f"... and {len(rows) - MAX_LINES} more")


def _differences(found: DiffReport) -> dict[str, object]:
    names = ("equal", "same", "only_a", "only_b", "changed", "uncompared", "unmatched")
    return {name: getattr(found, name) for name in names}


# --- scrub ----------------------------------------------------------------------------------


@click.command()
@click.argument("root", type=_options.PATH)
@_options.dry_run
@_options.yes
@click.option("--no-job", is_flag=True, help="Assume no running job (file system without locks).")
@_options.as_json
def scrub(root: str, dry_run: bool, yes: bool, no_job: bool, as_json: bool) -> int:
    """Read all steps and set damaged steps aside.

    Setting aside renames a step so that nothing restores it; nothing is deleted. Damaged steps
    written by other programs are only reported. Refused while a running job writes the run.
    """
    from jaxckpt.cli._owned import existing_run, run_at

    storage, where = existing_run(root)
    run = run_at(storage, where)
    reports = read_steps(run, run.index.present())
    damaged = [number for number, report in reports.items() if report.damaged]
    sets_aside = any(report.ok for report in reports.values()) and damaged and not dry_run
    if not as_json:
        _print_reports(where, reports)
    if not as_json and not (sets_aside and yes):  # else what to do depends on what is set aside
        _print_next(where, reports, aside=dry_run)
    aside: list[int] = []
    if sets_aside:
        names = ", ".join(map(str, damaged))
        _output.confirm(f"Set aside {counted(len(damaged), 'step')} of {where}: {names}?", yes=yes)
        aside = _set_aside(run, damaged, no_job=no_job, say=not as_json)
    elif damaged and not dry_run:
        _output.note("No step is intact, so none is set aside.")
    if aside and not as_json:
        left = {number: report for number, report in reports.items() if number not in aside}
        _print_next(where, left, aside=False)
        _output.echo(f"Copy from another place: {command('upload', 'OTHER', where)}")
    if as_json:
        steps = [{"step": number, **_facts(report)} for number, report in reports.items()]
        _output.print_json({"path": where, "steps": steps, "set_aside": aside})
    return _code(*reports.values())


def read_steps(run: Deletion, numbers: Sequence[int]) -> dict[int, VerifyReport]:
    """Checks steps and reports the damage that two reads find; shows progress on a terminal."""
    from jaxckpt._run import scrub as _scrub

    reports: dict[int, VerifyReport] = {}
    try:
        for i, number in enumerate(numbers, 1):
            _output.progress(f"reading step {number} ({i} of {len(numbers)})")
            report = _scrub.look(run.leases, number)
            if report is not None:  # None if the step was deleted meanwhile
                reports[number] = report
    finally:
        _output.progress("")
    return reports


def _print_reports(root: str, reports: dict[int, VerifyReport]) -> None:
    rows: list[list[Cell]] = []
    for number, found in reports.items():
        state = Styled("good", "green") if found.ok else Styled(_bad(found), "bold red")
        what = summary(found)
        if found.ok and found.unchecked:
            first = found.unchecked[0].replace(f"{found.path}/", "")
            what = Parts((f"{len(found.unchecked)} unchecked: {first}",))
        rows.append([str(number), state, size_text(found.size_bytes), what])
    if rows:
        _output.print_table(["step", "state", "read", "what"], rows, right=("step", "read"))
    damaged = sum(report.damaged for report in reports.values())
    more = f", {damaged} damaged" if damaged else ""
    _output.echo(f"{root}: {counted(len(reports), 'step')} read{more}")


def summary(report: VerifyReport) -> Parts:
    """Returns the problems of a step for one line: a file, its first leaf, how many more."""
    if report.ok:
        return Parts(())
    bad = next((one for one in report.problems if one.leaf is not None), report.problems[0])
    where = bad.message if bad.leaf is None else bad.file or bad.message
    where = " ".join(where.replace(f"{report.path}/", "").split())
    texts = (_HASH.sub(r"\1…", where), *([] if bad.leaf is None else [f"leaf {bad.leaf}"]))
    same = sum(one.file == bad.file and one.leaf in (None, bad.leaf) for one in report.problems)
    return Parts(texts, more=len(report.problems) - same)


def _print_next(root: str, reports: dict[int, VerifyReport], *, aside: bool) -> None:
    """Prints what to run if steps are not good."""
    bad = [number for number, report in reports.items() if not report.ok]
    if bad:
        _output.echo(f"All problems of a step:  {command('verify', root, bad[0])}")
    if any(report.damaged for report in reports.values()):
        _output.echo(f"Mend from a copy:        {command('heal', root, 'OTHER')}")
        if aside and any(report.ok for report in reports.values()):  # else none is set aside
            _output.echo(f"Set damaged steps aside: {command('scrub', root)}")


def _set_aside(run: Deletion, numbers: list[int], *, no_job: bool, say: bool) -> list[int]:
    """Checks the steps again, now that nothing else writes here, and sets them aside."""
    from jaxckpt._run import scrub as _scrub
    from jaxckpt.cli._owned import owned

    with owned(run.index.storage, run.index.root, no_job=no_job) as mine:
        index = mine.index
        looked = {number: _scrub.look(mine.leases, number) for number in numbers}
        before, known = set(index.listing().steps), len(index.problems)
        _scrub.set_aside(mine, {number: one for number, one in looked.items() if one is not None})
        after = set(index.listing().steps)
        if say:
            for problem in index.problems[known:]:
                _output.echo(problem)
    return sorted(before - after)
