"""Draws an object in a notebook, by functions that the surface, a layer above, registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_DRAWERS: Final[dict[str, Callable[[Any], str]]] = {}


def register(kind: str, draw: Callable[[Any], str]) -> None:
    """Names the function that draws objects of a kind as HTML."""
    _DRAWERS[kind] = draw


def html(kind: str, value: object) -> str | None:
    """Draws an object; None if nothing is registered for its kind."""
    draw = _DRAWERS.get(kind)
    return None if draw is None else draw(value)
