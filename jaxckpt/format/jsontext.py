"""JSON from untrusted files: limits before parsing, one error type after it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeVar

from jaxckpt.errors import CorruptCheckpoint, damaged, lfs_problem

# A tree of a million leaves takes about 400 MB of `_METADATA`.
MAX_BYTES: Final = 512 << 20
MAX_DEPTH: Final = 200
MAX_DIMS: Final = 32  # of a shape; TensorStore has the same limit
# A container takes far more memory than its two bytes in the file. A tree has about eleven for each
# leaf, of 35 bytes each. A file may have `_MAX_DENSE`, plus one for every 32 bytes.
_MAX_DENSE: Final = 4 << 20
_BYTES_FOR_EACH: Final = 32

# The beginning of a JSON value.
_START: Final = re.compile(rb'[ \t\r\n]*+[{\["\-0-9tfnNI]')
_ALIKE: Final = bytes.maketrans(b"[]", b"{}")
# All bytes but quotes and brackets. Without them a string without brackets is two quotes, and the
# text between the other quotes is inside and outside of strings by turns.
_OTHERS: Final = bytes({*range(256)} - {*b'"[]{}'})
_AT_ONCE: Final = 1 << 20

T = TypeVar("T")


def loads(data: bytes, *, file: str) -> Any:  # callers check each value with `expect`
    """Parses one JSON value.

    Raises:
        CorruptCheckpoint: the data is not UTF-8 JSON, nested deeper than `MAX_DEPTH`, larger than
            `MAX_BYTES`, or does not fit in memory. `file` appears in the message.
    """
    if problem := _size_problem(data):
        raise damaged(file, problem)
    if not _START.match(data):
        raise damaged(file, lfs_problem(data) or f"not JSON: it begins with {data[:8]!r}")
    if (at := data.find(b"\0")) >= 0:
        raise damaged(file, f"not JSON: byte {at} is zero")
    try:
        # Decoded here, since the parser would guess the encoding of bytes.
        value = json.loads(data.decode())
        if b"\\ud" in data or b"\\uD" in data:
            # Half of a surrogate pair is not text; nothing later expects one.
            dumps(value, allow_nan=True)
        _check_depth(_brackets(data), file)
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"not JSON: {error}") from error
    except MemoryError:
        value = None  # frees what was made so far, before the error is made
        what = f"{len(data)} bytes of JSON take more memory than there is"
        raise damaged(file, what) from None
    return value


def dumps(value: object, *, allow_nan: bool = False) -> bytes:
    """Encodes a JSON value as one line of UTF-8.

    Raises:
        ValueError: `loads` would refuse the result, or the value is not JSON (NaN, unless allowed).
    """
    try:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=allow_nan)
        _check_depth(_brackets(data := text.encode()), "JSON")
    except (RecursionError, CorruptCheckpoint) as error:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from error
    if problem := _size_problem(data):
        raise ValueError(problem)
    return data


def expect(value: Any, kind: type[T], what: str, *, file: str) -> T:
    """Returns `value` if it has the wanted JSON type (a bool does not count as an int)."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise damaged(file, f"{what} must be {kind.__name__}, got {short(value)}")
    return value


def expect_all(values: Collection[Any], kind: type[T], what: str, *, file: str) -> Collection[T]:
    """Returns the values if all of them have the wanted JSON type."""
    if {*map(type, values)} - {kind}:
        for value in values:
            expect(value, kind, what, file=file)
    return values


def maybe_expect(value: Any, kind: type[T], what: str, *, file: str) -> T | None:
    """Returns None for a field that is missing or null; else does the same as `expect`."""
    return None if value is None else expect(value, kind, what, file=file)


def given(fields: Mapping[str, object]) -> dict[str, Any]:
    """Returns the fields that are not None, to be written."""
    return {name: value for name, value in fields.items() if value is not None}


def find(value: Any, pointer: str) -> Any:
    """Returns what Orbax wrote under a name: by one key, or by JSON pointer; None if nothing."""
    for part in [pointer] if pointer in value else pointer.split("/"):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def expect_shape(value: object, what: str, *, file: str) -> tuple[int, ...]:
    """Returns the JSON list of a shape as a tuple of non-negative ints."""
    dims: list[Any] = value if isinstance(value, list) else [None]
    is_shape = all(type(dim) is int and 0 <= dim < 1 << 62 for dim in dims)
    if not is_shape or len(dims) > MAX_DIMS:
        raise damaged(
            file, f"{what} must be a list of at most {MAX_DIMS} sizes, got {short(value)}"
        )
    return tuple(dims)


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _size_problem(data: bytes) -> str | None:
    if len(data) > MAX_BYTES:
        return f"{len(data)} bytes of JSON, the limit is {MAX_BYTES}"
    most = _MAX_DENSE + len(data) // _BYTES_FOR_EACH
    # The quick count includes brackets in strings; only if it is too high, count exactly.
    if data.count(b"{") + data.count(b"[") > most and _brackets(data).count(b"{") > most:
        return f"more than {most} objects and lists in {len(data)} bytes of JSON"
    return None


def _brackets(data: bytes) -> bytes:
    """Returns the brackets outside of strings, as braces; of bad JSON, all before its mistake."""
    text = data.replace(rb"\\", b"").replace(rb"\"", b"").translate(_ALIKE, _OTHERS)
    text, found, is_inside = text.replace(b'""', b""), bytearray(), False
    for start in range(0, len(text), _AT_ONCE):  # each piece takes far more memory than its bytes
        pieces = text[start : start + _AT_ONCE].split(b'"')
        found += b"".join(pieces[is_inside::2])
        is_inside ^= len(pieces) % 2 == 0
    return bytes(found)


def _check_depth(brackets: bytes, file: str) -> None:
    for _ in range(MAX_DEPTH):
        if not (brackets := brackets.replace(b"{}", b"")):
            return
    raise damaged(file, f"JSON nested deeper than {MAX_DEPTH} levels")
