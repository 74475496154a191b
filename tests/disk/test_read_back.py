"""Files that steps share are read back, and mended: a bad byte costs a few steps at most."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import CheckpointManager
from jaxckpt._disk import read_back
from jaxckpt._disk.attempt import Work
from jaxckpt._disk.read_back import damaged_chunks
from jaxckpt._save import tree_plan, unchanged
from jaxckpt._save.snapshot import take_tree
from jaxckpt.format import arrays, names
from jaxckpt.multihost import Group, Single
from jaxckpt.storage import LocalStorage, locate
from jaxckpt.testing import simulate
from tests.strategies import same
from tests.twins import watched

KEPT = {"a": np.arange(1 << 14, dtype=np.float32), "b": np.arange(3000)}


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Damage is reported, many times."""
    caplog.set_level(logging.CRITICAL)


def state(step, kept):
    return {"kept": kept, "w": jnp.full(3000, step, jnp.float32)}


def on_device(kept=KEPT):
    return jax.tree.map(jnp.asarray, kept)


def largest(step):
    """The largest file of values of a step; on a file system the two newest steps do not share."""
    return max(Path(step).rglob("d/*"), key=lambda path: path.stat().st_size)


def flip(path, at=1000):
    """Flips a bit of a file in place, as a disk does: each name of the file has it."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 4]))


def bad_steps(root):
    steps = sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal())
    return [step for step in steps if not jaxckpt.verify(root / str(step)).ok]


def go_on(manager, steps, kept, root):
    """Saves steps; returns after each which are bad. One of the two newest is always good."""
    found = []
    for step in steps:
        manager.save(step, state(step, kept)).result()
        manager.wait_until_finished()
        found.append(bad_steps(root))
        assert not {step, step - 1} <= {*found[-1]}
    return found


# --- the chunks of a file ----------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["plain", "inner", "zstd", "inner zstd"])
def test_each_damaged_chunk_is_found(ram_path, limits, layout):
    """And no other, whatever byte of it is bad; a file that is too short lacks its last chunks."""
    limits(arrays, MAX_UNIT_BYTES=1 << 14 if "inner" in layout else 1 << 25)
    limits(read_back, _PIECE_BYTES=10_000)
    tree_plan._cache = ()  # plans of the same tree with other limits
    rng = np.random.default_rng(0)
    tree = {f"w{i}": rng.integers(0, 9, (size,)) for i, size in enumerate((1100, 9001, 8192))}
    storage, path = locate(ram_path)
    zstd = 1 if "zstd" in layout else None
    item = take_tree("s", tree, Single(), copy=True, zstd=zstd, storage=storage)
    item.arrive()
    item.write(storage, Work(path, ""), Group.together(Single()))
    written, chunks, found = item.tables[0], item.tree.writes.chunks, 0
    assert {c.stored.inner_shape is not None for c in chunks} >= {"inner" in layout}

    for file in {written.places[c.key].file for c in chunks}:
        within = [c for c in chunks if written.places[c.key].file == file]
        found += len(within)
        data = (ram_path / "s" / file).read_bytes()
        assert damaged_chunks(storage, f"{path}/s", file, written, within) == []
        for chunk in within:
            place = written.places[chunk.key]
            for at in (0, 1, place.size // 3, place.size - 5, place.size - 4, place.size - 1):
                flip(ram_path / "s" / file, place.offset + at)
                assert damaged_chunks(storage, f"{path}/s", file, written, within) == [chunk]
                flip(ram_path / "s" / file, place.offset + at)
        os.truncate(ram_path / "s" / file, place.offset + place.size - 1)
        assert chunk in damaged_chunks(storage, f"{path}/s", file, written, within)
        (ram_path / "s" / file).write_bytes(data)
    assert found == 3


# --- a run -------------------------------------------------------------------------------------


def test_a_flip_just_after_a_file_was_read_costs_nine_further_steps(ram_path):
    """It is found before the tenth reference, written again, and mended everywhere."""
    kept = on_device()
    with CheckpointManager(ram_path) as manager:
        assert go_on(manager, (1, 2), kept, ram_path) == [[], []]  # and the file of 1 is read
        flip(largest(ram_path / "1"))
        found = go_on(manager, range(3, 23), kept, ram_path)
        [damage, mended] = manager.problems

    assert found[-3] == [1, 3, 5, 7, 9, 11, 13, 15, 17, 19]
    assert found[-2] == found[-1] == []
    name = largest(ram_path / "1").name
    assert f"{ram_path}/19/state/d/{name}, which steps share, is damaged in leaf" in damage
    assert "kept" in damage
    assert mended.startswith(f"d/{name} is mended in {ram_path}/19/state, {ram_path}/17/state, ")
    links = largest(ram_path / "1").stat().st_nlink
    assert links == 10  # the mended file is shared again
    assert all(same(jaxckpt.restore(ram_path / str(n)), state(n, kept)) for n in range(1, 23))


def test_a_flip_before_a_file_is_read_costs_no_further_step(ram_path):
    """The step that would have referred to it is written as a whole, and mends it."""
    kept = on_device()
    with CheckpointManager(ram_path) as manager:
        go_on(manager, (1, 2), kept, ram_path)
        flip(largest(ram_path / "2"))
        found = go_on(manager, range(3, 7), kept, ram_path)

    assert found == [[2], [], [], []]
    assert all(same(jaxckpt.restore(ram_path / str(n)), state(n, kept)) for n in range(1, 7))


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_what_has_changed_since_is_not_mended(ram_path, compression):
    """Damage to old values stays where it is, and reaches no further step."""
    kept = on_device({"a": np.random.default_rng(0).standard_normal(1 << 17, np.float32)})
    with CheckpointManager(ram_path, compression=compression) as manager:
        go_on(manager, (1, 2), kept, ram_path)
        flip(largest(ram_path / "2"), at=100_000)
        go_on(manager, (3,), kept, ram_path)
        kept = jax.tree.map(lambda x: x + 1, kept)
        found = go_on(manager, range(4, 8), kept, ram_path)
        [problem] = manager.problems

    assert "is damaged in leaf kept/a" in problem
    assert found == [[2]] * 4


@pytest.mark.parametrize("how", ["truncated", "deleted", "unreadable"])
def test_what_cannot_be_read_is_written_again(ram_path, monkeypatch, how):
    """An error is no damage: the older steps are left alone."""
    kept = on_device()
    with CheckpointManager(ram_path) as manager:
        go_on(manager, (1, 2), kept, ram_path)
        file = largest(ram_path / "2")
        with monkeypatch.context() as patch:
            match how:
                case "truncated":
                    os.truncate(file, 70_000)
                case "deleted":
                    shutil.rmtree(ram_path / "2")
                case "unreadable":
                    read_into = LocalStorage.read_into

                    def fail(self, path, offset, buffers):
                        if path == str(file):
                            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
                        read_into(self, path, offset, buffers)

                    patch.setattr(LocalStorage, "read_into", fail)
            manager.save(3, state(3, kept)).result()
            manager.wait_until_finished()
        for step in (4, 5):
            manager.save(step, state(step, kept)).result()
            manager.wait_until_finished()
        problems = manager.problems

    assert [len(problems), bad_steps(ram_path)] == {
        "truncated": [2, [2]],
        "deleted": [0, []],
        "unreadable": [1, []],
    }[how]
    assert how != "unreadable" or "cannot be read back" in problems[0]
    if how == "truncated":
        assert problems[1].endswith("/2/state, but for values that have changed since")
        assert np.array_equal(jaxckpt.restore(ram_path / "2", only="kept")["kept"]["b"], kept["b"])
    assert file.name not in {path.name for path in (ram_path / "4").rglob("d/*")}
    assert same(jaxckpt.restore(ram_path / "4"), state(4, kept))


def test_a_step_that_begins_before_the_files_are_read_is_whole(ram_path, monkeypatch):
    """It does not wait; what is read by then is shared."""
    kept, reads = on_device(), []
    with CheckpointManager(ram_path) as manager:
        go_on(manager, (1, 2), kept, ram_path)

        def begins(*args):
            reads.append(args)
            manager.save(4, state(4, kept)).result()
            return real(*args)

        real = unchanged.damaged_chunks

        with monkeypatch.context() as patch:
            patch.setattr(unchanged, "damaged_chunks", begins)
            patch.setattr(manager._saver.worker, "refuse_own_thread", lambda: None)
            manager.save(3, state(3, kept)).result()
            manager.wait_until_finished()
    links = [largest(ram_path / step).stat().st_nlink for step in ("1", "2", "3", "4")]

    assert len(reads) == 1
    assert links == [2, 1, 2, 1]
    assert same(jaxckpt.restore(ram_path / "4"), state(4, kept))


def test_a_run_whose_steps_share_one_file_is_gone_on_with(ram_path):
    """As releases wrote it that linked each step to the one before: the next steps are whole."""
    kept = on_device()
    with CheckpointManager(ram_path) as manager:
        go_on(manager, (1, 2), kept, ram_path)
        go_on(manager, (3,), kept, ram_path)
    shutil.rmtree(ram_path / "2")
    shutil.copytree(ram_path / "3", ram_path / "4", copy_function=os.link)  # 1, 3 and 4 share
    file = largest(ram_path / "4")
    assert file.stat().st_nlink == 3
    flip(file)

    with CheckpointManager(ram_path) as manager:
        for step in (5, 6, 7):
            manager.save(step, state(step, kept)).result()
            manager.wait_until_finished()

    assert file.stat().st_nlink == 3
    assert bad_steps(ram_path) == [1, 3, 4]
    assert all(same(jaxckpt.restore(ram_path / str(n)), state(n, kept)) for n in (5, 6, 7))


def read_files(seen):
    """What a watched storage calls: notes files of values that are read."""

    def before(verb, path):
        if verb in ("read", "read_into") and path.split("/")[-2] == names.OCDBT_DATA:
            seen(path)

    return before


def test_dense_training_reads_nothing(ram_path):
    """Only what has not changed for two steps is worth reading."""
    read = []
    with CheckpointManager(watched(ram_path, read_files(read.append))) as manager:
        for step in range(1, 26):
            manager.save(step, {"w": jnp.full(1 << 14, step, jnp.float32)}).result()
            manager.wait_until_finished()
        assert not manager.problems
    assert read == []


def test_arrays_that_stop_changing_are_shared(ram_path):
    """Equal ones from the next tenth step on: until then nothing compares them."""
    found = []
    with CheckpointManager(ram_path) as manager:
        for step in range(1, 30):
            value = {"w": np.full(1 << 14, min(step, 4), np.float32)}
            manager.save(step, value).result()
            manager.wait_until_finished()
            found.append({p.stat().st_ino for p in (ram_path / str(step)).rglob("d/*")})

    shared = [bool(a & b) for a, b in zip(found, found[2:], strict=False)]
    assert not any(shared[:17])
    assert all(shared[-6:])
    assert not any(a & b for a, b in pairwise(found))


@pytest.mark.multihost
def test_several_processes(ram_path, mesh):
    """Each reads and mends what it wrote itself."""
    kept, files = np.arange(512 * 64, dtype=np.float32).reshape(512, 64), []

    def state(step):
        sharding = NamedSharding(mesh, P("x", "y"))
        return {
            "kept": jax.device_put(kept, sharding),
            "w": jax.device_put(np.full((64, 64), step, np.float32), sharding),
        }

    def run(processes):
        found = []
        with CheckpointManager(ram_path) as manager:
            for step in range(1, 24):
                manager.save(step, state(step)).result()
                manager.wait_until_finished()
                processes.within(60).gather(f"checked {step}", None)
                if processes.index == 0:
                    found.append(bad_steps(ram_path))
                    if step in (2, 3):
                        large = sorted(
                            (ram_path / "1" / "state" / "d").iterdir(),
                            key=lambda path: path.stat().st_size,
                        )
                        first = large[-step]
                        flip(first)
                        files.append(first)
                processes.within(60).gather(f"flipped {step}", None)
            return found, manager.problems

    results = simulate(4, run)
    found = results[0][0]
    assert all(not {n, n - 1} <= {*bad} for n, bad in enumerate(found, 1))
    assert len(found[19]) == 10
    assert found[-1] == []
    assert sorted(len(problems) for _, problems in results) == [0, 0, 2, 2]
    for step in (1, 22, 23):
        assert np.array_equal(jaxckpt.restore(ram_path / str(step), as_numpy=True)["kept"], kept)


# --- two places --------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize("where", ["run", "local"])
def test_a_flip_with_a_local_tier(ram_path, where):
    """Of the two newest durable steps one is good, and at most nine more are bad."""
    kept, found = on_device(), []
    with CheckpointManager(ram_path / "run", local=ram_path / "local") as manager:
        for step in range(1, 26):
            handle = manager.save(step, state(step, kept))
            handle.durable()
            manager.wait_until_finished()
            found.append(bad_steps(ram_path / where))
            assert not {step, step - 1} <= {*found[-1]}
            if step == 4:
                flip(largest(ram_path / where / "3"))
        problems = manager.problems

    assert bad_steps(ram_path / "run") == []
    if where == "run":
        assert found[4] == [1, 3, 5]
        assert max(map(len, found)) == 10
        assert any("is damaged, so it was sent again" in one for one in problems)
        assert sum("is mended" in one for one in problems) == 10
    else:
        assert found[4] == [5]  # two are kept
        assert all(len(bad) <= 1 for bad in found)
    assert found[-1] == []
    for step in range(1, 26):  # a bad local file is not sent: the directory has that file
        assert same(jaxckpt.restore(ram_path / "run" / str(step)), state(step, kept))


def test_an_upload_links_no_neighbour(ram_path):
    """In whatever order the steps come, and whichever are left out."""
    kept = on_device()
    with CheckpointManager(ram_path / "run") as manager:
        go_on(manager, range(1, 10), kept, ram_path / "run")
    source, target = (locate_index(ram_path / name) for name in ("run", "copy"))
    trusted = {}
    for step in (4, 2, 1, 5, 9, 7, 8, 6, 3):
        read_upload(source, target, step, trusted)
    files = {
        n: {p.stat().st_ino for p in (ram_path / "copy" / str(n)).rglob("d/*")}
        for n in range(1, 10)
    }

    assert not any(files[n] & files[n + 1] for n in range(1, 9))
    assert any(files[a] & files[b] for a in files for b in files if a < b)
    assert bad_steps(ram_path / "copy") == []


def locate_index(root):
    from jaxckpt._run.index import StepIndex

    storage, path = locate(root)
    storage.make_dir(path)
    return StepIndex(storage, path)


def read_upload(source, target, step, trusted):
    from jaxckpt._run.upload import upload

    upload(source, target, step, trusted=trusted)


# --- a store -----------------------------------------------------------------------------------


def test_in_a_store_each_tenth_reference_is_read():
    """Damage to an object is found then, written again and mended; nothing else is read."""
    url, kept, reads = "memory://read-back", on_device({"a": np.arange(300_000.0)}), {}
    storage, root = locate(url)
    run = watched(url, read_files(lambda path: reads.setdefault(step, set()).add(path)))
    with CheckpointManager(run) as manager:
        for step in range(1, 24):
            manager.save(step, state(step, kept)).result()
            manager.wait_until_finished()
            if step == 5:
                files = storage.files(f"{root}/5/state")
                path = f"{root}/5/state/{max(files, key=lambda name: files[name].size)}"
                data = bytearray(storage.read(path, max_bytes=1 << 30))
                data[1_000_000] ^= 1
                storage.write(path, bytes(data))
        problems = manager.problems

    # At 11 the damaged one is compared with the one that was written again, and mended.
    assert {step: len(files) for step, files in reads.items()} == {10: 1, 11: 2, 20: 1}
    assert len(problems) == 2
    assert all(jaxckpt.verify(f"{url}/{n}").ok for n in range(1, 24))


def test_in_a_store_few_bytes_are_read_at_a_time(limits):
    """The other files are read after the next steps."""
    from jaxckpt.format import ocdbt

    limits(ocdbt, DATA_FILE_BYTES=2 << 20)
    limits(unchanged, MOST_BYTES=3 << 20)
    kept, reads = on_device({f"w{i}": np.arange(300_000.0) + i for i in range(5)}), {}
    before = read_files(lambda path: reads.setdefault(step, set()).add(path))
    with CheckpointManager(watched("memory://few-bytes", before)) as manager:
        for step in range(1, 15):
            manager.save(step, state(step, kept)).result()
            manager.wait_until_finished()

    assert {step: len(files) for step, files in reads.items()} == {10: 2, 11: 2, 12: 1}
