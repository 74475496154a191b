"""The short programs in `examples/` assert that they resume with the same bits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxckpt.testing import check_exact_resume
from tests.static_server import served

ROOT = Path(__file__).resolve().parents[2]
# Examples whose loop yields its steps, and what each needs.
GENERATORS = [
    ("flax_linen", "flax"),
    ("flax_nnx", "flax"),
    ("equinox_model", "equinox"),
    ("grain_loader", "grain"),
]


@pytest.mark.parametrize(("name", "needs"), [*GENERATORS, ("lora", "optax")])
def test_an_example_goes_on_with_the_same_bits(ram_path, name, needs):
    """It trains at once and in two parts, in a process of its own, and compares."""
    pytest.importorskip(needs)
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "TMPDIR": str(ram_path),
    }

    done = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    losses = dict(re.findall(r"(\w+: steps \d+ to \d+), loss (.+)", done.stdout))
    assert losses["whole: steps 1 to 40"] == losses["parts: steps 21 to 40"], done.stdout
    assert losses["parts: steps 1 to 20"] != losses["parts: steps 21 to 40"], done.stdout
    assert not list(ram_path.iterdir())


def test_a_spot_instance_goes_on_from_the_disk_of_another(ram_path):
    """One is killed without notice before a step is in the bucket; its disk is served."""

    def start(host, *more):
        command = [sys.executable, ROOT / "examples" / "spot.py", "--run", ram_path / "run"]
        command += ["--local", ram_path / host, *more]
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        return subprocess.Popen([*map(str, command)], env=env, stdout=subprocess.PIPE, text=True)

    with start("first", "--peer", "http://127.0.0.1:9") as one:
        losses = {}
        for line in one.stdout or ():
            step, _, loss = line.partition(": ")
            losses[step] = loss
            if step == "step 45":
                one.kill()
                break

    steps = [int(path.name) for path in (ram_path / "first").iterdir() if path.name.isdecimal()]
    newest = max(steps)
    with (
        served(ram_path / "first") as url,
        start("second", "--peer", url, "--steps", "46") as two,
    ):
        again = dict(line.split(": ") for line in two.stdout or ())

    assert two.returncode == 0
    assert newest >= 20
    assert [*again] == [f"step {n}" for n in range(newest + 1, 47)]
    assert again["step 45"] == losses["step 45"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "needs"), GENERATORS)
def test_an_example_that_is_killed_resumes_exactly(ram_path, monkeypatch, name, needs):
    """SIGKILL after step 25 at the earliest; every later loss and state is the same."""
    pytest.importorskip(needs)
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)

    at = check_exact_resume(f"{name}:train", ram_path, steps=40, kill_at=25)

    assert at in (10, 20, 30)
