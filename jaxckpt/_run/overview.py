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

from jaxckpt._disk import transaction as _transaction
from jaxckpt._disk.find import find, looks_committed, read_found
from jaxckpt._disk.found import Found
from jaxckpt._run.retention import KeepPolicy
from jaxckpt._run.run import Run
from jaxckpt.errors import CheckpointError, CheckpointNotFound, CorruptCheckpoint
from jaxckpt.format import jsontext, names
from jaxckpt.format.run import StepNames, guess_names, like_steps
from jaxckpt.storage import Storage, is_temporary_file, locate
from jaxckpt.types import StepInfo

# On a file system over a network each question takes as long as an answer needs to come back.
_AT_ONCE: Final = 8
# A writer may delete all steps of one listing, when it has new ones.
_LISTINGS: Final = 3
_OF_ROOT: Final = (names.OWNER, names.DOOMED, names.LOCK, names.ROOT_METADATA)


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
    storage, where = locate(root)
    run = Run(storage=storage, root=where, quiet=True)
    run.check_root()
    if storage.kind(where) is None:
        raise CheckpointNotFound(f"{where}: there is nothing.")
    if run.holds_checkpoint():
        raise ValueError(
            f"{where} is a checkpoint itself. A run is the directory around its steps: "
            f"{posixpath.dirname(where)}?"
        )
    entries: list[str] = []
    found: dict[str, int] = {}
    steps: list[StepOverview] = []
    for _ in range(_LISTINGS):
        entries = storage.names(where)
        run.naming = _naming(storage, where, entries)
        found = _numbered(storage, where, run.naming, entries)
        steps = _look_at(run, found)
        if steps or not found:
            break
    strays = [words for name in entries if name not in found and (words := _stray(run, name))]
    keep = _policy(run)
    return RunOverview(path=where, steps=tuple(steps), strays=(*strays, *run.problems), keep=keep)


def _policy(run: Run) -> KeepPolicy | None:
    owner = run.owner()
    try:
        return None if owner is None or not owner.keep else KeepPolicy(**owner.keep)
    except (TypeError, ValueError):  # a newer jaxckpt's
        return None


def _look_at(run: Run, found: Mapping[str, int]) -> list[StepOverview]:
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="jaxckpt-overview") as pool:
        looked = pool.map(lambda name: look(run, name, found[name]), found)
        steps = [step for step in looked if step is not None]
    return sorted(steps, key=lambda step: (step.step, step.name))


def _naming(storage: Storage, root: str, entries: list[str]) -> StepNames:
    """How the steps are called; unlike the run's own guess, it warns of nothing on the way."""
    for name in like_steps(entries):
        if _is_committed(storage, f"{root}/{name}"):
            return guess_names(name, entries)
    return StepNames()


def _is_committed(storage: Storage, path: str) -> bool:
    try:
        return storage.kind(path) == "dir" and looks_committed(storage, path)
    except FileNotFoundError:  # deleted just now
        return False


def _numbered(storage: Storage, root: str, naming: StepNames, entries: list[str]) -> dict[str, int]:
    """The number of each entry that is a step: a directory, or a file of Flax's."""
    found: dict[str, int] = {}
    for name in entries:
        number = naming.step(name)
        flax = names.flax_step(name)
        if number is not None and storage.kind(f"{root}/{name}") == "dir":
            found[name] = number
        elif flax is not None and flax.is_integer() and storage.kind(f"{root}/{name}") == "file":
            found[name] = int(flax)
    return found


def look(run: Run, name: str, number: int) -> StepOverview | None:
    """What is known of one entry of a root; None if it is gone."""
    path = f"{run.root}/{name}"
    step = _look(run, path, number)
    if step.problem is not None:
        # One that was deleted, or replaced, while it was looked at is not damaged.
        step = _look(run, path, number)
    return None if run.storage.kind(path) is None else step


def _look(run: Run, path: str, number: int) -> StepOverview:
    storage, found, problem = run.storage, None, None
    facts: dict[str, Any] = {}
    try:
        facts["pinned"] = storage.kind(f"{path}/{names.PINNED}") is not None
        facts["size_bytes"], facts["files"] = _size(storage, path)
        found = _find(run, path, number)
    except (CheckpointError, OSError) as error:
        problem = str(error)
        with contextlib.suppress(CheckpointError, OSError):
            found = read_found(storage, path, storage.entries(path))
    if found is not None:
        facts |= _said(found)
        try:
            facts["metrics"] = _metrics(found)
        except (CheckpointError, OSError) as error:
            problem = problem or str(error)
    return StepOverview(
        step=number, path=path, name=posixpath.basename(path), problem=problem, **facts
    )


def _size(storage: Storage, path: str) -> tuple[int, int]:
    if storage.kind(path) == "file":
        return storage.size(path), 1
    files = [f"{path}/{file}" for file in _transaction.files_below(storage, path)]
    # A link, which no checkpoint has inside, has no size of its own.
    return sum(storage.size(file) for file in files if storage.kind(file) == "file"), len(files)


def _find(run: Run, path: str, number: int) -> Found:
    if run.storage.kind(path) == "file":
        return find(run.storage, path)
    if looks_committed(run.storage, path):
        return run.check_whole(number)
    inside = run.storage.names(path)
    if names.RECORD in inside or names.WRITER in inside:
        missing = names.COMMIT_MARKER if names.RECORD in inside else names.RECORD
        raise CorruptCheckpoint(
            f"{path}/{missing} is missing: the step is an incomplete copy, or was being deleted"
        )
    shown = ", ".join(inside[:8]) + (", ..." if len(inside) > 8 else "")
    raise CheckpointNotFound(f"{path} is no committed step: it holds {shown or 'nothing'}")


def _said(found: Found) -> dict[str, Any]:
    """What a checkpoint says of itself."""
    saved_ns = found.metadata.commit_ns or found.metadata.init_ns
    record = found.record
    is_file = found.storage.kind(found.path) == "file"
    return {
        "saved_s": None if saved_ns is None else saved_ns / 1e9,
        "writer": record.writer if record is not None else "flax" if is_file else "orbax",
        "lineage": dict(record.lineage if record is not None else {}),
        "custom_metadata": dict(found.metadata.custom_metadata or {}),
        "items": tuple(found.items),
        "phases": dict(record.phases if record is not None else {}),
    }


def _metrics(found: Found) -> dict[str, Any]:
    item = f"{found.path}/{names.METRICS_ITEM}"
    if found.contents(item).get(names.METRICS_FILE) != "file":
        return {}
    file = f"{item}/{names.METRICS_FILE}"
    metrics = jsontext.loads(found.read(item, names.METRICS_FILE), file=file)
    return metrics if isinstance(metrics, dict) else {}


def _stray(run: Run, name: str) -> str | None:
    """What an entry of the root is that is no step; None if it belongs there."""
    if name in _OF_ROOT or names.is_lease(name):
        return None
    if names.is_set_aside(name):
        return f"{name}: a step that was set aside, since it is damaged"
    if names.is_deleting(name):
        return f"{name}: is being deleted, or a deletion of it was interrupted"
    if names.is_temporary(name):
        return f"{name}: a save that is under way, or was interrupted"
    if (of := names.replaced(name)) is not None:
        return f"{name}: committed, and about to take the place of {of}"
    if is_temporary_file(name):
        return f"{name}: a small file that is being written, or was when its writer died"
    if run.naming is not None and run.naming.step(name) is not None:
        return f"{name}: called like a step, but no directory"
    return f"{name}: no part of the run"
