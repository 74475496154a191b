"""Dataclasses made from a line of their fields, since Orbax has so many."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any


def record(name: str, fields: str = "", *bases: type, **more: Any) -> Any:
    """Returns a dataclass of fields with defaults; one without a default must be given.

    Args:
        fields: `name` or `name=literal`, with blanks between.
        more: Fields whose default is no literal; a dataclass stands for a new object of it.

    Example:
        >>> record("Options", "step dtype=None")(3)
        Options(step=3, dtype=None)
    """
    pairs = [field.partition("=") for field in fields.split()]
    made = [(n, Any, _default(ast.literal_eval(value))) if value else n for n, _, value in pairs]
    made += [(n, Any, _default(value)) for n, value in more.items()]
    return dataclasses.make_dataclass(name, made, bases=bases)


def _default(value: Any) -> Any:
    if isinstance(value, dict):
        return dataclasses.field(default_factory=dict)
    is_made = isinstance(value, type) and dataclasses.is_dataclass(value)
    return dataclasses.field(default_factory=value) if is_made else dataclasses.field(default=value)
