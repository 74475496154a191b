"""File and directory names of a checkpoint, and the states that they mark.

The names are Orbax's (v1 layout) wherever Orbax has one, so that either library can read the
other's checkpoints.

    <checkpoint>/
      orbax.checkpoint            empty; marks Orbax's v1 layout
      _CHECKPOINT_METADATA        JSON: a handler for each item, timestamps, custom metadata
      commit_success.txt          written last: the checkpoint is complete
      _jaxckpt.json               ours: sizes and checksums of the other files, lineage
      <item>/                     a pytree (`state`): arrays in zarr, inside one OCDBT database
        _METADATA                 JSON: the tree, a kind for each leaf
        _sharding                 JSON: the sharding of each jax.Array
        _strings.json             JSON: the str leaves
        array_metadatas/process_0 JSON: which leaves are PRNG keys
        _jaxckpt.sums             ours: the checksum of each chunk
        manifest.ocdbt  d/        the database
        ocdbt.process_held/       shards of other processes' parts (only in a share, see `step`)
        ocdbt.process_<i>/        written by Orbax, and by earlier releases: the files of process i
        _jaxckpt.part_<i>         ours, until the commit: what process 0 has to know of process i

On request, the files of a single item are in <checkpoint> itself, which then lacks
`orbax.checkpoint`, as where Orbax's v0 saves one tree. Its name is "".

A step of a run lacks `orbax.checkpoint`, as in Orbax's managers, and may have more items:

      <item>/commit_success.txt   in each item; never read
      <item>/metadata             a JSON item
      <item>/process_<i>-of-<n>.json   the state of a data iterator, one for each process
      metrics/metrics             JSON
      _jaxckpt.pinned             ours: the step must not be deleted
      _CHECKPOINT_DELETION        JSON: the item whose deletion has begun; readers skip it
    <run>/_jaxckpt.run            ours: the id of the run
    <run>/_jaxckpt.owner          ours: the job that may commit here, the last to open the run
    <local>/_jaxckpt.disk         ours: distinguishes the local disks of the hosts of a run
    <local>/share_<n>/            ours: the run of the n-th process on such a disk
    <local>/run-<token>/          ours: the steps of a run, if <local> has steps of another run
    <run>/_jaxckpt.lock           ours: locked while that job lives
    <run>/_jaxckpt.doomed         ours: the steps that are being deleted
    <run>/_jaxckpt.ledger         ours: the starts of the run, and how each went
    <run>/_jaxckpt.lease-<token>  ours: a reader is reading a step, which must stay
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Final

ORBAX_MARKER: Final = "orbax.checkpoint"
CHECKPOINT_METADATA: Final = "_CHECKPOINT_METADATA"
COMMIT_MARKER: Final = "commit_success.txt"
RECORD: Final = "_jaxckpt.json"
# Names the writer of an unfinished checkpoint, and is locked while the writer lives.
WRITER: Final = "_jaxckpt.writing"

TREE_METADATA: Final = "_METADATA"
SHARDING: Final = "_sharding"
STRINGS: Final = "_strings.json"
ARRAY_METADATAS: Final = "array_metadatas"
LEGACY_TREE: Final = "checkpoint"  # a msgpack file; a directory of this name is an array
CHUNK_SUMS: Final = "_jaxckpt.sums"
OCDBT_MANIFEST: Final = "manifest.ocdbt"
OCDBT_DATA: Final = "d"
OCDBT_PROCESS: Final = "ocdbt.process_"
OCDBT_HELD: Final = f"{OCDBT_PROCESS}held"
ZARR2: Final = ".zarray"
ZARR3: Final = "zarr.json"
DELETION_RECORD: Final = "_CHECKPOINT_DELETION"

# An empty file: no policy may delete this step.
PINNED: Final = "_jaxckpt.pinned"

# Files about a checkpoint, as opposed to its data: each copy has its own.
OF_COPY: Final = (RECORD, COMMIT_MARKER, WRITER, PINNED)
TOP_FILES: Final = (ORBAX_MARKER, CHECKPOINT_METADATA, *OF_COPY)
# What unites the parts of all processes in an item; paths begin with it.
UNITED: Final = (CHUNK_SUMS, OCDBT_MANIFEST, f"{OCDBT_DATA}/", OCDBT_PROCESS)

# In the root of a run. Files, because a directory there could be mistaken for a step.
RUN: Final = "_jaxckpt.run"
OWNER: Final = "_jaxckpt.owner"
LOCK: Final = "_jaxckpt.lock"
DOOMED: Final = "_jaxckpt.doomed"
DISK: Final = "_jaxckpt.disk"
LEDGER: Final = "_jaxckpt.ledger"
STEPS: Final = "_jaxckpt.steps"
# Orbax keeps the custom metadata of a whole run in this directory, in this file.
ROOT_METADATA: Final = "metadata"
ROOT_METADATA_FILE: Final = "_ROOT_METADATA"
OLD_ROOT_METADATA_FILE: Final = "metadata"  # until Orbax 0.9
_LEASE: Final = "_jaxckpt.lease-"
_CHANGE: Final = f"{_LEASE}change-"
_PART: Final = "_jaxckpt.part_"
_SHARE: Final = "share_"
_GUEST: Final = "run-"  # never the name of a step, whatever follows

# Tried in this order by a restore that names no item.
STATE_ITEM: Final = "state"
DEFAULT_ITEM: Final = "default"
METRICS_ITEM: Final = "metrics"
# A JSON item is one file under one of these names.
JSON_ITEM_FILE: Final = "metadata"
METRICS_FILE: Final = "metrics"
JSON_ITEM_FILES: Final = (JSON_ITEM_FILE, METRICS_FILE, "data.json")
# Orbax's ArraySave writes an item with one array of the first name; if aggregated, with one value
# of the second name.
ARRAY_ITEM_LEAF: Final = "checkpoint"
ARRAY_ITEM_VALUE: Final = "ELEMENT"
# Orbax's JaxRandomKeySave and NumpyRandomKeySave write two items: the data, and its description.
JAX_KEY_ITEM: Final = "jax_random_key"
NUMPY_KEY_ITEM: Final = "np_random_key"

# Orbax treats every directory with this in its name as uncommitted.
TEMPORARY: Final = ".orbax-checkpoint-tmp"
_WRITING: Final = TEMPORARY + "-jaxckpt-"
_DELETING: Final = TEMPORARY + "-deleting-"
_REPLACEMENT: Final = ".jaxckpt-committed"
_SET_ASIDE: Final = ".jaxckpt-bad-"
_TOKEN: Final = re.compile("[0-9a-f]{16}")
_END: Final = 16  # digits of a data file's name that it has in each copy of it
_MAX_ITEM_NAME: Final = 240  # bytes
_PROCESS_FILE: Final = re.compile(r"process_\d{1,9}-of-(\d{1,9})\.json")
_FLAX_FILE: Final = re.compile(r"(.*)_(\d+(?:\.\d+)?(?:e[+-]?\d+)?)$")

_OF_TREE: Final = frozenset(
    {TREE_METADATA, SHARDING, STRINGS, ARRAY_METADATAS, CHUNK_SUMS, OCDBT_MANIFEST, OCDBT_DATA}
)


def is_temporary(name: str) -> bool:
    """Returns whether a directory of this name holds an uncommitted or half-deleted checkpoint."""
    return TEMPORARY in name


def temporary(name: str, token: str) -> str:
    """Returns the name under which a writer with this token builds the checkpoint `name`."""
    return f"{name}{_WRITING}{token}"


def share(rank: int) -> str:
    """Returns the directory of a process among those that share a local disk."""
    return f"{_SHARE}{rank}"


def shares(entries: Iterable[str]) -> list[str]:
    """Returns the directories of a local disk that are shares of processes."""
    return [n for n in entries if n.startswith(_SHARE) and n.removeprefix(_SHARE).isdigit()]


def guest(token: str) -> str:
    """Returns the directory of a run in a local directory that has the steps of another."""
    return f"{_GUEST}{token}"


def is_guest(name: str) -> bool:
    return name.startswith(_GUEST) and _TOKEN.fullmatch(name.removeprefix(_GUEST)) is not None


def is_part_of_tree(name: str) -> bool:
    """Returns whether a pytree item has an entry of this name, other than arrays in plain files."""
    return name in _OF_TREE or name.startswith(OCDBT_PROCESS) or name.endswith(".__lock")


def is_reserved(name: str) -> bool:
    """Returns whether a checkpoint of this name would be mistaken for something else."""
    return TEMPORARY in name or _SET_ASIDE in name or name.endswith(_REPLACEMENT)


def main_tree(trees: Sequence[str], given: str) -> str:
    """Returns the main tree: the only one, `state`, `default` or the given one, or else ""."""
    known = trees if len(trees) == 1 else (STATE_ITEM, DEFAULT_ITEM, given)
    return next((name for name in known if name in trees), "")


def check_item(name: object, *taken: str) -> None:
    """Raises ValueError if an item cannot have this name."""
    if not isinstance(name, str) or not 0 < len(name.encode("utf-8", "replace")) <= _MAX_ITEM_NAME:
        raise ValueError(f"item name must be 1 to {_MAX_ITEM_NAME} bytes, got {name!r}")
    is_taken = name in (METRICS_ITEM, DELETION_RECORD, *TOP_FILES, *taken)
    if is_taken or is_reserved(name) or is_part_of_tree(name):
        raise ValueError(f"an item cannot be named {name!r}: the name is reserved")
    if name.startswith(".") or re.search("[/\\\\\0\ud800-\udfff]", name):
        what = "begins with a dot, or contains a slash, NUL or half of a surrogate pair"
        raise ValueError(f"item name {name!r} {what}")


def is_ours_temporary(entry: str, name: str) -> bool:
    """Returns whether jaxckpt writes or deletes the checkpoint `name` under the name `entry`."""
    if not entry.startswith((name + _WRITING, name + _DELETING)):
        return False
    return _TOKEN.fullmatch(entry.rpartition("-")[2]) is not None


def may_be_left(entry: str, name: str) -> bool:
    """Returns whether `entry` may be what a crash left of a save or a deletion of `name`."""
    return entry in (name, replacement(name)) or is_ours_temporary(entry, name)


def ours_temporary(entry: str) -> str | None:
    """Returns the checkpoint that jaxckpt was writing or deleting as `entry`, or None."""
    name = entry.split(TEMPORARY)[0]
    return name if is_ours_temporary(entry, name) else None


def replaced(entry: str) -> str | None:
    """Returns the name of the checkpoint that `entry` is to replace, or None."""
    return entry.removesuffix(_REPLACEMENT) if entry.endswith(_REPLACEMENT) else None


def set_aside(name: str, token: str) -> str:
    """Returns the new name of a damaged step. No reader treats it as a step."""
    return f"{name}{_SET_ASIDE}{token}"


def is_set_aside(name: str) -> bool:
    return _SET_ASIDE in name


def lease(token: str, *, changes: bool = False) -> str:
    """Returns the file in a run's root that keeps a step from being deleted while it is read.

    If `changes`, the step is being changed, and must not be set aside either.
    """
    return f"{_CHANGE if changes else _LEASE}{token}"


def is_lease(name: str, *, changes: bool = False) -> bool:
    return name.startswith(_CHANGE if changes else _LEASE)


def process_file(index: int, count: int) -> str:
    """Returns the file of one process's data iterator state, named as by Grain's Orbax handler."""
    return f"process_{index}-of-{count}.json"


def process_count(name: str) -> int | None:
    """Returns the process count in the name of such a file, or None for other names."""
    match = _PROCESS_FILE.fullmatch(name)
    return int(match[1]) if match else None


def deleting(name: str, token: str) -> str:
    """Returns the name of a checkpoint while its files are being removed."""
    return f"{name.split(TEMPORARY)[0]}{_DELETING}{token}"


def is_deleting(name: str) -> bool:
    return _DELETING in name


def replacement(name: str) -> str:
    """Returns the name of a committed new checkpoint while the old one is moved away.

    Used only where two directories cannot be exchanged in one step.
    """
    return name + _REPLACEMENT


def part(index: int, mark: str = "") -> str:
    """Returns the file in an item that process `index` leaves for process 0.

    Args:
        mark: The token of the attempt, where attempts to write a checkpoint share its directory.
    """
    return f"{_PART}{index}" + (f".{mark}" if mark else "")


def new_data_file(mark: str = "") -> str:
    """Returns the name of a file of a database that no other has; see `part`."""
    return data_file_of(os.urandom(16).hex(), mark)


def new_held_file() -> str:
    """Returns such a name for values that are another process's part."""
    return f"{OCDBT_HELD}/{new_data_file()}"


def data_file_of(file: str, mark: str) -> str:
    """Returns the name of a data file in an attempt to copy it; see `part`."""
    name = file.rpartition("/")[2]
    return f"{OCDBT_DATA}/n{mark}{name[-_END:]}" if mark else f"{OCDBT_DATA}/{name}"


def end_of(file: str) -> tuple[str, str]:
    """Returns the part of a data file's path that `data_file_of` keeps, and all of other paths."""
    folder, _, name = file.rpartition("/")
    return folder, name[-_END:] if is_data_file(file) else name


_OF_ATTEMPT = re.compile(
    rf"(.*/)?({re.escape(OCDBT_PROCESS)}\d+\.[0-9a-f]{{16}}/.*|{OCDBT_DATA}/n[0-9a-f]{{32}}"
    rf"|{re.escape(_PART)}\d+\.[0-9a-f]{{16}})"
)


def is_of_attempt(file: str) -> bool:
    """Returns whether a file has a name with the token of an attempt, now or in older releases."""
    return _OF_ATTEMPT.fullmatch(file) is not None


def is_data_file(file: str) -> bool:
    """Returns whether a file has the arrays of a database; no other file ever has its name."""
    return f"/{OCDBT_DATA}/" in f"/{file}"


def key_facts(folder: str) -> str:
    """Returns the file that describes the random key in `folder`, beside it."""
    return f"{folder}_metadata/metadata"


def flax_step(name: str) -> float | None:
    """Returns the step in the name of a `flax.training.checkpoints` file, or None."""
    match = _FLAX_FILE.fullmatch(name)
    return float(match[2]) if match else None
