"""HTML shared by the notebook and the report: escaped text, styles, a list of facts.

Any text may come from an untrusted checkpoint, so all of it goes through `escape`. Pages are free
of scripts, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

import html
import time
from collections.abc import Iterable
from typing import Final

from jaxckpt.pages import _palette

_MAX_CHARS: Final = 300

# Notebooks do not reveal whether they are light or dark, so greys derive from the text colour.
STYLE: Final = f"""
.jaxckpt{{font:13px/1.5 system-ui,-apple-system,"Segoe UI","Liberation Sans",sans-serif;
color:inherit;container-type:inline-size;width:100%;max-width:72rem;text-align:left}}
.jaxckpt,.jaxckpt *{{box-sizing:border-box}}
.jaxckpt code,.jaxckpt .jc-mono{{font:12px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,
"Liberation Mono",monospace;background:none;color:inherit;padding:0;overflow-wrap:anywhere}}
.jaxckpt .jc-head{{margin:0 0 .5em;overflow-wrap:anywhere}}
.jaxckpt .jc-head b{{font-size:14px;font-weight:600}}
.jaxckpt .jc-faint,.jaxckpt .jc-facts>span+span::before{{opacity:.65}}
.jaxckpt .jc-facts>span{{white-space:normal}}
.jaxckpt .jc-facts>span+span::before{{content:" · "}}
.jaxckpt .jc-whole{{white-space:nowrap}}
.jaxckpt .jc-bad{{color:color-mix(in srgb,{_palette.BAD} 72%,currentColor)}}
.jaxckpt details{{margin:0}}
.jaxckpt.jaxckpt pre{{margin:.2em 0 .8em;white-space:pre-wrap;background:none;border:0}}
.jaxckpt summary{{cursor:pointer}}
.jaxckpt summary.jc-row{{list-style:none}}
.jaxckpt summary.jc-row::-webkit-details-marker{{display:none}}
.jaxckpt summary:focus-visible{{outline:2px solid {_palette.BLUE};outline-offset:-2px}}
.jaxckpt .jc-row{{display:grid;column-gap:1.2em;align-items:baseline;padding:1px 4px;
grid-template-columns:minmax(9em,3fr) minmax(8em,2fr) 5em minmax(10em,2.4fr);
border-bottom:1px solid rgb(128 128 128/.16)}}
.jaxckpt .jc-row:hover{{background:rgb(128 128 128/.1)}}
.jaxckpt .jc-name{{padding-left:calc(var(--d,0)*1.15em + 1.1em);overflow-wrap:anywhere}}
.jaxckpt summary .jc-name{{font-weight:600}}
.jaxckpt summary .jc-name::before{{content:"▸";display:inline-block;width:1.1em;
margin-left:-1.1em;opacity:.6;font-weight:400}}
.jaxckpt details[open]>summary .jc-name::before{{content:"▾"}}
.jaxckpt .jc-num{{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}}
.jaxckpt .jc-wide{{grid-column:1/-1;padding-left:calc(var(--d,0)*1.15em + 1.1em)}}
.jaxckpt .jc-small{{font-size:12px}}
.jaxckpt .jc-layouts{{display:flex;gap:.6em;align-items:baseline}}
.jaxckpt .jc-layout{{flex:none;align-self:center;overflow:visible;fill:none;
stroke:currentColor;stroke-width:1.5}}
.jaxckpt .jc-layout :is(rect,path:not([stroke])){{stroke-width:1;stroke-opacity:.6}}
.jaxckpt svg text{{font-size:11px;fill:currentColor;opacity:.75}}
.jaxckpt .jc-axis{{stroke:currentColor;stroke-opacity:.4}}
.jaxckpt .jc-grid{{stroke:currentColor;stroke-opacity:.12}}
.jaxckpt .jc-hollow{{fill:none;stroke-width:1.5}}
.jaxckpt .jc-timeline,.jaxckpt .jc-chart{{display:block;overflow:visible;max-width:100%}}
.jaxckpt .jc-chart{{width:100%;height:auto}}
.jaxckpt .jc-key{{display:flex;flex-wrap:wrap;gap:.1em 1.2em;margin:.2em 0 .7em;font-size:12px}}
.jaxckpt .jc-key svg{{vertical-align:-3px;margin-right:.35em;overflow:visible}}
.jaxckpt.jaxckpt table{{border-collapse:collapse;width:100%;margin:.2em 0 .6em;border:0;
font-size:13px;color:inherit;table-layout:auto}}
.jaxckpt.jaxckpt :is(th,td){{text-align:left;padding:3px 12px 3px 4px;vertical-align:baseline;
border:0;border-bottom:1px solid rgb(128 128 128/.22);background:none;max-width:none}}
.jaxckpt.jaxckpt :is(th,td).jc-num{{text-align:right}}
.jaxckpt.jaxckpt td:not(.jc-full){{white-space:nowrap}}
.jaxckpt.jaxckpt .jc-full{{width:100%;overflow-wrap:anywhere}}
.jaxckpt .jc-scroll{{overflow-x:auto}}
.jaxckpt.jaxckpt th{{font-weight:400;font-size:12px;color:inherit;opacity:.65}}
.jaxckpt.jaxckpt tbody tr{{background:none}}
.jaxckpt.jaxckpt tbody tr:hover{{background:rgb(128 128 128/.1)}}
.jaxckpt .jc-tag{{display:inline-block;border:1px solid rgb(128 128 128/.45);border-radius:4px;
padding:0 .45em;margin:0 .35em .1em 0;font-size:12px;line-height:1.45}}
.jaxckpt .jc-tag.jc-best{{border-color:{_palette.BEST}}}
.jaxckpt .jc-tag.jc-pinned{{border-color:{_palette.PINNED}}}
.jaxckpt .jc-tag.jc-bad{{border-color:{_palette.BAD}}}
.jaxckpt ul{{margin:.2em 0 .6em;padding-left:1.3em;overflow-wrap:anywhere}}
@container (max-width:620px){{
.jaxckpt .jc-row{{display:flex;flex-wrap:wrap}}
.jaxckpt .jc-row.jc-top{{display:none}}
.jaxckpt .jc-row>.jc-name{{flex:1 0 calc(100% - 7em)}}
.jaxckpt .jc-row>.jc-type{{order:1;overflow-wrap:break-word;
padding-left:calc(var(--d,0)*1.15em + 1.1em)}}
.jaxckpt .jc-row>.jc-layouts{{order:2;margin-left:auto}}
.jaxckpt .jc-row>.jc-wide{{order:3;flex-basis:100%}}
.jaxckpt.jaxckpt :is(table,tbody){{display:block}}
.jaxckpt.jaxckpt thead{{display:none}}
.jaxckpt.jaxckpt tr{{display:flex;flex-wrap:wrap;gap:0 1em;padding:4px;
border-bottom:1px solid rgb(128 128 128/.22)}}
.jaxckpt.jaxckpt td,.jaxckpt.jaxckpt td:not(.jc-full){{border:0;padding:0;white-space:normal;
overflow-wrap:anywhere;text-align:left}}
.jaxckpt.jaxckpt td:empty{{display:none}}
.jaxckpt.jaxckpt td[data-label]::before{{content:attr(data-label) " ";font-size:12px}}
.jaxckpt.jaxckpt td:not(.jc-faint)::before{{opacity:.65}}
.jaxckpt.jaxckpt td.jc-full{{flex-basis:100%}}
}}
"""


def escape(value: object, limit: int = _MAX_CHARS) -> str:
    """Escapes text for any place in HTML, including quoted attributes, and truncates it.

    Example:
        >>> escape("<b>'x'"), escape("abcdef", limit=3)
        ('&lt;b&gt;&#x27;x&#x27;', 'abc…')
    """
    text = str(value)
    shown = text if len(text) <= limit else text[:limit] + "…"
    # Control characters are invalid in HTML, or change the direction of the text.
    shown = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in shown
    )
    return html.escape(shown, quote=True)


def facts(words: Iterable[str]) -> str:
    """Joins HTML pieces side by side."""
    return (
        f'<div class="jc-facts">{"".join(f"<span>{word}</span>" for word in words if word)}</div>'
    )


def figure(title: str, drawn: str, caption: str, legend: str = "") -> str:
    """Puts a drawing below its title. All of it is HTML."""
    below = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f"<figure><h3>{title}</h3>{drawn}{legend}{below}</figure>"


def moment(seconds: float | None) -> str:
    """Formats a wall clock time; returns "" if it is unknown or invalid."""
    if seconds is None:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ""


def block(inside: str) -> str:
    """Wraps HTML with its style sheet."""
    return f'<div class="jaxckpt"><style>{STYLE}</style>{inside}</div>'
