"""Damaged data, such as a flipped bit or a truncated or swapped file, never gives another value."""

from __future__ import annotations

import shutil

import pytest

import jaxckpt
from tests.faults import damage
from tests.faults.damage import Checkpoints


@pytest.fixture(scope="module")
def checkpoints(zygote, tmp_path_factory, run_processes):
    return Checkpoints(zygote, tmp_path_factory.mktemp("checkpoints"), run_processes)


@pytest.mark.parametrize("layout", [*damage.LAYOUTS, "processes"])
def test_a_flipped_bit_is_found_or_harmless(zygote, trial, checkpoints, ram_path, layout):
    """Readers give the right values or name the leaf or the file; `verify` misses none."""
    root = checkpoints(layout)

    said = damage.trials_of(zygote, trial, "11", damage.flips, root, ram_path / "x", 1, 51)

    assert sum(answer.get("harmless", False) for answer in said) < 20


def test_flips_are_silent_without_checksums(zygote, checkpoints, ram_path):
    """A control: then other values come back, and the trials say so."""
    root = checkpoints("plain")

    problems = damage.problems_of(zygote, damage.flips, root, ram_path / "x", 1, 40, blind=True)

    assert any("another value, in silence" in problem for problem in problems)


@pytest.mark.parametrize("layout", ["plain", "sharded", "inner"])
def test_orbax_finds_flips_in_the_values(zygote, trial, checkpoints, ram_path, layout):
    """It reads the checksums that we write."""
    root = checkpoints(layout)

    damage.trials_of(zygote, trial, "11", damage.orbax_flips, root, ram_path / "x", 1, 14)


def test_orbax_does_not_find_them_in_what_it_writes(zygote, ram_path):
    """A control: without our codec a flip gives another value, in silence."""
    said = zygote.run(damage.orbax_alone, ram_path / "x")

    assert said == {"same": False}


@pytest.mark.parametrize("layout", ["plain", "files", "step", "processes"])
def test_a_file_that_is_not_as_it_was_is_found(zygote, trial, checkpoints, ram_path, layout):
    """Cut short, lengthened, emptied, removed, replaced by a directory."""
    root = checkpoints(layout)

    damage.trials_of(zygote, trial, "12", damage.cuts, root, ram_path / "x", 1, 42)


@pytest.mark.parametrize("layout", ["plain", "files", "alike", "step", "processes"])
def test_files_in_each_others_place_are_found(zygote, trial, checkpoints, ram_path, layout):
    """Swapped, copied over another, taken from another checkpoint of the same structure."""
    root, other = checkpoints(layout), checkpoints(layout, 2)

    damage.trials_of(zygote, trial, "12", damage.swaps, root, other, ram_path / "x", 1, 12)


def test_files_in_each_others_place_fit_without_the_sums(zygote, checkpoints, ram_path):
    """A control: the chunks' own checksums do not show it, and other values are restored."""
    root, other = checkpoints("alike"), checkpoints("alike", 2)

    problems = damage.problems_of(
        zygote, damage.swaps, root, other, ram_path / "x", 1, 12, blind=True
    )

    assert any("another value, in silence" in problem for problem in problems)


@pytest.mark.parametrize("layout", ["plain", "sharded", "step"])
def test_a_whole_step_elsewhere_is_what_it_was(trial, checkpoints, ram_path, layout):
    """A step that was renamed is the same tree: nothing in it says its number."""
    root = shutil.copytree(checkpoints(layout), ram_path / "x")
    wanted = damage.bits(jaxckpt.restore(root / str(damage.STEP)))
    (root / str(damage.STEP)).rename(root / "7")

    with trial("12", f"{layout}, step {damage.STEP} called 7"):
        assert damage.bits(jaxckpt.restore(root / "7")) == wanted
        assert jaxckpt.verify(root / "7").ok
