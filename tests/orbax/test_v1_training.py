"""Training loops with `training.Checkpointer` run alike on `jaxckpt.orbax.v1`."""

from __future__ import annotations

import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt
from jaxckpt import SaveFailed
from jaxckpt._run.index import StepIndex
from jaxckpt._run.leases import Leases
from jaxckpt._run.owner import Ownership
from jaxckpt.storage import LocalStorage
from tests.orbax.twice import raised, twice
from tests.test_hops import hops_of

pytest.importorskip("orbax.checkpoint")
import jaxckpt.orbax.v1 as ocp

TREE = {"w": jnp.arange(8.0), "n": 3, "opt": (jnp.ones(2), {"m": np.arange(3)})}


def steps_of(checkpointer):
    return [(one.step, one.metrics, one.path.name) for one in checkpointer.checkpoints]


def test_a_step_may_be_an_array(tmp_path):
    """As a step counter of a state is."""

    def program(ocp, path):
        with ocp.training.Checkpointer(path / "run") as checkpointer:
            return checkpointer.save(jnp.int32(3), TREE), steps_of(checkpointer)

    twice(program, tmp_path, api="v1")


def test_a_training_loop(tmp_path):
    """It saves at intervals with metrics, keeps the newest, and goes on where it ended."""

    def program(ocp, path):
        policies = ocp.training.save_decision_policies
        keep = ocp.training.preservation_policies
        found = []
        for last in (5, 9):
            with ocp.training.Checkpointer(
                path / "run",
                save_decision_policy=policies.FixedIntervalPolicy(2),
                preservation_policy=keep.LatestN(2),
                custom_metadata={"who": "me"},
            ) as checkpointer:
                state, start = {"n": 0}, 0
                if checkpointer.latest is not None:
                    state, start = checkpointer.load(), checkpointer.latest.step + 1
                for step in range(start, last):
                    state = {"n": state["n"] + 1}
                    metrics = {"loss": 1 / (step + 1)}
                    found.append((checkpointer.should_save(step), step))
                    found.append(checkpointer.save(step, state, metrics=metrics))
                found.append(steps_of(checkpointer))
                found.append(checkpointer.root_metadata().custom_metadata)
        return found

    def read(ocp, path):
        with ocp.training.Checkpointer(path / "run") as checkpointer:
            return checkpointer.load(), steps_of(checkpointer), ocp.load(path / "run" / "6")

    twice(program, tmp_path, read=read, api="v1")


def test_what_the_calls_return_and_raise(tmp_path):
    """For steps that are there, missing or below the newest, and for items."""

    def program(ocp, path):
        with ocp.training.Checkpointer(path / "run") as c:
            found = [c.latest, c.checkpoints, raised(c.load), str(c.directory) == str(path / "run")]
            found += [c.save(5, TREE, custom_metadata={"x": 1}), raised(c.save, 5, TREE)]
            found += [c.save(3, TREE), c.should_save(5), c.should_save(6), c.should_save(2)]
            found += [c.save_async(7, TREE).result(), c.is_saving_in_progress()]
            items = {"model": TREE, "words": {"a": "b"}}
            found += [c.save_checkpointables(8, items), raised(c.load, 8), raised(c.load, 99)]
            found += [raised(c.save_checkpointables, 9, {}), raised(c.load_async)]
            metadata = c.metadata(5)
            found += [metadata.step, metadata.metrics, metadata.custom_metadata]
            found += [sorted(metadata.metadata), metadata.path.name, metadata.time is not None]
            found += [sorted(c.checkpointables_metadata(8).metadata)]
            found += [raised(c.delete, 99), c.delete(99, missing_ok=True), raised(c.delete, "x")]
            found += [c.delete(8, checkpointable_name="words"), c.load_checkpointables(8)]
            found += [raised(c.delete, 8, checkpointable_name="model"), raised(c.delete, -1)]
            found += [c.delete_async(7).result(), [one.step for one in c.checkpoints]]
            return found, c.reload(), c.wait()

    def read(ocp, path):
        like = TREE | {"w": jax.ShapeDtypeStruct((8,), jnp.bfloat16)}
        with ocp.training.Checkpointer(path / "run") as c:
            latest = c.load(c.latest, checkpointable_name="model")
            return latest, c.load(5, like), c.load_checkpointables(8, {"model": TREE})

    twice(program, tmp_path, read=read, api="v1")


def test_steps_are_overwritten_and_forced(tmp_path):
    """The newest by `overwrite`; a step below it by `force`."""

    def program(ocp, path):
        with ocp.training.Checkpointer(path / "run") as c:
            found = [c.save(5, {"n": 1}), c.save(5, {"n": 2}, overwrite=True)]
            found += [c.save(3, {"n": 3}, force=True), steps_of(c)]
            return found, c.load(5), c.load(3), c.save(6, {"n": 6}), steps_of(c)

    twice(program, tmp_path, api="v1")
    with jaxckpt.CheckpointManager(tmp_path / "ours" / "run") as manager:
        assert manager.all_steps() == [3, 5, 6]
        assert all(report.ok for report in manager.scrub().values())


def test_a_step_below_the_newest_is_replaced_and_not_lost(tmp_path):
    """Orbax deletes it there, and then saves nothing."""
    with ocp.training.Checkpointer(tmp_path) as c:
        assert c.save(1, {"n": 1})
        assert c.save(2, {"n": 2})

        assert c.save(1, {"n": 3}, overwrite=True, metrics={"loss": 1.0})
        assert raised(c.save, 1, {"x": object()}, overwrite=True)

        assert c.load(1) == {"n": 3}
        assert c.checkpoints[0].metrics == {"loss": 1.0}


beside_the_manager = pytest.mark.parametrize(
    ("step", "options"),
    [(2, {"overwrite": True}), (1, {"overwrite": True}), (0, {"force": True})],
    ids=["the newest", "an older one", "below"],
)


@beside_the_manager
def test_the_first_save_may_replace_a_step(tmp_path, step, options):
    """Or add one below the newest."""
    with ocp.training.Checkpointer(tmp_path) as c:
        assert [c.save(1, {"n": 1}), c.save(2, {"n": 2})] == [True, True]

    with ocp.training.Checkpointer(tmp_path) as c:
        assert c.save(step, {"n": -1}, **options)
        assert c.save(3, {"n": 3})

    assert jaxckpt.restore(tmp_path / str(step)) == {"n": -1}
    assert jaxckpt.verify(tmp_path).ok


@beside_the_manager
def test_a_run_that_another_job_took_over_is_not_changed(tmp_path, step, options):
    """Nor is a step added to it."""
    c = ocp.training.Checkpointer(tmp_path)
    assert [c.save(1, {"n": 1}), c.save(2, {"n": 2})] == [True, True]
    index = StepIndex(LocalStorage(), str(tmp_path))
    other = Ownership(Leases(index))
    other.open()
    other.fence()
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    for _ in range(2):  # the first one leaves nothing that lets the second one through
        with pytest.raises(SaveFailed, match="opened for writing by another job"):
            c.save(step, {"n": -1}, **options)

    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    assert [one.step for one in c.checkpoints] == [1, 2]


@pytest.mark.parametrize("policy", ["all", "own"])
def test_policies(tmp_path, policy):
    """Those of Orbax and of the program; a class of its own sees the steps and the metrics."""

    class Even:
        def should_save(self, step, previous_steps, *, context):
            assert [one.step for one in previous_steps] == [*range(0, step.step, 2)][-2:]
            is_free = not context.is_saving_in_progress
            return step.step % 2 == context.multiprocessing_options.primary_host and is_free

    class Later:
        def should_preserve(self, checkpoints, *, context):
            return [one.step >= checkpoints[-1].step - 2 for one in checkpoints]

    def program(ocp, path):
        saves = ocp.training.save_decision_policies
        keeps = ocp.training.preservation_policies
        save, keep = Even(), Later()
        if policy == "all":
            rules = [saves.SpecificStepsPolicy([3]), saves.FixedIntervalPolicy(4)]
            save = saves.AnySavePolicy([saves.InitialSavePolicy(), *rules])
            best = keeps.BestN(get_metric_fn=lambda m: m["loss"], reverse=True, n=1)
            keep = keeps.AnyPreservationPolicy([best, keeps.LatestN(1), keeps.EveryNSteps(4)])
        options = {"save_decision_policy": save, "preservation_policy": keep}
        with ocp.training.Checkpointer(path / "run", **options) as c:
            saved = [c.save(n, {"n": n}, metrics={"loss": abs(n - 3.0)}) for n in range(9)]
            return saved, steps_of(c)

    twice(program, tmp_path, api="v1")


def test_names_of_steps(tmp_path):
    """A prefix and a fixed length; the format finds the steps."""

    def program(ocp, path):
        named = ocp.path.step.standard_name_format(step_prefix="ck", step_format_fixed_length=4)
        with ocp.training.Checkpointer(path / "run", step_name_format=named) as c:
            found = [c.save(3, {"n": 1}), c.save(12, {"n": 2}), steps_of(c), c.load(3)]
        found += [sorted((one.step, one.path.name) for one in named.find_all(path / "run"))]
        found += [named.find_step(path / "run", 12).step, named.build_name(7)]
        return [*found, raised(named.find_step, path / "run", 99)]

    def read(ocp, path):
        named = ocp.path.step.standard_name_format(step_prefix="ck", step_format_fixed_length=4)
        with ocp.training.Checkpointer(path / "run", step_name_format=named) as c:
            return c.load(), steps_of(c)

    twice(program, tmp_path, read=read, api="v1")


def test_a_closed_one_saves_on(tmp_path):
    """And deletes, as Orbax's does; the end of the program gives the run back, if not `close`."""

    def program(ocp, path):
        c = ocp.training.Checkpointer(path)
        c.close()
        saved = [c.save(1, {"n": 1}), c.save_async(2, {"n": 2}).result(), c.should_save(3)]
        c.close()
        saved += [c.load(2), c.save(3, {"n": 3}), c.delete(1)]
        c.close()
        c.close()
        return saved, steps_of(c)

    twice(program, tmp_path, read=lambda ocp, path: ocp.load(path / "3"), api="v1")


def test_a_foreign_name_is_refused(tmp_path):
    """With an error that says what to do."""

    class Odd:
        def build_name(self, step):
            return f"step-{step}"

    with pytest.raises(NotImplementedError, match="step_prefix"):
        ocp.training.Checkpointer(tmp_path, step_name_format=Odd())


@pytest.mark.parametrize("kind", ["v0", "v1"])
def test_a_step_that_is_not_due_costs_no_request(tmp_path, kind):
    """Neither of a manager nor of a checkpointer; on a bucket it would be one per training step."""
    from jaxckpt.orbax import CheckpointManager, CheckpointManagerOptions, args

    if kind == "v0":
        options = CheckpointManagerOptions(save_interval_steps=100)
        run = CheckpointManager(tmp_path, options=options)
    else:
        policy = ocp.training.save_decision_policies.FixedIntervalPolicy(100)
        run = ocp.training.Checkpointer(tmp_path, save_decision_policy=policy)

    def save(step):
        return run.save(
            step, **({"args": args.StandardSave(TREE)} if kind == "v0" else {"state": TREE})
        )

    with run:
        assert save(100)
        run.wait_until_finished() if kind == "v0" else run.wait()
        run.should_save(101)

        saved = []
        hops = hops_of(lambda: saved.extend(save(step) for step in range(101, 110)))

        assert (saved, hops.storage_calls) == ([False] * 9, 0)
        assert save(200)


def test_permissions_of_directories(tmp_path):
    """`path_permission_mode` is for a run, its steps and single checkpoints."""

    def program(ocp, path):
        options = ocp.options.FileOptions(path_permission_mode=0o700)
        with ocp.Context(file_options=options):
            ocp.save(path / "one", TREE)
            with ocp.training.Checkpointer(path / "run") as c:
                c.save(1, TREE)
        places = ("one", "run", "run/1", "run/1/state")
        return {place: stat.filemode((path / place).stat().st_mode) for place in places}

    assert twice(program, tmp_path, api="v1")["run/1"] == "drwx------"


def test_the_callback_of_each_commit(tmp_path):
    """Also of a step that replaces another one, or is below the newest."""

    def program(ocp, path):
        called, saved = [], []
        options = ocp.options.AsyncOptions(post_finalization_callback=lambda: called.append(1))
        with ocp.training.Checkpointer(path, context=ocp.Context(async_options=options)) as c:
            for step, more in ((1, {}), (2, {}), (2, {"overwrite": True}), (0, {"force": True})):
                saved.append((c.save(step, TREE, **more), len(called)))
        return saved

    assert twice(program, tmp_path, api="v1") == [(True, n) for n in range(1, 5)]


def test_cancel_and_callbacks(tmp_path):
    """A cancelled save leaves no step and raises nothing later."""
    called = []
    context = ocp.Context()
    context.asynchronous.post_finalization_callback = lambda: called.append(1)
    with ocp.training.Checkpointer(tmp_path, context=context) as c:
        assert c.save(1, {"n": 1})
        c.save_async(2, {"w": np.ones(100)})
        c.cancel(2)
        assert [one.step for one in c.checkpoints] == [1]
        assert c.save(3, {"n": 3})
    assert len(called) >= 2
