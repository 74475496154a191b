"""Compares two checkpoints, read as streams. Needs no devices and no jax."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import tee
from typing import Final, final

import numpy as np

from jaxckpt._core.box import Box
from jaxckpt._core.check import explained
from jaxckpt._core.select import Globs, check_globs, selector
from jaxckpt._disk.find import at_rest
from jaxckpt._disk.found import Found
from jaxckpt._disk.item import open_tree
from jaxckpt._disk.native import Item
from jaxckpt._inspect.value_stream import (
    BUDGET_BYTES,
    Data,
    Moments,
    Values,
    as_numbers,
    blocks,
    boxes_of,
    data_of,
    finite,
    is_text,
    read_values,
)
from jaxckpt.format import names
from jaxckpt.format.tree import Leaf, Node, Path, Tree, path_text
from jaxckpt.storage import locate
from jaxckpt.types import DiffReport, LeafDiff

_MAX_TEXT: Final = 40
_EMPTY: Final = {"None": "None", "Dict": "{}", "List": "[]", "Tuple": "()"}
# Up to here float64 distinguishes neighbouring integers.
_EXACT: Final = float(1 << 53)


@explained("diff")
def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    item: str | None = None,
    only: Globs = None,
    skip: Globs = None,
    values: bool = True,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> DiffReport:
    """Compares two checkpoints: their containers, leaves, dtypes, shapes and values.

    Their chunks and formats may differ. Containers and keys are compared by type if both record
    it, as jaxckpt does. Without `item`, checkpoints with different items are not equal. A jax
    array, a numpy array and a Python number of one dtype and shape are equal; so are 0.0 and -0.0,
    and NaNs in the same place. A leaf with another dtype has changed; its values are compared as
    float64 or complex128, and integers exactly.

    Args:
        a, b: Checkpoints, items of checkpoints, or runs' roots (compares their newest good steps).
        item: Name of the item, if there are several trees.
        only, skip: Globs over leaf paths; the name of a container includes its leaves.
        values: Whether to compare values too, or only metadata.
        rtol, atol: Tolerances, as of `numpy.isclose`.

    Returns:
        A report. The comparison uses at most 256 MiB of memory, or a few chunks if they are larger.

    Raises:
        CheckpointNotFound: `a` or `b` lacks a committed checkpoint.
        CorruptCheckpoint: stored data is missing or damaged; the error names leaf and file.
        UnsupportedFormat: the item is not a tree.
        ValueError: `only` or `skip` matches no leaf.

    Example:
        >>> import tempfile, numpy as np, jaxckpt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jaxckpt.save(f"{folder}/a", {"w": np.float32([1, 2]), "step": 1})
        ...     jaxckpt.save(f"{folder}/b", {"w": np.float32([1, 4]), "step": 1})
        ...     report = jaxckpt.diff(f"{folder}/a", f"{folder}/b")
        >>> print(report.changed[0])
        w  float32[2]: 1 of 2 differ, at most by 2 (0.5 relative); norm 2.23607 -> 4.12311, of the
        difference 2
    """
    if not (rtol >= 0 and atol >= 0):
        raise ValueError(f"rtol and atol must be 0 or more, got {rtol!r} and {atol!r}")
    (storage_a, at_a), (storage_b, at_b) = locate(a), locate(b)

    def compare(found_a: Found, found_b: Found) -> DiffReport:
        pair = open_tree(found_a, item), open_tree(found_b, item)
        report = compare_items(*pair, only=only, skip=skip, values=values, rtol=rtol, atol=atol)
        if item is not None:
            return report
        others_a, others_b = _others(found_a, pair[0]), _others(found_b, pair[1])
        return replace(
            report,
            uncompared=tuple(sorted(others_a & others_b)),
            unmatched=tuple(sorted(others_a ^ others_b)),
        )

    return at_rest(storage_a, at_a, lambda a: at_rest(storage_b, at_b, partial(compare, a)))


def _others(found: Found, item: Item) -> set[str]:
    """Returns the items of a checkpoint beside the one compared, and its metrics."""
    names_of = {name for name, path in found.items.items() if path != item.path}
    return names_of - {names.METRICS_ITEM}


def compare_items(
    a: Item,
    b: Item,
    *,
    only: Globs = None,
    skip: Globs = None,
    values: bool = True,
    rtol: float = 0.0,
    atol: float = 0.0,
    budget_bytes: int = BUDGET_BYTES,
) -> DiffReport:
    """Compares two opened trees."""
    all_a = {leaf.path: leaf for leaf in a.tree.leaves}
    all_b = {leaf.path: leaf for leaf in b.tree.leaves}
    check_globs(only, skip, list(all_a | all_b), where=f"{a.path}, or {b.path},")
    chosen = selector(only, skip)
    both = [path for path in all_a if path in all_b and chosen(path)]
    pairs = {path: _Pair(all_a[path], all_b[path], rtol=rtol, atol=atol) for path in both}
    if values:
        _read(a, b, pairs, budget_bytes)
    containers = [
        LeafDiff(path=path_text(path), a=_container(one), b=_container(other), size=0)
        for path, one, other in _containers_of_both(a.tree, b.tree)
        if path not in pairs and chosen(path) and _keys(one) != _keys(other)
    ]
    return DiffReport(
        a=a.path,
        b=b.path,
        only_a=tuple(path_text(p) for p in all_a if p not in all_b and chosen(p)),
        only_b=tuple(path_text(p) for p in all_b if p not in all_a and chosen(p)),
        changed=(*containers, *(pair.result() for pair in pairs.values() if pair.differs)),
        same_paths=tuple(pair.a.text for pair in pairs.values() if not pair.differs),
    )


def _read(a: Item, b: Item, pairs: Mapping[Path, _Pair], budget_bytes: int) -> None:
    half = budget_bytes // 2

    def parts() -> Iterator[tuple[_Pair, Data, Data, Box]]:
        for pair in pairs.values():
            if pair.data is not None:
                pair.differing = 0
                for box in boxes_of(pair.data, budget_bytes=half):
                    yield pair, *pair.data, box

    of_a, of_b = tee(parts())
    wanted_a = ((pair.a, data, box) for pair, data, _, box in of_a)
    wanted_b = ((pair.b, data, box) for pair, _, data, box in of_b)
    with (
        closing(read_values(a, wanted_a, budget_bytes=half)) as stream_a,
        closing(read_values(b, wanted_b, budget_bytes=half)) as stream_b,
    ):
        for (leaf, values_a), (_, values_b) in zip(stream_a, stream_b, strict=True):
            for block in blocks(values_a, values_b):
                pairs[leaf.path].add(*block)


@final
class _Pair:
    """A leaf that both checkpoints have, and the differences found so far."""

    def __init__(self, a: Leaf, b: Leaf, *, rtol: float, atol: float) -> None:
        self.a, self.b = a, b
        self.data: tuple[Data, Data] | None = None  # None if the values cannot be compared
        data_a, data_b = data_of(a), data_of(b)
        self._shapes = [None if data is None else data.shape for data in (data_a, data_b)]
        self._is_text = is_text(a)
        # Text is compared neither with numbers nor with text of another length.
        is_alike = self._is_text == is_text(b) and self._shapes[0] == self._shapes[1]
        if data_a is not None and data_b is not None and is_alike:
            self.data = data_a, data_b
        self._rtol, self._atol = rtol, atol
        self.differing: int | None = None  # None until the values are compared
        self._max_abs = self._max_rel = 0.0
        self._nan_a = self._nan_b = 0
        self._same = Moments()  # of the blocks with equal bits
        self._others = Moments(), Moments(), Moments()  # of a, b and their differences

    @property
    def differs(self) -> bool:
        """Returns whether a difference was found so far."""
        types_differ = _type(self.a) != _type(self.b) or self._shapes[0] != self._shapes[1]
        return types_differ or bool(self.differing)

    def add(self, a: Values, b: Values) -> None:
        """Compares a one-dimensional block of both."""
        is_same = a.dtype == b.dtype and np.array_equal(a.view(np.uint8), b.view(np.uint8))
        a, b = as_numbers(a), as_numbers(b)
        nan_a = int(np.count_nonzero(np.isnan(a)))
        self._nan_a += nan_a
        self._nan_b += nan_a if is_same else int(np.count_nonzero(np.isnan(b)))
        if is_same:
            self._same.add(finite(a))
            return
        found = compare_block(a, b, rtol=self._rtol, atol=self._atol)
        self.differing = (self.differing or 0) + found.differing
        self._max_abs = max(self._max_abs, found.max_abs)
        self._max_rel = max(self._max_rel, found.max_rel)
        for moments, values in zip(self._others, (a, b, found.gaps), strict=True):
            moments.add(finite(values))

    def result(self) -> LeafDiff:
        shape = self._shapes[0]
        diff = LeafDiff(
            path=self.a.text,
            a=_shown(self.a),
            b=_shown(self.b),
            size=0 if shape is None else math.prod(shape),
            differing=self.differing,
        )
        if self.differing is None or self._is_text:
            return diff
        of_a, of_b, of_gaps = self._others
        return replace(
            diff,
            max_abs=self._max_abs,
            max_rel=self._max_rel,
            norm_a=math.hypot(self._same.norm, of_a.norm),
            norm_b=math.hypot(self._same.norm, of_b.norm),
            norm_diff=of_gaps.norm,
            nan_a=self._nan_a,
            nan_b=self._nan_b,
        )


# --- containers -----------------------------------------------------------------------------


def _containers_of_both(a: Tree, b: Tree) -> Iterator[tuple[Path, Node, Node]]:
    """Yields the containers at the same place in both trees, if both recorded their types."""
    left: list[tuple[Path, Node | None, Node | None]] = [((), a.root, b.root)]
    while left and a.typed and b.typed:
        path, one, other = left.pop()
        if one is None or other is None:
            continue
        yield path, one, other
        children = dict(zip(other.names, other.children, strict=True))
        for name, child in zip(one.names, one.children, strict=True):
            left.append(((*path, name), child, children.get(name)))


def _keys(node: Node) -> tuple[str, dict[str, str]]:
    """Returns the type of a container, and those of the keys that are not strings."""
    keys = zip(node.names, node.keys or (), strict=False)
    return _kind(node), {name: type(key).__name__ for name, key in keys if type(key) is not str}


def _kind(node: Node) -> str:
    """Returns the type of a container; a class that was moved to another module is the same."""
    return node.type if node.cls is None else node.cls[1]


def _container(node: Node) -> str:
    kind, keys = _keys(node)
    return f"{kind} with keys of type {', '.join(sorted({*keys.values()}))}" if keys else kind


# --- leaves as text --------------------------------------------------------------------------


def _type(leaf: Leaf) -> str:
    """Returns the type of a leaf as text; jax and numpy arrays have the same."""
    dims = "[" + ",".join(map(str, leaf.shape)) + "]"
    if leaf.kind == "key":
        return f"key<{leaf.key_impl}>{dims}"
    if leaf.kind == "empty":
        return _EMPTY.get(leaf.dtype, leaf.dtype)
    return leaf.kind if is_text(leaf) or data_of(leaf) is None else f"{leaf.dtype}{dims}"


def _shown(leaf: Leaf) -> str:
    """Returns the type of a leaf, with the beginning of a text."""
    value = leaf.value
    if not isinstance(value, (str, bytes)):
        return _type(leaf)
    text = value if leaf.kind == "int" else repr(value)
    return f"{_type(leaf)} {text if len(text) <= _MAX_TEXT else f'{text[:_MAX_TEXT]}...'}"


# --- values ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The differences between two blocks of values; see also `LeafDiff`."""

    gaps: Values  # float64[n], the differences; NaN if a value is NaN
    differing: int
    max_abs: float
    max_rel: float


def compare_block(a: Values, b: Values, *, rtol: float, atol: float) -> Compared:
    """Compares two blocks of the same size.

    Example:
        >>> found = compare_block(np.array([1, 2]), np.array([1.0, 2.5]), rtol=0, atol=0)
        >>> found.differing, found.max_abs, found.max_rel
        (1, 0.5, 0.2)
    """
    if a.dtype.kind in "iu" and b.dtype.kind in "iu":
        same = a == b
        gaps, sizes = _integer_gaps(a, b), np.abs(b.astype(np.float64))
        return _compared(gaps, sizes, same, rtol=rtol, atol=atol)
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    a, b = a.astype(wide, copy=False), b.astype(wide, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        same, gaps, sizes = a == b, np.abs(a - b), np.abs(b)
    gaps[same] = 0.0  # also of infinities
    gaps[np.isnan(a) | np.isnan(b)] = np.nan  # also of complex numbers with one infinite part
    same = _same(a.real, b.real) & _same(a.imag, b.imag)
    return _compared(gaps, sizes, same, rtol=rtol, atol=atol)


def _same(a: Values, b: Values) -> Values:
    """Returns where real numbers are equal, or both NaN."""
    return (a == b) | (np.isnan(a) & np.isnan(b))


def _compared(gaps: Values, sizes: Values, same: Values, *, rtol: float, atol: float) -> Compared:
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        # As in numpy.isclose.
        close = same | ((gaps <= atol + rtol * sizes) & np.isfinite(sizes))
        relative = np.where(gaps == 0, 0.0, gaps / sizes)
        relative[np.isnan(relative) & ~np.isnan(gaps)] = np.inf  # both are infinite
    return Compared(
        gaps=gaps,
        differing=gaps.size - int(np.count_nonzero(close)),
        max_abs=float(np.fmax.reduce(gaps, initial=0.0)),
        max_rel=float(np.fmax.reduce(relative, initial=0.0)),
    )


def _integer_gaps(a: Values, b: Values) -> Values:
    gaps = np.abs(a.astype(np.float64) - b.astype(np.float64))
    if max(a.dtype.itemsize, b.dtype.itemsize) < 8:
        return gaps
    # Large neighbouring integers are subtracted exactly, modulo 2**64.
    up, down = a.astype(np.uint64), b.astype(np.uint64)
    exact = np.where(a >= b, up - down, down - up).astype(np.float64)
    return np.where(gaps < _EXACT, exact, gaps)
