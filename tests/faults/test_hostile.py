"""Malicious checkpoints cause no crash, use no extra memory, and touch nothing outside."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from tests.faults import hostile
from tests.faults.damage import Checkpoints, problems_of, trials_of


@pytest.fixture(scope="module")
def checkpoints(zygote, tmp_path_factory, run_processes):
    return Checkpoints(zygote, tmp_path_factory.mktemp("checkpoints"), run_processes)


def try_all(zygote, trial, root, folder, which, part=0, parts=1):
    came = {}
    for n, name in list(enumerate(hostile.names_of(which)))[part::parts]:
        work = folder / f"{which}-{n}"
        work.mkdir()
        said = trials_of(zygote, trial, "14", hostile.try_case, root, work, which, n)
        came[name] = said[-1].get("came") if said else None
        shutil.rmtree(work)
    return came


@pytest.mark.parametrize("which", ["names", "links", "fifos"])
def test_names_and_links(zygote, trial, checkpoints, ram_path, which):
    """A typed error or a right restore; nothing outside is read or changed."""
    came = try_all(zygote, trial, checkpoints("step"), ram_path, which)

    if which == "names":  # a control: one that stays inside is followed
        assert came["a reference to inside/"] == ["a value", "a value", "verified: True"]


@pytest.mark.parametrize("part", range(6))
def test_sizes(zygote, trial, checkpoints, ram_path, part):
    """A typed error or a right restore, in bounded memory."""
    try_all(zygote, trial, checkpoints("step"), ram_path, "sizes", part, 6)


def test_sockets(zygote, trial, checkpoints, ram_path):
    """In the place of a file or a directory."""
    try_all(zygote, trial, checkpoints("step"), ram_path, "others")


@pytest.mark.faults_root
def test_devices(zygote, trial, checkpoints, ram_path):
    """One that never ends, in the place of a file or a directory."""
    try_all(zygote, trial, checkpoints("step"), ram_path, "devices")


# --- nothing is run --------------------------------------------------------------------------

_OF_OTHERS = {
    "orbax-0.12.4-pytree-default": "",
    "orbax-0.12.4-pytree-zarr3-noocdbt": "",
    "orbax-0.12.4-manager-composite": "1",
    "orbax-0.12.4-v1-save": "",
    "orbax-0.12.4-prng-keys": "",
    "orbax-0.3.5-pytree-aggregate": "",
    "orbax-0.1.0-pytree-default": "",
}


@pytest.fixture
def kinds(checkpoints, golden):
    """A checkpoint of each kind."""
    ours = {layout: checkpoints(layout) / "5" for layout in ("plain", "sharded", "step")}
    others = {name: golden(name).path / step for name, step in _OF_OTHERS.items()}
    [flax] = [f for f in golden("orbax-0.1.0-flax-legacy").path.iterdir() if f.is_file()][:1]
    return ours | others | {"flax": flax}


def test_reading_runs_nothing(zygote, trial, kinds, ram_path):
    """Neither pickle, marshal, exec, compile and import, nor programs and libraries."""
    trials_of(zygote, trial, "15", hostile.run_nothing, kinds, ram_path, 1)


def test_what_runs_is_seen(zygote, kinds, ram_path):
    """A control: a pickle is."""
    problems = problems_of(zygote, hostile.run_nothing, kinds, ram_path, 1, plant=True)

    assert len(problems) == 3 * len(kinds)
    assert all("pickle.find_class" in problem for problem in problems)


_MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "runpy",
    "code",
}
_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "system",
    "popen",
    "execfile",
    "unpickle",
    "Popen",
}


# They import by names, of lists of their own; `migrate` its constant, and what is below that; and
# the check of exact resume the caller's own module.
_IMPORT = {
    "jaxckpt/__init__.py": 1,
    "jaxckpt/testing/_resume.py": 1,
    "jaxckpt/_core/pytree.py": 1,
    "jaxckpt/orbax/__init__.py": 1,
    "jaxckpt/orbax/v1/__init__.py": 1,
    "jaxckpt/cli/_app.py": 1,
    "jaxckpt/cli/_migrate/command.py": 2,
    "jaxckpt/cli/_plan/tree.py": 1,  # what the user names on the command line
}
# They compile functions of their own: a method of jax, which takes no text.
_COMPILE = {
    "jaxckpt/_core/fingerprint.py": ["compile"],
    "jaxckpt/_restore/carry.py": ["compile", "compile"],
}


def run_by(text):
    """Returns the parts of a module that could run code from a file."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in _MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if (node.module or "").split(".")[0] in _MODULES else []
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append("allow_pickle")
        elif isinstance(node, ast.Call):
            called = node.func
            of = getattr(getattr(called, "value", None), "id", "")
            name = getattr(called, "attr", getattr(called, "id", ""))
            is_loader = name == "load" and of in ("np", "numpy", "yaml")
            is_import = name == "import_module" and not isinstance(node.args[0], ast.Constant)
            found += [name] if (name in _CALLS and of != "re") or is_loader or is_import else []
    return found


def test_no_module_can_run_what_a_file_says(trial):
    """No module imports a pickler, and none evaluates or imports by a name."""
    root = Path(hostile.__file__).parents[2]
    files = sorted(root.joinpath("jaxckpt").rglob("*.py"))
    assert len(files) > 40

    for file in files:
        with trial("15", file.name):
            name = str(file.relative_to(root))
            expected = ["import_module"] * _IMPORT.get(name, 0) + _COMPILE.get(name, [])
            assert run_by(file.read_text()) == expected


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from marshal import loads",
        "def f():\n    import pickle as p",
        "eval('1')",
        "exec(text)",
        "np.load(file, allow_pickle=True)",
        "yaml.load(text)",
        "importlib.import_module(name)",
        "os.system(text)",
        "subprocess.Popen(text)",
    ],
)
def test_a_module_that_could_is_seen(text):
    """A control of the test above."""
    assert run_by(text)
