"""Finds the uses of Orbax in a Python file, and rewrites its imports. Runs nothing of the file.

Each name is followed, by scope, from the import that binds it to its uses, as they read after the
change:

    import orbax.checkpoint as ocp                  import jaxckpt.orbax as ocp
    import orbax.checkpoint                         from jaxckpt import orbax
    from orbax import checkpoint as ocp             from jaxckpt import orbax as ocp
    from orbax.checkpoint.experimental import v1    from jaxckpt.orbax import v1
    from orbax.checkpoint.args import JsonSave      from jaxckpt.orbax.args import JsonSave
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

DROP_IN: Final = "jaxckpt.orbax"
_ORBAX: Final = "orbax"
_EXPERIMENTAL: Final = "orbax.checkpoint.experimental"
# Where the modules of Orbax are in the drop-in; the longest name comes first. Programs import from
# private modules, too.
_PRIVATE: Final = "orbax.checkpoint._src"
_HOMES: Final = (
    (f"{_PRIVATE}.checkpoint_managers.preservation_policy", f"{DROP_IN}.policies"),
    (f"{_PRIVATE}.checkpoint_managers.save_decision_policy", f"{DROP_IN}.policies"),
    (f"{_PRIVATE}.checkpoint_managers.policy_checkpoint_info", f"{DROP_IN}.checkpoint_managers"),
    (f"{_PRIVATE}.checkpoint_managers", f"{DROP_IN}.checkpoint_managers"),
    (f"{_PRIVATE}.checkpointers", f"{DROP_IN}.checkpointers"),
    (f"{_PRIVATE}.metadata.checkpoint_info", f"{DROP_IN}.checkpoint_manager"),
    (f"{_PRIVATE}.path.atomicity", f"{DROP_IN}.atomicity"),
    (f"{_PRIVATE}.path.step", f"{DROP_IN}.step"),
    (f"{_PRIVATE}.path", f"{DROP_IN}.path"),
    (f"{_PRIVATE}.serialization", DROP_IN),
    (f"{_EXPERIMENTAL}.v1", f"{DROP_IN}.v1"),
    ("orbax.checkpoint", DROP_IN),
)
_FLAX: Final = "flax.training.orbax_utils"

_NAME: Final = re.compile(r"orbax\.checkpoint(\.\w+)*")
_FROM: Final = re.compile(r"from\s+")
_LINE: Final = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")
_OTHER: Final = re.compile(r"\borbax\.(?!checkpoint\b)\w")
_ALONE: Final = "imports something else too: give Orbax a line of its own"
_TWO: Final = "binds `orbax`, which stands for another package too: write `import ... as`"
_ODD: Final = "is written in a way that only a person can change"
_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Use:
    """A place that uses Orbax.

    Attributes:
        name: The full dotted name, as it reads after the change.
        stays: Why the change leaves this place alone; "" for a name of the drop-in.
    """

    line: int
    name: str
    stays: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An import of Orbax, and its replacement.

    Attributes:
        start: Where the statement begins in the text.
        problem: Why only a person can change this import; "" if it can be changed.
    """

    line: int
    start: int
    old: str
    new: str
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A Python file and its uses of Orbax, in the order of its lines."""

    text: str
    encoding: str
    uses: tuple[Use, ...]
    changes: tuple[Change, ...]

    def rewritten(self) -> bytes:
        """Returns the file with its imports changed and everything else as it was."""
        text = self.text
        for change in reversed(self.changes):
            text = _replace(text, change.start, change.old, change.new)
        return text.encode(self.encoding)


def parse(data: bytes) -> Program:
    """Reads the bytes of a Python file.

    Raises:
        SyntaxError, ValueError: it is not Python.
        RecursionError, MemoryError: it is nested too deeply.
    """
    encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
    text = data.decode(encoding)
    if text.encode(encoding) != data:
        raise ValueError(f"its encoding, {encoding}, does not keep every byte")
    with warnings.catch_warnings(action="ignore"):  # the compiler's, about the file
        tree = ast.parse(text)
    names = _Names(tree, text)
    names.visit(tree)
    return Program(
        text=text,
        encoding=encoding,
        uses=tuple(sorted({*names.uses})),
        changes=tuple(_changes(tree, text)),
    )


# --- what an import means after the change ------------------------------------------------------


def _moved(module: str) -> str:
    """Returns where a module is after the change; others than Orbax's stay where they are."""
    for old, new in _HOMES:
        if _is_in(module, old):
            return new + module.removeprefix(old)
    return module


def _is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _origin(node: ast.ImportFrom) -> str:
    """Returns the module from which names are imported after the change."""
    module, names = node.module or "", {alias.name for alias in node.names}
    if module == _ORBAX and "checkpoint" in names:
        return DROP_IN.partition(".")[0]
    return DROP_IN if module == _EXPERIMENTAL and names == {"v1"} else _moved(module)


def _binds_drop_in(alias: ast.alias, text: str) -> bool:
    """Returns whether `import orbax...` binds what is to become the drop-in."""
    if alias.name != _ORBAX:
        return not alias.asname and _is_in(alias.name, _HOMES[-1][0])
    uses = rf"(?<!import )(?<!from )\b{alias.asname or _ORBAX}\.checkpoint\b"
    return re.search(uses, text) is not None


def _meanings(node: ast.AST, text: str) -> list[tuple[ast.alias, str, str]]:
    """Returns each name that an import binds, and the name's meaning."""
    if isinstance(node, ast.Import):
        return [(alias, *_meaning(alias, text)) for alias in node.names]
    if not isinstance(node, ast.ImportFrom) or node.level:
        return []
    found, origin = [], _origin(node)
    for alias in node.names:
        is_drop_in = origin == "jaxckpt" and alias.name == "checkpoint"
        meaning = DROP_IN if is_drop_in else f"{origin}.{alias.name}"
        found.append((alias, alias.asname or alias.name, meaning))
    return found


def _meaning(alias: ast.alias, text: str) -> tuple[str, str]:
    """Returns the name that `import a.b` or `import a.b as c` binds, and its meaning."""
    top = alias.name.partition(".")[0]
    if _binds_drop_in(alias, text):
        return alias.asname or top, DROP_IN
    return (alias.asname, _moved(alias.name)) if alias.asname else (top, top)


# --- names --------------------------------------------------------------------------------------


class _Names(ast.NodeVisitor):
    """Collects the uses of Orbax in a file."""

    def __init__(self, tree: ast.Module, text: str) -> None:
        self.uses: list[Use] = []
        self._text = text
        self._scopes: list[tuple[ast.AST, Mapping[str, str]]] = []
        self._global = {
            name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names
        }

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Module, *_SCOPES)):
            self._scopes.append((node, self._bound(node)))
            self.generic_visit(node)
            self._scopes.pop()
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self._visit_import(node)
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and _NAME.fullmatch(node.value):  # for `import_module`
                self.uses.append(Use(line=node.lineno, name=node.value, stays="a string"))
        elif isinstance(node, (ast.Name, ast.Attribute)) and (name := self._meaning(node)):
            self._add(node.lineno, name)
        else:
            self.generic_visit(node)

    def _visit_import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias, _, meaning in _meanings(node, self._text):
            if isinstance(node, ast.Import) and _binds_drop_in(alias, self._text):
                # As `orbax` it needs what is imported: `orbax.checkpoint.args`.
                meaning += alias.name.removeprefix(_ORBAX)
            self._add(alias.lineno, meaning)

    def _add(self, line: int, name: str) -> None:
        if name.startswith(f"{_FLAX}."):
            why = "Flax's own; the drop-in takes what it returns"
            self.uses.append(Use(line=line, name=name, stays=why))
        elif name.startswith(f"{DROP_IN}."):
            self.uses.append(Use(line=line, name=name))

    def _meaning(self, node: ast.AST) -> str:
        """Returns the full dotted name of the object that an expression means; "" if unknown."""
        if isinstance(node, ast.Attribute):
            base = self._meaning(node.value)
            return base and f"{base}.{node.attr}"
        if not isinstance(node, ast.Name):
            return ""
        inner = self._scopes[-1][0]
        for scope, names in reversed(self._scopes):
            # A function in a class does not see the names of its body.
            if node.id in names and (scope is inner or not isinstance(scope, ast.ClassDef)):
                return names[node.id]
        return ""

    def _bound(self, scope: ast.AST) -> dict[str, str]:
        """Returns the meanings of the names of a scope; "" if not imported."""
        others: set[str] = set()
        imports: dict[str, str] = {}
        for node in _own_nodes(scope):
            others |= _bound_by(node)
            imports |= {name: meaning for _, name, meaning in _meanings(node, self._text)}
        if not isinstance(scope, ast.Module):
            others -= self._global
            return dict.fromkeys(others, "") | imports
        for node in ast.walk(scope):
            found = _meanings(node, self._text)
            imports |= {name: meaning for _, name, meaning in found if name in self._global}
        return dict.fromkeys(others, "") | imports


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a scope, without the contents of the scopes in it."""
    todo = [*ast.iter_child_nodes(scope)]
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, _SCOPES):
            todo += ast.iter_child_nodes(node)


def _bound_by(node: ast.AST) -> set[str]:
    """Returns the names that a node binds, if it is not an import."""
    if isinstance(node, ast.Name):
        return set() if isinstance(node.ctx, ast.Load) else {node.id}
    if isinstance(node, ast.arg):
        return {node.arg}
    name = getattr(node, "name", None)  # of a function, a class, an exception, a pattern
    return {name} if isinstance(name, str) and not isinstance(node, ast.alias) else set()


# --- imports ------------------------------------------------------------------------------------


def _changes(tree: ast.Module, text: str) -> list[Change]:
    """Returns the imports to change, in their order."""
    lines = [match.start() for match in _LINE.finditer(text)]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            statement = _Statement(node, text, lines)
            change = statement.of_import() if isinstance(node, ast.Import) else statement.of_from()
            found += [change] if change is not None else []
    return sorted(found, key=lambda change: change.start)


class _Statement:
    """An import in a text; `lines` are where the lines begin."""

    def __init__(self, node: ast.Import | ast.ImportFrom, text: str, lines: Sequence[int]) -> None:
        self._node, self._text, self._lines = node, text, lines
        self._start = self._position(node.lineno, node.col_offset)
        stop = self._position(node.end_lineno or 0, node.end_col_offset or 0)
        self._old = text[self._start : stop]

    def of_import(self) -> Change | None:
        """Returns the change of `import ...`; None if it stays."""
        whole = [alias for alias in self._node.names if _binds_drop_in(alias, self._text)]
        if whole and len(self._node.names) > 1:
            return self._change(self._old, _ALONE)
        if whole and _OTHER.search(self._text):
            return self._change(self._old, _TWO)
        if whole:
            alias = whole[0].asname
            return self._change("from jaxckpt import orbax" + (f" as {alias}" if alias else ""))
        return self._edited(
            [
                (self._of(alias), alias.name, _moved(alias.name))
                for alias in self._node.names
                if alias.asname
            ]
        )

    def of_from(self) -> Change | None:
        """Returns the change of `from ... import ...`; None if it stays."""
        node = self._node
        if not isinstance(node, ast.ImportFrom) or node.level:
            return None
        module, new = node.module or "", _origin(node)
        at = found.end() if (found := _FROM.match(self._old)) else 0
        edits = [(at, module, new)]
        if module == _ORBAX and new != module:
            if len(node.names) > 1:
                return self._change(self._old, _ALONE)
            [alias] = node.names
            name = _ORBAX if alias.asname else f"{_ORBAX} as {alias.name}"
            edits.append((self._of(alias), alias.name, name))
        return self._edited(edits)

    def _edited(self, edits: Sequence[tuple[int, str, str]]) -> Change | None:
        """Returns the statement with some names replaced at their positions; None if none is."""
        new = self._old
        for at, name, other in sorted(edits, reverse=True):
            if name != other and not new.startswith(name, at):
                return self._change(self._old, _ODD)
            new = _replace(new, at, name, other)
        return None if new == self._old else self._change(new)

    def _change(self, new: str, problem: str = "") -> Change:
        return Change(
            line=self._node.lineno, start=self._start, old=self._old, new=new, problem=problem
        )

    def _of(self, alias: ast.alias) -> int:
        return self._position(alias.lineno, alias.col_offset) - self._start

    def _position(self, line: int, column: int) -> int:
        """Returns where a place is in the text; columns count bytes of UTF-8."""
        start = self._lines[line - 1]
        return start + len(self._text[start : start + column].encode()[:column].decode())


def _replace(text: str, start: int, old: str, new: str) -> str:
    return text[:start] + new + text[start + len(old) :]
