"""Any tree survives a save and a restore, or is refused before anything is written."""

from __future__ import annotations

import enum
import os
import re
import tempfile
from collections import OrderedDict, defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from flax.training.train_state import TrainState
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

import jaxckpt
from jaxckpt import UnsupportedLeaf
from jaxckpt.format.arrays import dtype_of
from tests import strategies
from tests.strategies import (
    ALL_DTYPES,
    Pair,
    Registered,
    Struct,
    jax_holds,
    random_bits,
    same,
    to_jax,
)

LAWS = settings(
    deadline=None,
    derandomize=True,
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def new_path():
    """Makes a path in an empty directory, in memory where there is such a file system."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as folder:
        count = iter(range(10**6))

        def make():
            parent = Path(folder) / f"{next(count)}"
            parent.mkdir()
            return parent / "checkpoint"

        yield make


@pytest.fixture
def trip(new_path):
    """Saves a tree and restores it."""

    def save_and_restore(tree, like=None, **options):
        path = new_path()
        jaxckpt.save(path, tree)
        return jaxckpt.restore(path, like, **options)

    return save_and_restore


@LAWS
@given(tree=strategies.trees())
def test_a_tree_comes_back_as_it_was_or_is_refused(new_path, tree):
    """Types, dtypes and bits are the same after; what is refused leaves no trace."""
    path = new_path()
    try:
        jaxckpt.save(path, tree)
    except UnsupportedLeaf:
        assert os.listdir(path.parent) == []
        return

    got = jaxckpt.restore(path)

    assert same(got, tree), f"{got!r} is not {tree!r}"


@LAWS
@given(tree=strategies.target_trees())
def test_with_a_target_its_own_types_come_back(new_path, tree):
    """Containers of the user's own come back where `like` has them."""
    path = new_path()
    save_or_reject(path, tree)

    got = jaxckpt.restore(path, tree)

    assert same(got, tree), f"{got!r} is not {tree!r}"


def save_or_reject(path, tree):
    """Saves a tree. An example with leaves that are refused is replaced by another one."""
    try:
        jaxckpt.save(path, tree)
    except UnsupportedLeaf:
        reject()


@settings(LAWS, max_examples=40)
@given(tree=strategies.trees())
def test_open_lists_every_leaf(new_path, tree):
    """`open` lists what `restore` returns: each leaf by its path, and it can be printed."""
    path = new_path()
    save_or_reject(path, tree)

    ckpt = jaxckpt.open(path)

    assert str(ckpt)
    assert len(ckpt) == len(jax.tree.leaves(tree, is_leaf=_is_empty))
    assert jaxckpt.verify(path).ok


@settings(LAWS, max_examples=40)
@given(tree=strategies.trees())
def test_an_open_checkpoint_is_a_target(new_path, tree):
    """The containers, keys and types that it shows are those that come back."""
    path = new_path()
    save_or_reject(path, tree)
    ckpt = jaxckpt.open(path)

    assert same(jaxckpt.restore(path, ckpt), tree)
    assert jax.tree.structure(ckpt.abstract()) == jax.tree.structure(tree)


def test_the_shapes_of_a_tree_need_no_data(new_path):
    """Keys are those of the dict, not escaped, and a part has the shapes of the part."""
    path, key = new_path(), jax.random.key(0)
    jaxckpt.save(path, {"a/b~": (jnp.ones((2, 3), jnp.bfloat16), key), "c": {7: 3, 8: "x"}})
    for file in (path / "state" / "d").iterdir():
        file.write_bytes(bytes(file.stat().st_size))
    ckpt = jaxckpt.open(path)

    shapes = ckpt.abstract()

    assert shapes == {
        "a/b~": (jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), jax.ShapeDtypeStruct((), key.dtype)),
        "c": {7: 0, 8: ""},
    }
    assert ckpt["a~1b~0/0"].abstract() == ckpt["a/b~", 0].abstract() == shapes["a/b~"][0]


def test_a_target_from_another_checkpoint(new_path):
    """Its dtypes and its tree are what is wanted."""
    like, path = new_path(), new_path()
    jaxckpt.save(like, {"w": jnp.ones(3, jnp.bfloat16)})
    jaxckpt.save(path, {"w": jnp.ones(3), "v": 1})

    got = jaxckpt.restore(path, jaxckpt.open(like), extra="ignore")

    assert same(got, {"w": jnp.ones(3, jnp.bfloat16)})


def _is_empty(node):
    return node is None or (
        isinstance(node, (dict, list, tuple)) and not node and not isinstance(node, str)
    )


@pytest.mark.parametrize("name", ALL_DTYPES)
def test_every_dtype_keeps_its_bits(trip, name):
    """An array of random bits of any dtype comes back bit for bit, from numpy and from jax."""
    values = random_bits((3, 4), dtype_of(name), 1)
    tree = {"host": values, "none": values[:0], "one": values[0, 0]}
    if jax_holds(values.dtype):
        tree["device"] = to_jax(values)

    assert same(trip(tree), tree)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, jnp.bfloat16])
def test_nan_payloads_and_negative_zero_survive(trip, dtype):
    """No float passes through arithmetic on its way."""
    dtype = np.dtype(dtype)
    unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
    ones = np.iinfo(unsigned).max
    values = np.array([ones, ones >> 1, 1 << (8 * dtype.itemsize - 1), 1], unsigned).view(dtype)

    got = trip(values)

    assert got.tobytes() == values.tobytes()


def test_64_bits_survive_where_jax_has_them_off(trip):
    """x64 arrays keep their 64 bits although `jax_enable_x64` is off."""
    assert not jax.config.jax_enable_x64
    with jax.enable_x64(True):
        value = jnp.asarray([2**40 + 1, -(2**62)], jnp.int64)

    got = trip({"a": value}, {"a": value})["a"]

    assert got.dtype == np.int64
    assert np.asarray(got).tolist() == [2**40 + 1, -(2**62)]


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys_go_on_where_they_were(trip, impl):
    """A restored key, alone or in a batch, draws the same numbers."""
    keys = {
        "one": jax.random.key(7, impl=impl),
        "many": jax.random.split(jax.random.key(1, impl=impl), (2, 3)),
    }

    for like in (None, keys, jax.eval_shape(lambda: keys)):
        got = trip(keys, like)

        assert jax.random.key_impl(got["one"]) == jax.random.key_impl(keys["one"])
        assert got["many"].shape == (2, 3)
        assert np.array_equal(jax.random.bits(got["one"], (4,)), jax.random.bits(keys["one"], (4,)))
        assert np.array_equal(
            jax.random.bits(got["many"][1, 2]), jax.random.bits(keys["many"][1, 2])
        )


def test_legacy_keys_are_plain_arrays_and_become_typed_on_request(trip):
    """jax.random.PRNGKey is uint32[2]; a typed key in `like` makes one of it, and the other way."""
    old, new = jax.random.PRNGKey(3), jax.random.key(3)

    assert same(trip(old), old)
    assert same(trip(old, new), new)
    assert same(trip(new, old), old)


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        0,
        -1,
        2**63 - 1,
        2**63,
        2**64 - 1,
        2**64,
        -(2**63) - 1,
        10**4299,
        -(10**4299),
        0.0,
        -0.0,
        1e-320,
        float("inf"),
        1 - 2j,
        "",
        "text",
        "ü\n\0",
        b"",
        b"\0\xff",
        None,
        [],
        {},
        (),
        np.float32(2.5),
        np.bool_(True),
    ],
    ids=lambda value: f"{type(value).__name__}:{repr(value)[:24]!a}",
)
def test_a_python_value_comes_back_as_itself(trip, value):
    """Type and value, bare and in a tree, with and without a target."""
    assert same(trip(value), value)
    assert same(trip({"a": [value]}), {"a": [value]})
    assert same(trip({"a": [value]}, {"a": [value]}), {"a": [value]})


def test_an_int_that_python_could_not_read_back_is_refused(new_path):
    """Past 4,300 digits Python turns no text into an int."""
    with pytest.raises(UnsupportedLeaf, match=r"a: .*digits"):
        jaxckpt.save(new_path(), {"a": 10**5000})


class Color(enum.Enum):
    RED = 1


def test_a_key_that_json_lacks_comes_back_as_its_text(tmp_path):
    """Bytes and enums, which a target restores."""
    tree = {"bytes": {b"a": 1}, "enum": {Color.RED: 2}}
    jaxckpt.save(tmp_path / "x", tree)

    assert jaxckpt.restore(tmp_path / "x") == {"bytes": {"b'a'": 1}, "enum": {"Color.RED": 2}}
    assert jaxckpt.restore(tmp_path / "x", tree) == tree


class Level(enum.IntEnum):
    LOW = 3


def test_values_that_are_more_than_a_value_come_back_as_the_value(trip):
    """An IntEnum is an int, a str subclass a str."""

    class Text(str):
        __slots__ = ()

    assert same(trip([Level.LOW, Text("x"), np.str_("y")]), [3, "x", "y"])


def test_odd_keys_survive(trip):
    """ints, floats, bools, tuples, and names with every character that means something on disk."""
    tree = {
        "names": {"a.b": 1, "a/b": 2, "~": 3, "": 4, " ": 5, "ü": 6, ".": 7, "..": 8, "c": 9},
        "ints": {0: 1, -5: 2, 10**30: 3},
        "floats": {1.5: 1, float("inf"): 2},
        "bools": {True: 1, False: 2},
        "tuples": {(1, "a/b"): 1, (2, (3, None)): 2},
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
    }

    assert same(trip(tree), tree)


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"b": 1}, "a.b": 2},
        {"a": [1], "a.0": 2},
        OrderedDict([(1, 1), ("1", 2)]),
        {"a/b": "text", "a": "other"},
    ],
)
def test_names_that_collide_both_survive_or_are_refused(new_path, tree):
    """Two leaves of one name on disk: never is one of them lost."""
    path = new_path()
    try:
        jaxckpt.save(path, tree)
    except UnsupportedLeaf:
        assert os.listdir(path.parent) == []
        return

    assert same(jaxckpt.restore(path), tree)


@pytest.mark.parametrize(
    "empty", [{}, [], (), None, OrderedDict(), FrozenDict(), optax.EmptyState()]
)
def test_empty_containers_survive(trip, empty):
    """Bare, in a tree, and in one another."""
    assert same(trip(empty), empty)
    assert same(trip({"a": empty, "b": [empty, (empty,)]}), {"a": empty, "b": [empty, (empty,)]})


def test_a_dict_with_a_default_becomes_a_plain_one(trip):
    """Its factory is code, which a checkpoint does not hold."""
    tree = defaultdict(list, a=1)

    assert same(trip({"full": tree, "empty": defaultdict(int)}), {"full": {"a": 1}, "empty": {}})
    assert trip(tree, tree).default_factory is list


def test_optax_states_come_back_without_a_target(trip):
    """An optimizer's whole chain: its namedtuples, its empty states, its masks."""
    params = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.masked(optax.adamw(1e-3), {"w": True, "b": False}),
        optax.ema(0.9),
    )
    state = tx.init(params)

    got = trip(state)

    assert jax.tree.structure(got) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, got, state)


def test_a_train_state_needs_a_target_for_its_functions(trip):
    """With `like` a TrainState comes back; without, its fields as a dict."""
    state = TrainState.create(apply_fn=lambda x: x, params={"w": jnp.ones(3)}, tx=optax.adam(1e-3))

    got = trip(state, state)
    plain = trip(state)

    assert type(got) is TrainState
    assert got.tx is state.tx
    assert type(got.opt_state[0]) is optax.ScaleByAdamState
    assert set(plain) == {"step", "params", "opt_state"}
    assert type(plain["opt_state"][0]) is optax.ScaleByAdamState


def test_nnx_state_comes_back(trip):
    """nnx.State as itself, its Params too; a module's state restores into the module."""
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)

    for got in (trip(state), trip(state, state), trip(state, jax.eval_shape(lambda: state))):
        assert type(got) is nnx.State
        assert jax.tree.structure(got) == jax.tree.structure(state)
        again = nnx.merge(graph, got)
        x = jnp.ones((4, 2))
        assert np.array_equal(again(x), nnx.merge(graph, state)(x))


def test_an_nnx_graph_that_comes_back_as_none_is_reported(tmp_path, caplog):
    """A checkpoint cannot hold it; with a target, it is that of the target."""
    graph, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    jaxckpt.save(tmp_path / "a", {"graph": graph, "state": state, "nothing": None})

    got = jaxckpt.restore(tmp_path / "a")
    (warning,) = [one.message for one in caplog.records if one.levelname == "WARNING"]
    again = jaxckpt.restore(tmp_path / "a", {"graph": graph, "state": state, "nothing": None})

    assert (got["graph"], got["nothing"]) == (None, None)
    assert warning == (
        f"{tmp_path}/a: graph is None, because a {type(graph).__module__}.GraphDef cannot be "
        "restored from a checkpoint; pass `like`"
    )
    assert again["graph"] is graph
    assert len([one for one in caplog.records if one.levelname == "WARNING"]) == 1


def test_nnx_pure_dicts_and_frozen_dicts(trip):
    """Plain dicts with int keys, and Flax's FrozenDict."""
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    pure = nnx.to_pure_dict(nnx.state(model))

    assert same(trip(pure), pure)
    frozen = FrozenDict({"a": 1, "b": FrozenDict({})})
    assert trip(frozen) == frozen
    assert type(trip(frozen)) is FrozenDict


def test_containers_of_the_users_own_become_dicts(trip):
    """No class outside the allow-list is looked up, let alone called."""
    tree = {"pair": Pair(1, [2]), "struct": Struct(1, 2), "node": Registered(5)}

    assert same(
        trip(tree),
        {
            "pair": {"left": 1, "right": [2]},
            "struct": {"weight": 1, "bias": 2},
            "node": {"inner": 5},
        },
    )
    assert same(trip(tree, tree), tree)


@pytest.mark.parametrize(
    "leaf",
    [
        {1, 2},
        lambda: 0,
        object(),
        np.array([object()]),
        np.array(["a"]),
        np.datetime64("2020-01-01"),
        np.array([1], "datetime64[s]"),
        np.array([1], np.longdouble),
        np.zeros(1, [("x", "i4")]),
        range(3),
        jax.ShapeDtypeStruct((2,), np.float32),
        np.ma.masked_array([1, 2], [0, 1]),
        bytearray(b"x"),
        "half \ud800",
        type("L", (list,), {})(),
        type("L", (list,), {})([1]),
    ],
    ids=lambda value: re.sub(r"0x\w+", "", f"{type(value).__name__}:{str(value)[:24]!a}"),
)
def test_an_unsupported_leaf_is_named_before_anything_is_written(tmp_path, leaf):
    """All of them are named, in one error, and the directory stays empty."""
    with pytest.raises(UnsupportedLeaf) as caught:
        jaxckpt.save(tmp_path / "x" / "y", {"good": 1, "bad": [0, leaf], "also/bad": leaf})

    assert "bad/1: " in str(caught.value)
    assert "also~1bad: " in str(caught.value)
    assert "good" not in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("key", ["nul\0", "half \ud800"])
def test_a_key_that_no_store_holds_is_refused(tmp_path, key):
    """NUL and lone surrogates."""
    with pytest.raises(UnsupportedLeaf):
        jaxckpt.save(tmp_path / "x", {key: 1})

    assert os.listdir(tmp_path) == []


def test_deleted_and_traced_arrays_are_refused(tmp_path):
    """The error says what they are and which."""
    gone = jnp.ones(3)
    gone.delete()

    with pytest.raises(UnsupportedLeaf, match=r"a: .*deleted"):
        jaxckpt.save(tmp_path / "x", {"a": gone})
    with pytest.raises(UnsupportedLeaf, match=r"b: is traced"):
        jax.jit(lambda x: jaxckpt.save(tmp_path / "x", {"b": x}))(1)
    assert os.listdir(tmp_path) == []


def test_keys_of_mixed_types_are_refused(tmp_path):
    """jax cannot sort them; the error says so and is typed."""
    with pytest.raises(UnsupportedLeaf, match="same type"):
        jaxckpt.save(tmp_path / "x", {1: 1, "a": 2})

    assert os.listdir(tmp_path) == []


@settings(LAWS, max_examples=200)
@given(st.lists(st.text(st.characters(codec="utf-8")), min_size=1, max_size=4))
def test_a_path_reads_back(names):
    """`parse_path` undoes `path_text`, but for the bare name "", which looks like the root."""
    from jaxckpt.format.tree import parse_path, path_text

    if names != [""]:
        assert parse_path(path_text(names)) == tuple(names)
    assert parse_path(tuple(names)) == tuple(names)
