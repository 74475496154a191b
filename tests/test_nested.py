"""Runs and checkpoints inside a step: refused when they are made, and never deleted with it."""

from __future__ import annotations

import uuid

import numpy as np
import pytest

import jaxckpt
from jaxckpt import CheckpointManager, KeepPolicy, StepExists
from jaxckpt._run.deletion import Deletion
from jaxckpt._run.index import StepIndex
from jaxckpt._run.leases import Leases
from jaxckpt._run.owner import Ownership
from jaxckpt.format import names
from jaxckpt.storage import LocalStorage, locate
from tests.commandline import cli


def state(step):
    return {"w": np.full(100, step, np.float32), "step": step}


def saved(place, *steps, **options):
    with CheckpointManager(place, **options) as manager:
        for step in steps:
            manager.save(step, state(step), items={"data": {"at": step}})
        manager.wait_until_finished()
        return manager.problems


def deletion(index):
    """What deletes steps of a run, for a job that owns it."""
    leases = Leases(index)
    owner = Ownership(leases)
    owner.take_over(None)
    return Deletion(leases, owner)


# --- making one ------------------------------------------------------------------------------


@pytest.fixture(params=["dir", "memory"])
def run(request, tmp_path):
    """A run with a step 1."""
    place = str(tmp_path / "run") if request.param == "dir" else f"memory://{uuid.uuid4()}/run"
    saved(place, 1)
    return place


@pytest.mark.parametrize("below", ["1/x", "1/x/y", "1/state/x", "1/state/d/x/y"])
def test_a_run_inside_a_step_is_refused(run, below):
    """When it is opened for writing, and before anything is made."""
    storage, root = locate(run)
    before = storage.files(root).keys()

    with pytest.raises(StepExists, match=r"lies inside the checkpoint .*/run/1"):
        CheckpointManager(f"{run}/{below}")

    assert storage.files(root).keys() == before


@pytest.mark.parametrize("below", ["1/x", "1/x/y", "1/x/y/z", "1/state/x", "1/state/d/x/y"])
def test_a_save_inside_a_step_is_refused(run, below):
    """At any depth, each time; saves beside the step go on."""
    storage, root = locate(run)
    before = storage.files(root).keys()

    for _ in range(2):
        with pytest.raises(StepExists, match=r"lies inside the checkpoint .*/run/1"):
            jaxckpt.save(f"{run}/{below}", state(1))

    assert storage.files(root).keys() == before
    jaxckpt.save(f"{run}-evals/1/x", state(1))


def test_a_link_leads_into_no_step(tmp_path):
    """What counts is where the directory is."""
    saved(tmp_path / "run", 1)
    (tmp_path / "evals").symlink_to(tmp_path / "run" / "1")

    with pytest.raises(StepExists, match="lies inside the checkpoint"):
        CheckpointManager(tmp_path / "evals" / "x")
    with pytest.raises(StepExists, match="lies inside the checkpoint"):
        jaxckpt.save(tmp_path / "evals" / "x" / "y", state(1))


# --- deleting the step around one ------------------------------------------------------------


@pytest.fixture
def outer(tmp_path):
    """A run with steps 1 and 2, and a way to put another run or checkpoint into step 1."""
    saved(tmp_path / "run", 1, 2)
    saved(tmp_path / "other", 5)

    def put(what, below):
        place = tmp_path / "run" / "1" / below
        place.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "other" / what).rename(place)
        return place

    return tmp_path / "run", put


@pytest.mark.parametrize("below", ["x", "x/y", "state/x"])
@pytest.mark.parametrize("what", ["", "5"], ids=["run", "checkpoint"])
def test_retention_leaves_a_step_with_another_run_or_checkpoint(outer, what, below):
    """And reports it; it goes once the other is moved."""
    root, put = outer
    place = put(what, below)

    problems = saved(root, 3, keep=KeepPolicy(last=1))

    assert any(f"{root}/1 is not deleted: it contains {place}" in text for text in problems)
    assert jaxckpt.restore(place)["step"] == 5
    with CheckpointManager(root, mode="r") as reader:
        assert reader.all_steps() == [1, 3]
    if not what:
        with CheckpointManager(place, mode="r") as reader:
            assert reader.all_steps() == [5]
    place.rename(root.parent / "moved")
    saved(root, 4, keep=KeepPolicy(last=1))
    with CheckpointManager(root, mode="r") as reader:
        assert reader.all_steps() == [4]


@pytest.mark.parametrize("kind", ["mounted bucket", "memory"])
@pytest.mark.parametrize("below", ["x", "state/x"])
def test_a_bucket_leaves_such_a_step_whole(outer, tmp_path, kind, below):
    """Its commit marker too, so that it stays a step."""
    root, put = outer
    put("", below)
    storage, path = LocalStorage(atomic_rename=False), str(root)
    if kind == "memory":
        storage, path = locate(f"memory://{uuid.uuid4()}/run")
        for file in LocalStorage().files(str(root)):
            storage.write(f"{path}/{file}", (root / file).read_bytes())
    index = StepIndex(storage, path)
    before = storage.files(f"{path}/1")

    gone = deletion(index).delete([1, 2])

    assert gone == [2]
    assert index.steps() == [1]
    assert storage.files(f"{path}/1") == before
    assert any("it contains" in problem for problem in index.problems)


def test_an_empty_run_that_a_job_has_opened_stays_too(outer):
    """It has an owner, and no step yet."""
    root, put = outer
    (root.parent / "other" / "5").rename(root.parent / "5")
    place = put("", "x")
    assert (place / names.OWNER).exists()

    assert any("it contains" in problem for problem in saved(root, 3, keep=KeepPolicy(last=1)))
    assert place.exists()


def test_small_files_of_other_programs_go_with_the_step(outer):
    """As always: an evaluation's results belong to the step."""
    root, _ = outer
    (root / "1" / "eval").mkdir()
    (root / "1" / "eval" / "results.json").write_text("{}")

    assert saved(root, 3, keep=KeepPolicy(last=1)) == []
    assert not (root / "1").exists()


def test_deleting_by_hand_names_the_other(outer):
    """The step, or the item that it is in; by a manager or a command."""
    root, put = outer
    place = put("", "data/x")

    with CheckpointManager(root) as manager:
        with pytest.raises(ValueError, match=f"it contains {place}"):
            manager.delete(1)
        with pytest.raises(ValueError, match=f"it contains {place}"):
            manager.delete(1, item="data")
        assert manager.restore(step=1)["step"] == 1
    assert f"it contains {place}" in cli("rm", root, "1", "--yes")[2]
    assert jaxckpt.restore(place)["step"] == 5


def test_a_step_of_an_early_orbax_is_deleted(tmp_path):
    """Each of its items is a checkpoint, and belongs to it; a run of ours in it does not."""
    ocp = pytest.importorskip("orbax.checkpoint")
    for step in (1, 2, 3):
        path = tmp_path / "run" / str(step)
        ocp.PyTreeCheckpointer().save(path / "state", state(step))
        (path / names.CHECKPOINT_METADATA).write_text("{}")
    saved(tmp_path / "other", 5)
    (tmp_path / "other").rename(tmp_path / "run" / "2" / "x")

    with CheckpointManager(tmp_path / "run") as manager:
        manager.delete(1)
        with pytest.raises(ValueError, match="it contains"):
            manager.delete(2)
        assert manager.all_steps() == [2, 3]


def test_a_step_that_somebody_else_deletes_is_no_problem(tmp_path):
    """The deletion finds nothing to do."""
    saved(tmp_path / "run", 1, 2)
    index = StepIndex(*locate(tmp_path / "run"))
    index.listing()
    index.storage.delete(f"{tmp_path}/run/1")

    assert deletion(index).delete([1]) == [1]
    assert index.problems == []
