"""A read that fails once, or a root that is not there for a while, hides no step of a run."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import subprocess
import sys
import time
import uuid
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxckpt
from jaxckpt import CheckpointManager, KeepPolicy, LocalTier, SavePolicy
from jaxckpt._run.index import StepIndex
from jaxckpt._run.shares import steps_on_disk
from jaxckpt.cli._owned import owned
from jaxckpt.errors import CheckpointNotFound, CorruptCheckpoint, SaveFailed, StoreError
from jaxckpt.format import names
from jaxckpt.storage import LocalStorage, MemoryStorage, PathIn, locate
from jaxckpt.testing import WatchedStorage, simulate
from jaxckpt.types import StepInfo

READS = ("read", "read_into", "entries", "kind", "size")


def state(step, life="first"):
    return {"w": np.full(60_000, step, np.float32), "step": step, "life": life}


class OneFails:
    """Fails the n-th read; `what` says which that was."""

    def __init__(self, number):
        self.left, self.what = number, None

    def __call__(self, verb, path):
        if verb in READS:
            self.left -= 1
            if self.left == -1:
                self.what = verb, path
                raise OSError(errno.EIO, "Input/output error", path)


def opened(root, host, storage=None, *, every=4, mode="w"):
    """A manager whose steps are on the disk of a host; each fourth is in the directory too."""
    storage = storage or LocalStorage()
    here = PathIn(storage, str(root / host))
    tier = LocalTier(here, save=SavePolicy(every_steps=1), keep=KeepPolicy(last=2))
    run, save = PathIn(storage, str(root / "run")), SavePolicy(every_steps=every)
    return CheckpointManager(run, mode=mode, save=save, local=tier)


def train(manager, steps, life="first"):
    for step in steps:
        manager.save(step, state(step, life))
        manager.wait_until_finished()


def read(manager):
    got = manager.restore()
    return got["step"], got["life"]


def goes_on_elsewhere(root):
    """Host 1 has steps 6 and 7; the run went on from 4 on host 2, to 6."""
    with opened(root, "host1") as manager:
        train(manager, range(1, 8))
    with opened(root, "host2", every=1) as manager:
        manager.restore()
        train(manager, (5, 6), "second")
    return 6, "second"


def is_ahead(root):
    """Host 1 has steps 5 and 6, the directory 4."""
    with opened(root, "host1") as manager:
        train(manager, range(1, 7))
    return 6, "first"


# A reader uploads nothing, whose reads would come at any moment.
@pytest.mark.parametrize(("history", "mode"), [(goes_on_elsewhere, "w"), (is_ahead, "r")])
def test_one_failed_read_leads_to_no_other_step(ram_path, history, mode):
    """Whichever fails while a run is opened and restored: that is an error, or does not matter."""
    root, made = ram_path / "root", ram_path / "made"
    wanted = history(root)
    root.rename(made)
    for number in itertools.count():
        shutil.copytree(made, root)
        fails = OneFails(number)
        try:
            storage = WatchedStorage(LocalStorage(), fails)
            with opened(root, "host1", storage, mode=mode) as manager:
                found = read(manager)
        except OSError as error:
            found = wanted if error.errno == errno.EIO else error
        assert found == wanted, fails.what
        with opened(root, "host1", mode=mode) as manager:
            assert read(manager) == wanted, fails.what
        shutil.rmtree(root)
        if fails.what is None:
            break
    assert number > 20


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_a_directory_that_fails_once_as_it_is_opened_is_used_later(tmp_path, place):
    """The upload that is left goes there, and nothing stays locked."""
    root = str(tmp_path / "run") if place == "disk" else f"memory://{tmp_path.name}/run"
    inner = LocalStorage() if place == "disk" else MemoryStorage()
    left = [f"{root}/{names.OWNER}"]

    def fail_once(verb, path):
        if verb == "read" and path in left:
            left.remove(path)
            raise OSError(errno.EIO, "Input/output error", path)

    def manager_of(storage):
        tier = LocalTier(tmp_path / "local", save=SavePolicy(every_steps=1))
        return CheckpointManager(PathIn(storage, root), save=SavePolicy(every_steps=4), local=tier)

    with manager_of(inner) as manager:
        train(manager, range(4, 7))
    with manager_of(WatchedStorage(inner, fail_once)) as manager:
        assert not left
        manager.wait_until_finished()
        assert manager.tiers["durable"] == [4, 6]
    with CheckpointManager(PathIn(inner, root)) as manager:
        assert manager.problems == []
        assert manager.all_steps() == [4, 6]


@pytest.mark.parametrize("mode", ["r", "w"])
def test_the_best_step_is_not_passed_over_when_a_read_fails(tmp_path, mode):
    """Nor are its metrics said to be none."""
    keep = KeepPolicy(best=3, metric="loss")
    with CheckpointManager(tmp_path, keep=keep) as manager:
        for step, loss in ((1, 0.5), (2, 0.9), (3, 0.7)):
            manager.save(step, state(step), metrics={"loss": loss})
    record = f"{tmp_path}/1/{names.RECORD}"
    is_broken = [False]

    def fail(verb, path):
        if is_broken[0] and path == record:
            raise OSError(errno.EIO, "Input/output error", path)

    place = PathIn(WatchedStorage(LocalStorage(), fail), str(tmp_path))
    with CheckpointManager(place, keep=keep, mode=mode) as manager:
        is_broken[0] = True
        for call in (
            manager.best_step,
            lambda: manager.restore(step="best"),
            lambda: manager.metrics(1),
        ):
            with pytest.raises(OSError, match=r"1/_jaxckpt.json") as caught:
                call()
            assert not isinstance(caught.value, CorruptCheckpoint)
        is_broken[0] = False
        assert manager.best_step() == 1
        assert manager.restore(step="best")["step"] == 1
        assert manager.metrics(1) == {"loss": 0.5}


def test_a_damaged_record_has_no_metrics_to_tell(tmp_path):
    """It raises, as `custom_metadata` does; another step is the best."""
    keep = KeepPolicy(best=3, metric="loss")
    with CheckpointManager(tmp_path, keep=keep) as manager:
        for step, loss in ((1, 0.5), (2, 0.9)):
            manager.save(step, state(step), metrics={"loss": loss})
    (tmp_path / "1" / names.RECORD).write_bytes(b"{")

    with CheckpointManager(tmp_path, keep=keep, mode="r") as manager:
        with pytest.raises(CorruptCheckpoint):
            manager.metrics(1)
        assert manager.best_step() == 2


def test_the_metadata_of_a_step_that_is_deleted_at_that_moment(tmp_path):
    def delete(verb, path):
        if verb == "read" and path.endswith(f"/2/{names.RECORD}"):
            shutil.rmtree(tmp_path / "2", ignore_errors=True)

    with CheckpointManager(tmp_path, keep=KeepPolicy(last=5)) as manager:
        for step in (1, 2):
            manager.save(step, state(step), custom_metadata={"lr": step})
    place = PathIn(WatchedStorage(LocalStorage(), delete), str(tmp_path))
    with CheckpointManager(place, mode="r") as reader:
        assert reader.custom_metadata(1) == {"lr": 1}
        with pytest.raises(CheckpointNotFound, match="no such file or directory"):
            reader.custom_metadata(2)


def test_readers_see_a_step_after_setting_an_earlier_one_aside_failed():
    """In a store the failed step stays named in `doomed`, and is saved anew under its number."""
    is_broken = [False]

    def fail(verb, path):
        if is_broken[0] and verb.startswith("delete") and path.endswith("/2/_CHECKPOINT_METADATA"):
            is_broken[0] = False
            raise OSError(errno.EIO, "Input/output error", path)

    place = PathIn(WatchedStorage(MemoryStorage(), fail), f"/{uuid.uuid4()}")
    with CheckpointManager(place) as manager:
        train(manager, (1, 2))
        data = next(one for one in place.storage.files(f"{place.path}/2") if "/d/" in one)
        place.storage.write(f"{place.path}/2/{data}", bytes(1000))
        is_broken[0] = True
        assert read(manager) == (1, "first")
        assert not is_broken[0]
        train(manager, (2,), "second")

        with CheckpointManager(place, mode="r") as reader:
            assert read(reader) == (2, "second")
        manager.pin(2)


def unmount(root):
    """Leaves an empty directory where the run is, and returns what brings the run back."""
    root.rename(root.with_name("elsewhere"))
    root.mkdir()

    def mount():
        shutil.rmtree(root)
        root.with_name("elsewhere").rename(root)

    return mount


def test_nothing_is_saved_where_the_run_is_no_more(tmp_path):
    """Its file system is unmounted: steps there would be hidden once it is back."""
    root = tmp_path / "run"
    with CheckpointManager(root) as manager:
        manager.save(1, state(1)).result()
        mount = unmount(root)

        with pytest.raises(SaveFailed, match="is not the directory that this job opened"):
            manager.save(2, state(2)).result()
        assert [name for name in os.listdir(root) if name[0] not in "._"] == []
        mount()
        manager.save(3, state(3)).result()

    assert jaxckpt.restore(root)["step"] == 3
    assert sorted(name for name in os.listdir(root) if name.isdigit()) == ["1", "3"]


@pytest.mark.parametrize("leaves", ["an empty directory", "nothing"])
@pytest.mark.parametrize(
    "ask",
    [
        lambda manager: manager.restore_or(lambda: state(0)),
        lambda manager: manager.restore(),
        lambda manager: manager.latest_step(),
        lambda manager: manager.all_steps(),
    ],
    ids=["restore_or", "restore", "latest_step", "all_steps"],
)
def test_a_run_that_is_no_more_there_does_not_look_new(tmp_path, ask, leaves):
    """The job would begin anew, and its first steps push the older ones out once they are back."""
    root = tmp_path / "run"
    with CheckpointManager(root) as manager:
        manager.save(1, state(1)).result()
        mount = unmount(root)
        if leaves == "nothing":
            root.rmdir()

        with pytest.raises(StoreError, match="is not the directory that this job opened"):
            ask(manager)

        root.mkdir(exist_ok=True)
        mount()
        assert manager.restore_or(lambda: state(0))[1] == 1


def test_it_does_not_look_new_to_a_job_that_waits_for_another_either(tmp_path):
    """The lock is of the other."""
    root = tmp_path / "run"
    with CheckpointManager(root) as manager:
        manager.save(1, state(1)).result()
    lock = LocalStorage().hold(str(root / names.LOCK))
    assert lock is not None
    with CheckpointManager(root) as manager:
        assert manager.latest_step() == 1
        mount = unmount(root)
        for ask in (
            partial(manager.restore_or, lambda: state(0)),
            manager.latest_step,
            lambda: manager.save(2, state(2)).result(),
        ):
            with pytest.raises(StoreError, match="is not the directory that this job opened"):
                ask()
        assert [name for name in os.listdir(root) if name[0] not in "._"] == []
        mount()
    lock.release()


def test_it_looks_new_to_no_process_of_a_job(tmp_path):
    """The lock is of process 0; the other has not listed the run before."""
    root = tmp_path / "run"

    def run(processes):
        with CheckpointManager(root) as manager:
            manager.save(1, state(1)).result()
            processes.within(30).gather("saved", None)
            mount = unmount(root) if processes.index == 0 else None
            processes.within(30).gather("unmounted", None)
            for ask in manager.latest_step, manager.all_steps:
                with pytest.raises(StoreError, match="is not the directory that this job opened"):
                    ask()
            processes.within(30).gather("asked", None)
            if mount is not None:
                mount()
            processes.within(30).gather("mounted", None)
            return manager.latest_step()

    assert simulate(2, run) == [1, 1]


def test_a_step_is_deleted_everywhere_or_nowhere_while_the_directory_is_unmounted(tmp_path):
    """Otherwise it would be back with the directory, and newer than what was saved since."""
    with CheckpointManager(tmp_path / "run", local=LocalTier(tmp_path / "local")) as manager:
        train(manager, [1, 2])
        manager.wait_until_finished()
        mount = unmount(tmp_path / "run")
        with pytest.raises(StoreError, match="run is not the directory that this job opened"):
            manager.delete(2)
        assert manager.tiers == {"local": [1, 2], "durable": None, "waiting": []}
        mount()
        manager.delete(2)

        assert manager.tiers == {"local": [1], "durable": [1], "waiting": []}


def test_a_directory_that_was_away_at_the_start_does_not_look_new_either(tmp_path):
    """The job went on with its local steps, which are gone now."""
    with opened(tmp_path, "host") as manager:
        train(manager, [4, 5])
        manager.wait_until_finished()
    root, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    root.rename(elsewhere)
    root.write_bytes(b"")
    with opened(tmp_path, "host") as manager:
        assert manager.restore_or(lambda: state(0))[1] == 5
        for step in (4, 5):
            shutil.rmtree(tmp_path / "host" / str(step))
        for unmounted in (root.unlink, root.mkdir):
            for ask in (partial(manager.restore_or, lambda: state(0)), manager.latest_step):
                with pytest.raises(StoreError, match="run is not here: it has no steps"):
                    ask()
            unmounted()
        root.rmdir()
        elsewhere.rename(root)
        assert manager.restore_or(lambda: state(0))[1] == 4


def test_an_upload_waits_for_a_directory_that_is_unmounted(tmp_path):
    """And goes there once it is back."""
    root = tmp_path / "run"
    with CheckpointManager(root, local=LocalTier(tmp_path / "local")) as manager:
        train(manager, [1])
        mount = unmount(root)
        manager.save(2, state(2)).result()
        with pytest.raises(TimeoutError):
            manager.wait_until_finished(timeout_s=0.5)
        assert manager.tiers["waiting"] == [2]
        mount()
        manager.wait_until_finished()

        assert manager.tiers["durable"] == [1, 2]


# --- other calls ------------------------------------------------------------------------------


def failing_once(file, storage=None):
    """A storage whose next read of a file fails once."""
    left = [str(file)]

    def fail(verb, path):
        if verb == "read" and path in left:
            left.remove(path)
            raise OSError(errno.EIO, "Input/output error", path)

    return WatchedStorage(storage or LocalStorage(), fail)


def test_a_policy_by_time_deletes_nothing_after_a_step_that_it_cannot_read(tmp_path):
    """Which steps it keeps depends on the time of that one."""
    with CheckpointManager(tmp_path) as manager:
        for step in range(5):
            manager.save(step, state(step)).result()
    place = PathIn(failing_once(tmp_path / "2" / names.RECORD), str(tmp_path))

    with CheckpointManager(place, keep=KeepPolicy(last=1, every_seconds=100)) as manager:
        for step in (0, 1, 3, 4):  # a minute apart
            saved_s = time.time() - 1000 + 60 * step
            manager._index.remember(StepInfo(step=step, saved_s=saved_s))
        manager.save(9, state(9)).result()
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 2, 3, 4, 9]  # 4 would go if 2 were from today


@pytest.mark.parametrize(("by", "first"), [("manager", 3), ("hand", 3), ("hand", 4)])
def test_a_step_that_could_not_be_read_does_not_matter_once_it_is_gone(tmp_path, by, first):
    """The policy goes on to delete, and another step of its number may be the best."""
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step)).result()
    place = PathIn(failing_once(tmp_path / "3" / names.RECORD), str(tmp_path))
    keep = KeepPolicy(last=1, every_seconds=100, metric="loss")

    with CheckpointManager(place, keep=keep) as manager:
        with pytest.raises(OSError, match="Input/output error"):
            manager.best_step()
        manager.delete(3) if by == "manager" else shutil.rmtree(tmp_path / "3")
        for step in range(first, 6):
            manager.save(step, state(step), metrics={"loss": step}).result()
        manager.wait_until_finished()

        assert manager.all_steps() == [1, 5]
        assert manager.best_step() == 5


def test_the_ledger_of_earlier_starts_stays_if_it_cannot_be_read(tmp_path):
    """The line of this start is added once it can be."""
    for step in (1, 2):
        with CheckpointManager(tmp_path) as manager:
            manager.save(step, state(step))

    place = PathIn(failing_once(tmp_path / names.LEDGER), str(tmp_path))
    with CheckpointManager(place) as manager:
        manager.save(3, state(3))

    assert (tmp_path / names.LEDGER).read_text().count("\n") == 3


@pytest.mark.parametrize("call", ["latest_step", "best_step"])
def test_a_run_that_always_has_steps_has_a_newest_and_a_best(tmp_path, call):
    """Though a job deletes all that a reader has listed, between any two of its calls."""
    keep = KeepPolicy(last=1, best=1, metric="loss")
    made, root = tmp_path / "made", tmp_path / "run"
    with CheckpointManager(made, keep=keep) as manager:
        manager.save(3, state(3), metrics={"loss": 0.7}).result()
    for number in itertools.count():
        shutil.copytree(made, root)
        left = [number]

        def go_on(verb, path, left=left):
            left[0] -= 1
            if left[0] == -1:
                with CheckpointManager(root, keep=keep) as job:
                    job.save(4, state(4), metrics={"loss": 0.6}).result()
                    job.wait_until_finished()

        place = PathIn(WatchedStorage(LocalStorage(), go_on), str(root))
        with CheckpointManager(place, mode="r", keep=keep) as reader:
            assert getattr(reader, call)() in (3, 4), number
        shutil.rmtree(root)
        if left[0] >= 0:
            break
    assert number > 5


def test_a_command_that_fails_gives_the_run_back(tmp_path):
    """Here, where another command of the same process comes next."""
    storage, root = locate(f"memory://{tmp_path.name}/run")
    with CheckpointManager(PathIn(storage, root)) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    fails = failing_once(f"{root}/{names.OWNER}", storage)

    with pytest.raises(OSError, match="Input/output"), owned(fails, root):
        pass
    with owned(storage, root) as run:
        assert run.delete([1], asked_for=True) == [1]


def test_du_is_silent_about_nothing_that_it_cannot_read(tmp_path):
    """A sum that lacks a part would look whole."""
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, state(1))
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    script = """
import os, sys
from jaxckpt.cli import main
main(["du", sys.argv[1]])  # imports what it needs
os.chmod(f"{sys.argv[1]}/1/state/d", 0)
if os.geteuid() == 0:
    os.seteuid(65534)
sys.exit(main(["du", sys.argv[1]]))
"""
    command = [sys.executable, "-c", script, tmp_path / "run"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    (tmp_path / "run" / "1" / "state" / "d").chmod(0o755)
    assert (done.returncode, "Permission denied" in done.stderr) == (2, True)


def test_a_marked_step_never_counts_as_one_without_a_mark(tmp_path):
    """The newest step is damaged, and replicas differed when the one before it was saved."""
    devices = jax.devices()[:2]
    everywhere = NamedSharding(Mesh(np.array(devices), "d"), PartitionSpec())

    def replicated(step, error):
        parts = [np.full(5000, step + error * (n == 0), np.float32) for n in range(2)]
        placed = [jax.device_put(part, one) for part, one in zip(parts, devices, strict=True)]
        return jax.make_array_from_single_device_arrays((5000,), everywhere, placed)

    save = SavePolicy(check_replicas=1)
    with CheckpointManager(tmp_path, save=save, incremental=False) as manager:
        for step, error in ((1, 0), (2, 1), (3, 0)):
            manager.save(step, {"w": replicated(step, error), "step": step}).result()
    (data,) = tmp_path.glob("3/state/d/*")
    data.write_bytes(data.read_bytes()[:-4] + b"oops")
    for number in itertools.count():
        fails = OneFails(number)
        with contextlib.suppress(OSError):
            place = PathIn(WatchedStorage(LocalStorage(), fails), str(tmp_path))
            assert jaxckpt.restore(place)["step"] == 1, fails.what
        if fails.what is None:
            break
    assert number > 10


def test_a_job_goes_on_where_only_its_own_files_were_deleted(tmp_path):
    """The steps show that this is the run."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1)).result()
        for file in (names.OWNER, names.LOCK):
            (tmp_path / file).unlink()
        manager.save(2, state(2)).result()
        assert manager.all_steps() == [1, 2]


def test_a_step_that_cannot_be_read_once_is_on_the_disk(tmp_path):
    """Else a job of several hosts would upload an older one."""
    local = tmp_path / "local"
    with CheckpointManager(tmp_path / "run", local=local) as manager:
        manager.save(1, state(1))
    index = StepIndex(failing_once(local / "1" / names.RECORD), str(local))

    assert [step for step, *_ in steps_on_disk(index)] == [1]
