"""Formats sizes and counts for messages, and suggests what a misspelt name may mean."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def size_text(size_bytes: float) -> str:
    """Returns a number of bytes, to three digits.

    Example:
        >>> size_text(999_600)
        '1 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"


def counted(count: int, what: str) -> str:
    """Returns a count with its noun.

    Example:
        >>> counted(1, "leaf"), counted(2000, "leaf"), counted(0, "step")
        ('1 leaf', '2,000 leaves', '0 steps')
    """
    plural = {"leaf": "leaves"}.get(what, f"{what}s")
    return f"{count:,} {what if count == 1 else plural}"


def nearest(name: str, known: Sequence[str]) -> str:
    """Returns a hint for a name that is not among the known ones.

    Example:
        >>> nearest("lats", ["last", "best"]), nearest("x", ["last", "best"])
        ("Did you mean 'last'?", 'It has last, best.')
    """
    near = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"It has {', '.join(known)}."
