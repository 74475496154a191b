"""The main item may have any name, or be the checkpoint itself: every reader finds it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import re
import shutil
import uuid

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import CheckpointManager, CheckpointNotFound, CorruptCheckpoint, ProcessesDisagree
from jaxckpt._run.deletion import Deletion
from jaxckpt._run.index import StepIndex
from jaxckpt._run.leases import Leases
from jaxckpt._run.one_step import delete_item
from jaxckpt._run.owner import Ownership
from jaxckpt._save.snapshot import FileItem, Items, take_tree
from jaxckpt.format import names
from jaxckpt.storage import LocalStorage, locate
from jaxckpt.testing import CrashingStorage, SimulatedCrash, WatchedStorage, simulate
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
    assert theirs - ours == {"ocdbt.process_0"}  # all processes write into one database


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
    "name",
    [
        *("", ".a", "a/b", "metrics", "_METADATA", "d", names.RECORD, names.DELETION_RECORD, 7),
        *("x" * 241, "é" * 128, "\ud800"),
    ],
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
        with pytest.raises(ProcessesDisagree, match=r"process 1: .*different items.*: b, not a"):
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
            assert same(manager.restore_items(step=1, items={item: tree})[item], tree)
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


@pytest.mark.parametrize("before", ["state", "default", "net"])
def test_a_run_goes_on_under_another_name_of_its_state(tmp_path, before):
    """From a main item of another name, as on the way to Orbax."""
    with CheckpointManager(tmp_path, item=before) as manager:
        manager.save(1, {"n": 1}, items={"ema": {"n": 0}})
    with CheckpointManager(tmp_path, item="model") as manager:
        assert manager.restore_or(lambda: {"n": 0}) == ({"n": 1}, 1)
        manager.save(2, {"n": 2})

    assert jaxckpt.restore(tmp_path / "2", item="model") == {"n": 2}


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


# --- deleting an item ---------------------------------------------------------------------------

ITEMS = {"ema": {"w": np.arange(70_000.0), "b": np.arange(3)}, "config": {"lr": 0.1}}
places = pytest.mark.parametrize("where", ["disk", "mounted", "memory"])


def run_at(tmp_path, where, item="state"):
    """Returns a run with one step, and its storage and root."""
    url = f"memory://{uuid.uuid4()}/run" if where == "memory" else tmp_path / f"run {uuid.uuid4()}"
    with CheckpointManager(url, item=item) as manager:
        manager.save(1, {"n": 1, "w": np.ones(70_000)}, items=ITEMS, metrics={"loss": 0.5})
    storage, root = locate(url)
    return url, LocalStorage(atomic_rename=False) if where == "mounted" else storage, root


def deletion(storage, root):
    index = StepIndex(storage, root)
    leases = Leases(index)
    owner = Ownership(leases)
    owner.take_over(None)
    return Deletion(leases, owner)


def check_the_rest(url):
    """Every other item is as it was; returns whether the item is there too, and then as it was."""
    with CheckpointManager(url, mode="r") as manager:
        assert same(manager.restore(), {"n": 1, "w": np.ones(70_000)})
        found = manager.restore_items()
        assert manager.metrics(1) == {"loss": 0.5}
    assert found["config"] == ITEMS["config"]
    assert found.keys() - {"ema"} == {"state", "config", "metrics"}
    assert jaxckpt.verify(f"{url}/1").ok
    if "ema" not in found:
        with pytest.raises(CheckpointNotFound, match="ema"):
            jaxckpt.restore(f"{url}/1", item="ema")
        return False
    assert same(found["ema"], ITEMS["ema"])
    return True


@pytest.mark.faults
@places
@pytest.mark.parametrize("torn", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_crash_while_an_item_is_deleted_leaves_the_step(tmp_path, where, torn):
    """Whole with the item or whole without it, and deleting it again leaves nothing of it."""
    seen = []
    for after in itertools.count():
        url, storage, root = run_at(tmp_path, where)
        dying = CrashingStorage(storage, after, torn=torn)
        with contextlib.suppress(SimulatedCrash):
            delete_item(deletion(dying, root), 1, "ema")
        seen.append(check_the_rest(url))

        # A crash after the last change leaves nothing to do.
        with contextlib.suppress(CheckpointNotFound):
            delete_item(deletion(storage, root), 1, "ema")

        assert not check_the_rest(url)
        assert storage.kind(f"{root}/1/ema") is None
        assert storage.kind(f"{root}/1/{names.DELETION_RECORD}") is None
        unchecked = jaxckpt.verify(f"{url}/1").unchecked
        assert [text for text in unchecked if ".jaxckpt-tmp-" not in text] == []
        if len(dying.events) <= after:
            break
    assert seen == sorted(seen, reverse=True)
    assert set(seen) == {True, False}


@counts
def test_a_manager_deletes_an_item(tmp_path, count):
    """Never the state, nor of a step that is pinned or being read; the other steps keep theirs."""

    def delete(processes):
        with CheckpointManager(tmp_path) as manager:
            for step in (1, 2):
                manager.save(step, {"n": step}, items=ITEMS).result()
            manager.delete(1, item="ema")
            for item, step, error, text in (
                ("state", 1, ValueError, "main item"),
                ("ema", 1, CheckpointNotFound, "no item 'ema'"),
                ("ema", 7, CheckpointNotFound, "no committed step 7"),
            ):
                with pytest.raises((error, ProcessesDisagree), match=text):
                    manager.delete(step, item=item)
            manager.pin(2)
            with pytest.raises((ValueError, ProcessesDisagree), match="pinned"):
                manager.delete(2, item="ema")
            processes.within(20).gather("test", None)
            return [set(manager.restore_items(step=step)) for step in (1, 2)]

    assert simulate(count, delete) == [[{"state", "config"}, {"state", "ema", "config"}]] * count


def test_an_item_that_is_read_stays(tmp_path):
    """The error says so, and nothing was changed."""
    url, storage, root = run_at(tmp_path, "disk")
    found = deletion(storage, root)

    with found.leases.protect(1), pytest.raises(ValueError, match="a reader holds"):
        delete_item(found, 1, "ema")

    assert check_the_rest(url)


def test_what_is_linked_to_a_deleted_item_stays(tmp_path):
    """A fork shares its files with the step."""
    url, storage, root = run_at(tmp_path, "disk")
    jaxckpt.fork(f"{url}/1", tmp_path / "fork")

    delete_item(deletion(storage, root), 1, "ema")

    assert not check_the_rest(url)
    assert check_the_rest(tmp_path / "fork")


def test_an_item_is_not_deleted_without_the_lease_that_protects_its_step(tmp_path):
    url, storage, root = run_at(tmp_path, "memory")

    def fail(verb, path):
        if verb == "write" and names.is_lease(path.rpartition("/")[2]):
            raise OSError(errno.EIO, "Input/output error", path)

    with pytest.raises(OSError, match="lease"):
        delete_item(deletion(WatchedStorage(storage, fail), root), 1, "ema")

    assert storage.kind(f"{root}/1/{names.DELETION_RECORD}") is None
    assert check_the_rest(url)


@pytest.mark.parametrize("name", ["..", ".", "", "state/d", "/"])
def test_a_deletion_of_something_else_is_not_finished(tmp_path, name):
    """Whoever wrote the file, it can name an item only."""
    url, storage, root = run_at(tmp_path, "disk")
    text = json.dumps({"checkpointable_name": name})
    (url / "1" / names.DELETION_RECORD).write_text(text)

    with pytest.raises(CorruptCheckpoint, match="invalid item name"):
        delete_item(deletion(storage, root), 1, name)

    (url / "1" / names.DELETION_RECORD).unlink()
    assert check_the_rest(url)


def test_one_deletion_ends_before_the_next_begins(tmp_path):
    """The error says which is to be done again."""
    url, storage, root = run_at(tmp_path, "disk")
    with contextlib.suppress(SimulatedCrash):
        delete_item(deletion(CrashingStorage(storage, 2), root), 1, "ema")

    with pytest.raises(ValueError, match="deletion of item 'ema' has not ended"):
        delete_item(deletion(storage, root), 1, "config")

    delete_item(deletion(storage, root), 1, "ema")
    assert not check_the_rest(url)


def test_an_item_of_orbax_is_left_to_it(tmp_path):
    """jaxckpt rewrites only its own steps."""
    with ocp.CheckpointManager(tmp_path) as manager:
        args = {name: ocp.args.StandardSave({"n": 1}) for name in ("state", "ema")}
        manager.save(1, args=ocp.args.Composite(**args))

    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(ValueError, match="another program wrote it"),
    ):
        manager.delete(1, item="ema")

    assert jaxckpt.open(tmp_path / "1").items == ("ema", "state")


def test_an_item_whose_deletion_cannot_begin_stays(tmp_path):
    """As when the step cannot be held."""
    url, storage, root = run_at(tmp_path, "disk")

    def fail(verb, path):
        if verb == "kind" and path == f"{root}/1":
            raise OSError(errno.EIO, "no", path)

    with pytest.raises(OSError, match="no"):
        delete_item(deletion(WatchedStorage(storage, fail), root), 1, "ema")

    assert check_the_rest(url)
    assert storage.kind(f"{root}/1/{names.DELETION_RECORD}") is None


@pytest.mark.parametrize("dies", [False, True])
def test_orbax_reads_a_step_without_the_item(tmp_path, dies):
    """With both managers; the new one also when the deletion was interrupted."""
    url, storage, root = run_at(tmp_path, "disk")
    dying = CrashingStorage(storage, 2 if dies else None)
    with contextlib.suppress(SimulatedCrash):
        delete_item(deletion(dying, root), 1, "ema")

    with v1.training.Checkpointer(url) as checkpointer:
        assert checkpointer.load(1)["n"] == 1
        assert set(checkpointer.load_checkpointables(1)) == {"state", "config"}
    with ocp.CheckpointManager(url) as manager:
        args = ocp.args.Composite(state=ocp.args.StandardRestore())
        assert manager.restore(1, args=args)["state"]["n"] == 1
    if not dies:
        with ocp.CheckpointManager(url) as manager:
            assert manager.restore(1)["config"] == ITEMS["config"]


def test_rm_deletes_an_item(tmp_path):
    """After a question; it names the item, and refuses the main one before it asks."""
    url, _, _ = run_at(tmp_path, "disk", item="model")

    code, out, _ = cli("rm", url, 1, "--item", "ema", "--dry-run")
    assert (code, "ema" in jaxckpt.open(url).items) == (0, True)
    assert re.search(r"item 'ema' of 1 step of .*/run .*: 5\d\d kB to delete", out)
    for arguments, text in (
        (["ema"], "pass --yes"),  # nobody answers
        (["model", "--yes"], "main item"),
        (["typo", "--yes"], "no item 'typo'; its items are"),
    ):
        code, _, err = cli("rm", url, 1, "--item", *arguments)
        assert (code, text in err) == (2, True), err
    assert jaxckpt.verify(url).ok
    assert set(jaxckpt.open(url).items) == {"model", "ema", "config", "metrics"}
    code, told = said_json("rm", url, 1, "--item", "ema", "--yes")

    assert (code, told["deleted"], told["item"]) == (0, [1], "ema")
    assert set(jaxckpt.open(url).items) == {"model", "config", "metrics"}
    assert jaxckpt.verify(url).unchecked == ()


@pytest.mark.parametrize("save", ["save", "manager"])
def test_items_of_any_names_and_kinds_are_one_checkpoint(tmp_path, save):
    """None of them need be a tree or be called `state`; files may be in directories."""
    files = {"a.txt": b"1", "deep/b/c.bin": b"22"}
    items = Items(
        {
            "model": lambda name, all_: take_tree(name, {"w": np.arange(3)}, all_, copy=True),
            "files": lambda name, _: FileItem(name=name, common=lambda: files, handler="my.H"),
        }
    )
    path = tmp_path / "run" / "1"
    if save == "save":
        jaxckpt.save(path, items, custom_metadata={"a": 1})
    else:
        with CheckpointManager(tmp_path / "run") as manager:
            manager.save(1, items, custom_metadata={"a": 1})

    assert jaxckpt.verify(path).ok
    assert jaxckpt.open(path).items == ("model",)
    assert jaxckpt.restore(path)["w"].tolist() == [0, 1, 2]
    assert {name: (path / "files" / name).read_bytes() for name in files} == files
    said = json.loads((path / names.CHECKPOINT_METADATA).read_text())
    assert said["item_handlers"]["files"] == "my.H"
    assert said["custom_metadata"] == {"a": 1}


def test_files_of_another_program_alone_are_no_damage(tmp_path):
    """The step stays, and an error names the handler that reads them."""
    take = {"x": lambda name, _: FileItem(name=name, common=lambda: {"a": b"1"}, handler="my.H")}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, Items(take))
        manager.wait_until_finished()

        assert manager.latest_step() == 1
        assert manager.scrub()[1].ok
        with pytest.raises(jaxckpt.UnsupportedFormat, match=r"only my\.H reads"):
            manager.restore()
        assert manager.all_steps() == [1]
    (tmp_path / "1" / names.RECORD).unlink()  # as Orbax writes it
    with pytest.raises(jaxckpt.UnsupportedFormat, match=r"only my\.H reads"):
        jaxckpt.restore(tmp_path)
    assert "only a program's own handler" in str(jaxckpt.verify(tmp_path / "1").unchecked)
    assert jaxckpt.verify(tmp_path / "1").ok


@pytest.mark.parametrize("item", ["state", "params"])
def test_metrics_are_not_restored_in_place_of_a_lost_state(tmp_path, item):
    """As after a power cut on a disk that lies, which also lost the record."""
    with jaxckpt.CheckpointManager(tmp_path, item=item) as manager:
        manager.save(1, {"w": np.ones(3)}, metrics={"loss": 3}).result()
    (tmp_path / "1" / names.RECORD).unlink()
    shutil.rmtree(tmp_path / "1" / item)

    for restore in (lambda: jaxckpt.restore(tmp_path / "1"), lambda: jaxckpt.open(tmp_path / "1")):
        with pytest.raises(CorruptCheckpoint, match=f"1/{item} is missing"):
            restore()
    assert jaxckpt.restore(tmp_path / "1", item="metrics") == {"loss": 3}
    assert [problem.file for problem in jaxckpt.verify(tmp_path / "1").problems] == [
        str(tmp_path / "1" / item)
    ]
