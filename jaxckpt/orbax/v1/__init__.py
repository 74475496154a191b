"""Orbax's v1 on jaxckpt: `import jaxckpt.orbax.v1 as ocp` for `from orbax.checkpoint import v1`.

_saving      `save` and its relatives
_loading     `load` and its relatives
_metadata    `metadata` and its relatives
_deletion    `delete`
_trees       trees by the options of the active context
_context     `Context`
options      the options of a context
handlers     who reads and writes what
arrays       abstract arrays
tree         types of trees
errors       errors, raised where Orbax raises them
multihost    the processes of a job
"""

from __future__ import annotations

import importlib
from typing import Any, Final

# The names by the module that defines them. Importing this module imports none of it.
_NAMES: Final = {
    "_saving": "AsyncResponse save save_async save_checkpointables save_checkpointables_async "
    "save_pytree save_pytree_async",
    "_loading": "PLACEHOLDER load load_async load_checkpointables load_checkpointables_async "
    "load_pytree load_pytree_async is_orbax_checkpoint",
    "_metadata": "CheckpointMetadata PyTreeMetadata checkpointables_metadata metadata "
    "pytree_metadata",
    "handlers": "AbstractCheckpointable Checkpointable CheckpointableHandler "
    "StatefulCheckpointable",
    "_context": "Context",
    "_deletion": "delete delete_async",
}
_HOME: Final = {name: home for home, names in _NAMES.items() for name in names.split()}
_MODULES: Final = "arrays errors handlers multihost options path training tree".split()

__all__ = [*_HOME, *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]  # from the table


def __getattr__(name: str) -> Any:
    home = name if name in _MODULES else _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; see docs/orbax.md")
    module = importlib.import_module(f"{__name__}.{home}")
    globals()[name] = value = module if name in _MODULES else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return __all__
