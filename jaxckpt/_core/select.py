"""Selects leaves of a tree by the globs `only` and `skip` over leaf paths."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Sequence

from jaxckpt._core.check import check_type
from jaxckpt.format.tree import Path, path_text

Globs = str | Sequence[str] | None
Report = Callable[[str], object] | None


def selector(only: Globs, skip: Globs) -> Callable[[Path], bool]:
    """Returns a predicate for the selected paths. A container's name selects everything in it.

    Example:
        >>> list(filter(selector("params", "*/b"), [("params", "w"), ("params", "b"), ("step",)]))
        [('params', 'w')]
    """

    def selected(path: Path) -> bool:
        return (only is None or _is_any(only, path)) and (skip is None or not _is_any(skip, path))

    return selected


def check_globs(
    only: Globs, skip: Globs, paths: Sequence[Path], *, where: str, report: Report = None
) -> None:
    """Raises ValueError, or else calls `report`, if a glob matches none of `paths` of `where`."""
    for option, globs in (("only", only), ("skip", None if skip in ([], ()) else skip)):
        check_kind(where, option, globs)
        listed = [globs] if isinstance(globs, str) else globs
        lost = [glob for glob in listed or () if not any(_is_any(glob, path) for path in paths)]
        if lost or (listed is not None and not listed):
            text = no_leaf(option, lost or [listed], paths, where)
            if report is None or (option == "only" and len(lost) == len(listed or ())):
                raise ValueError(text)  # with such an `only`, nothing would be restored
            report(text)


def check_kind(who: str, name: str, globs: object) -> None:
    """Checks that a value is a glob, a list of globs, or None."""
    for glob in globs if isinstance(globs, Iterable) else [globs]:
        check_type(who, name, glob, str | None, "a glob over leaf paths, or a list of them")


def no_leaf(option: str, lost: Sequence[object], paths: Sequence[Path], where: str) -> str:
    """Returns the message about patterns that match none of the paths, and hints at the nearest."""
    known = {path_text(path[:i]) for path in paths for i in range(1, len(path) + 1)}
    near = [x for one in lost for x in difflib.get_close_matches(str(one), known, n=1)]
    match = f"{', '.join(map(repr, lost))} {'match' if len(lost) > 1 else 'matches'} no leaf."
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{option} {match}{hint} {some_paths(paths, where)}"


def some_paths(paths: Sequence[Path], where: str) -> str:
    """Returns a phrase that names the first paths, for an error."""
    texts = list(dict.fromkeys(map(path_text, paths)))
    return f"{where} has {', '.join(texts[:20])}" + (", ..." if len(texts) > 20 else "")


def _is_any(globs: str | Sequence[str], path: Path) -> bool:
    texts = {path_text(path), "/".join(path)}  # a name with "/" may be written as the tree shows it
    listed = [globs] if isinstance(globs, str) else globs
    return any(
        f"{text}/".startswith(f"{glob}/")
        or fnmatch.fnmatchcase(text, glob)
        or fnmatch.fnmatchcase(text, f"{glob}/*")
        for glob in listed
        for text in texts
    )
