"""The names of the drop-in."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import orbax.checkpoint as theirs
import pytest

import jaxckpt.orbax as ours

PROGRAM = """
import sys, jaxckpt.orbax as ocp
assert "jax" not in sys.modules
for name in dir(ocp):
    if name != "v1":
        getattr(ocp, name)
assert not [name for name in sys.modules if name.split(".")[0] == "orbax"]
"""


def test_orbax_is_never_imported():
    """Nor JAX, before a name is used."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_the_names_are_those_of_orbax():
    """Every class and function at the top of Orbax is there."""
    found = [name for name in dir(theirs) if not name.startswith("_") and name[0].isupper()]

    assert [name for name in found if not hasattr(ours, name)] == []


def test_the_version_is_one_of_orbax():
    """Programs compare it."""
    assert re.fullmatch(r"0\.1[2-9]\.\d+", ours.__version__)


def test_an_unknown_name_is_an_attribute_error():
    """It points to the table of names."""
    with pytest.raises(AttributeError, match=r"docs/orbax\.md"):
        _ = ours.nothing  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("module", ["args", "checkpoint_managers", "checkpointers", "path"])
def test_modules_have_the_names_of_orbax(module):
    """Of those modules that programs import from most."""
    names = [name for name in vars(getattr(theirs, module)) if name[0].isupper()]

    assert [name for name in names if not hasattr(getattr(ours, module), name)] == []


def test_without_etils_the_error_names_the_extra(monkeypatch):
    """Orbax returns its paths."""
    monkeypatch.setitem(sys.modules, "etils", None)  # as if it were not installed

    with pytest.raises(ImportError, match=r"install the extra jaxckpt\[orbax\]"):
        importlib.reload(ours)
