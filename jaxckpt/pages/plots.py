"""Plots with matplotlib: a metric over steps, the time of saves by phase, a sharding.

Each function draws into `ax`, or into a new figure, and returns the axes. A new figure is
transparent, with colours that are legible on light and on dark pages.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from jaxckpt._core.text import size_text
from jaxckpt.errors import needing
from jaxckpt.format.sharding import SavedSharding
from jaxckpt.pages import _palette, _steps, _svg
from jaxckpt.pages._svg import Mark
from jaxckpt.pages.overview import overview
from jaxckpt.types import LeafInfo, Timing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from jaxckpt._run.manager import CheckpointManager

# Device numbers in larger grids are illegible.
_MAX_LABELLED: Final = 64
_MAX_NAMED: Final = 8
_MOST: Final = 1e300  # the scale of an axis overflows if values are further apart
_MAX_BARS: Final = 40
_MAX_DEVICES: Final = 1 << 16


def metric(
    run: CheckpointManager | str | os.PathLike[str], name: str | None = None, ax: Axes | None = None
) -> Axes:
    """Draws a metric over the existing steps.

    The plot marks the steps that the policy keeps, the best step and those that will be deleted.
    NaN, infinite and huge values are lines across it. Values that span decades have a log scale.

    Args:
        run: A manager, or the root of a run, with the policy that its last job recorded.
        name: The metric. If None, the policy's metric, or else the first metric.
        ax: The axes to draw into.

    Raises:
        ValueError: no step has a number of that name.

    Example:
        >>> import tempfile, jaxckpt, matplotlib
        >>> matplotlib.use("agg")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with jaxckpt.CheckpointManager(folder) as manager:
        ...         _ = manager.save(7, {"w": 1.5}, metrics={"loss": 0.5})
        ...         manager.wait_until_finished()
        ...         metric(manager).get_ylabel()
        'loss'
    """
    is_root = isinstance(run, (str, os.PathLike))
    found = overview(run if is_root else run.directory)
    keep = found.keep if is_root else _steps.policy(run, found.keep)
    told = _steps.story(found.steps, keep=keep, now_s=time.time())
    names = _steps.metric_names(found.steps, told.metric)
    name = name or told.metric or next(iter(names), None)
    valued = [mark for mark in _steps.marks(told, name) if mark.value is not None]
    marks = [mark for mark in valued if abs(mark.value or 0.0) <= _MOST]
    if not valued:
        there = ", ".join(names) or "no metrics"
        raise ValueError(f"no step of {found.path} has a numeric metric {name!r}; found {there}")
    ax = _axes(ax)
    from matplotlib.ticker import MaxNLocator  # after `_axes`, which names a missing package

    ax.plot([m.step for m in marks], [m.value for m in marks], color=_palette.BLUE, lw=1.2)
    kept = [m for m in marks if m.kept and not m.bad]
    deleted = [m for m in marks if not m.kept and not m.bad]
    best, pinned = [m for m in marks if m.best], [m for m in marks if m.pinned]
    filled, hollow = {"edgecolors": "none"}, {"facecolors": "none"}
    kinds: list[tuple[str, list[Mark], dict[str, Any]]] = [
        ("kept" if told.why else "complete", kept, {**filled, "color": _palette.KEPT}),
        ("deleted after the next save", deleted, {**hollow, "edgecolors": _palette.KEPT}),
        ("incomplete", [m for m in marks if m.bad], {"marker": "x", "color": _palette.BAD}),
        ("pinned", pinned, {**hollow, "edgecolors": _palette.PINNED, "s": 130}),
        ("best", best, {**filled, "marker": "D", "color": _palette.BEST, "s": 55}),
    ]
    for label, some, look in kinds:
        if some:
            steps, values = [m.step for m in some], [m.value for m in some]
            ax.scatter(steps, values, label=label, zorder=3, **{"s": 30, "marker": "o", **look})
    lost = [mark.step for mark in valued if mark not in marks]
    for i, step in enumerate(lost):
        ax.axvline(step, color=_palette.BAD, lw=1.5, label="" if i else "NaN, infinite or huge")
    if _svg.spans_decades([mark.value or 0.0 for mark in marks] or [1.0]):
        ax.set_yscale("log")
    ax.set_xlabel("step")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_ylabel(_plain(name or ""))
    if lost or sum(bool(some) for _, some, _ in kinds) > 1:
        _legend(ax)
    return ax


def timings(timings: Sequence[Timing], ax: Axes | None = None) -> Axes:
    """Draws the durations of saves and restores, by phase.

    The training loop waits only for the phase `snapshot` of a save.

    Args:
        timings: The `manager.timings` of one or more managers; the last 40 are drawn.
        ax: The axes to draw into.

    Raises:
        ValueError: there are none.

    Example:
        >>> import matplotlib, jaxckpt
        >>> from jaxckpt.types import Timing
        >>> matplotlib.use("agg")
        >>> phases = {"snapshot": 0.1, "write": 0.8, "commit": 0.1}
        >>> one = Timing(
        ...     kind="save", path="run/7", step=7, total_bytes=10**9, seconds=1.0, phases=phases
        ... )
        >>> timings([one]).get_xlabel()
        'seconds'
    """
    shown = [*timings][-_MAX_BARS:]
    if not shown:
        raise ValueError("no timings to draw: nothing was saved or restored yet")
    both = len({one.kind for one in shown}) > 1
    ax = _axes(ax, height=1.1 + 0.34 * max(len(shown), 2))
    from matplotlib.patches import Patch  # after `_axes`, which names a missing package

    left = np.zeros(len(shown))
    colours = _palette.phase_colours(name for one in shown for name in one.phases)
    for name, colour in colours.items():
        widths = np.array([max(one.phases.get(name, 0.0), 0.0) for one in shown])
        ax.barh(range(len(shown)), widths, 0.68, left=left, color=colour)
        left += widths
    rest = np.maximum([one.seconds for one in shown] - left, 0.0)
    has_rest = bool((rest > 0.01 * left.max()).any())
    if has_rest:
        ax.barh(range(len(shown)), rest, 0.68, left=left, fc="none", ec=_palette.GREY, lw=0.8)
    ax.set_yticks(range(len(shown)), [_name(one, both=both) for one in shown])
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    ax.margins(x=0.16)
    for i, one in enumerate(shown):
        end = left[i] + rest[i]
        words = f" {size_text(one.gb_per_s * 1e9)}/s" if one.total_bytes else ""
        ax.text(end, i, words, va="center", fontsize="small", color=_ink(ax))
    ax.set_xlabel("seconds")
    ax.set_xlim(left=0)
    meaning = _palette.legend(colours)
    handles = [Patch(color=colour, label=_plain(names)) for colour, names in meaning.items()]
    if has_rest:
        handles.append(Patch(fc="none", ec=_palette.GREY, lw=0.8, label="other"))
    columns = len(handles) if len(handles) <= 6 else 4
    room = {"borderaxespad": 0.2, "handlelength": 1, "columnspacing": 1.2}
    _legend(ax, handles=handles, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1), **room)
    return ax


def sharding(of: Any, shape: Sequence[int] | None = None, ax: Axes | None = None) -> Axes:
    """Draws which device holds which part of an array.

    Each axis of the mesh that divides the array has a hue, which grows darker along the axis, so
    that a part shows its place on every axis. The numbers are device ids. An array of
    more than two dimensions is drawn along its two most divided dimensions, at the start of the
    others.

    Args:
        of: A `jax.Array`, a `jax.sharding.Sharding`, or a leaf of `jaxckpt.open(path).leaves`.
        shape: Of the array; needed only for a sharding.
        ax: The axes to draw into.

    Raises:
        TypeError: `of` lacks a sharding.
        ValueError: the shape is missing, or the checkpoint does not record the leaf's sharding.

    Example:
        >>> import jax, matplotlib
        >>> matplotlib.use("agg")
        >>> sharding(jax.numpy.zeros((4, 6))).get_title()
        '[4, 6] on 1 device'
    """
    boxes, saved, shape = _boxes(of, shape)
    parts: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, box in boxes.items():
        parts.setdefault(box, []).append(device)
    rows, columns = _svg.drawn_dims([len({box[i] for box in parts}) for i in range(len(shape))])
    others = [i for i in range(len(shape)) if i not in (rows, columns)]
    shown = {box: ids for box, ids in parts.items() if all(box[i][0] == 0 for i in others)}
    ax = _axes(ax, height=3.0)
    _draw_parts(ax, shown, shape, rows, columns, _colours(saved))
    _draw_key(ax, saved)
    dims = ", ".join(map(str, shape))
    ax.set_title(f"[{dims}] on {len(boxes)} device{'s' * (len(boxes) != 1)}", fontsize="medium")
    below = [_axis_words(columns, shape), _plain("" if saved.is_single_device else str(saved))]
    if others:
        below.append("first part of dimension " + ", ".join(map(str, others)))
    ax.set_xlabel("\n".join(word for word in below if word))
    ax.set_ylabel(_axis_words(rows, shape))
    return ax


def _draw_parts(
    ax: Axes,
    parts: Mapping[tuple[tuple[int, int], ...], Sequence[int]],
    shape: Sequence[int],
    rows: int | None,
    columns: int | None,
    colours: Mapping[int, _palette.Colour],
) -> None:
    from matplotlib.patches import Rectangle

    def span(box: tuple[tuple[int, int], ...], dim: int | None) -> tuple[int, int]:
        return (0, 1) if dim is None else box[dim]

    for box, ids in parts.items():
        (top, bottom), (left, right) = span(box, rows), span(box, columns)
        colour = colours.get(ids[0], _palette.NEUTRAL)
        ax.add_patch(
            Rectangle((left, top), right - left, bottom - top, fc=colour, ec=_ink(ax), lw=0.8)
        )
        if len(parts) <= _MAX_LABELLED:
            named = " ".join(map(str, ids[:_MAX_NAMED]))
            more = f" +{len(ids) - _MAX_NAMED}" if len(ids) > _MAX_NAMED else ""
            middle = ((left + right) / 2, (top + bottom) / 2)
            ink = "black" if np.dot(colour, (0.299, 0.587, 0.114)) > 0.5 else "white"
            ax.text(*middle, named + more, ha="center", va="center", color=ink, fontsize="small")
    ax.set_xlim(0, 1 if columns is None else max(shape[columns], 1))
    ax.set_ylim(1 if rows is None else max(shape[rows], 1), 0)
    for dim, axis in ((columns, ax.xaxis), (rows, ax.yaxis)):
        edges = {edge for box in parts for edge in span(box, dim)}
        axis.set_ticks([] if dim is None else sorted(edges) if len(edges) <= 9 else [0, shape[dim]])
    for spine in ax.spines.values():
        spine.set_visible(False)


def _draw_key(ax: Axes, saved: SavedSharding) -> None:
    """Draws the legend: the tints along each axis that divides the array."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    if not (axes := _dividing(saved)):
        return
    tints = [[_palette.tint(axis, i / 7) for i in range(8)] for axis in axes]
    handles = [tuple(Patch(color=colour) for colour in some) for some in tints]
    labels = [_plain(f"{saved.axis_names[i]}, 0 to {saved.axis_sizes[i] - 1}") for i in axes]
    look = {"handler_map": {tuple: HandlerTuple(ndivide=None, pad=0)}, "handlelength": 4}
    _legend(ax, handles=handles, labels=labels, loc="upper left", bbox_to_anchor=(1, 1), **look)


def _dividing(saved: SavedSharding) -> list[int]:
    """Returns the numbers of the mesh axes that divide the array."""
    used = {axis for dim in range(len(saved.spec)) for axis in _svg.axes_of(saved, dim)}
    return sorted(axis for axis in used if saved.axis_sizes[axis] > 1)


def _colours(saved: SavedSharding) -> dict[int, _palette.Colour]:
    """Returns the colour of each device: the product of its tints, one for each dividing axis."""
    axes, found = _dividing(saved), {}
    for device, at in _positions(saved):
        tints = [_palette.tint(axis, at[axis] / (saved.axis_sizes[axis] - 1)) for axis in axes]
        red, green, blue = np.prod(tints, axis=0) if tints else _palette.NEUTRAL
        found[device] = red, green, blue
    return found


def _positions(saved: SavedSharding) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields each device of the mesh, with its index on each axis."""
    if math.prod(saved.axis_sizes) > _MAX_DEVICES:  # the file is not trusted
        raise ValueError(f"a mesh of {saved.axis_sizes} is too large to draw")
    for position, at in enumerate(np.ndindex(saved.axis_sizes)):
        device = saved.device_ids[position] if position < len(saved.device_ids) else position
        yield device, at


def _boxes(
    of: Any, shape: Sequence[int] | None
) -> tuple[dict[int, tuple[tuple[int, int], ...]], SavedSharding, tuple[int, ...]]:
    """Returns the part of each device, `[start, stop)` per dimension; the sharding; the shape."""
    if isinstance(of, LeafInfo):
        if of.saved_sharding is None:
            raise ValueError(f"the checkpoint does not record the sharding of {of.path!r}")
        return _saved_boxes(of.saved_sharding, of.shape), of.saved_sharding, of.shape
    found = getattr(of, "sharding", of)
    shape = getattr(of, "shape", None) if found is not of else shape
    if not hasattr(found, "devices_indices_map"):
        raise TypeError(
            "expected a jax.Array, a jax.sharding.Sharding or a leaf of jaxckpt.open(path).leaves, "
            f"got {type(of).__name__}"
        )
    if shape is None:
        raise ValueError("a sharding has no shape; pass it: sharding(of, shape)")
    from jaxckpt._save.tree_plan import saved_sharding  # imports jax

    shape = tuple(shape)
    boxes = {
        device.id: tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        for device, index in found.devices_indices_map(shape).items()
    }
    return boxes, saved_sharding(found), shape


def _saved_boxes(
    saved: SavedSharding, shape: tuple[int, ...]
) -> dict[int, tuple[tuple[int, int], ...]]:
    if saved.is_single_device:
        return {0: tuple((0, size) for size in shape)}
    boxes = {}
    for device, at in _positions(saved):
        box = []
        for dim, size in enumerate(shape):
            index, count = 0, 1
            for axis in _svg.axes_of(saved, dim):
                index = index * saved.axis_sizes[axis] + at[axis]
                count *= saved.axis_sizes[axis]
            each = -(-size // count)
            box.append((min(index * each, size), min((index + 1) * each, size)))
        boxes[device] = tuple(box)
    return boxes


def _axis_words(dim: int | None, shape: Sequence[int]) -> str:
    return "" if dim is None else f"dimension {dim}, of {shape[dim]}"


def _axes(ax: Axes | None, *, height: float = 3.2) -> Axes:
    if ax is None:
        with needing("matplotlib", "a plot"):
            import matplotlib.pyplot as plt

        figure, ax = plt.subplots(figsize=(6.4, height), layout="constrained")
        figure.patch.set_visible(False)
        ax.patch.set_visible(False)
        ax.tick_params(colors=_palette.INK, which="both")
        ax.spines[:].set_color(_palette.INK)
        for text in (ax.title, ax.xaxis.label, ax.yaxis.label):
            text.set_color(_palette.INK)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _legend(ax: Axes, **options: Any) -> None:
    ax.legend(frameon=False, fontsize="small", labelcolor=_ink(ax), **options)


def _ink(ax: Axes) -> Any:  # a colour of matplotlib's
    return ax.xaxis.label.get_color()


def _name(timing: Timing, *, both: bool) -> str:
    step = "" if timing.step is None else f"{timing.step:,}"
    return f"{timing.kind} {step}".strip() if both or not step else f"step {step}"


def _plain(text: str) -> str:
    """Escapes matplotlib's math syntax and truncates the text."""
    return (text if len(text) <= 60 else text[:60] + "…").replace("$", r"\$")
