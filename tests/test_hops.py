"""Sets ceilings on the way from a call to its effect and on the code, so that neither just grows.

A measurement counts the lines of all functions of the package that a call enters, how deep they are
nested, and the storage calls, each of which is a request on an object store. It leaves out
comprehensions. A change that raises a ceiling names an equal cut in another.
"""

from __future__ import annotations

import ast
import statistics
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import CodeType, FrameType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt.storage import LocalStorage, _limit

PACKAGE = Path(jaxckpt.__file__).parent
OURS = f"{PACKAGE}/"
STORAGE = f"{OURS}storage/_local.py"
VERBS = {f"LocalStorage.{name}" for name in vars(LocalStorage) if not name.startswith("_")}
# Entries of a measurement that count nothing a reader has to follow.
COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<module>")


class Nesting(threading.local):
    """How many of our functions, and of the storage's calls, a thread is in."""

    depth = 0
    verbs = 0


@dataclass
class Hops:
    """Counts what a call enters."""

    functions: set[CodeType] = field(default_factory=set)
    depth: int = 0
    storage_calls: int = 0
    _nesting: Nesting = field(default_factory=Nesting)

    @property
    def lines(self) -> int:
        """The lines of all functions, from the first to the last."""
        return sum(
            max(line for *_, line in code.co_lines() if line) - code.co_firstlineno + 1
            for code in self.functions
        )

    def count(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(OURS) or code.co_name in COMPREHENSIONS:
            return
        here, is_verb = self._nesting, code.co_filename == STORAGE and code.co_qualname in VERBS
        if event == "call":
            self.functions.add(code)
            here.depth += not code.co_name.startswith("<")
            self.depth = max(self.depth, here.depth)
            # A storage may call itself: that is one request.
            self.storage_calls += is_verb and not here.verbs
            here.verbs += is_verb
        elif event == "return":
            here.depth -= not code.co_name.startswith("<")
            here.verbs -= is_verb


def hops_of(call: Callable[[], object]) -> Hops:
    hops = Hops()
    threading.setprofile(hops.count)
    sys.setprofile(hops.count)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return hops


@pytest.fixture
def verbs(ram_path, mesh, monkeypatch):
    """The calls to measure, on a tree of three leaves; each has been made before."""
    monkeypatch.delitem(sys.modules, "IPython", raising=False)  # else a bar may be seen
    monkeypatch.setattr(_limit, "mounts", dict)  # as on a machine without network file systems
    _limit.ask.cache_clear()
    tree = {
        "w": jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("x", "y"))),
        "b": jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("x"))),
        "step": 3,
    }
    like = jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            if isinstance(x, jax.Array)
            else x
        ),
        tree,
    )

    def manage(name, **options):
        manager = jaxckpt.CheckpointManager(ram_path / name, **options)
        manager.save(1, tree)
        manager.close()

    numbers = count()
    jaxckpt.save(ram_path / "warm", tree)
    assert np.array_equal(jaxckpt.restore(ram_path / "warm", like)["w"], tree["w"])
    manage("warm run")
    manage("warm tiers", local=ram_path / "warm disk")
    with jaxckpt.CheckpointManager(ram_path / "warm run") as manager:
        manager.restore(like)
        yield {
            "save again": lambda: jaxckpt.save(ram_path / "a", tree),
            "manager open + save": lambda: manage(f"run {next(numbers)}"),
            "open + save, local": lambda: manage(
                f"{(n := next(numbers))}", local=ram_path / f"disk {n}"
            ),
            "restore(path, like)": lambda: jaxckpt.restore(ram_path / "warm", like),
            "manager.restore(like)": lambda: manager.restore(like),
            "open": lambda: jaxckpt.open(ram_path / "warm"),
            "verify": lambda: jaxckpt.verify(ram_path / "warm"),
        }
    _limit.ask.cache_clear()


# Lines followed, depth, storage calls.
CEILINGS = {
    "save again": (1732, 11, 20),
    "manager open + save": (3930, 15, 41),
    "open + save, local": (6392, 16, 122),
    "restore(path, like)": (2256, 14, 8),
    "manager.restore(like)": (2783, 18, 10),
    "open": (585, 10, 5),
    "verify": (1894, 15, 17),
}


def test_calls_stay_below_their_ceilings(verbs):
    found = {}
    for verb, call in verbs.items():
        # The threads of a manager may do a little more, so the least of three counts.
        tries = 3 if "open + save" in verb else 1
        hops = min((hops_of(call) for _ in range(tries)), key=lambda one: one.lines)
        found[verb] = hops.lines, hops.depth, hops.storage_calls

    assert found.keys() == CEILINGS.keys()
    above = {
        verb: counts
        for verb, counts in found.items()
        if any(n > most for n, most in zip(counts, CEILINGS[verb], strict=True))
    }
    assert above == {}


def test_the_count_sees_what_is_called(tmp_path):
    """A control: one storage call from here is one function, one deep."""
    hops = hops_of(lambda: LocalStorage().kind(str(tmp_path)))

    assert LocalStorage.kind.__code__ in hops.functions
    assert hops.storage_calls == 1
    assert hops.depth >= 1
    assert 10 <= hops.lines < 60


# --- size ------------------------------------------------------------------------------------

# Lines, and lines of code, by folder. Those of the core are all but `APART`.
APART = {"cli", "integrations", "pages", "testing", "_convert", "orbax"}
FOLDERS = {
    ".": (839, 446),
    "_convert": (1055, 688),
    "_core": (2663, 1688),
    "_disk": (5161, 3621),
    "_inspect": (1211, 821),
    "_progress": (223, 167),
    "_restore": (2278, 1693),
    "_run": (10436, 7233),
    "_save": (2358, 1669),
    "cli": (4682, 3363),
    "format": (3277, 2149),
    "integrations": (478, 264),
    "multihost": (970, 604),
    "orbax": (6295, 3863),
    "pages": (2407, 1698),
    "storage": (4207, 2878),
    "testing": (985, 641),
}


def sources(folder: str = "") -> list[str]:
    """Returns the modules of a folder, "." for those in none; by default, those of the core."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        top = parts[0] if len(parts) > 1 else "."
        if top == folder or (not folder and top not in APART):
            found.append(path.read_text("utf-8"))
    return found


def is_docstring(node: ast.AST) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


def code_lines(source: str) -> int:
    """Counts the lines that are neither blank, nor comments, nor docstrings."""
    prose = {
        line
        for node in ast.walk(ast.parse(source))
        if is_docstring(node)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    lines = [line.strip() for line in source.splitlines()]
    code = [line for i, line in enumerate(lines, 1) if line and i not in prose]
    return sum(not line.startswith("#") for line in code)


def test_the_package_stays_small():
    found = {
        folder: (
            sum(one.count("\n") for one in sources(folder)),
            sum(map(code_lines, sources(folder))),
        )
        for folder in {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*/*.py")}
        | {"."}
    }

    assert found.keys() == FOLDERS.keys()
    above = {
        folder: size
        for folder, size in found.items()
        if any(map(int.__gt__, size, FOLDERS[folder]))
    }
    assert above == {}


def test_functions_stay_short():
    """The median function has a body of 5 lines, and nine of ten have 16 or fewer."""
    lengths = sorted(
        (rest[-1].end_lineno or 0) - rest[0].lineno + 1
        for source in sources()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        if (rest := [n for n in node.body if not is_docstring(n)])
    )

    assert statistics.median(lengths) <= 5
    assert lengths[len(lengths) * 9 // 10] <= 16


def test_classes_and_signatures_stay_small():
    """At most 8 classes have more than 15 methods, and 6 functions more than 8 parameters."""
    nodes = [
        node
        for folder in FOLDERS
        for source in sources(folder)
        for node in ast.walk(ast.parse(source))
    ]
    large = [
        node.name
        for node in nodes
        if isinstance(node, ast.ClassDef)
        and sum(isinstance(one, ast.FunctionDef) for one in node.body) > 15
    ]
    wide = [
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        for names in [[one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)]]
        if len({*names} - {"self", "cls"}) > 8
    ]
    assert len(large) <= 8, large
    assert len(wide) <= 6, wide
