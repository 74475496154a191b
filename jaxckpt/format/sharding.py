"""`_sharding`: how each jax.Array was laid out over devices when it was saved."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from jaxckpt.errors import damaged
from jaxckpt.format import jsontext
from jaxckpt.format.jsontext import expect, expect_shape

# 10,000 leaves on a mesh of 128 devices take this much; with 4,096 devices they would take 600 MB.
_MAX_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSharding:
    """A `NamedSharding` as data; a single-device sharding has no axes."""

    axis_names: tuple[str, ...] = ()  # of the mesh
    axis_sizes: tuple[int, ...] = ()  # of the mesh
    axis_types: tuple[str, ...] = ()  # "Auto", "Explicit" or "Manual"; empty if not recorded
    spec: tuple[str | tuple[str, ...] | None, ...] = ()  # for each dimension
    device_ids: tuple[int, ...] = ()  # of the mesh, flattened; empty if not recorded
    device: str = ""  # the `str()` of the device of an array without a mesh

    @property
    def is_single_device(self) -> bool:
        return not self.axis_names

    def __str__(self) -> str:
        if self.is_single_device:
            return "one device"
        mesh = ", ".join(f"{n}={s}" for n, s in zip(self.axis_names, self.axis_sizes, strict=True))
        spec = ", ".join("None" if axes is None else repr(axes) for axes in self.spec)
        return f"P({spec}) on ({mesh})"


def encode(shardings: Mapping[str, SavedSharding]) -> bytes:
    """Encodes `_sharding`, by leaf name.

    Orbax fails on a file that lacks a jax.Array leaf, so every leaf has an entry, and every entry
    lists the devices of its mesh. If this made the file large, the devices are left out; readers
    then take `jax.devices()` in order.
    """
    texts = {sharding: json.dumps(_to_json(sharding)) for sharding in set(shardings.values())}
    if sum(len(texts[sharding]) for sharding in shardings.values()) > _MAX_BYTES:
        bare = {sharding: replace(sharding, device_ids=()) for sharding in texts}
        texts = {sharding: json.dumps(_to_json(bare[sharding])) for sharding in texts}
    return jsontext.dumps(
        {
            base64.urlsafe_b64encode(name.encode()).decode(): texts[sharding]
            for name, sharding in shardings.items()
        }
    )


def decode(data: bytes, *, file: str, only: str | None = None) -> dict[str, SavedSharding]:
    """Decodes `_sharding`, or perhaps `only` one leaf's entry; skips those of unknown kinds."""
    if only is not None:
        key = b'"%s":' % base64.urlsafe_b64encode(only.encode())
        found = re.compile(re.escape(key) + rb'"(?:[^"\\]|\\.)*+"').search(data)
        data = b"{%s}" % found[0] if found else data
    top = expect(jsontext.loads(data, file=file), dict, "the file", file=file)
    parsed: dict[str, SavedSharding | None] = {}
    shardings = {}
    for key, text in top.items():
        try:
            name = binascii.a2b_base64(key.replace("-", "+").replace("_", "/")).decode()
        except ValueError as error:
            raise damaged(file, f"key {key!r} is not base64") from error
        if not isinstance(text, str) or not text:
            continue
        if text not in parsed:
            parsed[text] = _from_json(jsontext.loads(text.encode(), file=file), file)
        if (sharding := parsed[text]) is not None:
            shardings[name] = sharding
    return shardings


def _to_json(sharding: SavedSharding) -> dict[str, object]:
    if sharding.is_single_device:
        return {"sharding_type": "SingleDeviceSharding", "device_str": sharding.device}
    fields: dict[str, object] = {
        "sharding_type": "NamedSharding",
        "shape": sharding.axis_sizes,
        "axis_names": sharding.axis_names,
        "axis_types": [f"AxisType.{kind}" for kind in sharding.axis_types],
        "partition_spec": sharding.spec,
    }
    if sharding.device_ids:
        mesh: Any = [{"id": i} for i in sharding.device_ids]
        for size in reversed(sharding.axis_sizes[1:]):
            mesh = [mesh[i : i + size] for i in range(0, len(mesh), size)]
        fields["device_mesh"] = {"mesh": mesh}
    return fields


def _from_json(value: object, file: str) -> SavedSharding | None:
    fields = expect(value, dict, "a sharding", file=file)
    if fields.get("sharding_type") == "SingleDeviceSharding":
        # jax before 0.10 named CPU devices differently.
        device = str(fields.get("device_str", "")).replace("TFRT_CPU_", "cpu:")
        return SavedSharding(device=device)
    if fields.get("sharding_type") != "NamedSharding":
        return None
    names = expect(fields.get("axis_names"), list, "'axis_names'", file=file)
    sizes = expect_shape(fields.get("shape"), "a mesh shape", file=file)
    spec = expect(fields.get("partition_spec"), list, "'partition_spec'", file=file)
    if len(names) != len(sizes) or not all(isinstance(name, str) for name in names):
        raise damaged(file, f"axes {names} do not fit a mesh of {sizes}")
    used = [a for axes in spec for a in (axes if isinstance(axes, list) else [axes]) if a]
    if len(set(names)) < len(names) or len({*map(str, used)}) < len(used) or 0 in sizes:
        raise damaged(file, f"invalid sharding: spec {spec} on axes {names} of sizes {sizes}")
    types = fields.get("axis_types") or []
    ids = _ids(fields.get("device_mesh"))
    return SavedSharding(
        axis_names=tuple(names),
        axis_sizes=sizes,
        axis_types=tuple(
            str(kind).rpartition(".")[2] for kind in expect(types, list, "'axis_types'", file=file)
        ),
        spec=tuple(_axes(axes, names, file) for axes in spec),
        device_ids=tuple(ids) if len(set(ids)) == len(ids) else (),
    )


def _axes(axes: object, names: list[str], file: str) -> str | tuple[str, ...] | None:
    if axes is None or (isinstance(axes, str) and axes in names):
        return axes
    if isinstance(axes, list) and all(isinstance(a, str) and a in names for a in axes):
        return tuple(axes)
    raise damaged(file, f"partition spec {axes!r} does not name the mesh axes {names}")


def _ids(device_mesh: object) -> list[int]:
    """Flattens the nested lists of `{"id": n}`; returns [] if there is anything else."""
    stack: list[object] = [device_mesh.get("mesh")] if isinstance(device_mesh, dict) else []
    ids = []
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack.extend(reversed(item))
        elif isinstance(item, dict) and isinstance(item.get("id"), int):
            ids.append(item["id"])
        else:
            return []
    return ids
