"""A process that has imported everything and forks a child for each trial, which may be killed.

Importing JAX takes a second, a forked child 20 ms. The zygote starts with the shim preloaded and
makes neither arrays nor threads, which a fork would not survive. Run as a script it reads one
command per line, as JSON: a function, as "module:name", and its arguments. The child answers with
its own lines of JSON, and the zygote with {"pid": ...} before and {"status": ...} after them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

SHIM = Path(__file__).with_name("crashshim.c")
_KINDS = ("never", "kill", "tear", "fail_once", "fail_from", "stop")


# --- the child's side ------------------------------------------------------------------------


def say(**answer):
    os.write(1, json.dumps(answer).encode() + b"\n")


def arm(root, fault=None, *, log=None, data=None):
    """From here on counts the changes below `root`.

    Args:
        fault: What happens when, as `[kind, n]` or `[kind, n, errno, reads]`: at the n-th change,
            the first being 1, "kill" kills the process and "tear" does so in the middle of the
            n-th write; "fail_once" has it fail with that errno, "fail_from" it and all after it;
            "stop" stops the process before it, until SIGCONT.
            With `reads` true what reads counts too, not only what changes.
        log, data: Files that the changes, and the bytes of writes, are added to.
    """
    library = ctypes.CDLL(None)
    library.shim_arm(*(None if path is None else os.fsencode(path) for path in (root, log, data)))
    kind, n, number, reads = [*(fault or ["never", 0]), 0, False][:4]
    library.shim_fault(_KINDS.index(kind), ctypes.c_long(n), number, int(reads))


def disarm():
    arm("")


def events():
    """How many there were since `arm`."""
    return ctypes.CDLL(None).shim_events()


def leave_room(size):
    """From now on allows so many bytes below the armed root, plus the bytes that are freed."""
    ctypes.CDLL(None).shim_room(ctypes.c_longlong(size))


def mark(text):
    """Puts a mark into the log."""
    ctypes.CDLL(None).shim_mark(text.encode())


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
        self._child = 0  # the process id of the child that has not ended, as far as was read
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.zygote"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={
                    **os.environ,
                    "LD_PRELOAD": str(shim),
                    "PYTHONPATH": str(checkout),
                    # The children compile the same functions, which takes half of their time.
                    "JAX_COMPILATION_CACHE_DIR": str(Path(directory, "compiled")),
                    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
                },
                cwd=checkout,
                text=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()

    def start(self, function, *args, **kwargs):
        """Starts a child that calls a function of some module; returns its process id."""
        if self._child:  # of a test that failed
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
            while self._child:
                self.answer()
        name = f"{function.__module__}:{function.__name__}"
        self._process.stdin.write(json.dumps([name, args, kwargs], default=os.fspath) + "\n")
        self._process.stdin.flush()
        return self.answer()["pid"]

    def answer(self):
        line = self._process.stdout.readline()
        assert line, self.errors()
        word = json.loads(line)
        self._child = word.get("pid", self._child) if "status" not in word else 0
        return word

    def errors(self):
        """Returns the output to stderr of the zygote and its children so far."""
        return self._errors.read_text()

    def answers(self):
        """All that a child says until it ends, and how it ended."""
        said = []
        while "status" not in (last := self.answer()):
            said.append(last)
        assert last["status"] in (0, -9), f"{last}\n{self.errors()}"
        return said, last["status"]

    def run(self, function, *args, **kwargs):
        """Runs a child to its end; returns its last words, or None if it was killed."""
        self.start(function, *args, **kwargs)
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
    gc.freeze()  # no child looks through, and so copies, what has been imported
    for line in sys.stdin:
        name, args, kwargs = json.loads(line)
        module, _, function = name.partition(":")
        call = getattr(importlib.import_module(module), function)
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                try:
                    say(pid=os.getpid())
                    call(*args, **kwargs)
                    status = 0
                except BaseException:
                    traceback.print_exc()
            sys.stderr.flush()
            os._exit(status)
        _, ended = os.waitpid(child, 0)
        say(status=os.waitstatus_to_exitcode(ended))


if __name__ == "__main__":
    _main()
