"""Patterns of public programs: train states of Flax, NNX, sharded arrays, keys, old Flax."""

from __future__ import annotations

import os

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import checkpoints, orbax_utils, train_state
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.orbax.twice import twice

pytestmark = pytest.mark.filterwarnings("ignore")

MODEL = nn.Dense(2)
MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))


def state():
    params = MODEL.init(jax.random.PRNGKey(0), jnp.ones((1, 3)))["params"]
    tx = optax.adamw(1e-3)
    return train_state.TrainState.create(apply_fn=MODEL.apply, params=params, tx=tx)


def test_a_train_state(tmp_path):
    """It is restored onto itself, onto shapes, and without a target as dicts and lists."""

    def program(ocp, path):
        target = state()
        checkpointer = ocp.PyTreeCheckpointer()
        save_args = orbax_utils.save_args_from_target(target)
        checkpointer.save(path / "a", target, save_args=save_args, force=True)
        restored = checkpointer.restore(path / "a", item=target)
        out = [type(restored), type(restored.opt_state[0]), jax.tree.leaves(restored)]
        raw = checkpointer.restore(path / "a")
        args = orbax_utils.restore_args_from_target(target)
        restored = checkpointer.restore(path / "a", item=target, restore_args=args)
        out += [raw, jax.tree.leaves(restored)]
        with ocp.CheckpointManager(path / "run") as manager:
            manager.save(0, args=ocp.args.StandardSave(target))
            manager.wait_until_finished()
            for like in (target, jax.eval_shape(lambda: target)):
                restored = manager.restore(0, args=ocp.args.StandardRestore(like))
                out += [jax.tree.leaves(restored)]
        return out

    def read(ocp, path):
        with ocp.CheckpointManager(path / "run") as manager:
            wanted = {"params": state().params}
            args = ocp.args.PyTreeRestore(item=wanted, partial_restore=True)
            return manager.restore(0, args=args)

    twice(program, tmp_path, read=read)


def test_a_state_of_nnx(tmp_path):
    """A state of NNX is restored onto an abstract one."""

    def model():
        return nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))

    def program(ocp, path):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path / "a", model())

    def read(ocp, path):
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(path / "a", nnx.eval_shape(model))
            return type(restored), jax.tree.leaves(restored), checkpointer.restore(path / "a")

    twice(program, tmp_path, read=read)


def test_sharded_arrays(tmp_path):
    """Arrays are restored in the shardings and dtypes of restore args, also those of metadata."""

    def program(ocp, path):
        split = NamedSharding(MESH, P("x", "y"))
        tree = {"w": jax.device_put(jnp.arange(16.0).reshape(4, 4), split), "b": jnp.ones(3)}
        with ocp.CheckpointManager(path / "run", item_names=("state",)) as manager:
            manager.save(1, args=ocp.args.Composite(state=ocp.args.PyTreeSave(tree)))
            manager.wait_until_finished()
            found = manager.item_metadata(1)["state"].tree
            saved = found["w"].sharding
            facts = saved.partition_spec, saved.axis_names, [*saved.shape]
            return saved.to_jax_sharding() == split, facts, found["b"].sharding.device_str

    def read(ocp, path):
        wanted = {
            "w": jax.ShapeDtypeStruct((4, 4), jnp.bfloat16, sharding=NamedSharding(MESH, P("y"))),
            "b": jax.ShapeDtypeStruct((3,), jnp.float32, sharding=NamedSharding(MESH, P())),
        }
        out = []
        with ocp.CheckpointManager(path / "run", item_names=("state",)) as manager:
            args = ocp.checkpoint_utils.construct_restore_args(wanted)
            for given in ({"item": wanted, "restore_args": args}, {"restore_args": args}, {}):
                args = ocp.args.Composite(state=ocp.args.PyTreeRestore(**given))
                out += [manager.restore(1, args=args)]
            found = manager.item_metadata(1)["state"].tree
            shardings = jax.tree.map(lambda x: x.sharding.to_jax_sharding(), found)
            args = ocp.checkpoint_utils.construct_restore_args(found, shardings)
            args = ocp.args.Composite(state=ocp.args.PyTreeRestore(restore_args=args))
            return [*out, manager.restore(1, args=args)]

    twice(program, tmp_path, read=read)


def test_keys_and_narrow_integers(tmp_path):
    """Typed keys stay typed, with and without a target; int4 stays int4."""
    tree = {
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(3), 2),
        "old": jax.random.PRNGKey(1),
        "int4": jnp.ones(4, jnp.int4),
    }

    def program(ocp, path):
        ocp.PyTreeCheckpointer().save(path / "a", tree)

    def read(ocp, path):
        args = ocp.checkpoint_utils.construct_restore_args(tree)
        restore = ocp.PyTreeCheckpointer().restore
        out = [restore(path / "a"), restore(path / "a", item=tree, restore_args=args)]
        with ocp.StandardCheckpointer() as checkpointer:
            shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
            return [*out, *(checkpointer.restore(path / "a", like) for like in (tree, shapes))]

    twice(program, tmp_path, read=read)


def test_checkpoints_of_flax(tmp_path):
    """`flax.training.checkpoints` takes a checkpointer of the drop-in."""

    def program(ocp, path):
        given = {"orbax_checkpointer": ocp.PyTreeCheckpointer(), "overwrite": True}
        for step in (3, 5):
            checkpoints.save_checkpoint(str(path / "a"), state(), step, keep=1, **given)
        return sorted(os.listdir(path / "a"))

    def read(ocp, path):
        given = {"orbax_checkpointer": ocp.PyTreeCheckpointer()}
        restored = checkpoints.restore_checkpoint(str(path / "a"), state(), **given)
        plain = checkpoints.restore_checkpoint(str(path / "a"), None, **given)
        return jax.tree.leaves(restored), plain

    twice(program, tmp_path, read=read)
