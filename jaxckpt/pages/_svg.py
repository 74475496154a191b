"""Small drawings as inline SVG: pure functions from numbers to text.

Text and lines inherit the surrounding colour, so they are legible on light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from jaxckpt.format.sharding import SavedSharding
from jaxckpt.pages._html import escape
from jaxckpt.pages._palette import BAD, BEST, BLUE, KEPT, PINNED, axis_hue, phase_colours

_WIDTH, _HEIGHT = 340, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 14, 12, 26
# More bars than pixels are invisible.
_MAX_BARS: Final = 60
_MAX_DOTS: Final = 90
# In an icon of 26 by 16 pixels.
_MAX_LINES: Final = 8
_INSET: Final = 8  # of the first and last mark, so that a ring does not cover a number
# The difference of two larger floats may overflow.
_HUGE: Final = 1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One step in a drawing; `best`, `pinned` and `bad` highlight it."""

    step: float
    value: float | None = None  # its height in a chart; NaN and infinities are lines
    title: str = ""  # the tooltip
    kept: bool = True  # whether the policy keeps it
    best: bool = False
    pinned: bool = False
    bad: bool = False
    under_way: bool = False  # whether it is still being saved


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One stacked bar of a chart."""

    label: str
    parts: Mapping[str, float] = field(default_factory=dict)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Returns about `count` round numbers from `low` to `high`.

    Example:
        >>> ticks(0.0, 1.0), ticks(3, 3), ticks(130, 980, 3)
        ([0.0, 0.5, 1.0], [3], [500.0])
    """
    if not high - low > 1 / _HUGE:  # its power of ten would underflow
        return [low]
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 5, 10) if m * power >= raw), 10 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, min(last, first + 20) + 1)]


def number(value: float) -> str:
    """Formats a number with few digits.

    Example:
        >>> number(12000), number(0.25), number(1500000), number(1.5e-7)
        ('12,000', '0.25', '1.5M', '1.5e-07')
    """
    if isinstance(value, int) or value.is_integer():
        value = int(value)
        for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6)):
            if size <= abs(value) < 1000 * size:
                return f"{value / size:.4g}{unit}"
        return f"{value:,}" if abs(value) < 10**6 else f"{float(value):.3g}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def division(sharding: SavedSharding | None, shape: Sequence[int]) -> str:
    """Draws a leaf as a grid, split along its two most divided dimensions.

    A second outline behind it marks parts that are on several devices.
    """
    if sharding is None or sharding.is_single_device:
        return ""
    parts, copies = _parts(sharding, len(shape))
    rows, columns = drawn_dims(parts)
    # Only the visible part of the outline behind.
    back = '<path d="M4.5 3V.5H25.5V12.5H22"/>' if copies > 1 else ""
    down = [
        f'<path d="M{0.5 + 21 * at:.1f} 3.5v12" stroke="{colour}"/>'
        for at, colour in _cuts(sharding, parts, columns)
    ]
    across = [
        f'<path d="M.5 {3.5 + 12 * at:.1f}h21" stroke="{colour}"/>'
        for at, colour in _cuts(sharding, parts, rows)
    ]
    words = " × ".join(map(str, parts)) or "1"
    title = f"{words} parts, each on {copies} device{'s' * (copies != 1)}"
    return (
        f'<svg class="jc-layout" width="26" height="16" role="img"><title>{title}</title>{back}'
        f'<rect x=".5" y="3.5" width="21" height="12" rx="1"/>{"".join([*down, *across])}</svg>'
    )


def drawn_dims(parts: Sequence[int]) -> tuple[int | None, int | None]:
    """Returns the most divided dimensions as rows and columns, or None if missing."""
    most = sorted(sorted(range(len(parts)), key=lambda i: -parts[i])[:2])
    rows, columns = [None] * (2 - len(most)) + most
    return rows, columns


def swatch(colour: str) -> str:
    """Draws a square for a legend."""
    return (
        f'<svg width="12" height="12"><rect width="12" height="12" rx="2" fill="{colour}"/></svg>'
    )


def _cuts(
    sharding: SavedSharding, parts: Sequence[int], dim: int | None
) -> Iterator[tuple[float, str]]:
    """Yields where a dimension is cut, from 0 to 1, and the hue of the mesh axis that cuts it."""
    if dim is None or parts[dim] == 1:
        return
    axes = axes_of(sharding, dim)
    sizes = [sharding.axis_sizes[axis] for axis in axes]
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(axes))]
    step = -(-parts[dim] // _MAX_LINES)
    for cut in range(step, parts[dim], step):
        axis = next(axis for axis, stride in zip(axes, strides, strict=True) if cut % stride == 0)
        yield cut / parts[dim], axis_hue(axis)


def axes_of(sharding: SavedSharding, dim: int) -> list[int]:
    """Returns the numbers of the mesh axes that divide a dimension."""
    found = sharding.spec[dim] if dim < len(sharding.spec) else None
    names = () if found is None else (found,) if isinstance(found, str) else found
    return [sharding.axis_names.index(name) for name in names]


def _parts(sharding: SavedSharding, dims: int) -> tuple[list[int], int]:
    """Returns the number of parts of each dimension, and the number of devices of each part."""
    parts = [
        math.prod(sharding.axis_sizes[axis] for axis in axes_of(sharding, dim))
        for dim in range(dims)
    ]
    return parts, max(1, math.prod(sharding.axis_sizes) // math.prod(parts))


# --- steps along a line ----------------------------------------------------------------------


def timeline(marks: Sequence[Mark]) -> str:
    """Draws the steps of a run on a line as wide as the page."""
    if not marks:
        return ""
    low, high = min(m.step for m in marks), max(m.step for m in marks)

    def x(step: float) -> str:
        return f"{4 + 92 * ((step - low) / (high - low) if high > low else 0.5):.2f}%"

    axis = "".join(
        f'<text x="{x(tick)}" y="46" text-anchor="middle">{number(round(tick))}</text>'
        f'<line class="jc-axis" x1="{x(tick)}" x2="{x(tick)}" y1="26" y2="31"/>'
        for tick in ticks(low, high, 5)
        if tick == round(tick)
    )
    radius = 4.5 if len(marks) <= _MAX_DOTS / 2 else 3.0
    # Highlighted marks are drawn last, on top.
    ordered = sorted(marks, key=lambda m: (m.kept, m.pinned, m.best, m.bad))
    return (
        '<svg class="jc-timeline" width="100%" height="52" role="img">'
        '<line class="jc-axis" x1="0" x2="100%" y1="18" y2="18"/>'
        f"{axis}{''.join(dot(m, x(m.step), '18', radius) for m in ordered)}</svg>"
    )


def dot(mark: Mark, x: str, y: str, radius: float = 4.5) -> str:
    """Draws a mark, the same on a timeline, in a chart and in the legend."""
    title = f"<title>{escape(mark.title)}</title>" if mark.title else ""
    ring = f'<circle cx="{x}" cy="{y}" r="7.5" fill="none" stroke="{PINNED}" stroke-width="2"/>'
    ring = ring if mark.pinned else ""
    if mark.bad or mark.best:  # only a nested svg can be placed by percentages
        cross = f'd="M-4-4 4 4M4-4-4 4" stroke="{BAD}" stroke-width="2.5"'
        path = cross if mark.bad else f'd="M0-6 6 0 0 6-6 0z" fill="{BEST}"'
        shape = f'<svg x="{x}" y="{y}" overflow="visible"><path {path}/></svg>'
    else:
        hollow = f'class="jc-hollow" stroke="{KEPT}"'
        look = f'fill="{KEPT}"' if mark.kept else hollow
        look = f'{hollow} stroke-dasharray="2 2"' if mark.under_way else look
        shape = f'<circle cx="{x}" cy="{y}" r="{radius:g}" {look}/>'
    return f"<g>{title}{ring}{shape}</g>"


# --- charts ----------------------------------------------------------------------------------


def line_chart(marks: Sequence[Mark], *, label: str) -> str:
    """Draws values over steps; returns "" if there are none."""
    valued = [(m, float(m.value)) for m in marks if m.value is not None]
    drawn = [(m, v) for m, v in valued if -_HUGE < v < _HUGE]
    if not drawn:
        return ""
    scaled = math.log10 if spans_decades([v for _, v in drawn]) else float
    low, high = _widened(min(scaled(v) for _, v in drawn), max(scaled(v) for _, v in drawn))
    first, last = valued[0][0].step, valued[-1][0].step

    def x_of(step: float) -> float:
        across = (step - first) / (last - first) if last > first else 0.5
        return _LEFT + _INSET + across * (_WIDTH - _LEFT - _RIGHT - 2 * _INSET)

    def y_of(height: float) -> float:
        return _TOP + (high - height) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    spots = [(m, x_of(m.step), y_of(scaled(v))) for m, v in drawn]
    line = " ".join(f"{x:.1f},{y:.1f}" for _, x, y in spots)
    across = [(x_of(t), number(round(t))) for t in ticks(first, last, 4) if t == round(t)]
    heights = ticks(low, high, 5)
    if scaled is math.log10:
        upwards = [(y_of(t), number(10.0**t)) for t in heights if t == round(t)]
    else:
        upwards = [(y_of(t), number(t)) for t in heights]
    few = len(spots) <= _MAX_DOTS  # otherwise only the highlighted dots
    dots = "".join(
        dot(m, f"{x:.1f}", f"{y:.1f}", 4.0 if len(spots) <= _MAX_DOTS / 3 else 2.5)
        for m, x, y in spots
        if few or m.best or m.pinned or m.bad
    )
    curve = f'<polyline points="{line}" fill="none" stroke="{BLUE}" stroke-width="1.5"/>'
    lost = "".join(_not_finite(m, x_of(m.step)) for m, v in valued if not math.isfinite(v))
    return _chart(label, _axes(across, upwards) + lost + curve + dots)


def spans_decades(values: Sequence[float]) -> bool:
    """Returns whether values are legible only on a logarithmic scale.

    Example:
        >>> spans_decades([1e-4, 1.0]), spans_decades([0.0, 1.0]), spans_decades([5.0, 50.0])
        (True, False, False)
    """
    return 0 < min(values) <= max(values) / 1000


def _not_finite(mark: Mark, x: float) -> str:
    """Draws a line across a chart for a value without a height."""
    return (
        f'<g><title>{escape(mark.title)}</title><line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" '
        f'y2="{_HEIGHT - _BOTTOM}" stroke="{BAD}" stroke-width="2" stroke-opacity=".6"/>'
        f'<text x="{x:.1f}" y="{_TOP - 1}" text-anchor="middle">{mark.value}</text></g>'
    )


def bar_chart(bars: Sequence[Bar], *, label: str, scale: float = 1.0) -> str:
    """Draws stacked bars, only the newest of many; returns "" if there is nothing to draw.

    Args:
        bars: In order.
        label: A description for screen readers.
        scale: The divisor of the numbers on the axis.
    """
    bars = [
        replace(bar, parts={name: v for name, v in bar.parts.items() if 0 <= v < _HUGE})
        for bar in bars[-_MAX_BARS:]
    ]
    totals = [sum(bar.parts.values()) for bar in bars]
    high = max(totals, default=0.0)
    if not 0 < high < _HUGE:
        return ""
    colours = phase_colours(name for bar in bars for name in bar.parts)
    plot_width, plot_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    slot = plot_width / len(bars)
    width = min(slot * (0.7 if slot > 4 else 1.0), 28.0)
    drawn = []
    for i, (bar, total) in enumerate(zip(bars, totals, strict=True)):
        x, y = _LEFT + slot * (i + 0.5) - width / 2, float(_HEIGHT - _BOTTOM)
        shown = []
        for name, colour in colours.items():
            tall = bar.parts.get(name, 0.0) / high * plot_height
            y -= tall
            if tall > 0:
                shown.append(
                    f'<rect x="{x:.1f}" y="{y:.2f}" width="{width:.1f}" height="{tall:.2f}" '
                    f'fill="{colour if len(colours) > 1 else BLUE}"/>'
                )
        words = ", ".join(f"{n} {number(v / scale)}" for n, v in bar.parts.items())
        title = f"{bar.label}: {words if len(colours) > 1 else number(total / scale)}"
        drawn.append(f"<g><title>{escape(title)}</title>{''.join(shown)}</g>")
    shown_at = sorted({0, len(bars) // 2, len(bars) - 1} if len(bars) > 4 else range(len(bars)))
    across = [(_LEFT + slot * (i + 0.5), bars[i].label) for i in shown_at]
    upwards = [
        (_HEIGHT - _BOTTOM - t * scale / high * plot_height, number(t))
        for t in ticks(0, high / scale, 5)
    ]
    return _chart(label, _axes(across, upwards) + "".join(drawn))


def _widened(low: float, high: float) -> tuple[float, float]:
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - room, high + room


def _chart(label: str, inside: str) -> str:
    return (
        f'<svg class="jc-chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(label)}">{inside}</svg>'
    )


def _axes(across: Sequence[tuple[float, str]], upwards: Sequence[tuple[float, str]]) -> str:
    base = _HEIGHT - _BOTTOM
    lines = "".join(
        f'<line class="jc-grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(words)}</text>'
        for y, words in upwards
    )
    below = "".join(
        f'<text x="{min(x, _WIDTH - 18):.1f}" y="{base + 17}" text-anchor="middle">'
        f"{escape(words)}</text>"
        for x, words in across
    )
    axis = f'<line class="jc-axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>'
    return lines + axis + below
