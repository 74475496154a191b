"""The options of a `CheckpointManager` as a `ConfigDict`, which absl flags can override."""

from __future__ import annotations

import dataclasses
import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxckpt._core.check import check_type
from jaxckpt._run.config import LocalTier, has_unit
from jaxckpt._run.manager import CheckpointManager
from jaxckpt._run.retention import KeepPolicy
from jaxckpt._run.schedule import SavePolicy
from jaxckpt.errors import needing

with needing("ml-collections", __name__):
    from ml_collections import ConfigDict, config_dict

__all__ = ["manager_config"]


def manager_config(**fields: Any) -> ConfigDict:
    """Returns every argument of `CheckpointManager`, with its policies as nested `ConfigDict`s.

    Unset fields know their types, so flags can set them: `--config.checkpoint.keep.last=5`. Bytes
    and seconds may be texts: `--config.checkpoint.save.every_seconds=15m`. The config is locked: a
    misspelt field is an error with a suggestion.

    Args:
        fields: Values by name; `save`, `keep` and `local` are dicts, and so are `local.save` and
            `local.keep`. `local` applies once its `directory` is set. `save.auto` is a dict of the
            arguments of `SavePolicy.auto`, which applies once `mtbf_hours` is set.

    Returns:
        The argument of `CheckpointManager.from_config`.

    Raises:
        AttributeError, KeyError: an unknown name.
        TypeError: a value has the wrong type.

    Example:
        >>> config = manager_config(directory="runs/a", save={"every_steps": 1000})
        >>> config.keep.last = 3
        >>> config.save.every_steps, config.keep.last, config.keep.every_steps
        (1000, 3, None)
        >>> config.keep.lats = 3
        Traceback (most recent call last):
        AttributeError: ...Did you mean "last" instead of "lats"...
    """
    local = {**_entries(LocalTier), **_policies()}
    local["keep"]["last"] = LocalTier("").keep.last
    entries = {**_entries(CheckpointManager.__init__), **_policies()}
    config = ConfigDict({**entries, "local": local})
    config.lock()
    fields = _with_texts(fields)
    for name in {"save", "keep"} & fields.keys():
        check_type("manager_config", name, fields[name], Mapping | ConfigDict, "a dict of fields")
    if (local := fields.pop("local", None)) is not None:
        is_path = isinstance(local, str)
        fields["local"] = {"directory": local} if is_path else _with_texts(local)
    config.update(fields)
    return config


def _policies() -> dict[str, Any]:
    """Returns new entries, since a `ConfigDict` changes those it is made of."""
    save = {**_entries(SavePolicy), "auto": _entries(SavePolicy.auto)}
    return {"save": save, "keep": _entries(KeepPolicy)}


def _with_texts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields with paths as texts."""
    return {n: os.fspath(x) if isinstance(x, os.PathLike) else x for n, x in fields.items()}


def _entries(target: Callable[..., Any]) -> dict[str, Any]:
    """Returns each parameter's default; if that is None, a placeholder of its type."""
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    entries = {}
    for name, parameter in inspect.signature(target).parameters.items():
        if name == "self" or parameter.kind is parameter.VAR_KEYWORD:
            continue
        default = parameter.default
        if dataclasses.is_dataclass(default):
            continue
        if has_unit(name) or default == "auto":  # a number, a text such as "15m", or False
            default = config_dict.FieldReference(default, field_type=object)
        elif default is None or default is parameter.empty:
            default = config_dict.placeholder(_type_of(hints[name]))
        entries[name] = default
    return entries


def _type_of(hint: Any) -> type:
    """Returns the type that values of a hint must have: the first of a union."""
    if isinstance(hint, types.UnionType):
        return _type_of(typing.get_args(hint)[0])
    origin = typing.get_origin(hint) or hint
    if origin is Sequence:
        return tuple
    return origin if origin in (bool, int, float, str) else object
