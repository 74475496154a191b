"""The drop-in for Orbax saves to buckets and restores from them, as on a file system."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt.orbax as ocp
import jaxckpt.orbax.v1 as ocp1
from jaxckpt.errors import StepExists


@pytest.fixture(
    params=[
        pytest.param("moto_server", marks=pytest.mark.slow),
        "gcs_server",
        pytest.param("azurite_server", marks=pytest.mark.slow),
    ]
)
def root(request, use_store):
    server = use_store(request.getfixturevalue(request.param))
    return f"{server.scheme}://{server.bucket}/runs"


def a_tree(step=0):
    return {"w": jnp.arange(8.0) + step, "b": (np.ones(3), np.zeros(2)), "step": step}


def assert_same(found, step=0):
    """Compares with the tree, in Orbax's types: lists for tuples."""
    wanted = a_tree(step) | {"b": [*a_tree(step)["b"]]}
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(wanted)))


def test_a_manager_saves_restores_and_deletes(root):
    """In the style with args, with metrics, JSON and free names."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    with ocp.CheckpointManager(f"{root}/a", options=options, metadata={"lr": 1}) as manager:
        for step in range(4):
            saved = ocp.args.Composite(
                params=ocp.args.StandardSave(a_tree(step)), config=ocp.args.JsonSave({"n": step})
            )
            assert manager.save(step, args=saved)
        manager.wait_until_finished()
        assert not manager.save(3, args=saved)

    with ocp.CheckpointManager(f"{root}/a") as manager:
        assert manager.all_steps() == [2, 3]
        assert manager.metadata().custom_metadata == {"lr": 1}
        wanted = {"params": ocp.args.StandardRestore(), "config": ocp.args.JsonRestore()}
        found = manager.restore(3, args=ocp.args.Composite(**wanted))
        assert_same(found.params, 3)
        assert found.config == {"n": 3}
        assert manager.item_metadata(2).params.tree["w"].shape == (8,)
        with pytest.raises(FileNotFoundError):
            manager.restore(1, args=ocp.args.Composite(**wanted))


def test_a_manager_in_the_old_style(root):
    """With a checkpointer, items and a target."""
    with ocp.CheckpointManager(f"{root}/b", ocp.PyTreeCheckpointer()) as manager:
        manager.save(1, a_tree(1))
        assert_same(manager.restore(1), 1)
        assert isinstance(manager.restore(1, items=a_tree())["b"], tuple)


def test_checkpointers(root):
    """One checkpoint, whose items are files and trees; `force` deletes it first there."""
    for make in (ocp.PyTreeCheckpointer, ocp.StandardCheckpointer):
        with make() as checkpointer:
            path = f"{root}/{make.__name__}"
            checkpointer.save(path, a_tree())
            if make is ocp.StandardCheckpointer:
                checkpointer.wait_until_finished()
            with pytest.raises((ValueError, StepExists)):
                checkpointer.save(path, a_tree())
            checkpointer.save(path, a_tree(5), force=True)
        assert_same(make().restore(path), 5)
    assert_same(ocp.PyTreeCheckpointHandler().restore(path), 5)


def test_version_1(root):
    """Trees, items and a run."""
    ocp1.save(f"{root}/c", a_tree())
    assert_same(ocp1.load(f"{root}/c"))
    ocp1.save_checkpointables_async(f"{root}/d", {"x": a_tree(1), "j": {"n": 1}}).result()
    assert_same(ocp1.load_checkpointables(f"{root}/d")["x"], 1)
    with ocp1.training.Checkpointer(f"{root}/run") as checkpointer:
        checkpointer.save(1, a_tree(1))
        checkpointer.save_async(2, a_tree(2)).result()
        assert [found.step for found in checkpointer.checkpoints] == [1, 2]
        assert_same(checkpointer.load(), 2)
    assert ocp1.delete(f"{root}/c")
    with pytest.raises((ValueError, FileNotFoundError)):
        ocp1.load(f"{root}/c")
