"""The command line, `jaxckpt`: see a run and its checkpoints, check, convert and clear them up.

    _look    ls, show, du, report      what there is; changes nothing
    _check   verify, diff, scrub       whether it is right
    _make    convert, export, ...      new checkpoints out of old ones
    _keep    pin, unpin, rm, gc        what stays, and what goes
    _output  tables, JSON, questions, errors

Exit codes: 0 good; 1 damage or a difference was found; 2 wrong usage, an error, or a question that
was not answered with yes. Each command imports what it needs when it runs, so that the quick ones
start quickly; none needs an accelerator.
"""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: What follows the program's name; None: as it was called.

    Returns:
        The exit code.

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
            f"error: the command line needs {' and '.join(missing)}: pip install 'jaxckpt[cli]'",
            file=sys.stderr,
        )
        return 2
    if argv is None:
        # An accelerator may belong to a job on this machine. Nothing here needs one.
        os.environ["JAX_PLATFORMS"] = "cpu"
        for stream in (sys.stdout, sys.stderr):
            # A terminal may have no sign for a name, or for a line of a tree.
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
    from jaxckpt.cli._app import run

    return run(sys.argv[1:] if argv is None else list(argv))
