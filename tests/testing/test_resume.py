"""`check_exact_resume` passes what resumes exactly, and finds each planted fault."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxckpt import CheckpointManager
from jaxckpt.testing import ResumeDiffers, check_exact_resume
from jaxckpt.testing._trace import row_of
from tests.workers import loops
from tests.workers.loops import loop

STEPS = {"steps": 12, "kill_at": 5}


def faulty(directory, fault, **shown):
    """Returns the error of the check of a loop with this fault."""
    with pytest.raises(ResumeDiffers) as caught:
        check_exact_resume(functools.partial(loop, fault=fault, **shown), directory, **STEPS)
    return caught.value


def test_a_loop_that_resumes_exactly_passes(tmp_path):
    assert check_exact_resume(loop, tmp_path / "new", **STEPS) >= 1
    named = functools.partial(loop, prefix="ckpt")
    assert check_exact_resume(named, tmp_path / "named", **STEPS) >= 1


@pytest.mark.parametrize(
    ("fault", "leaf", "kind", "says"),
    [
        ("key", "key", "rng", "no leaf key: was it saved? It is as after a new start"),
        ("opt", "opt/count", "state", "has opt/count: it was rebuilt or changed after the restore"),
        ("data", "batch", "data order", "this is the batch of step 1"),
        ("host", "params/w", "unsaved value", "though the state before and the batch are equal"),
        ("numpy", "loss", "rng", "draws from global generators of numpy.random"),
        ("order", None, "reduction order", "only last bits differ. params/w had the sharding"),
    ],
)
def test_a_fault_is_found_and_named(tmp_path, fault, leaf, kind, says):
    """With the state that the loop starts with, and the batches."""
    found = faulty(tmp_path, fault)

    assert (found.leaf, found.kind) == (leaf or found.leaf, kind), str(found)
    assert says in str(found)
    assert f"first after step {found.step}" in str(found)


@pytest.mark.parametrize(
    ("fault", "leaf", "kind"),
    [
        ("key", "key", "rng"),
        ("opt", "opt/count", "state"),
        ("data", "loss", "unsaved value"),
        ("host", "params/w", "state"),
    ],
)
def test_a_fault_is_found_by_the_state_after_each_step(tmp_path, fault, leaf, kind):
    """It is told less exactly when the loop yields neither its start nor its batches."""
    found = faulty(tmp_path, fault, start=False, batch=False)

    assert (found.leaf, found.kind) == (leaf, kind), str(found)


def test_a_loop_that_differs_by_itself_is_not_blamed_on_the_resume(tmp_path):
    found = faulty(tmp_path, "clock")

    assert found.kind == "not deterministic"
    assert found.step == 1
    assert str(found).startswith("another run from the start differs")


def test_a_loop_that_does_not_restore_is_found(tmp_path):
    found = faulty(tmp_path, "forgets")

    assert found.kind == "not resumed"
    assert "restore_or()" in str(found)


def test_a_number_in_a_module_is_found_by_a_real_kill_only(tmp_path):
    """The exception leaves it in place; SIGKILL does not."""
    loops._seen["sum"] = 0.0
    found = {}
    for how in (functools.partial(loop, fault="module"), "tests.workers.loops:module"):
        with pytest.raises(ResumeDiffers) as caught:
            check_exact_resume(how, tmp_path / str(len(found)), **STEPS)
        found[isinstance(how, str)] = caught.value.kind, caught.value.step > 1

    assert found == {False: ("not deterministic", False), True: ("unsaved value", True)}


def test_a_loop_is_killed_and_resumes_in_processes_of_its_own(tmp_path):
    at = check_exact_resume("tests.workers.loops:loop", tmp_path, **STEPS)

    assert 1 <= at < 12
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "resumed", "rows.jsonl"}


@pytest.mark.parametrize(
    ("changed", "is_rounding"),
    [
        (lambda x: np.nextafter(x, np.float32(9)), True),
        (lambda x: x + np.eye(1, x.size, 1, dtype=np.float32)[0], False),  # beside the sample
        (lambda x: x[::-1].copy(), False),
        (lambda x: x.astype(np.float64), False),
        (lambda x: x.astype(np.int32), False),
    ],
    ids=["last bit", "one value", "order", "wider", "integers"],
)
def test_only_differences_of_last_bits_count_as_rounding(changed, is_rounding):
    values = np.random.default_rng(0).standard_normal(8192, np.float32)
    rows = [row_of((1, {"w": x}, 0.0)) for x in (values, changed(values))]

    assert rows[0].differing(rows[1]) == ["state/w"]
    assert rows[0].of("state/w").is_rounding(rows[1].of("state/w")) is is_rounding


def test_a_loss_on_the_host_is_no_rounding_for_being_near():
    one, other, near = (row_of((1, {}, loss)).of("loss") for loss in (1.0, 1.05, 1 + 1e-7))

    assert not one.is_rounding(other)
    assert one.is_rounding(near)


def test_a_number_is_the_same_on_the_host_and_in_an_array():
    """A restore may turn one into the other; its value counts."""
    rows = [row_of((1, {"n": n}, None)) for n in (3, np.int32(3), jnp.int32(3), jnp.int32(4))]

    assert [rows[0].differing(row) for row in rows] == [[], [], [], ["state/n"]]


def never_saves(run):
    for step in range(1, 100):
        yield step, {"w": np.ones(2)}, 0.0


def ends(run):
    yield from list(loop(run))[:3]


def test_what_shows_nothing_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="had no committed step before step 12"):
        check_exact_resume(never_saves, tmp_path / "a", **STEPS)
    with pytest.raises(ValueError, match="must be empty"):
        check_exact_resume(loop, tmp_path)
    with pytest.raises(ValueError, match="between 1 and 4, got 5"):
        check_exact_resume(loop, tmp_path / "b", steps=5, kill_at=5)
    with pytest.raises(TypeError, match=r"what the loop returns must be a generator.* got None"):
        check_exact_resume(lambda run: None, tmp_path / "d")  # pyright: ignore
    with pytest.raises(TypeError, match="must yield"):
        check_exact_resume(lambda run: (x for x in [1]), tmp_path / "c")
    with pytest.raises(ValueError, match="yielded nothing"):
        check_exact_resume(lambda run: (x for x in ()), tmp_path / "d")
    with pytest.raises(ChildProcessError, match="no_such"):
        check_exact_resume("tests.no_such:loop", tmp_path / "e")


@pytest.mark.parametrize(("resumed", "wrong"), [([20], 20), ([8, 9, 8, *range(9, 21)], 8)])
def test_after_the_restore_each_step_is_due_once(tmp_path, resumed, wrong):
    """Otherwise nothing is shown of the steps between, or of those that are trained again."""

    def loop(run):
        with CheckpointManager(run) as manager:
            _, first = manager.restore_or(lambda: {"w": 1.0})
            for step in resumed if first else range(1, 21):
                state = {"w": 1.1**step}
                if step not in manager.all_steps():
                    manager.save(step, state).result()
                yield step, state, state["w"]

    with pytest.raises(ResumeDiffers, match=f"yielded step {wrong} where step .* was due"):
        check_exact_resume(loop, tmp_path)
