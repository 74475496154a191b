"""One process does something for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxckpt.errors import ProcessesDisagree
from jaxckpt.multihost._protocol import Json, Processes


def lead(
    processes: Processes, name: str, do: Callable[[], Json], *, place: str, timeout_s: float
) -> Any:  # JSON
    """Has process 0 do something; returns its result, or raises its error, in every process.

    Args:
        name: Of the round in which the others are told; see `Processes`.
        place: What it is about, for the message.

    Raises:
        ProcessesDisagree: in the others, if process 0 failed.
    """
    problem, result = None, None
    if processes.index == 0:
        try:
            result = do()
        except Exception as error:  # told to the others, then raised
            problem = error
    text = None if problem is None else f"{type(problem).__name__}: {problem}"
    told: Any = processes.agree(name, {"result": result, "problem": text}, timeout_s=timeout_s)
    if problem is not None:
        raise problem
    if told["problem"] is not None:
        raise ProcessesDisagree(
            f"{place}: process 0 failed: {told['problem']}", {0: told["problem"]}
        )
    return told["result"]
