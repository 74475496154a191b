"""Compares a restored tree with the known contents of a golden sample."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax
import msgpack
import numpy as np

from jaxckpt._core.pytree import key_path
from tests.golden.fixture import PrngKey, Sample

KeyPath = tuple[str, ...]


def leaves_of(tree: object) -> dict[KeyPath, Any]:
    """The leaves by key path; None and empty containers are not listed, as in `expected`."""
    return {key_path(keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def problems(sample: Sample, tree: object, *, as_numpy: bool = False) -> list[str]:
    """Returns the differences from the sample: paths, containers, types, dtypes, shapes, bits."""
    got, kinds = leaves_of(tree), _kinds(sample)
    paths = [*sample.expected, *(path for path in got if path not in sample.expected)]
    found = [(path, _problem(path, got, sample.expected, kinds, as_numpy)) for path in paths]
    found += _container_problems(_containers_of(tree), _saved_containers(sample))
    return [f"{'/'.join(path) or 'the tree'}: {problem}" for path, problem in found if problem]


def _kinds(sample: Sample) -> dict[KeyPath, str]:
    """Returns the kind of each leaf: `jax.Array`, `ndarray`, the name of a Python or numpy type."""
    leaves = json.loads((sample.path.parent / "expected.json").read_text())["leaves"]
    kinds = {tuple(facts["path"]): facts["kind"] for facts in leaves.values()}
    if any(sample.path.rglob("_METADATA")):
        return kinds
    # Before there was `_METADATA`, what was stored as an array may have been anything.
    return {path: "str" if kind == "str" else "stored" for path, kind in kinds.items()}


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


# --- containers ------------------------------------------------------------------------------
# What the checkpoint's own files say of them, read here without jaxckpt: by path, the names of the
# types that each container may have. None and empty containers are among them. That none lacks a
# child, or has one too many, follows from the paths of the leaves and of the containers below it.

Containers = dict[KeyPath, tuple[str, ...]]

# Of an empty named tuple nothing says what it was, so it may be None.
_EMPTIES = {
    "None": ("NoneType",),
    "Dict": ("dict",),
    "List": ("list",),
    "Tuple": ("tuple",),
    "NamedTuple": ("NoneType", "tuple"),
}
_BY_KEY_TYPE = {1: ("list",), 2: ("dict",)}


def _container_problems(got: Containers, want: Containers) -> list[tuple[KeyPath, str]]:
    found = []
    for path in sorted({*got, *want}):
        (is_a,), was = got.get(path, ("no container",)), want.get(path, ("no container",))
        if is_a not in was:
            found.append((path, f"is a {is_a}, was a {' or '.join(was)}"))
    return found


def _containers_of(node: object, path: KeyPath = ()) -> Containers:
    """Each container of a tree of dicts, lists and tuples, and each None."""
    if isinstance(node, Mapping):
        children = {str(key): child for key, child in node.items()}
    elif isinstance(node, (list, tuple)):
        children = dict(zip(map(str, range(len(node))), node, strict=True))
    elif node is None:
        children = {}
    else:
        return {}
    found: Containers = {path: (type(node).__name__,)}
    for key, child in children.items():
        found |= _containers_of(child, (*path, key))
    return found


def _saved_containers(sample: Sample) -> Containers:
    """The containers of a sample, which all its steps share."""
    item = sample.about.get("item")
    files = [file for file in sample.path.rglob("_METADATA") if item in (None, file.parent.name)]
    if files:
        found = [_metadata_containers(json.loads(file.read_text())) for file in files]
    else:
        files = [file for file in sample.path.rglob("checkpoint*") if file.is_file()]
        found = [_containers_of(_unpack(file.read_bytes())) for file in files]
    assert found, f"{sample.name}: no file says what the tree was"
    assert all(containers == found[0] for containers in found), sample.name
    return found[0]


def _unpack(data: bytes) -> object:
    """Returns the tree of a msgpack file, with a leaf object for each array."""
    return msgpack.unpackb(data, ext_hook=lambda code, data: 0, strict_map_key=False)


def _metadata_containers(metadata: Mapping[str, Any]) -> Containers:
    if "value_metadata_tree" in metadata:  # rich types
        return _rich_containers(json.loads(metadata["value_metadata_tree"]))
    found: Containers = {}
    for entry in metadata["tree_metadata"].values():
        keys = entry["key_metadata"]
        path = tuple(key["key"] for key in keys)
        for depth, key in enumerate(keys):
            kind = _BY_KEY_TYPE[key["key_type"]]
            assert found.setdefault(path[:depth], kind) == kind, path
        if (value_type := entry["value_metadata"]["value_type"]) in _EMPTIES:
            assert path not in found, path
            found[path] = _EMPTIES[value_type]
    return found


def _rich_containers(node: Any, path: KeyPath = ()) -> Containers:  # JSON
    category = node.get("category") if isinstance(node, dict) else None
    if category == "custom" and node["clazz"] == "ValueMetadataEntry":
        value_type = node["data"]["value_type"]
        return {path: _EMPTIES[value_type]} if value_type in _EMPTIES else {}
    if category == "namedtuple":  # that of a class which is not here comes back as a dict
        kind = ("dict", node["clazz"])
        children = {entry["key"]: entry["value"] for entry in node["entries"]}
    elif category == "custom":
        assert node["clazz"] == "tuple", node["clazz"]
        kind, children = ("tuple",), dict(enumerate(node["entries"]))
    elif isinstance(node, list):
        kind, children = ("list",), dict(enumerate(node))
    else:
        kind, children = ("dict",), node
    found: Containers = {path: kind}
    for key, child in children.items():
        found |= _rich_containers(child, (*path, str(key)))
    return found
