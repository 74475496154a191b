"""Hypothesis strategies: trees of every kind, dtypes, shapes, meshes and PartitionSpecs.

Needs hypothesis, and flax and optax for their containers. The trees of `trees` can all be saved;
`jax_dtypes` and `numpy_dtypes` are every dtype that a checkpoint holds.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import flax.struct
import jax
import numpy as np
import optax
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey, register_pytree_with_keys_class

from jaxckpt._core.pytree import is_key_dtype
from jaxckpt.format.arrays import AS_BYTES_DTYPES, STORABLE_DTYPES, dtype_of

Draw = Any  # hypothesis' DrawFn


class Pair(NamedTuple):
    """A namedtuple of no library: without a target it comes back as a dict."""

    left: Any
    right: Any


@flax.struct.dataclass
class Struct:
    """A flax dataclass of no library, with a static field."""

    weight: Any
    bias: Any
    name: str = flax.struct.field(pytree_node=False, default="static")


@register_pytree_with_keys_class
class Registered:
    """A registered node that is no dataclass."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], None]:
        return ((GetAttrKey("inner"), self.inner),), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Sequence[Any]) -> Any:
        del aux
        return cls(children[0])


ALL_DTYPES: Final = sorted(STORABLE_DTYPES | AS_BYTES_DTYPES)


def all_dtypes() -> st.SearchStrategy[np.dtype[Any]]:
    """Every dtype that a checkpoint holds."""
    return st.sampled_from(ALL_DTYPES).map(dtype_of)


def shapes(max_dims: int = 3, max_side: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of no, one and more dimensions, empty ones included."""
    return st.lists(st.integers(0, max_side), max_size=max_dims).map(tuple)


@st.composite
def host_arrays(draw: Draw, dtype: np.dtype[Any] | None = None) -> np.ndarray[Any, Any]:
    """Arrays of random bits: NaNs with payloads, infinities, -0.0, denormals."""
    chosen: np.dtype[Any] = draw(all_dtypes()) if dtype is None else dtype
    shape = draw(shapes())
    seed = draw(st.integers(0, 2**32 - 1))
    return random_bits(shape, chosen, seed)


def random_bits(shape: Sequence[int], dtype: np.dtype[Any], seed: int) -> np.ndarray[Any, Any]:
    """An array whose every element is a valid value of its dtype, bit patterns at random."""
    rng = np.random.default_rng(seed)
    count = math.prod(shape)
    raw = rng.integers(0, 256, (count, dtype.itemsize), np.uint8)
    if dtype.name == "bool":
        raw &= 1
    if bits := _narrow_bits(dtype.name):
        codes = raw[:, 0] & ((1 << bits) - 1)
        if dtype.name in ("int4", "int2"):  # held sign-extended
            codes = np.where(codes >> (bits - 1), codes | (256 - (1 << bits)), codes)
        raw = codes.astype(np.uint8)
    return np.ascontiguousarray(raw).view(dtype).reshape(shape)


def _narrow_bits(name: str) -> int:
    """How many bits of each byte count, 0 for all."""
    narrow = {"float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6}
    return narrow.get(name) or {"int4": 4, "uint4": 4, "int2": 2, "uint2": 2}.get(name, 0)


@cache
def jax_holds(dtype: np.dtype[Any]) -> bool:
    """Returns whether this jax has arrays of a dtype: older ones lack some of the narrow ones."""
    try:
        to_jax(np.zeros(1, dtype))
    except (TypeError, jax.errors.JaxRuntimeError):
        return False
    return True


def to_jax(values: np.ndarray[Any, Any]) -> jax.Array:
    """A jax array of the same dtype, also of 64 bits, whatever `jax_enable_x64` says."""
    with jax.enable_x64(True):
        return jax.device_put(values)


def jax_arrays() -> st.SearchStrategy[jax.Array]:
    """jax arrays of every dtype that this jax has."""
    return host_arrays().filter(lambda values: jax_holds(values.dtype)).map(to_jax)


@st.composite
def keys(draw: Draw) -> jax.Array:
    """Typed PRNG keys of each implementation, alone and batched."""
    impl = draw(st.sampled_from(["threefry2x32", "rbg", "unsafe_rbg"]))
    key = jax.random.key(draw(st.integers(0, 1000)), impl=impl)
    batch = draw(st.sampled_from([None, (), (3,), (2, 2)]))
    return key if batch is None else jax.random.split(key, batch)


def scalars() -> st.SearchStrategy[Any]:
    """Python values, numpy scalars and the values that need care."""
    numpy_scalars = st.sampled_from(
        [np.float32(-0.0), np.float64("nan"), np.int8(-5), np.bool_(True), np.uint64(2**64 - 1)]
    )
    return st.one_of(
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.complex_numbers(),
        st.text(st.characters(codec="utf-8"), max_size=8),
        st.binary(max_size=8),
        numpy_scalars,
    )


def leaves() -> st.SearchStrategy[Any]:
    """Every kind of leaf."""
    return st.one_of(host_arrays(), jax_arrays(), keys(), scalars(), st.none())


# Without NUL, which no store can hold.
_ODD_NAMES: Final = [
    "",
    ".",
    "..",
    "a.b",
    "a/b",
    "~",
    "~1",
    "a b",
    "ü",
    "0",
    "c",
    "c/0",
    "λ/~.",
]


def names() -> st.SearchStrategy[str]:
    """Names of dict keys, odd ones often."""
    return st.sampled_from([*"abcdef", *_ODD_NAMES]) | st.text(
        st.characters(codec="utf-8", exclude_characters="\0"), max_size=4
    )


def _dicts(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.dictionaries(names(), children, max_size=3),
        st.dictionaries(st.integers(-3, 20), children, max_size=3),
        st.dictionaries(st.tuples(st.integers(0, 3), names()), children, max_size=2),
    )


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Containers of each kind, empty ones included, whose types come back without a target."""
    optax_states = st.one_of(
        st.builds(lambda x, y: optax.ScaleByAdamState(x, y, y), children, children),
        st.just(optax.EmptyState()),
        st.builds(optax.TraceState, children),
    )
    return st.one_of(
        _dicts(children),
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.lists(st.tuples(names(), children), max_size=3).map(OrderedDict),
        optax_states,
    )


def trees(max_leaves: int = 8) -> st.SearchStrategy[Any]:
    """Trees whose values and types come back without a target, or that a save refuses."""
    return st.recursive(leaves(), containers, max_leaves=max_leaves)


def target_trees(max_leaves: int = 8) -> st.SearchStrategy[Any]:
    """Trees that also hold containers of the user's own, which need a target to come back."""

    def own(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            containers(children),
            st.builds(Pair, children, children),
            st.builds(Struct, children, children, st.sampled_from(["static", "other"])),
        )

    return st.recursive(leaves(), own, max_leaves=max_leaves)


# --- what to do with them --------------------------------------------------------------------


def same(a: Any, b: Any) -> bool:
    """Returns whether two trees are equal in types, dtypes and every bit."""
    if isinstance(a, jax.Array):
        return isinstance(b, jax.Array) and a.dtype == b.dtype and same(_bits(a), _bits(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        ordered = isinstance(a, OrderedDict)
        keys_fit = (
            list(a) == list(b)
            if ordered
            else {(type(k), k) for k in a} == {(type(k), k) for k in b}
        )
        return keys_fit and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (float, complex, np.generic)):
        return np.asarray(a).tobytes() == np.asarray(b).tobytes()
    if isinstance(a, Struct):
        return a.name == b.name and same((a.weight, a.bias), (b.weight, b.bias))
    if isinstance(a, Registered):
        return same(a.inner, b.inner)
    return a == b


def _bits(array: jax.Array) -> np.ndarray[Any, Any]:
    if is_key_dtype(array.dtype):
        return np.asarray(jax.random.key_data(array))
    return np.asarray(array)


@st.composite
def mesh_shapes(draw: Draw, devices: int = 8) -> dict[str, int]:
    """Meshes of up to three axes over at most `devices` devices, as sizes by name."""
    sizes: dict[str, int] = {}
    left = devices
    for name in draw(st.permutations(["x", "y", "z"]))[: draw(st.integers(1, 3))]:
        sizes[name] = draw(st.sampled_from([n for n in range(1, left + 1) if n <= left]))
        left //= sizes[name]
    return sizes


@st.composite
def specs(draw: Draw, mesh: Mapping[str, int], global_shape: Sequence[int]) -> PartitionSpec:
    """A PartitionSpec of `mesh` that divides `global_shape`."""
    free = draw(st.permutations(list(mesh)))
    entries: list[Any] = []
    for size in global_shape:
        taken: list[str] = []
        while free and draw(st.booleans()):
            if size % (math.prod(mesh[a] for a in taken) * mesh[free[0]]):
                break
            taken.append(free.pop(0))
        entries.append(taken[0] if len(taken) == 1 else tuple(taken) or None)
    return PartitionSpec(
        *entries[: draw(st.integers(0, len(entries)))] if not any(entries) else entries
    )
