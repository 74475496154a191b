"""Rounds after which either every process returns or every process raises.

    lead, leading    process 0 acts for all, and reports
    meeting, meet    every process acts, and reports
    check_alike      every process reports the same

A process reports a value in JSON, and the text of its error, if any. A process with an error of its
own raises that error; the others raise an error that lists the failed processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any, Final

from jaxckpt.errors import CheckpointError, ProcessesDisagree, StepExists, UnsupportedFormat
from jaxckpt.multihost._protocol import Json, Processes

# The outcome describes at most this many failed processes, as it goes to perhaps thousands.
_MOST_TOLD: Final = 8
# Every process would find the same on the disk, so all raise the class that process 0 raises.
_SEEN_BY_ALL: Final = {error.__name__: error for error in (StepExists, UnsupportedFormat)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Describes what every process knows of the reports of all.

    The failed processes are the first few of each mark.
    """

    verdict: Any  # JSON that process 0 made of the values; None if a process failed
    failed: int  # how many processes
    problems: dict[int, str]  # of failed processes: class and message of the error
    marks: dict[int, str]  # of failed processes
    values: dict[int, Any]  # JSON, of failed processes

    def error(self, own: Exception | None, where: str, hint: str = "") -> Exception | None:
        """Returns this process's own error, or one with all problems from `where` to `hint`."""
        if own is not None or not self.problems:
            return own
        if list(self.problems) == [0]:
            return _failure_of_process_0(where, self.problems[0])
        return disagreement(where, self.problems, hint, count=self.failed)

    def check(self, own: Exception | None, where: str, hint: str = "") -> None:
        """Raises that error, if a process failed."""
        if (error := self.error(own, where, hint)) is not None:
            raise error


@dataclass(slots=True)
class Lead:
    """The value that is set inside `leading` or `meeting`, and what all processes have after it."""

    value: Any = None  # JSON


@contextlib.contextmanager
def leading(processes: Processes, name: str, *, where: str, meets: bool = False) -> Iterator[Lead]:
    """Lets process 0 act inside the `with`; then every process has its value or raises.

    Args:
        name: The round in which process 0 reports; see `Processes`.
        where: Begins the message of the other processes.
        meets: Whether process 0 waits for the others, so that no call gets an earlier answer.

    Raises:
        ProcessesDisagree: in the other processes, if process 0 failed.
    """
    led, problem = Lead(), None
    try:
        yield led
    except Exception as error:
        if processes.count == 1:
            raise
        problem = error  # reported to the others, then raised
    if processes.count > 1:
        agree = partial(processes.gather, judge=itemgetter(0)) if meets else processes.agree
        heard: Any = agree(name, {"problem": text_of(problem), "value": led.value})
        if problem is not None:
            raise problem
        if heard["problem"] is not None:
            raise _failure_of_process_0(where, heard["problem"])
        led.value = heard["value"]


def lead(
    processes: Processes, name: str, do: Callable[[], Json], *, where: str, meets: bool = False
) -> Any:  # JSON
    """Calls `do` in process 0; returns its result or raises its error in every process."""
    with leading(processes, name, where=where, meets=meets) as led:
        led.value = do() if processes.index == 0 else None
    return led.value


def meet(
    processes: Processes,
    name: str,
    value: Json,
    problem: BaseException | None,
    judge: Callable[[list[Any]], Json] = lambda values: None,
    *,
    mark: str = "",
    where: str = "",
) -> Meeting:
    """Waits for the reports of all processes.

    Args:
        name: The round; see `Processes`.
        problem: This process's error, if any; reported here, and raised by `check`.
        judge: Makes the verdict of all values, in process 0, if no process failed.
        mark: One word about the problem, for the caller.
        where: The subject of the round, if not clear from `name`, for messages about missing
            processes.
    """

    def judge_all(reports: list[Any]) -> Json:
        bad = [(i, one) for i, one in enumerate(reports) if one["problem"] is not None]
        told: list[Any] = []
        for mark in {one["mark"] for _, one in bad}:
            told += [[i, one] for i, one in bad if one["mark"] == mark][:_MOST_TOLD]
        verdict = None if bad else judge([one["value"] for one in reports])
        return {"verdict": verdict, "failed": len(bad), "told": sorted(told, key=itemgetter(0))}

    report = {"problem": text_of(problem), "mark": mark, "value": value}
    if processes.count > 1:
        heard = processes.gather(name, report, judge_all, where=where)
    else:
        heard: Any = judge_all([report])
    told = heard["told"]
    return Meeting(
        verdict=heard["verdict"],
        failed=heard["failed"],
        problems={i: one["problem"] for i, one in told},
        marks={i: one["mark"] for i, one in told},
        values={i: one["value"] for i, one in told},
    )


@contextlib.contextmanager
def meeting(
    processes: Processes, name: str, judge: Callable[[list[Any]], Json] | None = None, *, where: str
) -> Iterator[Lead]:
    """Lets every process act inside the `with`; then all have the verdict of the values, or raise.

    Args:
        judge: As in `meet`. If None, each process keeps its own value.
        where: Begins the message of the processes that have not failed.
    """
    led, problem = Lead(), None
    try:
        yield led
    except Exception as error:  # reported to the others, then raised
        problem = error
    value = None if judge is None else led.value
    met = meet(processes, name, value, problem, judge or len, where=where)
    met.check(problem, where)
    led.value = led.value if judge is None else met.verdict


def check_alike(processes: Processes, name: str, fields: Mapping[str, Json], *, hint: str) -> None:
    """Raises in every process unless all give the same fields.

    Raises:
        ProcessesDisagree: lists the processes that differ from process 0, and in which fields.
    """

    def judge(given: list[Any]) -> Json:
        first, problems = given[0], {}  # either may lack a field of the other
        for i, theirs in enumerate(given):
            differ = [f for f in {**first, **theirs} if theirs.get(f) != first.get(f)]
            texts = [f"{f}={theirs.get(f)!r}, process 0 has {f}={first.get(f)!r}" for f in differ]
            if texts:
                problems[i] = "; ".join(texts)
        return first_of(problems)

    raise_if_any(processes.gather(name, fields, judge), name, hint)


def first_of(problems: Mapping[int, str]) -> dict[str, Any]:  # JSON
    """Returns the first few problems of processes and how many there are, for a verdict."""
    return {"told": [*islice(problems.items(), _MOST_TOLD)], "count": len(problems)}


def slowest_of(given: list[Any]) -> int:
    """Returns which process reports the most `seconds`."""
    return max(range(len(given)), key=lambda i: given[i]["seconds"])


def raise_if_any(said: Any, where: str, hint: str = "") -> None:  # said: JSON
    """Raises the problems of `first_of` in every process, if there are any."""
    if said["told"]:
        raise disagreement(where, dict(said["told"]), hint, count=said["count"])


def disagreement(
    where: str, problems: Mapping[int, str], hint: str = "", *, count: int
) -> ProcessesDisagree:
    """Returns an error that lists problems of processes, and how many others have one."""
    lines = [f"{where}:", *(f"  process {i}: {text}" for i, text in problems.items())]
    if count > len(problems):
        lines.append(f"  and {count - len(problems)} more processes")
    return ProcessesDisagree("\n".join([*lines, *([hint] if hint else [])]), problems)


def text_of(error: BaseException | None) -> str | None:
    """Returns the class and the message of an error, as reported."""
    return None if error is None else f"{type(error).__name__}: {error}"


def raise_first(errors: list[BaseException]) -> None:
    """Raises the first of the errors, with the others as notes."""
    if errors:
        first, *others = errors
        for other in others:
            first.add_note(f"also: {text_of(other)}")
        raise first


def _failure_of_process_0(where: str, text: str) -> CheckpointError:
    kind, _, message = text.partition(": ")
    if kind in _SEEN_BY_ALL:
        return _SEEN_BY_ALL[kind](message)
    return ProcessesDisagree(f"{where}: process 0 failed: {text}", {0: text})
