"""Pytrees as flat lists of named leaves, and back.

`flatten` takes a tree apart for a save: a `format.tree.Leaf` and a value for each leaf, and the
containers as data. `rebuild` puts it together again without a target.

A container class is rebuilt only if it belongs to a library on the list below. The library is
imported by its name in the list; the class name in the file is then looked up among existing
classes, and the class must be a namedtuple or a registered pytree node. Nothing else is run.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, lru_cache
from typing import Any, Final

import jax
import numpy as np
from jax import tree_util
from jax.core import Tracer

from jaxckpt._core.plain import are_indices, plain_root, root_of
from jaxckpt._core.text import counted
from jaxckpt.errors import CorruptCheckpoint, UnsupportedLeaf
from jaxckpt.format.arrays import AS_BYTES_DTYPES, STORABLE_DTYPES, dtype_of
from jaxckpt.format.jsontext import MAX_DIMS
from jaxckpt.format.tree import (
    MAX_DIGITS,
    MAX_ELEMENTS,
    MAX_LEVELS,
    NAMED,
    SEQUENCE,
    Leaf,
    LeafKind,
    Node,
    Path,
    StoredArray,
    Tree,
    name_problems,
    path_text,
)

# The allowed prefixes of a class's module, and the package to import. First match wins.
_LIBRARIES: Final = (
    ("optax", "optax"),
    ("flax.nnx", "flax.nnx"),
    ("flax.training", "flax.training.train_state"),
    ("flax", "flax.core"),
    ("chex", "chex"),
    ("equinox", "equinox"),
)

_EMPTY_WORDS: Final = {list: "List", tuple: "Tuple", type(None): "None"}
_INDICES: Final = (tree_util.SequenceKey, tree_util.FlattenedIndexKey)
_ARRAYS: Final = (jax.Array, np.ndarray, np.generic)
_NUMBERS: Final = (bool, int, float, complex)
SCALARS: Final = (*_NUMBERS, str, bytes)
_ZEROS: Final = {scalar.__name__: scalar() for scalar in SCALARS}
_MOST_LEVELS: Final = 250  # of a tree that jax is given, more than any checkpoint has

# A subclass may override `str()`, so call the base class.
_CONVERT: Final[dict[type, Callable[[Any], object]]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    tuple: tuple,
}

# Stands for a leaf that was not restored.
ABSENT: Final = type("Absent", (), {"__repr__": lambda _: "ABSENT"})()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """A tree in the order of `jax.tree_util`, with empty containers; equal ones store alike."""

    paths: Sequence[Path]
    keys: Sequence[tuple[Any, ...]] = field(compare=False)  # jax's, of each leaf
    facts: Sequence[Mapping[str, Any]] = field(compare=False)  # the rest of each `Leaf`
    arrays: Sequence[int]  # the indices of the leaves that are stored as arrays
    root: Node | None = field(compare=False)  # the containers; None if the tree is one leaf

    def leaves(self, stored: Sequence[StoredArray] = ()) -> tuple[Leaf, ...]:
        """Returns the leaves, those with an array with its layout if it is given."""
        layouts = dict(zip(self.arrays, stored, strict=False))
        return tuple(
            Leaf(path=path, key_types=_types(keys), stored=layouts.get(i), **self.facts[i])
            for i, (path, keys) in enumerate(zip(self.paths, self.keys, strict=True))
        )


def check_levels(tree: object, what: str) -> None:
    """Raises UnsupportedLeaf for a tree that contains itself or is too deep, on which jax dies."""
    if way := _too_deep(tree, _MOST_LEVELS):
        raise UnsupportedLeaf(
            f"{what} is nested deeper than {_MOST_LEVELS} levels, at {path_text(way[:5])}/... "
            f"Does a container contain itself? A checkpoint has at most {MAX_LEVELS} levels."
        )


def _too_deep(node: Any, levels: int) -> Path | None:
    """Returns the names on the way to a node that is too deep, if there is one."""
    if isinstance(node, dict):
        children = node.items()
    elif isinstance(node, (list, tuple)):
        children = enumerate(node)
    else:
        children = enumerate((_one_level(node) or ((), None))[0])
    for name, child in children:
        if not _is_childless(type(child)):
            way = _too_deep(child, levels - 1) if levels else ()
            if way is not None:
                return (_key_name(name), *way)
    return None


def flatten(tree: object) -> tuple[Flat, list[jax.Array | np.ndarray[Any, Any]]]:
    """Takes a tree apart for a save; also returns the arrays to store.

    Raises:
        UnsupportedLeaf: leaves cannot be stored, or names collide; the message lists all of them.
    """
    try:
        pairs, treedef = tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)
    except (ValueError, TypeError) as error:
        raise UnsupportedLeaf(
            f"jax cannot flatten this tree: {error}. All keys of a dict must have the same type."
        ) from error
    all_keys = [keys for keys, _ in pairs]
    paths = [*map(key_path, all_keys)]
    all_facts, arrays, values, problems = [], [], [], []
    for i, (path, (_, value)) in enumerate(zip(paths, pairs, strict=True)):
        try:
            facts = _describe(value, path)
            if facts["kind"] != "empty" and "value" not in facts:
                values.append(stored_value(facts["kind"], value))
                arrays.append(i)
            all_facts.append(facts)
        except (TypeError, ValueError) as error:
            problems.append(f"  {path_text(path) or '(the tree itself)'}: {error}")
    problems += name_problems(paths)
    if problems:
        raise UnsupportedLeaf(
            f"{counted(len(problems), 'leaf')} cannot be saved; nothing was written:\n"
            + "\n".join(problems[:50])
            + "\nLeave out, or convert, what is not a number, text or array of numbers. An object "
            "with get_state and set_state can be an item: manager.save(..., items={...})."
        )
    if not pairs:
        raise UnsupportedLeaf("nothing to save: the tree has no leaves and no containers")
    root = None if tree_util.treedef_is_leaf(treedef) else _walk(treedef, iter(paths), 0)[0]
    flat = Flat(paths=paths, keys=all_keys, facts=all_facts, arrays=arrays, root=root)
    return flat, values


def _types(keys: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple([SEQUENCE if isinstance(key, _INDICES) else NAMED for key in keys])


def is_empty(node: object) -> bool:
    """Returns whether a node lacks children: jax drops it, a checkpoint keeps it as a leaf."""
    if node is None:
        return True
    if type(node) in (dict, list, tuple):
        return not node
    if _is_childless(type(node)):
        return False
    level = _one_level(node)
    return level is not None and not level[0]


@cache
def _is_childless(cls: type) -> bool:
    return issubclass(cls, (*_ARRAYS, jax.ShapeDtypeStruct, *SCALARS, type(None)))


@cache
def is_device_array(cls: type) -> bool:
    return issubclass(cls, jax.Array) and not issubclass(cls, Tracer)


def _one_level(node: object) -> tuple[list[object], Any] | None:
    """Returns the children and static data of a registered node, or None for a leaf."""
    try:
        level = tree_util.default_registry.flatten_one_level(node)
    except ValueError:
        return None
    return None if level is None else (list(level[0]), level[1])


def key_path(keys: Sequence[object]) -> Path:
    return tuple(map(_key_name, keys))


def _key_name(key: Any) -> str:
    if type(key) is tree_util.DictKey and type(key.key) is str:  # most of them
        return key.key
    key = next((getattr(key, at) for at in ("key", "idx", "name") if hasattr(key, at)), key)
    # `str()` of a str enum is not its value.
    return str.__str__(key) if isinstance(key, str) else str(key)


def _describe(value: Any, path: Path) -> Mapping[str, Any]:
    """Returns the fields of the leaf, but for its path and key types."""
    if is_device_array(type(value)):
        if value.is_deleted():
            raise ValueError("was deleted or donated; save it before the call that donates it")
        if is_key_dtype(value.dtype):
            name, impl = value.dtype.name, str(jax.random.key_impl(value))
            if value.ndim >= MAX_DIMS:  # its words are one more
                raise TypeError(f"is stored with more than {MAX_DIMS} dimensions, the limit")
            return {"kind": "key", "dtype": name, "shape": value.shape, "key_impl": impl}
        return _describe_array("array", value.dtype, value.shape)
    if isinstance(value, Tracer):
        raise TypeError("is traced; call save outside jit, grad and vmap")
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("is a masked array; save its data and its mask as two arrays")
    if isinstance(value, np.ndarray):
        return _describe_array("numpy", value.dtype, value.shape)
    if isinstance(value, str):
        value.encode()  # raises on an unpaired surrogate
        # Orbax finds the text by a JSON pointer, where a bare `~` is an escape.
        if any("~" in name for name in path):
            return {"kind": "str", "dtype": "uint8", "shape": ()}
        return {"kind": "str", "value": str.__str__(value)}
    if isinstance(value, bytes):
        return {"kind": "bytes", "dtype": "uint8", "shape": ()}
    if isinstance(value, np.generic):
        return {"kind": "generic", "dtype": _check(np.asarray(value).dtype, ())}
    if isinstance(value, _NUMBERS):
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            return {"kind": "int", "value": _digits(int(value))}
        kind = next(t for t in _NUMBERS if isinstance(value, t)).__name__
        return {"kind": kind, "dtype": stored_value(kind, value).dtype.name}  # pyright: ignore[reportArgumentType]
    if is_empty(value):
        # Of a mapping, whatever its class, Orbax reads a dict.
        word = "Dict" if isinstance(value, Mapping) else _EMPTY_WORDS.get(type(value), "None")
        container = Node(type="odict") if type(value) is OrderedDict else None
        if type(value) not in _EMPTY_WORDS and not isinstance(value, dict):
            container = _class_node(type(value), (), _one_level(value))
        return {"kind": "empty", "dtype": word, "container": container}
    if isinstance(value, jax.ShapeDtypeStruct):
        raise TypeError("is a jax.ShapeDtypeStruct: it has a shape but no values")
    raise TypeError(f"is a {type(value).__module__}.{type(value).__qualname__}, not an array")


def stored_value(kind: str, value: Any) -> jax.Array | np.ndarray[Any, Any]:
    """Returns the array that is stored for a leaf."""
    if kind in ("array", "numpy"):
        return value
    if kind == "key":
        with jax.ensure_compile_time_eval():  # not into a jit that is being traced
            return jax.random.key_data(value)
    if kind in ("str", "bytes"):
        return np.frombuffer(value.encode() if kind == "str" else value, np.uint8)
    if kind == "generic":
        return np.asarray(value)
    return np.asarray(type(_ZEROS[kind])(value))  # IntEnum -> int


@lru_cache(maxsize=1 << 12)
def _describe_array(kind: LeafKind, dtype: Any, shape: tuple[int, ...]) -> Mapping[str, Any]:
    return {"kind": kind, "dtype": _check(dtype, shape), "shape": shape}


def _check(dtype: Any, shape: tuple[int, ...]) -> str:  # numpy's and jax's dtypes share no type
    """Returns the name of the dtype of an array that can be stored and read back."""
    name = np.dtype(dtype).name
    if name not in STORABLE_DTYPES | AS_BYTES_DTYPES:
        raise TypeError(f"has dtype {dtype}, which zarr cannot store")
    if len(shape) > MAX_DIMS:
        raise TypeError(f"is stored with more than {MAX_DIMS} dimensions, the limit")
    if 0 in shape and math.prod(n or 1 for n in shape) >= MAX_ELEMENTS:
        raise TypeError(f"has shape {shape}, with more elements than can be indexed")
    return name


def _digits(value: int) -> str:
    # Python's limit on parsing ints: a longer int could not be read back.
    if value.bit_length() > 4 * MAX_DIGITS or len(text := str(value).lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"is an int of more than {MAX_DIGITS} digits")
    return f"-{text}" if value < 0 else text


@cache
def is_key_dtype(dtype: Any) -> bool:  # numpy's and jax's dtypes share no type
    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


# --- containers ------------------------------------------------------------------------------


def _walk(treedef: Any, paths: Iterator[Path], depth: int) -> tuple[Node, Path]:
    """Returns the containers of `treedef`, consuming one path per leaf, and the last path."""
    children, names, path = [], [], ()
    for child in treedef.children():
        is_leaf = child.num_nodes == 1  # as empty containers are too
        node, path = (None, next(paths)) if is_leaf else _walk(child, paths, depth + 1)
        children.append(node)
        names.append(path[depth])
    cls, aux = treedef.node_data()
    return _make_node(cls, aux, tuple(names), tuple(children)), path


def _make_node(
    cls: type, aux: Any, names: tuple[str, ...], children: tuple[Node | None, ...]
) -> Node:
    if cls in (list, tuple):
        return Node(type="list" if cls is list else "tuple", names=names, children=children)
    if issubclass(cls, dict):
        keys = aux[1] if isinstance(aux, tuple) and len(aux) == 2 and callable(aux[0]) else aux
        is_plain = {*map(type, keys)} <= {str} or all(type(_as_base(k)) is str for k in keys)
        recorded = None if is_plain else tuple(map(_encode_key, keys))
        kind_ = "odict" if cls is OrderedDict else "dict"
        return Node(type=kind_, names=names, keys=recorded, children=children)
    node = _class_node(cls, names, (list(children), aux))
    return replace(node, children=children)


def _class_node(cls: type, names: tuple[str, ...], level: tuple[list[object], Any] | None) -> Node:
    try:
        aux = None if level is None else _encode_static(level[1])
    except TypeError:
        aux = None
    return Node(type="class", names=names, cls=(cls.__module__, cls.__qualname__), aux=aux)


def _encode_key(key: object) -> object:
    """Returns a dict key as JSON; a key that JSON cannot represent becomes its text."""
    key = _as_base(key)
    if isinstance(key, np.integer):
        return int(key)
    if key is None or type(key) in (str, int, bool):
        return key
    if type(key) is float:
        return key if np.isfinite(key) else {"float": repr(key)}
    if type(key) is tuple:
        return {"tuple": [_encode_key(part) for part in key]}
    return str.__str__(key) if isinstance(key, str) else str(key)


def _as_base(value: object) -> object:
    """Converts an instance of a subclass of str, int, ... to its base, except enums.

    jax treats the two as the same key, and so must we.
    """
    for base, convert in _CONVERT.items():
        if isinstance(value, base) and type(value) is not bool and not isinstance(value, Enum):
            return value if type(value) is base else convert(value)
    return value


def _decode_key(key: object) -> object:
    if isinstance(key, dict) and "float" in key:
        return {"inf": float("inf"), "-inf": float("-inf")}.get(key["float"], float("nan"))
    if isinstance(key, dict):
        return tuple(map(_decode_key, key["tuple"]))
    return key


def _encode_static(value: object) -> object:
    """Returns the static data of a node as JSON; raises TypeError for anything but plain data."""
    if not hasattr(value, "_fields"):  # a namedtuple must not come back as a tuple
        value = _as_base(value)
    if value is None:
        return ["none"]
    if type(value) in (str, int, bool) or (type(value) is float and np.isfinite(value)):
        return value
    if type(value) in (tuple, list):
        return [type(value).__name__, *map(_encode_static, value)]  # pyright: ignore[reportArgumentType]
    if type(value) is dict:
        return ["dict", *([_encode_static(k), _encode_static(v)] for k, v in value.items())]  # pyright: ignore[reportAttributeAccessIssue]
    raise TypeError(f"a {type(value).__qualname__} is not data")


def _decode_static(value: Any) -> Any:  # JSON
    if not isinstance(value, list):
        return value
    kind, *parts = value or [None]
    if kind == "none":
        return None
    if kind == "dict":
        return {_decode_static(k): _decode_static(v) for k, v in parts}
    items = [_decode_static(part) for part in parts]
    return tuple(items) if kind == "tuple" else items


def _find_class(module: str, name: str) -> type | None:
    """Returns a class of a library on the list, or None if not allowed, installed or found."""
    for prefix, package in _LIBRARIES:
        if module == prefix or module.startswith(prefix + "."):
            try:
                importlib.import_module(package)
            except ImportError:
                return None
            found: object = sys.modules.get(module)
            for part in name.split("."):
                found = getattr(found, part, None) if part.isidentifier() else None
            return found if isinstance(found, type) and found.__module__ == module else None
    return None


def _build_class(node: Node, children: Sequence[object]) -> object:
    """Returns an instance of a registered class, or ABSENT if it cannot be rebuilt safely."""
    cls = _find_class(*node.cls) if node.cls is not None else None
    if cls is None:
        return ABSENT
    fields = getattr(cls, "_fields", None)
    if issubclass(cls, tuple) and fields is not None:
        same = tuple(fields) == node.names
        return tuple.__new__(cls, children) if same else ABSENT
    if node.aux is None:
        return ABSENT
    try:
        leaf = tree_util.tree_structure(0)
        treedef = tree_util.PyTreeDef.from_node_data_and_children(
            tree_util.default_registry, (cls, _decode_static(node.aux)), [leaf] * len(children)
        )
        return treedef.unflatten(children)
    except Exception:  # the class has changed since the save: use plain containers
        return ABSENT


def rebuild(tree: Tree | None, values: Mapping[Path, object]) -> object:
    """Puts restored leaves together, with the recorded types where that is safe.

    Args:
        tree: As saved; None for nested dicts, as of renamed leaves.
        values: By path. Missing leaves are left out, and a container that lacks a child becomes
            a dict.
    """
    root = plain_root(dict.fromkeys(values, ())) if tree is None else root_of(tree)
    built = _rebuild_node(root, (), values)
    return {} if built is ABSENT else built


def abstract(tree: Tree) -> object:
    """Returns the tree with shapes and dtypes in place of values, in the recorded containers."""
    return rebuild(tree, {leaf.path: _abstract_value(leaf) for leaf in tree.leaves})


def _abstract_value(leaf: Leaf) -> object:
    if leaf.kind in ("empty", "ellipsis"):
        return empty_value(leaf)
    if leaf.kind == "key":
        key = jax.eval_shape(lambda: jax.random.key(0, impl=leaf.key_impl))
        return jax.ShapeDtypeStruct(leaf.shape, key.dtype)
    if leaf.kind in _ZEROS:
        return _ZEROS[leaf.kind]
    if leaf.kind == "array":
        return jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf.dtype))
    zero = np.zeros((), dtype_of(leaf.dtype))[()]
    return zero if leaf.kind == "generic" else np.broadcast_to(zero, leaf.shape)


def _rebuild_node(node: Node | None, path: Path, values: Mapping[Path, object]) -> object:
    if node is None:
        return values.get(path, ABSENT)
    built = [
        _rebuild_node(child, (*path, name), values)
        for name, child in zip(node.names, node.children, strict=True)
    ]
    present = [value is not ABSENT for value in built]
    if not any(present):
        return ABSENT
    if node.type in ("dict", "odict"):
        keys = node.names if node.keys is None else map(_decode_key, node.keys)
        pairs = [(k, v) for k, v in zip(keys, built, strict=True) if v is not ABSENT]
        found = OrderedDict(pairs) if node.type == "odict" else dict(pairs)
        if len(found) != len(pairs):
            raise CorruptCheckpoint(f"two children of {path_text(path)} have the same key")
        return found
    if all(present):
        if node.type == "list":
            return built
        if node.type == "tuple":
            return tuple(built)
        if (instance := _build_class(node, built)) is not ABSENT:
            return instance
        if are_indices(node.names):
            return built
    return {k: v for k, v in zip(node.names, built, strict=True) if v is not ABSENT}


def empty_value(leaf: Leaf) -> object:
    """Returns the empty container of a leaf of kind "empty", or `...` for kind "ellipsis"."""
    if leaf.kind == "ellipsis":
        return ...
    if leaf.container is not None and leaf.container.type == "odict":
        return OrderedDict()
    if leaf.container is not None:
        built = _build_class(leaf.container, ())
        return None if built is ABSENT else built
    return {"Dict": {}, "List": [], "Tuple": ()}.get(leaf.dtype)
