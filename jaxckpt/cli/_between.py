"""What `upload` and `heal` ask about two roots: whether they are of one run, and what one lacks."""

from __future__ import annotations

import contextlib

from jaxckpt._disk.find import LISTINGS, find
from jaxckpt._run.identity import earlier_lives, ensure_id, is_new, newest_saved, read_identity
from jaxckpt._run.index import StepIndex
from jaxckpt._run.local import share_a_save
from jaxckpt.errors import CheckpointError, SaveFailed
from jaxckpt.storage import Storage
from jaxckpt.types import Problem, VerifyReport


def check_same_run(source: StepIndex, target: StepIndex, *, asked_for: bool = False) -> None:
    """Checks that the steps of two roots are of the same run, or that `target` has none yet.

    Args:
        asked_for: Whether the user named the steps, which is enough if a root lacks an id.

    Raises:
        SaveFailed: they are of different runs, or nothing shows that they are of the same run.
    """
    ours, theirs = read_identity(source), read_identity(target)
    if theirs is None and is_new(target.entries()):
        return
    if ours is not None and theirs is not None and ours.id != theirs.id:
        raise SaveFailed(
            f"{source.root} has steps of another run than {target.root}. Nothing was changed."
        )
    if (ours is None or theirs is None) and not (asked_for or share_a_save(source, target)):
        raise SaveFailed(
            f"Nothing shows that {source.root} and {target.root} have steps of one run: no save is "
            "in both, and an older release wrote one of them. Nothing was changed. If they are of "
            "one run, name the steps with --step."
        )


def join(target: StepIndex, source: StepIndex) -> None:
    """Gives a root that has neither an id nor steps the id of the run that is copied there."""
    ours, entries = read_identity(source), target.entries()
    if ours is not None and is_new(entries):
        ensure_id(target, entries, ours.id)


def missing_steps(
    source: StepIndex, target: StepIndex, *, again: int = LISTINGS - 1
) -> tuple[list[int], list[int]]:
    """Returns the steps of a run that another root lacks, the newest first: complete, and others.

    Leaves out steps of an earlier life, since the run went on without them.
    """
    besides = {*target.steps(), *earlier_lives(source, newest_saved(target))}
    listing, there = source.listing(), {*source.present()}
    odd = {n for n, name in listing.steps.items() if listing.entries[name].kind != "dir"}
    steps = sorted((there | odd) - besides, reverse=True)
    whole = [step for step in steps if step not in odd and source.is_whole(step)]
    now_ = source.listing().steps
    if again and not now_.keys() >= {*steps}:  # a job has deleted some, and may have saved others
        return missing_steps(source, target, again=again - 1)
    return whole, [step for step in steps if step not in whole and step in now_]


def has_lost_item(bad: StepIndex, good: StepIndex, step: int) -> bool:
    """Returns whether a step lost the directory of an item that its copy in `good` has."""
    try:
        ours, theirs = (find(one.storage, one.path(step)) for one in (bad, good))
    except CheckpointError:
        return False
    return not theirs.items.keys().isdisjoint(ours.removed)


def unread(storage: Storage, report: VerifyReport) -> Problem | None:
    """Returns the first problem of a step that is not an item that was removed as a whole."""
    for problem in report.problems:
        with contextlib.suppress(OSError):
            if problem.file is not None and storage.kind(problem.file) is None:
                continue
        return problem
    return None
