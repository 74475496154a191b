"""Collects the commands and handles their errors."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from collections.abc import Sequence

import click

from jaxckpt._version import __version__
from jaxckpt.cli import _check, _doctor, _keep, _look, _make, _migrate, _output
from jaxckpt.errors import CheckpointError, CorruptCheckpoint

_NAME = "jaxckpt"
_PIPE_CLOSED = 128 + 13  # SIGPIPE: the reader has exited, as `head` does
_STOPPED = 128 + 2  # SIGINT


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 success; 1 damage or a difference; 2 usage error, failure or declined.",
)
@click.version_option(__version__, prog_name=_NAME)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def app(context: click.Context, debug: bool) -> None:
    """Inspect, check, convert and clean up checkpoints of JAX programs, jaxckpt's and Orbax's."""
    context.obj = debug


for _command in (
    *(_look.ls, _look.show, _look.du, _look.report),
    *(_check.verify, _check.diff, _check.scrub, _doctor.doctor),
    *(_make.convert, _make.export, _make.import_, _make.fork, _make.upload, _make.heal),
    *(_keep.pin, _keep.unpin, _keep.rm, _keep.gc, _migrate.migrate),
):
    app.add_command(_command)
app.add_command(_make.convert, "cp")


class _Warning(logging.Formatter):
    """Escapes warnings, which may contain file names made by others."""

    def format(self, record: logging.LogRecord) -> str:
        return _output.harmless(f"warning: {super().format(record)}")


# The library's errors name arguments.
_OPTIONS = {
    "set overwrite": "pass --overwrite",
    "fork(..., step=0)": "--step 0",
    "(skip)": "(--skip)",
}


def _text(error: Exception) -> str:
    """Returns the message of an error in the words of a command."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        hint = ". `ls -ld` shows who may" if isinstance(error, PermissionError) else ""
        return f"{error.filename}: {error.strerror}{hint}"
    text = str(error) or type(error).__name__
    for argument, option in _OPTIONS.items():
        text = text.replace(argument, option)
    if isinstance(error, CorruptCheckpoint):
        text += "\n`jaxckpt verify` lists all damage to a checkpoint, `jaxckpt ls` a run's steps."
    return text


def run(argv: Sequence[str]) -> int:
    """Runs one command, prints its error if it fails, and returns the exit code."""
    debug = "--debug" in argv[:1]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Warning())
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("jaxckpt")
    logger.addHandler(handler)
    try:
        # 0 or 1 from a command; None, or click's code, from `--help`.
        code = app.main(list(argv), prog_name=_NAME, standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return 2
    except _output.Declined:
        _output.note("Nothing was done.")
        return 2
    except SystemExit as end:  # from click, after shell completion or a closed pipe
        return 0 if end.code in (None, 0) else _PIPE_CLOSED
    except click.Abort:
        _output.note("Interrupted.")
        return _STOPPED
    except (CheckpointError, OSError, ValueError, TypeError, ImportError) as error:
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            # Flushing the buffer at exit must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _PIPE_CLOSED
        if debug:
            traceback.print_exc()
        else:
            _output.error(_text(error))
        return 2
    except Exception:  # a bug in this program; 1 would mean a damaged checkpoint
        traceback.print_exc()
        return 2
    finally:
        logger.removeHandler(handler)
    return code if isinstance(code, int) else 0
