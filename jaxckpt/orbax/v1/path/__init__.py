"""Paths, and the names of steps."""

import os

from etils import epath

from jaxckpt.orbax.v1.path import step as step

Path = epath.Path
PathLike = epath.Path | str | os.PathLike[str]
