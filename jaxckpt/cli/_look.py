"""`ls`, `show`, `du` and `report`: inspect runs. They change nothing and import no jax."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from jaxckpt._core.text import counted, size_text
from jaxckpt.cli import _options, _output
from jaxckpt.cli._output import Cell, Parts, Styled
from jaxckpt.errors import CheckpointNotFound, CorruptCheckpoint

if TYPE_CHECKING:
    from jaxckpt._inspect.open import Checkpoint
    from jaxckpt.cli._space import Space, Usage
    from jaxckpt.pages.overview import RunOverview, StepOverview
    from jaxckpt.types import LeafInfo, LeafStatistics

Row = list[Cell]
_MAX_BRANCHES: Final = 12
_MAX_STRAYS: Final = 20


@click.command(cls=_options.OnSteps)
@click.argument("path", type=_options.PATH)
@_options.local
@_options.as_json
def ls(path: str, local: str | None, as_json: bool) -> None:
    """List the steps of a run: state, age, size, metrics.

    PATH is the run's root, or one step, whose items are listed too. A step is complete if it is
    committed and every file has its size. Below, how much of its time the run has trained, and what
    would raise that.
    """
    from jaxckpt.cli._owned import existing_run
    from jaxckpt.pages.goodput import account, described
    from jaxckpt.pages.overview import RunOverview, overview, step_overview, with_local

    step = step_overview(path)
    if step is None:
        found = overview(path)
    else:
        found = RunOverview(path=os.path.dirname(step.path), steps=(step,), strays=())
    found, tiers = with_local(found, local)
    if not found.steps:
        existing_run(path)  # else an error describes the path
    if as_json:
        facts = run_facts(found)
        for fact in facts["steps"] if tiers else ():
            fact["places"] = tiers[fact["step"]]
        _output.print_json(facts)
        return
    print_steps(found.steps, tiers)
    if step is not None:
        if step.items:  # unknown if it is torn
            items = ", ".join(name or "the only item" for name in step.items)
            _output.echo(f"{step.path}: {items}; written by {step.writer}")
        return
    whole = [step.step for step in found.steps if step.problem is None]
    _output.echo(
        f"{found.path}: {counted(len(found.steps), 'step')}"
        + (f", {len(found.steps) - len(whole)} incomplete" * (len(whole) < len(found.steps)))
        + f", {size_text(sum(step.size_bytes for step in found.steps))}"
        + (f"; newest complete step: {whole[-1]}" if whole else "")
    )
    for text in described(account(found.starts)):
        _output.echo(text)
    for stray in found.strays[:_MAX_STRAYS]:
        _output.echo(f"also there: {stray}")
    if len(found.strays) > _MAX_STRAYS:
        _output.echo(f"also there: {len(found.strays) - _MAX_STRAYS} more")


def print_steps(
    steps: Sequence[StepOverview], tiers: Mapping[int, Sequence[str]] | None = None
) -> None:
    """Prints a row for each step, and below why steps are incomplete or unreadable."""
    rows = [
        step_row(step, _state(step), step.metrics, *(tiers[step.step] if tiers else ()))
        for step in steps
    ]
    if rows:
        _output.print_table(STEP_HEAD, rows, right=STEP_RIGHT)
    for step in steps:
        if step.problem is not None:
            what = "cannot be read" if step.unreadable else "is incomplete"
            problem = step.problem.replace(f"{step.path}/", "")
            _output.echo(f"step {step.step} {what}: {problem}")
        if step.missing:
            _output.echo(f"step {step.step} lacks items that it had: {', '.join(step.missing)}")
        if step.differences:
            _output.echo(f"step {step.step} is marked: {'; '.join(step.differences)}")


STEP_HEAD = ("step", "state", "age", "size", "metrics")
STEP_RIGHT = ("step", "age", "size")


def step_row(step: StepOverview, state: Styled, metrics: Mapping[str, Any], *why: str) -> Row:
    """Returns the cells of a step; reasons go before its metrics."""
    age_s = None if step.saved_s is None else max(0.0, time.time() - step.saved_s)
    return [
        str(step.step),
        state,
        _output.age_text(age_s),
        size_text(step.size_bytes),
        Parts((*why, *_output.metric_texts(metrics))),
    ]


def _state(step: StepOverview) -> Styled:
    pinned = ", pinned" if step.pinned else ""
    if step.problem is None and step.differences:
        return Styled(f"marked{pinned}", "bold yellow")
    if step.problem is None:
        return Styled(f"complete{pinned}", "green")
    state = "UNREADABLE" if step.unreadable else "INCOMPLETE"
    return Styled(f"{state}{pinned}", "bold red")


def run_facts(found: RunOverview) -> dict[str, Any]:
    """Returns a run as JSON."""
    from jaxckpt.pages.goodput import account

    steps = [
        {f.name: getattr(step, f.name) for f in dataclasses.fields(step)}
        | {"whole": step.problem is None}
        for step in found.steps
    ]
    facts = {"path": found.path, "steps": steps, "strays": found.strays}
    if found.starts:
        kept = dataclasses.asdict(account(found.starts)).items()
        facts["goodput"] = {name: value for name, value in kept if name not in ("ends", "costs")}
    return facts


# --- show -----------------------------------------------------------------------------------


@click.command(cls=_options.OnSteps, globs=True)
@click.argument("path", type=_options.PATH)
@click.argument("globs", nargs=-1, metavar="[GLOB]...", shell_complete=_options.complete_steps)
@_options.item
@click.option("--depth", type=click.IntRange(min=1), help="Collapse deeper levels of the tree.")
@click.option("--stats", is_flag=True, help="Read the data: min, max, mean, std, norm, NaNs.")
@_options.as_json
def show(
    path: str,
    globs: tuple[str, ...],
    item: str | None,
    depth: int | None,
    stats: bool,
    as_json: bool,
) -> int:
    """Show the tree of a checkpoint: shapes, dtypes, shardings, bytes.

    PATH is a checkpoint, an item of a checkpoint, or a run's root, which means its newest complete
    step. GLOB matches leaf paths; a container's name matches everything in it.
    """
    from jaxckpt._inspect import open as inspection

    reopen = partial(inspection.open, path, item=item)
    try:
        ckpt = reopen()
    except CorruptCheckpoint as error:
        return _show_items(path, str(error), as_json=as_json)
    ckpt, leaves, statistics = _found(ckpt, reopen, globs, stats=stats)
    if as_json:
        _output.print_json(_checkpoint_facts(ckpt, leaves, statistics))
        return 0
    _output.echo(_headline(ckpt, leaves))
    others = [name for name in ckpt.items if name != ckpt.item]
    if others:
        _output.echo(f"other items: {', '.join(others)}")
    if mesh := _common_mesh(leaves):
        _output.echo(f"mesh: {mesh}")
    for name, value in (("custom metadata", ckpt.custom_metadata), ("lineage", ckpt.lineage)):
        if value:
            _output.print_entries({name: value})
    if not ckpt.leaves and (value := _json_value(ckpt)) is not None:
        _output.print_json(value)
        return 0
    head = ["leaf", "type", "sharding", "bytes", *(_STATISTICS if statistics else ())]
    rows = list(_tree_rows(leaves, depth, statistics, f" on ({mesh})"))
    if statistics or not any(row[2] for row in rows):  # the statistics leave no room
        head, rows = _output.without(head, rows, "sharding")
    _output.print_table(head, rows, right=("bytes", *_STATISTICS), spare=_SPARE)
    return 0


def _found(
    ckpt: Checkpoint,
    reopen: Callable[[], Checkpoint],
    globs: Sequence[str],
    *,
    stats: bool,
    again: int = 19,
) -> tuple[Checkpoint, dict[str, LeafInfo], Mapping[str, LeafStatistics]]:
    """Reads what is shown; begins anew if the step goes meanwhile, as by the job of a run."""
    if not ckpt.leaves and globs:
        raise ValueError(f"item {ckpt.item!r} of {ckpt.path} is not a tree: it has no leaves")
    try:
        leaves = _selected(ckpt, globs)
        return ckpt, leaves, ckpt.statistics(only=[*globs] or None) if stats and leaves else {}
    except CheckpointNotFound:
        if not again:
            raise
    return _found(reopen(), reopen, globs, stats=stats, again=again - 1)


def _common_mesh(leaves: Mapping[str, LeafInfo]) -> str:
    """Returns the mesh of all leaves, as its axes in words; "" if there is none, or several."""
    shardings = [leaf.sharding or "" for leaf in leaves.values()]
    meshes = {text.rpartition(" on (")[2][:-1] for text in shardings if " on (" in text}
    return meshes.pop() if len(meshes) == 1 else ""


def _show_items(path: str, problem: str, *, as_json: bool) -> int:
    """Lists the items of a checkpoint that has a damaged item; returns the exit code."""
    from jaxckpt._disk.find import find
    from jaxckpt._disk.item import open_item
    from jaxckpt._inspect.open import Checkpoint
    from jaxckpt.storage import locate

    found = find(*locate(path))
    shown, problems = dict[str, str](), dict[str, str]()
    for name in found.items:
        try:
            ckpt = Checkpoint(found, open_item(found, name))
            shown[name] = _headline(ckpt, ckpt.leaves)
        except CorruptCheckpoint as error:
            problems[name] = str(error)
    if as_json:
        facts = {"path": found.path, "problem": problem, "items": list(found.items)}
        _output.print_json(facts | {"problems": problems})
    for line in () if as_json else shown.values():
        _output.echo(line)
    for name, text in () if as_json else problems.items():
        where = f"{found.path} item {name!r}" if name else found.path
        _output.echo(f"{where}: ", Styled("BAD", "red"), f". {text}")
    return 1


_STATISTICS = ("min", "max", "mean", "std", "norm", "nan", "inf", "zeros")
_SPARE: Final = ("std", "norm", "zeros", "sharding", "bytes", "type")


def _selected(ckpt: Checkpoint, globs: Sequence[str]) -> dict[str, LeafInfo]:
    from jaxckpt._core.select import check_globs, selector
    from jaxckpt.format.tree import parse_path

    only = list(globs) or None
    paths = {text: parse_path(text) for text in ckpt.leaves}
    try:
        check_globs(only, None, list(paths.values()), where=ckpt.path)
    except ValueError as error:
        what = str(error).removeprefix("only ")
        is_step = globs[0].isdecimal() and what.startswith(repr(globs[0]))
        hint = f"\nThe run has no step {globs[0]} either." if is_step else ""
        raise ValueError(what + hint) from None
    selected = selector(only, None)
    return {text: ckpt.leaves[text] for text, parts in paths.items() if selected(parts)}


def _headline(ckpt: Checkpoint, leaves: Mapping[str, LeafInfo]) -> str:
    from jaxckpt._inspect.open import stored_bytes

    size = size_text(sum(leaf.size_bytes for leaf in leaves.values()))
    of = f" of {len(ckpt.leaves):,}" if len(leaves) < len(ckpt.leaves) else ""
    item = f" item {ckpt.item!r}" if ckpt.item else ""
    if not of and (stored := stored_bytes(ckpt)) is not None:
        size += f", {size_text(stored)} on disk"
    what = f"{counted(len(leaves), 'leaf')}{of}, {size}" if ckpt.leaves else "not a tree"
    return f"{ckpt.path}{item}: {what}, written by {_writer(ckpt) or 'another program'}"


def _writer(ckpt: Checkpoint) -> str | None:
    record = ckpt._found.record  # private, but of this package
    return None if record is None else record.writer


def _json_value(ckpt: Checkpoint) -> Any:  # JSON, or None if the item is none
    return getattr(ckpt._opened, "value", None)  # a JsonItem's


def _checkpoint_facts(
    ckpt: Checkpoint, leaves: Mapping[str, LeafInfo], statistics: Mapping[str, Any]
) -> dict[str, Any]:
    names = ("path", "kind", "dtype", "shape", "sharding", "size_bytes", "compression")
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


def _tree_rows(
    leaves: Mapping[str, LeafInfo], depth: int | None, statistics: Mapping[str, Any], mesh: str
) -> Iterator[Row]:
    from jaxckpt._inspect.tree_text import Branch, lines, nested

    blank: Row = [""] * len(_STATISTICS) if statistics else []
    for label, node, is_folded in lines(nested(leaves.values()), depth=depth):
        size = size_text(node.size_bytes) if node.size_bytes or is_folded else ""
        if not isinstance(node, Branch):
            numbers = _numbers(statistics[node.path]) if node.path in statistics else blank
            kind = f"{node.type_text} {node.compression or ''}".rstrip()
            yield [label, kind, (node.sharding or "").removesuffix(mesh), size, *numbers]
        elif is_folded:
            yield [label, f"({counted(node.leaf_count, 'leaf')})", "", size, *blank]
        else:
            yield [label, "", "", "", *blank]


def _numbers(statistics: Any) -> Row:  # LeafStatistics
    found = [getattr(statistics, name) for name in _STATISTICS]
    cells: Row = []
    for name, value in zip(_STATISTICS, found, strict=True):
        text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
        bad = name in ("nan", "inf") and value
        cells.append(Styled(text, "bold red") if bad else text)
    return cells


# --- du -------------------------------------------------------------------------------------


@click.command(cls=_options.OnSteps)
@click.argument("path", type=_options.PATH)
@_options.local
@_options.as_json
def du(path: str, local: str | None, as_json: bool) -> None:
    """Show disk usage by step, item and branch of the tree.

    PATH is a run's root, a step or another checkpoint. Sizes of steps and items are file sizes; a
    file shared by several steps (after `fork`) counts once. Sizes of branches are those of the
    values, before compression.
    """
    from jaxckpt.cli._space import space
    from jaxckpt.pages.overview import local_roots

    found, *others = [space(root) for root in (path, *local_roots(local, path))]
    if as_json:
        facts = dataclasses.asdict(found)
        _output.print_json(facts if local is None else {**facts, "local": others})
        return
    for one in (found, *others):
        _print_space(one)


def _print_space(found: Space) -> None:
    if len(found.steps) > 1:
        rows: list[Row] = [
            [part.name, size_text(part.size_bytes), _items(part)] for part in found.steps
        ]
        _output.print_table(["step", "on disk", "items"], rows, right=("on disk",))
        _output.echo("")
    whole = found if len(found.steps) > 1 else next(iter(found.steps), None)
    if whole is not None:
        _output.print_table(
            ["part", "on disk", "values"], _part_rows(whole), right=("on disk", "values")
        )
    shared = f", {size_text(found.shared_bytes)} of it shared" if found.shared_bytes else ""
    other = f"; {size_text(found.other_bytes)} outside the steps" if found.other_bytes else ""
    _output.echo(f"{found.path}: {size_text(found.size_bytes)} on disk{shared}{other}")


def _items(part: Usage) -> Parts:
    largest = sorted(part.items.items(), key=lambda item: -item[1])
    return Parts(tuple(f"{name or 'the only item'} {size_text(n)}" for name, n in largest))


def _part_rows(part: Usage | Space) -> list[Row]:
    rows: list[Row] = [
        [item or "(the only item)", size_text(n), ""] for item, n in part.items.items()
    ]
    largest = sorted(part.branches.items(), key=lambda branch: -branch[1])
    for branch, n in largest[:_MAX_BRANCHES]:
        rows.append([branch, "", size_text(n)])
    if more := largest[_MAX_BRANCHES:]:
        rows.append([f"... and {len(more)} more", "", size_text(sum(n for _, n in more))])
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
@_options.local
@click.option("--plan", type=_options.PATH, help="Draw this plan, of `jaxckpt plan --json`.")
@_options.as_json
def report(root: str, output: str, local: str | None, plan: str | None, as_json: bool) -> None:
    """Write an HTML page about a run: steps, metrics, goodput, newest tree."""
    from jaxckpt.cli._owned import existing_run
    from jaxckpt.pages.report import report as write_report

    existing_run(root)
    write_report(root, output, local=local, plan=plan)
    path = os.path.abspath(output)
    if as_json:
        _output.print_json({"path": path, "size_bytes": os.path.getsize(path)})
    else:
        _output.echo(f"wrote {path}, {size_text(os.path.getsize(path))}")
