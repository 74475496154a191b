"""A step refers to what has not changed since the last but one, and is complete by itself."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import threading
from itertools import count
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import CheckpointManager, KeepPolicy, LocalTier
from jaxckpt._core import fingerprint
from jaxckpt._disk.commit import commit_of
from jaxckpt._save import job
from jaxckpt.errors import CorruptCheckpoint, SaveFailed
from jaxckpt.storage import LocalStorage, PathIn, locate
from jaxckpt.testing import CrashingStorage, SimulatedCrash, WatchedStorage, simulate
from tests.strategies import same

FROZEN = 16 * 128 * 128 * 4
DTYPES = ["bool", "int4", "uint8", "int16", "float8_e4m3fn", "bfloat16", "float32", "complex64"]


def frozen():
    return {f"w{i:02}": jax.random.normal(jax.random.key(i), (128, 128)) for i in range(16)}


def lora(step, kept):
    """1 % of the bytes change, and a small array, a key and a number."""
    changes = {f"a{i}": jnp.full((128, 5), step + i, jnp.float32) for i in range(4)}
    return {"kept": kept, "lora": changes, "rng": jax.random.key(step), "step": step}


def copied(kept):
    """The same values in other arrays."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), kept)


def bytes_in(root):
    """All bytes of the files, each once however many names it has."""
    files = [path.stat() for path in Path(root).rglob("*") if path.is_file()]
    return sum({one.st_ino: one.st_size for one in files}.values())


def files_of(step):
    """The files of values of a step, whatever their names; on tmpfs no number is used again."""
    return {path.stat().st_ino for path in Path(step).rglob("d/*")}


@pytest.fixture(params=["host", "device"])
def where(request, monkeypatch):
    """Puts arrays on the host or on accelerators, whose reductions are compiled when needed."""
    if request.param == "device":
        request.getfixturevalue("accelerators")
        send = fingerprint._sent

        def sent(shard):
            if (found := send(shard)) is fingerprint.LATER:
                fingerprint.prepare()
                found = send(shard)
            return found

        monkeypatch.setattr(fingerprint, "_sent", sent)
    return request.param


@pytest.mark.parametrize("are", ["the same", "equal"])
def test_what_is_frozen_is_written_once(ram_path, where, staged, are):
    """Or twice, then at most 1.02 times the changed bytes are written.

    Of the others none is copied from a device, and none is taken that is the same array as before.
    """
    kept, sizes = frozen(), []
    with CheckpointManager(ram_path / "run") as manager:
        for step in range(1, 6):
            manager.save(step, lora(step, copied(kept) if are == "equal" else kept)).result()
            manager.wait_until_finished()
            sizes.append(bytes_in(ram_path / "run"))

    grown = np.diff(sizes)
    everything = FROZEN + 4 * 128 * 5 * 4
    files_of_ours = 20_000  # metadata, record and database; none depends on the sizes of arrays
    assert all(grown[1:] < 1.02 * 4 * 128 * 5 * 4 + files_of_ours)
    assert staged[0] >= everything
    if where == "device" or are == "the same":
        assert all(0 < found < 0.05 * FROZEN for found in staged[2:])
    for step in range(1, 6):
        assert same(jaxckpt.restore(ram_path / "run" / str(step)), lora(step, kept))
        assert jaxckpt.verify(ram_path / "run" / str(step)).ok


@pytest.mark.parametrize("changes", ["text", "number"])
def test_what_is_frozen_is_shared_though_a_value_in_the_metadata_changes(ram_path, changes):
    """A text, or an integer of more than 64 bits; each step has its own."""

    def tree(step):
        return {"kept": kept, "note": f"step {step}" if changes == "text" else step << 70}

    kept = frozen()
    with CheckpointManager(ram_path / "run", keep=KeepPolicy(last=9)) as manager:
        for step in range(1, 5):
            manager.save(step, tree(step)).result()
            manager.wait_until_finished()

    files = [files_of(ram_path / "run" / str(step)) for step in range(1, 5)]
    assert files[0] & files[2]
    assert files[1] & files[3]
    assert bytes_in(ram_path / "run") < 2.5 * FROZEN
    for step in range(1, 5):
        assert same(jaxckpt.restore(ram_path / "run" / str(step)), tree(step))


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_weights_of_four_bits_are_shared(ram_path, where, staged, compression):
    """And compressed ones."""
    kept = jnp.asarray(np.arange(4 << 20) % 16 - 8, jnp.int4)
    with CheckpointManager(ram_path, compression=compression) as manager:
        for step in range(1, 6):
            manager.save(step, lora(step, {"int4": kept, "w": jnp.arange(1 << 20)})).result()
            manager.wait_until_finished()

    files = [{p.stat().st_ino for p in (ram_path / str(n)).rglob("d/*")} for n in range(1, 6)]
    assert files[0] & files[2] & files[4]
    assert bytes_in(ram_path) < 2.1 * bytes_in(ram_path / "1")
    assert where == "host" or all(0 < found < 0.05 * kept.nbytes for found in staged[2:])
    for step in range(1, 6):
        wanted = lora(step, {"int4": kept, "w": jnp.arange(1 << 20)})
        assert same(jaxckpt.restore(ram_path / str(step)), wanted)
        assert jaxckpt.verify(ram_path / str(step)).ok


@pytest.mark.usefixtures("accelerators")
def test_no_save_waits_for_a_compiler(ram_path, staged, request):
    """The programs are compiled after the first commit; then fingerprints are taken, and used."""
    # Of a shape that no other test has: jax compiles a program once.
    kept = {f"w{i:02}": jax.random.normal(jax.random.key(i), (128, 129)) for i in range(16)}
    whole = sum(value.nbytes for value in kept.values())
    compiled, main = [], threading.get_ident()

    def note(event, _, **about):
        if event.endswith("backend_compile_duration") and "_reduce" in about["fun_name"]:
            compiled.append(threading.get_ident())

    jax.monitoring.register_event_duration_secs_listener(note)
    request.addfinalizer(lambda: jax.monitoring.unregister_event_duration_listener(note))
    with CheckpointManager(ram_path) as manager:
        for step in range(1, 7):
            state = lora(step, copied(kept) if step < 6 else kept)
            manager.save(step, state).result()
            manager.wait_until_finished()
            assert same(manager.restore(), state)

    assert compiled
    assert main not in compiled
    assert [found > whole for found in staged] == [True, True, True, False, False, False]


@pytest.mark.usefixtures("accelerators")
def test_there_are_not_too_many_programs(ram_path, limits):
    """The largest arrays have them; the others are written each time."""
    limits(fingerprint, _MOST_PROGRAMS=2)
    kept = {f"w{n}": jnp.arange(float(n)) for n in (1000, 2000, 3000, 4000)}
    with CheckpointManager(ram_path) as manager:
        for step in range(4):
            manager.save(step, copied(kept)).result()
            manager.wait_until_finished()
            assert same(manager.restore(), kept)

    assert sorted(shape for shape, *_ in fingerprint._programs) == [(3000,), (4000,)]


def test_each_step_is_complete_by_itself(ram_path, where):
    """For `cp -r`, Orbax, `fork`, and after deletions in any order."""
    kept = frozen()
    with CheckpointManager(ram_path / "run") as manager:
        for step in range(1, 6):
            manager.save(step, lora(step, kept)).result()
        manager.wait_until_finished()
        for step in (1, 3, 4):
            manager.delete(step)
        manager.save(6, lora(6, kept))
        manager.wait_until_finished()
        assert same(manager.restore(step=2), lora(2, kept))
    shutil.copytree(ram_path / "run" / "5", ram_path / "copy")
    jaxckpt.fork(ram_path / "run", ram_path / "fork", step=6)
    shutil.rmtree(ram_path / "run")

    assert same(jaxckpt.restore(ram_path / "copy"), lora(5, kept))
    with CheckpointManager(ram_path / "fork") as manager:
        assert same(manager.restore(), lora(6, kept))
    with ocp.StandardCheckpointer() as orbax:
        got = orbax.restore(ram_path / "copy" / "state")
    assert np.array_equal(got["kept"]["w03"], kept["w03"])
    assert np.array_equal(got["lora"]["a1"], lora(5, kept)["lora"]["a1"])


def test_shards_on_a_mesh(ram_path, mesh, where):
    """Each shard is compared with what it was, whatever its sharding."""

    def state(step):
        x = np.arange(512 * 64, dtype=np.float32).reshape(512, 64)
        sharded, whole = NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P())
        changed = x.copy()
        changed[:8] += step
        return {
            "kept": jax.device_put(x, sharded),
            "whole": jax.device_put(x, whole),
            "part": jax.device_put(changed, sharded),
        }

    with CheckpointManager(ram_path) as manager:
        for step in range(1, 7):
            manager.save(step, state(step)).result()
            manager.wait_until_finished()

    assert all(same(jaxckpt.restore(ram_path / str(n)), state(n)) for n in range(1, 7))
    assert bytes_in(ram_path) < 0.7 * 6 * (3 * 512 * 64 * 4)


@pytest.mark.parametrize("what", ["values", "bits", "order", "numpy"])
def test_what_changed_is_written(ram_path, where, what):
    """Also if only a NaN's bits, the sign of a zero or the order changed."""
    before = np.zeros(4096, np.float32)
    before[:2], before[10] = np.nan, 1
    after = before.copy()
    match what:
        case "values" | "numpy":
            after[4095] = 1
        case "bits":
            after.view(np.uint32)[0] ^= 1
            after[100] = -0.0
        case "order":
            after[10], after[11] = after[11], after[10]
    wrapped = np.array if what == "numpy" else jnp.array
    with CheckpointManager(ram_path) as manager:
        for step, values in enumerate((before, before, after, after, before)):
            manager.save(step, {"w": wrapped(values), "b": wrapped(before)}).result()
            manager.wait_until_finished()

    for step, values in enumerate((before, before, after, after, before)):
        got = jaxckpt.restore(ram_path / str(step), as_numpy=True)
        assert got["w"].tobytes() == values.tobytes()
        assert got["b"].tobytes() == before.tobytes()


def test_donated_arrays(ram_path, where):
    """Arrays that are given away in the next line were compared, or copied, before."""
    train = jax.jit(
        lambda s: {"kept": s["kept"], "w": s["w"] + 1}, donate_argnums=0, keep_unused=True
    )
    kept = np.arange(1 << 14, dtype=np.float32)
    state = {"kept": jnp.array(kept), "w": jnp.zeros((64, 64))}
    with CheckpointManager(ram_path) as manager:
        for step in range(30):
            manager.save(step, state)
            state = train(state)

    for step in range(30):
        got = jaxckpt.restore(ram_path / str(step), as_numpy=True)
        assert np.array_equal(got["kept"], kept)
        assert (got["w"] == step).all()


def test_when_a_step_is_whole(ram_path):
    """The first two, those of another tree, two after a failed save, and if the base is gone."""
    kept = frozen()

    def save(manager, step, tree=None):
        before = bytes_in(ram_path / "run")
        manager.save(step, tree or lora(step, kept)).result()
        manager.wait_until_finished()
        return bytes_in(ram_path / "run") - before > FROZEN / 2

    with CheckpointManager(ram_path / "run") as manager:
        assert [save(manager, step) for step in range(4)] == [True, True, False, False]
        found = [save(manager, step, {"kept": kept}) for step in range(4, 9)]
        assert found == [True, True, False, False, False]
        before = bytes_in(ram_path / "run" / "8")
        shutil.rmtree(ram_path / "run" / "7")
        manager.save(9, {"kept": kept}).result()  # refers to 7
        assert bytes_in(ram_path / "run" / "9") > 0.9 * before
        manager.wait_until_finished()
        assert [save(manager, step, {"kept": kept}) for step in (10, 11)] == [True, False]
        real, manager._index.storage = manager._index.storage, Failing()
        with pytest.raises(SaveFailed):
            manager.save(12, {"kept": kept}).result()
        manager._index.storage = real
        assert [save(manager, step, {"kept": kept}) for step in (13, 14, 15)] == [True, True, False]
        manager.delete(15)
        assert save(manager, 16, {"kept": kept})
    with CheckpointManager(ram_path / "run", incremental=False) as manager:
        assert all(save(manager, step) for step in range(20, 24))


@pytest.mark.parametrize(
    ("keep", "shares"),
    [
        (KeepPolicy(last=1), False),
        (KeepPolicy(last=1, every_steps=2), False),  # else 2 and 4 would share, and 3 is deleted
        (KeepPolicy(last=2), True),
        (KeepPolicy(best=1, metric="loss"), False),
    ],
)
def test_steps_share_if_the_two_newest_stay(ram_path, keep, shares):
    kept, found = frozen(), []
    with CheckpointManager(ram_path, keep=keep) as manager:
        for step in range(1, 6):
            manager.save(step, lora(step, kept), metrics={"loss": step}).result()
            manager.wait_until_finished()
            found.append(files_of(ram_path / str(step)))

    assert bool(found[4] & found[2]) == shares
    assert not found[4] & (found[3] | found[1])
    assert same(jaxckpt.restore(ram_path / "5"), lora(5, kept))


class Failing(LocalStorage):
    def write(self, path, data):
        if not isinstance(data, bytes):  # a file of values
            raise OSError(28, "No space left on device")
        super().write(path, data)


def test_files_that_are_mostly_changed_are_not_kept(ram_path, where):
    """Arrays that did not change go into files of their own, which the next step links."""
    kept = jnp.arange(1 << 14, dtype=jnp.float32)

    def state(step):
        return {"a": jnp.full((3, 1 << 14), step, jnp.float32), "kept": kept}

    grown, last = [], 0
    with CheckpointManager(ram_path) as manager:
        for step in range(1, 8):
            manager.save(step, state(step)).result()
            manager.wait_until_finished()
            grown.append(bytes_in(ram_path) - last)
            last += grown[-1]

    assert all(one > 4 << 16 for one in grown[:4])
    assert all(3 << 16 < one < 3.5 * (1 << 16) for one in grown[4:])
    assert all(same(jaxckpt.restore(ram_path / str(n)), state(n)) for n in range(1, 8))


def test_saves_that_overlap_are_whole(ram_path):
    """Nothing refers to a step that is not committed, or may be deleted meanwhile."""
    kept = frozen()
    with CheckpointManager(ram_path, keep=KeepPolicy(last=2)) as manager:
        for step in range(20):
            manager.save(step, lora(step, kept))
        manager.wait_until_finished()
        for step in manager.all_steps():
            assert same(manager.restore(step=step), lora(step, kept))
        assert not manager.problems


@pytest.mark.parametrize(
    "code", [errno.EPERM, errno.EACCES, errno.EIO, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS]
)
def test_without_hard_links(ram_path, monkeypatch, code):
    """Each step is whole, also where a file has too many links."""

    def refuse(*args, **options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    kept = frozen()
    with CheckpointManager(ram_path) as manager:
        for step in range(4):
            manager.save(step, lora(step, kept)).result()
            manager.wait_until_finished()

    jaxckpt.fork(ram_path, ram_path / "fork")

    assert all(same(jaxckpt.restore(ram_path / str(n)), lora(n, kept)) for n in range(4))
    assert all(jaxckpt.verify(ram_path / str(n)).ok for n in range(4))
    assert same(jaxckpt.restore(ram_path / "fork"), lora(3, kept))
    assert jaxckpt.verify(ram_path / "fork").ok


@pytest.mark.slow
def test_a_file_with_as_many_links_as_ext4_allows(tmp_path):
    """65,000 of them: the step that would refer to it is whole."""
    kept = frozen()
    with CheckpointManager(tmp_path / "run") as manager:
        for step in range(3):
            manager.save(step, lora(step, kept)).result()
            manager.wait_until_finished()
        [file] = [one for one in (tmp_path / "run/2").rglob("d/*") if one.stat().st_nlink > 1]
        (tmp_path / "links").mkdir()
        with contextlib.suppress(OSError):  # EMLINK
            for n in range(65_000):
                os.link(file, tmp_path / "links" / str(n))
        if file.stat().st_nlink >= 65_002:
            pytest.skip("this file system allows more")
        for step in (3, 4):
            manager.save(step, lora(step, kept)).result()
            manager.wait_until_finished()

    assert same(jaxckpt.restore(tmp_path / "run/4"), lora(4, kept))
    assert jaxckpt.verify(tmp_path / "run/4").ok


def test_a_file_with_too_many_links_is_written_again(ram_path, monkeypatch):
    """Then steps share the new one."""
    kept, link = frozen(), os.link

    def links(source, target, **options):
        if os.stat(source).st_nlink == 3:
            raise OSError(errno.EMLINK, os.strerror(errno.EMLINK), source)
        link(source, target, **options)

    monkeypatch.setattr(os, "link", links)
    with CheckpointManager(ram_path) as manager:
        for step in range(1, 12):
            manager.save(step, lora(step, kept)).result()
            manager.wait_until_finished()
        assert not manager.problems

    links = [max(path.stat().st_nlink for path in (ram_path / str(n)).rglob("d/*")) for n in (1, 7)]
    assert links == [3, 3]
    assert all(same(jaxckpt.restore(ram_path / str(n)), lora(n, kept)) for n in range(1, 12))


def test_a_local_tier(ram_path, where, staged):
    """The steps of each place share files, and are complete by themselves."""
    kept, sizes = frozen(), []
    with CheckpointManager(ram_path / "run", local=ram_path / "local") as manager:
        for step in range(1, 6):
            manager.save(step, lora(step, kept)).durable()
            manager.wait_until_finished()
            sizes.append([bytes_in(ram_path / "local"), bytes_in(ram_path / "run")])
            assert same(manager.restore(), lora(step, kept))
        assert manager.tiers["durable"] == [1, 2, 3, 4, 5]
        assert not manager.problems
    shutil.rmtree(ram_path / "local")

    assert (np.diff(sizes, axis=0)[1:] < 0.1 * FROZEN).all()
    assert all(found < 0.05 * FROZEN for found in staged[2:])
    for step in range(1, 6):
        assert same(jaxckpt.restore(ram_path / "run" / str(step)), lora(step, kept))
        assert jaxckpt.verify(ram_path / "run" / str(step)).ok


def test_a_step_is_whole_if_there_is_no_room_for_it_beside_its_base(ram_path, where, free_space):
    """It goes to the directory; or the step before, which is there too, makes room for it."""
    kept, fills = frozen(), {3: ram_path, 6: ram_path / "local" / "5"}
    free_space(lambda _: 0 if step in fills and fills[step].exists() else 1 << 40)
    with CheckpointManager(ram_path / "run", local=ram_path / "local") as manager:
        for step in range(1, 8):
            manager.save(step, lora(step, kept)).durable()
            manager.wait_until_finished()
            assert same(manager.restore(), lora(step, kept))
            assert manager.tiers["local"] == {3: [], 6: [6]}.get(step, manager.tiers["local"])
        assert manager.tiers["durable"] == [1, 2, 3, 4, 5, 6, 7]
    shutil.rmtree(ram_path / "local")

    for step in range(1, 8):
        assert same(jaxckpt.restore(ram_path / "run" / str(step)), lora(step, kept))


class Gated(LocalStorage):
    """A disk to which values are written only while `gate` is set."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def write(self, path, data):
        assert isinstance(data, bytes) or self.gate.wait(60)  # else it is a file of values
        super().write(path, data)


def test_room_may_be_made_of_what_a_save_under_way_refers_to(ram_path, where, free_space):
    kept, free, disk = frozen(), [1 << 40], Gated()
    free_space(lambda _: free[0])
    local = LocalTier(PathIn(disk, str(ram_path / "local")))
    with CheckpointManager(ram_path / "run", local=local) as manager:
        for step in (1, 2):
            manager.save(step, lora(step, kept)).durable()
            manager.wait_until_finished()
        disk.gate.clear()
        manager.save(3, lora(3, kept))  # refers to 1
        free[0] = 0
        manager.save(4, lora(4, kept))
        assert manager.tiers["local"] == []
        disk.gate.set()
        manager.wait_until_finished()
        assert manager.tiers["local"] == [3]
        assert same(jaxckpt.restore(ram_path / "local" / "3"), lora(3, kept))
    for step in (1, 2, 3, 4):
        assert same(jaxckpt.restore(ram_path / "run" / str(step)), lora(step, kept))


def damage(step):
    """Damages the largest file of values of a step."""
    file = max(step.rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[1000:1064] = bytes(64)
    file.write_bytes(data)  # in place, as a disk does: each name of the file has it


@pytest.mark.parametrize("shows", ["read back", "restore", "restore_items"])
def test_a_damaged_step_is_not_referred_to(ram_path, where, shows):
    """From the moment on at which the manager knows it."""
    kept, keep = frozen(), KeepPolicy(verified=shows == "read back")
    with CheckpointManager(ram_path, keep=keep) as manager:
        for step in (1, 2):
            manager.save(step, lora(step, kept)).result()
            manager.wait_until_finished()
        if shows == "read back":  # after a step that refers to it, which is not read before
            damage(ram_path / "1")
        manager.save(3, lora(3, kept)).result()
        manager.wait_until_finished()
        if shows == "read back":
            assert "cannot be read back" in manager.problems[0]
        else:
            damage(ram_path / "3")
            with pytest.raises(CorruptCheckpoint):
                getattr(manager, shows)(step=3)
        for step in (4, 5):
            manager.save(step, lora(step, kept)).result()
            manager.wait_until_finished()

    assert not jaxckpt.verify(ram_path / "3").ok
    for step in (4, 5):
        assert jaxckpt.verify(ram_path / str(step)).ok
        assert same(jaxckpt.restore(ram_path / str(step)), lora(step, kept))


@pytest.mark.parametrize("call", ["restore", "restore_items"])
def test_after_going_back_in_a_store_a_step_is_whole(call, caplog):
    """Whatever was restored; later steps share files again."""
    caplog.set_level(logging.CRITICAL)
    url, kept = f"memory://{call}-goes-back", {"w": jnp.arange(300_000.0)}
    with CheckpointManager(url) as manager:
        for step in (1, 2, 3):
            manager.save(step, lora(step, kept)).result()
            manager.wait_until_finished()
        storage, root = locate(url)
        storage.write(f"{root}/3/state/_METADATA", b"{")
        assert getattr(manager, call)()
        assert manager.restored_step == 2
        for step in (4, 5):
            manager.save(step, lora(step, kept)).result()
            manager.wait_until_finished()
        assert manager._saver.incremental.storage
        assert all(same(manager.restore(step=step), lora(step, kept)) for step in (1, 2, 4, 5))


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("when", ["enqueued", "awaited"])
def test_what_cannot_be_compared_is_written(ram_path, monkeypatch, when):
    """A device without memory for a fingerprint stops no save."""
    kept = frozen()

    def fail(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    with CheckpointManager(ram_path) as manager:
        for step in range(1, 7):
            if step == 4 and when == "enqueued":
                monkeypatch.setattr(
                    fingerprint, "_programs", dict.fromkeys(fingerprint._programs, fail)
                )
            with monkeypatch.context() as patch:
                if step == 4 and when == "awaited":
                    patch.setattr(jax, "device_get", fail)
                manager.save(step, lora(step, copied(kept))).result()
                manager.wait_until_finished()

    assert all(same(jaxckpt.restore(ram_path / str(n)), lora(n, kept)) for n in range(1, 7))


@pytest.mark.parametrize("are", ["the same", "equal"])
def test_an_earlier_step_may_be_deleted_during_a_save(ram_path, where, are):
    """By another program: the links are made before the values are let go, or the values stay."""
    kept, disk = frozen(), Gated()
    with CheckpointManager(PathIn(disk, str(ram_path))) as manager:
        for step in (1, 2):
            manager.save(step, lora(step, kept)).result()
            manager.wait_until_finished()
        disk.gate.clear()
        before = np.array(kept["w03"])
        saving = manager.save(3, lora(3, kept if are == "the same" else copied(kept)))
        shutil.rmtree(ram_path / "1")
        shutil.rmtree(ram_path / "2")
        disk.gate.set()
        saving.result()
        manager.wait_until_finished()
        manager.save(4, lora(4, kept)).result()

    for step in (3, 4):
        got = jaxckpt.restore(ram_path / str(step))
        assert same(got, lora(step, kept))
        assert np.array_equal(got["kept"]["w03"], before)
        assert jaxckpt.verify(ram_path / str(step)).ok


def test_a_step_whose_base_is_half_deleted_is_whole(ram_path, where):
    """And has no file that its database does not know."""
    kept = frozen()
    with CheckpointManager(ram_path, keep=KeepPolicy(last=2)) as manager:
        for step in (1, 2):
            state = {"a": lora(step, kept), "b": step}
            manager.save(step, state, items={"ema": {"w": jnp.arange(1 << 14)}}).result()
            manager.wait_until_finished()
        shutil.rmtree(ram_path / "1" / "ema")
        manager.save(3, state, items={"ema": {"w": jnp.arange(1 << 14)}}).result()
        manager.wait_until_finished()
        assert not manager.problems

    files = {step: len([*(ram_path / step).rglob("d/*")]) for step in ("2", "3")}
    assert files["2"] == files["3"]
    assert same(jaxckpt.restore(ram_path / "3"), state)
    assert {p.stat().st_nlink for p in (ram_path / "3").rglob("d/*")} == {1}


def test_links_that_are_cleared_up_before_a_commit_fail_it(ram_path, monkeypatch):
    """As another job's start does: no step is committed without its files."""
    kept = frozen()
    with CheckpointManager(ram_path) as manager:
        for step in (1, 2):
            manager.save(step, lora(step, kept)).result()
            manager.wait_until_finished()
        begin = job._transaction.begin

        def begins(storage, path, **options):
            work = commit_of(storage, path).work(options["token"])
            shutil.rmtree(work.path)
            return begin(storage, path, **options)

        with monkeypatch.context() as patch:
            patch.setattr(job._transaction, "begin", begins)
            saving = manager.save(3, lora(3, kept))
            with pytest.raises(SaveFailed, match="was linked there for this save"):
                saving.result()
        assert manager.all_steps() == [1, 2]
        manager.save(4, lora(4, kept)).result()
        assert same(manager.restore(), lora(4, kept))


def test_disks_of_several_hosts(ram_path, mesh, where):
    """Each has what its process held, though another one writes it too."""
    kept, files = np.arange(1 << 16, dtype=np.float32), {}

    def state(step):
        whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))
        return {
            "whole": jax.device_put(kept, whole),
            "split": jax.device_put(kept, split),
            "w": jax.device_put(np.full(64, step, np.float32), whole),
        }

    def run(processes):
        local = ram_path / f"host{processes.index}"
        with CheckpointManager(ram_path / "run", local=local) as manager:
            for step in range(1, 6):
                manager.save(step, state(step)).result()
                manager.wait_until_finished()
                [share] = [path for path in local.iterdir() if path.is_dir()]
                files[processes.index, step] = files_of(share / str(step))
            assert all(jaxckpt.verify(share / step).ok for step in ("4", "5"))
            return manager.problems

    assert simulate(2, run) == [[], []]
    for i in (0, 1):
        assert files[i, 5] & files[i, 3]
        assert not files[i, 5] & files[i, 4]
    for step in range(1, 6):
        assert same(jaxckpt.restore(ram_path / "run" / str(step)), state(step))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("keep", [1, 2])
def test_after_a_crash_at_any_change_every_step_restores(ram_path, caplog, keep):
    """Of saves with references and of deletions: each listed step has its values."""
    caplog.set_level(logging.CRITICAL)
    kept, crashes = {"w": jnp.arange(5000.0)}, 0
    for after in count():
        root, told = ram_path / str(after), -1
        crashing = CrashingStorage(LocalStorage(), after, torn=bool(after % 2))
        try:
            with CheckpointManager(
                PathIn(crashing, str(root)), keep=KeepPolicy(last=keep)
            ) as manager:
                for step in range(4):
                    manager.save(step, {"kept": kept, "step": step}).result()
                    told = step
                    manager.wait_until_finished()
            crashed = False
        except (SimulatedCrash, SaveFailed, OSError):
            crashed = True
        crashes += crashed

        with CheckpointManager(root, keep=KeepPolicy(last=keep)) as manager:
            steps = manager.all_steps()
            assert (max(steps) if steps else -1) >= told
            for step in steps:
                assert same(manager.restore(step=step), {"kept": kept, "step": step})
            assert not manager.problems
        shutil.rmtree(root)
        if not crashed:
            break
    assert crashes > 40


@pytest.mark.multihost
def test_several_processes(ram_path, mesh):
    """Each links what it wrote itself; the merged step is complete, and another mesh reads it."""
    kept = np.arange(512 * 64, dtype=np.float32).reshape(512, 64)

    def state(step):
        sharding = NamedSharding(mesh, P("x", "y"))
        return {
            "kept": jax.device_put(kept, sharding),
            "w": jax.device_put(np.full((64, 64), step, np.float32), sharding),
            "host": np.arange(3000),
        }

    def run(processes):
        grown = []
        with CheckpointManager(ram_path, keep=KeepPolicy(last=2)) as manager:
            for step in range(1, 6):
                manager.save(step, state(step)).result()
                manager.wait_until_finished()
                grown.append(bytes_in(ram_path / str(step)))
        return grown

    simulate(4, run)
    files = {}
    for step in (4, 5):
        assert same(jaxckpt.restore(ram_path / str(step), as_numpy=True)["kept"], kept)
        assert (jaxckpt.restore(ram_path / str(step), as_numpy=True)["w"] == step).all()
        assert jaxckpt.verify(ram_path / str(step)).ok
        files[step] = {p.stat().st_ino for p in (ram_path / str(step)).rglob("d/*")}
    assert not files[4] & files[5]
    links = [p.stat().st_nlink for p in (ram_path / "5").rglob("d/*")]
    assert len([n for n in links if n == 1]) >= 4  # what changed


# --- fingerprints ----------------------------------------------------------------------------


def of_device(values):
    fingerprint.send([values])
    fingerprint.prepare()
    return fingerprint.arrived(fingerprint.send([values]))[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_counts(dtype):
    """One element or two changed, or exchanged, and the fingerprints differ; else they do not."""
    bits = np.arange(3 * 40) % 2
    bits[7] = 1
    values = jnp.asarray(bits, dtype).reshape(3, 40)
    exchanged = bits.copy()
    exchanged[[7, 8]] = exchanged[[8, 7]]
    others = [_flipped(bits, places) for places in ((0,), (119,), (3, 70))]
    others = [jnp.asarray(other, dtype).reshape(3, 40) for other in (*others, exchanged)]
    found = [of_device(one) for one in (values, *others)]

    assert None not in found
    assert len(set(found)) == 5
    assert of_device(jnp.array(values, copy=True)) == found[0]


@pytest.mark.parametrize(
    ("dtype", "most"),
    [("int4", 1023), ("uint8", 1023), ("bfloat16", 1023), ("float32", 1023), ("complex64", 511)],
)
def test_positions_do_not_repeat(limits, dtype, most):
    """An array with more words than positions has no fingerprint, however few bytes it has."""
    limits(fingerprint, _MOST_WORDS=1023)

    assert of_device(jnp.zeros(most, dtype)) is not None
    assert of_device(jnp.zeros(most + 1, dtype)) is None


def _flipped(bits, places):
    bits = bits.copy()
    bits[list(places)] ^= 1
    return bits


def reference(words):
    """The reduction, in Python's integers."""
    low, sums = (1 << 32) - 1, []
    for a, b in fingerprint._FACTORS:
        total = 0
        for at, word in enumerate(words):
            mixed = (word + at * a) & low
            mixed = ((mixed ^ (mixed >> 16)) * b) & low
            mixed = ((mixed ^ (mixed >> 13)) * a) & low
            total += mixed ^ (mixed >> 16)
        sums.append(total & low)
    return np.array(sums, np.uint32).tobytes()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=20))
def test_a_fingerprint_is_what_it_says(words):
    """The same on a device and in Python, whatever the dtype of the bits."""
    bits = np.array(words, np.uint32)

    assert of_device(jnp.asarray(bits)) == reference(words)
    assert of_device(jnp.asarray(bits.view(np.float32))) == reference(words)


@settings(deadline=None, max_examples=50)
@given(st.binary(min_size=1, max_size=200), st.data())
def test_fingerprints_in_host_memory(data, draw):
    """Equal bytes are recognised, and any changed byte or length."""
    values = np.frombuffer(data, np.uint8)
    at = draw.draw(st.integers(0, len(data) - 1))
    other = values.copy()
    other[at] ^= draw.draw(st.integers(1, 255))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint, "_PIECE_BYTES", 16)
        known = fingerprint.of_host(values)

        assert fingerprint.is_of(known, values.copy())
        assert not fingerprint.is_of(known, other)
        assert not fingerprint.is_of(known, np.append(values, np.uint8(0)))
        assert not fingerprint.is_of(known, values[:-1])


class TakenOnce:
    """An item whose state can be taken once, in one process; and a place without links."""

    def __init__(self, path, is_bad):
        self.storage = WatchedStorage(LocalStorage(), self.before)
        self.path, self.is_bad, self.no_links, self.taken = str(path), is_bad, False, 0

    def before(self, verb, path):
        if self.no_links and verb.startswith("link"):
            raise OSError(errno.EMLINK, "too many links", path)

    def get_state(self):
        self.taken += 1
        if self.no_links and self.taken > 1 and self.is_bad:
            raise MemoryError("no room for the values")
        return {"at": 1}

    def set_state(self, state):
        raise NotImplementedError


def save_thrice(me, root, mesh, is_bad):
    item = TakenOnce(root, is_bad and me.index == 1)
    state = {"w": jax.device_put(jnp.ones((16, 1 << 17)), NamedSharding(mesh, P("x")))}
    asked = []
    with CheckpointManager(PathIn(item.storage, item.path), timeout_s=20) as manager:
        for step in (1, 2, 3):
            if step == 3:
                manager.wait_until_finished()
                manager.restore()  # so that the next save compares replicas
            item.taken, item.no_links = 0, step == 3
            try:
                handle = manager.save(step, state, items={"data": item})
                asked.append(handle.job.request.replicas.compares)
                manager.wait_until_finished()
            except (MemoryError, jaxckpt.CheckpointError) as error:
                return item.taken, type(error).__name__
    return item.taken, asked


def test_a_step_that_is_taken_again_compares_replicas_too(tmp_path, mesh):
    """If its links fail: the first values were not compared, and are gone."""
    assert (
        simulate(2, lambda me: save_thrice(me, tmp_path, mesh, False))
        == [(2, [True, False, True])] * 2
    )


def test_all_hear_at_once_that_a_process_could_not_take_a_step_again(tmp_path, mesh):
    found = simulate(2, lambda me: save_thrice(me, tmp_path, mesh, True))
    assert [error for _, error in found] == ["ProcessesDisagree", "MemoryError"]
