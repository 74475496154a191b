"""Draws the chart of the README from results: `python -m benchmarks.chart`.

Each group of bars has its own scale, on which the slowest library takes the whole width.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).parent / "results"
CHART: Final = RESULTS / "speed.svg"

_FIGURES: Final = {"save, committed": "save", "restore, same mesh": "restore"}
_PEERS: Final = {"jaxckpt": "jaxckpt", "orbax v1": "Orbax v1", "orbax v0": "Orbax v0"}
_WIDTH, _LEFT, _RIGHT = 460, 76, 122  # of the drawing, and beside the bars
_BAR, _GAP, _HEADING = 15, 3, 24

_LIGHT: Final = "--paper: #fff; --ink: #24292f; --ours: #0077bb; --theirs: #a3a8ae;"
_DARK: Final = "--paper: #1e2129; --ink: #d5d7dd; --ours: #33aaee; --theirs: #666c76;"
# A page with colours of its own has the attribute, which wins over the setting of the system.
_STYLE: Final = f"""
.speed {{ {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ .speed {{ {_DARK} }} }}
[data-md-color-scheme=default] .speed {{ {_LIGHT} }}
[data-md-color-scheme=slate] .speed {{ {_DARK} }}
.speed text {{ font: 13px system-ui, sans-serif; fill: var(--ink); }}
.speed .heading {{ font-weight: 600; }}
.speed .paper {{ fill: var(--paper); }}
.speed .theirs {{ fill: var(--theirs); }}
.speed .ours {{ fill: var(--ours); }}
"""


def chart(studies: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    """Returns an SVG: for each workload, how long each library saves and restores.

    Args:
        studies: The `studies` of a JSON file of results; seconds of each round by figure and peer.
        titles: The workloads to draw, and what each is, such as `806 MB in 98 leaves`.
    """
    parts: list[str] = []
    y = 10
    for workload, title in titles.items():
        for figure, verb in _FIGURES.items():
            times = {
                label: statistics.median(samples)
                for peer, label in _PEERS.items()
                if (samples := studies[workload][figure].get(peer))
            }
            y += _HEADING
            parts.append(f'<text class="heading" x="8" y="{y - 8}">{verb} {title}</text>')
            parts += _bars(times, y)
            y += (_BAR + _GAP) * len(times)
    size = f'width="{_WIDTH}" height="{y + 10}" viewBox="0 0 {_WIDTH} {y + 10}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="speed" role="img" {size}>'
    label = "<title>Time of saves and restores, beside Orbax; shorter is better</title>"
    paper = '<rect class="paper" width="100%" height="100%" rx="6"/>'
    return "\n".join([head, label, f"<style>{_STYLE}</style>", paper, *parts, "</svg>"]) + "\n"


def _bars(times: Mapping[str, float], top: int) -> Iterator[str]:
    longest, ours = max(times.values()), next(iter(times.values()))
    for i, (label, time) in enumerate(times.items()):
        y = top + i * (_BAR + _GAP)
        width = max(1.0, (_WIDTH - _LEFT - _RIGHT) * time / longest)
        kind = "theirs" if i else "ours"
        yield f'<text x="8" y="{y + 12}">{label}</text>'
        yield f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}"/>'
        times_ours = time / ours
        words = f"{time:.2g} s" + (f", {times_ours:.{times_ours < 10:d}f} times" if i else "")
        yield f'<text x="{_LEFT + width + 6:.1f}" y="{y + 12}">{words}</text>'


def read_results(
    folder: Path = RESULTS, name: str = "tmpfs"
) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Returns the studies of `<name>.json`, and the titles of their workloads from `<name>.md`."""
    studies = json.loads((folder / f"{name}.json").read_text("utf-8"))["studies"]
    text = (folder / f"{name}.md").read_text("utf-8")
    return studies, dict(re.findall(r"^### (large|gpt2|small): (.*)$", text, re.MULTILINE))


def main() -> None:
    CHART.write_text(chart(*read_results()), "utf-8")


if __name__ == "__main__":
    main()
