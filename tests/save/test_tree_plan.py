"""A tree that is saved again uses the plan that was kept, and only where it is the right one."""

from __future__ import annotations

import collections
import gc
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict, meta
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import UnsupportedLeaf
from jaxckpt._save import tree_plan
from jaxckpt._save.tree_plan import _MAX_CACHED, plan_tree
from jaxckpt.multihost import current
from jaxckpt.testing import simulate
from tests import strategies
from tests.strategies import Pair, Struct, same

LAWS = settings(
    deadline=None,
    derandomize=True,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True)
def nothing_is_kept():
    """Each test starts as a process does, and leaves nothing behind."""
    tree_plan._cache = ()
    yield
    tree_plan._cache = ()


@pytest.fixture
def trip(ram_path):
    """Saves a tree and restores it."""
    count = iter(range(10**6))

    def save_and_restore(tree, like=None):
        path = ram_path / f"{next(count)}"
        jaxckpt.save(path, tree)
        return jaxckpt.restore(path, like)

    return save_and_restore


def plan_of(tree):
    return plan_tree(tree, current())[0]


def anew(tree):
    """The plan of a tree and its values, as if nothing had been saved before."""
    kept = tree_plan._cache
    tree_plan._cache = ()
    try:
        return plan_tree(tree, current())
    finally:
        tree_plan._cache = kept


def deleted(array):
    array.delete()
    return array


def facts(plan):
    """All that a save takes from a plan."""
    return (
        plan.plan,
        dict(plan.files),
        plan.fingerprint,
        plan.sources,
        plan.writes,
        repr(plan.tree),  # 1 == True
        plan.shardings,
    )


# --- the same tree again ---------------------------------------------------------------------


def state(i, mesh):
    """A tree with a leaf of each kind, whose values depend on `i` alone."""
    w = np.arange(32, dtype=np.float32).reshape(8, 4) + i
    return {
        "sharded": jax.device_put(w, NamedSharding(mesh, P("x", "y"))),
        "one": jnp.full(3, i),
        "key": jax.random.split(jax.random.key(i), 2),
        "host": [w * 2, w.astype(np.float16).T, np.array(i)],
        "numpy scalar": np.int8(i),
        "python": (i, i + 2**40, i / 2, i * 1j, i % 2 == 0, bytes([i])),
        "fixed": ["text", 2**70, None, {}, ()],
    }


def test_a_tree_saved_again_restores_its_new_values(trip, mesh):
    """Each save of a tree uses the plan of the first, and stores the values that it is given."""
    for i in range(4):
        assert same(trip(state(i, mesh)), state(i, mesh))

    assert len(tree_plan._cache) == 1


def test_the_second_save_uses_the_plan_tree_the_first(mesh):
    """The plan is the same object, and the values are the new ones."""
    first, _ = plan_tree(state(1, mesh), current())

    again, values = plan_tree(state(2, mesh), current())

    assert again is first
    assert same(values, anew(state(2, mesh))[1])


@LAWS
@given(tree=strategies.target_trees())
def test_a_kept_plan_is_the_one_that_would_be_worked_out(tree):
    """Any tree that can be saved is recognised, and its plan and values are those of anew."""
    try:
        first = plan_of(tree)
    except UnsupportedLeaf:
        return

    kept, values = plan_tree(tree, current())

    fresh, fresh_values = anew(tree)
    assert kept is first
    assert facts(kept) == facts(fresh)
    assert same(values, fresh_values)


# Few enough that trees are often alike but for one thing.
CONFUSABLE = [0, 1, True, False, 1.0, 1j, 2**63, 2**64, -(2**64), "", "1", b"", b"1", None, [], ()]
CONFUSABLE += [{}, OrderedDict(), FrozenDict(), np.float32(1), np.bool_(1), np.array(1), np.ones(1)]
CONFUSABLE += [np.ones((1, 1)), np.ones(1, ">f4"), np.ones(1, "<f4"), np.ones(0), np.ones((0, 2))]
KEYS = st.sampled_from([0, 1, True, False, 1.0, -0.0, 0.0, np.int64(1), np.bool_(1)])
STATIC = [1, True, 1.0, "1", (1,), (True,), [1], {"a": 1}, {"a": True}, np.ones(2), np.ones(1)]


def confusable_nodes(children):
    return st.one_of(
        st.dictionaries(KEYS, children, max_size=2),
        st.dictionaries(KEYS, children, max_size=2).map(OrderedDict),
        st.dictionaries(KEYS, children, max_size=2).map(FrozenDict),
        st.lists(children, max_size=2),
        st.lists(children, max_size=2).map(tuple),
        st.builds(Pair, children, children),
        st.builds(Struct, children, children, st.sampled_from(STATIC)),
        st.builds(meta.Partitioned, children, st.sampled_from([("x",), (1,), (True,), (None,)])),
    )


@LAWS
@given(
    trees=st.lists(
        st.recursive(st.sampled_from(CONFUSABLE), confusable_nodes, max_leaves=3), min_size=2
    )
)
def test_a_plan_does_not_depend_on_what_was_saved_before(trees):
    """However alike the trees before it were, a tree's plan is the one worked out anew."""
    for tree in trees:
        found, values = plan_tree(tree, current())

        fresh, fresh_values = anew(tree)
        assert facts(found) == facts(fresh)
        assert same(values, fresh_values)


# --- another tree ----------------------------------------------------------------------------

CHANGES = {
    "shape": lambda: (np.zeros(2), np.zeros(3)),
    "rank": lambda: (np.zeros(4), np.zeros((2, 2))),
    "dtype": lambda: (jnp.zeros(2, jnp.float32), jnp.zeros(2, jnp.int32)),
    "dtype stored as bytes": lambda: (np.zeros(2, jnp.bfloat16), np.zeros(2, np.float16)),
    "numpy or jax": lambda: (np.zeros(2, np.float32), jnp.zeros(2, jnp.float32)),
    "numpy scalar or array": lambda: (np.float32(1), np.array(1, np.float32)),
    "int or float": lambda: (1, 1.0),
    "int or bool": lambda: (1, True),
    "int64 or uint64": lambda: (2**63 - 1, 2**63),
    "uint64 or text": lambda: (2**64 - 1, 2**64),
    "digits": lambda: (2**64, 2**65),
    "text": lambda: ("a", "b"),
    "text or bytes": lambda: ("a", b"a"),
    "bytes length": lambda: (b"a", b"ab"),
    "None moved": lambda: ([None, 1], [1, None]),
    "container emptied": lambda: ({"a": [], "b": [1]}, {"a": [1], "b": []}),
    "type of an empty container": lambda: ([[]], [()]),
    "type of a container": lambda: ([1], (1,)),
    "key of a dict": lambda: ({1: 5}, {True: 5}),
    "order of a dict": lambda: (OrderedDict(a=1, b=2), OrderedDict(b=1, a=2)),
    "key implementation": lambda: (jax.random.key(1), jax.random.key(1, impl="rbg")),
    "typed or legacy key": lambda: (jax.random.key(1), jax.random.PRNGKey(1)),
}


@pytest.mark.parametrize("pair", CHANGES.values(), ids=CHANGES)
def test_a_tree_that_changed_gets_another_plan(trip, pair):
    """Either comes back as it is, after the other too."""
    before, after = ({"tree": tree, "z": 7} for tree in pair())

    assert plan_of(before) is not plan_of(after)
    for tree in (before, after, before):
        assert same(trip(tree), tree)


PLACEMENTS = {
    "spec": lambda make: [NamedSharding(make(x=4, y=2), s) for s in (P("x"), P("y"), P("y", "x"))],
    "replicas": lambda make: [NamedSharding(make(x=4, y=2), s) for s in (P(), P("x", "y"))],
    "mesh": lambda make: [NamedSharding(make(x=n), P("x")) for n in (2, 4, 8)],
    "axis": lambda make: [NamedSharding(make(**{a: 4}), P(a)) for a in "xy"],
    "device": lambda _: list(map(SingleDeviceSharding, jax.devices()[:2])),
    "order of devices": lambda _: [
        NamedSharding(jax.sharding.Mesh(devices, "x"), P("x"))
        for devices in (jax.devices(), jax.devices()[::-1])
    ],
}


@pytest.mark.parametrize("shardings", PLACEMENTS.values(), ids=PLACEMENTS)
def test_an_array_that_moved_gets_another_plan(trip, make_mesh, shardings):
    """Mesh, spec and device tell plans apart, and the values are right under each."""
    w = np.arange(64, dtype=np.float32).reshape(8, 8)
    trees = [{"w": jax.device_put(w + i, s)} for i, s in enumerate(shardings(make_mesh))]

    found = [plan_of(tree) for tree in trees]

    assert len(set(map(id, found))) == len(trees)
    for i, tree in enumerate(trees):
        assert np.array_equal(trip(tree)["w"], w + i)
        assert facts(plan_of(tree)) == facts(anew(tree)[0])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (FrozenDict({1: 5}), FrozenDict({True: 5})),
        (meta.Partitioned(5, names=(1,)), meta.Partitioned(5, names=(True,))),
        (meta.Partitioned(5, names=("x",)), meta.Partitioned(5, names=("y",))),
    ],
    ids=repr,
)
def test_static_data_comes_back_as_it_was(trip, before, after):
    """Static data of a node tells plans apart, even where it is equal as 1 and True are."""
    for tree in (before, after, before):
        assert repr(trip(tree)) == repr(tree)


@pytest.mark.parametrize("static", [np.ones(3), np.ones(1), jnp.ones(3), float("nan")], ids=repr)
def test_static_data_that_cannot_be_compared_is_no_obstacle(trip, static):
    """Arrays and NaN beside the leaves: each save stores what it is given."""
    for i in range(3):
        tree = Struct(i, 2.5, name=static + 0)
        assert trip(tree) == {"weight": i, "bias": 2.5}


def test_static_data_changed_in_place_is_seen(trip):
    """A plan holds static data as it was, also where the tree still refers to the object."""
    names = ["x"]
    tree = meta.Partitioned(5, names=names)  # pyright: ignore[reportArgumentType]
    trip(tree)

    names.append("y")

    assert trip(tree).names == ["x", "y"]
    assert facts(plan_of(tree)) == facts(anew(tree)[0])


def test_classes_of_one_name_are_told_apart(trip):
    """A class that was defined again, as notebooks do, is another one."""
    again = collections.namedtuple("Pair", "first second")  # noqa: PYI024  # of the same name

    for cls in (Pair, again, Pair):
        assert trip(cls(1, 2)) == cls(1, 2)._asdict()


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize("static", [Unprintable, lambda: deleted(jnp.ones(3))])
def test_static_data_that_cannot_be_printed_is_no_obstacle(trip, static):
    """Static data whose repr fails, like a deleted array's, is left out, since it is not data."""
    assert trip(Struct(1, 2, name=static())) == {"weight": 1, "bias": 2}


class Int(int):
    pass


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize("make", [dict, FrozenDict])
@pytest.mark.parametrize(("plain", "like_it"), [(1, Int(1)), ("a", Text("a"))], ids=repr)
def test_keys_that_differ_in_type_alone_are_told_apart(make, plain, like_it):
    """A key that equals and prints as another is recorded as if the other had not been saved."""
    for key in (plain, like_it, plain):
        tree = make({key: 5})
        assert facts(plan_of(tree)) == facts(anew(tree)[0])


class Names:
    """Static data that is compared by identity, and prints nothing of what it holds."""


class Named(Pair):
    """A node whose children are called as its static data says."""


def named_children(node):
    keys = map(jax.tree_util.GetAttrKey, node.left.names)
    return list(zip(keys, node.right, strict=True)), node.left


jax.tree_util.register_pytree_with_keys(Named, named_children, Named)


def test_names_that_changed_behind_equal_static_data_are_seen(trip):
    """Leaves go by the names that they have at the save."""
    tree = Named(Names(), [1, 2])
    tree.left.names = ("a", "b")
    trip(tree)

    tree.left.names = ("c", "d")

    assert trip(tree) == {"c": 1, "d": 2}


class Curious:
    """Static data that looks, when it is compared, whether a lock is held."""

    __hash__ = object.__hash__
    seen: list[bool] = []  # noqa: RUF012  # of all instances

    def __eq__(self, other):
        self.seen.append(tree_plan._lock.locked())
        return True

    def __repr__(self):
        return "Curious"


def test_no_lock_is_held_while_static_data_is_compared():
    """Code of the user's, or a signal handler, that saves meanwhile does not wait for itself."""
    for _ in range(2):
        plan_of(Struct(1, 2, name=Curious()))

    assert set(Curious.seen) == {False}


# --- what is refused -------------------------------------------------------------------------


def test_a_deleted_array_of_a_known_tree_is_refused_by_name(ram_path):
    """Deleted or donated: UnsupportedLeaf, as if the tree had never been saved."""
    for i, gone in enumerate([jnp.ones(3), jnp.ones(3)]):
        jaxckpt.save(ram_path / f"{i}", {"a": gone, "b": 1})
        gone.delete() if i else jax.jit(lambda x: x + 1, donate_argnums=0)(gone)

        with pytest.raises(UnsupportedLeaf, match=r"a: .*deleted or donated"):
            jaxckpt.save(ram_path / "x", {"a": gone, "b": 1})


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad])
def test_a_traced_array_of_a_known_tree_is_refused_by_name(ram_path, transform):
    """Inside of jit, vmap and grad: UnsupportedLeaf, as if the tree had never been saved."""
    x = jnp.ones(2) if transform is jax.vmap else jnp.float32(1)
    jaxckpt.save(ram_path / "0", {"a": jnp.float32(1)})

    with pytest.raises(UnsupportedLeaf, match=r"a: .*traced"):
        transform(lambda x: jaxckpt.save(ram_path / "x", {"a": x}))(x)


# --- what is kept ----------------------------------------------------------------------------


def test_few_plans_are_kept_and_those_are_the_last(trip):
    """At most _MAX_CACHED; a tree whose plan is gone is worked out anew."""
    trees = [{"w": np.full(n, n)} for n in range(1, _MAX_CACHED + 3)]
    found = [plan_of(tree) for tree in trees]

    assert len(tree_plan._cache) == _MAX_CACHED
    assert plan_of(trees[-1]) is found[-1]
    assert plan_of(trees[0]) is not found[0]
    assert same([trip(tree) for tree in trees], trees)


def test_no_value_is_kept_alive():
    """Once the caller lets go of a tree, the memory of its arrays is free."""
    tree = {"host": np.ones(3), "device": jnp.ones(3), "key": jax.random.key(1)}
    alive = [weakref.ref(value) for value in tree.values()]
    for _ in range(2):
        plan_tree(tree, current())

    del tree
    gc.collect()

    assert [value() for value in alive] == [None] * 3
    assert len(tree_plan._cache) == 1


def test_threads_share_plans():
    """Threads that save trees of several forms at once each get the right plan and values."""
    forms = range(1, _MAX_CACHED + 3)
    expected = {n: facts(anew({"w": np.zeros(n, int), "n": 0})[0]) for n in forms}
    start = threading.Barrier(4)

    def save(thread):
        start.wait()
        for i in range(20):
            for n in forms:
                found, (number, w) = plan_tree({"w": np.full(n, i), "n": thread}, current())
                yield facts(found) == expected[n], number == thread, np.array_equal(w, [i] * n)

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda thread: list(save(thread)), range(4)))

    assert all(all(right) for thread in done for right in thread)
    assert len(tree_plan._cache) == _MAX_CACHED


def test_simulated_processes_do_not_share_plans(ram_path, mesh):
    """Each writes its own share, of every save; another job's processes have others still."""

    def save(processes):
        found = [plan_tree(state(i, mesh), processes)[0] for i in range(2)]
        for i in range(2):
            jaxckpt.save(ram_path / f"{i}", state(i, mesh), overwrite=True)
        return found

    jobs = [simulate(2, save), simulate(2, save)]

    assert all(first is again for job in jobs for first, again in job)
    assert len({id(found[0]) for job in jobs for found in job}) == 4
    mine, others = ({w.box for w in first.plan.writes if w.array == 12} for first, _ in jobs[0])
    assert len(mine) == len(others) == 4
    assert not mine & others
    assert all(same(jaxckpt.restore(ram_path / f"{i}"), state(i, mesh)) for i in range(2))


# --- specs with `reduced` and `unreduced` axes ----------------------------------------------


@pytest.fixture
def explicit():
    """A mesh of explicit axes, x=4, y=2, in a program of which types have shardings."""
    if not hasattr(P(), "reduced"):
        pytest.skip("this jax has no such specs")
    types = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=types)
    with jax.set_mesh(mesh):
        yield mesh


def test_arrays_with_reduced_axes_are_saved_as_plain_ones(explicit, ram_path):
    """Their values are alike on these axes. They are restored too, and a misfit names the leaf."""
    values, reduced = np.arange(32.0).reshape(8, 4), P("x", None, reduced={"y"})
    tree = {"w": jax.device_put(values, NamedSharding(explicit, reduced)), "odd": np.zeros((6, 4))}
    keys = jax.random.split(jax.random.key(3), 8)
    jaxckpt.save(ram_path / "a", {**tree, "keys": keys})

    def restored(name, *spec):
        sharding = NamedSharding(explicit, P(*spec, reduced={"y"}))
        return jaxckpt.restore(ram_path / "a", only=name, shardings=sharding)[name]

    plain = jaxckpt.restore(ram_path / "a", only="w")["w"]
    assert plain.sharding.spec == P("x", None)
    assert np.array_equal(plain, values)
    assert restored("w", "x", None).sharding.spec == reduced
    assert np.array_equal(restored("w", "x", None), values)
    assert np.array_equal(*map(jax.random.key_data, (restored("keys", "x"), keys)))
    with pytest.raises(jaxckpt.TreeMismatch, match=r"odd .*cuts dimension 0 into 4 equal parts"):
        restored("odd", "x", None)


def test_arrays_that_are_yet_to_be_added_up_are_refused_by_name(explicit, ram_path):
    """Their shards are not the values; the error says which leaf, and a target likewise."""
    a = jax.device_put(np.ones((8, 4)), NamedSharding(explicit, P(None, "y")))
    b = jax.device_put(np.ones((4, 4)), NamedSharding(explicit, P("y", None)))
    spec = P(None, None, unreduced={"y"})
    product = jax.jit(lambda a, b: jnp.einsum("ij,jk->ik", a, b, out_sharding=spec))(a, b)
    like = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=NamedSharding(explicit, spec))

    with pytest.raises(UnsupportedLeaf, match=r"leaf grads/w .*yet to be added up"):
        jaxckpt.save(ram_path / "a", {"step": 7, "grads": {"w": product}})
    assert not (ram_path / "a").exists()
    jaxckpt.save(ram_path / "a", {"grads": {"w": np.ones((8, 4))}})
    with pytest.raises(jaxckpt.TreeMismatch, match=r"grads/w .*yet to be added up"):
        jaxckpt.restore(ram_path / "a", {"grads": {"w": like}})
