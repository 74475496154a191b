"""`migrate`: from Orbax to the drop-in. Exit code 1 means that a file has to be changed by hand."""

from __future__ import annotations

import collections
import importlib
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Final

import click

from jaxckpt._core.text import counted
from jaxckpt.cli import _options, _output
from jaxckpt.cli._migrate.source import DROP_IN, Program, Use, parse
from jaxckpt.cli._output import Styled

_ENDINGS: Final = (".py", ".pyi")
_NOT_OURS: Final = ("__pycache__", "node_modules", "site-packages")
_ENVIRONMENT: Final = "pyvenv.cfg"
_STYLES: Final = {"yes": "green", "no": "bold red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Name:
    """A use of Orbax: `carried` is None for a place that stays as it is; `why` explains it."""

    line: int
    name: str
    carried: bool | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file that uses Orbax, or that cannot be read.

    Attributes:
        within: The given path in which it is.
        state: "unchanged", "to change", "changed", "by hand" or "error".
        why: Why it is to be changed by hand, or the error.
        stays: Whether it goes on using Orbax, or may, so that the others should too.
        changes: Line, old and new statement of each import.
    """

    path: str
    within: str
    state: str
    why: Sequence[str] = ()
    names: Sequence[_Name] = ()
    changes: Sequence[tuple[int, str, str]] = ()
    stays: bool = False


@click.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=_options.PATH)
@click.option("--write", is_flag=True, help="Change the imports; without it, only show them.")
@click.option("--anyway", is_flag=True, help="Also where a name is lacking from the drop-in.")
@click.option("--partly", is_flag=True, help="Also if other files of PATH keep Orbax.")
@_options.as_json
def migrate(paths: tuple[str, ...], write: bool, anyway: bool, partly: bool, as_json: bool) -> int:
    """Show what programs use of Orbax; --write changes their imports.

    PATH is a Python file, or a directory whose Python files are read. None of them is run. If one
    of them has to be changed by hand, such as for a name lacking from `jaxckpt.orbax`, none below
    that PATH is changed: the objects of the two libraries do not mix.
    """
    for path in paths:
        os.stat(path)
    found = [_read_file(path, within, anyway=anyway) for path, within in _files(paths)]
    waiting = {file.within for file in found if file.stays and not partly}
    if write:
        found = [f if f.within in waiting else _changed(f, anyway=anyway) for f in found]
    files = [file for file in found if file.names or file.why or file.changes]
    if as_json:
        facts = {"write": write, "read": len(found), "files": [_facts(file) for file in files]}
        _output.print_json(facts)
    else:
        _print(files, len(found), sorted(waiting) if write else ())
    states = {file.state for file in files}
    is_lacking = any(name.carried is False for file in files for name in file.names)
    return 2 if "error" in states else 1 if is_lacking or "by hand" in states else 0


# --- files --------------------------------------------------------------------------------------


def _files(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the path of each file once, and the given path in which it is."""
    seen = set()
    for within in paths:
        for path in _files_in(within) if os.path.isdir(within) else (within,):
            if (real := os.path.realpath(path)) not in seen:
                seen.add(real)
                yield path, within


def _files_in(root: str) -> Iterator[str]:
    """Yields the Python files below a directory, without installed packages."""
    for folder, folders, files in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in sorted(folders) if _is_program(os.path.join(folder, name))]
        for name in sorted(files, key=lambda name: os.path.islink(os.path.join(folder, name))):
            if name.endswith(_ENDINGS):
                yield os.path.join(folder, name)


def _refuse(error: OSError) -> None:
    raise error  # a directory that cannot be listed may have what must be changed by hand


def _is_program(folder: str) -> bool:
    name = os.path.basename(folder)
    is_hidden = name.startswith(".") or name in _NOT_OURS
    return not is_hidden and not os.path.exists(os.path.join(folder, _ENVIRONMENT))


def _read_file(path: str, within: str, *, anyway: bool) -> _File:
    """Reads a file; returns its uses of Orbax and the changes."""
    data = b"orbax"  # assumed until the file is read
    try:
        data = _read(path)
        source = parse(data)
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        why = f"not Python: {where}{error.msg}"
    except LookupError as error:  # a codec that is not of text, such as rot13
        why = f"its encoding is unknown: {error}"
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        why = getattr(error, "strerror", "") or str(error)
    else:
        return _examined(path, within, source, anyway=anyway)
    return _File(path=path, within=within, state="error", why=[why], stays=b"orbax" in data)


def _changed(file: _File, *, anyway: bool) -> _File:
    """Rewrites a file if its state is "to change"."""
    if file.state != "to change":
        return file
    if _read_file(file.path, file.within, anyway=anyway) != file:
        return replace(file, state="error", why=["not changed: it was written meanwhile"])
    try:
        _put(file.path, parse(_read(file.path)).rewritten())
    except OSError as error:
        return replace(file, state="error", why=[f"not changed: {error.strerror}"])
    return replace(file, state="changed")


def _read(path: str) -> bytes:
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("not a regular file")
    if path.endswith(".ipynb"):
        raise ValueError("a notebook, not Python: change its import by hand")
    with open(path, "rb") as file:
        return file.read()


def _examined(path: str, within: str, source: Program, *, anyway: bool) -> _File:
    """Returns the uses of Orbax in a file, and whether its imports can be changed."""
    names = [_asked(use) for use in source.uses]
    why = [f"line {change.line} {change.problem}" for change in source.changes if change.problem]
    lacking = sorted({name.name for name in names if name.carried is False})
    if lacking and source.changes and not anyway:
        why.append(f"{DROP_IN} lacks {', '.join(lacking)}")
    why += [_path_problem(path, within)] if source.changes else []
    why = list(filter(None, why))
    state = "by hand" if why else "to change" if source.changes else "unchanged"
    return _File(
        path=path,
        within=within,
        state=state,
        why=why,
        names=names,
        changes=[(c.line, c.old, c.new) for c in source.changes if not c.problem],
        stays=state == "by hand",
    )


def _path_problem(path: str, within: str) -> str:
    """Returns why a file is not to be written to; "" if it is."""
    real = os.path.realpath(path)
    is_inside = os.path.commonpath([real, os.path.realpath(within)]) == os.path.realpath(within)
    if os.path.islink(path) and (path == within or not is_inside):
        return f"a symbolic link to {real}: name that file to change it"
    if not os.stat(path).st_mode & 0o222 or not os.access(path, os.W_OK):
        return "the file is not writable"
    return ""


def _put(path: str, data: bytes) -> None:
    """Replaces a file by one with the same owner and mode; a crash leaves the old or the new."""
    real = os.path.realpath(path)
    was = os.stat(real)
    number, temporary = tempfile.mkstemp(prefix=".migrate-", dir=os.path.dirname(real))
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
            os.fchmod(number, stat.S_IMODE(was.st_mode))
            if (was.st_uid, was.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(number, was.st_uid, was.st_gid)
            file.flush()
            os.fsync(number)
        os.replace(temporary, real)
    except BaseException:
        os.unlink(temporary)
        raise


# --- names --------------------------------------------------------------------------------------


def _asked(use: Use) -> _Name:
    why = use.stays or _lack(use.name)
    carried = None if use.stays else why is None
    name = use.name.removeprefix(f"{DROP_IN}.")
    return _Name(line=use.line, name=name, carried=carried, why=why or "")


def _lack(name: str) -> str | None:
    """Asks the drop-in for a name, such as "jaxckpt.orbax.args.JsonSave".

    Returns:
        None if the drop-in has it; else the reason given by the drop-in, which may be empty.
    """
    value: object = importlib.import_module(DROP_IN)
    for part in name.removeprefix(DROP_IN).split(".")[1:]:
        if not isinstance(value, ModuleType):
            break
        try:
            value = _part(value, part)
        except NotImplementedError as error:
            return str(error)
        except (AttributeError, ImportError):
            return ""
    return None


def _part(module: ModuleType, name: str) -> object:
    try:
        return getattr(module, name)
    except AttributeError:
        # The name is of a file that nobody has checked: only our own modules are imported.
        if not f"{module.__name__}.".startswith(f"{DROP_IN}."):
            raise
        return importlib.import_module(f"{module.__name__}.{name}")


# --- output -------------------------------------------------------------------------------------


def _facts(file: _File) -> dict[str, object]:
    changes = [{"line": line, "old": old, "new": new} for line, old, new in file.changes]
    facts = {"path": file.path, "state": file.state, "why": file.why}
    return {**facts, "names": file.names, "changes": changes}


def _print(files: Sequence[_File], read: int, waiting: Sequence[str]) -> None:
    rows = [
        [f"{file.path}:{name.line}", name.name, _carried(name), name.why]
        for file in files
        for name in file.names
    ]
    if rows:
        _output.print_table(("place", "name", "drop-in", "why"), rows, fold="why")
    for file in files:
        for line, old, new in file.changes if not file.why else ():
            _output.echo(f"{file.path}:{line}: {_first_line(old)}  ->  {_first_line(new)}")
    for file in files:
        for why in file.why:
            _output.echo(f"{file.path}: ", Styled(f"{file.state}: ", "red"), why)
    _output.echo(f"{counted(read, 'file')} read, {_states(files)}")
    if waiting:
        _output.echo(
            f"Nothing below {', '.join(waiting)} was changed. Change the files marked above "
            "by hand and run this again, or pass --partly to change the others now."
        )


def _carried(name: _Name) -> Styled:
    text = "stays" if name.carried is None else "yes" if name.carried else "no"
    return Styled(text, _STYLES.get(text, ""))


def _first_line(statement: str) -> str:
    return statement.splitlines()[0]


def _states(files: Sequence[_File]) -> str:
    """Counts the files of each state, and names the option that changes them."""
    counts = collections.Counter(file.state for file in files)
    texts = [f"{count} {state}" for state, count in sorted(counts.items())]
    text = ", ".join(texts) or "none uses Orbax"
    return f"{text}: pass --write to change imports" if counts["to change"] else text
