"""A crash at any instant of a save, a replacement or a deletion leaves all or nothing."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import posixpath
import shutil
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import jaxckpt
from jaxckpt import CheckpointNotFound, SaveFailed, StepExists
from jaxckpt._disk import transaction as _transaction
from jaxckpt._disk.by_marker import Claim
from jaxckpt._disk.commit import commit_of
from jaxckpt._disk.find import find
from jaxckpt._save.job import SaveJob
from jaxckpt._save.save import prepare
from jaxckpt.errors import StoreError
from jaxckpt.format import names
from jaxckpt.format.step import Record
from jaxckpt.storage import LocalStorage, MemoryStorage, _locks, locate
from jaxckpt.storage._locks import LeasedLock, steady_s
from jaxckpt.testing import CrashingStorage, FailingStorage, SimulatedCrash, WatchedStorage
from jaxckpt.testing._storage import MUTATING_VERBS

# Beside the checkpoint `a` and nobody's to remove: one is what Orbax calls a save under way.
FOREIGN = {"a.orbax-checkpoint-tmp/f", "a-notes/f", "ab.orbax-checkpoint-tmp-jaxckpt-0/f", "b"}


class Intercepted:
    """A storage that calls `before(verb)` before each change, and may know no exchange."""

    scheme = "file"
    server_copies = parallel_writes = False

    def __init__(self, inner, *, before=lambda verb: None, exchanges=True):
        self.atomic_rename, self.hard_links = inner.atomic_rename, inner.hard_links
        self.reads_at_once = inner.reads_at_once
        self._inner, self._before, self._exchanges = inner, before, exchanges

    def __getattr__(self, verb):
        def call(*args, **kwargs):
            if verb in MUTATING_VERBS or kwargs.get("new"):
                self._before(verb)
            return getattr(self._inner, verb)(*args, **kwargs)

        return call

    def exchange(self, a, b):
        return self._exchanges and self._inner.exchange(a, b)


class World:
    """One directory of a storage with the checkpoint `a` in it, and foreign things."""

    def __init__(self, storage, folder, item="state"):
        self.storage, self.folder, self.path = storage, folder, f"{folder}/a"
        self.item = item
        for foreign in FOREIGN:
            storage.make_dir(os.path.dirname(f"{folder}/{foreign}"))
            storage.write(f"{folder}/{foreign}", b"foreign")

    def job(self, storage, seed, *, overwrite=False):
        request = prepare(self.path, tree(seed), overwrite, None, copy=False, item=self.item)
        return SaveJob(replace(request, storage=storage))

    def save(self, storage, seed, *, overwrite=False):
        self.job(storage, seed, overwrite=overwrite).run()

    def seed(self):
        """Returns the number of the tree that is there, with every bit checked; None if none is."""
        try:
            found = jaxckpt.restore(self.path)
        except CheckpointNotFound:
            return None
        assert is_tree(found, found["seed"])
        assert jaxckpt.verify(self.path).ok
        return found["seed"]

    def check_next_save(self):
        """The next save needs no help, and leaves what is foreign and nothing else."""
        if not self.storage.atomic_rename and self.seed() is not None:
            commit_of(self.storage, self.path).remove()
        self.save(self.storage, 9, overwrite=self.storage.atomic_rename)
        assert self.seed() == 9
        assert self.storage.kind(f"{self.path}/{names.WRITER}") is None
        wanted = {foreign.partition("/")[0] for foreign in FOREIGN} | {"a"}
        assert set(self.storage.entries(self.folder)) == wanted
        for foreign in FOREIGN:
            assert self.storage.read(f"{self.folder}/{foreign}", max_bytes=100) == b"foreign"


def tree(seed):
    """A leaf of every way to be stored."""
    large = np.random.default_rng(seed).standard_normal(70_000, np.float32)
    return {"large": large, "small": large[:10].copy(), "text": f"seed {seed}", "seed": seed}


def is_tree(found, seed):
    wanted = tree(seed)
    return found.keys() == wanted.keys() and all(
        np.asarray(found[k]).tobytes() == np.asarray(wanted[k]).tobytes() for k in wanted
    )


DISKS = ["exchange", "no exchange", "flat"]


@pytest.fixture(params=[*DISKS, "memory", "memory, flat", "mounted bucket"])
def new_world(request, ram_path):
    """Makes worlds: on a file system with and without RENAME_EXCHANGE, and in stores.

    In some, the checkpoint itself is the item.
    """
    return maker(request.param, ram_path)


@pytest.fixture(params=DISKS)
def new_disk(request, ram_path):
    """`new_world`, where checkpoints can be replaced."""
    return maker(request.param, ram_path)


def maker(kind, ram_path):
    count = itertools.count()

    def make():
        item = None if "flat" in kind else "state"
        if "memory" in kind:
            return World(MemoryStorage(), f"memory://{uuid.uuid4()}", item)
        local = LocalStorage(atomic_rename=kind != "mounted bucket")
        storage = Intercepted(local, exchanges=kind == "exchange")
        return World(storage, f"{ram_path}/{next(count)}", item)

    return make


def crashes(new_world, before, act, *, torn=False):
    """Yields the worlds in which `act` died after 0, 1, 2, ... changes; the last one lived."""
    for after in itertools.count():
        world = new_world()
        before(world)
        try:
            act(world, CrashingStorage(world.storage, after, torn=torn))
        except SimulatedCrash:
            yield world
        else:
            assert after >= 2
            yield world
            return


def nothing(world):
    pass


def save_1(world, storage=None):
    world.save(storage or world.storage, 1)


def replace_with_2(world, storage):
    world.save(storage, 2, overwrite=True)


def remove(world, storage):
    commit_of(storage, world.path).remove()


@pytest.mark.faults
@pytest.mark.parametrize("torn", [False, True])
def test_a_crash_of_a_save_leaves_all_or_nothing(new_world, torn):
    """The checkpoint is not there until it is whole."""
    seen = []
    for world in crashes(new_world, nothing, save_1, torn=torn):
        seen.append(world.seed())
        world.check_next_save()

    assert seen == sorted(seen, key=lambda seed: seed is not None)
    assert set(seen) == {None, 1}


def test_ctrl_c_leaves_nothing_behind(new_disk):
    """At whatever verb it comes, the temporary directory is gone and the checkpoint is whole."""
    for at in itertools.count():
        world, count = new_disk(), itertools.count()

        def interrupt(verb, at=at, count=count):
            if next(count) == at:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            world.save(Intercepted(world.storage, before=interrupt), 1)
        left = [e for e in LocalStorage().entries(world.folder) if names.is_ours_temporary(e, "a")]
        assert (left, world.seed()) in (([], None), ([], 1)), at
        if next(count) <= at:
            return


@pytest.mark.faults
@pytest.mark.parametrize("torn", [False, True])
def test_a_crash_of_a_replacement_leaves_the_old_or_the_new(new_disk, torn):
    """At no instant is there none."""
    seen = []
    for world in crashes(new_disk, save_1, replace_with_2, torn=torn):
        seen.append(world.seed())
        world.check_next_save()

    assert seen == sorted(seen)
    assert set(seen) == {1, 2}


@pytest.mark.faults
@pytest.mark.parametrize("torn", [False, True])
def test_a_crash_of_a_deletion_leaves_all_or_nothing(new_world, torn):
    """A checkpoint with holes is never found, and its name is free at once."""
    seen = []
    for world in crashes(new_world, save_1, remove, torn=torn):
        seen.append(world.seed())
        if seen[-1] is None:
            save_1(world)
        world.check_next_save()

    assert set(seen) == {1, None}


@pytest.mark.faults
@pytest.mark.parametrize("torn", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("before", "act"), [(nothing, save_1), (save_1, replace_with_2), (save_1, remove)]
)
def test_a_crash_of_recovery_is_recovered_from(ram_path, new_disk, before, act, torn):
    """Wherever a recovery dies, a tree is there as before, and the next one ends the job."""
    count = itertools.count()
    for world in crashes(new_disk, before, act):
        seed = world.seed()
        for after in itertools.count():
            copy = shutil.copytree(world.folder, ram_path / f"copy{next(count)}")
            again = World(world.storage, str(copy))
            storage = CrashingStorage(world.storage, after, torn=torn)
            died = False
            try:
                commit_of(storage, again.path).recover()
            except SimulatedCrash:
                died = True
            # Recovery may finish a replacement whose new tree was whole already.
            assert again.seed() == seed or (seed, again.seed()) == (1, 2)
            again.check_next_save()
            if not died:
                break


@pytest.mark.faults
@pytest.mark.parametrize("once", [True, False])
def test_an_error_at_any_verb_is_raised_and_leaves_all_or_nothing(new_disk, once):
    """Each disk error ends a replacement with SaveFailed, or was about rubbish."""
    for at in itertools.count():
        world = new_disk()
        save_1(world)
        storage = FailingStorage(world.storage, at, OSError(5, "Input/output error"), once=once)
        try:
            replace_with_2(world, storage)
        except SaveFailed:
            assert world.seed() in (1, 2)
        else:
            assert world.seed() == 2
        world.check_next_save()
        if not storage.failed:
            break
    assert at > 10


def test_a_living_writer_is_left_alone(new_disk, caplog):
    """Recovery does not touch a write in progress; the second writer to commit gets an error."""
    world = new_disk()
    first = _transaction.begin(world.storage, world.path, overwrite=False)

    world.save(world.storage, 2)
    with pytest.raises(StepExists, match="was created during the save"):
        first.commit({}, Record(), known={})
    first.abort()

    assert "another writer is saving there" in caplog.text
    world.check_next_save()


class Stalling:
    """A storage that calls `meanwhile()` once, before the call of number `at`.

    If `lapses`, its locks are over by then, as leases are.
    """

    def __init__(self, inner, at, meanwhile, *, lapses):
        self.atomic_rename, self.scheme = inner.atomic_rename, inner.scheme
        self.hard_links, self.server_copies = inner.hard_links, inner.server_copies
        self.reads_at_once, self.parallel_writes = inner.reads_at_once, False
        self.done = False
        self._inner, self._at, self._meanwhile, self._lapses = inner, at, meanwhile, lapses
        self._count, self._holds = itertools.count(), []

    def __getattr__(self, verb):
        def call(*args, **kwargs):
            if next(self._count) == self._at:
                self.done = True
                for hold in self._holds if self._lapses else ():
                    hold.release()
                self._meanwhile()
            return getattr(self._inner, verb)(*args, **kwargs)

        return call

    def hold(self, path, data=None, *, new=False):
        return self._kept(self.__getattr__("hold")(path, data, new=new))

    def _kept(self, hold):
        self._holds += [] if hold is None else [hold]
        return hold


# A lock that lapses between two calls of a deletion is not among them: RELIABILITY.md says so.
@pytest.mark.faults
@pytest.mark.parametrize(("leftover", "lapses"), [(False, False), (False, True), (True, False)])
def test_of_two_writers_where_nothing_can_be_renamed_one_wins(leftover, lapses):
    """One stalls at any call, and the other one saves meanwhile: who is told of success has it."""
    told = set()
    for at in itertools.count():
        world, acknowledged = World(MemoryStorage(), f"memory://{uuid.uuid4()}"), []
        if leftover:
            with contextlib.suppress(SimulatedCrash):
                world.save(CrashingStorage(world.storage, 12), 3)

        def save(storage, seed, world=world, acknowledged=acknowledged):
            job = world.job(storage, seed)
            job.queue()
            job._before = []  # as in another process, which does not wait for it
            with contextlib.suppress(jaxckpt.CheckpointError):
                job.run()
                acknowledged.append(seed)

        storage = Stalling(world.storage, at, lambda: save(world.storage, 2), lapses=lapses)  # noqa: B023
        save(storage, 1)

        assert len(acknowledged) <= 1, (at, acknowledged)
        assert world.seed() in (acknowledged or [None]), (at, acknowledged)
        told.update(acknowledged)
        world.check_next_save()
        if not storage.done:
            break
    assert at > 12
    assert told == {1, 2}


@pytest.mark.parametrize("removes", ["what it wrote", "what another left"])
def test_a_save_that_stalls_removes_no_save_of_another(removes):
    """It stalls at any call, and its lease lapses; metadata files, which all name alike, are not
    among what it removes: RELIABILITY.md says so.
    """

    def fail(verb, path):
        if removes == "what it wrote" and verb == "write" and names.is_data_file(path):
            raise OSError(errno.EIO, "refused", path)

    for at in itertools.count():
        world, acknowledged = World(MemoryStorage(), f"memory://{uuid.uuid4()}"), []
        if removes == "what another left":
            with contextlib.suppress(SimulatedCrash):
                world.save(CrashingStorage(world.storage, 4), 3)

        def save(storage, seed, world=world, acknowledged=acknowledged):
            job = world.job(storage, seed)
            job.queue()
            job._before = []  # as in another process, which does not wait for it
            with contextlib.suppress(jaxckpt.CheckpointError):
                job.run()
                acknowledged.append(seed)

        meanwhile = partial(save, world.storage, 2)
        storage = Stalling(WatchedStorage(world.storage, fail), at, meanwhile, lapses=True)
        storage.parallel_writes = True  # as in a store: there are no directories to remove
        save(storage, 1)

        assert len(acknowledged) <= 1, (at, acknowledged)
        assert world.seed() in (acknowledged or [None]), (at, acknowledged)
        if not storage.done:
            break
    assert at > 12


def test_files_of_an_attempt_that_lost_the_directory_are_no_part_of_a_checkpoint():
    """A process of it writes one late, and process 0, which has not begun yet, removes it."""
    world, token = World(MemoryStorage(), f"memory://{uuid.uuid4()}"), "0123456789abcdef"
    late = f"{world.path}/state/{names.new_data_file(token)}"

    def write_late(verb, path):
        if path == f"{world.path}/{names.CHECKPOINT_METADATA}":
            world.storage.write(late, b"late")

    world.save(WatchedStorage(world.storage, write_late), 2)
    assert world.storage.kind(late) == "file"
    assert world.seed() == 2
    commit_of(world.storage, world.path).abort(token, published=False)

    assert world.storage.kind(late) is None
    assert world.seed() == 2


def test_an_abort_frees_the_lock_and_the_name(new_world):
    """After a failed save the same process saves again, with nothing left beside."""
    world = new_world()
    _transaction.begin(world.storage, world.path, overwrite=False).abort()

    assert world.seed() is None
    world.check_next_save()


def test_what_an_abort_could_not_remove_goes_with_the_next_save_beside_it(tmp_path):
    class Stuck(LocalStorage):
        is_well = False

        def delete(self, path):
            if not self.is_well:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            super().delete(path)

    storage = Stuck()
    _transaction.begin(storage, f"{tmp_path}/1", overwrite=False).abort()
    assert len([*tmp_path.iterdir()]) == 1
    storage.is_well = True

    _transaction.begin(storage, f"{tmp_path}/2", overwrite=False).abort()

    assert [*tmp_path.iterdir()] == []


@pytest.fixture(params=["memory", "mounted bucket"])
def left(request, ram_path):
    """A world, its storage, and the file that an attempt of the first token could not remove."""
    world, stuck = maker(request.param, ram_path)(), [True]

    def before(verb, path):
        if stuck and verb in ("delete", "delete_files"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    def leave(name):
        file = f"{world.path}/state/{name}"
        storage.make_dir(posixpath.dirname(file))
        attempt = _transaction.begin(storage, world.path, overwrite=False, token="1" * 16)
        storage.write(file, b"1")
        attempt.abort()
        stuck.clear()
        assert storage.kind(file) == "file"
        return world, storage, file

    storage = WatchedStorage(world.storage, before)
    return leave


def test_what_the_processes_of_the_next_try_have_written_stays(left):
    """Process 0 begins after them. It removes what it could not remove of the try before."""
    world, storage, file = left(names.new_data_file("1" * 16))
    theirs = f"{world.path}/state/{names.new_data_file('2' * 16)}"
    storage.write(theirs, b"2")

    _transaction.begin(storage, world.path, overwrite=False, token="2" * 16).hold.release()

    assert [storage.kind(one) for one in (file, theirs)] == [None, "file"]


def test_nothing_stays_of_a_failed_save_once_another_begins_beside_it(left):
    """Whatever its files are called: no attempt is under way there."""
    world, storage, _ = left(names.new_data_file())

    _transaction.begin(storage, f"{world.folder}/c", overwrite=False, token="2" * 16).abort()

    assert not [one for one in storage.files(world.folder) if one.startswith("a/")]


@pytest.mark.parametrize("has_begun", [False, True])
def test_what_another_job_has_written_there_since_stays(left, has_begun):
    """Its process 0 may come after its other processes."""
    world, storage, file = left(names.new_data_file("1" * 16))
    theirs = f"{world.path}/state/{names.new_data_file('3' * 16)}"
    storage.write(theirs, b"3")
    if has_begun:
        storage.write(f"{world.path}/{names.WRITER}", b"3" * 16)

    _transaction.begin(storage, f"{world.folder}/c", overwrite=False, token="2" * 16).abort()

    assert [storage.kind(one) for one in (file, theirs)] == [None, "file"]


def test_a_failed_save_whose_lock_is_still_held_is_removed_later(left):
    """A store may not have heard that it was released."""
    world, storage, file = left(names.new_data_file())
    hold = storage.hold(f"{world.path}/{names.WRITER}", b"1" * 16)

    _transaction.begin(storage, f"{world.folder}/c", overwrite=False, token="2" * 16).abort()
    assert storage.kind(file) == "file"
    hold.release()
    _transaction.begin(storage, f"{world.folder}/c", overwrite=False, token="3" * 16).abort()

    assert storage.kind(file) is None


def test_a_directory_that_is_filled_while_a_step_replaces_it_stays(tmp_path):
    """It was empty when the save listed what is around it."""

    class Filling(LocalStorage):
        def delete_empty(self, path):
            self.write(f"{path}/theirs", b"1")
            return super().delete_empty(path)

    (tmp_path / "5").mkdir()

    with pytest.raises(StepExists, match="theirs"):
        _transaction.begin(Filling(), f"{tmp_path}/5", overwrite=False, fence=lambda: None)

    assert [path.name for path in tmp_path.rglob("*")] == ["5", "theirs"]


def test_what_is_not_ours_is_not_replaced(new_world):
    """A directory without our files is StepExists, with and without overwrite, and stays."""
    world = new_world()
    world.storage.make_dir(world.path)
    world.storage.write(f"{world.path}/mine", b"1")

    for overwrite in (False, True):
        with pytest.raises(StepExists, match="mine"):
            world.save(world.storage, 1, overwrite=overwrite)
        with pytest.raises(StepExists, match="mine"):
            _transaction.begin(world.storage, world.path, overwrite=overwrite)

    assert world.storage.read(f"{world.path}/mine", max_bytes=9) == b"1"


@pytest.mark.parametrize("how", ["removed", "moved"])
def test_a_writer_whose_directory_is_taken_away_commits_nothing(new_disk, how):
    """It fails with SaveFailed at whatever verb it was."""
    verbs = []
    for at in itertools.count():
        world, seen = new_disk(), []

        def interfere(verb, world=world, seen=seen, at=at):
            seen.append(verb)
            if len(seen) == at + 1:
                for entry in LocalStorage().entries(world.folder):
                    if names.is_ours_temporary(entry, "a"):
                        work = f"{world.folder}/{entry}"
                        shutil.move(work, f"{world.folder}-moved")
                        if how == "removed":
                            shutil.rmtree(f"{world.folder}-moved")

        try:
            world.save(Intercepted(world.storage, before=interfere), 1)
        except SaveFailed:
            assert world.seed() is None
            verbs.append(seen[at])
        else:
            assert world.seed() == 1
        world.check_next_save()
        if len(seen) <= at:
            break

    assert {"make_dir", "write", "sync", "create", "rename"} <= set(verbs)


def test_of_two_saves_at_once_one_wins_whole(new_world):
    """The other save raises an error."""
    for _ in range(5):
        world = new_world()

        (winner,) = winners(world, overwrite=False)

        assert world.seed() == winner
        world.check_next_save()


def test_two_replacements_at_once_leave_one_of_them_whole(new_disk):
    """One after the other may win; who raises did not."""
    for _ in range(5):
        world = new_disk()
        save_1(world)

        won = winners(world, overwrite=True)

        assert world.seed() in won
        world.check_next_save()


def winners(world, *, overwrite):
    """Saves trees 2 and 3 at the same moment; returns which of them were said to be saved."""
    start = threading.Barrier(2)

    def save(seed):
        job = world.job(world.storage, seed, overwrite=overwrite)
        start.wait()
        try:
            job.run()
        except (StepExists, SaveFailed):
            return None
        return seed

    with ThreadPoolExecutor(2) as pool:
        return [seed for seed in pool.map(save, [2, 3]) if seed is not None]


@pytest.mark.parametrize(
    ("writer", "is_whole", "stays"),
    [
        (None, True, True),
        ("committed", True, True),  # while the next job removes the file
        (None, False, False),
        ("of another writer", True, False),  # which may be deleting the files
    ],
)
def test_a_writer_that_wakes_up_keeps_a_commit_that_the_next_job_has_found(writer, is_whole, stays):
    """In a bucket, after it has written the marker and before it looks whether it may."""
    path = f"memory://{uuid.uuid4()}/a"
    jaxckpt.save(path, {"w": 1})
    storage, where = locate(path)
    token = find(storage, where).record.token
    if writer is not None:
        storage.write(f"{where}/{names.WRITER}", writer.format(token=token).encode())
    if not is_whole:
        storage.delete_files([f"{where}/{names.RECORD}"])
    storage.delete_files([f"{where}/{names.COMMIT_MARKER}"])

    with contextlib.nullcontext() if stays else pytest.raises(SaveFailed, match="took over"):
        commit_of(storage, where).publish(token, overwrite=False)

    assert (storage.kind(f"{where}/{names.COMMIT_MARKER}") is not None) == stays


@pytest.mark.parametrize("left", [names.RECORD, names.WRITER])
def test_a_writer_that_wakes_up_waits_for_what_the_next_job_decides(left):
    """It has the directory, and has found the marker, or else deletes the record at last."""
    path = f"memory://{uuid.uuid4()}/a"
    jaxckpt.save(path, {"w": 1})
    storage, where = locate(path)
    token = find(storage, where).record.token
    storage.write(f"{where}/{names.WRITER}", b"taken by 123")
    storage.delete_files([f"{where}/{names.COMMIT_MARKER}"])
    looks = itertools.count()

    def decide(verb, path):
        if verb == "read" and path == f"{where}/{names.WRITER}" and next(looks) == 3:
            gone = {names.RECORD, names.WRITER} - {left}
            storage.delete_files([f"{where}/{file}" for file in gone])

    stays = left == names.RECORD
    commit = commit_of(WatchedStorage(storage, decide), where)
    with contextlib.nullcontext() if stays else pytest.raises(SaveFailed, match="took over"):
        commit.publish(token, overwrite=False)

    assert (storage.kind(f"{where}/{names.COMMIT_MARKER}") is not None) == stays


def test_a_claim_that_cannot_end_is_no_longer_renewed():
    """The store is away when a deletion ends: else nobody could save there while this job runs."""

    def write(*_: object, **__: object) -> None:
        raise StoreError("no answer")

    class Away(MemoryStorage):
        parallel_writes = True

        def hold(self, path, data=None, *, new=False):
            asked_s = steady_s() - 50  # so it has to be renewed before the file is deleted
            return LeasedLock(path, 60, {"e_tag": "1"}, write, asked_s=asked_s).start()

    path = f"/{uuid.uuid4()}"
    with Claim(Away(), path) as claim:
        claim.take()

    assert path not in {posixpath.dirname(lease.path) for lease in _locks._leases}
