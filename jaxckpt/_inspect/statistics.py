"""Computes statistics of the values of a checkpoint. Needs no jax."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, final

import numpy as np

from jaxckpt._core.box import Box
from jaxckpt._disk.native import Item
from jaxckpt._inspect.value_stream import (
    BUDGET_BYTES,
    Data,
    Moments,
    Values,
    as_numbers,
    blocks,
    boxes_of,
    data_of,
    finite,
    is_text,
    read_values,
)
from jaxckpt.format.tree import Leaf
from jaxckpt.types import LeafStatistics


def statistics(
    item: Item, leaves: Sequence[Leaf], *, budget_bytes: int = BUDGET_BYTES
) -> dict[str, LeafStatistics]:
    """Describes the numeric leaves, by path.

    Args:
        budget_bytes: Memory to use; a larger chunk is read alone.

    Raises:
        CorruptCheckpoint: stored data is missing or damaged; the error names leaf and file.
    """
    wanted = {
        leaf.text: (leaf, data)
        for leaf in leaves
        if not is_text(leaf) and (data := data_of(leaf)) is not None
    }
    tallies = {path: _Tally() for path in wanted}

    def parts() -> Iterator[tuple[Leaf, Data, Box]]:
        for leaf, data in wanted.values():
            for box in boxes_of([data], budget_bytes=budget_bytes):
                yield leaf, data, box

    with closing(read_values(item, parts(), budget_bytes=budget_bytes)) as stream:
        for leaf, values in stream:
            for (block,) in blocks(values):
                tallies[leaf.text].add(as_numbers(block))
    return {path: tally.result(path) for path, tally in tallies.items()}


@final
class _Tally:
    """Accumulates the statistics of one leaf."""

    def __init__(self) -> None:
        self.size = self.nan = self.inf = self.zeros = 0
        self.min: Any = None  # int or float
        self.max: Any = None
        self.moments = Moments()

    def add(self, values: Values) -> None:
        """Adds a block of the values that `as_numbers` returns."""
        numbers = finite(values)
        self.size += values.size
        self.zeros += values.size - int(np.count_nonzero(values))
        if numbers.size < values.size:
            nan = int(np.count_nonzero(np.isnan(values)))
            self.nan += nan
            self.inf += values.size - numbers.size - nan
        if numbers.size:
            exact = values if values.dtype.kind in "iu" else numbers
            low, high = exact.min().item(), exact.max().item()
            self.min = low if self.min is None else min(self.min, low)
            self.max = high if self.max is None else max(self.max, high)
            self.moments.add(numbers)

    def result(self, path: str) -> LeafStatistics:
        return LeafStatistics(
            path=path,
            size=self.size,
            min=self.min,
            max=self.max,
            mean=self.moments.mean,
            std=self.moments.std,
            norm=self.moments.norm,
            nan=self.nan,
            inf=self.inf,
            zeros=self.zeros,
        )
