"""Collects the commands and handles their errors."""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Final

import click

from jaxckpt._core.text import nearest
from jaxckpt._version import __version__
from jaxckpt.cli import _output
from jaxckpt.errors import CheckpointError, CorruptCheckpoint

_NAME = "jaxckpt"
_PIPE_CLOSED = 128 + 13  # SIGPIPE: the reader has exited, as `head` does
_STOPPED = 128 + 2  # SIGINT

# The commands by group, as in docs/cli.md, with the module of each.
_GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "Show what there is, without changing anything": {"_look": "ls show du report"},
    "Check checkpoints, and places for them": {"_check": "verify diff scrub", "_doctor": "doctor"},
    "Plan for a cluster": {"_plan.command": "plan"},
    "Copy checkpoints": {"_make": "convert cp export import fork upload"},
    "Mend, keep or delete steps": {"_make": "heal", "_keep": "pin unpin rm gc"},
    "Change programs from Orbax to jaxckpt.orbax": {"_migrate.command": "migrate"},
}
_HOMES: Final = {
    name: module
    for group in _GROUPS.values()
    for module, names in group.items()
    for name in names.split()
}
_FUNCTIONS: Final = {"cp": "convert", "import": "import_"}  # where that is not the name


class _Commands(click.Group):
    """The commands. Each is imported when it is used, so that all start quickly."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_HOMES]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _HOMES:
            return None
        module = importlib.import_module(f"jaxckpt.cli.{_HOMES[cmd_name]}")
        return getattr(module, _FUNCTIONS.get(cmd_name, cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _HOMES and not args[0].startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}. {nearest(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, _HOMES))  # so that the groups have the same columns
        for title, group in _GROUPS.items():
            names = " ".join(group.values()).split()
            with formatter.section(title):
                formatter.write_dl([(f"{n:<{widest}}", self._summary(ctx, n)) for n in names])

    def _summary(self, ctx: click.Context, name: str) -> str:
        command = self.get_command(ctx, name)
        if command is None or command.name != name:
            return f"Another name of {command and command.name}."
        return command.get_short_help_str(1000)  # a longer one wraps, and is not cut off


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 success; 1 damage or a difference; 2 usage error, failure or declined.",
)
@click.version_option(__version__, prog_name=_NAME)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def app(debug: bool) -> None:
    """Inspect, check, convert and clean up checkpoints of JAX programs, jaxckpt's and Orbax's."""


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
    try:
        return _run(argv)
    except OSError:  # nor can the error be printed; 1 would mean a damaged checkpoint
        return 2


def _run(argv: Sequence[str]) -> int:
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
        text = io.StringIO()  # it may quote names made by others
        error.show(text)
        _output.note(text.getvalue().rstrip())
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
