"""On-disk names are spelled only in `jaxckpt/format/`; the public names are those in `__all__`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import jaxckpt
from jaxckpt.format import names

PACKAGE = Path(jaxckpt.__file__).parent
# These are words of the language, or a module, as well as names on disk.
_COMMON = {"state", "default", "metrics", "metadata", "checkpoint", "orbax.checkpoint", "d"}
SPELLED = {
    value
    for name, value in vars(names).items()
    if isinstance(value, str) and not name.startswith("__") and value not in _COMMON
}


def misspelled(source: str) -> set[str]:
    """The on-disk names that stand in string literals of a module, docstrings aside.

    In a longer word, as in the variable AWS_METADATA_ENDPOINT, one is no name on disk.
    """
    module = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(module)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    texts = [
        node.value
        for node in ast.walk(module)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    ]
    return {
        name
        for name in SPELLED
        for text in texts
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}", text)
    }


@pytest.mark.parametrize(
    "module",
    [p for p in sorted(PACKAGE.rglob("*.py")) if p.relative_to(PACKAGE).parts[0] != "format"],
    ids=lambda path: path.relative_to(PACKAGE).as_posix(),
)
def test_no_other_module_spells_a_name_on_disk(module: Path) -> None:
    """File names of a checkpoint come from `format.names`."""
    assert misspelled(module.read_text("utf-8")) == set()


def test_a_planted_name_is_found() -> None:
    """The check above can fail."""
    assert misspelled('path = folder + "/_METADATA"') == {"_METADATA"}
    assert misspelled('path = f"{step}_METADATA"') == {"_METADATA"}
    assert misspelled('variable = "AWS_METADATA_ENDPOINT"') == set()


def test_all_is_what_is_public() -> None:
    """Every name of `__all__` can be had; the lazy table also holds `open`, a built-in's name."""
    for name in jaxckpt.__all__:
        assert getattr(jaxckpt, name) is not None

    assert set(jaxckpt._HOME) == {*jaxckpt.__all__, "open"}
    assert jaxckpt.__all__ == sorted(jaxckpt.__all__)


def test_the_top_is_small():
    """At most 29 names; what they return is in `jaxckpt.types`, and `__version__` is no export."""
    assert len(jaxckpt._HOME) <= 29
    assert not set(jaxckpt.__all__) & set(jaxckpt.types.__all__)
    assert jaxckpt.__version__


def test_a_type_is_public_where_it_is_defined():
    """Each name of `jaxckpt.types` is documented and of that module; no other module defines it."""
    for name in jaxckpt.types.__all__:
        value = getattr(jaxckpt.types, name)
        assert name == "OnProgress" or value.__doc__
        assert name == "OnProgress" or value.__module__ == "jaxckpt.types"
    assert jaxckpt.types.__all__ == sorted(jaxckpt.types.__all__)
