"""The ledger of a run, `_jaxckpt.ledger`: one line of JSON for each `Start`, in order.

Only the newest lines are kept. A torn or foreign line is skipped: a ledger is never damaged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
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
    known = {name: fact for name, fact in asdict(start).items() if fact not in (None, "")}
    texts = {name: fact[:_MAX_TEXT] for name, fact in known.items() if isinstance(fact, str)}
    numbers = {name: round(fact, 3) for name, fact in known.items() if name not in texts}
    return jsontext.dumps(texts | numbers)


def _decode(line: bytes) -> Start | None:
    if not line or len(line) > _MAX_LINE:
        return None
    try:
        top = expect(jsontext.loads(line, file=names.LEDGER), dict, "a line", file=names.LEDGER)
        known = [one for one in fields(Start) if one.name in top]
        return Start(**{one.name: _fact(one.name, one.default, top[one.name]) for one in known})
    except CorruptCheckpoint:
        return None


def _fact(name: str, default: object, found: Any) -> Any:  # JSON
    """Returns what was found if it is of the type of the default; None stands for an int."""
    if isinstance(default, str):
        return expect(found, str, f"'{name}'", file=names.LEDGER)[:_MAX_TEXT]
    is_seconds = isinstance(default, float)
    is_number = type(found) is int or (type(found) is float and is_seconds)
    if not is_number or not 0 <= found <= (_MAX_SECONDS if is_seconds else MAX_STEP):
        raise damaged(names.LEDGER, f"'{name}' is {jsontext.short(found)}")
    return found
