"""A run's root: the names of its steps, and the small files beside them.

    _jaxckpt.owner          {"token", "host", "pid", "opened_ns", "keep": {"last": 3, ...}}
    _jaxckpt.doomed         {"steps": [directory names]}
    _jaxckpt.lease-<token>  {"step": directory name, "expires_ns"}

All are JSON. Times are the wall clock, ns since 1970.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from jaxckpt.format import jsontext, names
from jaxckpt.format.jsontext import expect

MAX_BYTES: Final = 1 << 20
# More digits are no step number but a date or a hash.
_MAX_DIGITS: Final = 18
MAX_STEP: Final = 10**_MAX_DIGITS - 1
_STEP: Final = re.compile(rf"(?:(.*)_)?(\d{{1,{_MAX_DIGITS}}})", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNames:
    """How a run calls the directories of its steps: `[<prefix>_]<step>`, zero-padded or not.

    Orbax calls the two `step_prefix` and `step_format_fixed_length`.

    Attributes:
        prefix: Without the `_`.
        digits: The shortest that a number is; longer ones are written in full.

    Example:
        >>> names = StepNames(prefix="ckpt", digits=6)
        >>> names.of(12), names.step("ckpt_000012"), names.step("12")
        ('ckpt_000012', 12, None)
    """

    prefix: str | None = None
    digits: int | None = None

    def __post_init__(self) -> None:
        if self.prefix is not None and not isinstance(self.prefix, str):
            raise TypeError(f"step_prefix must be text, not {self.prefix!r}")
        name = self.of(0)
        if names.is_reserved(name) or any(mark in name for mark in "/\\\0"):
            raise ValueError(f"steps cannot be called {name!r}, as step_prefix wants")
        if self.digits is not None and self.digits > _MAX_DIGITS:
            raise ValueError(f"step_digits must be at most {_MAX_DIGITS}, not {self.digits}")

    def of(self, step: int) -> str:
        """The name of a step."""
        number = f"{step:0{self.digits or 1}d}"
        return number if self.prefix is None else f"{self.prefix}_{number}"

    def step(self, name: str) -> int | None:
        """The step of a name; None if it is not one that `of` gives."""
        match = _STEP.fullmatch(name)
        if match is None or match[1] != self.prefix:
            return None
        step = int(match[2])
        return step if self.of(step) == name else None


def like_steps(entries: Sequence[str]) -> list[str]:
    """The entries that are called like a step of some run; plain numbers, then high ones first."""
    found = []
    for entry in entries:
        match = _STEP.fullmatch(entry)
        if match is not None and not names.is_reserved(entry):
            found.append((match[1] is None, int(match[2]), entry))
    return [entry for _, _, entry in sorted(found, reverse=True)]


def guess_names(name: str, entries: Sequence[str]) -> StepNames:
    """How steps are called in a run that has one of this name."""
    match = _STEP.fullmatch(name)
    prefix = match[1] if match is not None else None
    others = [other for entry in entries if (other := _STEP.fullmatch(entry)) is not None]
    if match is not None and match[2].startswith("0") and match[2] != "0":
        return StepNames(prefix=prefix, digits=len(match[2]))
    # Of 0099 and 12345 the second does not show that numbers are padded, and of 100 and 0099 the
    # second belongs to no run that has the first.
    most = len(match[2]) if match is not None else 0
    widths = [
        len(other[2])
        for other in others
        if other[1] == prefix and other[2].startswith("0") and 1 < len(other[2]) <= most
    ]
    return StepNames(prefix=prefix, digits=max(widths, key=widths.count, default=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The job that may commit to a run: the one that opened it last.

    Attributes:
        token: Unique to that opening.
        keep: What its policy keeps, by the fields of `KeepPolicy`; functions are left out.
    """

    token: str
    host: str
    pid: int
    opened_ns: int
    keep: Mapping[str, Any] = field(default_factory=dict)


def encode_owner(owner: Owner) -> bytes:
    """The bytes of `_jaxckpt.owner`."""
    return jsontext.dumps(
        {
            "token": owner.token,
            "host": owner.host,
            "pid": owner.pid,
            "opened_ns": owner.opened_ns,
            "keep": dict(owner.keep),
        }
    )


def decode_owner(data: bytes, *, file: str) -> Owner:
    """Reads `_jaxckpt.owner`; CorruptCheckpoint if it does not say what such a file says."""
    top = expect(jsontext.loads(data, file=file), dict, "the file", file=file)
    return Owner(
        token=expect(top.get("token"), str, "'token'", file=file),
        host=expect(top.get("host"), str, "'host'", file=file),
        pid=expect(top.get("pid"), int, "'pid'", file=file),
        opened_ns=expect(top.get("opened_ns"), int, "'opened_ns'", file=file),
        keep=expect(top.get("keep", {}), dict, "'keep'", file=file),
    )


def encode_doomed(steps: Sequence[str]) -> bytes:
    """The bytes of `_jaxckpt.doomed`."""
    return jsontext.dumps({"steps": list(steps)})


def decode_doomed(data: bytes, *, file: str) -> list[str]:
    """Reads `_jaxckpt.doomed`."""
    top = expect(jsontext.loads(data, file=file), dict, "the file", file=file)
    steps = expect(top.get("steps"), list, "'steps'", file=file)
    return [expect(step, str, "a step", file=file) for step in steps]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """That a reader reads a step, by the name of its directory, until some time."""

    step: str
    expires_ns: int


def encode_lease(lease: Lease) -> bytes:
    """The bytes of a lease."""
    return jsontext.dumps({"step": lease.step, "expires_ns": lease.expires_ns})


def decode_lease(data: bytes, *, file: str) -> Lease:
    """Reads a lease."""
    top = expect(jsontext.loads(data, file=file), dict, "the file", file=file)
    return Lease(
        step=expect(top.get("step"), str, "'step'", file=file),
        expires_ns=expect(top.get("expires_ns"), int, "'expires_ns'", file=file),
    )
