"""The main item may have any name, or be the checkpoint itself: every reader finds it."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import CheckpointManager, CorruptCheckpoint, ProcessesDisagree
from jaxckpt.format import names
from jaxckpt.testing import simulate
from tests.commandline import cli, said_json
from tests.strategies import same

ocp = pytest.importorskip("orbax.checkpoint")
from orbax.checkpoint import v1  # noqa: E402

# Orbax warns about each restore without a target.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")

LAYOUTS = ["default", "my model", None]
every_layout = pytest.mark.parametrize("item", LAYOUTS)
counts = pytest.mark.parametrize("count", [1, pytest.param(4, marks=pytest.mark.multihost)])


@pytest.fixture
def tree(mesh):
    """Large and small arrays, sharded and on the host, a key, and a text."""
    w = jax.device_put(jnp.arange(80_000.0).reshape(8, -1), NamedSharding(mesh, P("x", "y")))
    return {"w": w, "b": np.arange(3), "key": jax.random.key(1), "name": "a", "n": 3}


def target(tree):
    """A target for the readers of Orbax, which refuse text."""
    return {name: leaf for name, leaf in tree.items() if name != "name"}


# --- one checkpoint ----------------------------------------------------------------------------


@every_layout
@counts
def test_every_reader_finds_the_tree(tmp_path, tree, item, count):
    """A restore, the commands, and what copies or compares checkpoints."""
    path = tmp_path / "a"
    simulate(count, lambda _: jaxckpt.save(path, tree, item=item))

    assert same(jaxckpt.restore(path), tree)
    opened = jaxckpt.open(path)
    assert (opened.item, opened.items) == (item or "", (item or "",))
    report = jaxckpt.verify(path)
    assert report.ok, report
    assert not report.unchecked
    jaxckpt.convert(path, tmp_path / "converted")
    assert jaxckpt.diff(path, tmp_path / "converted").equal
    assert same(jaxckpt.restore(jaxckpt.fork(path, tmp_path / "run", step=5)), tree)
    assert jaxckpt.verify(tmp_path / "run" / "5").ok
    for command in ("show", "verify", "du"):
        code, out, err = cli(command, path)
        assert (code, err) == (0, ""), out
    assert same(jaxckpt.restore(path / item if item else path), tree)


@every_layout
@counts
def test_orbax_reads_it(tmp_path, tree, item, count):
    """With v0 from the directory of the tree, with v1 from that of the checkpoint."""
    path, tree = tmp_path / "3", target(tree)
    simulate(count, lambda _: jaxckpt.save(path, tree, item=item))
    at = path / item if item else path

    with ocp.StandardCheckpointer() as checkpointer:
        got = [checkpointer.restore(at, tree), checkpointer.restore(at)]
    got += [ocp.PyTreeCheckpointer().restore(at), v1.load(path), v1.load(path, tree)]
    got += [v1.load(path, checkpointable_name=item)]

    assert all(same(dict(one), tree) for one in got)
    shape = v1.metadata(path).metadata["w"].shape
    assert shape == tree["w"].shape


def test_the_files_are_those_of_orbax(tmp_path, tree):
    """A flat checkpoint has the files of a StandardCheckpointer, and ours."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", target(tree))

    jaxckpt.save(tmp_path / "ours", target(tree), item=None)

    theirs, ours = ({f.name for f in (tmp_path / n).iterdir()} for n in ("orbax", "ours"))
    assert ours - theirs == {names.RECORD, names.CHUNK_SUMS}
    assert theirs - ours == {"ocdbt.process_0"}  # one process needs no database of its own


def test_the_record_of_the_usual_name_is_as_it_was(tmp_path):
    """Releases that know no other name read it."""
    jaxckpt.save(tmp_path / "a", {"n": 1})
    jaxckpt.save(tmp_path / "b", {"n": 1}, item="b")

    a, b = (json.loads((tmp_path / n / names.RECORD).read_text().split("\n")[0]) for n in "ab")

    assert [*a] == ["version", "writer", "token", "name", "lineage", "phases", "files"]
    assert b["item"] == "b"


@pytest.mark.parametrize("before", ["state", *LAYOUTS])
@pytest.mark.parametrize("after", ["state", *LAYOUTS])
def test_a_checkpoint_is_replaced_by_one_of_another_layout(tmp_path, tree, before, after):
    """Nothing of the old tree stays, and files of other programs move along."""
    path = tmp_path / "a"
    jaxckpt.save(path, tree | {"n": 1}, item=before)
    (path / "notes.txt").write_text("mine")

    jaxckpt.save(path, tree, item=after, overwrite=True)

    assert same(jaxckpt.restore(path), tree)
    assert jaxckpt.verify(path).ok
    jaxckpt.save(tmp_path / "b", tree, item=after)
    there = {file.relative_to(tmp_path / "b").parts[0] for file in (tmp_path / "b").rglob("*")}
    assert {file.name for file in path.iterdir()} == there | {"notes.txt"}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b"]


def test_a_flat_checkpoint_of_orbax_is_replaced_by_a_flat_one(tmp_path, tree):
    """None of its files counts as another program's."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", target(tree))

    jaxckpt.save(tmp_path / "a", {"n": 1}, item=None, overwrite=True)

    assert jaxckpt.restore(tmp_path / "a") == {"n": 1}


def test_damage_in_a_flat_checkpoint_is_named(tmp_path, tree):
    """With the leaf and the file; a file that is lost, too."""
    jaxckpt.save(tmp_path / "a", tree, item=None)
    file = max((tmp_path / "a" / "d").iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

    with pytest.raises(CorruptCheckpoint) as caught:
        jaxckpt.restore(tmp_path / "a")
    found = jaxckpt.verify(tmp_path / "a").problems
    (tmp_path / "a" / "_sharding").unlink()
    lost = jaxckpt.verify(tmp_path / "a").problems

    assert caught.value.leaf == "w"
    assert [problem.leaf for problem in found] == ["w"]
    assert [problem.file for problem in lost] == [f"{tmp_path}/a/_sharding"]


@pytest.mark.parametrize(
    "name", ["", ".a", "a/b", "metrics", "_METADATA", "d", names.RECORD, "x" * 129, 7]
)
def test_a_name_that_would_be_mistaken_is_refused(tmp_path, name):
    """By a save and by a manager; nothing is written."""
    for call in (
        lambda: jaxckpt.save(tmp_path / "a", {"n": 1}, item=name),
        lambda: jaxckpt.save_async(tmp_path / "a", {"n": 1}, item=name),
        lambda: CheckpointManager(tmp_path / "run", item=name),
    ):
        with pytest.raises(ValueError, match="item"):
            call()

    assert not list(tmp_path.iterdir())


@pytest.mark.multihost
def test_processes_that_name_it_differently_save_nothing(tmp_path):
    """Each error says which process it is, and which name it has."""

    def save(processes):
        name = "b" if processes.index == 1 else "a"
        with pytest.raises(ProcessesDisagree, match=r"process 1: .*different items.*: b"):
            jaxckpt.save(tmp_path / "x", {"n": 1}, item=name)

    simulate(3, save)

    assert not list(tmp_path.iterdir())


# --- a run --------------------------------------------------------------------------------------


@counts
@pytest.mark.parametrize("item", ["default", "model"])
def test_a_run_may_name_its_state(tmp_path, tree, item, count):
    """Beside other trees too: a manager of any name restores it, and so do the commands."""
    items = {"ema": {"w": jnp.ones(3)}, "config": {"lr": 0.1}}

    def save(_):
        with CheckpointManager(tmp_path, item=item) as manager:
            manager.save(1, tree, items=items, metrics={"loss": 0.5})
            with pytest.raises(ValueError, match="reserved"):
                manager.save(2, tree, items={item: 1})

    simulate(count, save)

    for name in ("state", item):
        with CheckpointManager(tmp_path, mode="r", item=name) as manager:
            assert same(manager.restore(), tree)
            assert same(manager.restore_items(1, items={item: tree})[item], tree)
            assert manager.restore_items()["ema"]["w"].tolist() == [1, 1, 1]
            assert manager.metadata(1).item == item
    assert same(jaxckpt.restore(tmp_path), tree)
    assert said_json("show", tmp_path)[1]["item"] == item
    for command in ("ls", "scrub", "verify"):
        assert cli(command, tmp_path)[0] == 0
    forked = jaxckpt.fork(tmp_path / "1", tmp_path / "forked")
    assert jaxckpt.open(forked).item == item


def test_a_run_takes_the_item_of_its_name_from_steps_of_orbax(tmp_path):
    """Of several trees, none of which is the main one by itself."""
    with ocp.CheckpointManager(tmp_path) as manager:
        trees = {"ema": {"n": 1}, "model": {"n": 2}}
        args = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        manager.save(1, args=ocp.args.Composite(**args))

    with CheckpointManager(tmp_path, item="model") as manager:
        assert manager.restore() == {"n": 2}
        manager.save(2, {"n": 3})
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore() == {"n": 3}


@counts
def test_orbax_without_item_names_restores_default(tmp_path, tree, count):
    """As its own single item: without arguments and with those of one item."""
    tree = target(tree)

    def save(_):
        with CheckpointManager(tmp_path, item="default") as manager:
            manager.save(1, tree, metrics={"loss": 0.5})
            manager.save(2, tree)

    simulate(count, save)

    with ocp.CheckpointManager(tmp_path) as manager:
        assert (manager.all_steps(), manager.latest_step()) == ([1, 2], 2)
        plain = manager.restore(2)
    with ocp.CheckpointManager(tmp_path) as manager:
        onto = manager.restore(2, args=ocp.args.StandardRestore(tree))
    with ocp.CheckpointManager(tmp_path, item_names=("default",)) as manager:
        args = ocp.args.Composite(default=ocp.args.StandardRestore(tree))
        named = manager.restore(1, args=args)["default"]
    with v1.training.Checkpointer(tmp_path) as checkpointer:
        new = checkpointer.load(2, checkpointable_name="default")
    assert all(same(dict(one), tree) for one in (plain, onto, named, new))


def test_orbax_restores_a_state_by_its_name(tmp_path, tree):
    """With item names, beside another item."""
    tree = target(tree)
    with CheckpointManager(tmp_path, item="model") as manager:
        manager.save(1, tree, items={"ema": {"w": jnp.ones(3)}})

    with ocp.CheckpointManager(tmp_path, item_names=("model", "ema")) as manager:
        args = ocp.args.Composite(model=ocp.args.StandardRestore(tree))
        named = manager.restore(1, args=args)["model"]
    with ocp.CheckpointManager(tmp_path) as manager:
        plain = manager.restore(1)["model"]

    assert same(dict(named), tree)
    assert same(dict(plain), tree)
