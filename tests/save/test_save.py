"""The promises of a save, the output of `open`, and the cost of importing."""

from __future__ import annotations

import builtins
import errno
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import SaveFailed, StepExists
from jaxckpt._save.job import SaveJob
from jaxckpt._save.save import prepare
from jaxckpt.format import names
from jaxckpt.storage import LocalStorage, kvstore, locate
from tests.strategies import same

ROOT = Path(__file__).parents[2]


def chunks_of(path, leaf):
    """The keys of the chunks of a leaf, in the database of a checkpoint."""
    from jaxckpt.storage._arrays import Reader

    _, where = locate(path)
    keys = Reader(kvstore(f"{where}/state"), database=True).keys()
    return [key for key in keys if key.startswith(f"{leaf}/c")]


@pytest.mark.parametrize(
    ("spec", "count"),
    [(P(), 1), (P("x"), 4), (P("x", "y"), 8), (P(("x", "y")), 8), (P(None, "y"), 2)],
    ids=str,
)
def test_a_stored_chunk_is_a_device_shard(tmp_path, mesh, spec, count):
    """One chunk for each distinct shard."""
    w = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, spec))

    jaxckpt.save(tmp_path / "x", {"w": w})

    assert len(chunks_of(tmp_path / "x", "w")) == count


def test_missing_parents_are_made_and_nothing_is_left_over(tmp_path):
    """After a save there is the checkpoint, and nothing beside it or of the writing in it."""
    jaxckpt.save(tmp_path / "a" / "b" / "x", {"w": 1})

    assert os.listdir(tmp_path / "a" / "b") == ["x"]
    inside = set(os.listdir(tmp_path / "a" / "b" / "x"))
    assert inside == {
        "state",
        names.ORBAX_MARKER,
        names.CHECKPOINT_METADATA,
        names.COMMIT_MARKER,
        names.RECORD,
    }


@pytest.mark.parametrize(
    "make",
    [str, Path, lambda p: f"file://{p}", lambda p: os.path.relpath(p)],
    ids=["str", "Path", "url", "relative"],
)
def test_a_path_in_any_form(tmp_path, make):
    """str, os.PathLike, file:// and relative paths mean the same."""
    jaxckpt.save(make(tmp_path / "x"), 5)

    assert jaxckpt.restore(make(tmp_path / "x")) == 5
    assert jaxckpt.restore(tmp_path / "x") == 5


def test_an_epath_is_a_path(tmp_path):
    """etils.epath.Path, which training code passes around."""
    epath = pytest.importorskip("etils.epath")
    jaxckpt.save(epath.Path(tmp_path) / "x", 5)

    assert jaxckpt.open(epath.Path(tmp_path) / "x").restore() == 5


def test_overwrite_replaces_a_checkpoint_and_only_on_request(tmp_path):
    """StepExists without it, the new values with it, and the old ones gone."""
    jaxckpt.save(tmp_path / "x", {"a": 1})
    with pytest.raises(StepExists, match="set overwrite to replace it"):
        jaxckpt.save(tmp_path / "x", {"a": 2})
    assert jaxckpt.restore(tmp_path / "x") == {"a": 1}

    jaxckpt.save(tmp_path / "x", {"b": 3}, overwrite=True)

    assert jaxckpt.restore(tmp_path / "x") == {"b": 3}
    assert os.listdir(tmp_path) == ["x"]


class Full(LocalStorage):
    """Fails like TensorStore, or like the operating system, when the record is written."""

    error: Exception

    def write(self, path, data):
        if path.endswith(names.RECORD):
            raise self.error
        super().write(path, data)


TENSORSTORE = "RESOURCE_EXHAUSTED: Failed to write 800 bytes to file 4: [os_error_code='28']"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError(TENSORSTORE)])
def test_a_full_disk_is_an_error_of_the_system(tmp_path, error):
    """With the cause OSError(ENOSPC); it says what the save needs, what is free and what to do."""
    storage = Full()
    storage.error = error
    request = replace(
        prepare(tmp_path / "x", np.ones(100), False, None, copy=False), storage=storage
    )

    with pytest.raises(
        SaveFailed, match=r"saves 800 B; free now: .* Delete .* elsewhere"
    ) as caught:
        SaveJob(request).run()

    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert "previous" not in str(caught.value)  # there is none
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("inside", ["state/best", "state/notes.txt"])
def test_what_lies_in_an_item_is_not_replaced_with_it(tmp_path, inside):
    """Neither a checkpoint nor a file of somebody else."""
    jaxckpt.save(tmp_path / "x", {"w": 1})
    if inside.endswith(".txt"):
        (tmp_path / "x" / inside).write_text("mine")
    else:
        shutil.copytree(tmp_path / "x", tmp_path / "y")
        shutil.move(tmp_path / "y", tmp_path / "x" / inside)

    with pytest.raises(StepExists, match=inside):
        jaxckpt.save(tmp_path / "x", {"w": 2}, overwrite=True)

    assert jaxckpt.restore(tmp_path / "x") == {"w": 1}
    assert (tmp_path / "x" / inside).exists()


def test_a_copy_without_its_marker_in_memory_is_left_alone():
    """It may be a copy under way, or mended from another one."""
    storage, root = locate("memory://no-marker")
    jaxckpt.save(f"{root}/a", 1)
    storage.write(f"{root}/a/notes.txt", b"mine")
    storage.delete_files([f"{root}/a/{names.COMMIT_MARKER}"])
    before = storage.files(root)

    with pytest.raises(StepExists, match="already exists"):
        jaxckpt.save(f"{root}/a", 2)

    assert storage.files(root) == before


def test_what_is_in_memory_under_a_name_is_not_replaced():
    """Also if nothing is above the name."""
    jaxckpt.save("memory://not-replaced/a", 1)

    with pytest.raises(StepExists, match="is a directory but not a checkpoint, and contains a"):
        jaxckpt.save("memory://not-replaced", 2)

    assert jaxckpt.restore("memory://not-replaced/a") == 1


def test_overwrite_takes_the_place_of_an_empty_directory(tmp_path):
    """Such as one that a program made beforehand."""
    (tmp_path / "x").mkdir()
    with pytest.raises(StepExists, match="is a directory but not a checkpoint"):
        jaxckpt.save(tmp_path / "x", 1)

    jaxckpt.save(tmp_path / "x", 1, overwrite=True)
    (tmp_path / "y").mkdir()
    jaxckpt.save_async(tmp_path / "y", 2, overwrite=True).result()

    assert (jaxckpt.restore(tmp_path / "x"), jaxckpt.restore(tmp_path / "y")) == (1, 2)


def test_small_files_of_other_programs_move_along(tmp_path):
    """At every replacement; they are no part of the checkpoint."""
    jaxckpt.save(tmp_path / "x", 1)
    (tmp_path / "x" / "config.json").write_text("{}")

    for value in (2, 3):
        jaxckpt.save(tmp_path / "x", value, overwrite=True)

        assert jaxckpt.restore(tmp_path / "x") == value
        assert (tmp_path / "x" / "config.json").read_text() == "{}"
        assert jaxckpt.verify(tmp_path / "x").ok


@pytest.mark.parametrize("added", ["many", "large", "a directory", "a link"])
def test_a_checkpoint_with_much_of_other_programs_is_not_replaced(tmp_path, added):
    """The error names what to move away; nothing changes."""
    path = tmp_path / "x"
    jaxckpt.save(path, 1)
    match added:
        case "many":
            for i in range(101):
                (path / f"added{i}").write_text("")
        case "large":
            (path / "added").touch()
            os.truncate(path / "added", 16_000_001)
        case "a directory":
            (path / "added").mkdir()
        case "a link":
            (path / "added").symlink_to(tmp_path)
    before = sorted(os.listdir(path))

    with pytest.raises(StepExists, match=r"Move these away first: added.* Only up to 100 files"):
        jaxckpt.save(path, 2, overwrite=True)

    assert jaxckpt.restore(path) == 1
    assert sorted(os.listdir(path)) == before
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("levels", [198, 199, 200, 201])
def test_custom_metadata_that_is_too_deep_is_an_error_of_the_call(tmp_path, levels):
    """With the dict around it that is stored; never a failed save, in a manager neither."""
    metadata = {}
    for _ in range(levels - 1):
        metadata = {"a": metadata}

    def save():
        jaxckpt.save(tmp_path / "x", 1, custom_metadata=metadata)
        with jaxckpt.CheckpointManager(tmp_path / "run", run_metadata=metadata) as manager:
            manager.save(1, 1, custom_metadata=metadata).result()

    if levels < 200:
        save()
        assert jaxckpt.open(tmp_path / "x").custom_metadata == metadata
    else:
        with pytest.raises(TypeError, match="nested deeper than 200 levels"):
            save()
        with (
            jaxckpt.CheckpointManager(tmp_path / "run") as manager,
            pytest.raises(TypeError, match="nested deeper"),
        ):
            manager.save(1, 1, custom_metadata=metadata)
        with pytest.raises(TypeError, match="nested deeper"):
            jaxckpt.CheckpointManager(tmp_path / "run", run_metadata=metadata)


def test_custom_metadata_comes_back(tmp_path):
    """Any JSON, through `open`."""
    metadata = {"a": [1, 2.5, None, "ü"], "b": {"c": True}}
    jaxckpt.save(tmp_path / "x", 1, custom_metadata=metadata)

    assert jaxckpt.open(tmp_path / "x").custom_metadata == metadata


def test_a_background_save_has_the_values_of_the_call(tmp_path):
    """numpy arrays may be written to, and jax arrays donated, once `save_async` has returned."""
    host, device = np.arange(100_000), jnp.arange(100_000.0)
    wanted = {"host": host.copy(), "device": np.asarray(device).copy()}

    handle = jaxckpt.save_async(tmp_path / "x", {"host": host, "device": device})
    host[:] = -1
    jax.jit(lambda x: x * 0, donate_argnums=0)(device).block_until_ready()
    handle.result()

    got = jaxckpt.restore(tmp_path / "x", as_numpy=True)
    assert same(got, wanted)
    assert handle.done()
    assert "committed" in repr(handle)


def test_a_failed_background_save_raises_at_every_result(tmp_path):
    """The handle keeps its error."""
    (tmp_path / "file").write_text("x")

    handle = jaxckpt.save_async(tmp_path / "file" / "x", 1)

    for _ in range(2):
        with pytest.raises(jaxckpt.SaveFailed):
            handle.result()
    assert "failed" in repr(handle)


def test_a_save_leaves_no_thread_and_no_lock(tmp_path):
    """Nothing is left running."""
    before = set(threading.enumerate())

    jaxckpt.save_async(tmp_path / "x", jnp.ones(3)).result()

    assert set(threading.enumerate()) <= before


# --- open ------------------------------------------------------------------------------------


@pytest.fixture
def opened(tmp_path, mesh):
    """An open checkpoint with a little of everything."""
    tree = {
        "params": {
            "layer/0": {
                "w": jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, P("x")))
            }
        },
        "opt": [np.arange(3), None, {}],
        "key": jax.random.key(0),
        "name": "run",
        7: 1,
    }
    tree.pop(7)
    jaxckpt.save(tmp_path / "x", tree, custom_metadata={"note": 1})
    return jaxckpt.open(tmp_path / "x"), tree


def test_open_says_what_is_there(opened):
    """Paths, kinds, dtypes, shapes, shardings and sizes, without reading data."""
    ckpt, _ = opened

    assert set(ckpt) == {"params/layer~10/w", "opt/0", "opt/1", "opt/2", "key", "name"}
    assert len(ckpt) == 6
    leaf = ckpt.leaves["params/layer~10/w"]
    assert (leaf.kind, leaf.dtype, leaf.shape, leaf.size_bytes) == ("array", "float32", (8, 4), 128)
    assert "x" in leaf.sharding
    assert ckpt.items == ("state",)
    assert ckpt.size_bytes == 128 + 24 + 8 + 3
    text = str(ckpt)
    for word in (
        "layer",
        "float32[8,4]",
        "key<threefry2x32>",
        "int64[3]",
        "note",
        "{}",
        "None",
        "str",
    ):
        assert word in text, text


def test_a_part_of_a_checkpoint(opened):
    """By path text, by a tuple of keys, in steps; a leaf, and containers with their types."""
    ckpt, tree = opened

    assert np.array_equal(ckpt["params/layer~10/w"].restore(), np.ones((8, 4)))
    assert set(ckpt["params"]["layer~10"].restore()) == {"w"}
    assert same(
        ckpt["params", "layer/0"].restore(as_numpy=True), {"w": np.ones((8, 4), np.float32)}
    )
    assert same(ckpt["opt"].restore(), tree["opt"])
    assert same(ckpt["opt", 0].restore(), tree["opt"][0])
    assert ckpt["name"].restore() == "run"
    assert ckpt["opt/1"].restore() is None
    assert "opt" in str(ckpt["opt"])
    assert same(ckpt["opt"].restore(only="0"), {"0": tree["opt"][0]})
    assert set(ckpt["params/layer/0"].restore()) == {"w"}  # as it is shown elsewhere
    for wrong in ("nope", "opt/9", "params/layer/1", "name/x"):
        with pytest.raises(KeyError, match=r"nope|opt/9|layer|name/x"):
            ckpt[wrong]


def test_a_very_wide_tree_prints_in_a_screen(tmp_path):
    """And says how to see the rest."""
    jaxckpt.save(tmp_path / "x", {f"{i:04}": i for i in range(1000)})

    text = str(jaxckpt.open(tmp_path / "x"))

    assert len(text.splitlines()) < 250
    assert "800 more" in text


# --- the package -----------------------------------------------------------------------------


def run(code, **env):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_nothing_heavy():
    """Neither jax nor TensorStore nor numpy, until a name is used."""
    out = run(
        "import sys, jaxckpt; jaxckpt.CheckpointError; dir(jaxckpt);"
        "print([m for m in ('jax', 'tensorstore', 'numpy', 'flax', 'orbax') if m in sys.modules])"
    )

    assert out.strip() == "[]"


def test_opening_a_checkpoint_needs_no_jax_and_no_tensorstore(tmp_path):
    """Metadata of ours is JSON."""
    jaxckpt.save(
        tmp_path / "x", {"a": jnp.ones(3), "k": jax.random.key(0), "b": jnp.ones(2, jnp.bfloat16)}
    )

    out = run(
        f"import sys, jaxckpt; text = str(jaxckpt.open({str(tmp_path / 'x')!r}));"
        "print([m for m in ('jax', 'tensorstore') if m in sys.modules], 'float32[3]' in text)"
    )

    assert out.strip() == "[] True"


def test_verify_needs_no_devices(tmp_path):
    """It works where no backend can be made."""
    jaxckpt.save(tmp_path / "x", {"a": jnp.ones(3), "k": jax.random.key(0)})

    out = run(
        f"import sys, jaxckpt; print(jaxckpt.verify({str(tmp_path / 'x')!r}).ok);"
        "bridge = sys.modules.get('jax._src.xla_bridge'); print(bool(bridge and bridge._backends))",
        JAX_PLATFORMS="no_such_platform",
    )

    assert out.split() == ["True", "False"]


def test_all_is_what_is_public():
    """`__all__` and `open`, `dir` and what can be had agree; every public name has a docstring."""
    public = {*jaxckpt.__all__, "open"}
    assert len(jaxckpt.__all__) == len(public) - 1
    assert set(dir(jaxckpt)) == {*public, "__version__", "errors", "types"}
    for name in public:
        value = getattr(jaxckpt, name)
        assert value.__doc__
        assert value.__module__.startswith("jaxckpt")
    assert set(jaxckpt._HOME) == public
    with pytest.raises(AttributeError, match="no attribute"):
        jaxckpt.nonsense  # noqa: B018  # the look-up is what is tested


def test_a_star_import_hides_no_built_in():
    """`open` stays Python's own; `jaxckpt.open` is there under its own name."""
    names = {}
    exec("from jaxckpt import *", names)

    assert not {*names} & {*vars(builtins)} - {"__builtins__"}
    assert names["restore"] is jaxckpt.restore
    assert jaxckpt.open is not open


def test_every_error_of_the_package_is_public_and_a_built_in_too():
    """Each class of `errors` is a CheckpointError and the built-in that a caller would catch."""
    from jaxckpt import errors

    builtin = {
        "CheckpointNotFound": FileNotFoundError,
        "StepExists": FileExistsError,
        "TreeMismatch": ValueError,
        "UnsupportedLeaf": ValueError,
        "CorruptCheckpoint": OSError,
        "StoreError": OSError,
        "UnsupportedFormat": ValueError,
        "SaveFailed": RuntimeError,
        "ProcessesDisagree": RuntimeError,
        "CheckpointTimeout": TimeoutError,
    }
    found = {
        n: c
        for n, c in vars(errors).items()
        if isinstance(c, type) and issubclass(c, errors.CheckpointError)
    }

    assert set(found) - {"CheckpointError"} == set(builtin)
    for name, kind in builtin.items():
        assert issubclass(found[name], kind)
        assert getattr(jaxckpt, name) is found[name]


CYCLIC = """
import sys, jaxckpt
folder = sys.argv[1]
jaxckpt.save(f"{folder}/a", {"w": 1.0})
nodes = {"w": 1.0}
nodes["children"] = [nodes]
deep = 1.0
for _ in range(5000):
    deep = (deep,)
with jaxckpt.CheckpointManager(f"{folder}/run") as manager:
    for tree in nodes, deep:
        for call in (
            lambda: jaxckpt.save(f"{folder}/b", tree),
            lambda: jaxckpt.restore(f"{folder}/a", tree),
            lambda: jaxckpt.restore(f"{folder}/a", shardings=tree),
            lambda: manager.save(1, {"w": 1.0}, items={"tree": tree}),
        ):
            try:
                call()
            except jaxckpt.UnsupportedLeaf as error:
                print(error)
"""


def test_a_tree_that_contains_itself_is_refused(tmp_path):
    """jax would end the program at a cycle; a tree of thousands of levels is refused as well."""
    done = subprocess.run(
        [sys.executable, "-c", CYCLIC, str(tmp_path)], capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(" is nested deeper")[0] for line in lines] == [
        "item 'state': the tree",
        "like",
        "shardings",
        "item 'tree'",
    ] * 2
    assert "at children/0/children/0/children/..." in lines[0]
    assert set(os.listdir(tmp_path)) == {"a", "run"}


def test_a_shard_of_several_chunks(tmp_path, mesh, limits):
    """What a store takes in one request is less than a shard may have."""
    limits("jaxckpt._core.plan", MAX_CHUNK_BYTES=1 << 19)
    values = np.random.default_rng(0).integers(0, 9, (1024, 1536), np.int32)
    split = NamedSharding(mesh, P("x"))
    tree = {"split": jax.device_put(values, split), "host": values}

    jaxckpt.save(tmp_path / "a", tree)

    assert jaxckpt.verify(tmp_path / "a").ok
    for name, found in jaxckpt.restore(tmp_path / "a", tree).items():
        assert np.array_equal(found, values), name
    assert len(chunks_of(tmp_path / "a", "host")) == 16
    assert len(chunks_of(tmp_path / "a", "split")) == 16


@pytest.mark.parametrize(
    "value",
    [
        np.zeros((1,) * 33),
        np.zeros((0, 1 << 58), "i1"),
        pytest.param("key", id="a key of 32 dimensions"),
    ],
    ids=str,
)
def test_what_could_not_be_read_back_is_not_saved(tmp_path, value):
    """Formats and libraries have 32 dimensions, and a key has one more than it shows."""
    if isinstance(value, str):
        value = jax.random.split(jax.random.key(0), 1).reshape((1,) * 32)
    with pytest.raises(jaxckpt.UnsupportedLeaf, match=r"w: (is stored with|has shape)"):
        jaxckpt.save(tmp_path / "a", {"w": value, "b": 1})

    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("shape", [(1,) * 32, (0, (1 << 58) - 1)], ids=["dimensions", "elements"])
def test_the_largest_shapes(tmp_path, shape):
    jaxckpt.save(tmp_path / "a", {"w": np.zeros(shape, np.int8)})

    assert jaxckpt.restore(tmp_path / "a", as_numpy=True)["w"].shape == shape


UNHEARD = """
import contextlib, resource, signal, sys, threading
import numpy as np
import jaxckpt

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
folder, how = sys.argv[1:]
tree = {"w": np.zeros(1 << 20)}
if how == "save_async":
    handle = jaxckpt.save_async(folder, tree)
else:
    manager = jaxckpt.CheckpointManager(folder)
    handle = manager.save(1, tree)
def hear():
    with contextlib.suppress(jaxckpt.SaveFailed):
        handle.result()
if how == "raised":
    hear()
if how == "raised elsewhere":
    thread = threading.Thread(target=hear)
    thread.start()
    thread.join()
"""


@pytest.mark.parametrize(
    ("how", "status"),
    [("save_async", 1), ("manager", 1), ("raised", 0), ("raised elsewhere", 0)],
)
def test_a_program_whose_last_save_failed_ends_with_status_1(tmp_path, how, status):
    """Unless it has heard of that."""
    args = [sys.executable, "-c", UNHEARD, str(tmp_path / "a"), how]

    done = subprocess.run(args, capture_output=True, text=True, timeout=60)

    assert done.returncode == status, done.stderr
    assert ("SaveFailed" in done.stderr) == (how != "raised")
