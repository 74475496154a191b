"""`BUILD` names the layers of the package, and the actual imports follow it."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import resolve_name
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[1]
TENSORSTORE_MODULE = "jaxckpt/storage/_arrays.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    name: str
    srcs: list[str]
    deps: set[str]


def parse_build(text: str) -> list[Target]:
    """The targets of a BUILD file, which is read and never run."""
    targets = []
    for statement in ast.parse(text).body:
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
            raise TypeError(f"BUILD, line {statement.lineno}: not a call")
        fields = {keyword.arg: keyword.value for keyword in statement.value.keywords}
        srcs = fields["srcs"]
        if isinstance(srcs, ast.Call):  # glob([...])
            srcs = srcs.args[0]
        targets.append(
            Target(
                name=ast.literal_eval(fields["name"]),
                srcs=ast.literal_eval(srcs),
                deps={label.removeprefix(":") for label in ast.literal_eval(fields["deps"])},
            )
        )
    return targets


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_names(path: str, source: str) -> Iterator[str]:
    """The full dotted name of everything that a file imports, in functions and for types too."""
    package = (
        module_name(path) if path.endswith("__init__.py") else module_name(path).rpartition(".")[0]
    )
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imported_module(name: str, modules: Mapping[str, str]) -> str:
    """The module of the package that `name` is or is defined in."""
    while name not in modules:
        name = name.rpartition(".")[0]
    return name


def find_problems(build: str, sources: Mapping[str, str]) -> list[str]:
    """Compares a BUILD file with the text of every module, by its path."""
    problems = []
    targets = {target.name: target for target in parse_build(build)}

    owners: dict[str, str] = {}
    for path in sources:
        claims = [
            target.name
            for target in targets.values()
            if any(PurePosixPath(path).match(pattern) for pattern in target.srcs)
        ]
        if len(claims) != 1:
            problems.append(f"{path} belongs to {len(claims)} targets: {claims}")
        owners[path] = claims[0] if claims else "none"

    modules = {module_name(path): path for path in sources} | {"jaxckpt": "jaxckpt/__init__.py"}
    used: dict[str, set[str]] = {name: set() for name in targets}
    for path, source in sources.items():
        for name in imported_names(path, source):
            if name.split(".")[0] == "tensorstore" and path != TENSORSTORE_MODULE:
                problems.append(f"{path} imports tensorstore; only {TENSORSTORE_MODULE} may")
            if name.split(".")[0] != "jaxckpt":
                continue
            module = imported_module(name, modules)
            if module == "jaxckpt":
                problems.append(f"{path} imports {name} from the namespace; name its module")
                continue
            mine, theirs = owners[path], owners[modules[module]]
            if theirs != mine and theirs not in used.setdefault(mine, set()):
                used[mine].add(theirs)
                if mine in targets and theirs not in targets[mine].deps:
                    problems.append(f"{path} imports {module}: :{mine} does not name :{theirs}")

    for target in targets.values():
        problems += [
            f":{target.name} names :{dep} and does not import it"
            for dep in sorted(target.deps - used[target.name])
        ]
        problems += [
            f":{target.name} names {pattern}, which matches no file"
            for pattern in target.srcs
            if not any(PurePosixPath(path).match(pattern) for path in sources)
        ]
    try:
        graphlib.TopologicalSorter({t.name: t.deps for t in targets.values()}).prepare()
    except graphlib.CycleError as error:
        problems.append(f"the targets form a cycle: {error.args[1]}")
    return problems


def test_build_names_exactly_the_real_imports() -> None:
    """Every module is in one target, and `deps` are what is imported, neither more nor less."""
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
        for path in (ROOT / "jaxckpt").rglob("*.py")
    }

    problems = find_problems((ROOT / "BUILD").read_text("utf-8"), sources)

    assert not problems, "\n".join(problems)


BUILD = """
py_library(name = "low", srcs = ["jaxckpt/errors.py"], deps = [])
py_library(name = "high", srcs = glob(["jaxckpt/storage/*.py"]), deps = [":low"])
"""
SOURCES = {
    "jaxckpt/errors.py": "",
    "jaxckpt/storage/__init__.py": "from jaxckpt.errors import SaveFailed",
    "jaxckpt/storage/_arrays.py": "import tensorstore",
}


def test_a_package_that_keeps_the_rules_has_no_problems() -> None:
    """The package into which the violations below are planted is itself clean."""
    assert find_problems(BUILD, SOURCES) == []


@pytest.mark.parametrize(
    ("planted", "problem"),
    [
        ({"jaxckpt/stray.py": ""}, "belongs to 0 targets"),
        ({"jaxckpt/errors.py": "import jaxckpt.storage"}, ":low does not name :high"),
        ({"jaxckpt/errors.py": "def f(): import jaxckpt.storage"}, ":low does not name :high"),
        ({"jaxckpt/errors.py": "if TYPE_CHECKING: from .storage import S"}, ":low does not name"),
        ({"jaxckpt/errors.py": "from jaxckpt import storage"}, ":low does not name :high"),
        ({"jaxckpt/storage/__init__.py": ""}, ":high names :low and does not import it"),
        ({"jaxckpt/storage/disk.py": "from jaxckpt import save"}, "from the namespace"),
        ({"jaxckpt/storage/disk.py": "import jaxckpt"}, "from the namespace"),
        ({"jaxckpt/errors.py": "import tensorstore as ts"}, "imports tensorstore"),
        ({"jaxckpt/errors.py": "from tensorstore import open"}, "imports tensorstore"),
    ],
)
def test_a_planted_violation_is_found(planted: dict[str, str], problem: str) -> None:
    """Each rule about the sources can fail."""
    assert any(problem in found for found in find_problems(BUILD, SOURCES | planted))


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (BUILD.replace("storage/*", "*/*"), None),
        (BUILD.replace('srcs = ["', 'srcs = ["jaxckpt/storage/_arrays.py", "'), "to 2 targets"),
        (BUILD.replace('srcs = ["', 'srcs = ["jaxckpt/gone.py", "'), "matches no file"),
        (BUILD.replace("deps = []", 'deps = [":high"]'), "form a cycle"),
        (BUILD.replace('":low"', '":lwo"'), ":high does not name :low"),
    ],
)
def test_a_wrong_build_file_is_found(build: str, problem: str | None) -> None:
    """Each rule about BUILD can fail, and how a pattern is spelled is free."""
    found = find_problems(build, SOURCES)

    assert (found == []) if problem is None else any(problem in line for line in found)
