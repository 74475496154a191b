"""The colours of all drawings, one per meaning, safe for colour-blind readers.

They are Paul Tol's "vibrant" scheme, visible on white and on black. Important marks also differ in
shape. Shardings have a hue for each axis of the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import cycle
from typing import Final

Colour = tuple[float, float, float]  # red, green, blue, from 0 to 1

BLUE: Final = "#0077bb"
ORANGE: Final = "#ee7733"
TEAL: Final = "#009988"
RED: Final = "#cc3311"
CYAN: Final = "#33bbee"
MAGENTA: Final = "#ee3377"
GREY: Final = "#999999"

INK: Final = "#767676"  # text and lines, legible on white and on black
NEUTRAL: Final[Colour] = (0.75, 0.75, 0.75)
AXES: Final = (BLUE, ORANGE, TEAL, MAGENTA, CYAN, RED)  # of a mesh, in order

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
    "copy": MAGENTA,
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


def axis_hue(axis: int) -> str:
    """Returns the colour of a mesh axis, by its number."""
    return AXES[axis % len(AXES)]


def tint(axis: int, along: float) -> Colour:
    """Returns the colour at a place along a mesh axis, from light at 0.0 to dark at 1.0.

    Example:
        >>> [round(channel, 2) for channel in tint(0, 1.0)]
        [0.2, 0.57, 0.79]
    """
    hue, weight = axis_hue(axis), 0.15 + 0.65 * along
    red, green, blue = (1 - weight * (1 - int(hue[i : i + 2], 16) / 255) for i in (1, 3, 5))
    return red, green, blue


def legend(colours: Mapping[str, str]) -> dict[str, str]:
    """Returns the phases of each colour; a save's and a restore's phase may share one."""
    meanings: dict[str, list[str]] = {}
    for name, colour in colours.items():
        meanings.setdefault(colour, []).append(name)
    return {colour: ", ".join(names) for colour, names in meanings.items()}
