"""What guards the steps of a run beside the commit: each place or order of it is a trial."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jaxckpt
from jaxckpt import CheckpointError, CheckpointManager, CorruptCheckpoint, KeepPolicy
from jaxckpt.format import names
from tests.commandline import cli, said_json

ROOT = Path(__file__).parents[2]
SIZE = 100_000  # values of a state, so that its chunk is a file of its own


def state(step):
    return {"w": np.full(SIZE, step, np.float32), "step": step}


def saved(place, *steps, **options):
    with CheckpointManager(place, **options) as manager:
        for step in steps:
            manager.save(step, state(step), items={"data": {"at": step}}, metrics={"loss": 1.0})
    return place


# --- a job that is started twice -------------------------------------------------------------

# A job that resumes, and saves whenever it is told a number; it says how each save ended.
JOB = """
import sys, jaxckpt
with jaxckpt.CheckpointManager(sys.argv[1]) as manager:
    manager.restore()
    print(manager.restored_step, flush=True)
    for line in sys.stdin:
        try:
            manager.save(int(line), {"n": int(line)}).result()
            print("saved", flush=True)
        except Exception as error:
            print(type(error).__name__, str(error).replace("\\n", " "), flush=True)
"""


class Job:
    """A process with a manager of the run."""

    def __init__(self, root):
        self._process = subprocess.Popen(
            [sys.executable, "-c", JOB, str(root)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid, self.began_at = self._process.pid, int(self._said())

    def _said(self):
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def save(self, step):
        assert self._process.stdin is not None
        self._process.stdin.write(f"{step}\n")
        self._process.stdin.flush()
        return self._said()

    def end(self):
        self._process.communicate(timeout=60)


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_job_that_is_started_twice(ram_path, trial, ahead):
    """The first job goes on, whichever step the second one saves; that one names the first."""
    saved(ram_path / "run", 1)
    for steps in ((10,), (10, 20), (5, 10)):
        root = shutil.copytree(ram_path / "run", ram_path / f"{ahead} {steps}")
        with contextlib.ExitStack() as jobs:
            first, second = Job(root), Job(root)
            jobs.callback(first.end)
            jobs.callback(second.end)
            for i in range(ahead):
                assert first.save(10 + i) == "saved"
            for step in steps:
                with trial("50", f"{ahead} ahead, the second saves {steps}: {step}"):
                    said = second.save(step)
                    assert said.startswith("SaveFailed")
                    assert f"process {first.pid} on " in said
            with trial("50", f"{ahead} ahead, the second saved {steps}: the first goes on"):
                assert first.save(30) == "saved"
        assert jaxckpt.restore(root)["n"] == 30


# --- a step without its record ---------------------------------------------------------------


def test_a_step_without_its_record(ram_path, trial):
    """It is damaged to each call and each command, and none deletes or loads it."""
    run = saved(ram_path / "run", 1, 2)
    shutil.copytree(run, ram_path / "copy")
    record = run / "2" / names.RECORD
    record.unlink()
    missing = f"{record} is missing"
    for verb in (jaxckpt.restore, jaxckpt.open):
        for path in (run / "2", run / "2" / "state"):
            with trial("51", f"{verb.__name__} {path.name}"), pytest.raises(CorruptCheckpoint):
                verb(path)
        with trial("51", f"{verb.__name__} of the run"):
            assert "step" in verb(run)
    for command in (("ls", run), ("scrub", run, "--dry-run"), ("verify", run / "2")):
        with trial("51", command[0]):
            assert missing in "".join(map(str, cli(*command, "--json"))).replace("\\/", "/")
    with trial("51", "gc"):
        assert said_json("gc", run, "--last", "1", "--dry-run")[1]["delete"] == []
    with trial("51", "report"):
        cli("report", run, "-o", ram_path / "report.html")
        assert "orbax" not in (ram_path / "report.html").read_text().lower()
    with trial("51", "heal"):
        assert said_json("heal", run, ram_path / "copy")[0] == 0
        assert jaxckpt.verify(run / "2").ok
    record.unlink()
    with trial("51", "a manager"), CheckpointManager(run) as manager:
        assert manager.restore()["step"] == 1
        assert any(names.is_set_aside(path.name) for path in run.iterdir())


# --- a run inside a step ---------------------------------------------------------------------


@pytest.mark.parametrize("below", ["x", "x/y", "state/x", "state/d/x"])
def test_a_run_inside_a_step(ram_path, trial, below):
    """It is refused when it is made; one that is there already stays, with the step around it."""
    run = saved(ram_path / "run", 1)
    with trial("52", f"a manager opens {below}"), pytest.raises(CheckpointError, match="inside"):
        CheckpointManager(run / "1" / below)
    with trial("52", f"save to {below}"), pytest.raises(CheckpointError, match="inside"):
        jaxckpt.save(run / "1" / below, state(9))
    inner = shutil.copytree(saved(ram_path / "other", 7), run / "1" / below)
    with trial("52", f"a policy deletes around {below}"):
        saved(run, 2, 3, keep=KeepPolicy(last=1))
        assert jaxckpt.restore(inner)["step"] == 7
        assert jaxckpt.restore(run)["step"] == 3
    with trial("52", f"rm around {below}"):
        assert cli("rm", run, "1", "--yes")[0] != 0
        assert jaxckpt.restore(inner)["step"] == 7
    with trial("52", f"gc around {below}"):
        cli("gc", run, "--last", "1", "--yes")
        assert jaxckpt.restore(inner)["step"] == 7
    with CheckpointManager(run) as manager, trial("52", f"delete around {below}"):
        with pytest.raises(ValueError, match="contains"):
            manager.delete(1)
        assert jaxckpt.restore(inner)["step"] == 7


# --- memory ----------------------------------------------------------------------------------


def test_restores_leave_no_memory_behind(ram_path, trial):
    """Checkpoints of one process and of two, each restored in thirty rounds."""
    command = [sys.executable, "-m", "tests.storage.test_values", str(ram_path), "30"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    with trial("49", "bytes a round"):
        assert float(done.stdout) < 100_000
