"""Programs of Orbax v1 run alike on `jaxckpt.orbax.v1`; each library reads what the other wrote."""

from __future__ import annotations

import gc
import json
import shutil
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt.storage import locate
from tests.orbax.twice import raised, twice

pytest.importorskip("orbax.checkpoint")
from orbax.checkpoint.experimental import v1 as orbax_v1

import jaxckpt.orbax.v1 as ocp

# Orbax leaves coroutines behind where a save fails.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")


@pytest.fixture(autouse=True)
def _forget_coroutines():
    yield
    gc.collect()


class Pair(NamedTuple):
    """A namedtuple, which Orbax restores as a dict."""

    a: Any
    b: Any


TREE = {
    "w": jnp.arange(8.0),
    "pair": Pair(1, jnp.ones(2, jnp.bfloat16)),
    "host": (np.arange(3), 2.5, True),
    "empty": {},
    "none": None,
    "text": "a",
}


class State:
    """Saves itself, as Grain's iterators do."""

    def __init__(self, n):
        self.n = n

    async def save(self, directory):
        async def rest():
            (await directory.await_creation() / "n.json").write_text(json.dumps(self.n))

        return rest()

    async def load(self, directory):
        async def rest():
            self.n = json.loads((directory / "n.json").read_text())

        return rest()


class Word:
    """An object that only its handler knows."""

    def __init__(self, text):
        self.text = text


class WordHandler:
    """The handler of a program's own type."""

    async def save(self, directory, checkpointable):
        async def rest():
            (await directory.await_creation() / "word.txt").write_text(checkpointable.text)

        return rest()

    async def load(self, directory, abstract_checkpointable=None):
        async def rest():
            return (directory / "word.txt").read_text()

        return rest()

    async def metadata(self, directory):
        return "a word"

    def is_handleable(self, checkpointable):
        return isinstance(checkpointable, Word)

    def is_abstract_handleable(self, abstract_checkpointable):
        return isinstance(abstract_checkpointable, Word)


# --- one checkpoint -----------------------------------------------------------------------------


def test_a_tree_comes_back_as_orbax_returns_it(tmp_path):
    """Without a target as lists and dicts, with one in its types; saved in either way."""

    def program(ocp, path):
        ocp.save(path / "a", TREE, custom_metadata={"lr": 1})
        done = []
        response = ocp.save_async(path / "b", TREE)
        response.on_complete(done.append)
        return ocp.metadata(path / "a").custom_metadata, response.result(), done

    def read(ocp, path):
        like = jax.tree.map(lambda x: x if isinstance(x, str) else jnp.zeros_like(x), TREE)
        like |= {"w": jax.ShapeDtypeStruct((8,), jnp.bfloat16), "host": (np.zeros(3), float, bool)}
        return ocp.load(path / "a"), ocp.load(path / "b", TREE), ocp.load(path / "a", like)

    twice(program, tmp_path, read=read, api="v1")


def test_errors_are_those_of_orbax(tmp_path):
    """For paths, leaves, names and targets; nothing is left behind."""

    def program(ocp, path):
        tree = {"w": jnp.ones(2), "n": 1}
        ocp.save(path / "a", tree)
        (path / "empty").mkdir()
        return [
            raised(ocp.save, path / "a", tree),
            raised(ocp.save, path / "empty", tree),
            raised(ocp.save, path / "b", {"x": object()}),
            raised(ocp.save, path / "b", {"x": 2j}),
            raised(ocp.save, path / "b", {}),
            raised(ocp.save, path / "b", None),
            raised(ocp.save_checkpointables, path / "b", {}),
            raised(ocp.save_checkpointables, path / "b", {"metrics": tree}),
            raised(ocp.load, path / "missing"),
            raised(ocp.load, path),
            raised(ocp.load, path / "a" / "state"),
            raised(ocp.load, path / "a", checkpointable_name="x"),
            raised(ocp.load, path / "a", checkpointable_name=None),
            raised(ocp.load, path / "a", checkpointable_name=""),
            raised(ocp.load, path / "a", {"w": jnp.ones(2)}),
            raised(ocp.load, path / "a", {**tree, "w": jnp.ones(3)}),
            raised(ocp.load, path / "a", {**tree, "w": object()}),
            raised(ocp.load_checkpointables, path / "a", {"x": None}),
            raised(ocp.load_checkpointables_async, path / "a"),
            raised(ocp.load_async, path / "a"),
            raised(ocp.metadata, path / "missing"),
            raised(ocp.delete, path / "missing"),
            raised(ocp.delete, path / "a", checkpointable_name="state"),
            ocp.is_orbax_checkpoint(path / "a"),
            ocp.is_orbax_checkpoint(path / "missing"),
        ]

    twice(program, tmp_path, api="v1")


def test_missing_files_and_handlers_are_the_same_errors(tmp_path):
    """What describes a tree or a checkpoint is gone, or the registry has no handler for it."""
    items = {"state": {"w": jnp.ones(1)}, "other": {"w": jnp.ones(2)}}
    orbax_v1.save_checkpointables(tmp_path / "a", items)

    def program(ocp, path):
        shutil.copytree(tmp_path / "a", path / "a")
        context = ocp.Context()
        registry = ocp.handlers.local_registry(include_global_registry=False)
        context.checkpointables.registry = registry
        with context:
            found = [raised(ocp.load, path / "a")]
        (path / "a" / "other" / "_METADATA").unlink()
        found += [raised(ocp.load, path / "a", checkpointable_name="other")]
        found += [raised(ocp.load_checkpointables, path / "a", {"other": None})]
        (path / "a" / "_CHECKPOINT_METADATA").unlink()
        return [*found, raised(ocp.load, path / "a")]

    twice(program, tmp_path, api="v1")


def test_one_tree_without_the_files_that_tell(tmp_path):
    """It has no items, and each missing file leads to the same kind of error."""
    v0 = pytest.importorskip("orbax.checkpoint")
    v0.PyTreeCheckpointer().save(tmp_path / "saved", {"w": jnp.ones(3)})

    def program(ocp, path):
        out = []
        for files in (
            (),
            ("_METADATA",),
            ("_CHECKPOINT_METADATA",),
            ("_METADATA", "_CHECKPOINT_METADATA"),
        ):
            one = path / "-".join(("a", *files))
            shutil.copytree(tmp_path / "saved", one)
            for file in files:
                (one / file).unlink()
            out += [raised(ocp.load_checkpointables, one)]
            out += [raised(ocp.load_checkpointables, one, {"w": None}), raised(ocp.metadata, one)]
            out += [type(raised(ocp.checkpointables_metadata, one)).__name__]
        return out

    twice(program, tmp_path, api="v1")


def test_metadata_tells_how_arrays_are_stored(tmp_path):
    """The shapes of their chunks; and directories that no handler knows are items without any."""
    mesh = jax.make_mesh((len(jax.devices()),), ("x",))
    split = jax.device_put(jnp.zeros((8, 4)), NamedSharding(mesh, P("x")))
    tree = {"split": split, "host": np.ones((3, 2)), "key": jax.random.key(1), "scalar": 2}

    def program(ocp, path):
        ocp.save_checkpointables(path / "a", {"state": tree})
        (path / "a" / "other").mkdir()
        (path / "a" / "other" / "data.txt").write_text("some data")

    def read(ocp, path):
        found = ocp.checkpointables_metadata(path / "a").metadata
        stored = {k: getattr(v, "storage_metadata", None) for k, v in found["state"].items()}
        shapes = {k: v and (v.chunk_shape, v.write_shape) for k, v in stored.items()}
        return sorted(found), found["other"], shapes

    twice(program, tmp_path, read=read, api="v1")


@pytest.mark.parametrize("handlers", [[], ["PyTreeHandler", "JsonHandler"]])
@pytest.mark.parametrize("is_recorded", [True, False])
def test_only_registered_handlers_load_items(tmp_path, handlers, is_recorded):
    """JSON is loaded by a handler in the registry, if it is recorded who saved it."""

    def context(ocp, kinds, **named):
        context = ocp.Context()
        registry = ocp.handlers.local_registry(include_global_registry=False)
        for kind in kinds:
            registry.add(getattr(ocp.handlers, kind))
        for name, kind in named.items():
            registry.add(getattr(ocp.handlers, kind), checkpointable_name=name)
        context.checkpointables.registry = registry
        return context

    with context(orbax_v1, [], state="PyTreeHandler", about="JsonHandler"):
        items = {"state": {"w": 1}, "about": {"b": "text"}}
        orbax_v1.save_checkpointables(tmp_path / "saved", items)
    if not is_recorded:
        file = tmp_path / "saved" / "_CHECKPOINT_METADATA"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"item_handlers": {}}))

    def program(ocp, path):
        shutil.copytree(tmp_path / "saved", path / "a")
        with context(ocp, handlers, state="PyTreeHandler"):
            error = raised(ocp.load_checkpointables, path / "a")
            return type(error).__name__, ocp.load(path / "a", checkpointable_name="state")

    twice(program, tmp_path, api="v1")


@pytest.mark.parametrize("pads", [False, True])
def test_a_numpy_array_has_the_saved_shape(tmp_path, pads):
    """Also one to which a jax array is to be restored; only jax arrays are padded."""

    def program(ocp, path):
        tree = {"w": jnp.ones((2, 3)), "n": np.ones((2, 3)), "i": np.arange(4), "s": 3}
        ocp.save(path / "a", tree)
        ocp.save(path / "key", {"k": jax.random.key(1)})

    def read(ocp, path):
        numpy = {"w": np.zeros((3, 2)), "n": np.zeros((3, 2, 1)), "i": np.zeros(2), "s": np.ones(1)}
        context = ocp.Context()
        context.array.loading.enable_padding_and_truncation = pads
        with context:
            key = ocp.load(path / "key", {"k": np.zeros(1, np.uint32)})
            jax_array = jax.ShapeDtypeStruct((3 if pads else 2, 3), jnp.float32)
            return key, ocp.load(path / "a", numpy), ocp.load(path / "a", numpy | {"w": jax_array})

    twice(program, tmp_path, read=read, api="v1")


def test_arrays_without_a_shape(tmp_path):
    """`np.array([])` in a target asks for a numpy array of the saved shape."""

    def program(ocp, path):
        ocp.save(path / "a", {"w": jnp.ones((2, 3)), "n": np.arange(4), "s": 3, "o": {"m": 1.5}})

    def read(ocp, path):
        any_array = np.array([])
        target = {"w": any_array, "n": any_array.astype(int), "s": any_array, "o": {"m": ...}}
        return ocp.load(path / "a", target)

    twice(program, tmp_path, read=read, api="v1")


def test_an_item_deleted_by_hand(tmp_path):
    """The others are loaded; asked for by its name, it is a KeyError."""

    def program(ocp, path):
        ocp.save_checkpointables(path / "a", {"one": {"x": 1}, "two": {"y": 2}})
        shutil.rmtree(path / "a" / "two")

    def read(ocp, path):
        asked = raised(ocp.load_checkpointables, path / "a", {"two": None})
        return ocp.load_checkpointables(path / "a"), type(asked).__name__

    twice(program, tmp_path, read=read, api="v1")


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("part", ["", "/3/state"], ids=["a run", "an item"])
def test_delete_takes_only_a_checkpoint_at_a_url(tmp_path, kind, part):
    """Not all steps of a run, nor the files of an item: the checkpoint found there is another."""
    root = f"memory://{tmp_path.name}" if kind == "memory" else tmp_path.as_uri()
    with jaxckpt.CheckpointManager(root) as manager:
        manager.save(3, {"w": 1.0})
    storage, where = locate(root)
    before = storage.files(where)

    with pytest.raises(ocp.errors.InvalidLayoutError, match="3 is one"):
        ocp.delete(root + part)

    assert storage.files(where) == before


def test_items_of_all_kinds(tmp_path):
    """Trees, JSON by its handler, an object that saves itself, and one with a handler."""

    def context(ocp):
        context = ocp.Context()
        context.checkpointables.registry = ocp.handlers.local_registry()
        context.checkpointables.registry.add(WordHandler)
        context.checkpointables.registry.add(ocp.handlers.JsonHandler, checkpointable_name="json")
        return context

    def program(ocp, path):
        items = {"model": TREE, "text": "a", "json": [1, {"a": None}], "data": State(5)}
        with context(ocp):
            ocp.save_checkpointables(path / "a", items | {"word": Word("hello")})
            found = ocp.checkpointables_metadata(path / "a").metadata
        return found["text"], found["json"], found["word"], sorted(found)

    def read(ocp, path):
        state = State(0)
        with context(ocp):
            targets = {"word": Word(""), "json": None, "data": state, "model": TREE}
            found = ocp.load_checkpointables(path / "a", targets)
        assert found.pop("data") is state
        return found, state.n, ocp.load(path / "a", checkpointable_name="text")

    twice(program, tmp_path, read=read, api="v1")


def test_a_damaged_file_of_a_handler_is_not_handed_to_it(tmp_path):
    context = ocp.Context()
    context.checkpointables.registry = ocp.handlers.local_registry()
    context.checkpointables.registry.add(WordHandler, checkpointable_name="word")
    with context:
        ocp.save_checkpointables(tmp_path / "a", {"word": Word("one"), "state": {"n": 1}})
        assert ocp.load_checkpointables(tmp_path / "a")["word"] == "one"
        (tmp_path / "a" / "word" / "word.txt").write_text("two")

        with pytest.raises(jaxckpt.CorruptCheckpoint, match="is damaged"):
            ocp.load_checkpointables(tmp_path / "a")


def test_a_handler_that_saves_a_tree_with_that_of_trees(tmp_path):
    """With the options of the context, targets of any kind, and metadata as of other trees."""

    class Pairs:
        def __init__(self):
            self.trees = ocp_now.handlers.PyTreeHandler()

        async def save(self, directory, checkpointable):
            return await self.trees.save(directory, dict(checkpointable))

        async def load(self, directory, abstract_checkpointable=None):
            return await self.trees.load(directory, abstract_checkpointable)

        async def metadata(self, directory):
            return await self.trees.metadata(directory)

        def is_handleable(self, checkpointable):
            return isinstance(checkpointable, list)

        def is_abstract_handleable(self, abstract_checkpointable):
            return True

    def context(ocp, dtype=None):
        nonlocal ocp_now
        ocp_now = ocp
        context = ocp.Context()
        context.array.saving.storage_options.dtype = dtype
        context.checkpointables.registry = ocp.handlers.local_registry()
        context.checkpointables.registry.add(Pairs, checkpointable_name="pairs")
        return context

    def program(ocp, path):
        pairs = [("w", np.ones(2)), ("n", 3)]
        with context(ocp, np.dtype(np.float16)):
            ocp.save_checkpointables(path / "a", {"pairs": pairs, "state": {"n": 1}})
            found = ocp.checkpointables_metadata(path / "a").metadata["pairs"]
            target = {"pairs": {"w": np.ndarray, "n": float}}
            loaded = ocp.load_checkpointables(path / "a", target)
        return found["n"], type(found["w"]).__name__, found["w"].dtype, loaded

    ocp_now = ocp
    twice(program, tmp_path, api="v1")


def test_an_object_that_saves_itself_does_so_in_the_background(tmp_path):
    """Its `save` runs at once, and the rest ends before the commit; `result` raises its error."""

    class Slow(State):
        async def save(self, directory):
            async def rest():
                go.wait(10)
                (await directory.await_creation() / "n.json").write_text(json.dumps(10 // n))

            n = self.n
            return rest()

    def program(ocp, path):
        go.clear()
        slow = Slow(5)
        response = ocp.save_checkpointables_async(path / "a", {"state": {"n": 1}, "data": slow})
        slow.n = 6
        go.set()
        return response.result()

    def read(ocp, path):
        return ocp.load_checkpointables(path / "a", {"data": (state := State(0))}) and state.n

    go = threading.Event()
    twice(program, tmp_path, read=read, api="v1")
    response = ocp.save_checkpointables_async(tmp_path / "b", {"data": Slow(0)})
    with pytest.raises(ZeroDivisionError):
        response.result()
    assert not (tmp_path / "b").exists()


def test_an_object_without_a_handler_is_an_error_on_both_sides(tmp_path):
    """KeyError for one that cannot be saved or loaded, ValueError without the object to load."""

    def program(ocp, path):
        ocp.save_checkpointables(path / "a", {"state": {"n": 1}, "data": State(5)})
        return (
            raised(ocp.save_checkpointables, path / "b", {"word": Word("a")}),
            raised(ocp.load_checkpointables, path / "a"),
            ocp.load_checkpointables(path / "a", {"state": None}),
        )

    twice(program, tmp_path, api="v1")


def test_deletion_of_an_item_and_of_a_checkpoint(tmp_path):
    """The rest stays loadable; what is missing may be allowed to be."""

    def program(ocp, path):
        ocp.save_checkpointables(path / "a", {"state": {"n": 1}, "ema": {"n": 2}})
        return (
            ocp.delete(path / "a", checkpointable_name="ema"),
            ocp.load_checkpointables(path / "a"),
            raised(ocp.delete, path / "a", checkpointable_name="ema"),
            ocp.delete(path / "a", checkpointable_name="ema", missing_ok=True),
            ocp.delete_async(path / "a").result(),
            ocp.delete(path / "a", missing_ok=True),
        )

    twice(program, tmp_path, api="v1")


def test_a_checkpoint_is_overwritten_without_a_moment_without_one(tmp_path, caplog):
    """As Orbax does it, but for the order, of which one warning tells."""

    def program(ocp, path):
        ocp.save(path / "a", {"n": 1})
        ocp.save(path / "a", {"n": 2}, overwrite=True)
        ocp.save_async(path / "a", {"n": 3}, overwrite=True).result()
        return ocp.load(path / "a")

    twice(program, tmp_path, api="v1")


def test_shardings(tmp_path, mesh):
    """As saved, or those of the target or of metadata."""
    split, whole = NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P())
    w = jax.device_put(jnp.arange(64.0).reshape(8, 8), split)

    def program(ocp, path):
        ocp.save(path / "a", {"w": w})

    def read(ocp, path):
        like = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=whole)
        found = ocp.metadata(path / "a")
        leaf = found.metadata["w"]
        return (
            ocp.load(path / "a"),
            ocp.load(path / "a", {"w": like}),
            ocp.load(path / "a", found),
            ocp.load(path / "a", jax.tree.map(ocp.arrays.to_shape_dtype_struct, found.metadata)),
            (leaf.shape, leaf.dtype, leaf.sharding == split),
        )

    twice(program, tmp_path, read=read, api="v1")


def test_leaves_may_be_left_out(tmp_path):
    """By PLACEHOLDER, by a partial load, and a type stands for its values."""

    def program(ocp, path):
        ocp.save(path / "a", {"w": jnp.ones(2), "h": np.ones(2), "n": 1, "d": {"x": 2}})

    def read(ocp, path):
        context = ocp.Context()
        context.pytree.loading.partial_load = True
        with context:
            some = ocp.load(path / "a", {"n": 0}), ocp.load(path / "a", {"n": 0, "new": 7})
        subtree = {"w": ocp.PLACEHOLDER, "h": np.ones(2), "n": 1, "d": ocp.PLACEHOLDER}
        wanted = {"w": ocp.PLACEHOLDER, "h": np.ndarray, "n": float, "d": {"x": int}}
        return some, ocp.load(path / "a", wanted), raised(ocp.load, path / "a", subtree)

    twice(program, tmp_path, read=read, api="v1")


def test_options_of_arrays(tmp_path):
    """A dtype for all or by path, and arrays cut off or padded to the target."""

    def program(ocp, path):
        context = ocp.Context()
        context.array.saving.storage_options.dtype = np.dtype(jnp.bfloat16)
        with context:
            ocp.save(path / "a", {"w": jnp.ones(2), "i": jnp.arange(3), "f": 1.5, "n": 3})
        saving = ocp.options.ArrayOptions.Saving
        scoped = saving.StorageOptions(dtype=np.dtype(np.float16))
        context = ocp.Context()
        context.array.saving.scoped_storage_options_creator = lambda keys, _: (
            scoped if "w" in str(keys) else None
        )
        with context:
            ocp.save(path / "b", {"w": jnp.ones(2), "v": jnp.ones(2)})

    def read(ocp, path):
        context = ocp.Context()
        context.array.loading.enable_padding_and_truncation = True
        like = {name: jax.ShapeDtypeStruct((n,), jnp.float32) for name, n in (("w", 4), ("v", 1))}
        with context:
            return ocp.load(path / "a"), ocp.load(path / "b"), ocp.load(path / "b", like)

    twice(program, tmp_path, read=read, api="v1")


def test_a_context_is_an_object_and_a_with(tmp_path):
    """It is copied from another, cannot be changed while it is active, and is not inherited."""

    def program(ocp, path):
        outer = ocp.Context(pytree_options=ocp.options.PyTreeOptions())
        outer.pytree.loading.partial_load = True
        inner = ocp.Context(outer, checkpoint_layout="auto")
        with outer as active, inner:
            errors = [
                raised(setattr, outer.pytree.loading, "partial_load", False),
                raised(setattr, inner, "checkpoint_layout", "orbax"),
                raised(setattr, ocp.Context(), "array", None),
            ]
        inner.pytree.loading.partial_load = False
        assert active is outer
        return (
            errors,
            outer.pytree_options.loading.partial_load,
            ocp.Context().pytree.loading.partial_load,
            (inner.checkpoint_layout.value, outer.async_options.timeout_secs),
        )

    twice(program, tmp_path, api="v1")


def test_safetensors(tmp_path):
    """A file or a directory of files is one dict by name; a layout of its own."""
    tensors = {"a.b": jnp.arange(4.0), "c": jnp.ones((2, 2), jnp.bfloat16)}

    def program(ocp, path):
        for name, one in tensors.items():
            jaxckpt.save(path.parent / f"{path.name}-{name}", {name: one})
            jaxckpt.export_safetensors(
                path.parent / f"{path.name}-{name}", path / f"{name[0]}.safetensors"
            )

    def read(ocp, path):
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        like = {"a.b": jax.ShapeDtypeStruct((4,), jnp.bfloat16, sharding=here)}
        found = []
        for layout in ("safetensors", "auto"):
            with ocp.Context(checkpoint_layout=layout):
                found += [ocp.load(path), ocp.metadata(path).metadata]
                found += [ocp.metadata(path / "a.safetensors").custom_metadata]
                found += [ocp.metadata(path / "a.safetensors").commit_timestamp is not None]
                found += [raised(ocp.load_checkpointables, path), raised(ocp.load, path / "no")]
        with ocp.Context(checkpoint_layout="safetensors"):
            found += [raised(ocp.save, path / "x", {"n": 1}), raised(ocp.load, path, {"no": 1})]
            found += [raised(ocp.load, path, {"a": {"b": 1}}), raised(ocp.metadata, path / "no")]
            return found, ocp.load(path / "a.safetensors", like), ocp.load_async(path).result()

    twice(program, tmp_path, read=read, api="v1")


def test_callbacks_and_refusals(tmp_path):
    """The callback is called after the commit; an option without an effect raises."""
    called = []
    context = ocp.Context()
    context.asynchronous.post_finalization_callback = lambda: called.append(1)
    with context:
        ocp.save(tmp_path / "a", {"n": 1})
        ocp.save_async(tmp_path / "b", {"n": 1}).result()
    assert called == [1, 1]

    context = ocp.Context()
    context.multiprocessing.active_processes = {0}
    with context, pytest.raises(NotImplementedError, match="active_processes"):
        ocp.save(tmp_path / "c", {"n": 1})
    context = ocp.Context()
    context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
    with context, pytest.raises(NotImplementedError, match="one commit protocol"):
        ocp.save(tmp_path / "c", {"n": 1})
    assert not (tmp_path / "c").exists()
    with pytest.raises(AttributeError, match="nonsense"):
        _ = ocp.nonsense
    assert {*ocp.__all__} <= {*dir(ocp)}


def test_options_have_the_names_of_orbax():
    """Each class at the top."""
    names = [name for name in vars(orbax_v1.options) if name[0].isupper()]

    assert {name for name in names if not hasattr(ocp.options, name)} == set()
    assert [*ocp.options.AtomicityMode] == [*orbax_v1.options.AtomicityMode]


def test_old_names(tmp_path):
    """They warn and work."""
    with pytest.warns(DeprecationWarning, match="`save`"):
        ocp.save_pytree(tmp_path / "a", {"n": 1})
    with pytest.warns(DeprecationWarning, match="`load`"):
        assert ocp.load_pytree(tmp_path / "a") == {"n": 1}


def test_checkpoints_of_v0(tmp_path):
    """One that is a tree itself, a step with the item `default`, and one of several items."""
    import orbax.checkpoint as v0

    def program(ocp, path):
        with v0.StandardCheckpointer() as checkpointer:
            checkpointer.save(path / "flat", {"n": 1})
        with v0.CheckpointManager(path / "run") as manager:
            manager.save(1, args=v0.args.StandardSave({"n": 2}))
        with v0.CheckpointManager(path / "items") as manager:
            items = {"a": v0.args.StandardSave({"n": 3}), "j": v0.args.JsonSave({"x": 1})}
            manager.save(1, args=v0.args.Composite(**items))

    def read(ocp, path):
        return (
            ocp.load(path / "flat"),
            ocp.load(path / "flat", checkpointable_name=None),
            raised(ocp.load_checkpointables, path / "flat"),
            ocp.load(path / "run" / "1"),
            raised(ocp.load, path / "run"),
            ocp.load_checkpointables(path / "run" / "1"),
            ocp.load_checkpointables(path / "items" / "1"),
            ocp.load_checkpointables(path / "items" / "1", {"j": None}),
            ocp.metadata(path / "items" / "1").metadata,
        )

    twice(program, tmp_path, read=read, api="v1")
