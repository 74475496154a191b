"""Checkpoints for JAX: save any training state, restore it on any mesh, trade it with Orbax.

    jaxckpt.save(path, tree)                 one committed, durable checkpoint
    handle = jaxckpt.save_async(path, tree)  the same in the background
    tree = jaxckpt.restore(path)             as it was saved, on the devices that are here
    tree = jaxckpt.restore(path, like)       with the structure, dtypes and shardings of `like`
    ckpt = jaxckpt.open(path)                metadata only; prints as a tree
    jaxckpt.verify(path)                     every checksum, without devices

    with jaxckpt.CheckpointManager(root, save=..., keep=...) as manager:    a run's checkpoints
        state, step = manager.restore_or(init)
        manager.save(step + 1, state)

Words, one for each idea:

    checkpoint  a directory that holds one committed save
    step        a checkpoint of a run, named by its number
    item        one named object of a checkpoint, mostly a pytree; `state` unless said otherwise
    leaf        one array or value of a tree; its path joins the keys on the way to it with `/`
    shard       the part of an array that one device holds
    chunk       the part of an array that is stored as one piece: a shard, or an equal slice of one
    process     one of the programs of a job, `jax.process_index()`
    plan        who writes, or reads, which chunk
    snapshot    the values of a save on the host
    transaction a checkpoint coming into being; commit makes it visible and durable at once
    like        the tree that a restore takes its structure, dtypes and shardings from
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxckpt._version import __version__

if TYPE_CHECKING:
    from jaxckpt._branch import export, fork
    from jaxckpt._manager import CheckpointManager
    from jaxckpt._match import RestoreReport
    from jaxckpt._restore import restore
    from jaxckpt._retention import KeepPolicy, StepInfo
    from jaxckpt._save import SaveHandle, save, save_async
    from jaxckpt._schedule import Decision, SavePolicy
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
    "export": "_branch",
    "fork": "_branch",
    "CheckpointManager": "_manager",
    "SavePolicy": "_schedule",
    "Decision": "_schedule",
    "KeepPolicy": "_retention",
    "StepInfo": "_retention",
    "restore": "_restore",
    "save": "_save",
    "save_async": "_save",
    "SaveHandle": "_save",
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
    "Difference",
    "KeepPolicy",
    "ProcessesDisagree",
    "RestoreReport",
    "SaveFailed",
    "SaveHandle",
    "SavePolicy",
    "StepExists",
    "StepInfo",
    "TreeMismatch",
    "UnsupportedFormat",
    "UnsupportedLeaf",
    "VerifyReport",
    "__version__",
    "export",
    "fork",
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
