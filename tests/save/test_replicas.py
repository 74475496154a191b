"""Replicas that differ are found at a save and named; the step is marked, and nothing else is."""

from __future__ import annotations

import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import CheckpointManager, KeepPolicy, LocalTier, SavePolicy
from jaxckpt._core import fingerprint
from jaxckpt._disk.find import find
from jaxckpt._save.replicas import Replicas
from jaxckpt._save.tree_plan import plan_tree
from jaxckpt.errors import SaveFailed
from jaxckpt.multihost import Single
from jaxckpt.storage import locate
from jaxckpt.testing import MemoryService, SimulatedProcesses, simulate
from tests.commandline import cli
from tests.twins import watched

DTYPES = ["bool", "int8", "uint16", "bfloat16", "float8_e4m3fn", "float32", "complex64", "int4"]


def flipped(value, device, bit=0):
    """The same array with one other bit on one device; bits count over the bytes in memory."""
    shards = []
    for shard in value.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == device:
            data.reshape(-1).view(np.uint8)[bit // 8 % data.nbytes] ^= 1 << bit % 8
        shards.append(jax.device_put(data, shard.device))
    sharding = value.sharding
    return jax.make_array_from_single_device_arrays(value.shape, sharding, shards)


def put(mesh, spec, shape=(8, 8), dtype="float32"):
    values = np.arange(np.prod(shape)).reshape(shape) % 2
    return jax.device_put(jnp.asarray(values, dtype), NamedSharding(mesh, spec))


def problems_of(tree, skip=None):
    found = Replicas(Single(), skip)
    found.add(*plan_tree(tree, Single()))
    found.compare()
    return found.differences


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "y")], ids=str)
def test_a_flipped_bit_is_found_and_its_leaf_and_device_are_named(mesh, spec, dtype):
    tree = {"params": {"a": put(mesh, spec, dtype=dtype), "b": put(mesh, spec, dtype=dtype)}}
    assert problems_of(tree) == []

    tree["params"]["b"] = flipped(tree["params"]["b"], device=5)
    (problem,) = problems_of(tree)
    others = {
        P(): "devices 0, 1, 2, 3, 4, 6, 7",
        P("x"): "device 4",
        P(None, "y"): "devices 1, 3, 7",
    }
    if spec == P("x"):  # of two, nobody knows which is right
        assert problem in [
            "leaf params/b has other bits on device 5 than on device 4",
            "leaf params/b has other bits on device 4 than on device 5",
        ]
    else:
        assert problem == f"leaf params/b has other bits on device 5 than on {others[spec]}"


@given(st.integers(0, 7), st.integers(0, 8 * 4 * 64 - 1))
def test_any_bit_on_any_device(device, bit):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    (problem,) = problems_of({"w": flipped(put(mesh, P()), device, bit)})
    assert f"on device {device} than" in problem


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (3, 5)], ids=str)
def test_shapes(mesh, shape):
    value = put(mesh, P(), shape)
    assert problems_of([value]) == []
    assert len(problems_of([flipped(value, 2)] if value.size else [])) == bool(value.size)


def test_what_has_no_replicas_is_not_compared(mesh):
    """Sharded over all devices, on one device, on the host: nothing to compare."""
    tree = {"all": put(mesh, P("x", "y")), "one": jnp.ones(3), "host": np.ones(3), "step": 1}
    assert problems_of(tree) == []
    assert problems_of({"all": flipped(tree["all"], 3)}) == []


def test_equal_bits_count_not_equal_numbers(mesh):
    zero = put(mesh, P(), (1,)) * 0
    assert problems_of([zero]) == []
    assert problems_of([flipped(zero, 1, bit=31)])  # -0.0
    assert problems_of([zero * jnp.nan]) == []


def test_a_typed_key_is_compared_too(mesh):
    key = jax.device_put(jax.random.key(3), NamedSharding(mesh, P()))
    data = flipped(jax.random.key_data(key), device=1)
    assert problems_of([key]) == []
    assert len(problems_of([jax.random.wrap_key_data(data)])) == 1


def test_leaves_that_may_differ_are_left_out(mesh):
    tree = {"dropout": {"rng": flipped(put(mesh, P()), 1)}, "w": flipped(put(mesh, P()), 2)}
    assert len(problems_of(tree)) == 2
    assert len(problems_of(tree, "dropout")) == 1
    assert problems_of(tree, ["dropout/*", "w"]) == []


@pytest.mark.parametrize("spec", [P(), P("x")], ids=str)
def test_on_accelerators_one_reduction_on_each_device(mesh, spec, accelerators):
    """The first time the program is compiled after the save, and the next save compares."""
    value = put(mesh, spec)
    first = Replicas(Single())
    first.add(*plan_tree([flipped(value, 5)], Single()))
    first.compare()
    assert (first.is_later, first.differences) == (True, [])
    fingerprint.prepare()

    assert problems_of([value]) == []
    (problem,) = problems_of([flipped(value, 5)])
    assert "device 5" in problem


# --- between processes -------------------------------------------------------------------------


def save_in(processes, root, value):
    with CheckpointManager(root) as manager:
        manager.save(1, {"w": value, "x": value * 0})
        manager.wait_until_finished()
        return list(manager.problems)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "y")], ids=str)
def test_processes_compare_in_the_meeting_of_the_save(mesh, tmp_path, count, spec):
    """With x=4, y=2, P("x") is replicated within a process only."""
    value = put(mesh, spec)
    is_clean = simulate(count, lambda me: save_in(me, tmp_path / "clean", value))
    assert is_clean == [[]] * count
    if spec == P("x"):
        return

    bad = value
    for device in range(6, 8):  # all of the last process, of 4
        bad = flipped(bad, device)
    said = simulate(count, lambda me: save_in(me, tmp_path / "run", bad))
    assert all(one == said[0] for one in said)
    (text,) = said[0]
    assert "leaf w" in text
    assert "leaf x" not in text
    assert f"process {count - 1}" in text


# --- a run -------------------------------------------------------------------------------------


def run_with_a_bad_step(root, mesh, **options):
    """Saves a good step 1, a bad step 2, and returns what the manager says of them."""
    good = put(mesh, P())
    with CheckpointManager(root, save=SavePolicy(check_replicas=1), **options) as manager:
        manager.save(1, {"w": good})
        manager.save(2, {"w": flipped(good, 3)})
        manager.wait_until_finished()
        return list(manager.problems), manager.all_steps()


def test_a_difference_is_a_problem_and_one_warning(tmp_path, mesh, caplog):
    caplog.set_level(logging.WARNING)
    problems, _ = run_with_a_bad_step(tmp_path, mesh)

    (text,) = problems
    assert "step 2 is marked" in text
    assert "leaf w has other bits on device 3 than on devices 0, 1, 2, 4" in text
    assert [one.getMessage() for one in caplog.records] == [text]


def test_a_restore_prefers_the_step_before(tmp_path, mesh):
    run_with_a_bad_step(tmp_path, mesh)

    assert int(jaxckpt.restore(tmp_path)["w"][0, 1]) == 1
    with CheckpointManager(tmp_path, mode="r") as manager:
        manager.restore()
        assert manager.restored_step == 1
        manager.restore(step=2)
        assert manager.restored_step == 2
        assert any("step 2 is restored, though" in one for one in manager.problems)


def test_the_job_goes_on_from_the_step_before_and_nothing_is_lost(tmp_path, mesh):
    run_with_a_bad_step(tmp_path, mesh)

    with CheckpointManager(tmp_path) as manager:
        state, step = manager.restore_or(lambda: {"w": put(mesh, P())})
        assert step == 1
        assert manager.save(2, state) is not None
        manager.wait_until_finished()
        assert manager.restore() is not None
        assert manager.restored_step == 2
    aside = [path for path in tmp_path.iterdir() if "2" in path.name and path.name != "2"]
    assert len(aside) == 1
    assert jaxckpt.restore(aside[0])["w"].shape == (8, 8)


def test_a_marked_step_is_better_than_none(tmp_path, mesh):
    run_with_a_bad_step(tmp_path, mesh)
    with CheckpointManager(tmp_path) as manager:
        manager.delete(1)
    with CheckpointManager(tmp_path) as manager:
        manager.restore()
        assert manager.restored_step == 2
        assert any("step 2 is restored, though" in one for one in manager.problems)
    assert jaxckpt.restore(tmp_path)["w"].shape == (8, 8)


def test_the_last_step_without_a_mark_is_never_deleted(tmp_path, mesh):
    good = put(mesh, P())
    policies = {"save": SavePolicy(check_replicas=1), "keep": KeepPolicy(last=1)}
    with CheckpointManager(tmp_path, **policies) as manager:
        manager.save(1, {"w": good})
        manager.save(2, {"w": good})
        for step in range(3, 6):
            manager.save(step, {"w": flipped(good, 3)})
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 5]
        manager.save(6, {"w": good})
        manager.wait_until_finished()
        assert manager.all_steps() == [6]


def compared(root, saves, **policy):
    """Which of the saves compare replicas."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    with CheckpointManager(root, save=SavePolicy(**policy)) as manager:
        for step in range(saves):
            handle = manager.save(step, {"w": put(mesh, P())})
            yield handle.job.request.replicas.compares, manager


@pytest.mark.parametrize(("every", "wanted"), [(0, []), (1, [0, 1, 2, 3, 4, 5]), (3, [0, 3])])
def test_how_often(tmp_path, every, wanted):
    asked = [is_asked for is_asked, _ in compared(tmp_path, 6, check_replicas=every)]
    assert [i for i, is_asked in enumerate(asked) if is_asked] == wanted


def test_the_first_save_after_a_restore_compares(tmp_path):
    asked = []
    for is_asked, manager in compared(tmp_path, 5, check_replicas=100):
        asked.append(is_asked)
        if len(asked) == 3:
            manager.wait_until_finished()
            manager.restore()
    assert asked == [True, False, False, True, False]


def test_after_a_difference_every_save_compares(tmp_path, mesh):
    good = put(mesh, P())
    asked = []
    with CheckpointManager(tmp_path) as manager:
        for step, value in enumerate([flipped(good, 1), flipped(good, 1), good, good]):
            handle = manager.save(step, {"w": value})
            asked.append(handle.job.request.replicas.compares)
            manager.wait_until_finished()
    assert asked == [True, True, True, False]


def test_a_step_saved_before_a_difference_was_found_is_marked_too(tmp_path, mesh):
    """Process 0 takes it before the save that compares has ended, and does not compare it."""
    good, both_taken = put(mesh, P()), threading.Event()

    def save(me):
        with CheckpointManager(tmp_path, save=SavePolicy(check_replicas=2)) as manager:
            manager.save(1, {"w": good})
            manager.save(2, {"w": good})
            manager.wait_until_finished()
            if me.index == 1:
                assert both_taken.wait(60)
            manager.save(3, {"w": flipped(good, 1)})
            second = manager.save(4, {"w": good})
            both_taken.set()
            manager.wait_until_finished()
            return not second.job.request.replicas.compares

    assert simulate(2, save)[0]
    with CheckpointManager(tmp_path, mode="r") as manager:
        manager.restore(step=4)
        (text,) = manager.problems
    assert "at step 3: process 0: leaf w has other bits on device 1" in text


def test_a_job_in_which_replicas_differ_from_the_start_marks_nothing(tmp_path, mesh):
    """The program may let them differ: a restore must not go back to its first step for that."""
    bad = flipped(put(mesh, P()), 3)
    with CheckpointManager(tmp_path) as manager:
        for step in range(3):
            manager.save(step, {"w": bad})
        manager.wait_until_finished()
        assert len(manager.problems) == 3
        assert all("as whenever this job has compared them" in one for one in manager.problems)
        manager.restore()
        assert manager.restored_step == 2


def test_steps_on_local_disks_are_marked_in_the_directory_too(tmp_path, mesh):
    with CheckpointManager(tmp_path / "run", local=tmp_path / "disk") as manager:
        manager.save(1, {"w": put(mesh, P())})
        manager.wait_until_finished()
        manager.restore()
        manager.save(2, {"w": flipped(put(mesh, P()), 3)})
        manager.wait_until_finished()
    for place in (tmp_path / "run", tmp_path / "disk"):
        with CheckpointManager(place, mode="r") as manager:
            manager.restore()
            assert manager.restored_step == 1


@pytest.mark.parametrize("value", [-1, 1.5, "often"])
def test_a_bad_number_is_refused(value):
    with pytest.raises((TypeError, ValueError), match="check_replicas"):
        SavePolicy(check_replicas=value)


def test_commands_show_the_mark_and_keep_the_step_before(tmp_path, mesh):
    run_with_a_bad_step(tmp_path, mesh)

    _, text, _ = cli("ls", tmp_path)
    assert "marked" in text
    assert "step 2 is marked: leaf w has other bits on device 3" in text
    cli("gc", tmp_path, "--last", 1, "--yes")
    with CheckpointManager(tmp_path, mode="r") as manager:
        assert manager.all_steps() == [1, 2]


@pytest.mark.parametrize("place", ["a directory", "a store"])
def test_an_uploaded_mark_counts_when_the_directory_deletes_steps(tmp_path, mesh, place):
    directory = f"memory://{tmp_path.name}/run" if place == "a store" else tmp_path / "run"
    good, last = put(mesh, P()), KeepPolicy(last=1)
    tier, every = LocalTier(tmp_path / "disk", keep=last), SavePolicy(check_replicas=1)
    with CheckpointManager(directory, save=every, local=tier, keep=last) as manager:
        for step, value in enumerate([good, flipped(good, 3), flipped(good, 3)]):
            manager.save(step, {"w": value}).durable()
        manager.wait_until_finished()
        assert manager.tiers == {"local": [0, 2], "durable": [0, 2], "waiting": []}


@pytest.mark.parametrize("copy", [jaxckpt.fork, jaxckpt.convert], ids=["fork", "convert"])
def test_a_copy_of_a_marked_step_is_marked(tmp_path, mesh, copy):
    run_with_a_bad_step(tmp_path / "run", mesh)

    copy(tmp_path / "run" / "2", tmp_path / "copy" / "2")

    storage, path = locate(tmp_path / "copy" / "2")
    (text,) = find(storage, path).differences
    assert text.startswith("leaf w has other bits on device 3")


@pytest.mark.parametrize("choice", [{}, {"step": 2}], ids=["none else", "by number"])
def test_a_marked_step_is_restored_with_a_warning(tmp_path, mesh, caplog, choice):
    run_with_a_bad_step(tmp_path, mesh)
    if not choice:
        with CheckpointManager(tmp_path) as manager:
            manager.delete(1)
    caplog.clear()

    jaxckpt.restore(tmp_path, **choice)

    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert f"{tmp_path / '2'} is marked: replicas differed at its save" in caplog.text
    assert "marked, since replicas differed: leaf w" in str(jaxckpt.open(tmp_path / "2"))


def flip_a_byte(step):
    for file in (step / "state" / "d").iterdir():
        data = bytearray(file.read_bytes())
        data[len(data) // 4] ^= 1
        file.write_bytes(data)


@pytest.mark.parametrize("count", [1, 2])
def test_if_the_newest_step_is_damaged_one_without_a_mark_is_next(tmp_path, mesh, count):
    good = put(mesh, P())
    with CheckpointManager(tmp_path, save=SavePolicy(check_replicas=1)) as manager:
        for step, value in enumerate([good, flipped(good, 3), good]):
            manager.save(step, {"w": value, "step": step})
            manager.wait_until_finished()
    flip_a_byte(tmp_path / "2")

    found = simulate(count, lambda _: jaxckpt.restore(tmp_path)["step"])

    assert found == [0] * count


def test_a_leaf_of_another_item_is_named_with_it(tmp_path, mesh):
    good = put(mesh, P())
    with CheckpointManager(tmp_path, save=SavePolicy(check_replicas=1)) as manager:
        manager.save(1, {"w": good}, items={"ema": {"w": good}})
        manager.save(2, {"w": good}, items={"ema": {"w": flipped(good, 3)}})
        manager.wait_until_finished()
        (text,) = manager.problems
    assert "leaf w of item ema has other bits on device 3" in text


def test_processes_agree_on_which_shards_lack_fingerprints(mesh, accelerators):
    """Also if one of them has further shards, of which the others know nothing."""
    of_one = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    known, new, other = put(mesh, P()), put(mesh, P(), (4, 4)), put(mesh, P())
    further = [put(of_one, P()), jax.device_put(put(of_one, P()), jax.devices()[4])]
    for device in range(4, 8):
        other = flipped(other, device)

    def compared(index, *values):
        found = Replicas(me := SimulatedProcesses(index, 2, MemoryService()))
        found.add(*plan_tree([*values], me))
        found.compare()
        return found

    for values in ((known,), (new, other)):  # the first time, nothing is compiled
        both = [compared(index, further[index], *values) for index in range(2)]
        fingerprint.prepare()
    first, second = (one.said()["digests"] for one in both)
    assert first.keys() == second.keys() != set()
    assert first != second


def test_a_failed_save_keeps_no_replicas(tmp_path, mesh):
    """Its handle stays with the manager, and jax donates no array whose memory is in use."""

    def before(verb, path):
        if verb == "make_dir" and "/1." in path:
            raise OSError(28, "No space left on device", path)

    with CheckpointManager(watched(tmp_path / "a", before)) as manager:
        handle = manager.save(1, {"w": put(mesh, P())})
        with pytest.raises(SaveFailed):
            handle.result()
        assert handle.job.request.replicas.compares
        assert handle.job.request.replicas.release() == []
