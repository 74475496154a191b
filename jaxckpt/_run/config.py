"""The arguments of `CheckpointManager`: checked, from dicts, and compared between processes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from types import NoneType
from typing import Any, Final

from jaxckpt._core.check import check_count, check_names, check_positive, check_type
from jaxckpt._core.text import nearest, seconds_of, size_of
from jaxckpt._run.retention import KeepPolicy
from jaxckpt._run.schedule import SavePolicy
from jaxckpt.format import names
from jaxckpt.multihost import Processes, check_alike

MANAGER: Final = "CheckpointManager"
_KINDS: Final[Mapping[str, tuple[Any, str]]] = {
    "save": (SavePolicy, "a SavePolicy(every_steps=...)"),
    "keep": (KeepPolicy, "a KeepPolicy(last=...)"),
    "local_save": (SavePolicy | None, "a SavePolicy(every_steps=...)"),
    "local_keep": (KeepPolicy, "a KeepPolicy(last=...)"),
    "budget_bytes": (int, "an int"),
    "timeout_s": (Real, "a number"),
    "on_progress": ((Callable, NoneType), "a function"),
    "on_commit": ((Callable, NoneType), "a function"),
    "notice": ((Callable, NoneType), "a function"),
}
_POLICIES: Final = {
    "save": SavePolicy,
    "keep": KeepPolicy,
    "local_save": SavePolicy,
    "local_keep": KeepPolicy,
}
LOCAL_KEEP: Final = KeepPolicy(last=2)
_OF_LOCAL: Final = ("local_save", "max_upload_bytes_per_s")
# Options of Orbax's manager, as docs/orbax.md explains them.
_ORBAX: Final = {
    "options": "its options as save=SavePolicy(...) and keep=KeepPolicy(...)",
    "save_interval_steps": "save=SavePolicy(every_steps=...)",
    "max_to_keep": "keep=KeepPolicy(last=...)",
    "keep_period": "keep=KeepPolicy(every_steps=...)",
    "best_fn": "keep=KeepPolicy(best=..., metric=...)",
    "read_only": "mode='r'",
}


def manager_arguments(
    manager: Callable[..., object], config: Any, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments for `manager` from a config, with policies as objects.

    Raises:
        TypeError: a name is unknown.
    """
    parameters = list(inspect.signature(manager).parameters)
    arguments = {**_mapping(config, "the config"), **overrides}
    check_names("the config has no field", arguments, parameters, suggest)
    arguments = with_units("the config", _given(arguments))
    if "directory" not in arguments:
        raise TypeError("the config lacks 'directory', the root of the run")
    for name, policy in _POLICIES.items():
        value = arguments.get(name)
        if value is not None and not isinstance(value, policy):
            arguments[name] = _policy(name, policy, _mapping(value, name))
    if arguments.get("local_save") == SavePolicy():  # an empty policy
        del arguments["local_save"]
    return arguments


def _policy(name: str, policy: type[SavePolicy | KeepPolicy], fields: dict[str, Any]) -> object:
    known = [field.name for field in dataclasses.fields(policy)]
    auto = fields.pop("auto", None) if policy is SavePolicy else None
    known += ["auto"] if policy is SavePolicy else []
    check_names(f"{name} has no field", fields, known)
    fields = with_units(name, _given(fields))
    if auto is None:
        return policy(**fields)
    arguments = _mapping(auto, f"{name}.auto")
    check_names(f"{name}.auto has no field", arguments, ["mtbf_hours", "processes"])
    if "mtbf_hours" in arguments and arguments["mtbf_hours"] is None:
        return policy(**fields)  # `auto` was left empty
    return SavePolicy.auto(**_given(arguments), **fields)


def has_unit(name: str) -> bool:
    """Returns whether the argument of this name is a number of bytes or seconds."""
    return name.endswith(("_bytes", "_s", "_seconds"))


def with_units(what: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments with numbers for texts with a unit, such as "1GB" and "15m".

    Raises:
        ValueError: a text for bytes or seconds is not of this form.
    """
    found = dict(arguments)
    for name, text in arguments.items():
        if isinstance(text, str) and has_unit(name):
            try:
                found[name] = size_of(text) if "_bytes" in name else seconds_of(text)
            except ValueError as error:
                raise ValueError(f"{name} in {what} {error}") from None
    return found


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Drops arguments that are None, which stands for the default."""
    return {name: value for name, value in arguments.items() if value is not None}


def _mapping(config: Any, what: str) -> dict[str, Any]:
    if hasattr(config, "to_dict"):  # an ml_collections.ConfigDict
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise TypeError(f"{what} must be a dict, got {config!r}")
    return dict(config)


def suggest(name: str, known: Sequence[str]) -> str:
    """Returns a hint for a name that the manager does not take: an option of Orbax, or of a policy.

    Example:
        >>> suggest("max_to_keep", ["keep"]), suggest("timeout", ["timeout_s"])
        ('Pass keep=KeepPolicy(last=...).', "Did you mean 'timeout_s'?")
    """
    if name in _ORBAX:
        return f"Pass {_ORBAX[name]}."
    found = [
        f"{argument}={policy.__name__}({name}=...)"
        for argument, policy in (("save", SavePolicy), ("keep", KeepPolicy))
        if name in (field.name for field in dataclasses.fields(policy))
    ]
    return f"Pass {' or '.join(found)}." if found else nearest(name, known)


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Checks those arguments of the manager that nothing else checks."""
    if arguments["mode"] not in ("w", "r"):
        raise ValueError(f"{MANAGER}: mode must be 'w' or 'r', got {arguments['mode']!r}")
    if arguments["incremental"] not in ("auto", False):
        raise ValueError(f"{MANAGER}: incremental must be 'auto' or False")
    for name, (kind, wanted) in _KINDS.items():
        check_type(MANAGER, name, arguments[name], kind, wanted)
    check_count(MANAGER, **{name: arguments[name] for name in ("budget_bytes", "step_digits")})
    limits = ("timeout_s", "durable_timeout_s", "max_upload_bytes_per_s")
    check_positive(MANAGER, **{name: arguments[name] for name in limits})
    if arguments["notice"] is not None and not arguments["save"].on_preemption:
        raise ValueError(f"{MANAGER}: notice needs SavePolicy(on_preemption=True)")
    for name in _OF_LOCAL:
        if arguments[name] is not None and arguments["local"] is None:
            raise ValueError(f"{MANAGER}: {name} needs `local`, the directory of local steps")
    if arguments["item"] != names.STATE_ITEM:
        names.check_item(arguments["item"])


def check_arguments_alike(
    processes: Processes, arguments: Mapping[str, Any], *, timeout_s: float
) -> None:
    """Raises in every process if one opens another run, or with other rules.

    Functions in policies are compared only by whether there is one.
    """
    fields = {}
    for name, value in arguments.items():
        if isinstance(value, SavePolicy | KeepPolicy):
            of_policy = dataclasses.asdict(value)
            fields |= {f"{name}.{field}": callable(x) or x for field, x in of_policy.items()}
        else:
            fields[name] = value
    check_alike(
        processes,
        MANAGER,  # not the directory, in which they may differ
        fields,
        timeout_s=timeout_s,
        hint="Open the same managers in the same order, with equal arguments, in all processes.",
    )
