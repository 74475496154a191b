"""The comparison of Orbax with the drop-in finds each kind of difference."""

from __future__ import annotations

import types
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.orbax.twice import compare, raised

ocp = pytest.importorskip("orbax.checkpoint")


def a_library(**names):
    """A module with these names."""
    module = types.ModuleType("library")
    vars(module).update(names)
    return module


def a_class(name, **entries):
    """A class of Orbax, or of the drop-in, by its name."""
    kind = type(name, (dict,), {"__module__": "orbax.x"})
    return kind(**entries)


class Special(ValueError):
    """An error that whoever expects ValueError catches."""


@dataclass
class Fields:
    value: object


def save_and_restore(ocp, path):
    """A program with all that is compared."""
    with ocp.CheckpointManager(path / "run") as manager:
        tree = {"w": jnp.arange(6.0), "count": 3, "key": jax.random.key(0)}
        manager.save(1, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
        error = raised(manager.restore, 7)
        return manager.directory, manager.restore(1), manager.all_steps(), error


def test_a_program_that_does_the_same_passes(tmp_path):
    """Orbax is equal to itself, and its result is returned."""

    def read(ocp, path):
        return ocp.StandardCheckpointer().restore(path / "run" / "1" / "default")

    directory, tree, steps, error = compare(save_and_restore, tmp_path, ocp, ocp, read=read)

    assert directory == tmp_path / "ours" / "run"
    assert (tree["count"], steps, type(error)) == (3, [1], FileNotFoundError)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (1, 1),
        (float("nan"), float("nan")),
        ({"a": [1, (2,)]}, {"a": [1, (2,)]}),
        (np.float32([0, np.nan]), np.float32([0, np.nan])),
        (ValueError("a"), Special("b")),
        (a_class("Composite", state=1), a_class("Composite", state=1)),
        (Fields(np.arange(3)), Fields(np.arange(3))),
        (None, None),
    ],
    ids=repr,
)
def test_equal_values_pass(tmp_path, theirs, ours):
    """An error may be more special; a class of theirs is one of the same name and parts."""
    compare(lambda m, _: m.value, tmp_path, a_library(value=theirs), a_library(value=ours))


@pytest.mark.parametrize(
    ("theirs", "ours", "found"),
    [
        (1, 2, "wanted 1, got 2"),
        (1, True, "wanted a <class 'int'>"),
        ([1], (1,), "wanted a <class 'list'>"),
        ({"a": 1}, {"b": 1}, "wanted ['a'], got ['b']"),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "result/a/b: wanted 1"),
        (np.arange(3), np.arange(3.0), "wanted int64(3,), got float64(3,)"),
        (np.arange(3), np.arange(3) + 1, "wanted [0 1 2]"),
        (np.float32(1), jnp.float32(1), "float32"),
        (jnp.arange(3), np.arange(3, dtype=np.int32), "jax.Array"),
        (Special("a"), ValueError("a"), "is no Special"),
        (ValueError("a"), None, "is no BaseException, Exception"),
        (None, ValueError("a"), "is no NoneType"),
        (a_class("Composite", a=1), a_class("Composite", a=2), "result/a: wanted 1"),
        (a_class("Composite", a=1), {"a": 1}, "wanted a <class 'orbax.x.Composite'>"),
        (Fields(1), Fields(2), "result/value: wanted 1"),
        (Path("/a"), Path("/b"), "PosixPath('/b')"),
        (Path("/a"), "/a", "str"),
    ],
    ids=repr,
)
def test_a_planted_difference_is_found(tmp_path, theirs, ours, found):
    """Of each kind of value."""
    libraries = a_library(value=theirs), a_library(value=ours)

    with pytest.raises(AssertionError) as error:
        compare(lambda m, _: m.value, tmp_path, *libraries)

    assert found in str(error.value)


def test_another_sharding_is_found(tmp_path, mesh):
    """Of an array that is otherwise equal."""
    w = jnp.zeros((4, 2))
    theirs, ours = (
        a_library(value=jax.device_put(w, NamedSharding(mesh, spec))) for spec in (P("x"), P())
    )

    with pytest.raises(AssertionError, match="NamedSharding"):
        compare(lambda m, _: m.value, tmp_path, theirs, ours)


def test_what_one_library_leaves_alone_is_found(tmp_path):
    """A step, an item, or a file; arrays are compared by reading them."""
    theirs, ours = a_library(steps=["1/state", "2/state"]), a_library(steps=["1/state/d"])

    def program(module, path):
        for step in module.steps:
            (path / step).mkdir(parents=True)

    with pytest.raises(AssertionError) as error:
        compare(program, tmp_path, theirs, ours)

    assert str(error.value).splitlines() == [
        *("on disk, only theirs: 2/", "on disk, only theirs: 2/state/")
    ]


def test_what_one_library_cannot_read_of_the_other_is_found(tmp_path):
    """Whichever it is."""
    theirs, ours = a_library(name="a", reads="ab"), a_library(name="b", reads="a")

    def read(module, path):
        return {"theirs": "a", "ours": "b"}[path.name] in module.reads

    with pytest.raises(AssertionError) as error:
        compare(lambda *_: None, tmp_path, theirs, ours, read=read)

    assert str(error.value).splitlines() == [
        "ours reads ours: program/result: wanted True, got False"
    ]


def test_an_error_of_the_program_is_raised_if_both_raise_it(tmp_path):
    """So that a program cannot fail unseen."""
    with pytest.raises(ZeroDivisionError):
        compare(lambda *_: 1 / 0, tmp_path, ocp, ocp)
