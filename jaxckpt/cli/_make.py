"""`convert`, `export`, `import` and `fork`: make new checkpoints from old ones."""

from __future__ import annotations

import os

import click

from jaxckpt.cli import _options, _output

_INDEX = ".index.json"


@click.command(cls=_options.OnSteps)
@click.argument("src", type=_options.PATH)
@click.argument("dst", type=_options.PATH)
@_options.item
@_options.selection
@_options.dtype
@click.option("--compression", help="zstd, or zstd:3 for level 3; by default none.")
@click.option("--ocdbt/--no-ocdbt", default=True, help="One database (default), or plain files.")
@_options.overwrite
@_options.yes
@_options.as_json
def convert(
    src: str,
    dst: str,
    item: str | None,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    dtype: str | None,
    compression: str | None,
    ocdbt: bool,
    overwrite: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Copy a checkpoint, or a part of it, in another dtype if wanted. Also called `cp`.

    SRC is a checkpoint of jaxckpt, Orbax or Flax. Orbax can read the copy too.
    """
    from jaxckpt._convert.convert import convert as convert_checkpoint

    _confirm_overwrite(dst, overwrite=overwrite, yes=yes)
    convert_checkpoint(
        src,
        dst,
        item=item,
        dtype=dtype,
        compression=compression,
        ocdbt=ocdbt,
        overwrite=overwrite,
        **_options.chosen(only, skip),
    )
    _wrote(dst, as_json=as_json)


@click.command(cls=_options.OnSteps)
@click.argument("src", type=_options.PATH)
@click.argument("path", type=_options.PATH)
@_options.item
@_options.selection
@_options.dtype
@click.option(
    "--max-shard",
    type=_options.SIZE,
    help="Split into files of at most SIZE, such as 5GB.",
)
@_options.overwrite
@_options.yes
@_options.as_json
def export(
    src: str,
    path: str,
    item: str | None,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    dtype: str | None,
    max_shard: int | None,
    overwrite: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Write the arrays of a checkpoint to safetensors.

    PATH is a `.safetensors` file. With --max-shard there may be several files and an index, as on
    Hugging Face.
    """
    from jaxckpt._convert.safetensors import export_safetensors

    _confirm_overwrite(path, f"{path}{_INDEX}", overwrite=overwrite, yes=yes)
    file = export_safetensors(
        src,
        path,
        item=item,
        dtype=dtype,
        max_shard_bytes=max_shard,
        overwrite=overwrite,
        **_options.chosen(only, skip),
    )
    _wrote(file, as_json=as_json)


@click.command("import")
@click.argument("path", type=_options.PATH)
@click.argument("dst", type=_options.PATH)
@_options.dtype
@_options.overwrite
@_options.yes
@_options.as_json
def import_(
    path: str, dst: str, dtype: str | None, overwrite: bool, yes: bool, as_json: bool
) -> None:
    """Make a checkpoint from safetensors.

    PATH is a `.safetensors` file, or a `.safetensors.index.json` with its shards beside it.
    """
    from jaxckpt._convert.safetensors import import_safetensors

    _confirm_overwrite(dst, overwrite=overwrite, yes=yes)
    import_safetensors(path, dst, dtype=dtype, overwrite=overwrite)
    _wrote(dst, as_json=as_json)


@click.command(cls=_options.OnSteps)
@click.argument("src", type=_options.PATH)
@click.argument("root", type=_options.PATH)
@click.option("--step", type=click.IntRange(min=0), help="The new step (default: unchanged).")
@_options.as_json
def fork(src: str, root: str, step: int | None, as_json: bool) -> None:
    """Start a run at ROOT from a step of another run.

    SRC is a step, or a run's root, which means its newest complete step. No data is copied.
    """
    from jaxckpt._run.fork import fork as fork_step

    _wrote(fork_step(src, root, step=step), as_json=as_json)


def _confirm_overwrite(*paths: str, overwrite: bool, yes: bool) -> None:
    there = [path for path in paths if os.path.lexists(os.path.expanduser(path))]
    if overwrite and there:
        _output.confirm(f"Replace {there[0]}?", yes=yes)


def _wrote(path: str, *, as_json: bool) -> None:
    where = os.path.abspath(os.path.expanduser(path))
    if as_json:
        _output.print_json({"path": where})
    else:
        _output.echo(f"wrote {where}")
