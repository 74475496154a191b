"""Lines up a target with what was saved: which saved leaf becomes which wanted one.

All that does not fit is found before anything is read, and told at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import jax
import numpy as np
from jax import tree_util

from jaxckpt._core.pytree import SCALARS, is_empty, is_key_dtype, key_path
from jaxckpt._core.select import check_globs, selector, some_paths
from jaxckpt.errors import Difference, TreeMismatch
from jaxckpt.format.arrays import dtype_of
from jaxckpt.format.tree import Kind, Leaf, Path, parse_path, path_text
from jaxckpt.types import RestoreReport

# Kinds whose values are numbers in an array.
_NUMERIC: Final = frozenset({"array", "numpy", "generic", "int", "float", "complex", "bool"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One leaf of a target: what the caller wants at this path.

    Attributes:
        kind: As `Leaf.kind`; "ellipsis" asks for nothing.
        dtype: numpy's, for arrays.
        sharding: Of an array, or None: not said.
        uncommitted: Whether an array is to be free to move, as jax makes them by default.
        value: The leaf itself, only where it may be returned in place of a saved one.
    """

    path: Path
    kind: Kind
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()
    key_impl: str | None = None
    sharding: jax.sharding.Sharding | None = None
    uncommitted: bool = False
    value: Any = None

    def __str__(self) -> str:
        return describe(
            self.kind, None if self.dtype is None else self.dtype.name, self.shape, self.key_impl
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One leaf to restore: from which saved leaf, and as what (None: as it was saved)."""

    path: Path
    saved: Leaf
    wanted: Wanted | None


def describe(
    kind: str, dtype: str | None, shape: Sequence[int], key_impl: str | None = None
) -> str:
    """A leaf in a word: `float32[4,8]`, `key<threefry2x32>[]`, `str`, `empty`."""
    dims = "[" + ",".join(map(str, shape)) + "]"
    if kind == "key":
        return f"key<{key_impl}>{dims}"
    if kind in ("array", "numpy", "generic"):
        return f"{dtype}{dims}"
    return kind


def flatten_like(like: object, *, keep_values: bool) -> tuple[list[Wanted], Any]:
    """The leaves of a target, and its treedef.

    Keeps no reference to the arrays of `like` unless `keep_values`, so that their memory is free
    as soon as the caller lets go of them.
    """
    pairs, treedef = tree_util.tree_flatten_with_path(like, is_leaf=is_empty)
    wanted = []
    for keys, value in pairs:
        path = key_path(keys)
        try:
            want = _want(value, path)
        except TypeError as error:
            raise TypeError(f"like: leaf {path_text(path)} {error}") from None
        keep = keep_values or want.kind in ("empty", "ellipsis")
        wanted.append(replace(want, value=value) if keep else want)
    return wanted, treedef


def _want(value: object, path: Path) -> Wanted:
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        sharding = value.sharding if isinstance(value.sharding, jax.sharding.Sharding) else None
        free = isinstance(value, jax.Array) and not getattr(value, "committed", True)
        where = {"sharding": None if free else sharding, "uncommitted": free}
        if is_key_dtype(value.dtype):
            impl = str(value.dtype._impl.name)  # pyright: ignore  # no public way from a dtype
            return Wanted(path=path, kind="key", shape=value.shape, key_impl=impl, **where)
        dtype = np.dtype(value.dtype)
        return Wanted(path=path, kind="array", dtype=dtype, shape=value.shape, **where)
    if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, (str, bytes)):
        kind = "numpy" if isinstance(value, np.ndarray) else "generic"
        return Wanted(path=path, kind=kind, dtype=value.dtype, shape=value.shape)
    if value is ...:
        return Wanted(path=path, kind="ellipsis")
    for scalar in SCALARS:
        if isinstance(value, scalar):
            return Wanted(path=path, kind=scalar.__name__)  # pyright: ignore[reportArgumentType]
    if is_empty(value):
        return Wanted(path=path, kind="empty")
    raise TypeError(
        f"is a {type(value).__qualname__}; wanted an array, a jax.ShapeDtypeStruct or a scalar"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How a target, or no target, lines up with what was saved."""

    requests: tuple[Request, ...]
    kept: Mapping[Path, object]
    report: RestoreReport


def match(
    saved: Sequence[Leaf],
    wanted: Sequence[Wanted] | None,
    *,
    place: str,
    only: str | Sequence[str] | None,
    skip: str | Sequence[str] | None,
    rename: Mapping[str, str] | None,
    missing: Literal["error", "keep"],
    extra: Literal["error", "ignore"],
) -> Match:
    """Decides which saved leaf becomes which wanted one.

    Raises:
        TreeMismatch: with every difference, not only the first.
    """
    names, renamed = _rename(saved, rename)
    selected = selector(only, skip)
    by_path = {path: leaf for path, leaf in zip(names, saved, strict=True) if selected(path)}
    all_paths = [*names, *(want.path for want in wanted or ())]
    check_globs(only, skip, all_paths, place=place)
    if rename and not renamed:
        raise ValueError(f"rename={rename!r} matches no leaf. {some_paths(names, place)}")
    if wanted is None:
        requests = tuple(Request(path=p, saved=s, wanted=None) for p, s in by_path.items())
        report = _report(requests, (), (), renamed)
        return Match(requests=requests, kept={}, report=report)
    requests, kept, lost, valueless, differences = [], {}, [], [], []
    for want in wanted:
        leaf = by_path.pop(want.path, None)
        if (
            want.kind == "ellipsis"
            or not selected(want.path)
            or (want.kind == "empty" and (leaf is None or leaf.kind == "empty"))
        ):
            kept[want.path] = want.value
        elif leaf is None:
            lost.append(path_text(want.path))
            kept[want.path] = want.value
            if missing == "error":
                differences.append(
                    Difference(leaf=path_text(want.path), wanted=str(want), saved=None)
                )
            elif isinstance(want.value, jax.ShapeDtypeStruct):
                valueless.append(path_text(want.path))
        elif problem := _misfit(want, leaf):
            differences.append(
                Difference(leaf=path_text(want.path), wanted=str(want), saved=problem)
            )
        else:
            requests.append(Request(path=want.path, saved=leaf, wanted=want))
    left = [leaf for leaf in by_path.values() if leaf.kind != "empty"]
    if extra == "error":
        differences += [Difference(leaf=s.text, wanted=None, saved=_saved_text(s)) for s in left]
    if differences:
        raise TreeMismatch(_mismatch_text(differences, place), differences)
    if valueless:
        raise TypeError(
            f"like: {place} has none of {', '.join(valueless[:50])}, and missing='keep' needs "
            f"arrays there, not a jax.ShapeDtypeStruct"
        )
    report = _report(requests, lost, [leaf.text for leaf in left], renamed)
    return Match(requests=tuple(requests), kept=kept, report=report)


def _rename(
    saved: Sequence[Leaf], rename: Mapping[str, str] | None
) -> tuple[list[Path], dict[str, str]]:
    if not rename:
        return [leaf.path for leaf in saved], {}
    paths, renamed = [], {}
    for leaf in saved:
        text = leaf.text
        for pattern, replacement in rename.items():
            new, count = re.subn(pattern, replacement, text, count=1)
            if count:
                break
        else:
            new = text
        paths.append(parse_path(new) if new != text else leaf.path)
        if new != text:
            renamed[text] = new
    if len(set(paths)) != len(paths):
        twice = sorted({path_text(path) for path in paths if paths.count(path) > 1})
        raise ValueError(f"rename gives several leaves the name {', '.join(twice)}")
    return paths, renamed


def _saved_text(leaf: Leaf) -> str:
    return describe(leaf.kind, leaf.dtype, leaf.shape, leaf.key_impl)


def _misfit(want: Wanted, leaf: Leaf) -> str | None:
    """What is saved, if it cannot become what is wanted."""
    saved = _saved_text(leaf)
    if want.kind in ("str", "bytes", "empty") or leaf.kind in ("str", "bytes", "empty", "ellipsis"):
        return None if want.kind == leaf.kind else saved
    if want.kind == "key":
        if leaf.kind == "key":
            same = leaf.shape == want.shape and leaf.key_impl == want.key_impl
            return None if same else saved
        # Saved as plain uint32: by jax.random.PRNGKey, or by an Orbax that lost the type.
        width = jax.random.key_data(jax.random.key(0, impl=want.key_impl)).shape
        fits = leaf.dtype == "uint32" and leaf.shape == (*want.shape, *width)
        return None if fits else saved
    if leaf.kind == "key":
        stored = leaf.stored.shape if leaf.stored else ()
        return None if want.dtype == np.uint32 and want.shape == stored else saved
    if leaf.kind not in _NUMERIC or leaf.shape != want.shape:
        return saved
    if leaf.value is not None and leaf.kind == "int":
        return None if want.kind == "int" else saved
    return None if _casts(dtype_of(leaf.dtype), want) else saved


def _casts(saved: np.dtype[Any], want: Wanted) -> bool:
    is_complex = saved.kind == "c"
    if want.dtype is not None:
        return want.dtype.kind == "c" or not is_complex
    integral = saved.kind in "biu"
    allowed = {
        "bool": saved.kind == "b",
        "int": integral,
        "float": not is_complex,
        "complex": True,
    }
    return allowed[want.kind]


def _mismatch_text(differences: Sequence[Difference], place: str) -> str:
    lines = [f"{len(differences)} leaves of the target do not fit {place}"]
    lines += [f"  {difference}" for difference in differences[:200]]
    if len(differences) > 200:
        lines.append(f"  ... and {len(differences) - 200} more")
    lines.append(
        "Change the target, or restore around them: skip=[...], rename={...}, missing='keep' for "
        "leaves that were not saved, extra='ignore' for leaves that are not wanted."
    )
    return "\n".join(lines)


def _report(
    requests: Sequence[Request],
    lost: Sequence[str],
    left: Sequence[str],
    renamed: Mapping[str, str],
) -> RestoreReport:
    return RestoreReport(
        loaded=tuple(path_text(r.path) for r in requests),
        missing=tuple(lost),
        extra=tuple(left),
        cast={},  # not decided yet
        renamed=renamed,
    )
