"""Compares a restored tree with what a golden sample is known to hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxckpt._tree import key_path
from tests.golden.fixture import PrngKey, Sample

KeyPath = tuple[str, ...]


def leaves_of(tree: object) -> dict[KeyPath, Any]:
    """The leaves by key path; None and empty containers are not listed, as in `expected`."""
    return {key_path(keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def problems(sample: Sample, tree: object, *, as_numpy: bool = False) -> list[str]:
    """What differs from the sample: paths, types, dtypes, shapes, any bit of a value."""
    got, kinds = leaves_of(tree), _kinds(sample)
    paths = [*sample.expected, *(path for path in got if path not in sample.expected)]
    found = ((path, _problem(path, got, sample.expected, kinds, as_numpy)) for path in paths)
    return [f"{'/'.join(path)}: {problem}" for path, problem in found if problem]


def _kinds(sample: Sample) -> dict[KeyPath, str]:
    """What each leaf was: `jax.Array`, `ndarray`, the name of a Python or numpy type."""
    leaves = json.loads((sample.path.parent / "expected.json").read_text())["leaves"]
    kinds = {tuple(facts["path"]): facts["kind"] for facts in leaves.values()}
    if _says_kinds(sample.path):
        return kinds
    # Before there was `_METADATA`, what was stored as an array may have been anything.
    return {path: "str" if kind == "str" else "stored" for path, kind in kinds.items()}


def _says_kinds(path: Path) -> bool:
    return path.is_dir() and any(path.rglob("_METADATA"))


def _problem(
    path: KeyPath,
    got: Mapping[KeyPath, Any],
    expected: Mapping[KeyPath, Any],
    kinds: Mapping[KeyPath, str],
    as_numpy: bool,
) -> str | None:
    if path not in got:
        return "was not restored"
    if path not in expected:
        return f"was never saved: {got[path]!r}"
    leaf, want, kind = got[path], expected[path], kinds[path]
    if isinstance(want, PrngKey):
        return _key_problem(leaf, want)
    if not isinstance(leaf, _types(kind, as_numpy, want)):
        return f"is a {type(leaf)}, was a {kind}"
    if isinstance(want, str):
        return None if leaf == want else f"is {leaf!r}, was {want!r}"
    a, b = np.asarray(leaf), np.asarray(want)
    if kind in ("jax.Array", "ndarray") and a.dtype != b.dtype:
        return f"is {a.dtype}, was {b.dtype}"
    if a.shape != b.shape:
        return f"has shape {a.shape}, had {b.shape}"
    same = a.tobytes() == b.tobytes() if a.dtype == b.dtype else bool(np.all(a == b))
    return None if same else f"is {a}, was {b}"


def _types(kind: str, as_numpy: bool, want: object) -> Any:  # what isinstance takes
    if kind == "stored":
        return (jax.Array, np.ndarray, bool, int, float)
    if kind == "jax.Array":
        return np.ndarray if as_numpy else jax.Array
    if kind == "ndarray":
        return np.ndarray
    # numpy's scalars come back as Python's, as they do from Orbax
    return type(want.item()) if isinstance(want, np.generic) else type(want)


def _key_problem(leaf: Any, want: PrngKey) -> str | None:
    if not (isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)):
        return f"is {leaf!r}, was a typed key"
    if (impl := str(jax.random.key_impl(leaf))) != want.impl:
        return f"is a key of {impl}, was one of {want.impl}"
    data = np.asarray(jax.random.key_data(leaf))
    return None if np.array_equal(data, want.data) else f"is {data}, was {want.data}"
