"""Orbax's names over jaxckpt: `import jaxckpt.orbax as ocp` for `import orbax.checkpoint as ocp`.

docs/orbax.md has a table of the names, and how each differs. Never imports Orbax.

Runs and checkpoints:

    checkpoint_manager   the manager of a run
    checkpointers        one checkpoint, saved by a handler
    handlers             how an item of each kind is stored
    args                 what to save or restore, with which handler
    options              options, with the effect of each here
    policies             Orbax's policies as ours
    metadata             a checkpoint described
    transform_utils      a target from saved leaves with other names
    step                 the directories of steps
    tree                 trees as dicts from paths to leaves
    utils                helpers
    multihost            the processes of a job
    checkpoint_utils     restore args from targets; waiting for steps of another job
    _handling            the call of a handler
    _run                 a run, as both managers see it
    _trees               trees without a target, and targets for restore args

Places from which programs import the same:

    arrays               of `orbax.checkpoint.arrays`
    type_handlers        of `orbax.checkpoint.type_handlers`
    checkpoint_args      of `orbax.checkpoint.checkpoint_args`
    checkpoint_managers  of `orbax.checkpoint.checkpoint_managers`
    path                 of `orbax.checkpoint.path`
    atomicity            of `orbax.checkpoint.path.atomicity`
    logging              of `orbax.checkpoint.logging`
    future               of `orbax.checkpoint.future`
    pathways             of `orbax.checkpoint.pathways`
    test_utils           of `orbax.checkpoint.test_utils`
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import Any

if find_spec("etils") is None:
    raise ImportError("jaxckpt.orbax needs the package etils[epath]: pip install 'etils[epath]'")

__version__ = "0.12.8"  # of the Orbax whose names these are, for programs that compare it

# The names by the module that defines them, and the other modules; imported when they are used.
_NAMES = {
    "_trees": "PLACEHOLDER",
    "args": "ArrayRestoreArgs RestoreArgs SaveArgs SingleReplicaArrayRestoreArgs",
    "checkpoint_manager": "AbstractCheckpointManager CheckpointManager",
    "checkpointers": "AbstractCheckpointer AsyncCheckpointer Checkpointer PyTreeCheckpointer "
    "StandardCheckpointer",
    "handlers": "ArrayCheckpointHandler AsyncCheckpointHandler BasePyTreeCheckpointHandler "
    "CheckpointHandler CheckpointHandlerRegistry CompositeCheckpointHandler Future "
    "DefaultCheckpointHandlerRegistry JaxRandomKeyCheckpointHandler JsonCheckpointHandler "
    "NumpyRandomKeyCheckpointHandler "
    "PyTreeCheckpointHandler StandardCheckpointHandler",
    "options": "AsyncOptions CheckpointManagerOptions",
    "transform_utils": "Transform apply_transformations merge_trees",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = {
    *(name for name in _NAMES if not name.startswith("_")),
    *"arrays checkpoint_args checkpoint_managers checkpoint_utils future logging metadata".split(),
    *"multihost path pathways policies step test_utils tree type_handlers utils v1".split(),
}


def __getattr__(name: str) -> Any:
    # `from jaxckpt import orbax` for `import orbax.checkpoint`; v1 was in `experimental` there.
    if name in ("checkpoint", "experimental"):
        return sys.modules[__name__]
    home = name if name in _MODULES else _HOME.get(name)
    if home is None:
        raise AttributeError(f"jaxckpt.orbax lacks {name!r}; see docs/orbax.md")
    module = importlib.import_module(f"{__name__}.{home}")
    globals()[name] = value = getattr(module, name) if name in _HOME else module
    return value


def __dir__() -> list[str]:
    return sorted((*_HOME, *_MODULES))
