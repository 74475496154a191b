"""Checkpoints for JAX: save any training state, restore it on any mesh, trade it with Orbax.

    jaxckpt.save(path, tree)                 one committed, durable checkpoint
    handle = jaxckpt.save_async(path, tree)  the same in the background
    tree = jaxckpt.restore(path)             as it was saved, on the devices that are here
    tree = jaxckpt.restore(path, like)       with the structure, dtypes and shardings of `like`
    ckpt = jaxckpt.open(path)                metadata only; prints as a tree
    jaxckpt.verify(path)                     every checksum, without devices
    jaxckpt.diff(a, b)                       in what two checkpoints differ

    with jaxckpt.CheckpointManager(root, save=..., keep=...) as manager:    a run's checkpoints
        state, step = manager.restore_or(init)
        manager.save(step + 1, state)

Words, one for each idea:

    checkpoint  a directory that holds one committed save
    run         a directory of steps, which is its root
    step        a checkpoint of a run, named by its number
    item        one named object of a checkpoint, mostly a pytree; `state` unless said otherwise
    leaf        one array or value of a tree; its path joins the keys on the way to it with `/`
    shard       the part of an array that one device holds
    chunk       the part of an array that is stored as one piece: a shard, or an equal slice of one
    process     one of the programs of a job, `jax.process_index()`
    plan        who writes, or reads, which chunk
    snapshot    the values of a save on the host
    transaction a checkpoint coming into being; commit makes it visible and durable at once
    whole       committed, and every file is there in its size; whether the bytes are the ones that
                were written, `verify` says
    like        the tree that a restore takes its structure, dtypes and shardings from
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxckpt._version import __version__

if TYPE_CHECKING:
    from jaxckpt._branch import fork
    from jaxckpt._convert import convert
    from jaxckpt._diff import DiffReport, LeafDiff, diff
    from jaxckpt._manager import CheckpointManager
    from jaxckpt._match import RestoreReport
    from jaxckpt._restore import restore
    from jaxckpt._retention import KeepPolicy, StepInfo
    from jaxckpt._safetensors import export_safetensors, import_safetensors
    from jaxckpt._save import SaveHandle, save, save_async
    from jaxckpt._schedule import Decision, SavePolicy
    from jaxckpt._statistics import LeafStatistics
    from jaxckpt._timing import Progress, Timing
    from jaxckpt._verify import VerifyReport, verify
    from jaxckpt.errors import (
        CheckpointError,
        CheckpointNotFound,
        CheckpointTimeout,
        CorruptCheckpoint,
        Difference,
        ProcessesDisagree,
        SaveFailed,
        StepExists,
        TreeMismatch,
        UnsupportedFormat,
        UnsupportedLeaf,
    )
    from jaxckpt.inspection import Checkpoint, open  # jaxckpt.open is its name

# Where each public name is defined. Importing jaxckpt imports none of it, nor jax, nor TensorStore.
_HOME = {
    "fork": "_branch",
    "convert": "_convert",
    "diff": "_diff",
    "DiffReport": "_diff",
    "LeafDiff": "_diff",
    "LeafStatistics": "_statistics",
    "export_safetensors": "_safetensors",
    "import_safetensors": "_safetensors",
    "CheckpointManager": "_manager",
    "SavePolicy": "_schedule",
    "Decision": "_schedule",
    "KeepPolicy": "_retention",
    "StepInfo": "_retention",
    "restore": "_restore",
    "save": "_save",
    "save_async": "_save",
    "SaveHandle": "_save",
    "Progress": "_timing",
    "Timing": "_timing",
    "RestoreReport": "_match",
    "verify": "_verify",
    "VerifyReport": "_verify",
    "open": "inspection",
    "Checkpoint": "inspection",
    **dict.fromkeys(
        (
            "CheckpointError",
            "CheckpointNotFound",
            "CheckpointTimeout",
            "CorruptCheckpoint",
            "Difference",
            "ProcessesDisagree",
            "SaveFailed",
            "StepExists",
            "TreeMismatch",
            "UnsupportedFormat",
            "UnsupportedLeaf",
        ),
        "errors",
    ),
}

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointNotFound",
    "CheckpointTimeout",
    "CorruptCheckpoint",
    "Decision",
    "DiffReport",
    "Difference",
    "KeepPolicy",
    "LeafDiff",
    "LeafStatistics",
    "ProcessesDisagree",
    "Progress",
    "RestoreReport",
    "SaveFailed",
    "SaveHandle",
    "SavePolicy",
    "StepExists",
    "StepInfo",
    "Timing",
    "TreeMismatch",
    "UnsupportedFormat",
    "UnsupportedLeaf",
    "VerifyReport",
    "__version__",
    "convert",
    "diff",
    "export_safetensors",
    "fork",
    "import_safetensors",
    "open",
    "restore",
    "save",
    "save_async",
    "verify",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
