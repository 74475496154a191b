"""Goodput in a report: of the starts of a run, and over the interval between saves of a plan."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from jaxckpt._core.text import counted, size_text
from jaxckpt.format.ledger import Start
from jaxckpt.pages import _svg
from jaxckpt.pages._html import escape, figure, moment
from jaxckpt.pages._svg import Mark
from jaxckpt.pages.goodput import Part, account, described, duration

_MAX_ROWS: Final = 20
_HEAD: Final = (
    "started (UTC),lasted,trained and kept,saves blocked,restore,from step,to step,steps lost,end"
).split(",")
_MOST_BYTES: Final = 1 << 30
_TOO_MUCH: Final = (RecursionError, OverflowError)  # nested too deep, or numbers without a float


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


# --- a plan ----------------------------------------------------------------------------------


def plan_html(file: str | os.PathLike[str]) -> str:
    """Draws what `jaxckpt plan --json` printed into a file.

    Raises:
        ValueError: the file has something else.
    """
    try:
        with open(file, encoding="utf-8") as stream:
            found = json.loads(stream.read(_MOST_BYTES))
        head = (
            f"{found['hosts']:,d} hosts of {found['devices_per_host']:,d} devices, "
            f"{size_text(float(found['state_bytes']))}: arithmetic from rates"
        )
        figures = "".join(map(_figure, found["outlooks"]))
    except (ValueError, TypeError, LookupError, AttributeError, *_TOO_MUCH) as error:
        raise ValueError(
            f"{os.fspath(file)} is not a plan ({error!r}). Make one with `jaxckpt plan ... --json`."
        ) from error
    missing = "" if figures else "<p>Goodput needs --copy-rate, --mtbf and the rates of a way.</p>"
    return (
        f'<p class="jc-faint">{escape(found.get("name", ""))}, {escape(head)}</p>'
        f'<div class="charts">{figures}</div>{missing}'
    )


def _figure(outlook: Mapping[str, Any]) -> str:
    best = outlook["interval_s"]
    if best is None:
        return ""
    marks = [
        Mark(
            step=seconds,
            value=100 * float(goodput),
            title=f"{100 * goodput:.2f} % at {duration(seconds)}",
            best=seconds == best,
        )
        for seconds, goodput in outlook["curve"]
    ]
    drawn = _svg.line_chart(marks, label="expected goodput in percent over seconds between saves")
    caption = (
        f"best: {100 * outlook['goodput']:.2f} % at {duration(best)}; a save blocks "
        f"{duration(outlook['blocked_s'])}, a restart takes {duration(outlook['restart_s'])}"
    )
    title = f"saves to {escape(outlook['name'], 80)}: goodput in %, over seconds between saves"
    return figure(title, drawn, caption)
