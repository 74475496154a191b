"""Tries an installed jaxckpt; `make dist` runs it in an environment that has nothing else."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import jaxckpt

COMMAND = f"{sys.prefix}/bin/jaxckpt"


def run_commands(run: str) -> None:
    """Runs quick commands; without click, checks the error that says what to install."""
    if importlib.util.find_spec("click") is None:
        done = subprocess.run([COMMAND, "ls", run], capture_output=True, text=True, check=False)
        assert done.returncode == 2, done
        assert "pip install" in done.stderr, done
        return
    for words in (["--version"], ["ls", run], ["show", run], ["verify", run]):
        subprocess.run([COMMAND, *words], check=True)


assert Path(jaxckpt.__file__).is_relative_to(sys.prefix), f"{jaxckpt.__file__} is not installed"
for name in jaxckpt.__all__:
    getattr(jaxckpt, name)  # each is imported when it is used
assert (Path(jaxckpt.__file__).parent / "py.typed").exists()
with tempfile.TemporaryDirectory() as folder:
    state = {"params": {"w": jnp.arange(8.0)}, "step": 1}
    with jaxckpt.CheckpointManager(f"{folder}/run") as manager:
        manager.save(1, state, metrics={"loss": 0.5})
    restored = jaxckpt.restore(f"{folder}/run", state)
    assert restored["step"] == 1
    assert np.array_equal(restored["params"]["w"], state["params"]["w"])
    run_commands(f"{folder}/run")
print(f"jaxckpt {jaxckpt.__version__} saves and restores in {sys.prefix}")
