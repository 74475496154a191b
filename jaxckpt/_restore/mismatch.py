"""Words the error about a target that does not fit: a table, and what to try."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from jaxckpt._core.select import Globs
from jaxckpt._core.text import counted
from jaxckpt.errors import Difference, printable
from jaxckpt.format.tree import Path, parse_path, path_text

# The pattern and replacement of a `rename`; and the part of the tree that is all that was wanted.
_Rule = tuple[str, str, str]

_MOST_LINES: Final = 200
_SCALARS: Final = ("int", "float", "bool", "str")
_MOST_RULES: Final = 20
_NO_NUMBERS: Final = {"empty", "str", "bytes"}
_WIDEST: Final = 60  # of a column; a longer name moves only its own line


def text(differences: Sequence[Difference], where: str, only: Globs, resize: bool) -> str:
    """Returns the message of a `TreeMismatch`; `only` is given if it selects nothing wanted."""
    do = "does" if len(differences) == 1 else "do"
    lines = [f"{counted(len(differences), 'leaf')} of the target {do} not fit {where}"]
    lines += table(differences)
    if only is not None:
        part = (only if isinstance(only, str) else next(iter(only), "")).rstrip("/*")
        lines.append(f"`only` takes whole paths, and selects nothing of the target. {_of(part)}")
    elif rule := _best_rule(differences):
        (pattern, replacement, part), fits = rule
        rename = f"Were names changed? rename={ {pattern: replacement}!r} lets {fits} fit."
        lines.append(_of(part) if part else rename)
    if any(d.leaf == "" and d.wanted in _SCALARS for d in differences):
        lines.append("`like` is a single value. To choose a step, name it, as in step=20.")
    ways = ", ".join(_ways(differences, resize))
    lines.append(f"Change the target, or restore around them: {ways}.")
    return "\n".join(lines)


def _ways(differences: Sequence[Difference], resize: bool) -> list[str]:
    """Returns the arguments of a restore by which some of the leaves could be restored."""
    misfits = [(d.wanted, d.saved) for d in differences if d.wanted and d.saved]
    parts = [[text.partition("[")[::2] for text in pair] for pair in misfits]
    is_lost = any(d.wanted and not d.saved for d in differences)
    is_left = any(d.saved and d.wanted in (None, "empty") for d in differences)
    is_cast = any(a != b and _NO_NUMBERS.isdisjoint((a, b)) for (a, _), (b, _) in parts)
    is_sized = any(a and b and a != b for (_, a), (_, b) in parts)
    ways = {
        "skip=[...]": misfits,
        "rename={...}": is_lost and is_left,
        "missing='keep' for leaves that were not saved": is_lost,
        "extra='ignore' for leaves that are not wanted": is_left,
        "None in the target where None was saved": any(b == "empty" for _, b in misfits),
        "resize=True for arrays of other sizes": is_sized and not resize,
        "dtype=... for a cast from float to int, int to bool or signed to unsigned": is_cast,
    }
    return [text for text, applies in ways.items() if applies]


def _of(part: str) -> str:
    return f"To restore only the part {part!r}: jaxckpt.open(path)[{part!r}].restore(like)."


def table(differences: Sequence[Difference]) -> list[str]:
    """Returns a line for each difference, in aligned columns."""
    rows = [(printable(d.leaf) or "(the tree itself)", d.wanted, d.saved) for d in differences]
    rows = [(name, wanted or "nothing", saved or "nothing") for name, wanted, saved in rows]
    first, second = (
        max((len(row[i]) for row in rows[:_MOST_LINES] if len(row[i]) <= _WIDEST), default=0)
        for i in (0, 1)
    )
    lines = [f"  {a:<{first}}   wanted {b:<{second}}   saved {c}" for a, b, c in rows[:_MOST_LINES]]
    more = len(rows) - _MOST_LINES
    return [*lines, *([f"  ... and {more} more"] if more > 0 else [])]


def _best_rule(differences: Sequence[Difference]) -> tuple[_Rule, str] | None:
    """Returns the change of names that lets the most leaves fit, and how many these are."""
    lost = {d.leaf: d.wanted for d in differences if d.wanted and not d.saved}
    extra = {d.leaf: d.saved for d in differences if d.saved and not d.wanted}
    best, most = None, 0
    for rule in _rules(list(lost)[:_MOST_LINES], list(extra)[:_MOST_LINES]):
        new = {name: re.sub(rule[0], rule[1], name, count=1) for name in extra}
        fits = sum(lost.get(new[name]) == extra[name] for name in extra)
        if fits > most and len(set(new.values())) == len(extra):
            best, most = rule, fits
    return None if best is None else (best, counted(most, "leaf"))


def _rules(lost: Sequence[str], extra: Sequence[str]) -> list[_Rule]:
    """Returns the most common ways to make a lost name of an extra one."""
    alike: dict[object, list[Path]] = {}
    for new in filter(None, map(parse_path, lost)):
        for key in (new[-1], new[:-1]):  # text and a tuple: never equal
            alike.setdefault(key, []).append(new)
    found: Counter[_Rule] = Counter()
    for old in filter(None, map(parse_path, extra)):
        for new in [*alike.get(old[-1], ()), *alike.get(old[:-1], ())]:
            found[_rule(old, new)] += 1
    return sorted(found, key=lambda rule: (-found[rule], rule[0].count("/")))[:_MOST_RULES]


def _rule(old: Path, new: Path) -> _Rule:
    """Returns the change of the names in which two paths differ."""
    begin = _shared(old, new)
    end = _shared(old[begin:][::-1], new[begin:][::-1])
    was, now = (path_text(path[begin : len(path) - end]) for path in (old, new))
    start = r"\b" if begin else "^"
    if not was:
        head = f"{path_text(old[begin - 1 : begin])}/" if begin else ""
        return start + re.escape(head), f"{head}{now}/", ""
    if not now:
        return f"{start}{re.escape(was)}/", "", "" if begin else was
    return rf"\b{re.escape(was)}\b", now.replace("\\", r"\\"), ""


def _shared(a: Path, b: Path) -> int:
    """Returns how many names two paths have in common at the beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
