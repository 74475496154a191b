"""Without what only Linux has, as on macOS, everything works; Windows is refused in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

LIKE_MACOS = """
import builtins, ctypes, os, sys
import jax, jax.numpy as jnp, numpy as np

for name in ("sched_getaffinity", "posix_fadvise", "posix_fallocate", "POSIX_FADV_DONTNEED"):
    delattr(os, name)

class Libc(ctypes.CDLL):
    def __getattr__(self, name):
        if name == "renameat2":
            raise AttributeError(name)
        return super().__getattr__(name)

opened = builtins.open
def refuse(file, *args, **kwargs):
    if str(file).startswith("/proc/"):
        raise FileNotFoundError(2, "No such file or directory", file)
    return opened(file, *args, **kwargs)

ctypes.CDLL, builtins.open, sys.platform = Libc, refuse, "darwin"
import jaxckpt
from jaxckpt.cli import main
"""

PROGRAM = """
state = {"w": jnp.arange(300_000.0), "b": jnp.ones(3)}
jaxckpt.save("one", state)
jaxckpt.save("one", state, overwrite=True)
assert np.array_equal(jaxckpt.restore("one", state)["w"], state["w"])
with jaxckpt.CheckpointManager("run", keep=jaxckpt.KeepPolicy(last=2)) as manager:
    for step in (1, 2, 3, 4):
        manager.save(step, state)
    manager.wait_until_finished()
    assert manager.all_steps() == [3, 4] and manager.problems == []
    got, step = manager.restore_or(lambda: state)
    assert step == 4 and np.array_equal(got["w"], state["w"])
assert jaxckpt.verify("run").ok
jaxckpt.fork("run", "other")
assert main(["doctor", "."]) == 0
"""


def run(program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_macos(tmp_path):
    """Its calls are simulated, not its file systems: it is expected to work, and not tested."""
    done = run(LIKE_MACOS + PROGRAM, tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr


def test_windows_is_refused_in_one_line(tmp_path):
    """At the import, with what to use instead."""
    done = run("import sys; sys.platform = 'win32'; import jaxckpt", tmp_path)

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: jaxckpt does not run on Windows")
    assert "WSL" in done.stderr
