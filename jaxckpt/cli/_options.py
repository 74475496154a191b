"""The options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

PATH: Final = click.Path(path_type=str)

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
yes = click.option("--yes", "-y", is_flag=True, help="Do it without asking.")
dry_run = click.option("--dry-run", "-n", is_flag=True, help="Only say what would be done.")
item = click.option("--item", metavar="NAME", help="Which item, if there are several trees.")
dtype = click.option("--dtype", metavar="DTYPE", help="Cast floating-point arrays: bfloat16, ...")
overwrite = click.option("--overwrite", is_flag=True, help="Replace what is there.")


def selection(command: F) -> F:
    """`--only` and `--skip`."""
    command = click.option(
        "--skip", multiple=True, metavar="GLOB", help="Leave these leaf paths out. Repeatable."
    )(command)
    return click.option(
        "--only", multiple=True, metavar="GLOB", help="Only these leaf paths. Repeatable."
    )(command)


def chosen(only: tuple[str, ...], skip: tuple[str, ...]) -> dict[str, list[str] | None]:
    """The arguments that `only` and `skip` are in Python: None where the option is not given."""
    return {"only": list(only) or None, "skip": list(skip) or None}
