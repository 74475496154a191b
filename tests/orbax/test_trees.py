"""The drop-in restores trees with the types, shapes and shardings that Orbax restores."""

from __future__ import annotations

import gc
import itertools
import warnings
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath
from flax import nnx
from flax.core import FrozenDict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1

import jaxckpt
import jaxckpt.orbax as drop_in
from jaxckpt.format.sharding import SavedSharding
from jaxckpt.orbax import _trees

Shape = jax.ShapeDtypeStruct
MESH = Mesh(np.array(jax.devices()[:4]), ("x",))
SPLIT, WHOLE = NamedSharding(MESH, P("x")), NamedSharding(MESH, P())


pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Pair(NamedTuple):
    a: object
    b: object


def kinds(tree):
    """Describes each leaf: its type, dtype, shape, sharding and value."""

    def kind(x):
        facts = (getattr(x, name, None) for name in ("dtype", "shape", "sharding"))
        return type(x).__name__, *facts, str(np.asarray(x, dtype=object))

    return jax.tree.map(kind, tree, is_leaf=lambda x: x is None)


def outcome(call):
    with warnings.catch_warnings(action="ignore"):
        try:
            return kinds(call())
        except (ValueError, TypeError) as error:
            name = "TypeError" if isinstance(error, TypeError) else "ValueError"
    gc.collect()  # what Orbax leaves behind complains here, and not in another test
    return name


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    tree = {"a": jax.device_put(jnp.arange(8.0), SPLIT), "n": np.arange(3.0), "i": 3}
    path = tmp_path_factory.mktemp("trees") / "one"
    ocp.PyTreeCheckpointer().save(path, tree)
    return path, tree


def test_without_a_target_the_types_are_those_of_orbax(tmp_path):
    """Tuples become lists, namedtuples dicts, empty states None, numpy's numbers Python's."""
    tree = {
        "tuple": (jnp.ones(2), 3),
        "pair": Pair(1, jnp.zeros(1)),
        "opt": optax.adam(1e-2).init({"w": jnp.ones(2)}),
        "keys": {2: "text", 10: jnp.ones(1)},
        "empty": [None, [], (), {}, optax.EmptyState()],
        "numbers": [np.int32(3), np.float64(2), True, 1.5, np.ones(2)],
        "narrow": jnp.ones(2, jnp.bfloat16),
    }
    jaxckpt.save(tmp_path / "ours", tree, item=None)
    ocp.PyTreeCheckpointer().save(tmp_path / "theirs", tree)

    for path in (tmp_path / "ours", tmp_path / "theirs"):
        wanted = outcome(lambda path=path: ocp.PyTreeCheckpointer().restore(path))
        assert outcome(lambda path=path: _trees.restore_pytree(path)) == wanted
        assert outcome(lambda path=path: _trees.restore_standard(path)) == wanted
        assert [*_trees.restore_pytree(path)["keys"]] == ["10", "2"]  # as text, as in Orbax


@pytest.mark.parametrize(
    "change",
    [
        {"a": Shape((8,), jnp.float32)},
        {"a": jnp.ones(8, jnp.bfloat16)},
        {"a": np.zeros(8)},
        {"n": Shape((3,), jnp.float32)},
        {"n": Shape((3,), jnp.float32, sharding=WHOLE)},
        {"n": 0},
        {"n": None},
        {"i": 0.0},
        {"i": np.zeros(())},
        {"i": jnp.int32(0)},
        {"i": Shape((), jnp.int32)},
        {"i": jnp.zeros(2, jnp.int32)},
        {"i": jnp.zeros(2)},
        {"i": Shape((2, 2), jnp.float32)},
        {"i": np.zeros(2, np.float32)},
        {"more": 1},
    ],
    ids=str,
)
def test_targets(saved, change):
    """A target gives the types as Orbax's StandardRestore, the structure as its PyTreeRestore."""
    path, tree = saved
    target = tree | change

    with ocp.StandardCheckpointer() as checkpointer:
        wanted = outcome(lambda: checkpointer.restore(path, target))
    assert outcome(lambda: _trees.restore_standard(path, target)) == wanted
    for is_partial in (False, True):
        args = ocp.args.PyTreeRestore(target, partial_restore=is_partial)
        wanted = outcome(lambda args=args: ocp.PyTreeCheckpointer().restore(path, args=args))
        mine = outcome(lambda p=is_partial: _trees.restore_pytree(path, target, partial=p))
        assert mine == wanted


PARTS = {"a": {"w": jnp.arange(4.0), "n": np.arange(3)}, "b": jnp.ones(2), "t": (jnp.ones(1), 2)}
UNSAVED = {
    "struct": Shape((2,), jnp.float32),
    "sharded struct": Shape((2,), jnp.float32, sharding=WHOLE),
    "numpy": np.ones(2),
    "array": jnp.full(2, 7.0),
    "number": 7,
    "text": "x",
    "placeholder": _trees.PLACEHOLDER,
    "dict": {"c": Shape((), jnp.int32), "d": 3},
}
PLACES = {
    "beside others": lambda x: {"a": PARTS["a"], "x": x},
    "below": lambda x: {"a": {**PARTS["a"], "x": x}},
    "alone": lambda x: {"x": x},
    "in a leaf": lambda x: {"b": {"q": x}},
    "beyond the end": lambda x: {"t": (jnp.ones(1), 2, x)},
}
READERS = {
    "checkpointer": lambda lib, path, args: lib.PyTreeCheckpointer().restore(path / "a", args=args),
    "handler": lambda lib, path, args: lib.PyTreeCheckpointHandler().restore(path / "a", args=args),
    "manager": lambda lib, path, args: lib.CheckpointManager(path / "run").restore(1, args=args),
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    path = epath.Path(tmp_path_factory.mktemp("parts"))
    ocp.PyTreeCheckpointer().save(path / "a", PARTS)
    with ocp.CheckpointManager(path / "run") as manager:
        manager.save(1, args=ocp.args.PyTreeSave(PARTS))
    v1.save(path / "v1", PARTS)
    return path


@pytest.mark.parametrize("what", UNSAVED)
def test_leaves_that_were_not_saved(parts, what):
    """A partial restore returns them as they are in the target, a struct too, as Orbax does."""

    def read(library, target, reader, with_args):
        given = {}
        if with_args:
            given = {"restore_args": library.checkpoint_utils.construct_restore_args(target)}
        args = library.args.PyTreeRestore(target, partial_restore=True, **given)
        return READERS[reader](library, parts, args)

    def load(library, target):
        loading = library.options.PyTreeOptions.Loading(partial_load=True)
        with library.Context(pytree_options=library.options.PyTreeOptions(loading=loading)):
            return library.load(parts / "v1", target)

    target = PLACES["beside others"](UNSAVED[what])
    for case in itertools.product(READERS, (False, True)):
        theirs, mine = (outcome(partial(read, m, target, *case)) for m in (ocp, drop_in))
        assert mine == theirs, case
    for place, make in PLACES.items() if what in ("struct", "dict") else ():
        target = make(UNSAVED[what])
        for theirs, mine in (
            (partial(read, m, target, "checkpointer", True) for m in (ocp, drop_in)),
            (partial(load, m, target) for m in (v1, drop_in.v1)),
        ):
            assert outcome(mine) == outcome(theirs), place


@pytest.mark.parametrize("with_args", [False, True])
@pytest.mark.parametrize("is_partial", [False, True])
def test_placeholders_of_a_partial_restore(parts, is_partial, with_args):
    """A target alone leaves them out if all is restored; of a part, restore args do."""
    hole = _trees.PLACEHOLDER
    some = {"a": {"w": hole, "n": np.zeros(3)}, "b": hole, "x": hole}
    for target in (some, PARTS | {"b": hole}, {"a": hole}):

        def read(library, target=target):
            given = library.checkpoint_utils.construct_restore_args(target) if with_args else None
            args = library.args.PyTreeRestore(target, given, partial_restore=is_partial)
            return library.PyTreeCheckpointer().restore(parts / "a", args=args)

        assert outcome(partial(read, drop_in)) == outcome(partial(read, ocp))


EMPTY = {"masked": optax.MaskedNode(), "none": None, "dict": {}, "list": [], "w": jnp.ones(2)}


@pytest.mark.parametrize("change", [{}, {"w": optax.MaskedNode()}, {"w": None}], ids=str)
def test_what_is_empty_and_what_is_not(tmp_path, change):
    """An array is wanted for what was empty, and comes back so; or a masked one for an array."""
    target = dict.fromkeys(EMPTY, jnp.ones(2)) | change
    new = {ocp: v1, drop_in: drop_in.v1}
    places = {ocp: tmp_path / "theirs", drop_in: tmp_path / "ours"}
    for library, path in places.items():
        library.PyTreeCheckpointer().save(path / "a", EMPTY)
        new[library].save(path / "v1", EMPTY)

    def read(library, writer, how):
        path = places[writer] / "a"
        if how == "v1":
            return new[library].load(places[writer] / "v1", target)
        if how == "standard":
            return library.StandardCheckpointer().restore(path, target)
        args = library.args.PyTreeRestore(target, partial_restore=how == "partial")
        return library.PyTreeCheckpointer().restore(path, args=args)

    for how in ("standard", "tree", "partial", "v1"):
        wanted = outcome(partial(read, ocp, ocp, how))
        for writer in (ocp, drop_in):
            assert outcome(partial(read, drop_in, writer, how)) == wanted, (how, writer)


def test_targets_of_another_size(saved):
    """`strict=False` pads an array of jax, and no array of numpy."""
    path, tree = saved
    target = tree | {"a": Shape((12,), jnp.float32, sharding=SPLIT), "n": np.zeros(5)}

    with ocp.StandardCheckpointer() as checkpointer:
        wanted = kinds(checkpointer.restore(path, target, strict=False))
    assert kinds(_trees.restore_standard(path, target, strict=False)) == wanted


@pytest.mark.parametrize(
    "args",
    [
        lambda tree: {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in tree},
        lambda tree: {name: ocp.RestoreArgs(np.ndarray, np.dtype("float16")) for name in tree},
        lambda tree: {name: ocp.RestoreArgs(dtype=np.dtype("float32")) for name in tree},
        lambda tree: {
            name: ocp.ArrayRestoreArgs(dtype=jnp.dtype("bfloat16"), mesh=MESH, mesh_axes=P())
            for name in tree
        },
        ocp.checkpoint_utils.construct_restore_args,
        lambda tree: {
            "a": ocp.ArrayRestoreArgs(global_shape=(12,), sharding=SPLIT, strict=False),
            "n": ocp.RestoreArgs(),
            "i": ocp.RestoreArgs(),
        },
        lambda tree: dict.fromkeys(tree, ocp.ArrayRestoreArgs(mesh=MESH, mesh_axes=P())),
    ],
    ids=map(str, range(7)),
)
def test_restore_args_of_orbax(saved, args):
    """Restore args, also Orbax's own objects, give types, dtypes, shapes and shardings."""
    path, tree = saved

    half = {"a": jnp.zeros(8, jnp.bfloat16), "n": np.zeros(3, np.int16), "i": 1}
    for target in (None, tree, half):
        given = {"item": target, "restore_args": args(tree)}
        wanted = outcome(lambda given=given: ocp.PyTreeCheckpointer().restore(path, **given))
        assert outcome(lambda t=target: _trees.restore_pytree(path, t, args(tree))) == wanted


def test_strict_restore_args_take_the_shape_of_the_target(saved):
    """An array of another size is an error, as with Orbax."""
    path, tree = saved
    args = dict.fromkeys(tree, drop_in.ArrayRestoreArgs(mesh=MESH, mesh_axes=P()))

    with pytest.raises(jaxckpt.TreeMismatch, match=r"wanted float32\[12\]"):
        _trees.restore_pytree(path, tree | {"a": jnp.zeros(12)}, args)


@pytest.mark.parametrize("dtype", ["uint32", "bool", "int8", "float16"])
def test_numbers_are_cast_to_any_dtype(tmp_path, dtype):
    """Also where jaxckpt by itself refuses, such as signed integers wanted as unsigned."""
    tree = {"w": jnp.array([1.5, 2.5, 0]), "step": jnp.int32(7), "n": np.arange(3.0)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", tree)
        target = {k: v.astype(dtype) for k, v in tree.items()}
        wanted = kinds(checkpointer.restore(tmp_path / "a", target))

    assert kinds(_trees.restore_standard(tmp_path / "a", target)) == wanted


@pytest.mark.parametrize("kind", [np.float32, np.int32, np.float16])
def test_restore_args_name_a_type_of_numpy(tmp_path, kind):
    """For scalars, which need not be able to have the value."""
    tree = {"f": 0.1, "b": True, "n": np.float64(0.1), "a": np.array(2.5), "j": jnp.float32(2)}
    ocp.PyTreeCheckpointer().save(tmp_path / "a", tree)
    args = dict.fromkeys(tree, ocp.RestoreArgs(kind))
    wanted = outcome(lambda: ocp.PyTreeCheckpointer().restore(tmp_path / "a", restore_args=args))

    assert outcome(lambda: _trees.restore_pytree(tmp_path / "a", restore_args=args)) == wanted


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((None, d) for d in ("float16", "int32", "bool")), (None, jnp.bfloat16), (float, "float16")],
)
def test_restore_args_round_numbers_of_python(tmp_path, kind, dtype):
    """To the dtype, and then to the type if there is one."""
    tree = {"f": 0.1, "i": 2**40, "b": True, "n": np.float32(0.1), "w": jnp.ones(1)}
    ocp.PyTreeCheckpointer().save(tmp_path / "a", tree)
    rounded = ocp.RestoreArgs(kind, np.dtype(dtype))
    args = dict.fromkeys(tree, rounded) | {"w": ocp.RestoreArgs()}
    wanted = outcome(lambda: ocp.PyTreeCheckpointer().restore(tmp_path / "a", restore_args=args))

    assert outcome(lambda: _trees.restore_pytree(tmp_path / "a", restore_args=args)) == wanted


@pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_are_cast_to_floats_that_cannot_have_them(tmp_path, dtype):
    """Also to float64, which numpy takes for equal to None."""
    tree = {"i": np.array([2**60 + 1]), "u": np.uint64([2**63 + 5]), "c": np.array([1 + 2j])}
    targets = [Shape((1,), dtype), np.zeros(1, dtype)]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", {**tree, "n": 2**60 + 1})
        for target in targets:
            like = {**dict.fromkeys(tree, target), "n": 0.0}
            wanted = kinds(checkpointer.restore(tmp_path / "a", like))

            assert kinds(_trees.restore_standard(tmp_path / "a", like)) == wanted


@pytest.mark.parametrize("wanted", [0, 0.0, False, np.zeros((), np.int32)], ids=repr)
def test_numbers_of_python_are_cast(tmp_path, wanted):
    """From and to any kind, arrays of no dimensions included."""
    tree = {"f": 13.7, "i": 12, "b": True, "a": jnp.float32(3.5)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", tree)
        target = dict.fromkeys(tree, wanted)
        there = kinds(checkpointer.restore(tmp_path / "a", target))

    assert kinds(_trees.restore_standard(tmp_path / "a", target)) == there


def test_a_placeholder_is_not_restored(saved):
    """A leaf that is `PLACEHOLDER` in the target stays that."""
    path, tree = saved

    got = _trees.restore_standard(path, tree | {"n": _trees.PLACEHOLDER})

    assert got["n"] is _trees.PLACEHOLDER
    assert got["i"] == 3


def test_only_leaves_that_are_not_strict_get_another_size(saved):
    """A leaf with `strict=False` leaves the others strict."""
    path, _ = saved
    loose = ocp.ArrayRestoreArgs(sharding=WHOLE, global_shape=(12,), strict=False)
    for size in (3, 4):
        fixed = ocp.ArrayRestoreArgs(sharding=WHOLE, global_shape=(size,))
        args = {"a": loose, "n": fixed, "i": ocp.RestoreArgs()}
        given = ocp.args.PyTreeRestore(restore_args=args)
        wanted = outcome(lambda g=given: ocp.PyTreeCheckpointer().restore(path, args=g))

        assert outcome(lambda a=args: _trees.restore_pytree(path, restore_args=a)) == wanted
        assert (wanted == "ValueError") == (size == 4)

    args["n"] = ocp.ArrayRestoreArgs(restore_type=np.ndarray, global_shape=(4,))
    wanted = outcome(lambda: ocp.PyTreeCheckpointer().restore(path, restore_args=args))
    assert outcome(lambda: _trees.restore_pytree(path, restore_args=args)) == wanted
    assert wanted["n"][2] == (3,)  # of numpy, the saved shape


@pytest.mark.parametrize("hole", [None, _trees.PLACEHOLDER])
@pytest.mark.parametrize("name", ["mlp", "w[0]"])
def test_only_the_leaf_itself_is_left_out(tmp_path, name, hole):
    """A leaf that is left out takes no other along whose name looks alike, as in Haiku."""
    tree = {"mlp": 1.0, "mlp/~/linear": {"w": jnp.arange(3.0)}, "w[0]": 2.0, "w0": jnp.ones(2)}
    ocp.PyTreeCheckpointer().save(tmp_path / "a", tree)
    target = jax.tree.map(jnp.zeros_like, tree) | {name: hole}

    wanted = outcome(lambda: ocp.PyTreeCheckpointer().restore(tmp_path / "a", target))
    assert outcome(lambda: _trees.restore_pytree(tmp_path / "a", target)) == wanted


def test_metadata_of_names_that_paths_escape(saved, tmp_path):
    """The sharding of a leaf is known whatever its name, as the ones of Haiku."""
    tree = {"mlp/~/linear": {"w": saved[1]["a"]}, "b~": saved[1]["a"], "c": saved[1]["a"]}
    ocp.PyTreeCheckpointer().save(tmp_path / "a", tree)
    v1.save(tmp_path / "b", tree)

    found = drop_in.PyTreeCheckpointer().metadata(tmp_path / "a").item_metadata.tree
    new = drop_in.v1.metadata(tmp_path / "b").metadata

    for one in (*jax.tree.leaves(found), *(x.sharding_metadata for x in jax.tree.leaves(new))):
        sharding = getattr(one, "sharding", one)
        assert sharding.to_jax_sharding() == SPLIT


def test_a_mesh_of_an_older_jax_has_axes_of_other_types(saved, tmp_path):
    """Its names of them are unknown today."""
    ocp.PyTreeCheckpointer().save(tmp_path / "a", {"w": saved[1]["a"]})
    for file in (tmp_path / "a").glob("_sharding"):
        file.write_text(file.read_text().replace("Auto", "User"))

    found = drop_in.PyTreeCheckpointer().metadata(tmp_path / "a").item_metadata.tree

    assert found["w"].sharding.to_jax_sharding() == SPLIT


def test_a_placeholder_for_a_subtree_is_refused(tmp_path):
    """As by Orbax, where it stands for one leaf."""
    ocp.PyTreeCheckpointer().save(tmp_path / "a", {"b": {"c": 1, "d": 2}, "e": 3})
    target = {"b": _trees.PLACEHOLDER, "e": 0}

    for restore in (
        ocp.PyTreeCheckpointer().restore,
        _trees.restore_pytree,
        _trees.restore_standard,
    ):
        with pytest.raises(ValueError, match="User-provided restore item and on-disk value"):
            restore(tmp_path / "a", target)


def test_trees_that_are_one_leaf_or_have_empty_parts():
    """The functions over trees return what Orbax's return."""
    tree = {"a": 1, "b": None, "c": {}, "d": [np.float32(2), []], "e": optax.EmptyState()}
    for keep in (True, False):
        for value in (tree, 7):
            theirs = ocp.tree.serialize_tree(value, keep_empty_nodes=keep)
            ours = drop_in.tree.serialize_tree(value, keep_empty_nodes=keep)
            assert ours == theirs
            assert kinds(ours) == kinds(theirs)
            assert drop_in.tree.deserialize_tree(ours, value, keep_empty_nodes=keep) == value
    assert drop_in.tree.from_flat_dict({(): 7}) == ocp.tree.from_flat_dict({(): 7}) == 7
    for library in (ocp, drop_in):
        with pytest.raises(ValueError):  # noqa: PT011  # Orbax's words differ
            library.tree.from_flat_dict({(): 7, ("a",): 1})


def test_keys_are_described_by_their_data():
    """A typed key is described by its data; a number is what `scalar_dtype` makes of it."""
    keys = {"one": jax.random.key(0), "two": jax.random.split(jax.random.key(1), 2)}
    leaves = [*keys.values(), jax.eval_shape(lambda: keys["one"]), 3, np.float32(2), np.ones(2)]
    leaves += [jnp.ones((2, 3)), ocp.ArrayRestoreArgs(sharding=WHOLE, shape=(4,), dtype="int8")]
    for more in ({}, {"scalar_dtype": float}, {"dtype": jnp.float16}):
        for leaf in leaves:
            wanted = ocp.utils.to_shape_dtype_struct(leaf, **more)
            for library in (drop_in.utils, drop_in.v1.arrays):
                assert library.to_shape_dtype_struct(leaf, **more) == wanted
    made = [lib.checkpoint_utils.construct_restore_args(keys) for lib in (ocp, drop_in)]
    for name in keys:
        theirs, ours = (vars(one[name]) for one in made)
        assert {field: theirs[field] for field in ours} == ours


def test_a_target_made_of_metadata_restores_as_a_dict(tmp_path):
    """Its own class is only that of the description, of jaxckpt as of Orbax."""
    tree = {"params": {"w": jnp.ones(2), "layers": [jnp.ones(1)]}, "step": 3}
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for path, library in {tmp_path / "theirs": ocp, tmp_path / "ours": drop_in}.items():
        with library.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, tree)
        found = library.PyTreeCheckpointer().metadata(path).item_metadata
        args = library.checkpoint_utils.construct_restore_args(found)
        target = jax.tree.map(lambda x: Shape(x.shape, x.dtype, sharding=place), found)
        partly = library.args.PyTreeRestore(target, args, partial_restore=True)
        restore = drop_in.PyTreeCheckpointer().restore
        for got in (
            drop_in.StandardCheckpointer().restore(path, target),
            restore(path, args=partly),
            restore(path, item=found, restore_args=args),
            restore(path, item=found, restore_args=args, transforms={}),
        ):
            assert jax.tree.structure(got) == jax.tree.structure(tree)


def test_metadata_names_the_device_of_an_array(tmp_path):
    """An array on the fourth device is restored there, also by its metadata."""
    tree = {"w": jax.device_put(jnp.ones(3), jax.devices()[3])}
    ocp.PyTreeCheckpointer().save(tmp_path / "a", tree)
    drop_in.v1.save(tmp_path / "b", tree)

    found = drop_in.PyTreeCheckpointer().metadata(tmp_path / "a").item_metadata
    new = drop_in.v1.load(tmp_path / "b", drop_in.v1.metadata(tmp_path / "b"))

    assert found["w"].sharding.to_jax_sharding() == tree["w"].sharding
    assert new["w"].sharding == tree["w"].sharding
    gone = SavedSharding(device="TPU_9")
    place = drop_in.metadata.ShardingMetadata(gone).to_jax_sharding()
    assert place.device_set == {jax.devices()[0]}


def test_an_empty_mapping_of_any_class_is_read_as_a_dict(tmp_path):
    """By Orbax too; jaxckpt restores its class."""
    tree = {"frozen": FrozenDict({}), "state": nnx.State({}), "dict": {}, "opt": optax.EmptyState()}
    jaxckpt.save(tmp_path / "a", tree, item=None)
    drop_in.v1.save(tmp_path / "b", tree)
    plain = {"frozen": {}, "state": {}, "dict": {}, "opt": None}

    assert ocp.PyTreeCheckpointer().restore(tmp_path / "a") == plain
    assert v1.load(tmp_path / "b") == drop_in.v1.load(tmp_path / "b") == plain
    assert drop_in.PyTreeCheckpointer().restore(tmp_path / "a") == plain
    got = jaxckpt.restore(tmp_path / "a")
    assert {name: type(node) for name, node in got.items()} == {n: type(x) for n, x in tree.items()}
