"""The ledger of a run, `_jaxckpt.ledger`: one line of JSON for each start of a job, in order.

    {"start", "end", "opened_s", "seen_s", "restore_s", "trained_s", "blocked_s", "saving_s",
     "saves", "began", "first", "reached", "saved"}

Only the newest lines are kept. A torn or foreign line is skipped: a ledger is never damaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from jaxckpt.errors import CorruptCheckpoint, damaged
from jaxckpt.format import jsontext, names
from jaxckpt.format.jsontext import expect
from jaxckpt.format.run import MAX_STEP

MAX_BYTES: Final = 1 << 18  # of the file
_MAX_STARTS: Final = 256
_MAX_LINE: Final = 1 << 10
_MAX_TEXT: Final = 100
_MAX_SECONDS: Final = 1e11  # since 1970: the year 5138

_TEXTS: Final = ("start", "end")
_SECONDS: Final = ("opened_s", "seen_s", "restore_s", "trained_s", "blocked_s", "saving_s")
_COUNTS: Final = ("saves",)
_STEPS: Final = ("began", "first", "reached", "saved")

CLOSED: Final = "closed"
NOT_CLOSED: Final = "not closed"
PREEMPTED: Final = "preempted"
WENT_BACK: Final = "went back"
FAILED: Final = "failed: "  # and what with


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a job, as far as the ledger has it. Times are in seconds, by the wall clock."""

    start: str = ""  # unique to it, but shared by the parts of a job that went back to a step
    end: str = ""  # why it ended; "" while it runs, or if it was killed or lost
    opened_s: float = 0.0
    seen_s: float = 0.0  # when it was last known to run
    restore_s: float = 0.0  # spent in restores
    trained_s: float = 0.0  # from step `first` to step `reached`, without time blocked
    blocked_s: float = 0.0  # in which saves blocked the caller
    saving_s: float = 0.0  # from the calls of the saves to their commits, added up
    saves: int = 0
    began: int | None = None  # the step that it went on from, 0 if the run had none
    first: int | None = None  # the first step for which a save was offered
    reached: int | None = None  # the newest such step
    saved: int | None = None  # the newest step that it committed


def encode_ledger(starts: Iterable[Start]) -> bytes:
    """Encodes the newest starts."""
    return b"".join(_encode(one) + b"\n" for one in [*starts][-_MAX_STARTS:])


def decode_ledger(data: bytes) -> list[Start]:
    """Decodes the lines that are whole, at most as many as `encode_ledger` keeps."""
    found = [_decode(line) for line in data.rsplit(b"\n", _MAX_STARTS + 1)[-_MAX_STARTS - 1 :]]
    return [start for start in found if start is not None][-_MAX_STARTS:]


def _encode(start: Start) -> bytes:
    known = {name: value for name, value in asdict(start).items() if value not in (None, "")}
    texts = {name: known[name][:_MAX_TEXT] for name in _TEXTS if name in known}
    seconds = {name: round(known[name], 3) for name in _SECONDS}
    return jsontext.dumps(known | texts | seconds)


def _decode(line: bytes) -> Start | None:
    if not line or len(line) > _MAX_LINE:
        return None
    try:
        top = expect(jsontext.loads(line, file=names.LEDGER), dict, "a line", file=names.LEDGER)
        facts = {name: _number(top, name, _MAX_SECONDS) for name in _SECONDS}
        facts |= {name: _number(top, name, MAX_STEP) for name in _COUNTS}
        facts |= {name: int(_number(top, name, MAX_STEP)) for name in _STEPS if name in top}
        texts = {name: _text(top, name) for name in _TEXTS}
    except CorruptCheckpoint:
        return None
    return Start(**{**facts, **texts})


def _text(top: Mapping[str, Any], name: str) -> str:
    return expect(top.get(name, ""), str, f"'{name}'", file=names.LEDGER)[:_MAX_TEXT]


def _number(top: Mapping[str, Any], name: str, most: float) -> Any:
    found = top.get(name, 0)
    is_number = type(found) is int or (type(found) is float and name in _SECONDS)
    if not is_number or not 0 <= found <= most:
        raise damaged(names.LEDGER, f"'{name}' is {jsontext.short(found)}")
    return found
