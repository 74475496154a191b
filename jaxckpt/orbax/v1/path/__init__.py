"""Paths, and the names of steps.

step         the directories of steps, by their names
"""

import os
from typing import Protocol

from etils import epath

from jaxckpt.orbax.v1.path import step as step

Path = epath.Path
PathLike = epath.Path | str | os.PathLike[str]


class PathAwaitingCreation(Protocol):
    """A directory that is made while a handler saves."""

    path: epath.Path

    async def await_creation(self) -> epath.Path:
        """Waits for the directory and returns it."""
        ...
