"""`overview`: describes every step of a run from its small files.

Changes nothing, takes no lease and needs neither jax nor TensorStore, so it also works for a run
that is read-only or being written.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from jaxckpt._disk.find import LISTINGS, find, read_found
from jaxckpt._disk.found import Found
from jaxckpt._run.facts import check_found, metrics_of, saved_s
from jaxckpt._run.identity import identities_in, read_identity, with_id
from jaxckpt._run.index import StepIndex, at_once
from jaxckpt._run.ledger import read_ledger
from jaxckpt._run.listing import Listing, existing_root, shown
from jaxckpt._run.retention import KeepPolicy
from jaxckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptCheckpoint,
    UnsupportedFormat,
    is_io_failure,
)
from jaxckpt.format import names
from jaxckpt.format.ledger import Start
from jaxckpt.format.run import guess_names, is_like_step
from jaxckpt.storage import PathIn, Storage, files_in, listed, locate, now
from jaxckpt.types import StepInfo

FIRST: Final = frozenset(
    {names.RECORD, names.CHECKPOINT_METADATA, names.METRICS_FILE, names.OWNER, names.LEDGER}
)
_RENEW: Final = "To record another policy, open the run with CheckpointManager(..., keep=...)."


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOverview:
    """One step of a run, complete or not."""

    step: int
    path: str  # a directory, or a file for some Flax checkpoints
    name: str  # last part of `path`
    saved_s: float | None = None  # seconds since 1970, or None if not recorded
    size_bytes: int = 0  # of all files on disk
    files: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    pinned: bool = False
    problem: str | None = None  # why the step cannot be restored; None if it is complete
    differences: tuple[str, ...] = ()  # between replicas, found at the save
    unreadable: bool = False  # whether only reading failed, so that the step may be good
    writer: str = ""  # program and version, as far as known
    lineage: Mapping[str, Any] = field(default_factory=dict)  # the checkpoint that it came from
    custom_metadata: Mapping[str, Any] = field(default_factory=dict)
    items: tuple[str, ...] = ()  # names; "" if the checkpoint is its own only item
    missing: tuple[str, ...] = ()  # recorded items whose directories are gone
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds of the save

    def info(self, now_s: float) -> StepInfo:
        """Returns the facts for a policy; a step without a recorded time counts as saved now."""
        saved_s = now_s if self.saved_s is None else self.saved_s
        facts = {"metrics": self.metrics, "pinned": self.pinned, "differences": self.differences}
        return StepInfo(step=self.step, saved_s=saved_s, **facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOverview:
    """The contents of a run's root."""

    path: str
    steps: tuple[StepOverview, ...]  # in order, including incomplete steps
    strays: tuple[str, ...]  # descriptions of saves under way, steps set aside and other files
    keep: KeepPolicy | None = None  # of the last writer, without `when`; None if unknown
    starts: tuple[Start, ...] = ()  # of jobs, in order


def overview(root: str | os.PathLike[str]) -> RunOverview:
    """Describes every step of a run of jaxckpt, Orbax or Flax, which others may be writing.

    Reads a few small files of each step and only the sizes of the others. Steps that are deleted
    meanwhile are left out.

    Raises:
        CheckpointNotFound: no such directory.
        NotADirectoryError, ValueError: `root` is a file or a checkpoint.

    Example:
        >>> import tempfile, jaxckpt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with jaxckpt.CheckpointManager(folder) as manager:
        ...         _ = manager.save(7, {"w": 1.5}, metrics={"loss": 0.5})
        ...     [(step.step, step.metrics, step.problem) for step in overview(folder).steps]
        [(7, {'loss': 0.5}, None)]
    """
    storage, where = locate(root)
    index, listing, steps = _look_around(storage, where)
    for _ in range(LISTINGS - 1):
        if not steps and listing.steps:  # a writer deleted them meanwhile
            index, listing, steps = _look_around(storage, where)
    seen = {step.name for step in steps}
    keep = None
    with contextlib.suppress(CheckpointError):  # viewers can do without the policy
        keep = policy_of(index)
    starts = (names.LEDGER in listing.entries and read_ledger(index)) or []
    described = listing.strays(besides=[keep and keep.move_to])
    strays = [f"{name}: {text}" for name, text in described.items() if name not in seen]
    return RunOverview(
        path=index.root,
        steps=tuple(steps),
        strays=(*strays, *index.problems),
        keep=keep,
        starts=tuple(starts),
    )


def local_roots(local: str | os.PathLike[str] | None, run: str | os.PathLike[str]) -> list[str]:
    """Returns the roots with steps of a run in a local directory: itself, or shares of processes.

    Leaves out roots with steps of another run; see `local`. Without a directory there are none.
    """
    if local is None:
        return []
    storage, root = locate(local)
    index, directory = StepIndex(storage, root, quiet=True), StepIndex(*locate(run), quiet=True)
    identity, there = read_identity(directory), identities_in(index)
    if identity is not None and there[root] is not None:
        url = directory.root
        mine = with_id(there, replace(identity, directory=url))
        if not mine:
            return []
        root = mine[0][0]
    return [f"{root}/{name}" for name in names.shares(storage.entries(root))] or [root]


def with_local(
    found: RunOverview, local: str | os.PathLike[str] | None
) -> tuple[RunOverview, dict[int, list[str]]]:
    """Adds the local steps; returns also which tiers have each step complete, if there are two."""
    if local is None:
        return found, {}
    here = [overview(root) for root in local_roots(local, found.path)]
    tiers: dict[int, list[str]] = {}
    best: dict[int, StepOverview] = {}
    for name, run in (*(("local", one) for one in here), ("durable", found)):
        for step in run.steps:
            where = tiers.setdefault(step.step, [])
            if step.problem is None and name not in where:
                where.append(name)
            if step.step not in best or step.problem is None:  # a share is not all of it
                best[step.step] = step
    strays = [stray for one in (found, *here) for stray in one.strays]
    merged = tuple(best[n] for n in sorted(best))
    return replace(found, steps=merged, strays=tuple(strays)), tiers


def step_overview(path: str | os.PathLike[str]) -> StepOverview | None:
    """Describes the step at a path, complete or torn; None if the path is not a step of a run."""
    storage, where = locate(path)
    root, name = posixpath.split(where)
    if not is_like_step(name):
        return None
    naming = next(iter(guess_names([name], bool)), None)
    index = StepIndex(storage, root, naming=naming, quiet=True)
    listing = index.listing()
    number = listing.directories().get(name)
    if number is None or index.state(listing, number) is None:
        return None
    return look(index, listing, name, number)


def policy_of(index: StepIndex) -> KeepPolicy | None:
    """Returns the policy of the last writer, without `when`; None if no writer recorded one.

    Raises:
        CorruptCheckpoint, UnsupportedFormat: the policy cannot be read; it may move steps.
    """
    file, owner = f"{index.root}/{names.OWNER}", index.owner()
    if owner is None and index.storage.kind(file) is not None:
        raise CorruptCheckpoint(
            f"{file}: expected the keep policy of the last job, but the file is damaged. {_RENEW}",
            file=file,
        )
    fields = {} if owner is None else owner.keep
    try:
        return KeepPolicy(**fields) if fields else None
    except (TypeError, ValueError) as error:
        raise UnsupportedFormat(
            f"{file}: expected a keep policy of this release of jaxckpt, got {dict(fields)} "
            f"({error}). Use the release that wrote it. {_RENEW}"
        ) from error


def _look_around(storage: Storage, root: str) -> tuple[StepIndex, Listing, list[StepOverview]]:
    """Lists a run, and describes all its steps."""
    view = listed(storage, root, FIRST) or storage
    existing_root(PathIn(view, root))
    index = StepIndex(view, root, quiet=True)
    listing = index.listing()
    numbered = {**listing.directories(), **listing.flax_files()}
    looked = at_once(lambda name: look(index, listing, name, numbered[name]), numbered, view)
    steps = [step for step in looked if step is not None]
    return index, listing, sorted(steps, key=lambda step: (step.step, step.name))


def look(index: StepIndex, listing: Listing, name: str, number: int) -> StepOverview | None:
    """Describes one entry of a root; None if it no longer exists."""
    step = _look(index, listing, name, number)
    if step.problem is not None:
        # Read again: a step that was deleted or replaced meanwhile is not damaged.
        index = StepIndex(now(index.storage), index.root, index.naming, quiet=True)
        step = _look(index, listing, name, number)
    return None if index.view(name).kind(step.path) is None else step


def _look(index: StepIndex, listing: Listing, name: str, number: int) -> StepOverview:
    path, found, problem = f"{index.root}/{name}", None, None
    view, facts = index.view(name), dict[str, Any]()
    try:
        facts |= _size(view, path, listing)
        found = _find(index, listing, name, number)
    except (CheckpointError, OSError) as error:
        problem, facts["unreadable"] = str(error), is_io_failure(error)
        with contextlib.suppress(CheckpointError, OSError):
            found = read_found(view, path, view.entries(path))
    if found is not None:
        facts |= _recorded(found, is_file=listing.entries[name].kind == "file")
        try:
            if names.METRICS_ITEM not in found.removed:
                facts["metrics"] = metrics_of(found)
        except (CheckpointError, OSError) as error:
            problem = problem or str(error)
    return StepOverview(step=number, path=path, name=name, problem=problem, **facts)


def _size(storage: Storage, path: str, listing: Listing) -> dict[str, Any]:
    entry = listing.entries[posixpath.basename(path)]
    if entry.kind == "file":
        return {"size_bytes": entry.size, "files": 1}
    files = files_in(storage.entries, path)
    pinned = names.PINNED in files
    size_bytes = sum(file.size for file in files.values())
    return {"size_bytes": size_bytes, "files": len(files), "pinned": pinned}


def _find(index: StepIndex, listing: Listing, name: str, number: int) -> Found:
    path = f"{index.root}/{name}"
    if listing.entries[name].kind == "file":
        return find(index.view(name), path)
    state = index.state(listing, number)
    if state is None:
        inside = shown([*index.view(name).entries(path)])
        raise CheckpointNotFound(f"{path} is not a committed step; it contains {inside}")
    if state != "committed":
        index.check_there(number)
    found = find(index.view(name), path)
    check_found(index, number, found)
    return found


def _recorded(found: Found, *, is_file: bool) -> dict[str, Any]:
    record = found.record
    return {
        "saved_s": saved_s(found),
        "writer": record.writer if record is not None else "flax" if is_file else "orbax",
        "differences": found.differences,
        "lineage": dict(record.lineage if record is not None else {}),
        "custom_metadata": dict(found.metadata.custom_metadata or {}),
        "items": tuple(found.items),
        "missing": () if is_file else tuple(found.removed),
        "phases": dict(record.phases if record is not None else {}),
    }
