"""Every verb takes a bucket: what it does on a file system, it does there."""

from __future__ import annotations

import logging
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxckpt
from jaxckpt.errors import StepExists, UnsupportedFormat
from jaxckpt.storage import locate
from tests.commandline import cli


@pytest.fixture(params=["moto_server", "gcs_server", "azurite_server"])
def root(request, use_store):
    server = use_store(request.getfixturevalue(request.param))
    return f"{server.scheme}://{server.bucket}/runs"


@pytest.fixture
def tree(mesh):
    values = np.arange(1 << 18, dtype=np.float32).reshape(512, 512)
    return {
        "w": jax.device_put(values, NamedSharding(mesh, PartitionSpec("x", "y"))),
        "b": np.arange(10.0),
        "step": 7,
        "name": "a text",
        "key": jax.random.key(3),
    }


def assert_same(found, tree):
    assert (found["step"], found["name"]) == (tree["step"], tree["name"])
    for name in ("w", "b"):
        assert np.array_equal(found[name], tree[name])
    assert jax.random.key_data(found["key"]).tolist() == [0, 3]


def test_a_checkpoint_is_saved_restored_and_verified(root, tree, make_mesh):
    """Also onto a mesh of another shape; the text of `open` names the URL."""
    jaxckpt.save(f"{root}/a", tree)

    assert_same(jaxckpt.restore(f"{root}/a"), tree)
    other = NamedSharding(make_mesh(x=2), PartitionSpec("x"))
    like = {**tree, "w": jax.ShapeDtypeStruct((512, 512), np.float32, sharding=other)}
    restored = jaxckpt.restore(f"{root}/a", like)
    assert_same(restored, tree)
    assert restored["w"].sharding == other
    assert jaxckpt.verify(f"{root}/a").ok
    assert f"{root}/a" in str(jaxckpt.open(f"{root}/a"))


def test_a_compressed_checkpoint_is_saved_restored_and_verified(root, tree):
    """The checksums of its compressed chunks are read back."""
    tree["b"] = np.arange(1 << 18) // 7
    jaxckpt.save(f"{root}/a", tree, compression="zstd")

    assert_same(jaxckpt.restore(f"{root}/a"), tree)
    assert jaxckpt.verify(f"{root}/a").ok
    assert jaxckpt.open(f"{root}/a").leaves["b"].compression == "zstd"
    assert sum(entry.size for entry in locate(root)[0].files(f"{root}/a").values()) < 2 << 20


def test_a_whole_bucket_is_no_place_for_a_checkpoint(root, tree):
    """It would be deleted with the next one, with everything in it."""
    jaxckpt.save(f"{root}/a", tree)
    bucket = root.removesuffix("/runs")
    before = locate(bucket)[0].files(bucket)

    for overwrite in (False, "delete_first"):
        with pytest.raises(StepExists, match="is a whole bucket"):
            jaxckpt.save(bucket, tree, overwrite=overwrite)
    with pytest.raises(StepExists, match="is a whole bucket"):
        jaxckpt.convert(f"{root}/a", bucket)

    assert locate(bucket)[0].files(bucket) == before


def test_a_save_in_the_background_commits(root, tree):
    """And a second one to the same place is refused before anything is written."""
    jaxckpt.save_async(f"{root}/a", tree).result()
    before = locate(root)[0].files(f"{root}/a")

    with pytest.raises(StepExists):
        jaxckpt.save(f"{root}/a", tree)

    assert locate(root)[0].files(f"{root}/a") == before
    assert_same(jaxckpt.restore(f"{root}/a"), tree)


def test_a_checkpoint_is_not_replaced_in_place(root, tree):
    """The layout that Orbax reads leaves no single file to switch."""
    jaxckpt.save(f"{root}/a", tree)

    with pytest.raises(UnsupportedFormat, match="delete_first"):
        jaxckpt.save(f"{root}/a", {**tree, "step": 8}, overwrite=True)

    assert_same(jaxckpt.restore(f"{root}/a"), tree)


def test_a_checkpoint_is_deleted_first_on_request(root, tree, tmp_path):
    """The weaker way has a name of its own; a directory that is no checkpoint is not deleted."""
    new = {**tree, "step": 8}
    for place in (f"{root}/a", tmp_path / "a"):
        jaxckpt.save(place, tree)
        jaxckpt.save(place, new, overwrite="delete_first")
        assert_same(jaxckpt.restore(place), new)
        assert jaxckpt.verify(place).ok
    storage, path = locate(f"{root}/mine")
    storage.write(f"{path}/notes.txt", b"1")

    with pytest.raises(StepExists):
        jaxckpt.save(f"{root}/mine", tree, overwrite="delete_first")

    assert storage.read(f"{path}/notes.txt", max_bytes=9) == b"1"


def test_checkpoints_are_copied_between_places(root, tree, tmp_path):
    """`convert` goes both ways; `export` and `import` of safetensors read and write locally."""
    jaxckpt.save(tmp_path / "a", tree)

    jaxckpt.convert(tmp_path / "a", f"{root}/b")
    jaxckpt.convert(f"{root}/b", tmp_path / "c")

    assert_same(jaxckpt.restore(f"{root}/b"), tree)
    assert_same(jaxckpt.restore(tmp_path / "c"), tree)
    assert jaxckpt.diff(f"{root}/b", tmp_path / "c").equal


def test_a_run_keeps_its_last_steps(root, tree):
    """A manager saves, deletes, restores the newest step, and hands the run to the next job."""
    with jaxckpt.CheckpointManager(f"{root}/run", keep=jaxckpt.KeepPolicy(last=2)) as manager:
        for step in range(4):
            manager.save(step, {**tree, "step": step}, metrics={"loss": 1.0 / (step + 1)})
    with jaxckpt.CheckpointManager(f"{root}/run", keep=jaxckpt.KeepPolicy(last=2)) as manager:
        assert manager.all_steps() == [2, 3]
        assert_same(manager.restore(), {**tree, "step": 3})
        assert manager.metadata(3).leaves["w"].shape == (512, 512)
        assert "data not read" in manager._repr_html_()
        manager.save(4, {**tree, "step": 4})

    files = locate(root)[0].files(f"{root}/run")
    assert {name.partition("/")[0] for name in files if "/" in name} == {"3", "4"}


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)"])
def test_a_program_that_ends_without_closing_its_manager_commits(root, ending):
    """However it ends, its saves in the background are whole."""
    program = f"""
import sys, jaxckpt, numpy as np
manager = jaxckpt.CheckpointManager(sys.argv[1])
for step in (1, 2):
    manager.save(step, {{"w": np.full(1 << 18, step)}})
{ending}
"""
    argv = [sys.executable, "-c", program, f"{root}/run"]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)

    assert ended.returncode == (3 if ending else 0), ended.stderr
    with jaxckpt.CheckpointManager(f"{root}/run", mode="r") as manager:
        assert manager.all_steps() == [1, 2]
        assert np.array_equal(manager.restore()["w"], np.full(1 << 18, 2))
    assert jaxckpt.verify(f"{root}/run").ok


def test_a_second_job_takes_the_run_over(root, tree, caplog):
    """The first job can then no longer commit; nothing that it wrote is taken for a step."""
    first = jaxckpt.CheckpointManager(f"{root}/run")
    first.save(1, tree)
    first.wait_until_finished()
    storage, path = locate(f"{root}/run")
    with caplog.at_level(logging.WARNING):
        owner = storage.read(f"{path}/_jaxckpt.owner", max_bytes=1 << 20)
        storage.write(
            f"{path}/_jaxckpt.owner", owner.replace(b'"token"', b'"token":"another","old"')
        )
        first.save(2, tree)
        with pytest.raises(jaxckpt.SaveFailed, match="another job"):
            first.close()

    assert jaxckpt.open(f"{root}/run").path == f"{root}/run/1"
    assert "2/commit_success.txt" not in storage.files(path)


def test_the_command_line_takes_a_bucket(root, tree):
    """`ls`, `show`, `verify`, `du` and `rm`."""
    with jaxckpt.CheckpointManager(f"{root}/run") as manager:
        for step in (1, 2):
            manager.save(step, tree)

    for verb in (["ls"], ["show"], ["verify"], ["du"]):
        code, out, err = cli(*verb, f"{root}/run")
        assert code == 0, (verb, out, err)
    code, out, err = cli("rm", f"{root}/run", "1", "-y")
    assert code == 0, (out, err)
    assert jaxckpt.open(f"{root}/run").path == f"{root}/run/2"
    assert "1/commit_success.txt" not in locate(root)[0].files(f"{root}/run")


def test_a_step_is_forked_within_a_store(root, tree):
    """By copies that the store makes; between two storages `convert` is named."""
    with jaxckpt.CheckpointManager(f"{root}/run") as manager:
        manager.save(1, tree)

    jaxckpt.fork(f"{root}/run/1", f"{root}/other")

    assert_same(jaxckpt.restore(f"{root}/other"), tree)
    assert jaxckpt.verify(f"{root}/other").ok


def test_safetensors_come_out_of_a_store_and_go_into_it(root, tmp_path):
    """From a checkpoint there to a file here or there, and back; a file is restored in place."""
    weights = {"a": np.arange(12.0).reshape(3, 4), "b": {"c": np.ones(5, np.int32)}}
    jaxckpt.save(f"{root}/a", weights)

    jaxckpt.export_safetensors(f"{root}/a", tmp_path / "m.safetensors")
    jaxckpt.import_safetensors(tmp_path / "m.safetensors", f"{root}/b")
    file = jaxckpt.export_safetensors(f"{root}/a", f"{root}/m.safetensors")
    several = jaxckpt.export_safetensors(f"{root}/a", f"{root}/n.safetensors", max_shard_bytes=50)
    jaxckpt.import_safetensors(several, f"{root}/c")
    with pytest.raises(StepExists):
        jaxckpt.export_safetensors(f"{root}/b", file)
    jaxckpt.export_safetensors(f"{root}/b", file, overwrite=True)

    assert (file, several) == (
        f"{root}/m.safetensors",
        f"{root}/n.safetensors.index.json",
    )
    storage, path = locate(file)
    content = (tmp_path / "m.safetensors").read_bytes()
    assert storage.read(path, max_bytes=1 << 20) == content
    for place in (f"{root}/b", f"{root}/c", file, several):
        found = jaxckpt.restore(place, weights)
        assert np.array_equal(found["a"], weights["a"])
        assert np.array_equal(found["b"]["c"], weights["b"]["c"])


def test_a_reader_holds_a_step_that_a_writer_would_delete(root, tree):
    """Leases and pins are files of the run, in a store too."""
    with jaxckpt.CheckpointManager(f"{root}/run", keep=jaxckpt.KeepPolicy(last=1)) as manager:
        manager.save(1, tree)
        manager.wait_until_finished()
        manager.pin(1)
        manager.save(2, tree)
        manager.save(3, tree)
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 3]
        manager.unpin(1)
        manager.save(4, tree)
        manager.wait_until_finished()
        assert manager.all_steps() == [4]
