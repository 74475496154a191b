"""Runs `jaxckpt` commands in this process, in a separate process, or on a terminal."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pty
import subprocess
import sys

import pytest

from jaxckpt.cli import main

# A program that waits for an answer would else hang the test, too.
TIMEOUT_S = 60


def cli(*argv):
    """Runs a command here; returns its exit code and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(arg) for arg in argv])
    return code, out.getvalue(), err.getvalue()


def said_json(*argv):
    """The facts that a command prints, which must be JSON without NaN."""
    code, out, err = cli(*argv, "--json")
    assert err == ""
    return code, json.loads(out, parse_constant=lambda _: pytest.fail("NaN is no JSON"))


def process(*argv, **env):
    """Runs a command as users do."""
    return subprocess.run(
        [sys.executable, "-m", "jaxckpt", *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **env},
    )


def on_terminal(*argv, answer="", **env):
    """Runs a command on a terminal of 100 columns; its exit code and what is seen there."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "jaxckpt", *map(str, argv)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "COLUMNS": "100", "TERM": "xterm", **env},
    ) as program:
        os.close(theirs)
        os.write(ours, answer.encode())
        seen = b""
        try:
            while block := os.read(ours, 1 << 16):
                seen += block
        except OSError as error:
            if error.errno != errno.EIO:  # so a terminal ends
                raise
        os.close(ours)
        return program.wait(TIMEOUT_S), seen.decode()
