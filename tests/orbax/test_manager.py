"""Programs with a manager do the same with Orbax and with the drop-in, and each reads the other."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import stat
import tracemalloc
from fractions import Fraction
from functools import partial

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as theirs
import pytest

import jaxckpt
import jaxckpt.orbax as ours
import jaxckpt.orbax.v1 as ours_v1
from jaxckpt import SaveFailed, UnsupportedFormat
from jaxckpt.format import jsontext, names
from jaxckpt.format.step import decode_record, encode_record
from jaxckpt.testing import simulate
from tests.orbax.twice import raised, read_each, twice

METADATA = names.CHECKPOINT_METADATA

pytestmark = pytest.mark.filterwarnings("ignore")


def tree(n=0.0):
    return {"w": jnp.arange(4.0) + n, "n": np.arange(3.0), "step": 3}


def names_in(path):
    return sorted(one.name for one in path.iterdir())


def read_newest(ocp, path):
    with ocp.CheckpointManager(path / "run") as manager:
        found = manager.restore(manager.latest_step())
        return found if isinstance(found, dict) else dict(found), manager.all_steps()


def test_a_run_of_one_item(tmp_path):
    """Saves when due, returns False for old steps, restores by step, deletes what is not kept."""

    def program(ocp, path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=2)
        manager = ocp.CheckpointManager(path / "run", options=options)
        save, standard = manager.save, ocp.args.StandardSave
        out = [save(step, args=standard(tree(step))) for step in range(1, 8)]
        out += [manager.all_steps(), manager.latest_step(), manager.best_step()]
        out += [manager.should_save(step) for step in (6, 8, 9)]
        manager.wait_until_finished()
        out += [manager.all_steps(read=True), manager.directory == path / "run"]
        out += [save(6, args=standard(tree())), save(4, args=standard(tree()))]
        out += [raised(save, 6, args=standard(tree()), force=True), raised(save, 7)]
        restore = manager.restore
        out += [restore(6), restore(None, args=ocp.args.StandardRestore(tree()))]
        out += [raised(restore, 99), raised(restore, 6, ocp.args.StandardRestore())]
        out += [raised(manager.delete, 99), manager.metrics(6)]
        out += [raised(restore, 6, args=ocp.args.Composite(a=ocp.args.StandardRestore()))]
        manager.delete(4)
        manager.close()
        return [*out, manager.all_steps()]

    twice(program, tmp_path, read=read_newest)


def test_several_items_of_any_names(tmp_path):
    """Items have handlers by their args; each is restored by name, and described."""

    def program(ocp, path):
        args = ocp.args
        names = ("model_params", "opt_state", "meta")
        with ocp.CheckpointManager(path / "run", item_names=names) as manager:
            saved = args.Composite(
                model_params=args.StandardSave(tree()),
                opt_state=args.PyTreeSave(optax.adam(1.0).init({"w": jnp.ones(2)})),
                meta=args.JsonSave({"a": [1, 2]}),
            )
            out = [manager.save(0, args=saved, custom_metadata={"k": 1})]
            manager.wait_until_finished()
            wanted = args.Composite(
                model_params=args.StandardRestore(tree()), meta=args.JsonRestore()
            )
            got = manager.restore(0, args=wanted)
            out += [got, got.meta, [*got], "opt_state" in got, manager.restore(0)]
            lacking = args.Composite(other=args.StandardRestore())
            out += [raised(manager.restore, 0, args=lacking)]
            out += [raised(manager.save, 1, args=args.StandardSave(tree()))]
            found = manager.metadata(0)
            out += [found.custom_metadata, sorted(found.item_handlers), found.metrics]
            items = manager.item_metadata(0)
            out += [sorted(items), items["meta"]]
            out += [{name: (x.shape, x.dtype) for name, x in items.model_params.items()}]
        with ocp.CheckpointManager(path / "run") as manager:
            return [*out, manager.restore(0, args=args.Composite(meta=args.JsonRestore()))]

    twice(program, tmp_path, read=read_newest)


@pytest.mark.parametrize(
    ("trees", "main"),
    [
        (("ema", "state"), "state"),
        (("b", "default", "a"), "default"),
        (("default", "state"), "state"),
        (("params",), "params"),
        (("ema", "params"), None),
    ],
)
def test_the_main_item_is_that_of_the_same_step_by_orbax(tmp_path, trees, main):
    """Not the tree that comes first: `state`, `default` or the only one; else it must be named."""

    def program(ocp, path):
        args, run = ocp.args, path / "run"
        saved = {name: args.StandardSave({"name": jnp.int32(n)}) for n, name in enumerate(trees)}
        with ocp.CheckpointManager(run) as manager:
            manager.save(1, args=args.Composite(config=args.JsonSave({}), **saved))
        reads = (
            jaxckpt.open,
            jaxckpt.restore,
            lambda run: jaxckpt.convert(run, path / "copy"),
            lambda run: jaxckpt.diff(run, run),
        )
        out = [raised(read, run) for read in reads]
        if None in out:
            out += [jaxckpt.open(run).item, jaxckpt.restore(run), jaxckpt.restore(path / "copy")]
        return out

    out = twice(program, tmp_path)

    if main is None:
        assert all("several items, none named 'state'" in str(error) for error in out)
    else:
        assert out[4:] == [main, {"name": trees.index(main)}, {"name": trees.index(main)}]


def test_an_item_that_is_no_tree_is_not_the_main_one_of_several(tmp_path):
    """Records of before name the first item, of any kind."""
    args, save = ours.args, ours.args.StandardSave({"w": jnp.ones(2)})
    with ours.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=args.Composite(meta=args.JsonSave({"x": 1}), ema=save, params=save))
    file = tmp_path / "1" / names.RECORD
    record = decode_record(file.read_bytes(), file=str(file))
    file.write_bytes(encode_record(dataclasses.replace(record, item="meta")))

    with pytest.raises(jaxckpt.CheckpointNotFound, match="several items"):
        jaxckpt.restore(tmp_path / "1")


def test_items_without_a_main_one_can_be_deleted(tmp_path):
    """All but the last tree; a `state` never, wherever it comes."""
    args, save = ours.args, ours.args.StandardSave({"w": jnp.ones(2)})
    with ours.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=args.Composite(ema=save, params=save))
        manager.save(2, args=args.Composite(ema=save, state=save))
    with jaxckpt.CheckpointManager(tmp_path) as manager:
        for step, main in {1: "params", 2: "state"}.items():
            manager.delete(step, item="ema")
            with pytest.raises(ValueError, match="it is the main item"):
                manager.delete(step, item=main)

            assert list(manager.restore_items(step=step)) == [main]
            assert jaxckpt.verify(tmp_path / f"{step}").ok


def test_no_other_item_takes_the_place_of_a_deleted_one(tmp_path):
    """Of several trees without a main one, the last one left is restored only by its own name."""
    args, save = ours.args, ours.args.StandardSave({"w": jnp.ones(2)})
    with ours.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=args.Composite(ema=save, params=args.StandardSave({"w": 1})))
    with jaxckpt.CheckpointManager(tmp_path, item="params") as manager:
        assert manager.restore() == {"w": 1}
        manager.delete(1, item="params")

        with pytest.raises(jaxckpt.CheckpointNotFound, match="no item 'params'; its items are ema"):
            manager.restore()
    with jaxckpt.CheckpointManager(tmp_path, item="ema") as manager:
        assert jax.tree.map(list, manager.restore()) == {"w": [1, 1]}


def test_a_lost_state_is_damage_wherever_it_was_in_the_args(tmp_path):
    """The other tree is not restored in its place."""
    args, save = ours.args, ours.args.StandardSave({"w": jnp.ones(2)})
    with ours.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=args.Composite(ema=save, state=save))
    shutil.rmtree(tmp_path / "1" / "state")

    with pytest.raises(jaxckpt.CorruptCheckpoint, match="1/state/_METADATA is missing"):
        jaxckpt.restore(tmp_path / "1")


@pytest.mark.multihost
def test_an_item_of_json_that_only_process_0_has_is_saved(tmp_path):
    """As by Orbax, which loses one that only another process has; that is an error here."""

    def run(processes, who):
        items = {"state": ours.args.StandardSave({"n": 1})}
        if processes.index == who:
            items["config"] = ours.args.JsonSave({"a": who})
        with ours.CheckpointManager(tmp_path / str(who)) as manager:
            manager.save(1, args=ours.args.Composite(**items))
            manager.wait_until_finished()
            return manager.restore(1).config

    assert simulate(2, partial(run, who=0)) == [{"a": 0}] * 2
    with pytest.raises(jaxckpt.ProcessesDisagree, match="saves different items"):
        simulate(2, partial(run, who=1))


def test_damaged_metadata_of_a_step_is_not_another_time(tmp_path):
    """Most flipped bits leave it JSON; a directory that never had any is not damaged."""
    with ours.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ours.args.StandardSave({"w": jnp.ones(2)}))
    saved, file = ours.metadata.get_step_metadata(tmp_path / "1"), tmp_path / "1" / METADATA
    assert saved.commit_timestamp_nsecs is not None
    file.write_bytes(file.read_bytes().replace(b'"commit_timestamp_nsecs":', b'"commit_times":'))
    with pytest.raises(jaxckpt.CorruptCheckpoint, match=f"{METADATA} is damaged"):
        ours.metadata.get_step_metadata(tmp_path / "1")
    file.unlink()
    with pytest.raises(jaxckpt.CorruptCheckpoint, match=f"{METADATA} is missing"):
        ours.metadata.get_step_metadata(tmp_path / "1")

    for path in (tmp_path, tmp_path / "no"):
        with pytest.raises(ValueError, match="it is no checkpoint"):
            ours.metadata.get_step_metadata(path)


@pytest.mark.parametrize(
    ("file", "args", "handler"),
    [
        ("config/metadata", ours.args.JsonRestore(), ours.JsonCheckpointHandler()),
        (
            "key/jax_random_key_metadata/metadata",
            ours.args.JaxRandomKeyRestore(),
            ours.JaxRandomKeyCheckpointHandler(),
        ),
    ],
)
def test_a_damaged_item_of_json_is_not_restored_as_another_value(tmp_path, file, args, handler):
    """Whatever its handler is called by; most flipped bits leave it JSON."""
    items = {
        "config": ours.args.JsonSave({"lr": 0.002}),
        "key": ours.args.JaxRandomKeySave(jax.random.key(3)),
    }
    with ours.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ours.args.Composite(**items))
    name, path = file.split("/")[0], tmp_path / "1" / file
    data = path.read_bytes()
    path.write_bytes(data.replace(b"2", b"3").replace(b"typed", b"tyqed"))
    assert path.read_bytes() != data

    with ours.CheckpointManager(tmp_path) as manager:
        for given in (None, ours.args.Composite(**{name: args})):
            with pytest.raises(jaxckpt.CorruptCheckpoint, match=file):
                manager.restore(1, args=given)
    with pytest.raises(jaxckpt.CorruptCheckpoint, match=file):
        ours.Checkpointer(handler).restore(tmp_path / "1" / name)
    with pytest.raises(jaxckpt.CorruptCheckpoint, match=file):
        handler.restore(tmp_path / "1" / name)


@pytest.mark.parametrize("damage", ["other", "gone"])
def test_a_damaged_file_of_a_handler_is_not_handed_to_it(tmp_path, damage):
    class Handler(ours.CheckpointHandler):
        def save(self, directory, item):
            (directory / "n").write_text(f"{item}")

        def restore(self, directory):
            return int((directory / "n").read_text())

    checkpointer = ours.Checkpointer(Handler())
    checkpointer.save(tmp_path / "a", 5)
    assert checkpointer.restore(tmp_path / "a") == 5
    (tmp_path / "a" / "n").unlink()
    if damage == "other":
        (tmp_path / "a" / "n").write_text("4")

    with pytest.raises(jaxckpt.CorruptCheckpoint, match=r"a/n is (damaged|missing)"):
        checkpointer.restore(tmp_path / "a")


def test_an_item_that_is_none(tmp_path):
    """It is stored by its handler, and restored as None, with args for it and without."""

    def program(ocp, path):
        args = ocp.args
        state, more = args.StandardSave({"a": 1}), args.JsonSave({"b": 2})
        with ocp.CheckpointManager(path / "run") as manager:
            manager.save(0, args=args.Composite(more=more, state=state))
            manager.save(1, args=args.Composite(more=None, state=state))
            manager.wait_until_finished()
            return sorted(manager.item_metadata(1))

    def read(ocp, path):
        args = ocp.args
        asked = args.Composite(state=args.StandardRestore(), more=args.JsonRestore())
        with ocp.CheckpointManager(path / "run") as manager:
            return [dict(manager.restore(step, args=a)) for step in (0, 1) for a in (None, asked)]

    twice(program, tmp_path, read=read)


@pytest.mark.parametrize("nested", [False, True])
def test_metrics(tmp_path, nested):
    """`best_fn` ranks the steps, also those of an earlier manager."""

    def program(ocp, path):
        def best(metrics):
            return metrics["eval"]["losses"][0] if nested else metrics["loss"]

        options = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=best, best_mode="min")
        with ocp.CheckpointManager(path / "run", options=options) as manager:
            for step, loss in {1: 0.5, 2: 0.2, 3: 0.4, 4: 0.1}.items():
                metrics = {"eval": {"losses": [loss]}, "loss": -loss} if nested else {"loss": loss}
                manager.save(step, args=ocp.args.StandardSave(tree()), metrics=metrics)
            manager.wait_until_finished()
            out = [manager.best_step(), manager.metrics(4), manager.all_steps()]
        options = ocp.CheckpointManagerOptions(best_fn=best, best_mode="min")
        with ocp.CheckpointManager(path / "run", options=options) as manager:
            return [*out, manager.best_step(), manager.metadata(2).metrics]

    twice(program, tmp_path)


NAN = float("nan")


@pytest.mark.parametrize(
    "metrics",
    [[None, {"loss": 0.3}], [{"loss": NAN}, {"loss": 0.3}], [{"acc": 0.9}, {"loss": 0.3}]],
    ids=["none", "NaN", "another"],
)
def test_no_step_goes_while_there_are_fewer_than_max_to_keep(tmp_path, metrics):
    """Whether `best_fn` can rank them or not."""

    def program(ocp, path):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, best_fn=lambda m: m["loss"], keep_checkpoints_without_metrics=False
        )
        with ocp.CheckpointManager(path / "run", options=options) as manager:
            for step, given in enumerate(metrics):
                manager.save(step, args=ocp.args.StandardSave(tree()), metrics=given)
        return names_in(path / "run")

    twice(program, tmp_path)


@pytest.mark.parametrize(
    "best",
    [lambda metrics: metrics["los"], lambda metrics: metrics.get("los"), lambda metrics: 1 / 0],
    ids=["typo", "None", "another error"],
)
def test_an_error_of_best_fn_is_raised_once_it_has_to_rank(tmp_path, best):
    """Each save that makes more steps than are kept raises it; all steps are there."""

    def program(ocp, path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=best)
        with ocp.CheckpointManager(path / "run", options=options) as manager:
            save, args = manager.save, ocp.args.StandardSave(tree())
            out = [raised(save, step, args=args, metrics={"loss": 0.5}) for step in range(4)]
            manager.wait_until_finished()
            return [*out, manager.all_steps(), raised(manager.best_step)]

    out = twice(program, tmp_path)

    assert out[:2] == [None, None]
    assert out[4] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "best",
    [lambda m: m["loss"], lambda m: (float(m["loss"]), 1), lambda m: Fraction(m["loss"])],
    ids=["text", "tuple", "Fraction"],
)
def test_that_text_is_not_ranked_is_said(tmp_path, caplog, best):
    """Orbax orders it by its letters, and tuples too; here all steps stay."""
    ours.policies.warn_once.cache_clear()
    options = ours.CheckpointManagerOptions(max_to_keep=1, best_fn=best)
    with ours.CheckpointManager(tmp_path, options=options) as manager:
        for step, loss in enumerate(["9.5", "10.5", "8.5"]):
            manager.save(step, args=ours.args.StandardSave(tree()), metrics={"loss": loss})
        manager.wait_until_finished()

        assert manager.all_steps() == [0, 1, 2]
    assert sum("returns text" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("values", ["bac", [(2, 1), (1, 5), (3,)], [NAN, 1.0, 2.0], [1, 2, 2]])
def test_the_best_step_is_the_last_in_the_order_of_the_values(tmp_path, mode, values):
    """Whatever has an order, which a sign turned around only for numbers."""

    def program(ocp, path):
        options = ocp.CheckpointManagerOptions(best_fn=lambda m: values[m["n"]], best_mode=mode)
        with ocp.CheckpointManager(path / "run", options=options) as manager:
            for n in range(3):
                manager.save(n, args=ocp.args.StandardSave(tree()), metrics={"n": n})
            return manager.best_step()

    twice(program, tmp_path)


def test_a_step_that_lacks_the_metric_of_best_fn_stays(tmp_path):
    """Orbax raises the error of the function at each save, and deletes none at all."""

    def steps(ocp, path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=lambda m: m["loss"])
        with ocp.CheckpointManager(path, options=options) as manager:
            for step, metric in enumerate(["acc", "acc", "loss", "loss"]):
                with contextlib.suppress(KeyError):
                    args = ocp.args.StandardSave(tree())
                    manager.save(step, args=args, metrics={metric: 0.5})
        return names_in(path)

    both = [steps(ocp, tmp_path / ocp.__name__) for ocp in (theirs, ours)]

    assert both == [["0", "1", "2", "3"]] * 2


def test_a_manager_without_a_prefix_leaves_other_steps_alone(tmp_path):
    """Another manager keeps its steps in the same directory, under names of its own."""

    def program(ocp, path):
        seen = []
        for options in ({"step_prefix": "best"}, {"step_format_fixed_length": 4}, {}):
            options = ocp.CheckpointManagerOptions(max_to_keep=1, **options)
            with ocp.CheckpointManager(path / "run", options=options) as manager:
                seen.append(manager.all_steps())
                manager.save(3, args=ocp.args.StandardSave(tree()))
        return seen, names_in(path / "run")

    twice(program, tmp_path)


def test_steps_of_other_names_are_told(tmp_path, caplog):
    """A job that overlooked them would begin anew."""
    from jaxckpt.orbax import policies

    policies.warn_once.cache_clear()
    with jaxckpt.CheckpointManager(tmp_path, step_prefix="ck") as manager:
        manager.save(1, tree())
    with ours.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() is None
    assert "has steps of other names" in caplog.text


def test_the_newest_stays(tmp_path, caplog):
    """The newest step stays, with a warning, where `best_fn` would delete it."""
    from jaxckpt.orbax import policies

    policies.warn_once.cache_clear()
    options = ours.CheckpointManagerOptions(max_to_keep=1, best_fn=lambda metrics: metrics["x"])
    with ours.CheckpointManager(tmp_path, options=options) as manager:
        for step, x in {1: 5.0, 2: 1.0}.items():
            manager.save(step, args=ours.args.StandardSave(tree()), metrics={"x": x})
        manager.wait_until_finished()

        assert manager.all_steps() == [1, 2]
        assert manager.best_step() == 1
    assert "keeps the newest step" in caplog.text


def test_an_item_without_leaves(tmp_path):
    """It may be the state of an optimizer; only a tree that is itself empty is refused."""
    empty = optax.sgd(0.1).init({"w": jnp.ones(2)})

    def program(ocp, path):
        args = ocp.args
        saved = args.Composite(opt=args.StandardSave(empty), a=args.PyTreeSave([()]))
        with ocp.CheckpointManager(path / "run") as manager:
            manager.save(1, args=saved)
        checkpointer = ocp.Checkpointer(ocp.StandardCheckpointHandler())
        out = [raised(checkpointer.save, path / "a", args=args.StandardSave(x)) for x in ((), {})]
        shutil.rmtree(path / "a.orbax-checkpoint-tmp", ignore_errors=True)
        return out

    def read(ocp, path):
        args = ocp.args
        wanted = args.Composite(opt=args.StandardRestore(empty), a=args.PyTreeRestore())
        with ocp.CheckpointManager(path / "run") as manager:
            found = manager.restore(1, args=wanted)
            return found.opt, found.a

    twice(program, tmp_path, read=read)


def test_the_old_style(tmp_path):
    """Checkpointers, items and restore_kwargs in place of args."""

    def program(ocp, path):
        checkpointers = {
            "params": ocp.PyTreeCheckpointer(),
            "meta": ocp.Checkpointer(ocp.JsonCheckpointHandler()),
        }
        options = ocp.CheckpointManagerOptions(max_to_keep=1, create=True)
        manager = ocp.CheckpointManager(path / "run", checkpointers, options)
        out = [manager.save(s, {"params": tree(s), "meta": {"s": s}}) for s in range(3)]
        out += [manager.all_steps(), manager.restore(2)]
        out += [manager.restore(2, items={"params": tree(), "meta": None})]
        args = ocp.checkpoint_utils.construct_restore_args(tree())
        kwargs = {"restore_args": args}
        given = {"items": {"params": tree()}, "restore_kwargs": {"params": kwargs}}
        out += [manager.restore(2, **given)]
        single = ocp.CheckpointManager(path / "single", ocp.PyTreeCheckpointer())
        save_args = jax.tree.map(lambda x: ocp.SaveArgs(), tree())
        out += [single.save(5, tree(), save_kwargs={"save_args": save_args})]
        out += [single.restore(5), single.restore(5, items=tree(), restore_kwargs=kwargs)]
        checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        manager = ocp.CheckpointManager(path / "async", checkpointer)
        out += [manager.save(1, tree())]
        manager.wait_until_finished()
        return [*out, manager.restore(1), manager.item_metadata(1)["w"].shape]

    twice(program, tmp_path, read=read_newest)


RUNS = {
    "period": {"keep_period": 3, "max_to_keep": 1},
    "names": {"step_prefix": "ck", "step_format_fixed_length": 4, "max_to_keep": 2},
    "steps": {"save_on_steps": [2, 5], "save_interval_steps": 4},
    "function": {"should_save_fn": lambda step, last: step % 3 == 0},
    "moved": {"todelete_subdir": "trash", "max_to_keep": 1},
    "none": {"max_to_keep": 0, "keep_period": 4},
    "sync": {"enable_async_checkpointing": False, "max_to_keep": 1},
}


@pytest.mark.parametrize("name", RUNS)
def test_options(tmp_path, name):
    """Options decide which steps are saved and kept, and how they are named."""

    def program(ocp, path):
        options = ocp.CheckpointManagerOptions(**RUNS[name])
        with ocp.CheckpointManager(path / "run", options=options) as manager:
            args = ocp.args.StandardSave({"w": np.ones(1)})
            saved = [manager.save(step, args=args) for step in range(1, 9)]
            manager.wait_until_finished()
            return saved, manager.all_steps(), sorted(ocp.utils.checkpoint_steps(path / "run"))

    twice(program, tmp_path)


@pytest.mark.parametrize("interval", [0, None])
def test_an_interval_of_0_is_an_error(tmp_path, interval):
    """Where it has to decide: not in a save that is forced. None saves the first step only."""

    def program(ocp, path):
        options = ocp.CheckpointManagerOptions(save_interval_steps=interval)
        with ocp.CheckpointManager(path / "run", options=options) as manager:
            save, args = manager.save, ocp.args.StandardSave({"w": np.ones(1)})
            out = [raised(save, step, args=args, force=step == 2) for step in range(4)]
            manager.wait_until_finished()
            return [*out, raised(manager.should_save, 9), manager.all_steps()]

    out = twice(program, tmp_path)

    assert out[-1] == ([2] if interval == 0 else [0, 2])


def test_a_step_below_the_newest_is_saved_by_force(tmp_path):
    """As after a restore of an older step; the later steps stay."""

    def program(ocp, path):
        options = ocp.CheckpointManagerOptions(save_interval_steps=5, best_fn=lambda m: m["loss"])
        with ocp.CheckpointManager(path / "run", options=options) as manager:
            save = lambda n, **more: manager.save(  # noqa: E731
                n, args=ocp.args.StandardSave(tree(n)), metrics={"loss": n}, **more
            )
            out = [save(5), save(10), save(6), save(7, force=True), save(8, force=True)]
            out += [raised(save, 7, force=True), manager.metrics(7)]
            manager.wait_until_finished()
            out += [sorted(manager.all_steps()), save(15), manager.restore(7)]
        with ocp.CheckpointManager(path / "run", options=options) as manager:
            return [*out, manager.all_steps(), manager.best_step(), manager.restore(8)]

    out = twice(program, tmp_path, read=read_newest)

    assert out[:5] == [True, True, False, True, True]
    assert jaxckpt.verify(tmp_path / "ours" / "run").ok


def test_a_save_below_the_newest_that_fails_is_raised(tmp_path):
    """By the call, and the step is not listed; the next save goes on."""
    with ours.CheckpointManager(tmp_path) as manager:
        args = [ours.args.StandardSave({"n": n}) for n in range(3)]
        manager.save(2, args=args[2])
        manager.wait_until_finished()
        (tmp_path / "1").write_text("not a directory")
        assert isinstance(raised(manager.save, 1, args=args[1], force=True), SaveFailed | OSError)
        assert manager.all_steps() == [2]
        assert manager.save(3, args=args[0])
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3]


@pytest.mark.parametrize("api", ["v0", "v1"])
def test_a_policy_is_asked_anew_by_each_call(tmp_path, api):
    """A program may change its mind about a step, also about one that it has asked about."""

    class Wished:
        due = False

        def should_save(self, step, previous_steps, *, context):
            return self.due

    def program(ocp, path):
        wished = Wished()
        if api == "v0":
            options = ocp.CheckpointManagerOptions(save_decision_policy=wished)
            manager = ocp.CheckpointManager(path / "run", options=options)
            given = {"args": ocp.args.StandardSave({"n": 1})}
        else:
            manager = ocp.training.Checkpointer(path / "run", save_decision_policy=wished)
            given = {"state": {"n": 1}}
        with manager:
            out = [manager.should_save(1), manager.save(1, **given)]
            wished.due = True
            return [*out, manager.should_save(1), *(manager.save(n, **given) for n in (1, 2))]

    assert twice(program, tmp_path, api=api) == [False, False, True, True, True]


@pytest.mark.parametrize("how", ["delete", "reload"])
def test_a_run_without_steps_saves_the_next_one(tmp_path, how):
    """Also if it had some, which were deleted by the manager or by the program."""

    def program(ocp, path):
        options = ocp.CheckpointManagerOptions(save_interval_steps=10)
        with ocp.CheckpointManager(path / "run", options=options) as manager:
            args = ocp.args.StandardSave({"w": np.ones(1)})
            out = [
                manager.save(1, args=args),
                manager.should_save(2),
                manager.wait_until_finished(),
            ]
            if how == "delete":
                manager.delete(1)
            else:
                shutil.rmtree(path / "run" / "1")
                manager.reload()
            return [*out, manager.save(2, args=args), manager.save(3, args=args)]

    assert twice(program, tmp_path) == [True, False, None, True, False]


def test_policies_of_a_manager(tmp_path):
    """Policies take the place of the other options, and exclude them."""

    def program(ocp, path):
        policies = ocp.checkpoint_managers
        options = ocp.CheckpointManagerOptions(
            save_decision_policy=policies.FixedIntervalPolicy(3),
            preservation_policy=policies.AnyPreservationPolicy(
                [policies.LatestN(1), policies.EveryNSteps(4)]
            ),
        )
        with ocp.CheckpointManager(path / "run", options=options) as manager:
            args = ocp.args.StandardSave({"w": np.ones(1)})
            out = [[manager.save(step, args=args) for step in range(1, 14)]]
            manager.wait_until_finished()
            out += [manager.all_steps()]
        both = ocp.CheckpointManagerOptions(preservation_policy=policies.LatestN(1), max_to_keep=3)
        out += [raised(ocp.CheckpointManager, path / "none", options=both)]
        out += [raised(ocp.CheckpointManagerOptions, best_mode="x")]
        return [*out, raised(ocp.CheckpointManagerOptions, max_to_keep=-1)]

    twice(program, tmp_path)


def test_options_without_a_counterpart_are_refused(tmp_path):
    """They raise with the reason, and do not pass in silence."""

    for given in (
        {"todelete_full_path": "trash"},
        {"temporary_path_class": object},
        {"multiprocessing_options": ours.options.MultiprocessingOptions(primary_host=None)},
    ):
        with pytest.raises(NotImplementedError):
            ours.CheckpointManager(tmp_path, options=ours.CheckpointManagerOptions(**given))
    with pytest.raises(NotImplementedError, match="types that can be stored"):
        ours.PyTreeCheckpointHandler(type_handler_registry=object())


def test_permissions_of_directories(tmp_path):
    """`path_permission_mode` is for a run, its steps and their items, and obeys the umask."""

    def program(ocp, path):
        files = ocp.checkpoint_manager.FileOptions(path_permission_mode=0o770)
        options = ocp.CheckpointManagerOptions(file_options=files)
        with ocp.CheckpointManager(path / "run", options=options) as manager:
            state, facts = ocp.args.StandardSave(tree()), ocp.args.JsonSave({"a": 1})
            manager.save(1, args=ocp.args.Composite(state=state, facts=facts))
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(), file_options=files) as checkpointer:
            checkpointer.save(path / "one", tree())
        (path / "old").mkdir()
        ocp.CheckpointManager(path / "old", options=options).close()
        places = ("run", "run/1", "run/1/state", "run/1/facts", "one", "old")
        return {place: stat.filemode((path / place).stat().st_mode) for place in places}

    before = os.umask(0o027)
    try:
        found = twice(program, tmp_path)
    finally:
        os.umask(before)

    assert found["run/1"] == "drwxr-x---"


def test_a_class_below_the_manager_reads_its_steps(tmp_path):
    """In `_checkpoints`, as kauldron does."""

    def program(ocp, path):
        class Fast(ocp.CheckpointManager):
            def all_steps(self, read=False):
                return [one.step for one in self._checkpoints]

        with Fast(path / "run") as manager:
            for step in (1, 2):
                manager.save(step, args=ocp.args.StandardSave(tree()))
            infos = [*manager._checkpoints]
            found = manager.all_steps(), [one.metrics for one in infos]
            return *found, infos[0].time <= infos[1].time, ocp.checkpoint_manager.CheckpointInfo

    def read(ocp, path):
        with ocp.CheckpointManager(path / "run") as manager:
            return [one.step for one in manager._checkpoints]

    read_each(lambda ocp, path: program(ocp, path)[:-1], read, tmp_path)


def test_a_mock_of_a_manager_has_what_one_has():
    """As MaxText's tests make it."""
    for name in (name for name in dir(theirs.CheckpointManager) if not name.startswith("_")):
        assert hasattr(ours.CheckpointManager, name), name


def test_names_of_a_commit_are_taken(tmp_path):
    """Those of `path.atomicity`, which jaxckpt does not need."""

    def program(ocp, path):
        kind = ocp.path.atomicity.AtomicRenameTemporaryPath
        options = ocp.CheckpointManagerOptions(temporary_path_class=kind)
        with ocp.CheckpointManager(path / "run", options=options) as manager:
            return manager.save(1, args=ocp.args.StandardSave(tree()))

    twice(program, tmp_path)


def test_metadata_of_a_tree(tmp_path):
    """`custom_metadata` of args is stored with the tree, and each library finds it."""

    def program(ocp, path):
        args = ocp.args
        saved = args.Composite(
            a=args.PyTreeSave(tree(), custom_metadata={"lr": [1, 2]}),
            b=args.StandardSave(tree(), custom_metadata={"k": None}),
            c=args.StandardSave(tree()),
        )
        with ocp.CheckpointManager(path / "run") as manager:
            manager.save(1, args=saved, custom_metadata={"step": 1})

    def read(ocp, path):
        names, handler = ("a", "b", "c"), ocp.PyTreeCheckpointHandler
        with ocp.CheckpointManager(path / "run", item_handlers={n: handler() for n in names}) as m:
            found = m.metadata(1)
            return [found.custom_metadata, *(found.item_metadata[n].custom_metadata for n in names)]

    read_each(program, read, tmp_path)
    with pytest.raises(TypeError):
        ours.PyTreeCheckpointer().save(
            tmp_path / "x", args=ours.args.PyTreeSave(tree(), custom_metadata={"x": object()})
        )


def test_files_of_a_handler_do_not_pass_through_memory(tmp_path, limits):
    """Neither when they are saved, nor when their digests are verified."""
    size = 64 << 20
    limits(jsontext, MAX_BYTES=1 << 20)  # as for larger files

    class Handler(ours.CheckpointHandler):
        def save(self, directory, item):
            (directory / "below").mkdir()
            with open(directory / "below" / "large", "wb") as file:
                file.truncate(item)

        def restore(self, directory):
            return (directory / "below" / "large").stat().length

    checkpointer = ours.Checkpointer(Handler())
    tracemalloc.start()
    try:
        checkpointer.save(tmp_path / "a", size)
        report = jaxckpt.verify(tmp_path / "a")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert checkpointer.restore(tmp_path / "a") == size
    assert (report.ok, report.unchecked) == (True, ())
    assert peak < size // 2
    with open(tmp_path / "a" / "below" / "large", "r+b") as file:
        file.seek(size - 1)
        file.write(b"x")
    assert "SHA-256" in str(jaxckpt.verify(tmp_path / "a"))


def test_two_managers_of_one_run(tmp_path):
    """A loader beside the trainer reads; either may save."""

    def program(ocp, path):
        one, two = (ocp.CheckpointManager(path / "run") for _ in range(2))
        out = []
        for step, (saves, reads) in enumerate([(one, two), (one, two), (two, one), (one, two)]):
            saves.reload()
            out += [saves.save(step, args=ocp.args.StandardSave(tree(step)))]
            saves.wait_until_finished()
            reads.reload()
            out += [reads.latest_step(), reads.restore(step)]
        return [*out, one.all_steps(), two.all_steps()]

    twice(program, tmp_path, read=read_newest)


def test_a_closed_manager_has_no_errors(tmp_path):
    def program(ocp, path):
        with ocp.CheckpointManager(path / "run") as manager:
            manager.save(1, args=ocp.args.StandardSave(tree()))
        return manager.check_for_errors(), manager.wait_until_finished(), manager.all_steps()

    twice(program, tmp_path, read=read_newest)


def test_metadata_of_the_run(tmp_path):
    """`metadata=` is stored once, and found by later managers."""

    def program(ocp, path):
        with ocp.CheckpointManager(path / "run", metadata={"lr": 1}) as manager:
            out = [manager.metadata().custom_metadata]
        reader = ocp.CheckpointManagerOptions(read_only=True)
        for run in ("run", "none"):
            more = {"metadata": {"lr": 2}, "options": reader}
            with ocp.CheckpointManager(path / run, **more) as manager:
                out += [manager.metadata().custom_metadata]
        with ocp.CheckpointManager(path / "run") as manager:
            steps = [manager.all_steps(), manager.latest_step(), manager.best_step()]
            out += [raised(manager.restore, None)]
            return [*out, *steps, manager.metadata().custom_metadata]

    twice(program, tmp_path)


def test_nothing_is_made_for_a_step_that_is_not_there(tmp_path):
    """Where the run is not to be made, `delete` raises and leaves it so."""

    def program(ocp, path):
        options = ocp.CheckpointManagerOptions(create=False)
        with ocp.CheckpointManager(path / "run", options=options) as manager:
            return raised(manager.delete, 3), (path / "run").exists()

    assert twice(program, tmp_path)[1] is False


def test_read_only(tmp_path):
    """A reader finds the steps, and skips saves and deletions."""

    def program(ocp, path):
        with ocp.CheckpointManager(path / "run") as manager:
            manager.save(1, args=ocp.args.StandardSave(tree()))
        options = ocp.CheckpointManagerOptions(read_only=True)
        with ocp.CheckpointManager(path / "run", options=options) as manager:
            out = [manager.save(2, args=ocp.args.StandardSave(tree())), manager.delete(1)]
            return [*out, manager.all_steps(), manager.restore(1)]

    twice(program, tmp_path)


def test_handlers_of_the_program(tmp_path):
    """A program's own handler is found by its args, by name or in a registry."""

    def program(ocp, path):
        class Handler(ocp.CheckpointHandler):
            def save(self, directory, args):
                (directory / "below").mkdir()
                (directory / "below" / "text").write_text(args.item)

            def restore(self, directory, args):
                end = "!" if args.loud else ""
                return (directory / "below" / "text").read_text() + end

            def metadata(self, directory):
                return None

            def finalize(self, directory):
                pass

            def close(self):
                pass

        @ocp.args.register_with_handler(Handler, for_save=True)
        @dataclasses.dataclass
        class Save(ocp.args.CheckpointArgs):
            item: str

        @ocp.args.register_with_handler(Handler, for_restore=True)
        @dataclasses.dataclass
        class Restore(ocp.args.CheckpointArgs):
            loud: bool = False

        Composite, standard = ocp.args.Composite, ocp.args.StandardSave(tree())
        registry = ocp.DefaultCheckpointHandlerRegistry()
        handler = Handler()
        registry.add("text", Save, handler)
        registry.add("text", Restore, handler)
        both = {"text": Handler(), "tree": ocp.StandardCheckpointHandler()}
        out = []
        for i, options in enumerate([{}, {"item_handlers": both}, {"handler_registry": registry}]):
            with ocp.CheckpointManager(path / f"run{i}", **options) as manager:
                args = Composite(text=Save("hi"), tree=standard)
                out += [manager.save(1, args=args)]
                manager.wait_until_finished()
                out += [manager.restore(1, args=Composite(text=Restore(True)))]
                out += [manager.restore(1)]
        with ocp.CheckpointManager(path / "single", item_handlers=Handler()) as manager:
            out += [manager.save(1, args=Save("hi"))]
            manager.wait_until_finished()
            return [*out, manager.restore(1), manager.restore(1, args=Restore(True))]

    twice(program, tmp_path)


def test_handlers_of_grain(tmp_path):
    """Grain's handler and args, which are registered with Orbax, work unchanged."""

    def items():
        return iter(grain.MapDataset.range(10).to_iter_dataset())

    def program(ocp, path):
        taken = items()
        next(taken), next(taken)
        with ocp.CheckpointManager(path / "run") as manager:
            data = grain.PyGrainCheckpointSave(taken)
            args = ocp.args.Composite(data=data, state=ocp.args.StandardSave(tree()))
            manager.save(1, args=args)
            manager.wait_until_finished()
            fresh = items()
            args = ocp.args.Composite(data=grain.PyGrainCheckpointRestore(fresh))
            manager.restore(1, args=args)
            out = [next(fresh)]
        checkpointer = ocp.Checkpointer(grain.PyGrainCheckpointHandler())
        checkpointer.save(path / "alone", taken)
        fresh = items()
        checkpointer.restore(path / "alone", fresh)
        both = {"data": checkpointer, "state": ocp.PyTreeCheckpointer()}
        with ocp.CheckpointManager(path / "old", both) as manager:
            manager.save(1, {"data": taken, "state": tree()})
            again = items()
            manager.restore(1, {"data": again, "state": None})
        return [*out, next(fresh), next(again)]

    def read(ocp, path):
        fresh = items()
        with ocp.CheckpointManager(path / "run") as manager:
            args = ocp.args.Composite(data=grain.PyGrainCheckpointRestore(fresh))
            manager.restore(1, args=args)
        return next(fresh)

    twice(program, tmp_path, read=read)


def test_items_of_every_kind(tmp_path):
    """Keys of JAX and numpy, single arrays and JSON can be read by the other library."""
    generator = np.random.RandomState(3)

    def program(ocp, path):
        args = ocp.args
        with ocp.CheckpointManager(path / "run") as manager:
            saved = args.Composite(
                key=args.JaxRandomKeySave(jax.random.key(1)),
                old=args.JaxRandomKeySave(jax.random.PRNGKey(1)),
                tuple=args.NumpyRandomKeySave(generator.get_state()),
                dict=args.NumpyRandomKeySave(generator.get_state(legacy=False)),
                array=args.ArraySave(np.arange(3)),
                state=args.PyTreeSave({"key": jax.random.key(2), "text": "a"}),
            )
            return manager.save(1, args=saved)

    def read(ocp, path):
        args = ocp.args
        with ocp.CheckpointManager(path / "run") as manager:
            wanted = args.Composite(
                key=args.JaxRandomKeyRestore(),
                old=args.JaxRandomKeyRestore(),
                tuple=args.NumpyRandomKeyRestore(),
                dict=args.NumpyRandomKeyRestore(),
                array=args.ArrayRestore(),
                state=args.PyTreeRestore(),
            )
            return manager.restore(1, args=wanted)

    read_each(program, read, tmp_path)


def test_metrics_of_a_registry(tmp_path):
    """A program may register `metrics` as an item, which it restores as JSON."""

    def program(ocp, path):
        registry = ocp.DefaultCheckpointHandlerRegistry()
        for name, kind in (("state", "Standard"), ("metrics", "Json")):
            for verb in ("Save", "Restore"):
                registry.add(name, getattr(ocp.args, kind + verb))
        best = ocp.CheckpointManagerOptions(best_fn=lambda m: m["loss"], best_mode="min")
        with ocp.CheckpointManager(path, handler_registry=registry, options=best) as manager:
            for step, loss in enumerate((3.0, 1.0, 2.0)):
                args = ocp.args.Composite(state=ocp.args.StandardSave(tree(step)))
                manager.save(step, args=args, metrics={"loss": loss})
            metrics = ocp.args.Composite(metrics=ocp.args.JsonRestore())
            return manager.best_step(), manager.restore(manager.best_step(), args=metrics)

    read_each(program, lambda ocp, path: None, tmp_path)  # the file's name differs


@pytest.mark.parametrize("ocp", [theirs, ours], ids=["theirs", "ours"])
@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg", None])
def test_a_key_that_could_not_be_restored_is_refused(tmp_path, ocp, impl):
    """One whose implementation is not jax's default one, or no key at all; a tree can have it."""
    args, key = ocp.args, jax.random.key(3, impl=impl) if impl else jnp.ones(2)
    with ocp.CheckpointManager(tmp_path) as manager:
        with pytest.raises(TypeError, match=r"expected key_data\.(shape|dtype)"):
            manager.save(1, args=args.Composite(key=args.JaxRandomKeySave(key)))
        assert manager.all_steps() == []
        manager.save(2, args=args.Composite(tree=args.PyTreeSave({"key": key})))

        got = manager.restore(2, args=args.Composite(tree=args.PyTreeRestore()))
    assert got.tree["key"].dtype == key.dtype


@pytest.mark.parametrize("ocp", [theirs, ours], ids=["theirs", "ours"])
def test_an_unknown_item_is_refused(tmp_path, ocp):
    """An item that is not among `item_names` raises ValueError."""
    manager = ocp.CheckpointManager(tmp_path, item_names=("a",))
    args = ocp.args.Composite(b=ocp.args.StandardSave(tree()))

    with pytest.raises(ValueError, match="does not match with any registered handler"):
        manager.save(1, args=args)


def test_several_kinds_of_names_are_refused(tmp_path):
    """A format that also reads other names raises; one that does not is the one it writes."""
    module = theirs.path.step
    name, other = module.standard_name_format(step_prefix="a"), module.standard_name_format()
    several = module.composite_name_format(name, [name, other])
    one = module.composite_name_format(name, [name])

    with ours.CheckpointManager(
        tmp_path, options=ours.CheckpointManagerOptions(step_name_format=one)
    ) as manager:
        manager.save(1, args=ours.args.StandardSave({"w": 1}))
    assert (tmp_path / "a_1").is_dir()
    with pytest.raises(NotImplementedError, match="jaxckpt names all steps"):
        ours.CheckpointManager(
            tmp_path, options=ours.CheckpointManagerOptions(step_name_format=several)
        )


@pytest.mark.parametrize("manager", [ours.CheckpointManager, ours_v1.training.Checkpointer])
def test_a_newer_link_is_refused(tmp_path, manager):
    """A run does not follow it, and without it the program would start from an older state."""
    with ours.CheckpointManager(tmp_path / "before") as before:
        before.save(100, args=ours.args.StandardSave(tree()))
    run = tmp_path / "run"
    run.mkdir()
    (run / "100").symlink_to(tmp_path / "before" / "100")

    with pytest.raises(UnsupportedFormat, match=r"run/100 .* a link, which a run does not follow"):
        manager(run)

    shutil.copytree(tmp_path / "before" / "100", run / "200")
    with manager(run) as opened:
        (run / "300").symlink_to(run / "200")
        with pytest.raises(UnsupportedFormat, match="run/300"):
            opened.reload()
