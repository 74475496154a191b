"""`fork` starts a run from a step of another run."""

from __future__ import annotations

import os
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import (
    CheckpointManager,
    CheckpointNotFound,
    CorruptCheckpoint,
    KeepPolicy,
    StepExists,
    UnsupportedFormat,
)
from jaxckpt.format import names
from tests.strategies import same
from tests.twins import watched

# Orbax warns about each restore without a target.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")


def state_on(mesh):
    w = jax.device_put(
        np.arange(64, dtype=np.float32).reshape(8, 8), NamedSharding(mesh, P("x", "y"))
    )
    return {"w": w, "key": jax.random.key(3), "n": 7, "name": "base"}


@pytest.fixture
def base(tmp_path, mesh):
    """A run of steps 5 and 7."""
    root = tmp_path / "base"
    with CheckpointManager(root) as manager:
        for step in (5, 7):
            manager.save(
                step,
                state_on(mesh),
                items={"config": {"lr": 0.1}},
                metrics={"loss": 1.0 / step},
                custom_metadata={"of": "base"},
            )
    return root


def files_of(folder):
    return {
        path.relative_to(folder).as_posix(): path.stat().st_ino
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("step", [-1, 10**18])
def test_a_fork_gets_a_step_that_a_run_can_have(base, step):
    """A longer number is no step, so the run would look empty."""
    new = base.parent / "new"

    with pytest.raises(ValueError, match=f"fork: step must be between 0 and 9+, got {step}"):
        jaxckpt.fork(base, new, step=step)

    assert not (new / str(step)).exists()


def test_the_newest_good_step_of_a_run_is_forked(base, tmp_path, caplog):
    """Of a run, the newest good step is; small files are read, and arrays are not."""
    file = base / "7" / "state" / "_sharding"
    file.write_bytes(bytes(file.stat().st_size))

    with pytest.raises(CorruptCheckpoint, match="_sharding is damaged: its SHA-256 differs"):
        jaxckpt.fork(base / "7", tmp_path / "tuned")
    assert not list((tmp_path / "tuned").iterdir())

    assert jaxckpt.fork(base, tmp_path / "tuned") == str(tmp_path / "tuned" / "5")
    assert "_sharding is damaged" in caplog.text


def test_a_fork_is_the_step_without_a_byte_copied(base, tmp_path, mesh):
    """Its files are the files of the step, except the ones that describe it."""
    path = jaxckpt.fork(base / "7", tmp_path / "tuned")

    assert path == str(tmp_path / "tuned" / "7")
    assert same(jaxckpt.restore(path), state_on(mesh))
    source, made = files_of(base / "7"), files_of(tmp_path / "tuned" / "7")
    own = {names.RECORD, names.COMMIT_MARKER}
    assert made.keys() == source.keys()
    assert {name for name in made if made[name] != source[name]} == own
    report = jaxckpt.verify(path)
    assert report.ok, report


def test_a_fork_knows_where_it_came_from(base, tmp_path):
    """By path and by the token of the attempt that wrote it."""
    path = jaxckpt.fork(base / "7", tmp_path / "tuned")

    lineage = jaxckpt.open(path).lineage
    assert (lineage["by"], lineage["path"]) == ("fork", str(base / "7"))
    assert lineage["token"]
    assert jaxckpt.open(base / "7").lineage == {}


def test_a_run_goes_on_from_a_fork(base, tmp_path, mesh):
    """With all items; what either run deletes, the other keeps."""
    jaxckpt.fork(base, tmp_path / "tuned")  # of its newest good step
    shutil.rmtree(base)

    with CheckpointManager(tmp_path / "tuned") as manager:
        state, step = manager.restore_or(lambda: state_on(mesh))
        manager.save(step + 1, state)
        manager.wait_until_finished()
        assert manager.all_steps() == [7, 8]
        assert manager.metrics(7) == {"loss": 1 / 7}
        assert manager.custom_metadata(7) == {"of": "base"}
        assert manager.restore_items(step=7)["config"] == {"lr": 0.1}
        assert same(manager.restore(), state_on(mesh))


def test_a_fork_may_have_another_number(base, tmp_path, mesh):
    """The source may even be a checkpoint that is not a step."""
    jaxckpt.save(tmp_path / "final", state_on(mesh))

    with pytest.raises(ValueError, match="step="):
        jaxckpt.fork(tmp_path / "final", tmp_path / "new")
    path = jaxckpt.fork(tmp_path / "final", tmp_path / "new", step=0)

    assert path == str(tmp_path / "new" / "0")
    with CheckpointManager(tmp_path / "new") as manager:
        assert manager.latest_step() == 0
        assert same(manager.restore(), state_on(mesh))


def test_a_pin_is_not_forked(base, tmp_path):
    """It is about the step, not of it."""
    with CheckpointManager(base) as manager:
        manager.pin(7)
    path = jaxckpt.fork(base / "7", tmp_path / "tuned")

    assert names.PINNED not in os.listdir(path)


def test_a_run_that_has_steps_is_not_forked_into(base, tmp_path):
    """Its steps stay as they are."""
    jaxckpt.fork(base / "5", tmp_path / "tuned")
    with pytest.raises(StepExists, match="already has steps"):
        jaxckpt.fork(base / "7", tmp_path / "tuned")
    assert sorted(os.listdir(tmp_path / "tuned")) == ["5", names.RUN]


@pytest.mark.parametrize("damage", ["gone", "shorter", "other"])
def test_a_damaged_step_is_not_forked(base, tmp_path, damage):
    """The file is named, and nothing is left in the new run."""
    file = max((base / "7" / "state" / "d").iterdir(), key=lambda path: path.stat().st_size)
    data = file.read_bytes()
    file.unlink()
    if damage == "shorter":
        file.write_bytes(data[:-1])
    elif damage == "other":
        file.write_bytes(bytes(len(data)))

    with pytest.raises(CorruptCheckpoint, match=file.name):
        jaxckpt.fork(base / "7", tmp_path / "tuned")
    assert os.listdir(tmp_path / "tuned") == []


@pytest.mark.parametrize("verb", ["entries", "link"])
def test_a_step_that_a_job_deletes_meanwhile_is_forked_anew(base, tmp_path, verb):
    """As for `convert` and `export`: a run has its newest step, whatever that is by then."""
    goes = []

    def before(called, path):
        if called == verb and "/7" in path and not goes:
            goes.append(path)
            with CheckpointManager(base, keep=KeepPolicy(last=1)) as manager:
                manager.save(9, {"w": 9})

    assert jaxckpt.fork(watched(base, before), tmp_path / "new") == f"{tmp_path}/new/9"
    assert goes
    assert jaxckpt.restore(tmp_path / "new") == {"w": 9}
    assert [*(tmp_path / "new").glob("7*")] == []


def test_a_step_that_is_named_and_goes_is_not_forked(base, tmp_path):
    def before(verb, path):
        if verb == "link":
            shutil.rmtree(base / "7", ignore_errors=True)

    with pytest.raises(CheckpointNotFound, match="7 was replaced or deleted meanwhile"):
        jaxckpt.fork(watched(base / "7", before), tmp_path / "new")


def test_a_link_in_a_step_is_not_followed(base, tmp_path):
    """Nothing outside of a checkpoint gets into a fork."""
    (tmp_path / "secret").write_text("x")
    (base / "7" / "state" / "more").symlink_to(tmp_path / "secret")

    with pytest.raises(CorruptCheckpoint, match="link"):
        jaxckpt.fork(base / "7", tmp_path / "tuned")
    assert os.listdir(tmp_path / "tuned") == []


def test_what_is_not_there_is_not_forked(tmp_path):
    """And no root is made for it."""
    with pytest.raises(CheckpointNotFound):
        jaxckpt.fork(tmp_path / "missing", tmp_path / "tuned")
    assert os.listdir(tmp_path) == []


def test_a_fork_into_another_file_system_is_a_copy(base, ram_path, mesh):
    """Where there can be no hard link."""
    path = jaxckpt.fork(base / "7", ram_path / "tuned")

    assert same(jaxckpt.restore(path), state_on(mesh))
    assert jaxckpt.verify(path).ok


def test_where_nothing_can_be_made_nothing_is_forked(base):
    """The error names the target, not the source."""
    with pytest.raises(FileNotFoundError, match="/proc/nowhere") as caught:
        jaxckpt.fork(base / "5", "/proc/nowhere/run")
    assert "deleted" not in str(caught.value)


def test_a_step_in_memory_can_be_forked():
    """Memory has neither links nor renames."""
    jaxckpt.save("memory://forked/3", {"w": np.ones(3)})
    path = jaxckpt.fork("memory://forked/3", "memory://forks")

    assert path == "memory://forks/3"
    assert np.array_equal(jaxckpt.restore("memory://forks/3")["w"], np.ones(3))


@pytest.mark.parametrize("root", ["somewhere", "s3://bucket-b/run", "gs://bucket-a/run"])
def test_a_step_of_a_bucket_is_forked_in_that_bucket_only(root):
    """Files are copied by the store, which would take the URL for a name in the bucket."""
    with pytest.raises(ValueError, match="in the same storage"):
        jaxckpt.fork("s3://bucket-a/run/3", root)


def test_orbax_reads_a_fork_and_what_it_wrote_can_be_forked(tmp_path, mesh):
    """Both ways, by its manager."""
    state = {"w": state_on(mesh)["w"], "n": 7}
    with ocp.CheckpointManager(tmp_path / "theirs") as manager:
        manager.save(4, args=ocp.args.StandardSave(state))

    path = jaxckpt.fork(tmp_path / "theirs" / "4", tmp_path / "ours")

    assert same(jaxckpt.restore(path), state)
    with ocp.CheckpointManager(tmp_path / "ours") as manager:
        assert manager.latest_step() == 4
        assert same(manager.restore(4, args=ocp.args.StandardRestore(state)), state)


def test_a_step_of_orbax_that_lost_its_main_item_is_not_forked(tmp_path):
    """Else the fork would restore another item, as its record has no lost one."""
    items = {name: ocp.args.StandardSave({"w": np.full(4, 1.0)}) for name in ("state", "ema")}
    with ocp.CheckpointManager(tmp_path / "theirs") as manager:
        manager.save(4, args=ocp.args.Composite(**items))
    shutil.rmtree(tmp_path / "theirs/4/state")

    with pytest.raises(CorruptCheckpoint, match="4/state is missing, but"):
        jaxckpt.fork(tmp_path / "theirs/4", tmp_path / "ours")

    assert os.listdir(tmp_path) == ["theirs"]


def test_a_tree_of_old_orbax_without_metadata_is_not_forked(tmp_path, golden):
    """With a record, each of its arrays would be an item; a copy of it can be forked."""
    old = golden("orbax-0.2.7-pytree-default").path

    with pytest.raises(UnsupportedFormat, match="fork the copy"):
        jaxckpt.fork(old, tmp_path / "run", step=5)

    assert os.listdir(tmp_path) == []
    jaxckpt.convert(old, tmp_path / "copy")
    assert same(
        jaxckpt.restore(jaxckpt.fork(tmp_path / "copy", tmp_path / "run", step=5)),
        jaxckpt.restore(tmp_path / "copy"),
    )
