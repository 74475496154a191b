"""A process that has imported everything and forks a child for each trial, which may be killed.

Importing JAX takes a second, a forked child 20 ms. The zygote starts with the shim preloaded and
makes neither arrays nor threads, which a fork would not survive. Run as a script it reads one
command a line, JSON: a function of this file and its arguments. The child answers with lines of
JSON of its own, and the zygote with {"pid": ...} before and {"status": ...} after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np

SHIM = Path(__file__).with_name("crashshim.c")


def tree(seed):
    """Small enough to be quick; one array is stored by TensorStore itself, one as a value."""
    rng = np.random.default_rng(seed)
    large = rng.standard_normal(70_000, np.float32)
    return {"large": large, "small": rng.integers(0, 9, 99), "text": f"seed {seed}", "seed": seed}


def found(path):
    """The seed of the tree at `path`; None if there is none. Fails if a bit is wrong."""
    import jaxckpt

    try:
        got = jaxckpt.restore(path)
    except jaxckpt.CheckpointNotFound:
        return None
    wanted = tree(got["seed"])
    assert got.keys() == wanted.keys()
    assert all(np.asarray(got[k]).tobytes() == np.asarray(wanted[k]).tobytes() for k in wanted)
    return got["seed"]


# --- what a child does -----------------------------------------------------------------------


def say(**answer):
    os.write(1, json.dumps(answer).encode() + b"\n")


def arm(root, kill_at=0, log=None):
    """From here on counts the changes below `root`, and dies before the one of that number."""
    library = ctypes.CDLL(None)
    encoded = None if log is None else os.fsencode(log)
    library.shim_arm(os.fsencode(root), ctypes.c_long(kill_at), encoded)


def save(path, seed, overwrite, kill_at, log):
    import jaxckpt

    value = tree(seed)
    arm(os.path.dirname(path), kill_at, log)
    jaxckpt.save(path, value, overwrite=overwrite)
    say(events=ctypes.CDLL(None).shim_events())
    arm("")


def check(path, seed, beside):
    """Says what is there, then saves: that must work by itself and clean up."""
    import jaxckpt

    there = found(path)
    jaxckpt.save(path, tree(seed), overwrite=True)
    assert found(path) == seed
    assert jaxckpt.verify(path).ok
    assert sorted(os.listdir(os.path.dirname(path))) == sorted([os.path.basename(path), *beside])
    say(found=there)


def overwrite_for_ever(path):
    """Says what is there, then replaces it with the next and says so, until it is killed."""
    import jaxckpt

    seed = found(path)
    say(found=seed)
    seed = -1 if seed is None else seed
    while True:
        seed += 1
        jaxckpt.save(path, tree(seed), overwrite=True)
        say(saved=seed)


def add_for_ever(root):
    """Says which are there, whole, and what else; then adds more and says so, until killed."""
    import jaxckpt
    from jaxckpt.format import names

    entries = os.listdir(root)
    steps = sorted(int(entry) for entry in entries if not names.is_temporary(entry))
    say(found=[found(f"{root}/{step}") for step in steps], steps=steps)
    step = len(steps)
    while True:
        jaxckpt.save(f"{root}/{step}", tree(step))
        say(saved=step)
        step += 1


def try_to_save(path, seed):
    """Says what it raised."""
    import jaxckpt

    try:
        jaxckpt.save(path, tree(seed))
    except jaxckpt.CheckpointError as error:
        say(raised=type(error).__name__)
    else:
        say(raised=None)


def save_below(root, relative, log):
    """Saves below a directory that is there; what is between is made."""
    import jaxckpt

    os.mkdir(root)
    arm(root, 0, log)
    jaxckpt.save(f"{root}/{relative}", tree(1))
    arm("")
    say(done=True)


def write_plainly(root, log):
    arm(root, 0, log)
    Path(root, "plain").write_bytes(b"1")
    Path(root, "plain").rename(Path(root, "moved"))
    with Path(root, "synced").open("wb") as file:
        file.write(b"1")
        file.flush()
        os.fsync(file.fileno())
    arm("")


def save_unsynced(path, log):
    """A control: what the same save leaves in the caches if directories are not synced."""
    from jaxckpt.storage import _local

    _local._sync_dir = lambda path: None
    save(path, 1, False, 0, log)


# --- the test's side -------------------------------------------------------------------------


class Zygote:
    """Use as a context manager; `run` runs a function of this file in a forked child."""

    def __init__(self, directory):
        self.shim = shim = Path(directory, "crashshim.so")
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", shim, SHIM, "-ldl"],
            check=True,
        )
        checkout = Path(__file__).resolve().parents[2]
        self._errors = Path(directory, "zygote.err")
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": str(checkout)},
                text=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()

    def start(self, function, *args):
        """Starts a child; returns its process id."""
        self._process.stdin.write(json.dumps([function, *args], default=os.fspath) + "\n")
        self._process.stdin.flush()
        return self.answer()["pid"]

    def answer(self):
        line = self._process.stdout.readline()
        assert line, self._errors.read_text()
        return json.loads(line)

    def answers(self):
        """All that a child says until it ends, and how it ended."""
        said = []
        while "status" not in (last := self.answer()):
            said.append(last)
        assert last["status"] in (0, -9), self._errors.read_text()
        return said, last["status"]

    def run(self, function, *args):
        """Runs a child to its end; returns its last words, or None if it was killed."""
        self.start(function, *args)
        said, status = self.answers()
        return said[-1] if status == 0 and said else None


def _main():
    import warnings

    import jax  # noqa: F401
    import tensorstore  # noqa: F401

    import jaxckpt
    from jaxckpt.storage import _arrays  # noqa: F401

    warnings.simplefilter("ignore")  # of JAX, about forks: none of its threads runs yet
    for name in jaxckpt.__all__:
        getattr(jaxckpt, name)
    for line in sys.stdin:
        function, *args = json.loads(line)
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                try:
                    say(pid=os.getpid())
                    globals()[function](*args)
                    status = 0
                except BaseException:
                    traceback.print_exc()
            sys.stderr.flush()
            os._exit(status)
        _, ended = os.waitpid(child, 0)
        say(status=os.waitstatus_to_exitcode(ended))


if __name__ == "__main__":
    _main()
