"""Shows a checkpoint and a manager in a notebook: HTML, from metadata and a few single numbers.

The text may come from untrusted files, so all of it is escaped and truncated, without scripts.
A large tree is collapsed, and cut with a "… n more".
"""

from __future__ import annotations

import contextlib
import json
import math
import posixpath
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from jaxckpt._core.text import counted, size_text
from jaxckpt._inspect import open as inspection
from jaxckpt._inspect.tree_text import Branch, nested
from jaxckpt.errors import CheckpointError, CheckpointNotFound
from jaxckpt.format.tree import path_text
from jaxckpt.pages import _steps, _svg
from jaxckpt.pages._html import block, escape, facts
from jaxckpt.pages._palette import axis_hue
from jaxckpt.pages.goodput import duration
from jaxckpt.pages.overview import RunOverview, overview
from jaxckpt.types import LeafInfo, LeafStatistics, Timing

if TYPE_CHECKING:  # showing a checkpoint does not need jax
    from jaxckpt._run.manager import CheckpointManager

# Limits on the rows of one container, all rows, and rows visible at first.
_MAX_LEVEL: Final = 40
_MAX_ROWS: Final = 200
_MAX_OPEN: Final = 100
_MAX_DEPTH: Final = 24
_MAX_LISTED: Final = 50
_MAX_TEXT: Final = 60
_MAX_JSON: Final = 4000
_MAX_JSON_LINES: Final = 20
_MAX_NUMBERS: Final = 32
_NUMBER_BYTES: Final = 8


def checkpoint_html(
    ckpt: inspection.Checkpoint, *, statistics: Mapping[str, LeafStatistics] | None = None
) -> str:
    """Renders a checkpoint as a collapsible tree: names, types, bytes and shardings.

    Args:
        ckpt: The result of `jaxckpt.open`, or a part of it.
        statistics: The result of `ckpt.statistics()`, to show below each leaf. If None, the values
            of up to 32 leaves of one number of at most 8 bytes are read, if jaxckpt wrote them and
            they can be read; no other array data is.

    Example:
        >>> import tempfile, jaxckpt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jaxckpt.save(f"{folder}/a", {"layer": {"w": 1.5}})
        ...     html = checkpoint_html(jaxckpt.open(f"{folder}/a"))
        >>> html.count("<details")
        1
    """
    if statistics is None:
        with contextlib.suppress(CheckpointError, OSError, ValueError):
            statistics = numbers(ckpt)
    return block(tree_head(ckpt) + tree_html(ckpt, statistics or {}))


def numbers(ckpt: inspection.Checkpoint) -> Mapping[str, LeafStatistics]:
    """Reads single numbers that jaxckpt wrote, nearest to the root first."""
    tree = ckpt._tree
    if tree is None or not tree.ours:  # the chunks of other programs may be large
        return {}
    small = (leaf for leaf in ckpt.leaves.values() if leaf.size_bytes <= _NUMBER_BYTES)
    wanted = {leaf.path for leaf in small if is_scalar(leaf)}
    found = [leaf for leaf in tree.tree.leaves if leaf.text in wanted]
    return ckpt._statistics(sorted(found, key=lambda leaf: len(leaf.path))[:_MAX_NUMBERS])


def manager_html(manager: CheckpointManager) -> str:
    """Renders a manager's run: its steps on a timeline and in a table, with the keep rules.

    Does not communicate with other processes or raise background errors.

    Example:
        >>> import tempfile, jaxckpt
        >>> keep = jaxckpt.KeepPolicy(last=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with jaxckpt.CheckpointManager(folder, keep=keep) as manager:
        ...         _ = manager.save(7, {"w": 1.5}, metrics={"loss": 0.5})
        ...         manager.wait_until_finished()
        ...         html = manager_html(manager)
        >>> [word in html for word in ("newest", "last 2", "loss")]
        [True, True, True]
    """
    pending = manager._saver.worker.under_way()  # its own package; asking the manager may raise
    try:
        run = overview(manager.directory)
    except CheckpointNotFound:
        run = RunOverview(path=manager.directory, steps=(), strays=())
    told = _steps.story(
        run.steps,
        keep=_steps.policy(manager, run.keep),
        now_s=time.time(),
        under_way=[one.step for one in pending if one.step is not None and not one.done()],
        committed=set(manager._index.steps()),
    )
    head = _title(manager.directory) + facts(
        [
            counted(len(run.steps), "step"),
            f"{size_text(sum(step.size_bytes for step in run.steps))} on disk",
            "for reading" if manager.mode == "r" else "",
            f"restored step {manager.restored_step:,}" if manager.restored_step is not None else "",
            _rate(manager.timings),
            "every step is kept" if manager.mode == "w" and not manager.keep.has_rules else "",
        ]
    )
    notes = list(dict.fromkeys([*run.strays, *manager.problems]))
    body = _steps.line(told) + _steps.table(told) + listing(notes, "note")
    return block(f'<div class="jc-head">{head}</div>{body}')


def _rate(timings: Sequence[Timing]) -> str:
    """Describes the last save; returns "" if there was none."""
    last = next((one for one in reversed(timings) if one.kind == "save"), None)
    if last is None:
        return ""
    return f"last save {duration(last.seconds)}, {size_text(1e9 * last.gb_per_s)}/s"


def listing(notes: list[str], word: str) -> str:
    """Renders lines of text, collapsed if there are more than a few."""
    if not notes:
        return ""
    lines = "".join(f"<li>{escape(note)}</li>" for note in notes[:_MAX_LISTED])
    if len(notes) > _MAX_LISTED:
        lines += f"<li>… {len(notes) - _MAX_LISTED:,} more</li>"
    opened = " open" if len(notes) <= 3 else ""
    return (
        f"<details{opened}><summary>{counted(len(notes), word)}</summary><ul>{lines}</ul></details>"
    )


def _title(path: str, more: str = "") -> str:
    folder, name = posixpath.split(path.rstrip("/"))
    return f'<div><span class="jc-faint">{escape(folder)}/</span><b>{escape(name)}</b>{more}</div>'


def tree_head(ckpt: inspection.Checkpoint) -> str:
    """Renders the facts about a checkpoint apart from its leaves."""
    item = f' <span class="jc-faint">item</span> {escape(ckpt.item)}' if ckpt.item else ""
    if ckpt._below:
        item += f' <span class="jc-faint">at</span> {escape(path_text(ckpt._below))}'
    others = [name for name in ckpt.items if name != ckpt.item]
    meshes = _meshes(ckpt)
    told = [
        counted(len(ckpt.leaves), "leaf") if ckpt._tree is not None else "JSON",
        size_text(ckpt.size_bytes) if ckpt._tree is not None else "",
        f"mesh {_mesh_key(next(iter(meshes)))}" if len(meshes) == 1 else "",
        f"{len(meshes)} meshes" if len(meshes) > 1 else "",
        f"other items: {escape(', '.join(others))}" if others else "",
    ]
    recorded = [("custom metadata", ckpt.custom_metadata), ("lineage", ckpt.lineage)]
    more = "".join(
        f'<div><span class="jc-faint">{name}</span> '
        f"<code>{escape(json.dumps(value, ensure_ascii=False, default=str), 1000)}</code></div>"
        for name, value in recorded
        if value
    )
    return f'<div class="jc-head">{_title(ckpt.path, item)}{facts(told)}{more}</div>'


def _meshes(ckpt: inspection.Checkpoint) -> set[tuple[tuple[str, int], ...]]:
    """Returns the meshes that leaves were on, as axes with their sizes."""
    saved = {leaf.saved_sharding for leaf in ckpt.leaves.values()}
    return {
        tuple(zip(one.axis_names, one.axis_sizes, strict=True))
        for one in saved
        if one is not None and one.axis_names
    }


def _mesh_key(axes: Sequence[tuple[str, int]]) -> str:
    """Renders a mesh, each axis with the colour of its cuts in the drawings of shardings."""
    words = [
        f"{_svg.swatch(axis_hue(i))} {escape(name)}={size}" for i, (name, size) in enumerate(axes)
    ]
    between = ',</span> <span class="jc-whole">'
    return f'<span class="jc-whole">{between.join(words)}</span>'


# --- the tree --------------------------------------------------------------------------------


def tree_html(
    ckpt: inspection.Checkpoint, statistics: Mapping[str, LeafStatistics] | None = None
) -> str:
    """Renders the leaves as rows, collapsed by container."""
    if not ckpt.leaves:
        return json_html(ckpt) or '<div class="jc-faint">an empty tree</div>'
    top = nested(ckpt.leaves.values())
    head = (
        '<div class="jc-row jc-top jc-faint"><span class="jc-name">name</span>'
        '<span>type</span><span class="jc-num">size</span><span>sharding</span></div>'
    )
    counts, opened = _allot(top)
    leaves = ckpt._tree.tree.leaves if ckpt._tree is not None else ()
    shown = _Shown(
        counts=counts,
        opened=opened,
        statistics=statistics or {},
        texts={leaf.text: leaf.value for leaf in leaves if isinstance(leaf.value, str)},
        one_mesh=len(_meshes(ckpt)) == 1,
    )
    return f'<div class="jc-tree">{head}{"".join(_rows(top, 0, shown))}</div>'


def json_html(ckpt: inspection.Checkpoint) -> str:
    """Renders the value of a JSON item, collapsed if it is long; returns "" for a tree."""
    if ckpt._tree is not None:
        return ""
    value = getattr(ckpt._opened, "value", None)
    text = json.dumps(value, indent=2, ensure_ascii=False)
    lines = text.count("\n") + 1
    shown = f'<pre class="jc-mono">{escape(text, _MAX_JSON)}</pre>'
    if lines <= _MAX_JSON_LINES:
        return shown
    return f"<details><summary>JSON, {counted(lines, 'line')}</summary>{shown}</details>"


def is_scalar(leaf: LeafInfo) -> bool:
    """Returns whether the leaf is one number."""
    return math.prod(leaf.shape) == 1 and leaf.kind not in ("str", "bytes", "empty", "key")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """Holds the displayed part of a tree.

    Attributes:
        counts: So many children of each branch.
        opened: Branches that are not folded.
        statistics: The values of leaves in words, where they were read.
        texts: The leaves that are text.
        one_mesh: Whether the head names the mesh of all leaves.
    """

    counts: Mapping[Branch, int]
    opened: Collection[Branch]
    statistics: Mapping[str, LeafStatistics]
    texts: Mapping[str, str]
    one_mesh: bool


def _allot(top: Branch) -> tuple[Mapping[Branch, int], Collection[Branch]]:
    """Decides what is shown, and what is open: the levels nearest to the root first."""
    left, open_left, level = _MAX_ROWS, _MAX_OPEN, [top]
    counts: dict[Branch, int] = {}
    opened: set[Branch] = set()
    for _ in range(_MAX_DEPTH):
        for node in level:
            counts[node] = min(len(node.children), _MAX_LEVEL, left)
            left -= counts[node]
        shown = sum(counts[node] for node in level)
        if shown <= open_left:  # alike for what lies side by side
            opened.update(level)
        open_left -= shown
        children = [c for node in level for c in islice(node.children.values(), counts[node])]
        level = [child for child in children if isinstance(child, Branch)]
    return counts, opened


def _rows(node: Branch, depth: int, shown: _Shown) -> Iterator[str]:
    count_shown = shown.counts.get(node, 0)
    for name, child in islice(node.children.items(), count_shown):
        if isinstance(child, LeafInfo):
            yield _leaf_row(name, child, depth, shown)
            continue
        yield (
            f'<details{" open" if child in shown.opened else ""}><summary class="jc-row" '
            f'style="--d:{depth}"><span class="jc-name jc-mono">{escape(name)}</span>'
            f'<span class="jc-type jc-faint">{counted(child.leaf_count, "leaf")}</span>'
            f'<span class="jc-num">{size_text(child.size_bytes)}</span></summary>'
        )
        yield from _rows(child, depth + 1, shown)
        yield "</details>"
    if (cut := len(node.children) - count_shown) > 0:
        yield (
            f'<div class="jc-row" style="--d:{depth}"><span class="jc-wide jc-faint">'
            f"… {cut:,} more; open a part: ckpt['path/of/it']</span></div>"
        )


def _leaf_row(name: str, leaf: LeafInfo, depth: int, shown: _Shown) -> str:
    dims = ", ".join(map(str, leaf.shape))
    is_array = leaf.kind not in ("str", "bytes", "empty", "int")
    words = f'{escape(leaf.dtype)}<span class="jc-faint">[{escape(dims)}]</span>'
    words = words if is_array else escape(leaf.type_text)
    found = shown.statistics.get(leaf.path)
    if value := _value(found, shown.texts.get(leaf.path)):
        words, found = f"{words} = <b>{escape(value)}</b>", None
    drawing, spec = "", ""
    if leaf.saved_sharding is not None:
        drawing = _svg.division(leaf.saved_sharding, leaf.shape)
        sharding = str(leaf.saved_sharding)
        # If there is only one mesh, the head names it.
        is_short = shown.one_mesh and not leaf.saved_sharding.is_single_device
        spec = escape(sharding.rpartition(" on (")[0] if is_short else sharding)
    return (
        f'<div class="jc-row" style="--d:{depth}"><span class="jc-name jc-mono">{escape(name)}'
        f'</span><span class="jc-type jc-mono">{words}</span>'
        f'<span class="jc-num">{size_text(leaf.size_bytes)}</span>'
        f'<span class="jc-layouts jc-mono">{drawing}{spec}</span>{_statistics(found)}</div>'
    )


def _value(found: LeafStatistics | None, text: str | None) -> str:
    """Returns the value of a leaf that is one number, or text; else ""."""
    if text is not None:
        return json.dumps(text[:_MAX_TEXT], ensure_ascii=False)
    if found is None or found.size != 1 or found.min is None:
        return ""
    return f"{found.min:,}" if isinstance(found.min, int) else f"{found.min:.6g}"


def _statistics(found: LeafStatistics | None) -> str:
    if found is None:
        return ""
    told = []
    if found.min is not None and found.max is not None:
        told = [
            f"{_svg.number(found.min)} to {_svg.number(found.max)}",
            f"mean {_svg.number(found.mean or 0.0)}",
            f"std {_svg.number(found.std or 0.0)}",
            f"norm {_svg.number(found.norm)}",
            f"{found.zeros / found.size:.0%} zero" if found.zeros else "",
        ]
    bad = [f"{found.nan:,} NaN" if found.nan else "", f"{found.inf:,} inf" if found.inf else ""]
    words = [f'<span class="jc-faint">{word}</span>' for word in told if word]
    words += [f'<b class="jc-bad">{word}</b>' for word in bad if word]
    return f'<div class="jc-wide jc-small">{facts(words)}</div>' if words else ""
