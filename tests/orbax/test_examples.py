"""Each program of `examples/orbax/` does the same with Orbax and with the drop-in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import jaxckpt.orbax
from jaxckpt.cli._migrate.source import parse
from tests.commandline import cli
from tests.orbax.twice import twice

EXAMPLES = Path(__file__).parents[2] / "examples" / "orbax"
STYLES = {
    "manager_args": "v0",
    "manager_items": "v0",
    "composite": "v0",
    "checkpointer": "v0",
    "v1_checkpointer": "v1",
}


@pytest.mark.parametrize("name", STYLES)
def test_a_program_goes_on_after_either_library(tmp_path, monkeypatch, name):
    """It ends with the same state whichever library wrote the first half, or reads the end."""
    pytest.importorskip("orbax.checkpoint")
    monkeypatch.syspath_prepend(EXAMPLES)

    text = (EXAMPLES / f"{name}.py").read_text("utf-8")

    def train(ocp, path, steps):
        example = {"__name__": name}
        exec(re.sub("import jaxckpt.* as ocp", f"import {ocp.__name__} as ocp", text), example)
        return example["train"](path / "run", steps)

    state = twice(
        lambda ocp, path: [train(ocp, path, 4), train(ocp, path, 10)][1],
        tmp_path,
        read=lambda ocp, path: train(ocp, path, 10),
        api=STYLES[name],
    )

    assert state["step"] == 10


def test_each_program_has_a_test_and_the_import_of_the_drop_in():
    """None of them needs Orbax."""
    programs = {path.stem: parse(path.read_bytes()) for path in EXAMPLES.glob("*.py")}

    assert programs.keys() - {"model"} == STYLES.keys()
    assert all(not source.changes for source in programs.values())
    assert all(source.uses for name, source in programs.items() if name in STYLES)


@pytest.mark.parametrize("name", STYLES)
def test_migrate_turns_a_program_of_orbax_into_the_example(tmp_path, name):
    """The drop-in has every name that the programs use."""
    wanted = (EXAMPLES / f"{name}.py").read_text("utf-8")
    program = tmp_path / f"{name}.py"
    text = wanted.replace("import jaxckpt.orbax.v1 as", "from orbax.checkpoint import v1 as")
    program.write_text(text.replace("import jaxckpt.orbax as", "import orbax.checkpoint as"))

    code, out, _ = cli("migrate", program, "--write")

    assert (code, " no " in out) == (0, False)
    written = program.read_text().replace("from jaxckpt.orbax import v1", "import jaxckpt.orbax.v1")
    assert written == wanted


def test_an_import_without_a_new_name_is_changed_too(tmp_path):
    """`from jaxckpt import orbax` has what `import orbax.checkpoint` has."""
    program = tmp_path / "program.py"
    program.write_text("import orbax.checkpoint\nmade = orbax.checkpoint.args.JsonSave({})\n")

    code, _, _ = cli("migrate", program, "--write")

    names: dict[str, Any] = {}
    exec(program.read_text(), names)
    assert code == 0
    assert type(names["made"]) is jaxckpt.orbax.args.JsonSave
