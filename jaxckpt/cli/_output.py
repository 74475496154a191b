"""Prints the output of commands: tables for people, JSON for scripts, questions, and errors.

On a terminal, tables are drawn by rich. A pipe or file gets plain text, one row per line, nothing
cut off, and rich is not imported.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import click

from jaxckpt._core.text import aligned

_GAP: Final = 3  # between two columns of a drawn table
_FOLDED: Final = 20  # the minimum width of prose
_LEAST: Final = 8  # the same of parts
_UNITS: Final = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


class Styled(NamedTuple):
    """A highlighted cell, with a style of rich such as "bold red"."""

    text: str
    style: str


class Parts(NamedTuple):
    """A cell of several short texts, of which a narrow terminal shows the first."""

    texts: tuple[str, ...]
    more: int = 0  # further texts, which are only counted


Cell = str | Styled | Parts


class Declined(Exception):
    """A question was not answered with yes."""


def echo(*parts: str | Styled) -> None:
    """Prints a line."""
    texts = [
        click.style(harmless(part.text), fg=part.style)
        if isinstance(part, Styled)
        else harmless(part)
        for part in parts
    ]
    click.echo("".join(texts), color=_color())


def note(text: str) -> None:
    """Prints a line to stderr, which scripts do not parse."""
    click.echo(harmless(text), err=True, color=_color())


def progress(text: str) -> None:
    """Shows what is under way on a terminal, in place of what it showed before; "" clears it."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{harmless(text)}", err=True, nl=False, color=True)


def harmless(text: str) -> str:
    """Escapes characters that a terminal would interpret as commands."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)


def error(text: str) -> None:
    """Prints an error, in red on a terminal."""
    click.echo(
        click.style("error:", fg="red", bold=True) + f" {harmless(text)}", err=True, color=_color()
    )


def _color() -> bool | None:
    return False if os.environ.get("NO_COLOR") else None


def print_json(value: Any) -> None:  # whatever `_plain` takes
    """Prints facts for a script. Numbers that JSON lacks become text: "NaN"."""
    click.echo(json.dumps(_plain(value), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:  # JSON
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Not `asdict`, which copies unknown objects, such as a mapping that is not a dict.
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(child) for child in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return str(value)


def print_entries(entries: Mapping[str, Any], *, indent: str = "") -> None:
    """Prints JSON for people: a line for each entry; entries of objects are indented."""
    for name, value in entries.items():
        if isinstance(value, Mapping) and value:
            echo(f"{indent}{name}:")
            print_entries(value, indent=f"{indent}  ")
        else:
            text = value if isinstance(value, str) else json.dumps(_plain(value))
            echo(f"{indent}{name}: {text}")


def print_table(
    head: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    right: Collection[str] = (),
    fold: str | None = None,
    spare: Sequence[str] = (),
) -> None:
    """Prints rows below the names of their columns.

    Args:
        right: Columns of numbers.
        fold: The column of prose, which wraps on a narrow terminal. Numbers and names never wrap: a
            table without prose is as wide as necessary. `Parts`, which are for the last column, are
            left out until the row fits.
        spare: Columns that a narrow terminal leaves out until the row fits, in this order.
    """
    room = None
    if sys.stdout.isatty():
        for name in spare:
            if name in head and sum(_widths(head, rows)) - _GAP > _columns():
                head, rows = without(head, rows, name)
        room = max(_columns() - sum(_widths(head, rows)[:-1]), _LEAST)
    cells = [[_styled(cell, room) for cell in row] for row in rows]
    if room is not None:
        _print_rich(head, cells, right, fold)
        return
    texts = [[text.replace("\n", " ") for text, _ in row] for row in cells]
    for line in aligned([head, *texts], right=[name in right for name in head]):
        click.echo(line)


def without(
    head: Sequence[str], rows: Sequence[Sequence[Cell]], name: str
) -> tuple[list[str], list[list[Cell]]]:
    """Returns a table without one of its columns."""
    at = head.index(name)
    return [*head[:at], *head[at + 1 :]], [[*row[:at], *row[at + 1 :]] for row in rows]


def _columns() -> int:
    from rich.console import Console

    return Console().width


def _widths(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[int]:
    """Returns the width of each column of a table, with the gap after it."""
    from rich.cells import cell_len

    texts = [head, *([_styled(cell, None).text for cell in row] for row in rows)]
    return [max(map(cell_len, column)) + _GAP for column in zip(*texts, strict=True)]


def _styled(cell: Cell, room: int | None) -> Styled:
    if isinstance(cell, Parts):
        safe = cell._replace(texts=tuple(map(harmless, cell.texts)))
        return Styled(joined(safe, room), "")
    text, style = cell if isinstance(cell, Styled) else (cell, "")
    return Styled(harmless(text), style)


def joined(parts: Parts, room: int | None = None) -> str:
    """Joins as many parts as there is room for, and counts the others."""
    for count in range(len(parts.texts), 0, -1):
        text, left = ", ".join(parts.texts[:count]), len(parts.texts) - count + parts.more
        tail = f", +{left}" if left else ""
        if room is None or len(text + tail) <= room:
            return text + tail
        if count == 1:
            return f"{text[: max(room - len(tail) - 1, 1)]}…{tail}"
    return ""


def _print_rich(
    head: Sequence[str], rows: Sequence[Sequence[Styled]], right: Collection[str], fold: str | None
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, show_edge=False)
    for name in head:
        table.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=name != fold,
            overflow="fold",
        )
    for row in rows:
        # As `Text`, because a path may contain rich's markup.
        table.add_row(*(Text(text, style=style) for text, style in row))
    widths = _widths(head, rows)
    if fold is not None:
        widths[head.index(fold)] = min(_FOLDED + _GAP, widths[head.index(fold)])
    console = Console(file=sys.stdout)
    console.width = max(console.width, sum(widths) - _GAP)
    console.print(table)


def confirm(question: str, *, yes: bool) -> None:
    """Returns if the user agrees or passed `--yes`.

    Raises:
        ValueError: stdin is not a terminal.
        Declined: the user did not agree.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise ValueError(f"{question} stdin is not a terminal; pass --yes")
    if not click.confirm(harmless(question), err=True):
        raise Declined


def age_text(seconds: float | None) -> str:
    """Formats an age in its largest unit, such as "3 h"; returns "" if unknown."""
    if seconds is None:
        return ""
    for unit, length_s in _UNITS:
        if seconds >= length_s:
            return f"{seconds // length_s:.0f} {unit}"
    return "now"


def metric_texts(metrics: Mapping[str, Any]) -> tuple[str, ...]:
    """Formats metrics, each on its own."""
    return tuple(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in metrics.items()
    )
