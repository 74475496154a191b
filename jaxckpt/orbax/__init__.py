"""Orbax's names over jaxckpt: `import jaxckpt.orbax as ocp` for `import orbax.checkpoint as ocp`.

docs/orbax.md has a table of the names, and how each differs. Never imports Orbax.
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
    "PyTreeCheckpointHandler StandardCheckpointHandler",
    "options": "AsyncOptions CheckpointManagerOptions",
    "transform_utils": "Transform apply_transformations",
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
