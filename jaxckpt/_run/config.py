"""The arguments of `CheckpointManager`: checked, from dicts, and compared between processes."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from types import NoneType
from typing import Any, Final

from jaxckpt._core.check import check_count, check_names, check_positive, check_type, explained
from jaxckpt._core.text import nearest, seconds_of, size_of
from jaxckpt._run.retention import KeepPolicy
from jaxckpt._run.schedule import LEARNED, SavePolicy
from jaxckpt.format import names
from jaxckpt.format.jsontext import given
from jaxckpt.format.run import StepNames
from jaxckpt.multihost import Processes, check_alike
from jaxckpt.storage._settings import check_peer

MANAGER: Final = "CheckpointManager"
_LOCAL: Final = "LocalTier"
_CONTROLS: Final = "[\0-\x1f\x7f-\x9f\ud800-\udfff]"  # and lone surrogates
_LONGEST: Final = 180  # bytes; a save adds a number and 46 more, of 255 that there can be
_POLICIES: Final[Mapping[str, type]] = {"save": SavePolicy, "keep": KeepPolicy}
# Options of Orbax's manager, as docs/orbax.md explains them, and what people try for `LocalTier`.
_HABITS: Final = {
    "options": "its options as save=SavePolicy(...) and keep=KeepPolicy(...)",
    "save_interval_steps": "save=SavePolicy(every_steps=...)",
    "max_to_keep": "keep=KeepPolicy(last=...)",
    "keep_period": "keep=KeepPolicy(every_steps=...)",
    "best_fn": "keep=KeepPolicy(best=..., metric=...)",
    "read_only": "mode='r'",
    "local_save": "local=LocalTier(..., save=...)",
    "local_keep": "local=LocalTier(..., keep=...)",
    "max_upload_bytes_per_s": "save=SavePolicy(max_write_bytes_per_s=...)",
}


@dataclass(frozen=True, slots=True)
class LocalTier:
    """A directory on a disk of each host, where a manager saves steps before it uploads them.

    Attributes:
        directory: Its path, such as on an NVMe or RAM disk.
        save: Decides which steps are saved only here, besides those for the run's directory. Its
            `max_write_bytes_per_s` does not count: nothing limits writes to this disk.
        keep: Decides which steps stay here, besides those that wait to be uploaded.
        durable_timeout_s: How long the run's directory may be away before an upload is given up,
            and how long closing waits for uploads.
        peers: URLs, `http://` or `https://`, where a server of files has the local directories of
            other hosts. Chunks that no disk of the job has are read there before the run's
            directory. `JAXCKPT_PEER_USER` and `JAXCKPT_PEER_PASSWORD` are the user and password.

    Example:
        >>> LocalTier("/mnt/nvme/run", save=SavePolicy(every_steps=10)).keep.last
        2
    """

    directory: str | os.PathLike[str]
    _: KW_ONLY
    save: SavePolicy | None = None
    keep: KeepPolicy = KeepPolicy(last=2)  # noqa: RUF009  # frozen
    durable_timeout_s: float = 600.0
    peers: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_type(_LOCAL, "directory", self.directory, str | os.PathLike, "a path")
        check_type(_LOCAL, "save", self.save, SavePolicy | None, _KINDS["save"][1])
        check_type(_LOCAL, "keep", self.keep, *_KINDS["keep"])
        check_positive(_LOCAL, durable_timeout_s=self.durable_timeout_s)
        check_type(_LOCAL, "peers", self.peers, list | tuple, "a list of URLs")
        for url in self.peers:
            check_peer(url)


LocalTier.__init__ = explained(_LOCAL)(LocalTier.__init__)
_KINDS: Final[Mapping[str, tuple[Any, str]]] = {
    "save": (SavePolicy, "a SavePolicy(every_steps=...)"),
    "keep": (KeepPolicy, "a KeepPolicy(last=...)"),
    "local": (str | os.PathLike | LocalTier | None, "a path or a LocalTier"),
    "budget_bytes": (int, "an int"),
    "timeout_s": (Real, "a number"),
    "on_progress": ((Callable, NoneType), "a function"),
    "on_commit": ((Callable, NoneType), "a function"),
    "notice": ((Callable, NoneType), "a function"),
}

# Of a manager, in all processes.
_ALIKE: Final = "directory step_prefix step_digits save keep run_metadata item compression".split()


def manager_arguments(
    manager: Callable[..., object], config: Any, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments for `manager` from a config, with policies as objects."""
    arguments = {**_mapping(config, "the config"), **overrides}
    known = [*inspect.signature(manager).parameters]
    check_names("the config has no field", arguments, known, suggest)
    arguments = _with_policies("the config", arguments)
    if "directory" not in arguments:
        raise TypeError("the config lacks 'directory', the root of the run")
    if not isinstance(local := arguments.get("local"), str | os.PathLike | LocalTier | None):
        arguments["local"] = _local_tier(_mapping(local, "local"))
    return arguments


def _local_tier(fields: dict[str, Any]) -> LocalTier | None:
    """Returns the tier of these fields, or None if their directory was left empty."""
    if fields.get("directory", "") is None:
        return None
    fields = _with_policies("local", fields)
    if fields.get("save") == SavePolicy():  # an empty policy
        del fields["save"]
    return LocalTier(**{"directory": None, **fields})


def _with_policies(what: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those arguments that are not None, with policies for dicts of their fields."""
    found = with_units(what, given(arguments))
    for name, policy in _POLICIES.items():
        if name in found and not isinstance(found[name], policy):
            found[name] = _policy(name, policy, _mapping(found[name], name))
    return found


def _policy(name: str, policy: type[SavePolicy | KeepPolicy], fields: dict[str, Any]) -> object:
    auto, more = (fields.pop("auto", None), ["auto"]) if policy is SavePolicy else (None, [])
    known = [*more, *(field.name for field in dataclasses.fields(policy))]
    check_names(f"{name} has no field", fields, known)
    fields = with_units(name, given(fields))
    if auto is None:
        return policy(**fields)
    arguments = _mapping(auto, f"{name}.auto")
    check_names(f"{name}.auto has no field", arguments, ["mtbf_hours", "processes"])
    if "mtbf_hours" in arguments and arguments["mtbf_hours"] is None:
        return policy(**fields)  # `auto` was left empty
    return SavePolicy.auto(**given(arguments), **fields)


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
        if isinstance(text, str) and has_unit(name) and text != LEARNED:
            try:
                found[name] = size_of(text) if "_bytes" in name else seconds_of(text)
            except ValueError as error:
                raise ValueError(f"{name} in {what} {error}") from None
    return found


def _mapping(config: Any, what: str) -> dict[str, Any]:
    config = config.to_dict() if hasattr(config, "to_dict") else config  # of ml_collections
    if not isinstance(config, Mapping):
        raise TypeError(f"{what} must be a dict, got {config!r}")
    return dict(config)


def suggest(name: str, known: Sequence[str]) -> str:
    """Returns a hint for a name that is not the manager's: an option of Orbax, or of a policy.

    Example:
        >>> suggest("max_to_keep", ["keep"]), suggest("timeout", ["timeout_s"])
        ('Pass keep=KeepPolicy(last=...).', "Did you mean 'timeout_s'?")
    """
    if name in _HABITS:
        return f"Pass {_HABITS[name]}."
    found = [
        f"{argument}={policy.__name__}({name}=...)"
        for argument, policy in {**_POLICIES, "local": LocalTier}.items()
        if name in (field.name for field in dataclasses.fields(policy))
    ]
    return f"Pass {' or '.join(found)}." if found else nearest(name, known)


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Checks those arguments of the manager that nothing else checks."""
    for name, known in {"mode": ("w", "r"), "incremental": ("auto", False)}.items():
        if (x := arguments[name]) not in known:
            raise ValueError(f"{MANAGER}: {name} must be {known[0]!r} or {known[1]!r}, got {x!r}")
    for name, (kind, wanted) in _KINDS.items():
        check_type(MANAGER, name, arguments[name], kind, wanted)
    check_count(MANAGER, **{name: arguments[name] for name in ("budget_bytes", "step_digits")})
    check_positive(MANAGER, timeout_s=arguments["timeout_s"])
    if arguments["notice"] is not None and not arguments["save"].on_preemption:
        raise ValueError(f"{MANAGER}: notice needs SavePolicy(on_preemption=True)")
    if arguments["item"] != names.STATE_ITEM:
        names.check_item(arguments["item"])


def naming_of(prefix: str | None, digits: int | None) -> StepNames:
    naming, text = StepNames(prefix=prefix, digits=digits), prefix or ""
    if len(text.encode("utf-8", "replace")) > _LONGEST or re.search(_CONTROLS, text):
        raise ValueError(
            f"step_prefix: at most {_LONGEST} bytes of UTF-8, no control characters: {text!r}. A "
            "run whose steps have it goes on with it if step_prefix and step_digits are left out."
        )
    return naming


def check_arguments_alike(processes: Processes, given: Mapping[str, Any]) -> None:
    """Raises in every process if one opens another run, or with other rules.

    Functions in policies are compared only by whether there is one.
    """
    arguments, fields = {name: given[name] for name in _ALIKE}, {}
    if (near := given["local"]) is not None:
        arguments |= {"local.save": near.save, "local.keep": near.keep}
        arguments["local.peers"] = bool(near.peers)
    for name, value in arguments.items():
        policy = dataclasses.asdict(value) if isinstance(value, SavePolicy | KeepPolicy) else {}
        fields |= {f"{name}.{x}": callable(y) or y for x, y in policy.items()} or {name: value}
    hint = "Open the same managers in the same order, with equal arguments, in all processes."
    check_alike(processes, MANAGER, fields, hint=hint)  # not the directory: they may differ in it
