"""`pin`, `unpin`, `rm` and `gc`: keep and delete steps of a run.

A pin is a file in its step, so it may be made while a job writes the run. Deletion uses the same
code as a manager (`_run.deletion`), and only while no job is running: steps that are pinned or
being read stay, and a crash leaves complete steps or none. If the policy of the last job moves
steps instead of deleting them, so do the commands.
"""

from __future__ import annotations

import contextlib
import posixpath
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from jaxckpt._core.text import command, counted, size_text
from jaxckpt.cli import _options, _output
from jaxckpt.cli._look import STEP_HEAD, STEP_RIGHT, print_steps, step_row
from jaxckpt.cli._output import Styled
from jaxckpt.errors import CheckpointNotFound, SaveFailed
from jaxckpt.format import names

if TYPE_CHECKING:
    from jaxckpt._run.deletion import Deletion
    from jaxckpt._run.retention import KeepPolicy
    from jaxckpt.pages.overview import RunOverview, StepOverview


_steps = click.argument(
    "steps",
    nargs=-1,
    type=_options.STEP,
    metavar="[STEP]...",
    shell_complete=_options.complete_steps,
)


@click.command()
@click.argument("path", type=_options.PATH)
@_steps
@_options.as_json
def pin(path: str, steps: tuple[int, ...], as_json: bool) -> None:
    """Keep steps regardless of the keep policy.

    PATH is a run's root, followed by steps, or the directory of one step. A job that writes the run
    respects the pin from then on.
    """
    _mark(path, steps, "pin", "pinned", as_json=as_json)


@click.command()
@click.argument("path", type=_options.PATH)
@_steps
@_options.as_json
def unpin(path: str, steps: tuple[int, ...], as_json: bool) -> None:
    """Apply the keep policy to steps again."""
    _mark(path, steps, "unpin", "unpinned", as_json=as_json)


@click.command()
@click.argument("path", type=_options.PATH)
@_steps
@_options.dry_run
@_options.yes
@click.option("--no-job", is_flag=True, help="Assume no running job (file system without locks).")
@click.option("--item", metavar="NAME", help="Delete only this item of each step.")
@_options.as_json
def rm(
    path: str,
    steps: tuple[int, ...],
    dry_run: bool,
    yes: bool,
    no_job: bool,
    item: str | None,
    as_json: bool,
) -> int:
    """Delete steps of a run. Refuses pinned steps and steps that are being read.

    PATH is a run's root, followed by steps, or the directory of one step. Moves the steps instead
    if the run was opened with KeepPolicy(move_to=...). With --item, deletes one item of each step,
    but never the main one, and moves nothing. Refused while a running job writes the run.
    """
    from jaxckpt._run.one_step import is_pinned
    from jaxckpt.cli._owned import owned, run_at
    from jaxckpt.pages.overview import look, policy_of
    from jaxckpt.storage import now

    run, numbers = _target(path, steps, looks=True)
    root, storage = run.index.root, now(run.index.storage)
    listing = run.index.listing()
    for number in numbers:
        if run.index.state(listing, number) != "committed":
            run.index.check_step(number)  # raises
    pinned = [number for number in numbers if is_pinned(run.index, number)]
    if pinned:
        raise ValueError(
            f"{root}: cannot delete pinned steps: {_list(pinned)}. To unpin them, run: "
            + command("unpin", root, *pinned)
        )
    if item is not None:
        _rm_item(run, numbers, item, dry_run=dry_run, yes=yes, no_job=no_job, as_json=as_json)
        return 0
    keep = policy_of(run.index)
    folder = run_at(storage, root, keep=keep).folder
    if not as_json:
        looked = [look(run.index, listing, listing.steps[n], n) for n in numbers]
        _print_doomed(root, [step for step in looked if step], run.index.newest(listing))
    gone: list[int] = []
    if not dry_run:
        _output.confirm(_question(numbers, root, folder), yes=yes)
        with owned(storage, root, no_job=no_job, keep=keep, deletes=numbers) as owner:
            gone, run = owner.delete(numbers, asked_for=True), owner
            stay = {n: _why_not(owner, n) for n in numbers if n not in gone}
        if stay:
            why = "; ".join(f"step {number}: {reason}" for number, reason in stay.items())
            raise ValueError(f"{root}: deleted {_list(gone) or 'nothing'}. Not deleted: {why}")
    if as_json:
        facts = {"path": root, "dry_run": dry_run, "delete": numbers, "deleted": gone}
        _output.print_json(facts | {"moved_to": folder})
    elif gone:
        _output.echo(_answer(gone, root, folder))
    return _left(run)


def _left(run: Deletion) -> int:
    """Says what could not be done, such as what is left of deleted steps; returns the exit code."""
    for problem in run.index.problems:
        _output.note(problem)
    return 1 if run.index.problems else 0


def _rm_item(
    run: Deletion,
    numbers: Sequence[int],
    item: str,
    *,
    dry_run: bool,
    yes: bool,
    no_job: bool,
    as_json: bool,
) -> None:
    from jaxckpt._run.one_step import check_item, delete_item
    from jaxckpt.cli._owned import owned
    from jaxckpt.storage import now

    root, size = run.index.root, 0
    lacks: dict[int, CheckpointNotFound] = {}  # as steps of a command that was interrupted
    for number in numbers:  # check all before the first is changed
        try:
            found = check_item(run.leases, number, item)
        except CheckpointNotFound as error:
            lacks[number] = error
            continue
        size += sum(facts.size for facts in found.recorded(f"{found.path}/{item}").values())
    if not (numbers := [number for number in numbers if number not in lacks]):
        raise lacks[min(lacks)]
    for error in lacks.values():
        _output.note(str(error))
    what = f"item {item!r} of {counted(len(numbers), 'step')} of {root}"
    if not as_json:
        _output.echo(f"{what}: {size_text(size)} to delete")
    gone: list[int] = []
    if not dry_run:
        _output.confirm(f"Delete {what}?", yes=yes)
        with owned(now(run.index.storage), root, no_job=no_job) as owner:
            for number in numbers:
                delete_item(owner, number, item)
                gone.append(number)
    if as_json:
        facts = {"path": root, "dry_run": dry_run, "delete": numbers, "deleted": gone}
        _output.print_json(facts | {"item": item})
    elif gone:
        _output.echo(f"deleted {what}: {_list(gone)}")


def _print_doomed(root: str, doomed: Sequence[StepOverview], newest: int | None) -> None:
    print_steps(doomed)
    for step in doomed:
        if step.step == newest:
            _output.echo(Styled(f"step {step.step} is the newest step", "yellow"))
        if not _is_ours(step):
            remark = "was not written by jaxckpt: a job writing the run cannot be detected"
            _output.echo(Styled(f"step {step.step} {remark}", "yellow"))
    _output.echo(f"{root}: {size_text(sum(step.size_bytes for step in doomed))} to delete")


def _is_ours(step: StepOverview) -> bool:
    return step.writer.startswith("jaxckpt")


def _target(path: str, steps: Sequence[int], *, looks: bool = False) -> tuple[Deletion, list[int]]:
    """Returns the run and the steps of a command, given a root and numbers or a step's path.

    Args:
        looks: See `existing_root`.
    """
    from jaxckpt._run.listing import existing_root
    from jaxckpt.cli._owned import run_at
    from jaxckpt.storage import PathIn, locate

    if steps:
        return run_at(*existing_root(path, looks=looks)), sorted(set(steps))
    storage, where = locate(path)
    root, name = posixpath.split(where)
    run = run_at(*existing_root(PathIn(storage, root)))
    listing = run.index.listing()
    number = listing.naming.step(name) if listing.steps else None
    if number is not None:
        return run, [number]
    inside = run_at(storage, where).index.listing().steps
    has = f"has {_list(list(inside)[-8:])}" if inside else "is not a run, nor a step of one"
    raise click.UsageError(f"Name the steps, as in `{path} 1000`; {where} {has}.")


def _question(
    numbers: Sequence[int], root: str, folder: str | None, unfinished: Sequence[int] = ()
) -> str:
    if not numbers:
        return f"Remove {counted(len(unfinished), 'unfinished step')} of {root}?"
    what = f"{counted(len(numbers), 'step')} of {root}"
    also = f", and remove {counted(len(unfinished), 'unfinished step')}" if unfinished else ""
    return f"Delete {what}{also}?" if folder is None else f"Move {what} to {folder}?"


def _answer(gone: Sequence[int], root: str, folder: str | None) -> str:
    what = f"{counted(len(gone), 'step')} of {root}"
    done = f"deleted {what}" if folder is None else f"moved {what} to {folder}"
    return f"{done}: {_list(gone)}"


def _why_not(run: Deletion, number: int) -> str:
    from jaxckpt._run.one_step import is_pinned, why_not_deleted

    is_kept = is_pinned(run.index, number)
    return "pinned meanwhile" if is_kept else why_not_deleted(run.leases, number)


def _mark(path: str, steps: Sequence[int], verb: str, done: str, *, as_json: bool) -> None:
    from jaxckpt._run import one_step

    run, numbers = _target(path, steps)
    for number in numbers:
        run.index.check_step(number)  # check all steps before the first is changed
    for number in numbers:
        getattr(one_step, verb)(run.leases, number)
    if as_json:
        _output.print_json({"path": run.index.root, done: numbers})
    else:
        what = f"{done} {counted(len(numbers), 'step')} of {run.index.root}"
        _output.echo(f"{what}: {_list(numbers)}")


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


# --- gc -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The effect of a policy on a run."""

    delete: tuple[int, ...]  # the steps to delete
    remove: tuple[int, ...]  # remains of interrupted saves and deletions
    keep: dict[int, tuple[str, ...]]  # the reasons for each step that stays


def plan(
    found: RunOverview,
    policy: KeepPolicy,
    *,
    now_s: float,
    unfinished: Collection[int] = (),
    half_deleted: Collection[int] = (),
) -> Plan:
    """Plans which steps to delete: never incomplete steps or steps of other programs.

    Incomplete steps do not count as one of the last or the best either. Only incomplete steps that
    interrupted saves and deletions left are removed.

    Args:
        half_deleted: Steps that were being deleted when a job died, which go whatever is kept.
    """
    whole = [step for step in found.steps if step.problem is None]
    counted = [step for step in whole if step.step not in half_deleted]
    keep = dict(policy.why([step.info(now_s) for step in counted], now_s=now_s))
    for step in found.steps:
        if step.step in unfinished:
            continue
        if step.problem is not None:
            what = "unreadable" if step.unreadable else "incomplete"
            keep[step.step] = (f"{what}: see `jaxckpt scrub` and `heal`",)
        elif not _is_ours(step) and step in counted:
            keep[step.step] = (*keep.get(step.step, ()), "not written by jaxckpt")
    return Plan(
        delete=tuple(step.step for step in whole if step.step not in keep),
        remove=tuple(unfinished),
        keep=dict(sorted(keep.items())),
    )


@click.command()
@click.argument("root", type=_options.PATH)
@click.option("--last", type=click.IntRange(min=1), help="Keep the newest N steps.")
@click.option("--every-steps", type=click.IntRange(min=1), help="Keep steps divisible by N.")
@click.option("--best", type=click.IntRange(min=1), help="Keep the N steps with the best --metric.")
@click.option("--metric", metavar="NAME", help="The metric that --best ranks by.")
@click.option(
    "--mode",
    type=click.Choice(["min", "max"]),
    default="min",
    help="Whether the least or the greatest is best (default min).",
)
@click.option(
    "--newer-than",
    "newer_than_s",
    type=_options.AGE,
    help="Keep steps newer than AGE: 12h, 7d, 2w.",
)
@click.option("--no-verify", is_flag=True, help="Do not first read the steps that stay.")
@_options.dry_run
@_options.yes
@click.option("--no-job", is_flag=True, help="Assume no running job (file system without locks).")
@_options.as_json
def gc(
    root: str, no_verify: bool, dry_run: bool, yes: bool, no_job: bool, as_json: bool, **rules: Any
) -> int:
    """Delete the steps of a run that no rule keeps. A step stays if any rule keeps it.

    Shows the plan, with the reasons for each kept step, and asks. The newest step, pinned steps,
    steps being read, incomplete steps and steps of other programs always stay; but in a bucket,
    what interrupted saves and deletions left goes too. First reads the steps that stay while older
    steps go; if any is damaged, deletes nothing. Moves steps instead if the run was opened with
    KeepPolicy(move_to=...). Refused while a running job writes the run.
    """
    from jaxckpt._run import leftovers
    from jaxckpt._run.retention import KeepPolicy
    from jaxckpt.cli._owned import existing_run, half_deleted, owned, run_at
    from jaxckpt.pages.overview import overview, policy_of
    from jaxckpt.storage import locate

    best, metric = rules["best"], rules["metric"]
    if best is not None and metric is None:
        raise click.UsageError("--best needs --metric, the name of the metric to rank by.")
    if best is None and (metric, rules["mode"]) != (None, "min"):
        raise click.UsageError("--metric and --mode need --best, the number of steps to keep.")
    policy = KeepPolicy(**rules)
    if not policy.has_rules:
        raise click.UsageError("Pass at least one rule for the steps to keep, such as --last 3.")
    found = overview(root)
    storage, where = locate(root) if found.steps else existing_run(root)
    keep = found.keep or policy_of(run_at(storage, where).index)
    seen = run_at(storage, where, keep=keep)
    _check_metric(found, policy)
    torn = [step.step for step in found.steps if step.problem is not None]
    unfinished = leftovers.unfinished(seen.leases, torn) if torn else ()
    half = half_deleted(seen)
    planned = plan(found, policy, now_s=time.time(), unfinished=unfinished, half_deleted=half)
    if not as_json:
        _print_plan(found, planned)
        if dry_run and planned.delete and not no_verify:
            _output.echo("Without -n, gc reads the newer steps that stay; if one is bad, all stay.")
    gone: list[int] = []
    removed: list[int] = []
    stay: dict[int, str] = {}
    if (planned.delete or planned.remove) and not dry_run:
        _output.confirm(_question(planned.delete, where, seen.folder, planned.remove), yes=yes)
        if planned.delete and not no_verify:
            _verify_kept(found, planned)
        with owned(storage, where, no_job=no_job, keep=keep, deletes=planned.delete) as run:
            # Steps pinned or saved while the question was open stay too.
            again = plan(overview(where), policy, now_s=time.time()).delete
            wanted = [number for number in planned.delete if number in (*again, *half)]
            gone, seen = run.delete(wanted), run
            stay = {n: _why_not(run, n) for n in planned.delete if n not in gone}
            removed = leftovers.remove_unfinished(run.leases, planned.remove, run.owner.check)
            stay |= {n: "its writer may be alive" for n in planned.remove if n not in removed}
    elif not dry_run and names.DOOMED in seen.index.entries():  # of a deletion that was interrupted
        with contextlib.suppress(SaveFailed), owned(storage, where, no_job=no_job):
            pass  # it is finished now; or a job is running
    if as_json:
        facts = _plan_facts(where, planned, dry_run=dry_run, gone=gone, stay=stay)
        _output.print_json(facts | {"removed": removed, "moved_to": seen.folder})
        return _left(seen)
    if gone:
        _output.echo(_answer(gone, where, seen.folder))
    if removed:
        _output.echo(f"removed {counted(len(removed), 'unfinished step')}: {_list(removed)}")
    for number, why in stay.items():
        _output.echo(f"kept step {number}: {why}")
    return _left(seen)


def _check_metric(found: RunOverview, policy: KeepPolicy) -> None:
    infos = [step.info(0.0) for step in found.steps if step.problem is None]
    if policy.best is not None and infos and not policy.ranked(infos):
        raise click.BadParameter(f"{policy.unranked(infos)}.", param_hint="--metric")


def _verify_kept(found: RunOverview, planned: Plan) -> None:
    """Reads the steps that stay and are newer than one that goes.

    Raises:
        ValueError: one is damaged or cannot be read.
    """
    from jaxckpt._run.listing import existing_root
    from jaxckpt.cli._check import read_steps, summary
    from jaxckpt.cli._owned import run_at

    oldest = min(planned.delete)
    stay = [step.step for step in found.steps if step.problem is None and step.step > oldest]
    run = run_at(*existing_root(found.path))
    reports = read_steps(run, [number for number in stay if number in planned.keep])
    bad = [
        f"  step {number}: {_output.joined(summary(report))}"
        for number, report in reports.items()
        if not report.ok
    ]
    if bad:
        lines = "\n".join(bad)
        raise ValueError(
            f"{found.path}: nothing was deleted, because steps that would stay are not good:\n"
            f"{lines}\nSet damaged steps aside: {command('scrub', found.path)}\n"
            "Delete without this check: pass --no-verify"
        )


def _plan_facts(
    root: str, planned: Plan, *, dry_run: bool, gone: list[int], stay: dict[int, str]
) -> dict[str, Any]:
    return {
        "path": root,
        "dry_run": dry_run,
        "delete": planned.delete,
        "unfinished": planned.remove,
        "keep": [{"step": step, "why": why} for step, why in planned.keep.items()],
        "deleted": gone,
        "not_deleted": [{"step": step, "why": why} for step, why in stay.items()],
    }


def _print_plan(found: RunOverview, planned: Plan) -> None:
    rows = [
        step_row(step, _verdict(why), step.metrics, *(why or ()))
        for step in found.steps
        if step.step not in planned.remove
        for why in [planned.keep.get(step.step)]
    ]
    if rows:
        _output.print_table([*STEP_HEAD[:-1], "why, metrics"], rows, right=STEP_RIGHT)
    sizes = {step.step: step.size_bytes for step in found.steps}
    size = size_text(sum(sizes[number] for number in planned.delete))
    _output.echo(
        f"{found.path}: {len(planned.delete)} of {counted(len(found.steps), 'step')} to delete"
        + (f", {size}" if planned.delete else "")
    )
    if planned.remove:
        unfinished = counted(len(planned.remove), "unfinished step")
        _output.echo(
            f"{found.path}: {unfinished} to remove: {_list(planned.remove)}. Interrupted saves and "
            "deletions left them, and no reader takes them for steps."
        )


def _verdict(why: tuple[str, ...] | None) -> Styled:
    return Styled("delete", "bold red") if why is None else Styled("keep", "")
