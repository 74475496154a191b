"""The starts of a run in a report: how much of its time has trained, and what would raise that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from jaxckpt._core.text import counted, duration
from jaxckpt.format.ledger import Start
from jaxckpt.pages._html import escape, moment
from jaxckpt.pages.goodput import Part, account, described

_MAX_ROWS: Final = 20
_HEAD: Final = (
    "started (UTC)",
    "lasted",
    "trained and kept",
    "saves blocked",
    "restore",
    "from step",
    "to step",
    "steps lost",
    "end",
)


def starts_html(starts: Sequence[Start]) -> str:
    """Returns the goodput in words, and the newest starts as a table; "" if nothing is known."""
    found = account(starts)
    texts = "".join(f"<p>{escape(text, 1000)}</p>" for text in described(found))
    if not texts:
        return ""
    head = "".join(f"<th>{name}</th>" for name in _HEAD)
    rows = "".join(map(_row, found.parts[::-1][:_MAX_ROWS]))
    more = len(starts) - _MAX_ROWS
    note = f'<p class="jc-faint">… {counted(more, "earlier start")}</p>' if more > 0 else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'{texts}<div class="jc-scroll">{table}</div>{note}'


def _row(part: Part) -> str:
    start = part.start
    times = (part.wall_s, part.kept_s, start.blocked_s, start.restore_s)
    steps = ("" if step is None else f"{step:,}" for step in (start.began, start.reached))
    cells = (moment(start.opened_s), *map(duration, times), *steps, f"{part.lost:,}")
    return (
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in (*cells, escape(part.end, 100))) + "</tr>"
    )
