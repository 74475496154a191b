"""The public classes with options, as gin configurables in the module `jaxckpt`.

    CheckpointManager.directory = "runs/a"
    CheckpointManager.budget_bytes = "8GB"
    SavePolicy.every_seconds = "15m"
    KeepPolicy.last = 3

Call `CheckpointManager` of this module: gin does not change the class in `jaxckpt`. The objects are
instances of jaxckpt's own classes. The policies are made from their bindings unless `save` and
`keep` are bound themselves, as in `CheckpointManager.keep = @eval/KeepPolicy()`. Bind
`SavePolicy.auto.mtbf_hours` for the interval that loses the least time, and `LocalTier.directory`
to save on a disk of each host first; `LocalTier.save` and `LocalTier.keep` are bound themselves.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Iterable
from typing import Any, Final

from jaxckpt._core.text import nearest
from jaxckpt._run import manager as _manager
from jaxckpt._run import retention as _retention
from jaxckpt._run import schedule as _schedule
from jaxckpt._run.config import LocalTier as _LocalTier
from jaxckpt._run.config import suggest, with_units
from jaxckpt.errors import needing

with needing("gin-config", __name__):
    import gin

_FIELDS: Final = tuple(field.name for field in dataclasses.fields(_schedule.SavePolicy))
# It also takes the fields of the policy, except the field that it computes.
_AUTO: Final = ("mtbf_hours", "processes", *(name for name in _FIELDS if name != "job_mtbf_s"))


def _configurable(name: str, target: Any, make: Any = None, **options: Any) -> Any:
    """Registers a function with the arguments of `target`, which may be texts such as "15m"."""

    def made(*args: Any, **arguments: Any) -> Any:
        return (make or target)(*args, **with_units(name, arguments))

    made.__signature__ = inspect.signature(target)  # pyright: ignore[reportFunctionMemberAccess]
    return gin.external_configurable(made, name=name, module="jaxckpt", **options)


KeepPolicy = _configurable("KeepPolicy", _retention.KeepPolicy)
SavePolicy = _configurable("SavePolicy", _schedule.SavePolicy)
auto = _configurable("SavePolicy.auto", _schedule.SavePolicy.auto, allowlist=_AUTO)
LocalTier = _configurable("LocalTier", _LocalTier)


def _open(*args: Any, **arguments: Any) -> _manager.CheckpointManager:
    # Bound fields of a policy must not be ignored because the policy itself is not bound.
    arguments.setdefault("keep", KeepPolicy())
    if "save" not in arguments:
        arguments["save"] = _bound_policy()
    if "local" not in arguments and gin.get_bindings(LocalTier).get("directory") is not None:
        arguments["local"] = LocalTier()
    return _manager.CheckpointManager(*args, **arguments)


def _bound_policy() -> _schedule.SavePolicy:
    of_auto = gin.get_bindings(auto)
    if of_auto and gin.get_bindings(SavePolicy):
        raise ValueError(
            "SavePolicy and SavePolicy.auto both have bindings; choose one with "
            "CheckpointManager.save = @SavePolicy() or @SavePolicy.auto()"
        )
    return auto() if of_auto else SavePolicy()


CheckpointManager = _configurable("CheckpointManager", _manager.CheckpointManager, _open)

__all__ = ["CheckpointManager", "KeepPolicy", "LocalTier", "SavePolicy", "auto", "load"]

_OPEN_ENDED: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NO_FIELD: Final = re.compile(r"Configurable '([^']+)' doesn't (?:have|include) \D*? '([^']+)'")
_NO_CLASS: Final = re.compile(r"No configurable matching (?:reference )?'@?([\w./]+)(?:\(\))?'")


def load(files: Iterable[str | os.PathLike[str]] = (), bindings: Iterable[str] = (), /) -> None:
    """Reads gin files and then bindings, which override the files; a text is a list of one.

    Raises:
        ValueError: a name is unknown; the message suggests the closest one.

    Example:
        >>> load((), ["KeepPolicy.lats = 3"])
        Traceback (most recent call last):
        ValueError: Configurable 'KeepPolicy' doesn't have a parameter named 'lats'.
          In bindings string line 1
            KeepPolicy.lats = 3
        Did you mean 'last'?
    """
    files = [files] if isinstance(files, str) else files
    bindings = [bindings] if isinstance(bindings, str) else bindings
    try:
        gin.parse_config_files_and_bindings([os.fspath(file) for file in files], list(bindings))
    except ValueError as error:
        if (hint := _hint(str(error))) is None:
            raise
        raise ValueError(f"{error}\n{hint}") from None


def _hint(message: str) -> str | None:
    if found := _NO_FIELD.search(message):
        hint = suggest if found[1].endswith("CheckpointManager") else nearest
        return hint(found[2], _parameters(found[1]))
    if found := _NO_CLASS.search(message):
        classes = ["CheckpointManager", "SavePolicy", "KeepPolicy", "LocalTier", "SavePolicy.auto"]
        return nearest(found[1], classes)
    return None


def _parameters(selector: str) -> list[str]:
    """Returns the bindable parameters of any configurable."""
    configurable: Any = gin.get_configurable(selector)
    if configurable is auto:
        return list(_AUTO)
    # gin derives a class from one of a program, and hides what that takes.
    for one in configurable.__mro__ if inspect.isclass(configurable) else [configurable]:
        found = inspect.signature(one).parameters
        if named := [name for name, taken in found.items() if taken.kind not in _OPEN_ENDED]:
            return named
    return []
