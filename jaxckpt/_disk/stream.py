"""Reads the values of an item as a stream of unknown length."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any, Final, TypeVar

import numpy as np

from jaxckpt._disk.native import Item
from jaxckpt._disk.reader import read_leaves
from jaxckpt._disk.regions import LeafRead

# A foreign array has as many chunks as its metadata claims, whether they exist or not.
CHUNKS_AT_ONCE: Final = 1 << 12
_READS_AT_ONCE: Final = 1 << 10

Values = np.ndarray[Any, Any]
_T = TypeVar("_T")


def read_stream(
    item: Item, parts: Iterable[LeafRead | Values], *, budget_bytes: int
) -> Generator[Values, None, None]:
    """Yields the values of parts of leaves, in order.

    Args:
        parts: Reads of one box of a leaf, or the values themselves if the metadata has them.

    Raises:
        CorruptCheckpoint: stored data is missing or damaged; the error names leaf and file.
        OSError: the storage fails to read it.
    """
    for some in in_turns(item, parts):
        reads = [part for part in some if isinstance(part, LeafRead)]
        with closing(read_leaves(item, reads, budget_bytes=budget_bytes)) as buffers:
            for part in some:
                yield next(buffers)[part.boxes[0]] if isinstance(part, LeafRead) else part


def in_turns(item: Item, parts: Iterable[_T]) -> Iterator[list[_T]]:
    """Divides a stream of parts of an item into lists to read together."""
    most = None if item.ours else _READS_AT_ONCE  # finding our chunks takes time: do it once
    parts = iter(parts)
    while some := list(islice(parts, most)):
        yield some
