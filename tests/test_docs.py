"""What the README and the notebooks show runs, and what the docs say is so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.scorecard import ROWS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
OPTIONAL = ("grain", "ml_collections", "gin")  # their blocks stand alone
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def run_code(code: str, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=cwd,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def programs() -> dict[str, str]:
    """The Python of the README: of each section one, and one for each optional package."""
    found: dict[str, str] = {}
    for section in re.split(r"^## ", README, flags=re.MULTILINE):
        title = section.partition("\n")[0]
        for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
            imports = "\n".join(re.findall(r"^(?:import|from) .*", block, re.MULTILINE))
            needs = [name for name in OPTIONAL if re.search(rf"\b{name}\b", imports)]
            key = needs[0] if needs else title
            found[key] = found.get(key, "") + block
    return found


@pytest.mark.parametrize("program", programs())
def test_the_code_of_the_readme_runs(tmp_path: Path, program: str) -> None:
    """The Python of the README runs as it stands, but for the folder."""
    if program in OPTIONAL:
        pytest.importorskip(program)

    run_code(programs()[program].replace("/tmp/run", str(tmp_path / "run")), tmp_path)


@pytest.mark.parametrize("name", ["slurm.sh", "kubernetes.yaml"])
def test_the_recipes_of_the_readme_are_those_of_the_examples(name: str) -> None:
    """Word for word."""
    recipe = (ROOT / "examples" / name).read_text("utf-8")

    assert re.search(rf"```[a-z]+\n{re.escape(recipe)}```", README)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(tmp_path: Path, notebook: Path) -> None:
    """Every code cell runs, in order."""
    cells = json.loads(notebook.read_text("utf-8"))["cells"]

    run_code("\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code"), tmp_path)


def test_the_readme_names_real_commands() -> None:
    """Every `make` target of the README is one of the Makefile's."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))

    assert set(re.findall(r"(?:`|^    )make ([a-z-]+)", README, re.MULTILINE)) <= targets
    assert {"demo", "test"} <= targets


def test_the_scorecard_in_the_docs_is_that_of_the_tests() -> None:
    """Every row but that of the soak, as it is called; with enough trials, all of which passed."""
    text = (ROOT / "RELIABILITY.md").read_text("utf-8")
    found = re.findall(r"^\| (\d+r?) \| (.+) \| (\d+) \| (\d+) \| (.+) \|$", text, re.MULTILINE)

    rows = {name: row for name, row in ROWS.items() if row.target != "soak"}

    assert {name: (title, orbax) for name, title, _, _, orbax in found} == {
        name: (row.title, row.orbax) for name, row in rows.items()
    }
    assert all(rows[name].count <= int(tried) == int(passed) for name, _, tried, passed, _ in found)
