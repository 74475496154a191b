"""JSON from files that nobody vouches for: limits before parsing, one error type after it."""

from __future__ import annotations

import json
import re
from typing import Any, Final, TypeVar

from jaxckpt.errors import CorruptCheckpoint

# A tree of a million leaves takes about 400 MB of `_METADATA`; nothing honest is larger.
MAX_BYTES: Final = 512 << 20
MAX_DEPTH: Final = 200
_CONTAINERS: Final = (dict, list, tuple)
# Each takes far more memory than its two bytes in the file. In a tree there are about eleven for
# each leaf, of 35 bytes each; a file may have these many, and beyond them one for 32 bytes.
_MAX_DENSE: Final = 4 << 20
_BYTES_FOR_EACH: Final = 32

# What a JSON value begins with.
_START: Final = re.compile(rb'[ \t\r\n]*+[{\["\-0-9tfnNI]')
# So many containers at once, and over what is in strings: a match for each would take seconds.
_AT_ONCE: Final = 64
_CONTAINERS_IN_TEXT: Final = re.compile(
    rb'(?:[^"{\[]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"{\[]*+)*+[{\[]){%d}+' % _AT_ONCE, re.DOTALL
)

T = TypeVar("T")


def loads(data: bytes, *, file: str) -> Any:  # callers check each value with `expect`
    """Parses one JSON value.

    Raises:
        CorruptCheckpoint: not UTF-8 JSON, nested deeper than `MAX_DEPTH`, larger than
            `MAX_BYTES`, or more than there is memory for. `file` is the place to name.
    """
    if problem := _size_problem(data):
        raise CorruptCheckpoint(f"{file}: {problem}", file=file)
    if not _START.match(data):
        raise CorruptCheckpoint(f"{file}: not JSON: it begins with {data[:8]!r}", file=file)
    if (at := data.find(b"\0")) >= 0:
        raise CorruptCheckpoint(f"{file}: not JSON: byte {at} is zero", file=file)
    try:
        return _parse(data, file)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{file}: not JSON: {error}", file=file) from error
    except MemoryError:
        pass  # and what was made so far is let go of
    raise CorruptCheckpoint(
        f"{file}: {len(data)} bytes of JSON take more memory than there is", file=file
    )


def _parse(data: bytes, file: str) -> Any:  # JSON
    # As text: of bytes, the parser would guess the encoding.
    value = json.loads(data.decode())
    if b"\\ud" in data or b"\\uD" in data:
        # Half of a surrogate pair is no text; nothing later expects one.
        dumps(value, allow_nan=True)
    _check_depth(value, file)
    return value


def dumps(value: object, *, allow_nan: bool = False) -> bytes:
    """Encodes a JSON value as one line of UTF-8.

    Raises:
        ValueError: `loads` would refuse it, or it is no JSON (NaN, unless allowed).
    """
    try:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=allow_nan)
        _check_depth(value, "JSON")
    except (RecursionError, CorruptCheckpoint) as error:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from error
    data = text.encode()
    if problem := _size_problem(data):
        raise ValueError(problem)
    return data


def expect(value: Any, kind: type[T], what: str, *, file: str) -> T:
    """Returns `value` if it is of the wanted JSON type (bool is no int here)."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise CorruptCheckpoint(
            f"{file}: {what} should be {kind.__name__}, found {_short(value)}", file=file
        )
    return value


def expect_shape(value: object, what: str, *, file: str) -> tuple[int, ...]:
    """Returns a tuple of non-negative ints, as the JSON list of a shape."""
    dims = tuple(expect(value, list, what, file=file))
    for dim in dims:
        if expect(dim, int, what, file=file) < 0 or dim >= 1 << 62:
            raise CorruptCheckpoint(f"{file}: {what} has an impossible size {dim}", file=file)
    if len(dims) > 32:
        raise CorruptCheckpoint(f"{file}: {what} has {len(dims)} dimensions, at most 32", file=file)
    return dims


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _size_problem(data: bytes) -> str | None:
    if len(data) > MAX_BYTES:
        return f"{len(data)} bytes of JSON; at most {MAX_BYTES} are read"
    most = _MAX_DENSE + len(data) // _BYTES_FOR_EACH
    # First with those that are in strings: that is quick, and mostly enough.
    if data.count(b"{") + data.count(b"[") > most and _has_more_containers(data, most):
        return f"{len(data)} bytes of JSON with more than {most} objects and lists"
    return None


def _has_more_containers(data: bytes, most: int) -> bool:
    end = 0
    for _ in range(most // _AT_ONCE + 1):
        # Not with a search, which would go on inside a string.
        found = _CONTAINERS_IN_TEXT.match(data, end)
        if found is None:
            return False
        end = found.end()
    return True


def _check_depth(value: object, file: str) -> None:
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, _CONTAINERS)
        ]
        if not level:
            return
    raise CorruptCheckpoint(f"{file}: JSON nested deeper than {MAX_DEPTH} levels", file=file)
