"""The installed Orbax restores checkpoints written by `jaxckpt.save`, by each entry point."""

from __future__ import annotations

import gc
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt.errors import CorruptCheckpoint, UnsupportedLeaf
from jaxckpt.format import sharding
from jaxckpt.format.arrays import STORABLE_DTYPES
from jaxckpt.format.sharding import SavedSharding
from tests.golden.compare import leaves_of

ocp = pytest.importorskip("orbax.checkpoint")
from orbax.checkpoint import v1  # noqa: E402

GOLDEN = Path(__file__).parents[1] / "golden"

# Orbax warns about each restore without a target.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def with_manager(path: Path, how: Callable[[Any], Any], **names: Any) -> Any:
    with ocp.CheckpointManager(path.parent, **names) as manager:
        return how(manager)


def restore_with_training(path: Path) -> Any:
    with v1.training.Checkpointer(path.parent) as checkpointer:
        return checkpointer.load(3)


# How a user of Orbax would restore the tree of a checkpoint that lies at `root/3`.
ENTRY_POINTS: dict[str, Callable[[Path], Any]] = {
    "PyTreeCheckpointer": lambda path: ocp.PyTreeCheckpointer().restore(path / "state"),
    "StandardCheckpointer": lambda path: ocp.StandardCheckpointer().restore(path / "state"),
    "PyTreeRestore": lambda path: ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(
        path / "state", args=ocp.args.PyTreeRestore()
    ),
    "CheckpointManager": lambda path: with_manager(path, lambda m: m.restore(3))["state"],
    "CheckpointManager-pytree": lambda path: with_manager(
        path, lambda m: m.restore(3, args=ocp.args.Composite(state=ocp.args.PyTreeRestore()))
    )["state"],
    "CheckpointManager-standard": lambda path: with_manager(
        path, lambda m: m.restore(3, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
    )["state"],
    "v1.load": lambda path: v1.load(path),
    "v1.load_checkpointables": lambda path: v1.load_checkpointables(path)["state"],
    "v1.training": restore_with_training,
}
every_entry_point = pytest.mark.parametrize("entry", ENTRY_POINTS)


def assert_same(got: Any, want: Any) -> None:
    """Equal to the bit, dtypes and kinds included; containers as Orbax gives them back."""
    found, wanted = leaves_of(got), leaves_of(want)
    assert set(found) == set(wanted)
    for path, leaf in wanted.items():
        other = found[path]
        if isinstance(leaf, (str, bool, int, float)):
            assert type(other) is type(leaf), path
            assert other == leaf, path
            continue
        assert isinstance(other, jax.Array if isinstance(leaf, jax.Array) else np.ndarray), path
        assert (other.dtype, other.shape) == (leaf.dtype, leaf.shape), path
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            other, leaf = jax.random.key_data(other), jax.random.key_data(leaf)
        assert np.asarray(other).tobytes() == np.asarray(leaf).tobytes(), path


# --- what there is ---------------------------------------------------------------------------


def training_tree(mesh: jax.sharding.Mesh) -> Any:
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
        "opt": optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init(params),
        "rng": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 4),
        "legacy": jax.random.PRNGKey(5),
        "host": np.arange(5.0),
        "scalars": {
            "int": 7,
            "float": 0.5,
            "bool": True,
            "large": (1 << 63) + 1,
            "np": np.array(2.5),
        },
        "text": {"name": "run-ä", "empty": ""},
        "empties": [None, {}, [], ()],
        "sequence": [1, (2, "x"), [np.ones(2)]],
    }


@every_entry_point
def test_orbax_restores_a_training_state(tmp_path, mesh, entry):
    """Arrays, optax states, typed keys, texts, scalars and empties: all of it, to the bit."""
    tree = training_tree(mesh)
    jaxckpt.save(tmp_path / "3", tree)

    got = ENTRY_POINTS[entry](tmp_path / "3")

    assert_same(got, tree)
    assert got["empties"] == [None, {}, [], ()]


@pytest.mark.parametrize("entry", [e for e in ENTRY_POINTS if "PyTree" in e or "v1" in e])
def test_orbax_puts_arrays_where_they_were(tmp_path, mesh, entry):
    """Without a target Orbax gives each array the mesh and the spec that it was saved with."""
    tree = training_tree(mesh)
    jaxckpt.save(tmp_path / "3", tree)

    got = ENTRY_POINTS[entry](tmp_path / "3")

    for name, leaf in tree["params"].items():
        assert got["params"][name].sharding == leaf.sharding


@pytest.mark.parametrize("entry", ["PyTreeCheckpointer", "CheckpointManager"])
def test_orbax_reads_shardings_without_their_devices(tmp_path, mesh, entry):
    """A file in which each mesh is written once gives Orbax the same shardings."""
    tree = training_tree(mesh)
    jaxckpt.save(tmp_path / "3", tree)
    file = tmp_path / "3" / "state" / "_sharding"
    many = SavedSharding(axis_names=("x",), axis_sizes=(4096,), device_ids=tuple(range(4096)))
    more = {f"more {i}": many for i in range(400)}
    file.write_bytes(sharding.encode(sharding.decode(file.read_bytes(), file="f") | more))

    got = ENTRY_POINTS[entry](tmp_path / "3")

    assert "*" in json.loads(file.read_bytes())
    for name, leaf in tree["params"].items():
        assert got["params"][name].sharding == leaf.sharding


@every_entry_point
def test_orbax_restores_odd_keys(tmp_path, entry):
    """Dots, slashes, spaces, quotes, unicode, nothing at all, and integers are keys to it too."""
    names = ["a.b", "c/d", "e f", "g'\"", "ü", "", "%20", "[0]", "back\\slash", "~"]
    tree = {"odd": {name: np.full(2, i) for i, name in enumerate(names)}, "int": {0: 1, 11: 2}}
    tree["text"] = {"x.y": "dots", "x/y": "slash", "z z": "space", "ü": "ü"}
    jaxckpt.save(tmp_path / "3", tree)

    got = ENTRY_POINTS[entry](tmp_path / "3")

    assert_same(got, {**tree, "int": {"0": 1, "11": 2}})


@every_entry_point
def test_orbax_restores_every_dtype(tmp_path, entry):
    """Each dtype that zarr holds comes back bit for bit, from the host and from a device."""
    values = {name: np.array([[0, 1, 1]]).astype(numpy_dtype(name)) for name in STORABLE_DTYPES}
    on_device = {n: jnp.asarray(v) for n, v in values.items() if "64" not in n and "128" not in n}
    jaxckpt.save(tmp_path / "3", {"np": values, "jax": on_device})

    got = ENTRY_POINTS[entry](tmp_path / "3")

    assert_same(got, {"np": values, "jax": on_device})


@every_entry_point
@pytest.mark.parametrize("leaf", [jnp.arange(6.0).reshape(2, 3), np.arange(3), 7, "text"], ids=str)
def test_orbax_restores_a_bare_leaf(tmp_path, entry, leaf):
    """A tree that is one leaf, wherever Orbax takes such a tree."""
    jaxckpt.save(tmp_path / "3", leaf)

    assert_same(ENTRY_POINTS[entry](tmp_path / "3"), leaf)


@every_entry_point
@pytest.mark.parametrize("tree", [{"a": None, "b": {}}, {"a": "text"}, {"a": {"b": []}, "c": 1}])
def test_orbax_restores_a_tree_without_arrays(tmp_path, entry, tree):
    """Without arrays there is no database, and Orbax does not look for one."""
    jaxckpt.save(tmp_path / "3", tree)

    assert ENTRY_POINTS[entry](tmp_path / "3") == tree


@every_entry_point
def test_orbax_restores_zero_size_arrays(tmp_path, entry):
    """Orbax cannot write an array without elements, but reads ours."""
    tree = {"jax": jnp.zeros((0, 3)), "np": np.zeros((3, 0), np.int8), "w": np.ones(2)}
    jaxckpt.save(tmp_path / "3", tree)

    assert_same(ENTRY_POINTS[entry](tmp_path / "3"), tree)


def test_orbax_restores_zero_size_arrays_into_a_target(tmp_path, mesh):
    """With a target too, also a sharded one."""
    sharding = NamedSharding(mesh, P(None, "x"))
    tree = {"z": jax.device_put(jnp.zeros((0, 4)), sharding)}
    jaxckpt.save(tmp_path / "a", tree)

    like = {"z": jax.ShapeDtypeStruct((0, 4), jnp.float32, sharding=sharding)}
    old = ocp.StandardCheckpointer().restore(tmp_path / "a" / "state", like)
    new = v1.load(tmp_path / "a", like)

    assert old["z"].shape == new["z"].shape == (0, 4)
    assert old["z"].sharding == new["z"].sharding == sharding


@every_entry_point
def test_orbax_reads_the_rest_of_a_tree_that_it_cannot_hold(tmp_path, entry):
    """Leaves that Orbax has no word for are arrays or texts to it; all the others are unharmed."""
    tree = {
        "bytes": b"abc",
        "nothing": b"",
        "complex": 1 + 2j,
        "npcomplex": np.complex64(1j),
        "huge": 1 << 80,
        "til~de": "text",
        "uint4": jnp.array([1, 2], jnp.uint4),
        "float8": np.array([1, 2], ml_dtypes.float8_e4m3),
        "w": jnp.arange(3.0),
        "name": "fine",
    }
    jaxckpt.save(tmp_path / "3", tree)

    got = ENTRY_POINTS[entry](tmp_path / "3")

    assert_same({"w": got["w"], "name": got["name"]}, {"w": tree["w"], "name": "fine"})
    assert set(got) == set(tree)
    assert got["bytes"].tobytes() == b"abc"
    assert got["complex"].item() == 1 + 2j
    assert int(got["huge"]) == 1 << 80
    assert got["til~de"].tobytes() == b"text"
    assert np.asarray(got["uint4"]).tolist() == [1, 2]
    assert got["float8"].view(ml_dtypes.float8_e4m3).tolist() == [1, 2]


@pytest.mark.parametrize("entry", ["PyTreeCheckpointer", "CheckpointManager", "v1.load"])
def test_orbax_restores_chunks_with_inner_chunks(tmp_path, entry):
    """Chunks above 32 MiB are divided further, which to Orbax is any zarr array."""
    tree = {
        "np": np.arange(10 << 20, dtype=np.float32).reshape(10, 1 << 20),
        "jax": jnp.arange(9 << 20, dtype=jnp.float32),
    }
    jaxckpt.save(tmp_path / "3", tree)

    got = ENTRY_POINTS[entry](tmp_path / "3")

    assert_same(got, tree)


@every_entry_point
def test_orbax_restores_compressed_arrays(tmp_path, mesh, entry):
    """In one chunk, one for each device, or with inner chunks, to the bit."""
    values = np.cumsum(np.random.default_rng(0).integers(-2, 3, 9 << 20), dtype=np.int32)
    tree = {
        "inner": values,
        "jax": jnp.asarray(values[: 1 << 18], jnp.bfloat16),
        "sharded": jax.device_put(values[: 1 << 20], NamedSharding(mesh, P(("x", "y")))),
        "text": "abc",
    }
    jaxckpt.save(tmp_path / "3", tree, compression="zstd")

    got = ENTRY_POINTS[entry](tmp_path / "3")

    assert_same(got, tree)


# --- targets, metadata, damage ---------------------------------------------------------------


def test_orbax_restores_into_a_target(tmp_path, mesh, make_mesh):
    """Optax states, tuples and keys come back as such, on another mesh and in another dtype."""
    tree = training_tree(mesh)
    tree["scalars"].pop("np")
    del tree["empties"], tree["text"]  # StandardRestore refuses texts in a target
    tree["sequence"] = (1, [np.ones(2)])
    jaxckpt.save(tmp_path / "3", tree)
    other = NamedSharding(make_mesh(a=2), P())

    def wanted(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        dtype = jnp.float32 if leaf.dtype == jnp.bfloat16 else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=other)

    like = jax.tree.map(wanted, tree)
    restored = {
        "standard": ocp.StandardCheckpointer().restore(tmp_path / "3" / "state", like),
        "v1": v1.load(tmp_path / "3", like),
        "manager": with_manager(
            tmp_path / "3",
            lambda m: m.restore(3, args=ocp.args.Composite(state=ocp.args.StandardRestore(like))),
        )["state"],
    }

    for got in restored.values():
        assert jax.tree.structure(got) == jax.tree.structure(tree)
        assert got["params"]["w"].sharding == other
        assert got["params"]["b"].dtype == jnp.float32
        assert np.array_equal(got["params"]["w"], tree["params"]["w"])
        assert np.array_equal(jax.random.key_data(got["keys"]), jax.random.key_data(tree["keys"]))


def test_orbax_shows_our_metadata(tmp_path, mesh):
    """Shapes, dtypes, custom metadata and timestamps are where Orbax looks for them."""
    saved = training_tree(mesh)
    del saved["scalars"]["bool"]  # v1 has no metadata for a tree with a bool, its own either
    jaxckpt.save(tmp_path / "3", saved, custom_metadata={"lr": 0.1})

    tree = ocp.PyTreeCheckpointer().metadata(tmp_path / "3" / "state").item_metadata.tree
    new = v1.metadata(tmp_path / "3")
    named = v1.checkpointables_metadata(tmp_path / "3")
    step = with_manager(tmp_path / "3", lambda m: m.metadata(3))
    names = with_manager(tmp_path / "3", lambda m: (m.all_steps(), m.latest_step()))

    assert tree["params"]["w"].shape == (8, 8)
    assert tree["params"]["b"].dtype == jnp.bfloat16
    assert tree["params"]["w"].sharding.partition_spec == ("x", "y")
    assert new.metadata["params"]["w"].shape == (8, 8)
    assert new.custom_metadata == {"lr": 0.1}
    assert set(named.metadata) == {"state"}
    assert step.custom_metadata == {"lr": 0.1}
    assert step.init_timestamp_nsecs <= step.commit_timestamp_nsecs
    assert names == ([3], 3)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@every_entry_point
def test_orbax_refuses_a_flipped_bit(tmp_path, entry):
    """Our chunks carry checksums that TensorStore checks, so damage reaches no user of Orbax."""
    values = np.random.default_rng(0).standard_normal(5000)
    jaxckpt.save(tmp_path / "3", {"w": values, "ok": 1})
    (file,) = (
        f for f in (tmp_path / "3" / "state").rglob("d/*") if values.tobytes() in f.read_bytes()
    )
    data = bytearray(file.read_bytes())
    data[data.index(values.tobytes()) + 12345] ^= 1
    file.write_bytes(data)

    with pytest.raises((ValueError, KeyError)) as caught:
        ENTRY_POINTS[entry](tmp_path / "3")

    # Some wrap the error of TensorStore, and the manager only logs it.
    said = [str(caught.value), str(caught.value.__cause__), str(caught.value.__context__)]
    del caught
    gc.collect()  # Orbax leaves coroutines of a closed loop behind, which complain when they go
    assert any("Digest mismatch" in text for text in said) or "could not be restored" in said[0]


def test_orbax_finds_the_steps_of_a_run(tmp_path):
    """A root whose steps are our checkpoints is a run to both managers of Orbax."""
    for step in (1, 3, 20):
        jaxckpt.save(tmp_path / str(step), {"step": step})

    with ocp.CheckpointManager(tmp_path) as manager:
        old = (manager.all_steps(), manager.latest_step(), manager.restore(20)["state"])
    with v1.training.Checkpointer(tmp_path) as checkpointer:
        new = ([c.step for c in checkpointer.checkpoints], checkpointer.load())

    assert old == ([1, 3, 20], 20, {"step": 20})
    assert new == ([1, 3, 20], {"step": 20})


def test_orbax_goes_on_with_a_run_of_ours(tmp_path):
    """Orbax saves the next step beside ours and restores both."""
    jaxckpt.save(tmp_path / "1", {"w": np.arange(3)})

    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(2, args=ocp.args.Composite(state=ocp.args.PyTreeSave({"w": np.arange(4)})))
        manager.wait_until_finished()
        got = [manager.restore(step)["state"]["w"].tolist() for step in manager.all_steps()]

    assert got == [[0, 1, 2], [0, 1, 2, 3]]
    assert jaxckpt.restore(tmp_path)["w"].tolist() == [0, 1, 2, 3]


def test_a_copy_that_was_moved_still_restores(tmp_path):
    """Nothing in a checkpoint says where it lies."""
    jaxckpt.save(tmp_path / "a" / "3", {"w": np.arange(4000)})
    (tmp_path / "a").rename(tmp_path / "b")

    assert v1.load(tmp_path / "b" / "3")["w"].tolist() == list(range(4000))


def test_our_tree_has_only_words_of_orbax(tmp_path, mesh):
    """`_METADATA` has only value types that every Orbax reader knows."""
    jaxckpt.save(tmp_path / "3", {**training_tree(mesh), "bytes": b"x", "complex": 1j})

    top = json.loads((tmp_path / "3" / "state" / "_METADATA").read_text())

    kinds = {entry["value_metadata"]["value_type"] for entry in top["tree_metadata"].values()}
    assert kinds <= {"jax.Array", "np.ndarray", "scalar", "string", "None", "Dict", "List", "Tuple"}


@pytest.mark.multihost
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_orbax_restores_what_two_processes_saved(tmp_path, run_processes, compression):
    """In the two processes with the same shardings, and afterwards in one."""
    done = run_processes("reads_orbax:ours_to_orbax", count=2, args=[tmp_path, compression])

    here = NamedSharding(jax.make_mesh((8,), ("z",)), P())
    shapes = {
        "both": ((8, 8), jnp.float32),
        "one": ((8, 512), jnp.int32),
        "all": ((1 << 19,), jnp.float32),
    }
    like = {n: jax.ShapeDtypeStruct(s, d, sharding=here) for n, (s, d) in shapes.items()}
    like |= {"host": np.zeros(5), "step": 0, "name": ""}
    old = ocp.PyTreeCheckpointer().restore(
        tmp_path / "3" / "state",
        restore_args=ocp.checkpoint_utils.construct_restore_args(like),
    )
    new = v1.load(tmp_path / "3", like)

    assert [process.result for process in done] == [[[], [], [], []], [[], [], [], []]]
    assert jaxckpt.verify(tmp_path / "3").ok
    assert jaxckpt.open(tmp_path / "3").leaves["all"].compression == compression
    for got in (old, new):
        assert np.array_equal(got["both"], np.arange(64).reshape(8, 8))
        assert np.array_equal(got["all"], np.arange(1 << 19))
        assert (got["step"], got["name"]) == (7, "two")


# --- keys that end in a slash ----------------------------------------------------------------

SLASHES = {
    "a": {"b/": np.arange(3.0)},
    "c/": {"d//": np.arange(300, dtype=np.int32)},
    "e": 1.5,
    "/": np.ones(2),
    "s/": "text",
}


@pytest.mark.parametrize("item", [None, "state"])
def test_a_key_that_ends_in_a_slash_is_the_same_to_both_libraries(tmp_path, item):
    """Orbax restores our leaf whose last key ends in a slash, and we restore Orbax's."""
    jaxckpt.save(tmp_path / "ours", SLASHES, item=item)
    ocp.PyTreeCheckpointer().save(tmp_path / "theirs", SLASHES)

    theirs = ocp.PyTreeCheckpointer().restore(tmp_path / "ours" / (item or ""))

    assert_same(theirs, SLASHES)
    assert_same(jaxckpt.restore(tmp_path / "theirs"), SLASHES)
    assert jaxckpt.verify(tmp_path / "ours").ok


def test_a_plain_array_whose_key_ends_in_a_slash_is_restored_and_no_link_in_it_followed(tmp_path):
    """In plain files, too, the slash belongs to the name of the array's directory."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    ocp.Checkpointer(handler).save(tmp_path / "plain", {"a": {"b/": np.arange(3.0)}})
    assert_same(jaxckpt.restore(tmp_path / "plain"), {"a": {"b/": np.arange(3.0)}})
    chunk = tmp_path / "plain" / "a.b" / "0"
    chunk.rename(tmp_path / "chunk")
    chunk.symlink_to(tmp_path / "chunk")

    with pytest.raises(CorruptCheckpoint, match="link"):
        jaxckpt.restore(tmp_path / "plain")


def test_a_checkpoint_with_the_keys_of_earlier_releases_is_restored(tmp_path):
    """Earlier releases doubled the slash that ends a name; such a step restores and converts."""
    with tarfile.open(GOLDEN / "ends_in_slash.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    old, new = tmp_path / "ends_in_slash", tmp_path / "new"

    jaxckpt.convert(old, new)

    wanted = {**SLASHES, "c/": {"d//": jnp.arange(300)}}
    assert jaxckpt.verify(old).ok
    assert_same(jaxckpt.restore(old), wanted)
    assert_same(ocp.PyTreeCheckpointer().restore(new / "state"), wanted)


def test_two_keys_that_differ_in_a_slash_at_the_end_are_refused(tmp_path):
    """Orbax writes both to the same place, and so loses one."""
    with pytest.raises(UnsupportedLeaf, match="same name on disk"):
        jaxckpt.save(tmp_path / "step", {"a": 1, "a/": 2})
