"""The page about Orbax has each public name of the drop-in in its table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import jaxckpt.orbax
import jaxckpt.orbax.v1

PAGE = (Path(__file__).parents[2] / "docs" / "orbax.md").read_text("utf-8")
SECTION = PAGE.partition("\n## One import line\n")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| (`.+`) \| (\w*) \| (.*) ?\|$", SECTION, re.MULTILINE)
NAMED = [name for names, _, _ in ROWS for name in re.findall(r"`([\w.]+)`", names)]


@pytest.mark.parametrize(
    ("module", "prefix"), [(jaxckpt.orbax, ""), (jaxckpt.orbax.v1, "v1.")], ids=["v0", "v1"]
)
def test_each_public_name_has_a_row(module, prefix):
    """And each row is about a name that is there."""
    public = [name for name in dir(module) if not name.startswith("_")]
    named = {name for name in NAMED if name.startswith("v1.") == bool(prefix)}

    assert named == {f"{prefix}{name}" for name in public}
    for name in public:
        assert getattr(module, name) is not None


def test_a_name_stands_once_with_its_status():
    """One of three, and a difference where there is one."""
    assert len(NAMED) == len(set(NAMED))
    assert {status for _, status, _ in ROWS} == {"same", "differs", "accepted"}
    assert all(difference for _, status, difference in ROWS if status == "differs")
