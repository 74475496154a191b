"""Reads the parts of stored arrays that the shards of this process need, within a budget.

`chunks` reads our own arrays, small adjacent leaves together. TensorStore (`regions`) reads
everything else, one leaf at a time: arrays of Orbax and compressed arrays. `tensors` reads
safetensors files.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Any, Final, TypeVar

from jaxckpt._core.plan import plan_chunks
from jaxckpt._core.threads import Pool
from jaxckpt._disk.checksums import starts_of
from jaxckpt._disk.chunks import DECODED, Buffers, Chunks, Failed, Landed, LeafRead, Values, layouts
from jaxckpt._disk.damage import blame
from jaxckpt._disk.native import Item, reader_of
from jaxckpt._disk.regions import Regions
from jaxckpt._disk.tensors import Tensors
from jaxckpt.errors import damaged
from jaxckpt.format.arrays import MAX_UNIT_BYTES, chunk_key, least_stored
from jaxckpt.format.names import OCDBT_MANIFEST, ZARR3
from jaxckpt.format.tree import bad_leaf
from jaxckpt.storage._values import Places, find_values

# How many arrays to open ahead of the array being read.
_OPEN_AHEAD: Final = 64
# The share of the budget for one leaf's reads in flight, beside its buffers.
_WINDOW: Final = 0.25
# Small leaves are read together up to these limits.
BATCH_BYTES: Final = 16 << 20
_BATCH_LEAVES: Final = 1024
# The whole database is listed if at least this share of its keys is wanted.
_WORTH_LOOKING: Final = 1 / 16
# A foreign array has as many chunks as its metadata claims, whether they exist or not.
CHUNKS_AT_ONCE: Final = 1 << 12
_READS_AT_ONCE: Final = 1 << 10

_T = TypeVar("_T")
_Batch = Chunks | Regions | Tensors  # leaves that are read together


def _raise(_: LeafRead, error: Exception) -> None:
    raise error


def read_leaves(
    item: Item,
    reads: Sequence[LeafRead],
    *,
    budget_bytes: int,
    failed: Failed = _raise,
    landed: Landed = int,
) -> Generator[Buffers, None, None]:
    """Yields the buffers of each leaf by box, in order; a bad leaf raises when its turn comes.

    Leaves are read ahead while they fit into the budget: their buffers, and what is read beside
    them. A larger leaf is read alone, in pieces, with the budget for what is beside its buffers.

    Args:
        failed: Called with a bad leaf and its error instead of raising; later leaves are read.
        landed: Called in the caller's thread with the number of bytes read since the last call.

    Raises:
        CorruptCheckpoint: stored data is missing or damaged; the error names leaf and file.
        OSError: the storage fails to read it.
    """
    if not reads:
        return
    window_bytes = int(budget_bytes * _WINDOW)
    copies = item.found.storage.server_copies  # of a store's answers, to where they belong
    copies_or_beside = copies or any(x.beside for x in layouts(reads))
    most_bytes = window_bytes if copies_or_beside else budget_bytes
    threads = max(1, min(item.found.storage.reads_at_once, most_bytes // MAX_UNIT_BYTES))
    pool = Pool(threads, thread_name_prefix="jaxckpt-read")
    started: deque[tuple[int, _Batch]] = deque()
    in_flight = 0
    try:
        for batch in _batches(item, reads, pool, window_bytes):
            least = copies or isinstance(batch, Regions)
            cost = sum(
                n * (x.total_bytes + min(x.total_bytes, window_bytes) * max(least, x.beside))
                for x, n in layouts(batch.reads).items()
            )
            while started and in_flight + cost > budget_bytes:
                yield from started[0][1].finish(failed, landed)
                in_flight -= started.popleft()[0]
            batch.start()
            started.append((cost, batch))
            in_flight += cost
            del batch
        while started:
            yield from started[0][1].finish(failed, landed)
            started.popleft()
    finally:
        pool.shutdown(cancel_futures=True)
        # An error's traceback refers to the frames it passed, and they refer to the buffers.
        for _, batch in started:
            batch.drop()


def check_here(item: Item, reads: Sequence[LeafRead]) -> None:
    """Checks that a share has all chunks of some reads, before memory is allocated for them.

    Raises:
        CheckpointNotFound: it lacks some; another process has them.
        CorruptCheckpoint: one is smaller than its values.
    """
    there, lacking = keys_here(item), []
    for read in reads:
        stored = read.leaf.array
        least_bytes = least_stored(stored, math.prod(stored.chunk_shape))
        for plan in plan_chunks(stored.chunk_shape, read.layout.boxes):
            if (key := read.leaf.prefix + chunk_key(plan.index)) not in there:
                lacking.append(key)
            elif (size := _size_of(there[key])) < least_bytes:
                what = f'chunk "{key}" has {size} bytes, expected {least_bytes:.0f} or more'
                raise bad_leaf(read.leaf, item.path, what)
    if lacking:
        wanted = [(item.name, key) for key in lacking]
        raise item.found.not_here(f'{len(lacking)} chunks, such as "{lacking[0]}"', wanted)


def _size_of(place: Any) -> int:  # a `Place`, or the value itself
    return len(place) if isinstance(place, bytes) else place.size


def keys_here(item: Item) -> Mapping[str, Any]:
    """Returns the values in the database of a share, or where they lie, by key."""
    if not item.database:  # a tree without arrays
        return {}
    arrays = [leaf.stored for leaf in item.tree.leaves if leaf.stored is not None]
    most = len(arrays) + [*starts_of(arrays)][-1]  # their metadata, and their chunks or more
    try:
        found = find_values(item.found.storage, item.path, max_keys=most)
    except (ValueError, OSError) as error:
        raise blame(item, None, error) from error
    if found is None:
        file = f"{item.path}/{OCDBT_MANIFEST}"
        raise damaged(file, f"expected a database of up to {most} keys")
    return found


def _batches(
    item: Item, reads: Sequence[LeafRead], pool: Pool, window_bytes: int
) -> Iterator[_Batch]:
    """Chooses the reader of each leaf, and opens arrays a little ahead of their use."""
    try:
        places, reader = _places(item, reads), None
        sums = None if places is None else item.read_sums()
        ahead: deque[_Batch] = deque()
        may_group = places is not None or item.tensors is not None
        for group in grouped_reads(reads, min(BATCH_BYTES, window_bytes), may_group):
            if item.tensors is not None:
                ahead.append(Tensors(item, group, pool))
            elif places is not None and group[0].layout.beside < DECODED:
                ahead.append(Chunks(item, group, places, sums, pool))
            else:
                reader = reader or reader_of(item.found, item.path, database=item.database)
                ahead.append(Regions(item, group[0], reader, window_bytes))
            if len(ahead) > _OPEN_AHEAD:
                yield ahead.popleft()
        yield from ahead
    except (ValueError, OSError) as error:
        raise blame(item, None, error) from error


def grouped_reads(
    reads: Sequence[LeafRead], most_bytes: int, may_group: bool
) -> Iterator[list[LeafRead]]:
    group: list[LeafRead] = []
    size = 0
    for read in reads:
        size_bytes, beside = read.layout.total_bytes, read.layout.beside
        alone = not may_group or beside == DECODED
        full = size + size_bytes > most_bytes or len(group) >= _BATCH_LEAVES
        if group and (alone or full):
            yield group
            group, size = [], 0
        if alone:
            yield [read]
            continue
        group.append(read)
        size += size_bytes
    if group:
        yield group


def _places(item: Item, reads: Sequence[LeafRead]) -> Places | None:
    """Returns where the values lie that are read; None if only TensorStore finds them."""
    if not (item.ours and item.database):
        return None
    plain = [read for read in reads if read.layout.beside < DECODED]
    if not plain:
        return None
    wanted = len(plain) + sum(n * x.chunks for x, n in layouts(plain).items())
    most, keys = int(wanted / _WORTH_LOOKING), _keys(plain)
    return find_values(item.found.storage, item.path, max_keys=most, wanted=keys)


def _keys(reads: Sequence[LeafRead]) -> Iterator[str]:
    for read in reads:
        prefix = read.leaf.prefix
        yield prefix + ZARR3
        for plan in plan_chunks(read.leaf.array.chunk_shape, read.layout.boxes):
            yield prefix + chunk_key(plan.index)


# --- streams of unknown length ---------------------------------------------------------------


def read_stream(
    item: Item, parts: Iterable[tuple[_T, LeafRead | Values]], *, budget_bytes: int
) -> Generator[tuple[_T, Values], None, None]:
    """Yields the values of parts of leaves, in order, each with the key of its part.

    Args:
        parts: Reads of one box of a leaf, or the values themselves if the metadata has them; each
            with any key.
    """
    for some in in_turns(item, parts):
        reads = [part for _, part in some if isinstance(part, LeafRead)]
        with closing(read_leaves(item, reads, budget_bytes=budget_bytes)) as buffers:
            for key, part in some:
                yield key, next(buffers)[0] if isinstance(part, LeafRead) else part


def in_turns(item: Item, parts: Iterable[_T]) -> Iterator[list[_T]]:
    """Divides a stream of parts of an item into lists to read together."""
    most = None if item.ours else _READS_AT_ONCE  # finding our chunks takes time: do it once
    parts = iter(parts)
    while some := list(islice(parts, most)):
        yield some
