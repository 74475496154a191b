"""A writer in a bucket may lose its lock between any two requests, if it stood still: a lease ends.

Another writer may have what it was working on from then on. Here, none has.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import uuid

import numpy as np
import pytest

import jaxckpt
from jaxckpt import CheckpointManager, KeepPolicy, SaveFailed
from jaxckpt.errors import StoreError
from jaxckpt.format import names
from jaxckpt.storage import MemoryStorage, PathIn, _memory
from jaxckpt.testing import WatchedStorage
from tests.twins import LosingStorage


def tree(step):
    return {"w": np.full(3000, step, np.float32), "n": step}


def work(root):
    """Saves and deletes steps of a run; returns the ones that have to be there."""
    there = set()

    def save(manager, *steps):
        for step in steps:
            with contextlib.suppress(SaveFailed):
                manager.save(step, tree(step)).result()
                there.add(step)

    with CheckpointManager(root, keep=KeepPolicy(last=2)) as manager:
        save(manager, 10, 20, 30)
    there = {*sorted(there)[-2:]}
    with CheckpointManager(root) as manager:
        manager.restore()
        save(manager, 40)
        doomed = min(there)
        there.discard(doomed)
        with contextlib.suppress(ValueError):
            manager.delete(doomed)
        save(manager, 50)
    return there


@pytest.mark.faults
def test_no_order_of_lost_locks_loses_a_step():
    """Every acknowledged step is whole, and the next job saves there."""
    for n in itertools.count(1):
        storage, path = LosingStorage("", n), f"/{uuid.uuid4()}"

        there = work(PathIn(storage, path))

        with CheckpointManager(PathIn(MemoryStorage(), path)) as manager:
            assert there <= {*manager.all_steps()}, n
            for step in manager.all_steps():
                found = manager.restore(tree(0), step=step)
                assert (found["n"], found["w"].min(), found["w"].max()) == (step, step, step), n
            manager.restore_or(lambda: tree(0))
            manager.save(70, tree(70)).result()
            assert jaxckpt.verify(PathIn(MemoryStorage(), f"{path}/70")).ok
        if storage.left > 0:
            break
    assert n > 30


def test_a_commit_that_the_store_makes_late_is_whole():
    """The writer has given up by then, and says that it may be committed."""
    root, late = f"memory://{uuid.uuid4()}/run", []

    def before(verb, path):
        if verb == "create" and path == f"{root}/2/{names.COMMIT_MARKER}" and not late:
            late.append(path)
            raise StoreError(f"{path}: no answer", code=errno.EIO)

    with CheckpointManager(PathIn(WatchedStorage(MemoryStorage(), before), root)) as manager:
        manager.save(1, tree(1)).result()
        with pytest.raises(SaveFailed, match="may be committed"):
            manager.save(2, tree(2)).result()
    MemoryStorage().create(late[0], b"")

    with CheckpointManager(root) as manager:
        assert manager.all_steps() == [1, 2]
        assert manager.restore(step=2)["n"] == 2


@pytest.mark.parametrize("n", range(1, 6))
def test_a_damaged_step_is_somewhere_if_the_lock_is_lost_while_it_is_set_aside(n):
    """It is copied, and then deleted by several requests."""
    storage, root = LosingStorage(f"/20/{names.WRITER}", 0), f"/{uuid.uuid4()}"
    with CheckpointManager(PathIn(storage, root)) as manager:
        for step in (10, 20):
            manager.save(step, tree(step)).result()
        file = next(f for f in _memory._files if f.startswith(f"{root}/20/") and "/d/" in f)
        storage.write(file, bytes(storage.size(file)))
        storage.left = n
        assert not manager.scrub()[20].ok
    before = {entry for entry in storage.entries(root) if entry.startswith("20")}

    CheckpointManager(PathIn(MemoryStorage(), root)).close()

    wholes = [
        entry
        for entry in before
        if storage.kind(f"{root}/{entry}/{names.COMMIT_MARKER}") is not None
    ]
    assert wholes
    assert all(storage.kind(file.replace("/20/", f"/{one}/")) for one in wholes)


@pytest.mark.parametrize("n", range(1, 5))
def test_a_deletion_that_loses_the_lock_of_a_step_is_reported(n):
    """The run is not lost: other steps are saved and deleted. The step is there, or none of it."""
    storage = LosingStorage(f"/20/{names.WRITER}", 0)
    path = PathIn(storage, f"/{uuid.uuid4()}")
    with CheckpointManager(path) as manager:
        for number in (10, 20):
            manager.save(number, {"n": number}).result()
        storage.left = n
        if n < 4:
            with pytest.raises(ValueError, match=r"/20 was not deleted: .*its lock in time"):
                manager.delete(20)
        else:
            manager.delete(20)
        storage.left = 0  # no lock is lost any more
        manager.save(20, {"n": 21}, force=20 not in manager.all_steps())
        manager.save(30, {"n": 30}).result()
        listed = manager.all_steps()

    with CheckpointManager(path) as manager:
        assert manager.all_steps() == listed == [10, 20, 30]
        assert manager.restore(step=20)["n"] in (20, 21)
