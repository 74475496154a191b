"""Python values as JSON and back, for the states of data iterators.

A value that JSON restores exactly is written as it is; any other value as an object with one key:

    {"$tuple": [...]}   {"$dict": [[key, value], ...]}   {"$bytes": base64}   {"$int": "digits"}
    {"$array": [dtype, shape, base64]}   {"$scalar": [dtype, [], base64]}

A dict whose only key is one of these is also written as "$dict".
"""

from __future__ import annotations

import base64
import math
from typing import Any, Final

import numpy as np

from jaxckpt.errors import CorruptCheckpoint
from jaxckpt.format.arrays import dtype_of
from jaxckpt.format.jsontext import expect, expect_shape

_TAGS: Final = ("$tuple", "$dict", "$bytes", "$int", "$array", "$scalar")
# Other programs read JSON numbers as 64-bit.
_MAX_INT: Final = 1 << 63


def is_json(value: object) -> bool:
    """Returns whether JSON restores the value exactly."""
    if value is None or isinstance(value, (bool, str, float)) or type(value) is int:
        return type(value) in (type(None), bool, str, float, int)
    if type(value) is list:
        return all(map(is_json, value))
    if type(value) is dict:
        return all(type(key) is str for key in value) and all(map(is_json, value.values()))
    return False


def encode(value: object) -> Any:  # JSON
    """Returns the value as JSON, or raises TypeError if it lacks a JSON form."""
    if value is None or type(value) in (bool, str, float):
        return value
    if type(value) is int:
        return value if -_MAX_INT <= value < _MAX_INT else {"$int": str(value)}
    if type(value) is list:
        return [encode(child) for child in value]
    if type(value) is tuple:
        return {"$tuple": [encode(child) for child in value]}
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and not _is_tagged(value):
            return {key: encode(child) for key, child in value.items()}
        return {"$dict": [[encode(key), encode(child)] for key, child in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        data = np.asarray(value)
        dtype_of(data.dtype.name)  # raises if it could not be read again
        data = data.astype(data.dtype.newbyteorder("="), copy=False)
        text = base64.b64encode(data.tobytes()).decode()
        tag = "$scalar" if isinstance(value, np.generic) else "$array"
        return {tag: [data.dtype.name, list(data.shape), text]}
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} has no JSON form")


def decode(value: Any, *, file: str) -> Any:  # JSON
    if isinstance(value, list):
        return [decode(child, file=file) for child in value]
    if not isinstance(value, dict):
        return value
    if not _is_tagged(value):
        return {key: decode(child, file=file) for key, child in value.items()}
    ((tag, inner),) = value.items()
    try:
        match tag:
            case "$tuple":
                return tuple(
                    decode(child, file=file) for child in expect(inner, list, tag, file=file)
                )
            case "$dict":
                return {
                    decode(key, file=file): decode(child, file=file)
                    for key, child in expect(inner, list, tag, file=file)
                }
            case "$bytes":
                return base64.b64decode(inner, validate=True)
            case "$int":
                return int(expect(inner, str, tag, file=file))  # Python limits the digits
            case "$scalar":
                return _array(inner, file)[()]
            case _:
                return _array(inner, file)
    except (ValueError, TypeError) as error:
        raise CorruptCheckpoint(f"{file}: bad {tag}: {error}", file=file) from error


def _array(inner: Any, file: str) -> np.ndarray[Any, Any]:
    name, shape, text = expect(inner, list, "$array", file=file)
    dtype = dtype_of(expect(name, str, "a dtype", file=file))
    data = base64.b64decode(text, validate=True)
    dims = expect_shape(shape, "a shape", file=file)
    if math.prod(dims) * dtype.itemsize != len(data):
        raise ValueError(f"{name}{list(dims)} does not fit {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(dims).copy()


def _is_tagged(value: dict[Any, Any]) -> bool:
    return len(value) == 1 and next(iter(value)) in _TAGS
