"""Options shared by several commands."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from jaxckpt._core.text import seconds_of, size_of

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def complete_steps(
    ctx: click.Context, param: click.Parameter | None, incomplete: str
) -> list[CompletionItem]:
    """Returns the steps of the run that was named before, for shell completion."""
    from click.shell_completion import CompletionItem

    from jaxckpt.cli._owned import run_at
    from jaxckpt.storage import locate

    arguments = [one for one in ctx.command.params if isinstance(one, click.Argument)]
    values = [ctx.params.get(one.name or "") for one in arguments]
    # Nothing is parsed if an option comes last that lacks its value.
    paths = [value for value in values if isinstance(value, str)] or ctx.args
    run = paths[0 if isinstance(param, click.Option) else -1] if paths else ""
    pair = isinstance(ctx.command, OnSteps) and ctx.command.pair
    try:
        for path in (run, posixpath.dirname(run))[: 1 + pair]:
            if steps := run_at(*locate(path)).index.listing().steps:
                return [CompletionItem(str(n)) for n in steps if str(n).startswith(incomplete)]
    except (OSError, ValueError):
        pass  # an error would be printed into the line being typed
    return []


class _Path(click.Path):
    """A path; where a step may follow the run, the steps complete it too."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        found = super().shell_complete(ctx, param, incomplete)
        takes_steps = isinstance(ctx.command, OnSteps) and isinstance(param, click.Argument)
        return [*found, *complete_steps(ctx, param, incomplete)] if takes_steps else found


PATH: Final = _Path(path_type=str)


class _Quantity(click.ParamType):
    """A number with a unit, as texts in configs are written."""

    def __init__(self, name: str, parse: Callable[[str], float]) -> None:
        self.name = name
        self._parse = parse

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            number = self._parse(value)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)
        if not number:
            self.fail("must be positive, got 0.", param, ctx)
        return number


SIZE: Final = _Quantity("size", size_of)
RATE: Final = _Quantity("size", lambda text: size_of(text.removesuffix("/s")))
AGE: Final = _Quantity("age", seconds_of)
STEP: Final = click.IntRange(min=0)
STEP.name = "number of a step"  # for errors


def _or_none(ctx: click.Context, param: click.Parameter, globs: tuple[str, ...]) -> Any:
    return list(globs) or None


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
yes = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
dry_run = click.option("--dry-run", "-n", is_flag=True, help="Only show what would be done.")
item = click.option("--item", metavar="NAME", help="The item, if there are several trees.")
dtype = click.option("--dtype", metavar="DTYPE", help="Cast floating-point arrays: bfloat16, ...")
overwrite = click.option("--overwrite", is_flag=True, help="Replace an existing destination.")
_globs = partial(click.option, multiple=True, metavar="GLOB", callback=_or_none)
only = _globs("--only", help="Only these leaf paths. Repeatable.")
skip = _globs("--skip", help="Leave out these leaf paths. Repeatable.")
local = click.option("--local", type=PATH, help="Also what is in this run's local directory.")


class OnSteps(click.Command):
    """A command that takes `RUN STEP` wherever it takes the path of a step.

    Args:
        pair: Whether a second step of the same run may follow.
        globs: Whether a number that is not a step may be a glob.
    """

    def __init__(self, *args: Any, pair: bool = False, globs: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pair, self._globs = pair, globs

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        joined: list[str] = []
        run, last = "", -1  # of the step before; the index of the latest path
        valued = {o for p in self.params if not getattr(p, "is_flag", True) for o in p.opts}
        for arg in args:
            is_path = not (arg.startswith("-") or (joined and joined[-1] in valued))
            if is_path and arg.isdecimal() and last >= 0:
                maybe = self._globs or ctx.resilient_parsing  # perhaps not meant as a step
                if (step := _step(joined[last], int(arg), maybe=maybe)) is not None:
                    run, arg = joined.pop(last), step
                elif self.pair and run:
                    run, arg = "", _step(run, int(arg), maybe=maybe) or arg
            last = len(joined) if is_path else last
            joined.append(arg)
        return super().parse_args(ctx, joined)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        steps = complete_steps(ctx, None, incomplete)
        return [*steps, *super().shell_complete(ctx, incomplete)]


def _step(root: str, number: int, *, maybe: bool) -> str | None:
    """Returns the path of a step; None if `root` is not a run.

    Args:
        maybe: Whether to return None for a step that is not there, too.

    Raises:
        CheckpointNotFound: the run lacks the step.
    """
    from jaxckpt.cli._owned import run_at
    from jaxckpt.storage import locate

    try:
        index = run_at(*locate(root)).index
        steps = index.listing().steps
    except (OSError, ValueError):
        return None
    if number not in steps and (maybe or not steps):
        return None
    return f"{root}/{posixpath.basename(index.check_step(number))}"
