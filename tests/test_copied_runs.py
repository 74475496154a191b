"""Copies of a run by the usual tools are whole, whatever becomes of the links between its files."""

from __future__ import annotations

import shutil
import subprocess

import pytest

import jaxckpt
from jaxckpt import CheckpointManager, KeepPolicy
from tests.run.test_incremental import frozen, lora, same

STEPS = [1, 2, 3, 4]
# How a run at {a} is copied to {b}. {c} is an earlier copy.
TOOLS = {
    "cp -r": ["cp -r {a} {b}"],
    "cp -al": ["cp -al {a} {b}"],
    "tar": ["tar -C {a} -cf {b}.tar .", "mkdir {b}", "tar -C {b} -xf {b}.tar"],
    "rsync -a": ["rsync -a {a}/ {b}/"],
    "rsync -aH": ["rsync -aH {a}/ {b}/"],
    "rsync --link-dest": ["rsync -a {a}/ {c}/", "rsync -a --link-dest={c}/ {a}/ {b}/"],
    "rsync of a part, again": ["rsync -a --exclude=4 {a}/ {b}/", "rsync -a {a}/ {b}/"],
}


@pytest.fixture
def run(ram_path):
    """A run whose steps share a file."""
    with CheckpointManager(ram_path / "run") as manager:
        for step in STEPS:
            manager.save(step, lora(step, frozen())).result()
            manager.wait_until_finished()  # until what the next step may share is read back
    files = [file.stat().st_nlink for file in (ram_path / "run").rglob("d/*")]
    assert max(files) > 1
    return ram_path / "run"


@pytest.mark.parametrize("tool", TOOLS)
def test_a_copy_is_whole_and_apart(run, tool):
    """Each step restores and verifies; a job that goes on in the copy leaves the run as it is."""
    copy = run.with_name("copy")
    for line in TOOLS[tool]:
        command = line.format(a=run, b=copy, c=run.with_name("earlier")).split()
        if shutil.which(command[0]) is None:
            pytest.skip(f"{command[0]} is not installed")
        subprocess.run(command, check=True)

    check(copy, STEPS)
    with CheckpointManager(copy, keep=KeepPolicy(last=2)) as manager:
        assert manager.all_steps() == STEPS
        for step in (5, 6):
            manager.save(step, lora(step, frozen())).result()
        manager.wait_until_finished()
        assert not manager.problems

    check(copy, [5, 6])
    check(run, STEPS)


def check(run, steps):
    for step in steps:
        assert same(jaxckpt.restore(run / str(step)), lora(step, frozen()))
        report = jaxckpt.verify(run / str(step))
        assert report.ok
        assert not report.unchecked
