"""The steps of a run as HTML: a timeline, its legend, and a table."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from jaxckpt._core.text import counted, size_text
from jaxckpt._run.retention import KeepPolicy
from jaxckpt.pages import _svg
from jaxckpt.pages._html import escape, moment
from jaxckpt.pages._svg import Mark
from jaxckpt.pages.overview import StepOverview

if TYPE_CHECKING:  # showing steps does not need jax
    from jaxckpt._run.manager import CheckpointManager

_MAX_COLUMNS: Final = 4
_MAX_NAME: Final = 24
_MAX_CELL: Final = 60
_MAX_SHOWN: Final = 20
_MAX_ROWS: Final = 500
_MAX_MARKS: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The steps of a run, and the effect of a policy on them."""

    steps: Sequence[StepOverview]  # in order
    why: Mapping[int, tuple[str, ...]] | None = None  # the rules for each kept step, if known
    best: int | None = None  # the best step by the policy's metric
    under_way: Sequence[int] = field(default_factory=tuple)  # steps being saved
    metric: str | None = None  # the metric that the policy ranks by


def story(
    steps: Sequence[StepOverview],
    *,
    keep: KeepPolicy | None,
    now_s: float,
    under_way: Sequence[int] = (),
    committed: Collection[int] | None = None,
) -> Story:
    """Applies a policy to the existing steps, as the manager does after the next save.

    Args:
        steps: In order.
        keep: The policy, or None if unknown.
        now_s: Wall clock, in seconds since 1970.
        under_way: Steps being saved.
        committed: The steps that the policy applies to. If None, the complete steps.
    """
    if keep is None:
        return Story(steps=steps, under_way=under_way)
    infos = [
        step.info(now_s)
        for step in steps
        if (step.problem is None if committed is None else step.step in committed)
    ]
    broken = {step.step for step in steps if step.problem is not None}
    ranked = [info for info in keep.ranked(infos) if info.step not in broken]
    return Story(
        steps=steps,
        why=keep.why(infos, now_s=now_s) if keep.has_rules else None,
        best=ranked[0].step if ranked else None,
        under_way=under_way,
        metric=keep.metric_name,
    )


def policy(manager: CheckpointManager, recorded: KeepPolicy | None) -> KeepPolicy:
    """Returns the manager's policy; for a reader without a policy, the policy of the last job."""
    is_own = manager.mode == "w" or manager.keep != KeepPolicy()
    return manager.keep if is_own or recorded is None else recorded


def marks(told: Story, metric: str | None = None) -> list[Mark]:
    """Returns a mark for each step, at the height of a metric; of many, the newest and the best."""
    found = []
    ranks = metric in (None, told.metric)  # the best step is best by one metric only
    newest = told.steps[-_MAX_MARKS:]
    for step in [*(step for step in told.steps[:-_MAX_MARKS] if step.step == told.best), *newest]:
        words = [f"step {step.step:,}", moment(step.saved_s), size_text(step.size_bytes)]
        words += [f"{name} {_cell(value)}" for name, value in [*step.metrics.items()][:8]]
        words += told.why.get(step.step, ()) if told.why else ()
        words += [step.problem] if step.problem else []
        found.append(
            Mark(
                step=step.step,
                value=number_of(step, metric),
                title=" · ".join(word for word in words if word),
                kept=told.why is None or step.step in told.why,
                best=ranks and step.step == told.best,
                pinned=step.pinned,
                bad=step.problem is not None,
            )
        )
    coming = [
        Mark(step=number, title=f"step {number:,}, being saved", under_way=True)
        for number in told.under_way
        if number not in {step.step for step in told.steps}
    ]
    return sorted([*found, *coming], key=lambda mark: mark.step)


def number_of(step: StepOverview, metric: str | None) -> float | None:
    """Returns a metric of a step, also NaN; None if it is not a number or overflows a float."""
    return None if metric is None else _as_float(step.metrics.get(metric))


def _as_float(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def key(shown: Sequence[Mark], *, has_policy: bool) -> str:
    """Returns the legend of the shown marks."""
    kinds = [
        (
            "kept" if has_policy else "complete",
            Mark(step=0),
            lambda m: m.kept and not (m.best or m.bad or m.under_way),
        ),
        ("deleted after the next save", Mark(step=0, kept=False), lambda m: not (m.kept or m.bad)),
        ("best", Mark(step=0, best=True), lambda m: m.best),
        ("pinned", Mark(step=0, pinned=True), lambda m: m.pinned),
        ("incomplete", Mark(step=0, bad=True), lambda m: m.bad),
        ("being saved", Mark(step=0, under_way=True), lambda m: m.under_way),
    ]
    items = [
        f'<span><svg width="16" height="16">{_svg.dot(mark, "8", "8")}</svg>{name}</span>'
        for name, mark, is_shown in kinds
        if any(is_shown(m) for m in shown)
    ]
    # A single kind needs no legend.
    return f'<div class="jc-key">{"".join(items)}</div>' if len(items) > 1 else ""


def line(told: Story) -> str:
    shown = marks(told)
    cut = len(told.steps) - _MAX_MARKS
    note = f'<p class="jc-faint">… {counted(cut, "earlier step")}</p>' if cut > 0 else ""
    return _svg.timeline(shown) + key(shown, has_policy=told.why is not None) + note


def metric_names(steps: Sequence[StepOverview], first: str | None = None) -> list[str]:
    """Returns the names of all metrics, `first` before the others."""
    names = dict.fromkeys(name for step in steps for name in step.metrics)
    return sorted(names, key=lambda name: name != first)


def table(told: Story) -> str:
    """Returns the steps as a table, newest first; the older of many are collapsed, but the best."""
    if not told.steps:
        return ""
    columns = metric_names(told.steps, told.metric)[:_MAX_COLUMNS]
    head = (
        '<thead><tr><th class="jc-num">step</th><th>saved (UTC)</th><th class="jc-num">size</th>'
        + "".join(f'<th class="jc-num">{escape(name, _MAX_NAME)}</th>' for name in columns)
        + "<th>checked</th>"
        + f'<th class="jc-full">{"kept because" if told.why is not None else ""}</th></tr></thead>'
    )
    newest = [*reversed(told.steps)]
    shown = newest[:_MAX_SHOWN] + [s for s in newest[_MAX_SHOWN:] if s.step == told.best]
    rest = [step for step in newest[_MAX_SHOWN:] if step.step != told.best]
    html = _rows(told, head, shown, columns)
    if rest:
        folded = rest[: _MAX_ROWS - _MAX_SHOWN]
        cut = len(rest) - len(folded)
        more = f'<p class="jc-faint">… {counted(cut, "more step")}</p>' if cut > 0 else ""
        html += (
            f"<details><summary>… {counted(len(rest), 'earlier step')}</summary>"
            f"{_rows(told, head, folded, columns)}{more}</details>"
        )
    return html


def _rows(told: Story, head: str, steps: Sequence[StepOverview], columns: Sequence[str]) -> str:
    """Returns a table that scrolls in its own box if the page is too narrow."""
    rows = "".join(_row(told, step, columns) for step in steps)
    return f'<div class="jc-scroll"><table>{head}<tbody>{rows}</tbody></table></div>'


def _row(told: Story, step: StepOverview, columns: Sequence[str]) -> str:
    cells = [
        f'<td class="jc-num"><b>{step.step:,}</b></td>',
        f"<td>{moment(step.saved_s)}</td>",
        f'<td class="jc-num">{size_text(step.size_bytes)}</td>',
    ]
    for name in columns:
        value = escape(_cell(step.metrics[name]), _MAX_CELL) if name in step.metrics else ""
        if not math.isfinite(number_of(step, name) or 0.0):
            value = f'<b class="jc-bad">{value}</b>'
        cells.append(f'<td class="jc-num" data-label="{escape(name, _MAX_CELL)}">{value}</td>')
    what = "sizes" if step.writer.startswith("jaxckpt") else "markers"
    checked = f"{what}; data not read" if step.problem is None else ""
    cells.append(f'<td class="jc-faint" data-label="checked">{checked}</td>')
    cells.append(f'<td class="jc-full">{_tags(told, step)}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _tags(told: Story, step: StepOverview) -> str:
    tags = []
    if step.problem is not None:
        what = "unreadable" if step.unreadable else "incomplete"
        tags.append(f'<span class="jc-tag jc-bad">{what}</span>')
    words = told.why.get(step.step, ()) if told.why is not None else ()
    words = words or (("pinned",) if step.pinned else ())
    for word in words:
        is_best = step.step == told.best and word.startswith("best ")
        mark = " jc-pinned" if word == "pinned" else " jc-best" if is_best else ""
        tags.append(f'<span class="jc-tag{mark}">{escape(word)}</span>')
    if told.why is not None and not tags:
        ours = step.writer.startswith("jaxckpt")
        words = "deleted after the next save" if ours else "kept: not written by jaxckpt"
        tags.append(f'<span class="jc-faint">{words}</span>')
    if step.problem is not None:
        words = step.problem.replace(f"{step.path}/", "")
        tags.append(f'<span class="jc-faint">{escape(words)}</span>')
    return "".join(tags)


def _cell(value: object) -> str:  # JSON
    number = _as_float(value)
    return str(value)[: 2 * _MAX_CELL] if number is None else f"{number:.4g}"
