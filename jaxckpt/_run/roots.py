"""Opens the roots of a run together, and finds the newest step of them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from jaxckpt._run.copies import Told, are_all, over_disks, saves_in
from jaxckpt._run.coverage import is_whole
from jaxckpt._run.listing import check_root
from jaxckpt._run.local import Local
from jaxckpt._run.root import Root, judge_steps, reachable
from jaxckpt._save.worker import Worker
from jaxckpt.multihost import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Describes what all processes know of a run that they have opened; by default, for reading."""

    run: str = ""  # its id
    session: str = ""  # begins the names of attempts; see `Opening.open`
    newest: int | None = None  # step
    # Ends with the newest step of which any disk has a part, and begins after the last step there
    # that may be whole.
    parts: range = range(0)
    local_only: int | None = None  # the newest step, if the directory does not have it
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
    """Opens the roots of a run for writing.

    If only the directory cannot be used, the run goes on with the local steps, if there are any:
    later saves are uploaded when it answers again.
    """
    last, newest, parts, owned, run = roots[-1], None, range(0), True, ""
    for root in roots[:-1]:
        here = root.opening.open(metadata, saves=saves[0])
        newest, owned = here["newest"], here["owned"]
        if root.group.part is not None:  # each is taken over
            (newest, parts), owned = newest_whole(roots), True
    if settled is not None:  # its id is known, unless it is away
        run = settled.run if settled.away is not None else None
    begin = partial(last.opening.open, metadata, saves=saves[-1])
    try:
        opened = begin(run=run, spared=newest, reach=None if newest is None else last.reach)
    except BaseException:
        for root in roots[:-1]:
            root.opening.fail()
        raise
    if settled is not None and settled.away is not None:
        last.owner.doubt()  # newer steps may be there, even if it answers by now
    if away := opened.get("away"):
        if opened["silent"]:  # to process 0; let no other wait for it
            last.reach.away = away
        last.index.report(
            f"{last.index.root} cannot be reached; the run continues with its local step {newest}. "
            f"If newer ones are there, stop this job: {away}"
        )
    there = opened["newest"]
    is_behind = newest is not None and (there is None or there < newest)
    if newest is there is None and not parts.start:
        there = max(parts, default=None)  # the run is not new; the next job may have all disks
    return Opened(
        run=opened["run"] if settled is None else settled.run,
        session=opened["session"],
        owned=owned and opened.get("owned", True),
        newest=newest if is_behind else there,
        parts=parts,
        local_only=newest if is_behind else None,
    )


def newest_whole(roots: Sequence[Root], *, most: int | None = None) -> tuple[int | None, range]:
    """Returns the newest step that all have on their disks, with every chunk; see `Opened.parts`.

    Args:
        most: The newest step that counts as whole.
    """
    steps, lone, shown = judge_steps(roots, partial(_on_disks, most))

    def may_be_whole(step: int) -> bool:  # a read may fail once
        return all(is_whole(roots, step, roots[0].group.job) is not False for _ in range(2))

    whole = next((step for step, has_all in steps if has_all or may_be_whole(step)), None)
    return whole, range(1 + max(lone, -1 if whole is None else whole), 1 + shown)


def _on_disks(most: int | None, disks: Told, *_: Any) -> Json:
    """Returns the steps that all have, each with whether these are the parts of all that saved it.

    Then the newest step that some lack, and the newest of any.
    """
    copies, parts = over_disks(saves_in(disks), {}), dict[int, list[Sequence[int]]]()
    for one in chain(*disks):
        parts.setdefault(one.step, []).append(one.part)
    steps = [copy.step for copy in copies if not copy.is_united]
    whole = [[n, are_all(parts[n])] for n in steps if most is None or n <= most]
    return [whole, max(parts.keys() - steps, default=-1), max(parts, default=-1)]
