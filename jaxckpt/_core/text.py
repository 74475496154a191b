"""Formats and parses sizes and times, and suggests what a misspelt name may mean."""

from __future__ import annotations

import difflib
import re
import reprlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Final

_BYTES: Final = {"": 1, "B": 1} | {
    f"{prefix}{infix}B": base**power
    for infix, base in (("", 1000), ("I", 1024))
    for power, prefix in enumerate("KMGT", 1)
}
_WIDEST: Final = 80
_SECONDS: Final = {"": 1, "S": 1, "M": 60, "MIN": 60, "H": 3600, "D": 86_400, "W": 604_800}


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


def size_of(text: str) -> int:
    """Parses a number of bytes.

    Example:
        >>> size_of("5GB"), size_of("1.5 MiB"), size_of("1000")
        (5000000000, 1572864, 1000)
    """
    return int(_quantity(text, _BYTES, "a size such as 5GB or 500MiB"))


def seconds_of(text: str) -> float:
    """Parses a duration.

    Example:
        >>> seconds_of("15m"), seconds_of("1.5 h"), seconds_of("90")
        (900.0, 5400.0, 90.0)
    """
    return _quantity(text, _SECONDS, "a duration such as 90s, 15m, 12h or 7d")


def _quantity(text: str, units: Mapping[str, float], what: str) -> float:
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]*)\s*", text, re.ASCII | re.IGNORECASE)
    if found is None or found[2].upper() not in units:
        raise ValueError(f"must be {what}, got {text!r}")
    return float(found[1]) * units[found[2].upper()]


def shown(value: object) -> str:
    """Returns what a value looks like, on one line of at most 80 characters.

    Example:
        >>> shown({"w": "x" * 100})[:30], len(shown("x" * 200))
        ("{'w': 'xxxxxxxxxxxx...xxxxxxxx", 30)
    """
    text = " ".join(reprlib.repr(value).split())
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def counted(count: int, what: str) -> str:
    """Returns a count with its noun.

    Example:
        >>> counted(1, "leaf"), counted(2000, "leaf"), counted(0, "step")
        ('1 leaf', '2,000 leaves', '0 steps')
    """
    plural = {"leaf": "leaves", "entry": "entries"}.get(what, f"{what}s")
    return f"{count:,} {what if count == 1 else plural}"


def command(*words: object) -> str:
    """Returns a command of jaxckpt, quoted for a shell.

    Example:
        >>> command("rm", "my run", 3)
        "jaxckpt rm 'my run' 3"
    """
    return shlex.join(["jaxckpt", *map(str, words)])


def aligned(rows: Sequence[Sequence[str]], *, right: Sequence[bool] = ()) -> list[str]:
    """Returns rows of cells as lines with columns; those marked in `right` end below each other.

    Example:
        >>> aligned([("step", "size"), ("1", "10 kB"), ("200", "3 kB")], right=(True, False))
        ['step  size', '   1  10 kB', ' 200  3 kB']
    """
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = list(right) or [False] * len(wide)
    lines = []
    for row in rows:
        padded = [c.rjust(n) if r else c.ljust(n) for c, n, r in zip(row, wide, sides, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return lines


def nearest(name: str, known: Sequence[str]) -> str:
    """Returns a hint for a name that is not among the known names.

    Example:
        >>> nearest("lats", ["last", "best"]), nearest("x", ["last", "best"])
        ("Did you mean 'last'?", 'It has last, best.')
    """
    near = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"It has {', '.join(known)}."
