"""`BUILD` names the layers of the package, and the actual imports follow it."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import resolve_name
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
TENSORSTORE_MODULE = "jaxckpt/storage/_arrays.py"
DROP_IN = "jaxckpt/orbax/"  # uses the namespace, as programs do
# What the drop-in uses of the core that is not public: items of free names, the steps of a run that
# any number of managers read, the deletion of one checkpoint, metadata inside a tree, a manager's
# saving half, and a save into its run beside it.
BELOW_DROP_IN = {
    "jaxckpt._disk.find",
    "jaxckpt._disk.found",
    "jaxckpt._disk.commit",
    "jaxckpt._disk.removal",
    "jaxckpt._inspect.open",
    "jaxckpt._run.facts",
    "jaxckpt._run.index",
    "jaxckpt._run.items",
    "jaxckpt._run.manager",
    "jaxckpt._save.save",
    "jaxckpt._save.snapshot",
}


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


def package_of(path: str) -> str:
    name = module_name(path)
    return name if path.endswith("__init__.py") else name.rpartition(".")[0]


def imported_names(path: str, source: str, modules: Collection[str]) -> Iterator[str]:
    """The full dotted name of everything that a file imports, in functions and for types too.

    A string counts as an import: if it is the name of a module, and, in a file that imports by
    strings, if it is the end of such a name, as in a table of names and their homes.
    """
    tree, package = ast.parse(source), package_of(path)
    nodes = [*ast.walk(tree)]
    by_string = any(imports_by_string(node) for node in nodes)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            ends = (node.value, f"{package}.{node.value.lstrip('.')}" if by_string else "")
            yield from (name for name in ends if "." in name and name in modules)


def imports_by_string(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


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
    imports: dict[str, set[str]] = {name: set() for name in modules}
    for path, source in sources.items():
        for name in imported_names(path, source, modules):
            if name.split(".")[0] == "tensorstore" and path != TENSORSTORE_MODULE:
                problems.append(f"{path} imports tensorstore; only {TENSORSTORE_MODULE} may")
            if name.split(".")[0] != "jaxckpt":
                continue
            module = imported_module(name, modules)
            if module == "jaxckpt" and not path.startswith(DROP_IN):
                problems.append(f"{path} imports {name} from the namespace; name its module")
                continue
            if module != module_name(path):
                imports[module_name(path)].add(module)
            mine, theirs = owners[path], owners[modules[module]]
            if theirs != mine and theirs not in used.setdefault(mine, set()):
                used[mine].add(theirs)
                if mine in targets and theirs not in targets[mine].deps:
                    problems.append(f"{path} imports {module}: :{mine} does not name :{theirs}")

    below: set[str] = set()
    for target in targets.values():
        problems += [
            f":{target.name} names :{dep}, which is not below it"
            for dep in sorted(target.deps - below)
        ]
        below.add(target.name)
        problems += [
            f":{target.name} names :{dep} and does not import it"
            for dep in sorted(target.deps - used[target.name])
        ]
        problems += [
            f":{target.name} names {pattern}, which matches no file"
            for pattern in target.srcs
            if not any(PurePosixPath(path).match(pattern) for path in sources)
        ]
    problems += cycle("targets", {t.name: t.deps for t in targets.values()})
    return problems + cycle("modules", imports)


def cycle(what: str, graph: Mapping[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [f"the {what} form a cycle: {error.args[1]}"]
    return []


def test_build_names_exactly_the_real_imports() -> None:
    """Every module is in one target, and `deps` are what is imported, neither more nor less."""
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
        for path in (ROOT / "jaxckpt").rglob("*.py")
    }

    problems = find_problems((ROOT / "BUILD").read_text("utf-8"), sources)

    assert not problems, "\n".join(problems)


def test_the_drop_in_uses_the_public_names() -> None:
    """`jaxckpt.orbax` imports no other private module than the few listed, and all of those."""
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
        for path in (ROOT / "jaxckpt").rglob("*.py")
    }
    modules = {module_name(path) for path in sources}

    used = {
        imported_module(name, dict.fromkeys(modules, ""))
        for path, source in sources.items()
        if path.startswith(DROP_IN)
        for name in imported_names(path, source, modules)
        if name.startswith("jaxckpt._")
    }

    assert used == BELOW_DROP_IN


def private_names(tree: ast.AST) -> set[str]:
    """The private attributes, methods and functions that a module defines."""
    made: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            made.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):  # a field
            made.add(node.target.id)
    return {name for name in made if name.startswith("_") and not name.startswith("__")}


def private_uses(sources: Mapping[str, str]) -> list[str]:
    """Where the drop-in reads a private attribute of an object of the core."""
    trees = {path: ast.parse(source) for path, source in sources.items()}
    own = {
        name for path in trees if path.startswith(DROP_IN) for name in private_names(trees[path])
    }
    core = {
        name
        for path in trees
        if not path.startswith(DROP_IN)
        for name in private_names(trees[path])
    }
    return [
        f"{path}: {ast.unparse(node)}"
        for path, tree in trees.items()
        if path.startswith(DROP_IN)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls")
        if node.attr in core - own
    ]


def test_the_drop_in_uses_no_private_member_of_the_core() -> None:
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
        for path in (ROOT / "jaxckpt").rglob("*.py")
    }

    assert private_uses(sources) == []


@pytest.mark.parametrize(
    "core",
    ["class M:\n def __init__(self): self._saver = 1", "class M:\n _saver: int", "def _saver(): 1"],
)
def test_a_private_member_that_the_drop_in_uses_is_found(core: str) -> None:
    planted = {"jaxckpt/m.py": core, "jaxckpt/orbax/a.py": "print(manager._saver.ended)"}

    assert private_uses(planted) == ["jaxckpt/orbax/a.py: manager._saver"]


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
        ({"jaxckpt/errors.py": "import_module('jaxckpt.storage')"}, ":low does not name :high"),
        ({"jaxckpt/errors.py": "NAME = 'jaxckpt.storage._arrays'"}, ":low does not name :high"),
        ({"jaxckpt/errors.py": "__import__('x'); HOME = {'S': 'storage'}"}, ":low does not name"),
        (
            {
                "jaxckpt/storage/a.py": "def f(): from jaxckpt.storage import b",
                "jaxckpt/storage/b.py": "from jaxckpt.storage.a import f",
            },
            "the modules form a cycle",
        ),
        (
            {
                "jaxckpt/storage/a.py": "importlib.import_module('.b', __package__)",
                "jaxckpt/storage/b.py": "import jaxckpt.storage.a",
            },
            "the modules form a cycle",
        ),
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
        (
            "".join(reversed(BUILD.splitlines(keepends=True))),
            ":high names :low, which is not below",
        ),
    ],
)
def test_a_wrong_build_file_is_found(build: str, problem: str | None) -> None:
    """Each rule about BUILD can fail, and how a pattern is spelled is free."""
    found = find_problems(build, SOURCES)

    assert (found == []) if problem is None else any(problem in line for line in found)
