"""Checks arguments. Each error names the call, the argument, what it wants and what it found."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Real
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np

from jaxckpt._core.text import nearest, shown
from jaxckpt.format.arrays import MAX_ZSTD_LEVEL, STORABLE_DTYPES
from jaxckpt.format.names import is_reserved
from jaxckpt.format.run import MAX_STEP

P = ParamSpec("P")
R = TypeVar("R")

# Names that people bring along, from Orbax, Flax, torch or a config, and what they are called here.
_HABITS: Final = {
    "restore": {
        **dict.fromkeys(("target", "template", "state", "abstract_state", "args"), "like"),
        **dict.fromkeys(("like", "step"), "Call restore(like, step=...) instead of restore_or."),
    },
    "save": {
        "state": "tree",
        "force": "overwrite",
        "metadata": "custom_metadata",
        "step": "The steps of a run are saved by CheckpointManager.save(step, state).",
    },
    "SavePolicy": {
        **dict.fromkeys(("interval", "every", "save_interval_steps"), "every_steps"),
        **dict.fromkeys(("mtbf", "mtbf_hours"), "Call SavePolicy.auto(mtbf_hours=...)."),
    },
    "KeepPolicy": {
        **dict.fromkeys(("max_to_keep", "keep", "n"), "last"),
        "keep_period": "every_steps",
    },
    "LocalTier": {"local_save": "save", "local_keep": "keep", "path": "directory"},
}


def check_type(who: str, name: str, value: object, kind: Any, wanted: str) -> None:
    """Checks that a value is an instance of a class, or of one of several; True is not a number."""
    is_flag = isinstance(value, bool) and kind is not bool
    if is_flag or not isinstance(value, kind):
        raise TypeError(f"{who}: {name} must be {wanted}, got {shown(value)}")


def check_count(who: str, *, least: int = 1, **values: int | None) -> None:
    """Checks that each value is None or an int that is large enough."""
    for name, value in values.items():
        check_type(who, name, value, int | None, "an int")
        if value is not None and value < least:
            raise ValueError(f"{who}: {name} must be at least {least}, got {value}")


def check_positive(who: str, *, or_zero: bool = False, **values: float | None) -> None:
    """Checks that each value is None or a positive number."""
    for name, value in values.items():
        check_type(who, name, value, Real | None, "a number")
        if value is not None and not (0 < value < math.inf or (or_zero and value == 0)):
            raise ValueError(f"{who}: {name} must be positive and finite, got {value}")


def check_flag(who: str, **values: bool | None) -> None:
    for name, value in values.items():
        if value is not None:
            check_type(who, name, value, bool, "True, False or None")


def check_new_checkpoint(where: str, overwrite: object) -> None:
    if overwrite not in (False, True, "delete_first"):
        raise ValueError(f'overwrite must be a bool or "delete_first", got {overwrite!r}')
    if not (name := where.rpartition("/")[2]):
        raise ValueError(f"{where} is no path for a checkpoint: add a name, such as {where}first")
    if is_reserved(name):
        raise ValueError(f"{where}: this name is reserved for unfinished saves; choose another")


def check_dtype(who: str, dtype: Any) -> None:
    """Checks that a value names a dtype or is one."""
    try:
        np.dtype(dtype)
    except TypeError:
        hint = nearest(str(dtype), sorted(STORABLE_DTYPES))
        raise TypeError(f"{who}: dtype must be a dtype, got {dtype!r}. {hint}") from None


def zstd_level(who: str, compression: object) -> int:
    """Returns the level of "zstd" or "zstd:<level>"."""
    found = re.fullmatch(r"zstd(?::([0-9]+))?", compression if isinstance(compression, str) else "")
    level = int(found[1] or 1) if found else 0
    if not 1 <= level <= MAX_ZSTD_LEVEL:
        raise ValueError(
            f"{who}: compression must be None, 'zstd' or 'zstd:<level>' with a level from 1 to "
            f"{MAX_ZSTD_LEVEL}, got {compression!r}"
        )
    return level


def as_step(who: str, step: Any) -> int:  # of an int, or an array of one
    """Returns a step as an int; `who` is the call, such as "save" or "save(step, state)"."""
    with contextlib.suppress(TypeError):
        if not isinstance(step, bool):
            return operator.index(step)
    raise TypeError(f"{who}: step must be an int, got {shown(step)}")


def as_new_step(who: str, step: Any) -> int:
    """Returns the number of a step to be written; a longer number would not be found again."""
    number = as_step(who, step)
    if not 0 <= number <= MAX_STEP:
        raise ValueError(f"{who}: step must be between 0 and {MAX_STEP}, got {number}")
    return number


def check_names(
    lacks: str,
    found: Iterable[object],
    known: Sequence[str],
    hint: Callable[[str, Sequence[str]], str] = nearest,
) -> None:
    """Checks that each name found is known; the error begins with `lacks` and ends with a hint."""
    for name in found:
        if name not in known:
            raise TypeError(f"{lacks} {name!r}. {hint(str(name), known)}")


def explained(
    who: str, hint: Callable[[str, Sequence[str]], str] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator that makes a function explain arguments that it does not take.

    Args:
        who: The name of the function, as callers know it.
        hint: Suggests the right name for an unknown name. If None, a known habit or the nearest.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        names, kinds = [*signature.parameters], [p.kind for p in signature.parameters.values()]
        most, first = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD), names[0] == "self"
        known = dict.fromkeys(names[first:]).keys()

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if len(args) > most:
                raise TypeError(_by_position(who, [*known][most - first :], args[most:]))
            if not kwargs.keys() <= known:
                explain_names(who, kwargs, function, hint)
            return function(*args, **kwargs)

        checked.__signature__ = signature  # pyright: ignore  # gin does not look at __wrapped__
        return checked

    return decorate


def explain_names(
    who: str,
    found: Iterable[str],
    function: Callable[..., object],
    hint: Callable[[str, Sequence[str]], str] | None = None,
) -> None:
    """Raises TypeError for the first name that a function does not take; see `explained`."""
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]
    words = hint or functools.partial(meant, who)
    check_names(f"{who} takes no argument", found, known, words)


def _by_position(who: str, names: Sequence[str], values: Sequence[object]) -> str:
    hint = f" Name it, such as {names[0]}={shown(values[0])}." if names else ""
    return f"{who} does not take {shown(values[0])} by position.{hint}"


def meant(who: str, name: str, known: Sequence[str]) -> str:
    """Returns a hint for an unknown argument of `who`: a known habit, or the nearest name."""
    habit = _HABITS.get(who, {}).get(name)
    if habit is None:
        return nearest(name, known)
    return f"Did you mean {habit!r}?" if habit in known else habit


@contextlib.contextmanager
def calling(what: str) -> Iterator[None]:
    """Adds a note to an error of the user's function: which function it was, and the outcome."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by {what}")
        raise
