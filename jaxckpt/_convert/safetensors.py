"""Exports and imports safetensors files, in pieces of bounded size."""

from __future__ import annotations

import contextlib
import math
import os
import posixpath
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from jaxckpt._convert.source import Leaves, Tile, Values, check_leaves, copy_by, of_checkpoint
from jaxckpt._convert.target import clipped, enlarged, parts_of, write_checkpoint
from jaxckpt._core.cast import floating
from jaxckpt._core.check import check_flag, check_positive, explained
from jaxckpt._core.select import Globs
from jaxckpt._disk.tensors import runs
from jaxckpt._disk.transaction import refuse_inside
from jaxckpt.errors import StepExists, UnsupportedLeaf
from jaxckpt.format import safetensors
from jaxckpt.format.arrays import dtype_of
from jaxckpt.format.safetensors import Header
from jaxckpt.format.tree import Leaf
from jaxckpt.storage import Storage, locate, real

_REGION_BYTES: Final = 32 << 20


@explained("export_safetensors")
def export_safetensors(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    item: str | None = None,
    only: Globs = None,
    skip: Globs = None,
    dtype: Any = None,  # whatever numpy takes for a dtype
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
) -> str:
    """Writes the arrays of a checkpoint to a safetensors file, or to several files with an index.

    The name of a tensor joins the keys of its leaf with dots, as in models of Hugging Face:
    `params/dense/kernel` becomes `params.dense.kernel`. Python numbers become tensors without
    dimensions; None, empty containers, shardings and container types are left out. The file, or the
    index of several, gets its name last, when everything is on disk; a kill leaves files named
    `.jaxckpt-export-*`, which the next export into this directory removes. For a bucket, the files
    are first written to a temporary directory of this machine, as large as the model. About 300 MiB
    of host memory suffice for any size. In a job of several processes, one process calls it.

    Args:
        src: A checkpoint, one of its items, or a run's root (exports its newest good step, or a
            newer one if a job deletes it meanwhile).
        dst: The file, `model.safetensors`. Several files are named
            `model-00001-of-00003.safetensors` and so on, with the index
            `model.safetensors.index.json`; `model-00001-of-00003-2.safetensors` where the files
            that they replace have these names.
        item: Name of the item, if the checkpoint has several trees.
        only, skip: Globs over leaf paths; the name of a container includes its leaves.
        dtype: The new dtype of all floating-point arrays.
        max_shard_bytes: Most bytes in one file; a larger tensor gets a file of its own. If None,
            all tensors go into one file.
        overwrite: Whether to replace existing files of this model, whatever their number. The old
            files are deleted when the new files have their names, so that an error or a kill leaves
            one of the two models.

    Returns:
        The file to open: the only one, or the index.

    Raises:
        CheckpointNotFound: `src` lacks a committed checkpoint.
        CorruptCheckpoint: the source is damaged; nothing was written.
        UnsupportedLeaf: safetensors cannot store some leaves (text, PRNG keys, complex numbers), or
            their names collide; the error lists them, and nothing was written.
        StepExists: files of this model exist, or `dst` lies inside a checkpoint.
        OSError: the files cannot be written; none were made. In a bucket, some may be there.

    Example:
        >>> import tempfile, numpy as np, jaxckpt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jaxckpt.save(f"{folder}/1", {"params": {"w": np.ones(2), "b": np.zeros(1)}})
        ...     file = jaxckpt.export_safetensors(f"{folder}/1", f"{folder}/model.safetensors")
        ...     jaxckpt.import_safetensors(file, f"{folder}/2")
        ...     jaxckpt.restore(f"{folder}/2", only="params/w")
        {'params': {'w': array([1., 1.])}}
    """
    check_positive("export_safetensors", max_shard_bytes=max_shard_bytes)
    check_flag("export_safetensors", overwrite=overwrite)
    model = _Model(*locate(dst))
    if not model.file.endswith(suffix := safetensors.SUFFIX):
        raise ValueError(f"{dst} must end in {suffix}, such as {model.file}{suffix}")

    def write(source: Leaves) -> str:
        _check_exportable(source)
        shards = _shards(source, max_shard_bytes)
        refuse_inside(model.storage, f"{real(model.storage, model.folder)}/{model.stem}")
        taken = map(posixpath.basename, _check_free(model, overwrite))
        new = safetensors.shard_names(model.stem, len(shards), [*taken])
        files = [f"{model.folder}/{name}" for name in new]
        return _write_files(source, model, dict(zip(files, shards, strict=True)), overwrite)

    return copy_by(src, write, item=item, only=only, skip=skip, dtype=floating(dtype), by="export")


def files_of_model(path: str | os.PathLike[str]) -> list[str]:
    """Returns the files that an export to a path would replace: a file, or shards and an index."""
    return _Model(*locate(path)).files()


@dataclass(frozen=True, slots=True)
class _Model:
    """The files of one model: `<stem>.safetensors`, or its shards and their index."""

    storage: Storage
    file: str

    @property
    def folder(self) -> str:
        return posixpath.dirname(self.file)

    @property
    def stem(self) -> str:
        return posixpath.basename(self.file).removesuffix(safetensors.SUFFIX)

    @property
    def index(self) -> str:
        return f"{self.folder}/{self.stem}{safetensors.INDEX_SUFFIX}"

    def files(self) -> list[str]:
        """Returns the paths of existing files; first the index or the single file."""
        if self.storage.kind(self.folder) != "dir":
            return []
        tops = (self.index, self.file)
        there = {f"{self.folder}/{name}": name for name in self.storage.entries(self.folder)}
        found = [p for p, n in there.items() if p in tops or safetensors.is_shard(n, self.stem)]
        return sorted(found, key=lambda path: (path not in tops, path))


def _check_free(model: _Model, overwrite: bool) -> list[str]:
    """Returns the paths of the files to replace; StepExists if they must not be replaced."""
    old = model.files()
    if old and not overwrite:
        has = ", ".join(map(posixpath.basename, old[:8]))
        raise StepExists(f"{model.folder} already has {has}; set overwrite to replace them")
    for file in old:
        if model.storage.kind(file) == "dir":
            raise StepExists(f"{file} is a directory, and is not replaced")
    return old


def _check_exportable(source: Leaves) -> None:
    problems = []
    leaves = [leaf for leaf in source.tree.leaves if leaf.kind != "empty"]
    for leaf in leaves:
        if leaf.kind in ("str", "bytes", "key") or not leaf.has_array:
            problems.append(f"  {leaf.text}: {leaf.kind}")
        elif leaf.dtype not in safetensors.WORDS:
            problems.append(f"  {leaf.text}: dtype {leaf.dtype}")
    problems += safetensors.name_problems(leaf.name for leaf in leaves)
    check_leaves(leaves, problems, source.where)
    if not leaves:
        raise UnsupportedLeaf(f"{source.where} has no arrays: there is nothing to export")


def _shards(source: Leaves, most_bytes: int | None) -> list[list[int]]:
    """Returns the leaves of each file, in order, as many as fit."""
    shards: list[list[int]] = [[]]
    size = 0
    for i, leaf in enumerate(source.tree.leaves):
        if not leaf.has_array:
            continue
        taken = math.prod(leaf.array.shape) * dtype_of(leaf.dtype).itemsize
        if shards[-1] and most_bytes is not None and size + taken > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append(i)
        size += taken
    return shards


def _write_files(
    source: Leaves, model: _Model, shards: Mapping[str, Sequence[int]], overwrite: bool
) -> str:
    """Writes all files under temporary names, and then names them, the index last."""
    from jaxckpt.storage._large import large_files

    storage, leaves = model.storage, source.tree.leaves
    headers = [_header([leaves[i] for i in of_file]) for of_file in shards.values()]
    storage.make_dir(model.folder)
    try:
        with large_files(storage, model.folder) as large:
            with contextlib.closing(_values(source, shards.values())) as values:
                for (file, of_file), header in zip(shards.items(), headers, strict=True):
                    _write_file(large.new(file), header, [leaves[i] for i in of_file], values)
            if len(shards) > 1:
                index = large.new(model.index)
                index.write(0, _index_of([*shards], headers))
                index.finish()
            source.check()
            large.publish(_check_free(model, overwrite))
    except FileExistsError as error:
        raise StepExists(f"{error.filename} was created during the export") from error
    return model.file if len(shards) == 1 else model.index


def _index_of(files: Sequence[str], headers: Sequence[Header]) -> bytes:
    pairs = zip(files, headers, strict=True)
    where = {one.name: posixpath.basename(file) for file, head in pairs for one in head.tensors}
    total_bytes = sum(tensor.size_bytes for header in headers for tensor in header.tensors)
    return safetensors.encode_index(where, total_bytes)


def _header(leaves: Sequence[Leaf]) -> Header:
    try:
        return safetensors.lay_out([(leaf.name, leaf.dtype, leaf.array.shape) for leaf in leaves])
    except ValueError as error:
        raise UnsupportedLeaf(f"{error}. Set max_shard_bytes to write several files.") from error


def _values(
    source: Leaves, shards: Collection[Sequence[int]]
) -> Generator[tuple[Tile, Values], None, None]:
    """Yields the values of all files in long runs; each stored byte is read once."""

    def parts() -> Iterator[Tile]:
        for i in (i for of_file in shards for i in of_file):
            stored = source.tree.leaves[i].array
            unit_shape = clipped(stored.unit_shape, stored.shape)
            itemsize = dtype_of(stored.dtype).itemsize
            region_shape = enlarged(unit_shape, stored.shape, itemsize, _REGION_BYTES)
            yield from parts_of(i, stored.shape, region_shape)

    return source.read(parts())


def _write_file(
    file: Any, header: Header, leaves: Sequence[Leaf], values: Iterator[tuple[Tile, Values]]
) -> None:
    offsets = {tensor.name: tensor.offset for tensor in header.tensors}
    file.write(0, header.data)
    for leaf in leaves:
        left = math.prod(leaf.array.shape)
        while left:
            part, some = next(values)
            left -= part.box.size
            _write_runs(file, offsets[leaf.name], leaf.array.shape, part, some)
            del some  # so that its memory is free before the next part is read
    file.finish()


def _write_runs(file: Any, base: int, shape: tuple[int, ...], part: Tile, values: Values) -> None:
    """Writes a part of an array, which consists of one or more runs of the file."""
    data, at = np.ascontiguousarray(values).reshape(-1).view(np.uint8), 0
    for offset, size in runs(part.box, shape, values.itemsize):
        file.write(base + offset, data[at : at + size])
        at += size


# --- into a checkpoint -----------------------------------------------------------------------


@explained("import_safetensors")
def import_safetensors(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    dtype: Any = None,  # whatever numpy takes for a dtype
    overwrite: bool = False,
) -> None:
    """Makes a checkpoint of a safetensors file, or of the files in an index.

    Dots in the names of tensors make nested dicts: `model.layers.0.weight` becomes the leaf
    `model/layers/0/weight`. After the name of another tensor, as in `w` and `w.scale`, they do not.
    Leaves are numpy arrays, which `restore` can place with a `like`. The metadata of the files
    becomes custom metadata. All headers are checked before anything is allocated or written. About
    300 MiB of host memory suffice for any size. One process of a job calls it.

    Args:
        src: `*.safetensors`, or `*.safetensors.index.json` with its files beside it.
        dst: The new checkpoint.
        dtype: The new dtype of all floating-point tensors.
        overwrite: Whether to replace a checkpoint at `dst`, in one step.

    Raises:
        CheckpointNotFound: the file does not exist.
        CorruptCheckpoint: a file is malformed or truncated.
        UnsupportedFormat: a tensor has a dtype that `export_safetensors` does not write.
        UnsupportedLeaf: a name is nested deeper than a checkpoint can be, or contains NUL.
        StepExists, SaveFailed: as for `convert`.

    Example:
        See `export_safetensors`.
    """
    file = os.fspath(src)
    if not file.endswith(safetensors.SUFFIXES):
        raise ValueError(f"{file} must end in {safetensors.SUFFIX} or {safetensors.INDEX_SUFFIX}")
    source = of_checkpoint(file, dtype=floating(dtype), by="import")
    write_checkpoint(*locate(dst), source, overwrite=overwrite)
