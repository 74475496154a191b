"""Which leaves of a tree are meant: the globs `only` and `skip` over leaf paths."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence

from jaxckpt.format.tree import Path, path_text

Globs = str | Sequence[str] | None


def selector(only: Globs, skip: Globs) -> Callable[[Path], bool]:
    """Whether a path is one of those meant. A container's name means all in it.

    Example:
        >>> list(filter(selector("params", "*/b"), [("params", "w"), ("params", "b"), ("step",)]))
        [('params', 'w')]
    """

    def selected(path: Path) -> bool:
        return (only is None or _is_any(only, path)) and (skip is None or not _is_any(skip, path))

    return selected


def check_globs(only: Globs, skip: Globs, paths: Sequence[Path], *, place: str) -> None:
    """Refuses globs that mean nothing.

    Args:
        paths: All that there are.
        place: Where they are, for the error.

    Raises:
        ValueError: `only` or `skip` means none of them.
    """
    for option, globs in (("only", only), ("skip", skip)):
        if globs is not None and not any(_is_any(globs, path) for path in paths):
            raise ValueError(f"{option}={globs!r} matches no leaf. {some_paths(paths, place)}")


def some_paths(paths: Sequence[Path], place: str) -> str:
    """The first of them in words, for an error."""
    return f"{place} has {', '.join(path_text(path) for path in paths[:20])}" + (
        ", ..." if len(paths) > 20 else ""
    )


def _is_any(globs: str | Sequence[str], path: Path) -> bool:
    text = path_text(path)
    listed = [globs] if isinstance(globs, str) else globs
    return any(
        text == glob or fnmatch.fnmatchcase(text, glob) or fnmatch.fnmatchcase(text, f"{glob}/*")
        for glob in listed
    )
