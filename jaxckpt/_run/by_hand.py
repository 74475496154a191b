"""Pins, deletes and scrubs steps by hand, in all roots and on the disks of hosts."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

from jaxckpt._run import one_step
from jaxckpt._run.deletion import Deletion
from jaxckpt._run.leases import Leases
from jaxckpt._run.root import Root
from jaxckpt._run.saver import Saver
from jaxckpt._run.scrub import look, set_aside
from jaxckpt._run.tiers import Tiers
from jaxckpt.errors import CheckpointNotFound
from jaxckpt.format import names
from jaxckpt.multihost import Json, Processes, lead
from jaxckpt.types import Problem, VerifyReport

_WHOLE: Final = names.COMMIT_MARKER, names.RECORD


@dataclass(frozen=True, slots=True)
class ByHand:
    """Changes the steps of a run for a manager; all processes make the same calls."""

    run: str  # its directory
    processes: Processes
    roots: Sequence[Root]
    saver: Saver
    tiers: Tiers | None
    writes: bool

    def pin(self, step: int) -> None:
        self._everywhere("pin", step, lambda root: one_step.pin(root.leases, step))

    def unpin(self, step: int) -> None:
        self._everywhere("unpin", step, lambda root: one_step.unpin(root.leases, step))

    def delete(self, step: int, item: str | None) -> None:
        def check(root: Root) -> None:
            if root.has(step) and one_step.is_pinned(root.index, step):
                raise ValueError(f"{root.index.path(step)} is pinned; unpin it first")

        def delete(root: Root) -> None:
            if not all(root.index.has(step, file) for file in _WHOLE):  # as `check` has just listed
                root.index.check_step(step)
            root.owner.fence()
            if self.tiers is not None:  # process 0 has ended it, but maybe not this process
                uploads = self.tiers.uploader.worker
                uploads.wait([one for one in uploads.under_way() if one is uploads.current])
            if item is not None:
                one_step.delete_item(root.deletion, step, item)
            elif step not in root.deletion.delete([step], asked_for=True):
                path, error = root.index.path(step), root.deletion.error
                if error is not None:
                    error.add_note(f"{path} was not deleted. Try again: delete({step})")
                    raise error
                why = one_step.why_not_deleted(root.leases, step)
                raise ValueError(f"{path} was not deleted: {why}")

        try:
            self._everywhere("delete", step, delete, check)
        except CheckpointNotFound:
            if item is not None or not self._have_peers(step):
                raise
        if item is None:
            self.saver.position.deleted.add(step)
        self.saver.go_back()

    def _have_peers(self, step: int) -> bool:
        """Returns whether only peers have a step, which then stays there, and reports that."""
        peers = self.roots[0].peers

        def have() -> bool:
            return any(step in one.steps() for one in peers.there())

        found = bool(peers.urls) and self._lead(f"peers have {step}", have)
        if found:
            told = f"step {step} stays at peers; the run goes on without it once a step is saved"
            self.roots[0].index.report(told, logs=self.processes.index == 0)
        return found

    def scrub(self) -> dict[int, VerifyReport]:
        """Verifies all steps of each root, mends what another has, and sets the rest aside."""
        reports: dict[int, VerifyReport] = {}
        for root in self.roots:
            found = self._scrub(root)
            reports |= {n: one for n, one in found.items() if n not in reports or not one.ok}
            self._upload_again([n for n, one in found.items() if one.damaged], root)
        bad = not all(report.ok for report in reports.values())  # maybe on this disk only
        if self.writes and self.processes.gather(f"manager {self.run}/scrubbed", bad, any):
            self.saver.go_back()  # some were set aside
        return reports

    def _scrub(self, root: Root) -> dict[int, VerifyReport]:
        mates, where = root.group.mates, root.index.root
        name = f"manager {where}/scrub"
        numbers: list[int] = lead(mates, name, root.index.present, where=where)
        reports = self._verify(root, numbers, name)
        if self.writes and not all(report.ok for report in reports.values()):
            for number, report in reports.items():
                if report.damaged:
                    self.roots[0].mend_part(root, number)
            mates.gather(f"{name} mended", None, len)
            settle = partial(self._settle, root, reports)
            for number in lead(mates, f"{name} done", settle, where=where):
                reports[number] = replace(reports[number], problems=())
        return reports

    def _verify(self, root: Root, numbers: Sequence[int], name: str) -> dict[int, VerifyReport]:
        """Verifies steps, divided among the processes; returns all reports to each process."""
        mates, reports = root.group.mates, dict[int, VerifyReport]()
        for start in range(0, len(numbers), mates.count):
            together = numbers[start : start + mates.count]
            mine = together[mates.index : mates.index + 1]
            reports_here = [look(root.leases, number) for number in mine]
            looked: Any = [one and asdict(one) for one in reports_here]
            gathered = mates.gather(f"{name} of {start}", looked)
            for number, of_process in zip(together, gathered, strict=False):
                if of_process[0] is not None:
                    reports[number] = _decode(of_process[0])
        return reports

    def _settle(self, root: Root, reports: dict[int, VerifyReport]) -> list[int]:
        """Mends steps in process 0, and sets the others aside; returns the mended.

        If all steps are damaged, all stay: the run must not come to look like a new one.
        """
        damaged = [number for number, report in reports.items() if report.damaged]
        mended = [number for number in damaged if self._mend(root, number)]
        # Other processes may have mended some, and a file of a mended step may be in others.
        again = (n for n in damaged if n not in mended)
        mended += [n for n in again if (one := look(root.leases, n)) and one.ok]
        left = {n: report for n, report in reports.items() if n not in mended}
        if mended or any(report.ok for report in reports.values()):
            set_aside(root.deletion, left)
        return mended

    def _everywhere(
        self,
        what: str,
        step: int,
        do: Callable[[Root], object],
        check: Callable[[Root], object] = lambda root: None,
    ) -> None:
        """Does something with a step wherever it is; CheckpointNotFound if that is nowhere.

        Args:
            check: Raises if nothing is to be done in any root.
        """

        def in_roots() -> list[Any]:
            roots = [*_beside(self.roots[0]), *self.roots]
            for root in roots:
                check(root)
            return [step, _in_each(roots, do)]

        named, lacks = self._lead(what, in_roots)
        if named != step:
            both = f"{what} of step {step}, but of step {named} in process 0, which was done"
            raise ValueError(f"{self.run}: {both}; all have to name the same")
        if (local := self.roots[0]).group.part is not None:
            name = f"manager {self.run}/{what} here"
            with local.group.leading(name, any, where=self.run) as led:
                mine = [local, *_beside(local)] if local.group.follows else []
                own = [root for root in mine if root.has(step)]
                led.value = (bool(own) and not _in_each(own, do)) or not lacks
            lacks = "" if led.value else lacks
        if lacks:
            raise CheckpointNotFound(lacks)

    def _lead(self, what: str, do: Callable[[], Json]) -> Any:  # JSON
        return lead(self.processes, f"manager {self.run}/{what}", do, where=self.run)

    def _upload_again(self, damaged: Sequence[int], root: Root) -> None:
        """Uploads again, from the hosts' disks, steps of the directory that were set aside."""
        local = self.roots[0]
        if self.tiers is None or root is local:
            return
        for step in damaged:
            root.index.forget(step)
            if local.has(step) and not root.has(step):
                self.tiers.uploader.resume(step)

    def _mend(self, root: Root, step: int) -> bool:
        others = [one for one in self.roots if one is not root]
        # By the directory: it may have lost its record.
        there = [one for one in others if one.index.storage.kind(one.index.path(step)) == "dir"]
        return any(root.mend_with(step, one) for one in there)


def _beside(root: Root) -> list[Root]:
    """Returns the further roots of the run on this disk, if this process is the first there."""
    if root.group.part is not None and posixpath.basename(root.index.root) != names.share(0):
        return []
    to = root.deletion.move_to
    found = [(one, Deletion(one, root.owner, move_to=to)) for one in map(Leases, root.peers.here)]
    return [replace(root, index=x.index, leases=x, deletion=gone) for x, gone in found]


def _in_each(roots: Sequence[Root], do: Callable[[Root], object]) -> str:
    """Does something in each root that has the step; returns what all lack, or ""."""
    lacks, done = list[str](), list[str]()
    # One after the other: an upload that ends meanwhile looks at the local step, too.
    for root in roots:
        try:
            do(root)
            done.append(root.index.root)
        except CheckpointNotFound as error:
            lacks.append(str(error))
        except OSError as error:
            if done:
                error.add_note(f"Done in {done[0]}. Try again once {root.index.root} answers.")
            raise
    return lacks[-1] if len(lacks) == len(roots) else ""


def _decode(encoded: Any) -> VerifyReport:  # JSON
    problems = tuple(Problem(**problem) for problem in encoded["problems"])
    unchecked = tuple(encoded["unchecked"])
    return VerifyReport(**{**encoded, "problems": problems, "unchecked": unchecked})
