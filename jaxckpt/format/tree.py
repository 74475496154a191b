"""`_METADATA`: the leaves of a tree, the kind of each, and the containers around them.

Orbax's part lists the leaves (and empty containers) with the names on the way to each; from it
alone a tuple comes back as a list, an optax state as a dict, the key 0 as "0". Under keys that
Orbax ignores, we add the kind of each leaf (`_OURS` in `value_metadata`) and the containers
(`_OURS` at the top). Both are data: classes are named, never run, and only classes on the
allow-list of `jaxckpt._core.pytree` are looked up.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, Final, Literal, NamedTuple

from jaxckpt.errors import CorruptCheckpoint, UnsupportedFormat, damaged
from jaxckpt.format import jsontext
from jaxckpt.format.jsontext import expect, expect_all, expect_shape, given, maybe_expect, short

# Version 2 has compressed chunks, and 3 has a leaf whose name ends in a slash; other trees remain
# readable to releases that know 1.
VERSION: Final = 3
_OURS: Final = "jaxckpt"

SEQUENCE: Final = 1  # key_type: an index of a list or tuple
NAMED: Final = 2  # key_type: a dict key or an attribute

# Each container takes two levels of JSON, and readers accept `jsontext.MAX_DEPTH`.
MAX_LEVELS: Final = 90
MAX_READ_LEVELS: Final = 256  # of other writers; Python's stack ends soon after
_MAX_NAME_BYTES: Final = 16 << 10  # database keys have at most 64 kB

# The longest int that Python parses. Ints too large for an array are stored as text.
MAX_DIGITS: Final = 4300
MAX_ELEMENTS: Final = 1 << 58  # of an array, whose bytes numpy can count then

Path = tuple[str, ...]

LeafKind = Literal[
    "array", "key", "numpy", "generic", "int", "float", "complex", "bool", "str", "bytes",
    "empty", "ellipsis", "absent",
]  # fmt: skip
"""The type to restore: a jax.Array, a typed PRNG key, a numpy array or scalar, a Python value, an
empty container (or None), `...`. "absent" marks an array whose data was never stored."""

ARRAY_KINDS: Final = frozenset({"array", "numpy", "generic"})  # of jax and numpy

# Orbax's names; Orbax refuses any other name.
_ORBAX_KIND: Final[dict[str, LeafKind]] = {
    "jax.Array": "array",
    "np.ndarray": "numpy",
    "scalar": "generic",
    "string": "str",
    "None": "empty",
    "Dict": "empty",
    "List": "empty",
    "Tuple": "empty",
    "NamedTuple": "empty",
    "placeholder": "ellipsis",
}
_STORED_KINDS: Final = tuple("array key numpy generic int float complex bool str bytes".split())
_TEXT_KINDS: Final = ("str", "int")  # may be stored as text in the metadata, without an array
_ARRAY_TYPES: Final = ("jax.Array", "np.ndarray", "scalar")


class StoredArray(NamedTuple):  # a key of caches, which looks for it with each leaf
    """The layout of one leaf's values on disk."""

    shape: tuple[int, ...]  # of the zarr array
    dtype: str  # TensorStore's name of the zarr array's dtype (`bfloat16`, `int4`)
    chunk_shape: tuple[int, ...]  # the stored chunks form a regular grid of this shape
    inner_shape: tuple[int, ...] | None = None  # of the chunks inside a chunk (`sharding_indexed`)
    has_fill: bool = True  # whether the array defines a fill value for missing chunks
    zstd: int | None = None  # the level at which we compressed each unit; None if we did not

    @property
    def unit_shape(self) -> tuple[int, ...]:
        """Returns the shape of the smallest part that can be read and checked on its own."""
        return self.inner_shape or self.chunk_shape


class Leaf(NamedTuple):  # of which there are many: dataclasses take four times as long
    """One leaf of a saved tree, or one empty container."""

    path: Path  # the names on the way to the leaf, `str()` of each key
    key_types: tuple[int, ...]  # `SEQUENCE` or `NAMED` for each name
    kind: LeafKind  # the type to restore unless `like` overrides it
    dtype: str = ""  # the leaf's dtype; for an empty container, Orbax's name ("None", "Dict", ...)
    shape: tuple[int, ...] = ()  # of the leaf (not of the key data of a PRNG key)
    key_impl: str | None = None  # the PRNG implementation of a typed key
    stored: StoredArray | None = None  # also None if only the array's own metadata describes it
    value: Any = None  # the value itself if the metadata holds it (str, legacy aggregates)
    container: Node | None = None  # the class of an empty container that is not built in
    alias: str | None = None  # the name on disk, if it is not the path joined with dots
    doubled: bool = False  # whether its keys double the slash that ends its name: before version 3

    @property
    def name(self) -> str:
        """Orbax's name of the leaf: its zarr prefix, and its key in the other files."""
        return ".".join(self.path) if self.alias is None else self.alias

    @property
    def prefix(self) -> str:
        """Returns the prefix of the array's keys; empty for a bare leaf."""
        name = ".".join(self.path) if self.alias is None else self.alias
        return f"{name}/" if self.doubled else prefix_of(name)

    @property
    def array(self) -> StoredArray:
        """Returns the array on disk; raises CorruptCheckpoint if there is none."""
        if self.stored is None:
            raise CorruptCheckpoint(f"leaf {self.text} has no array", leaf=self.text)
        return self.stored

    @property
    def has_array(self) -> bool:
        """Returns whether the values are in a zarr array."""
        return self.kind not in ("empty", "ellipsis", "absent") and self.value is None

    @property
    def text(self) -> str:
        return path_text(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One container of a saved tree."""

    type: Literal["dict", "list", "tuple", "odict", "class"]  # "class": any registered one
    names: tuple[str, ...] = ()  # the name of each child in `Leaf.path`
    keys: tuple[Any, ...] | None = None  # the dict keys; None if they are the strings in `names`
    children: tuple[Node | None, ...] = ()  # a node, or None if the child is a leaf
    cls: tuple[str, str] | None = None  # module and qualified name of a registered class
    aux: Any = None  # its static data as JSON (see `_core.pytree`); None if not recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The contents of `_METADATA`: the leaves in order, and the containers if recorded."""

    leaves: tuple[Leaf, ...]
    root: Node | None = None  # the containers; also None for a bare leaf
    typed: bool = False  # whether the containers, or a bare leaf, were recorded
    zarr_version: int = 3  # 2 or 3, for every array of the item
    uses_ocdbt: bool | None = None  # whether the arrays are in a database; None if not recorded
    fill_missing: bool = False  # whether a missing chunk means the fill value
    custom_metadata: Any = None  # the item's custom metadata, set by the caller of Orbax
    # Kinds that Orbax lacks, by name, of leaves that only their arrays' own metadata describes.
    kinds: Mapping[str, LeafKind] = field(default_factory=dict)


def grid_of(shape: Sequence[int], tile_shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the number of tiles along each dimension of an array."""
    return tuple(-(-n // max(1, t)) for n, t in zip(shape, tile_shape, strict=True))


def prefix_of(name: str) -> str:
    """Returns the prefix of an array's keys, as TensorStore makes a directory of a path."""
    if name in ("", "/"):
        return ""
    return name if name.endswith("/") else f"{name}/"


def path_text(path: Sequence[str]) -> str:
    """Joins names with `/`; a `/` in a name is written `~1`, a `~` is written `~0`.

    Example:
        >>> path_text(("params", "a/b", "0"))
        'params/a~1b/0'
    """
    text = "/".join(path)
    if "~" in text or text.count("/") >= len(path):
        text = "/".join(name.replace("~", "~0").replace("/", "~1") for name in path)
    return text


def parse_path(path: str | Sequence[object]) -> Path:
    """Returns the names of a path that users give as text or as a tuple of keys.

    Example:
        >>> parse_path("params/a~1b/0"), parse_path(("opt", 0))
        (('params', 'a/b', '0'), ('opt', '0'))
    """
    if isinstance(path, str):
        if not path:
            return ()
        return tuple(part.replace("~1", "/").replace("~0", "~") for part in path.split("/"))
    return tuple(str(key) for key in path)


def bad_leaf(leaf: Leaf, file: str, what: str) -> CorruptCheckpoint:
    """Returns the error for a leaf whose data or metadata is bad."""
    return damaged(file, f"leaf {leaf.text}: {what}", leaf=leaf.text)


def name_problems(paths: Sequence[Path]) -> list[str]:
    """Returns a line for each path that cannot be stored in one checkpoint with the others."""
    first: dict[str, Path] = {}
    problems = []
    for path in paths:
        name = ".".join(path)
        if (other := first.setdefault(prefix_of(name), path)) is not path:
            problems.append(
                f"  {path_text(path)}: would have the same name on disk, {name!r}, as "
                f"{path_text(other)}; rename one of the keys"
            )
        if len(path) > MAX_LEVELS:
            problems.append(f"  {path_text(path[:4])}/...: nested deeper than {MAX_LEVELS} levels")
        if len(name.encode(errors="replace")) > _MAX_NAME_BYTES:
            problems.append(f"  {path_text(path)[:80]}...: longer than {_MAX_NAME_BYTES} bytes")
        if not name.isprintable() and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in name):
            problems.append(f"  {path!r}: a key contains a NUL or an unpaired surrogate")
    return problems


# --- writing ---------------------------------------------------------------------------------


def encode(tree: Tree) -> bytes:
    """Encodes in the order of the leaves, on which older Orbax readers depend."""
    entries = {
        repr(leaf.path): {
            "key_metadata": [
                {"key": name, "key_type": kind}
                for name, kind in zip(leaf.path, leaf.key_types, strict=True)
            ],
            "value_metadata": _encode_value(leaf),
        }
        for leaf in tree.leaves
    }
    ours: dict[str, object] = {"version": _version(tree), "tree": _encode_node(tree.root)}
    if tree.kinds:
        ours["kinds"] = dict(tree.kinds)
    return jsontext.dumps(
        {
            "tree_metadata": entries,
            "use_ocdbt": bool(tree.uses_ocdbt),
            "use_zarr3": tree.zarr_version == 3,
            "store_array_data_equal_to_fill_value": not tree.fill_missing,
            "custom_metadata": tree.custom_metadata,
            _OURS: ours,
        }
    )


def _version(tree: Tree) -> int:
    """Returns the oldest version whose readers find all values."""
    if any(leaf.has_array and _ends_in_slash(leaf) and not leaf.doubled for leaf in tree.leaves):
        return 3
    return 2 if any(leaf.stored is not None and leaf.stored.zstd for leaf in tree.leaves) else 1


def _ends_in_slash(leaf: Leaf) -> bool:
    return leaf.path != () and leaf.path[-1][-1:] == "/"


def kind_of(value_type: str) -> LeafKind:
    """Returns our kind for a `value_type` of Orbax."""
    return _ORBAX_KIND[value_type]


def lost_kinds(leaves: Sequence[Leaf]) -> dict[str, LeafKind]:
    """Returns the kinds, by name, that would come back as another if only Orbax's were recorded."""
    lost = ("bytes", "str", "generic", "complex")
    return {leaf.name: leaf.kind for leaf in leaves if leaf.has_array and leaf.kind in lost}


def orbax_value_type(leaf: Leaf) -> str:
    """Returns Orbax's `value_type` for a leaf; types unknown to Orbax are arrays to it."""
    if leaf.kind == "empty":
        return leaf.dtype if leaf.dtype in _ORBAX_KIND else "None"
    if leaf.value is not None:
        return "string"
    if leaf.kind in ("array", "key"):
        return "jax.Array"
    if leaf.kind in ("numpy", "bytes", "str") or leaf.dtype.startswith("complex"):
        return "np.ndarray"  # a scalar is never complex to Orbax
    return "scalar"


def _encode_value(leaf: Leaf) -> dict[str, object]:
    value_type = orbax_value_type(leaf)
    value: dict[str, object] = {"value_type": value_type, "skip_deserialize": leaf.kind == "empty"}
    kind = None if _ORBAX_KIND[value_type] == leaf.kind else leaf.kind
    ours: dict[str, object] = {"node": _encode_node(leaf.container), "kind": kind}
    if (stored := leaf.stored) is not None:
        ours |= {"shape": stored.shape, "dtype": stored.dtype, "chunk": stored.chunk_shape}
        ours |= {"inner": stored.inner_shape, "zstd": stored.zstd}
        ours["as"] = None if stored.dtype == leaf.dtype else leaf.dtype
        if leaf.kind == "key":
            ours |= {"impl": leaf.key_impl, "key_shape": leaf.shape}
        if value_type == "jax.Array":
            value["write_shape"] = stored.chunk_shape
    ours = given(ours)
    return value | ({_OURS: ours} if ours else {})


def _encode_node(node: Node | None) -> object:
    if node is None:
        return None
    has_nodes = any(child is not None for child in node.children)
    children = [_encode_node(child) for child in node.children] if has_nodes else None
    facts = {"type": node.type, "names": node.names, "keys": node.keys, "class": node.cls}
    return given({**facts, "aux": node.aux, "children": children})


# --- reading ---------------------------------------------------------------------------------


def decode(data: bytes, *, file: str) -> Tree:
    top = expect(jsontext.loads(data, file=file), dict, "the file", file=file)
    entries = expect(top.get("tree_metadata"), dict, "'tree_metadata'", file=file)
    root, kinds, version, ours = None, {}, VERSION, top.get(_OURS)
    if ours is not None:
        version = expect(ours, dict, _OURS, file=file).get("version")
        if (version := expect(version, int, "version", file=file)) > VERSION:
            raise UnsupportedFormat(
                f"{file}: written by a newer jaxckpt (tree version {version}, this release reads "
                f"up to {VERSION}). Upgrade jaxckpt to read it."
            )
    leaves = _decode_leaves(entries, file)
    if version < 3:
        leaves = tuple(x._replace(doubled=True) if _ends_in_slash(x) else x for x in leaves)
    if ours is not None:
        root = _decode_node(ours["tree"], file) if ours.get("tree") else None
        if odd := _unlike(root, leaves):  # some leaves would be lost silently
            what = f"the containers and the list of leaves differ: {', '.join(odd[:8])}"
            raise damaged(file, what, leaf=odd[0])
        kinds = expect(ours.get("kinds", {}), dict, "'kinds'", file=file)
        if odd := [kind for kind in kinds.values() if kind not in _STORED_KINDS]:
            raise damaged(file, f"unknown kind {odd[0]!r}")
    elif isinstance(text := top.get("value_metadata_tree"), str):
        root = _decode_rich(jsontext.loads(text.encode(), file=file), file)
        root = None if _unlike(root, leaves) else root  # Orbax recorded them apart
    ocdbt, zarr3, stores_fill = (
        maybe_expect(top.get(key), bool, repr(key), file=file)
        for key in ("use_ocdbt", "use_zarr3", "store_array_data_equal_to_fill_value")
    )
    return Tree(
        leaves=leaves,
        root=root,
        typed=ours is not None or root is not None,
        zarr_version=3 if zarr3 else 2,
        uses_ocdbt=ocdbt,
        fill_missing=not stores_fill,
        custom_metadata=top.get("custom_metadata"),
        kinds=kinds,
    )


# The fields after the leaves, as `encode` writes them for arrays in a database.
_AFTER_LEAVES: Final = (
    b'},"use_ocdbt":true,"use_zarr3":true,"store_array_data_equal_to_fill_value":true,"custom_'
)
_MOST_ENTRY_BYTES: Final = 64 << 10
# The shapes of an array that is not exactly one chunk. No string contains this: quotes are escaped.
_IN_CHUNKS: Final = re.compile(
    rb'"shape":(\[[\d,]*\]),"dtype":"\w+","chunk":(?!\1(?:\}|,"[^i]))(\[[\d,]*\])'
    rb'(?:,"inner":(\[[\d,]*\]))?'
)


def decode_leaf(data: bytes, path: Path, *, file: str) -> tuple[Tree, int] | None:
    """Decodes one leaf that has an array, and makes no objects of the others.

    Returns:
        The tree with only this leaf, and the number of chunks (or inner chunks) of the arrays
        before it. None if it takes a whole `decode` to find the leaf.
    """
    key = jsontext.dumps(repr(path)) + b":"
    start, end = data.find(key), data.rfind(_AFTER_LEAVES)
    if not 0 < start < end or (path and path[-1].endswith("/")):
        return None
    text = data[start + len(key) : start + len(key) + _MOST_ENTRY_BYTES].decode(errors="ignore")
    try:
        entry, _ = json.JSONDecoder().raw_decode(text)
        in_chunks = Counter(_IN_CHUNKS.findall(data, 0, start))
        before = sum(_units(*shapes) * count for shapes, count in in_chunks.items())
    except (ValueError, RecursionError):
        return None
    (leaf,) = _decode_leaves({"": entry}, file)
    if leaf.path != path or leaf.stored is None:
        return None
    before += data.count(b'"shape":[', 0, start) - in_chunks.total()
    return Tree(leaves=(leaf,), typed=True, uses_ocdbt=True), before


def _units(*shapes: bytes) -> int:
    shape, chunk, inner = (json.loads(text or b"[]") for text in shapes)
    return math.prod(grid_of(shape, inner or chunk))


def _unlike(root: Node | None, leaves: Sequence[Leaf]) -> list[str]:
    """Returns the paths that are only in the containers, or only in the list of leaves."""
    in_tree: set[Path] = set()
    nodes: list[tuple[Path, Node | None]] = [((), root)]
    for path, node in nodes:  # which grows meanwhile
        if node is None:
            in_tree.add(path)
        else:
            below = zip(node.names, node.children, strict=True)
            nodes += [((*path, name), child) for name, child in below]
    return sorted(map(path_text, in_tree ^ {leaf.path for leaf in leaves}))


def _decode_leaves(entries: Mapping[str, object], file: str) -> tuple[Leaf, ...]:
    if not entries:
        raise damaged(file, "'tree_metadata' is empty")
    fields = expect_all(entries.values(), dict, "an entry of 'tree_metadata'", file=file)
    lists: list[Any] = [entry.get("key_metadata") for entry in fields]
    all_keys = [*chain.from_iterable(expect_all(lists, list, "'key_metadata'", file=file))]
    if not _are_keys(all_keys) or max(map(len, lists)) > MAX_READ_LEVELS:
        bad = next(x for x in lists if len(x) > MAX_READ_LEVELS or not _are_keys(x))
        raise damaged(file, f"'key_metadata' is not {MAX_READ_LEVELS} keys or less: {short(bad)}")
    names, kinds = (iter([key[x] for key in all_keys]) for x in ("key", "key_type"))
    paths = [(*islice(names, n),) for n in map(len, lists)]
    if len({*paths}) != len(paths):
        raise damaged(file, "two leaves have the same path")
    leaves = []
    alike: dict[str, dict[str, Any]] = {}  # the facts of each distinct value, by its text
    for path, entry in zip(paths, fields, strict=True):
        text = repr(value := entry.get("value_metadata"))
        if (facts := alike.get(text)) is None:
            facts = alike[text] = _decode_value(value, path_text(path), file)
        leaves.append(Leaf(path, (*islice(kinds, len(path)),), **facts))
    return tuple(leaves)


def _are_keys(keys: Sequence[Any]) -> bool:
    return (
        {*map(type, keys)} <= {dict}
        and {type(key.get("key")) for key in keys} <= {str}
        and {repr(key.get("key_type")) for key in keys} <= {"1", "2"}
    )


def _decode_value(value: object, where: str, file: str) -> dict[str, Any]:
    """Returns the facts about a leaf, without its path."""
    fields = expect(value, dict, f"{where}: 'value_metadata'", file=file)
    value_type = expect(fields.get("value_type"), str, f"{where}: 'value_type'", file=file)
    if value_type not in _ORBAX_KIND:
        raise UnsupportedFormat(
            f"{file}: leaf {where} has the unknown type {value_type!r}, written by a newer "
            f"release (known: {', '.join(_ORBAX_KIND)}). Upgrade jaxckpt to read it."
        )
    kind = _ORBAX_KIND[value_type]
    ours = expect(fields.get(_OURS, {}), dict, f"{where}: {_OURS!r}", file=file)
    if kind == "empty":
        container = _decode_node(ours["node"], file) if ours.get("node") else None
        return {"kind": kind, "dtype": value_type, "container": container}
    if fields.get("skip_deserialize") is True and value_type in _ARRAY_TYPES:
        # Orbax before 0.5.16 kept such values in the msgpack file.
        return {"kind": "absent", "dtype": value_type}
    return _decode_ours(kind, ours, where, file) if ours else {"kind": kind}


def _decode_ours(kind: str, ours: Mapping[str, Any], where: str, file: str) -> dict[str, Any]:
    kind = ours.get("kind", kind)
    if kind not in _STORED_KINDS:
        raise damaged(file, f"{where}: unknown kind {kind!r}", leaf=where)
    if "shape" not in ours and kind in _TEXT_KINDS:
        return {"kind": kind}

    def shape_of(key: str) -> tuple[int, ...]:
        return expect_shape(ours.get(key), f"{where}: {key}", file=file)

    stored = StoredArray(
        shape=shape_of("shape"),
        dtype=expect(ours.get("dtype"), str, f"{where}: dtype", file=file),
        chunk_shape=shape_of("chunk"),
        inner_shape=None if ours.get("inner") is None else shape_of("inner"),
        zstd=maybe_expect(ours.get("zstd"), int, f"{where}: zstd", file=file),
    )
    check_grid(stored, where=where, file=file)
    return {
        "kind": kind,
        "dtype": expect(ours.get("as", stored.dtype), str, f"{where}: as", file=file),
        "shape": shape_of("key_shape") if kind == "key" else stored.shape,
        "key_impl": maybe_expect(ours.get("impl"), str, f"{where}: impl", file=file),
        "stored": stored,
    }


def check_grid(stored: StoredArray, *, where: str, file: str) -> None:
    """Refuses an invalid chunk grid: wrong rank, empty chunks, an absurd size."""
    shape, chunks, inner = stored.shape, stored.chunk_shape, stored.inner_shape
    grids = (chunks, chunks if inner is None else inner)
    if bad := [grid for grid in grids if len(grid) != len(shape) or any(n < 1 for n in grid)]:
        problem = f"chunks of shape {bad[0]} do not fit shape {shape}"
    elif any(map(operator.mod, *grids)):
        problem = f"inner chunks of shape {inner} do not divide chunks of shape {chunks}"
    # Without the zeros, because numpy also multiplies only the other dimensions.
    elif math.prod(n or 1 for n in shape) >= MAX_ELEMENTS:
        problem = f"shape {shape} has too many elements"
    else:
        return
    raise damaged(file, f"{where}: {problem}", leaf=where)


def _decode_node(value: object, file: str) -> Node:
    fields = expect(value, dict, "a container", file=file)
    node_type = fields.get("type")
    if node_type not in ("dict", "list", "tuple", "odict", "class"):
        raise damaged(file, f"unknown container type {node_type!r}")
    names = expect(fields.get("names"), list, "'names'", file=file)
    expect_all(names, str, "a child's name", file=file)
    children = expect(fields.get("children", [None] * len(names)), list, "'children'", file=file)
    keys, cls = fields.get("keys"), fields.get("class")
    for key in expect([] if keys is None else keys, list, "'keys'", file=file):
        _check_key(key, file)
    if len(children) != len(names) or len(names) != len(set(names) if keys is None else keys):
        raise damaged(file, "a container's names and children differ")
    parts = expect([] if cls is None else cls, list, "'class'", file=file)
    if cls is not None and [type(part) for part in parts] != [str, str]:
        raise damaged(file, "'class' must be a module and a name")
    return Node(
        type=node_type,
        names=tuple(names),
        keys=None if keys is None else tuple(keys),
        children=tuple(None if child is None else _decode_node(child, file) for child in children),
        cls=None if cls is None else (parts[0], parts[1]),
        aux=fields.get("aux"),
    )


def _check_key(key: object, file: str) -> None:
    if isinstance(key, dict) and "float" in key:
        expect(key["float"], str, "a key", file=file)
    elif isinstance(key, dict):
        for part in expect(key.get("tuple"), list, "a key", file=file):
            _check_key(part, file)
    elif key is not None and not isinstance(key, (str, int, float)):
        raise damaged(file, f"invalid dict key {key!r}")


def _decode_rich(value: object, file: str) -> Node | None:
    """Decodes Orbax's experimental `value_metadata_tree`, which knows tuples and namedtuples."""
    if isinstance(value, list):
        return _rich_node("list", {str(i): child for i, child in enumerate(value)}, file)
    fields = expect(value, dict, "a node of 'value_metadata_tree'", file=file)
    category, clazz = fields.get("category"), fields.get("clazz")
    if category not in ("custom", "namedtuple"):
        return _rich_node("dict", fields, file)
    if clazz == "ValueMetadataEntry":
        return None
    entries = expect(fields.get("entries"), list, "'entries'", file=file)
    if category == "custom":
        node = _decode_rich(entries, file)
        return replace(node, type="tuple") if node is not None and clazz == "tuple" else node
    pairs = [expect(entry, dict, "an entry", file=file) for entry in entries]
    keys = [expect(pair.get("key"), str, "'key'", file=file) for pair in pairs]
    node = _rich_node("class", dict(zip(keys, (x.get("value") for x in pairs), strict=True)), file)
    return replace(node or Node(type="class"), cls=(str(fields.get("module")), str(clazz)))


def _rich_node(kind: Any, below: Mapping[str, object], file: str) -> Node | None:
    children = tuple(_decode_rich(child, file) for child in below.values())
    return Node(type=kind, names=tuple(below), children=children) if children else None
