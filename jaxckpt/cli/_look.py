"""`ls`, `show`, `du` and `report`: what there is. They change nothing and import no jax."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from jaxckpt._core.text import counted, size_text
from jaxckpt.cli import _options, _output
from jaxckpt.cli._output import Styled

if TYPE_CHECKING:
    from jaxckpt._inspect.open import Checkpoint
    from jaxckpt._run.overview import RunOverview, StepOverview
    from jaxckpt.cli._space import Part, Space
    from jaxckpt.types import LeafInfo

Row = list[str | Styled]
_MAX_BRANCHES: Final = 12
_MAX_STRAYS: Final = 20


@click.command()
@click.argument("path", type=_options.PATH)
@_options.as_json
def ls(path: str, as_json: bool) -> None:
    """List the steps of a run: age, size, metrics, whole or not.

    PATH is the run's root. A step is whole if it is committed and has every file in its size.
    """
    from jaxckpt._run.overview import overview

    found = overview(path)
    if as_json:
        _output.print_json(run_facts(found))
        return
    now_s = time.time()
    if found.steps:
        head = ["step", "age", "size", "metrics", "pinned", "state"]
        rows = [
            [*step_cells(step, now_s), "pinned" if step.pinned else "", _state(step)]
            for step in found.steps
        ]
        _output.print_table(head, rows, right=("step", "age", "size"), fold="state")
    whole = [step.step for step in found.steps if step.problem is None]
    _output.echo(
        f"{found.path}: {counted(len(found.steps), 'step')}"
        + (f", {len(found.steps) - len(whole)} not whole" * (len(whole) < len(found.steps)))
        + f", {size_text(sum(step.size_bytes for step in found.steps))}"
        + (f"; the newest whole one is {whole[-1]}" if whole else "")
    )
    for stray in found.strays[:_MAX_STRAYS]:
        _output.echo(f"also there: {stray}")
    if len(found.strays) > _MAX_STRAYS:
        _output.echo(f"also there: {len(found.strays) - _MAX_STRAYS} more")


def run_facts(found: RunOverview) -> dict[str, Any]:
    """A run as JSON."""
    steps = [
        {f.name: getattr(step, f.name) for f in dataclasses.fields(step)}
        | {"whole": step.problem is None}
        for step in found.steps
    ]
    return {"path": found.path, "steps": steps, "strays": found.strays}


def step_cells(step: StepOverview, now_s: float) -> Row:
    """Step, age, size and metrics."""
    age_s = None if step.saved_s is None else max(0.0, now_s - step.saved_s)
    return [
        str(step.step),
        _output.age_text(age_s),
        size_text(step.size_bytes),
        _output.metrics_text(step.metrics),
    ]


def _state(step: StepOverview) -> Styled:
    if step.problem is None:
        return Styled("whole", "green")
    return Styled(f"NOT WHOLE: {step.problem}", "bold red")


# --- show -----------------------------------------------------------------------------------


@click.command()
@click.argument("path", type=_options.PATH)
@click.argument("globs", nargs=-1, metavar="[GLOB]...")
@_options.item
@click.option("--depth", type=click.IntRange(min=1), help="Fold what lies deeper in the tree.")
@click.option("--stats", is_flag=True, help="Read the data: min, max, mean, std, norm, NaNs.")
@_options.as_json
def show(
    path: str,
    globs: tuple[str, ...],
    item: str | None,
    depth: int | None,
    stats: bool,
    as_json: bool,
) -> None:
    """Show the tree of a checkpoint: shapes, dtypes, shardings, bytes.

    PATH is a checkpoint, an item of one, or a run's root: then its newest whole step. GLOB is over
    leaf paths; the name of a container means all in it.
    """
    from jaxckpt._inspect import open as inspection

    ckpt = inspection.open(path, item=item)
    if not ckpt.leaves and globs:
        raise ValueError(f"item {ckpt.item!r} of {ckpt.path} is no tree: it has no leaves")
    leaves = _selected(ckpt, globs)
    statistics = ckpt.statistics(only=list(globs) or None) if stats and leaves else {}
    if as_json:
        _output.print_json(_checkpoint_facts(ckpt, leaves, statistics))
        return
    _output.echo(_headline(ckpt, leaves))
    others = [name for name in ckpt.items if name != ckpt.item]
    if others:
        _output.echo(f"other items: {', '.join(others)}")
    for name, value in (("custom metadata", ckpt.custom_metadata), ("lineage", ckpt.lineage)):
        if value:
            _output.echo(f"{name}: {dict(value)}")
    if not ckpt.leaves and (value := _json_value(ckpt)) is not None:
        _output.print_json(value)
        return
    head = ["leaf", "type", "sharding", "bytes", *(_STATISTICS if statistics else ())]
    rows = list(_tree_rows(_nested(leaves), depth or len(leaves) + 999, "", statistics))
    if statistics or not any(row[2] for row in rows):  # beside the numbers there is no room
        head, rows = _without(head, rows, 2)
    _output.print_table(head, rows, right=("bytes", *_STATISTICS))


_STATISTICS = ("min", "max", "mean", "std", "norm", "nan", "inf", "zeros")


def _selected(ckpt: Checkpoint, globs: Sequence[str]) -> dict[str, LeafInfo]:
    from jaxckpt._core.select import check_globs, selector
    from jaxckpt.format.tree import parse_path

    only = list(globs) or None
    paths = {text: parse_path(text) for text in ckpt.leaves}
    check_globs(only, None, list(paths.values()), place=ckpt.path)
    selected = selector(only, None)
    return {text: ckpt.leaves[text] for text, parts in paths.items() if selected(parts)}


def _headline(ckpt: Checkpoint, leaves: Mapping[str, LeafInfo]) -> str:
    size = size_text(sum(leaf.size_bytes for leaf in leaves.values()))
    of = f" of {len(ckpt.leaves):,}" if len(leaves) < len(ckpt.leaves) else ""
    item = f" item {ckpt.item!r}" if ckpt.item else ""
    what = f"{counted(len(leaves), 'leaf')}{of}, {size}" if ckpt.leaves else "no tree"
    return f"{ckpt.path}{item}: {what}, written by {_writer(ckpt) or 'another program'}"


def _writer(ckpt: Checkpoint) -> str | None:
    record = ckpt._found.record  # of this package; the class tells it in its text only
    return None if record is None else record.writer


def _json_value(ckpt: Checkpoint) -> Any:  # JSON, or None if the item is none
    return getattr(ckpt._opened, "value", None)  # a JsonItem's


def _checkpoint_facts(
    ckpt: Checkpoint, leaves: Mapping[str, LeafInfo], statistics: Mapping[str, Any]
) -> dict[str, Any]:
    names = ("path", "kind", "dtype", "shape", "sharding", "size_bytes")
    facts = {
        "path": ckpt.path,
        "item": ckpt.item,
        "items": ckpt.items,
        "writer": _writer(ckpt),
        "size_bytes": sum(leaf.size_bytes for leaf in leaves.values()),
        "custom_metadata": ckpt.custom_metadata,
        "lineage": ckpt.lineage,
        "leaves": [
            {name: getattr(leaf, name) for name in names}
            | ({"statistics": statistics[text]} if text in statistics else {})
            for text, leaf in leaves.items()
        ],
    }
    return facts if ckpt.leaves else facts | {"value": _json_value(ckpt)}


def _nested(leaves: Mapping[str, LeafInfo]) -> dict[str, Any]:
    """The leaves in dicts of dicts, by their keys."""
    from jaxckpt.format.tree import parse_path

    top: dict[str, Any] = {}
    for text, leaf in leaves.items():
        *parents, last = parse_path(text) or ("(the tree itself)",)
        node = top
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = leaf
    return top


def _tree_rows(
    node: Mapping[str, Any], depth: int, indent: str, statistics: Mapping[str, Any]
) -> Iterator[Row]:
    blank: Row = [""] * len(_STATISTICS) if statistics else []
    for i, (name, child) in enumerate(node.items()):
        last = i == len(node) - 1
        label = f"{indent}{'└─ ' if last else '├─ '}{name}"
        below = indent + ("   " if last else "│  ")
        if not isinstance(child, dict):
            size = size_text(child.size_bytes) if child.size_bytes else ""
            numbers = _numbers(statistics[child.path]) if child.path in statistics else blank
            yield [label, _type_text(child), child.sharding or "", size, *numbers]
        elif depth > 1:
            yield [label, "", "", "", *blank]
            yield from _tree_rows(child, depth - 1, below, statistics)
        else:
            inside = list(_leaves_of(child))
            size = size_text(sum(leaf.size_bytes for leaf in inside))
            yield [label, f"({counted(len(inside), 'leaf')})", "", size, *blank]


def _leaves_of(node: Mapping[str, Any]) -> Iterator[LeafInfo]:
    for child in node.values():
        if isinstance(child, dict):
            yield from _leaves_of(child)
        else:
            yield child


def _type_text(leaf: LeafInfo) -> str:
    if leaf.kind == "empty":
        return {"Dict": "{}", "List": "[]", "Tuple": "()"}.get(leaf.dtype, leaf.dtype)
    return str(dataclasses.replace(leaf, sharding=None))


def _numbers(statistics: Any) -> Row:  # LeafStatistics
    found = [getattr(statistics, name) for name in _STATISTICS]
    cells: Row = []
    for name, value in zip(_STATISTICS, found, strict=True):
        text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
        bad = name in ("nan", "inf") and value
        cells.append(Styled(text, "bold red") if bad else text)
    return cells


def _without(head: list[str], rows: list[Row], column: int) -> tuple[list[str], list[Row]]:
    cut = [[*row[:column], *row[column + 1 :]] for row in rows]
    return [*head[:column], *head[column + 1 :]], cut


# --- du -------------------------------------------------------------------------------------


@click.command()
@click.argument("path", type=_options.PATH)
@_options.as_json
def du(path: str, as_json: bool) -> None:
    """Say what takes the space: by step, item, branch of the tree.

    Bytes of steps and items are those of their files, a file that several steps share (after
    `fork`) counted once; bytes of branches are those of the values, before compression.
    """
    from jaxckpt.cli._space import space

    found = space(path)
    if as_json:
        _output.print_json(found)
        return
    rows = [row for part in found.steps for row in _part_rows(part.name, part)]
    if len(found.steps) > 1:
        rows += _part_rows("all", found)
    if rows:
        _output.print_table(
            ["step", "part", "on disk", "values"], rows, right=("on disk", "values")
        )
    shared = f", {size_text(found.shared_bytes)} of them shared" if found.shared_bytes else ""
    other = f"; beside the steps {size_text(found.other_bytes)}" if found.other_bytes else ""
    _output.echo(f"{found.path}: {size_text(found.size_bytes)} on disk{shared}{other}")


def _part_rows(name: str, part: Part | Space) -> list[Row]:
    rows: list[Row] = [[Styled(name, "bold"), "", size_text(part.size_bytes), ""]]
    for item, n in part.items.items():
        rows.append(["", item or "(the only item)", size_text(n), ""])
    largest = sorted(part.branches.items(), key=lambda branch: -branch[1])
    for branch, n in largest[:_MAX_BRANCHES]:
        rows.append(["", branch, "", size_text(n)])
    if more := largest[_MAX_BRANCHES:]:
        rows.append(["", f"... and {len(more)} more", "", size_text(sum(n for _, n in more))])
    return rows


# --- report ---------------------------------------------------------------------------------


@click.command()
@click.argument("root", type=_options.PATH)
@click.option(
    "-o",
    "--output",
    type=_options.PATH,
    default="report.html",
    show_default=True,
    help="The page to write.",
)
@_options.as_json
def report(root: str, output: str, as_json: bool) -> None:
    """Write one HTML page about a run: its steps, metrics, times, and newest tree."""
    from jaxckpt.integrations.report import report as write_report

    write_report(root, output)
    path = os.path.abspath(output)
    if as_json:
        _output.print_json({"path": path, "size_bytes": os.path.getsize(path)})
    else:
        _output.echo(f"wrote {path}, {size_text(os.path.getsize(path))}")
