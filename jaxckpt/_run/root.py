"""The root of a run, opened by a manager: its steps, its owner, and deletions after a save."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import posixpath
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from jaxckpt._run.copies import Held, Saved, Told
from jaxckpt._run.deletion import Deletion
from jaxckpt._run.identity import earlier_lives, newest_saved
from jaxckpt._run.index import StepIndex
from jaxckpt._run.leases import Leases
from jaxckpt._run.ledger import Ledger
from jaxckpt._run.opening import Opening
from jaxckpt._run.owner import Ownership
from jaxckpt._run.peers import Peers
from jaxckpt._run.reach import AWAY_S, Reach, twice
from jaxckpt._run.retention import KeepPolicy
from jaxckpt._run.scrub import look
from jaxckpt._run.shares import steps_on_disk
from jaxckpt.errors import CheckpointError
from jaxckpt.format import jsontext, names
from jaxckpt.format.run import StepNames
from jaxckpt.format.step import Life
from jaxckpt.multihost import Group, Json, first_of, text_of
from jaxckpt.storage import heard_s, locate
from jaxckpt.types import StepInfo

T = TypeVar("T")
Stay = Callable[[], Collection[int]]

# The tiers of a run: its directory, and the root on the hosts where steps are saved first.
DURABLE: Final = "durable"
LOCAL: Final = "local"


@dataclass(slots=True, kw_only=True)
class Root:
    """A directory with steps of a run. Only the leader of its group changes it."""

    tier: str
    index: StepIndex
    leases: Leases
    deletion: Deletion
    owner: Ownership
    ledger: Ledger  # of the run; nothing is written for a local root
    opening: Opening
    reach: Reach
    keep: KeepPolicy
    group: Group  # of the processes that have it; each its own, on the disk of a host
    peers: Peers = field(default_factory=Peers)
    lives: dict[int, Saved] = field(default_factory=dict)  # of steps read here or elsewhere
    # The steps that process 0 lacks, though the other disks together may have them whole; None if
    # a disk could not be listed after the last commit.
    lone: set[int] | None = None
    shown: int | None = None  # in process 0, the newest step when all disks were listed last
    leaving: set[int] = field(default_factory=set)  # being deleted by hand: no policy counts them
    _verified: set[int] = field(default_factory=set)  # steps read back without damage
    life: Life | None = None  # of the newest step that this job saved, in a local root

    @classmethod
    def at(
        cls,
        directory: str | os.PathLike[str],
        *,
        tier: str,
        keep: KeepPolicy,
        naming: StepNames | None,
        group: Group,
    ) -> Root:
        """Returns the root at a path; reads nothing yet."""
        storage, root = locate(directory)
        index = StepIndex(storage, root, naming=naming)
        leases = Leases(index)
        ledger, keeps = Ledger(index), tier == DURABLE
        owner = Ownership(leases, keep=keep.fields(), ledger=ledger if keeps else None)
        deletion = Deletion(leases, owner, move_to=keep.move_to)
        return cls(
            tier=tier,
            index=index,
            leases=leases,
            deletion=deletion,
            owner=owner,
            ledger=ledger,
            opening=Opening(owner, deletion, group),
            reach=Reach(root, partial(heard_s, storage), away_s=AWAY_S),
            keep=keep,
            group=group,
        )

    def announce(self, step: int) -> None:
        """Names the steps that peers may find here, and one more that is to be committed."""
        if not (self.peers.urls and self.group.leads):
            return
        index = self.index
        try:
            listed = [*index.listing().steps.values(), posixpath.basename(index.path(step))]
            index.storage.write(f"{index.root}/{names.STEPS}", jsontext.dumps(listed))
        except OSError as error:
            index.report(f"peers do not find the newest steps in {index.root}: {error}")

    def committed(self, info: StepInfo, life: Life | None = None, stay: Stay = tuple) -> bool:
        """Records a step just committed, and deletes those that the policy does not keep.

        Args:
            life: How the run got to the step, if this is a local root.
            stay: Returns the steps that stay whatever the policy, such as those on their way to
                another root; called after the steps are listed, so that it knows all of them.

        Returns:
            False if the step was read back and is damaged.
        """
        self.index.remember(info)
        if life is not None and life != self.life:
            self._leave_behind(info.step, life)
        is_good = not self.keep.verified or self._read_back(info.step)
        self.tidy(stay, saved=info.step)
        return is_good

    def _leave_behind(self, step: int, life: Life) -> None:
        """Deletes the steps of earlier lives, which the run can no longer need."""
        index = self.index
        with contextlib.suppress(OSError):  # then after the next save
            index.astray.update(earlier_lives(index, Saved.of(step, life)))
            self.life = life
        index.astray.difference_update(self.deletion.delete(sorted(index.astray)))

    def tidy(self, stay: Stay = tuple, *, saved: int | None = None) -> None:
        """Deletes the steps that neither the policy nor `stay` keeps, but never `saved`."""
        if not self.owner.is_guest and (self.keep.has_rules or self.deletion.half):
            self.deletion.delete(n for n in self._what_goes(stay) if n != saved)
            self.deletion.sweep({*self.index.overtaken}.difference(stay()))

    def _read_back(self, step: int) -> bool:
        """Returns whether a step just committed has the values of its checksums."""
        self._verified.discard(step)
        report = look(self.leases, step)
        if report is not None and report.ok:
            self._verified.add(step)
        elif report is not None:
            problem = report.problems[0].message
            self.index.report(
                f"step {step} was saved but cannot be read back: {problem}. Older steps stay until "
                "a later one can be read."
            )
        return report is None or report.ok

    def _what_goes(self, stay: Stay) -> list[int]:
        steps = [n for n in self.index.own_steps() if n not in self.leaving]
        if (stays := {*stay()}).issuperset(steps):
            return []
        asks = self.keep.needs_facts or any(self.index.info(n).differences for n in steps[-1:])
        infos = self.index.infos(steps) if asks else [StepInfo(step=n, saved_s=0.0) for n in steps]
        kept = self.keep.kept(infos, now_s=time.time())
        # These may be the best, or decide on later steps.
        unknown = self.index.unknown.keys() & {*steps} if asks else set()
        until = min(unknown) if unknown and self.keep.every_seconds is not None else math.inf
        stays |= {*kept, *unknown}
        gone = [n for n in steps if n < until and n not in stays]
        if self.keep.verified:
            good = max(self._verified & kept.keys(), default=-1)
            gone = [n for n in gone if n < good]
        return gone

    def follow(self, info: StepInfo, life: Life, stay: Collection[int], *, is_good: bool) -> None:
        """Records a commit and deletes steps as process 0 did, if each process has its own root.

        Of the steps that process 0 lacks, those stay that the policy keeps.

        Args:
            stay: The steps that process 0 has.
            is_good: As `committed` returned there.
        """
        index = self.index
        index.remember(info)
        if life != self.life:
            self._leave_behind(info.step, life)
        gone = {*index.astray}
        if self.lone is not None:  # else process 0 may lack steps that it cannot decide about
            gone |= {*index.steps()} - self.lone
        index.astray.difference_update(self.deletion.delete(sorted(gone - {*stay})))
        self._verified.update([info.step] if is_good else [])
        self.tidy(lambda: stay, saved=info.step)

    def known_steps(self) -> list[int] | None:
        """Returns the committed steps, in order; None if the root is away or refuses."""
        try:
            return self.reach.ask(partial(_answer, self, self.index.steps))
        except OSError:
            return None

    def report_away(self, error: OSError) -> None:
        """Reports that the steps here are unknown."""
        self.index.report(
            f"{self.index.root} cannot be reached, so its steps are unknown, and newer ones may be "
            f"there: {error}"
        )

    def has(self, step: int) -> bool:
        """Returns whether a step is committed here."""
        return self.index.state(self.index.listing(), step) == "committed"

    def counts(self, step: int, floor: int) -> bool:
        """Returns whether a step here is one of the run, whatever the other groups have.

        Args:
            floor: The newest step that all are known to have. Of a newer step, which may come from
                a save that failed, another process may lack its part.
        """
        return self.group.part is None or step <= floor

    def mend(self, step: int, good: StepIndex) -> bool:
        """Mends a damaged step from its good copy in another root; returns whether it did."""
        from jaxckpt._run.heal import heal

        path = self.index.path(step)
        try:
            self.owner.check()
            with self.leases.protect(step, changes=True):  # against a deletion meanwhile
                files = heal(self.index, good, step, self.owner.check)
        except (CheckpointError, OSError) as error:
            self.index.report(f"step {step} in {self.index.root} cannot be mended: {error}")
            return False
        if files:
            self.index.report(f"{path} was damaged and is mended from {good.path(step)}: {files}")
        return True

    def mend_with(self, step: int, other: Root) -> bool:
        """Mends a damaged step where the other root has a damaged copy of it, too."""
        may_mend = other.group.leads and bool(other.owner.token)
        return self.mend(step, other.index) or (
            may_mend and other.mend(step, self.index) and self.mend(step, other.index)
        )

    def mend_part(self, directory: Root, step: int) -> None:
        """Mends what came from this process's share, if it has one, of a step in the directory."""
        from jaxckpt._run.heal import replace_part

        if directory is self or not (self.group.follows and self.has(step)):
            return  # process 0 heals the step with its own part
        bad = directory.index
        try:
            with self.leases.protect(step), directory.leases.protect(step, changes=True):
                files = replace_part(bad, self.index, step)
        except (CheckpointError, OSError) as error:
            bad.report(
                f"step {step} in {bad.root} cannot be mended from {self.index.root}: {error}"
            )
            return
        if files:
            what = f"{files} are of {self.index.path(step)} now"
            bad.report(f"{bad.path(step)} was damaged: {what}")


def is_apart(root: Root) -> bool:
    """Returns whether the disk of a process may lack steps that a restore finds."""
    return root.group.part is not None or bool(root.peers)


def _answer(root: Root, ask: Callable[[], T]) -> T:
    """Returns what is asked; StoreError if it is nothing, and the root may not be here yet."""
    if not (answer := ask()) and root.group.leads:
        root.owner.check_is_here()
    return answer


def reachable(roots: Sequence[Root], ask: Callable[[Root], T]) -> dict[int, T]:
    """Returns the answer of each root; a directory that cannot be reached is left out and reported.

    If a nearer root has steps, one that does not answer is waited for briefly: see `Reach`.

    Raises:
        OSError: the directory cannot be reached, and no other root has steps: the run would look
            new. Or a disk of this host cannot be read, which may have the newest step.
    """
    answers: dict[int, T] = {}
    for i, root in enumerate(roots):
        may_lack_it = any(answer not in (None, []) for answer in answers.values())
        try:
            do = partial(_answer, root, partial(ask, root))
            answers[i] = twice(partial(root.reach.ask, do)) if may_lack_it else do()
        except OSError as error:
            if not may_lack_it:
                raise
            root.report_away(error)
    return answers


def is_in_any(roots: Sequence[Root], is_in: Callable[[Root], bool]) -> bool:
    """Returns whether something is in a root that can be reached; asks the nearest first."""
    nearest, *others = roots
    if is_in(nearest):
        return True
    for root in others:
        try:
            if root.reach.ask(partial(is_in, root)):
                return True
        except OSError as error:
            root.report_away(error)
    return False


def newest_of(roots: Sequence[Root]) -> int:
    """Returns the newest committed step of the roots that can be reached, or -1.

    Ignores the disks of hosts, since other processes may lack their parts of those steps.
    """
    found = reachable(roots, lambda root: root.index.newest())
    known = ((roots[i], step) for i, step in found.items() if step is not None)
    return max((step for root, step in known if root.counts(step, -1)), default=-1)


def newest_life(local: Root, directory: Root) -> list[Saved]:
    """Returns how the run got to the newest step of its directory, if that can be read."""
    with contextlib.suppress(CheckpointError, OSError, ValueError):
        newest = directory.reach.ask(partial(newest_saved, directory.index))
        return [newest] if newest is not None and newest.run == local.peers.run else []
    return []


def judge_steps(roots: Sequence[Root], judge: Callable[[Told, Told], Json]) -> Any:  # JSON
    """Returns to every process the verdict of process 0 on the steps on all disks.

    Args:
        judge: Takes the steps on the disk of each process, and in the same way the steps in other
            places; see `Peers`. They have metrics if the policy of the last root ranks by one.

    Raises:
        OSError: a disk cannot be read, and no other place has the newest step that was there.
    """
    root, run = roots[0], roots[-1]
    name, judge_all = f"manager {run.index.root}/local steps", partial(_judged, judge, roots)
    held = _here(root, is_ranked=run.keep.metric is not None)
    heard = root.group.job.gather(name, held, judge_all)
    for i, text in heard["told"]:
        root.index.report(f"the local disk of process {i} cannot be read: {text}")
    if heard["blind"]:
        lacks, why = heard["blind"], heard["told"][0][1]
        problem = f"a local disk cannot be read, and no other has {lacks}: {why}"
        raise OSError(errno.EIO, f"{problem}. Try again, or replace it", root.index.root)
    return heard["verdict"]


def _here(root: Root, *, is_ranked: bool) -> Json:
    """Returns the steps on this process's disk, those elsewhere, and the disk's problem."""
    steps, others, problem = [], [], ""
    there = partial(steps_on_disk, is_ranked=is_ranked)
    root.peers.forget()
    try:
        steps = twice(partial(there, root.index))
        others = [twice(partial(there, one)) for one in root.peers.here]
    except OSError as error:
        problem = text_of(error) or ""
    if root.group.job.index == 0:  # one process asks all peers
        others += [there(one) for one in root.peers.there()]
    return [steps, others, problem]


def _judged(judge: Callable[[Told, Told], Json], roots: Sequence[Root], given: list[Any]) -> Json:
    disks = [[*map(Held.told, steps)] for steps, *_ in given]
    others = [[*map(Held.told, steps)] for _, some, _ in given for steps in some]
    bad = {i: text for i, (*_, text) in enumerate(given) if text}
    steps = {one.step for some in (*disks, *others) for one in some}
    if not bad:
        roots[0].shown = max(steps, default=-1)
    blind = _lacking(roots, steps) if bad else ""  # those may have the newest step
    return {"verdict": judge(disks, others), "blind": blind, **first_of(bad)}


def _lacking(roots: Sequence[Root], steps: Collection[int]) -> str:
    """Returns what no place has: any step, or the newest that all disks had when last listed."""
    newest = roots[0].shown or 0
    if not steps:
        return "a step"
    shows_it = newest <= max({*steps, *(roots[-1].known_steps() or ())})
    return "" if shows_it else f"step {newest}, the newest"
