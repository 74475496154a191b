"""Opens the roots of a run together, and learns which steps all disks together have."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

from jaxckpt._run.copies import (
    Saved,
    Told,
    are_all,
    are_first,
    latest,
    over_disks,
    saves_in,
    went_on,
)
from jaxckpt._run.coverage import is_whole
from jaxckpt._run.disks import lacking, whole_of
from jaxckpt._run.listing import check_root, shown
from jaxckpt._run.local import Local
from jaxckpt._run.root import Root, is_apart, judge_steps, newest_life, reachable
from jaxckpt._save.worker import Worker
from jaxckpt.multihost import lead, meeting


class Newest(NamedTuple):
    """The newest steps in all places, which are alike in all processes; -1 if there is none."""

    whole: int = -1  # that every process has on its disk, with every chunk
    restorable: Saved = Saved(-1)  # that all places together have, and how the run got there
    parts: Sequence[int] = ()  # the later steps that every process has, but with too few chunks
    shown: Sequence[int] = ()  # the steps that were looked at


NOTHING: Final = Newest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Describes what all processes know of a run that they have opened; by default, for reading."""

    run: str = ""  # its id
    session: str = ""  # begins the names of attempts; see `Opening.open`
    newest: int = -1  # step, -1 if there is none
    found: Newest = NOTHING  # in all places together
    local_only: int = -1  # the newest step, if the directory does not have it
    owned: bool = True  # False if another job is running, and keeps the run until the first save


def look_at(roots: Sequence[Root]) -> Opened:
    """Opens the roots of a run for reading."""
    there = reachable(roots, lambda one: check_root(one.index.storage, one.index.root))
    for index in [roots[i].index for i, found in there.items() if found is None]:
        index.warn(f"{index.root} does not exist yet; a job that saves there makes it")
    return Opened()


def open_roots(
    roots: Sequence[Root],
    saves: Sequence[Worker[Any]],  # what writes to each
    metadata: Mapping[str, Any] | None,
    settled: Local | None,
) -> Opened:
    """Opens the roots of a run for writing."""
    if settled is not None:
        return _open_both(roots, saves, metadata, settled)
    opened = roots[0].opening.open(metadata, saves=saves[0], run="")
    return Opened(**{name: opened[name] for name in ("run", "session", "newest", "owned")})


def _open_both(
    roots: Sequence[Root],
    saves: Sequence[Worker[Any]],
    metadata: Mapping[str, Any] | None,
    settled: Local,
) -> Opened:
    """Opens a local root, and the directory behind it.

    If only the directory cannot be used, the run goes on with the local steps, if there are any:
    later saves are uploaded when it answers again.
    """
    local, last = roots
    here = local.opening.open(metadata, saves=saves[0])
    found, newest, owned = newest_in(roots), here["newest"], here["owned"]
    if local.group.part is not None:  # each is taken over
        newest, owned = found.whole, True
    about: Any = {"spared": newest, "reach": None if newest < 0 else last.reach}
    if settled.away is not None:  # else its id is known
        about["run"] = settled.run
    try:
        opened = last.opening.open(metadata, saves=saves[1], **about)
    except BaseException:
        local.opening.fail()
        raise
    if settled.away is not None:
        last.owner.doubt()  # newer steps may be there, even if it answers by now
    if away := opened.get("away"):
        if opened["silent"]:  # to process 0; let no other wait for it
            last.reach.away = away
        last.index.report(
            f"{last.index.root} cannot be reached; the run continues with its local step {newest}. "
            f"If newer ones are there, stop this job: {away}"
        )
    there = opened["newest"]
    if found.parts:
        what = "lack chunks of these steps, which are left behind once the run goes on"
        text = f"the disks of this job {what}: {shown([*map(str, found.parts)])}"
        local.index.report(text, logs=last.group.leads)
    is_new = max(newest, there, found.restorable.step) < 0
    if is_new and found.shown and (found.parts or not _are_first(roots)):
        there = max(found.shown)  # no first save was interrupted: later, all disks may be here
    return Opened(
        run=settled.run,
        session=opened["session"],
        owned=owned and opened.get("owned", True),
        newest=max(newest, there),
        found=found,
        local_only=newest if newest > there else -1,
    )


def _are_first(roots: Sequence[Root]) -> bool:
    """Returns whether all steps can only be of first saves that were never committed."""
    job, name = roots[0].group.job, f"manager {roots[-1].index.root}/began"
    began = job.gather(name, roots[0].owner.first, list)

    def judge(disks: Told, others: Told) -> bool:
        return are_first((one.save for one in chain(*disks, *others)), began)

    return bool(judge_steps(roots, judge))


def newest_in(
    roots: Sequence[Root],
    floor: float = math.inf,
    most: float = math.inf,
    deleted: Collection[int] = (),
) -> Newest:
    """Returns the newest steps on all disks and in other places, of which it reads no chunk.

    Asks about the chunks only of those that are newer than the newest of the directory; and about
    nothing if each process sees all steps by itself.

    Args:
        floor: The newest step known to be committed; of later ones, no disk has all of a step.
        most: The newest step that counts.
        deleted: The steps deleted by hand, which places without a process may still have.
    """
    if not is_apart(roots[0]):
        return NOTHING
    durable, judged = judge_steps(roots, partial(_on_disks, roots))
    steps = list[tuple[int, bool, bool, Any]]()
    for step, on_all, has_parts, life in judged:
        if step <= most and step not in deleted:
            steps.append((step, on_all and step <= floor, has_parts, life))
    known = [counts and has_parts for _, counts, has_parts, _ in steps]
    before = known.index(True) if any(known) else len(known)
    asked = [step for step, *_ in steps[:before] if step > durable]
    name = f"manager {roots[-1].index.root}/may be whole"
    may_be = _may_be_whole(roots[0], name, asked, states=True)
    shown, restorable, parts = [step for step, *_ in steps], Saved(-1), list[int]()
    for step, counts, has_parts, life in steps:
        asks = step in may_be and (counts or restorable.step < 0)
        if has_parts or (asks and seems_whole(roots, step)):
            restorable = Saved.told(life) if restorable.step < 0 else restorable
            if counts:
                return Newest(step, restorable, parts, shown)
        elif counts and step > durable:
            parts.append(step)
    return Newest(-1, restorable, parts, shown)


def are_gone(roots: Sequence[Root], first: int, last: int) -> bool:
    """Returns whether `first` to `last` were there and are nowhere now; False if one is away."""
    where, ask = roots[-1].index.root, roots[-1].known_steps if first <= last else lambda: None
    durable = lead(roots[0].group.job, f"manager {where}/left", ask, where=where)
    all_answer = durable is not None and not roots[0].peers.urls
    return all_answer and max([-1, *(durable or ()), *newest_in(roots, last, last).shown]) < first


def learn_lone(root: Root, name: str) -> None:
    """Learns which steps process 0 lacks; parts that cannot become whole are to be deleted.

    Args:
        name: Of the save after which all processes call this, each with its own root.
    """
    job, index, here = root.group.job, root.index, list[int]()
    with (
        meeting(job, f"{name}/steps", _not_in_first, where=index.root) as met,
        contextlib.suppress(OSError),
    ):
        met.value = here = index.steps()
    known, root.lone = root.lone or set(), None
    if met.value is None:  # then after the next commit
        return
    new = {*met.value} - known
    whole = _may_be_whole(root, f"{name}/whole", new)
    root.lone = known.union(whole)
    index.astray.update(new.difference(whole).intersection(here))


def _not_in_first(given: list[Any]) -> list[int] | None:
    """Returns the steps that only others have; None if those of a process are unknown."""
    return None if None in given else sorted({*chain(*given)}.difference(given[0]))


def _may_be_whole(
    root: Root, name: str, steps: Collection[int], *, states: bool = False
) -> Collection[int]:
    """Returns the steps of which all disks together may have every chunk, see `is_whole`."""
    if not steps or root.peers.urls:  # peers may have the rest
        return steps
    with meeting(root.group.job, name, whole_of, where=root.index.root) as met:
        met.value = lacking([root.index, *root.peers.here], steps, states=states)
    return met.value


def seems_whole(roots: Sequence[Root], step: int) -> bool:
    """Returns whether all disks may have all of a step, with the states of its objects."""
    ask = partial(is_whole, roots, step, roots[0].group.job, states=True)
    found = ask()
    return found is True or (found is not False and ask() is not False)  # a read may fail once


def _on_disks(roots: Sequence[Root], disks: Told, others: Told) -> list[Any]:  # JSON
    """Returns the newest step in the directory, and those from which the run went on, newest first.

    Each with whether every process has it, whether these are the parts of all that saved it, and
    how the run got there.
    """
    here, there = went_on(disks, others, lives := newest_life(*roots))
    found: dict[int, list[Any]] = {}
    for copy in over_disks(saves_in(here), {}, saves_in(there)):
        held = [one for one in chain(*here, *there) if one.step == copy.step]
        life = latest(one.life for one in held if one.save) or Saved(copy.step)
        parts = [one.part for one in chain(*here) if one.step == copy.step]
        on_all = not copy.is_united
        found.setdefault(copy.step, [copy.step, on_all, on_all and are_all(parts), life])
    return [max((life.step for life in lives), default=-1), [*found.values()]]
