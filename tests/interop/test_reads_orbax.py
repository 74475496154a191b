"""jaxckpt restores what any release of Orbax or Flax wrote: golden samples and live saves."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import msgpack
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import CorruptCheckpoint
from jaxckpt.format import names
from tests.golden import compare
from tests.golden.fixture import Golden, PrngKey, Sample, golden_names
from tests.strategies import same

ocp = pytest.importorskip("orbax.checkpoint")
from orbax.checkpoint import v1  # noqa: E402
from orbax.checkpoint._src.metadata.pytree_metadata_options import (  # noqa: E402
    PyTreeMetadataOptions,
)

TREES = [name for name in golden_names() if "item-kinds" not in name]
MANAGERS = [name for name in TREES if "-manager-" in name or "-training" in name]


def tree_items(sample: Sample) -> list[Path]:
    """The directories of a sample's trees."""
    files = [*sample.path.rglob("_METADATA")]
    files += [file for file in sample.path.rglob("checkpoint") if file.is_file()]
    json_items = sample.about.get("items", {})
    return sorted({file.parent for file in files if file.parent.name not in json_items})


# --- every sample ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", TREES)
def test_a_sample_restores_as_it_was_saved(golden: Golden, name: str):
    """Values, dtypes and kinds equal the saved ones, from a checkpoint or a run's root."""
    sample = golden(name)

    tree = jaxckpt.restore(sample.path, item=sample.about.get("item"))

    assert compare.problems(sample, tree) == []


@pytest.mark.parametrize("name", TREES)
def test_a_sample_restores_to_the_host(golden: Golden, name: str):
    """With as_numpy arrays are numpy arrays, typed keys stay keys."""
    sample = golden(name)

    tree = jaxckpt.restore(sample.path, item=sample.about.get("item"), as_numpy=True)

    assert compare.problems(sample, tree, as_numpy=True) == []


@pytest.mark.parametrize("name", golden_names())
def test_a_sample_opens_and_verifies(golden: Golden, name: str):
    """`open` lists exactly its leaves, and `verify` reads it whole."""
    sample = golden(name)
    item = "arr" if "item-kinds" in name else sample.about.get("item")

    ckpt = jaxckpt.open(sample.path, item=item)
    report = jaxckpt.verify(sample.path)

    if "item-kinds" not in name:
        kinds = {tuple(path.split("/")): leaf.kind for path, leaf in ckpt.leaves.items()}
        assert len([kind for kind in kinds.values() if kind != "empty"]) == len(sample.expected)
    assert str(ckpt)
    assert report.ok, str(report)
    assert report.unchecked


@pytest.mark.parametrize("name", MANAGERS)
def test_each_step_and_each_item_restores(golden: Golden, name: str):
    """A step is found by its directory, its tree by the item's name or directory."""
    sample = golden(name)
    items = [item for item in tree_items(sample) if item.parent != sample.path]

    found = {}
    for item in items:
        found[item, "step"] = jaxckpt.restore(item.parent)
        found[item, "item"] = jaxckpt.restore(item.parent, item=item.name)
        found[item, "directory"] = jaxckpt.restore(item)

    assert len(items) >= 1
    for place, tree in found.items():
        assert compare.problems(sample, tree) == [], place


@pytest.mark.parametrize(
    "devices", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 4))]
)
@pytest.mark.multihost
def test_samples_restore_on_any_number_of_devices(golden: Golden, run_processes, devices: int):
    """Whatever devices wrote them, the values are the same on the devices here."""
    roots = [golden(name).path.parent for name in TREES]

    done = run_processes(
        "reads_orbax:restore_samples", count=1, devices_per_process=devices, args=[roots]
    )

    assert done[0].result == {}


@pytest.mark.multihost
def test_samples_restore_in_two_processes(golden: Golden, run_processes):
    """A job of two processes restores what one or two processes wrote."""
    roots = [golden(name).path.parent for name in TREES if "0.12.8" in name or "mp2" in name]

    done = run_processes("reads_orbax:restore_samples", count=2, args=[roots])

    assert [process.result for process in done] == [{}, {}]


def test_the_shardings_of_orbax_0_4_1_restore(golden: Golden):
    """That release wrote plain names into `_sharding`."""
    tree = jaxckpt.restore(golden("orbax-0.4.1-standard").path)

    assert tree["params"]["dense"]["kernel"].sharding.spec == P("data", "model")
    assert tree["params"]["emb"].sharding.spec == P("data")


@pytest.mark.parametrize("folder", ["", "mlp"])
def test_texts_of_orbax_0_4_0_are_in_one_file(tmp_path, golden: Golden, folder: str):
    """It is in the item, or beside the first text if the names of leaves have slashes."""
    sample = golden("orbax-0.4.0-strings-noocdbt")
    path = copy_of(sample, tmp_path)
    (path / folder).mkdir(exist_ok=True)
    if folder:
        tree = {"mlp/a": "PLACEHOLDER://mlp/a", "w": "PLACEHOLDER://w"}
        (path / "checkpoint").write_bytes(msgpack.packb(tree))
        (path / "_strings.json").unlink()
        (path / folder / "_strings.json").write_text('{"mlp": {"a": "text"}}')

    tree = jaxckpt.restore(path, as_numpy=True)

    assert tree["mlp/a" if folder else "empty"] == ("text" if folder else "")
    (path / folder / "_strings.json").unlink()
    with pytest.raises(CorruptCheckpoint, match="the tree lists it, but its array is missing"):
        jaxckpt.restore(path)


def test_the_msgpack_file_names_the_leaf_of_each_value(tmp_path, golden: Golden):
    """In a defaultdict of older releases `_METADATA` mixes them up, also with empty containers."""
    path = copy_of(golden("orbax-0.5.3-defaultdict-aggregate"), tmp_path)
    tree = msgpack.unpackb((path / "checkpoint").read_bytes())
    tree["dd"]["k"] = {}
    (path / "checkpoint").write_bytes(msgpack.packb(tree))

    mixed = jaxckpt.restore(path, only="dd")["dd"]

    assert {key: np.size(value) for key, value in mixed.items() if key != "k"} == {"z": 2, "a": 4}
    assert mixed["k"] == {}


# --- other items -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", golden_names("manager-composite"))
def test_json_items_restore(golden: Golden, name: str):
    """A JSON item is given back as JSON, by its name and by its directory."""
    sample = golden(name)
    steps = sorted(item.parent for item in tree_items(sample))

    for step in steps:
        wanted = {"epoch": int(step.name.rpartition("_")[2])}
        assert jaxckpt.restore(step, item="meta") == wanted
        assert jaxckpt.restore(step / "meta") == wanted
        assert jaxckpt.open(step, item="meta").restore() == wanted


def test_a_json_item_may_be_a_file_of_any_name(tmp_path):
    """The handler that wrote it is recorded, and its file is the only one."""
    handler = ocp.JsonCheckpointHandler("cfg.json")
    ocp.Checkpointer(handler).save(tmp_path / "flat", args=ocp.args.JsonSave({"a": 1}))
    names_of_items = {"item_names": ("state", "cfg"), "item_handlers": {"cfg": handler}}
    with ocp.CheckpointManager(tmp_path / "run", **names_of_items) as manager:
        saved = {"state": ocp.args.StandardSave({"x": 1}), "cfg": ocp.args.JsonSave([2])}
        manager.save(3, args=ocp.args.Composite(**saved))

    assert jaxckpt.restore(tmp_path / "flat") == {"a": 1}
    assert jaxckpt.verify(tmp_path / "flat").ok
    assert jaxckpt.restore(tmp_path / "run") == {"x": 1}
    assert jaxckpt.restore(tmp_path / "run" / "3" / "cfg") == [2]
    with jaxckpt.CheckpointManager(tmp_path / "run", mode="r") as manager:
        assert manager.restore_items() == {"cfg": [2], "state": {"x": 1}}
    (tmp_path / "run" / "3" / "cfg" / "cfg.json").write_text("[")
    with pytest.raises(CorruptCheckpoint, match=r"cfg/cfg\.json: not JSON"):
        jaxckpt.restore(tmp_path / "run" / "3", item="cfg")


def test_two_files_are_no_json_item(tmp_path):
    """None of them is taken by chance, nor a link to a file elsewhere."""
    handler = ocp.JsonCheckpointHandler("cfg.json")
    ocp.Checkpointer(handler).save(tmp_path / "flat", args=ocp.args.JsonSave({"a": 1}))
    (tmp_path / "flat" / "b.json").write_text("{}")

    with pytest.raises(CorruptCheckpoint, match="is a checkpoint without items"):
        jaxckpt.restore(tmp_path / "flat")

    (tmp_path / "flat" / "cfg.json").rename(tmp_path / "elsewhere.json")
    (tmp_path / "flat" / "b.json").unlink()
    (tmp_path / "flat" / "cfg.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CorruptCheckpoint):
        jaxckpt.restore(tmp_path / "flat")


def test_other_kinds_of_items_restore(golden: Golden):
    """ArraySave gives the array, the random keys give keys, each by name and by directory."""
    sample = golden("orbax-0.12.8-item-kinds")
    step = sample.path / "0"

    for read in (
        lambda item: jaxckpt.restore(step, item=item),
        lambda i: jaxckpt.restore(step / i),
    ):
        array, key, state, words = map(read, ("arr", "key", "npkey", "js"))

        assert isinstance(array, np.ndarray)
        assert array.tolist() == [0, 1, 2]
        assert jax.random.key_data(key).tolist() == sample.expected["key",].data.tolist()
        assert str(jax.random.key_impl(key)) == "threefry2x32"
        assert isinstance(state, tuple)
        np.random.RandomState().set_state(state)
        assert words == {"a": [1, 2]}


def test_a_random_key_is_no_tree(golden: Golden):
    """Where an item is not named, the one tree is found among JSON and random keys."""
    tree = jaxckpt.restore(golden("orbax-0.12.8-item-kinds").path / "0")

    assert tree.tolist() == [0, 1, 2]


def test_several_trees_are_not_guessed(tmp_path):
    """No tree is picked by chance: the error lists the items."""
    v1.save_checkpointables(tmp_path / "a", {"one": {"x": 1}, "two": {"x": 2}})

    with pytest.raises(jaxckpt.CheckpointNotFound, match="one, two"):
        jaxckpt.restore(tmp_path / "a")

    assert jaxckpt.restore(tmp_path / "a", item="two") == {"x": 2}


@pytest.mark.parametrize("typed", [True, False])
def test_a_random_key_item_of_the_installed_orbax(tmp_path, typed):
    """JaxRandomKeySave gives a typed key, or the words of a legacy one."""
    key = jax.random.key(7) if typed else jax.random.PRNGKey(7)
    state = np.random.RandomState(3).get_state(legacy=not typed)
    with ocp.CheckpointManager(tmp_path) as manager:
        args = {"tree": ocp.args.StandardSave({"x": 1}), "key": ocp.args.JaxRandomKeySave(key)}
        manager.save(0, args=ocp.args.Composite(**args, np=ocp.args.NumpyRandomKeySave(state)))

    got = jaxckpt.restore(tmp_path / "0", item="key")
    numpy_state = jaxckpt.restore(tmp_path / "0", item="np")

    assert jaxckpt.restore(tmp_path) == {"x": 1}
    assert got.dtype == key.dtype
    assert np.array_equal(jax.random.key_data(got), jax.random.key_data(key))
    np.random.RandomState().set_state(numpy_state)
    assert type(numpy_state) is type(state)


@pytest.mark.parametrize("array", [np.arange(3), jax.numpy.arange(3)], ids=["numpy", "jax"])
def test_an_array_item_of_an_older_release(tmp_path, golden: Golden, array):
    """Before 0.11 nothing said that an item is one array, and `_sharding` that it is one of jax."""
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.Composite(array=ocp.args.ArraySave(array)))
    (tmp_path / "0" / "_CHECKPOINT_METADATA").unlink()
    (tmp_path / "0" / "array" / "_METADATA").unlink()

    for got in (jaxckpt.restore(tmp_path, item="array"), jaxckpt.restore(tmp_path / "0" / "array")):
        assert isinstance(got, jax.Array if isinstance(array, jax.Array) else np.ndarray)
        assert got.tolist() == [0, 1, 2]


# --- without the files that may be missing ---------------------------------------------------

WHOLE = [
    "orbax-0.12.8-pytree-default",
    "orbax-0.12.8-pytree-zarr3",
    "orbax-0.12.8-pytree-noocdbt",
    "orbax-0.12.8-v1-save",
    "orbax-0.12.8-v1-training",
    "orbax-0.12.8-manager-composite",
    "orbax-0.12.8-mp2-manager",
    "orbax-0.12.8-replica-folder",
]


def copy_of(sample: Sample, folder: Path) -> Path:
    """A copy of a sample's checkpoint that a test may damage; its facts lie beside it."""
    shutil.copytree(sample.path.parent, folder / sample.name)
    return folder / sample.name / sample.path.name


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(
    "pattern",
    [
        "_sharding",
        "array_metadatas",
        "_CHECKPOINT_METADATA",
        "commit_success.txt",
        "orbax.checkpoint",
        "ocdbt.process_*/manifest.ocdbt",
    ],
)
def test_restores_without_a_file_that_may_be_missing(tmp_path, golden: Golden, name, pattern):
    """Files with only additional information about the data are not needed to read it."""
    sample = golden(name)
    path = copy_of(sample, tmp_path)
    for found in [*path.rglob(pattern)]:
        shutil.rmtree(found) if found.is_dir() else found.unlink()

    tree = jaxckpt.restore(path, item=sample.about.get("item"))

    found = compare.problems(sample, tree)
    assert found == [] or (pattern == "array_metadatas" and "typed key" in "".join(found))


def test_typed_keys_without_their_facts_are_words(tmp_path, golden: Golden):
    """Without array_metadatas keys come back as uint32, and a target makes keys of them again."""
    sample = golden("orbax-0.12.8-prng-keys")
    path = copy_of(sample, tmp_path)
    like = jaxckpt.restore(path)
    shutil.rmtree(path / "array_metadatas")

    plain = jaxckpt.restore(path)
    again = jaxckpt.restore(path, like)

    words = compare.leaves_of(plain)
    keys = {path: want for path, want in sample.expected.items() if isinstance(want, PrngKey)}
    assert keys
    assert all(np.array_equal(words[path], want.data) for path, want in keys.items())
    assert compare.problems(sample, again) == []


# --- damage ----------------------------------------------------------------------------------

NEEDED = {
    "orbax-0.12.8-pytree-default": ("_strings.json", "manifest.ocdbt", "_METADATA", "d/*"),
    "orbax-0.12.8-pytree-zarr3": ("_strings.json", "manifest.ocdbt", "_METADATA", "d/*"),
    "orbax-0.12.8-v1-save": (
        "state/_strings.json",
        "state/manifest.ocdbt",
        "state/_METADATA",
        "state/d/*",
    ),
    "orbax-0.12.8-pytree-noocdbt": (
        "_METADATA",
        "_strings.json",
        "params.emb/[0-9]*",
        "params.emb/.zarray",
        "lr/0",
    ),
    "orbax-0.2.7-pytree-noocdbt": ("params.emb/[0-9]*", "params.emb/.zarray"),
    "orbax-0.12.8-leaf-kinds-zarr3": ("ocdbt.process_0/d/*",),
    "orbax-0.12.8-bare-leaf": ("ocdbt.process_0/d/*",),
    "orbax-0.12.8-replica-folder": ("*/ocdbt.process_*/d/*",),
}


FOR_ALL_LEAVES = ("manifest", "_METADATA", "_strings", "d/")


@pytest.mark.parametrize("how", ["missing", "empty", "half"])
@pytest.mark.parametrize(("name", "pattern"), [(n, p) for n, ps in NEEDED.items() for p in ps])
def test_damage_is_named_and_never_restored(tmp_path, golden: Golden, name, pattern, how):
    """Each data file that is gone or short is an error that says where; nothing becomes zeros."""
    sample = golden(name)
    path = copy_of(sample, tmp_path)
    raised = []
    for file in sorted(path.glob(pattern)):
        data = file.read_bytes()
        if how == "missing":
            file.unlink()
        else:
            file.write_bytes(b"" if how == "empty" else data[: len(data) // 2])
        try:
            # Of what a process wrote not every file is needed: small values were copied at the end.
            assert compare.problems(sample, jaxckpt.restore(path)) == [], file
        except jaxckpt.CorruptCheckpoint as error:
            raised.append(error)
            assert not jaxckpt.verify(path).ok
        file.write_bytes(data)

    assert raised or "process" in pattern
    for error in raised:
        assert error.file
        assert error.file.startswith(str(path))
        assert error.file in str(error)
        assert error.leaf or any(part in pattern for part in FOR_ALL_LEAVES)


def test_an_array_that_is_not_there_is_named(tmp_path, golden: Golden):
    """A leaf of the tree without its array is an error, in plain files and in a database."""
    path = copy_of(golden("orbax-0.12.8-pytree-noocdbt"), tmp_path)
    shutil.rmtree(path / "params.dense.bias")

    with pytest.raises(jaxckpt.CorruptCheckpoint, match=r"params/dense/bias") as caught:
        jaxckpt.restore(path)

    assert caught.value.leaf == "params/dense/bias"


@pytest.mark.parametrize("says", [True, False, None])
def test_a_chunk_that_is_not_there_is_zeros_only_where_the_format_says_so(tmp_path, says):
    """zarr3 before Orbax 0.10 left out chunks of zeros; writers that store all of them say so."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)
    ocp.Checkpointer(handler).save(tmp_path / "a", {"w": np.arange(3.0)})
    (tmp_path / "a" / "w" / "c" / "0").unlink()
    file = tmp_path / "a" / "_METADATA"
    top = json.loads(file.read_text())
    assert top.pop("store_array_data_equal_to_fill_value") is True
    file.write_text(
        json.dumps(top | ({} if says is None else {"store_array_data_equal_to_fill_value": says}))
    )

    if says:
        with pytest.raises(jaxckpt.CorruptCheckpoint) as caught:
            jaxckpt.restore(tmp_path / "a")
        assert caught.value.leaf == "w"
    else:
        assert jaxckpt.restore(tmp_path / "a")["w"].tolist() == [0, 0, 0]


def test_a_zarr2_chunk_that_is_not_there_is_an_error_whatever_is_said(tmp_path):
    """zarr2 of Orbax has no fill value, so no chunk was ever left out."""
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)).save(
        tmp_path / "a", {"w": np.arange(3.0)}
    )
    file = tmp_path / "a" / "_METADATA"
    file.write_text(file.read_text().replace('fill_value": true', 'fill_value": false'))
    (tmp_path / "a" / "w" / "0").unlink()

    with pytest.raises(jaxckpt.CorruptCheckpoint, match="w"):
        jaxckpt.restore(tmp_path / "a")


@pytest.fixture
def flat(tmp_path, mesh):
    """A tree that Orbax saved at the top of a directory, one array of it in a file of its own."""
    tree = {
        "w": jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, P("x"))),
        "large": np.random.default_rng(0).standard_normal(50_000, np.float32),
    }

    def save(**options):
        handler = ocp.PyTreeCheckpointHandler(**options)
        ocp.Checkpointer(handler).save(tmp_path / "x", tree)
        return tmp_path / "x", tree

    return save


@pytest.mark.parametrize("use_zarr3", [False, True])
def test_a_data_file_that_is_not_there_is_named(flat, use_zarr3):
    """Though TensorStore only reports the database and what it could not decompress."""
    path, _ = flat(use_ocdbt=True, use_zarr3=use_zarr3)
    file = max((path / "ocdbt.process_0" / "d").iterdir(), key=lambda file: file.stat().st_size)
    file.unlink()

    with pytest.raises(CorruptCheckpoint, match=f"leaf large: {file} is missing") as caught:
        jaxckpt.restore(path)

    assert (caught.value.file, caught.value.leaf) == (str(file), "large")


def test_the_metadata_that_is_not_there_is_named(flat):
    """At the top of the checkpoint, not in the database of one process."""
    path, _ = flat()
    (path / "_METADATA").unlink()

    for marked in (True, False):
        with pytest.raises(CorruptCheckpoint) as caught:
            jaxckpt.restore(path)
        assert caught.value.file == f"{path}/_METADATA"
        if marked:
            (path / "_CHECKPOINT_METADATA").unlink()


@pytest.mark.parametrize("damage", ["garbage", '{"dw==": "nonsense"}'])
def test_damaged_shardings_matter_only_to_who_needs_them(flat, caplog, damage):
    """A restore that brings its own shardings, or none, and a look at the tree."""
    path, tree = flat()
    (path / "_sharding").write_text(damage)

    with pytest.raises(CorruptCheckpoint, match="_sharding"):
        jaxckpt.restore(path)
    ckpt = jaxckpt.open(path)

    assert same(jaxckpt.restore(path, tree), tree)
    assert same(ckpt.restore(tree), tree)
    assert jaxckpt.restore(path, as_numpy=True)["w"].sum() == 32
    assert "_sharding" in caplog.text
    assert str(ckpt.leaves["w"]) == "float32[8,4]"
    (problem,) = jaxckpt.verify(path).problems
    assert problem.file == f"{path}/_sharding"


# --- not committed, or going away ------------------------------------------------------------


@pytest.mark.parametrize(
    "suffix", ["", "-1700000000123456", "-3", "-jaxckpt-ab12", "-deleting-ab12"]
)
def test_a_temporary_directory_is_refused(tmp_path, golden: Golden, suffix):
    """For any form of the suffix: the checkpoint, its items, and a run that holds only it."""
    path = copy_of(golden("orbax-0.12.8-manager-composite"), tmp_path)
    steps = [item.parent for item in path.glob("*/state")]
    *others, newest = sorted(steps, key=lambda step: int(step.name.rpartition("_")[2]))
    temporary = newest.rename(newest.with_name(newest.name + ".orbax-checkpoint-tmp" + suffix))

    for place in (temporary, temporary / "state"):
        with pytest.raises(jaxckpt.CheckpointNotFound, match="never committed"):
            jaxckpt.restore(place)
    assert jaxckpt.open(path).path == str(others[-1])
    for step in others:
        shutil.rmtree(step)
    with pytest.raises(jaxckpt.CheckpointNotFound):
        jaxckpt.restore(path)


@pytest.mark.parametrize("gone", [False, True])
def test_an_item_that_orbax_is_deleting_is_refused(tmp_path, gone):
    """While the record of a deletion is there the item is an error that says so; others restore."""
    path = tmp_path / "a"
    v1.save_checkpointables(path, {"one": {"x": 1}, "two": {"x": 2}})
    before = json.loads((path / "_CHECKPOINT_METADATA").read_text())
    handlers = {"one": before["item_handlers"]["one"]}
    record = {
        "operation_id": "0" * 32,
        "checkpointable_name": "two",
        "destination": None,
        "original_metadata": before,
        "updated_metadata": {**before, "item_handlers": handlers},
    }
    (path / "_CHECKPOINT_DELETION").write_text(json.dumps(record))
    if gone:
        shutil.rmtree(path / "two")

    assert jaxckpt.restore(path) == {"x": 1}
    assert jaxckpt.open(path).items == ("one",)
    with pytest.raises(jaxckpt.CheckpointNotFound, match="deletion of item 'two' has begun"):
        jaxckpt.restore(path, item="two")
    if not gone:
        with pytest.raises(jaxckpt.CheckpointNotFound, match="deletion of item 'two' has begun"):
            jaxckpt.restore(path / "two")


def test_an_item_of_a_step_with_torn_metadata_still_restores(tmp_path, golden: Golden):
    """Orbax does not sync that file; the step is an error, the item itself is whole."""
    sample = golden("orbax-0.12.8-v1-save")
    path = copy_of(sample, tmp_path)
    (path / "_CHECKPOINT_METADATA").write_bytes(b"")

    with pytest.raises(jaxckpt.CorruptCheckpoint, match="_CHECKPOINT_METADATA"):
        jaxckpt.restore(path)

    assert compare.problems(sample, jaxckpt.restore(path / "state")) == []


# --- live round trips ------------------------------------------------------------------------


def save_with_handler(path: Path, tree: Any, **options: Any) -> None:
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)).save(path, tree)


def save_with_standard(path: Path, tree: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


WRITERS: dict[str, Callable[[Path, Any], None]] = {
    "zarr2": save_with_handler,
    "zarr3": functools.partial(save_with_handler, use_zarr3=True),
    "zarr2-plain": functools.partial(save_with_handler, use_ocdbt=False),
    "zarr3-plain": functools.partial(save_with_handler, use_ocdbt=False, use_zarr3=True),
    "rich": functools.partial(
        save_with_handler, pytree_metadata_options=PyTreeMetadataOptions(support_rich_types=True)
    ),
    "standard": save_with_standard,
    "v1": lambda path, tree: v1.save(path, tree),
}
every_writer = pytest.mark.parametrize("writer", WRITERS)


def live_tree(mesh: jax.sharding.Mesh) -> Any:
    def put(value: Any, *spec: Any) -> jax.Array:
        return jax.device_put(value, NamedSharding(mesh, P(*spec)))

    params = {
        "w": put(np.arange(64, dtype=np.float32).reshape(8, 8), "x", "y"),
        "b": put(np.arange(8).astype(ml_dtypes.bfloat16), ("x", "y")),
        "r": put(np.arange(6, dtype=np.int32)),
        "t": put(np.arange(24, dtype=np.float16).reshape(3, 8), None, "x"),
    }
    return {
        "params": params,
        "opt": optax.adamw(1e-3).init(params),
        "rng": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 4),
        "host": np.arange(5.0),
        "pair": (7, 0.5),
        "flag": True,
        "nothing": None,
    }


def assert_equal(got: Any, want: Any) -> None:
    found, wanted = compare.leaves_of(got), compare.leaves_of(want)
    assert set(found) == set(wanted)
    for path, leaf in wanted.items():
        other = found[path]
        if isinstance(leaf, jax.Array):
            assert isinstance(other, jax.Array), path
            assert other.dtype == leaf.dtype, path
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                other, leaf = jax.random.key_data(other), jax.random.key_data(leaf)
        else:
            assert type(other) is type(leaf), path
        assert np.asarray(other).tobytes() == np.asarray(leaf).tobytes(), path


@every_writer
def test_restores_what_the_installed_orbax_wrote(tmp_path, mesh, writer):
    """As it was saved: values, kinds, and where the arrays were."""
    tree = live_tree(mesh)
    WRITERS[writer](tmp_path / "a", tree)

    got = jaxckpt.restore(tmp_path / "a")

    assert_equal(got, tree)
    for name, leaf in tree["params"].items():
        assert got["params"][name].sharding == leaf.sharding
    if writer == "rich":
        assert got["pair"] == (7, 0.5)


def test_containers_that_lack_a_leaf_lose_none(tmp_path):
    """Orbax records leaves and containers apart; then the tree is that of the leaves."""
    WRITERS["rich"](tmp_path / "a", {"w": np.ones(2), "pair": (1, 2)})
    WRITERS["rich"](tmp_path / "b", {"w": np.ones(2)})
    file = tmp_path / "a" / names.TREE_METADATA
    containers = json.loads((tmp_path / "b" / names.TREE_METADATA).read_text())
    facts = json.loads(file.read_text())
    assert facts["value_metadata_tree"] != containers["value_metadata_tree"]
    file.write_text(json.dumps({**facts, "value_metadata_tree": containers["value_metadata_tree"]}))

    assert same(jaxckpt.restore(tmp_path / "a"), {"pair": [1, 2], "w": np.ones(2)})


@every_writer
def test_restores_into_a_target(tmp_path, mesh, make_mesh, writer):
    """With `like`: optax states and tuples are themselves again, on another mesh."""
    tree = live_tree(mesh)
    WRITERS[writer](tmp_path / "a", tree)
    other = NamedSharding(make_mesh(a=3), P())
    like = jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=other)
            if isinstance(leaf, jax.Array)
            else leaf
        ),
        tree,
    )

    got = jaxckpt.restore(tmp_path / "a", like)

    assert jax.tree.structure(got) == jax.tree.structure(tree)
    assert_equal(got, tree)
    assert all(leaf.sharding == other for leaf in jax.tree.leaves(got["params"]))


@every_writer
def test_restores_on_a_mesh(tmp_path, mesh, make_mesh, writer):
    """The specs that Orbax recorded, on a smaller mesh of the same axes."""
    tree = live_tree(mesh)
    WRITERS[writer](tmp_path / "a", tree)
    smaller = make_mesh(x=2, y=1)

    got = jaxckpt.restore(tmp_path / "a", mesh=smaller)

    assert_equal(got, tree)
    for name, leaf in tree["params"].items():
        assert got["params"][name].sharding.mesh == smaller
        assert got["params"][name].sharding.spec == leaf.sharding.spec


def test_an_array_of_another_device_goes_back_there(tmp_path):
    """An array that lay on one device other than the default one returns to it."""
    device = jax.devices()[3]
    tree = {"there": jax.device_put(np.arange(3.0), device), "here": jax.numpy.arange(3)}
    save_with_handler(tmp_path / "a", tree)

    got = jaxckpt.restore(tmp_path / "a")

    assert got["there"].devices() == {device}
    assert got["here"].devices() == {jax.devices()[0]}
    assert not got["here"].committed


def test_restores_the_metrics_of_a_step(tmp_path):
    """Metrics are a JSON item, and no tree."""
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        manager.save(1, args=ocp.args.StandardSave({"x": 1}), metrics={"loss": 0.5})

    assert jaxckpt.restore(tmp_path) == {"x": 1}
    assert jaxckpt.restore(tmp_path / "1", item="metrics") == {"loss": 0.5}
    assert jaxckpt.restore(tmp_path / "1" / "metrics") == {"loss": 0.5}


def test_an_empty_directory_is_no_step(tmp_path, caplog):
    """To Orbax an empty `9/` is the latest step; here it is skipped, and said to be."""
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave({"x": 1}))
    (tmp_path / "9").mkdir()

    with caplog.at_level("WARNING", logger="jaxckpt"):
        assert jaxckpt.restore(tmp_path) == {"x": 1}

    assert "9" in caplog.text


@pytest.mark.multihost
def test_restores_what_orbax_saved_in_two_processes(tmp_path, run_processes):
    """In the two processes with the same shardings, and afterwards in one."""
    done = run_processes("reads_orbax:orbax_to_ours", count=2, args=[tmp_path])

    assert [process.result for process in done] == [[[], []], [[], []]]
    for name in ("old", "new"):
        got = jaxckpt.restore(tmp_path / name)
        assert np.array_equal(got["both"], np.arange(64).reshape(8, 8))
        assert np.array_equal(got["all"], np.arange(1 << 19))
        assert (got["step"], got["name"]) == (7, "two")
