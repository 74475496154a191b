"""Plans as pure data: every element is written once and read once, for any number of processes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt._core import box as _box
from jaxckpt._core.box import Box
from jaxckpt._core.plan import (
    MAX_CHUNK_BYTES,
    MIN_SLICE_BYTES,
    ArraySpec,
    Grid,
    Group,
    Placement,
    placement_of,
    plan_reads,
    plan_save,
)
from jaxckpt.format.arrays import MAX_UNIT_BYTES, inner_shape
from jaxckpt.format.tree import StoredArray

LAWS = settings(deadline=None, derandomize=True, max_examples=100)


def placed(shard_shape, holders):
    """A placement, from the processes that hold each shard."""
    grid = {
        tuple(a // max(1, n) for a, n in zip(box.start, shard_shape, strict=True)): Group(processes)
        for box, processes in holders.items()
    }
    return Placement(shard_shape=shard_shape, grid=Grid(grid))


def held(placement, process):
    """The shards that a process holds."""
    return {placement.box(index) for index, _ in placement.grid.of(process)}


def grid_placement(shape, parts, copies, devices_per_process):
    """All shards of the first copy, then of the next, dealt out to processes in that order."""
    shard_shape = tuple(n // p for n, p in zip(shape, parts, strict=True))
    boxes = (
        [box for _, box in _box.tile(_box.whole(shape), shard_shape)] if math.prod(shape) else []
    )
    boxes = boxes or [_box.whole(shape)]
    devices = [(box, copy) for copy in range(copies) for box in boxes]
    holders = defaultdict(set)
    for i, (box, _) in enumerate(devices):
        holders[box].add(i // devices_per_process)
    placement = placed(shard_shape, {b: tuple(sorted(p)) for b, p in holders.items()})
    return placement, -(-len(devices) // devices_per_process)


@st.composite
def array_specs(draw, processes_out=None):
    """Arrays over the same processes: sharded, replicated, both, and values of the host."""
    copies = draw(st.sampled_from([1, 2, 3, 4]))
    shards = draw(st.sampled_from([1, 2, 4, 8]))
    per_process = draw(st.sampled_from([1, 2, 4]))
    arrays = []
    for _ in range(draw(st.integers(1, 5))):
        itemsize = draw(st.sampled_from([1, 2, 4, 8]))
        split = draw(st.sampled_from([1, shards]))
        rows = split * draw(st.sampled_from([0, 1, 3, 512]))
        shape = (rows, draw(st.sampled_from([1, 5, 4096])))
        placement, _ = grid_placement(shape, (split, 1), copies * shards // split, per_process)
        placement = draw(st.sampled_from([placement, placement, None]))
        arrays.append(
            ArraySpec(
                shape=shape, dtype=f"uint{8 * itemsize}", itemsize=itemsize, placement=placement
            )
        )
    return arrays, -(-copies * shards // per_process)


def check_plans(arrays, plans):
    """The laws of a save, over the plans of all processes."""
    assert all(plan.stored == plans[0].stored for plan in plans)
    written = Counter()
    for p, plan in enumerate(plans):
        size = 0
        for write in plan.writes:
            array, stored = arrays[write.array], plan.stored[write.array]
            assert write.box.shape == stored.chunk_shape
            assert all(a % c == 0 for a, c in zip(write.box.start, stored.chunk_shape, strict=True))
            assert write.box.intersect(write.shard) == write.box
            if array.placement is None:
                assert p == 0
            else:
                assert write.shard in held(array.placement, p)
                assert all(
                    s % c == 0 for s, c in zip(write.shard.shape, stored.chunk_shape, strict=True)
                )
            written[write.array, write.box] += 1
            size += write.box.size * array.itemsize
        assert size == plan.total_bytes
    assert set(written.values()) <= {1}, "a chunk has two writers"
    for i, array in enumerate(arrays):
        chunk = plans[0].stored[i].chunk_shape
        chunks = math.prod(n // c for n, c in zip(array.shape, chunk, strict=True))
        assert sum(1 for a, _ in written if a == i) == (chunks if math.prod(array.shape) else 0)


@LAWS
@given(array_specs())
def test_every_element_is_written_once_by_one_process(case):
    """Chunks tile each array; a chunk is a shard or an equal slice of one, its writer holds it."""
    arrays, count = case

    check_plans(arrays, [plan_save(arrays, process=p) for p in range(count)])


@LAWS
@given(st.sampled_from([2, 3, 4, 8, 16]), st.lists(st.integers(1, 64), min_size=1, max_size=60))
def test_replicas_share_the_bytes_evenly(count, sizes):
    """Among processes that all hold everything no one writes much more than the others."""
    arrays = []
    for size in sizes:
        shape = (size, 16_384)
        placement = placed(shape, {_box.whole(shape): tuple(range(count))})
        arrays.append(ArraySpec(shape=shape, dtype="float32", itemsize=4, placement=placement))

    loads = [plan_save(arrays, process=p).total_bytes for p in range(count)]

    largest = (
        max(s * 16_384 * 4 for s in sizes if s % count or s * 65_536 // count < MIN_SLICE_BYTES)
        if any(s % count or s * 65_536 // count < MIN_SLICE_BYTES for s in sizes)
        else 0
    )
    assert max(loads) - min(loads) <= largest
    assert sum(loads) == sum(s * 65_536 for s in sizes)


def test_a_large_replicated_array_is_cut_into_equal_slices():
    """Slices of 1 MiB and more; smaller ones are not cut."""

    def plan(rows, process):
        shape = (rows, 1024)
        placement = placed(shape, {_box.whole(shape): (0, 1, 2, 3)})
        spec = ArraySpec(shape=shape, dtype="float32", itemsize=4, placement=placement)
        return plan_save([spec], process=process)

    assert plan(1024, 0).stored[0].chunk_shape == (256, 1024)
    assert [plan(1024, p).total_bytes for p in range(4)] == [1 << 20] * 4
    assert plan(1020, 0).stored[0].chunk_shape == (1020, 1024)
    # 1021 is prime: no row divides, the columns do.
    assert plan(1021, 0).stored[0].chunk_shape == (1021, 1024)
    assert plan(4 * 1021, 0).stored[0].chunk_shape == (1021, 1024)
    assert plan(1023 * 4 + 1, 0).stored[0].chunk_shape == (1023 * 4 + 1, 256)


@pytest.mark.parametrize("rows", [1 << 20, 3 << 20, 5 * (1 << 20) + 1024])
@pytest.mark.parametrize("on_host", [True, False])
def test_a_chunk_is_one_request_to_a_store(rows, on_host):
    """S3 takes 5 GB in one request, so a larger shard has several chunks."""
    shape = (2 * rows, 1024)
    placement = None if on_host else grid_placement(shape, (2, 1), 1, 2)[0]
    spec = ArraySpec(shape=shape, dtype="float32", itemsize=4, placement=placement)

    plan = plan_save([spec], process=0)

    check_plans([spec], [plan])
    [stored] = plan.stored
    size = math.prod(stored.chunk_shape) * 4
    assert MAX_CHUNK_BYTES // 16 <= size <= MAX_CHUNK_BYTES < 5 * 10**9
    assert len(plan.writes) == math.prod(shape) * 4 // size
    assert all(c % i == 0 for c, i in zip(stored.chunk_shape, stored.inner_shape, strict=True))


@pytest.mark.parametrize("count", [1, 7, 512, pytest.param(4096, marks=pytest.mark.slow)])
def test_a_plan_for_thousands_of_processes(count):
    """100 arrays over 4,096 processes, fully sharded, replicated and in between."""
    arrays = []
    for i in range(100):
        kind = i % 4
        shape = (4096 * 8, 64) if kind else (64,)
        if kind == 0:
            placement = placed(shape, {_box.whole(shape): tuple(range(count))})
        else:
            parts = count if kind == 1 else math.gcd(count, 8)
            shape = (parts * 64, 64)
            placement, _ = grid_placement(shape, (parts, 1), count // parts, 1)
        arrays.append(ArraySpec(shape=shape, dtype="float32", itemsize=4, placement=placement))
    some = sorted({0, 1 % count, count // 2, count - 1})

    plans = [plan_save(arrays, process=p) for p in some]

    assert all(plan.stored == plans[0].stored for plan in plans)
    writers = defaultdict(set)
    for p, plan in zip(some, plans, strict=True):
        for write in plan.writes:
            writers[write.array, write.box].add(p)
    assert all(len(ps) == 1 for ps in writers.values())


@pytest.mark.parametrize("count", [256, pytest.param(4096, marks=pytest.mark.slow)])
def test_all_plans_together_cover_every_element_once(count):
    """For jobs of hundreds and thousands of processes."""
    arrays = []
    for parts in (count, 16, 1):
        shape = (parts * 2, 8)
        placement, _ = grid_placement(shape, (parts, 1), count // parts, 1)
        arrays += [ArraySpec(shape=shape, dtype="float32", itemsize=4, placement=placement)] * 2

    check_plans(arrays, [plan_save(arrays, process=p) for p in range(count)])


@pytest.mark.parametrize("shape", [(8, 16), (16, 32), (8, 0), (0, 8), (8, 8, 3)])
@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x"), P("y", "x"), P(("x", "y")), P("y")])
@pytest.mark.parametrize("per_process", [1, 2, 3, 8])
def test_a_placement_is_what_jax_says(mesh, shape, spec, per_process):
    """Each process holds the shards that jax puts on its devices, and shares them with whom it
    should."""
    sharding = NamedSharding(mesh, spec)
    holders = defaultdict(set)
    for device, index in sharding.devices_indices_map(shape).items():
        holders[_box.from_index(index, shape)].add(device.id // per_process)

    got = placement_of(sharding, shape, lambda device: device.id // per_process)

    assert got.shard_shape == sharding.shard_shape(shape)
    found = defaultdict(set)
    for process in range(-(-8 // per_process)):
        for index, group in got.grid.of(process):
            assert group.processes == tuple(sorted(holders[got.box(index)]))
            found[got.box(index)].add(process)
    assert found == holders


# --- reading ---------------------------------------------------------------------------------


@st.composite
def readings(draw):
    """A stored array with chunks, maybe inner ones, and the distinct shards that are wanted."""
    rank = draw(st.integers(0, 3))
    inner = [draw(st.integers(1, 3)) for _ in range(rank)]
    chunk = [n * draw(st.integers(1, 3)) for n in inner]
    shape = [draw(st.integers(0, 9)) for _ in chunk]
    use_inner = draw(st.booleans())
    stored = StoredArray(
        shape=tuple(shape),
        dtype="uint8",
        chunk_shape=tuple(chunk),
        inner_shape=tuple(inner) if use_inner else None,
    )
    tile_shape = [draw(st.integers(1, max(1, n))) for n in shape]
    targets = [
        box.intersect(_box.whole(shape)) or _box.whole(shape)
        for _, box in _box.tile(_box.whole(shape), tile_shape)
    ]
    if draw(st.booleans()) and targets:
        targets = draw(st.lists(st.sampled_from(targets), min_size=1, unique=True))
    return stored, [t for t in targets if t.size]


@settings(LAWS, max_examples=300)
@given(readings())
def test_reads_cover_the_targets_exactly_and_no_unit_twice(case):
    """Every wanted element comes once; no chunk or inner chunk is touched by two reads."""
    stored, targets = case

    reads = plan_reads(stored, 1, targets)

    covered = [np.zeros(t.shape, int) for t in targets]
    units = Counter()
    for read in reads:
        for target, part in read.parts:
            assert part.intersect(read.box) == part
            covered[target][part.within(targets[target])] += 1
        for index, _ in _box.tile(read.box, stored.unit_shape):
            units[index] += 1
    assert all((c == 1).all() for c in covered)
    assert set(units.values()) <= {1}


def test_a_large_region_is_read_in_pieces():
    """A large array is never held whole, whether several targets need parts of it or one all."""
    stored = StoredArray(
        shape=(4096, 65536),
        dtype="float32",
        chunk_shape=(4096, 65536),
        inner_shape=inner_shape((4096, 65536), 4),
    )
    halves = [Box((0, 0), (4096, 32768)), Box((0, 32768), (4096, 65536))]

    shared = plan_reads(stored, 4, halves)
    alone = plan_reads(stored, 4, [_box.whole(stored.shape)])

    assert max(read.box.size * 4 for read in shared + alone) <= MAX_UNIT_BYTES


@settings(LAWS, max_examples=300)
@given(st.lists(st.integers(1, 10**7), max_size=4), st.sampled_from([1, 2, 4, 8, 16]))
def test_inner_chunks_divide_a_chunk_and_are_small(chunk, itemsize):
    """A small chunk has no inner chunks; others have equal parts of at most MAX_UNIT_BYTES."""
    if math.prod(chunk) > 1 << 55:
        return

    inner = inner_shape(chunk, itemsize)

    if math.prod(chunk) * itemsize <= MAX_UNIT_BYTES:
        assert inner is None
    elif inner is not None:
        assert all(c % i == 0 for c, i in zip(chunk, inner, strict=True))
        assert math.prod(inner) * itemsize <= MAX_UNIT_BYTES


def test_a_chunk_of_prime_length_is_not_cut():
    """Its only divisor makes millions of pieces, which take hours to write and are then refused."""
    assert inner_shape((8_388_617,), 4) is None
    assert inner_shape((8_388_617, 3), 4) is None
    assert inner_shape((2 * 8_388_617,), 4) is None
    assert inner_shape((2 * 4_194_319,), 4) == (4_194_319,)


def test_the_same_arrays_give_the_same_plan():
    """A plan depends on nothing but its arguments."""
    placement, count = grid_placement((64, 64), (8, 1), 2, 2)
    arrays = [ArraySpec(shape=(64, 64), dtype="float32", itemsize=4, placement=placement)] * 3

    plans = [plan_save(arrays, process=p) for p in range(count)]

    assert plans == [plan_save(list(arrays), process=p) for p in range(count)]
