"""Orbax's managers open a run saved by jaxckpt, and jaxckpt opens theirs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt import (
    CheckpointManager,
    CheckpointNotFound,
    CorruptCheckpoint,
    KeepPolicy,
    TreeMismatch,
)
from jaxckpt.format import names
from jaxckpt.storage import PathIn, locate
from jaxckpt.testing import WatchedStorage, simulate
from tests.golden.fixture import golden_names
from tests.strategies import same

ocp = pytest.importorskip("orbax.checkpoint")
from orbax.checkpoint import v1  # noqa: E402

# Orbax warns about each restore without a target.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")

LOSSES = {1: 0.9, 2: 0.1, 3: 0.5, 4: 0.6, 5: 0.7}
KEEP = KeepPolicy(last=2, best=1, metric="loss")
STAYS = [2, 4, 5]
NAMINGS = {
    "plain": {},
    "prefix": {"step_prefix": "ckpt"},
    "digits": {"step_format_fixed_length": 6},
    "both": {"step_prefix": "ckpt", "step_format_fixed_length": 6},
}
every_naming = pytest.mark.parametrize("naming", NAMINGS)


def ours(naming: str) -> dict[str, Any]:
    """Converts Orbax's options for step names to those of jaxckpt."""
    words = {"step_prefix": "step_prefix", "step_format_fixed_length": "step_digits"}
    return {words[word]: value for word, value in NAMINGS[naming].items()}


def orbax(root: Path, naming: str = "plain", **options: Any) -> Any:
    """Orbax's v0 manager, which ranks by the loss."""
    options = {"best_fn": lambda m: m["loss"], "best_mode": "min"} | options
    options |= NAMINGS[naming] | {"max_to_keep": None, "keep_checkpoints_without_metrics": True}
    return ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(**options))


def training(root: Path, naming: str = "plain") -> Any:
    """Orbax's v1 manager."""
    form = ocp.path.step.standard_name_format(**NAMINGS[naming])
    return v1.training.Checkpointer(root, step_name_format=form)


@pytest.fixture
def state(mesh):
    """Makes the state of a step, of what Orbax can hold."""

    def put(value, *spec):
        return jax.device_put(value, NamedSharding(mesh, P(*spec)))

    def make(step):
        return {
            "w": put(np.full((8, 4), step, np.float32), "x", "y"),
            "b": put(np.arange(6, dtype=np.int32) + step),
            "rng": jax.random.key(step),
            "step": step,
        }

    return make


class Counter:
    """A data iterator of one process."""

    def __init__(self, at=0):
        self.at = at

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


def save_run(root, state, **naming):
    """Five steps with metrics and items of each kind, of which the policy keeps three."""
    with CheckpointManager(root, keep=KEEP, **naming) as manager:
        for step, loss in LOSSES.items():
            items = {
                "vocab": {"a": [step]},
                "data": Counter(step),
                "ema": {"w": jnp.full(3, step)},
            }
            manager.save(
                step,
                state(step),
                metrics={"loss": loss},
                items=items,
                custom_metadata={"lr": step / 10},
            )


# --- Orbax opens ours --------------------------------------------------------------------------


@every_naming
@pytest.mark.parametrize("count", [1, pytest.param(4, marks=pytest.mark.multihost)])
def test_orbax_lists_our_run(tmp_path, state, naming, count):
    """The steps kept by the policy, the latest and the best step, and the metrics."""
    simulate(count, lambda _: save_run(tmp_path, state, **ours(naming)))

    with orbax(tmp_path, naming) as manager:
        listed = manager.all_steps(), manager.latest_step(), manager.best_step()
        metrics = manager.metrics(2)
    with training(tmp_path, naming) as checkpointer:
        new = [(c.step, c.metrics) for c in checkpointer.checkpoints]
        latest = checkpointer.latest.step

    assert listed == (STAYS, 5, 2)
    assert metrics == {"loss": 0.1}
    assert new == [(step, {"loss": LOSSES[step]}) for step in STAYS]
    assert latest == 5


def composite(**args: Any) -> dict[str, Any]:
    return {"args": ocp.args.Composite(**args)}


RESTORES = {
    "no arguments": dict,
    "standard": lambda: composite(state=ocp.args.StandardRestore()),
    "pytree": lambda: composite(state=ocp.args.PyTreeRestore()),
    "several": lambda: composite(
        state=ocp.args.StandardRestore(),
        ema=ocp.args.PyTreeRestore(),
        vocab=ocp.args.JsonRestore(),
        data=ocp.args.JsonRestore(),
    ),
}


@pytest.mark.parametrize("how", RESTORES)
@pytest.mark.parametrize("count", [1, pytest.param(4, marks=pytest.mark.multihost)])
def test_orbax_restores_a_step_of_ours(tmp_path, state, how, count):
    """The state to the bit, and the other items as far as they are asked for."""
    simulate(count, lambda _: save_run(tmp_path, state))

    with orbax(tmp_path) as manager:
        got = manager.restore(5, **RESTORES[how]())

    assert same(dict(got["state"]), state(5))
    if how in ("no arguments", "several"):
        assert got["vocab"] == {"a": [5]}
        assert got["ema"]["w"].tolist() == [5, 5, 5]
        assert got["data"]["process_0"] == {"at": 5}


def test_orbax_restores_into_a_target(tmp_path, state, make_mesh):
    """On another mesh, by its v0 and its v1 manager."""
    save_run(tmp_path, state)
    there = NamedSharding(make_mesh(z=8), P("z"))
    like = {
        **state(0),
        "w": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=there),
    }

    with orbax(tmp_path) as manager:
        old = manager.restore(2, **composite(state=ocp.args.StandardRestore(like)))["state"]
    with training(tmp_path) as checkpointer:
        new = checkpointer.load(2, like)

    for got in (old, new):
        assert got["w"].sharding == there
        assert same(dict(got), state(2))


def test_orbax_loads_a_step_of_ours(tmp_path, state):
    """With its v1 manager: the latest, one by its number, and all the items."""
    save_run(tmp_path, state)

    with training(tmp_path) as checkpointer:
        latest, best = checkpointer.load(), checkpointer.load(2)
        items = checkpointer.load_checkpointables(5)

    assert same(latest, state(5))
    assert same(best, state(2))
    assert same(items.pop("state"), state(5))
    assert items["vocab"] == {"a": [5]}
    assert items["ema"]["w"].tolist() == [5, 5, 5]
    assert items["data"]["process_0"] == {"at": 5}


def test_orbax_shows_the_metadata_of_our_steps(tmp_path, state):
    """Custom metadata, times, and the shapes in each tree."""
    save_run(tmp_path, state)
    handlers = {name: ocp.StandardCheckpointHandler() for name in ("state", "ema")}

    with ocp.CheckpointManager(tmp_path, item_handlers=handlers) as manager:
        step, items = manager.metadata(5), manager.item_metadata(5)
    with training(tmp_path) as checkpointer:
        new = checkpointer.metadata(5)
        named = checkpointer.checkpointables_metadata(5).metadata

    assert step.custom_metadata == new.custom_metadata == {"lr": 0.5}
    assert step.init_timestamp_nsecs <= step.commit_timestamp_nsecs
    assert items["state"].tree["w"].shape == new.metadata["w"].shape == (8, 4)
    assert items["ema"].tree["w"].shape == named["ema"]["w"].shape == (3,)
    assert new.metrics == {"loss": 0.7}


def test_the_metadata_of_a_run_is_read_by_both(tmp_path):
    """Written once: another job's stays, and is a problem."""
    with CheckpointManager(tmp_path / "ours", run_metadata={"lang": "en"}) as manager:
        assert manager.run_metadata == {"lang": "en"}
    with CheckpointManager(tmp_path / "ours", run_metadata={"lang": "de"}) as manager:
        assert manager.run_metadata == {"lang": "en"}
        assert any("other run_metadata" in problem for problem in manager.problems)
    with ocp.CheckpointManager(tmp_path / "ours") as manager:
        theirs = manager.metadata().custom_metadata
    file = tmp_path / "ours" / names.ROOT_METADATA / names.ROOT_METADATA_FILE
    assert json.loads(file.read_bytes()) == {"custom_metadata": {"lang": "en"}}  # Orbax 0.11.13
    with ocp.CheckpointManager(tmp_path / "orbax", metadata={"lang": "fr"}):
        pass
    with CheckpointManager(tmp_path / "orbax", mode="r") as reader:
        assert reader.run_metadata == {"lang": "fr"}
    with CheckpointManager(tmp_path / "none", mode="r") as reader:
        assert reader.run_metadata == {}

    assert theirs == {"lang": "en"}


@pytest.mark.parametrize("name", golden_names("-manager-"))
def test_the_metadata_of_runs_of_every_orbax_is_read(golden, tmp_path, name):
    """Also from the file of releases before 0.10; a later job's does not take its place."""
    root = golden(name).path
    files = [root / "metadata" / file for file in ("_ROOT_METADATA", "metadata")]
    stored = next((json.loads(file.read_text()) for file in files if file.is_file()), {})
    custom = stored.get("custom_metadata", stored.get("custom", stored))
    shutil.copytree(root, tmp_path / "run")

    with CheckpointManager(tmp_path / "run", run_metadata={"lang": "de"}) as manager:
        found = manager.run_metadata

    assert found == (custom or {"lang": "de"})
    assert any("other run_metadata" in text for text in manager.problems) == bool(custom)
    with CheckpointManager(root, mode="r") as reader:
        assert reader.run_metadata == custom


def test_orbax_sees_nothing_of_what_is_not_committed(tmp_path, state):
    """Neither a step that was set aside, nor one that is being deleted, nor a reader's lease."""
    save_run(tmp_path, state)
    (tmp_path / "5" / names.CHECKPOINT_METADATA).write_text("[]")
    (tmp_path / "4").rename(tmp_path / names.deleting("4", "0123456789abcdef"))
    with CheckpointManager(tmp_path) as manager:
        manager.restore()
    with CheckpointManager(tmp_path, mode="r") as reader:
        watched = reader.watch(timeout_s=0.01)
        next(watched)

        with orbax(tmp_path) as manager:
            old = manager.all_steps(), manager.restore(2)["state"]["step"]
        with training(tmp_path) as checkpointer:
            new = [c.step for c in checkpointer.checkpoints], checkpointer.load()["step"]
        watched.close()

    assert old == new == ([2], 2)
    assert any(names.is_set_aside(name) for name in os.listdir(tmp_path))


def test_orbax_goes_on_with_our_run(tmp_path, state):
    """It saves the next steps beside ours and deletes ours by its rules; then jaxckpt resumes."""
    save_run(tmp_path, state)

    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step in (6, 7):
            manager.save(step, **composite(state=ocp.args.PyTreeSave(state(step))))
    with CheckpointManager(tmp_path) as manager:
        steps = manager.all_steps()
        got = manager.restore()
        manager.save(8, state(8)).result()

    assert steps == [5, 6, 7]
    assert same(got, state(7))
    with orbax(tmp_path) as manager:
        assert manager.all_steps() == [5, 6, 7, 8]
        assert same(dict(manager.restore(8)["state"]), state(8))


# --- we open Orbax's ---------------------------------------------------------------------------


def save_old(root, naming, state):
    """Without names for items."""
    with orbax(root, naming) as manager:
        for step in (9, 10, 11):
            manager.save(
                step, args=ocp.args.StandardSave(state(step)), metrics={"loss": abs(step - 10)}
            )


def save_old_composite(root, naming, state):
    with orbax(root, naming) as manager:
        for step in (9, 10, 11):
            items = {
                "state": ocp.args.StandardSave(state(step)),
                "vocab": ocp.args.JsonSave({"a": [step]}),
                "mean": ocp.args.ArraySave(np.full(3, step)),
            }
            manager.save(step, **composite(**items), metrics={"loss": abs(step - 10)})


def save_new(root, naming, state):
    with training(root, naming) as checkpointer:
        for step in (9, 10, 11):
            checkpointer.save(step, state(step), metrics={"loss": abs(step - 10)})


WRITERS = {"v0": save_old, "v0 composite": save_old_composite, "v1": save_new}
every_writer = pytest.mark.parametrize("writer", WRITERS)


@every_writer
@every_naming
def test_we_open_a_run_of_orbax(tmp_path, state, writer, naming):
    """Steps, the latest and the best step and their metrics, without giving the name format."""
    WRITERS[writer](tmp_path, naming, state)

    with CheckpointManager(tmp_path, keep=KeepPolicy(metric="loss")) as manager:
        assert manager.all_steps() == [9, 10, 11]
        assert (manager.latest_step(), manager.best_step()) == (11, 10)
        assert manager.metrics(9) == {"loss": 1}
        assert same(manager.restore(), state(11))
        assert same(manager.restore(step="best"), state(10))
        assert same(manager.restore(step=9), state(9))
        assert manager.restore_or(lambda: state(0))[1] == 11
        assert manager.metadata(9).leaves["w"].shape == (8, 4)
        assert manager.problems == []


@every_writer
@every_naming
def test_we_go_on_with_a_run_of_orbax(tmp_path, state, writer, naming):
    """With steps that are called alike; and Orbax reads on, what it wrote and what we did."""
    WRITERS[writer](tmp_path, naming, state)

    with CheckpointManager(tmp_path, keep=KeepPolicy(metric="loss")) as manager:
        got, step = manager.restore_or(lambda: state(0))
        manager.save(step + 1, state(12), metrics={"loss": -1})
        manager.wait_until_finished()
        assert same(got, state(11))
        assert (manager.all_steps(), manager.best_step()) == ([9, 10, 11, 12], 12)

    with orbax(tmp_path, naming) as manager:
        assert (manager.all_steps(), manager.best_step()) == ([9, 10, 11, 12], 12)
        assert same(dict(manager.restore(12)["state"]), state(12))
    with training(tmp_path, naming) as checkpointer:
        assert [c.step for c in checkpointer.checkpoints] == [9, 10, 11, 12]
        assert same(checkpointer.load(), state(12))
        assert checkpointer.checkpoints[-1].metrics == {"loss": -1}
        if writer == "v1":
            assert same(checkpointer.load(9), state(9))


def test_items_that_orbax_saved(tmp_path, state):
    """Trees, JSON and lone arrays, by name."""
    save_old_composite(tmp_path, "plain", state)

    with CheckpointManager(tmp_path) as manager:
        got = manager.restore_items()

    assert sorted(got) == ["mean", "metrics", "state", "vocab"]
    assert same(got["state"], state(11))
    assert got["vocab"] == {"a": [11]}
    assert np.asarray(got["mean"]).tolist() == [11, 11, 11]
    assert got["metrics"] == {"loss": 1}


def test_custom_metadata_that_orbax_saved(tmp_path, state):
    """Custom metadata of a step; Orbax's metadata of the whole run is not a stray."""
    with ocp.CheckpointManager(tmp_path, metadata={"lang": "en"}) as manager:
        manager.save(1, args=ocp.args.StandardSave(state(1)), custom_metadata={"lr": 0.1})

    with CheckpointManager(tmp_path) as manager:
        assert manager.custom_metadata(1) == {"lr": 0.1}
        assert manager.problems == []


def test_no_policy_deletes_what_orbax_wrote(tmp_path, state):
    """This is reported once for each step; `delete` does delete it."""
    save_old(tmp_path, "plain", state)

    with CheckpointManager(tmp_path, keep=KeepPolicy(last=1)) as manager:
        for step in (12, 13):
            manager.save(step, state(step))
        manager.wait_until_finished()
        kept, problems = manager.all_steps(), manager.problems
        manager.delete(9)

        assert kept == [9, 10, 11, 13]
        assert len(problems) == 3
        assert all("was not written by jaxckpt" in problem for problem in problems)
        assert manager.all_steps() == [10, 11, 13]


@pytest.mark.parametrize("marker", [True, False])
def test_in_a_store_no_deletion_touches_what_orbax_wrote(tmp_path, state, marker):
    """With a file of a writer of ours in it, readers would take it for a damaged step of ours."""
    save_new(tmp_path, "plain", state)
    storage, root = locate(f"memory:/{tmp_path}")
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        if marker or file.name != names.COMMIT_MARKER:  # which not every Orbax writes
            storage.write(f"{root}/{file.relative_to(tmp_path)}", file.read_bytes())
    calls = []
    watched = WatchedStorage(storage, lambda *call: calls.append(call))
    watched.parallel_writes = True
    with CheckpointManager(PathIn(watched, root), keep=KeepPolicy(last=1)) as manager:
        theirs = manager.all_steps()
        for step in (101, 102):
            manager.save(step, state(step))
            manager.wait_until_finished()

        assert manager.all_steps() == [*theirs, 102]
    written = {path.removeprefix(f"{root}/") for verb, path in calls if verb == "create"}
    assert not written & {f"{step}/{names.WRITER}" for step in theirs}
    assert theirs


def remove_manifest(step):
    next(step.rglob(names.OCDBT_MANIFEST)).unlink()


def remove_tree(step):
    for item in ("state", "default"):
        (step / item / names.TREE_METADATA).unlink(missing_ok=True)


def cut_data(step):
    for file in step.rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-20])


def garble_metadata(step):
    (step / names.CHECKPOINT_METADATA).write_text("[]")


@every_writer
@pytest.mark.parametrize("damage", [remove_manifest, remove_tree, cut_data, garble_metadata])
def test_a_damaged_step_of_orbax_is_skipped(tmp_path, state, writer, damage):
    """It is reported and stays where it is; the one before is restored."""
    WRITERS[writer](tmp_path, "plain", state)
    damage(tmp_path / "11")
    before = sorted(str(path) for path in tmp_path.rglob("*/*"))

    with CheckpointManager(tmp_path) as manager:
        with pytest.raises((CorruptCheckpoint, CheckpointNotFound)):
            manager.restore(step=11)
        got, step = manager.restore_or(lambda: state(0))

        assert step == 10
        assert same(got, state(10))
        assert any("11" in problem for problem in manager.problems)
    assert sorted(str(path) for path in tmp_path.rglob("*/*")) == before


def test_what_a_crash_of_orbax_left_blocks_nothing(tmp_path, state):
    """Its attempts are reported, and left for it to remove."""
    save_old(tmp_path, "plain", state)
    left = tmp_path / "12.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "11", left)

    with CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [9, 10, 11]
        manager.save(12, state(12)).result()
        assert any(left.name in problem for problem in manager.problems)

    assert left.is_dir()
    with orbax(tmp_path) as manager:
        assert manager.all_steps() == [9, 10, 11, 12]


# --- Grain -------------------------------------------------------------------------------------


def loader():
    """An iterator whose state is bytes."""
    grain = pytest.importorskip("grain")
    sampler = grain.samplers.IndexSampler(num_records=100, shuffle=True, seed=3, num_epochs=2)
    batch = [grain.transforms.Batch(batch_size=4)]
    return iter(
        grain.DataLoader(data_source=range(100), sampler=sampler, operations=batch, worker_count=0)
    )


def dataset():
    """An iterator whose state is a dict."""
    grain = pytest.importorskip("grain")
    return iter(grain.MapDataset.range(100).shuffle(seed=3).batch(4).to_iter_dataset())


ITERATORS = {"DataLoader": loader, "MapDataset": dataset}
every_iterator = pytest.mark.parametrize("kind", ITERATORS)


def batches(iterator, count):
    return [np.asarray(next(iterator)).tolist() for _ in range(count)]


@every_iterator
@pytest.mark.parametrize("count", [1, pytest.param(4, marks=pytest.mark.multihost)])
def test_a_grain_iterator_goes_on_at_the_exact_next_batch(tmp_path, kind, count):
    """It works with a new iterator in each process, and with the saved one."""

    def run(processes):
        data = ITERATORS[kind]()
        batches(data, 2 + processes.index)
        with CheckpointManager(tmp_path) as manager:
            manager.save(1, {"n": 1}, items={"data": data})
            following = batches(data, 5)
            manager.wait_until_finished()
            fresh = ITERATORS[kind]()

            state, step = manager.restore_or(lambda: {"n": 0}, items={"data": fresh})

            assert (state, step) == ({"n": 1}, 1)
            assert batches(fresh, 5) == following
            manager.restore(items={"data": data})
            assert batches(data, 5) == following

    simulate(count, run)


@every_iterator
def test_orbax_with_grain_restores_our_iterator(tmp_path, state, kind):
    """By the handler that Grain has for Orbax."""
    checkpoint = pytest.importorskip("grain.checkpoint")
    data = ITERATORS[kind]()
    batches(data, 3)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1), items={"data": data})
    fresh = ITERATORS[kind]()

    with ocp.CheckpointManager(tmp_path) as manager:
        args = composite(
            state=ocp.args.StandardRestore(), data=checkpoint.CheckpointRestore(item=fresh)
        )
        got = manager.restore(1, **args)

    assert same(dict(got["state"]), state(1))
    assert batches(fresh, 5) == batches(data, 5)


@every_iterator
def test_we_restore_an_iterator_of_orbax_with_grain(tmp_path, state, kind):
    """Into a fresh iterator of the same kind, beside the state."""
    checkpoint = pytest.importorskip("grain.checkpoint")
    data = ITERATORS[kind]()
    batches(data, 3)
    with ocp.CheckpointManager(tmp_path) as manager:
        args = composite(
            state=ocp.args.StandardSave(state(1)), data=checkpoint.CheckpointSave(item=data)
        )
        manager.save(1, **args)
    fresh = ITERATORS[kind]()

    with CheckpointManager(tmp_path) as manager:
        got, _ = manager.restore_or(lambda: state(0), items={"data": fresh})
        (saved,) = manager.restore_items()["data"]
        manager.save(2, state(2), items={"data": fresh})

    assert same(got, state(1))
    assert batches(fresh, 5) == (wanted := batches(data, 5))
    by_hand = ITERATORS[kind]()
    by_hand.set_state(saved)
    assert batches(by_hand, 5) == wanted


@every_iterator
def test_an_iterator_of_another_kind_stays_as_it_is(tmp_path, kind):
    """A step without the item, or an item that is not a state, does not change the iterator."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"n": 1}, items={"data": {"some": "json"}})
        manager.wait_until_finished()
        fresh = ITERATORS[kind]()

        with pytest.raises(ValueError, match="restore_items"):
            manager.restore(items={"data": fresh})
        with pytest.raises(TreeMismatch, match="no item 'other'"):
            manager.restore(items={"other": fresh}, fallback=False)

        assert batches(fresh, 3) == batches(ITERATORS[kind](), 3)
