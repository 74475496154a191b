"""Dataclasses made from a table of their fields, since Orbax has so many."""

from __future__ import annotations

import dataclasses
from typing import Any


def record(name: str, bases: tuple[type, ...] = (), /, **fields: Any) -> Any:
    """Returns a dataclass with these defaults; `...` for a field that must be given.

    Example:
        >>> record("Options", step=..., dtype=None)(3)
        Options(step=3, dtype=None)
    """
    made = [
        (field, Any) if default is ... else (field, Any, _default(default))
        for field, default in fields.items()
    ]
    return dataclasses.make_dataclass(name, made, bases=bases)


def _default(value: Any) -> Any:
    is_made = isinstance(value, dict) or (
        isinstance(value, type) and dataclasses.is_dataclass(value)
    )
    factory = value if isinstance(value, type) else dict
    return (
        dataclasses.field(default_factory=factory) if is_made else dataclasses.field(default=value)
    )
