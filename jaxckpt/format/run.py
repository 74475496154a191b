"""The root of a run: the names of its steps, and the small files beside them.

    _jaxckpt.run            {"id", "directory": URL, "check": digest of the two}
    _jaxckpt.steps          [directory names], where peers are to read the steps
    _jaxckpt.owner          {"token", "host", "pid", "opened_ns", "keep": {"last": 3, ...}}
    _jaxckpt.doomed         {"steps": [directory names], "owner": token, "move_to", "began_ns"}
    _jaxckpt.lease-<token>  {"step": directory name, "expires_ns"}

All are JSON. Times are wall clock, ns since 1970.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from itertools import islice
from typing import Any, Final, TypeVar

from jaxckpt.errors import damaged
from jaxckpt.format import jsontext, names
from jaxckpt.format.jsontext import expect, given

MAX_BYTES: Final = 1 << 20
# A longer number is a date or a hash, not a step.
_MAX_DIGITS: Final = 18
MAX_STEP: Final = 10**_MAX_DIGITS - 1
_LATEST_NS: Final = 1 << 63  # the year 2262; `time.ctime` raises far beyond
_STEP: Final = re.compile(rf"(?:(.*)_)?(\d{{1,{_MAX_DIGITS}}})", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNames:
    """The naming scheme of a run's step directories: `[<prefix>_]<step>`, zero-padded or not.

    Orbax calls the two fields `step_prefix` and `step_format_fixed_length`.

    Example:
        >>> names = StepNames(prefix="ckpt", digits=6)
        >>> names.of(12), names.step("ckpt_000012"), names.step("12")
        ('ckpt_000012', 12, None)
    """

    prefix: str | None = None  # without the `_`
    digits: int | None = None  # the minimum number of digits; longer numbers are written in full

    def __post_init__(self) -> None:
        if self.prefix is not None and not isinstance(self.prefix, str):
            raise TypeError(f"step_prefix must be a str, got {self.prefix!r}")
        name = self.of(0)
        if names.is_reserved(name) or any(mark in name for mark in "/\\\0"):
            raise ValueError(f"step_prefix {self.prefix!r} gives invalid step names ({name!r})")
        if self.digits is not None and self.digits > _MAX_DIGITS:
            raise ValueError(f"step_digits must be at most {_MAX_DIGITS}, got {self.digits}")

    def of(self, step: int) -> str:
        number = f"{step:0{self.digits or 1}d}"
        return number if self.prefix is None else f"{self.prefix}_{number}"

    def step(self, name: str) -> int | None:
        """Returns the step of a name, or None if `of` never returns the name."""
        match = _STEP.fullmatch(name)
        if match is None or match[1] != self.prefix:
            return None
        step = int(match[2])
        return step if self.of(step) == name else None


def is_like_step(entry: str) -> bool:
    """Returns whether a step of some run could have this name."""
    return _STEP.fullmatch(entry) is not None and not (names.is_reserved(entry) or "\\" in entry)


def is_free_in_root(name: str) -> bool:
    """Returns whether a user's directory in the root of a run may have this name."""
    is_known = name in (*names.TOP_FILES, names.ROOT_METADATA) or names.is_part_of_tree(name)
    is_path = name in ("", ".", "..") or any(mark in name for mark in "/\\\0")
    is_ours = names.is_reserved(name) or name.startswith(("_", ".jaxckpt-"))
    return not (is_known or is_path or is_ours or is_like_step(name))


def guess_names(
    entries: Iterable[str],
    is_step: Callable[[str], bool],
    is_copy: Callable[[str], bool] = lambda entry: False,
) -> list[StepNames]:
    """Infers the naming scheme of a run: the scheme that fits most steps.

    A padded number shows its scheme. 12345 does not show that numbers are padded, but 0099 beside
    it does.

    Args:
        entries: Names in the root, of anything.
        is_step: Asked about as few entries as possible, as it may take I/O.
        is_copy: Whether a step was saved under another name. Asked only about steps of a run that
            has several schemes, none for all; copies count only if there is nothing else.

    Returns:
        The scheme; several if none of them is the right one beyond doubt; nothing if no entry is a
        step.
    """
    like = sorted(filter(is_like_step, entries), key=number_of, reverse=True)
    shown: dict[StepNames, list[str]] = {}
    for entry in like:
        shown.setdefault(_shown_by(entry), []).append(entry)
    is_one = counts = cache(is_step)
    # One step, the highest, is enough where all are named alike.
    used = [naming for naming, examples in shown.items() if any(map(is_one, examples))]
    fits = {naming: {e for e in like if naming.step(e) is not None} for naming in used}
    if set().union(*fits.values()) not in fits.values():
        is_own = cache(lambda entry: is_one(entry) and not is_copy(entry))
        if own := [naming for naming in used if any(map(is_own, shown[naming]))]:
            used, counts = own, is_own
    # A prefix that ends in a number, such as a date, may differ in each job of a run.
    if len({naming.prefix for naming in used if (naming.prefix or "")[-1:].isdigit()}) > 1:
        return used
    for naming in sorted(used, key=lambda naming: -len(fits[naming])):
        mine, others = fits[naming], (fits[other] for other in used if other != naming)
        if all(_has_more(mine - theirs, theirs - mine, counts) for theirs in others):
            return [naming]
    return used


def shows_several(entries: Iterable[str]) -> bool:
    """Returns whether names may follow several schemes; only then does `guess_names` doubt."""
    return len(set(map(_shown_by, filter(is_like_step, entries)))) > 1


def number_of(entry: str) -> int:
    """Returns the number in the name of a step of any scheme."""
    return int(entry.rpartition("_")[2])


def _shown_by(entry: str) -> StepNames:
    prefix, _, number = entry.rpartition("_")
    is_padded = number.startswith("0") and number != "0"
    return StepNames(
        prefix=prefix if "_" in entry else None, digits=len(number) if is_padded else None
    )


def _has_more(some: set[str], others: set[str], is_step: Callable[[str], bool]) -> bool:
    """Returns whether more of `some` than of `others` are steps."""
    count = sum(map(is_step, others))
    more = islice(filter(is_step, sorted(some, reverse=True)), count, None)
    return next(more, None) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Names which run a directory has the steps of."""

    id: str  # random, made once with the run
    directory: str | None = ""  # in a local directory: the URL of the run; None if unknown


def decode_steps(data: bytes, *, file: str) -> list[str]:
    """Returns the names of steps; leaves out all other names."""
    return _steps_in(expect(jsontext.loads(data, file=file), list, "the file", file=file))


def _steps_in(found: list[Any]) -> list[str]:
    return [one for one in found if isinstance(one, str) and "/" not in one and is_like_step(one)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The job that may commit to a run: the last job to open it."""

    token: str  # unique to that opening
    host: str
    pid: int
    opened_ns: int
    keep: Mapping[str, Any] = field(default_factory=dict)  # its `KeepPolicy`, without functions
    first: str = ""  # the first saves that wrote to this disk, if it is one of several


def decode_metadata(data: bytes, *, file: str) -> dict[str, Any]:
    top = expect(jsontext.loads(data, file=file), dict, "the file", file=file)
    if posixpath.basename(file) == names.OLD_ROOT_METADATA_FILE:
        return top
    found = top.get("custom_metadata", top.get("custom", {}))  # the second until Orbax 0.11.0
    return expect(found, dict, "'custom_metadata'", file=file)


@dataclass(frozen=True, slots=True, kw_only=True)
class Doomed:
    """The steps that a writer is deleting, by directory name."""

    steps: Sequence[str] = ()
    owner: str = ""  # the token of the writer; "" if only it may finish the deletion
    move_to: str | None = None  # where the steps go instead, as in `KeepPolicy`
    began_ns: int = 0  # when, by the writer's clock; 0 from earlier releases


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A reader's claim on a step, by directory name, until a point in time."""

    step: str
    expires_ns: int
    owner: str = ""  # the token of the job whose upload it is; it ends when another owns the run


_TYPES: Final = {"str": str, "str | None": str, "int": int, "Sequence[str]": list}
RootFile = TypeVar("RootFile", Identity, Owner, Doomed, Lease)


def encode(record: Identity | Owner | Doomed | Lease) -> bytes:
    top = given({one.name: getattr(record, one.name) for one in fields(record)})
    return jsontext.dumps(top | ({"check": _checks(top)[0]} if "id" in top else {}))


def _checks(top: Mapping[str, Any]) -> list[str]:
    """Returns the digests of the id and the URL, and of the id alone, as it was before."""
    both = [top.get("id"), top.get("directory")]
    return [hashlib.sha256(ascii(one).encode()).hexdigest()[:16] for one in (both, both[0])]


def decode(kind: type[RootFile], data: bytes, *, file: str, **known: str) -> RootFile:
    """Decodes what `encode` made, or what it is with `known` fields; leaves out invalid steps."""
    top = expect(jsontext.loads(data, file=file), dict, "the file", file=file) | known
    values: dict[str, Any] = {}
    if "check" in top and top["check"] not in _checks(top):  # older releases wrote none
        raise damaged(file, "'id' or 'directory' is not what was written")
    for one in fields(kind):
        if top.get(one.name) is None and (one.default, one.default_factory) != (MISSING, MISSING):
            continue
        wanted = _TYPES.get(str(one.type), dict)
        found = values[one.name] = expect(top.get(one.name), wanted, f"'{one.name}'", file=file)
        if wanted is int and abs(found) > _LATEST_NS:
            raise damaged(file, f"'{one.name}' is too large")
        if wanted is list:
            values[one.name] = _steps_in([expect(step, str, "a step", file=file) for step in found])
    return kind(**values)
