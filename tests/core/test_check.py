"""A wrong argument of a manager: who refuses it, what it wants, what it found, what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import jaxckpt
from jaxckpt import CheckpointManager, KeepPolicy, SavePolicy
from jaxckpt.errors import CheckpointNotFound

TREE = {"w": np.arange(3.0)}

CALLS = {
    "restore(step='bst')": (
        lambda m: m.restore(step="bst"),
        "restore: step must be a number, 'latest' or 'best', got 'bst'. Did you mean 'best'?",
    ),
    "restore(step=True)": (
        lambda m: m.restore(step=True),
        "restore: step must be an int, got True",
    ),
    "restore(step=1.5)": (lambda m: m.restore(step=1.5), "restore: step must be an int, got 1.5"),
    "restore_items(step='bst')": (lambda m: m.restore_items(step="bst"), "Did you mean 'best'?"),
    "restore(items=[1])": (lambda m: m.restore(items=[1]), "restore: items must be a dict"),
    "restore(mesh=4)": (
        lambda m: m.restore(mesh=4),
        "restore: mesh must be a jax.sharding.Mesh, got 4",
    ),
    "restore(dtype=...)": (
        lambda m: m.restore(dtype="flaot32"),
        "restore: dtype must be a dtype, got 'flaot32'. Did you mean 'float32'?",
    ),
    "restore(only=3)": (lambda m: m.restore(only=3), "run/1: only must be a glob over leaf paths"),
    "restore(skip=[3])": (lambda m: m.restore(skip=[3]), "run/1: skip must be a glob over leaf"),
    "restore(rename=[...])": (lambda m: m.restore(rename=["w"]), "restore: rename must be a dict"),
    "a pattern": (lambda m: m.restore(rename={"(": "x"}), "restore: rename maps regular expr"),
    "a replacement": (lambda m: m.restore(rename={"w": r"\2"}), "'w' to '\\\\2' cannot be used"),
    "restore(report=3)": (lambda m: m.restore(report=3), "restore: report must be a function"),
    "restore(timeout_s=...)": (
        lambda m: m.restore(timeout_s="1"),
        "restore: timeout_s must be a number, got '1'",
    ),
    "an unknown option": (
        lambda m: m.restore(mehs=4),
        "restore takes no argument 'mehs'. Did you mean 'mesh'?",
    ),
    "an unknown option of restore_or": (
        lambda m: m.restore_or(dict, itemz={}),
        "restore_or takes no argument 'itemz'. Did you mean 'items'?",
    ),
    "save(True)": (
        lambda m: m.save(True, TREE),
        "save(step, state): step must be an int, got True",
    ),
    "save(metrics=0.5)": (
        lambda m: m.save(2, TREE, metrics=0.5),
        "save: metrics must be a dict of numbers by name, got 0.5",
    ),
    "save(items=[1])": (
        lambda m: m.save(2, TREE, items=[1]),
        "save: items must be a dict of values by name, got [1]",
    ),
    "should_save(True)": (lambda m: m.should_save(True), "should_save: step must be an int"),
    "delete(True)": (lambda m: m.delete(True), "delete: step must be an int, got True"),
    "delete('1')": (lambda m: m.delete("1"), "delete: step must be an int, got '1'"),
    "pin('1')": (lambda m: m.pin("1"), "pin: step must be an int, got '1'"),
    "unpin('1')": (lambda m: m.unpin("1"), "unpin: step must be an int, got '1'"),
    "metadata('latest')": (lambda m: m.metadata("latest"), "metadata: step must be an int"),
    "custom_metadata('1')": (lambda m: m.custom_metadata("1"), "custom_metadata: step must be an"),
    "watch(None)": (lambda m: m.watch(None), "watch: timeout_s must be a number of seconds"),
    "watch(after='1')": (lambda m: m.watch(1, after="1"), "watch(after=...): step must be an int"),
    "wait('1')": (
        lambda m: m.wait_until_finished("1"),
        "wait_until_finished: timeout_s must be a number, got '1'",
    ),
}

OPENINGS = {
    "save=100": (
        {"save": 100},
        "CheckpointManager: save must be a SavePolicy(every_steps=...), got 100",
    ),
    "keep=3": ({"keep": 3}, "CheckpointManager: keep must be a KeepPolicy(last=...), got 3"),
    "max_to_keep=3": (
        {"max_to_keep": 3},
        "CheckpointManager takes no argument 'max_to_keep'. Pass keep=KeepPolicy(last=...).",
    ),
    "every_steps=3": (
        {"every_steps": 3},
        "Pass save=SavePolicy(every_steps=...) or keep=KeepPolicy(every_steps=...).",
    ),
    "modes='r'": (
        {"modes": "r"},
        "CheckpointManager takes no argument 'modes'. Did you mean 'mode'?",
    ),
    "mode='a'": ({"mode": "a"}, "CheckpointManager: mode must be 'w' or 'r', got 'a'"),
    "on_commit=3": ({"on_commit": 3}, "CheckpointManager: on_commit must be a function, got 3"),
    "timeout_s=None": (
        {"timeout_s": None},
        "CheckpointManager: timeout_s must be a number, got None",
    ),
}


@pytest.fixture
def manager(tmp_path) -> Iterator[CheckpointManager]:
    """A manager of a run with step 1."""
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, TREE)
        manager.wait_until_finished()
        yield manager


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_named(manager, name):
    """With its call, what it wants and what it found; the run stays as it is."""
    call, text = CALLS[name]

    with pytest.raises((TypeError, ValueError)) as caught:
        call(manager)

    assert text in str(caught.value)
    assert manager.all_steps() == [1]


@pytest.mark.parametrize("name", OPENINGS)
def test_a_wrong_argument_opens_no_run(tmp_path, name):
    """A first try with the names of Orbax, or of a policy, is told where these belong."""
    arguments, text = OPENINGS[name]

    with pytest.raises((TypeError, ValueError)) as caught:
        CheckpointManager(tmp_path / "run", **arguments)

    assert text in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_number_of_any_library_is_a_step(manager):
    """Only a bool is refused."""
    manager.save(np.int64(2), TREE).result()

    assert np.array_equal(manager.restore(step=np.array(2))["w"], TREE["w"])


def test_a_run_without_steps_says_so(tmp_path, caplog):
    """And whether there is a directory at all; a reader of none warns when it opens."""
    with CheckpointManager(tmp_path / "empty") as manager:
        for call in (manager.restore, lambda: manager.restore(step=4)):
            with pytest.raises(CheckpointNotFound, match="empty has no committed step"):
                call()
        assert not caplog.records
    with CheckpointManager(tmp_path / "missing", mode="r") as reader:
        assert "missing does not exist yet" in caplog.text
        for call in (reader.restore, lambda: reader.restore(step=4)):
            with pytest.raises(CheckpointNotFound, match="does not exist"):
                call()


def test_a_closed_manager_says_why(tmp_path):
    """Whether it was closed, or another one of this process took the run."""
    first = CheckpointManager(tmp_path)
    second = CheckpointManager(tmp_path)
    second.close()

    with pytest.raises(ValueError, match="another manager of this process has opened the run"):
        first.save(1, TREE)
    with pytest.raises(ValueError, match=r"close\(\) was called"):
        second.save(1, TREE)


class Broken:
    """An iterator whose state cannot be had, or set."""

    def __init__(self, *, gets: bool) -> None:
        self.gets = gets

    def get_state(self) -> int:
        return 1 if self.gets else self.fail()

    def set_state(self, state: object) -> None:
        self.fail()

    def fail(self) -> Any:
        raise KeyError("mine")


def fail(*_: object) -> Any:
    raise KeyError("mine")


def saving(path, **arguments: Any) -> None:
    items = arguments.pop("items", None)
    with CheckpointManager(path, **arguments) as manager:
        manager.save(1, TREE, items=items)
        manager.wait_until_finished()
        if items:
            manager.restore(items=items)


RAISING: dict[str, tuple[Callable[[Any], object], str]] = {
    "SavePolicy.when": (
        lambda path: saving(path, save=SavePolicy(when=fail)),
        "raised by SavePolicy.when at step 1",
    ),
    "KeepPolicy.when": (
        lambda path: saving(path, keep=KeepPolicy(when=fail)),
        "raised by KeepPolicy.when; no step was deleted",
    ),
    "on_commit": (
        lambda path: saving(path, on_commit=fail),
        "raised by on_commit; step 1 is committed",
    ),
    "on_progress": (
        lambda path: saving(path, on_progress=fail),
        "raised by on_progress; the save went on without it",
    ),
    "get_state": (
        lambda path: saving(path, items={"data": Broken(gets=False)}),
        "raised by the method for the state of item 'data'; nothing was saved",
    ),
    "set_state": (
        lambda path: saving(path, items={"data": Broken(gets=True)}),
        "raised by item 'data' when it was given its saved state",
    ),
    "report": (
        lambda path: (jaxckpt.save(path, TREE), jaxckpt.restore(path, report=fail)),
        "raised by the function `report`",
    ),
    "shardings": (
        lambda path: (jaxckpt.save(path, TREE), jaxckpt.restore(path, shardings=fail)),
        "raised by the function `shardings` for leaf w",
    ),
}


@pytest.mark.parametrize("function", RAISING)
def test_the_error_of_a_function_of_the_caller_says_which(tmp_path, function):
    """It stays the caller's own error, with a note."""
    call, note = RAISING[function]

    with pytest.raises(KeyError, match="mine") as caught:
        call(tmp_path / "run")

    assert any(note in text for text in caught.value.__notes__)
    if function == "on_commit":
        with contextlib.closing(CheckpointManager(tmp_path / "run", mode="r")) as reader:
            assert reader.all_steps() == [1]
