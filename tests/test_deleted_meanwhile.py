"""A checkpoint in a bucket that is deleted while it is read is not found, never damaged."""

from __future__ import annotations

import contextlib
import itertools
import os
import uuid

import numpy as np
import pytest

import jaxckpt
from jaxckpt._disk.found import record_at
from jaxckpt.errors import CheckpointNotFound
from jaxckpt.format import names
from jaxckpt.storage import locate
from tests.strategies import same
from tests.twins import watched

TREE = {"large": np.full(1 << 17, 1, np.float32), "small": np.arange(5)}


@pytest.fixture
def path():
    return saved()


def saved():
    path = f"memory://{uuid.uuid4()}/run/1"
    jaxckpt.save(path, TREE)
    return path


def deleted_at(path, verb, name, *, leaves=()):
    """The checkpoint, whose deletion happens just before a verb is applied to one of its files."""
    storage, where = locate(path)
    file = f"{where}/{name}".rstrip("/")

    def before(now, at):
        if (now, at) == (verb, file) and storage.kind(where) is not None:
            gone = [one for one in storage.files(where) if one not in leaves]
            storage.delete_files([f"{where}/{one}" for one in gone])

    return watched(path, before)


@pytest.mark.parametrize("read", [jaxckpt.restore, jaxckpt.verify])
@pytest.mark.parametrize("name", ["state/_METADATA", "state/manifest.ocdbt"])
@pytest.mark.parametrize("leaves", [(), (names.RECORD,)], ids=["nothing", "the record"])
def test_a_checkpoint_that_is_deleted_is_not_damaged(path, read, name, leaves):
    """Also while its record is left, which other files may precede."""
    with pytest.raises(CheckpointNotFound):
        read(deleted_at(path, "read", name, leaves=leaves))


LOOKS = {
    "restore": lambda path: same(jaxckpt.restore(path), TREE),
    "verify": lambda path: jaxckpt.verify(path).ok,
}


@pytest.mark.parametrize("is_missed", [False, True], ids=["", "a file was not found before"])
@pytest.mark.parametrize("read", LOOKS)
def test_a_checkpoint_may_go_at_any_look(read, is_missed):
    """It is whole, or not found; whatever was looked at before, and also if a look missed it."""
    outcomes = []
    for number in itertools.count():
        path = saved()
        (storage, where), looks = locate(path), []

        def before(verb, at, storage=storage, where=where, looks=looks, number=number):
            looks.append((verb, at))
            if len(looks) > number:
                storage.delete(where)
            record = ("read", f"{where}/{names.RECORD}")
            if is_missed and looks[-1] == record and looks.count(record) == 1:
                raise FileNotFoundError(2, "no such file", at)

        try:
            outcomes.append(LOOKS[read](watched(path, before)))
        except CheckpointNotFound:
            outcomes.append(None)
        if len(looks) <= number:
            break

    assert outcomes[0] is None
    assert outcomes[-1] is True
    assert set(outcomes) == {None, True}


def test_a_step_that_goes_at_the_beginning_of_a_fork_is_not_found(path):
    with pytest.raises(CheckpointNotFound):
        jaxckpt.fork(deleted_at(path, "read", names.RECORD), f"memory://{uuid.uuid4()}/other")


def test_a_save_that_ends_while_the_next_job_looks_for_it_does_not_stop_that_job(path):
    """It was trying out the bucket with a temporary file, which is all that it has there."""
    root = path.rpartition("/")[0]
    storage, where = locate(f"{root}/2")
    for number in itertools.count():
        storage.write(f"{where}/.jaxckpt-tmp-0123456789abcdef", b"1")
        looks = itertools.count()

        def before(verb, at, number=number, looks=looks):
            if (verb, at) == ("entries", where) and next(looks) == number:
                storage.delete(where)

        with jaxckpt.CheckpointManager(watched(root, before)) as manager:
            assert manager.all_steps() == [1]
        if next(looks) <= number:
            break
    assert number > 1


def run_in(root, *, last=1, **options):
    keep = jaxckpt.KeepPolicy(last=last, best=1, metric="loss")
    return jaxckpt.CheckpointManager(root, keep=keep, **options)


def save_next(manager, step, loss):
    manager.save(step, {"n": step}, metrics={"loss": loss})
    manager.wait_until_finished()


READS = {
    "restore": lambda root: run_in(root, mode="r").restore()["n"],
    "restore_items": lambda root: run_in(root, mode="r").restore_items()["state"]["n"],
    "latest_step": lambda root: run_in(root, mode="r").latest_step(),
    "all_steps": lambda root: run_in(root, mode="r").all_steps()[-1],
    "watch": lambda root: next(run_in(root, mode="r").watch(timeout_s=5)),
    "jaxckpt.restore": lambda root: jaxckpt.restore(root)["n"],
    "verify": lambda root: int(jaxckpt.verify(root).path.rpartition("/")[2]),
}
BEST = {
    "restore best": lambda root: run_in(root, mode="r").restore(step="best")["n"],
    "best_step": lambda root: run_in(root, mode="r").best_step(),
}


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["dir", "store"])
@pytest.mark.parametrize("name", [*READS, *BEST])
def test_no_older_or_worse_step_takes_the_place_of_one_that_is_deleted(tmp_path, kind, name):
    """At every look of a reader, the job may save a step and delete the newest, or the best."""
    losses = {1: 0.9, 2: 0.1, 3: 0.7} if name in BEST else {1: 0.1, 2: 0.5, 3: 0.6}
    step, loss, reads = (4, 0.05, BEST) if name in BEST else (4, 0.7, READS)
    for moment in itertools.count():
        root = tmp_path / f"{moment}" if kind == "dir" else f"memory://{uuid.uuid4()}/run"
        looks = itertools.count()
        with run_in(root, last=2 if name in BEST else 1) as job:
            for one in losses:
                save_next(job, one, losses[one])

            def before(verb, at, job=job, looks=looks, moment=moment):
                if next(looks) == moment:
                    save_next(job, step, loss)

            with contextlib.suppress(CheckpointNotFound):
                got = reads[name](watched(root, before))
                assert got in ((2, 4) if name in BEST else (3, 4)), moment
        if next(looks) <= moment:
            break
    assert moment > 3


def converted(src, path):
    jaxckpt.convert(src, path / "copy")
    return jaxckpt.restore(path / "copy")["n"]


def exported(src, path):
    jaxckpt.export_safetensors(src, path / "copy.safetensors")
    return int(jaxckpt.restore(path / "copy.safetensors")["n"])


@pytest.mark.parametrize("copied", [converted, exported])
@pytest.mark.parametrize("kind", ["dir", "store"])
def test_a_copy_of_a_run_begins_anew_when_its_step_is_deleted(tmp_path, kind, copied):
    """At every look, the job may save a step and delete the one that is copied."""
    for moment in itertools.count():
        here = tmp_path / f"{moment}"
        root = here / "run" if kind == "dir" else f"memory://{uuid.uuid4()}/run"
        looks = itertools.count()
        with run_in(root) as job:
            save_next(job, 1, 0.5)

            def before(verb, at, job=job, looks=looks, moment=moment):
                if next(looks) == moment:
                    save_next(job, 2, 0.1)

            assert copied(watched(root, before), here) in (1, 2), moment
        if next(looks) <= moment:
            break
    assert moment > 3


@pytest.mark.parametrize("copied", [converted, exported])
def test_a_copy_of_a_step_that_is_deleted_is_not_found(tmp_path, path, copied):
    """Whatever the run has then."""
    jaxckpt.save(path.replace("run/1", "run/2"), TREE)

    with pytest.raises(CheckpointNotFound):
        copied(deleted_at(path, "read", "state/manifest.ocdbt"), tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_job_restores_its_best_step_though_its_own_policy_deletes_the_last_best(tmp_path):
    """It ranked the steps before the save in the background ended."""
    due = []

    def before(verb, at):
        if due and verb == "entries" and at.endswith("/2"):
            save_next(job, due.pop(), 0.05)

    with run_in(watched(tmp_path, before), last=2) as job:
        for step, loss in {1: 0.9, 2: 0.1, 3: 0.7}.items():
            save_next(job, step, loss)
        due.append(4)

        assert job.restore(step="best")["n"] == 4
    assert not due


def test_a_restore_beside_saves_begins_no_new_history(tmp_path):
    """The job did not go back to the step that took the place of the newest."""
    due = []

    def before(verb, at):
        if due and verb == "entries" and at.endswith("/3"):
            save_next(job, due.pop(), 0.6)

    def life(step):
        return record_at(locate(tmp_path)[0], f"{tmp_path}/{step}").life

    with run_in(watched(tmp_path, before)) as job:
        for step, loss in {1: 0.9, 2: 0.8, 3: 0.7}.items():
            save_next(job, step, loss)
        due.append(4)
        got = job.restore(report=lambda _: save_next(job, 5, 0.5))
        life_of_5 = life(5)
        save_next(job, 6, 0.4)

        assert (got["n"], due) == (4, [])
        assert life(6) == life_of_5
