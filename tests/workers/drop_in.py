"""Saves and restores through the drop-in for Orbax, in several processes at once."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from jaxckpt.multihost import current, playing
from jaxckpt.storage import locate
from tests.waiting import wait_until
from tests.workers.manages import check_state, state_at


def _target():
    import jax

    def abstract(array):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)

    return jax.tree.map(abstract, state_at(0))


@contextlib.contextmanager
def _noted(path):
    """Makes a file at the end of the `with`."""
    try:
        yield
    finally:
        Path(path).touch()


def _wait_for_call(index, is_past):
    """Waits until another process waits for the others in its first call, or is past that."""
    rounds = current().service

    def is_there():
        keys = rounds.under("jaxckpt/gather", timeout_s=60.0)
        return is_past() or any(key.endswith(f"/from/{index}") for key in keys)

    wait_until(is_there)


def clears_run(me, root):
    """Process 0 removes the steps of a run while the other process has begun to open it."""
    import jaxckpt.orbax as ocp

    if me.index == 0:
        _wait_for_call(1, Path(root, "opened").exists)
        shutil.rmtree(f"{root}/run")
    options = ocp.CheckpointManagerOptions(async_options=ocp.AsyncOptions(timeout_secs=20))
    with _noted(f"{root}/opened"):
        manager = ocp.CheckpointManager(f"{root}/run", options=options)
    with manager:
        latest = manager.latest_step()
        saved = manager.save(1, args=ocp.args.StandardSave(state_at(1)))
        manager.wait_until_finished()
        return [latest, saved, manager.all_steps()]


def clears_checkpoint(me, root):
    """Process 0 removes a checkpoint while the other process has begun to replace it."""
    import jaxckpt.orbax as ocp

    if me.index == 0:
        _wait_for_call(1, Path(root, "called").exists)
        shutil.rmtree(f"{root}/a")
    with ocp.StandardCheckpointer() as checkpointer:
        with _noted(f"{root}/called"):
            checkpointer.save(f"{root}/a", state_at(1))
        checkpointer.wait_until_finished()
        check_state(checkpointer.restore(f"{root}/a", _target()), 1)
    return True


def saves_late(me, url, env):
    """Process 0 is in its call, or has begun to write, when the other process makes the call."""
    import jaxckpt.orbax as ocp

    os.environ.update(env)
    path = f"{url}/a"
    with ocp.StandardCheckpointer() as checkpointer:
        if me.index == 1:
            storage, where = locate(path)
            _wait_for_call(0, lambda: storage.kind(where) is not None)
        checkpointer.save(path, state_at(1))
        checkpointer.wait_until_finished()
        check_state(checkpointer.restore(path, _target()), 1)
    return True


def reads_late(me, root):
    """A step comes when process 0 has listed the run for all, and before the other opens it."""
    import jaxckpt.orbax as ocp

    if me.index == 0:  # other readers meet nobody
        reader = ocp.CheckpointManagerOptions(read_only=True)
        assert ocp.CheckpointManager(f"{root}/run", options=reader).all_steps(read=True) == [1]
    else:
        _wait_for_call(0, Path(root, "opened").exists)
        shutil.copytree(f"{root}/run/1", f"{root}/run/2")
    options = ocp.CheckpointManagerOptions(read_only=True, single_host_load_and_broadcast=True)
    with _noted(f"{root}/opened"):
        manager = ocp.CheckpointManager(f"{root}/run", options=options)
    found = [manager.latest_step()]
    return [*found, manager.all_steps(read=True)]


def evaluates(me, root):
    """Waits for steps; the second one comes right after process 0 has looked for the first."""
    import jaxckpt.orbax as ocp

    class Slow(ocp.path.step.StandardNameFormat):
        def find_all(self, base_path):
            if me.index == 1:  # which does not look
                me.wait_for("step 2")
            steps = [*super().find_all(base_path)]
            me.reach("found")
            me.wait_for("step 2")
            return steps

    options = {"seconds_to_sleep": 0.01, "timeout": 60, "step_name_format": Slow()}
    found = ocp.checkpoint_utils.checkpoints_iterator(root, **options)
    steps = [next(found), next(found)]
    return [*steps, *ocp.checkpoint_utils.checkpoints_iterator(f"{root}/none", timeout=0)]


def waits_long(me, root):
    """Waits for a step that comes when process 0 has ended two rounds."""
    import jaxckpt.orbax as ocp

    processes = current().within(10.0)

    class Late(ocp.path.step.NameFormat):
        def find_all(self, base_path):
            assert me.index == 0
            rounds = processes.service.under("jaxckpt/agree", timeout_s=60.0)
            there = sum(key.endswith("/outcome") for key in rounds) >= 2
            return [ocp.path.step.Metadata(5, base_path)] if there else []

    wait = ocp.checkpoint_utils.wait_for_new_checkpoint
    with playing(processes), wait(root, step_name_format=Late(), seconds_to_sleep=0.01) as step:
        return step


def leaves_open(me, root):
    """Saves, and does not close what it has opened."""
    import jaxckpt.orbax as ocp
    import jaxckpt.orbax.v1 as v1

    manager = ocp.CheckpointManager(f"{root}/v0")
    checkpointer = v1.training.Checkpointer(f"{root}/v1")
    for step in (1, 2):
        assert manager.save(step, args=ocp.args.StandardSave(state_at(step)))
        assert checkpointer.save(step, state_at(step))


def v0(me, root):
    """Both styles of a manager, and checkpointers; process 0 alone has all metrics."""
    import jax

    import jaxckpt.orbax as ocp

    options = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=lambda metrics: metrics["score"])
    with ocp.CheckpointManager(f"{root}/run", options=options) as manager:
        saved = []
        for step in range(4):
            items = ocp.args.Composite(
                state=ocp.args.StandardSave(state_at(step)), config=ocp.args.JsonSave({"n": step})
            )
            metrics = {"score": step} if step % 2 or jax.process_index() == 0 else None
            saved.append(manager.save(step, args=items, metrics=metrics))
        manager.wait_until_finished()
        wanted = {"state": ocp.args.StandardRestore(_target()), "config": ocp.args.JsonRestore()}
        found = manager.restore(None, args=ocp.args.Composite(**wanted))
        check_state(found.state, 3)
        steps = manager.all_steps(), manager.best_step(), found.config
        manager.delete(2)
        left = manager.all_steps()
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(f"{root}/flat", state_at(5))
        checkpointer.save(f"{root}/flat", state_at(6), force=True)
        args = ocp.checkpoint_utils.construct_restore_args(_target())
        check_state(checkpointer.restore(f"{root}/flat", restore_args=args), 6)
    return [saved, steps, left]


def local_arrays(me, root):
    """Each process saves its own array of jax, which raises, and its own array of numpy."""
    import jax.numpy as jnp
    import numpy as np

    import jaxckpt.orbax as ours
    import jaxckpt.orbax.v1 as v1

    errors = []
    for save in (ours.StandardCheckpointer().save, ours.PyTreeCheckpointer().save, v1.save):
        try:
            save(f"{root}/a", {"w": jnp.full(2, me.index)})
        except ValueError as error:
            errors.append(f"{error}".split(":")[0])
    with ours.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(f"{root}/b", {"n": np.full(2, me.index + 1)})
        return errors, checkpointer.restore(f"{root}/b")["n"].tolist()


def files(me, root):
    """A handler writes a file in each process, and fails in one; what is not there is deleted."""
    import dataclasses

    import jaxckpt.orbax as ocp
    import jaxckpt.orbax.v1 as v1

    class Handler(ocp.CheckpointHandler):
        def save(self, directory, args):
            if args.value == 11 and args.fails:
                raise RuntimeError("no room")
            (directory / "common.txt").write_text(f"{me.index}")
            (directory / "own").mkdir()
            (directory / "own" / f"{me.index}.txt").write_text(f"{args.value}")

        def restore(self, directory, args):
            names = ["common.txt", *(f"own/{i}.txt" for i in range(me.count))]
            return [(directory / name).read_text() for name in names]

    @ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
    @dataclasses.dataclass
    class Args(ocp.args.CheckpointArgs):
        value: int = 0
        fails: bool = False

    with ocp.CheckpointManager(f"{root}/run") as manager:
        manager.save(1, args=ocp.args.Composite(data=Args(10 + me.index)))
        manager.wait_until_finished()
        found = manager.restore(1, args=ocp.args.Composite(data=Args())).data
        try:
            manager.save(2, args=ocp.args.Composite(data=Args(10 + me.index, fails=True)))
            manager.wait_until_finished()
        except Exception as error:
            failure = type(error).__name__
        manager.save(3, args=ocp.args.Composite(data=Args(10 + me.index)))
        manager.wait_until_finished()
        steps = manager.all_steps()
    try:
        v1.delete(f"{root}/none")
    except FileNotFoundError as error:
        return [found, failure, steps, str(error), v1.delete(f"{root}/none", missing_ok=True)]


def v1(me, root):
    """Functions and a `Checkpointer`."""
    import jaxckpt.orbax.v1 as ocp

    ocp.save(f"{root}/a", state_at(1))
    ocp.save_async(f"{root}/b", state_at(2)).result()
    check_state(ocp.load(f"{root}/b", _target()), 2)
    check_state(ocp.load(f"{root}/a", _target()), 1)
    ocp.save_checkpointables(f"{root}/c", {"x": state_at(3), "json": {"n": 3}})
    found = ocp.load_checkpointables(f"{root}/c", {"x": _target(), "json": None})
    check_state(found["x"], 3)
    keep = ocp.training.preservation_policies.LatestN(2)
    with ocp.training.Checkpointer(f"{root}/run", preservation_policy=keep) as checkpointer:
        for step in range(3):
            checkpointer.save(step, state_at(step), metrics={"score": step})
        checkpointer.save_async(3, state_at(3)).result()
        check_state(checkpointer.load(3, _target()), 3)
        steps = [found.step for found in checkpointer.checkpoints]
    if me.index > 0:  # process 0 deletes it before the other one looks
        wait_until(lambda: not os.path.exists(f"{root}/a"))
    ocp.delete(f"{root}/a", missing_ok=True)
    return [steps, found["json"], ocp.is_orbax_checkpoint(f"{root}/a")]
