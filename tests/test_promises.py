"""Ways in which a promise was once broken: a save or a restore may refuse, but never lie."""

from __future__ import annotations

import enum
import logging
import os
import threading
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt.format.tree import MAX_LEVELS
from tests.twins import watched


class Flavour(str, enum.Enum):  # noqa: UP042  # prints as its name, which StrEnum does not
    SWEET = "sweet"


def state(k: int) -> dict[str, object]:
    return {"name": f"run-{k}", "big": np.full(300_000, k, np.float32), "small": np.full(8, k)}


def test_a_reader_sees_the_old_tree_or_the_new_one(tmp_path):
    """A checkpoint that is replaced again and again under a reader is never read as a mixture."""
    path = tmp_path / "a"
    jaxckpt.save(path, state(0))
    stop, failures = threading.Event(), []

    def replace() -> None:
        k = 1
        while not stop.is_set():
            jaxckpt.save(path, state(k), overwrite=True)
            k += 1

    writer = threading.Thread(target=replace, name="writer")
    writer.start()
    try:
        for _ in range(60):
            got = jaxckpt.restore(path)
            seen = {got["name"], *(f"run-{int(v)}" for v in np.unique(got["big"]))}
            seen |= {f"run-{v}" for v in np.unique(got["small"])}
            if len(seen) != 1:
                failures.append(seen)
    finally:
        stop.set()
        writer.join()

    assert failures == []


def test_what_was_opened_is_what_is_read(tmp_path):
    """A handle on a checkpoint that was replaced since says so."""
    jaxckpt.save(tmp_path / "a", state(0))
    opened = jaxckpt.open(tmp_path / "a")
    jaxckpt.save(tmp_path / "a", state(1), overwrite=True)

    with pytest.raises(jaxckpt.CheckpointNotFound, match="replaced"):
        opened.restore()


@pytest.mark.parametrize("in_parts", [False, True])
def test_no_part_of_an_open_checkpoint_comes_from_its_replacement(tmp_path, in_parts):
    """It is replaced at each call of the storage in turn, also while leaves are decoded."""
    path, refused = tmp_path / "a", []
    for n in count(1):
        jaxckpt.save(path, state(0), overwrite=True)
        calls = count(1)

        def before(verb, _, n=n, calls=calls):
            if next(calls) == n:
                jaxckpt.save(path, state(1), overwrite=True)

        try:
            opened = jaxckpt.open(watched(path, before))
            got = {k: opened[k].restore() for k in opened} if in_parts else opened.restore()
        except jaxckpt.CheckpointNotFound as error:
            refused.append(str(error))
        else:
            values = {*np.unique(got["big"]), *np.unique(got["small"]), int(got["name"][4:])}
            assert len(values) == 1
        if next(calls) <= n:
            break
    assert n > 10
    assert refused
    text = f"{path} was replaced, changed or deleted since it was opened. Open it again."
    assert {*refused} == {text}


def test_saves_to_one_path_commit_in_their_order(tmp_path):
    """If several saves to one path are in flight, the last one called stays."""
    for _ in range(5):
        handles = [jaxckpt.save_async(tmp_path / "a", state(k), overwrite=True) for k in range(4)]
        for handle in handles:
            handle.result()

        assert jaxckpt.restore(tmp_path / "a")["name"] == "run-3"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("name", ["a\\b", "y.orbax-checkpoint-tmp", "z.jaxckpt-committed"])
def test_a_name_that_cannot_be_read_back_is_refused(tmp_path, name):
    """Not saved and acknowledged under a name where nothing finds it."""
    with pytest.raises(ValueError, match=r"backslash|reserved for unfinished saves"):
        jaxckpt.save(f"{tmp_path}/{name}", state(0))

    assert os.listdir(tmp_path) == []


def test_a_tree_is_as_deep_as_can_be_read_back(tmp_path):
    """The deepest tree that is accepted comes back; a deeper one is refused by name."""
    tree: object = np.arange(2)
    for _ in range(MAX_LEVELS):
        tree = {"k": tree}

    jaxckpt.save(tmp_path / "a", tree)
    with pytest.raises(jaxckpt.UnsupportedLeaf, match="nested deeper"):
        jaxckpt.save(tmp_path / "b", {"k": tree})
    with pytest.raises(TypeError, match="custom_metadata"):
        jaxckpt.save(tmp_path / "b", {"w": 1}, custom_metadata={"k": tree})

    assert jax.tree.structure(jaxckpt.restore(tmp_path / "a")) == jax.tree.structure(tree)
    assert os.listdir(tmp_path) == ["a"]


def test_a_directory_of_others_is_left_alone(tmp_path):
    """A directory whose name only resembles our leftovers is neither adopted nor removed."""
    for name in ("a.orbax-checkpoint-tmp-deleting-mine", "a.jaxckpt-committed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("mine")

    jaxckpt.save(tmp_path / "a", state(0))

    assert len(list(tmp_path.glob("*/file"))) == 2


def test_overwrite_replaces_one_tree_and_nothing_else(tmp_path):
    """Small files in it move along; directories in it, and a nested checkpoint, are refused."""
    path = tmp_path / "a"
    jaxckpt.save(path, state(0))
    with pytest.raises(jaxckpt.StepExists, match="inside"):
        jaxckpt.save(path / "2", state(1))
    with pytest.raises(jaxckpt.StepExists, match="inside"):
        jaxckpt.save(path / "state", state(1), overwrite=True)
    (path / "notes.txt").write_text("mine")
    jaxckpt.save(path, state(1), overwrite=True)
    (path / "plots").mkdir()
    with pytest.raises(jaxckpt.StepExists, match="plots"):
        jaxckpt.save(path, state(2), overwrite=True)

    assert (path / "notes.txt").read_text() == "mine"
    assert (path / "plots").is_dir()
    assert jaxckpt.restore(path)["name"] == "run-1"


def test_the_text_of_an_enum_is_its_value(tmp_path):
    """An enum of str is saved as what it equals, not as what it prints."""
    jaxckpt.save(tmp_path / "a", {"f": Flavour.SWEET, "d": {Flavour.SWEET: 1}})

    assert jaxckpt.restore(tmp_path / "a") == {"f": "sweet", "d": {"sweet": 1}}


def test_like_may_be_abstract(tmp_path):
    """`jax.eval_shape` of a state on a mesh with explicit axes gives shardings without devices."""
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.device_put(np.arange(64.0, dtype=np.float32).reshape(8, 8), NamedSharding(mesh, P("d")))
    jaxckpt.save(tmp_path / "a", {"x": x})
    like = jax.eval_shape(lambda: {"x": x})

    got = jaxckpt.restore(tmp_path / "a", like)

    assert got["x"].sharding.is_equivalent_to(x.sharding, 2)
    assert np.array_equal(got["x"], x)


def test_a_restore_works_under_a_transfer_guard(tmp_path):
    """A restore is a transfer that was asked for."""
    jaxckpt.save(tmp_path / "a", {"x": jnp.arange(4)})

    with jax.transfer_guard("disallow"):
        got = jaxckpt.restore(tmp_path / "a")

    assert np.array_equal(got["x"], np.arange(4))


def test_a_failed_background_save_leaves_a_trace(tmp_path, caplog):
    """This holds even if nobody keeps its handle."""
    (tmp_path / "file").write_text("")

    with caplog.at_level(logging.ERROR, logger="jaxckpt"):
        handle = jaxckpt.save_async(tmp_path / "file" / "a", state(0))
        with pytest.raises(jaxckpt.SaveFailed):
            handle.result()

    assert "failed" in caplog.text


@pytest.mark.parametrize(
    "option",
    [{"skip": "bg"}, {"only": "bg"}, {"rename": {"bg": "x"}}, {"shardings": {"bg": None}}],
    ids=lambda option: next(iter(option)),
)
def test_an_option_that_names_nothing_is_an_error(tmp_path, option):
    """A misspelt path must not be ignored."""
    jaxckpt.save(tmp_path / "a", state(0))

    with pytest.raises(ValueError, match="bg"):
        jaxckpt.restore(tmp_path / "a", **option)


def test_a_spec_of_too_many_dimensions_names_its_leaf(tmp_path, mesh):
    """Like any other sharding that does not fit."""
    jaxckpt.save(tmp_path / "a", {"j": jnp.arange(8)})

    with pytest.raises(jaxckpt.TreeMismatch, match="j "):
        jaxckpt.restore(tmp_path / "a", mesh=mesh, shardings={"j": P("x", "y")})


def test_swapped_data_files_are_found(tmp_path):
    """Each chunk in them is intact, but belongs to another leaf."""
    tree = {f"w{k}": np.full((4, 1024, 4096), k, np.float32) for k in range(3)}
    jaxckpt.save(tmp_path / "a", tree)
    data = sorted((tmp_path / "a").glob("state/d/*"), key=lambda file: -file.stat().st_size)[:2]
    assert data[0].stat().st_size == data[1].stat().st_size
    data[0].rename(tmp_path / "other")
    data[1].rename(data[0])
    (tmp_path / "other").rename(data[1])

    with pytest.raises(jaxckpt.CorruptCheckpoint, match="not the one that was written"):
        jaxckpt.restore(tmp_path / "a")

    report = jaxckpt.verify(tmp_path / "a")
    assert {problem.file for problem in report.problems} == {str(file) for file in data}
