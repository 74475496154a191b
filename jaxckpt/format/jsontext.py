"""JSON from files that nobody vouches for: limits before parsing, one error type after it."""

from __future__ import annotations

import json
from typing import Any, Final, TypeVar

from jaxckpt.errors import CorruptCheckpoint

# A tree of a million leaves takes about 400 MB of `_METADATA`; nothing honest is larger.
MAX_BYTES: Final = 1 << 30
MAX_DEPTH: Final = 200
_CONTAINERS: Final = (dict, list, tuple)

T = TypeVar("T")


def loads(data: bytes, *, file: str) -> Any:  # callers check each value with `expect`
    """Parses one JSON value.

    Raises:
        CorruptCheckpoint: not UTF-8 JSON, nested deeper than `MAX_DEPTH`, or larger than
            `MAX_BYTES`. `file` is the place to name.
    """
    if len(data) > MAX_BYTES:
        raise CorruptCheckpoint(
            f"{file}: {len(data)} bytes of JSON; at most {MAX_BYTES} are read", file=file
        )
    try:
        value = json.loads(data)
        if b"\\ud" in data or b"\\uD" in data:
            # Half of a surrogate pair is no text; nothing later expects one.
            dumps(value, allow_nan=True)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{file}: not JSON: {error}", file=file) from error
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
    return text.encode()


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
