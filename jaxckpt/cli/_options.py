"""Options shared by several commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from jaxckpt._core.text import seconds_of, size_of

F = TypeVar("F", bound=Callable[..., Any])

PATH: Final = click.Path(path_type=str)


class _Quantity(click.ParamType):
    """A number with a unit, as texts in configs are written."""

    def __init__(self, name: str, parse: Callable[[str], float]) -> None:
        self.name = name
        self._parse = parse

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)


SIZE: Final = _Quantity("size", size_of)
AGE: Final = _Quantity("age", seconds_of)

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
yes = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
dry_run = click.option("--dry-run", "-n", is_flag=True, help="Only show what would be done.")
item = click.option("--item", metavar="NAME", help="The item, if there are several trees.")
dtype = click.option("--dtype", metavar="DTYPE", help="Cast floating-point arrays: bfloat16, ...")
overwrite = click.option("--overwrite", is_flag=True, help="Replace an existing destination.")


def selection(command: F) -> F:
    """Adds `--only` and `--skip`."""
    command = click.option(
        "--skip", multiple=True, metavar="GLOB", help="Leave out these leaf paths. Repeatable."
    )(command)
    return click.option(
        "--only", multiple=True, metavar="GLOB", help="Only these leaf paths. Repeatable."
    )(command)


def chosen(only: tuple[str, ...], skip: tuple[str, ...]) -> dict[str, list[str] | None]:
    """Returns the Python arguments for `only` and `skip`; None if not given."""
    return {"only": list(only) or None, "skip": list(skip) or None}
