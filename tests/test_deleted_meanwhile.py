"""A checkpoint in a bucket that is deleted while it is read is not found, never damaged."""

from __future__ import annotations

import contextlib
import itertools
import uuid

import numpy as np
import pytest

import jaxckpt
from jaxckpt.errors import CheckpointNotFound
from jaxckpt.format import names
from jaxckpt.storage import locate
from tests.twins import watched

TREE = {"large": np.full(1 << 17, 1, np.float32), "small": np.arange(5)}


@pytest.fixture
def path():
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


@pytest.mark.parametrize("read", [jaxckpt.restore, jaxckpt.verify])
def test_a_checkpoint_may_go_at_any_look(path, read):
    """Here between two looks at its directory, after a file of it was not found."""
    storage, where = locate(path)
    looks = []

    def before(verb, at):
        looks.append((verb, at))
        if (verb, at) == ("read", f"{where}/{names.RECORD}") and looks.count(looks[-1]) == 1:
            raise FileNotFoundError(2, "no such file", at)
        if (verb, at) == ("entries", where) and looks[-2:-1] == [("kind", where)]:
            storage.delete(where)

    with contextlib.suppress(CheckpointNotFound):  # it may have been read again before
        read(watched(path, before))


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
