"""Casts that lose no value.

The kinds are ordered: bool, unsigned, signed, float, complex. A cast to the same or a later kind is
allowed, but each value is checked: an integer must stay the same number, and a finite value finite.
Rounding a float to fewer bits is allowed.
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
from ml_dtypes import finfo

from jaxckpt._core.text import nearest
from jaxckpt.errors import Difference, TreeMismatch
from jaxckpt.format.arrays import AS_BYTES_DTYPES, STORABLE_DTYPES

_KINDS: Final = ("bool", "uint", "int", "float", "complex")
_FLOAT: Final = _KINDS.index("float")

# Floats of few bits lack some values. These lack none; an infinity, a NaN or more are missing in
# all others.
_COMPLETE: Final = frozenset({"float64", "float32", "float16", "bfloat16"})
_SATURATED: Final = frozenset({"float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"})  # inf is the max
_POSITIVE: Final = frozenset({"float8_e8m0fnu"})  # no zero, no sign

Values = np.ndarray[Any, Any]


def kind_rank(dtype: np.dtype[Any]) -> int:
    """Returns the place of a dtype's kind in the order; -1 if it is not a number.

    Example:
        >>> kind_rank(np.dtype("bool")), kind_rank(np.dtype("int8")), kind_rank(np.dtype("object"))
        (0, 2, -1)
    """
    return next((i for i, kind in enumerate(_KINDS) if kind in dtype.name), -1)


def floating(dtype: Any) -> str | None:  # whatever numpy takes for a dtype
    """Returns the name of a floating-point dtype; ValueError for any other dtype.

    Example:
        >>> floating("bfloat16"), floating(np.float32)
        ('bfloat16', 'float32')
    """
    if dtype is None:
        return None
    # A string may name a dtype that numpy lacks.
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if not is_floating(name) or name not in STORABLE_DTYPES | AS_BYTES_DTYPES:
        known = sorted(filter(is_floating, STORABLE_DTYPES))
        raise ValueError(
            f"dtype {name!r} is not a floating-point dtype; only those are cast. "
            f"{nearest(name, known).replace('It has', 'These are')}"
        )
    return name


def is_floating(name: str) -> bool:
    return name.startswith(("float", "bfloat"))


def cast(values: Values, dtype: np.dtype[Any], *, leaf: str, where: str) -> Values:
    """Returns the values in another dtype; TreeMismatch names the leaf if some would be lost."""
    if values.dtype == dtype:
        return values
    with np.errstate(all="ignore"):
        try:
            out = values.astype(dtype)
        except TypeError:  # numpy cannot cast between some ml_dtypes
            out = values.astype(np.float32).astype(dtype)
        exact = _exact(values, out)
    if np.all(exact):
        return out
    lost = values[~np.asarray(exact)]
    found = f"{values.dtype.name} with {lost.size} values such as {lost[0]}"
    difference = Difference(leaf=leaf, wanted=dtype.name, saved=found)
    raise TreeMismatch(
        f"{where}: a cast would lose values\n  {difference}\n"
        f"Ask for a dtype that holds these values, such as {values.dtype.name}, and convert later.",
        [difference],
    )


def _exact(values: Values, out: Values) -> Any:  # an array of bools, or one bool for all
    target = kind_rank(out.dtype)
    if not values.size or target == 0:
        return True
    if kind_rank(values.dtype) < _FLOAT:
        return _exact_integers(values, out)
    if target >= _FLOAT:
        if out.dtype.kind == "c":
            real = _exact(values.real, out.real)
            return real & _exact(values.imag, out.imag) if values.dtype.kind == "c" else real
        most = float(finfo(out.dtype).max)
        if out.dtype.name in _COMPLETE and float(finfo(values.dtype).max) <= most:
            return True
        # Nearly always enough, and much faster than to look at each value; false if one is NaN.
        if out.dtype.name not in _POSITIVE and (
            -most <= float(values.min()) <= float(values.max()) <= most
        ):
            return True
        exact = np.isfinite(values) == np.isfinite(out)
        return exact & (np.abs(values) <= most) if out.dtype.name in _SATURATED else exact
    low, high = _limits(out.dtype)
    whole = np.trunc(values.astype(np.float64))
    return (whole >= low) & (whole < high + 1.0)


def _exact_integers(values: Values, out: Values) -> Any:  # as `_exact`
    if values.dtype == np.bool_:
        values = values.view(np.uint8)
    least, most = int(values.min()), int(values.max())
    if kind_rank(out.dtype) < _FLOAT:
        low, high = _limits(out.dtype)
        return (low <= least and most <= high) or (values >= low) & (values <= high)
    limits = finfo(out.dtype)
    # The float represents every integer up to this value exactly.
    exact = min(2 << limits.nmant, float(limits.max))
    if max(-least, most) <= exact and out.dtype.name not in _POSITIVE:
        return True
    low, high = _limits(values.dtype)
    wide = (out.real if out.dtype.kind == "c" else out).astype(np.float64)
    # Outside of the limits, the processor decides what becomes of a float.
    return (wide >= low) & (wide < high + 1.0) & (wide.astype(values.dtype) == values)


def _limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Returns the least and the greatest value of an integer dtype."""
    bits = int(re.sub(r"\D", "", dtype.name))
    return (0, (1 << bits) - 1) if dtype.name[0] == "u" else (-1 << bits - 1, (1 << bits - 1) - 1)
