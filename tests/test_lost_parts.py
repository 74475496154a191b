"""Steps that have lost a file or an item to another program: who says so, and what restores."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest

import jaxckpt
from jaxckpt import (
    CheckpointManager,
    CheckpointNotFound,
    CorruptCheckpoint,
    KeepPolicy,
    LocalTier,
    TreeMismatch,
)
from jaxckpt._run.heal import heal
from jaxckpt._run.index import StepIndex
from jaxckpt.format import names
from jaxckpt.storage import LocalStorage, locate
from jaxckpt.testing import WatchedStorage
from tests.commandline import cli, said_json
from tests.run.test_tiers import damage

SIZE = 100_000  # values of a state, so that its chunk is a file of its own


def state(step):
    return {"w": np.full(SIZE, step, np.float32), "step": step}


def saved(place, *steps, **options):
    with CheckpointManager(place, **options) as manager:
        for step in steps:
            manager.save(step, state(step), items={"data": {"at": step}}, metrics={"loss": 1.0})


# --- a step without its record ---------------------------------------------------------------


@pytest.fixture
def recordless(tmp_path):
    """A run whose newest step lacks its record."""
    saved(tmp_path / "run", 1, 2)
    (tmp_path / "run" / "2" / names.RECORD).unlink()
    return tmp_path / "run"


def test_a_step_without_its_record_is_damaged_to_every_command(recordless):
    """No command calls it complete or another program's, and none deletes it."""
    record = f"{recordless}/2/{names.RECORD} is missing"

    _, steps = said_json("ls", recordless)
    _, plan = said_json("gc", recordless, "--last", "1", "--dry-run")
    cli("report", recordless, "-o", recordless / "report.html")
    code, scrubbed = said_json("scrub", recordless, "--dry-run")

    assert record in json.dumps(steps)
    assert plan["delete"] == []
    assert "incomplete" in json.dumps(plan["keep"])
    assert "orbax" not in (recordless / "report.html").read_text().lower()
    assert code == 1
    assert record in json.dumps(scrubbed)


@pytest.mark.parametrize("below", ["", "/state"])
@pytest.mark.parametrize("verb", [jaxckpt.restore, jaxckpt.open])
def test_reading_a_step_without_its_record_names_the_record(recordless, verb, below):
    """Of an item in it too; the run itself falls back to the step before."""
    with pytest.raises(CorruptCheckpoint, match="is missing") as caught:
        verb(f"{recordless}/2{below}")

    assert caught.value.file == f"{recordless}/2/{names.RECORD}"
    assert jaxckpt.restore(recordless)["step"] == 1


def test_a_manager_sets_a_step_without_its_record_aside(recordless):
    """And goes on with the step before."""
    with CheckpointManager(recordless) as manager:
        assert manager.all_steps() == [1]
        with pytest.raises(
            CheckpointNotFound, match=rf"incomplete: .*/2/{names.RECORD} is missing"
        ):
            manager.restore(step=2)
        assert manager.restore()["step"] == 1
        assert any(names.is_set_aside(path.name) for path in recordless.iterdir())
        assert manager.save(2, state(2)) is not None


def test_a_flat_checkpoint_without_its_record_is_damaged_and_a_lone_item_is_not(tmp_path):
    """An item that was copied out of a checkpoint has no record, and needs none."""
    jaxckpt.save(tmp_path / "flat", state(1), item=None)
    saved(tmp_path / "run", 1)
    shutil.copytree(tmp_path / "run" / "1" / "state", tmp_path / "item")
    (tmp_path / "flat" / names.RECORD).unlink()

    with pytest.raises(CorruptCheckpoint, match="is missing"):
        jaxckpt.restore(tmp_path / "flat")
    assert jaxckpt.restore(tmp_path / "item")["step"] == 1


@pytest.mark.parametrize("kind", ["mounted bucket", "memory"])
def test_a_step_without_its_record_is_damaged_in_a_bucket_too(tmp_path, kind):
    """The marker is written last, so no save of it can be under way."""
    saved(tmp_path / "run", 1, 2)
    storage, root = LocalStorage(atomic_rename=False), str(tmp_path / "run")
    if kind == "memory":
        files = storage.files(root)
        storage, root = locate(f"memory://{tmp_path.name}/run")
        for file in files:
            storage.write(f"{root}/{file}", (tmp_path / "run" / file).read_bytes())
    storage.delete_files([f"{root}/2/{names.RECORD}"])
    index = StepIndex(storage, root)

    assert index.steps() == [1]
    assert index.missing_file(2) == f"{root}/2/{names.RECORD}"
    assert index.to_restore() == [2, 1]


@pytest.mark.parametrize("lost", ["gone", "damaged", "gone with the marker"])
def test_heal_takes_the_record_from_the_copy(tmp_path, lost):
    """And then every other bad file, so that the step is as it was."""
    local, run = tmp_path / "local", tmp_path / "run"
    with CheckpointManager(run, local=local) as manager:
        manager.save(1, state(1), items={"data": {"at": 1}}).durable()
    file = local / "1" / names.RECORD
    file.write_bytes(file.read_bytes()[:-7])
    if lost.startswith("gone"):
        file.unlink()
        (local / "1" / "data" / names.JSON_ITEM_FILE).write_bytes(b"{}")

    if lost.endswith("marker"):
        (local / "1" / names.COMMIT_MARKER).unlink()

    code, found = said_json("heal", local, run)

    assert (code, found["failed"]) == (0, {})
    assert found["mended"]["1"][0] == names.RECORD
    assert (names.COMMIT_MARKER in found["mended"]["1"]) == lost.endswith("marker")
    assert jaxckpt.verify(local / "1").ok
    with CheckpointManager(run, local=local) as manager:
        assert manager.restore_items()["data"] == {"at": 1}
        assert manager.tiers == {"local": [1], "durable": [1], "waiting": []}
        assert manager.problems == []


def test_heal_brings_an_item_back_that_the_copy_has(tmp_path):
    """`ls` says that it is missing. An item that was deleted in both is not damage."""
    saved(tmp_path / "run", 1, 2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for lost in ("run/1/data", "run/2/data", "copy/2/data"):
        shutil.rmtree(tmp_path / lost)

    _, listed, _ = cli("ls", tmp_path / "run")
    code, found = said_json("heal", tmp_path / "run", tmp_path / "copy")

    assert "step 1 lacks items that it had: data\n" in listed
    assert (code, [*found["mended"]], found["failed"]) == (0, ["1"], {})
    assert jaxckpt.verify(tmp_path / "run" / "1").ok


def test_heal_brings_the_commit_marker_back(tmp_path):
    """Last, when the other bad files are replaced; not from another save of the step."""
    saved(tmp_path / "run", 1, 2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    step = tmp_path / "copy" / "2"
    (step / names.COMMIT_MARKER).unlink()
    (step / "state" / names.TREE_METADATA).write_bytes(b"{}")

    code, found = said_json("heal", tmp_path / "copy", tmp_path / "run")

    assert (code, found["failed"]) == (0, {})
    assert found["mended"] == {"2": [f"state/{names.TREE_METADATA}", names.COMMIT_MARKER]}
    assert jaxckpt.verify(step).ok

    saved(tmp_path / "other", 2)
    shutil.copy(tmp_path / "copy" / names.RUN, tmp_path / "other")
    (step / names.COMMIT_MARKER).unlink()
    code, found = said_json("heal", tmp_path / "copy", tmp_path / "other")
    assert code == 1
    assert "different steps" in found["failed"]["2"]
    assert not (step / names.COMMIT_MARKER).exists()


def test_heal_mends_from_a_copy_with_another_bad_file(tmp_path):
    """Each file is checked while it is taken, and none is taken that is bad itself."""
    saved(tmp_path / "run", 1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    step = tmp_path / "run" / "1"
    (step / "state" / names.TREE_METADATA).write_bytes(b"{}")
    damage(tmp_path / "copy" / "1")

    code, found = said_json("heal", tmp_path / "run", tmp_path / "copy")

    assert (code, found["mended"]) == (0, {"1": [f"state/{names.TREE_METADATA}"]})
    assert jaxckpt.verify(step).ok
    assert not jaxckpt.verify(tmp_path / "copy" / "1").ok


@pytest.mark.parametrize("file", [f"state/{names.TREE_METADATA}", f"state/{names.OCDBT_DATA}/*"])
def test_heal_replaces_a_file_that_has_become_longer(tmp_path, file):
    """A copy tool may fill up the last block of a file: its beginning is as it was."""
    saved(tmp_path / "run", 1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    step = tmp_path / "run" / "1"
    longer = min(step.glob(file))
    with longer.open("ab") as opened:
        opened.write(bytes(512))

    code, found = said_json("heal", tmp_path / "run", tmp_path / "copy")

    assert (code, found["mended"]) == (0, {"1": [str(longer.relative_to(step))]})
    assert jaxckpt.verify(step).ok


@pytest.mark.parametrize("left", [None, 0, 100])
def test_heal_replaces_the_metadata_of_a_step(tmp_path, left):
    """They are lost or cut: without them, no item of the step can be opened."""
    saved(tmp_path / "run", 1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    step = tmp_path / "run" / "1"
    data = (step / names.CHECKPOINT_METADATA).read_bytes()
    (step / names.CHECKPOINT_METADATA).unlink()
    if left is not None:
        (step / names.CHECKPOINT_METADATA).write_bytes(data[:left])
    damage(step)

    code, found = said_json("heal", tmp_path / "run", tmp_path / "copy")

    assert (code, len(found["mended"]["1"])) == (0, 2)
    assert (step / names.CHECKPOINT_METADATA).read_bytes() == data
    assert jaxckpt.verify(step).ok


def test_heal_takes_no_record_from_another_save_of_the_step(tmp_path):
    """Even of the same values."""
    saved(tmp_path / "a", 1)
    (tmp_path / "b").mkdir()
    shutil.copy(tmp_path / "a" / names.RUN, tmp_path / "b")
    saved(tmp_path / "b", 1)
    (tmp_path / "a" / "1" / names.RECORD).unlink()

    code, found = said_json("heal", tmp_path / "a", tmp_path / "b")

    assert code == 1
    assert "different steps" in found["failed"]["1"]
    assert not (tmp_path / "a" / "1" / names.RECORD).exists()


def test_a_manager_mends_a_local_step_without_its_record(tmp_path):
    """From the directory, when it restores the step."""
    local, run = tmp_path / "local", tmp_path / "run"
    with CheckpointManager(run, local=local) as manager:
        manager.save(1, state(1)).durable()
    (local / "1" / names.RECORD).unlink()

    with CheckpointManager(run, local=local) as manager:
        assert manager.restore()["step"] == 1

    assert jaxckpt.verify(local / "1").ok


# --- one bad file of several steps -----------------------------------------------------------


def flip(file):
    """Flips a bit in place, so that all links to the file see it."""
    with file.open("r+b") as data:
        data.seek(1000)
        (byte,) = data.read(1)
        data.seek(1000)
        data.write(bytes([byte ^ 1]))


@pytest.fixture
def sharing(tmp_path):
    """Local steps that share a bad file, and the directory, which has only the newest of them."""
    local, run = tmp_path / "local", tmp_path / "run"
    frozen = np.arange(SIZE, dtype=np.float32)
    tier = LocalTier(local, keep=KeepPolicy())
    with CheckpointManager(run, local=tier, keep=KeepPolicy(last=1)) as manager:
        for step in range(1, 5):
            manager.save(step, {"w": frozen, "step": step}).durable()
            manager.wait_until_finished()  # until what the next step may share is read back
        assert manager.tiers["durable"] == [4]
    shared = [
        file
        for file in (local / "4" / "state" / names.OCDBT_DATA).iterdir()
        if file.stat().st_nlink > 1 and file.stat().st_size > SIZE
    ]
    flip(shared[0])
    bad = [step for step in range(1, 5) if not jaxckpt.verify(local / str(step)).ok]
    assert len(bad) > 1
    return local, run, bad


def test_scrub_mends_all_steps_that_share_a_bad_file(sharing):
    """The steps that only this place has get a link to the mended file, and stay."""
    local, run, bad = sharing

    with CheckpointManager(run, local=LocalTier(local, keep=KeepPolicy())) as manager:
        reports = manager.scrub()
        assert all(report.ok for report in reports.values())
        assert manager.tiers["local"] == [1, 2, 3, 4]
        assert any("mended file" in problem for problem in manager.problems)

    assert all(jaxckpt.verify(local / str(step)).ok for step in range(1, 5))
    files = {(local / str(step) / "state" / names.OCDBT_DATA) for step in bad}
    assert max(file.stat().st_nlink for folder in files for file in folder.iterdir()) >= len(bad)


def test_heal_mends_all_steps_that_share_a_bad_file(sharing):
    """By hand too; the exit code says that nothing is left to mend."""
    local, run, bad = sharing

    code, found = said_json("heal", local, run)

    assert (code, found["failed"]) == (0, {})
    assert sorted(map(int, found["mended"])) == bad
    assert len({*map(tuple, found["mended"].values())}) == 1


def test_no_file_is_away_while_it_is_mended(sharing):
    """A kill at any moment leaves each file as damaged as it was, or mended."""
    local, run, bad = sharing
    files = [file for file in local.glob("*/state/d/*") if file.stat().st_size > SIZE]

    def before(verb, path):
        assert all(file.exists() for file in files), (verb, path)

    index = StepIndex(WatchedStorage(LocalStorage(), before), str(local), quiet=True)
    heal(index, StepIndex(LocalStorage(), str(run), quiet=True), 4, int)

    assert all(jaxckpt.verify(local / str(step)).ok for step in bad)


# --- an item that was removed ----------------------------------------------------------------


@pytest.fixture
def without_data(tmp_path):
    """A run of whose newest step another program has removed an item."""
    saved(tmp_path / "run", 1, 2)
    shutil.rmtree(tmp_path / "run" / "2" / "data")
    return tmp_path / "run"


def test_the_other_items_of_a_step_are_restored(without_data):
    """By path, from the run and by a manager, which keeps the step and names what is missing."""
    assert jaxckpt.restore(without_data / "2")["step"] == 2
    assert jaxckpt.restore(without_data)["step"] == 2
    with CheckpointManager(without_data) as manager:
        assert manager.latest_step() == 2
        assert manager.restore()["step"] == 2
        assert sorted(manager.restore_items()) == ["metrics", "state"]
        assert manager.metrics(2) == {"loss": 1.0}
        manager.scrub()
        assert manager.all_steps() == [1, 2]
        told = [problem for problem in manager.problems if "2/data is missing" in problem]
        assert told
        assert all("delete(step, item='data')" in problem for problem in told)
        assert not any("damaged" in problem for problem in manager.problems)


def test_the_removed_item_is_named_where_it_is_asked_for(without_data):
    """No older step takes its place: the job decides."""
    removed = re.escape("another program removed this item")

    with pytest.raises(CheckpointNotFound, match=removed):
        jaxckpt.restore(without_data / "2", item="data")
    with CheckpointManager(without_data) as manager:
        with pytest.raises(TreeMismatch, match=removed):
            manager.restore_items(items={"data": None})
        assert manager.restore_items(step=1, items={"data": None}) == {"data": {"at": 1}}
        assert manager.all_steps() == [1, 2]


def test_commands_name_the_removed_item(without_data):
    """`ls` calls the step complete, and `verify` says that something is missing."""
    _, listed, _ = cli("ls", without_data)
    code, verified, _ = cli("verify", without_data / "2")

    assert "INCOMPLETE" not in listed
    assert "2/data is missing" in listed
    assert code == 2
    assert "2/data is missing" in verified
    assert "UNREADABLE" in verified


@pytest.mark.parametrize("by", ["manager", "command"])
def test_the_removal_is_completed(without_data, by):
    """Then nothing is left to name."""
    if by == "command":
        assert cli("rm", without_data, "2", "--item", "data", "--yes")[0] == 0
    else:
        with CheckpointManager(without_data) as manager:
            manager.delete(2, item="data")

    assert jaxckpt.verify(without_data / "2").ok
    with CheckpointManager(without_data) as manager:
        assert manager.restore()["step"] == 2
        assert manager.problems == []


def test_a_step_without_its_state_is_damaged(tmp_path):
    """The main item goes only with the step."""
    saved(tmp_path / "run", 1, 2)
    shutil.rmtree(tmp_path / "run" / "2" / "state")

    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.restore()["step"] == 1
        assert manager.all_steps() == [1]


def test_heal_of_a_damaged_step_brings_a_removed_item_back(tmp_path):
    """A mended copy is as the other."""
    local, run = tmp_path / "local", tmp_path / "run"
    with CheckpointManager(run, local=local) as manager:
        manager.save(1, state(1), items={"data": {"at": 1}}).durable()
    shutil.rmtree(local / "1" / "data")
    (local / "1" / "state" / names.TREE_METADATA).write_bytes(b"{}")

    code, found = said_json("heal", local, run)

    assert (code, found["failed"]) == (0, {})
    assert jaxckpt.verify(local / "1").ok
