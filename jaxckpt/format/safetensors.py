"""Safetensors files: a JSON header followed by the bytes of the tensors, and an index of several.

    8 bytes        length of the header, little-endian
    header         {"name": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, ...,
                    "__metadata__": {"key": "text"}}
    data           row-major and little-endian; offsets count from here

A large model is several such files, `model-00001-of-00003.safetensors` and so on, and
`model.safetensors.index.json`, which maps each tensor to its file.

A header is accepted only if its tensors fill the data exactly, without gaps or overlaps, so the
size of the file bounds every allocation.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any, Final

from jaxckpt.errors import UnsupportedFormat, damaged, lfs_problem
from jaxckpt.format import jsontext
from jaxckpt.format.arrays import bytes_of, dtype_of
from jaxckpt.format.jsontext import expect, expect_shape
from jaxckpt.format.tree import MAX_READ_LEVELS

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
SUFFIXES: Final = (SUFFIX, INDEX_SUFFIX)
LENGTH_BYTES: Final = 8
# The limit of the reference implementation.
MAX_HEADER_BYTES: Final = 100_000_000
_METADATA: Final = "__metadata__"
_SHARD: Final = re.compile(r"-\d{5,}-of-\d{5,}(-\d+)?")

# The safetensors name of each dtype.
WORDS: Final[Mapping[str, str]] = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_DTYPES: Final = {word: dtype for dtype, word in WORDS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor of a file; `offset` counts from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        return bytes_of(self.shape, self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header of a file."""

    tensors: tuple[Tensor, ...]
    metadata: Mapping[str, str]
    data: bytes  # the bytes before the tensors: length and JSON
    size_bytes: int  # of the whole file


# --- writing ---------------------------------------------------------------------------------


def lay_out(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> Header:
    """Lays out a file of tensors, given as name, dtype and shape."""
    # Some readers map the file: every tensor is aligned if the large dtypes come first.
    order = sorted(tensors, key=lambda tensor: -dtype_of(tensor[1]).itemsize)
    end, entries = 0, {}
    for name, dtype, shape in order:
        start, end = end, end + bytes_of(shape, dtype)
        entries[name] = {"dtype": WORDS[dtype], "shape": shape, "data_offsets": [start, end]}
    # Model readers want to know the framework's layout; all are the same, and all accept "pt".
    text = jsontext.dumps({_METADATA: {"format": "pt"}, **entries})
    text += b" " * (-len(text) % LENGTH_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"the header of {len(tensors)} tensors must have at most {MAX_HEADER_BYTES} bytes, "
            f"got {len(text)}"
        )
    begin = len(text).to_bytes(LENGTH_BYTES, "little") + text
    # As it will be read: a header that could not be read again is not written.
    return replace(decode_header(text, len(begin) + end, file="the header"), data=begin)


def name_problems(names: Iterable[str]) -> list[str]:
    """Returns a line for each name that a file cannot hold."""
    return [f"  {name!r} cannot name a tensor" for name in names if name in ("", _METADATA)]


def shard_names(stem: str, parts: int, taken: Collection[str] = ()) -> list[str]:
    """Returns the file names of a model in several parts; they have a number if some are taken.

    Example:
        >>> shard_names("model", 2, ["model-00001-of-00002.safetensors"])
        ['model-00001-of-00002-2.safetensors', 'model-00002-of-00002-2.safetensors']
    """
    if parts == 1:
        return [stem + SUFFIX]
    ends = chain([SUFFIX], (f"-{n}{SUFFIX}" for n in count(2)))
    all_ = ([f"{stem}-{i:05}-of-{parts:05}{end}" for i in range(1, parts + 1)] for end in ends)
    return next(names for names in all_ if not {*names}.intersection(taken))


def is_shard(name: str, stem: str) -> bool:
    """Returns whether a file is named like a part of the model `stem`."""
    if not (name.startswith(stem) and name.endswith(SUFFIX)):
        return False
    return _SHARD.fullmatch(name[len(stem) : -len(SUFFIX)]) is not None


def encode_index(files: Mapping[str, str], total_bytes: int) -> bytes:
    return jsontext.dumps({"metadata": {"total_size": total_bytes}, "weight_map": dict(files)})


# --- reading ---------------------------------------------------------------------------------


def header_bytes(data: bytes, size: int, *, file: str) -> int:
    """Returns the length of the JSON, from the first bytes of a file of `size` bytes."""
    length = int.from_bytes(data, "little")
    if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES) or length < 2:
        what = f"not a safetensors file: a header of {length} bytes in a file of {size}"
        raise damaged(file, lfs_problem(data) or what)
    return length


def decode_header(text: bytes, size: int, *, file: str) -> Header:
    """Decodes the JSON header of a file of `size` bytes."""
    top = expect(jsontext.loads(text, file=file), dict, "the header", file=file)
    metadata = expect(top.pop(_METADATA, None) or {}, dict, repr(_METADATA), file=file)
    for value in metadata.values():
        expect(value, str, repr(_METADATA), file=file)
    begin = LENGTH_BYTES + len(text)
    tensors = [_decode_tensor(name, entry, begin, file) for name, entry in top.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size_bytes))
    end = begin
    for tensor in tensors:
        if tensor.offset != end:
            what = "overlaps another tensor" if tensor.offset < end else "comes after a gap"
            raise damaged(file, f"tensor {tensor.name!r} {what}", leaf=tensor.name)
        end += tensor.size_bytes
    if end != size:
        raise damaged(file, f"the tensors end at byte {end}, but the file has {size} bytes")
    return Header(tensors=tuple(tensors), metadata=metadata, data=b"", size_bytes=size)


def _decode_tensor(name: str, entry: Any, begin: int, file: str) -> Tensor:  # JSON
    where = f"tensor {name!r}"
    fields = expect(entry, dict, where, file=file)
    word = expect(fields.get("dtype"), str, f"{where}: dtype", file=file)
    shape = expect_shape(fields.get("shape"), f"{where}: shape", file=file)
    offsets = expect_shape(fields.get("data_offsets"), f"{where}: data_offsets", file=file)
    if name.count(".") >= MAX_READ_LEVELS:
        raise UnsupportedFormat(f"{file}: {where[:80]}... has more than {MAX_READ_LEVELS} dots")
    if word not in _DTYPES:
        raise UnsupportedFormat(
            f"{file}: {where} has dtype {word!r}, must be one of {', '.join(_DTYPES)}"
        )
    start, end = offsets if len(offsets) == 2 else (0, -1)
    tensor = Tensor(name=name, dtype=_DTYPES[word], shape=shape, offset=begin + start)
    if end - start != tensor.size_bytes:
        what = f"{word}{list(shape)} needs {tensor.size_bytes} bytes, but its offsets are"
        raise damaged(file, f"{where}: {what} {list(offsets)}", leaf=name)
    return tensor


def decode_index(data: bytes, *, file: str) -> dict[str, set[str]]:
    """Decodes an index into the tensors of each file, all in the directory of the index."""
    top = expect(jsontext.loads(data, file=file), dict, "the file", file=file)
    files: dict[str, set[str]] = {}
    for tensor, name in expect(top.get("weight_map"), dict, "'weight_map'", file=file).items():
        shard = expect(name, str, f"the file of tensor {tensor!r}", file=file)
        if "/" in shard or "\\" in shard or "\0" in shard or not shard.endswith(SUFFIX):
            what = f"expected a safetensors file beside the index, got {shard!r}"
            raise damaged(file, f"tensor {tensor!r}: {what}")
        files.setdefault(shard, set()).add(tensor)
    return files
