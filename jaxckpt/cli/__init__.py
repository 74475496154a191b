"""The command line, `jaxckpt`: inspect, check, convert and clean up runs and checkpoints.

    _look           ls, show, du, report      inspect; changes nothing
    _check          verify, diff, scrub       check
    _doctor         doctor                    try out a place for checkpoints
    _make           convert, export, ...      make checkpoints from other checkpoints
    _keep           pin, unpin, rm, gc        keep and delete steps
    _app            the parser, and how errors end
    _output         tables, JSON, questions, errors
    _options        options that several commands have
    _owned          a run that a command changes while no job does
    _between        two roots of a run, of which one is a copy
    _space          the sizes that `du` prints
    _checks         one check after the other
    _bucket_checks  those of buckets
    _folder_checks  those of local paths

The folder `_migrate` has `migrate`: from Orbax to the drop-in. The folder `_plan` has `plan`: what
saves and restores take on a cluster that is not there.

Exit codes: 0 success; 1 damage or a difference was found, or something is left to do by hand; 2
wrong usage, an error, or a question not answered with yes. Each command imports what it needs when
it runs, so quick commands start quickly; none needs an accelerator.
"""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code.

    Args:
        argv: The arguments after the program's name. If None, those of this process.

    Example:
        >>> import tempfile, jaxckpt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jaxckpt.save(f"{folder}/weights", {"w": 1.5})
        ...     main(["show", f"{folder}/weights"])
        /.../weights item 'state': 1 leaf, 8 B, written by jaxckpt ...
        leaf  type       bytes
        └─ w  float64[]    8 B
        0
    """
    missing = [name for name in ("click", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"error: the command line needs {' and '.join(missing)}: "
            f"pip install {' '.join(missing)}",
            file=sys.stderr,
        )
        return 2
    lost = 0
    if argv is None:
        # No command needs an accelerator, and a job may be using it.
        os.environ["JAX_PLATFORMS"] = "cpu"
        lost = 2 if sys.stdout is None else 0  # nothing can be printed
        _open_missing()
        for stream in (sys.stdout, sys.stderr):
            # The terminal's encoding may lack characters of names or tree lines.
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
    from jaxckpt.cli._app import run

    return run(list(argv)) if argv is not None else _emptied(run(sys.argv[1:])) or lost


def _open_missing() -> None:
    """Opens the standard streams that the shell closed (`>&-`) on nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # until the end


def _emptied(code: int) -> int:
    """Writes what is buffered, and returns the exit code: 2 if that is not possible."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # such as a full disk; at exit Python would try again, and end with 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            code = code or 2
    return code
