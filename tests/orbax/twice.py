"""Runs a program with Orbax and with the drop-in, and compares all that a user could see.

    def program(ocp, path):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path / "a", {"w": jnp.ones(3)})
        return raised(lambda: checkpointer.save(path / "a", {}))

    def read(ocp, path):
        return ocp.StandardCheckpointer().restore(path / "a")

    def test_it(tmp_path):
        twice(program, tmp_path, read=read)

A program is a function of the module and of a directory, in which it puts everything. Compared are
what it returns or raises, and what is on disk: the steps, their items and which of these are
trees. `read` is run four times: each library reads what each wrote.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np

APIS = {
    "v0": ("orbax.checkpoint", "jaxckpt.orbax"),
    "v1": ("orbax.checkpoint.experimental.v1", "jaxckpt.orbax.v1"),
}
Program = Callable[[Any, pathlib.Path], Any]

# Files that only one library writes, or under names of its own: the arrays, and our own.
_INTERNAL = re.compile(
    r"_jaxckpt\..*|_sharding|_strings\.json|array_metadatas|d|ocdbt\.process_.*|manifest\.ocdbt"
    r"|commit_success\.txt|orbax\.checkpoint"
)


def twice(program: Program, path: pathlib.Path, *, read: Program | None = None, api: str = "v0"):
    """Runs a program with both libraries and raises AssertionError for all differences.

    Returns:
        What the program returned with the drop-in.
    """
    return compare(program, path, *map(importlib.import_module, APIS[api]), read=read)


def compare(
    program: Program,
    path: pathlib.Path,
    theirs: ModuleType,
    ours: ModuleType,
    *,
    read: Program | None = None,
) -> Any:
    """Is `twice` for two modules."""
    roots = {name: path / name for name in ("theirs", "ours")}
    modules = {"theirs": theirs, "ours": ours}
    ended = {name: run(program, modules[name], root) for name, root in roots.items()}
    problems = list(differences(ended["theirs"], ended["ours"], roots))
    on_disk = {name: layout(root) for name, root in roots.items()}
    problems += [
        f"on disk, only {name}: {entry}"
        for name, other in (("theirs", "ours"), ("ours", "theirs"))
        for entry in sorted(on_disk[name] - on_disk[other])
    ]
    if read is not None:
        wanted = run(read, theirs, roots["theirs"])
        for reader, writer in (("ours", "ours"), ("ours", "theirs"), ("theirs", "ours")):
            got = run(read, modules[reader], roots[writer])
            where = f"{reader} reads {writer}"
            problems += [f"{where}: {line}" for line in differences(wanted, got, roots)]
    assert not problems, "\n".join(problems)
    if ended["ours"].error is not None:
        raise ended["ours"].error
    return ended["ours"].result


def read_each(program: Program, read: Program, path: pathlib.Path) -> None:
    """Runs a program with both libraries, and compares only what each reads of what each wrote."""
    theirs, ours = map(importlib.import_module, APIS["v0"])
    roots = {"theirs": path / "theirs", "ours": path / "ours"}
    problems = list(
        differences(run(program, theirs, roots["theirs"]), run(program, ours, roots["ours"]), roots)
    )
    wanted = run(read, theirs, roots["theirs"])
    for reader, root in ((ours, "ours"), (ours, "theirs"), (theirs, "ours")):
        got = run(read, reader, roots[root])
        problems += [
            f"{reader.__name__} reads {root}: {x}" for x in differences(wanted, got, roots)
        ]
    assert not problems, "\n".join(problems)


def raised(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Exception | None:
    """Returns what a call raises, so that a program can return it; None if it raises nothing."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    return None


class Ended(NamedTuple):
    """Tells how a program ended."""

    result: Any
    error: Exception | None


def run(program: Program, module: ModuleType, root: pathlib.Path) -> Ended:
    """Returns what a program returns or raises."""
    root.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        # Orbax warns about each restore without a target.
        warnings.filterwarnings("ignore", "Sharding info not provided", UserWarning)
        try:
            return Ended(program(module, root), None)
        except Exception as error:
            return Ended(None, error)


def layout(root: pathlib.Path) -> set[str]:
    """Returns the entries below a directory, but for those that each library names as it likes."""
    found = set()
    for place, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not _INTERNAL.fullmatch(name)]
        here = pathlib.Path(place).relative_to(root)
        found |= {f"{here / name}/" for name in folders}
        found |= {str(here / name) for name in files if not _INTERNAL.fullmatch(name)}
    return found


def differences(
    want: Any, got: Any, roots: Mapping[str, pathlib.Path], at: str = "program"
) -> Iterator[str]:
    """Yields where a value of the drop-in differs from that of Orbax, in words.

    Their own classes differ by nature. Equal are those of one name whose fields or entries are
    equal. An error may be of a more special class, but must be caught by whatever catches theirs.
    """
    if isinstance(want, Exception) or isinstance(got, Exception):
        if missing := _names(want) - _names(got):
            yield f"{at}: wanted {want!r}, got {got!r}, which is no {', '.join(sorted(missing))}"
    elif isinstance(want, os.PathLike) and isinstance(got, pathlib.PurePath):
        if _relative(want, roots) != _relative(got, roots):
            yield f"{at}: wanted {want!r}, got {got!r}"
    elif isinstance(want, (jax.Array, np.ndarray, np.generic)):
        yield from _of_arrays(want, got, at)
    elif not _same_class(type(want), type(got)):
        yield f"{at}: wanted a {type(want)}, got a {type(got)}: {_short(want)}, {_short(got)}"
    elif (entries := _entries(want)) is not None:
        others = _entries(got) or {}
        if entries.keys() != others.keys():
            yield f"{at}: wanted {list(entries)}, got {list(others)}"
        for key in entries.keys() & others.keys():
            yield from differences(entries[key], others[key], roots, f"{at}/{key}")
    elif type(want).__module__.startswith("orbax"):
        return
    elif want != got and not (want != want and got != got):  # NaN
        yield f"{at}: wanted {want!r}, got {got!r}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."


def _names(value: Any) -> set[str]:
    """Returns what the classes of an error are called, from its own up to Exception."""
    return {kind.__name__ for kind in type(value).__mro__}


def _relative(path: Any, roots: Mapping[str, pathlib.Path]) -> str:
    """Returns a path as it is below either root."""
    text = os.fspath(path)
    for root in roots.values():
        if pathlib.Path(text).is_relative_to(root):
            return os.path.relpath(text, root)
    return text


def _of_arrays(want: Any, got: Any, at: str) -> Iterator[str]:
    """Yields the differences of two arrays: kind, type, shape, sharding, bytes."""
    kind = jax.Array if isinstance(want, jax.Array) else type(want)
    if not isinstance(got, kind):
        yield f"{at}: wanted a {kind}, got a {type(got)}"
    elif (want.dtype, want.shape) != (got.dtype, got.shape):
        yield f"{at}: wanted {want.dtype}{want.shape}, got {got.dtype}{got.shape}"
    else:
        if isinstance(want, jax.Array) and not got.sharding.is_equivalent_to(
            want.sharding, want.ndim
        ):
            yield f"{at}: wanted {want.sharding}, got {got.sharding}"
        if _bytes(want) != _bytes(got):
            yield f"{at}: wanted {want}, got {got}"


def _bytes(array: Any) -> bytes:
    if isinstance(array, jax.Array) and jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


def _same_class(want: type, got: type) -> bool:
    if want.__module__.startswith("orbax"):
        return want.__name__ == got.__name__
    return want is got


def _entries(value: Any) -> dict[Any, Any] | None:
    """Returns the parts of a container, by key, index or field; None if it has none."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return value._asdict()
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, type) or not is_dataclass(value):
        return None
    return {f.name: getattr(value, f.name) for f in fields(value) if not f.name.startswith("_")}
