"""The root of a run: the names of its steps, and the small files beside them.

    _jaxckpt.owner          {"token", "host", "pid", "opened_ns", "keep": {"last": 3, ...}}
    _jaxckpt.doomed         {"steps": [directory names]}
    _jaxckpt.lease-<token>  {"step": directory name, "expires_ns"}

All are JSON. Times are wall clock, ns since 1970.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from jaxckpt.format import jsontext, names
from jaxckpt.format.jsontext import expect

MAX_BYTES: Final = 1 << 20
# A longer number is a date or a hash, not a step.
_MAX_DIGITS: Final = 18
MAX_STEP: Final = 10**_MAX_DIGITS - 1
_STEP: Final = re.compile(rf"(?:(.*)_)?(\d{{1,{_MAX_DIGITS}}})", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNames:
    """The naming scheme of a run's step directories: `[<prefix>_]<step>`, zero-padded or not.

    Orbax calls the two fields `step_prefix` and `step_format_fixed_length`.

    Attributes:
        prefix: Without the `_`.
        digits: The minimum number of digits; longer numbers are written in full.

    Example:
        >>> names = StepNames(prefix="ckpt", digits=6)
        >>> names.of(12), names.step("ckpt_000012"), names.step("12")
        ('ckpt_000012', 12, None)
    """

    prefix: str | None = None
    digits: int | None = None

    def __post_init__(self) -> None:
        if self.prefix is not None and not isinstance(self.prefix, str):
            raise TypeError(f"step_prefix must be a str, got {self.prefix!r}")
        name = self.of(0)
        if names.is_reserved(name) or any(mark in name for mark in "/\\\0"):
            raise ValueError(f"step_prefix {self.prefix!r} gives invalid step names ({name!r})")
        if self.digits is not None and self.digits > _MAX_DIGITS:
            raise ValueError(f"step_digits must be at most {_MAX_DIGITS}, got {self.digits}")

    def of(self, step: int) -> str:
        """Returns the name of a step."""
        number = f"{step:0{self.digits or 1}d}"
        return number if self.prefix is None else f"{self.prefix}_{number}"

    def step(self, name: str) -> int | None:
        """Returns the step of a name, or None if `of` never returns the name."""
        match = _STEP.fullmatch(name)
        if match is None or match[1] != self.prefix:
            return None
        step = int(match[2])
        return step if self.of(step) == name else None


def like_steps(entries: Sequence[str]) -> list[str]:
    """Returns the entries named like a step of any run: plain numbers first, then highest first."""
    found = []
    for entry in entries:
        match = _STEP.fullmatch(entry)
        if match is not None and not names.is_reserved(entry):
            found.append((match[1] is None, int(match[2]), entry))
    return [entry for _, _, entry in sorted(found, reverse=True)]


def guess_names(name: str, entries: Sequence[str]) -> StepNames:
    """Infers a run's naming scheme from the name of one step and the other entries."""
    match = _STEP.fullmatch(name)
    prefix = match[1] if match is not None else None
    others = [other for entry in entries if (other := _STEP.fullmatch(entry)) is not None]
    if match is not None and match[2].startswith("0") and match[2] != "0":
        return StepNames(prefix=prefix, digits=len(match[2]))
    # 12345 does not show that numbers are padded, 0099 beside it does; but 0099 cannot be in the
    # same run as 100.
    most = len(match[2]) if match is not None else 0
    widths = [
        len(other[2])
        for other in others
        if other[1] == prefix and other[2].startswith("0") and 1 < len(other[2]) <= most
    ]
    return StepNames(prefix=prefix, digits=max(widths, key=widths.count, default=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The job that may commit to a run: the last one to open it.

    Attributes:
        token: Unique to that opening.
        keep: The fields of its `KeepPolicy`, without functions.
    """

    token: str
    host: str
    pid: int
    opened_ns: int
    keep: Mapping[str, Any] = field(default_factory=dict)


def encode_owner(owner: Owner) -> bytes:
    """Encodes `_jaxckpt.owner`."""
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
    """Decodes `_jaxckpt.owner`; raises CorruptCheckpoint if it is malformed."""
    top = expect(jsontext.loads(data, file=file), dict, "the file", file=file)
    return Owner(
        token=expect(top.get("token"), str, "'token'", file=file),
        host=expect(top.get("host"), str, "'host'", file=file),
        pid=expect(top.get("pid"), int, "'pid'", file=file),
        opened_ns=expect(top.get("opened_ns"), int, "'opened_ns'", file=file),
        keep=expect(top.get("keep", {}), dict, "'keep'", file=file),
    )


def encode_doomed(steps: Sequence[str]) -> bytes:
    """Encodes `_jaxckpt.doomed`."""
    return jsontext.dumps({"steps": list(steps)})


def decode_doomed(data: bytes, *, file: str) -> list[str]:
    """Decodes `_jaxckpt.doomed`."""
    top = expect(jsontext.loads(data, file=file), dict, "the file", file=file)
    steps = expect(top.get("steps"), list, "'steps'", file=file)
    return [expect(step, str, "a step", file=file) for step in steps]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A reader's claim on a step, by directory name, until a point in time."""

    step: str
    expires_ns: int


def encode_lease(lease: Lease) -> bytes:
    return jsontext.dumps({"step": lease.step, "expires_ns": lease.expires_ns})


def decode_lease(data: bytes, *, file: str) -> Lease:
    top = expect(jsontext.loads(data, file=file), dict, "the file", file=file)
    return Lease(
        step=expect(top.get("step"), str, "'step'", file=file),
        expires_ns=expect(top.get("expires_ns"), int, "'expires_ns'", file=file),
    )
