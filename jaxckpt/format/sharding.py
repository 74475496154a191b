"""`_sharding`: how each jax.Array was laid out over devices when it was saved."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

from jaxckpt.errors import damaged
from jaxckpt.format import jsontext
from jaxckpt.format.jsontext import expect, expect_shape

# 10,000 leaves on a mesh of 128 devices take this much; with 4,096 devices they would take 600 MB.
_MAX_BYTES: Final = 16 << 20
# Names the entry with the devices of all meshes. No leaf has it: it is outside base64's alphabet.
_MESHES: Final = "*"
_MOST_IDS: Final = 1 << 18  # in that entry, about: 64 meshes of 4,096 devices
_TABLE: Final = re.compile(rb'\{("\*":\{[^{}]*\},)')  # that entry, which is the first


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSharding:
    """A `NamedSharding` as data; a single-device sharding lacks axes."""

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
    lists the devices of its mesh. If this made the file large, one more entry lists the devices of
    each mesh once, and those of the leaves have its number; Orbax then takes `jax.devices()` in
    order.
    """
    kinds = {id(sharding): sharding for sharding in shardings.values()}
    meshes: dict[Any, int] = {}  # the devices of each, and its number
    texts = {kind: json.dumps(_to_json(sharding, None)) for kind, sharding in kinds.items()}
    if sum(len(texts[id(sharding)]) for sharding in shardings.values()) > _MAX_BYTES:
        texts = {kind: json.dumps(_to_json(sharding, meshes)) for kind, sharding in kinds.items()}
    top: dict[str, object] = {_MESHES: dict(enumerate(meshes))} if meshes else {}
    for name, sharding in shardings.items():
        top[base64.urlsafe_b64encode(name.encode()).decode()] = texts[id(sharding)]
    return jsontext.dumps(top)


def decode(
    data: bytes, *, file: str, only: str | None = None, plain: Iterable[str] = ()
) -> dict[str, SavedSharding]:
    """Decodes `_sharding`, or perhaps `only` one leaf's entry; skips those of unknown kinds.

    Args:
        plain: Names of leaves, in case the keys are these, as Orbax 0.4.0 and 0.4.1 wrote them.
    """
    if only is not None:
        key = b'"%s":' % base64.urlsafe_b64encode(only.encode())
        found = re.compile(re.escape(key) + rb'"(?:[^"\\]|\\.)*+"').search(data)
        table = _TABLE.match(data)
        data = b"{%s%s}" % (table[1] if table else b"", found[0]) if found else data
    top = expect(jsontext.loads(data, file=file), dict, "the file", file=file)
    listed = expect(top.pop(_MESHES, {}), dict, f"{_MESHES!r}", file=file)
    meshes = {number: _devices({"mesh": mesh}) for number, mesh in listed.items()}
    parse = cache(partial(_from_json, meshes=meshes, file=file))  # as the entries are alike
    try:
        texts = {base64.urlsafe_b64decode(key).decode(): text for key, text in top.items()}
    except ValueError as error:
        texts = {name: text for name in plain if (text := jsontext.find(top, name)) is not None}
        if not texts:
            raise damaged(file, "the keys are not names of leaves in base64") from error
    shardings = {}
    for name, text in texts.items():
        if isinstance(text, str) and text and (sharding := parse(text)) is not None:
            shardings[name] = sharding
    return shardings


def _to_json(sharding: SavedSharding, meshes: dict[Any, int] | None) -> dict[str, object]:
    if sharding.is_single_device:
        return {"sharding_type": "SingleDeviceSharding", "device_str": sharding.device}
    fields: dict[str, object] = {
        "sharding_type": "NamedSharding",
        "shape": sharding.axis_sizes,
        "axis_names": sharding.axis_names,
        "axis_types": [f"AxisType.{kind}" for kind in sharding.axis_types],
        "partition_spec": sharding.spec,
    }
    ids = sharding.device_ids
    if ids and meshes is None:
        mesh: Any = [{"id": i} for i in ids]
        for size in reversed(sharding.axis_sizes[1:]):
            mesh = [mesh[i : i + size] for i in range(0, len(mesh), size)]
        fields["device_mesh"] = {"mesh": mesh}
    elif ids and meshes is not None and (ids in meshes or sum(map(len, meshes)) < _MOST_IDS):
        fields["mesh"] = meshes.setdefault(ids, len(meshes))
    return fields


def _from_json(text: str, meshes: Mapping[str, tuple[int, ...]], file: str) -> SavedSharding | None:
    fields = expect(jsontext.loads(text.encode(), file=file), dict, "a sharding", file=file)
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
    lists = [axes if isinstance(axes, list) else [axes] for axes in spec if axes is not None]
    used = [axis for axes in lists for axis in axes]
    is_twice = len(set(names)) < len(names) or len({*map(str, used)}) < len(used)
    if is_twice or 0 in sizes or not all(axis in names for axis in used):
        raise damaged(file, f"invalid sharding: spec {spec} on axes {names} of sizes {sizes}")
    types = fields.get("axis_types") or []
    mesh = fields.get("device_mesh")
    return SavedSharding(
        axis_names=tuple(names),
        axis_sizes=sizes,
        axis_types=tuple(
            str(kind).rpartition(".")[2] for kind in expect(types, list, "'axis_types'", file=file)
        ),
        spec=tuple(tuple(axes) if isinstance(axes, list) else axes for axes in spec),
        device_ids=_devices(mesh) if mesh else meshes.get(str(fields.get("mesh")), ()),
    )


def _devices(device_mesh: object) -> tuple[int, ...]:
    """Flattens the nested lists of n or `{"id": n}`; () if there is anything else, or one twice."""
    stack: list[object] = [device_mesh.get("mesh")] if isinstance(device_mesh, dict) else []
    ids: list[int] = []
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            item = item.get("id")
        if isinstance(item, list):
            stack.extend(reversed(item))
        elif isinstance(item, int):
            ids.append(item)
        else:
            return ()
    return tuple(ids) if len(set(ids)) == len(ids) else ()
