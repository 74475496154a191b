"""The colours of all drawings, one per meaning, safe for colour-blind readers.

They are Paul Tol's "vibrant" scheme, visible on white and on black. Important marks also differ in
shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import cycle
from typing import Final

BLUE: Final = "#0077bb"
ORANGE: Final = "#ee7733"
TEAL: Final = "#009988"
RED: Final = "#cc3311"
CYAN: Final = "#33bbee"
MAGENTA: Final = "#ee3377"
GREY: Final = "#999999"

KEPT: Final = BLUE
BEST: Final = ORANGE
PINNED: Final = TEAL
BAD: Final = RED

# In chronological order. Blue moves data between host and disk, orange blocks the training loop,
# teal makes the data visible.
_PHASES: Final = {
    "snapshot": ORANGE,
    "wait": GREY,
    "find": MAGENTA,
    "read": BLUE,
    "write": BLUE,
    "place": TEAL,
    "meet": CYAN,
    "commit": TEAL,
}
_FURTHER: Final = (MAGENTA, RED, ORANGE, TEAL)


def phase_colours(names: Iterable[str]) -> dict[str, str]:
    """Returns the colour of each phase of saves and restores, in chronological order.

    Example:
        >>> list(phase_colours(["commit", "mine", "write", "write"]))
        ['write', 'commit', 'mine']
    """
    found = dict.fromkeys(names)
    known = {name: colour for name, colour in _PHASES.items() if name in found}
    return known | dict(zip((n for n in found if n not in known), cycle(_FURTHER), strict=False))


def legend(colours: Mapping[str, str]) -> dict[str, str]:
    """Returns the phases of each colour; a save's and a restore's phase may share one."""
    meanings: dict[str, list[str]] = {}
    for name, colour in colours.items():
        meanings.setdefault(colour, []).append(name)
    return {colour: ", ".join(names) for colour, names in meanings.items()}
