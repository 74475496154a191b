"""The code in the README and in the pages of `docs/` runs, and their tables match the code."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import jaxckpt
from benchmarks import chart
from jaxckpt._run import leases
from jaxckpt.format import run, tree
from tests.faults.scorecard import ROWS
from tests.integrations.test_report import browse

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
OPTIONAL = ("grain", "ml_collections", "gin")  # their blocks stand alone
DOCS = sorted((ROOT / "docs").rglob("*.md"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Orbax warns about each restore without a target, Flax of its own checkpoints.
IGNORED = (
    "ignore:Sharding info not provided:UserWarning",
    "ignore:Flax Checkpointing will soon be deprecated:DeprecationWarning",
)


def run_code(code: str, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", *(f"-W{rule}" for rule in IGNORED), "-c", code],
        cwd=cwd,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(cwd),
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def programs() -> dict[str, str]:
    """The Python of the README and of each page: of each one, and one for each optional package."""
    found: dict[str, str] = {}
    for page in (ROOT / "README.md", *DOCS):
        for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            imports = "\n".join(re.findall(r"^(?:import|from) .*", block, re.MULTILINE))
            needs = [name for name in OPTIONAL if re.search(rf"\b{name}\b", imports)]
            key = f"{page.stem} {needs[0]}" if needs else page.stem
            found[key] = found.get(key, "") + block
    return found


@pytest.mark.parametrize("program", [page for page in programs() if page != "README"])  # below
def test_the_code_of_the_docs_runs(tmp_path: Path, program: str) -> None:
    """The Python of a page runs as it stands, but for the folder."""
    run_code(programs()[program].replace("/tmp/run", str(tmp_path / "run")), tmp_path)


def test_the_commands_of_the_readme_run(tmp_path: Path) -> None:
    """On the run that its program makes; only `diff` finds something."""
    run = str(tmp_path / "run")
    run_code(programs()["README"].replace("/tmp/run", run), tmp_path)

    commands = re.findall(r"^\$ jaxckpt (.*?)(?:  +#.*)?$", README, re.MULTILINE)
    codes = {
        command: run_command(command.replace("/tmp/run", run), tmp_path) for command in commands
    }

    assert len(commands) >= 5
    assert codes == {command: int(command.startswith("diff")) for command in commands}
    assert (tmp_path / "report.html").exists()


def run_command(command: str, cwd: Path) -> int:
    done = subprocess.run(
        [sys.executable, "-m", "jaxckpt", *shlex.split(command)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=100,
        check=False,
    )
    return done.returncode


def test_the_chart_of_the_readme_is_drawn_from_the_results() -> None:
    """`python -m benchmarks.chart` draws the committed file; its text can be selected."""
    drawn = chart.chart(*chart.read_results())

    assert chart.CHART.read_text("utf-8") == drawn
    assert f"]({chart.CHART.relative_to(ROOT)})" in README
    assert {"jaxckpt", "Orbax v1", "Orbax v0"} <= set(
        re.findall(r"<text [^>]*>(.*?)</text>", drawn)
    )
    assert drawn.count('class="ours"') == 6


@pytest.mark.parametrize("page", ["README.md", "notebooks/quickstart.ipynb"])
def test_the_first_pages_open_with_code(page: str) -> None:
    """What to type comes before how to install it."""
    text = (ROOT / page).read_text("utf-8")

    assert 0 < text.index("```python") < text.index("install")


@pytest.mark.parametrize("name", ["slurm.sh", "kubernetes.yaml"])
def test_the_recipes_of_the_docs_are_those_of_the_examples(name: str) -> None:
    """Word for word."""
    recipe = (ROOT / "examples" / name).read_text("utf-8")

    assert f"\n{recipe}```" in (ROOT / "docs" / "runs.md").read_text("utf-8")


def folders() -> list[str]:
    """The folders of the package, by their path."""
    package = ROOT / "jaxckpt"
    return sorted(
        str(path.parent.relative_to(package))
        for path in package.rglob("__init__.py")
        if path.parent != package
    )


@pytest.mark.parametrize("folder", folders())
def test_a_folder_lists_its_modules(folder: str) -> None:
    """Its docstring gives each module one line, leaves out none, and makes none up."""
    path = ROOT / "jaxckpt" / folder
    text = ast.get_docstring(ast.parse((path / "__init__.py").read_text("utf-8"))) or ""
    there = [file.stem for file in path.glob("*.py") if file.stem != "__init__"]

    listed = re.findall(r"^(?:    )?(\w+)  +\S", text, re.MULTILINE)

    assert sorted(listed) == sorted(there)


def test_the_walk_leads_to_modules_that_are_there() -> None:
    """ARCHITECTURE.md names no module that is gone, and every folder and file at the top."""
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    package = ROOT / "jaxckpt"

    stops = set(re.findall(r"(?<![\w/.])((?:_[a-z]+|format|storage)/\w+)(?![/.\w])", text))

    assert {stop for stop in stops if not (package / f"{stop}.py").exists()} == set()
    assert len(stops) > 30
    there = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    there |= {path.parent.name for path in package.glob("*/__init__.py")}
    assert {name for name in there if f"`{name}`" not in text} == set()


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "docs/howto.md"])
def test_the_links_of_a_page_lead_somewhere(page: str) -> None:
    """Each relative link points to a file; `make docs` checks the links of the other pages."""
    links = re.findall(r"\]\(([^)#:\s]+)\)", (ROOT / page).read_text("utf-8"))

    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []
    assert links


def first_cells(*modules: object) -> set[str]:
    """The names that stand in the first cells of the tables of the page about Orbax."""
    page = (ROOT / "docs" / "orbax.md").read_text("utf-8")
    rows = re.findall(r"^\| (.*?) \|", page, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"\w+", row)}


def test_the_page_about_orbax_has_every_option_of_its_manager() -> None:
    """Each field of `CheckpointManagerOptions`, and how many they are."""
    ocp = pytest.importorskip("orbax.checkpoint")

    options = {field.name for field in dataclasses.fields(ocp.CheckpointManagerOptions)}

    assert options - first_cells() == set()
    page = (ROOT / "docs" / "orbax.md").read_text("utf-8")
    assert f"`CheckpointManagerOptions` has {len(options)} options." in page


def test_the_page_about_orbax_has_every_method_of_its_managers() -> None:
    """The methods of v0's and v1's managers, and everything in v1 for one checkpoint."""
    ocp = pytest.importorskip("orbax.checkpoint")
    from orbax.checkpoint import v1

    names = {
        name
        for part in (ocp.CheckpointManager, v1.training.Checkpointer, v1)
        for name in vars(part)
        if not name.startswith("_") and callable(getattr(part, name))
    }
    classes = {"AbstractCheckpointable", "AsyncResponse", "CheckpointMetadata", "Checkpointable"}
    classes |= {"PyTreeMetadata", "Context"}  # of which it is told in the text
    later = {name for name in names if name.removesuffix("_async") in first_cells()}

    assert names - first_cells() - later - classes == set()


def test_the_page_about_orbax_has_every_policy() -> None:
    """The policies for saving and for keeping steps."""
    pytest.importorskip("orbax.checkpoint")
    from orbax.checkpoint import v1

    policies = {
        name
        for module in (v1.training.save_decision_policies, v1.training.preservation_policies)
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__.endswith(("_policies", "_policy"))
    }
    seams = {"DecisionContext", "PreservationContext", "SaveDecisionPolicy", "PreservationPolicy"}

    assert len(policies - seams) > 10
    assert policies - seams - first_cells() == set()


def test_the_reference_has_every_public_name() -> None:
    """Each name of `jaxckpt` and of its types has a heading, once, and nothing else has."""
    pages = [page.read_text("utf-8") for page in (ROOT / "docs" / "api").glob("*.md")]
    found = re.findall(r"^::: jaxckpt\.((?:types\.|errors\.)?\w+)$", "\n".join(pages), re.MULTILINE)
    types = {f"types.{name}" for name in jaxckpt.types.__all__}

    assert sorted(found) == sorted({*jaxckpt._HOME, *types, "errors.Difference"})


@pytest.mark.parametrize(
    ("name", "shown"),
    [("SaveHandle", {"done", "result"}), ("SavePolicy", {"auto"}), ("KeepPolicy", set())],
)
def test_the_reference_hides_internals_only(name: str, shown: set[str]) -> None:
    """A page leaves out methods that exist, and shows the ones that users call."""
    pages = "\n".join(page.read_text("utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    [pattern] = re.findall(rf"::: jaxckpt\.{name}\n    options:\n(?:.*\n)*?.*!\^\((.*)\)\$", pages)
    hidden = set(pattern.split("|"))

    assert hidden <= vars(getattr(jaxckpt, name)).keys()
    assert shown <= vars(getattr(jaxckpt, name)).keys() - hidden


@pytest.mark.browser
@pytest.mark.parametrize("page", ["howto.html", "api/runs.html"])
def test_the_search_works_in_pages_opened_from_the_disk(tmp_path: Path, page: str) -> None:
    """Without a server; `make browser` builds the pages first."""
    file = ROOT / "build" / "site" / page

    dom = browse(file, tmp_path, "--virtual-time-budget=8000", query="?q=preemption").dom

    assert re.search(r"md-search-result__meta\">\d+ matching documents", dom)
    assert "runs.html?h=preemption#preemption" in dom


# What a user types, and the section that answers it.
QUESTIONS = {
    "aws profile": "howto.html#sign-in-to-a-cloud-with-an-aws-profile-sso-or-gcloud",
    "gcloud": "howto.html#sign-in-to-a-cloud-with-an-aws-profile-sso-or-gcloud",
    "pytorch": "howto.html#read-the-weights-with-pytorch-or-hugging-face",
    "hugging face weights tree": "howto.html#restore-hugging-face-weights-into-my-tree",
    "wandb": "howto.html#log-the-times-of-saves-to-wandb",
    "keras": "howto.html#save-a-keras-3-model",
    "macos windows": "howto.html#use-it-on-macos-or-windows",
    "which version reads": "compatibility.html",
    "no progress bar": "howto.html#save-without-a-progress-bar",
}


@pytest.mark.browser
@pytest.mark.parametrize("question", QUESTIONS)
def test_one_search_answers_a_question(tmp_path: Path, question: str) -> None:
    """The section is the first that is found, below the title of its page at most."""
    file = ROOT / "build" / "site" / "index.html"
    query = f"?q={question.replace(' ', '%20')}"

    dom = browse(file, tmp_path, "--virtual-time-budget=8000", query=query).dom

    links = re.findall(r'<a href="[^"]*/site/([^"]*)" class="md-search-result__link"', dom)
    first, second = (re.sub(r"\?h=[^#]*", "", link) for link in links[:2])
    page = QUESTIONS[question].partition("#")[0]
    assert first == QUESTIONS[question] or (first, second) == (page, QUESTIONS[question])


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_it_ran(notebook: Path) -> None:
    """Small, run from top to bottom, with nothing of the machine that it ran on."""
    text = notebook.read_text("utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]

    assert len(text) < 150_000
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not re.findall(
        r"/(?:home|root|tmp|work|usr|Users|content)/[^\s\"']*", json.dumps(outputs)
    )


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_without_jaxckpt_stops_and_says_why(tmp_path: Path, notebook: Path) -> None:
    """Outside a checkout there is nothing to install it from."""
    [cell, *_] = [
        c for c in json.loads(notebook.read_text("utf-8"))["cells"] if c.get("outputs") == []
    ]
    code = f"import sys; sys.modules['jaxckpt'] = None\n{''.join(cell['source'])}"

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert "ModuleNotFoundError: jaxckpt is not installed" in done.stderr
    assert "checkout" in done.stderr


def test_nothing_asks_to_install_jaxckpt_by_name() -> None:
    """It is not on the package index; what a user is told to install is there, or is a path."""
    files = [ROOT / "README.md", *DOCS, *NOTEBOOKS]
    files += [path for part in ("jaxckpt", "examples") for path in (ROOT / part).rglob("*.py")]

    by_name = re.compile(r"pip install[^\n]*[\s'\"]jaxckpt\b")
    assert [path.name for path in files if by_name.search(path.read_text("utf-8"))] == []


def test_the_limits_of_the_readme_are_those_of_the_code() -> None:
    """One line each; the numbers are the constants of the package."""
    limits = README.partition("## Limits today\n")[2].partition("\n## ")[0]
    digits = len(str(run.MAX_STEP))
    sizes = f"at most {tree.MAX_LEVELS} levels, a name at most {tree._MAX_NAME_BYTES >> 10} kB"

    assert f"{sizes}, and a step number at most {digits} digits" in limits
    assert leases.LEASE_S == 3600
    assert "more than an hour on a step" in limits
    assert all(line.startswith("- ") for line in limits.strip().splitlines()[:-2])


@pytest.mark.parametrize("page", ["README.md", "docs/releasing.md"])
def test_a_page_names_real_commands(page: str) -> None:
    """Every `make` target of the page is one of the Makefile's."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = set(
        re.findall(r"(?:`|^    )make ([a-z-]+)", (ROOT / page).read_text("utf-8"), re.MULTILINE)
    )

    assert named
    assert named <= targets


def test_the_scorecard_in_the_docs_is_that_of_the_tests() -> None:
    """Every row but that of the soak, as it is called; with enough trials, all of which passed."""
    text = (ROOT / "RELIABILITY.md").read_text("utf-8")
    found = re.findall(r"^\| (\d+r?) \| (.+) \| (\d+) \| (\d+) \| (.+) \|$", text, re.MULTILINE)

    rows = {name: row for name, row in ROWS.items() if row.target != "soak"}

    assert {name: (title, orbax) for name, title, _, _, orbax in found} == {
        name: (row.title, row.orbax) for name, row in rows.items()
    }
    assert all(rows[name].count <= int(tried) == int(passed) for name, _, tried, passed, _ in found)
