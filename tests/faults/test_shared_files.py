"""Damage to the files that steps share costs a few steps at most; so does a kill while mending."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxckpt
from jaxckpt import CheckpointManager
from jaxckpt._run.heal import heal
from jaxckpt._run.index import StepIndex
from jaxckpt._run.upload import upload
from jaxckpt.errors import CheckpointError
from jaxckpt.storage import LocalStorage
from jaxckpt.storage._values import find_values
from jaxckpt.testing import simulate
from tests.faults import children

KEPT = jax.device_put(np.arange(20_000, dtype=np.float32))
STEPS = 7


def state(step):
    changes = np.full(3000, step, np.float32)
    return {"same": KEPT, "equal": np.arange(9000), "w": changes, "text": "a text", "n": step}


def train(root, places, flips):
    """Saves steps; after the fourth, `flips` damages a file. Returns which restore, by place."""

    def run(processes):
        local = root / "local" if places == "local" else None
        with CheckpointManager(root / "run", local=local) as manager:
            for step in range(1, STEPS + 1):
                saving = manager.save(step, state(step))
                try:
                    saving.durable()
                    manager.wait_until_finished()
                except CheckpointError:  # a local step that is found damaged is not uploaded
                    manager._saver.take_errors()
                processes.within(60).gather(f"saved {step}", None)
                if processes.index == 0 and step == 4:
                    flips(root)
                if processes.index == 0 and step > 4:
                    assert good(root, step) or good(root, step - 1)
                processes.within(60).gather(f"looked at {step}", None)

    simulate(2 if places == "processes" else 1, run)


def good(root, step):
    """Whether a step restores from one of its places; fails if it has a wrong value."""
    found = []
    for place in ("local", "run"):
        try:
            got = jaxckpt.restore(root / place / str(step), as_numpy=True)
        except (CheckpointError, OSError):
            continue
        wanted = state(step)
        assert all(np.array_equal(got[name], wanted[name]) for name in wanted)
        found.append(place)
    return found


def files_of(root, places, steps):
    """All files of some steps, by path in the root."""
    train(root, places, lambda root: None)
    found = [
        path.relative_to(root).parts
        for place in ("run", "local")
        for step in steps
        for path in (root / place / str(step)).rglob("*")
        if path.is_file() and path.stat().st_size
    ]
    # The names of data files are new in each run: their number stands for them.
    return sorted({(*parts[:-1], "0") if parts[-2] == "d" else parts for parts in found})


@pytest.mark.parametrize("places", ["run", "local", "processes"])
def test_a_flip_in_any_file(ram_path, trial, caplog, places):
    """Of the two newest steps, which share files with older and with later ones."""
    caplog.set_level(logging.CRITICAL)
    for n, parts in enumerate(files_of(ram_path / "all", places, [3, 4])):
        root = ram_path / str(n)

        def flips(root, parts=parts):
            path = root.joinpath(*parts)
            if parts[-2] == "d":
                path = max(path.parent.iterdir(), key=lambda one: one.stat().st_size)
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 16
            path.write_bytes(data)

        with trial("48", f"{places}: {'/'.join(parts)}"):
            train(root, places, flips)
        shutil.rmtree(root)
    assert n > 5


def test_a_kill_while_a_file_is_mended(zygote, ram_path, trial):
    """Each of the older steps is as damaged as before or good, and all others are good."""
    (ram_path / "0").mkdir()
    zygote.start(children.mend, ram_path / "0")
    [_, last] = zygote.answers()[0]
    assert len(last["problems"]) == 2
    seen = []
    for n in range(last["events"], 0, -1):  # until the step is not committed, as in other tests
        root = ram_path / str(n)
        root.mkdir()
        zygote.start(children.mend, root, ["kill", n])
        words, _ = zygote.answers()
        found = zygote.run(children.check_mended, root)
        shutil.rmtree(root)
        if 5 not in found["steps"]:
            break
        with trial("3", f"a save that mends older steps, kill at {n}"):
            assert found["steps"] == [1, 2, 3, 4, 5]
            assert found["bad"] in ([1, 3], [1], [])
            assert found["left"] == []
            seen.append(found["bad"])
    assert {(), (1,), (1, 3)} == {*map(tuple, seen)}
    assert {"saved": 5} not in words


@pytest.fixture
def shared(tmp_path):
    """A run whose steps 1 and 3 share a file, of which step 3 needs one of two values.

    Returns:
        Its index, and where the value lies that both need, and the value of step 1 alone.
    """
    run = StepIndex(LocalStorage(), str(tmp_path / "run"))
    frozen = jax.numpy.arange(100_000, dtype=jax.numpy.float32)
    with CheckpointManager(run.root) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"frozen": frozen, "moving": frozen + step})
            manager.wait_until_finished()
    first, last = (find_values(run.storage, f"{run.path(n)}/state") or {} for n in (1, 3))
    both = first["frozen/c/0"]
    assert both == last["frozen/c/0"]
    return run, both, first["moving/c/0"]


def flip(run, step, place):
    """Flips a bit of a value, in a file of its own."""
    file = Path(run.path(step), "state", place.file)
    data = bytearray(file.read_bytes())
    data[place.offset] ^= 1
    file.unlink()
    file.write_bytes(data)


def test_healing_leaves_a_step_alone_where_it_is_good(shared, tmp_path):
    """The good copy of a step is bad in a part of the file that only an older step needs."""
    run, both, of_first = shared
    copy = StepIndex(run.storage, str(tmp_path / "copy"))
    shutil.copytree(run.root, copy.root)
    flip(run, 3, both)
    flip(copy, 3, of_first)

    assert heal(run, copy, 3)

    assert all(jaxckpt.verify(run.path(step)).ok for step in (1, 2, 3))


def test_an_upload_leaves_older_steps_alone_where_they_are_good(shared, tmp_path):
    """The local file is bad in a part that only an older step needs."""
    run, _, of_first = shared
    to, trusted = StepIndex(run.storage, str(tmp_path / "to")), {}
    for step in (1, 2):
        upload(run, to, step, trusted=trusted)
    flip(run, 3, of_first)

    upload(run, to, 3, trusted=trusted)

    assert all(jaxckpt.verify(to.path(step)).ok for step in (1, 2, 3))
    assert to.problems == []
