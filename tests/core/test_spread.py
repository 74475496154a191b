"""A job reads each stored value once, if its processes divide the reading."""

from __future__ import annotations

import math
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt._core.box import Box
from jaxckpt._core.plan import plan_chunks
from jaxckpt._core.spread import allot, hosts_of, moves, shares, spread, times_read


def mesh_of(devices=1, **axes):
    """A mesh of these axes, of which each process has some devices in a row."""
    shape = tuple(axes.values())
    return hosts_of(tuple(axes), (np.arange(math.prod(shape)) // devices).reshape(shape))


def cut(hosts, axes):
    return tuple(tuple(one for name in names for one in hosts.axes[name]) for names in axes)


def boxes_of(hosts, axes, shape, process):
    """The shards of one process, device by device: what `times_read` must count."""
    for at in np.argwhere(hosts.processes == process):
        where = dict(zip(hosts.names, at.tolist(), strict=True))
        start, stop = [], []
        for names, size in zip(axes, shape, strict=True):
            index, parts = 0, 1
            for name in names:
                sides = hosts.processes.shape[hosts.names.index(name)]
                index, parts = index * sides + where[name], parts * sides
            start.append(index * size // parts)
            stop.append((index + 1) * size // parts)
        yield Box(tuple(start), tuple(stop))


def counted(hosts, axes, shape, unit):
    """How many times the chunks are read, as the plan of each process's reads says."""
    chunks = math.prod(-(-n // u) for n, u in zip(shape, unit, strict=True))
    read = 0
    for process in range(int(hosts.processes.max()) + 1):
        boxes = tuple(dict.fromkeys(boxes_of(hosts, axes, shape, process)))
        read += len(plan_chunks(tuple(unit), boxes))
    return read / chunks


POWERS = st.sampled_from([1, 2, 4])


@given(
    copies=POWERS,
    saved=st.tuples(POWERS, POWERS, POWERS),
    wanted=st.tuples(POWERS, POWERS, POWERS),
)
def test_the_closed_form_is_what_the_plan_of_the_reads_gives(copies, saved, wanted):
    """c = d * prod_i max(1, t_i / g_i), for host grids that divide each other."""
    shape = (8, 8, 8)
    hosts = mesh_of(d=copies, x=wanted[0], y=wanted[1], z=wanted[2])
    unit = tuple(n // g for n, g in zip(shape, saved, strict=True))
    axes = cut(hosts, (("x",), ("y",), ("z",)))

    found = counted(hosts, axes, shape, unit)

    assert found == copies * math.prod(max(1, t / g) for t, g in zip(wanted, saved, strict=True))
    assert times_read(hosts, axes, shape, unit) == found


@given(
    devices=POWERS,
    unit=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    axes=st.sampled_from(
        [((), ()), (("a",), ()), ((), ("b", "a")), (("b",), ("a",)), (("c", "a"), ("b",))]
    ),
)
def test_a_unit_that_devices_of_a_process_share_is_read_once(devices, unit, axes):
    """Whatever the shape of the stored units, and however many devices a process has."""
    hosts, shape = mesh_of(devices, a=2, b=2, c=2), (8, 12)
    axes = cut(hosts, axes)

    assert times_read(hosts, axes, shape, unit) == counted(hosts, axes, shape, unit)
    boxes = {box for process in range(8) for box in boxes_of(hosts, axes, shape, process)}
    chunks = math.prod(-(-n // u) for n, u in zip(shape, unit, strict=True))
    read = sum(len(plan_chunks(unit, (box,))) for box in boxes)
    assert spread(hosts, axes, shape, unit).needed == pytest.approx(read / chunks)


@pytest.mark.parametrize(
    ("hosts", "wanted", "unit", "direct"),
    [
        (mesh_of(x=8), ((), ()), (8, 64), 8),
        (mesh_of(4, x=8), ((), ()), (32, 64), 2),
        (mesh_of(dp=4, tp=2), ((), ("tp",)), (16, 32), 4),
        (mesh_of(dp=2, fsdp=4), (("fsdp",), ()), (8, 64), 2),
        (mesh_of(dp=4, fsdp=4), (("fsdp",), ()), (4, 64), 4),
        (mesh_of(x=8), ((), ("x",)), (8, 64), 8),
        (mesh_of(a=1, b=8, c=1), (("a",), ("b",)), (16, 32), 4),
        (mesh_of(a=2, b=2, c=2), (("a",), ("b",)), (64, 8), 4),
    ],
    ids=[
        "replicated",
        "two hosts",
        "dp4tp2",
        "dp2fsdp4",
        "16",
        "columns",
        "4-2-1",
        "rows of two axes",
    ],
)
def test_every_element_is_read_by_one_process(hosts, wanted, unit, direct):
    """The spread sharding covers the array, and no stored unit is read twice."""
    shape = (64, 64)

    found = spread(hosts, cut(hosts, wanted), shape, unit)

    assert (found.direct, found.once) == (direct, 1)
    assert counted(hosts, found.axes, shape, unit) == 1
    seen = np.zeros(shape, int)
    for process in range(int(hosts.processes.max()) + 1):
        for box in dict.fromkeys(boxes_of(hosts, found.axes, shape, process)):
            seen[box.slices] += 1
    assert (seen == 1).all()


def test_an_array_that_no_axis_divides_is_read_directly():
    assert spread(mesh_of(x=8), ((),), (7,), (7,)) == (8, math.inf, (), 1)
    assert spread(mesh_of(x=8), (), (), ()) == (8, math.inf, (), 1)


@given(
    units=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 5)), max_size=3),
    copies=st.integers(2, 6),
    number=st.integers(0, 9),
)
def test_replicas_divide_a_shard_in_whole_units(units, copies, number):
    """Each value is read by one of them."""
    unit = tuple(size for _, _, size in units)
    start = tuple(before * size for before, _, size in units)
    stop = tuple((before + count) * size for before, count, size in units)

    seen = np.zeros(stop, int)
    for row in range(copies):
        parts = shares(Box((row, *start), (row + 1, *stop)), unit, copies, number=number)
        for part in parts:
            assert (part.start[0], part.stop[0]) == (row, row + 1)
            assert all(a % u == 0 for a, u in zip(part.start[1:], unit, strict=True))
            seen[part.slices[1:]] += 1

    assert (seen[Box(start, stop).slices] == 1).all()
    assert seen.sum() == Box(start, stop).size


def test_replicas_that_read_are_far_apart():
    """Of 100 arrays of 4 units, each of 512 replicas, 8 of a host: none reads over a third more."""
    parts = np.zeros(64, int)
    for number in range(100):
        for row in range(512):
            parts[row // 8] += len(shares(Box((row, 0), (row + 1, 8)), (2,), 512, number=number))

    assert (parts.sum(), parts.max()) == (400, 8)


SIDES = st.lists(st.integers(1, 9), max_size=3)


@given(
    arrays=st.lists(
        st.tuples(SIDES, st.data(), st.sampled_from([1, 2, 8])), min_size=1, max_size=5
    ),
    count=st.integers(1, 5),
    first=st.integers(0, 4),
)
def test_pieces_are_whole_units_and_each_value_is_in_one(arrays, count, first):
    """Of all arrays together; their bytes do not overlap, and begin where any dtype may."""
    kinds = [
        (tuple(shape), tuple(data.draw(st.integers(1, n)) for n in shape), itemsize)
        for shape, data, itemsize in arrays
    ]

    pieces = allot(kinds, count, first=first)

    end, seen = 0, [np.zeros(shape, int) for shape, _, _ in kinds]
    for piece in pieces:
        shape, unit, itemsize = kinds[piece.array]
        seen[piece.array][piece.box.slices] += 1
        assert all(a % u == 0 for a, u in zip(piece.box.start, unit, strict=True))
        sides = zip(piece.box.stop, unit, shape, strict=True)
        assert all(b % u == 0 or b == n for b, u, n in sides)
        assert piece.stop - piece.start == piece.box.size * itemsize
        assert piece.start >= end
        assert piece.start % 64 == 0
        assert 0 <= piece.process < count
        end = piece.stop
    assert all((one == 1).all() for one in seen)


def test_pieces_are_divided_about_evenly():
    """Many small arrays, and some with more units than there are processes."""
    pieces = allot([((8, 64), (1, 64), 4), ((100,), (100,), 4)] * 500, 16)

    sizes = np.zeros(16)
    for piece in pieces:
        sizes[piece.process] += piece.stop - piece.start
    assert sizes.max() < 1.05 * sizes.mean()


def test_a_plan_for_thousands_of_processes_asks_little():
    """4,096 processes of 4 devices, 10,000 leaves: about 50 calls a leaf."""
    hosts = mesh_of(4, dp=64, fsdp=64, tp=4)
    wanted = cut(hosts, (("fsdp",), ("tp",)))
    calls = Counter[str]()
    sys.setprofile(lambda _, event, __: calls.update([event]))
    try:
        for i in range(40):  # leaves of one shape share a plan
            shape = (4096 * (1 + i), 16384)
            found = spread(hosts, wanted, shape, (shape[0] // 64, 4096))
            assert found.direct == 64
        pieces = allot([((64, 64), (64, 64), 4)] * 10_000, 4096)
    finally:
        sys.setprofile(None)

    assert len(pieces) == 10_000
    assert calls["call"] + calls["c_call"] < 600_000


@st.composite
def shardings(draw):
    """Two divisions of an array by the axes of a mesh, of which the second may lack some."""
    names, dims = draw(st.permutations("abcdef")), draw(st.integers(1, 3))
    at = draw(st.lists(st.integers(0, dims - 1), min_size=6, max_size=6))
    to = draw(st.lists(st.integers(0, dims), min_size=6, max_size=6))
    given = [tuple(n for n, dim in zip(names, at, strict=True) if dim == i) for i in range(dims)]
    pairs = [*zip(draw(st.permutations(names)), to, strict=True)]
    return tuple(given), tuple(tuple(n for n, d in pairs if d == i) for i in range(dims))


@given(shardings())
def test_moves_lead_from_one_sharding_to_the_other(both):
    """Each takes the fastest axes of a dimension, and makes them the fastest of another."""
    now, wanted = list(both[0]), both[1]
    for names, source, target in moves(*both):
        if source is not None:
            assert now[source][-len(names) :] == names
            now[source] = now[source][: -len(names)]
        if target is not None:
            now[target] += names

    assert tuple(now) == wanted


@given(st.permutations("ab"), st.integers(0, 2), st.sampled_from([(1, 6), (6, 1), (12, 1)]))
def test_an_array_on_one_dimension_moves_without_a_slice(names, split, grid):
    """So no device holds more of it than it reads or wants."""
    hosts = mesh_of(a=2, b=6)
    wanted = cut(hosts, (names[:split], names[split:])[:2])
    found = spread(hosts, wanted, (24, 24), tuple(24 // n for n in grid))

    assert all(source is not None for _, source, _ in moves(found.axes, wanted))
