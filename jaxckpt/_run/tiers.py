"""A run with a local tier in front of its directory: where a step is saved, and goes then.

choose    the local root, while the disk has room; else the directory itself
follow    a local commit of a step that is due in the directory begins its upload
finish    waits for all uploads
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from jaxckpt._disk.pace import Pace
from jaxckpt._run.config import LocalTier
from jaxckpt._run.copies import Saved
from jaxckpt._run.index import StepIndex
from jaxckpt._run.local import Local, settle
from jaxckpt._run.peers import Peers
from jaxckpt._run.root import LOCAL, Root
from jaxckpt._run.schedule import SavePolicy
from jaxckpt._run.sender import Sender, Upload
from jaxckpt._run.uploader import MEET_S, Uploader
from jaxckpt.format.step import Life
from jaxckpt.multihost import Group, Json, Processes, Single, lead, raise_first
from jaxckpt.storage import PathIn, free_bytes, real

# The space that a save needs, relative to its values, and the least space beyond them.
_ROOM: Final = 1.02
_LEAST_ROOM_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Tiers:
    """The local tier of a run with its directory behind it."""

    save: SavePolicy | None  # which steps are saved locally; if None, as for the directory
    local: Root
    directory: Root
    sender: Sender
    uploader: Uploader
    settled: Local

    @classmethod
    def at(
        cls,
        tier: LocalTier,
        directory: Root,
        root_at: Callable[..., Root],  # takes a path
        processes: Processes,
        pace: Pace,
        *,
        writes: bool,
    ) -> Tiers:
        """Finds where this process has the local steps of a run; opens nothing yet."""
        at = partial(root_at, tier=LOCAL, keep=tier.keep)
        base, behind = at(tier.directory, group=directory.group).index, directory.index
        _check_apart(base, behind)
        mates, reach = processes if writes else Single(), directory.reach
        settled = settle(base, behind, mates, writes=writes, reach=reach)
        group = Group.apart(processes) if settled.share else directory.group
        local = at(PathIn(base.storage, settled.root), group=group)
        local.index.astray.update(settled.astray)
        if writes:
            local.peers = _peers_of(tier, local, settled)
            here, home = local.peers.here, posixpath.dirname(settled.root)
            # An earlier job with shares is ended in `share_0`, which this job has if it has shares.
            local.owner.besides = [one for one in here if not settled.share or one.root == home]
        for problem in settled.problems:
            local.index.report(problem)
        sender = Sender((local, directory), processes.within(tier.durable_timeout_s), pace)
        return cls(tier.save, local, directory, sender, Uploader(sender), settled)

    def fence(self, step: int, life: Callable[[], Life]) -> None:
        """Checks that a step may be committed in the directory itself; see `Ownership.fence`."""
        self.sender.open_target(lambda: Saved.of(step, life()))
        self.directory.owner.fence(step)

    def finish(self, timeout_s: float | None) -> None:
        """Waits for all uploads, in every process; raises their errors."""
        where = self.directory.index.root

        def wait() -> Json:
            uploads = self.uploader.worker
            waited_for = uploads.under_way()
            uploads.wait(waited_for, 0.0 if uploads.is_stopped else timeout_s)
            decided = self.decided()
            # Else with the next commit, and on all disks.
            if decided is None and self.local.life is not None:
                self.local.tidy(self.uploader.steps)  # steps stayed for their uploads
            raise_first(uploads.take_errors(waited_for))
            return decided

        meets, leads = self.local.group.job, self.sender.processes
        if timeout_s is not None:
            meets, leads = meets.within(max(timeout_s, MEET_S)), leads.within(timeout_s)
        # If process 0 called this alone, the next calls of the others would get its answer.
        meets.gather(name := f"uploads {where}", None, len)
        decided = lead(leads.within(leads.timeout_s + 60), name, wait, where=where)
        self.follow_decided(decided)

    def choose_root(self, size_bytes: int, name: str, floor: int) -> Root:
        """Returns where to save, alike in all processes: locally, while the disk has room.

        Args:
            floor: The newest step that all processes are known to have committed.
        """
        group, where = self.local.group, self.local.index.root
        with group.leading(f"{name}/place", any, where=where) as led:
            if group.leads:
                led.value = self._is_full(size_bytes * group.mates.count, floor)
        return self.directory if led.value else self.local

    def _is_full(self, size_bytes: int, floor: int) -> bool:
        """Returns whether the disk is full although older local steps were deleted."""
        index = self.local.index
        if self._has_room(size_bytes):
            return False
        self.uploader.drop_oldest(most=0)
        there = {*index.steps(), *index.astray}  # first: a save may commit at this moment
        stay = {*self.uploader.steps(), *self._newest_unless_durable(floor)}
        index.astray.difference_update(self.local.deletion.delete(sorted(there - stay)))
        if self._has_room(size_bytes):
            index.report(f"{index.root}: the disk is almost full, so fewer steps are kept there")
            return False
        index.report(f"{index.root}: the disk is full, so steps are saved in the directory itself")
        return True

    def _newest_unless_durable(self, floor: int) -> list[int]:
        """Returns the newest step, and later ones, which other processes may lack."""
        steps, sent = self.local.index.steps(), self.sender.newest
        newest = [n for n in steps if self.local.counts(n, floor)][-1:]
        if newest and newest[0] <= sent:
            there, leads = self.directory.known_steps(), self.sender.processes.index == 0
            # Process 0 may not have committed it yet, or others have deleted it.
            is_durable = leads if there is None else sent in there
            newest = [] if is_durable else newest
        return [*newest, *(n for n in steps if not self.local.counts(n, floor))]

    def _has_room(self, size_bytes: int) -> bool:
        free = free_bytes(self.local.index.root)
        return free is None or free >= size_bytes * _ROOM + _LEAST_ROOM_BYTES

    def follow(self, root: Root, upload: Upload) -> None:
        """Sends a step on its way that is committed."""
        if root is self.directory:
            self.uploader.note_committed(upload)
        else:
            self.uploader.put(upload)

    def decided(self) -> Json:
        """Returns what the other processes need for their own disks, if they have any."""
        if self.local.group.part is None:
            return None
        attempts, urgent = self.uploader.attempts(), self.uploader.urgent
        return {"stay": self.local.index.steps(), "uploads": attempts, "urgent": urgent}

    def follow_decided(self, decided: Any) -> None:
        """Uploads this process's parts of the steps that process 0 uploads."""
        if decided is not None and self.sender.processes.index:
            self.uploader.follow(decided["uploads"], decided["urgent"])


def _peers_of(tier: LocalTier, local: Root, settled: Local) -> Peers:
    storage, naming = local.index.storage, local.index.naming
    return Peers(
        here=[
            StepIndex(storage, root, naming, quiet=True, astray={*gone})
            for root, gone in settled.others.items()
        ],
        urls=tuple(tier.peers),
        run=settled.run,
        guest=settled.guest,
        naming=naming,
        report=local.index.report,
    )


def _check_apart(local: StepIndex, directory: StepIndex) -> None:
    """Raises ValueError unless a root may hold the local steps of the run in a directory."""
    if not local.storage.hard_links:
        raise ValueError(f"local must be a directory on a disk of this host, got {local.root}")
    ours, theirs = (real(one.storage, one.root) for one in (local, directory))
    if any(f"{a}/".startswith(f"{b.rstrip('/')}/") for a, b in ((ours, theirs), (theirs, ours))):
        raise ValueError(f"local and directory must not contain each other: {ours} and {theirs}")
