"""`convert`: copies a checkpoint of any kind into a new one."""

from __future__ import annotations

import os
from typing import Any

from jaxckpt._convert.source import floating, of_checkpoint
from jaxckpt._convert.target import write_checkpoint
from jaxckpt._core.select import Globs
from jaxckpt.storage import locate


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    item: str | None = None,
    only: Globs = None,
    skip: Globs = None,
    dtype: Any = None,  # whatever numpy takes for a dtype
    ocdbt: bool = True,
    overwrite: bool = False,
) -> None:
    """Copies a tree, or a part of it, from any checkpoint into a new one.

    As it comes it is what `save` writes: types, shardings, chunks and custom metadata of the source
    are kept as far as it says them, and every chunk is checked whenever it is read. With
    `ocdbt=False` each array is a directory of plain zarr v3 files, for zarr-python and the like.
    Leaves for which Orbax has no word lose their type there: numpy scalars, bytes, complex numbers.
    Dtypes that zarr lacks, such as `uint4`, and names that cannot be directories are refused.

    The values go through in pieces: host memory of about 300 MiB suffices for any size, but that a
    chunk which another writer made larger is read as a whole. No devices are used; in a job of
    several processes one of them calls it. One tree is copied, and becomes the item `state`: other
    items of a step (metrics, iterators, further trees) are left out. `lineage` tells where it is
    from.

    Args:
        src: A checkpoint, an item of one, or a run's root (then its newest good step), by jaxckpt,
            Orbax or Flax.
        dst: The new checkpoint.
        item: Which item, if the checkpoint has several trees.
        only, skip: Globs over leaf paths; a container's name means all in it.
        dtype: For all floating-point arrays; Python numbers stay as they are.
        ocdbt: Whether the arrays are in one database, or each in a directory of plain files.
        overwrite: Whether to replace a checkpoint at `dst`, in one step.

    Raises:
        CheckpointNotFound: there is no committed checkpoint at `src`.
        CorruptCheckpoint: it is damaged; nothing was made.
        UnsupportedLeaf: leaves that cannot be copied; all are named, and nothing was written.
        StepExists: something is at `dst`.
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
    leaves = of_checkpoint(
        src, item=item, only=only, skip=skip, dtype=floating(dtype), by="convert"
    )
    write_checkpoint(*locate(dst), leaves, ocdbt=ocdbt, overwrite=overwrite)
