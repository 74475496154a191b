"""Fingerprints, which show whether a shard still has the bits that it had in the last save.

A shard on an accelerator is read there, by one reduction, and only 16 bytes come to the host. That
takes a program for each shape, dtype and device, which is compiled before it is needed (`prepare`),
so that no save waits for a compiler. Each 32-bit word is added to its position times a constant and
mixed (multiply and xor-shift, as the finaliser of MurmurHash3 does), and the mixed words are added
up; four times, with other constants. A shard in host memory has two checksums for each piece,
CRC-32C and CRC-64/NVME, which run as fast as memory is read. Both are over the bits: NaNs and
signed zeros are what they are. They do not protect against somebody who constructs two arrays with
the same fingerprint.

An array without a fingerprint counts as changed: if it is too large, or if a computation fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from awscrt.checksums import crc32c, crc64nvme

if TYPE_CHECKING:
    import jax

_PIECE_BYTES: Final = 1 << 20  # fits into the cache of a core
# Odd numbers: two for each of the four sums.
_FACTORS: Final = (
    (0x9E3779B1, 0x85EBCA6B),
    (0x85EBCA77, 0xC2B2AE35),
    (0xC2B2AE3D, 0x27D4EB2F),
    (0x27D4EB2F, 0x165667B1),
)
_MOST_WORDS: Final = (1 << 32) - 1  # a position is a word itself
_MOST_PROGRAMS: Final = 200  # a compiler may take a tenth of a second for each
LATER: Final = "later"

Sent = Any  # a `jax.Array`, LATER or None

_Key = tuple[Any, ...]  # shape, dtype and sharding of an array
_programs: dict[_Key, Any] = {}
_wanted: dict[_Key, Any] = {}  # not compiled yet


def of_host(values: np.ndarray[Any, Any]) -> bytes:
    """Returns the fingerprint of an array in host memory."""
    return b"".join(_sums(values))


def is_of(fingerprint: bytes, values: np.ndarray[Any, Any]) -> bool:
    """Returns whether an array in host memory has a fingerprint; at the first other piece, no."""
    at = 0
    for sums in _sums(values):
        if fingerprint[at : at + len(sums)] != sums:
            return False
        at += len(sums)
    return at == len(fingerprint)


def _sums(values: np.ndarray[Any, Any]) -> Iterator[bytes]:
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    for start in range(0, data.size, _PIECE_BYTES):
        piece: Any = data[start : start + _PIECE_BYTES]
        yield crc32c(piece).to_bytes(4, "little") + crc64nvme(piece).to_bytes(8, "little")


def send(shards: Sequence[jax.Array]) -> list[Sent]:
    """Enqueues the fingerprints of arrays, each on one device or replicated on several.

    The fingerprints of replicas come one after the other. The arrays may be overwritten afterwards:
    the fingerprints are of their present values.

    Returns:
        For each array its fingerprint, on the way; LATER if `prepare` must compile its program
        first; or None if the array never gets a fingerprint.
    """
    return [_sent(shard) for shard in shards]


def prepare() -> None:
    """Compiles the programs that `send` lacked, which may take seconds."""
    import jax

    while True:
        try:
            key, shape = _wanted.popitem()
        except KeyError:  # nothing is left; another thread may have taken the last
            return
        try:
            with jax.enable_x64(True):
                _programs[key] = jax.jit(_reduction(shape.sharding)).lower(shape).compile()
        except (TypeError, ValueError, NotImplementedError, RuntimeError):  # a dtype without bits
            _programs[key] = None


def arrived(prints: Sequence[Any]) -> list[bytes | None]:
    """Waits for fingerprints on their way; None for arrays without a fingerprint."""
    import jax

    sent = [one for one in prints if isinstance(one, jax.Array)]
    with jax.transfer_guard_device_to_host("allow"):
        try:
            found = iter(jax.device_get(sent))
        except RuntimeError:  # of the device, such as a lack of memory
            return [None] * len(prints)
    return [next(found).tobytes() if isinstance(one, jax.Array) else None for one in prints]


def _sent(shard: jax.Array) -> Sent:
    import jax

    if not 0 < max(shard.size, shard.nbytes // 4) <= _MOST_WORDS:
        return None
    key = shard.shape, shard.dtype, shard.sharding
    if key in _programs:
        try:
            return _programs[key] and _programs[key](shard)
        except RuntimeError:  # of the device, such as a lack of memory
            _programs[key] = None
            return None
    if key not in _wanted:
        if len(_programs) + len(_wanted) >= _MOST_PROGRAMS:
            return None
        _wanted[key] = jax.ShapeDtypeStruct(shard.shape, shard.dtype, sharding=shard.sharding)
    return LATER


def _reduction(sharding: Any) -> Any:
    """Returns the function that each device computes of its own replica."""
    import jax
    from jax.sharding import PartitionSpec as P

    if sharding.num_devices == 1:
        return _reduce
    (axis,) = sharding.mesh.axis_names
    specs = {"in_specs": P(), "out_specs": P(axis), "check_vma": False}
    return jax.shard_map(_reduce, mesh=sharding.mesh, **specs)


def _reduce(values: jax.Array) -> jax.Array:
    import jax
    import jax.numpy as jnp

    words = _words(values)
    at = jax.lax.iota(jnp.uint32, words.size)
    sums = []
    for a, b in _FACTORS:
        mixed = words + at * jnp.uint32(a)
        mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(b)
        mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(a)
        sums.append((mixed ^ (mixed >> 16)).sum(dtype=jnp.uint32))
    return jnp.stack(sums)


def _words(values: jax.Array) -> jax.Array:
    """Returns the bits as uint32, a smaller element in a word of its own."""
    import jax
    import jax.numpy as jnp

    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        parts = [_words(jax.lax.real(values)), _words(jax.lax.imag(values))]
        return jnp.concatenate(parts)
    if values.dtype == jnp.bool_:
        return values.astype(jnp.uint32).reshape(-1)
    bits = jnp.iinfo if jnp.issubdtype(values.dtype, jnp.integer) else jnp.finfo
    width = bits(values.dtype).bits
    if width >= 32:
        return jax.lax.bitcast_convert_type(values, jnp.uint32).reshape(-1)
    return jax.lax.bitcast_convert_type(values, f"uint{width}").astype(jnp.uint32).reshape(-1)
