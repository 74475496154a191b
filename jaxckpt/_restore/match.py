"""Matches saved leaves to wanted leaves, and reports every mismatch before anything is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final, Literal, NamedTuple

import jax
import numpy as np
from jax import tree_util
from jax.core import Tracer
from jax.experimental.layout import Layout

from jaxckpt._core.cast import kind_rank
from jaxckpt._core.check import check_dtype, check_type
from jaxckpt._core.pytree import SCALARS, check_levels, is_empty, is_key_dtype, key_path
from jaxckpt._core.select import Globs, Report, check_globs, no_leaf, selector
from jaxckpt._restore import mismatch
from jaxckpt.errors import Difference, TreeMismatch
from jaxckpt.format.arrays import dtype_of
from jaxckpt.format.tree import ARRAY_KINDS, Leaf, LeafKind, Path, parse_path, path_text
from jaxckpt.types import OnProgress, RestoreReport

# Kinds whose values are numbers in an array.
_NUMERIC: Final = frozenset({"array", "numpy", "generic", "int", "float", "complex", "bool"})
_CHOICES: Final = {  # the default first, but for "auto"
    "missing": ("error", "keep"),
    "extra": ("error", "ignore"),
    "read_once": (True, False, "auto"),
    "as_numpy": (False, True),
    "resize": (False, True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """Describes how to restore a tree; the fields are the arguments of `jaxckpt.restore`."""

    mesh: jax.sharding.Mesh | None = None
    shardings: Any = None  # a tree of shardings, or a function
    dtype: Any = None  # whatever numpy takes for a dtype
    as_numpy: bool = False
    only: Globs = None
    skip: Globs = None
    rename: Mapping[str, str] | None = None
    missing: Literal["error", "keep"] = "error"
    extra: Literal["error", "ignore"] = "error"
    resize: bool = False
    report: Callable[[RestoreReport], None] | None = None
    budget_bytes: int = 1 << 30
    read_once: bool | Literal["auto"] = "auto"
    on_progress: OnProgress | None = None
    timeout_s: float = 1200.0  # limit of the wait for other processes
    unmatched: Report = None  # of `restore_or`: takes the message about globs that match nothing

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if (found := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be {' or '.join(map(repr, known))}, got {found!r}")
        if self.dtype is not None:
            check_dtype("restore", self.dtype)
        check_type("restore", "mesh", self.mesh, jax.sharding.Mesh | None, "a jax.sharding.Mesh")
        if self.as_numpy and (self.mesh, self.shardings) != (None, None):
            raise ValueError("mesh and shardings have no effect with as_numpy=True: leave them out")
        check_type("restore", "rename", self.rename, Mapping | None, "a dict by regular expression")
        for pattern, replacement in (self.rename or {}).items():
            _check_expression(pattern, replacement)
        check_type("restore", "report", self.report, Callable | None, "a function")
        check_type("restore", "on_progress", self.on_progress, Callable | None, "a function")
        check_type("restore", "budget_bytes", self.budget_bytes, Real, "a number")
        if not 0 < self.budget_bytes < float("inf"):
            raise ValueError(f"budget_bytes must be positive and finite, got {self.budget_bytes}")
        check_type("restore", "timeout_s", self.timeout_s, Real, "a number")

    def check_as_saved(self) -> None:
        """Raises ValueError for an option that has no effect without `like`."""
        for name in ("missing", "extra", "resize"):
            if (found := getattr(self, name)) != _CHOICES[name][0]:
                raise ValueError(f"{name}={found!r} has no effect without `like`: leave it out")

    @property
    def keeps_values(self) -> bool:
        """Returns whether leaves of `like` may be returned in place of saved leaves."""
        return self.missing == "keep" or self.only is not None or self.skip is not None


class Wanted(NamedTuple):
    """What a leaf of a target asks for; the leaves that ask for the same share it."""

    kind: LeafKind  # as `Leaf.kind`; "ellipsis" asks for nothing
    dtype: np.dtype[Any] | None = None  # of an array
    shape: tuple[int, ...] = ()
    key_impl: str | None = None
    sharding: jax.sharding.Sharding | None = None  # of an array, if given
    uncommitted: bool = False  # the array may move between devices, as by jax's default
    layout: Any = None  # jax's, of an array; None for the default

    def __str__(self) -> str:
        return describe(self.kind, getattr(self.dtype, "name", None), self.shape, self.key_impl)


class Target(NamedTuple):
    """The leaves of a target, in columns."""

    paths: Sequence[Path]
    wanted: Sequence[Wanted]
    values: Sequence[Any]  # each leaf, only if it may be returned in place of a saved leaf


class LeafMatch(NamedTuple):
    """One leaf to restore."""

    path: Path
    saved: Leaf
    wanted: Wanted | None  # None if it is restored as it was saved
    alike: int  # a number that leaves share which are saved and wanted alike


def describe(
    kind: str, dtype: str | None, shape: Sequence[int], key_impl: str | None = None
) -> str:
    """Returns the type of a leaf: `float32[4,8]`, `key<threefry2x32>[]`, `str`, `empty`."""
    dims = "[" + ",".join(map(str, shape)) + "]"
    if kind == "key":
        return f"key<{key_impl}>{dims}"
    if kind in ("array", "numpy", "generic"):
        return f"{dtype}{dims}"
    return kind


def flatten_like(like: object, *, keep_values: bool) -> tuple[Target, Any]:
    """Returns the leaves of a target, a tree or an open checkpoint, and its treedef.

    Keeps no reference to arrays of `like` unless `keep_values`, so that callers can free them.
    """
    if (as_like := getattr(like, "_as_like", None)) is not None:  # what `open` returned
        like = as_like()
    check_levels(like, "like")
    pairs, treedef = tree_util.tree_flatten_with_path(like, is_leaf=is_empty)
    wanted, values, alike = [], [], dict[object, Wanted]()
    for keys, value in pairs:
        try:
            # Large trees have thousands of leaves that are alike.
            want = alike.get(value) if type(value) is jax.ShapeDtypeStruct else None
            if want is None:
                want = _want(value)
                want = alike.setdefault(want, want)
                if type(value) is jax.ShapeDtypeStruct:
                    alike[value] = want
        except TypeError as error:
            leaf = path_text(key_path(keys)) or "(the tree itself)"
            raise TypeError(f"like: leaf {leaf} {error}") from None
        wanted.append(want)
        values.append(value if keep_values or want.kind in ("empty", "ellipsis") else None)
    return Target([key_path(keys) for keys, _ in pairs], wanted, values), treedef


def _want(value: object) -> Wanted:
    """Returns what a leaf asks for."""
    if isinstance(value, Tracer):
        raise TypeError("is traced; call restore outside jit, grad and vmap")
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        sharding = value.sharding if isinstance(value.sharding, jax.sharding.Sharding) else None
        free = isinstance(value, jax.Array) and not getattr(value, "committed", True)
        where = {"sharding": None if free else sharding, "uncommitted": free}
        if is_key_dtype(value.dtype):
            impl = str(value.dtype._impl.name)  # pyright: ignore  # no public way from a dtype
            return Wanted(kind="key", shape=value.shape, key_impl=impl, **where)
        dtype = np.dtype(value.dtype)
        layout: Any = getattr(value.format, "layout", None)  # pyright: ignore
        # Row-major without tiles is the default where arrays are not tiled, and costs nothing.
        rows = tuple(range(value.ndim))
        if not isinstance(layout, Layout) or (layout.tiling, layout.major_to_minor) == ((), rows):
            layout = None
        return Wanted(kind="array", dtype=dtype, shape=value.shape, layout=layout, **where)
    if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, (str, bytes)):
        kind = "numpy" if isinstance(value, np.ndarray) else "generic"
        return Wanted(kind=kind, dtype=value.dtype, shape=value.shape)
    if value is ...:
        return Wanted(kind="ellipsis")
    if name := next((one.__name__ for one in SCALARS if isinstance(value, one)), None):
        return Wanted(kind=name)  # pyright: ignore[reportArgumentType]
    if is_empty(value):
        return Wanted(kind="empty")
    hint = ". Pass mesh=, or jax.eval_shape of a function" if callable(value) else ""
    kind = type(value).__qualname__
    raise TypeError(f"must be an array, a jax.ShapeDtypeStruct or a scalar, got {kind}{hint}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The leaves to restore, and the values of `like` to return as they are."""

    leaves: tuple[LeafMatch, ...]
    from_like: Mapping[Path, object]
    report: RestoreReport


def match(
    saved: Sequence[Leaf], target: Target | None, request: RestoreRequest, *, where: str
) -> Match:
    """Decides which saved leaf becomes which wanted leaf; TreeMismatch lists every difference."""
    wanted = () if target is None else target.paths
    names, renamed = [leaf.path for leaf in saved], {}
    if request.rename:
        names, renamed = _rename(saved, wanted, request, where)
    by_path = dict(zip(names, saved, strict=True))
    selected: Callable[[Path], bool] | None = None
    if request.only is not None or request.skip is not None:
        selected = selector(request.only, request.skip)
        all_paths = [*names, *wanted]
        check_globs(request.only, request.skip, all_paths, where=where, report=request.unmatched)
        by_path = {path: leaf for path, leaf in by_path.items() if selected(path)}
    leaves, from_like, lost, differences = [], {}, [], []
    numbers: dict[object, int] = {}  # of leaves that fit, by what they share
    if target is None:
        request.check_as_saved()
        for path, leaf in by_path.items():
            key = leaf[2:6], id(leaf.stored), leaf.value.__class__
            leaves.append(LeafMatch(path, leaf, None, numbers.setdefault(key, len(numbers))))
        by_path = {}
    for path, want, value in zip(*(target or ((), (), ())), strict=True):
        leaf = by_path.pop(path, None)
        key = leaf and (leaf[2:6], id(leaf.stored), leaf.value.__class__, id(want))
        if (number := numbers.get(key)) is not None and leaf is not None:
            leaves.append(LeafMatch(path, leaf, want, number))
            continue
        is_skipped = selected is not None and not selected(path)
        if leaf is not None and want.kind == "empty" != leaf.kind and request.extra == "ignore":
            by_path[path], leaf = leaf, None  # an extra leaf like any other
        is_empty = want.kind == "empty" and (leaf is None or leaf.kind == "empty")
        if want.kind == "ellipsis" or is_skipped or is_empty:
            from_like[path] = value
        elif leaf is None:
            lost.append(path)
            from_like[path] = value
            if request.missing == "error":
                differences.append(_difference(path, want, None))
        elif _fits(want, leaf, request):
            leaves.append(LeafMatch(path, leaf, want, numbers.setdefault(key, len(numbers))))
        else:
            differences.append(_difference(path, want, leaf))
    left = [leaf for leaf in by_path.values() if leaf.kind != "empty"]
    if request.extra == "error":
        differences += [_difference(leaf.path, None, leaf) for leaf in left]
    if differences:
        is_apart = selected is not None and not any(map(selected, wanted))
        only = request.only if is_apart else None
        raise TreeMismatch(mismatch.text(differences, where, only, request.resize), differences)
    if valueless := [x for x in lost if isinstance(from_like[x], jax.ShapeDtypeStruct)]:
        raise TypeError(
            f"like: missing='keep' needs arrays, not jax.ShapeDtypeStructs, for leaves that "
            f"{where} does not have: {', '.join(map(path_text, valueless[:50]))}"
        )
    report = RestoreReport(
        loaded=tuple(path_text(leaf.path) for leaf in leaves),
        missing=tuple(map(path_text, lost)),
        extra=tuple(leaf.text for leaf in left),
        cast={},
        renamed=renamed,
    )
    return Match(leaves=tuple(leaves), from_like=from_like, report=report)


def _difference(path: Path, want: Wanted | None, leaf: Leaf | None) -> Difference:
    saved = leaf and describe(leaf.kind, leaf.dtype, leaf.shape, leaf.key_impl)
    return Difference(leaf=path_text(path), wanted=None if want is None else str(want), saved=saved)


def _rename(
    saved: Sequence[Leaf], wanted: Sequence[Path], request: RestoreRequest, where: str
) -> tuple[list[Path], dict[str, str]]:
    as_saved, renamed, rename = [leaf.path for leaf in saved], {}, request.rename or {}
    for leaf in saved:
        by = next((pattern for pattern in rename if re.search(pattern, leaf.text)), None)
        if by is not None and (new := re.sub(by, rename[by], leaf.text, count=1)) != leaf.text:
            renamed[leaf.text] = new
    paths = [parse_path(renamed[x.text]) if x.text in renamed else x.path for x in saved]
    fits, goes_on = _are_wanted(paths, wanted, request), request.unmatched is not None
    merges = len({*paths}) < len(paths)
    if goes_on and (merges or not fits) and {*as_saved} <= {*wanted}:
        return as_saved, {}  # the program has saved it, and an expression matches the new names
    if goes_on and (swapped := _swapped(renamed)):
        told = ", ".join(f"{old} -> {swapped[old]}" for old in sorted(swapped)[:8])
        raise ValueError(
            f"rename swaps {told} in {where}, and would swap them back in the steps that this "
            "program saves, whose names are the same. Rename once: manager.restore(like, "
            "rename=...), then manager.save. Call restore_or without these from then on."
        )
    lost = [pattern for pattern in rename if not any(re.search(pattern, x.text) for x in saved)]
    if lost and (not fits or (renamed and not goes_on)):
        raise ValueError(no_leaf("rename", lost, as_saved, where))
    if merges:
        twice = sorted({path_text(path) for path in paths if paths.count(path) > 1})
        raise ValueError(f"rename gives the same name to several leaves: {', '.join(twice)}")
    containers = {path[:i] for path in paths for i in range(len(path))}
    if above := sorted(path_text(path) for path in containers.intersection(paths)):
        raise ValueError(f"rename puts leaves below other leaves: {', '.join(above)}")
    return paths, renamed


def _swapped(renamed: Mapping[str, str]) -> dict[str, str]:
    """Returns the names that go round in a circle, so that nothing shows whether they did."""
    left = dict(renamed)
    while len(kept := {old: new for old, new in left.items() if new in left}) < len(left):
        left = kept
    return left


def _are_wanted(paths: Sequence[Path], wanted: Sequence[Path], request: RestoreRequest) -> bool:
    """Returns whether no wanted leaf lacks, or some that `missing` keeps, and none is left over."""
    selected = selector(request.only, request.skip)
    wants, there = {*filter(selected, wanted)}, {*filter(selected, paths)}
    return bool(wants) and (wants <= there or (request.missing == "keep" and there <= wants))


def _check_expression(pattern: str, replacement: str) -> None:
    try:
        re.sub(pattern, replacement, "")
    except (re.error, IndexError, TypeError) as error:
        raise ValueError(
            f"restore: rename maps regular expressions to replacements, and {pattern!r} to "
            f"{replacement!r} cannot be used: {error}. re.escape makes one of plain text."
        ) from error


def _fits(want: Wanted, leaf: Leaf, request: RestoreRequest) -> bool:
    if want.kind in ("str", "bytes", "empty") or leaf.kind in ("str", "bytes", "empty", "ellipsis"):
        return want.kind == leaf.kind
    if want.kind == "key":
        if leaf.kind == "key":
            return leaf.shape == want.shape and leaf.key_impl == want.key_impl
        # Saved as plain uint32, by jax.random.PRNGKey or a release of Orbax that lost the type.
        width = jax.random.key_data(jax.random.key(0, impl=want.key_impl)).shape
        return leaf.dtype == "uint32" and leaf.shape == (*want.shape, *width)
    if leaf.kind == "key":
        stored = leaf.stored.shape if leaf.stored else ()
        return want.dtype == np.uint32 and want.shape == stored
    can_resize = request.resize and leaf.kind in ARRAY_KINDS and len(leaf.shape) == len(want.shape)
    if leaf.kind not in _NUMERIC or (leaf.shape != want.shape and not can_resize):
        return False
    if leaf.value is not None and leaf.kind == "int":
        return want.kind == "int"
    out = np.dtype(want.kind) if want.dtype is None else want.dtype
    return out == dtype_of(leaf.dtype) or _casts(leaf, out, request.dtype)


def _casts(leaf: Leaf, out: np.dtype[Any], asked: Any) -> bool:
    """Returns whether a leaf may change to the kind of `out`; `cast` checks the values."""
    if asked is not None and np.dtype(asked) == out and not leaf.dtype.startswith("complex"):
        return True
    # A Python int lacks a dtype, so it may become unsigned.
    saved = np.dtype("uint8") if leaf.kind == "int" else dtype_of(leaf.dtype)
    return kind_rank(saved) <= kind_rank(out)
