"""Formats the results of the benchmarks as Markdown and as plots."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.timing import BLOCKED, BYTES, SAVE, Samples, paired
from benchmarks.workloads import TARGETS

_COLOURS: Final = ("#c0392b", "#e67e22", "#2980b9", "#7f8c8d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One table.

    Attributes:
        rows: The rows of the table; the first row is the heading.
        note: How the figures were measured, and how to read them.
        samples: All measurements, as JSON.
        key: The key of the samples in the JSON file. If empty, the name of the study.
    """

    title: str
    rows: Sequence[Sequence[str]]
    note: str = ""
    samples: Any = field(default_factory=dict)
    key: str = ""


def markdown(section: Section) -> str:
    """Returns a section as Markdown text."""
    heading, *rows = section.rows
    lines = [f"### {section.title}", ""]
    if section.note:
        lines += [section.note, ""]
    lines += ["| " + " | ".join(heading) + " |", "|" + "---|" * len(heading)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def comparison(title: str, figures: Sequence[str], samples: Samples, note: str = "") -> Section:
    """Compares peers side by side: medians, and in brackets the multiple of the first peer's."""
    mine, *others = next(iter(samples.values()))
    rows = [["", mine, *others]]
    for figure in figures:
        by_peer = samples[figure]
        if not by_peer[mine]:
            continue
        cells = [value(figure, by_peer[mine])]
        for other in others:
            if not by_peer[other]:
                cells.append("")
                continue
            ratio, least, most = paired(by_peer[mine], by_peer[other])
            cells.append(f"{value(figure, by_peer[other])} ({ratio:.2f}x, {least:.2f}-{most:.2f})")
        rows.append([figure, *cells])
    return Section(title=title, rows=rows, note=note, samples=samples)


def value(figure: str, values: Sequence[float]) -> str:
    """Returns the median with its unit."""
    middle = statistics.median(values)
    return amount(middle) if figure in BYTES else seconds(middle)


def seconds(value: float) -> str:
    """Returns a time with its unit."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def amount(size: float) -> str:
    """Returns a number of bytes with its unit."""
    return f"{size / 1e6:,.0f} MB" if abs(size) >= 1e7 else f"{size / 1e6:.2f} MB"


def plot(workloads: Mapping[str, Section], file: Path) -> None:
    """Plots the times of each peer as multiples of jaxckpt's, as an SVG; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "jaxckpt", "font.size": 9})
    import matplotlib.pyplot as plt

    figures = (SAVE, BLOCKED, *TARGETS)
    drawing, axes = plt.subplots(
        1, len(workloads), figsize=(4.2 * len(workloads), 3.4), squeeze=False, sharey=True
    )
    for axis, section in zip(axes[0], workloads.values(), strict=True):
        mine, *others = next(iter(section.samples.values()))
        for i, other in enumerate(others):
            shown = [
                (row, paired(section.samples[figure][mine], section.samples[figure][other])[0])
                for row, figure in enumerate(figures)
                if section.samples[figure][other]
            ]
            height = 0.8 / len(others)
            at = [row - 0.4 + height * (i + 0.5) for row, _ in shown]
            colour = _COLOURS[i % len(_COLOURS)]
            bars = axis.barh(at, [r for _, r in shown], height, label=other, color=colour)
            axis.bar_label(bars, [f" {ratio:.3g}x" for _, ratio in shown], fontsize=7)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xscale("log")
        axis.margins(x=0.2)
        axis.set_title(section.title, fontsize=9)
        axis.set_yticks(range(len(figures)), figures)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].invert_yaxis()
    named = axes[0][0].get_legend_handles_labels()
    axes[0][-1].legend(*named, loc="lower right", fontsize=7, frameon=False)
    drawing.supxlabel("time, as a multiple of jaxckpt's (log scale)", fontsize=9)
    drawing.tight_layout()
    drawing.savefig(file, metadata={"Date": None})
    plt.close(drawing)


def plot_scale(plans: Mapping[int, Any], merges: Mapping[int, Any], file: Path) -> None:
    """Plots the times that grow with the number of processes, as an SVG; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "jaxckpt", "font.size": 9})
    import matplotlib.pyplot as plt

    drawing, axis = plt.subplots(figsize=(5.2, 3.2))
    for label, curve in (
        ("plan of one process", {count: found["plan"] for count, found in plans.items()}),
        ("metadata, by process 0", {count: found["metadata"] for count, found in plans.items()}),
        ("merge, by process 0", {count: found["merge"] for count, found in merges.items()}),
    ):
        axis.plot(list(curve), list(curve.values()), marker="o", label=label)
    axis.set(xscale="log", yscale="log", xlabel="processes", ylabel="seconds")
    axis.set_xticks(list(plans), [f"{count:,}" for count in plans])
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    drawing.tight_layout()
    drawing.savefig(file, metadata={"Date": None})
    plt.close(drawing)
