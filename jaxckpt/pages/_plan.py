"""A plan in a report: the expected goodput over the interval between saves."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final

from jaxckpt._core.text import duration, size_text
from jaxckpt.pages import _svg
from jaxckpt.pages._html import escape
from jaxckpt.pages._svg import Mark

_MOST_BYTES: Final = 1 << 30
_TOO_MUCH: Final = (RecursionError, OverflowError)  # nested too deep, or numbers without a float


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
    return f"<figure><h3>{title}</h3>{drawn}<figcaption>{caption}</figcaption></figure>"
