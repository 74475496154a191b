"""Prints the oldest release of each dependency that pyproject.toml allows, for pip."""

from __future__ import annotations

import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"].values()
for wanted in [*project["dependencies"], *(one for extra in extras for one in extra)]:
    if ">=" in wanted:
        print(wanted.replace(">=", "=="))
