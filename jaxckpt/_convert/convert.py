"""Copies a checkpoint of any kind into a new checkpoint."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from jaxckpt._convert.source import copy_by
from jaxckpt._convert.target import write_checkpoint
from jaxckpt._core.cast import floating
from jaxckpt._core.check import check_flag, explained, zstd_level
from jaxckpt._core.select import Globs
from jaxckpt.storage import locate


@explained("convert")
def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    item: str | None = None,
    only: Globs = None,
    skip: Globs = None,
    dtype: Any = None,  # whatever numpy takes for a dtype
    compression: str | None = None,
    ocdbt: bool = True,
    overwrite: bool = False,
) -> None:
    """Copies a tree, or a part of it, from any checkpoint into a new checkpoint.

    By default the copy is as `save` would write it: types, shardings, chunks and custom metadata of
    the source are kept, and every chunk has a checksum. With `ocdbt=False` each array is a
    directory of plain zarr v3 files, for zarr-python and others. There, types that Orbax lacks are
    lost (numpy scalars, bytes, complex numbers), and dtypes that zarr lacks, such as `uint4`, and
    names that cannot be directories are refused.

    The values are copied in pieces: about 300 MiB of host memory suffice for any size, unless
    another writer made larger chunks. No devices are used; in a job of several processes, one
    process calls it. Only one tree is copied, as the item `state`, without other items of a step
    (metrics, iterators, further trees). Its `lineage` records the source.

    Args:
        src: A checkpoint, one of its items, or a run's root (copies its newest good step, or a
            newer one if a job deletes it meanwhile), written by jaxckpt, Orbax or Flax.
        dst: The new checkpoint.
        item: Name of the item, if the checkpoint has several trees.
        only, skip: Globs over leaf paths; the name of a container includes its leaves.
        dtype: The new dtype of all floating-point arrays; Python numbers stay as they are. A finite
            value that would become infinite raises `TreeMismatch`.
        compression: As of `save`; "zstd" also compresses plain files. If None, the copy is
            uncompressed, whatever the source is.
        ocdbt: Whether the arrays are in one database, or each in a directory of plain files.
        overwrite: Whether to replace a checkpoint at `dst`, in one step.

    Raises:
        CheckpointNotFound: `src` lacks a committed checkpoint.
        CorruptCheckpoint: the source is damaged; nothing was written.
        UnsupportedLeaf: leaves cannot be copied; the error lists them, and nothing was written.
        StepExists: `dst` exists, or has further items, which `overwrite` would delete.
        SaveFailed: the copy was not committed; the cause is chained.

    Example:
        >>> import tempfile, numpy as np, jaxckpt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     state = {"params": {"w": np.ones(2, np.float32)}, "opt_state": {"mu": np.zeros(2)}}
        ...     jaxckpt.save(f"{folder}/1", state)
        ...     jaxckpt.convert(f"{folder}/1", f"{folder}/weights", only="params", dtype="float16")
        ...     jaxckpt.restore(f"{folder}/weights")
        {'params': {'w': array([1., 1.], dtype=float16)}}
    """
    check_flag("convert", ocdbt=ocdbt)
    zstd = None if compression is None else zstd_level("convert", compression)
    write = partial(write_checkpoint, *locate(dst), ocdbt=ocdbt, zstd=zstd, overwrite=overwrite)
    copy_by(src, write, item=item, only=only, skip=skip, dtype=floating(dtype), by="convert")
