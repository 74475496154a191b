"""Large models as shapes and shardings, for `jaxckpt plan`.

    jaxckpt plan benchmarks.models:llama_70b --hosts 64 --devices-per-host 8 --mesh fsdp=64,tp=8

Layers are stacked, as for `jax.lax.scan`. The state has the parameters in float32 and Adam's two
moments: 12 bytes for each parameter. FSDP splits each matrix along one side, tensor parallelism
along the other; norms are replicated.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

Shapes = dict[str, tuple[tuple[int, ...], P]]


def llama_70b() -> Any:
    return _state(_llama(layers=80, width=8192, hidden=28_672, kv=1024))


def llama_405b() -> Any:
    return _state(_llama(layers=126, width=16_384, hidden=53_248, kv=1024))


def _llama(*, layers: int, width: int, hidden: int, kv: int, vocabulary: int = 128_256) -> Shapes:
    into, out = P(None, "fsdp", "tp"), P(None, "tp", "fsdp")
    return {
        "embed": ((vocabulary, width), P("tp", "fsdp")),
        "head": ((width, vocabulary), P("fsdp", "tp")),
        "norm": ((width,), P()),
        "layers/query": ((layers, width, width), into),
        "layers/key": ((layers, width, kv), into),
        "layers/value": ((layers, width, kv), into),
        "layers/out": ((layers, width, width), out),
        "layers/gate": ((layers, width, hidden), into),
        "layers/up": ((layers, width, hidden), into),
        "layers/down": ((layers, hidden, width), out),
        "layers/attention_norm": ((layers, width), P()),
        "layers/mlp_norm": ((layers, width), P()),
    }


def _state(shapes: Shapes) -> Any:
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, (shape, _) in shapes.items()}
    specs = {name: spec for name, (_, spec) in shapes.items()}
    step = jax.ShapeDtypeStruct((), jnp.int32)
    parts = ("params", "mu", "nu")
    return {"step": step, **dict.fromkeys(parts, arrays)}, {
        "step": P(),
        **dict.fromkeys(parts, specs),
    }
