"""`doctor`: try out a place for checkpoints. Exit code 1 means that something failed."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Final

import click

from jaxckpt._core.text import counted, size_text
from jaxckpt.cli import _options, _output
from jaxckpt.cli._output import Cell, Styled
from jaxckpt.errors import StoreError, UnsupportedFormat
from jaxckpt.storage import locate
from jaxckpt.storage._settings import SCHEMES

if TYPE_CHECKING:
    from jaxckpt.cli._checks import Finding, Location

_STYLES: Final = {"ok": "green", "failed": "bold red", "skipped": ""}


@click.command()
@click.argument("path", type=_options.PATH)
@_options.as_json
def doctor(path: str, as_json: bool) -> int:
    """Try out a bucket or directory for checkpoints.

    Says what to do about each failure. PATH is the root of a run, or where one is to be. The checks
    write up to 64 MiB below a temporary name there and delete it.
    """
    if sys.stderr.isatty():
        _output.note(f"trying out {path}: this takes a few seconds, or longer if it is slow")
    found = _examine(path)
    failed = [finding for finding in found if finding.state == "failed"]
    if as_json:
        _output.print_json({"path": path, "ok": not failed, "checks": found})
        return 1 if failed else 0
    head = ("check", "state", "figure", "what to do")
    _output.print_table(head, [_row(finding) for finding in found], fold="what to do")
    for finding in found:
        if finding.error:
            _output.echo(f"{finding.name}: {finding.error}")
    summary = Styled(f"{len(failed)} failed", "red") if failed else Styled("all is well", "green")
    _output.echo(f"{path}: {counted(len(found), 'check')}, ", summary)
    return 1 if failed else 0


def _examine(path: str) -> list[Finding]:
    from jaxckpt.cli._checks import Finding, try_out

    scheme = path.partition("://")[0].lower() if "://" in path else ""
    if scheme in SCHEMES and importlib.util.find_spec("obstore") is None:
        advice = "install the package obstore: pip install obstore"
        return [Finding(name="obstore", state="failed", advice=advice)]
    try:
        location = _location(path, scheme)
    except StoreError as error:
        if scheme not in SCHEMES:  # a file system that hangs
            raise
        advice = "correct StoreSettings, or the environment"
        return [Finding(name="credentials", state="failed", advice=advice, error=str(error))]
    return try_out(location)


def _location(path: str, scheme: str) -> Location:
    if scheme in SCHEMES:
        from jaxckpt.cli._bucket_checks import BucketLocation

        return BucketLocation(scheme, path)
    from jaxckpt.cli._folder_checks import FolderLocation

    storage, where = locate(path)
    if storage.scheme != "file":
        raise UnsupportedFormat(f"{path} is in the memory of one program: nothing to try out")
    return FolderLocation(storage, where)


def _row(finding: Finding) -> list[Cell]:
    state = Styled(finding.state, _STYLES.get(finding.state, "yellow"))
    return [finding.name, state, _figure(finding), finding.advice]


def _figure(finding: Finding) -> str:
    value = finding.value
    if value is None:
        return finding.text
    if finding.unit == "s":
        return f"{1000 * value:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"
    return size_text(value) + finding.unit.removeprefix("B")
