"""Programs with checkpointers do the same with Orbax and with the drop-in."""

from __future__ import annotations

import asyncio
import pydoc
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as theirs
import pytest
from flax.training import orbax_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint.experimental import v1 as theirs_v1

import jaxckpt
import jaxckpt.orbax as ours
from jaxckpt.orbax import policies
from tests.orbax.twice import raised, read_each, twice

pytestmark = pytest.mark.filterwarnings("ignore")


def tree(n=0.0):
    return {"w": jnp.arange(4.0) + n, "n": np.arange(3.0), "step": 3}


def test_the_handler_of_a_flat_checkpoint(tmp_path):
    """It is one text, whichever handler asks; Orbax's composite handler refuses to describe it."""
    with ours.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", tree())

    found = ours.Checkpointer(ours.CompositeCheckpointHandler()).metadata(tmp_path / "a")

    assert found.item_handlers.endswith(".StandardCheckpointHandler")


def read_flat(ocp, path):
    with ocp.StandardCheckpointer() as checkpointer:
        return ocp.PyTreeCheckpointer().restore(path / "a"), checkpointer.restore(
            path / "a", tree()
        )


def test_a_tree_in_a_directory(tmp_path):
    """PyTreeCheckpointer writes the tree into the directory itself, and restores it."""

    def program(ocp, path):
        checkpointer = ocp.PyTreeCheckpointer()
        save, restore = checkpointer.save, checkpointer.restore
        save(path / "a", tree())
        out = [raised(save, path / "a", tree()), restore(path / "a"), restore(str(path / "a"))]
        save(path / "a", tree(1.0), force=True)
        out += [restore(path / "a", item=tree()), raised(restore, path / "none")]
        (path / "b").mkdir()
        out += [raised(save, path / "b", tree())]
        save(path / "b", tree(), force=True)
        save(path / "c", tree(), save_args=orbax_utils.save_args_from_target(tree()))
        half = jax.tree.map(lambda x: ocp.SaveArgs(dtype=jnp.dtype("float16")), {"w": 0, "n": 0})
        save(path / "d", {"w": jnp.ones(2), "n": 3}, save_args=half)
        out += [restore(path / "b"), restore(path / "c"), restore(path / "d")]
        found = checkpointer.metadata(path / "a").item_metadata
        out += [jax.tree.map(lambda x: type(x).__name__, found.tree), [*found], "w" in found]
        out += [found.tree == checkpointer.metadata(path / "b").item_metadata.tree]
        args = jax.tree.map(lambda x: ocp.RestoreArgs(restore_type=np.ndarray), found.tree)
        return [*out, restore(path / "a", restore_args=args)]

    twice(program, tmp_path, read=read_flat)


@pytest.mark.parametrize("verb", ["save", "async_save"])
def test_a_handler_that_saves_with_another_one(tmp_path, verb):
    """Into its own directory, or one below it, beside a file of its own."""

    def program(ocp, path):
        class Wrapper(ocp.AsyncCheckpointHandler):
            def __init__(self):
                self.inner = ocp.PyTreeCheckpointHandler()

            def save(self, directory, item):
                (directory / "note.txt").write_text("mine")
                if verb == "save":
                    self.inner.save(directory, item=item)
                else:
                    for future in asyncio.run(self.async_save(directory, item)) or ():
                        future.result()

            async def async_save(self, directory, item):
                (directory / "note.txt").write_text("mine")
                return await self.inner.async_save(directory, item=item)

            def restore(self, directory, item=None):
                return self.inner.restore(directory), (directory / "note.txt").read_text()

            def finalize(self, directory):
                self.inner.finalize(directory)

        checkpointer = ocp.Checkpointer(Wrapper())
        checkpointer.save(path / "a", tree())
        return checkpointer.restore(path / "a")

    twice(program, tmp_path)


def test_files_of_the_program_stay(tmp_path):
    """A file that the program added survives `force=True`, and is in nobody's way."""

    def program(ocp, path):
        checkpointer = ocp.PyTreeCheckpointer()
        checkpointer.save(path / "a", tree(), force=True)
        (path / "a" / "config.json").write_text("{}")
        out = checkpointer.restore(path / "a")
        checkpointer.save(path / "a", tree(1.0), force=True)
        (path / "a" / "config.json").write_text("{}")
        return out

    twice(program, tmp_path, read=read_flat)


def test_replacing_warns_once(tmp_path, caplog):
    """`force=True` replaces the old checkpoint by the complete new one, and says so once."""
    policies.warn_once.cache_clear()
    checkpointer = ours.PyTreeCheckpointer()
    for _ in range(3):
        checkpointer.save(tmp_path / "a", tree(), force=True)

    assert caplog.text.count("force=True") == 1


def test_the_standard_checkpointer(tmp_path):
    """It saves in the background, and restores with the types of a target."""

    def program(ocp, path):
        with ocp.StandardCheckpointer() as checkpointer:
            save, restore = checkpointer.save, checkpointer.restore
            save(path / "a", tree(), custom_metadata={"k": 1})
            checkpointer.wait_until_finished()
            shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree())
            out = [restore(path / "a"), restore(path / "a", tree()), restore(path / "a", shapes)]
            out += [raised(save, path / "a", tree())]
            out += [raised(restore, path / "a", {"w": jnp.ones(4)})]
            save(path / "a", tree(3.0), force=True)
            checkpointer.check_for_errors()
        other = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        return [*out, other.restore(path / "a", ocp.args.PyTreeRestore(tree()))]

    twice(program, tmp_path, read=read_flat)


def test_targets_that_describe_what_jax_makes_of_the_values(tmp_path):
    """A PRNG key by its data; values of 64 bits, of which jax makes 32; those in metadata."""
    state = {"key": jax.random.key(3), "w": jnp.ones(3), "x": np.arange(3.0)}
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {
        "key": jax.ShapeDtypeStruct((2,), np.uint32, sharding=place),
        "w": jax.ShapeDtypeStruct((3,), np.float32, sharding=place),
        "x": jax.ShapeDtypeStruct((3,), np.float64, sharding=place),
    }

    def program(ocp, path):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path / "a", state)
            checkpointer.wait_until_finished()
            found = checkpointer.restore(path / "a", target)
        other = ocp.PyTreeCheckpointer()
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), state)
        leaf = other.metadata(path / "a").item_metadata.tree["w"]
        described = ocp.utils.to_shape_dtype_struct(leaf)
        return found, other.restore(path / "a", restore_args=args), described.shape, described.dtype

    twice(program, tmp_path)


def test_metadata_describes_a_key_by_its_data(tmp_path, mesh):
    """Its shape, dtype and sharding, of which restore args make the same key."""
    keys = jax.device_put(jax.random.split(jax.random.key(1), 8), NamedSharding(mesh, P("x")))

    def program(ocp, path):
        ocp.PyTreeCheckpointer().save(path / "a", {"keys": keys, "key": jax.random.key(2)})
        with ocp.CheckpointManager(path / "run") as manager:
            manager.save(1, args=ocp.args.StandardSave({"keys": keys}))

    def read(ocp, path):
        checkpointer, v1 = ocp.PyTreeCheckpointer(), {theirs: theirs_v1, ours: ours.v1}[ocp]
        tree = checkpointer.metadata(path / "a").item_metadata.tree
        args = ocp.checkpoint_utils.construct_restore_args(tree)
        new = v1.metadata(path / "run" / "1", checkpointable_name="default").metadata["keys"]
        sharding = tree["keys"].sharding.to_jax_sharding()
        return (
            [(leaf.shape, leaf.dtype) for leaf in (tree["keys"], tree["key"], new)],
            [sharding, new.sharding, sharding.mesh.axis_types],
            checkpointer.restore(path / "a", restore_args=args),
        )

    twice(program, tmp_path, read=read)


@pytest.mark.parametrize("ocp", [theirs, ours], ids=["theirs", "ours"])
def test_what_cannot_be_saved(tmp_path, ocp):
    """Empty trees, and leaves that are not arrays, raise ValueError."""
    with pytest.raises(ValueError, match="empty"):
        ocp.PyTreeCheckpointer().save(tmp_path / "a", {})
    if ocp is theirs:  # whose other errors come from a thread, now or when it is closed
        return
    with ocp.StandardCheckpointer() as checkpointer:
        for value in ({"a": "text"}, jnp.ones(2), None):
            with pytest.raises(ValueError, match=r"."):
                checkpointer.save(tmp_path / "b", value)


def test_other_handlers(tmp_path):
    """JSON, arrays and composites in a directory."""

    def program(ocp, path):
        for name, handler, value in (
            ("json", ocp.JsonCheckpointHandler(), {"x": [1]}),
            ("file", ocp.JsonCheckpointHandler("other"), {"x": [2]}),
            ("array", ocp.ArrayCheckpointHandler(), jnp.arange(3.0)),
        ):
            ocp.Checkpointer(handler).save(path / name, value)
        checkpointer = ocp.Checkpointer(ocp.CompositeCheckpointHandler("state", "meta"))
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(tree()), meta=ocp.args.JsonSave({"y": 2})
        )
        checkpointer.save(path / "both", args=args)
        found = checkpointer.metadata(path / "both")
        return sorted(found.item_handlers), sorted(found.item_metadata)  # of sets

    def read(ocp, path):
        out = [
            ocp.Checkpointer(handler).restore(path / name)
            for name, handler in (
                ("json", ocp.JsonCheckpointHandler()),
                ("file", ocp.JsonCheckpointHandler("other")),
                ("array", ocp.ArrayCheckpointHandler()),
            )
        ]
        checkpointer = ocp.Checkpointer(ocp.CompositeCheckpointHandler("state", "meta"))
        args = ocp.args.Composite(state=ocp.args.StandardRestore(tree()))
        return [*out, checkpointer.restore(path / "both", args=args)]

    read_each(program, read, tmp_path)


def test_transforms(tmp_path):
    """Leaves are renamed, left out, taken from the target or computed."""

    def program(ocp, path):
        checkpointer = ocp.PyTreeCheckpointer()
        checkpointer.save(path / "a", {"old": {"w": jnp.ones(2)}, "b": np.ones(1), "c": 4})

        def restore(item, **transforms):
            args = jax.tree.map(lambda x: ocp.RestoreArgs(), item)
            given = {"item": item, "restore_args": args, "transforms": transforms}
            return checkpointer.restore(path / "a", **given)

        item = {"new": {"w": jnp.zeros(2)}, "b": np.zeros(1), "z": 7}
        return [
            restore(item, **{r"new/(.*)": ocp.Transform(original_key=r"old/\1")}),
            restore({"b": np.zeros(1)}),
            restore({"b": np.zeros(1)}, b=ocp.Transform(use_fallback=True)),
            restore({"b": np.zeros(1)}, b=ocp.Transform(value_fn=lambda x: x * 3)),
        ]

    twice(program, tmp_path)


def test_trees_merged_and_intersected(tmp_path):
    """The leaves of the last tree count, by their paths; what is empty has none."""

    def program(ocp, path):
        w, more = {"a": [1, 2], "b": {"c": np.ones(2)}, "d": {}}, {"a": (4, 5, 6), "b": {"e": 7}}
        out = []
        for call in (ocp.transform_utils.merge_trees, ocp.transform_utils.intersect_trees):
            out += [call(w, more), call(more, w), call(w, w, w), call(w), call(more, {"x": 1})]
            out += [call(w, more, target={"a": [0, 0]}), raised(call, w, more, target={"y": 0})]
        return out

    twice(program, tmp_path)


def test_transforms_of_names_that_contain_a_slash(tmp_path):
    """Leaves of Haiku are restored, under their own names and under others."""

    def program(ocp, path):
        checkpointer, item = ocp.PyTreeCheckpointer(), {"mlp/~/linear": {"w": jnp.zeros(2)}}
        checkpointer.save(path / "a", {"mlp/~/linear": {"w": jnp.ones(2)}, "b": 1})
        renamed = {r"new/(.*)": ocp.Transform(original_key=r"mlp/~/linear/\1")}

        def restore(item, transforms):
            args = jax.tree.map(lambda x: ocp.RestoreArgs(), item)
            given = {"item": item, "restore_args": args, "transforms": transforms}
            return checkpointer.restore(path / "a", **given)

        return [restore(item, {}), restore({"new": {"w": jnp.zeros(2)}}, renamed)]

    twice(program, tmp_path)


def test_a_save_in_the_background_fails_when_it_is_waited_for(tmp_path):
    """The error is raised by the next wait, and nothing is left at the path."""
    (tmp_path / "file").write_text("")
    with pytest.raises((OSError, jaxckpt.SaveFailed)), ours.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "file" / "a", tree())


def test_a_handler_that_writes_in_the_background(tmp_path):
    """Its futures end before the commit, their error is raised as it is, and it is closed."""

    def program(ocp, path, text="hi"):
        class Handler(ocp.AsyncCheckpointHandler):
            def save(self, directory, item):
                raise NotImplementedError

            async def async_save(self, directory, item):
                return [pool.submit((directory / "note").write_text, item)]

            def restore(self, directory):
                return (directory / "note").read_text()

            def finalize(self, directory):
                (directory / "end").touch()

            def close(self):
                closed.append(1)

        closed = []
        options = ocp.AsyncOptions(create_directories_asynchronously=False)
        with ThreadPoolExecutor(1) as pool:
            with ocp.AsyncCheckpointer(Handler(), async_options=options) as checkpointer:
                checkpointer.save(path / "a", text)
                checkpointer.wait_until_finished()
                found = checkpointer.restore(path / "a")
            more = {"options": ocp.CheckpointManagerOptions(async_options=options)}
            with ocp.CheckpointManager(path / "run", {"a": checkpointer}, **more) as manager:
                manager.save(0, {"a": text})
        return found, len(closed)

    twice(program, tmp_path)
    with pytest.raises(TypeError, match="write"):
        program(ours, tmp_path / "fails", 3)


def from_name(item_handlers):
    """The handler that a checkpoint names, made as the program finds the class: in Orbax."""
    if isinstance(item_handlers, str):
        return pydoc.locate(item_handlers)()  # pyright: ignore[reportCallIssue]
    made = {name: from_name(handler) for name, handler in item_handlers.items()}
    return theirs.CompositeCheckpointHandler(**made)


def test_handlers_of_orbax_itself(tmp_path):
    """A program gives those that a checkpoint names to checkpointers, managers and registries."""

    def program(ocp, path):
        args, key = ocp.args, jax.random.key(0)
        items = {
            "state": args.PyTreeSave(tree()),
            "more": args.StandardSave({"w": jnp.ones(3)}),
            "facts": args.JsonSave({"a": 1}),
            "array": args.ArraySave(jnp.arange(3)),
            "key": args.JaxRandomKeySave(key),
        }
        with ocp.CheckpointManager(path / "run") as manager:
            manager.save(1, args=args.Composite(**items))
        named = ocp.metadata.get_step_metadata(path / "run" / "1").item_handlers
        with ocp.Checkpointer(from_name(named)) as checkpointer:
            found = checkpointer.metadata(path / "run" / "1").item_metadata
            out = [sorted(found), jax.tree.map(lambda x: type(x).__name__, found["state"].tree)]
            out += [
                jax.tree.map(
                    lambda x: isinstance(x, ocp.metadata.ArrayMetadata), found["more"].tree
                )
            ]
            out += [checkpointer.restore(path / "run" / "1")]
            out += [
                checkpointer.restore(
                    path / "run" / "1", args.Composite(more=args.StandardRestore())
                )
            ]
        named = {name: from_name(handler) for name, handler in named.items()}
        with ocp.CheckpointManager(path / "run", item_handlers=named) as manager:
            manager.save(2, args=args.Composite(**items))
            out += [manager.restore(2), manager.item_metadata(2)["facts"]]
        registry = theirs.DefaultCheckpointHandlerRegistry()
        registry.add("facts", theirs.args.JsonRestore, theirs.JsonCheckpointHandler())
        registry.add(None, theirs.args.PyTreeRestore, theirs.PyTreeCheckpointHandler())
        with ocp.CheckpointManager(path / "run", handler_registry=registry) as manager:
            wanted = args.Composite(facts=args.JsonRestore(), state=args.PyTreeRestore())
            out += [manager.restore(2, args=wanted)]
        with ocp.AsyncCheckpointer(theirs.JsonCheckpointHandler("a.json")) as checkpointer:
            checkpointer.save(path / "json", args=args.JsonSave([1]))
            checkpointer.wait_until_finished()
            out += [checkpointer.restore(path / "json")]
        return out

    def read(ocp, path):
        return ocp.Checkpointer(theirs.JsonCheckpointHandler("a.json")).restore(path / "json")

    read_each(program, read, tmp_path)


def test_what_a_handler_of_orbax_becomes():
    """One of this library's, unless it has handlers of leaves of its own."""
    composite = theirs.CompositeCheckpointHandler("a", b=theirs.PyTreeCheckpointHandler())
    registry = theirs.type_handlers.create_type_handler_registry()
    special = theirs.PyTreeCheckpointHandler(type_handler_registry=registry)
    file = ours.handlers.as_ours(theirs.JsonCheckpointHandler("p.json"))

    assert type(ours.Checkpointer(composite).handler) is ours.CompositeCheckpointHandler
    assert ours.handlers.as_ours(special) is special
    assert (type(file), file._filename) == (ours.JsonCheckpointHandler, "p.json")
    assert type(ours.handlers.as_ours(theirs.CompositeCheckpointHandler())) is type(
        ours.handlers.as_ours(composite)
    )


def test_handlers_and_args_that_do_not_fit(tmp_path):
    """An item keeps the handler of its first args, and an item without one is not restored."""

    def program(ocp, path):
        args = ocp.args
        handler = ocp.CompositeCheckpointHandler("a", "b")
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path / "one", args.Composite(a=args.JsonSave({"x": 1})))
            other = args.Composite(a=args.StandardRestore())
            out = [raised(checkpointer.restore, path / "one", other)]
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler("a", "b")) as checkpointer:
            out += [raised(checkpointer.restore, path / "one")]
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            return [*out, checkpointer.restore(path / "one")["a"], handler is not None]

    twice(program, tmp_path)


def test_names_of_steps(tmp_path):
    """`path.step` finds the same steps, whatever their names, and those being written."""

    def program(ocp, path):
        step = ocp.path.step
        padded = step.standard_name_format(step_prefix="ck", step_format_fixed_length=3)
        plain = step.standard_name_format()
        for name in ("ck_007", "12", "notes", "ck_008.orbax-checkpoint-tmp"):
            (path / name).mkdir()
        (path / "15").write_text("a file")
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path / "ck_009", {"w": 1})
        saved = padded.find_step(path, 9)
        under_way = step.all_temporary_paths(path)
        return [
            [sorted(found.step for found in form.find_all(path)) for form in (padded, plain)],
            sorted(step.checkpoint_steps(path)),
            sorted(path.name for path in step.checkpoint_steps_paths(path)),
            step.latest_step_metadata(path, padded).path,
            raised(plain.find_step, path, 7),
            step.find_step_path(path, padded, step=8, include_uncommitted=True),
            [ocp.utils.step_from_checkpoint_name(one.get().name) for one in under_way],
            saved.commit_timestamp_nsecs > saved.init_timestamp_nsecs,
            plain.find_step(path, 12).commit_timestamp_nsecs,
            [str(form) for form in (padded, plain)],
            padded.build_name(3),
        ]

    twice(program, tmp_path)


def test_post_finalization_callback(tmp_path):
    """It is called once a save is committed."""

    def program(ocp, path):
        called = []
        options = ocp.AsyncOptions(post_finalization_callback=lambda: called.append(1))
        with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler(), async_options=options) as one:
            one.save(path / "a", args=ocp.args.StandardSave(tree()))
        return called

    twice(program, tmp_path)


def test_metadata_of_no_checkpoint(tmp_path):
    """Says nothing, so that a program can ask whether there is one."""

    def program(ocp, path):
        (path / "empty").mkdir()
        found = [
            checkpointer.metadata(path / name)
            for checkpointer in (ocp.StandardCheckpointer(), ocp.PyTreeCheckpointer())
            for name in ("missing", "empty")
        ]
        return [(one.item_handlers, one.item_metadata, one.custom_metadata) for one in found]

    twice(program, tmp_path)


def test_numbers_of_numpy_are_arrays_for_the_standard_handler(tmp_path):
    """For the handler of pytrees, they are numbers; both describe them by their dtypes."""
    numbers = {"f": np.float32(2.5), "d": np.float64(2.5), "i": np.int8(3), "large": 2**63, "n": 3}

    def program(ocp, path):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path / "standard", numbers)
        ocp.PyTreeCheckpointer().save(path / "pytree", numbers)

    def read(ocp, path):
        checkpointer = ocp.PyTreeCheckpointer()
        as_is, as_arrays = (ocp.RestoreArgs(restore_type=kind) for kind in (None, np.ndarray))
        for kind in ("standard", "pytree"):
            yield checkpointer.restore(path / kind)
            for args in (as_is, as_arrays):
                given = dict.fromkeys(numbers, args)
                yield checkpointer.restore(path / kind, restore_args=given)
            for leaf in checkpointer.metadata(path / kind).item_metadata.values():
                yield type(leaf).__name__, str(leaf.dtype)

    twice(program, tmp_path, read=lambda *given: [*read(*given)])
