"""A run as one HTML page, without network, scripts or other files.

The page shows the run's metadata and leaves of one number; no larger array is read. Its content
security policy forbids loading or running anything, so a name in a checkpoint cannot do so either.
"""

from __future__ import annotations

import math
import os
import posixpath
import shutil
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median, median_low
from typing import Final

from jaxckpt._core.text import counted, size_text
from jaxckpt._inspect import open as inspection
from jaxckpt._run.retention import KeepPolicy
from jaxckpt._version import __version__
from jaxckpt.errors import CheckpointError
from jaxckpt.format import names
from jaxckpt.pages import _palette, _steps, _svg
from jaxckpt.pages._goodput import plan_html, starts_html
from jaxckpt.pages._html import STYLE, escape, figure, moment
from jaxckpt.pages._svg import Bar
from jaxckpt.pages.goodput import duration
from jaxckpt.pages.notebook import json_html, listing, numbers, tree_head, tree_html
from jaxckpt.pages.overview import RunOverview, StepOverview, overview, with_local
from jaxckpt.storage import LocalStorage

_MAX_CHARTS: Final = 12
_MAX_ITEMS: Final = 20
# At the top of every report; only a file with it is replaced.
_MARK: Final = '<meta name="generator" content="jaxckpt'
_UNITS: Final = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
_PAGE_STYLE: Final = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c1f23}
@media (prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#dfe3e8}}
body{margin:0;background:var(--bg);color:var(--fg)}
body .jaxckpt{max-width:68rem;margin:0 auto;padding:2rem 1.25rem 3rem;font-size:14px}
h1{font-size:1.7rem;line-height:1.25;font-weight:600;margin:0 0 .15em;overflow-wrap:anywhere}
h2{font-size:1.1rem;font-weight:600;margin:2.4em 0 .6em}
h3{font-size:.9rem;font-weight:600;margin:0 0 .3em;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.15em 1.4em;margin:1.2em 0}
dt{opacity:.65}
dd{margin:0;overflow-wrap:anywhere}
.charts{display:grid;gap:1.6em 2em;
grid-template-columns:repeat(auto-fill,minmax(min(100%,300px),1fr))}
figure{margin:0;min-width:0}
figcaption{font-size:12px;opacity:.7;font-variant-numeric:tabular-nums}
footer{margin-top:3em;font-size:12px;opacity:.65}
@media print{body{--bg:#fff;--fg:#000}}
"""


def report(
    root: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    keep: KeepPolicy | None = None,
    local: str | os.PathLike[str] | None = None,
    plan: str | os.PathLike[str] | None = None,
) -> None:
    """Writes a report about a run as one HTML page.

    The page is written completely or not at all. An earlier report at `out` is replaced, any other
    file is not.

    Args:
        root: A run of jaxckpt, Orbax or Flax, which may be in use.
        out: The file to write, in an existing directory.
        keep: The policy that explains why steps are kept. If None, the policy recorded by the last
            job that wrote the run, without `when`.
        local: The run's local directory on this host, if it has one.
        plan: A file with what `jaxckpt plan --json` printed, to draw its goodput.

    Raises:
        CheckpointNotFound, NotADirectoryError, ValueError: `root` is not a run, or `plan` no plan.
        IsADirectoryError, FileExistsError: `out` exists and is not a report.
        FileNotFoundError: the directory of `out` does not exist.

    Example:
        >>> import os, tempfile, jaxckpt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with jaxckpt.CheckpointManager(f"{folder}/run") as manager:
        ...         _ = manager.save(7, {"w": 1.5}, metrics={"loss": 0.5})
        ...     report(f"{folder}/run", f"{folder}/report.html")
        ...     print(sorted(os.listdir(folder)))
        ['report.html', 'run']
    """
    file = os.fspath(out)
    _check_out(file)
    run, tiers = with_local(overview(root), local)
    planned = "" if plan is None else plan_html(plan)
    page = _page(run, os.fspath(root), keep or run.keep, tiers, planned, now_s=time.time())
    _check_out(file)  # again, because making the page took a while
    # A file name may contain bytes that are not text.
    LocalStorage().write(os.path.abspath(file), page.encode("utf-8", "replace"))


def _check_out(file: str) -> None:
    if os.path.isdir(file):
        raise IsADirectoryError(
            f"{file} is a directory; pass a file, such as {posixpath.join(file, 'report.html')}"
        )
    folder = os.path.dirname(file) or "."
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"cannot write {file}: no such directory: {folder}")
    if not os.path.lexists(file):
        return
    is_report = False
    if os.path.isfile(file):
        with open(file, "rb") as stream:
            is_report = _MARK.encode() in stream.read(1024)
    if not is_report:
        raise FileExistsError(
            f"{file} exists and is not a jaxckpt report. Remove it, or choose another name."
        )


def _page(
    run: RunOverview,
    root: str,
    keep: KeepPolicy | None,
    tiers: Mapping[int, Sequence[str]] | None = None,
    planned: str = "",
    *,
    now_s: float,
) -> str:
    told = _steps.story(run.steps, keep=keep, now_s=now_s)
    name = posixpath.basename(run.path.rstrip("/")) or run.path
    tree, broken = _newest_contents(run, root.rstrip("/"))
    has_times = any(step.phases for step in run.steps)
    sections = [
        ("Steps", _steps.line(told) + _steps.table(told)),
        ("Metrics", _metrics(told)),
        ("Time and size of each save" if has_times else "Size of each step", _costs(run.steps)),
        ("Training time kept", starts_html(run.starts)),
        ("Plan", planned),
        ("Contents of the newest step", tree),
        ("Problems", _problems(run.steps, broken)),
        ("Also in this directory", listing(list(run.strays), "entry")),
    ]
    body = "".join(
        f"<section><h2>{title}</h2>{inside}</section>" for title, inside in sections if inside
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'{_MARK} {__version__}">\n'
        # Nothing is loaded or run, whatever the page contains.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(name)} · checkpoints</title>\n"
        f"<style>{STYLE}{_PAGE_STYLE}</style></head>\n"
        f'<body><main class="jaxckpt"><h1>{escape(name)}</h1>{_facts(run, tiers or {})}{body}'
        f"<footer>jaxckpt {__version__} · {moment(now_s)} UTC</footer></main></body></html>\n"
    )


def _facts(run: RunOverview, tiers: Mapping[int, Sequence[str]]) -> str:
    steps = run.steps
    whole = [step for step in steps if step.problem is None]
    times = [step.saved_s for step in steps if step.saved_s is not None]
    rows: list[tuple[str, str]] = [("directory", f"<code>{escape(run.path, 1000)}</code>")]
    if steps:
        bad = len(steps) - len(whole)
        missing = f', <span class="jc-bad">{bad:,} incomplete</span>' if bad else ""
        rows.append(("steps", f"{len(steps):,}{missing}"))
        rows.append(("newest complete step", f"{whole[-1].step:,}" if whole else "none"))
        rows.append(("on disk", size_text(sum(step.size_bytes for step in steps))))
    for tier in ("local", "durable"):
        there = [f"{step:,}" for step, where in sorted(tiers.items()) if tier in where]
        rows += [(f"{tier} steps", ", ".join(there[-8:]))] if there else []
    if free := _free_text(run.path, whole):
        rows.append(("free", free))
    if times:
        first, last = moment(min(times)), moment(max(times))
        rows.append(("saved", f"{first} to {last} UTC" if first != last else f"{last} UTC"))
    if interval := _interval_text(whole):
        rows.append(("save interval", interval))
    if rates := [rate for step in whole if (rate := _bytes_per_s(step)) is not None]:
        rows.append(("rate", f"{size_text(median(rates))}/s, median of the saves"))
    if writers := sorted({step.writer for step in steps if step.writer}):
        rows.append(("written by", escape(", ".join(writers))))
    if steps and (lineage := steps[0].lineage):
        words = ", ".join(f"{name} {value}" for name, value in lineage.items())
        rows.append(("started from", f"<code>{escape(words, 1000)}</code>"))
    if not steps:
        rows.append(("steps", "none yet"))
    return "<dl>" + "".join(f"<dt>{key}</dt><dd>{value}</dd>" for key, value in rows) + "</dl>"


def _free_text(path: str, whole: Sequence[StepOverview]) -> str:
    try:
        free = shutil.disk_usage(path).free
    except OSError:
        return ""
    size = whole[-1].size_bytes if whole else 0
    room = f", room for {counted(free // size, 'step')} like the newest" if size else ""
    return f"{size_text(free)}{room}"


def _interval_text(whole: Sequence[StepOverview]) -> str:
    """Describes the distance between neighbouring steps, which deleted steps make larger."""
    pairs = [*pairwise(whole)]
    if not pairs:
        return ""
    steps = median_low([after.step - before.step for before, after in pairs])
    times = [(before.saved_s, after.saved_s) for before, after in pairs]
    gaps = [b - a for a, b in times if a is not None and b is not None and b >= a]
    took = f", {duration(median_low(gaps))}" if gaps else ""
    return f"{counted(steps, 'step')}{took}, median of the steps that are here"


def _bytes_per_s(step: StepOverview) -> float | None:
    """Returns the rate of a save, or None if its phases are not recorded."""
    seconds = sum(_work(step).values())
    return step.size_bytes / seconds if seconds > 0 else None


def _work(step: StepOverview) -> dict[str, float]:
    """Returns the phases of a save without that in which it waited for earlier saves."""
    return {name: seconds for name, seconds in step.phases.items() if name != "wait"}


def _newest_contents(run: RunOverview, root: str) -> tuple[str, list[str]]:
    """Returns the contents of the newest readable step, and why newer steps cannot be read."""
    broken = []
    for step in reversed([step for step in run.steps if step.problem is None][-3:]):
        path = f"{root}/{step.name}" if step.path.startswith(run.path) else step.path
        try:
            ckpt = inspection.open(path)
        except (CheckpointError, OSError, ValueError) as error:
            broken.append(f"step {step.step:,}: {error}")
            continue
        try:
            values = numbers(ckpt)
        except (CheckpointError, OSError, ValueError) as error:
            broken.append(f"step {step.step:,}: {error}")
            values = {}
        others = [name for name in ckpt.items if name not in (ckpt.item, names.METRICS_ITEM)]
        shown = tree_head(ckpt) + tree_html(ckpt, values)
        return shown + "".join(_json_item(path, name) for name in others[:_MAX_ITEMS]), broken
    return "", broken


def _json_item(path: str, name: str) -> str:
    """Returns the content of an item, collapsed if it is long; "" if it is a tree."""
    try:
        ckpt = inspection.open(path, item=name)
    except (CheckpointError, OSError, ValueError) as error:
        content = f'<span class="jc-bad">{escape(error)}</span>'
    else:
        content = json_html(ckpt)
    return f"<h3>{escape(name)}</h3>{content}" if content else ""


# --- charts ----------------------------------------------------------------------------------


def _metrics(told: _steps.Story) -> str:
    charts = []
    metrics = _steps.metric_names(told.steps, told.metric)
    for name in metrics[:_MAX_CHARTS]:
        found = [(step.step, _steps.number_of(step, name)) for step in told.steps]
        values = [(step, value) for step, value in found if value is not None]
        drawn = _svg.line_chart(_steps.marks(told, name), label=f"{name[:80]} over steps")
        if values:
            charts.append(figure(escape(name, 80), drawn, _extremes(values)))
    more, shown = len(metrics) - _MAX_CHARTS, "".join(charts)
    note = f'<p class="jc-faint">… {counted(more, "more metric")}</p>' if more > 0 else ""
    return f'<div class="charts">{shown}</div>{note}' if shown else ""


def _extremes(values: Sequence[tuple[int, float]]) -> str:
    """Describes the values of a metric by step."""
    finite = [pair for pair in values if math.isfinite(pair[1])]
    words = []
    if finite:
        least, most = (f(finite, key=lambda pair: pair[1]) for f in (min, max))
        words += [f"min {_svg.number(least[1])} at {least[0]:,}"]
        words += [f"max {_svg.number(most[1])} at {most[0]:,}"]
        words += ["log scale"] if _svg.spans_decades([value for _, value in finite]) else []
    words.append(f"last {_svg.number(values[-1][1])}")
    lost = [step for step, value in values if not math.isfinite(value)]
    if lost:
        text = f"{len(lost):,} NaN or infinite, first at {lost[0]:,}"
        words.append(f'<b class="jc-bad">{text}</b>')
    return " · ".join(words)


def _costs(steps: Sequence[StepOverview]) -> str:
    figures = []
    times = [Bar(label=f"{step.step:,}", parts=_work(step)) for step in steps if step.phases]
    if drawn := _svg.bar_chart(times, label="seconds of each save by phase"):
        colours = _palette.phase_colours(name for bar in times for name in bar.parts)
        legend = "".join(
            f"<span>{_svg.swatch(colour)}{escape(phases, 80)}</span>"
            for colour, phases in _palette.legend(colours).items()
        )
        figures.append(figure("seconds by phase", drawn, "", f'<div class="jc-key">{legend}</div>'))
    largest = max((step.size_bytes for step in steps), default=0)
    unit, scale = next(((u, s) for u, s in _UNITS if largest >= s), ("B", 1.0))
    sizes = [Bar(label=f"{step.step:,}", parts={"": step.size_bytes}) for step in steps]
    if drawn := _svg.bar_chart(sizes, label="size of each step", scale=scale):
        caption = f"{size_text(sum(step.size_bytes for step in steps))} in all"
        figures.append(figure(f"{unit} on disk", drawn, caption))
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""


def _problems(steps: Sequence[StepOverview], broken: list[str]) -> str:
    found = [f"step {step.step:,}: {step.problem}" for step in steps if step.problem is not None]
    found += broken
    if not found:
        words = "Every step is complete, judging by its metadata and file sizes."
        return f"<p>{words} <code>jaxckpt verify</code> checks all data against its checksums.</p>"
    return listing(found, "problem")
