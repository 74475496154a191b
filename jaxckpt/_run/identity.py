"""Gives a run its id: `_jaxckpt.run`, made once, in its directory and in its local directories.

The record of each step has the id too, so that the file can be made again from the newest step.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping

from jaxckpt._disk.found import record_at
from jaxckpt._run.copies import Saved, astray
from jaxckpt._run.index import StepIndex
from jaxckpt._run.listing import check_root
from jaxckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    SaveFailed,
    UnsupportedFormat,
    is_full,
)
from jaxckpt.format import names, run
from jaxckpt.format.run import Identity, is_like_step
from jaxckpt.storage import Entry


def read_identity(index: StepIndex) -> Identity | None:
    """Reads whose steps a root has: in its file, or else in the record of a newest step."""
    return index.small(Identity, names.RUN) or _in_steps(index)


def _in_steps(index: StepIndex) -> Identity | None:
    newest, file = map(newest_saved, indexes_in(index)), f"{index.root}/{names.RUN}"
    if not (found := next((one.run for one in newest if one is not None and one.run), "")):
        return None
    with contextlib.suppress(CorruptCheckpoint, FileNotFoundError):
        data = index.storage.read(file, max_bytes=run.MAX_BYTES)
        return run.decode(Identity, data, file=file, id=found)  # if only the id is damaged
    return Identity(id=found, directory=None)


def indexes_in(local: StepIndex) -> Iterator[StepIndex]:
    """Yields the steps of a local directory: its own, and those in the shares of processes."""
    yield StepIndex(local.storage, local.root, quiet=True)
    for name in names.shares(local.entries()):
        yield StepIndex(local.storage, f"{local.root}/{name}", quiet=True)


def identities_in(local: StepIndex) -> dict[str, Identity | None]:
    """Returns the roots in a local directory that may have the steps of a run, and their ids."""
    if not (entries := check_root(local.storage, local.root)):
        return {local.root: None}
    roots = [local.root, *(f"{local.root}/{name}" for name in entries if names.is_guest(name))]
    return {root: read_identity(StepIndex(local.storage, root, quiet=True)) for root in roots}


def with_id(there: Mapping[str, Identity | None], identity: Identity) -> list[tuple[str, Identity]]:
    """Returns the roots with the id of a run; roots that name its directory come first."""
    mine = [(at, one) for at, one in there.items() if one is not None and one.id == identity.id]
    return sorted(mine, key=lambda found: found[1].directory != identity.directory)


def ensure_id(index: StepIndex, entries: Mapping[str, Entry] | None, wanted: str = "") -> str:
    """Returns the id of the run in a directory; writes an id if the directory lacks it.

    Args:
        entries: The entries of the directory; None if it does not exist.
        wanted: The id to write if the directory lacks an id; if "", a new id.
    """
    known = index.small(Identity, names.RUN) if names.RUN in (entries or ()) else None
    if known is not None:
        return known.id
    known = None if is_new(entries) else _in_steps(index)
    new = Identity(id=known.id if known is not None else wanted or secrets.token_hex(16))
    return put_identity(index, new).id


def is_new(entries: Mapping[str, Entry] | None) -> bool:
    """Returns whether a directory lacks steps."""
    return not any(
        one.kind == "dir" and is_like_step(name) for name, one in (entries or {}).items()
    )


def put_identity(index: StepIndex, identity: Identity) -> Identity:
    """Writes the id of a root unless it has another; returns the id that it has then."""
    file, data = f"{index.root}/{names.RUN}", run.encode(identity)
    try:
        if index.storage.create(file, data):
            return identity
        there = index.small(Identity, names.RUN)
        if there is not None and (there.id != identity.id or there == identity):
            return there
        index.storage.write(file, data)  # it is damaged, or the run was moved
    except OSError as error:
        if not is_full(error):  # the records of the steps have it too
            raise
    return identity


def check_id(index: StepIndex, entries: Mapping[str, Entry] | None, wanted: str) -> str:
    """Does the same as `ensure_id`; SaveFailed if the directory has another id than `wanted`."""
    found = ensure_id(index, entries, wanted)
    if wanted and found != wanted:
        raise SaveFailed(
            f"{index.root} has steps of another run than the local directory of this job. It could "
            "not be reached when this job began. Nothing was changed there; stop this job."
        )
    return found


def saved_at(index: StepIndex, number: int) -> Saved:
    """Reads how the run got to a step, from its record if it has one."""
    try:
        record = record_at(index.storage, index.path(number))
        return Saved.of(number, record.life, record.saved_ns)
    except FileNotFoundError:
        return Saved(number)


def earlier_lives(index: StepIndex, newest: Saved | None) -> list[int]:
    """Returns the steps from which the run did not go on, see `astray`; OSError if unknown."""
    return astray(lives_in(index), newest)


def lives_in(index: StepIndex) -> list[Saved]:
    """Reads how the run got to each step of a root whose record is whole; OSError if unknown."""
    found = []
    for number in index.steps():
        with contextlib.suppress(CorruptCheckpoint, UnsupportedFormat):  # a restore shows it
            found.append(saved_at(index, number))
    return found


def newest_saved(index: StepIndex) -> Saved | None:
    """Returns the newest step whose record can be read."""
    for number in index.newest_first():
        with contextlib.suppress(CheckpointError):
            return saved_at(index, number)
    return None
