"""Opens the roots of a run together, and finds the newest step of them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxckpt._run.copies import Told, over_disks, saves_in
from jaxckpt._run.listing import check_root
from jaxckpt._run.local import Local
from jaxckpt._run.root import Root, judge_steps, reachable
from jaxckpt._save.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Describes what all processes know of a run that they have opened; by default, for reading."""

    run: str = ""  # its id
    session: str = ""  # begins the names of attempts; see `Opening.open`
    newest: int | None = None  # step
    shown: int | None = None  # the newest step of which the disk of any host has a part
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
    last, newest, shown, owned, run = roots[-1], None, None, True, ""
    for root in roots[:-1]:
        here = root.opening.open(metadata, saves=saves[0])
        newest, owned = here["newest"], here["owned"]
        if root.group.part is not None:  # each is taken over
            (newest, shown), owned = judge_steps(roots, newest_whole), True
    if settled is not None:  # its id is known, unless it is away
        run = settled.run if settled.away is not None else None
    reach = None if newest is None else last.reach
    begin = partial(last.opening.open, metadata, saves=saves[-1])
    try:
        opened = begin(run=run, spared=newest, reach=reach)
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
    return Opened(
        run=opened["run"] if settled is None else settled.run,
        session=opened["session"],
        owned=owned and opened.get("owned", True),
        newest=newest if is_behind else there,
        shown=shown,
        local_only=newest if is_behind else None,
    )


def newest_whole(disks: Told, *_: Any, most: int | None = None) -> list[int | None]:
    """Returns the newest step that all have on their disks, and the newest of which any has a part.

    Args:
        most: The newest step that counts as whole.
    """
    copies = over_disks(saves_in(disks), {})
    whole = (copy.step for copy in copies if not copy.is_united)
    counted = next((n for n in whole if most is None or n <= most), None)
    return [counted, max((copy.step for copy in copies), default=None)]
