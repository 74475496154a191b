"""Several real processes read each stored value once, and carry it to where it is wanted."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._core.box import Box
from jaxckpt._core.spread import grouped
from jaxckpt._restore.carry import Pack, Spread, carriers_of
from jaxckpt._restore.once import goes_on
from jaxckpt._restore.placement import How, LeafPlan
from jaxckpt.cli._plan.cluster import Host, cluster_of
from jaxckpt.format.tree import Leaf, StoredArray
from tests.workers.once import tree_of_every_kind
from tests.workers.saves import mesh_of

pytestmark = pytest.mark.multihost
SHAPE = (512, 1024)
DATABASE = SimpleNamespace(tensors=None)  # stands for the item that carriers read from
METADATA = 20_000  # bytes


def bits_of(dtype, shape=SHAPE):
    """Values with all bit patterns of a dtype: NaNs and negative zeros too."""
    rng = np.random.default_rng(0)
    if np.dtype(dtype).name == "int4":
        return rng.integers(-8, 8, shape).astype(dtype)
    return rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """One leaf for each way in which it is saved by 8 devices, and for each dtype."""
    path = tmp_path_factory.mktemp("once") / "a"
    mesh = mesh_of(a=4, b=2)
    specs = dict.fromkeys(["first", "rows"], P(("a", "b"))) | {"block": P("a", "b"), "half": P("b")}
    dtypes = ["bfloat16", "int4", "float8_e5m2", "complex64"]
    tree = {
        name: jax.device_put(bits_of("float32"), NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }
    for name in [*dtypes, "float64"]:
        value = bits_of(getattr(ml_dtypes, name, name))
        with jax.enable_x64(True):
            tree[name] = jax.device_put(value, NamedSharding(mesh, P(("a", "b"))))
    jaxckpt.save(path, tree)
    return path, dtypes


def leaf_of(name, stored):
    facts = {"dtype": stored.dtype, "shape": stored.shape, "stored": stored}
    return Leaf(path=(name,), key_types=(2,), kind="array", **facts)


def restored(run_processes, path, wanted, count=4, devices=1, **options):
    done = run_processes(
        "once:restore_each",
        count=count,
        devices_per_process=devices,
        args=[path, wanted, options or None],
    )
    return {name: [one.result[name] for one in done] for name in wanted}


def test_each_value_is_read_once_whatever_is_wanted(run_processes, stored):
    """From rows to columns, dp x tp, dp x fsdp, other axes, all bits of each dtype: as counted."""
    path, dtypes = stored
    wanted = {
        "first": ({"x": 4}, []),
        "rows": ({"x": 4}, [None, "x"]),
        "block": ({"dp": 2, "tp": 2}, [None, "tp"]),
        "half": ({"dp": 2, "fsdp": 2}, ["fsdp"]),
        **{name: ({"x": 4}, []) for name in dtypes},
        "float64": ({"x": 2, "y": 2}, ["y", "x"]),
    }

    found = restored(run_processes, path, wanted)

    del found["first"]  # the kernel counts the modules too that the first restore imports
    for name, ones in found.items():
        assert all(one["same"] for one in ones), name
        job = ones[0]["job"]
        assert (job, ones[0]["once"]) == (ones[0]["size"], [name]), name
        # Every process reads the metadata.
        assert job <= sum(one["kernel"] for one in ones) <= job + 4 * METADATA, name


@pytest.mark.parametrize(("count", "devices"), [(4, 1), (2, 2)])
def test_replicas_that_outnumber_the_chunks_are_added_up(run_processes, tmp_path, count, devices):
    """Each chunk is read by one of them, and no process gets more than it wants."""
    halves = NamedSharding(mesh_of(b=2), P("b"))
    bits = {"float32": SHAPE, "bfloat16": (1024, 1024), "int8": (4096, 1024), "int64": SHAPE}
    wanted: dict[str, tuple[dict[str, int], list[str]]] = {}
    tree = {}
    with jax.enable_x64(True):
        for dtype, shape in bits.items():
            tree[f"{dtype} one"] = bits_of(getattr(ml_dtypes, dtype, dtype), shape)
            tree[f"{dtype} two"] = jax.device_put(tree[f"{dtype} one"], halves)
            wanted[f"{dtype} one"] = {"dp": 4}, []
            wanted[f"{dtype} two"] = {"dp": 2, "fsdp": 2}, ["fsdp"]
        wanted["int8 two"] = {"fsdp": 2, "dp": 2}, ["fsdp"]
    jaxckpt.save(tmp_path / "a", tree)

    found = restored(run_processes, tmp_path / "a", wanted, count, devices)

    for name, ones in found.items():
        axes, spec = wanted[name]
        size = ones[0]["size"]
        assert all(one["same"] for one in ones), name
        is_split = bool(spec) and (count == 4 or next(iter(axes)) == "fsdp")
        assert ones[0]["job"] == size, name
        assert ones[0]["moved"] == size * (count // (2 if is_split else 1) - 1), name


def test_programs_with_shardings_in_types_read_once(run_processes, tmp_path):
    """What is spread, added up or packed is carried on other meshes than the program's."""
    rows = NamedSharding(mesh_of(a=4), P("a"))
    value = bits_of("float32")
    tree = {"spread": jax.device_put(value, rows), "added": value, "packed": value[:8]}
    jaxckpt.save(tmp_path / "a", tree)
    wanted = dict.fromkeys(tree, ({"x": 4}, []))

    done = run_processes(
        "once:restore_each_in_explicit_mesh",
        count=4,
        devices_per_process=1,
        args=[tmp_path / "a", wanted],
    )

    for name in tree:
        ones = [one.result[name] for one in done]
        assert all(one["same"] for one in ones), name
        assert (ones[0]["job"], ones[0]["once"]) == (ones[0]["size"], [name]), name


def test_thousands_of_hosts_get_only_what_they_want():
    """Of arrays that 64 replicas of 64 hosts saved, in a chunk for each shard."""
    cluster, index = cluster_of(4096, 4, {"dp": 64, "fsdp": 64, "tp": 4}), 777
    sharding, host = NamedSharding(cluster.mesh, P("fsdp", "tp")), Host(index, 4096)
    stored = StoredArray(shape=(8192, 4096), dtype="float32", chunk_shape=(128, 1024))
    boxes = host.boxes_of(sharding, stored.shape)
    how = How(None, "array", np.dtype("f4"), sharding, boxes)
    plans = [LeafPlan((str(i),), leaf_of(f"{i}", stored), how) for i in range(64)]

    carriers = carriers_of(
        *(DATABASE, plans, host, 1 << 27),  # pyright: ignore[reportArgumentType]
        boxes_of=host.boxes_of,
        devices=cluster.devices,
    )

    assert len(carriers) == 64
    moved = sum(one.moved_bytes() for one in carriers)
    read = sum(4 * box.size for one in carriers for part in one.parts for box in part.how.boxes)
    chunks = 4 * 128 * 1024 * 4  # of one array, on the devices of a host
    assert read + moved == 64 * chunks
    assert chunks // 2 <= read <= 2 * chunks


def test_shards_without_replicas_are_not_added_up():
    """Of hosts that hold the diagonals of a mesh: what they read counts as twice the array."""
    cluster = cluster_of(2, 2, {"x": 2, "y": 2})
    first, second, third, fourth = cluster.devices  # two of each host
    mesh = Mesh(np.array([[first, third], [fourth, second]]), ("x", "y"))
    sharding, host = NamedSharding(mesh, P("x", "y")), Host(0, 2)
    stored = StoredArray(shape=(2048, 2048), dtype="float32", chunk_shape=(1024, 1024))
    boxes = host.boxes_of(sharding, stored.shape)
    how = How(None, "array", np.dtype("f4"), sharding, boxes)
    plan = LeafPlan(("a",), leaf_of("a", stored), how)

    (carrier,) = carriers_of(
        *(DATABASE, [plan], host, 1 << 27),  # pyright: ignore[reportArgumentType]
        boxes_of=host.boxes_of,
        devices=cluster.devices,
    )

    assert len(boxes) == 2
    assert isinstance(carrier, Pack)


OPEN = {"dimension": P(P.UNCONSTRAINED, None)}
OPEN |= {"axis": P(None, None, reduced={"a"})} if hasattr(P(), "reduced") else {}


@pytest.mark.parametrize("spec", OPEN.values(), ids=OPEN)
def test_a_sharding_that_leaves_something_open_is_read_directly(spec):
    """One process restores such an array, too."""
    kind = AxisType.Explicit if getattr(spec, "reduced", None) else AxisType.Auto
    mesh, host = Mesh(mesh_of(a=8).devices, ("a",), axis_types=(kind,)), Host(0, 2)
    stored = StoredArray(shape=(2048, 2048), dtype="float32", chunk_shape=(256, 2048))
    target = NamedSharding(mesh, spec)
    how = How(None, "array", np.dtype("f4"), target)
    plan = LeafPlan(("a",), leaf_of("a", stored), how)
    where: tuple[Any, ...] = (DATABASE, [plan], host, 1 << 27)

    assert carriers_of(*where, devices=jax.devices()) == []


@pytest.mark.parametrize("unit", [(1536, 256), (256, 1536), (512, 512)])
@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (6,)])
def test_arrays_move_over_meshes_of_any_sides(shape, unit):
    """XLA ends the program if it is to reshard some of them, as from columns to blocks."""
    devices, names = jax.devices()[:6], "ab"[: len(shape)]
    mesh = Mesh(np.array(devices).reshape(shape), [*names])
    job = SimpleNamespace(index=0, count=3, process_of=lambda device: devices.index(device) // 2)
    specs = [P(), P("a"), P(None, "a")]
    if len(shape) == 2:
        specs += [P("b"), P("a", "b"), P("b", "a"), P(("b", "a")), P(None, ("a", "b"))]
    stored = StoredArray(dtype="float32", shape=(1536, 1536), chunk_shape=unit)
    values, saved = bits_of("float32", stored.shape), leaf_of("x", stored)
    carried = 0
    for spec in specs:
        target = NamedSharding(mesh, spec)
        boxes = (Box((0, 0), stored.shape),)
        plan = LeafPlan(("x",), saved, How(None, "array", np.dtype("f4"), target, boxes))
        where: tuple[Any, ...] = (DATABASE, [plan], job, 1 << 20)
        found = carriers_of(*where, devices=devices)
        for one in (carrier for carrier in found if isinstance(carrier, Spread)):  # no pack
            given, bits = one.given, np.dtype(one.bits)
            rows = np.zeros((one.copies, *stored.shape), bits)
            rows[0] = values.view(bits)
            parts = jax.device_put(rows if one.copies > 1 else rows[0], given)
            moved = one.program()(parts)
            assert moved.sharding == target
            assert np.array_equal(np.asarray(moved).view(bits), values.view(bits))
            carried += 1
    assert carried > 0


@pytest.mark.parametrize("budget_bytes", [1 << 30, 1 << 20])
def test_leaves_of_every_kind_are_read_once(run_processes, tmp_path, budget_bytes):
    """Small, in one chunk, keys, host arrays, on the devices of some processes: as counted."""
    jaxckpt.save(tmp_path / "a", tree_of_every_kind())

    done = run_processes(
        "once:restore_kinds", count=4, devices_per_process=1, args=[tmp_path / "a", budget_bytes]
    )

    more = 2 * 12 * 4  # three processes need some of the one that is resized
    for one in done:
        assert one.result == {"differ": [], "direct": ["resized"], "more": more}


def test_what_is_not_read_once_is_read_directly(run_processes, tmp_path):
    """By option, by default on a disk, by kind of leaf, or since the processes disagree."""
    rows = NamedSharding(mesh_of(x=8), P("x"))
    tree = {
        "rows": jax.device_put(bits_of("uint8").astype(np.float32), rows),
        "alone": jax.device_put(np.arange(8, dtype=np.float32), rows),
        "key": jax.random.key(7),
        "host": np.int64(3),
        "count": 4,
    }
    jaxckpt.save(tmp_path / "a", tree)

    done = run_processes("once:restore_ways", devices_per_process=2, args=[tmp_path / "a"])

    for one in done:
        line, misfit = one.result.pop("line"), one.result.pop("one misfits")
        assert "; read 4 leaves once: 2.1 MB read by the job, 2.1 MB moved" in line
        assert misfit.startswith("TreeMismatch" if one.index else "ProcessesDisagree")
        assert one.result == {
            "asked": ["count", "host", "key", "rows"],
            "auto": [],
            "refused": [],
            "one refuses": [],
            "other budgets": [],
        }


REFUSED = {"spec", "dtype", "order", "fewer devices", "own devices", "fewer leaves", "host"}
REFUSED |= {"names", "part"}
ALLOWED = {"open spec", "each its own", "a pair", "pair in all", "all alike"}


def test_processes_that_want_other_arrays_are_refused(run_processes, tmp_path):
    """Else they would compute with wrong values. That takes no meeting more, nor older steps."""
    tree = {
        name: np.arange(144, dtype=np.float32).reshape(12, 12) + i for i, name in enumerate("ab")
    }
    with jaxckpt.CheckpointManager(tmp_path / "run") as manager:
        for step in (0, 1):
            manager.save(step, tree)

    done = run_processes(
        "once:restore_unlike", count=3, devices_per_process=2, args=[tmp_path / "run"]
    )

    text = "ProcessesDisagree: {} was not restored:\n  process {}: asks for other arrays, shapes, "
    text += "dtypes or shardings than process 0"
    last = text.format(tmp_path / "run" / "1", 2)
    for one in done:
        assert one.result == {
            **{name: [last, 1] for name in REFUSED},
            "run": [text.format(tmp_path / "run", 2), 1],
            "once": [last, 2],
            "a pair apart": [text.format(tmp_path / "run" / "1", 1), 1],
            **{name: [True, 1] for name in ALLOWED},
        }


def test_a_value_that_does_not_fit_keeps_no_process_in_a_collective(run_processes, tmp_path):
    """Only process 1 wants it, and finds out between packs of one group: all have carried all."""
    tree = {name: np.zeros((6, 128), np.int64) for name in "abcd"}
    tree["a"][3, 5] = 1 << 40
    with jaxckpt.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, tree)

    done = run_processes(
        "once:restore_misfit", count=3, devices_per_process=1, args=[tmp_path / "run"]
    )

    errors = [one.result[0] for one in done]
    assert errors == ["ProcessesDisagree", "TreeMismatch", "ProcessesDisagree"]
    assert all("leaf a" in one.result[1] or "a " in one.result[1] for one in done)


def test_devices_hold_the_arrays_and_the_parts_of_a_group(run_processes, tmp_path):
    """Not those of the next group too, nor more than one leaf on the way."""
    names, rows = "abcd", NamedSharding(mesh_of(x=8), P("x"))
    tree = {name: jax.device_put(bits_of("float32"), rows) for name in names}
    jaxckpt.save(tmp_path / "a", tree)

    done = run_processes(
        "once:restore_in_groups", devices_per_process=1, args=[tmp_path / "a", [*names], SHAPE]
    )

    leaf = tree["a"].nbytes
    for one in done:
        assert one.result["live"] == [i * leaf + leaf // 2 for i in range(len(names))]
        assert one.result["temp"] <= leaf


def test_restores_in_several_threads_do_not_mix(run_processes, tmp_path):
    """Each has its own meetings, and the values of one only are carried at a time."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for i, path in enumerate(paths):
        rows = NamedSharding(mesh_of(x=8), P("x"))
        values = np.arange(math.prod(SHAPE), dtype=np.float32).reshape(SHAPE) + i
        jaxckpt.save(path, {name: jax.device_put(values, rows) for name in "cdef"})

    done = run_processes("once:restore_in_threads", devices_per_process=2, args=[paths, 6])

    for one in done:
        assert one.result == {"True": [[True] * 6] * 2, "False": [[True] * 6] * 2}


@pytest.mark.parametrize(
    ("carried", "read", "goes"),
    [
        ([0, 0.0], [100, 2.0], True),  # of the first group, nothing is known
        ([10, 0.9], [100, 2.0], True),  # nor after less than a second
        ([100, 1.1], [100, 2.0], True),  # 8 s to read the rest, 8.8 s to carry it, 24 s directly
        ([100, 2.2], [100, 2.0], False),  # 17.6 s to carry it
        ([100, 2.2], [500, 10.0], True),  # all of it has been read ahead
        ([100, 1.1], [250, 1.0], False),  # quicker than the first group: 9.8 s, or 4.8 s directly
    ],
)
def test_the_rest_is_carried_if_that_is_quicker(carried, read, goes):
    """1,000 bytes at 100 bytes/s; the first two of ten groups have been carried."""
    fact = {"first": [50, 1.0], "read": read, "carried": carried}

    assert goes_on(800, 3 * 800, 1000, [fact, {**fact, "carried": [carried[0], 0.1]}]) is goes


SECONDS = st.floats(1e-3, 1e3)


@given(copies=st.integers(2, 64), read_s=SECONDS, carry_s=SECONDS)
def test_little_is_lost_until_it_turns_out_to_be_slow(copies, read_s, carry_s):
    """Of 1,000 leaves: as long as a few first groups take, and a few seconds.

    Args:
        read_s: To read all leaves once.
        carry_s: To carry them.
    """
    leaves, least = 1000, 8
    groups = [*grouped(range(leaves), [1] * leaves, leaves // 8, least)]
    now_s = done = 0.0
    first, carried = [len(groups[0]), len(groups[0]) * read_s / leaves], [0, 0.0]
    for group in groups:
        now_s = max(now_s, (done + len(group)) * read_s / leaves)  # is read
        read = [min(leaves, now_s * leaves / read_s), now_s]  # the next ones meanwhile
        fact = {"first": first, "read": read, "carried": carried}
        if not goes_on(leaves - done, copies * (leaves - done), leaves, [fact]):
            break
        took_s = len(group) * carry_s / leaves
        now_s += took_s
        if done:
            carried = [carried[0] + len(group), carried[1] + took_s]
        done += len(group)
    now_s += copies * (leaves - done) * read_s / leaves

    first_s = least * (carry_s + read_s) / leaves
    assert now_s <= copies * read_s + 4 * (first_s + 1)


def test_the_option_has_three_values(tmp_path):
    jaxckpt.save(tmp_path / "a", {"w": 1})

    with pytest.raises(ValueError, match="read_once must be True or False or 'auto', got 'no'"):
        jaxckpt.restore(tmp_path / "a", read_once="no")  # pyright: ignore
