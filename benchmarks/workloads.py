"""Builds the workloads: three trees of float32 arrays on 4x2 devices, and their restore targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DEVICES: Final = 8
# The mesh that a workload is restored onto, by the name of the figure. It is saved on 4x2.
TARGETS: Final[Mapping[str, tuple[int, int]]] = {
    "restore, same mesh": (4, 2),
    "restore on 2x4": (2, 4),
    "restore on 1 device": (1, 1),
}

_Shapes = dict[str, tuple[int, ...]]


class AdamState(NamedTuple):
    """The same as in optax, so that optax is not needed."""

    count: Any
    mu: Any
    nu: Any


class TrainState(NamedTuple):
    step: Any
    params: Any
    opt_state: AdamState


def make_mesh(x: int, y: int) -> Mesh:
    """Makes a mesh of the first `x * y` devices."""
    return Mesh(np.array(jax.devices()[: x * y]).reshape(x, y), ("x", "y"))


def build(name: str, *, scale: float, mesh: Mesh) -> Any:
    """Makes the tree of a workload.

    Args:
        name: One of `WORKLOADS`.
        scale: The approximate fraction of its bytes; published figures are for 1.
        mesh: Large matrices are split over both of its axes; everything else is replicated.
    """
    tree = WORKLOADS[name](scale)
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda shape: _place(rng.standard_normal(shape, np.float32), mesh), tree, is_leaf=_is_shape
    )
    return jax.block_until_ready(state)


def abstract(tree: Any, mesh: Mesh) -> Any:
    """Returns the tree as shapes, with the same PartitionSpecs on `mesh`."""

    def one(array: jax.Array) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, _spec(array.shape))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return jax.tree.map(one, tree)


def total_bytes(tree: Any) -> int:
    """Returns the bytes of the values; replicas count once."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _place(values: np.ndarray[Any, Any], mesh: Mesh) -> jax.Array:
    sharding = NamedSharding(mesh, _spec(values.shape))
    # Not with `device_put`, which compares the values of all processes.
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def _spec(shape: tuple[int, ...]) -> PartitionSpec:
    is_large = len(shape) == 2 and math.prod(shape) > 2048
    return PartitionSpec("x", "y") if is_large else PartitionSpec()


def _is_shape(node: object) -> bool:
    return type(node) is tuple and all(isinstance(n, int) for n in node)


def _rows(n: float) -> int:
    """Rounds to a size that every mesh here divides."""
    return max(8, round(n / 8) * 8)


def _large(scale: float) -> _Shapes:
    rows = _rows(1024 * scale)
    layers = {f"layer_{i:02d}": (rows, 2048) for i in range(96)}
    return {**layers, "embedding": (_rows(64 * scale), 1024), "head": (_rows(64 * scale), 1024)}


def _gpt2(scale: float) -> TrainState:
    """Returns the shapes of GPT-2 small with adam: 148 parameters three times, two counters."""
    width, layers = _rows(768 * scale**0.25), math.ceil(12 * math.sqrt(scale))
    # 50,257 is padded, as usual, so that meshes divide it.
    params = {"wte": (_rows(50_304 * width / 768), width), "wpe": (1024, width)}
    params |= {"ln_f/scale": (width,), "ln_f/bias": (width,)}
    for i in range(layers):
        block = {
            "ln_1/scale": (width,),
            "ln_1/bias": (width,),
            "attn/qkv/kernel": (width, 3 * width),
            "attn/qkv/bias": (3 * width,),
            "attn/out/kernel": (width, width),
            "attn/out/bias": (width,),
            "ln_2/scale": (width,),
            "ln_2/bias": (width,),
            "mlp/up/kernel": (width, 4 * width),
            "mlp/up/bias": (4 * width,),
            "mlp/down/kernel": (4 * width, width),
            "mlp/down/bias": (width,),
        }
        params |= {f"h_{i:02d}/{name}": shape for name, shape in block.items()}
    nested = _nest(params)
    return TrainState(step=(), params=nested, opt_state=AdamState(count=(), mu=nested, nu=nested))


def _small(scale: float) -> dict[str, tuple[int, ...]]:
    return {f"leaf_{i:05d}": (64, 32) for i in range(max(1, round(10_000 * scale)))}


def _nest(flat: _Shapes) -> dict[str, Any]:
    top: dict[str, Any] = {}
    for name, shape in flat.items():
        *folders, last = name.split("/")
        node = top
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = shape
    return top


WORKLOADS: Final[Mapping[str, Callable[[float], Any]]] = {
    "large": _large,
    "gpt2": _gpt2,
    "small": _small,
}
