"""Boxes of indices behave like the sets of indices that they represent."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt._core import box as _box
from jaxckpt._core.box import Box

LAWS = settings(deadline=None, derandomize=True, max_examples=100)
SIDE = 6


def boxes(rank, side=SIDE):
    bounds = st.tuples(st.integers(0, side), st.integers(0, side)).map(sorted)
    return st.lists(bounds, min_size=rank, max_size=rank).map(
        lambda sides: Box(tuple(a for a, _ in sides), tuple(b for _, b in sides))
    )


def indices(box):
    return set(product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


pairs = st.integers(0, 3).flatmap(lambda rank: st.tuples(boxes(rank), boxes(rank)))


@LAWS
@given(pairs)
def test_an_intersection_has_the_indices_of_both(pair):
    """Disjoint boxes give None; a 0-d box shares its one element."""
    a, b = pair

    got = a.intersect(b)

    assert (indices(got) if got is not None else set()) == indices(a) & indices(b)
    assert a.size == len(indices(a))


@LAWS
@given(pairs)
def test_within_is_a_view_of_the_same_elements(pair):
    """`x[box][part.within(box)]` is `x[part]`, writable, and never a scalar."""
    a, b = pair
    part = a.intersect(b)
    if part is None:
        return
    array = np.arange((SIDE + 1) ** len(a.start)).reshape((SIDE + 1,) * len(a.start))

    view = array[(*a.slices, ...)][part.within(a)]

    assert isinstance(view, np.ndarray)
    assert np.array_equal(view, array[(*part.slices, ...)])
    view[...] = -1
    assert (array == -1).sum() == part.size


@LAWS
@given(
    st.integers(0, 3).flatmap(
        lambda r: st.tuples(boxes(r), st.lists(st.integers(1, 4), min_size=r, max_size=r))
    )
)
def test_tiles_cover_a_box_once(case):
    """Each index of the box is in one tile; each tile touches the box and lies on the grid."""
    box, tile_shape = case
    if box.size == 0 and box.start:
        return

    tiles = list(_box.tile(box, tile_shape))

    counts = dict.fromkeys(indices(box), 0)
    for index, tile in tiles:
        assert tile.shape == tuple(tile_shape)
        assert tile.start == tuple(i * t for i, t in zip(index, tile_shape, strict=True))
        assert tile.intersect(box) is not None
        for element in indices(tile) & indices(box):
            counts[element] += 1
    assert set(counts.values()) <= {1}


@pytest.mark.parametrize(
    ("shape", "unit"),
    [((), ()), ((0, 3), (1, 1)), ((7,), (3,)), ((300, 50), (7, 3)), ((2, 9000), (1, 1))],
)
@pytest.mark.parametrize("most", [1, 100, 1 << 12])
def test_widened_tiles_cut_an_array_into_whole_chunks(shape, unit, most):
    """Each element is in one part, and each part has at most so many chunks, all of them whole."""
    parts = list(_box.cut(_box.whole(shape), _box.widened(unit, shape, most)))

    seen = np.zeros(shape, np.int32)
    for part in parts:
        seen[part.slices] += 1
        assert all(a % n == 0 for a, n in zip(part.start, unit, strict=True))
        chunks = [-(-n // u) for n, u in zip(part.shape, unit, strict=True)]
        assert np.prod(chunks) <= most
    assert (seen == 1).all()


@LAWS
@given(st.integers(0, 3).flatmap(lambda r: st.lists(boxes(r), min_size=1, max_size=4)))
def test_a_hull_is_the_smallest_box_around(some):
    """It holds every box, and no smaller one does."""
    hull = _box.hull(some)

    assert all(
        h <= b.start[d] and b.stop[d] <= k
        for b in some
        for d, (h, k) in enumerate(zip(hull.start, hull.stop, strict=True))
    )
    for d in range(len(hull.start)):
        assert hull.start[d] == min(b.start[d] for b in some)
        assert hull.stop[d] == max(b.stop[d] for b in some)


@pytest.mark.parametrize(
    ("index", "box"),
    [
        ((), Box((), ())),
        ((slice(None), slice(2, 4)), Box((0, 2), (3, 4))),
        ((slice(0, 0),), Box((0,), (0,))),
    ],
)
def test_slices_of_jax_become_boxes(index, box):
    """`jax.Shard.index` leaves out what is whole."""
    shape = (3, 9)[: len(index)]

    assert _box.from_index(index, shape) == box
    assert _box.whole(shape).shape == shape
