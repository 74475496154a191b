"""File and directory names of a checkpoint, and what they say about its state.

The names are Orbax's (v1 layout) wherever Orbax has one, so that either library finds its way in
what the other wrote.

    <checkpoint>/
      orbax.checkpoint            empty; tells Orbax that this is its v1 layout
      _CHECKPOINT_METADATA        JSON: a handler for each item, timestamps, custom metadata
      commit_success.txt          written last: the checkpoint is whole
      _jaxckpt.json               ours: sizes and checksums of the other files, lineage
      <item>/                     a pytree: arrays in zarr, inside one OCDBT database
        _METADATA                 JSON: the tree, a kind for each leaf
        _sharding                 JSON: the sharding of each jax.Array
        _strings.json             JSON: the str leaves
        array_metadatas/process_0 JSON: which leaves are PRNG keys
        _jaxckpt.sums             ours: the checksum of each chunk
        manifest.ocdbt  d/        the database
        ocdbt.process_<i>/        what process i wrote into it (only with several processes)

A step of a run lacks the first of these, as Orbax's managers have it, and may have more items:

      <item>/commit_success.txt   in each item; nobody reads it
      <item>/metadata             a JSON item
      <item>/process_<i>-of-<n>.json   the state of a data iterator, one for each process
      metrics/metrics             JSON
      _jaxckpt.pinned             ours: not to be deleted
    <run>/_jaxckpt.owner          ours: which job may commit here; who opened the run last
    <run>/_jaxckpt.lock           ours: its lock says whether that job lives
    <run>/_jaxckpt.doomed         ours: the steps that are being deleted
    <run>/_jaxckpt.lease-<token>  ours: a reader reads a step, which must stay
"""

from __future__ import annotations

import re
from typing import Final

ORBAX_MARKER: Final = "orbax.checkpoint"
CHECKPOINT_METADATA: Final = "_CHECKPOINT_METADATA"
COMMIT_MARKER: Final = "commit_success.txt"
RECORD: Final = "_jaxckpt.json"
# Lies in a checkpoint while it is being written: who writes it. Its lock says whether they live.
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
ZARR2: Final = ".zarray"
ZARR3: Final = "zarr.json"
DELETION_RECORD: Final = "_CHECKPOINT_DELETION"

# Empty: this step is not to be deleted by any policy.
PINNED: Final = "_jaxckpt.pinned"

TOP_FILES: Final = (ORBAX_MARKER, CHECKPOINT_METADATA, COMMIT_MARKER, RECORD, WRITER, PINNED)

# In the root of a run. Files, since a directory there might be taken for a step.
OWNER: Final = "_jaxckpt.owner"
LOCK: Final = "_jaxckpt.lock"
DOOMED: Final = "_jaxckpt.doomed"
# Orbax keeps what was said of a whole run in this directory.
ROOT_METADATA: Final = "metadata"
_LEASE: Final = "_jaxckpt.lease-"

# The items a restore looks for when none is named, in this order.
STATE_ITEM: Final = "state"
DEFAULT_ITEM: Final = "default"
METRICS_ITEM: Final = "metrics"
# A JSON item is one file under one of these names.
JSON_ITEM_FILE: Final = "metadata"
METRICS_FILE: Final = "metrics"
JSON_ITEM_FILES: Final = (JSON_ITEM_FILE, METRICS_FILE, "data.json")
# Orbax's ArraySave makes an item of one array of this name; aggregated, of one value of that name.
ARRAY_ITEM_LEAF: Final = "checkpoint"
ARRAY_ITEM_VALUE: Final = "ELEMENT"
# Its JaxRandomKeySave and NumpyRandomKeySave make an item of two: the data, and what it is.
JAX_KEY_ITEM: Final = "jax_random_key"
NUMPY_KEY_ITEM: Final = "np_random_key"

# Orbax takes every directory with this in its name for one that is not committed.
_TEMPORARY: Final = ".orbax-checkpoint-tmp"
_WRITING: Final = _TEMPORARY + "-jaxckpt-"
_DELETING: Final = _TEMPORARY + "-deleting-"
_REPLACEMENT: Final = ".jaxckpt-committed"
_SET_ASIDE: Final = ".jaxckpt-bad-"
_TOKEN: Final = re.compile("[0-9a-f]{16}")
_PROCESS_FILE: Final = re.compile(r"process_\d{1,9}-of-(\d{1,9})\.json")
_FLAX_FILE: Final = re.compile(r"(.*)_(\d+(?:\.\d+)?(?:e[+-]?\d+)?)$")


_OF_TREE: Final = frozenset(
    {TREE_METADATA, SHARDING, STRINGS, ARRAY_METADATAS, CHUNK_SUMS, OCDBT_MANIFEST, OCDBT_DATA}
)


def is_temporary(name: str) -> bool:
    """Whether a directory of this name holds an uncommitted or a half-deleted checkpoint."""
    return _TEMPORARY in name


def temporary(name: str, token: str) -> str:
    """Where a writer with this token builds the checkpoint `name`, beside it."""
    return f"{name}{_WRITING}{token}"


def is_part_of_tree(name: str) -> bool:
    """Whether a pytree item has an entry of this name, other than arrays in plain files."""
    return name in _OF_TREE or name.startswith(OCDBT_PROCESS) or name.endswith(".__lock")


def is_reserved(name: str) -> bool:
    """Whether a checkpoint of this name would be taken for something else."""
    return _TEMPORARY in name or name.endswith(_REPLACEMENT) or is_set_aside(name)


def is_ours_temporary(entry: str, name: str) -> bool:
    """Whether `entry` is what jaxckpt calls the checkpoint `name` while it writes or deletes it."""
    if not entry.startswith((name + _WRITING, name + _DELETING)):
        return False
    return _TOKEN.fullmatch(entry.rpartition("-")[2]) is not None


def ours_temporary(entry: str) -> str | None:
    """The name of the checkpoint that jaxckpt was writing or deleting in `entry`, or None."""
    name = entry.split(_TEMPORARY)[0]
    return name if is_ours_temporary(entry, name) else None


def replaced(entry: str) -> str | None:
    """The name of the checkpoint that the one in `entry` is to replace, or None."""
    return entry.removesuffix(_REPLACEMENT) if entry.endswith(_REPLACEMENT) else None


def set_aside(name: str, token: str) -> str:
    """What a step is called that turned out to be damaged. No reader takes it for a step."""
    return f"{name}{_SET_ASIDE}{token}"


def is_set_aside(name: str) -> bool:
    return _SET_ASIDE in name


def lease(token: str) -> str:
    """The file in a run's root by which a reader keeps a step from being deleted."""
    return f"{_LEASE}{token}"


def is_lease(name: str) -> bool:
    return name.startswith(_LEASE)


def process_file(index: int, count: int) -> str:
    """The state of one process's data iterator; Grain's own handler for Orbax calls it so too."""
    return f"process_{index}-of-{count}.json"


def process_count(name: str) -> int | None:
    """How many processes there were when a file of that kind was written; None for others."""
    match = _PROCESS_FILE.fullmatch(name)
    return int(match[1]) if match else None


def deleting(name: str, token: str) -> str:
    """What a checkpoint is called while its files are being removed."""
    return f"{name.split(_TEMPORARY)[0]}{_DELETING}{token}"


def is_deleting(name: str) -> bool:
    return _DELETING in name


def replacement(name: str) -> str:
    """Where the new checkpoint waits, committed, while the old one of that name is moved away.

    Used only where two directories cannot be exchanged in one step.
    """
    return name + _REPLACEMENT


def process_database(index: int) -> str:
    """The directory of the database that process `index` writes."""
    return f"{OCDBT_PROCESS}{index}"


def key_facts(folder: str) -> str:
    """The file that says what the random key in `folder` is; beside it."""
    return f"{folder}_metadata/metadata"


def flax_step(name: str) -> float | None:
    """The step in the name of a `flax.training.checkpoints` file, or None."""
    match = _FLAX_FILE.fullmatch(name)
    return float(match[2]) if match else None
