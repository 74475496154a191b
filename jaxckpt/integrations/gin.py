"""The public classes that have options, as gin's configurables of the module `jaxckpt`.

    CheckpointManager.directory = "runs/a"
    CheckpointManager.save = @SavePolicy()
    CheckpointManager.keep = @KeepPolicy()
    SavePolicy.every_steps = 1000
    KeepPolicy.last = 3

Call `CheckpointManager` of this module: gin leaves that of `jaxckpt` as it is. The objects are of
jaxckpt's own classes. With `@SavePolicy.auto()` for `@SavePolicy()` saves are as far apart as loses
the least time.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Iterable
from typing import Any, Final

import gin

from jaxckpt._core.text import suggestion
from jaxckpt._run import manager as _manager
from jaxckpt._run import retention as _retention
from jaxckpt._run import schedule as _schedule

_FIELDS: Final = tuple(field.name for field in dataclasses.fields(_schedule.SavePolicy))
# It takes the fields of the policy too, but for the one that it works out.
_AUTO: Final = ("mtbf_hours", "processes", *(name for name in _FIELDS if name != "job_mtbf_s"))

CheckpointManager = gin.external_configurable(_manager.CheckpointManager, module="jaxckpt")
KeepPolicy = gin.external_configurable(_retention.KeepPolicy, module="jaxckpt")
SavePolicy = gin.external_configurable(_schedule.SavePolicy, module="jaxckpt")
auto = gin.external_configurable(
    _schedule.SavePolicy.auto, name="SavePolicy.auto", module="jaxckpt", allowlist=_AUTO
)

__all__ = ["CheckpointManager", "KeepPolicy", "SavePolicy", "auto", "load"]

_NO_FIELD: Final = re.compile(r"Configurable '([^']+)' doesn't (?:have|include) \D*? '([^']+)'")
_NO_CLASS: Final = re.compile(r"No configurable matching (?:reference )?'@?([\w./]+)(?:\(\))?'")


def load(files: Iterable[str | os.PathLike[str]] = (), bindings: Iterable[str] = (), /) -> None:
    """Reads gin's files, and then bindings, which go before those of the files.

    Raises:
        ValueError: a name in them is unknown; the likely one is suggested.

    Example:
        >>> load((), ["KeepPolicy.lats = 3"])
        Traceback (most recent call last):
        ValueError: Configurable 'KeepPolicy' doesn't have a parameter named 'lats'.
          In bindings string line 1
            KeepPolicy.lats = 3
        Did you mean 'last'?
    """
    try:
        gin.parse_config_files_and_bindings([os.fspath(file) for file in files], list(bindings))
    except ValueError as error:
        hint = _hint(str(error))
        if hint is None:
            raise
        raise ValueError(f"{error}\n{hint}") from None


def _hint(message: str) -> str | None:
    if found := _NO_FIELD.search(message):
        return suggestion(found[2], _parameters(found[1]))
    if found := _NO_CLASS.search(message):
        return suggestion(
            found[1], ["CheckpointManager", "SavePolicy", "KeepPolicy", "SavePolicy.auto"]
        )
    return None


def _parameters(selector: str) -> list[str]:
    """What can be bound of a configurable, of jaxckpt or not."""
    configurable: Any = gin.get_configurable(selector)
    if configurable is auto:
        return list(_AUTO)
    if inspect.isclass(configurable):
        return list(inspect.signature(configurable.__init__).parameters)[1:]
    return list(inspect.signature(configurable).parameters)
