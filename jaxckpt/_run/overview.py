"""`overview`: what a run's root holds, step by step, from a few small files of each.

Changes nothing, takes no lease and needs neither jax nor TensorStore, so that it can look at a run
that others write, or may not write themselves.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from jaxckpt._disk.find import find, read_found
from jaxckpt._disk.found import Found
from jaxckpt._run.index import Listing, StepIndex, existing_root, metrics_of, saved_s, shown
from jaxckpt._run.owner import read_owner
from jaxckpt._run.retention import KeepPolicy
from jaxckpt.errors import CheckpointError, CheckpointNotFound
from jaxckpt.format import names
from jaxckpt.storage import Storage, is_temporary_file
from jaxckpt.types import StepInfo

# On a file system over a network each request takes as long as its answer needs to come back.
_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOverview:
    """One step of a run, whole or not.

    Attributes:
        step: Its number.
        path: Its directory; of a Flax checkpoint it may be a file.
        name: The last part of the path.
        saved_s: When it was saved, in seconds since 1970; None if it does not say.
        size_bytes, files: Of all files in it, as they lie on disk.
        metrics: What was given to `save` as such.
        pinned: Whether no policy deletes it.
        problem: Why it cannot be restored, in words; None if it is whole, as far as the metadata
            and the sizes of the files tell.
        writer: Program and version, as far as known; "" if it is not.
        lineage: Where the values came from, if from another checkpoint.
        custom_metadata: What was given to `save` as such.
        items: Names of what it holds; "" for a checkpoint that is its own only item.
        phases: Seconds of the save by phase, where recorded.
    """

    step: int
    path: str
    name: str
    saved_s: float | None = None
    size_bytes: int = 0
    files: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    pinned: bool = False
    problem: str | None = None
    writer: str = ""
    lineage: Mapping[str, Any] = field(default_factory=dict)
    custom_metadata: Mapping[str, Any] = field(default_factory=dict)
    items: tuple[str, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)

    def info(self, now_s: float) -> StepInfo:
        """What a policy looks at. One that does not say when it was saved was saved before now."""
        saved_s = now_s if self.saved_s is None else self.saved_s
        return StepInfo(step=self.step, saved_s=saved_s, metrics=self.metrics, pinned=self.pinned)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOverview:
    """What a run's root holds.

    Attributes:
        path: The root.
        steps: In order of their numbers, with those that are not whole.
        strays: What else is there, each in words: saves under way, steps set aside, other files.
        keep: The policy of the last job that wrote it, but for its `when`; None: not known.
    """

    path: str
    steps: tuple[StepOverview, ...]
    strays: tuple[str, ...]
    keep: KeepPolicy | None = None


def overview(root: str | os.PathLike[str]) -> RunOverview:
    """Looks at every step of a run, of jaxckpt, Orbax or Flax, that others may be writing.

    Reads a few small files of each step and asks for the sizes of the others. A step that goes
    meanwhile is left out.

    Raises:
        CheckpointNotFound: there is nothing at `root`.
        NotADirectoryError, ValueError: it is a file, or a checkpoint itself.

    Example:
        >>> import tempfile, jaxckpt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with jaxckpt.CheckpointManager(folder) as manager:
        ...         _ = manager.save(7, {"w": 1.5}, metrics={"loss": 0.5})
        ...     [(step.step, step.metrics, step.problem) for step in overview(folder).steps]
        [(7, {'loss': 0.5}, None)]
    """
    index = StepIndex(*existing_root(root), quiet=True)
    listings = index.listings()
    listing = next(listings)
    steps = _look_at_all(index, listing)
    while not steps and (later := next(listings, None)) is not None:
        listing, steps = later, _look_at_all(index, later)
    seen = {step.name for step in steps}
    strays = [f"{name}: {text}" for name, text in listing.strays().items() if name not in seen]
    keep = _policy(index)
    return RunOverview(
        path=index.root, steps=tuple(steps), strays=(*strays, *index.problems), keep=keep
    )


def _policy(index: StepIndex) -> KeepPolicy | None:
    owner = read_owner(index)
    try:
        return None if owner is None or not owner.keep else KeepPolicy(**owner.keep)
    except (TypeError, ValueError):  # a newer jaxckpt's
        return None


def _look_at_all(index: StepIndex, listing: Listing) -> list[StepOverview]:
    numbered = {**listing.directories(), **listing.flax_files()}
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="jaxckpt-overview") as pool:
        looked = pool.map(lambda name: look(index, listing, name, numbered[name]), numbered)
        steps = [step for step in looked if step is not None]
    return sorted(steps, key=lambda step: (step.step, step.name))


def look(index: StepIndex, listing: Listing, name: str, number: int) -> StepOverview | None:
    """Describes one entry of a root; None if it is gone."""
    step = _look(index, listing, name, number)
    if step.problem is not None:
        # A step that was deleted, or replaced, while it was looked at is not damaged.
        step = _look(index, listing, name, number)
    return None if index.storage.kind(step.path) is None else step


def _look(index: StepIndex, listing: Listing, name: str, number: int) -> StepOverview:
    path, found, problem = f"{index.root}/{name}", None, None
    facts: dict[str, Any] = {}
    try:
        facts |= _size(index.storage, path, listing)
        found = _find(index, listing, name, number)
    except (CheckpointError, OSError) as error:
        problem = str(error)
        with contextlib.suppress(CheckpointError, OSError):
            found = read_found(index.storage, path, index.storage.entries(path))
    if found is not None:
        facts |= _recorded(found, is_file=listing.entries[name].kind == "file")
        try:
            facts["metrics"] = metrics_of(found)
        except (CheckpointError, OSError) as error:
            problem = problem or str(error)
    return StepOverview(step=number, path=path, name=name, problem=problem, **facts)


def _size(storage: Storage, path: str, listing: Listing) -> dict[str, Any]:
    entry = listing.entries[posixpath.basename(path)]
    if entry.kind == "file":
        return {"size_bytes": entry.size, "files": 1}
    files: dict[str, int] = {}
    folders = [""]
    while folders:
        folder = folders.pop()
        for name, inside in storage.entries(f"{path}/{folder}".rstrip("/")).items():
            if inside.kind == "dir":
                folders.append(f"{folder}{name}/")
            elif not is_temporary_file(name):
                files[f"{folder}{name}"] = inside.size
    pinned = names.PINNED in files
    return {"size_bytes": sum(files.values()), "files": len(files), "pinned": pinned}


def _find(index: StepIndex, listing: Listing, name: str, number: int) -> Found:
    path = f"{index.root}/{name}"
    if listing.entries[name].kind == "file":
        return find(index.storage, path)
    if index.state(listing, number) is None:
        inside = shown(index.storage.names(path))
        raise CheckpointNotFound(f"{path} is not a committed step: it holds {inside}")
    return index.find_whole(number)


def _recorded(found: Found, *, is_file: bool) -> dict[str, Any]:
    """Returns what a checkpoint records about itself."""
    record = found.record
    return {
        "saved_s": saved_s(found),
        "writer": record.writer if record is not None else "flax" if is_file else "orbax",
        "lineage": dict(record.lineage if record is not None else {}),
        "custom_metadata": dict(found.metadata.custom_metadata or {}),
        "items": tuple(found.items),
        "phases": dict(record.phases if record is not None else {}),
    }
