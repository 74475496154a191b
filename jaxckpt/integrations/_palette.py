"""The colours of all drawings, one for each meaning; people who see few colours tell them apart.

They are Paul Tol's "vibrant" ones: none is so light or so dark that it is lost on white or on
black. What matters has a shape of its own, too.
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

# In the order in which they come. Data that moves between host and disk is blue, what a training
# loop waits for orange, and what makes it visible teal.
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
    """The colour of each phase of saves and restores, in the order in which phases come.

    Example:
        >>> list(phase_colours(["commit", "mine", "write", "write"]))
        ['write', 'commit', 'mine']
    """
    found = dict.fromkeys(names)
    known = {name: colour for name, colour in _PHASES.items() if name in found}
    return known | dict(zip((n for n in found if n not in known), cycle(_FURTHER), strict=False))


def legend(colours: Mapping[str, str]) -> dict[str, str]:
    """What each colour means: phases that share one, of a save and of a restore, together."""
    meanings: dict[str, list[str]] = {}
    for name, colour in colours.items():
        meanings.setdefault(colour, []).append(name)
    return {colour: ", ".join(names) for colour, names in meanings.items()}
