"""Checkpoints for JAX: save any training state, restore it on any mesh, exchange it with Orbax.

    jaxckpt.save(path, tree)                 one committed, durable checkpoint
    handle = jaxckpt.save_async(path, tree)  the same in the background
    tree = jaxckpt.restore(path)             as saved, on the devices of this job
    tree = jaxckpt.restore(path, like)       with the structure, dtypes and shardings of `like`
    ckpt = jaxckpt.open(path)                metadata only; prints as a tree
    jaxckpt.verify(path)                     every checksum, without devices
    jaxckpt.diff(a, b)                       the differences of two checkpoints

    with jaxckpt.CheckpointManager(root, save=..., keep=...) as manager:    a run's checkpoints
        state, step = manager.restore_or(init)
        manager.save(step + 1, state)

Words, one for each idea:

    checkpoint  a directory that holds one committed save
    run         a directory of steps, which is its root
    step        a checkpoint of a run, named by its number
    item        one named object of a checkpoint, mostly a pytree; `state` by default
    leaf        one array or value of a tree; its path joins the keys on the way to it with `/`
    shard       the part of an array that one device holds
    chunk       the part of an array that is stored as one piece: a shard, or an equal slice of one
    place       where a value lies: file, offset and size; a table of places has them by key
    process     one of the programs of a job, `jax.process_index()`
    plan        who writes, or reads, which chunk
    snapshot    the values of a save on the host
    transaction a checkpoint coming into being; commit makes it visible and durable at once
    complete    committed, with every file present in its size; `verify` checks the bytes too
    like        the tree that a restore takes its structure, dtypes and shardings from

`jaxckpt.types` has the classes of results and callback arguments, `jaxckpt.errors` all errors.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  # cannot be loaded once the main thread has ended
import importlib
import sys
from typing import TYPE_CHECKING, Any

from jaxckpt._core import notebook as _notebook
from jaxckpt._version import __version__ as __version__

if TYPE_CHECKING:
    from jaxckpt import errors as errors
    from jaxckpt import types as types
    from jaxckpt._convert.convert import convert
    from jaxckpt._convert.safetensors import export_safetensors, import_safetensors
    from jaxckpt._inspect.diff import diff
    from jaxckpt._inspect.open import Checkpoint
    from jaxckpt._inspect.open import open as open
    from jaxckpt._inspect.verify import verify
    from jaxckpt._restore.restore import restore
    from jaxckpt._run.config import LocalTier
    from jaxckpt._run.fork import fork
    from jaxckpt._run.manager import CheckpointManager
    from jaxckpt._run.retention import KeepPolicy
    from jaxckpt._run.schedule import SavePolicy
    from jaxckpt._save.handle import SaveHandle
    from jaxckpt._save.save import save, save_async
    from jaxckpt.errors import (
        CheckpointError,
        CheckpointNotFound,
        CheckpointTimeout,
        CorruptCheckpoint,
        ProcessesDisagree,
        SaveFailed,
        StepExists,
        StoreError,
        TreeMismatch,
        UnsupportedFormat,
        UnsupportedLeaf,
    )
    from jaxckpt.storage._settings import StoreSettings, use_store

if sys.platform == "win32":
    raise ImportError("jaxckpt does not run on Windows itself: it needs POSIX files. Use WSL 2")

__all__ = [  # without `open`, so that `from jaxckpt import *` does not hide the built-in one
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointNotFound",
    "CheckpointTimeout",
    "CorruptCheckpoint",
    "KeepPolicy",
    "LocalTier",
    "ProcessesDisagree",
    "SaveFailed",
    "SaveHandle",
    "SavePolicy",
    "StepExists",
    "StoreError",
    "StoreSettings",
    "TreeMismatch",
    "UnsupportedFormat",
    "UnsupportedLeaf",
    "convert",
    "diff",
    "export_safetensors",
    "fork",
    "import_safetensors",
    "restore",
    "save",
    "save_async",
    "use_store",
    "verify",
]

# The home of each public name. Importing jaxckpt imports none of it, nor jax, nor TensorStore.
_HOME = {
    **dict.fromkeys(__all__, "errors"),  # all that follow have another
    "CheckpointManager": "_run.manager",
    "SavePolicy": "_run.schedule",
    "KeepPolicy": "_run.retention",
    "LocalTier": "_run.config",
    "convert": "_convert.convert",
    "diff": "_inspect.diff",
    "export_safetensors": "_convert.safetensors",
    "import_safetensors": "_convert.safetensors",
    "fork": "_run.fork",
    "open": "_inspect.open",
    "Checkpoint": "_inspect.open",
    "restore": "_restore.restore",
    "save": "_save.save",
    "save_async": "_save.save",
    "SaveHandle": "_save.handle",
    "verify": "_inspect.verify",
    "StoreSettings": "storage._settings",
    "use_store": "storage._settings",
}
_MODULES = ("errors", "types")


def _pages() -> Any:
    from jaxckpt.pages import notebook

    return notebook


_notebook.register("checkpoint", lambda ckpt: _pages().checkpoint_html(ckpt))
_notebook.register("manager", lambda manager: _pages().manager_html(manager))


def __getattr__(name: str) -> Any:
    home = name if name in _MODULES else _HOME.get(name)
    if home is None:
        raise AttributeError(_unknown(name), name=name)
    module = importlib.import_module(f"{__name__}.{home}")
    globals()[name] = value = module if name in _MODULES else getattr(module, name)
    return value


# Names in Orbax, Flax and torch, and what does the same here.
_HABITS = {
    **dict.fromkeys(("load", "restore_checkpoint", "load_checkpoint"), "restore"),
    "save_checkpoint": "save",
    **dict.fromkeys(
        ("Checkpointer", "PyTreeCheckpointer", "StandardCheckpointer", "AsyncCheckpointer"),
        "CheckpointManager, or save and restore; with one import changed, jaxckpt.orbax",
    ),
    "CheckpointManagerOptions": "SavePolicy and KeepPolicy",
}


def _unknown(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, [*_HOME, *_MODULES], n=1)
    meant = _HABITS.get(name) or (near[0] if near else "")
    hint = f". Did you mean {meant}?" if meant else ""
    return f"module {__name__!r} has no attribute {name!r}{hint}"


def __dir__() -> list[str]:
    return [*_HOME, *_MODULES, "__version__"]
